"""What a run reads: every token once, in an order of the seed, and one clear line on bad input."""

import json
import subprocess
import sys
import tracemalloc
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train import data, tokenizer
from train.config import DataConfig
from train.corpus import TokenStream, split_documents
from train.data import DataError

END = 256


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def corpus():
    """64 documents of unlike length, in rows of 16."""
    rng = np.random.default_rng(0)
    texts = ["".join(map(chr, rng.integers(97, 123, n))) for n in rng.integers(20, 90, 64)]
    write_jsonl("corpus.jsonl", texts)
    return load(path="corpus.jsonl", seq_len=16)


def load(vocab_size=None, **settings):
    return data.load(DataConfig(**settings), vocab_size)


def write_jsonl(path, texts, key="text"):
    Path(path).write_text("".join(json.dumps({key: text}) + "\n" for text in texts))


def take(iterator, count):
    return [row.tobytes() for batch in islice(iterator, count) for row in batch["tokens"]]


def rows_of(sequences):
    return [sequences[i]["tokens"].tobytes() for i in range(len(sequences))]


def counted(sequences):
    """The labels that count, in the order of the rows."""
    rows = [sequences[i]["labels"] for i in range(len(sequences))]
    return [label for row in rows for label in row.tolist() if label != -100]


# Batches


def test_batches_are_int32_and_labels_are_the_next_tokens(corpus):
    batch = next(data.train_batches(corpus, 4, seed=0))
    assert {name: (x.dtype, x.shape) for name, x in batch.items()} == {
        "tokens": (np.int32, (4, 16)),
        "labels": (np.int32, (4, 16)),
    }
    np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
    last_then_next = {(row["tokens"].tobytes(), row["labels"][-1]) for row in corpus.train}
    for tokens, labels in zip(batch["tokens"], batch["labels"], strict=True):
        assert (tokens.tobytes(), labels[-1]) in last_then_next


def test_same_seed_same_batches_and_another_seed_another_order(corpus):
    first, again, other = (take(data.train_batches(corpus, 4, s), 20) for s in (1, 1, 2))
    assert first == again
    assert first != other


def test_seed_is_not_the_next_seed_an_epoch_later(corpus):
    epoch = len(corpus.train)
    second = take(data.train_batches(corpus, 1, seed=0), 2 * epoch)[epoch:]
    assert second != take(data.train_batches(corpus, 1, seed=1), epoch)


@pytest.mark.parametrize("seed", [0, 2**32 + 7])
def test_every_epoch_is_every_row_once_in_a_new_order(corpus, seed):
    epoch = len(corpus.train)
    assert len(set(rows_of(corpus.train))) == epoch
    seen = take(data.train_batches(corpus, 1, seed), 3 * epoch)
    epochs = [seen[i * epoch : (i + 1) * epoch] for i in range(3)]
    for rows in epochs:
        assert sorted(rows) == sorted(rows_of(corpus.train)) != rows
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_a_batch_spans_two_epochs_so_no_row_is_dropped(corpus):
    epoch = len(corpus.train)
    batch_size = 7
    assert epoch % batch_size
    seen = take(data.train_batches(corpus, batch_size, seed=0), epoch)
    assert sorted(seen) == sorted(rows_of(corpus.train) * batch_size)


