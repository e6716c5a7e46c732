"""Which framework a command is for: named, told by the variables, or the only one installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from elastic_adapter.adapters.registry import BUILT_IN, Entry, find
from elastic_adapter.core.errors import UserError
from elastic_adapter.launchers.settings import SETTINGS, Given

_TORCH_VARIABLES = frozenset(
    variable for setting in SETTINGS for variable in setting.variables if variable.startswith("PET_")
)

# What paddle.distributed.launch and fleetrun read, apart from the parameter server's.
_PADDLE_VARIABLES = frozenset(
    {
        "PADDLE_MASTER",
        "PADDLE_RANK",
        "PADDLE_NNODES",
        "PADDLE_NPROC_PER_NODE",
        "PADDLE_JOB_ID",
        "PADDLE_LOG_DIR",
        "PADDLE_LOG_LEVEL",
        "PADDLE_LOG_OVERWRITE",
        "PADDLE_SORT_IP",
        "PADDLE_RUN_MODE",
        "PADDLE_DEVICES",
        "PADDLE_IPS",
        "PADDLE_START_PORT",
        "PADDLE_MAX_RESTART",
        "PADDLE_ELASTIC_LEVEL",
        "PADDLE_ELASTIC_TIMEOUT",
        "PADDLE_ELASTIC_SERVER",
        "PADDLE_ELASTIC_JOB_ID",
        "PADDLE_ELASTIC_NP",
        "PADDLE_ELASTIC_SCALE",
        "PADDLE_ELASTIC_FORCE",
        "PADDLE_ELASTIC_FAULT_TOLERANC_LEVEL",
        "PADDLE_ELASTIC_TTL",
        "PADDLE_ELASTIC_ETCD_SERVICE_HOST",
        "PADDLE_ELASTIC_ETCD_SERVICE_PORT",
        "PADDLE_TRAINERS",
        "PADDLE_PORT",
    }
)


def choose(given: Given, environ: Mapping[str, str], installed: Callable[[str], bool]) -> tuple[Entry, str]:
    """The framework's entry, and how it was found, as the origin of the setting."""
    if given.text is not None:
        return find(given.text), given.origin
    torch, paddle = _set_of(_TORCH_VARIABLES, environ), paddle_variables(environ)
    if torch and paddle:
        raise UserError(
            f"both torch's {torch[0]} and paddle's {paddle[0]} are set: "
            "add --framework torch or --framework paddle to say which is meant"
        )
    if torch or paddle:
        variable = (torch or paddle)[0]
        return find("torch" if torch else "paddle"), f"variable {variable}"
    return _only(installed), "the only one installed"


def paddle_variables(environ: Mapping[str, str]) -> list[str]:
    """The variables of paddle's own launcher that are set."""
    return _set_of(_PADDLE_VARIABLES, environ)


def _set_of(names: frozenset[str], environ: Mapping[str, str]) -> list[str]:
    return sorted(name for name in names if environ.get(name))


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
