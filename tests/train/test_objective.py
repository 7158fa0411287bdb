"""Training with objectives of several terms: packing, splits, the teacher, and a whole run."""

import copy
from dataclasses import replace

import pytest
import torch

from drafting import TAPS, load_tiny_target, tiny_drafter
from paceline.decode.speculate import decode_plain
from paceline.drafter.dflash import DFlash
from paceline.drafter.vocabulary import DraftVocabulary
from paceline.durable.errors import Interrupted
from paceline.extract import stage as extract_stage
from paceline.recipe.objective_inputs import objective_of
from paceline.recipe.objective_terms import ObjectiveTerm
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import TrainRecipe
from paceline.train import stage
from paceline.train.batch import Anchored, anchor_sample, pack
from paceline.train.learner import Learner
from paceline.train.objective import block_loss, slot_counts
from paceline.types import Features, TokenBatch
from training_runs import assert_same_end, events, stop_after

OBJECTIVE = (
    ObjectiveTerm(kind="cross_entropy", positions="streak_decay", gamma=10.0, weight=0.85),
    ObjectiveTerm(kind="kl", temperature=2.0, weight=0.15),
    ObjectiveTerm(kind="confident_right", positions="uniform", weight=0.1),
    ObjectiveTerm(kind="expected_length", weight=0.2),
    ObjectiveTerm(kind="tree", weight=0.3, budget=8),
    ObjectiveTerm(kind="lk_hybrid", weight=0.1),
)
RECIPE = TrainRecipe(objective=OBJECTIVE, gamma=4.0, learning_rate=1e-3)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_tiny_target(tmp_path_factory.mktemp("target"))


def captured(target, ids: torch.Tensor, mask: torch.Tensor, name: str) -> Features:
    batch = TokenBatch(
        input_ids=ids,
        loss_mask=mask,
        offsets=torch.tensor([0, ids.numel()]),
        sample_ids=(name,),
    )
    return target.capture(batch, TAPS, last=True)


def sample(target, length: int, answer: range, seed: int, count: int = 12) -> Anchored:
    ids = torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed))
    mask = torch.zeros(length, dtype=torch.bool)
    mask[answer.start : answer.stop] = True
    return anchor_sample(captured(target, ids, mask, f"{seed:x}"), count=count, seed=0, epoch=0)


def samples_of(target) -> list[Anchored]:
    return [sample(target, n + 16, range(n, n + 16), seed=n) for n in (4, 12, 7, 20)]


def packed(drafter, samples):
    return pack(
        samples,
        block_size=drafter.config.block_size,
        mask_token_id=drafter.config.mask_token_id,
        dtype=torch.float32,
        device=torch.device("cpu"),
        teacher=True,
    )


def reduced(drafter, kept: list[int]):
    """The drafter with a vocabulary of its own; the same weights."""
    vocabulary = DraftVocabulary.of(kept, drafter.config.vocab_size)
    narrow = DFlash(replace(drafter.config, draft_vocab_size=len(kept)), vocabulary)
    narrow.load_state_dict(drafter.state_dict(), strict=False)
    return narrow


def learner_of(target, *, kept: list[int] | None = None, **changes) -> Learner:
    recipe = replace(RECIPE, **changes)
    drafter = tiny_drafter(target)
    drafter = drafter if kept is None else reduced(drafter, kept)
    return Learner(recipe, drafter, drafter.narrowed(target.head, keep_whole=True))


def test_pitfall_08_the_teachers_best_token_is_the_greedy_answers_own(target):
    prompt = [5, 17, 90, 33, 8]
    answer = decode_plain(target, prompt, taps=TAPS, max_new_tokens=40, eos_ids=frozenset())
    ids = torch.tensor([*prompt, *answer.ids])
    features = captured(target, ids, torch.arange(ids.numel()) >= len(prompt), "greedy")
    drafter = tiny_drafter(target)
    anchored = [
        anchor_sample(features, count=30, seed=0, epoch=0),
        sample(target, 30, range(5, 30), seed=1),
    ]
    batch = packed(drafter, anchored)
    best = target.head.logits(batch.last)[batch.teacher_rows].argmax(-1)
    first = slice(0, anchored[0].anchors.numel())
    right = (best == batch.labels)[first][batch.valid[first]]
    assert right.float().mean() > 0.99
    late = (best.roll(1, dims=1) == batch.labels)[first][batch.valid[first]]
    assert late.float().mean() < 0.5


