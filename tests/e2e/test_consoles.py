"""Consoles that are closed, slow or not read at all, and other poor surroundings."""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

LAUNCHER = str(Path(sys.executable).with_name("elastic-launch"))

CHATTY = """
import os, time
print(f"pid {os.environ['ELASTIC_RANK']} {os.environ['ELASTIC_GENERATION']} {os.getpid()}", file=open("pids", "a"))
while os.environ["ELASTIC_RANK"] == "0" and os.environ["ELASTIC_GENERATION"] == "1":
    print("x" * 1000)
time.sleep(600)
"""


def shell(line, cwd, timeout=40):
    return subprocess.run(["bash", "-c", line], cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False)


def test_console_that_nobody_reads_holds_up_neither_recovery_nor_the_end(script, tmp_path):
    """stdout is a pipe that is never read and is full: a failure is answered all the same, and so is a signal."""
    process = subprocess.Popen(
        [
            *(LAUNCHER, "--framework", "plain", "--nproc-per-node", "2", "--max-restarts", "1"),
            *("--shutdown-timeout", "2", str(script(CHATTY))),
        ],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert wait_for_pid(tmp_path, "pid 1 1 ")
        os.kill(wait_for_pid(tmp_path, "pid 1 1 "), signal.SIGKILL)
        assert wait_for_pid(tmp_path, "pid 1 2 ")
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        assert process.returncode == 143
    finally:
        process.kill()
        process.stdout.close()
        process.stderr.close()
        process.wait()


def wait_for_pid(folder, beginning):
    ticks = threading.Event()
    for _ in range(400):
        text = (folder / "pids").read_text() if (folder / "pids").exists() else ""
        for line in text.splitlines():
            if line.startswith(beginning):
                return int(line.split()[-1])
        ticks.wait(0.1)
    pytest.fail(f"{beginning!r} did not come:\n{text}")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams(script, tmp_path, closed):
    """Whichever standard streams are closed, the job runs to its end."""
    path = script("import os, sys\nprint('out')\nprint('err', file=sys.stderr)\nopen('done', 'w').close()")
    ended = shell(f"{LAUNCHER} --framework plain --nproc-per-node 2 {path} {closed}", tmp_path)
    assert ended.returncode == 0
    assert (tmp_path / "done").exists()
    assert ("out" in ended.stdout) == (closed in {"2>&-", "<&-"})


def test_misuse_and_help_with_closed_streams(tmp_path):
    """Misuse is code 2 even if nobody can read why; help to a full disk or a closed stream is no traceback."""
    assert shell(f"{LAUNCHER} --no-such-flag 2>&-", tmp_path).returncode == 2
    assert shell(f"{LAUNCHER} --help >&-", tmp_path).stderr == ""
    full = shell(f"{LAUNCHER} --help >/dev/full", tmp_path)
    assert (full.returncode, full.stderr) == (1, "")


def test_slow_reader_gets_everything(script, tmp_path):
    """A reader that pauses for a while at the end of the job still gets every line."""
    path = script("for number in range(9000): print('line', number, '.' * 40)")
    ended = shell(f"{LAUNCHER} --framework plain {path} 2>&1 | (sleep 6; cat)", tmp_path)
    lines = ended.stdout.splitlines()
    assert sum("] line " in line for line in lines) == 9000
    assert "job succeeded" in lines[-1]


def test_low_limit_of_open_files(script, tmp_path):
    """With room for few open files the job runs, and workers see the limit that was set."""
    path = script("import resource; print('limit', resource.getrlimit(resource.RLIMIT_NOFILE)[0])")
    ended = shell(f"ulimit -S -n 64; {LAUNCHER} --framework plain --nproc-per-node 8 {path}", tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("limit 64") == 8


def test_address_that_is_not_ours(launch, script):
    """A master address that no interface has is the user's business: the workers are told it, nothing fails here."""
    path = script("import os; print('master', os.environ['MASTER_ADDR'])")
    job = launch("--framework", "torch", "--no-standby", "--master-addr", "192.0.2.1", path)
    assert job.finish() == 0
    job.seen("master 192.0.2.1")


def test_interrupt_while_the_job_starts(launch):
    """Ctrl-C while the agent comes up ends the command quietly: its worker may be there already, and is silent itself."""
    job = launch("--framework", "plain", "--no-python", "sleep", "600")
    while not any("guard.py" in command for command in job.family().values()):
        assert job.process.poll() is None
    job.signal(signal.SIGINT)
    assert job.finish() == 130
    assert "Traceback" not in job.text
    assert "Error" not in job.text
    job.gone()


@pytest.mark.quiet
def test_standby_that_is_killed_is_replaced(launch, script):
    """A standby that dies while it waits is named and made again."""
    text = "import os, time; print('up', os.getpid(), flush=True); time.sleep(600)"
    job = launch("--framework", "plain", "--max-restarts", 1, "--preload", "decimal", script(text))
    job.seen("standbys are ready")
    standby = next(pid for pid, command in job.family().items() if "(standby)" in command)
    os.kill(standby, signal.SIGKILL)
    job.seen("the standby of local rank 0 ended: making another")
    job.seen("standbys are ready", times=2)
    os.kill(int(job.seen(r"up (\d+)").group(1)), signal.SIGKILL)
    job.seen("generation 2: 1 worker.s. started, 1 of them from standby")
    job.signal(signal.SIGINT)
    assert job.finish() == 130


def test_ports_of_another_host(tmp_path):
    """A port is reserved on all interfaces where the address is none of ours."""
    from elastic_adapter.core.reservation import Reservations

    reservations = Reservations("192.0.2.1")
    port = reservations.reserve()
    with socket.socket() as sock, pytest.raises(OSError, match="in use"):
        sock.bind(("127.0.0.1", port))
    reservations.close()


def test_working_folder_that_is_gone(tmp_path):
    """A working folder that was removed is one clear line."""
    ended = shell(f"mkdir gone; cd gone; rmdir ../gone; {LAUNCHER} --framework plain train.sh", tmp_path)
    assert ended.returncode == 2
    assert "the working folder no longer exists" in ended.stderr
    assert len([line for line in ended.stderr.splitlines() if "elastic-launch" in line]) == 1
    assert "Traceback" not in ended.stderr
