# SPDX-License-Identifier: Apache-2.0
"""Leaves on meshes of every kind, cut by torch's own arithmetic, and put together again."""

import functools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

import fmuon

R, S0, S1 = Replicate(), Shard(0), Shard(1)
# Rows of 1, 3, 5 and 7 leave ranks with less than others, and some with nothing.
SHAPES = {
    "a": (8, 6),
    "b": (6, 8),
    "c": (7, 5),
    "d": (3, 4),
    "e": (5, 6),
    "f": (8, 6),
    "single": (1, 9),
    "stack": (4, 5, 6),
    "bias": (9,),
}
EXPERTS = {"up": (4, 5, 6), "down": (4, 6, 5), "uneven": (3, 5, 6), "bias": (9,)}
# Name -> shape of the mesh by world size, placements.
GRIDS = {
    "shard 0": ({2: (2,), 3: (3,), 4: (4,)}, [S0]),
    "shard 1": ({2: (2,), 3: (3,), 4: (4,)}, [S1]),
    "replicas": ({2: (2,), 3: (3,), 4: (4,)}, [R]),
    "hsdp": ({2: (2, 1), 3: (3, 1), 4: (2, 2)}, [R, S0]),
    "hsdp, other way": ({2: (1, 2), 3: (1, 3), 4: (2, 2)}, [S0, R]),
    "rows and columns": ({2: (1, 2), 4: (2, 2)}, [S0, S1]),
    "columns and rows": ({2: (2, 1), 4: (2, 2)}, [S1, S0]),
    "rows twice": ({2: (2, 1), 4: (2, 2)}, [S0, S0]),
    "column-wise": ({2: (1, 2), 4: (2, 2)}, [_StridedShard(0, split_factor=2), S0]),
    "column-wise, transposed": ({4: (2, 2)}, [_StridedShard(1, split_factor=2), S1]),
    "replicas of a grid": ({4: (1, 2, 2)}, [R, S0, S1]),
}


# Not what this machine happens to multiply fast.
PRECISE = fmuon.NewtonSchulz(dtype="float32")


def options(**changed):
    return {
        "lr": 0.1,
        "weight_decay": 0.1,
        "labels": label,
        "orthogonalize": PRECISE,
        **changed,
    }


def label(path, leaf):
    """Stacks of matrices, and one matrix of a single row."""
    return {1: "auxiliary", 2: "muon", 3: fmuon.Matrix(1, 2)}[leaf.ndim]


def inputs(shapes, steps=5):
    generator = torch.Generator().manual_seed(7)

    def draw():
        return {path: torch.randn(shape, generator=generator) for path, shape in shapes.items()}

    return draw(), [draw() for _ in range(steps)]


@functools.cache
def mesh_of(shape, names=None):
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


@functools.cache
def scrambled():
    return DeviceMesh("cpu", [[1, 2], [0, 3]])


def block_of(shape, mesh, placements):
    """The part of a leaf on this rank."""
    lengths, starts = _compute_local_shape_and_global_offset(
        torch.Size(shape), tuple(mesh.shape), list(mesh.get_coordinate()), placements
    )
    return tuple(slice(s, s + n) for s, n in zip(starts, lengths, strict=True))


def put(tensor, where):
    """A tensor as a DTensor; where it can't be cut it is copied."""
    if where is None:
        return tensor.clone()
    mesh, placements = where
    return DTensor.from_local(
        tensor[block_of(tensor.shape, mesh, placements)].clone(),
        mesh,
        placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def where_of(layout, world, path, shape):
    """(mesh, placements) of a leaf; None for a plain tensor."""
    if layout == "mixed":
        grid = mesh_of((2, world // 2), ("outer", "inner"))
        line = mesh_of((world,))
        choices = {
            "a": (grid, [S0, S1]),
            "b": (grid["outer"], [S0]),
            "c": (line, [S0]),
            "d": (line, [R]),
            "stack": (line, [S0]),
            "bias": (line, [S0]),
        }
        return choices.get(path)
    if layout.startswith("ddp"):
        return None
    if layout == "parts of a mesh":
        # Layers that tensor parallelism left alone, beside one that it cut.
        grid = mesh_of((2, world // 2), ("outer", "inner"))
        return {"a": (grid, [S0, S1]), "bias": None}.get(path, (grid["inner"], [S0]))
    if layout == "ranks out of order":
        return scrambled(), [R, S0] if len(shape) > 1 else [R, R]
    if layout == "experts":
        return mesh_of((world,)), [S0 if len(shape) == 3 else R]
    if layout == "experts, copied":
        grid = mesh_of((2, world // 2), ("outer", "inner"))
        return grid, [R, S0 if len(shape) == 3 else R]
    shapes, placements = GRIDS[layout]
    cut = [R if getattr(p, "dim", 0) >= len(shape) else p for p in placements]
    return mesh_of(shapes[world]), cut


def shapes_of(layout):
    return EXPERTS if layout.startswith("experts") else SHAPES


def option_mesh(layout, world):
    """What `mesh=` is given."""
    return {
        "ddp by group": lambda: dist.group.WORLD,
        "ddp by mesh": lambda: mesh_of((world,)),
        "ddp by grid": lambda: mesh_of((2, world // 2), ("outer", "inner")),
        "parts of a mesh": lambda: mesh_of((2, world // 2), ("outer", "inner")),
    }.get(layout, lambda: None)()


def located(tensor):
    """(start, stop) per axis of what this rank has of a leaf, and that."""
    if not isinstance(tensor, DTensor):
        return [(0, n) for n in tensor.shape], tensor
    block = block_of(tensor.shape, tensor.device_mesh, tensor.placements)
    return [(s.start, s.stop) for s in block], tensor.to_local()


def assembled(shape, located_parts):
    """The whole of the parts on all ranks; those that several ranks have are bitwise equal."""
    whole, seen = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    for block, part in located_parts:
        here = tuple(slice(*interval) for interval in block)
        assert whole[here].shape == part.shape
        assert torch.equal(whole[here][seen[here]], part[seen[here]])
        whole[here], seen[here] = part, True
    assert seen.all()
    return whole


class Calls(TorchDispatchMode):
    """Counts collectives."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        if function.namespace == "_c10d_functional":
            name = function.name().split("::")[1]
            self.counts[name] = self.counts.get(name, 0) + 1
        return function(*args, **(kwargs or {}))
