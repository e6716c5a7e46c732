"""Several agents on loopback addresses and a real etcd: any of them may go, and the job goes on."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from helpers.etcd_servers import binary, cluster, secured
from helpers.fleet import LAUNCHER, Fleet
from helpers.launched import Launched


@pytest.fixture
def fleet(etcd, tmp_path, fleets):
    def make(nnodes="2:3", *flags, endpoint=None):
        return fleets(Fleet(tmp_path, endpoint or etcd.endpoint, nnodes, *flags))

    return make


def test_nodes_start_together_and_end_together(fleet):
    """All of the maximum present: one world at once; all end with 0, and each says so."""
    job = fleet("3")
    for name in "abc":
        job.start(name)
    assert job.trains("a", "b", "c", since=0) == 1
    job.stop()
    assert all("job succeeded" in node.text for node in job.nodes.values())
    assert job.generations() == [1]


def test_a_lost_node_costs_one_generation_and_no_budget(fleet):
    """kill -9 of a node that does not lead: the others go on, with the ranks in order, without any restart allowed."""
    job = fleet()
    job.start_in_order("a", "b", "c")
    job.trains("a", "b", "c")
    at = job.kill("b")
    assert job.trains("a", "c", since=at) == 2
    ranks = {step.node: step.rank for step in job.steps() if step.generation == 2}
    assert ranks == {"a": 0, "c": 1}
    assert "node b is lost: nobody listens at 127.0.0.2:" in job.nodes["a"].text
    job.stop()


def test_the_loss_of_the_leader_is_as_any_other(fleet):
    """kill -9 of the node that leads: another takes its place, and the world goes on without it."""
    job = fleet()
    job.start_in_order("a", "b", "c")
    job.trains("a", "b", "c")
    at = job.kill("a")
    assert job.trains("b", "c", since=at) == 2
    assert sum("this node takes its place" in node.text for node in job.nodes.values()) == 1
    job.stop()


def test_a_change_of_leader_restarts_nobody(fleet):
    """A spare comes to lead, because the others sleep; then it is killed: no worker notices any of it."""
    job = fleet("2", "--lease-ttl", "2")
    job.start_in_order("a", "b", "c")
    assert job.trains("a", "b") == 1
    agents = [job.nodes[name].process.pid for name in "ab"]
    for pid in agents:
        os.kill(pid, signal.SIGSTOP)
    job.nodes["c"].seen("this node leads")
    for pid in agents:
        os.kill(pid, signal.SIGCONT)
    for name in "ab":
        job.nodes[name].seen("registered anew")
    assert job.trains("a", "b") == 1
    time.sleep(1)
    at = job.kill("c")
    job.until(lambda: "takes its place" in job.text, "another leader")
    time.sleep(3)
    assert job.trains("a", "b") == 1
    assert job.steps()[-1].at > at
    job.stop()
    assert job.generations() == [1]


def test_a_new_node_is_admitted(fleet):
    """A node that comes while the others train is admitted after the quiet time."""
    job = fleet("2:3", "--quiet-time", "0.5")
    job.start_in_order("a", "b")
    assert job.trains("a", "b") == 1
    job.start("c")
    assert job.trains("a", "b", "c") == 2
    job.stop()


def test_a_node_beyond_the_maximum_is_a_spare(fleet):
    """It waits, and takes over in one step when a member is lost, in the lost one's place."""
    job = fleet("2")
    job.start_in_order("a", "b", "c")
    job.trains("a", "b")
    at = job.kill("b")
    assert job.trains("a", "c", since=at) == 2
    assert {step.node: step.rank for step in job.steps() if step.generation == 2} == {"a": 0, "c": 1}
    job.stop()


@pytest.mark.parametrize("name", ["a", "c"])
def test_a_node_leaves(fleet, name):
    """SIGTERM to one agent, leading or not: the rest goes on without it, and it ends with 143."""
    job = fleet()
    job.start_in_order("a", "b", "c")
    job.trains("a", "b", "c")
    leaver = job.nodes.pop(name)
    at = time.time()
    leaver.signal(signal.SIGTERM)
    assert job.trains(*sorted(job.nodes), since=at) == 2
    assert leaver.finish() == 143
    assert f"node {name} leaves (SIGTERM)" in leaver.text
    job.stop()


