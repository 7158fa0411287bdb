"""Hidden states of a batch, taken by hooks on the tapped layers alone."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from paceline.target.cache_argument import cache_argument
from paceline.target.chunked import Piece, new_cache, pieces_of
from paceline.target.spec import TargetSpec
from paceline.target.transfer import HostCopies, HostCopy, to_device
from paceline.types import Features, TokenBatch


@dataclass(frozen=True)
class CapturePlan:
    """What is captured, and how."""

    taps: tuple[int, ...]
    """Rising ids of the tapped layers."""

    last: bool
    """Whether what lm_head multiplies is kept as well. Without it the pass ends after the last
    tap."""

    chunk_tokens: int | None = None
    """Longer samples pass in pieces of this many tokens; None takes each sample in one."""

    dtype: torch.dtype | None = None
    """The states are converted to this on the device; None keeps the compute type."""


class PendingFeatures:
    """A capture whose states may still be on their way to the host."""

    def __init__(self, tokens: TokenBatch, copy: HostCopy, width: int, plan: CapturePlan) -> None:
        self._tokens = tokens
        self._copy = copy
        self._width = width
        self._plan = plan

    def wait(self) -> Features:
        """The features, contiguous on the CPU, and usable as constants under autograd."""
        host, taps = self._copy.wait(), self._plan.taps
        tokens = self._tokens.input_ids.numel()
        edge = len(taps) * tokens * self._width
        return Features(
            tokens=self._tokens,
            taps=host[:edge].view(tokens, len(taps), self._width),
            last=host[edge:].view(tokens, self._width) if self._plan.last else None,
            layer_ids=taps,
        )


class _AllCaptured(Exception):
    """Leaves the forward pass after the last layer that is needed."""


class _Buffer:
    """The states of all real tokens of a batch, in one tensor on the device."""

    def __init__(self, tokens: int, width: int, plan: CapturePlan, like: torch.Tensor) -> None:
        edge = len(plan.taps) * tokens * width
        size = edge + plan.last * tokens * width
        dtype = plan.dtype or like.dtype
        self.all = torch.empty(size, dtype=dtype, device=like.device)
        self.taps = self.all[:edge].view(tokens, len(plan.taps), width)
        self.last = self.all[edge:].view(-1, width)
        self._real: torch.Tensor | None = None
        self._rows: torch.Tensor | None = None

    def expect(self, piece: Piece) -> None:
        """What is put from now on are states of this piece."""
        device = self.all.device
        self._real = None if piece.real is None else to_device(piece.real, device)
        self._rows = None if piece.rows is None else to_device(piece.rows, device)

    def put(self, place: torch.Tensor, hidden: torch.Tensor) -> None:
        """Put the real rows of `hidden` [N, S, H] where they belong in `place` [T, H]."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        if self._real is not None:
            flat = flat.index_select(0, self._real)
        if self._rows is None:
            place.copy_(flat)
        else:
            place.index_copy_(0, self._rows, flat.to(place.dtype))


@torch.no_grad()
def start_capture(
    decoder: PreTrainedModel,
    spec: TargetSpec,
    batch: TokenBatch,
    plan: CapturePlan,
    copies: HostCopies,
) -> PendingFeatures:
    """Run `decoder` (embedding, layers, final norm; no lm_head) over a batch.

    Samples stand right-padded in one rectangle and no mask is given: padding behind a token
    changes nothing before it, in causal attention or in a recurrent layer, positions start at 0
    for every sample, and a token of padding always has itself to look at, so that nothing becomes
    infinite. Only real rows are kept, in one buffer on the device, and that buffer is copied to
    the host once, by `copies`. The decoder is left as it was.

    Raises TargetError where pieces are asked for that its layers cannot pass a state between.
    """
    weight: torch.Tensor = next(decoder.parameters())
    tokens, width = batch.input_ids.numel(), _hidden_size(decoder)
    buffer = _Buffer(tokens, width, plan, weight)
    processed = torch.empty_like(batch.input_ids)
    more: dict[str, Any] = {"use_cache": False}
    cache: Any = None
    if plan.chunk_tokens is not None and max(batch.lengths) > plan.chunk_tokens:
        cache = new_cache(decoder, spec.layer_kinds, spec.name)
        more = {"use_cache": True, cache_argument(decoder): cache}
    with ExitStack() as hooks:
        _hook_layers(hooks, decoder.layers, plan, buffer)  # pyright: ignore[reportArgumentType]
        for piece in pieces_of(batch, plan.chunk_tokens):
            if piece.keep is not None:
                cache.reorder_cache(to_device(piece.keep, weight.device))
            buffer.expect(piece)
            with suppress(_AllCaptured):
                output = decoder(input_ids=to_device(piece.ids, weight.device), **more)
                buffer.put(buffer.last, output.last_hidden_state)
            ids = piece.ids.reshape(-1)
            ids = ids if piece.real is None else ids[piece.real]
            processed[slice(None) if piece.rows is None else piece.rows] = ids
    done = TokenBatch(
        input_ids=processed,
        loss_mask=batch.loss_mask,
        offsets=batch.offsets,
        sample_ids=batch.sample_ids,
    )
    return PendingFeatures(done, copies.start(buffer.all), width, plan)


def _hook_layers(
    hooks: ExitStack, layers: Sequence[nn.Module], plan: CapturePlan, buffer: _Buffer
) -> None:
    def hook_for(slot: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            buffer.put(buffer.taps[:, slot], hidden)
            if not plan.last and slot == len(plan.taps) - 1:
                raise _AllCaptured

        return hook

    for slot, layer in enumerate(plan.taps):
        handle = layers[layer].register_forward_hook(hook_for(slot))
        hooks.callback(handle.remove)


def _hidden_size(decoder: PreTrainedModel) -> int:
    embedding: Any = decoder.get_input_embeddings()
    return embedding.weight.shape[1]
