# SPDX-License-Identifier: Apache-2.0
"""Leaves -> labels, each with its reason and its matrix view. Reads names, types and shapes only.

A label is a `Matrix`, "muon" (the default view of a 2-D leaf), "auxiliary" or the name of a rule,
"frozen", or "error" (strict configurations end with it).
"""

import re
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from fmuon.base import ConfigurationError, LeafError, Matrix, near_misses
from fmuon.tree import unwrapped

Label: TypeAlias = Matrix | str
Labels: TypeAlias = tuple[tuple[str, Label], ...] | Callable[[str, Tensor], Label | None] | None
"""First match wins; a key is a path, or "re:" and a pattern that matches a whole path."""


class Leaf(NamedTuple):
    """What planning knows of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Assignment(NamedTuple):
    """What a leaf gets and why; `explicit` where the user said so."""

    label: Label
    reason: str
    explicit: bool = False


# One whole component of a path says what the leaf is: "multihead_attn" is no head.
_EMBEDDING = re.compile(r"(.+_)?(un)?embed(s|der|dings?)?(_.+)?|(.+_)?emb|w[tp]e", re.IGNORECASE)
_HEAD = re.compile(r"(.+_)?head|classifier", re.IGNORECASE)


def by_name_and_shape(path: str, shape: tuple[int, ...]) -> Assignment:
    """The default rule for a leaf of which only the path and the shape are known."""
    if len(shape) < 2 or sum(side != 1 for side in shape) < 2:
        return Assignment("auxiliary", "a vector" if len(shape) < 2 else "a vector in disguise")
    components = path.split(".")
    for pattern, what in ((_EMBEDDING, "an embedding"), (_HEAD, "an output head")):
        for component in components:
            if pattern.fullmatch(component):
                return Assignment("auxiliary", f"{what}, by the name {component!r}")
    if components[0] == "output" and len(components) <= 2:
        return Assignment("auxiliary", "an output head, by the name 'output'")
    if len(shape) > 2:
        return Assignment("auxiliary", _UNDECLARED)
    return Assignment(Matrix(), "a matrix")


def assign(
    leaves: Mapping[str, Leaf], labels: Labels, routed: Mapping[str, Assignment] | None = None
) -> dict[str, Assignment]:
    """Every leaf's assignment; raises `LeafError` for keys and labels that fit no leaf.

    A leaf that `labels` leave out gets what the module's routing says, where there is one, or what
    its path and shape say.
    """
    if isinstance(labels, tuple):
        check_keys(labels, leaves)
    assignments = {
        path: _assign(path, leaf, labels, (routed or {}).get(path)) for path, leaf in leaves.items()
    }
    _warn_of_undeclared(assignments, {path: leaf.shape for path, leaf in leaves.items()})
    return assignments


_UNDECLARED = "3 or more axes without a declared view"


def _warn_of_undeclared(
    assignments: Mapping[str, Assignment], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    undeclared = [
        f"{path!r} {shapes[path]}"
        for path, assignment in assignments.items()
        if assignment.reason.endswith(_UNDECLARED)
    ]
    if undeclared:
        warnings.warn(
            f"{', '.join(undeclared)}: trained by the auxiliary rule, since 3 and more axes can "
            f"mean a stack, a convolution or neither; declare a view in labels=, such as "
            f"fmuon.Matrix(1, 2) for a stack or fmuon.Matrix(0, (1, 2, 3)) for a convolution, or "
            f"label them 'auxiliary'",
            stacklevel=_depth_of_caller(),
        )


def _depth_of_caller() -> int:
    """The stacklevel at which a warning points at the code that called fmuon."""
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("fmuon."):
        depth, frame = depth + 1, frame.f_back
    return depth


def _assign(path: str, leaf: Leaf, labels: Labels, routed: Assignment | None) -> Assignment:
    label, source = declared(path, leaf, labels)
    if label is None:
        return by_name_and_shape(path, leaf.shape) if routed is None else routed
    if label == "error":
        raise LeafError(
            f"{path!r} (shape {leaf.shape}): {source} says 'error'; add a label for it before that"
        )
    return Assignment(as_view(path, leaf.shape, label), source, explicit=True)


def declared(path: str, leaf: Leaf, labels: Labels) -> tuple[Label | None, str]:
    """The label that the user's `labels` give a leaf, and which entry did; None where none does."""
    if labels is None:
        return None, ""
    if callable(labels):
        # The callable sees shapes only: it must not depend on values that a trace can't know.
        label = labels(path, torch.empty(leaf.shape, dtype=leaf.dtype, device="meta"))
        return label, "labels callable"
    for key, label in labels:
        if _matches(key, path):
            return label, f"labels[{key!r}]"
    return None, ""


