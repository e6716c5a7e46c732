"""Workers fail in all the ways they can; the job restarts or ends with the cause in words."""

import json
import os
import re
import signal
import socket

import pytest

from helpers.ports import free_ports

TORCH = ("--framework", "torch", "--nproc-per-node", "2")

FAIL_ONCE = """
import os, signal, sys, time
rank, generation = int(os.environ["RANK"]), int(os.environ["ELASTIC_GENERATION"])
print(f"rank {rank} generation {generation} restarts {os.environ['TORCHELASTIC_RESTART_COUNT']}", flush=True)
if rank == 0:
    open(f"up.{generation}", "w").close()
while not os.path.exists(f"up.{generation}"):
    time.sleep(0.005)
if rank == 1 and generation <= int(os.environ.get("FAILURES", "1")):
    HOW
if generation <= int(os.environ.get("FAILURES", "1")):
    time.sleep(600)
"""

WAYS = {
    "exception": ("raise ValueError('the data is bad')", 1, "exited with code 1"),
    "exit code": ("sys.exit(7)", 7, "exited with code 7"),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by SIGKILL"),
    "SIGSEGV": ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "was killed by SIGSEGV"),
}


@pytest.mark.parametrize("way", WAYS)
def test_failure_starts_the_next_generation(launch, script, way):
    """However one worker fails, all are stopped and the next generation runs to success."""
    how, _, words = WAYS[way]
    job = launch(*TORCH, "--max-restarts", 1, "--no-standby", script(FAIL_ONCE.replace("HOW", how)))
    assert job.finish() == 0
    assert re.search(rf"generation 2: .*rank 1 on \S+ {words}; restart 1 of 1", job.text)
    for rank in (0, 1):
        job.seen(f"rank {rank} generation 1 restarts 0")
        job.seen(f"rank {rank} generation 2 restarts 1")
    job.gone()


@pytest.mark.parametrize("way", WAYS)
def test_failure_without_budget_ends_with_the_workers_code(launch, script, way):
    """Without restarts the command ends with the worker's code and a summary of the first failure."""
    how, code, words = WAYS[way]
    job = launch(*TORCH, script(FAIL_ONCE.replace("HOW", how)))
    assert job.finish() == code
    summary = job.text[job.text.index("first failure") :]
    assert "rank        1 (local rank 1, generation 1" in summary
    assert f"node        {socket.gethostname()}" in summary
    assert re.search(r"time        \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", summary)
    assert f"how         {words}" in summary
    assert f"exit code   {code}" in summary
    job.gone()


def test_budget_is_spent_exactly(launch, script):
    """A job that always fails runs 1 + max-restarts generations."""
    job = launch(
        *TORCH,
        "--max-restarts",
        3,
        "--startup-failures",
        0,
        "--no-standby",
        script(FAIL_ONCE.replace("HOW", "sys.exit(5)")),
        env={"FAILURES": "99"},
    )
    assert job.finish() == 5
    generations = {int(number) for number in re.findall(r"rank 1 generation (\d+)", job.text)}
    assert generations == {1, 2, 3, 4}
    assert "all 3 restarts are used up" in job.text


def test_summary_has_the_traceback(launch, script):
    """An uncaught exception's traceback stands in the summary, although the script does not use @record."""
    job = launch(*TORCH, script(FAIL_ONCE.replace("HOW", "raise ValueError('the data is bad')")))
    job.finish()
    summary = job.text[job.text.index("first failure") :]
    assert "Traceback (most recent call last)" in summary
    assert "ValueError: the data is bad" in summary
    assert "bootstrap.py" not in summary


def test_summary_reads_torchs_error_file(launch, script):
    """With torch's @record the summary has the traceback of the error file."""
    text = """
import os, time
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    if os.environ["RANK"] == "1":
        raise KeyError("recorded by torch")
    time.sleep(600)
main()
"""
    job = launch(*TORCH, script(text))
    assert job.finish() == 1
    summary = job.text[job.text.index("first failure") :]
    assert "KeyError: 'recorded by torch'" in summary
    assert "in main" in summary


def test_summary_has_the_last_lines_of_stderr(launch, tmp_path):
    """A program without tracebacks is described by the last lines of its stderr."""
    program = tmp_path / "train.sh"
    program.write_text('#!/bin/sh\necho "disk is full" >&2\nexit 9\n')
    program.chmod(0o755)
    job = launch("--framework", "plain", program)
    assert job.finish() == 9
    summary = job.text[job.text.index("first failure") :]
    assert "last lines of stderr" in summary
    assert "disk is full" in summary


def test_survivors_do_not_hang_in_a_collective(launch, script):
    """A real gloo job: one rank is killed from outside, the other sits in all_reduce; both run again."""
    text = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
print(f"generation {os.environ['ELASTIC_GENERATION']} rank {dist.get_rank()} sum {value.item()} pid {os.getpid()}", flush=True)
if os.environ["ELASTIC_GENERATION"] == "1":
    if dist.get_rank() == 0:
        dist.barrier()
    else:
        import time; time.sleep(600)
