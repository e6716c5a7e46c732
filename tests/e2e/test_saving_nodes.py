"""Checkpoints of a job on several nodes, in a real etcd: whoever dies or leaves in the middle of one."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from helpers.fleet import HERE, LAUNCHER, Fleet
from helpers.saving_scripts import TRAININGS, Training

pytestmark = pytest.mark.timeout(240)
WITHIN_S = 60.0
# Each tenth step is saved.
EVERY = 10


@pytest.fixture
def script(tmp_path):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    path = tmp_path / "train.py"
    path.write_text(TRAININGS["torch"])
    return path


@pytest.fixture
def training(tmp_path):
    return Training(tmp_path, "nodes")


@pytest.fixture
def fleet(etcd, fleets, script, training, tmp_path):
    """A job that trains so: ``fleet("1:3", steps, "--a-flag", every=10, and further arguments of the Checkpointer)``."""

    def make(nnodes, steps, *flags, every=EVERY, **more):
        job = Fleet(tmp_path, etcd.endpoint, nnodes, "--no-standby", *flags, framework="torch", program=script)
        job.trains_with(training.out, script, *training.args(steps, 0.01, every, **more))
        return fleets(job)

    return make


def reaches(job, training, step):
    """Let the training get there, and wait until all ranks of the last world have."""
    training.let(step)

    def there():
        steps = job.steps()
        last = [each for each in steps if each.generation == steps[-1].generation]
        return {each.rank for each in last if each.step == step - 1} == set(range(last[0].size))

    job.until(there, f"step {step}", WITHIN_S)


def is_in_flight(training, step, rank):
    """Whether this rank has written its part of a checkpoint that has no name yet."""
    return any(training.root.glob(f".step-*{step:03d}-gen-*.elastic-tmp/rank-{rank:05d}.pt"))


def folders(training, step):
    return sorted(path.name for path in training.root.glob(f"step-*{step:03d}-gen-*"))


class TestTheLeaderDies:
    """In the middle of a save: the others go on from the one before, and the one in the middle is never seen."""

    def saves_at(self, job, training, host, step):
        """A save of this step is surely not done: rank 0's part can't be written."""
        stopped = job.nodes[host].saver()
        os.kill(stopped, signal.SIGSTOP)
        reaches(job, training, step + 5)
        job.until(lambda: is_in_flight(training, step, 1), "the part of rank 1", WITHIN_S)
        return stopped

    def ends_well(self, job, training, steps):
        training.let(steps)
        assert {node.finish(WITHIN_S) for node in job.nodes.values()} == {0}, job.text
        assert {end["step"] for end in training.ends.values()} == {steps}
        training.check_samples()

    def test_on_rank_0s_node(self, fleet, training):
        """What is left of it is a draft, which nobody finishes."""
        job = fleet("1:2", 60)
        training.let(15)
        job.start_in_order("a", "b")
        job.nodes["a"].seen("checkpoint of step 10 is committed")
        self.saves_at(job, training, "a", 20)
        since = job.kill("a")
        survivor = job.nodes["b"]
        survivor.seen("the leader a is gone .*: this node takes its place")
        assert survivor.seen(r"generation 2 rank 0 of 1 begins at step (\d+)")[1] == "10"
        training.let(40)
        assert job.trains("b", since=since, within_s=WITHIN_S) == 2
        self.ends_well(job, training, 60)
        assert training.committed() == [60, 50, 40, 30, 20, 10]
        assert folders(training, 20) == ["step-000000000020-gen-000002"]

    def test_on_another_node(self, fleet, training):
        """Rank 0's node leads then; what it writes late of the old world does not become a checkpoint."""
        job = fleet("1:3", 60)
        training.let(5)
        job.start_in_order("a", "b", "c")
        job.trains("a", "b", "c", since=0.0, within_s=WITHIN_S)
        # The one that is to have rank 0 does not hear of it in time to lead.
        os.kill(job.nodes["b"].process.pid, signal.SIGSTOP)
        job.kill("a")
        job.nodes["c"].seen("the leader a is gone .*: this node takes its place")
        os.kill(job.nodes["b"].process.pid, signal.SIGCONT)
        job.until(lambda: job.generations()[-1] == 2, "a world of b, c", WITHIN_S)
        reaches(job, training, 15)
        job.nodes["c"].seen("checkpoint of step 10 is committed")
        stopped = self.saves_at(job, training, "b", 20)
        job.kill("c")
        survivor = job.nodes["b"]
        survivor.seen("the leader c is gone .*: this node takes its place")
        assert survivor.seen(r"generation 3 rank 0 of 1 begins at step (\d+)")[1] == "10"
        os.kill(stopped, signal.SIGCONT)
        self.ends_well(job, training, 60)
        assert training.committed() == [60, 50, 40, 30, 20, 10]
        assert folders(training, 20) == ["step-000000000020-gen-000003"]


