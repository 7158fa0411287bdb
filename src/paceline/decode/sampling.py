"""Choosing the next token, with randomness that belongs to the place and not to the moment.

The noise of a token is a function of (seed, request, absolute position, token id) alone, so that
an answer depends neither on its batch-mates nor on what was computed before, and speculative
decoding draws the very tokens that plain decoding would draw. It comes from Philox4x64-10 (NumPy's
`random_raw`, whose stream is fixed for all versions), keyed by 128 bits of SHA-256 over seed and
request, with the position in the third counter word: a position has 2^128 draws of its own.

With u uniform, E = -log(u) is exponential, and argmax of p / E is a draw from p: the Gumbel-max
trick (argmax of log p - log E) without its second logarithm.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

RequestKey = int | str
"""Names a request; equal keys draw equal noise."""


class PositionKeyedNoise:
    """The noise of one request."""

    def __init__(self, seed: int, key: RequestKey) -> None:
        text = f"{seed}:{type(key).__name__}:{key}"
        digest = hashlib.sha256(text.encode()).digest()
        self._key = np.frombuffer(digest[:16], dtype="<u8").astype(np.uint64)

    def exponentials(self, position: int, token_ids: np.ndarray) -> np.ndarray:
        """float64, as `token_ids` [n] (rising): the exponential draws of tokens at a position."""
        counter = np.array([0, 0, position, 0], dtype=np.uint64)
        raw = np.random.Philox(key=self._key, counter=counter).random_raw(int(token_ids[-1]) + 1)
        # The half keeps u away from 0 and 1, where the logarithm would leave the reals.
        return -np.log(((raw[token_ids] >> np.uint64(11)) + 0.5) * 2.0**-53)


def choose(
    logits: torch.Tensor,
    noises: Sequence[PositionKeyedNoise],
    positions: Sequence[int],
    *,
    temperature: float,
    top_p: float,
) -> list[int]:
    """Choose a token for every row of `logits` [N, V], any float type and device.

    `positions` [N] are the absolute positions of the tokens to be chosen, counted from the first
    token of the prompt. Greedy at temperature 0, where the lowest of equal ids wins and `noises`
    may be empty; else a draw from softmax(logits / temperature), of which `top_p` below 1 keeps
    the smallest set of most probable tokens that holds at least that mass. Raises ValueError for
    logits that are not numbers.
    """
    if temperature <= 0.0:
        chosen = logits.argmax(dim=-1)
        peaks = logits.gather(-1, chosen[:, None])[:, 0]
        if not bool(torch.isfinite(peaks).all()):
            raise _not_numbers(peaks, positions)
        return chosen.tolist()
    probabilities = torch.softmax(logits.float() / temperature, dim=-1).cpu()
    rows = probabilities.numpy()
    return [
        _draw(row, noise, position, top_p)
        for row, noise, position in zip(rows, noises, positions, strict=True)
    ]


def _draw(row: np.ndarray, noise: PositionKeyedNoise, position: int, top_p: float) -> int:
    if np.isnan(row[0]):
        raise _not_numbers(torch.from_numpy(row[:1]), [position])
    kept = np.flatnonzero(row) if top_p >= 1.0 else nucleus(row, top_p)
    return int(kept[np.argmax(row[kept] / noise.exponentials(position, kept))])


def nucleus(probabilities: np.ndarray, top_p: float) -> np.ndarray:
    """Rising ids of the smallest set of most probable tokens with a mass of at least `top_p`.

    `probabilities` is [V]; of equally probable tokens the lower id comes first; at least one
    token is kept.
    """
    # Tokens below (1 - p) / V weigh less than 1 - p together, so those above hold the nucleus
    # and only they need sorting.
    size = len(probabilities)
    candidates = np.flatnonzero(probabilities >= (1.0 - top_p) / size * 0.999)
    order = np.argsort(-probabilities[candidates], kind="stable")
    mass = np.cumsum(probabilities[candidates][order], dtype=np.float64)
    count = int(np.searchsorted(mass, top_p, side="left")) + 1
    return np.sort(candidates[order[:count]])


def _not_numbers(values: torch.Tensor, positions: Sequence[int]) -> ValueError:
    bad = [p for p, v in zip(positions, values.tolist(), strict=True) if not np.isfinite(v)]
    return ValueError(f"the target's logits are not finite at position {bad[0]}")
