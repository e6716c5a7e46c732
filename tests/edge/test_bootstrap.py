"""The bootstrap against a fresh interpreter: a program must not be able to tell them apart, cold or woken."""

import asyncio
import json
import py_compile
import signal
import subprocess
import sys
import zipapp
import zipfile
from pathlib import Path

import pytest

from elastic_adapter.core.processes import BOOTSTRAP, CHANNEL_FD, STACKS_FD, STACKS_SIGNAL

# Says in which circumstances it runs. The first line comes first: the names are those of an empty program.
DUMP = '''"""A program."""
names = sorted(globals())
import gc, json, os, signal, sys, threading
def annotated(value: names): pass
def spec(found):
    return found and [found.name, found.origin, type(found.loader).__name__, found.submodule_search_locations]
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status"))
# faulthandler's: the stack on stderr is meant, and so is the one that the agent asks for.
ours = sum(1 << getattr(signal, name) - 1 for name in ("SIGSEGV", "SIGFPE", "SIGABRT", "SIGBUS", "SIGILL"))
ours |= 1 << signal.SIGRTMIN + 11 - 1
def is_open(fd):
    return os.path.exists(f"/proc/self/fd/{fd}")
umask = os.umask(0)
os.umask(umask)
json.dump({
    "names": names, "name": __name__, "doc": __doc__, "package": __package__, "cached": __cached__,
    "file": __file__, "spec": spec(__spec__), "loader": type(__loader__).__name__,
    "loader path": getattr(__loader__, "path", None) or getattr(__loader__, "archive", None),
    "builtins": type(__builtins__).__name__, "main": sys.modules["__main__"].__dict__ is globals(),
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "executable": sys.executable,
    "flags": str(sys.flags), "warnoptions": sys.warnoptions, "xoptions": sys._xoptions,
    "code": annotated.__code__.co_filename, "code flags": annotated.__code__.co_flags,
    "future": annotated.__annotations__["value"] is not names,
    "hooks": [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__, sys.gettrace()],
    "finders": [getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path],
    "streams": [[s.name, s.encoding, s.errors, s.line_buffering, s.write_through] for s in (sys.stdout, sys.stderr)],
    "stdin": [sys.stdin.encoding, os.read(0, 6).decode()],
    "descriptors": {fd: os.get_inheritable(fd) for fd in range(200) if fd not in (100, 101) and is_open(fd)},
    "next descriptor": os.dup(0),
    "blocked": status["SigBlk"], "ignored": status["SigIgn"], "caught": hex(int(status["SigCgt"], 16) & ~ours),
    "handlers": [repr(signal.getsignal(number)) .split(" at ")[0] for number in sorted(signal.valid_signals())],
    "environ": dict(os.environ), "cwd": os.getcwd(), "umask": umask, "nice": os.nice(0),
    "leads its group": os.getpgid(0) == os.getpid(),
    "limits": [sys.getrecursionlimit(), sys.getswitchinterval(), gc.isenabled(), gc.get_threshold()],
    "threads": [thread.name for thread in threading.enumerate()],
}, sys.stdout)
'''
ARGS = ("--lr", "0.1", "größe", "")


class Program:
    """A program to compare: how the bootstrap is told of it, and what a person would type."""

    def __init__(self, mode, target, *typed):
        self.wire = {"mode": mode, "target": target}
        self.typed = typed or (("-m", target) if mode == "module" else (target,))


