"""Drafters that take steps of their own and are averaged into one model now and then.

docs/algorithms.md, "Several drafters".
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch

from paceline.drafter.dflash import DFlash
from paceline.drafter.memory import Part, averaging_bytes
from paceline.durable.errors import Interrupted, OutOfMemory, TrainingDiverged, WorkerFailed
from paceline.flow.parcel import Parcel
from paceline.flow.remote import RemoteDied
from paceline.train.averaging import Outer, Share, weights_in
from paceline.train.checkpoint import TrainState
from paceline.train.crew import PaceOf
from paceline.train.drafter_worker import DrafterJob, Give, Given, Learn, Save
from paceline.train.learner import StepResult
from paceline.train.member import Asked, Member, Round
from paceline.train.memory import AVERAGE, Meter, shape_of
from paceline.train.source import Feed
from paceline.train.team import Team
from paceline.train.team_files import begin_unaveraged, complete, load_velocity, seal_unaveraged

_LOG = logging.getLogger(__name__)

_AHEAD = 2
"""Steps that a drafter has been given and not answered: its next one waits there."""

_HOPELESS = 5
"""Deaths of a drafter in a row, in the middle of a step, after which the training ends."""


class AveragedTeam(Team):
    """Each drafter has its own optimizer and its own steps; the model is their average."""

    def __init__(
        self, job: DrafterJob, model: DFlash, *, start: Path | None, **arguments: Any
    ) -> None:
        """As `Team`."""
        super().__init__(job, model, start=start, **arguments)
        self._outer = Outer(job.recipe.outer_learning_rate, job.recipe.outer_momentum)
        self._outer.velocity = {} if start is None else load_velocity(start)
        self._shares: dict[int, Share] = {}
        self._opened: list[Parcel] = []
        self._full: OutOfMemory | None = None
        """Why no further step can be done."""
        self._bad_rounds = 0
        averaging = averaging_bytes(job.recipe, shape_of(job.config))
        self._meter = Meter(
            torch.device("cpu"),
            name="the host",
            parts=[Part(name="averaging on the host", bytes=averaging, is_estimate=True)],
        )

    @contextmanager
    def at_work(self) -> Iterator[Self]:
        """As `Team.at_work`."""
        try:
            with super().at_work():
                yield self
        finally:
            self._let_go()

    def samples_of_round(self, *, is_warmup: bool) -> int:
        """All drafters' steps until the next average."""
        every = 1 if is_warmup else self._recipe.sync_every
        return self._recipe.batch_samples * len(self._members) * every

    def advance(self, feed: Feed, samples: int, pace: PaceOf) -> Sequence[StepResult]:
        """Have the drafters learn, then collect what each has.

        What a dead drafter, or one with weights that are not finite, has learned since the last
        average is handed out again, and it goes on from the model. Where one has no memory for a
        step, the steps that are done count, and the next call raises OutOfMemory.
        """
        self.settle()
        if self._full is not None:
            raise self._full
        work = Round(feed, samples, self._recipe.batch_samples, pace)
        self._all(lambda member: self._learn(member, work))
        given = self._all(lambda member: self._collect(member, work))
        results: list[StepResult] = []
        reloaded: list[Member] = []
        for member, (share, is_finite) in zip(self._members, given, strict=True):
            if share is not None and not is_finite:
                _LOG.error("%s: weights are not finite; reloaded", member.remote.name)
                self._lose(member, work)
                reloaded.append(member)
            elif share is not None:
                self._shares[member.number] = share
                feed.consume(
                    [i for r in member.results for i in r.sample_ids],
                    member.positions,
                    member.consumer,
                )
                results += member.results
            member.forget()
        if reloaded:
            self._hand_out_model(reloaded)
        self._bad_rounds = self._bad_rounds + 1 if reloaded and not results else 0
        if self._bad_rounds >= self._recipe.max_bad_steps:
            raise TrainingDiverged(
                f"no drafter had finite weights in {self._bad_rounds} rounds. Lower "
                "train.learning_rate."
            )
        if not results and self._full is not None:
            raise self._full
        if not results and feed.stop.asked:
            raise feed.stop.interrupted("no step was done")
        return results

    def settle(self) -> None:
        """Average, and have all drafters go on from that."""
        if not self._shares:
            return
        with self._meter.phase(AVERAGE):
            self._outer.go(self._model, list(self._shares.values()))
        self._shares = {}
        self._let_go()
        self._hand_out_model()

    def save(self, root: Path, state: TrainState) -> Path:
        """Write what each drafter has, then average, then complete the checkpoint."""
        state = replace(state, drafters=len(self._members))
        partial = begin_unaveraged(root, state.step)
        groups = self._all(lambda member: self._save(member, partial))
        folder = seal_unaveraged(partial, self._model, state, groups[0], self._shares, self._outer)
        shares, self._shares = self._shares, {}
        with self._meter.phase(AVERAGE):
            self._outer.go(self._model, list(shares.values()))
        self._let_go()
        self._start = complete(folder, self._model, self._outer, state.drafters)
        self._hand_out_model()
        return self._start

    def _learn(self, member: Member, work: Round) -> None:
        while True:
            try:
                while len(member.asked) < _AHEAD and self._post(member, work):
                    pass
                if not member.asked:
                    return
                self._take_answer(member, work)
            except RemoteDied as died:
                self._lose(member, work)
                member.deaths += 1
                if member.deaths >= _HOPELESS and not member.remote.is_over:
                    raise WorkerFailed(
                        f"{member.remote.name} died {member.deaths} times without doing a step; "
                        f"the last cause: {died}"
                    ) from died
                self._revive(member, str(died))

    def _post(self, member: Member, work: Round) -> bool:
        """Give it the next step; False where there is none."""
        if work.feed.stop.asked or self._full is not None:
            return False
        size, before = work.claim()
        try:
            leases = work.feed.take(size, member.consumer)
        except Interrupted:
            # What came of this step is not consumed: the next start has it.
            return False
        if not leases:
            return False
        items = [lease.item.travelling() for lease in leases]
        member.asked.append(Asked(leases, items))
        member.positions += [item.position for item in items]
        now = work.pace(before, work.skipped, len(items))
        handles = tuple(item.handle for item in items if item.handle is not None)
        epochs = tuple(item.position // self._distinct for item in items)
        member.remote.post(Learn(handles, epochs, now.rate, now.progress))
        return True

    def _take_answer(self, member: Member, work: Round) -> None:
        try:
            result: StepResult = member.remote.answer()
        except OutOfMemory as error:
            if not error.is_sound:
                raise
            # Its samples are not consumed; what this drafter did before them is.
            undone = member.asked.popleft()
            undone.release()
            lost = {item.position for item in undone.items}
            member.positions = [p for p in member.positions if p not in lost]
            self._full = error
            return
        member.asked.popleft().release()
        member.results.append(result)
        member.deaths = 0
        if result.gradient_norm is None:
            work.skipped += len(result.sample_ids)

    def _lose(self, member: Member, work: Round) -> None:
        """What it has learned since the last average is gone: others learn it."""
        positions = member.positions
        member.forget()
        work.feed.lose(positions, member.consumer)
        work.give_back(len(positions))

    def _collect(self, member: Member, work: Round) -> tuple[Share | None, bool]:
        """Its weights as they are; None where it has learned nothing, or died."""
        if not member.results:
            return None, True
        try:
            given: Given = member.remote.ask(Give())
            parcel = Parcel.opened(given.weights)
        except (RemoteDied, FileNotFoundError) as error:
            self._lose(member, work)
            self._revive(member, str(error))
            return None, True
        self._opened.append(parcel)
        return Share(weights_in(parcel, self._model), member.tokens), given.is_finite

    def _save(self, member: Member, folder: Path) -> list[dict[str, Any]]:
        return self._insist(member, Save(folder, member.number))

    def _let_go(self) -> None:
        for parcel in self._opened:
            parcel.close()
        self._opened.clear()
