"""What each number of a recipe must lie in."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Bound:
    """The interval that a number must lie in."""

    low: float
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

    def holds(self, value: float) -> bool:
        """Whether a finite `value` lies inside."""
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        return math.isfinite(value) and above and below

    def in_words(self) -> str:
        """Such as `above 0 and at most 1`."""
        low = f"{'above' if self.low_open else 'at least'} {self.low:g}"
        if self.high == math.inf:
            return low
        return f"{low} and {'below' if self.high_open else 'at most'} {self.high:g}"


_POSITIVE = Bound(0, low_open=True)
_ONE_OR_MORE = Bound(1)
_ZERO_OR_MORE = Bound(0)
_LEVEL = Bound(0, 1e6)
_SHARE = Bound(0, 1, high_open=True)
_SEED = Bound(0, 2**63 - 1)

BOUNDS: tuple[tuple[str, Bound], ...] = (
    ("corpus.sources.*.limit", _ONE_OR_MORE),
    ("corpus.sources.*.weight", _POSITIVE),
    ("corpus.sources.*.max_samples", _ONE_OR_MORE),
    ("corpus.max_length", Bound(2)),
    ("corpus.max_prompt_length", _ONE_OR_MORE),
    ("corpus.min_loss_tokens", _ONE_OR_MORE),
    ("corpus.loop_repeats", Bound(2)),
    ("corpus.max_overlap", Bound(0, 1)),
    ("corpus.validation_fraction", _SHARE),
    ("corpus.workers", _ONE_OR_MORE),
    ("corpus.seed", _SEED),
    ("target.devices.*", _ZERO_OR_MORE),
    ("target.workers", _ONE_OR_MORE),
    ("target.threads", _ONE_OR_MORE),
    ("regenerate.max_new_tokens", _ONE_OR_MORE),
    ("regenerate.temperature", _ZERO_OR_MORE),
    ("regenerate.top_p", Bound(0, 1, low_open=True)),
    ("regenerate.group_size", _ONE_OR_MORE),
    ("regenerate.loop_repeats", Bound(2)),
    ("regenerate.seed", _SEED),
    ("regenerate.concurrency", Bound(1, 4096)),
    ("regenerate.timeout", _POSITIVE),
    ("regenerate.attempts", _ONE_OR_MORE),
    ("regenerate.server_wait", _ZERO_OR_MORE),
    ("extract.num_taps", _ONE_OR_MORE),
    ("extract.taps.*", _ZERO_OR_MORE),
    ("extract.shard_bytes", _ONE_OR_MORE),
    ("extract.batch_tokens", _ONE_OR_MORE),
    ("extract.chunk_tokens", _ONE_OR_MORE),
    ("extract.staging_bytes", _ONE_OR_MORE),
    ("extract.high_mark", Bound(0, 1, low_open=True)),
    ("extract.low_mark", Bound(0, 1, low_open=True)),
    ("extract.space_wait", _ZERO_OR_MORE),
    ("extract.uploads", Bound(1, 64)),
    ("extract.unit_retries", _ONE_OR_MORE),
    ("extract.allow_quarantined", _ZERO_OR_MORE),
    ("extract.recheck_samples", _ZERO_OR_MORE),
    ("drafter.layers", _ONE_OR_MORE),
    ("drafter.block_size", Bound(2)),
    ("drafter.mask_token_id", _ZERO_OR_MORE),
    ("drafter.sliding_window", _ONE_OR_MORE),
    ("drafter.draft_vocab", _ONE_OR_MORE),
    ("train.epochs", _POSITIVE),
    ("train.anchors", _ONE_OR_MORE),
    ("train.gamma", _POSITIVE),
    ("train.objective.*.weight", _ZERO_OR_MORE),
    ("train.objective.*.end_weight", _ZERO_OR_MORE),
    ("train.objective.*.ramp.*", Bound(0, 1)),
    ("train.objective.*.gamma", _POSITIVE),
    ("train.objective.*.alpha", _SHARE),
    ("train.objective.*.temperature", _POSITIVE),
    ("train.objective.*.eta", _ZERO_OR_MORE),
    ("train.objective.*.budget", _ONE_OR_MORE),
    ("train.batch_samples", _ONE_OR_MORE),
    ("train.micro_batch_tokens", _ONE_OR_MORE),
    ("train.noise_start", _LEVEL),
    ("train.noise_end", _LEVEL),
    ("train.muon_learning_rate_ratio", _POSITIVE),
    ("train.muon_momentum", _SHARE),
    ("train.learning_rate", _POSITIVE),
    ("train.decay_ratio", Bound(0, 1, low_open=True)),
    ("train.min_learning_rate_ratio", Bound(0, 1)),
    ("train.warmup_ratio", _SHARE),
    ("train.warmup_steps", _ZERO_OR_MORE),
    ("train.betas.*", _SHARE),
    ("train.eps", _POSITIVE),
    ("train.weight_decay", _ZERO_OR_MORE),
    ("train.grad_clip", _POSITIVE),
    ("train.loss_chunk", _ONE_OR_MORE),
    ("train.evaluations", _ONE_OR_MORE),
    ("train.eval_samples", _ONE_OR_MORE),
    ("train.eval_anchors", _ONE_OR_MORE),
    ("train.keep_checkpoints", _ONE_OR_MORE),
    ("train.keep_every", _ONE_OR_MORE),
    ("train.cache_bytes", _ONE_OR_MORE),
    ("train.shard_window", _ONE_OR_MORE),
    ("train.queue_bytes", _ONE_OR_MORE),
    ("train.sync_every", _ONE_OR_MORE),
    ("train.outer_learning_rate", _POSITIVE),
    ("train.outer_momentum", Bound(0, 1, high_open=True)),
    ("train.max_bad_steps", _ONE_OR_MORE),
    ("train.seed", _SEED),
    ("train.threads", _ONE_OR_MORE),
    ("score.datasets.*.limit", _ONE_OR_MORE),
    ("score.max_prompts", _ONE_OR_MORE),
    ("score.max_new_tokens", _ONE_OR_MORE),
    ("score.warmup", _ZERO_OR_MORE),
    ("score.temperatures.*", Bound(0, 100)),
    ("score.top_k", _ZERO_OR_MORE),
    ("score.top_p", Bound(0, 1, low_open=True)),
    ("score.min_p", Bound(0, 1, high_open=True)),
    ("score.budgets.*", _ONE_OR_MORE),
    ("score.walk_budgets.*", _ONE_OR_MORE),
    ("score.walk_check_prompts", _ZERO_OR_MORE),
    ("score.seed", _SEED),
)
"""What each number of the recipe must lie in; `*` is a place in a list. None (null) is exempt."""
