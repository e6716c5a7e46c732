"""Checkpoints of paddle's models and optimizers. For the user's program: it runs where paddle is imported."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from elastic_adapter.core.checkpoint import checkpointer, paddlestate, single
from elastic_adapter.core.checkpoint.files import Expected, Skeleton, copy_memory, memory
from elastic_adapter.core.checkpoint.framework import Group
from elastic_adapter.core.checkpoint.paddlefile import TensorRef, read_paddle
from elastic_adapter.core.checkpoint.trees import leaves
from elastic_adapter.core.errors import UserError

log = logging.getLogger(__name__)

# Of an optimizer's state: what is no tensor of a parameter.
_SCHEDULE = "LR_Scheduler"
_MASTERS = "master_weights"


class PaddleGroup:
    """The default group of paddle.distributed, if there is one."""

    def __init__(self, paddle: Any) -> None:
        self._distributed = paddle.distributed

    def place(self) -> tuple[int, int] | None:
        if not self._distributed.is_initialized():
            return None
        return self._distributed.get_rank(), self._distributed.get_world_size()

    def broadcast(self, value: Any) -> Any:
        values = [value]
        self._distributed.broadcast_object_list(values, src=0)
        return values[0]


class Paddle:
    """What checkpoints need of paddle."""

    name = "paddle"
    model_file = "model.pdparams"
    optimizer_file = "optimizer.pdopt"
    extra_file = "extra.pdparams"

    def __init__(self) -> None:
        # By name: what the launcher imports of this package must not import paddle.
        self._paddle: Any = import_module("paddle")
        self.group: Group = PaddleGroup(self._paddle)

    def rank_file(self, rank: int) -> str:
        return f"rank-{rank:05d}.pdparams"

    def versions(self) -> dict[str, str]:
        return {"paddle": str(self._paddle.__version__), "python": sys.version.split()[0]}

    def skeleton(self, state: Any) -> tuple[Skeleton, list[Any]]:
        return paddlestate.skeleton(self._paddle, state)

    def copy(self, pieces: Sequence[Any], into: Sequence[memoryview]) -> None:
        """Not by numpy(): that is a copy of its own, and several times as slow."""
        for piece, view in zip(pieces, into, strict=True):
            local = _local(piece)
            copy_memory(_address(local), view)

    def views(self, pieces: Sequence[Any]) -> tuple[list[memoryview], object]:
        local = [_local(piece) for piece in pieces]
        return [memory(_address(piece), _nbytes(piece)) for piece in local], local

    def model_state(self, model: Any) -> Any:
        return self._unwrapped(model).state_dict()

    def targets(self, model: Any) -> dict[str, Any] | None:
        """Its parameters and buffers, which paddle gives as they are; None where a hook gives something else.

        Nor is a layer passed over that has a way of its own to load a state.
        """
        layer = self._unwrapped(model)
        if not str(getattr(layer.set_state_dict, "__module__", "")).startswith("paddle.nn."):
            return None
        own = {id(each) for each in (*layer.parameters(), *layer.buffers())}
        state = {name: each for name, each in layer.state_dict().items() if isinstance(each, self._paddle.Tensor)}
        return state if all(id(each) in own for each in state.values()) else None

    def set_model(self, model: Any, state: Mapping[str, Any]) -> None:
        layer = self._unwrapped(model)
        # paddle warns of what does not fit, and goes on.
        here = layer.state_dict()
        if wrong := [name for name in here if name not in state]:
            raise UserError(f"the model does not take this state: it has no {', '.join(wrong[:3])}")
        if wrong := [name for name in state if name not in here]:
            raise UserError(f"the model does not take this state: it has no place for {', '.join(map(str, wrong[:3]))}")
        for name, each in here.items():
            if hasattr(state[name], "shape") and tuple(state[name].shape) != tuple(each.shape):
                shapes = f"{list(state[name].shape)} there, {list(each.shape)} here"
                raise UserError(f"the model does not take this state: {name} has the shape {shapes}")
        layer.set_state_dict(dict(state))

    def set_rest(self, model: Any, state: Mapping[str, Any]) -> None:
        self._unwrapped(model).set_state_dict({**self._unwrapped(model).state_dict(), **state})

    def set_optimizer(self, optimizer: Any, state: Any, renamed: Mapping[str, str]) -> None:
        """Paddle knows the tensors of a state by the names of parameters, which depend on what was made before them."""
        if not isinstance(state, Mapping):
            raise UserError(f"it is no dict, but a value of the type {type(state).__name__}")
        named = _with_names(state, renamed)
        if lost := _strangers(optimizer, named):
            log.warning("the optimizer has no parameter of %s: what was kept for it is not restored", ", ".join(lost))
        try:
            optimizer.set_state_dict(named)
        except (AssertionError, ValueError, KeyError, TypeError) as error:
            raise UserError(" ".join(str(error).split())) from error

    def renamed(self, path: str, models: Mapping[str, Any]) -> dict[str, str]:
        found = {
            name: ref.name
            for name, ref in leaves(path, read_paddle(path).state)
            if isinstance(ref, TensorRef) and ref.name
        }
        here = {
            f"{begin}{name}": each.name
            for begin, model in models.items()
            for name, each in self._unwrapped(model).state_dict().items()
        }
        return {then: here[name] for name, then in found.items() if name in here}

    def read(self, path: str, into: Mapping[str, Any] | None = None, expected: Expected | None = None) -> Any:
        return paddlestate.load_paddle(self._paddle, path, into=into, expected=expected)

    def read_trusting(self, path: str) -> Any:
        return self._paddle.load(path)

    def rng(self) -> Any:
        found = {"cpu": _plain(self._paddle.get_rng_state("cpu"))}
        if not self._paddle.get_device().startswith("cpu"):
            found["device"] = _plain(self._paddle.get_rng_state())
        return found

    def set_rng(self, state: Any) -> None:
        kind = type(self._paddle.get_rng_state("cpu")[0])
        self._paddle.set_rng_state(_states(kind, state["cpu"]), "cpu")
        if "device" in state:
            if self._paddle.get_device().startswith("cpu"):
                raise ValueError("they were saved on a GPU, and there is none here")
            self._paddle.set_rng_state(_states(kind, state["device"]))

    def _unwrapped(self, model: Any) -> Any:
        while isinstance(model, self._paddle.DataParallel):
            model = model._layers  # noqa: SLF001
        return model


class Checkpointer(checkpointer.Checkpointer):
    __doc__ = checkpointer.Checkpointer.__doc__
    framework = Paddle


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
    return single.save(Paddle(), path, single.things(model, optimizer, scheduler, extra), step, verify=verify)


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    trusted: bool = False,
) -> dict[str, Any]:
    """Load a folder that was saved as a checkpoint, or a file of ``paddle.save``; see ``single.load``."""
    return single.load(Paddle(), path, single.things(model, optimizer, scheduler, {}), trusted=trusted)


def _with_names(state: Mapping[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    """An optimizer's state in terms of what parameters are called now. Those outside of the model keep their names."""
    if all(then == now for then, now in renamed.items()):
        return dict(state)
    found: dict[str, Any] = {}
    for key, value in state.items():
        if key == _SCHEDULE:
            found[key] = value
        elif key == _MASTERS:
            found[key] = {renamed.get(name, name): each for name, each in value.items()}
        elif (name := _with_name(key, renamed)) in found:
            raise UserError(f"two parameters are called {name} now: one of them is no parameter of the model")
        else:
            found[name] = value
    return found


