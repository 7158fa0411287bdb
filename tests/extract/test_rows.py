import dataclasses
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extract_runs import make_sample, make_samples
from paceline.durable.errors import DataError
from paceline.recipe.fingerprint import digest_file
from paceline.types import Split
from paceline.types import rows as rows_module
from paceline.types.row_index import FILE_NAME, load_index, open_rows
from paceline.types.rows import index_rows, read_rows, read_tokens
from paceline.types.sample import encode_sample
from paceline.types.sample_ids import IdsBuilder, SampleIds

LIMITS: dict[str, Any] = {"vocab_size": 256, "max_position": 64}


def write(path, samples):
    path.write_bytes(b"".join(map(encode_sample, samples)))
    return path


def renamed(samples, name):
    return [dataclasses.replace(s, sample_id=name(n)) for n, s in enumerate(samples)]


def same(one, other):
    assert list(one.sample_ids) == list(other.sample_ids)
    for name in ("lengths", "loss_tokens", "positions"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    assert (one.heldout, one.without_loss, one.other, one.read, one.digest) == (
        other.heldout,
        other.without_loss,
        other.other,
        other.read,
        other.digest,
    )


@pytest.fixture
def samples():
    return [
        *make_samples(40),
        make_sample(40, 9, split=Split.HELDOUT),
        make_sample(41, 8, loss=0),
        make_sample(42, 64),
    ]


@pytest.fixture
def corpus(tmp_path, samples):
    return write(tmp_path / "corpus.jsonl", samples)


@pytest.mark.parametrize("block", [1, 7, 300, 1 << 20])
def test_ids_counts_and_positions_are_those_of_the_file(corpus, samples, monkeypatch, block):
    monkeypatch.setattr(rows_module, "_BLOCK", block)
    rows = index_rows(corpus, **LIMITS)
    wanted = [s for s in samples if s.split is not Split.HELDOUT and s.num_loss_tokens]
    assert list(rows.sample_ids) == [s.sample_id for s in wanted]
    assert rows.lengths.tolist() == [len(s.input_ids) for s in wanted]
    assert rows.loss_tokens.tolist() == [s.num_loss_tokens for s in wanted]
    assert (rows.heldout, rows.without_loss, len(rows)) == (1, 1, len(wanted))
    assert rows.read == len(samples)
    assert rows.tokens == sum(len(s.input_ids) for s in wanted)
    assert read_rows(corpus, rows.positions.tolist()) == wanted
    assert [t.input_ids for t in read_tokens(corpus, rows.positions[3:5].tolist())] == [
        s.input_ids for s in wanted[3:5]
    ]
    assert rows.digest == digest_file(corpus)


def test_of_one_split_the_samples_of_the_other_are_counted(corpus, samples):
    heldout, without_loss = 1, 1
    by_split = {}
    for split in (Split.TRAIN, Split.VALIDATION):
        rows = by_split[split] = index_rows(corpus, **LIMITS, only=split)
        wanted = [s for s in samples if s.split is split and s.num_loss_tokens]
        assert list(rows.sample_ids) == [s.sample_id for s in wanted]
        assert read_rows(corpus, rows.positions.tolist()) == wanted
        # A sample without an answer is none that anyone captures, whatever its split.
        assert (rows.heldout, rows.without_loss) == (heldout, without_loss)
        assert len(rows) + rows.other + heldout + without_loss == rows.read == len(samples)
    assert index_rows(corpus, **LIMITS).other == 0
    assert by_split[Split.TRAIN].other == len(by_split[Split.VALIDATION]) == 8


def test_a_sample_of_the_other_split_need_not_fit_the_target(tmp_path, samples):
    long = dataclasses.replace(samples[0], input_ids=[300] * 65, loss_spans=[(0, 65)])
    corpus = write(tmp_path / "c", [long, *samples[1:]])
    assert len(index_rows(corpus, **LIMITS, only=Split.VALIDATION)) == 8
    with pytest.raises(DataError, match="line 1"):
        index_rows(corpus, **LIMITS, only=Split.TRAIN)


@pytest.mark.parametrize(
    ("only", "kept", "advice"),
    [
        (Split.VALIDATION, Split.TRAIN, "Raise corpus.validation_fraction"),
        (Split.TRAIN, Split.VALIDATION, "Lower corpus.validation_fraction"),
    ],
)
def test_a_corpus_without_the_split_asked_for_is_refused(tmp_path, only, kept, advice):
    samples = [make_sample(0, 9, split=kept), make_sample(1, 9, split=Split.HELDOUT)]
    corpus = write(tmp_path / "corpus.jsonl", samples)
    said = rf"none of its 2 samples is a {only} sample .*1 are held out.*1 are of the other split.*"
    with pytest.raises(DataError, match=said + advice):
        index_rows(corpus, **LIMITS, only=only)


def test_an_index_of_one_split_is_taken_for_no_other(corpus, tmp_path):
    index, digest = tmp_path / FILE_NAME, digest_file(corpus)
    first = open_rows(corpus, digest, **LIMITS, only=Split.VALIDATION, index=index)
    found = load_index(index, digest, only=Split.VALIDATION)
    assert found is not None
    same(found, first)
    assert load_index(index, digest) is None
    assert load_index(index, digest, only=Split.TRAIN) is None
    same(open_rows(corpus, digest, **LIMITS, index=index), index_rows(corpus, **LIMITS))
    assert load_index(index, digest, only=Split.VALIDATION) is None


def test_a_last_line_without_its_end_counts(corpus, samples):
    corpus.write_bytes(corpus.read_bytes()[:-1])
    assert index_rows(corpus, **LIMITS).sample_ids[-1] == samples[-1].sample_id


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda s: dataclasses.replace(s, input_ids=[1] * 65), r"line 3 \(sample .*65 tokens.*64"),
        (lambda s: dataclasses.replace(s, input_ids=[1, 256, 3]), r"line 3 .*from 1 to 256.*256"),
        (lambda s: dataclasses.replace(s, input_ids=[1, -1, 3]), r"line 3 .*from -1 to 3"),
    ],
)
def test_what_does_not_fit_the_target_is_named_and_held_out_it_may(
    tmp_path, samples, spoil, message
):
    bad = dataclasses.replace(spoil(samples[2]), loss_spans=[(0, 2)])
    with pytest.raises(DataError, match=message):
        index_rows(write(tmp_path / "a", [*samples[:2], bad, *samples[3:]]), **LIMITS)
    heldout = dataclasses.replace(bad, split=Split.HELDOUT)
    rows = index_rows(write(tmp_path / "b", [*samples[:2], heldout, *samples[3:]]), **LIMITS)
    assert rows.heldout == 2


