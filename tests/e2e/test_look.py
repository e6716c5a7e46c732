"""Looking at a job from outside: who takes part, how it is, what happened."""

import json
import subprocess

import pytest

from helpers.fleet import LAUNCHER, Fleet


@pytest.fixture
def job(etcd, tmp_path, fleets):
    made = fleets(Fleet(tmp_path, etcd.endpoint, "1:2", "--quiet-time", "10", "--max-restarts", "4"))
    made.start_in_order("a", "b")
    made.trains("a", "b")
    return made


def look(job, command, *flags):
    argv = [*LAUNCHER, command, "--job", job.job, "--rdzv-endpoint", job.endpoint, *flags]
    return subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)


def told(job, command):
    shown = look(job, command, "--json")
    assert (shown.returncode, shown.stderr) == (0, "")
    return json.loads(shown.stdout)


def test_status(job):
    """The members with their ranks, the world, who leads and what is left of the budget; a spare is one."""
    status = told(job, "status")
    assert (status["job"], status["phase"], status["generation"], status["world_size"]) == (job.job, "running", 1, 2)
    assert (status["leader"], status["restarts_used"], status["max_restarts"]) == ("a", 0, 4)
    assert [(each["node"], each["ranks"]) for each in status["members"]] == [("a", [0, 0]), ("b", [1, 1])]
    job.start("c").seen("this one waits as a spare")
    assert [each["ranks"] for each in told(job, "status")["members"]] == [[0, 0], [1, 1], None]
    shown = look(job, "status").stdout
    for words in (f"{job.job} (run ", "running: ", "generation 1, 2 workers", "0 of 4 used", "spare"):
        assert words in shown
    assert "token" not in json.dumps(status)
    job.stop()


def test_events(job):
    """What happened, in order and with reasons, across a change of the leader and beyond the end."""
    at = job.kill("a")
    job.trains("b", since=at)
    job.stop()
    events = told(job, "events")
    assert [each["at"] for each in events] == sorted(each["at"] for each in events)
    words = [f"{each['kind']}: {each['text']}" for each in events]
    expected = [
        "joined: node a joined with 1 worker(s)",
        "joined: node b joined with 1 worker(s)",
        "world: generation 1: 2 workers on 2 node(s): 2 of 2 nodes are here",
        "world: generation 2: 1 workers on 1 node(s): node a is lost: ",
        "end: succeeded: all workers ended with code 0",
    ]
    places = [next(at for at, word in enumerate(words) if word.startswith(each)) for each in expected]
    assert places == sorted(places), words
    assert "node a is lost" in look(job, "events").stdout
    status = told(job, "status")
    assert (status["phase"], status["leader"]) == ("finished", None)
    assert status["reason"] == "succeeded: all workers ended with code 0"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("status",), "which job? add --job NAME"),
        (("events", "--job", "j"), "add --rdzv-endpoint HOST:PORT"),
        (("status", "--job", "nothing-here"), "there is no job 'nothing-here'"),
        (("status", "--job", "j", "train.py"), "expected options only, got 'train.py'"),
    ],
)
def test_mistakes(etcd, argv, words):
    """One line and exit code 2."""
    where = ("--rdzv-endpoint", etcd.endpoint) if "nothing-here" in argv else ()
    shown = subprocess.run([*LAUNCHER, *argv, *where], capture_output=True, text=True, timeout=30, check=False)
    assert (shown.returncode, shown.stdout, shown.stderr.count("\n")) == (2, "", 1)
    assert words in shown.stderr


def test_an_etcd_that_is_not_there():
    """It is named, within the connect timeout."""
    argv = [*LAUNCHER, "status", "--job", "j", "--rdzv-endpoint", "127.0.0.1:9", "--connect-timeout", "1"]
    shown = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    assert (shown.returncode, shown.stderr.count("\n")) == (2, 1)
    assert "no answer from etcd at 127.0.0.1:9" in shown.stderr
