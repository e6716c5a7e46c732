"""The guard with real processes: what they inherit, how their ends are seen, and that nothing is left of them."""

import asyncio
import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_adapter.core.errors import SpawnFailed
from elastic_adapter.core.processes import CHANNEL_FD

# A worker that will not go by itself: a child, one in a session of its own with a child there, and a daemon.
# It prints its own pid, its parent's, those still below it, and the daemon's.
TREE = """
import json, os, signal
for name in ("SIGTERM", "SIGHUP", "SIGINT"):
    signal.signal(getattr(signal, name), signal.SIG_IGN)
reader, writer = os.pipe()
def stay(role):
    os.write(writer, b"%s %d\\n" % (role, os.getpid()))
    while True:
        signal.pause()
if os.fork() == 0:
    stay(b"below")
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        stay(b"below")
    stay(b"below")
first = os.fork()
if first == 0:
    os.setsid()
    if os.fork() == 0:
        stay(b"daemon")
    os._exit(0)
os.waitpid(first, 0)
os.close(writer)
found = b""
while found.count(b"\\n") < 4:
    found += os.read(reader, 4096)
pids = {"worker": os.getpid(), "guard": os.getppid(), "below": [], "daemon": []}
for role, pid in map(str.split, found.decode().splitlines()):
    pids[role].append(int(pid))
print(json.dumps(pids))
"""
STAY = "\nwhile True:\n    signal.pause()\n"

# An agent reduced to what the guard sees of it. It ends when its stdin does; it tells when the guard is lost.
AGENT = """
import asyncio, json, os, sys
from elastic_adapter.core.errors import GuardLost
from elastic_adapter.core.processes import Guard, Spawn

async def main(folder, *argv):
    guard = Guard.start(folder)
    guard.listen()
    process = await guard.spawn(Spawn(argv, {}))
    print(os.read(process.stdout, 65536).decode().strip(), flush=True)
    await guard.lost
    exit = await process.exited
    await guard.sweep()
    try:
        await guard.spawn(Spawn(argv, {}))
    except GuardLost as error:
        print(json.dumps({"signal": exit.signal, "refused": str(error)}), flush=True)
    await guard.close()

asyncio.run(main(*sys.argv[1:]))
"""

DISPOSITIONS = ("SigBlk", "SigIgn", "SigCgt")


def dispositions(status):
    lines = dict(line.split(":\t", 1) for line in status.splitlines())
    return {name: lines[name] for name in DISPOSITIONS}


@pytest.fixture
def agent(tmp_path):
    """An agent in a process of its own, with a worker that has descendants; gives it and their pids."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    (folder / "something").write_text("to be removed")
    worker = (sys.executable, "-E", "-s", "-S", "-u", "-c", TREE + STAY)
    with subprocess.Popen(
        [sys.executable, "-c", AGENT, str(folder), *worker], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process, folder, json.loads(process.stdout.readline())
        finally:
            process.kill()


def test_output_environment_and_code_of_a_process(guarded, monkeypatch):
    """A process has its output on two pipes, the agent's environment with the changes asked for, and a code."""
    monkeypatch.setenv("KEPT", "as it was")
    monkeypatch.setenv("CHANGED", "before")
    monkeypatch.setenv("REMOVED", "before")
    script = 'echo "$KEPT $CHANGED $ADDED ${REMOVED-unset}"; echo "to stderr" >&2; exit 3'

    async def main():
        async with guarded() as ward:
            return await ward.run("sh", "-c", script, set={"CHANGED": "after", "ADDED": "new"}, unset=("REMOVED",))

    ended = asyncio.run(main())
    assert (ended.stdout, ended.stderr) == ("as it was after new unset\n", "to stderr\n")
    assert (ended.exit.code, ended.exit.signal) == (3, None)


def test_words_that_are_no_text_arrive_as_they_are(guarded):
    """Arguments and variables may hold any bytes, not only UTF-8."""
    odd = os.fsdecode(b"gr\xc3\xb6\xc3\x9fe \xff\n")

    async def main():
        async with guarded() as ward:
            return await ward.run("sh", "-c", 'printf %s "$1"; printf %s "$ODD" >&2', "sh", odd, set={"ODD": "größe"})

    ended = asyncio.run(main())
    assert (ended.stdout, ended.stderr) == ("größe \\xff\n", "größe")


