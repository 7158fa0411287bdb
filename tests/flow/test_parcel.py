"""Memory without a name: shared while somebody holds it, gone with the last, found by no other."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from feature_samples import assert_same
from paceline.flow.parcel import Handle, Parcel, into_parcel
from paceline.types import Features, TokenBatch


def features(tokens: int, *, last: bool, dtype: torch.dtype) -> Features:
    batch = TokenBatch(
        input_ids=torch.arange(tokens),
        loss_mask=torch.arange(tokens) > 1,
        offsets=torch.tensor([0, tokens]),
        sample_ids=("a",),
    )
    taps = torch.randn(tokens, 2, 8).to(dtype)
    return Features(batch, taps, torch.randn(tokens, 8).to(dtype) if last else None, (1, 3))


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_travel_bit_for_bit(last, dtype):
    sample = features(5, last=last, dtype=dtype)
    parcel, handle = into_parcel(sample)
    other = Parcel.opened(handle.parcel)
    parcel.close()
    assert_same(handle.over(other), sample)
    other.close()


def test_another_process_sees_what_is_written():
    parcel = Parcel.of(8)
    handle = parcel.handle
    code = f"open('/proc/{handle.pid}/fd/{handle.descriptor}', 'r+b').write(b'paceline')"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert bytes(parcel.tensor(torch.uint8, (8,)).tolist()) == b"paceline"
    parcel.close()


def test_views_outlive_the_parcel_and_closing_twice_does_nothing():
    parcel = Parcel.of(16)
    view = parcel.tensor(torch.float32, (2, 2))
    view.fill_(3.0)
    parcel.close()
    parcel.close()
    assert view.sum() == 12.0


def test_one_that_is_gone_or_replaced_is_not_taken_for_it():
    parcel = Parcel.of(8)
    handle = parcel.handle
    parcel.close()
    with pytest.raises(FileNotFoundError):
        Parcel.opened(handle)
    another = Parcel.of(8)
    assert another.handle.inode != handle.inode
    stale = Handle(os.getpid(), another.handle.descriptor, handle.inode, 8)
    with pytest.raises(FileNotFoundError, match="no longer holds"):
        Parcel.opened(stale)
    another.close()


def held() -> int:
    links = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum("paceline" in str(link) for link in links)


def test_no_descriptor_stays():
    before = held()
    for _ in range(50):
        parcel, handle = into_parcel(features(3, last=True, dtype=torch.float32))
        other = Parcel.opened(handle.parcel)
        assert held() > before
        other.close()
        parcel.close()
    assert held() == before
