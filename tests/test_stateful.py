# SPDX-License-Identifier: Apache-2.0
"""FMuon and the functional core in any order of calls, against the slow reference.

Every leaf has a double that is updated matrix by matrix in float64. Each step starts from what fmuon
holds, so a tolerance is that of one step, however many there were; counts, buffers that a load or a
copy carries on, and leaves that sit out are compared over the whole run. FMUON_EXAMPLES sets how
many runs hypothesis tries; `make fuzz` tries many and prints how many.
"""

import copy
import io
import math
import os
import pickle
import warnings
from collections import Counter
from dataclasses import dataclass, field

import references
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from torch import nn

import fmuon

EXAMPLES = int(os.environ.get("FMUON_EXAMPLES", "12"))
STEPS = 20
TRIED = Counter()

# kind -> (shape, label, the matrices of a leaf as views of it)
KINDS = {
    "tall": ((4, 3), "muon", lambda x: [x]),
    "wide": ((3, 4), "muon", lambda x: [x]),
    "square": ((5, 5), "muon", lambda x: [x]),
    "row": ((1, 6), "muon", lambda x: [x]),
    "kernel": ((4, 6), fmuon.Matrix(1, 0), lambda x: [x.T]),
    "experts": ((2, 3, 4), fmuon.Matrix(1, 2), list),
    "fused": ((6, 4), fmuon.Matrix(blocks=(2, 4)), lambda x: list(x.split([2, 4]))),
    "matrix by the rule": ((3, 4), "auxiliary", None),
    "vector": ((5,), "auxiliary", None),
    "number": ((), "auxiliary", None),
}
RULES = {"adamw": fmuon.adamw(), "nadamw": fmuon.nadamw(), "lion": fmuon.lion()}
DTYPES = [torch.float32, torch.float32, torch.bfloat16, torch.float64]


@dataclass
class Options:
    """What both fmuon and the reference are told."""

    nesterov: bool
    bias_correction: bool
    scale: str
    rule: str
    missing: str

    def given(self):
        return {
            "nesterov": self.nesterov,
            "bias_correction": self.bias_correction,
            "scale": self.scale,
            "auxiliary": RULES[self.rule],
            "missing": self.missing,
            "orthogonalize": fmuon.NewtonSchulz(dtype="float32"),
        }


OPTIONS = st.builds(
    Options,
    nesterov=st.booleans(),
    bias_correction=st.booleans(),
    scale=st.sampled_from(sorted(references.SCALES)),
    rule=st.sampled_from(sorted(RULES)),
    missing=st.sampled_from(["skip", "skip", "zero"]),
)


@dataclass
class Double:
    """A leaf as the reference has it: weights, moments and count."""

    kind: str
    dtype: torch.dtype
    weight: torch.Tensor
    moments: list = field(default_factory=list)
    count: int = 0
    size: float = 0.0
    trained: bool = True

    @property
    def is_matrix(self):
        return KINDS[self.kind][2] is not None

    def reset(self):
        self.count, self.moments = 0, [torch.zeros_like(self.weight) for _ in range(2)]

    def step(self, grad, options, *, lr, momentum, weight_decay):
        """One update; returns how far it may be missed by."""
        if not self.moments:
            self.reset()
        self.count += 1
        # Of what is averaged: the average itself may cancel.
        parts = [grad.double().abs().max().item(), *(m.abs().max().item() for m in self.moments)]
        self.size = max(1e-12, *parts, parts[0] ** 2)
        grad, before = grad.double(), self.weight
        rounding = torch.finfo(self.dtype).eps if self.dtype != torch.float64 else 1e-9
        if self.is_matrix:
            cut = KINDS[self.kind][2]
            new, average = before.clone(), self.moments[0].clone()
            for w, m, g in zip(cut(new), cut(average), cut(grad), strict=True):
                pair = references.muon_step(
                    w, g, m, self.count, lr=lr, b=momentum, nesterov=options.nesterov,
                    bias_correction=options.bias_correction, weight_decay=weight_decay,
                    scale=options.scale,
                )  # fmt: skip
                w.copy_(pair[0])
                m.copy_(pair[1])
            self.weight, self.moments = new, [average, self.moments[1]]
            size = max(references.SCALES[options.scale](*m.shape) for m in cut(new))
            # Five steps of the quintic amplify the rounding of float32 by 3.4445^5 at most.
            return 2e-3 * lr * size + rounding * before.abs().max().item()
        rule = RULES[options.rule]
        common = {"lr": lr, "betas": rule.betas, "weight_decay": weight_decay}
        if options.rule == "lion":
            self.weight, first = references.lion_step(before, grad, self.moments[0], **common)
            self.moments[0] = first
        else:
            self.weight, *self.moments = references.adamw_step(
                before, grad, *self.moments, self.count, eps=rule.eps,
                nesterov=options.rule == "nadamw", **common,
            )  # fmt: skip
        inexact = 1e-9 if self.dtype == torch.float64 else 1e-4
        return inexact * lr + rounding * (1e-9 + before.abs().max().item())


