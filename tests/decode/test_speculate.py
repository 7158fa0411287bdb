"""Whole answers: losslessness, τ at both ends, and the walk against real decoding."""

import random

import pytest
import torch

from drafting import load_tiny_target, tiny_drafter
from paceline.decode import speculate
from paceline.decode.simulate import accepted_depths, method_name, walk_rounds
from paceline.decode.speculate import decode_plain, decode_speculative

PROMPTS = [[5, 17, 90, 33, 8], [200, 3], [77] * 9]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def target(request, tmp_path_factory):
    return load_tiny_target(tmp_path_factory.mktemp("target"), request.param)


@pytest.fixture(scope="module")
def drafter(target):
    return tiny_drafter(target, block_size=4)


def plain(target, drafter, prompt, limit, eos=frozenset()):
    return decode_plain(target, prompt, taps=drafter.config.taps, max_new_tokens=limit, eos_ids=eos)


@pytest.mark.parametrize("budget", [None, 1, 4, 16, 64])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_pitfall_14_fp32_output_is_plain_decoding_token_for_token(target, drafter, prompt, budget):
    wanted = plain(target, drafter, prompt, 40)
    got = decode_speculative(
        target, drafter, target.head, prompt, max_new_tokens=40, eos_ids=frozenset(), budget=budget
    )
    assert got.ids == wanted.ids
    assert got.finish == wanted.finish == "length"


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
