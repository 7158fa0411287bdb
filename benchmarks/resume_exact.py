"""Trainings stopped at random steps and taken up again, beside one that was not: `measure()`.

Every training runs in a process of its own, forked from one that has only imported things. It is
stopped by a real signal: SIGTERM at the end of a step, which leaves a checkpoint of that step, or
SIGKILL in the middle of one, which leaves whatever the last evaluation wrote. Another process goes
on from there, and its steps and last checkpoint are compared bit for bit.
"""

import json
import logging
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.durable.errors import Interrupted
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
from paceline.train import learner
from paceline.train import stage as train_stage
from paceline.train.checkpoint import FILES, STATE, newest_checkpoint, read_state
from paceline.types import Sample, Split
from paceline.types.sample import encode_sample
from paceline.watch.events import EventWriter

TARGET = 20
_VOCAB, _SAMPLES, _VALIDATION = 300, 29, 4
_STEPS = 34
"""Of 3 samples; an epoch has 25, so that most stops lie inside one."""
_KILLED = 0.3
"""Share of the stops that are a SIGKILL."""
_CURVE = (
    "step", "samples", "tokens", "loss", "count", "learning_rate", "gradient_norm",
    "samples_digest",
)  # fmt: skip


@dataclass(frozen=True)
class _Stop:
    step: int
    kill: bool
    """SIGKILL in the middle of the next step, instead of SIGTERM at this one's end."""


