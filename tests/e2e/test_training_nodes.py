"""Real training on several nodes, whose every all_reduce is checked: nodes go, and others go on. Torch and paddle."""

import asyncio
import os
import signal

import pytest

from elastic_adapter.core.standby import StandbyPool
from helpers.fleet import Fleet
from helpers.frameworks import SCRIPTS

pytestmark = pytest.mark.timeout(180)
WITHIN_S = 60.0

# A step that was taken is a line as of helpers/world.py; one whose sum is wrong ends the worker.
TRAIN = """
folder, node, generation = sys.argv[1], os.environ["ELASTIC_NODE"], os.environ["ELASTIC_GENERATION"]
rank, size = join()
print(f"generation {generation} rank {rank} of {size} on {node} pid {os.getpid()}", flush=True)
local = os.environ["ELASTIC_LOCAL_RANK"]
log = open(os.path.join(folder, f"{node}-{local}.steps"), "a", buffering=1)
step, stop = 0, False
while not stop:
    step += 1
    stop = float(rank == 0 and os.path.exists(os.path.join(folder, "stop")))
    total, stop = summed([float(step * (rank + 1)), stop])
    if total != step * size * (size + 1) / 2:
        with open(os.path.join(folder, "wrong"), "a") as wrong:
            wrong.write(f"generation {generation} step {step} rank {rank} of {size}: {total}\\n")
        sys.exit(9)
    log.write(f"{time.time():.3f} {generation} {size} {rank} {step} {node}\\n")
    time.sleep(0.02)
"""


@pytest.fixture
def program(framework, tmp_path):
    path = tmp_path / "train.py"
    path.write_text("import os, sys, time\n" + SCRIPTS[framework] + TRAIN)
    return path


@pytest.fixture
def fleet(etcd, tmp_path, fleets, framework, program):
    def make(nnodes, *flags):
        return fleets(Fleet(tmp_path, etcd.endpoint, nnodes, *flags, framework=framework, program=program))

    return make


def right(job):
    """All sums were right, every generation began with its first step, and none went on beside a later one."""
    assert not (job.folder / "wrong").exists(), (job.folder / "wrong").read_text()
    assert not job.overlaps()
    for generation in job.generations():
        first = [step.step for step in job.steps() if step.generation == generation]
        assert first[0] == 1


def ranks(job, generation):
    return sorted({(step.rank, step.node) for step in job.steps() if step.generation == generation})


def test_nodes_go_one_after_the_other(fleet):
    """kill -9 of a node that does not lead, then of the one that does: 3, 2, 1, without any restart allowed."""
    job = fleet("1:3", "--quiet-time", "10")
    job.start_in_order("a", "b", "c")
    assert job.trains("a", "b", "c", within_s=WITHIN_S) == 1
    at = job.kill("c")
    assert job.trains("a", "b", since=at, within_s=WITHIN_S) == 2
    at = job.kill("a")
    assert job.trains("b", since=at, within_s=WITHIN_S) == 3
    assert [ranks(job, generation) for generation in (1, 2, 3)] == [
        [(0, "a"), (1, "b"), (2, "c")],
        [(0, "a"), (1, "b")],
        [(0, "b")],
    ]
    job.stop()
    right(job)
    assert "restart 1" not in job.text


def test_the_leader_goes_first(fleet):
    """The node with rank 0, where the store and the leader are, is lost out of a world of three."""
    job = fleet("2:3")
    job.start_in_order("a", "b", "c")
    assert job.trains("a", "b", "c", within_s=WITHIN_S) == 1
    at = job.kill("a")
    assert job.trains("b", "c", since=at, within_s=WITHIN_S) == 2
    assert ranks(job, 2) == [(0, "b"), (1, "c")]
    job.stop()
    right(job)


def test_a_third_node_with_two_workers_each(fleet):
    """Two nodes of two workers train; a third one comes, and the world has six; it is lost, and the world has four."""
    job = fleet("2:3", "--nproc-per-node", "2", "--quiet-time", "0.5")
    job.start_in_order("a", "b")
    assert job.trains("a", "b", per_node=2, within_s=WITHIN_S) == 1
    job.start("c")
    assert job.trains("a", "b", "c", per_node=2, within_s=WITHIN_S) == 2
    assert ranks(job, 2) == [(rank, "abc"[rank // 2]) for rank in range(6)]
    at = job.kill("b")
    assert job.trains("a", "c", per_node=2, since=at, within_s=WITHIN_S) == 3
    assert ranks(job, 3) == [(0, "a"), (1, "a"), (2, "c"), (3, "c")]
    job.stop()
    right(job)


def test_a_killed_worker_of_one_node_restarts_all(fleet):
    """One restart is allowed: one worker's kill is charged once, whatever its peers' collectives say of it."""
    job = fleet("2", "--nproc-per-node", "2", "--max-restarts", "1")
    job.start_in_order("a", "b")
    assert job.trains("a", "b", per_node=2, within_s=WITHIN_S) == 1
    pid = int(job.nodes["b"].seen(r"generation 1 rank 3 of 4 on b pid (\d+)")[1])
    os.kill(pid, signal.SIGKILL)
    assert job.trains("a", "b", per_node=2, within_s=WITHIN_S) == 2
    job.stop()
    right(job)
    assert "restart 1 of 1" in job.text


def test_a_node_that_is_told_to_leave(fleet):
    """SIGTERM to one of three: the rest re-forms, nothing is charged, and the one that left says so by its code."""
    job = fleet("2:3")
    job.start_in_order("a", "b", "c")
    assert job.trains("a", "b", "c", within_s=WITHIN_S) == 1
    leaver = job.nodes.pop("b")
    leaver.signal(signal.SIGTERM)
    assert leaver.finish() == 143
    assert job.trains("a", "c", within_s=WITHIN_S) == 2
    assert ranks(job, 2) == [(0, "a"), (1, "c")]
    job.stop()
    right(job)
    assert "this node has left the job: node b leaves (SIGTERM)" in leaver.text


def test_level_1_waits_for_a_replacement_of_the_same_name(fleet):
    """At a fixed size the others hold; the one that comes back under the name of the lost one has its rank."""
    job = fleet("3")
    job.start_in_order("a", "b", "c")
    assert job.trains("a", "b", "c", within_s=WITHIN_S) == 1
    at = job.kill("b")
    job.nodes["a"].seen("holding: node b is lost")
    job.nodes["c"].seen("workers are stopped until the next world")
    job.start("b")
    assert job.trains("a", "b", "c", since=at, within_s=WITHIN_S) == 2
    assert ranks(job, 2) == [(0, "a"), (1, "b"), (2, "c")]
    job.stop()
    right(job)


def test_a_world_may_come_while_the_first_interpreters_boot():
    """The last node to come gets its world at once: it takes the interpreters that are on their way, or none."""

    class Slow:
        async def standby(self, *_, **__):
            await asyncio.sleep(0.1)

    async def main():
        pool = StandbyPool(Slow(), ("torch",), 1)
        await pool.prepare(importing=True)
        await asyncio.sleep(0.01)
        pool.stop_filling()
        assert await asyncio.wait_for(pool.take(0), WITHIN_S) is None

    asyncio.run(main())
