import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.durable.errors import DataError, RecipeError, TargetError
from paceline.recipe.schema import TargetRecipe
from paceline.target.load import load_target
from token_batches import random_batch


def test_target_is_frozen_and_in_eval_mode_with_sdpa(tiny_target):
    target = tiny_target("llama")
    assert not target.model.training
    assert not any(p.requires_grad for p in target.model.parameters())
    assert target.model.config._attn_implementation == "sdpa"
    assert target.tokenizer.eos_token_id in target.spec.eos_token_ids
    assert len(target.tokenizer) == target.spec.tokenizer_size


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_features_have_the_recipes_dtype(dtype, tiny_folder):
    target = load_target(TargetRecipe(path=str(tiny_folder("llama")), dtype=dtype))
    features = target.capture(random_batch([4, 7]), (1, 3), last=True)
    wanted = getattr(torch, dtype)
    assert features.taps.dtype == features.last.dtype == target.head.lm_head.dtype == wanted


def test_a_tensor_that_is_missing_is_refused_instead_of_random(tiny_folder, tmp_path):
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetError, match=r"layers\.3\.mlp\.up_proj"):
        load_target(TargetRecipe(path=str(folder)))


def test_a_damaged_file_and_an_absent_device_are_refused(tiny_folder, tmp_path):
    with pytest.raises(TargetError, match=r"target\.device: 'cuda:77'"):
        load_target(TargetRecipe(path=str(tiny_folder("llama")), device="cuda:77"))
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "m")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(TargetError, match="cannot load"):
        load_target(TargetRecipe(path=str(folder)))


def test_samples_that_the_target_cannot_process_are_refused(tiny_target):
    target = tiny_target("llama")
    with pytest.raises(DataError, match="s1: 513 tokens"):
        target.capture(random_batch([3, 513]), (1,))
    with pytest.raises(DataError, match="s0: 0 tokens"):
        target.capture(random_batch([0, 3]), (1,))
    batch = random_batch([5])
    batch.input_ids[2] = 320
    with pytest.raises(DataError, match="another tokenizer"):
        target.capture(batch, (1,))
    with pytest.raises(RecipeError, match="last layer"):
        target.capture(random_batch([5]), (1, 5))
    with pytest.raises(ValueError, match="no samples"):
        target.capture(random_batch([]), (1,))
