"""A small training that can be killed at any moment: it goes on from its last checkpoint.

    elastic-launch --framework paddle --nproc-per-node 2 --max-restarts 3 examples/train_paddle.py

It runs under paddle.distributed.launch as well: the checkpoints are made either way.
"""

import argparse
import os
import time

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn

from elastic_adapter.adapters.paddlepaddle import Checkpointer


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--checkpoint", default="checkpoints", help="the folder of the checkpoints")
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="time that a step pretends to take")
    return parser.parse_args()


def batch(step: int, rank: int) -> tuple[paddle.Tensor, paddle.Tensor]:
    """The data of one step: the same each time that the step is run."""
    generator = np.random.default_rng(step * 1000 + rank)
    inputs = paddle.to_tensor(generator.standard_normal((64, 8), dtype="float32"))
    return inputs, inputs.sum(axis=1, keepdim=True)


def main() -> None:
    args = parse()
    dist.init_parallel_env()
    rank = dist.get_rank()
    paddle.seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = paddle.optimizer.SGD(args.lr, parameters=model.parameters())
    replica = paddle.DataParallel(model)
    ckpt = Checkpointer(args.checkpoint, model=replica, optimizer=optimizer, every_steps=args.save_every, keep_last=3)
    start = ckpt.restore()
    print(f"rank {rank} of {dist.get_world_size()} starts at step {start} (pid {os.getpid()})", flush=True)
    for step in range(start, args.steps):
        inputs, targets = batch(step, rank)
        loss = nn.functional.mse_loss(replica(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        time.sleep(args.step_seconds)
        if ckpt.step(step) and rank == 0:
            print(f"step {step + 1} loss {loss.item():.4f} saved", flush=True)
    if dist.get_world_size() > 1:
        dist.barrier()
    if rank == 0:
        print(f"finished at step {args.steps}", flush=True)


if __name__ == "__main__":
    main()
