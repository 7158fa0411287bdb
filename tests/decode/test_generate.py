import math
from collections import Counter
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from paceline.decode.generate import generate
from paceline.decode.sampling import GREEDY, PositionKeyedNoise, Sampling, choose, nucleus
from tiny_models import TINY_KINDS, tiny_model

VOCAB = 64
FIRST_DRAWS = [0.05930391562218518, 0.18855667579795302]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("targets")
    made = {}

    def get(kind: str, **overrides):
        name = f"{kind}-{sorted(overrides.items())}"
        if name not in made:
            tiny_model(kind, folder / name, vocab=VOCAB, **overrides)
            made[name] = AutoModelForCausalLM.from_pretrained(
                folder / name, dtype=torch.float32
            ).eval()
        return made[name]

    return get


def _prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    random = Random(seed)
    return [[random.randrange(VOCAB) for _ in range(n)] for n in lengths]


def _reference(model, prompt, *, max_new_tokens, eos_ids, sampling=GREEDY, key=0):
    """Token by token over the whole text: no cache, no batch, no padding."""
    ids, answer = list(prompt), []
    noise = PositionKeyedNoise(0, key)
    while True:
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[:, -1]
        [token] = choose(logits, [noise], [len(ids)], sampling)
        ids.append(token)
        answer.append(token)
        if token in eos_ids:
            return tuple(answer), "stop"
        if len(answer) == max_new_tokens:
            return tuple(answer), "length"


@pytest.mark.parametrize("kind", TINY_KINDS)
@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (1.0, 1.0), (0.8, 0.7)])
def test_a_batch_answers_as_one_by_one_without_a_cache(models, kind, temperature, top_p):
    model = models(kind)
    prompts = _prompts([5, 17, 5, 11, 1])
    options = {"max_new_tokens": 12, "eos_ids": frozenset({3, 9, 20})}
    options |= {"sampling": Sampling(temperature=temperature, top_p=top_p)}
    got = generate(model, prompts, request_keys=["a", "b", "c", "d", "e"], **options)
    expected = [
        _reference(model, p, key=k, **options) for p, k in zip(prompts, "abcde", strict=True)
    ]
    assert [(g.ids, g.finish) for g in got] == expected


def test_a_sliding_window_survives_left_padding(models):
    model = models("mistral", sliding_window=8)
    prompts = _prompts([4, 30, 13])
    options = {"max_new_tokens": 20, "eos_ids": frozenset[int]()}
    got = generate(model, prompts, **options)
    assert [(g.ids, g.finish) for g in got] == [_reference(model, p, **options) for p in prompts]


def test_long_answers_outgrow_the_first_room(models):
    model = models("llama", layers=2)
    prompts = _prompts([3, 9])
    options = {"max_new_tokens": 100, "eos_ids": frozenset[int]()}
    got = generate(model, prompts, **options)
    assert [(g.ids, g.finish) for g in got] == [_reference(model, p, **options) for p in prompts]


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_an_answer_depends_on_neither_number_nor_order_of_its_batch_mates(models, data):
    model = models("qwen3")
    prompts = dict(zip("abcdef", _prompts([4, 9, 2, 9, 15, 7]), strict=True))
    options = {
        "max_new_tokens": 10,
        "eos_ids": frozenset({1, 2}),
        "sampling": Sampling(
            temperature=data.draw(st.sampled_from([0.0, 0.7, 1.3])),
            top_p=data.draw(st.sampled_from([0.9, 1.0])),
        ),
        "seed": data.draw(st.integers(0, 3)),
    }
    keys = data.draw(st.permutations("abcdef"))[: data.draw(st.integers(1, 6))]
    together = generate(model, [prompts[k] for k in keys], request_keys=list(keys), **options)
    for key, answer in zip(keys, together, strict=True):
        assert generate(model, [prompts[key]], request_keys=[key], **options) == [answer]


def test_sampling_depends_on_seed_and_key(models):
    model = models("llama")
    prompt = _prompts([6])[0]
    options = {
        "max_new_tokens": 16,
        "eos_ids": frozenset[int](),
        "sampling": Sampling(temperature=1.0),
    }
    answers = {
        generate(model, [prompt], seed=seed, request_keys=[key], **options)[0].ids
        for seed in (0, 1)
        for key in (0, 1, "0", "1")
    }
    assert len(answers) == 8


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_finished_rows_stop_costing_and_only_last_logits_are_formed(models, kind):
    """Rows forwarded are counted at the embedding, rows of logits at lm_head."""
    model = models(kind)
    prompts = _prompts([8] * 6)
    embedded: list[tuple[int, ...]] = []
    headed: list[tuple[int, ...]] = []
    handles = [
        model.get_input_embeddings().register_forward_pre_hook(
            lambda _, args: embedded.append(tuple(args[0].shape))
        ),
        model.get_output_embeddings().register_forward_pre_hook(
            lambda _, args: headed.append(tuple(args[0].shape[:2]))
        ),
    ]
    try:
        answers = generate(
            model,
            prompts,
            max_new_tokens=25,
            eos_ids=frozenset(range(0, VOCAB, 6)),
            sampling=Sampling(temperature=1.0),
        )
    finally:
        for handle in handles:
            handle.remove()
    lengths = [len(a.ids) for a in answers]
    assert len(set(lengths)) > 2, "the rows have to end at different steps for this to mean much"
    assert embedded[0] == (6, 8)
    # A row that ends with its n-th token was forwarded for the n - 1 before that one.
    assert sum(rows for rows, _ in embedded[1:]) == sum(n - 1 for n in lengths)
    assert headed == [(rows, 1) for rows, _ in embedded]


