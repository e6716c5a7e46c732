"""Workers that make no step any more: they are asked where they are, the suspect is named, and training goes on."""

import json
import os
import signal
from pathlib import Path

import pytest

from helpers.fleet import Fleet
from helpers.frameworks import SCRIPTS

pytestmark = [pytest.mark.timeout(180), pytest.mark.quiet]
WITHIN_S = 90.0

TRAIN = """
from elastic_adapter.core.worker import progress

generation = os.environ["ELASTIC_GENERATION"]
how, who = sys.argv[-1].split("=") if generation == "1" else ("", "")

def load_batch():
    time.sleep(3600)

def prepare():
    time.sleep(3600)

if how == "start" and os.environ["ELASTIC_RANK"] == who:
    prepare()
rank, size = join()
print(f"generation {generation} rank {rank} pid {os.getpid()}", flush=True)
for step in range(10**6 if how == "endless" else 8):
    if how == "sleep" and str(rank) == who and step == 3:
        load_batch()
    assert summed([1.0]) == [size]
    progress(step)
    print(f"generation {generation} rank {rank} step {step}", flush=True)
    time.sleep(0.05)
print("finished", flush=True)
"""


@pytest.fixture
def training(framework, tmp_path):
    """The flags that begin a launch, and the script."""
    path = tmp_path / "train.py"
    path.write_text("import os, sys, time\n" + SCRIPTS[framework] + TRAIN)
    return ("--framework", framework, "--max-restarts", 1, "--summary-file", tmp_path / "summary.json"), path


def restart(folder: Path) -> dict:
    """Why the only restart was, from the summary."""
    (told,) = json.loads((folder / "summary.json").read_text())["restarts"]
    return told


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_sleeps_and_the_other_waits_for_it(launch, training, tmp_path, rank):
    """All have made the same steps: who does not wait in the collective is the suspect."""
    flags, script = training
    job = launch(*flags, "--nproc-per-node", 2, "--hang-timeout", "3s", "--log-dir", "logs", script, f"sleep={rank}")
    assert job.finish(WITHIN_S) == 0, job.text
    told = restart(tmp_path)
    suspect, (other,) = told["first_failure"], told["other_failures"]
    assert (suspect["rank"], suspect["step"], suspect["code"]) == (rank, 2, 124)
    assert "no rank made a step for 3 s (--hang-timeout)" in suspect["how"]
    assert "it does not wait for others, but is in train.py" in suspect["how"]
    assert "in load_batch" in suspect["how"]
    assert other["rank"] == 1 - rank
    assert "it waits for others in all_reduce, train.py" in other["how"]
    for each in (suspect, other):
        path = Path(each["stack_file"])
        assert path.resolve().is_relative_to((tmp_path / "logs").resolve())
        assert "train.py" in path.read_text()
    assert "load_batch" in Path(suspect["stack_file"]).read_text()
    assert "restart 1 of 1" in told["decision"]
    assert told["restarts_left"] == 0
    job.seen("generation 1 failed:")
    job.gone()


def test_a_hang_at_the_start(launch, training, tmp_path):
    """A rank that never joins: the other one waits for it in the rendezvous, and no step was ever made."""
    flags, script = training
    job = launch(*flags, "--nproc-per-node", 2, "--start-timeout", "15s", script, "start=1")
    assert job.finish(WITHIN_S) == 0, job.text
    told = restart(tmp_path)
    suspect, (other,) = told["first_failure"], told["other_failures"]
    assert (suspect["rank"], suspect["step"]) == (1, None)
    assert "no rank told of a first step within 15 s (--start-timeout)" in suspect["how"]
    assert "in prepare" in suspect["how"]
    assert "waits for others" in other["how"]


def test_on_two_nodes(etcd, training, fleets, framework, tmp_path):
    """The stacks of all nodes are asked for; every node tells the same story."""
    _, script = training
    flags = ("--max-restarts", 1, "--hang-timeout", "4s")
    fleet = fleets(Fleet(tmp_path, etcd.endpoint, "2", *flags, framework=framework, program=script))
    for name in "ab":
        fleet.start(name, "--summary-file", tmp_path / f"{name}.json", script=("sleep=1",))
    for name in "ab":
        assert fleet.nodes[name].finish(WITHIN_S) == 0, fleet.text
    stories = [json.loads((tmp_path / f"{name}.json").read_text())["restarts"] for name in "ab"]
    assert stories[0] == stories[1]
    suspect = stories[0][0]["first_failure"]
    assert (suspect["rank"], "in load_batch" in suspect["how"]) == (1, True)
    culprit = suspect["node"]
    fleet.nodes[culprit].seen("rank 1 .pid .*train.py.* in load_batch")


def test_who_is_stopped_is_the_suspect(launch, training, tmp_path):
    """SIGSTOP: whatever its stack says, a process that does not run waits for nobody."""
    flags, script = training
    job = launch(*flags, "--nproc-per-node", 2, "--hang-timeout", "4s", script, "endless=")
    pid = int(job.seen(r"generation 1 rank 1 pid (\d+)")[1])
    job.seen("generation 1 rank 1 step 3")
    os.kill(pid, signal.SIGSTOP)
    assert job.finish(WITHIN_S) == 0, job.text
    suspect = restart(tmp_path)["first_failure"]
    assert suspect["rank"] == 1
    assert "stopped (state T)" in suspect["how"]


def test_a_hang_without_budget_ends_the_job(launch, training, tmp_path):
    """With the exit code of timeout(1), and the whole story."""
    _, script = training
    flags = ("--framework", training[0][1], "--max-restarts", 0, "--summary-file", tmp_path / "summary.json")
    job = launch(*flags, "--nproc-per-node", 2, "--hang-timeout", "3s", script, "sleep=1")
    assert job.finish(WITHIN_S) == 124, job.text
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["outcome"], summary["first_failure"]["rank"]) == ("failed", 1)
    assert [each["rank"] for each in summary["other_failures"]] == [0]
    job.seen("job failed: rank 1 on .* hangs: no rank made a step for 3 s")
    job.gone()


def test_a_script_that_never_tells_is_left_alone(launch, script):
    """Nothing is claimed, and nothing is killed."""
    text = "import time\ntime.sleep(4)\nprint('finished', flush=True)"
    job = launch("--framework", "plain", "--hang-timeout", "500ms", script(text))
    assert job.finish() == 0
    job.seen("finished")
    assert "hangs:" not in job.text


def test_a_slow_step_is_no_hang(launch, script):
    """Every step comes within the limit, just so."""
    text = """
import time
from elastic_adapter.core.worker import progress
for step in range(8):
    progress(step)
    time.sleep(0.8)
"""
    job = launch("--framework", "plain", "--nproc-per-node", 2, "--hang-timeout", "2s", script(text))
    assert job.finish() == 0, job.text
    assert "hangs" not in job.text


def test_a_native_program_is_restarted_without_stacks(launch, script):
    """What can't be asked for its stack is not harmed by asking."""
    text = """
import os, subprocess, sys, time
from elastic_adapter.core.worker import progress
progress(1)
if os.environ["ELASTIC_GENERATION"] == "1":
    os.execvp("sleep", ["sleep", "3600"])
"""
    flags = ("--framework", "plain", "--max-restarts", 1, "--hang-timeout", "2s")
    job = launch(*flags, script(text))
    assert job.finish() == 0, job.text
    job.seen("rank 0 on .* hangs: no rank made a step for 2 s")
