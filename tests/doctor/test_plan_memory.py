import dataclasses
from typing import Any

import pytest
import torch

from paceline.doctor.plan_bytes import Samples, store_sizes
from paceline.doctor.plan_memory import Sizes, StageMemory, memory
from paceline.doctor.plan_target import drafter_shape, read_target
from paceline.drafter.attention import Document
from paceline.drafter.build import drafter_config
from paceline.drafter.config import DrafterConfig
from paceline.drafter.dflash import DFlash
from paceline.drafter.memory import CUDA_CONTEXT_BYTES, logits_bytes, micro_batch, training_bytes
from paceline.drafter.shape import DrafterShape
from paceline.recipe.objective_terms import ObjectiveTerm
from paceline.recipe.schema import (
    CorpusRecipe,
    DrafterRecipe,
    ExtractRecipe,
    Recipe,
    RegenerateRecipe,
    TargetRecipe,
    TrainRecipe,
)
from paceline.train.compute import computing
from paceline.train.memory import Demand, total
from tiny_models import tiny_model

SHAPE = DrafterShape(
    hidden_size=64, intermediate_size=192, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    num_taps=3, vocab_size=1000, draft_vocab_size=None, block_size=16,
)  # fmt: skip


def kept_for_backward(shape: DrafterShape, context: int, blocks: int, dtype: torch.dtype) -> int:
    """Bytes that autograd really keeps of a forward pass, the fp32 weights left out."""
    config = DrafterConfig(
        algorithm="dflash", hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size, num_layers=shape.num_layers,
        num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim,
        rms_norm_eps=1e-5, rope={"rope_type": "default", "rope_theta": 1e4}, max_position=4096,
        vocab_size=shape.vocab_size, block_size=shape.block_size, mask_token_id=1,
        taps=tuple(range(shape.num_taps)),
    )  # fmt: skip
    drafter = DFlash(config)
    weights = {p.untyped_storage().data_ptr() for p in drafter.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    anchors = torch.linspace(1, context - 1, blocks).long()
    slots = torch.randn(blocks, shape.block_size, shape.hidden_size, dtype=dtype)
    taps = torch.randn(context, shape.num_taps, shape.hidden_size, dtype=dtype)
    document = Document(slice(0, context), slice(0, blocks))
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, computing(drafter, dtype):
        drafter(slots, anchors, taps, torch.arange(context), [document])
    return sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in weights)


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("shape", "context", "blocks"),
    [
        (SHAPE, 400, 40),
        (dataclasses.replace(SHAPE, num_layers=4, num_kv_heads=4), 800, 20),
        (dataclasses.replace(SHAPE, hidden_size=128, intermediate_size=256, block_size=8), 200, 60),
        (dataclasses.replace(SHAPE, intermediate_size=768, head_dim=48, num_taps=1), 100, 60),
    ],
)
def test_the_activations_of_the_training_are_those_that_autograd_keeps(
    shape, context, blocks, compute
):
    """The formula is an estimate; it is one to a tenth."""
    recipe = TrainRecipe(
        compute=compute,
        anchors=blocks,
        micro_batch_tokens=context + blocks * shape.block_size,
    )
    assert micro_batch(recipe, shape, context) == (context, blocks * shape.block_size)
    found = kept_for_backward(shape, context, blocks, getattr(torch, compute))
    # Autocast keeps its copies of the weights with the activations.
    copies = 2 * shape.parameters if compute == "bfloat16" else 0
    assert training_bytes(recipe, shape, context) + copies == pytest.approx(found, rel=0.1)


def test_the_largest_micro_batch_is_a_full_one_or_one_long_sample_or_a_step():
    few = TrainRecipe(anchors=10, batch_samples=4, micro_batch_tokens=8192)
    assert micro_batch(few, SHAPE, 96) == (4 * 96, 4 * 10 * 16)
    recipe = TrainRecipe(anchors=512, micro_batch_tokens=8192)
    assert micro_batch(recipe, SHAPE, 2048) == (2048, 512 * 16)
    context, slots = micro_batch(recipe, SHAPE, 100)
    assert context + slots == 8192
    assert slots > 7000


def test_logits_are_bounded_by_the_chunk_and_are_one_rows_at_least():
    def of(chunk: int, compute: Any = "float32") -> int:
        return logits_bytes(TrainRecipe(loss_chunk=chunk, compute=compute), SHAPE, 100)

    assert of(10_000) == 10 * 1000 * 4
    assert of(10_000, "bfloat16") == 10 * 1000 * 8
    assert of(1) == 1000 * 4
    narrow = dataclasses.replace(SHAPE, draft_vocab_size=100)
    assert logits_bytes(TrainRecipe(loss_chunk=1), narrow, 100) == 400


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_model("llama", tmp_path_factory.mktemp("target"), hidden=32)


def planned(target, recipe: Recipe, **more: int) -> dict[str, StageMemory]:
    sizes = read_target(target)
    samples = Samples(count=1000, tokens=100_000, longest=200, basis="data", said="")
    # Online, the store has the few samples of the validation alone.
    trained = dataclasses.replace(samples, longest=300) if recipe.train.online else samples
    store = store_sizes(recipe.extract, samples, None, num_layers=6, hidden_size=32)
    drafter = drafter_shape(recipe.drafter, sizes.spec, len(store.taps))
    stages = memory(
        recipe,
        Sizes(target=sizes, drafter=drafter, samples=samples, trained=trained, store=store),
        **more,
    )
    return {stage.stage: stage for stage in stages}


def parts(stage: StageMemory, *, device: bool = False) -> dict[str, int | None]:
    return {part.name: part.bytes for part in (stage.on_device if device else stage.on_host)}


