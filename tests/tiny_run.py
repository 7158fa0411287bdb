"""A whole run in small: a tiny target, data, and a recipe of a second's work."""

import json
from pathlib import Path

from tiny_models import tiny_model


def tiny_project(root: Path) -> Path:
    """Write `target/`, the data and `recipe.yaml` into `root`; return the recipe."""
    tiny_model("llama", root / "target", hidden=16)
    for name, count in (("train", 16), ("held", 3)):
        rows = [{"messages": [{"role": "user", "content": f"{name} {n}"}]} for n in range(count)]
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "target": {"path": str(root / "target")},
        "corpus": {
            "sources": [
                {"path": str(root / "train.jsonl")},
                {"path": str(root / "held.jsonl"), "split": "heldout"},
            ],
            "max_length": 64,
            "validation_fraction": 0.2,
        },
        "regenerate": {"max_new_tokens": 8, "on_loop": "keep", "group_size": 4},
        "extract": {"batch_tokens": 256, "shard_bytes": 10000},
        "drafter": {"layers": 1, "block_size": 4},
        "train": {"epochs": 2, "threads": 1, "anchors": 4, "batch_samples": 4, "evaluations": 2},
        "score": {"max_new_tokens": 4, "budgets": [4], "walk_budgets": []},
    }
    path = root / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    return path