def compare(double, weight, moments, allowed):
    """Both agree; the reference goes on from what fmuon holds."""
    error = (double.weight - weight.double()).abs().max().item()
    assert error <= allowed, (double, error, allowed)
    for mine, theirs in zip(double.moments, moments, strict=False):
        wide = torch.float64 if double.dtype == torch.float64 else torch.float32
        assert theirs.dtype == wide
        assert (mine - theirs.double()).abs().max().item() <= 1e-6 * double.size
    double.weight = weight.double().clone()
    double.moments = [m.double().clone() for m in moments] + double.moments[len(moments) :]


def through_a_file(content):
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


seeds = st.integers(0, 2**16)
kinds = st.sampled_from(sorted(KINDS))
rates = st.floats(1e-3, 0.1)
decays = st.sampled_from([0.0, 0.1])
momenta = st.sampled_from([0.0, 0.5, 0.95])


class Shim(RuleBasedStateMachine):
    """FMuon over named parameters in groups."""

    @initialize(
        options=OPTIONS, first=kinds, more=st.lists(kinds, max_size=4), seed=seeds, count=st.integers(1, 3),
        lr=rates, weight_decay=decays,
    )  # fmt: skip
    def start(self, options, first, more, seed, count, lr, weight_decay):
        TRIED["FMuon: runs"] += 1
        self.options, self.created = options, 0
        self.params, self.doubles = {}, {}
        self.groups = [
            {"name": f"g{i}", "names": [], "lr": lr * (i + 1), "weight_decay": weight_decay, "momentum": 0.9}
            for i in range(count)
        ]  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        for i, kind in enumerate([first, *more, *["tall"] * count]):
            self.groups[i % count]["names"].append(self.leaf(kind, generator))
        self.optimizer = self.make()

    def leaf(self, kind, generator):
        shape = KINDS[kind][0]
        dtype = DTYPES[int(torch.randint(len(DTYPES), (), generator=generator))]
        name = f"layer{self.created}.{kind.replace(' ', '_')}"
        self.created += 1
        self.params[name] = nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        start = self.params[name].detach().double().clone()
        self.doubles[name] = Double(kind, dtype, start)
        return name

    def group(self, group):
        """The group dict that FMuon is given."""
        names = group["names"]
        rules = [KINDS[self.doubles[name].kind][1] for name in names]
        values = {key: group[key] for key in ("name", "lr", "weight_decay", "momentum")}
        return {"params": [(n, self.params[n]) for n in names], "rules": rules, **values}

    def make(self):
        return fmuon.FMuon(
            [self.group(group) for group in self.groups], lr=1.0, **self.options.given()
        )

    @rule(seed=seeds, missing=st.sets(st.integers(0, 7)), zero=st.booleans())
    def step(self, seed, missing, zero):
        TRIED["FMuon: steps"] += 1
        generator = torch.Generator().manual_seed(seed)
        for i, p in enumerate(self.params.values()):
            grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            p.grad = None if i in missing else grad * 0 if zero and i == 0 else grad
        grads = {name: p.grad for name, p in self.params.items()}
        before = {name: p.detach().clone() for name, p in self.params.items()}
        self.optimizer.step()
        for group in self.groups:
            for name in group["names"]:
                double, p = self.doubles[name], self.params[name]
                skipped = grads[name] is None and self.options.missing == "skip"
                if skipped or not double.trained:
                    assert torch.equal(p, before[name])
                    continue
                grad = torch.zeros_like(p) if grads[name] is None else grads[name]
                values = {key: group[key] for key in ("lr", "momentum", "weight_decay")}
                allowed = double.step(grad.detach(), self.options, **values)
                state = self.optimizer.state[p]
                slots = [
                    state[key]
                    for key in ("momentum_buffer", "exp_avg", "exp_avg_sq")
                    if key in state
                ]
                compare(double, p.detach(), slots, allowed)

    @rule(seed=seeds)
    def three_steps(self, seed):
        for i in range(3):
            self.step(seed + i, {i}, zero=False)

    @rule(
        index=st.integers(0, 5),
        lr=rates,
        weight_decay=decays,
        momentum=momenta,
        tensor=st.booleans(),
    )
    def write_values(self, index, lr, weight_decay, momentum, tensor):
        group = self.groups[index % len(self.groups)]
        group |= {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        own = next(g for g in self.optimizer.param_groups if g["name"] == group["name"])
        own |= {"lr": torch.tensor(lr, dtype=torch.float64) if tensor else lr}
        own |= {"weight_decay": weight_decay, "momentum": momentum}

    @rule(factor=st.sampled_from([0.5, 0.9]), epochs=st.integers(1, 2))
    def schedule(self, factor, epochs):
        for group in self.optimizer.param_groups:
            group.pop("initial_lr", None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda i: factor**i)
            for _ in range(epochs):
                scheduler.step()
        for group in self.groups:
            group["lr"] *= factor**epochs

    @rule(index=st.integers(0, 7))
    def toggle(self, index):
        name = sorted(self.params)[index % len(self.params)]
        self.doubles[name].trained = not self.doubles[name].trained
        self.params[name].requires_grad_(self.doubles[name].trained)

    @rule()
    def warm_up(self):
        self.optimizer.warmup()

    @rule(how=st.sampled_from(["copy", "pickle"]))
    def copied(self, how):
        pair = self.params, self.optimizer
        self.params, self.optimizer = (
            copy.deepcopy(pair) if how == "copy" else pickle.loads(pickle.dumps(pair))
        )

    @precondition(lambda self: len(self.groups) < 5)
    @rule(kind=kinds, seed=seeds, lr=rates)
    def add_group(self, kind, seed, lr):
        name = self.leaf(kind, torch.Generator().manual_seed(seed))
        group = {
            "name": f"g{len(self.groups)}",
            "names": [name],
            "lr": lr,
            "weight_decay": 0.1,
            "momentum": 0.8,
        }
        self.groups.append(group)
        self.optimizer.add_param_group(self.group(group))

    @rule(reorder=st.randoms(use_true_random=False), rename=st.booleans())
    def load_elsewhere(self, reorder, rename):
        """Into an optimizer of copies, in another order and perhaps under other names."""
        saved = through_a_file(self.optimizer.state_dict())
        renamed = {}
        if rename:
            renamed = {name: f"new.{name}" for name in reorder.sample(sorted(self.params), 1)}
        self.move(renamed)
        for group in self.groups:
            reorder.shuffle(group["names"])
        reorder.shuffle(self.groups)
        self.optimizer = self.fresh_values()
        self.optimizer.load_state_dict(saved, **({"rename": renamed} if renamed else {}))

    def move(self, renamed):
        copies = {
            renamed.get(name, name): nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)
            for name, p in self.params.items()
        }
        self.params = copies
        self.doubles = {renamed.get(name, name): d for name, d in self.doubles.items()}
        for group in self.groups:
            group["names"] = [renamed.get(name, name) for name in group["names"]]

    def fresh_values(self):
        """An optimizer whose group values are wrong until they are loaded."""
        kept = self.groups
        self.groups = [{**group, "lr": 0.5, "momentum": 0.1, "weight_decay": 0.5} for group in kept]
        optimizer = self.make()
        self.groups = kept
        return optimizer

    @rule(index=st.integers(0, 7), kind=kinds, seed=seeds, relabel=st.booleans())
    def load_into_a_changed_model(self, index, kind, seed, relabel):
        """One leaf ends and another begins, or the same one with another label."""
        saved = through_a_file(self.optimizer.state_dict())
        self.move({})
        old = sorted(self.params)[index % len(self.params)]
        group = next(group for group in self.groups if old in group["names"])
        if relabel and self.doubles[old].kind in ("wide", "matrix by the rule"):
            new, double = old, self.doubles[old]
            double.kind = "matrix by the rule" if double.kind == "wide" else "wide"
            double.reset()
        else:
            new = self.leaf(kind, torch.Generator().manual_seed(seed))
            del self.params[old], self.doubles[old]
            group["names"][group["names"].index(old)] = new
        self.optimizer = self.fresh_values()
        self.optimizer.load_state_dict(saved, drop=[old], add=[new])

    @rule()
    def refused_load(self):
        """What is refused changes nothing, which the next steps show."""
        saved = self.optimizer.state_dict()
        broken = {**saved, "param_groups": saved["param_groups"][:-1]}
        try:
            self.optimizer.load_state_dict(broken)
        except fmuon.StateError:
            return
        raise AssertionError("a group is missing, and it was loaded")

    @invariant()
    def counts_agree(self):
        for name, double in getattr(self, "doubles", {}).items():
            state = self.optimizer.state.get(self.params[name], {})
            assert float(state.get("step", 0.0)) == double.count, name


