"""A job's settings: frozen, checked once when made, in relation to each other."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic_adapter.core.model import Level
from elastic_adapter.core.restart import RestartPolicy

# A lease must outlive a lost keep-alive and leave a second for killing.
SHORTEST_LEASE_S = 2


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
    # How long a node's leave waits for others to leave with it, so that they make one change.
    leave_gather_s: float = 0.2
    # How long a worker's failure waits for the news that another node is lost, which would explain it.
    blame_s: float = 0.25
    # How long workers get to save and stop before a planned change of the world.
    drain_s: float = 30.0
    # Whether a newcomer is taken in only when a checkpoint was committed, however long that takes.
    join_at_checkpoint: bool = False
    # How long the next world, or the end, waits for a checkpoint that all ranks have staged.
    save_wait_s: float = 30.0
    # How long survivors wait for a replacement before the job fails; None: without limit.
    hold_timeout_s: float | None = None
    # How long a node's lease lives without being renewed. What etcd grants is what counts.
    lease_s: int = 5
    # How long a world that is whole trains on while etcd is out of reach; 0: no longer than the leases live.
    isolation_s: float = 600.0
    # How long no rank of a world that told of progress may make a step; None: without limit.
    hang_timeout_s: float | None = None
    # How long a world may take until a rank tells of its first step; None: without limit.
    start_timeout_s: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise ValueError(f"nodes must be 1 <= MIN <= MAX, got {self.min_nodes}:{self.max_nodes}")
        if self.level == Level.OFF and self.policy.max_restarts > 0:
            raise ValueError(f"fault-tolerance level 0 (off) contradicts max_restarts={self.policy.max_restarts}")
        if self.lease_s < SHORTEST_LEASE_S:
            raise ValueError(f"lease_s must be {SHORTEST_LEASE_S} or more, got {self.lease_s}")
        for name in ("quiet_s", "leave_gather_s", "blame_s", "drain_s", "isolation_s", "save_wait_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("hold_timeout_s", "hang_timeout_s", "start_timeout_s"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0 or None, got {getattr(self, name)}")


def default_level(min_nodes: int, max_nodes: int) -> Level:
    """Elastic where the number of nodes may vary, else fault-tolerant."""
    return Level.ELASTIC if min_nodes < max_nodes else Level.FAULT_TOLERANT


@dataclass(frozen=True, slots=True)
class Credentials:
    """How to reach an etcd that asks who we are. Paths are of PEM files."""

    user: str | None = None
    password: str | None = field(default=None, repr=False)
    ca: str | None = None
    cert: str | None = None
    key: str | None = None


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """How a job of several nodes is reached from one of them."""

    # Where etcd listens: HOST:PORT each.
    endpoints: tuple[str, ...]
    # The flag or variable that says so, to be named in errors.
    named_by: str = field(default="--rdzv-endpoint", compare=False)
    credentials: Credentials = field(default_factory=Credentials)
    # How long to wait for etcd at the start.
    connect_s: float = 10.0
    # Whether this node runs the etcd itself, at the only endpoint.
    hosts_etcd: bool = False
    # Whether the endpoint is an etcd that a node of the job runs: the job ends with that node.
    embedded: bool = False
    # The address that the agent listens on.
    listen: str = "127.0.0.1"
    # For how long after a run's end a start is told its result instead of beginning a new run.
    finished_grace_s: float = 10.0
    # How long a run's keys are kept after its end.
    retention_s: float = 3600.0
    # Whether this node's name is our own guess: another is taken if an agent with that name is at work.
    node_is_guessed: bool = False
    # What must be the same on all nodes, by the names of the settings, beside the job's own values.
    common: tuple[tuple[str, str], ...] = ()

    @property
    def awaits_host(self) -> bool:
        """Whether another node of the job has to start etcd first."""
        return self.embedded and not self.hosts_etcd


STDOUT = 1
STDERR = 2


@dataclass(frozen=True, slots=True)
class OutputConfig:
    """Where each worker's output goes. The tuples have one entry per local rank: STDOUT, STDERR, both or 0."""

    to_console: tuple[int, ...]
    to_file: tuple[int, ...]
    # The folder in which each run makes one of its own; None: no files unless ``to_file`` asks for them.
    log_dir: str | None = None
    # Paddle's way: in that folder itself a file workerlog.N for each local rank, with both streams, written by all
    # generations, and by earlier runs as well unless ``overwrite`` is set.
    worker_logs: bool = False
    overwrite: bool = False
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
    # The exit code of an agent that was asked to leave while the job goes on; None: 128 + the signal's number.
    leave_code: int | None = None
    # The signal that tells workers that their node is about to leave; None: none.
    leave_signal: int | None = None
    # The node's place among those that start together; None: as they come.
    place: int | None = None
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
