# SPDX-License-Identifier: Apache-2.0
import json

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import fmuon
from fmuon import ConfigurationError, Matrix, NewtonSchulz, adamw, explain, init, label, lion, muon
from fmuon.base import Transformation


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, 2, bias=False)
        self.ln_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)


class SmallGPT(nn.Module):
    """A decoder with tied embeddings, two convolutions and a frozen layer."""

    def __init__(self, width=8, vocabulary=50, context=16):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4)
        self.mixing = nn.Conv1d(width, width, 3, groups=width)
        self.teacher = nn.Linear(width, width, bias=False).requires_grad_(False)
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight


def test_a_module_is_explained_by_its_layers():
    assert_expected_inline(
        str(explain(SmallGPT())),
        """\
leaf                           shape    gets    matrices          scale   why
-----------------------------  -------  ------  ----------------  ------  ------------------------------------
patches.weight                 8x3x4x4  muon    8 x 48            1.386   a convolution
patches.bias                   8        adamw                             a bias
mixing.weight                  8x1x3    adamw                             a depthwise convolution
mixing.bias                    8        adamw                             a bias
teacher.weight                 8x8      frozen                            requires_grad is False
wte.weight                     50x8     adamw                             an embedding
wpe.weight                     16x8     adamw                             an embedding
blocks.0.ln_1.weight           8        adamw                             a norm
blocks.0.ln_1.bias             8        adamw                             a norm
blocks.0.attn.in_proj_weight   24x8     muon    8 x 8 (3 blocks)  0.5657  query, key and value of an attention
blocks.0.attn.out_proj.weight  8x8      muon    8 x 8             0.5657  a linear layer
blocks.0.ln_2.weight           8        adamw                             a norm
blocks.0.ln_2.bias             8        adamw                             a norm
blocks.0.up.weight             32x8     muon    32 x 8            1.131   a linear layer
blocks.0.up.bias               32       adamw                             a bias
blocks.0.down.weight           8x32     muon    8 x 32            1.131   a linear layer
blocks.0.down.bias             8        adamw                             a bias
blocks.1.ln_1.weight           8        adamw                             a norm
blocks.1.ln_1.bias             8        adamw                             a norm
blocks.1.attn.in_proj_weight   24x8     muon    8 x 8 (3 blocks)  0.5657  query, key and value of an attention
blocks.1.attn.out_proj.weight  8x8      muon    8 x 8             0.5657  a linear layer
blocks.1.ln_2.weight           8        adamw                             a norm
blocks.1.ln_2.bias             8        adamw                             a norm
blocks.1.up.weight             32x8     muon    32 x 8            1.131   a linear layer
blocks.1.up.bias               32       adamw                             a bias
blocks.1.down.weight           8x32     muon    8 x 32            1.131   a linear layer
blocks.1.down.bias             8        adamw                             a bias
ln_f.weight                    8        adamw                             a norm
ln_f.bias                      8        adamw                             a norm

elements: 1,920 muon, 64 frozen, 728 auxiliary
stacks: 8 of 8 x 8, 4 of 8 x 32, 1 of 8 x 48, by newton_schulz(jordan, 5 steps, auto)""",
    )


def mixed_params():
    return {
        "embed": torch.zeros(50, 8),
        "layers": [
            {
                "qkv": torch.zeros(16, 8),
                "out": torch.zeros(8, 8),
                "experts": torch.zeros(4, 8, 32),
                "gain": torch.zeros(8),
                "cache": None,
            }
        ],
        "probe": torch.zeros(2, 3, dtype=torch.float64),
    }


def test_a_pytree_is_explained_by_names_shapes_and_labels():
    opt = muon(
        scale="original",
        orthogonalize=NewtonSchulz("polar_express", steps=6, dtype="bfloat16"),
        auxiliary={"slow": adamw(lr_scale=0.1), "sign": lion()},
        labels={
            "re:layers.*qkv": Matrix(blocks=(8, 4, 4)),
            "re:layers.*experts": Matrix(2, 1),
            "re:layers.*gain": "sign",
            "probe": "frozen",
        },
    )
    assert_expected_inline(
        str(explain(mixed_params(), opt)),
        """\
leaf              shape   gets         matrices                 scale  why
----------------  ------  -----------  -----------------------  -----  ---------------------------------
embed             50x8    slow: adamw                                  an embedding, by the name 'embed'
layers.0.qkv      16x8    muon         8 x 8, 4 x 8 (2 blocks)  1      labels['re:layers.*qkv']
layers.0.out      8x8     muon         8 x 8                    1      a matrix
layers.0.experts  4x8x32  muon         4 x 32 x 8               2      labels['re:layers.*experts']
layers.0.gain     8       sign: lion                                   labels['re:layers.*gain']
layers.0.cache            frozen                                       None
probe             2x3     frozen                                       labels['probe']

elements: 1,216 muon, 6 frozen, 408 auxiliary
stacks: 2 of 4 x 8, 2 of 8 x 8, 4 of 8 x 32, by newton_schulz(polar_express, 6 steps, bfloat16)""",
    )


