"""The benchmark's small version: real signals, each training in a process of its own."""

import json
import subprocess
import sys

from checkout import ROOT

PROGRAM = """
import json, sys
from dataclasses import replace
sys.path.insert(0, sys.argv[1])
import resume_exact
{change}
print(json.dumps(resume_exact.measure(3)))
"""


def measure(change: str = "") -> dict:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(change=change), str(ROOT / "benchmarks")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_t_72_stops_by_signals_are_exact():
    measured = measure()
    assert measured["ok"], measured["how"]
    assert measured["value"] == measured["target"] == 3
    assert "2 stops by SIGTERM at a step's end and 1 by SIGKILL" in measured["how"]


def test_t_72_stops_with_noise_and_muon_are_exact():
    measured = measure(
        "made = resume_exact._recipe\n"
        "def other(target):\n"
        "    recipe = made(target)\n"
        "    train = replace(recipe.train, noise='normal', optimizer='muon', warmup_steps=5)\n"
        "    return replace(recipe, train=train)\n"
        "resume_exact._recipe = other"
    )
    assert measured["ok"], measured["how"]
    assert "1 by SIGKILL" in measured["how"]


def test_a_resume_that_forgets_the_optimizer_is_found_out():
    measured = measure(
        "from paceline.train import opening\nopening.restore_optimizer = lambda *_: None"
    )
    assert not measured["ok"]
    assert measured["value"] < 3
    assert "first difference: after _Stop(step=" in measured["how"]
