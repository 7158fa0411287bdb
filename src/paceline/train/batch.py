"""Samples with their blocks, packed: the input of one forward pass of the drafter."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.drafter.attention import Document
from paceline.objective.blocks import block_targets, sample_anchors
from paceline.train.noise import FeatureNoise
from paceline.types.batch import Features


@dataclass(frozen=True)
class Anchored:
    """One sample with its anchors of this epoch."""

    features: Features
    """Of one sample."""
    anchors: torch.Tensor
    """int64 [A], rising."""
    epoch: int = 0
    """Keys what else is drawn for the sample."""

    @property
    def num_tokens(self) -> int:
        """Context tokens, for the size of a micro-batch."""
        return self.features.tokens.input_ids.numel()


@dataclass(frozen=True)
class BlockBatch:
    """A blocks of several documents with T context tokens in all."""

    taps: torch.Tensor
    """[T, L, H]."""
    positions: torch.Tensor
    """int64 [T], inside each document."""
    anchors: torch.Tensor
    """int64 [A], inside each document."""
    block_ids: torch.Tensor
    """int64 [A, B]: the anchor's token, then the mask's."""
    labels: torch.Tensor
    """int64 [A, B - 1] for slots 1..B-1."""
    valid: torch.Tensor
    """bool [A, B - 1]."""
    documents: tuple[Document, ...]
    last: torch.Tensor | None = None
    """[T', H]: the target's last hidden states from each document's first anchor on."""
    teacher_rows: torch.Tensor | None = None
    """int64 [A, B - 1]: the row of `last` that predicts the slot's token, at anchor + k - 1."""


def anchor_sample(features: Features, *, count: int, seed: int, epoch: int) -> Anchored:
    """Draw the anchors of one sample; see `sample_anchors`."""
    tokens = features.tokens
    anchors = sample_anchors(
        tokens.loss_mask, count, seed=seed, epoch=epoch, sample_id=tokens.sample_ids[0]
    )
    return Anchored(features=features, anchors=anchors, epoch=epoch)


def micro_batches(
    samples: Sequence[Anchored], *, block_size: int, limit: int
) -> list[list[Anchored]]:
    """Split the samples of a step, in order, so that context and slots stay within `limit` tokens.

    A sample alone may exceed it. Samples without anchors are left out: they have no gradient.
    """
    groups: list[list[Anchored]] = []
    filled = limit
    for sample in samples:
        if not sample.anchors.numel():
            continue
        size = sample.num_tokens + sample.anchors.numel() * block_size
        if filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(sample)
        filled += size
    return groups


def pack(
    samples: Sequence[Anchored],
    *,
    block_size: int,
    mask_token_id: int,
    dtype: torch.dtype,
    device: torch.device,
    noise: FeatureNoise | None = None,
    teacher: bool = False,
) -> BlockBatch:
    """Concatenate samples and their blocks; nothing is padded. `noise` goes on the taps alone.

    `teacher` packs what the target's own distribution is made of.
    """
    taps, positions, anchors, ids, labels, valid, documents = [], [], [], [], [], [], []
    row = block = 0
    for sample in samples:
        tokens = sample.features.tokens
        # Context behind the last anchor is visible to no block.
        length = int(sample.anchors[-1])
        taps.append(sample.features.taps[:length])
        positions.append(torch.arange(length))
        anchors.append(sample.anchors)
        block_ids = torch.full((sample.anchors.numel(), block_size), mask_token_id)
        block_ids[:, 0] = tokens.input_ids[sample.anchors]
        ids.append(block_ids)
        own_labels, own_valid = block_targets(
            tokens.input_ids, tokens.loss_mask, sample.anchors, block_size
        )
        labels.append(own_labels)
        valid.append(own_valid)
        documents.append(
            Document(
                rows=slice(row, row + length),
                blocks=slice(block, block + sample.anchors.numel()),
            )
        )
        row += length
        block += sample.anchors.numel()
    all_taps = torch.cat(taps).to(device=device, dtype=dtype)
    if noise is not None:
        for sample, document in zip(samples, documents, strict=True):
            sample_id = sample.features.tokens.sample_ids[0]
            noise.add_to(all_taps[document.rows], epoch=sample.epoch, sample_id=sample_id)
    return BlockBatch(
        taps=all_taps,
        positions=torch.cat(positions).to(device),
        anchors=torch.cat(anchors).to(device),
        block_ids=torch.cat(ids).to(device),
        labels=torch.cat(labels).to(device),
        valid=torch.cat(valid).to(device),
        documents=tuple(documents),
        **(_teacher(samples, block_size, dtype, device) if teacher else {}),
    )


def _teacher(
    samples: Sequence[Anchored], block_size: int, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    last, rows = [], []
    row = 0
    for sample in samples:
        features = sample.features
        if features.last is None:
            raise ValueError(f"sample {features.tokens.sample_ids[0]} is stored without `last`")
        first, slots = int(sample.anchors[0]), torch.arange(block_size - 1)
        own = features.last[first : int(sample.anchors[-1]) + block_size - 1]
        # A slot behind the document's end reads some row, and is not valid.
        places = (sample.anchors[:, None] - first + slots).clamp_max(own.shape[0] - 1)
        last.append(own)
        rows.append(places + row)
        row += own.shape[0]
    return {
        "last": torch.cat(last).to(device=device, dtype=dtype),
        "teacher_rows": torch.cat(rows).to(device),
    }
