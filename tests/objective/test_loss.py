"""The objective's value and gradient against autograd in fp64, and what the chunks take."""

import itertools
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from objective_reference import reference_sum
from paceline.objective.loss import Blocks, Objective, Teacher, objective_loss
from paceline.recipe.objective_terms import (
    NEEDS_TEACHER,
    WEIGHS_ITSELF,
    ObjectiveTerm,
    Positions,
    TermKind,
)

HIDDEN, VOCAB = 5, 7
PLACES = [*itertools.product(
    [k for k in get_args(TermKind) if k not in WEIGHS_ITSELF], get_args(Positions)
), *((kind, "decay") for kind in sorted(WEIGHS_ITSELF))]  # fmt: skip


def term_of(kind: str, positions: str = "uniform", **more: Any) -> ObjectiveTerm:
    return ObjectiveTerm(kind=kind, positions=positions, **{"gamma": 3.0, "budget": 9, **more})


class World:
    """Random blocks with everything that any term reads, fp64."""

    def __init__(
        self, seed: int = 0, *, blocks: int = 4, depth: int = 4, reduced: bool = False
    ) -> None:
        random = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=random, dtype=torch.float64)

        self.whole = normal(VOCAB, HIDDEN)
        self.columns = torch.tensor([0, 2, 3, 6]) if reduced else None
        self.head = self.whole if self.columns is None else self.whole[self.columns]
        self.hidden = normal(blocks, depth, HIDDEN)
        shape = (blocks, depth)
        lengths = torch.randint(0, depth + 1, (blocks, 1), generator=random)
        proposed = torch.rand(*shape, generator=random) > (0.3 if reduced else -1)
        self.blocks = Blocks(
            labels=torch.randint(0, self.head.shape[0], shape, generator=random),
            valid=torch.arange(depth) < lengths,
            proposed=proposed,
        )
        last = normal(6, HIDDEN)
        rows = torch.randint(0, 6, shape, generator=random)
        self.teacher = Teacher(last=last, rows=rows, lm_head=self.whole, columns=self.columns)

    def loss(self, terms, scales=None, chunk=1 << 20) -> tuple[Objective, torch.Tensor]:
        """The loss, and its gradient towards the hidden states."""
        hidden = self.hidden.clone().requires_grad_()
        scales = [1.0] * len(terms) if scales is None else scales
        found = objective_loss(
            hidden, self.head, self.blocks, terms, scales, chunk=chunk, teacher=self.teacher
        )
        found.total.backward()
        return found, hidden.grad

    def reference(self, terms, scales=None) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.hidden.clone().requires_grad_()
        scales = [1.0] * len(terms) if scales is None else scales
        target = self.teacher.last[self.teacher.rows] @ self.whole.T
        blocks = self.blocks
        total = 0.0 * hidden.sum()
        for term, scale in zip(terms, scales, strict=True):
            total = total + scale * reference_sum(
                term, hidden @ self.head.T, blocks.labels, blocks.valid, blocks.proposed,
                target, self.columns,
            )  # fmt: skip
        total.backward()
        return total.detach(), hidden.grad


def same(found, wanted, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("kind", "positions"), PLACES)
@pytest.mark.parametrize("reduced", [False, True], ids=["full", "reduced"])
def test_each_term_is_its_formula_and_so_is_its_gradient(kind, positions, reduced):
    world = World(1, reduced=reduced)
    # fp32 weights of positions make up all of the difference.
    for more in ({}, {"temperature": 2.0, "alpha": 0.2, "eta": 1.0, "budget": 4}):
        terms = [term_of(kind, positions, **more)]
        found, gradient = world.loss(terms)
        total, wanted = world.reference(terms)
        same(found.total.detach(), total, 1e-7)
        same(gradient, wanted, 1e-7)
        assert wanted.abs().max() > 1e-3 or kind == "confident_right"
        assert float(found.sums[0]) == float(found.total.detach())


def test_the_confident_terms_were_not_empty():
    for kind in ("confident_right", "overconfident_wrong"):
        _, gradient = World(1).loss([term_of(kind)])
        assert gradient.abs().max() > 1e-3


