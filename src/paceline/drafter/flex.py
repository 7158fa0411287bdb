"""FlexAttention over all blocks of a batch at once: for training on CUDA.

One compiled kernel with a block-sparse mask instead of a loop over documents; what it computes is
what `attention.block_attention` computes.
"""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from paceline.drafter.attention import Context, Document
from paceline.drafter.visibility import Visibility

_TILE = 128
_NOBODY = -1
"""Number of no document and of no block."""
_NOTHING = -2
"""The same for a query that is padding, so that it equals no key."""


class FlexAttention:
    """Attention bound to the anchors and documents of a batch; its masks are made once each."""

    def __init__(self, anchors: torch.Tensor, documents: Sequence[Document]) -> None:
        self._anchors, self._documents = anchors, documents
        self._masks: dict[tuple[Visibility, int, int], BlockMask] = {}

    def __call__(
        self,
        q: torch.Tensor,
        k_block: torch.Tensor,
        v_block: torch.Tensor,
        context: Context,
        visibility: Visibility,
    ) -> torch.Tensor:
        """[A, Q, heads, D] of the last Q slots; shapes as in `attention.block_attention`."""
        num_blocks, block = k_block.shape[:2]
        first, length = block - q.shape[1], context[0].shape[0]
        key = (visibility, block, length)
        if key not in self._masks:
            self._masks[key] = self._mask(*key)
        dtype = v_block.dtype
        # All slots ask, also those whose answer is dropped: another shape is another compilation.
        queries = F.pad(q.to(dtype), (0, 0, 0, 0, first, 0)).flatten(0, 1)
        keys = torch.cat((context[0].to(dtype), k_block.flatten(0, 1).to(dtype)))
        values = torch.cat((context[1].to(dtype), v_block.flatten(0, 1)))
        out = _kernel(q.device.type)(
            _heads_first(queries),
            _heads_first(keys),
            _heads_first(values),
            block_mask=self._masks[key],
            enable_gqa=q.shape[2] != k_block.shape[2],
        )
        answers = out[0, :, : num_blocks * block].transpose(0, 1)
        return answers.unflatten(0, (num_blocks, block))[:, first:]

    def _mask(self, visibility: Visibility, block: int, length: int) -> BlockMask:
        """The rule as tables over queries and keys: numbers in it would be compiled in."""
        anchors, device = self._anchors, self._anchors.device
        num_slots = anchors.numel() * block
        mine = torch.arange(anchors.numel(), device=device).repeat_interleave(block)
        slots = torch.arange(block, device=device).repeat(anchors.numel())
        document_of_row = torch.full((length,), _NOBODY, device=device)
        positions = torch.zeros(length, dtype=torch.int64, device=device)
        document_of_block = torch.full_like(anchors, _NOTHING)
        for number, document in enumerate(self._documents):
            rows = document_of_row[document.rows]
            rows[:] = number
            positions[document.rows] = torch.arange(rows.numel(), device=device)
            document_of_block[document.blocks] = number
        queries, keys = _tiled(num_slots), _tiled(length + num_slots)
        query_anchor = _padded(anchors[mine], queries, 0)
        query_slot = _padded(slots, queries, 0)
        query_document = _padded(document_of_block[mine], queries, _NOTHING)
        query_block = _padded(mine, queries, _NOTHING)
        key_position = _padded(positions, keys, 0)
        key_document = _padded(document_of_row, keys, _NOBODY)
        key_block = _padded(F.pad(mine, (length, 0), value=_NOBODY), keys, _NOBODY)
        key_slot = _padded(F.pad(slots, (length, 0)), keys, 0)

        def sees(_batch, _head, query, key):
            in_context = visibility.context(
                query_anchor[query], query_slot[query], key_position[key]
            )
            in_block = visibility.block(query_slot[query], key_slot[key])
            return ((query_document[query] == key_document[key]) & in_context) | (
                (query_block[query] == key_block[key]) & in_block
            )

        return create_block_mask(sees, None, None, queries, keys, device=device)


def _tiled(length: int) -> int:
    """Rounded up to whole tiles, two at least: a size of one would be compiled apart."""
    return max(2, -(-length // _TILE)) * _TILE


def _padded(values: torch.Tensor, length: int, fill: int) -> torch.Tensor:
    return F.pad(values, (0, length - values.numel()), value=fill)


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """[N, heads, D] to [1, heads, N, D], N padded to whole tiles."""
    return F.pad(x, (0, 0, 0, 0, 0, _tiled(x.shape[0]) - x.shape[0])).transpose(0, 1)[None]


@cache
def _kernel(device: str) -> Callable[..., torch.Tensor]:
    # Uncompiled it forms all scores: right, and only for comparison. A graph that could not be
    # compiled must not come to that in silence.
    if device != "cuda":
        return flex_attention
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)
