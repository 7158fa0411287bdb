"""Runs in processes of their own that cost no import, and what a run has made, to compare."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import paceline
from paceline.recipe.run_dir import RunDir

_SERVER = """
import importlib, json, os, sys
from paceline.cli.main import main
from paceline.pipeline import STAGES
from transformers import AutoModelForCausalLM, AutoTokenizer
for _, module in STAGES:
    importlib.import_module(module)
for line in sys.stdin:
    request = json.loads(line)
    if "wait" in request:
        answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
    elif not (answer := os.fork()):
        os.setpgid(0, 0)
        for stream in (1, 2):
            os.dup2(os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        os._exit(main(request["start"]))
    print(answer, flush=True)
"""


class RunServer:
    """A process with all imports behind it, which forks command lines."""

    def __init__(self, log: Path) -> None:
        """`log` gets what all of them print."""
        self.log = log
        self._server = subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "PYTHONPATH": str(Path(paceline.__file__).parents[1]),
                "OMP_NUM_THREADS": "1",
            },
            text=True,
        )

    def start(self, *arguments: str) -> int:
        """Start a command line, leader of a process group of its own; its process id."""
        return self._ask(start=arguments, log=str(self.log))

    def wait(self, pid: int) -> int:
        """Wait for a command line to end; its exit code, negative for a signal."""
        return self._ask(wait=pid)

    def run(self, *arguments: str) -> int:
        """Start and wait."""
        return self.wait(self.start(*arguments))

    def kill(self, pid: int) -> bool:
        """Kill a command line; False where it had ended before."""
        os.kill(pid, signal.SIGKILL)
        return self.wait(pid) == -signal.SIGKILL

    def _ask(self, **request: Any) -> int:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.communicate()


def ended(pid: int) -> bool:
    """Whether a process has ended, waited for or not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def wait_until(condition: Callable[[], bool], pid: int, what: str) -> None:
    """Wait until `condition()`; AssertionError where process `pid` ends before."""
    while not condition():
        assert not ended(pid), f"it ended before {what}"
        time.sleep(0.002)


def wait_for_event(run: RunDir, stage: str, kind: str, pid: int, *, after: int = 0) -> None:
    """Wait until the events of `stage` have `kind` behind the first `after` bytes."""
    path = run.events / f"{stage}.jsonl"
    wanted = f'"kind":"{kind}"'.encode()
    wait_until(
        lambda: path.is_file() and wanted in path.read_bytes()[after:], pid, f"{stage} told {kind}"
    )


def artefacts(run: RunDir) -> dict[str, Any]:
    """Everything that a run makes, without times and the order in which units were done."""
    found: dict[str, Any] = {}
    for path in sorted(run.root.rglob("*")):
        name = path.relative_to(run.root).as_posix()
        if not path.is_file() or name.startswith("events/") or "journal" in name:
            continue
        # The report tells of what was stopped, and when.
        if name.endswith((".stage.json", "checksums.json", "report.html")):
            continue
        data = path.read_bytes()
        found[name] = _timeless(json.loads(data)) if path.suffix == ".json" else data
    return found


def losses(run: RunDir) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm of each training step; of a step done twice, the last."""
    found = {}
    for line in (run.events / "train.jsonl").read_bytes().splitlines():
        # A kill may tear a line; the step is then done again.
        event = json.loads(line) if line.endswith(b"}") else {}
        if event.get("kind") == "step":
            found[event["step"]] = (event["loss"], event["gradient_norm"])
    return found


def differences(run: RunDir, undisturbed: RunDir) -> list[str]:
    """Files and steps that are not as in an undisturbed run, by name."""
    differ: list[str] = []
    for kind, wanted, found in (
        ("", artefacts(undisturbed), artefacts(run)),
        ("loss of step ", losses(undisturbed), losses(run)),
    ):
        keys = sorted(wanted.keys() | found.keys())
        differ += [f"{kind}{key}" for key in keys if not _equal(wanted, found, key)]
    return differ


def _equal(wanted: dict[Any, Any], found: dict[Any, Any], key: Any) -> bool:
    return key in wanted and key in found and found[key] == wanted[key]


def _timeless(value: Any) -> Any:
    """Without durations, and without what was running: source files may change under a test."""
    if isinstance(value, dict):
        kept = {
            k: v for k, v in value.items() if "seconds" not in k and k not in ("cost", "software")
        }
        if "checkpoint" in kept and "number" in kept:
            # An evaluation names the checksums of its checkpoint, whose state holds durations.
            kept = {"tau": kept["tau"], "number": kept["number"]}
        return {key: _timeless(item) for key, item in kept.items()}
    return [_timeless(item) for item in value] if isinstance(value, list) else value
