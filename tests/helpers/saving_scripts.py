"""Trainings that save checkpoints, as a user would write them: torch's and paddle's, with everything that can differ.

    train.py CHECKPOINTS OUT STEPS STEP_SECONDS EVERY_STEPS [MORE]

What they end with depends on each step, its samples and each random number: two that took the same steps are equal to
the last bit. Each rank writes the samples that it used to OUT/<rank>.samples and a digest of all that it has to
OUT/<rank>.end. A file OUT/stop ends it early; with a number in OUT/limit, it waits before that step until the number
is another. MORE is JSON: further arguments of the Checkpointer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_adapter.core.checkpoint.store import Checkpoint, Store

_BEGIN = """
import hashlib, json, os, random, sys, time
import numpy as np
root, out, steps, step_s, every = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])
more = json.loads(sys.argv[6]) if len(sys.argv) > 6 else {}
os.makedirs(out, exist_ok=True)
SIZE, BATCH = 100, 4

def wait(step):
    while os.path.exists(f"{out}/limit"):
        with open(f"{out}/limit") as file:
            if step < int(file.read() or 0):
                return
        time.sleep(0.005)
"""

_TORCH = """
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from elastic_adapter.adapters.pytorch import Checkpointer, ElasticSampler

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 1))
torch.manual_seed(100 + rank)
replica = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.Adam(replica.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.97)
numbers = torch.Generator().manual_seed(2)
inputs = torch.randn(SIZE, 8, generator=numbers)
data = TensorDataset(torch.arange(SIZE), inputs, inputs.sum(dim=1, keepdim=True))
sampler = ElasticSampler(data, BATCH, rank=rank, world_size=size, seed=3)
loader = DataLoader(data, batch_sampler=sampler.batches(), generator=torch.Generator())

def learn(batch):
    indices, x, y = batch
    noise = random.random() + float(np.random.rand())
    loss = nn.functional.mse_loss(replica(x), y + 0.01 * noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    return indices.tolist(), loss.item()

def tensors():
    yield from (each.detach().numpy() for each in model.state_dict().values())
    for state in optimizer.state_dict()["state"].values():
        yield from (np.asarray(each) for each in state.values())
    yield torch.get_rng_state().numpy()
    yield np.asarray([scheduler.last_epoch, scheduler.get_last_lr()[0]])

def together(value):
    found = torch.tensor([float(value)])
    dist.all_reduce(found)
    return found.item()

def leave():
    dist.destroy_process_group()
"""

_PADDLE = """
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.io import DataLoader, TensorDataset
from elastic_adapter.adapters.paddlepaddle import Checkpointer, ElasticSampler

dist.init_parallel_env()
rank, size = dist.get_rank(), dist.get_world_size()
paddle.seed(1)
# No BatchNorm: unlike torch's, paddle's DataParallel lets the ranks' statistics differ, and rank 0's are saved.
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 1))
paddle.seed(100 + rank)
replica = paddle.DataParallel(model) if size > 1 else model
scheduler = paddle.optimizer.lr.StepDecay(0.01, 7, 0.97)
optimizer = paddle.optimizer.Adam(scheduler, parameters=replica.parameters())
inputs = paddle.to_tensor(np.random.RandomState(2).randn(SIZE, 8).astype("float32"))
data = TensorDataset([paddle.arange(SIZE), inputs, inputs.sum(axis=1, keepdim=True)])
sampler = ElasticSampler(SIZE, BATCH, rank=rank, world_size=size, seed=3)
loader = DataLoader(data, batch_sampler=sampler.batches())

def learn(batch):
    indices, x, y = batch
    noise = random.random() + float(np.random.rand())
    loss = nn.functional.mse_loss(replica(x), y + 0.01 * noise)
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    scheduler.step()
    return indices.tolist(), loss.item()

def tensors():
    yield from (each.numpy() for each in model.state_dict().values())
    state = optimizer.state_dict()
    # Paddle names what an optimizer keeps by parameters, in the order in which it has them.
    yield from (each.numpy() for each in state.values() if isinstance(each, paddle.Tensor))
    yield np.asarray(paddle.get_rng_state()[0].current_seed() if hasattr(paddle.get_rng_state()[0], "current_seed") else 0)
    yield paddle.rand([4]).numpy()
    yield np.asarray([scheduler.last_epoch, scheduler.last_lr])

def together(value):
    found = paddle.to_tensor([float(value)])
    if size > 1:
        dist.all_reduce(found)
    return found.item()

def leave():
    pass
