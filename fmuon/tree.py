# SPDX-License-Identifier: Apache-2.0
"""Parameter pytree <-> flat leaves with path names (the only user of torch.utils._pytree)."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from fmuon.base import LeafError, Tree

# Put in front of names by torch.compile, activation checkpointing, and DDP or DataParallel.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


@dataclass(frozen=True)
class Structure:
    """What `rebuild` needs to give leaves back the shape of the tree they came from."""

    paths: tuple[str, ...]
    spec: Any

    def rebuild(self, leaves: Mapping[str, Any]) -> Tree:
        """The tree with leaf `leaves[path]` (None where absent) at every path."""
        ordered = [leaves.get(path) for path in self.paths]
        if self.spec is None:
            return dict(zip(self.paths, ordered, strict=True))
        return pytree.tree_unflatten(ordered, self.spec)


def flatten(tree: Tree, what: str = "params") -> tuple[dict[str, Tensor | None], Structure]:
    """Leaves by path, path components joined by "."; None is a leaf.

    Raises `LeafError` for a leaf that is no tensor and for two leaves with one path.
    """
    # A flat dict of tensors is the common case; the general walk is ten times slower.
    if type(tree) is dict and all(
        type(key) is str and (value is None or isinstance(value, Tensor))
        for key, value in tree.items()
    ):
        return dict(tree), Structure(tuple(tree), None)
    entries, spec = pytree.tree_flatten_with_path(tree)
    leaves: dict[str, Tensor | None] = {}
    for keys, leaf in entries:
        path = ".".join(_component(key) for key in keys)
        if path in leaves:
            raise LeafError(f"{what}: two leaves have the path {path!r}; rename one of them")
        if leaf is not None and not isinstance(leaf, Tensor):
            raise LeafError(
                f"{what}: leaf {path!r} is a {type(leaf).__name__}; a leaf is a tensor, "
                f"or None for one that doesn't move"
            )
        leaves[path] = leaf
    return leaves, Structure(tuple(leaves), spec)


def _component(key: Any) -> str:
    for field in ("key", "idx", "name"):
        if hasattr(key, field):
            return str(getattr(key, field))
    return str(key)


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """The tree with a function applied to its tensors."""
    return pytree.tree_map_only(Tensor, function, tree)


def unwrapped(path: str, wrappers: Iterable[str] = _WRAPPERS) -> str:
    """The path without the components that wrappers of modules add."""
    return ".".join(part for part in path.split(".") if part not in wrappers)
