"""Text <-> token ids: bytes, or a local tokenizer.json."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, Integer

from jaxpar.data.errors import DataError

# End of document in GPT-2/NeoX/Qwen, Llama 1-2/Mistral/T5, Llama 3, Gemma, BERT-like tokenizers; the first found is taken.
EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<EOS>", "[EOS]", "<|eod|>", "<eod>")


@runtime_checkable
class Tokenizer(Protocol):
    """What the data pipeline and sampling need of a tokenizer."""

    name: str
    vocab_size: int  # ids are below this
    eod: int  # follows every document
    storage_dtype: type[np.unsignedinteger]  # holds any id that `encode_many` returns

    def encode_many(self, texts: Sequence[bytes]) -> list[Integer[np.ndarray, " _"]]:
        """Ids of valid UTF-8 texts, without special tokens."""
        ...

    def encode(self, text: str) -> Int[np.ndarray, " N"]: ...

    def decode(self, ids: Sequence[int] | Integer[np.ndarray, " N"]) -> str: ...

    def fingerprint(self) -> str: ...


class ByteTokenizer:
    """A token a byte; id 256 ends a document."""

    name = "bytes"
    vocab_size = 257
    storage_dtype = np.uint8  # the end of a document is added when a row is cut, never stored

    def __init__(self, eod: int = 256):
        self.eod = eod

    def encode_many(self, texts: Sequence[bytes]) -> list[Integer[np.ndarray, " _"]]:
        return [np.frombuffer(text, np.uint8) for text in texts]

    def encode(self, text: str) -> Int[np.ndarray, " N"]:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int] | Integer[np.ndarray, " N"]) -> str:
        """Text of the bytes among `ids`; what is not valid UTF-8 shows as U+FFFD."""
        return bytes(int(i) for i in ids if 0 <= int(i) < 256).decode(errors="replace")

    def fingerprint(self) -> str:
        return f"bytes-eod{self.eod}"


class FileTokenizer:
    """A tokenizer.json of the `tokenizers` library."""

    def __init__(self, path: Path, library: Any, eod_token: int | str | None):
        content = path.read_bytes()
        try:
            self._tokenizer = library.Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises bare Exception for a file it cannot read
            if type(error) not in (Exception, UnicodeDecodeError):
                raise
            raise DataError(f"data.tokenizer: {path}: not a tokenizer.json that the tokenizers library reads: {error}") from error
        self.name = path.name
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1
        self.eod = _find_eod(path, vocab, self._tokenizer, eod_token)
        self.storage_dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32
        self._digest = hashlib.blake2b(content, digest_size=16).hexdigest()

    def encode_many(self, texts: Sequence[bytes]) -> list[Integer[np.ndarray, " _"]]:
        encodings = self._tokenizer.encode_batch([text.decode() for text in texts], add_special_tokens=False)
        return [np.asarray(encoding.ids, self.storage_dtype) for encoding in encodings]

    def encode(self, text: str) -> Int[np.ndarray, " N"]:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, ids: Sequence[int] | Integer[np.ndarray, " N"]) -> str:
        """Text of the ids that exist; special tokens are left out."""
        return self._tokenizer.decode([int(i) for i in ids if 0 <= int(i) < self.vocab_size])

    def fingerprint(self) -> str:
        return f"{self._digest}-eod{self.eod}"


def load_tokenizer(tokenizer: str, eod_token: int | str | None = None) -> Tokenizer:
    """The tokenizer that the config names: `bytes`, or the path of a tokenizer.json. DataError when it cannot be had."""
    if tokenizer == "bytes":
        if isinstance(eod_token, str):
            raise DataError(f"data.eod_token: {eod_token!r}: bytes have no named tokens; leave it out (256) or give an id")
        return ByteTokenizer(256 if eod_token is None else eod_token)
    path = Path(tokenizer).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise DataError(f"data.tokenizer: {tokenizer}: no such file; give 'bytes' or the path of a tokenizer.json")
    try:
        import tokenizers
    except ImportError as error:
        raise DataError("data.tokenizer: a tokenizer.json needs the tokenizers library: pip install 'jaxpar[hf]'") from error
    return FileTokenizer(path, tokenizers, eod_token)


def _find_eod(path: Path, vocab: dict[str, int], tokenizer: Any, eod_token: int | str | None) -> int:
    if isinstance(eod_token, int):
        if not 0 <= eod_token < max(vocab.values()) + 1:
            raise DataError(f"data.eod_token: {eod_token} is no id of {path}: ids are 0 to {max(vocab.values())}")
        return eod_token
    for name in (eod_token,) if eod_token else EOD_NAMES:
        if name in vocab:
            return vocab[name]
    special = sorted(str(token) for token in tokenizer.get_added_tokens_decoder().values() if token.special)
    candidates = ", ".join(special) or "none marked special; any token of the vocabulary may serve"
    wanted = f"{eod_token!r} is not in its vocabulary" if eod_token else f"none of {', '.join(EOD_NAMES)} is in its vocabulary"
    raise DataError(f"data.eod_token: {path}: {wanted}; set data.eod_token to one of its tokens (special ones: {candidates})")
