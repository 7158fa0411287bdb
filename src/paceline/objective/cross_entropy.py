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
    """bool [R]: whether no token is likelier than the label; of equal ones all are right."""


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
        lm_head: [V, H], frozen; its type is that of the products, fp32 that of all else (give
            it in fp32 on a CPU, where bfloat16 logits would be rounded).
        labels: int64 [R].
        weights: fp32 [R].
        chunk: logits (rows times V, in fp32) that exist at a time; at least one row's. They take
            4 bytes each, 8 with a narrower head, and nothing else grows with V.

    Returns:
        The fp32 scalar sum(weights * nll), and the rows' own losses.

    """
    # The head's own type is that of its products, whatever an autocast around the drafter says.
    with torch.autocast(hidden.device.type, enabled=False):
        total, nll, hit = _HeadCrossEntropy.apply(hidden, lm_head, labels, weights, chunk)
    return total, RowLosses(nll=nll, hit=hit)


class _HeadCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, lm_head, labels, weights, chunk):
        rows = hidden.shape[0]
        size = max(1, chunk // lm_head.shape[0])
        nll = torch.empty(rows, dtype=torch.float32, device=hidden.device)
        hit = torch.empty(rows, dtype=torch.bool, device=hidden.device)
        wants_gradient = ctx.needs_input_grad[0]
        gradient = torch.empty_like(hidden) if wants_gradient else None
        # One buffer for all chunks: a new one would stand beside the last.
        buffer = _buffer(min(size, rows), lm_head)
        for start in range(0, rows, size):
            part = slice(start, min(start + size, rows))
            chosen = hidden[part].to(lm_head.dtype)
            logits = _logits(chosen, lm_head, buffer[: chosen.shape[0]])
            top = logits.amax(dim=-1, keepdim=True)
            label = labels[part, None]
            own = logits.gather(1, label)
            hit[part] = (own >= top)[:, 0]
            exponentials = logits.sub_(top).exp_()
            total = exponentials.sum(dim=-1, keepdim=True)
            nll[part] = (total.log() + (top - own))[:, 0]
            if gradient is not None:
                # (softmax - one-hot) @ lm_head, scaled where it is narrow: after the product.
                slopes = exponentials.scatter_add_(1, label, -total).to(lm_head.dtype)
                gradient[part] = (slopes @ lm_head).mul_(weights[part, None] / total)
                del slopes
            # Names that outlive the round would keep its logits beside the next one's.
            del logits, exponentials
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(nll, hit)
        return (weights * nll).sum(), nll, hit

    @staticmethod
    def backward(ctx, grad_total, *_):  # pyright: ignore[reportIncompatibleMethodOverride]
        (gradient,) = ctx.saved_tensors
        return gradient * grad_total, None, None, None, None


def _buffer(rows: int, lm_head: torch.Tensor) -> torch.Tensor:
    dtype = torch.float32 if lm_head.is_cuda else lm_head.dtype
    return lm_head.new_empty((rows, lm_head.shape[0]), dtype=dtype)


def _logits(hidden: torch.Tensor, lm_head: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """fp32 logits, in `buffer` where that is fp32.

    On CUDA the sums leave the product as the fp32 that they are: bfloat16 logits change the argmax
    of one row in fifty. On a CPU a bfloat16 product has bfloat16 results.
    """
    if buffer.dtype is lm_head.dtype:
        return torch.mm(hidden, lm_head.T, out=buffer).float()
    return torch.mm(hidden, lm_head.T, out_dtype=buffer.dtype, out=buffer)
