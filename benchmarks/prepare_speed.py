"""`paceline prepare` beside one template rendering and one encoding of the same rows.

The rows are synthetic ShareGPT conversations; the target's tokenizer is the demo's (`make fetch`).
The plain side does, in as many processes, what nobody can do without: decode the row, render the
conversation once with the tokenizer's own template, encode the text once. No masks, no checks, no
ids, nothing written.
"""

import json
import os
import random
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.corpus.stage import run
from paceline.flow.stream import map_stream
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import (
    CorpusRecipe,
    Recipe,
    RegenerateRecipe,
    SourceRecipe,
    TargetRecipe,
)

TARGET = Path(".cache/smollm2")
WORKERS = 2
CHUNK = 64

RATE_TARGET = 0.6
SPEED_UP_TARGET = 1.7
MEMORY_TARGET = 600.0

_CONSONANTS, _VOWELS = "bdfgklmnprstvw", "aeiou"


def write_rows(path: Path, count: int, seed: int = 0) -> None:
    """Conversations of one to three questions and answers, about 500 tokens each."""
    rng = random.Random(seed)
    syllables = [consonant + vowel for consonant in _CONSONANTS for vowel in _VOWELS]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(20_000)]
    weights = [1 / rank for rank in range(1, len(words) + 1)]
    # Drawn once and cut out of: choosing words anew would take longer than what is measured.
    pool = rng.choices(words, weights, k=200_000)

    def text(low: int, high: int) -> str:
        start = rng.randrange(len(pool) - high)
        return " ".join(pool[start : start + rng.randint(low, high)]).capitalize() + "."

    with path.open("w") as file:
        for number in range(count):
            turns = []
            for _ in range(rng.choice((1, 2, 2, 3))):
                turns.append({"from": "human", "value": f"{number} {text(5, 60)}"})
                answer = "\n\n".join(text(15, 70) for _ in range(rng.randint(1, 4)))
                turns.append({"from": "gpt", "value": answer})
            file.write(json.dumps({"conversations": turns}) + "\n")


def plain(target: str) -> Callable[[tuple[bytes, ...]], int]:
    """Set a process up: what renders and encodes a chunk of rows, and counts their tokens."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(target, local_files_only=True)
    roles = {"human": "user", "gpt": "assistant"}

    def tokens(chunk: tuple[bytes, ...]) -> int:
        count = 0
        for raw in chunk:
            turns = json.loads(raw)["conversations"]
            messages = [{"role": roles[t["from"]], "content": t["value"]} for t in turns]
            text = tokenizer.apply_chat_template(messages, tokenize=False)
            count += len(tokenizer.encode(text, add_special_tokens=False))
        return count

    return tokens


def _chunks(path: Path) -> Iterator[tuple[bytes, ...]]:
    with path.open("rb") as file:
        chunk: list[bytes] = []
        for line in file:
            chunk.append(line)
            if len(chunk) == CHUNK:
                yield tuple(chunk)
                chunk = []
        if chunk:
            yield tuple(chunk)


def _plain(path: Path, workers: int) -> tuple[int, float]:
    start = time.perf_counter()
    counts = map_stream(
        plain, str(TARGET.absolute()), _chunks(path), workers=workers, name=lambda _: "a chunk"
    )
    return sum(counts), time.perf_counter() - start


def _prepare_seconds(recipe: Recipe, root: Path, workers: int) -> float:
    recipe = replace(recipe, corpus=replace(recipe.corpus, workers=workers))
    start = time.perf_counter()
    run(recipe, RunDir(root))
    return time.perf_counter() - start


def measure(rows: str = "100000", fewer: str = "20000") -> list[dict[str, Any]]:
    """Three measurements: throughput, what a second process gives, memory."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with tempfile.TemporaryDirectory() as folder:
        data, part = Path(folder) / "rows.jsonl", Path(folder) / "part.jsonl"
        write_rows(data, int(rows))
        with data.open("rb") as file, part.open("wb") as out:
            out.writelines(line for _, line in zip(range(int(fewer)), file, strict=False))

        def recipe(path: Path) -> Recipe:
            return Recipe(
                target=TargetRecipe(path=str(TARGET.absolute())),
                corpus=CorpusRecipe(sources=(SourceRecipe(path=str(path)),), max_length=8192),
                regenerate=RegenerateRecipe(enabled=False),
            )

        tokens, bare = _plain(data, WORKERS)
        ours = _prepare_seconds(recipe(data), Path(folder) / "all", WORKERS)
        again = _prepare_seconds(recipe(data), Path(folder) / "all", WORKERS)
        one = _prepare_seconds(recipe(part), Path(folder) / "one", 1)
        two = _prepare_seconds(recipe(part), Path(folder) / "two", 2)
        same = [RunDir(Path(folder) / name).prepared.read_bytes() for name in ("one", "two")]
    # Kilobytes on Linux.
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rate, speed_up, peak = bare / ours, one / two, max(children, own)
    return [
        {
            "name": "prepare_speed",
            "value": round(rate, 3),
            "unit": "throughput of rendering and encoding alone",
            "target": RATE_TARGET,
            "ok": rate >= RATE_TARGET,
            "how": f"{rows} rows, {tokens:,} tokens, {WORKERS} processes: prepare {ours:.1f} s, "
            f"rendering and encoding {bare:.1f} s; again, with nothing to do, {again:.1f} s",
        },
        {
            "name": "prepare_processes",
            "value": round(speed_up, 3),
            "unit": "times as fast with two processes",
            "target": SPEED_UP_TARGET,
            "ok": speed_up >= SPEED_UP_TARGET and same[0] == same[1],
            "how": f"{fewer} rows: {one:.1f} s with one, {two:.1f} s with two, start included; "
            f"the same bytes: {same[0] == same[1]}",
        },
        {
            "name": "prepare_memory",
            "value": round(peak, 1),
            "unit": "MiB, the largest process",
            "target": MEMORY_TARGET,
            "ok": peak <= MEMORY_TARGET,
            "how": f"{rows} rows: this process {own:.0f}, those that tokenise {children:.0f}",
        },
    ]
