"""What `extract.codec: int8o` costs in τ: the demo trained on coded hidden states and on whole.

Each is trained with two seeds on the same answers, since two trainings that differ in nothing but
the order of their samples differ in τ as well: by how much is printed beside the loss. Begins with
the run of `make demo`, and takes what is there of the others.
"""

import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

DEMO, RECIPE = Path("runs/demo"), Path("recipes/demo.yaml")
TARGET = 0.005
METHODS = ("chain", "ddtree-16", "ddtree-32", "ddtree-64")
SEEDS = (0, 1)

Taus = dict[str, float]


def measure(demo: Path = DEMO, recipe: Path = RECIPE) -> dict[str, Any]:
    """The relative loss of τ, the mean over the chain and three budgets and over both seeds."""
    if _taus(demo) is None:
        return _line(None, "run make demo first")
    found: dict[str, list[Taus]] = {"none": [], "int8o": []}
    for codec, taus in found.items():
        first = _run(demo, codec, SEEDS[0])
        for seed in SEEDS:
            run = _run(demo, codec, seed)
            made = _taus(run) or _trained(run, first if seed else demo, recipe, codec, seed)
            if made is None:
                return _line(None, f"{run} has no score; run the bench again")
            taus.append(made)
    losses = {m: 1 - _mean(found["int8o"], m) / _mean(found["none"], m) for m in METHODS}
    apart = statistics.mean(
        abs(taus[0][m] / taus[1][m] - 1) for taus in found.values() for m in METHODS
    )
    told = ", ".join(
        f"{m} {_mean(found['none'], m):.3f} -> {_mean(found['int8o'], m):.3f}" for m in METHODS
    )
    return _line(
        statistics.mean(losses.values()),
        f"pooled τ of `none` -> `int8o`, means of {len(SEEDS)} seeds: {told}; the τ of one codec "
        f"differs between seeds by {apart:.3f} on average",
    )


def _run(demo: Path, codec: str, seed: int) -> Path:
    coded = "" if codec == "none" else f"-{codec}"
    return demo.with_name(f"{demo.name}{coded}{f'-seed{seed}' if seed else ''}")


def _trained(run: Path, source: Path, recipe: Path, codec: str, seed: int) -> Taus | None:
    """The τ of a run over the corpus of `source`, and over its features where they are the same."""
    if not run.exists():
        run.mkdir(parents=True)
        shutil.copytree(source / "corpus", run / "corpus")
        if seed:
            shutil.copytree(source / "features", run / "features")
    command = [sys.executable, "-m", "paceline", "run", str(recipe), "--run", str(run)]
    changes = ["--set", f"extract.codec={codec}", "--set", f"train.seed={seed}"]
    subprocess.run([*command, *changes], stdout=sys.stderr, check=False)
    return _taus(run)


def _taus(run: Path) -> Taus | None:
    result = run / "score" / "result.json"
    if not result.is_file():
        return None
    pooled = json.loads(result.read_text())["pooled"]
    return {method: float(pooled[method]["tau"]) for method in METHODS}


def _mean(taus: list[Taus], method: str) -> float:
    return statistics.mean(found[method] for found in taus)


def _line(loss: float | None, how: str) -> dict[str, Any]:
    return {
        "name": "codec_tau",
        "value": None if loss is None else round(loss, 5),
        "unit": "share of τ lost",
        "target": TARGET,
        "ok": loss is not None and loss <= TARGET,
        "how": how,
    }


if __name__ == "__main__":
    print(json.dumps(measure(), ensure_ascii=False, indent=1))
