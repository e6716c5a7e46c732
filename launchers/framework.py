"""Which framework a command is for: named, told by the variables, or the only one installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from elastic_adapter.adapters.registry import BUILT_IN, Entry, find
from elastic_adapter.core.errors import UserError
from elastic_adapter.launchers import fleetrun
from elastic_adapter.launchers.settings import SETTINGS, Given

_TORCH_VARIABLES = frozenset(
    variable for setting in SETTINGS for variable in setting.variables if variable.startswith("PET_")
)


def choose(given: Given, environ: Mapping[str, str], installed: Callable[[str], bool]) -> tuple[Entry, str]:
    """The framework's entry, and how it was found, as the origin of the setting."""
    if given.text is not None:
        return find(given.text), given.origin
    torch, paddle = _torch_variables(environ), fleetrun.set_variables(environ)
    if torch and paddle:
        raise UserError(
            f"both torch's {torch[0]}={environ[torch[0]]!r} and paddle's {paddle[0]}={environ[paddle[0]]!r} are set: "
            "add --framework torch or --framework paddle to say which is meant"
        )
    if torch or paddle:
        variable = (torch or paddle)[0]
        return find("torch" if torch else "paddle"), f"variable {variable}"
    return _only(installed), "the only one installed"


def _torch_variables(environ: Mapping[str, str]) -> list[str]:
    return sorted(name for name in _TORCH_VARIABLES if environ.get(name))


def _only(installed: Callable[[str], bool]) -> Entry:
    found = [entry for entry in BUILT_IN if entry.module is not None and installed(entry.module)]
    if len(found) == 1:
        return found[0]
    what = f"{' and '.join(entry.name for entry in found)} are installed" if found else "no framework is installed"
    raise UserError(f"which framework is meant? {what}: add --framework torch, --framework paddle or --framework plain")


def check_installed(entry: Entry, installed: Callable[[str], bool]) -> None:
    if entry.module is None or installed(entry.module):
        return
    how = f": pip install 'elastic-adapter[{entry.extra}]'" if entry.extra else ""
    raise UserError(f"--framework {entry.name}: the module {entry.module} is not installed{how}")
