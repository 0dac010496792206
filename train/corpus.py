"""Files to documents or token streams, and the held-out part of them."""

import glob
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from train.tokenizer import DataError

KINDS = {".jsonl": "JSONL", ".bin": ".bin", ".npy": ".npy"}  # anything else is text
SCAN_TOKENS = 1 << 24  # read at a time when a whole file is checked


class Source(NamedTuple):
    """What a path stands for."""

    flag: str
    """The setting it was given by, for errors: --data.path or --data.eval-path."""
    name: str
    kind: str
    """text, JSONL, .bin or .npy; "embedded" for the Python language reference."""
    files: tuple[str, ...]

    @property
    def is_tokenised(self) -> bool:
        return self.kind in (".bin", ".npy")


def find_files(pattern: str | None, flag: str) -> Source:
    """The files of a path or glob, sorted by name, all of one kind and none empty."""
    if pattern is None:
        return Source(flag, "Python language reference", "embedded", ())
    files = _matching_files(pattern, flag)
    kinds = {KINDS.get(Path(file).suffix.lower(), "text"): file for file in files}
    if len(kinds) > 1:
        found = ", ".join(f"{kind} ({file})" for kind, file in sorted(kinds.items()))
        raise DataError(f"{flag} {pattern} mixes kinds: {found}; match one kind")
    for file in files:
        if os.path.getsize(file) == 0:
            raise DataError(f"{flag} {file} is empty; remove it or match other files")
    return Source(flag, pattern, next(iter(kinds)), tuple(files))


def _matching_files(pattern: str, flag: str) -> list[str]:
    path = os.path.expanduser(pattern)
    if os.path.isdir(path):
        raise DataError(f"{flag} {pattern} is a directory; give a glob such as '{pattern}/*.txt'")
    if os.path.exists(path):  # first, so that a name with brackets is not taken for a glob
        return [path]
    if not glob.has_magic(pattern):
        raise DataError(f"{flag} {pattern} does not exist, seen from {os.getcwd()}")
    files = sorted(file for file in glob.glob(path, recursive=True) if os.path.isfile(file))
    if not files:
        raise DataError(f"{flag} {pattern} matches no file, seen from {os.getcwd()}")
    return files


def check_sources(source: Source, held_out: Source | None, documents: str) -> None:
    """Refuse settings that do not go together."""
    if source.is_tokenised and documents == "pad":
        raise DataError(
            f"--data.documents pad needs text or JSONL: {source.name} ({source.kind}) "
            "does not say where documents end; use pack"
        )
    if held_out is None:
        return
    if held_out.is_tokenised != source.is_tokenised:
        raise DataError(
            f"--data.eval-path {held_out.name} is {held_out.kind} and --data.path is "
            f"{source.kind}; both must be text or JSONL, or both token ids"
        )
    for file in source.files:
        if any(os.path.samefile(file, other) for other in held_out.files):
            raise DataError(f"{file} is in both --data.path and --data.eval-path; keep it in one")


def read_documents(source: Source, text_key: str) -> list[str]:
    """Every document of a source that is not tokenised, in order, empty ones included."""
    if source.kind == "embedded":
        return _language_reference()
    if source.kind == "JSONL":
        return [text for file in source.files for text in _read_jsonl(source.flag, file, text_key)]
    return [_read_text(source.flag, file) for file in source.files]


def _language_reference() -> list[str]:
    try:
        from pydoc_data.topics import topics  # part of CPython's standard library
    except ImportError as error:
        raise DataError(f"this Python has no pydoc_data ({error}); give --data.path") from error
    return [topics[name] for name in sorted(topics)]