def test_without_limits_any_token_will_do(tmp_path):
    long = dataclasses.replace(make_sample(0, 4000), input_ids=[10**6] * 4000)
    rows = index_rows(write(tmp_path / "a", [long]), vocab_size=None, max_position=None)
    assert rows.lengths.tolist() == [4000]


@pytest.mark.parametrize("line", [b"", b"{}", b"[1]", b'{"sample_id": "\xff"}', b"\x00"])
def test_a_line_that_is_no_sample_is_named(corpus, line):
    lines = corpus.read_bytes().splitlines()
    corpus.write_bytes(b"\n".join([*lines[:5], line, *lines[5:]]))
    with pytest.raises(DataError, match=r"corpus\.jsonl, line 6: not a sample"):
        index_rows(corpus, **LIMITS)


@pytest.mark.parametrize("name", ["{:032x}", "row-{}"])
def test_the_first_sample_that_comes_twice_is_named_with_its_line(tmp_path, name):
    samples = renamed(make_samples(30), name.format)
    doubled = [*samples[:20], samples[7], *samples[20:], samples[3]]
    with pytest.raises(DataError, match=rf"line 21 \(sample {samples[7].sample_id}\): .* before"):
        index_rows(write(tmp_path / "c", doubled), **LIMITS)


IDS = st.lists(
    st.one_of(
        st.text(max_size=40).filter(lambda t: t.isprintable()),
        st.binary(min_size=16, max_size=16).map(bytes.hex),
        st.sampled_from(["A" * 32, "0" * 31, "0" * 33, " " * 32, "00 " * 10 + "00"]),
    ),
    max_size=12,
)


