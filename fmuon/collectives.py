# SPDX-License-Identifier: Apache-2.0
"""Sharded leaves, and how they get to their owners and back; the only user of torch.distributed.

A DTensor becomes its local tensor and a `Sharding` on the way in, and a DTensor again on the way
out; between the two everything is plain tensors. The collectives are the functional ones, each
issued in one call and waited for in another, so that arithmetic fits between the two, in eager mode
and inside a graph alike.
"""

import hashlib
import itertools
import operator
import weakref
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from fmuon.base import ConfigurationError, LeafError, StateError, constant_in_graphs
from fmuon.sharding import Block, Exchange, Mesh, Sharding, Split, elements

# What planning knows of a DeviceMesh, and the process group of some ranks: a graph can't ask.
_MESHES: dict[Any, Mesh] = {}
_GROUPS: dict[tuple[int, ...], str] = {}
SHARDINGS: list[Sharding] = []
_NUMBERS: dict[tuple[Any, ...], int] = {}
_WORLD: list[Any] = []

_UNPREPARED = (
    "a compiled update of sharded leaves needs process groups that are made before it is traced; "
    "call fmuon.distributed.prepare(opt, params) on all ranks (opt.init does), also after loading "
    "a checkpoint"
)


# ---- DTensor <-> local tensor --------------------------------------------------------------------


def is_sharded(leaf: Any) -> bool:
    """Whether a leaf is a DTensor."""
    return hasattr(leaf, "device_mesh")


def mesh_of(leaf: Any) -> Any:
    """The DeviceMesh of a DTensor; None for a plain tensor."""
    return getattr(leaf, "device_mesh", None)


