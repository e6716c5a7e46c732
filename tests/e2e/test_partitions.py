"""Hosts that are cut off from each other, from etcd, or from both: never two worlds that get on, and no needless stop.

What happened is read from the workers' own lines: a step is taken by all ranks of a world together, or not at all.
Each rule is tried with the rule switched off as well (helpers/broken.py), where the same checks must fail.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from helpers.etcd_servers import cluster
from helpers.fleet import HERE, Fleet
from helpers.hosts import block, hosts, unblock
from helpers.launched import PATIENCE_S

pytestmark = [pytest.mark.timeout(150), pytest.mark.waits]
LEASE_S = 2
# What a lease, etcd's own look at it, and a busy machine may take.
SOON_S = 20.0
FAILS = (AssertionError, pytest.fail.Exception)


class Site:
    """Three hosts for nodes and one with the etcd."""

    def __init__(self, tmp_path, *flags, nnodes="2:3", rule_off=None):
        self._stack = contextlib.ExitStack()
        *self.hosts, self.etcd_host = self._stack.enter_context(hosts(4, tmp_path))
        (self.etcd,) = self._stack.enter_context(cluster(tmp_path, 1, hosts=[self.etcd_host]))
        common = ("--lease-ttl", LEASE_S, *flags)
        self.fleet = Fleet(tmp_path, self.etcd.endpoint, nnodes, *common)
        self._stack.callback(self.fleet.destroy)
        self._launcher = [sys.executable, str(HERE / "broken.py"), rule_off] if rule_off else None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stack.close()

    def start(self, *names, script=()):
        for name, host in zip(names, self.hosts, strict=False):
            node = self.fleet.start(name, host=host, launcher=self._launcher, script=script)
            node.seen("this node is a member")
            if name == "a":
                self.fleet.nodes[name].seen("this node leads")

    def host(self, name):
        return self.hosts["abc".index(name)]

    def worker(self, name):
        """The pid of the last worker that the node started."""
        return int(self.fleet.nodes[name].seen(r"generation \d+ rank \d+ of \d+ on \w+ pid (\d+)")[1])


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def cut_off_node(tmp_path, name, rule_off=None):
    with Site(tmp_path, rule_off=rule_off) as site:
        fleet = site.fleet
        site.start("a", "b", "c")
        fleet.trains("a", "b", "c")
        worker = site.worker(name)
        rest = [other for other in "abc" if other != name]
        site.host(name).cut()
        assert fleet.trains(*rest, within_s=SOON_S) == 2
        # Its workers were dead before the others began anew.
        assert not alive(worker), fleet.text
        site.host(name).heal()
        fleet.trains("a", "b", "c", within_s=SOON_S)
        assert not fleet.overlaps()
        fleet.stop()


class TestCutOffNode:
    """A node that has lost both the coordinator and etcd ends its workers before its lease can end elsewhere."""

    @pytest.mark.parametrize("name", ["c", "a"], ids=["follower", "leader"])
    def test_it_stops_and_the_rest_goes_on(self, tmp_path, name):
        """The rest re-forms when the lease has ended; healed, the node comes back."""
        cut_off_node(tmp_path, name)

    @pytest.mark.parametrize(("name", "rule"), [("c", "isolation"), ("a", "severing")])
    def test_control(self, tmp_path, name, rule):
        """Without the rule its workers would be left hanging, beside a world that has gone on."""
        with pytest.raises(FAILS):
            cut_off_node(tmp_path, name, rule)


def cut_off_etcd(tmp_path, outage, rule_off=None):
    with Site(tmp_path, rule_off=rule_off) as site:
        fleet = site.fleet
        site.start("a", "b", "c")
        assert fleet.trains("a", "b", "c") == 1
        for _ in range(2):
            with outage(site):
                fleet.trains_on("abc", 1, 4 * LEASE_S)
            fleet.trains_on("abc", 1, 2 * LEASE_S)
        assert fleet.generations() == [1]
        # And it is still there for what comes after.
        at = fleet.kill("a")
        assert fleet.trains("b", "c", since=at, within_s=SOON_S) == 2
        assert "takes its place" in fleet.text
        fleet.stop()


@contextlib.contextmanager
def killed(site):
    site.etcd.kill()
    yield
    site.etcd.start()
    site.etcd.healthy()


@contextlib.contextmanager
def unreachable(site):
    block(site.etcd_host, site.hosts)
    yield
    unblock(site.etcd_host, site.hosts)


def emptied_etcd(tmp_path, rule_off=None):
    with Site(tmp_path, "--isolation-timeout", "8", rule_off=rule_off) as site:
        fleet = site.fleet
        site.start("a", "b", "c")
        assert fleet.trains("a", "b", "c") == 1
        site.etcd.kill()
        shutil.rmtree(tmp_path / "m0")
        lost = time.time()
        site.etcd.start()
        site.etcd.healthy()
        fleet.trains_on("abc", 1, 4)
        fleet.until(lambda: "workers are stopped: etcd has been out of reach for 8 s" in fleet.text, "a stop", SOON_S)
        for node in fleet.nodes.values():
            # The first to stop breaks the world, which can't be replaced: the others are stopped by that.
            # Whoever stops first ends the others' collectives: then nothing can be committed.
            node.seen(
                "workers are stopped(: etcd has been out of reach for 8 s|: the coordinator and etcd are both| until)"
            )
        last = fleet.steps()[-1].at
        time.sleep(3)
        assert fleet.steps()[-1].at == last
        assert last - lost > 4
        assert {step.generation for step in fleet.steps()} == {1}


class TestEtcdOutage:
    """Silence of etcd is no event: a world that is whole trains on, and nobody is restarted when etcd is back."""

    @pytest.mark.parametrize("outage", [killed, unreachable])
    def test_nobody_is_disturbed(self, tmp_path, outage):
        """Twice: etcd killed (its leases are re-armed), and etcd alive but out of reach (its leases end)."""
        cut_off_etcd(tmp_path, outage)

    def test_control(self, tmp_path):
        """If the end of a lease alone counted as a loss, a world would be replaced for nothing."""
        with pytest.raises(FAILS):
            cut_off_etcd(tmp_path, unreachable, "silence")

    def test_an_etcd_that_lost_its_data_counts_as_gone(self, tmp_path):
        """It comes back empty: nobody begins anew with generation 1; after the isolation timeout all stop."""
        emptied_etcd(tmp_path)

    def test_control_of_lost_data(self, tmp_path):
        """If an empty etcd were as good as a new one, the job would begin anew in it."""
        with pytest.raises(FAILS):
            emptied_etcd(tmp_path, "empty")


def cut_off_world(tmp_path, rule_off=None):
    """The world of a and b is cut off from etcd and from the spare c."""
    isolation_s = 12
    with Site(tmp_path, "--isolation-timeout", isolation_s, nnodes="1:2", rule_off=rule_off) as site:
        fleet = site.fleet
        site.start("a", "b")
        assert fleet.trains("a", "b") == 1
        fleet.start("c", host=site.host("c"), launcher=site._launcher).seen("this node is a member")
        cut = time.time()
        block(site.hosts[:2], [site.hosts[2], site.etcd_host])
        fleet.nodes["c"].seen("this node leads")
        generation = fleet.trains("c", within_s=isolation_s + SOON_S)
        assert generation == 2
        world = [step for step in fleet.steps() if step.generation == 1]
        # It was allowed to train on, and had stopped when the other began.
        assert world[-1].at - cut > isolation_s / 2
        assert not fleet.overlaps()
        unblock(site.hosts[:2], [site.hosts[2], site.etcd_host])
        # The spare has a place now, and one of those who had is the other.
        fleet.until(lambda: any(step.generation > 2 and step.size == 2 for step in fleet.steps()), "a world of two")
        assert not fleet.overlaps()


class TestCutOffWorld:
    """A whole world may train on without etcd, for the isolation timeout; nobody takes its place before that is over."""

    def test_its_successor_waits(self, tmp_path):
        """The spare leads, but forms no world until the one that it can't see must have stopped."""
        cut_off_world(tmp_path)

    def test_control(self, tmp_path):
        """If the new leader did not wait, two worlds would get on at once."""
        with pytest.raises(FAILS):
            cut_off_world(tmp_path, "doubt")


