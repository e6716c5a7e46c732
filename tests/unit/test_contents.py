"""How the files of a checkpoint lie in a buffer, and whose states go into which."""

from __future__ import annotations

import random
from collections import OrderedDict
from enum import IntEnum

import numpy as np
import pytest

from elastic_adapter.core.checkpoint.contents import (
    Training,
    lay_out,
    own_epoch,
    random_states,
    sampler_facts,
    set_random_states,
    several,
    states,
)
from elastic_adapter.core.checkpoint.files import Hole, Skeleton
from elastic_adapter.core.checkpoint.sampler import ElasticSampler
from elastic_adapter.core.errors import UserError


class Bytes:
    """A framework whose states are dicts of bytes: each value is a piece."""

    name = "torch"
    model_file, optimizer_file, extra_file = "model", "optimizer", "extra"

    def rank_file(self, rank):
        return f"rank-{rank}"

    def skeleton(self, state):
        text = repr(sorted(state)).encode()
        return Skeleton(text, tuple(Hole(len(text), len(value)) for value in state.values())), list(state.values())

    def copy(self, pieces, into):
        for piece, view in zip(pieces, into, strict=True):
            view[:] = piece

    def model_state(self, model):
        return model.state_dict()

    def rng(self):
        return {"seed": 5}

    def set_rng(self, state):
        self.restored = state


class Thing:
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state


def test_layout():
    """Each skeleton and each piece has its place, aligned; what is copied there is what the order names."""
    files = {"a": {"x": b"12345", "y": b""}, "b": {"z": bytes(range(100))}}
    layout = lay_out(Bytes(), files)
    data = memoryview(bytearray(b"-" * layout.nbytes))
    layout.copy(Bytes(), data)
    taken = set()
    for order, state in zip(layout.files, files.values(), strict=True):
        for place in (order.skeleton, *order.payloads):
            assert place.at % 64 == 0
            assert place.at + place.nbytes <= layout.nbytes
            assert not taken & set(range(place.at, place.at + place.nbytes))
            taken |= set(range(place.at, place.at + place.nbytes))
        skeleton = Skeleton.unpack(data[order.skeleton.at : order.skeleton.at + order.skeleton.nbytes])
        assert [hole.nbytes for hole in skeleton.holes] == [len(value) for value in state.values()]
        found = [bytes(data[place.at : place.at + place.nbytes]) for place in order.payloads]
        assert found == list(state.values())


def test_states():
    """Rank 0 writes what all have in common, each rank its own; what is not there is no file."""
    one, two = Thing({"w": b"1"}), Thing({"w": b"2"})
    training = Training(model={"one": one, "two": two}, optimizer=one, extra={"a": 1, "b": two}, rng=False)
    assert states(Bytes(), training, 0) == {
        "model": {"one": {"w": b"1"}, "two": {"w": b"2"}},
        "optimizer": {"w": b"1"},
        "extra": {"extra": {"a": 1, "b": {"w": b"2"}}},
        "rank-0": {"rng": None},
    }
    assert states(Bytes(), training, 3) == {"rank-3": {"rng": None}}
    lean = Training(model=one, optimizer=one, scheduler=two, save_optimizer=False, rng=False)
    assert list(states(Bytes(), lean, 0)) == ["model", "extra", "rank-0"]
    assert states(Bytes(), lean, 0)["extra"] == {"scheduler": {"w": b"2"}}


@pytest.mark.parametrize(
    ("thing", "expected"), [(None, {}), (5, {"": 5}), ({"a": 1, "b": 2}, {"a/": 1, "b/": 2}), ({}, {})]
)
def test_several(thing, expected):
    """One, or each of a dict, by what the names of its tensors begin with."""
    assert several(thing) == expected


@pytest.mark.parametrize(
    "state",
    [
        ElasticSampler(8, 2).state_dict(),
        {"seen": [1, 2.5, "x", None, True], "inner": {"a": {}}},
        [5],
        7,
        OrderedDict(a=IntEnum("Kind", "one").one),
    ],
)
def test_a_sampler_s_state(state):
    """What JSON gives back as it was is kept."""
    assert sampler_facts(state) == state


