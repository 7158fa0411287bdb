"""Everything the report shows of a run, read from the files of its directory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from paceline.durable.errors import RecipeError, UserError
from paceline.durable.owner import Owner, holder, read_owner
from paceline.recipe.load import load_recipe
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe
from paceline.recipe.stage import Record, read_record
from paceline.report.events import Events, StageTime, Training, read_events
from paceline.report.quarantine import Reason, read_reasons
from paceline.report.result import Result, read_result

State = Literal["done", "not ended", "not begun", "off"]

STAGES = ("prepare", "regenerate", "extract", "train", "score")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of the run."""

    name: str
    state: State
    record: Record | None
    time: StageTime | None

    @property
    def numbers(self) -> dict[str, Any]:
        """Of its record; empty until it has ended."""
        return self.record.report if self.record and self.state == "done" else {}


@dataclass(frozen=True, kw_only=True)
class RunView:
    """A run as it stands."""

    run_dir: RunDir
    name: str
    recipe: Recipe | None
    """None where the file cannot be understood; `recipe_text` shows it all the same."""
    recipe_text: str
    stages: dict[str, Stage]
    """In order."""
    is_running: bool
    owner: Owner | None
    """Who is at work, or was when it died; None where nobody is, or the file does not say."""
    events: Events
    result: Result | None
    reasons: tuple[Reason, ...]
    drafter: dict[str, Any]
    """config.json of the chosen checkpoint; empty where none is chosen yet."""
    notes: tuple[str, ...]
    """Sentences on what could not be read."""

    @property
    def training(self) -> Training:
        """The curves."""
        return self.events.training

    @property
    def unfinished(self) -> Stage | None:
        """The first stage that has not ended, of those that the recipe asks for."""
        return next((s for s in self.stages.values() if s.state not in ("done", "off")), None)

    @property
    def samples(self) -> Path:
        """The corpus file that holds the prompts."""
        if self.recipe is not None:
            return self.run_dir.samples(self.recipe)
        regenerated = self.run_dir.regenerated
        return regenerated if regenerated.is_file() else self.run_dir.prepared


def collect(run_dir: RunDir) -> RunView:
    """Read a run, whatever state it is in.

    Raises UserError where there is no run, IntegrityError where a record or the result is not as
    it was written.
    """
    if not run_dir.recipe.is_file():
        raise UserError(
            f"{run_dir.root}: no run lies here (it has no recipe.yaml). `paceline run` makes one; "
            "give the folder that its first line names."
        )
    notes = []
    recipe = None
    try:
        recipe = load_recipe(run_dir.recipe)
    except RecipeError as error:
        notes.append(f"The recipe cannot be understood: {error}")
    events = read_events(run_dir.events, STAGES)
    stages = {name: _stage(name, run_dir, recipe, events) for name in STAGES}
    is_running, owner = _owner(run_dir.root)
    reasons = []
    for name, file in (
        ("prepare", "quarantine.jsonl"),
        ("regenerate", "regenerate-quarantine.jsonl"),
    ):
        found, unreadable = read_reasons(
            run_dir.corpus / file, name, _counts(stages[name].numbers.get("reasons"))
        )
        reasons += found
        if unreadable:
            notes.append(f"corpus/{file}: {unreadable} lines cannot be read.")
    notes += [
        f"events/{name}: {count} lines cannot be read; the curves lack them."
        for name, count in events.unreadable.items()
    ]
    return RunView(
        run_dir=run_dir,
        name=recipe.name if recipe else run_dir.root.resolve().name,
        recipe=recipe,
        recipe_text=run_dir.recipe.read_text(encoding="utf-8", errors="backslashreplace"),
        stages=stages,
        is_running=is_running,
        owner=owner,
        events=events,
        result=read_result(run_dir.score, stages["score"].record),
        reasons=tuple(reasons),
        drafter=_drafter(run_dir, stages["train"].numbers),
        notes=tuple(notes),
    )


def inputs(run_dir: RunDir) -> list[Path]:
    """The files that the report is made from, as far as they are there."""
    folders = (run_dir.corpus, run_dir.features, run_dir.checkpoints, run_dir.score)
    files = [
        run_dir.recipe,
        run_dir.score / "result.json",
        *run_dir.events.glob("*.jsonl"),
        *run_dir.corpus.glob("*.jsonl"),
        *(path for folder in folders for path in folder.glob("*.stage.json")),
    ]
    return [path for path in files if path.is_file()]


def _owner(folder: Path) -> tuple[bool, Owner | None]:
    """Whether the folder is held, and by whom it is, or was when that one died."""
    left = read_owner(folder)
    try:
        owner = holder(folder)
    except UserError:
        return True, None
    except OSError:
        return False, left
    return owner is not None, owner or left


def _stage(name: str, run_dir: RunDir, recipe: Recipe | None, events: Events) -> Stage:
    folders = {
        "extract": run_dir.features,
        "train": run_dir.checkpoints,
        "score": run_dir.score,
    }
    record = read_record(folders.get(name, run_dir.corpus), name)
    if record is not None and record.outputs is not None:
        state: State = "done"
    elif name == "regenerate" and recipe is not None and not recipe.regenerate.enabled:
        state = "off"
    else:
        state = "not begun" if record is None else "not ended"
    return Stage(name=name, state=state, record=record, time=events.times.get(name))


def _drafter(run_dir: RunDir, numbers: dict[str, Any]) -> dict[str, Any]:
    path = run_dir.checkpoints / str(numbers.get("best")) / "config.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError, UnicodeError):
        return {}  # Removed or damaged since: what else the run holds is shown without it.


def _counts(value: Any) -> dict[str, int] | None:
    return value if isinstance(value, dict) else None
