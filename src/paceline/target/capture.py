"""Hidden states of a batch, taken by hooks on the tapped layers alone."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import nn

from paceline.types import Features, TokenBatch


class _AllCaptured(Exception):
    """Leaves the forward pass after the last layer that is needed."""


@torch.no_grad()
def capture_states(
    decoder: nn.Module,
    layers: Sequence[nn.Module],
    batch: TokenBatch,
    taps: tuple[int, ...],
    *,
    last: bool,
) -> Features:
    """Run `decoder` (embedding, layers, final norm; no lm_head) over a batch.

    `taps` are rising ids into `layers`. Samples stand right-padded in one rectangle: padding
    behind a token changes nothing before it, in causal attention or in a recurrent layer, so
    positions start at 0 for every sample. Only real rows are kept, in one buffer on the device,
    and that buffer is copied to the host once. Without `last` the pass ends after the last tap.
    The decoder is left as it was. The result is in the decoder's dtype, contiguous, on the CPU,
    and usable as a constant under autograd.
    """
    ids, mask, rows = _rectangle(batch)
    weight = next(decoder.parameters())
    device = weight.device
    tokens, width = batch.input_ids.numel(), _hidden_size(decoder)
    slots = len(taps) + last
    buffer = torch.empty(slots * tokens * width, dtype=weight.dtype, device=device)
    states = buffer[: len(taps) * tokens * width].view(tokens, len(taps), width)
    final = buffer[len(taps) * tokens * width :].view(-1, width)
    rows_on_device = None if rows is None else rows.to(device)

    def real_rows(hidden: torch.Tensor) -> torch.Tensor:
        flat = hidden.reshape(-1, width)
        return flat if rows_on_device is None else flat[rows_on_device]

    def hook_for(slot: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            states[:, slot] = real_rows(hidden)
            if not last and slot == len(taps) - 1:
                raise _AllCaptured

        return hook

    with ExitStack() as hooks:
        for slot, layer in enumerate(taps):
            handle = layers[layer].register_forward_hook(hook_for(slot))
            hooks.callback(handle.remove)
        with suppress(_AllCaptured):
            output = decoder(
                input_ids=ids.to(device),
                attention_mask=None if mask is None else mask.to(device),
                use_cache=False,
            )
            final[:] = real_rows(output.last_hidden_state)

    host = buffer.to("cpu")
    edge = len(taps) * tokens * width
    return Features(
        tokens=TokenBatch(
            input_ids=ids.reshape(-1) if rows is None else ids.reshape(-1)[rows],
            loss_mask=batch.loss_mask,
            offsets=batch.offsets,
            sample_ids=batch.sample_ids,
        ),
        taps=host[:edge].view(tokens, len(taps), width),
        last=host[edge:].view(tokens, width) if last else None,
        layer_ids=taps,
    )


def _rectangle(
    batch: TokenBatch,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Ids [N, S], mask int64 [N, S], and the flat indices of the real tokens.

    Mask and indices are None where all samples have one length: nothing is padded then.
    """
    lengths = batch.lengths
    longest = max(lengths)
    if min(lengths) == longest:
        return batch.input_ids.view(len(lengths), longest), None, None
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    ids = torch.zeros(len(lengths), longest, dtype=torch.int64)
    ids[mask] = batch.input_ids
    return ids, mask.long(), mask.reshape(-1).nonzero().squeeze(1)


def _hidden_size(decoder: nn.Module) -> int:
    embedding = decoder.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    return embedding.weight.shape[1]
