"""Ending a job from outside: by a signal, in good order or not, and with nothing left behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

WAITING = """
import os, signal, subprocess, sys, time
def say(number, frame):
    print(f"rank {os.environ['ELASTIC_RANK']} got {signal.Signals(number).name}", flush=True)
    ENDING
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, say)
children = [subprocess.Popen(["sleep", "600"]), subprocess.Popen(["sleep", "600"], start_new_session=True)]
subprocess.run(["sh", "-c", "setsid sh -c 'sleep 600 & sleep 600' >/dev/null 2>&1 &"])
print(f"rank {os.environ['ELASTIC_RANK']} up", flush=True)
while True:
    time.sleep(600)
"""
ENDS = WAITING.replace("ENDING", "sys.exit(0)")
STAYS = WAITING.replace("ENDING", "pass")
PLAIN = ("--framework", "plain", "--nproc-per-node", "2")


def up(job):
    for rank in (0, 1):
        job.seen(f"rank {rank} up")


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_signal_ends_the_job_in_good_order(launch, script, name, code):
    """The workers get the same signal, the command ends with 128 + its number, nothing is left."""
    job = launch(*PLAIN, script(ENDS))
    up(job)
    job.signal(getattr(signal, name))
    assert job.finish() == code
    for rank in (0, 1):
        job.seen(f"rank {rank} got {name}")
    assert f"{name}" in job.text
    job.gone()


def test_worker_that_does_not_end_is_killed_after_the_grace(launch, script):
    """A worker that ignores the signal gets SIGKILL when the grace is over, with all it started."""
    job = launch(*PLAIN, "--shutdown-timeout", 1, script(STAYS))
    up(job)
    job.signal(signal.SIGTERM)
    assert job.finish() == 143
    assert "did not end on SIGTERM: SIGKILL" in job.text
    job.gone()


def test_second_signal_does_not_wait(launch, script):
    """Ctrl-C twice: the grace of ten minutes is cut short."""
    job = launch(*PLAIN, "--shutdown-timeout", 600, script(STAYS))
    up(job)
    job.signal(signal.SIGINT)
    job.seen("rank 0 got SIGINT")
    job.signal(signal.SIGINT)
    assert job.finish() == 130
    job.gone()


def test_kill_of_the_agent_leaves_nothing(launch, script):
    """kill -9 of the agent alone: workers, their children, daemons, guard: all gone; the scratch folder too."""
    job = launch(*PLAIN, script(STAYS), env={"TMPDIR": str(script("", "x").parent)})
    up(job)
    assert len(job.family()) >= 8
    job.signal(signal.SIGKILL)
    job.process.wait(10)
    job.gone()
    assert not list(script("", "x").parent.glob("elastic-launch-*"))


@pytest.mark.quiet
def test_kill_of_the_agent_leaves_no_standby(launch, script):
    """Standbys go with the agent, too."""
    path = script("import time; print('up', flush=True); time.sleep(600)")
    job = launch("--framework", "plain", "--preload", "decimal", path, env={"LOGLEVEL": "DEBUG"})
    job.seen("standbys are ready")
    assert any("standby" in command for command in job.family().values())
    job.signal(signal.SIGKILL)
    job.process.wait(10)
    job.gone()


def test_kill_of_the_guard_ends_the_job(launch, script):
    """If the guard itself is killed, the agent ends the workers, says why, and fails."""
    job = launch(*PLAIN, script(STAYS))
    up(job)
    guard = next(pid for pid, command in job.family().items() if "guard.py" in command)
    os.kill(guard, signal.SIGKILL)
    assert job.finish() == 1
    assert "guard process ended" in job.text
    assert "Traceback" not in job.text
    job.gone()


def test_hangup_is_ignored_under_nohup(launch, script):
    """A job started with nohup survives SIGHUP."""
    launcher = str(Path(sys.executable).with_name("elastic-launch"))
    job = launch(*PLAIN, script(ENDS), command=["sh", "-c", 'trap "" HUP; exec "$0" "$@"', launcher])
    up(job)
    job.signal(signal.SIGHUP)
    job.signal(signal.SIGTERM)
    assert job.finish() == 143
    assert "got SIGHUP" not in job.text


def test_signal_before_the_workers_are_up(launch, script):
    """A signal that comes while the job starts ends it, too."""
    job = launch(*PLAIN, script("import time; time.sleep(600)"))
    job.seen("generation 1: 2 workers on")
    job.signal(signal.SIGTERM)
    assert job.finish() == 143
    job.gone()


def test_console_that_is_closed_does_not_stop_the_job(launch, script, tmp_path):
    """A reader that goes away (| head) ends neither the workers nor the job."""
    path = script("import time\nfor i in range(2000): print('line', i)\nopen('done', 'w').close()")
    launcher = Path(sys.executable).with_name("elastic-launch")
    code = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {launcher} --framework plain {path} 2>/dev/null | head -1 >/dev/null"],
        cwd=tmp_path,
        timeout=40,
        check=False,
    ).returncode
    assert (tmp_path / "done").exists()
    assert code == 0


def test_another_signal_is_no_second_one(launch, script):
    """SIGHUP right after SIGTERM, as at the end of a session, does not cut the grace short."""
    path = script(ENDS.replace("sys.exit(0)", "time.sleep(1); print('saved', flush=True); sys.exit(0)"))
    job = launch(*PLAIN, path)
    up(job)
    job.signal(signal.SIGTERM)
    job.seen("got SIGTERM", times=2)
    job.signal(signal.SIGHUP)
    assert job.finish() == 143
    job.seen("saved", times=2)
