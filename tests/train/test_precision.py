"""Pitfall 22: products in bfloat16 over fp32 weights train; bfloat16 weights do not."""

import copy
import warnings

import pytest
import torch

from drafting import capture, decayed, load_tiny_target, tiny_drafter
from paceline.recipe.schema import TrainRecipe
from paceline.target.head import TargetHead
from paceline.train import learner, stage
from paceline.train.batch import anchor_sample, pack
from paceline.train.compute import compute_dtype, computing
from paceline.train.evaluate import simulated_tau
from paceline.train.objective import block_loss
from paceline.train.optimizer import build_optimizer
from training_runs import events, last_weights

GAMMA = 4.0
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_tiny_target(tmp_path_factory.mktemp("target"))


def head_of(target, dtype: torch.dtype, device: str = "cpu") -> TargetHead:
    return TargetHead.load(target.folder, dtype=dtype, device=device)


def batch_of(target, drafter, dtype: torch.dtype, device: str = "cpu"):
    generator = torch.Generator().manual_seed(0)
    samples = []
    for length in (30, 44, 25):
        ids = torch.randint(0, 256, (length,), generator=generator)
        features = capture(target, ids, torch.arange(length) >= 5)
        samples.append(anchor_sample(features, count=16, seed=0, epoch=0))
    return pack(
        samples,
        block_size=drafter.config.block_size,
        mask_token_id=drafter.config.mask_token_id,
        dtype=dtype,
        device=torch.device(device),
    )


def loss_in(target, drafter, dtype: torch.dtype, device: str = "cpu"):
    """The step's loss, its gradients left in the drafter."""
    drafter.zero_grad()
    batch = batch_of(target, drafter, dtype, device)
    with computing(drafter, dtype):
        loss = block_loss(
            drafter, head_of(target, dtype, device), batch, decayed(GAMMA), chunk=10_000
        )
    loss.sum.backward()
    return loss


