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
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.corpus.stage import run
from paceline.flow.stream import map_stream
from paceline.recipe.fingerprint import digest_file
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


@dataclass(frozen=True)
class _Run:
    """One `prepare` in a process of its own, so that its peak is nobody else's."""

    seconds: float
    """Of the stage; what Python and Paceline take to be imported is left out."""
    own: float
    """MiB at the peak."""
    largest: float
    """MiB of the largest process that tokenises; 0 where there is none."""

    @property
    def peak(self) -> float:
        return max(self.own, self.largest)


def _in_a_process(*order: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, *order], stdout=subprocess.PIPE, check=True, text=True
    )
    numbers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return numbers


def _prepare(data: Path, root: Path, workers: int, *, answers: bool = True) -> _Run:
    return _Run(**_in_a_process("prepare", str(data), str(root), str(workers), str(int(answers))))


def _plain(data: Path, workers: int) -> tuple[int, float]:
    numbers = _in_a_process("plain", str(data), str(workers))
    return numbers["tokens"], numbers["seconds"]


def _prepare_here(data: str, root: str, workers: str, answers: str) -> dict[str, float]:
    recipe = Recipe(
        target=TargetRecipe(path=str(TARGET.absolute())),
        corpus=CorpusRecipe(
            sources=(SourceRecipe(path=data),), max_length=8192, workers=int(workers)
        ),
        regenerate=RegenerateRecipe(enabled=answers == "0"),
    )
    start = time.perf_counter()
    run(recipe, RunDir(Path(root)))
    seconds = time.perf_counter() - start
    # Kilobytes on Linux.
    own, largest = (
        resource.getrusage(who).ru_maxrss / 1024
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return {"seconds": seconds, "own": own, "largest": largest}


def _plain_here(data: str, workers: str) -> dict[str, float]:
    start = time.perf_counter()
    counts = map_stream(
        plain,
        str(TARGET.absolute()),
        _chunks(Path(data)),
        workers=int(workers),
        name=lambda _: "a chunk",
    )
    return {"tokens": sum(counts), "seconds": time.perf_counter() - start}


def measure(rows: str = "100000", many: str = "1000000", rounds: str = "2") -> list[dict[str, Any]]:
    """Three measurements: throughput, what a second process gives, memory."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data, prompts = folder / "rows.jsonl", folder / "prompts.jsonl"
        write_rows(data, int(rows))
        with prompts.open("w") as out:
            out.writelines(f'{{"prompt": "What is {i} times {i}?"}}\n' for i in range(int(many)))
        # Alternating, and the best of each: the machine's speed changes from one minute to another.
        ours: dict[int, list[_Run]] = {1: [], WORKERS: []}
        bare: dict[int, list[float]] = {1: [], WORKERS: []}
        digests, tokens = set(), 0
        for number in range(int(rounds)):
            for workers in (WORKERS, 1):
                root = folder / f"{workers}-{number}"
                ours[workers].append(_prepare(data, root, workers))
                digests.add(digest_file(RunDir(root).prepared))
                tokens, seconds = _plain(data, workers)
                bare[workers].append(seconds)
        again = _prepare(data, folder / f"{WORKERS}-0", WORKERS)
        million = _prepare(prompts, folder / "many", WORKERS, answers=False)
    one, two = (min(run.seconds for run in ours[workers]) for workers in (1, WORKERS))
    rate, speed_up = min(bare[WORKERS]) / two, one / two
    beside = min(bare[1]) / min(bare[WORKERS])
    own, largest = (
        max(getattr(run, which) for run in ours[WORKERS]) for which in ("own", "largest")
    )
    peak = max(own, largest, million.peak)
    return [
        {
            "name": "prepare_speed",
            "value": round(rate, 3),
            "unit": "throughput of rendering and encoding alone",
            "target": RATE_TARGET,
            "ok": rate >= RATE_TARGET,
            "how": f"{rows} rows, {tokens:,} tokens, {WORKERS} processes, the best of {rounds}: "
            f"prepare {two:.1f} s, rendering and encoding {min(bare[WORKERS]):.1f} s; again, with "
            f"nothing to do, {again.seconds:.1f} s",
        },
        {
            "name": "prepare_processes",
            "value": round(speed_up, 3),
            "unit": "times as fast with two processes",
            "target": SPEED_UP_TARGET,
            "ok": speed_up >= SPEED_UP_TARGET and len(digests) == 1,
            "how": f"{rows} rows, the best of {rounds} alternating: {one:.1f} s with one, "
            f"{two:.1f} s with two, start included; rendering and encoding alone gain "
            f"{beside:.2f} times from a second process here; the same bytes: {len(digests) == 1}",
        },
        {
            "name": "prepare_memory",
            "value": round(peak, 1),
            "unit": "MiB, the largest process",
            "target": MEMORY_TARGET,
            "ok": peak <= MEMORY_TARGET,
            "how": f"{rows} rows: the first process {own:.0f}, those that tokenise {largest:.0f}; "
            f"{many} prompts: {million.own:.0f} and {million.largest:.0f}, "
            f"{million.seconds:.0f} s",
        },
    ]


def _main(what: str, *order: str) -> None:
    numbers = _prepare_here(*order) if what == "prepare" else _plain_here(*order)
    print(json.dumps(numbers))


if __name__ == "__main__":
    _main(*sys.argv[1:])
