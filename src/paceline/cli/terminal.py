"""What a command says on stdout: rich on a terminal, plain lines in a file or a pipe."""

import sys
from typing import TYPE_CHECKING

from paceline.watch.words import visible

if TYPE_CHECKING:
    from rich.text import Text


def header(text: str) -> None:
    """The title of what comes next."""
    text = visible(text)
    if sys.stdout.isatty():
        _console_print(f"\n{text}", style="bold cyan")
    else:
        print(f"== {text}", flush=True)


def say(text: str) -> None:
    """One sentence."""
    text = visible(text)
    if sys.stdout.isatty():
        _console_print(text)
    else:
        print(text, flush=True)


def show(text: "Text", *, marked: str) -> None:
    """Styled text; where stdout is no terminal, spans of the style `marked` stand in ⟦ ⟧."""
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(text, soft_wrap=True)
        return
    print(marked_text(text, marked=marked), flush=True)


def marked_text(text: "Text", *, marked: str) -> str:
    """Without colours: spans of the style `marked` stand in ⟦ ⟧."""
    plain, end = "", 0
    for span in text.spans:
        if span.style == marked:
            plain += f"{text.plain[end : span.start]}⟦{text.plain[span.start : span.end]}⟧"
            end = span.end
    return plain + text.plain[end:]


def _console_print(text: str, style: str | None = None) -> None:
    from rich.console import Console

    # Sentences quote paths and lists, which are no markup.
    Console().print(text, style=style, markup=False, highlight=False, soft_wrap=True)
