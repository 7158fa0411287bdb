"""fp32 masters, narrower products: the type that the drafter's forward pass computes in.

docs/algorithms.md, "Precision".
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from paceline.recipe.schema import TrainRecipe
from paceline.recipe.training import resolved_compute


def compute_dtype(recipe: TrainRecipe) -> torch.dtype:
    """Of the matrix products; the frozen embedding and head are held in it."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[resolved_compute(recipe)]


@contextmanager
def computing(drafter: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, matrix products of fp32 weights are taken in `dtype`, and activations are of it.

    Norms are taken in fp32, as they are where a drafter is served; weights and their gradients are
    fp32. Backward passes belong outside: they take the types of their forward pass.
    """
    if dtype is torch.float32:
        yield
        return
    device = next(drafter.parameters()).device.type
    # Autocast leaves a norm its narrow input, which has no fused kernel beside an fp32 weight.
    norms = [module for module in drafter.modules() if isinstance(module, nn.RMSNorm)]
    hooks = [norm.register_forward_pre_hook(_widen) for norm in norms]
    hooks += [norm.register_forward_hook(lambda _m, _i, out: out.to(dtype)) for norm in norms]
    try:
        with torch.autocast(device, dtype=dtype):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _widen(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(x.float() for x in inputs)
