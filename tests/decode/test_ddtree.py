import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.decode.ddtree import build_tree, top_log_probs
from paceline.decode.verify import ancestor_mask, walk
from paceline.types.tree import DraftTree


@st.composite
def marginals(draw):
    depth = draw(st.integers(1, 4))
    width = draw(st.integers(1, 4))
    seed = draw(st.integers(0, 2**20))
    logits = torch.randn(depth, 8, generator=torch.Generator().manual_seed(seed)) * 2
    return top_log_probs(logits, width)


def prefixes(tree: DraftTree) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(tree)):
        paths.append((*paths[tree.parents[node]], tree.tokens[node]))
    return paths[1:]


@settings(max_examples=150)
@given(marginals=marginals(), budget=st.integers(1, 40))
def test_the_tree_is_exactly_the_most_probable_prefixes(marginals, budget):
    """Proposition 2 of DDTree, against all prefixes there are."""
    tokens, log_probs = marginals
    score = {}
    for depth in range(1, len(tokens) + 1):
        for ranks in itertools.product(range(len(tokens[0])), repeat=depth):
            prefix = tuple(tokens[d][r] for d, r in enumerate(ranks))
            score[prefix] = sum(log_probs[d][r] for d, r in enumerate(ranks))
    tree = build_tree(0, tokens, log_probs, budget)
    taken = prefixes(tree)
    assert len(taken) == len(set(taken)) == min(budget, len(score))
    best = sorted(score.values(), reverse=True)[: len(taken)]
    mine = [score[p] for p in taken]
    assert sorted(mine, reverse=True) == pytest.approx(best, abs=1e-4)
    assert mine == sorted(mine, reverse=True) or all(
        a >= b - 1e-5 for a, b in itertools.pairwise(mine)
    ), "falling"


@given(marginals=marginals())
def test_t_81_trees_are_nested_in_their_budget(marginals):
    trees = [build_tree(0, *marginals, budget) for budget in (1, 4, 16, 64)]
    for smaller, larger in itertools.pairwise(trees):
        assert larger.tokens[: len(smaller)] == smaller.tokens
        assert larger.parents[: len(smaller)] == smaller.parents


@given(seed=st.integers(0, 2**20), depth=st.integers(1, 7))
def test_t_81_width_one_is_the_dflash_chain(seed, depth):
    logits = torch.randn(depth, 12, generator=torch.Generator().manual_seed(seed))
    tree = build_tree(3, *top_log_probs(logits, 1), 64)
    assert tree == DraftTree.chain(3, logits.argmax(-1).tolist())


@given(
    marginals=marginals(),
    choices=st.lists(st.integers(0, 7), min_size=70, max_size=70),
)
def test_t_81_accepted_length_never_falls_with_the_budget(marginals, choices):
    """The same greedy target: what it says after a prefix does not depend on the tree."""

    def say(path: tuple[int, ...]) -> int:
        return choices[hash(path) % 70]

    depths = []
    for budget in (1, 4, 16, 64):
        tree = build_tree(0, *marginals, budget)
        says = [say(()), *(say(path) for path in prefixes(tree))]
        depths.append(walk(tree, says.__getitem__).depth)
    assert depths == sorted(depths)


def test_t_81_budget_0_is_an_error():
    with pytest.raises(ValueError, match="budget of 1 or more, not 0"):
        build_tree(0, [[1]], [[0.0]], 0)


def test_log_probs_are_over_the_full_vocabulary():
    logits = torch.tensor([[0.0, math.log(3.0), 0.0, math.log(5.0)]])
    tokens, log_probs = top_log_probs(logits, 2)
    assert tokens == [[3, 1]]
    assert log_probs[0] == pytest.approx([math.log(0.5), math.log(0.3)])


def test_equal_probabilities_are_ordered_by_token():
    tokens, log_probs = top_log_probs(torch.zeros(2, 5), 5)
    assert tokens == [[0, 1, 2, 3, 4]] * 2
    first = build_tree(9, tokens, log_probs, 12)
    assert first == build_tree(9, tokens, log_probs, 12)


@st.composite
def random_trees(draw):
    size = draw(st.integers(1, 14))
    parents = [-1, *(draw(st.integers(0, node - 1)) for node in range(1, size))]
    tokens = [draw(st.integers(0, 3)) for _ in range(size)]
    return DraftTree(tokens=tuple(tokens), parents=tuple(parents))


@given(tree=random_trees())
def test_the_mask_shows_exactly_the_ancestors(tree):
    mask = ancestor_mask(tree)
    for node in range(len(tree)):
        line, up = set(), node
        while up != -1:
            line.add(up)
            up = tree.parents[up]
        assert set(torch.nonzero(mask[node]).flatten().tolist()) == line
        assert len(line) == tree.depths[node] + 1


@given(tree=random_trees(), choices=st.lists(st.integers(0, 3), min_size=14, max_size=14))
def test_the_walk_commits_only_what_the_target_says(tree, choices):
    accepted = walk(tree, choices.__getitem__)
    assert accepted.tokens == tuple(choices[node] for node in accepted.path)
    for parent, node in itertools.pairwise(accepted.path):
        assert tree.parents[node] == parent
        assert tree.tokens[node] == choices[parent]
    last = accepted.path[-1]
    assert all(
        not (p == last and t == choices[last])
        for p, t in zip(tree.parents, tree.tokens, strict=True)
    ), "nothing further would have been accepted"


def test_a_tree_with_a_child_before_its_parent_is_refused():
    with pytest.raises(ValueError, match="parents must come before"):
        DraftTree(tokens=(1, 2, 3), parents=(-1, 2, 0))
