"""Everything the report shows of a run, read from the files of its directory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from paceline.durable.errors import RecipeError, UserError
from paceline.durable.owner import Owner
from paceline.recipe.load import load_recipe
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe
from paceline.recipe.stage import Record, read_record
from paceline.report.events import Events, StageTime, Training, read_events
from paceline.report.quarantine import Reason, read_reasons
from paceline.report.result import Result, read_result
from paceline.stage_folders import folder_of
from paceline.stage_status import STAGES, StageState, StageStatus
from paceline.status import RunState, run_status
from paceline.watch.words import counted


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of the run."""

    name: str
    state: StageState
    detail: str
    """The error, the refusal, the damage, or how it died; empty where all is well."""
    record: Record | None
    time: StageTime | None

    @property
    def numbers(self) -> dict[str, Any]:
        """Of its record; empty until it has ended."""
        return self.record.report if self.record and self.record.outputs is not None else {}


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
    state: RunState
    part: str
    """Of an unfinished extraction, what this machine does; empty: all of it."""
    owner: Owner | None
    """Who is at work; None where nobody is, or the file does not say."""
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
        """The stage that has the run's state, else the first that is not finished."""
        open_ones = [s for s in self.stages.values() if s.state not in ("finished", "off")]
        named = [s for s in open_ones if s.state == self.state]
        return next(iter((*named, *open_ones)), None)

    @property
    def is_held_out(self) -> bool:
        """Whether the prompts that are scored come from held-out data; else from validation."""
        if self.recipe is not None and self.recipe.score.datasets:
            return True
        samples = self.stages["prepare"].numbers.get("samples")
        if isinstance(samples, dict) and "heldout" in samples:
            return bool(samples["heldout"])
        return self.recipe is None or any(s.split == "heldout" for s in self.recipe.corpus.sources)

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
    status = run_status(run_dir.root)
    stages = {stage.name: _stage(stage, run_dir, events) for stage in status.stages}
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
            notes.append(f"corpus/{file}: {counted(unreadable, 'line')} cannot be read.")
    notes += [
        f"events/{name}: {counted(count, 'line')} cannot be read; the curves lack what stood there."
        for name, count in events.unreadable.items()
    ]
    return RunView(
        run_dir=run_dir,
        name=recipe.name if recipe else run_dir.root.resolve().name,
        recipe=recipe,
        recipe_text=run_dir.recipe.read_text(encoding="utf-8", errors="backslashreplace"),
        stages=stages,
        state=status.state,
        part=status.part,
        owner=status.owner,
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


def _stage(status: StageStatus, run_dir: RunDir, events: Events) -> Stage:
    return Stage(
        name=status.name,
        state=status.state,
        detail=status.detail,
        record=read_record(folder_of(status.name, run_dir), status.name),
        time=events.times.get(status.name),
    )


def _drafter(run_dir: RunDir, numbers: dict[str, Any]) -> dict[str, Any]:
    path = run_dir.checkpoints / str(numbers.get("best")) / "config.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError, UnicodeError):
        return {}  # Removed or damaged since: what else the run holds is shown without it.


def _counts(value: Any) -> dict[str, int] | None:
    return value if isinstance(value, dict) else None
