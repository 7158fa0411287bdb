"""The training loop: a channel of features in, checkpoints out."""

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from paceline.drafter.dflash import DFlash
from paceline.durable.errors import Interrupted, TrainingDiverged
from paceline.flow.channel import Channel
from paceline.flow.signals import Stop, signals_noted
from paceline.recipe.schema import TrainRecipe
from paceline.target.head import TargetHead
from paceline.train.batch import Anchored, anchor_sample
from paceline.train.checkpoint import TrainState, save_checkpoint
from paceline.train.compute import compute_dtype, computing
from paceline.train.evaluate import simulated_tau
from paceline.train.learner import Learner, StepResult
from paceline.train.schedule import rate_factor
from paceline.train.source import (
    StoredFeatures,
    epoch_of,
    is_over,
    next_lease,
    planned_samples,
    schedule,
    stored_features,
)
from paceline.types.batch import Features
from paceline.watch.events import Counts, EventWriter
from paceline.watch.progress import TokenProgress

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainData:
    """The samples of a store, by use."""

    stored: StoredFeatures
    digest: str
    train: tuple[int, ...]
    """Store indices, rising."""
    shards: tuple[int, ...]
    """How many of them each shard holds."""
    validation: tuple[int, ...]
    """Store indices of the samples that every evaluation uses."""
    tokens: tuple[int, ...]
    """Tokens per store index."""


