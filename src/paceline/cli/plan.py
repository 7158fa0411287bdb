"""`paceline plan`."""

import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import tyro

from paceline.cli.settings import settings_named, settings_of
from paceline.cli.stages import StageArgs, open_run
from paceline.cli.terminal import say
from paceline.durable.errors import RecipeChanged, UserError
from paceline.recipe.extract_inputs import is_object_store
from paceline.recipe.fingerprint import changed_fields, difference, digest_file, flatten
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe
from paceline.recipe.stage import Record, read_record

if TYPE_CHECKING:
    from paceline.doctor.plan import Plan
    from paceline.doctor.plan_bytes import Done, Samples
    from paceline.doctor.plan_facts import Asked
    from paceline.doctor.plan_rates import Rate
    from paceline.features.plan import Lengths

_WIDTH = 100


@dataclass(frozen=True, kw_only=True)
class Args(StageArgs):
    """Says what a run will need and when its extraction will end: bytes by codec, staging, room
    on every disk, memory of devices and host. It loads no model, and can be asked before there is
    a run, a corpus or a GPU.

    The samples are counted in the run's corpus; without one they are estimated from the data, or
    told by --rows and --mean-tokens. The speed of the devices is that of --tokens-per-s, else of
    the last extraction in the run directory, else a guess from published figures.

    Reads: the recipe; the target's config, tokenizer and the headers of its weights; the corpus or
    some rows of the data; events of the run; free space.

    Writes: nothing. With --probe some objects of 8 MiB to the store, which it removes.

    Exit code: 0 where all that is known fits, 1 where something does not, 2 where the recipe is
    impossible.

    Example: paceline plan recipe.yaml --rows 120000 --mean-tokens 1000
    """  # noqa: D205

    rows: Annotated[
        int | None, tyro.conf.arg(metavar="N", help_behavior_hint="(default: those of the corpus)")
    ] = None
    """Plan for this many samples; with --mean-tokens."""
    mean_tokens: Annotated[
        float | None,
        tyro.conf.arg(metavar="N", help_behavior_hint="(default: those of the corpus)"),
    ] = None
    """Tokens of a sample, on average; with --rows."""
    tokens_per_s: Annotated[
        float | None, tyro.conf.arg(metavar="N", help_behavior_hint="(default: see above)")
    ] = None
    """Speed of all devices of the extraction together, tokens per second."""
    drafter_tokens_per_s: Annotated[
        float | None, tyro.conf.arg(metavar="N", help_behavior_hint="(default: see above)")
    ] = None
    """With train.online: speed of one drafter in training, tokens per second."""
    upload: Annotated[
        float | None, tyro.conf.arg(metavar="MB/S", help_behavior_hint="(default: unknown)")
    ] = None
    """Speed of the upload, in megabytes (1,000,000 bytes) per second."""
    probe: Annotated[
        tyro.conf.FlagCreatePairsOff[bool], tyro.conf.arg(help_behavior_hint="(default: no)")
    ] = False
    """Measure the upload: write some objects to the store, and remove them."""
    json: Annotated[
        tyro.conf.FlagCreatePairsOff[bool], tyro.conf.arg(help_behavior_hint="(default: text)")
    ] = False
    """Everything, as one JSON object (docs/operations.md, "Before a run")."""


def run(args: Args) -> int:
    """Run the command; the exit code."""
    _require_options(args)
    recipe, run_dir = open_run(args, "plan")
    from paceline.doctor.plan import make_plan

    with settings_named(settings_of(recipe, run_dir)):
        plan = make_plan(recipe, run_dir, _asked(args, recipe, run_dir))
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(plan), indent=1).decode(), flush=True)
    else:
        _show(plan, args.recipe)
    return 0 if plan.fits else 1


def plan_for(recipe: Recipe, run_dir: RunDir) -> "Plan":
    """The plan of a checked recipe with nothing told beside it.

    Raises what `make_plan` raises, and DataError, RecipeChanged or TargetError where the samples
    can be neither counted nor estimated.
    """
    from paceline.doctor.plan import make_plan

    return make_plan(recipe, run_dir, _asked(Args(), recipe, run_dir))


