"""Several drafters in processes of their own, kept one model."""

import os
import signal
from collections import Counter

import pytest
import torch

from paceline.train import loop, reduced, stage
from training_runs import events, last_weights, step_events


def test_one_drafter_in_a_process_of_its_own_trains_bit_for_bit_as_in_this_one(fresh_run):
    recipe, plain = fresh_run()
    stage.run(recipe, plain)
    recipe, team = fresh_run(drafter_devices=("cpu:0",), sync_every=3)
    stage.run(recipe, team)
    assert step_events(plain) == step_events(team)
    one, other = last_weights(plain), last_weights(team)
    assert all((one[name] == other[name]).all() for name in one)
    assert [e["simulated_tau"] for e in events(plain, "evaluation")] == [
        e["simulated_tau"] for e in events(team, "evaluation")
    ]


@pytest.mark.parametrize("drafters", [2, 3])
def test_several_drafters_consume_every_sample_once(fresh_run, drafters):
    devices = tuple(f"cpu:{n}" for n in range(drafters))
    recipe, run = fresh_run(drafter_devices=devices, sync_every=2, warmup_ratio=0.0)
    report = stage.run(recipe, run)
    assert report.numbers["samples"] == 40


def losses(run) -> list[float]:
    return [e["loss"] for e in step_events(run)]


@pytest.mark.parametrize("drafters", [1, 2, 3])
def test_t_57_a_step_shared_by_several_drafters_is_the_same_step(fresh_run, drafters):
    recipe, plain = fresh_run(batch_samples=4)
    stage.run(recipe, plain)
    devices = tuple(f"cpu:{n}" for n in range(drafters))
    recipe, team = fresh_run(batch_samples=4, drafter_devices=devices, sync="allreduce")
    stage.run(recipe, team)
    for one, other in zip(step_events(plain), step_events(team), strict=True):
        assert one["samples_digest"] == other["samples_digest"]
        assert one["count"] == other["count"]
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
        assert one["gradient_norm"] == pytest.approx(other["gradient_norm"], rel=1e-5)
    one, other = last_weights(plain), last_weights(team)
    assert all(torch.allclose(one[name], other[name], atol=1e-5) for name in one)


def test_t_56_a_drafter_without_a_sample_takes_the_step_with_the_others(fresh_run):
    """Steps of one sample on two drafters: one of them has none in each."""
    recipe, plain = fresh_run(batch_samples=1, epochs=1.0)
    stage.run(recipe, plain)
    recipe, team = fresh_run(
        batch_samples=1, epochs=1.0, drafter_devices=("cpu:0", "cpu:1"), sync="allreduce"
    )
    stage.run(recipe, team)
    assert losses(team) == pytest.approx(losses(plain), rel=1e-4)


def test_drafters_that_share_steps_begin_again_from_the_checkpoint_when_one_dies(
    fresh_run, monkeypatch
):
    recipe, run = fresh_run(drafter_devices=("cpu:0", "cpu:1"), sync="allreduce")
    original, killed = reduced.ReducedTeam.advance, []
    samples_of: dict[int, tuple[str, ...]] = {}
    reported = loop.Trainer._report

    def report(self, result, *arguments):
        samples_of[self.state.step] = result.sample_ids
        reported(self, result, *arguments)

    def killing(self, feed, samples, pace):
        if not killed and self._start is not None and len(step_events(run)) == 7:
            killed.append(self.pids[1])
            os.kill(self.pids[1], signal.SIGKILL)
        return original(self, feed, samples, pace)

    monkeypatch.setattr(reduced.ReducedTeam, "advance", killing)
    monkeypatch.setattr(loop.Trainer, "_report", report)
    stage.run(recipe, run)
    assert killed
    assert [e["step"] for e in events(run, "step")].count(6) == 2, "the steps since are done again"
    consumed = Counter(key for ids in samples_of.values() for key in ids)
    assert set(consumed.values()) == {2}
    assert len(consumed) == 20
