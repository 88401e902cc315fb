# SPDX-License-Identifier: Apache-2.0
"""The variants of Muon beside their papers' formulas, one matrix at a time in float64."""

import math
from dataclasses import dataclass, field

import pytest
import references
import torch
from expecttest import assert_expected_inline
from strategies import refusal
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

import fmuon
from fmuon.balance import EQUILIBRATIONS, RENORMALIZATIONS
from fmuon.decay import DECAYS

EXACT = fmuon.NewtonSchulz(dtype="float64", eps=0.0)
SHAPES = {
    "wide": (4, 9), "tall": (9, 4), "tall.2": (9, 4), "square": (5, 5), "x": (3, 4, 9), "b": (7,),
}  # fmt: skip
LABELS = {"x": fmuon.Matrix(1, 2), "b": "auxiliary", "re:.*": "muon"}


def rows(x):
    return x / x.norm(dim=1, keepdim=True)


def columns(x):
    return x / x.norm(dim=0, keepdim=True)


BEFORE = {
    None: lambda x: x,
    "rows": rows,
    "columns": columns,
    "rows_and_columns": lambda x: x / x.norm(dim=1, keepdim=True) / x.norm(dim=0, keepdim=True),
    "sign": torch.sign,
}
AFTER = {
    None: lambda o: o,
    "rows": rows,
    "columns": columns,
    "rows_columns": lambda o: columns(rows(o)),
    "columns_rows": lambda o: rows(columns(o)),
    "frobenius": lambda o: o * math.sqrt(min(o.shape)) / o.norm(),
}


@dataclass
class Reference:
    """One matrix, its moments and a step of every variant."""

    w: torch.Tensor
    before: str | None = None
    after: str | None = None
    second: str | None = None
    decay: str = "decoupled"
    scale: str = "none"
    coefficients: tuple = references.JORDAN
    safety: float = 1.0
    eps: float = 0.0
    m: torch.Tensor | float = 0.0
    v: torch.Tensor | float = 0.0
    t: int = field(default=0)

    def step(self, g, *, lr, b, weight_decay, beta2=0.9, adaptive=False, nesterov=False):
        self.t += 1
        self.m = b * self.m + (1 - b) * g
        u = b * self.m + (1 - b) * g if nesterov else self.m
        balanced = BEFORE[self.before](u)
        turned = balanced if balanced.shape[0] <= balanced.shape[1] else balanced.T
        o = references.newton_schulz(turned, self.coefficients, self.safety)
        o = AFTER[self.after](o if turned is balanced else o.T)
        if self.second == "adamuon":
            self.v = beta2 * self.v + (1 - beta2) * o * o
            p = o / ((self.v / (1 - beta2**self.t)).sqrt() + self.eps)
            o = math.sqrt(min(o.shape)) * p / (p.norm() + self.eps)
        if self.second == "normuon, long":
            over = 1 if o.shape[0] >= o.shape[1] else 0
            self.v = beta2 * self.v + (1 - beta2) * (o * o).mean(over, keepdim=True)
            p = o / self.v.sqrt()
            o = p * o.norm() / p.norm()
        factor = references.SCALES[self.scale](*o.shape) * (u * o).sum() ** adaptive
        change = lr * factor * o
        power, cautious = {
            "decoupled": (1, False), "independent": (0, False), "squared": (2, False),
            "cautious": (1, True), "cautious_independent": (0, True), "cautious_squared": (2, True),
        }[self.decay]  # fmt: skip
        mask = (change * self.w >= 0).double() if cautious else 1
        self.w = self.w - change - lr**power * weight_decay * mask * self.w


def gradients(step):
    generator = torch.Generator().manual_seed(step)
    return {k: torch.randn(s, generator=generator, dtype=torch.float64) for k, s in SHAPES.items()}


def check(opt, steps=20, *, adaptive=False, lr=0.1, momentum=0.9, update=None, **given):
    """20 steps of `opt` end where the references end; `lr` and `momentum` may be schedules."""
    options = {"nesterov": given.pop("nesterov", False), "weight_decay": given.pop("wd", 0.1)}
    options["beta2"] = given.pop("beta2", 0.9)
    params = gradients(999)
    expected = {
        k: [Reference(w, **given) for w in (p if p.ndim == 3 else [p])]
        for k, p in params.items()
        if p.ndim > 1
    }
    state = opt.init(params)
    for step in range(steps):
        grads = gradients(step)
        updates, state = (update or opt.update)(grads, state, step, params)
        params = fmuon.apply_updates(params, updates)
        b = momentum(step) if callable(momentum) else momentum
        for k, matrices in expected.items():
            for matrix, g in zip(
                matrices, grads[k] if grads[k].ndim == 3 else [grads[k]], strict=True
            ):
                matrix.step(g, lr=lr, b=b, adaptive=adaptive, **options)
    for k, matrices in expected.items():
        whole = torch.stack([matrix.w for matrix in matrices]).reshape(params[k].shape)
        assert_close(params[k], whole, rtol=1e-8, atol=1e-9)
    return state, expected


