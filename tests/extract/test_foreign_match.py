import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from extract_runs import make_sample
from paceline.extract.foreign_files import Shape, find_cache, read_ids
from paceline.extract.foreign_layers import Stated, flags, foreign_ids, own_ids, resolve, select
from paceline.extract.foreign_match import TokenIndex, files_of, first_shape, scan
from paceline.types.rows import index_rows
from paceline.types.sample import encode_sample

IDS = st.lists(st.integers(0, 2), min_size=1, max_size=6)


def index_of(folder: Path, corpus: list[list[int]]) -> TokenIndex:
    samples = [
        replace(make_sample(n, len(ids)), input_ids=ids, loss_spans=[(0, 1)])
        for n, ids in enumerate(corpus)
    ]
    path = folder / "corpus.jsonl"
    path.write_bytes(b"".join(map(encode_sample, samples)))
    return TokenIndex(index_rows(path, vocab_size=None, max_position=None), path)


@given(corpus=st.lists(IDS, min_size=1, max_size=8), ids=IDS, pads=st.booleans())
@settings(max_examples=200, deadline=None)
def test_samples_are_found_by_exactly_their_token_ids(corpus, ids, pads, tmp_path_factory):
    index = index_of(tmp_path_factory.mktemp("corpus"), corpus)
    found = index.find(np.array(ids, dtype=np.int64), pads=pads)

    def fits(wanted: list[int]) -> bool:
        return ids == wanted or (
            pads and ids[: len(wanted)] == wanted and not any(ids[len(wanted) :])
        )

    everyone = {n for n, wanted in enumerate(corpus) if fits(wanted)}
    assert {n for n, first in enumerate(index.first) if first in found} == everyone
    assert len(found) == len(set(found))


def write(path: Path, ids: list[int], slots: int = 2) -> None:
    states = torch.zeros(len(ids), slots, 4)
    save_file({"token_ids": torch.tensor(ids), "hidden_states": states}, path)


def test_samples_of_the_same_tokens_share_a_file_and_the_first_file_is_used(tmp_path):
    index = index_of(tmp_path, [[1, 2], [3], [1, 2], [4]])
    (tmp_path / "cache").mkdir()
    for name, ids in (("a", [3]), ("b", [1, 2]), ("c", [1, 2]), ("d", [9])):
        write(tmp_path / "cache" / f"{name}.safetensors", ids)
    write(tmp_path / "cache" / "e.safetensors", [4], slots=3)
    cache = find_cache(tmp_path / "cache", "speculators")
    shape = first_shape(cache, 4)
    found = scan(cache, index, shape, 4, pytest.fail)
    assert files_of(found, index, range(3)) == [1, 0, 1]
    assert files_of(found, index, range(4)) is None
    assert ([cache.name(n) for n in found.duplicates], found.unmatched) == (["c.safetensors"], [3])
    assert str(found.unreadable[4]) == "not of the format (it has other states than the first file)"


def test_a_scan_reads_no_states_of_safetensors(tmp_path):
    """Sixteen gigabytes of states, which no disk here holds: a file with a hole."""
    path, tokens = tmp_path / "hs_0.safetensors", 1000
    write(path, list(range(tokens)), slots=1)
    data = path.read_bytes()
    header = data[8 : 8 + int.from_bytes(data[:8], "little")]
    slots, ids = 1 << 20, tokens * 8
    size = tokens * slots * 4 * 4
    table = (
        f'{{"token_ids":{{"dtype":"I64","shape":[{tokens}],"data_offsets":[0,{ids}]}},'
        f'"hidden_states":{{"dtype":"F32","shape":[{tokens},{slots},4],'
        f'"data_offsets":[{ids},{ids + size}]}}}}'
    ).encode()
    assert b"hidden_states" in header
    table += b" " * (-len(table) % 8)
    with path.open("wb") as file:
        file.write(len(table).to_bytes(8, "little") + table)
        file.write(np.arange(tokens, dtype="<i8").tobytes())
        file.truncate(8 + len(table) + ids + size)
    before = resident()
    found, shape = read_ids(path, "safetensors", 4)
    assert (found.tolist(), shape) == (list(range(tokens)), Shape(slots, has_last=False))
    assert resident() - before < 64 << 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("kind", "shape", "own", "last"),
    [
        ("ckpt", Shape(3, has_last=True, is_eagle3=True), (1, 15, 28), "normed"),
        ("ckpt", Shape(3, has_last=False, is_eagle3=True), (1, 15, 28), "absent"),
        ("safetensors", Shape(4, has_last=False), (1, 15, 28), "un-normed"),
        ("pt", Shape(4, has_last=False), (2, 16, 29), "un-normed"),
    ],
)
def test_the_defaults_are_those_that_the_tools_document(kind, shape, own, last):
    meaning = resolve(kind, shape, Stated(), 32)
    assert (meaning.own_layers, meaning.last) == (own, last)
    pick = select(meaning, (own[0], own[2]), last=last != "absent")
    assert pick.slots == (0, 2)
    assert pick.is_normed == (last == "normed")


@given(
    own=st.lists(st.integers(0, 30), min_size=1, max_size=5, unique=True).map(sorted),
    convention=st.sampled_from(["output-after", "input-of"]),
    last=st.sampled_from(["un-normed", "absent", None]),
)
def test_what_is_stated_comes_back_as_the_same_layers(own, convention, last):
    layers = foreign_ids(own, convention)
    assert list(own_ids(layers, convention)) == own
    slots = len(own) + (last == "un-normed")
    meaning = resolve("safetensors", Shape(slots, False), Stated(layers, convention, last), 32)
    assert list(meaning.own_layers) == own
    assert meaning.last == (last or "absent")
    assert meaning.in_words() == flags(layers, convention, meaning.last)
    # As it was given to the engine: with the id of the last layer's output behind.
    more = (*layers, 31 + (convention == "input-of"))
    assert resolve("safetensors", Shape(len(more), False), Stated(more, convention), 32) == replace(
        meaning, shape=Shape(len(more), False), last="un-normed"
    )
