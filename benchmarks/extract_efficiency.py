"""What extraction costs beside the target's own work: `measure()`.

Both sides run in turns on the same batches of one randomly initialised model of SmolLM2-135M's
shape, on one thread, and are compared by CPU time: the bare forward pass up to the last layer
that is needed, with nothing kept, against the whole of a worker's unit (reading the rows, capture,
conversion, check, shard written and read back).
"""

import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.extract.rows import index_rows, read_rows
from paceline.extract.worker import Job, UnitTask, open_worker
from paceline.features.plan import Unit, plan_units
from paceline.recipe.schema import TargetRecipe
from paceline.target.load import Target, load_target
from paceline.target.taps import default_taps
from paceline.types import Sample, Split
from paceline.types.sample import encode_sample

TARGET = 0.90
_ROUNDS = 5
_SAMPLES = 8
_BATCH_TOKENS = 1024
_VOCAB, _LAYERS, _HIDDEN = 49152, 30, 576


def measure() -> dict[str, Any]:
    """Tokens per CPU second of extraction over those of the bare forward pass."""
    with tempfile.TemporaryDirectory() as name, _one_thread():
        folder = Path(name)
        _save_model(folder / "target")
        corpus = folder / "corpus.jsonl"
        corpus.write_bytes(b"".join(map(encode_sample, _samples())))
        ratios = _ratios(folder, corpus)
    ratio = statistics.median(ratios)
    return {
        "name": "extract_efficiency",
        "value": round(ratio, 4),
        "unit": "ratio",
        "target": TARGET,
        "ok": ratio >= TARGET,
        "how": (
            f"median of {_ROUNDS} rounds ({min(ratios):.3f} to {max(ratios):.3f}) of CPU time of "
            "the bare forward pass up to the last tapped layer over that of capture, conversion to "
            "bfloat16, shard writing and verification of the same batches; one thread, fp32, "
            "random Llama of SmolLM2-135M's shape, 3 taps"
        ),
    }


def _ratios(folder: Path, corpus: Path) -> list[float]:
    recipe = TargetRecipe(path=str(folder / "target"))
    layer_ids = default_taps(_LAYERS, 3)
    rows = index_rows(corpus, vocab_size=_VOCAB, max_position=2048)
    (unit,) = plan_units(
        rows.lengths, bytes_per_token=1, shard_bytes=1 << 30, batch_tokens=_BATCH_TOKENS
    )
    job = Job(
        target=recipe,
        corpus=corpus,
        store=folder / "features",
        layer_ids=layer_ids,
        last=False,
        dtype="bfloat16",
        fingerprint="",
        check_positions=rows.positions[:1],
    )
    task = UnitTask(
        index=0,
        key=unit.key,
        positions=tuple(rows.positions[s] for s in unit.samples),
        batches=tuple(map(len, unit.batches)),
    )
    extract = open_worker(job)
    target = load_target(recipe)
    batches = _rectangles(read_rows(corpus, rows.positions), unit)

    def bare() -> float:
        started = time.process_time()
        _forward(target, batches, layer_ids[-1])
        return time.process_time() - started

    def whole() -> float:
        started = time.process_time()
        extract(task)
        return time.process_time() - started

    bare()
    whole()
    # Each extraction is compared with the passes right before and after it: a machine that others
    # use changes its pace over seconds.
    ratios = []
    before = bare()
    for _ in range(_ROUNDS):
        cost = whole()
        after = bare()
        ratios.append((before + after) / 2 / cost)
        before = after
    return ratios


@torch.no_grad()
def _forward(
    target: Target, batches: list[tuple[torch.Tensor, torch.Tensor | None]], layer: int
) -> None:
    """Run the layers up to `layer` and keep nothing."""
    decoder: Any = target.decoder
    every = decoder.layers
    decoder.layers = every[: layer + 1]
    try:
        for ids, mask in batches:
            decoder(input_ids=ids, attention_mask=mask, use_cache=False)
    finally:
        decoder.layers = every


def _rectangles(
    samples: list[Sample], unit: Unit
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    made = []
    for batch in unit.batches:
        rows = [samples[s].input_ids for s in batch]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        made.append((ids, None if bool(mask.all()) else mask))
    return made


def _samples() -> list[Sample]:
    rng = random.Random(0)
    return [
        Sample(
            sample_id=f"{n:032x}",
            prompt_id=f"{n:032x}",
            source="made",
            split=Split.TRAIN,
            messages=[],
            input_ids=[rng.randrange(_VOCAB) for _ in range(rng.randint(120, 500))],
            loss_spans=[(50, 100)],
        )
        for n in range(_SAMPLES)
    ]


def _save_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_VOCAB,
        num_hidden_layers=_LAYERS,
        hidden_size=_HIDDEN,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