def configured(**options):
    fixed = {
        "lr": 0.1, "momentum": 0.9, "nesterov": False, "bias_correction": False,
        "weight_decay": 0.1, "orthogonalize": EXACT, "scale": "none", "labels": LABELS,
    }  # fmt: skip
    return fmuon.muon(**fixed | options)


@pytest.mark.parametrize("name", EQUILIBRATIONS)
def test_equilibration_follows_its_formula(name):
    check(configured(equilibrate=name), before=name)


@pytest.mark.parametrize("name", RENORMALIZATIONS)
def test_renormalization_follows_its_formula(name):
    check(configured(renormalize=name), after=name)


@pytest.mark.parametrize("name", DECAYS)
def test_decay_follows_its_formula(name):
    check(configured(decay=name, weight_decay=0.05), decay=name, wd=0.05)


@pytest.mark.parametrize("name", DECAYS)
def test_decay_of_auxiliary_leaves_is_of_the_same_form(name):
    power, cautious = DECAYS[name]
    opt = fmuon.muon(0.1, weight_decay=0.05, decay=name, auxiliary=fmuon.sgd(lr_scale=0.5))
    params = {"w": torch.randn(3, 4), "b": torch.tensor([1.0, -1.0, 2.0])}
    grads = {"w": torch.randn(3, 4), "b": torch.tensor([0.2, 0.2, -0.2])}
    updates, _ = opt.update(grads, opt.init(params), 0, params)
    expected = []
    for w, g in zip(params["b"].tolist(), grads["b"].tolist(), strict=True):
        decays = not cautious or g * w >= 0
        expected.append(-0.05 * g - 0.05**power * 0.05 * w * decays)
    assert_close(updates["b"], torch.tensor(expected))


@pytest.mark.parametrize("eps", [0.0, 0.1])
def test_adamuon_follows_its_formula(eps):
    """Only beside an eps does the bias correction show: the norm undoes any common factor."""
    method = fmuon.AdaMuon(0.9, eps=eps)
    state, expected = check(configured(second_moment=method), second="adamuon", eps=eps)
    for k, v in state["second_moment"].items():
        assert v.shape == SHAPES[k]
        whole = torch.stack([matrix.v for matrix in expected[k]]).reshape(v.shape)
        assert_close(v, whole, rtol=1e-8, atol=1e-12)


def test_the_dual_norm_follows_its_formula():
    """<U, O> is of a leaf: the sum over its matrices, of which these have one each."""
    labels = {k: label for k, label in LABELS.items() if k != "x"}
    opt = configured(adaptive=True, labels=labels, weight_decay=0.0)
    params = {k: p for k, p in gradients(999).items() if k != "x"}
    references_of = {k: Reference(p) for k, p in params.items() if p.ndim == 2}
    state = opt.init(params)
    for step in range(20):
        grads = {k: g for k, g in gradients(step).items() if k != "x"}
        updates, state = opt.update(grads, state, step, params)
        params = fmuon.apply_updates(params, updates)
        for k, reference in references_of.items():
            reference.step(grads[k], lr=0.1, b=0.9, weight_decay=0.0, adaptive=True)
    for k, reference in references_of.items():
        assert_close(params[k], reference.w, rtol=1e-8, atol=1e-9)


def warming(step):
    """That of modded-nanogpt, over 10 steps."""
    if isinstance(step, torch.Tensor):
        return 0.85 + 0.1 * (step.double() / 10).clamp(max=1)
    return 0.85 + 0.1 * min(step / 10, 1)


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_schedule_of_the_momentum_is_one_graph_and_follows_the_formula(nesterov):
    opt = configured(momentum=warming, nesterov=nesterov)
    check(opt, momentum=warming, nesterov=nesterov)
    counter = CompileCounterWithBackend("aot_eager")
    check(
        opt, momentum=warming, nesterov=nesterov, update=fmuon.compile(opt.update, backend=counter)
    )
    assert counter.frame_count == 1