def test_pitfall_22_the_loss_in_bfloat16_is_nearly_that_in_float32(target):
    drafter = tiny_drafter(target)
    wide = loss_in(target, drafter, torch.float32)
    wide_gradients = {n: p.grad.clone() for n, p in drafter.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        narrow = loss_in(target, drafter, BF16)
    assert narrow.sum.dtype == torch.float32
    assert narrow.count == wide.count
    difference = abs(float(narrow.sum.detach() - wide.sum.detach())) / float(wide.sum.detach())
    assert 0 < difference < 2e-3, "another computation, and nearly the same number"
    for name, parameter in drafter.named_parameters():
        cosine = torch.nn.functional.cosine_similarity(
            parameter.grad.flatten(), wide_gradients[name].flatten(), dim=0
        )
        assert cosine > 0.99, name


def test_pitfall_22_norms_and_softmax_stay_in_float32(target):
    drafter = tiny_drafter(target)
    seen = {}

    def note(name):
        return lambda _m, inputs, output: seen.update({name: (inputs[0].dtype, output.dtype)})

    for name, module in drafter.named_modules():
        if isinstance(module, (torch.nn.RMSNorm, torch.nn.Linear)):
            module.register_forward_hook(note(name))
    loss_in(target, drafter, BF16)
    norms = {n: d for n, d in seen.items() if "norm" in n}
    assert set(norms.values()) == {(torch.float32, torch.float32)}
    linear = {n: d[1] for n, d in seen.items() if "norm" not in n}
    assert len(linear) > 5
    assert set(linear.values()) == {BF16}


def one_step(target, drafter, dtype: torch.dtype, rate: float) -> dict[str, float]:
    """The share of weights, of those with a clear gradient, that a step of AdamW changes."""
    if dtype is BF16 and drafter.fc.weight.dtype is BF16:
        batch = batch_of(target, drafter, BF16)
        head = head_of(target, BF16)
        block_loss(drafter, head, batch, decayed(GAMMA), chunk=10_000).sum.backward()
    else:
        loss_in(target, drafter, dtype)
    optimizer = build_optimizer(drafter, TrainRecipe(learning_rate=rate))
    before = {n: p.detach().clone() for n, p in drafter.named_parameters()}
    # Far above AdamW's eps, so that the update is of the rate's own size.
    clear = {n: p.grad.abs() > 1e-4 for n, p in drafter.named_parameters()}
    optimizer.step()
    assert all(mask.any() for mask in clear.values())
    return {
        n: float((p.detach() != before[n])[clear[n]].float().mean())
        for n, p in drafter.named_parameters()
    }


@pytest.mark.parametrize("rate", [6e-4, 1e-6])
def test_pitfall_22_updates_do_not_vanish_in_masters(target, rate):
    masters = tiny_drafter(target)
    narrow = copy.deepcopy(masters).to(BF16)
    changed = one_step(target, masters, BF16, rate)
    assert set(changed.values()) == {1.0}
    # The check can fail: weights in bfloat16 lose updates, of the small rate nearly all.
    lost = one_step(target, narrow, BF16, rate)
    assert all(share < 0.9 for share in lost.values())
    norms = [share for name, share in lost.items() if "norm" in name]
    assert max(norms) < (0.5 if rate > 1e-5 else 0.05)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_weights_gradients_and_optimizer_are_float32(fresh_run, monkeypatch, compute, optimizer):
    recipe, run_dir = fresh_run(compute=compute, optimizer=optimizer, evaluations=1, epochs=1.0)
    found = set()
    original = learner.Learner._update

    def update(self, *arguments):
        found.update(p.grad.dtype for p in self._parameters.values())
        found.update(p.dtype for p in self._parameters.values())
        result = original(self, *arguments)
        for state in self.optimizer.state_dict()["state"].values():
            found.update(value.dtype for value in state.values())
        heads.add(self._head.lm_head.dtype)
        return result

    heads = set()
    monkeypatch.setattr(learner.Learner, "_update", update)
    stage.run(recipe, run_dir)
    assert found == {torch.float32}
    assert heads == {getattr(torch, compute)}
    assert {v.dtype for v in last_weights(run_dir).values()} == {torch.float32}


def test_gradients_of_micro_batches_add_up_in_float32(fresh_run):
    """Sums in bfloat16 would lose small parts: many micro-batches equal one, to its rounding."""
    curves = []
    for limit in (1, 100_000):
        recipe, run_dir = fresh_run(
            compute="bfloat16", micro_batch_tokens=limit, batch_samples=20, evaluations=1
        )
        stage.run(recipe, run_dir)
        curves.append([(e["loss"], e["gradient_norm"]) for e in events(run_dir, "step")])
    for (loss, norm), (other_loss, other_norm) in zip(*curves, strict=True):
        assert loss == pytest.approx(other_loss, rel=2e-3)
        assert norm == pytest.approx(other_norm, rel=2e-2)


def test_a_training_in_bfloat16_learns_what_one_in_float32_does(fresh_run):
    ends = {}
    for compute in ("float32", "bfloat16"):
        recipe, run_dir = fresh_run(compute=compute, epochs=6.0, evaluations=1, learning_rate=3e-3)
        stage.run(recipe, run_dir)
        losses = [e["loss"] for e in events(run_dir, "step")]
        ends[compute] = (losses[0], sum(losses[-5:]) / 5)
    assert ends["float32"][1] < 0.98 * ends["float32"][0]
    assert ends["bfloat16"][0] == pytest.approx(ends["float32"][0], rel=5e-3)
    assert ends["bfloat16"][1] == pytest.approx(ends["float32"][1], rel=2e-2)


@pytest.mark.gpu
def test_a_step_on_cuda_is_nearly_that_on_the_cpu(target):
    drafter = tiny_drafter(target)
    cpu = loss_in(target, drafter, torch.float32)
    gradients = {n: p.grad.clone() for n, p in drafter.named_parameters()}
    on_gpu = tiny_drafter(target).to("cuda")
    assert compute_dtype(TrainRecipe(device="cuda:0")) is BF16
    gpu = loss_in(target, on_gpu, BF16, "cuda")
    assert gpu.count == cpu.count
    assert float(gpu.sum.detach()) == pytest.approx(float(cpu.sum.detach()), rel=5e-3)
    for name, parameter in on_gpu.named_parameters():
        assert parameter.grad.dtype == torch.float32
        cosine = torch.nn.functional.cosine_similarity(
            parameter.grad.flatten().cpu(), gradients[name].flatten(), dim=0
        )
        assert cosine > 0.98, name
    optimizer = build_optimizer(on_gpu, TrainRecipe(learning_rate=1e-6))
    before = [p.detach().clone() for p in on_gpu.parameters()]
    optimizer.step()
    assert all(not torch.equal(p, q) for p, q in zip(on_gpu.parameters(), before, strict=True))


def test_the_evaluation_computes_as_the_training_does(target):
    """A head in bfloat16 beside fp32 weights would not even multiply outside."""
    drafter = tiny_drafter(target)
    with pytest.raises(RuntimeError):
        drafter.fc(torch.zeros(1, drafter.fc.in_features, dtype=BF16))
    with computing(drafter, BF16):
        assert drafter.fc(torch.zeros(1, drafter.fc.in_features, dtype=BF16)).dtype == BF16
    assert not torch.is_autocast_enabled("cpu")
    assert not any(m._forward_pre_hooks for m in drafter.modules())
    assert simulated_tau.__module__ == "paceline.train.evaluate"
