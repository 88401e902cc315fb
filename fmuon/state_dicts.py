# SPDX-License-Identifier: Apache-2.0
"""The format of a state dict of `FMuon`, and what is refused as none."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fmuon.base import ConfigurationError, Matrix, StateError
from fmuon.partition import Label
from fmuon.planning import MANTISSA
from fmuon.scalars import check_scalar

FORMAT = 1
"""Version of the state_dict; stored in it as `fmuon_format`."""

# Slots of the functional state under the names that torch.optim uses.
SLOTS = {
    "momentum": "momentum_buffer",
    "momentum_scale": "momentum_buffer_scale",
    "second_moment": "second_momentum_buffer",
    "mu": "exp_avg",
    "nu": "exp_avg_sq",
    MANTISSA: MANTISSA,
}


def encode_label(label: Label) -> Any:
    """A label as plain data: "muon" for the default matrix, a dict for another view."""
    if not isinstance(label, Matrix):
        return label
    fields = {
        "fan_out": label.fan_out,
        "fan_in": label.fan_in,
        "blocks": label.blocks,
        "blocks_in": label.blocks_in,
    }
    own = {} if label.scale is None else {"scale": label.scale}
    return "muon" if label == Matrix() else fields | own


def decode_label(rule: Any) -> Label:
    """The label of which that is the plain data."""
    if rule == "muon":
        return Matrix()
    return Matrix(**rule) if isinstance(rule, dict) else rule


def named_by_ids(
    saved: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The groups of a distributed checkpoint, in which names stand for the parameters.

    Its param_names may be in another order: loading orders the parameters as the optimizer has
    them. Names that aren't the optimizer's, such as those with a wrapper's prefix, are in order.
    """
    own = {name for group in groups for name in group["param_names"]}
    if all(name in own for group in saved for name in group["params"]):
        return [{**group, "param_names": list(group["params"])} for group in saved]
    pairs = zip(saved, groups, strict=False)
    return [{**group, "param_names": live["param_names"]} for group, live in pairs]


