"""`paceline compare`."""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import tyro

from paceline.cli.terminal import say
from paceline.durable.errors import UserError

if TYPE_CHECKING:
    from paceline.score.compare import Comparison, Measured, Table

_WIDTH = 100


@dataclass(frozen=True, kw_only=True)
class Args:
    """Puts scores beside each other: τ of each method over the prompts that all of them have
    scored, the difference to the first one with its 95 % interval, and whether it is more than
    chance. What makes them incomparable is said.

    Reads: `score/result.json` of each run.

    Writes: nothing, to stdout alone.

    Exit code: 0 where they were compared, 2 where a result cannot be read or no prompt is common.

    Example: paceline compare runs/a runs/b
    """  # noqa: D205

    runs: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN [RUN ...]")]
    """Run directories or result.json files; the others are compared with the first."""
    json: Annotated[
        tyro.conf.FlagCreatePairsOff[bool], tyro.conf.arg(help_behavior_hint="(default: text)")
    ] = False
    """All of it, as one JSON object: the fields of `Comparison` (paceline/score/compare.py)."""


def run(args: Args) -> int:
    """Run the command; the exit code."""
    if len(args.runs) < 2:
        raise UserError("compare: give two runs, or more: `paceline compare runs/a runs/b`.")
    from paceline.score.compare import compare

    found = compare(args.runs)
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=1).decode(), flush=True)
        return 0
    for line in _lines(found):
        say(line)
    return 0


def _lines(found: "Comparison") -> Iterator[str]:
    from rich.console import Console

    for number, (name, path) in enumerate(found.results.items(), start=1):
        yield f"{number}. {name}: {path}"
    console = Console(width=_WIDTH, record=True, file=io.StringIO(), color_system=None)
    for table in found.tables:
        console.print(_table(table))
    yield from (line.rstrip() for line in console.export_text().splitlines())
    yield (
        "difference: to the same method of the first; 95 % by resampling prompts, the same ones "
        "for both; * where p is below 0.05, of this pair alone: with many pairs some are by chance"
    )
    for note in found.notes:
        yield f"note: {note}"


def _table(table: "Table"):
    from rich.table import Table as RichTable

    of = f"τ of {table.dataset}" if table.dataset else "τ"
    shown = RichTable(title=f"{of}, over {table.prompts} common prompts")
    for name in ("method", "run"):
        shown.add_column(name, overflow="fold")
    columns = ["τ", "95 %", "difference", "95 % of it", "p"]
    # The time of one data set is not kept apart.
    for name in columns if table.dataset else [*columns, "speed-up"]:
        shown.add_column(name, justify="right")
    before = ""
    for row in table.rows:
        shown.add_row("" if row.method == before else row.method, *_cells(row, table.dataset))
        before = row.method
    return shown


def _cells(row: "Measured", dataset: str) -> Iterator[str]:
    yield row.result
    yield f"{row.tau:.3f}"
    yield f"{row.interval[0]:.2f}-{row.interval[1]:.2f}"
    if row.to_first is None:
        yield from ("–", "–", "–")
    else:
        star = " *" if row.to_first.is_significant else ""
        low, high = row.to_first.interval
        yield f"{row.to_first.value:+.3f}{star}"
        yield f"{low:+.3f} to {high:+.3f}"
        yield f"{row.to_first.p_value:.4f}"
    if not dataset:
        yield "–" if row.speedup is None else f"{row.speedup:.2f}x"
