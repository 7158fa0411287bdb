import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny_models
from paceline.durable.errors import TargetError
from paceline.recipe.schema import TargetRecipe
from paceline.target.head import TargetHead
from paceline.target.load import load_target
from token_batches import random_batch

TENSORS = ("embedding", "lm_head", "norm_weight")


def load(folder, dtype=torch.float32):
    return TargetHead.load(folder, dtype=dtype, device="cpu")


def pre_norm(target, ids):
    """The residual stream that goes into the final norm, and the model's logits."""
    seen = []
    handle = target.decoder.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    logits = target.model(ids).logits
    handle.remove()
    return seen[0], logits


@pytest.mark.parametrize("kind", tiny_models.TINY_KINDS)
def test_t_41_lm_head_of_the_norm_gives_the_models_logits(kind, tiny_folder, tiny_target):
    head, target = load(tiny_folder(kind)), tiny_target(kind)
    ids = torch.arange(24).view(2, 12)
    residual, logits = pre_norm(target, ids)
    assert (head.logits(head.norm(residual)) - logits).abs().max() <= 1e-4
    assert (head.logits(residual) - logits).abs().max() > 0.1
    torch.testing.assert_close(head.embed(ids), target.model.get_input_embeddings()(ids))


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_t_41_a_final_norm_with_the_constant_weight_three(kind, tiny_target, tmp_path):
    target = tiny_target(kind)
    target.decoder.norm.weight.fill_(3.0)
    target.model.save_pretrained(tmp_path)
    head = load(tmp_path)
    residual, logits = pre_norm(target, torch.arange(12)[None])
    assert (head.logits(head.norm(residual)) - logits).abs().max() <= 1e-4
    scale = 3.0 if kind == "llama" else 4.0
    unit = residual * residual.pow(2).mean(-1, keepdim=True).add(1e-5).rsqrt()
    torch.testing.assert_close(head.norm(residual), scale * unit)


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_norm_rounds_as_the_model_does_in_bf16(kind, tiny_folder):
    target = load_target(TargetRecipe(path=str(tiny_folder(kind)), dtype="bfloat16"))
    head = load(tiny_folder(kind), torch.bfloat16)
    residual, _ = pre_norm(target, torch.arange(12)[None])
    assert torch.equal(head.norm(residual), target.decoder.norm(residual))


@pytest.mark.parametrize("tied", [False, True])
def test_sharded_and_single_checkpoints_give_the_same_head(tied, tmp_path):
    single = tiny_models.tiny_model("qwen3", tmp_path / "one", tie_word_embeddings=tied)
    shards = tiny_models.tiny_model(
        "qwen3", tmp_path / "many", tie_word_embeddings=tied, max_shard_size="40KB"
    )
    assert len(list(shards.glob("model-*.safetensors"))) > 2
    one, many = load(single), load(shards)
    assert all(torch.equal(getattr(one, name), getattr(many, name)) for name in TENSORS)
    assert (one.lm_head is one.embedding) == tied
    assert torch.equal(one.lm_head, one.embedding) == tied


def test_the_layers_are_not_read(tiny_folder, tmp_path):
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    ends = {name: t for name, t in tensors.items() if ".layers." not in name}
    save_file(ends, folder / "model.safetensors", metadata={"format": "pt"})
    head, whole = load(folder), load(tiny_folder("llama"))
    assert all(torch.equal(getattr(head, n), getattr(whole, n)) for n in TENSORS)


def test_names_of_a_multimodal_checkpoint(tiny_folder, tmp_path):
    folder = shutil.copytree(tiny_folder("qwen3_5"), tmp_path / "vl")
    tensors = load_file(folder / "model.safetensors")
    nested = {n.replace("model.", "model.language_model.", 1): t for n, t in tensors.items()}
    save_file(nested, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((folder / "config.json").read_text())
    outer = {"model_type": "qwen3_5", "architectures": ["x"], "text_config": text}
    (folder / "config.json").write_text(json.dumps(outer))
    head, plain = load(folder), load(tiny_folder("qwen3_5"))
    assert all(torch.equal(getattr(head, n), getattr(plain, n)) for n in TENSORS)
    target = load_target(TargetRecipe(path=str(folder)))
    features = target.capture(random_batch([5]), (1,), last=True)
    residual, _ = pre_norm(target, features.tokens.input_ids[None])
    torch.testing.assert_close(features.last, head.norm(residual)[0])


def test_head_of_a_loaded_target_shares_its_memory(tiny_folder, tiny_target):
    target, alone = tiny_target("qwen3_5"), load(tiny_folder("qwen3_5"))
    assert target.head.lm_head.data_ptr() == target.model.lm_head.weight.data_ptr()
    assert all(torch.equal(getattr(target.head, n), getattr(alone, n)) for n in TENSORS)
    assert not any(getattr(target.head, n).requires_grad for n in TENSORS)


def test_missing_tensors_and_files_are_refused_by_name(tiny_folder, tmp_path):
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetError, match=r"'lm_head\.weight'"):
        load(folder)
    (folder / "model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(TargetError, match="not a safetensors file"):
        load(folder)
    shards = tiny_models.tiny_model("llama", tmp_path / "many", max_shard_size="40KB")
    gone = sorted(shards.glob("model-*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(TargetError, match=gone.name):
        load(shards)
