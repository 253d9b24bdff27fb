"""The parts of the config -> corpora of one split: which file reads which kind of source."""

from pathlib import Path
from typing import Literal

from jaxpar.config.data import TEXT_SOURCES, DataConfig, SourceConfig
from jaxpar.data.cache import Progress, cache_entry, file_facts
from jaxpar.data.corpus import Corpus
from jaxpar.data.encode import encode_corpus
from jaxpar.data.errors import DataError
from jaxpar.data.files import expand
from jaxpar.data.jsonl import SUFFIXES, read_jsonl
from jaxpar.data.synthetic import synthetic_corpus
from jaxpar.data.text import read_stdlib, read_text, stdlib_files, stdlib_name
from jaxpar.data.token_files import token_corpus, token_paths
from jaxpar.data.tokenizer import Tokenizer, load_tokenizer

Split = Literal["train", "eval"]


def open_parts(
    config: DataConfig, *, seed: int, vocab_size: int, split: Split, cache_dir: Path | None, progress: Progress | None
) -> tuple[Tokenizer, int | None, list[Corpus | None]]:
    """(tokenizer, end-of-document id, corpus of each part; None: this part of a mixture holds nothing out)."""
    if not config.parts:
        raise DataError("data: no source: set data.source, or several under data.mixture")
    tokenizer = load_tokenizer(config.tokenizer, config.eod_token)
    has_text = any(part.source in TEXT_SOURCES for part in config.parts)
    # Without text and without a word about it, token files are taken as they are: nothing says what ends a document in them.
    eod = tokenizer.eod if has_text or config.eod_token is not None or config.tokenizer != "bytes" else None
    needed = max(tokenizer.vocab_size if has_text else 0, 0 if eod is None else eod + 1)
    if needed > vocab_size:
        raise DataError(
            f"model.vocab_size {vocab_size} is too small for tokenizer {tokenizer.name} (end of document {eod}): set at least {needed}"
        )
    reader = _Reader(config, tokenizer, eod, seed, vocab_size, cache_dir, progress)
    corpora = [reader.part(part, i, split) for i, part in enumerate(config.parts)]
    return tokenizer, eod, corpora


class _Reader:
    """What all parts share."""

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Tokenizer,
        eod: int | None,
        seed: int,
        vocab_size: int,
        cache_dir: Path | None,
        progress: Progress | None,
    ):
        self.config, self.tokenizer, self.eod, self.seed = config, tokenizer, eod, seed
        self.vocab_size, self.cache_dir, self.progress = vocab_size, cache_dir, progress

    def part(self, part: SourceConfig, number: int, split: Split) -> Corpus | None:
        """The corpus of one part and split, without empty documents, long ones cut if asked for."""
        separate = part.eval_path is not None
        fraction = 0.0 if separate else self.config.eval_fraction
        if split == "eval" and fraction == 0 and not separate:
            return None
        paths = part.eval_path if separate and split == "eval" else part.path
        corpus = self._read(part, paths, number).nonempty()
        if part.piece_tokens:
            corpus = corpus.cut(part.piece_tokens)
        if fraction == 0:
            return corpus
        return corpus.kept(fraction) if split == "train" else corpus.held_out(fraction)

    def _read(self, part: SourceConfig, paths: str | tuple[str, ...] | None, number: int) -> Corpus:
        if part.source not in ("synthetic", "stdlib") and not paths:
            raise DataError(f"data.path: source {part.source!r} reads files: set path to files, folders or patterns")
        if part.source == "synthetic":
            return synthetic_corpus((self.seed << 16) + number, part.num_tokens, self.vocab_size)
        if part.source == "stdlib":
            folder, files = stdlib_files()
            documents, name = read_stdlib(folder, files), stdlib_name()
        elif part.source == "tokens":
            files = token_paths(paths or ())
            entry = cache_entry(self.cache_dir, "tokens", [_facts(files), part.dtype, self.eod])
            return token_corpus(files, part.dtype, self.eod, self.vocab_size, entry, self.progress)
        elif part.source == "jsonl":
            files = expand(paths or (), SUFFIXES)
            documents, name = read_jsonl(files, part.field, part.encoding_errors), _name(files)
        else:
            files = expand(paths or ())
            documents, name = read_text(files, part.encoding_errors), _name(files)
        facts = [file_facts(files), part.source, part.field, part.encoding_errors, self.tokenizer.fingerprint()]
        return encode_corpus(name, documents, self.tokenizer, cache_entry(self.cache_dir, part.source, facts), self.progress)


def _facts(files: list[Path]) -> list[list[object]]:
    """Facts of token files and of the indexes beside them."""
    return file_facts([*files, *(index for file in files if (index := file.with_suffix(".idx")).is_file())])


def _name(files: list[Path]) -> str:
    return str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more files"
