"""`paceline regenerate --ask-again`: answers that are left out are dropped, and asked for anew."""

import logging
from collections.abc import Sequence

from paceline.corpus.answer_reasons import FAILED
from paceline.corpus.loops import is_loop
from paceline.corpus.regenerate_tally import reason_against
from paceline.corpus.served.store import Kept, Refused, ServedStore
from paceline.durable.errors import UserError
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe
from paceline.recipe.stage import StageRecord, read_record
from paceline.watch.words import counted

_log = logging.getLogger(__name__)


def check_ask_again(
    reasons: Sequence[str], recipe: Recipe, run_dir: RunDir, record: StageRecord
) -> None:
    """Refuse what cannot be asked again, before anything is dropped. Raises UserError."""
    if not recipe.regenerate.servers:
        raise UserError(
            "--ask-again: no server is asked here (regenerate.servers is empty), and the target "
            "would give the same answers again. Leave it out, or change what decides the answers, "
            "with a new run directory (`--run DIR`)."
        )
    extract = read_record(run_dir.features, "extract")
    if extract is not None:
        raise UserError(
            f"--ask-again: {run_dir.features} was begun with the answers as they are, and would be "
            f"of no use with others. Copy {run_dir.corpus} into a new run directory, and give "
            "that with `--run DIR`."
        )
    found = record.report.get("reasons", {})
    if record.report and not any(found.get(reason) for reason in reasons):
        there = ", ".join(f"{n} {reason}" for reason, n in found.items()) or "none"
        raise UserError(
            f"--ask-again: no answer of {run_dir.corpus} is left out for {' or '.join(reasons)}. "
            f"Left out are: {there}."
        )


def drop_answers(store: ServedStore, recipe: Recipe, reasons: Sequence[str]) -> None:
    """Drop what is left out for one of the reasons; durable on return."""

    def reason_of(kept: Kept) -> str | None:
        if isinstance(kept.said, Refused):
            return kept.said.reason
        loop = is_loop(kept.said.ids, recipe.regenerate.loop_repeats)
        return reason_against(kept.said, recipe.corpus, recipe.regenerate, loop=loop)

    dropped = store.drop(reason_of, reasons)
    if dropped or FAILED not in reasons:
        what = " or ".join(reasons)
        _log.info("%s dropped, and asked for again: %s", counted(dropped, "answer"), what)
