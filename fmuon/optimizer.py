# SPDX-License-Identifier: Apache-2.0
"""`FMuon`: the functional core behind the interface of torch.optim.

This module keeps param groups and per-parameter state in torch's format; each step hands them to
`update_` under path names.
"""

import contextlib
import pickle
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fmuon.auxiliary import Rule
from fmuon.base import (
    ConfigurationError,
    LeafError,
    Matrix,
    StateError,
    Transformation,
    lookup,
)
from fmuon.clipping import all_finite
from fmuon.collectives import everywhere, is_sharded, local, make_group, mesh_of, register
from fmuon.compilation import can_compile, check_mode
from fmuon.compilation import compile as compile_
from fmuon.foreign import Foreign, Share, adopted
from fmuon.functional import Muon, configuration_of, muon
from fmuon.metrics import SKIPPED, metric_key
from fmuon.partition import (
    Assignment,
    Label,
    Leaf,
    as_view,
    by_name_and_shape,
    check_keys,
    declared,
    route,
    unwrapped_module,
)
from fmuon.planning import MANTISSA, check_not_empty, check_trainable
from fmuon.presets import PRESETS
from fmuon.state_dicts import (
    FORMAT,
    SLOTS,
    check_groups,
    check_same_rule,
    check_saved,
    check_structure,
    check_values,
    counterparts,
    decode_label,
    encode_label,
    named_by_ids,
)
from fmuon.surgery import origins, resized
from fmuon.tree import unwrapped

_SCALARS = ("lr", "weight_decay", "momentum", "beta1", "beta2", "eps")


class _Member(NamedTuple):
    """One trained parameter of a group: a matrix, or one of the rule of that name.

    `lr_factor` and `own_decay` are the rule's where the group's values are not.
    """

    path: str
    group: int
    is_matrix: bool = False
    rule: str | None = None
    lr_factor: float = 1.0
    own_decay: bool = False


@dataclass(frozen=True)
class _Layout:
    """All that the compiled step holds constant."""

    config: Muon
    members: tuple[_Member, ...]


