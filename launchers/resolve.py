"""From settings to a plan: what each value means, and whether they agree with each other.

Everything asked of the machine goes through ``Machine`` and the given environment; only files that the user names are
looked at directly. A mistake is a ``UserError`` of one line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import sha256

from elastic_adapter.adapters.registry import Entry, Options, load
from elastic_adapter.core.config import JobConfig, NodeConfig, default_level
from elastic_adapter.core.errors import UserError
from elastic_adapter.core.model import Level, signal_name, signal_number
from elastic_adapter.core.ports import Adapter, NativeProgram, Program
from elastic_adapter.launchers import fleetrun, framework, numa, policy, rendezvous, streams
from elastic_adapter.launchers.devices import Machine, gpu_count, visible_gpus
from elastic_adapter.launchers.plan import HealthCommand, LaunchPlan, Source
from elastic_adapter.launchers.program import interpreter, program
from elastic_adapter.launchers.settings import SETTINGS, Given

_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

# Features of torchrun's agent that are switched on by a variable.
_UNSUPPORTED = ("TORCHELASTIC_HEALTH_CHECK_PORT", "TORCHELASTIC_ENABLE_FILE_TIMER")

# What a cluster calls its nodes: Kubernetes where the manifest passes it on, Slurm.
_NODE_NAMES = ("POD_NAME", "SLURMD_NODENAME")
_HOST_NAME = "default, the host's name"


def resolve(
    values: Mapping[str, Given], words: tuple[str, ...], environ: Mapping[str, str], machine: Machine
) -> LaunchPlan:
    _check_unsupported(values)
    entry, found_by = framework.choose(values["framework"], environ, machine.installed)
    paddle = entry.name == "paddle"
    told = fleetrun.translate(values, environ, machine) if paddle else fleetrun.foreign(values, entry.name, found_by)
    values = rendezvous.with_conf(told.values)
    place = rendezvous.meet(values, environ, machine)
    python = interpreter(values["python"], environ, machine.python)
    own = python == machine.python
    target = program(values, words, environ, python, own=own, plain=entry.name in ("plain", "paddle"))
    if own and not isinstance(target, NativeProgram):
        framework.check_installed(entry, machine.installed)
    slots = workers(values["nproc-per-node"], environ, machine, python)
    fleetrun.check_devices(told, slots)
    output = streams.output(values, slots, worker_logs=paddle, overwrite=told.overwrite)
    job = _job(values, entry, _job_id(values, place, machine))
    signals = _signals(values["signals-to-handle"])
    options = Options(
        signals=tuple(signal_name(number) for number in signals),
        virtual_local_rank=_virtual(values["virtual-local-rank"], entry, slots, environ.get("CUDA_VISIBLE_DEVICES")),
        gpus=gpu_count(machine, environ) if entry.counts_gpus else 0,
        devices=told.devices,
        device_kind=told.device_kind,
        log_dir=output.log_dir or "",
    )
    name = _node_id(values["node-id"], environ if place.cluster else {}, machine.host_name)
    if place.rank is not None and name.origin == _HOST_NAME:
        # Two nodes of one rank are a mistake, and found by their name.
        name = Given("node-id", f"node-{place.rank}", "default, the node rank")
    node = NodeConfig(
        node=name.text or "",
        address=place.address,
        slots=slots,
        output=output,
        grace_s=values["shutdown-timeout"].seconds(),
        signals=signals,
        role=values["role"].text or "",
        leave_code=None if values["leave-exit-code"].text is None else values["leave-exit-code"].whole(0, 255),
        leave_signal=_leave_signal(values["leave-signal"]),
        place=place.rank,
        master_port=place.port,
        standby=not values["no-standby"].on,
        preload=_modules(values["preload"]),
        pass_local_rank=_pass_local_rank(values, target),
        cpus=_cpus(values["numa-binding"], slots, environ, machine),
    )
    adapter = load(entry, options)
    check = _health_check(values)
    cluster = place.cluster and replace(
        place.cluster,
        node_is_guessed=name.origin == _HOST_NAME,
        common=_common(job, slots, entry, check),
    )
    return LaunchPlan(
        job=job,
        node=node,
        program=target,
        adapter=adapter,
        log_level=_log_level(values["log-level"]),
        sources=_sources(
            values,
            {
                "framework": (entry.name, found_by),
                "node-id": (node.node, name.origin),
                **_resolved(values, job, node, python),
                **_met(values, job, place),
            },
            paddle=paddle,
        ),
        cluster=cluster,
        summary_file=values["summary-file"].text,
        health_check=check,
        notes=(*told.notes, *place.notes, *_notes(values, adapter, slots, environ)),
    )


def _job(values: Mapping[str, Given], entry: Entry, job_id: str) -> JobConfig:
    min_nodes, max_nodes = rendezvous.nodes(values["nnodes"])
    level = _level(values["fault-tolerance-level"], min_nodes, max_nodes)
    return JobConfig(
        job_id=job_id,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        level=level,
        policy=policy.restart_policy(values, entry, level),
        quiet_s=values["quiet-time"].seconds(),
        drain_s=values["drain-timeout"].seconds(),
        join_at_checkpoint=_joins_at_checkpoint(values["join"]),
        save_wait_s=values["checkpoint-wait"].seconds(),
        hold_timeout_s=_limit(values["hold-timeout"]),
        lease_s=values["lease-ttl"].whole(2),
        isolation_s=values["isolation-timeout"].seconds(),
        hang_timeout_s=_limit(values["hang-timeout"]),
        start_timeout_s=_limit(values["start-timeout"]),
    )


def _joins_at_checkpoint(given: Given) -> bool:
    if given.text not in ("immediate", "checkpoint"):
        raise given.wrong("immediate or checkpoint")
    return given.text == "checkpoint"


def _limit(given: Given) -> float | None:
    return None if given.text is None else given.seconds(positive=True)


def _health_check(values: Mapping[str, Given]) -> HealthCommand | None:
    text, limit = values["health-check"].text, values["health-check-timeout"].seconds(positive=True)
    return HealthCommand(text, limit) if text else None


def _job_id(values: Mapping[str, Given], place: rendezvous.Place, machine: Machine) -> str:
    """A job of several nodes has its name from the user, or, where its endpoint tells it from others, torchrun's."""
    return _name(values["rdzv-id"], machine.new_id if place.cluster is None else lambda: "none")


