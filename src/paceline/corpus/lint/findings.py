"""What is wrong with the data, or worth knowing: in plain words, each with what to do."""

from collections import Counter
from collections.abc import Iterator

from paceline.corpus.lint.lint import Lint, trained_samples
from paceline.corpus.lint.mask_findings import mask_findings
from paceline.corpus.lint.reasons import words_of
from paceline.corpus.lint.wording import Finding, are, have, percent, some
from paceline.corpus.tally import SourceTally, unread_words
from paceline.recipe.data_files import is_text
from paceline.rows.overlap import GRAM
from paceline.rows.raw_row import TORN
from paceline.types import Split
from paceline.watch.words import counted

_MANY = 1 / 3
"""Share of a source's rows that are left out for a fault and make it serious."""

_SOME = 0.02
"""Share of rows from which a finding is more than a note."""

_ORDER = {"serious": 0, "warning": 1, "note": 2}


def findings(result: Lint) -> list[Finding]:
    """All of them, the serious ones first."""
    found = [
        *_rows(result),
        *mask_findings(result),
        *_lengths(result),
        *_template(result),
        *_tools(result),
        *_sameness(result),
        *_evaluation(result),
        *_policies(result),
    ]
    return sorted(found, key=lambda finding: _ORDER[finding.level])


def is_usable(found: list[Finding]) -> bool:
    """Whether none of them is serious."""
    return all(finding.level != "serious" for finding in found)


def _rows(result: Lint) -> Iterator[Finding]:
    tally = result.tally
    if result.found_prompts:
        yield Finding(
            "note",
            "No row has an answer, so the prompts were looked at",
            "The target will answer them itself (`regenerate`), and its answers will be what is "
            "trained on. There is no mask yet: masks, vocabulary and answers show once the answers "
            "are there.",
            "Nothing, if these are meant to be prompts. Otherwise give rows with assistant turns.",
            "samples",
        )
    elif result.prompts_only:
        yield Finding(
            "note",
            "Only prompts were looked at, because the target will answer them itself",
            "With regenerate.enabled the last answer of each conversation is thrown away, so the "
            "samples here have nothing to train on yet.",
            "To look at the answers of the data: leave out --prompts, or give "
            "--set regenerate.enabled=false.",
            "samples",
        )
    if not trained_samples(result):
        trained = [source for source in tally.sources if source.name not in result.heldout]
        yield Finding(
            "serious",
            "Nothing can be trained on" if tally.read else "The files hold no rows",
            f"Of {counted(tally.read, 'row')} none can be used. {_why(trained)}",
            _advice(trained) or "Give other files.",
            "left-out",
        )
        return
    for source in tally.sources:
        yield from _source(source)
        yield from _files(source)
    if not tally.samples[Split.TRAIN]:
        yield Finding(
            "serious",
            "All samples fell into the validation split",
            f"{counted(tally.samples[Split.VALIDATION], 'sample')}, and none to train on.",
            "Give more rows, or lower corpus.validation_fraction.",
            "sources",
        )
    elif not tally.samples[Split.VALIDATION] and not result.heldout:
        yield Finding(
            "note",
            "No sample fell into the validation split",
            "There would be nothing to measure on.",
            "Give more rows, or evaluation prompts (--heldout).",
            "sources",
        )


def _source(source: SourceTally) -> Iterator[Finding]:
    rows = source.read - source.blank
    faults = {c: n for c, n in source.reasons.items() if words_of(c).kind == "fault"}
    lost = sum(faults.values())
    if source.accepted and faults.keys() == {TORN}:
        # One row, which stands for who knows how many: it has a finding of its own.
        return
    if not source.accepted:
        others = "" if lost else " They were left out on purpose."
        yield Finding(
            "serious" if lost or not rows else "warning",
            f"Nothing of {source.name} can be used{_above_all(source)}",
            f"None of {counted(rows, 'row')} was accepted. {_why([source])}{others}",
            _advice([source]) or "Leave the file out, or look into it.",
            "left-out",
        )
    elif lost:
        part = lost / rows
        level = "serious" if part >= _MANY else "warning" if part >= _SOME else "note"
        yield Finding(
            level,
            f"{percent(lost, rows)} of the rows of {source.name} would be left out",
            f"{lost:,} of {counted(rows, 'row')}. {_why([source])}",
            _advice([source]),
            "left-out",
        )


