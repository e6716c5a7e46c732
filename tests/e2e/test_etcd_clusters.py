"""Jobs on an etcd as it is run in earnest: three members of which any may go, or one that asks who is there."""

import subprocess

import pytest

from helpers.etcd_servers import binary, cluster, secured
from helpers.fleet import Fleet

pytestmark = pytest.mark.waits
LEASE_S = 5
# Longer than a lease, so that one that was not renewed has ended by then.
LONG_ENOUGH_S = LEASE_S + 2.0


@pytest.fixture
def fleet(tmp_path, fleets):
    return lambda endpoints, *flags: fleets(Fleet(tmp_path, endpoints, "2:3", *flags))


def undisturbed(job):
    assert job.generations() == [1], job.text
    for words in ("workers are stopped", "is lost", "is silent", "takes its place", "Traceback"):
        assert words not in job.text


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "flags", [(), ("--heartbeat-interval", "500", "--election-timeout", "2500")], ids=["lan", "far apart"]
)
def test_each_member_of_the_cluster_goes_once(fleet, tmp_path, flags):
    """kill -9 of one after the other, each started again: the training goes on; then a node goes, and that is seen."""
    with cluster(tmp_path, 3, *flags) as servers:
        job = fleet(",".join(server.endpoint for server in servers), "--lease-ttl", LEASE_S)
        job.start_in_order("a", "b", "c")
        assert job.trains("a", "b", "c") == 1
        for server in servers:
            server.kill()
            job.trains_on("abc", 1, LONG_ENOUGH_S)
            server.start()
            server.healthy()
        job.trains_on("abc", 1, LONG_ENOUGH_S)
        undisturbed(job)
        at = job.kill("a")
        assert job.trains("b", "c", since=at) == 2
        job.stop()


@pytest.mark.timeout(120)
def test_a_cluster_without_a_majority_disturbs_nobody(fleet, tmp_path):
    """Two members of three go, for longer than a lease: the third answers that it can't; then all is as it was."""
    with cluster(tmp_path, 3) as servers:
        job = fleet(",".join(server.endpoint for server in servers), "--lease-ttl", LEASE_S)
        job.start_in_order("a", "b", "c")
        assert job.trains("a", "b", "c") == 1
        for server in servers[:2]:
            server.kill()
        job.trains_on("abc", 1, 2 * LONG_ENOUGH_S)
        for server in servers[:2]:
            server.start()
        for server in servers:
            server.healthy()
        job.trains_on("abc", 1, LONG_ENOUGH_S)
        undisturbed(job)
        at = job.kill("a")
        assert job.trains("b", "c", since=at) == 2
        job.stop()


@pytest.mark.timeout(120)
def test_a_node_goes_while_a_member_is_down(fleet, tmp_path):
    """Two members of three are an etcd: a new world can be committed, whichever the third was."""
    with cluster(tmp_path, 3) as servers:
        job = fleet(",".join(server.endpoint for server in servers))
        job.start_in_order("a", "b", "c")
        job.trains("a", "b", "c")
        servers[0].kill()
        at = job.kill("b")
        assert job.trains("a", "c", since=at) == 2
        job.stop()


def test_a_node_starts_while_a_member_is_down(fleet, tmp_path):
    """The first endpoint refuses: the next one is asked."""
    with cluster(tmp_path, 3) as servers:
        servers[0].kill()
        job = fleet(",".join(server.endpoint for server in servers))
        for name in "abc":
            job.start(name)
        assert job.trains("a", "b", "c", since=0) >= 1
        job.stop()


PASSWORD = "hush-7c1e9a"


@pytest.fixture
def guarded_etcd(tmp_path):
    """One that takes only those with a certificate, a user and a password: its endpoint, and the flags for the files."""
    folder = tmp_path / "guarded"
    folder.mkdir()
    # Tokens that live shorter than a job have to be asked for again.
    with secured(folder, "--auth-token-ttl", "2") as (endpoint, paths):
        etcdctl = [binary("etcdctl"), "--endpoints", f"https://{endpoint}", "--command-timeout", "20s"]
        etcdctl += ["--cacert", paths["ca"], "--cert", paths["cert"], "--key", paths["key"]]
        for words in (
            ("user", "add", "root:root"),
            ("user", "grant-role", "root", "root"),
            ("user", "add", f"trainer:{PASSWORD}"),
            ("role", "add", "jobs"),
            ("role", "grant-permission", "jobs", "--prefix=true", "readwrite", "/"),
            ("user", "grant-role", "trainer", "jobs"),
            ("auth", "enable"),
        ):
            subprocess.run([*etcdctl, *words], check=True, capture_output=True, timeout=30)
        yield endpoint, [word for name, path in paths.items() for word in (f"--etcd-{name}", path)]


@pytest.mark.timeout(120)
def test_certificates_and_a_password(fleet, guarded_etcd):
    """A job trains, outlives its tokens, loses a node and goes on; its password is told nowhere."""
    endpoint, files = guarded_etcd
    job = fleet(endpoint, *files, "--etcd-user", "trainer")
    job.start_in_order("a", "b", "c", env={"ELASTIC_ETCD_PASSWORD": PASSWORD, "LOGLEVEL": "DEBUG"})
    assert job.trains("a", "b", "c") == 1
    job.trains_on("abc", 1, LONG_ENOUGH_S)
    undisturbed(job)
    nodes = list(job.nodes.values())
    commands = [command for node in nodes for command in node.family().values()]
    at = job.kill("a")
    assert job.trains("b", "c", since=at) == 2
    job.stop()
    assert any(" DEBUG " in node.text for node in nodes)
    for text in (*commands, *(node.text for node in nodes)):
        assert PASSWORD not in text


@pytest.mark.timeout(120)
def test_whoever_may_not_enter_is_told_in_one_line(fleet, guarded_etcd):
    """A wrong password, and no certificate: exit code 2, what to look at, and the password is not in what is said."""
    endpoint, files = guarded_etcd
    job = fleet(endpoint, "--connect-timeout", "3")
    user = ("--etcd-user", "trainer")
    for name, flags, password, hint in (
        ("wrong", (*files, *user), f"not-{PASSWORD}", "ELASTIC_ETCD_PASSWORD"),
        ("nobody", (*files[:2], *user), PASSWORD, "--etcd-cert"),
    ):
        node = job.start(name, *flags, env={"ELASTIC_ETCD_PASSWORD": password})
        assert node.finish() == 2, node.text
        assert len([line for line in node.lines if line.startswith("elastic-launch: error: ")]) == 1, node.text
        assert hint in node.text
        assert "Traceback" not in node.text
        assert PASSWORD not in node.text


@pytest.mark.timeout(120)
def test_an_etcd_without_space_is_told_in_one_line(fleet, tmp_path):
    """It answers each write at once, with an error that is not ours to mend: exit code 2, and what etcd said."""
    with cluster(tmp_path, 1, "--quota-backend-bytes", "4000000") as (one,):
        etcdctl = [binary("etcdctl"), "--endpoints", one.endpoint, "put"]
        for number in range(100):
            filling = subprocess.run(
                [*etcdctl, f"/fill{number}"],
                input="x" * 400_000,
                text=True,
                capture_output=True,
                timeout=30,
                check=False,
            )
            if filling.returncode:
                break
        assert "space exceeded" in filling.stderr
        node = fleet(one.endpoint, "--connect-timeout", "3").start("a")
        assert node.finish() == 2, node.text
        assert "space exceeded" in node.text
        assert "Traceback" not in node.text
