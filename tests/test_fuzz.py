# SPDX-License-Identifier: Apache-2.0
"""Hostile input: every option with values of every kind, and state dicts that are damaged.

Whatever is given, it either works or is refused by an error that names it, and a refused call
leaves everything as it was. FMUON_EXAMPLES sets how many cases hypothesis tries.
"""

import copy
import inspect
import io
import math
import os
import pickle
import warnings
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fmuon
from fmuon.coefficients import CoefficientSet
from fmuon.presets import PRESETS

EXAMPLES = int(os.environ.get("FMUON_EXAMPLES", "40"))
TRIED = Counter()
BUDGET = settings(max_examples=EXAMPLES, deadline=None, derandomize=EXAMPLES == 40)

VALUES = [
    None, "nonsense", "", b"bytes", True, 0, 1, -1, 1.5, math.nan, math.inf, -math.inf, 10**400,
    1j, [], (), {}, [[]], [1, "a"], ("a", "b"), (1, 2, 3), {"a": 1}, {1: 2}, {"re:(": "muon"},
    object(), torch.int32, torch.float16, torch.tensor(1.0), torch.tensor([1.0, 2.0]),
    torch.tensor(1j),
]  # fmt: skip


def network():
    return nn.ModuleDict({"a": nn.Linear(3, 4), "norm": nn.LayerNorm(3)})


def step_of(opt):
    params = {name: p.detach() for name, p in network().named_parameters()}
    opt.update(params, opt.init(params), 0, params)


def step_of_shim(optimizer):
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn_like(p)
    optimizer.step()


def orthogonalize(method):
    method(torch.randn(3, 4))
    str(method)
    step_of(fmuon.muon(orthogonalize=method))


def options_of(function):
    return [*inspect.signature(function).parameters]


# name -> (maker of keyword arguments, its options, one use of what it makes)
MAKERS = {
    "muon": (fmuon.muon, options_of(fmuon.muon), step_of),
    "FMuon": (
        lambda **options: fmuon.FMuon(network(), **options),
        [*options_of(fmuon.muon), "preset", "compile"],
        lambda optimizer: step_of_shim(optimizer) if optimizer._compile is not True else None,
    ),
    **{
        kind.__name__: (kind, options_of(kind), orthogonalize)
        for kind in (fmuon.NewtonSchulz, fmuon.GramNewtonSchulz, fmuon.Zolotarev, fmuon.Auto)
    },
    **{
        rule.__name__: (rule, options_of(rule), lambda r: step_of(fmuon.muon(auxiliary=r)))
        for rule in (fmuon.adamw, fmuon.nadamw, fmuon.lion, fmuon.sgd)
    },
    "NorMuon": (
        fmuon.NorMuon, options_of(fmuon.NorMuon), lambda s: step_of(fmuon.muon(second_moment=s))
    ),
    "Stochastic": (
        fmuon.Stochastic, options_of(fmuon.Stochastic), lambda r: step_of(fmuon.muon(rounding=r))
    ),
    "Matrix": (
        fmuon.Matrix, options_of(fmuon.Matrix), lambda m: step_of(fmuon.muon(labels={"a.weight": m}))
    ),
    "CoefficientSet": (
        lambda **over: CoefficientSet(**{"published": ((1.0, 2.0, 3.0),), "source": "s"} | over),
        options_of(CoefficientSet),
        lambda s: orthogonalize(fmuon.NewtonSchulz(s)),
    ),
    "Heads": (
        lambda **over: fmuon.Heads(**{"path": "p"} | over), options_of(fmuon.Heads), hash
    ),
    "Attention": (
        lambda **over: fmuon.Attention(**{"heads": 2, "query": "q", "key": "k"} | over),
        options_of(fmuon.Attention), hash,
    ),
    **{
        f"presets.{name}": (
            lambda _preset=preset, **options: _preset(params=network(), **options),
            [option for option in options_of(preset.row) if option != "params"],
            step_of,
        )
        for name, preset in PRESETS.items()
    },
}  # fmt: skip
# Trees are refused by the leaf that they have no value for.
NAMED = {"weight_decay_mask": "tree", "muon_weight_dimension_numbers": "tree", "metrics": "metric"}


def names(options):
    return [text for option in options for text in (option, NAMED.get(option, option))]


def attempt(maker, options):
    """Make and use it, or be refused by an error that names one of the options."""
    make, _, use = MAKERS[maker]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            use(make(**options))
        except (TypeError, ValueError) as error:
            assert any(name in str(error) for name in names(options)), str(error)
            return False
    return True


@pytest.mark.parametrize("maker", MAKERS)
def test_every_value_of_every_option_works_or_is_refused_by_name(maker):
    for option in MAKERS[maker][1]:
        for value in VALUES:
            if option == "weight_decay_mask" and isinstance(value, torch.Tensor):
                continue
            attempt(maker, {option: value})