def script(path):
    return Program("script", str(path))


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder of its own to be in, with something to read as stdin."""
    folder = tmp_path / "place"
    folder.mkdir()
    (tmp_path / "input").write_text("line!\n" * 3)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def compare(guarded, bare_python, tmp_path, place, monkeypatch):
    """Runs a program in a fresh interpreter, cold and woken, and gives the three ends, side by side."""

    def run(program, *args, preload=("json", "decimal"), interpreter=bare_python, **variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return asyncio.run(main(program, args, preload, interpreter))

    async def main(program, args, preload, interpreter):
        async with guarded(tmp_path / "input", interpreter) as ward:
            standby = await ward.standby(program.wire, *preload, set={"CHANGED": "before"})
            cold = await ward.cold(program.wire, *args, set={"CHANGED": "after", "RANK": "1"})
            fresh = asyncio.to_thread(run_fresh, interpreter, program, args)
            assert (await standby.message("ready"))["errors"] == {}
            ward.wake(standby, *args, CHANGED="after", RANK="1")
            return await asyncio.gather(fresh, cold.ended(), standby.ended())

    def run_fresh(interpreter, program, args):
        with (tmp_path / "input").open() as stdin:
            return subprocess.run(
                ["env", "CHANGED=after", "RANK=1", interpreter, "-u", *program.typed, *args],
                stdin=stdin,
                check=False,
                capture_output=True,
                encoding="utf-8",
                start_new_session=True,
                timeout=30,
            )

    return run


def make_program(folder):
    (folder / "program.py").write_text(DUMP)
    return script(folder / "program.py")


def make_relative(folder):
    make_program(folder)
    return script("program.py")


def make_dotted(folder):
    make_program(folder)
    return script("./program.py")


def make_roundabout(folder):
    make_program(folder)
    (folder / "deeper").mkdir()
    return script("deeper/../program.py")


def make_link(folder):
    (folder / "elsewhere").mkdir()
    make_program(folder / "elsewhere")
    (folder / "link.py").symlink_to("elsewhere/program.py")
    return script(folder / "link.py")


def make_no_extension(folder):
    (folder / "program").write_text("#!/usr/bin/env python\n# coding: utf-8\n" + DUMP)
    return script("program")


def make_folder(folder):
    (folder / "app").mkdir()
    (folder / "app" / "__main__.py").write_text(DUMP)
    return script("app/")


def make_zip(folder):
    with zipfile.ZipFile(folder / "app.zip", "w") as archive:
        archive.writestr("__main__.py", DUMP)
    return script("app.zip")


def make_zipapp(folder):
    make_folder(folder)
    zipapp.create_archive(folder / "app", folder / "app.pyz", interpreter="/usr/bin/env python3")
    return script(folder / "app.pyz")


def make_compiled(folder):
    make_program(folder)
    py_compile.compile(str(folder / "program.py"), str(folder / "compiled.pyc"), doraise=True)
    return script("compiled.pyc")


def make_package(folder):
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").write_text("import sys\nseen = list(sys.argv)")
    (folder / "package" / "__main__.py").write_text(DUMP + "\nfrom package import seen; print(seen)")
    (folder / "package" / "module.py").write_text(DUMP + "\nfrom . import seen; print(seen)")
    return Program("module", "package")


def make_module_in_package(folder):
    make_package(folder)
    return Program("module", "package.module")


def make_module(folder):
    make_program(folder)
    return Program("module", "program")


@pytest.mark.parametrize(
    "make",
    [
        make_program,
        make_relative,
        make_dotted,
        make_roundabout,
        make_link,
        make_no_extension,
        make_folder,
        make_zip,
        make_zipapp,
        make_compiled,
        make_package,
        make_module_in_package,
        make_module,
    ],
    ids=lambda make: make.__name__.removeprefix("make_"),
)
def test_circumstances_are_those_of_a_fresh_interpreter(compare, place, make):
    """A program finds the same arguments, path, attributes, descriptors, signals and variables in all three ways."""
    fresh, cold, woken = compare(make(place), *ARGS)
    assert (fresh.returncode, fresh.stderr) == (0, "")
    assert differences(cold, fresh) == {}
    assert differences(woken, fresh) == {}


def circumstances(ended):
    """The dump, its variables one by one, and whatever else was written."""
    assert ended.stdout.startswith("{"), ended.stderr
    dump, end = json.JSONDecoder().raw_decode(ended.stdout)
    environ = {f"environ {name}": value for name, value in dump.pop("environ").items()}
    return {**dump, **environ, "after": ended.stdout[end:], "stderr": ended.stderr}


def differences(ours, fresh, apart_from=()):
    """What the two programs do not agree in."""
    ours, fresh = circumstances(ours), circumstances(fresh)
    names = {name for name in ours.keys() | fresh.keys() if ours.get(name) != fresh.get(name)}
    return {name: (ours.get(name), fresh.get(name)) for name in names.difference(apart_from)}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="PYTHONSAFEPATH came with Python 3.11")
@pytest.mark.parametrize("make", [make_program, make_module, make_folder])
def test_safe_path_is_obeyed(compare, place, tmp_path, make):
    """Where the user keeps the script's folder off the path, it stays off it."""
    program = make(place)
    fresh, cold, woken = compare(program, PYTHONSAFEPATH="1", PYTHONPATH=f"{place}:{tmp_path}")
    assert differences(cold, fresh) == {}
    assert differences(woken, fresh) == {}


