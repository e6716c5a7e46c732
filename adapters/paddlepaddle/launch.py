"""What a paddle worker reads: the PADDLE_* variables of its launcher. Imports without paddle."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from elastic_adapter.adapters.registry import Options
from elastic_adapter.core.environment import neutral_env
from elastic_adapter.core.model import Assignment, Endpoint, Failed, Seat
from elastic_adapter.core.ports import FailureDetail

_FIRST_PORT, _PORTS = 1024, 65536 - 1024
_BACKENDS = {"npu": {"PADDLE_DISTRI_BACKEND": "xccl", "PADDLE_XCCL_BACKEND": "npu"}}


@dataclass(frozen=True, slots=True)
class PaddleAdapter:
    # The GPUs of this node; workers use them when there is one for each, else they talk through gloo.
    gpus: int = 0
    # What the user chose instead, and of which kind.
    devices: tuple[str, ...] = ()
    device_kind: str = "gpu"
    log_dir: str = ""
    name: str = "paddle"
    preload: tuple[str, ...] = ("paddle", "paddle.distributed", "paddle.distributed.fleet")
    # What makes rank 0's store quick to reach.
    hook: str | None = os.path.join(os.path.dirname(os.path.abspath(__file__)), "hook.py")
    head_start_s: float = 0.0

    def slot_env(self, local_rank: int, slots: int, inherited: Mapping[str, str]) -> dict[str, str]:
        # Paddle's import would set it, too, but too late for what a script imports before.
        env = {} if "OMP_NUM_THREADS" in inherited else {"OMP_NUM_THREADS": "1"}
        devices = self.devices or tuple(str(number) for number in range(self.gpus))
        if len(devices) < max(slots, 1) and not self.devices:
            return env if "PADDLE_DISTRI_BACKEND" in inherited else {**env, "PADDLE_DISTRI_BACKEND": "gloo"}
        chosen = ",".join(devices) if slots == 1 else devices[local_rank]
        return {**env, f"FLAGS_selected_{self.device_kind}s": chosen, **_BACKENDS.get(self.device_kind, {})}

    def worker_env(self, seat: Seat) -> dict[str, str]:
        assignment = seat.assignment
        endpoints = _endpoints(assignment)
        return {
            **neutral_env(seat),
            "PADDLE_MASTER": str(assignment.master),
            "PADDLE_CURRENT_ENDPOINT": endpoints[seat.rank],
            "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
            "PADDLE_TRAINER_ID": str(seat.rank),
            "PADDLE_TRAINERS_NUM": str(assignment.world_size),
            "PADDLE_GLOBAL_RANK": str(seat.rank),
            "PADDLE_GLOBAL_SIZE": str(assignment.world_size),
            "PADDLE_LOCAL_RANK": str(seat.local_rank),
            "PADDLE_LOCAL_SIZE": str(assignment.slots),
            "PADDLE_RANK_IN_NODE": str(seat.local_rank),
            "PADDLE_NNODES": str(assignment.group_size),
            "PADDLE_AUTO_CLUSTER": "0",
            "POD_NAME": seat.node,
            **({"PADDLE_LOG_DIR": os.path.abspath(self.log_dir)} if self.log_dir else {}),
        }

    def error_file(self, outcome: Failed) -> str | None:  # noqa: ARG002 (the port's)
        return None

    def read_error_file(self, content: str) -> FailureDetail | None:  # noqa: ARG002 (the port's)
        return None


def _endpoints(assignment: Assignment) -> tuple[str, ...]:
    """An address of each rank's own, different in each generation, as the master's port is."""
    hosts = [peer.address for peer in assignment.peers for _ in range(peer.slots)]
    ports = (_FIRST_PORT + (assignment.master.port - _FIRST_PORT + 1 + rank) % _PORTS for rank in range(len(hosts)))
    return tuple(str(Endpoint(host, port)) for host, port in zip(hosts, ports, strict=True))


def create(options: Options) -> PaddleAdapter:
    return PaddleAdapter(options.gpus, options.devices, options.device_kind, options.log_dir)
