"""What a torch worker reads: torchrun's environment and error file. Imports without torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from elastic_adapter.adapters.registry import Options
from elastic_adapter.core.environment import neutral_env
from elastic_adapter.core.model import Failed, Seat
from elastic_adapter.core.ports import FailureDetail


@dataclass(frozen=True, slots=True)
class TorchAdapter:
    signals: tuple[str, ...]
    virtual_local_rank: bool = False
    name: str = "torch"
    # What lets a worker end well.
    hook: str | None = os.path.join(os.path.dirname(os.path.abspath(__file__)), "hook.py")
    # A store's client that is refused once tries again after more than half a second.
    head_start_s: float = 0.05
    # What torch leaves to a script's first use. The constructor of DistributedDataParallel and an optimizer's first
    # step import torch._dynamo: more than a second that a restart need not take, for some 70 MB per standby.
    preload: tuple[str, ...] = (
        "torch",
        "torch.distributed",
        "torch.distributed.elastic.multiprocessing.errors",
        "torch._dynamo",
        "multiprocessing.queues",
    )

    def slot_env(self, local_rank: int, slots: int, inherited: Mapping[str, str]) -> dict[str, str]:
        env: dict[str, str] = {}
        if "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in inherited:
            env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"
        if "OMP_NUM_THREADS" not in inherited and slots > 1:
            env["OMP_NUM_THREADS"] = "1"
        if self.virtual_local_rank:
            visible = inherited.get("CUDA_VISIBLE_DEVICES")
            env["CUDA_VISIBLE_DEVICES"] = str(local_rank) if visible is None else visible.split(",")[local_rank].strip()
        return env

    def worker_env(self, seat: Seat) -> dict[str, str]:
        assignment = seat.assignment
        return {
            **neutral_env(seat),
            "RANK": str(seat.rank),
            "LOCAL_RANK": "0" if self.virtual_local_rank else str(seat.local_rank),
            "GROUP_RANK": str(assignment.group_rank),
            "ROLE_RANK": str(seat.rank),
            "ROLE_NAME": seat.role,
            "WORLD_SIZE": str(assignment.world_size),
            "LOCAL_WORLD_SIZE": str(assignment.slots),
            "GROUP_WORLD_SIZE": str(assignment.group_size),
            "ROLE_WORLD_SIZE": str(assignment.world_size),
            "MASTER_ADDR": assignment.master.host,
            "MASTER_PORT": str(assignment.master.port),
            "TORCHELASTIC_RESTART_COUNT": str(assignment.restart_count),
            "TORCHELASTIC_MAX_RESTARTS": str(seat.max_restarts),
            "TORCHELASTIC_RUN_ID": seat.job_id,
            # Rank 0 hosts the store: the launcher has no torch to host one with.
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "TORCHELASTIC_ERROR_FILE": seat.error_file,
            "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(self.signals),
        }

    def error_file(self, outcome: Failed) -> str | None:
        return error_file(outcome)

    def read_error_file(self, content: str) -> FailureDetail | None:
        return read_error_file(content)


def error_file(outcome: Failed) -> str:
    """What torch's ``@record`` would have written for the failure that ended the job."""
    import json

    first = outcome.first
    stack = first.detail if first is not None else ""
    extra = {"py_callstack": stack, "timestamp": str(int(first.at if first is not None else 0))}
    message = (first.error if first is not None else "") or outcome.reason
    return json.dumps({"message": {"message": message, "errorCode": outcome.exit_code, "extraInfo": extra}})


def read_error_file(content: str) -> FailureDetail | None:
    """What torch's ``@record`` wrote: a message with its call stack, or only a text."""
    import json

    try:
        record = json.loads(content)
    except ValueError:
        return None
    message = record.get("message") if isinstance(record, dict) else None
    if isinstance(message, str):
        return FailureDetail(message, "")
    if not isinstance(message, dict) or not isinstance(message.get("message"), str):
        return None
    extra = message.get("extraInfo")
    stack = extra.get("py_callstack") if isinstance(extra, dict) else None
    return FailureDetail(message["message"], stack if isinstance(stack, str) else "")


def create(options: Options) -> TorchAdapter:
    return TorchAdapter(options.signals, options.virtual_local_rank)
