# SPDX-License-Identifier: Apache-2.0
"""How long does the first compiled call take, and what does the graph grow with?

    python benchmarks/compile_time.py               print the table
    python benchmarks/compile_time.py --record      and append it to results/compile_time.jsonl
    python benchmarks/compile_time.py --case "64 of one shape"

Every case is two fresh processes with one cache directory of inductor, first empty, then filled by
the first. The time is that of the first call of `fmuon.compile(opt.update)`, with all that a
process compiles or loads for the first time; importing torch and fmuon is not counted. The first
call also runs the step: compiling took what it took beyond a later call, the second one of the warm
process. The records also hold the CPU time of the process up to the first kernel of the first call,
which says more than the clock where others use the machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import harness
import tables
import torch
from harness import Row
from inventories import GPT2, INVENTORIES, Inventory

import fmuon

SIDE = 64
QUINTIC, AUTO = fmuon.NewtonSchulz(dtype="float32"), fmuon.Auto()
CASES: dict[str, tuple[Inventory, Any]] = {
    **{
        f"{count} of one shape": (Inventory("", ((SIDE, SIDE),) * count), QUINTIC)
        for count in (1, 4, 16, 64)
    },
    **{
        f"16 of {count} shapes": (
            Inventory("", tuple((SIDE, SIDE + 8 * (i % count)) for i in range(16))),
            QUINTIC,
        )
        for count in (2, 4, 8, 16)
    },
    **{name: (inventory, QUINTIC) for name, inventory in INVENTORIES.items()},
    "gpt2-124M": (GPT2, QUINTIC),
    **{f"{name}, auto": (inventory, AUTO) for name, inventory in INVENTORIES.items()},
    "gpt2-124M, auto": (GPT2, AUTO),
}


def main() -> None:
    """Measure the cases that were asked for; the child of a case measures one call."""
    arguments = _arguments()
    if arguments.child:
        print(json.dumps(first_call(*CASES[arguments.case])))
        return
    if arguments.record:
        harness.refuse_dirty_tree()
    stamp = harness.environment()
    rows: list[Row] = []
    for case in CASES:
        if arguments.case in (None, case):
            rows.append(measure(case))
            print(tables.compile_time(rows[-1:]), file=sys.stderr, flush=True)
    print(tables.compile_time(rows))
    if arguments.record:
        print(f"recorded in {harness.record('compile_time', rows, stamp).name}")


def measure(case: str) -> Row:
    """The first call with an empty cache, and in another process with the filled one."""
    with tempfile.TemporaryDirectory() as cache:
        cold, warm = _child(case, cache), _child(case, cache)
    inventory, _ = CASES[case]
    shapes = inventory.shapes
    return {
        "case": case,
        "leaves": len(shapes) + len(inventory.others),
        "matrices": len(shapes),
        "shapes": len({tuple(sorted(shape)) for shape in shapes}),
        "seconds_cold": cold.pop("seconds"),
        "cpu_seconds_cold": cold.pop("cpu_seconds"),
        **{f"{name}_warm": warm[name] for name in ("seconds", "cpu_seconds")},
        **cold,
        "seconds_later": warm["seconds_later"],
    }


def first_call(inventory: Inventory, method: Any) -> Row:
    """Seconds of the first call, and what was compiled in it."""
    # Loaded here, so that their import isn't counted.
    from torch._dynamo.utils import get_compilation_metrics
    from torch._inductor import metrics
    from torch._inductor.compile_fx import compile_fx

    graphs: list[list[str]] = []
    compiled_at: list[float] = []

    def counted(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        nodes = [node for node in graph.graph.nodes if node.op.startswith("call_")]
        graphs.append([getattr(node.target, "__name__", str(node.target)) for node in nodes])
        kernels: Any = compile_fx(graph, inputs)

        def run(*args: Any) -> Any:
            compiled_at.append(time.process_time())
            return kernels(*args)

        # Takes its arguments in a list, as the function it calls.
        run._boxed_call = getattr(kernels, "_boxed_call", False)  # pyright: ignore[reportFunctionMemberAccess]
        return run

    torch.manual_seed(0)
    params = {str(i): torch.randn(shape) for i, shape in enumerate(inventory.shapes)}
    params |= {f"other.{i}": torch.randn(shape) for i, shape in enumerate(inventory.others)}
    grads = {name: torch.randn_like(p) for name, p in params.items()}
    labels = {r"re:other\..*": "auxiliary"} if inventory.others else None
    opt = fmuon.muon(orthogonalize=method, labels=labels)
    update, state = fmuon.compile(opt.update, backend=counted), opt.init(params)
    on_cpu = time.process_time()
    seconds = harness.wall_seconds(lambda: update(grads, state, 0))
    return {
        "seconds": seconds,
        "cpu_seconds": compiled_at[0] - on_cpu,
        "seconds_later": harness.wall_seconds(lambda: update(grads, state, 1)),
        "restarts": sum(len(m.restart_reasons or ()) for m in get_compilation_metrics()),
        "graphs": len(graphs),
        "nodes": sum(map(len, graphs)),
        "products": sum(name in ("matmul", "bmm", "baddbmm") for names in graphs for name in names),
        "kernels": metrics.generated_kernel_count,
    }


def _child(case: str, cache: str) -> Row:
    command = (sys.executable, __file__, "--child", "--case", case)
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
    run = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(run.stdout.splitlines()[-1])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="append to the results")
    parser.add_argument("--case", choices=CASES, help="only this one")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
