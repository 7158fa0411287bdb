import json

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from feature_samples import assert_same, random_features, sample_of
from paceline.durable.errors import ShardDamaged
from paceline.features import frames
from paceline.features.codec import (
    BytePlanes,
    Int8Outliers,
    choose_outliers,
    outlier_count,
    splitter_for,
)
from paceline.features.format import write_tensors
from paceline.features.shard import Shard, write_shard
from paceline.types import Features, TokenBatch

reuses_folder = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def bits_of(tensor):
    signed = {torch.bfloat16: torch.int16, torch.float32: torch.int32}[tensor.dtype]
    return tensor.contiguous().view(signed)


def features_of(taps, last, lengths, ids=None):
    total = sum(lengths)
    return Features(
        tokens=TokenBatch(
            input_ids=torch.arange(total) if ids is None else ids,
            loss_mask=torch.ones(total, dtype=torch.bool),
            offsets=torch.tensor([0, *lengths]).cumsum(0),
            sample_ids=tuple(f"{n:032x}" for n in range(len(lengths))),
        ),
        taps=taps,
        last=last,
        layer_ids=tuple(range(taps.shape[1])),
    )


def chat(lengths, *, prefix, hidden=64, dtype=torch.bfloat16, noise=0.0, seed=0):
    """Samples whose first `prefix` tokens, and states but for `noise`, are the same."""
    made = random_features(lengths, hidden=hidden, seed=seed, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    ids, taps, last = made.tokens.input_ids.clone(), made.taps.clone(), made.last.clone()
    same = random_features([max(1, prefix)], hidden=hidden, seed=seed + 1, dtype=torch.float32)
    for start, length in zip(made.tokens.offsets.tolist(), lengths, strict=False):
        count = min(prefix, length)
        ids[start : start + count] = torch.arange(count)
        for states, shared in ((taps, same.taps), (last, same.last)):
            jitter = torch.randn(shared[:count].shape, generator=generator)
            states[start : start + count] = shared[:count] * (1 + noise * jitter)
    return features_of(taps.to(dtype), last.to(dtype), lengths, ids)


@given(
    rows=arrays(np.uint16, st.tuples(st.integers(1, 5), st.integers(1, 7))),
)
def test_any_bits_survive_the_planes_of_bfloat16(rows):
    splitter = BytePlanes(rows.shape[1], 2)
    planes = splitter.split(rows)
    assert [p.shape[1] for p in planes] == list(splitter.widths)
    assert np.array_equal(splitter.join(planes), rows)


@given(rows=arrays(np.uint32, st.tuples(st.integers(1, 5), st.integers(1, 7))))
def test_any_bits_survive_the_planes_of_float32(rows):
    splitter = BytePlanes(rows.shape[1], 4)
    planes = splitter.split(rows)
    assert len(planes) == 4
    assert np.array_equal(splitter.join(planes), rows)


def test_the_first_plane_is_the_exponent():
    values = torch.tensor([[1.0, -1.0, 0.5, 1.999, -3.0e38]]).bfloat16()
    bits = values.view(torch.int16).numpy().view(np.uint16)
    assert BytePlanes(5, 2).split(bits)[0].tolist() == [[127, 127, 126, 128, 254]]
    wide = values.float().view(torch.int32).numpy().view(np.uint32)
    assert BytePlanes(5, 4).split(wide)[0].tolist() == [[127, 127, 126, 128, 254]]


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    prefix=st.integers(0, 20),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    noise=st.sampled_from([0.0, 1e-3]),
    last=st.booleans(),
    frame=st.sampled_from([1, 1000, 4000, 1 << 20]),
    seed=st.integers(0, 99),
)
@reuses_folder
def test_planes_give_back_every_bit(
    tmp_path, monkeypatch, lengths, prefix, dtype, noise, last, frame, seed
):
    monkeypatch.setattr(frames, "FRAME_BYTES", frame)
    features = chat(lengths, prefix=prefix, dtype=dtype, noise=noise, seed=seed)
    if not last:
        features = Features(features.tokens, features.taps, None, features.layer_ids)
    path = tmp_path / "unit"
    stat = write_shard(path, features, fingerprint="f", codec="planes")
    shard = Shard(path)
    assert shard.verify() == stat == shard.header.promised
    for n in reversed(range(len(lengths))):
        assert_same(shard.read(n), sample_of(features, n))
    assert_same(shard.features, features)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_that_are_no_numbers_survive_planes(tmp_path, dtype):
    generator = torch.Generator().manual_seed(0)
    size = {torch.bfloat16: torch.int16, torch.float32: torch.int32}[dtype]
    info = torch.iinfo(size)
    bits = torch.randint(info.min, info.max, (50, 2, 16), generator=generator, dtype=size)
    taps = bits.view(dtype)
    assert not torch.isfinite(taps).all()
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-40, -1e-40, 1.0])
    last = special.repeat(50, 2).to(dtype)
    path = tmp_path / "unit"
    write_shard(path, features_of(taps, last, [20, 30]), fingerprint="f", codec="planes")
    found = Shard(path).features
    assert torch.equal(bits_of(found.taps), bits)
    assert torch.equal(bits_of(found.last), bits_of(last))


