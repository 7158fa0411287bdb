"""What decoding asks of each row of logits: its best columns, its normaliser, a label's rank."""

import math

import torch


def top_columns(rows: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest values of each row [D, V] and their columns, falling; fp32 is fastest.

    Equal ones by column, also where only some of the equal ones are among the largest. The columns
    are looked for in blocks: the c largest lie in the c blocks with the largest maxima, so most of
    V is looked at once.
    """
    total = rows.shape[-1]
    block = 1 << round(math.log2(max(1.0, total / count)) / 2)
    blocks = total // block
    if block < 8 or blocks <= count:
        places = _largest(rows, count)
        return rows.gather(-1, places), places
    whole = rows[:, : blocks * block].unflatten(-1, (blocks, block))
    # In rising order, so that a lower place among the candidates is a lower column.
    chosen = _largest(whole.amax(dim=-1), count).sort(dim=-1).values
    inside = torch.arange(block, device=rows.device)
    columns = (chosen[:, :, None] * block + inside).flatten(1)
    rest = torch.arange(blocks * block, total, device=rows.device)
    columns = torch.cat((columns, rest.expand(rows.shape[0], -1)), dim=1)
    places = _largest(rows.gather(-1, columns), count)
    columns = columns.gather(-1, places)
    return rows.gather(-1, columns), columns


def sum_exp(shifted: torch.Tensor) -> torch.Tensor:
    """Sum of exp over the last dimension, which stays; overwrites `shifted`, at most 0."""
    # exp takes ten times as long where it underflows; a whole row at e^-80 adds nothing.
    return shifted.clamp_(min=-80.0).exp_().sum(dim=-1, keepdim=True)


def _largest(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Places of the `count` largest of each row, falling, equal ones by place; int64 [D, count].

    `topk` takes any of equal ones. Keys that hold the place too are all different.
    """
    if rows.dtype != torch.float32:
        return rows.argsort(dim=-1, descending=True, stable=True)[:, :count]
    # + 0.0 makes -0.0 a 0.0. The bits of a float are in the order of its value, but that those of
    # negative ones rise as it falls.
    bits = (rows + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    places = torch.arange(rows.shape[-1], device=rows.device)
    return ((ordered.long() << 32) - places).topk(count, dim=-1).indices


def ranks_of(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """How many columns come before these int64 [n] in `top_columns` of rows [n, V]; int64 [n]."""
    own = rows.gather(-1, columns[:, None])
    before = torch.arange(rows.shape[-1], device=rows.device) < columns[:, None]
    return ((rows > own) | ((rows == own) & before)).sum(dim=-1)