@settings(deadline=None, max_examples=60)
@given(
    picked=st.lists(
        st.tuples(st.sampled_from(PLACES), st.floats(0.0, 2.0), st.sampled_from([0.5, 1.0, 2.0])),
        min_size=1, max_size=4,
    ),
    seed=st.integers(0, 10**6), blocks=st.integers(1, 5), depth=st.integers(1, 4),
    reduced=st.booleans(), chunk=st.integers(1, 200),
)  # fmt: skip
def test_any_mix_in_any_chunks_is_the_sum_of_its_formulas(
    picked, seed, blocks, depth, reduced, chunk
):
    world = World(seed, blocks=blocks, depth=depth, reduced=reduced)
    terms = [term_of(kind, positions, temperature=t) for (kind, positions), _, t in picked]
    scales = [scale for _, scale, _ in picked]
    found, gradient = world.loss(terms, scales, chunk)
    total, wanted = world.reference(terms, scales)
    same(found.total.detach(), total, 1e-6)
    same(gradient, wanted, 1e-6)


@pytest.mark.parametrize("reduced", [False, True], ids=["full", "reduced"])
def test_gradients_of_b_7_in_closed_form(reduced):
    """Towards the logits: q - p for KL, -q (1[q <= p] - s) for TV, that over alpha for LK."""
    world = World(3, blocks=1, depth=1, reduced=reduced)
    world.blocks.valid[:] = True
    world.blocks.proposed[:] = True
    q = (world.hidden[0] @ world.head.T).softmax(-1)
    z = world.teacher.last[world.teacher.rows][0] @ world.whole.T
    p_all = z.softmax(-1)
    p = p_all if world.columns is None else p_all[:, world.columns]
    renormalised = p / p.sum()
    below = (q <= p).double()
    alpha = torch.minimum(p, q).sum()
    tv = -q * (below - (q * below).sum())
    share = torch.exp(-3.0 * alpha)
    closed = {
        "kl": q - renormalised,
        "tv": tv,
        "lk_alpha": tv / alpha,
        "lk_hybrid": share * (q - renormalised) + (1 - share) * tv,
        "expected_length": tv,
        "reverse_kl": q * ((q / renormalised).log() - (q * (q / renormalised).log()).sum()),
    }
    assert set(closed) == NEEDS_TEACHER
    for kind, slope in closed.items():
        _, gradient = world.loss([term_of(kind)])
        same(gradient[0], slope @ world.head)


def test_lk_alpha_of_a_sure_target_is_cross_entropy():
    world = World(3)
    world.teacher = replace(world.teacher, last=1e3 * world.teacher.last)
    target = (world.teacher.last[world.teacher.rows] @ world.whole.T).softmax(-1)
    assert target.max(-1).values.min() > 1 - 1e-9
    world.blocks = replace(world.blocks, labels=target.argmax(-1))
    same(
        world.loss([term_of("lk_alpha")])[0].total,
        world.loss([term_of("cross_entropy")])[0].total,
    )


def test_kl_to_itself_is_nothing_at_any_temperature():
    world = World(2)
    flat = world.hidden.flatten(0, 1)
    rows = torch.arange(flat.shape[0]).view(world.hidden.shape[:2])
    world.teacher = replace(world.teacher, last=flat, rows=rows)
    terms = [term_of(kind, temperature=t) for kind in ("kl", "reverse_kl") for t in (1.0, 3.0)]
    found, gradient = world.loss(terms)
    same(found.sums, torch.zeros(4).double())
    same(gradient, torch.zeros_like(gradient))
    same(world.loss([term_of("tv")])[0].sums, torch.zeros(1).double())


def test_pitfall_08_the_teacher_of_slot_k_stands_at_anchor_plus_k_minus_1():
    """`last` is what lm_head multiplies, and is normed no second time."""
    world = World(2)
    shifted = replace(world.teacher, rows=(world.teacher.rows + 1) % 6)
    before, _ = world.loss([term_of("kl")])
    same(before.total.detach(), world.reference([term_of("kl")])[0])
    world.teacher = shifted
    after, _ = world.loss([term_of("kl")])
    assert abs(float(before.sums[0] - after.sums[0])) > 1e-2


def test_pitfall_25_acceptance_is_at_most_the_targets_mass_on_the_draft_vocabulary():
    world = World(5, blocks=8, reduced=True)
    assert world.columns is not None
    found, _ = world.loss([term_of("tv")])
    target = (world.teacher.last[world.teacher.rows] @ world.whole.T).softmax(-1)
    mass = target[..., world.columns].sum(-1)[world.blocks.valid]
    rows = world.blocks.valid.sum()
    assert float(found.sums[0]) >= float((1 - mass).sum())
    assert mass.max() < 0.999
    # Renormalised over the drafter's tokens it would be less.
    narrow = replace(world.teacher, lm_head=world.head, columns=None)
    world.teacher = narrow
    renormalised, _ = world.loss([term_of("tv")])
    assert float(renormalised.sums[0]) < float(found.sums[0]) - 1e-3
    assert 0 < float(renormalised.sums[0]) < rows


