"""What fills the trainer's channel when features come from the store."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.durable.errors import ChannelClosed, ChannelFailed
from paceline.features.order import order
from paceline.features.reader import FeatureReader
from paceline.flow.channel import Channel
from paceline.types.batch import Features

_QUEUE_BYTES = 256 << 20


def planned_samples(epochs: float, num_samples: int) -> int:
    """Samples that a training consumes in all: `epochs` times `num_samples`, at least one."""
    return max(1, round(epochs * num_samples))


def epoch_of(position: int, num_samples: int) -> int:
    """The epoch that position `position` of the order over all epochs lies in."""
    return position // num_samples


def schedule(
    indices: tuple[int, ...], digest: str, *, seed: int, first: int, end: int
) -> Iterator[int]:
    """Store indices at positions first..end-1 of the order over all epochs.

    Each epoch is a permutation of `indices` that depends on seed, epoch and the store's content,
    so a position is all that a resume has to know.
    """
    current, permutation = -1, None
    for position in range(first, end):
        epoch = epoch_of(position, len(indices))
        if epoch != current or permutation is None:
            current, permutation = epoch, order(seed, epoch, digest, len(indices))
        yield indices[int(permutation[position % len(indices)])]


@contextmanager
def stored_features(root: Path, positions: Iterator[int]) -> Iterator[Channel[Features]]:
    """A channel that a thread fills with the samples at `positions`, ahead of its reader."""
    channel: Channel[Features] = Channel(_QUEUE_BYTES)

    def feed() -> None:
        try:
            reader = FeatureReader(root)
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
