"""When the launcher starts workers again, when it gives up, and what it says."""

import os
import re
import signal
import uuid
from pathlib import Path

import pytest

PLAIN = ("--framework", "plain", "--nproc-per-node", 2, "--max-restarts", 5)
UP = "import os, signal, sys, time\ngeneration, rank = os.environ['ELASTIC_GENERATION'], os.environ['ELASTIC_RANK']\n"
UP += "print('generation', generation, 'rank', rank, 'pid', os.getpid(), flush=True)\n"


def generations(job):
    return {int(number) for number in re.findall(r"generation (\d+) rank \d+ pid", job.text)}


@pytest.mark.parametrize("how", ["sys.exit(5)", "raise ValueError('always')"])
def test_the_same_failure_at_the_start_is_not_repeated(launch, script, how):
    """Twice is enough: the rest of the budget is not burnt, and the error is told."""
    job = launch(*PLAIN, script(UP + f"if rank == '1': {how}\ntime.sleep(60)"))
    assert job.finish() in (1, 5)
    assert generations(job) == {1, 2}
    job.seen("the same failure 2 times in a row at the start")


def test_it_can_be_switched_off(launch, script):
    """Then the budget decides."""
    job = launch(*PLAIN, "--startup-failures", 0, script(UP + "if rank == '1': sys.exit(5)\ntime.sleep(60)"))
    assert job.finish() == 5
    assert generations(job) == set(range(1, 7))
    job.seen("all 5 restarts are used up")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import no_such_module_here", "No module named 'no_such_module_here': starting it again would not help"),
        ("def broken(:", "SyntaxError"),
        (
            "import argparse; argparse.ArgumentParser().parse_args(['--lrr'])",
            "unrecognized arguments: --lrr: starting it again would not help",
        ),
    ],
)
def test_a_program_that_can_not_start_is_not_started_again(launch, script, text, words):
    """The first time is enough, and the reason is the program's own words."""
    job = launch(*PLAIN, script(text))
    assert job.finish() in (1, 2)
    job.seen(re.escape(words))
    assert "generation 2" not in job.text


def test_workers_that_are_killed_on_purpose_do_not_count_as_failures_at_the_start(launch, script):
    """However soon after their start, and however often."""
    job = launch(*PLAIN, script(UP + "if generation == '4': sys.exit(0)\ntime.sleep(60)"))
    for generation in (1, 2, 3):
        os.kill(int(job.seen(rf"generation {generation} rank 1 pid (\d+)")[1]), signal.SIGKILL)
    assert job.finish() == 0, job.text
    job.seen("restart 3 of 5")


def test_rules_for_exits(launch, script):
    """One code is a good end, another ends the job."""
    job = launch(*PLAIN, "--on-exit", "6=ignore", "--on-exit", "7=fail", script(UP + "sys.exit(6)"))
    assert job.finish() == 0, job.text
    job.seen("exited with code 6; ignored .--on-exit 6=ignore")
    job = launch(*PLAIN, "--on-exit", "6=ignore", "--on-exit", "7=fail", script(UP + "sys.exit(7)"))
    assert job.finish() == 7
    job.seen("exited with code 7; not started again .--on-exit 7=fail")
    assert "generation 2" not in job.text


def test_a_pause_before_restarts(launch, script):
    """It is said how long, and the next generation comes."""
    text = (
        UP + "if generation == '3': sys.exit(0)\nif rank == '1': os.kill(os.getpid(), signal.SIGSEGV)\ntime.sleep(60)"
    )
    job = launch(*PLAIN, "--restart-backoff", "200ms:1s", script(text))
    assert job.finish() == 0, job.text
    job.seen(r"restart 1 of 5, in 0\.[12] s")
    job.seen(r"restart 2 of 5, in 0\.[234] s")


def test_a_crash_loop_of_one_rank(launch, script):
    """The same rank again and again, whatever it dies of."""
    how = "sys.exit(3) if generation == '1' else os.kill(os.getpid(), signal.SIGSEGV)"
    job = launch(*PLAIN, "--crash-loop", 3, script(UP + f"if rank == '1': {how}\ntime.sleep(60)"))
    assert job.finish() == 139
    assert generations(job) == {1, 2, 3}
    job.seen("rank 1 failed 3 times in a row")


def test_a_worker_that_got_on_is_past_its_start(launch, script):
    """The same failure again, as soon after the start: but it had done a step, and is told with it."""
    text = "from elastic_adapter.core.worker import progress\n" + UP
    text += "if generation == '4': sys.exit(0)\nprogress(11)\nif rank == '1': sys.exit(5)\ntime.sleep(60)"
    job = launch(*PLAIN, script(text))
    assert job.finish() == 0, job.text
    job.seen("restart 3 of 5")
    failed = launch("--framework", "plain", "--nproc-per-node", 2, script(text))
    assert failed.finish() == 5
    failed.seen("last step   11")


@pytest.fixture
def small_cgroup():
    """A memory cgroup of 64 MiB: the file to write one's pid to."""
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    folder = (v1 if v1.is_dir() else v2) / f"elastic-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
        limit = folder / ("memory.limit_in_bytes" if v1.is_dir() else "memory.max")
        limit.write_text(str(64 << 20))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield folder / "cgroup.procs"
    folder.rmdir()


def test_the_kernel_s_killer_is_named(launch, script, small_cgroup):
    """A worker that takes more memory than it may: who killed it is told, not only the signal."""
    text = UP + "if generation == '2': sys.exit(0)\n"
    text += (
        f"open({str(small_cgroup)!r}, 'w').write(str(os.getpid()))\n" + "x = [bytes(1 << 20) for _ in range(4096)]\n"
    )
    job = launch("--framework", "plain", "--max-restarts", 1, script(text.replace("bytes(1", "bytearray(b'x') * (1")))
    assert job.finish() == 0, job.text
    job.seen("was killed by SIGKILL, by all signs the kernel's OOM killer; restart 1 of 1")
