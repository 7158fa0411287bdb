"""The target's side of a round: verification of trees, and the state after it."""

import random

import pytest
import torch

from drafting import TAPS, capture, load_tiny_target
from paceline.decode.attention_state import AttentionState
from paceline.decode.session import open_session
from paceline.types.tree import DraftTree

PROMPT = [5, 17, 90, 33, 8, 121, 64]
SLIDING = {
    "mistral": {"sliding_window": 6},
    "qwen3": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
}
ATTENTION = [("llama", False), ("qwen2", False), ("qwen3", False), *((k, True) for k in SLIDING)]
RECURRENT = [("qwen3_5", False), ("qwen3_next", False)]


def make_target(folder, kind: str, slides: bool):
    return load_tiny_target(folder, kind, **(SLIDING[kind] if slides else {}))


def name_of(kind: tuple[str, bool]) -> str:
    return f"{kind[0]}-sliding" if kind[1] else kind[0]


@pytest.fixture(scope="module", params=[*ATTENTION, *RECURRENT], ids=name_of)
def target(request, tmp_path_factory):
    return make_target(tmp_path_factory.mktemp("target"), *request.param)


@pytest.fixture(scope="module", params=ATTENTION, ids=name_of)
def attention_target(request, tmp_path_factory):
    return make_target(tmp_path_factory.mktemp("target"), *request.param)


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
    session = open_session(target, TAPS)
    session.prefill([PROMPT])
    committed = list(PROMPT)
    for round_number in range(50):
        tree = random_tree(rng.randrange(256), rng.randint(1, 9), rng)
        [logits] = session.verify([tree])
        node = rng.randrange(len(tree))
        chain = [tree.tokens[i] for i in path_to(tree, node)]
        torch.testing.assert_close(
            logits[node], plain_logits(target, committed + chain), rtol=1e-4, atol=1e-4
        )
        path = path_to(tree, rng.randrange(len(tree)) if round_number % 3 else 0)
        session.commit([path])
        committed += [tree.tokens[i] for i in path]


def test_pitfall_13_a_node_stands_at_its_depth_not_at_its_number(target):
    """Siblings with equal tokens are the same continuation, wherever they lie in the tree."""
    session = open_session(target, TAPS)
    session.prefill([PROMPT])
    tree = DraftTree(tokens=(7, 30, 31, 30, 32, 30), parents=(-1, 0, 1, 0, 2, 0))
    [logits] = session.verify([tree])
    for twin in (3, 5):
        torch.testing.assert_close(logits[twin], logits[1], rtol=1e-5, atol=1e-5)


def test_pitfall_11_the_cache_after_a_commit_is_that_of_a_prefill(attention_target):
    target = attention_target
    rng = random.Random(1)
    session = open_session(target, TAPS)
    session.prefill([PROMPT])
    committed = list(PROMPT)
    for _ in range(12):
        tree = random_tree(rng.randrange(256), 8, rng)
        session.verify([tree])
        path = path_to(tree, rng.randrange(len(tree)))
        session.commit([path])
        committed += [tree.tokens[i] for i in path]
        fresh = open_session(target, TAPS)
        fresh.prefill([committed])
        assert session.lengths == fresh.lengths == [len(committed)]
        for mine, theirs in zip(session.layers, fresh.layers, strict=True):
            for one, other in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
                torch.testing.assert_close(
                    one[..., : len(committed), :], other, rtol=1e-4, atol=1e-4
                )


def test_pitfall_10_features_handed_on_are_those_of_a_prefill(target):
    rng = random.Random(2)
    session = open_session(target, TAPS)
    _, rows = session.prefill([PROMPT])
    committed = list(PROMPT)
    for _ in range(12):
        tree = random_tree(rng.randrange(256), 7, rng)
        session.verify([tree])
        path = path_to(tree, rng.randrange(len(tree)))
        rows += session.commit([path])
        committed += [tree.tokens[i] for i in path]
        ids = torch.tensor(committed)
        wanted = capture(target, ids, torch.zeros_like(ids, dtype=torch.bool)).taps
        torch.testing.assert_close(torch.cat(rows), wanted, rtol=1e-4, atol=1e-4)


def test_requests_side_by_side_are_as_alone(target):
    """Prompts, trees and paths of unequal lengths; requests leave one after another."""
    rng = random.Random(3)
    prompts = [[rng.randrange(256) for _ in range(n)] for n in (3, 11, 7, 1)]
    session = open_session(target, TAPS, len(prompts))
    logits, features = session.prefill(prompts)
    alone = [open_session(target, TAPS) for _ in prompts]
    for number, prompt in enumerate(prompts):
        [wanted], [rows] = alone[number].prefill([prompt])
        torch.testing.assert_close(logits[number], wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(features[number], rows, rtol=1e-4, atol=1e-4)
    for leaving in (None, None, 1, None, 0, None, 1, None):
        if leaving is not None:
            going_on = [place for place in range(len(alone)) if place != leaving]
            session.keep(going_on)
            alone = [alone[place] for place in going_on]
        trees = [random_tree(rng.randrange(256), rng.randint(1, 9), rng) for _ in alone]
        verified = session.verify(trees)
        paths = [path_to(tree, rng.randrange(len(tree))) for tree in trees]
        committed = session.commit(paths)
        for number, one in enumerate(alone):
            [wanted] = one.verify([trees[number]])
            [rows] = one.commit([paths[number]])
            torch.testing.assert_close(verified[number], wanted, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(committed[number], rows, rtol=1e-4, atol=1e-4)
        assert session.lengths == [one.lengths[0] for one in alone]


def test_a_window_is_not_the_whole_text(tmp_path):
    """The sliding targets above would be no test of a window that holds everything."""
    sliding = make_target(tmp_path / "a", "mistral", True)
    whole = make_target(tmp_path / "b", "mistral", False)
    ids = list(range(40, 60))
    assert not torch.allclose(plain_logits(sliding, ids), plain_logits(whole, ids), atol=1e-3)


def test_a_commit_needs_something_verified(target):
    session = open_session(target, TAPS)
    session.prefill([PROMPT])
    with pytest.raises(ValueError, match="commit before verify"):
        session.commit([(0,)])


def test_a_full_room_grows_and_keeps_what_it_holds(tmp_path):
    target = load_tiny_target(tmp_path, "llama")
    session = open_session(target, TAPS, 2)
    assert isinstance(session, AttentionState)
    ids = [(7 * i) % 250 for i in range(170)]
    session.prefill([ids[:3], ids[:90]])
    for at in range(90, 170):
        logits = session.verify([DraftTree.chain(ids[at - 87], ()), DraftTree.chain(ids[at], ())])
        session.commit([(0,), (0,)])
    torch.testing.assert_close(logits[0][0], plain_logits(target, ids[:83]), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits[1][0], plain_logits(target, ids), rtol=1e-4, atol=1e-4)
