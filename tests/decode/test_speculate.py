"""Whole answers: losslessness, τ at both ends, and the walk against real decoding."""

import random
from typing import Any

import pytest
import torch

from drafting import load_tiny_target, tiny_drafter
from paceline.decode import speculate
from paceline.decode.propose import Drafting
from paceline.decode.sampling import GREEDY, PositionKeyedNoise, Sampling
from paceline.decode.simulate import accepted_depths, method_name, walk_rounds
from paceline.decode.speculate import Decoding, decode_plain, decode_speculative

PROMPTS = [[5, 17, 90, 33, 8], [200, 3], [77] * 9]


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "sliding": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    ),
}
SAMPLINGS = [
    Sampling(temperature=0.7),
    Sampling(temperature=1.0),
    Sampling(temperature=1.0, top_k=20, top_p=0.95, min_p=0.02),
]


@pytest.fixture(scope="module", params=KINDS)
def target(request, tmp_path_factory):
    kind, more = KINDS[request.param]
    return load_tiny_target(tmp_path_factory.mktemp("target"), kind, **more)


@pytest.fixture(scope="module")
def drafter(target):
    return tiny_drafter(target, block_size=4)


def plain(target, drafter, prompt, limit, eos=frozenset(), **how):
    return decode_plain(
        target, prompt, taps=drafter.config.taps, max_new_tokens=limit, eos_ids=eos, **how
    )


@pytest.mark.parametrize("budget", [None, 1, 4, 16, 64])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_pitfall_14_fp32_output_is_plain_decoding_token_for_token(target, drafter, prompt, budget):
    wanted = plain(target, drafter, prompt, 40)
    got = decode_speculative(
        target, drafter, target.head, prompt, max_new_tokens=40, eos_ids=frozenset(), budget=budget
    )
    assert got.ids == wanted.ids
    assert got.finish == wanted.finish == "length"


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("drafting", [Drafting.GREEDY, Drafting.COUPLED])
def test_pitfall_15_drawn_output_is_plain_sampling_token_for_token(
    target, drafter, sampling, drafting
):
    for number, prompt in enumerate(PROMPTS):
        how = {"sampling": sampling, "noise": PositionKeyedNoise(0, number)}
        wanted = plain(target, drafter, prompt, 24, **how)
        for budget in (None,) if drafting is Drafting.COUPLED else (None, 3, 16):
            got = decode_speculative(
                target,
                drafter,
                target.head,
                prompt,
                max_new_tokens=24,
                eos_ids=frozenset(),
                budget=budget,
                drafting=drafting,
                **how,
            )
            assert got.ids == wanted.ids, budget


def test_a_drafter_that_agrees_is_accepted_whole_when_coupled(target, drafter, monkeypatch):
    """Where both have the same distribution, both draw the same token."""
    prompt, noise = PROMPTS[0], PositionKeyedNoise(3, 0)
    sampling = Sampling(temperature=1.0)
    answer = plain(target, drafter, prompt, 41, sampling=sampling, noise=noise)
    ids = torch.tensor([[*prompt, *answer.ids]])
    with torch.inference_mode():
        logits = target.model(input_ids=ids).logits[0]
    agreeing = _Agreeing(logits, 4)
    monkeypatch.setattr(speculate, "DraftSession", agreeing)
    got = decode_speculative(
        target,
        drafter,
        target.head,
        prompt,
        max_new_tokens=37,
        eos_ids=frozenset(),
        sampling=sampling,
        noise=noise,
        drafting=Drafting.COUPLED,
    )
    assert got.ids == answer.ids[:37]
    assert got.rounds == (4,) * 9


