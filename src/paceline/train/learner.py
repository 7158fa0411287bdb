"""One drafter on one device: samples in, an optimizer step done."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from paceline.drafter.dflash import DFlash
from paceline.recipe.schema import TrainRecipe
from paceline.target.head import TargetHead
from paceline.train.batch import Anchored, micro_batches, pack
from paceline.train.compute import compute_dtype, computing
from paceline.train.objective import block_loss
from paceline.train.optimizer import build_optimizer, set_learning_rate


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
    """Mean over what counts; 0 where nothing does."""
    count: float
    """The sum of the weights of what counts."""
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

    loss: float = 0.0
    count: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)


class Learner:
    """A drafter with its optimizer."""

    def __init__(self, recipe: TrainRecipe, drafter: DFlash, head: TargetHead) -> None:
        """`head` is `drafter.narrowed` of the target's, in the compute type."""
        self._recipe, self._head = recipe, head
        self.drafter = drafter.train()
        self.optimizer = build_optimizer(drafter, recipe)
        self._parameters = {n: p for n, p in drafter.named_parameters() if p.requires_grad}
        self._compute = compute_dtype(recipe)

    @property
    def num_parameters(self) -> int:
        """Trainable ones."""
        return sum(p.numel() for p in self._parameters.values())

    def learn(self, samples: Sequence[Anchored], rate: float) -> StepResult:
        """One optimizer step over `samples`, at learning rate `rate`.

        A step without a finite loss and gradient changes nothing, and says so.
        """
        sums = _Sums()
        groups = micro_batches(
            samples,
            block_size=self.drafter.config.block_size,
            limit=self._recipe.micro_batch_tokens,
        )
        for group in groups:
            self._accumulate(group, sums)
        norm, problem = self._update(sums, rate)
        return StepResult(
            sample_ids=tuple(sample.features.tokens.sample_ids[0] for sample in samples),
            tokens=sum(sample.num_tokens for sample in samples),
            empty_samples=sum(not sample.anchors.numel() for sample in samples),
            learning_rate=rate,
            loss=sums.loss / sums.count if sums.count else 0.0,
            count=sums.count,
            gradient_norm=norm,
            problem=problem,
            parts=sums.parts,
        )

    def _accumulate(self, group: list[Anchored], sums: _Sums) -> None:
        weight = self.drafter.fc.weight
        batch = pack(
            group,
            block_size=self.drafter.config.block_size,
            mask_token_id=self.drafter.config.mask_token_id,
            dtype=self._compute,
            device=weight.device,
        )
        with computing(self.drafter, self._compute):
            loss = block_loss(
                self.drafter,
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

    def _update(self, sums: _Sums, rate: float) -> tuple[float | None, str]:
        """Apply the accumulated gradient.

        Returns its norm, or None and the reason why nothing was changed.
        """
        if sums.count == 0:
            self.optimizer.zero_grad()
            return 0.0, ""
        try:
            missing = [name for name, p in self._parameters.items() if p.grad is None]
            if missing:
                return None, f"no gradient for {len(missing)} weights, such as {missing[0]}"
            # The sums are divided once the whole step is known, so any split of it is the same.
            for parameter in self._parameters.values():
                if parameter.grad is not None:
                    parameter.grad.div_(sums.count)
            norm = float(
                torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._recipe.grad_clip)
            )
            if not (math.isfinite(norm) and math.isfinite(sums.loss)):
                return None, "loss or gradient is not finite"
            set_learning_rate(self.optimizer, rate)
            self.optimizer.step()
            return norm, ""
        finally:
            self.optimizer.zero_grad()
