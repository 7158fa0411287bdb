"""Attention of draft blocks: to the context before the anchor, and to the own block.

The two parts are scored apart and share one softmax, so a square of all slots against all slots
is never formed; docs/algorithms.md, "Visibility".
"""

import torch


def block_attention(
    q: torch.Tensor,
    k_block: torch.Tensor,
    v_block: torch.Tensor,
    k_context: torch.Tensor,
    v_context: torch.Tensor,
    anchors: torch.Tensor,
) -> torch.Tensor:
    """Attention of A blocks of one document, bidirectional inside the block.

    Args:
        q: [A, Q, heads, D] queries of the slots, of all B or of the last Q of them.
        k_block: [A, B, kv_heads, D] keys of the slots.
        v_block: [A, B, kv_heads, D] values of the slots.
        k_context: [S, kv_heads, D] keys of the document's features, row t at position t.
        v_context: [S, kv_heads, D] values of the document's features.
        anchors: int64 [A]; block a sees context rows t < anchors[a].

    Returns:
        [A, B, heads, D].

    """
    num_blocks, queries, heads, dim = q.shape
    kv_heads = k_block.shape[2]
    group = heads // kv_heads
    rows = queries * group
    # [kv_heads, A, Q * group, D]: the queries that share a key head lie side by side.
    grouped = q.view(num_blocks, queries, kv_heads, group, dim).permute(2, 0, 1, 3, 4)
    grouped = grouped.reshape(kv_heads, num_blocks, rows, dim) * dim**-0.5

    visible = min(int(anchors.max()), k_context.shape[0]) if anchors.numel() else 0
    k_context, v_context = k_context[:visible], v_context[:visible]
    context_scores = torch.matmul(
        grouped.reshape(kv_heads, num_blocks * rows, dim), k_context.permute(1, 2, 0)
    ).view(kv_heads, num_blocks, rows, visible)
    hidden = torch.arange(visible, device=q.device) >= anchors[:, None]
    context_scores = context_scores.masked_fill(hidden[None, :, None, :], float("-inf"))
    block_scores = torch.matmul(grouped, k_block.permute(2, 0, 3, 1))

    weights = torch.cat((context_scores, block_scores), dim=-1).softmax(dim=-1, dtype=torch.float32)
    weights = weights.to(v_block.dtype)
    from_context = torch.matmul(
        weights[..., :visible].reshape(kv_heads, num_blocks * rows, visible),
        v_context.transpose(0, 1),
    ).view(kv_heads, num_blocks, rows, dim)
    mixed = from_context + torch.matmul(weights[..., visible:], v_block.permute(2, 0, 1, 3))
    mixed = mixed.view(kv_heads, num_blocks, queries, group, dim).permute(1, 2, 0, 3, 4)
    return mixed.reshape(num_blocks, queries, heads, dim)
