import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from fixtures_chatml import byte_chatml
from paceline.objective.blocks import (
    block_targets,
    decay_weights,
    sample_anchors,
    valid_anchors,
)
from paceline.objective.cross_entropy import cross_entropy


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


@pytest.mark.parametrize("chunk", [1, 93, 230, 1 << 20])
def test_chunked_cross_entropy_equals_fp64_autograd(chunk):
    torch.manual_seed(0)
    rows, hidden_size, vocab = 17, 6, 31
    hidden = torch.randn(rows, hidden_size, requires_grad=True)
    lm_head = torch.randn(vocab, hidden_size)
    labels = torch.randint(0, vocab, (rows,))
    weights = torch.rand(rows)
    total, losses = cross_entropy(hidden, lm_head, labels, weights, chunk=chunk)
    (3.0 * total).backward()

    reference = hidden.detach().double().requires_grad_()
    logits = reference @ lm_head.double().T
    nll = F.cross_entropy(logits, labels, reduction="none")
    (3.0 * (nll * weights.double()).sum()).backward()

    torch.testing.assert_close(losses.nll.double(), nll.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden.grad.double(), reference.grad, rtol=1e-5, atol=1e-5)
    assert torch.equal(losses.hit, logits.argmax(-1) == labels)
    wanted = float((nll * weights.double()).sum().detach())
    assert float(total.detach()) == pytest.approx(wanted, rel=1e-5)


def test_in_bfloat16_the_gradient_of_a_sure_label_keeps_its_precision():
    """softmax - one-hot is small there: taken after rounding, it would be noise."""
    torch.manual_seed(0)
    lm_head = torch.randn(50, 64).bfloat16()
    labels = torch.arange(8)
    hidden = (0.2 * lm_head[:8]).float().requires_grad_()
    total, losses = cross_entropy(hidden, lm_head, labels, torch.ones(8), chunk=200)
    total.backward()
    assert losses.nll.max() < 0.1
    reference = hidden.detach().double().requires_grad_()
    logits = (reference.bfloat16() @ lm_head.T).double()
    slopes = logits.softmax(-1) - F.one_hot(labels, 50)
    wanted = slopes @ lm_head.double()
    error = (hidden.grad.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert error.max() < 0.05


def test_cross_entropy_without_gradient_forms_none():
    hidden = torch.randn(4, 3)
    total, _ = cross_entropy(
        hidden, torch.randn(9, 3), torch.zeros(4, dtype=torch.int64), torch.ones(4), chunk=2
    )
    assert not total.requires_grad


def test_cross_entropy_of_no_rows_is_zero():
    hidden = torch.zeros(0, 3, requires_grad=True)
    total, _ = cross_entropy(
        hidden, torch.randn(9, 3), torch.zeros(0, dtype=torch.int64), torch.zeros(0), chunk=4
    )
    total.backward()
    assert total.item() == 0.0
    assert hidden.grad.shape == (0, 3)


def test_rows_of_logits_that_exist_are_limited_by_their_number(monkeypatch):
    """At a vocabulary of 100 a chunk of 250 logits holds two rows, at 1000 one."""
    seen = []
    amax = torch.Tensor.amax

    def spy(self, *arguments, **keywords):
        seen.append(self.numel())
        return amax(self, *arguments, **keywords)

    monkeypatch.setattr(torch.Tensor, "amax", spy)
    for vocab in (100, 1000):
        cross_entropy(
            torch.randn(5, 3),
            torch.randn(vocab, 3),
            torch.zeros(5, dtype=torch.int64),
            torch.ones(5),
            chunk=250,
        )
    assert seen == [200, 200, 100, 1000, 1000, 1000, 1000, 1000]


def test_memory_is_that_of_one_chunk():
    """Counted by the allocator: tensors alive at once beyond the inputs."""
    rows, vocab, chunk = 64, 5000, 20000
    hidden = torch.randn(rows, 8, requires_grad=True)
    lm_head = torch.randn(vocab, 8)
    labels = torch.zeros(rows, dtype=torch.int64)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        cross_entropy(hidden, lm_head, labels, torch.ones(rows), chunk=chunk)
    held = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    assert 4 * chunk <= peak <= 1.2 * 4 * chunk
