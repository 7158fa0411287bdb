"""The training loss of a batch of blocks: hard cross-entropy, weighted by slot."""

import torch

from paceline.drafter.dflash import DFlash
from paceline.objective.blocks import decay_weights
from paceline.objective.cross_entropy import cross_entropy
from paceline.target.head import TargetHead
from paceline.train.batch import BlockBatch
from paceline.types.loss import Loss


def block_loss(
    drafter: DFlash, head: TargetHead, batch: BlockBatch, *, gamma: float, chunk: int
) -> Loss:
    """Sum over valid slots of exp(-(k - 1) / gamma) * CE, and the sum of those weights.

    Only valid rows reach the head, so neither slot 0 nor what lies behind an answer's end costs
    anything. `parts` holds, for slot 1 and for all slots, how many were right and how many there
    were.
    """
    hidden = drafter(
        head.embed(batch.block_ids), batch.anchors, batch.taps, batch.positions, batch.documents
    )
    weights = decay_weights(drafter.config.block_size, gamma).to(hidden.device)
    weights = weights.expand_as(batch.valid)[batch.valid]
    total, rows = cross_entropy(
        hidden[batch.valid], head.lm_head, batch.labels[batch.valid], weights, chunk=chunk
    )
    first = torch.zeros_like(batch.valid)
    first[:, 0] = batch.valid[:, 0]
    first = first[batch.valid]
    return Loss(
        sum=total,
        count=float(weights.sum()),
        parts={
            "right": float(rows.hit.sum()),
            "right_count": float(rows.hit.numel()),
            "first_right": float(rows.hit[first].sum()),
            "first_right_count": float(first.sum()),
        },
    )
