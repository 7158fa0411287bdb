"""The whole stage: done once, the same each time, killed at any moment."""

import subprocess
import sys
import time

import msgspec
import pytest
import torch

from paceline.recipe.write import write_recipe
from paceline.train import stage
from training_runs import events, last_weights


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_a_stage_run_twice_does_the_work_once(fresh_run):
    recipe, run_dir = fresh_run()
    first = stage.run(recipe, run_dir)
    assert first.numbers["samples"] == 40
    assert first.numbers["steps"] == 14
    before = {p: p.stat().st_mtime_ns for p in run_dir.checkpoints.rglob("*")}
    second = stage.run(recipe, run_dir)
    assert second.skipped
    assert second.numbers == first.numbers
    assert before == {p: p.stat().st_mtime_ns for p in run_dir.checkpoints.rglob("*")}


def test_two_trainings_are_equal_bit_for_bit(fresh_run):
    runs = [fresh_run() for _ in range(2)]
    for recipe, run_dir in runs:
        stage.run(recipe, run_dir)
    assert_equal(last_weights(runs[0][1]), last_weights(runs[1][1]))


def test_the_micro_batch_size_does_not_change_the_step(fresh_run):
    """T-57 for one process: the same tokens in one forward, or in many."""
    curves = []
    for limit in (10, 96, 100_000):
        recipe, run_dir = fresh_run(micro_batch_tokens=limit)
        stage.run(recipe, run_dir)
        curves.append(
            [(e["loss"], e["count"], e["gradient_norm"]) for e in events(run_dir, "step")]
        )
    for curve in curves[1:]:
        for (loss, count, norm), (loss_0, count_0, norm_0) in zip(curve, curves[0], strict=True):
            assert loss == pytest.approx(loss_0, rel=1e-3)
            assert count == pytest.approx(count_0, rel=1e-6)
            assert norm == pytest.approx(norm_0, rel=1e-2)


def test_old_checkpoints_go_the_best_stays(fresh_run):
    recipe, run_dir = fresh_run(evaluations=6, keep_checkpoints=1)
    report = stage.run(recipe, run_dir)
    left = {p.name for p in run_dir.checkpoints.glob("step_*")}
    assert report.numbers["best"] in left
    assert f"step_{report.numbers['steps']:06d}" in left
    assert len(left) <= 2


def test_killed_at_random_moments_it_ends_like_an_undisturbed_run(fresh_run, tmp_path):
    recipe, straight = fresh_run(epochs=6.0, evaluations=8)
    stage.run(recipe, straight)
    _, killed = fresh_run()
    path = tmp_path / "recipe.yaml"
    write_recipe(recipe, path)
    program = (
        "import sys; from pathlib import Path; from paceline.recipe.load import load_recipe;"
        "from paceline.recipe.run_dir import RunDir; from paceline.train import stage;"
        "print('ready', flush=True);"
        "stage.run(load_recipe(Path(sys.argv[1])), RunDir(Path(sys.argv[2])))"
    )
    for delay in (0.05, 0.25):
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(path), str(killed.root)], stdout=subprocess.PIPE
        )
        process.stdout.readline()
        time.sleep(delay)
        process.kill()
        process.wait()
        process.stdout.close()
    stage.run(recipe, killed)
    assert_equal(last_weights(straight), last_weights(killed))
    assert not list(killed.checkpoints.glob("*.partial"))


def test_the_config_tells_what_it_was_trained_with(fresh_run, world):
    recipe, run_dir = fresh_run()
    report = stage.run(recipe, run_dir)
    folder = run_dir.checkpoints / report.numbers["best"]
    config = msgspec.json.decode((folder / "config.json").read_bytes())
    spec = world[2].spec
    assert config["target_identity"] == spec.identity
    assert config["taps"] == [1, 2, 3]
    assert config["layer_convention"] == "output_after_layer"
    assert config["rope"]["rope_theta"] == spec.rope["rope_theta"]
    assert config["vocab_size"] == spec.vocab_size
    assert config["mask_token_id"] >= spec.tokenizer_size
    assert len(config["template_digest"]) == 32
