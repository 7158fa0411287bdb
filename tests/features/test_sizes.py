import pytest
import torch

from feature_samples import random_features
from paceline.features.shard import write_shard
from paceline.features.sizes import bytes_per_token, store_bytes


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
