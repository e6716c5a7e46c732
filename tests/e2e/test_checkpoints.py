"""Trainings that are killed, replaced, resized and stopped end as if nothing had happened. Torch and paddle."""

from __future__ import annotations

import os
import random
import re
import signal
import time

import pytest

from helpers.fleet import Fleet
from helpers.saving_scripts import TRAININGS, Training

pytestmark = pytest.mark.timeout(240)
WITHIN_S = 60.0
SIZE = 100


@pytest.fixture
def script(framework, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(TRAININGS[framework])
    return path


@pytest.fixture
def training(tmp_path):
    return lambda name: Training(tmp_path, name)


def begun(launched, generation):
    """Wait until two ranks of this generation train; by rank, their pids and the step that they began at."""
    pattern = rf"generation {generation} rank (\d) of \d begins at step (\d+), pid (\d+)"
    launched.seen(pattern, times=2)
    found = [match for line in launched.lines if (match := re.search(pattern, line))]
    return {int(match[1]): (int(match[3]), int(match[2])) for match in found}


def test_killed_ten_times(launch, framework, script, training):
    """A worker is killed ten times, whenever that may be: the training ends bit-equal to one that was left alone."""
    rng = random.Random(6)
    plain, killed = training("plain"), training("killed")
    command = ("--framework", framework, "--nproc-per-node", 2, "--no-standby")
    quiet = launch(*command, script, *plain.args(220, 0.0))
    killed.let(20)
    launched = launch(*command, "--max-restarts", 10, script, *killed.args(220, 0.005, keep_last=3))
    for generation in range(1, 11):
        workers = begun(launched, generation)
        killed.let(20 * generation)
        time.sleep(rng.uniform(0.0, 0.5))
        os.kill(workers[rng.randrange(2)][0], signal.SIGKILL)
    begun(launched, 11)
    killed.let(220)
    assert (quiet.finish(WITHIN_S), launched.finish(WITHIN_S)) == (0, 0), launched.text
    assert killed.ends == plain.ends
    assert {end["step"] for end in killed.ends.values()} == {220}
    assert killed.committed() == [220, 215, 210]
    for each in (quiet, launched):
        each.gone()


@pytest.fixture
def fleet(etcd, tmp_path, fleets, framework, script):
    """A job of several nodes that trains like that: ``fleet(training, "2", steps, step_s, flags ...)``."""

    def make(training, nnodes, steps, step_s, *flags, every=5):
        made = Fleet(tmp_path, etcd.endpoint, nnodes, *flags, framework=framework, program=script)
        made.trains_with(training.out, script, *training.args(steps, step_s, every))
        return fleets(made)

    return make


def test_nodes_are_replaced(fleet, training):
    """A node is lost ten times, and another takes its place: bit-equal, too."""
    rng = random.Random(7)
    plain, lost = training("plain"), training("lost")
    lost.let(20)
    flags = ("--fault-tolerance-level", 1, "--no-standby")
    quiet, job = fleet(plain, "2", 220, 0.0, *flags), fleet(lost, "2", 220, 0.005, *flags)
    for made in (quiet, job):
        made.start("node-1")
        made.start("node-2")
    names = ["node-1", "node-2"]
    for number in range(1, 11):
        generation = job.trains(*names, within_s=WITHIN_S)
        lost.let(20 * number)
        time.sleep(rng.uniform(0.0, 0.5))
        job.kill(names.pop(rng.randrange(2)))
        names.append(f"node-{number + 2}")
        job.start(names[-1])
    job.trains(*names, within_s=WITHIN_S)
    lost.let(220)
    codes = [node.finish(WITHIN_S) for made in (quiet, job) for node in made.nodes.values()]
    assert set(codes) == {0}, job.text
    assert lost.ends == plain.ends
    assert {end["step"] for end in lost.ends.values()} == {220}
    assert job.generations() == list(range(1, generation + 2))


def test_a_world_of_many_sizes(fleet, training):
    """Nodes die and others join, at any moment: as of what was restored, each sample of each epoch was used once."""
    rng = random.Random(8)
    lost = training("lost")
    lost.let(10)
    job = fleet(lost, "1:3", 160, 0.005, "--no-standby", "--quiet-time", 0.2, "--max-restarts", 5, every=7)
    names = ["node-0"]
    job.start("node-0")
    for number in range(1, 9):
        job.trains(*names, within_s=WITHIN_S)
        lost.let(10 + 15 * number)
        if len(names) == 1 or (len(names) == 2 and number % 3):
            names.append(f"node-{number}")
            job.start(names[-1])
        else:
            time.sleep(rng.uniform(0.0, 0.3))
            job.kill(names.pop(rng.randrange(len(names))))
    job.trains(*names, within_s=WITHIN_S)
    lost.let(160)
    assert {node.finish(WITHIN_S) for node in job.nodes.values()} == {0}, job.text
    assert {step.size for step in job.steps()} == {1, 2, 3}
    lost.check_samples()
