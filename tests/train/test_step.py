"""One training step: what counts, what does not, and that training means what decoding does."""

from dataclasses import replace

import pytest
import torch

from drafting import TAPS, capture, decayed, load_tiny_target, tiny_drafter
from paceline.decode.speculate import decode_plain, decode_speculative
from paceline.drafter.build import new_drafter
from paceline.objective.blocks import decay_weights
from paceline.recipe.schema import DrafterRecipe, TrainRecipe
from paceline.train.batch import Anchored, anchor_sample, micro_batches, pack
from paceline.train.objective import block_loss
from paceline.train.optimizer import build_optimizer
from paceline.types import TokenBatch

GAMMA = 4.0


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_tiny_target(tmp_path_factory.mktemp("target"))


def anchored(target, length: int, answer: range, seed: int, count: int = 6) -> Anchored:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 256, (length,), generator=generator)
    mask = torch.zeros(length, dtype=torch.bool)
    mask[answer.start : answer.stop] = True
    return anchor_sample(capture(target, ids, mask), count=count, seed=0, epoch=0)


def packed(drafter, samples):
    return pack(
        samples,
        block_size=drafter.config.block_size,
        mask_token_id=drafter.config.mask_token_id,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def gradients(target, drafter, groups) -> tuple[float, float, dict[str, torch.Tensor]]:
    drafter.zero_grad()
    total = count = 0.0
    for group in groups:
        loss = block_loss(drafter, target.head, packed(drafter, group), decayed(GAMMA), chunk=1600)
        loss.sum.backward()
        total += float(loss.sum.detach())
        count += loss.count
    return total, count, {n: p.grad.clone() for n, p in drafter.named_parameters()}


def test_pitfall_04_the_loss_of_many_anchors_is_that_of_each_alone(target):
    drafter = tiny_drafter(target)
    sample = anchored(target, 30, range(5, 30), seed=1, count=10)
    singles = [
        [Anchored(features=sample.features, anchors=sample.anchors[i : i + 1])] for i in range(10)
    ]
    together = gradients(target, drafter, [[sample]])
    apart = gradients(target, drafter, singles)
    assert together[0] == pytest.approx(apart[0], rel=1e-5)
    assert together[1] == pytest.approx(apart[1], rel=1e-6)
    for name, value in together[2].items():
        torch.testing.assert_close(value, apart[2][name], rtol=1e-3, atol=1e-4, msg=name)


def test_t_57_packing_and_accumulation_are_the_same_step(target):
    """64 trainable tokens at once, and in four parts of 16 of different length in all."""
    drafter = tiny_drafter(target)
    samples = [anchored(target, n + 16, range(n, n + 16), seed=n, count=12) for n in (4, 12, 7, 20)]
    once = gradients(target, drafter, [samples])
    split = gradients(target, drafter, [[s] for s in samples])
    assert once[0] == pytest.approx(split[0], rel=1e-6)
    assert once[1] == pytest.approx(split[1], rel=1e-6)
    rows = [int(packed(drafter, group).valid.sum()) for group in (samples, *([s] for s in samples))]
    assert rows[0] == sum(rows[1:]) > 64
    for name, value in once[2].items():
        difference = (value - split[2][name]).norm() / value.norm()
        assert difference < 1e-6, name


def test_t_56_pitfall_24_samples_without_a_valid_anchor_add_nothing(target):
    normal = anchored(target, 20, range(5, 20), seed=1)
    one_token = anchored(target, 15, range(14, 15), seed=2)
    none = anchored(target, 15, range(0), seed=3)
    assert one_token.anchors.numel() == none.anchors.numel() == 0
    groups = micro_batches([none, normal, one_token], block_size=4, limit=1000)
    assert groups == [[normal]]
    assert micro_batches([none, one_token], block_size=4, limit=1000) == []


def test_pitfall_19_captured_together_is_captured_alone(target):
    """Samples of unequal lengths, padded beside each other in the target, give the same step."""
    drafter = tiny_drafter(target)
    alone = [anchored(target, n, range(4, n), seed=n) for n in (11, 29)]
    tokens = [sample.features.tokens for sample in alone]
    batch = TokenBatch(
        input_ids=torch.cat([t.input_ids for t in tokens]),
        loss_mask=torch.cat([t.loss_mask for t in tokens]),
        offsets=torch.tensor([0, 11, 40]),
        sample_ids=tuple(t.sample_ids[0] for t in tokens),
    )
    together = target.capture(batch, TAPS)
    padded = [
        replace(sample, features=replace(sample.features, taps=together.taps[rows]))
        for sample, rows in zip(alone, (slice(0, 11), slice(11, 40)), strict=True)
    ]
    first, second = gradients(target, drafter, [alone]), gradients(target, drafter, [padded])
    assert first[0] == pytest.approx(second[0], rel=1e-5)
    for name, value in first[2].items():
        torch.testing.assert_close(value, second[2][name], rtol=1e-3, atol=1e-4, msg=name)


def test_pitfall_19_labels_are_not_shifted(target):
    sample = anchored(target, 20, range(5, 20), seed=1)
    batch = packed(tiny_drafter(target), [sample])
    ids = sample.features.tokens.input_ids
    for row, anchor in enumerate(batch.anchors.tolist()):
        assert int(batch.block_ids[row, 0]) == int(ids[anchor])
        inside = int(batch.valid[row].sum())
        assert torch.equal(batch.labels[row][:inside], ids[anchor + 1 : anchor + 1 + inside])


def test_pitfall_24_a_batch_of_empty_masks_is_finite(target):
    drafter = tiny_drafter(target)
    sample = anchored(target, 20, range(5, 20), seed=1)
    # Anchors whose blocks have no supervised slot at all.
    batch = packed(drafter, [Anchored(features=sample.features, anchors=torch.tensor([1, 2]))])
    batch.valid[:] = False
    loss = block_loss(drafter, target.head, batch, decayed(GAMMA), chunk=1600)
    loss.sum.backward()
    assert float(loss.sum.detach()) == 0.0
    assert loss.count == 0.0
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in drafter.parameters())


