"""What `extract.codec: int8o` costs in τ: the demo once more, trained on coded hidden states."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

DEMO, CODED = Path("runs/demo"), Path("runs/demo-int8o")
RECIPE = Path("recipes/demo.yaml")
TARGET = 0.005
METHODS = ("chain", "ddtree-16", "ddtree-32", "ddtree-64")


def measure(demo: Path = DEMO, coded: Path = CODED, recipe: Path = RECIPE) -> dict[str, Any]:
    """The largest relative loss of τ over the chain and three budgets; a gain is no loss."""
    whole = _taus(demo)
    if whole is None:
        return _line(None, "run make demo first")
    if not coded.exists():
        # The same answers: all that differs is what the drafter saw of the target.
        (coded / "corpus").parent.mkdir(parents=True)
        shutil.copytree(demo / "corpus", coded / "corpus")
    command = [
        *(sys.executable, "-m", "paceline", "run", str(recipe), "--run", str(coded)),
        *("--set", "extract.codec=int8o"),
    ]
    ended = subprocess.run(command, stdout=sys.stderr, check=False)
    found = _taus(coded)
    if found is None:
        return _line(None, f"{coded} has no score; its command ended with {ended.returncode}")
    losses = {method: 1 - found[method] / whole[method] for method in METHODS}
    worst = max(losses, key=lambda method: losses[method])
    told = ", ".join(f"{m} {whole[m]:.4f} -> {found[m]:.4f}" for m in METHODS)
    return _line(losses[worst], f"pooled τ of {demo} and {coded}: {told}")


def _taus(run: Path) -> dict[str, float] | None:
    result = run / "score" / "result.json"
    if not result.is_file():
        return None
    pooled = json.loads(result.read_text())["pooled"]
    return {method: float(pooled[method]["tau"]) for method in METHODS}


def _line(loss: float | None, how: str) -> dict[str, Any]:
    return {
        "name": "codec_tau",
        "value": None if loss is None else round(loss, 5),
        "unit": "share of τ lost, worst method",
        "target": TARGET,
        "ok": loss is not None and loss <= TARGET,
        "how": how,
    }


if __name__ == "__main__":
    print(json.dumps(measure(), ensure_ascii=False, indent=1))
