"""Targets without weights, recipes and rooms for tests of `paceline plan`."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main
from paceline.durable.space import Space

GB = 10**9
LARGE: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}


def config_only(folder: Path, **changes: Any) -> Path:
    """A target of which there is the config alone, of 8 billion weights where nothing changes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LARGE | changes))
    return folder


def plan_recipe(root: Path, folder: Path, **sections: dict[str, Any]) -> Path:
    """Write a recipe whose run directory would be `root/run`; sections are merged in."""
    recipe: dict[str, Any] = {
        "name": "planned",
        "target": {"path": str(folder)},
        "corpus": {"sources": [{"path": str(root / "rows.jsonl")}]},
    }
    for name, values in sections.items():
        recipe[name] = {**recipe.get(name, {}), **values}
    path = root / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    return path


def give_room(
    monkeypatch: pytest.MonkeyPatch, *, used: int, free: int, memory: int = 10**17
) -> None:
    """Every file system has this room, and the machine so much free memory."""
    space = Space(used + free, used, free)
    monkeypatch.setattr("paceline.durable.space.read_space", lambda path: space)
    monkeypatch.setattr("paceline.durable.staging.read_space", lambda path: space)
    give_memory(monkeypatch, memory)


def give_memory(monkeypatch: pytest.MonkeyPatch, available: int) -> None:
    """The machine has so much free memory."""
    from paceline.doctor.plan_machine import HostMemory

    host = HostMemory(total=2 * available, available=available)
    monkeypatch.setattr("paceline.doctor.plan_machine._host", lambda: host)


def planned(
    capsys: pytest.CaptureFixture[str], recipe: Path, *arguments: str, code: int = 0
) -> dict[str, Any]:
    """What `paceline plan --json` says."""
    run = str(recipe.parent / "run")
    assert main(["plan", str(recipe), "--run", run, "--json", *arguments]) == code
    return json.loads(capsys.readouterr().out)


def verdict(plan: dict[str, Any], name: str) -> dict[str, Any]:
    """The verdict of this name."""
    return next(v for v in plan["verdicts"] if v["name"].startswith(name))
