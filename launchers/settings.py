"""The launcher's settings: one table, and where each value comes from.

A flag wins over a variable, a variable over the default. Values stay text here; ``resolve`` gives them their meaning.
The words of Paddle's launchers are in the table, too: ``fleetrun`` says what they mean in ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elastic_adapter.core.errors import UserError

GROUPS = ("job", "nodes", "elasticity", "workers", "logs", "paddle", "other")


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
    # Variables of Paddle's launchers, which count with that framework only, and there win over the flag.
    paddle: tuple[str, ...] = ()

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
    paddle: tuple[str, ...] = (),
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
        paddle=paddle,
    )


def _paddle(name: str, metavar: str, help: str, *variables: str) -> Setting:
    """One row in Paddle's words and spelling; no variable of ours stands for it."""
    return Setting(name, "paddle", help, ("--" + name,), (), None, metavar, paddle=variables)


def _refused(name: str, *variables: str) -> Setting:
    return _paddle(name, "X", "not supported: use python -m paddle.distributed.launch", *variables)


def _idle(name: str, metavar: str, *variables: str) -> Setting:
    return _paddle(name, metavar, "accepted, no effect", *variables)


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
        "nproc-per-node",
        "job",
        "workers on this node: a number, auto, gpu, cpu or xpu",
        metavar="N",
        default="1",
        paddle=("PADDLE_NPROC_PER_NODE",),
    ),
    _setting("nnodes", "job", "number of nodes, or MIN:MAX", metavar="N", default="1:1", paddle=("PADDLE_NNODES",)),
    _setting(
        "rdzv-id",
        "job",
        "name of the job, the same on all its nodes; left out on one node: a random one",
        metavar="NAME",
        alias="job-id",
        paddle=("PADDLE_JOB_ID", "PADDLE_ELASTIC_JOB_ID"),
    ),
    _setting("standalone", "job", "one node, nothing else needed: the default while no other nodes are named"),
    _setting("dry-run", "job", "print what would be run, and run nothing", torchrun=False),
    _setting(
        "rdzv-backend",
        "nodes",
        "how nodes meet: static (fixed number, --master-addr), c10d or embedded (one of them runs an etcd), "
        "etcd, etcd-v2 or etcdv3 (an etcd that is there; its v3 API)",
        metavar="NAME",
        default="static",
    ),
    _setting(
        "rdzv-endpoint",
        "nodes",
        "where they meet; etcd: a list, each with http:// or https:// if need be, port 2379 if left out; "
        "c10d, embedded: one of the nodes, port 29400 if left out",
        metavar="HOST:PORT",
        default="",
    ),
    _setting(
        "rdzv-conf",
        "nodes",
        "torchrun's further settings: last_call_timeout is --quiet-time, is_host says who runs the etcd, "
        "protocol, cacert, cert and key are for etcd",
        metavar="K=V,...",
        default="",
    ),
    _setting(
        "node-id",
        "nodes",
        "name of this node; left out: POD_NAME, SLURMD_NODENAME (several nodes), or the host's name",
        metavar="NAME",
        torchrun=False,
    ),
    _setting("node-rank", "nodes", "static: rank of this node", metavar="N", default="0"),
    _setting("master-addr", "nodes", "static: address of rank 0's node", metavar="HOST", default="127.0.0.1"),
    _setting(
        "master-port",
        "nodes",
        "static: on one node the port for rank 0; on several where they meet, 29500 if left out; "
        "else a free one for each generation",
        metavar="PORT",
    ),
    _setting(
        "local-addr",
        "nodes",
        "address by which others reach this node; left out: POD_IP, or the one that leads to the endpoint",
        metavar="HOST",
    ),
    _setting(
        "listen-address",
        "nodes",
        "address to listen on, such as 0.0.0.0; left out: this node's own address",
        metavar="HOST",
        torchrun=False,
    ),
    _setting(
        "connect-timeout",
        "nodes",
        "how long to wait for etcd at the start",
        metavar="SECONDS",
        default="10",
        torchrun=False,
    ),
    _setting("etcd-ca", "nodes", "certificates to trust etcd by, PEM", metavar="PATH", torchrun=False),
    _setting("etcd-cert", "nodes", "certificate to show to etcd, PEM", metavar="PATH", torchrun=False),
    _setting("etcd-key", "nodes", "the certificate's private key, PEM", metavar="PATH", torchrun=False),
    _setting(
        "etcd-user",
        "nodes",
        "user to log in to etcd as; the password is read from ELASTIC_ETCD_PASSWORD only",
        metavar="NAME",
        torchrun=False,
    ),
    Setting("etcd-password", "nodes", "the user's password", (), ("ELASTIC_ETCD_PASSWORD",), None, "TEXT"),
    _setting(
        "finished-grace",
        "nodes",
        "for how long after a run's end a start is told its result instead of beginning a new run",
        metavar="SECONDS",
        default="10",
        torchrun=False,
    ),
    _setting(
        "retention",
        "nodes",
        "how long etcd keeps a run after its end",
        metavar="SECONDS",
        default="3600",
        torchrun=False,
    ),
    _setting(
        "max-restarts",
        "elasticity",
        "how often all workers may be started again after a failure; left out: 0, paddle: 3",
        metavar="N",
    ),
    _setting(
        "restart-window",
        "elasticity",
        "restarts older than this, such as 1h, no longer count against --max-restarts; left out: all count",
        metavar="TIME",
        torchrun=False,
    ),
    _setting(
        "restart-backoff",
        "elasticity",
        "pause before a restart, doubled with each that counts, such as 1s:60s; left out: none",
        metavar="FIRST:LONGEST",
        torchrun=False,
    ),
    _setting(
        "on-exit",
        "elasticity",
        "what an exit code, a range of them or a signal means: restart, fail, ignore or exclude-node, such as "
        "3=fail,SIGSEGV=fail; may be repeated, the first that matches counts",
        metavar="WHAT=ACTION,...",
        default="",
        torchrun=False,
        repeats=True,
    ),
    _setting(
        "startup-failures",
        "elasticity",
        "the same failure so often in a row at the start ends the job; 0: never",
        metavar="N",
        default="2",
        torchrun=False,
    ),
    _setting(
        "startup-window",
        "elasticity",
        "how long after its start a worker that fails by itself is still at its start",
        metavar="TIME",
        default="30",
        torchrun=False,
    ),
    _setting(
        "crash-loop",
        "elasticity",
        "the same rank, or the same step, failing so often in a row ends the job, or, with N=exclude-node, excludes "
        "the node if it was the same each time; 0: never",
        metavar="N[=exclude-node]",
        default="0",
        torchrun=False,
    ),
    _setting(
        "exclude-node-after",
        "elasticity",
        "a node on which workers failed so often is kept out while enough others are there; 0: never",
        metavar="N",
        default="0",
        torchrun=False,
    ),
    _setting(
        "health-check",
        "elasticity",
        "a command of the shell that finds out whether a node is fit (code 0): run before it joins, and after every "
        "second failure on it",
        metavar="COMMAND",
        torchrun=False,
    ),
    _setting(
        "health-check-timeout",
        "elasticity",
        "how long the health check may take",
        metavar="TIME",
        default="60",
        torchrun=False,
    ),
    _setting(
        "hang-timeout",
        "elasticity",
        "no rank told of a step (elastic_adapter.core.worker.progress) for so long, such as 10m: stacks are dumped, "
        "and the workers start again; left out: hangs are not detected",
        metavar="TIME",
        torchrun=False,
    ),
    _setting(
        "start-timeout",
        "elasticity",
        "workers of which none told of a first step (also because they never do) for so long count as hung, too; left "
        "out: without limit",
        metavar="TIME",
        torchrun=False,
    ),
    _setting(
        "fault-tolerance-level",
        "elasticity",
        "0: off, 1: fault-tolerant, 2: elastic; left out: 2 if MIN is below MAX, else 1",
        metavar="LEVEL",
        torchrun=False,
        # The first one is spelt as Paddle does.
        paddle=("PADDLE_ELASTIC_FAULT_TOLERANC_LEVEL", "PADDLE_ELASTIC_FAULT_TOLERANCE_LEVEL"),
    ),
    _setting(
        "quiet-time",
        "elasticity",
        "with MIN nodes there, how long no further one must have come before training begins without it",
        metavar="SECONDS",
        default="3",
        torchrun=False,
    ),
    _setting(
        "drain-timeout",
        "elasticity",
        "how long workers may take to save and stop before a planned change of nodes",
        metavar="SECONDS",
        default="30",
        torchrun=False,
    ),
    _setting(
        "join",
        "elasticity",
        "when a newcomer is taken in: immediate: when a checkpoint was saved for it, or after --drain-timeout; "
        "checkpoint: not before one was saved",
        metavar="WHEN",
        default="immediate",
        torchrun=False,
    ),
    _setting(
        "checkpoint-wait",
        "elasticity",
        "how long the next generation, or the end, waits for a checkpoint that is being written",
        metavar="SECONDS",
        default="30",
        torchrun=False,
    ),
    _setting(
        "hold-timeout",
        "elasticity",
        "how long the nodes left wait for a replacement before the job fails; left out: without limit",
        metavar="SECONDS",
        torchrun=False,
    ),
    _setting(
        "lease-ttl",
        "elasticity",
        "after how long without a sign of life a node counts as lost; whole, at least 2",
        metavar="SECONDS",
        default="5",
        torchrun=False,
        paddle=("PADDLE_ELASTIC_TTL",),
    ),
    _setting(
        "isolation-timeout",
        "elasticity",
        "how long all nodes train on while etcd is out of reach; 0: no longer than --lease-ttl",
        metavar="SECONDS",
        default="600",
        torchrun=False,
    ),
    _setting(
        "leave-exit-code",
        "elasticity",
        "exit code of a node that is told to leave while the job goes on; left out: 128 + the signal's number",
        metavar="N",
        torchrun=False,
    ),
    _setting(
        "leave-signal",
        "elasticity",
        "signal that tells workers that their node is about to leave; left out: none",
        metavar="NAME",
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
    _setting(
        "log-dir",
        "logs",
        "folder for the workers' output, a file per rank and stream; paddle: a file per rank",
        metavar="FOLDER",
        paddle=("PADDLE_LOG_DIR",),
    ),
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
    _setting(
        "summary-file",
        "logs",
        "file for the end of the job as JSON: outcome, reason, exit code, first failure, the others, and each restart",
        metavar="PATH",
        torchrun=False,
    ),
    _setting("event-log-handler", "logs", "null or console; accepted, no effect", metavar="NAME", default="null"),
    _setting("logs-specs", "logs", "not supported: needs torch in the launcher", metavar="NAME", torchrun=False),
    Setting("log-level", "logs", "how much the launcher itself tells", (), ("LOGLEVEL",), "INFO", "LEVEL"),
    Setting("python", "workers", "the interpreter of Python workers", (), ("PYTHON_EXEC",), None, "PATH"),
    _paddle("master", "PLACE", "where nodes meet: etcd://HOST:PORT,... or one node's HOST:PORT", "PADDLE_MASTER"),
    _paddle("rank", "N", "rank of this node; -1 or left out: any", "PADDLE_RANK", "PADDLE_TRAINER_ID"),
    _paddle("ips", "HOST,...", "addresses of all nodes, in the order of their ranks", "PADDLE_IPS"),
    _paddle("start_port", "PORT", "port on the first of --ips where nodes meet; left out: 6070", "PADDLE_START_PORT"),
    _paddle("host", "HOST", "address of this node, as --local-addr", "POD_IP"),
    _paddle("elastic_server", "HOST:PORT", "etcd where nodes meet", "PADDLE_ELASTIC_SERVER"),
    _paddle("np", "N", "number of nodes, or MIN:MAX, as --nnodes; not paddle: --nproc-per-node", "PADDLE_ELASTIC_NP"),
    _paddle("devices", "N,...", "devices to use, of those that are visible", "PADDLE_DEVICES"),
    _paddle("gpus", "N,...", "the same, GPUs"),
    _paddle("npus", "N,...", "the same, NPUs"),
    _paddle("xpus", "N,...", "the same, XPUs"),
    _paddle("max_restart", "N", "as --max-restarts", "PADDLE_MAX_RESTART"),
    _paddle(
        "elastic_level",
        "LEVEL",
        "-1: --fault-tolerance-level 0; 0: 1; 1: 2 if MIN is below MAX, else 1",
        "PADDLE_ELASTIC_LEVEL",
    ),
    _paddle("elastic_timeout", "SECONDS", "as --quiet-time", "PADDLE_ELASTIC_TIMEOUT"),
    _paddle("log_level", "LEVEL", "how much the launcher itself tells", "PADDLE_LOG_LEVEL"),
    _paddle("log_overwrite", "BOOL", "begin new log files instead of adding to them", "PADDLE_LOG_OVERWRITE"),
    _paddle("run_mode", "MODE", "collective is the only one", "PADDLE_RUN_MODE"),
    _idle("sort_ip", "BOOL", "PADDLE_SORT_IP"),
    _idle("legacy", "BOOL"),
    _idle("enable_gpu_log", "BOOL"),
    _idle("auto_cluster_config", "BOOL", "PADDLE_AUTO_CLUSTER"),
    _idle("scale", "N", "PADDLE_ELASTIC_SCALE"),
    _idle("force", "BOOL", "PADDLE_ELASTIC_FORCE"),
    _refused("servers", "PADDLE_SERVERS_ENDPOINTS"),
    _refused("trainers", "PADDLE_TRAINERS_ENDPOINTS"),
    _refused("server_num", "PADDLE_SERVER_NUM"),
    _refused("trainer_num", "PADDLE_TRAINER_NUM"),
    _refused("gloo_port", "PADDLE_GLOO_PORT"),
    _refused("with_gloo", "PADDLE_WITH_GLOO"),
    _refused("auto_tuner_json"),
    _refused("auto_parallel_config", "PADDLE_AUTO_PARALLEL_CONFIG"),
    _refused("elastic_pre_hook"),
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

    def seconds(self, *, positive: bool = False) -> float:
        value = seconds_of(self.text or "")
        if value is None or (positive and value == 0):
            limit = "above 0" if positive else "of 0 or more"
            raise self.wrong(f"a number of seconds {limit}, or a time such as 90s, 10m or 1h")
        return value

    def items(self) -> tuple[str, ...]:
        """A comma list without its blanks."""
        return tuple(item.strip() for item in (self.text or "").split(",") if item.strip())


def seconds_of(text: str) -> float | None:
    """Seconds, or a time with its unit; None: it is no time.

    >>> seconds_of("1.5"), seconds_of("10m"), seconds_of("soon")
    (1.5, 600.0, None)
    """
    number, unit = text.strip(), 1.0
    for ending, seconds in _UNITS.items():
        if number.endswith(ending):
            number, unit = number[: -len(ending)], seconds
            break
    try:
        value = float(number) * unit
    except ValueError:
        return None
    return value if 0 <= value < float("inf") else None


# Longer endings come first.
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


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