def test_leave_code_and_notice(fleet, tmp_path):
    """The exit code of a node that leaves is the user's choice; its workers may be given a signal as a notice."""
    job = fleet("1:2", "--leave-exit-code", "0", "--quiet-time", "0.5")
    job.start_in_order("a", "b")
    job.trains("a", "b")
    leaver = job.nodes.pop("b")
    leaver.signal(signal.SIGTERM)
    assert leaver.finish() == 0
    job.trains("a")
    job.stop()


def test_level_1_holds_until_a_replacement_comes(fleet):
    """With a fixed number of nodes the survivors hold, their workers stopped, until somebody takes the lost place."""
    job = fleet("2")
    job.start_in_order("a", "b")
    job.trains("a", "b")
    job.kill("b")
    job.nodes["a"].seen("workers are stopped until the next world: node b is lost")
    job.start("d")
    assert job.trains("a", "d") == 2
    job.stop()


def test_hold_timeout_ends_the_job(fleet):
    """A limit on holding ends the job with a reason."""
    job = fleet("2", "--hold-timeout", "1")
    job.start_in_order("a", "b")
    job.trains("a", "b")
    job.kill("b")
    assert job.nodes["a"].finish() == 1
    assert "no replacement came in 1 s: node b is lost" in job.nodes["a"].text


def test_level_0_fails_with_the_node(fleet):
    """Without fault tolerance the loss of a node is the end, and the log says why."""
    job = fleet("2", "--fault-tolerance-level", "0")
    job.start_in_order("a", "b")
    job.trains("a", "b")
    job.kill("b")
    assert job.nodes["a"].finish() == 1
    assert "fault tolerance is off (level 0)" in job.nodes["a"].text


def test_a_failing_worker_is_charged_once(fleet):
    """One worker's error restarts all, and counts as one restart although its peers fail with it."""
    job = fleet("2", "--max-restarts", "1")
    for name in "ab":
        job.start(name, script=("fails=1@1:5",))
    assert job.trains("a", "b", since=0) >= 1
    job.until(lambda: 2 in job.generations(), "generation 2")
    job.stop()
    assert any("restart 1 of 1" in node.text for node in job.nodes.values())


def leader(job):
    """The node that leads, by what it says."""
    epochs = {
        name: [int(epoch) for epoch in re.findall(r"this node leads \S+ ?\S* ?\(epoch (\d+)", node.text)]
        for name, node in job.nodes.items()
    }
    return max(epochs, key=lambda name: max(epochs[name], default=0))


@pytest.mark.timeout(120)
def test_the_budget_outlives_its_leaders(fleet):
    """Three restarts, and after each of them the node that leads is killed: the fourth failure is still the last."""
    job = fleet("1:4", "--max-restarts", "3", "--quiet-time", "20")
    job.start_in_order("a", "b", "c", "d", script=("hang=1",))
    generation = job.trains(*"abcd")

    def kill_a_worker():
        name = max(job.nodes)
        pattern = rf"generation {generation} rank \d of \d on {name} pid (\d+)"
        os.kill(int(job.nodes[name].seen(pattern)[1]), signal.SIGKILL)

    for restart in (1, 2, 3):
        kill_a_worker()
        job.until(lambda after=generation + 1: after in job.generations(), "the next generation")
        assert f"restart {restart} of 3" in job.text
        at = job.kill(leader(job))
        generation = job.trains(*job.nodes, since=at)
        assert generation == 2 * restart + 1
    kill_a_worker()
    (last,) = job.nodes.values()
    assert last.finish() == 137, last.text
    last.seen("all 3 restarts are used up")


def test_a_failure_beyond_the_budget_ends_all_with_its_code(fleet):
    """All nodes end with the code of the worker that failed first, and tell its story."""
    job = fleet("2")
    for name in "ab":
        job.start(name, script=("fails=1@1:5",))
    for node in job.nodes.values():
        assert node.finish() == 7
        assert "exited with code 7; no restarts are allowed" in node.text


def test_a_node_that_has_finished_is_no_loss(fleet):
    """A node whose workers have ended with 0 may die: the others end well."""
    job = fleet("2")
    for name in "ab":
        job.start(name, script=("steps=20", "finish=a", "linger=3"))
    job.nodes["b"].seen("generation 1 rank")
    job.until(lambda: len(job.steps()) >= 40, "all steps")
    time.sleep(1)
    job.kill("a")
    assert job.nodes["b"].finish() == 0
    assert job.generations() == [1]


