"""How one stage of a run stands, from its record, its events and its checkpoints."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from socket import gethostname
from typing import Any, Literal, TypeGuard

from paceline.durable.owner import Owner
from paceline.pipeline import STAGES as _MODULES
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe
from paceline.recipe.stage import Record, outputs_digest
from paceline.stage_folders import Kept
from paceline.status_parts import (
    Extraction,
    Training,
    extraction_part,
    online_part,
    skipping_part,
    training_part,
)
from paceline.watch.events import ENDS, SCHEMA_VERSION, Counts
from paceline.watch.tail import counts_of, last_events
from paceline.watch.words import span

STAGES = tuple(name for name, _ in _MODULES)

StageState = Literal[
    "off",
    "pending",
    "running",
    "finished",
    "outdated",
    "failed",
    "refused",
    "interrupted",
    "part done",
    "died",
    "damaged",
]
"""`off`: not asked for by the recipe. `pending`: not begun. `refused`: what was asked for is
impossible. `outdated`: the score is complete, but of another drafter than the one that is chosen
now. `part done`: this machine's part is done, and other machines do the rest. `died`: its process
ended without a word. `damaged`: the record cannot be believed, or an output is not there as it was
written."""


_AFTER_END = 1000
"""Events among which a complete stage has told of its end: later attempts add a few. Where it has
not, its record tells."""


@dataclass(frozen=True, kw_only=True)
class StageStatus:
    """A stage at one moment. As JSON it has these keys."""

    name: str
    state: StageState
    detail: str = ""
    """The error, the refusal, the damage, or how it died; empty where all is well."""
    counts: Counts | None = None
    """How far it is; None where nothing tells. Rate and time left are None where nobody works."""
    seconds: float | None = None
    """At work, in its last process."""
    heard: float | None = None
    """Its last sign of life, in seconds since the epoch."""
    ended: float | None = None
    """When it was finished, in seconds since the epoch; None where it is not, or nothing tells."""
    pid: int | None = None
    """Of the process that gave it."""
    host: str | None = None
    training: Training | None = None
    """Of `train`."""
    extraction: Extraction | None = None
    """Of `extract`."""
    tau: dict[str, float] = field(default_factory=dict)
    """Of `score`, when finished: pooled τ by method."""
    report: dict[str, Any] = field(default_factory=dict)
    """The numbers of a finished stage's record."""
    notes: tuple[str, ...] = ()
    """What could not be read, and what happened after the end."""


@dataclass(frozen=True, kw_only=True)
class _Heard:
    """What the end of an event file tells."""

    last: dict[str, Any] | None = None
    ended: dict[str, Any] | None = None
    """The last `finished` event, for a stage that is complete."""
    counts: Counts | None = None
    told: dict[str, Any] = field(default_factory=dict)
    """The event that carried them."""
    is_own: bool = False
    """Whether the counts are of the process that this tells of: the last, or that which ended."""
    step: int | None = None
    loss: float | None = None
    learning_rate: float | None = None
    checking: dict[str, Any] = field(default_factory=dict)
    """The last `checking` that is newer than the counts: what is there is looked at, or was."""
    note: str = ""