def test_run_path_is_like_runpy(compare, place):
    """In the mode of torchrun's --run-path the program is run by runpy.run_path, its folder not on the path."""
    (place / "program.py").write_text(DUMP)
    call = "import runpy, sys; del sys.path[0], sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    fresh, cold, woken = compare(Program("path", "program.py", "-c", call, "program.py"), *ARGS)
    assert differences(cold, fresh, {"orig_argv"}) == {}
    assert differences(woken, fresh, {"orig_argv"}) == {}


def test_no_module_of_ours_is_on_the_path(guarded, place, tmp_path):
    """Even where the package is reached through a link, a script can't import our modules by accident."""
    (tmp_path / "link").symlink_to(Path(BOOTSTRAP).parent)
    (place / "program.py").write_text(
        "import sys; print(sys.path[0], [name for name in ('frames',) if name in sys.modules])\nimport frames"
    )

    async def main():
        async with guarded() as ward:
            child = await ward.start(sys.executable, "-u", str(tmp_path / "link" / "bootstrap.py"), str(CHANNEL_FD))
            child.send({"program": {"mode": "script", "target": "program.py"}, "start": {"args": []}})
            return await child.ended()

    ended = asyncio.run(main())
    assert ended.stdout == f"{place} []\n"
    assert "No module named 'frames'" in ended.stderr


def test_preloaded_torch_is_like_imported_torch(compare, place):
    """A standby that imported torch is as a fresh interpreter that did."""
    pytest.importorskip("torch")
    (place / "program.py").write_text("import torch\n" + DUMP)
    fresh, cold, woken = compare(
        script("program.py"), *ARGS, preload=("torch",), interpreter=sys.executable, OMP_NUM_THREADS="1"
    )
    assert differences(cold, fresh) == {}
    assert differences(woken, fresh) == {}


LOADER = """
import os, sys, threading, torch
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return torch.tensor(index * index), os.getppid() == int(os.environ["MAIN"])

if __name__ == "__main__":
    os.environ["MAIN"] = str(os.getpid())
    loader = DataLoader(Squares(), batch_size=2, num_workers=2, multiprocessing_context="spawn")
    print([[values.tolist(), below_main.tolist()] for values, below_main in loader])
    # torch does not wait for the threads that feed its workers. In any Python, one that is cut off between removing its
    # semaphores and saying so leaves multiprocessing to complain of a leak.
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            thread.join(60)
"""


def test_data_loader_spawns_workers_in_a_woken_standby(guarded, place):
    """A torch DataLoader with spawned workers finds its dataset's class in the program that a standby runs."""
    pytest.importorskip("torch")
    (place / "program.py").write_text(LOADER)

    async def main():
        async with guarded() as ward:
            child = await ward.standby(script("program.py").wire, "torch", set={"OMP_NUM_THREADS": "1"})
            await child.message("ready")
            ward.wake(child)
            return await child.ended()

    ended = asyncio.run(main())
    assert (ended.how, ended.stderr) == (0, "")
    assert ended.stdout == "[[[0, 1], [True, True]], [[4, 9], [True, True]]]\n"


