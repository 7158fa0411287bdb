"""What an extraction is asked for, as its parts need it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.durable.iowatch import IoWatch
from paceline.extract.layout import Layout
from paceline.extract.slices import Slice
from paceline.features.plan import Unit
from paceline.features.sizes import store_bytes
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe
from paceline.target.spec import TargetSpec
from paceline.types.row_index import FILE_NAME as INDEX_NAME
from paceline.types.row_index import open_rows
from paceline.types.rows import Rows
from paceline.types.sample import Split


@dataclass(frozen=True, kw_only=True)
class Setting:
    """An extraction: recipe, places, and what was read from corpus and target."""

    recipe: Recipe
    run_dir: RunDir
    source: Path
    """The corpus file."""
    corpus_digest: str
    spec: TargetSpec
    layout: Layout
    part: Slice
    """What this machine does of it."""
    accept_code: bool

    @property
    def workers(self) -> int:
        """Processes, one for each device where those are named."""
        return len(self.recipe.target.devices) or self.recipe.target.workers


def kept_split(recipe: Recipe) -> Split | None:
    """The split whose samples are extracted; None: all but the held-out ones.

    A training that captures its own samples reads from the store what it evaluates on, no more.
    """
    return Split.VALIDATION if recipe.train.online else None


def rows_and_units(setting: Setting, watch: IoWatch) -> tuple[Rows, tuple[Unit, ...]]:
    """The samples of the corpus and the plan of their units. Raises as `open_rows`."""
    rows = open_rows(
        setting.source,
        setting.corpus_digest,
        vocab_size=setting.spec.vocab_size,
        max_position=setting.spec.max_position,
        only=kept_split(setting.recipe),
        index=setting.run_dir.features / INDEX_NAME,
        watch=watch,
    )
    return rows, setting.layout.units(rows, setting.recipe.extract.batch_tokens)


@dataclass(frozen=True)
class Sizes:
    """Arithmetic over the whole store, in bytes."""

    estimate: int
    bounds: tuple[int, ...]
    """The most that each unit takes."""


def sizes_of(layout: Layout, rows: Rows, units: Sequence[Unit]) -> Sizes:
    """Of all units of the plan."""
    estimate = store_bytes(
        tokens=rows.tokens,
        samples=len(rows),
        shards=len(units),
        bytes_per_token=layout.bytes_per_token,
        codec=layout.codec,
        dtype=layout.dtype,
    )
    bounds = (
        layout.bytes_bound(tokens=tokens_of(rows, unit), samples=unit.stop - unit.start)
        for unit in units
    )
    return Sizes(estimate, tuple(bounds))


def tokens_of(rows: Rows, unit: Unit) -> int:
    """Tokens of a unit's samples."""
    return int(rows.lengths[unit.start : unit.stop].sum())
