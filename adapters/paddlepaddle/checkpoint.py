"""Checkpoints of paddle's models and optimizers. For the user's program: it runs where paddle is imported."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

from elastic_adapter.adapters.paddlepaddle import accumulators
from elastic_adapter.adapters.paddlepaddle.names import (
    MASTERS,
    SCALE,
    SCHEDULE,
    called_anew,
    check_some_known,
    name_of,
    of_others,
    owners,
    parameters_of,
    strangers,
)
from elastic_adapter.core.checkpoint import checkpointer, paddlestate, single
from elastic_adapter.core.checkpoint.files import Expected, Skeleton, copy_memory, memory
from elastic_adapter.core.checkpoint.framework import Group
from elastic_adapter.core.checkpoint.paddlefile import TensorRef, read_paddle
from elastic_adapter.core.checkpoint.trees import join, leaves
from elastic_adapter.core.errors import UserError, in_one_line

log = logging.getLogger(__name__)

# Of a generator of random numbers: how many there are in its state, and about how many digits that may have.
_KEYS = 312
_LONGEST_STATE = 10_000


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
        self._ndarray: Any = import_module("numpy").ndarray
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
        return [memory(_address(piece), paddlestate.nbytes_of(piece)) for piece in local], local

    def model_state(self, model: Any) -> Any:
        return self._unwrapped(model).state_dict()

    def targets(self, model: Any) -> dict[str, Any] | None:
        """Its parameters and buffers, which paddle gives as they are; None where a hook gives something else.

        Nor is a layer passed over that has a way of its own to load a state.
        """
        layer = self._unwrapped(model)
        if not _loads_plainly(layer):
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
        self._check_model(layer, state)
        for name, each in here.items():
            if hasattr(state[name], "shape") and tuple(state[name].shape) != tuple(each.shape):
                shapes = f"{list(state[name].shape)} there, {list(each.shape)} here"
                raise UserError(f"the model does not take this state: {name} has the shape {shapes}")
        try:
            layer.set_state_dict({name: self._as(here[name], value) for name, value in state.items()})
        except (AssertionError, ValueError, TypeError, RuntimeError) as error:
            raise UserError(f"the model does not take this state: {in_one_line(error)}") from error

    def set_rest(self, model: Any, state: Mapping[str, Any]) -> None:
        layer = self._unwrapped(model)
        self._check_model(layer, state)
        layer.set_state_dict({**layer.state_dict(), **state})

    def set_optimizer(self, optimizer: Any, state: Any, renamed: Mapping[str, str]) -> None:
        """Paddle knows the tensors of a state by the names of parameters, which depend on what was made before them."""
        if not isinstance(state, Mapping):
            kind = type(state).__name__
            raise UserError(f"the optimizer does not take this state: it is no dict, but a value of the type {kind}")
        if others := [key for key in state if not isinstance(key, str)]:
            raise UserError(f"the optimizer does not take this state: {others[0]!r} is no name of a parameter's tensor")
        _check_masters(state)
        named, masters = called_anew(optimizer, state, renamed)
        self._check_optimizer(optimizer, named)
        if not renamed:
            check_some_known(optimizer, named)
        # What is kept for master weights is called after them, by paddle as well.
        for each in named.get(MASTERS, {}).values():
            if name := masters.get(name_of(each)):
                each.name = name
        if lost := of_others(optimizer, named, masters.values()):
            words = f"it is of another kind of optimizer: {type(optimizer).__name__} has no use for {', '.join(lost)}"
            raise UserError(f"the optimizer does not take this state: {words}")
        if lost := strangers(optimizer, named):
            log.warning("the optimizer has no parameter of %s: what was kept for it is not restored", ", ".join(lost))
        self._restore_optimizer(optimizer, named)

    def _restore_optimizer(self, optimizer: Any, named: Mapping[str, Any]) -> None:
        try:
            accumulators.restore(self._paddle, optimizer, named)
        except UserError as error:
            raise UserError(f"the optimizer does not take this state: {error}") from None
        except (AssertionError, ValueError, RuntimeError) as error:
            raise UserError(f"the optimizer does not take this state: {in_one_line(error)}") from error
        except (KeyError, TypeError, AttributeError) as error:
            words = f"it is of another form ({type(error).__name__}: {in_one_line(error)})"
            raise UserError(f"the optimizer does not take this state: {words}") from error

    def check(self, thing: Any, state: Any) -> None:
        """A model of averages is loaded like any other."""
        layer = self._unwrapped(thing)
        if isinstance(layer, self._paddle.nn.Layer) and isinstance(state, Mapping):
            self._check_model(layer, state)
        elif isinstance(thing, self._paddle.optimizer.Optimizer) and isinstance(state, Mapping):
            self._check_optimizer(thing, state)

    def renamed(self, path: str, models: Mapping[str, Any]) -> dict[str, str]:
        found = {name: ref.name for name, ref in leaves(path, read_paddle(path).state, TensorRef) if ref.name}
        here = {
            f"{begin}{name}": called
            for begin, model in models.items()
            for name, each in self._unwrapped(model).state_dict().items()
            if (called := name_of(each))
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
        if not isinstance(state, Mapping) or "cpu" not in state:
            raise ValueError("what was saved for paddle is no state of its generators")
        if "device" in state and self._paddle.get_device().startswith("cpu"):
            raise ValueError("they were saved on a GPU, and there is none here")
        cpu = _states(self._paddle.get_rng_state("cpu"), state["cpu"])
        device = _states(self._paddle.get_rng_state(), state["device"]) if "device" in state else None
        self._paddle.set_rng_state(cpu, "cpu")
        if device is not None:
            self._paddle.set_rng_state(device)

    def _as(self, tensor: Any, value: Any) -> Any:
        """A value in the type of the tensor that takes it: paddle itself does not convert."""
        if not self._is_tensor(value) or not isinstance(tensor, self._paddle.Tensor):
            return value
        found = value if isinstance(value, self._paddle.Tensor) else self._paddle.to_tensor(value)
        return paddlestate.converted(found, paddlestate.dtype_of(tensor))

    def _check_model(self, layer: Any, state: Mapping[str, Any]) -> None:
        """Where the model has a tensor, the state has one: of a dict paddle makes a vocabulary, which may abort it."""
        here = layer.state_dict()
        if _loads_plainly(layer):
            # What hooks make of a tensor is not what is filled.
            here = {**here, **layer.state_dict(use_hook=False)}
        for name, each in here.items():
            if name in state and hasattr(each, "shape") and not self._is_tensor(state[name]):
                kind = type(state[name]).__name__
                raise UserError(f"the model does not take this state: {name} is no tensor, but of the type {kind}")

    def _check_optimizer(self, optimizer: Any, state: Mapping[str, Any]) -> None:
        """Where the optimizer has a tensor, or will have one with its next step, the state has one.

        That step makes a vocabulary of a dict as well, and takes a master weight for as large as its parameter.
        """
        _check_masters(state)
        parameters = parameters_of(optimizer)
        for name, value in self._no_tensors(state, optimizer.state_dict(), parameters):
            kind = type(value).__name__
            raise UserError(f"the optimizer does not take this state: {name} is no tensor, but of the type {kind}")
        for name, value in state.get(MASTERS, {}).items():
            if name in parameters and list(value.shape) != list(parameters[name].shape):
                shapes = f"{list(value.shape)} there, {list(parameters[name].shape)} here"
                words = f"{join(MASTERS, name)} has the shape {shapes}"
                raise UserError(f"the optimizer does not take this state: {words}")

    def _no_tensors(
        self, state: Mapping[Any, Any], here: Mapping[Any, Any], parameters: Collection[str], where: str = ""
    ) -> Iterator[tuple[str, Any]]:
        """What is no tensor where one belongs, by its name. A schedule is made of plain values, and so are scales."""
        for key, value in state.items():
            name, own = join(where, key), here.get(key)
            if key == SCHEDULE or self._is_tensor(value):
                continue
            is_accumulator = isinstance(key, str) and any(owners(key, parameters)) and not key.endswith(SCALE)
            if where == MASTERS or is_accumulator or isinstance(own, self._paddle.Tensor):
                yield name, value
            elif isinstance(value, Mapping) and (isinstance(own, Mapping) or name == MASTERS):
                yield from self._no_tensors(value, own if isinstance(own, Mapping) else {}, parameters, name)

    def _is_tensor(self, value: Any) -> bool:
        return isinstance(value, self._paddle.Tensor | self._ndarray)

    def _unwrapped(self, model: Any) -> Any:
        while isinstance(model, self._paddle.DataParallel):
            model = model._layers  # noqa: SLF001
        return model


NotSaved = checkpointer.NotSaved


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


def _check_masters(state: Mapping[str, Any]) -> None:
    if not isinstance(masters := state.get(MASTERS, {}), Mapping):
        kind = type(masters).__name__
        raise UserError(f"the optimizer does not take this state: {MASTERS} is no dict, but of the type {kind}")


def _loads_plainly(layer: Any) -> bool:
    """Whether it has no way of its own to load a state."""
    return str(getattr(layer.set_state_dict, "__module__", "")).startswith("paddle.nn.")


def _plain(states: Sequence[Any]) -> list[list[Any]]:
    """What a generator's state is made of: three numbers, and a text as a list of bytes."""
    return [[*numbers, bytes(text).decode("latin1")] for *numbers, text in (each.__getstate__() for each in states)]


