"""A prepared corpus and tiny targets for regenerate, and a function whose process is killed."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import torch
from transformers import AutoModelForCausalLM

from paceline.corpus.mask import Renderer
from paceline.corpus.regenerate import run
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import CorpusRecipe, Recipe, RegenerateRecipe, TargetRecipe
from paceline.rows.ids import prompt_id, sample_id
from paceline.target.chat import load_tokenizer
from paceline.types import Sample, Split
from paceline.types.sample import encode_sample
from tiny_models import tiny_model

ENDS = frozenset({257, *range(120, 140)})
"""Enough of 320 ids that random answers of up to 24 tokens end in both ways."""


def make_target(folder: Path, *, seed: int = 1) -> Path:
    """Two random layers; the generation config names all of ENDS."""
    tiny_model("llama", folder, seed=seed, layers=2)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": sorted(ENDS)}))
    return folder


def make_looping_target(folder: Path) -> Path:
    """Its layers add nothing, so a token decides the next one and greedy answers must circle."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model("llama", folder, layers=2))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.zero_()
    model.save_pretrained(folder)
    return folder


def make_readable_target(folder: Path, *, ends: bool = True) -> Path:
    """Says printable ASCII, and the end token where it `ends`: its texts are its tokens."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model("llama", folder, seed=3, layers=2))
    keep = [*range(32, 120), *([257] if ends else [])]
    with torch.no_grad():
        rows = model.lm_head.weight.clone()
        model.lm_head.weight.zero_()
        model.lm_head.weight[keep] = rows[keep]
        model.lm_head.weight[257] *= 1.3
    model.save_pretrained(folder)
    return folder


def make_recipe(target: Path, *, sampled: bool = True, **regenerate) -> Recipe:
    options = {
        "max_new_tokens": 24,
        "group_size": 4,
        "temperature": 2.0 if sampled else 0.0,
        "on_loop": "keep",
        "on_length": "keep",
        **regenerate,
    }
    return Recipe(
        target=TargetRecipe(path=str(target)),
        corpus=CorpusRecipe(max_length=96),
        regenerate=RegenerateRecipe(**options),
    )


def make_prepared(run_dir: RunDir, target: Path, *, count: int = 26, seed: int = 0) -> list[Sample]:
    """`count` prompts of unequal length; every fifth is held out, every seventh validates."""
    random = Random(seed)
    renderer = Renderer.of(load_tokenizer(str(target)), {}, target)
    samples = []
    for number in range(count):
        text = "".join(random.choice("abcdef ghij") for _ in range(random.randrange(3, 40)))
        messages = [{"role": "user", "content": f"{number} {text}"}]
        split = Split.TRAIN
        if number % 5 == 4:
            split = Split.HELDOUT
        elif number % 7 == 6:
            split = Split.VALIDATION
        samples.append(
            Sample(
                sample_id=sample_id(messages, None, renderer.identity),
                prompt_id=prompt_id(messages, None),
                source="test",
                split=split,
                messages=messages,
                input_ids=renderer.prompt(messages, None),
                loss_spans=[],
            )
        )
    run_dir.corpus.mkdir(parents=True)
    run_dir.prepared.write_bytes(b"".join(encode_sample(sample) for sample in samples))
    return samples


def with_workers(recipe: Recipe, workers: int) -> Recipe:
    return replace(recipe, target=replace(recipe.target, workers=workers))


def run_with_one_thread(recipe: Recipe, root: Path) -> None:
    torch.set_num_threads(1)
    run(recipe, RunDir(root))
