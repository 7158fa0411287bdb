"""τ of the drafter that `make demo` trained, read from its score: measured once, by decoding."""

import json
from pathlib import Path
from typing import Any

RESULT = Path("runs/demo/score/result.json")
TARGETS = {"chain": 1.20, "ddtree-32": 1.60}
UNIT = "tokens per target pass"


def measure(result: Path = RESULT) -> list[dict[str, Any]]:
    """A line for the chain, one for the tree of 32 nodes, and one that is ok where both are."""
    taus: dict[str, float | None] = dict.fromkeys(TARGETS)
    if result.is_file():
        pooled = json.loads(result.read_text())["pooled"]
        taus = {method: float(pooled[method]["tau"]) for method in TARGETS}
    lines = [
        {
            "name": f"demo_tau_{method.replace('-', '')}",
            "value": tau,
            "unit": UNIT,
            "target": TARGETS[method],
            "ok": tau is not None and tau >= TARGETS[method],
            "how": "run make demo first" if tau is None else f"pooled.{method}.tau in {result}",
        }
        for method, tau in taus.items()
    ]
    both = {
        "name": "demo_tau",
        "value": taus,
        "unit": UNIT,
        "target": TARGETS,
        "ok": all(line["ok"] for line in lines),
        "how": lines[0]["how"] if None in taus.values() else "both of the lines before",
    }
    return [*lines, both]