dist.barrier()
dist.destroy_process_group()
"""
    job = launch(*TORCH, "--max-restarts", 1, "--no-standby", script(text))
    pid = int(job.seen(r"generation 1 rank 1 sum 2.0 pid (\d+)").group(1))
    job.seen(r"generation 1 rank 0 sum 2.0")
    os.kill(pid, signal.SIGKILL)
    assert job.finish() == 0
    for rank in (0, 1):
        job.seen(rf"generation 2 rank {rank} sum 2.0")


def test_program_that_cannot_be_executed(launch, tmp_path):
    """A program that the system refuses to execute is a failure with the reason, not a crash of the launcher."""
    program = tmp_path / "broken"
    program.write_text("#!/nonexistent/interpreter\n")
    program.chmod(0o755)
    job = launch("--framework", "plain", program)
    assert job.finish() == 127
    assert "can't start" in job.text
    assert "Traceback" not in job.text


def test_descendants_of_a_failed_worker_are_gone_before_the_next_generation(launch, script):
    """What a worker left behind, in a session of its own, does not live on into the next generation."""
    text = """
import os, subprocess, sys, time
if os.environ["ELASTIC_GENERATION"] == "1":
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    print(f"left {child.pid}", flush=True)
    sys.exit(3)
pid = int(open("left").read())
print("alive" if os.path.exists(f"/proc/{pid}") else "gone")
"""
    path = script(text.replace('print(f"left {child.pid}", flush=True)', 'open("left", "w").write(str(child.pid))'))
    job = launch("--framework", "plain", "--max-restarts", 1, path)
    assert job.finish() == 0
    job.seen(r"\] gone$")


def test_error_file_that_is_no_text(launch, script):
    """An error file full of anything does not confuse the launcher."""
    text = """
import os, sys
with open(os.environ["TORCHELASTIC_ERROR_FILE"], "wb") as file:
    file.write(b"\\xff\\xfe" * 5_000_000)
sys.exit(6)
"""
    job = launch("--framework", "torch", script(text))
    assert job.finish() == 6
    assert "first failure" in job.text
    assert "Traceback" not in job.text


def test_long_temporary_folder(launch, script, tmp_path):
    """A TMPDIR too long for a Unix socket does not matter."""
    long = tmp_path / ("x" * 120)
    long.mkdir()
    job = launch("--framework", "plain", script("print('up')"), env={"TMPDIR": str(long)})
    assert job.finish() == 0


def test_chosen_master_port_serves_every_generation(launch, script):
    """With --master-port the next generation gets the same port, once the one before has let go of it."""
    text = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
print(f"generation {os.environ['ELASTIC_GENERATION']} at {os.environ['MASTER_PORT']}", flush=True)
dist.barrier()
if os.environ["ELASTIC_GENERATION"] == "1":
    os._exit(3)
dist.destroy_process_group()
"""
    (port,) = free_ports(1)
    job = launch(*TORCH, "--max-restarts", 1, "--no-standby", "--master-port", port, script(text))
    assert job.finish() == 0
    job.seen(f"generation 2 at {port}", times=2)


def test_the_end_as_json(launch, script, tmp_path):
    """What a person reads in the summary, a program finds in a file; and torch's tools where they look for it."""
    path, error = tmp_path / "new" / "end.json", tmp_path / "error.json"
    text = script("raise ValueError('the data is bad')")
    job = launch(*TORCH, "--no-standby", "--summary-file", path, text, env={"TORCHELASTIC_ERROR_FILE": str(error)})
    assert job.finish() == 1
    end = json.loads(path.read_text())
    assert (end["outcome"], end["exit_code"]) == ("failed", 1)
    first = end["first_failure"]
    assert first["error"] == "ValueError: the data is bad"
    assert (first["how"], first["signal"], first["generation"]) == ("exited with code 1", None, 1)
    assert "Traceback" in first["detail"]
    recorded = json.loads(error.read_text())["message"]
    assert (recorded["message"], recorded["errorCode"]) == ("ValueError: the data is bad", 1)
    assert "Traceback" in recorded["extraInfo"]["py_callstack"]


def test_the_end_of_a_good_job_as_json(launch, script, tmp_path):
    """A good end is one, too; and a file that can't be written does not change it."""
    job = launch("--framework", "plain", "--summary-file", tmp_path / "end.json", script("print('done')"))
    assert job.finish() == 0
    end = json.loads((tmp_path / "end.json").read_text())
    assert (end["outcome"], end["exit_code"], end["first_failure"]) == ("succeeded", 0, None)
    job = launch("--framework", "plain", "--summary-file", "/proc/nowhere/end.json", script("print('done')"))
    assert job.finish() == 0
    job.seen("/proc/nowhere/end.json can't be written")
