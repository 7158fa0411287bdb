"""A DFlash drafter trained by speculators, as a run that `paceline score` takes.

Its model, initial weights, loss, batches, optimizer and settings are its own, with the defaults of
`speculators train --speculator-type dflash` in version 0.9.0: noise to start from, cross-entropy
weighted by D-PACE (alpha 0.5), Muon on matrices and AdamW on the rest, both at 1e-3, a rate that
falls linearly after 1 % of warm-up, sliding windows of 2048 that are causal inside a block, and the
last weights as the result. What differs:

- Layers, block size and mask token are those of Paceline's drafter, and a batch holds as many
  tokens and anchors as one of Paceline's: with its 8192 and 512 there would be a few steps in all.
- float32, `sdpa` and the `eager` loss: bfloat16, flex attention and Triton are for a GPU.
- Its loop asks for a GPU, so the steps are driven here; the rate goes by the share of the budget
  that is spent, which is the share of steps where all cost the same.
- The answers are the target's own greedy ones, so its argmax is the token that follows: that token
  takes the place of the `last` vector, and a look-up that of lm_head. It saves speculators a
  product with the whole vocabulary in each step.
"""

import argparse
import importlib
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.drafter.checkpoint import CONFIG, WEIGHTS, read_config, save_drafter
from paceline.drafter.config import DrafterConfig
from paceline.drafter.dflash import DFlash
from paceline.features.reader import FeatureReader
from paceline.recipe.objective_terms import ObjectiveTerm
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe
from paceline.recipe.stage import StageRecord, read_record
from paceline.target.head import TargetHead
from paceline.train.batch import Anchored, pack
from paceline.train.checkpoint import step_folder
from paceline.train.objective import block_loss
from paceline.types.layers import LayerConvention
from paceline.types.sample import Split, read_samples

WARM_UP, CLIP = 0.01, 1.0
LOSS_TOLERANCE = 1e-4

Batch = dict[str, Any]


