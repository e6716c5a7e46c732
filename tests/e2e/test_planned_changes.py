"""A planned change loses no step: who is told to stop, or makes room for others, saves before. Torch and paddle."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import time

import pytest

from helpers.fleet import Fleet
from helpers.saving_scripts import TRAININGS, Training

pytestmark = pytest.mark.timeout(180)
WITHIN_S = 60.0


def written(framework, tmp_path):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    path = tmp_path / "train.py"
    path.write_text(TRAININGS[framework])
    return path


def once(training):
    """The steps that were done, each of which every rank of one world did, and nobody again."""
    steps = {}
    for each in training.used():
        steps.setdefault(each.step, []).append(each)
    for step, ranks in steps.items():
        assert len({each.generation for each in ranks}) == 1, f"step {step} was done again: {ranks}"
        assert [each.rank for each in sorted(ranks, key=lambda each: each.rank)] == list(range(len(ranks)))
    assert sorted(steps) == list(range(len(steps)))
    return len(steps)


@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_sigterm_and_start_again(launch, framework, tmp_path):
    """A job that is told to stop saves at its next step, and stops there; started again, it goes on with the next."""
    script, training = written(framework, tmp_path), Training(tmp_path, "stopped")
    rng = random.Random(1)
    command = ("--framework", framework, "--nproc-per-node", 2, "--no-standby", script, *training.args(150, 0.01, 1000))
    for _ in range(2):
        first = launch(*command)
        first.seen(r"begins at step", times=2)
        # Nobody knows of the very first step whether it can be asked to save.
        while sum(each.step == 1 for each in training.used()) < 2:
            time.sleep(0.01)
        time.sleep(rng.uniform(0.05, 0.4))
        first.signal(signal.SIGTERM)
        assert first.finish() == 128 + signal.SIGTERM, first.text
        first.gone()
        done = once(training)
        assert first.seen(r"checkpoint of step (\d+) is committed")[1] == str(done)
        assert training.committed()[0] == done
    last = launch(*command)
    assert last.finish() == 0, last.text
    assert last.seen(r"rank 0 of 2 begins at step (\d+)")[1] == str(done)
    assert once(training) == 150
    training.check_samples()


@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_sigterm_after_the_last_step(launch, framework, tmp_path):
    """A training that is done has nothing to stop; but its last checkpoint is still to be written, and is."""
    script, training = written(framework, tmp_path), Training(tmp_path, "done")
    training.let(9)
    job = launch("--framework", framework, "--no-standby", script, *training.args(10, 0.0, 10))
    job.seen("begins at step 0")
    saver = job.saver()
    os.kill(saver, signal.SIGSTOP)
    training.let(10)
    job.seen("the job is over; the checkpoint of step 10 is still being written")
    job.signal(signal.SIGTERM)
    job.seen("SIGTERM received")
    # Longer than a signal takes that ends the job at once.
    time.sleep(1.0)
    os.kill(saver, signal.SIGCONT)
    assert job.finish() == 0, job.text
    assert training.committed() == [10]
    assert once(training) == 10


@pytest.mark.parametrize("join", ["immediate", "checkpoint"])
@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_nodes_join_and_leave(etcd, fleets, framework, join, tmp_path):
    """Each change of the world begins where the last one ended, without a checkpoint that was due anyway."""
    script, training = written(framework, tmp_path), Training(tmp_path, "elastic")
    flags = ("--join", join, "--quiet-time", 0.5, "--no-standby")
    job = fleets(Fleet(tmp_path, etcd.endpoint, "1:3", *flags, framework=framework, program=script))
    job.trains_with(training.out, script, *training.args(10**6, 0.01, 100000))
    job.start("a")
    job.trains("a", within_s=WITHIN_S)
    job.start("b")
    job.trains("a", "b", within_s=WITHIN_S)
    job.start("c")
    job.trains("a", "b", "c", within_s=WITHIN_S)
    leaver = job.nodes.pop("b")
    leaver.signal(signal.SIGTERM)
    assert leaver.finish() == 128 + signal.SIGTERM, leaver.text
    job.trains("a", "c", within_s=WITHIN_S)
    (training.out / "stop").touch()
    assert {node.finish() for node in job.nodes.values()} == {0}, job.text
    once(training)
    assert len(training.committed()) >= 3
    training.check_samples()


def test_a_joiner_that_goes_again(etcd, fleets, tmp_path):
    """Workers that were held for it go on."""
    script, training = written("torch", tmp_path), Training(tmp_path, "elastic")
    flags = ("--join", "checkpoint", "--quiet-time", 0.2, "--no-standby")
    job = fleets(Fleet(tmp_path, etcd.endpoint, "1:2", *flags, framework="torch", program=script))
    job.trains_with(training.out, script, *training.args(10**6, 0.01, 100000))
    node = job.start("a")
    job.trains("a", within_s=WITHIN_S)
    saver = node.saver()
    os.kill(saver, signal.SIGSTOP)
    job.start("b")
    node.seen("all ranks are asked to save: nodes join")
    job.until(lambda: time.time() - job.steps()[-1].at > 0.5, "a world that holds")
    job.kill("b")
    job.trains("a", within_s=WITHIN_S)
    os.kill(saver, signal.SIGCONT)
    (training.out / "stop").touch()
    assert node.finish() == 0, node.text
    assert once(training)
    assert job.generations() == [1]


def test_a_worker_dies_before_it_saves(etcd, fleets, tmp_path):
    """It is a failure like any other, and the log says why: not only a part of the change that was planned."""
    script, training = written("torch", tmp_path), Training(tmp_path, "elastic")
    flags = ("--quiet-time", 0.2, "--no-standby", "--max-restarts", 1)
    job = fleets(Fleet(tmp_path, etcd.endpoint, "1:2", *flags, framework="torch", program=script))
    job.trains_with(training.out, script, *training.args(10**6, 0.01, 100000))
    training.let(20)
    node = job.start("a")
    pid = int(node.seen(r"begins at step 0, pid (\d+)")[1])
    job.until(lambda: job.steps() and job.steps()[-1].step == 19, "a world that waits")
    job.start("b")
    node.seen("all ranks are asked to save: nodes join")
    os.kill(pid, signal.SIGKILL)
    node.seen(r"was killed by SIGKILL.*restart 1 of 1")
    training.let(10**6)
    job.trains("a", "b", within_s=WITHIN_S)
    (training.out / "stop").touch()
    assert {each.finish() for each in job.nodes.values()} == {0}, job.text
