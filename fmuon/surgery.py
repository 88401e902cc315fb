# SPDX-License-Identifier: Apache-2.0
"""Which leaf of an old state a leaf of a changed model goes on from."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeAlias

from torch import Tensor

from fmuon.base import StateError

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


def origins(
    old: Shapes,
    new: Shapes,
    *,
    rename: Mapping[str, str] | None = None,
    add: Collection[str] = (),
    drop: Collection[str] = (),
    resize: Collection[str] = (),
) -> dict[str, str | None]:
    """Path of a new leaf -> path of the old leaf it continues, None for one that starts afresh.

    Every difference has to be declared: a silent guess would train on with the wrong momentum.

    Args:
        old: shapes by path in the state.
        new: shapes by path in the model.
        rename: old path -> new path.
        add: new paths that start afresh.
        drop: old paths that end.
        resize: new paths whose number of rows (the first axis) changed.

    Raises:
        StateError: lists all that is undeclared or declared in vain.
    """
    rename = rename or {}
    staying = [path for path in old if path not in drop]
    kept = {rename.get(path, path): path for path in staying}
    targets = [rename.get(path, path) for path in staying]
    found = {
        "in the model but not in the state (declare in add or rename)": sorted(
            path for path in new if path not in kept and path not in add
        ),
        "in the state but not in the model (declare in drop or rename)": sorted(
            source for path, source in kept.items() if path not in new
        ),
        "added, but the state has them": sorted(path for path in add if path in kept),
        "added, but not in the model": sorted(path for path in add if path not in new),
        "dropped or renamed, but not in the state": sorted({*drop, *rename} - set(old)),
        "claimed by two leaves of the state": sorted(
            {path for path in targets if targets.count(path) > 1}
        ),
        "resized, but not kept": sorted(path for path in resize if path not in kept),
        "of another shape (declare in resize, if only the rows differ)": sorted(
            f"{path} {old[source]} -> {new[path]}"
            for path, source in kept.items()
            if path in new and not _fits(old[source], new[path], path in resize)
        ),
    }
    if problems := [f"{what}: {names}" for what, names in found.items() if names]:
        raise StateError(f"state and model don't match; {'; '.join(problems)}")
    return {path: kept.get(path) for path in new}


def _fits(old: tuple[int, ...], new: tuple[int, ...], may_resize: bool) -> bool:
    return old == new or (may_resize and len(old) > 0 and old[1:] == new[1:])


def resized(path: str, old: Tensor, fresh: Tensor) -> Tensor:
    """`old` in the shape of `fresh`: rows that both have are the old ones, further ones fresh."""
    if old.shape == fresh.shape:
        return old
    if old.shape[1:] != fresh.shape[1:]:
        raise StateError(
            f"{path!r}: what is kept of it has the shape {tuple(old.shape)} and would have to be "
            f"{tuple(fresh.shape)}, which is no change of rows; drop the leaf and add it"
        )
    rows = min(len(old), len(fresh))
    result = fresh.clone()
    result[:rows] = old[:rows]
    return result


def entries(
    state: Mapping[str, Any], store: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], str, Tensor]]:
    """(keys of the dict that holds it, path, tensor) of all that a leaf goes on from."""
    for key, value in state.items():
        if key == "metrics" and not store:
            continue
        if isinstance(value, Mapping):
            yield from entries(value, (*store, key))
        else:
            yield store, key, value