def stage_status(
    name: str,
    paths: RunDir,
    recipe: Recipe | None,
    folders: Mapping[str, Kept],
    *,
    owner: Owner | None,
    is_held: bool,
    now: float,
) -> StageStatus:
    """Look at one stage; `folders` are what all of them keep.

    `owner` is the process at work, where it is known who holds the run.
    """
    kept = folders[name]
    record = kept.record
    path = paths.events / f"{name}.jsonl"
    heard = _listen(path, is_train=name == "train", is_done=kept.is_complete)
    last = heard.last or {}
    is_running = _is_running(last, owner, is_held=is_held)
    is_skipping = is_running and heard.checking.get("pid") == last["pid"]
    state = _state(name, folders, recipe, last, is_running=is_running)
    counts = heard.counts
    is_whole = state in ("finished", "outdated")
    if counts is None and is_whole and record is not None:
        counts = _reported(name, record.report)
    if counts is not None and not (heard.is_own and (state == "running" or is_whole)):
        counts = replace(counts, rate=None, eta=None)
    if counts is not None and not is_running:
        counts = replace(counts, eta=None)
    notes = [note for note in (kept.silence, heard.note) if note]
    if is_running and last.get("kind") == "stuck":
        # While counts are told, they have the calls that hang beside them.
        notes.append(_hanging(last, now))
    if name == "train" and is_whole and record is not None:
        notes += map(str, record.report.get("remarks", ()))
    if state == "outdated":
        notes.append("measured another drafter than the one chosen now")
    if (is_whole or state == "damaged") and last.get("kind") in ("failed", "interrupted"):
        notes.append(f"The last attempt at it ended early: {last.get('error')}")
    at_work = last if is_running or heard.ended is None else heard.ended
    training = extraction = None
    if name == "train" and not kept.silence:
        training = training_part(
            paths.checkpoints,
            kept.checkpoints,
            None if kept.damage else record,
            step=heard.step,
            loss=heard.loss,
            learning_rate=heard.learning_rate,
        )
        if is_running and heard.is_own:
            training = replace(training, online=online_part(heard.told))
    if name == "extract" and is_skipping:
        extraction = skipping_part(heard.told, heard.checking)
    elif name == "extract" and (heard.told or heard.checking):
        told = {**heard.told, **{k: v for k, v in heard.checking.items() if k == "part"}}
        # Workers and waits of a process before this one are no more.
        extraction = extraction_part(told, is_running=is_running and heard.is_own)
    return StageStatus(
        name=name,
        state=state,
        detail=_detail(state, kept.damage, last, now) + _goes_on(state, training),
        counts=counts,
        seconds=_seconds(at_work, is_running=is_running, now=now),
        heard=last.get("t"),
        ended=None if heard.ended is None else heard.ended["t"],
        pid=last.get("pid"),
        host=_text(last.get("host")),
        training=training,
        extraction=extraction,
        tau=_numbers(record.report) if name == "score" and record and is_whole else {},
        report=record.report if record and is_whole else {},
        notes=tuple(notes),
    )


def _hanging(event: dict[str, Any], now: float) -> str:
    """A call of the stage's own process, or of a training's worker, that has not returned."""
    seconds = event.get("seconds")
    lasted = max(0.0, now - event["t"]) + (seconds if _is_number(seconds) else 0.0)
    state = _text(event.get("process_state"))
    frozen = f" (process state {state})" if state else ""
    call = " ".join(t for t in (_text(event.get("call")), _text(event.get("path"))) if t)
    who = _text(event.get("name"))
    return f"{f'{who}: ' if who else ''}{call} has not returned for {span(lasted)}{frozen}."


def started_anew(host: str | None, since: float) -> str:
    """A sentence where this machine was started after `since`: a power cut, or a reboot."""
    if host != gethostname():
        return ""
    try:
        words = Path("/proc/stat").read_text().split()
        booted = float(words[words.index("btime") + 1])
    except (OSError, ValueError, IndexError):
        return ""
    return " This machine was started anew since then." if booted > since else ""


def _listen(path: Path, *, is_train: bool, is_done: bool) -> _Heard:
    """What the events say; of a complete stage, those of the process that completed it."""
    last: dict[str, Any] | None = None
    heard = _Heard()
    try:
        for number, event in enumerate(last_events(path)):
            last = last or event
            if event["v"] != SCHEMA_VERSION:
                which = "a newer" if event["v"] > SCHEMA_VERSION else "an older"
                if heard.counts is None:
                    note = f"Its events were written by {which} Paceline: its counts are not shown."
                    heard = replace(heard, note=note)
                break
            if is_done and heard.ended is None:
                if number >= _AFTER_END:
                    break
                if event["kind"] != "finished":
                    continue
                heard = replace(heard, ended=event)
            if event["kind"] == "checking" and heard.counts is None and not heard.checking:
                heard = replace(heard, checking=event)
            if heard.counts is None and (counts := counts_of(event)) is not None:
                told = heard.ended or last
                own = event["pid"] == told["pid"] and not heard.checking
                heard = replace(heard, counts=counts, told=event, is_own=own)
            if heard.step is None and type(event.get("step")) is int:
                heard = replace(heard, step=event["step"])
            if heard.loss is None and _is_number(event.get("loss")):
                rate = event.get("learning_rate")
                rate = float(rate) if _is_number(rate) else None
                heard = replace(heard, loss=float(event["loss"]), learning_rate=rate)
            if heard.counts is not None and (heard.loss is not None or not is_train):
                break
    except FileNotFoundError:
        return heard
    except OSError as error:
        return replace(heard, last=last, note=f"{path}: cannot be read ({error.strerror}).")
    return replace(heard, last=last)