def test_a_schedule_of_the_momentum_of_a_group():
    model = nn.Linear(6, 4, bias=False).double()
    optimizer = fmuon.FMuon(model, lr=0.1, orthogonalize=EXACT, compile=False)
    opt = fmuon.muon(0.1, orthogonalize=EXACT, momentum=warming)
    params = {"weight": model.weight.detach().clone()}
    state = opt.init(params)
    for step in range(12):
        grad = torch.randn(4, 6, dtype=torch.float64)
        optimizer.param_groups[0]["momentum"] = warming(step)
        model.weight.grad = grad
        optimizer.step()
        updates, state = opt.update({"weight": grad}, state, step)
        params = fmuon.apply_updates(params, updates)
    assert_close(model.weight.detach(), params["weight"], rtol=1e-12, atol=1e-13)


def test_the_bias_correction_of_a_schedule_is_that_of_its_current_value():
    opt = fmuon.muon(1.0, momentum=lambda step: 0.5 + 0.1 * step, nesterov=False,
                     orthogonalize=EXACT, scale="none", adaptive=True, labels={"w": "muon"})  # fmt: skip
    grads = [{"w": torch.full((1, 1), g, dtype=torch.float64)} for g in (1.0, 3.0)]
    state = opt.init(grads[0])
    _, state = opt.update(grads[0], state, 0)
    updates, _ = opt.update(grads[1], state, 1)
    u = (0.6 * 0.5 + 0.4 * 3.0) / (1 - 0.6**2)
    o = references.newton_schulz(torch.tensor([[u]])).item()
    assert_close(updates["w"].item(), -u * o * o)


# ---- presets -------------------------------------------------------------------------------------

