"""One drafter on one device: samples in, an optimizer step done."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from paceline.drafter.dflash import DFlash
from paceline.durable.errors import OutOfMemory
from paceline.objective.terms import SlotCounts, needs_teacher, scales
from paceline.recipe.objective_inputs import objective_of
from paceline.recipe.schema import TrainRecipe
from paceline.target.head import TargetHead
from paceline.train.batch import Anchored, micro_batches, pack
from paceline.train.compute import compute_dtype, computing
from paceline.train.memory import UPDATE, Meter, forward_and_backward
from paceline.train.noise import feature_noise
from paceline.train.objective import block_loss, slot_counts
from paceline.train.optimizer import build_optimizer, set_learning_rate
from paceline.train.peers import Peers


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What became of one step; plain values, so that it can come from another process."""

    sample_ids: tuple[str, ...]
    tokens: int
    """Context tokens."""
    empty_samples: int
    """Samples without an anchor: they have neither loss nor gradient."""
    learning_rate: float
    loss: float
    """The step's; where the counts were given, the share that these samples have in it."""
    count: float
    """What the first term is divided by, of these samples."""
    gradient_norm: float | None
    """Before clipping; None where the step changed nothing."""
    problem: str
    """Why it changed nothing; empty where it did."""
    parts: dict[str, float]
    """Sums, each with its own count under `<name>_count`."""

    @property
    def labels(self) -> int:
        """Drafted tokens that had a loss: all of the answers' that the vocabulary has."""
        return round(self.parts.get("right_count", 0.0) - self.parts.get("outside", 0.0))


@dataclass
class _Sums:
    """Sums over the micro-batches of one step."""

    scales: list[float]
    loss: float = 0.0
    count: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)


class Learner:
    """A drafter with its optimizer."""

    def __init__(
        self, recipe: TrainRecipe, drafter: DFlash, head: TargetHead, meter: Meter | None = None
    ) -> None:
        """`head` is `drafter.narrowed` of the target's, in the compute type."""
        self._recipe, self._head = recipe, head
        self._meter = meter or Meter(drafter.fc.weight.device)
        self._terms = objective_of(recipe)
        self.drafter = drafter.train()
        self.optimizer = build_optimizer(drafter, recipe)
        self._parameters = {n: p for n, p in drafter.named_parameters() if p.requires_grad}
        self._compute = compute_dtype(recipe)

    @property
    def num_parameters(self) -> int:
        """Trainable ones."""
        return sum(p.numel() for p in self._parameters.values())

    def counts(self, samples: Sequence[Anchored]) -> SlotCounts:
        """What there is to learn from in them; of several learners they add up."""
        return slot_counts(self.drafter, samples)

    def learn(
        self,
        samples: Sequence[Anchored],
        rate: float,
        progress: float,
        counts: SlotCounts | None = None,
        peers: Peers | None = None,
    ) -> StepResult:
        """One optimizer step over `samples`, at learning rate `rate`.

        `progress` is the share of the run's samples consumed, 0 to 1; what changes along the run
        follows it. `counts` are those of the whole step where `samples` are a part of it: then
        loss and gradient are their share, and the shares add up. With `peers` they are added up:
        each learner has its own samples of the step, or none, and all take the same step; the
        result's sums are those of its own.

        A step without a finite loss and gradient changes nothing, and says so. Raises OutOfMemory;
        a sound one has changed nothing either.
        """
        if counts is None:
            own = self.counts(samples)
            counts = own if peers is None else peers.counts(own)
        # Known before the first forward pass, so any split of the step is the same.
        sums = _Sums(scales(self._terms, counts, progress))
        block = self.drafter.config.block_size
        groups = micro_batches(samples, block_size=block, limit=self._recipe.micro_batch_tokens)
        try:
            for group in groups:
                size = sum(s.num_tokens + s.anchors.numel() * block for s in group)
                with self._meter.phase(forward_and_backward(size)):
                    self._accumulate(group, sums, progress)
        except OutOfMemory:
            self.optimizer.zero_grad()
            raise
        with self._meter.phase(UPDATE):
            norm, problem = self._update(sums, rate, peers)
        return StepResult(
            sample_ids=tuple(sample.features.tokens.sample_ids[0] for sample in samples),
            tokens=sum(sample.num_tokens for sample in samples),
            empty_samples=sum(not sample.anchors.numel() for sample in samples),
            learning_rate=rate,
            loss=sums.loss,
            count=sums.count,
            gradient_norm=norm,
            problem=problem,
            parts=sums.parts,
        )

    def _accumulate(self, group: list[Anchored], sums: _Sums, progress: float) -> None:
        weight = self.drafter.fc.weight
        batch = pack(
            group,
            block_size=self.drafter.config.block_size,
            mask_token_id=self.drafter.config.mask_token_id,
            dtype=self._compute,
            device=weight.device,
            noise=feature_noise(self._recipe, progress),
            teacher=needs_teacher(self._terms, sums.scales),
        )
        with computing(self.drafter, self._compute):
            loss = block_loss(
                self.drafter,
                self._head,
                batch,
                self._terms,
                chunk=self._recipe.loss_chunk,
                scales=sums.scales,
            )
        self._meter.sample()
        loss.sum.backward()
        sums.loss += float(loss.sum.detach())
        sums.count += loss.count
        for name, value in loss.parts.items():
            sums.parts[name] = sums.parts.get(name, 0.0) + value

    def _update(
        self, sums: _Sums, rate: float, peers: Peers | None = None
    ) -> tuple[float | None, str]:
        """Apply the accumulated gradient.

        Returns its norm, or None and the reason why nothing was changed.
        """
        if not any(sums.scales):
            self.optimizer.zero_grad()
            return 0.0, ""
        try:
            missing = [name for name, p in self._parameters.items() if p.grad is None]
            loss = sums.loss
            if peers is not None:
                if not sums.count and len(missing) == len(self._parameters):
                    # Nothing to learn from here, and the others' sums need a summand.
                    missing = []
                    for parameter in self._parameters.values():
                        parameter.grad = torch.zeros_like(parameter)
                absent, loss = peers.numbers([len(missing), loss])
                if absent:
                    return None, f"no gradient for {absent:.0f} weights, over all drafters"
                peers.gradients(self._parameters.values())
            if missing:
                return None, f"no gradient for {len(missing)} weights, such as {missing[0]}"
            norm = float(
                torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._recipe.grad_clip)
            )
            if not (math.isfinite(norm) and math.isfinite(loss)):
                return None, "loss or gradient is not finite"
            set_learning_rate(self.optimizer, rate)
            self.optimizer.step()
            return norm, ""
        finally:
            self.optimizer.zero_grad()