def _files(source: SourceTally) -> Iterator[Finding]:
    if source.torn:
        told = [f"{file} after {counted(n, 'row')}" for file, n in source.torn.items()]
        yield Finding(
            "warning",
            f"{counted(len(source.torn), 'file')} of {source.name} "
            f"{'is' if len(source.torn) == 1 else 'are'} broken off in the middle",
            f"The rows before are used; what lies behind is lost, and how much that is nobody "
            f"knows: {some(told)}.",
            "Fetch the file again, whole: compare its size or checksum with where it came from.",
            "left-out",
        )
    if source.unread:
        yield Finding(
            "warning" if any(map(is_text, source.unread)) else "note",
            f"{are(len(source.unread), 'file')} not read in {source.name}",
            f"{unread_words(source.name, source.unread)}.",
            "Nothing, if they are no data. Else name them as sources of their own.",
            "sources",
        )


def _above_all(source: SourceTally) -> str:
    """The end of a title, where one reason says it all."""
    counts = _counts([source])
    if counts and counts[0][0] == "too_few_loss_tokens":
        return ": its mask is all zeros, or its answers are empty"
    return ""


def _why(sources: list[SourceTally]) -> str:
    """The most frequent reasons in words."""
    counts = _counts(sources)
    parts = [f"{count:,} × {code}: {words_of(code).meaning}" for code, count in counts[:3]]
    more = len(counts) - 3
    if more > 0:
        parts.append(f"{counted(more, 'reason')} more.")
    return " ".join(parts)


def _advice(sources: list[SourceTally]) -> str:
    advice = dict.fromkeys(words_of(code).advice for code, _ in _counts(sources)[:3])
    return " ".join(advice)


def _counts(sources: list[SourceTally]) -> list[tuple[str, int]]:
    counts = sum((source.reasons for source in sources), Counter[str]())
    faults = {c: n for c, n in counts.items() if words_of(c).kind == "fault"} or dict(counts)
    return sorted(faults.items(), key=lambda item: (-item[1], item[0]))


def _lengths(result: Lint) -> Iterator[Finding]:
    tally, limit = result.tally, result.recipe.corpus.max_length
    cut, samples = tally.truncated, trained_samples(result)
    if cut and samples:
        many = cut / samples >= _SOME
        yield Finding(
            "warning" if many else "note",
            f"{percent(cut, samples)} of the samples are cut at {limit:,} tokens",
            f"{cut:,} of {counted(samples, 'sample')}: longer than corpus.max_length. What is "
            "beyond is not trained on, and the end of the answer with it.",
            "Raise corpus.max_length if there is memory for it, or leave long samples out "
            "(corpus.on_length=exclude).",
            "lengths",
        )


def _template(result: Lint) -> Iterator[Finding]:
    facts = result.template
    if facts.dated:
        mended = (
            "Fix it with --set corpus.template_args.date_string=..., and in the server too."
            if facts.dated == "unless_given"
            else "Give a template without it (corpus.template_file)."
        )
        yield Finding(
            "warning",
            "The chat template writes today's date",
            "So prompts depend on the day: the server will write another date than the data have.",
            mended,
            "template",
        )
    if facts.has_two:
        yield Finding(
            "warning",
            "The target's folder has two chat templates that differ",
            "`chat_template.jinja` is used here; `tokenizer_config.json` has another one, which "
            "some servers use.",
            "Find out which one your server uses, and remove the other from the folder.",
            "template",
        )
    for name in facts.unset:
        yield Finding(
            "note",
            f"The chat template has a switch, {name}, that is not set",
            "The server may set it, and then its prompts are not those that are trained on.",
            f"Set it as your server does: --set corpus.template_args.{name}=...",
            "template",
        )
    marked = sum(source.marked for source in result.measure.sources.values())
    if marked:
        names = [name for name, source in result.measure.sources.items() if source.marked]
        yield Finding(
            "warning",
            "Turns hold marks of a chat template",
            f"{have(marked, 'sample')} (of {some(names)}) marks such as `<|im_start|>`, "
            "`[INST]` or `### Response:` inside a turn: they were rendered before, perhaps for "
            "another model, and would be rendered twice.",
            "Give the turns without marks, as `messages`.",
            "samples",
        )


