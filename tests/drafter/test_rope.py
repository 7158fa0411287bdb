"""The drafter turns queries and keys as its target's family does, scaled kinds included."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from drafting import load_tiny_target, tiny_drafter
from paceline.drafter.rope import Rope, rotate

KINDS = {
    "default": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_pitfall_34_rope_of_every_kind_is_transformers_own(tmp_path, kind):
    drafter = tiny_drafter(load_tiny_target(tmp_path))
    rope = KINDS[kind]
    config = replace(drafter.config, rope=rope, head_dim=16, max_position=512)
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=64,
            num_attention_heads=4,
            head_dim=16,
            max_position_embeddings=512,
            rope_parameters=dict(rope),
        )
    )
    positions = torch.tensor([0, 1, 7, 100, 511])
    queries = torch.randn(5, 4, 16, generator=torch.Generator().manual_seed(0))
    cos, sin = theirs(queries, positions[None])
    wanted, _ = apply_rotary_pos_emb(
        queries.transpose(0, 1)[None], queries.transpose(0, 1)[None], cos, sin
    )
    got = rotate(queries, Rope(config).tables(positions))
    torch.testing.assert_close(got, wanted[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pitfall_34_positions_are_not_rounded_in_a_narrow_drafter(tmp_path, dtype):
    """Scored in its target's type, the drafter must turn by the angles it was trained with."""
    rope = tiny_drafter(load_tiny_target(tmp_path)).rope
    positions = torch.tensor([0, 300, 2000, 30000])
    wanted = rope.tables(positions)
    narrow = rope.to(dtype).half().to("cpu")
    assert narrow.inverse_frequencies.dtype is torch.float32
    for ours, theirs in zip(narrow.tables(positions), wanted, strict=True):
        assert torch.equal(ours, theirs)
