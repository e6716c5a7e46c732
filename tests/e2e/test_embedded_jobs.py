"""Several agents and no etcd but the one that the first of them runs: it comes and goes with the job."""

import os
import signal
import socket
import time

import pytest

from helpers.etcd_servers import binary
from helpers.fleet import Fleet
from helpers.ports import free_ports

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def fleet(tmp_path, fleets):
    binary("etcd")

    def make(nnodes="2:3", *flags, backend="embedded"):
        (port,) = free_ports(1)
        return fleets(Fleet(tmp_path, f"127.0.0.1:{port}", nnodes, *flags, backend=backend))

    return make


def etcds(node):
    """The pids of the etcd that this node runs."""
    return [pid for pid, command in node.family().items() if " --name job --data-dir " in command]


def listens(endpoint):
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 5).close()
    except ConnectionRefusedError:
        return False
    return True


def nothing_left(job, *nodes):
    for node in nodes:
        node.gone()
    assert not listens(job.endpoint)


def both_spellings(test):
    return pytest.mark.parametrize("backend", ["embedded", "c10d"])(test)


@both_spellings
def test_a_node_that_is_not_the_host_is_lost(fleet, backend):
    """The job goes on without it, and its etcd ends with the job."""
    job = fleet(backend=backend)
    job.start_in_order("a", "b", "c")
    assert job.trains("a", "b", "c") == 1
    host = job.nodes["a"]
    assert "the job's etcd runs on 127.0.0.1: the job survives the loss of any node but that one" in host.text
    at = job.kill("b")
    assert job.trains("a", "c", since=at) == 2
    assert {step.node: step.rank for step in job.steps() if step.generation == 2} == {"a": 0, "c": 1}
    nodes = list(job.nodes.values())
    job.stop()
    assert all("job succeeded" in node.text for node in nodes)
    nothing_left(job, *nodes)


def test_agents_on_one_host_share_one_etcd(fleet):
    """Whoever comes first runs it; the others, to whom the endpoint is local as well, use it."""
    job = fleet()
    job.start_in_order("a", "b", "c")
    job.trains("a", "b", "c")
    assert [len(etcds(job.nodes[name])) for name in "abc"] == [1, 0, 0]
    job.stop()


def test_agents_that_start_at_once_share_one_etcd(fleet):
    """Without any order: exactly one of them runs it, and all are in one world."""
    job = fleet("3")
    for name in "abc":
        job.start(name)
    assert job.trains("a", "b", "c", since=0) == 1
    assert sorted(len(etcds(node)) for node in job.nodes.values()) == [0, 0, 1]
    nodes = list(job.nodes.values())
    job.stop()
    nothing_left(job, *nodes)


def lose_the_host(job):
    """kill -9 of the host's agent alone: its guard has to end the rest. Those that are left."""
    job.start_in_order("a", "b", "c")
    job.trains("a", "b", "c")
    host = job.nodes.pop("a")
    assert len(etcds(host)) == 1
    os.kill(host.process.pid, signal.SIGKILL)
    nothing_left(job, host)
    return list(job.nodes.values())


@both_spellings
def test_the_loss_of_the_host_stops_all(fleet, backend):
    """Its etcd and workers end with its agent, the others' workers are stopped, and nobody forms a world of his own."""
    job = fleet(backend=backend)
    for node in lose_the_host(job):
        node.seen("workers are stopped: the coordinator and etcd are both out of reach")
        worker = node.seen(r"rank \d+ of 3 on \w+ pid (\d+)")[1]
        job.until(lambda node=node, worker=worker: int(worker) not in node.family(), f"the end of worker {worker}")
    last = job.steps()[-1].at
    time.sleep(2)
    assert job.steps()[-1].at == last
    assert job.generations() == [1]


def fail_with_one_line(left, words):
    for node in left:
        assert node.finish() == 1, node.text
        errors = [line for line in node.lines if "this node is out of the job" in line]
        assert len(errors) == 1, node.text
        assert words in errors[0]
        assert not [line for line in node.lines if line.startswith("Traceback")], node.text


def test_the_others_fail_when_the_host_is_lost(fleet):
    """There is nothing to wait for, and the line names what is gone."""
    job = fleet()
    left = lose_the_host(job)
    fail_with_one_line(left, "the node that runs the job's etcd has been out of reach")
    nothing_left(job, *left)


def test_a_host_that_comes_back_begins_another_run(fleet):
    """Its etcd is empty: those of the run before see that theirs is over, and end; nobody knocks with an old token."""
    job = fleet()
    left = lose_the_host(job)
    host = job.start("a")
    host.seen("this node leads the job")
    fail_with_one_line(left, "etcd has lost its data, and another run")
    assert "it did not show the token of this run" not in host.text