def test_a_start_soon_after_the_end_gets_its_result(fleet):
    """Within the grace a late node is told when and how the run ended, and ends with the job's code."""
    job = fleet("2")
    job.start_in_order("a", "b", script=("steps=5",))
    for node in job.nodes.values():
        assert node.finish() == 0
    late = job.start("c")
    assert late.finish() == 0
    assert "job succeeded" in late.text
    assert job.generations() == [1]


def test_a_start_after_the_grace_is_a_new_run(fleet):
    """It meets nothing of the run before, not even its settings."""
    job = fleet("2", "--finished-grace", "0")
    job.start_in_order("a", "b", script=("steps=5",))
    for node in job.nodes.values():
        assert node.finish() == 0
    again = job.start("c", "--nnodes", "1", script=("steps=5",))
    assert again.finish() == 0
    assert "generation 1: 1 workers on 1 node(s)" in again.text


def test_a_run_whose_nodes_all_died_does_not_stand_in_the_way(fleet):
    """All nodes are killed: the next start, with other settings, is a new run at once."""
    job = fleet("2")
    job.start_in_order("a", "b")
    job.trains("a", "b")
    job.kill("a")
    job.kill("b")
    again = job.start("c", "--nnodes", "1:1", "--lease-ttl", "5", script=("steps=5",))
    # Their leases may live for some seconds more: then it is told so.
    if again.finish() != 0:
        assert "this job was started by node a" in again.text
        time.sleep(6)
        again = job.start("d", "--nnodes", "1:1", script=("steps=5",))
        assert again.finish() == 0
    assert "nobody is alive of it" in again.text


@pytest.mark.parametrize("how", ["leaves", "is killed"])
def test_the_leader_goes_while_others_still_save(fleet, how):
    """Their workers take a second to stop: what the next leader sends again meanwhile is neither lost nor done twice."""
    job = fleet("2:3", "--quiet-time", "20")
    job.start_in_order("a", script=("hang=1",))
    job.start_in_order("b", "c", script=("hang=1", "save=1"))
    job.trains("a", "b", "c")
    leader = job.nodes["a"]
    if how == "leaves":
        leader.signal(signal.SIGTERM)
        at = time.time()
        job.until(lambda: "generation 2" in job.nodes["b"].text, "the next world")
        del job.nodes["a"]
    else:
        at = job.kill("a")
    assert job.trains("b", "c", since=at) == 2, job.text
    job.trains_on("bc", 2, 2.0)
    for name in "bc":
        assert len(re.findall(r"generation 2 rank \d of 2", job.nodes[name].text)) == 1, job.nodes[name].text
    job.stop()


def test_a_replacement_with_the_same_name_takes_its_old_rank(fleet):
    """A node's agent that is started again under the node's name is in its old place."""
    job = fleet("2")
    job.start_in_order("a", "b")
    job.trains("a", "b")
    at = job.kill("a")
    job.start("a")
    assert job.trains("a", "b", since=at) == 2
    assert {step.node: step.rank for step in job.steps() if step.generation == 2} == {"a": 0, "b": 1}
    job.stop()


def test_stopping_the_last_member_ends_the_run_as_stopped(fleet):
    """All leave: the run is over, and the next start soon after is told so."""
    job = fleet("1:2", "--quiet-time", "0.5")
    job.start_in_order("a", "b")
    job.trains("a", "b")
    for node in job.nodes.values():
        node.signal(signal.SIGTERM)
    assert [node.finish() for node in job.nodes.values()] == [143, 143]
    late = job.start("c")
    assert late.finish() == 143
    assert "job stopped" in late.text


def test_a_silent_agent_is_given_up_when_its_lease_ends(fleet):
    """SIGSTOP of all of a node: the others go on without it; when it wakes up it stops its workers and comes back.

    Its worker wakes up as soon as its agent does, and may end the step that it was in: without peers, it gets no further.
    """
    job = fleet("2:3", "--lease-ttl", "2")
    job.start_in_order("a", "b", "c")
    job.trains("a", "b", "c")
    node = job.nodes["c"]
    pids = list(node.family())
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    assert job.trains("a", "b") == 2
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    node.seen("the lease of this node had ended: registered anew")
    assert job.trains("a", "b", "c") >= 3
    late = job.overlaps()
    assert {step.node for step, _ in late} <= {"c"}
    assert {latest.generation for _, latest in late} <= {2}
    job.stop()


