"""Paths: there, readable, writable, and on something that outlives the machine's next stop."""

import shlex
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.doctor.findings import Finder, Finding
from paceline.doctor.places import Place
from paceline.doctor.touch import Answer
from paceline.doctor.world import World
from paceline.durable.errors import PacelineError, RecipeError
from paceline.recipe.check import check_paths
from paceline.recipe.stage import read_record
from paceline.watch.words import command_line

_FIND = Finder("paths")
_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_TEMPORARY = ("/tmp", "/var/tmp", "/run")
_LASTING = "/a/lasting/folder"


@dataclass(frozen=True)
class _Passing:
    """Why paths will not outlive the next stop; those with an equal reason are told together."""

    where: str
    lost: str
    first: str = ""
    """What to do before they can be moved."""


def check(world: World) -> Iterator[Finding]:
    """A finding for each path that is wrong; one `ok` for those that are right."""
    right: list[str] = []
    passing: list[str] = []
    short_lived: dict[_Passing, list[Place]] = {}
    for place in world.places:
        answer = world.answers[place.path]
        if answer.kind == "none" and not place.written:
            continue  # `_missing` knows whether it is needed.
        findings = [*_reachable(place, answer)]
        if not findings:
            findings = [*_writable(place, answer)]
            reason = None if place.is_memory_fine else _passes(place, answer, world)
            if isinstance(reason, Finding):
                findings.append(reason)
            elif reason is not None:
                short_lived.setdefault(reason, []).append(place)
                yield from findings
                continue
        if not findings:
            (passing if place.is_memory_fine else right).append(f"{place.role} ({place.path})")
        yield from findings
    for reason, lying in short_lived.items():
        yield _short_lived(reason, lying)
    if all(answer.kind != "silent" for answer in world.answers.values()):
        yield from _missing(world)
    if right:
        yield _FIND.ok(f"on lasting storage: {', '.join(right)}")
    if passing:
        yield _FIND.ok(f"may be written, and need not outlive a boot: {', '.join(passing)}")


def silent(place: Place) -> Finding:
    """A path that gave no answer in time."""
    return _FIND.error(
        f"{place.role}: {place.path} does not answer",
        "a run that reads or writes there would hang without a word, and cannot even be killed "
        "while the mount is frozen",
        f"look at its mount: findmnt --target {place.path}",
    )


def _reachable(place: Place, answer: Answer) -> Iterator[Finding]:
    if answer.kind == "silent":
        yield silent(place)
    elif answer.error:
        yield _FIND.error(
            f"{place.role}: {answer.at}: {answer.error}",
            "the run cannot read it",
            command_line("ls", "-ld", answer.at),
        )


def _writable(place: Place, answer: Answer) -> Iterator[Finding]:
    if not place.written:
        return
    if answer.kind == "file":
        yield _FIND.error(
            f"{place.role}: {place.path} is a file, and a folder is needed",
            "the run cannot write there",
            command_line("mv", place.path, f"{place.path}.aside"),
        )
    elif answer.is_read_only or not answer.is_writable:
        reason = "is mounted read-only" if answer.is_read_only else "cannot be written by this user"
        yield _FIND.error(
            f"{place.role}: {answer.at} {reason}",
            "the run cannot keep anything there",
            command_line("sudo", "mount", "-o", "remount,rw", answer.at)
            if answer.is_read_only
            else f'sudo install -d -o "$USER" {shlex.quote(str(place.path))}',
        )


def _passes(place: Place, answer: Answer, world: World) -> "_Passing | Finding | None":
    """Why what lies there will not outlive the next stop; None where it will."""
    at = Path(answer.at)
    try:
        mount = world.mounts(at)
    except OSError:
        return _FIND.note(f"{place.role}: nobody knows what {at} is mounted on")
    if mount.kind in _MEMORY:
        return _Passing(f"in memory ({mount.kind} at {mount.point})", "gone after the next boot")
    if "overlay" in mount.kind and mount.point == Path("/"):
        return _Passing(
            f"in the container's own layer ({mount.kind} at /)",
            "gone with the container",
            "mount a folder of the machine into the container; ",
        )
    folder = _temporary(at)
    if folder is not None:
        return _Passing(f"in a temporary folder ({folder})", "emptied at boot or by age")
    return None


def _temporary(path: Path) -> Path | None:
    folders = sorted({*map(Path, _TEMPORARY), Path(tempfile.gettempdir())})
    return next((folder for folder in folders if path.is_relative_to(folder)), None)


def _short_lived(reason: _Passing, lying: list[Place]) -> Finding:
    """One finding for all that lie in one folder."""
    verb = "lies" if len(lying) == 1 else "lie"
    heavy = "in memory" in reason.where and any(place.role == "target.path" for place in lying)
    return _FIND.warning(
        f"{', '.join(f'{place.role} ({place.path})' for place in lying)} {verb} {reason.where}",
        f"what lies there is {reason.lost}, and the run cannot go on without it"
        + ("; until then it takes memory that workers and staging could use" if heavy else ""),
        reason.first + _move(lying),
    )


def _move(lying: list[Place]) -> str:
    copied = [place for place in lying if place.role not in ("run directory", "extract.store")]
    steps: list[str] = []
    if copied:
        command = command_line("cp", "-a", *(place.path for place in copied), f"{_LASTING}/")
        named = [place for place in copied if place.role != "recipe"]
        it = "it" if len(named) == 1 else "them"
        steps.append(f"{command} and name {it} in the recipe" if named else command)
    for place in lying:
        if place.role == "extract.store":
            steps.append(f"--set extract.store={_LASTING}")
        elif place.role == "run directory":
            steps.append(f"--run {_LASTING}/{place.path.name}")
    return "; ".join(steps)


def _missing(world: World) -> Iterator[Finding]:
    """What the stages that are still to come would refuse about the recipe's paths."""
    # Later stages read what prepare made of the data: they do not need it itself.
    try:
        record = read_record(world.run_dir.corpus, "prepare")
    except (OSError, PacelineError):
        record = None  # The stage itself says what is wrong with it.
    is_prepared = record is not None and record.outputs is not None
    try:
        check_paths(world.recipe, sources=not is_prepared)
    except RecipeError as error:
        for line in str(error).splitlines():
            yield _FIND.error(
                line, "the command would refuse to start", "name what exists, or put it there"
            )