# Programs whose end must be the same: the same output, the same words on stderr, the same code or signal.
ENDS = {
    "code": "import sys; sys.exit(3)",
    "code none": "import sys; sys.exit(None)",
    "code text": "import sys; sys.exit('a message')",
    "code true": "raise SystemExit(True)",
    "code beyond a byte": "import sys; sys.exit(259)",
    "hard exit": "import os; print('before'); os._exit(7)",
    "exception": "def f():\n    raise ValueError('größe')\nf()",
    "chained exception": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('k') from e",
    "exception of exit's kind": "class E(BaseException): pass\nraise E('x')",
    "exception while exiting": "try:\n    raise SystemExit(3)\nfinally:\n    {}['missing']",
    "syntax error": "print('never')\nprint(1 +)\n",
    "import of something broken": "import broken",
    "interrupt": "raise KeyboardInterrupt('by hand')",
    "real interrupt": "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nprint('never')",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "terminated": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "closed pipe": (
        "import os, signal\nprint(signal.getsignal(signal.SIGPIPE))\nr, w = os.pipe()\nos.close(r)\nos.write(w, b'x')"
    ),
    "atexit and threads": (
        "import atexit, sys, threading\nend = threading.Event()\natexit.register(print, 'atexit')\n"
        "def late():\n    end.wait()\n    print('thread', threading.main_thread().is_alive(), __name__)\n"
        "threading.Thread(target=late).start()\nthreading.Timer(0.05, end.set).start()\nprint('main ends')\nsys.exit(4)"
    ),
    "exception and atexit": (
        "import atexit, sys\n"
        "atexit.register(lambda: print(sys.last_type, sys.last_value, sys.last_traceback.tb_frame.f_code.co_name,"
        " sys.last_traceback.tb_frame.f_globals is globals(), sys.excepthook is sys.__excepthook__))\n"
        "print('x')\nraise ValueError('v')"
    ),
    "hook": (
        "import sys, traceback\ndef hook(kind, error, trace):\n"
        "    print(kind, error, traceback.extract_tb(trace), error.__traceback__ is trace, sys.excepthook is hook)\n"
        "sys.excepthook = hook\nraise ValueError('v')"
    ),
    "thread's exception": (
        "import threading\ndef f():\n    raise ValueError('v')\n"
        "t = threading.Thread(target=f, name='t')\nt.start()\nt.join()\nprint('on')"
    ),
    "daemon thread": "import threading as t\nt.Thread(target=t.Event().wait, daemon=True).start()\nprint('x')",
    "warning": "import warnings\nwarnings.warn('w')\nprint('x')",
    "no newline": "import sys; sys.stdout.write('a'); sys.stderr.write('b')",
    "main's names": "import __main__ as m, sys\nx = 3\nprint(m.x, m is sys.modules[__name__], vars() is globals())",
    "source": "import inspect\nclass A:\n    pass\nprint(inspect.getsource(A), inspect.getsourcefile(A))",
    "pickle": (
        "import pickle\nclass A:\n    def __init__(self): self.x = 1\n"
        "print(pickle.loads(pickle.dumps(A())).x, pickle.loads(pickle.dumps(A)) is A, A.__module__, repr(A))"
    ),
    "spawned process": (
        "import multiprocessing, sys\ndef f(x):\n    print('child', x, __name__, sys.argv)\n    sys.exit(5)\n"
        "if __name__ == '__main__':\n"
        "    p = multiprocessing.get_context('spawn').Process(target=f, args=(3,))\n    p.start()\n    p.join()\n"
        "    print(p.exitcode, multiprocessing.parent_process())"
    ),
    "forked process": (
        "import os, sys\npid = os.fork()\nif pid == 0:\n    raise ValueError('in the child')\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    ),
    "subprocess": (
        "import subprocess\nls = ['ls', '/proc/self/fd']\n"
        "print(subprocess.run(ls, capture_output=True, close_fds=False).stdout)"
    ),
    "subprocess's signals": "import os; os.system('grep ^Sig[^Q] /proc/self/status')",
}


# Those of them that end by an exception that nobody caught: the agent hears of these and of no others.
UNCAUGHT = {
    "exception",
    "chained exception",
    "exception of exit's kind",
    "exception while exiting",
    "syntax error",
    "import of something broken",
    "exception and atexit",
    "hook",
    "closed pipe",
}


@pytest.mark.parametrize("name", ENDS)
def test_end_is_that_of_a_fresh_interpreter(compare, place, name):
    """A program ends in the same way, with the same words, in all three ways; only uncaught exceptions are told."""
    (place / "program.py").write_text(ENDS[name])
    (place / "broken.py").write_text("def f():\n    return undefined\nf()\n")
    fresh, cold, woken = compare(script("program.py"), "--an-argument")
    expected = (fresh.returncode, fresh.stdout, fresh.stderr)
    assert (cold.how, cold.stdout, cold.stderr) == expected
    assert (woken.how, woken.stdout, woken.stderr) == expected
    assert len(cold.errors) == len(woken.errors) == (name in UNCAUGHT)


@pytest.mark.parametrize(
    "program",
    [
        script("missing.py"),
        script("package"),
        script("empty.zip"),
        Program("module", "missing"),
        Program("module", "package"),
        Program("module", "failing"),
        script("failing.zip"),
    ],
    ids=lambda program: " ".join(program.typed),
)
def test_programs_that_do_not_start_say_the_same(compare, place, program):
    """A program that is not there, or that fails outside of a plain script, has the interpreter's words and code."""
    (place / "package").mkdir()
    (place / "package" / "__init__.py").write_text("")
    (place / "failing.py").write_text("raise ValueError('v')")
    zipfile.ZipFile(place / "empty.zip", "w").close()
    with zipfile.ZipFile(place / "failing.zip", "w") as archive:
        archive.writestr("__main__.py", "raise ValueError('v')")
    fresh, cold, woken = compare(program)
    expected = (fresh.returncode, fresh.stdout, fresh.stderr)
    assert fresh.returncode != 0
    assert (cold.how, cold.stdout, cold.stderr) == expected
    assert (woken.how, woken.stdout, woken.stderr) == expected


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise ValueError('größe')", "ValueError: größe"),
        ("def f():\n    1 / 0\nf()", "ZeroDivisionError: division by zero"),
        ("print(1 +)", None),
        (
            "raise OSError(2, 'no file', b'\\xff'.decode(errors='surrogateescape'))",
            "FileNotFoundError: [Errno 2] no file: '\\udcff'",
        ),
    ],
)
def test_uncaught_exception_is_told_on_the_channel(compare, place, code, message):
    """The agent hears the same traceback that stderr shows."""
    (place / "program.py").write_text(code)
    fresh, cold, woken = compare(script("program.py"))
    for ended in (cold, woken):
        (error,) = ended.errors
        assert ended.how == 1
        assert error["traceback"].encode(errors="backslashreplace").decode() == fresh.stderr
        assert message is None or error["message"] == message
        assert error["at"] <= ended.exit.at