def _require_options(args: Args) -> None:
    if (args.rows is None) != (args.mean_tokens is None):
        raise UserError("--rows and --mean-tokens: give both, or neither.")
    for name, value in (
        ("--rows", args.rows),
        ("--mean-tokens", args.mean_tokens),
        ("--tokens-per-s", args.tokens_per_s),
        ("--drafter-tokens-per-s", args.drafter_tokens_per_s),
        ("--upload", args.upload),
    ):
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"{name}: {value:g} is impossible. Give a number above 0.")
    if args.probe and args.upload is not None:
        raise UserError("--probe and --upload: the speed is measured or given. Leave one out.")


def _asked(args: Args, recipe: Recipe, run_dir: RunDir) -> "Asked":
    from paceline.doctor.plan_bytes import Done, Samples
    from paceline.doctor.plan_facts import Asked

    upload = _upload(args.upload, recipe, is_probed=args.probe)
    if args.drafter_tokens_per_s is not None and not recipe.train.online:
        raise UserError(
            "--drafter-tokens-per-s: only an online training is timed. Leave it out, or set "
            "train.online."
        )
    lengths, done, online = None, Done(), None
    if args.rows is not None and args.mean_tokens is not None:
        longest = recipe.corpus.max_length
        if args.mean_tokens > longest:
            raise UserError(
                f"--mean-tokens: {args.mean_tokens:g} is more than corpus.max_length {longest} "
                "lets any sample be. Lower it, or raise corpus.max_length."
            )
        samples = Samples(
            count=args.rows,
            tokens=round(args.rows * args.mean_tokens),
            longest=longest,
            basis="options",
            said=f"told by --rows and --mean-tokens; none longer than {longest:,} tokens",
        )
        samples, online = _shared_out(recipe, samples)
    elif _has_corpus(recipe, run_dir):
        samples, online, lengths, done = _counted(recipe, run_dir)
    else:
        samples, online = _shared_out(recipe, _estimated(recipe))
    return Asked(
        samples=samples,
        lengths=lengths,
        done=done,
        online=online,
        tokens_per_s=args.tokens_per_s,
        drafter_tokens_per_s=args.drafter_tokens_per_s,
        upload=upload,
    )


def _shared_out(recipe: Recipe, samples: "Samples") -> "tuple[Samples, Samples | None]":
    """Those in the store, and those that are captured while training; offline all are stored."""
    if not recipe.train.online:
        return samples, None
    share = recipe.corpus.validation_fraction
    stored = max(1, round(share * samples.count))
    tokens = max(1, round(stored * samples.mean_tokens))
    online = replace(
        samples,
        count=max(1, samples.count - stored),
        tokens=max(1, samples.tokens - tokens),
    )
    said = f"corpus.validation_fraction {share:g} of {samples.count:,} samples, {samples.said}"
    return replace(samples, count=stored, tokens=tokens, said=said), online


def _upload(given: float | None, recipe: Recipe, *, is_probed: bool) -> "Rate | None":
    """Bytes per second to an object store, of which `given` are millions; None without one."""
    from paceline.doctor.plan_rates import Rate

    store = recipe.extract.store
    if not is_object_store(store):
        if is_probed or given is not None:
            raise UserError(
                "--upload, --probe: nothing is uploaded, because extract.store names a folder. "
                "Leave them out, or set extract.store to a bucket."
            )
        return None
    if is_probed:
        from paceline.doctor.plan_probe import probe_upload
        from paceline.durable.open_store import open_store

        opened = open_store(store, recipe.extract.store_options)
        return probe_upload(opened, recipe.extract.uploads)
    if given is not None:
        return Rate(value=given * 1e6, source="given", said="given")
    return Rate(value=None, source="unknown", said="give --upload, or --probe to measure it")


def _has_corpus(recipe: Recipe, run_dir: RunDir) -> bool:
    """Whether the samples to extract are there. Raises RecipeChanged for another recipe's."""
    if not run_dir.samples(recipe).is_file():
        return False
    stages = ("prepare", "regenerate") if recipe.regenerate.enabled else ("prepare",)
    records = [read_record(run_dir.corpus, name) for name in stages]
    if any(record is None or record.outputs is None for record in records):
        return False
    for record in records:
        if record is not None:
            _require_same(recipe, run_dir, record)
    return True


