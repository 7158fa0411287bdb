"""Trainings whose memory is watched, each in a process of its own; and drafters without memory."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from checkout import ROOT
from drafting import TAPS, load_tiny_target, tiny_drafter
from feature_samples import random_features
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
from paceline.target.head import TargetHead
from paceline.train import averaged, learner, loop, stage
from paceline.train.batch import anchor_sample
from paceline.train.drafter_worker import open_drafter
from paceline.train.learner import Learner
from paceline.train.memory import Demand, Meter, anonymous_bytes, total
from paceline.types.sample import Sample, Split, encode_sample

HIDDEN = 128


def run_apart(function: str, *arguments: Any) -> Any:
    """What a function of this module returns, called with JSON values in a process of its own."""
    code = (
        f"import json, sys, memory_runs\n"
        f"print(json.dumps(memory_runs.{function}(*json.loads(sys.argv[1]))))"
    )
    paths = ":".join((str(ROOT / "tests"), str(ROOT / "src")))
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(arguments)],
        env={"PYTHONPATH": paths, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def watched_training(folder: str, changes: dict[str, Any], leak: bool) -> dict[str, Any]:
    """Anonymous bytes of each process of a training, by name, at the end of each round.

    60 samples of about 100 tokens an epoch, 3 epochs. `leak` has the training forget nothing that
    it has learned from.
    """
    recipe, run = _world(Path(folder), changes)
    seen: dict[str, list[int]] = {}
    samples: list[int] = []
    advance = loop.Trainer._advance

    def watching(self: Any, *arguments: Any) -> None:
        advance(self, *arguments)
        samples.append(self.state.samples)
        pids = {f"drafter {n}": pid for n, pid in enumerate(getattr(self._crew, "pids", ()))}
        for name, pid in {"training": "self", **pids}.items():
            seen.setdefault(name, []).append(anonymous_bytes(pid))

    setattr(loop.Trainer, "_advance", watching)  # noqa: B010
    if leak:
        _leak()
    report = stage.run(recipe, run)
    return {"samples": samples, "bytes": seen, "numbers": report.numbers, "lines": report.lines}


def _leak() -> None:
    kept: list[Any] = []
    accumulate, go = learner.Learner._accumulate, averaged.Outer.go

    def remembering(self: Any, group: Any, *arguments: Any) -> None:
        kept.append([sample.features.taps.clone() for sample in group])
        accumulate(self, group, *arguments)

    def remembering_all(self: Any, model: Any, shares: Any) -> None:
        kept.append([tensor.clone() for share in shares for tensor in share.weights.values()])
        go(self, model, shares)

    setattr(learner.Learner, "_accumulate", remembering)  # noqa: B010
    setattr(averaged.Outer, "go", remembering_all)  # noqa: B010


def _world(root: Path, changes: dict[str, Any]) -> tuple[Recipe, RunDir]:
    root.mkdir(exist_ok=True)
    target = load_tiny_target(root, hidden=HIDDEN)
    recipe = Recipe(
        target=TargetRecipe(path=str(target.folder)),
        corpus=CorpusRecipe(max_length=128),
        regenerate=RegenerateRecipe(enabled=False),
        extract=ExtractRecipe(taps=TAPS, batch_tokens=512, dtype="float32"),
        drafter=DrafterRecipe(layers=1, block_size=4),
        train=replace(
            TrainRecipe(
                epochs=3.0,
                anchors=8,
                batch_samples=2,
                evaluations=3,
                eval_samples=4,
                threads=1,
            ),
            **{k: tuple(v) if isinstance(v, list) else v for k, v in changes.items()},
        ),
    )
    run = RunDir(root / "run")
    run.corpus.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    with run.prepared.open("wb") as file:
        for number in range(64):
            length = int(torch.randint(90, 110, (1,), generator=generator))
            sample = Sample(
                sample_id=f"{number:032x}",
                prompt_id=f"{number:032x}",
                source="toy",
                split=Split.VALIDATION if number < 4 else Split.TRAIN,
                messages=[],
                input_ids=torch.randint(0, 256, (length,), generator=generator).tolist(),
                loss_spans=[(6, length)],
            )
            file.write(encode_sample(sample))
    extract_stage.run(recipe, run)
    return recipe, run


def measured_steps(folder: str, hidden: int, layers: int, length: int) -> dict[str, int]:
    """Predicted and measured bytes of three steps of a drafter, the empty process left out."""
    torch.set_num_threads(1)
    target = load_tiny_target(Path(folder), hidden=hidden, layers=4)
    drafter = tiny_drafter(target, layers=layers, block_size=8)
    recipe = TrainRecipe(device="cpu", anchors=64, micro_batch_tokens=length + 64 * 8)
    head = TargetHead.load(target.folder, dtype=torch.float32, device="cpu")
    # What is there before: the whole target, and the weights that are counted below.
    base = anonymous_bytes() - sum(4 * p.numel() for p in drafter.parameters())
    base -= 4 * (head.embedding.numel() + head.lm_head.numel())
    meter = Meter(torch.device("cpu"))
    learning = Learner(recipe, drafter, head, meter)
    features = random_features(
        [length], layer_ids=TAPS, hidden=hidden, last=False, dtype=torch.float32
    )
    features.tokens.input_ids.remainder_(256)
    features.tokens.loss_mask.fill_(True)
    sample = anchor_sample(features, count=64, seed=0, epoch=0)
    for _ in range(3):
        learning.learn([sample], 1e-4, 0.5)
    parts = Demand(longest=length, is_tied=False).parts(recipe, drafter.config, "cpu")
    steps = [part for part in parts if part.name not in ("process", "a checkpoint's bytes")]
    return {"predicted": total(steps), "measured": meter.use().peak - base}


def open_cramped_drafter(job: Any, context: Any) -> Any:
    """A drafter's setup; drafter 1 has no memory for its third micro-batch."""
    opened = open_drafter(job, context)
    if context.number == 1:
        fail_at(learner, "block_loss", 3)
    return opened


def open_drafter_without_room(job: Any, context: Any) -> Any:
    """A drafter's setup that finds its device full."""
    fail_at(TargetHead, "load", 1)
    return open_drafter(job, context)


def fail_at(where: Any, name: str, number: int) -> None:
    """Have the `number`-th call find a device full, for good."""
    setattr(where, name, failing(getattr(where, name), number))


def failing(function: Any, number: int) -> Any:
    """A function whose `number`-th call finds a device full."""
    calls = 0

    def call(*arguments: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
                "79.15 GiB of which 1.10 GiB is free. Process 4711 has 60.00 GiB memory in use. If "
                "reserved but unallocated memory is large try setting something."
            )
        return function(*arguments, **more)

    return call
