import pytest
import torch

from drafting import MASK, Doc, load_tiny_target, make_doc, run_blocks, tiny_drafter
from paceline.drafter.attention import Document
from paceline.drafter.session import DraftSession


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def target(request, tmp_path_factory):
    return load_tiny_target(tmp_path_factory.mktemp("target"), request.param)


@pytest.fixture(scope="module")
def drafter(target):
    return tiny_drafter(target)


MASKS = [
    {},
    {"in_block_mask": "causal"},
    {"layer_types": ("sliding", "full"), "sliding_window": 5},
    {
        "layer_types": ("full", "sliding"),
        "sliding_window": 3,
        "sliding_in_block_mask": "bidirectional",
    },
]
"""Recipe fields that make the four kinds of layers."""


@pytest.fixture(scope="module", params=MASKS, ids=["full", "causal", "sliding", "sliding-both"])
def masked(request, target):
    """A drafter of each kind of mask."""
    return tiny_drafter(target, **request.param)


@pytest.fixture(scope="module")
def doc(target) -> Doc:
    return make_doc(target, 24, answer_from=6)


def test_pitfall_02_slot_0_is_the_anchor_token(target, drafter, doc):
    before = run_blocks(drafter, target, doc, [10])
    other = Doc(ids=doc.ids.clone(), mask=doc.mask, taps=doc.taps)
    other.ids[10] = (other.ids[10] + 7) % 256
    assert not torch.allclose(before, run_blocks(drafter, target, other, [10]))


def test_pitfall_03_context_ends_strictly_before_the_anchor(target, masked, doc):
    before = run_blocks(masked, target, doc, [10])
    behind = doc.taps.clone()
    behind[10:] += 100.0
    assert torch.equal(before, run_blocks(masked, target, doc, [10], behind))
    last_visible = doc.taps.clone()
    last_visible[9] += 1.0
    assert not torch.allclose(before, run_blocks(masked, target, doc, [10], last_visible))


def test_pitfall_04_blocks_do_not_see_each_other(target, masked, doc):
    drafter = masked
    anchors = [6, 7, 8, 10, 15, 20]
    together = run_blocks(drafter, target, doc, anchors)
    for row, anchor in enumerate(anchors):
        alone = run_blocks(drafter, target, doc, [anchor])
        torch.testing.assert_close(together[row], alone[0], rtol=1e-5, atol=1e-5)


def _with_another_last_slot(drafter, target, doc) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states [B - 1, H] of one block, and with its last slot's embedding changed."""
    embeddings = target.head.embed(torch.full((1, drafter.config.block_size), MASK))
    other = embeddings.clone()
    other[0, -1] += 1.0
    where, rows = torch.tensor([10]), doc.taps.shape[0]
    documents = [Document(rows=slice(0, rows), blocks=slice(0, 1))]
    with torch.no_grad():
        first = drafter(embeddings, where, doc.taps, torch.arange(rows), documents)
        second = drafter(other, where, doc.taps, torch.arange(rows), documents)
    return first[0], second[0]


def test_t_68_bidirectional_inside_the_block(target, drafter, doc):
    """The first drafted slot sees the later slots, as the last sees the first."""
    first, second = _with_another_last_slot(drafter, target, doc)
    assert not torch.allclose(first[0], second[0])


@pytest.mark.parametrize(
    "fields",
    [
        {"in_block_mask": "causal"},
        {"in_block_mask": "causal", "layer_types": ("sliding", "full"), "sliding_window": 4},
    ],
)
def test_a_causal_slot_sees_no_later_slot(target, doc, fields):
    first, second = _with_another_last_slot(tiny_drafter(target, **fields), target, doc)
    assert torch.equal(first[:-1], second[:-1])
    assert not torch.allclose(first[-1], second[-1])


@pytest.mark.parametrize("window", [1, 2, 5, 8])
def test_pitfall_20_a_sliding_window_counts_the_slot_itself(target, doc, window):
    """Slot j of anchor a sees context from a + j - (window - 1) on, not one row more or less."""
    fields = {"layer_types": ("sliding",), "sliding_window": window}
    drafter, anchor = tiny_drafter(target, layers=1, **fields), 12
    before = run_blocks(drafter, target, doc, [anchor])[0]
    for row in range(anchor):
        taps = doc.taps.clone()
        taps[row] += 1.0
        after = run_blocks(drafter, target, doc, [anchor], taps)[0]
        for slot in range(1, drafter.config.block_size):
            sees = row >= anchor + slot - (window - 1)
            assert torch.equal(before[slot - 1], after[slot - 1]) != sees, (row, slot)


