# SPDX-License-Identifier: Apache-2.0
"""Other optimizers' checkpoints in and out, and factories for trainers.

`read` makes the state of a transformation from what another optimizer saved, `write` the reverse.
Where the other keeps the sum M <- b M + G, of which our average is (1 - b) times, b is taken from
its groups. A format is a row of `FORMATS`.

>>> state, step = interop.read(saved, opt, params, format="torch", names=names, step=1000)
>>> other.load_state_dict(interop.write(state, step, other.state_dict(), format="torch",
...                                     names=names))

A torch optimizer numbers its parameters. `names` are their paths in that order:
`[name_of[p] for group in other.param_groups for p in group["params"]]`; they may be left out where
the groups carry `param_names`. Only states are converted: learning rates and other hyper-parameters
stay those of `opt`, or of the groups that `write` is given.

Formats: "torch" (torch.optim.Muon, AdamW), "muon_optimizer" (also for the presets jordan and
normuon), "dion", "moonlight", "optax", and "fmuon" for `FMuon`:

>>> state, _ = interop.read(saved, opt, params, format="torch", names=names, step=1000)
>>> optimizer.load_state_dict(interop.write(state, 1000, optimizer.state_dict(), format="fmuon"))
"""

import functools
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from fmuon.base import State, StateError, Transformation, Tree, lookup
from fmuon.functional import configuration_of
from fmuon.optimizer import FMuon
from fmuon.surgery import entries
from fmuon.tree import flatten

Saved: TypeAlias = Mapping[str, Any]
Names: TypeAlias = Sequence[str] | None


class _Held(NamedTuple):
    """What a checkpoint holds of one parameter, under the other's keys, and its group."""

    values: dict[str, Any]
    group: Mapping[str, Any]


@dataclass(frozen=True)
class Kind:
    """How one kind of parameter is kept.

    Attributes:
        keys: our slot -> its key.
        count: the key of the number of updates; None where there is none.
        make_count: int -> what is stored under it.
        marks: what else is stored.
    """

    keys: Mapping[str, str]
    count: str | None = None
    make_count: Callable[[int], Any] = int
    marks: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Format:
    """The state_dict of a torch optimizer: parameters by number.

    Attributes:
        source: the optimizer and its version.
        matrices, others: how the two kinds are kept.
        sums: the key of b in a group, where the momentum is a sum.
        group_count: the key of a group's number of updates.
    """

    source: str
    matrices: Kind
    others: Kind
    sums: str | None = None
    group_count: str | None = None

    def kind(self, store: tuple[str, ...]) -> Kind:
        """Of a tensor of our state, by the keys of the dict that holds it."""
        return self.others if store[0] == "auxiliary" else self.matrices

    def held(self, saved: Saved, names: Names) -> Iterator[tuple[str, _Held]]:
        """(path, what is held of it) of every parameter that has a state."""
        for index, path, group in _numbered(saved, names):
            if values := saved["state"].get(index):
                yield path, _Held(dict(values), group)

    def assembled(self, found: Mapping[str, _Held], like: Saved, names: Names, step: int) -> Saved:
        """The checkpoint of the parameters that are named, in the form of `like`."""
        state = {i: found[path].values for i, path, _ in _numbered(like, names) if path in found}
        groups = [dict(group) for group in like["param_groups"]]
        for group in groups:
            if self.group_count is not None:
                group[self.group_count] = step
        return {**like, "state": state, "param_groups": groups}

    def groups(self, like: Saved, names: Names) -> dict[str, Mapping[str, Any]]:
        """Path -> group."""
        return {path: group for _, path, group in _numbered(like, names)}


