"""The recipe: everything that a run is told, as frozen dataclasses.

Each field's doc stands under it; `paceline init` writes them into the YAML it makes.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.recipe.objective_terms import ObjectiveTerm
from paceline.recipe.score_schema import ScoreRecipe
from paceline.recipe.score_schema import ScoreSetRecipe as ScoreSetRecipe

Role = Literal["system", "user", "assistant", "tool"]
"""Whose turn it is."""


@dataclass(frozen=True, kw_only=True)
class SourceRecipe:
    """One data set."""

    path: str
    """A file (.jsonl, .json, .parquet, .arrow, .txt), a folder of such files or one that `datasets`
    has saved, or `hf:OWNER/NAME` (also `?config=...&split=...&revision=...`), which takes the extra
    `datasets`. Rows are ShareGPT (`conversations`), OpenAI (`messages`, `prompt`), `text`, or
    tokens (`input_ids`, `loss_mask`)."""
    name: str = ""
    """Name in reports; that of the file or folder where empty."""
    split: Literal["train", "heldout"] = "train"
    """`train` (a hash sets `corpus.validation_fraction` of it aside) or `heldout` (score only)."""
    limit: int | None = None
    """Read at most this many rows."""
    weight: float | None = None
    """Share in the mixture, relative to the weights of the other sources, in samples: of a source
    that is too large for it, those of the lowest hash are taken. Null takes all of it."""
    max_samples: int | None = None
    """Take at most this many samples, those of the lowest hash, whatever the order of the rows."""


@dataclass(frozen=True, kw_only=True)
class CorpusRecipe:
    """From conversations to tokens with a loss mask."""

    sources: tuple[SourceRecipe, ...] = ()
    """The data sets; at least one with `split: train`."""
    max_length: int = 2048
    """Tokens; longer samples are cut there."""
    max_prompt_length: int | None = None
    """Longer prompts are not answered but quarantined; null answers all that fit."""
    on_length: Literal["cut", "exclude"] = "cut"
    """Samples longer than `max_length`: cut there, or quarantined."""
    min_loss_tokens: int = 2
    """A sample with fewer trainable tokens after the cut is quarantined."""
    validation_fraction: float = 0.05
    """Share of the training prompts, chosen by the hash of the prompt, that is never trained on."""
    leading_assistant: Literal["keep", "context_only", "drop"] = "context_only"
    """An assistant turn before the first user turn: trained, only read, or its row quarantined."""
    consecutive_roles: Literal["keep", "merge", "exclude"] = "keep"
    """Turns of one role in a row: rendered as they stand, joined by an empty line, or their row
    quarantined. Tool results are never joined."""
    roles: dict[str, str] = field(default_factory=dict)
    """What roles with unknown names are, such as `expert: assistant`; a row with a role that is
    neither known nor named here is quarantined."""
    last_turn_only: bool = False
    """Train on the last assistant turn alone."""
    template_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, such as `enable_thinking: false`; recorded and exported."""
    template_file: str | None = None
    """A chat template (Jinja) in place of the target's own, if the target is served with it."""
    on_loop: Literal["keep", "exclude"] = "keep"
    """Answers in the data that repeat an 8-gram `loop_repeats` times: trained on, or their row
    quarantined."""
    loop_repeats: int = 4
    """Occurrences of one 8-gram that make an answer in the data a loop."""
    on_same_prompt: Literal["keep", "exclude"] = "keep"
    """Samples whose prompt came before, with another answer: kept, or quarantined."""
    max_overlap: float = 1.0
    """A training row whose prompt holds more than this share of a held-out prompt's 8-grams is
    quarantined; 1 keeps all but the very same prompts, which are never trained on."""
    strict: bool = False
    """Fail when any row is rejected."""
    seed: int = 0
    """Seeds the split, and the choice where a source is not taken whole."""
    workers: int | None = None
    """Processes that tokenise; null takes one for each CPU core, and none for small data."""


