"""`data:` where tokens come from and how rows are cut."""

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from jaxpar.config.base import Section

SourceName = Literal["stdlib", "text", "jsonl", "tokens", "synthetic"]


class SourceConfig(Section):
    """One source of documents."""

    source: SourceName
    path: str | tuple[str, ...] | None = None  # files or folders (text, jsonl, tokens); patterns allowed
    weight: PositiveFloat = 1.0  # share in a mixture, normalised over its parts
    field: str = "text"  # jsonl: the field that holds the text
    dtype: Literal["uint16", "uint32"] = "uint16"  # tokens: width of a headerless file; .bin with .idx says its own
    encoding_errors: Literal["strict", "replace"] = "strict"  # invalid UTF-8: stop, or put U+FFFD
    num_tokens: PositiveInt = 1_000_000  # synthetic: length of the stream


class DataConfig(Section):
    """Documents are shuffled, concatenated and cut into rows of seq_len + 1 tokens (inputs and targets)."""

    source: SourceName | None = None  # one source by name; several under `mixture`
    path: str | tuple[str, ...] | None = None
    field: str = "text"
    dtype: Literal["uint16", "uint32"] = "uint16"
    encoding_errors: Literal["strict", "replace"] = "strict"
    num_tokens: PositiveInt = 1_000_000
    mixture: tuple[SourceConfig, ...] = ()
    tokenizer: str = "bytes"  # or the path of a tokenizer.json
    seq_len: PositiveInt
    global_batch_size: PositiveInt  # rows (sequences) an optimizer step, over all devices
    isolate_documents: bool = True  # attention never crosses a document in a packed row; positions restart
    eval_fraction: float = Field(0.02, ge=0.0, lt=1.0)  # documents held out, by hash of their content
    prefetch: PositiveInt = 2  # batches prepared ahead
