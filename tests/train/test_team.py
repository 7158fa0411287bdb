"""Several drafters in processes of their own, kept one model."""

import os
import signal
from collections import Counter
from dataclasses import replace

import pytest
import torch

from drafting import tiny_drafter
from paceline.durable.fs import REAL_FS
from paceline.flow.remote import Remote, RemotePolicy
from paceline.recipe.schema import TrainRecipe
from paceline.train import averaged, loop, reduced, stage
from paceline.train.checkpoint import fresh_state, write_state
from paceline.train.drafter_worker import Begin, DrafterJob
from paceline.train.memory import Demand
from paceline.train.source import StoredFeatures
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


@pytest.mark.parametrize(
    ("kind", "numbers"), [(averaged.AveragedTeam, [0, 1, 0]), (reduced.ReducedTeam, [0, 0, 0])]
)
def test_drafters_that_share_steps_begin_with_one_optimizer_whoever_wrote_the_checkpoint(
    world, tmp_path, monkeypatch, kind, numbers
):
    """Two averaged drafters wrote it, and each had an optimizer of its own."""
    write_state(tmp_path, replace(fresh_state(""), drafters=2), [], [], REAL_FS)
    begun: dict[int, int] = {}

    def ask(self, request):
        if isinstance(request, Begin):
            assert request.checkpoint == tmp_path
            begun[self.number] = request.number

    monkeypatch.setattr(Remote, "start", lambda _: None)
    monkeypatch.setattr(Remote, "ask", ask)
    model = tiny_drafter(world[2])
    job = DrafterJob(
        recipe=TrainRecipe(),
        target=tmp_path,
        config=model.config,
        buffers={},
        stored=StoredFeatures(root=tmp_path, cache=tmp_path),
        demand=Demand(longest=8, is_tied=False),
    )
    team = kind(
        job,
        model,
        devices=("cpu:0", "cpu:1", "cpu:2"),
        distinct=1,
        start=tmp_path,
        policy=RemotePolicy(),
        report=lambda *_: None,
    )
    with team.at_work():
        assert [begun[number] for number in sorted(begun)] == numbers
