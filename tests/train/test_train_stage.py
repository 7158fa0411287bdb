"""The whole stage: done once, resumed exactly, refused when changed, nothing bad applied."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from paceline.durable.errors import Interrupted, RecipeChanged, ShardDamaged, TrainingDiverged
from paceline.recipe.write import write_recipe
from paceline.train import loop, stage
from paceline.train.checkpoint import newest_checkpoint, read_state, verify_checkpoint


def events(run_dir, kind: str) -> list[dict]:
    lines = (run_dir.events / "train.jsonl").read_text().splitlines()
    return [e for e in map(json.loads, lines) if e["kind"] == kind]


def last_weights(run_dir) -> dict[str, torch.Tensor]:
    newest, _ = newest_checkpoint(run_dir.checkpoints)
    assert newest is not None
    return load_file(newest / "model.safetensors")


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


@pytest.mark.parametrize("stop_after", [1, 4, 7, 11])
def test_t_72_stopped_and_resumed_equals_uninterrupted(fresh_run, monkeypatch, stop_after):
    """Also in the middle of an epoch: 7 steps of 3 samples do not divide 20 samples."""
    recipe, straight = fresh_run()
    stage.run(recipe, straight)
    _, stopped = fresh_run()
    original = loop.Trainer._step

    def step(self, *arguments):
        original(self, *arguments)
        if self.state.step == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(loop.Trainer, "_step", step)
    with pytest.raises(Interrupted, match="The same command goes on"):
        stage.run(recipe, stopped)
    newest, _ = newest_checkpoint(stopped.checkpoints)
    assert read_state(newest).step == stop_after
    monkeypatch.setattr(loop.Trainer, "_step", original)
    stage.run(recipe, stopped)
    assert_equal(last_weights(straight), last_weights(stopped))
    keys = ("step", "samples", "loss", "count", "learning_rate", "gradient_norm")
    curves = [[{k: e[k] for k in keys} for e in events(run, "step")] for run in (straight, stopped)]
    assert curves[0] == curves[1]


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


def test_t_74_a_changed_recipe_is_refused_with_a_diff(fresh_run):
    recipe, run_dir = fresh_run()
    stage.run(recipe, run_dir)
    changed = replace(recipe, train=replace(recipe.train, learning_rate=5e-4))
    with pytest.raises(RecipeChanged, match=r"train\.learning_rate: 0\.001 -> 0\.0005"):
        stage.run(changed, run_dir)
    elsewhere = replace(recipe, train=replace(recipe.train, threads=2, keep_checkpoints=5))
    assert stage.run(elsewhere, run_dir).skipped


def test_t_65_a_non_finite_step_changes_nothing(fresh_run, monkeypatch):
    recipe, run_dir = fresh_run()
    original = loop.block_loss
    calls, seen = 0, {}

    def poisoned(drafter, *arguments, **keywords):
        nonlocal calls
        calls += 1
        result = original(drafter, *arguments, **keywords)
        if calls == 5:
            seen["before"] = {n: p.detach().clone() for n, p in drafter.named_parameters()}
            return replace(result, sum=result.sum * float("nan"))
        if calls == 6:
            now = dict(drafter.named_parameters())
            seen["unchanged"] = all(torch.equal(v, now[n]) for n, v in seen["before"].items())
        return result

    monkeypatch.setattr(loop, "block_loss", poisoned)
    report = stage.run(replace(recipe, train=replace(recipe.train, batch_samples=1)), run_dir)
    assert seen["unchanged"]
    assert report.numbers["skipped_steps"] == 1
    (skipped,) = events(run_dir, "skipped_step")
    assert len(skipped["sample_ids"]) == 1
    assert all(torch.isfinite(v).all() for v in last_weights(run_dir).values())


def test_too_many_non_finite_steps_stop_the_run(fresh_run, monkeypatch):
    recipe, run_dir = fresh_run(max_bad_steps=3)
    original = loop.block_loss

    def poisoned(*arguments, **keywords):
        result = original(*arguments, **keywords)
        return replace(result, sum=result.sum * float("inf"))

    monkeypatch.setattr(loop, "block_loss", poisoned)
    with pytest.raises(TrainingDiverged, match="3 non-finite steps in a row"):
        stage.run(recipe, run_dir)


@pytest.mark.parametrize("harm", ["truncate", "empty", "missing", "flip"])
def test_t_71_a_damaged_newest_checkpoint_is_passed_over(fresh_run, caplog, harm):
    recipe, run_dir = fresh_run(keep_checkpoints=3)
    stage.run(recipe, run_dir)
    newest = max(run_dir.checkpoints.glob("step_*"))
    target = newest / ("optimizer.safetensors" if harm == "empty" else "model.safetensors")
    data = target.read_bytes()
    if harm == "truncate":
        target.write_bytes(data[: len(data) // 2])
    elif harm == "empty":
        target.write_bytes(b"")
    elif harm == "missing":
        target.unlink()
    else:
        target.write_bytes(data[:-9] + bytes([data[-9] ^ 4]) + data[-8:])
    with pytest.raises(ShardDamaged, match=target.name):
        verify_checkpoint(newest)
    found, reasons = newest_checkpoint(run_dir.checkpoints)
    assert found == sorted(run_dir.checkpoints.glob("step_*"))[-2]
    assert target.name in reasons[0]
    (run_dir.checkpoints / "train.stage.json").unlink()
    report = stage.run(recipe, run_dir)
    assert report.numbers["samples"] == 40
    assert "passed over" in caplog.text


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
