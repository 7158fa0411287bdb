import json
import shutil
import subprocess
import sys

import pytest
from transformers import AutoConfig, GPT2Config, LlamaConfig, MistralConfig, Qwen2Config

import tiny_models
from paceline.durable.errors import TargetError
from paceline.target.families import FAMILIES, LayerKind, NormKind
from paceline.target.spec import read_spec


def edit_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        if value is ...:
            config.pop(key, None)
        else:
            config[key] = value
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("kind", tiny_models.TINY_KINDS)
def test_spec_agrees_with_transformers(kind, tiny_folder):
    spec, config = read_spec(tiny_folder(kind)), AutoConfig.from_pretrained(tiny_folder(kind))
    assert spec.model_type == config.model_type
    assert spec.architecture == config.architectures[0]
    assert spec.num_layers == config.num_hidden_layers == 6
    assert spec.hidden_size == config.hidden_size
    assert spec.intermediate_size == config.intermediate_size
    assert (spec.num_heads, spec.num_kv_heads) == (4, 2)
    assert spec.head_dim == (8 if kind == "qwen2" else 16)
    assert (spec.vocab_size, spec.tokenizer_size) == (320, tiny_models.TOKENIZER_SIZE)
    assert spec.rms_norm_eps == config.rms_norm_eps
    assert spec.rope == config.rope_parameters
    assert spec.max_position == config.max_position_embeddings
    assert spec.tie_word_embeddings is False
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * 6
    assert spec.layer_kinds == tuple(kinds)
    assert spec.eos_token_ids == (tiny_models.IM_END,)
    assert spec.name == kind


@pytest.mark.parametrize("kind", tiny_models.TINY_KINDS)
def test_keys_that_config_json_omits_get_the_defaults_of_transformers(kind, tmp_path):
    folder = tiny_models.tiny_model(kind, tmp_path / kind, layers=2)
    absent = ["rope_parameters", "head_dim", "layer_types", "tie_word_embeddings", "rms_norm_eps"]
    edit_config(folder, **dict.fromkeys(absent, ...), rope_theta=54321.0)
    spec, config = read_spec(folder), AutoConfig.from_pretrained(folder)
    assert spec.rope == config.rope_parameters
    assert spec.head_dim == getattr(config, "head_dim", None) or spec.hidden_size // spec.num_heads
    assert spec.tie_word_embeddings == config.tie_word_embeddings
    assert spec.rms_norm_eps == config.rms_norm_eps
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * 2
    assert spec.layer_kinds == tuple(kinds)
    edit_config(folder, rope_theta=...)
    assert read_spec(folder).rope == AutoConfig.from_pretrained(folder).rope_parameters


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {"rope_type": "yarn", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
)
def test_older_rope_scaling_becomes_rope_parameters(scaling, tmp_path):
    folder = tiny_models.tiny_model("llama", tmp_path / "m", layers=2)
    edit_config(folder, rope_parameters=..., rope_scaling=scaling, rope_theta=500000.0)
    expected = AutoConfig.from_pretrained(folder).rope_parameters
    got = read_spec(folder).rope
    assert {k: got[k] for k in expected if k != "type"} == {
        k: v for k, v in expected.items() if k != "type"
    }


def test_sliding_layers(tmp_path):
    folder = tiny_models.tiny_model("mistral", tmp_path / "m", layers=2, sliding_window=8)
    assert read_spec(folder).layer_kinds == (LayerKind.SLIDING,) * 2
    assert read_spec(folder).sliding_window == 8
    folder = tiny_models.tiny_model(
        "qwen2", tmp_path / "q", use_sliding_window=True, sliding_window=8, max_window_layers=2
    )
    expected = (LayerKind.FULL,) * 2 + (LayerKind.SLIDING,) * 4
    assert read_spec(folder).layer_kinds == expected
    edit_config(folder, layer_types=...)
    assert read_spec(folder).layer_kinds == expected
    edit_config(folder, use_sliding_window=False)
    assert read_spec(folder).layer_kinds == (LayerKind.FULL,) * 6
    assert read_spec(folder).sliding_window is None


