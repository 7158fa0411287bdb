"""`paceline run` killed in every stage: started again, it ends like an undisturbed run."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.cli.main import main
from paceline.recipe.run_dir import RunDir
from tiny_run import tiny_project

MOMENTS = (
    ("prepare", "start"),
    ("regenerate", "progress"),
    ("extract", "progress"),
    ("train", "checkpoint"),
    ("score", "progress"),
)

SERVER = """
import json, os, signal, sys
from paceline.cli.main import main
from paceline.pipeline import STAGES
import importlib
from transformers import AutoModelForCausalLM, AutoTokenizer
for _, module in STAGES:
    importlib.import_module(module)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits: a killed child is gone at once
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os._exit(main(json.loads(line)))
    print(pid, flush=True)
"""


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> tuple[Path, RunDir]:
    root = tmp_path_factory.mktemp("straight")
    recipe = tiny_project(root)
    run = RunDir(root / "run")
    assert main(["run", str(recipe), "--run", str(run.root)]) == 0
    return recipe, run


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., int]]:
    """Start command lines in processes that have their imports behind them; gives their pids."""
    source = str(Path(paceline.__file__).parents[1])
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
        text=True,
    )

    def ask(*arguments: str) -> int:
        server.stdin.write(json.dumps(arguments) + "\n")
        server.stdin.flush()
        return int(server.stdout.readline())

    yield ask
    server.stdin.close()
    server.wait()
    server.stdout.close()


def kill_at(pid: int, run: RunDir, stage: str, kind: str) -> None:
    """Kill process `pid` as soon as the run tells of `kind`."""
    told = run.events / f"{stage}.jsonl"
    while not (told.is_file() and f'"kind":"{kind}"' in told.read_text()):
        assert Path(f"/proc/{pid}").exists(), f"it ended before {stage} told of {kind}"
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.002)


def artefacts(run: RunDir) -> dict[str, Any]:
    """Everything that a run makes, without times and the order in which units were done."""
    found: dict[str, Any] = {}
    for path in sorted(run.root.rglob("*")):
        name = path.relative_to(run.root).as_posix()
        if not path.is_file() or name.startswith("events/") or "journal" in name:
            continue
        if name.endswith((".stage.json", "checksums.json")):
            continue
        data = path.read_bytes()
        found[name] = _timeless(json.loads(data)) if path.suffix == ".json" else data
    return found


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if "seconds" not in k and k != "cost"}
        return {key: _timeless(item) for key, item in kept.items()}
    return [_timeless(item) for item in value] if isinstance(value, list) else value


def test_a_run_killed_in_every_stage_ends_like_an_undisturbed_one(straight, tmp_path, start):
    recipe, undisturbed = straight
    run = RunDir(tmp_path / "run")
    for stage, kind in MOMENTS:
        pid = start("run", str(recipe), "--run", str(run.root))
        kill_at(pid, run, stage, kind)
    assert main(["run", str(recipe), "--run", str(run.root)]) == 0
    wanted, found = artefacts(undisturbed), artefacts(run)
    assert found.keys() == wanted.keys(), "nothing is missing, and nothing half-written is left"
    assert [name for name in wanted if found[name] != wanted[name]] == []
    assert {"features/manifest.json", "score/result.json"} <= wanted.keys()
