# SPDX-License-Identifier: Apache-2.0
"""Logits are computed again from clipped weights, by code that knows nothing of row factors."""

import copy
import doctest

import pytest
import torch
from expecttest import assert_expected_inline
from strategies import refusal
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

import fmuon
from fmuon import Attention, Heads, qk_clip

HEADS, WIDTH, IN = 4, 6, 10
TAU = 2.0
# gamma = 1/4, 1, 4/5, 1: the second head is at the bound, the last below.
LOGITS = torch.tensor([8.0, 2.0, 2.5, -3.0])
GAMMA = torch.tensor([0.25, 1.0, 0.8, 1.0], dtype=torch.float64)
EXACT = {"rtol": 1e-13, "atol": 1e-12}


def draw(**shapes):
    return {path: torch.randn(shape, dtype=torch.float64) for path, shape in shapes.items()}


def heads_of(rows):
    """[time, heads * width] -> [heads, time, width]"""
    return rows.unflatten(1, (-1, WIDTH)).transpose(0, 1)


def separate(x, p):
    return heads_of(x @ p["q"].T + p["qb"]), heads_of(x @ p["k"].T + p["kb"])


def input_major(x, p):
    return heads_of(x @ p["q"]), heads_of(x @ p["k"])


def fused(x, p):
    q, k, _ = (x @ p["qkv"].T).chunk(3, dim=1)
    return heads_of(q), heads_of(k)


def interleaved(x, p):
    q, k, _ = (x @ p["qkv"].T + p["bias"]).unflatten(1, (HEADS, 3, WIDTH)).permute(2, 1, 0, 3)
    return q, k


def gated(x, p):
    """Each query head is followed by a gate of its width."""
    q, _ = (x @ p["q"].T).unflatten(1, (HEADS, 2, WIDTH)).permute(2, 1, 0, 3)
    return q, heads_of(x @ p["k"].T)


def head_axis(x, p):
    """Leaves of shape [heads, width, in]."""
    return (torch.einsum("ti,hwi->htw", x, p[name]) for name in "qk")


def adapted(x, p):
    return heads_of(x @ (p["q"] + p["b"] @ p["a"]).T), heads_of(x @ p["k"].T)


