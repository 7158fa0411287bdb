"""`paceline score`: τ by really decoding held-out prompts, beside plain decoding."""

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from paceline.decode.propose import Drafting
from paceline.decode.sampling import GREEDY, Sampling
from paceline.drafter.checkpoint import read_config
from paceline.durable.errors import DataError, NotLossless
from paceline.durable.fs import write_atomic
from paceline.durable.journal import Journal
from paceline.flow.launch import map_items
from paceline.recipe.fingerprint import Fields, flatten
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe
from paceline.recipe.score_inputs import score_fields, score_settings
from paceline.recipe.stage import Report, StageRecord, outputs_digest, read_record
from paceline.recipe.write import adopt_recipe
from paceline.rows.language import LanguageNames
from paceline.score.choose import choose_prompts, not_scored
from paceline.score.job import Job, Prompt
from paceline.score.overlap import overlap_numbers
from paceline.score.prompt import PromptScorer
from paceline.score.result import SCHEMA_VERSION, result_of
from paceline.score.results import PromptResult
from paceline.score.table import result_lines
from paceline.target.spec import read_spec
from paceline.watch.events import Counts, EventWriter
from paceline.watch.progress import TokenProgress

_LOG = logging.getLogger(__name__)

RESULT = "result.json"
JOURNAL = "prompts.journal"


def run(recipe: Recipe, run_dir: RunDir) -> Report:
    """Decode the prompts plainly, as a chain and with each budget; write result.json.

    Each prompt is journalled when it is done, so an interrupted run goes on after the last one.
    Raises what `choose_prompts` raises, NotLossless (after writing the result)
    where speculative output differs from the target's own.
    """
    with EventWriter(run_dir.events, "score") as events:
        return _run(recipe, run_dir, events)


def _run(recipe: Recipe, run_dir: RunDir, events: EventWriter) -> Report:
    drafter, drafter_digest = _best_drafter(run_dir)
    prompts = choose_prompts(recipe, run_dir)
    undone = not_scored(recipe, run_dir, prompts)
    fields = _fields(recipe, drafter_digest, prompts)
    # A training that went on, or lost its best checkpoint, has another drafter to measure; and an
    # older version's result says less.
    allowed = ("drafter", "format")
    record = StageRecord(run_dir.score, "score", fields, allowed=allowed, binds=False)
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
    names = LanguageNames()
    prompts = [replace(p, language=names.of(p.text) if p.text else "unknown") for p in prompts]
    progress = _Progress(len(prompts))
    results = _score_all(recipe, run_dir, drafter, prompts, record.fingerprint, progress, events)
    result = result_of(
        recipe,
        results,
        depths=read_config(drafter).block_size - 1,
        overlap=overlap_numbers(recipe, run_dir, prompts),
        drafter_digest=drafter_digest,
        prompts_digest=fields["prompts"],
    )
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
    """Keep the result of another drafter, or of an older version, under another name."""
    for change in record.changes():
        if path.exists():
            kept = path.with_name(f"result-{str(change.made)[:8]}.json")
            path.rename(kept)
            why = {"drafter": "the best drafter is another one now"}.get(
                change.key, "this version measures more"
            )
            _LOG.warning("%s; the result before is %s", why, kept)


class _Progress:
    """How far the measurement is; prompts of earlier runs are apart."""

    def __init__(self, prompts: int) -> None:
        self._prompts = prompts
        self._reused = self._done = 0
        self._reused_tokens = self._tokens = 0
        self._start = time.monotonic()

    def reuse(self, prompts: Sequence[Sequence[PromptResult]]) -> None:
        """Count what an earlier run has measured; before the first `add`."""
        self._reused = len(prompts)
        self._reused_tokens = sum(map(_tokens, prompts))
        self._start = time.monotonic()

    def add(self, results: Sequence[PromptResult]) -> None:
        """Count a prompt that is durable, by the results of its turns."""
        self._done += 1
        self._tokens += _tokens(results)

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
    settings = score_settings(recipe.score)
    job = Job(
        target=recipe.target,
        drafter=drafter,
        max_new_tokens=settings.max_new_tokens,
        budgets=recipe.score.budgets,
        walk_budgets=recipe.score.walk_budgets,
        samplings=_samplings(recipe),
        drafting=tuple(Drafting(name) for name in recipe.score.drafting),
        seed=settings.seed,
        warmup=tuple(prompts[: settings.warmup]),
        template_args=recipe.corpus.template_args,
        template_file=recipe.corpus.template_file,
    )
    with Journal(run_dir.score / JOURNAL) as journal:
        done = {
            results[0].prompt_id: results
            for results in (
                msgspec.convert(r["results"], tuple[PromptResult, ...])
                for r in journal.records
                if r.get("fingerprint") == fingerprint
            )
        }
        left = [p for p in prompts if p.prompt_id not in done]
        progress.reuse(list(done.values()))
        events.emit("start", progress.counts())
        answers = sum(1 + len(p.later) for p in prompts) * settings.max_new_tokens
        answers *= len(job.samplings)
        tokens = sum(map(_tokens, done.values()))
        with TokenProgress("score", answers, done=tokens) as terminal:

            def keep(prompt: Prompt, results: tuple[PromptResult, ...]) -> None:
                nonlocal tokens
                kept = [msgspec.to_builtins(result) for result in results]
                journal.append({"fingerprint": fingerprint, "results": kept})
                done[prompt.prompt_id] = results
                tokens += _tokens(results)
                terminal.update(tokens)
                progress.add(results)
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
    return [result for p in prompts for result in done[p.prompt_id]]


def _samplings(recipe: Recipe) -> tuple[Sampling, ...]:
    asked = recipe.score
    filters = {"top_k": asked.top_k, "top_p": asked.top_p, "min_p": asked.min_p}
    return tuple(
        Sampling(temperature=temperature, **filters) if temperature else GREEDY
        for temperature in score_settings(asked).temperatures
    )


def _scorer(job: Job) -> Callable[[Prompt], tuple[PromptResult, ...]]:
    return PromptScorer(job)


def _tokens(results: Sequence[PromptResult]) -> int:
    return sum(len(result.answer_ids) for result in results)


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
            "score": score_fields(recipe.score),
        }
    )