def as_view(path: str, shape: tuple[int, ...], label: Label) -> Label:
    """Replace "muon" by the default matrix view, which only a 2-D leaf has."""
    if label != "muon":
        return label
    if len(shape) == 2:
        return Matrix()
    raise LeafError(
        f"{path!r} (shape {shape}) is labelled 'muon' but is not a matrix; label it with a view "
        f"such as fmuon.Matrix(0, (1, 2, 3)), or 'auxiliary'"
    )


def _matches(key: str, path: str) -> bool:
    if key.startswith("re:"):
        return re.fullmatch(key[3:], unwrapped(path)) is not None
    return key == path or unwrapped(key) == unwrapped(path)


def check_key(key: Any) -> None:
    """Refuse a key of `labels` that is no path and no valid pattern."""
    if not isinstance(key, str):
        raise ConfigurationError(f"labels: the key {key!r} is no string; give a path, or 're:...'")
    if key.startswith("re:"):
        try:
            re.compile(key[3:])
        except re.error as error:
            raise ConfigurationError(f"labels key {key!r}: no valid pattern, {error}") from None


def check_keys(labels: Sequence[tuple[str, Label]], paths: Collection[str]) -> None:
    """Refuse keys of `labels` that match no leaf."""
    for key, label in labels:
        # A frozen leaf may be left out of the params; an error row hopes to match nothing.
        if label in ("error", "frozen") or any(_matches(key, path) for path in paths):
            continue
        raise LeafError(
            f"labels key {key!r} matches no leaf{near_misses(key.removeprefix('re:'), paths)}"
        )


# ---- modules -------------------------------------------------------------------------------------


class _Role(NamedTuple):
    """One place where a module holds a parameter."""

    path: str
    module: nn.Module
    name: str
    parameter: Tensor


_NORMS = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.LocalResponseNorm,
    nn.modules.batchnorm._NormBase,
)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def _embedding(role: _Role) -> Assignment | None:
    if isinstance(role.module, nn.Embedding | nn.EmbeddingBag):
        return Assignment("auxiliary", "an embedding")
    return None


def _norm(role: _Role) -> Assignment | None:
    return Assignment("auxiliary", "a norm") if isinstance(role.module, _NORMS) else None


def _head(role: _Role) -> Assignment | None:
    own_name = unwrapped(role.path).split(".")[-2:-1]
    top_level = unwrapped(role.path) == f"output.{role.name}"
    if isinstance(role.module, nn.Linear) and role.parameter.ndim == 2:
        if own_name and (_HEAD.fullmatch(own_name[0]) or top_level):
            return Assignment("auxiliary", f"an output head, by the name {own_name[0]!r}")
        return None
    return None


def _vector(role: _Role) -> Assignment | None:
    shape = tuple(role.parameter.shape)
    if len(shape) < 2:
        return Assignment("auxiliary", "a bias" if "bias" in role.name else "a vector")
    if sum(side != 1 for side in shape) < 2:
        return Assignment("auxiliary", "a vector in disguise")
    return None


def _attention(role: _Role) -> Assignment | None:
    if isinstance(role.module, nn.MultiheadAttention) and role.name == "in_proj_weight":
        size = role.parameter.shape[0] // 3
        return Assignment(Matrix(blocks=(size,) * 3), "query, key and value of an attention")
    return None


