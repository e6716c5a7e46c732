"""The examples do what they say."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_training_that_was_killed_ends_with_the_same_weights(launch, tmp_path):
    """A training killed in the middle ends bit-equal to one that was left alone."""
    import torch

    flags = (
        "--framework",
        "torch",
        "--nproc-per-node",
        2,
        "--max-restarts",
        1,
        "--no-standby",
        EXAMPLES / "train_torch.py",
    )
    quiet = launch(*flags, "--steps", 60, "--checkpoint", tmp_path / "quiet.pt")
    assert quiet.finish() == 0
    killed = launch(*flags, "--steps", 60, "--checkpoint", tmp_path / "killed.pt", "--step-seconds", 0.05)
    pid = int(killed.seen(r"rank 1 of 2 starts at step 0 \(pid (\d+)\)").group(1))
    killed.seen("step 20 loss")
    os.kill(pid, signal.SIGKILL)
    assert killed.finish() == 0
    resumed = int(killed.seen(r"rank 1 of 2 starts at step (\d+)", times=2).group(1))
    assert resumed >= 20
    expected, got = (torch.load(tmp_path / name, weights_only=True) for name in ("quiet.pt", "killed.pt"))
    assert expected["step"] == got["step"] == 60
    assert all(torch.equal(expected["model"][name], got["model"][name]) for name in expected["model"])


@pytest.mark.timeout(120)
def test_demo():
    """The demo kills a worker and shows that training goes on from its checkpoint."""
    shown = subprocess.run(
        [sys.executable, str(EXAMPLES / "demo.py")], capture_output=True, text=True, timeout=110, check=False
    )
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "kill -9" in shown.stdout
    assert "was killed by SIGKILL; restart 1 of 3" in shown.stdout
    assert "training went on to step 240" in shown.stdout
