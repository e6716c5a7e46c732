"""A small training that can be killed at any moment: it goes on from its last checkpoint.

    elastic-launch --framework paddle --nproc-per-node 2 --max-restarts 3 examples/train_paddle.py

It is an ordinary script of paddle.distributed.launch: nothing in it knows the launcher.
"""

import argparse
import os
import time

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--checkpoint", default="checkpoint.pdparams")
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="time that a step pretends to take")
    return parser.parse_args()


def batch(step: int, rank: int) -> tuple[paddle.Tensor, paddle.Tensor]:
    """The data of one step: the same each time that the step is run."""
    generator = np.random.default_rng(step * 1000 + rank)
    inputs = paddle.to_tensor(generator.standard_normal((64, 8), dtype="float32"))
    return inputs, inputs.sum(axis=1, keepdim=True)


def save(path: str, step: int, model: nn.Layer, optimizer: paddle.optimizer.Optimizer) -> None:
    """Write beside, then rename: a kill in between leaves the last checkpoint whole."""
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    paddle.save(state, f"{path}.new")
    os.replace(f"{path}.new", path)


def restore(path: str, model: nn.Layer, optimizer: paddle.optimizer.Optimizer) -> int:
    """The step to go on from: 0 when there is no checkpoint."""
    if not os.path.exists(path):
        return 0
    state = paddle.load(path)
    model.set_state_dict(state["model"])
    optimizer.set_state_dict(state["optimizer"])
    return int(state["step"])


def main() -> None:
    args = parse()
    dist.init_parallel_env()
    rank = dist.get_rank()
    paddle.seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = paddle.optimizer.SGD(args.lr, parameters=model.parameters())
    start = restore(args.checkpoint, model, optimizer)
    replica = paddle.DataParallel(model)
    print(f"rank {rank} of {dist.get_world_size()} starts at step {start} (pid {os.getpid()})", flush=True)
    for step in range(start, args.steps):
        inputs, targets = batch(step, rank)
        loss = nn.functional.mse_loss(replica(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        time.sleep(args.step_seconds)
        done = step + 1
        if rank == 0 and done % args.save_every == 0:
            save(args.checkpoint, done, model, optimizer)
            print(f"step {done} loss {loss.item():.4f} saved", flush=True)
    if dist.get_world_size() > 1:
        dist.barrier()
    if rank == 0:
        print(f"finished at step {args.steps}", flush=True)


if __name__ == "__main__":
    main()
