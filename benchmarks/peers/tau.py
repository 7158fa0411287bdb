"""τ of a drafter that speculators trained, beside one of Paceline's, from the same features.

Long: it trains two drafters and decodes with both. It begins with the run of `make demo`, which it
only reads, and keeps what it makes in runs/peers-*: what is there is not made again.

Both have the demo's features, layers, block size and mask token, as many samples and anchors in a
step, and the same CPU time, on one thread:

- *Paceline* trains by the demo's recipe. What the command takes, from its start to its last
  checkpoint and with its evaluations, is the budget.
- *speculators* trains by its own defaults (training.py) until its steps have taken as much. Its
  start is not counted.

Both are scored by `paceline score` on the demo's held-out prompts: the chain is decoded, the trees
are walked.
"""

import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.recipe.load import load_recipe
from paceline.recipe.run_dir import RunDir

from .training import trained_peer

WALKED = (16, 64)
METHODS = ("chain", *(f"ddtree-{budget}" for budget in WALKED))
TARGET = {"chain": 1.15}


def measure(
    demo: str = "runs/demo", epochs: str | None = None, prompts: str | None = None
) -> dict[str, Any]:
    """The ratio of τ by method, Paceline's over that of speculators.

    Args:
        demo: a run whose features are made.
        epochs: instead of the recipe's; fewer of them are a smaller budget for both.
        prompts: of each held-out data set, instead of the recipe's.

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
    ours, theirs = (_run_dir(root / name, source) for name in ("paceline", "speculators"))
    seconds = _train(ours, source, changes)
    peer = trained_peer(load_recipe(source.recipe, changes), ours, theirs, seconds)
    taus = [_score(run, source, changes) for run in (theirs, ours)]
    told = ", ".join(f"{m} {taus[0][m]:.3f} -> {taus[1][m]:.3f}" for m in METHODS)
    return _line(
        {method: round(taus[1][method] / taus[0][method], 4) for method in METHODS},
        f"pooled τ of {peer['peer']} -> Paceline: {told}; {seconds:.0f} CPU-seconds for each: "
        f"{epochs} epochs of Paceline, {peer['epochs']:.2f} of the other ({peer['steps']} steps, "
        f"last loss {peer['loss']:.3f}); {prompts} prompts of each data set",
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
