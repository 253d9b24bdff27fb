"""Documents of text as pieces of valid UTF-8, so that a file of any size passes through little memory."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from jaxpar.data.errors import DataError

PIECE_BYTES = 1 << 20  # longer documents are tokenised in pieces cut before white space; shorter ones whole
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Document:
    """One text on its way to tokens.

    name: for messages. pieces: its UTF-8 in order. key: held out by the hash of this; None: of the content.
    """

    name: str
    pieces: Iterable[bytes]
    key: bytes | None = None


def read_pieces(file: Path, errors: str) -> Iterator[bytes]:
    """The UTF-8 of a file without its byte order mark; invalid bytes are a DataError or become U+FFFD (`errors`)."""
    with file.open("rb") as stream:
        yield from decode_pieces(cut_pieces(_blocks(stream)), str(file), errors)


def cut_pieces(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Blocks regrouped into pieces of about PIECE_BYTES that end before white space, or else between two characters."""
    held = b""
    for block in blocks:
        held += block
        while len(held) > PIECE_BYTES:
            cut = _cut(held)
            yield held[:cut]
            held = held[cut:]
    if held:
        yield held


def decode_pieces(pieces: Iterable[bytes], name: str, errors: str) -> Iterator[bytes]:
    """Pieces of a whole file, checked to be UTF-8, without its byte order mark."""
    position = 0
    for piece in pieces:
        text = piece[len(BOM) :] if position == 0 and piece.startswith(BOM) else piece
        try:
            text.decode()
        except UnicodeDecodeError as error:
            if errors == "strict":
                byte = position + len(piece) - len(text) + error.start
                hint = "; it looks like UTF-16" if position == 0 and piece[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
                raise DataError(
                    f"{name}: invalid UTF-8 at byte {byte} (0x{text[error.start]:02x}){hint}; mend the file, narrow data.path "
                    "(a pattern such as 'folder/**/*.txt'), or set data.encoding_errors=replace"
                ) from error
            text = text.decode(errors="replace").encode()
        position += len(piece)
        if text:
            yield text


def _blocks(stream: BinaryIO) -> Iterator[bytes]:
    while block := stream.read(PIECE_BYTES):
        yield block


def _cut(held: bytes) -> int:
    for white in (b"\n", b" "):
        if (cut := held.rfind(white, 1, PIECE_BYTES)) > 0:
            return cut
    cut = PIECE_BYTES
    while cut > PIECE_BYTES - 3 and held[cut] & 0xC0 == 0x80:  # a continuation byte: not between two characters
        cut -= 1
    return cut