@pytest.mark.parametrize("sampling", [GREEDY, *SAMPLINGS])
def test_requests_side_by_side_are_answered_as_alone(target, drafter, sampling):
    """With prompts of unequal lengths that end after unequal numbers of rounds."""
    alone = []
    noises = [PositionKeyedNoise(1, number) for number in range(len(PROMPTS))]
    free = plain(target, drafter, PROMPTS[1], 30, sampling=sampling, noise=noises[1])
    eos = frozenset({free.ids[9]})
    for prompt, noise in zip(PROMPTS, noises, strict=True):
        how = {"sampling": sampling, "noise": noise}
        alone.append(plain(target, drafter, prompt, 26, eos, **how))
    for budget in (None, 5):
        decoding = Decoding(
            target,
            drafter,
            target.head,
            PROMPTS,
            max_new_tokens=26,
            eos_ids=eos,
            budget=budget,
            sampling=sampling,
            noises=noises,
        )
        streamed: dict[int, list[int]] = {n: [*decoding.answer(n)] for n in range(len(PROMPTS))}
        while not decoding.is_done:
            for found in decoding.step():
                streamed[found.request] += found.tokens
                assert len(found.tokens) <= found.accepted + 1
        for number, wanted in enumerate(alone):
            got = decoding.decoded(number)
            assert got.ids == wanted.ids == tuple(streamed[number][:26])
            assert got.finish == wanted.finish
            assert {"prefill", "draft", "tree", "verify", "commit"} >= set(got.phase_seconds)


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLINGS[1]])
def test_recurrent_targets_decode_token_for_token(tmp_path, monkeypatch, kind, sampling):
    """Chains and trees of a drafter that is often right, alone and side by side."""
    target = load_tiny_target(tmp_path, kind, layers=4)
    drafter = tiny_drafter(target, block_size=4)
    how = {"sampling": sampling, "noise": PositionKeyedNoise(1, 0)}
    wanted = plain(target, drafter, PROMPTS[0], 16, **how)
    _bias_towards(drafter, monkeypatch, target, torch.tensor([*PROMPTS[0], *wanted.ids]))
    for budget in (None, 5):
        decoding = Decoding(
            target,
            drafter,
            target.head,
            [PROMPTS[0], PROMPTS[1]],
            max_new_tokens=14,
            eos_ids=frozenset(),
            budget=budget,
            sampling=sampling,
            noises=[how["noise"], PositionKeyedNoise(1, 1)],
        )
        got = decoding.run()[0]
        assert got.ids == wanted.ids[:14]
        assert max(got.rounds) > 1, "paths of several lengths occur"


def test_the_residual_rule_gives_answers_of_the_right_length(target, drafter):
    got = decode_speculative(
        target,
        drafter,
        target.head,
        PROMPTS[0],
        max_new_tokens=20,
        eos_ids=frozenset(),
        sampling=Sampling(temperature=1.0),
        noise=PositionKeyedNoise(0, 0),
        drafting=Drafting.SAMPLED,
    )
    assert len(got.ids) == 20
    assert 1 + sum(got.rounds) >= 20


def test_plain_decoding_is_transformers_own_greedy(target, drafter):
    prompt = PROMPTS[0]
    theirs = target.model.generate(
        torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None
    )
    assert list(plain(target, drafter, prompt, 20).ids) == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize("budget", [None, 8])
def test_both_stop_at_the_end_token(target, drafter, budget):
    free = plain(target, drafter, PROMPTS[0], 30)
    end = free.ids[11]
    eos = frozenset({end})
    wanted = plain(target, drafter, PROMPTS[0], 30, eos)
    got = decode_speculative(
        target, drafter, target.head, PROMPTS[0], max_new_tokens=30, eos_ids=eos, budget=budget
    )
    assert got.ids == wanted.ids == free.ids[: free.ids.index(end) + 1]
    assert got.finish == wanted.finish == "stop"
    assert 1 + sum(got.rounds) == len(got.ids), "the last round is cut after the end token"


def test_pitfall_21_the_mask_token_survives_in_the_output(target, drafter):
    """Output that contains the mask's id is passed on like any other token."""
    free = plain(target, drafter, PROMPTS[0], 30)
    config = drafter.config
    import dataclasses

    drafter.config = dataclasses.replace(config, mask_token_id=free.ids[5])
    try:
        got = decode_speculative(
            target, drafter, target.head, PROMPTS[0], max_new_tokens=30, eos_ids=frozenset()
        )
    finally:
        drafter.config = config
    assert got.ids == free.ids


class _Proposing:
    """Puts chosen tokens in the place of what a drafter's logits would propose."""

    def __init__(self, vocab: int, block: int, choose) -> None:
        self._vocab, self._block, self._choose = vocab, block, choose
        self.length = 0

    def __call__(self, *_):
        self.length = 0
        return self

    def extend(self, taps) -> None:
        self.length += taps.shape[0]

    def slot_logits(self, _anchor):
        logits = torch.zeros(self._block - 1, self._vocab)
        for slot in range(self._block - 1):
            logits[slot, self._choose(self.length + 1 + slot)] = 10.0
        return logits