def test_labels_that_are_not_proposed_have_soft_terms_and_no_hard_ones():
    world = World(4, reduced=True)
    world.blocks.valid[:] = True
    world.blocks.proposed[:] = False
    hard = [term_of("cross_entropy"), term_of("confident_right")]
    found, gradient = world.loss(hard)
    assert found.sums.tolist() == [0.0, 0.0]
    assert not gradient.any()
    assert torch.isinf(found.nll).all()
    assert not found.hit.any()
    soft, _ = world.loss([*hard, term_of("kl"), term_of("overconfident_wrong")])
    assert soft.sums[:2].tolist() == [0.0, 0.0]
    assert (soft.sums[2:] > 0).all()
    assert torch.isfinite(soft.total)


def test_a_term_without_scale_costs_nothing_and_needs_no_teacher():
    world = World(1)
    with pytest.raises(ValueError, match="no teacher was given"):
        objective_loss(world.hidden, world.head, world.blocks, [term_of("kl")], [1.0], chunk=100)
    found = objective_loss(
        world.hidden, world.head, world.blocks, [term_of("cross_entropy"), term_of("kl")],
        [1.0, 0.0], chunk=100,
    )  # fmt: skip
    alone, _ = world.loss([term_of("cross_entropy")])
    assert float(found.total) == float(alone.total.detach())
    assert float(found.sums[1]) == 0.0


@pytest.mark.parametrize("kind", get_args(TermKind))
def test_pitfall_24_blocks_without_a_valid_slot_are_finite_zeros(kind):
    world = World(1)
    world.blocks.valid[:] = False
    found, gradient = world.loss([term_of(kind, **(
        {} if kind in WEIGHS_ITSELF else {"positions": "streak"}
    ))])  # fmt: skip
    assert float(found.total.detach()) == 0.0
    assert not gradient.any()


def rows_as_blocks(hidden: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, Blocks]:
    ok = torch.ones((labels.numel(), 1), dtype=torch.bool)
    return hidden[:, None], Blocks(labels=labels[:, None], valid=ok, proposed=ok)


@pytest.mark.parametrize("chunk", [1, 93, 230, 1 << 20])
def test_in_fp32_the_chunked_gradient_equals_fp64_autograd(chunk):
    torch.manual_seed(0)
    rows, hidden_size, vocab = 17, 6, 31
    hidden = torch.randn(rows, hidden_size, requires_grad=True)
    lm_head = torch.randn(vocab, hidden_size)
    labels = torch.randint(0, vocab, (rows,))
    stacked, blocks = rows_as_blocks(hidden, labels)
    found = objective_loss(stacked, lm_head, blocks, [term_of("cross_entropy")], [2.0], chunk=chunk)
    (3.0 * found.total).backward()

    reference = hidden.detach().double().requires_grad_()
    logits = reference @ lm_head.double().T
    nll = F.cross_entropy(logits, labels, reduction="none")
    (6.0 * nll.sum()).backward()

    torch.testing.assert_close(found.nll[:, 0].double(), nll.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden.grad.double(), reference.grad, rtol=1e-5, atol=1e-5)
    assert torch.equal(found.hit[:, 0], logits.argmax(-1) == labels)
    assert float(found.total.detach()) == pytest.approx(2.0 * float(nll.detach().sum()), rel=1e-5)
    assert found.total.dtype == torch.float32