def grouped(x, p):
    k = heads_of(x @ p["k"].T)
    return heads_of(x @ p["q"].T), k.repeat_interleave(HEADS // len(k), 0)


def interleaved_groups(x, p):
    """[q q k v | q q k v]"""
    rows = (x @ p["qkv"].T).unflatten(1, (2, 4, WIDTH)).permute(1, 2, 0, 3)
    return rows[:, :2].flatten(0, 1), rows[:, 2].repeat_interleave(2, 0)


def block(width=WIDTH, **options):
    return Heads("qkv", width, **options)


ROWS, SHARED = HEADS * WIDTH, 2 * WIDTH
CASES = {
    "separate": (
        separate,
        {"q": (ROWS, IN), "k": (ROWS, IN), "qb": (ROWS,), "kb": (ROWS,)},
        Attention(HEADS, query=("q", "qb"), key=["k", "kb"]),
    ),
    "input major": (
        input_major,
        {"q": (IN, ROWS), "k": (IN, ROWS)},
        Attention(HEADS, query=Heads("q", axis=1), key=Heads("k", axis=-1)),
    ),
    "fused": (
        fused,
        {"qkv": (3 * ROWS, IN)},
        Attention(HEADS, query=block(), key=block(start=ROWS)),
    ),
    "interleaved": (
        interleaved,
        {"qkv": (3 * ROWS, IN), "bias": (3 * ROWS,)},
        Attention(
            HEADS,
            query=tuple(Heads(path, WIDTH, stride=3 * WIDTH) for path in ("qkv", "bias")),
            key=tuple(Heads(path, WIDTH, WIDTH, 3 * WIDTH) for path in ("qkv", "bias")),
        ),
    ),
    "gated": (
        gated,
        {"q": (2 * ROWS, IN), "k": (ROWS, IN)},
        Attention(HEADS, query=Heads("q", WIDTH, stride=2 * WIDTH), key="k"),
    ),
    "head axis": (
        head_axis,
        {"q": (HEADS, WIDTH, IN), "k": (HEADS, WIDTH, IN)},
        Attention(HEADS, query="q", key="k"),
    ),
    "adapted": (
        adapted,
        {"q": (ROWS, IN), "a": (3, IN), "b": (ROWS, 3), "k": (ROWS, IN)},
        Attention(HEADS, query=("q", "b"), key="k"),
    ),
    **{
        f"grouped, {rule}": (
            grouped,
            {"q": (ROWS, IN), "k": (SHARED, IN)},
            Attention(HEADS, query="q", key="k", key_heads=2, shared_keys=rule),
        )
        for rule in ("largest", "smallest", "query")
    },
    "one key": (
        grouped,
        {"q": (ROWS, IN), "k": (WIDTH, IN)},
        Attention(HEADS, query="q", key="k", key_heads=1, shared_keys="smallest"),
    ),
    "interleaved groups": (
        interleaved_groups,
        {"qkv": (8 * WIDTH, IN)},
        Attention(
            HEADS,
            query=block(stride=4 * WIDTH, adjacent=2),
            key=block(start=2 * WIDTH, stride=4 * WIDTH),
            key_heads=2,
        ),
    ),
}


def clip(params, attention, logits=LOGITS, **options):
    return qk_clip(params, {"a": logits}, TAU, layers={"a": attention}, **options)


@pytest.mark.parametrize("case", CASES)
def test_the_logits_of_every_head_shrink_by_its_gamma(case):
    project, shapes, attention = CASES[case]
    params, x = draw(**shapes), torch.randn(7, IN, dtype=torch.float64)

    def logits(params):
        q, k = project(x, params)
        return q @ k.mT

    clipped = clip(params, attention)
    assert_close(logits(clipped), GAMMA[:, None, None] * logits(params), **EXACT)
    # What makes no query and no key stays: values, gates, the A of an adapter.
    changed = {path: (clipped[path] != params[path]) for path in params}
    if case == "fused":
        assert not changed["qkv"][2 * ROWS :].any()
    if case == "interleaved":
        assert not changed["qkv"].unflatten(0, (HEADS, 3, WIDTH))[:, 2].any()
    if case == "gated":
        assert not changed["q"].unflatten(0, (HEADS, 2, WIDTH))[:, 1].any()
    if case == "adapted":
        assert clipped["a"] is params["a"]


def rotated(x, frequency=0.3):
    """Pairs of the last axis turned by an angle that grows with the position, next to last."""
    angle = frequency * torch.arange(x.shape[-2], dtype=x.dtype)[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def test_latent_attention_leaves_the_shared_rotary_key_alone():
    content, rotary, value, rank = 6, 4, 5, 8
    params = draw(
        q_b=(HEADS * (content + rotary), rank),
        kv_a=(rank + rotary, IN),
        kv_b=(HEADS * (content + value), rank),
    )
    attention = Attention(
        HEADS,
        query=Heads("q_b", content, stride=content + rotary),
        rotary_query=Heads("q_b", rotary, start=content, stride=content + rotary),
        key=Heads("kv_b", content, stride=content + value),
    )
    x = torch.randn(7, IN, dtype=torch.float64)
    down = torch.randn(IN, rank, dtype=torch.float64)

    def parts(params):
        q = (x @ down @ params["q_b"].T).unflatten(1, (HEADS, -1)).transpose(0, 1)
        latent, shared = (x @ params["kv_a"].T).split([rank, rotary], 1)
        kv = (latent @ params["kv_b"].T).unflatten(1, (HEADS, -1)).transpose(0, 1)
        q_content, q_rotary = q.split([content, rotary], -1)
        k_content, values = kv.split([content, value], -1)
        return q_content @ k_content.mT, rotated(q_rotary) @ rotated(shared).mT, values

    clipped = clip(params, attention)
    old, new = parts(params), parts(clipped)
    for before, after in zip(old[:2], new[:2], strict=True):
        assert_close(after, GAMMA[:, None, None] * before, **EXACT)
    assert torch.equal(new[2], old[2])
    assert clipped["kv_a"] is params["kv_a"]
    # The factor is shared out evenly where it can be.
    ratio = (clipped["kv_b"] / params["kv_b"]).unflatten(0, (HEADS, -1))[:, 0, 0]
    assert_close(ratio, GAMMA.sqrt(), **EXACT)


@pytest.mark.parametrize(
    ("rule", "query", "key"),
    [
        # Groups (1/4, 1) and (4/5, 1).
        ("largest", [0.25, 1, 0.8, 1], [1, 1]),
        ("smallest", [0.5, 2, 0.8**0.5, 0.8**-0.5], [0.5, 0.8**0.5]),
        ("query", [0.25, 1, 0.8, 1], [1, 1]),
    ],
)
def test_who_bears_the_factor_where_heads_share_a_key(rule, query, key):
    params = {"q": torch.ones(HEADS, 1).double(), "k": torch.ones(2, 1).double()}
    attention = Attention(HEADS, query="q", key="k", key_heads=2, shared_keys=rule)
    clipped = clip(params, attention)
    assert clipped["q"].flatten().tolist() == pytest.approx(query, rel=1e-15)
    assert clipped["k"].flatten().tolist() == pytest.approx(key, rel=1e-15)


def test_a_group_that_is_clipped_as_a_whole_shares_the_factor_with_its_key():
    params = {"q": torch.ones(2, 1).double(), "k": torch.ones(1, 1).double()}
    attention = Attention(2, query="q", key="k", key_heads=1)
    clipped = clip(params, attention, torch.tensor([8.0, 32.0]))
    assert clipped["k"].item() == 0.5
    assert clipped["q"].flatten().tolist() == [0.5, 0.125]


# ---- what stays ----------------------------------------------------------------------------------

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shared_keys", ["largest", "query"])
def test_heads_within_the_bound_keep_their_bits(dtype, shared_keys):
    odd = torch.tensor([-0.0, float("inf"), torch.finfo(dtype).tiny / 4, float("nan")])
    params = {"q": torch.randn(ROWS, IN), "k": torch.randn(SHARED, IN), "other": torch.randn(3)}
    for head in (1, 3):
        params["q"][head * WIDTH, :4] = odd
    params = {path: p.to(dtype) for path, p in params.items()}
    before = copy.deepcopy(params)
    attention = Attention(HEADS, query="q", key="k", key_heads=2, shared_keys=shared_keys)
    clipped = clip(params, attention)
    rows = {"q": [1, 3], "k": [0, 1]}
    for path, own in rows.items():
        heads = [p[path].unflatten(0, (-1, WIDTH)) for p in (before, clipped)]
        for head in own:
            old, new = (h[head].contiguous().view(torch.uint8) for h in heads)
            assert torch.equal(old, new)
    assert clipped["other"] is params["other"]
    assert_close(params, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_are_multiplied_in_float32_and_rounded_once(dtype):
    params = {"q": torch.randn(64, 32).to(dtype), "k": torch.randn(64, 32).to(dtype)}
    clipped = clip(params, Attention(1, query="q", key="k"), torch.tensor([7.0]))
    factor = torch.tensor((TAU / 7.0) ** 0.5)
    for path, p in params.items():
        assert clipped[path].dtype == dtype
        assert torch.equal(clipped[path], (p.float() * factor).to(dtype))
    # The factor alone, rounded to 16 bits, would give others.
    assert not torch.equal(clipped["q"], params["q"] * factor.to(dtype))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_head_whose_logit_is_not_finite_stays_and_the_others_are_clipped(value):
    params = draw(q=(ROWS, IN), k=(ROWS, IN))
    attention = Attention(HEADS, query="q", key="k")
    logits = LOGITS.clone()
    logits[0] = value
    clipped, expected = clip(params, attention, logits), clip(params, attention)
    for path in params:
        assert torch.equal(clipped[path][:WIDTH], params[path][:WIDTH])
        assert torch.equal(clipped[path][WIDTH:], expected[path][WIDTH:])


def test_clipping_twice_is_clipping_once():
    params = draw(q=(ROWS, IN), k=(ROWS, IN))
    attention = Attention(HEADS, query="q", key="k")
    once = clip(params, attention)
    again = clip(once, attention, LOGITS.clamp(max=TAU))
    assert_close(again, once, rtol=0, atol=0)


def test_structure_strides_and_requires_grad_come_back():
    weight = torch.randn(IN, ROWS).T.requires_grad_()
    params = {"layers": [{"q": weight, "k": torch.randn(ROWS, IN), "bias": None}], "x": None}
    attention = Attention(HEADS, query=("layers.0.q", "layers.0.bias"), key="_orig_mod.layers.0.k")
    clipped = clip(params, attention)
    (layer,) = clipped["layers"]
    assert clipped["x"] is None and layer["bias"] is None
    assert layer["q"].stride() == weight.stride()
    assert layer["q"].requires_grad and layer["q"].is_leaf and not layer["k"].requires_grad


def test_tau_may_be_a_tensor():
    params = draw(q=(ROWS, IN), k=(ROWS, IN))
    layers = {"a": Attention(HEADS, query="q", key="k")}
    result = qk_clip(params, {"a": LOGITS}, torch.tensor(TAU), layers=layers)
    assert_close(result, clip(params, layers["a"]), rtol=0, atol=0)


# ---- torch.compile, torch.func, a loop -----------------------------------------------------------


def test_an_update_and_a_clip_are_one_graph():
    counter = CompileCounterWithBackend("aot_eager")
    opt = fmuon.muon(0.1, orthogonalize=fmuon.NewtonSchulz(dtype="float32"))
    params = {"q": torch.randn(ROWS, IN), "k": torch.randn(SHARED, IN), "b": torch.randn(ROWS)}
    layers = {"a": Attention(HEADS, query=("q", "b"), key="k", key_heads=2)}

    def step_of(params, state, step, x):
        def loss_of(params):
            q, k = grouped(x, params)
            logits = (q + params["b"].unflatten(0, (HEADS, 1, WIDTH))) @ k.mT
            return logits.square().mean(), logits.detach().amax((1, 2))

        grads, logits = torch.func.grad(loss_of, has_aux=True)(params)
        updates, state = opt.update(grads, state, step, params)
        params = fmuon.apply_updates(params, updates)
        return qk_clip(params, {"a": logits}, TAU, layers=layers), state

    compiled = fmuon.compile(step_of, backend=counter)
    state = opt.init(params)
    for step in range(3):
        x = torch.randn(7, IN)
        expected = step_of(params, state, step, x)
        params, state = compiled(params, state, step, x)
        assert_close((params, state), expected, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1


def test_vmap_is_the_loop():
    attention = CASES["interleaved groups"][-1]
    models = [draw(qkv=(8 * WIDTH, IN)) for _ in range(3)]
    logits = [LOGITS, LOGITS.flip(0), 10 * LOGITS]
    loop = [clip(p, attention, s) for p, s in zip(models, logits, strict=True)]
    stacked = {"qkv": torch.stack([p["qkv"] for p in models])}
    result = torch.func.vmap(lambda p, s: clip(p, attention, s))(stacked, torch.stack(logits))
    assert_close(result["qkv"], torch.stack([p["qkv"] for p in loop]), rtol=0, atol=0)
    # A clip that is the same for all members.
    same = torch.func.vmap(lambda p: clip(p, attention))(stacked)
    assert_close(same["qkv"][1], clip(models[1], attention)["qkv"], rtol=0, atol=0)


def test_a_differentiable_clip_passes_gradcheck():
    attention = Attention(2, query="q", key="k")

    def clipped(q, k, logits):
        result = clip({"q": q, "k": k}, attention, logits, differentiable=True)
        return result["q"], result["k"]

    leaves = draw(q=(4, 3), k=(4, 3))
    inputs = [p.requires_grad_() for p in leaves.values()]
    # One head of each kind, and none at the kink.
    logits = torch.tensor([5.0, 1.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(clipped, (*inputs, logits))


def test_the_loop_of_the_docstring_clips_a_module_after_its_step():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = torch.nn.ModuleDict(
                {name: torch.nn.Linear(IN, ROWS, bias=False) for name in "qkv"}
            )

    model = Model()
    optimizer = fmuon.FMuon(model, lr=0.1)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    twin = copy.deepcopy(model)
    other = fmuon.FMuon(twin, lr=0.1)
    for p, q in zip(twin.parameters(), model.parameters(), strict=True):
        p.grad = q.grad.clone()
    other.step()
    logits = 100 * LOGITS / TAU
    names = {"fmuon": fmuon, "torch": torch, "model": model, "optimizer": optimizer}
    for example in doctest.DocTestParser().get_examples(qk_clip.__doc__):
        exec(example.source, names | {"logits": logits}, names)
    root = GAMMA.sqrt().float().repeat_interleave(WIDTH)[:, None]
    for name in "qk":
        expected = twin.attn[name].weight * root
        assert_close(model.attn[name].weight, expected)
    assert torch.equal(model.attn["v"].weight, twin.attn["v"].weight)
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())


# ---- errors --------------------------------------------------------------------------------------


def test_errors_of_declarations():
    def text(call, *args, **options):
        return refusal(fmuon.ConfigurationError, call, *args, **options)

    assert_expected_inline(text(Heads, "q", 0), """Heads('q'): size=0; give an int of 1 or more""")
    assert_expected_inline(
        text(Heads, "q", 4, stride=7, adjacent=2),
        """Heads('q'): stride=7; give an int of 8 or more""",
    )
    assert_expected_inline(
        text(Heads, "q", start=4),
        """Heads('q'): start, stride and adjacent need size, the rows of one head""",
    )
    assert_expected_inline(
        text(Attention, 4, "q", "k", key_heads=3),
        """\
Attention: heads=4, key_heads=3; give positive counts, heads a multiple of
key_heads""",
    )
    assert_expected_inline(
        text(Attention, 4, "q", "k", shared_keys="lagest"),
        """\
unknown shared_keys 'lagest'; known: 'largest', 'smallest', 'query'; did you
mean 'largest'?""",
    )
    layers = {"first": Attention(4, "q", "k"), "second": Attention(4, "q", "k")}
    params = draw(q=(ROWS, IN), k=(ROWS, IN))
    assert_expected_inline(
        text(qk_clip, params, {}, 0, layers={}), """tau=0: must be positive and finite"""
    )
    assert_expected_inline(
        text(qk_clip, params, {"frist": LOGITS}, layers=layers),
        """\
max_logits: 'frist' is no layer of layers=['first', 'second']; did you mean
'first'?""",
    )
    assert_expected_inline(
        text(qk_clip, params, {"first": LOGITS}, layers=layers),
        """\
max_logits: nothing for the layers ['second']; give their logits, or leave them
out of layers""",
    )


def test_errors_of_leaves():
    params = draw(q=(ROWS, IN), k=(ROWS, IN)) | {"n": torch.zeros(ROWS, dtype=torch.int8)}

    def text(attention, logits=LOGITS):
        return refusal(fmuon.LeafError, clip, params, attention, logits)

    assert_expected_inline(
        text(Attention(4, "qq", "k")),
        """layers['a'].query: 'qq' is no leaf of params; did you mean 'q'?""",
    )
    assert_expected_inline(
        text(Attention(5, "q", "k"), torch.ones(5)),
        """\
layers['a'].query: axis 0 of 'q' has 24 rows, no multiple of 5 heads; correct
the number of heads, or give Heads('q', size=..., start=..., stride=...) where
it has other rows too""",
    )
    assert_expected_inline(
        text(Attention(4, "q", "k"), torch.ones(1, 4)),
        """\
max_logits['a'] has the shape (1, 4), the layer has 4 heads; give the largest
logit of each head, over batch and positions, in a tensor of shape (4,)""",
    )
    assert_expected_inline(
        text(Attention(4, "q", "k"), 3.0),
        """\
max_logits['a'] is a float; give a plain tensor with one entry per head, the
same on all ranks""",
    )
    assert_expected_inline(
        text(Attention(4, "q", Heads("k", WIDTH, start=1))),
        """\
layers['a'].key: 4 heads of 6 rows end at row 25, axis 0 of 'k' has 24; correct
size, start, stride or the number of heads""",
    )
    assert_expected_inline(
        text(Attention(4, Heads("q", 2, adjacent=3), "k")),
        """\
layers['a'].query: 4 heads of 'q' are not made of runs of adjacent=3; give a
divisor of 4""",
    )
    assert_expected_inline(
        text(Attention(4, "q", Heads("k", axis=2))),
        """\
layers['a'].key: 'k' of shape (24, 10) has no axis 2; name the one that has the
rows of the heads""",
    )
    assert_expected_inline(
        text(Attention(4, "q", ("k", "n"))),
        """layers['a'].key: 'n' has dtype torch.int8; floating point needed""",
    )
    assert_expected_inline(
        text(Attention(4, "q", Heads("q", WIDTH))),
        """\
'q': row 0 is in layers['a'].query and in layers['a'].key, and would be scaled
twice; name it once""",
    )
    assert_expected_inline(
        text(Attention(2, "q", Heads("q", 1, axis=1)), torch.ones(2)),
        """'q': heads on the axes [0, 1]; all are on one""",
    )


def test_an_error_inside_a_trace_is_that_of_the_eager_call():
    compiled = fmuon.compile(clip, backend="eager")
    with pytest.raises(fmuon.LeafError, match="'w' is no leaf of params"):
        compiled({"q": torch.randn(4, 4)}, Attention(4, "w", "q"))
