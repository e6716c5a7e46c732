"""What a checkpoint is made of: the user's things, their states, and how these lie in a buffer."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_adapter.core.checkpoint.framework import Framework
from elastic_adapter.core.checkpoint.order import FileOrder, Stretch
from elastic_adapter.core.errors import UserError

# Bytes are copied faster to where they are aligned.
_ALIGNMENT = 64
# The generator of random numbers that Python and numpy have in common, and what its state is made of.
_TWISTER = "MT19937"
_KEYS = 624


@dataclass(frozen=True, slots=True)
class Training:
    """What the user trains, and trains with. Models and optimizers may be dicts of several."""

    model: Any = None
    optimizer: Any = None
    scheduler: Any = None
    sampler: Any = None
    extra: Any = None
    # Whether to keep and restore the states of random generators.
    rng: bool = True
    save_optimizer: bool = True


def several(thing: Any) -> dict[str, Any]:
    """By what the names of its tensors begin with in a file: one thing, under nothing, or each of a dict of them."""
    if thing is None:
        return {}
    return {f"{name}/": each for name, each in thing.items()} if isinstance(thing, Mapping) else {"": thing}


def states(framework: Framework, training: Training, rank: int) -> dict[str, Any]:
    """The files that this rank writes: rank 0 what all have in common, each its own."""
    found: dict[str, Any] = {}
    if rank == 0:
        if training.model is not None:
            found[framework.model_file] = _all(training.model, framework.model_state)
        if training.optimizer is not None and training.save_optimizer:
            found[framework.optimizer_file] = _all(training.optimizer, lambda each: each.state_dict())
        others = {"scheduler": training.scheduler, "extra": training.extra}
        if kept := {name: _all(each, _state) for name, each in others.items() if each is not None}:
            found[framework.extra_file] = kept
    found[framework.rank_file(rank)] = {"rng": random_states(framework) if training.rng else None}
    return found


def _all(thing: Any, state: Any) -> Any:
    return {name: state(each) for name, each in thing.items()} if isinstance(thing, Mapping) else state(thing)


def _state(thing: Any) -> Any:
    return thing.state_dict() if hasattr(thing, "state_dict") else thing


def sampler_facts(state: Any) -> Any:
    """A sampler's state as the manifest gives it back. Raises UserError where that is something else.

    That tuples come back as lists is no matter. That the keys of a dict come back as text is.
    """
    try:
        found = json.loads(json.dumps(state, allow_nan=False))
        listed = _listed(state)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"the state of the sampler has to be plain JSON: {error}") from None
    if found != listed:
        wrong = [name for name in listed if found.get(name) != listed[name]] if isinstance(listed, dict) else []
        where = f" at {', '.join(map(repr, wrong[:3]))}" if wrong else ""
        raise UserError(f"the state of the sampler has to be plain JSON: the keys of dicts are no text{where}")
    return found


def _listed(value: Any) -> Any:
    """With lists in the place of tuples."""
    if isinstance(value, dict):
        return {name: _listed(each) for name, each in value.items()}
    return [_listed(each) for each in value] if isinstance(value, list | tuple) else value


def own_epoch(facts: Mapping[str, Any], sampler: Any) -> int | None:
    """The epoch that a checkpoint restores; None: it was the sampler's, which is restored and says it itself."""
    epoch, kept = int(facts["epoch"]), facts.get("sampler")
    if not (hasattr(sampler, "epoch") and hasattr(sampler, "load_state_dict")):
        return epoch
    if kept is None:
        # There was no sampler then that could say more than this, and nobody has to count from 0.
        return epoch if epoch or facts.get("own_epoch") else None
    # Older checkpoints do not say whose it was.
    theirs = kept.get("epoch") if isinstance(kept, Mapping) else None
    return epoch if facts.get("own_epoch", epoch != theirs) else None


def random_states(framework: Framework) -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    found = {"python": [version, list(numbers), gauss], framework.name: framework.rng()}
    if (numpy := sys.modules.get("numpy")) is not None:
        legacy = numpy.random.get_state()
        # Of its own kinds, only the first one has this form.
        if isinstance(legacy, tuple):
            kind, keys, *rest = legacy
            found["numpy"] = [kind, keys.tolist(), *rest]
    return found


