"""Stacks of real processes that hang, read by a real py-spy or written by themselves; nobody comes to harm by it."""

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from elastic_adapter.core import dump as core_dump
from elastic_adapter.core.dump import Dumpable, StackDumper, find_py_spy
from elastic_adapter.core.processes import STACKS_FD, STACKS_SIGNAL, Guard
from elastic_adapter.core.stacks import parse, place

FAULTHANDLER, PY_SPY = "faulthandler", "py-spy"
DEAF = "it does not take the signal for its stacks (it is still starting, or undid what was set up for that)"

ASLEEP = "import time\ndef hang():\n    print('up')\n    time.sleep(1000)\nhang()"
# Each hangs in a function of that name, and says so before.
HANG = {
    "asleep": ASLEEP,
    "busy": "def hang():\n    print('up')\n    while True:\n        pass\nhang()",
    # C's sleep ends early when a signal is handled.
    "in C with the GIL held": (
        "import ctypes\nsleep = ctypes.PyDLL(None).sleep\ndef hang():\n    print('up')\n"
        "    while True:\n        sleep(1000)\nhang()"
    ),
    "with threads": (
        "import threading, time\ndef other():\n    time.sleep(1000)\n"
        "for _ in range(3): threading.Thread(target=other, daemon=True).start()\n"
        "def hang():\n    print('up')\n    time.sleep(1000)\nhang()"
    ),
    "deep": (
        "import time\ndef hang(depth):\n    if depth:\n        hang(depth - 1)\n    print('up')\n"
        "    time.sleep(1000)\nhang(200)"
    ),
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder of its own to be in; and time enough: nothing here waits for the end of it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(core_dump, "_SPY_S", 30.0)
    monkeypatch.setattr(core_dump, "_ANSWER_S", 30.0)
    return tmp_path


@pytest.fixture(params=[FAULTHANDLER, PY_SPY])
def by(request):
    """The way in which stacks are to be had."""
    if request.param == PY_SPY and find_py_spy() is None:
        pytest.skip("py-spy is not installed")
    return request.param


def write(program):
    Path("program.py").write_text(program)
    return {"mode": "script", "target": "program.py"}


async def started(ward, program):
    """A worker that has written its first line."""
    child = await ward.cold(write(program))
    assert await child.line() == "up"
    return child


async def dumped(ward, *children, by=FAULTHANDLER, py_spy=None):
    dumper = StackDumper(ward.guard, find_py_spy() if by == PY_SPY else py_spy)
    workers = [Dumpable(n, child.process, child.stacks, Path(f"dumps/{n}.txt")) for n, child in enumerate(children)]
    dumps = await dumper.dump(workers)
    # The guard takes requests in order: what it was asked for has been done when the next thing is.
    await ward.run("true")
    return dumps if len(children) > 1 else dumps[0]


def script(text):
    path = Path("py-spy")
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path.absolute())


async def reached(process, state):
    while process.state != state:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("how", HANG)
def test_worker_that_hangs(guarded, how, by):
    """Whatever it hangs in, its main thread is found, and the text is in the file that was asked for."""

    async def main():
        async with guarded() as ward:
            child = await started(ward, HANG[how])
            return await dumped(ward, child, by=by), child.process.alive

    dump, is_alive = asyncio.run(main())
    assert (dump.source, is_alive) == (by, True)
    where = place(parse(dump.text))
    assert (where.partition(":")[0], where.partition(" in ")[2]) == ("program.py", "hang")
    assert dump.file == Path("dumps/0.txt")
    assert dump.file.read_text() == dump.text


def test_worker_goes_on_after_dumps(guarded, by):
    """When what it waited for comes, it ends as it would have ended."""
    os.mkfifo("fifo")
    program = "def hang():\n    print('up')\n    return open('fifo').read()\nprint(hang())"

    async def main():
        async with guarded() as ward:
            child = await started(ward, program)
            dumps = [await dumped(ward, child, by=by) for _ in range(3)]
            await asyncio.to_thread(Path("fifo").write_text, "here you are")
            return dumps, await child.ended()

    dumps, ended = asyncio.run(main())
    assert [dump.source for dump in dumps] == [by] * 3
    assert all(dump.text.count("in hang") == 1 for dump in dumps if by == FAULTHANDLER)
    assert (ended.how, ended.stdout, ended.stderr) == (0, "here you are\n", "")


def test_several_workers_at_once(guarded, by):
    """Each has its own stack, in the order in which they were asked for."""

    async def main():
        async with guarded() as ward:
            children = [await started(ward, ASLEEP.replace("hang", name)) for name in ("one", "two", "three")]
            return await dumped(ward, *children, by=by)

    dumps = asyncio.run(main())
    assert [(dump.local_rank, place(parse(dump.text)).split()[-1]) for dump in dumps] == [
        (0, "one"),
        (1, "two"),
        (2, "three"),
    ]


