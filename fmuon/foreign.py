# SPDX-License-Identifier: Apache-2.0
"""Any torch optimizer as the auxiliary rule of `FMuon`, over the groups and the state of FMuon."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fmuon.auxiliary import Rule, adamw
from fmuon.base import ConfigurationError

# Keys of a group that mean nothing to another optimizer.
_OWN_KEYS = frozenset({"params", "param_names", "lr_scale", "rules", "name", "foreign"})


class Share(NamedTuple):
    """The parameters of one group that are the other optimizer's.

    `values` stand in for those of the group.
    """

    group: dict[str, Any]
    params: list[Tensor]
    values: dict[str, Any]


class Foreign:
    """A torch optimizer that owns nothing: each step it is lent parameters, groups and state.

    Args:
        kind: its class.
        options: keyword arguments of the class.
        lr: the learning rate of FMuon, a number or a tensor.
    """

    # What a share says in place of its group.
    in_share = frozenset({"lr", "weight_decay", "momentum"})

    def __init__(self, kind: type[Optimizer], options: Mapping[str, Any], lr: Any = None) -> None:
        self.kind, self.options, self._lr = kind, dict(options), 1e-3 if lr is None else lr
        closure = inspect.signature(kind.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise TypeError("its step needs a closure, which FMuon can't pass on")
        # A parameter that is never trained: the class checks its options and fills in defaults.
        make: Any = kind
        given = {"lr": self._lr} | self.options
        self._optimizer = make([nn.Parameter(torch.zeros(1))], **given)
        group = self._optimizer.param_groups[0]
        self._wants_tensor = isinstance(group["lr"], Tensor)
        self.defaults = {key: group[key] for key in group if key not in _OWN_KEYS and key != "lr"}

    def __reduce__(self) -> tuple[Any, ...]:
        return Foreign, (self.kind, self.options, self._lr)

    def rule(self) -> Rule:
        """A rule without slots that stands for it in the configuration."""
        lr: Any = self.options.get("lr")
        decay: Any = self.options.get("weight_decay")
        like = adamw(weight_decay=decay, lr=lr)
        return replace(like, name=self.kind.__name__, slots=(), direction=_never)

    def group_values(self) -> dict[str, Any]:
        """What a group of its own holds; a weight decay that wasn't given is FMuon's."""
        inherited = set() if "weight_decay" in self.options else {"weight_decay"}
        own = {key: value for key, value in self.defaults.items() if key not in inherited}
        return own | {"foreign": self.kind.__name__}

    def in_mixed_groups(self) -> dict[str, Any]:
        """What it has of its own where the values of a group are those of matrices."""
        own = {"momentum": self.defaults["momentum"]} if "momentum" in self.defaults else {}
        if "weight_decay" in self.options:
            own["weight_decay"] = self.options["weight_decay"]
        return own

    def step(self, shares: Sequence[Share], state: Any) -> None:
        """One step of the parameters in `shares`; what it keeps goes into `state` and groups."""
        lent = [self._lent(share) for share in shares]
        self._optimizer.param_groups, self._optimizer.state = lent, state
        step: Any = type(self._optimizer).step
        # Without the global hooks of torch, which FMuon's own step has run.
        (step.__wrapped__ if getattr(step, "hooked", False) else step)(self._optimizer)
        for share, group in zip(shares, lent, strict=True):
            # Some keep a count there.
            kept = _OWN_KEYS | self.in_share
            share.group.update({key: group[key] for key in group if key not in kept})

    def _lent(self, share: Share) -> dict[str, Any]:
        own = {key: value for key, value in share.group.items() if key not in _OWN_KEYS}
        own |= share.values
        if self._wants_tensor and not isinstance(own["lr"], Tensor):
            own["lr"] = torch.tensor(own["lr"])
        return own | {"params": share.params}


def _never(rule: Rule, *_: Any) -> Any:
    raise ConfigurationError(f"{rule.name} is a torch optimizer, which only FMuon can step")


def adopted(auxiliary: Any, lr: Any) -> tuple[Any, dict[str | None, Foreign]]:
    """The rules of an option `auxiliary`, and by their names the optimizers some stand for.

    An optimizer is given as its class, or as (class, keyword arguments).
    """
    if isinstance(auxiliary, Mapping):
        entries: Mapping[str, Any] = auxiliary
        found: dict[str | None, Foreign] = {
            name: foreign for name, rule in entries.items() if (foreign := _adopted(rule, lr))
        }
        rules = {name: found[name].rule() if name in found else entries[name] for name in entries}
        return rules, found
    foreign = _adopted(auxiliary, lr)
    return (auxiliary, {}) if foreign is None else (foreign.rule(), {None: foreign})


def _adopted(rule: Any, lr: Any) -> Foreign | None:
    kind, options = rule if isinstance(rule, tuple) and len(rule) == 2 else (rule, {})
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        return None
    if not isinstance(options, Mapping):
        raise ConfigurationError(
            f"auxiliary: {kind.__name__} with {options!r}; give (class, dict of its arguments)"
        )
    try:
        return Foreign(kind, options, lr)
    except Exception as error:
        raise ConfigurationError(
            f"auxiliary: {kind.__name__}, tried with one parameter of shape (1,): {error}"
        ) from error