def test_a_pause_of_the_leader_costs_its_leadership_only(fleet):
    """SIGSTOP of the leader's agent for longer than its lease: another leads, the old one's commits are refused."""
    job = fleet("2:3", "--lease-ttl", "2")
    job.start_in_order("a", "b", "c")
    job.trains("a", "b", "c")
    node = job.nodes["a"]
    os.kill(node.process.pid, signal.SIGSTOP)
    job.until(lambda: "this node leads" in job.nodes["b"].text + job.nodes["c"].text, "another leader")
    job.trains("b", "c")
    os.kill(node.process.pid, signal.SIGCONT)
    job.trains("a", "b", "c")
    assert not job.overlaps()
    job.stop()


class TestMisuse:
    """One clear line, exit code 2, and nodes that run are not harmed."""

    def refused(self, node, *words):
        assert node.finish() == 2, node.text
        assert "Traceback" not in node.text
        errors = [line for line in node.lines if line.startswith("elastic-launch: error: ")]
        assert len(errors) == 1, node.text
        for word in words:
            assert word in errors[0]

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (("--nnodes", "2:4"), ("node d has --nnodes 2:4", "node a", "2:3")),
            (("--nproc-per-node", "2"), ("--nproc-per-node 2", "with --nproc-per-node 1")),
            (("--max-restarts", "3"), ("--max-restarts 3",)),
            (("--framework", "torch"), ("--framework torch", "with --framework plain")),
            (("--isolation-timeout", "5"), ("--isolation-timeout 5",)),
        ],
        ids=lambda value: value[0] if value[0].startswith("--") else "",
    )
    def test_other_settings(self, fleet, flags, words):
        """A node with other settings than the rest is refused with both values."""
        job = fleet("2:3", "--quiet-time", "0.5")
        job.start_in_order("a", "b")
        job.trains("a", "b")
        self.refused(job.start("d", *flags), *words)
        del job.nodes["d"]
        assert job.trains("a", "b") == 1
        job.stop()

    def test_a_name_that_is_taken(self, fleet):
        """Two nodes of one name: the second is told where the first one is."""
        job = fleet("2:3", "--quiet-time", "0.5")
        job.start_in_order("a", "b")
        job.trains("a", "b")
        first = job.nodes["b"]
        self.refused(job.start("b"), "node b is already taken by an agent at 127.0.0.2:")
        job.nodes["b"] = first
        assert job.trains("a", "b") == 1
        job.stop()

    @pytest.mark.parametrize(
        ("endpoint", "words"),
        [
            ("127.0.0.1:9", ("127.0.0.1:9 refuses the connection",)),
            ("nowhere.invalid", ("nowhere.invalid:2379 is a name that can't be resolved",)),
            ("127.0.0.1:9,nowhere.invalid:1", ("127.0.0.1:9 refuses", "nowhere.invalid:1 is a name")),
        ],
    )
    def test_a_wrong_endpoint(self, fleet, endpoint, words):
        """What each endpoint said is told."""
        self.refused(fleet("2", "--connect-timeout", "1", endpoint=endpoint).start("a"), "within 1 s", *words)

    def test_an_address_that_is_not_ours(self, fleet):
        """An agent that can't listen where it says it does is told so."""
        self.refused(fleet("2").start("a", "--local-addr", "10.1.2.3"), "can't listen at 10.1.2.3", "--listen-address")

    def test_a_server_with_tls(self, fleet, tmp_path):
        """What is wrong with the address is said, not only that it did not work."""
        with secured(tmp_path) as (endpoint, _):
            self.refused(fleet("2", "--connect-timeout", "2", endpoint=endpoint).start("a"), "write https://")

    def test_a_listener_that_says_nothing(self, fleet):
        """Something listens, but is no etcd."""
        import socket

        with socket.create_server(("127.0.0.1", 0)) as silent:
            endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
            self.refused(
                fleet("2", "--connect-timeout", "2", endpoint=endpoint).start("a"), "did not answer as an etcd"
            )