def test_standby_before_and_after_it_is_woken(guarded, by):
    """A standby waits in its bootstrap, a woken one is in its program."""

    async def main():
        async with guarded() as ward:
            child = await ward.standby(write(ASLEEP), "json")
            await child.message("ready")
            waiting = await dumped(ward, child, by=by)
            ward.wake(child)
            await child.line()
            return waiting, await dumped(ward, child, by=by)

    waiting, woken = asyncio.run(main())
    assert (waiting.source, woken.source) == (by, by)
    assert {Path(frame.file).name for frame in parse(waiting.text).frames} == {"frames.py", "bootstrap.py"}
    assert place(parse(woken.text)).endswith(" in hang")


def test_native_program_is_left_alone(guarded, by):
    """It has no stacks to offer, and lives on."""

    async def main():
        async with guarded() as ward:
            child = await ward.start("sleep", "1000")
            return await dumped(ward, child, by=by), child.process.alive

    dump, is_alive = asyncio.run(main())
    assert is_alive
    failure = " (py-spy: Failed to find python version from target process)" if by == PY_SPY else ""
    assert (dump.text, dump.source) == ("", f"it is no Python program{failure}")
    assert dump.file.read_text() == f"{dump.source}\n"


# Workers that the signal would kill, or to which it would mean something else.
UNABLE = {
    "took the handler away": (f"import faulthandler; faulthandler.unregister({STACKS_SIGNAL})", DEAF),
    "blocks it": (
        f"import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [{STACKS_SIGNAL}])",
        "it blocks the signal for its stacks",
    ),
    "closed the file": (f"import os; os.close({STACKS_FD})", DEAF),
    "has another file there": (f"import os; os.dup2(os.open('own', os.O_CREAT | os.O_WRONLY), {STACKS_FD})", DEAF),
    "became another program": ("import os; os.execvp('sh', ['sh', '-c', 'echo up; exec sleep 1000'])", DEAF),
}


@pytest.mark.parametrize("how", UNABLE)
def test_worker_that_undid_what_was_set_up(guarded, how):
    """It is not sent the signal; it lives on, and no file of its own gets a stack."""
    text, why = UNABLE[how]

    async def main():
        async with guarded() as ward:
            child = await started(ward, f"{text}\n{ASLEEP}")
            return await dumped(ward, child), child.process.alive

    dump, is_alive = asyncio.run(main())
    assert (dump.text, dump.source, is_alive) == ("", why, True)
    assert not Path("own").exists() or not Path("own").stat().st_size


def test_worker_with_a_handler_of_its_own(guarded, monkeypatch):
    """A program that uses the signal itself gets one that it did not expect; its stacks are not to be had."""
    monkeypatch.setattr(core_dump, "_ANSWER_S", 0.2)

    async def main():
        async with guarded() as ward:
            child = await started(
                ward, f"import signal\nsignal.signal({STACKS_SIGNAL}, lambda *_: print('!'))\n{ASLEEP}"
            )
            return await dumped(ward, child), await child.line(), child.process.alive

    dump, line, is_alive = asyncio.run(main())
    assert (dump.text, dump.source, line, is_alive) == ("", "it did not answer within 0.2 s", "!", True)


def test_worker_that_is_still_starting(guarded, folder):
    """A Python that has not come to its bootstrap yet is not sent the signal, which would kill it."""

    async def main():
        async with guarded() as ward:
            child = await ward.python("print('up'); import time; time.sleep(1000)")
            child.stacks = str(folder / "stacks")
            await child.line()
            return await dumped(ward, child), child.process.alive

    dump, is_alive = asyncio.run(main())
    assert (dump.text, dump.source, is_alive) == ("", DEAF, True)


def test_worker_that_is_stopped(guarded, by):
    """That it is stopped is told. py-spy reads it all the same; otherwise nothing is sent that would wait for it."""
    os.mkfifo("fifo")

    async def main():
        async with guarded() as ward:
            child = await started(ward, "def hang():\n    print('up')\n    open('fifo').read()\nhang()")
            os.kill(child.process.pid, signal.SIGSTOP)
            await reached(child.process, "T")
            dump = await dumped(ward, child, by=by)
            state = child.process.state
            os.kill(child.process.pid, signal.SIGCONT)
            await asyncio.to_thread(Path("fifo").write_text, "")
            return dump, state, await child.ended(), os.stat(child.stacks).st_size

    dump, state, ended, written = asyncio.run(main())
    assert (dump.state, state, ended.how, written) == ("it is stopped (state T)", "T", 0, 0)
    if by == PY_SPY:
        assert (dump.source, place(parse(dump.text)).split()[-1]) == (PY_SPY, "hang")
        assert dump.file.read_text() == f"{dump.state}\n{dump.text}"
    else:
        assert (dump.text, dump.source) == ("", dump.state)


