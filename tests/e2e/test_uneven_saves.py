"""Trainings that do not save as they should, on all ranks at each step: what they are told, and what they leave behind."""

from __future__ import annotations

import importlib.util
import os
import signal
import time

import pytest

from elastic_adapter.core.checkpoint.manifest import folder_name

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]

BEGIN = """
import os, sys, time
import torch
from elastic_adapter.adapters.pytorch import Checkpointer, NotSaved

torch.set_num_threads(1)
root, rank = sys.argv[1], int(os.environ["RANK"])
model = torch.nn.Linear(2, 2)
"""


@pytest.fixture
def train(launch, script, tmp_path):
    """Two ranks run this, without a group: what matters is when they save."""
    root = tmp_path / "checkpoints"

    def start(text, *flags):
        path = script(BEGIN + text)
        return launch("--framework", "torch", "--nproc-per-node", 2, "--no-standby", *flags, path, root), root

    return start


def drafts(root):
    return [name for name in os.listdir(root) if "elastic-tmp" in name]


def test_only_rank_0_saves(train):
    """There is no checkpoint, and it is said why; few drafts are there at a time."""
    launched, root = train("""
if rank == 0:
    ckpt = Checkpointer(root, model=model, every_steps=1)
    for step in range(20):
        ckpt.step(step)
        time.sleep(0.05)
    for _ in range(200):
        if len([each for each in os.listdir(root) if "elastic-tmp" in each]) == 4:
            print("four drafts")
            break
        time.sleep(0.05)
    ckpt.close()
open(f"{root}.{rank}", "w").close()
while not os.path.exists(f"{root}.{1 - rank}"):
    time.sleep(0.05)
""")
    assert launched.finish() == 0, launched.text
    launched.seen("no checkpoint of step 1: rank 1 of 2 did not save there; do all ranks make a Checkpointer and call")
    launched.seen("four drafts")
    assert not any((root / folder_name(step, 1)).exists() for step in range(21))


def test_one_rank_can_not_write(train):
    """All that wait are told so; the other rank's part is removed, and the next save is another try."""
    launched, root = train("""
ckpt = Checkpointer("/dev/null/nowhere" if rank else root, model=model)
for step in range(2):
    try:
        ckpt.save(step, wait=True)
        print("saved")
    except NotSaved as error:
        print(f"rank {rank} says: {error}")
""")
    assert launched.finish() == 0, launched.text
    for step in (1, 2):
        launched.seen(rf"rank \d says: step {step} is not saved: rank 1 on .*: /dev/null.*Not a directory", times=2)
    assert "saved\n" not in launched.text
    assert drafts(root) == []


def test_a_script_that_saves_by_itself(train):
    """It can't be asked to: it is stopped without a wait for an answer."""
    launched, root = train("""
ckpt = Checkpointer(root, model=model)
ckpt.restore()
ckpt.save(0, wait=True)
print("trains")
time.sleep(100)
""")
    launched.seen("trains", times=2)
    begun = time.monotonic()
    launched.signal(signal.SIGTERM)
    assert launched.finish() == 128 + signal.SIGTERM, launched.text
    assert time.monotonic() - begun < 20
    assert "asked to save" not in launched.text
    assert os.listdir(root) == [folder_name(1, 1)]


def test_steps_that_are_not_told_one_by_one(train):
    """Who is asked to save does so at the next step that it tells of."""
    launched, root = train("""
ckpt = Checkpointer(root, model=model)
step = ckpt.restore()
while True:
    for _ in range(4):
        time.sleep(0.01)
        step += 1
    ckpt.step(step - 1)
    if step == 20:
        print("trains")
""")
    launched.seen("trains", times=2)
    launched.signal(signal.SIGTERM)
    assert launched.finish() == 128 + signal.SIGTERM, launched.text
    step = int(launched.seen(r"checkpoint of step (\d+) is committed")[1])
    assert step % 4 == 0
    assert os.listdir(root) == [folder_name(step, 1)]