def test_default_names_of_two_agents_on_one_host(fleet, etcd, tmp_path):
    """Where nobody names the nodes, two agents of one host get along."""
    argv = [
        *(*LAUNCHER, "--framework", "plain", "--rdzv-id", f"names-{os.getpid()}", "--nnodes", "2"),
        *("--rdzv-backend", "etcdv3", "--rdzv-endpoint", etcd.endpoint, "-m", "this"),
    ]
    both = [Launched(argv, {}, tmp_path) for _ in range(2)]
    try:
        assert [each.finish() for each in both] == [0, 0]
        assert all("Beautiful is better" in each.text for each in both)
    finally:
        for each in both:
            each.destroy()


def test_pods_are_configured_by_variables_alone(fleet, etcd, tmp_path):
    """The command of a container is just the launcher and the script."""
    env = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_RDZV_BACKEND": "etcd-v2",
        "PET_RDZV_ENDPOINT": etcd.endpoint,
        "PET_RDZV_ID": f"pods-{os.getpid()}",
        "ELASTIC_FRAMEWORK": "plain",
    }
    argv = [*LAUNCHER, "-m", "this"]
    both = [Launched(argv, {**env, "POD_NAME": f"pod-{n}", "POD_IP": f"127.0.0.{n}"}, tmp_path) for n in (1, 2)]
    try:
        assert [each.finish() for each in both] == [0, 0]
        assert "etcd's v3 API" in both[0].text
        assert "[pod-1 " in both[0].text
    finally:
        for each in both:
            each.destroy()


