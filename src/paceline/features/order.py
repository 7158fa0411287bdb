"""The order of samples in an epoch: pure functions, so a position is all a resume needs."""

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def order(seed: int, epoch: int, manifest_hash: str, n: int) -> npt.NDArray[np.int64]:
    """Permutation of range(n), int64 [n], the same on every machine and numpy version.

    Raw generator bits are promised to be stable across numpy versions, `permutation` is not.
    """
    return np.argsort(_bits("samples", seed, epoch, manifest_hash, n), kind="stable")


def windowed_order(
    seed: int, epoch: int, manifest_hash: str, counts: Sequence[int], window: int
) -> npt.NDArray[np.int64]:
    """Permutation that needs few shards at a time, int64 [sum(counts)].

    `counts` are samples per shard, samples being numbered shard by shard. The shards are
    shuffled; each `window` of them in a row is then shuffled as one. Raises ValueError for a
    window below 1.
    """
    if window < 1:
        raise ValueError(f"window {window}: at least one shard has to be open")
    sizes = np.asarray(counts, dtype=np.int64)
    shards = np.argsort(_bits("shards", seed, epoch, manifest_hash, len(sizes)), kind="stable")
    window_of_shard = np.empty(len(sizes), dtype=np.int64)
    window_of_shard[shards] = np.arange(len(sizes)) // window
    window_of_sample = np.repeat(window_of_shard, sizes)
    bits = _bits("samples", seed, epoch, manifest_hash, int(sizes.sum()))
    return np.lexsort((bits, window_of_sample))


def _bits(use: str, seed: int, epoch: int, manifest_hash: str, n: int) -> npt.NDArray[np.uint64]:
    digest = hashlib.sha256(f"{use}/{seed}/{epoch}/{manifest_hash}".encode()).digest()
    key = np.frombuffer(digest[:16], dtype="<u8").astype(np.uint64)
    return np.random.Philox(key=key).random_raw(n)