def _with_name(key: str, renamed: Mapping[str, str]) -> str:
    """linear_7.w_0_moment1_0 for linear_0.w_0_moment1_0: the longest beginning that is a parameter counts."""
    ends = [at for at, letter in enumerate(key) if letter == "_"]
    for end in reversed(ends):
        if key[:end] in renamed:
            return renamed[key[:end]] + key[end:]
    return key


def _strangers(optimizer: Any, state: Mapping[str, Any]) -> list[str]:
    """Some keys of a state that belong to no parameter of the optimizer, which would not say so."""
    groups = getattr(optimizer, "_parameter_list", None) or ()
    parameters = [each for group in groups for each in (group["params"] if isinstance(group, dict) else (group,))]
    if not parameters:
        return []
    begins = tuple(f"{each.name}_" for each in parameters)
    return [key for key, value in state.items() if hasattr(value, "shape") and not key.startswith(begins)][:3]


def _plain(states: Sequence[Any]) -> list[list[Any]]:
    """What a generator's state is made of: three numbers, and a text as a list of bytes."""
    return [[*numbers, bytes(text).decode("latin1")] for *numbers, text in (each.__getstate__() for each in states)]


def _states(kind: Any, plain: Sequence[Sequence[Any]]) -> list[Any]:
    made = []
    for *numbers, text in plain:
        state = kind.__new__(kind)
        state.__setstate__((*numbers, list(text.encode("latin1"))))
        made.append(state)
    return made


def _local(piece: Any) -> Any:
    """In the memory of this process: a tensor, or an array of numpy."""
    return piece if hasattr(piece, "ctypes") or piece.place.is_cpu_place() else piece.cpu()


def _address(piece: Any) -> int:
    return int(piece.ctypes.data if hasattr(piece, "ctypes") else piece.data_ptr())


def _nbytes(piece: Any) -> int:
    return int(piece.nbytes if hasattr(piece, "ctypes") else piece.numel() * piece.element_size())
