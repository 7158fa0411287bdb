import dataclasses
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from feature_samples import random_features
from paceline.doctor.plan_bytes import CODECS, Samples, store_sizes
from paceline.doctor.plan_target import drafter_shape, read_target
from paceline.drafter.build import drafter_config
from paceline.drafter.checkpoint import save_drafter
from paceline.drafter.dflash import DFlash
from paceline.drafter.shape import DrafterShape
from paceline.drafter.vocabulary import DraftVocabulary
from paceline.durable.errors import RecipeError, TargetError, UserError
from paceline.features.plan import plan_units
from paceline.features.shard import write_shard
from paceline.recipe.schema import DrafterRecipe, ExtractRecipe, TrainRecipe
from paceline.target.spec import read_spec
from paceline.train.checkpoint import TrainState, save_checkpoint
from paceline.train.optimizer import build_optimizer
from plan_worlds import config_only
from tiny_models import tiny_model

KINDS = ("llama", "qwen2", "qwen3", "qwen3_5", "qwen3_next", "smollm3")


def built(recipe: DrafterRecipe, spec, taps: tuple[int, ...]) -> DFlash:
    config = drafter_config(
        recipe, spec, taps, mask_token_id=300, template_digest="", template_args={}
    )
    size = recipe.draft_vocab
    vocabulary = None if size is None else DraftVocabulary.of(range(size), spec.vocab_size)
    return DFlash(config, vocabulary)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3_5"])
@pytest.mark.parametrize(
    ("recipe", "taps"),
    [
        (DrafterRecipe(), (1, 2, 3)),
        (DrafterRecipe(layers=1, block_size=4), (2,)),
        (DrafterRecipe(layers=3, draft_vocab=100), (0, 1, 2, 3)),
        (DrafterRecipe(layers=2, layer_types=("full", "sliding")), (1, 3)),
    ],
)
def test_the_drafters_size_is_that_of_the_module(tmp_path, kind, recipe, taps):
    target = tiny_model(kind, tmp_path / "target", layers=8)
    spec = read_spec(target, identify=False)
    shape = drafter_shape(recipe, spec, len(taps))
    drafter = built(recipe, spec, taps)
    parameters = list(drafter.parameters())
    assert shape.parameters == sum(p.numel() for p in parameters)
    assert shape.tensors == len(parameters)
    assert shape.num_proposed == drafter.num_proposed
    state = drafter.state_dict().values()
    assert shape.weight_bytes == sum(t.numel() * t.element_size() for t in state)


@given(
    st.builds(
        DrafterShape,
        hidden_size=st.sampled_from([8, 24]),
        intermediate_size=st.integers(1, 40),
        num_layers=st.integers(1, 4),
        num_heads=st.sampled_from([2, 4]),
        num_kv_heads=st.sampled_from([1, 2]),
        head_dim=st.sampled_from([4, 6]),
        num_taps=st.integers(1, 5),
        vocab_size=st.integers(1, 50),
        draft_vocab_size=st.none(),
        block_size=st.integers(2, 8),
    )
)
def test_the_drafters_size_whatever_the_shape(shape):
    from paceline.drafter.config import DrafterConfig

    config = DrafterConfig(
        algorithm="dflash",
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=1e-5,
        rope={"rope_type": "default", "rope_theta": 1e4},
        max_position=64,
        vocab_size=shape.vocab_size,
        block_size=shape.block_size,
        mask_token_id=0,
        taps=tuple(range(shape.num_taps)),
    )
    parameters = list(DFlash(config).parameters())
    assert shape.parameters == sum(p.numel() for p in parameters)
    assert shape.tensors == len(parameters)


def test_a_warm_start_has_the_size_of_its_source(tmp_path):
    target = tiny_model("llama", tmp_path / "target")
    spec = read_spec(target, identify=False)
    source = DrafterRecipe(layers=2, draft_vocab=64, block_size=8)
    save_drafter(built(source, spec, (1, 2)), tmp_path / "warm")
    warm = DrafterRecipe(layers=5, warm_start=str(tmp_path / "warm"))
    assert drafter_shape(warm, spec, 2) == drafter_shape(source, spec, 2)
    (tmp_path / "warm" / "config.json").write_text("{}")
    with pytest.raises(UserError, match="not a drafter's config"):
        drafter_shape(warm, spec, 2)


