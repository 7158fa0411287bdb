"""The training loop: a channel of features in, checkpoints out."""

import logging
import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

import torch

from paceline.drafter.dflash import DFlash
from paceline.durable.errors import Interrupted, TrainingDiverged
from paceline.features.reader import FeatureReader
from paceline.flow.channel import Channel
from paceline.recipe.schema import TrainRecipe
from paceline.target.head import TargetHead
from paceline.train.batch import Anchored, anchor_sample, micro_batches, pack
from paceline.train.checkpoint import TrainState, save_checkpoint
from paceline.train.evaluate import simulated_tau
from paceline.train.objective import block_loss
from paceline.train.optimizer import build_optimizer, set_learning_rate
from paceline.train.schedule import cosine
from paceline.train.source import epoch_of, schedule, stored_features
from paceline.types.batch import Features
from paceline.watch.events import EventWriter
from paceline.watch.progress import TokenProgress

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainData:
    """The samples of a store, by use."""

    root: Path
    digest: str
    train: tuple[int, ...]
    """Store indices."""
    validation: tuple[int, ...]
    """Store indices of the samples that every evaluation uses."""
    tokens: tuple[int, ...]
    """Tokens per store index."""


@dataclass
class _Sums:
    """Sums over the micro-batches of one step."""

    loss: float = 0.0
    count: float = 0.0
    tokens: int = 0
    sample_ids: list[str] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)


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
    ) -> None:
        self._recipe, self._data, self._head = recipe, data, head
        self._drafter = drafter.train()
        self._state = state
        self._checkpoints, self._events = checkpoints, events
        self._optimizer = build_optimizer(drafter, recipe)
        self._parameters = [p for p in drafter.parameters() if p.requires_grad]
        self._total = max(1, round(recipe.epochs * len(data.train)))
        self._stop_signal = 0

    @property
    def state(self) -> TrainState:
        """Where the training stands."""
        return self._state

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """For restoring a checkpoint."""
        return self._optimizer

    def run(self) -> Iterator[Path]:
        """Train to the end; yields each checkpoint's folder as soon as it is durable.

        Raises Interrupted after SIGTERM or SIGINT, with a checkpoint written; TrainingDiverged
        after `max_bad_steps` non-finite steps in a row.
        """
        marks = self._marks()
        positions = self._positions(self._state.samples)
        total_tokens = self._tokens_between(0, self._total)
        with (
            self._signals_noted(),
            stored_features(self._data.root, positions) as channel,
            TokenProgress("train", total_tokens, done=self._state.tokens) as progress,
        ):
            while self._state.samples < self._total:
                size = min(self._recipe.batch_samples, self._total - self._state.samples)
                self._step(channel, size, progress)
                due = any(
                    self._state.samples - size < mark <= self._state.samples for mark in marks
                )
                if due:
                    self._evaluate()
                if due or self._stop_signal:
                    yield self._checkpoint()
                if self._stop_signal:
                    name = signal.Signals(self._stop_signal).name
                    raise Interrupted(
                        f"{name}: stopped after step {self._state.step}, with a checkpoint. "
                        "The same command goes on from there."
                    )

    def _step(self, channel: Channel[Features], size: int, progress: TokenProgress) -> None:
        start = time.perf_counter()
        sums = _Sums()
        samples = self._lease(channel, size)
        rate = self._learning_rate(size)
        groups = micro_batches(
            samples,
            block_size=self._drafter.config.block_size,
            limit=self._recipe.micro_batch_tokens,
        )
        for group in groups:
            self._accumulate(group, sums)
        norm = self._update(sums, rate)
        finite = norm is not None
        bad = 0 if finite else self._state.bad_steps + 1
        sums.tokens = sum(sample.num_tokens for sample in samples)
        sums.sample_ids = [sample.features.tokens.sample_ids[0] for sample in samples]
        channel.commit(sums.sample_ids)
        self._state = replace(
            self._state,
            step=self._state.step + 1,
            samples=self._state.samples + size,
            bad_steps=bad,
            skipped_steps=self._state.skipped_steps + (not finite),
            tokens=self._state.tokens + sums.tokens,
            seconds=self._state.seconds + time.perf_counter() - start,
            tau={},
        )
        self._report(sums, rate, norm, progress)
        if bad >= self._recipe.max_bad_steps:
            raise TrainingDiverged(
                f"{bad} non-finite steps in a row, up to step {self._state.step}. The samples are "
                f"named in {self._events.path}. Lower train.learning_rate, or remove them."
            )

    def _lease(self, channel: Channel[Features], size: int) -> list[Anchored]:
        samples = []
        for position in range(self._state.samples, self._state.samples + size):
            lease = channel.lease()
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

    def _accumulate(self, group: list[Anchored], sums: _Sums) -> None:
        weight = self._drafter.fc.weight
        batch = pack(
            group,
            block_size=self._drafter.config.block_size,
            mask_token_id=self._drafter.config.mask_token_id,
            dtype=weight.dtype,
            device=weight.device,
        )
        loss = block_loss(
            self._drafter,
            self._head,
            batch,
            gamma=self._recipe.gamma,
            chunk=self._recipe.loss_chunk,
        )
        loss.sum.backward()
        sums.loss += float(loss.sum.detach())
        sums.count += loss.count
        for name, value in loss.parts.items():
            sums.parts[name] = sums.parts.get(name, 0.0) + value

    def _update(self, sums: _Sums, rate: float) -> float | None:
        """Apply the accumulated gradient; None where it is not finite and nothing was changed."""
        if sums.count == 0:
            self._optimizer.zero_grad()
            return 0.0
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        # The sums are divided once the whole step is known, so any split of it is the same step.
        for gradient in gradients:
            gradient.div_(sums.count)
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._recipe.grad_clip))
        finite = math.isfinite(norm) and math.isfinite(sums.loss)
        if finite:
            set_learning_rate(self._optimizer, rate)
            self._optimizer.step()
        self._optimizer.zero_grad()
        return norm if finite else None

    def _learning_rate(self, size: int) -> float:
        # The middle of the step's samples: neither the first nor the last step has rate 0.
        return self._recipe.learning_rate * cosine(
            (self._state.samples + size / 2) / self._total,
            warmup=self._recipe.warmup_ratio,
            floor=self._recipe.min_learning_rate_ratio,
        )

    def _report(
        self, sums: _Sums, rate: float, norm: float | None, progress: TokenProgress
    ) -> None:
        mean = sums.loss / sums.count if sums.count else 0.0
        parts = sums.parts
        first = parts.get("first_right", 0.0) / max(parts.get("first_right_count", 0.0), 1.0)
        progress.update(self._state.tokens, f"loss {mean:.3f}, first slot right {first:.3f}")
        self._events.emit(
            "step" if norm is not None else "skipped_step",
            step=self._state.step,
            samples=self._state.samples,
            tokens=self._state.tokens,
            loss=mean,
            count=sums.count,
            learning_rate=rate,
            gradient_norm=norm,
            tokens_per_second=round(progress.rate, 1),
            eta_seconds=round(progress.eta, 1),
            **({} if norm is not None else {"sample_ids": sums.sample_ids}),
            **parts,
        )

    def _evaluate(self) -> None:
        reader = FeatureReader(self._data.root)
        tau = simulated_tau(
            self._drafter,
            self._head,
            reader,
            self._data.validation,
            anchors=self._recipe.eval_anchors,
            seed=self._recipe.seed,
        )
        self._state = replace(self._state, tau=tau)
        self._events.emit("evaluation", step=self._state.step, simulated_tau=tau)
        shown = ", ".join(f"{method} {value:.3f}" for method, value in tau.items())
        _LOG.info("step %d: simulated τ %s", self._state.step, shown or "(no validation samples)")

    def _checkpoint(self) -> Path:
        folder = save_checkpoint(self._checkpoints, self._drafter, self._optimizer, self._state)
        self._events.emit("checkpoint", step=self._state.step, folder=folder.name)
        return folder

    def _marks(self) -> list[int]:
        """Samples consumed at which an evaluation is due; the last one is the end."""
        count = self._recipe.evaluations
        return [-(-self._total * i // count) for i in range(1, count + 1)]

    def _positions(self, first: int) -> Iterator[int]:
        return schedule(
            self._data.train,
            self._data.digest,
            seed=self._recipe.seed,
            first=first,
            end=self._total,
        )

    def _tokens_between(self, first: int, end: int) -> int:
        indices = schedule(
            self._data.train, self._data.digest, seed=self._recipe.seed, first=first, end=end
        )
        return sum(self._data.tokens[i] for i in indices)

    @contextmanager
    def _signals_noted(self) -> Iterator[None]:
        """Let SIGTERM and SIGINT end the run after the current step, with a checkpoint."""

        def note(number: int, _frame: FrameType | None) -> None:
            if self._stop_signal:
                raise KeyboardInterrupt
            self._stop_signal = number
            _LOG.warning("stopping after this step; once more stops at once")

        before = {s: signal.signal(s, note) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
