# SPDX-License-Identifier: Apache-2.0
"""Any torch optimizer as the auxiliary rule of `FMuon`, over the groups and the state of FMuon."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fmuon.auxiliary import Rule
from fmuon.base import ConfigurationError

# Keys of a group that mean nothing to another optimizer, or something else.
_OWN_KEYS = frozenset({"params", "param_names", "lr", "lr_scale", "rules", "name"})


class Share(NamedTuple):
    """The parameters of one group that are the other optimizer's, and their rates."""

    group: dict[str, Any]
    params: list[Tensor]
    lr: float | Tensor
    weight_decay: float | Tensor


class Foreign:
    """A torch optimizer that owns nothing: each step it is lent parameters, groups and state.

    Args:
        kind: its class.
        options: keyword arguments of the class.
    """

    def __init__(self, kind: type[Optimizer], options: Mapping[str, Any]) -> None:
        self.kind, self.options = kind, dict(options)
        # A parameter that is never trained: the class checks its options and fills in defaults.
        make: Any = kind
        self._optimizer = make([nn.Parameter(torch.zeros(1))], **({"lr": 1e-3} | self.options))
        group = self._optimizer.param_groups[0]
        self._wants_tensor = isinstance(group["lr"], Tensor)
        self.defaults = {key: group[key] for key in group if key not in _OWN_KEYS}

    def __reduce__(self) -> tuple[Any, ...]:
        return Foreign, (self.kind, self.options)

    def rule(self) -> Rule:
        """A rule without slots that stands for it in the configuration."""
        lr: Any = self.options.get("lr")
        decay: Any = self.options.get("weight_decay")
        return Rule(
            self.kind.__name__, (), _never, (0.0, 0.0), 0.0, lr_scale=1.0, weight_decay=decay, lr=lr
        )

    def group_values(self) -> dict[str, Any]:
        """What a group of its own holds; a weight decay that wasn't given is FMuon's."""
        inherited = set() if "weight_decay" in self.options else {"weight_decay"}
        return {key: value for key, value in self.defaults.items() if key not in inherited}

    def step(self, shares: Sequence[Share], state: Any) -> None:
        """One step of the parameters in `shares`; what it keeps goes into `state` and groups."""
        lent = [self._lent(share) for share in shares]
        self._optimizer.param_groups, self._optimizer.state = lent, state
        self._optimizer.step()
        for share, group in zip(shares, lent, strict=True):
            # Some keep a count there.
            new = {key: group[key] for key in group if key not in _OWN_KEYS | {"weight_decay"}}
            share.group.update(new)

    def _lent(self, share: Share) -> dict[str, Any]:
        lr = share.lr
        if self._wants_tensor and not isinstance(lr, Tensor):
            lr = torch.tensor(lr)
        own = {key: value for key, value in share.group.items() if key not in _OWN_KEYS}
        return own | {"params": share.params, "lr": lr, "weight_decay": share.weight_decay}


def _never(*_: Any) -> Any:
    raise AssertionError("the leaves of a foreign optimizer don't reach the core")


def adopted(auxiliary: Any) -> tuple[Any, dict[str | None, Foreign]]:
    """The rules of an option `auxiliary`, and by their names the optimizers some stand for.

    An optimizer is given as its class, or as (class, keyword arguments).
    """
    if isinstance(auxiliary, Mapping):
        entries: Mapping[str, Any] = auxiliary
        found: dict[str | None, Foreign] = {
            name: foreign for name, rule in entries.items() if (foreign := _adopted(rule))
        }
        rules = {name: found[name].rule() if name in found else entries[name] for name in entries}
        return rules, found
    foreign = _adopted(auxiliary)
    return (auxiliary, {}) if foreign is None else (foreign.rule(), {None: foreign})


def _adopted(rule: Any) -> Foreign | None:
    kind, options = rule if isinstance(rule, tuple) and len(rule) == 2 else (rule, {})
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        return None
    if not isinstance(options, Mapping):
        raise ConfigurationError(
            f"auxiliary: {kind.__name__} with {options!r}; give (class, dict of its arguments)"
        )
    try:
        return Foreign(kind, options)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"auxiliary: {kind.__name__}: {error}") from error
