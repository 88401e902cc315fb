# SPDX-License-Identifier: Apache-2.0
"""Interleaved timing, the stamp of the environment, and the committed records."""

import datetime
import gc
import json
import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

import fmuon
from fmuon.orthogonalize import multiplies_bfloat16

Row: TypeAlias = dict[str, Any]

HERE = Path(__file__).parent
RESULTS = HERE / "results"
# Records and the tables made of them may differ from the commit; the code may not.
_GENERATED = (":!benchmarks/results", ":!benchmarks/README.md")


class Timed(NamedTuple):
    """Something to time; `prepare` runs before each repeat and is not timed."""

    step: Callable[[], Any]
    prepare: Callable[[], Any] = lambda: None


def wall_seconds(step: Callable[[], Any]) -> float:
    """Of one call, by the clock of the machine."""
    before = time.perf_counter()
    step()
    return time.perf_counter() - before


def gpu_seconds(step: Callable[[], Any]) -> float:
    """From a call while the GPU is idle to the end of its last kernel."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def interleave(
    subjects: Mapping[str, Timed],
    rounds: int,
    seconds: float,
    clock: Callable[[Callable[[], Any]], float] = wall_seconds,
) -> dict[str, list[float]]:
    """Seconds of every repeat, round robin, each round starting with the next subject.

    A subject that has used its `seconds` sits out. Subjects must be warm.
    """
    times: dict[str, list[float]] = {name: [] for name in subjects}
    names = list(subjects)
    gc.disable()
    # What is there already need not be looked through in every round.
    gc.freeze()
    try:
        for turn in range(rounds):
            start = turn % len(names)
            running = [
                name for name in names[start:] + names[:start] if sum(times[name]) <= seconds
            ]
            if not running:
                break
            for name in running:
                subjects[name].prepare()
                times[name].append(clock(subjects[name].step))
            gc.collect()
    finally:
        gc.unfreeze()
        gc.enable()
    return times


def summary(times: Sequence[float]) -> Row:
    """Minimum, median and number of the repeats."""
    return {
        "seconds_min": min(times),
        "seconds_median": statistics.median(times),
        "repeats": len(times),
    }


def environment() -> Row:
    """What a number depends on besides the code of the benchmark."""
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD") or os.environ.get("COMMIT"),
        "dirty": None if (changes := _changes()) is None else bool(changes),
        "fmuon": fmuon.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": _cpu(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "native_bfloat16": multiplies_bfloat16(torch.device("cpu")),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
    } | _gpu()


def refuse_dirty_tree() -> None:
    """Stop where the code is not that of a commit: its numbers could not be repeated."""
    if changes := _changes():
        raise SystemExit(f"not recorded: the tree differs from its commit\n{changes}")


def record(question: str, rows: Sequence[Row], stamp: Row, folder: Path = RESULTS) -> Path:
    """Append rows to the file of a question, each with the stamp of the environment."""
    if folder == RESULTS:
        refuse_dirty_tree()
    path = folder / f"{question}.jsonl"
    with path.open("a") as file:
        for row in rows:
            file.write(json.dumps(row | {"environment": stamp}) + "\n")
    return path


def read(question: str) -> list[Row]:
    """All rows recorded for a question, oldest first."""
    path = RESULTS / f"{question}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _git(*arguments: str) -> str | None:
    """What git prints; None in a copy of the tree that is no checkout, or without git."""
    if not (HERE.parent / ".git").exists() or shutil.which("git") is None:
        return None
    command = ("git", "-C", str(HERE.parent), *arguments)
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.rstrip()


def _changes() -> str | None:
    return _git("status", "--porcelain", "--", ".", *_GENERATED)


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _gpu() -> Row:
    """Name of the GPU and version of CUDA, where there is one."""
    if not torch.cuda.is_available():
        return {}
    return {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
