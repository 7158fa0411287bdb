import math

import pytest
import torch

from paceline.objective.terms import SlotCounts, names, needs_teacher, normaliser, scales
from paceline.recipe.objective_terms import ObjectiveTerm, weight_at

VALID = torch.tensor([[True, True, True], [True, True, False], [False, False, False]])
PROPOSED = torch.tensor([[True, False, True], [True, True, True], [True, True, True]])
COUNTS = SlotCounts.of(VALID, PROPOSED)


def test_counts_are_of_tokens_alone_and_add_up():
    assert SlotCounts(valid=(2, 2, 1), counted=(2, 1, 1), blocks=2) == COUNTS
    parts = [SlotCounts.of(VALID[i : i + 1], PROPOSED[i : i + 1]) for i in range(3)]
    assert parts[0] + parts[1] + parts[2] == COUNTS


@pytest.mark.parametrize(
    ("kind", "positions", "wanted"),
    [
        ("cross_entropy", "uniform", 4),
        ("cross_entropy", "streak", 4),
        ("cross_entropy", "tree", 4),
        ("cross_entropy", "decay", 2 + math.exp(-0.5) + math.exp(-1)),
        ("cross_entropy", "streak_decay", 2 + math.exp(-0.5) + math.exp(-1)),
        ("confident_right", "uniform", 4),
        ("overconfident_wrong", "uniform", 5),
        ("kl", "uniform", 5),
        ("kl", "decay", 2 + 2 * math.exp(-0.5) + math.exp(-1)),
        ("expected_length", "decay", 2),
        ("tree", "decay", 2),
    ],
)
def test_what_a_sum_is_divided_by(kind, positions, wanted):
    term = ObjectiveTerm(kind=kind, positions=positions, gamma=2.0)
    assert normaliser(term, COUNTS) == pytest.approx(wanted, rel=1e-6)


def test_nothing_to_count_has_no_scale():
    none = SlotCounts.of(VALID & False, PROPOSED)
    terms = [ObjectiveTerm(kind=kind, gamma=2.0) for kind in ("cross_entropy", "kl", "tree")]
    assert scales(terms, none, 0.5) == [0.0, 0.0, 0.0]
    only_soft = scales(terms, SlotCounts.of(VALID, PROPOSED & False), 0.5)
    assert only_soft[0] == 0.0
    assert min(only_soft[1:]) > 0


def test_a_weight_goes_along_its_ramp():
    term = ObjectiveTerm(kind="kl", weight=1.0, end_weight=3.0, ramp=(0.2, 0.6))
    found = [weight_at(term, p) for p in (0.0, 0.2, 0.3, 0.4, 0.6, 1.0)]
    assert found == pytest.approx([1.0, 1.0, 1.5, 2.0, 3.0, 3.0])
    step = ObjectiveTerm(kind="kl", weight=0.0, end_weight=1.0, ramp=(0.8, 0.8))
    assert [weight_at(step, p) for p in (0.79, 0.8, 0.9)] == [0.0, 1.0, 1.0]
    assert weight_at(ObjectiveTerm(kind="kl", weight=0.3), 0.9) == 0.3


def test_the_teacher_is_needed_where_a_term_of_it_weighs():
    terms = [ObjectiveTerm(kind="cross_entropy"), ObjectiveTerm(kind="kl")]
    assert not needs_teacher(terms, [1.0, 0.0])
    assert needs_teacher(terms, [0.0, 1.0])


def test_terms_of_one_kind_have_names_of_their_own():
    kinds = ("cross_entropy", "kl", "cross_entropy")
    found = names([ObjectiveTerm(kind=kind) for kind in kinds])
    assert found == ["cross_entropy", "kl", "cross_entropy_2"]