class Trainer:
    """Trains one drafter on one device."""

    def __init__(
        self,
        recipe: TrainRecipe,
        data: TrainData,
        drafter: DFlash,
        head: TargetHead,
        state: TrainState,
        *,
        checkpoints: Path,
        events: EventWriter,
        redone: Mapping[str, int] | None = None,
        claim: Callable[[], None] = lambda: None,
    ) -> None:
        """`redone` counts the damaged checkpoints that were passed over, by reason.

        `claim` is asked before each checkpoint, and raises where the folder is another's by now.
        """
        self._recipe, self._data, self._head = recipe, data, head
        self._learner = Learner(recipe, drafter, head)
        self._state = state
        self._checkpoints, self._events = checkpoints, events
        self._total = planned_samples(recipe.epochs, len(data.train))
        self._resumed_at = state.samples
        self._redone = redone or {}
        self._claim = claim
        self._stop = Stop()
        self._saved_step = state.step
        tokens = self._tokens_between(0, self._total)
        self._progress = TokenProgress("train", tokens, done=state.tokens)

    @property
    def state(self) -> TrainState:
        """Where the training stands."""
        return self._state

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """For restoring a checkpoint."""
        return self._learner.optimizer

    def run(self) -> Iterator[Path]:
        """Train to the end; yields each checkpoint's folder as soon as it is durable.

        Raises Interrupted after SIGTERM or SIGINT, with a checkpoint written: after the step in
        work, or before it where its features do not come. TrainingDiverged after `max_bad_steps`
        non-finite steps in a row.
        """
        marks = self._marks()
        positions = self._positions(self._state.samples)
        with (
            signals_noted("this step") as self._stop,
            stored_features(self._data.stored, positions) as channel,
            self._progress as progress,
        ):
            self._events.emit(
                "start",
                self.counts(),
                step=self._state.step,
                train_samples=len(self._data.train),
                validation_samples=len(self._data.validation),
            )
            self._tell_plan(marks)
            # A step without all of its features has changed nothing yet.
            with suppress(Interrupted):
                yield from self._steps(channel, progress, marks)
            if self._stop.asked:
                if self._state.step > self._saved_step:
                    yield self._checkpoint()
                raise self._interrupted()

    def _steps(
        self, channel: Channel[Features], progress: TokenProgress, marks: list[int]
    ) -> Iterator[Path]:
        """To the end, or to a signal; what is not saved by then is the caller's to save.

        Raises Interrupted after a signal where features do not come.
        """
        if self._state.samples == 0:
            self._state = replace(self._state, first_tau=self._evaluate())
        elif not self._state.tau and self._data.validation:
            # The evaluation that this checkpoint was due for may have been given up.
            size = self._recipe.batch_samples
            if self._is_due(marks, (self._state.samples - 1) % size + 1):
                self._state = replace(self._state, tau=self._evaluate())
                yield self._checkpoint()
        while self._state.samples < self._total:
            size = min(self._recipe.batch_samples, self._total - self._state.samples)
            self._step(channel, size, progress)
            if self._is_due(marks, size):
                self._state = replace(self._state, tau=self._evaluate())
                yield self._checkpoint()
            if self._stop.asked:
                return

    def _is_due(self, marks: list[int], size: int) -> bool:
        """Whether an evaluation belongs to the last step, of `size` samples."""
        return any(self._state.samples - size < mark <= self._state.samples for mark in marks)

    def _interrupted(self) -> Interrupted:
        step = self._state.step
        how = f"after step {step}, with a checkpoint" if step else "before the first step"
        return self._stop.interrupted(f"stopped {how}")

    def _step(self, channel: Channel[Features], size: int, progress: TokenProgress) -> None:
        start = time.perf_counter()
        result = self._learner.learn(self._lease(channel, size), self._learning_rate(size))
        channel.commit(result.sample_ids)
        is_bad = result.gradient_norm is None
        bad = self._state.bad_steps + 1 if is_bad else 0
        self._state = replace(
            self._state,
            step=self._state.step + 1,
            samples=self._state.samples + size,
            bad_steps=bad,
            skipped_steps=self._state.skipped_steps + is_bad,
            skipped_samples=self._state.skipped_samples + (size if is_bad else 0),
            tokens=self._state.tokens + result.tokens,
            seconds=self._state.seconds + time.perf_counter() - start,
            tau={},
            labels=self._state.labels + result.labels,
        )
        self._report(result, progress)
        if bad >= self._recipe.max_bad_steps:
            raise TrainingDiverged(
                f"{bad} bad steps in a row, up to step {self._state.step}; the last: "
                f"{result.problem}. The samples are named in {self._events.path}. Lower "
                "train.learning_rate, or remove them."
            )

    def _lease(self, channel: Channel[Features], size: int) -> list[Anchored]:
        samples = []
        for position in range(self._state.samples, self._state.samples + size):
            lease = next_lease(channel, self._stop)
            if lease is None:
                raise RuntimeError("the channel of features ended before the schedule did")
            epoch = epoch_of(position, len(self._data.train))
            samples.append(
                anchor_sample(
                    lease.item, count=self._recipe.anchors, seed=self._recipe.seed, epoch=epoch
                )
            )
            # The features are views of the mapped file: holding them holds no memory.
            lease.release()
        return samples

    def _learning_rate(self, size: int) -> float:
        # The middle of the step's samples: neither the first nor the last step has rate 0. Samples
        # of steps that changed nothing do not count: the next step takes their place.
        consumed = self._state.samples - self._state.skipped_samples
        return self._recipe.learning_rate * rate_factor(
            (consumed + size / 2) / self._total,
            schedule=self._recipe.schedule,
            warmup=self._recipe.warmup_ratio,
            decay=self._recipe.decay_ratio,
            floor=self._recipe.min_learning_rate_ratio,
        )

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
            **(problem if result.problem else {}),
            **parts,
        )

    def counts(self) -> Counts:
        """How far the training is, for events."""
        progress, set_aside = self._progress, self._state.skipped_samples
        return Counts(
            unit="samples",
            total=self._total,
            done=self._state.samples,
            skipped=self._resumed_at,
            redone=self._redone,
            redone_unit="checkpoints",
            quarantined={"skipped_step": set_aside} if set_aside else {},
            tokens=self._state.tokens,
            tokens_total=progress.total,
            rate=round(progress.rate, 1) if progress.rate else None,
            eta=round(progress.eta, 1) if progress.rate else None,
        )

    def _evaluate(self) -> dict[str, float]:
        reader = self._data.stored.open(unwanted=lambda: is_over(self._stop))
        with computing(self._learner.drafter, compute_dtype(self._recipe)):
            tau = simulated_tau(
                self._learner.drafter,
                self._head,
                reader,
                self._data.validation,
                anchors=self._recipe.eval_anchors,
                seed=self._recipe.seed,
            )
        self._events.emit("evaluation", step=self._state.step, simulated_tau=tau)
        shown = ", ".join(f"{method} {value:.3f}" for method, value in tau.items())
        _LOG.info("step %d: simulated τ %s", self._state.step, shown or "(no validation samples)")
        return tau

    def _checkpoint(self) -> Path:
        self._claim()
        folder = save_checkpoint(
            self._checkpoints, self._learner.drafter, self._learner.optimizer, self._state
        )
        self._events.emit("checkpoint", step=self._state.step, folder=folder.name)
        self._saved_step = self._state.step
        return folder

    def _tell_plan(self, marks: list[int]) -> None:
        state, size = self._state, self._recipe.batch_samples
        if state.samples >= self._total:
            return
        due = sorted({state.step - (state.samples - m) // size for m in marks if m > state.samples})
        _LOG.info(
            "%d steps over %d samples (%d distinct), %.1f M trainable parameters; evaluations %sat "
            "%s %s; first slot right: share of first drafted tokens that are the answer's",
            due[-1], self._total, len(self._data.train),
            self._learner.num_parameters / 1e6,
            "" if state.samples else "before the first step and ",
            "step" if len(due) == 1 else "steps", ", ".join(map(str, due)),
        )  # fmt: skip

    def _marks(self) -> list[int]:
        """Samples consumed at which an evaluation is due; the last one is the end."""
        count = self._recipe.evaluations
        return [-(-self._total * i // count) for i in range(1, count + 1)]

    def _positions(self, first: int, end: int | None = None) -> Iterator[int]:
        return schedule(
            self._data.train,
            self._data.digest,
            seed=self._recipe.seed,
            first=first,
            end=self._total if end is None else end,
            shards=self._data.shards,
            window=self._recipe.shard_window,
        )

    def _tokens_between(self, first: int, end: int) -> int:
        return sum(self._data.tokens[i] for i in self._positions(first, end))
