"""Trainings in which targets compute while drafters train, and their workers' killer."""

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from drafting import TAPS, load_tiny_target
from paceline.extract import stage as extract_stage
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import (
    CorpusRecipe,
    DrafterRecipe,
    ExtractRecipe,
    Recipe,
    RegenerateRecipe,
    TargetRecipe,
    TrainRecipe,
)
from paceline.target.load import Target
from paceline.train import loop
from paceline.train import stage as train_stage
from paceline.types.sample import Sample, Split, encode_sample
from training_runs import events

TARGETS = ("cpu:0", "cpu:1", "cpu:2")
DRAFTERS = ("cpu:0", "cpu:1")


def toy_training(target: Target, folder: Path, **train: object) -> tuple[Recipe, RunDir]:
    """A recipe and a corpus for it: 24 samples, 4 of them validation."""
    recipe = Recipe(
        target=TargetRecipe(path=str(target.folder)),
        corpus=CorpusRecipe(max_length=64),
        regenerate=RegenerateRecipe(enabled=False),
        extract=ExtractRecipe(taps=TAPS, batch_tokens=256, dtype="float32"),
        drafter=DrafterRecipe(layers=1, block_size=4),
        train=TrainRecipe(
            epochs=2.0,
            anchors=8,
            gamma=4.0,
            batch_samples=3,
            micro_batch_tokens=96,
            learning_rate=1e-3,
            evaluations=3,
            eval_samples=4,
            threads=1,
        ),
    )
    run_dir = RunDir(folder)
    run_dir.corpus.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    with run_dir.prepared.open("wb") as file:
        for number in range(24):
            length = int(torch.randint(16, 40, (1,), generator=generator))
            ids = torch.randint(0, 256, (length,), generator=generator).tolist()
            file.write(
                encode_sample(
                    Sample(
                        sample_id=f"{number:032x}",
                        prompt_id=f"{number:032x}",
                        source="toy",
                        split=Split.VALIDATION if number % 6 == 5 else Split.TRAIN,
                        messages=[],
                        input_ids=ids,
                        loss_spans=[(6, length)],
                    )
                )
            )
    return replace(recipe, train=replace(recipe.train, **train)), run_dir


@contextmanager
def consumption() -> Iterator[Counter[str]]:
    """How often each sample is consumed inside, as the loop reports it."""
    consumed: Counter[str] = Counter()
    original = loop.Trainer._report

    def report(self, result, *arguments):
        consumed.update(result.sample_ids)
        original(self, result, *arguments)

    loop.Trainer._report = report
    try:
        yield consumed
    finally:
        loop.Trainer._report = original


def children() -> set[int]:
    """Every process below this one."""
    return {p.pid for p in psutil.Process().children(recursive=True)}


@contextmanager
def killing(run: RunDir, times: int, workers: int, seed: int) -> Iterator[list[str]]:
    """Kill one of the workers now and then, once all have begun, until so many were killed."""
    chance, over = random.Random(seed), threading.Event()
    killed: list[str] = []
    dead: set[int] = set()

    def kill() -> None:
        while not over.is_set() and len(killed) < times:
            time.sleep(chance.uniform(0.05, 0.6))
            if not (run.events / "train.jsonl").exists():
                continue
            alive = {
                event["name"]: event["worker_pid"]
                for event in events(run, "worker")
                if event["what"] in ("started", "restarted")
            }
            if len(alive) < workers:
                continue
            name = chance.choice(sorted(alive))
            pid = alive[name]
            with suppress(ProcessLookupError):
                if pid not in dead:
                    os.kill(pid, signal.SIGKILL)
                    killed.append(name)
            dead.add(pid)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()


@dataclass
class OnlineKills:
    """What the kills did."""

    killed: list[str]
    samples: int
    findings: list[str]


def killed_online_training(folder: Path, *, kills: int, epochs: int, seed: int) -> OnlineKills:
    """Of 3 targets and 2 drafters any one is killed, so often; every sample has to count once."""
    recipe, run = toy_training(
        load_tiny_target(folder),
        folder / "run",
        online=True,
        target_devices=TARGETS,
        drafter_devices=DRAFTERS,
        sync_every=4,
        epochs=float(epochs),
        evaluations=2,
    )
    extract_stage.run(recipe, run)
    before = children()
    workers = len(TARGETS) + len(DRAFTERS)
    with consumption() as consumed, killing(run, kills, workers, seed) as killed:
        report = train_stage.run(recipe, run)
    found = [
        f"sample {key} counts {times} times in {epochs} epochs"
        for key, times in sorted(consumed.items())
        if times != epochs
    ]
    if len(consumed) != 20:
        found.append(f"{len(consumed)} of 20 samples were consumed")
    if report.numbers["samples"] != 20 * epochs:
        found.append(f"the training ended at {report.numbers['samples']} samples")
    if len(killed) < kills:
        found.append(f"{len(killed)} of {kills} kills were made before the end")
    found += [_left(pid, run) for pid in sorted(children() - before)]
    found += [f"{p} is left" for p in Path("/dev/shm").glob("*paceline*")]
    return OnlineKills(killed, report.numbers["samples"], found)


def _left(pid: int, run: RunDir) -> str:
    names = {event["worker_pid"]: event["name"] for event in events(run, "worker")}
    return f"process {pid} ({names.get(pid, 'no worker')}) is left"
