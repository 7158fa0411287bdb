"""Both implementations of block attention against one call with one explicit mask."""

import pytest
import torch
from torch.nn import functional as F

from paceline.drafter import attention
from paceline.drafter.attention import Document, EagerAttention, block_attention
from paceline.drafter.flex import FlexAttention
from paceline.drafter.visibility import Visibility

BLOCK, HEADS, KV_HEADS, DIM, LENGTH = 5, 6, 2, 16, 12
VISIBILITIES = [
    Visibility(causal, window) for causal in (False, True) for window in (None, 1, 3, 7, 20)
]


def _inputs(num_blocks: int, queries: int, length: int, **options) -> list[torch.Tensor]:
    shapes = [
        (num_blocks, queries, HEADS, DIM),
        (num_blocks, BLOCK, KV_HEADS, DIM),
        (num_blocks, BLOCK, KV_HEADS, DIM),
        (length, KV_HEADS, DIM),
        (length, KV_HEADS, DIM),
    ]
    return [torch.randn(shape, requires_grad=True, **options) for shape in shapes]


def _masked_sdpa(q, k_block, v_block, k_context, v_context, anchors, visibility):
    """The same attention as one call over all keys; the mask is spelt out number by number."""
    num_blocks, queries = q.shape[:2]
    length, share = k_context.shape[0], HEADS // KV_HEADS
    keys = torch.cat((k_context, k_block.flatten(0, 1))).repeat_interleave(share, dim=1)
    values = torch.cat((v_context, v_block.flatten(0, 1))).repeat_interleave(share, dim=1)
    mask = torch.zeros(num_blocks * queries, keys.shape[0], dtype=torch.bool)
    window = visibility.window or 10**9
    for block, anchor in enumerate(anchors.tolist()):
        for query in range(queries):
            slot = query + BLOCK - queries
            row = mask[block * queries + query]
            for position in range(length):
                row[position] = anchor + slot - window < position < anchor
            for other in range(BLOCK):
                seen = other <= slot or not visibility.causal
                row[length + block * BLOCK + other] = seen and abs(slot - other) < window
    out = F.scaled_dot_product_attention(
        q.flatten(0, 1).transpose(0, 1),
        keys.transpose(0, 1),
        values.transpose(0, 1),
        attn_mask=mask,
    )
    return out.transpose(0, 1).reshape(num_blocks, queries, HEADS, DIM)


@pytest.mark.parametrize("group_rows", [6, 30, 1000])
@pytest.mark.parametrize("queries", [BLOCK, BLOCK - 1])
@pytest.mark.parametrize("anchors", [[0], [3, 3, 9], [1, 4, 8, 12], [12, 3]])
def test_it_equals_one_masked_call_with_its_gradients(anchors, queries, group_rows, monkeypatch):
    monkeypatch.setattr(attention, "_GROUP_ROWS", group_rows)
    torch.manual_seed(0)
    where = torch.tensor(anchors)
    for visibility in VISIBILITIES:
        inputs = _inputs(len(anchors), queries, LENGTH, dtype=torch.float64)
        ours = block_attention(*inputs, where, visibility)
        whole = _masked_sdpa(*inputs, where, visibility)
        torch.testing.assert_close(ours, whole)
        upstream = torch.randn_like(whole)
        for own, wanted in zip(
            torch.autograd.grad(ours, inputs, upstream),
            torch.autograd.grad(whole, inputs, upstream),
            strict=True,
        ):
            torch.testing.assert_close(own, wanted)


def test_without_gradients_nothing_of_the_scores_size_is_kept():
    torch.manual_seed(0)
    inputs = _inputs(2, BLOCK, LENGTH)
    with_gradient = block_attention(*inputs, torch.tensor([4, 9]))
    assert with_gradient.grad_fn is not None
    with torch.no_grad():
        without = block_attention(*inputs, torch.tensor([4, 9]))
    assert without.grad_fn is None
    assert torch.equal(without, with_gradient)


def _batch(device: str) -> tuple[list[torch.Tensor], torch.Tensor, list[Document]]:
    """Three documents, the last with context that no block of it needs, and rows of none."""
    torch.manual_seed(1)
    lengths, anchors = (140, 9, 30), ([20, 130, 131], [9], [4, 25])
    documents, row, block = [], 0, 0
    for length, own in zip(lengths, anchors, strict=True):
        documents.append(
            Document(rows=slice(row, row + length), blocks=slice(block, block + len(own)))
        )
        row, block = row + length, block + len(own)
    where = torch.tensor([a for own in anchors for a in own], device=device)
    return _inputs(block, BLOCK, row + 3, device=device), where, documents


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("visibility", VISIBILITIES, ids=str)
@pytest.mark.parametrize("queries", [BLOCK, BLOCK - 1])
def test_flex_attention_equals_the_reference(visibility, queries):
    inputs, where, documents = _batch("cpu")
    inputs = [x.detach() for x in inputs]  # it has no backward on a CPU, and refuses at once
    q, k_block, v_block, *context = inputs
    arguments = (q[:, BLOCK - queries :], k_block, v_block, tuple(context), visibility)
    with torch.no_grad():
        wanted = EagerAttention(where, documents)(*arguments)
        found = FlexAttention(where, documents)(*arguments)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("visibility", VISIBILITIES, ids=str)
@pytest.mark.parametrize("queries", [BLOCK, BLOCK - 1])
def test_flex_attention_on_cuda_has_the_reference_s_gradients(visibility, queries):
    inputs, where, documents = _batch("cuda")
    q, k_block, v_block, *context = inputs
    arguments = (q[:, BLOCK - queries :], k_block, v_block, tuple(context), visibility)
    wanted = EagerAttention(where, documents)(*arguments)
    found = FlexAttention(where, documents)(*arguments)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    upstream = torch.randn_like(wanted)
    for own, right in zip(
        torch.autograd.grad(found, inputs, upstream),
        torch.autograd.grad(wanted, inputs, upstream),
        strict=True,
    ):
        torch.testing.assert_close(own, right, rtol=1e-2, atol=1e-2)