def wrong_options(data):
    """Several options of one maker."""
    TRIED["wrong options"] += 1
    maker = data.draw(st.sampled_from(sorted(MAKERS)))
    chosen = data.draw(st.lists(st.sampled_from(MAKERS[maker][1]), max_size=4, unique=True))
    chosen = [option for option in chosen if option != "weight_decay_mask"]
    if chosen:
        attempt(maker, {option: data.draw(st.sampled_from(VALUES)) for option in chosen})


test_several_wrong_options_together = BUDGET(given(st.data())(wrong_options))


@pytest.mark.parametrize("option", ["nesterov", "bias_correction", "adaptive", "differentiable"])
def test_a_text_is_no_truth(option):
    with pytest.raises(fmuon.ConfigurationError, match=f"{option}='false': give True or False"):
        fmuon.muon(**{option: "false"})


def test_an_unknown_mode_is_refused_when_the_optimizer_is_made():
    for make in (lambda mode: fmuon.FMuon(network(), compile=mode),
                 lambda mode: fmuon.compile(fmuon.update, mode=mode)):  # fmt: skip
        with pytest.raises(fmuon.ConfigurationError, match=r"unknown mode .*'fast'; known: 'defau"):
            make("fast")


# ---- state dicts ---------------------------------------------------------------------------------


def trained(steps=2, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    model = nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(4, 3), "norm": nn.LayerNorm(3)})
    optimizer = fmuon.FMuon(model, lr=0.01, weight_decay=0.1, **options)
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
    return model, optimizer


def through_a_file(content):
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def snapshot(model, optimizer):
    return copy.deepcopy((model.state_dict(), optimizer.state_dict(), optimizer.metrics()))


