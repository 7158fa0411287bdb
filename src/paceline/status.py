"""How a run stands, from its files alone: while it is at work, and after it has died.

Nothing is written, and nothing heavy is read: records, the ends of the event files, and the state
files of checkpoints. That outputs hold what was written, only the stages check, which read them.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from paceline.durable.errors import RecipeError, UserError
from paceline.durable.owner import LOCK, Owner, holder, read_owner
from paceline.recipe.load import load_recipe
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe
from paceline.recipe.write import is_run
from paceline.stage_folders import Kept, folder_of, look_at_folders
from paceline.stage_status import STAGES, StageStatus, stage_status, started_anew
from paceline.watch.words import command_line, counted

RunState = Literal[
    "running",
    "finished",
    "failed",
    "refused",
    "interrupted",
    "died",
    "damaged",
    "part done",
    "partial",
    "empty",
]
"""`part done`: this machine's part of the extraction is done, and other machines do the rest.
`partial`: some stages are finished, nothing went wrong, and nobody works on the others; an
outdated score is one of those. `empty`: no stage has begun."""

SCHEMA_VERSION = 1
"""Of RunStatus as JSON; keys are added without a new one, never renamed or removed."""

_FOLDER_SECONDS = 3.0
"""In which the stages' folders, which may be links to other mounts, have to answer."""

_BAD = ("damaged", "failed", "refused", "died", "interrupted")
"""Worst first."""


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """A run at one moment. As JSON it has these keys."""

    schema_version: int
    root: str
    """The run directory, as it was given."""
    name: str | None
    """Of the recipe; None where it cannot be read."""
    state: RunState
    now: float
    """When this was found out, in seconds since the epoch, as every time here."""
    owner: Owner | None
    """The process at work here; None where none is, or it could not say who it is."""
    died: Owner | None
    """The last process at work here, where it ended without letting go."""
    stages: tuple[StageStatus, ...]
    """All five, in order."""
    notes: tuple[str, ...]
    """What could not be read."""
    next: str
    """The one thing to do."""
    command: str
    """What goes on with the run, a stage at work or not; empty where nothing is left to do."""

    @property
    def part(self) -> str:
        """Of an unfinished extraction, what this machine does, such as `1/4`; empty: all of it."""
        return _part(self.stages)


def run_status(run_dir: Path) -> RunStatus:
    """Look at a run directory, whoever works there; takes no lock that keeps an owner out.

    Raises UserError where the folder is no run directory. Whatever is missing, torn, damaged or
    unreadable in one is told, and never an error.
    """
    paths = RunDir(run_dir)
    _require_run(paths)
    now = time.time()
    is_held, owner, died = _owner(run_dir)
    recipe, notes = _recipe(paths)
    folders = look_at_folders(STAGES, paths, seconds=_FOLDER_SECONDS)
    stages = tuple(
        stage_status(name, paths, recipe, folders, owner=owner, is_held=is_held, now=now)
        for name in STAGES
    )
    stages = _without_the_past(stages, folders)
    if is_held:
        stages = _with_current(stages, owner)
    state = _run_state(stages, is_held=is_held, died=died)
    if state == "finished":
        died = None
    if died is not None and all(stage.state != "died" for stage in stages):
        since = started_anew(died.host, max([died.since, *(s.heard or 0.0 for s in stages)]))
        notes = (
            *notes,
            f"`{died.doing}`, process {died.pid} on {died.host}, ended without a word.{since}",
        )
    command = "" if state == "finished" else _command(paths, _part(stages))
    return RunStatus(
        schema_version=SCHEMA_VERSION,
        root=str(run_dir),
        name=None if recipe is None else recipe.name,
        state=state,
        now=now,
        owner=owner,
        died=died,
        stages=stages,
        notes=notes,
        next=_next(state, paths, command),
        command=command,
    )


def _require_run(paths: RunDir) -> None:
    root = paths.root
    if not root.is_dir():
        raise UserError(f"{root}: no such folder. Give the run directory, such as runs/demo.")
    # Folders that may be other mounts come last: where anything before them is, none is looked at.
    marks = [root / LOCK, *(paths.events / f"{name}.jsonl" for name in STAGES)]
    marks += [folder_of(name, paths) / f"{name}.stage.json" for name in STAGES]
    if not is_run(root) and not any(mark.exists() for mark in marks):
        raise UserError(
            f"{root}: not a run directory: no recipe of a run, no records, no events. Give the "
            "folder that `paceline run` named with `--run`, such as runs/demo."
        )


