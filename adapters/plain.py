"""Any program: it is told its place in the neutral variables, nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elastic_adapter.adapters.registry import Options
from elastic_adapter.core.environment import neutral_env
from elastic_adapter.core.model import Failed, Seat
from elastic_adapter.core.ports import FailureDetail


@dataclass(frozen=True, slots=True)
class PlainAdapter:
    name: str = "plain"
    preload: tuple[str, ...] = ()
    hook: str | None = None
    head_start_s: float = 0.0

    def slot_env(self, local_rank: int, slots: int, inherited: Mapping[str, str]) -> dict[str, str]:  # noqa: ARG002 (the port's)
        return {}

    def worker_env(self, seat: Seat) -> dict[str, str]:
        return neutral_env(seat)

    def error_file(self, outcome: Failed) -> str | None:  # noqa: ARG002 (the port's)
        return None

    def read_error_file(self, content: str) -> FailureDetail | None:  # noqa: ARG002 (the port's)
        return None


def create(_options: Options) -> PlainAdapter:
    return PlainAdapter()