def test_a_leader_without_etcd_lets_others_lead_when_it_must(tmp_path):
    """Only the leader is cut off from etcd: all train on; a failure then can't be committed, and another leads."""
    with Site(tmp_path, "--max-restarts", "3") as site:
        fleet = site.fleet
        site.start("a", "b", "c")
        assert fleet.trains("a", "b", "c") == 1
        block(site.hosts[0], site.etcd_host)
        fleet.trains_on("abc", 1, 3 * LEASE_S)
        os.kill(site.worker("b"), signal.SIGKILL)
        assert fleet.trains("b", "c", within_s=SOON_S) >= 2
        unblock(site.hosts[0], site.etcd_host)
        fleet.trains("a", "b", "c", within_s=SOON_S)
        assert not fleet.overlaps()
        fleet.stop()


def woken_agent(tmp_path, rule_off=None):
    """The agent of a follower sleeps for longer than its lease, while its worker does not."""
    with Site(tmp_path, "--quiet-time", "30", rule_off=rule_off) as site:
        fleet = site.fleet
        site.start("a", "b", "c", script=("hang=1",))
        assert fleet.trains("a", "b", "c") == 1
        worker, agent = site.worker("c"), fleet.nodes["c"].process.pid
        os.kill(agent, signal.SIGSTOP)
        assert fleet.trains("a", "b", within_s=SOON_S) == 2
        assert alive(worker)
        os.kill(agent, signal.SIGCONT)
        fleet.until(lambda: not alive(worker), "the end of a worker of generation 1", within_s=PATIENCE_S / 3)


class TestWokenAgent:
    """An agent watches the committed generation, and ends workers of an older one whatever its stream says."""

    def test_it_ends_workers_of_an_older_generation(self, tmp_path):
        """They end as soon as it is awake, although nobody has a place for it yet."""
        woken_agent(tmp_path)

    def test_control(self, tmp_path):
        """Without the watch they would go on."""
        with pytest.raises(FAILS):
            woken_agent(tmp_path, "generation-watch")