def test_tuples_of_a_sampler():
    """They come back as lists, as everybody knows who has written JSON before."""
    assert sampler_facts({"seen": (1, (2, [3]))}) == {"seen": [1, [2, [3]]]}


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"position": 3, "seen": {5: 1}}, "the keys of dicts are no text at 'seen'"),
        ({1: 2, "a": 3}, "the keys of dicts are no text at 1"),
        ([{True: 2}], "the keys of dicts are no text$"),
        ({"a": float("nan")}, "Out of range float values"),
        ({"a": {1, 2}}, "Object of type set is not JSON serializable"),
        ({"a": b"x"}, "Object of type bytes is not JSON serializable"),
        ({(1, 2): 3}, "keys must be str"),
    ],
)
def test_a_sampler_s_state_that_would_come_back_as_something_else(state, words):
    """It is refused, with its name."""
    with pytest.raises(UserError, match=f"^the state of the sampler has to be plain JSON: .*{words}"):
        sampler_facts(state)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"epoch": 3, "own_epoch": True, "sampler": {"epoch": 3}}, 3),
        ({"epoch": 3, "own_epoch": False, "sampler": {"epoch": 3}}, None),
        ({"epoch": 3, "own_epoch": False}, 3),
        ({"epoch": 0, "own_epoch": False}, None),
        ({"epoch": 0, "own_epoch": True}, 0),
        # Of older versions.
        ({"epoch": 3, "sampler": {"epoch": 3}}, None),
        ({"epoch": 3, "sampler": {"epoch": 2}}, 3),
        ({"epoch": 3, "sampler": [5]}, 3),
        ({"epoch": 3}, 3),
        ({"epoch": 0}, None),
    ],
)
def test_whose_epoch_it_was(facts, expected):
    """A sampler's goes on with it, if it is restored; the user's own stays until it is set again."""
    assert own_epoch(facts, ElasticSampler(8, 2)) == expected
    assert own_epoch(facts, None) == facts["epoch"]


def doctored(place, value):
    """What random_states gives, with another value at this place."""
    found = random_states(Bytes())
    *path, last = place
    inner = found
    for each in path:
        inner = inner[each]
    inner[last] = value
    return found


@pytest.mark.parametrize(
    "found",
    [
        None,
        [1],
        {"torch": {"seed": 5}},
        doctored(["python"], None),
        doctored(["python", 0], 2),
        doctored(["python", 1], [1] * 624),
        doctored(["python", 1, 624], 625),
        doctored(["python", 1, 0], 1 << 32),
        doctored(["python", 1, 0], "1"),
        doctored(["python", 2], "1"),
        doctored(["numpy"], ["MT19937"]),
        doctored(["numpy", 0], "PCG64"),
        doctored(["numpy", 1], [1] * 623),
        doctored(["numpy", 1, 0], -1),
        doctored(["numpy", 1, 0], 0.5),
        # Numpy would take these two, and read what lies beyond its keys.
        doctored(["numpy", 2], (1 << 31) - 1),
        doctored(["numpy", 2], -5 * 10**8),
        doctored(["numpy", 3], 2),
        doctored(["numpy", 3], 0.0),
        doctored(["numpy", 4], 0),
    ],
)
def test_random_states_that_are_none(found):
    """None of the generators is changed then."""
    framework, before = Bytes(), random_states(Bytes())
    with pytest.raises(ValueError, match=r"they are not those of Python and torch|what was saved for .* is no state"):
        set_random_states(framework, found)
    assert random_states(framework) == before
    assert not hasattr(framework, "restored")


def test_a_generator_of_another_kind():
    """The user has changed numpy's own: it is not to be set by halves."""
    framework, kept = Bytes(), random_states(Bytes())
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        with pytest.raises(ValueError, match="numpy's generator is of another kind now"):
            set_random_states(framework, kept)
    finally:
        np.random.set_bit_generator(before)
    assert not hasattr(framework, "restored")


def test_random_numbers():
    """Go on where they were, Python's own as well."""
    framework = Bytes()
    kept = random_states(framework)
    numbers = [random.random() for _ in range(3)]
    set_random_states(framework, kept)
    assert [random.random() for _ in range(3)] == numbers
    assert framework.restored == {"seed": 5}
