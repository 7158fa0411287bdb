"""The chat template and the loss mask that comes of it, seen on the first row of the data."""

from collections.abc import Iterator

from paceline.doctor.findings import Finder, Finding
from paceline.doctor.world import MaskPreview, World
from paceline.durable.errors import PacelineError
from paceline.watch.words import command_line, counted

_FIND = Finder("template")
_SHOWN = 600
"""Characters of the preview; of a longer one the middle is left out."""


def check(world: World) -> Iterator[Finding]:
    """Render the first row, and judge what of it would be trained on."""
    try:
        preview = world.first_row(world.recipe)
    except (PacelineError, OSError) as error:
        yield _FIND.error(str(error), "no row could be prepared", "mend what the message names")
        return
    look = command_line("paceline", "prepare", world.recipe_path, "--preview")
    if not preview.row:
        reasons = "; ".join(dict.fromkeys(preview.rejected)) or "it has no rows"
        yield _FIND.error(
            f"{preview.source}: none of {counted(len(preview.rejected), 'row')} can be used "
            f"({_cut(reasons)})",
            "nothing would be left to train on",
            look,
        )
        return
    if preview.rejected:
        yield _FIND.warning(
            f"{preview.source}: the first {counted(len(preview.rejected), 'row')} cannot be used "
            f"({_cut('; '.join(dict.fromkeys(preview.rejected)))})",
            "rows like them are left out of the training",
            look,
        )
    yield _judged(preview, look)


def _judged(preview: MaskPreview, look: str) -> Finding:
    shown = (
        f"row {preview.row} of {preview.source}, {counted(preview.tokens, 'token')}: "
        f"{_cut(preview.text)}"
    )
    if preview.is_prompt:
        return _FIND.ok(f"{shown} (a prompt: the target answers it itself)")
    if preview.trained in (0, preview.tokens):
        which = "no token" if not preview.trained else "every token"
        return _FIND.error(
            f"{which} would be trained on: {shown}",
            "prompt and answer are not told apart",
            look,
        )
    return _FIND.ok(f"{preview.trained} trained (between ⟦ and ⟧): {shown}")


def _cut(text: str) -> str:
    """On one line, and not longer than one is read."""
    line = text.replace("\n", "↵")
    if len(line) <= _SHOWN:
        return line
    return f"{line[: _SHOWN // 2]} … {line[-_SHOWN // 2 :]}"