def test_weights_states_and_buffers_are_exact(target):
    recipe = Recipe(
        target=TargetRecipe(device="cuda:0", dtype="bfloat16"),
        corpus=CorpusRecipe(max_length=200),
        extract=ExtractRecipe(taps=(1, 3), batch_tokens=512),
        drafter=DrafterRecipe(layers=2),
        train=TrainRecipe(device="cuda:0"),
    )
    stages = planned(target, recipe)
    sizes = read_target(target)
    numbers = drafter_shape(recipe.drafter, sizes.spec, 2).parameters
    train = parts(stages["train"], device=True)
    assert train["drafter weights"] == train["gradients"] == 4 * numbers
    assert train["AdamW moments"] == 8 * numbers
    assert train["embedding and lm_head"] == 2 * 320 * 32 * 2
    # The mean of several drafters is made on the CPU: it takes nothing here.
    assert train["averaging"] == 0
    extract = parts(stages["extract"], device=True)
    assert extract["target weights"] == 2 * sizes.weights
    assert extract["capture buffers"] == 2 * 512 * 2 * 32 * 2
    assert extract["CUDA context"] == CUDA_CONTEXT_BYTES
    assert stages["extract"].total("device") == sum(extract.values())


@pytest.mark.parametrize(("draft_vocab", "kind"), [(100, "lk_hybrid"), (100, "kl"), (None, "tv")])
def test_rows_that_a_loss_reads_and_nobody_proposes_are_counted(target, draft_vocab, kind):
    recipe = Recipe(
        target=TargetRecipe(device="cuda:0", dtype="bfloat16"),
        extract=ExtractRecipe(taps=(1, 3), last=True),
        drafter=DrafterRecipe(layers=2, draft_vocab=draft_vocab),
        train=TrainRecipe(device="cuda:0", objective=(ObjectiveTerm(kind=kind),)),
    )
    train = parts(planned(target, recipe)["train"], device=True)
    rows = 320 + (draft_vocab or 320) + (320 if kind == "lk_hybrid" else 0)
    assert train["embedding and lm_head"] == 2 * rows * 32


@pytest.mark.parametrize("draft_vocab", [None, 100])
def test_a_training_is_told_what_the_plan_says(target, draft_vocab):
    recipe = Recipe(
        extract=ExtractRecipe(taps=(1, 3)),
        drafter=DrafterRecipe(layers=2, draft_vocab=draft_vocab),
        train=TrainRecipe(device="cuda:0"),
    )
    config = drafter_config(
        recipe.drafter, read_target(target).spec, (1, 3),
        mask_token_id=300, template_digest="", template_args={},
    )  # fmt: skip
    told = Demand(longest=200, is_tied=False).parts(recipe.train, config, "cuda:0")
    plan = planned(target, recipe)["train"].total("device")
    assert total(told) == plan - CUDA_CONTEXT_BYTES


def test_a_reduced_vocabulary_has_rows_of_its_own(target):
    recipe = Recipe(extract=ExtractRecipe(taps=(1,)), drafter=DrafterRecipe(draft_vocab=100))
    assert parts(planned(target, recipe)["train"])["embedding and lm_head"] == 4 * 32 * 420


def test_workers_have_the_target_once_each(target):
    one = Recipe(extract=ExtractRecipe(taps=(1,)))
    three = dataclasses.replace(one, target=TargetRecipe(workers=3))
    for stage in ("regenerate", "extract", "score"):
        whole = planned(target, three)[stage].total("host")
        assert whole == 3 * planned(target, one)[stage].total("host")
    on_gpus = dataclasses.replace(one, target=TargetRecipe(devices=(0, 1, 2)))
    extract = planned(target, on_gpus)["extract"]
    assert extract.device == "cuda:0, cuda:1, cuda:2"
    alone = dataclasses.replace(one, target=TargetRecipe(device="cuda:0"))
    assert extract.total("device") == planned(target, alone)["extract"].total("device")
    assert extract.total("host") == 3 * planned(target, alone)["extract"].total("host")


def test_pieces_need_what_they_hand_on(target):
    recipe = Recipe(extract=ExtractRecipe(taps=(1, 3), batch_tokens=512))
    assert "keys and values" not in parts(planned(target, recipe)["extract"])
    chunked = dataclasses.replace(
        recipe, extract=dataclasses.replace(recipe.extract, chunk_tokens=50)
    )
    # Layers 0 to 3 run; each keeps 2 heads of 16 for keys and for values.
    held = parts(planned(target, chunked)["extract"])["keys and values"]
    assert held == 4 * 2 * 2 * 16 * 512 * 4


def test_what_is_not_regenerated_needs_no_memory_for_it(target):
    recipe = Recipe(extract=ExtractRecipe(taps=(1,)), regenerate=RegenerateRecipe(enabled=False))
    assert list(planned(target, recipe)) == ["extract", "train", "score"]


def test_files_and_staging_in_memory_are_host_memory(target):
    recipe = Recipe(extract=ExtractRecipe(taps=(1,)))
    plain, more = planned(target, recipe), planned(target, recipe, staging_bytes=7)
    assert more["extract"].total("host") == plain["extract"].total("host") + 7
    assert more["train"].total("host") == plain["train"].total("host")
    files = planned(target, recipe, files_in_memory=9)
    assert all(files[s].total("host") == plain[s].total("host") + 9 for s in plain)


def test_parts_that_are_not_known_are_named(tmp_path):
    from plan_worlds import config_only

    folder = config_only(tmp_path / "t", hidden_size=32, num_hidden_layers=6)
    recipe = Recipe(extract=ExtractRecipe(taps=(1,)))
    extract = planned(folder, recipe)["extract"]
    assert extract.unknown("host") == ("target weights",)
    assert extract.total("host") > 0
