import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.overrides import TorchFunctionMode

from paceline.recipe.schema import TargetRecipe
from paceline.target.capture import CapturePlan
from paceline.target.load import Target, load_target
from paceline.target.transfer import HostCopies
from token_batches import random_batch, single

KINDS = ["llama", "qwen2", "qwen3", "qwen3_5", "qwen3_next"]
TAPS = (1, 3, 4)
T_37_LENGTHS = [42, 46, 43, 45, 37, 48, 42, 45]


def relative_l2(got, wanted):
    return ((got - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max()


def hook_count(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("kind", KINDS)
def test_pitfall_07_tap_i_is_the_output_of_layer_i(kind, tiny_target):
    target = tiny_target(kind)
    batch = random_batch([20])
    output = target.model(batch.input_ids[None], output_hidden_states=True)
    features = target.capture(batch, TAPS, last=True)
    for slot, layer in enumerate(TAPS):
        assert relative_l2(features.taps[:, slot], output.hidden_states[layer + 1][0]) <= 1e-5
        neighbour = output.hidden_states[layer][0]
        assert relative_l2(features.taps[:, slot], neighbour) > 1e-2
    assert relative_l2(features.last, output.hidden_states[-1][0]) <= 1e-5
    assert features.layer_ids == TAPS


@pytest.mark.parametrize("kind", KINDS)
def test_t_37_batch_of_eight_equals_one_by_one(kind, tiny_target):
    target = tiny_target(kind)
    batch = random_batch(T_37_LENGTHS)
    together = target.capture(batch, TAPS, last=True)
    assert torch.equal(together.tokens.input_ids, batch.input_ids)
    assert torch.equal(together.tokens.loss_mask, batch.loss_mask)
    assert together.tokens.sample_ids == batch.sample_ids
    assert together.taps.shape == (sum(T_37_LENGTHS), len(TAPS), 32)
    for n in range(len(batch)):
        alone = target.capture(single(batch, n), TAPS, last=True)
        span = slice(int(batch.offsets[n]), int(batch.offsets[n + 1]))
        assert relative_l2(together.taps[span], alone.taps) <= 1e-5
        assert relative_l2(together.last[span], alone.last) <= 1e-5
    again = target.capture(batch, TAPS, last=True)
    assert torch.equal(again.taps, together.taps)
    assert torch.equal(again.last, together.last)


@pytest.mark.parametrize("kind", KINDS)
def test_t_37_in_bfloat16_a_sample_s_states_point_the_same_way(kind, tiny_target):
    target = tiny_target(kind, dtype="bfloat16")
    batch = random_batch(T_37_LENGTHS)
    together = target.capture(batch, TAPS, last=True)
    for n in range(len(batch)):
        alone = target.capture(single(batch, n), TAPS, last=True)
        span = slice(int(batch.offsets[n]), int(batch.offsets[n + 1]))
        for ours, theirs in ((together.taps[span], alone.taps), (together.last[span], alone.last)):
            similar = torch.cosine_similarity(ours.double().flatten(), theirs.double().flatten(), 0)
            assert similar > 0.9999


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_padding_needs_no_mask_and_changes_nothing(kind, tiny_target):
    target = tiny_target(kind)
    masks = []
    handle = target.decoder.register_forward_pre_hook(
        lambda _, __, kwargs: masks.append(kwargs.get("attention_mask")), with_kwargs=True
    )
    batch = random_batch([16, 16, 16])
    even = target.capture(batch, TAPS)
    uneven = target.capture(random_batch([16, 16, 16, 3]), TAPS)
    handle.remove()
    assert masks == [None, None]
    for n in range(3):
        alone = target.capture(single(batch, n), TAPS)
        assert relative_l2(even.taps[16 * n : 16 * n + 16], alone.taps) <= 1e-5
    assert relative_l2(uneven.taps[:48], even.taps) <= 1e-5
    assert len(uneven.taps) == 51


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_rows_stand_in_the_order_of_the_tokens(lengths, seed, llama):
    """Whatever the lengths, each row is that of its own token, and its own position."""
    batch = random_batch(lengths, seed=seed)
    got = llama.capture(batch, (0, 2))
    rows = [llama.capture(single(batch, n), (0, 2)).taps for n in range(len(batch))]
    assert relative_l2(got.taps, torch.cat(rows)) <= 1e-5
    assert torch.equal(got.tokens.input_ids, batch.input_ids)


@pytest.fixture(scope="module")
def llama(tiny_folder):
    return load_target(TargetRecipe(path=str(tiny_folder("llama"))))


class ConstantLayer(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, hidden_states, **_):
        return torch.full_like(hidden_states, self.value)


def test_t_40_channels_are_exactly_the_layers_asked_for(tiny_target):
    target = tiny_target("llama")
    target.decoder.layers = nn.ModuleList(ConstantLayer(i) for i in range(6))
    features = target.capture(random_batch([3, 5]), (1, 2, 3), last=True)
    for slot, layer in enumerate((1, 2, 3)):
        assert torch.equal(features.taps[:, slot], torch.full((8, 32), float(layer)))
    assert features.layer_ids == (1, 2, 3)
    torch.testing.assert_close(features.last, target.head.norm(torch.full((8, 32), 5.0)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("taps", "last", "layers_run"), [
    ((0,), False, 1), ((1, 3), False, 4), ((1, 3), True, 6), ((), True, 6),
])  # fmt: skip
def test_layers_after_the_last_one_needed_never_run(kind, taps, last, layers_run, tiny_target):
    target = tiny_target(kind)
    ran = []
    for i, layer in enumerate(target.decoder.layers):
        layer.register_forward_pre_hook(lambda *_, i=i: ran.append(i))
    target.model.lm_head.register_forward_pre_hook(lambda *_: pytest.fail("logits were made"))
    target.decoder.norm.register_forward_pre_hook(lambda *_: ran.append("norm"))
    features = target.capture(random_batch([4, 6]), taps, last=last)
    assert ran == [*range(layers_run), *(["norm"] if last else [])]
    assert (features.last is not None) == last


def test_the_model_is_left_as_it_was_even_after_a_failure(tiny_target):
    target = tiny_target("qwen3_5")
    batch = random_batch([9])
    before = target.model(batch.input_ids[None]).logits
    hooks = hook_count(target.model)
    target.capture(batch, (1,))
    target.capture(batch, (1, 4), last=True)
    breaker = target.decoder.layers[2].register_forward_pre_hook(
        lambda *_: (_ for _ in ()).throw(RuntimeError("device lost"))
    )
    with pytest.raises(RuntimeError, match="device lost"):
        target.capture(batch, (1, 4))
    breaker.remove()
    assert hook_count(target.model) == hooks
    assert len(target.decoder.layers) == target.model.config.num_hidden_layers == 6
    assert torch.equal(target.model(batch.input_ids[None]).logits, before)


class CopiesSeen(TorchFunctionMode):
    """Notes the calls that bring a floating-point tensor to the host or wait for it."""

    NAMES = ("cpu", "item", "tolist", "numpy", "__bool__", "__int__", "__float__", "nonzero")

    def __init__(self):
        super().__init__()
        self.from_decoder = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        to_host = name == "to" and ("cpu" in args[1:] or torch.device("cpu") in args[1:])
        if (to_host or name in self.NAMES) and args[0].is_floating_point():
            self.from_decoder.append((name, args[0].numel()))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("chunk_tokens", [None, 2, 4])
def test_one_copy_to_the_host_per_batch(chunk_tokens, tiny_target):
    target = tiny_target("llama")
    copies = HostCopies(target.device)
    plan = CapturePlan((1, 2, 3), True, chunk_tokens)
    batches = [random_batch([4, 6, 2, 9]), random_batch([5]), random_batch([1, 8])]
    for done, batch in enumerate(batches, 1):
        with CopiesSeen() as seen:
            target.start_capture(batch, plan, copies).wait()
        assert copies.count == done
        assert seen.from_decoder in ([], [("to", batch.input_ids.numel() * 4 * 32)])
    # The pass of the first batch, seen from outside of the counter as well.
    with CopiesSeen() as seen:
        target.capture(batches[0], (1, 2, 3), last=True, chunk_tokens=chunk_tokens)
    assert seen.from_decoder == [("to", 21 * 4 * 32)]


def test_results_are_contiguous_and_constants_under_autograd(tiny_target):
    target = tiny_target("llama")
    features = target.capture(random_batch([4, 6]), (1, 3), last=True)
    assert features.taps.is_contiguous()
    assert features.last.is_contiguous()
    assert not features.taps.requires_grad
    weight = torch.ones(32, requires_grad=True)
    ((features.taps * weight).sum() + (features.last * weight).sum()).backward()
    torch.testing.assert_close(weight.grad, features.taps.sum((0, 1)) + features.last.sum(0))


def test_memory_does_not_depend_on_layers_not_tapped(tiny_target):
    target = tiny_target("llama")
    features = target.capture(random_batch([40, 50]), (0, 4))
    assert features.taps.untyped_storage().nbytes() == 90 * 2 * 32 * 4


@pytest.mark.gpu
def test_gpu_capture_equals_the_cpus(tiny_folder):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    batch = random_batch(T_37_LENGTHS)
    for kind in KINDS:
        path = str(tiny_folder(kind))
        cpu: Target = load_target(TargetRecipe(path=path))
        gpu = load_target(TargetRecipe(path=path, device="cuda:0"))
        ours, theirs = (t.capture(batch, TAPS, last=True) for t in (gpu, cpu))
        assert ours.taps.device.type == ours.last.device.type == "cpu"
        assert relative_l2(ours.taps, theirs.taps) <= 1e-3
        assert relative_l2(ours.last, theirs.last) <= 1e-3