def test_long_traceback_is_cut_not_lost(compare, place):
    """An exception with an enormous message keeps its end, which says the most."""
    (place / "program.py").write_text("raise ValueError('x' * 1_000_000 + 'the end')")
    _, cold, _ = compare(script("program.py"))
    (error,) = cold.errors
    assert error["traceback"].endswith("the end\n")
    assert len(error["traceback"]) < 100_000


def test_exception_after_the_channel_was_closed(compare, place):
    """A script that closes every descriptor it finds still fails with its own words."""
    (place / "program.py").write_text("import os; os.closerange(3, 1024)\nraise ValueError('v')")
    fresh, cold, woken = compare(script("program.py"))
    assert (cold.how, cold.stderr) == (woken.how, woken.stderr) == (1, fresh.stderr)


def test_crash_leaves_a_stack_on_stderr(compare, place):
    """A segmentation fault shows the Python stack and ends the process by its signal."""
    (place / "program.py").write_text("import ctypes\ndef deep():\n    ctypes.string_at(0)\ndeep()")
    _, cold, woken = compare(script("program.py"))
    for ended in (cold, woken):
        assert ended.how == -signal.SIGSEGV
        assert "Fatal Python error: Segmentation fault" in ended.stderr
        assert 'program.py", line 3 in deep' in ended.stderr


