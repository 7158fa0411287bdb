"""Attention of draft blocks: to the context before the anchor, and to the own block.

The reference, and what runs on a CPU and in decoding; flex.py is its twin for training on CUDA.
Each block is scored against the context and against itself, in one buffer that shares a softmax: a
square of all slots against all slots is never formed; docs/algorithms.md, "Visibility".

Blocks are taken in groups, so that what no block of a group sees is never computed. Forward and
backward are written out: autograd would keep and copy several tensors of the scores' size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.drafter.visibility import FULL, Visibility

_GROUP_ROWS = 256
"""Query rows of a group: enough for the matrix products, few enough to leave out hidden context."""

Context = tuple[torch.Tensor, torch.Tensor]
"""A layer's keys and values of the context, each [T, kv_heads, D]."""


@dataclass(frozen=True)
class Document:
    """Where one document's context rows and blocks lie in a batch."""

    rows: slice
    """Its rows among the T context tokens; row t of it stands at position t."""
    blocks: slice
    """Its blocks among the A blocks."""


class Attend(Protocol):
    """Attention of the blocks of a batch, bound to their anchors and documents."""

    def __call__(
        self,
        q: torch.Tensor,
        k_block: torch.Tensor,
        v_block: torch.Tensor,
        context: Context,
        visibility: Visibility,
    ) -> torch.Tensor:
        """[A, Q, heads, D] of the last Q slots, as `block_attention`."""
        ...


class EagerAttention:
    """Document by document."""

    def __init__(self, anchors: torch.Tensor, documents: Sequence[Document]) -> None:
        self._anchors, self._documents = anchors, documents

    def __call__(  # noqa: D102
        self,
        q: torch.Tensor,
        k_block: torch.Tensor,
        v_block: torch.Tensor,
        context: Context,
        visibility: Visibility,
    ) -> torch.Tensor:
        keys, values = context
        mixed = [
            block_attention(
                q[d.blocks],
                k_block[d.blocks],
                v_block[d.blocks],
                keys[d.rows],
                values[d.rows],
                self._anchors[d.blocks],
                visibility,
            )
            for d in self._documents
        ]
        return torch.cat(mixed) if len(mixed) > 1 else mixed[0]


def block_attention(
    q: torch.Tensor,
    k_block: torch.Tensor,
    v_block: torch.Tensor,
    k_context: torch.Tensor,
    v_context: torch.Tensor,
    anchors: torch.Tensor,
    visibility: Visibility = FULL,
) -> torch.Tensor:
    """Attention of A blocks of one document.

    Computed in fp32 at least, whatever comes in.

    Args:
        q: [A, Q, heads, D] queries of the slots, of all B or of the last Q of them.
        k_block: [A, B, kv_heads, D] keys of the slots.
        v_block: [A, B, kv_heads, D] values of the slots.
        k_context: [S, kv_heads, D] keys of the document's features, row t at position t.
        v_context: [S, kv_heads, D] values of the document's features.
        anchors: int64 [A]; block a sees context rows t < anchors[a]. Any order is right, a rising
            one is fastest.
        visibility: what else limits the view.

    Returns:
        [A, Q, heads, D] in the type of `v_block`.

    """
    wide = torch.promote_types(v_block.dtype, torch.float32)
    tensors = (x.to(wide) for x in (q, k_block, v_block, k_context, v_context))
    with torch.autocast(q.device.type, enabled=False):
        return _BlockAttention.apply(*tensors, anchors, visibility).to(v_block.dtype)