def test_pitfall_20_a_wide_window_is_full_attention(target, doc):
    wide = {"layer_types": ("sliding", "sliding"), "sliding_window": 100}
    sliding = tiny_drafter(target, **wide, sliding_in_block_mask="bidirectional")
    full = tiny_drafter(target)
    torch.testing.assert_close(
        run_blocks(sliding, target, doc, [8, 14]), run_blocks(full, target, doc, [8, 14])
    )


def test_pitfall_05_packed_documents_equal_separate_ones(target, masked):
    drafter = masked
    docs = [make_doc(target, n, answer_from=4, seed=n) for n in (12, 20, 9)]
    anchors = [[5, 8], [4, 11, 18], [7]]
    alone = [run_blocks(drafter, target, d, a) for d, a in zip(docs, anchors, strict=True)]
    documents, row, block = [], 0, 0
    for doc, where in zip(docs, anchors, strict=True):
        documents.append(
            Document(
                rows=slice(row, row + doc.taps.shape[0]), blocks=slice(block, block + len(where))
            )
        )
        row += doc.taps.shape[0]
        block += len(where)
    ids = torch.full((block, drafter.config.block_size), MASK)
    flat = [(d, a) for d, where in zip(docs, anchors, strict=True) for a in where]
    ids[:, 0] = torch.tensor([int(d.ids[a]) for d, a in flat])
    with torch.no_grad():
        packed = drafter(
            target.head.embed(ids),
            torch.tensor([a for _, a in flat]),
            torch.cat([d.taps for d in docs]),
            torch.cat([torch.arange(d.taps.shape[0]) for d in docs]),
            documents,
        )
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("split", [1, 5, 9, 10])
def test_pitfall_06_training_pass_equals_cached_inference(target, masked, doc, split):
    """Positions, rope, mask and cache: the block at one anchor is the same in both modes."""
    drafter = masked
    anchor = 10
    trained = target.head.logits(run_blocks(drafter, target, doc, [anchor])[0])
    session = DraftSession(drafter, target.head)
    with torch.no_grad():
        session.extend(doc.taps[:split])
        if split < anchor:
            session.extend(doc.taps[split:anchor])
        decoded = session.slot_logits(int(doc.ids[anchor]))
    torch.testing.assert_close(trained, decoded, rtol=1e-4, atol=1e-4)


def test_pitfall_09_a_draft_leaves_nothing_in_the_cache(target, drafter, doc):
    session = DraftSession(drafter, target.head)
    with torch.no_grad():
        session.extend(doc.taps[:6])
        for anchor in range(6, 12):
            assert session.length == anchor
            drafted = session.slot_logits(int(doc.ids[anchor]))
            fresh = target.head.logits(run_blocks(drafter, target, doc, [anchor])[0])
            torch.testing.assert_close(drafted, fresh, rtol=1e-4, atol=1e-4)
            session.extend(doc.taps[anchor : anchor + 1])


def test_absolute_positions_matter(target, drafter, doc):
    """Moving context and block together changes nothing, moving the block alone does (rope)."""
    block = drafter.config.block_size
    ids = torch.full((1, block), MASK)
    ids[0, 0] = doc.ids[10]
    documents = [Document(rows=slice(0, 10), blocks=slice(0, 1))]

    def blocks(shift_context: int, shift_anchor: int) -> torch.Tensor:
        with torch.no_grad():
            contexts = drafter.contexts(doc.taps[:10], torch.arange(10) + shift_context)
            return drafter.draft(
                target.head.embed(ids), torch.tensor([10 + shift_anchor]), contexts, documents
            )

    torch.testing.assert_close(blocks(0, 0), blocks(40, 40), rtol=1e-3, atol=1e-3)
    assert not torch.allclose(blocks(0, 0), blocks(0, 5), atol=1e-3)