def test_hybrids_have_linear_layers_and_the_other_norm(tiny_folder):
    for kind in ("qwen3_5", "qwen3_next"):
        spec = read_spec(tiny_folder(kind))
        assert spec.layer_kinds[:4] == (LayerKind.LINEAR,) * 3 + (LayerKind.FULL,)
        assert spec.norm is NormKind.ONE_PLUS_WEIGHT
    assert read_spec(tiny_folder("qwen3")).norm is NormKind.WEIGHT


def test_text_config_inside_a_multimodal_config(tiny_folder, tmp_path):
    folder = shutil.copytree(tiny_folder("qwen3_5"), tmp_path / "vl")
    text = json.loads((folder / "config.json").read_text())
    outer = {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": text,
        "image_token_id": 300,
    }
    (folder / "config.json").write_text(json.dumps(outer))
    spec, plain = read_spec(folder), read_spec(tiny_folder("qwen3_5"))
    assert spec.architecture == "Qwen3_5ForConditionalGeneration"
    assert (spec.num_layers, spec.rope, spec.layer_kinds) == (
        plain.num_layers, plain.rope, plain.layer_kinds,
    )  # fmt: skip


def test_t_28_padded_rows_and_end_tokens_of_the_generation_config(tmp_path):
    folder = tiny_models.tiny_model("llama", tmp_path / "m", vocab=384, layers=2)
    generation = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(
        json.dumps(generation | {"eos_token_id": [257, 258]})
    )
    spec = read_spec(folder)
    assert (spec.tokenizer_size, spec.vocab_size) == (259, 384)
    assert spec.eos_token_ids == (257, 258)
    (folder / "generation_config.json").unlink()
    assert read_spec(folder).eos_token_ids == (257,)


def test_t_30_head_dim_is_the_explicit_one(tmp_path):
    folder = tiny_models.tiny_model("llama", tmp_path / "m", layers=2, hidden=80, head_dim=32)
    spec = read_spec(folder)
    assert (spec.hidden_size, spec.num_heads, spec.head_dim) == (80, 4, 32)


def test_identity_is_of_weights_and_config_but_not_of_names_or_versions(tmp_path):
    folder = tiny_models.tiny_model("llama", tmp_path / "a", layers=2)
    same = shutil.copytree(folder, tmp_path / "b")
    edit_config(same, _name_or_path="other name", transformers_version="0")
    spec = read_spec(folder)
    assert read_spec(same).identity == spec.identity
    assert read_spec(same).name == "other name"
    edit_config(same, rms_norm_eps=1e-6)
    assert read_spec(same).identity != spec.identity
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    assert read_spec(folder).identity != spec.identity


@pytest.mark.parametrize("config", [GPT2Config(n_layer=2, n_embd=8, n_head=2)])
def test_unsupported_kind_is_refused_by_name_with_the_supported_ones(config, tmp_path):
    config.save_pretrained(tmp_path)
    with pytest.raises(TargetError, match="'gpt2' is not supported") as caught:
        read_spec(tmp_path)
    assert all(name in str(caught.value) for name in FAMILIES)


def test_broken_folders_are_refused_by_what_is_wrong(tmp_path):
    with pytest.raises(TargetError, match=r"nowhere.config\.json: no such file"):
        read_spec(tmp_path / "nowhere")
    for name, config in {"l": LlamaConfig(), "m": MistralConfig(), "q": Qwen2Config()}.items():
        config.save_pretrained(tmp_path / name)
        with pytest.raises(TargetError, match=r"neither model\.safetensors nor"):
            read_spec(tmp_path / name)
    folder = tiny_models.tiny_model("llama", tmp_path / "t", layers=2)
    edit_config(folder, hidden_size=...)
    with pytest.raises(TargetError, match="'hidden_size' is missing"):
        read_spec(folder)
    edit_config(folder, hidden_size=32, layer_types=["chunked_attention"] * 2)
    with pytest.raises(TargetError, match="chunked_attention"):
        read_spec(folder)
    edit_config(folder, layer_types=["full_attention"])
    with pytest.raises(TargetError, match="names 1 layers"):
        read_spec(folder)
    edit_config(folder, layer_types=..., vocab_size=100)
    with pytest.raises(TargetError, match="ids up to 258"):
        read_spec(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(TargetError, match="not a JSON object"):
        read_spec(folder)


def test_spec_and_taps_import_neither_torch_nor_transformers():
    code = (
        "import sys, paceline.target.spec, paceline.target.taps\n"
        "assert not {'torch', 'transformers', 'tokenizers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
