"""Drafters that share each step and take it together.

docs/algorithms.md, "Several drafters".
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

from paceline.drafter.dflash import DFlash
from paceline.features.reader import FeatureReader
from paceline.flow.parcel import Parcel
from paceline.flow.remote import RemoteDied
from paceline.train.averaging import take_weights, weights_in
from paceline.train.checkpoint import TrainState
from paceline.train.crew import PaceOf, StepsLost
from paceline.train.drafter_worker import DrafterJob, Give, Given, Join, Learn, Save
from paceline.train.fed import Fed
from paceline.train.learner import StepResult
from paceline.train.member import Member
from paceline.train.peers import open_store
from paceline.train.source import Feed
from paceline.train.team import Team
from paceline.train.team_files import save_alike

_LOG = logging.getLogger(__name__)

R = TypeVar("R")


class ReducedTeam(Team):
    """All drafters have the same weights and optimizer; the model is what any of them has.

    Where one dies the others wait for its summand: all are started again, from the last checkpoint.
    """

    def __init__(self, job: DrafterJob, model: DFlash, **arguments: Any) -> None:
        """As `Team`."""
        super().__init__(job, model, **arguments)
        self._store = open_store()
        self._groups = 0

    @contextmanager
    def at_work(self) -> Iterator[Self]:
        """As `Team.at_work`."""
        with super().at_work():
            # Where one dies over it, all have joined again by then, and no step is lost.
            with suppress(StepsLost):
                self._join()
            yield self

    def samples_of_round(self, *, is_warmup: bool) -> int:  # noqa: ARG002
        """Those of one step."""
        return self._recipe.batch_samples

    def advance(self, feed: Feed, samples: int, pace: PaceOf) -> Sequence[StepResult]:
        """Do one step. Raises StepsLost where a drafter died."""
        leases = feed.take(samples)
        if not leases:
            return ()
        items = [lease.item.travelling() for lease in leases]
        positions = [item.position for item in items]
        now = pace(0, 0, len(items))
        parts = _shared_out(items, len(self._members))

        def work(member: Member) -> StepResult:
            part = parts[member.number]
            handles = tuple(item.handle for item in part if item.handle is not None)
            epochs = tuple(item.position // self._distinct for item in part)
            answer: StepResult = member.remote.ask(Learn(handles, epochs, now.rate, now.progress))
            return answer

        try:
            results = self._together(work)
        except StepsLost:
            feed.lose(positions)
            raise
        finally:
            for lease, item in zip(leases, items, strict=True):
                item.let_go()
                lease.release()
        merged = _merged(results, [item.features.tokens.sample_ids[0] for item in items])
        feed.consume(merged.sample_ids, positions)
        return (merged,)

    def settle(self) -> None:
        """They are one model at every step."""

    def save(self, root: Path, state: TrainState) -> Path:
        """Write a checkpoint of what the first drafter has. Raises StepsLost where one died."""
        first = self._members[:1]

        def write(folder: Path) -> list[dict[str, Any]]:
            def own(member: Member) -> list[dict[str, Any]]:
                groups: list[dict[str, Any]] = member.remote.ask(Save(folder, 0))
                given: Given = member.remote.ask(Give())
                parcel = Parcel.opened(given.weights)
                try:
                    # Only now: where one dies before, all begin again from the model as it was.
                    take_weights(self._model, weights_in(parcel, self._model))
                finally:
                    parcel.close()
                return groups

            (groups,) = self._together(own, first)
            return groups

        self._start = save_alike(root, self._model, replace(state, drafters=1), write)
        return self._start

    def evaluate(self, reader: FeatureReader, indices: Iterable[int]) -> Mapping[str, float]:
        """As `Team.evaluate`. Raises StepsLost where a drafter died."""
        try:
            return super().evaluate(reader, indices)
        except _MemberDied as died:
            raise self._lost(str(died)) from died

    def _number_in(self, start: Path, member: Member) -> int:  # noqa: ARG002
        """All take the first one's: averaged drafters that wrote it had one each."""
        return 0

    def _insist(self, member: Member, request: Any) -> Any:
        try:
            return member.remote.ask(request)
        except RemoteDied as died:
            raise _MemberDied(str(died)) from died

    def _together(
        self, work: Callable[[Member], R], members: Sequence[Member] | None = None
    ) -> list[R]:
        """Do it for all drafters; where one dies, all of them begin again from the model."""
        causes: list[str] = []

        def attempt(member: Member) -> R | None:
            try:
                return work(member)
            except (RemoteDied, FileNotFoundError) as died:
                causes.append(f"{member.remote.name}: {died}")
                # The others may wait for its summand for ever.
                for other in self._members:
                    other.remote.kill()
                return None

        answers = self._all(attempt, members)
        if causes:
            raise self._lost(causes[0])
        return [answer for answer in answers if answer is not None]

    def _lost(self, cause: str) -> StepsLost:
        for member in self._members:
            member.remote.kill()
        _LOG.warning("all drafters begin again from the last checkpoint: %s", cause)
        self._all(lambda member: self._revive(member, cause))
        self._join()
        return StepsLost(cause)

    def _join(self) -> None:
        """Make one group of all processes."""
        self._groups += 1
        world = len(self._members)
        name = f"group {self._groups}"

        def join(member: Member) -> bool:
            member.remote.ask(Join(self._store.port, member.number, world, name))
            return True

        self._together(join)


class _MemberDied(Exception):
    """A drafter died while it was asked for something that needs no others."""


def _shared_out(items: Sequence[Fed], drafters: int) -> list[list[Fed]]:
    """The samples of each drafter: about as many tokens for all, in the step's order."""
    parts: list[list[Fed]] = [[] for _ in range(drafters)]
    tokens = [0] * drafters
    by_size = sorted(items, key=lambda i: -i.features.tokens.input_ids.numel())
    for item in by_size:
        least = tokens.index(min(tokens))
        parts[least].append(item)
        tokens[least] += item.features.tokens.input_ids.numel()
    return [sorted(part, key=lambda item: item.position) for part in parts]


def _merged(results: Sequence[StepResult], sample_ids: Sequence[str]) -> StepResult:
    """One step of all of them; their shares of loss and counts add up."""
    parts: dict[str, float] = {}
    for result in results:
        for name, value in result.parts.items():
            parts[name] = parts.get(name, 0.0) + value
    return replace(
        results[0],
        sample_ids=tuple(sample_ids),
        tokens=sum(r.tokens for r in results),
        empty_samples=sum(r.empty_samples for r in results),
        loss=sum(r.loss for r in results),
        count=sum(r.count for r in results),
        parts=parts,
    )
