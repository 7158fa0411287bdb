import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.decode.ddtree import (
    MarginalScorer,
    best_first,
    build_tree,
    draft_tree,
    top_log_probs,
)
from paceline.decode.rows import ranks_of, top_columns
from paceline.decode.verify import ancestor_mask, walk
from paceline.types.tree import DraftTree, TreeShape

COARSE = (0.0, -0.25, -0.5, -1.0, -1.5)
"""Sums of these are exact, so that ties are ties; 0 makes a child cost what its parent costs."""


@dataclass(frozen=True)
class Conditional:
    """A score that depends on the token before, from a seed; some tokens have nothing after."""

    depth: int
    seed: int
    coarse: bool

    def children(self, depth, parent_token):
        random = torch.Generator().manual_seed(self.seed + 97 * depth + 7919 * parent_token)
        count = int(torch.randint(0, 4, (), generator=random)) or int(depth == 1)
        if self.coarse:
            picked = torch.randint(0, len(COARSE), (count,), generator=random).tolist()
            log_probs = [COARSE[i] for i in picked]
        else:
            log_probs = (-torch.rand(count, generator=random).double()).tolist()
        pairs = sorted(zip(log_probs, range(count), strict=True), key=lambda p: (-p[0], p[1]))
        return [token for _, token in pairs], [log_prob for log_prob, _ in pairs]


@st.composite
def scorers(draw):
    depth = draw(st.integers(1, 4))
    seed = draw(st.integers(0, 2**20))
    coarse = draw(st.booleans())
    if draw(st.booleans()):
        return Conditional(depth, seed, coarse)
    alike = Conditional(depth, seed, coarse)
    rows = [alike.children(d, 0) for d in range(1, depth + 1)]
    return MarginalScorer([tokens for tokens, _ in rows], [log_probs for _, log_probs in rows])


caps = st.one_of(st.none(), st.integers(1, 4))


def every_prefix(scorer, root, *, width=None, depth=None):
    """All prefixes within the caps, in the documented order: the definition of what is built.

    Cost first, then the order of the parents, then the rank among siblings.
    """
    found = {(): ((-1.0,), 0.0)}
    level = [()]
    for number in range(1, min(scorer.depth, depth or 99) + 1):
        below = []
        for prefix in level:
            key, cost = found[prefix]
            tokens, log_probs = scorer.children(number, prefix[-1] if prefix else root)
            pairs = zip(tokens, log_probs, strict=True)
            for rank, (token, log_prob) in enumerate(itertools.islice(pairs, width)):
                child = (*prefix, token)
                found[child] = ((cost - log_prob, key, rank), cost - log_prob)
                below.append(child)
        level = below
    del found[()]
    return sorted(found, key=lambda prefix: found[prefix][0])


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


@settings(max_examples=300)
@given(scorer=scorers(), budget=st.integers(1, 90), width=caps, depth=caps)
def test_the_tree_is_exactly_the_most_probable_prefixes(scorer, budget, width, depth):
    """Proposition 2 of DDTree, against all prefixes there are: the same ones in the same order."""
    tree = best_first(1, scorer, TreeShape(budget, width, depth))
    wanted = every_prefix(scorer, 1, width=width, depth=depth)
    assert prefixes(tree) == wanted[:budget]
    assert len(set(wanted)) == len(wanted)


@given(scorer=scorers(), width=caps, depth=caps)
def test_t_81_trees_are_nested_in_their_budget(scorer, width, depth):
    trees = [best_first(0, scorer, TreeShape(budget, width, depth)) for budget in (1, 4, 16, 64)]
    for smaller, larger in itertools.pairwise(trees):
        assert larger.tokens[: len(smaller)] == smaller.tokens
        assert larger.parents[: len(smaller)] == smaller.parents


@given(marginals=marginals(), budget=st.integers(1, 40))
def test_a_marginal_scorer_is_a_conditional_one_that_ignores_the_parent(marginals, budget):
    class Looked:
        depth = len(marginals[0])

        def children(self, depth, _token):
            return marginals[0][depth - 1], marginals[1][depth - 1]

    assert best_first(5, Looked(), TreeShape(budget)) == build_tree(5, *marginals, budget)