def _states(here: Sequence[Any], plain: Any) -> list[Any]:
    """States of generators such as these, of what was made of some. Raises ValueError where that is something else."""
    if not isinstance(plain, list | tuple) or len(plain) != len(here):
        raise ValueError(f"what was saved for paddle is not of {len(here)} generators")
    return [_generator_state(*each) for each in zip(here, plain, strict=True)]


def _generator_state(here: Any, plain: Any) -> Any:
    match plain:
        case [int() as device, int() as seed, int() as offset, str() as text]:
            fine = device == here.__getstate__()[0] and 0 <= seed < 1 << 64 and 0 <= offset < 1 << 64
            if fine and _is_twister(text):
                kind: Any = type(here)
                state = kind.__new__(kind)
                state.__setstate__((device, seed, offset, list(text.encode("latin1"))))
                return state
    raise ValueError("what was saved for paddle is no state of its generators")


def _is_twister(text: str) -> bool:
    """Whether this is how a Mersenne Twister of 64 bits is written down: its numbers, and how many have been used.

    Paddle does not look at the last one, and reads whatever is there in memory.
    """
    *keys, at = text.split(" ") if len(text) < _LONGEST_STATE else [""]
    numbers = [int(each) for each in (*keys, at) if each.isascii() and each.isdecimal()]
    return len(numbers) == len(keys) + 1 == _KEYS + 1 and max(numbers) < 1 << 64 and numbers[-1] <= _KEYS


def _local(piece: Any) -> Any:
    """In the memory of this process: a tensor, or an array of numpy."""
    return piece if hasattr(piece, "ctypes") or piece.place.is_cpu_place() else piece.cpu()


def _address(piece: Any) -> int:
    return int(piece.ctypes.data if hasattr(piece, "ctypes") else piece.data_ptr())