def test_bytes_that_cannot_be_compressed_cost_no_more_than_their_planes(tmp_path):
    generator = torch.Generator().manual_seed(0)
    taps = torch.randint(-(2**15), 2**15 - 1, (64, 2, 512), generator=generator).to(torch.int16)
    path = tmp_path / "unit"
    write_shard(path, features_of(taps.view(torch.bfloat16), None, [64]), fingerprint="f",
                codec="planes")  # fmt: skip
    states = Shard(path).header.entries["states"]
    assert states.end - states.start == taps.nbytes


def test_a_shared_prefix_is_stored_once(tmp_path):
    lengths, prefix = [100] * 20, 60
    sizes = {}
    for name, shared in (("shared", prefix), ("apart", 0)):
        features = chat(lengths, prefix=shared)
        sizes[name] = write_shard(tmp_path / name, features, fingerprint="f", codec="planes").size
    saved = 1 - sizes["shared"] / sizes["apart"]
    assert saved > 0.95 * prefix / 100 * 19 / 20
    row, length = json.loads(Shard(tmp_path / "shared").header.metadata["prefix"])
    assert (row, length) == (0, prefix)


def test_a_prefix_that_differs_by_rounding_is_still_cheap(tmp_path):
    """Another kernel may have made the other sample's states."""
    lengths = [100] * 20
    sizes = [
        write_shard(
            tmp_path / "x", chat(lengths, prefix=60, noise=noise), fingerprint="f", codec="planes"
        ).size
        for noise in (0.0, 2**-12, 10.0)
    ]
    assert sizes[0] < sizes[1] < 0.75 * sizes[2]


def test_the_reference_is_what_most_samples_follow():
    ids = np.array([9, 1, 2, 3, 1, 2, 4, 1, 2, 3, 5, 1], dtype=np.int32)
    offsets = [0, 1, 4, 7, 11, 12]
    assert frames._find_prefix(ids, offsets, max_rows=10) == (1, 3)
    assert frames._find_prefix(ids, offsets, max_rows=2) == (1, 2)
    assert frames._find_prefix(ids, offsets, max_rows=0) == (0, 0)
    assert frames._find_prefix(ids[:4], [0, 1, 4], max_rows=9) == (0, 0)
    assert frames._shared(ids, (7, 11), (1, 3)) == 3
    assert frames._shared(ids, (4, 7), (1, 3)) == 2
    assert frames._shared(ids, (1, 4), (1, 3)) == 0, "the reference itself"
    assert frames._shared(ids, (11, 12), (1, 3)) == 1
    assert frames._shared(ids, (0, 1), (1, 3)) == 0


def test_a_sample_is_read_without_its_neighbours(tmp_path, monkeypatch):
    features = chat([100] * 40, prefix=10)
    path = tmp_path / "unit"
    write_shard(path, features, fingerprint="f", codec="planes")
    shard = Shard(path)
    decoded = []
    plane = frames._plane

    def counted(data, shape, decompressor):
        decoded.append(shape[0] * shape[1])
        return plane(data, shape, decompressor)

    monkeypatch.setattr(frames, "_plane", counted)
    row = features.num_bytes // 4000
    assert_same(shard.read(17), sample_of(features, 17))
    assert sum(decoded) <= 2 * 100 * row, "its own rows, and once the reference's"
    decoded.clear()
    assert_same(shard.read(18), sample_of(features, 18))
    assert sum(decoded) == 100 * row


def relative_errors(found, wanted):
    difference = (found.float() - wanted.float()).norm(dim=-1)
    return difference / wanted.float().norm(dim=-1).clamp_min(1e-30)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("hidden", [8, 64, 100, 576])
def test_int8o_is_near_and_tokens_are_exact(tmp_path, dtype, hidden):
    features = random_features([50, 1, 20], hidden=hidden, dtype=dtype)
    path = tmp_path / "unit"
    write_shard(path, features, fingerprint="f", codec="int8o")
    shard = Shard(path)
    found = shard.features
    assert found.taps.dtype == dtype
    assert torch.equal(found.tokens.input_ids, features.tokens.input_ids)
    assert relative_errors(found.taps, features.taps).max() < 0.012
    assert relative_errors(found.last, features.last).max() < 0.012
    one = shard.read(1)
    assert torch.equal(one.taps, found.taps[50:51])
    assert len(one.tokens.input_ids) == 1