def test_the_teacher_of_a_packed_slot_is_the_sample_s_own_row(target):
    drafter = tiny_drafter(target)
    samples = samples_of(target)
    batch = packed(drafter, samples)
    row = 0
    for one in samples:
        for anchor in one.anchors.tolist():
            for slot in range(3):
                if batch.valid[row, slot]:
                    own = one.features.last[anchor + slot].float()
                    assert torch.equal(batch.last[batch.teacher_rows[row, slot]], own)
            row += 1
    assert batch.last.shape[0] < sum(s.num_tokens for s in samples), "only what is read"


def step(learner: Learner, samples, limit: int, counts=None):
    """The step's result with its gradients."""
    learner._recipe = replace(learner._recipe, micro_batch_tokens=limit)
    found = {}
    original = learner._update

    def update(sums, *arguments):
        found.update({n: p.grad.clone() for n, p in learner._parameters.items()})
        return original(sums, *arguments)

    learner._update = update
    result = learner.learn(samples, 1e-3, 0.5, counts)
    learner._update = original
    return result, found


@pytest.mark.parametrize("kept", [None, list(range(0, 256, 2))], ids=["full", "reduced"])
def test_t_57_t_59_packed_and_split_are_the_same_step_with_several_terms(target, kept):
    samples = samples_of(target)
    once, whole = step(learner_of(target, kept=kept), samples, 10**6)
    split, parts = step(learner_of(target, kept=kept), samples, 1)
    assert once.loss == pytest.approx(split.loss, rel=1e-6)
    assert once.gradient_norm == pytest.approx(split.gradient_norm, rel=1e-6)
    for name, value in whole.items():
        assert (value - parts[name]).norm() / value.norm() < 1e-6, name
    assert once.parts.keys() == split.parts.keys()
    for name, value in once.parts.items():
        assert value == pytest.approx(split.parts[name], rel=1e-5), name


def test_shares_of_a_step_add_up(target):
    """As several drafters would do it: the counts are added before any forward pass."""
    samples = samples_of(target)
    whole, gradients = step(learner_of(target), samples, 10**6)
    halves = samples[:1], samples[1:]
    learner = learner_of(target)
    counts = learner.counts(halves[0]) + learner.counts(halves[1])
    assert counts == learner.counts(samples)
    results = [step(learner_of(target), half, 10**6, counts) for half in halves]
    assert sum(r.loss for r, _ in results) == pytest.approx(whole.loss, rel=1e-6)
    for name, value in gradients.items():
        total = results[0][1][name] + results[1][1][name]
        assert (value - total).norm() / value.norm() < 1e-6, name


def test_the_step_s_loss_is_the_weighted_mean_of_its_terms(target):
    result, _ = step(learner_of(target), samples_of(target), 10**6)
    wanted = 0.0
    for term in OBJECTIVE:
        wanted += term.weight * result.parts[term.kind] / result.parts[f"{term.kind}_count"]
    assert result.loss == pytest.approx(wanted, rel=1e-6)


def test_t_56_pitfall_24_steps_without_a_valid_anchor_add_nothing(target):
    learner = learner_of(target)
    before = copy.deepcopy(learner.drafter.state_dict())
    none = [sample(target, 15, range(0), seed=3), sample(target, 15, range(14, 15), seed=2)]
    result = learner.learn(none, 1e-3, 0.5)
    assert (result.loss, result.gradient_norm, result.problem) == (0.0, 0.0, "")
    assert all(torch.equal(v, before[n]) for n, v in learner.drafter.state_dict().items())
    some = samples_of(target)
    assert learner.counts([*none, *some]) == learner.counts(some)
    mixed, _ = step(learner_of(target), [*none, *some], 10**6)
    alone, _ = step(learner_of(target), some, 10**6)
    assert mixed.loss == alone.loss


