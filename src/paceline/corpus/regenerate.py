"""`paceline regenerate`: the target answers the prompts itself, and a drafter learns its words."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec

from paceline.corpus.answer import answer_room, answer_sample
from paceline.corpus.answer_reasons import FAILED
from paceline.corpus.groups import Answer, AnswerStore, Group, plan_groups, read_prompts
from paceline.corpus.mask import Renderer, renderer_of
from paceline.corpus.regenerate_tally import AnswerTally, AskAgain, Progress
from paceline.corpus.served.asking_again import check_ask_again, drop_answers
from paceline.corpus.served.reading import Reader
from paceline.corpus.served.stage import Told, ask_servers, count_found
from paceline.corpus.served.store import Refused, ServedStore
from paceline.durable.errors import DataError
from paceline.durable.fs import REAL_FS, atomic_file
from paceline.flow.launch import map_items
from paceline.recipe.fingerprint import Fields, digest_file, flatten
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe, RegenerateRecipe, TargetRecipe
from paceline.recipe.served_inputs import answering_fields
from paceline.recipe.stage import Report, StageRecord
from paceline.recipe.write import adopt_recipe
from paceline.target.spec import TargetSpec, read_spec
from paceline.types import Sample, Split
from paceline.types.sample import encode_sample, read_samples
from paceline.watch.events import EventWriter
from paceline.watch.words import command_line, counted

FORMAT_VERSION = 1
"""Of answers and `regenerated.jsonl`; part of the fingerprint."""

_DAMAGED = "not as it was written"

_log = logging.getLogger(__name__)


def run(recipe: Recipe, run_dir: RunDir, *, ask_again: Sequence[str] = ()) -> Report:
    """Answer every prompt of the prepared corpus but the held-out ones, which are passed through.

    Groups of prompts are answered by `target.workers` processes, or single prompts by the servers
    of `regenerate.servers`; each is durable before it counts as done. A run that was interrupted,
    at whatever moment, is resumed with what is missing, and the processes' corpus is then the one
    that an undisturbed run would have made. Samples keep the order of the prepared corpus; every
    prompt is answered, quarantined with a reason, or held out. Prompts whose answers by servers
    are left out for a reason of `ask_again` are asked again.

    Raises DataError where there is no prepared corpus, it already has answers, a prompt is longer
    than the target can read, or no training sample is left; TargetError for the target;
    RecipeChanged where another recipe's answers stand here; WorkerFailed for a lost worker;
    UserError where no server is of use, or nothing can be asked again; ServersFailed where none
    answers.
    """
    if not recipe.regenerate.enabled:
        return Report(
            stage="regenerate",
            skipped=True,
            lines=("regenerate: off in the recipe; the answers of the data are used.",),
        )
    with EventWriter(run_dir.events, "regenerate") as events:
        return _run(recipe, run_dir, events, ask_again)


def _run(recipe: Recipe, run_dir: RunDir, events: EventWriter, ask_again: Sequence[str]) -> Report:
    if not run_dir.prepared.is_file():
        raise DataError(f"{run_dir.prepared}: there is no prepared corpus. Run prepare first.")
    folder = Path(recipe.target.path)
    spec = read_spec(folder)
    renderer = renderer_of(recipe)
    job = _Job(
        target=recipe.target,
        recipe=recipe.regenerate,
        prepared=run_dir.prepared,
        ends=renderer.end.ids | frozenset(spec.eos_token_ids),
        max_length=min(recipe.corpus.max_length, spec.max_position),
    )
    record = StageRecord(
        run_dir.corpus,
        "regenerate",
        _fields(recipe, job, spec),
        binds=AnswerStore.holds_any(run_dir.corpus) or ServedStore.holds_any(run_dir.corpus),
    )
    is_done = record.is_done()
    if ask_again:
        check_ask_again(ask_again, recipe, run_dir, record)
    elif is_done:
        return Report(
            stage="regenerate",
            skipped=True,
            numbers=record.report,
            lines=("regenerate: already done with this recipe, and verified; nothing to do.",),
            undone=tuple(record.report.get("undone", ())),
        )
    adopt_recipe(recipe, run_dir)
    record.begin()
    again: AskAgain | None = None
    with ExitStack() as stack:
        if recipe.regenerate.servers:
            again = partial(_again_command, run_dir)
            answered, told = _ask(
                recipe, job, spec, renderer, record, run_dir, events, stack, ask_again
            )
        else:
            store = stack.enter_context(AnswerStore(run_dir.corpus, record.fingerprint))
            groups = plan_groups(run_dir.prepared, recipe.regenerate.group_size)
            told = _generate(job, groups, store, events)
            answered = store.answered(run_dir.prepared, groups)
        tally = _assemble(recipe, renderer, answered, run_dir, again)
        undone = _undone(tally, run_dir)
        numbers = {**tally.numbers(), **told.numbers(), **({"undone": undone} if undone else {})}
        record.finish([run_dir.regenerated, quarantine_path(run_dir)], numbers)
        counts = replace(told.counts(), quarantined=dict(tally.reasons))
        events.emit("finished", counts, report=numbers)
    lines = (*tally.lines(), *told.lines(), *tally.warnings(again))
    return Report(stage="regenerate", numbers=numbers, lines=lines, undone=tuple(undone))


def _ask(
    recipe: Recipe,
    job: "_Job",
    spec: TargetSpec,
    renderer: Renderer,
    record: StageRecord,
    run_dir: RunDir,
    events: EventWriter,
    stack: ExitStack,
    ask_again: Sequence[str],
) -> tuple[Iterator[tuple[Sample, Answer | Refused | None]], Told]:
    """Have servers answer; what they said, in the order of the corpus."""
    prompts = sum(sample.split is not Split.HELDOUT for sample in read_samples(run_dir.prepared))
    progress = Progress(prompts=prompts, redone={})
    found = partial(count_found, progress)
    store = stack.enter_context(ServedStore(run_dir.corpus, record.fingerprint, found))
    if ask_again:
        drop_answers(store, recipe, ask_again)
    store.begin()
    reader = Reader(renderer, job.ends, spec.vocab_size, recipe.regenerate.api == "chat")
    told = ask_servers(
        recipe, run_dir.prepared, reader, store, progress, events, max_length=job.max_length
    )
    return store.answered(run_dir.prepared), told


def _undone(tally: AnswerTally, run_dir: RunDir) -> list[str]:
    failed = tally.reasons[FAILED]
    if not failed:
        return []
    sentence = (
        f"{counted(failed, 'prompt')} over which the servers failed each time: listed in "
        f"{quarantine_path(run_dir)} as {FAILED}. To have them asked again: "
        f"`{_again_command(run_dir, [FAILED])}`; the other answers are kept."
    )
    return [sentence]


def _again_command(run_dir: RunDir, reasons: Sequence[str]) -> str:
    return command_line(
        "paceline", "regenerate", "--run", run_dir.root, "--ask-again", ",".join(reasons)
    )


def quarantine_path(run_dir: RunDir) -> Path:
    """Where the answers that were left out are listed."""
    return run_dir.corpus / "regenerate-quarantine.jsonl"


@dataclass(frozen=True, kw_only=True)
class _Job:
    """All that a worker is told."""

    target: TargetRecipe
    recipe: RegenerateRecipe
    prepared: Path
    ends: frozenset[int]
    max_length: int
    """Tokens of prompt and answer together."""


def _fields(recipe: Recipe, job: _Job, spec: TargetSpec) -> Fields:
    # How many processes share the work, and on which device, does not belong here: a run may be
    # resumed on another machine.
    return flatten(
        {
            "format": FORMAT_VERSION,
            "prepared": digest_file(job.prepared),
            "target": spec.identity,
            **({} if recipe.regenerate.servers else {"target.dtype": recipe.target.dtype}),
            **answering_fields(recipe.regenerate),
            "corpus": {
                "max_length": recipe.corpus.max_length,
                "min_loss_tokens": recipe.corpus.min_loss_tokens,
                "template_args": recipe.corpus.template_args,
            },
            "end_tokens": sorted(job.ends),
        }
    )


def _generate(job: _Job, groups: list[Group], store: AnswerStore, events: EventWriter) -> Progress:
    done, todo, damaged = store.split_done(groups)
    if damaged:
        names = ", ".join(store.path(group).name for group in damaged)
        _log.warning(
            "%d groups are not as they were written, and are redone: %s", len(damaged), names
        )
    for group in damaged:
        events.emit("redo", name=store.path(group).name, reason=_DAMAGED)
    todo = sorted([*todo, *damaged], key=lambda group: group.number)
    progress = Progress(
        prompts=sum(len(group.lines) for group in groups),
        redone={_DAMAGED: len(damaged)} if damaged else {},
    )
    for group in done:
        progress.reuse(store.answers(group))
    events.emit("start", progress.counts(), groups=len(groups), groups_done=len(done))
    if done:
        _log.info("%d of %d groups were answered before", len(done), len(groups))

    def commit(group: Group, answers: list[Answer]) -> None:
        store.commit(group, answers)
        progress.add(answers)
        events.emit("progress", progress.counts(), finish=progress.finish)
        progress.log()

    map_items(
        _answerer,
        job,
        todo,
        workers=job.target.workers,
        threads=job.target.threads,
        on_result=commit,
        what="groups of prompts",
    )
    return progress


def _answerer(job: _Job) -> Callable[[Group], list[Answer]]:
    """Set up a worker: load the target, return what answers a group."""
    from paceline.decode.generate import generate
    from paceline.decode.sampling import Sampling
    from paceline.target.load import load_target

    model = load_target(job.target).model

    def answer(group: Group) -> list[Answer]:
        prompts = read_prompts(job.prepared, group)
        rooms = [answer_room(prompt, job.max_length) for prompt in prompts]
        generations = generate(
            model,
            [prompt.input_ids for prompt in prompts],
            max_new_tokens=min(job.recipe.max_new_tokens, max(rooms)),
            eos_ids=job.ends,
            sampling=Sampling(temperature=job.recipe.temperature, top_p=job.recipe.top_p),
            seed=job.recipe.seed,
            request_keys=[prompt.prompt_id for prompt in prompts],
        )
        return [
            Answer(
                prompt_id=prompt.prompt_id,
                ids=list(generation.ids[:room]),
                finish=generation.finish if len(generation.ids) <= room else "length",
            )
            for prompt, generation, room in zip(prompts, generations, rooms, strict=True)
        ]

    return answer


def _assemble(
    recipe: Recipe,
    renderer: Renderer,
    answered: Iterator[tuple[Sample, Answer | Refused | None]],
    run_dir: RunDir,
    again: AskAgain | None,
) -> AnswerTally:
    """Write corpus and quarantine; the quarantine stands even where no sample is left."""
    tally = AnswerTally()
    with atomic_file(quarantine_path(run_dir)) as rejected:
        # Made before the corpus is published under its name, which an error here prevents.
        refusal: DataError | None = None
        try:
            with atomic_file(run_dir.regenerated) as corpus:
                for prompt, answer in answered:
                    tally.prepared += 1
                    if answer is None:
                        tally.heldout += 1
                        REAL_FS.write(corpus, encode_sample(prompt))
                        continue
                    if isinstance(answer, Refused):
                        tally.refuse(answer.reason, answer.detail)
                        REAL_FS.write(rejected, _refused(prompt, answer, renderer))
                        continue
                    reason = tally.judge(answer, recipe.corpus, recipe.regenerate)
                    sample = answer_sample(
                        prompt,
                        answer.ids,
                        answer.finish,
                        renderer.tokenizer,
                        identity=renderer.identity,
                    )
                    if reason is None:
                        tally.accept(sample, answer.ids)
                        REAL_FS.write(corpus, encode_sample(sample))
                    else:
                        REAL_FS.write(rejected, _quarantined(sample, answer, reason))
                tally.check(quarantine_path(run_dir), again)
        except DataError as error:
            refusal = error
    if refusal is not None:
        raise refusal
    return tally


def _quarantined(sample: Sample, answer: Answer, reason: str) -> bytes:
    record = {
        "prompt_id": sample.prompt_id,
        "sample_id": sample.sample_id,
        "source": sample.source,
        "split": sample.split,
        "reason": reason,
        "finish": answer.finish,
        "answer": sample.messages[-1]["content"],
        "answer_ids": answer.ids,
    }
    return msgspec.json.encode(record) + b"\n"


def _refused(prompt: Sample, refused: Refused, renderer: Renderer) -> bytes:
    record = {
        "prompt_id": prompt.prompt_id,
        "sample_id": prompt.sample_id,
        "source": prompt.source,
        "split": prompt.split,
        "reason": refused.reason,
        "detail": refused.detail,
        "finish": refused.finish,
        "answer": renderer.tokenizer.decode(refused.ids, skip_special_tokens=True),
        "answer_ids": refused.ids,
    }
    return msgspec.json.encode(record) + b"\n"
