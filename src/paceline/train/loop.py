"""The training loop: a channel of features in, checkpoints out."""

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path

from paceline.durable.errors import Interrupted, OutOfMemory, TrainingDiverged
from paceline.flow.channel import Channel
from paceline.flow.signals import Stop, signals_noted
from paceline.recipe.checkpoints import read_evaluation, write_evaluation
from paceline.recipe.schema import TrainRecipe
from paceline.train.agenda import Agenda
from paceline.train.checkpoint import TrainState, step_folder
from paceline.train.crew import Crew, Pace, StepsLost
from paceline.train.data import TrainData
from paceline.train.fed import Fed
from paceline.train.learner import StepResult
from paceline.train.schedule import rate_factor, warmup_share
from paceline.train.sides import Sides
from paceline.train.source import Feed, is_over, planned_samples
from paceline.watch.events import Counts, EventWriter
from paceline.watch.progress import TokenProgress

_LOG = logging.getLogger(__name__)


FeedOf = Callable[[Agenda], AbstractContextManager[Channel[Fed]]]


class Trainer:
    """Trains a drafter, whoever does its steps and wherever its features come from."""

    def __init__(
        self,
        recipe: TrainRecipe,
        data: TrainData,
        crew: Crew,
        state: TrainState,
        *,
        feed: FeedOf,
        sides: Sides,
        checkpoints: Path,
        events: EventWriter,
        redone: Mapping[str, int] | None = None,
        claim: Callable[[], None] = lambda: None,
    ) -> None:
        """`feed` opens the channel that the samples of an agenda come through, watched by `sides`.

        `redone` counts the damaged checkpoints that were passed over, by reason. `claim` is asked
        before each checkpoint, and raises where the folder is another's by now.
        """
        self._recipe, self._data, self._crew = recipe, data, crew
        self._state, self._feed_of, self._sides = state, feed, sides
        self._began_with = state.tokens
        self._checkpoints, self._events = checkpoints, events
        self._total = planned_samples(recipe.epochs, data.num_train)
        self._resumed_at = state.samples
        self._redone = redone or {}
        self._claim = claim
        self._stop = Stop()
        self._kept = state
        self._agenda = Agenda(consumed=state.samples, owed=state.owed, end=self._total)
        tokens = data.tokens_until(self._total)
        self._progress = TokenProgress("train", tokens, done=state.tokens)

    @property
    def state(self) -> TrainState:
        """Where the training stands."""
        return self._state

    def run(self) -> Iterator[Path]:
        """Train to the end; yields each checkpoint's folder as soon as it is durable.

        Raises Interrupted after SIGTERM or SIGINT, with a checkpoint written: after the step in
        work, or before it where its features do not come. TrainingDiverged after `max_bad_steps`
        non-finite steps in a row. OutOfMemory, with a checkpoint of all that was done before where
        that can be written.
        """
        marks = self._marks()
        with (
            signals_noted("this step") as self._stop,
            self._feed_of(self._agenda) as channel,
            self._progress as progress,
        ):
            self._events.emit(
                "start",
                self.counts(),
                step=self._state.step,
                train_samples=self._data.num_train,
                validation_samples=len(self._data.validation),
            )
            self._tell_plan(marks)
            full: OutOfMemory | None = None
            try:
                # A step without all of its features has changed nothing yet.
                with suppress(Interrupted):
                    feed = Feed(channel, self._agenda, self._stop)
                    yield from self._steps(feed, progress, marks)
            except OutOfMemory as error:
                if not error.is_sound:
                    raise
                # Its frames hold what the step had in memory.
                full = error.with_traceback(None)
            if full or self._stop.asked:
                if self._state.step > self._kept.step:
                    try:
                        yield self._checkpoint()
                    except StepsLost:
                        self._state = self._kept
                raise self._told(full) if full else self._interrupted()

    def _steps(self, feed: Feed, progress: TokenProgress, marks: list[int]) -> Iterator[Path]:
        """To the end, or to a signal; what is not saved by then is the caller's to save.

        Raises Interrupted after a signal where features do not come.
        """
        while True:
            try:
                yield from self._go_on(feed, progress, marks)
            except StepsLost:
                self._state = self._kept
                self._agenda.roll_back()
                _LOG.warning("going on from step %d", self._state.step)
            else:
                return

    def _go_on(self, feed: Feed, progress: TokenProgress, marks: list[int]) -> Iterator[Path]:
        if self._state.samples == 0:
            self._state = replace(self._state, first_tau=self._evaluate())
        elif self._state.is_due:
            # The evaluation that this checkpoint was due for may have been given up.
            folder = step_folder(self._checkpoints, self._state.step)
            if read_evaluation(folder) is None:
                yield self._evaluated(folder, marks)
        while self._state.samples < self._total:
            before = self._state.samples
            self._advance(feed, self._room_of_round(marks), progress)
            due = any(before < mark <= self._state.samples for mark in marks)
            self._state = replace(self._state, is_due=due)
            folder = self._checkpoint() if due else None
            if self._stop.asked:
                return
            if folder is not None:
                yield self._evaluated(folder, marks)
            else:
                self._crew.settle()

    def _room_of_round(self, marks: list[int]) -> int:
        """Samples until drafters have to be one model again; an evaluation is due in full steps."""
        state, batch = self._state, self._recipe.batch_samples
        mark = next(m for m in marks if m > state.samples)
        steps = -(-(mark - state.samples) // batch)
        share = (state.samples - state.skipped_samples) / self._total
        is_warmup = share < warmup_share(self._recipe, self._total)
        most = self._crew.samples_of_round(is_warmup=is_warmup)
        return min(most, steps * batch, self._total - state.samples)

    def _told(self, full: OutOfMemory) -> OutOfMemory:
        step = self._kept.step
        if not step:
            return full
        folder = step_folder(self._checkpoints, step).name
        return OutOfMemory(f"{full} {folder} has all steps before: the same command goes on there.")

    def _interrupted(self) -> Interrupted:
        step = self._state.step
        how = f"after step {step}, with a checkpoint" if step else "before the first step"
        return self._stop.interrupted(f"stopped {how}")

    def _advance(self, feed: Feed, samples: int, progress: TokenProgress) -> None:
        start = time.perf_counter()
        results = self._crew.advance(feed, samples, self._pace)
        seconds = time.perf_counter() - start
        for result in results:
            self._take(result, seconds / len(results))
            if result is not results[-1]:
                self._report(result, progress)
        # Samples that were set aside are consumed without a step.
        aside = self._agenda.consumed - self._state.samples
        self._state = replace(
            self._state,
            samples=self._agenda.consumed,
            set_aside=self._state.set_aside + aside,
            owed=self._agenda.owed,
        )
        if results:
            self._report(results[-1], progress)
        if self._state.bad_steps >= self._recipe.max_bad_steps:
            raise TrainingDiverged(
                f"{self._state.bad_steps} bad steps in a row, up to step {self._state.step}; the "
                f"last: {results[-1].problem}. The samples are named in {self._events.path}. Lower "
                "train.learning_rate, or remove them."
            )

    def _take(self, result: StepResult, seconds: float) -> None:
        state, size = self._state, len(result.sample_ids)
        is_bad = result.gradient_norm is None
        self._state = replace(
            state,
            step=state.step + 1,
            samples=state.samples + size,
            bad_steps=state.bad_steps + 1 if is_bad else 0,
            skipped_steps=state.skipped_steps + is_bad,
            skipped_samples=state.skipped_samples + (size if is_bad else 0),
            tokens=state.tokens + result.tokens,
            seconds=state.seconds + seconds,
            tau={},
            labels=state.labels + result.labels,
        )

    def _pace(self, taken: int, skipped: int, size: int) -> Pace:
        # The middle of the step's samples: neither the first nor the last step has rate 0. Samples
        # of steps that changed nothing do not count: the next step takes their place.
        consumed = self._state.samples - self._state.skipped_samples + taken - skipped
        share = (consumed + size / 2) / self._total
        factor = rate_factor(
            share,
            schedule=self._recipe.schedule,
            warmup=warmup_share(self._recipe, self._total),
            decay=self._recipe.decay_ratio,
            floor=self._recipe.min_learning_rate_ratio,
        )
        return Pace(rate=self._recipe.learning_rate * factor, progress=share)

    def _report(self, result: StepResult, progress: TokenProgress) -> None:
        parts = result.parts
        first = parts.get("first_right", 0.0) / max(parts.get("first_right_count", 0.0), 1.0)
        progress.update(self._state.tokens, f"loss {result.loss:.3f}, first slot right {first:.3f}")
        problem = {"reason": result.problem, "sample_ids": result.sample_ids}
        self._events.emit(
            "step" if result.gradient_norm is not None else "skipped_step",
            self.counts(),
            step=self._state.step,
            samples=self._state.samples,
            loss=result.loss,
            count=result.count,
            learning_rate=result.learning_rate,
            gradient_norm=result.gradient_norm,
            samples_digest=hashlib.sha256("\n".join(result.sample_ids).encode()).hexdigest()[:16],
            empty_samples=result.empty_samples,
            **self._sides.now(self._state.tokens - self._began_with),
            **(problem if result.problem else {}),
            **parts,
        )

    def counts(self) -> Counts:
        """How far the training is, for events."""
        progress, state = self._progress, self._state
        quarantined = {"skipped_step": state.skipped_samples, "not_captured": state.set_aside}
        return Counts(
            unit="samples",
            total=self._total,
            done=self._state.samples,
            skipped=self._resumed_at,
            redone=self._redone,
            redone_unit="checkpoints",
            quarantined={reason: count for reason, count in quarantined.items() if count},
            tokens=self._state.tokens,
            tokens_total=progress.total,
            rate=round(progress.rate, 1) if progress.rate else None,
            eta=round(progress.eta, 1) if progress.rate else None,
        )

    def _evaluate(self) -> dict[str, float]:
        reader = self._data.stored.open(unwanted=lambda: is_over(self._stop))
        tau = dict(self._crew.evaluate(reader, self._wanted(self._data.validation)))
        self._events.emit("evaluation", step=self._state.step, simulated_tau=tau)
        shown = ", ".join(f"{method} {value:.3f}" for method, value in tau.items())
        _LOG.info("step %d: simulated τ %s", self._state.step, shown or "(no validation samples)")
        return tau

    def _wanted(self, indices: Iterable[int]) -> Iterator[int]:
        """Raises Interrupted where a signal came a while ago: a resume evaluates again."""
        for index in indices:
            if is_over(self._stop):
                raise self._stop.interrupted("the evaluation is given up")
            yield index

    def _evaluated(self, folder: Path, marks: list[int]) -> Path:
        """The newest checkpoint, evaluated: its steps are safe before that begins."""
        self._state = replace(self._state, tau=self._evaluate())
        self._claim()
        number = sum(mark <= self._state.samples for mark in marks)
        write_evaluation(folder, self._state.tau, number)
        return folder

    def _checkpoint(self) -> Path:
        self._claim()
        folder = self._crew.save(self._checkpoints, self._state)
        self._events.emit("checkpoint", step=self._state.step, folder=folder.name)
        self._kept = self._state
        self._agenda.mark()
        return folder

    def _tell_plan(self, marks: list[int]) -> None:
        state, size = self._state, self._recipe.batch_samples
        if state.samples >= self._total:
            return
        due = sorted({state.step - (state.samples - m) // size for m in marks if m > state.samples})
        _LOG.info(
            "%d steps over %d samples (%d distinct), %.1f M trainable parameters; evaluations %sat "
            "%s %s; first slot right: share of first drafted tokens that are the answer's",
            due[-1], self._total, self._data.num_train,
            self._crew.num_parameters / 1e6,
            "" if state.samples else "before the first step and ",
            "step" if len(due) == 1 else "steps", ", ".join(map(str, due)),
        )  # fmt: skip

    def _marks(self) -> list[int]:
        """Samples consumed at which an evaluation is due; the last one is the end."""
        count = self._recipe.evaluations
        return [-(-self._total * i // count) for i in range(1, count + 1)]
