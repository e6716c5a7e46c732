"""Joins the group, does one all_reduce, writes when it was done, and goes on until told to stop, or to fail."""

import os
import signal
import time

if os.environ.get("BENCH_IMPORTS"):
    for name in os.environ["BENCH_IMPORTS"].split(","):
        __import__(name)

import torch
import torch.distributed as dist


def fail(*_: object) -> None:
    raise RuntimeError("told to")


signal.signal(signal.SIGUSR1, fail)
dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
done = time.time()
rank = dist.get_rank()
with open(f"{os.environ['BENCH_FOLDER']}/events", "a") as events:
    events.write(f"{done} {rank} {os.getpid()} {os.environ['TORCHELASTIC_RESTART_COUNT']}\n")
while not os.path.exists(f"{os.environ['BENCH_FOLDER']}/stop"):
    time.sleep(0.02)
    dist.all_reduce(value)
os._exit(0)
