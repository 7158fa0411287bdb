"""The target's two ends, embedding and lm_head with the norm before it, without its layers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch.nn import functional as F

from paceline.target.families import NormKind
from paceline.target.folder import ModelFolder
from paceline.target.weights import PREFIXES, TensorReader

_LM_HEADS = ("lm_head.weight", "language_model.lm_head.weight")


@dataclass(frozen=True, eq=False, kw_only=True)
class TargetHead:
    """Frozen tensors of one dtype on one device; none requires a gradient."""

    embedding: torch.Tensor
    """[V, H], V the padded vocabulary."""
    lm_head: torch.Tensor
    """[V, H]; the embedding itself where the two are tied. Of a drafter that proposes K tokens,
    their rows [K, H]."""
    norm_weight: torch.Tensor
    """[H]."""
    norm_kind: NormKind
    eps: float
    whole: torch.Tensor | None = None
    """[V, H]: all of lm_head where its rows were chosen and a loss needs the others; else None."""

    @classmethod
    def load(cls, path: Path, *, dtype: torch.dtype, device: str | torch.device) -> Self:
        """Read these three tensors alone from a model folder, sharded or single, tied or not.

        Raises TargetError where the folder is not supported or lacks one of them.
        """
        folder = ModelFolder(path)
        reader = TensorReader(folder)
        embedding = reader.read(
            [f"{p}embed_tokens.weight" for p in PREFIXES], dtype=dtype, device=device
        )
        tied = folder.get("tie_word_embeddings", folder.family.tie_word_embeddings)
        return cls(
            embedding=embedding,
            lm_head=embedding if tied else reader.read(_LM_HEADS, dtype=dtype, device=device),
            norm_weight=reader.read(
                [f"{p}norm.weight" for p in PREFIXES], dtype=dtype, device=device
            ),
            norm_kind=folder.family.norm,
            eps=folder.get("rms_norm_eps", 1e-6),
        )

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids [...] to embeddings [..., H]."""
        return F.embedding(ids, self.embedding)

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """The final norm of the residual stream [..., H], in the family's order of rounding."""
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.norm_kind is NormKind.ONE_PLUS_WEIGHT:
            return (wide * (1.0 + self.norm_weight.float())).to(hidden.dtype)
        return self.norm_weight * wide.to(hidden.dtype)

    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """[..., H], already normed, to logits [..., V] in the tensors' dtype."""
        return F.linear(last, self.lm_head)
