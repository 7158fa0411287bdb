"""Peak memory of the loss, forward and backward, over vocabulary and number of blocks.

What the kernel says of this process: its resident peak above what it held before the call, inputs
(hidden states, labels, the head itself) among that. Once for cross-entropy, once for a mix with
soft labels, which compares more distributions.
"""

import multiprocessing
import re
from pathlib import Path
from typing import Any

import torch

from paceline.objective.loss import Blocks, Teacher, objective_loss
from paceline.recipe.objective_terms import ObjectiveTerm

SIZES = ((32768, 64), (65536, 64), (131072, 64), (248320, 64))
MANY = (248320, 1024)
"""Vocabulary and blocks; with fewer tokens 256 rows, all that a CPU takes, are no whole chunk.
Of many blocks, what each slot keeps of itself (0.3 KiB) would show beside the one buffer of
cross-entropy."""
SLOTS, HIDDEN, CHUNK = 32, 16, 1 << 23
TOLERANCE = 0.10
_STREAKS = ObjectiveTerm(kind="cross_entropy", positions="streak_decay", gamma=10.0)
_SOFT = (
    ObjectiveTerm(kind="kl", temperature=2.0, gamma=10.0),
    ObjectiveTerm(kind="confident_right", gamma=10.0),
)


def measure() -> list[dict[str, Any]]:
    """Largest deviation from the mean peak, as a share of it, for each objective."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return [
        _measured("loss_memory", (_STREAKS,), SIZES),
        _measured("loss_memory_soft", (_STREAKS, *_SOFT), (*SIZES, MANY)),
    ]


def _measured(
    name: str, terms: tuple[ObjectiveTerm, ...], sizes: tuple[tuple[int, int], ...]
) -> dict[str, Any]:
    # Each in a process of its own: an allocator keeps what another measurement has freed.
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        found = pool.starmap(_peak, [(*size, terms) for size in sizes], chunksize=1)
    peaks = dict(zip(sizes, found, strict=True))
    mean = sum(peaks.values()) / len(peaks)
    deviation = max(abs(peak - mean) for peak in peaks.values()) / mean
    shown = ", ".join(f"{v} x {b}: {p / 2**20:.1f} MiB" for (v, b), p in peaks.items())
    vocabulary, blocks = sizes[-1]
    return {
        "name": name,
        "value": round(deviation, 4),
        "unit": "largest deviation from the mean peak",
        "target": TOLERANCE,
        "ok": deviation <= TOLERANCE,
        "how": (
            f"peak beyond the inputs at {SLOTS} slots of {HIDDEN} a block and chunks of {CHUNK} "
            f"logits, by vocabulary and blocks: {shown}; all logits of the last at once would be "
            f"{blocks * SLOTS * vocabulary * 4 / 2**20:.0f} MiB"
        ),
    }


def _peak(vocabulary: int, blocks: int, terms: tuple[ObjectiveTerm, ...]) -> int:
    head = torch.randn(vocabulary, HIDDEN)
    labels = torch.randint(0, vocabulary, (blocks, SLOTS))
    _step(
        head, labels[:1, :1], terms
    )  # what libraries keep for themselves from their first call on
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    _step(head, labels, terms)
    return _status("VmHWM") - before


def _step(head: torch.Tensor, labels: torch.Tensor, terms: tuple[ObjectiveTerm, ...]) -> None:
    hidden = torch.ones(*labels.shape, HIDDEN).requires_grad_()
    ok = torch.ones_like(labels, dtype=torch.bool)
    rows = torch.arange(labels.numel()).view(labels.shape)
    teacher = Teacher(last=torch.ones(labels.numel(), HIDDEN), rows=rows, lm_head=head)
    loss = objective_loss(
        hidden,
        head,
        Blocks(labels=labels, valid=ok, proposed=ok),
        terms,
        [1.0] * len(terms),
        chunk=CHUNK,
        teacher=teacher,
    )
    loss.total.backward()


def _status(field: str) -> int:
    """A figure of /proc/self/status, in bytes."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise RuntimeError(f"/proc/self/status has no {field}")
    return int(found[1]) * 1024
