"""A run whose recipe names another store than the one that its shards are in."""

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.durable.errors import UserError
from paceline.extract.destination import Destination
from paceline.extract.ledger import Survey
from paceline.extract.setting import Setting
from paceline.watch.words import command_line, counted

STORE = "store"
"""Key of a session's record: the url that its shards went to; empty for the run's own folder, which
may move with the run."""


def require_same_store(
    setting: Setting, to: Destination, sessions: Sequence[Mapping[str, Any]], found: Survey
) -> None:
    """Raise UserError where shards are missing here because they are in another store.

    Shards that were copied to the new place prove themselves there, and are taken over.
    """
    before = sessions[-1].get(STORE) if sessions else None
    if before in (None, to.url) or not found.gone:
        return
    there = before or setting.run_dir.features
    remove = command_line("rm", "-r", "--", setting.run_dir.features)
    raise UserError(
        f"extract.store: {counted(len(found.gone), 'shard')} of this run "
        f"{'is' if len(found.gone) == 1 else 'are'} in {there}, and not in {to.store.url}, which "
        "the recipe names now. Put the old value back; or copy all that is there to the new place "
        f"first, and nothing is made again; or, to make all of them again, `{remove}`."
    )
