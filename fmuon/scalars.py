# SPDX-License-Identifier: Apache-2.0
"""Numbers, 0-d tensors, schedules and per-leaf dicts -> float64 tensors on the leaves' device."""

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fmuon.base import ConfigurationError, Scalar

Scalars: TypeAlias = Scalar | Mapping[str, Scalar]
"""One scalar for all leaves, or a flat dict path -> scalar."""

_UNIT_INTERVAL = frozenset({"momentum", "beta1", "beta2"})


def check_scalar(name: str, value: Any) -> None:
    """Refuse numbers out of range and things that are no scalar; tensors are taken as they are."""
    if isinstance(value, Mapping):
        for path, entry in value.items():
            check_scalar(f"{name}[{path!r}]", entry)
    elif isinstance(value, int | float):
        unit = name.split("[")[0] in _UNIT_INTERVAL
        # Ints beyond the largest float can't be computed with.
        if not (0 <= value < 1 if unit else 0 <= value <= sys.float_info.max):
            allowed = "in [0, 1)" if unit else "finite and not negative"
            raise ConfigurationError(f"{name}={value}: must be {allowed}")
    elif isinstance(value, Tensor):
        if value.ndim or value.is_complex():
            raise ConfigurationError(
                f"{name}: a tensor of shape {tuple(value.shape)} and dtype {value.dtype}; a real "
                f"0-d tensor is needed"
            )
    elif not callable(value):
        raise ConfigurationError(
            f"{name}={value!r}: give a number, a 0-d tensor, a callable of the step, or a dict "
            f"path -> one of these"
        )


def is_zero(value: Any) -> bool:
    """Whether a scalar is the Python constant 0, and stays it."""
    return isinstance(value, int | float) and value == 0


def is_callable(value: Any) -> bool:
    """Whether a checked scalar is a function, of the step or of a leaf."""
    # By exclusion: dynamo can't trace callable() of a dict.
    return value is not None and not isinstance(value, int | float | Tensor | Mapping)


def is_mask(value: Any) -> bool:
    """Whether a weight decay is a callable (path, tensor) -> number, not one of the step."""
    if not is_callable(value):
        return False
    parameters = inspect.signature(value).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.default is p.empty and p.kind in kinds]
    return len(required) == 2


def resolve(value: Any, default: Any, paths: Sequence[str], device: torch.device) -> Tensor:
    """The value for some leaves: float64, 0-d or (from a dict) one entry per leaf.

    Leaves that a dict doesn't name get the default, which may be a dict of all leaves.
    """
    if not isinstance(value, Mapping):
        return _tensor(value, device)
    own = default if isinstance(default, Mapping) else dict.fromkeys(paths, default)
    values = [value[path] if path in value else own[path] for path in paths]
    if all(entry is values[0] for entry in values):
        return _tensor(values[0], device)
    return torch.stack([_tensor(entry, device) for entry in values])


def _tensor(value: Any, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(device=device, dtype=torch.float64)
    # Not as_tensor or full: under torch.compile they make every value a graph of its own.
    return torch.ones((), dtype=torch.float64, device=device) * value
