"""How long `paceline status` takes beside a large run: `measure()`.

The run directory has the records of all five stages, and a training's event file of 200 MB.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import paceline
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import CorpusRecipe, Recipe, SourceRecipe, TargetRecipe
from paceline.recipe.stage import StageRecord
from paceline.recipe.write import write_recipe
from paceline.stage_folders import folder_of
from paceline.stage_status import STAGES
from paceline.watch.events import Counts, EventWriter

TARGET = 0.5
_TIMES = 7
_EVENT_BYTES = 200_000_000
_STEPS_PER_WRITE = 2000


def measure() -> dict[str, Any]:
    """Wall seconds of the whole command, from start to exit."""
    with tempfile.TemporaryDirectory() as name:
        run = RunDir(Path(name) / "run")
        _make_run(run)
        size = (run.events / "train.jsonl").stat().st_size
        times = [_time(run) for _ in range(_TIMES)]
    median = statistics.median(times)
    return {
        "name": "status_time",
        "value": round(median, 3),
        "unit": "s",
        "target": TARGET,
        "ok": median <= TARGET,
        "how": (
            f"median of {_TIMES} ({min(times):.2f} to {max(times):.2f}) of the wall time of "
            f"`python -m paceline status` in a process of its own, on a run with the records and "
            f"events of all five stages, those of the training {size / 1e6:.0f} MB"
        ),
    }


def _time(run: RunDir) -> float:
    source = str(Path(paceline.__file__).parents[1])
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "status", str(run.root)],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - started
    if done.returncode != 0 or "step 5," not in done.stdout:
        raise RuntimeError(f"exit code {done.returncode}: {done.stdout}{done.stderr}")
    return seconds


def _make_run(run: RunDir) -> None:
    sources = (SourceRecipe(path=str(run.root / "rows.jsonl")),)
    recipe = Recipe(
        target=TargetRecipe(path=str(run.root / "target")), corpus=CorpusRecipe(sources=sources)
    )
    write_recipe(recipe, run.recipe)
    for stage in STAGES:
        folder = folder_of(stage, run)
        record = StageRecord(folder, stage, {"made": "by the benchmark"})
        record.begin()
        output = folder / f"{stage}.out"
        output.write_text(stage)
        record.finish([output], {})
        with EventWriter(run.events, stage) as events:
            events.emit("start", Counts(unit="samples", total=9))
            if stage == "train":
                _train_events(events)
            events.emit("finished", Counts(unit="samples", total=9, done=9), report={})


def _train_events(events: EventWriter) -> None:
    """Steps until the file has its size; their lines are those that the writer writes."""
    before = events.path.stat().st_size
    numbers = {"learning_rate": 3e-4, "gradient_norm": 0.71, "samples": 80, "count": 1843.2}
    counts = Counts(unit="samples", total=9, done=5, tokens=40960, rate=812.4, eta=3.2)
    events.emit("step", counts, step=5, loss=2.7182818, **numbers)
    with events.path.open("rb") as file:
        file.seek(before)
        line = file.read()
    with events.path.open("ab") as file:
        while file.tell() < _EVENT_BYTES:
            file.write(line * _STEPS_PER_WRITE)


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
