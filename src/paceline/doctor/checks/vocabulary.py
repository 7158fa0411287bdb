"""The target's files are whole, its tokenizer fits its lm_head, and the mask token is free."""

from collections.abc import Iterator
from pathlib import Path

from paceline.doctor.findings import Finder, Finding
from paceline.doctor.safetensors_header import read_header
from paceline.doctor.world import World
from paceline.durable.errors import PacelineError, TargetError
from paceline.target.fit import vocabulary_problems
from paceline.target.folder import ModelFolder
from paceline.target.spec import read_spec
from paceline.watch.words import command_line, counted

_FIND = Finder("vocabulary")
_LM_HEADS = ("lm_head.weight", "language_model.lm_head.weight")
_EMBEDDINGS = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
)


def check(world: World) -> Iterator[Finding]:
    """The rows of lm_head and embedding, as the weights have them, against tokenizer and config."""
    path = Path(world.recipe.target.path)
    try:
        folder = ModelFolder(path)
        size = folder.tokenizer_size()
        rows = _rows(folder)
        config = folder.get("vocab_size")
    except (PacelineError, OSError) as error:
        yield _FIND.error(str(error), "the target cannot be loaded", command_line("ls", "-l", path))
        return
    yield from _incomplete(folder)
    for name, count in rows.items():
        if count != config:
            yield _FIND.error(
                f"{name} has {count} rows, config.json says vocab_size {config}",
                "weights and config do not belong together",
                f"fetch the target again into {path}",
            )
    smallest = min([config, *rows.values()])
    if size is None:
        yield _FIND.note(f"{path} has no tokenizer.json, so the tokenizer's size was not compared")
    elif size > smallest:
        yield _FIND.error(
            f"tokenizer.json has {size} ids, lm_head {smallest} rows",
            "tokens without a row cannot be embedded or predicted: tokenizer and weights do not "
            "belong together",
            f"put the target's own tokenizer files into {path}",
        )
    else:
        spare = smallest - size
        padding = f", {counted(spare, 'padding row')}" if spare else ""
        yield _FIND.ok(f"tokenizer {size} ids, lm_head {smallest} rows{padding}")
    try:
        spec = read_spec(path, identify=False)
    except TargetError as error:
        if size is None or size <= smallest:  # Else it was said.
            yield _FIND.error(
                str(error), "the target cannot be loaded", f"fetch the target again into {path}"
            )
        return
    for problem in vocabulary_problems(world.recipe, spec):
        yield _FIND.error(
            problem,
            "every command would refuse the recipe",
            f"--set drafter.draft_vocab={spec.tokenizer_size}",
        )


def _rows(folder: ModelFolder) -> dict[str, int]:
    """Rows of lm_head and of the embedding, by name; only those that the weights have."""
    found: dict[str, int] = {}
    for file in sorted(set(folder.weights().values())):
        for name, shape in read_header(file).shapes.items():
            if shape and name in (*_LM_HEADS, *_EMBEDDINGS):
                found[name] = shape[0]
    return found


def _incomplete(folder: ModelFolder) -> Iterator[Finding]:
    """Weight files that are shorter or longer than their headers say: a broken download."""
    for file in sorted(set(folder.weights().values())):
        expected, size = read_header(file).size, file.stat().st_size
        if size != expected:
            yield _FIND.error(
                f"{file}: {size:,} bytes, its header says {expected:,}",
                "the target cannot be loaded",
                f"fetch {file.name} again",
            )
