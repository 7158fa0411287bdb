"""The target's side of a round: verification of trees, and the cache after it."""

import random

import pytest
import torch

from drafting import TAPS, capture, load_tiny_target
from paceline.decode.session import TargetSession
from paceline.durable.errors import TargetError
from paceline.types.tree import DraftTree

PROMPT = [5, 17, 90, 33, 8, 121, 64]


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def target(request, tmp_path_factory):
    return load_tiny_target(tmp_path_factory.mktemp("target"), request.param)


def random_tree(root: int, size: int, rng: random.Random) -> DraftTree:
    parents = [-1, *(rng.randrange(node) for node in range(1, size))]
    return DraftTree(
        tokens=(root, *(rng.randrange(256) for _ in range(size - 1))), parents=tuple(parents)
    )


def path_to(tree: DraftTree, node: int) -> list[int]:
    path = [node]
    while tree.parents[path[-1]] != -1:
        path.append(tree.parents[path[-1]])
    return path[::-1]


def plain_logits(target, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return target.model(input_ids=torch.tensor([ids])).logits[0, -1]


def test_pitfall_12_every_node_equals_the_chain_of_its_path(target):
    """50 random trees in a row, so that columns of earlier ones would show."""
    rng = random.Random(0)
    session = TargetSession(target, TAPS)
    session.prefill(PROMPT)
    committed = list(PROMPT)
    for round_number in range(50):
        tree = random_tree(rng.randrange(256), rng.randint(1, 9), rng)
        logits, _ = session.verify(tree)
        node = rng.randrange(len(tree))
        chain = [tree.tokens[i] for i in path_to(tree, node)]
        torch.testing.assert_close(
            logits[node], plain_logits(target, committed + chain), rtol=1e-4, atol=1e-4
        )
        path = path_to(tree, rng.randrange(len(tree)) if round_number % 3 else 0)
        session.commit(path, len(tree))
        committed += [tree.tokens[i] for i in path]


def test_pitfall_13_a_node_stands_at_its_depth_not_at_its_number(target):
    """Siblings with equal tokens are the same continuation, wherever they lie in the tree."""
    session = TargetSession(target, TAPS)
    session.prefill(PROMPT)
    tree = DraftTree(tokens=(7, 30, 31, 30, 32, 30), parents=(-1, 0, 1, 0, 2, 0))
    logits, features = session.verify(tree)
    for twin in (3, 5):
        torch.testing.assert_close(logits[twin], logits[1], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(features[twin], features[1], rtol=1e-5, atol=1e-5)


def test_pitfall_11_the_cache_after_a_commit_is_that_of_a_prefill(target):
    rng = random.Random(1)
    session = TargetSession(target, TAPS)
    session.prefill(PROMPT)
    committed = list(PROMPT)
    for _ in range(12):
        tree = random_tree(rng.randrange(256), 8, rng)
        session.verify(tree)
        path = path_to(tree, rng.randrange(len(tree)))
        session.commit(path, len(tree))
        committed += [tree.tokens[i] for i in path]
        fresh = TargetSession(target, TAPS)
        fresh.prefill(committed)
        assert session.length == fresh.length == len(committed)
        for mine, theirs in zip(session.cache.layers, fresh.cache.layers, strict=True):
            torch.testing.assert_close(mine.keys, theirs.keys, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(mine.values, theirs.values, rtol=1e-4, atol=1e-4)


def test_pitfall_10_features_handed_on_are_those_of_a_prefill(target):
    rng = random.Random(2)
    session = TargetSession(target, TAPS)
    _, features = session.prefill(PROMPT)
    committed, rows = list(PROMPT), [features]
    for _ in range(12):
        tree = random_tree(rng.randrange(256), 7, rng)
        _, features = session.verify(tree)
        path = path_to(tree, rng.randrange(len(tree)))
        session.commit(path, len(tree))
        committed += [tree.tokens[i] for i in path]
        rows.append(features[path])
        ids = torch.tensor(committed)
        wanted = capture(target, ids, torch.zeros_like(ids, dtype=torch.bool)).taps
        torch.testing.assert_close(torch.cat(rows), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next"])
def test_a_target_whose_state_cannot_be_gathered_is_refused_by_name(tmp_path, kind):
    target = load_tiny_target(tmp_path, kind)
    with pytest.raises(TargetError, match="linear_attention"):
        TargetSession(target, TAPS)
