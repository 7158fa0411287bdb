"""What fills the trainer's channel when features come from the store."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from paceline.durable.errors import ChannelClosed, ChannelFailed
from paceline.features.order import order, windowed_order
from paceline.features.reader import FeatureReader
from paceline.flow.channel import Channel, Lease
from paceline.flow.signals import Stop
from paceline.types.batch import Features
from paceline.watch.words import short_bytes

_LOG = logging.getLogger(__name__)

_QUEUE_BYTES = 256 << 20

_GRACE = 3.0
"""Seconds after a signal for which features are still waited for."""

_GLANCE = 0.2
"""Seconds between two looks for a signal."""

_LAST_WAIT = 2.0
"""Seconds that the end waits for the thread that reads: a disk may not answer at all."""


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

    def open(self, unwanted: Callable[[], bool] = lambda: False) -> FeatureReader:
        """A reader of its own for each thread; see `FeatureReader`, which raises."""
        return FeatureReader(
            self.root,
            options=self.options,
            cache=self.cache,
            cache_bytes=self.cache_bytes,
            unwanted=unwanted,
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
            f"the shards ({short_bytes(reader.num_bytes)}) are more than their local copies may "
            f"have ({short_bytes(limit)}), and all samples are shuffled: nearly every sample "
            f"fetches a whole shard. Set train.shard_window to {fitting} or less, or raise "
            "train.cache_bytes."
        )
    elif window > fitting:
        yield (
            f"train.shard_window: {window} shards of up to {short_bytes(largest)} are more than "
            f"their local copies may have ({short_bytes(limit)}): many are fetched again and "
            f"again. Lower it to {fitting}, or raise train.cache_bytes."
        )


@contextmanager
def stored_features(
    stored: StoredFeatures, positions: Iterator[int]
) -> Iterator[Channel[Features]]:
    """A channel that a thread fills with the samples at `positions`, ahead of its reader."""
    channel: Channel[Features] = Channel(_QUEUE_BYTES)
    over = threading.Event()

    def feed() -> None:
        try:
            reader = stored.open(over.is_set)
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
        over.set()
        channel.fail(ChannelClosed("the trainer has left"))
        thread.join(_LAST_WAIT)
        if thread.is_alive():
            _LOG.warning("reading features does not return; left to end with this process")


def is_over(stop: Stop) -> bool:
    """Whether a signal came so long ago that features are no longer waited for."""
    return stop.seconds >= _GRACE


def next_lease(channel: Channel[Features], stop: Stop) -> Lease[Features] | None:
    """As `channel.lease`. Raises Interrupted where a signal has come and the sample does not."""
    while True:
        wait = _GRACE - stop.seconds if stop.asked else _GLANCE
        try:
            return channel.lease(timeout=max(0.0, wait))
        except TimeoutError:
            if is_over(stop):
                raise stop.interrupted("the features did not come") from None
