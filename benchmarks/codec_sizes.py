"""Codecs on the real target's hidden states: bytes, error, and what they do to its next token.

Prompts in the target's own chat template, its system prompt included, 5 taps and last, bfloat16.
Every sample of such a corpus begins with the same rows, which a shard keeps once; so sizes are
measured twice, as they are and without those rows, and the larger one counts.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.nn import functional as F

from paceline.features.codec import Codec
from paceline.features.shard import Shard, write_shard
from paceline.recipe.schema import TargetRecipe
from paceline.target.load import Target, load_target
from paceline.target.taps import default_taps
from paceline.types import Features, TokenBatch

CACHE = Path(__file__).resolve().parents[1] / ".cache"
PROMPTS = ("arena_hard_v2", "ifeval", "ifbench", "mt_bench")
SHORTEST, LONGEST = 100, 320
TAPS = 5
MOST_BYTES: dict[Codec, float] = {"planes": 0.68, "int8o": 0.53}
MOST_KL = 3e-4
_BATCH = 4
_CHUNK = 256


@dataclass(frozen=True)
class Sizes:
    """What a codec makes of some features."""

    ratio: float
    """Bytes of its shard file over those of the one without a codec."""

    error: float
    """Mean over tokens and layers of the relative L2 error of a hidden state."""

    kl: float
    """Mean KL divergence of the next token's distribution, from `last` as it is to as decoded."""

    top1: float
    """Share of tokens whose most likely next one stays."""

    encode: float
    """MB of bfloat16 states per CPU second, writing and reading back included."""

    decode: float


def measure() -> list[dict[str, Any]]:
    """A line for the bytes of each codec, and one for int8o's divergence."""
    if not (CACHE / "smollm2").is_dir():
        names = [*(f"codec_{codec}_bytes" for codec in MOST_BYTES), "codec_int8o_kl"]
        return [_line(name, None, "", None, "run make fetch first") for name in names]
    torch.set_num_threads(1)
    target = load_target(TargetRecipe(path=str(CACHE / "smollm2")))
    chat = captured(target, samples=48)
    apart = without_shared_rows(chat)
    lines = []
    for codec, most in MOST_BYTES.items():
        whole = coded(chat, target, codec, every=4)
        ratio = coded(apart, target, codec, every=64).ratio
        how = (
            f"shard files of {chat.taps.shape[0]} tokens of {len(chat.tokens)} chat-formatted "
            f"prompts, {TAPS} taps and last, over those without a codec: {whole.ratio:.3f} as they "
            f"are, {ratio:.3f} ({16 * ratio:.2f} bits a value) without the rows that samples "
            f"share; relative error {whole.error:.2%}, KL {whole.kl:.1e}, top-1 kept "
            f"{whole.top1:.2%}; {whole.encode:.0f} MB/s written and read back, "
            f"{whole.decode:.0f} MB/s decoded, per core in CPU time"
        )
        larger = max(ratio, whole.ratio)
        lines.append(_line(f"codec_{codec}_bytes", larger, "of bfloat16's bytes", most, how))
        if codec == "int8o":
            lines.append(_line("codec_int8o_kl", whole.kl, "nats", MOST_KL, how))
    return lines


def captured(target: Target, *, samples: int) -> Features:
    """Features of prompts in the target's template, bfloat16; a function of `samples` alone."""
    rows = sorted(_rows(target, samples), key=len, reverse=True)
    taps = default_taps(target.spec.num_layers, TAPS)
    batches = [_batch(rows[at : at + _BATCH], at) for at in range(0, len(rows), _BATCH)]
    found = [target.capture(batch, taps, last=True) for batch in batches]
    return Features(
        tokens=_batch(rows, 0),
        taps=torch.cat([features.taps.bfloat16() for features in found]),
        last=torch.cat([_last(features).bfloat16() for features in found]),
        layer_ids=taps,
    )