def _common(job: JobConfig, slots: int, entry: Entry, check: HealthCommand | None) -> tuple[tuple[str, str], ...]:
    """What all nodes must be told alike."""
    return (
        ("nnodes", f"{job.min_nodes}:{job.max_nodes}"),
        ("nproc-per-node", str(slots)),
        ("framework", entry.name),
        ("fault-tolerance-level", str(int(job.level))),
        *policy.common(job.policy),
        # It may hold a secret, which is nothing for etcd.
        ("health-check", "none" if check is None else f"(a command, {sha256(check.text.encode()).hexdigest()[:8]})"),
        ("quiet-time", f"{job.quiet_s:g}"),
        ("drain-timeout", f"{job.drain_s:g}"),
        ("join", "checkpoint" if job.join_at_checkpoint else "immediate"),
        ("checkpoint-wait", f"{job.save_wait_s:g}"),
        *(
            (name, "none" if limit is None else f"{limit:g}")
            for name, limit in (
                ("hold-timeout", job.hold_timeout_s),
                ("hang-timeout", job.hang_timeout_s),
                ("start-timeout", job.start_timeout_s),
            )
        ),
        ("lease-ttl", str(job.lease_s)),
        ("isolation-timeout", f"{job.isolation_s:g}"),
    )


def workers(given: Given, environ: Mapping[str, str], machine: Machine, python: str) -> int:
    """The number of workers on this node."""
    match given.text:
        case "cpu":
            return len(machine.cpus())
        case "gpu":
            return _some(gpu_count(machine, environ), given, "GPU", environ)
        case "xpu":
            return _some(machine.xpus(python), given, "XPU", environ)
        case "auto":
            return gpu_count(machine, environ) or len(machine.cpus())
        case text if text and text.isascii() and text.isdecimal() and int(text) > 0:
            return int(text)
    raise given.wrong("a number of 1 or more, auto, cpu, gpu or xpu")


def _some(count: int, given: Given, device: str, environ: Mapping[str, str]) -> int:
    if count == 0:
        visible = environ.get("CUDA_VISIBLE_DEVICES") if device == "GPU" else None
        why = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
        raise UserError(f"{given.where} {given.text}: no {device} was found here{why}; give a number, or cpu")
    return count


