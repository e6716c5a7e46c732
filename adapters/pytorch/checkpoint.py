"""Checkpoints of torch's models and optimizers. For the user's program: it runs where torch is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from elastic_adapter.core.checkpoint import checkpointer, single, torchstate
from elastic_adapter.core.checkpoint.files import Expected, Skeleton, copy_memory, memory
from elastic_adapter.core.checkpoint.framework import Group
from elastic_adapter.core.errors import UserError


class TorchGroup:
    """The default group of torch.distributed, if there is one."""

    def __init__(self, torch: Any) -> None:
        self._distributed = torch.distributed

    def place(self) -> tuple[int, int] | None:
        if not (self._distributed.is_available() and self._distributed.is_initialized()):
            return None
        return self._distributed.get_rank(), self._distributed.get_world_size()

    def broadcast(self, value: Any) -> Any:
        values = [value]
        self._distributed.broadcast_object_list(values, src=0)
        return values[0]


class Torch:
    """What checkpoints need of torch."""

    name = "torch"
    model_file = "model.pt"
    optimizer_file = "optimizer.pt"
    extra_file = "extra.pt"

    def __init__(self) -> None:
        # By name: what the launcher imports of this package must not import torch.
        self._torch: Any = import_module("torch")
        self.group: Group = TorchGroup(self._torch)

    def rank_file(self, rank: int) -> str:
        return f"rank-{rank:05d}.pt"

    def versions(self) -> dict[str, str]:
        return {"torch": str(self._torch.__version__), "python": sys.version.split()[0]}

    def skeleton(self, state: Any) -> tuple[Skeleton, list[Any]]:
        return torchstate.skeleton(self._torch, state)

    def copy(self, pieces: Sequence[Any], into: Sequence[memoryview]) -> None:
        """Not by copy_() where the tensor is in memory: its threads wait for each other, which is slow on busy CPUs."""
        for piece, view in zip(pieces, into, strict=True):
            if piece.device.type == "cpu":
                copy_memory(piece.data_ptr(), view)
            elif len(view):
                self._torch.frombuffer(view, dtype=self._torch.uint8).copy_(piece)

    def views(self, pieces: Sequence[Any]) -> tuple[list[memoryview], object]:
        local = [piece.cpu() for piece in pieces]
        return [memory(piece.data_ptr(), piece.numel()) for piece in local], local

    def model_state(self, model: Any) -> Any:
        return self._unwrapped(model).state_dict()

    def targets(self, model: Any) -> dict[str, Any] | None:
        """Its state's tensors, where these are the model's own memory and nobody has to be told of a load."""
        module = self._unwrapped(model)
        if not (_is_torch_s(module.load_state_dict) and all(_loads_plainly(each) for each in module.modules())):
            return None
        tensor = self._torch.Tensor
        state = {name: each for name, each in module.state_dict().items() if isinstance(each, tensor)}
        own = {_storage(each) for each in (*module.parameters(), *module.buffers())}
        if any(each.is_meta for each in state.values()):
            raise UserError("the model is on the device meta, which holds no values: move it with to_empty() first")
        return state if all(_storage(each) in own for each in state.values()) else None

    def set_model(self, model: Any, state: Mapping[str, Any]) -> None:
        try:
            self._unwrapped(model).load_state_dict(state)
        except (RuntimeError, KeyError, TypeError) as error:
            raise UserError(f"the model does not take this state: {_line(error)}") from error

    def set_rest(self, model: Any, state: Mapping[str, Any]) -> None:
        self._unwrapped(model).load_state_dict(state, strict=False)

    def set_optimizer(self, optimizer: Any, state: Any, renamed: Mapping[str, str]) -> None:  # noqa: ARG002
        try:
            optimizer.load_state_dict(state)
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            raise UserError(_line(error)) from error

    def renamed(self, path: str, models: Mapping[str, Any]) -> dict[str, str]:  # noqa: ARG002
        """An optimizer of torch counts its parameters, whatever they are called."""
        return {}

    def read(self, path: str, into: Mapping[str, Any] | None = None, expected: Expected | None = None) -> Any:
        return torchstate.load_torch(self._torch, path, into=into, expected=expected)

    def read_trusting(self, path: str) -> Any:
        return self._torch.load(path, map_location="cpu", weights_only=False)

    def rng(self) -> Any:
        cuda = self._torch.cuda
        found = {"cpu": self._torch.get_rng_state()}
        if cuda.is_available() and cuda.is_initialized():
            found["cuda"] = cuda.get_rng_state()
        return found

    def set_rng(self, state: Any) -> None:
        self._torch.set_rng_state(state["cpu"])
        if "cuda" in state:
            if not self._torch.cuda.is_available():
                raise ValueError("they were saved on a GPU, and there is none here")
            self._torch.cuda.set_rng_state(state["cuda"])

    def _unwrapped(self, model: Any) -> Any:
        parallel = self._torch.nn.parallel
        while True:
            if isinstance(model, parallel.DistributedDataParallel | parallel.DataParallel):
                model = model.module
            elif hasattr(model, "_orig_mod"):
                # Of torch.compile.
                model = model._orig_mod  # noqa: SLF001
            else:
                return model


class Checkpointer(checkpointer.Checkpointer):
    __doc__ = checkpointer.Checkpointer.__doc__
    framework = Torch


def save_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: Any = None,
    optimizer: Any = None,
    step: int = 0,
    scheduler: Any = None,
    verify: str = "sample",
    **extra: Any,
) -> str | None:
    """Save one checkpoint as this folder, and wait for it; see ``single.save``."""
    return single.save(Torch(), path, single.things(model, optimizer, scheduler, extra), step, verify=verify)


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    trusted: bool = False,
) -> dict[str, Any]:
    """Load a folder that was saved as a checkpoint, or a file of ``torch.save``; see ``single.load``."""
    return single.load(Torch(), path, single.things(model, optimizer, scheduler, {}), trusted=trusted)


def _loads_plainly(module: Any) -> bool:
    """Whether a load only fills its tensors, as the layers of torch itself have it."""
    hooks = module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks  # noqa: SLF001
    return not hooks and _is_torch_s(module._load_from_state_dict)  # noqa: SLF001


def _is_torch_s(method: Any) -> bool:
    return str(getattr(method, "__module__", "")).startswith("torch.nn.")


def _storage(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