def without_shared_rows(features: Features) -> Features:
    """The same samples without the rows of their common beginning."""
    offsets, ids = features.tokens.offsets.tolist(), features.tokens.input_ids
    shortest = min(features.tokens.lengths)
    heads = torch.stack([ids[at : at + shortest] for at in offsets[:-1]])
    # Where two samples agree further than all do, both lose those rows.
    common = max(
        int((heads[n] == heads[m]).long().cumprod(0).sum())
        for n in range(len(heads))
        for m in range(n)
    )
    keep = torch.cat([torch.arange(start + common, end) for start, end in pairwise(offsets)])
    lengths = [length - common for length in features.tokens.lengths]
    return Features(
        tokens=TokenBatch(
            input_ids=ids[keep],
            loss_mask=features.tokens.loss_mask[keep],
            offsets=torch.tensor([0, *lengths]).cumsum(0),
            sample_ids=features.tokens.sample_ids,
        ),
        taps=features.taps[keep],
        last=_last(features)[keep],
        layer_ids=features.layer_ids,
    )


def coded(features: Features, target: Target, codec: Codec, *, every: int) -> Sizes:
    """Write and read a shard; the next token is looked at in every `every`-th row."""
    with TemporaryDirectory() as name:
        plain = write_shard(Path(name) / "plain", features, fingerprint="f" * 32)
        path = Path(name) / codec
        started = time.process_time()
        stat = write_shard(path, features, fingerprint="f" * 32, codec=codec)
        written = time.process_time()
        found = Shard(path).features
        decoded = time.process_time()
    kl, top1 = _next_tokens(target, _last(features)[::every], _last(found)[::every])
    return Sizes(
        ratio=stat.size / plain.size,
        error=_error(found, features),
        kl=kl,
        top1=top1,
        encode=features.num_bytes / 1e6 / (written - started),
        decode=features.num_bytes / 1e6 / (decoded - written),
    )


def _rows(target: Target, samples: int) -> list[list[int]]:
    rows: list[list[int]] = []
    for prompts in zip(*(_prompts(name) for name in PROMPTS), strict=False):
        for messages in prompts:
            ids = target.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
            row = list(ids["input_ids"])
            if SHORTEST <= len(row) <= LONGEST and len(rows) < samples:
                rows.append(row)
    return rows


def _prompts(name: str) -> Iterator[list[dict[str, str]]]:
    for line in (CACHE / "prompts" / f"{name}.jsonl").read_text().splitlines():
        yield json.loads(line)["messages"]


def _batch(rows: list[list[int]], first: int) -> TokenBatch:
    ids = torch.tensor([i for row in rows for i in row])
    return TokenBatch(
        input_ids=ids,
        loss_mask=torch.ones(len(ids), dtype=torch.bool),
        offsets=torch.tensor([0, *map(len, rows)]).cumsum(0),
        sample_ids=tuple(f"{first + n:032x}" for n in range(len(rows))),
    )


def _error(found: Features, wanted: Features) -> float:
    errors = []
    for one, other in ((found.taps, wanted.taps), (_last(found), _last(wanted))):
        exact = other.float()
        errors.append(((one.float() - exact).norm(dim=-1) / exact.norm(dim=-1)).mean(0).reshape(-1))
    return float(torch.cat(errors).mean())


def _next_tokens(target: Target, exact: torch.Tensor, found: torch.Tensor) -> tuple[float, float]:
    kl = kept = 0.0
    for at in range(0, len(exact), _CHUNK):
        pair = (exact[at : at + _CHUNK].float(), found[at : at + _CHUNK].float())
        wanted, given = (F.log_softmax(target.head.logits(last), -1) for last in pair)
        kl += float((wanted.exp() * (wanted - given)).sum())
        kept += int((wanted.argmax(-1) == given.argmax(-1)).sum())
    return kl / len(exact), kept / len(exact)


def _last(features: Features) -> torch.Tensor:
    assert features.last is not None
    return features.last


def _line(
    name: str, value: float | None, unit: str, most: float | None, how: str
) -> dict[str, Any]:
    return {
        "name": name,
        "value": None if value is None else float(f"{value:.4g}"),
        "unit": unit,
        "target": most,
        "ok": value is not None and most is not None and value <= most,
        "how": how,
    }


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