def test_a_conditional_score_spends_nodes_on_what_belongs_together():
    """ "of course" and "no problem": the two mixtures are worth nothing."""
    of, course, no, problem = range(4)
    pairs = {of: ([course, problem], [-0.1, -5.0]), no: ([problem, course], [-0.1, -5.0])}

    class Pairs:
        depth = 2

        def children(self, depth, parent_token):
            return ([of, no], [-0.6, -0.8]) if depth == 1 else pairs[parent_token]

    assert prefixes(best_first(9, Pairs(), TreeShape(4))) == [
        (of,),
        (of, course),
        (no,),
        (no, problem),
    ]


@pytest.mark.parametrize("log_probs", [[[0.5, -1.0], [-1.0]], [[-1.0, -0.5], [-1.0]]])
def test_log_probabilities_that_rise_or_are_above_0_are_refused(log_probs):
    with pytest.raises(ValueError, match="at depth 1 rise or are above 0"):
        build_tree(0, [[1, 2], [1]], log_probs, 4)


def test_no_node_needs_a_rank_or_level_beyond_those_of_its_shape():
    """Depth d and rank r stand behind d - 1 ancestors and r siblings, whatever the scores."""
    flat = [[0.0] * 9] * 9
    for budget in range(1, 9):
        shape = TreeShape(budget)
        tree = build_tree(0, [list(range(9))] * 9, flat, shape)
        assert max(tree.depths) <= shape.levels(9) == budget
        narrow = [row[: shape.ranks] for row in flat]
        assert build_tree(0, [list(range(budget))] * 9, narrow, shape) == tree


@given(seed=st.integers(0, 2**20), depth=st.integers(1, 7))
def test_t_81_width_one_is_the_dflash_chain(seed, depth):
    logits = torch.randn(depth, 12, generator=torch.Generator().manual_seed(seed))
    chain = DraftTree.chain(3, logits.argmax(-1).tolist())
    assert build_tree(3, *top_log_probs(logits, 1), 64) == chain
    assert draft_tree(3, logits, TreeShape(64, width=1)) == chain
    assert draft_tree(3, logits, TreeShape(64, width=1, depth=2)) == DraftTree.chain(
        3, chain.tokens[1:3]
    )


@given(
    marginals=marginals(),
    choices=st.lists(st.integers(0, 7), min_size=70, max_size=70),
)
def test_t_81_accepted_length_never_falls_with_the_budget(marginals, choices):
    """The same greedy target: what it says after a prefix does not depend on the tree."""

    def say(path: tuple[int, ...]) -> int:
        return choices[hash(path) % 70]

    depths = []
    for budget in (*range(1, 24), 64, 256, 1024):
        tree = build_tree(0, *marginals, budget)
        says = [say(()), *(say(path) for path in prefixes(tree))]
        depths.append(walk(tree, says.__getitem__).depth)
    assert depths == sorted(depths)


@pytest.mark.parametrize("name", ["budget", "width", "depth"])
@pytest.mark.parametrize("value", [0, -3])
def test_t_81_budget_0_and_width_0_are_errors(name, value):
    with pytest.raises(ValueError, match=f"a {name} of 1 or more, not {value}"):
        TreeShape(**({"budget": 4} | {name: value}))


def test_t_81_a_tree_of_budget_0_is_an_error():
    with pytest.raises(ValueError, match="budget of 1 or more, not 0"):
        build_tree(0, [[1]], [[0.0]], 0)


def test_log_probs_are_over_the_full_vocabulary():
    logits = torch.tensor([[0.0, math.log(3.0), 0.0, math.log(5.0)]])
    tokens, log_probs = top_log_probs(logits, 2)
    assert tokens == [[3, 1]]
    assert log_probs[0] == pytest.approx([math.log(0.5), math.log(0.3)])


