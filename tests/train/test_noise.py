"""Noise on the features: what it is, what it depends on, and where it is not."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafting import capture, load_tiny_target
from paceline.drafter.checkpoint import load_drafter
from paceline.durable.errors import Interrupted
from paceline.features.reader import FeatureReader
from paceline.recipe.schema import TrainRecipe
from paceline.target.head import TargetHead
from paceline.train import noise, stage
from paceline.train.batch import anchor_sample, pack
from paceline.train.checkpoint import read_state
from paceline.train.evaluate import depths_at_anchors, simulated_tau
from paceline.train.noise import FeatureNoise, feature_noise
from training_runs import assert_same_end, events, last_weights, newest, step_events, stop_after

STRONG = {"noise": "normal", "noise_start": 4.0, "noise_end": 2.0}


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """Two samples, in epoch 0."""
    target = load_tiny_target(tmp_path_factory.mktemp("target"))
    generator = torch.Generator().manual_seed(0)
    made = []
    for length in (40, 25):
        ids = torch.randint(0, 256, (length,), generator=generator)
        features = capture(target, ids, torch.arange(length) >= 5)
        features = replace(features, last=torch.randn(length, 32, generator=generator))
        made.append(anchor_sample(features, count=8, seed=0, epoch=0))
    return made


def packed(samples, noise, dtype=torch.float32, device="cpu"):
    return pack(
        samples,
        block_size=4,
        mask_token_id=300,
        dtype=dtype,
        device=torch.device(device),
        noise=noise,
        teacher=True,
    )


def noise_of(samples, noise, number: int = 0) -> torch.Tensor:
    """What was added to the taps of one of the samples packed."""
    batch, clean = packed(samples, noise), packed(samples, None)
    rows = batch.documents[number].rows
    return batch.taps[rows] - clean.taps[rows]


def normal(**changes) -> FeatureNoise:
    return replace(FeatureNoise(kind="normal", level=0.5, seed=3), **changes)


def level(progress: float, start: float, end: float) -> float:
    found = feature_noise(TrainRecipe(noise="uniform", noise_start=start, noise_end=end), progress)
    assert found is not None
    return found.level


def test_the_level_goes_along_half_a_cosine():
    assert level(0.0, 0.05, 0.01) == pytest.approx(0.05)
    assert level(1.0, 0.05, 0.01) == pytest.approx(0.01)
    assert level(0.5, 0.05, 0.01) == pytest.approx(0.03)
    assert level(0.25, 0.05, 0.01) == pytest.approx(0.03 + 0.02 * math.sqrt(0.5))
    assert level(0.3, 0.0, 2.0) == pytest.approx(1.0 - math.cos(0.3 * math.pi))


@given(one=st.floats(0, 1), other=st.floats(0, 1), start=st.floats(0, 10), end=st.floats(0, 10))
def test_the_level_lies_between_its_ends_and_never_turns(one, other, start, end):
    first, second = (level(p, start, end) for p in sorted((one, other)))
    low, high = sorted((start, end))
    assert low - 1e-9 <= first <= high + 1e-9
    assert (second - first) * (end - start) >= -1e-9


def test_none_is_no_noise():
    assert feature_noise(TrainRecipe(), 0.0) is None


@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_the_draws_are_distributed_as_told(kind):
    taps = torch.zeros(400, 3, 64)
    FeatureNoise(kind=kind, level=0.5, seed=0).add_to(taps, epoch=1, sample_id="a")
    assert float(taps.mean()) == pytest.approx(0.0, abs=0.01)
    if kind == "uniform":
        assert 0.499 < float(taps.abs().max()) <= 0.5
        assert float(taps.std()) == pytest.approx(0.5 / math.sqrt(3), rel=0.01)
        quarters = torch.histc(taps, bins=4, min=-0.5, max=0.5) / taps.numel()
        assert quarters.tolist() == pytest.approx([0.25] * 4, abs=0.01)
    else:
        assert float(taps.std()) == pytest.approx(0.5, rel=0.01)
        assert float((taps.abs() < 0.5).float().mean()) == pytest.approx(0.6827, abs=0.01)


def test_neither_batch_mates_nor_their_order_change_a_samples_noise(samples):
    both, swapped = packed(samples, normal()), packed(samples[::-1], normal())
    for number, sample in enumerate(samples):
        alone = packed([sample], normal()).taps
        assert torch.equal(alone, both.taps[both.documents[number].rows])
        assert torch.equal(alone, swapped.taps[swapped.documents[1 - number].rows])


def test_sample_epoch_and_seed_each_draw_anew_and_the_level_does_not(samples):
    first = noise_of(samples[:1], normal())
    others = [
        noise_of([replace(samples[0], epoch=1)], normal()),
        noise_of(samples[:1], normal(seed=4)),
        noise_of(samples, normal(), number=1),
    ]
    for other in others:
        rows = min(first.shape[0], other.shape[0])
        pair = torch.stack([first[:rows].flatten(), other[:rows].flatten()])
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 0.1
    torch.testing.assert_close(noise_of(samples[:1], normal(level=1.0)), 2 * first)


def test_only_the_taps_that_are_used_have_noise_and_the_stored_ones_have_none(samples):
    stored = samples[0].features.taps.clone()
    state = torch.get_rng_state()
    batch, clean = packed(samples[:1], normal()), packed(samples[:1], None)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(samples[0].features.taps, stored)
    assert batch.taps.shape == clean.taps.shape
    assert bool((batch.taps != clean.taps).all())
    assert batch.last is not None
    for name, value in vars(clean).items():
        if isinstance(value, torch.Tensor) and name != "taps":
            assert torch.equal(getattr(batch, name), value), name


def test_noise_is_of_the_compute_type(samples):
    narrow = packed(samples, normal(), torch.bfloat16)
    assert narrow.taps.dtype is torch.bfloat16
    added = narrow.taps.float() - packed(samples, None, torch.bfloat16).taps.float()
    assert float(added.std()) == pytest.approx(0.5, rel=0.1)


def test_a_training_with_noise_is_the_same_for_any_micro_batches(fresh_run):
    curves = []
    for limit in (1, 100_000):
        recipe, run_dir = fresh_run(**STRONG, micro_batch_tokens=limit, epochs=1.0, evaluations=1)
        stage.run(recipe, run_dir)
        curves.append([e["loss"] for e in step_events(run_dir)])
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)
    recipe, run_dir = fresh_run(epochs=1.0, evaluations=1)
    stage.run(recipe, run_dir)
    clean = [e["loss"] for e in step_events(run_dir)]
    assert all(abs(a - b) > 1e-3 for a, b in zip(clean, curves[0], strict=True))


def test_the_level_follows_the_samples_consumed(fresh_run, monkeypatch):
    seen = []
    original = noise.FeatureNoise.add_to

    def add_to(self, taps, **key):
        seen.append((self.level, key["epoch"]))
        original(self, taps, **key)

    monkeypatch.setattr(noise.FeatureNoise, "add_to", add_to)
    recipe, run_dir = fresh_run(**STRONG, batch_samples=4, evaluations=1)
    stage.run(recipe, run_dir)
    middles = [(4 * step + 2) / 40 for step in range(10)]
    wanted = [level(middle, 4.0, 2.0) for middle in middles for _ in range(4)]
    assert [found for found, _ in seen] == pytest.approx(wanted)
    assert [epoch for _, epoch in seen] == [0] * 20 + [1] * 20


def test_a_resume_with_noise_and_muon_is_exact(fresh_run, monkeypatch):
    recipe, straight = fresh_run(**STRONG, optimizer="muon")
    stage.run(recipe, straight)
    _, stopped = fresh_run()
    undo = stop_after(monkeypatch, 6)
    with pytest.raises(Interrupted):
        stage.run(recipe, stopped)
    undo()
    stage.run(recipe, stopped)
    assert step_events(straight) == step_events(stopped)
    assert_same_end(straight, stopped)


def tau_of(recipe, run_dir, level: float = 0.0) -> dict[str, float]:
    """Simulated τ of the last checkpoint, from its files alone, with noise of that level."""
    reader = Noisy(run_dir.features)
    reader.level = level
    drafter = load_drafter(newest(run_dir), device="cpu")
    head = TargetHead.load(
        Path(recipe.target.path), dtype=torch.float32, device=torch.device("cpu")
    )
    # As `world` chose them.
    validation = [i for i, name in enumerate(reader.sample_ids) if int(name, 16) % 6 == 5]
    train = recipe.train
    return simulated_tau(
        depths_at_anchors(
            drafter, head, reader, validation, anchors=train.eval_anchors, seed=train.seed
        )
    )


class Noisy(FeatureReader):
    """A reader whose taps have noise."""

    level = 0.0

    def read(self, index: int):
        features = super().read(index)
        if not self.level:
            return features
        taps = features.taps.clone()
        normal(level=self.level).add_to(taps, epoch=0, sample_id=str(index))
        return replace(features, taps=taps)


def test_evaluations_have_no_noise(fresh_run):
    """τ with and without noise is the same for equal weights: at the start, and at the end."""
    recipe, noisy = fresh_run(**STRONG, epochs=6.0, learning_rate=3e-3, evaluations=1)
    stage.run(recipe, noisy)
    plain_recipe, plain = fresh_run(epochs=6.0, learning_rate=3e-3, evaluations=1)
    stage.run(plain_recipe, plain)
    (before, after), (plain_before, _) = (
        [e["simulated_tau"] for e in events(run, "evaluation")] for run in (noisy, plain)
    )
    assert before == plain_before
    assert after == tau_of(recipe, noisy) == read_state(newest(noisy)).tau
    assert after != tau_of(recipe, noisy, level=2.0), "which would have shown"
    different = last_weights(plain)
    assert all(not torch.equal(v, different[k]) for k, v in last_weights(noisy).items())


@pytest.mark.gpu
def test_on_cuda_a_samples_noise_is_its_own_too(samples):
    device = "cuda"
    state = torch.cuda.get_rng_state()
    both = packed(samples, normal(), torch.bfloat16, device)
    alone = packed(samples[1:], normal(), torch.bfloat16, device)
    assert torch.equal(alone.taps, both.taps[both.documents[1].rows])
    added = alone.taps - packed(samples[1:], None, torch.bfloat16, device).taps
    assert float(added.float().std()) == pytest.approx(0.5, rel=0.1)
    assert torch.equal(torch.cuda.get_rng_state(), state)
