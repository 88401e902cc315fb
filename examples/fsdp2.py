# SPDX-License-Identifier: Apache-2.0
"""Train a GPT whose matrices are spread over processes, and go on with another number of them.

    torchrun --nproc-per-node 2 examples/fsdp2.py
    torchrun --nproc-per-node 3 examples/fsdp2.py --resume
    torchrun --nproc-per-node 2 examples/fsdp2.py --smoke      a tiny model and a few steps

The first command saves a checkpoint halfway and trains to the end; the second goes on from there
and ends at the same loss. With `fully_shard` every process has some rows of every matrix. FMuon
brings each matrix to one of them, which orthogonalises it and sends the rows back. Nothing here
asks it to: it sees what the parameters are. The processes talk through gloo, or NCCL where each has
a GPU.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from train_gpt import GPT, SMOKE, Corpus, Size, draw_batches, warmup_cosine

import fmuon

PEAK = 1.6e-2


def connect() -> torch.device:
    """Join the processes that torchrun started; the device of this one."""
    own, processes = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.device_count() < processes:
        dist.init_process_group("gloo")
        return torch.device("cpu")
    torch.cuda.set_device(own)
    dist.init_process_group("nccl")
    return torch.device("cuda", own)


def sharded(size: Size, device: torch.device) -> nn.Module:
    """The model, each block gathered on its own while it is used."""
    torch.manual_seed(0)  # the same weights, whatever the number of processes
    model = GPT(size).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def loss_of(model: nn.Module, batch: Tensor, device: torch.device) -> Tensor:
    """This process's share of the mean loss of a batch, 0-d: the shares of all add up to it."""
    own = batch[dist.get_rank() :: dist.get_world_size()].to(device).long()
    logits = model(own[:, :-1])
    total = F.cross_entropy(logits.flatten(0, 1), own[:, 1:].flatten(), reduction="sum")
    return total / batch[:, 1:].numel()


class Run:
    """Model, optimizer and step, with a checkpoint that knows nothing of the processes."""

    def __init__(self, size: Size, device: torch.device) -> None:
        self.size, self.device, self.step = size, device, 0
        self.model = sharded(size, device)
        self.optimizer = fmuon.FMuon(self.model, lr=PEAK, weight_decay=0.1)

    def train(self, batches: list[Tensor], until: int) -> None:
        """Go on until so many steps are made."""
        for batch in batches[self.step : until]:
            for group in self.optimizer.param_groups:
                group["lr"] = PEAK * warmup_cosine(torch.tensor(self.step), self.size.steps).item()
            self.optimizer.zero_grad()
            # fully_shard averages gradients over processes; these are to be added up.
            (loss_of(self.model, batch, self.device) * dist.get_world_size()).backward()
            self.optimizer.step()
            self.step += 1

    @torch.no_grad()
    def validate(self, batches: list[Tensor]) -> float:
        """Mean loss over the batches, on all processes."""
        losses = torch.stack([loss_of(self.model, batch, self.device) for batch in batches])
        dist.all_reduce(losses)
        return losses.mean().item()

    def save(self, folder: Path) -> None:
        """Every process writes its own part."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer, "step": torch.tensor(self.step)}
        dcp.save(state, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        """Every process reads what is its part now."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer, "step": torch.tensor(0)}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step = int(state["step"])


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--out", type=Path, default=Path("out/fsdp2"), help="the checkpoint")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and a few steps")
    arguments = parser.parse_args()
    size = SMOKE if arguments.smoke else Size()
    run = Run(size, connect())
    says = print if dist.get_rank() == 0 else lambda *_: None
    says(fmuon.distributed.plan(run.optimizer, dict(run.model.named_parameters())))

    corpus = Corpus.read("stdlib")
    training = draw_batches(corpus.training, size.steps, size, seed=0)
    validation = draw_batches(corpus.validation, size.validation_batches, size, seed=0)
    if arguments.resume:
        run.load(arguments.out)
        says(f"\ngoing on from step {run.step} with {dist.get_world_size()} processes")
    else:
        run.train(training, until=size.steps // 2)
        run.save(arguments.out)
        says(f"\nsaved after {run.step} of {size.steps} steps: {arguments.out}")
    says(f"validation loss {run.validate(validation):.4f}")
    run.train(training, until=size.steps)
    says(f"validation loss {run.validate(validation):.4f} after {run.step} steps")
    # A thread of gloo that still holds a tensor when Python ends aborts the process.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
