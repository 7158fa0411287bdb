"""Hidden states handed from process to process in anonymous memory.

A parcel is a memory file without a name: it is gone with the last process that holds it, however
that process ends, so nothing of it is ever left behind.
"""

import mmap
import os
import resource
from dataclasses import dataclass

import torch

from paceline.types.batch import Features, TokenBatch


@dataclass(frozen=True)
class Handle:
    """Where a parcel of another process is found while that process holds it."""

    pid: int
    descriptor: int
    inode: int
    """Tells the parcel from a later one under the same descriptor."""
    num_bytes: int


_DESCRIPTORS = 1 << 16


def allow_many_parcels() -> None:
    """Let this process hold tens of thousands of parcels, where the system lets it at all.

    Each takes two descriptors, and the usual limit of 1,024 is one that a process may raise.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Parcel:
    """Memory that several processes can map. Linux only."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self._descriptor = descriptor
        self.num_bytes = num_bytes
        # Of no bytes nothing can be mapped.
        self._map = mmap.mmap(descriptor, max(1, num_bytes))

    @classmethod
    def of(cls, num_bytes: int) -> "Parcel":
        """A new one. Raises OSError where memory or descriptors have run out."""
        descriptor = os.memfd_create("paceline", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, max(1, num_bytes))
            return cls(descriptor, num_bytes)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def opened(cls, handle: Handle) -> "Parcel":
        """Another process's. Raises OSError where that process no longer holds it."""
        descriptor = os.open(f"/proc/{handle.pid}/fd/{handle.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_ino != handle.inode:
                raise FileNotFoundError(f"process {handle.pid} no longer holds that parcel")
            return cls(descriptor, handle.num_bytes)
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def handle(self) -> Handle:
        """For another process; good until `close`."""
        inode = os.fstat(self._descriptor).st_ino
        return Handle(os.getpid(), self._descriptor, inode, self.num_bytes)

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int = 0) -> torch.Tensor:
        """A view of the bytes from `offset` on; it keeps them mapped as long as it lives."""
        count = 1
        for size in shape:
            count *= size
        if not count:
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset)
        return flat.view(shape)

    def close(self) -> None:
        """Let go of it; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            # Unmapped with the last view of it.
            del self._map


@dataclass(frozen=True)
class FeatureHandle:
    """Features of one sample in a parcel; small, and can be pickled."""

    tokens: TokenBatch
    layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: torch.dtype
    last: bool
    parcel: Handle

    def over(self, parcel: Parcel) -> Features:
        """The features, as views of `parcel`, which is this handle's."""
        rows, taps = self.tokens.input_ids.numel(), len(self.layer_ids)
        shape = (rows, taps, self.hidden_size)
        edge = rows * taps * self.hidden_size * self.dtype.itemsize
        return Features(
            tokens=self.tokens,
            taps=parcel.tensor(self.dtype, shape),
            last=parcel.tensor(self.dtype, (rows, self.hidden_size), edge) if self.last else None,
            layer_ids=self.layer_ids,
        )


def into_parcel(features: Features) -> tuple[Parcel, FeatureHandle]:
    """Copy the features of one sample into a parcel of this process."""
    parcel = Parcel.of(features.num_bytes)
    handle = FeatureHandle(
        tokens=features.tokens,
        layer_ids=features.layer_ids,
        hidden_size=features.taps.shape[-1],
        dtype=features.taps.dtype,
        last=features.last is not None,
        parcel=parcel.handle,
    )
    copy = handle.over(parcel)
    copy.taps.copy_(features.taps)
    if copy.last is not None and features.last is not None:
        copy.last.copy_(features.last)
    return parcel, handle