@pytest.mark.parametrize("process_count", [2, 3])
def test_processes_share_the_global_batch(corpus, process_count):
    batches = data.train_batches(corpus, 6, seed=5)
    shards = [data.train_batches(corpus, 6, 5, p, process_count) for p in range(process_count)]
    for _ in range(2 * len(corpus.train) // 6):  # beyond the first epoch
        shares = [take(shard, 1) for shard in shards]
        assert [len(share) for share in shares] == [6 // process_count] * process_count
        assert sorted(chain(*shares)) == sorted(take(batches, 1))


@pytest.mark.parametrize("position", [0, 1, 13, 100])
@pytest.mark.parametrize("on_disk", [False, True])
def test_resume_is_the_very_next_batch(corpus, position, on_disk):
    if on_disk:  # read ahead by a thread
        np.arange(4000, dtype=np.uint16).tofile("t.bin")
        corpus = load(4000, path="t.bin", seq_len=16)
    unbroken = data.train_batches(corpus, 4, seed=3)
    take(unbroken, position)
    state = json.loads(json.dumps(unbroken.get_state()))
    expected = take(unbroken, 40)
    fresh = data.train_batches(corpus, 4, seed=3)
    fresh.set_state(state)
    assert take(fresh, 40) == expected
    unbroken.set_state(state)  # back, past what was read ahead
    assert take(unbroken, 40) == expected


def test_resume_holds_for_each_process(corpus):
    unbroken = data.train_batches(corpus, 4, 3, process_index=1, process_count=2)
    take(unbroken, 60)
    resumed = data.train_batches(corpus, 4, 3, process_index=1, process_count=2)
    resumed.set_state(unbroken.get_state())
    assert take(resumed, 5) == take(unbroken, 5)


# Packing and padding


documents_of_tokens = st.lists(
    st.lists(st.integers(0, 255), min_size=1, max_size=40).map(lambda ids: [*ids, END]),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(documents_of_tokens, st.integers(1, 20), st.integers(0, 5))
def test_packing_loses_only_the_tail_and_keeps_it_on_request(documents, seq_len, start):
    ids = list(chain(*documents))
    stream = TokenStream([np.array(ids, np.uint16)])
    whole = data.pack(stream, min(start, len(ids)), len(ids), seq_len, keep_tail=False)
    kept = data.pack(stream, min(start, len(ids)), len(ids), seq_len, keep_tail=True)
    labels = ids[start + 1 :]  # nothing predicts the first token
    assert counted(kept) == labels
    assert counted(whole) == labels[: len(labels) - len(labels) % seq_len]
    assert len(whole) == len(labels) // seq_len


@settings(max_examples=60, deadline=None)
@given(documents_of_tokens, st.integers(1, 20))
def test_padding_loses_nothing_and_mixes_no_documents(documents, seq_len):
    stream = TokenStream([np.array(list(chain(*documents)), np.uint16)])
    ends = np.cumsum([len(document) for document in documents])
    sequences = data.pad(stream, ends, seq_len)
    rows = [sequences[i] for i in range(len(sequences))]
    expected = [
        document[i : i + seq_len + 1]
        for document in documents
        for i in range(0, len(document) - 1, seq_len)
    ]
    for row, piece in zip(rows, expected, strict=True):
        padding = seq_len - len(piece) + 1
        assert row["tokens"].tolist() == piece[:-1] + [0] * padding
        assert row["labels"].tolist() == piece[1:] + [-100] * padding


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
def test_a_stream_of_files_reads_as_one(lengths, draw):
    ids = np.arange(sum(lengths), dtype=np.uint16)
    stream = TokenStream(np.split(ids, np.cumsum(lengths)[:-1]))
    start = draw.draw(st.integers(0, len(ids)))
    stop = draw.draw(st.integers(start, len(ids)))
    assert len(stream) == len(ids)
    assert stream.read(start, stop).tolist() == ids[start:stop].tolist()


def test_packed_documents_are_joined_by_the_end_of_document(corpus):
    texts = [json.loads(line)["text"] for line in Path("corpus.jsonl").read_text().splitlines()]
    train, _ = split_documents(texts, 0.05)
    expected = [i for text in train for i in [*text.encode(), END]]
    tokens = np.concatenate([corpus.train[i]["tokens"] for i in range(len(corpus.train))])
    assert tokens.tolist() == expected[: len(tokens)]
    assert 0 < len(expected) - len(tokens) <= 16


def test_padded_documents_end_in_a_label():
    write_jsonl("a.jsonl", ["abc", "defgh", "x" * 20])
    corpus = load(path="a.jsonl", seq_len=4, documents="pad", eval_fraction=0.01)
    assert corpus.eval[0]["tokens"].tolist() == [*b"abc", 0]
    assert corpus.eval[0]["labels"].tolist() == [*b"bc", END, -100]
    assert counted(corpus.train) == [*b"efgh", END, *b"x" * 19, END]


# Held out


def test_held_out_documents_are_apart_and_near_the_fraction():
    texts = [f"document {i} " * (1 + i % 7) for i in range(200)]
    train, held = split_documents(texts, 0.1)
    assert not set(train) & set(held)
    assert sorted(train + held) == sorted(texts)
    assert train == [text for text in texts if text in set(train)]
    size = sum(map(len, held)) / sum(map(len, texts))
    assert abs(size - 0.1) < 0.01
    assert set(split_documents(texts[::-1], 0.1)[1]) == set(held)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(min_size=1, max_size=9), min_size=2), st.floats(0.01, 0.99))
def test_copies_of_a_document_stay_on_one_side(texts, fraction):
    train, held = split_documents(texts, fraction)
    if len(set(texts)) > 1:
        assert train and held
        assert not set(train) & set(held)
        assert sorted(train + held) == sorted(texts)


def test_a_lone_document_is_cut_at_a_boundary(tmp_path):
    text = "\n\n".join(f"Paragraph {i}.\nSecond line of it." for i in range(100))
    Path("one.txt").write_text(text)
    corpus = load(path="one.txt", seq_len=16, eval_fraction=0.1)
    tail = bytes(corpus.eval.stream.arrays[0][:-1].astype(np.uint8)).decode()
    head = bytes(corpus.train.stream.arrays[0][:-1].astype(np.uint8)).decode()
    assert head + tail == text
    assert tail.startswith("Paragraph")
    assert 0.1 <= len(tail) / len(text) < 0.12
    train, held = split_documents(["x" * 100], 0.25)
    assert (len(train[0]), len(held[0])) == (75, 25)
    train, held = split_documents(["Title\n\n" + "x" * 93], 0.25)  # a boundary, but far away
    assert (len(train[0]), len(held[0])) == (75, 25)


def test_evaluation_counts_every_held_out_token_once(corpus):
    batches = list(data.eval_batches(corpus, 6))
    labels = np.concatenate([batch["labels"] for batch in batches])
    held = np.concatenate(corpus.eval.stream.arrays)
    assert len(held) % 16 != 1 and len(corpus.eval) % 6  # a short row and a short batch
    assert {batch["tokens"].shape for batch in batches} == {(6, 16)}
    assert sorted(labels[labels != -100].tolist()) == sorted(held[1:].tolist())


def test_evaluation_is_the_same_each_time_and_limited(corpus):
    batches = data.eval_batches(corpus, 4)
    assert take(batches, None) == take(batches, None)
    assert take(data.eval_batches(corpus, 4, limit=2), None) == take(batches, None)[:8]
    assert len(take(data.eval_batches(corpus, 4, limit=99), None)) == len(take(batches, None))


def test_evaluation_is_shared_by_processes(corpus):
    everything = take(data.eval_batches(corpus, 6), None)
    shares = [take(data.eval_batches(corpus, 6, None, p, 3), None) for p in range(3)]
    assert len({len(share) for share in shares}) == 1
    assert sorted(chain(*shares)) == sorted(everything)


def test_eval_path_is_the_held_out_set(corpus):
    Path("held.txt").write_text("held out text of its own")
    given_path = load(path="corpus.jsonl", eval_path="held.txt", seq_len=16)
    assert counted(given_path.eval) == [*b"held out text of its own"[1:], END]
    whole = len(corpus.train.stream) + len(corpus.eval.stream)
    assert len(given_path.train.stream) == whole


# Sources


def test_default_is_the_language_reference():
    corpus = load()
    train, held = (corpus.tokenizer.decode(s.stream.arrays[0]) for s in (corpus.train, corpus.eval))
    assert corpus.vocab_size == 257
    assert 400_000 < len(train) + len(held) < 700_000
    assert 0.04 < len(held) / len(train) < 0.06
    assert corpus.description.startswith("Python language reference: ")
    assert f"{len(corpus.train):,} training and {len(corpus.eval):,} held" in corpus.description


def test_text_files_and_globs_are_documents_by_name():
    for name in "cab":
        Path(f"{name}.txt").write_text(f"\ufeffText {name}, é.\n", encoding="utf-8")
    corpus = load(path="*.txt", seq_len=4, eval_fraction=0.01)
    both = [corpus.tokenizer.decode(s.stream.arrays[0]) for s in (corpus.train, corpus.eval)]
    held = both[1]
    assert both[0] == "".join(t for t in [f"Text {n}, é.\n" for n in "abc"] if t != held)
    Path("[odd].txt").write_text("A name that is also a glob. " * 9)
    assert "1 document, 252 bytes" in load(path="[odd].txt", seq_len=4).description


def test_jsonl_key_blank_lines_and_empty_documents():
    Path("a.jsonl").write_text('{"body": "one one"}\n\n{"body": ""}\n{"body": "two two"}')
    corpus = load(path="a.jsonl", text_key="body", seq_len=4)
    assert "2 documents, 14 bytes (1 empty left out)" in corpus.description


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_bin_and_npy_tails_are_held_out(dtype):
    ids = np.random.default_rng(0).integers(0, 1000, 1000).astype(dtype)
    ids[:400].tofile("a.bin")
    ids[400:].tofile("b.bin")
    np.save("c.npy", ids)
    corpora = [
        load(1000, path="?.bin", token_dtype=dtype, seq_len=10, eval_fraction=0.205),
        load(1000, path="c.npy", seq_len=10, eval_fraction=0.205),
    ]
    for corpus in corpora:
        assert counted(corpus.train) == ids[1:791].tolist()  # 795 tokens, 79 rows
        assert counted(corpus.eval) == ids[796:].tolist()
        assert corpus.tokenizer is None and corpus.vocab_size == 1000
        assert next(data.train_batches(corpus, 2, 0))["tokens"].dtype == np.int32
    assert "1,000 tokens" in corpora[0].description


def test_tokenised_eval_path():
    np.arange(100, dtype=np.uint16).tofile("a.bin")
    np.save("b.npy", np.arange(100, 133))
    corpus = load(200, path="a.bin", eval_path="b.npy", seq_len=10)
    assert counted(corpus.train) == list(range(1, 91))
    assert counted(corpus.eval) == list(range(101, 133))


def test_memory_maps_are_not_loaded(monkeypatch):
    monkeypatch.setattr("train.corpus.SCAN_TOKENS", 1 << 16)
    size = 32 << 20
    np.memmap("big.bin", np.uint16, mode="w+", shape=size // 2).flush()
    tracemalloc.start()
    try:
        corpus = load(10, path="big.bin", seq_len=512)
        batches = data.train_batches(corpus, 8, 0)
        take(batches, 5)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert all(isinstance(array, np.memmap) for array in corpus.train.stream.arrays)
    assert peak_bytes < size / 8


def test_fingerprint_tells_other_data_and_other_cuts(corpus):
    again = load(path="corpus.jsonl", seq_len=16)
    assert corpus.fingerprint == again.fingerprint
    np.arange(1000, dtype=np.uint16).tofile("a.bin")
    binary = load(2000, path="a.bin", seq_len=16)
    lines = Path("corpus.jsonl").read_text()
    Path("corpus.jsonl").write_text(lines.replace("a", "b", 1))
    np.arange(1000, dtype=np.uint16)[::-1].tofile("a.bin")
    Path("x.txt").write_text("x" * 999)
    Path("y.txt").write_text("y" * 999)
    others = [
        load(path="x.txt", seq_len=16).fingerprint,
        load(path="y.txt", seq_len=16).fingerprint,
        binary.fingerprint,
        load(path="corpus.jsonl", seq_len=16).fingerprint,
        load(path="corpus.jsonl", seq_len=17).fingerprint,
        load(path="corpus.jsonl", seq_len=16, documents="pad").fingerprint,
        load(path="corpus.jsonl", seq_len=16, eval_fraction=0.5).fingerprint,
        load(2000, path="a.bin", seq_len=16).fingerprint,
        load(2000, path="a.bin", seq_len=16, eval_fraction=0.5).fingerprint,
    ]
    assert len({corpus.fingerprint, *others}) == len(others) + 1


# Tokenizers


@pytest.fixture
def tokenizer_json():
    """Byte-level BPE trained on a line, with limits in the file that would cut and pad."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["the cat and the hat and the bat"] * 9, trainer)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    made.enable_truncation(4)
    made.enable_padding(length=64)
    made.save("tokenizer.json")
    return "tokenizer.json"


@pytest.mark.parametrize("text", ["the cat and the hat", "naïve 東京 🚀\r\n\n", "", "a" * 99])
def test_tokenizers_round_trip(tokenizer_json, text):
    bytes_, bpe = tokenizer.load_tokenizer(None), tokenizer.load_tokenizer(tokenizer_json)
    for each in (bytes_, bpe):
        ids = each.encode(text)
        assert each.decode([*ids, each.end_of_document]) == text
        assert each.decode(ids.astype(np.int32)) == text
    assert bytes_.encode(text).tolist() == list(text.encode())
    assert bpe.end_of_document == 0
    assert 1 not in bpe.encode(text)  # <s>, which the file would put in front
    assert len(bpe.encode("the cat and the hat")) < 19


def test_bytes_decode_what_a_model_may_sample():
    assert tokenizer.ByteTokenizer().decode([104, 0xC3, 105, 256, 500]) == "h\ufffdi"


def test_a_tokenizer_json_makes_the_corpus(tokenizer_json):
    write_jsonl("a.jsonl", ["the cat and the hat"] * 9 + ["and the bat"])
    corpus = load(path="a.jsonl", tokenizer=tokenizer_json, seq_len=4)
    assert corpus.vocab_size == corpus.tokenizer.vocab_size <= 300
    assert load(512, path="a.jsonl", tokenizer=tokenizer_json, seq_len=4).vocab_size == 512
    assert corpus.tokenizer.decode(corpus.train.stream.arrays[0]) == "the cat and the hat" * 9


def test_a_tokenizer_gives_tokenised_data_its_vocabulary(tokenizer_json):
    np.arange(200, dtype=np.uint16).tofile("a.bin")
    corpus = load(path="a.bin", tokenizer=tokenizer_json, seq_len=4)
    assert corpus.vocab_size == corpus.tokenizer.vocab_size


# Bad input


def _write(path, content):
    Path(path).write_bytes(content if isinstance(content, bytes) else content.encode())


def _text():
    _write("a.txt", "some text " * 50)


BAD_INPUT = {
    "missing": (lambda: None, {"path": "no.txt"}, r"--data.path no.txt does not exist"),
    "too_long": (lambda: None, {"path": "x" * 5000}, r"does not exist"),
    "glob": (lambda: None, {"path": "no/*.txt"}, r"--data.path no/\*.txt matches no file"),
    "directory": (lambda: Path("d").mkdir(), {"path": "d"}, r"is a directory; .*'d/\*.txt'"),
    "eval_missing": (_text, {"path": "a.txt", "eval_path": "no"}, r"--data.eval-path no does"),
    "empty": (lambda: _write("a.txt", ""), {"path": "a.txt"}, r"--data.path a.txt is empty"),
    "empty_jsonl": (
        lambda: _write("a.jsonl", '{"text": ""}\n'),
        {"path": "a.jsonl"},
        r"--data.path a.jsonl holds no text",
    ),
    "not_utf8": (
        lambda: _write("a.txt", b"caf\xe9 au lait"),
        {"path": "a.txt"},
        r"a.txt is not UTF-8: byte 0xe9 at 3; .*iconv",
    ),
    "not_json": (
        lambda: _write("a.jsonl", '{"text": "a"}\n{oops\n'),
        {"path": "a.jsonl"},
        r"a.jsonl:2 is not JSON: Expecting",
    ),
    "deep_json": (lambda: _write("a.jsonl", "[" * 10**5), {"path": "a.jsonl"}, r":1 is not JSON"),
    "jsonl_not_utf8": (
        lambda: _write("a.jsonl", b'"\xff"'),
        {"path": "a.jsonl"},
        r":1 is not JSON",
    ),
    "not_object": (lambda: _write("a.jsonl", "[1]\n"), {"path": "a.jsonl"}, r":1 holds a list"),
    "no_key": (
        lambda: _write("a.jsonl", '{"body": "a", "id": 3}\n'),
        {"path": "a.jsonl"},
        r"a.jsonl:1 has no 'text'; its keys: body, id; set --data.text-key",
    ),
    "not_text": (
        lambda: _write("a.jsonl", '\n{"text": 3}\n'),
        {"path": "a.jsonl"},
        r"a.jsonl:2: 'text' is a int, not text",
    ),
    "surrogate": (
        lambda: _write("a.jsonl", '{"text": "\\ud800"}\n'),
        {"path": "a.jsonl"},
        r"a.jsonl:1: 'text' is not valid Unicode",
    ),
    "mixed": (
        lambda: (_text(), _write("a.bin", b"ab")),
        {"path": "a.*"},
        r"a.\* mixes kinds: .bin \(a.bin\), text \(a.txt\)",
    ),
    "eval_other_kind": (
        lambda: (_text(), _write("a.bin", b"ab")),
        {"path": "a.txt", "eval_path": "a.bin"},
        r"--data.eval-path a.bin is .bin and --data.path is text",
    ),
    "eval_same_file": (
        _text,
        {"path": "*.txt", "eval_path": "./a.txt"},
        r"a.txt is in both --data.path and --data.eval-path",
    ),
    "short": (
        lambda: _write("a.txt", "short " * 20),
        {"path": "a.txt"},
        r"a.txt: the training part has 115 tokens, less than one sequence of 128 .*--data.seq-len",
    ),
    "short_held_out": (
        _text,
        {"path": "a.txt", "seq_len": 64},
        r"a.txt: the held-out part has 26 tokens, .* 64 .*--data.seq-len or .*--data.eval-fraction",
    ),
    "short_bin": (
        lambda: _write("a.bin", bytes(200)),
        {"path": "a.bin", "vocab_size": 9},
        r"training part .* 95 tokens, less than one sequence of 128",
    ),
    "short_bin_held_out": (
        lambda: _write("a.bin", bytes(2000)),
        {"path": "a.bin", "vocab_size": 9},
        r"held-out part .* 50 tokens, less than one sequence of 128",
    ),
    "small_vocabulary": (_text, {"path": "a.txt", "vocab_size": 256}, r"256 is less than .* 257"),
    "no_vocabulary": (
        lambda: _write("a.bin", bytes(2000)),
        {"path": "a.bin"},
        r"a.bin holds token ids .*set --model.vocab-size",
    ),
    "id_beyond": (
        lambda: (
            np.zeros(9, np.uint16).tofile("a.bin"),
            np.array([0] * 20 + [77, 78], np.uint16).tofile("b.bin"),
        ),
        {"path": "?.bin", "vocab_size": 77},
        r"b.bin: token 20 has id 77, but the vocabulary is 0 to 76; raise --model.vocab-size",
    ),
    "id_negative": (
        lambda: np.save("a.npy", np.array([3, -1])),
        {"path": "a.npy", "vocab_size": 77},
        r"a.npy: token 1 has id -1",
    ),
    "eval_id_beyond": (
        lambda: (
            np.zeros(999, np.uint16).tofile("a.bin"),
            np.full(9, 7, np.uint16).tofile("b.bin"),
        ),
        {"path": "a.bin", "eval_path": "b.bin", "vocab_size": 7},
        r"--data.eval-path b.bin: token 0 has id 7",
    ),
    "odd_bin": (
        lambda: _write("a.bin", bytes(2001)),
        {"path": "a.bin", "vocab_size": 9},
        r"a.bin has 2001 bytes, .* uint16 tokens of 2 bytes; .*--data.token-dtype",
    ),
    "npy_float": (
        lambda: np.save("a.npy", np.zeros(9, np.float32)),
        {"path": "a.npy", "vocab_size": 9},
        r"a.npy is float32\[9\]; .*integer",
    ),
    "npy_2d": (
        lambda: np.save("a.npy", np.zeros((9, 2), np.uint16)),
        {"path": "a.npy", "vocab_size": 9},
        r"a.npy is uint16\[9, 2\]; .*one-dimensional",
    ),
    "npy_damaged": (
        lambda: _write("a.npy", b"\x93NUMPY\x01\x00v"),
        {"path": "a.npy", "vocab_size": 9},
        r"a.npy is not a whole .npy file",
    ),
    "npy_cut": (
        lambda: (np.save("a.npy", np.zeros(99)), _write("a.npy", Path("a.npy").read_bytes()[:300])),
        {"path": "a.npy", "vocab_size": 9},
        r"a.npy is not a whole .npy file",
    ),
    "npy_pickle": (
        lambda: np.save("a.npy", np.array([None]), allow_pickle=True),
        {"path": "a.npy", "vocab_size": 9},
        r"a.npy is not a whole .npy file",
    ),
    "npy_nothing": (
        lambda: np.save("a.npy", np.zeros(0, np.uint16)),
        {"path": "a.npy", "vocab_size": 9},
        r"a.npy",
    ),
    "pad_tokens": (
        lambda: _write("a.bin", bytes(2000)),
        {"path": "a.bin", "documents": "pad", "vocab_size": 9},
        r"--data.documents pad needs text or JSONL: a.bin",
    ),
    "tokenizer_missing": (_text, {"path": "a.txt", "tokenizer": "t.json"}, r"t.json: no such file"),
    "tokenizer_damaged": (
        lambda: (_text(), _write("t.json", '{"version": "1.0", ')),
        {"path": "a.txt", "tokenizer": "t.json"},
        r"--data.tokenizer t.json is not a whole tokenizer.json",
    ),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_clear_line(case):
    prepare, settings, expected = BAD_INPUT[case]
    if case == "tokenizer_damaged":
        pytest.importorskip("tokenizers")
    prepare()
    with pytest.raises(DataError, match=expected) as error:
        load(**settings)
    assert "\n" not in str(error.value)


def test_unreadable_file_is_one_clear_line(monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    _text()
    _write("a.bin", bytes(2000))
    monkeypatch.setattr(Path, "read_bytes", refuse)
    monkeypatch.setattr(np, "memmap", refuse)
    for path in ("a.txt", "a.bin"):
        with pytest.raises(DataError, match=f"{path} cannot be read: Permission denied"):
            load(9999, path=path)


def test_a_tokenizer_without_an_end_of_document():
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save("t.json")
    with pytest.raises(DataError, match=r"t.json: no token to end a document; add one of <\|endof"):
        load(tokenizer="t.json")


def test_tokenizers_not_installed(monkeypatch):
    _write("t.json", "{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"pip install 'jaxamp-train\[tokenizers\]', .*-e '.\[tok"):
        load(tokenizer="t.json")


def test_batch_size_that_does_not_divide(corpus):
    for batches in (data.train_batches, data.eval_batches):
        with pytest.raises(DataError, match=r"--batch-size 10 .* 4 processes; use a multiple of 4"):
            batches(corpus, 10, 0, process_index=0, process_count=4)


def test_batch_larger_than_the_corpus(corpus):
    count = len(corpus.train)
    assert next(data.train_batches(corpus, count, 0))["tokens"].shape[0] == count
    with pytest.raises(DataError, match=f"--batch-size {count + 1} is more than the {count} train"):
        data.train_batches(corpus, count + 1, 0)


def test_nothing_is_said_on_the_way():
    np.zeros(9999, np.uint16).tofile("a.bin")
    code = """
from train import data
from train.config import DataConfig
for config in (DataConfig(), DataConfig(path="a.bin")):
    corpus = data.load(config, 257)
    next(data.train_batches(corpus, 2, 0)), list(data.eval_batches(corpus, 2, 2))
"""
    root = str(Path(data.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": root, "JAX_PLATFORMS": "cpu"},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
