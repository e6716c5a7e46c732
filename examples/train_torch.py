"""A small training that can be killed at any moment: it goes on from its last checkpoint.

    elastic-launch --framework torch --nproc-per-node 2 --max-restarts 3 examples/train_torch.py

It runs under torchrun as well: the checkpoints are made either way.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastic_adapter.adapters.pytorch import Checkpointer


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--checkpoint", default="checkpoints", help="the folder of the checkpoints")
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="time that a step pretends to take")
    return parser.parse_args()


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The data of one step: the same each time that the step is run."""
    generator = torch.Generator().manual_seed(step * 1000 + rank)
    inputs = torch.randn(64, 8, generator=generator)
    return inputs, inputs.sum(dim=1, keepdim=True)


def main() -> None:
    args = parse()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    replica = DistributedDataParallel(model)
    ckpt = Checkpointer(args.checkpoint, model=replica, optimizer=optimizer, every_steps=args.save_every, keep_last=3)
    start = ckpt.restore()
    print(f"rank {rank} of {dist.get_world_size()} starts at step {start} (pid {os.getpid()})", flush=True)
    for step in range(start, args.steps):
        inputs, targets = batch(step, rank)
        loss = nn.functional.mse_loss(replica(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(args.step_seconds)
        if ckpt.step(step) and rank == 0:
            print(f"step {step + 1} loss {loss.item():.4f} saved", flush=True)
    dist.barrier()
    if rank == 0:
        print(f"finished at step {args.steps}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
