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
from elastic_adapter.core.errors import UserError, in_one_line

# What optimizers of torch keep in the shape of the parameter that it is for.
_LIKE_PARAMETERS = ("exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg")


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
        return state if all(_storage(each) in own and not _is_spread(each) for each in state.values()) else None

    def set_model(self, model: Any, state: Mapping[str, Any]) -> None:
        try:
            self._unwrapped(model).load_state_dict(state)
        except (RuntimeError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"the model does not take this state: {in_one_line(error)}") from error

    def set_rest(self, model: Any, state: Mapping[str, Any]) -> None:
        self._unwrapped(model).load_state_dict(state, strict=False)

    def set_optimizer(self, optimizer: Any, state: Any, renamed: Mapping[str, str]) -> None:  # noqa: ARG002
        settings = _settings(optimizer)
        try:
            optimizer.load_state_dict(state)
        except KeyError as error:
            raise UserError(f"the optimizer does not take this state: it has no {error}") from error
        except (ValueError, RuntimeError) as error:
            raise UserError(f"the optimizer does not take this state: {in_one_line(error)}") from error
        except (TypeError, AttributeError, IndexError) as error:
            words = f"it is of another form ({type(error).__name__}: {in_one_line(error)})"
            raise UserError(f"the optimizer does not take this state: {words}") from error
        if why := _taken_amiss(optimizer, settings):
            raise UserError(f"the optimizer does not take this state: {why}")

    def check(self, thing: Any, state: Any) -> None:
        """Whatever is wrong, torch raises an error of it."""

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
        if not isinstance(state, Mapping) or "cpu" not in state:
            raise ValueError("what was saved for torch is no state of its generators")
        if "cuda" in state and not self._torch.cuda.is_available():
            raise ValueError("they were saved on a GPU, and there is none here")
        try:
            # Tried before any is set.
            for device in ("cpu", "cuda"):
                if device in state:
                    self._torch.Generator(device).set_state(state[device])
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"what was saved for torch is no state of its generators: {in_one_line(error)}") from error
        self._torch.set_rng_state(state["cpu"])
        if "cuda" in state:
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


NotSaved = checkpointer.NotSaved


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


def _settings(optimizer: Any) -> list[set[str]]:
    """What its kind of optimizer has in each group. (A load may add to its defaults what its groups never had.)"""
    defaults = getattr(optimizer, "defaults", {})
    return [{name for name in defaults if name in group} for group in getattr(optimizer, "param_groups", ())]


def _taken_amiss(optimizer: Any, settings: list[set[str]]) -> str:
    """What is wrong with the state that an optimizer of torch has loaded: it takes those of others, and fails later."""
    # One that makes its groups when it is loaded has more of them by now.
    for group, names in zip(getattr(optimizer, "param_groups", ()), settings, strict=False):
        if lost := sorted(names - group.keys()):
            return f"it is of another kind of optimizer, and has no {', '.join(map(repr, lost[:3]))}"
        if not type(optimizer).__module__.startswith("torch.optim."):
            # What others keep under these names may have any shape.
            continue
        for parameter in group["params"]:
            kept = optimizer.state.get(parameter, {})
            for name in _LIKE_PARAMETERS:
                # Older ones of torch wrote None for a momentum that is not used.
                if kept.get(name) is not None and getattr(kept[name], "shape", None) != parameter.shape:
                    shapes = f"{list(getattr(kept[name], 'shape', ()))} there, {list(parameter.shape)} here"
                    return f"{name} of a parameter has the shape {shapes}; do its parameters come in another order now?"
    return ""


def _loads_plainly(module: Any) -> bool:
    """Whether a load only fills its tensors, as the layers of torch itself have it."""
    hooks = module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks  # noqa: SLF001
    return not hooks and _is_torch_s(module._load_from_state_dict)  # noqa: SLF001


def _is_torch_s(method: Any) -> bool:
    return str(getattr(method, "__module__", "")).startswith("torch.nn.")


def _is_spread(tensor: Any) -> bool:
    """Whether one number in memory is several of the tensor's, as after expand(): that can't be filled."""
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _storage(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001
