"""What three drafters whose weights are averaged lose in τ beside one, on the same samples.

The toy task is a random walk over 64 tokens: each has one successor that follows it most of the
time, so the best chain is known, and a drafter has to learn the successors of successors as well.
The target is random: its hidden states say which tokens stand where, the answers are walks.

Both trainings begin with the same weights and take the same samples in the same order in steps of
the same size, each by the commands' own stages. With three drafters every one does a third of the
steps, in a process of its own, and all the weights are averaged after so many steps of each; so the
model has moved through a third as many steps in a row. The training is long enough for these to
suffice: after 3,600 samples (`epochs=6`) one drafter is done, and three are not.
"""

import resource
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

# The toy target is the tests' own.
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from paceline.extract import stage as extract
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
from paceline.train import stage as train
from paceline.types.sample import Sample, Split, encode_sample
from tiny_models import tiny_model

TOKENS, FOLLOWS = 64, 0.85
TRAIN, VALIDATION, LENGTH, PROMPT = 600, 64, 48, 8
BLOCK, EPOCHS, BATCH, SYNC_EVERY = 4, 15.0, 4, 10
DRAFTERS = 3
METHODS = ("chain", "ddtree-16", "ddtree-64")
TARGET_RATIO = 0.98


def measure(epochs: str = f"{EPOCHS:g}") -> dict[str, Any]:
    """The least ratio of simulated τ, three drafters to one, over the chain and two trees.

    `epochs` is the length of either training.
    """
    torch.set_num_threads(1)
    started = _cpu_seconds()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        recipe = _recipe(root, float(epochs))
        run = RunDir(root / "features")
        _write_walks(run)
        extract.run(recipe, run)
        taus, first = {}, {}
        for drafters in (1, DRAFTERS):
            own = RunDir(root / f"drafters-{drafters}")
            own.root.mkdir()
            for link, folder in ((own.corpus, run.corpus), (own.features, run.features)):
                link.symlink_to(folder)
            devices = tuple(f"cpu:{number}" for number in range(drafters))
            asked = replace(recipe, train=replace(recipe.train, drafter_devices=devices))
            numbers = train.run(asked, own).numbers
            taus[drafters], first = numbers["simulated_tau"], numbers["first_tau"]
    ratios = {method: taus[DRAFTERS][method] / taus[1][method] for method in METHODS}
    best = sum(FOLLOWS**depth for depth in range(BLOCK))
    told = ", ".join(
        f"{m} {first[m]:.3f} untrained, {taus[1][m]:.3f} of one, {taus[DRAFTERS][m]:.3f} of "
        f"{DRAFTERS}"
        for m in METHODS
    )
    samples = round(float(epochs) * TRAIN)
    return {
        "name": "averaging_tau",
        "value": round(min(ratios.values()), 4),
        "unit": f"of the τ of one drafter, with {DRAFTERS} at equal samples",
        "target": TARGET_RATIO,
        "ok": min(ratios.values()) >= TARGET_RATIO,
        "how": f"simulated τ on {VALIDATION} validation walks at the end: {told}; the best chain "
        f"there can be has about {best:.2f}; {samples} samples for either in steps of {BATCH}, so "
        f"{samples // BATCH} steps of one drafter, {samples // BATCH // DRAFTERS} of each of "
        f"{DRAFTERS}, averaged after every {SYNC_EVERY} of each; "
        f"{_cpu_seconds() - started:.0f} CPU-seconds",
    }


def _recipe(root: Path, epochs: float) -> Recipe:
    target = tiny_model("llama", root / "target", hidden=64)
    return Recipe(
        target=TargetRecipe(path=str(target)),
        corpus=CorpusRecipe(max_length=LENGTH),
        regenerate=RegenerateRecipe(enabled=False),
        extract=ExtractRecipe(isolate=False),
        drafter=DrafterRecipe(layers=2, block_size=BLOCK),
        train=TrainRecipe(
            epochs=epochs,
            anchors=16,
            gamma=2.0,
            batch_samples=BATCH,
            learning_rate=4e-3,
            evaluations=1,
            eval_samples=VALIDATION,
            threads=1,
            sync_every=SYNC_EVERY,
        ),
    )


def _write_walks(run: RunDir) -> None:
    """A corpus of walks, as `prepare` would leave it."""
    generator = torch.Generator().manual_seed(0)
    successor = torch.randperm(TOKENS, generator=generator)
    run.corpus.mkdir(parents=True)
    with run.prepared.open("wb") as file:
        for number in range(TRAIN + VALIDATION):
            ids = torch.randint(TOKENS, (LENGTH,), generator=generator)
            follows = torch.rand(LENGTH, generator=generator) < FOLLOWS
            for place in range(1, LENGTH):
                if follows[place]:
                    ids[place] = successor[ids[place - 1]]
            sample = Sample(
                sample_id=f"{number:032x}",
                prompt_id=f"{number:032x}",
                source="walks",
                split=Split.TRAIN if number < TRAIN else Split.VALIDATION,
                messages=[],
                input_ids=ids.tolist(),
                loss_spans=[(PROMPT, LENGTH)],
            )
            file.write(encode_sample(sample))


def _cpu_seconds() -> float:
    """Of this process and of those that it started and that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