@settings(max_examples=200)
@given(
    seed=st.integers(0, 2**20),
    columns=st.integers(1, 700),
    count=st.integers(1, 40),
    levels=st.sampled_from([1, 3, 50, 100_000]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_the_largest_columns_are_exact_with_ties_by_column(seed, columns, count, levels, dtype):
    """Few different values, so that the last places are shared; 0.0 and -0.0 are equal."""
    random = torch.Generator().manual_seed(seed)
    rows = (torch.randint(-levels, levels + 1, (3, columns), generator=random) / levels).to(dtype)
    rows[rows == 0] *= torch.where(torch.rand(3, columns, generator=random) < 0.5, 1.0, -1.0)[
        rows == 0
    ].to(dtype)
    count = min(count, columns)
    values, found = top_columns(rows, count)
    for row in range(3):
        line = rows[row].tolist()
        wanted = sorted(range(columns), key=lambda c: (-line[c], c))[:count]
        assert found[row].tolist() == wanted
        assert values[row].tolist() == [line[c] for c in wanted]
        assert ranks_of(rows[[row] * count], found[row]).tolist() == list(range(count))


def test_infinite_logits_keep_their_place():
    row = torch.full((1, 300), -math.inf)
    row[0, 7], row[0, 250], row[0, 3] = 1.0, 2.0, math.inf
    assert top_columns(row, 5)[1].tolist() == [[3, 250, 7, 0, 1]]


@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
def test_log_probabilities_are_exact_at_any_scale_and_never_above_0(scale):
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(3)) * scale
    logits[:, 9] = -math.inf
    logits[3, 1:] = -math.inf
    tokens, found = top_log_probs(logits, 20)
    wanted = logits.double().log_softmax(-1).gather(-1, torch.tensor(tokens))
    torch.testing.assert_close(torch.tensor(found).double(), wanted, rtol=2e-6, atol=2e-7)
    assert max(max(row) for row in found) <= 0.0
    assert found[3] == [0.0, *[-math.inf] * 19]


def test_equal_probabilities_are_ordered_by_token():
    tokens, _ = top_log_probs(torch.zeros(2, 5), 5)
    assert tokens == [[0, 1, 2, 3, 4]] * 2
    tokens, _ = top_log_probs(torch.zeros(2, 5), 2)
    assert tokens == [[0, 1]] * 2, "also where the last place is shared"


def test_of_equal_prefixes_the_earlier_parent_and_the_lower_token_come_first():
    tree = draft_tree(9, torch.zeros(2, 2), 6)
    assert prefixes(tree) == [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]


def test_temperatures_flatten_or_sharpen_their_own_depth():
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    tokens, plain = top_log_probs(logits, 40)
    ids, found = top_log_probs(logits, 40, temperatures=(0.5, 1.0, 2.0))
    assert ids == tokens, "the order is that of the logits"
    assert found[1] == plain[1]
    for row, temperature in ((0, 0.5), (2, 2.0)):
        wanted = (logits[row] / temperature).log_softmax(-1)[tokens[row]]
        torch.testing.assert_close(torch.tensor(found[row]), wanted)
    with pytest.raises(ValueError, match="2 temperatures for 3 depths"):
        draft_tree(0, logits, TreeShape(4, depth=2), temperatures=(1.0, 1.0))
    for bad in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="finite and above 0"):
            top_log_probs(logits, 4, temperatures=(1.0, bad, 1.0))


def test_a_draft_of_logits_is_the_tree_of_its_best_columns():
    logits = torch.randn(6, 400, generator=torch.Generator().manual_seed(2))
    d2t = torch.arange(400) // 3
    temperatures = (0.7, 0.8, 0.9, 1.0, 1.1, 1.2)
    whole = top_log_probs(logits, 400, d2t, temperatures)
    for shape in (TreeShape(1), TreeShape(3), TreeShape(64), TreeShape(64, 3, 4)):
        drafted = draft_tree(8, logits, shape, d2t=d2t, temperatures=temperatures)
        assert drafted == build_tree(8, *whole, shape)


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


@given(tree=random_trees())
def test_children_are_found_by_parent_and_token_the_first_of_equal_ones(tree):
    wanted = {}
    for node in range(1, len(tree)):
        wanted.setdefault((tree.parents[node], tree.tokens[node]), node)
    assert tree.children == wanted
    assert tree == DraftTree(tree.tokens, tree.parents), "what is kept is no part of a tree"
    assert hash(tree) == hash(DraftTree(tree.tokens, tree.parents))


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


@pytest.mark.parametrize("parents", [(-1, 2, 0), (-1, 1, 0), (-1, 0, -1)])
def test_a_tree_with_a_child_before_its_parent_is_refused(parents):
    with pytest.raises(ValueError, match="parents must come before"):
        DraftTree(tokens=(1, 2, 3), parents=parents)
