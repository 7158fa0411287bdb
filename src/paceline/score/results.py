"""What scoring one prompt gives: the raw rounds, of which every number of the result is made."""

from dataclasses import dataclass

PLAIN = "plain"


def at_temperature(name: str, temperature: float) -> str:
    """The name of a method, or of plain decoding, at a temperature: `chain`, `chain@t0.7`."""
    return f"{name}@t{temperature:g}" if temperature else name


def chain_name(drafting: str) -> str:
    """The name of a chain that is drafted in another way than by the best tokens."""
    return f"chain-{drafting}"


@dataclass(frozen=True, kw_only=True)
class MethodResult:
    """One way of decoding one answer."""

    rounds: tuple[int, ...]
    how: str
    """`decoded`, or `walk`: computed from the plain answer."""
    identical: bool | None = None
    """Whether the tokens are those of plain decoding; None for a walk, and where they are only
    distributed as those."""
    divergence: int | None = None
    """First answer token that differs."""
    margin: float | None = None
    """How far the target's choice there was from another one, in units of logits."""
    walk_rounds: tuple[int, ...] | None = None
    """What the walk says about a decoded method."""
    cpu_seconds: dict[str, float] | None = None
    """By phase: prefill, draft, tree, verify, commit."""
    phase_seconds: dict[str, float] | None = None
    """The same in wall time, the device waited for; None where that was not measured."""
    wall_seconds: float | None = None
    """Of all rounds together."""


@dataclass(frozen=True, kw_only=True)
class PromptResult:
    """All ways of decoding one turn of one prompt, at one temperature."""

    prompt_id: str
    dataset: str
    domain: str
    """What the data set says that the prompt is about; the data set's name where it does not."""
    language: str
    """Of the prompt: ISO 639, or what else `paceline.rows.language` says."""
    turn: int
    """From 0; the context of a later turn holds the target's own answers before it."""
    temperature: float
    prompt_tokens: int
    """Of the whole context that the answer follows."""
    answer_ids: tuple[int, ...]
    finish: str
    plain_steps: int
    """Single-token passes that the plain timings cover."""
    plain_cpu_seconds: dict[str, float]
    plain_wall_seconds: float
    methods: dict[str, MethodResult]
    """By `at_temperature(method, temperature)`."""
    plain_phase_seconds: dict[str, float] | None = None
    """As those of a method."""
    text: str | None = None
    """What was asked in this turn, of prompts that are not in the corpus."""
