"""What a command line means: the value that ``cli`` makes, ``dry_run`` prints and ``run`` carries out."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_adapter.core.config import ClusterConfig, JobConfig, NodeConfig
from elastic_adapter.core.ports import Adapter, Program


@dataclass(frozen=True, slots=True)
class Source:
    """One resolved setting: its name, its value as text, and where it came from (flag, variable, default)."""

    name: str
    value: str
    origin: str


@dataclass(frozen=True, slots=True)
class HealthCommand:
    """What finds out whether this node is fit to take part."""

    text: str
    within_s: float


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    job: JobConfig
    node: NodeConfig
    program: Program
    adapter: Adapter
    log_level: str
    sources: tuple[Source, ...]
    # None: one node, nothing but this process.
    cluster: ClusterConfig | None = None
    # Where the end is written as JSON; None: nowhere.
    summary_file: str | None = None
    health_check: HealthCommand | None = None
    # Lines that the user should see once at the start.
    notes: tuple[str, ...] = ()
