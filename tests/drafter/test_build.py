import dataclasses
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafting import load_tiny_target, make_doc, run_blocks, tiny_drafter
from paceline.drafter.build import choose_mask_token
from paceline.drafter.checkpoint import load_drafter, save_drafter
from paceline.durable.errors import RecipeError, ShardDamaged
from paceline.target.spec import read_spec
from tiny_models import tiny_model


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return read_spec(tiny_model("llama", tmp_path_factory.mktemp("target")))


@given(
    used=st.sets(st.integers(0, 319)),
    special=st.lists(st.integers(0, 319), max_size=4),
)
def test_pitfall_21_the_mask_token_is_never_pad_end_or_a_token_that_occurs(spec, used, special):
    spec = dataclasses.replace(spec, pad_token_id=258, bos_token_id=256)
    try:
        chosen = choose_mask_token(None, spec, special_ids=special, used=used)
    except RecipeError:
        assert used | {256, 257, 258} == set(range(320))
        return
    assert chosen not in used
    assert chosen not in (256, 257, 258)
    assert 0 <= chosen < spec.vocab_size
    free_padding = [i for i in range(spec.tokenizer_size, 320) if i not in used]
    if free_padding:
        assert chosen == free_padding[0]


@pytest.mark.parametrize("asked", [257, 5, 320, -1])
def test_pitfall_21_an_impossible_mask_token_is_refused(spec, asked):
    with pytest.raises(RecipeError, match=r"drafter\.mask_token_id"):
        choose_mask_token(asked, spec, special_ids=(), used={5})


def test_copies_of_the_target_s_last_layers(tmp_path):
    target = load_tiny_target(tmp_path, "qwen3")
    from paceline.drafter.build import drafter_config, new_drafter
    from paceline.recipe.schema import DrafterRecipe

    recipe = DrafterRecipe(layers=2, block_size=4)
    config = drafter_config(
        recipe, target.spec, (1, 2, 3), mask_token_id=300, template_digest="", template_args={}
    )
    drafter = new_drafter(config, recipe, target.spec, target.folder, seed=0)
    theirs = dict(target.decoder.layers[5].named_parameters())
    for name, parameter in drafter.layers[1].named_parameters():
        assert torch.equal(parameter, theirs[name]), name
    assert torch.equal(drafter.norm.weight, target.decoder.norm.weight)


def test_norms_of_the_one_plus_weight_kind_are_converted(tmp_path):
    target = load_tiny_target(tmp_path, "qwen3_5")
    drafter = tiny_drafter(target, init="random")
    from paceline.drafter.build import _copy_last_layers
    from paceline.target.weights import TensorReader

    _copy_last_layers(drafter, target.spec, TensorReader(target.folder))
    hidden = torch.randn(3, target.spec.hidden_size)
    torch.testing.assert_close(drafter.norm(hidden), target.head.norm(hidden))


def test_saved_and_loaded_again_bit_for_bit(tmp_path):
    target = load_tiny_target(tmp_path)
    drafter = tiny_drafter(target)
    save_drafter(drafter, tmp_path / "drafter")
    again = load_drafter(tmp_path / "drafter")
    assert again.config == drafter.config
    for (name, a), (_, b) in zip(
        drafter.state_dict().items(), again.state_dict().items(), strict=True
    ):
        assert torch.equal(a, b), name


def test_a_checkpoint_of_another_shape_is_refused(tmp_path):
    target = load_tiny_target(tmp_path)
    folder = tmp_path / "drafter"
    save_drafter(tiny_drafter(target, layers=2), folder)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"num_layers": 2', '"num_layers": 3'))
    with pytest.raises(ShardDamaged, match="differ from the config"):
        load_drafter(folder)


def test_t_30_the_explicit_head_dim_shapes_the_drafter_and_its_files(tmp_path):
    target = load_tiny_target(tmp_path, hidden=80, head_dim=32)
    drafter = tiny_drafter(target)
    attention = drafter.blocks[0].self_attn
    assert attention.q_proj.weight.shape == (128, 80)
    assert attention.k_proj.weight.shape == (64, 80)
    assert attention.o_proj.weight.shape == (80, 128)
    save_drafter(drafter, tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["head_dim"] == 32
    loaded = load_drafter(tmp_path / "saved")
    doc = make_doc(target, 16, answer_from=4)
    assert torch.equal(
        run_blocks(drafter, target, doc, [6, 9]), run_blocks(loaded, target, doc, [6, 9])
    )


def test_masks_travel_in_the_files(tmp_path):
    target = load_tiny_target(tmp_path)
    fields = {
        "in_block_mask": "causal",
        "layer_types": ("sliding", "full"),
        "sliding_window": 3,
        "sliding_in_block_mask": "bidirectional",
    }
    drafter = tiny_drafter(target, **fields)
    save_drafter(drafter, tmp_path / "saved")
    loaded = load_drafter(tmp_path / "saved")
    assert {name: getattr(loaded.config, name) for name in fields} == fields
    doc = make_doc(target, 16, answer_from=4)
    assert torch.equal(
        run_blocks(drafter, target, doc, [6, 9]), run_blocks(loaded, target, doc, [6, 9])
    )


def test_a_type_for_each_layer(tmp_path):
    with pytest.raises(RecipeError, match=r"drafter\.layer_types: 1 types for 2 layers"):
        tiny_drafter(load_tiny_target(tmp_path), layer_types=("sliding",))
