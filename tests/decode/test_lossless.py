"""Losslessness of a round on toy vocabularies, where the exact distribution is known."""

import itertools
from collections import Counter
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.decode.propose import Drafting, Proposing
from paceline.decode.sampling import (
    GREEDY,
    PositionKeyedNoise,
    Sampling,
    choice_margin,
    choose,
    distribution,
    kept_tokens,
)
from paceline.types.tree import TreeShape

VOCAB = 5
SAMPLINGS = [
    GREEDY,
    Sampling(temperature=1.0),
    Sampling(temperature=0.7),
    Sampling(temperature=1.3, top_p=0.8),
    Sampling(temperature=1.0, top_k=2),
    Sampling(temperature=1.0, min_p=0.3),
    Sampling(temperature=0.9, top_k=4, top_p=0.9, min_p=0.05),
]
METHODS = [
    (None, Drafting.GREEDY),
    (None, Drafting.COUPLED),
    *((budget, Drafting.GREEDY) for budget in (1, 2, 5, 16, 64)),
]


@dataclass(frozen=True)
class Toy:
    """A target whose logits are a function of the last two tokens, and a drafter near to it."""

    seed: int
    spread: float = 1.5
    depth: int = 3
    error: float = 0.7

    def logits(self, prefix: tuple[int, ...]) -> torch.Tensor:
        return _after(self, ((0, 0), *zip((0, *prefix), prefix, strict=False))[-1])

    def drafted(self, prefix: tuple[int, ...]) -> torch.Tensor:
        """The marginals of a drafter that takes the target's best for what comes between."""
        return _marginals(self, prefix[-2:])

    @property
    def drafter(self) -> Any:
        return SimpleNamespace(
            d2t=None,
            proposed_ids=None,
            to_target=lambda ids: ids,
            config=SimpleNamespace(vocab_size=VOCAB),
        )

    def plain(self, count: int, sampling: Sampling, noise: PositionKeyedNoise) -> tuple[int, ...]:
        tokens: tuple[int, ...] = ()
        for position in range(count):
            tokens += tuple(choose(self.logits(tokens)[None], [noise], [position], sampling))
        return tokens

    def speculative(
        self, count: int, way: Proposing, *, rounds: list[int] | None = None
    ) -> tuple[int, ...]:
        noise = [way.noise] if way.noise is not None else []
        tokens = tuple(choose(self.logits(())[None], noise, [0], way.sampling))
        while len(tokens) < count:
            before, first = tokens[:-1], len(tokens)
            proposal = way.propose(tokens[-1], self.drafted(tokens), first)
            tree = proposal.tree
            paths: list[tuple[int, ...]] = []
            for token, parent in zip(tree.tokens, tree.parents, strict=True):
                paths.append((*(paths[parent] if parent >= 0 else ()), token))
            logits = torch.stack([self.logits((*before, *path)) for path in paths])
            found = way.accept(proposal, logits, first)
            tokens += found.tokens
            if rounds is not None:
                rounds.append(len(found.tokens))
        return tokens[:count]


@cache
def _after(toy: Toy, last: tuple[int, int]) -> torch.Tensor:
    rng = np.random.default_rng([toy.seed, *last])
    return torch.tensor(rng.normal(size=VOCAB) * toy.spread, dtype=torch.float32)


@cache
def _marginals(toy: Toy, prefix: tuple[int, ...]) -> torch.Tensor:
    rows, ahead = [], prefix
    rng = np.random.default_rng([toy.seed, 99])
    for _ in range(toy.depth):
        row = toy.logits(ahead)
        rows.append(row + torch.tensor(rng.normal(size=VOCAB) * toy.error).float())
        ahead = (*ahead, int(row.argmax()))
    return torch.stack(rows)


def way_of(toy: Toy, sampling: Sampling, noise, budget, drafting) -> Proposing:
    return Proposing(
        drafter=toy.drafter,
        sampling=sampling,
        noise=noise,
        shape=None if budget is None else TreeShape(budget),
        drafting=drafting,
    )


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    key=st.integers(0, 10**6),
    sampling=st.sampled_from(SAMPLINGS),
    method=st.sampled_from(METHODS),
    depth=st.integers(1, 5),
    error=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
)
def test_pitfalls_15_and_16_any_tree_emits_the_draws_of_plain_decoding(
    seed, key, sampling, method, depth, error
):
    toy, noise = Toy(seed, depth=depth, error=error), PositionKeyedNoise(seed, key)
    wanted = toy.plain(14, sampling, noise)
    assert toy.speculative(14, way_of(toy, sampling, noise, *method)) == wanted


def joint(toy: Toy, sampling: Sampling, tokens: int) -> dict[tuple[int, ...], float]:
    """The exact distribution of the first tokens."""
    found = {}
    for path in itertools.product(range(VOCAB), repeat=tokens):
        share = 1.0
        for at, token in enumerate(path):
            ids, weights = distribution(toy.logits(path[:at]), at, sampling)
            share *= dict(zip(ids.tolist(), weights.tolist(), strict=True)).get(token, 0.0)
        found[path] = share
    return found


def distance(counts: Counter, exact: dict[tuple[int, ...], float]) -> float:
    total = counts.total()
    assert set(counts) <= {path for path, share in exact.items() if share > 0}
    return 0.5 * sum(abs(counts[path] / total - share) for path, share in exact.items())


