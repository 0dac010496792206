"""The corpus as batches of sequences: shuffled, sharded by process, resumable to the batch."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import grain.python as grain
import numpy as np

from train.config import DataConfig
from train.corpus import (
    Source,
    TokenStream,
    check_sources,
    check_tokens,
    find_files,
    map_tokens,
    read_documents,
    split_documents,
)
from train.tokenizer import DataError, Tokenizer, load_tokenizer

Batch = dict[str, np.ndarray]
"""tokens int32[B, T] and labels int32[B, T]."""

IGNORE = -100
"""The label of a position that the loss does not count."""


@dataclass(frozen=True)
class Sequences:
    """Rows of seq_len tokens; row i reads tokens starts[i] to stops[i] - 1 of the stream.

    Its inputs are all of those but the last and its labels all but the first, so a row reads at
    most seq_len + 1. Rows that follow each other share one token, the last label of one and the
    first input of the next: every token is a label once, except the first, which nothing predicts.
    """

    stream: TokenStream
    starts: Sequence[int] | np.ndarray
    stops: Sequence[int] | np.ndarray
    seq_len: int

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Batch:
        """Tokens int32[T], 0 at padding, and labels int32[T], -100 there."""
        row = self.stream.read(int(self.starts[index]), int(self.stops[index]))
        filled = len(row) - 1
        tokens, labels = _blank_row(self.seq_len).values()
        tokens[:filled], labels[:filled] = row[:-1], row[1:]
        return {"tokens": tokens, "labels": labels}


def _blank_row(seq_len: int) -> Batch:
    return {"tokens": np.zeros(seq_len, np.int32), "labels": np.full(seq_len, IGNORE, np.int32)}


def pack(stream: TokenStream, start: int, stop: int, seq_len: int, *, keep_tail: bool) -> Sequences:
    """Tokens start to stop - 1 cut into rows; a tail too short for a whole row is kept or not."""
    count = max(0, stop - start - 1)
    rows = -(-count // seq_len) if keep_tail else count // seq_len
    # Ranges, not arrays: a memory map of 10 billion tokens has 10 million rows.
    starts = range(start, start + rows * seq_len, seq_len)
    stops = range(starts.start + seq_len + 1, starts.stop + seq_len + 1, seq_len)
    return Sequences(stream, starts, np.minimum(stops, stop) if keep_tail else stops, seq_len)


def pad(stream: TokenStream, ends: np.ndarray, seq_len: int) -> Sequences:
    """Each document its own row; one longer than a row is cut in several, nothing lost.

    Args:
        stream: documents end to end.
        ends: int64[D], where each document ends in stream.
        seq_len: inputs of a row.
    """
    begins = np.concatenate([[0], ends]).astype(np.int64)[:-1]
    rows = -(-(ends - begins - 1) // seq_len)
    nth = np.arange(rows.sum()) - np.repeat(np.cumsum(rows) - rows, rows)  # within its document
    starts = np.repeat(begins, rows) + nth * seq_len
    stops = np.minimum(starts + seq_len + 1, np.repeat(ends, rows))
    return Sequences(stream, starts, stops, seq_len)


@dataclass(frozen=True)
class Corpus:
    """What a run reads."""

    tokenizer: Tokenizer | None
    """None: the data are token ids and no tokenizer.json was given, so text cannot be made."""
    vocab_size: int
    train: Sequences
    eval: Sequences
    """Held out: no document is in train too, nor any token where the only document or a tokenised
    file is cut."""
    fingerprint: str
    """16 hex digits of the tokens and of how they are cut; a resume on other data differs."""
    description: str
    """One line for the user."""


def load(config: DataConfig, vocab_size: int | None = None) -> Corpus:
    """Find, check, tokenise and split the corpus.

    Text is read whole, at its peak about five times its size; .bin and .npy files are memory maps,
    gone through once to check them and read row by row then.

    Args:
        config: what to read.
        vocab_size: rows of the model's embedding; None: as many as the tokenizer has.

    Raises:
        DataError: the input is bad; one line says how.
    """
    source = find_files(config.path, "--data.path")
    held_out = find_files(config.eval_path, "--data.eval-path") if config.eval_path else None
    check_sources(source, held_out, config.documents)
    tokenizer = None
    if config.tokenizer or not source.is_tokenised:
        tokenizer = load_tokenizer(config.tokenizer)
    vocab_size = _vocab_size(vocab_size, tokenizer, source)
    digest = hashlib.sha256(f"{config.documents} {config.seq_len}".encode())
    if source.is_tokenised:
        train, held, size = _load_tokens(config, source, held_out, vocab_size, digest)
    else:
        train, held, size = _load_text(config, source, held_out, tokenizer, digest)
    rows = f"{len(train):,} training and {len(held):,} held-out sequences of {config.seq_len}"
    description = f"{source.name}: {size}; {rows}"
    return Corpus(tokenizer, vocab_size, train, held, digest.hexdigest()[:16], description)


def _vocab_size(given: int | None, tokenizer: Tokenizer | None, source: Source) -> int:
    if tokenizer is None:
        if given is None:
            raise DataError(
                f"{source.flag} {source.name} holds token ids but nothing says how many there are; "
                "set --model.vocab-size or --data.tokenizer"
            )
        return given
    if given is not None and given < tokenizer.vocab_size:
        raise DataError(
            f"--model.vocab-size {given} is less than the tokenizer's {tokenizer.vocab_size}; "
            "raise it or leave it out"
        )
    return given or tokenizer.vocab_size


def _load_text(config, source, held_out, tokenizer, digest) -> tuple[Sequences, Sequences, str]:
    texts = read_documents(source, config.text_key)
    full = [text for text in texts if text]
    if not full:
        raise DataError(f"{source.flag} {source.name} holds no text; give other files")
    if held_out is None:
        train, held = split_documents(full, config.eval_fraction)
    else:
        train, held = full, [t for t in read_documents(held_out, config.text_key) if t]
    plural = "s" if len(full) > 1 else ""
    size = f"{len(full):,} document{plural}, {_bytes(sum(len(text.encode()) for text in full))}"
    if len(full) < len(texts):
        size += f" ({len(texts) - len(full):,} empty left out)"
    train_part = _sequences(config, source, *_tokenise(train, tokenizer, digest), training=True)
    held_part = _tokenise(held, tokenizer, digest)
    return train_part, _sequences(config, held_out or source, *held_part, training=False), size


def _tokenise(texts: list[str], tokenizer: Tokenizer, digest) -> tuple[TokenStream, np.ndarray]:
    """Documents end to end, each followed by end_of_document, and where each ends, int64[D]."""
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    end = np.array([tokenizer.end_of_document], dtype)
    pieces = [piece for text in texts for piece in (tokenizer.encode(text).astype(dtype), end)]
    tokens = np.concatenate([np.empty(0, dtype), *pieces])
    lengths = [len(encoded) + 1 for encoded in pieces[::2]]
    digest.update(tokens)
    digest.update(np.array(lengths, np.int64))
    return TokenStream([tokens]), np.cumsum(lengths, dtype=np.int64)


def _sequences(config, source, stream, ends, *, training: bool) -> Sequences:
    if config.documents == "pad":
        sequences = pad(stream, ends, config.seq_len)
        return _at_least_one(sequences, source, len(stream), training)
    return _pack(config, source, stream, 0, len(stream), training=training)


def _load_tokens(config, source, held_out, vocab_size, digest) -> tuple[Sequences, Sequences, str]:
    stream = map_tokens(source, config.token_dtype)
    check_tokens(source, stream, vocab_size, digest)
    size = f"{len(stream):,} tokens"
    cut = len(stream) if held_out else round(len(stream) * (1 - config.eval_fraction))
    digest.update(f"{cut}".encode())
    train = _pack(config, source, stream, 0, cut, training=True)
    if held_out is None:
        return train, _pack(config, source, stream, cut, len(stream), training=False), size
    stream = map_tokens(held_out, config.token_dtype)
    check_tokens(held_out, stream, vocab_size, digest)
    return train, _pack(config, held_out, stream, 0, len(stream), training=False), size


def _pack(config, source, stream, start, stop, *, training: bool) -> Sequences:
    """Training drops the tail that fills no row; evaluation counts every token."""
    whole = pack(stream, start, stop, config.seq_len, keep_tail=False)
    _at_least_one(whole, source, stop - start, training)
    return whole if training else pack(stream, start, stop, config.seq_len, keep_tail=True)


def _at_least_one(sequences: Sequences, source: Source, tokens: int, training: bool) -> Sequences:
    if not len(sequences):
        part = "training" if training else "held-out"
        more = "give more text" if training else "hold out more (--data.eval-fraction)"
        raise DataError(
            f"{source.name}: the {part} part has {tokens:,} tokens, less than one sequence of "
            f"{sequences.seq_len} and the token after it; lower --data.seq-len or {more}"
        )
    return sequences


def _bytes(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"


def train_batches(
    corpus: Corpus, batch_size: int, seed: int, process_index: int = 0, process_count: int = 1
) -> grain.DatasetIterator:
    """Batches without end; each epoch is every training sequence once, in an order of its own.

    The order depends on seed alone: process p of P reads rows p, p + P, ... of each global batch.
    A batch may span two epochs, so none is cut short. `get_state()` is a dict that JSON can hold,
    and `set_state` of it goes on with the very next batch, whatever was read ahead.

    Args:
        corpus: from `load`.
        batch_size: sequences a step over all processes, P * B.
        seed: the run's; any natural number.
        process_index: of this process.
        process_count: P.

    Raises:
        DataError: batch_size does not divide among the processes or exceeds the corpus.
    """
    rows = _rows_per_process(batch_size, process_count)
    if batch_size > len(corpus.train):
        raise DataError(
            f"--batch-size {batch_size} is more than the {len(corpus.train)} training sequences; "
            "lower it or --data.seq-len"
        )
    # grain takes 32 bits and adds the epoch: unmixed, seed 1 would be seed 0 an epoch later.
    mixed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    shuffled = grain.MapDataset.source(corpus.train).shuffle(mixed).repeat()
    # Nothing remains of an endless dataset, but dropping it keeps grain's length in an integer.
    batches = shuffled[process_index::process_count].batch(rows, drop_remainder=True)
    # A batch from memory takes under a millisecond, less than a thread saves; a disk may be slow.
    threads, ahead = (1, 2) if corpus.train.stream.on_disk else (0, 0)
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=ahead)
    return batches.to_iter_dataset(options).__iter__()


def eval_batches(
    corpus: Corpus,
    batch_size: int,
    limit: int | None = None,
    process_index: int = 0,
    process_count: int = 1,
) -> Iterable[Batch]:
    """The held-out batches, the same each time they are gone through.

    In one fixed shuffled order, so that the first limit batches are a fair sample. The last batch
    is filled with rows that are all padding: without a limit every held-out token counts once, and
    all processes have equally many batches.

    Args:
        corpus: from `load`.
        batch_size: sequences a batch over all processes, as process_index and process_count are
            in `train_batches`.
        limit: most batches; None: all.
    """
    rows = _rows_per_process(batch_size, process_count)
    sequences = grain.MapDataset.source(corpus.eval).shuffle(0)
    missing = -len(sequences) % batch_size
    if missing:
        blank = grain.MapDataset.source([_blank_row(corpus.eval.seq_len)] * missing)
        sequences = grain.MapDataset.concatenate([sequences, blank])
    kept = len(sequences) if limit is None else limit * batch_size
    batches = sequences[:kept][process_index::process_count].batch(rows)
    return batches.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))


def _rows_per_process(batch_size: int, process_count: int) -> int:
    if batch_size % process_count:
        raise DataError(
            f"--batch-size {batch_size} does not divide among {process_count} processes; "
            f"use a multiple of {process_count}"
        )
    return batch_size // process_count
