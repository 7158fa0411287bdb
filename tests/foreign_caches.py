"""Caches as SpecForge and speculators write them, of a tiny target's own hidden states."""

import gzip
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from paceline.extract.stage import open_setting
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe
from paceline.target.load import load_target
from paceline.types.row_index import open_rows
from paceline.types.rows import read_rows
from paceline.types.sample import batch_of


@dataclass(frozen=True)
class TrueStates:
    """A sample, and what the target makes of it in the batch that the extraction puts it in."""

    sample_id: str
    input_ids: torch.Tensor
    """int64 [T]."""
    layers: torch.Tensor
    """fp32 [T, L - 1, H], the outputs after layers 0 to L - 2."""
    un_normed: torch.Tensor
    """fp32 [T, H], the output after the last layer."""
    normed: torch.Tensor
    """fp32 [T, H]."""


def true_states(recipe: Recipe, run_dir: RunDir) -> list[TrueStates]:
    """All states of all samples, captured as `paceline extract` captures them, in corpus order."""
    setting, _, _ = open_setting(recipe, run_dir)
    rows = open_rows(
        setting.source,
        setting.corpus_digest,
        vocab_size=setting.spec.vocab_size,
        max_position=setting.spec.max_position,
        index=run_dir.root / "states.index",
    )
    target = load_target(recipe.target)
    caught: list[torch.Tensor] = []
    hook = target.decoder.norm.register_forward_pre_hook(lambda _m, args: caught.append(args[0]))
    found: dict[int, TrueStates] = {}
    for unit in setting.layout.units(rows, recipe.extract.batch_tokens):
        for members in unit.batches:
            batch = batch_of(read_rows(setting.source, rows.positions[list(members)].tolist()))
            caught.clear()
            states = target.capture(batch, tuple(range(setting.spec.num_layers - 1)), last=True)
            bounds = batch.offsets.tolist()
            for at, sample in enumerate(members):
                span = slice(bounds[at], bounds[at + 1])
                found[sample] = TrueStates(
                    batch.sample_ids[at],
                    batch.input_ids[span].clone(),
                    states.taps[span].clone(),
                    caught[0][at, : bounds[at + 1] - bounds[at]].clone(),
                    states.last[span].clone(),
                )
    hook.remove()
    return [found[sample] for sample in sorted(found)]


def specforge_content(
    states: TrueStates,
    own_layers: Sequence[int],
    *,
    pad: int = 0,
    last: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """A file's dict, as of EAGLE-3, padded behind by `pad` tokens as a batch's shorter samples."""
    taps = states.layers[:, list(own_layers)].flatten(1)
    kept = states.normed if last is None else last
    zeros = torch.zeros(pad, dtype=torch.int64)

    def padded(values: torch.Tensor) -> torch.Tensor:
        more = torch.full((pad, values.shape[1]), 7.0)
        return torch.cat([values, more]).unsqueeze(0).to(dtype)

    return {
        "input_ids": torch.cat([states.input_ids, zeros]),
        "loss_mask": torch.cat([torch.ones_like(states.input_ids), zeros]),
        "hidden_state": padded(kept),
        "aux_hidden_state": padded(taps),
    }


def write_specforge(
    root: Path,
    all_states: Sequence[TrueStates],
    own_layers: Sequence[int] = (1, 3, 4),
    *,
    group: int = 7,
    batch: int = 1,
    compressed: bool = False,
    **options: Any,
) -> Path:
    """`rows_<a>-<b>/data_<i>.ckpt`; samples of a `batch` are padded to the longest of it."""
    for number, states in enumerate(all_states):
        of_batch = all_states[number // batch * batch :][:batch]
        pad = max(len(s.input_ids) for s in of_batch) - len(states.input_ids)
        start = number // group * group
        folder = root / f"rows_{start}-{start + group}"
        folder.mkdir(parents=True, exist_ok=True)
        content = specforge_content(states, own_layers, pad=pad, **options)
        path = folder / f"data_{number}.ckpt"
        if compressed:
            buffer = io.BytesIO()
            torch.save(content, buffer)
            path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(buffer.getvalue()))
        else:
            torch.save(content, path)
    return root


def write_specforge_dflash(
    root: Path, all_states: Sequence[TrueStates], own_layers: Sequence[int]
) -> Path:
    """Files of its DFlash family: two dimensions, other names."""
    root.mkdir(parents=True)
    for number, states in enumerate(all_states):
        content = {
            "input_ids": states.input_ids,
            "loss_mask": torch.ones_like(states.input_ids),
            "hidden_states": states.layers[:, list(own_layers)].flatten(1),
            "target_last_hidden_states": states.normed,
        }
        torch.save(content, root / f"data_{number}.ckpt")
    return root


def write_speculators(
    root: Path,
    all_states: Sequence[TrueStates],
    input_of: Sequence[int] = (2, 4, 5),
    *,
    last: bool = True,
) -> Path:
    """`hs_<i>.safetensors` as vLLM's connector writes them: inputs of layers, un-normed last."""
    root.mkdir(parents=True)
    for number, states in enumerate(all_states):
        slots = [states.layers[:, layer - 1] for layer in input_of]
        slots += [states.un_normed] if last else []
        save_file(
            {"hidden_states": torch.stack(slots, dim=1), "token_ids": states.input_ids},
            root / f"hs_{number}.safetensors",
        )
    return root


def write_speculators_pt(
    root: Path, all_states: Sequence[TrueStates], own_layers: Sequence[int] = (2, 4, 5)
) -> Path:
    """`data_<i>.pt` as speculators wrote before: a list of tensors, and what it left beside."""
    root.mkdir(parents=True)
    for number, states in enumerate(all_states):
        slots = [states.layers[:, layer].contiguous() for layer in own_layers]
        content = {
            "input_ids": states.input_ids,
            "hidden_states": [*slots, states.un_normed],
            "loss_mask": torch.ones_like(states.input_ids),
        }
        torch.save(content, root / f"data_{number}.pt")
    (root / "data_config.json").write_text("{}")
    return root
