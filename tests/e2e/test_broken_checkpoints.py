"""What can go wrong with checkpoints under the launcher: broken ones, late ones, full disks, and savers that are slow."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time

import pytest

from elastic_adapter.core.checkpoint.manifest import folder_name
from helpers.fleet import Fleet
from helpers.saving_scripts import TRAININGS, Training

pytestmark = pytest.mark.timeout(120)
# How each framework ends the names of its files.
ENDS = {"torch": "pt", "paddle": "pdparams"}


@pytest.fixture
def script(framework, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(TRAININGS[framework])
    return path


@pytest.fixture
def training(tmp_path):
    return Training(tmp_path, "one")


@pytest.fixture
def train(launch, framework, script):
    """Start it on this machine, with two workers."""

    def start(training, steps, *flags, step_s=0.005, every=5, **more):
        command = ("--framework", framework, "--nproc-per-node", 2, "--no-standby", *flags)
        return launch(*command, script, *training.args(steps, step_s, every, **more))

    return start


def flip(path, at=-200):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_the_newest_is_broken(train, framework, training):
    """It is named and put aside, and all ranks go on from the one before; if none is whole, nobody begins from zero."""
    model, rank_1 = f"model.{ENDS[framework]}", f"rank-00001.{ENDS[framework]}"
    first = train(training, 15)
    assert first.finish() == 0, first.text
    assert training.committed() == [15, 10, 5], first.text
    flip(training.root / folder_name(15, 1) / model)
    again = train(training, 20)
    assert again.finish() == 0, again.text
    again.seen(rf"{folder_name(15, 1)} is broken: .*{model}.*kept as {folder_name(15, 1)}\.broken")
    # Also in the job's own words, which are kept as an event.
    again.seen(rf"\[coordinator\] rank 0 on .*{folder_name(15, 1)} is broken")
    again.seen("begins at step 10", times=2)
    assert training.committed() == [20, 15, 10, 5]
    for step in (20, 15, 10, 5):
        os.truncate(training.root / folder_name(step, 1) / rank_1, 10)
    hopeless = train(training, 25)
    assert hopeless.finish() != 0
    hopeless.seen("no checkpoint in .* is whole")
    third = train(training, 25, "--max-restarts", 1)
    assert third.finish() != 0, "what was put aside is not forgotten"
    assert "begins at step" not in hopeless.text + third.text


def test_a_rank_that_can_not_load(etcd, fleets, framework, script, training):
    """It reports it, and all begin anew from the one before, uncharged; no rank falls back alone."""
    folder = script.parent
    first = Fleet(folder, etcd.endpoint, "2", "--no-standby", framework=framework, program=script)
    first.trains_with(training.out, script, *training.args(15, 0.0))
    fleets(first).start("a")
    first.start("b")
    assert {node.finish() for node in first.nodes.values()} == {0}, first.text
    assert training.committed() == [15, 10, 5], first.text
    elsewhere = Training(folder, "elsewhere")
    shutil.copytree(training.root, elsewhere.root)
    flip(elsewhere.root / folder_name(15, 1) / f"model.{ENDS[framework]}")
    job = fleets(Fleet(folder, etcd.endpoint, "2", "--no-standby", framework=framework, program=script))
    job.trains_with(training.out, script)
    # The first one has rank 0, and finds it whole.
    job.start("a", script=training.args(17, 0.0, 0)).seen("this node leads")
    job.start("b", script=(elsewhere.root, *training.args(17, 0.0, 0)[1:]))
    assert {node.finish() for node in job.nodes.values()} == {0}, job.text
    assert f"can't restore {folder_name(15, 1)}" in job.text
    for node in job.nodes.values():
        node.seen(r"generation 2 rank \d of 2 begins at step 10")
        assert "begins at step 15" not in "\n".join(line for line in node.lines if "rank 1 " in line)
    assert "restart 1 of" not in job.text
    assert (training.root / folder_name(15, 1)).exists(), "it was whole for rank 0"


def test_the_saver_outlives_the_worker(train, training):
    """What was staged before a worker died is committed, and the next generation waits for it."""
    training.let(10)
    launched = train(training, 20, "--max-restarts", 2, every=10)
    launched.seen(r"begins at step 0", times=2)
    # Too early for a save.
    os.kill(stopped := launched.saver(), signal.SIGSTOP)
    pids = [int(line.rpartition(" ")[2]) for line in launched.lines if "begins at step 0" in line]
    until_done(training, 10)
    os.kill(pids[1], signal.SIGKILL)
    launched.seen("waiting for the checkpoint of step 10, which is being written")
    os.kill(stopped, signal.SIGCONT)
    launched.seen("generation 2 rank . of 2 begins at step 10", times=2)
    training.let(20)
    assert launched.finish() == 0, launched.text
    assert training.committed() == [20, 10]


def test_the_launcher_sleeps_while_a_job_ends(train, training):
    """The last checkpoint is made although the launcher hears at once that it was staged, and that all have ended."""
    training.let(14)
    launched = train(training, 15)
    launched.seen(r"begins at step 0", times=2)
    workers = [int(line.rpartition(" ")[2]) for line in launched.lines if "begins at step 0" in line]
    until_committed(training, 10)
    os.kill(launched.process.pid, signal.SIGSTOP)
    try:
        training.let(15)
        until_gone(workers)
    finally:
        os.kill(launched.process.pid, signal.SIGCONT)
    assert launched.finish() == 0, launched.text
    assert training.committed() == [15, 10, 5], launched.text


def test_a_late_save_of_an_older_generation(train, training):
    """It never becomes a checkpoint: the next generation did not wait for it, and has its own."""
    training.let(10)
    launched = train(training, 20, "--max-restarts", 2, "--checkpoint-wait", 0.5, every=10)
    launched.seen(r"begins at step 0", times=2)
    os.kill(stopped := launched.saver(), signal.SIGSTOP)
    pids = [int(line.rpartition(" ")[2]) for line in launched.lines if "begins at step 0" in line]
    until_done(training, 10)
    os.kill(pids[0], signal.SIGKILL)
    launched.seen("is not waited for any longer")
    launched.seen("generation 2 rank . of 2 begins at step 0", times=2)
    os.kill(stopped, signal.SIGCONT)
    training.let(20)
    assert launched.finish() == 0, launched.text
    assert sorted(os.listdir(training.root)) == [folder_name(10, 2), folder_name(20, 2)]


def until_committed(training, step):
    end = time.monotonic() + 30
    while training.committed()[:1] != [step]:
        assert time.monotonic() < end, f"no checkpoint of step {step}"
        time.sleep(0.01)


def until_gone(pids):
    end = time.monotonic() + 30
    while alive := [pid for pid in pids if os.path.exists(f"/proc/{pid}")]:
        assert time.monotonic() < end, f"{alive} did not end"
        time.sleep(0.01)


def until_done(training, steps):
    end = time.monotonic() + 30
    while time.monotonic() < end:
        done = [each.step for each in training.used()]
        if done.count(steps - 1) == 2:
            # The step is done, and what it is saved as is staged in a moment.
            time.sleep(0.5)
            return
        time.sleep(0.01)
    pytest.fail(f"step {steps - 1} was not done")


def test_the_launcher_is_killed_in_the_middle_of_a_save(train, training):
    """What it left half done is swept by the next start, at once."""
    launched = train(training, 10**6, step_s=0.0, every=1)
    launched.seen("checkpoint of step 10 is committed")
    os.kill(stopped := launched.saver(), signal.SIGSTOP)
    while not (left := drafts(training.root)):
        # It was between two saves.
        os.kill(stopped, signal.SIGCONT)
        time.sleep(0.01)
        os.kill(stopped, signal.SIGSTOP)
    launched.signal(signal.SIGKILL)
    launched.finish()
    launched.gone()
    assert drafts(training.root) == left
    again = train(training, training.committed()[0] + 1, every=10**6)
    assert again.finish() == 0, again.text
    assert drafts(training.root) == []


def drafts(root):
    return [name for name in os.listdir(root) if name.startswith(".")]


def test_the_saver_is_killed(train, training):
    """Another one takes its place, and nothing is lost."""
    training.let(10)
    launched = train(training, 30, every=5)
    launched.seen("checkpoint of step 10 is committed")
    os.kill(launched.saver(), signal.SIGKILL)
    training.let(30)
    assert launched.finish() == 0, launched.text
    assert training.committed()[0] == 30


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB."""
    if os.getuid() != 0:
        pytest.skip("only root can make a file system")
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", place], check=False)
    if mounted.returncode != 0:
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_the_disk_is_full(train, training, small_disk):
    """That is told in one line; the training goes on to its end, and the last good checkpoint is untouched."""
    training.root = small_disk / "checkpoints"
    launched = train(training, 100, every=10)
    assert launched.finish() == 0, launched.text
    launched.seen(r"no checkpoint of step \d+: .*No space left on device")
    assert {end["step"] for end in training.ends.values()} == {100}
    assert training.committed()[-1] == 10
    # With some room again, saving goes on where it is.
    for name in sorted(os.listdir(training.root))[:-1]:
        shutil.rmtree(training.root / name)
    last = training.committed()[0]
    again = train(training, 110, every=10, keep_last=1)
    assert again.finish() == 0, again.text
    again.seen(f"begins at step {last}", times=2)
    assert training.committed() == [110]
