"""The launcher's settings: one table, and where each value comes from.

A flag wins over a variable, a variable over the default. Values stay text here; ``resolve`` gives them their meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elastic_adapter.core.errors import UserError

GROUPS = ("job", "elasticity", "workers", "logs", "other")


@dataclass(frozen=True, slots=True)
class Setting:
    name: str
    group: str
    help: str
    flags: tuple[str, ...]
    # Variables of equal standing: two that differ are an error.
    variables: tuple[str, ...]
    default: str | None = None
    # Empty: a switch, which takes no value.
    metavar: str = ""
    # Whether a repeated flag adds to the value instead of replacing it.
    repeats: bool = False
    # Read when neither a flag nor one of the variables is set.
    fallback: str | None = None
    # Whether an empty variable is a value of its own; else it counts as not set.
    empty_is_a_value: bool = False

    @property
    def switch(self) -> bool:
        return not self.metavar


def _setting(
    name: str,
    group: str,
    help: str,
    *,
    metavar: str = "",
    default: str | None = None,
    torchrun: bool = True,
    short: str = "",
    alias: str = "",
    variables: tuple[str, ...] = (),
    repeats: bool = False,
    fallback: str | None = None,
    empty_is_a_value: bool = False,
) -> Setting:
    """One row: ``--name`` with ELASTIC_NAME, and PET_NAME where torchrun reads it."""
    names = (name, alias) if alias else (name,)
    own = tuple("ELASTIC_" + each.upper().replace("-", "_") for each in names)
    pet = ("PET_" + name.upper().replace("-", "_"),) if torchrun else ()
    return Setting(
        name=name,
        group=group,
        help=help,
        flags=(*((short,) if short else ()), *("--" + each for each in names)),
        variables=(*own, *pet, *variables),
        default="0" if not metavar else default,
        metavar=metavar,
        repeats=repeats,
        fallback=fallback,
        empty_is_a_value=empty_is_a_value,
    )


SETTINGS: tuple[Setting, ...] = (
    _setting(
        "framework",
        "job",
        "torch, paddle, plain (any program), or one that an installed package adds; "
        "left out: what the variables tell, or the only one installed",
        metavar="NAME",
        torchrun=False,
    ),
    _setting(
        "nproc-per-node", "job", "workers on this node: a number, auto, gpu, cpu or xpu", metavar="N", default="1"
    ),
    _setting("nnodes", "job", "number of nodes, or MIN:MAX", metavar="N", default="1:1"),
    _setting(
        "rdzv-id",
        "job",
        "name of the job; left out: a random one",
        metavar="NAME",
        alias="job-id",
    ),
    _setting("standalone", "job", "one node, nothing else needed: the default while no other nodes are named"),
    _setting("rdzv-backend", "job", "how nodes find each other: static or c10d", metavar="NAME", default="static"),
    _setting("rdzv-endpoint", "job", "where they meet", metavar="HOST:PORT", default=""),
    _setting(
        "rdzv-conf",
        "job",
        "further rendezvous settings; checked, not needed on one node",
        metavar="K=V,...",
        default="",
    ),
    _setting("node-id", "job", "name of this node; left out: the host's name", metavar="NAME", torchrun=False),
    _setting("node-rank", "job", "rank of this node", metavar="N", default="0"),
    _setting("master-addr", "job", "address of rank 0's node", metavar="HOST", default="127.0.0.1"),
    _setting("master-port", "job", "port for rank 0; left out: a free one for each generation", metavar="PORT"),
    _setting("local-addr", "job", "address of this node", metavar="HOST"),
    _setting("dry-run", "job", "print what would be run, and run nothing", torchrun=False),
    _setting(
        "max-restarts",
        "elasticity",
        "how often all workers may be started again after a failure; left out: 0, paddle: 3",
        metavar="N",
    ),
    _setting(
        "fault-tolerance-level",
        "elasticity",
        "0: off, 1: fault-tolerant, 2: elastic; left out: 2 if MIN is below MAX, else 1",
        metavar="LEVEL",
        torchrun=False,
    ),
    _setting("no-standby", "elasticity", "keep no idle process with the framework imported", torchrun=False),
    _setting(
        "preload",
        "elasticity",
        "what idle processes import besides the framework; may be repeated",
        metavar="MODULE,...",
        default="",
        torchrun=False,
        repeats=True,
    ),
    _setting(
        "shutdown-timeout",
        "elasticity",
        "how long a worker may take to end before SIGKILL",
        metavar="SECONDS",
        default="30",
        fallback="TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
    ),
    _setting(
        "signals-to-handle",
        "elasticity",
        "signals that end the job in good order and are passed on to the workers",
        metavar="NAME,...",
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    ),
    _setting("monitor-interval", "elasticity", "accepted; exits are seen at once", metavar="SECONDS", default="0.1"),
    _setting("module", "workers", "the script is a module, as in python -m", short="-m"),
    _setting("no-python", "workers", "the script is a program of its own, not a Python script"),
    _setting("run-path", "workers", "run the script as runpy.run_path does; wins over --no-python"),
    _setting("role", "workers", "role of the workers", metavar="NAME", default="default"),
    _setting("virtual-local-rank", "workers", "torch: each worker sees only its own GPU, as device 0"),
    _setting(
        "numa-binding",
        "workers",
        "bind each worker to CPUs near its GPU: node, socket, exclusive or core-complex",
        metavar="MODE",
        torchrun=False,
    ),
    _setting(
        "pass-local-rank", "workers", "give the script --local-rank=N as torch.distributed.launch does", torchrun=False
    ),
    _setting("use-env", "workers", "accepted; the local rank is in LOCAL_RANK anyway", torchrun=False),
    _setting("start-method", "workers", "spawn is the only one", metavar="NAME", default="spawn"),
    _setting("log-dir", "logs", "folder for the workers' output, a file per rank and stream", metavar="FOLDER"),
    _setting(
        "redirects",
        "logs",
        "to file only: 1 stdout, 2 stderr, 3 both, or a list such as 0:1,1:3 by local rank",
        metavar="WHAT",
        default="0",
        short="-r",
    ),
    _setting("tee", "logs", "to file and console: as --redirects", metavar="WHAT", default="0", short="-t"),
    _setting("local-ranks-filter", "logs", "show only these local ranks on the console", metavar="N,...", default=""),
    _setting(
        "duplicate-stdout-filters",
        "logs",
        "lines of stdout with one of these texts go to a file of their own as well (',,' is a comma)",
        metavar="TEXT,...",
        default="",
    ),
    _setting("duplicate-stderr-filters", "logs", "the same for stderr", metavar="TEXT,...", default=""),
    _setting(
        "log-prefix",
        "logs",
        "what a worker's line on the console begins with: ${node}, ${rank}, ${local_rank}, ${role_name}; '' for none",
        metavar="TEMPLATE",
        default="[${node} ${rank}] ",
        torchrun=False,
        variables=("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",),
        empty_is_a_value=True,
    ),
    _setting("event-log-handler", "logs", "null or console; accepted, no effect", metavar="NAME", default="null"),
    _setting("logs-specs", "logs", "not supported: needs torch in the launcher", metavar="NAME", torchrun=False),
    Setting("log-level", "logs", "how much the launcher itself tells", (), ("LOGLEVEL",), "INFO", "LEVEL"),
    Setting("python", "workers", "the interpreter of Python workers", (), ("PYTHON_EXEC",), None, "PATH"),
    Setting("version", "other", "print the version", ("--version",), (), "0"),
    Setting("help", "other", "print this text", ("-h", "--help"), (), "0"),
)

# A worker's environment holds these (see core.environment): in a launcher that a worker starts they are no settings.
WORKER_VARIABLES = frozenset(
    {"ELASTIC_JOB_ID", "ELASTIC_NODE_RANK", "ELASTIC_MAX_RESTARTS", "ELASTIC_MASTER_ADDR", "ELASTIC_MASTER_PORT"}
)


@dataclass(frozen=True, slots=True)
class Given:
    """A setting's value as text, and where it came from: "flag --tee", "variable PET_TEE" or "default"."""

    name: str
    text: str | None
    origin: str = "default"

    @property
    def explicit(self) -> bool:
        return self.origin != "default"

    @property
    def on(self) -> bool:
        return self.text == "1"

    @property
    def where(self) -> str:
        """The flag or variable to name in an error."""
        return self.origin.partition(" ")[2] or f"--{self.name}"

    def wrong(self, expected: str, hint: str = "") -> UserError:
        tail = f"; {hint}" if hint else ""
        return UserError(f"{self.where}: expected {expected}, got {self.text!r}{tail}")

    def whole(self, minimum: int, maximum: int | None = None) -> int:
        text = (self.text or "").strip()
        limits = f"of {minimum} or more" if maximum is None else f"from {minimum} to {maximum}"
        if not (text.isascii() and text.isdecimal()):
            raise self.wrong(f"a whole number {limits}")
        number = int(text)
        if number < minimum or (maximum is not None and number > maximum):
            raise self.wrong(f"a whole number {limits}")
        return number

    def seconds(self) -> float:
        try:
            value = float(self.text or "")
        except ValueError:
            raise self.wrong("a number of seconds, 0 or more") from None
        if not 0 <= value < float("inf"):
            raise self.wrong("a number of seconds, 0 or more")
        return value

    def items(self) -> tuple[str, ...]:
        """A comma list without its blanks."""
        return tuple(item.strip() for item in (self.text or "").split(",") if item.strip())


