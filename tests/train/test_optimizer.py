"""AdamW and Muon: which weights each moves, how far, and what a checkpoint keeps of them."""

import math
from dataclasses import replace

import pytest
import torch

from drafting import capture, load_tiny_target, tiny_drafter
from paceline.drafter.memory import lasting_parts
from paceline.durable.errors import RecipeChanged, RecipeError
from paceline.recipe.schema import TrainRecipe
from paceline.recipe.stage import read_record
from paceline.train import stage
from paceline.train.batch import anchor_sample
from paceline.train.checkpoint import TrainState, restore_optimizer, save_checkpoint
from paceline.train.learner import Learner
from paceline.train.memory import shape_of
from paceline.train.optimizer import build_optimizer, set_learning_rate
from training_runs import events, step_events

BOTH = pytest.mark.parametrize("name", ["adamw", "muon"])


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_tiny_target(tmp_path_factory.mktemp("target"))


def step(target, learner: Learner, epoch: int = 0) -> float:
    """One step over one text; its loss."""
    ids = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(0))
    features = capture(target, ids, torch.arange(40) >= 5)
    sample = anchor_sample(features, count=24, seed=0, epoch=epoch)
    result = learner.learn([sample], learner.optimizer.param_groups[-1]["lr"], 0.5)
    assert not result.problem
    return result.loss


def weights(drafter) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in drafter.named_parameters()}


@BOTH
def test_the_state_takes_what_a_plan_says(target, name):
    recipe = TrainRecipe(optimizer=name)
    learner = Learner(recipe, tiny_drafter(target), target.head)
    step(target, learner)
    state = learner.optimizer.state_dict()["state"].values()
    found = sum(v.nbytes for held in state for v in held.values() if v.ndim)
    shape = shape_of(learner.drafter.config)
    assert shape.parameters == sum(p.numel() for p in learner.drafter.parameters())
    assert found == shape.moment_bytes(name)
    moments = lasting_parts(recipe, shape, is_tied=False)[1]
    assert (moments.name.split()[0], moments.bytes) == (
        {"adamw": "AdamW", "muon": "Muon's"}[name],
        found,
    )


def test_muon_orthogonalises_what_it_adds_to_matrices(target):
    drafter = tiny_drafter(target)
    recipe = TrainRecipe(optimizer="muon", learning_rate=1e-3, muon_learning_rate_ratio=20.0)
    before = weights(drafter)
    torch.manual_seed(0)
    for parameter in drafter.parameters():
        parameter.grad = torch.randn_like(parameter)
        if parameter.ndim == 2:
            left, values, right = torch.linalg.svd(parameter.grad, full_matrices=False)
            stretched = torch.logspace(0, 1.5, values.numel())
            parameter.grad = left @ stretched.diag() @ right
    build_optimizer(drafter, recipe).step()
    matrices = {n: p for n, p in drafter.named_parameters() if p.ndim == 2}
    assert "fc.weight" in matrices
    assert len(matrices) == 1 + 7 * len(drafter.blocks)
    for name, parameter in matrices.items():
        rows, columns = parameter.shape
        scale = 1e-3 * 20.0 * math.sqrt(max(1.0, rows / columns))
        added = torch.linalg.svdvals((before[name] - parameter.detach()) / scale)
        assert 0.6 < added[-1] <= added[0] < 1.3, "those of the gradient lie 30 times apart"


def test_muon_leaves_norms_to_adamw(target):
    """They move as they do where AdamW moves everything; matrices do not."""
    ends = []
    for name in ("adamw", "muon"):
        drafter = tiny_drafter(target)
        optimizer = build_optimizer(drafter, TrainRecipe(optimizer=name, weight_decay=0.1))
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            for parameter in drafter.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
        ends.append(weights(drafter))
        kept = [set(optimizer.state[p]) for p in drafter.parameters() if p.ndim == 2]
        moments = {"exp_avg", "exp_avg_sq", "step"}
        assert all(k == (moments if name == "adamw" else {"momentum_buffer"}) for k in kept)
        assert all(set(optimizer.state[p]) == moments for p in drafter.parameters() if p.ndim < 2)
    for key, value in ends[0].items():
        assert torch.equal(value, ends[1][key]) == (value.ndim < 2), key


