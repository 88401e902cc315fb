# SPDX-License-Identifier: Apache-2.0
"""The only call to torch.compile."""

import ast
import functools
import importlib.util
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fmuon import base
from fmuon.base import ConfigurationError, FMuonError, lookup
from fmuon.collectives import is_initialized
from fmuon.tree import map_tensors

Function = TypeVar("Function", bound=Callable[..., Any])

# Arguments that change from call to call: as Python numbers each value would be a graph of its own.
_SCALARS = frozenset({"step", "lr", "weight_decay", "momentum", "betas", "eps"})

# Loops that share only a few scalars don't belong in one kernel on a CPU, which launches nothing:
# such a kernel keeps the results of a bucket alive until those of later ones are there.
# Nor are buffers kept until their size is needed again.
_ON_CPU: dict[str, Any] = {"score_fusion_memory_threshold": 4096, "allow_buffer_reuse": False}
# Inductor would wait for every collective right after it was issued, which leaves nothing to do
# while leaves are on their way.
_DISTRIBUTED: dict[str, Any] = {"reorder_for_peak_memory": False}


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
    every returned tensor), so that states from earlier steps stay valid. Results that would require
    a gradient come back without: a graph can't set that. With TORCH_COMPILE_DISABLE=1 in the
    environment the function itself is returned.

    Args:
        function: `opt.update`, or any function that torch.compile can trace.
        mode: as for torch.compile. "max-autotune" tries several kernels for every product and
            prints what it finds; "default" compiles faster, prints nothing, and is as fast on a
            CPU.
        backend: as for torch.compile; modes apply to "inductor".
    """
    if _is_disabled():
        return function
    # Both are heavy, and only needed by those who compile.
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor import list_mode_options

    options: dict[str, Any] = {}
    if backend == "inductor":
        check_mode(mode)
        options = list_mode_options(mode) | ({} if torch.accelerator.is_available() else _ON_CPU)
        options |= _DISTRIBUTED if is_initialized() else {}
    graphs = bool(options.get("triton.cudagraphs"))
    options["guard_filter_fn"] = _needed_guards
    compiled = torch.compile(
        _own_code(function), fullgraph=True, dynamic=False, backend=backend, options=options
    )
    signature = inspect.signature(function)
    keywords = [p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        # A scalar on the CPU would keep a GPU's step out of CUDA graphs.
        device = next(_devices(args), None)
        for arguments in (bound.arguments, *(bound.arguments.get(name, {}) for name in keywords)):
            for name in _SCALARS & arguments.keys():
                arguments[name] = _packed(_tensors(name, arguments[name], device))
        if graphs:
            torch.compiler.cudagraph_mark_step_begin()
        try:
            result = compiled(*bound.args, **bound.kwargs)
        except TorchDynamoException as error:
            raise _own_error(error) or _without_compiler(error) or error from None
        return map_tensors(lambda t: t.clone() if t.is_cuda else t, result) if graphs else result

    return wrapper  # pyright: ignore[reportReturnType]


def check_mode(mode: Any) -> None:
    """Refuse what is no mode of torch.compile."""
    from torch._inductor import list_mode_options

    lookup(list_mode_options(), mode, "mode to compile in")


def can_compile() -> bool:
    """Whether an accelerator's step can be compiled here: inductor writes Triton for it."""
    return not _is_disabled() and importlib.util.find_spec("triton") is not None


def _is_disabled() -> bool:
    # With fullgraph=True torch.compile would raise instead of running eagerly.
    return os.environ.get("TORCH_COMPILE_DISABLE") == "1"


class _Packed(NamedTuple):
    """A scalar, a pair or a dict of them on its way into a graph, of vectors for float64 numbers.

    Of a 0-d float64 input on a CPU dynamo makes a symbol too, and when it finds that it can't get
    rid of that it traces everything a second time.
    """

    scalars: Any


def _packed(value: Any) -> Any:
    if not isinstance(value, Tensor | Mapping | tuple):
        return value
    return _Packed(_each(_as_vector, value))


def _unpacked(value: Any) -> Any:
    return _each(_as_number, value.scalars) if isinstance(value, _Packed) else value


def _each(function: Callable[[Any], Any], scalars: Any) -> Any:
    if isinstance(scalars, Mapping):
        return {path: _each(function, value) for path, value in scalars.items()}
    if isinstance(scalars, tuple):
        return tuple(_each(function, value) for value in scalars)
    return function(scalars)


def _as_vector(value: Any) -> Any:
    return value[None] if _is_symbol(value) else value


def _as_number(value: Any) -> Any:
    return value[0] if _is_symbol(value) else value


def _is_symbol(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float64 and value.is_cpu


def _own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A caller of the function with a code object of its own, by which dynamo counts recompiles."""

    def call(*args: Any, **kwargs: Any) -> Any:
        positional = [_unpacked(value) for value in args]
        return function(*positional, **{name: _unpacked(value) for name, value in kwargs.items()})

    call.__code__ = call.__code__.replace()
    return call


def _needed_guards(guards: Sequence[Any]) -> list[bool]:
    """Without those that two DTensors have one object as placement; they are guarded by value."""
    return [
        guard.guard_type != "DUPLICATE_INPUT" or not re.search(r"\.placements\b", guard.name)
        for guard in guards
    ]


def _own_error(error: BaseException) -> FMuonError | None:
    """The error that fmuon raised during the trace, out of those that dynamo wraps around it."""
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, FMuonError):
        inner = inner.__cause__ or inner.__context__
    return inner or _traced_error(error)


def _traced_error(error: BaseException) -> FMuonError | None:
    """The error of a `raise` that dynamo traced: it has only the text of it."""
    found = re.search(r"raised exception (\w+)\((['\"].*['\"])\)$", str(error), re.MULTILINE)
    kind = getattr(base, found[1], None) if found else None
    if found is None or not isinstance(kind, type) or not issubclass(kind, FMuonError):
        return None
    return kind(ast.literal_eval(found[2]))


def _without_compiler(error: BaseException) -> FMuonError | None:
    """What to do where inductor found no C++ compiler; None for other errors."""
    inner = getattr(error, "inner_exception", None)
    if type(inner).__name__ != "InvalidCxxCompiler":
        return None
    return ConfigurationError(
        f"can't compile: {inner}; install g++ or clang++, or name one in the environment variable "
        f"CXX; without a compiler run eagerly: FMuon(..., compile=False), or the update itself in "
        f"place of fmuon.compile(update)"
    )


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