def test_channel_is_not_inherited_by_programs_that_the_script_starts(guarded, place):
    """A program that a worker executes without closing descriptors has no hold on the channel."""
    (place / "program.py").write_text("import os\nos.execvp('ls', ['ls', '/proc/self/fd'])")

    async def main():
        async with guarded() as ward:
            return await (await ward.cold(script("program.py").wire)).ended()

    assert str(CHANNEL_FD) not in asyncio.run(main()).stdout.split()


@pytest.mark.parametrize(
    "stacks",
    [
        {"signal": STACKS_SIGNAL, "path": "missing/stacks", "fd": STACKS_FD},
        {"signal": STACKS_SIGNAL, "path": "stacks", "fd": 1 << 30},
        {"signal": signal.SIGKILL, "path": "stacks", "fd": STACKS_FD},
        {"signal": 1000, "path": "stacks", "fd": STACKS_FD},
    ],
    ids=["no folder", "no such descriptor", "not to be caught", "no signal"],
)
def test_worker_that_cannot_offer_its_stacks_runs_all_the_same(guarded, place, stacks):
    """Without a word, and with the descriptors that it would have."""
    (place / "program.py").write_text("import os; print(os.dup(0))")

    async def main():
        async with guarded() as ward:
            child = await ward.start(sys.executable, "-u", BOOTSTRAP, str(CHANNEL_FD))
            child.send({"program": script("program.py").wire, "stacks": stacks, "start": {"args": []}})
            return await child.ended()

    ended = asyncio.run(main())
    assert (ended.how, ended.stdout, ended.stderr) == (0, "3\n", "")


@pytest.mark.parametrize("stage", ["before the program", "ready"])
def test_process_whose_channel_closes_ends_quietly(guarded, place, stage):
    """A standby that is not needed any more ends by itself, with code 0 and without a word."""
    (place / "program.py").write_text("print('never')")

    async def main():
        async with guarded() as ward:
            if stage == "ready":
                child = await ward.standby(script("program.py").wire, "json")
                await child.message("ready")
            else:
                child = await ward.start(sys.executable, "-u", BOOTSTRAP, str(CHANNEL_FD))
            child.process.channel.close()
            return await child.ended()

    ended = asyncio.run(main())
    assert (ended.how, ended.stdout, ended.stderr) == (0, "", "")


def test_failed_preload_is_told_and_harmless(guarded, place):
    """What a standby can't import is named with its reason; the rest is imported and the script runs."""
    (place / "broken.py").write_text("raise ValueError('at import')")
    (place / "leaving.py").write_text("raise SystemExit(3)")
    (place / "program.py").write_text("import sys; print('decimal' in sys.modules, 'broken' in sys.modules)")

    async def main():
        async with guarded() as ward:
            child = await ward.standby(script("program.py").wire, "missing", "broken", "leaving", "decimal")
            ready = await child.message("ready")
            ward.wake(child)
            return ready["errors"], await child.ended()

    errors, ended = asyncio.run(main())
    assert errors == {
        "missing": "ModuleNotFoundError: No module named 'missing'",
        "broken": "ValueError: at import",
        "leaving": "SystemExit: 3",
    }
    assert (ended.how, ended.stdout, ended.stderr) == (0, "True False\n", "")


@pytest.mark.parametrize("make", [make_link, make_module, make_folder], ids=["script", "module", "folder"])
def test_preload_finds_what_sits_beside_the_program(guarded, place, make):
    """A module beside the program can be preloaded, before the place in the world is known."""
    program = make(place)
    beside = {make_link: place / "elsewhere", make_module: place, make_folder: place / "app"}[make]
    (beside / "beside.py").write_text("import os\nrank = os.environ.get('RANK')")
    (beside / ("__main__.py" if make is make_folder else "program.py")).write_text(
        "import os, beside; print(beside.rank, os.environ['RANK'])"
    )

    async def main():
        async with guarded() as ward:
            child = await ward.standby(program.wire, "beside", unset=("RANK",))
            ready = await child.message("ready")
            ward.wake(child, RANK="5")
            return ready["errors"], await child.ended()

    errors, ended = asyncio.run(main())
    assert errors == {}
    assert (ended.how, ended.stdout, ended.stderr) == (0, "None 5\n", "")


