"""What the extraction is told about places and devices: judged by its words alone."""

import re
from collections.abc import Iterator
from typing import Literal

from paceline.durable.store_words import OBJECT_SCHEMES
from paceline.masking import names_secret
from paceline.recipe.schema import ExtractRecipe, Recipe

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)


def is_object_store(url: str) -> bool:
    """Whether `extract.store` names a bucket, not a folder."""
    found = _SCHEME.fullmatch(url)
    return found is not None and found[1].lower() in OBJECT_SCHEMES


def resolved_codec(recipe: ExtractRecipe) -> Literal["none", "planes", "int8o"]:
    """The codec, `auto` resolved: `planes` pays where bytes travel and are billed."""
    if recipe.codec != "auto":
        return recipe.codec
    return "planes" if is_object_store(recipe.store) else "none"


def extract_problems(recipe: Recipe) -> Iterator[str]:
    """Everything impossible in the extraction's places, marks and devices, a sentence each."""
    extract = recipe.extract
    if extract.low_mark >= extract.high_mark:
        yield (
            f"extract.low_mark: {extract.low_mark:g} is not below extract.high_mark "
            f"{extract.high_mark:g}, so the work would stop and go on at every file. Give 0.7 and "
            "0.8, or others that lie apart."
        )
    yield from _store(extract)
    if extract.codec == "int8o" and extract.dtype == "float32":
        yield (
            "extract.codec: int8o keeps 8 bits of a value, so extract.dtype float32 says nothing. "
            "Use extract.dtype bfloat16."
        )
    yield from _devices(recipe)


def _store(extract: ExtractRecipe) -> Iterator[str]:
    found = _SCHEME.fullmatch(extract.store)
    if found is not None:
        scheme, rest = found[1].lower(), found[2]
        if scheme not in (*OBJECT_SCHEMES, "file"):
            yield (
                f'extract.store: "{extract.store}": no store `{scheme}://`. Give a folder, '
                f"file://, {', '.join(f'{s}://' for s in OBJECT_SCHEMES)}."
            )
        elif not rest.strip("/"):
            yield (
                f'extract.store: "{extract.store}" names no '
                f"{'folder' if scheme == 'file' else 'bucket'}."
            )
    for name in extract.store_options:
        if names_secret(name):
            yield (
                f"extract.store_options.{name}: credentials do not belong into a recipe, which is "
                "copied into every run. Put them into the environment (AWS_ACCESS_KEY_ID, "
                "AWS_SECRET_ACCESS_KEY, and so on)."
            )
    if extract.store_options and not is_object_store(extract.store):
        yield "extract.store_options: only object stores take options. Remove them."


def _devices(recipe: Recipe) -> Iterator[str]:
    devices = recipe.target.devices
    if len(set(devices)) != len(devices):
        yield f"target.devices: {list(devices)} names a GPU twice. Give each once."
    if devices and not recipe.extract.isolate:
        yield (
            "extract.isolate: false cannot serve target.devices: each GPU needs a process of its "
            "own. Set isolate to true, or give target.device."
        )
    if recipe.target.workers > 1 and not recipe.extract.isolate:
        yield (
            f"extract.isolate: false runs one worker, target.workers asks for "
            f"{recipe.target.workers}. Set isolate to true, or workers to 1."
        )
