"""The recovery report: how the last extraction ended, what survived it, what may end the next."""

import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from errno import EDQUOT, ENOSPC
from pathlib import Path
from typing import Any, Literal

import psutil

from paceline.durable.session import ENDED, SESSION
from paceline.durable.space import mount_of, read_space
from paceline.watch.tail import counts_of, last_events
from paceline.watch.words import counted, duration, short_bytes

Ending = Literal[
    "none", "finished", "interrupted", "failed", "no_room", "out_of_memory", "reboot",
    "other_machine", "killed",
]  # fmt: skip
"""How the last session ended; `none` where there was none. `killed`: without a word, and nothing
tells by whom."""

_CLEAN = ("none", "finished", "interrupted")

_EVENTS = 1000
"""Among the last so many one tells the rate, unless there was none."""

_NO_ROOM = re.compile("|".join(re.escape(os.strerror(code)) for code in (ENOSPC, EDQUOT)))

_IN_MEMORY = ("tmpfs", "ramfs")

_LITTLE = 0.1
"""Share of the memory below which what is available is called little."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What a survey found."""

    units: int
    """Verified."""

    units_total: int
    samples: int
    bytes: int
    tokens: int
    tokens_total: int
    staged_units: int = 0
    """Made, and not yet in the store."""

    staged_bytes: int = 0


@dataclass(frozen=True)
class Recovery:
    """What to tell before an extraction goes on."""

    lines: tuple[str, ...]
    """Sentences; none where the last session finished, or there was none."""

    was_unclean: bool
    """Whether the last session ended neither by itself nor by a signal that it obeyed."""

    ending: Ending


@dataclass(frozen=True)
class _End:
    ending: Ending
    error: str = ""


def recovery_report(
    records: Sequence[Mapping[str, Any]],
    events: Path,
    standing: Standing,
    *,
    boot_id: str,
    oom_kills: int | None,
    paths: Mapping[str, Path],
    bytes_left: int = 0,
    now: float | None = None,
) -> Recovery:
    """Say how the last session in a journal ended and what that means for this one.

    `records` are the journal's before this process appended any. `events` is the run's folder of
    events, `boot_id` and `oom_kills` as they are now. `paths` are the places that the work needs,
    by what they are (such as `the features`), the first of them the one where `bytes_left` are
    still to be written.
    """
    session = next((r for r in reversed(records) if r.get("kind") == SESSION), None)
    if session is None:
        return Recovery((), False, "none")
    told = _Told(events / "extract.jsonl", session)
    end = _ending(records, session, told, boot_id, oom_kills)
    if end.ending == "finished":
        return Recovery((), False, "finished")
    lines = (
        _how(session, end, told, time.time() if now is None else now),
        *_survived(standing),
        *_again(end, paths, bytes_left),
        *_time_left(standing, told),
    )
    return Recovery(lines, end.ending not in _CLEAN, end.ending)


class _Told:
    """What the events tell of a session."""

    def __init__(self, path: Path, session: Mapping[str, Any]) -> None:
        self.heard: float | None = None
        """When its process gave its last sign of life, seconds since the epoch."""
        self.end: dict[str, Any] | None = None
        """The event that ended it; the journal may have had no room for its record."""
        self.waiting = ""
        """What it was waiting for at the end."""
        self.rate: float | None = None
        """Its last, tokens per second."""
        self.rate_before: float | None = None
        """The last of a session before it, where it has none."""
        try:
            for number, event in enumerate(last_events(path)):
                is_before = event["t"] < session["at"] - 1
                if number >= _EVENTS or (is_before and (self.rate or self.rate_before)):
                    return
                if is_before:
                    self.rate_before = _rate(event)
                elif event["pid"] == session["pid"]:
                    self._take(event)
        except OSError:
            return

    def _take(self, event: dict[str, Any]) -> None:
        if self.heard is None:
            self.heard = event["t"]
            if event["kind"] in ("failed", "interrupted"):
                self.end = event
            waiting = event.get("waiting")
            reason = waiting.get("reason") if isinstance(waiting, dict) else event.get("reason")
            if isinstance(waiting, dict) or event["kind"] == "waiting":
                self.waiting = str(reason)
        if self.rate is None:
            self.rate = _rate(event)


def _rate(event: dict[str, Any]) -> float | None:
    counts = counts_of(event)
    return None if counts is None else counts.rate