class _ByPath(Format):
    """Nested dicts of arrays by path, one for each kind: `{"muon": {...}, "adam": {...}}`."""

    def held(self, saved: Saved, names: Names) -> Iterator[tuple[str, _Held]]:  # noqa: ARG002
        """As for `Format`."""
        for part in saved.values():
            tables = {key: table for key, table in part.items() if isinstance(table, Mapping)}
            numbers = {key: value for key, value in part.items() if key not in tables}
            for path in next(iter(tables.values()), {}):
                yield path, _Held({k: t[path] for k, t in tables.items()} | numbers, {})

    def assembled(
        self,
        found: Mapping[str, _Held],
        like: Saved,  # noqa: ARG002
        names: Names,  # noqa: ARG002
        step: int,
    ) -> Saved:
        """As for `Format`; the names of the parts stand for the groups."""
        parts: dict[str, dict[str, Any]] = {
            part: {"count": step} | {key: {} for key in kind.keys.values()}
            for part, kind in (("muon", self.matrices), ("adam", self.others))
        }
        for path, held in found.items():
            for key in parts[held.group["part"]].keys() - {"count"}:
                value: Tensor = held.values[key].detach().cpu()
                wide = torch.promote_types(value.dtype, torch.float32)
                parts[held.group["part"]][key][path] = value.to(wide).numpy()
        return parts

    def groups(self, like: Saved, names: Names) -> dict[str, Mapping[str, Any]]:  # noqa: ARG002
        """None: every leaf of the state is written."""
        return {}


def _numbered(saved: Saved, names: Names) -> Iterator[tuple[Any, str, Mapping[str, Any]]]:
    """(number, path, group) of every parameter."""
    groups = saved["param_groups"]
    indices = [index for group in groups for index in group["params"]]
    if names is None:
        if not all("param_names" in group for group in groups):
            raise StateError(
                "the state_dict numbers its parameters and has no param_names; give names=, the "
                "paths in the order of its param_groups"
            )
        names = [name for group in groups for name in group["param_names"]]
    if len(names) != len(indices):
        raise StateError(f"{len(names)} names for the {len(indices)} parameters of the state_dict")
    owners = [group for group in groups for _ in group["params"]]
    yield from zip(indices, names, owners, strict=True)


def _tensor(count: int) -> Tensor:
    return torch.tensor(float(count))


_ADAM = {"mu": "exp_avg", "nu": "exp_avg_sq"}
_MUON = {"momentum": "momentum_buffer"}
_NORMUON = _MUON | {"second_moment": "second_momentum_buffer"}
# Mantissas are in one dict of the state, whichever kind their leaves are of.
_OURS = _NORMUON | {"momentum_scale": "momentum_buffer_scale", "mantissa": "mantissa"}

FORMATS: dict[str, Format] = {
    "torch": Format(
        source="torch.optim.Muon and torch.optim.AdamW 2.13",
        matrices=Kind(_MUON),
        others=Kind(_ADAM, count="step", make_count=_tensor),
    ),
    "muon_optimizer": Format(
        source="muon-optimizer 0.1.0 and NorMuon d45c9a4, all classes",
        matrices=Kind(_NORMUON),
        others=Kind(_ADAM, count="step"),
    ),
    "dion": Format(
        source="microsoft/dion 0a059a4, Muon and NorMuon",
        matrices=Kind({"momentum": "momentum", "second_moment": "variance_neuron"}),
        others=Kind({"mu": "momentum", "nu": "variance"}, count="step_dev", make_count=_tensor),
        sums="mu",
        group_count="step",
    ),
    "moonlight": Format(
        source="MoonshotAI/Moonlight c2ad5b2, examples/toy_train.py",
        matrices=Kind({"momentum": "momentum_buffer"}, marks={"use_muon": True}),
        others=Kind({"mu": "moment1", "nu": "moment2"}, count="step", marks={"use_muon": False}),
        sums="momentum",
    ),
    "optax": _ByPath(
        source="optax.contrib.muon 0.2.8, as dicts of arrays",
        matrices=Kind({"momentum": "mu"}, count="count"),
        others=Kind({"mu": "mu", "nu": "nu"}, count="count"),
    ),
    "fmuon": Format(
        source="fmuon.FMuon",
        matrices=Kind(_OURS, count="step", make_count=_tensor),
        others=Kind(_ADAM, count="step", make_count=_tensor),
    ),
}


