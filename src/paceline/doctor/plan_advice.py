"""What would make it fit: changes of the recipe, tried on the same arithmetic."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from paceline.durable.errors import PacelineError
from paceline.recipe.check import check_recipe
from paceline.recipe.extract_inputs import resolved_codec
from paceline.recipe.schema import Recipe
from paceline.watch.words import short_bytes

Change = tuple[str, Any]
"""A key of the recipe and a value."""

Series = tuple[Change, ...]
"""Values of one key, the mildest first."""

Need = Callable[[Recipe], int | None]
"""Bytes that a recipe needs; None where that is not known."""

_SMALLEST_TOKENS = 512
_SMALLEST_ANCHORS = 32
_SMALLEST_LOGITS = 1 << 20
_SMALLEST_SHARD = 8 << 20


def changed(recipe: Recipe, change: Change) -> Recipe:
    """The recipe with one key of a section set."""
    section, _, name = change[0].partition(".")
    part = dataclasses.replace(getattr(recipe, section), **{name: change[1]})
    return dataclasses.replace(recipe, **{section: part})


def mend(recipe: Recipe, series: Iterable[Series], need: Need, limit: int) -> tuple[str, ...]:
    """`key=value (bytes)` of each single change that fits; else of the strongest ones together.

    Each is the mildest of its series. Empty where nothing of it helps.
    """
    tried = list(series)
    single = [
        f"{_words(change)} ({short_bytes(size)})"
        for changes in tried
        for change, size in _first(recipe, changes, need, limit)
    ]
    if single:
        return tuple(single)
    together, words = recipe, list[str]()
    for changes in tried:
        legal = [change for change in changes if _is_legal(changed(together, change))]
        for change, size in _first(together, tuple(legal), need, limit):
            return (f"{' and '.join([*words, _words(change)])} together ({short_bytes(size)})",)
        if legal:
            together = changed(together, legal[-1])
            words.append(_words(legal[-1]))
    return ()


def _first(recipe: Recipe, changes: Series, need: Need, limit: int) -> Iterator[tuple[Change, int]]:
    for change in changes:
        asked = changed(recipe, change)
        size = need(asked) if _is_legal(asked) else None
        if size is not None and size <= limit:
            yield change, size
            return


def _is_legal(recipe: Recipe) -> bool:
    try:
        check_recipe(recipe)
    except PacelineError:
        return False
    return True


def _words(change: Change) -> str:
    key, value = change
    if value is None or isinstance(value, bool):
        return f"{key}={'null' if value is None else str(value).lower()}"
    return f"{key}={list(value) if isinstance(value, tuple) else value}"


def for_bytes(recipe: Recipe) -> Iterator[Series]:
    """Fewer bytes of hidden states."""
    codecs = ("none", "planes", "int8o")
    yield tuple(
        ("extract.codec", c) for c in codecs[codecs.index(resolved_codec(recipe.extract)) + 1 :]
    )
    if recipe.extract.dtype == "float32":
        yield (("extract.dtype", "bfloat16"),)
    yield _fewer_taps(recipe)
    if recipe.extract.last:
        yield (("extract.last", False),)


def _fewer_taps(recipe: Recipe) -> Series:
    taps = recipe.extract.taps
    if taps is None:
        return tuple(("extract.num_taps", n) for n in range(recipe.extract.num_taps - 1, 0, -1))
    return tuple(("extract.taps", taps[-n:]) for n in range(len(taps) - 1, 0, -1))


def for_checkpoints(recipe: Recipe) -> Iterator[Series]:
    """Fewer bytes of checkpoints."""
    kept = recipe.train.keep_checkpoints
    yield tuple(("train.keep_checkpoints", n) for n in range(kept - 1, 0, -1))
    yield _layers(recipe)


def for_shards(recipe: Recipe) -> Iterator[Series]:
    """Smaller shards; where one sample fills one, shorter samples."""
    yield _halved("extract.shard_bytes", recipe.extract.shard_bytes, _SMALLEST_SHARD)
    yield _halved("corpus.max_length", recipe.corpus.max_length, _SMALLEST_TOKENS)
    yield _fewer_taps(recipe)


def for_target(recipe: Recipe, *, on_cpu: bool) -> Iterator[Series]:
    """Less memory of a stage that runs the target."""
    if recipe.target.workers > 1 and not recipe.target.devices:
        yield tuple(("target.workers", n) for n in range(recipe.target.workers - 1, 0, -1))
    if recipe.target.dtype == "float32":
        yield (("target.dtype", "bfloat16"),)
    yield _halved("extract.batch_tokens", recipe.extract.batch_tokens, _SMALLEST_TOKENS)
    yield _halved("regenerate.group_size", recipe.regenerate.group_size, 1)
    if on_cpu:
        yield _halved("extract.shard_bytes", recipe.extract.shard_bytes, _SMALLEST_SHARD)


def for_training(recipe: Recipe) -> Iterator[Series]:
    """Less memory of the training."""
    train = recipe.train
    yield _halved("train.micro_batch_tokens", train.micro_batch_tokens, _SMALLEST_TOKENS)
    yield _halved("train.anchors", train.anchors, _SMALLEST_ANCHORS)
    yield _halved("train.loss_chunk", train.loss_chunk, _SMALLEST_LOGITS)
    yield _layers(recipe)


def _layers(recipe: Recipe) -> Series:
    if recipe.drafter.warm_start is not None or recipe.drafter.layer_types is not None:
        return ()
    return tuple(("drafter.layers", n) for n in range(recipe.drafter.layers - 1, 0, -1))


def _halved(key: str, value: int, smallest: int) -> Series:
    found = []
    while value // 2 >= smallest:
        value //= 2
        found.append((key, value))
    return tuple(found)
