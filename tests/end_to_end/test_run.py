"""The commands as a user types them: all stages on a tiny target, then once more."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tiny_models import tiny_model

RECIPE = """
name: tiny
target: {path: target, workers: 2}
corpus:
  sources: [{path: train.jsonl}, {path: heldout.jsonl, split: heldout}]
  max_length: 128
  validation_fraction: 0.15
regenerate: {max_new_tokens: 16, on_loop: keep, on_length: keep}
extract: {batch_tokens: 512}
drafter: {layers: 1, block_size: 4}
train: {epochs: 2, threads: 1, anchors: 8, gamma: 2, batch_samples: 8, evaluations: 2}
score: {max_new_tokens: 10, budgets: [8], walk_budgets: [4, 16], walk_check_prompts: 2}
"""


def rows(count: int, text: str) -> str:
    turns = ([{"role": "user", "content": f"{text} {i}"}] for i in range(count))
    return "".join(json.dumps({"messages": t}) + "\n" for t in turns)


def paceline(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "paceline", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def cpu_seconds_of_children() -> float:
    """What ended child processes have used; unlike the clock it does not depend on neighbours."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("user's folder")
    tiny_model("llama", folder / "target")
    (folder / "train.jsonl").write_text(rows(40, "a question about"))
    (folder / "heldout.jsonl").write_text(rows(4, "held out"))
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


@pytest.fixture(scope="module")
def done(folder) -> subprocess.CompletedProcess[str]:
    return paceline(folder, "run", "recipe.yaml", "--run", "out")


def test_one_command_ends_with_a_measured_drafter(folder, done):
    assert done.returncode == 0, done.stderr
    result = json.loads((folder / "out" / "score" / "result.json").read_text())
    assert result["pooled"]["chain"]["tau"] >= 1.0
    assert result["lossless"]["violations"] == []
    assert result["lossless"]["walk_equal"] == result["lossless"]["walk_checked"] > 0
    for expected in ("== prepare", "== score", "ddtree-8", "lossless: "):
        assert expected in done.stdout


def test_the_second_time_everything_is_done(folder, done):
    before = {p: p.read_bytes() for p in (folder / "out").rglob("*.json")}
    spent = cpu_seconds_of_children()
    again = paceline(folder, "run", "recipe.yaml", "--run", "out")
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("nothing to do") == 5
    assert "ddtree-8" in again.stdout, "the table is shown again"
    assert cpu_seconds_of_children() - spent < 15
    assert before == {p: p.read_bytes() for p in (folder / "out").rglob("*.json")}


def test_a_changed_recipe_is_refused_field_by_field(folder, done):
    again = paceline(folder, "run", "--run", "out", "--set", "train.gamma=3")
    assert again.returncode == 2
    assert "train.gamma: 2.0 -> 3.0" in again.stderr
    assert "Two ways out" in again.stderr
    assert "== prepare" not in again.stdout, "it is said before any stage begins"


def test_a_corpus_with_answers_needs_no_regeneration(folder):
    pairs = (
        [{"from": "human", "value": f"say {i}"}, {"from": "gpt", "value": "word " * (5 + i % 7)}]
        for i in range(30)
    )
    text = "".join(json.dumps({"conversations": p}) + "\n" for p in pairs)
    (folder / "pairs.jsonl").write_text(text)
    outcome = paceline(
        folder,
        "run",
        "recipe.yaml",
        "--run",
        "out2",
        "--set",
        "regenerate.enabled=false",
        "--set",
        "corpus.sources.0.path=pairs.jsonl",
        "--set",
        "target.workers=1",
    )
    assert outcome.returncode == 0, outcome.stderr
    assert "trainable" in outcome.stdout
    assert (folder / "out2" / "score" / "result.json").is_file()
