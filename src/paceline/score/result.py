"""`score/result.json`: every number with what it was made of, and how to measure it again."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers

import paceline
from paceline.decode.simulate import CHAIN, method_name
from paceline.recipe.schema import Recipe
from paceline.recipe.score_inputs import convention_record, score_settings, set_name
from paceline.score.aggregate import acceptance, losslessness
from paceline.score.cost import cost, plain_rates, plain_timings, timing
from paceline.score.results import PLAIN, MethodResult, PromptResult, at_temperature, chain_name
from paceline.score.slices import by_label, by_length, plain_slices, prompt_table
from paceline.target.spec import read_spec
from paceline.target.template import template_digest

SCHEMA_VERSION = 2


def result_of(
    recipe: Recipe,
    results: Sequence[PromptResult],
    *,
    depths: int,
    overlap: Mapping[str, Any],
    drafter_digest: str,
    prompts_digest: str,
) -> dict[str, Any]:
    """The result as JSON values; `depths` as in `acceptance`."""
    score, settings = recipe.score, score_settings(recipe.score)
    seed = settings.seed
    temperatures = sorted({r.temperature for r in results})
    names = [method_name(b) for b in (None, *sorted({*score.budgets, *score.walk_budgets}))]
    drawn = [chain_name(drafting) for drafting in score.drafting]
    methods_at = {
        t: [at_temperature(name, t) for name in (names if t == 0 else [*names, *drawn])]
        for t in temperatures
    }
    methods = [name for t in temperatures for name in methods_at[t]]
    # A walk budget that was decoded on a few prompts, to check it, is pooled as the walk.
    walked = [_as_walk(r, decoded={CHAIN, *map(method_name, score.budgets)}) for r in results]
    plain = plain_timings(walked)
    timings = {**plain, **{n: t for n in methods if (t := timing(walked, n)) is not None}}
    costs = {name: c for name in methods if (c := cost(walked, name)) is not None}
    return {
        "schema_version": SCHEMA_VERSION,
        "settings": [
            {
                "temperature": t,
                "methods": methods_at[t],
                "plain": plain_rates(plain[at_temperature(PLAIN, t)]),
            }
            for t in temperatures
        ],
        "pooled": {n: asdict(acceptance(walked, n, depths=depths, seed=seed)) for n in methods},
        "datasets": {
            dataset: {
                name: asdict(
                    acceptance(
                        [r for r in walked if r.dataset == dataset], name, depths=depths, seed=seed
                    )
                )
                for name in methods
            }
            for dataset in sorted({r.dataset for r in results})
        },
        "lengths": plain_slices(by_length(walked, methods, seed=seed)),
        "languages": plain_slices(by_label(walked, methods, lambda r: r.language, seed=seed)),
        "domains": plain_slices(by_label(walked, methods, lambda r: r.domain, seed=seed)),
        "per_prompt": prompt_table(walked, methods),
        "overlap": dict(overlap),
        "cost": {name: asdict(value) for name, value in costs.items()},
        "timings": {name: asdict(value) for name, value in timings.items()},
        "lossless": asdict(losslessness(results, recipe.target.dtype)),
        "provenance": {
            **_provenance(recipe, results),
            "drafter": drafter_digest,
            "prompts_digest": prompts_digest,
        },
        "prompts": [msgspec.to_builtins(r) for r in results],
    }


def _provenance(recipe: Recipe, results: Sequence[PromptResult]) -> dict[str, Any]:
    settings = score_settings(recipe.score)
    spec = read_spec(Path(recipe.target.path))
    return {
        "target": spec.name,
        "target_identity": spec.identity,
        "template": template_digest(Path(recipe.target.path), recipe.corpus.template_file),
        "template_args": recipe.corpus.template_args,
        "convention": convention_record(recipe.score),
        "data_sets": [
            {"name": set_name(s), "path": s.path, "adapter": s.adapter, "limit": s.limit}
            for s in recipe.score.datasets
        ],
        "max_new_tokens": settings.max_new_tokens,
        "warmup": settings.warmup,
        "top_k": recipe.score.top_k,
        "top_p": recipe.score.top_p,
        "min_p": recipe.score.min_p,
        "budgets": list(recipe.score.budgets),
        "walk_budgets": list(recipe.score.walk_budgets),
        "batch_size": 1,
        "dtype": recipe.target.dtype,
        "attention": "sdpa",
        "device": recipe.target.device,
        "device_name": _device_name(recipe.target.device),
        "processes": recipe.target.workers,
        "threads_per_process": recipe.target.threads,
        "seed": settings.seed,
        "prompts": len({r.prompt_id for r in results}),
        "answers": len(results),
        "rounds_rule": "cut after an end token, whole at the token limit; bonus token counted",
        "paceline": paceline.__version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "machine": f"{platform.machine()} {platform.system()}",
    }


def _device_name(device: str) -> str:
    if not device.startswith("cuda") or not torch.cuda.is_available():
        return platform.processor() or platform.machine()
    return torch.cuda.get_device_name(device)


def _as_walk(result: PromptResult, *, decoded: set[str]) -> PromptResult:
    methods = {
        name: method
        if name.partition("@")[0] in decoded or method.walk_rounds is None
        else MethodResult(rounds=method.walk_rounds, how="walk")
        for name, method in result.methods.items()
    }
    return replace(result, methods=methods)
