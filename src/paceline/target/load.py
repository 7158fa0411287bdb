"""The frozen LLM in this process, through Transformers."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from paceline.durable.checksum import Around
from paceline.durable.errors import DataError, TargetError
from paceline.recipe.schema import TargetRecipe
from paceline.target.capture import CapturePlan, PendingFeatures, start_capture
from paceline.target.head import TargetHead
from paceline.target.spec import TargetSpec, read_spec
from paceline.target.taps import check_taps
from paceline.target.tokenizer import load_tokenizer
from paceline.target.transfer import HostCopies
from paceline.types import Features, TokenBatch


class Target:
    """A loaded target; its weights never change and never require a gradient."""

    def __init__(self, *, spec: TargetSpec, model: PreTrainedModel, folder: Path) -> None:
        """`model` is a causal LM of a supported family, in eval mode; `folder` its files."""
        self.spec = spec
        self.model = model
        self.folder = folder

    @cached_property
    def tokenizer(self) -> Any:
        """The Transformers tokenizer. Raises TargetError where the folder has none."""
        return load_tokenizer(self.folder)

    @cached_property
    def head(self) -> TargetHead:
        """Embedding, final norm and lm_head; shares the model's memory."""
        return TargetHead(
            embedding=_weight(self.model.get_input_embeddings()),
            lm_head=_weight(self.model.get_output_embeddings()),
            norm_weight=_weight(self.decoder.norm),
            norm_kind=self.spec.norm,
            eps=self.spec.rms_norm_eps,
        )

    @property
    def decoder(self) -> PreTrainedModel:
        """Embedding, layers and final norm, without lm_head."""
        return self.model.base_model  # pyright: ignore[reportReturnType]

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    def capture(
        self,
        batch: TokenBatch,
        taps: tuple[int, ...],
        *,
        last: bool = False,
        chunk_tokens: int | None = None,
    ) -> Features:
        """Hidden states after the layers `taps`, and with `last` what lm_head multiplies.

        One forward pass over the whole batch: bound its tokens before. With `chunk_tokens` a
        batch with a longer sample takes several, of so many tokens of each sample. The result is
        on the CPU in the compute dtype; `Features.tokens` are the ids that were really processed.
        Layers after the last one needed never run, and no logits are made. `taps` may be empty
        where only `last` is wanted.

        Raises RecipeError for impossible taps, DataError for a sample that the target cannot
        process (no tokens, too long, an id beyond its vocabulary), TargetError for a kind of
        layer that cannot take a sample in pieces.
        """
        plan = CapturePlan(taps, last, chunk_tokens)
        return self.start_capture(batch, plan, HostCopies(self.device)).wait()

    def start_capture(
        self, batch: TokenBatch, plan: CapturePlan, copies: HostCopies
    ) -> PendingFeatures:
        """As `capture`, but returns once the work is queued on the device.

        The one copy of the states to the host is one of `copies`.
        """
        if plan.taps or not plan.last:
            check_taps(plan.taps, self.spec.num_layers)
        self._check(batch)
        return start_capture(self.decoder, self.spec, batch, plan, copies)

    def _check(self, batch: TokenBatch) -> None:
        if not len(batch):
            raise ValueError("capture: the batch has no samples")
        for sample, length in zip(batch.sample_ids, batch.lengths, strict=True):
            if not 0 < length <= self.spec.max_position:
                raise DataError(
                    f"sample {sample}: {length} tokens; the target takes 1 to "
                    f"{self.spec.max_position}. Lower corpus.max_length."
                )
        low, high = batch.input_ids.aminmax()
        if low < 0 or high >= self.spec.vocab_size:
            raise DataError(
                f"token ids {int(low)} to {int(high)} in a batch of {batch.sample_ids[0]}; the "
                f"target has rows 0 to {self.spec.vocab_size - 1}. The corpus was made with "
                "another tokenizer."
            )


def load_target(recipe: TargetRecipe, *, around: Around = nullcontext) -> Target:
    """Load the model in eval mode, in the recipe's dtype, on its device, with SDPA attention.

    Thread counts are the process's own business and are not touched. `around` is entered for each
    read of the weights that tells their identity, before they are loaded. Raises TargetError where
    the folder is incomplete (a tensor that is missing would silently start random), of an
    unsupported family, or where the device is not there.
    """
    folder = Path(recipe.path)
    spec = read_spec(folder, around=around)
    try:
        with _no_progress_bar():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=getattr(torch, recipe.dtype),
                attn_implementation="sdpa",
                local_files_only=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise TargetError(f"{folder}: Transformers cannot load it ({error}).") from error
    model, info = loaded
    broken = sorted([*info["missing_keys"], *(str(k) for k in info["mismatched_keys"])])
    if broken:
        raise TargetError(
            f"{folder}: {len(broken)} tensors are missing or of another shape, such as "
            f"{broken[0]!r}. The folder is incomplete: fetch the target again."
        )
    try:
        model = model.to(recipe.device)
    except (RuntimeError, AssertionError) as error:
        raise TargetError(f"target.device: {recipe.device!r} cannot be used ({error}).") from error
    return Target(spec=spec, model=model.eval().requires_grad_(False), folder=folder)


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Keep Transformers' own bar out of logs, where every worker process would draw one."""
    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def _weight(module: nn.Module | torch.Tensor | None) -> torch.Tensor:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor):
        raise TargetError("the target's embedding, norm or lm_head has no weight of its own.")
    return weight.detach()
