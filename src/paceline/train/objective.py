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
    anything; nor does a row whose label a reduced vocabulary lacks. `head` is `drafter.narrowed`
    of the target's. `parts` holds, for slot 1 and for all slots, how many rows were right and how
    many there were (one without loss is a wrong one), and how many were `outside` the vocabulary.
    """
    drafter.check_head(head)
    labels, proposed = drafter.to_draft(batch.labels)
    counted = batch.valid & proposed
    hidden = drafter(
        head.embed(batch.block_ids), batch.anchors, batch.taps, batch.positions, batch.documents
    )
    weights = decay_weights(drafter.config.block_size, gamma).to(hidden.device)
    weights = weights.expand_as(counted)[counted]
    total, rows = cross_entropy(
        hidden[counted], head.lm_head, labels[counted], weights, chunk=chunk
    )
    first = torch.nonzero(counted)[:, 1] == 0
    valid = float(batch.valid.sum())
    return Loss(
        sum=total,
        count=float(weights.sum()),
        parts={
            "right": float(rows.hit.sum()),
            "right_count": valid,
            "first_right": float(rows.hit[first].sum()),
            "first_right_count": float(batch.valid[:, 0].sum()),
            "outside": valid - rows.hit.numel(),
            "outside_count": valid,
        },
    )
