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


def workers(launched):
    """The pids of those who have at least begun to start."""
    return sorted(pid for pid, command in launched.family().items() if "bootstrap.py" in command)


def undone(training):
    """How many steps were done again, because a crash had undone them."""
    generations = {}
    for each in training.used():
        generations.setdefault(each.step, set()).add(each.generation)
    return sum(len(each) > 1 for each in generations.values())


# No multiple of how often is saved: who is killed while it waits there has steps to lose, and the next one to do.
def limit(number):
    return 20 * number + 3


def test_killed_ten_times(launch, framework, script, training):
    """A worker is killed ten times, whenever that may be: the training ends bit-equal to one that was left alone."""
    rng = random.Random(6)
    plain, killed = training("plain"), training("killed")
    command = ("--framework", framework, "--nproc-per-node", 2, "--no-standby")
    quiet = launch(*command, script, *plain.args(220, 0.0))
    killed.let(limit(1))
    launched = launch(*command, "--max-restarts", 10, script, *killed.args(220, 0.005, keep_last=3))
    for generation in range(1, 11):
        if generation % 4 == 0:
            # While it starts, or restores.
            launched.seen(rf"generation {generation}: 2 worker\(s\) started")
            time.sleep(rng.uniform(0.0, 2.0))
            pids = workers(launched)
        else:
            pids = [pid for pid, _ in begun(launched, generation).values()]
            killed.let(limit(generation))
            time.sleep(rng.uniform(0.0, 0.5))
        os.kill(rng.choice(pids), signal.SIGKILL)
    begun(launched, 11)
    killed.let(220)
    for each in (quiet, launched):
        assert each.finish(WITHIN_S) == 0, each.text
    assert killed.ends == plain.ends
    assert {end["step"] for end in killed.ends.values()} == {220}
    assert killed.committed() == [220, 215, 210]
    assert undone(killed) > 0
    assert undone(plain) == 0
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
    lost.let(limit(1))
    flags = ("--fault-tolerance-level", 1, "--no-standby")
    quiet, job = fleet(plain, "2", 220, 0.0, *flags), fleet(lost, "2", 220, 0.005, *flags)
    for made in (quiet, job):
        made.start("node-1")
        made.start("node-2")
    names = ["node-1", "node-2"]
    for number in range(1, 11):
        generation = job.trains(*names, within_s=WITHIN_S)
        lost.let(limit(number))
        time.sleep(rng.uniform(0.0, 0.5))
        job.kill(names.pop(rng.randrange(2)))
        names.append(f"node-{number + 2}")
        job.start(names[-1])
    job.trains(*names, within_s=WITHIN_S)
    lost.let(220)
    for made in (quiet, job):
        assert {node.finish(WITHIN_S) for node in made.nodes.values()} == {0}, made.text
    assert lost.ends == plain.ends
    assert {end["step"] for end in lost.ends.values()} == {220}
    assert undone(lost) > 0
    assert job.generations() == list(range(1, generation + 2)), job.text


# A node joins (+), a node is killed (n), a worker is killed (w): ten kills, in worlds of one to three.
STORY = "+w+nw+nnw+wn+wn"


@pytest.mark.timeout(300)
def test_a_world_of_many_sizes(fleet, training):
    """Nodes and workers die and others join, at any moment: as of what was restored, each sample was used once."""
    rng = random.Random(8)
    lost = training("lost")
    flags = ("--no-standby", "--quiet-time", 0.2, "--max-restarts", 5)
    job = fleet(lost, "1:3", 10**6, 0.005, *flags, every=7)
    names = ["node-0"]
    job.start("node-0")
    for number, change in enumerate(STORY, 1):
        job.trains(*names, within_s=WITHIN_S)
        time.sleep(rng.uniform(0.0, 0.3))
        match change:
            case "+":
                names.append(f"node-{number}")
                job.start(names[-1])
            case "n":
                job.kill(names.pop(rng.randrange(len(names))))
            case "w":
                os.kill(rng.choice(workers(job.nodes[rng.choice(names)])), signal.SIGKILL)
    job.trains(*names, within_s=WITHIN_S)
    (lost.out / "stop").touch()
    assert {node.finish(WITHIN_S) for node in job.nodes.values()} == {0}, job.text
    assert {step.size for step in job.steps()} == {1, 2, 3}
    assert undone(lost) > 0
    lost.check_samples()
