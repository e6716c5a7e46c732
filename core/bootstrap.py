"""The first code of every Python worker, cold or warm: standard library only, never the package.

    python -u bootstrap.py CHANNEL_FD [words that make ``ps`` readable]

The first message on the channel says what to run and what to import beforehand. A cold worker finds
``start`` in it and goes on at once. A standby imports, says that it is ready, and waits for ``start`` in a
message of its own, with the variables of its place in the world. Then the script runs as ``__main__``,
as if a fresh interpreter had been started for it. The channel stays open for notices from the agent.
"""

from __future__ import annotations

import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
# Python puts the folder of this file first on the path: no module of ours may be found there by a script.
if sys.path and sys.path[0] == _here:
    del sys.path[0]
sys.path.insert(0, _here)
import frames  # noqa: E402  (found by path: the package is not needed here)

del sys.path[0], sys.modules["frames"]


def main() -> None:
    channel = int(sys.argv[1])
    os.set_inheritable(channel, False)
    message = frames.read(channel)
    if message is None:
        return
    import faulthandler

    faulthandler.enable()
    program: dict[str, str] = message["program"]  # type: ignore[assignment]
    _set_path(program["mode"], program["target"])
    start = message.get("start")
    if start is None:
        errors = _preload(message["preload"])  # type: ignore[arg-type]
        frames.write(channel, {"ready": True, "errors": errors})
        answer = frames.read(channel)
        if answer is None:
            return
        start = answer["start"]
        _set_environment(start)  # type: ignore[arg-type]
    _run(channel, program["mode"], program["target"], start["args"])  # type: ignore[index]


def _set_path(mode: str, target: str) -> None:
    """What ``python target`` or ``python -m target`` would have as the first entry of the path."""
    if getattr(sys.flags, "safe_path", False) or mode == "path":
        return
    if mode == "module":
        sys.path.insert(0, os.getcwd())
    elif _is_package(target):
        sys.path.insert(0, target)
    else:
        sys.path.insert(0, os.path.dirname(os.path.realpath(target)))


def _is_package(target: str) -> bool:
    """A folder or an archive with a ``__main__`` in it, as opposed to a script."""
    if os.path.isdir(target):
        return True
    try:
        with open(target, "rb") as file:
            return file.read(4) == b"PK\x03\x04"
    except OSError:
        return False


def _preload(modules: list[str]) -> dict[str, str]:
    """Import what the script will import; what fails is left for the script to fail at."""
    import importlib

    errors = {}
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            errors[module] = f"{type(error).__name__}: {error}"
    return errors


def _set_environment(start: dict[str, dict[str, str]]) -> None:
    for name in start["unset"]:
        os.environ.pop(name, None)
    os.environ.update(start["set"])


def _run(channel: int, mode: str, target: str, args: list[str]) -> None:
    import types

    # The bootstrap's own module object stays alive through its functions; the script gets a new one.
    main_module = types.ModuleType("__main__")
    main_module.__dict__["__builtins__"] = __builtins__
    if sys.version_info < (3, 14):
        main_module.__dict__["__annotations__"] = {}
    sys.modules["__main__"] = main_module
    sys.argv = [target, *args] if mode != "module" else ["-m", *args]
    sys.orig_argv = [sys.executable, "-u", *(["-m"] if mode == "module" else []), target, *args]
    try:
        if mode == "module":
            import runpy

            runpy._run_module_as_main(target)  # type: ignore[attr-defined]
        elif mode == "path":
            import runpy

            runpy.run_path(target, run_name="__main__")
        elif _is_package(target):
            import runpy

            runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        else:
            _run_script(main_module.__dict__, target)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        _report(channel, error)


def _run_script(namespace: dict[str, object], target: str) -> None:
    """What the interpreter does for ``python target``."""
    from importlib.machinery import SourceFileLoader, SourcelessFileLoader

    loader: SourceFileLoader | SourcelessFileLoader
    if target.endswith(".pyc"):
        loader = SourcelessFileLoader("__main__", target)
        code = loader.get_code("__main__")
    else:
        loader = SourceFileLoader("__main__", target)
        import io

        with io.open_code(os.path.abspath(target)) as file:
            code = compile(file.read(), target, "exec", dont_inherit=True)
    namespace.update(__file__=target, __cached__=None, __loader__=loader, __spec__=None, __package__=None)
    assert code is not None
    exec(code, namespace)


def _report(channel: int, error: BaseException) -> None:
    """Tell the agent what went wrong, then end as an interpreter ends after an uncaught exception."""
    import time

    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    error.__traceback__ = trace
    try:
        import traceback

        text = "".join(traceback.format_exception(type(error), error, trace))
        message = "".join(traceback.format_exception_only(type(error), error)).strip()
        frames.write(channel, {"error": {"message": message, "traceback": text[-32768:], "at": time.time()}})
    except OSError:
        # The agent is gone or the script closed the descriptor: the message on stderr remains.
        pass
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    sys.excepthook(type(error), error, trace)
    sys.exit(1)


if __name__ == "__main__":
    main()
