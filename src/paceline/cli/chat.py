"""`paceline chat`."""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from paceline.cli.chat_screen import PlainScreen, Screen, TerminalScreen, Turn
from paceline.durable.errors import DataError, UserError
from paceline.recipe.load import load_recipe
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe
from paceline.recipe.stage import read_record

if TYPE_CHECKING:
    from paceline.decode.pair import Pair

_NEW = "/new"


@dataclass(frozen=True, kw_only=True)
class Args:
    """Talk to the target with the drafter at work: each token coloured by how deep in the draft it
    was accepted, the acceptance length τ and the tokens per second as they come. The answers are
    the target's own, whatever the drafter proposes.

    On a terminal: a line is a turn of a conversation, `/new` begins another, Ctrl-D ends. With
    `--plain`, or where stdin is no terminal: every line of stdin is a turn, stdout has the answers
    alone, and stderr what they took.

    Reads: the run's recipe, its best checkpoint, the target model.

    Writes: nothing.

    Example: paceline chat runs/demo
    """  # noqa: D205

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run directory."""
    checkpoint: Annotated[
        Path | None,
        tyro.conf.arg(metavar="PATH", help_behavior_hint="(default: the best of the run)"),
    ] = None
    """Another drafter's checkpoint folder."""
    budget: Annotated[
        int | None,
        tyro.conf.arg(metavar="M", help_behavior_hint="(default: the first of score.budgets)"),
    ] = None
    """Nodes of the draft tree; 0 drafts a chain."""
    max_new_tokens: Annotated[int, tyro.conf.arg(metavar="N")] = 512
    """Tokens of an answer."""
    temperature: Annotated[float, tyro.conf.arg(metavar="T")] = 0.0
    """0 is greedy."""
    top_k: Annotated[int, tyro.conf.arg(metavar="K")] = 0
    """Most probable tokens that are kept; 0 keeps all."""
    top_p: Annotated[float, tyro.conf.arg(metavar="P")] = 1.0
    """Share of the probability that is kept."""
    min_p: Annotated[float, tyro.conf.arg(metavar="P")] = 0.0
    """Least probability that is kept, of the highest."""
    seed: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """Of what is drawn."""
    system: Annotated[
        str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="(default: none)")
    ] = None
    """A system prompt."""
    device: Annotated[
        str | None, tyro.conf.arg(metavar="DEVICE", help_behavior_hint="(default: the recipe's)")
    ] = None
    """Where target and drafter run: cpu, cuda, cuda:1."""
    plain: Annotated[
        tyro.conf.FlagCreatePairsOff[bool],
        tyro.conf.arg(help_behavior_hint="(default: where stdin or stdout is no terminal)"),
    ] = False
    """No colours and no prompt, for pipes."""


def run(args: Args) -> int:
    """Run the command; the exit code."""
    recipe = _recipe_of(args)
    checkpoint = args.checkpoint or _best(RunDir(args.run))
    sampling = _checked(args)
    is_plain = args.plain or not (sys.stdin.isatty() and sys.stdout.isatty())
    screen: Screen = PlainScreen() if is_plain else TerminalScreen()
    screen.loading(f"loading {recipe.target.path} and {checkpoint}")
    from paceline.decode.pair import load_pair

    _use_threads(recipe)
    pair = load_pair(recipe.target, checkpoint)
    budget = args.budget if args.budget is not None else next(iter(recipe.score.budgets), 0)
    chat = _Chat(recipe, pair, args, sampling, budget or None)
    drafted = pair.drafter.config.block_size - 1
    screen.ready(f"a tree of {budget}" if budget else f"a chain of {drafted}")
    for line in screen.lines():
        if line.strip() == _NEW:
            chat.restart()
            continue
        if not line.strip():
            continue
        try:
            ids = chat.ask(line)
        except UserError as error:
            screen.refuse(error)
            continue
        screen.begin()
        try:
            for turn in chat.answer(ids):
                screen.show(turn)
        finally:
            screen.end()
    return 0