def _is_running(last: dict[str, Any], owner: Owner | None, *, is_held: bool) -> bool:
    if not is_held or not last or last["kind"] in ENDS:
        return False
    return owner is None or (owner.pid == last["pid"] and last.get("host") in (None, owner.host))


def _state(
    name: str,
    folders: Mapping[str, Kept],
    recipe: Recipe | None,
    last: dict[str, Any],
    *,
    is_running: bool,
) -> StageState:
    kept, kind = folders[name], last.get("kind")
    if is_running:
        return "running"
    if kept.damage:
        return "damaged"
    if kept.record is not None and kept.is_complete:
        is_old = name == "score" and _is_outdated(kept.record, folders["train"].record)
        return "outdated" if is_old else "finished"
    if name == "regenerate" and not _is_asked(folders["prepare"].record, recipe):
        return "off"
    if kept.silence and kind in ("finished", "skipped"):
        return "finished"
    if kind == "failed":
        return "refused" if last.get("refused") is True else "failed"
    if kind == "interrupted":
        return "interrupted"
    if kind == "part_done":
        return "part done"
    # A record comes before the first event: events without one are those of a removed stage.
    has_begun = bool(last) if kept.silence else kept.record is not None
    return "died" if has_begun else "pending"


def _is_outdated(score: Record, train: Record | None) -> bool:
    """Whether the training has chosen another drafter since; False where that cannot be told."""
    chosen = None if train is None else outputs_digest(train)
    return chosen is not None and score.fields.get("drafter", chosen) != chosen


def _is_asked(prepared: Record | None, recipe: Recipe | None) -> bool:
    """Whether answers are to be regenerated."""
    if recipe is not None:
        return recipe.regenerate.enabled
    return prepared is None or prepared.fields.get("regenerate.enabled") is not False


def _detail(state: StageState, damage: str, last: dict[str, Any], now: float) -> str:
    match state:
        case "damaged":
            return damage
        case "failed" | "refused" | "interrupted":
            return str(last.get("error", ""))
        case "part done":
            return str(last.get("told", ""))
        case "died" if last:
            host = _text(last.get("host"))
            where = f" on {host}" if host else ""
            ago = max(0.0, now - last["t"])
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now - ago))
            return (
                f"Process {last['pid']}{where} ended without a word; last heard {when}."
                f"{started_anew(host, last['t'])}"
            )
        case "died":
            return "Its process ended without a word, and left no events."
        case _:
            return ""


def _goes_on(state: StageState, training: Training | None) -> str:
    """Where a training that ended early will go on, for the end of its detail."""
    if training is None or state not in ("failed", "interrupted", "died"):
        return ""
    if training.resumes_from is None:
        return "\nIt goes on from the beginning: no checkpoint yet."
    return f"\nIt goes on from {training.resumes_from}."


def _seconds(last: dict[str, Any], *, is_running: bool, now: float) -> float | None:
    elapsed = last.get("elapsed")
    if not _is_number(elapsed):
        return None
    return round(elapsed + (max(0.0, now - last["t"]) if is_running else 0.0), 3)


def _reported(name: str, report: dict[str, Any]) -> Counts | None:
    """The counts of a finished stage whose events are gone, as far as its record has them."""
    reasons = _counted(report.get("reasons"))
    match name:
        case "prepare":
            unit, done, tokens = "rows", report.get("read"), _counted(report.get("tokens"))
        case "regenerate":
            done = sum(_whole([report.get("answered"), report.get("quarantined")]))
            unit, tokens = "prompts", report.get("tokens")
        case "extract" | "train":
            unit, done, tokens = "samples", report.get("samples"), report.get("tokens")
        case _:
            return None
    if type(done) is not int:
        return None
    total = sum(_whole(tokens.values() if isinstance(tokens, dict) else [tokens]))
    return Counts(
        unit=unit, total=done, done=done, quarantined=reasons, tokens=total, tokens_total=total
    )


def _counted(value: object) -> dict[str, int]:
    pairs = value.items() if isinstance(value, dict) else ()
    return {str(key): number for key, number in pairs if type(number) is int}


def _numbers(value: dict[str, Any]) -> dict[str, float]:
    return {key: float(number) for key, number in value.items() if _is_number(number)}


def _whole(values: Iterable[object]) -> list[int]:
    return [value for value in values if type(value) is int]


def _is_number(value: object) -> TypeGuard[float]:
    return type(value) in (int, float)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
