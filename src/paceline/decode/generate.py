"""Plain decoding of many prompts at once on a Transformers causal language model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from paceline.decode.rooms import Columns, RoomLayer
from paceline.decode.sampling import GREEDY, PositionKeyedNoise, RequestKey, Sampling, choose
from paceline.target.cache_argument import cache_argument


@dataclass(frozen=True)
class Generation:
    """What the model answered to one prompt."""

    ids: tuple[int, ...]
    """Generated ids, the end token last where `finish` is "stop"."""

    finish: Literal["stop", "length"]
    """An end token, or the limit."""


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eos_ids: frozenset[int],
    sampling: Sampling = GREEDY,
    seed: int = 0,
    request_keys: Sequence[RequestKey] | None = None,
) -> list[Generation]:
    """Answer every prompt, all of them side by side; one Generation per prompt, in order.

    `model` is a Transformers causal LM in eval mode. A finished row leaves the batch, cache and
    all, and costs nothing afterwards. Prompts of unequal length are padded on the left where all
    layers are attention; a recurrent state cannot skip padding, so other models decode prompts of
    equal length together. Logits are formed for last positions only.

    Randomness is position-keyed (see `sampling`), by `request_keys`, one per prompt and by default
    its place in `prompts`: an answer depends on neither number nor order of the other prompts, up
    to the rounding of kernels that treat another batch size in another order.

    Raises ValueError for an empty prompt, for keys that are not one per prompt, for a limit below
    1 and for logits that are not numbers.
    """
    keys = range(len(prompts)) if request_keys is None else request_keys
    if len(keys) != len(prompts):
        raise ValueError(f"{len(keys)} request keys for {len(prompts)} prompts")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens {max_new_tokens} must be 1 or more")
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {number} is empty")
    noises = [PositionKeyedNoise(seed, key) for key in keys] if not sampling.is_greedy else []
    answers: list[Generation | None] = [None] * len(prompts)
    with torch.inference_mode():
        for rows in _batches(model, prompts):
            batch = _Batch(model, [prompts[row] for row in rows], max_new_tokens)
            alive = list(rows)
            partial: dict[int, list[int]] = {row: [] for row in rows}
            while alive:
                chosen = choose(
                    batch.logits,
                    [noises[row] for row in alive] if noises else (),
                    [len(prompts[row]) + len(partial[row]) for row in alive],
                    sampling,
                )
                going_on: list[int] = []
                for place, (row, token) in enumerate(zip(alive, chosen, strict=True)):
                    partial[row].append(token)
                    if token in eos_ids:
                        answers[row] = Generation(tuple(partial[row]), "stop")
                    elif len(partial[row]) == max_new_tokens:
                        answers[row] = Generation(tuple(partial[row]), "length")
                    else:
                        going_on.append(place)
                if going_on:
                    batch.keep(going_on)
                    batch.step([chosen[place] for place in going_on])
                alive = [alive[place] for place in going_on]
    return [answer for answer in answers if answer is not None]


def _batches(model: Any, prompts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Indices of the prompts that can be decoded together."""
    kinds = {type(layer) for layer in DynamicCache(config=model.config).layers}
    if kinds <= {DynamicLayer, DynamicSlidingWindowLayer}:
        if prompts:
            yield list(range(len(prompts)))
        return
    by_length: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(row)
    yield from by_length.values()


class _Batch:
    """Rows that advance together: cache, left padding, and the logits of the last position."""

    def __init__(self, model: Any, prompts: list[Sequence[int]], max_new_tokens: int) -> None:
        self._model = model
        self._device = model.device
        width = max(len(prompt) for prompt in prompts)
        padding = torch.tensor([width - len(prompt) for prompt in prompts])
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        self._cache_argument = cache_argument(model)
        self._cache = DynamicCache(config=model.config)
        self._columns = Columns(len(prompts))
        # Those they stand for copy a whole layer for every token.
        self._cache.layers = [
            RoomLayer(self._columns) if type(layer) is DynamicLayer else layer
            for layer in self._cache.layers
        ]
        self._width = width
        self._mask: torch.Tensor | None = None
        if bool(padding.any()):
            columns = torch.arange(width + max_new_tokens)
            self._mask = (columns >= padding[:, None]).to(self._device)
        self._next = torch.tensor([len(prompt) for prompt in prompts], device=self._device)
        positions = (torch.arange(width) - padding[:, None]).clamp_(min=0)
        self._forward(ids, positions.to(self._device))

    logits: torch.Tensor
    """[rows, V]: after the last token of each row."""

    def keep(self, places: list[int]) -> None:
        """Drop all other rows."""
        if len(places) == len(self._next):
            return
        index = torch.tensor(places, device=self._device)
        self._cache.reorder_cache(index)  # pyright: ignore[reportArgumentType]
        self._columns.starts = [self._columns.starts[place] for place in places]
        self._next = self._next[index]
        if self._mask is not None:
            self._mask = self._mask[index]

    def step(self, tokens: list[int]) -> None:
        """Append a token to every row."""
        self._width += 1
        positions = self._next[:, None]
        self._next = self._next + 1
        self._forward(torch.tensor(tokens)[:, None], positions)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> None:
        output = self._model(
            input_ids=ids.to(self._device),
            position_ids=positions,
            attention_mask=None if self._mask is None else self._mask[:, : self._width],
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: self._cache},
        )
        self._columns.starts = [self._width] * len(ids)
        self.logits = output.logits[:, -1]
