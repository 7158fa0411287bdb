"""`paceline score`: τ by really decoding held-out prompts, beside plain decoding."""

import hashlib
import logging
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers

import paceline
from paceline.decode.simulate import CHAIN, method_name
from paceline.durable.errors import DataError, NotLossless
from paceline.durable.fs import write_atomic
from paceline.durable.journal import Journal
from paceline.flow.launch import map_items
from paceline.recipe.fingerprint import Fields, flatten
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe
from paceline.recipe.sources import name_of
from paceline.recipe.stage import Report, StageRecord, outputs_digest, read_record
from paceline.recipe.write import adopt_recipe
from paceline.score.aggregate import acceptance, cost, losslessness
from paceline.score.prompt import Job, MethodResult, Prompt, PromptResult, PromptScorer
from paceline.score.table import result_lines
from paceline.target.spec import read_spec
from paceline.types.sample import Sample, Split, read_samples
from paceline.watch.events import Counts, EventWriter
from paceline.watch.progress import TokenProgress

_LOG = logging.getLogger(__name__)

SCHEMA_VERSION = 1
RESULT = "result.json"
JOURNAL = "prompts.journal"


def run(recipe: Recipe, run_dir: RunDir) -> Report:
    """Decode the held-out prompts plainly, as a chain and with each budget; write result.json.

    Each prompt is journalled when it is done, so an interrupted run goes on after the last one.
    Raises DataError where there are no held-out prompts, NotLossless (after writing the result)
    where speculative output differs from the target's own.
    """
    with EventWriter(run_dir.events, "score") as events:
        return _run(recipe, run_dir, events)


