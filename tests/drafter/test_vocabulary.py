"""A reduced draft vocabulary: which tokens, how they are numbered, and that no text changes."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from drafting import TAPS, capture, decayed, load_tiny_target, tiny_drafter
from paceline.decode.simulate import accepted_depths, method_name, walk_rounds
from paceline.decode.speculate import decode_plain, decode_speculative
from paceline.drafter.checkpoint import load_drafter, save_drafter
from paceline.drafter.config import DrafterConfig
from paceline.drafter.dflash import DFlash
from paceline.drafter.proposer import Proposer
from paceline.drafter.session import DraftSession
from paceline.drafter.vocabulary import DraftVocabulary, choose_vocabulary, coverage
from paceline.durable.errors import RecipeError, ShardDamaged
from paceline.recipe.schema import TrainRecipe
from paceline.train.batch import anchor_sample, pack
from paceline.train.objective import block_loss
from paceline.train.optimizer import build_optimizer

COUNTS = {0: 10, 5: 7, 9: 7, 12: 1, 15: 3}
PROMPTS = [[5, 17, 90, 33, 8], [200, 3], [77] * 9]


def counts_of(seen: dict[int, int], size: int = 16) -> torch.Tensor:
    counts = torch.zeros(size, dtype=torch.int64)
    for token, count in seen.items():
        counts[token] = count
    return counts


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_tiny_target(tmp_path_factory.mktemp("target"))


def reduced(drafter: DFlash, ids, vocab_size: int = 320) -> DFlash:
    """The drafter with the same weights, proposing `ids` alone."""
    vocabulary = DraftVocabulary.of(ids, vocab_size)
    config = dataclasses.replace(drafter.config, draft_vocab_size=len(vocabulary))
    other = DFlash(config, vocabulary)
    other.load_state_dict(drafter.state_dict(), strict=False)
    return other.eval()


def test_t_25_the_most_frequent_tokens_as_offsets():
    vocabulary = choose_vocabulary(counts_of(COUNTS), 4, tokenizer_size=16)
    found = coverage(vocabulary, counts_of(COUNTS))
    assert vocabulary.ids.tolist() == [0, 5, 9, 15]
    assert vocabulary.d2t.tolist() == [0, 4, 7, 12]
    assert int(vocabulary.t2d.sum()) == 4
    assert (found.covered, found.total) == (27, 28)
    assert found.share == pytest.approx(0.9643, abs=1e-4)


def test_t_26_the_lowest_free_ids_fill_up():
    vocabulary = choose_vocabulary(counts_of(COUNTS), 8, tokenizer_size=16)
    assert vocabulary.ids.tolist() == [0, 1, 2, 3, 5, 9, 12, 15]
    assert vocabulary.d2t.tolist() == [0, 0, 0, 0, 1, 4, 6, 8]
    assert sum(i not in COUNTS for i in vocabulary.ids.tolist()) == 3
    assert coverage(vocabulary, counts_of(COUNTS)).share == 1.0
    with pytest.raises(RecipeError, match=r"drafter\.draft_vocab: 17 .* has 16"):
        choose_vocabulary(counts_of(COUNTS), 17, tokenizer_size=16)


def test_t_28_no_padding_row_is_ever_chosen():
    counts = torch.zeros(320, dtype=torch.int64)
    counts[7], counts[310] = 5, 1000
    vocabulary = choose_vocabulary(counts, 300, tokenizer_size=300)
    found = coverage(vocabulary, counts)
    assert vocabulary.t2d.shape == (320,)
    assert vocabulary.ids.tolist() == list(range(300))
    assert (found.covered, found.total) == (5, 1005), "what cannot be proposed is not covered"
    with pytest.raises(RecipeError, match="has 300"):
        choose_vocabulary(counts, 301, tokenizer_size=300)


def test_t_28_a_drafter_of_padded_rows_decodes(target):
    drafter = reduced(tiny_drafter(target), range(300))
    assert drafter.t2d.shape == (320,)
    wanted = plain(target, PROMPTS[0], 12)
    assert speculative(target, drafter, PROMPTS[0], 12, 8).ids == wanted.ids


def test_end_tokens_are_chosen_whatever_their_count():
    vocabulary = choose_vocabulary(counts_of(COUNTS), 4, tokenizer_size=16, always=[12, 14])
    assert vocabulary.ids.tolist() == [0, 5, 12, 14]
    with pytest.raises(RecipeError, match="no room for the target's 2 end tokens"):
        choose_vocabulary(counts_of(COUNTS), 1, tokenizer_size=16, always=[12, 14])


@given(
    seen=st.dictionaries(st.integers(0, 39), st.integers(1, 3), max_size=40),
    size=st.integers(1, 30),
    tokenizer_size=st.integers(30, 40),
    forced=st.sets(st.integers(0, 29), max_size=1),
)
def test_what_is_chosen_is_seen_most_and_deterministic(seen, size, tokenizer_size, forced):
    counts = counts_of(seen, 40)
    vocabulary = choose_vocabulary(counts, size, tokenizer_size=tokenizer_size, always=forced)
    ids = vocabulary.ids.tolist()
    legal = range(tokenizer_size)
    by_rank = sorted(legal, key=lambda i: (i not in forced, -seen.get(i, 0), i))
    assert ids == sorted(by_rank[:size])
    assert coverage(vocabulary, counts).covered == sum(seen.get(i, 0) for i in ids)


@given(ids=st.sets(st.integers(0, 39), min_size=1), target_ids=st.lists(st.integers(0, 39)))
def test_pitfall_25_the_map_goes_there_and_back(ids, target_ids):
    vocabulary = DraftVocabulary.of(ids, 40)
    again = DraftVocabulary.from_tables(vocabulary.d2t, vocabulary.t2d)
    assert torch.equal(again.ids, vocabulary.ids)
    drafter = proposer(vocabulary)
    every = torch.arange(len(vocabulary))
    assert drafter.to_target(every).tolist() == sorted(ids)
    there, proposed = drafter.to_draft(drafter.to_target(every))
    assert torch.equal(there, every)
    assert proposed.all()
    asked = torch.tensor(target_ids, dtype=torch.int64)
    there, proposed = drafter.to_draft(asked)
    assert proposed.tolist() == [i in ids for i in target_ids]
    assert torch.equal(drafter.to_target(there)[proposed], asked[proposed])


def proposer(vocabulary: DraftVocabulary) -> Proposer:
    """A proposer without any layers."""
    config = DrafterConfig(
        algorithm="dflash", hidden_size=4, intermediate_size=4, num_layers=0, num_heads=1,
        num_kv_heads=1, head_dim=4, rms_norm_eps=1e-5, rope={}, max_position=8, vocab_size=40,
        draft_vocab_size=len(vocabulary), block_size=2, mask_token_id=0, taps=(1,),
    )  # fmt: skip
    return Proposer(config, vocabulary)


def test_pitfall_25_ids_in_the_place_of_offsets_are_refused():
    vocabulary = DraftVocabulary.of([0, 5, 9, 15], 16)
    with pytest.raises(ValueError, match="name different ones"):
        DraftVocabulary.from_tables(vocabulary.ids, vocabulary.t2d)
    with pytest.raises(ValueError, match="bool"):
        DraftVocabulary.from_tables(vocabulary.d2t, vocabulary.t2d.long())


def plain(target, prompt, limit):
    return decode_plain(target, prompt, taps=TAPS, max_new_tokens=limit, eos_ids=frozenset())


def speculative(target, drafter, prompt, limit, budget):
    return decode_speculative(
        target,
        drafter,
        drafter.narrowed(target.head),
        prompt,
        max_new_tokens=limit,
        eos_ids=frozenset(),
        budget=budget,
    )


@pytest.mark.parametrize("budget", [None, 1, 16])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_pitfall_25_a_reduced_drafter_decodes_to_the_same_text(target, prompt, budget):
    drafter = reduced(tiny_drafter(target), range(1, 200, 3))
    assert speculative(target, drafter, prompt, 30, budget).ids == plain(target, prompt, 30).ids


def test_pitfall_25_what_is_proposed_are_the_target_s_own_ids(target):
    """The reduced drafter's order is the full one's with the other tokens left out."""
    full = tiny_drafter(target)
    ids = [3, 4, 50, 51, 120, 257]
    drafter = reduced(full, ids)
    features = capture(target, torch.arange(9), torch.ones(9, dtype=torch.bool))
    logits = []
    for one in (full, drafter):
        session = DraftSession(one, one.narrowed(target.head))
        with torch.no_grad():
            session.extend(features.taps)
            logits.append(session.slot_logits(7))
    assert logits[1].shape == (3, 6)
    torch.testing.assert_close(logits[1], logits[0][:, ids])
    best = drafter.to_target(logits[1].argmax(-1))
    assert best.tolist() == [ids[i] for i in logits[0][:, ids].argmax(-1).tolist()]


def test_a_whole_vocabulary_copies_nothing(target):
    drafter = tiny_drafter(target)
    assert drafter.narrowed(target.head) is target.head
    assert drafter.vocabulary is None
    assert not {"d2t", "t2d"} & set(drafter.state_dict())


def test_a_head_that_was_not_narrowed_is_refused(target):
    drafter = reduced(tiny_drafter(target), range(50))
    with pytest.raises(ValueError, match="320 rows for a drafter that proposes 50"):
        DraftSession(drafter, target.head)


@pytest.mark.parametrize("budget", [None, 6])
def test_the_walk_gives_the_rounds_of_a_reduced_drafter(target, budget):
    """A drafter that has learnt its text by heart, but for the tokens it cannot propose."""
    prompt, limit, block = [5, 17, 90, 33, 8], 32, 4
    answer = plain(target, prompt, limit + block)
    common = torch.tensor(answer.ids).bincount(minlength=320).argsort(descending=True, stable=True)
    kept = common[: int(len(set(answer.ids)) * 0.6)].tolist()
    outside = set(answer.ids) - set(kept)
    assert outside
    drafter, head = _learnt(target, prompt, answer, kept)
    real = speculative(target, drafter, prompt, limit, budget)
    assert real.ids == answer.ids[:limit]
    ids = torch.tensor([*prompt, *answer.ids])
    depths = accepted_depths(
        drafter,
        head,
        answer.features,
        ids,
        torch.arange(ids.numel()) >= len(prompt),
        torch.arange(len(prompt), len(prompt) + limit - 1),
        [budget or 6],
    )
    assert walk_rounds(depths[method_name(budget)], stop=limit, end=None) == real.rounds
    assert real.tau > 1.5
    starts = torch.tensor([0, *real.rounds]).cumsum(0).tolist()
    for start, stop in itertools.pairwise(starts):
        drafted = answer.ids[start + 1 : stop]  # the last of a round is the target's own
        assert not outside & set(drafted), "a token outside ends its round"


def _learnt(target, prompt, answer, kept):
    ids = torch.tensor([*prompt, *answer.ids])[: answer.features.shape[0]]
    features = capture(target, ids, torch.arange(ids.numel()) >= len(prompt))
    drafter = reduced(tiny_drafter(target, init="random"), kept).train()
    head = drafter.narrowed(target.head)
    optimizer = build_optimizer(drafter, TrainRecipe(learning_rate=3e-3))
    before = {name: buffer.clone() for name, buffer in drafter.named_buffers()}
    for epoch in range(120):
        sample = anchor_sample(features, count=24, seed=0, epoch=epoch)
        loss = block_loss(drafter, head, packed(drafter, sample), decayed(4.0), chunk=1 << 20)
        (loss.sum / loss.count).backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(value, before[name]) for name, value in drafter.named_buffers())
    return drafter.eval(), head


def packed(drafter, sample):
    return pack(
        [sample],
        block_size=drafter.config.block_size,
        mask_token_id=drafter.config.mask_token_id,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def test_rows_outside_have_no_loss_and_are_counted(target):
    ids = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(1))
    features = capture(target, ids, torch.arange(40) >= 5)
    full = tiny_drafter(target)
    kept = sorted(set(ids[::2].tolist()))
    drafter = reduced(full, kept)
    head = drafter.narrowed(target.head)
    batch = packed(drafter, anchor_sample(features, count=20, seed=0, epoch=0))
    loss = block_loss(drafter, head, batch, decayed(4.0), chunk=1 << 20)
    with torch.no_grad():
        hidden = full(
            target.head.embed(batch.block_ids),
            batch.anchors,
            batch.taps,
            batch.positions,
            batch.documents,
        )
        log_probs = (hidden @ target.head.lm_head[kept].T).log_softmax(-1)
    total = count = 0.0
    outside = 0
    for block in range(batch.labels.shape[0]):
        for slot in range(batch.labels.shape[1]):
            if not batch.valid[block, slot]:
                continue
            label = int(batch.labels[block, slot])
            if label not in kept:
                outside += 1
                continue
            weight = torch.exp(torch.tensor(-slot / 4.0)).item()
            total -= weight * log_probs[block, slot, kept.index(label)].item()
            count += weight
    assert outside > 0
    assert float(loss.sum.detach()) == pytest.approx(total, rel=1e-5)
    assert loss.count == pytest.approx(count, rel=1e-6)
    assert loss.parts["outside"] == outside
    assert loss.parts["outside_count"] == loss.parts["right_count"] == int(batch.valid.sum())


def test_a_batch_whose_labels_all_lie_outside_is_finite(target):
    ids = torch.randint(0, 256, (20,), generator=torch.Generator().manual_seed(1))
    features = capture(target, ids, torch.arange(20) >= 5)
    drafter = reduced(tiny_drafter(target), [257, 258])
    batch = packed(drafter, anchor_sample(features, count=8, seed=0, epoch=0))
    loss = block_loss(drafter, drafter.narrowed(target.head), batch, decayed(4.0), chunk=1 << 20)
    loss.sum.backward()
    assert (float(loss.sum.detach()), loss.count) == (0.0, 0.0)
    assert loss.parts["outside"] == loss.parts["outside_count"] > 0


def test_saved_with_the_names_that_engines_read(target, tmp_path):
    drafter = reduced(tiny_drafter(target), [0, 5, 9, 15])
    save_drafter(drafter, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["d2t"].dtype == torch.int64
    assert stored["d2t"].tolist() == [0, 4, 7, 12]
    assert stored["t2d"].dtype == torch.bool
    assert stored["t2d"].nonzero().flatten().tolist() == [0, 5, 9, 15]
    again = load_drafter(tmp_path)
    assert again.config.draft_vocab_size == 4
    assert again.vocabulary.ids.tolist() == [0, 5, 9, 15]
    assert {n for n, _ in again.named_parameters()} == {n for n, _ in drafter.named_parameters()}
    assert not {"d2t", "t2d"} & {name for name, _ in again.named_parameters()}


@pytest.mark.parametrize("harm", ["ids", "other", "missing", "fewer", "dtype"])
def test_tables_that_disagree_are_damage(target, tmp_path, harm):
    drafter = reduced(tiny_drafter(target), [0, 5, 9, 15])
    save_drafter(drafter, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    if harm == "ids":
        stored["d2t"] = torch.tensor([0, 5, 9, 15])
    elif harm == "other":
        stored["t2d"] = stored["t2d"].roll(1)
    elif harm == "missing":
        del stored["d2t"]
    elif harm == "fewer":
        stored["t2d"][5] = False
    else:
        stored["d2t"] = stored["d2t"].int()
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ShardDamaged, match=r"model\.safetensors"):
        load_drafter(tmp_path)