def _convolution(role: _Role) -> Assignment | None:
    module, shape = role.module, role.parameter.shape
    if role.name != "weight" or not isinstance(module, _CONVOLUTIONS + _TRANSPOSED):
        return None
    if module.groups > 1 and (shape[1] == 1 or shape[0] == module.groups):
        return Assignment("auxiliary", "a depthwise convolution")
    blocks = (shape[0] // module.groups,) * module.groups if module.groups > 1 else None
    kernel = tuple(range(2, len(shape)))
    if isinstance(module, _TRANSPOSED):
        return Assignment(
            Matrix(1, (0, *kernel), blocks_in=_with_kernel(blocks, shape)),
            "a transposed convolution",
        )
    return Assignment(Matrix(0, (1, *kernel), blocks=blocks), "a convolution")


def _with_kernel(blocks: tuple[int, ...] | None, shape: Sequence[int]) -> tuple[int, ...] | None:
    area = 1
    for side in shape[2:]:
        area *= side
    return None if blocks is None else tuple(block * area for block in blocks)


def _input_major(role: _Role) -> Assignment | None:
    if type(role.module).__name__ == "Conv1D" and role.name == "weight":
        return Assignment(Matrix(1, 0), "a Conv1D kernel, stored (in, out)")
    return None


def _linear(role: _Role) -> Assignment | None:
    if isinstance(role.module, nn.Linear) and role.name == "weight":
        return Assignment(Matrix(), "a linear layer")
    return None


def _other(role: _Role) -> Assignment | None:
    return by_name_and_shape(unwrapped(role.path), tuple(role.parameter.shape))


# First match wins.
ROUTES: tuple[Callable[[_Role], Assignment | None], ...] = (
    _embedding,
    _norm,
    _head,
    _vector,
    _attention,
    _convolution,
    _input_major,
    _linear,
    _other,
)


def route(module: nn.Module, *, frozen: bool = True) -> dict[str, Assignment]:
    """Every parameter's assignment by the types of the layers that hold it, keyed by path.

    With `frozen=False`, parameters that don't require a gradient get what they would get if they
    did.

    A parameter that several layers share (tied weights) gets one: the auxiliary rule if any of
    them asks for it, whichever name comes first.
    """
    outer, module = unwrapped_module(module)
    roles: dict[int, list[_Role]] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            path = f"{prefix}.{name}" if prefix else name
            roles.setdefault(id(parameter), []).append(_Role(path, owner, name, parameter))
    parameters = dict(module.named_parameters())
    assignments = {path: _route(path, roles[id(p)], frozen) for path, p in parameters.items()}
    return {outer + path: assignment for path, assignment in assignments.items()}


def unwrapped_module(module: nn.Module) -> tuple[str, nn.Module]:
    """The module inside torch.compile, DDP and DataParallel, and the prefix they put before it."""
    prefix = ""
    while True:
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            prefix, module = f"{prefix}module.", module.module
        elif isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):
            prefix, module = f"{prefix}_orig_mod.", inner
        else:
            return prefix, module


def _route(path: str, roles: list[_Role], frozen: bool) -> Assignment:
    if frozen and not roles[0].parameter.requires_grad:
        return Assignment("frozen", "requires_grad is False")
    found = [(role, next(a for r in ROUTES if (a := r(role)) is not None)) for role in roles]
    for role, assignment in found:
        if isinstance(assignment.label, Matrix):
            view = assignment.label.view(path, tuple(role.parameter.shape))
            if 1 in (view.fan_out, view.fan_in):
                return Assignment("auxiliary", f"{assignment.reason} with a side of 1")
        if assignment.label == "auxiliary":
            tied = f"tied to {role.path!r}: " if role.path != path else ""
            return Assignment("auxiliary", tied + assignment.reason)
    return found[0][1]


def label(module: nn.Module) -> dict[str, Any]:
    """Path -> label for every parameter of a module, by the type of the layer that holds it.

    Linear layers and convolutions (as a fan_out x fan_in matrix) get a `Matrix`; embeddings, output
    heads (tied to an embedding, or named as a head), norms, biases, vectors and depthwise
    convolutions get "auxiliary"; parameters that don't require a gradient get "frozen". Edit the
    dict before passing it to `fmuon.muon(labels=...)` to decide otherwise.
    """
    routed = route(module)
    shapes = {path: tuple(parameter.shape) for path, parameter in module.named_parameters()}
    _warn_of_undeclared(routed, shapes)
    return {path: assignment.label for path, assignment in routed.items()}