def test_there_is_a_row_for_every_leaf_in_order():
    model = SmallGPT()
    rows = explain(model).rows
    assert [row.path for row in rows] == [path for path, _ in model.named_parameters()]
    assert [row.shape for row in rows] == [p.shape for p in model.parameters()]


def test_the_summary_counts_every_element_once():
    model = SmallGPT()
    labels = label(model)
    expected = {"muon": 0, "auxiliary": 0, "frozen": 0}
    for path, parameter in model.named_parameters():
        kind = labels[path] if isinstance(labels[path], str) else "muon"
        expected[kind] += parameter.numel()
    counts = explain(model).summary.splitlines()[0].removeprefix("elements: ").split(", ")
    found = {kind: int(number.replace(",", "")) for number, kind in map(str.split, counts)}
    assert found == expected


def test_the_rows_tell_what_the_state_of_the_same_optimizer_holds():
    model = SmallGPT()
    opt = muon(labels=label(model))
    state = opt.init(dict(model.named_parameters()))
    rows = {row.path: row.gets for row in explain(model, opt).rows}
    assert {path for path, rule in rows.items() if rule == "muon"} == set(state["momentum"])
    assert {path for path, rule in rows.items() if rule == "adamw"} == set(state["auxiliary"]["mu"])
    assert {path for path, rule in rows.items() if rule != "frozen"} == set(state["missed"])


def test_labels_of_the_optimizer_replace_the_routing_of_a_module():
    opt = muon(labels={"wte.weight": "muon", "re:.*": "auxiliary"})
    rows = explain(SmallGPT(), opt).rows
    assert [row.path for row in rows if row.gets == "muon"] == ["wte.weight"]
    assert rows[0].why == "labels['re:.*']"


def test_the_default_optimizer_is_explained_where_none_is_given():
    params = mixed_params()["layers"][0] | {"experts": None}
    assert explain(params) == explain(params, muon())
    muons = {row.path for row in explain(params).rows if row.gets == "muon"}
    assert muons == set(init(params)["momentum"])


def test_explaining_prints_nothing_and_changes_nothing(capsys):
    model = SmallGPT()
    before = {path: p.detach().clone() for path, p in model.named_parameters()}
    explain(model)
    assert capsys.readouterr() == ("", "")
    assert all(torch.equal(p, before[path]) for path, p in model.named_parameters())


def test_an_optimizer_of_another_make_is_refused():
    foreign = Transformation(init=lambda params: {}, update=lambda *_: ({}, {}))
    with pytest.raises(ConfigurationError, match=r"was not made by fmuon\.muon or a preset"):
        explain({"w": torch.zeros(4, 5)}, foreign)


def test_one_dict_assigns_by_name_and_the_optimizer_is_explained_by_it():
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(10, 8),
            "attn": nn.Linear(8, 8),
            "mlp": nn.Linear(8, 8),
            "old": nn.Linear(8, 8, bias=False),
            "head": nn.Linear(8, 10, bias=False),
        }
    )
    labels = json.loads(
        '{"re:.*attn.*weight": "muon", "re:.*(bias|embed.*)": "adamw", "old.weight": "frozen",'
        ' "mlp.weight": "adamw", "head.weight": "muon", "re:.*": "error"}'
    )
    optimizer = fmuon.FMuon(model, labels=labels)
    expected = str(fmuon.explain(model, fmuon.muon(labels=labels)))
    assert str(fmuon.explain(model, optimizer)) == expected
    assert_expected_inline(
        expected,
        """\
leaf          shape  gets    matrices  scale   why
------------  -----  ------  --------  ------  -----------------------------
embed.weight  10x8   adamw                     labels['re:.*(bias|embed.*)']
attn.weight   8x8    muon    8 x 8     0.5657  labels['re:.*attn.*weight']
attn.bias     8      adamw                     labels['re:.*(bias|embed.*)']
mlp.weight    8x8    adamw                     labels['mlp.weight']
mlp.bias      8      adamw                     labels['re:.*(bias|embed.*)']
old.weight    8x8    frozen                    labels['old.weight']
head.weight   10x8   muon    10 x 8    0.6325  labels['head.weight']

elements: 144 muon, 64 frozen, 160 auxiliary
stacks: 1 of 8 x 8, 1 of 8 x 10, by newton_schulz(jordan, 5 steps, auto)""",
    )
    trained = {
        name: set(optimizer.state[p]) if p in optimizer.state else None
        for name, p in stepped(model, optimizer).items()
    }
    adam, momentum = {"exp_avg", "exp_avg_sq", "step"}, {"momentum_buffer", "step"}
    assert trained == {
        "embed.weight": adam,
        "attn.weight": momentum,
        "attn.bias": adam,
        "mlp.weight": adam,
        "mlp.bias": adam,
        "old.weight": None,
        "head.weight": momentum,
    }