@BOTH
def test_weights_decay_in_matrices_alone(target, name):
    drafter = tiny_drafter(target)
    recipe = TrainRecipe(
        optimizer=name, weight_decay=0.5, learning_rate=1e-2, muon_learning_rate_ratio=4.0
    )
    optimizer = build_optimizer(drafter, recipe)
    before = weights(drafter)
    for parameter in drafter.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    left = 1.0 - 1e-2 * (4.0 if name == "muon" else 1.0) * 0.5
    for key, parameter in drafter.named_parameters():
        wanted = before[key] * left if parameter.ndim == 2 else before[key]
        torch.testing.assert_close(parameter.detach(), wanted, rtol=1e-6, atol=0)


@BOTH
def test_every_weight_is_in_one_group_and_the_rate_of_each_keeps_its_ratio(target, name):
    drafter = tiny_drafter(target)
    optimizer = build_optimizer(drafter, TrainRecipe(optimizer=name, learning_rate=1e-3))
    ids = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(ids) == sorted(map(id, drafter.parameters()))
    for rate in (1e-3, 2e-4):
        set_learning_rate(optimizer, rate)
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == [rate * 10.0 if name == "muon" else rate, rate]


@BOTH
def test_a_restored_optimizer_takes_the_same_next_step(target, tmp_path, name):
    recipe = TrainRecipe(optimizer=name, learning_rate=1e-2)
    learners = [Learner(recipe, tiny_drafter(target), target.head) for _ in range(3)]
    for epoch in range(3):
        step(target, learners[0], epoch)
    state = TrainState(
        fingerprint="f", step=3, samples=3, bad_steps=0, skipped_steps=0, skipped_samples=0,
        tokens=3, seconds=1.0,
    )  # fmt: skip
    folder = save_checkpoint(tmp_path, learners[0].drafter, learners[0].optimizer, state)
    for other in learners[1:]:
        other.drafter.load_state_dict(learners[0].drafter.state_dict())
    restore_optimizer(folder, learners[1].optimizer)
    for learner in learners:
        for epoch in (3, 4):
            step(target, learner, epoch)
    ends = [weights(learner.drafter) for learner in learners]
    for key, value in ends[0].items():
        assert torch.equal(value, ends[1][key]), key
        assert not torch.equal(value, ends[2][key]), "without its state it takes another"


@BOTH
def test_a_text_is_learnt_by_heart(target, name):
    rate = 3e-3 if name == "adamw" else 2e-3
    recipe = TrainRecipe(optimizer=name, learning_rate=rate)
    learner = Learner(recipe, tiny_drafter(target), target.head)
    losses = [step(target, learner, epoch) for epoch in range(120)]
    assert losses[0] > 4.0
    assert losses[-1] < 0.15 * losses[0]


def test_a_training_with_muon_learns_and_keeps_its_checkpoints_apart(fresh_run):
    recipe, run_dir = fresh_run(optimizer="muon", epochs=6.0, evaluations=1)
    stage.run(recipe, run_dir)
    losses = [e["loss"] for e in step_events(run_dir)]
    assert sum(losses[-5:]) / 5 < 0.97 * losses[0]
    record = read_record(run_dir.checkpoints, "train")
    assert record is not None
    assert record.fields["train.optimizer"] == "muon"
    adamw = replace(recipe, train=replace(recipe.train, optimizer="adamw"))
    for name in ({}, {"resume_from": "step_000040"}):
        with pytest.raises(RecipeChanged, match=r"train\.optimizer: 'muon' -> ") as raised:
            stage.run(adamw, run_dir, **name)
        assert "--allow-change" not in str(raised.value)
    with pytest.raises(RecipeError, match="the state of the other optimizer"):
        stage.run(adamw, run_dir, allow_change=["train.optimizer"])


def test_a_new_ratio_by_permission_acts_from_there_on(fresh_run, monkeypatch):
    recipe, run_dir = fresh_run(optimizer="muon", epochs=1.0, evaluations=1)
    stage.run(recipe, run_dir)
    changed = replace(
        recipe.train, epochs=1.5, muon_learning_rate_ratio=2.5, muon_momentum=0.5, noise="normal"
    )
    seen = []
    original = Learner._update

    def noting(self, *arguments):
        result = original(self, *arguments)
        muon, adamw = self.optimizer.param_groups
        seen.append((muon["lr"] / adamw["lr"], muon["momentum"]))
        return result

    monkeypatch.setattr(Learner, "_update", noting)
    keys = ("epochs", "muon_learning_rate_ratio", "muon_momentum", "noise")
    stage.run(
        replace(recipe, train=changed), run_dir, allow_change=[f"train.{key}" for key in keys]
    )
    assert seen == [(pytest.approx(2.5), 0.5)] * 4
    assert {e["key"] for e in events(run_dir, "override")} == {f"train.{key}" for key in keys}
