"""What fills the trainer's channel when features come from the store."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from paceline.durable.amounts import size_text
from paceline.durable.errors import ChannelClosed, ChannelFailed
from paceline.features.order import order, windowed_order
from paceline.features.reader import FeatureReader
from paceline.flow.channel import Channel
from paceline.types.batch import Features

_QUEUE_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class StoredFeatures:
    """A published feature store, and how its shards are reached."""

    root: Path
    """Folder of the manifest."""

    options: Mapping[str, str] = field(default_factory=dict)
    """What the client of the store needs beside its URL."""

    cache: Path
    """Folder of local copies, where the shards are no files."""

    cache_bytes: int | None = None
    """What the copies may have together; None allows half of what is free."""

    def open(self) -> FeatureReader:
        """A reader of its own for each thread. Raises as `FeatureReader` does."""
        return FeatureReader(
            self.root, options=self.options, cache=self.cache, cache_bytes=self.cache_bytes
        )


def planned_samples(epochs: float, num_samples: int) -> int:
    """Samples that a training consumes in all: `epochs` times `num_samples`, at least one."""
    return max(1, round(epochs * num_samples))


def epoch_of(position: int, num_samples: int) -> int:
    """The epoch that position `position` of the order over all epochs lies in."""
    return position // num_samples


def training_samples_per_shard(
    indices: Sequence[int], samples_per_shard: Sequence[int]
) -> tuple[int, ...]:
    """How many of the store indices lie in each shard."""
    ends = np.cumsum(samples_per_shard)
    shards = np.searchsorted(ends, np.asarray(indices, dtype=np.int64), side="right")
    return tuple(np.bincount(shards, minlength=len(ends)).tolist())


def schedule(
    indices: tuple[int, ...],
    digest: str,
    *,
    seed: int,
    first: int,
    end: int,
    shards: Sequence[int] = (),
    window: int | None = None,
) -> Iterator[int]:
    """Store indices at positions first..end-1 of the order over all epochs.

    Each epoch is a permutation of `indices` that depends on seed, epoch and the store's content,
    so a position is all that a resume has to know. With a window it goes through so many shards
    at a time; `shards` says how many of the indices, which then rise, each shard holds.
    """
    current, permutation = -1, None
    for position in range(first, end):
        epoch = epoch_of(position, len(indices))
        if epoch != current or permutation is None:
            current = epoch
            if window is None:
                permutation = order(seed, epoch, digest, len(indices))
            else:
                permutation = windowed_order(seed, epoch, digest, shards, window)
        yield indices[int(permutation[position % len(indices)])]


def cache_warnings(reader: FeatureReader, window: int | None) -> Iterator[str]:
    """A sentence where local copies are too small for an order with this `shard_window`."""
    limit = reader.cache_limit
    if limit is None or reader.num_bytes <= limit:
        return
    largest = max(unit.size for unit in reader.manifest.units)
    fitting = max(1, limit // largest - 1)
    if window is None:
        yield (
            f"the shards ({size_text(reader.num_bytes)}) are more than their local copies may have "
            f"({size_text(limit)}), and all samples are shuffled: nearly every sample fetches a "
            f"whole shard. Set train.shard_window to {fitting} or less, or raise train.cache_bytes."
        )
    elif window > fitting:
        yield (
            f"train.shard_window: {window} shards of up to {size_text(largest)} are more than "
            f"their local copies may have ({size_text(limit)}): many are fetched again and again. "
            f"Lower it to {fitting}, or raise train.cache_bytes."
        )


@contextmanager
def stored_features(
    stored: StoredFeatures, positions: Iterator[int]
) -> Iterator[Channel[Features]]:
    """A channel that a thread fills with the samples at `positions`, ahead of its reader."""
    channel: Channel[Features] = Channel(_QUEUE_BYTES)

    def feed() -> None:
        try:
            reader = stored.open()
            for index in positions:
                features = reader.read(index)
                channel.put(features, features.tokens.sample_ids, features.num_bytes)
            channel.close()
        except (ChannelClosed, ChannelFailed):
            return  # The reader has left; it knows why.
        except BaseException as error:  # noqa: BLE001 - whatever it is, the reader must hear of it
            channel.fail(error)

    thread = threading.Thread(target=feed, name="features", daemon=True)
    thread.start()
    try:
        yield channel
    except BaseException as error:
        channel.fail(error)
        raise
    finally:
        channel.fail(ChannelClosed("the trainer has left"))
        thread.join()
