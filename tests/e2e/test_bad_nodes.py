"""Nodes on which workers fail again and again, or that say themselves that they are not fit."""

import json
import signal
import subprocess

import pytest

from helpers.fleet import LAUNCHER, Fleet


def look(job, command, *words):
    argv = [*LAUNCHER, command, "--job", job.job, "--rdzv-endpoint", job.endpoint, *words]
    shown = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    assert (shown.returncode, shown.stderr) == (0, "")
    return shown.stdout


@pytest.fixture
def fleet(etcd, tmp_path, fleets):
    def made(nnodes, *flags):
        return fleets(
            Fleet(
                tmp_path,
                etcd.endpoint,
                nnodes,
                "--quiet-time",
                "5",
                "--max-restarts",
                9,
                "--startup-failures",
                0,
                *flags,
            )
        )

    return made


def test_a_node_that_fails_often_is_kept_out_and_cleared(fleet):
    """The others go on without it; status shows it; once cleared it takes part again."""
    job = fleet("2:3", "--exclude-node-after", "2")
    job.start_in_order("a", "b", "c", script=("fails=1@1:20,1@2:20",))
    assert job.trains("a", "c") == 3
    why = "2 failures on it (--exclude-node-after 2)"
    job.nodes["b"].seen(f"node b is excluded while there are enough others: {why.replace('(', '.').replace(')', '.')}")
    status = json.loads(look(job, "status", "--json"))
    assert (status["excluded"], status["failures"]) == ({"b": why}, {"b": 2})
    assert {each["node"]: each["ranks"] for each in status["members"]} == {"a": [0, 0], "b": None, "c": [1, 1]}
    assert (status["restarts_used"], status["restarts_left"]) == (2, 7)
    shown = look(job, "status")
    assert f"b: {why}" in shown
    job.trains_on("ac", 3, 2.0)
    assert look(job, "clear", "b") == "node b is cleared: it had 2 failures and was excluded\n"
    assert job.trains("a", "b", "c") == 4
    assert json.loads(look(job, "status", "--json"))["excluded"] == {}
    assert "node b is cleared" in look(job, "events")
    job.stop()


def test_a_bad_node_is_better_than_none(fleet):
    """Without it there would be too few: it is a last resort."""
    job = fleet("2:3", "--on-exit", "7=exclude-node")
    job.start_in_order("a", "b", "c", script=("fails=1@1:20",))
    assert job.trains("a", "c") == 2
    at = job.kill("c")
    assert job.trains("a", "b", since=at) == 3
    job.stop()


def test_an_exclusion_outlives_the_leader(fleet):
    """Whoever leads next knows of it."""
    job = fleet("1:3", "--exclude-node-after", "1")
    job.start_in_order("a", "b", "c", script=("fails=1@1:20",))
    assert job.trains("a", "c") == 2
    at = job.kill("a")
    assert job.trains("c", since=at) == 3
    assert list(json.loads(look(job, "status", "--json"))["excluded"]) == ["b"]
    job.stop()


@pytest.mark.parametrize("fit", [True, False])
def test_a_health_check_after_two_failures(fleet, tmp_path, fit):
    """The others go on; a node that is fit comes back, one that is not says why, and leaves."""
    check = f'test ! -e {tmp_path}/$ELASTIC_NODE.bad || {{ echo "disk of $ELASTIC_NODE is full" >&2; exit 3; }}'
    job = fleet("2:3", "--health-check", check)
    job.start_in_order("a", "b", "c", script=("fails=1@1:20,1@2:20",))
    job.nodes["b"].seen("generation 2 rank 1")
    if not fit:
        (tmp_path / "b.bad").touch()
    job.nodes["b"].seen("its health is checked")
    if fit:
        job.nodes["a"].seen("node b passed its health check")
        job.trains("a", "b", "c")
    else:
        bad = job.nodes.pop("b")
        assert bad.finish() == 1
        bad.seen("this node is out of the job: node b failed its health check: .* code 3: disk of b is full")
        job.trains("a", "c")
    job.stop()


def test_a_node_that_fails_its_check_does_not_join(launch, script, tmp_path):
    """It says why, in one line, and ends with code 1; nothing was started."""
    text = f"open({str(tmp_path / 'started')!r}, 'w')"
    job = launch("--framework", "plain", "--health-check", "echo no GPU answers >&2; exit 9", script(text))
    assert job.finish() == 1
    job.seen("job failed: node .* failed its health check: it exited with code 9: no GPU answers")
    assert not (tmp_path / "started").exists()
    job.gone()


def test_a_check_that_does_not_end(launch, script):
    """It is ended, with all that it started."""
    flags = ("--health-check", "sleep 3600 & sleep 3600", "--health-check-timeout", "1s")
    job = launch("--framework", "plain", *flags, script(""))
    assert job.finish() == 1
    job.seen("did not end within 1 s .--health-check-timeout.")
    job.gone()


def test_a_good_check_is_no_obstacle(launch, script):
    """Its output is shown."""
    job = launch("--framework", "plain", "--health-check", "echo all is well", script("print('up')"))
    assert job.finish() == 0
    job.seen(r"\[health-check\] all is well")
    job.seen("up")


def test_the_only_node_is_checked_after_two_failures(launch, script, tmp_path):
    """Its workers wait for that, and the job ends with it."""
    text = "import os, signal\nif os.environ['ELASTIC_GENERATION'] < '3': os.kill(os.getpid(), signal.SIGSEGV)"
    flags = ("--framework", "plain", "--max-restarts", 5)
    job = launch(*flags, "--health-check", f"echo check >> {tmp_path}/checks", script(text))
    assert job.finish() == 0, job.text
    assert (tmp_path / "checks").read_text() == "check\n" * 2
    job.seen("node .* passed its health check")
    job = launch(
        *flags,
        "--health-check",
        f"echo check >> {tmp_path}/checks; test $(wc -l < {tmp_path}/checks) -lt 4",
        script(text),
    )
    assert job.finish() == 1, job.text
    job.seen("job failed: node .* failed its health check")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_story_is_told_by_whoever_leads_then(fleet, how):
    """The leader goes in the second in which the story of a failure is gathered: the others hear it all the same."""
    job = fleet("2:3")
    job.start_in_order("a", "b", "c", script=("fails=1@1:20",))
    job.nodes["a"].seen("generation 2: 3 workers on 3 node")
    job.nodes.pop("a").signal(how)
    for node in job.nodes.values():
        node.seen("generation 1 failed:")
        node.seen("rank        1 .local rank 0, generation 1")
    job.trains("b", "c")
    job.stop()
    for node in job.nodes.values():
        assert node.text.count("generation 1 failed:") == 1
