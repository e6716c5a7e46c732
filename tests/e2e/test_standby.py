"""Warm standbys: a restart that imports nothing gives what a cold one would have given."""

import os
import signal

import pytest

from elastic_adapter.core.processes import STACKS_FD, STACKS_SIGNAL

pytestmark = pytest.mark.quiet
TORCH = ("--framework", "torch", "--nproc-per-node", "2", "--max-restarts", "2")

TRAIN = """
import os, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank, generation = dist.get_rank(), os.environ["ELASTIC_GENERATION"]
print(f"generation {generation} rank {rank} pid {os.getpid()}", flush=True)
if generation == "1" and "WAIT" in os.environ:
    while True:
        time.sleep(0.05)
        dist.barrier()
torch.manual_seed(1)
model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(20):
    loss = model(torch.randn(8, 16)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
if rank == 0:
    torch.save(model.state_dict(), os.environ["RESULT"])
print(f"threads {torch.get_num_threads()} omp {os.environ['OMP_NUM_THREADS']}", flush=True)
dist.destroy_process_group()
"""


def test_woken_standbys_train_to_the_same_weights(launch, script, tmp_path):
    """A generation of woken standbys ends with the very weights of a cold one."""
    import torch

    path = script(TRAIN)
    cold = launch(*TORCH, "--no-standby", path, env={"RESULT": str(tmp_path / "cold.pt")})
    assert cold.finish() == 0
    warm = launch(*TORCH, path, env={"RESULT": str(tmp_path / "warm.pt"), "WAIT": "1"})
    pid = int(warm.seen(r"generation 1 rank 1 pid (\d+)").group(1))
    warm.seen("standbys are ready for all 2")
    os.kill(pid, signal.SIGKILL)
    warm.seen("generation 2: 2 worker.s. started, 2 of them from standby")
    assert warm.finish() == 0
    expected, got = torch.load(tmp_path / "cold.pt"), torch.load(tmp_path / "warm.pt")
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    assert cold.seen(r"threads (\d+) omp 1").group(1) == warm.seen(r"threads (\d+) omp 1").group(1)
    warm.gone()


def test_standbys_are_refilled(launch, script, tmp_path):
    """After a restart the pool is filled again, and the next restart is warm, too."""
    text = (
        "import os, time; print(f'up {os.environ[\"ELASTIC_GENERATION\"]} {os.getpid()}', flush=True); time.sleep(600)"
    )
    job = launch("--framework", "plain", "--max-restarts", 2, "--preload", "decimal", script(text))
    for generation in (1, 2):
        pid = int(job.seen(rf"up {generation} (\d+)").group(1))
        job.seen("standbys are ready", times=generation)
        os.kill(pid, signal.SIGKILL)
        job.seen(f"generation {generation + 1}: 1 worker.s. started, 1 of them from standby")
    job.signal(signal.SIGTERM)
    assert job.finish() == 143
    job.gone()


def test_stacks_of_cold_and_of_woken_workers_are_to_be_had(launch, script):
    """Every worker catches the signal for its stacks, and writes them to a file that is no other process's."""
    text = f"""
import os, time
mask = next(line for line in open("/proc/self/status") if line.startswith("SigCgt")).split()[1]
caught = int(mask, 16) >> {STACKS_SIGNAL} - 1 & 1
print("up", os.environ["ELASTIC_GENERATION"], os.getpid(), caught, os.readlink("/proc/self/fd/{STACKS_FD}"), flush=True)
time.sleep(600)
"""
    job = launch("--framework", "plain", "--max-restarts", 1, "--preload", "decimal", script(text))
    cold = job.seen(r"up 1 (\d+) 1 (\S+/stacks\.0\.\d+)")
    job.seen("standbys are ready")
    os.kill(int(cold[1]), signal.SIGKILL)
    woken = job.seen(r"up 2 (\d+) 1 (\S+/stacks\.0\.\d+)")
    assert cold[2] != woken[2]
    job.signal(signal.SIGTERM)
    assert job.finish() == 143
    job.gone()


def test_failure_before_the_standbys_are_ready(launch, script):
    """A worker that fails while the standbys still import does not wait for anything it need not wait for."""
    text = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
print(f"generation {os.environ['ELASTIC_GENERATION']} up", flush=True)
if os.environ["ELASTIC_GENERATION"] != "3":
    time.sleep(0.4)
    # Not the same twice: that would end the job.
    os._exit(3 + int(os.environ["ELASTIC_GENERATION"]))
dist.barrier()
dist.destroy_process_group()
"""
    job = launch(*TORCH, script(text))
    assert job.finish() == 0
    job.seen("generation 3 up", times=2)
    job.gone()


def test_standby_that_cannot_import(launch, script):
    """A module that can't be preloaded is named once, and the job goes on."""
    text = "import os, time; print('up', os.getpid(), flush=True); time.sleep(600)"
    job = launch("--framework", "plain", "--max-restarts", 1, "--preload", "decimal,no_such_module", script(text))
    job.seen("could not import no_such_module")
    job.seen("standbys are ready")
    os.kill(int(job.seen(r"up (\d+)").group(1)), signal.SIGKILL)
    job.seen("1 of them from standby")
    job.seen(r"up (\d+)", times=2)
    job.signal(signal.SIGINT)
    assert job.finish() == 130


def test_standby_beside_workers_that_never_rest(launch, script):
    """Where the CPU hardly rests, a standby is made all the same, little by little, and is good when it is needed."""
    text = """
import multiprocessing, os, time
def spin():
    while True:
        end = time.monotonic() + 0.034
        while time.monotonic() < end: pass
        time.sleep(0.006)
if __name__ == "__main__":
    for _ in range(os.cpu_count()): multiprocessing.Process(target=spin, daemon=True).start()
    print("up", os.getpid(), flush=True)
    spin() if os.environ["ELASTIC_GENERATION"] == "1" else os._exit(0)
"""
    job = launch("--framework", "plain", "--max-restarts", 1, "--preload", "decimal", script(text))
    job.seen("standbys are ready")
    os.kill(int(job.seen(r"up (\d+)").group(1)), signal.SIGKILL)
    assert job.finish() == 0
    assert "generation 2: 1 worker(s) started, 1 of them from standby" in job.text
    job.gone()
