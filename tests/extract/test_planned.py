"""What `paceline plan` says, against what the extraction does: where shards wait, what is left."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from extract_runs import make_run
from extract_trials import bucket_of, events_of, journal_of
from paceline.cli.main import main
from paceline.doctor.plan import make_plan
from paceline.doctor.plan_bytes import Samples
from paceline.doctor.plan_facts import Asked
from paceline.durable.space import Space, is_tmpfs
from paceline.durable.staging import SHARED_MEMORY, staging_needed
from paceline.extract import stage, work
from paceline.types.rows import index_rows


def plan_of(recipe, run_dir):
    rows = index_rows(run_dir.prepared, vocab_size=None, max_position=None)
    samples = Samples(
        count=len(rows), tokens=rows.tokens, longest=int(rows.lengths.max()), basis="corpus",
        said="",
    )  # fmt: skip
    return make_plan(recipe, run_dir, Asked(samples=samples, lengths=rows.lengths))


def place_of_run(caplog):
    """Where the extraction has just said that its shards wait."""
    said = [m for r in caplog.records if "shards wait in" in (m := r.getMessage())]
    caplog.clear()
    return Path(re.search(r"shards wait in (.*?), at most", said[-1])[1]).parent


@pytest.mark.parametrize("fitting", ["two", "one too few", "all"])
def test_plan_and_run_choose_the_same_staging(
    tmp_path, target, samples, bucket, monkeypatch, caplog, fitting
):
    """Also where a few shards fit into shared memory, but not enough that nobody waits."""
    if not is_tmpfs(SHARED_MEMORY):
        pytest.skip("no shared memory here")
    caplog.set_level(logging.INFO)
    asked = bucket | {"staging": "auto", "uploads": 2}
    recipe, run_dir = make_run(tmp_path / "run", target, samples, **asked)
    largest = plan_of(recipe, run_dir).store.largest_shard
    enough = staging_needed(None, largest, workers=1, uploads=2)
    assert enough == 4 * largest
    half = {"two": 2 * largest, "one too few": enough - 1, "all": enough}[fitting]
    monkeypatch.setattr(
        "paceline.durable.staging.read_space", lambda _: Space(10 * half, 0, 2 * half)
    )
    planned = plan_of(recipe, run_dir).staging
    assert planned.smooth == enough
    assert Path(planned.path) == (SHARED_MEMORY if fitting == "all" else run_dir.staging)
    stage.run(recipe, run_dir)
    assert place_of_run(caplog) == Path(planned.path)
    # A start that makes nothing but a small shard chooses as the first did.
    sizes = {r["key"]: r["size"] for r in journal_of(run_dir) if r["kind"] == "verified"}
    small = min(sizes, key=lambda key: sizes[key])
    assert sizes[small] < 0.6 * max(sizes.values())
    bucket_of(recipe, run_dir).delete([small])
    stage.run(recipe, run_dir)
    assert place_of_run(caplog) == Path(planned.path)


def planned(run_dir, capsys, *arguments):
    """What `paceline plan` says of the run, as JSON and in words."""
    command = ["plan", "--run", str(run_dir.root), "--tokens-per-s", "100", *arguments]
    capsys.readouterr()
    assert main([*command, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert main(command) == 0
    return plan, re.sub(r"\s+", " ", capsys.readouterr().out)


COLD = """
import sys
from paceline.cli.main import main
code = main(sys.argv[1:])
sys.exit("imported torch" if "torch" in sys.modules else code)
"""


@pytest.mark.parametrize("place", ["the run's", "a folder", "a bucket"])
def test_the_plan_of_a_half_done_run_is_of_what_is_left(
    tmp_path, prepared, bucket, monkeypatch, capsys, place
):
    store = {"the run's": {}, "a folder": {"store": str(tmp_path / "store")}, "a bucket": bucket}
    run_dir, command = prepared.copy(tmp_path / "run", shard_bytes=8192, **store[place])
    upload = ("--upload", "1000") if place == "a bucket" else ()
    original = work.Progress.add

    def stopping(self, index, times):
        original(self, index, times)
        if self.counts().done > 20:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(work.Progress, "add", stopping)
    assert main(command) == 130
    monkeypatch.undo()
    told = events_of(run_dir, "progress")[-1]
    assert 20 < told["done"] < told["total"] == 60

    plan, said = planned(run_dir, capsys, *upload)
    done = plan["done"]
    verified = {r["key"]: r["size"] for r in journal_of(run_dir) if r["kind"] == "verified"}
    assert done == {
        "shards": len(verified),
        "samples": told["done"],
        "tokens": told["tokens"],
        "bytes": sum(verified.values()),
    }
    assert plan["samples"]["tokens"] == told["tokens_total"]
    left = told["tokens_total"] - told["tokens"]
    assert plan["flow"]["bottleneck"] == "device"
    assert plan["flow"]["seconds"] == pytest.approx(left / 100)
    words = f"done: {len(verified)} of {plan['store']['shards']} shards are verified, "
    assert words in said
    assert f"tokens {told['tokens_total']:,} {told['tokens']:,} " in said
    # Of other shards nothing is there.
    other, _ = planned(run_dir, capsys, *upload, "--set", "extract.shard_bytes=9000")
    assert other["done"]["shards"] == 0
    assert other["flow"]["seconds"] == pytest.approx(told["tokens_total"] / 100)
    # Nor is what was told of samples of no corpus.
    guess, _ = planned(run_dir, capsys, *upload, "--rows", "60", "--mean-tokens", "50")
    assert guess["flow"]["seconds"] == pytest.approx(30)
    if place != "a bucket":
        folder = run_dir.features if place == "the run's" else next((tmp_path / "store").iterdir())
        (folder / min(verified)).unlink()
        assert planned(run_dir, capsys, *upload)[0]["done"]["shards"] == len(verified) - 1
    cold = subprocess.run(
        [sys.executable, "-c", COLD, "plan", "--run", str(run_dir.root)],
        env={**os.environ, "PYTHONPATH": str(Path(paceline.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (cold.returncode, cold.stderr) == (0, "")

    assert main(command) == 0
    plan, said = planned(run_dir, capsys, *upload)
    assert plan["done"]["samples"] == plan["samples"]["count"]
    assert plan["done"]["shards"] == plan["store"]["shards"]
    assert plan["flow"]["seconds"] == 0
    assert "time: nothing is left to extract." in said
