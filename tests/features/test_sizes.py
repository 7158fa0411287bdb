from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from feature_samples import random_features
from paceline.features.shard import write_shard
from paceline.features.sizes import bytes_per_token, codec_ratio, store_bytes, unit_bytes_bound


def test_t_47_estimate():
    token = bytes_per_token(3, 4096, last=True, dtype="bfloat16")
    assert token == 32_768
    total = store_bytes(
        tokens=120_000 * 1000, samples=120_000, shards=58_600, bytes_per_token=token
    )
    assert f"{total / 1e12:.2f} TB, {total / 2**40:.2f} TiB" == "3.93 TB, 3.58 TiB"


@pytest.mark.parametrize(
    ("lengths", "hidden"), [([300] * 4, 64), ([40] * 300, 64), ([2000], 576), ([7] * 1000, 16)]
)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_t_47_a_file_is_as_large_as_estimated(tmp_path, lengths, hidden, last, dtype):
    features = random_features(lengths, hidden=hidden, last=last, dtype=getattr(torch, dtype))
    token = bytes_per_token(2, hidden, last=last, dtype=dtype)
    assert token * sum(lengths) == features.num_bytes
    stat = write_shard(tmp_path / "x", features, fingerprint="f" * 32)
    estimate = store_bytes(
        tokens=sum(lengths), samples=len(lengths), shards=1, bytes_per_token=token
    )
    assert stat.size == pytest.approx(estimate, rel=0.01)


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    hidden=st.sampled_from([4, 8, 64, 100, 576]),
    taps=st.integers(1, 3),
    last=st.booleans(),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    codec=st.sampled_from(["none", "planes", "int8o"]),
    noise=st.booleans(),
)
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None
)
def test_no_shard_is_larger_than_its_bound(
    tmp_path, lengths, hidden, taps, last, dtype, codec, noise
):
    """Of states without any order too: a reservation has to hold."""
    features = random_features(
        lengths, hidden=hidden, layer_ids=tuple(range(taps)), last=last, dtype=getattr(torch, dtype)
    )
    if noise:
        features = incompressible(features, finite=codec == "int8o")
    bound = unit_bytes_bound(
        tokens=sum(lengths),
        samples=len(lengths),
        num_taps=taps,
        hidden_size=hidden,
        last=last,
        dtype=dtype,
        codec=codec,
    )
    stat = write_shard(tmp_path / "x", features, fingerprint="f" * 32, codec=codec)
    assert stat.size <= bound


def test_the_bound_is_near_what_cannot_be_compressed(tmp_path):
    features = incompressible(random_features([300] * 20, hidden=576), finite=False)
    for codec in ("none", "planes"):
        bound = unit_bytes_bound(
            tokens=6000, samples=20, num_taps=2, hidden_size=576, last=True, dtype="bfloat16",
            codec=codec,
        )  # fmt: skip
        stat = write_shard(tmp_path / "x", features, fingerprint="f" * 32, codec=codec)
        assert 0.998 * bound < stat.size <= bound


def test_an_estimate_for_each_codec():
    def total(codec, dtype="bfloat16"):
        return store_bytes(
            tokens=1000, samples=1, shards=1, bytes_per_token=1000, codec=codec, dtype=dtype
        )

    assert total("planes") < 0.70 * total("none")
    assert total("int8o") < 0.52 * total("none")
    assert codec_ratio("none") == codec_ratio("none", "float32") == 1
    assert codec_ratio("int8o", "float32") < codec_ratio("int8o") < codec_ratio("planes") < 1


def incompressible(features, *, finite):
    """The same shapes with random bits."""
    generator = torch.Generator().manual_seed(1)

    def noise(states):
        if states is None:
            return None
        signed = {2: torch.int16, 4: torch.int32}[states.dtype.itemsize]
        info = torch.iinfo(signed)
        bits = torch.randint(info.min, info.max, states.shape, generator=generator, dtype=signed)
        made = bits.view(states.dtype)
        return torch.where(torch.isfinite(made), made, 1) if finite else made

    return replace(features, taps=noise(features.taps), last=noise(features.last))
