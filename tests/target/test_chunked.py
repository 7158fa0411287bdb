"""T-39: a sample that passes in pieces has the states of one that passes whole."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.durable.errors import TargetError
from paceline.recipe.schema import TargetRecipe
from paceline.target.capture import CapturePlan
from paceline.target.check import self_check
from paceline.target.chunked import new_cache, pieces_of
from paceline.target.families import LayerKind
from paceline.target.load import load_target
from paceline.target.transfer import HostCopies
from tiny_models import tiny_model
from token_batches import random_batch, single

# Random linear layers of larger weights are 2e-4 from the exact result in fp32 by themselves, which
# would hide what is measured here.
_MILD = {"initializer_range": 0.05}
_HALF_SLIDING = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2}
SHAPES = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {}),
    "mistral-sliding": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2-sliding": ("qwen2", _HALF_SLIDING),
    "qwen3": ("qwen3", {}),
    "qwen3-sliding": ("qwen3", _HALF_SLIDING),
    "qwen3_5": ("qwen3_5", _MILD),
    "qwen3_next": ("qwen3_next", _MILD),
    "smollm3": ("smollm3", {}),
}
TAPS = (1, 3, 4)


def relative_l2(got, wanted):
    return ((got - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max()


@pytest.fixture(scope="module")
def target_of(tmp_path_factory):
    root, made = tmp_path_factory.mktemp("chunked"), {}

    def target(name):
        if name not in made:
            kind, more = SHAPES[name]
            folder = tiny_model(kind, root / name, **more)
            made[name] = load_target(TargetRecipe(path=str(folder)))
        return made[name]

    return target


def assert_same_states(got, wanted, limit=1e-5):
    assert torch.equal(got.tokens.input_ids, wanted.tokens.input_ids)
    assert torch.equal(got.tokens.offsets, wanted.tokens.offsets)
    assert got.taps.shape == wanted.taps.shape
    assert relative_l2(got.taps, wanted.taps) <= limit
    assert (got.last is None) == (wanted.last is None)
    if got.last is not None:
        assert relative_l2(got.last, wanted.last) <= limit


@pytest.mark.parametrize("name", SHAPES)
def test_t_39_500_tokens_in_pieces_of_128_are_those_of_one_pass(name, target_of):
    target = target_of(name)
    batch = random_batch([500])
    whole = target.capture(batch, TAPS, last=True)
    pieces = target.capture(batch, TAPS, last=True, chunk_tokens=128)
    assert len(pieces.taps) == len(pieces.last) == 500
    assert_same_states(pieces, whole)
    output = target.model(batch.input_ids[None], output_hidden_states=True, use_cache=False)
    assert relative_l2(pieces.taps[:, 1], output.hidden_states[4][0]) <= 1e-5


@pytest.mark.parametrize("name", SHAPES)
def test_t_39_one_long_sample_among_short_ones(name, target_of):
    """Samples end inside a piece, at its very end, and after a single token."""
    target = target_of(name)
    batch = random_batch([3, 130, 64, 1, 65, 32, 31, 33])
    pieces = target.capture(batch, TAPS, last=True, chunk_tokens=32)
    for n in range(len(batch)):
        alone = target.capture(single(batch, n), TAPS, last=True)
        rows = slice(int(batch.offsets[n]), int(batch.offsets[n + 1]))
        assert relative_l2(pieces.taps[rows], alone.taps) <= 1e-5
        assert relative_l2(pieces.last[rows], alone.last) <= 1e-5


@pytest.mark.parametrize("name", ["mistral-sliding", "qwen3-sliding"])
def test_padding_beyond_the_window_disturbs_nobody(name, target_of):
    """A padded place sees no real key there; what it holds must not reach the real rows."""
    target = target_of(name)
    batch = random_batch([1, 120, 2])
    together = target.capture(batch, TAPS, last=True)
    assert bool(torch.isfinite(together.taps).all())
    for n in range(3):
        alone = target.capture(single(batch, n), TAPS, last=True)
        rows = slice(int(batch.offsets[n]), int(batch.offsets[n + 1]))
        assert relative_l2(together.taps[rows], alone.taps) <= 1e-5


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("taps", [(0,), (1, 3)])
def test_layers_after_the_last_tap_run_in_no_piece(name, taps, target_of):
    target = target_of(name)
    ran = []
    handles = [
        layer.register_forward_pre_hook(lambda *_, i=i: ran.append(i))
        for i, layer in enumerate(target.decoder.layers)
    ]
    batch = random_batch([20, 70])
    pieces = target.capture(batch, taps, chunk_tokens=32)
    for handle in handles:
        handle.remove()
    assert ran == [*range(taps[-1] + 1)] * 3
    assert_same_states(pieces, target.capture(batch, taps))


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    chunk_tokens=st.integers(1, 31),
    name=st.sampled_from(["llama", "qwen3-sliding", "qwen3_5"]),
    seed=st.integers(0, 99),
)
def test_t_39_any_lengths_in_any_pieces(lengths, chunk_tokens, name, seed, target_of):
    target = target_of(name)
    batch = random_batch(lengths, seed=seed)
    pieces = target.capture(batch, TAPS, last=True, chunk_tokens=chunk_tokens)
    assert_same_states(pieces, target.capture(batch, TAPS, last=True))


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    chunk_tokens=st.none() | st.integers(1, 41),
)
def test_every_token_is_in_exactly_one_piece(lengths, chunk_tokens):
    batch = random_batch(lengths)
    rows, before = [], torch.arange(len(lengths))
    for number, piece in enumerate(pieces_of(batch, chunk_tokens)):
        before = before if piece.keep is None else before[piece.keep]
        assert len(piece.ids) == len(before)
        assert piece.ids.shape[1] <= (chunk_tokens or max(lengths))
        real = piece.ids.flatten()
        real = real if piece.real is None else real[piece.real]
        here = torch.arange(sum(lengths)) if piece.rows is None else piece.rows
        assert torch.equal(real, batch.input_ids[here])
        assert number == 0 or piece.rows is not None
        rows += here.tolist()
    assert sorted(rows) == list(range(sum(lengths)))


def test_samples_that_fit_take_one_pass_without_a_cache(target_of):
    target = target_of("llama")
    calls = []
    handle = target.decoder.register_forward_pre_hook(
        lambda _, __, kwargs: calls.append(kwargs), with_kwargs=True
    )
    target.capture(random_batch([32, 7]), TAPS, chunk_tokens=32)
    target.capture(random_batch([33, 7]), TAPS, chunk_tokens=32)
    handle.remove()
    assert [call["use_cache"] for call in calls] == [False, True, True]
    assert [tuple(call["input_ids"].shape) for call in calls] == [(2, 32), (2, 32), (1, 1)]


@pytest.mark.parametrize(
    ("held", "kind"),
    [("llama", LayerKind.LINEAR), ("qwen3_5", LayerKind.FULL), ("qwen3-sliding", LayerKind.LINEAR)],
)
def test_a_kind_whose_state_is_not_carried_over_is_refused_by_name(held, kind, target_of):
    target = target_of(held)
    kinds = list(target.spec.layer_kinds)
    kinds[2] = kind
    with pytest.raises(TargetError, match=f"layer 2 of {held} is of kind {kind.value}.*to null"):
        new_cache(target.decoder, kinds, held)


@pytest.mark.parametrize("name", ["llama", "qwen2-sliding", "qwen3_next"])
def test_the_self_check_takes_pieces_too(name, target_of):
    target = target_of(name)
    self_check(target, random_batch([30, 100, 12]), TAPS, chunk_tokens=512)


def test_a_cache_that_forgets_is_caught_by_the_self_check(target_of, monkeypatch):
    """What a version of Transformers without a state between pieces would do."""
    target = target_of("qwen3_5")

    def forgetful(*arguments):
        cache = new_cache(*arguments)
        monkeypatch.setattr(cache, "get_recurrent_state", lambda *_, **__: None)
        return cache

    monkeypatch.setattr("paceline.target.capture.new_cache", forgetful)
    with pytest.raises(TargetError, match="self-check: sample s0 in pieces, tap 1"):
        self_check(target, random_batch([60, 30]), TAPS, chunk_tokens=16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_states_can_be_converted_before_they_are_copied(dtype, target_of):
    target = target_of("llama")
    batch = random_batch([5, 40])
    wanted = target.capture(batch, TAPS, last=True)
    for chunk_tokens in (None, 16):
        plan = CapturePlan(TAPS, True, chunk_tokens, dtype)
        got = target.start_capture(batch, plan, HostCopies(target.device)).wait()
        assert got.taps.dtype == got.last.dtype == dtype
        limit = 1e-5 if dtype is torch.float32 else 2**-8
        assert relative_l2(got.taps.float(), wanted.taps) <= limit
        if chunk_tokens is None:
            assert torch.equal(got.taps, wanted.taps.to(dtype))
