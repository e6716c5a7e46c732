"""Scripts that train one thing after the other, or go back in the midst of it. Torch and paddle."""

from __future__ import annotations

import os

import pytest

from elastic_adapter.core.checkpoint.manifest import folder_name, newest_first, parse_folder
from helpers.frameworks import SCRIPTS

pytestmark = pytest.mark.timeout(150)

BEGIN = """
import os, signal, sys
{begin}
from {framework} import nn
from elastic_adapter.adapters.{adapter} import Checkpointer, NotSaved
rank, size = join()
root, how = sys.argv[1:]
generation = os.environ["ELASTIC_GENERATION"]
model = nn.Linear(3, 3)

def fill(value):
    model.set_state_dict({{name: paddle.full_like(each, value) for name, each in model.state_dict().items()}})
"""

FILL = """
def fill(value):
    for each in model.parameters():
        nn.init.constant_(each, value)
"""

PHASES = """
for phase, total in (("warmup", 6), ("finetune", 10)):
    with Checkpointer(f"{root}/{phase}", model=model, every_steps=2) as ckpt:
        start = ckpt.restore()
        print(f"generation {generation} rank {rank}: {phase} begins at {start}", flush=True)
        for step in range(start, total):
            summed([1.0])
            ckpt.step(step)
            if phase == "finetune" and step == 6 and generation == "1":
                ckpt.settled()
                summed([1.0])
                os.kill(os.getpid(), signal.SIGKILL)
"""

BACK = """
ckpt = Checkpointer(root, model=model, every_steps=2)
start = ckpt.restore()
for turn in range(3):
    for step in range(start, start + 5):
        fill(step + 1.0)
        summed([1.0])
        ckpt.step(step)
    fill(float("nan"))
    if how == "closed":
        ckpt.close()
    if how != "on":
        ckpt = None
        ckpt = Checkpointer(root, model=model, every_steps=2)
    start = ckpt.restore()
    print(f"rank {rank} goes back to {start}: {model.weight.reshape([9])[0].item()}", flush=True)
"""

AGAIN = """
ckpt = Checkpointer(root, model=model)
ckpt.restore()
for step, goes_back in ((3, False), (5, False), (5, True), (7, False)):
    if goes_back:
        ckpt.restore(f"{root}/step-000000000004-gen-000001")
    try:
        print(f"rank {rank} saves {step + 1}: {ckpt.save(step, wait=True)}", flush=True)
    except NotSaved as error:
        print(f"rank {rank}: {error}", flush=True)
"""


@pytest.fixture
def train(launch, framework, script, tmp_path):
    def start(text, how):
        adapter = {"torch": "pytorch", "paddle": "paddlepaddle"}[framework]
        begin = BEGIN.format(begin=SCRIPTS[framework], framework=framework, adapter=adapter)
        path = script(begin + (FILL if framework == "torch" else "") + text)
        flags = ("--framework", framework, "--nproc-per-node", 2, "--max-restarts", 1, "--no-standby")
        return launch(*flags, path, tmp_path / "checkpoints", how)

    return start


def steps(folder):
    return [parse_folder(name)[0] for name in newest_first(os.listdir(folder))]


def test_one_phase_after_the_other(train, tmp_path):
    """Each has its folder, and goes on from what is in there, whether or not it is the one that the launcher keeps."""
    root = tmp_path / "checkpoints"
    job = train(PHASES, "")
    assert job.finish(60) == 0, job.text
    for generation, begins in ((1, {"warmup": 0, "finetune": 0}), (2, {"warmup": 6, "finetune": 6})):
        for phase, step in begins.items():
            job.seen(rf"generation {generation} rank \d: {phase} begins at {step}$", times=2)
    job.seen("the launcher keeps the checkpoints of .*warmup; those of .*finetune are saved .* as without it")
    again = train(PHASES, "")
    assert again.finish(60) == 0, again.text
    again.seen("warmup begins at 6$", times=2)
    again.seen("finetune begins at 10$", times=2)
    assert (steps(root / "warmup"), steps(root / "finetune")) == ([6, 4, 2], [10, 8, 6, 4, 2])


@pytest.mark.parametrize("how", ["on", "closed", "dropped"])
def test_going_back_in_the_midst_of_it(train, tmp_path, how):
    """All ranks go back to what was saved last, and on from there; nobody to what the world began with.

    Also with another Checkpointer, whether or not the last one was closed: what that has saved is waited for.
    """
    job = train(BACK, how)
    assert job.finish(60) == 0, job.text
    for step in (4, 8, 12):
        job.seen(rf"rank \d goes back to {step}: {step}\.0$", times=2)
    assert steps(tmp_path / "checkpoints") == [12, 10, 8, 6, 4, 2]


def test_a_step_that_was_committed_before(train, tmp_path):
    """What is there stays as it is; nobody is told that another state of it is saved."""
    job = train(AGAIN, "")
    assert job.finish(60) == 0, job.text
    for step in (4, 6, 8):
        job.seen(rf"rank \d saves {step}: True$", times=2)
    job.seen(r"rank \d: step 6 is not saved: this generation has committed it before, and that stays", times=2)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == [folder_name(step, 1) for step in (4, 6, 8)]
