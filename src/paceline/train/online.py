"""What fills the trainer's channel when targets compute while drafters train."""

import logging
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from paceline.durable.errors import ChannelClosed, ChannelFailed, WorkerFailed
from paceline.flow.channel import Channel
from paceline.flow.devices import device_environment
from paceline.flow.parcel import FeatureHandle, Parcel, allow_many_parcels
from paceline.flow.process import environment_of
from paceline.flow.remote import Remote, RemoteDied, RemotePolicy
from paceline.flow.stuck import Report
from paceline.train.agenda import Agenda
from paceline.train.capture import CaptureBatch, Captured, CaptureJob, open_capturer
from paceline.train.fed import Fed

_LOG = logging.getLogger(__name__)

_WINDOW = 8
"""Batches' worth of samples that are taken at a time, and grouped by length."""

_MOST_ITEMS = 1024
"""Samples that may wait in the queue, however small: each takes descriptors of the process."""

_RETRIES = 3
"""Deaths or failures over one sample alone after which it is quarantined."""

_LAST_WAIT = 2.0
"""Seconds that the end waits for each thread."""


@dataclass(frozen=True, kw_only=True)
class OnlineSamples:
    """Where the training samples of a corpus are, by their number."""

    lines: npt.NDArray[np.int64]
    """Where each sample's line begins."""
    tokens: npt.NDArray[np.int32]
    """Of each sample."""
    sample_of: Callable[[int], int]
    """The number of the sample at a position of the order over all epochs."""
    name_of: Callable[[int], str]
    """The id of the sample with a number."""
    batch_tokens: int
    """At most this many tokens in one forward pass, or one sample."""


@dataclass
class TargetMeters:
    """What the targets have done, over all their workers."""

    tokens: int = 0
    seconds: float = 0.0
    """In which they computed, summed over them."""

    @property
    def rate(self) -> float | None:
        """Tokens per second of one worker that never waits; None before there is one."""
        return self.tokens / self.seconds if self.seconds else None


def device_of(
    name: str, environment: Mapping[str, str] | None = None
) -> tuple[str, dict[str, str]]:
    """What a worker's process calls the device `name`, and the environment that it needs for that.

    `cuda:3` is its first and only GPU; `cpu:1` is a CPU like any other.
    """
    match = re.fullmatch(r"cuda(?::(\d+))?", name)
    if match is None:
        return "cpu", {}
    number = int(match.group(1) or 0)
    return "cuda:0", device_environment(number, os.environ if environment is None else environment)