def test_large_request(guarded):
    """A request that is longer than one read of the guard arrives whole, with its descriptors."""
    words = {f"LONG_{number}": "x" * 100_000 for number in range(3)}

    async def main():
        async with guarded() as ward:
            return await ward.run("sh", "-c", "printf %s $LONG_0$LONG_1$LONG_2 | wc -c", set=words)

    assert asyncio.run(main()).stdout.strip() == "300000"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_death_by_signal_is_reported_as_such(guarded, number):
    """A process that a signal ended has that signal and no code."""

    async def main():
        async with guarded() as ward:
            return await ward.run("sh", "-c", f"kill -{int(number)} $$")

    exit = asyncio.run(main()).exit
    assert (exit.code, exit.signal) == (None, number)


def test_channel_carries_messages_both_ways(guarded):
    """What is sent on the channel reaches the process at CHANNEL_FD, and its answer comes back."""
    code = (
        f"import os, sys; sys.path.insert(0, {str(Path(__file__).parents[2] / 'core')!r}); import frames\n"
        f"frames.write({CHANNEL_FD}, {{'echo': frames.read({CHANNEL_FD})}})"
    )

    async def main():
        async with guarded() as ward:
            child = await ward.python(code)
            child.send({"text": "größe", "large": "x" * 100_000})
            return (await child.message("echo"))["echo"]

    assert asyncio.run(main()) == {"text": "größe", "large": "x" * 100_000}


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda path: None, errno.ENOENT),
        (lambda path: path.write_text("#!/bin/sh\n"), errno.EACCES),
        (lambda path: (path.write_text("no header"), path.chmod(0o755)), errno.ENOEXEC),
    ],
    ids=["missing", "not executable", "no program"],
)
def test_program_that_cannot_be_started(guarded, tmp_path, make, expected):
    """A program that can't be executed raises SpawnFailed with its name and the reason; the guard goes on."""
    path = tmp_path / "program"
    make(path)

    async def main():
        async with guarded() as ward:
            with pytest.raises(SpawnFailed) as caught:
                await ward.start(str(path))
            return caught.value, await ward.run("true")

    error, after = asyncio.run(main())
    assert (error.errno, error.program) == (expected, str(path))
    assert os.strerror(expected) in str(error)
    assert after.exit.code == 0


def test_lack_of_processes_is_a_failed_spawn_not_the_end_of_the_guard(guarded, few_processes):
    """When the system has no process to give, the spawn fails and those that run go on."""

    async def main():
        async with guarded() as ward:
            running = await ward.start("sh", "-c", "echo $PPID; exec sleep 1000")
            with few_processes(int(await running.line())), pytest.raises(SpawnFailed) as caught:
                await ward.start("true")
            after = await ward.run("true")
            return caught.value.errno, after.exit.code, running.process.alive

    assert asyncio.run(main()) == (errno.EAGAIN, 0, True)


@pytest.fixture
def few_processes():
    """Forbids a process to have children, by a control group of its own."""
    for mount in ("/sys/fs/cgroup/pids", "/sys/fs/cgroup"):
        folder = Path(mount) / f"elastic-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            folder.mkdir()
            if (folder / "pids.max").exists():
                break
            folder.rmdir()
    else:
        pytest.skip("no pids controller that this user may write to (cgroup v1 or v2)")

    @contextlib.contextmanager
    def limit(pid):
        current = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
        wanted = "pids" if mount.endswith("pids") else ""
        previous = next(line.split(":", 2)[2] for line in current if wanted in line.split(":")[1].split(","))
        (folder / "pids.max").write_text("1")
        (folder / "cgroup.procs").write_text(str(pid))
        try:
            yield
        finally:
            Path(mount, previous.lstrip("/"), "cgroup.procs").write_text(str(pid))

    yield limit
    folder.rmdir()


def test_signal_reaches_the_whole_group(guarded, watch):
    """A signal goes to the process and to the children that it has in its group."""

    async def main():
        async with guarded() as ward:
            child = await ward.start("sh", "-c", "sleep 1000 & echo $!; wait")
            sleeper = watch(int(await child.line()))
            ward.guard.signal(child.process, signal.SIGTERM)
            exit = await child.exited()
            return exit.signal, sleeper.wait()

    assert asyncio.run(main()) == (signal.SIGTERM, set())


