"""Weights by what precedes a slot, and the edge of the draft tree."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from objective_reference import all_scores
from paceline.decode.ddtree import build_tree, top_log_probs
from paceline.objective.position_weights import (
    length_losses,
    streak_weights,
    tree_losses,
    tree_threshold,
    tree_weights,
)


def grids(seed: int = 0, blocks: int = 5, depth: int = 6):
    random = torch.Generator().manual_seed(seed)
    log_own = torch.randn(blocks, depth, generator=random, dtype=torch.float64).abs().neg()
    valid = torch.arange(depth) < torch.randint(1, depth + 1, (blocks, 1), generator=random)
    return log_own, valid


def test_pitfall_23_streak_weights_are_detached_and_fall():
    log_own, valid = grids()
    weights = streak_weights(log_own.requires_grad_(), valid, valid, alpha=0.5)
    assert not weights.requires_grad
    both = valid[:, 1:]
    assert (weights[:, 1:] < weights[:, :-1])[both].all()
    assert not weights[~valid].any(), "what is not valid is not waited for"


def test_pitfall_23_without_smoothing_they_are_the_gradient_of_the_expected_streak():
    """S = sum over m of prod over i <= m of q_i: its slope by log q_j is the weight (B.7)."""
    log_own, valid = grids(1)
    log_own.requires_grad_()
    streak = (log_own.exp().where(valid, 1.0).cumprod(dim=1) * valid).sum()
    (slope,) = torch.autograd.grad(streak, log_own)
    weights = streak_weights(log_own, valid, valid, alpha=0.0)
    torch.testing.assert_close(weights, slope)


def test_pitfall_23_streak_weights_by_hand():
    q = torch.tensor([[0.5, 0.25, 0.9]]).log()
    valid = torch.tensor([[True, True, False]])
    # s = 0.75, 0.625, 1: P = 0.75, 0.46875.
    weights = streak_weights(q, valid, valid, alpha=0.5)
    torch.testing.assert_close(weights, torch.tensor([[0.75 + 0.46875, 0.46875, 0.0]]))


def test_a_token_that_is_not_proposed_is_never_right():
    q = torch.tensor([[0.5, 0.0, 0.5]]).log()
    valid = torch.ones((1, 3), dtype=torch.bool)
    proposed = torch.tensor([[True, False, True]])
    weights = streak_weights(q, valid & proposed, valid, alpha=0.0)
    torch.testing.assert_close(weights, torch.tensor([[0.5, 0.0, 0.0]]))
    smoothed = streak_weights(q, valid & proposed, valid, alpha=0.5)
    torch.testing.assert_close(smoothed[0, 2], torch.tensor(0.75 * 0.5 * 0.75))
    edge = torch.tensor([-5.0])
    kept = tree_weights(q, edge, valid & proposed, valid, alpha=0.0, softness=1.0)
    assert torch.isfinite(kept).all()
    assert kept[0, 1] < 1e-20


@settings(deadline=None)
@given(
    seed=st.integers(0, 10**6), depth=st.integers(1, 6), vocab=st.integers(1, 12),
    budget=st.integers(1, 70), scale=st.floats(0.1, 6.0),
)  # fmt: skip
def test_the_edge_is_the_score_of_the_last_node_of_a_draft_tree(seed, depth, vocab, budget, scale):
    random = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(3, depth, vocab, generator=random)
    log_probs = logits.log_softmax(-1)
    best = log_probs.topk(min(budget, vocab), dim=-1).values
    edges = tree_threshold(best, budget)
    for block in range(3):
        tree = build_tree(0, *top_log_probs(logits[block], budget), budget)
        scores = [0.0] * len(tree)
        for node in range(1, len(tree)):
            parent = tree.parents[node]
            level = tree.depths[node] - 1
            scores[node] = scores[parent] + float(log_probs[block, level, tree.tokens[node]])
        if len(tree) - 1 < budget:
            assert edges[block] == -math.inf
        else:
            assert float(edges[block]) == pytest.approx(min(scores[1:]), abs=1e-4)


def test_depths_that_are_not_drafted_take_no_nodes():
    log_probs = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    log_probs = log_probs.sort(dim=-1, descending=True).values
    cut = log_probs.clone()
    cut[:, 2:] = -torch.inf
    torch.testing.assert_close(tree_threshold(cut, 7), tree_threshold(log_probs[:, :2], 7))


def test_a_hard_edge_counts_the_depth_of_the_answer_inside_the_tree():
    """With no softness the loss is 1 - depth / D, with the tree's own depth of the answer."""
    random = torch.Generator().manual_seed(3)
    logits = 2.0 * torch.randn(20, 5, 8, generator=random, dtype=torch.float64)
    labels = (logits + 1.5 * torch.randn(logits.shape, generator=random)).argmax(-1)
    log_probs = logits.log_softmax(-1)
    best = log_probs.sort(dim=-1, descending=True).values
    log_own = log_probs.gather(-1, labels[..., None])[..., 0]
    # Half-way to the score of the next prefix: the last node itself lies on the edge.
    after = tree_threshold(best, 17)
    edge = (tree_threshold(best, 16) + after) / 2
    losses = tree_losses(log_own, edge, torch.ones(20, 5, dtype=torch.bool), softness=1e-7)
    depths = []
    for block in range(20):
        tree = build_tree(0, *top_log_probs(logits[block], 16), 16)
        node = depth = 0
        for token in labels[block].tolist():
            node = tree.children.get((node, token), -1)
            if node < 0:
                break
            depth += 1
        depths.append(depth)
    assert 0 < sum(depths) < 100
    torch.testing.assert_close(losses, 1 - torch.tensor(depths, dtype=torch.float64) / 5)


def test_tree_weights_by_hand():
    log_own, edge = torch.tensor([[-1.0, -2.0, -0.5]]), torch.tensor([-2.5])
    valid = torch.ones((1, 3), dtype=torch.bool)
    inside = torch.sigmoid(torch.tensor([1.5, -0.5, -1.0]) / 0.5)
    kept = inside / torch.tensor([1.0, *inside[:-1]])
    reached = (0.5 * kept + 0.5).cumprod(0)
    found = tree_weights(log_own.requires_grad_(), edge, valid, valid, alpha=0.5, softness=0.5)
    assert not found.requires_grad
    torch.testing.assert_close(found[0], torch.stack([reached[i:].sum() for i in range(3)]))


def test_tree_weights_stay_finite_where_the_answer_is_hopeless():
    log_own, valid = torch.full((2, 6), -40.0), torch.ones((2, 6), dtype=torch.bool)
    edges = torch.tensor([-3.0, -math.inf])
    weights = tree_weights(log_own, edges, valid, valid, alpha=0.5, softness=0.1)
    assert torch.isfinite(weights).all()
    # With alpha 0.5 and nothing covered each slot halves what is left: 1/2 + 1/4 + ... + 1/64.
    torch.testing.assert_close(weights[0, 0], torch.tensor(63 / 64))
    torch.testing.assert_close(weights[1], torch.arange(6.0, 0.0, -1.0))


def test_expected_length_of_sure_acceptance_is_nothing_lost():
    valid = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    acceptance = torch.tensor([[0.5, 0.5, 1.0], [0.5, 0.1, 0.1], [0.2, 0.2, 0.2]])
    wanted = torch.tensor([1 - (0.5 + 0.25 + 0.25) / 3, 0.5, 0.0])
    torch.testing.assert_close(length_losses(acceptance, valid), wanted)


def test_all_scores_of_two_levels():
    assert all_scores([[-1.0, -2.0], [-0.5]]) == [-1.0, -1.5, -2.0, -2.5]
