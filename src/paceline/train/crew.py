"""Who does the steps: one drafter in this process, or several in processes of their own."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from paceline.drafter.dflash import DFlash
from paceline.features.reader import FeatureReader
from paceline.recipe.schema import TrainRecipe
from paceline.target.head import TargetHead
from paceline.train.batch import anchor_sample
from paceline.train.checkpoint import TrainState, save_checkpoint
from paceline.train.compute import compute_dtype, computing
from paceline.train.evaluate import depths_at_anchors, simulated_tau
from paceline.train.learner import Learner, StepResult
from paceline.train.memory import EVALUATION, SAVING, Meter, Use
from paceline.train.source import Feed


@dataclass(frozen=True)
class Pace:
    """How far along the training a step is."""

    rate: float
    """Learning rate."""
    progress: float
    """Share of the training's samples consumed."""


PaceOf = Callable[[int, int, int], Pace]
"""Of a step: samples taken since the state's, of those skipped, and the step's own samples."""


class StepsLost(Exception):
    """All steps since the last checkpoint are gone, and the drafters stand there again."""


class Crew(Protocol):
    """The drafters of a training, as its loop sees them."""

    @property
    def num_parameters(self) -> int:
        """Trainable ones, of one drafter."""
        ...

    def samples_of_round(self, *, is_warmup: bool) -> int:
        """Samples of `advance` at the most."""
        ...

    def advance(self, feed: Feed, samples: int, pace: PaceOf) -> Sequence[StepResult]:
        """Do the next steps, over so many samples in all, or fewer after a signal or at the end.

        What the results speak of is consumed. Raises Interrupted after a signal where features do
        not come and nothing was done. Here, in `save` and in `evaluate` StepsLost may be raised.
        """
        ...

    def settle(self) -> None:
        """Make one model of all drafters; after `save` they are one already."""
        ...

    def save(self, root: Path, state: TrainState) -> Path:
        """Write a checkpoint, durably; several drafters are one model after that."""
        ...

    def evaluate(self, reader: FeatureReader, indices: Iterable[int]) -> Mapping[str, float]:
        """Simulated τ of the model on samples of the store."""
        ...

    def memory(self) -> Sequence[Use]:
        """What each drafter has taken of its device up to now."""
        ...


class Solo:
    """One drafter, in this process."""

    def __init__(
        self,
        recipe: TrainRecipe,
        drafter: DFlash,
        head: TargetHead,
        *,
        distinct: int,
        meter: Meter | None = None,
    ) -> None:
        """`head` is `drafter.narrowed` of the target's; `distinct` samples make an epoch."""
        self._recipe, self._head, self._distinct = recipe, head, distinct
        self._meter = meter or Meter(drafter.fc.weight.device)
        self.learner = Learner(recipe, drafter, head, self._meter)

    @property
    def num_parameters(self) -> int:
        """Trainable ones."""
        return self.learner.num_parameters

    def samples_of_round(self, *, is_warmup: bool) -> int:  # noqa: ARG002
        """Those of one step."""
        return self._recipe.batch_samples

    def advance(self, feed: Feed, samples: int, pace: PaceOf) -> Sequence[StepResult]:
        """Do one step."""
        leases = feed.take(samples)
        if not leases:
            return ()
        items = [lease.item for lease in leases]
        now = pace(0, 0, len(items))
        recipe = self._recipe
        anchored = [
            anchor_sample(
                item.features,
                count=recipe.anchors,
                seed=recipe.seed,
                epoch=item.position // self._distinct,
            )
            for item in items
        ]
        result = self.learner.learn(anchored, now.rate, now.progress)
        del anchored
        for lease, item in zip(leases, items, strict=True):
            item.let_go()
            lease.release()
        feed.consume(result.sample_ids, [item.position for item in items])
        return (result,)

    def settle(self) -> None:
        """There is one drafter."""

    def save(self, root: Path, state: TrainState) -> Path:
        """Write a checkpoint."""
        state = replace(state, drafters=1)
        with self._meter.phase(SAVING):
            return save_checkpoint(root, self.learner.drafter, self.learner.optimizer, state)

    def evaluate(self, reader: FeatureReader, indices: Iterable[int]) -> Mapping[str, float]:
        """Simulated τ."""
        recipe = self._recipe
        with (
            self._meter.phase(EVALUATION),
            computing(self.learner.drafter, compute_dtype(recipe)),
        ):
            depths = depths_at_anchors(
                self.learner.drafter,
                self._head,
                reader,
                indices,
                anchors=recipe.eval_anchors,
                seed=recipe.seed,
            )
        return simulated_tau(depths)

    def memory(self) -> Sequence[Use]:
        """Of this process."""
        return (self._meter.use(),)
