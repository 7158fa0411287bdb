"""What a training takes of its device: predicted, measured, and told of where it was too much."""

import errno
import logging
import mmap
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.drafter.config import DrafterConfig
from paceline.drafter.memory import (
    CUDA_CONTEXT_BYTES,
    PROCESS_BYTES,
    Part,
    lasting_parts,
    step_parts,
    writing_bytes,
)
from paceline.drafter.shape import DrafterShape
from paceline.durable.errors import OutOfMemory
from paceline.recipe.online import is_on_cpu
from paceline.recipe.schema import TrainRecipe
from paceline.watch.words import short_bytes

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Something that takes memory."""

    doing: str
    """Such as `the optimizer step`."""
    advice: str
    """What helps where it takes too much."""
    is_sound: bool = True
    """Whether it changes nothing where it fails."""


_ELSEWHERE = "`paceline doctor` names what else holds memory on a GPU."
LOADING = Phase(
    doing="loading drafter, optimizer and the target's head",
    advice=f"{_ELSEWHERE} A device with more memory, or fewer drafter.layers, would do.",
)
UPDATE = Phase(
    doing="the optimizer step",
    advice=f"{_ELSEWHERE} A device with more memory, or fewer drafter.layers, would do.",
    is_sound=False,
)
EVALUATION = Phase(
    doing="an evaluation",
    advice=f"Lower train.eval_anchors (`--allow-change train.eval_anchors`). {_ELSEWHERE}",
)
AVERAGE = Phase(
    doing="the average",
    advice="It takes nothing on a device: it is made on the host, one tensor at a time, so what "
    f"fills the device is something else. {_ELSEWHERE}",
    is_sound=False,
)
SAVING = Phase(
    doing="writing a checkpoint",
    advice="It passes through the host's memory: free some there.",
    is_sound=False,
)


def forward_and_backward(tokens: int) -> Phase:
    """That of a micro-batch of so many tokens, context and slots."""
    return Phase(
        doing=f"forward and backward of a micro-batch of {tokens:,} tokens",
        advice="Lower train.micro_batch_tokens; where one long sample is as large, train.anchors; "
        "or train.loss_chunk (each with `--allow-change KEY`). Fewer drafter.layers take less, in "
        f"a new run. {_ELSEWHERE}",
    )


def shape_of(config: DrafterConfig) -> DrafterShape:
    """That of a drafter with this config."""
    return DrafterShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_taps=len(config.taps),
        vocab_size=config.vocab_size,
        draft_vocab_size=config.draft_vocab_size,
        block_size=config.block_size,
    )


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What a prediction follows from, beside the drafter and the recipe."""

    longest: int
    """Tokens of the longest sample."""
    is_tied: bool
    """Whether the target's embedding is its lm_head."""

    def parts(self, train: TrainRecipe, config: DrafterConfig, device: str) -> tuple[Part, ...]:
        """What a drafter takes on a device, as `paceline plan` has it.

        Of a GPU without CUDA's context, which torch does not count. Of a CPU it is the anonymous
        memory of the process: features that wait are shared or mapped.
        """
        shape = shape_of(config)
        parts = [
            *lasting_parts(train, shape, is_tied=self.is_tied),
            *step_parts(train, shape, self.longest),
        ]
        if is_on_cpu(device):
            writing = writing_bytes(train, shape, self.longest, device=device)
            parts.append(Part(name="a checkpoint's bytes", bytes=writing, is_estimate=True))
            parts.append(Part(name="process", bytes=PROCESS_BYTES, is_estimate=True))
        return tuple(part for part in parts if part.bytes)


def tell_prediction(predicted: Mapping[str, tuple[Part, ...]]) -> None:
    """Log the sum and its parts, by device; devices alike in one line."""
    for parts in dict.fromkeys(predicted.values()):
        devices = [device for device, found in predicted.items() if found == parts]
        shown = ", ".join(f"{part.name} {short_bytes(part.bytes or 0)}" for part in parts)
        beside = "" if is_on_cpu(devices[0]) else f"; beside it CUDA's {_CONTEXT}"
        _LOG.info(
            "memory: %s predicted on %s%s (%s)%s",
            short_bytes(total(parts)), "each of " if len(devices) > 1 else "", ", ".join(devices),
            shown, beside,
        )  # fmt: skip