def same(a, b):
    """Whether two trees of tensors and plain data are equal, bit by bit."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


def places(tree, path=()):
    """The keys that lead to every node of nested dicts and lists."""
    yield path
    children = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for key, child in children:
        yield from places(child, (*path, key))


def parent(tree, path):
    for key in path[:-1]:
        tree = tree[key]
    return tree


DAMAGES = {
    "remove": lambda old: ...,
    "none": lambda old: None,
    "text": lambda old: "text",
    "list": lambda old: [],
    "dict": lambda old: {},
    "negative": lambda old: -1,
    "nan": lambda old: old * math.nan if isinstance(old, float | torch.Tensor) else math.nan,
    "nan tensor": lambda old: torch.tensor(math.nan),
    "integers": lambda old: old.long() if isinstance(old, torch.Tensor) else 10**30,
    "truncated": lambda old: old[..., :1] if isinstance(old, torch.Tensor) and old.ndim else old[:1] if isinstance(old, list | tuple) else old,
    "longer": lambda old: old.new_zeros((*old.shape, 2)) if isinstance(old, torch.Tensor) else [*old, *old] if isinstance(old, list) else old,
    "foreign key": lambda old: {**old, "foreign": torch.zeros(2)} if isinstance(old, dict) else old,
    "complex": lambda old: old + 1j if isinstance(old, torch.Tensor | float) else old,
}  # fmt: skip


def refused_or_loaded(state_dict, **options):
    """Load it; where that is refused nothing has changed, and else the optimizer goes on."""
    model, optimizer = trained(1, seed=7, metrics=("skipped_steps",), **options)
    before = snapshot(model, optimizer)
    try:
        optimizer.load_state_dict(state_dict)
    except (TypeError, ValueError) as error:
        assert same(snapshot(model, optimizer), before)
        return str(error)
    step_of_shim(optimizer)
    return None


def damaged(state_dict, path, damage):
    state_dict = copy.deepcopy(state_dict)
    if not path:
        return DAMAGES[damage](state_dict)
    holder, key = parent(state_dict, path), path[-1]
    value = DAMAGES[damage](holder[key])
    if value is ...:
        del holder[key]
    else:
        holder[key] = value
    return state_dict


def test_every_damage_to_every_place_of_a_state_dict():
    _, optimizer = trained()
    state_dict = through_a_file(optimizer.state_dict())
    wrong = []
    for path in [*places(state_dict)]:
        for damage in DAMAGES:
            try:
                refused_or_loaded(damaged(state_dict, path, damage))
            except Exception as error:
                wrong.append(f"{damage} at {path}: {error!r:.150}")
    assert not wrong, "\n".join(wrong)


def damages(data):
    """Several to one state dict."""
    TRIED["damaged state dicts"] += 1
    _, optimizer = trained()
    state_dict = optimizer.state_dict()
    for _ in range(data.draw(st.integers(1, 4))):
        path = data.draw(st.sampled_from([*places(state_dict)][1:]))
        state_dict = damaged(state_dict, path, data.draw(st.sampled_from(sorted(DAMAGES))))
        if len([*places(state_dict)]) == 1:
            break
    refused_or_loaded(state_dict)


test_several_damages_to_a_state_dict = BUDGET(given(st.data())(damages))


@pytest.mark.parametrize(
    "options",
    [
        {"auxiliary": torch.optim.AdamW},
        {"momentum_dtype": "fp8"},
        {"second_moment": "normuon"},
        {"preset": "jordan"},
    ],
    ids=str,
)
def test_damages_to_the_buffers_of_every_kind(options):
    _, optimizer = trained(**options)
    state_dict = optimizer.state_dict()
    for path in places(state_dict):
        if path[:1] == ("state",) and "auxiliary" not in options:
            for damage in ("remove", "none", "truncated", "integers"):
                refused_or_loaded(damaged(state_dict, path, damage), **options)
    assert refused_or_loaded(state_dict, **options) is None


@pytest.mark.parametrize("value", [math.nan, -1.0, 0.5, math.inf])
def test_a_count_that_is_none_is_refused(value):
    _, optimizer = trained()
    state_dict = damaged(optimizer.state_dict(), ("state", 0, "step"), "none")
    state_dict["state"][0]["step"] = torch.tensor(value)
    assert f"is {value}, which is no number of updates" in refused_or_loaded(state_dict)


def test_swapped_entries_are_refused_by_their_shapes_or_kinds():
    _, optimizer = trained()
    state_dict = through_a_file(optimizer.state_dict())
    state = state_dict["state"]
    state[0], state[1] = state[1], state[0]
    assert "'a.weight (4, 3) -> (3, 4)'" not in refused_or_loaded(copy.deepcopy(state_dict))
    state[0], state[2] = state[2], state[0]
    assert refused_or_loaded(state_dict)


# ---- states of the functional core ---------------------------------------------------------------


@pytest.mark.parametrize("in_place", [False, True])
def test_every_damage_to_every_place_of_a_state(in_place):
    opt = fmuon.muon(0.1, weight_decay=0.1)
    params = {name: p.detach().clone() for name, p in network().named_parameters()}
    grads = {name: torch.randn_like(p) for name, p in params.items()}
    _, state = opt.update(grads, opt.init(params), 0, params)
    wrong = []
    for path in places(state):
        for damage in DAMAGES:
            try:
                update_or_leave(opt, params, grads, damaged(state, path, damage), in_place)
            except Exception as error:
                wrong.append(f"{damage} at {path}: {error!r:.150}")
    assert not wrong, "\n".join(wrong)


def update_or_leave(opt, params, grads, state, in_place):
    params, before = copy.deepcopy((params, (params, state)))
    try:
        if in_place:
            fmuon.update_(opt, params, grads, state, 1)
        else:
            opt.update(grads, state, 1, params)
            assert same((params, state), before)
    except fmuon.FMuonError:
        assert same((params, state), before)


# ---- files ---------------------------------------------------------------------------------------


class Hostile:
    def __reduce__(self):
        return print, ("code of a stranger",)


def test_a_hostile_pickle_is_refused_before_its_code_runs(capsys):
    _, optimizer = trained()
    file = io.BytesIO()
    torch.save(optimizer.state_dict() | {"extra": Hostile()}, file)
    file.seek(0)
    with pytest.raises(pickle.UnpicklingError, match="print"):
        torch.load(file, weights_only=True)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("preset", [None, *PRESETS])
@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)], ids=["number", "tensor"])
def test_state_dicts_of_every_preset_are_read_with_weights_only(preset, lr):
    if preset == "muon_with_aux_adam":
        preset = "optax"
    model = network()
    optimizer = fmuon.FMuon(model, lr=lr, preset=preset, labels=fmuon.label(model))
    step_of_shim(optimizer)
    read = through_a_file(optimizer.state_dict())
    assert same(read, optimizer.state_dict())
    optimizer.load_state_dict(read)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"momentum_dtype": torch.bfloat16}, {"momentum_dtype": "fp8"}, {"metrics": ("lr",)},
        {"second_moment": "normuon"}, {"master": "mantissa"}, {"rounding": "stochastic"},
        {"auxiliary": {"adamw": fmuon.adamw(), "lion": fmuon.lion()}},
    ],
    ids=str,
)  # fmt: skip
def test_states_of_every_kind_are_read_with_weights_only(options):
    opt = fmuon.muon(0.1, **options)
    params = {name: p.detach().bfloat16() for name, p in network().named_parameters()}
    _, state = opt.update(params, opt.init(params), 0, params)
    read = through_a_file({"state": state, "step": torch.tensor(1)})
    assert same(read["state"], state)
    opt.update(params, read["state"], read["step"], params)


def test_a_truncated_file_is_no_state():
    _, optimizer = trained()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    whole = file.getvalue()
    for length in range(0, len(whole), max(1, len(whole) // 20)):
        with pytest.raises((RuntimeError, EOFError, OSError, ValueError, pickle.UnpicklingError)):
            torch.load(io.BytesIO(whole[:length]), weights_only=True)