def _sameness(result: Lint) -> Iterator[Finding]:
    rows = result.tally.read - sum(source.blank for source in result.tally.sources)
    doubled = result.tally.reasons["duplicate"]
    if doubled:
        yield Finding(
            "warning" if doubled / rows >= 0.1 else "note",
            f"{percent(doubled, rows)} of the rows are exact duplicates",
            f"{are(doubled, 'row')} left out, because the same came before.",
            "Nothing; but find out why there are so many, if there are.",
            "same",
        )
    again = result.tally.notes["same_prompt_keep"]
    if again:
        yield Finding(
            "note",
            f"{have(again, 'row')} a prompt that came before, with another answer",
            "They are kept.",
            "To keep one answer for each prompt: --set corpus.on_same_prompt=exclude.",
            "same",
        )


def _evaluation(result: Lint) -> Iterator[Finding]:
    if not result.heldout:
        yield Finding(
            "note",
            "Overlap with evaluation prompts is not known",
            "None were given.",
            "Give them with --heldout FILE.",
            "same",
        )
    same = result.tally.reasons["in_heldout"]
    if same:
        yield Finding(
            "warning",
            f"{have(same, 'row')} a prompt that is also an evaluation prompt",
            "They are left out, so the measurement stays honest; but who made the data has seen "
            "the evaluation.",
            "Find out whether the rest of the data was made from it, too.",
            "same",
        )
    for name, count in result.overlap.items():
        if count.touched_prompts:
            yield Finding(
                "warning" if count.touched_prompts / count.prompts >= _SOME else "note",
                f"{percent(count.touched_prompts, count.prompts)} of the prompts of {name} share "
                "words with training prompts",
                f"{count.touched_prompts:,} of {counted(count.prompts, 'prompt')} share a run of "
                f"{GRAM} words, {count.shared_grams:,} of {count.grams:,} such runs in all. Common "
                "instructions do so; copied questions do, too.",
                "Leave training rows out that share much: --set corpus.max_overlap=0.5.",
                "same",
            )


_POLICIES = {
    "consecutive_roles_keep": (
        "two turns of one role, one after the other, are kept so",
        "Nothing, or have them joined (corpus.consecutive_roles=merge) or left out (exclude).",
    ),
    "consecutive_roles_merge": (
        "two turns of one role, one after the other, are joined",
        "Nothing.",
    ),
    "leading_assistant_context_only": (
        "an assistant turn at the beginning is read but not trained on",
        "Nothing, or leave them out (corpus.leading_assistant=drop).",
    ),
    "leading_assistant_keep": (
        "an assistant turn at the beginning is trained on",
        "Leave it at context_only (corpus.leading_assistant), unless the target writes greetings.",
    ),
}


def _tools(result: Lint) -> Iterator[Finding]:
    count = result.tally.notes["tools_not_rendered"]
    if count:
        yield Finding(
            "warning",
            f"The tools of {counted(count, 'row')} are lost",
            "The rows have them, and the chat template does not show them: the target never reads "
            "which tools there are, and answers as if there were none.",
            "Give the template that the server uses (corpus.template_file), or leave these rows to "
            "a target that knows tools.",
            "template",
        )


def _policies(result: Lint) -> Iterator[Finding]:
    for note, (what, advice) in _POLICIES.items():
        count = result.tally.notes[note]
        if count:
            yield Finding("note", f"{counted(count, 'row')}: {what}", "", advice, "sources")
