# SPDX-License-Identifier: Apache-2.0
"""Run a function on several ranks: real processes, gloo over loopback.

The processes of a world size are started once and serve all tests, until one of them fails.
"""

import atexit
import faulthandler
import io
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch

PRELOAD = [
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "pytest",
    "hypothesis",
    "fmuon",
]
# How long the others may take to say what the first failure did to them.
GRACE = 2.0


class RankError(AssertionError):
    """What went wrong on which rank; `errors` has rank -> traceback, or how it ended."""

    def __init__(self, errors: dict[int, str]) -> None:
        super().__init__("\n\n".join(f"rank {rank}:\n{text}" for rank, text in errors.items()))
        self.errors = errors


class Ranks:
    """The processes of one world."""

    def __init__(self, world: int, timeout: float) -> None:
        multiprocessing.set_forkserver_preload(PRELOAD)
        context = multiprocessing.get_context("forkserver")
        self.folder = tempfile.TemporaryDirectory()
        self.processes, self.connections = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            arguments = rank, world, str(Path(self.folder.name) / "store"), timeout, theirs
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)

    def run(self, function, arguments, timeout: float, grace: float = GRACE):
        """What every rank returns, by rank; after a failure the others have `grace` seconds."""
        results: dict[int, object] = {}
        errors: dict[int, str] = {}
        for rank, connection in enumerate(self.connections):
            try:
                connection.send((function, arguments))
            except OSError:
                errors[rank] = self._end_of(rank)
        end = time.monotonic() + timeout
        waiting = {connection: rank for rank, connection in enumerate(self.connections)}
        waiting = {c: rank for c, rank in waiting.items() if rank not in errors}
        while waiting:
            ready = wait(list(waiting), max(0.0, end - time.monotonic()))
            if not ready:
                errors |= {rank: self._stack_of(rank) for rank in sorted(waiting.values())}
                break
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    good, answer = connection.recv()
                except (EOFError, OSError):
                    good, answer = False, self._end_of(rank)
                if good:
                    results[rank] = torch.load(io.BytesIO(answer), weights_only=False)
                else:
                    end = min(end, time.monotonic() + grace) if not errors else end
                    errors[rank] = answer
        if errors:
            raise RankError(errors)
        return [results[rank] for rank in sorted(results)]

    def _end_of(self, rank: int) -> str:
        self.processes[rank].join(GRACE)
        return f"ended with exit code {self.processes[rank].exitcode}"

    def _stack_of(self, rank: int) -> str:
        """Where a rank that doesn't answer is."""
        os.kill(self.processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.2)
        return "silent, in\n" + Path(self.folder.name, f"stack.{rank}").read_text()

    def end(self, patience: float = 0.0) -> None:
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.join(patience)
            process.kill()
        for process in self.processes:
            process.join()
        self.folder.cleanup()


_worlds: dict[int, Ranks] = {}


def run(function, world, *arguments, timeout=30.0):
    """function(rank, world, *arguments) on every rank; what they return, by rank."""
    if world not in _worlds:
        _worlds[world] = Ranks(world, 60.0)
    try:
        return _worlds[world].run(function, arguments, timeout)
    except BaseException:
        _worlds.pop(world).end()
        raise


def run_fresh(function, world, *arguments, timeout=60.0):
    """The same in processes that have run nothing else; `timeout` is that of the group."""
    ranks = Ranks(world, timeout)
    try:
        return ranks.run(function, arguments, timeout + 60, grace=timeout + 20)
    finally:
        ranks.end()


@atexit.register
def _end() -> None:
    while _worlds:
        _worlds.popitem()[1].end(GRACE)


def _serve(rank: int, world: int, store: str, timeout: float, connection: Connection) -> None:
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    torch.set_num_threads(1)
    stack = Path(store).with_name(f"stack.{rank}").open("w")
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
    )
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        try:
            buffer = io.BytesIO()
            torch._dynamo.reset()
            torch.save(function(rank, world, *arguments), buffer)
            connection.send((True, buffer.getvalue()))
        except BaseException:
            connection.send((False, traceback.format_exc()))
