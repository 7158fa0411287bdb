import dataclasses

import numpy as np
import pytest
import torch

from feature_samples import random_features
from paceline.durable.checksum import crc64
from paceline.durable.errors import ShardDamaged
from paceline.durable.store import MemoryStore, Stat
from paceline.features import header as headers
from paceline.features.format import write_tensors
from paceline.features.header import KIND, parse_header, read_header
from paceline.features.shard import Shard, write_shard
from paceline.types import Features, TokenBatch

CODECS = ["none", "planes", "int8o"]


class Counting(MemoryStore):
    """Remembers what was asked for."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def get_range(self, key, start, end):
        self.asked.append((start, end))
        return super().get_range(key, start, end)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "unit-000000.safetensors"


def steady_features():
    """The same in every version of torch."""
    values = torch.arange(6 * 2 * 8)
    return Features(
        tokens=TokenBatch(
            input_ids=torch.arange(6) * 7919 % 50_000,
            loss_mask=torch.arange(6) % 3 > 0,
            offsets=torch.tensor([0, 4, 6]),
            sample_ids=("a" * 32, "b" * 32),
        ),
        taps=(values.float() / 7 - 5).bfloat16().view(6, 2, 8),
        last=(torch.arange(48).float() / 3).bfloat16().view(6, 8),
        layer_ids=(1, 3),
    )


def test_shards_of_version_1_keep_their_bytes(path):
    """What the first release wrote for these features; a resume compares with it."""
    stat = write_shard(path, steady_features(), fingerprint="f" * 32)
    assert stat == Stat(1174, 0xBB800E5437899B44)


@pytest.mark.parametrize("codec", CODECS)
def test_the_header_promises_the_whole_object(path, codec):
    features = random_features([3, 40, 7], hidden=64)
    stat = write_shard(path, features, fingerprint="f" * 32, codec=codec)
    data = path.read_bytes()
    found = parse_header(data, len(data), "x")
    assert found.promised == stat == Stat(len(data), crc64(data))
    assert found == Shard(path).header
    assert found.fingerprint == "f" * 32
    assert found.layer_ids == (1, 3)
    assert found.sample_ids == features.tokens.sample_ids
    assert found.codec == codec
    ids = found.entries["input_ids"]
    assert np.frombuffer(data[ids.start : ids.end], "<i4").tolist() == (
        features.tokens.input_ids.tolist()
    )


def test_a_damaged_payload_leaves_the_promise_as_it_was(path):
    stat = write_shard(path, random_features([3]), fingerprint="f")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    assert parse_header(bytes(data), len(data), "x").promised == stat != Stat(0, crc64(data))


@pytest.mark.parametrize(("samples", "reads"), [(3, 1), (2500, 2)])
def test_a_header_takes_one_read_or_two_and_no_payload(path, samples, reads):
    stat = write_shard(path, random_features([40] * samples), fingerprint="f")
    store = Counting()
    store.put(path.name, path)
    found = read_header(store, path.name, stat.size)
    assert found == Shard(path).header
    assert len(store.asked) == reads
    read = sum(end - start for start, end in store.asked)
    assert read <= max(found.data_start, headers._FIRST_READ)


def test_objects_that_are_no_shards_are_named(path):
    write_shard(path, random_features([3]), fingerprint="f")
    data = path.read_bytes()
    store = MemoryStore()
    store.put("short", data[:60])
    store.put("foreign", b"\x10\0\0\0\0\0\0\0" + b"{" * 200)
    store.put("empty", b"")
    store.put("whole", data)
    for key, size, said in [
        ("gone", 10, "is not there"),
        ("short", 60, "cut off in its header, at 60"),
        ("short", 90, "fewer than 90 bytes"),
        ("foreign", 208, "cut off in its header|is not a shard"),
        ("empty", 0, "is empty"),
        (
            "whole",
            len(data) - 1,
            f"has {len(data) - 1} bytes where its header promises {len(data)}",
        ),
    ]:
        with pytest.raises(ShardDamaged, match=rf"{store.url}/{key} .*({said})"):
            read_header(store, key, size)


def written(path, **changes):
    metadata = {
        "kind": KIND, "version": "1", "fingerprint": "f", "layer_ids": "[1]", "sample_ids": "[]",
    }  # fmt: skip
    entries = {"taps": ("U8", [4], b"abcd")}
    write_tensors(path, entries, {k: v for k, v in (metadata | changes).items() if v is not None})
    return path.read_bytes()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": "3"}, "format version 3, .* Use the version that wrote it"),
        ({"kind": "other"}, "is of format"),
        ({"version": "x"}, "is of format"),
        ({"layer_ids": "[1"}, "makes no sense"),
        ({"sample_ids": None}, "makes no sense"),
        ({"kind": None}, "makes no sense"),
    ],
)
def test_whole_headers_that_say_nonsense_are_refused(path, changes, said):
    data = written(path, **changes)
    with pytest.raises(ShardDamaged, match=said):
        parse_header(data, len(data), "x")


def test_tensors_with_gaps_would_leave_bytes_unchecked(path, monkeypatch):
    data = written(path)
    assert parse_header(data, len(data), "x").promised == Stat(len(data), crc64(data))
    moved = data.replace(b'"data_offsets":[0,4]', b'"data_offsets":[1,5]')
    monkeypatch.setattr(headers, "header_checksum", lambda header: header[headers.CHECKSUM])
    with pytest.raises(ShardDamaged, match=r"puts `taps` at \[1, 5\]"):
        parse_header(moved + b"x", len(moved) + 1, "x")


def test_bytes_that_do_not_fit_their_shape_are_not_written(path):
    with pytest.raises(ValueError, match=r"`taps`: 4 bytes for F32 \[2\]"):
        write_tensors(path, {"taps": ("F32", [2], b"abcd")}, {})
    assert not path.exists()


def test_headers_are_values(path):
    write_shard(path, random_features([3]), fingerprint="f")
    found = Shard(path).header
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.codec = "planes"  # type: ignore[misc]
