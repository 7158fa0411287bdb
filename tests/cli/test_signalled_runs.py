"""SIGTERM and SIGINT in every stage: the run ends in order, says so, and goes on from there."""

import json
import os
import signal
import time

import psutil
import pytest

from paceline.recipe.run_dir import RunDir
from random_kills import Undisturbed
from run_server import differences, wait_for_event

MOMENTS = (
    ("prepare", "start"),
    ("regenerate", "start"),
    ("regenerate", "progress"),
    ("extract", "start"),
    ("extract", "progress"),
    ("train", "start"),
    ("train", "step"),
    ("score", "start"),
    ("score", "progress"),
)


def events_of(run: RunDir, stage: str) -> list[dict]:
    lines = (run.events / f"{stage}.jsonl").read_bytes().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_signalled_in_every_stage_ends_in_order_and_like_an_undisturbed_one(
    straight, tmp_path, server, recipe, number
):
    run = RunDir(tmp_path / "run")
    command = ("run", str(recipe), "--run", str(run.root))
    server.log = tmp_path / "log"
    for stage, kind in MOMENTS:
        told = run.events / f"{stage}.jsonl"
        before = told.stat().st_size if told.is_file() else 0
        pid = server.start(*command)
        wait_for_event(run, stage, kind, pid, after=before)
        os.kill(pid, number)
        assert server.wait(pid) == 130, (stage, kind, server.log.read_text())
        last = server.log.read_text().splitlines()[-1]
        assert "same command goes on" in last, (stage, kind, last)
        assert not list(run.root.rglob("*.partial")), (stage, kind)
        assert events_of(run, stage)[-1]["kind"] == "interrupted", (stage, kind)
    assert server.run(*command) == 0, server.log.read_text()
    # The checkpoints of the stops come on top of those that were due.
    extra = [name for name in differences(run, straight.run) if not is_extra(name, straight)]
    assert extra == []


def is_extra(name: str, straight: Undisturbed) -> bool:
    return name.startswith("checkpoints/step_") and not (straight.run.root / name).exists()


def test_a_second_start_is_refused_with_process_host_and_age_and_disturbs_nothing(
    straight, tmp_path, server, recipe
):
    run = RunDir(tmp_path / "run")
    command = ("run", str(recipe), "--run", str(run.root))
    server.log = tmp_path / "log"
    pid = server.start(*command)
    wait_for_event(run, "regenerate", "start", pid)
    os.kill(pid, signal.SIGSTOP)
    try:
        server.log = tmp_path / "refused"
        assert server.run(*command) == 2
        assert server.run("train", "--run", str(run.root)) == 2
    finally:
        os.kill(pid, signal.SIGCONT)
    said = (tmp_path / "refused").read_text()
    words = f"`paceline run` is at work in this run directory: process {pid} on "
    assert said.count(f"{words}{os.uname().nodename}, for ") == 2
    assert "seconds now. Wait for it to end, stop it, or use another run directory" in said
    assert server.wait(pid) == 0
    assert differences(run, straight.run) == []


def test_a_signal_to_the_whole_group_lets_the_workers_finish_what_they_have(
    straight, tmp_path, server, recipe
):
    run = RunDir(tmp_path / "run")
    command = ("run", str(recipe), "--run", str(run.root))
    server.log = tmp_path / "log"
    pid = server.start(*command, "--set", "target.workers=2", "--set", "extract.isolate=true")
    wait_for_event(run, "regenerate", "start", pid)
    while len(psutil.Process(pid).children()) < 2:  # the workers
        time.sleep(0.01)
    time.sleep(0.3)
    os.killpg(pid, signal.SIGTERM)
    assert server.wait(pid) == 130, server.log.read_text()
    said = server.log.read_text()
    assert "SIGTERM: stopped after " in said
    assert "groups of prompts that were left" in said
    assert "killed" not in said
    assert server.run(*command) == 0
    assert differences(run, straight.run) == []
