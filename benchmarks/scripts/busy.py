"""Computes as fast as the CPU allows, one all_reduce a step, and writes the time of every step."""

import os
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
weights = torch.randn(256, 256)
end = time.time() + float(os.environ["BENCH_SECONDS"])
times = []
going = torch.ones(1)
while True:
    gradient = weights
    for _ in range(8):
        gradient = torch.tanh(gradient @ weights)
    dist.all_reduce(gradient)
    times.append(time.time())
    going[0] = float(times[-1] < end)
    if len(times) % 20 == 0:
        dist.all_reduce(going, op=dist.ReduceOp.MIN)
        if not going.item():
            break
with open(f"{os.environ['BENCH_FOLDER']}/steps.{rank}", "w") as file:
    file.write("\n".join(map(str, times)))
os._exit(0)