def _owner(root: Path) -> tuple[bool, Owner | None, Owner | None]:
    """Whether the folder is held, by whom, and who held it when it died."""
    while True:
        before = read_owner(root)
        try:
            owner = holder(root)
        except UserError:
            return True, None, None
        except OSError:
            return False, None, before
        if owner is not None:
            return True, owner, None
        # An owner that came in this very moment must not be taken for a dead one.
        if read_owner(root) == before:
            return False, None, before


def _recipe(paths: RunDir) -> tuple[Recipe | None, tuple[str, ...]]:
    try:
        return load_recipe(paths.recipe), ()
    except RecipeError as error:
        lines = str(error).splitlines()
        more = f" ({counted(len(lines) - 1, 'more problem')})" if len(lines) > 1 else ""
        return None, (f"{lines[0]}{more}",) if paths.recipe.exists() else ()


def _without_the_past(
    stages: tuple[StageStatus, ...], folders: Mapping[str, Kept]
) -> tuple[StageStatus, ...]:
    """Tell as past what a stage failed over or was refused for before an earlier one was finished.

    What it lacked may be there now.
    """
    found: list[StageStatus] = []
    ended, name = 0.0, ""
    for stage in stages:
        if stage.state in ("failed", "refused") and (stage.heard or ended) < ended:
            how = "failed" if stage.state == "failed" else "was refused"
            note = f"The last attempt at it {how}, before {name} was finished: {stage.detail}"
            has_begun = folders[stage.name].record is not None
            state = "interrupted" if has_begun else "pending"
            found.append(replace(stage, state=state, detail="", notes=(*stage.notes, note)))
        else:
            found.append(stage)
        if stage.ended is not None and stage.ended > ended:
            ended, name = stage.ended, stage.name
    return tuple(found)


def _with_current(stages: tuple[StageStatus, ...], owner: Owner | None) -> tuple[StageStatus, ...]:
    """Name a stage as running where its process has not told anything of it yet."""
    if any(stage.state == "running" for stage in stages):
        return stages
    doing = [] if owner is None else owner.doing.split()[-1:]
    asked = [s.name for s in stages if s.name in doing]
    open_ones = [s.name for s in stages if s.state not in ("finished", "off")]
    current = next(iter((*asked, *open_ones)), None)
    return tuple(
        replace(s, state="running", detail="No word of it yet: it loads, or checks what is there.")
        if s.name == current
        else s
        for s in stages
    )


def _run_state(stages: tuple[StageStatus, ...], *, is_held: bool, died: Owner | None) -> RunState:
    if is_held:
        return "running"
    states = {stage.state for stage in stages}
    for state in _BAD:
        if state in states:
            return state
    if states <= {"finished", "off"}:
        return "finished"
    if died is not None:
        return "died"
    if "part done" in states:
        return "part done"
    return "partial" if "finished" in states else "empty"


def _part(stages: tuple[StageStatus, ...]) -> str:
    """The part of an unfinished extraction that this machine does, if others do the rest."""
    found = next((s for s in stages if s.name == "extract"), None)
    if found is None or found.extraction is None or found.state == "finished":
        return ""
    return found.extraction.part


def _command(paths: RunDir, part: str) -> str:
    recipe = () if paths.recipe.is_file() else ("recipe.yaml",)
    words = ("extract", *recipe, "--shard", part) if part else ("run", *recipe)
    return command_line("paceline", *words, "--run", paths.root)


def _next(state: RunState, paths: RunDir, command: str) -> str:
    command = f"`{command}`"
    match state:
        case "running":
            again = command_line("paceline", "status", paths.root)
            return f"It is at work: `{again}` again shows how it goes on."
        case "finished":
            return (
                f"Nothing is left to do. The results are in {paths.score / 'result.json'}, on one "
                f"page in {paths.report}."
            )
        case "failed":
            return f"Mend what the error names, then {command}: it goes on from what is complete."
        case "refused":
            return f"Do what the refusal says, then {command}."
        case "damaged":
            return f"Do what is said about the damage, then {command}: what is whole is kept."
        case "empty":
            return f"{command} begins."
        case "part done":
            return (
                f"{command} takes the whole over once the other machines are done, and "
                f"`{_command(paths, '')}` then goes on with the training."
            )
        case _:
            return f"{command} goes on from what is complete."
