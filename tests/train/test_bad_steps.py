"""Steps that have nothing right to apply: they change nothing, are counted, and end a run."""

import json
from dataclasses import replace

import pytest
import torch

from paceline.durable.errors import TrainingDiverged
from paceline.train import learner, loop, stage
from paceline.train.checkpoint import read_state
from paceline.types.sample import Split, encode_sample, read_samples
from training_runs import events, last_weights, newest, step_events


def poison(monkeypatch, steps: dict[int, str]) -> dict[int, list[torch.Tensor]]:
    """Spoil the loss of some steps; returns weights and optimizer state before each step."""
    before: dict[int, list[torch.Tensor]] = {}
    loss_of, step_of = learner.block_loss, loop.Trainer._advance
    current = 0

    def step(self, *arguments):
        nonlocal current
        current = self.state.step + 1
        tensors = [p.detach().clone() for p in self._crew.learner._parameters.values()]
        for state in self._crew.learner.optimizer.state_dict()["state"].values():
            tensors += [value.clone() for value in state.values()]
        before[current] = tensors
        step_of(self, *arguments)

    def loss(*arguments, **keywords):
        result = loss_of(*arguments, **keywords)
        match steps.get(current):
            case "nan" | "inf" as value:
                return replace(result, sum=result.sum * float(value))
            case "none":
                alone = torch.tensor(1.0, requires_grad=True)
                return replace(result, sum=alone * float(result.sum.detach()))
            case _:
                return result

    monkeypatch.setattr(loop.Trainer, "_advance", step)
    monkeypatch.setattr(learner, "block_loss", loss)
    return before


def test_t_65_a_step_without_a_finite_gradient_changes_nothing(fresh_run, monkeypatch):
    recipe, straight = fresh_run(batch_samples=2, evaluations=1)
    stage.run(recipe, straight)
    rates = [e["learning_rate"] for e in step_events(straight)]
    _, run_dir = fresh_run()
    before = poison(monkeypatch, {5: "nan", 6: "none", 9: "inf"})
    report = stage.run(recipe, run_dir)
    for bad in (5, 6, 9):
        assert len(before[bad]) == len(before[bad + 1])
        for one, other in zip(before[bad], before[bad + 1], strict=True):
            assert torch.equal(one, other), bad
    assert not all(map(torch.equal, before[4], before[5])), "a good step does change something"

    skipped = events(run_dir, "skipped_step")
    assert [e["step"] for e in skipped] == [5, 6, 9]
    assert skipped[0]["reason"] == skipped[2]["reason"] == "loss or gradient is not finite"
    assert skipped[1]["reason"].startswith("no gradient for ")
    assert all(len(e["sample_ids"]) == 2 for e in skipped)
    assert report.numbers["skipped_steps"] == 3
    state = read_state(newest(run_dir))
    assert (state.skipped_steps, state.skipped_samples, state.bad_steps) == (3, 6, 0)
    assert all(torch.isfinite(v).all() for v in last_weights(run_dir).values())

    # The next step has the rate that the skipped one would have had; no sample comes twice.
    found = [e["learning_rate"] for e in step_events(run_dir)]
    assert found[:5] == rates[:5]
    assert found[5] == found[6] == rates[4]
    assert found[7:9] == rates[5:7]
    assert found[9] == rates[6]
    assert found[10:] == rates[7:17]
    digests = [[e["samples_digest"] for e in step_events(run)] for run in (straight, run_dir)]
    assert digests[0] == digests[1]


def test_t_65_a_few_weights_without_a_gradient_are_enough(fresh_run, monkeypatch):
    recipe, run_dir = fresh_run(batch_samples=20, epochs=1.0, evaluations=1)
    original = learner.Learner._accumulate

    def accumulate(self, *arguments):
        original(self, *arguments)
        self.drafter.norm.weight.grad = None

    monkeypatch.setattr(learner.Learner, "_accumulate", accumulate)
    stage.run(recipe, run_dir)
    (skipped,) = events(run_dir, "skipped_step")
    assert skipped["reason"] == "no gradient for 1 weights, such as norm.weight"


@pytest.mark.parametrize("kind", ["inf", "none"])
def test_t_65_too_many_bad_steps_in_a_row_stop_the_run(fresh_run, monkeypatch, kind):
    recipe, run_dir = fresh_run(max_bad_steps=3)
    poison(monkeypatch, {1: kind, 2: kind, 4: kind, 5: kind, 6: kind})
    with pytest.raises(TrainingDiverged, match=r"3 bad steps in a row, up to step 6") as raised:
        stage.run(recipe, run_dir)
    assert raised.value.exit_code == 1
    assert str(run_dir.events / "train.jsonl") in str(raised.value)


def test_t_56_steps_and_samples_without_an_anchor_are_counted_and_add_nothing(
    fresh_run, world, tmp_path
):
    """Masks taken away after the extraction: each is its sample's own."""
    empty = {f"{n:032x}" for n in range(0, 24, 2)}
    consumed = masked_run(fresh_run, world, tmp_path, empty)
    assert sum(e["empty_samples"] for e in consumed["events"]) == sum(
        i in empty for i in consumed["train"]
    )
    for event in consumed["events"]:
        if event["empty_samples"] == 2:
            assert (event["loss"], event["count"], event["gradient_norm"]) == (0.0, 0.0, 0.0)
        else:
            assert event["count"] > 0
    assert {e["empty_samples"] for e in consumed["events"]} == {0, 1, 2}


def masked_run(fresh_run, world, tmp_path, empty: set[str]) -> dict:
    """A training in which some samples have no supervised token."""
    from paceline.extract import stage as extract_stage
    from paceline.recipe.run_dir import RunDir

    recipe, _ = fresh_run(batch_samples=2, evaluations=1, epochs=1.0)
    run_dir = RunDir(tmp_path / "masked")
    run_dir.corpus.mkdir(parents=True)
    samples = list(read_samples(RunDir(world[1]).prepared))
    with run_dir.prepared.open("wb") as file:
        for sample in samples:
            if sample.sample_id in empty:
                end = len(sample.input_ids)
                sample = replace(sample, loss_spans=[(end - 1, end)])
            file.write(encode_sample(sample))
    extract_stage.run(recipe, run_dir)
    stage.run(recipe, run_dir)
    return {
        "events": events(run_dir, "step"),
        "train": [s.sample_id for s in samples if s.split is Split.TRAIN],
    }


def test_the_events_are_json_all_the_same(fresh_run, monkeypatch):
    recipe, run_dir = fresh_run(evaluations=1)
    poison(monkeypatch, {2: "nan"})
    stage.run(recipe, run_dir)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    for line in (run_dir.events / "train.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
