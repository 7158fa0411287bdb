"""τ of a drafter that speculators trained, beside one of Paceline's, from the same features.

Long: it trains two drafters and decodes with both. It begins with the run of `make demo`, which it
only reads, and keeps what it makes in runs/peers-*: what is there is not made again.

Both have the demo's features, layers, block size and mask token, as many samples and anchors in a
step, and the same CPU time, on one thread:

- *Paceline* trains by the demo's recipe. What the command takes, from its start to its last
  checkpoint and with its evaluations, is the budget.
- *speculators* trains by its own defaults (training.py) until its steps have taken as much. Its
  start is not counted.

A training has noise: `seeds` asks for several, of which the mean counts.

Both are scored by `paceline score` on the demo's held-out prompts: the chain is decoded, the trees
are walked.
"""

import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from paceline.recipe.load import load_recipe
from paceline.recipe.run_dir import RunDir

from .training import trained_peer

WALKED = (16, 64)
METHODS = ("chain", *(f"ddtree-{budget}" for budget in WALKED))
TARGET = {"chain": 1.15}


@dataclass(frozen=True)
class _Outcome:
    """Of one seed."""

    ours: dict[str, float]
    """τ by method."""
    theirs: dict[str, float]
    seconds: float
    """CPU-seconds that either training had."""
    peer: dict[str, Any]
    """What the other training took."""


def measure(
    demo: str = "runs/demo",
    epochs: str | None = None,
    prompts: str | None = None,
    seeds: str = "0",
) -> dict[str, Any]:
    """The ratio of mean τ over the seeds, by method: Paceline's over that of speculators.

    Args:
        demo: a run whose features are made.
        epochs: instead of the recipe's; fewer of them are a smaller budget for both.
        prompts: of each held-out data set, instead of the recipe's.
        seeds: of both trainings, with commas between.

    """
    source = RunDir(Path(demo).resolve())
    if not (source.features / "manifest.json").is_file():
        return _line(None, "run make demo first")
    recipe = load_recipe(source.recipe, ())
    epochs = epochs or f"{recipe.train.epochs:g}"
    prompts = prompts or str(recipe.score.max_prompts or "null")
    changes = (
        f"train.epochs={epochs}",
        "train.threads=1",
        f"score.max_prompts={prompts}",
        "score.budgets=[]",
        f"score.walk_budgets={list(WALKED)}",
        "score.walk_check_prompts=0",
    )
    root = Path("runs") / f"peers-{epochs}-epochs-{prompts}-prompts"
    found = {
        seed: _outcome(source, root / f"seed-{seed}", (*changes, f"train.seed={seed}"))
        for seed in seeds.split(",")
    }
    told = [
        ", ".join(f"{m} {out.theirs[m]:.3f} -> {out.ours[m]:.3f}" for m in METHODS)
        + f" (seed {seed}: {out.seconds:.0f} CPU-seconds for each, {epochs} epochs of Paceline, "
        f"{out.peer['epochs']:.2f} of the other in {out.peer['steps']} steps, "
        f"last loss {out.peer['loss']:.3f})"
        for seed, out in found.items()
    ]
    peer = next(iter(found.values())).peer["peer"]
    return _line(
        {
            method: round(
                fmean(out.ours[method] for out in found.values())
                / fmean(out.theirs[method] for out in found.values()),
                4,
            )
            for method in METHODS
        },
        f"pooled τ of {peer} -> Paceline, {prompts} prompts of each data set: {'; '.join(told)}",
    )


def _outcome(source: RunDir, root: Path, changes: Sequence[str]) -> _Outcome:
    ours, theirs = (_run_dir(root / name, source) for name in ("paceline", "speculators"))
    seconds = _train(ours, source, changes)
    peer = trained_peer(load_recipe(source.recipe, changes), ours, theirs, seconds)
    return _Outcome(
        ours=_score(ours, source, changes),
        theirs=_score(theirs, source, changes),
        seconds=seconds,
        peer=peer,
    )


def _run_dir(root: Path, source: RunDir) -> RunDir:
    """A run over corpus and features of another, which no stage from here on writes to."""
    run = RunDir(root)
    root.mkdir(parents=True, exist_ok=True)
    for link, folder in ((run.corpus, source.corpus), (run.features, source.features)):
        if not link.is_symlink():
            link.symlink_to(folder)
    return run


def _train(run: RunDir, source: RunDir, changes: Sequence[str]) -> float:
    """CPU seconds that `paceline train` took in this run, now or before."""
    kept = run.root / "train_cpu_seconds.json"
    if not kept.is_file():
        # What an interrupted training took is known to nobody: it begins anew.
        shutil.rmtree(run.checkpoints, ignore_errors=True)
    before = _children_seconds()
    _paceline("train", run, source, changes)
    if not kept.is_file():
        kept.write_text(json.dumps(_children_seconds() - before))
    return json.loads(kept.read_text())


def _score(run: RunDir, source: RunDir, changes: Sequence[str]) -> dict[str, float]:
    _paceline("score", run, source, changes)
    pooled = json.loads((run.score / "result.json").read_text())["pooled"]
    return {method: float(pooled[method]["tau"]) for method in METHODS}


def _paceline(stage: str, run: RunDir, source: RunDir, changes: Sequence[str]) -> None:
    command = [sys.executable, "-m", "paceline", stage, str(source.recipe), "--run", str(run.root)]
    for change in changes:
        command += ["--set", change]
    subprocess.run(command, stdout=sys.stderr, check=True)


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _line(ratios: dict[str, float] | None, how: str) -> dict[str, Any]:
    return {
        "name": "peers_tau",
        "value": ratios,
        "unit": "of the τ of speculators",
        "target": TARGET,
        "ok": ratios is not None and all(ratios[m] >= least for m, least in TARGET.items()),
        "how": how,
    }