def test_the_loss_is_weighted_cross_entropy_over_the_full_vocabulary(target):
    drafter = tiny_drafter(target)
    batch = packed(drafter, [anchored(target, 24, range(5, 22), seed=4, count=30)])
    loss = block_loss(drafter, target.head, batch, decayed(GAMMA), chunk=1600)
    with torch.no_grad():
        hidden = drafter(
            target.head.embed(batch.block_ids),
            batch.anchors,
            batch.taps,
            batch.positions,
            batch.documents,
        )
        nll = torch.nn.functional.cross_entropy(
            target.head.logits(hidden).flatten(0, 1), batch.labels.flatten(), reduction="none"
        ).view(batch.labels.shape)
    weights = decay_weights(4, GAMMA) * batch.valid
    assert float(loss.sum.detach()) == pytest.approx(float((weights * nll).sum()), rel=1e-5)
    assert loss.count == pytest.approx(float(weights.sum()))
    assert loss.parts["right_count"] == int(batch.valid.sum())


@pytest.mark.parametrize("block_size", [4, 8])
def test_pitfall_01_one_text_learnt_by_heart_is_drafted_whole(target, block_size):
    """Labels, positions, masks and features mean the same in training and in decoding."""
    prompt = [5, 17, 90, 33, 8]
    answer = decode_plain(
        target, prompt, taps=TAPS, max_new_tokens=41 + block_size, eos_ids=frozenset()
    )
    ids = torch.tensor([*prompt, *answer.ids])[: answer.features.shape[0]]
    features = capture(target, ids, torch.arange(ids.numel()) >= len(prompt))
    recipe = DrafterRecipe(layers=2, block_size=block_size, init="random")
    shape = tiny_drafter(target, block_size=block_size).config
    drafter = new_drafter(shape, recipe, target.spec, target.folder, seed=0)
    optimizer = build_optimizer(drafter, TrainRecipe(learning_rate=3e-3))
    for epoch in range(220):
        sample = anchor_sample(features, count=24, seed=0, epoch=epoch)
        batch = packed(drafter, [sample])
        loss = block_loss(drafter, target.head, batch, decayed(GAMMA), chunk=1 << 20)
        (loss.sum / loss.count).backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    decoded = decode_speculative(
        target,
        drafter.eval(),
        target.head,
        prompt,
        max_new_tokens=41,
        eos_ids=frozenset(),
    )
    assert decoded.ids == answer.ids[:41]
    assert decoded.rounds[:-1] == (block_size,) * (len(decoded.rounds) - 1)