def test_standby_woken_before_it_is_ready(guarded, place):
    """A standby that gets its world in the middle of its imports finishes the one at hand and leaves the rest."""
    (place / "slow.py").write_text(
        "import os, time\nopen('importing', 'w').close()\nwhile not os.path.exists('woken'): time.sleep(0.01)\n"
    )
    (place / "program.py").write_text(
        "import sys, os; print('slow' in sys.modules, 'decimal' in sys.modules, os.environ['RANK'], sys.argv)"
    )

    async def main():
        async with guarded() as ward:
            child = await ward.standby(script("program.py").wire, "slow", "decimal")
            while not (place / "importing").exists():
                await asyncio.sleep(0.01)
            ward.wake(child, "--lr", RANK="3")
            (place / "woken").touch()
            return await child.ended()

    ended = asyncio.run(main())
    assert (ended.how, ended.stderr) == (0, "")
    assert ended.stdout.startswith("True False 3 [")
    assert "'--lr']" in ended.stdout


def test_wake_can_remove_variables(guarded, place):
    """The world that a standby is given may also say which variables it must not see."""
    (place / "program.py").write_text(
        "import os, subprocess; print(os.environ.get('GOES'), flush=True); os.system('echo ${GOES-unset}')"
    )

    async def main():
        async with guarded() as ward:
            child = await ward.standby(script("program.py").wire, set={"GOES": "x"})
            child.send({"start": {"args": [], "set": {}, "unset": ["GOES", "NEVER_WAS"]}})
            return await child.ended()

    assert asyncio.run(main()).stdout == "None\nunset\n"


class TestHook:
    """An adapter's file that runs in the worker when the framework is there."""

    @pytest.fixture
    def program(self, place):
        (place / "framework.py").write_text("value = 'plain'")
        (place / "program.py").write_text("import framework; print('script:', framework.value)")
        (place / "hook.py").write_text(
            "import os, sys\n"
            "print('hook:', os.environ.get('RANK'))\n"
            "sys.modules['framework'].value = 'changed'\n"
            "def woken(): print('woken:', os.environ['RANK'])\n"
        )
        return {**script("program.py").wire, "framework": "framework", "hook": str(place / "hook.py")}

    def test_in_a_cold_worker(self, guarded, program):
        """It runs right after the framework's import, and needs not be told of the place, which is known."""

        async def main():
            async with guarded() as ward:
                return await (await ward.cold(program, set={"RANK": "3"})).ended()

        ended = asyncio.run(main())
        assert (ended.how, ended.stdout, ended.stderr) == (0, "hook: 3\nscript: changed\n", "")

    def test_in_a_standby(self, guarded, program):
        """It runs while the standby gets ready, and is told when the place is known."""

        async def main():
            async with guarded() as ward:
                child = await ward.standby(program, "framework", unset=("RANK",))
                await child.message("ready")
                ward.wake(child, RANK="5")
                return await child.ended()

        ended = asyncio.run(main())
        assert (ended.how, ended.stdout, ended.stderr) == (0, "hook: None\nwoken: 5\nscript: changed\n", "")

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("raise ValueError('at once')", "ValueError: at once"),
            ("def woken(): raise KeyError('later')", "KeyError: 'later'"),
            ("def broken(", "SyntaxError"),
        ],
    )
    def test_that_fails(self, guarded, place, program, text, words):
        """A line on stderr, and the script runs as without it."""
        (place / "hook.py").write_text(text)

        async def main():
            async with guarded() as ward:
                child = await ward.standby(program, "framework")
                await child.message("ready")
                ward.wake(child, RANK="5")
                return await child.ended()

        ended = asyncio.run(main())
        assert (ended.how, ended.stdout) == (0, "script: plain\n")
        assert ended.stderr.startswith(f"elastic-launch: {place}/hook.py: {words}")
        assert ended.stderr.count("\n") == 1