def _ending(
    records: Sequence[Mapping[str, Any]],
    session: Mapping[str, Any],
    told: _Told,
    boot_id: str,
    oom_kills: int | None,
) -> _End:
    ended = next((r for r in reversed(records) if r.get("kind") in (ENDED, SESSION)), session)
    if ended["kind"] == ENDED:
        how, error = ended["how"], str(ended.get("error", ""))
    elif told.end is not None:
        how, error = told.end["kind"], str(told.end.get("error", ""))
    else:
        how, error = "", ""
    if how in ("finished", "interrupted"):
        return _End(how, error)
    before = session.get("oom_kills")
    was_short = before is not None and oom_kills is not None and oom_kills > before
    is_same_boot = session.get("host") == socket.gethostname() and session["boot_id"] == boot_id
    if how == "failed":
        if _NO_ROOM.search(error):
            return _End("no_room", error)
        return _End("out_of_memory" if was_short and is_same_boot else "failed", error)
    if session.get("host") != socket.gethostname():
        return _End("other_machine")
    if session["boot_id"] != boot_id:
        return _End("reboot")
    return _End("out_of_memory" if was_short else "killed")


def _how(session: Mapping[str, Any], end: _End, told: _Told, now: float) -> str:
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(session["at"]))
    who = f"The last run, process {session['pid']} on {session['host']}, begun {since},"
    match end.ending:
        case "interrupted":
            how = "was stopped by a signal, and let what it had in work be finished."
        case "failed":
            how = f"ended with an error: {end.error}"
        case "no_room":
            how = f"ended because there was no room left: {end.error}"
        case "out_of_memory":
            how = "ended for want of memory: the kernel killed processes around it since it began."
            how += f" It said: {end.error}" if end.error else ""
        case "reboot":
            how = (
                "ended with its machine, which was started anew since: a power cut, a crash or a "
                "reboot."
            )
        case "other_machine":
            how = "was on another machine, and ended without a word."
        case _:
            how = (
                "ended without a word: something killed it (SIGKILL), and nothing here tells why. "
                "It was not this machine going down."
            )
    sentence = f"{who} {how}"
    if told.heard is not None:
        sentence += f" It was last heard of {duration(max(0.0, now - told.heard))} ago"
        sentence += f", waiting: {told.waiting}." if told.waiting else "."
    return sentence


def _survived(standing: Standing) -> Iterator[str]:
    if standing.units == 0:
        yield f"None of its {counted(standing.units_total, 'shard')} is verified."
    else:
        yield (
            f"Survived: {standing.units:,} of {counted(standing.units_total, 'shard')}, verified: "
            f"{counted(standing.samples, 'sample')}, {short_bytes(standing.bytes)}. The others are "
            "still to be made."
            if standing.units < standing.units_total
            else f"Survived: all {counted(standing.units, 'shard')}, verified."
        )
    if standing.staged_units:
        yield (
            f"{counted(standing.staged_units, 'shard')} more "
            f"({short_bytes(standing.staged_bytes)}) had been made and were on their way to the "
            "store: what of them is whole is uploaded, not made again."
        )


def _again(end: _End, paths: Mapping[str, Path], bytes_left: int) -> Iterator[str]:
    """What would make it happen again."""
    if end.ending == "reboot":
        yield (
            "What starts with the machine has started again: `paceline doctor` names services "
            "that hold devices. Why it went down, the log of the boot before tells "
            "(`journalctl -b -1`)."
        )
    if end.ending == "killed":
        yield (
            "Whatever killed it may do so again. The kernel's log names those that it killed "
            "(`journalctl -k`, `dmesg`), and the log of a scheduler or of the container those "
            "that went beyond a limit."
        )
    memory = psutil.virtual_memory()
    if end.ending == "out_of_memory" or memory.available < _LITTLE * memory.total:
        yield (
            f"Memory: {short_bytes(memory.available)} of {short_bytes(memory.total)} are "
            "available. Fewer target.workers, a lower extract.batch_tokens or extract.staging on "
            "a disk need less."
        )
    for number, (what, path) in enumerate(paths.items()):
        yield from _place(what, path, bytes_left if number == 0 else 0, end)


def _place(what: str, path: Path, bytes_left: int, end: _End) -> Iterator[str]:
    try:
        space = read_space(path)
        kind = mount_of(path).kind
    except OSError as error:
        yield f"{path} ({what}) cannot be looked at: {error.strerror or error}."
        return
    if space.free < bytes_left:
        yield (
            f"{path} ({what}): {short_bytes(space.free)} are free, and {short_bytes(bytes_left)} "
            "are still to be written. It will run full again unless room is made."
        )
    elif end.ending == "no_room":
        yield f"{path} ({what}): {short_bytes(space.free)} are free now."
    if kind in _IN_MEMORY:
        yield f"{path} ({what}) lies in memory ({kind}): the next reboot empties it."
    elif kind == "overlay":
        yield f"{path} ({what}) lies inside a container, and ends with it."


def _time_left(standing: Standing, told: _Told) -> Iterator[str]:
    left = standing.tokens_total - standing.tokens
    if left <= 0:
        return
    rate = told.rate or told.rate_before
    if not rate:
        yield f"{counted(left, 'token')} are left; no event tells how fast they go."
        return
    at = f"its last {rate:,.0f} tokens/s"
    if not told.rate:
        at = f"the {rate:,.0f} tokens/s of a run before it"
    yield f"{counted(left, 'token')} are left: {duration(left / rate)} at {at}."
