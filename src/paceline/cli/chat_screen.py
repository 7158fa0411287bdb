"""What `paceline chat` shows: coloured on a terminal, bare text in a pipe."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from paceline.durable.errors import UserError
from paceline.watch.words import counted

_DEPTHS = ("", "cyan", "green", "bright_green", "yellow", "bright_yellow", "red", "magenta")
"""Styles by depth in the draft; what is deeper has the last."""


@dataclass(frozen=True)
class Turn:
    """What has come of an answer since the last one, and how it goes."""

    pieces: tuple[tuple[str, int], ...]
    """Text, and the depth in the draft at which it was accepted; 0 is the target's own."""
    rounds: int
    tokens: int
    """Committed by the rounds: without the first, which the prompt's pass gives, and with what
    the last one commits beyond the limit."""
    first: float
    """Seconds to the first token."""
    seconds: float
    """Since the first token."""

    @property
    def summary(self) -> str:
        """One line."""
        if not self.rounds:
            return f"first token after {self.first:.2f} s"
        rate = self.tokens / self.seconds if self.seconds else 0.0
        return (
            f"τ {self.tokens / self.rounds:.2f} in {counted(self.rounds, 'round')}, {rate:.1f} "
            f"tokens/s, the first token after {self.first:.2f} s"
        )


class Screen(Protocol):
    """Where turns come from, and answers go."""

    def loading(self, what: str) -> None:
        """Say what takes a while."""
        ...

    def ready(self, draft: str) -> None:
        """Say that it has begun, with a draft of this kind."""
        ...

    def lines(self) -> Iterator[str]:
        """What the user says, until there is no more."""
        ...

    def refuse(self, error: UserError) -> None:
        """Say why a turn cannot be, or raise it where nobody can say another."""
        ...

    def begin(self) -> None:
        """An answer begins."""
        ...

    def show(self, turn: Turn) -> None:
        """More of it."""
        ...

    def end(self) -> None:
        """It is whole."""
        ...


class PlainScreen:
    """Lines of stdin; answers on stdout, all else on stderr."""

    def __init__(self) -> None:
        self._summary = ""

    def loading(self, what: str) -> None:
        """Say what takes a while."""
        print(what, file=sys.stderr, flush=True)

    def ready(self, draft: str) -> None:
        """Nothing: the first answer says enough."""

    def lines(self) -> Iterator[str]:
        """The lines of stdin."""
        for line in sys.stdin:
            yield line.rstrip("\n")

    def refuse(self, error: UserError) -> None:
        """Raise it: what follows in a pipe builds on this turn."""
        raise error

    def begin(self) -> None:
        """Nothing."""

    def show(self, turn: Turn) -> None:
        """Write the text as it comes."""
        print("".join(text for text, _ in turn.pieces), end="", flush=True)
        self._summary = turn.summary

    def end(self) -> None:
        """End the answer's line."""
        print(flush=True)
        print(self._summary, file=sys.stderr, flush=True)


class TerminalScreen:
    """A conversation in colour."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._answer = Text()
        self._live: Live | None = None

    def loading(self, what: str) -> None:
        """Say what takes a while."""
        self._console.print(what, style="dim", markup=False)

    def ready(self, draft: str) -> None:
        """Say how it is drafted, and what the colours mean."""
        legend = Text(f"draft: {draft}; /new begins anew, Ctrl-D ends. Accepted at depth ", "dim")
        for depth, style in enumerate(_DEPTHS[1:], start=1):
            more = "+" if depth == len(_DEPTHS) - 1 else ""
            legend.append(f"{depth}{more} ", style)
        legend.append("; the target's own is plain", "dim")
        self._console.print(legend)

    def lines(self) -> Iterator[str]:
        """What is typed, until Ctrl-D."""
        while True:
            try:
                yield self._console.input("[bold]you> [/bold]")
            except EOFError:
                self._console.print()
                return

    def refuse(self, error: UserError) -> None:
        """Say it, and go on."""
        self._console.print(str(error), style="yellow", markup=False)

    def begin(self) -> None:
        """Draw an answer that grows."""
        self._answer = Text()
        self._live = Live(console=self._console, refresh_per_second=8, vertical_overflow="visible")
        self._live.start()

    def show(self, turn: Turn) -> None:
        """Draw what has come, and how it goes below it."""
        for text, depth in turn.pieces:
            self._answer.append(text, _DEPTHS[min(depth, len(_DEPTHS) - 1)])
        if self._live is not None:
            below = Text(f"\n{turn.summary}", "dim")
            self._live.update(Text.assemble(self._answer, below))

    def end(self) -> None:
        """Leave the answer as it stands."""
        if self._live is not None:
            self._live.stop()
            self._live = None
