"""Drafters that share steps die while a checkpoint is written: the same steps are done again."""

import os
import signal
from collections import Counter

import pytest
import torch

from paceline.drafter.checkpoint import load_drafter
from paceline.durable.errors import Interrupted
from paceline.flow.parcel import Parcel
from paceline.flow.remote import Remote
from paceline.train import loop, stage
from paceline.train.averaging import trainable, weights_in
from paceline.train.crew import Solo, StepsLost
from paceline.train.drafter_worker import Begin, Save
from training_runs import events, newest, stop_after


# A training that waits for what nobody hands out again is ended by this.
@pytest.mark.timeout(90)
def test_a_drafter_that_dies_while_it_saves_goes_on_from_the_checkpoint_before(
    fresh_run, monkeypatch
):
    """It dies at the second checkpoint, of step 9, and at the last one, of step 14."""
    recipe, run = fresh_run(drafter_devices=("cpu:0",), sync="allreduce")
    post, reported = Remote.post, loop.Trainer._report
    saves: Counter[int] = Counter()
    begun: list[str] = []
    samples_of: dict[int, tuple[str, ...]] = {}

    def watched(self, request):
        if isinstance(request, Save):
            step = int(request.folder.stem.removeprefix("step_"))
            saves[step] += 1
            if step > 5 and saves[step] == 1:
                os.kill(self.pid, signal.SIGKILL)
        if isinstance(request, Begin) and request.checkpoint is not None:
            begun.append(request.checkpoint.name)
            saved, parcel = load_drafter(request.checkpoint), Parcel.opened(request.weights)
            given = weights_in(parcel, saved)
            assert all(torch.equal(given[name], t) for name, t in trainable(saved).items())
            parcel.close()
        post(self, request)

    def report(self, result, *arguments):
        samples_of[self.state.step] = result.sample_ids
        reported(self, result, *arguments)

    monkeypatch.setattr(Remote, "post", watched)
    monkeypatch.setattr(loop.Trainer, "_report", report)
    stage.run(recipe, run)
    assert saves == {5: 1, 9: 2, 14: 2}
    assert begun == ["step_000005", "step_000009"]
    steps = [e["step"] for e in events(run, "step")]
    assert steps == [*range(1, 10), *range(6, 15), *range(10, 15)]
    consumed = Counter(key for ids in samples_of.values() for key in ids)
    assert len(consumed) == 20
    assert set(consumed.values()) == {2}


@pytest.mark.parametrize(
    ("step", "said"),
    [(7, "stopped after step 5, with a checkpoint"), (2, "stopped before the first step")],
)
def test_a_stop_whose_checkpoint_is_lost_names_the_one_that_is_there(
    fresh_run, monkeypatch, step, said
):
    recipe, run = fresh_run()
    save = Solo.save

    def losing(self, root, state):
        if state.step == step:
            raise StepsLost("killed")
        return save(self, root, state)

    monkeypatch.setattr(Solo, "save", losing)
    stop_after(monkeypatch, step)
    with pytest.raises(Interrupted, match=said):
        stage.run(recipe, run)
    if step > 5:
        assert newest(run).name == "step_000005"
