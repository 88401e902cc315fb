# SPDX-License-Identifier: Apache-2.0
"""What is asked of gradients before they reach an update: their global norm, are they finite."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from fmuon.base import ConfigurationError, LeafError, Tree
from fmuon.tree import flatten

_Options = ParamSpec("_Options")
_Made = TypeVar("_Made")


def global_norm(tree: Tree) -> Tensor:
    """sqrt(sum of squares) over all elements of all leaves, 0-d, float32 or wider; None is skipped.

    Raises:
        LeafError: no leaf is a tensor.
    """
    leaves = [leaf for leaf in flatten(tree, "grads")[0].values() if leaf is not None]
    if not leaves:
        raise LeafError("grads: no leaf is a tensor, so there is no norm; pass gradients")
    dtype = torch.float64 if any(leaf.dtype == torch.float64 for leaf in leaves) else torch.float32
    norms = [_whole(torch.linalg.vector_norm(leaf, dtype=dtype)) for leaf in leaves]
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))


def _whole(norm: Any) -> Tensor:
    # That of a sharded leaf is one too, and can't be combined with others.
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def clip_by_global_norm(tree: Tree, max_norm: float | Tensor) -> tuple[Tree, Tensor]:
    """Scale all leaves so that their global norm is at most `max_norm`; returns them and the norm.

    Leaves are multiplied by min(1, max_norm / norm) [Pascanu et al. 2013, arXiv 1211.5063,
    algorithm 1]; smaller gradients come back with the same bits. Muon's step does not depend on the
    scale of a gradient, so clipping only changes how much a gradient weighs in the momentum.

    There is no clipping of updates. Muon's have a fixed norm, lr * scale * |O|: a bound below that
    would replace the learning rate, and by a factor that depends on the width of the layer.

    Raises:
        ConfigurationError: `max_norm` is a number that isn't positive.
        LeafError: no leaf is a tensor.
    """
    if isinstance(max_norm, int | float) and not max_norm > 0:
        raise ConfigurationError(f"max_norm={max_norm}: must be positive")
    norm = global_norm(tree)
    factor = (max_norm / norm).clamp(max=1.0)
    leaves, structure = flatten(tree, "grads")
    clipped = {
        path: None if leaf is None else leaf * factor.to(device=leaf.device, dtype=leaf.dtype)
        for path, leaf in leaves.items()
    }
    return structure.rebuild(clipped), norm


# As trainers and other optimizers spell it.
_CLIPPING = ("clip", "clip_norm", "clip_grad_norm", "grad_clip", "max_grad_norm", "max_norm")


def refuses_clipping(make: Callable[_Options, _Made]) -> Callable[_Options, _Made]:
    """Decorate what takes options: it says why there is none that clips."""

    @functools.wraps(make)
    def checked(*arguments: _Options.args, **options: _Options.kwargs) -> _Made:
        if asked := [name for name in _CLIPPING if name in options]:
            raise ConfigurationError(
                f"{asked[0]} is no option: the size of an orthogonalised update is that of lr and "
                f"shape, whatever the gradient, and a limit to its norm would take its place; clip "
                f"gradients before the update, with fmuon.clip_by_global_norm or "
                f"torch.nn.utils.clip_grad_norm_"
            )
        return make(*arguments, **options)

    return checked


def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Whether no element of any tensor is infinite or NaN; 0-d bool, decided on the device."""
    # The largest entry is one reduction; the entries of isfinite would be written and read again.
    peaks = [torch.maximum(t.amax(), t.amin().neg()).isfinite() for t in tensors if t.numel()]
    if not peaks:
        return torch.ones((), dtype=torch.bool)
    return torch.stack([peak.to(peaks[0].device) for peak in peaks]).all()