def _check_unsupported(values: Mapping[str, Given]) -> None:
    start, specs, events = values["start-method"], values["logs-specs"], values["event-log-handler"]
    if start.text in ("fork", "forkserver"):
        raise UserError(
            f"{start.where} {start.text}: workers always start as fresh processes here, "
            "because forking them needs torch inside the launcher; leave it out"
        )
    if start.text != "spawn":
        raise start.wrong("spawn")
    if specs.text:
        raise UserError(
            f"{specs.where} {specs.text}: torch's LogsSpecs plug-ins need torch inside the launcher; "
            "use --log-dir, --redirects and --tee"
        )
    if events.text not in ("null", "console"):
        raise UserError(
            f"{events.where} {events.text}: torch's event handlers need torch inside the launcher; "
            "expected null or console"
        )
    values["monitor-interval"].seconds()


def _level(given: Given, min_nodes: int, max_nodes: int) -> Level:
    if given.text is None:
        return default_level(min_nodes, max_nodes)
    if given.text not in ("0", "1", "2"):
        raise given.wrong("0 (off), 1 (fault-tolerant) or 2 (elastic)")
    return Level(int(given.text))


def _node_id(given: Given, environ: Mapping[str, str], host_name: str) -> Given:
    """The node's name and where it came from: given, or what the cluster calls it, or our guess."""
    named = (Given("node-id", environ.get(variable) or None, f"variable {variable}") for variable in _NODE_NAMES)
    found = next((each for each in (given, *named) if each.text is not None), None)
    if found is None:
        return Given("node-id", host_name, _HOST_NAME)
    _name(found, str)
    return found


def _name(given: Given, default: Callable[[], str]) -> str:
    """A name that can be part of a folder's name and of a key."""
    if given.text is None:
        return default()
    if not given.text.strip() or not given.text.isprintable() or "/" in given.text:
        raise given.wrong("a name of printable characters without slashes")
    return given.text


def _signals(given: Given) -> tuple[int, ...]:
    numbers = dict.fromkeys(_signal(given, item) for item in given.items())
    if not numbers:
        raise given.wrong("at least one signal, such as SIGTERM")
    return tuple(numbers)


def _leave_signal(given: Given) -> int | None:
    if given.text is None:
        return None
    return _signal(given, given.text.strip(), "the name of a signal such as SIGUSR1")


def _signal(given: Given, item: str, expected: str = "names of signals such as SIGTERM,SIGUSR1") -> int:
    import signal

    found = signal_number(item)
    if found is None:
        raise given.wrong(expected, f"{item!r} is none")
    if found in (signal.SIGKILL, signal.SIGSTOP):
        raise given.wrong("signals that a process can handle", f"{signal_name(found)} can't be")
    return found


def _virtual(given: Given, entry: Entry, slots: int, visible: str | None) -> bool:
    if given.on and entry.name != "torch":
        raise UserError(f"{given.where} is for --framework torch, got --framework {entry.name}")
    if given.on and visible is not None and len(visible.split(",")) < slots:
        raise UserError(
            f"{given.where}: {slots} workers need a GPU each, but CUDA_VISIBLE_DEVICES={visible!r} names fewer"
        )
    return given.on


def _modules(given: Given) -> tuple[str, ...]:
    names = given.items()
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise given.wrong("names of modules such as numpy,package.data", f"{name!r} is none")
    return names


def _pass_local_rank(values: Mapping[str, Given], target: Program) -> bool:
    wanted, use_env = values["pass-local-rank"], values["use-env"]
    if wanted.on and use_env.on:
        raise UserError(
            f"{wanted.where} contradicts {use_env.where}: the script gets its local rank either way; leave out one"
        )
    if wanted.on and isinstance(target, NativeProgram):
        raise UserError(
            f"{wanted.where} is for Python scripts: {target.argv[0]} can read LOCAL_RANK or ELASTIC_LOCAL_RANK"
        )
    return wanted.on


