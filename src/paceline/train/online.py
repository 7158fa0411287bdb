"""What fills the trainer's channel when targets compute while drafters train."""

import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from paceline.durable.errors import ChannelClosed, ChannelFailed, ShardDamaged, WorkerFailed
from paceline.flow.channel import Channel
from paceline.flow.devices import device_environment
from paceline.flow.parcel import FeatureHandle, Parcel, allow_many_parcels
from paceline.flow.process import environment_of
from paceline.flow.remote import Remote, RemoteDied, RemotePolicy
from paceline.flow.stuck import Report
from paceline.train.agenda import Agenda
from paceline.train.batches import Batches, OnlineSamples
from paceline.train.capture import CaptureBatch, Captured, CaptureJob, open_capturer
from paceline.train.fed import Fed
from paceline.train.tee import Tee

_LOG = logging.getLogger(__name__)

_MOST_ITEMS = 1024
"""Samples that may wait in the queue, however small: each takes descriptors of the process."""

_GLANCE = 0.2
"""Seconds between two looks of a target that has nothing to do whether it is needed at all."""

_LAST_WAIT = 2.0
"""Seconds that the end waits for each thread."""


@dataclass
class TargetMeters:
    """What the targets have done, over all their workers."""

    tokens: int = 0
    seconds: float = 0.0
    """In which they computed, summed over them."""
    read_wait: float = 0.0
    """Seconds that what was kept has waited for room in the channel."""

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
        tee: Tee | None = None,
    ) -> None:
        """What is captured is offered to `tee`, and what that has is read there."""
        self._samples, self._agenda, self._channel = samples, agenda, channel
        self._report, self._tee = report, tee
        self._lock = threading.Lock()
        self._batches = Batches(samples, agenda, None if tee is None else tee.has)
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
        if tee is not None:
            reader = threading.Thread(target=self._read, args=(tee,), name="tee reader")
            reader.daemon = True
            self._threads.append(reader)

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
        with self._telling():
            try:
                while not self._agenda.is_closed:
                    batch = self._batches.to_capture(_GLANCE)
                    if batch is not None:
                        self._feed(remote, batch)
                    elif remote.pid is not None and self._is_needless():
                        _LOG.info("%s ends: every sample is kept", remote.name)
                        remote.rest()
            except WorkerFailed as error:
                self._give_up(error)

    def _read(self, tee: Tee) -> None:
        """The thread that reads what is kept."""
        with self._telling():
            while (position := self._batches.to_read()) is not None:
                number = self._samples.sample_of(position)
                try:
                    features = tee.read(number)
                except (ShardDamaged, OSError, KeyError) as error:
                    _LOG.warning("tee: %s. Its samples are captured again.", error)
                    tee.forget(number)
                    self._batches.capture(position)
                    continue
                item, begun = Fed(position, features), time.monotonic()
                self._channel.put(item, features.tokens.sample_ids, features.num_bytes)
                self.meters.read_wait += time.monotonic() - begun

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Whatever ends a thread, the trainer hears of it."""
        try:
            yield
        except (ChannelClosed, ChannelFailed, RemoteDied):
            return  # The trainer has left; it knows why.
        except BaseException as error:  # noqa: BLE001 - whatever it is
            self._channel.fail(error)

    def _is_needless(self) -> bool:
        """Whether nothing is left that a target has to capture."""
        if self._tee is None:
            return False
        return len(self._tee) + self._batches.given_up >= len(self._samples.tokens)

    def _give_up(self, error: WorkerFailed) -> None:
        with self._lock:
            self._given_up += 1
            is_last = self._given_up == len(self._remotes)
        _LOG.error("%s", error)
        if is_last:
            self._channel.fail(WorkerFailed(f"every target worker has given up. {error}"))

    def _feed(self, remote: Remote, first: tuple[int, ...]) -> None:
        """Have it capture `first`, and all that there is without waiting."""
        in_hand = deque([first])
        try:
            if remote.pid is None:
                remote.start()
            self._post(remote, first)
            while in_hand:
                answer = self._answer(remote, in_hand)
                if answer is None:
                    continue
                parcels, captured = answer
                # It computes the next batch while this one waits for room.
                following = self._batches.to_capture()
                if following is not None:
                    in_hand.append(following)
                    self._post(remote, following)
                self._put(in_hand.popleft(), captured.samples, parcels)
        finally:
            # Where this worker gives up, others do what it had.
            for batch in in_hand:
                self._batches.again(batch)

    def _post(self, remote: Remote, batch: tuple[int, ...]) -> None:
        lines = tuple(int(self._samples.lines[self._samples.sample_of(p)]) for p in batch)
        while True:
            try:
                remote.post(CaptureBatch(lines))
            except RemoteDied as died:
                remote.restart(str(died))
            else:
                return

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
                if self._tee is not None:
                    self._tee.offer(self._samples.sample_of(position), item.features)
                self._batches.captured(position)
                self._channel.put(item, own.tokens.sample_ids, parcel.num_bytes)
                waiting.pop(0)
        finally:
            for _, _, parcel in waiting:
                parcel.close()
            self._batches.again([position for position, _, _ in waiting])

    def _failed(self, batch: tuple[int, ...], reason: str) -> None:
        name = self._batches.failed(batch)
        if name is not None:
            _LOG.error("sample %s is set aside: %s", name, reason)
            self._report("quarantined", {"key": name, "reason": reason})


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
    tee: Tee | None = None,
) -> Iterator[tuple[Channel[Fed], TargetSide]]:
    """A channel that the targets fill with the samples of `agenda`, ahead of its readers.

    What `tee` has, no target captures.
    """
    allow_many_parcels()
    channel: Channel[Fed] = Channel(queue_bytes, _MOST_ITEMS)
    side = TargetSide(
        job,
        samples,
        agenda,
        channel,
        devices=devices,
        policy=policy,
        report=report,
        tee=tee,
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
