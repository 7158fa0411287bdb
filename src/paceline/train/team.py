"""Several drafters, each in a process of its own; what all ways of keeping them one model share."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

from paceline.drafter.dflash import DFlash
from paceline.durable.errors import OutOfMemory
from paceline.features.reader import FeatureReader
from paceline.flow.parcel import Parcel, allow_many_parcels
from paceline.flow.process import environment_of
from paceline.flow.remote import Remote, RemoteDied, RemotePolicy
from paceline.flow.stuck import Report
from paceline.train.averaging import give_weights, trainable
from paceline.train.checkpoint import read_state
from paceline.train.drafter_worker import Begin, DrafterJob, Evaluate, Peak, Take, open_drafter
from paceline.train.evaluate import Depths, simulated_tau
from paceline.train.member import Member
from paceline.train.memory import Use
from paceline.train.online import device_of

_GLANCE = 0.2
"""Seconds between two looks for a signal while drafters work."""

_GLOO = {"GLOO_SOCKET_IFNAME": "lo"}
"""They are all on this machine, whatever its name resolves to."""

R = TypeVar("R")


class Team:
    """M drafters, and the model that they are together, on the CPU."""

    def __init__(
        self,
        job: DrafterJob,
        model: DFlash,
        *,
        devices: Sequence[str],
        distinct: int,
        start: Path | None,
        policy: RemotePolicy,
        report: Report,
    ) -> None:
        """`model`, on the CPU, is what they begin with; `distinct` samples make an epoch.

        `start` is the checkpoint that it came from: it has their optimizers.
        """
        self._recipe, self._model, self._distinct = job.recipe, model, distinct
        self._start = start
        self._members: list[Member] = []
        for number, name in enumerate(devices):
            device, environment = device_of(name)
            own = replace(job, recipe=replace(job.recipe, device=device), place=name)
            remote = Remote(
                f"drafter {number} ({name})",
                number,
                open_drafter,
                own,
                policy=policy,
                environment={**environment_of(policy.threads), **_GLOO, **environment},
                report=report,
            )
            self._members.append(Member(number, remote))
        # As many threads as drafters, and they live as long: the processes die with their threads.
        self._pool = ThreadPoolExecutor(len(devices), thread_name_prefix="drafter")

    @property
    def num_parameters(self) -> int:
        """Trainable ones, of one drafter."""
        return sum(tensor.numel() for tensor in trainable(self._model).values())

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the processes that run."""
        return tuple(m.remote.pid for m in self._members if m.remote.pid is not None)

    @contextmanager
    def at_work(self) -> Iterator[Self]:
        """Start all processes; end them after."""
        allow_many_parcels()
        try:
            self._all(self._first_start)
            yield self
        finally:
            for member in self._members:
                member.remote.end()
            self._pool.shutdown(wait=True, cancel_futures=True)
            for member in self._members:
                member.forget()
                member.remote.bury()

    def evaluate(self, reader: FeatureReader, indices: Iterable[int]) -> Mapping[str, float]:
        """Simulated τ of the model; the drafters share the samples, and read them themselves."""
        del reader
        waiting, lock = iter(indices), threading.Lock()
        depths: Depths = {}

        def work(member: Member) -> None:
            while True:
                with lock:
                    index = next(waiting, None)
                if index is None:
                    return
                found: Depths = self._insist(member, Evaluate((index,)))
                with lock:
                    for method, values in found.items():
                        depths.setdefault(method, []).extend(values)

        self._all(work)
        return simulated_tau(depths)

    def memory(self) -> Sequence[Use]:
        """What each drafter tells of its process; one that has died tells nothing."""

        def ask(member: Member) -> Use | None:
            try:
                return member.remote.ask(Peak())
            except RemoteDied:
                return None

        return [use for use in self._all(ask) if use is not None]

    def _all(self, work: Callable[[Member], R], members: Sequence[Member] | None = None) -> list[R]:
        """Do it for all drafters, or these, side by side; signals are noted meanwhile."""
        chosen = self._members if members is None else members
        futures = [self._pool.submit(work, member) for member in chosen]
        while wait(futures, _GLANCE).not_done:
            failed = [f for f in futures if f.done() and f.exception() is not None]
            if failed:
                self._abort(futures)
        return [future.result() for future in futures]

    def _abort(self, futures: Sequence["Future[Any]"]) -> None:
        """One has failed for good: the others are not waited for."""
        for member in self._members:
            member.remote.end()
        wait(futures)
        for future in futures:
            error = future.exception()
            if error is not None and not isinstance(error, RemoteDied):
                if isinstance(error, OutOfMemory):
                    # Without drafters there is nothing to save.
                    error.is_sound = False
                raise error

    def _first_start(self, member: Member) -> None:
        member.remote.start()
        try:
            self._begin(member)
        except RemoteDied as died:
            self._revive(member, str(died))

    def _begin(self, member: Member) -> None:
        """Give it the model, and its own optimizer from the last checkpoint, or another's."""
        number = 0
        if self._start is not None:
            number = self._number_in(self._start, member)
        with self._model_parcel() as parcel:
            member.remote.ask(Begin(parcel.handle, self._start, number))

    def _number_in(self, start: Path, member: Member) -> int:
        """Whose optimizer and generators of a checkpoint the drafter takes."""
        return member.number % read_state(start).drafters

    def _hand_out_model(self, members: Sequence[Member] | None = None) -> None:
        """Have all drafters, or these, go on from the model."""
        with self._model_parcel() as parcel:

            def take(member: Member) -> None:
                try:
                    member.remote.ask(Take(parcel.handle))
                except RemoteDied as died:
                    self._revive(member, str(died))

            self._all(take, members)

    def _revive(self, member: Member, cause: str) -> None:
        """Start a dead drafter again, from the model and the optimizer of the last checkpoint."""
        while True:
            member.remote.restart(cause)
            try:
                self._begin(member)
            except RemoteDied as died:
                cause = str(died)
            else:
                return

    def _insist(self, member: Member, request: Any) -> Any:
        """Ask until it is answered, of the process or the ones after it."""
        while True:
            try:
                return member.remote.ask(request)
            except RemoteDied as died:
                self._revive(member, str(died))

    @contextmanager
    def _model_parcel(self) -> Iterator[Parcel]:
        parcel, _ = give_weights(self._model)
        try:
            yield parcel
        finally:
            parcel.close()