class TargetSide:
    """The targets' workers, each driven by a thread of its own."""

    def __init__(
        self,
        job: CaptureJob,
        samples: OnlineSamples,
        agenda: Agenda,
        channel: Channel[Fed],
        *,
        devices: Sequence[str],
        policy: RemotePolicy,
        report: Report,
        least_bytes: int = 0,
    ) -> None:
        """`least_bytes` is what a sample counts in the channel at least."""
        self._least_bytes = least_bytes
        self._samples, self._agenda, self._channel = samples, agenda, channel
        self._report = report
        self._lock = threading.Lock()
        self._batches: list[tuple[int, ...]] = []
        self._failures: dict[int, int] = {}
        self.meters = TargetMeters()
        self._remotes = []
        for number, name in enumerate(devices):
            device, environment = device_of(name)
            own = replace(job, target=replace(job.target, device=device, devices=()))
            self._remotes.append(
                Remote(
                    f"target {number} ({name})",
                    number,
                    open_capturer,
                    own,
                    policy=policy,
                    environment={**environment_of(policy.threads), **environment},
                    report=report,
                )
            )
        self._given_up = 0
        self._threads = [
            threading.Thread(target=self._drive, args=(remote,), name=remote.name, daemon=True)
            for remote in self._remotes
        ]

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the processes that run."""
        return tuple(r.pid for r in self._remotes if r.pid is not None)

    def start(self) -> None:
        """Begin to fill the channel."""
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """End all processes and threads."""
        self._agenda.close()
        for remote in self._remotes:
            remote.end()
        for thread in self._threads:
            thread.join(_LAST_WAIT)
            if thread.is_alive():
                _LOG.warning("%s does not end; left to end with this process", thread.name)
        for remote in self._remotes:
            remote.bury()

    def _drive(self, remote: Remote) -> None:
        try:
            remote.start()
            self._feed(remote)
        except (ChannelClosed, ChannelFailed, RemoteDied):
            return  # The trainer has left; it knows why.
        except WorkerFailed as error:
            self._give_up(error)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the trainer must hear of it
            self._channel.fail(error)

    def _give_up(self, error: WorkerFailed) -> None:
        with self._lock:
            self._given_up += 1
            is_last = self._given_up == len(self._remotes)
        _LOG.error("%s", error)
        if is_last:
            self._channel.fail(WorkerFailed(f"every target worker has given up. {error}"))

    def _feed(self, remote: Remote) -> None:
        in_hand: deque[tuple[int, ...]] = deque()
        try:
            while in_hand or self._ask(remote, in_hand, wait=True):
                answer = self._answer(remote, in_hand)
                if answer is None:
                    continue
                parcels, captured = answer
                # It computes the next batch while this one waits for room.
                self._ask(remote, in_hand, wait=False)
                self._put(in_hand.popleft(), captured.samples, parcels)
        finally:
            # Where this worker gives up, others do what it had.
            for batch in in_hand:
                self._agenda.again(batch)

    def _ask(self, remote: Remote, in_hand: deque[tuple[int, ...]], *, wait: bool) -> bool:
        """Give it another batch; False where there is none, now or, with `wait`, any more."""
        batch = self._take(wait=wait)
        if batch is None:
            return False
        in_hand.append(batch)
        lines = tuple(int(self._samples.lines[self._sample(p)]) for p in batch)
        while True:
            try:
                remote.post(CaptureBatch(lines))
            except RemoteDied as died:
                remote.restart(str(died))
            else:
                return True

    def _answer(
        self, remote: Remote, in_hand: deque[tuple[int, ...]]
    ) -> tuple[list[Parcel], Captured] | None:
        """What came of the oldest batch in hand; None where it has to be done again."""
        try:
            answer: Captured = remote.answer()
            parcels = [Parcel.opened(handle.parcel) for handle in answer.samples]
        except WorkerFailed as error:
            self._failed(in_hand.popleft(), str(error))
            return None
        except (RemoteDied, FileNotFoundError) as error:
            self._failed(in_hand.popleft(), str(error))
            remote.restart(str(error))
            return None
        with self._lock:
            self.meters.seconds += answer.seconds
            self.meters.tokens += sum(h.tokens.input_ids.numel() for h in answer.samples)
        return parcels, answer

    def _put(
        self, batch: tuple[int, ...], answer: Sequence[FeatureHandle], parcels: Sequence[Parcel]
    ) -> None:
        waiting = list(zip(batch, answer, parcels, strict=True))
        try:
            while waiting:
                position, handle, parcel = waiting[0]
                # From here on it is this process that holds it.
                own = replace(handle, parcel=parcel.handle)
                item = Fed(position, own.over(parcel), parcel, own)
                num_bytes = max(parcel.num_bytes, self._least_bytes)
                self._channel.put(item, own.tokens.sample_ids, num_bytes)
                waiting.pop(0)
        finally:
            for _, _, parcel in waiting:
                parcel.close()
            self._agenda.again(position for position, _, _ in waiting)

    def _sample(self, position: int) -> int:
        return self._samples.sample_of(position)

    def _take(self, *, wait: bool = True) -> tuple[int, ...] | None:
        """The next batch; None where there is none now, or, with `wait`, where all is consumed."""
        while True:
            with self._lock:
                if self._batches:
                    return self._batches.pop(0)
                # A window as large as several batches: fewer would be padded to their longest.
                room = _WINDOW * self._samples.batch_tokens
                positions: list[int] = []
                while room > 0 and (more := self._agenda.take_more(1)):
                    positions += more
                    room -= int(self._samples.tokens[self._sample(more[0])])
                if positions:
                    self._batches = self._grouped(positions)
                    continue
            if not wait:
                return None
            position = self._agenda.take()
            if position is None:
                return None
            return (position,)

    def _grouped(self, positions: Sequence[int]) -> list[tuple[int, ...]]:
        """Batches of samples of similar length, those of the earliest positions first."""
        length = {p: int(self._samples.tokens[self._sample(p)]) for p in positions}
        batches: list[tuple[int, ...]] = []
        group: list[int] = []
        for position in sorted(positions, key=lambda p: (-length[p], p)):
            # The first of a group is its longest: all others are padded to it.
            is_full = group and length[group[0]] * (len(group) + 1) > self._samples.batch_tokens
            # Who failed before goes alone, so that it takes no others with it.
            if is_full or (group and {position, group[0]} & self._failures.keys()):
                batches.append(tuple(group))
                group = []
            group.append(position)
        batches.append(tuple(group))
        return sorted(batches, key=min)

    def _failed(self, batch: tuple[int, ...], reason: str) -> None:
        """A worker died or failed over a batch: its samples alone, next, or set aside."""
        back = list(batch)
        aside = []
        with self._lock:
            if len(back) == 1:
                (position,) = back
                self._failures[position] = self._failures.get(position, 0) + 1
                if self._failures[position] > _RETRIES:
                    aside, back = back, []
            else:
                self._failures.update({p: self._failures.get(p, 0) for p in back})
        if aside:
            name = self._samples.name_of(self._sample(aside[0]))
            _LOG.error("sample %s is set aside: %s", name, reason)
            self._report("quarantined", {"key": name, "reason": reason})
            self._agenda.consume(aside)
        self._agenda.again(back)


@contextmanager
def captured_features(
    job: CaptureJob,
    samples: OnlineSamples,
    agenda: Agenda,
    *,
    devices: Sequence[str],
    queue_bytes: int,
    policy: RemotePolicy,
    report: Report,
) -> Iterator[tuple[Channel[Fed], TargetSide]]:
    """A channel that the targets fill with the samples of `agenda`, ahead of its readers."""
    allow_many_parcels()
    channel: Channel[Fed] = Channel(queue_bytes)
    side = TargetSide(
        job,
        samples,
        agenda,
        channel,
        devices=devices,
        policy=policy,
        report=report,
        least_bytes=queue_bytes // _MOST_ITEMS,
    )
    side.start()
    try:
        yield channel, side
    except BaseException as error:
        channel.fail(error)
        raise
    finally:
        channel.fail(ChannelClosed("the trainer has left"))
        side.end()
