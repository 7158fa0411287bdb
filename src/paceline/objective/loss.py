"""The objective through a frozen head, in chunks.

The gradient towards the hidden states is formed while a chunk's logits exist, so neither the
logits of all rows nor a second pass over the head is needed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from paceline.objective.chunk import Chunk, chunk_loss
from paceline.objective.slopes import Targets, Workspace
from paceline.objective.terms import needs_label, needs_teacher, slot_weights
from paceline.recipe.objective_terms import WEIGHS_ITSELF, ObjectiveTerm

_CPU_ROWS = 256
"""Of a chunk on a CPU: matrix products gain nothing by more, and what is smaller stays in cache."""


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """What is asked of A blocks of D drafted slots."""

    labels: torch.Tensor
    """int64 [A, D], as the drafter numbers tokens."""
    valid: torch.Tensor
    """bool [A, D]: the slots that the answer has."""
    proposed: torch.Tensor
    """bool [A, D]: whether the drafter can propose the label, which else means nothing."""


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """The target's last hidden states, and how they become its distribution."""

    last: torch.Tensor
    """[T, H], after the target's final norm."""
    rows: torch.Tensor
    """int64 [A, D]: the row of `last` that predicts the slot's token, at position a + k - 1."""
    lm_head: torch.Tensor
    """[V, H], or the [K, H] of the drafter where no term asks for more."""
    columns: torch.Tensor | None = None
    """int64 [K], the rows of lm_head that the drafter proposes; None where it has no others."""


@dataclass(frozen=True)
class Objective:
    """The loss of some blocks."""

    total: torch.Tensor
    """Scalar, differentiable towards the hidden states: the terms' sums, each times its scale."""
    sums: torch.Tensor
    """fp64 [terms], detached, without the scales; 0 for a term whose scale is 0."""
    nll: torch.Tensor
    """[A, D], detached: -log q(label); infinite where the drafter cannot propose it or no term
    looked."""
    hit: torch.Tensor
    """bool [A, D]: whether no token is likelier than the label; of equal ones all are right."""


def objective_loss(
    hidden: torch.Tensor,
    lm_head: torch.Tensor,
    blocks: Blocks,
    terms: Sequence[ObjectiveTerm],
    scales: Sequence[float],
    *,
    chunk: int,
    teacher: Teacher | None = None,
) -> Objective:
    """Sum of the terms' sums over all blocks, each times its scale.

    Args:
        hidden: [A, D, H], after the drafter's final norm.
        lm_head: [K, H], frozen; its type is that of the products, fp32 that of all else (give
            it in fp32 on a CPU, where bfloat16 logits would be rounded; in fp64 all is fp64).
        blocks: the labels.
        terms: with `gamma` filled in (`objective_of`).
        scales: a factor for each term's sum; a term of 0 is not computed.
        chunk: logits (rows times V) that exist at a time: at least one row's, or one block's where
            a term's weights hang on the whole block. They take 4 bytes each, 8 with a narrower
            head, and as much again for each distribution that the terms compare; nothing else
            grows with V.
        teacher: for the terms that need it.

    """
    job = _Job(lm_head, blocks, terms, scales, teacher, chunk)
    with torch.autocast(hidden.device.type, enabled=False):
        # The head's own type is that of its products, whatever an autocast around it says.
        total, sums, nll, hit = _ChunkedLoss.apply(hidden[job.mask], job)
    return Objective(total=total, sums=sums, nll=job.spread(nll, torch.inf), hit=job.spread(hit, 0))