def test_a_checkpoint_is_as_large_as_estimated(tmp_path):
    target = tiny_model("llama", tmp_path / "target", hidden=64)
    spec = read_spec(target, identify=False)
    recipe = DrafterRecipe(layers=3, draft_vocab=100)
    drafter = built(recipe, spec, (1, 2, 3))
    optimizer = build_optimizer(drafter, TrainRecipe())
    for parameter in drafter.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = TrainState(
        fingerprint="f" * 32, step=1, samples=1, bad_steps=0, skipped_steps=0, skipped_samples=0,
        tokens=1, seconds=1.0,
    )  # fmt: skip
    folder = save_checkpoint(tmp_path, drafter, optimizer, state)
    size = sum(file.stat().st_size for file in folder.iterdir())
    shape = drafter_shape(recipe, spec, 3)
    assert size == pytest.approx(shape.checkpoint_bytes, rel=0.01)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_the_targets_weights_are_those_that_are_loaded(tmp_path, kind, shard):
    from transformers import AutoModelForCausalLM

    target = tiny_model(kind, tmp_path / "target", max_shard_size=shard)
    sizes = read_target(target)
    model = AutoModelForCausalLM.from_pretrained(target)
    assert sizes.weights == sum(p.numel() for p in model.parameters())
    assert sizes.file_bytes == sum(f.stat().st_size for f in target.glob("*.safetensors"))
    layers = [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]
    if kind == "qwen3_next":
        experts = [
            sum(p.numel() for n, p in layer.named_parameters() if ".experts." in n)
            for layer in model.model.layers
        ]
        # Two of four experts see a token.
        layers = [whole - of // 2 for whole, of in zip(layers, experts, strict=True)]
    assert sizes.layer_weights == tuple(layers)


def test_a_tied_head_counts_once(tmp_path):
    target = tiny_model("llama", tmp_path / "target", tie_word_embeddings=True)
    apart = tiny_model("llama", tmp_path / "apart")
    assert read_target(apart).weights - read_target(target).weights == 320 * 32


def test_weights_that_are_not_there_are_unknown_and_bad_ones_an_error(tmp_path):
    sizes = read_target(config_only(tmp_path / "target"))
    assert (sizes.weights, sizes.file_bytes, sizes.layer_weights) == (None, None, ())
    assert "neither model.safetensors" in sizes.unknown
    (tmp_path / "target" / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0 not JSON ")
    with pytest.raises(TargetError, match=r"model\.safetensors: not a safetensors file"):
        read_target(tmp_path / "target")


def sampled(lengths: list[int]) -> Samples:
    return Samples(
        count=len(lengths), tokens=sum(lengths), longest=max(lengths), basis="corpus", said=""
    )


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("last", [False, True])
def test_t_47_a_store_is_as_large_as_estimated(tmp_path, codec, last):
    lengths = [20 + 7 * n % 90 for n in range(150)]
    hidden, recipe = 64, ExtractRecipe(taps=(1, 3), last=last, codec=codec, shard_bytes=200_000)
    sizes = store_sizes(recipe, sampled(lengths), lengths, num_layers=6, hidden_size=hidden)
    units = plan_units(
        lengths,
        bytes_per_token=sizes.bytes_per_token,
        shard_bytes=recipe.shard_bytes,
        batch_tokens=4096,
    )
    written = [
        write_shard(
            tmp_path / unit.key,
            random_features(lengths[unit.start : unit.stop], hidden=hidden, last=last),
            fingerprint="f" * 32,
            codec=codec,
        ).size
        for unit in units
    ]
    assert sizes.shards == len(units)
    assert max(written) <= sizes.largest_shard
    if codec == "none":
        assert sum(written) == pytest.approx(sizes.total, rel=0.01)
        # By the mean alone it is as near.
        by_mean = store_sizes(recipe, sampled(lengths), None, num_layers=6, hidden_size=hidden)
        assert sum(written) == pytest.approx(by_mean.total, rel=0.01)
    else:
        assert sizes.total < sizes.by_codec["none"]


def test_a_sample_larger_than_a_shard_is_one(tmp_path):
    recipe = ExtractRecipe(taps=(1,), shard_bytes=64 * 2 * 100)
    for lengths in ([50, 40, 170, 20], None):
        samples = sampled([50, 40, 170, 20])
        sizes = store_sizes(recipe, samples, lengths, num_layers=6, hidden_size=64)
        assert sizes.is_one_sample
        assert sizes.largest_shard > 170 * 128
    small = store_sizes(recipe, sampled([50, 40]), [50, 40], num_layers=6, hidden_size=64)
    assert not small.is_one_sample


@given(st.lists(st.integers(1, 60), min_size=1, max_size=60), st.integers(1, 4000))
def test_an_estimate_of_the_largest_shard_is_never_too_small(lengths, shard_bytes):
    recipe = ExtractRecipe(taps=(1,), shard_bytes=shard_bytes)
    exact = store_sizes(recipe, sampled(lengths), lengths, num_layers=6, hidden_size=8)
    known = dataclasses.replace(sampled(lengths), basis="data")
    # A shard of many short samples has more ids than the mean says.
    slack = 60 * 60
    estimate = store_sizes(recipe, known, None, num_layers=6, hidden_size=8)
    assert exact.largest_shard <= estimate.largest_shard + slack


def test_impossible_taps_are_refused():
    samples = sampled([10])
    with pytest.raises(RecipeError, match=r"extract\.taps"):
        store_sizes(ExtractRecipe(taps=(9,)), samples, None, num_layers=6, hidden_size=8)
    with pytest.raises(RecipeError, match=r"extract\.num_taps"):
        store_sizes(ExtractRecipe(num_taps=9), samples, None, num_layers=6, hidden_size=8)


def test_int8o_has_no_size_in_float32():
    recipe = ExtractRecipe(taps=(1,), dtype="float32")
    sizes = store_sizes(recipe, sampled([10]), None, num_layers=6, hidden_size=8)
    assert list(sizes.by_codec) == ["none", "planes"]
    assert json.dumps(sizes.by_codec)