# Writes a line for each SIGUSR1, and has a child that would die of it.
ASKED = """
import signal, subprocess, sys
signal.signal(signal.SIGUSR1, lambda *_: print("asked"))
child = subprocess.Popen(["sleep", "1000"])
print(child.pid)
while True:
    signal.pause()
"""


def test_asking_reaches_the_process_alone(guarded, watch):
    """A signal to a process alone passes by the children that it has in its group."""

    async def main():
        async with guarded() as ward:
            child = await ward.python(ASKED)
            sleeper = int(await child.line())
            alive = watch(sleeper).alive
            ward.guard.ask(child.process, signal.SIGUSR1)
            # The guard takes requests in order: when the process has been asked, nobody else will be.
            return await child.line(), alive() == {sleeper}

    assert asyncio.run(main()) == ("asked", True)


def test_asking_kills_nobody(guarded):
    """A process that does not catch the signal is not sent it: it would die."""

    async def main():
        async with guarded() as ward:
            child = await ward.start("sleep", "1000")
            for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGRTMIN + 11):
                ward.guard.ask(child.process, number)
            await ward.run("true")
            return child.process.alive

    assert asyncio.run(main())


def test_signal_to_a_process_that_has_ended_is_no_error(guarded):
    """A signal or a new priority that comes too late is dropped."""

    async def main():
        async with guarded() as ward:
            child = await ward.start("true")
            await child.exited()
            ward.guard.signal(child.process, signal.SIGTERM)
            ward.guard.ask(child.process, signal.SIGTERM)
            ward.guard.renice(child.process)
            return await ward.run("true")

    assert asyncio.run(main()).exit.code == 0


def test_sweep_ends_leftovers_and_spares_the_living(guarded, watch):
    """A sweep kills a daemon, but neither a process that was asked for nor anything that still is below it."""

    async def main():
        async with guarded() as ward:
            child = await ward.python(TREE + STAY)
            pids = json.loads(await child.line())
            daemons, family = watch(*pids["daemon"]), watch(pids["worker"], *pids["below"])
            await asyncio.wait_for(ward.guard.sweep(), 30)
            return daemons.alive(), family.alive() == {pids["worker"], *pids["below"]}, child.process.alive

    assert asyncio.run(main()) == (set(), True, True)


def test_sweep_ends_all_that_a_dead_worker_left(guarded, watch):
    """When a worker has ended, its children, its children's sessions and its daemons are leftovers."""

    async def main():
        async with guarded() as ward:
            child = await ward.python(TREE)
            pids = json.loads(await child.line())
            await child.exited()
            left = watch(*pids["below"], *pids["daemon"])
            before = len(left.alive())
            await asyncio.wait_for(ward.guard.sweep(), 30)
            return before, left.alive()

    assert asyncio.run(main()) == (4, set())


def test_closing_the_guard_ends_everything_and_removes_the_folder(guarded, watch):
    """An orderly end of the agent leaves no process and no scratch folder."""

    async def main():
        async with guarded() as ward:
            child = await ward.python(TREE + STAY)
            pids = json.loads(await child.line())
        return watch_ended(pids), ward.folder.exists()

    def watch_ended(pids):
        alive = set()
        for pid in (pids["worker"], *pids["below"], *pids["daemon"]):
            with contextlib.suppress(ProcessLookupError):
                alive |= watch(pid).wait()
        return alive

    assert asyncio.run(main()) == (set(), False)


def test_death_of_the_agent_leaves_nothing(agent, watch):
    """After kill -9 of the agent no worker, grandchild or daemon is left, nor the guard, nor the scratch folder."""
    process, folder, pids = agent
    everything = watch(pids["worker"], pids["guard"], *pids["below"], *pids["daemon"])
    process.kill()
    assert everything.wait() == set()
    _reap(pids["guard"])
    assert not folder.exists()