@given(IDS, st.integers(0, 12))
def test_ids_come_back_as_they_were(ids, cut):
    builder = IdsBuilder()
    builder.add(ids[:cut])
    builder.add(ids[cut:])
    built = builder.ids()
    assert isinstance(built, SampleIds)
    assert list(built) == ids
    assert built[1:4] == tuple(ids[1:4])
    assert built.take(range(len(ids) - 1, -1, -1)) == tuple(reversed(ids))
    repeated = next((n for n, i in enumerate(ids) if i in ids[:n]), None)
    assert built.first_repeated() == repeated
    for outside in (len(ids), -len(ids) - 1):
        with pytest.raises(IndexError):
            built[outside]


def test_hexadecimal_ids_take_16_bytes_each():
    builder = IdsBuilder()
    builder.add([f"{n:032x}" for n in range(1000)])
    assert len(builder.ids().blob) == 16_000


@pytest.mark.parametrize("name", ["{:032x}", "row-{}"])
def test_the_index_says_what_the_corpus_says(tmp_path, samples, monkeypatch, name):
    corpus = write(tmp_path / "corpus.jsonl", renamed(samples, name.format))
    index, digest = tmp_path / "features" / FILE_NAME, digest_file(corpus)
    first = open_rows(corpus, digest, **LIMITS, index=index)
    same(first, index_rows(corpus, **LIMITS))
    monkeypatch.setattr("paceline.types.row_index.index_rows", None)
    same(open_rows(corpus, digest, **LIMITS, index=index), first)


def test_an_index_that_does_not_fit_is_made_anew(corpus, tmp_path, samples):
    index, digest = tmp_path / FILE_NAME, digest_file(corpus)
    open_rows(corpus, digest, **LIMITS, index=index)
    whole = index.read_bytes()
    assert load_index(index, digest) is not None
    assert load_index(index, digest, vocab_size=300, max_position=64) is None
    assert load_index(index, digest, vocab_size=256, max_position=63) is None
    assert load_index(index, "0" * 16 + "-1") is None
    with pytest.raises(DataError, match="64 tokens"):
        open_rows(corpus, digest, vocab_size=256, max_position=63, index=index)
    for damaged in (b"", whole[:7], whole[:-1], whole[:-9], whole + b"\n", b"{}\n"):
        index.write_bytes(damaged)
        assert load_index(index, digest) is None
        same(open_rows(corpus, digest, **LIMITS, index=index), index_rows(corpus, **LIMITS))
        assert index.read_bytes() == whole
    write(corpus, samples[1:])
    again = open_rows(corpus, digest_file(corpus), **LIMITS, index=index)
    assert again.sample_ids[0] == samples[1].sample_id
    assert load_index(index, digest) is None


def test_no_flipped_bit_of_an_index_is_believed(corpus, tmp_path):
    index, digest = tmp_path / FILE_NAME, digest_file(corpus)
    open_rows(corpus, digest, **LIMITS, index=index)
    whole = index.read_bytes()
    for bit in range(len(whole) * 8):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        index.write_bytes(data)
        assert load_index(index, digest) is None


def test_an_index_that_cannot_be_written_is_no_error(corpus, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    rows = open_rows(corpus, digest_file(corpus), **LIMITS, index=blocked / FILE_NAME)
    assert len(rows) == 41


def test_a_corpus_that_changes_under_the_reader_is_refused(corpus, tmp_path):
    with pytest.raises(DataError, match="changed while it was read"):
        open_rows(corpus, "0" * 16 + "-1", **LIMITS, index=tmp_path / FILE_NAME)
    assert not (tmp_path / FILE_NAME).exists()


def test_a_position_that_begins_no_sample_is_named(corpus):
    with pytest.raises(DataError, match=r"byte 3: no sample begins here.* changed since"):
        read_rows(corpus, [3])


def test_rows_know_no_torch():
    program = "import sys, paceline.types.row_index; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
