"""FlexAttention over all blocks of a batch at once: for training on CUDA.

One compiled kernel with a block-sparse mask instead of a loop over documents; what it computes is
what `attention.block_attention` computes.
"""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from paceline.drafter.attention import Context, Document
from paceline.drafter.visibility import Visibility


class FlexAttention:
    """Attention bound to the anchors and documents of a batch; its masks are made once each."""

    def __init__(self, anchors: torch.Tensor, documents: Sequence[Document]) -> None:
        self._anchors, self._documents = anchors, documents
        self._masks: dict[tuple[Visibility, int, int, int], BlockMask] = {}

    def __call__(
        self,
        q: torch.Tensor,
        k_block: torch.Tensor,
        v_block: torch.Tensor,
        context: Context,
        visibility: Visibility,
    ) -> torch.Tensor:
        """[A, Q, heads, D] of the last Q slots; shapes as in `attention.block_attention`."""
        num_blocks, queries = q.shape[:2]
        block, length = k_block.shape[1], context[0].shape[0]
        key = (visibility, queries, block, length)
        if key not in self._masks:
            self._masks[key] = self._mask(*key)
        dtype = v_block.dtype
        keys = torch.cat((context[0].to(dtype), k_block.flatten(0, 1).to(dtype)))
        values = torch.cat((context[1].to(dtype), v_block.flatten(0, 1)))
        out = _kernel(q.device.type)(
            _heads_first(q.flatten(0, 1).to(dtype)),
            _heads_first(keys),
            _heads_first(values),
            block_mask=self._masks[key],
            enable_gqa=q.shape[2] != k_block.shape[2],
        )
        return out[0].transpose(0, 1).unflatten(0, (num_blocks, queries))

    def _mask(self, visibility: Visibility, queries: int, block: int, length: int) -> BlockMask:
        anchors, device = self._anchors, self._anchors.device
        num_blocks = anchors.numel()
        # Rows of no document, such as those behind a last anchor, belong to none.
        owner_of_row = torch.full((length,), -1, device=device)
        position_of_row = torch.zeros(length, dtype=torch.int64, device=device)
        owner_of_block = torch.full((num_blocks,), -2, device=device)
        for number, document in enumerate(self._documents):
            rows = range(length)[document.rows]
            owner_of_row[document.rows] = number
            position_of_row[document.rows] = torch.arange(len(rows), device=device)
            owner_of_block[document.blocks] = number

        def sees(_batch, _head, query, key):
            mine, slot = query // queries, query % queries + (block - queries)
            row, other = key.clamp(max=max(length - 1, 0)), (key - length).clamp(min=0)
            same = owner_of_block[mine] == owner_of_row[row] if length else query < 0
            where = position_of_row[row] if length else other
            in_context = same & visibility.context(anchors[mine], slot, where)
            in_block = (other // block == mine) & visibility.block(slot, other % block)
            return torch.where(key < length, in_context, in_block)

        return create_block_mask(
            sees, None, None, num_blocks * queries, length + num_blocks * block, device=device.type
        )


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """[N, heads, D] to [1, heads, N, D]."""
    return x.transpose(0, 1)[None]


@cache
def _kernel(device: str) -> Callable[..., torch.Tensor]:
    # Uncompiled it forms all scores: right, and only for comparison.
    return torch.compile(flex_attention, dynamic=True) if device == "cuda" else flex_attention
