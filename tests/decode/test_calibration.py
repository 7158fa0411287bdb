"""Temperatures by depth and the figures that say what they are worth, against plain definitions."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafting import load_tiny_target, tiny_drafter
from paceline.decode.calibration import TemperatureFit, fit_temperatures
from paceline.decode.ddtree import draft_tree
from paceline.decode.simulate import accepted_depths
from paceline.decode.slot_figures import RANKS, SlotTally
from paceline.decode.speculate import decode_plain
from paceline.drafter.dflash import DFlash
from paceline.drafter.vocabulary import DraftVocabulary
from paceline.objective.blocks import block_targets


def drawn(seed, truth, *, anchors=400, columns=60, scale=2.0):
    """Logits [A, D, V], and labels drawn from them at the temperatures `truth`."""
    random = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(anchors, len(truth), columns, generator=random)
    odds = (logits / torch.tensor(truth)[:, None]).softmax(-1)
    labels = torch.multinomial(odds.flatten(0, 1), 1, generator=random).view(anchors, -1)
    valid = (torch.rand(labels.shape, generator=random) < 0.9).cumprod(dim=1).bool()
    return logits, labels, valid


def nll(logits, labels, temperature):
    """Mean over [n, V] and [n], in fp64."""
    log_probs = (logits.double() / temperature).log_softmax(-1)
    return -float(log_probs.gather(-1, labels[:, None]).mean())


def golden(logits, labels, low=0.25, high=4.0):
    """The temperature of lowest NLL by golden section."""
    ratio = (math.sqrt(5) - 1) / 2
    low, high = math.log(low), math.log(high)
    for _ in range(60):
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        if nll(logits, labels, math.exp(a)) < nll(logits, labels, math.exp(b)):
            high = b
        else:
            low = a
    return math.exp((low + high) / 2)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    truth=st.lists(st.floats(0.3, 3.5), min_size=1, max_size=4),
    scale=st.sampled_from([0.5, 2.0, 8.0]),
)
def test_a_fitted_temperature_has_the_lowest_nll(seed, truth, scale):
    logits, labels, valid = drawn(seed, truth, scale=scale)
    found = fit_temperatures(logits, labels, valid, least=1)
    for depth, temperature in enumerate(found.temperatures):
        rows, own = logits[:, depth][valid[:, depth]], labels[:, depth][valid[:, depth]]
        best = golden(rows, own)
        assert temperature == pytest.approx(best, rel=2e-3)
        assert nll(rows, own, temperature) <= nll(rows, own, best) + 1e-6
        assert found.after[depth].nll <= found.before[depth].nll + 1e-6
        assert found.before[depth].nll == pytest.approx(nll(rows, own, 1.0), rel=1e-5)
        assert found.after[depth].nll == pytest.approx(nll(rows, own, temperature), rel=1e-5)


def test_the_temperature_that_labels_were_drawn_with_is_found_and_mends_the_calibration():
    truth = (1.0, 1.6, 0.6)
    logits, labels, _ = drawn(3, truth, anchors=6000, columns=40)
    found = fit_temperatures(logits, labels, torch.ones_like(labels, dtype=torch.bool))
    assert found.temperatures == pytest.approx(truth, rel=0.05)
    assert max(depth.ece for depth in found.after) < 0.03
    assert min(found.before[depth].ece for depth in (1, 2)) > 0.1
    assert [d.covered for d in found.after] == [d.covered for d in found.before], "no order changes"


def test_labels_that_are_always_or_never_the_best_end_at_the_bounds():
    logits = torch.randn(80, 2, 30, generator=torch.Generator().manual_seed(0))
    labels = torch.stack((logits[:, 0].argmax(-1), logits[:, 1].argmin(-1)), dim=1)
    found = fit_temperatures(logits, labels, torch.ones_like(labels, dtype=torch.bool))
    assert found.temperatures == pytest.approx((0.25, 4.0))


def test_a_depth_with_few_labels_has_the_temperature_of_the_one_before():
    logits, labels, valid = drawn(5, (1.5, 0.5, 0.5), anchors=100)
    valid[9:, 1] = valid[:, 2] = False
    fitted = fit_temperatures(logits, labels, valid, least=1).temperatures
    found = fit_temperatures(logits, labels, valid, least=10).temperatures
    assert found == (fitted[0], fitted[0], fitted[0])
    assert fitted[1] != fitted[0]
    valid[:] = False
    assert fit_temperatures(logits, labels, valid).temperatures == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("make", [lambda: TemperatureFit(3), lambda: SlotTally(3, (0.5, 1.0, 2.0))])
def test_the_batches_do_not_matter(make):
    """Sums differ by rounding in fp64 alone, so the temperatures agree to many digits."""
    logits, labels, valid = drawn(7, (0.8, 1.2, 2.0))
    proposed = torch.ones_like(valid)
    whole, parts = make(), make()
    whole.add(logits, labels, proposed, valid)
    for part in torch.arange(labels.shape[0]).split(7):
        parts.add(logits[part], labels[part], proposed[part], valid[part])
    if isinstance(whole, SlotTally):
        torch.testing.assert_close(whole.sums, parts.sums)
        halves = [make(), make()]
        for half, rows in zip(halves, torch.arange(labels.shape[0]).split(200), strict=True):
            half.add(logits[rows], labels[rows], proposed[rows], valid[rows])
        torch.testing.assert_close(halves[0].sums + halves[1].sums, whole.sums)
    else:
        assert parts.temperatures() == pytest.approx(whole.temperatures(), rel=1e-9)
        again = make()
        again.add(logits, labels, proposed, valid)
        assert again.temperatures() == whole.temperatures(), "the same bits every time"


def test_logits_are_looked_at_in_parts_of_any_size(monkeypatch):
    logits, labels, valid = drawn(8, (0.8, 1.2), anchors=30)
    whole = fit_temperatures(logits, labels, valid, least=1)
    monkeypatch.setattr("paceline.decode.calibration._ELEMENTS", 200)
    monkeypatch.setattr("paceline.decode.slot_figures._ELEMENTS", 1)
    parts = fit_temperatures(logits, labels, valid, least=1)
    assert parts.temperatures == pytest.approx(whole.temperatures, rel=1e-9)
    for a, b in zip(parts.after, whole.after, strict=True):
        assert (a.slots, a.covered) == (b.slots, b.covered)
        assert (a.nll, a.ece) == pytest.approx((b.nll, b.ece), rel=1e-6)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**20), coarse=st.booleans(), tempered=st.booleans())
def test_the_figures_are_those_of_their_definition(seed, coarse, tempered):
    logits, labels, valid = drawn(seed, (1.0, 1.5), anchors=40, columns=25)
    if coarse:
        logits = logits.round()
    random = torch.Generator().manual_seed(seed + 1)
    proposed = torch.rand(labels.shape, generator=random) < 0.8
    temperatures = (0.5, 2.0) if tempered else None
    tally = SlotTally(2, temperatures)
    tally.add(logits, labels, proposed, valid)
    for depth, figures in enumerate(tally.figures()):
        temperature = temperatures[depth] if temperatures else 1.0
        bins = [[] for _ in range(15)]
        within, losses = dict.fromkeys(RANKS, 0), []
        for a in torch.nonzero(valid[:, depth]).flatten().tolist():
            row, label = logits[a, depth].double(), int(labels[a, depth])
            order = sorted(range(25), key=lambda c, row=row: (-float(row[c]), c))
            rank = order.index(label) if proposed[a, depth] else 25
            odds = (row / temperature).softmax(-1)
            if proposed[a, depth]:
                losses.append(-math.log(float(odds[label])))
            for k in RANKS:
                within[k] += rank < k
            sure = float(odds.max())
            bins[min(int(sure * 15), 14)].append((sure, rank == 0))
        slots = sum(map(len, bins))
        assert (figures.slots, figures.proposed) == (slots, len(losses))
        assert figures.covered == tuple(within[k] / slots for k in RANKS)
        assert figures.nll == pytest.approx(sum(losses) / max(len(losses), 1), rel=1e-5)
        gaps = [abs(sum(s for s, _ in b) - sum(r for _, r in b)) for b in bins]
        assert figures.ece == pytest.approx(sum(gaps) / slots, abs=1e-5)


def test_labels_outside_the_draft_vocabulary_are_misses_and_fit_nothing():
    logits, labels, valid = drawn(9, (1.3,), anchors=300)
    proposed = torch.arange(300)[:, None] % 3 > 0
    fit, inside = TemperatureFit(1), TemperatureFit(1)
    fit.add(logits, labels.where(proposed, 10**6), proposed, valid)
    inside.add(logits, labels, torch.ones_like(valid), valid & proposed)
    assert fit.temperatures() == inside.temperatures()


def test_logits_of_minus_infinity_are_tokens_that_are_never_proposed():
    logits, labels, valid = drawn(10, (1.3, 0.7))
    more = torch.cat((logits, torch.full((400, 2, 9), -math.inf)), dim=-1)
    plain, masked = (fit_temperatures(x, labels, valid) for x in (logits, more))
    assert masked.temperatures == pytest.approx(plain.temperatures, rel=1e-9)
    assert masked.after[1].nll == pytest.approx(plain.after[1].nll, rel=1e-6)


def test_temperatures_that_are_none_are_refused():
    with pytest.raises(ValueError, match="2 temperatures for 3 depths"):
        SlotTally(3, (1.0, 1.0))


@pytest.fixture(scope="module", params=["all tokens", "some tokens"])
def walked(request, tmp_path_factory):
    """A drafter, its head, and a document with the anchors of its answer."""
    target = load_tiny_target(tmp_path_factory.mktemp("target"))
    drafter = tiny_drafter(target, block_size=5)
    prompt = [5, 17, 90, 33, 8]
    answer = decode_plain(
        target, prompt, taps=drafter.config.taps, max_new_tokens=60, eos_ids=frozenset()
    )
    ids = torch.tensor([*prompt, *answer.ids])
    if request.param == "some tokens":
        counts = torch.tensor(answer.ids).bincount(minlength=320)
        kept = counts.argsort(descending=True, stable=True)[: len(set(answer.ids)) // 2]
        vocabulary = DraftVocabulary.of(kept.tolist(), 320)
        config = dataclasses.replace(drafter.config, draft_vocab_size=len(vocabulary))
        reduced = DFlash(config, vocabulary).eval()
        reduced.load_state_dict(drafter.state_dict(), strict=False)
        drafter = reduced
    mask = torch.arange(ids.numel()) >= len(prompt)
    document = (answer.features, ids, mask, torch.arange(5, 60))
    return drafter, drafter.narrowed(target.head), document


class Kept:
    def __init__(self):
        self.seen = []

    def add(self, *batch):
        self.seen.append([part.clone() for part in batch])


def test_the_walk_shows_its_logits_and_tempers_its_trees(walked, monkeypatch):
    drafter, head, document = walked
    _, ids, mask, anchors = document
    original = DFlash.draft

    def nearly_right(self, embeddings, anchors, contexts, documents):
        hidden = original(self, embeddings, anchors, contexts, documents)
        columns, proposed = drafter.to_draft(ids)
        for block, anchor in enumerate(anchors.tolist()):
            for slot in range(hidden.shape[1]):
                place = anchor + 1 + slot
                if place < ids.numel() and proposed[place]:
                    hidden[block, slot] += 0.8 * (place * 37 % 7) * head.lm_head[columns[place]]
        return hidden

    monkeypatch.setattr(DFlash, "draft", nearly_right)
    monkeypatch.setattr("paceline.decode.simulate._LOGITS", 8 * head.lm_head.shape[0])
    temperatures, budget = (4.0, 1.0, 0.5, 0.3), 12
    kept, tally, fit = Kept(), SlotTally(4), TemperatureFit(4)
    found = accepted_depths(
        drafter,
        head,
        *document,
        (budget,),
        temperatures=temperatures,
        observers=(kept, tally, fit),
    )
    assert len(kept.seen) == 28
    logits, columns, proposed, valid = (torch.cat(parts) for parts in zip(*kept.seen, strict=True))
    labels, wanted = block_targets(ids, mask, anchors, 5)
    assert torch.equal(valid, wanted)
    assert torch.equal(drafter.to_target(columns)[proposed], labels[proposed])
    assert torch.equal(proposed, drafter.proposes(labels))
    whole, refit = SlotTally(4), TemperatureFit(4)
    for observer in (whole, refit):
        observer.add(logits, columns, proposed, valid)
    torch.testing.assert_close(tally.sums, whole.sums)
    assert fit.temperatures(1) == pytest.approx(refit.temperatures(1), rel=1e-9)
    depths = []
    for row, anchor in enumerate(anchors):
        tree = draft_tree(
            int(ids[anchor]), logits[row], budget, d2t=drafter.d2t, temperatures=temperatures
        )
        node = reached = 0
        for token in labels[row][valid[row]].tolist():
            node = tree.children.get((node, token), -1)
            if node < 0:
                break
            reached += 1
        depths.append(reached)
    assert found[f"ddtree-{budget}"] == depths
    assert len(set(depths)) > 2
    plain = accepted_depths(drafter, head, *document, (budget,))
    assert plain["chain"] == found["chain"]
    assert plain[f"ddtree-{budget}"] != found[f"ddtree-{budget}"]