_CONTEXT = f"context, about {short_bytes(CUDA_CONTEXT_BYTES)}"


def total(parts: Iterable[Part]) -> int:
    """The sum, in bytes."""
    return sum(part.bytes or 0 for part in parts)


@dataclass(frozen=True, kw_only=True)
class Use:
    """What one drafter has taken."""

    device: str
    """As the recipe calls it."""
    predicted: int
    """Bytes; 0 where there is no prediction."""
    peak: int
    """Bytes: on a GPU all tensors together, on a CPU the process's anonymous memory, looked at
    behind each forward pass and each phase."""
    reserved: int | None = None
    """Bytes that torch has held of a GPU at most, for tensors to come too; None on a CPU."""

    def sentence(self) -> str:
        """Both, compared."""
        text = f"memory: peak {short_bytes(self.peak)}"
        if self.predicted:
            share = self.peak / self.predicted
            text += f" of {short_bytes(self.predicted)} predicted ({share:.0%})"
        held = "" if self.reserved is None else f", {short_bytes(self.reserved)} held by torch"
        return f"{text} on {self.device}{held}"


def numbers_of(uses: Iterable[Use]) -> dict[str, Any]:
    """For the record: bytes by device."""
    uses = tuple(uses)
    held = {use.device: use.reserved for use in uses if use.reserved is not None}
    return {
        "memory_predicted": {use.device: use.predicted for use in uses},
        "memory_peak": {use.device: use.peak for use in uses},
        **({"memory_reserved": held} if held else {}),
    }


class Meter:
    """Memory of what this process does on one device."""

    def __init__(self, device: torch.device, *, name: str = "", parts: Iterable[Part] = ()) -> None:
        """`name` is what the recipe calls the device, `parts` what is predicted.

        A GPU's peak counts from here on.
        """
        self._device, self._name = device, name or str(device)
        self._predicted = total(parts)
        self._peak = 0
        if device.type == "cuda":
            torch.cuda.init()
            torch.cuda.reset_peak_memory_stats(device)

    def sample(self) -> None:
        """Look now: a CPU keeps no peak by itself."""
        if self._device.type != "cuda":
            self._peak = max(self._peak, anonymous_bytes())

    def use(self) -> Use:
        """Up to now."""
        if self._device.type != "cuda":
            return Use(device=self._name, predicted=self._predicted, peak=self._peak)
        return Use(
            device=self._name,
            predicted=self._predicted,
            peak=torch.cuda.max_memory_allocated(self._device),
            reserved=torch.cuda.max_memory_reserved(self._device),
        )

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Raises OutOfMemory where memory runs out inside."""
        try:
            yield
        except (RuntimeError, MemoryError, OSError) as error:
            if not _is_out_of_memory(error):
                raise
            message = f"{self._name} is out of memory in {phase.doing}. {self._compared(error)}"
            # What the failed calls hold would be missing where a checkpoint is still written.
            traceback.clear_frames(error.__traceback__)
            error.__traceback__ = None
            raise OutOfMemory(f"{message} {phase.advice}", phase.is_sound) from None
        finally:
            self.sample()

    def _compared(self, error: BaseException) -> str:
        self.sample()
        use = self.use()
        said = " ".join(str(error).split()).partition(" If reserved but")[0].rstrip(".")
        predicted = f"{short_bytes(use.predicted)} predicted, " if use.predicted else ""
        held = "" if use.reserved is None else f", {short_bytes(use.reserved)} held by torch"
        return (
            f"{predicted}{short_bytes(use.peak)} measured at the peak{held}"
            f"{f' ({said})' if said else ''}."
        )


def anonymous_bytes(process: int | str = "self") -> int:
    """What a process has in memory that no file and no shared memory backs. Linux only."""
    _, resident, shared, *_ = Path(f"/proc/{process}/statm").read_text().split()
    return (int(resident) - int(shared)) * mmap.PAGESIZE


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # The CPU's allocator, and a driver that fails outside of torch's, have no class of their own.
    return any(words in str(error) for words in ("can't allocate memory", "out of memory"))