def test_int8o_keeps_massive_activations_and_what_stands_beside_them(tmp_path):
    """Of one token, 10,000 times the rest: they would take all 8 bits of their group."""
    features = random_features([60, 60], hidden=576)
    taps = features.taps.clone()
    taps[0, :, [7, 300, 301]] = 24_832.0
    taps[60, 0, 575] = -30_000.0
    path = tmp_path / "unit"
    made = Features(features.tokens, taps, features.last, features.layer_ids)
    write_shard(path, made, fingerprint="f", codec="int8o")
    found = Shard(path).features
    massive = taps.abs() > 1000
    assert massive.sum() == 7
    assert torch.equal(found.taps[massive], taps[massive])
    rest = torch.where(massive, torch.zeros((), dtype=taps.dtype), taps)
    kept = torch.where(massive, torch.zeros((), dtype=taps.dtype), found.taps)
    assert relative_errors(kept, rest).max() < 0.012


@pytest.mark.parametrize("value", [0.0, -0.0, 3.25, -1e-38, 1e-40, 3.3e38])
def test_int8o_of_constant_rows(tmp_path, value):
    taps = torch.full((9, 2, 128), value, dtype=torch.bfloat16)
    path = tmp_path / "unit"
    write_shard(path, features_of(taps, None, [9]), fingerprint="f", codec="int8o")
    found = Shard(path).features.taps
    assert torch.isfinite(found).all()
    # A scale has 8 bits; among the very smallest numbers it has fewer.
    torch.testing.assert_close(found, taps, rtol=0.01, atol=1e-40)


def test_int8o_refuses_what_is_no_number(tmp_path):
    taps = torch.zeros(3, 1, 64, dtype=torch.bfloat16)
    taps[1, 0, 5] = torch.nan
    with pytest.raises(ValueError, match=r"int8o: .* not finite"):
        write_shard(tmp_path / "x", features_of(taps, None, [3]), fingerprint="f", codec="int8o")
    assert not (tmp_path / "x").exists()


@given(
    values=arrays(
        np.float32,
        st.tuples(st.integers(1, 4), st.just(2 * 40)),
        elements=st.floats(-(2.0**100), 2.0**100, width=32),
    ),
    item=st.sampled_from([2, 4]),
)
def test_int8o_is_within_half_a_step_of_each_group(values, item):
    rows = values.view(np.uint32)
    if item == 2:
        rows = (rows >> 16).astype(np.uint16)
        values = (rows.astype(np.uint32) << 16).view(np.float32)
    outliers = choose_outliers([rows], slots=2, hidden_size=40)
    splitter = Int8Outliers(40, item, outliers)
    planes = splitter.split(rows)
    assert [p.shape[1] for p in planes] == list(splitter.widths)
    back = splitter.join(planes)
    found = back.view(np.float32) if item == 4 else (back.astype(np.uint32) << 16).view(np.float32)
    largest = np.abs(values).reshape(len(values), 2, 40).max(axis=2)
    bound = np.repeat(largest, 40, axis=1) * (0.51 / 127 * 1.01 + 2**-8) + 1e-40
    assert (np.abs(found - values) <= bound).all()


def test_outliers_are_the_largest_peaks_and_the_largest_means():
    values = np.ones((100, 2 * 64), dtype=np.float32)
    values[3, 10] = 900  # one token
    values[:, 20] = 50  # every token
    values[5, 64 + 63] = 700
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    chosen = choose_outliers([bits[:50], bits[50:]], slots=2, hidden_size=64)
    assert chosen.shape == (2, outlier_count(64)) == (2, 4)
    assert {10, 20} <= set(chosen[0].tolist())
    assert 63 in chosen[1].tolist()
    assert all(sorted(set(row)) == row for row in chosen.tolist())


@pytest.mark.parametrize("codec", ["planes", "int8o"])
def test_equal_features_give_equal_bytes(tmp_path, codec):
    for name in ("a", "b"):
        write_shard(tmp_path / name, chat([9, 40], prefix=5), fingerprint="f", codec=codec)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_frames_that_no_writer_makes_are_damage(tmp_path):
    """Checksums hold, but the frames do not fit: said so, not shown as numbers."""
    features = chat([30, 40], prefix=5)
    write_shard(tmp_path / "good", features, fingerprint="f", codec="planes")
    good = Shard(tmp_path / "good")
    header, data = good.header, (tmp_path / "good").read_bytes()
    for change in ("frames", "states"):
        entries = {n: (e.dtype, e.shape, data[e.start : e.end]) for n, e in header.entries.items()}
        dtype, shape, value = entries[change]
        entries[change] = (dtype, shape, bytes(len(value)))
        metadata = {k: v for k, v in header.metadata.items() if k not in ("crc64", "header_crc64")}
        write_tensors(tmp_path / "bad", entries, metadata)
        with pytest.raises(ShardDamaged, match="frames that cannot be decoded"):
            Shard(tmp_path / "bad").read(1)


def test_an_unknown_codec_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no codec 'zip'"):
        splitter_for("zip", slots=1, hidden_size=8, item_bytes=2, outliers=np.empty((1, 0)))
