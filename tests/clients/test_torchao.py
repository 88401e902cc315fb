# SPDX-License-Identifier: Apache-2.0
"""torchao's low-bit AdamW behind FMuon."""

import io
import shutil

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import fmuon

optim = pytest.importorskip("torchao.optim", reason="needs torchao: the extra `clients`")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="torchao compiles its step with g++"),
]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 64)
        self.first = nn.Linear(64, 8)


def train(model, optimizer, seeds):
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()


def make(model, lr=0.01, kind="AdamW8bit"):
    return fmuon.FMuon(model, lr=lr, weight_decay=0.1, auxiliary=(getattr(optim, kind), {}))


@pytest.mark.parametrize(
    ("kind", "state", "codes"),
    [
        ("AdamW8bit", "OptimState8bit", torch.uint8),
        ("AdamWFp8", "OptimStateFp8", torch.float8_e4m3fn),
    ],
)
def test_resumed_equals_uninterrupted_and_the_state_is_low_bit(kind, state, codes):
    model = Model()
    optimizer = make(model, kind=kind)
    train(model, optimizer, range(2))
    moments = optimizer.state[model.embed.weight]
    assert type(moments["exp_avg"]).__name__ == state
    assert moments["exp_avg"].codes.dtype == codes
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    weights, saved = torch.load(file, weights_only=True)
    resumed = Model()
    resumed.load_state_dict(weights)
    again = make(resumed, kind=kind)
    again.load_state_dict(saved)
    scheduled = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (optimizer, again)]
    for seed in (2, 3):
        for m, o in ((model, optimizer), (resumed, again)):
            train(m, o, [seed])
        for scheduler in scheduled:
            scheduler.step()
    assert_close(resumed.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert optimizer.param_groups[1]["lr"] == 0.0025


def test_it_moves_as_it_does_alone():
    model, alone = Model(), Model()
    alone.load_state_dict(model.state_dict())
    train(model, make(model), range(2))
    vectors = [alone.embed.weight, alone.first.bias]
    train(alone, optim.AdamW8bit(vectors, lr=0.01, weight_decay=0.1), range(2))
    assert_close(model.embed.weight, alone.embed.weight, rtol=0, atol=0)
    assert_close(model.first.bias, alone.first.bias, rtol=0, atol=0)
