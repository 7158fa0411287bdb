"""Room for keys and values in which every request has its own length.

Column c of a request's room holds its token at position c, so nothing is padded on the left, and a
request's rejected tokens are simply written over: committing a path moves the accepted rows alone.
Sliding layers keep every column too; what a token may see, its mask says.
"""

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

_GROWTH = 64
"""Least number of columns by which a full room grows, which copies it; else a quarter of it."""


class Columns:
    """Where the next rows of each request go; all layers of a cache share it."""

    def __init__(self, requests: int) -> None:
        self.starts = [0] * requests
        """First free column, which is the number of committed tokens."""

    def end(self, rows: int) -> int:
        """One behind the last column that a write of `rows` rows touches."""
        return max(self.starts) + rows


class RoomLayer(DynamicLayer):
    """The keys and values of one attention layer, [B, heads, capacity, D] each.

    A write puts row i of request b into column `starts[b] + i`. `keys` and `values` are views of
    all columns up to the last one written.
    """

    def __init__(self, columns: Columns) -> None:
        super().__init__()
        self._columns = columns
        self._key_room: torch.Tensor | None = None
        self._value_room: torch.Tensor | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new rows [B, heads, n, D]; returns all columns that hold anything."""
        self._key_room = self._write(self._key_room, key_states)
        self._value_room = self._write(self._value_room, value_states)
        end = self._columns.end(key_states.shape[-2])
        self.keys = self._key_room[:, :, :end]
        self.values = self._value_room[:, :, :end]
        self.is_initialized = True
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Columns that are committed, of the longest request."""
        return max(self._columns.starts)

    def gather(self, request: int, rows: torch.Tensor) -> None:
        """Bring columns int64 [n] of a request, rising, together behind what it has committed."""
        start = self._columns.starts[request]
        for room in (self._key_room, self._value_room):
            if room is not None:
                room[request, :, start : start + len(rows)] = room[request].index_select(-2, rows)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Keep these requests alone, int64 [n]; whoever holds the columns keeps theirs."""
        if self._key_room is not None and self._value_room is not None:
            self._key_room = self._key_room.index_select(0, beam_idx)
            self._value_room = self._value_room.index_select(0, beam_idx)

    def _write(self, room: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
        starts, rows = self._columns.starts, new.shape[-2]
        end = self._columns.end(rows)
        if room is None or end > room.shape[-2]:
            capacity = end + max(_GROWTH, end // 4)
            # Zeros: what no request has written may be multiplied by a weight of zero.
            larger = new.new_zeros((*new.shape[:-2], capacity, new.shape[-1]))
            if room is not None:
                larger[:, :, : room.shape[-2]] = room
            room = larger
        if min(starts) == max(starts):
            room[:, :, starts[0] : end] = new
        else:
            place = torch.tensor(starts)[:, None] + torch.arange(rows)
            request = torch.arange(len(starts))[:, None]
            room[request.to(room.device), :, place.to(room.device)] = new.transpose(1, 2)
        return room
