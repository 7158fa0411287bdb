"""What a training has left behind, for tests: its events, weights and state; and stops in it."""

import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.recipe.run_dir import RunDir
from paceline.train import loop
from paceline.train.checkpoint import FILES, newest_checkpoint, read_state
from paceline.train.source import SampleOrder

CURVE = (
    "step", "samples", "loss", "count", "learning_rate", "gradient_norm", "samples_digest",
)  # fmt: skip


def events(run_dir: RunDir, kind: str) -> list[dict]:
    lines = (run_dir.events / "train.jsonl").read_text().splitlines()
    return [e for e in map(json.loads, lines) if e["kind"] == kind]


def step_events(run_dir: RunDir) -> list[dict]:
    """The last event of each step, in order: a step that was lost was done again."""
    found = {e["step"]: e for kind in ("step", "skipped_step") for e in events(run_dir, kind)}
    return [{k: found[step].get(k) for k in CURVE} for step in sorted(found)]


def newest(run_dir: RunDir) -> Path:
    folder, _ = newest_checkpoint(run_dir.checkpoints)
    assert folder is not None
    return folder


def last_weights(run_dir: RunDir) -> dict[str, torch.Tensor]:
    return load_file(newest(run_dir) / "model.safetensors")


def assert_same_end(one: RunDir, other: RunDir) -> None:
    """The last checkpoints agree bit for bit: weights, optimizer, generators, state."""
    folders = [newest(one), newest(other)]
    assert folders[0].name == folders[1].name
    for name in FILES:
        if name != "state.json":
            assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name
    states = [read_state(folder) for folder in folders]
    for name in ("samples", "tokens", "labels", "skipped_steps", "first_tau", "tau"):
        assert getattr(states[0], name) == getattr(states[1], name), name


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int) -> Callable[[], None]:
    """Have SIGTERM come at the end of a step; returns what takes that back."""
    original = loop.Trainer._advance

    def stopping(self, *arguments):
        original(self, *arguments)
        if self.state.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(loop.Trainer, "_advance", stopping)
    return lambda: monkeypatch.setattr(loop.Trainer, "_advance", original)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def schedule(
    indices: Sequence[int], digest: str, *, seed: int, first: int, end: int, **windowed: Any
) -> list[int]:
    """The samples at positions first..end-1."""
    order = SampleOrder(indices, digest, seed=seed, **windowed)
    return [order(position) for position in range(first, end)]
