"""Where memory runs out: what is told, what is kept, and that the training goes on from there."""

import pickle
import re

import pytest
import torch

from memory_runs import failing, open_cramped_drafter, open_drafter_without_room
from paceline.durable.errors import OutOfMemory
from paceline.target.head import TargetHead
from paceline.train import evaluate, learner, stage, team
from paceline.train.checkpoint import save_checkpoint
from paceline.train.memory import AVERAGE, UPDATE, Meter
from training_runs import assert_same_end, events, newest, step_events

STEP = r"forward and backward of a micro-batch of \d+ tokens"

# With 3 micro-batches a step, 14 steps, 4 validation samples and checkpoints at 5, 10 and 14.
PHASES = {
    "forward": (learner, "block_loss", 3 * 6 + 2, STEP, "train.micro_batch_tokens", 6),
    "optimizer step": (torch.optim.AdamW, "step", 7, "the optimizer step", "drafter.layers", 5),
    "evaluation": (evaluate, "accepted_depths", 4 + 2, "an evaluation", "train.eval_anchors", 5),
    "head": (TargetHead, "load", 1, "loading drafter, optimizer and", "`paceline doctor`", None),
}


@pytest.mark.parametrize("phase", PHASES)
def test_it_is_told_where_and_how_much_and_the_training_goes_on_bit_for_bit(
    phase, fresh_run, monkeypatch
):
    recipe, straight = fresh_run()
    stage.run(recipe, straight)
    recipe, run = fresh_run()
    where, name, number, doing, advice, kept = PHASES[phase]
    with monkeypatch.context() as patch:
        patch.setattr(where, name, failing(getattr(where, name), number))
        with pytest.raises(OutOfMemory, match=f"cpu is out of memory in {doing}") as full:
            stage.run(recipe, run)
    told = str(full.value)
    assert full.value.exit_code == 1
    assert re.search(r"\d MB predicted, \d+\.\d+ [MG]B measured at the peak", told)
    assert "Process 4711 has 60.00 GiB memory in use)." in told
    assert advice in told
    (failed,) = events(run, "failed")
    assert failed["error"] == told
    if kept is not None:
        assert newest(run).name == f"step_{kept:06d}"
    if phase == "forward":
        assert f"step_{kept:06d} has all steps before: the same command goes on there." in told
    stage.run(recipe, run)
    assert step_events(run) == step_events(straight)
    assert_same_end(run, straight)


def test_a_drafter_without_memory_for_a_step_loses_none_that_is_done(fresh_run, monkeypatch):
    devices = ("cpu:0", "cpu:1")
    recipe, run = fresh_run(drafter_devices=devices, sync_every=3, warmup_ratio=0.0)
    with monkeypatch.context() as patch:
        patch.setattr(team, "open_drafter", open_cramped_drafter)
        with pytest.raises(OutOfMemory, match=f"cpu:1 is out of memory in {STEP}") as full:
            stage.run(recipe, run)
    done = step_events(run)
    assert done
    assert f"{newest(run).name} has all steps before" in str(full.value)
    assert newest(run).name == f"step_{done[-1]['step']:06d}"
    # It is not tried again: the same step would fill the device again.
    assert [e["what"] for e in events(run, "worker")] == ["started", "started"]
    report = stage.run(recipe, run)
    assert report.numbers["samples"] == 40
    assert step_events(run)[: len(done)] == done


@pytest.mark.parametrize("sync", ["average", "allreduce"])
def test_a_drafter_that_cannot_be_loaded_is_not_started_again(fresh_run, monkeypatch, sync):
    recipe, run = fresh_run(drafter_devices=("cpu:0",), sync=sync)
    monkeypatch.setattr(team, "open_drafter", open_drafter_without_room)
    with pytest.raises(OutOfMemory, match="cpu:0 is out of memory in loading drafter"):
        stage.run(recipe, run)
    assert not events(run, "worker")


def test_a_step_that_drafters_share_ends_with_the_one_without_memory(fresh_run, monkeypatch):
    recipe, run = fresh_run(
        batch_samples=4, drafter_devices=("cpu:0", "cpu:1"), sync="allreduce", warmup_ratio=0.0
    )
    monkeypatch.setattr(team, "open_drafter", open_cramped_drafter)
    with pytest.raises(OutOfMemory, match=f"cpu:1 is out of memory in {STEP}"):
        stage.run(recipe, run)


def test_what_cannot_be_written_is_told_and_the_checkpoint_before_stands(fresh_run, monkeypatch):
    from paceline.train import crew

    recipe, run = fresh_run()
    monkeypatch.setattr(crew, "save_checkpoint", failing(save_checkpoint, 2))
    with pytest.raises(OutOfMemory, match="in writing a checkpoint"):
        stage.run(recipe, run)
    assert newest(run).name == "step_000005"


@pytest.mark.parametrize(
    "taking",
    [lambda: torch.empty(1 << 50), lambda: bytearray(1 << 60)],
    ids=["torch's allocator", "Python's"],
)
def test_memory_that_really_runs_out_is_recognised(taking):
    meter = Meter(torch.device("cpu"), name="cpu:3")
    told = r"^cpu:3 is out of memory in the average\. "
    with pytest.raises(OutOfMemory, match=told) as full, meter.phase(AVERAGE):
        taking()
    assert "It takes nothing on a device" in str(full.value)


def test_other_errors_pass_as_they_are():
    meter = Meter(torch.device("cpu"))
    with pytest.raises(RuntimeError, match="must match"), meter.phase(UPDATE):
        torch.add(torch.zeros(2), torch.zeros(3))
    with pytest.raises(FileNotFoundError), meter.phase(UPDATE):
        raise FileNotFoundError(2, "No such file")


def test_it_is_the_same_error_behind_the_way_out_of_a_process():
    error = pickle.loads(pickle.dumps(OutOfMemory("cuda:0 is full", is_sound=False)))
    assert (str(error), error.is_sound) == ("cuda:0 is full", False)