def _require_same(recipe: Recipe, run_dir: RunDir, record: Record) -> None:
    asked = flatten(recipe)
    made = {key: value for key, value in record.fields.items() if key in asked}
    asked = {key: asked[key] for key in made}
    if changed_fields(made, asked):
        rows = "\n  ".join(difference(made, asked))
        raise RecipeChanged(
            f"{run_dir.corpus}: {record.stage} was done by another recipe (made -> asked), so a "
            f"run with this one would refuse it:\n  {rows}\nPlan for a new run directory "
            "(`--run DIR`), or put the old values back."
        )


def _counted(recipe: Recipe, run_dir: RunDir) -> "tuple[Samples, Samples | None, Lengths, Done]":
    """Those in the store, those captured while training, lengths and what is done of the first."""
    from paceline.cli.plan_done import done_of
    from paceline.doctor.plan_bytes import Samples
    from paceline.extract.setting import kept_split
    from paceline.target.spec import read_spec
    from paceline.types import Split
    from paceline.types.row_index import FILE_NAME, load_index
    from paceline.types.rows import Rows, index_rows

    spec = read_spec(Path(recipe.target.path), identify=False)
    path = run_dir.samples(recipe)
    vocab, longest = spec.vocab_size, spec.max_position
    digest, kept = digest_file(path), kept_split(recipe)
    index = run_dir.features / FILE_NAME
    rows = load_index(index, digest, vocab_size=vocab, max_position=longest, only=kept)
    if rows is None:
        rows = index_rows(path, vocab_size=vocab, max_position=longest, only=kept)

    def counted(rows: Rows) -> Samples:
        return Samples(
            count=len(rows),
            tokens=rows.tokens,
            longest=int(rows.lengths.max()),
            basis="corpus",
            said=f"counted in {path}",
        )

    online = None
    if recipe.train.online:
        trained = index_rows(path, vocab_size=vocab, max_position=longest, only=Split.TRAIN)
        online = counted(trained)
    done = done_of(recipe, run_dir, spec, digest, rows.lengths)
    return counted(rows), online, rows.lengths, done


def _estimated(recipe: Recipe) -> "Samples":
    from paceline.corpus.estimate import estimate_samples
    from paceline.doctor.plan_bytes import Samples

    found = estimate_samples(recipe)
    about = "" if found.rows_counted else "about "
    within = f", within {found.error:.1%}" if found.error else ""
    answers = (
        ", answers that are not written yet counted at regenerate.max_new_tokens, the most they "
        "can have"
        if found.answers_at_most
        else ""
    )
    return Samples(
        count=found.samples,
        tokens=found.tokens,
        longest=recipe.corpus.max_length,
        basis="data",
        said=(
            f"an estimate from {found.looked_at:,} of {about}{found.rows:,} rows{within}{answers}; "
            "rows that come twice are not known of"
        ),
    )


def _show(plan: "Plan", recipe: Path | None) -> None:
    from paceline.doctor.plan_words import COLUMNS, lines, rows, title

    say(title(plan, recipe))
    say("")
    table = list(rows(plan))
    if sys.stdout.isatty():
        _print_table(COLUMNS, table)
    else:
        widths = [max(map(len, column)) for column in zip(COLUMNS, *table, strict=True)]
        for row in (COLUMNS, *table):
            print(_aligned(row, widths), flush=True)
    say("")
    for line in lines(plan):
        for part in _wrapped(line):
            say(part)


def _aligned(row: tuple[str, ...], widths: list[int]) -> str:
    name, *cells = row
    right = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
    return "  ".join([name.ljust(widths[0]), *right]).rstrip()


def _print_table(columns: tuple[str, ...], table: list[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index, name in enumerate(columns):
        shown.add_column(name, justify="right" if index else "left", no_wrap=True)
    styles = {"yes": "green", "NO": "bold red", "unknown": "yellow"}
    for *cells, fits in table:
        shown.add_row(*map(Text, cells), Text(fits, style=styles.get(fits, "")))
    Console().print(shown)


def _wrapped(line: str) -> Iterator[str]:
    yield from textwrap.wrap(
        line, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
