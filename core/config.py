"""A job's settings: frozen, checked once when made, in relation to each other."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic_adapter.core.model import Level
from elastic_adapter.core.restart import RestartPolicy


@dataclass(frozen=True, slots=True)
class JobConfig:
    """What is the same for all nodes of a job. Durations are in seconds."""

    job_id: str
    min_nodes: int = 1
    max_nodes: int = 1
    level: Level = Level.FAULT_TOLERANT
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    # How long no further node must have joined before a world below the maximum is formed.
    quiet_s: float = 3.0
    # How long workers get to save and stop before a planned change of the world.
    drain_s: float = 30.0
    # How long survivors wait for a replacement before the job fails; None: without limit.
    hold_timeout_s: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise ValueError(f"nodes must be 1 <= MIN <= MAX, got {self.min_nodes}:{self.max_nodes}")
        if self.level == Level.OFF and self.policy.max_restarts > 0:
            raise ValueError(f"fault-tolerance level 0 (off) contradicts max_restarts={self.policy.max_restarts}")
        for name in ("quiet_s", "drain_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.hold_timeout_s is not None and self.hold_timeout_s <= 0:
            raise ValueError(f"hold_timeout_s must be above 0 or None, got {self.hold_timeout_s}")


def default_level(min_nodes: int, max_nodes: int) -> Level:
    """Elastic where the number of nodes may vary, else fault-tolerant."""
    return Level.ELASTIC if min_nodes < max_nodes else Level.FAULT_TOLERANT


STDOUT = 1
STDERR = 2


@dataclass(frozen=True, slots=True)
class OutputConfig:
    """Where each worker's output goes. The tuples have one entry per local rank: STDOUT, STDERR, both or 0."""

    to_console: tuple[int, ...]
    to_file: tuple[int, ...]
    # The folder in which each run makes one of its own; None: no files unless ``to_file`` asks for them.
    log_dir: str | None = None
    # What a worker's line begins with on the console: ${node}, ${rank}, ${local_rank} and ${role_name} are filled in.
    prefix: str = "[${node} ${rank}] "
    # Lines that contain one of these are written to filtered_stdout.log or filtered_stderr.log as well.
    stdout_filters: tuple[str, ...] = ()
    stderr_filters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """What one agent needs besides the job's settings."""

    node: str
    address: str
    slots: int
    output: OutputConfig
    # How long a worker gets between the first signal and SIGKILL.
    grace_s: float = 30.0
    # The signals that end the agent in good order.
    signals: tuple[int, ...] = ()
    role: str = "default"
    # A port that the user chose for the master; None: a fresh one for each generation.
    master_port: int | None = None
    # Whether idle processes wait with the framework imported, and what else they import.
    standby: bool = True
    preload: tuple[str, ...] = ()
    # torch.distributed.launch's way: --local-rank=N as the script's first argument.
    pass_local_rank: bool = False
    # The CPUs that each local rank is bound to; empty: no binding.
    cpus: tuple[frozenset[int], ...] = ()

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ValueError(f"slots must be 1 or more, got {self.slots}")
        if self.grace_s < 0:
            raise ValueError(f"grace_s must not be negative, got {self.grace_s}")
        if not len(self.output.to_console) == len(self.output.to_file) == self.slots:
            raise ValueError("to_console and to_file must have one entry per slot")
        if self.cpus and len(self.cpus) != self.slots:
            raise ValueError("cpus must be empty or have one entry per slot")