PRESETS = {
    "adamuon": (
        {},
        {"second": "adamuon", "before": "sign", "scale": "match_rms_adamw", "beta2": 0.95},
        0.01,
    ),
    "muon_eq": ({}, {"before": "rows", "scale": "match_rms_adamw"}, 0.1),
    "muon_eq, RC": (
        {"form": "RC"},
        {"before": "rows_and_columns", "scale": "match_rms_adamw"},
        0.1,
    ),
    "muon_plus": ({}, {"after": "rows_columns", "scale": "match_rms_adamw"}, 0.05),
    "nanochat": (
        {"weight_decay": 0.1},
        {
            "before": "rows", "after": "frobenius", "second": "normuon, long", "decay": "cautious",
            "scale": "original", "beta2": 0.9, "safety": 1.01,
            "coefficients": (
                (8.156554524902461, -22.48329292557795, 15.878769915207462),
                (4.042929935166739, -2.808917465908714, 0.5000178451051316),
                (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
                (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
                (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
            ),
        },
        0.1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("title", PRESETS)
def test_presets_follow_their_papers(title):
    options, given, decay = PRESETS[title]
    preset = getattr(fmuon.presets, title.split(",")[0])
    method = preset.values(**options).get("orthogonalize", fmuon.NewtonSchulz())
    exact = fmuon.NewtonSchulz(method.coefficients, dtype="float64", eps=0.0)
    opt = preset(0.1, orthogonalize=exact, labels=LABELS, **options)
    assert fmuon.FMuon(nn.Linear(4, 3), preset=title.split(",")[0], lr=0.1)
    second = opt.update.__self__.second_moment
    if second is not None:
        # A guard of 1e-8 or 1e-10 is more than float64 rounds.
        unguarded = type(second)(**{**vars(second), "eps": 0.0})
        opt = preset(0.1, orthogonalize=exact, labels=LABELS, second_moment=unguarded, **options)
    check(opt, momentum=0.95, nesterov=True, wd=decay, **given)


# ---- the rest of the machine ---------------------------------------------------------------------

VARIANTS = {
    **{f"equilibrate {name}": {"equilibrate": name} for name in EQUILIBRATIONS},
    **{f"renormalize {name}": {"renormalize": name} for name in RENORMALIZATIONS},
    **{f"decay {name}": {"decay": name, "weight_decay": 0.1} for name in DECAYS},
    "adamuon": {"second_moment": "adamuon"},
    "normuon": {"second_moment": "normuon"},
    "adaptive": {"adaptive": True},
    "all": {
        "equilibrate": "rows", "renormalize": "frobenius", "second_moment": "adamuon",
        "adaptive": True, "decay": "cautious_squared", "weight_decay": 0.1,
    },
}  # fmt: skip


@pytest.mark.parametrize("title", VARIANTS)
def test_pure_in_place_and_FMuon_do_the_same(title):
    precise = fmuon.NewtonSchulz(dtype="float32")
    options = {"lr": 0.1, "orthogonalize": precise, "labels": LABELS, **VARIANTS[title]}
    opt = fmuon.muon(**options)
    params = {k: p.float() for k, p in gradients(999).items()}
    own = {k: p.clone() for k, p in params.items()}
    module = nn.ParameterDict(
        {k.replace(".", "_"): nn.Parameter(p.clone()) for k, p in params.items()}
    )
    shim = fmuon.FMuon(module, **options, compile=False)
    state, own_state = opt.init(params), opt.init(own)
    for step in range(4):
        grads = {k: g.float() for k, g in gradients(step).items()}
        updates, state = opt.update(grads, state, step, params)
        params = fmuon.apply_updates(params, updates)
        fmuon.update_(opt, own, grads, own_state, step)
        for k, g in grads.items():
            module[k.replace(".", "_")].grad = g
        shim.step()
    assert_close(own, params, rtol=1e-6, atol=1e-7)
    assert_close(own_state, state, rtol=1e-6, atol=1e-7)
    for k, p in params.items():
        assert_close(module[k.replace(".", "_")].detach(), p, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "title", ["all", "equilibrate rows_and_columns", "renormalize columns_rows"]
)
def test_compiled_is_one_graph_and_as_eager(title):
    options = {"nesterov": True, "bias_correction": True, **VARIANTS[title]}
    opt = configured(**options)
    counter = CompileCounterWithBackend("inductor" if title == "all" else "aot_eager")
    update = fmuon.compile(opt.update, backend=counter)
    params = gradients(999)
    state = other_state = opt.init(params)
    other = params
    for step in range(3):
        grads = gradients(step)
        updates, state = update(grads, state, step, params)
        params = fmuon.apply_updates(params, updates)
        updates, other_state = opt.update(grads, other_state, step, other)
        other = fmuon.apply_updates(other, updates)
    assert counter.frame_count == 1
    assert_close(params, other, rtol=1e-8, atol=1e-9)
    assert_close(state, other_state, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("title", VARIANTS)
def test_zeros_stay_zeros_and_sizes_do_not_matter(title):
    options = {"orthogonalize": fmuon.NewtonSchulz(dtype="float32"), **VARIANTS[title]}
    opt = fmuon.muon(1.0, **options | {"weight_decay": 0.0, "adaptive": False})
    g = torch.randn(4, 7)
    g[1], g[:, 2] = 0, 0
    grads = {"some": g, "none": torch.zeros(4, 7), "tall": g.T.contiguous()}
    updates, _ = opt.update(grads, opt.init(grads), 0)
    assert not updates["none"].any()
    assert not updates["some"][1].any() and not updates["some"][:, 2].any()
    for size in (1e-25, 1e25):
        sized = {k: x * size for k, x in grads.items()}
        again, _ = opt.update(sized, opt.init(sized), 0)
        assert_close(again, updates, rtol=1e-3, atol=1e-4)


def test_a_leaf_that_sits_out_keeps_its_moment():
    opt = configured(second_moment="adamuon")
    params = gradients(999)
    _, state = opt.update(gradients(0), opt.init(params), 0, params)
    flags = {"tall": torch.tensor(False)}
    _, after = opt.update(gradients(1), state, 1, params, present=flags)
    assert torch.equal(after["second_moment"]["tall"], state["second_moment"]["tall"])
    # Its next update is its second, in a stack with one that has had two.
    once, _ = opt.update(gradients(1), state, 1, params)
    late, _ = opt.update(gradients(1), after, 2, params)
    assert_close(late["tall"], once["tall"], rtol=1e-12, atol=0)


def test_errors():
    assert_expected_inline(
        "\n".join(
            refusal(fmuon.FMuonError, function)
            for function in (
                lambda: fmuon.muon(decay="l2"),
                lambda: fmuon.muon(equilibrate="row"),
                lambda: fmuon.muon(renormalize=True),
                lambda: fmuon.AdaMuon(beta=1.0),
                lambda: fmuon.presets.muon_eq(form="X"),
                lambda: fmuon.presets.muon_plus(norm_mode="rows"),
            )
        ),
        """\
decay='l2'; known: 'decoupled', 'independent', 'squared', 'cautious',
'cautious_independent', 'cautious_squared'
equilibrate='row'; known: None, 'rows', 'columns', 'rows_and_columns', 'sign'
renormalize=True; known: None, 'rows', 'columns', 'rows_columns',
'columns_rows', 'frobenius'
AdaMuon: beta=1.0: give a number that is not negative and below 1
unknown form 'X'; known: 'R', 'C', 'RC'
unknown norm_mode 'rows'; known: 'row', 'col', 'row_col', 'col_row'; did you
mean 'row'?""",
    )
