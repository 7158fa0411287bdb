"""Rows that come as tokens, with the mask that somebody else has made."""

from typing import Any

from paceline.corpus.mask import Spans
from paceline.rows.rejection import RowRejected


def tokens_of(row: dict[str, Any], vocabulary: int) -> tuple[list[int], Spans]:
    """Ids [T] and trained spans of a row with `input_ids` and `loss_mask` (0 or 1 per token).

    `vocabulary` is the number of ids that the tokenizer knows. Raises RowRejected with a reason
    code: a mask is never made up, and neither is a token.
    """
    ids, mask = row["input_ids"], row.get("loss_mask")
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise RowRejected("bad_input_ids", "`input_ids` is not a list of whole numbers")
    if not isinstance(mask, list):
        raise RowRejected("no_loss_mask", "`input_ids` without a list `loss_mask` beside it")
    if len(mask) != len(ids):
        raise RowRejected("bad_loss_mask", f"{len(mask)} values for {len(ids)} tokens")
    if not all(isinstance(value, (int, float)) and value in (0, 1) for value in mask):
        raise RowRejected("bad_loss_mask", "values other than 0 and 1")
    bad = next((i for i in ids if not 0 <= i < vocabulary), None)
    if bad is not None:
        raise RowRejected(
            "token_id_out_of_range", f"{bad}, where the target's tokenizer has {vocabulary} ids"
        )
    return ids, _spans(mask)


def _spans(mask: list[Any]) -> Spans:
    spans: Spans = []
    start = None
    for place, value in enumerate([*mask, 0]):
        if value and start is None:
            start = place
        elif not value and start is not None:
            spans.append((start, place))
            start = None
    return spans
