"""Steps of one all_reduce each; writes when the first was done, in which world. All ranks stop at the same step."""

import os
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
folder = os.environ["BENCH_FOLDER"]
stop = torch.zeros(1)
first = True
while not stop.item():
    stop[0] = float(os.path.exists(f"{folder}/stop"))
    dist.all_reduce(stop, op=dist.ReduceOp.MAX)
    if first:
        first = False
        words = (
            *(time.time(), dist.get_world_size(), dist.get_rank(), os.getpid(), os.environ["BENCH_NODE"]),
            *(os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ.get("ELASTIC_GENERATION", "-")),
        )
        with open(f"{folder}/events", "a") as events:
            events.write(" ".join(map(str, words)) + "\n")
    time.sleep(0.005)
os._exit(0)
