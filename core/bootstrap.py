"""The first code of every Python worker, cold or warm: standard library only, never the package.

    python -u bootstrap.py CHANNEL_FD [words that make ``ps`` readable]

The first message on the channel says what to run and what to import beforehand. A cold worker finds
``start`` in it and goes on at once. A standby imports, says that it is ready, and waits for ``start`` in a
message of its own, with the variables of its place in the world. Then the script runs as ``__main__``,
as if a fresh interpreter had been started for it. The channel stays open for notices from the agent.

Every import here is paid for by every worker: those that only a few need are made where they are needed.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import CodeType, TracebackType

# Kept, because the interpreter takes __file__ away when a script has ended.
_FILE = __file__
# Python puts the folder of this file, links resolved, first on the path: no module of ours may be found there by a
# script.
_FOLDER = os.path.dirname(os.path.realpath(_FILE))
if sys.path and sys.path[0] == _FOLDER:
    del sys.path[0]
sys.path.insert(0, _FOLDER)
import frames  # noqa: E402 (found by path: the package is not needed here)

del sys.path[0], sys.modules["frames"]


def main() -> None:
    channel = int(sys.argv[1])
    os.set_inheritable(channel, False)
    message = frames.read(channel)
    if message is None:
        return
    import faulthandler

    faulthandler.enable()
    if "stacks" in message:
        _offer_stacks(**message["stacks"])
    program = message["program"]
    mode, target = program["mode"], program["target"]
    package = mode == "script" and _is_package(_absolute(target))
    _set_path(mode, target, package=package)
    if program.get("framework"):
        sys.meta_path.insert(0, _QuickImport(program["framework"], program.get("hook")))
    start = message.get("start")
    if start is None:
        errors = _preload(message["preload"], channel)
        frames.write(channel, {"ready": True, "errors": errors})
        answer = frames.read(channel)
        if answer is None:
            return
        start = answer["start"]
        _set_environment(start)
        _tell_hooks()
    _run(channel, "package" if package else mode, target, start["args"])


def _offer_stacks(signal: int, path: str, fd: int) -> None:
    """From now on, write the stacks of all threads to a file whenever this signal comes.

    The handler is written in C and does not wait for the interpreter, so it answers where Python code can't.
    """
    import faulthandler

    try:
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.dup2(opened, fd, inheritable=False)
        finally:
            os.close(opened)
        faulthandler.register(signal, file=fd, all_threads=True, chain=False)
    except Exception:  # noqa: S110 (a worker without this is a worker all the same)
        pass


class _QuickImport:
    """Finds the framework when it is first imported, and lets that import run without the garbage collector.

    A framework's import makes a great many objects that stay; looking through them again and again for garbage is
    about a tenth of its time. Afterwards nothing of this is left: neither this finder nor a trace on the loader.
    Then the adapter's hook, if it has one, may change what it knows better.
    """

    def __init__(self, name: str, hook: str | None = None) -> None:
        self._name = name
        self._hook = hook

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:  # noqa: ARG002
        if name != self._name:
            return None
        from importlib.util import find_spec

        sys.meta_path.remove(self)
        spec = find_spec(name)
        loader = spec.loader if spec is not None else None
        execute = getattr(loader, "exec_module", None)
        if execute is None or not hasattr(loader, "__dict__"):
            return spec

        def exec_module(module: object) -> None:
            del vars(loader)["exec_module"]
            _without_collector(lambda: execute(module))
            if self._hook:
                _run_hook(self._hook)

        vars(loader)["exec_module"] = exec_module
        return spec


# The namespaces of the adapter's hooks that have been run.
_hooks: list[dict[str, object]] = []


def _run_hook(path: str) -> None:
    """Run a file of the adapter's; what fails in it is no reason to fail."""
    namespace: dict[str, object] = {"__name__": "elastic_adapter_hook", "__file__": path}

    def run() -> None:
        with open(path, encoding="utf-8") as file:
            exec(compile(file.read(), path, "exec"), namespace)

    _try(path, run)
    _hooks.append(namespace)


def _tell_hooks() -> None:
    """A standby has learnt its place."""
    for namespace in _hooks:
        woken = namespace.get("woken")
        if callable(woken):
            _try(str(namespace["__file__"]), woken)


def _try(path: str, work: Callable[[], object]) -> None:
    try:
        work()
    except Exception as error:
        sys.stderr.write(f"elastic-launch: {path}: {type(error).__name__}: {error}\n")


def _without_collector(work: Callable[[], object]) -> None:
    import gc

    was_on = gc.isenabled()
    gc.disable()
    try:
        work()
    finally:
        if was_on:
            gc.enable()


def _is_package(path: str) -> bool:
    """Whether a ``__main__`` is to be found inside: a folder or an archive, as opposed to a script."""
    for hook in sys.path_hooks:
        try:
            hook(path)
        except ImportError:
            continue
        return True
    return False


def _absolute(target: str) -> str:
    """The path as the interpreter makes it absolute: not normalized."""
    if os.path.isabs(target):
        return target
    return os.getcwd() if target == "." else f"{os.getcwd()}/{target}"