def test_worker_in_an_uninterruptible_sleep(guarded, by):
    """As behind a disk that does not answer: told, and py-spy reads it all the same."""
    os.mkfifo("fifo")
    # The parent of a child that has not come to its program yet, here because it opens a file that nobody writes.
    program = (
        "import os\ndef hang():\n    print('up')\n"
        "    os.posix_spawn('/bin/true', ['true'], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, 'fifo', os.O_RDONLY, 0)])\n"
        "hang()"
    )

    async def main():
        async with guarded() as ward:
            child = await started(ward, program)
            await reached(child.process, "D")
            dump = await dumped(ward, child, by=by)
            await asyncio.to_thread(Path("fifo").write_text, "")
            return dump, await child.ended()

    dump, ended = asyncio.run(main())
    assert (dump.state, ended.how) == ("it is in an uninterruptible sleep (state D)", 0)
    if by == PY_SPY:
        assert (dump.source, place(parse(dump.text)).split()[-1]) == (PY_SPY, "hang")
    else:
        assert (dump.text, dump.source) == ("", dump.state)


def test_worker_that_has_ended(guarded, by):
    """There is nothing to dump, and that is said."""

    async def main():
        async with guarded() as ward:
            child = await started(ward, "print('up')")
            await child.exited()
            return await dumped(ward, child, by=by)

    dump = asyncio.run(main())
    assert (dump.text, dump.source, dump.state) == ("", "it has ended", "it has ended")


FAMILY = """
import json, os, subprocess, time
def hang():
    if forked:
        print('up')
        print(json.dumps([sleeper.pid, forked]))
    time.sleep(1000)
sleeper = subprocess.Popen(["sleep", "1000"])
forked = os.fork()
hang()
"""


def test_children_of_a_worker_are_left_alone(guarded, watch, by):
    """Neither a forked child nor a program that the worker started is signalled, or part of the dump."""

    async def main():
        async with guarded() as ward:
            child = await started(ward, FAMILY)
            children = watch(*json.loads(await child.line()))
            dump = await dumped(ward, child, by=by)
            return dump, child.process.alive, len(children.alive())

    dump, *alive = asyncio.run(main())
    assert (dump.source, alive) == (by, [True, 2])
    assert dump.text.count("hang") == 1


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        (
            "echo \"Permission Denied: Try running again with elevated permissions by going 'sudo env'\" >&2; exit 1",
            "py-spy: Permission Denied: Try running again with elevated permissions by going 'sudo env'",
        ),
        ("echo 'Error: Failed to suspend process' >&2; echo 'Process 1: x'", "py-spy: Failed to suspend process"),
        ("exit 0", "py-spy: no stack"),
        (None, "py-spy: can't start /nowhere/py-spy: No such file or directory"),
    ],
    ids=["may not", "can not", "says nothing", "is missing"],
)
def test_where_py_spy_fails_the_worker_is_asked(guarded, text, failure):
    """Its words are kept for a worker that can't be asked, either."""
    py_spy = "/nowhere/py-spy" if text is None else script(text)

    async def main():
        async with guarded() as ward:
            child, native = await started(ward, ASLEEP), await ward.start("sleep", "1000")
            return await dumped(ward, child, native, py_spy=py_spy)

    asked, native = asyncio.run(main())
    assert (asked.source, place(parse(asked.text)).split()[-1]) == (FAULTHANDLER, "hang")
    assert native.source == f"it is no Python program ({failure})"


@pytest.mark.parametrize("text", ["exec sleep 1000", "exec yes"], ids=["hangs", "never stops talking"])
def test_py_spy_that_does_not_end_is_killed(guarded, monkeypatch, text):
    """It is not waited for any longer, and not left behind; the worker is asked."""
    monkeypatch.setattr(core_dump, "_SPY_S", 2.0)
    spawn, spies = Guard.spawn, []

    async def seen(self, request):
        process = await spawn(self, request)
        if request.argv[0] == py_spy:
            spies.append(process)
        return process

    monkeypatch.setattr(Guard, "spawn", seen)
    py_spy = script(text)

    async def main():
        async with guarded() as ward:
            dump = await dumped(ward, await started(ward, ASLEEP), py_spy=py_spy)
            (spy,) = spies
            return dump, await asyncio.wait_for(spy.exited, 30)

    dump, exit = asyncio.run(main())
    assert dump.source == FAULTHANDLER
    # Who talks may find that nobody listens before it is killed.
    assert exit.signal in (signal.SIGKILL, signal.SIGPIPE)


def test_command_line_is_not_in_the_dump(guarded):
    """Arguments may be secrets, which have no place in a log."""
    if find_py_spy() is None:
        pytest.skip("py-spy is not installed")

    async def main():
        async with guarded() as ward:
            # The words that the bootstrap does not read are there for ps, and py-spy sees them, too.
            child = await ward.start(*ward.bootstrap_argv, "program.py", "--token=secret")
            child.send({"program": write(ASLEEP), "start": {"args": []}})
            await child.line()
            return await dumped(ward, child, by=PY_SPY), child.process.pid

    dump, pid = asyncio.run(main())
    assert dump.text.startswith(f"Process {pid}:\nPython v")
    assert parse(dump.text) is not None
    assert "secret" not in dump.text


def test_file_that_cannot_be_written(guarded):
    """The stacks are there all the same, and that there is no file is told."""
    Path("dumps").write_text("a file where a folder should be")

    async def main():
        async with guarded() as ward:
            return await dumped(ward, await started(ward, ASLEEP))

    dump = asyncio.run(main())
    assert (dump.source, dump.file) == (FAULTHANDLER, None)
