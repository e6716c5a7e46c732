"""A worker that has done its work ends well, whatever its framework's threads are at."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(150)

# Whoever holds the interpreter keeps it until the end: gloo's thread, which still lets go of the last collective, gets
# it in the midst of that. Without help, every fifth process is aborted then.
HURRIED = """
import os, sys
import torch
import torch.distributed as dist

def train(pair, rank):
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/{pair}", rank=rank, world_size=2)
    found = torch.ones(1)
    for _ in range(5):
        dist.all_reduce(found)
    sys.setswitchinterval(1000)
    dist.all_reduce(found)
    sys.exit()

codes = []
for pair in range(12):
    pids = []
    for rank in range(2):
        pids.append(os.fork())
        if not pids[-1]:
            train(pair, rank)
    codes += [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
print("ended with", *codes)
sys.exit(any(codes))
"""


def test_right_after_a_collective(launch, script, tmp_path):
    job = launch("--framework", "torch", "--no-standby", script(HURRIED), tmp_path)
    assert job.finish(100) == 0, job.text
    assert len(job.seen(r"ended with((?: 0)+)$")[1].split()) == 24