def _run(recipe: Recipe, run_dir: RunDir, events: EventWriter) -> Report:
    drafter, drafter_digest = _best_drafter(run_dir)
    prompts = choose_prompts(recipe, run_dir)
    undone = _not_scored(recipe, run_dir, prompts)
    fields = _fields(recipe, drafter_digest, prompts)
    # A training that went on, or lost its best checkpoint, has another drafter to measure.
    record = StageRecord(run_dir.score, "score", fields, allowed=("drafter",), binds=False)
    if record.is_done():
        result = msgspec.json.decode((run_dir.score / RESULT).read_bytes())
        return Report(
            stage="score",
            skipped=True,
            numbers=record.report,
            lines=result_lines(result),
            undone=undone,
        )
    _set_result_aside(run_dir.score / RESULT, record)
    adopt_recipe(recipe, run_dir)
    record.begin()
    progress = _Progress(len(prompts))
    results = _score_all(recipe, run_dir, drafter, prompts, record.fingerprint, progress, events)
    result = _result(recipe, results, fields)
    path = run_dir.score / RESULT
    write_atomic(path, msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    violations = result["lossless"]["violations"]
    if violations:
        raise NotLossless(
            f"{path}: {len(violations)} answers are not what the target says by itself, the "
            f"first is {violations[0]}. This is a bug in the verifier or the cache: no number of "
            "this score can be trusted. Please report it with this file."
        )
    numbers = {name: pooled["tau"] for name, pooled in result["pooled"].items()}
    record.finish([path], numbers)
    events.emit("finished", progress.counts(), report=numbers)
    return Report(stage="score", numbers=numbers, lines=result_lines(result), undone=undone)


def _set_result_aside(path: Path, record: StageRecord) -> None:
    """Keep the result of a drafter that is no longer the best under another name."""
    for change in record.changes():
        if path.exists():
            kept = path.with_name(f"result-{change.made[:8]}.json")
            path.rename(kept)
            _LOG.warning("the best drafter is another one now; its result before is %s", kept)


class _Progress:
    """How far the measurement is; prompts of earlier runs are apart."""

    def __init__(self, prompts: int) -> None:
        self._prompts = prompts
        self._reused = self._done = 0
        self._reused_tokens = self._tokens = 0
        self._start = time.monotonic()

    def reuse(self, results: Sequence[PromptResult]) -> None:
        """Count what an earlier run has measured; before the first `add`."""
        self._reused = len(results)
        self._reused_tokens = sum(len(r.answer_ids) for r in results)
        self._start = time.monotonic()

    def add(self, result: PromptResult) -> None:
        """Count a prompt that is durable."""
        self._done += 1
        self._tokens += len(result.answer_ids)

    def counts(self) -> Counts:
        """For events; the time left goes by prompts, whose answers are of any length."""
        seconds = time.monotonic() - self._start
        left = self._prompts - self._reused - self._done
        return Counts(
            unit="prompts",
            total=self._prompts,
            done=self._reused + self._done,
            skipped=self._reused,
            tokens=self._reused_tokens + self._tokens,
            rate=round(self._tokens / seconds, 2) if self._tokens else None,
            eta=round(left * seconds / self._done, 1) if self._done else None,
        )


def _score_all(
    recipe: Recipe,
    run_dir: RunDir,
    drafter: Path,
    prompts: Sequence[Prompt],
    fingerprint: str,
    progress: _Progress,
    events: EventWriter,
) -> list[PromptResult]:
    job = Job(
        target=recipe.target,
        drafter=drafter,
        max_new_tokens=recipe.score.max_new_tokens,
        budgets=recipe.score.budgets,
        walk_budgets=recipe.score.walk_budgets,
    )
    with Journal(run_dir.score / JOURNAL) as journal:
        done = {
            result.prompt_id: result
            for result in (
                msgspec.convert(r["result"], PromptResult)
                for r in journal.records
                if r.get("fingerprint") == fingerprint
            )
        }
        left = [p for p in prompts if p.prompt_id not in done]
        progress.reuse(list(done.values()))
        events.emit("start", progress.counts())
        answers = len(prompts) * recipe.score.max_new_tokens
        tokens = sum(len(r.answer_ids) for r in done.values())
        with TokenProgress("score", answers, done=tokens) as terminal:

            def keep(prompt: Prompt, result: PromptResult) -> None:
                nonlocal tokens
                journal.append({"fingerprint": fingerprint, "result": msgspec.to_builtins(result)})
                done[prompt.prompt_id] = result
                tokens += len(result.answer_ids)
                terminal.update(tokens)
                progress.add(result)
                events.emit("progress", progress.counts())

            map_items(
                _scorer,
                job,
                left,
                workers=recipe.target.workers,
                threads=recipe.target.threads,
                on_result=keep,
                what="prompts",
            )
    return [done[p.prompt_id] for p in prompts]


def _scorer(job: Job) -> Callable[[Prompt], PromptResult]:
    return PromptScorer(job)


def _best_drafter(run_dir: RunDir) -> tuple[Path, str]:
    stored = read_record(run_dir.checkpoints, "train")
    if stored is None:
        raise DataError(f"{run_dir.checkpoints}: no trained drafter. Run `paceline train` first.")
    digest = outputs_digest(stored)
    if digest is None:
        raise DataError(
            f"{run_dir.checkpoints}: the training has not ended. Run `paceline train` to its end."
        )
    return run_dir.checkpoints / stored.report["best"], digest


def _not_scored(recipe: Recipe, run_dir: RunDir, prompts: Sequence[Prompt]) -> tuple[str, ...]:
    """A sentence for each held-out data set of which nothing is scored."""
    scored = {prompt.dataset for prompt in prompts}
    return tuple(
        f"{name_of(source)}: none of its prompts is scored. They are not in the corpus "
        f"({run_dir.corpus / 'quarantine.jsonl'} says why), or leave the target no room for an "
        f"answer of score.max_new_tokens {recipe.score.max_new_tokens}."
        for source in recipe.corpus.sources
        if source.split == "heldout" and name_of(source) not in scored
    )


def choose_prompts(recipe: Recipe, run_dir: RunDir) -> list[Prompt]:
    """The held-out prompts that `score` asks for, or the validation samples' where none are.

    Raises DataError where there is none that the target has room for.
    """
    by_split: dict[Split, dict[str, list[Sample]]] = {split: {} for split in Split}
    for sample in read_samples(run_dir.samples(recipe)):
        if sample.split is not Split.TRAIN:
            by_split[sample.split].setdefault(sample.source, []).append(sample)
    datasets = by_split[Split.HELDOUT] or by_split[Split.VALIDATION]
    block = recipe.drafter.block_size
    # A tree of any budget reaches no further than a block.
    room = read_spec(Path(recipe.target.path)).max_position - recipe.score.max_new_tokens - block
    chosen: list[Prompt] = []
    too_long = 0
    for name in sorted(datasets):
        usable = [(s, p) for s in datasets[name] if len(p := _prompt_ids(s)) <= room]
        too_long += len(datasets[name]) - len(usable)
        usable.sort(key=lambda pair: _lot(recipe.score.seed, pair[0].prompt_id))
        for sample, ids in usable[: recipe.score.max_prompts]:
            chosen.append(
                Prompt(
                    prompt_id=sample.prompt_id,
                    dataset=name,
                    input_ids=ids,
                    check_walk=False,
                )
            )
    if too_long and not chosen:
        raise DataError(
            f"score: all {too_long} held-out prompts are too long: of the target's positions "
            f"{max(room, 0)} are left for a prompt beside score.max_new_tokens "
            f"{recipe.score.max_new_tokens} and a block. Lower it, or give shorter ones."
        )
    if too_long:
        _LOG.warning(
            "%d held-out prompts are left out: longer than the %d tokens that the target has room "
            "for beside its answer", too_long, room,
        )  # fmt: skip
    if not chosen:
        raise DataError(
            "score: no held-out prompts. Give a source with `split: heldout`, or a "
            "corpus.validation_fraction above 0."
        )
    return _mark_checked(chosen, recipe.score.walk_check_prompts)


def _mark_checked(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Spread the prompts whose walk is proved by decoding over all data sets."""
    count = min(count, len(prompts))
    marked = {number * len(prompts) // count for number in range(count)}
    return [replace(p, check_walk=i in marked) for i, p in enumerate(prompts)]


def _prompt_ids(sample: Sample) -> tuple[int, ...]:
    """The tokens before the first that the target generated."""
    end = sample.loss_spans[0][0] if sample.loss_spans else len(sample.input_ids)
    return tuple(sample.input_ids[:end])


def _lot(seed: int, prompt_id: str) -> bytes:
    return hashlib.sha256(f"{seed}/{prompt_id}".encode()).digest()


def _fields(recipe: Recipe, drafter_digest: str, prompts: Sequence[Prompt]) -> Fields:
    spec = read_spec(Path(recipe.target.path))
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(prompt.prompt_id.encode())
        digest.update(msgspec.json.encode(prompt.input_ids))
    return flatten(
        {
            "format": SCHEMA_VERSION,
            "drafter": drafter_digest,
            "target": spec.identity,
            "dtype": recipe.target.dtype,
            "prompts": digest.hexdigest()[:32],
            "score": asdict(recipe.score),
        }
    )


def _result(recipe: Recipe, results: Sequence[PromptResult], fields: Fields) -> dict[str, Any]:
    score = recipe.score
    budgets = sorted({*score.budgets, *score.walk_budgets})
    methods = [method_name(b) for b in (None, *budgets)]
    # A walk budget that was decoded on a few prompts, to check it, is pooled as the walk.
    walked = [_as_walk(r, decoded={CHAIN, *map(method_name, score.budgets)}) for r in results]
    datasets = sorted({r.dataset for r in results})
    costs = {name: cost(walked, name) for name in methods}
    spec = read_spec(Path(recipe.target.path))
    return {
        "schema_version": SCHEMA_VERSION,
        "pooled": {name: asdict(acceptance(walked, name, seed=score.seed)) for name in methods},
        "datasets": {
            dataset: {
                name: asdict(
                    acceptance([r for r in walked if r.dataset == dataset], name, seed=score.seed)
                )
                for name in methods
            }
            for dataset in datasets
        },
        "plain": _plain(results),
        "cost": {name: asdict(value) for name, value in costs.items() if value is not None},
        "lossless": asdict(losslessness(results, recipe.target.dtype)),
        "provenance": {
            "target": spec.name,
            "target_identity": spec.identity,
            "drafter": fields["drafter"],
            "template_args": recipe.corpus.template_args,
            "temperature": 0.0,
            "max_new_tokens": score.max_new_tokens,
            "batch_size": 1,
            "dtype": recipe.target.dtype,
            "attention": "sdpa",
            "device": recipe.target.device,
            "processes": recipe.target.workers,
            "threads_per_process": recipe.target.threads,
            "seed": score.seed,
            "prompts": len(results),
            "prompts_digest": fields["prompts"],
            "rounds_rule": "cut after an end token, whole at the token limit; bonus token counted",
            "paceline": paceline.__version__,
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
            "machine": f"{platform.machine()} {platform.system()}",
        },
        "prompts": [msgspec.to_builtins(r) for r in results],
    }


def _as_walk(result: PromptResult, *, decoded: set[str]) -> PromptResult:
    methods = {
        name: method
        if name in decoded or method.walk_rounds is None
        else MethodResult(rounds=method.walk_rounds, how="walk")
        for name, method in result.methods.items()
    }
    return replace(result, methods=methods)


def _plain(results: Sequence[PromptResult]) -> dict[str, Any]:
    steps = sum(r.plain_steps for r in results)
    cpu = sum(r.plain_cpu_seconds.get("verify", 0.0) for r in results)
    wall = sum(r.plain_wall_seconds for r in results)
    return {
        "tokens": steps,
        "cpu_seconds_per_token": cpu / steps if steps else 0.0,
        "wall_seconds_per_token": wall / steps if steps else 0.0,
        "prefill_cpu_seconds": sum(r.plain_cpu_seconds.get("prefill", 0.0) for r in results),
    }