def read(options: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, Given]:
    """Every setting with its value: the options of the command line, then the variables, then the default.

    >>> read({"tee": "3"}, {"PET_TEE": "1", "PET_ROLE": "eval"})["role"].origin
    'variable PET_ROLE'
    """
    if "ELASTIC_GENERATION" in environ:
        environ = {name: value for name, value in environ.items() if name not in WORKER_VARIABLES}
    return {setting.name: _given(setting, options, environ) for setting in SETTINGS}


def _given(setting: Setting, options: Mapping[str, str], environ: Mapping[str, str]) -> Given:
    if setting.name in options:
        return Given(setting.name, options[setting.name], f"flag --{setting.name}")
    found = _variable(setting, environ)
    if found is None:
        return Given(setting.name, setting.default)
    given = Given(setting.name, environ[found], f"variable {found}")
    if setting.switch and given.text not in ("0", "1"):
        raise given.wrong("0 or 1")
    return given


def _variable(setting: Setting, environ: Mapping[str, str]) -> str | None:
    """The variable that decides this setting, if one is set."""

    def is_set(name: str) -> bool:
        keeps_empty = setting.empty_is_a_value or setting.switch
        return name in environ and (keeps_empty or environ[name] != "")

    found = [name for name in setting.variables if is_set(name)]
    if len({environ[name] for name in found}) > 1:
        pairs = " and ".join(f"{name}={environ[name]!r}" for name in found)
        raise UserError(f"{pairs} contradict each other: unset one, or give --{setting.name}")
    if found:
        return found[0]
    return setting.fallback if setting.fallback and is_set(setting.fallback) else None