def test_pitfall_22_in_bfloat16_the_gradient_of_a_sure_label_keeps_its_precision():
    """softmax - one-hot is small there: taken after rounding, it would be noise."""
    torch.manual_seed(0)
    lm_head = torch.randn(50, 64).bfloat16()
    labels = torch.arange(8)
    hidden = (0.2 * lm_head[:8]).float().requires_grad_()
    stacked, blocks = rows_as_blocks(hidden, labels)
    found = objective_loss(stacked, lm_head, blocks, [term_of("cross_entropy")], [1.0], chunk=200)
    found.total.backward()
    assert found.nll.max() < 0.1
    reference = hidden.detach().double().requires_grad_()
    logits = (reference.bfloat16() @ lm_head.T).double()
    slopes = logits.softmax(-1) - F.one_hot(labels, 50)
    wanted = slopes @ lm_head.double()
    error = (hidden.grad.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert error.max() < 0.05


def test_pitfall_22_in_bfloat16_kl_to_a_near_target_keeps_its_precision():
    torch.manual_seed(0)
    lm_head = torch.randn(50, 64).bfloat16()
    hidden = (0.3 * torch.randn(8, 64)).bfloat16().float().requires_grad_()
    last = (hidden.detach() + 0.05 * torch.randn(8, 64)).bfloat16()
    stacked, blocks = rows_as_blocks(hidden, torch.zeros(8, dtype=torch.int64))
    teacher = Teacher(last=last, rows=torch.arange(8)[:, None], lm_head=lm_head)
    objective_loss(
        stacked, lm_head, blocks, [term_of("kl")], [1.0], chunk=200, teacher=teacher
    ).total.backward()
    own = (hidden.detach().bfloat16() @ lm_head.T).double().softmax(-1)
    wanted = (own - (last @ lm_head.T).double().softmax(-1)) @ lm_head.double()
    error = (hidden.grad.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert error.max() < 0.05


def test_without_gradient_none_is_formed():
    world = World(1)
    found = objective_loss(
        world.hidden, world.head, world.blocks, [term_of("cross_entropy")], [1.0], chunk=2
    )
    assert not found.total.requires_grad


def test_no_blocks_are_zero():
    hidden = torch.zeros(0, 3, HIDDEN, requires_grad=True)
    none = torch.zeros((0, 3), dtype=torch.bool)
    blocks = Blocks(labels=none.long(), valid=none, proposed=none)
    terms = [term_of("cross_entropy", "streak")]
    found = objective_loss(hidden, torch.randn(9, HIDDEN), blocks, terms, [1.0], chunk=4)
    found.total.backward()
    assert found.total.item() == 0.0
    assert hidden.grad.shape == hidden.shape


@pytest.mark.parametrize(
    ("positions", "seen"), [("decay", {100: [200, 200, 200], 1000: [1000] * 6}),
                            ("streak", {100: [300, 300], 1000: [3000, 3000]})]
)  # fmt: skip
def test_logits_that_exist_are_limited_by_their_number(monkeypatch, positions, seen):
    """At a vocabulary of 100 a chunk of 250 holds two rows, at 1000 one; or whole blocks."""
    sizes = []
    amax = torch.Tensor.amax

    def spy(self, *arguments, **keywords):
        sizes.append(self.numel())
        return amax(self, *arguments, **keywords)

    monkeypatch.setattr(torch.Tensor, "amax", spy)
    ok = torch.ones((2, 3), dtype=torch.bool)
    blocks = Blocks(labels=ok.long(), valid=ok, proposed=ok)
    terms = [term_of("cross_entropy", positions)]
    for vocab, wanted in seen.items():
        sizes.clear()
        objective_loss(torch.randn(2, 3, 3), torch.randn(vocab, 3), blocks, terms, [1.0], chunk=250)
        assert sizes == wanted


CROSS_ENTROPY = (term_of("cross_entropy", "streak_decay"),)
MIX = (*CROSS_ENTROPY, term_of("kl", "decay", temperature=2.0), term_of("confident_right", "decay"))


@pytest.mark.parametrize(
    ("terms", "copies"), [(CROSS_ENTROPY, 1.0), (MIX, 7.0)], ids=["cross_entropy", "mix"]
)
def test_memory_is_that_of_some_chunks(terms, copies):
    """Counted by the allocator: tensors alive at once beyond the inputs."""
    vocab, chunk, depth = 5000, 20000, 4
    peaks = {}
    for count in (16, 64):
        hidden = torch.randn(count, depth, 8, requires_grad=True)
        lm_head = torch.randn(vocab, 8)
        ok = torch.ones((count, depth), dtype=torch.bool)
        blocks = Blocks(labels=ok.long(), valid=ok, proposed=ok)
        rows = torch.arange(count * depth).view(count, depth)
        teacher = Teacher(last=torch.randn(rows.numel(), 8), rows=rows, lm_head=lm_head)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            objective_loss(
                hidden, lm_head, blocks, terms, [1.0] * len(terms), chunk=chunk, teacher=teacher
            )
        held = peak = 0
        for event in profiler.profiler.kineto_results.events():
            if event.name() == "[memory]":
                held += event.nbytes()
                peak = max(peak, held)
        peaks[count] = peak
    assert 4 * chunk * copies <= peaks[16] <= 1.2 * 4 * chunk * copies
    assert peaks[64] - peaks[16] < 0.5 * 4 * chunk, "only what each row keeps of itself"
