"""What a drafter's size follows from; without torch, because a plan needs it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DrafterShape:
    """What a drafter's size follows from."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_taps: int
    vocab_size: int
    """Rows of the target's lm_head."""
    draft_vocab_size: int | None
    block_size: int

    @property
    def parameters(self) -> int:
        """Trainable numbers: the tap projection, three norms outside of the layers, the layers."""
        hidden, head = self.hidden_size, self.head_dim
        queries, keys = self.num_heads * head, self.num_kv_heads * head
        attention = 2 * hidden * queries + 2 * hidden * keys + 2 * head
        layer = attention + 3 * hidden * self.intermediate_size + 2 * hidden
        return self.fc_parameters + 2 * hidden + self.num_layers * layer

    @property
    def vector_parameters(self) -> int:
        """Of the trainable numbers, those of norms."""
        return 2 * self.hidden_size + self.num_layers * 2 * (self.hidden_size + self.head_dim)

    def moment_bytes(self, optimizer: str) -> int:
        """Of the optimizer's fp32 state: AdamW's two moments; Muon has one of each matrix."""
        matrices = self.parameters - self.vector_parameters
        return 8 * self.parameters - (4 * matrices if optimizer == "muon" else 0)

    @property
    def fc_parameters(self) -> int:
        """Of the trainable numbers, those of the tap projection."""
        return self.num_taps * self.hidden_size * self.hidden_size

    @property
    def head_parameters(self) -> int:
        """Frozen numbers of the target's lm_head, as far as tokens are proposed."""
        return self.num_proposed * self.hidden_size

    def frozen_parameters(self, *, is_tied: bool) -> int:
        """Frozen numbers beside it: the target's embedding and lm_head, which may be one."""
        is_shared = is_tied and self.draft_vocab_size is None
        return self.vocab_size * self.hidden_size + (0 if is_shared else self.head_parameters)

    @property
    def tensors(self) -> int:
        """Of the trainable numbers."""
        return 3 + 11 * self.num_layers

    @property
    def num_proposed(self) -> int:
        """Rows of the head that the loss is taken over."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def weight_bytes(self) -> int:
        """Of `model.safetensors`: fp32 weights, and the tables of a reduced vocabulary."""
        tables = 0 if self.draft_vocab_size is None else 8 * self.draft_vocab_size + self.vocab_size
        return 4 * self.parameters + tables

    @property
    def checkpoint_bytes(self) -> int:
        """Weights and AdamW's two moments, both fp32, with the headers that name the tensors."""
        return self.checkpoint_of(1)

    def checkpoint_of(
        self, drafters: int, *, has_velocity: bool = False, optimizer: str = "adamw"
    ) -> int:
        """The same of several drafters, which are one model with an optimizer each.

        `has_velocity` is whether the average has a momentum of its own.
        """
        state = self.moment_bytes(optimizer) + self.tensors * _TENSOR_OVERHEAD
        velocity = 4 * self.parameters if has_velocity else 0
        return self.weight_bytes + drafters * state + velocity + _STATE


_TENSOR_OVERHEAD = 3 * 100 + 4
"""Bytes of a trained tensor in a checkpoint beside its numbers: three lines in a header, and the
optimizer's own step."""

_STATE = 12_000
"""Bytes of a checkpoint's state, config, sums and generators."""