class _Chat:
    """A conversation."""

    def __init__(
        self, recipe: Recipe, pair: "Pair", args: Args, sampling: Any, budget: int | None
    ) -> None:
        from paceline.corpus.mask import renderer_of
        from paceline.target.chat import ChatTemplate

        self._pair, self._args, self._sampling, self._budget = pair, args, sampling, budget
        self._tokenizer = renderer_of(recipe).tokenizer
        self._template = ChatTemplate(self._tokenizer, recipe.corpus.template_args)
        self._said = 0
        self.restart()

    def restart(self) -> None:
        """Begin another conversation."""
        system = self._args.system
        self._messages = [{"role": "system", "content": system}] if system else []

    def ask(self, text: str) -> list[int]:
        """The prompt with a new turn. Raises UserError for one too long, which is forgotten."""
        pair, limit = self._pair, self._args.max_new_tokens
        self._messages.append({"role": "user", "content": text})
        ids = self._prompt()
        room = pair.target.spec.max_position - limit - pair.drafter.config.block_size
        if len(ids) > room:
            self._messages.pop()
            raise UserError(
                f"the conversation has {len(ids)} tokens, and the target has room for {room} "
                f"beside an answer of {limit}. Begin another with {_NEW}, or lower "
                "--max-new-tokens."
            )
        return ids

    def answer(self, ids: list[int]) -> Iterator[Turn]:
        """The answer to a prompt, round by round."""
        from paceline.decode.sampling import PositionKeyedNoise
        from paceline.decode.speculate import Decoding
        from paceline.decode.text import GrowingText

        pair, limit = self._pair, self._args.max_new_tokens
        growing, eos = GrowingText(self._tokenizer), pair.eos_ids
        start = time.perf_counter()
        decoding = Decoding(
            pair.target,
            pair.drafter,
            pair.head,
            [ids],
            max_new_tokens=limit,
            eos_ids=eos,
            budget=self._budget,
            sampling=self._sampling,
            noises=[PositionKeyedNoise(self._args.seed, self._said)],
        )
        first = time.perf_counter()
        self._said += 1
        pieces = [(growing.add(token), 0) for token in decoding.answer(0) if token not in eos]
        said, rounds, tokens = "".join(piece for piece, _ in pieces), 0, 0
        yield Turn(tuple(pieces), 0, 0, first - start, 0.0)
        while not decoding.is_done:
            [found] = decoding.step()
            rounds, tokens = rounds + 1, tokens + len(found.tokens)
            pieces = []
            # The last round may go beyond the limit, of which the answer has nothing.
            room = limit - 1 - (tokens - len(found.tokens))
            for place, token in enumerate(found.tokens[:room], start=1):
                if token not in eos:
                    # The last one is the target's own, unless an end cut the round.
                    depth = place if place <= found.accepted else 0
                    pieces.append((growing.add(token), depth))
            said += "".join(piece for piece, _ in pieces)
            yield Turn(tuple(pieces), rounds, tokens, first - start, time.perf_counter() - first)
        rest = growing.end()
        self._messages.append({"role": "assistant", "content": said + rest})
        seconds = time.perf_counter() - first
        yield Turn(((rest, 0),) if rest else (), rounds, tokens, first - start, seconds)

    def _prompt(self) -> list[int]:
        text = self._template.text(self._messages, None, generation_prompt=True)
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def _recipe_of(args: Args) -> Recipe:
    path = RunDir(args.run).recipe
    if not path.is_file():
        raise UserError(f"{args.run}: no run directory (it has no recipe.yaml).")
    recipe = load_recipe(path)
    if args.device is not None:
        recipe = replace(recipe, target=replace(recipe.target, device=args.device))
    return recipe


def _best(run_dir: RunDir) -> Path:
    stored = read_record(run_dir.checkpoints, "train")
    best = None if stored is None else stored.report.get("best")
    if best is None:
        raise DataError(
            f"{run_dir.checkpoints}: no drafter whose training has ended. Run `paceline train` "
            "first, or name a checkpoint with --checkpoint."
        )
    return run_dir.checkpoints / str(best)


def _checked(args: Args) -> Any:
    from paceline.decode.sampling import Sampling

    for name in ("max_new_tokens", "budget"):
        least = 0 if name == "budget" else 1
        value = getattr(args, name)
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} {value} must be {least} or more.")
    try:
        return Sampling(
            temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p
        )
    except ValueError as error:
        raise UserError(f"{error}.") from error


def _use_threads(recipe: Recipe) -> None:
    import torch

    # One conversation has the cores of all the recipe's processes.
    torch.set_num_threads(max(1, recipe.target.workers * recipe.target.threads))
