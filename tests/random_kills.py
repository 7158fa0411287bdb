"""Runs that are killed at random moments and gone on with: do they end like an undisturbed one?"""

import random
import shutil
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from paceline.pipeline import STAGES
from paceline.recipe.run_dir import RunDir
from paceline.recipe.stage import read_record
from run_server import RunServer, differences, ended, wait_until

NAMES = [name for name, _ in STAGES]


@dataclass(frozen=True)
class Undisturbed:
    """What a killed run has to end like, and how long it took."""

    run: RunDir
    seconds: dict[str, float]
    """By stage; the first includes what comes before it."""


@dataclass
class Outcome:
    """What the kills did."""

    kills: Counter[str] = field(default_factory=Counter)
    """By the stage that they hit, second ones not included."""
    twice: int = 0
    """Runs that were killed once more after they had been resumed."""
    redrawn: int = 0
    """Moments that turned out to lie behind the end of the run."""
    differences: list[str] = field(default_factory=list)


def undisturbed(server: RunServer, recipe: Path, run: RunDir) -> Undisturbed:
    """Run to the end, and time the stages."""
    server.run("--version")  # The server answers once its imports are behind it.
    started = time.time()
    assert server.run("run", str(recipe), "--run", str(run.root)) == 0, server.log.read_text()
    ends = [_record_file(run, name).stat().st_mtime for name in NAMES]
    spans = (end - begin for begin, end in pairwise([started, *ends]))
    return Undisturbed(run, dict(zip(NAMES, spans, strict=True)))


def random_kills(
    server: RunServer,
    recipe: Path,
    wanted: Undisturbed,
    folder: Path,
    *,
    count: int,
    twice: int,
    rng: random.Random,
) -> Outcome:
    """Kill `count` runs, `twice` of them a second time, go on with each, and compare.

    Half of the moments are uniform over the duration of a run; half are uniform within a stage,
    the stages in turn, since one that is short is else hardly ever hit.
    """
    outcome = Outcome()
    total = sum(wanted.seconds.values())
    for number in range(count):
        run = RunDir(folder / f"run-{number}")
        stage = NAMES[number // 2 % len(NAMES)] if number % 2 else None
        while True:
            pid = server.start("run", str(recipe), "--run", str(run.root))
            if stage is None:
                _sleep(rng.uniform(0.0, total), pid)
            else:
                _wait_for(stage, run, pid)
                _sleep(rng.uniform(0.0, wanted.seconds[stage]), pid)
            if server.kill(pid) and _stage_of(run) is not None:
                break
            outcome.redrawn += 1
            shutil.rmtree(run.root)
        hit = _stage_of(run)
        assert hit is not None
        outcome.kills[hit] += 1
        if outcome.twice < twice:
            left = sum(wanted.seconds[name] for name in NAMES[NAMES.index(hit) :])
            pid = server.start("run", str(recipe), "--run", str(run.root))
            _sleep(rng.uniform(0.0, left), pid)
            outcome.twice += server.kill(pid)
        code = server.run("run", str(recipe), "--run", str(run.root))
        tail = " / ".join(server.log.read_text().splitlines()[-4:])
        found = [f"exit code {code}: {tail}"] if code else differences(run, wanted.run)
        outcome.differences += [f"run {number}, killed in {hit}: {name}" for name in found]
        if not found:
            shutil.rmtree(run.root)
    return outcome


def _sleep(seconds: float, pid: int) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not ended(pid):
        time.sleep(min(0.01, max(0.0, end - time.monotonic())))


def _wait_for(stage: str, run: RunDir, pid: int) -> None:
    before = NAMES.index(stage) - 1
    if before >= 0:
        wait_until(lambda: _is_done(run, NAMES[before]), pid, f"{NAMES[before]} was done")


def _stage_of(run: RunDir) -> str | None:
    """The first stage that is not done."""
    return next((name for name in NAMES if not _is_done(run, name)), None)


def _is_done(run: RunDir, stage: str) -> bool:
    record = read_record(_record_file(run, stage).parent, stage)
    return record is not None and record.outputs is not None


def _record_file(run: RunDir, stage: str) -> Path:
    folders = {
        "prepare": run.corpus,
        "regenerate": run.corpus,
        "extract": run.features,
        "train": run.checkpoints,
        "score": run.score,
    }
    return folders[stage] / f"{stage}.stage.json"