@dataclass(frozen=True, kw_only=True)
class TargetRecipe:
    """The frozen LLM."""

    path: str = ""
    """A Transformers model folder (config.json, safetensors, tokenizer)."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Compute type. On CPUs without AVX512 bfloat16 is 5-9 times slower than float32."""
    device: str = "cpu"
    """`cpu` or `cuda:0`."""
    devices: tuple[int, ...] = ()
    """GPUs by number, one worker process each (extract), instead of `device` and `workers`."""
    workers: int = 1
    """Processes that run the target side by side (regenerate, extract, score)."""
    threads: int = 1
    """CPU threads of each of those processes."""


@dataclass(frozen=True, kw_only=True)
class RegenerateRecipe:
    """The target answers the prompts itself."""

    enabled: bool = True
    """Off: the answers in the data are trained on as they stand."""
    max_new_tokens: int = 512
    """An answer is cut there."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """Nucleus of the sampling distribution; 1 is all of it."""
    group_size: int = 16
    """Prompts that are answered together; the unit that is committed and redone."""
    on_length: Literal["keep", "exclude"] = "exclude"
    """Answers cut at `max_new_tokens`: trained on without an end token, or left out."""
    on_loop: Literal["keep", "exclude"] = "exclude"
    """Answers that repeat an 8-gram `loop_repeats` times: trained on, or left out."""
    loop_repeats: int = 4
    """Occurrences of one 8-gram that make an answer a loop."""
    seed: int = 0
    """Seeds sampling at temperature above 0."""
    servers: tuple[str, ...] = ()
    """OpenAI-compatible servers that run the target, such as `http://127.0.0.1:8000/v1`, all of
    which share the work; none runs the target here."""
    model: str = ""
    """What the servers call the target; empty is the one model that they list."""
    api: Literal["completions", "chat"] = "completions"
    """`completions` sends the prompt's own token ids, `chat` its messages, which the server renders
    with its own template: what it made of them is compared where it tells."""
    server_options: dict[str, Any] = field(default_factory=dict)
    """More fields of each request, such as `top_k: 20`."""
    concurrency: int = 32
    """Requests at a time to each server."""
    timeout: float = 600.0
    """Seconds that a server may take for one answer."""
    attempts: int = 5
    """Failures over one prompt, at servers that answer others, after which it is quarantined."""
    server_wait: float = 3600.0
    """Seconds without any server that answers, after which the stage gives up."""
    api_key_variable: str = "OPENAI_API_KEY"
    """Environment variable with the servers' key, where they want one."""


@dataclass(frozen=True, kw_only=True)
class ExtractRecipe:
    """The target's hidden states, kept."""

    num_taps: int = 3
    """Tapped layers, spread from layer 1 to the third from the end."""
    taps: tuple[int, ...] | None = None
    """Tapped layers by id (output after layer i, 0-based) instead of `num_taps`."""
    last: bool = False
    """Keep what lm_head multiplies as well (soft labels need it)."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type at rest."""
    shard_bytes: int = 64 << 20
    """About this many bytes a shard file."""
    batch_tokens: int = 4096
    """At most this many tokens in one forward pass of the target."""
    chunk_tokens: int | None = None
    """Longer samples pass through the target in pieces of this many tokens, which saves memory;
    null takes each sample in one piece."""
    store: str = ""
    """Where the shards are kept: a folder, `file://`, `s3://bucket/prefix`, `gs://` or `az://`;
    `features/` of the run where empty. Credentials come from the environment (AWS_..., and so on),
    never from here."""
    store_options: dict[str, str] = field(default_factory=dict)
    """What the store's client needs beside them, such as `endpoint`, `region`, `allow_http`."""
    codec: Literal["auto", "none", "planes", "int8o"] = "auto"
    """`none`; `planes` (lossless, about two thirds of the bytes); `int8o` (about half, not
    lossless); `auto` is `none` in folders and `planes` in object stores."""
    isolate: bool = True
    """Run the target in worker processes, which are started again when they die; off runs it in
    this one, for small targets and for debugging."""
    staging: str = "auto"
    """Where shards wait for their upload: a folder, or `auto`: shared memory where it is large
    enough, else `staging/` of the run. Without an object store nothing is staged."""
    staging_bytes: int | None = None
    """The most bytes that may wait there; null takes half of what is free at the start."""
    high_mark: float = 0.8
    """Used share of the file system of the staging above which nothing more is made. Where shards
    stay in a folder nothing is staged, and the bytes that are free there alone decide."""
    low_mark: float = 0.7
    """Used share of it at which the work goes on."""
    space_wait: float = 3600.0
    """Seconds without room, or without an answer of the store, after which the stage gives up."""
    uploads: int = 4
    """Shards that are uploaded at a time."""
    unit_retries: int = 2
    """Failures or deaths over one shard after which it is quarantined."""
    allow_quarantined: int = 0
    """Quarantined shards with which the features still count as complete."""
    recheck_samples: int = 2
    """Stored samples that are captured again and compared when an extraction goes on."""


