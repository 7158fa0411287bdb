"""The run of recipes/tiny.yaml: its toy target, its data, and the recipe itself."""

import json
from pathlib import Path
from typing import Any

import yaml

from checkout import ROOT
from tiny_models import tiny_model

RECIPE = ROOT / "recipes" / "tiny.yaml"


def tiny_project(root: Path) -> Path:
    """Write `target/`, the data and `recipe.yaml` into `root`; return the recipe."""
    tiny_model("llama", root / "target", hidden=16)
    for name, count in (("train", 16), ("held", 3)):
        rows = [{"messages": [{"role": "user", "content": f"{name} {n}"}]} for n in range(count)]
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = root / "recipe.yaml"
    path.write_text(json.dumps(_moved(yaml.safe_load(RECIPE.read_text()), root)))
    return path


def _moved(value: Any, root: Path) -> Any:
    """The recipe with the folder `tiny/` being `root`."""
    if isinstance(value, dict):
        return {key: _moved(item, root) for key, item in value.items()}
    if isinstance(value, list):
        return [_moved(item, root) for item in value]
    if isinstance(value, str) and value.startswith("tiny/"):
        return str(root / value.removeprefix("tiny/"))
    return value