def set_random_states(framework: Framework, found: Any) -> None:
    """Raises ValueError where they are no states of these generators: then none of them is changed."""
    if not isinstance(found, Mapping) or not {"python", framework.name} <= found.keys():
        raise ValueError(f"they are not those of Python and {framework.name}")
    numpy = sys.modules.get("numpy") if "numpy" in found else None
    python, legacy = _python_state(found["python"]), _numpy_state(numpy, found["numpy"]) if numpy is not None else None
    framework.set_rng(found[framework.name])
    random.setstate(python)
    if numpy is not None:
        numpy.random.set_state(legacy)


def _python_state(found: Any) -> tuple[Any, ...]:
    match found:
        case [int() as version, [*keys, at] as numbers, None | float() as gauss]:
            if version == random.Random.VERSION and _is_twister(keys, at):
                return version, tuple(numbers), gauss
    raise ValueError("what was saved for Python is no state of its generator")


def _numpy_state(numpy: Any, found: Any) -> tuple[Any, ...]:
    """Numpy itself does not look at the position, and reads whatever is there in memory."""
    if numpy.random.get_state(legacy=False)["bit_generator"] != _TWISTER:
        raise ValueError("numpy's generator is of another kind now")
    match found:
        case [str() as kind, [*keys], at, int() as has_gauss, float() as gauss]:
            if kind == _TWISTER and _is_twister(keys, at) and 0 <= has_gauss <= 1:
                return kind, numpy.array(keys, dtype=numpy.uint32), at, has_gauss, gauss
    raise ValueError("what was saved for numpy is no state of its generator")


def _is_twister(keys: list[Any], at: object) -> bool:
    """Whether this is the state of a Mersenne Twister: its keys, and how many of them have been used."""
    fine = len(keys) == _KEYS and all(type(key) is int and 0 <= key < 1 << 32 for key in keys)
    return fine and type(at) is int and 0 <= at <= _KEYS


@dataclass(frozen=True, slots=True)
class Layout:
    """Files as they are to lie in a buffer's data."""

    files: tuple[FileOrder, ...]
    nbytes: int
    # Packed skeletons, and the framework's pieces, each with its place.
    texts: tuple[tuple[Stretch, bytes], ...]
    pieces: Sequence[Any]
    places: tuple[Stretch, ...]

    def copy(self, framework: Framework, into: memoryview) -> None:
        for place, text in self.texts:
            into[place.at : place.at + place.nbytes] = text
        framework.copy(self.pieces, [into[place.at : place.at + place.nbytes] for place in self.places])


def lay_out(framework: Framework, files: Mapping[str, Any]) -> Layout:
    """Where each byte of these files is to be. Nothing is copied yet."""
    at = 0

    def next_place(nbytes: int) -> Stretch:
        nonlocal at
        place = Stretch(at, nbytes)
        at += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return place

    orders: list[FileOrder] = []
    texts: list[tuple[Stretch, bytes]] = []
    pieces: list[Any] = []
    places: list[Stretch] = []
    for name, state in files.items():
        skeleton, found = framework.skeleton(state)
        packed = skeleton.pack()
        texts.append((next_place(len(packed)), packed))
        payloads = tuple(next_place(hole.nbytes) for hole in skeleton.holes)
        orders.append(FileOrder(name, framework.name, texts[-1][0], payloads))
        pieces.extend(found)
        places.extend(payloads)
    return Layout(tuple(orders), at, tuple(texts), pieces, tuple(places))


def check_things(model: Any, optimizer: Any, scheduler: Any) -> None:
    """What is passed can be asked for its state. Raises UserError."""
    for name, thing in (("model", model), ("optimizer", optimizer), ("scheduler", scheduler)):
        if isinstance(thing, Mapping):
            _check_names(name, thing)
        for each in thing.values() if isinstance(thing, Mapping) else (thing,):
            if isinstance(each, type):
                raise UserError(f"{name} is the class {each.__name__}: pass an object of it")
            if each is not None and not hasattr(each, "state_dict"):
                raise UserError(f"{name} has no state_dict(), and is of the type {type(each).__name__}")


def _check_names(name: str, things: Mapping[Any, Any]) -> None:
    """Of several: files name what belongs to each."""
    if not all(isinstance(each, str) and each for each in things):
        raise UserError(f"each {name} needs a name, as in {name}={{'a': ..., 'b': ...}}, got {list(things)}")
    if without := [each for each, thing in things.items() if thing is None]:
        raise UserError(f"{name} {without[0]!r} is None: leave it out")
