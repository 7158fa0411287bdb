"""Paths: there, readable, writable, and on something that outlives the machine's next stop."""

import shlex
import tempfile
from collections.abc import Iterator
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


def check(world: World) -> Iterator[Finding]:
    """A finding for each path that is wrong; one `ok` for those that are right."""
    right: list[str] = []
    for place in world.places:
        answer = world.answers[place.path]
        if answer.kind == "none" and not place.written:
            continue  # `_missing` knows whether it is needed.
        findings = [*_reachable(place, answer)]
        if not findings:
            findings = [*_writable(place, answer), *_lasting(place, answer, world)]
        if not findings:
            right.append(f"{place.role} ({place.path})")
        yield from findings
    if all(answer.kind != "silent" for answer in world.answers.values()):
        yield from _missing(world)
    if right:
        yield _FIND.ok(f"on lasting storage: {', '.join(right)}")


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


def _lasting(place: Place, answer: Answer, world: World) -> Iterator[Finding]:
    if place.is_memory_fine:
        return
    at = Path(answer.at)
    try:
        mount = world.mounts(at)
    except OSError:
        yield _FIND.note(f"{place.role}: nobody knows what {at} is mounted on")
        return
    lost = "the run cannot go on" if place.role in ("recipe", "run directory") else "it is needed"
    if mount.kind in _MEMORY:
        heavy = place.role == "target.path"
        yield _FIND.warning(
            f"{place.role}: {place.path} lies in memory ({mount.kind} at {mount.point})",
            f"it is gone after the next boot, and {lost}"
            + ("; until then it takes memory that workers and staging could use" if heavy else ""),
            _move(place),
        )
    elif "overlay" in mount.kind and mount.point == Path("/"):
        yield _FIND.warning(
            f"{place.role}: {place.path} lies in the container's own layer ({mount.kind} at /)",
            f"it is gone with the container, and {lost}",
            f"mount a folder of the machine into the container and {_move(place)}",
        )
    elif _is_temporary(at):
        yield _FIND.warning(
            f"{place.role}: {place.path} lies in a temporary folder",
            f"such folders are emptied at boot or by age, and {lost}",
            _move(place),
        )


def _is_temporary(path: Path) -> bool:
    folders = {*map(Path, _TEMPORARY), Path(tempfile.gettempdir())}
    return any(path.is_relative_to(folder) for folder in folders)


def _move(place: Place) -> str:
    if place.role == "run directory":
        return f"give another run directory: --run {_LASTING}/{place.path.name}"
    if place.role == "extract.store":
        return f"--set extract.store={_LASTING}"
    command = command_line("cp", "-a", place.path, f"{_LASTING}/")
    return command if place.role == "recipe" else f"{command} and name it in the recipe"


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