@dataclass(frozen=True, kw_only=True)
class DrafterRecipe:
    """The network that proposes."""

    algorithm: Literal["dflash"] = "dflash"
    """DFlash: a block of masked slots over the target's features, all predicted in one pass."""
    layers: int = 5
    """Decoder layers."""
    block_size: int = 16
    """Slots of a block, the anchor's included; the drafter proposes one token fewer."""
    mask_token_id: int | None = None
    """Embedding row of the masked slots; chosen among the unused ones where absent."""
    init: Literal["target", "random"] = "target"
    """Start from copies of the target's own last layers, or from noise."""
    warm_start: str | None = None
    """Folder of a trained drafter (`checkpoints/step_NNNNNN`) to start from, instead of `init`.
    A tenth of the usual `learning_rate` keeps what it knows."""
    in_block_mask: Literal["bidirectional", "causal"] = "bidirectional"
    """Whether a slot sees all slots of its block, or those up to it; layers of full attention."""
    layer_types: tuple[Literal["full", "sliding"], ...] | None = None
    """Attention of each layer, `full` or `sliding`; null is `full` for all of them."""
    sliding_window: int = 2048
    """Positions that a slot of a sliding layer sees, its own included."""
    sliding_in_block_mask: Literal["bidirectional", "causal"] = "causal"
    """As `in_block_mask`, for sliding layers."""
    draft_vocab: int | None = None
    """Propose only this many tokens, the most frequent ones; null is the target's vocabulary."""
    vocab_text: tuple[str, ...] = ()
    """Files (.txt, .md, .jsonl, .json) counted, beside the answers trained on, to choose them."""


