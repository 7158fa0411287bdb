"""The files that a drafter's recipe names beside the corpus: a drafter to start from, and texts."""

from collections.abc import Iterator
from pathlib import Path

from paceline.durable.errors import IntegrityError
from paceline.recipe.fingerprint import Fields, digest_file, flatten
from paceline.recipe.schema import DrafterRecipe
from paceline.recipe.stage import read_record

TEXT_SUFFIXES = (".txt", ".md")
ROW_SUFFIXES = (".jsonl", ".ndjson", ".json")
_DRAFTER_FILES = {"config": "config.json", "weights": "model.safetensors"}


def drafter_input_fields(recipe: DrafterRecipe) -> Fields:
    """Contents of these files, whatever their paths; reads them.

    Raises DataError where one is missing.
    """
    fields: Fields = {}
    if recipe.vocab_text:
        texts = [{"content": digest_file(Path(path))} for path in recipe.vocab_text]
        fields |= flatten({"vocab_text": texts})
    if recipe.warm_start is not None:
        folder = Path(recipe.warm_start)
        files = {key: digest_file(folder / name) for key, name in _DRAFTER_FILES.items()}
        fields |= flatten({"warm_start": files})
    return fields


def drafter_input_problems(recipe: DrafterRecipe) -> Iterator[str]:
    """What the recipe says of these files and cannot mean, a line each; touches none of them."""
    for number, path in enumerate(recipe.vocab_text):
        key = f"drafter.vocab_text.{number}"
        if not path:
            yield f"{key}: empty. Give a text or JSONL file."
        elif Path(path).suffix.lower() not in (*TEXT_SUFFIXES, *ROW_SUFFIXES):
            yield (
                f"{key}: {path}: unknown form {Path(path).suffix!r}. Give .txt or .md (plain "
                "text), .jsonl or .json (rows)."
            )
    if recipe.warm_start == "":
        yield "drafter.warm_start: empty. Give the folder of a drafter, or null."
    if recipe.vocab_text and recipe.warm_start is not None:
        yield (
            "drafter.vocab_text: a warm start keeps the vocabulary of its source, so nothing "
            "would be counted. Leave out one of the two."
        )
    elif recipe.vocab_text and recipe.draft_vocab is None:
        yield (
            "drafter.vocab_text: counted to choose the tokens of drafter.draft_vocab, which is "
            "null. Give a number of tokens there, such as 32000, or leave the texts out."
        )


def warm_start_problem(folder: Path) -> str | None:
    """Why there is no drafter in `folder`, with the one that may be meant; None where there is.

    Looks at names; of a run it reads the record of its training.
    """
    if not folder.is_dir():
        return "a file, not a drafter's folder" if folder.is_file() else "no such folder"
    missing = [name for name in _DRAFTER_FILES.values() if not (folder / name).is_file()]
    if not missing:
        return None
    for checkpoints in (folder / "checkpoints", folder):
        found = sorted(p.name for p in checkpoints.glob("step_*[0-9]") if p.is_dir())
        if found:
            best = _best(checkpoints)
            if best is not None:
                return f"a run, not a drafter. Name a checkpoint of it; its best is {best}"
            return (
                f"a run, not a drafter, and its training has not ended. Name a checkpoint of it "
                f"({checkpoints / found[0]} to {found[-1]})"
            )
    return f"no drafter there ({' and '.join(missing)} missing)"


def _best(checkpoints: Path) -> Path | None:
    try:
        record = read_record(checkpoints, "train")
    except IntegrityError:
        return None
    if record is None or record.outputs is None or "best" not in record.report:
        return None
    return checkpoints / record.report["best"]