class NextToken(nn.Module):
    """Stands for lm_head: logits whose argmax is the token id that a `last` vector holds."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def forward(self, last: torch.Tensor) -> torch.Tensor:
        """[..., H] to [..., V]."""
        logits = last.new_zeros((*last.shape[:-1], self._size))
        return logits.scatter_(-1, last[..., :1].long(), 1.0)


def trained_peer(recipe: Recipe, ours: RunDir, theirs: RunDir, budget: float) -> dict[str, Any]:
    """What the training in `theirs` took, now or before: steps, epochs, loss.

    Args:
        recipe: of the run `ours`, whose drafter gives the config.
        ours: a run whose training has ended.
        theirs: a run over the same features.
        budget: CPU seconds.

    """
    torch.set_num_threads(1)
    reader = FeatureReader(theirs.features)
    peer = f"speculators {metadata.version('speculators')}"
    trained = read_record(ours.checkpoints, "train")
    if trained is None or trained.outputs is None:
        raise AssertionError(f"{ours.checkpoints}: the training has not ended")
    # `paceline score` asks whether this is the training of its recipe.
    fields = {**trained.fields, "peer": peer, "features": reader.digest, "budget": budget}
    # Another budget or other features: it trains again, in the place of what is there.
    record = StageRecord(theirs.checkpoints, "train", fields, allowed=(*fields,), binds=False)
    if record.is_done():
        return record.report
    config = read_config(ours.checkpoints / trained.report["best"])
    args = _settings(recipe, config)
    model = _model(args, config)
    record.begin()
    splits = {s.sample_id: s.split for s in read_samples(theirs.samples(recipe))}
    chosen = [i for i, sample in enumerate(reader.sample_ids) if splits[sample] is Split.TRAIN]
    numbers = _train(model, args, reader, chosen, budget)
    drafter = _converted(model, config)
    _require_same_loss(model, drafter, args, recipe, reader, chosen[-1])
    folder = step_folder(theirs.checkpoints, numbers["steps"])
    save_drafter(drafter, folder)
    report = {"best": folder.name, "peer": peer, **numbers}
    record.finish([folder / WEIGHTS, folder / CONFIG], report)
    return report


def _settings(recipe: Recipe, config: DrafterConfig) -> argparse.Namespace:
    """Its settings, each that is not named here at its default."""
    named = {
        "speculator_type": "dflash",
        "verifier_name_or_path": recipe.target.path,
        "num_layers": config.num_layers,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(LayerConvention.INPUT_OF_LAYER.from_own(config.taps)),
        "total_seq_len": recipe.train.batch_samples * recipe.corpus.max_length,
        "max_anchors": recipe.train.batch_samples * recipe.train.anchors,
        "hidden_states_dtype": "float32",
        "draft_attn_impl": "sdpa",
        "loss_implementation": "eager",
        "seed": recipe.train.seed,
    }
    configured = importlib.import_module("speculators.train.config").TrainConfig
    return argparse.Namespace(**configured.from_sources(cli=named, argv=[]).flatten())


def _model(args: argparse.Namespace, config: DrafterConfig) -> Any:
    cli = importlib.import_module("speculators.train.cli")
    kind = importlib.import_module("speculators.models.dflash").DFlashDraftModel
    cli.set_seed(args.seed)
    model = cli.build_draft_model(args, kind, None, None, config.vocab_size)
    model.verifier_norm, model.verifier_lm_head = nn.Identity(), NextToken(config.vocab_size)
    return model.train()


def _train(
    model: Any, args: argparse.Namespace, reader: FeatureReader, chosen: list[int], budget: float
) -> dict[str, Any]:
    build = importlib.import_module("speculators.train.optimizers").build_optimizers
    optimizers: list[torch.optim.Optimizer] = build(model, args)
    peaks = [[group["lr"] for group in o.param_groups] for o in optimizers]
    settings, _ = model.get_trainer_kwargs(**vars(args))
    start = time.process_time()
    steps, samples, loss = 0, 0, math.nan
    for size, batch in _batches(args, reader, chosen):
        spent = (time.process_time() - start) / budget
        if spent >= 1.0:
            break
        factor = min(spent / WARM_UP, (1.0 - spent) / (1.0 - WARM_UP))
        for optimizer, rates in zip(optimizers, peaks, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            optimizer.zero_grad()
        _, total, _ = model(**batch, **settings)
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for optimizer in optimizers:
            optimizer.step()
        steps, samples, loss = steps + 1, samples + size, float(total.detach())
    return {"steps": steps, "epochs": samples / len(chosen), "loss": loss}


def _batches(
    args: argparse.Namespace, reader: FeatureReader, chosen: list[int]
) -> Iterator[tuple[int, Batch]]:
    """Numbers of samples and packed batches, epoch after epoch without end."""
    packing = importlib.import_module("speculators.train.distributed_batch_sampler")
    sampler = packing.MultipackDistributedBatchSamplerV2(
        args.total_seq_len, [reader.lengths[i] for i in chosen], 1, 0, seed=args.seed
    )
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        for places in sampler:
            yield len(places), _collated(reader, [chosen[p] for p in places], args.total_seq_len)
        epoch += 1


def _collated(reader: FeatureReader, indices: list[int], length: int) -> Batch:
    """Samples as its own collator packs and pads them, to `length` tokens."""
    rows = []
    for index in indices:
        features = reader.read(index)
        ids = features.tokens.input_ids
        last = torch.zeros(ids.numel(), features.taps.shape[-1])
        last[:-1, 0] = ids[1:]
        rows.append(
            {
                "hidden_states": features.taps.flatten(1),
                "input_ids": ids,
                "verifier_last_hidden_states": last,
                "loss_mask": features.tokens.loss_mask.long(),
                "lengths": torch.tensor([ids.numel()]),
                "position_ids": torch.arange(ids.numel()),
            }
        )
    collate = importlib.import_module("speculators.train.data").CollateFn(
        length, rows[0]["verifier_last_hidden_states"].shape[-1], dtype=torch.float32
    )
    batch = collate(rows)
    batch.pop("error_records")
    return batch


def _converted(model: Any, config: DrafterConfig) -> DFlash:
    """The drafter in Paceline's own form; the names of the weights are the same."""
    windowed = replace(
        config,
        layer_types=("sliding",) * config.num_layers,
        sliding_window=model.sliding_window,
        sliding_in_block_mask="causal",
    )
    drafter = DFlash(windowed)
    weights = model.state_dict()
    drafter.load_state_dict({name: weights[name] for name in drafter.state_dict()})
    return drafter


def _require_same_loss(
    model: Any,
    drafter: DFlash,
    args: argparse.Namespace,
    recipe: Recipe,
    reader: FeatureReader,
    index: int,
) -> None:
    """Raise AssertionError unless both forms of the drafter have the same loss on a sample."""
    features = reader.read(index)
    loss_mask = features.tokens.loss_mask
    select = importlib.import_module("speculators.models.dflash.utils").select_anchors
    settings, _ = model.get_trainer_kwargs(**vars(args))
    term = ObjectiveTerm(kind="cross_entropy", positions="decay", gamma=recipe.train.gamma)
    settings |= {"per_position_loss_weight": "fixed-exp-decay", "gamma": term.gamma}
    head = TargetHead.load(Path(recipe.target.path), dtype=torch.float32, device="cpu")
    with torch.no_grad():
        torch.manual_seed(0)
        anchors, valid = select(loss_mask[None], args.max_anchors, args.block_size)
        torch.manual_seed(0)
        _, theirs, _ = model(**_collated(reader, [index], loss_mask.numel()), **settings)
        batch = pack(
            [Anchored(features=features, anchors=anchors[valid])],
            block_size=args.block_size,
            mask_token_id=args.mask_token_id,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        ours = block_loss(drafter, head, batch, (term,), chunk=recipe.train.loss_chunk)
    apart = abs(float(ours.sum) / float(batch.valid.sum()) - float(theirs))
    if apart > LOSS_TOLERANCE:
        raise AssertionError(f"converted, the drafter's loss differs by {apart:.2g}")