def is_initialized() -> bool:
    """Whether this process is one of several."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def local(leaf: Any) -> Any:
    """The part of a leaf that this rank holds."""
    return leaf.to_local() if is_sharded(leaf) else leaf


def like(tensor: Tensor, leaf: Any) -> Any:
    """A local tensor as a part of what `leaf` is."""
    if not is_sharded(leaf):
        return tensor
    return _as_part(tensor, leaf, leaf.placements, leaf.shape, leaf.stride())


def beside(tensor: Tensor, leaf: Any, shape: Sequence[int]) -> Any:
    """A local tensor as a part of a contiguous tensor of a shape, cut as `leaf` is.

    It is the same on all parts of an axis whose length is 1 there and more in the leaf.
    """
    if not is_sharded(leaf):
        return tensor
    from torch.distributed.tensor import Replicate

    averaged = {i for i, length in enumerate(leaf.shape) if shape[i] == 1 != length}
    placements = [
        Replicate() if hasattr(p, "dim") and p.dim % leaf.ndim in averaged else p
        for p in leaf.placements
    ]
    size = torch.Size(shape)
    return _as_part(tensor, leaf, placements, size, torch.empty(size, device="meta").stride())


def _as_part(
    tensor: Tensor,
    leaf: Any,
    placements: Sequence[Any],
    shape: torch.Size,
    stride: tuple[int, ...],
) -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        tensor, leaf.device_mesh, placements, run_check=False, shape=shape, stride=stride
    )


def parts_of(leaf: Any) -> dict[int, int]:
    """Into how many parts the axes of a leaf are cut, for those that are."""
    parts: dict[int, int] = {}
    if is_sharded(leaf):
        for size, placement in zip(leaf.device_mesh.shape, leaf.placements, strict=True):
            if hasattr(placement, "dim"):
                axis = placement.dim % leaf.ndim
                parts[axis] = parts.get(axis, 1) * size
    return parts


def _forget_ended() -> None:
    """Forget the groups of a world that was destroyed, whose names may mean others by now."""
    world = torch.distributed.group.WORLD if is_initialized() else None
    if not _WORLD or _WORLD[0]() is not world:
        _WORLD[:] = [(lambda: None) if world is None else weakref.ref(world)]
        for known in (_MESHES, _GROUPS, _NUMBERS):
            known.clear()


def register(mesh: Any) -> Mesh:
    """What planning needs to know of a DeviceMesh or process group; not inside a trace."""
    _forget_ended()
    if type(mesh).__hash__ is not None and mesh in _MESHES:  # pyright: ignore
        return _MESHES[mesh]
    import torch.distributed as dist

    if isinstance(mesh, dist.ProcessGroup):
        ranks = tuple(dist.get_process_group_ranks(mesh))
        found = Mesh((len(ranks),), ranks, (ranks.index(dist.get_rank()),))
        _keep_group(mesh)
    elif hasattr(mesh, "get_coordinate"):
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise ConfigurationError(f"{mesh}: rank {dist.get_rank()} is not part of it")
        ranks = tuple(mesh.mesh.flatten().tolist())
        found = Mesh(tuple(mesh.mesh.shape), ranks, tuple(coordinate))
        for dim in range(len(found.shape)):
            _keep_group(mesh.get_group(dim))
    else:
        raise ConfigurationError(f"mesh={mesh!r}: give a DeviceMesh or a process group")
    _MESHES[mesh] = found
    return found


def register_meshes(*leaves: Iterable[Any]) -> None:
    """Those of some leaves; not inside a trace."""
    for mesh in {leaf.device_mesh for group in leaves for leaf in group if is_sharded(leaf)}:
        register(mesh)


@constant_in_graphs
def sharding_number(path: str, mesh: Any, placements: Sequence[Any], shape: Sequence[int]) -> int:
    """The sharding of a DTensor as a number, all that a trace can pass on; see `SHARDINGS`.

    Raises `LeafError` for a placement that is no sharding.
    """
    # Inside a trace dynamo wraps the mesh.
    key = getattr(mesh, "real_obj", mesh), tuple(placements), tuple(shape)
    if key not in _NUMBERS:
        SHARDINGS.append(_sharding_of(path, *key))
        _NUMBERS[key] = len(SHARDINGS) - 1
    return _NUMBERS[key]


def block_of(path: str, leaf: Any) -> Block:
    """The part of a leaf that this rank holds."""
    shape = tuple(map(operator.index, leaf.shape))
    if not is_sharded(leaf):
        return tuple((0, length) for length in shape)
    return _own_block(sharding_number(path, leaf.device_mesh, leaf.placements, shape))


@constant_in_graphs
def _own_block(number: int) -> Block:
    return SHARDINGS[number].own


def _sharding_of(
    path: str, mesh: Any, placements: tuple[Any, ...], shape: tuple[int, ...]
) -> Sharding:
    if mesh not in _MESHES:
        raise ConfigurationError(f"{path!r}: {_UNPREPARED}")
    splits: list[Split | None] = []
    for placement in placements:
        if placement.is_partial():
            raise LeafError(
                f"{path!r}: placement {placement} of {placements}: a sum that is still to "
                f"be made; redistribute it to Shard or Replicate before the update"
            )
        if placement.is_replicate():
            splits.append(None)
        elif hasattr(placement, "dim"):
            splits.append(Split(placement.dim % len(shape), hasattr(placement, "split_factor")))
        else:
            raise LeafError(
                f"{path!r}: placement {placement} is not known; Shard, Replicate and what "
                f"fully_shard makes of a sharded tensor are"
            )
    return Sharding(shape, _MESHES[mesh], tuple(splits))


# ---- groups --------------------------------------------------------------------------------------


def _keep_group(group: Any) -> None:
    import torch.distributed as dist

    ranks = tuple(dist.get_process_group_ranks(group))
    # The members of an exchange are in the order of their ranks.
    if ranks == tuple(sorted(ranks)):
        _GROUPS.setdefault(ranks, group.group_name)


def make_group(ranks: Sequence[int]) -> None:
    """Have a process group of some ranks, all of which call this; no-op where there is one.

    Ranks that share any group make all of theirs in one order, and one at a time each: torch names
    such a group after how many its ranks have made already.
    """
    import torch.distributed as dist

    ranks = tuple(sorted(ranks))
    if len(ranks) == 1 or ranks in _GROUPS:
        return
    if len(ranks) == dist.get_world_size():
        group: Any = dist.group.WORLD
    else:
        group = dist.new_group(list(ranks), use_local_synchronization=True)
    _GROUPS[ranks] = group.group_name


@constant_in_graphs
def _group(ranks: tuple[int, ...]) -> str:
    if ranks not in _GROUPS:
        raise ConfigurationError(_UNPREPARED)
    return _GROUPS[ranks]


def anywhere(flags: Tensor, ranks: tuple[int, ...], device: torch.device) -> Tensor:
    """Which flags are set on any of some ranks; `device` is what their group works with."""
    return _reduced(flags.to(device, torch.float32), "max", ranks) > 0


def everywhere(flags: Tensor, ranks: tuple[int, ...], device: torch.device) -> Tensor:
    """Which flags are set on all of some ranks."""
    return _reduced(flags.to(device, torch.float32), "min", ranks) > 0


def _reduced(tensor: Tensor, op: str, ranks: tuple[int, ...]) -> Tensor:
    if len(ranks) == 1:
        return tensor
    result = torch.ops._c10d_functional.all_reduce(tensor, op, _group(ranks))
    return torch.ops._c10d_functional.wait_tensor(result)


def check_agreement(lines: Sequence[str], ranks: tuple[int, ...]) -> None:
    """Raise on all of some ranks if they don't say the same; not inside a trace."""
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    if len(ranks) == 1 or len(set(_gathered(digest, ranks))) == 1:
        return
    # All ranks have seen the difference, so all come here.
    everyone = _gathered(list(lines), ranks)
    for rank, theirs in zip(ranks, everyone, strict=True):
        differing = [
            f"rank {ranks[0]} has {mine!r}, rank {rank} has {other!r}"
            for mine, other in itertools.zip_longest(everyone[0], theirs)
            if mine != other
        ]
        if differing:
            raise StateError(
                f"the ranks {list(ranks)} disagree on what they share: {differing[0]} (and "
                f"{len(differing) - 1} more); build model and optimizer alike on all of them"
            )


