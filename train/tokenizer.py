"""Text to token ids and back: bytes by default, or a Hugging Face tokenizer.json."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from train.exits import InputError


class DataError(InputError):
    """Bad input: one line that says what was given, where, what is allowed and what to do."""


class Tokenizer(Protocol):
    vocab_size: int
    """Ids are 0 to vocab_size - 1."""
    end_of_document: int
    """The id that follows every document; generation may stop at it."""

    def encode(self, text: str) -> np.ndarray:
        """The ids of text, int[N], without end_of_document."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids, int[N]; end_of_document and ids that stand for no text are left out."""
        ...


class ByteTokenizer:
    """One id a UTF-8 byte; id 256 ends a document.

    >>> tokens = ByteTokenizer().encode("né")
    >>> tokens.tolist(), ByteTokenizer().decode([*tokens, 256])
    ([110, 195, 169], 'né')
    """

    vocab_size = 257
    end_of_document = 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        # A model samples bytes that are not UTF-8, and its vocabulary may be padded beyond 257.
        return bytes(i for i in np.asarray(ids).tolist() if i < 256).decode(errors="replace")


END_OF_DOCUMENT_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "[EOS]",
    "<|eot_id|>",
    "<|im_end|>",
    "[SEP]",
)


class JsonTokenizer:
    """A Hugging Face tokenizer.json, which does not say which id ends a document: found by name."""

    def __init__(self, path: str):
        self._tokenizer = _read_json_tokenizer(path)
        # A file may carry the limits of the model it was made for; they would lose text silently.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids = self._tokenizer.get_vocab()
        end = next((ids[name] for name in END_OF_DOCUMENT_NAMES if name in ids), None)
        if end is None:
            raise DataError(
                f"--data.tokenizer {path}: no token to end a document; add one of "
                + " ".join(END_OF_DOCUMENT_NAMES)
            )
        self.end_of_document: int = end
        self.vocab_size: int = max(ids.values()) + 1  # ids may have gaps, so this is not len(ids)

    def encode(self, text: str) -> np.ndarray:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=True)


def _read_json_tokenizer(path: str):
    if not Path(path).is_file():
        raise DataError(f"--data.tokenizer {path}: no such file; give a tokenizer.json")
    try:
        import tokenizers
    except ImportError as error:
        raise DataError(
            f"--data.tokenizer {path} needs a package that is not installed: pip install "
            "'jaxamp-train[tokenizers]', or from a checkout pip install -e '.[tokenizers]'"
        ) from error
    try:
        return tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the package raises bare Exception
        raise DataError(
            f"--data.tokenizer {path} is not a whole tokenizer.json: {error}; copy it again"
        ) from error


def load_tokenizer(path: str | None) -> Tokenizer:
    """The tokenizer.json at path, or bytes where path is None."""
    return ByteTokenizer() if path is None else JsonTokenizer(path)
