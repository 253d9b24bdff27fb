"""Source `jsonl`: one JSON object a line, plain, .gz or .zst; one document a line."""

import gzip
import json
import warnings
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from jaxpar.data.documents import BOM, Document, cut_pieces
from jaxpar.data.errors import DataError

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
_BLOCK_BYTES = 1 << 20
_BLOCK_CHARS = 1 << 18  # a character is at most four bytes


def read_jsonl(files: list[Path], field: str, errors: str) -> Iterator[Document]:
    """Documents from the field `field`; blank lines are skipped. DataError names file and line."""
    for file in files:
        number = 0
        for number, (first_byte, line) in enumerate(_lines(_decompress(file)), 1):
            stripped = line.removeprefix(BOM).strip() if number == 1 else line.strip()
            if stripped:
                text = _field(f"{file}, line {number}", first_byte, line, stripped, field, errors)
                yield Document(f"{file}, line {number}", cut_pieces(_encode(text)))
        if number == 0:
            warnings.warn(f"{file} is empty: skipped", stacklevel=2)


def _field(where: str, first_byte: int, line: bytes, stripped: bytes, field: str, errors: str) -> str:
    try:
        record = json.loads(stripped.decode(errors=errors))
    except UnicodeDecodeError as error:
        byte = first_byte + line.index(stripped) + error.start
        raise DataError(
            f"{where}: invalid UTF-8 at byte {byte} (0x{stripped[error.start]:02x}); or set data.encoding_errors=replace"
        ) from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{where}: not a JSON object on one line: {error}") from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: a JSON object is needed, found {type(record).__name__}")
    if field not in record:
        raise DataError(f"{where}: no field {field!r} (data.field); found: {', '.join(map(repr, record)) or 'none'}")
    text = record[field]
    if not isinstance(text, str):
        raise DataError(
            f"{where}: field {field!r} must be text, found {type(text).__name__}; choose data.field among {', '.join(map(repr, record))}"
        )
    return text if not _has_surrogates(text) else _without_surrogates(where, field, text, errors)


def _has_surrogates(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _without_surrogates(where: str, field: str, text: str, errors: str) -> str:
    """JSON may escape half a surrogate pair, which UTF-8 cannot hold."""
    if errors == "strict":
        raise DataError(
            f"{where}: field {field!r} holds half of a surrogate pair (\\ud800 to \\udfff); or set data.encoding_errors=replace"
        )
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _encode(text: str) -> Iterator[bytes]:
    for start in range(0, len(text), _BLOCK_CHARS):
        yield text[start : start + _BLOCK_CHARS].encode()


def _lines(blocks: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    r"""(first byte, line) for lines that end in \n or with the file; other line separators may stand in JSON strings."""
    first_byte, held = 0, []
    for block in blocks:
        *ended, rest = block.split(b"\n")
        for part in ended:
            line = b"".join([*held, part])
            yield first_byte, line
            first_byte, held = first_byte + len(line) + 1, []
        held.append(rest)
    if last := b"".join(held):
        yield first_byte, last


def _decompress(file: Path) -> Iterator[bytes]:
    if file.name.endswith(".zst"):
        yield from _decompress_zstd(file)
        return
    try:
        with gzip.open(file) if file.name.endswith(".gz") else file.open("rb") as stream:
            while block := stream.read(_BLOCK_BYTES):
                yield block
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{file}: damaged or truncated gzip file: {error}") from error


def _decompress_zstd(file: Path) -> Iterator[bytes]:
    """By hand, frame by frame: the library's stream reader takes a truncated file for a whole one."""
    try:
        import zstandard
    except ImportError as error:
        raise DataError(f"{file}: a .zst file needs the zstandard library: pip install 'jaxpar[zstd]'") from error
    frame = zstandard.ZstdDecompressor().decompressobj()
    begun = False
    try:
        with file.open("rb") as stream:
            while data := stream.read(1 << 16):
                while data:
                    if frame.eof:
                        frame = zstandard.ZstdDecompressor().decompressobj()
                    if block := frame.decompress(data):
                        yield block
                    begun, data = True, frame.unused_data if frame.eof else b""
    except zstandard.ZstdError as error:
        raise DataError(f"{file}: damaged zstd file: {error}") from error
    if begun and not frame.eof:
        raise DataError(f"{file}: truncated zstd file: it ends within a frame")