def _read_bytes(flag: str, file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise DataError(f"{flag} {file} cannot be read: {error.strerror}") from error


def _read_text(flag: str, file: str) -> str:
    try:
        return _read_bytes(flag, file).decode("utf-8-sig")  # without a byte-order mark
    except UnicodeDecodeError as error:
        raise DataError(
            f"{flag} {file} is not UTF-8: byte 0x{error.object[error.start]:02x} at {error.start}; "
            "convert it, such as with iconv -f latin1 -t utf-8"
        ) from error


def _read_jsonl(flag: str, file: str, text_key: str) -> Iterator[str]:
    for number, line in enumerate(_read_bytes(flag, file).split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{flag} {file}:{number}"
        try:
            record = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} is not JSON: {error}") from error
        yield _text_of(record, text_key, where)


def _text_of(record, text_key: str, where: str) -> str:
    if not isinstance(record, dict):
        raise DataError(f"{where} holds a {type(record).__name__}; each line must be an object")
    if text_key not in record:
        found = ", ".join(record) or "none"
        raise DataError(f"{where} has no {text_key!r}; its keys: {found}; set --data.text-key")
    text = record[text_key]
    if not isinstance(text, str):
        raise DataError(f"{where}: {text_key!r} is a {type(text).__name__}, not text")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        raise DataError(f"{where}: {text_key!r} is not valid Unicode: {error.reason}") from error
    return text


def split_documents(texts: Sequence[str], fraction: float) -> tuple[list[str], list[str]]:
    """Training and held-out documents, each in the given order.

    Documents are held out in the order of the hash of their text while that brings the held-out
    bytes nearer to fraction of all; at least one is, and at least one is not. So the split depends
    neither on the run's seed nor on the tokenizer, copies of a document stay on one side, and
    a document added later moves few others. A lone document is cut in two instead.
    """
    sizes: dict[bytes, int] = {}  # bytes of all copies of a document, by hash
    hashes = [hashlib.sha256(text.encode()).digest() for text in texts]
    for key, text in zip(hashes, texts, strict=True):
        sizes[key] = sizes.get(key, 0) + len(text.encode())
    if len(sizes) == 1:
        head, tail = cut_document(texts[0], fraction)
        return [head] * len(texts), [tail] * len(texts)
    target = fraction * sum(sizes.values())
    held: set[bytes] = set()
    held_bytes = 0
    for key in sorted(sizes)[:-1]:
        if held_bytes + sizes[key] / 2 < target:
            held.add(key)
            held_bytes += sizes[key]
    if not held:
        held.add(min(sizes, key=lambda key: (sizes[key], key)))
    sides = [key in held for key in hashes]
    train = [text for text, side in zip(texts, sides, strict=True) if not side]
    return train, [text for text, side in zip(texts, sides, strict=True) if side]


def cut_document(text: str, fraction: float) -> tuple[str, str]:
    """Head and tail, the tail being fraction of text, up to twice that to end at a boundary.

    >>> cut_document("One.\\n\\nTwo.\\n\\nThree.", 0.25)
    ('One.\\n\\nTwo.\\n\\n', 'Three.')
    """
    cut = min(round(len(text) * (1 - fraction)), len(text) - 1)
    earliest = max(1, 2 * cut - len(text))
    for boundary in ("\n\n", "\n", " "):
        at = text.rfind(boundary, earliest, cut)
        if at >= 0:
            cut = at + len(boundary)
            break
    return text[:cut], text[cut:]


class TokenStream:
    """1-D integer arrays read as one, end to end, without joining them in memory."""

    def __init__(self, arrays: Sequence[np.ndarray]):
        self.arrays = tuple(arrays)
        self._starts = np.cumsum([0, *map(len, self.arrays)])
        self.on_disk = any(isinstance(array, np.memmap) for array in self.arrays)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start to stop - 1, a fresh int32[stop - start]."""
        out = np.empty(stop - start, np.int32)
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        filled = 0
        for array, offset in zip(self.arrays[first:], self._starts[first:], strict=False):
            if filled == len(out):
                break
            begin = start + filled - int(offset)
            piece = array[begin : begin + len(out) - filled]
            out[filled : filled + len(piece)] = piece
            filled += len(piece)
        return out


def map_tokens(source: Source, token_dtype: str) -> TokenStream:
    """The .bin or .npy files of source as memory maps; nothing is read yet."""
    if source.kind == ".npy":
        return TokenStream([_map_npy(source.flag, file) for file in source.files])
    return TokenStream([_map_bin(source.flag, file, token_dtype) for file in source.files])


def _map_bin(flag: str, file: str, token_dtype: str) -> np.ndarray:
    size, width = os.path.getsize(file), np.dtype(token_dtype).itemsize
    if size % width:
        raise DataError(
            f"{flag} {file} has {size} bytes, which is no whole number of {token_dtype} tokens of "
            f"{width} bytes; copy it again or set --data.token-dtype"
        )
    try:
        return np.memmap(file, token_dtype, mode="r")
    except OSError as error:
        raise DataError(f"{flag} {file} cannot be read: {error.strerror}") from error


def _map_npy(flag: str, file: str) -> np.ndarray:
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise DataError(f"{flag} {file} is not a whole .npy file: {error}") from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(
            f"{flag} {file} is {array.dtype}{list(array.shape)}; "
            "save a one-dimensional array of an integer type such as uint16"
        )
    return array


def check_tokens(source: Source, stream: TokenStream, vocab_size: int, digest) -> None:
    """Read every token of stream once: each must be in 0 to vocab_size - 1; digest sees them all.

    A gather clips an id beyond the vocabulary silently, so the whole file is read at the start
    (about a gigabyte a second), a piece at a time.
    """
    for file, array in zip(source.files, stream.arrays, strict=True):
        for start in range(0, len(array), SCAN_TOKENS):
            piece = np.asarray(array[start : start + SCAN_TOKENS])
            digest.update(piece)
            if piece.max() >= vocab_size or piece.min() < 0:
                at = int(np.flatnonzero((piece >= vocab_size) | (piece < 0))[0])
                raise DataError(
                    f"{source.flag} {file}: token {start + at:,} has id {piece[at]}, but "
                    f"the vocabulary is 0 to {vocab_size - 1}; raise --model.vocab-size or "
                    f"see whether {array.dtype} is right (--data.token-dtype)"
                )