def _set_path(mode: str, target: str, *, package: bool) -> None:
    """What ``python target`` or ``python -m target`` would have as the first entry of the path."""
    if package:
        sys.path.insert(0, _absolute(target))
    elif mode == "path" or getattr(sys.flags, "safe_path", False):
        return
    elif mode == "module":
        sys.path.insert(0, os.getcwd())
    else:
        sys.path.insert(0, os.path.dirname(os.path.realpath(target)))


def _preload(modules: list[str], channel: int) -> dict[str, str]:
    """Import what the script will import, until it is time to start; what fails is left for the script to fail at."""
    import importlib
    import select

    errors = {}
    poll = select.poll()
    poll.register(channel, select.POLLIN)

    def load() -> None:
        for module in modules:
            if poll.poll(0):
                return
            try:
                importlib.import_module(module)
            except (Exception, SystemExit) as error:
                errors[module] = f"{type(error).__name__}: {error}"

    _without_collector(load)
    return errors


def _set_environment(start: dict[str, dict[str, str]]) -> None:
    for name in start["unset"]:
        os.environ.pop(name, None)
    os.environ.update(start["set"])


def _run(channel: int, mode: str, target: str, args: list[str]) -> None:
    flags = sys.orig_argv[: -len(sys.argv)]
    sys.orig_argv = [*flags, *(["-m"] if mode == "module" else []), target, *args]
    sys.argv = ["-m" if mode == "module" else target, *args]
    # The bootstrap's own module object stays alive through its functions; the script gets a new one.
    module = type(sys)("__main__")
    namespace = vars(module)
    namespace["__builtins__"] = __builtins__
    if sys.version_info < (3, 14):
        namespace["__annotations__"] = {}
    sys.modules["__main__"] = module
    pid = os.getpid()
    _own_progress_page(pid)
    try:
        _execute(mode, target, namespace)
    except SystemExit:
        raise
    except BaseException as error:
        # A child that the script forked has the same channel, but is no worker. An interrupt is no error.
        if os.getpid() == pid and not isinstance(error, KeyboardInterrupt):
            _report(channel, error)
        _hide_from_traceback()
        raise


def _own_progress_page(pid: int) -> None:
    """Only this process tells of progress, not a child of it that does so first. (See core/worker.py.)"""
    import struct

    try:
        page = os.open(os.environ["ELASTIC_PROGRESS"], os.O_WRONLY)
        os.pwrite(page, struct.pack("qqqq", int(os.environ["ELASTIC_GENERATION"]), 0, 0, pid), 0)
        os.close(page)
    except (OSError, KeyError, ValueError):
        return


def _execute(mode: str, target: str, namespace: dict[str, object]) -> None:
    if mode == "script":
        exec(_code(_absolute(target), namespace), namespace)
        return
    import runpy

    if mode == "path":
        runpy.run_path(target, run_name="__main__")
    elif mode == "package":
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]  # noqa: SLF001
    else:
        runpy._run_module_as_main(target)  # type: ignore[attr-defined]  # noqa: SLF001 (what the interpreter calls)


def _code(path: str, namespace: dict[str, object]) -> CodeType:
    """Read a script, and give ``__main__`` the attributes that the interpreter gives it."""
    from importlib.machinery import SourceFileLoader, SourcelessFileLoader

    is_compiled = path.endswith(".pyc")
    loader = SourcelessFileLoader("__main__", path) if is_compiled else SourceFileLoader("__main__", path)
    namespace.update(__file__=path, __cached__=None, __loader__=loader, __spec__=None, __package__=None)
    try:
        data = loader.get_data(path)
    except OSError as error:
        reason = f"[Errno {error.errno}] {error.strerror}"
        sys.stderr.write(f"{sys.executable}: can't open file {path!r}: {reason}\n")
        sys.exit(2)
    code: CodeType | None
    code = loader.get_code("__main__") if is_compiled else compile(data, path, "exec", dont_inherit=True)
    assert code is not None
    return code


def _report(channel: int, error: BaseException) -> None:
    """Tell the agent what went wrong; whatever hinders that, the message on stderr remains."""
    try:
        import time
        import traceback

        text = "".join(traceback.format_exception(type(error), error, _below_us(error.__traceback__)))
        message = "".join(traceback.format_exception_only(type(error), error)).strip()
        frames.write(channel, {"error": {"message": message, "traceback": text[-32768:], "at": time.time()}})
    except Exception:  # noqa: S110 (there is nobody else to tell)
        # The agent is gone, the script closed the descriptor, or it brought a module with one of these names.
        pass


def _hide_from_traceback() -> None:
    """The interpreter will print the error and end as it always does, but without a line about this file."""
    hook = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.excepthook = hook
        trace = _below_us(trace)
        sys.last_traceback = trace
        hook(kind, error.with_traceback(trace), trace)

    sys.excepthook = excepthook


def _below_us(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename == _FILE:
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    main()
