import torch
from hypothesis import given
from hypothesis import strategies as st

from fixtures_chatml import byte_chatml
from paceline.objective.blocks import (
    block_targets,
    decay_weights,
    sample_anchors,
    valid_anchors,
)


def test_pitfall_01_slot_k_predicts_the_token_at_anchor_plus_k():
    ids = torch.arange(100, 112)
    labels, valid = block_targets(
        ids, torch.ones(12, dtype=torch.bool), torch.tensor([2, 9]), block_size=4
    )
    assert labels[0].tolist() == [103, 104, 105]
    assert labels[1, :2].tolist() == [110, 111]
    assert valid.tolist() == [[True, True, True], [True, True, False]]


def test_t_68_labels_of_a_block_of_four():
    tokenizer = byte_chatml()
    ids = torch.tensor(tokenizer.encode("abcdefgh", add_special_tokens=False))
    labels, valid = block_targets(
        ids, torch.ones(8, dtype=torch.bool), torch.tensor([3]), block_size=4
    )
    assert tokenizer.decode(labels[0]) == "efg"
    assert valid.shape == (1, 3), "slot 0 is not in the loss, so it has no column"


def test_nothing_behind_a_turn_s_end_is_a_label():
    """After the first unsupervised position everything is dropped, supervised again or not."""
    mask = torch.tensor([0, 1, 1, 0, 1, 1, 1], dtype=torch.bool)
    _, valid = block_targets(torch.arange(7), mask, torch.tensor([1]), block_size=6)
    assert valid.tolist() == [[True, False, False, False, False]]


@given(mask=st.lists(st.booleans(), max_size=40), count=st.integers(1, 50), epoch=st.integers(0, 3))
def test_pitfall_18_anchors_are_supervised_and_so_is_their_next(mask, count, epoch):
    loss_mask = torch.tensor(mask, dtype=torch.bool)
    drawn = sample_anchors(loss_mask, count, seed=1, epoch=epoch, sample_id="a").tolist()
    candidates = [i for i in range(len(mask) - 1) if mask[i] and mask[i + 1]]
    assert valid_anchors(loss_mask).tolist() == candidates
    assert drawn == sorted(set(drawn)), "rising, without replacement"
    assert set(drawn) <= set(candidates)
    assert len(drawn) == min(count, len(candidates))


def test_anchors_depend_on_seed_epoch_and_sample_alone():
    mask = torch.ones(200, dtype=torch.bool)

    def draw(seed: int = 0, epoch: int = 0, sample: str = "a") -> list[int]:
        return sample_anchors(mask, 20, seed=seed, epoch=epoch, sample_id=sample).tolist()

    assert draw() == draw()
    assert len({tuple(d) for d in (draw(), draw(seed=1), draw(epoch=1), draw(sample="b"))}) == 4


def test_anchors_are_drawn_uniformly():
    mask = torch.ones(21, dtype=torch.bool)
    counts = torch.zeros(20)
    for epoch in range(2000):
        counts[sample_anchors(mask, 5, seed=0, epoch=epoch, sample_id="a")] += 1
    # 2000 draws of 5 out of 20: mean 500, standard deviation below 20.
    assert counts.min() > 420
    assert counts.max() < 580


def test_position_weights():
    weights = decay_weights(5, gamma=4.0)
    torch.testing.assert_close(weights, torch.tensor([1.0, 0.77880078, 0.60653066, 0.47236655]))
