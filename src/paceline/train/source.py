"""What fills the trainer's channel when features come from the store."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.durable.errors import ChannelClosed, ChannelFailed
from paceline.features.order import order, windowed_order
from paceline.features.reader import FeatureReader
from paceline.flow.channel import Channel, Lease
from paceline.flow.signals import Stop
from paceline.train.agenda import Agenda
from paceline.train.fed import Fed
from paceline.watch.words import short_bytes

_LOG = logging.getLogger(__name__)

_GRACE = 3.0
"""Seconds after a signal for which features are still waited for."""

_GLANCE = 0.2
"""Seconds between two looks for a signal."""

_EPOCHS = 2
"""Permutations that are kept at a time."""

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


class SampleOrder:
    """Which sample is at a position of the order over all epochs.

    Each epoch is a permutation of `indices` that depends on seed, epoch and the data's content, so
    a position is all that a resume has to know. With a window it goes through so many shards at a
    time; `shards` says how many of the indices, which then rise, each shard holds.
    """

    def __init__(
        self,
        indices: Sequence[int],
        digest: str,
        *,
        seed: int,
        shards: Sequence[int] = (),
        window: int | None = None,
    ) -> None:
        self.indices = indices
        self._digest, self._seed = digest, seed
        self._shards, self._window = shards, window
        # What is handed out again may be of the epoch before.
        self._epochs: OrderedDict[int, npt.NDArray[np.int64]] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, position: int) -> int:
        """For several threads."""
        epoch = epoch_of(position, len(self.indices))
        with self._lock:
            if epoch not in self._epochs:
                self._epochs[epoch] = self._permutation(epoch)
                if len(self._epochs) > _EPOCHS:
                    self._epochs.popitem(last=False)
            place = self._epochs[epoch][position % len(self.indices)]
        return self.indices[int(place)]

    def _permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        if self._window is None:
            return order(self._seed, epoch, self._digest, len(self.indices))
        return windowed_order(self._seed, epoch, self._digest, self._shards, self._window)


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
    stored: StoredFeatures,
    agenda: Agenda,
    index_of: Callable[[int], int],
    queue_bytes: int,
) -> Iterator[Channel[Fed]]:
    """A channel that a thread fills with the samples of `agenda`, ahead of its readers.

    `index_of` says which of the store's samples is at a position.
    """
    channel: Channel[Fed] = Channel(queue_bytes)

    def feed() -> None:
        try:
            reader = stored.open(lambda: agenda.is_closed)
            while (position := agenda.take()) is not None:
                features = reader.read(index_of(position))
                item = Fed(position, features)
                channel.put(item, features.tokens.sample_ids, features.num_bytes)
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
        agenda.close()
        channel.fail(ChannelClosed("the trainer has left"))
        thread.join(_LAST_WAIT)
        if thread.is_alive():
            _LOG.warning("reading features does not return; left to end with this process")


def is_over(stop: Stop) -> bool:
    """Whether a signal came so long ago that features are no longer waited for."""
    return stop.seconds >= _GRACE


class Feed:
    """The trainer's end of a channel of features, for one drafter or several."""

    def __init__(self, channel: Channel[Fed], agenda: Agenda, stop: Stop) -> None:
        self.channel, self.agenda, self.stop = channel, agenda, stop
        self._held = 0
        self._lock = threading.Lock()

    def lease(self, consumer: str = "") -> Lease[Fed] | None:
        """The next sample; None where nothing more comes.

        Raises Interrupted where a signal has come and the sample does not, and as `Channel.lease`.
        """
        while True:
            wait = _GRACE - self.stop.seconds if self.stop.asked else _GLANCE
            try:
                lease = self.channel.lease(consumer, timeout=max(0.0, wait), keeps=True)
            except TimeoutError:
                if is_over(self.stop):
                    raise self.stop.interrupted("the features did not come") from None
                with self._lock:
                    held = self._held
                if self.agenda.is_exhausted(held):
                    return None
                continue
            if lease is not None:
                with self._lock:
                    self._held += 1
            return lease

    def take(self, count: int, consumer: str = "") -> list[Lease[Fed]]:
        """The next `count` samples, or fewer where nothing more comes.

        Raises as `lease`; what has come by then is not consumed, and its memory is free again.
        """
        taken: list[Lease[Fed]] = []
        try:
            while len(taken) < count and (lease := self.lease(consumer)) is not None:
                taken.append(lease)
        except BaseException:
            for lease in taken:
                lease.item.let_go()
                lease.release()
            raise
        return taken

    def consume(self, ids: Iterable[str], positions: Collection[int], consumer: str = "") -> None:
        """These samples count."""
        self.channel.commit(ids, consumer)
        self.agenda.consume(positions)
        with self._lock:
            self._held -= len(positions)

    def lose(self, positions: Collection[int], consumer: str = "") -> None:
        """All that `consumer` has leased and not consumed is handed out again."""
        self.channel.abandon(consumer)
        with self._lock:
            self._held -= len(positions)
        self.agenda.again(positions)