@dataclass(frozen=True)
class _Group:
    """Neighbouring blocks, and the context rows that at least one of them sees."""

    blocks: slice
    rows: slice

    @property
    def width(self) -> int:
        return self.rows.stop - self.rows.start


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k_block, v_block, k_context, v_context, anchors, visibility):
        _, queries, heads, dim = q.shape
        block, kv_heads = k_block.shape[1:3]
        rows = queries * (heads // kv_heads)
        grouped = _by_kv_head(q, kv_heads).mul_(dim**-0.5)
        out = torch.empty_like(grouped)
        groups = list(_groups(anchors, queries, block, rows, k_context.shape[0], visibility))
        keeps = any(ctx.needs_input_grad)
        weights: list[torch.Tensor] = []
        own_scores = torch.matmul(grouped, k_block.permute(2, 0, 3, 1))
        own_values = v_block.permute(2, 0, 1, 3)
        for group in groups:
            part = grouped[:, group.blocks]
            scores = q.new_empty((*part.shape[:3], group.width + block))
            for head in range(kv_heads):
                _times(part[head], k_context[group.rows, head].T, scores[head, ..., : group.width])
            scores[..., group.width :] = own_scores[:, group.blocks]
            _hide(scores, anchors[group.blocks], group, queries, block, visibility)
            probabilities = scores.softmax(-1)
            if keeps:
                weights.append(probabilities)
            target = out[:, group.blocks]
            for head in range(kv_heads):
                context_part = probabilities[head, ..., : group.width]
                _times(context_part, v_context[group.rows, head], target[head])
            own_part = probabilities[..., group.width :]
            target += torch.matmul(own_part, own_values[:, group.blocks])
        ctx.save_for_backward(grouped, k_block, v_block, k_context, v_context, *weights)
        ctx.groups, ctx.queries = groups, queries
        return _by_block(out, queries, heads)

    @staticmethod
    def backward(ctx, grad_out):  # pyright: ignore[reportIncompatibleMethodOverride]
        grouped, k_block, v_block, k_context, v_context, *weights = ctx.saved_tensors
        kv_heads, _, _, dim = grouped.shape
        heads = grad_out.shape[2]
        grad = _by_kv_head(grad_out, kv_heads)
        grad_q = torch.empty_like(grouped)
        grad_k_context, grad_v_context = torch.zeros_like(k_context), torch.zeros_like(v_context)
        own_keys, own_values = k_block.permute(2, 0, 1, 3), v_block.permute(2, 0, 1, 3)
        grad_own_keys, grad_own_values = torch.empty_like(own_keys), torch.empty_like(own_values)
        own_slopes = torch.matmul(grad, own_values.mT)
        for group, probabilities in zip(ctx.groups, weights, strict=True):
            part, grad_part = grouped[:, group.blocks], grad[:, group.blocks]
            slopes = torch.empty_like(probabilities)
            for head in range(kv_heads):
                _times(
                    grad_part[head],
                    v_context[group.rows, head].T,
                    slopes[head, ..., : group.width],
                )
                grad_v_context[group.rows, head].addmm_(
                    probabilities[head, ..., : group.width].flatten(0, 1).T,
                    grad_part[head].flatten(0, 1),
                )
            slopes[..., group.width :] = own_slopes[:, group.blocks]
            grad_own_values[:, group.blocks] = probabilities[..., group.width :].mT @ grad_part
            slopes = torch.ops.aten._softmax_backward_data(  # noqa: SLF001 - softmax's own
                slopes, probabilities, -1, slopes.dtype
            )
            grad_q_part = grad_q[:, group.blocks]
            for head in range(kv_heads):
                context_slopes = slopes[head, ..., : group.width]
                _times(context_slopes, k_context[group.rows, head], grad_q_part[head])
                grad_k_context[group.rows, head].addmm_(
                    context_slopes.flatten(0, 1).T, part[head].flatten(0, 1)
                )
            own = slopes[..., group.width :]
            grad_q_part += torch.matmul(own, own_keys[:, group.blocks])
            grad_own_keys[:, group.blocks] = own.mT @ part
        grad_q.mul_(dim**-0.5)
        return (
            _by_block(grad_q, ctx.queries, heads),
            grad_own_keys.permute(1, 2, 0, 3),
            grad_own_values.permute(1, 2, 0, 3),
            grad_k_context,
            grad_v_context,
            None,
            None,
        )


def _groups(
    anchors: torch.Tensor,
    queries: int,
    block: int,
    rows: int,
    context: int,
    visibility: Visibility,
) -> Iterator[_Group]:
    size = max(1, _GROUP_ROWS // rows)
    where = anchors.tolist()
    for start in range(0, len(where), size):
        part = where[start : start + size]
        first, stop = 0, min(max(part), context)
        if visibility.window is not None:
            first = min(part) + block - queries - (visibility.window - 1)
        yield _Group(slice(start, start + len(part)), slice(max(0, min(first, stop)), stop))


def _hide(
    scores: torch.Tensor,
    anchors: torch.Tensor,
    group: _Group,
    queries: int,
    block: int,
    visibility: Visibility,
) -> None:
    """Set scores [kv_heads, n, Q * share, width + B] of what is not visible to -inf."""
    if scores.is_cuda or visibility.window is not None:
        slots = torch.arange(block - queries, block, device=scores.device)
        positions = torch.arange(group.rows.start, group.rows.stop, device=scores.device)
        seen = visibility.context(anchors[:, None, None], slots[:, None], positions)
        _hide_part(scores[..., : group.width], ~seen, queries)
    else:
        # Only the ends of the rows are hidden: writing them costs less than a mask of all.
        for number, anchor in enumerate(anchors.tolist()):
            scores[:, number, :, anchor : group.width] = float("-inf")
    if visibility.causal or visibility.window is not None:
        slots = torch.arange(block, device=scores.device)
        seen = visibility.block(slots[block - queries :, None], slots)
        _hide_part(scores[..., group.width :], ~seen, queries)


def _hide_part(scores: torch.Tensor, hidden: torch.Tensor, queries: int) -> None:
    share = scores.shape[2] // queries
    scores.unflatten(2, (queries, share)).masked_fill_(hidden.unsqueeze(-2), float("-inf"))


def _by_kv_head(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[A, Q, heads, D] to a new [kv_heads, A, Q * share, D]; a key head's queries lie together."""
    apart = x.unflatten(2, (kv_heads, x.shape[2] // kv_heads)).permute(2, 0, 1, 3, 4)
    return apart.clone(memory_format=torch.contiguous_format).flatten(2, 3)


def _by_block(x: torch.Tensor, queries: int, heads: int) -> torch.Tensor:
    """The way back of `_by_kv_head`."""
    kv_heads, num_blocks, _, dim = x.shape
    apart = x.view(kv_heads, num_blocks, queries, heads // kv_heads, dim)
    return apart.permute(1, 2, 0, 3, 4).reshape(num_blocks, queries, heads, dim)


def _times(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """`a @ b` for a [n, rows, K], b [K, N], written to out [n, rows, N], rows of any stride."""
    # A view, where `flatten` might be a copy that nobody reads.
    torch.mm(a.flatten(0, 1), b, out=out.view(out.shape[0] * out.shape[1], out.shape[2]))