def test_death_of_the_guard_is_seen_and_leaves_no_worker(agent, watch):
    """After kill -9 of the guard the agent ends all workers and descendants, and whoever waits or asks is told."""
    process, _, pids = agent
    workers = watch(pids["worker"], *pids["below"], *pids["daemon"])
    os.kill(pids["guard"], signal.SIGKILL)
    told = json.loads(process.stdout.readline())
    assert workers.alive() == set()
    assert told == {"signal": signal.SIGKILL, "refused": "the guard process ended: its workers were ended with it"}
    assert process.wait(30) == 0


def _reap(pid):
    """An orphan may have become ours: guards make this process a subreaper."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def test_guard_does_not_mind_signals(guarded):
    """Signals that are sent to the guard, as to a whole group, neither end it nor its workers."""

    async def main():
        async with guarded() as ward:
            running = await ward.start("sh", "-c", "echo $PPID; exec sleep 1000")
            guard = int(await running.line())
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
                os.kill(guard, number)
            after = await ward.run("sh", "-c", "echo $PPID")
            return int(after.stdout) == guard, running.process.alive

    assert asyncio.run(main()) == (True, True)


@pytest.mark.parametrize("ignored", [(), (signal.SIGHUP,), (signal.SIGINT, signal.SIGUSR1, signal.SIGPIPE)], ids=str)
def test_signal_dispositions_are_those_of_any_child(guarded, ignored):
    """A worker's signals are as in a child of subprocess.Popen; what was ignored (nohup) stays ignored."""

    async def main():
        async with guarded() as ward:
            return (await ward.run("cat", "/proc/self/status")).stdout

    previous = {number: signal.signal(number, signal.SIG_IGN) for number in ignored}
    try:
        ours = asyncio.run(main())
        plain = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True, check=True).stdout
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    assert dispositions(ours) == dispositions(plain)
    if signal.SIGHUP in ignored:
        assert int(dispositions(ours)["SigIgn"], 16) >> signal.SIGHUP - 1 & 1


def test_only_standard_descriptors_and_the_channel_are_inherited(guarded):
    """A worker has stdin, stdout, stderr and its channel, whatever is open in the agent and the guard."""
    code = "import os; print([fd for fd in range(1024) if os.path.exists(f'/proc/self/fd/{fd}')])"

    async def main():
        async with guarded() as ward:
            await ward.start("sleep", "1000")
            child = await ward.python(code)
            return json.loads(await child.line())

    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    try:
        assert asyncio.run(main()) == [0, 1, 2, CHANNEL_FD]
    finally:
        os.close(reader)
        os.close(writer)


def test_stdin_is_the_agents(guarded, tmp_path):
    """A worker reads what the agent was given as stdin."""
    (tmp_path / "input").write_text("from stdin\n")

    async def main():
        async with guarded(stdin=tmp_path / "input") as ward:
            return await ward.run("cat")

    assert asyncio.run(main()).stdout == "from stdin\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may raise a priority again")
def test_background_process_gets_its_priority_back(guarded):
    """A background process has the lowest priority until it becomes a worker, and all its threads get it back."""
    code = (
        "import threading, sys; stop = threading.Event()\n"
        "threading.Thread(target=stop.wait, daemon=True).start(); print('up'); stop.wait()"
    )

    async def main():
        async with guarded() as ward:
            child = await ward.python(code, background=True)
            await child.line()
            tasks = [int(task) for task in os.listdir(f"/proc/{child.process.pid}/task")]
            before = [os.sched_getscheduler(task) for task in tasks]
            ward.guard.renice(child.process)
            # The guard takes requests in order: when the next process is there, the one before was done.
            await ward.run("true")
            return before, [os.sched_getscheduler(task) for task in tasks]

    assert asyncio.run(main()) == ([os.SCHED_IDLE] * 2, [os.SCHED_OTHER] * 2)


def test_cpus_of_a_process(guarded):
    """A process that is bound to CPUs runs on these; one that is not runs on all that the agent has."""
    every = os.sched_getaffinity(0)
    one = frozenset({max(every)})
    code = "import os; print(sorted(os.sched_getaffinity(0)))"

    async def main():
        async with guarded() as ward:
            bound, free = await ward.python(code, cpus=one), await ward.python(code)
            return json.loads(await bound.line()), json.loads(await free.line())

    assert asyncio.run(main()) == (sorted(one), sorted(every))
