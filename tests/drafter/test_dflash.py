import pytest
import torch
from torch.nn import functional as F

from drafting import MASK, Doc, load_tiny_target, make_doc, run_blocks, tiny_drafter
from paceline.drafter.attention import block_attention
from paceline.drafter.dflash import Document
from paceline.drafter.session import DraftSession


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def target(request, tmp_path_factory):
    return load_tiny_target(tmp_path_factory.mktemp("target"), request.param)


@pytest.fixture(scope="module")
def drafter(target):
    return tiny_drafter(target)


@pytest.fixture(scope="module")
def doc(target) -> Doc:
    return make_doc(target, 24, answer_from=6)


def _masked_sdpa(q, k_block, v_block, k_context, v_context, anchors):
    """The same attention as one call over all keys with one explicit mask."""
    num_blocks, block, heads, dim = q.shape
    group = heads // k_block.shape[2]
    keys = torch.cat((k_context, k_block.flatten(0, 1))).repeat_interleave(group, dim=1)
    values = torch.cat((v_context, v_block.flatten(0, 1))).repeat_interleave(group, dim=1)
    length = k_context.shape[0]
    owner = torch.arange(num_blocks).repeat_interleave(block)
    sees_context = torch.arange(length) < anchors[owner][:, None]
    sees_block = owner[:, None] == owner[None, :]
    mask = torch.cat((sees_context, sees_block), dim=1)
    out = F.scaled_dot_product_attention(
        q.flatten(0, 1).transpose(0, 1),
        keys.transpose(0, 1),
        values.transpose(0, 1),
        attn_mask=mask,
    )
    return out.transpose(0, 1).reshape(num_blocks, block, heads, dim)


@pytest.mark.parametrize("anchors", [[0], [3, 3, 9], [1, 4, 8, 12]])
def test_merged_attention_equals_one_masked_sdpa_call_with_its_gradients(anchors):
    torch.manual_seed(0)
    block, heads, kv_heads, dim, length = 5, 6, 2, 8, 12
    where = torch.tensor(anchors)
    shapes = [
        (len(anchors), block, heads, dim),
        (len(anchors), block, kv_heads, dim),
        (len(anchors), block, kv_heads, dim),
        (length, kv_heads, dim),
        (length, kv_heads, dim),
    ]
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    merged = block_attention(*inputs, where)
    whole = _masked_sdpa(*inputs, where)
    torch.testing.assert_close(merged, whole, rtol=1e-6, atol=1e-6)
    upstream = torch.randn_like(whole)
    for ours, theirs in zip(
        torch.autograd.grad(merged, inputs, upstream),
        torch.autograd.grad(whole, inputs, upstream),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_pitfall_02_slot_0_is_the_anchor_token(target, drafter, doc):
    before = run_blocks(drafter, target, doc, [10])
    other = Doc(ids=doc.ids.clone(), mask=doc.mask, taps=doc.taps)
    other.ids[10] = (other.ids[10] + 7) % 256
    assert not torch.allclose(before, run_blocks(drafter, target, other, [10]))


def test_pitfall_03_context_ends_strictly_before_the_anchor(target, drafter, doc):
    before = run_blocks(drafter, target, doc, [10])
    behind = doc.taps.clone()
    behind[10:] += 100.0
    assert torch.equal(before, run_blocks(drafter, target, doc, [10], behind))
    last_visible = doc.taps.clone()
    last_visible[9] += 1.0
    assert not torch.allclose(before, run_blocks(drafter, target, doc, [10], last_visible))


def test_pitfall_04_blocks_do_not_see_each_other(target, drafter, doc):
    anchors = [6, 7, 8, 10, 15, 20]
    together = run_blocks(drafter, target, doc, anchors)
    for row, anchor in enumerate(anchors):
        alone = run_blocks(drafter, target, doc, [anchor])
        torch.testing.assert_close(together[row], alone[0], rtol=1e-5, atol=1e-5)


def test_t_68_bidirectional_inside_the_block(target, drafter, doc):
    """The first drafted slot sees the later slots, as the last sees the first."""
    block = drafter.config.block_size
    embeddings = target.head.embed(torch.full((1, block), MASK))
    other = embeddings.clone()
    other[0, -1] += 1.0
    where, rows = torch.tensor([10]), doc.taps.shape[0]
    documents = [Document(rows=slice(0, rows), blocks=slice(0, 1))]
    with torch.no_grad():
        first = drafter(embeddings, where, doc.taps, torch.arange(rows), documents)
        second = drafter(other, where, doc.taps, torch.arange(rows), documents)
    assert not torch.allclose(first[0, 0], second[0, 0])


def test_pitfall_05_packed_documents_equal_separate_ones(target, drafter):
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
def test_pitfall_06_training_pass_equals_cached_inference(target, drafter, doc, split):
    """Positions, rope and cache: the block at one anchor is the same in both modes."""
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
