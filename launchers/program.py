"""What the workers run: a Python script, a module or any other program, checked before anything is started."""

from __future__ import annotations

import os
from collections.abc import Mapping

from elastic_adapter.core.errors import UserError
from elastic_adapter.core.ports import NativeProgram, Program, PythonProgram
from elastic_adapter.launchers.settings import Given


def interpreter(given: Given, environ: Mapping[str, str], own: str) -> str:
    """The Python of the workers: PYTHON_EXEC, else the launcher's own."""
    if not given.text:
        return own
    found = _on_path(given.text, environ)
    if found is None:
        raise given.wrong("a Python interpreter", "no such program was found")
    return given.text


def program(
    values: Mapping[str, Given],
    words: tuple[str, ...],
    environ: Mapping[str, str],
    python: str,
    *,
    own: bool,
    plain: bool,
) -> Program:
    """What to run.

    ``own``: the workers' Python is the launcher's, so that modules can be looked for. ``plain``: there is no framework,
    so that a target is taken for Python only where its name says so.
    """
    if not words:
        raise UserError("no script is given: expected elastic-launch [options] script [arguments of the script]")
    target, args = words[0], words[1:]
    mode = _mode(values, target, plain=plain)
    if mode == "native":
        return NativeProgram((_executable(target, environ), *args))
    if mode == "module":
        if own:
            _check_module(target, environ)
    else:
        _check_script(target)
    return PythonProgram(mode, target, args, python)


def _mode(values: Mapping[str, Given], target: str, *, plain: bool) -> str:
    module, no_python = values["module"], values["no-python"]
    if values["run-path"].on:
        return "path"
    if module.on and no_python.on:
        raise UserError(
            f"{module.where} contradicts {no_python.where}: a module is run by Python; leave out one of them"
        )
    if module.on:
        return "module"
    return "native" if no_python.on or (plain and not target.endswith(".py")) else "script"


def _check_script(target: str) -> None:
    path = os.path.abspath(target)
    if not os.path.exists(path):
        raise UserError(f"script not found: {path}{_is_an_option(target)}")
    if os.path.isdir(path):
        if not os.path.isfile(os.path.join(path, "__main__.py")):
            raise UserError(f"script {path} is a folder without a __main__.py: name the script in it")
    elif not os.access(path, os.R_OK):
        raise UserError(f"script {path} can't be read: no permission")


def _is_an_option(target: str) -> str:
    """A forgotten value makes the next word the script; a script's name rarely looks like a number."""
    return "; is it the value of an option that takes none?" if target.isdecimal() else ""


def _check_module(target: str, environ: Mapping[str, str]) -> None:
    """The top-level module must be somewhere on the workers' path; the rest is known only when it is imported."""
    from importlib.machinery import PathFinder

    if target.endswith(".py"):
        raise UserError(f"-m expects a module's name, got {target!r}: use -m {target[:-3]}, or leave out -m")
    top = target.partition(".")[0]
    added = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if not top.isidentifier() or not (PathFinder.find_spec(top, [os.getcwd(), *added]) or _known(top)):
        raise UserError(f"module {target!r} not found: {top!r} is neither in {os.getcwd()} nor on Python's path")


def _known(module: str) -> bool:
    from importlib.util import find_spec

    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _executable(target: str, environ: Mapping[str, str]) -> str:
    """A path as it is, a bare name from PATH, or else from the current folder."""
    if os.sep not in target:
        if _on_path(target, environ):
            return target
        here = os.path.abspath(target)
        if not os.path.exists(here):
            raise UserError(f"program not found: {target!r} is neither in {os.getcwd()} nor on PATH")
        target = here
    if not os.path.exists(target):
        raise UserError(f"program not found: {os.path.abspath(target)}")
    if os.path.isdir(target):
        raise UserError(f"program {target} is a folder: name the program in it")
    if not os.access(target, os.X_OK):
        raise UserError(
            f"program {target} is not executable: chmod +x {target}, or name its interpreter, e.g. sh {target}"
        )
    return target


def _on_path(name: str, environ: Mapping[str, str]) -> str | None:
    from shutil import which

    return which(name, path=environ.get("PATH", os.defpath))
