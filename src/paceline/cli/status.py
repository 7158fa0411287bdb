"""`paceline status`."""

import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import tyro

from paceline.cli.extraction_lines import extraction_lines
from paceline.cli.patience import answered
from paceline.cli.terminal import say
from paceline.stage_status import StageStatus
from paceline.status import RunStatus, run_status
from paceline.status_parts import OnlineNow, Training
from paceline.watch.words import counted, named, number, ordered, short_bytes, span

_WIDTH = 100

_SECONDS = 10.0
"""After which a run directory that does not answer is told as such."""

_GOOD = ("running", "finished", "partial", "empty", "part done")

_COLUMNS = ("stage", "state", "done", "tokens", "rate", "left", "last ran", "heard")
_LEFT = 2
"""Columns of text; the others are numbers, aligned to the right."""

_STYLES = {
    "running": "bold cyan",
    "finished": "green",
    "part done": "green",
    "outdated": "yellow",
    "pending": "dim",
    "off": "dim",
    "interrupted": "yellow",
}

_NAMED = 5
"""Checkpoints that are named; of more, the last."""


@dataclass(frozen=True, kw_only=True)
class Args:
    """Says how a run stands: what is done, redone, left out, how long it takes, whether it died,
    and what to do next. It answers at any time, also while a command is at work there.

    Columns: done, rows, prompts or samples, of how many; tokens, of what is done; rate, tokens per
    second of the last process that worked on the stage; left, the time left at that rate; last ran,
    how long that process was at work, earlier ones not counted; heard, its last sign of life.

    Reads: the run directory: records, the ends of `events/`, names and states of checkpoints. That
    the outputs hold what was written, only the stages check.

    Writes: nothing, to stdout alone.

    Exit code: 0 where the run is at work, finished, waits for its next stage, or has done its part
    of a shared extraction; 1 where it failed, was refused or interrupted, died, or is damaged; 2
    where the folder is no run directory.

    Example: paceline status runs/demo
    """  # noqa: D205

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run directory."""
    json: Annotated[
        tyro.conf.FlagCreatePairsOff[bool], tyro.conf.arg(help_behavior_hint="(default: text)")
    ] = False
    """Everything, as one JSON object (docs/architecture.md, "Events")."""


def run(args: Args) -> int:
    """Run the command; the exit code."""
    status = answered(lambda: run_status(args.run), str(args.run), seconds=_SECONDS)
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(status), indent=1).decode(), flush=True)
    else:
        _show(status)
    return 0 if status.state in _GOOD else 1


def _show(status: RunStatus) -> None:
    say(_title(status))
    say("")
    rows = [_row(stage, status.now) for stage in status.stages]
    if sys.stdout.isatty():
        _print_table(rows)
    else:
        widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
        for row in (_COLUMNS, *rows):
            print(_aligned(row, widths), flush=True)
    lines = [line for stage in status.stages for line in _lines(stage, status.now)]
    if lines or status.notes:
        say("")
    for line in (*lines, *(f"note: {note}" for note in status.notes)):
        say(_wrapped(line))
    say("")
    # Not wrapped: it holds a command to copy.
    say(f"next: {status.next}")


def _title(status: RunStatus) -> str:
    name = f"run {status.name} in {status.root}" if status.name else f"run in {status.root}"
    if status.owner is not None:
        owner = status.owner
        since = span(status.now - owner.since)
        who = f" (`{owner.doing}`, process {owner.pid} on {owner.host}, for {since})"
    else:
        who = " (by a process that could not say who it is)" if status.state == "running" else ""
    return f"{name}: {status.state}{who}"


def _row(stage: StageStatus, now: float) -> tuple[str, ...]:
    counts = stage.counts
    heard = "" if stage.heard is None else f"{span(now - stage.heard)} ago"
    ran = "" if stage.seconds is None else span(stage.seconds)
    if counts is None:
        return (stage.name, stage.state, "", "", "", "", ran, heard)
    total = "" if counts.total is None else f" of {number(counts.total)}"
    last = counts.done if counts.total is None else counts.total
    return (
        stage.name,
        stage.state,
        f"{number(counts.done)}{total} {named(last, _one(counts.unit))}",
        number(counts.tokens) if counts.tokens else "",
        "" if counts.rate is None else f"{number(counts.rate)}/s",
        "" if counts.eta is None else span(counts.eta),
        ran,
        heard,
    )


def _aligned(row: tuple[str, ...], widths: list[int]) -> str:
    cells = [
        cell.ljust(width) if index < _LEFT else cell.rjust(width)
        for index, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()


def _print_table(rows: list[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index, title in enumerate(_COLUMNS):
        table.add_column(title, justify="left" if index < _LEFT else "right", no_wrap=True)
    for row in rows:
        name, state, *rest = row
        cells = [Text(cell) for cell in rest]
        table.add_row(Text(name), Text(state, style=_STYLES.get(state, "bold red")), *cells)
    Console().print(table)


def _lines(stage: StageStatus, now: float) -> Iterator[str]:
    """What does not fit into the table."""
    counts = stage.counts
    if counts is not None:
        unit = _one(counts.unit)
        if counts.skipped:
            were = "was" if counts.skipped == 1 else "were"
            yield f"{stage.name}: {counted(counts.skipped, unit)} {were} done by earlier runs"
        if counts.redone:
            pieces = counted(sum(counts.redone.values()), _one(counts.redone_unit or "pieces"))
            yield f"{stage.name}: redone {pieces}: {_split(counts.redone)}"
        if counts.failed:
            yield f"{stage.name}: {counted(counts.failed, unit)} failed"
        if counts.quarantined:
            aside = counted(sum(counts.quarantined.values()), unit)
            yield f"{stage.name}: set aside {aside}: {_split(counts.quarantined)}"
    if stage.training is not None:
        yield from _training_lines(stage.training, stage.notes)
    if stage.extraction is not None:
        yield from extraction_lines(stage.extraction, now)
    if stage.tau:
        yield f"score: τ {_taus(stage.tau)}"
    if stage.detail:
        yield f"{stage.name} {stage.state}: {stage.detail}"
    for note in stage.notes:
        yield f"{stage.name}: {note}"


def _training_lines(training: Training, notes: Sequence[str]) -> Iterator[str]:
    parts = []
    if training.step is not None:
        parts.append(f"step {training.step:,}")
    if training.loss is not None:
        parts.append(f"loss {training.loss:.3f}")
    if training.learning_rate is not None:
        parts.append(f"learning rate {training.learning_rate:.2e}")
    if training.tau:
        parts.append(f"simulated τ {_taus(training.tau)} at step {training.tau_step:,}")
    if parts:
        yield f"train: {', '.join(parts)}"
    if training.online is not None:
        yield f"train: {_online(training.online)}"
    # What a training has come to says it too.
    if training.parent and training.parent.words() not in notes:
        yield f"train: {training.parent.words()}"
    if training.checkpoints:
        kept = ", ".join(training.checkpoints[-_NAMED:])
        count = len(training.checkpoints)
        more = f"{count} checkpoints, the last" if count > _NAMED else named(count, "checkpoint")
        yield f"train: {more} {kept}; best {training.best}"


def _online(now: OnlineNow) -> str:
    drafters, targets = 100 * now.drafters_wait, 100 * now.targets_wait
    waits = f"drafters wait {drafters:.0f} % of the time, targets {targets:.0f} %"
    rates = [
        f"{rate:,.0f} tokens/s a {side}"
        for side, rate in (("target", now.target_rate), ("drafter", now.drafter_rate))
        if rate is not None
    ]
    kept = [] if now.kept_samples is None else [f"{now.kept_samples:,} samples are kept"]
    return ", ".join([waits, *rates, f"{short_bytes(now.queue_bytes)} in the queue", *kept])


def _wrapped(text: str) -> str:
    lines = text.splitlines() or [""]
    wrapped = [
        textwrap.wrap(
            line, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
        or [""]
        for line in lines
    ]
    return "\n".join(line for part in wrapped for line in part)


def _taus(tau: Mapping[str, float]) -> str:
    return ", ".join(f"{method} {tau[method]:.3f}" for method in ordered(tau))


def _one(unit: str) -> str:
    """The singular of a unit of counts, which are regular nouns in the plural."""
    return unit.removesuffix("s")


def _split(counts: Mapping[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    return ", ".join(f"{count:,} {reason}" for reason, count in ordered)
