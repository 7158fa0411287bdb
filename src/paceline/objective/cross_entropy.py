"""Hard cross-entropy through a frozen head, in chunks of rows.

The gradient towards the hidden states is formed while a chunk's logits exist, so neither the
logits of all rows nor a second pass over the head is needed.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RowLosses:
    """Per row, detached."""

    nll: torch.Tensor
    """fp32 [R]: -log q(label)."""
    hit: torch.Tensor
    """bool [R]: whether the label is the argmax."""


def cross_entropy(
    hidden: torch.Tensor,
    lm_head: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    *,
    chunk: int,
) -> tuple[torch.Tensor, RowLosses]:
    """Weighted sum of cross-entropies, differentiable towards `hidden` only.

    Args:
        hidden: [R, H], after the drafter's final norm.
        lm_head: [V, H], frozen.
        labels: int64 [R].
        weights: fp32 [R].
        chunk: rows whose logits (fp32 [chunk, V]) exist at a time.

    Returns:
        The fp32 scalar sum(weights * nll), and the rows' own losses.

    """
    total, nll, hit = _HeadCrossEntropy.apply(hidden, lm_head, labels, weights, chunk)
    return total, RowLosses(nll=nll, hit=hit)


class _HeadCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, lm_head, labels, weights, chunk):
        rows = hidden.shape[0]
        nll = torch.empty(rows, dtype=torch.float32, device=hidden.device)
        hit = torch.empty(rows, dtype=torch.bool, device=hidden.device)
        wants_gradient = ctx.needs_input_grad[0]
        gradient = torch.empty_like(hidden) if wants_gradient else None
        for start in range(0, rows, chunk):
            part = slice(start, min(start + chunk, rows))
            logits = (hidden[part] @ lm_head.T).float()
            top, best = logits.max(dim=-1)
            label = labels[part, None]
            hit[part] = best == label[:, 0]
            own = logits.gather(1, label)[:, 0]
            exponentials = logits.sub_(top[:, None]).exp_()
            total = exponentials.sum(dim=-1)
            nll[part] = total.log() + top - own
            if gradient is not None:
                scale = weights[part] / total
                exponentials.mul_(scale[:, None])
                exponentials.scatter_add_(1, label, -weights[part, None])
                gradient[part] = exponentials.to(lm_head.dtype) @ lm_head
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(nll, hit)
        return (weights * nll).sum(), nll, hit

    @staticmethod
    def backward(ctx, grad_total, *_):  # pyright: ignore[reportIncompatibleMethodOverride]
        (gradient,) = ctx.saved_tensors
        return gradient * grad_total, None, None, None, None