@dataclass(frozen=True, kw_only=True)
class TrainRecipe:
    """The training of the drafter."""

    epochs: float = 6.0
    """Passes over the training samples; a fraction ends inside one."""
    anchors: int = 512
    """Anchors per sample and epoch, drawn without replacement."""
    gamma: float = 7.0
    """Slot k weighs exp(-(k - 1) / gamma): 7 for blocks of 16, 5 for 10, 4 for 8, 2 for 4."""
    objective: tuple[ObjectiveTerm, ...] = ()
    """Terms of the loss, added up; none is cross-entropy with the weights of `gamma`."""
    batch_samples: int = 8
    """Samples of one optimizer step."""
    micro_batch_tokens: int = 8192
    """Tokens (context and slots) of one forward; a step accumulates as many as it needs."""
    noise: Literal["none", "uniform", "normal"] = "none"
    """Noise on the features in training: within plus and minus a level, or of that standard
    deviation. Evaluations and decoding have none."""
    noise_start: float = 0.05
    """Its level at the start of the run; from there to `noise_end` along a cosine."""
    noise_end: float = 0.01
    """Its level at the end of the run."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon` moves matrices by their orthogonalised momentum, and norms as `adamw` does."""
    muon_learning_rate_ratio: float = 10.0
    """Muon's rate as a multiple of `learning_rate`, which the norms have."""
    muon_momentum: float = 0.95
    """Muon."""
    learning_rate: float = 6e-4
    """Peak."""
    schedule: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    """How the rate falls after the warm-up: all along a cosine or a line, at the end alone
    (`wsd`, `decay_ratio`), or not at all."""
    decay_ratio: float = 0.2
    """Share of the run over which `wsd` falls, linearly; before, the rate stays at its peak."""
    min_learning_rate_ratio: float = 0.0
    """The rate ends at this share of the peak; `constant` ends at the peak."""
    warmup_ratio: float = 0.04
    """Share of the steps over which the rate rises."""
    warmup_steps: int | None = None
    """Optimizer steps over which the rate rises, instead of `warmup_ratio`."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW."""
    eps: float = 1e-8
    """AdamW."""
    weight_decay: float = 0.0
    """On matrices only, times their rate."""
    grad_clip: float = 1.0
    """Largest gradient norm."""
    loss_chunk: int = 1 << 24
    """Logits (rows times vocabulary) that exist at a time; at least one row's."""
    compute: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the drafter's matrix products; `auto` is bfloat16 on CUDA. Weights stay float32."""
    evaluations: int = 6
    """Evaluations over the run, the last one at its end; each writes a checkpoint, and that of the
    highest simulated τ of ddtree-64 becomes the drafter."""
    eval_samples: int = 64
    """Validation samples of an evaluation."""
    eval_anchors: int = 32
    """Anchors per validation sample."""
    keep_checkpoints: int = 2
    """Newest checkpoints kept beside the best."""
    keep_every: int | None = None
    """Keep the checkpoint of every so many evaluations for good, too."""
    cache_bytes: int | None = None
    """Local copies of an object store's shards; null allows half of what is free."""
    shard_window: int | None = None
    """Shuffle shards, then samples among this many shards, for stores larger than the local copies;
    null shuffles all samples."""
    max_bad_steps: int = 10
    """Non-finite steps in a row that stop the run."""
    seed: int = 0
    """Seeds order, anchors, initial weights and feature noise."""
    device: str = "cpu"
    """`cpu` or `cuda:0`."""
    threads: int = 2
    """CPU threads of each training process."""
    online: bool = False
    """Capture the training samples while the drafter trains, on `target_devices`, instead of
    reading them from the store: `extract` then keeps the validation samples alone."""
    target_devices: tuple[str, ...] = ()
    """Online: devices of the target's workers, a process each, such as `cuda:0`, or `cpu:0`; none
    is `target.device`."""
    tee: bool = False
    """Online: keep what is captured in `tee/` of the run directory, so that later epochs read it
    and need no target."""
    drafter_devices: tuple[str, ...] = ()
    """Devices of drafters that train side by side, a process each, and are kept one model by
    `sync`; empty trains one drafter on `device`, in this process."""
    queue_bytes: int = 1 << 30
    """Hidden states that may wait for the drafters."""
    sync: Literal["average", "allreduce"] = "average"
    """How several drafters stay one model: weights averaged now and then, each drafter taking
    steps of `batch_samples` of its own; or gradients summed in every step, whose `batch_samples`
    they share."""
    sync_every: int = 50
    """`average`: steps of each drafter between two averages; 1 during the warm-up."""
    outer_learning_rate: float = 1.0
    """`average`: how far the model goes towards the average; 1 is all the way."""
    outer_momentum: float = 0.0
    """`average`: Nesterov momentum of that way; 0 is the plain average."""
    trackers: tuple[Literal["wandb", "trackio", "tensorboard", "mlflow"], ...] = ()
    """Where the curves are shown as well: `wandb`, `trackio`, `tensorboard`, `mlflow`. Each needs
    the extra of its name, such as `pip install 'paceline[wandb]'`; its failure is a warning."""
    tracker_project: str = "paceline"
    """Project (`mlflow`: experiment) that holds the runs."""
    tracker_options: dict[str, str] = field(default_factory=dict)
    """For `wandb`: entity, group, mode; `trackio`: group, space_id, server_url; `mlflow`:
    tracking_uri. No credentials: those come from the environment (WANDB_API_KEY, and so on)."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole run."""

    name: str = "run"
    """Names the run directory, `runs/<name>`, where `--run` does not."""
    target: TargetRecipe = field(default_factory=TargetRecipe)
    corpus: CorpusRecipe = field(default_factory=CorpusRecipe)
    regenerate: RegenerateRecipe = field(default_factory=RegenerateRecipe)
    extract: ExtractRecipe = field(default_factory=ExtractRecipe)
    drafter: DrafterRecipe = field(default_factory=DrafterRecipe)
    train: TrainRecipe = field(default_factory=TrainRecipe)
    score: ScoreRecipe = field(default_factory=ScoreRecipe)