def read(
    saved: Saved | Sequence[Saved],
    opt: Transformation,
    params: Tree,
    *,
    format: str,
    names: Sequence[str] | Sequence[Sequence[str]] | None = None,
    step: int | None = None,
    add: Collection[str] = (),
) -> tuple[State, int]:
    """The state of `opt` that goes on where another optimizer stopped, and the step.

    Args:
        saved: its state_dict; or a list, of a Muon's and an AdamW's, or of one per rank where each
            holds the momentum of its own parameters. For "optax" `{"muon": {"count": n, "mu":
            {path: array}}, "adam": {"count": n, "mu": {...}, "nu": {...}}}`.
        opt: what goes on; its labels say which leaves are matrices.
        params: the leaves, as for `opt.init`.
        format: a row of `FORMATS`.
        names: the paths of the parameters in the order of the state_dict (see the module); one list
            for each state_dict where they differ.
        step: updates made so far; None takes the largest count found, or 0 where there is none
            (torch.optim.Muon keeps none, which matters where `opt` corrects the bias).
        add: paths that the checkpoint doesn't hold and that start afresh.

    Raises:
        StateError: the checkpoint and `opt` differ in paths, kinds or shapes.
    """
    row = lookup(FORMATS, format, "format")
    found: dict[str, _Held] = {}
    for one, own in _pairs(saved, names):
        found |= row.held(one, own)
    counts = {path: _count(row, held) for path, held in found.items()}
    if step is None:
        step = max((count for count in counts.values() if count is not None), default=0)
    state = configuration_of(opt).init(params, step)
    expected = list(entries(state))
    paths = {path for _, path, _ in expected}
    _check_paths(paths, found, flatten(params)[0], add)
    _check_kinds(row, expected, found)
    for store, path, fresh in expected:
        if path in add:
            continue
        held, target = found[path], functools.reduce(operator.getitem, store, state)
        if store == ("missed",):
            count = counts[path]
            target[path] = fresh - (step if count is None else count)
            continue
        key = row.kind(store).keys[store[-1]]
        value = _as_tensor(held.values[key])
        if value.shape != fresh.shape:
            raise StateError(
                f"{path!r}: {key!r} of shape {tuple(value.shape)} in the checkpoint, opt keeps "
                f"{tuple(fresh.shape)}; are the names in the order of the state_dict?"
            )
        scale = _of_sum(row, store, held.group)
        target[path] = fresh.copy_(value * scale if scale != 1 else value)
    return state, step


def write(
    state: State,
    step: int,
    like: Saved | None = None,
    *,
    format: str,
    names: Sequence[str] | None = None,
) -> Saved:
    """What another optimizer would have saved.

    Args:
        state: of any transformation.
        step: updates made so far.
        like: a state_dict of the other optimizer (a new one's will do), whose groups are kept. Not
            for "optax", whose form is that of `read`.
        format: a row of `FORMATS`.
        names: the paths of its parameters in the order of `like`; other leaves are left out.

    Raises:
        StateError: the format has no place for what the state holds.
    """
    row = lookup(FORMATS, format, "format")
    like = {} if like is None else like
    groups = row.groups(like, names)
    found: dict[str, _Held] = {}
    others: set[str] = set()
    for store, path, tensor in entries(state):
        if store == ("missed",) or (groups and path not in groups):
            continue
        kind = row.kind(store)
        key = kind.keys.get(store[-1])
        if key is None:
            raise StateError(f"{path!r}: {format!r} has no place for {store[-1]!r}")
        if kind is row.others:
            others.add(path)
        group = groups.get(path, {"part": "adam" if store[0] == "auxiliary" else "muon"})
        held = found.setdefault(path, _Held(dict(kind.marks), group))
        scale = _of_sum(row, store, group)
        held.values[key] = tensor / scale if scale != 1 else tensor.clone()
        if kind.count is not None:
            held.values[kind.count] = kind.make_count(step - int(state["missed"][path]))
    for path, held in found.items():
        # A matrix may be without a second moment.
        needed = row.others.keys.values() if path in others else ()
        if lacking := [key for key in needed if key not in held.values]:
            raise StateError(f"{path!r}: {format!r} needs {lacking} too, which the state lacks")
    if absent := sorted(set(groups) - set(found)):
        raise StateError(f"names: the state holds nothing of {absent}")
    return row.assembled(found, like, names, step)