class _Agreeing:
    """Has the target's own logits, row t of `logits` [S, V] for the token at t + 1."""

    def __init__(self, logits: torch.Tensor, block: int) -> None:
        self._logits, self._block = logits, block
        self.length = 0

    def __call__(self, *_):
        self.length = 0
        return self

    def extend(self, taps) -> None:
        self.length += taps.shape[0]

    def slot_logits(self, _anchor):
        return self._logits[self.length : self.length + self._block - 1]


@pytest.mark.parametrize("budget", [None, 3])
def test_t_78_an_oracle_drafter_reaches_the_whole_block(target, drafter, monkeypatch, budget):
    prompt = PROMPTS[0]
    answer = [*prompt, *plain(target, drafter, prompt, 60).ids]
    oracle = _Proposing(target.spec.vocab_size, 4, lambda position: answer[position])
    monkeypatch.setattr(speculate, "DraftSession", oracle)
    got = decode_speculative(
        target, drafter, target.head, prompt, max_new_tokens=41, eos_ids=frozenset(), budget=budget
    )
    assert list(got.ids) == answer[len(prompt) :][:41]
    assert got.tau == 4.0
    assert got.rounds == (4,) * 10


def test_t_78_a_random_drafter_stays_near_one(target, drafter, monkeypatch):
    rng = random.Random(0)
    noise = _Proposing(target.spec.vocab_size, 4, lambda _: rng.randrange(320))
    monkeypatch.setattr(speculate, "DraftSession", noise)
    rounds = [
        n
        for prompt in PROMPTS
        for n in decode_speculative(
            target, drafter, target.head, prompt, max_new_tokens=60, eos_ids=frozenset()
        ).rounds
    ]
    assert 1.0 <= sum(rounds) / len(rounds) < 1.1


@pytest.mark.parametrize("end_at", [None, 20, 32, 33, 34, 35])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_walk_gives_the_rounds_of_real_decoding(target, drafter, monkeypatch, prompt, end_at):
    """With a drafter that is often right, so that paths of every length occur.

    The end token may also lie just behind the limit, inside the last round.
    """
    limit, budgets = 33, (2, 7, 16)
    free = plain(target, drafter, prompt, limit + drafter.config.block_size)
    eos = frozenset() if end_at is None else frozenset({free.ids[end_at]})
    block = drafter.config.block_size
    answer = plain(target, drafter, prompt, limit + block - 1, eos)
    ids = torch.tensor([*prompt, *answer.ids])
    mask = torch.arange(ids.numel()) >= len(prompt)
    stop = min(limit, len(answer.ids))
    _bias_towards(drafter, monkeypatch, target, ids)
    depths = accepted_depths(
        drafter,
        target.head,
        answer.features,
        ids,
        mask,
        torch.arange(len(prompt), len(prompt) + stop - 1),
        budgets,
    )
    for budget in (None, *budgets):
        real = decode_speculative(
            target, drafter, target.head, prompt, max_new_tokens=limit, eos_ids=eos, budget=budget
        )
        end = len(answer.ids) if answer.finish == "stop" else None
        walked = walk_rounds(depths[method_name(budget)], stop=stop, end=end)
        assert walked == real.rounds, method_name(budget)
    if end_at is None:
        assert max(depths[method_name(16)]) >= 2, "paths of every length occur"


def _bias_towards(drafter, monkeypatch, target, ids) -> None:
    """Add, to about half of the drafted slots, the direction of the token that is right."""
    original = type(drafter).draft
    rows = target.head.lm_head

    def biased(self, embeddings, anchors, contexts, documents):
        hidden = original(self, embeddings, anchors, contexts, documents)
        for block, anchor in enumerate(anchors.tolist()):
            for slot in range(hidden.shape[1]):
                position = anchor + 1 + slot
                if position < ids.numel() and (position * 2654435761) % 7 < 4:
                    hidden[block, slot] += 40.0 * rows[ids[position]]
        return hidden

    monkeypatch.setattr(type(drafter), "draft", biased)