@both_spellings
def test_sigterm_to_the_host_stops_the_job(fleet, backend):
    """The etcd can't go on without its node: the whole job ends, as stopped, and all agents are told."""
    job = fleet(backend=backend)
    job.start_in_order("a", "b", "c")
    job.trains("a", "b", "c")
    nodes = list(job.nodes.values())
    job.nodes["a"].signal(signal.SIGTERM)
    assert [node.finish() for node in nodes] == [143, 143, 143], job.text
    assert all("job stopped: SIGTERM on a" in node.text for node in nodes), job.text
    nothing_left(job, *nodes)


def test_sigterm_to_another_node_is_a_leave(fleet):
    """A node that does not run the etcd may go."""
    job = fleet()
    job.start_in_order("a", "b", "c")
    job.trains("a", "b", "c")
    leaver = job.nodes.pop("c")
    at = time.time()
    leaver.signal(signal.SIGTERM)
    assert job.trains("a", "b", since=at) == 2
    assert leaver.finish() == 143
    job.stop()


def test_an_etcd_that_is_killed_is_started_again(fleet):
    """Twice: with its data, so that nobody is disturbed, and a loss afterwards is handled as ever."""
    job = fleet()
    job.start_in_order("a", "b", "c")
    assert job.trains("a", "b", "c") == 1
    host = job.nodes["a"]
    for times in (1, 2):
        (old,) = etcds(host)
        os.kill(old, signal.SIGKILL)
        host.seen("the job's etcd ended: SIGKILL; it is started again with its data", times)
        job.until(lambda old=old: [pid for pid in etcds(host) if pid != old] and listens(job.endpoint), "another etcd")
        assert job.trains("a", "b", "c") == 1
    time.sleep(6)  # Longer than a lease: whoever did not find the new etcd is noticed by now.
    assert job.trains("a", "b", "c") == 1
    assert job.generations() == [1]
    assert "workers are stopped" not in job.text
    at = job.kill("b")
    assert job.trains("a", "c", since=at) == 2
    nodes = list(job.nodes.values())
    job.stop()
    nothing_left(job, *nodes)


class TestStatic:
    """torchrun's classic spelling: a number for each node, and the address of the first."""

    def test_ranks_follow_the_node_ranks(self, fleet):
        """Rank 1 is started first, and waits for rank 0, which runs the etcd."""
        job = fleet("2", backend="static")
        job.start("one", "--node-rank", 1)
        job.until(lambda: "nodes meet in an etcd at" in job.nodes["one"].text, "the first lines of rank 1")
        job.start("zero", "--node-rank", 0)
        assert job.trains("zero", "one", since=0) == 1
        assert {step.node: step.rank for step in job.steps()} == {"zero": 0, "one": 1}
        assert [len(etcds(job.nodes[name])) for name in ("zero", "one")] == [1, 0]
        nodes = list(job.nodes.values())
        job.stop()
        nothing_left(job, *nodes)

    def test_nobody_needs_a_name_or_an_address(self, launch, script):
        """The very words that torchrun takes; nothing else is given."""
        binary("etcd")
        (port,) = free_ports(1)
        program = script(
            "import os\nprint('group', os.environ['ELASTIC_NODE_RANK'], 'rank', os.environ['ELASTIC_RANK'], flush=True)\n"
        )
        words = ("--framework", "plain", "--nnodes", 2, "--master-addr", "127.0.0.1", "--master-port", port)
        nodes = {rank: launch(*words, "--nproc-per-node", 2, "--node-rank", rank, program) for rank in (1, 0)}
        for rank, node in nodes.items():
            assert node.finish() == 0, node.text
            for local in (0, 1):
                assert f"group {rank} rank {2 * rank + local}" in node.text
        for node in nodes.values():
            node.gone()

    def test_a_lost_node_is_replaced_in_its_rank(self, fleet):
        """The survivor holds until somebody comes with the rank that is missing."""
        job = fleet("2", backend="static")
        job.start("zero", "--node-rank", 0)
        job.start("one", "--node-rank", 1)
        assert job.trains("zero", "one", since=0) == 1
        at = job.kill("one")
        job.nodes["zero"].seen("workers are stopped until the next world: node one is lost")
        job.start("other", "--node-rank", 1)
        assert job.trains("zero", "other", since=at) == 2
        assert {step.node: step.rank for step in job.steps() if step.generation == 2} == {"zero": 0, "other": 1}
        job.stop()

    def test_sigterm_to_rank_0_stops_the_job(self, fleet):
        """It runs the etcd: the job ends with it, as stopped."""
        job = fleet("2", backend="static")
        job.start("zero", "--node-rank", 0)
        job.start("one", "--node-rank", 1)
        job.trains("zero", "one", since=0)
        nodes = list(job.nodes.values())
        job.nodes["zero"].signal(signal.SIGTERM)
        assert [node.finish() for node in nodes] == [143, 143], job.text
        nothing_left(job, *nodes)
