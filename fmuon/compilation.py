# SPDX-License-Identifier: Apache-2.0
"""The only call to torch.compile."""

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from fmuon.base import FMuonError

Function = TypeVar("Function", bound=Callable[..., Any])

# Arguments that change from call to call: as Python numbers each value would be a graph of its own.
_SCALARS = ("step", "lr", "weight_decay", "momentum", "betas", "eps")


def compile(
    function: Function,
    mode: str = "max-autotune",
    *,
    backend: str | Callable[..., Any] = "inductor",
) -> Function:
    """Compile an update, or a train step that calls it, into one graph.

    `fullgraph=True` and `dynamic=False`. Numbers passed as `step`, `lr`, `weight_decay`,
    `momentum`, `betas` or `eps` become 0-d tensors outside the graph, so changing them never
    recompiles; the constant `weight_decay=0` stays one. Every call of `compile` has a cache of its
    own: any number of optimizers can be compiled in one process, and no global setting is touched.

    In modes with CUDA graphs the results on a GPU are copied out of the graph's memory (one copy of
    every returned tensor), so that states from earlier steps stay valid.

    Args:
        function: `opt.update`, or any function that torch.compile can trace.
        mode: as for torch.compile; "default" compiles fastest.
        backend: as for torch.compile; modes apply to "inductor".
    """
    # Both are heavy, and only needed by those who compile.
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor import list_mode_options

    options = list_mode_options(mode) if backend == "inductor" else None
    target = _own_code(function)
    compiled = torch.compile(
        target, fullgraph=True, dynamic=False, backend=backend, options=options or None
    )
    signature = inspect.signature(function)
    names = [name for name in _SCALARS if name in signature.parameters]
    graphs = bool(options and options.get("triton.cudagraphs"))

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        # A scalar on the CPU would keep a GPU's step out of CUDA graphs.
        device = next(_devices(args), None)
        for name in names:
            if name in bound.arguments:
                bound.arguments[name] = _tensors(name, bound.arguments[name], device)
        if graphs:
            torch.compiler.cudagraph_mark_step_begin()
        try:
            result = compiled(*bound.args, **bound.kwargs)
        except TorchDynamoException as error:
            raise _own_error(error) or error from None
        return _cloned(result) if graphs else result

    return wrapper  # pyright: ignore[reportReturnType]


def _own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a code object of its own: dynamo counts recompiles per code object."""
    inner = getattr(function, "__func__", function)
    if not isinstance(inner, types.FunctionType):
        return function
    copy = types.FunctionType(
        inner.__code__.replace(),
        inner.__globals__,
        inner.__name__,
        inner.__defaults__,
        inner.__closure__,
    )
    copy.__kwdefaults__ = inner.__kwdefaults__
    owner = getattr(function, "__self__", None)
    return copy if owner is None else types.MethodType(copy, owner)


def _own_error(error: BaseException) -> FMuonError | None:
    """The error that fmuon raised during the trace, out of those that dynamo wraps around it."""
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, FMuonError):
        inner = inner.__cause__ or inner.__context__
    return inner


def _devices(value: Any) -> Iterator[torch.device]:
    """Devices of the tensors in nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield value.device
    elif isinstance(value, Mapping | list | tuple):
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from _devices(entry)


def _tensors(name: str, value: Any, device: torch.device | None) -> Any:
    if isinstance(value, Mapping):
        return {path: _tensors(name, entry, device) for path, entry in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_tensors(name, entry, device) for entry in value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if name == "weight_decay" and value == 0:
        return value
    dtype = torch.int64 if name == "step" else torch.float64
    return torch.tensor(value, dtype=dtype, device=device)


def _cloned(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result.clone() if result.is_cuda else result
    if isinstance(result, Mapping):
        return {key: _cloned(value) for key, value in result.items()}
    if isinstance(result, tuple | list):
        return type(result)(map(_cloned, result))
    return result