def _cpus(given: Given, slots: int, environ: Mapping[str, str], machine: Machine) -> tuple[frozenset[int], ...]:
    if not given.text:
        return ()
    if given.text not in numa.MODES:
        raise given.wrong(f"one of {', '.join(numa.MODES)}")
    gpus = visible_gpus(machine, environ)
    if not gpus:
        raise UserError(
            f"{given.where} {given.text}: no NVIDIA GPU was found here, so that no CPUs are near one; leave it out"
        )
    return numa.bind(given.text, tuple(gpu.pci for gpu in gpus), slots, machine.cpus(), machine.sysfs)


def _log_level(given: Given) -> str:
    level = (given.text or "").upper()
    level = "WARNING" if level == "WARN" else level
    if level not in _LOG_LEVELS:
        raise given.wrong(f"one of {', '.join(_LOG_LEVELS)}")
    return level


# Paddle's words for which there is none of ours.
_OF_PADDLE = ("devices", "log_overwrite")
_SWITCHES = frozenset(setting.name for setting in SETTINGS if setting.switch)


def _resolved(values: Mapping[str, Given], job: JobConfig, node: NodeConfig, python: str) -> dict[str, tuple[str, str]]:
    """The settings whose text does not say all: value and origin."""
    return {
        "nproc-per-node": (_counted(values["nproc-per-node"], node.slots), values["nproc-per-node"].origin),
        "max-restarts": (str(job.policy.max_restarts), values["max-restarts"].origin),
        "fault-tolerance-level": (str(int(job.level)), values["fault-tolerance-level"].origin),
        "python": (python, _or_default(values["python"], "default, the launcher's own")),
    }


def _met(values: Mapping[str, Given], job: JobConfig, place: rendezvous.Place) -> dict[str, tuple[str, str]]:
    """What the rendezvous came to: value and origin."""
    job_id, endpoint, password = values["rdzv-id"], values["rdzv-endpoint"], values["etcd-password"]
    met = {"etcd-password": ("***", password.origin)} if password.text else {}
    if place.cluster is None:
        return {**met, "rdzv-id": (job.job_id, _or_default(job_id, "default, new for each run"))}
    return {
        **met,
        "rdzv-id": (job.job_id, job_id.origin),
        "rdzv-endpoint": (
            ",".join(place.cluster.endpoints),
            _or_default(endpoint, "from --master-addr and --master-port"),
        ),
        "local-addr": (place.address, place.origin),
        "listen-address": (place.cluster.listen, _or_default(values["listen-address"], "default, the node's address")),
    }


def _counted(given: Given, slots: int) -> str:
    return str(slots) if given.text == str(slots) else f"{slots} ({given.text})"


def _or_default(given: Given, default: str) -> str:
    return given.origin if given.text else default


def _shown(given: Given) -> str:
    if given.name in _SWITCHES:
        return "yes" if given.on else "no"
    return given.text or ""


def _sources(
    values: Mapping[str, Given], resolved: Mapping[str, tuple[str, str]], *, paddle: bool
) -> tuple[Source, ...]:
    hidden = ("other", "paddle")
    shown = [setting.name for setting in SETTINGS if setting.group not in hidden and setting.name != "dry-run"]
    shown += _OF_PADDLE if paddle else ()
    return tuple(Source(name, *resolved.get(name, (_shown(values[name]), values[name].origin))) for name in shown)


def _notes(values: Mapping[str, Given], adapter: Adapter, slots: int, environ: Mapping[str, str]) -> list[str]:
    notes: list[str] = []
    # With paddle that is how it always is.
    if adapter.name == "torch" and "OMP_NUM_THREADS" in adapter.slot_env(0, slots, environ):
        notes.append(f"OMP_NUM_THREADS is set to 1 for each of the {slots} workers, because it was not set")
    if values["monitor-interval"].explicit:
        notes.append(f"{values['monitor-interval'].where} has no effect: exits are seen at once, nothing is polled")
    if values["event-log-handler"].explicit:
        notes.append(f"{values['event-log-handler'].where} has no effect: events are in the launcher's own log lines")
    if values["local-ranks-filter"].text and not streams.shown_ranks(values["local-ranks-filter"], slots):
        notes.append(f"no worker has a local rank of {values['local-ranks-filter'].where}: the console shows no output")
    unread = [name for name in _UNSUPPORTED if environ.get(name)]
    if unread:
        notes.append(f"not used by this version: {', '.join(unread)}")
    return notes
