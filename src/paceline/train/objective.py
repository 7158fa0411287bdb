"""The training loss of a batch of blocks."""

from collections.abc import Sequence

from paceline.drafter.dflash import DFlash
from paceline.objective.blocks import block_targets
from paceline.objective.loss import Blocks, Objective, Teacher, objective_loss
from paceline.objective.terms import SlotCounts, names, normaliser
from paceline.recipe.objective_terms import NEEDS_ACCEPTANCE, ObjectiveTerm
from paceline.target.head import TargetHead
from paceline.train.batch import Anchored, BlockBatch
from paceline.types.loss import Loss


def slot_counts(drafter: DFlash, samples: Sequence[Anchored]) -> SlotCounts:
    """What there is to learn from in some samples; reads their tokens alone."""
    depth = drafter.config.block_size - 1
    total = SlotCounts(valid=(0,) * depth, counted=(0,) * depth, blocks=0)
    for sample in samples:
        tokens = sample.features.tokens
        labels, valid = block_targets(
            tokens.input_ids, tokens.loss_mask, sample.anchors, drafter.config.block_size
        )
        total += SlotCounts.of(valid, drafter.proposes(labels))
    return total


def block_loss(
    drafter: DFlash,
    head: TargetHead,
    batch: BlockBatch,
    terms: Sequence[ObjectiveTerm],
    *,
    chunk: int,
    scales: Sequence[float] | None = None,
) -> Loss:
    """The terms' sums over the batch, each times its scale (1 without any).

    Only rows that a term asks for reach the head: neither slot 0 nor what lies behind an answer's
    end, nor, where all terms need a label, one that a reduced vocabulary lacks. `head` is
    `drafter.narrowed` of the target's. `count` is what the first term is divided by for its mean.
    `parts` holds, for slot 1 and for all slots, how many rows were right and how many there were
    (one without loss is a wrong one), and how many were `outside` the vocabulary; where there are
    several terms, also the sum of each that has a scale, and what it is divided by.
    """
    drafter.check_head(head)
    labels, proposed = drafter.to_draft(batch.labels)
    hidden = drafter(
        head.embed(batch.block_ids), batch.anchors, batch.taps, batch.positions, batch.documents
    )
    scales = [1.0] * len(terms) if scales is None else scales
    loss = objective_loss(
        hidden,
        head.lm_head,
        Blocks(labels=labels, valid=batch.valid, proposed=proposed),
        terms,
        scales,
        chunk=chunk,
        teacher=_teacher(drafter, head, batch, terms),
    )
    counts = SlotCounts.of(batch.valid, proposed)
    return Loss(
        sum=loss.total,
        count=normaliser(terms[0], counts),
        parts=_slot_parts(loss, counts) | _term_parts(loss, terms, scales, counts),
    )


def _teacher(
    drafter: DFlash, head: TargetHead, batch: BlockBatch, terms: Sequence[ObjectiveTerm]
) -> Teacher | None:
    if batch.last is None or batch.teacher_rows is None:
        return None
    # Only acceptance asks what the target gives to tokens that are never proposed.
    all_tokens = any(term.kind in NEEDS_ACCEPTANCE for term in terms)
    columns = drafter.proposed_ids if all_tokens else None
    if columns is not None and head.whole is None:
        raise ValueError("a term needs all rows of lm_head: `narrowed` keeps them where asked to")
    return Teacher(
        last=batch.last,
        rows=batch.teacher_rows,
        lm_head=head.lm_head if columns is None or head.whole is None else head.whole,
        columns=columns,
    )


def _slot_parts(loss: Objective, counts: SlotCounts) -> dict[str, float]:
    valid = float(sum(counts.valid))
    right = loss.hit.sum(dim=0).tolist()
    return {
        "right": float(sum(right)),
        "right_count": valid,
        "first_right": float(right[0]),
        "first_right_count": float(counts.valid[0]),
        "outside": valid - sum(counts.counted),
        "outside_count": valid,
    }


def _term_parts(
    loss: Objective,
    terms: Sequence[ObjectiveTerm],
    scales: Sequence[float],
    counts: SlotCounts,
) -> dict[str, float]:
    if len(terms) == 1:
        return {}
    parts: dict[str, float] = {}
    sums = loss.sums.tolist()
    for name, term, scale, total in zip(names(terms), terms, scales, sums, strict=True):
        if scale:
            parts |= {name: total, f"{name}_count": normaliser(term, counts)}
    return parts