class _Job:
    """The rows to compute, in order, and what is known of them beforehand."""

    def __init__(
        self,
        lm_head: torch.Tensor,
        blocks: Blocks,
        terms: Sequence[ObjectiveTerm],
        scales: Sequence[float],
        teacher: Teacher | None,
        chunk: int,
    ) -> None:
        self.lm_head, self.blocks = lm_head, blocks
        self.scales = list(scales)
        self.active = [(i, t) for i, t in enumerate(terms) if self.scales[i]]
        live = [t for _, t in self.active]
        self.teacher = teacher if needs_teacher(terms, scales) else None
        if needs_teacher(terms, scales) and teacher is None:
            raise ValueError("a term needs the target's distribution, and no teacher was given")
        counted = blocks.valid & blocks.proposed
        label_only = all(needs_label(t) and t.positions != "tree" for t in live)
        # Slots without a label have nothing to say to terms that need one.
        self.mask = counted if label_only else blocks.valid
        self.slots = self.mask.flatten().nonzero()[:, 0]
        self.labels = blocks.labels.flatten()[self.slots]
        self.counted = counted.flatten()[self.slots]
        self.teacher_rows = None
        if self.teacher is not None:
            self.teacher_rows = self.teacher.rows.flatten()[self.slots]
        depth = blocks.valid.shape[1]
        self.depth_weights = {
            i: slot_weights(t, depth).to(self.slots.device)[self.slots % depth]
            for i, t in self.active
            if t.kind not in WEIGHS_ITSELF
        }
        self.by_block = any(
            t.kind in WEIGHS_ITSELF or t.positions not in ("uniform", "decay") for t in live
        )
        widest = lm_head.shape[0]
        if self.teacher is not None:
            widest = max(widest, self.teacher.lm_head.shape[0])
        at_once = chunk // widest
        if not self.slots.is_cuda:
            at_once = min(at_once, _CPU_ROWS)
        unit = depth if self.by_block else 1
        self._size = max(1, at_once // unit)
        self.rows_at_once = min(self._size * unit, self.slots.numel())

    def spread(self, rows: torch.Tensor, fill: float) -> torch.Tensor:
        """The rows' values on the grid [A, D]."""
        grid = rows.new_full((self.mask.numel(),), fill)
        grid[self.slots] = rows
        return grid.view(self.mask.shape)

    def chunks(self) -> Iterator[tuple[slice, slice]]:
        """Rows, and the blocks that they are of; no blocks where nothing hangs on them."""
        if not self.by_block:
            for start in range(0, self.slots.numel(), self._size):
                yield slice(start, min(start + self._size, self.slots.numel())), slice(0, 0)
            return
        ends = [0, *self.mask.sum(dim=1).cumsum(0).tolist()]
        for first in range(0, self.mask.shape[0], self._size):
            last = min(first + self._size, self.mask.shape[0])
            yield slice(ends[first], ends[last]), slice(first, last)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, job: _Job):
        head = job.lm_head
        wide = torch.float64 if head.dtype is torch.float64 else torch.float32
        nll = torch.empty(hidden.shape[0], dtype=wide, device=hidden.device)
        hit = torch.empty(hidden.shape[0], dtype=torch.bool, device=hidden.device)
        sums = torch.zeros(len(job.scales), dtype=torch.float64, device=hidden.device)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # One buffer of each kind for all chunks: a new one would stand beside the last.
        space = Workspace(job.rows_at_once, nll)
        product = _buffer(job.rows_at_once, head)
        teacher_product = None
        if job.teacher is not None:
            teacher_product = _buffer(job.rows_at_once, job.teacher.lm_head)
        for rows, of_blocks in job.chunks():
            if rows.start == rows.stop:
                continue
            logits = _logits(hidden[rows], head, product)
            targets = _targets(job, rows, teacher_product, space)
            chunk = Chunk(
                labels=job.labels[rows],
                counted=job.counted[rows],
                slots=job.slots[rows] - of_blocks.start * job.mask.shape[1],
                valid=job.blocks.valid[of_blocks],
                proposed=job.blocks.proposed[of_blocks],
                weights={i: w[rows] for i, w in job.depth_weights.items()},
            )
            nll[rows], hit[rows], slopes = chunk_loss(
                logits, chunk, job.active, job.scales, targets, sums, space,
                wants_slopes=gradient is not None,
            )  # fmt: skip
            if gradient is not None:
                gradient[rows] = slopes.to(head.dtype) @ head
            # Names that outlive the round would keep its logits beside the next one's.
            del logits, targets, slopes
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(sums, nll, hit)
        scales = torch.tensor(job.scales, dtype=torch.float64, device=sums.device)
        return (sums * scales).sum().to(wide), sums, nll, hit

    @staticmethod
    def backward(ctx, grad_total, *_):  # pyright: ignore[reportIncompatibleMethodOverride]
        (gradient,) = ctx.saved_tensors
        return gradient * grad_total, None


def _targets(
    job: _Job, rows: slice, product: torch.Tensor | None, space: Workspace
) -> Targets | None:
    if job.teacher is None or job.teacher_rows is None or product is None:
        return None
    # Blocks of neighbouring anchors overlap: many slots ask for the same position.
    distinct, inverse = torch.unique(job.teacher_rows[rows], return_inverse=True)
    logits = _logits(job.teacher.last[distinct], job.teacher.lm_head, product)
    return Targets(logits, inverse, space, columns=job.teacher.columns)


def _buffer(rows: int, lm_head: torch.Tensor) -> torch.Tensor:
    dtype = torch.float32 if lm_head.is_cuda else lm_head.dtype
    return lm_head.new_empty((rows, lm_head.shape[0]), dtype=dtype)


def _logits(hidden: torch.Tensor, lm_head: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """fp32 logits (fp64 of an fp64 head), in `buffer` where that is as wide.

    On CUDA the sums leave the product as the fp32 that they are: bfloat16 logits change the argmax
    of one row in fifty. On a CPU a bfloat16 product has bfloat16 results.
    """
    hidden, buffer = hidden.to(lm_head.dtype), buffer[: hidden.shape[0]]
    if buffer.dtype is not lm_head.dtype:
        return torch.mm(hidden, lm_head.T, out_dtype=buffer.dtype, out=buffer)
    logits = torch.mm(hidden, lm_head.T, out=buffer)
    return logits if logits.dtype is torch.float64 else logits.float()