def _gathered(value: Any, ranks: tuple[int, ...]) -> list[Any]:
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _resolve_process_group

    found: list[Any] = [None] * len(ranks)
    name: Any = _group(ranks)
    dist.all_gather_object(found, value, group=_resolve_process_group(name))
    return found


# ---- the exchange --------------------------------------------------------------------------------


def to_owners(exchange: Exchange, leaves: Sequence[Tensor]) -> Tensor | None:
    """Send the local parts of a bucket's leaves to their owners; None where all are there."""
    domain = exchange.domain
    if len(domain.parts) == 1:
        return None
    buffer = _flat([leaves[i] for group in exchange.sent for i in group], leaves[0])
    sizes = [sum(prod(exchange.shapes[i]) for i in group) for group in exchange.sent]
    return _exchanged(buffer, sizes, _received(exchange), domain.parts)


def arrived(exchange: Exchange, pending: Tensor | None, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Wait; the whole leaves of this rank."""
    if pending is None:
        return [leaves[i] for i in exchange.owned]
    buffer = torch.ops._c10d_functional.wait_tensor(pending)
    members = range(len(exchange.domain.parts))
    sizes = [elements(parts[member]) for member in members for parts in exchange.parts]
    pieces = iter(buffer.split(sizes))
    wholes: list[list[tuple[Block, Tensor]]] = [[] for _ in exchange.owned]
    for member in members:
        for found, parts in zip(wholes, exchange.parts, strict=True):
            block = parts[member]
            shape = [stop - start for start, stop in block]
            found.append((block, next(pieces).view(shape)))
    return [_joined(found) for found in wholes]


def to_parts(exchange: Exchange, wholes: Sequence[Tensor], leaf: Tensor) -> Tensor:
    """Send what the owner made of its leaves to those who hold their parts."""
    domain = exchange.domain
    if len(domain.parts) == 1:
        return _copied(exchange, list(wholes), leaf)
    pieces = [
        whole[tuple(slice(*interval) for interval in parts[member])]
        for member in range(len(domain.parts))
        for whole, parts in zip(wholes, exchange.parts, strict=True)
    ]
    sizes = [sum(prod(exchange.shapes[i]) for i in group) for group in exchange.sent]
    return _exchanged(_flat(pieces, leaf), _received(exchange), sizes, domain.parts)


def has_copies_to_make(exchange: Exchange) -> bool:
    """Whether parts that have come back are still to be copied; where all is whole they aren't."""
    return len(exchange.domain.parts) > 1 and len(exchange.domain.copies) > 1


def to_replicas(exchange: Exchange, pending: Tensor, leaf: Tensor) -> Tensor:
    """Wait; give the replicas the parts of what was orthogonalised in this one."""
    buffer = torch.ops._c10d_functional.wait_tensor(pending)
    order = [i for group in exchange.sent for i in group]
    sizes = [prod(exchange.shapes[i]) for i in order]
    own = dict(zip(order, buffer.split(sizes), strict=True))
    return _copied(exchange, [own[i] for i in exchange.copied[exchange.domain.copy]], leaf)


def returned(exchange: Exchange, pending: Tensor) -> list[Tensor]:
    """Wait; the local parts of all leaves of the bucket."""
    buffer = torch.ops._c10d_functional.wait_tensor(pending)
    # The last message was that of the replicas, where there are some.
    last = exchange.copied if len(exchange.domain.copies) > 1 else exchange.sent
    return _unflat(buffer, [i for group in last for i in group], exchange.shapes)


def _copied(exchange: Exchange, mine: list[Tensor], leaf: Tensor) -> Tensor:
    """Give the replicas the local parts of the leaves that are owned in this one."""
    domain = exchange.domain
    sizes = [sum(prod(exchange.shapes[i]) for i in group) for group in exchange.copied]
    buffer = _flat(mine, leaf)
    if len(set(sizes)) == 1:
        return torch.ops._c10d_functional.all_gather_into_tensor(
            buffer, len(sizes), _group(tuple(sorted(domain.copies)))
        )
    # all_gather knows equal sizes only, and padding to the largest would send the padding.
    return _exchanged(
        buffer.repeat(len(sizes)), [sizes[domain.copy]] * len(sizes), sizes, domain.copies
    )


def _received(exchange: Exchange) -> list[int]:
    """How many elements of this rank's leaves come from every member of the shard group."""
    members = range(len(exchange.domain.parts))
    return [sum(elements(parts[member]) for parts in exchange.parts) for member in members]


def _exchanged(
    buffer: Tensor, sent: list[int], received: list[int], ranks: tuple[int, ...]
) -> Tensor:
    return torch.ops._c10d_functional.all_to_all_single(buffer, received, sent, _group(ranks))


def _flat(tensors: list[Tensor], leaf: Tensor) -> Tensor:
    """One contiguous vector of all elements; `leaf` says of which kind an empty one is."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors] or [leaf.new_empty(0)])


def _unflat(
    buffer: Tensor, order: Sequence[int], shapes: Sequence[tuple[int, ...]]
) -> list[Tensor]:
    pieces = buffer.split([prod(shapes[i]) for i in order])
    found = {i: piece.view(shapes[i]) for i, piece in zip(order, pieces, strict=True)}
    return [found[i] for i in range(len(shapes))]


def _joined(parts: list[tuple[Block, Tensor]], axis: int = 0) -> Tensor:
    """The leaf that parts on a grid make up."""
    parts = [(block, tensor) for block, tensor in parts if tensor.numel()]
    if len(parts) == 1:
        return parts[0][1]
    rows: dict[tuple[int, int], list[tuple[Block, Tensor]]] = {}
    for block, tensor in sorted(parts, key=lambda part: part[0]):
        rows.setdefault(block[axis], []).append((block, tensor))
    joined = [_joined(row, axis + 1) for row in rows.values()]
    return joined[0] if len(joined) == 1 else torch.cat(joined, axis)