def test_a_ramp_goes_along_the_samples_and_a_term_of_nothing_is_left_out(target):
    terms = (
        ObjectiveTerm(kind="cross_entropy"),
        ObjectiveTerm(kind="kl", weight=0.0, end_weight=1.0, ramp=(0.5, 0.5)),
    )
    plain = learner_of(target, objective=()).learn(samples_of(target), 1e-3, 0.2)
    early = learner_of(target, objective=terms).learn(samples_of(target), 1e-3, 0.2)
    late = learner_of(target, objective=terms).learn(samples_of(target), 1e-3, 0.7)
    assert plain.loss == early.loss
    assert "kl" not in early.parts
    assert late.loss == pytest.approx(
        late.parts["cross_entropy"] / late.parts["cross_entropy_count"]
        + late.parts["kl"] / late.parts["kl_count"],
        rel=1e-6,
    )


@pytest.mark.parametrize("kind", ["kl", "reverse_kl", "tv", "lk_alpha", "lk_hybrid", "tree"])
def test_what_is_minimised_falls_and_the_answer_gets_likelier(target, kind):
    """On two texts over and over; the soft ones on the target's own greedy answers."""
    samples = []
    for seed in range(2):
        prompt = [5 + seed, 17, 90, 33, 8]
        answer = decode_plain(target, prompt, taps=TAPS, max_new_tokens=24, eos_ids=frozenset())
        ids = torch.tensor([*prompt, *answer.ids])
        features = captured(target, ids, torch.arange(ids.numel()) >= 5, f"{seed}")
        samples.append(anchor_sample(features, count=20, seed=0, epoch=0))
    learner = learner_of(target, objective=(ObjectiveTerm(kind=kind, gamma=None, budget=16),))
    found = [learner.learn(samples, 3e-3, 0.5) for _ in range(40)]
    assert found[-1].loss < 0.8 * found[0].loss
    assert found[-1].parts["right"] > found[0].parts["right"]


def test_acceptance_asks_for_all_rows_of_the_head(target):
    drafter = reduced(tiny_drafter(target), list(range(100)))
    batch = packed(drafter, samples_of(target))
    terms = objective_of(TrainRecipe(objective=(ObjectiveTerm(kind="tv"),)))
    with pytest.raises(ValueError, match="all rows of lm_head"):
        block_loss(drafter, drafter.narrowed(target.head), batch, terms, chunk=1000)
    head = drafter.narrowed(target.head, keep_whole=True)
    loss = block_loss(drafter, head, batch, terms, chunk=1000)
    assert 0 < float(loss.sum.detach()) < sum(slot_counts(drafter, samples_of(target)).valid)


def test_a_sample_without_last_is_named(target):
    drafter = tiny_drafter(target)
    one = samples_of(target)[0]
    bare = replace(one, features=replace(one.features, last=None))
    with pytest.raises(ValueError, match="sample 4 is stored without `last`"):
        packed(drafter, [bare])


@pytest.fixture(scope="module")
def taught(world, tmp_path_factory):
    """As `world`, with `last` in its features."""
    recipe, root, _ = world
    recipe = replace(recipe, extract=replace(recipe.extract, last=True))
    run_dir = RunDir(tmp_path_factory.mktemp("taught") / "run")
    run_dir.corpus.mkdir(parents=True)
    run_dir.prepared.write_bytes(RunDir(root).prepared.read_bytes())
    extract_stage.run(recipe, run_dir)
    return recipe, run_dir


def taught_run(taught, folder, **changes):
    recipe, made = taught
    run_dir = RunDir(folder)
    run_dir.root.mkdir()
    for name in ("corpus", "features"):
        (run_dir.root / name).symlink_to(made.root / name)
    return replace(recipe, train=replace(recipe.train, **changes)), run_dir


@pytest.mark.parametrize("vocabulary", [None, 64])
def test_a_run_with_several_terms_resumes_exactly(taught, tmp_path, monkeypatch, vocabulary):
    recipe, straight = taught_run(taught, tmp_path / "straight", objective=OBJECTIVE)
    recipe = replace(recipe, drafter=replace(recipe.drafter, draft_vocab=vocabulary))
    stage.run(recipe, straight)
    steps = events(straight, "step")
    assert {"kl", "kl_count", "tree", "tree_count"} <= steps[0].keys()
    _, stopped = taught_run(taught, tmp_path / "stopped")
    undo = stop_after(monkeypatch, 5)
    with pytest.raises(Interrupted, match="stopped after step 5"):
        stage.run(recipe, stopped)
    undo()
    stage.run(recipe, stopped)
    assert_same_end(straight, stopped)