class Core(RuleBasedStateMachine):
    """init, update, update_ and adapt_state over a nested tree."""

    @initialize(options=OPTIONS, chosen=st.lists(kinds, min_size=1, max_size=5), seed=seeds)
    def start(self, options, chosen, seed):
        TRIED["update: runs"] += 1
        self.options, self.created, self.now = options, 0, 0
        self.params, self.doubles, self.labels = {}, {}, {}
        for kind in [*chosen, "tall"]:
            self.leaf(kind, seed)
        self.opt = self.make()
        self.state = self.opt.init(self.tree(self.params))

    def leaf(self, kind, seed):
        generator = torch.Generator().manual_seed(seed + self.created)
        dtype = DTYPES[int(torch.randint(len(DTYPES), (), generator=generator))]
        path = f"block.{self.created}.{kind.replace(' ', '_')}"
        self.created += 1
        self.params[path] = torch.randn(KINDS[kind][0], generator=generator).to(dtype)
        self.doubles[path] = Double(kind, dtype, self.params[path].double().clone())
        self.labels[path] = KINDS[kind][1]
        return path

    def make(self):
        return fmuon.muon(labels=dict(self.labels), **self.options.given())

    @staticmethod
    def tree(leaves):
        """{"block": {number: {kind: leaf}}}"""
        nested = {}
        for path, leaf in leaves.items():
            block, number, kind = path.split(".")
            nested.setdefault(block, {}).setdefault(number, {})[kind] = leaf
        return nested

    @staticmethod
    def flat(tree):
        return {
            f"{block}.{number}.{kind}": leaf
            for block, numbers in tree.items()
            for number, leaves in numbers.items()
            for kind, leaf in leaves.items()
        }

    @rule(
        seed=seeds, none=st.sets(st.integers(0, 7)), absent=st.sets(st.integers(0, 7)),
        overflow=st.sampled_from([None, False, False, True]), in_place=st.booleans(),
        lr=rates, weight_decay=decays, momentum=momenta, by_leaf=st.booleans(),
    )  # fmt: skip
    def update(self, seed, none, absent, overflow, in_place, lr, weight_decay, momentum, by_leaf):
        TRIED["update: steps"] += 1
        generator = torch.Generator().manual_seed(seed)
        grads, present, rates = {}, {}, {}
        for i, (path, p) in enumerate(self.params.items()):
            grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            grads[path] = None if i in none else grad * math.nan if i in absent else grad
            rates[path] = lr * (i + 1) if by_leaf else lr
            if i in absent:
                present[path] = torch.tensor(False)
            elif i % 2:
                present[path] = torch.tensor(True)
        call = {
            "lr": rates if by_leaf else lr, "weight_decay": weight_decay, "momentum": momentum,
            "present": present, "found_inf": None if overflow is None else torch.tensor(float(overflow)),
        }  # fmt: skip
        before = copy.deepcopy((self.params, grads, self.state))
        given = self.tree(self.params), self.tree(grads)
        if in_place:
            fmuon.update_(self.opt, given[0], given[1], self.state, self.now, **call)
        else:
            updates, new = self.opt.update(given[1], self.state, self.now, given[0], **call)
            assert same((self.params, grads, self.state), before)
            self.params = self.flat(fmuon.apply_updates(given[0], updates))
            self.state = new
        self.now += 1
        for path, double in self.doubles.items():
            out = grads[path] is None and self.options.missing == "skip"
            if out or overflow or not present.get(path, True):
                assert torch.equal(self.params[path], before[0][path])
                continue
            grad = torch.zeros_like(self.params[path]) if grads[path] is None else grads[path]
            allowed = double.step(
                grad, self.options, lr=rates[path], momentum=momentum, weight_decay=weight_decay
            )
            compare(double, self.params[path], self.moments(path), allowed)

    def moments(self, path):
        stores = [self.state["momentum"], *self.state["auxiliary"].values()]
        return [store[path] for store in stores if path in store]

    @rule()
    def through_a_file(self):
        self.state, self.params = through_a_file((self.state, self.params))

    @rule(
        index=st.integers(0, 7),
        kind=kinds,
        seed=seeds,
        change=st.sampled_from(["add", "drop", "rename"]),
    )
    def adapt(self, index, kind, seed, change):
        old = sorted(self.params)[index % len(self.params)]
        declared = {}
        if change == "add" and len(self.params) < 8:
            declared = {"add": [self.leaf(kind, seed)]}
        elif change == "drop" and len(self.params) > 1:
            for table in (self.params, self.doubles, self.labels):
                del table[old]
            declared = {"drop": [old]}
        elif change == "rename":
            new = f"{old}_renamed"
            for table in (self.params, self.doubles, self.labels):
                table[new] = table.pop(old)
            declared = {"rename": {old: new}}
        before = copy.deepcopy(self.state)
        self.opt = self.make()
        adapted = fmuon.adapt_state(
            self.opt, self.state, self.tree(self.params), self.now, **declared
        )
        assert same(self.state, before)
        self.state = adapted

    @invariant()
    def counts_agree(self):
        for path, double in getattr(self, "doubles", {}).items():
            assert self.now - int(self.state["missed"][path]) == double.count, path


def test_a_leaf_that_has_no_state_yet_can_be_renamed():
    make = lambda name: fmuon.FMuon([(name, nn.Parameter(torch.ones(4, 3)))])  # noqa: E731
    loaded = make("new")
    loaded.load_state_dict(make("old").state_dict(), rename={"old": "new"})
    assert not loaded.state


def same(a, b):
    """Whether nested dicts and tuples of tensors are equal, bit by bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return all(map(same, a, b))
    return a is b or (a.dtype == b.dtype and torch.equal(a.nan_to_num(7), b.nan_to_num(7)))


BUDGET = settings(
    max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None, derandomize=EXAMPLES == 12
)
TestShim, TestCore = Shim.TestCase, Core.TestCase
TestShim.settings = TestCore.settings = BUDGET