def events(job):
    """What ``elastic-launch events`` shows of this job, by kind."""
    argv = [*LAUNCHER, "events", "--job", job.job, "--rdzv-endpoint", job.endpoint, "--json"]
    shown = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=True)
    found = {}
    for each in json.loads(shown.stdout):
        found.setdefault(each["kind"], []).append(each["text"])
    return found


def test_events_tell_of_checkpoints(fleet, training):
    """Those that were committed, and why one was not; the training goes on, and the next one is another try."""
    job = fleet("1", 40, "--nproc-per-node", 2)
    training.let(15)
    node = job.start("a")
    node.seen("checkpoint of step 10 is committed")
    # A folder that is no folder any more: nobody can write to it, whoever he is.
    elsewhere = training.root.with_name("elsewhere")
    training.root.rename(elsewhere)
    training.root.touch()
    training.let(25)
    node.seen("no checkpoint of step 20")
    training.root.unlink()
    elsewhere.rename(training.root)
    training.let(40)
    assert node.finish(WITHIN_S) == 0, node.text
    told = events(job)["checkpoint"]
    committed = f"is committed: {training.root}/step-0000000000"
    assert [each for each in told if f"checkpoint of step 10 {committed}10-gen-000001" in each]
    assert [each for each in told if f"checkpoint of step 40 {committed}40-gen-000001" in each]
    trouble = [each for each in told if each.startswith("no checkpoint of step 20: rank ")]
    assert trouble
    assert all(" on a: " in each and str(training.root) in each for each in trouble)
    assert training.committed() == [40, 30, 10]


def test_every_so_many_minutes(fleet, training):
    """Rank 0's clock says when; all ranks save at one step, on all nodes, without a word in the script."""
    job = fleet("2", 10**6, every=0, every_minutes=0.01)
    for name in ("a", "b"):
        job.start(name)
    job.trains("a", "b", within_s=WITHIN_S)
    job.until(lambda: len(training.committed()) >= 4, "four checkpoints", WITHIN_S)
    (training.out / "stop").touch()
    assert {node.finish(WITHIN_S) for node in job.nodes.values()} == {0}, job.text
    steps = training.committed()
    assert len(steps) == len(set(steps)) >= 4
    for step in steps:
        (folder,) = training.root.glob(f"step-{step:012d}-gen-000001")
        assert {path.name for path in folder.glob("rank-*")} == {"rank-00000.pt", "rank-00001.pt"}
    assert "(every_minutes=0.01)" in job.text
    training.check_samples()


def test_a_node_that_leaves_while_workers_hold(fleet, training):
    """They hold for a newcomer, for longer than who leaves would wait: it is told that it is heard, and waits."""
    impatient = [sys.executable, str(HERE / "impatient.py"), "2"]
    flags = ("--join", "checkpoint", "--quiet-time", 0.2, "--drain-timeout", 10)
    job = fleet("2:3", 10**6, *flags, every=0)
    job.start_in_order("a", "b", launcher=impatient)
    job.trains("a", "b", within_s=WITHIN_S)
    leaver = job.nodes["b"]
    stopped = leaver.saver()
    os.kill(stopped, signal.SIGSTOP)
    job.start("c")
    leaver.seen("workers are asked to save: nodes join")
    held_at = time.monotonic()
    job.until(lambda: time.monotonic() > held_at + 10.5, "a hold that is longer than the timeout")
    leaver.signal(signal.SIGTERM)
    leaver.seen("waiting: the checkpoint that all ranks were asked for is waited for")
    time.sleep(3.0)
    assert leaver.process.poll() is None, leaver.text
    os.kill(stopped, signal.SIGCONT)
    assert job.nodes.pop("b").finish() == 128 + signal.SIGTERM, leaver.text
    begun = job.nodes["a"].seen(r"generation 2 rank 0 of 2 begins at step (\d+)")
    assert training.committed()[0] == int(begun[1]) > 0
    job.trains("a", "c", within_s=WITHIN_S)
    (training.out / "stop").touch()
    assert {node.finish(WITHIN_S) for node in job.nodes.values()} == {0}, job.text
    training.check_samples()