class FMuon(Optimizer):
    """Muon for the matrices of a model and an auxiliary rule for the rest, as one optimizer.

    Args:
        params: a module (routed by the types of its layers, see `fmuon.label`), named or bare
            parameters, or group dicts. A module, names and bare parameters become the groups "muon"
            and "auxiliary"; group dicts stay as they are. A group may carry `use_muon` (bool),
            `algorithm` ("muon" or a rule), or `rules`, one label per parameter.
        lr: one learning rate for all groups, a float or a 0-d tensor. A group's `lr_scale` is
            multiplied to it; that of the auxiliary group is its rule's, or 1 in a group dict that
            says its own lr.
        compile: "auto" compiles with "max-autotune" on accelerators and not on CPUs; a mode of
            torch.compile; or False.
        preset: a name in `fmuon.presets.PRESETS`; `options` replace its values.
        **options: of `fmuon.muon`. `auxiliary` may also be a class of torch optimizers, or (class,
            arguments), alone or in a dict of rules: it trains its leaves over the groups and the
            state of this optimizer, outside the compiled step and without metrics.

    State per parameter: `momentum_buffer`, or `exp_avg` and `exp_avg_sq`; what options add to
    these (`second_momentum_buffer`, `momentum_buffer_scale`, `mantissa`); and `step`, a 0-d float32
    count of the updates applied to it. What a foreign optimizer keeps has its own names.

    >>> optimizer = fmuon.FMuon(model, lr=1e-3, weight_decay=0.1)
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float | Tensor | None = None,
        *,
        compile: str | bool = "auto",
        preset: str | None = None,
        **options: Any,
    ) -> None:
        options |= {} if lr is None else {"lr": lr}
        if preset is not None:
            options = lookup(PRESETS, preset, "preset").values(params, **options)
        self._foreign: dict[str | None, Foreign] = {}
        if "auxiliary" in options:
            rate = options.get("lr")
            options["auxiliary"], self._foreign = adopted(options["auxiliary"], rate)
        self._config = _with_ratios(configuration_of(muon(**options)))
        self._compile = compile
        self._steps: dict[_Layout, Callable[..., None]] = {}
        self._agreed: set[tuple[tuple[str, Label], ...]] = set()
        self._metrics: dict[str, Tensor] = {}
        if not (compile == "auto" or compile is False or isinstance(compile, str)):
            raise ConfigurationError(f"compile={compile!r}: give 'auto', False, or a mode")
        if isinstance(compile, str) and compile != "auto":
            check_mode(compile)
        first = next(iter(self._config.rules.values()))
        for name in ("lr", "momentum", "weight_decay"):
            value = getattr(self._config, name)
            if not isinstance(value, int | float | Tensor):
                raise ConfigurationError(
                    f"{name}={value!r}: FMuon takes numbers and 0-d tensors; use a scheduler of "
                    f"torch.optim.lr_scheduler, which writes the groups"
                )
        defaults: dict[str, Any] = {
            "lr": self._config.lr,
            "weight_decay": self._config.weight_decay,
            "momentum": self._config.momentum,
            "betas": first.betas,
            "eps": first.eps,
            "lr_scale": 1.0,
        }
        for foreign in self._foreign.values():
            defaults = foreign.defaults | defaults | {"foreign": None}
        self._guessed: list[tuple[int, ...]] = []
        super().__init__(self._groups(params), defaults)
        if self._guessed:
            warnings.warn(
                f"FMuon got parameters without names and trains the 2-D ones, of shapes "
                f"{self._guessed}, by Muon; it can't tell embeddings and output heads from other "
                f"matrices: pass the model, or say use_muon in the groups",
                stacklevel=2,
            )
        names = [name for group in self.param_groups for name in group.get("param_names", ())]
        if isinstance(self._config.labels, tuple) and not isinstance(params, nn.Module):
            check_keys(self._config.labels, names)

    # ---- groups ----------------------------------------------------------------------------------

    def _groups(self, params: nn.Module | Iterable[Any]) -> list[dict[str, Any]]:
        if isinstance(params, Tensor):
            raise TypeError("params: give an iterable of parameters, not a tensor")
        if isinstance(params, nn.Module):
            _, module = unwrapped_module(params)
            named = dict(module.named_parameters())
            # Parameters that are frozen now are kept, as by any optimizer: they may be trained
            # later.
            return self._named(named, self._config.assign(named, route(module, frozen=False)))
        entries = list(params)
        if not entries:
            raise ValueError("params: the list of parameters is empty")
        if isinstance(entries[0], dict):
            return entries
        if isinstance(entries[0], tuple):
            _check_unique([name for name, _ in entries])
            return self._named(dict(entries), self._config.assign(dict(entries)))
        if isinstance(self._config.labels, tuple):
            raise ConfigurationError("labels need names: pass the model, or named parameters")
        return self._split(
            [
                (None, p, self._default_label(f"params[{i}]", p, False))
                for i, p in enumerate(entries)
            ]
        )

    def _named(
        self, named: Mapping[str, Tensor], assignments: Mapping[str, Assignment]
    ) -> list[dict[str, Any]]:
        check_not_empty(assignments)
        return self._split([(unwrapped(p), t, assignments[p].label) for p, t in named.items()])

    def _split(self, entries: Sequence[tuple[str | None, Tensor, Label]]) -> list[dict[str, Any]]:
        """The groups "muon" and "auxiliary" (one per rule), of the parameters that are trained."""
        groups: dict[str, dict[str, Any]] = {}
        for path, parameter, label in entries:
            if label == "frozen":
                continue
            name = "muon" if isinstance(label, Matrix) else self._config.rule_name(label)
            group = groups.setdefault(name or "auxiliary", {"params": [], "rules": []})
            group["params"].append(parameter if path is None else (path, parameter))
            group["rules"].append(encode_label(label))
        # "muon" first, whichever parameter comes first.
        return [
            {"name": name, **groups[name]} for name in sorted(groups, key=lambda n: n != "muon")
        ]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its labels come from `rules`, `use_muon`, `algorithm` or the shapes.

        In a group of matrices and other leaves, the rule's own weight decay and lr_scale count for
        the others; everything else is the group's.
        """
        group = dict(param_group)
        if isinstance(group["params"], set):
            raise TypeError("params: a set has no order; give a list")
        entries = [group["params"]] if isinstance(group["params"], Tensor) else [*group["params"]]
        tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in entries]
        names: list[str] | None = group.get("param_names")
        if entries and isinstance(entries[0], tuple):
            names = [str(entry[0]) for entry in entries]
        if len(set(map(id, tensors))) < len(tensors):
            raise ValueError("some parameters appear more than once in a parameter group")
        taken = [name for other in self.param_groups for name in other.get("param_names", ())]
        _check_unique([*taken, *(names or ())])
        given = group.pop("rules", None) or [self._flag(group)] * len(tensors)
        paths = names or [f"groups[{len(self.param_groups)}][{i}]" for i in range(len(tensors))]
        labels = [
            self._label(path, tensor, rule, names is not None)
            for path, tensor, rule in zip(paths, tensors, given, strict=True)
        ]
        group["params"], group["rules"] = entries, [encode_label(label) for label in labels]
        self._add_defaults(group, labels)
        check_values(group, any(map(self._is_foreign, labels)))
        super().add_param_group(group)
        _own_rate(self.param_groups[-1])

    def _label(self, path: str, tensor: Any, given: Any, has_name: bool) -> Label:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{path}: a {type(tensor).__name__}; an optimizer takes tensors")
        if given == "muon":
            # `labels` may know which view of the leaf that is.
            view, _ = declared(path, Leaf(tuple(tensor.shape), tensor.dtype), self._config.labels)
            given = view if isinstance(view, Matrix) else given
        if given == "muon" and tensor.ndim != 2:
            raise LeafError(
                f"{path!r} (shape {tuple(tensor.shape)}) is not a matrix; give the group "
                f"rules=[fmuon.Matrix(...)], or train it by the auxiliary rule"
            )
        label = (
            self._default_label(path, tensor, has_name) if given is None else decode_label(given)
        )
        self._config.check_label(repr(path), label)
        if label == "error":
            raise LeafError(f"{path!r}: its label is 'error'; give it another")
        if label != "frozen":
            check_trainable(path, tensor)
        if isinstance(label, Matrix):
            label.view(path, tuple(tensor.shape))
        return label

    def _default_label(self, path: str, tensor: Tensor, has_name: bool) -> Label:
        """The label of a parameter in a group that says nothing: by `labels`, name and shape."""
        shape, labels = tuple(tensor.shape), self._config.labels
        if has_name or callable(labels):
            label, _ = declared(path, Leaf(shape, tensor.dtype), labels)
            if label is not None:
                return as_view(path, shape, label)
        if has_name:
            return by_name_and_shape(path, shape).label
        if len(shape) != 2 or 1 in shape:
            return "auxiliary"
        self._guessed.append(shape)
        return Matrix()

    def _flag(self, group: Mapping[str, Any]) -> Any:
        """The label of a whole group by the flags that other optimizers use; None without."""
        if "use_muon" in group:
            return "muon" if group["use_muon"] else "auxiliary"
        algorithm = group.get("algorithm")
        known = {"muon": "muon", "auxiliary": "auxiliary"}
        for name, rule in self._config.rules.items():
            known |= {rule.name: name or "auxiliary"} | ({} if name is None else {name: name})
        return None if algorithm is None else lookup(known, algorithm, "algorithm")

    def _add_defaults(self, group: dict[str, Any], labels: Sequence[Label]) -> None:
        """Betas and eps are those of the group's rule; without matrices the other values too."""
        names = {self._config.rule_name(x) for x in labels if _is_auxiliary(x)}
        rules = [self._config.rules[name] for name in names]
        if not rules:
            return
        own: dict[str, Any] = {"betas": rules[0].betas, "eps": rules[0].eps}
        if adopted := [self._foreign[name] for name in names if name in self._foreign]:
            if len(names) > 1:
                raise ConfigurationError(
                    f"a group of {adopted[0].kind.__name__} and of other rules: make a group for "
                    f"each"
                )
            own = adopted[0].group_values()
        if not any(isinstance(label, Matrix) for label in labels):
            # A rate that the group says itself is meant as it stands.
            own["lr_scale"] = 1.0 if "lr" in group else rules[0].lr_scale
            if rules[0].weight_decay is not None:
                own["weight_decay"] = rules[0].weight_decay
        else:
            own = {key: own[key] for key in own if key not in Foreign.in_share}
        for name, value in own.items():
            differ = any(getattr(r, name, None) != getattr(rules[0], name, None) for r in rules)
            if name not in group and differ:
                raise ConfigurationError(
                    f"a group whose rules {sorted(map(str, rules))} differ in {name}: say {name} "
                    f"in the group, or make a group for each rule"
                )
            group.setdefault(name, value)

    # ---- step ------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of every parameter; a parameter without a gradient is left alone.

        Args:
            closure: re-evaluates the model and returns the loss, which is passed on.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = self._trained()
        grads = {path: p.grad for path, (_, p, _) in params.items()}
        absent = [path for path, grad in grads.items() if grad is None]
        if absent and self._config.missing == "error":
            raise LeafError(
                f"no gradient for {absent}, and missing='error'; give every parameter one, or "
                f"choose missing='skip' (leave it alone) or 'zero' (as if it were zero)"
            )
        phantom = not self.state and self._is_phantom(params)
        own = {path: e for path, e in params.items() if not self._is_foreign(e[2])}
        self._create_state(own)
        # The other optimizer can't leave out a step on the device.
        asks = bool(self._foreign) and self._config.nonfinite == "skip"
        if asks and not self._is_finite(params):
            self._count_skipped(params)
            return loss
        # First, since what it raises is not ours to foresee.
        for name, foreign in self._foreign.items():
            foreign.step(self._shares(name, params), self.state)
        if not phantom:
            self._advance(own, grads)
        return loss

    def _is_finite(self, params: Mapping[str, tuple[int, Tensor, Label]]) -> bool:
        """Whether the gradients of all ranks are, as seen from the host."""
        tensors = [parameter for _, parameter, _ in params.values()]
        grads = [parameter.grad for parameter in tensors if parameter.grad is not None]
        finite = all_finite(_values(local(grad)) for grad in grads)
        meshes = {register(mesh) for mesh in map(mesh_of, tensors) if mesh is not None}
        meshes |= set() if self._config.mesh is None else {self._config.mesh}
        for ranks in sorted({tuple(sorted(mesh.ranks)) for mesh in meshes}):
            make_group(ranks)
            finite = everywhere(finite, ranks, tensors[0].device)
        return bool(finite)

    def _is_foreign(self, label: Label) -> bool:
        return _is_auxiliary(label) and self._config.rule_name(label) in self._foreign

    def _shares(
        self, name: str | None, params: Mapping[str, tuple[int, Tensor, Label]]
    ) -> list[Share]:
        """The parameters of the foreign rule of that name, group by group."""
        shares: dict[int, Share] = {}
        for path, (index, parameter, label) in params.items():
            if not _is_auxiliary(label) or self._config.rule_name(label) != name:
                continue
            if index not in shares:
                group = self.param_groups[index]
                member = self._member(path, index, label, self._is_mixed(group))
                own = {
                    "lr": group["lr"] * (group["lr_scale"] * member.lr_factor),
                    "weight_decay": group["weight_decay"],
                }
                if self._is_mixed(group):
                    # These are the matrices' there.
                    own |= self._foreign[name].in_mixed_groups()
                shares[index] = Share(group, [], own)
            shares[index].params.append(parameter)
        return list(shares.values())

    def _count_skipped(self, params: Mapping[str, tuple[int, Tensor, Label]]) -> None:
        if SKIPPED in self._config.metrics:
            device = next(parameter.device for _, parameter, _ in params.values())
            count = self._metrics.setdefault(metric_key(SKIPPED), torch.zeros((), device=device))
            count += 1

    def _trained(self) -> dict[str, tuple[int, Tensor, Label]]:
        """Path -> (group index, parameter, label) of everything that isn't frozen."""
        trained: dict[str, tuple[int, Tensor, Label]] = {}
        for index, group in enumerate(self.param_groups):
            names = group.get("param_names") or [
                f"{index}.{i}" for i in range(len(group["params"]))
            ]
            for name, parameter, rule in zip(names, group["params"], group["rules"], strict=True):
                if parameter.requires_grad and rule != "frozen":
                    trained[name] = index, parameter, decode_label(rule)
        return trained

    def _is_phantom(self, params: Mapping[str, tuple[int, Tensor, Label]]) -> bool:
        """Whether this is the step of get_optimizer_state_dict, which must only create state.

        It has an empty state, every lr 0 and all gradients zero.
        """
        if any(float(group["lr"]) != 0 for group in self.param_groups):
            return False
        grads = [p.grad for _, p, _ in params.values() if p.grad is not None]
        return not any(bool(_values(grad).any()) for grad in grads)

    def _create_state(self, params: Mapping[str, tuple[int, Tensor, Label]]) -> None:
        mode = self._mode(params)
        for path, (_, parameter, label) in params.items():
            if parameter in self.state:
                continue
            fresh = self._config.fresh(path, parameter, label)
            state = {SLOTS[slot]: zeros for slot, zeros in fresh.items()}
            # A CPU tensor would keep a compiled step out of CUDA graphs.
            device = "cpu" if mode is None else parameter.device
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            self.state[parameter] = state

    def _buffers(self, name: str, parameter: Tensor, label: Label) -> set[str]:
        """Names of the buffers of a parameter with that label."""
        config, slots = self._config, list[str]()
        if isinstance(label, Matrix):
            slots += config.kept
        else:
            slots += config.rules[config.rule_name(label)].slots
        if config.has_mantissa(name, parameter.dtype):
            slots.append(MANTISSA)
        return {SLOTS[slot] for slot in slots}

    def _advance(
        self,
        params: Mapping[str, tuple[int, Tensor, Label]],
        grads: Mapping[str, Tensor | None],
    ) -> None:
        flags = None
        if self._mode(params) is not None:
            # One graph for every pattern of missing gradients.
            zero = self._config.missing == "zero"
            flags = [grads[path] is not None or zero for path in params]
        elif self._config.missing == "skip":
            # Whether a leaf that ranks share has a gradient anywhere is for the core to find out.
            params = {
                path: entry
                for path, entry in params.items()
                if grads[path] is not None or self._is_shared(entry[1])
            }
        if params:
            self._run(params, grads, flags)

    def _is_shared(self, parameter: Tensor) -> bool:
        return self._config.mesh is not None or is_sharded(parameter)

    def _run(
        self,
        params: Mapping[str, tuple[int, Tensor, Label]],
        grads: Mapping[str, Tensor | None],
        flags: list[bool] | None,
    ) -> None:
        """The step of some parameters; where a flag is False the parameter sits it out."""
        tensors = {path: parameter.detach() for path, (_, parameter, _) in params.items()}
        device = next(iter(tensors.values())).device
        self._prepare(params)(
            tensors,
            {
                path: grads[path] if flags is None else _dense(grads[path], tensor)
                for path, tensor in tensors.items()
            },
            {path: self.state[parameter] for path, (_, parameter, _) in params.items()},
            _table(self.param_groups, params.values()).to(device),
            self._measurements(params, device),
            None if flags is None else torch.tensor(flags, device=device),
        )

    @property
    def transformation(self) -> Transformation:
        """The pure functions with these options, and with the labels that the groups have now.

        What `fmuon.explain(model, optimizer)` shows.
        """
        given = self._config.labels
        given = given if isinstance(given, tuple) else ()
        labels: dict[str, Label] = {}
        for group in self.param_groups:
            if "param_names" not in group:
                raise ConfigurationError(
                    "the parameters of this FMuon have no names by which they could be told apart; "
                    "make it from the model or from named parameters"
                )
            entries = zip(group["param_names"], group["params"], group["rules"], strict=True)
            for name, parameter, rule in entries:
                shape, label = tuple(parameter.shape), decode_label(rule)
                said, _ = declared(name, Leaf(shape, parameter.dtype), given)
                # What a pattern says already keeps that reason.
                known = said is not None and as_view(name, shape, said) == label
                if not parameter.requires_grad:
                    labels[name] = "frozen"
                elif not known:
                    labels[name] = label
        others = ("re:.*", "frozen")
        config = replace(self._config, labels=(*labels.items(), *given, others))
        return Transformation(config.init, config.update)

    def _measurements(
        self, params: Mapping[str, tuple[int, Tensor, Label]], device: torch.device
    ) -> dict[str, Tensor]:
        """The metrics of some parameters, to be written over."""
        leaves = ((path, isinstance(label, Matrix)) for path, (_, _, label) in params.items())
        keys = self._config.metric_keys(leaves)
        for name in keys:
            if name not in self._metrics:
                self._metrics[name] = torch.zeros((), device=device)
        return {name: self._metrics[name] for name in keys}

    def metrics(self) -> dict[str, float]:
        """What the last step did, under keys such as "fmuon/update_rms/<name>", for any logger.

        Which ones is said by the option `metrics` (see `fmuon.muon`). Costs one transfer from the
        device; the dict is empty before the first step. They are no part of the state_dict:
        "fmuon/skipped_steps" counts from when this object was made.
        """
        if not self._config.metrics:
            raise ConfigurationError(
                "no metrics were asked for: FMuon(..., metrics=('update_rms', 'orthogonality'))"
            )
        if not self._metrics:
            return {}
        values = torch.stack([*self._metrics.values()]).tolist()
        return dict(zip(self._metrics, values, strict=True))

    def _mode(self, params: Mapping[str, tuple[int, Tensor, Label]]) -> str | None:
        """The mode to compile the step in; None runs it eagerly."""
        if self._compile == "auto" and any(p.device.type != "cpu" for _, p, _ in params.values()):
            self._compile = "max-autotune" if can_compile() else False
            if self._compile is False:
                warnings.warn(
                    "FMuon can't compile here (no Triton, or TORCH_COMPILE_DISABLE=1) and runs "
                    "eagerly; compile=False says that this is meant",
                    stacklevel=4,
                )
        return self._compile if isinstance(self._compile, str) and self._compile != "auto" else None

    def _prepare(self, params: Mapping[str, tuple[int, Tensor, Label]]) -> Callable[..., None]:
        """The function that does the step for these parameters, made anew only when they change."""
        mixed = [self._is_mixed(group) for group in self.param_groups]
        members = tuple(
            self._member(path, index, label, mixed[index])
            for path, (index, _, label) in params.items()
        )
        labels = tuple((path, label) for path, (_, _, label) in params.items())
        config = replace(self._config, labels=labels, auxiliary=_unscaled(self._config))
        layout = _Layout(config, members)
        if layout not in self._steps:
            self._agree(config, params)
            step, mode = _in_place_step(layout), self._mode(params)
            self._steps[layout] = step if mode is None else compile_(step, mode)
        return self._steps[layout]

    def _agree(self, config: Muon, params: Mapping[str, tuple[int, Tensor, Label]]) -> None:
        """Make sure that what ranks share is prepared, on all of them in the same step."""
        # Leaves that are a rank's own may come and go on it alone.
        shared = {path: p for path, (_, p, _) in params.items() if self._is_shared(p)}
        labels = tuple((path, params[path][2]) for path in shared)
        if labels and labels not in self._agreed:
            replace(config, labels=labels).prepare(shared)
            self._agreed.add(labels)

    def _is_mixed(self, group: Mapping[str, Any]) -> bool:
        """Whether the values of a group are those of matrices, not of a rule."""
        return any(isinstance(decode_label(rule), Matrix) for rule in group["rules"])

    def _member(self, path: str, group: int, label: Label, mixed: bool) -> _Member:
        if isinstance(label, Matrix):
            return _Member(path, group, is_matrix=True)
        name = self._config.rule_name(label)
        rule = self._config.rules[name]
        if not mixed:
            # A group of auxiliary leaves alone has the rule's values among its own.
            return _Member(path, group, rule=name)
        return _Member(path, group, False, name, rule.lr_scale, rule.weight_decay is not None)

    # ---- state dicts -----------------------------------------------------------------------------

    @torch.no_grad()
    def warmup(self) -> None:
        """Create the state and compile the step, before a loop whose time counts.

        Runs the step with no gradient present, which moves nothing.
        """
        params = {path: e for path, e in self._trained().items() if not self._is_foreign(e[2])}
        self._create_state(params)
        if params and self._mode(params) is not None:
            self._run(params, dict.fromkeys(params), [False] * len(params))

    def state_dict(self) -> dict[str, Any]:
        """torch's format, with the integer `fmuon_format` beside `state` and `param_groups`."""
        return super().state_dict() | {"fmuon_format": FORMAT}

    @torch.no_grad()
    def load_state_dict(
        self,
        state_dict: dict[str, Any],
        *,
        rename: Mapping[str, str] | None = None,
        add: Collection[str] = (),
        drop: Collection[str] = (),
        resize: Collection[str] = (),
    ) -> None:
        """Load a state dict; parameters are matched by name where both sides have names.

        Buffers keep the dtype they were saved in (those of a foreign optimizer take that of their
        parameter, as in torch). For a model that has changed since, `rename`, `add`, `drop` and
        `resize` declare the differences as in `fmuon.adapt_state`; parameters that are added start
        afresh.

        Raises:
            StateError: names, shapes or the format don't match.
        """
        check_structure(state_dict)
        changes = {"rename": rename, "add": add, "drop": drop, "resize": resize}
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        check_structure(state_dict)
        check_groups(state_dict)
        ordered = self._matched(state_dict, {name: c for name, c in changes.items() if c})
        self._check_buffers(ordered)
        self._copy_foreign(ordered)
        with _without_hooks(self):
            super().load_state_dict(ordered)
        # torch casts what it loads to the dtype of the parameter; take the saved tensors again.
        ids = [i for group in ordered["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        labels = [decode_label(rule) for group in self.param_groups for rule in group["rules"]]
        for index, parameter, label in zip(ids, params, labels, strict=True):
            if self._is_foreign(label):
                continue
            for name, value in ordered["state"].get(index, {}).items():
                if isinstance(value, Tensor):
                    # The count stays where it is, all else goes to the device of the parameter.
                    device = value.device if name == "step" else parameter.device
                    self.state[parameter][name] = value.to(device, copy=True)
        for group in self.param_groups:
            _own_rate(group)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _check_buffers(self, ordered: Mapping[str, Any]) -> None:
        """Refuse state whose buffers are not those of the parameters' labels."""
        for own, group in zip(self.param_groups, ordered["param_groups"], strict=False):
            names = own.get("param_names", group["params"])
            entries = zip(names, group["params"], own["params"], own["rules"], strict=False)
            for name, index, parameter, rule in entries:
                found, label = set(ordered["state"].get(index, {})), decode_label(rule)
                if self._is_foreign(label):
                    continue
                wanted = set[str]()
                if label != "frozen":
                    wanted = self._buffers(name, parameter, label) | {"step"}
                if found and found != wanted:
                    raise StateError(
                        f"parameter {name!r}: the state_dict holds {sorted(found)}, its label "
                        f"{rule!r} needs {sorted(wanted)}; it was saved with another label, or by "
                        f"another optimizer, whose states fmuon.interop reads"
                    )
                if found and label != "frozen":
                    fresh = self._config.fresh(name, parameter, label)
                    needed = {SLOTS[slot]: zeros for slot, zeros in fresh.items()}
                    check_saved(name, ordered["state"][index], needed)

    def _copy_foreign(self, ordered: dict[str, Any]) -> None:
        """Copy what a foreign optimizer would write into."""
        for own, saved in zip(self.param_groups, ordered["param_groups"], strict=False):
            for index, rule in zip(saved["params"], own["rules"], strict=False):
                if self._is_foreign(decode_label(rule)) and index in ordered["state"]:
                    state = ordered["state"][index]
                    ordered["state"][index] = {
                        k: v.clone() if type(v) is Tensor else v for k, v in state.items()
                    }

    def _matched(self, saved: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
        """The saved dict in the order of our groups and parameters, matched by name."""
        groups, saved_groups = self.param_groups, saved["param_groups"]
        if not all("param_names" in group for group in (*groups, *saved_groups)):
            if changes:
                raise StateError(
                    f"{', '.join(changes)}: parameters without names can't be told apart; give "
                    f"FMuon the model or named parameters, here and where the state was saved"
                )
            self._check_shapes(saved)
            pairs = list(zip(groups, saved_groups, strict=False))
            for group, source in pairs:
                check_same_rule(group, source)
            own_keys = [{k: v for k, v in group.items() if k != "params"} for group in groups]
            merged = [
                {**o, **s, "rules": g["rules"]} for o, (g, s) in zip(own_keys, pairs, strict=False)
            ]
            return {**saved, "param_groups": merged + saved_groups[len(groups) :]}
        trained = {
            name: decode_label(rule)
            for group in saved_groups
            for name, rule in zip(group["param_names"], group.get("rules", ()), strict=False)
        }
        if any(isinstance(index, str) for group in saved_groups for index in group["params"]):
            saved_groups = named_by_ids(saved_groups, groups)
        old = {
            name: saved["state"].get(index, {})
            for group in saved_groups
            for name, index in zip(group["param_names"], group["params"], strict=True)
        }
        own = {
            name: parameter
            for group in groups
            for name, parameter in zip(group["param_names"], group["params"], strict=True)
        }
        labels = {
            name: decode_label(rule)
            for group in groups
            for name, rule in zip(group["param_names"], group["rules"], strict=True)
        }
        new_shapes = {name: tuple(parameter.shape) for name, parameter in own.items()}
        renamed: Mapping[str, str] = changes.get("rename", {})
        old_shapes = {
            name: self._saved_shape(state, new_shapes.get(new, ()), labels.get(new, "frozen"))
            for name, state in old.items()
            for new in [renamed.get(name, name)]
        }
        source = origins(old_shapes, new_shapes, **changes)
        for name, origin in source.items():
            if self._is_foreign(labels[name]) and isinstance(trained.get(origin), Matrix):
                raise StateError(
                    f"{name!r}: the state_dict holds the momentum of a matrix, its label here is "
                    f"{labels[name]!r}; name it in drop and add"
                )
        matched = counterparts(groups, saved_groups)
        for group, origin in zip(groups, matched, strict=True):
            check_same_rule(group, origin)
        ids = {name: index for index, name in enumerate(own)}
        state = {
            ids[name]: self._resized(name, old[origin], own[name], labels[name])
            for name, origin in source.items()
            if origin is not None and old[origin]
        }
        ordered = [
            {
                **{key: value for key, value in group.items() if key != "params"},
                **source,
                "params": [ids[name] for name in group["param_names"]],
                "param_names": list(group["param_names"]),
                "rules": list(group["rules"]),
            }
            for group, source in zip(groups, matched, strict=True)
        ]
        return {**saved, "state": state, "param_groups": ordered}

    def _saved_shape(
        self, state: Mapping[str, Any], default: tuple[int, ...], label: Label
    ) -> tuple[int, ...]:
        """The shape of a parameter by its buffers; without buffers, `default`."""
        tensors = {name: v for name, v in state.items() if isinstance(v, Tensor) and name != "step"}
        if set(tensors) == {MANTISSA}:
            return tuple(tensors[MANTISSA].shape[:-1])
        buffers = [*tensors.values()]
        if self._is_foreign(label):
            # Some are factors, with a length of 1 along some axes.
            buffers = [buffer for buffer in buffers if buffer.ndim == len(default)]
            return tuple(map(max, zip(*(b.shape for b in buffers), strict=True))) or default
        return tuple(buffers[0].shape) if buffers else default

    def _check_shapes(self, saved: Mapping[str, Any]) -> None:
        """Without names all that can be compared is the shapes, position by position."""
        ids = [index for group in saved["param_groups"] for index in group["params"]]
        entries = [e for g in self.param_groups for e in zip(g["params"], g["rules"], strict=True)]
        for index, (parameter, rule) in zip(ids, entries, strict=False):
            shape = tuple(parameter.shape)
            found = self._saved_shape(saved["state"].get(index, {}), shape, decode_label(rule))
            if found != shape:
                raise StateError(
                    f"parameter {index}: state of shape {found}, parameter of shape {shape}; the "
                    f"order of the parameters has changed, which only names can tell: give FMuon "
                    f"the model"
                )

    def _resized(
        self, name: str, state: Mapping[str, Any], parameter: Tensor, label: Label
    ) -> dict[str, Any]:
        """Saved buffers in the shapes that the parameter needs now."""
        if self._is_foreign(label):
            shape = tuple(parameter.shape)
            if self._saved_shape(state, shape, label) != shape:
                rule = self._config.rules[self._config.rule_name(label)]
                raise StateError(
                    f"{name!r}: what {rule} keeps of it can't be resized; name it in drop and add"
                )
            return dict(state)
        fresh = {} if label == "frozen" else self._config.fresh(name, parameter, label)
        needed = {SLOTS[slot]: zeros for slot, zeros in fresh.items()}
        return {
            key: resized(name, value, needed[key].to(value))
            if key in needed and isinstance(value, Tensor)
            else value
            for key, value in state.items()
        }

    def __getstate__(self) -> dict[str, Any]:
        """What pickle and deepcopy keep: torch's part and the options, labels if they can be."""
        labels = self._config.labels if _can_be_pickled(self._config.labels) else None
        return super().__getstate__() | {
            # A mesh belongs to the process that made it: a copy does all the work itself.
            "_config": replace(self._config, labels=labels, mesh=None),
            "_compile": self._compile,
            "_foreign": self._foreign,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also called by load_state_dict."""
        super().__setstate__(state)
        if not any("differentiable" in foreign.defaults for foreign in self._foreign.values()):
            self.defaults.pop("differentiable", None)
        # What a copy or a pickle doesn't have, and a loaded optimizer keeps.
        for name, empty in (
            ("_steps", {}),
            ("_metrics", {}),
            ("_guessed", []),
            ("_agreed", set()),
        ):
            self.__dict__.setdefault(name, empty)


def parameter_lists(optimizer: FMuon) -> dict[str, list[Tensor]]:
    """The trained parameters by what trains them, "muon" or "auxiliary".

    For example to clip only those whose step depends on the size of their gradient:

    >>> torch.nn.utils.clip_grad_norm_(fmuon.parameter_lists(optimizer)["auxiliary"], 1.0)
    """
    lists: dict[str, list[Tensor]] = {"muon": [], "auxiliary": []}
    for _, parameter, label in optimizer._trained().values():
        lists["muon" if isinstance(label, Matrix) else "auxiliary"].append(parameter)
    return lists


# ---- the step ------------------------------------------------------------------------------------


def _in_place_step(layout: _Layout) -> Callable[..., None]:
    config, members = layout.config, layout.members

    def step(
        params: dict[str, Tensor],
        grads: dict[str, Tensor],
        states: dict[str, dict[str, Tensor]],
        table: Tensor,
        metrics: dict[str, Tensor],
        present: Tensor | None,
    ) -> None:
        rows = [row.unbind() for row in table.unbind()]
        cells = {
            name: {m.path: rows[m.group][column] for m in members}
            for column, name in enumerate(_SCALARS)
        }
        lr = {
            m.path: cells["lr"][m.path] * m.lr_factor if m.lr_factor != 1 else cells["lr"][m.path]
            for m in members
        }
        counts = [states[m.path]["step"] for m in members]
        # The core counts the updates that a leaf missed; at step 0 that is minus those it had.
        missed = dict(zip((m.path for m in members), torch._foreach_neg(counts), strict=True))
        auxiliary: dict[Any, dict[str, dict[str, Tensor]]] = {
            name: {slot: {} for slot in rule.slots} for name, rule in config.rules.items()
        }
        matrices: dict[str, dict[str, Tensor]] = {slot: {} for slot in config.kept}
        mantissas = {
            m.path: states[m.path][MANTISSA] for m in members if MANTISSA in states[m.path]
        }
        flags = {} if present is None else dict(zip(params, present.unbind(), strict=True))
        for m in members:
            if m.is_matrix:
                for slot, leaves in matrices.items():
                    leaves[m.path] = states[m.path][SLOTS[slot]]
            else:
                for slot, leaves in auxiliary[m.rule].items():
                    leaves[m.path] = states[m.path][SLOTS[slot]]
        nested = not isinstance(config.auxiliary, Rule)
        config.update_(
            params,
            grads,
            {
                **matrices,
                MANTISSA: mantissas,
                "auxiliary": auxiliary if nested else auxiliary[None],
                "missed": missed,
                "metrics": metrics,
            },
            torch.zeros((), dtype=torch.int64, device=table.device),
            lr=lr,
            weight_decay={
                m.path: cells["weight_decay"][m.path] for m in members if not m.own_decay
            },
            momentum=cells["momentum"],
            betas={m.path: (cells["beta1"][m.path], cells["beta2"][m.path]) for m in members},
            eps=cells["eps"],
            present=flags,
        )
        # Those that sat this step out have missed one more.
        advanced = torch._foreach_sub([missed[m.path] for m in members], 1)
        torch._foreach_copy_(counts, torch._foreach_neg(advanced))

    return step


def _table(
    groups: Sequence[Mapping[str, Any]], params: Iterable[tuple[int, Tensor, Label]]
) -> Tensor:
    """[groups, scalars] in float64, one transfer whatever the schedulers wrote.

    Zero where no parameter is concerned: there the values may be those of another optimizer.
    """
    matrices: set[int] = set()
    others: set[int] = set()
    for index, _, label in params:
        (matrices if isinstance(label, Matrix) else others).add(index)
    rows = [
        [
            *(
                (group["lr"] * group["lr_scale"], group["weight_decay"])
                if index in matrices | others
                else (0.0, 0.0)
            ),
            group["momentum"] if index in matrices else 0.0,
            *((*group["betas"], group["eps"]) if index in others else (0.0, 0.0, 0.0)),
        ]
        for index, group in enumerate(groups)
    ]
    if not any(isinstance(value, Tensor) for row in rows for value in row):
        return torch.tensor(rows, dtype=torch.float64, device="cpu")
    device = next(v.device for row in rows for v in row if isinstance(v, Tensor))
    return torch.stack(
        [
            torch.stack([torch.as_tensor(v, dtype=torch.float64, device=device) for v in row])
            for row in rows
        ]
    )


def _with_ratios(config: Muon) -> Muon:
    """The options with every rule's own learning rate as a multiple of that of the matrices."""

    def relative(rule: Rule) -> Rule:
        if rule.lr is None:
            return rule
        if not isinstance(rule.lr, int | float) or not float(config.lr):  # pyright: ignore
            raise ConfigurationError(
                f"{rule.name}: lr={rule.lr!r} beside lr={config.lr!r}; FMuon keeps the ratio of "
                f"the two in the group's lr_scale: give numbers, and not lr=0"
            )
        return replace(rule, lr=None, lr_scale=rule.lr / float(config.lr))  # pyright: ignore

    return replace(config, auxiliary=_each_rule(config, relative))


def _unscaled(config: Muon) -> Any:
    """The rules with their lr_scale left to the groups."""
    return _each_rule(config, lambda rule: replace(rule, lr_scale=1.0))


def _each_rule(config: Muon, change: Callable[[Rule], Rule]) -> Any:
    if isinstance(config.auxiliary, Rule):
        return change(config.auxiliary)
    return tuple((name, change(rule)) for name, rule in config.auxiliary)


# ---- labels in groups ----------------------------------------------------------------------------


def _can_be_pickled(labels: Any) -> bool:
    try:
        pickle.dumps(labels)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True


def _values(grad: Tensor) -> Tensor:
    """The entries of a gradient that aren't zero by being left out."""
    return grad.coalesce().values() if grad.is_sparse else grad


def _own_rate(group: dict[str, Any]) -> None:
    """One tensor in two groups would make their schedulers write over each other."""
    if isinstance(group["lr"], Tensor):
        group["lr"] = group["lr"].clone()


def _dense(grad: Tensor | None, parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if grad is None else grad.detach()


@contextlib.contextmanager
def _without_hooks(optimizer: Optimizer) -> Generator[None]:
    """load_state_dict of torch without the hooks, which are run around ours."""
    hooks = "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"
    kept = {name: getattr(optimizer, name) for name in hooks}
    for name in hooks:
        setattr(optimizer, name, OrderedDict())
    try:
        yield
    finally:
        for name in hooks:
            setattr(optimizer, name, kept[name])


def _is_auxiliary(label: Label) -> bool:
    return not isinstance(label, Matrix) and label != "frozen"


def _check_unique(names: Sequence[str]) -> None:
    if twice := sorted(name for name, count in Counter(names).items() if count > 1):
        raise ValueError(f"two parameters have the name {twice}; give every parameter its own")
