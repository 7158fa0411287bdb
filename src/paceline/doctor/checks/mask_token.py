"""The mask token: a row of the embedding that stands for nothing else."""

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from paceline.doctor.findings import Finder, Finding
from paceline.doctor.world import World
from paceline.durable.errors import PacelineError
from paceline.target.fit import mask_problem
from paceline.target.spec import TargetSpec, read_spec
from paceline.target.template import special_token_ids

_FIND = Finder("mask token")
_LEAVE_OUT = "--set drafter.mask_token_id=null"


class _Ids(msgspec.Struct):
    input_ids: list[int]


class _Config(msgspec.Struct):
    mask_token_id: int


def check(world: World) -> Iterator[Finding]:
    """Legal in the target, and absent from the corpus as far as there is one."""
    try:
        spec = read_spec(Path(world.recipe.target.path), identify=False)
        special = special_token_ids(Path(world.recipe.target.path))
        token, key, mend = _asked(world)
    except (PacelineError, OSError, msgspec.MsgspecError) as error:
        yield _FIND.note(f"not looked at: {error}")
        return
    if token is None:
        yield from _chosen(spec, special)
        return
    problem = mask_problem(token, spec)
    if problem:
        yield _FIND.error(
            f"{key}: {token} {problem}",
            "the drafter could not tell a masked slot from that token, so a run refuses it",
            mend,
        )
        return
    seen, samples, is_all = _occurs(token, world)
    if seen:
        yield _FIND.error(
            f"{key}: {token} occurs in the corpus (sample {seen})",
            "the drafter could not tell a masked slot from that token; the training would refuse "
            "it, after the extraction",
            mend,
        )
        return
    if token < spec.tokenizer_size and token not in special:
        yield _FIND.warning(
            f"{key}: {token} is an ordinary token of the tokenizer",
            "any text may have it, and then the training refuses it",
            mend,
        )
    kind = "a special token" if token in special else "a padding row"
    looked = f"in {'all' if is_all else 'the first'} {samples:,} samples" if samples else "yet"
    if token >= spec.tokenizer_size or token in special:
        yield _FIND.ok(f"{key}: {token} is {kind}, and occurs nowhere {looked}")


def _asked(world: World) -> tuple[int | None, str, str]:
    """The token, the key that names it, and what to do about a wrong one."""
    drafter = world.recipe.drafter
    if drafter.mask_token_id is not None:
        return drafter.mask_token_id, "drafter.mask_token_id", _LEAVE_OUT
    if drafter.warm_start:
        config = msgspec.json.decode(
            (Path(drafter.warm_start) / "config.json").read_bytes(), type=_Config
        )
        return config.mask_token_id, "drafter.warm_start", "--set drafter.warm_start=null"
    return None, "", ""


def _chosen(spec: TargetSpec, special: tuple[int, ...]) -> Iterator[Finding]:
    if spec.tokenizer_size < spec.vocab_size:
        yield _FIND.ok(f"row {spec.tokenizer_size}, behind the tokenizer's last token, is taken")
        return
    free = [token for token in special if not mask_problem(token, spec)]
    if free:
        yield _FIND.ok(
            f"no padding rows; one of {len(free)} special tokens that the corpus lacks is taken"
        )
        return
    yield _FIND.warning(
        "the target has neither a padding row nor a spare special token",
        "an ordinary token that the corpus lacks has to be taken, and a text that has it is then "
        "misread when the drafter is served",
        "set drafter.mask_token_id to a token that no text of yours has",
    )


def _occurs(token: int, world: World) -> tuple[str, int, bool]:
    """A sample that has the token ("" where none), samples looked at, and whether those are all.

    A large corpus is read for half of the time that a check has.
    """
    path = world.run_dir.samples(world.recipe)
    path = path if path.is_file() else world.run_dir.prepared
    if not path.is_file():
        return "", 0, False
    end = time.monotonic() + world.seconds / 2
    decoder = msgspec.json.Decoder(_Ids)
    count = 0
    with path.open("rb") as lines:
        for line in lines:
            if token in decoder.decode(line).input_ids:
                sample = msgspec.json.decode(line, type=_Named)
                return sample.sample_id, count + 1, False
            count += 1
            if time.monotonic() > end:
                return "", count, False
    return "", count, True


class _Named(msgspec.Struct):
    sample_id: str