def counterparts(
    groups: Sequence[Mapping[str, Any]], saved: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The saved group that each group takes its values from: of its name, or at its position."""
    names = [group.get("name") for group in groups]
    by_name = {group.get("name"): group for group in saved}
    if None not in by_name and len(by_name) == len(saved) and set(names) <= set(by_name):
        return [by_name[name] for name in names]
    if len(groups) == len(saved):
        return list(saved)
    raise StateError(
        f"the state_dict has {len(saved)} groups, the optimizer {len(groups)}, and their names "
        f"{list(by_name)} and {names} don't tell which belongs to which; give groups a 'name'"
    )


def check_same_rule(own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Refuse a group of FMuon whose leaves another optimizer trained, or the other way round."""
    if "rules" in saved and saved.get("foreign") != own.get("foreign"):
        made, here = (group.get("foreign") or "a rule of fmuon" for group in (saved, own))
        raise StateError(
            f"group {own.get('name')!r} was saved with {made} as auxiliary, and is trained by "
            f"{here}; give the auxiliary that it was saved with"
        )


def check_structure(state_dict: Any) -> None:
    """Refuse what has not the structure of a state dict of torch, or comes from a later fmuon."""
    wanted: dict[str, Any] = {"state": Mapping, "param_groups": (list, tuple)}
    for key, kind in wanted.items():
        if not isinstance(state_dict, Mapping) or not isinstance(state_dict.get(key), kind):
            keys = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else []
            raise StateError(
                f"no state_dict of an optimizer: a {type(state_dict).__name__} with the keys "
                f"{keys}, where {key!r} must be a {'dict' if kind is Mapping else 'list'}; give "
                f"what optimizer.state_dict() returned"
            )
    version = state_dict.get("fmuon_format", FORMAT)
    if type(version) is not int or version < 1:
        raise StateError(f"state_dict: fmuon_format={version!r} is no version of fmuon's format")
    if version > FORMAT:
        raise StateError(
            f"state_dict of format {version}, this fmuon reads up to {FORMAT}; upgrade fmuon"
        )


def check_groups(state_dict: Mapping[str, Any]) -> None:
    """Refuse groups that are incomplete, disagree with themselves, or hold values out of range."""
    known = list[Any]()
    for i, group in enumerate(state_dict["param_groups"]):
        where = f"state_dict: param_groups[{i}]"
        params: Any = group.get("params") if isinstance(group, Mapping) else None
        if not isinstance(params, list | tuple) or not all(type(p) in (int, str) for p in params):
            raise StateError(f"{where}: its 'params' must be a list of numbers, or of names")
        for key in ("param_names", "rules"):
            entries = group.get(key, params)
            if not isinstance(entries, list | tuple) or len(entries) != len(params):
                raise StateError(f"{where}: {key!r} must be a list with one entry per parameter")
        names: Any = group.get("param_names", [])
        if not all(isinstance(name, str) for name in names):
            raise StateError(f"{where}: 'param_names' must be texts")
        for key in ("name", "foreign"):
            if not isinstance(group.get(key), str | None):
                raise StateError(f"{where}: its {key!r} must be a text")
        for rule in group.get("rules", ()):
            try:
                decode_label(rule)
            except (ConfigurationError, TypeError) as error:
                raise StateError(f"{where}: no rule of fmuon among 'rules': {error}") from error
        try:
            check_values(group, group.get("foreign") is not None)
        except ConfigurationError as error:
            raise StateError(f"{where}: {error}") from error
        known += params
    if len(set(known)) < len(known):
        raise StateError("state_dict: a parameter is in its param_groups twice")
    for index, state in state_dict["state"].items():
        if index not in known:
            raise StateError(
                f"state_dict: state of {index!r}, which is in none of its param_groups"
            )
        if not isinstance(state, Mapping):
            raise StateError(f"state_dict: the state of {index!r} is a {type(state).__name__}")


def check_values(group: Mapping[str, Any], foreign: bool) -> None:
    """Refuse values of a group that are out of range."""
    # Betas and eps of another optimizer are for it to check.
    for name in ("lr", "weight_decay", "lr_scale", *(() if foreign else ("momentum", "eps"))):
        if name in group:
            if not isinstance(group[name], int | float | Tensor):
                raise ConfigurationError(f"{name}={group[name]!r}: give a number or a 0-d tensor")
            check_scalar(name, group[name])
    if "betas" in group and not foreign:
        betas = group["betas"]
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise ConfigurationError(f"betas={betas!r}: give a pair")
        for name, beta in zip(("beta1", "beta2"), betas, strict=True):
            if not isinstance(beta, int | float | Tensor):
                raise ConfigurationError(f"betas={betas!r}: give two numbers or 0-d tensors")
            check_scalar(name, beta)


def check_saved(name: str, saved: Mapping[str, Any], needed: Mapping[str, Tensor]) -> None:
    """Refuse buffers that are not like those needed, and counts that are no counts.

    Values of buffers are not looked at: after a NaN in training they are what was saved.
    """
    for key, zeros in needed.items():
        value = saved[key]
        found = type(value).__name__
        if isinstance(value, Tensor):
            found = f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
            if value.shape == zeros.shape and _may_hold(value.dtype, zeros.dtype):
                continue
        raise StateError(
            f"parameter {name!r}: its {key!r} in the state_dict is {found}, and should be a tensor "
            f"of shape {tuple(zeros.shape)} and dtype {zeros.dtype}; load the state of this "
            f"parameter and these options, or name it in drop and add"
        )
    count = saved["step"]
    if not isinstance(count, Tensor) or count.ndim or count.is_complex():
        raise StateError(f"parameter {name!r}: its 'step' in the state_dict is no 0-d tensor")
    if not (0 <= float(count) < float("inf") and float(count).is_integer()):
        raise StateError(
            f"parameter {name!r}: its 'step' in the state_dict is {float(count)}, which is no "
            f"number of updates"
        )


def _may_hold(found: torch.dtype, needed: torch.dtype) -> bool:
    """Whether a buffer may have that dtype: another one of 16 bits or more, if it isn't codes."""
    numbers = [dtype.is_floating_point and dtype.itemsize > 1 for dtype in (found, needed)]
    return all(numbers) or found == needed