"""

_END = """
local, node, generation = (os.environ.get(f"ELASTIC_{name}", "0") for name in ("LOCAL_RANK", "NODE", "GENERATION"))
random.seed(rank)
np.random.seed(rank)
ckpt = Checkpointer(
    root, model=replica, optimizer=optimizer, scheduler=scheduler, sampler=sampler, every_steps=every or None, **more
)
step = ckpt.restore()
used = open(f"{out}/{rank}.samples", "a", buffering=1)
log = open(f"{out}/{node}-{local}.steps", "a", buffering=1)
print(f"generation {generation} rank {rank} of {size} begins at step {step}, pid {os.getpid()}", flush=True)
loss, stop = 0.0, False
while step < steps and not stop:
    for batch in loader:
        wait(step)
        indices, loss = learn(batch)
        stop = together(rank == 0 and os.path.exists(f"{out}/stop")) > 0
        log.write(f"{time.time():.3f} {generation} {size} {rank} {step} {node}\\n")
        used.write(json.dumps([int(generation), step, sampler.epoch, indices]) + "\\n")
        time.sleep(step_s)
        ckpt.step(step)
        step += 1
        if step >= steps or stop:
            break
digest = hashlib.sha256()
for each in tensors():
    digest.update(np.ascontiguousarray(each).tobytes())
end = {"step": step, "epoch": sampler.epoch, "position": sampler.position, "padded": sampler.padded,
       "loss": loss, "random": random.random(), "numpy": float(np.random.rand()), "digest": digest.hexdigest()}
with open(f"{out}/{rank}.end", "w") as file:
    json.dump(end, file)
print(f"rank {rank} ends after step {step}", flush=True)
leave()
"""

TRAININGS = {"torch": _BEGIN + _TORCH + _END, "paddle": _BEGIN + _PADDLE + _END}


@dataclass(frozen=True)
class Used:
    """The samples that one rank used at one step."""

    rank: int
    generation: int
    step: int
    epoch: int
    samples: list[int]


class Training:
    """One training's folders: its checkpoints, and what its ranks wrote."""

    def __init__(self, folder: Path, name: str) -> None:
        self.root = folder / f"{name}-checkpoints"
        self.out = folder / f"{name}-out"

    def args(self, steps: int, step_s: float = 0.02, every: int = 5, **more: object) -> tuple[object, ...]:
        return self.root, self.out, steps, step_s, every, json.dumps(more)

    def let(self, limit: int) -> None:
        """Let it do so many steps."""
        self.out.mkdir(exist_ok=True)
        new = self.out / "limit.new"
        new.write_text(str(limit))
        new.rename(self.out / "limit")

    @property
    def ends(self) -> dict[str, dict[str, Any]]:
        return {path.stem: json.loads(path.read_text()) for path in sorted(self.out.glob("*.end"))}

    def committed(self) -> list[int]:
        """The steps of all checkpoints, each of which must be whole."""
        store, steps = Store(self.root), []
        for found in store.newest_first():
            assert isinstance(found, Checkpoint), found
            assert store.trouble(found) == ""
            steps.append(found.manifest.step)
        return steps

    def used(self) -> list[Used]:
        """What every rank did at every step."""
        return [
            Used(int(path.stem), *json.loads(line))
            for path in self.out.glob("*.samples")
            for line in path.read_text().splitlines(keepends=True)
            if line.endswith("\n")
        ]

    def history(self) -> dict[int, list[Used]]:
        """By step, what was used by the ranks that took it last: what a crash undid is not in it."""
        used = self.used()
        last: dict[int, int] = {}
        for each in used:
            last[each.step] = max(each.generation, last.get(each.step, 0))
        history: dict[int, list[Used]] = {}
        for each in used:
            if each.generation == last[each.step]:
                history.setdefault(each.step, []).append(each)
        return history

    def check_samples(self, size: int = 100) -> None:
        """In every whole epoch each sample was used once, but for the padding of its end, which was counted."""
        end, history = next(iter(self.ends.values())), self.history()
        epochs: dict[int, list[int]] = {}
        # Those beyond the end were undone by the last crash, and nobody has done them again.
        for step in range(end["step"]):
            for each in history[step]:
                epochs.setdefault(each.epoch, []).extend(each.samples)
        whole = [epoch for epoch in epochs if epoch < end["epoch"]]
        assert whole == list(range(len(whole))), whole
        for epoch in whole:
            assert set(epochs[epoch]) == set(range(size)), f"epoch {epoch}"
        assert sum(len(epochs[epoch]) - size for epoch in whole) == end["padded"]
        rest = epochs.get(end["epoch"], [])
        assert len(rest) == len(set(rest)) == end["position"]
