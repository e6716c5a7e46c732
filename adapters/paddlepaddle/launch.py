"""What a paddle worker reads: the PADDLE_* variables of its launcher. Imports without paddle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elastic_adapter.adapters.registry import Options
from elastic_adapter.core.environment import neutral_env
from elastic_adapter.core.model import Seat
from elastic_adapter.core.ports import FailureDetail


@dataclass(frozen=True, slots=True)
class PaddleAdapter:
    # The GPUs of this node; workers use them when there is one for each, else they talk through gloo.
    gpus: int = 0
    name: str = "paddle"
    preload: tuple[str, ...] = ("paddle", "paddle.distributed")
    head_start_s: float = 0.0

    def slot_env(self, local_rank: int, slots: int, inherited: Mapping[str, str]) -> dict[str, str]:
        if "PADDLE_DISTRI_BACKEND" in inherited:
            return {}
        if self.gpus >= slots:
            return {"FLAGS_selected_gpus": str(local_rank)}
        return {"PADDLE_DISTRI_BACKEND": "gloo"}

    def worker_env(self, seat: Seat) -> dict[str, str]:
        assignment = seat.assignment
        master = f"{assignment.master.host}:{assignment.master.port}"
        return {
            **neutral_env(seat),
            "PADDLE_MASTER": master,
            # Paddle wants it to be there and does not connect to it: the store is at PADDLE_MASTER.
            "PADDLE_CURRENT_ENDPOINT": master,
            "PADDLE_TRAINER_ID": str(seat.rank),
            "PADDLE_TRAINERS_NUM": str(assignment.world_size),
            "PADDLE_GLOBAL_RANK": str(seat.rank),
            "PADDLE_GLOBAL_SIZE": str(assignment.world_size),
            "PADDLE_LOCAL_RANK": str(seat.local_rank),
            "PADDLE_LOCAL_SIZE": str(assignment.slots),
            "PADDLE_RANK_IN_NODE": str(seat.local_rank),
            "PADDLE_NNODES": str(assignment.group_size),
        }

    def read_error_file(self, content: str) -> FailureDetail | None:  # noqa: ARG002 (the port's)
        return None


def create(options: Options) -> PaddleAdapter:
    return PaddleAdapter(options.gpus)
