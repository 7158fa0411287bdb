"""Acceptance without generation: what a drafter would have had accepted on a known answer.

Exact for answers that the target gave greedily, or with noise that belongs to the position: its
choice after any accepted prefix is then the answer's own next token (docs/algorithms.md, "Walk").
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from paceline.decode.ddtree import build_tree, top_log_probs
from paceline.drafter.attention import Document
from paceline.drafter.dflash import DFlash
from paceline.objective.blocks import block_targets
from paceline.target.head import TargetHead

CHAIN = "chain"

_LOGITS = 1 << 24
"""Logits that exist at a time, 64 MiB: memory depends on neither anchors nor vocabulary."""


class Observer(Protocol):
    """Sees all that a drafter says at the anchors, as `SlotTally` and `TemperatureFit` do."""

    def add(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        proposed: torch.Tensor,
        valid: torch.Tensor,
    ) -> None:
        """Logits fp32 [A, D, V], labels by column int64, whether they have one, whether valid."""
        ...


def method_name(budget: int | None) -> str:
    """`chain`, or `ddtree-M`."""
    return CHAIN if budget is None else f"ddtree-{budget}"


def accepted_depths(
    drafter: DFlash,
    head: TargetHead,
    taps: torch.Tensor,
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    anchors: torch.Tensor,
    budgets: Sequence[int],
    *,
    temperatures: Sequence[float] | None = None,
    observers: Sequence[Observer] = (),
) -> dict[str, list[int]]:
    """Drafted tokens that would be accepted at each anchor, by the chain and by each budget.

    Args:
        drafter: in eval mode.
        head: `drafter.narrowed` of the target's.
        taps: [>= max(anchors), L, H] features of one document, row t at position t.
        input_ids: int64 [S], prompt and answer.
        loss_mask: bool [S], true on the answer.
        anchors: int64 [A].
        budgets: draft-tree budgets.
        temperatures: of the trees, by depth; None for 1.
        observers: are shown the logits of all anchors, in the same pass.

    Returns:
        Method name to A depths.

    """
    drafter.check_head(head)
    block = drafter.config.block_size
    found: dict[str, list[int]] = {method_name(b): [] for b in (None, *budgets)}
    largest = max(budgets, default=0)
    with torch.inference_mode():
        positions = torch.arange(taps.shape[0], device=taps.device)
        contexts = drafter.contexts(taps.to(drafter.fc.weight.dtype), positions)
        for part in anchors.split(max(1, _LOGITS // ((block - 1) * head.lm_head.shape[0]))):
            labels, valid = block_targets(input_ids, loss_mask, part, block)
            ids = torch.full((part.numel(), block), drafter.config.mask_token_id).to(part.device)
            ids[:, 0] = input_ids[part]
            document = Document(rows=slice(None), blocks=slice(None))
            hidden = drafter.draft(head.embed(ids), part, contexts, [document])
            all_logits = head.logits(hidden).float()
            if observers:
                columns, proposed = drafter.to_draft(labels)
                for observer in observers:
                    observer.add(all_logits, columns, proposed, valid)
            for row, logits in enumerate(all_logits):
                wanted = labels[row][: int(valid[row].sum())].tolist()
                drafted = drafter.to_target(logits.argmax(dim=-1))
                found[CHAIN].append(_prefix_match(drafted.tolist(), wanted))
                if not budgets:
                    continue
                best = top_log_probs(logits, largest, drafter.d2t, temperatures)
                tree = build_tree(int(ids[row, 0]), *best, largest)
                path = _path(tree.children, wanted)
                for budget in budgets:
                    # Trees are nested: a node of the largest is in that of M iff its number is.
                    depth = sum(node <= budget for node in path)
                    found[method_name(budget)].append(depth)
    return found


def walk_rounds(depths: Sequence[int], *, stop: int, end: int | None) -> tuple[int, ...]:
    """The rounds of real decoding, from the accepted depth at every anchor of an answer.

    Args:
        depths: accepted drafted tokens with the anchor at answer token i, for each i.
        stop: decoding ends once this many answer tokens stand.
        end: number of answer tokens up to the end token, which cuts the round that meets it (it
            may lie behind `stop`); None where the answer is not known to end.

    Returns:
        Tokens committed by each round, as in `Decoded.rounds`.

    """
    rounds, anchor = [], 0
    while anchor + 1 < stop:
        committed = depths[anchor] + 1
        rounds.append(committed if end is None else min(committed, end - 1 - anchor))
        anchor += committed
    return tuple(rounds)


def _prefix_match(drafted: Sequence[int], wanted: Sequence[int]) -> int:
    for depth, (a, b) in enumerate(zip(drafted, wanted, strict=False)):
        if a != b:
            return depth
    return min(len(drafted), len(wanted))


def _path(children: Mapping[tuple[int, int], int], wanted: Sequence[int]) -> list[int]:
    node, path = 0, []
    for token in wanted:
        child = children.get((node, token))
        if child is None:
            break
        path.append(child)
        node = child
    return path
