"""The target's part of online training: what its worker process is asked, and answers."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.features.sizes import RestDtype
from paceline.flow.parcel import FeatureHandle
from paceline.flow.units import WorkerContext
from paceline.recipe.schema import TargetRecipe


@dataclass(frozen=True, kw_only=True)
class CaptureJob:
    """What holds for every batch; can be pickled."""

    target: TargetRecipe
    """Its device is the worker's own."""
    identity: str
    """The target's, as the training began with; a worker that loads another one refuses."""
    corpus: Path
    layer_ids: tuple[int, ...]
    last: bool
    dtype: RestDtype
    """What the trainer gets."""
    chunk_tokens: int | None
    check_positions: tuple[int, ...]
    """Lines of the samples on which the target is checked before the first batch."""


@dataclass(frozen=True)
class CaptureBatch:
    """A request: samples of one forward pass."""

    lines: tuple[int, ...]
    """Where each sample's line begins in the corpus."""


@dataclass(frozen=True)
class Captured:
    """The answer to it."""

    samples: tuple[FeatureHandle, ...]
    """In the order that was asked for."""
    seconds: float
    """What it took."""


def open_capturer(
    job: CaptureJob, context: WorkerContext
) -> Callable[[CaptureBatch, None], Captured]:
    """The setup of a target's worker."""
    # What runs a target takes seconds to import, which who only asks for features is spared.
    from paceline.train.capturer import Capturer

    return Capturer(job, context)
