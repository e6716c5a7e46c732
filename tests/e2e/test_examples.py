"""The examples do what they say."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


READ = {
    "torch": "import torch; state = torch.load(sys.argv[1] + '/model.pt', weights_only=True)",
    "paddle": "import paddle; state = paddle.load(sys.argv[1] + '/model.pdparams')",
}
SHOW = "for name, value in state.items(): print(name, value.numpy().tobytes().hex())"


def weights(framework, path):
    """Each parameter's bytes as of the last step, read by the framework itself in a process of its own."""
    program = f"import sys\n{READ[framework]}\n{SHOW}"
    (newest,) = path.glob("step-000000000060-gen-*")
    argv = [sys.executable, "-c", program, str(newest)]
    shown = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout
    found = [line for line in shown.splitlines() if re.match("[02]\\.(weight|bias) ", line)]
    assert len(found) == 4, shown
    return found


@pytest.mark.timeout(120)
def test_training_that_was_killed_ends_with_the_same_weights(launch, tmp_path, framework):
    """A training killed in the middle ends bit-equal to one that was left alone."""
    script = EXAMPLES / f"train_{framework}.py"
    flags = ("--framework", framework, "--nproc-per-node", 2, "--max-restarts", 1, "--no-standby", script)
    quiet = launch(*flags, "--steps", 60, "--checkpoint", tmp_path / "quiet")
    assert quiet.finish() == 0
    killed = launch(*flags, "--steps", 60, "--checkpoint", tmp_path / "killed", "--step-seconds", 0.05)
    pid = int(killed.seen(r"rank 1 of 2 starts at step 0 \(pid (\d+)\)").group(1))
    killed.seen("checkpoint of step 20 is committed")
    os.kill(pid, signal.SIGKILL)
    assert killed.finish() == 0
    resumed = int(killed.seen(r"rank 1 of 2 starts at step (\d+)", times=2).group(1))
    assert resumed >= 20
    assert weights(framework, tmp_path / "quiet") == weights(framework, tmp_path / "killed")


# The first generation waits to be killed; the second one trains.
SECOND_TRAINS = """
import os, runpy, sys, time
if os.environ["ELASTIC_GENERATION"] == "1":
    print("up", os.getpid(), flush=True)
    time.sleep(600)
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


@pytest.mark.quiet
@pytest.mark.timeout(120)
def test_woken_standbys_train_to_the_same_weights_as_fresh_processes(launch, script, tmp_path, framework):
    """What a framework reads while it is imported, and what it makes then, is the same in a process that waited."""
    train = (script(SECOND_TRAINS), EXAMPLES / f"train_{framework}.py", "--steps", 60, "--checkpoint")
    flags = ("--framework", framework, "--nproc-per-node", 2, "--max-restarts", 1)
    fresh = launch(*flags, "--no-standby", *train, tmp_path / "fresh")
    woken = launch(*flags, *train, tmp_path / "woken")
    woken.seen("standbys are ready")
    for job, from_standby in ((fresh, 0), (woken, 2)):
        os.kill(int(job.seen(r"up (\d+)")[1]), signal.SIGKILL)
        assert job.finish() == 0, job.text
        job.seen(f"generation 2: 2 worker.s. started, {from_standby} of them from standby")
    assert weights(framework, tmp_path / "fresh") == weights(framework, tmp_path / "woken")


@pytest.mark.quiet
@pytest.mark.timeout(120)
def test_demo(framework):
    """The demo kills a worker and shows that training goes on from its checkpoint."""
    argv = [sys.executable, str(EXAMPLES / "demo.py"), framework]
    shown = subprocess.run(argv, capture_output=True, text=True, timeout=110, check=False)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "kill -9" in shown.stdout
    assert "was killed by SIGKILL; restart 1 of 3" in shown.stdout
    assert "training went on to step 240" in shown.stdout