def test_finish_reasons_and_end_tokens(models):
    model = models("llama")
    [free] = generate(model, [[1, 2, 3]], max_new_tokens=8, eos_ids=frozenset())
    assert (len(free.ids), free.finish) == (8, "length")
    end = free.ids[3]
    [stopped] = generate(model, [[1, 2, 3]], max_new_tokens=8, eos_ids=frozenset({end}))
    cut = free.ids.index(end) + 1
    assert (stopped.ids, stopped.finish) == (free.ids[:cut], "stop")
    # An end token at the limit is still an end.
    [last] = generate(model, [[1, 2, 3]], max_new_tokens=cut, eos_ids=frozenset({end}))
    assert last == stopped


def test_wrong_requests_are_refused(models):
    model = models("llama")
    options = {"max_new_tokens": 4, "eos_ids": frozenset[int]()}
    assert generate(model, [], **options) == []
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        generate(model, [[1], []], **options)
    with pytest.raises(ValueError, match="2 request keys for 1 prompts"):
        generate(model, [[1]], request_keys=["a", "b"], **options)
    with pytest.raises(ValueError, match="max_new_tokens 0"):
        generate(model, [[1]], max_new_tokens=0, eos_ids=frozenset())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_an_error(temperature: float, value: float):
    logits = torch.zeros(2, 8)
    logits[1, 5] = value
    noises = [PositionKeyedNoise(0, k) for k in (0, 1)]
    with pytest.raises(ValueError, match="not finite at position 12"):
        choose(logits, noises, [7, 12], Sampling(temperature=temperature))


def test_pitfall_15_draws_follow_the_distribution():
    """Chi-square over 10,000 positions of one request and over 10,000 requests of one position."""
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, -3.0]])
    expected = torch.softmax(logits[0] / 0.8, -1).double().numpy()
    n = 10_000
    one = PositionKeyedNoise(5, "request")
    by_position = choose(
        logits.expand(n, -1).clone(), [one] * n, range(n), Sampling(temperature=0.8)
    )
    many = [PositionKeyedNoise(5, i) for i in range(n)]
    by_request = choose(logits.expand(n, -1).clone(), many, [77] * n, Sampling(temperature=0.8))
    for draws in (by_position, by_request):
        counts = np.bincount(draws, minlength=6)
        chi_square = float((((counts - n * expected) ** 2) / (n * expected)).sum())
        assert chi_square < 20.5  # the 0.999 quantile for 5 degrees of freedom
    assert np.mean(np.array(by_position) == np.array(by_request)) < 0.6


def test_pitfall_15_top_p_draws_from_the_renormalised_nucleus():
    logits = torch.log(torch.tensor([[0.05, 0.4, 0.1, 0.3, 0.15]]))
    n = 6000
    draws = choose(
        logits.expand(n, -1).clone(),
        [PositionKeyedNoise(1, "x")] * n,
        range(n),
        Sampling(temperature=1.0, top_p=0.75),
    )
    counts = Counter(draws)
    assert set(counts) == {1, 3, 4}
    assert abs(counts[1] / n - 0.4 / 0.85) < 0.03


@given(
    weights=st.lists(st.floats(0, 1), min_size=1, max_size=40).filter(lambda w: sum(w) > 0.01),
    top_p=st.floats(0.01, 0.999),
)
def test_nucleus_is_the_smallest_set_with_the_mass(weights: list[float], top_p: float):
    row = np.array(weights, dtype=np.float32)
    row /= row.sum()
    kept = nucleus(row, top_p)
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    total, expected = 0.0, []
    for i in order:
        expected.append(i)
        total += float(row[i])
        if total >= top_p:
            break
    assert kept.tolist() == sorted(expected)


def test_noise_of_a_token_does_not_depend_on_which_others_are_asked_for():
    noise = PositionKeyedNoise(3, "r")
    everything = noise.exponentials(9, np.arange(500))
    some = np.array([0, 17, 200, 499])
    assert (noise.exponentials(9, some) == everything[some]).all()
    assert (noise.exponentials(10, some) != everything[some]).all()
    # The stream is part of the format: answers made by one version are made again by the next.
    assert PositionKeyedNoise(0, "p").exponentials(0, np.arange(2)).tolist() == FIRST_DRAWS
