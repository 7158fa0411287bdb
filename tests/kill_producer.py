"""Units without a target and without torch: what a worker of the kills makes.

Each is 4 KiB to 1 MiB, and a function of a seed and its index alone. No numpy: a worker starts for
every kill.
"""

import os
import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kill_marks import Board, MarkedWatch, Order, Orders, worker_slot
from paceline.durable.fs import REAL_FS, FileSystem
from paceline.durable.iowatch import WatchedFs
from paceline.durable.store import Stat
from paceline.features.format import Tensor, json_text, write_tensors
from paceline.flow.units import Made, Task, WorkerContext

LAYERS = (0, 1)
HIDDEN = 256
VOCAB = 256
_TOKEN_BYTES = len(LAYERS) * HIDDEN * 2
_FEWEST, _MOST = 4, 1018
"""Tokens; with 5 bytes more of each and the header, shards of 4.8 KiB to 1 MiB."""


@dataclass(frozen=True)
class Unit:
    """What a unit holds; its payload for the worker."""

    seed: str
    index: int
    fingerprint: str

    @property
    def sample_id(self) -> str:
        return f"{self.index:032x}"

    @property
    def input_ids(self) -> list[int]:
        rng = random.Random(f"{self.seed}/ids/{self.index}")
        tokens = round(_FEWEST * (_MOST / _FEWEST) ** rng.random())
        return [rng.randrange(VOCAB) for _ in range(tokens)]

    @property
    def loss_start(self) -> int:
        """The first trained token."""
        return len(self.input_ids) // 2


def write_unit(unit: Unit, path: Path, fs: FileSystem) -> Stat:
    """Write its shard, as an extraction does."""
    ids = array("i", unit.input_ids)
    tokens, trained = len(ids), len(ids) - unit.loss_start
    noise = random.Random(f"{unit.seed}/states/{unit.index}").randbytes(tokens * _TOKEN_BYTES)
    tensors: dict[str, Tensor] = {
        "offsets": ("I64", [2], array("q", [0, tokens]).tobytes()),
        "input_ids": ("I32", [tokens], ids.tobytes()),
        "taps": ("BF16", [tokens, len(LAYERS), HIDDEN], noise),
        "loss_mask": ("U8", [tokens], bytes(tokens - trained) + b"\1" * trained),
    }
    metadata = {
        "kind": "paceline.features",
        "version": "1",
        "fingerprint": unit.fingerprint,
        "layer_ids": json_text(LAYERS),
        "layer_convention": "output_after_layer",
        "last": "absent",
        "sample_ids": json_text([unit.sample_id]),
    }
    return write_tensors(path, tensors, metadata, fs=fs)


@dataclass(frozen=True)
class Plan:
    """What every worker of one start is told."""

    board: Path
    orders_folder: Path
    orders: tuple[Order, ...]
    begun: Path
    """Gets a line for each unit that is begun."""


def open_producer(plan: Plan, context: WorkerContext) -> Callable[[Task, Path], Made]:
    board, slot = Board(plan.board), worker_slot(context.number)
    board.write(slot, "starting")
    orders = Orders(plan.orders_folder, board, slot, _next_order(plan, context.number))
    watch = MarkedWatch(board, slot, orders)
    fs = WatchedFs(context.fs, watch)

    def handle(task: Task, path: Path) -> Made:
        with plan.begun.open("ab", buffering=0) as file:
            file.write(b"%d\n" % task.index)
        with watch.call("make"):
            stat = write_unit(task.payload, path, fs)
        return Made(stat)

    orders.passes("setup")
    board.write(slot, "between calls")
    return handle


def promised_stat(unit: Unit, scratch: Path) -> Stat:
    """What its shard must be; `scratch` is a folder for a file that is gone afterwards."""
    path = scratch / f"expected-{os.getpid()}"
    try:
        return write_unit(unit, path, REAL_FS)
    finally:
        path.unlink(missing_ok=True)


def _next_order(plan: Plan, number: int) -> tuple[Order, ...]:
    """The worker's first order that none of its processes has taken: one each."""
    for order in plan.orders:
        if order.who != "worker" or order.worker != number:
            continue
        try:
            os.close(os.open(plan.orders_folder / f"taken-{order.name}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        return (order,)
    return ()