@pytest.mark.parametrize(
    ("sampling", "drafting", "budget", "answers", "limit"),
    [
        # Exact draws come to half of these: the noise of 25 shares.
        (Sampling(temperature=1.0), Drafting.SAMPLED, None, 25_000, 0.02),
        (Sampling(temperature=0.7, top_p=0.9), Drafting.SAMPLED, None, 4_000, 0.05),
        (Sampling(temperature=1.0), Drafting.COUPLED, None, 4_000, 0.05),
        (Sampling(temperature=1.0), Drafting.GREEDY, 8, 4_000, 0.05),
    ],
)
def test_t_79_the_joint_of_two_tokens_is_the_targets(sampling, drafting, budget, answers, limit):
    """Each answer is its own request, of which the two tokens are drafted together."""
    toy = Toy(5, spread=1.0, depth=2)
    counts = Counter()
    for key in range(answers):
        way = way_of(toy, sampling, PositionKeyedNoise(1, key), budget, drafting)
        counts[toy.speculative(3, way)[:2]] += 1
    assert distance(counts, joint(toy, sampling, 2)) < limit


def test_drawn_drafts_are_accepted_as_often_as_the_overlap_of_the_distributions():
    """One minus the total variation distance; the best token alone is accepted as p of it."""
    toy, sampling = Toy(11, spread=0.6, depth=1, error=0.4), Sampling(temperature=1.0)
    accepted: dict[Drafting, int] = dict.fromkeys(Drafting, 0)
    tries = 4000
    shares = {Drafting.SAMPLED: 0.0, Drafting.GREEDY: 0.0}
    for key in range(tries):
        noise = PositionKeyedNoise(2, key)
        root = key % VOCAB
        p = torch.softmax(toy.logits((root,)), 0)
        logits = toy.drafted((root,))
        q = torch.softmax(logits[0], 0)
        shares[Drafting.SAMPLED] += float(torch.minimum(p, q).sum()) / tries
        shares[Drafting.GREEDY] += float(p[q.argmax()]) / tries
        for drafting in Drafting:
            way = way_of(toy, sampling, noise, None, drafting)
            proposal = way.propose(root, logits, 1)
            verified = torch.stack(
                [toy.logits((root,)), toy.logits((root, proposal.tree.tokens[1]))]
            )
            accepted[drafting] += way.accept(proposal, verified, 1).depth
    for drafting, share in shares.items():
        assert abs(accepted[drafting] / tries - share) < 0.03, drafting
    overlap = shares[Drafting.SAMPLED]
    assert accepted[Drafting.COUPLED] / tries > overlap / (2 - overlap) - 0.03


def test_wrong_rules_would_show():
    """The distance of this file's test, of a verifier that takes every drafted token."""
    toy, sampling = Toy(5, spread=1.0, depth=2), Sampling(temperature=1.0)
    counts = Counter()
    for key in range(5_000):
        noise = PositionKeyedNoise(1, key)
        first = choose(toy.logits(())[None], [noise], [0], sampling)[0]
        way = way_of(toy, sampling, noise, None, Drafting.SAMPLED)
        proposal = way.propose(first, toy.drafted((first,)), 1)
        counts[(first, proposal.tree.tokens[1])] += 1
    assert distance(counts, joint(toy, sampling, 2)) > 0.05


@given(
    seed=st.integers(0, 2000),
    top_k=st.integers(0, 9),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.9),
)
def test_filters_act_one_after_the_other(seed, top_k, top_p, min_p):
    """Against a definition that sorts everything."""
    rng = np.random.default_rng(seed)
    row = rng.dirichlet(np.full(8, 0.5)).astype(np.float32)
    order = sorted(range(8), key=lambda token: (-row[token], token))
    if top_k:
        order = order[:top_k]
    mass = np.cumsum([float(row[token]) for token in order])
    within = [
        t for t, before in zip(order, [0.0, *mass], strict=False) if before < top_p * mass[-1]
    ]
    wanted = sorted(t for t in within if row[t] >= min_p * row.max() and row[t] > 0)
    edge = np.abs(mass / mass[-1] - top_p).min() if top_p < 1.0 else 1.0
    got = kept_tokens(row, Sampling(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p))
    if edge > 1e-6:
        assert got.tolist() == wanted
    assert got.tolist() == sorted(got.tolist())
    assert int(row.argmax()) in got


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -0.1), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.5), ("min_p", 1.0)],
)
def test_sampling_out_of_range_is_refused(name, value):
    with pytest.raises(ValueError, match=name):
        Sampling(**{name: value})


def test_a_draft_tree_is_not_drawn_and_sampling_needs_noise():
    with pytest.raises(ValueError, match="draft tree"):
        way_of(Toy(0), GREEDY, None, 4, Drafting.SAMPLED)
    with pytest.raises(ValueError, match="noise"):
        way_of(Toy(0), Sampling(temperature=1.0), None, None, Drafting.GREEDY)


@given(seed=st.integers(0, 10**6), sampling=st.sampled_from(SAMPLINGS))
def test_a_choice_stands_as_long_as_logits_move_by_less_than_its_margin(seed, sampling):
    rng = np.random.default_rng(seed)
    noise = PositionKeyedNoise(seed, 0)
    logits = torch.tensor(rng.normal(size=VOCAB) * 2).float()
    margin = choice_margin(logits, noise, 7, sampling)
    step = min(margin * 0.49, 2e-5)
    if step < 1e-6:
        return
    for signs in itertools.product((-1, 1), repeat=VOCAB):
        moved = logits + step * torch.tensor(signs).float()
        assert choose(moved[None], [noise], [7], sampling) == choose(
            logits[None], [noise], [7], sampling
        )
