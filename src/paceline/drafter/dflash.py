"""DFlash (arXiv 2602.06036): a block of masked slots, predicted in one pass over target features.

Shapes: A blocks, B slots of a block, T context tokens (all documents of a batch, concatenated),
L taps, H hidden size.
"""

from collections.abc import Sequence

import torch
from torch import nn

from paceline.drafter.attention import Attend, Context, Document, EagerAttention
from paceline.drafter.config import DrafterConfig
from paceline.drafter.flex import FlexAttention
from paceline.drafter.proposer import Proposer
from paceline.drafter.rope import Rope, rotate
from paceline.drafter.visibility import Visibility
from paceline.drafter.vocabulary import DraftVocabulary

Tables = tuple[torch.Tensor, torch.Tensor]


class DFlash(Proposer):
    """The drafter's trainable part; embedding and lm_head are the target's and stay frozen.

    Parameters are named as serving engines name them, so an export renames nothing.
    """

    def __init__(self, config: DrafterConfig, vocabulary: DraftVocabulary | None = None) -> None:
        super().__init__(config, vocabulary)
        hidden = config.hidden_size
        self.fc = nn.Linear(len(config.taps) * hidden, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(
            DFlashLayer(config, config.visibility(layer)) for layer in range(config.num_layers)
        )
        self.norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.rope = Rope(config)

    @property
    def blocks(self) -> list["DFlashLayer"]:
        """The decoder layers, typed."""
        return [layer for layer in self.layers if isinstance(layer, DFlashLayer)]

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        """Context vectors [T, H] of taps [T, L, H]: one projection and one norm for all layers."""
        return self.hidden_norm(self.fc(taps.flatten(1)))

    def forward(
        self,
        embeddings: torch.Tensor,
        anchors: torch.Tensor,
        taps: torch.Tensor,
        positions: torch.Tensor,
        documents: Sequence[Document],
    ) -> torch.Tensor:
        """Hidden states of the drafted slots, ready for lm_head.

        Args:
            embeddings: [A, B, H]; slot 0 the anchor token's embedding, the others the mask's.
            anchors: int64 [A], each block's anchor position inside its own document.
            taps: [T, L, H] target features.
            positions: int64 [T], each context row's position inside its own document.
            documents: which rows and blocks belong together.

        Returns:
            [A, B - 1, H] for slots 1..B-1; slot k predicts the token at position anchor + k.

        """
        contexts = self.contexts(taps, positions)
        return self.draft(embeddings, anchors, contexts, documents)

    def contexts(self, taps: torch.Tensor, positions: torch.Tensor) -> list[Context]:
        """Each layer's keys and values of taps [T, L, H] at positions int64 [T]."""
        fused = self.fuse(taps)
        tables = self.rope.tables(positions)
        return [layer.self_attn.project(fused, tables) for layer in self.blocks]

    def draft(
        self,
        embeddings: torch.Tensor,
        anchors: torch.Tensor,
        contexts: Sequence[Context],
        documents: Sequence[Document],
    ) -> torch.Tensor:
        """`forward` on contexts that were made before, as decoding does round by round."""
        slots = torch.arange(embeddings.shape[1], device=anchors.device)
        tables = self.rope.tables(anchors[:, None] + slots)
        attend = _attention(anchors, documents)
        x = embeddings
        last = len(contexts) - 1
        for i, (layer, context) in enumerate(zip(self.blocks, contexts, strict=True)):
            # Nothing reads slot 0 after the last layer's keys and values are made.
            x = layer(x, tables, context, attend, first_slot=int(i == last))
        return self.norm(x)


class DFlashLayer(nn.Module):
    """Pre-norm decoder layer whose attention also reads keys and values made of the context."""

    def __init__(self, config: DrafterConfig, visibility: Visibility) -> None:
        super().__init__()
        self.self_attn = DFlashAttention(config, visibility)
        self.mlp = DFlashMLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        x: torch.Tensor,
        tables: Tables,
        context: Context,
        attend: Attend,
        *,
        first_slot: int = 0,
    ) -> torch.Tensor:
        """Slots x [A, B, H], one layer further; those before `first_slot` are only attended to."""
        normed = self.input_layernorm(x)
        x = x[:, first_slot:] + self.self_attn(
            normed, tables, context, attend, first_slot=first_slot
        )
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlashMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] to [..., H]."""
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DFlashAttention(nn.Module):
    """Queries from the slots; keys and values from context and slots by the same projections."""

    def __init__(self, config: DrafterConfig, visibility: Visibility) -> None:
        super().__init__()
        self._heads, self._kv_heads = config.num_heads, config.num_kv_heads
        self._dim = config.head_dim
        self._visibility = visibility
        self.q_proj = nn.Linear(config.hidden_size, self._heads * self._dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self._kv_heads * self._dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self._kv_heads * self._dim, bias=False)
        self.o_proj = nn.Linear(self._heads * self._dim, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(self._dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self._dim, eps=config.rms_norm_eps)

    def project(self, x: torch.Tensor, tables: Tables) -> Context:
        """Keys and values [..., kv_heads, D] of fused context or normed slots [..., H]."""
        shape = (*x.shape[:-1], self._kv_heads, self._dim)
        keys = rotate(self.k_norm(self.k_proj(x).view(shape)), tables)
        return keys, self.v_proj(x).view(shape)

    def forward(
        self,
        x: torch.Tensor,
        tables: Tables,
        context: Context,
        attend: Attend,
        *,
        first_slot: int = 0,
    ) -> torch.Tensor:
        """Attention output of slots first_slot..B-1, normed slots being x [A, B, H]."""
        asking = x[:, first_slot:]
        shape = (*asking.shape[:-1], self._heads, self._dim)
        cos, sin = tables
        own_tables = (cos[:, first_slot:], sin[:, first_slot:])
        q = rotate(self.q_norm(self.q_proj(asking).view(shape)), own_tables)
        k_block, v_block = self.project(x, tables)
        mixed = attend(q, k_block, v_block, context, self._visibility)
        return self.o_proj(mixed.flatten(2))


def _attention(anchors: torch.Tensor, documents: Sequence[Document]) -> Attend:
    # In decoding every round has another context length, and a kernel compiled for each would
    # cost more than it saves.
    if anchors.is_cuda and torch.is_grad_enabled():
        return FlexAttention(anchors, documents)
    return EagerAttention(anchors, documents)
