"""The average of several drafters: exact for one, weighted by tokens, frozen tensors left alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from paceline.train.averaging import Outer, Share, give_weights, take_weights, trainable, weights_in


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.Embedding(4, 3))
    module[2].requires_grad_(False)
    return module


def share(seed: int, tokens: int) -> Share:
    return Share({n: t.clone() for n, t in trainable(model(seed)).items()}, tokens)


def test_of_one_drafter_not_a_bit_changes():
    for tokens in (1, 3, 12_345):
        center, alone = model(0), share(1, tokens)
        Outer(1.0, 0.0).go(center, [alone])
        for name, tensor in trainable(center).items():
            assert torch.equal(tensor, alone.weights[name])


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=4))
def test_weights_are_by_tokens_and_frozen_tensors_stay(tokens):
    center, before = model(0), model(0)
    shares = [share(seed + 1, count) for seed, count in enumerate(tokens)]
    Outer(1.0, 0.0).go(center, shares)
    assert torch.equal(center[2].weight, before[2].weight)
    if not sum(tokens):
        wanted = trainable(before)
    else:
        wanted = {
            name: sum(s.weights[name].double() * s.tokens for s in shares) / sum(tokens)
            for name in trainable(before)
        }
    for name, tensor in trainable(center).items():
        assert torch.allclose(tensor.double(), wanted[name].double(), atol=1e-6)


def test_the_outer_optimizer_is_nesterovs():
    """Beside torch's SGD with the way to the average as its gradient."""
    center, reference = model(0), model(0)
    sgd = torch.optim.SGD(
        [p for p in reference.parameters() if p.requires_grad], lr=0.7, momentum=0.9, nesterov=True
    )
    outer = Outer(0.7, 0.9)
    for turn in range(4):
        shares = [share(10 * turn + 1, 2), share(10 * turn + 2, 1)]
        for name, parameter in reference.named_parameters():
            if parameter.requires_grad:
                a, b = (s.weights[name] for s in shares)
                parameter.grad = parameter.data - (2 * a + b) / 3
        sgd.step()
        outer.go(center, shares)
        for name, tensor in trainable(center).items():
            assert torch.allclose(tensor, trainable(reference)[name], atol=1e-6), turn


def test_weights_travel_unchanged_and_what_is_not_finite_is_told():
    source, place = model(1), model(2)
    parcel, is_finite = give_weights(source)
    take_weights(place, weights_in(parcel, place))
    parcel.close()
    assert is_finite
    for name, tensor in trainable(place).items():
        assert torch.equal(tensor, trainable(source)[name])
    source[0].weight.data[0, 0] = float("nan")
    parcel, is_finite = give_weights(source)
    parcel.close()
    assert not is_finite


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_without_a_token_nothing_moves(momentum):
    center = model(0)
    Outer(0.5, momentum).go(center, [share(1, 0)])
    assert all(
        torch.equal(a, b) for a, b in zip(center.parameters(), model(0).parameters(), strict=True)
    )