def by_size(params: Mapping[str, Tensor]) -> list[str]:
    """Names in the order in which muon-optimizer's distributed classes keep their matrices."""
    return sorted(params, key=lambda name: params[name].size(), reverse=True)


def _pairs(saved: Any, names: Any) -> Iterator[tuple[Saved, Names]]:
    """Every state_dict with the names of its parameters."""
    dicts: Sequence[Saved] = [saved] if isinstance(saved, Mapping) else saved
    if names is None or all(isinstance(name, str) for name in names):
        names = [names] * len(dicts)
    yield from zip(dicts, names, strict=True)


def _count(row: Format, held: _Held) -> int | None:
    for kind in (row.matrices, row.others):
        if kind.count is not None and kind.count in held.values:
            return int(held.values[kind.count])
    return None if row.group_count is None else int(held.group[row.group_count])


def _of_sum(row: Format, store: tuple[str, ...], group: Mapping[str, Any]) -> float:
    """Our momentum as a multiple of the other's."""
    if row.sums is None or store != ("momentum",):
        return 1.0
    if row.sums not in group:
        raise StateError(
            f"a group of the state_dict says no {row.sums!r}, by which its momentum is summed; it "
            f"has {sorted(group)}"
        )
    return 1 - float(group[row.sums])


def _check_paths(
    paths: Collection[str],
    found: Collection[str],
    leaves: Collection[str],
    add: Collection[str],
) -> None:
    differences = {
        "not in the checkpoint": [p for p in paths if p not in found and p not in add],
        "no leaves of params": [p for p in found if p not in leaves],
        "added, but in the checkpoint": [p for p in add if p in found],
        "added, but no leaves that are trained": [p for p in add if p not in paths],
    }
    if told := [f"{what}: {sorted(which)}" for what, which in differences.items() if which]:
        raise StateError(
            f"{'; '.join(told)}. Name what the checkpoint lacks in add=, and check the names"
        )


def _check_kinds(
    row: Format, expected: Sequence[tuple[tuple[str, ...], str, Tensor]], found: Mapping[str, _Held]
) -> None:
    """What the checkpoint holds of a leaf is what opt keeps of it, no less and no more."""
    counts = {key for kind in (row.matrices, row.others) for key in (kind.count, *kind.marks)}
    kept: dict[str, dict[str, str | None]] = {}
    for store, path, _ in expected:
        slots = kept.setdefault(path, {})
        if store != ("missed",):
            slots[store[-1]] = row.kind(store).keys.get(store[-1])
    for path, slots in kept.items():
        buffers = found[path].values.keys() - counts if path in found else set[str]()
        if path in found and buffers != {key or slot for slot, key in slots.items()}:
            raise StateError(
                f"{path!r}: opt keeps {sorted(slots)} for it, the checkpoint {sorted(buffers)}; "
                f"label it in opt as the other optimizer trained it"
            )


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    # A copy of an array of numpy, whose bfloat16 is not one that torch takes.
    return torch.as_tensor(value.astype("float32" if value.dtype.itemsize < 4 else value.dtype))


# ---- trainers ------------------------------------------------------------------------------------


class HFFactory:
    """`FMuon` for a transformers Trainer, made from the model, so that layers are told apart.

    A Trainer that is given a class of optimizers hands it parameters without names, embeddings
    among the matrices; a factory gets the model. Learning rate and weight decay are those given
    here: the Trainer doesn't pass its own on.

    >>> options = {"lr": 1e-3, "weight_decay": 0.1}
    >>> trainer = Trainer(..., optimizer_cls_and_kwargs=(fmuon.interop.HFFactory, options))
    """

    def __call__(self, model: nn.Module, **options: Any) -> FMuon:
        """The optimizer of a model; `options` are those of `FMuon`."""
        return FMuon(model, **options)
