"""What workers are told, and what they answer. No torch: the supervisor reads this too."""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.features.codec import Codec
from paceline.features.plan import Unit
from paceline.features.sizes import RestDtype
from paceline.recipe.schema import TargetRecipe


@dataclass(frozen=True)
class StoredSample:
    """A sample of a unit that is done, to be captured again."""

    key: str
    """Its shard."""

    row: int
    """Which of the shard's samples it is."""

    positions: tuple[int, ...]
    """Where the lines of all samples of its forward pass begin in the corpus, in their order."""

    place: int
    """Which of those it is."""


@dataclass(frozen=True)
class Rechecked:
    """A stored sample that was captured again and is what it was."""

    sample_id: str
    exact: bool
    """Every bit is the same."""

    relative_l2: float
    """Of the row that is furthest from the stored one; 0 where `exact`."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What holds for every unit."""

    target: TargetRecipe
    identity: str
    """The target's, as planned with; a worker that loads another one refuses."""

    corpus: Path
    layer_ids: tuple[int, ...]
    last: bool
    dtype: RestDtype
    codec: Codec

    fingerprint: str
    check_positions: tuple[int, ...]
    """Lines of the samples on which the target is checked before the first unit."""

    chunk_tokens: int | None = None
    """Longer samples pass in pieces of this many tokens; None takes each in one."""

    compile_cache: Path | None = None
    """Compiled kernels are kept below this folder; None leaves that to torch."""

    rechecks: tuple[StoredSample, ...] = ()
    """Stored samples that are captured again before the first unit."""

    store: str = ""
    """URL or folder of the store that holds them."""

    store_options: dict[str, str] = field(default_factory=dict)
    scratch: Path | None = None
    """Where their shards are put while they are looked at, if the store is no folder; None is
    the system's place for temporary files."""

    software: dict[str, str] = field(default_factory=dict)
    """What is running, by name: versions, source hash, device."""

    made_with: dict[str, str] = field(default_factory=dict)
    """The same of the session that made what is stored; empty where that is not known."""


@dataclass(frozen=True)
class UnitWork:
    """The payload of a unit's task."""

    positions: tuple[int, ...]
    """Where the samples' lines begin, in the order of the shard's rows."""

    batches: tuple[int, ...]
    """Samples of each forward pass, one after the other in that order."""


@dataclass(frozen=True)
class UnitTimes:
    """What a unit took; the answer's `info`."""

    samples: int
    """Samples that were captured, counted as their states came from the target."""

    timed_tokens: int
    """Tokens that count for the rate: all but those of forward passes that warmed up."""

    seconds: float
    """What those took, with their share of reading and writing."""

    warmed: int
    """Forward passes that were the first of their shape class in this worker."""

    warm_up_seconds: float
    """What those took."""

    copies: int
    """Copies of states from the device: one for each forward pass."""

    rechecked: tuple[Rechecked, ...] = ()
    """Stored samples captured again before this unit, which is the worker's first."""


def pick_stored(
    units: Sequence[Unit],
    done: Collection[int],
    positions: Sequence[int] | npt.NDArray[np.int64],
    *,
    count: int,
    seed: int,
) -> tuple[StoredSample, ...]:
    """Choose up to `count` samples of the units `done`, from as many units as there are.

    `positions` holds where each sample's line begins, by its number in the plan. The choice is a
    function of the arguments: with another seed for each session, time looks at other samples.
    """
    rng = random.Random(seed)
    of_units = sorted(done)
    rng.shuffle(of_units)
    of_units = of_units[:count]
    rows = {index: _shuffled(rng, units[index]) for index in of_units}
    chosen: list[StoredSample] = []
    while len(chosen) < count and any(rows.values()):
        for index in of_units:
            if rows[index] and len(chosen) < count:
                chosen.append(_stored(units[index], rows[index].pop(), positions))
    return tuple(chosen)


def _shuffled(rng: random.Random, unit: Unit) -> list[int]:
    rows = list(range(unit.stop - unit.start))
    rng.shuffle(rows)
    return rows


def _stored(unit: Unit, row: int, positions: Sequence[int] | npt.NDArray[np.int64]) -> StoredSample:
    bounds = [0]
    for batch in unit.batches:
        bounds.append(bounds[-1] + len(batch))
    batch = next(n for n, (start, stop) in enumerate(pairwise(bounds)) if start <= row < stop)
    return StoredSample(
        key=unit.key,
        row=row,
        positions=tuple(int(positions[sample]) for sample in unit.batches[batch]),
        place=row - bounds[batch],
    )