def test_the_port_of_an_agent_takes_only_its_own_run(fleet, etcd):
    """Whoever does not show the run's token is refused, and the log says from where."""
    code = (
        "import asyncio, sys, grpc, grpc.aio\n"
        "from elastic_adapter.proto import control_pb2 as pb, control_pb2_grpc as rpc\n"
        "async def main():\n"
        "    async with grpc.aio.insecure_channel(sys.argv[1]) as channel:\n"
        "        try:\n"
        "            await rpc.CoreStub(channel).Status(pb.StatusRequest(), metadata=(('elastic-token', 'x'),))\n"
        "        except grpc.aio.AioRpcError as error:\n"
        "            print(error.code().name)\n"
        "asyncio.run(main())\n"
    )
    job = fleet("2")
    job.start_in_order("a", "b")
    job.trains("a", "b")
    address = job.nodes["a"].seen(r"listening at (127.0.0.1:\d+)")[1]
    said = subprocess.run([sys.executable, "-c", code, address], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "UNAUTHENTICATED"
    job.nodes["a"].seen(r"refused ipv4:127\.0\.0\.1:\d+: it did not show the token")
    assert job.trains("a", "b") == 1
    job.stop()


def test_a_compaction_disturbs_nobody(fleet, etcd):
    """Etcd forgets its history while the job runs: leaders and generations are still followed."""
    job = fleet()
    job.start_in_order("a", "b", "c")
    job.trains("a", "b", "c")
    etcdctl = [binary("etcdctl"), "--endpoints", etcd.endpoint]
    for _ in range(3):
        subprocess.run([*etcdctl, "put", "x", "y"], check=True, capture_output=True)
    status = subprocess.run([*etcdctl, "get", "x", "-w", "json"], check=True, capture_output=True, text=True).stdout
    revision = status.partition('"revision":')[2].partition(",")[0]
    subprocess.run([*etcdctl, "compact", revision], check=True, capture_output=True)
    at = job.kill("a")
    assert job.trains("b", "c", since=at) == 2
    job.stop()


NOTICED = """
import os, signal, sys, time
from elastic_adapter.core.worker import Notices

def say(*words):  # one write: a handler may run between the parts of a print
    os.write(1, (" ".join(words) + chr(10)).encode())

signal.signal(signal.SIGUSR1, lambda *_: say("signal heard"))
notices = Notices()
say("up")
while True:
    notice = notices.wait(0.1)
    if notice:
        say("notice", notice["notice"], notice["reason"])
"""


def test_workers_are_given_notice_of_a_leave(etcd, tmp_path):
    """Before the workers of a node that leaves are ended they hear of it, by the socket and by the signal chosen."""
    script = tmp_path / "noticed.py"
    script.write_text(NOTICED)
    argv = [
        *(*LAUNCHER, "--framework", "plain", "--rdzv-id", f"notice-{os.getpid()}", "--nnodes", "1:2"),
        *("--rdzv-backend", "etcd", "--rdzv-endpoint", etcd.endpoint, "--leave-signal", "USR1"),
    ]
    both = [Launched([*argv, "--node-id", name, str(script)], {}, tmp_path) for name in ("a", "b")]
    try:
        for each in both:
            each.seen("up")
        both[1].signal(signal.SIGTERM)
        both[1].seen("signal heard")
        both[1].seen("notice leave SIGTERM on b")
        assert both[1].finish() == 143
        both[0].seen("generation 2: 1 worker")
    finally:
        for each in both:
            each.destroy()


POLITE = """
import os, signal, sys, time
def end(*_):
    os.write(1, b"told to end\\n")
    time.sleep(1.5)
    os.write(1, b"ended in order\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
os.write(1, b"up\\n")
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
"""


class TestAnEtcdThatForgotTheJob:
    """It answers, but the job's keys are gone: said in a line, and nobody hangs or is harmed."""

    @pytest.fixture
    def job(self, tmp_path):
        """One node on an etcd of its own, whose keys were deleted while it trains; where its worker looks for its end."""
        script = tmp_path / "polite.py"
        script.write_text(POLITE)
        with cluster(tmp_path, 1) as (own,):
            flags = ("--framework", "plain", "--nnodes", "1:2", "--quiet-time", "0", "--rdzv-id", "forgotten")
            meet = ("--rdzv-backend", "etcdv3", "--rdzv-endpoint", own.endpoint)
            node = Launched([*LAUNCHER, *flags, *meet, str(script), str(tmp_path / "done")], {}, tmp_path)
            try:
                node.seen("up")
                delete = [binary("etcdctl"), "--endpoints", own.endpoint, "del", "--prefix", "/elastic-adapter/"]
                subprocess.run(delete, check=True, capture_output=True, timeout=20)
                node.seen("etcd does not know of this job, as if it had lost its data")
                yield node
            finally:
                node.destroy()

    def test_work_that_is_done_is_done(self, job, tmp_path):
        """The end can't be written down, but it is the end."""
        (tmp_path / "done").touch()
        assert job.finish() == 0, job.text
        job.seen("the end of the job could not be written to etcd: ")
        job.seen("job succeeded")

    def test_a_signal_leaves_workers_their_grace(self, job):
        """They are told, and end in order."""
        job.signal(signal.SIGTERM)
        assert job.finish() == 143, job.text
        job.seen("ended in order")
        assert "SIGKILL" not in job.text


def test_a_signal_is_obeyed_although_nobody_answers(fleet, tmp_path):
    """With etcd gone no end can be committed: a node that was told to go twice goes by itself."""
    with cluster(tmp_path, 1) as (own,):
        job = fleet("2", endpoint=own.endpoint)
        job.start_in_order("a", "b")
        job.trains("a", "b")
        own.kill()
        for _ in range(2):
            job.nodes["b"].signal(signal.SIGINT)
            job.nodes["b"].seen("SIGINT (received|again)")
        assert job.nodes["b"].finish() == 130
        job.nodes["b"].gone()


def test_a_signal_ends_the_wait_for_etcd(fleet):
    """Who can't connect yet can be stopped."""
    node = fleet("2", "--connect-timeout", "40", endpoint="127.0.0.1:9").start("a")
    time.sleep(2)
    node.signal(signal.SIGINT)
    assert node.finish() == 130
    assert "Traceback" not in node.text


def test_workers_that_go_with_their_node_are_not_charged(fleet):
    """SIGTERM to all processes of a node, as when its machine is shut down: the others go on without any budget."""
    job = fleet()
    job.start_in_order("a", "b", "c")
    job.trains("a", "b", "c")
    leaver = job.nodes.pop("b")
    pids = [pid for pid in leaver.family() if pid != leaver.process.pid]
    at = time.time()
    for pid in [*pids, leaver.process.pid]:
        os.kill(pid, signal.SIGTERM)
    assert job.trains("a", "c", since=at) == 2
    assert leaver.finish() == 143
    job.stop()
