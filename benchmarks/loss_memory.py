"""Peak memory of the loss, forward and backward, over the size of the vocabulary.

What the kernel says of this process: its resident peak above what it held before the call, inputs
(hidden states, labels, the head itself) among that.
"""

import re
from pathlib import Path
from typing import Any

import torch

from paceline.objective.cross_entropy import cross_entropy

VOCABULARIES = (4096, 32768, 131072, 248320)
ROWS, HIDDEN, CHUNK = 2048, 64, 1 << 23
TOLERANCE = 0.10


def measure() -> dict[str, Any]:
    """Largest deviation from the mean peak, as a share of it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    peaks = {vocabulary: _peak(vocabulary) for vocabulary in VOCABULARIES}
    mean = sum(peaks.values()) / len(peaks)
    deviation = max(abs(peak - mean) for peak in peaks.values()) / mean
    shown = ", ".join(f"{v}: {p / 2**20:.1f} MiB" for v, p in peaks.items())
    return {
        "name": "loss_memory",
        "value": round(deviation, 4),
        "unit": "largest deviation from the mean peak",
        "target": TOLERANCE,
        "ok": deviation <= TOLERANCE,
        "how": (
            f"peak beyond the inputs at {ROWS} rows of {HIDDEN}, chunks of {CHUNK} logits, by "
            f"vocabulary: {shown}; all logits of the last at once would be "
            f"{ROWS * VOCABULARIES[-1] * 4 / 2**20:.0f} MiB"
        ),
    }


def _peak(vocabulary: int) -> int:
    head = torch.randn(vocabulary, HIDDEN)
    labels = torch.randint(0, vocabulary, (ROWS,))
    _step(head, labels)  # what libraries keep for themselves from their first call on
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    _step(head, labels)
    return _status("VmHWM") - before


def _step(head: torch.Tensor, labels: torch.Tensor) -> None:
    hidden = torch.ones(ROWS, HIDDEN).requires_grad_()
    total, _ = cross_entropy(hidden, head, labels, torch.ones(ROWS), chunk=CHUNK)
    total.backward()


def _status(field: str) -> int:
    """A figure of /proc/self/status, in bytes."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise RuntimeError(f"/proc/self/status has no {field}")
    return int(found[1]) * 1024
