"""How messages put things: counts, times, methods in order, commands to copy."""

import shlex
import unicodedata
from collections.abc import Iterable, Mapping
from pathlib import Path

_TENTHS_BELOW = 10

_SPANS = ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s"))


def visible(text: str) -> str:
    """The text with control characters spelled out, all but line feeds and tabs.

    What stands in data, or is said by a server, must not steer the terminal that it is shown on.
    """
    if text.isprintable():
        return text
    return "".join(
        repr(c)[1:-1] if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text
    )


def counted(count: int, noun: str) -> str:
    """Such as `1 row`, `1,234 rows`, `2 processes`; `noun` is the singular."""
    return f"{count:,} {named(count, noun)}"


def named(count: int, noun: str) -> str:
    """The noun alone, in the plural unless the count is 1."""
    if count == 1:
        return noun
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"


def duration(seconds: float) -> str:
    """Such as `4.2 s`, `3 min 05 s`, `2 h 10 min`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes:02d} min"


def number(value: float) -> str:
    """Such as `12`, `1,234`, `12.3 M`."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:,.0f}" if value >= _TENTHS_BELOW or value == int(value) else f"{value:.1f}"


def span(seconds: float) -> str:
    """Such as `0.4s`, `12s`, `3m05s`, `2h10m`, `3d04h`."""
    whole = max(0, round(seconds))
    for size, unit, part, below in _SPANS:
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // part:02d}{below}"
    return f"{whole}s" if seconds >= _TENTHS_BELOW else f"{max(0.0, seconds):.1f}s"


def short_bytes(size: float) -> str:
    """`3.93 TB`; plain bytes below 1000."""
    return bytes_text(size).partition(" (")[0]


def bytes_text(size: float) -> str:
    """`3.93 TB (3.58 TiB)`; plain bytes below 1000."""
    if size < 1000:
        return f"{size:.0f} B"
    power = 1
    while size >= 1000 ** (power + 1) and power < 5:
        power += 1
    unit = "kMGTP"[power - 1]
    return f"{size / 1000**power:.2f} {unit}B ({size / 1024**power:.2f} {unit.upper()}iB)"


def command_line(*words: str | Path) -> str:
    """A command as a shell takes it, whatever characters its paths have."""
    return shlex.join(map(str, words))


def ordered(methods: Iterable[str]) -> list[str]:
    """Method names: `chain`, then trees by rising budget, then what else there is."""

    def key(name: str) -> tuple[int, int, str]:
        head, _, budget = name.rpartition("-")
        if name == "chain":
            return (0, 0, name)
        return (1, int(budget), head) if budget.isdecimal() else (2, 0, name)

    return sorted(methods, key=key)


def speed_advice(costs: Mapping[str, tuple[float, float]]) -> list[str]:
    """Why methods lose time, a sentence for each cause; none where all are faster than plain.

    Args:
        costs: by method, the measured speed-up and the one projected to a verification that costs
            a single plain step.

    """
    slow = ordered(name for name, (measured, _) in costs.items() if measured < 1.0)
    weak = [name for name in slow if costs[name][1] < 1.0]
    dear = [name for name in slow if name not in weak]
    sentences = []
    if weak:
        sentences.append(
            f"{', '.join(weak)}: slower than plain decoding even where a verification costs a "
            "single plain step, because too little is accepted for what drafting costs. Train "
            "longer or on more data, or draft with fewer layers."
        )
    if dear:
        sentences.append(
            f"{', '.join(dear)}: slower than plain decoding because a verification costs more than "
            "one plain step on this machine. The last columns say what the same τ gives where it "
            "is cheaper."
        )
    return sentences