def stepped(model, optimizer):
    named = dict(model.named_parameters())
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return named


def test_the_groups_of_an_optimizer_are_explained_as_they_are():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    groups = [
        {"params": [("0.weight", model[0].weight)], "use_muon": False},
        {"params": [("1.weight", model[1].weight)]},
    ]
    model[0].bias.requires_grad_(False)
    rows = fmuon.explain(model, fmuon.FMuon(groups)).rows
    assert {row.path: row.gets for row in rows} == {
        "0.weight": "adamw",
        "0.bias": "frozen",
        "1.weight": "muon",
        "1.bias": "frozen",
    }
    with pytest.raises(fmuon.ConfigurationError, match="no names"), pytest.warns(UserWarning):
        fmuon.explain(model, fmuon.FMuon(model.parameters()))


def test_a_declared_stack_is_not_warned_of(recwarn):
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.Parameter(torch.randn(3, 4, 5))
            self.first = nn.Linear(4, 5)

    model, labels = Experts(), {"experts": Matrix(1, 2)}
    explain(model, muon(labels=labels))
    fmuon.FMuon(model, labels=labels)
    fmuon.FMuon(model, preset="jordan")
    assert not recwarn.list
    with pytest.warns(UserWarning, match="'experts'"):
        label(model)
    with pytest.warns(UserWarning, match="'experts'"):
        fmuon.FMuon(model)


def test_a_mesh_that_need_not_exist_gives_owners_and_a_table_of_ranks():
    params = {f"w{i}": torch.empty(6, 8 + 8 * (i == 0)) for i in range(4)} | {"b": torch.empty(3)}
    assert_expected_inline(
        str(explain(params, mesh=(1, 3))),
        """\
leaf  shape  gets   matrices  scale   owner   why
----  -----  -----  --------  ------  ------  --------
w0    6x16   muon   6 x 16    0.8     rank 0  a matrix
w1    6x8    muon   6 x 8     0.5657  rank 1  a matrix
w2    6x8    muon   6 x 8     0.5657  rank 2  a matrix
w3    6x8    muon   6 x 8     0.5657  rank 1  a matrix
b     3      adamw                            a vector

elements: 240 muon, 3 auxiliary
stacks: 3 of 6 x 8, 1 of 6 x 16, by newton_schulz(jordan, 5 steps, auto)

rank  leaves       Gflop       MB sent
   0       1       0.000         0.000
   1       2       0.000         0.000
   2       1       0.000         0.000

busiest over mean: 1.269 flops, 1.050 bytes""",
    )


def test_what_ranks_do_is_counted_by_hand():
    params = {"w": torch.empty(6, 8), "v": torch.empty(6, 8)}
    shares = explain(params, muon(orthogonalize=NewtonSchulz(steps=1)), mesh=2).shares
    assert [share.leaves for share in shares.ranks] == [("v",), ("w",)]
    # X X^T and the product with X, 2 * 6 * 6 * 8 flops each, and A A, 2 * 6 * 6 * 6.
    assert {share.flops for share in shares.ranks} == {4 * 6 * 6 * 8 + 2 * 6**3}
    # Half of a matrix to its owner, and half of the other one back, in float32.
    assert {share.sent for share in shares.ranks} == {2 * 24 * 4}


def test_the_plan_of_a_step_is_that_of_its_explanation():
    params = {f"w{i}": torch.empty(6, 8 + i) for i in range(5)}
    assert fmuon.distributed.plan(muon(), params, 3) == explain(params, mesh=3).shares
    assert explain(params).shares is None


def test_only_the_first_of_many_ranks_are_printed():
    text = str(fmuon.distributed.plan(muon(), {"w": torch.empty(64, 64)}, 64))
    assert " and 48 more ranks" in text and "busiest over mean: 64.000 flops" in text