def measure(stops: int = TARGET) -> dict[str, Any]:
    """How many of `stops` trainings end as the undisturbed one does."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = _recipe(folder / "target")
        world, straight = RunDir(folder / "world"), RunDir(folder / "straight")
        _in_a_process(folder, lambda: _prepare(recipe, world), 0)
        _new_run(world, straight)
        _in_a_process(folder, lambda: _train(recipe, straight, None), 0)
        steps = len(_steps(straight))
        if steps != _STEPS:
            raise AssertionError(f"{steps} steps instead of {_STEPS}")
        drawn = _draw(stops)
        differences = [_difference(folder, recipe, world, straight, stop) for stop in drawn]
    equal = sum(not difference for difference in differences)
    killed = sum(stop.kill for stop in drawn)
    first = next(filter(None, differences), "")
    return {
        "name": "resume_exact",
        "value": equal,
        "unit": f"runs equal of {stops}",
        "target": stops,
        "ok": equal == stops,
        "how": f"{stops - killed} stops by SIGTERM at a step's end and {killed} by SIGKILL inside "
        f"one, at random among {_STEPS} steps of 3 micro-batches over 4 epochs; compared are "
        "weights, optimizer, generators, tau, and loss, rate and samples of each step"
        f"{f'; first difference: {first}' if first else ''}; {time.monotonic() - started:.0f} s",
    }


def _draw(stops: int) -> list[_Stop]:
    rng = random.Random(0)
    steps = rng.sample(range(1, _STEPS), stops)
    killed = set(rng.sample(steps, round(stops * _KILLED)))
    return [_Stop(step, step in killed) for step in steps]


def _difference(folder: Path, recipe: Recipe, world: RunDir, straight: RunDir, stop: _Stop) -> str:
    """What differs after this stop; empty where nothing does."""
    run = RunDir(folder / "stopped")
    _new_run(world, run)
    _in_a_process(
        folder,
        lambda: _train(recipe, run, stop),
        -signal.SIGKILL if stop.kill else Interrupted.exit_code,
    )
    left, _ = newest_checkpoint(run.checkpoints)
    stands_at = read_state(left).step if left else 0
    if stands_at > stop.step or (stands_at != stop.step and not stop.kill):
        return f"stopped at step {stop.step}, the checkpoint is of step {stands_at}"
    _in_a_process(folder, lambda: _train(recipe, run, None), 0)
    found = _what_differs(straight, run)
    shutil.rmtree(run.root)
    return f"after {stop}: {found}" if found else ""


def _what_differs(straight: RunDir, run: RunDir) -> str:
    curves = [_steps(straight), _steps(run)]
    if curves[0] != curves[1]:
        return "the steps"
    ends = [newest_checkpoint(r.checkpoints)[0] for r in (straight, run)]
    if ends[0] is None or ends[1] is None or ends[0].name != ends[1].name:
        return f"the last checkpoint, {ends[1]}"
    for name in set(FILES) - {STATE}:
        if (ends[0] / name).read_bytes() != (ends[1] / name).read_bytes():
            return name
    states = [read_state(end) for end in ends if end is not None]
    return "tau" if states[0].tau != states[1].tau or not states[0].tau else ""


def _steps(run: RunDir) -> dict[int, dict[str, Any]]:
    """Each step's event; those that were done twice have to agree with themselves."""
    found: dict[int, dict[str, Any]] = {}
    for line in (run.events / "train.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["kind"] == "step":
            fields = {key: event[key] for key in _CURVE}
            if found.setdefault(event["step"], fields) != fields:
                found[-event["step"]] = fields
    return found


def _train(recipe: Recipe, run: RunDir, stop: _Stop | None) -> None:
    if stop is not None:
        _arm(stop)
    train_stage.run(recipe, run)


def _arm(stop: _Stop) -> None:
    """Have this very process signal itself; it lives for one training only."""
    done = calls = 0

    class Writer(EventWriter):
        def emit(self, kind: Any, counts: Any = None, **fields: Any) -> None:
            nonlocal done, calls
            super().emit(kind, counts, **fields)
            if kind == "step":
                done, calls = fields["step"], 0
                if done == stop.step and not stop.kill:
                    os.kill(os.getpid(), signal.SIGTERM)

    original = learner.block_loss

    def block_loss(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        if stop.kill and done == stop.step and calls == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **keywords)

    train_stage.EventWriter = Writer
    learner.block_loss = block_loss


def _in_a_process(folder: Path, work: Callable[[], None], expected: int) -> None:
    """Run `work` in a fork; raises AssertionError unless it ends as expected."""
    log = folder / "log"
    child = os.fork()
    if child == 0:
        with log.open("w") as file:
            os.dup2(file.fileno(), 2)
        logging.disable(logging.CRITICAL)
        code = 1
        try:
            work()
            code = 0
        except Interrupted as error:
            code = error.exit_code
        except BaseException:  # noqa: BLE001 - a fork must end here, whatever happens
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code != expected:
        raise AssertionError(f"ended with {code} instead of {expected}: {log.read_text()[-800:]}")


def _new_run(world: RunDir, run: RunDir) -> None:
    run.root.mkdir()
    for name in ("corpus", "features"):
        (run.root / name).symlink_to(world.root / name)


def _prepare(recipe: Recipe, world: RunDir) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_VOCAB,
        num_hidden_layers=6,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(recipe.target.path)
    world.corpus.mkdir(parents=True)
    rng = random.Random(0)
    rows = (
        Sample(
            sample_id=f"{n:032x}",
            prompt_id=f"{n:032x}",
            source="made",
            split=Split.VALIDATION if n < _VALIDATION else Split.TRAIN,
            messages=[],
            input_ids=[rng.randrange(_VOCAB - 50) for _ in range(length)],
            loss_spans=[(6, length)],
        )
        for n, length in enumerate(rng.choices(range(16, 40), k=_SAMPLES))
    )
    world.prepared.write_bytes(b"".join(map(encode_sample, rows)))
    extract_stage.run(recipe, world)


def _recipe(target: Path) -> Recipe:
    return Recipe(
        target=TargetRecipe(path=str(target)),
        corpus=CorpusRecipe(max_length=64),
        regenerate=RegenerateRecipe(enabled=False),
        extract=ExtractRecipe(batch_tokens=256, num_taps=2),
        drafter=DrafterRecipe(layers=1, block_size=4),
        train=TrainRecipe(
            epochs=4.0,
            anchors=8,
            gamma=4.0,
            batch_samples=3,
            micro_batch_tokens=1,
            evaluations=5,
            eval_samples=2,
            eval_anchors=8,
            threads=1,
        ),
    )


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
