"""`data:` where tokens come from and how rows are cut. What the keys ask of each other is in `check_sections.py`."""

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from jaxpar.config.base import Section

SourceName = Literal["stdlib", "text", "jsonl", "tokens", "synthetic"]
FILE_SOURCES = ("text", "jsonl", "tokens")  # read files of the user
TEXT_SOURCES = ("stdlib", "text", "jsonl")  # pass through the tokenizer
Paths = str | tuple[str, ...]


class SourceFields(Section):
    """What describes one source; the same keys stand under `data:` and under each part of `data.mixture:`."""

    path: Paths | None = None  # files, folders or patterns (text, jsonl, tokens)
    eval_path: Paths | None = None  # files held out whole; then `path` is all for training
    field: str = "text"  # jsonl: the field that holds the text
    dtype: Literal["uint16", "uint32"] = "uint16"  # tokens: width of a headerless file; .bin with .idx says its own
    encoding_errors: Literal["strict", "replace"] = "strict"  # invalid UTF-8: stop, or put U+FFFD
    num_tokens: PositiveInt = 1_000_000  # synthetic: length of the stream
    piece_tokens: PositiveInt | None = None  # cut longer documents into documents of this length (shuffling, held-out part)


class SourceConfig(SourceFields):
    """One source of documents in a mixture."""

    source: SourceName
    weight: PositiveFloat = 1.0  # share of the samples, normalised over the mixture


class DataConfig(SourceFields):
    """Documents are shuffled, concatenated and cut into rows of seq_len + 1 tokens (inputs and targets)."""

    source: SourceName | None = None  # one source by name; several under `mixture`
    mixture: tuple[SourceConfig, ...] = ()
    tokenizer: str = "bytes"  # or the path of a tokenizer.json
    eod_token: int | str | None = None  # end of document, by id or name; None: the tokenizer's own
    seq_len: PositiveInt = Field(examples=[256])
    global_batch_size: PositiveInt = Field(examples=[16])  # rows (sequences) an optimizer step, over all devices
    isolate_documents: bool = True  # attention never crosses a document in a packed row; positions restart
    eval_fraction: float = Field(default=0.02, ge=0.0, lt=1.0)  # documents held out, by hash of their content; 0: none
    prefetch: PositiveInt = 2  # batches prepared ahead

    @property
    def parts(self) -> tuple[SourceConfig, ...]:
        """The sources as one mixture, of one part when `source` is set."""
        if self.source is None:
            return self.mixture
        shared = {name: getattr(self, name) for name in SourceFields.model_fields}
        return (SourceConfig(source=self.source, **shared),)

    @property
    def has_eval(self) -> bool:
        """Whether anything is held out for evaluation."""
        return self.eval_fraction > 0 or any(part.eval_path for part in self.parts)
