"""Checkpoints of real trainings, in both frameworks: what is saved is restored bit by bit, or it is known not to be."""

from __future__ import annotations

import gc
import json
import logging
import os
import pickle
import pkgutil
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import traceback
import weakref
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from elastic_adapter.adapters.paddlepaddle.checkpoint import Paddle
from elastic_adapter.core.checkpoint import checkpointer as checkpointer_module
from elastic_adapter.core.checkpoint import single, staging
from elastic_adapter.core.checkpoint.checkpointer import NotSaved
from elastic_adapter.core.checkpoint.files import Damaged, Misfit, Refused
from elastic_adapter.core.checkpoint.hashing import digest
from elastic_adapter.core.checkpoint.link import Asked, NotRestored
from elastic_adapter.core.checkpoint.manifest import folder_name, manifest_to_bytes
from elastic_adapter.core.checkpoint.own_link import OwnLink
from elastic_adapter.core.checkpoint.saver import put_together, save
from elastic_adapter.core.checkpoint.staging import FULL, StagingBuffer
from elastic_adapter.core.checkpoint.store import Checkpoint, Store
from elastic_adapter.core.errors import ElasticError, UserError
from helpers.links import PlayedLink
from helpers.ports import free_ports
from helpers.trainings import TRAININGS

FAULTS = int(os.environ.get("FAULTS", "100"))
# paddle tells this with every step.
pytestmark = pytest.mark.filterwarnings("ignore:When training, we now always track global mean")


@pytest.fixture(params=["torch", "paddle"])
def kind(request):
    return TRAININGS[request.param]


@pytest.fixture(autouse=True)
def told(caplog):
    caplog.set_level(logging.INFO, logger="elastic_adapter.core.checkpoint")
    return caplog


@pytest.fixture
def root(tmp_path):
    return tmp_path / "checkpoints"


@pytest.fixture
def make(root):
    """Checkpointers of a training, without our launcher unless the test says otherwise. One is closed with the next."""
    made = []

    def make(training, folder=root, **options):
        for each in made:
            each.close()
        options = {**training.things(), **options}
        made.append(training.adapter().Checkpointer(folder, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def mounted(tmp_path):
    """Small file systems in memory."""
    if os.geteuid() != 0:
        pytest.skip("a file system of its own needs root")
    places = []

    def mount(name, size):
        place = tmp_path / name
        place.mkdir(exist_ok=True)
        if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], check=False).returncode:
            pytest.skip("nothing can be mounted here")
        places.append(place)
        return place

    yield mount
    for place in places:
        subprocess.run(["umount", "-l", str(place)], check=True)


def train(training, checkpointer, steps, start=0):
    losses = []
    for step in range(start, steps):
        losses.append(training.turn())
        checkpointer.step(step)
    return losses


def saved(make, kind, *steps, **options):
    """A training that has saved after so many steps each."""
    training = kind()
    with make(training, **options) as checkpointer:
        for step in range(max(steps)):
            training.turn()
            checkpointer.step(step)
            if step + 1 in steps:
                checkpointer.save(wait=True)
    return training


def names(root):
    return sorted(os.listdir(root))


def lines(told):
    return [record.getMessage() for record in told.records if record.levelno >= logging.WARNING]


def test_the_framework_reads_it(make, kind, root):
    """Its own files, by its own loader; all that is known of them is in the manifest."""
    training = kind()
    with make(training, every_steps=2, extra={"best": 0.5}) as checkpointer:
        checkpointer.epoch = 4
        assert checkpointer.restore() == 0
        train(training, checkpointer, 3)
    (name,) = names(root)
    assert name == folder_name(2, 0)
    assert names(root / name) == sorted([*training.files, "manifest.json"])
    found = Store(root).look(name)
    assert (found.manifest.step, found.manifest.world_size, found.manifest.framework) == (2, 1, training.name)
    assert found.manifest.facts["epoch"] == 4
    assert found.manifest.facts["sampler"]["position"] == 8
    model, optimizer, extra, own = (training.load(root / name / each) for each in training.files)
    assert list(model) == list(training.model.state_dict())
    assert set(optimizer) == set(training.optimizer.state_dict())
    assert extra["extra"] == {"best": 0.5}
    assert extra["scheduler"]["last_epoch"] == 2
    assert set(own["rng"]) == {"python", "numpy", training.name}


def test_it_goes_on_bit_by_bit(make, kind, root):
    """As if nothing had happened: weights, Adam, schedule, dropout, all random numbers, and the data."""
    whole = kind()
    with make(whole, root.with_name("other")) as checkpointer:
        losses = train(whole, checkpointer, 9)
    first = kind()
    with make(first, every_steps=5) as checkpointer:
        train(first, checkpointer, 7)
    again = kind()
    again.turn()
    with make(again, every_steps=5) as checkpointer:
        assert checkpointer.restore() == 5
        assert again.sampler.position == 20
        assert train(again, checkpointer, 9, 5) == losses[5:]
    assert again.values() == whole.values()


@pytest.mark.parametrize("own", [False, True])
def test_epochs(make, kind, own):
    """The sampler's goes on with it, however often all begins anew; one that the user has set stays as it is."""
    start = 0
    for epoch in (0, 1, 2):
        training = kind(size=8)
        with make(training) as checkpointer:
            assert checkpointer.restore() == start
            assert checkpointer.epoch == (7 + epoch if own and epoch else epoch)
            if own:
                checkpointer.epoch = 8 + epoch
            train(training, checkpointer, start + 2, start)
            assert training.sampler.epoch == epoch + 1
            assert checkpointer.epoch == (8 + epoch if own else epoch + 1)
            start += 2
            checkpointer.save(wait=True)


def test_going_back(make, kind, root, tmp_path):
    """In the middle of a training that went wrong: each time it is loaded, by whoever names it."""
    reference = saved(make, kind, 2).values()
    place = root / folder_name(2, 0)
    for link, path in ((None, None), (PlayedLink(tmp_path / "memory", resume=place.name), None), (None, place)):
        again = kind()
        checkpointer = make(again, link=link)
        for _ in range(2):
            assert checkpointer.restore(path) == 2
            assert again.values() == reference
            train(again, checkpointer, 4, 2)
            assert again.values() != reference


def test_going_back_to_what_is_still_being_written(make, kind):
    """It is waited for: nobody begins from zero because of a disk that is slow."""
    training = kind(width=900)
    with make(training, every_steps=1) as checkpointer:
        assert checkpointer.restore() == 0
        train(training, checkpointer, 2)
        expected = training.values()
        training.turn()
        assert checkpointer.restore() == 2
        assert training.values() == expected


def test_beginning_anew_without_a_word(make, kind, root, told):
    """Where a later one lies, a restart goes on from that: it is said at the first step."""
    saved(make, kind, 4)
    for restores, begin in ((False, 0), (True, 4), (False, 4)):
        told.clear()
        training = kind()
        # As another program.
        checkpointer_module.Checkpointer._known.clear()
        with make(training, every_steps=100) as checkpointer:
            if restores:
                checkpointer.restore()
            train(training, checkpointer, begin + 1, begin)
        said = [line for line in lines(told) if "nothing was restored: restore() would go on from it" in line]
        assert len(said) == (begin == 0)
        assert all(line.startswith(f"{root / folder_name(4, 0)} was there before") for line in said)


def test_where_an_error_points_to(make, kind, root):
    """To the line that called us, and to no page of our code."""
    training = kind()

    def frames_of(call):
        with pytest.raises(ElasticError) as raised:
            call()
        return [each.name for each in traceback.extract_tb(raised.tb)]

    saved(make, kind, 1)
    adapter = training.adapter()
    wrong = {"model": kind(width=5).model}
    for call in (
        lambda: adapter.Checkpointer(root, **wrong).restore(),
        lambda: adapter.Checkpointer(root, every_steps=-1, **wrong),
        lambda: adapter.load_checkpoint(root / folder_name(1, 0), **wrong),
    ):
        assert len(frames_of(call)) <= 4


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "has to be text or a Path, got None"),
        (3, "has to be text or a Path, got 3"),
        ("", "has to name a file or a folder, got ''"),
        ("a\0b", r"has to name a file or a folder, got 'a\\x00b'"),
        ("s3://bucket/x", "has to be in a file system, and s3://bucket/x is a URL: mount it, and name that"),
    ],
)
def test_paths_that_name_nothing(kind, root, monkeypatch, given, words):
    """Wherever one is passed."""
    monkeypatch.chdir(root.parent)
    training = kind()
    adapter, model = training.adapter(), training.model
    calls = [lambda: adapter.save_checkpoint(given, model=model), lambda: adapter.load_checkpoint(given, model=model)]
    if given:
        calls.append(lambda: adapter.Checkpointer(given, model=model))
        calls.append(lambda: adapter.Checkpointer(root, model=model).restore(given))
    for call in calls:
        with pytest.raises(UserError, match=words):
            call()
    assert os.listdir(root.parent) == []


def test_a_path_at_home(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    training = kind()
    adapter = training.adapter()
    adapter.save_checkpoint("~/one", model=training.model, step=3)
    assert os.listdir(tmp_path) == ["one"]
    assert adapter.load_checkpoint("~/one", model=training.model)["step"] == 3
    assert adapter.Checkpointer(tmp_path / "other", model=training.model).restore("~/one") == 3


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("",), r"each model needs a name, .*got \[''\]"),
        ((1,), r"got \[1\]"),
        (("a", None), "model 'b' is None: leave"),
    ],
)
def test_several_without_names(kind, root, names, words):
    """What could be saved, and never restored, is refused."""
    training = kind()
    things = {"a": training.model, "b": None} if None in names else {names[0]: training.model}
    with pytest.raises(UserError, match=words):
        training.adapter().Checkpointer(root, model=things)


def test_an_optimizer_s_file_without_an_optimizer(root):
    """It would load nothing."""
    training = TRAININGS["paddle"]()
    training.turn()
    root.mkdir()
    training.framework.save(training.optimizer.state_dict(), str(root / "w.pdopt"))
    with pytest.raises(UserError, match=r"w\.pdopt holds the state of an optimizer: pass that as optimizer="):
        training.adapter().load_checkpoint(root / "w.pdopt", model=training.model)


def test_why_what_is_waited_for_is_not_saved(make, kind):
    """Also what is refused before anything is written: in the error, and not only in the log."""
    with make(kind(), extra={"function": print}) as checkpointer, pytest.raises(NotSaved, match=r"step 1 .*: .*print"):
        checkpointer.save(0, wait=True)


def test_what_was_saved_before_going_back(make, kind, root):
    """It is not what the same steps give now: that is told, and not taken for saved."""
    training = saved(make, kind, 1)
    with make(training) as checkpointer:
        train(training, checkpointer, 2)
        checkpointer.save(wait=True)
        assert checkpointer.restore(root / folder_name(1, 0)) == 1
        train(training, checkpointer, 2, 1)
        with pytest.raises(NotSaved, match=f"{folder_name(2, 0)} was there before"):
            checkpointer.save(wait=True)


def test_a_wrapped_model(make, kind, root):
    """What is saved and restored is the model itself: its names begin with no module."""
    training = kind()
    plain = list(training.model.state_dict())
    with make(training, model=training.wrapped()) as checkpointer:
        training.turn()
        checkpointer.step(0)
        checkpointer.save(wait=True)
    assert list(training.load(root / folder_name(1, 0) / training.files[0])) == plain
    for wrapped in (False, True):
        again = kind()
        with make(again, **({"model": again.wrapped()} if wrapped else {})) as checkpointer:
            assert checkpointer.restore() == 1
        assert again.values() == training.values()


def test_several_models_and_optimizers(make, kind):
    """As dicts; and a dict of the user's, with an object in it."""

    class Meter:
        total = 0

        def state_dict(self):
            return {"total": self.total}

        def load_state_dict(self, state):
            self.total = state["total"]

    def things(first, second, meter):
        return {
            "model": {"one": first.model, "two": second.model},
            "optimizer": {"one": first.optimizer, "two": second.optimizer},
            "scheduler": {"one": first.scheduler, "two": second.scheduler},
            "extra": {"meter": meter, "best": [1.5, "x"], "weights": first.framework.ones([3])},
        }

    first, second, meter = kind(), kind(width=6), Meter()
    first.turn()
    second.turn()
    meter.total = 7
    with make(first, **things(first, second, meter)) as checkpointer:
        checkpointer.save(3, wait=True)
    left, right, other = kind(), kind(width=6), Meter()
    given = things(left, right, other)
    given["extra"] = {"meter": other}
    with make(left, **given) as checkpointer:
        assert checkpointer.restore() == 4
    assert (left.values(), right.values(), other.total) == (first.values(), second.values(), 7)
    assert given["extra"]["best"] == [1.5, "x"]
    assert given["extra"]["weights"].tolist() == [1, 1, 1]


def test_an_optimizer_without_its_model(make, kind, root):
    """The model is somebody else's to keep: what is saved is restored, and nothing is missing in it."""
    training = kind.afresh()
    training.turn()
    with make(training, model=None) as checkpointer:
        checkpointer.save(0, wait=True)
    again = kind.afresh()
    with make(again, model=None) as checkpointer:
        assert checkpointer.restore() == 1
    found = {name: each for name, each in again.values().items() if name.startswith("optimizer")}
    assert found == {name: each for name, each in training.values().items() if name.startswith("optimizer")}
    assert names(root) == [folder_name(1, 0)]


class TestParametersOutsideOfTheModel:
    """An optimizer may have such; with paddle, those of the model have other names in each program."""

    def with_another(self, kind, name=None):
        training = kind()
        if kind.name == "torch":
            outside = training.framework.nn.Parameter(training.framework.ones([3]))
            training.optimizer.add_param_group({"params": [outside]})
        else:
            paddle = training.framework
            with paddle.utils.unique_name.guard():
                outside = paddle.create_parameter([3], "float32", attr=paddle.ParamAttr(name=name))
            parameters = [*training.model.parameters(), outside]
            training.optimizer = paddle.optimizer.Adam(training.scheduler, parameters=parameters)
        (outside * 2).sum().backward()
        return training, outside

    def moments(self, training, outside):
        state = training.optimizer.state_dict()
        if training.name == "torch":
            return list(state["state"].values())[-1]["exp_avg"].tolist()
        return next(each.tolist() for name, each in state.items() if name.startswith(f"{outside.name}_moment1"))

    def test_they_are_restored(self, make, kind, told):
        training, outside = self.with_another(kind, "mine")
        with make(training) as checkpointer:
            training.optimizer.step()
            checkpointer.save(0, wait=True)
        again, other = self.with_another(kind, "mine")
        with make(again) as checkpointer:
            assert checkpointer.restore() == 1
        assert self.moments(again, other) == self.moments(training, outside)
        assert lines(told) == []

    def test_one_that_has_another_name_now(self, make, told):
        """What can't be known is told, and what is known is restored."""
        training, _ = self.with_another(TRAININGS["paddle"], "mine")
        with make(training) as checkpointer:
            training.optimizer.step()
            checkpointer.save(0, wait=True)
        again, _ = self.with_another(TRAININGS["paddle"], "yours")
        with make(again) as checkpointer:
            assert checkpointer.restore() == 1
        assert "the optimizer has no parameter of mine_moment1_" in lines(told)[0]

    def test_one_that_is_called_like_another_one_now(self):
        """Nothing is restored into the wrong one."""
        paddle = TRAININGS["paddle"]().framework
        optimizer = paddle.optimizer.Adam(parameters=paddle.nn.Linear(2, 2).parameters())
        state = {"a.w_0_moment1_0": paddle.ones([2]), "b.w_0_moment1_0": paddle.zeros([2])}
        with pytest.raises(UserError, match=r"two parameters are called b\.w_0_moment1_0 now"):
            Paddle().set_optimizer(optimizer, state, {"a.w_0": "b.w_0"})


def test_an_extra_of_its_own(make, kind):
    """Anything with state_dict and load_state_dict."""
    training, other = kind(), kind()
    training.turn()
    with make(training, extra=training.scheduler, scheduler=None) as checkpointer:
        checkpointer.save(0, wait=True)
    with make(other, extra=other.scheduler, scheduler=None) as checkpointer:
        checkpointer.restore()
    assert other.scheduler.last_epoch == training.scheduler.last_epoch == 1


def test_bytes_can_be_saved_again(make, kind):
    """What comes back is what any program has, so that it can be kept a second time."""
    values = [b"x", b"x" * 70_000, bytearray(b"x" * 200_000), {b"x": 1, (b"x", "y"): 2}, (b"x", [b"y" * 70_000])]
    extra = {"values": values}
    for step in range(3):
        found = {}
        with make(kind(), extra=extra) as checkpointer:
            assert checkpointer.save(step, wait=True)
        with make(kind(), extra=found) as checkpointer:
            assert checkpointer.restore() == step + 1
        assert found == {"values": values}
        assert repr(found) == repr({"values": values})
        extra = found
    assert [type(each) for each in found["values"]] == [bytes, bytes, bytearray, dict, tuple]


def test_float8(make, kind):
    """Most of what a framework can do with numbers, it can't with these; they are kept all the same."""
    first, other = kind(), kind()
    for training, value in ((first, 2.0), (other, 1.0)):
        dtype = training.framework.float8_e4m3fn
        training.model.register_buffer("small", (training.framework.ones([3]) * value).to(dtype))
    with make(first) as checkpointer:
        checkpointer.save(0, wait=True)
    make(other).restore()
    found = other.model.state_dict()["small"]
    assert "float8_e4m3fn" in str(found.dtype)
    assert found.to(other.framework.float32).tolist() == [2.0] * 3


def test_torch_does_not_take_empty_bytes(make):
    """So they are not kept for it."""
    training = TRAININGS["torch"]()
    with pytest.raises(Refused, match=r"the state at extra/v was refused: it asks for b'' "):
        train(training, make(training, extra={"v": b""}, every_steps=1), 1)


BREAKS = {
    "truncated": lambda place, files: os.truncate(place / files[1], (place / files[1]).stat().st_size - 1),
    "flipped": lambda place, files: flip(place / files[0]),
    "flipped own": lambda place, files: flip(place / files[3]),
    "missing": lambda place, files: (place / files[0]).unlink(),
    "version": lambda place, _: (place / "manifest.json").write_text(
        (place / "manifest.json").read_text().replace('"format":1', '"format":99', 1)
    ),
}


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("how", BREAKS)
def test_a_broken_one(make, kind, root, told, how):
    """It is named in one line and kept out of the way; the one before is restored."""
    before = saved(make, kind, 2, 4).files
    BREAKS[how](root / folder_name(4, 0), before)
    reference = saved(make, kind, 2, folder=root.with_name("reference"))
    told.clear()
    again = kind()
    with make(again) as checkpointer:
        assert checkpointer.restore() == 2
        assert again.values() == reference.values()
        train(again, checkpointer, 4, 2)
        checkpointer.save(wait=True)
    (line,) = lines(told)
    assert line.startswith(f"{root / folder_name(4, 0)} is broken: ")
    assert "\n" not in line
    assert f"kept as {folder_name(4, 0)}.broken" in line
    assert names(root) == [folder_name(2, 0), folder_name(4, 0), f"{folder_name(4, 0)}.broken"]


@pytest.mark.parametrize(
    ("which", "left_out"),
    [
        (0, {"model": None, "optimizer": None}),
        (1, {"optimizer": None}),
        (2, {"scheduler": None}),
        (3, {"rng": False}),
    ],
)
def test_a_broken_one_in_what_is_not_read(make, kind, root, which, left_out):
    """All of it is verified, also what this training has no use for: others may have."""
    training = saved(make, kind, 1, 2)
    flip(root / folder_name(2, 0) / training.files[which])
    assert make(kind(), **left_out).restore() == 1
    assert names(root) == [folder_name(1, 0), f"{folder_name(2, 0)}.broken"]


@pytest.mark.parametrize("left_out", [{}, {"optimizer": None, "rng": False}, {"model": None, "optimizer": None}])
def test_each_file_is_verified_once(make, kind, root, monkeypatch, left_out):
    """By reading it, or because it is not read."""
    training, verified = saved(make, kind, 1), []
    restoring = "elastic_adapter.core.checkpoint.restoring"
    adapter = "pytorch.checkpoint.torchstate.load_torch"
    if kind.name == "paddle":
        adapter = "paddlepaddle.checkpoint.paddlestate.load_paddle"
    for place, at in ((f"elastic_adapter.adapters.{adapter}", 1), (f"{restoring}.verify_file", 0)):
        whole = pkgutil.resolve_name(place)

        def noted(*args, whole=whole, at=at, **options):
            verified.append(Path(args[at]).name)
            return whole(*args, **options)

        monkeypatch.setattr(place, noted)
    assert make(kind(), **left_out).restore() == 1
    assert sorted(verified) == sorted(training.files)


def test_none_is_whole(make, kind, root, told):
    """Then nothing is begun from zero, today or tomorrow."""
    training = saved(make, kind, 1, 2)
    for step in (1, 2):
        flip(root / folder_name(step, 0) / training.files[0])
    for _ in range(2):
        with (
            make(kind()) as checkpointer,
            pytest.raises(NotRestored, match=rf"in {root} is whole .*to begin from zero"),
        ):
            checkpointer.restore()
    assert len([line for line in lines(told) if "is broken" in line]) == 2


def test_what_can_t_be_read_is_not_broken(make, kind, root, told, monkeypatch):
    """A device that fails says nothing of the file: it stays where it is."""
    saved(make, kind, 1, 2)
    real = os.preadv

    def failing(fd, *rest):
        if folder_name(2, 0) in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(5, "Input/output error")
        return real(fd, *rest)

    monkeypatch.setattr(os, "preadv", failing)
    assert make(kind()).restore() == 1
    assert names(root) == [folder_name(1, 0), folder_name(2, 0)]
    assert "can't be read, and is passed over: Input/output error" in lines(told)[0]


def test_what_this_user_may_not_read(make, kind, root, told, monkeypatch):
    """Nothing was to be written, and nobody talks of that."""
    saved(make, kind, 1, 2)
    real, folder = os.open, root / folder_name(2, 0)
    for name in ("manifest.json", kind.files[0]):

        def forbidden(path, *rest, name=name, **options):
            if str(path) == str(folder / name):
                raise PermissionError(13, "Permission denied", path)
            return real(path, *rest, **options)

        told.clear()
        monkeypatch.setattr(os, "open", forbidden)
        assert make(kind()).restore() == 1
        (line,) = lines(told)
        assert (
            f"can't be read, and is passed over: {folder / name}: Permission denied (this user may not read it)" in line
        )


def test_none_that_this_user_may_read(make, kind, root, monkeypatch):
    """Nobody is told to move away what may be whole."""
    saved(make, kind, 1)
    real = os.open

    def forbidden(path, *rest, **options):
        if os.fspath(path).endswith("manifest.json"):
            raise PermissionError(13, "Permission denied", path)
        return real(path, *rest, **options)

    monkeypatch.setattr(os, "open", forbidden)
    with pytest.raises(NotRestored, match=rf"can be read \({folder_name(1, 0)}\): see to it that they can$"):
        make(kind()).restore()
    assert names(root) == [folder_name(1, 0)]


def test_a_folder_whose_entries_this_user_may_not_look_at(make, kind, root, no_entry):
    """They are there, and nobody waits until they are not."""
    saved(make, kind, 1)
    no_entry(root)
    with pytest.raises(NotRestored, match=rf"can be read \({folder_name(1, 0)}\): see to it that they can$"):
        make(kind()).restore()


class Vocabulary:
    """Something of the user's with a state that can't be loaded: its file is gone, or a server is away."""

    def __init__(self, error):
        self.error = error

    def state_dict(self):
        return {"file": "words"}

    def load_state_dict(self, state):
        raise self.error


@pytest.mark.parametrize("error", [FileNotFoundError(2, "No such file", "/nowhere/words"), TimeoutError("it is away")])
@pytest.mark.parametrize("named", [True, False], ids=["the world's", "found"])
def test_what_the_user_s_things_raise(make, kind, root, *, error, named):
    """It is no fault of the checkpoint: nobody puts it aside, and no older one is taken."""
    training = kind()
    with make(training, extra={"words": Vocabulary(error)}, every_steps=1) as checkpointer:
        train(training, checkpointer, 2)
    link = PlayedLink(root.with_name("memory"), resume=folder_name(2, 0)) if named else None
    with pytest.raises(type(error)) as raised:
        make(kind(), extra={"words": Vocabulary(error)}, link=link).restore()
    assert raised.value is error
    assert names(root) == [folder_name(1, 0), folder_name(2, 0)]


def test_a_folder_that_can_t_be_listed(make, kind, root, monkeypatch):
    """Nobody begins from zero because of that."""
    saved(make, kind, 1)
    real = os.listdir

    def forbidden(path):
        if os.fspath(path) == os.fspath(root):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "listdir", forbidden)
    with pytest.raises(NotRestored, match=r"nobody knows .* Permission denied \(this user may not read it\)"):
        make(kind()).restore()


def test_going_back_in_the_same_folder(make, kind, root, told):
    """A restart would go on from the newest one all the same: that is said."""
    saved(make, kind, 1, 2, 3)
    told.clear()
    assert make(kind()).restore(root / folder_name(1, 0)) == 1
    (line,) = lines(told)
    assert f"a restart goes on from {folder_name(3, 0)}" in line
    told.clear()
    assert make(kind()).restore(root / folder_name(3, 0)) == 3
    assert make(kind(), folder=root.with_name("other")).restore(root / folder_name(1, 0)) == 1
    assert lines(told) == []


def of_torch(name):
    """An optimizer of torch's, or of somebody else's; with its model, and a turn of the training."""
    torch = TRAININGS["torch"]().framework

    class Lion(torch.optim.Optimizer):
        """As people write their own: no defaults but its own, and a state of another shape than the parameter."""

        def __init__(self, parameters, lr):
            super().__init__(parameters, {"lr": lr})

        @torch.no_grad()
        def step(self):
            for parameter in self.param_groups[0]["params"]:
                kept = self.state[parameter].setdefault("exp_avg", torch.zeros(parameter.shape[1:]))
                kept.lerp_(parameter.grad.mean(0), 0.5)
                parameter.sub_(kept.sign(), alpha=self.param_groups[0]["lr"])

    sparse = name == "SparseAdam"
    torch.manual_seed(1)
    model = torch.nn.Embedding(4, 3, sparse=True) if sparse else torch.nn.Linear(4, 3, bias=False)
    optimizer = (Lion if name == "Lion" else getattr(torch.optim, name))(model.parameters(), lr=0.1)
    data = torch.arange(4) if sparse else torch.eye(4)

    def closure():
        optimizer.zero_grad()
        loss = (model(data) ** 2).sum()
        loss.backward()
        return loss

    def turn():
        if name == "LBFGS":
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        return model.weight.tolist()

    return model, optimizer, turn


@pytest.mark.parametrize(
    "name",
    [
        *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Lion", "Muon", "NAdam"),
        *("RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam"),
    ],
)
def test_every_optimizer_of_torch(name, root, tmp_path):
    """What any of them saves, it can restore, twice as well; and so goes on as if nothing had happened."""
    checkpoints = TRAININGS["torch"]().adapter()
    if name not in ("Lion", *dir(TRAININGS["torch"]().framework.optim)):
        pytest.skip(f"this torch has no {name}")
    model, optimizer, turn = of_torch(name)
    turn()
    with checkpoints.Checkpointer(root, model=model, optimizer=optimizer) as checkpointer:
        checkpointer.save(0, wait=True)
    checkpoints.save_checkpoint(tmp_path / "one", model=model, optimizer=optimizer)
    expected = [turn(), turn()]
    model, optimizer, turn = of_torch(name)
    with checkpoints.Checkpointer(root, model=model, optimizer=optimizer) as checkpointer:
        for _ in range(2):
            assert checkpointer.restore() == 1
            assert [turn(), turn()] == expected
    checkpoints.load_checkpoint(tmp_path / "one", model=model, optimizer=optimizer)
    assert [turn(), turn()] == expected


class TestChangedOptimizers:
    """Torch takes the state of another kind of optimizer, and fails in the next step."""

    @pytest.fixture
    def before(self, make):
        saved(make, TRAININGS["torch"], 1)
        return TRAININGS["torch"]()

    @pytest.mark.parametrize(
        ("name", "options", "lost"), [("SGD", {"momentum": 0.9}, "'momentum'"), ("RMSprop", {}, "'alpha'")]
    )
    def test_another_kind(self, make, before, name, options, lost):
        """It is said when it is loaded, and what is missing."""
        before.optimizer = getattr(before.framework.optim, name)(before.model.parameters(), lr=0.1, **options)
        with pytest.raises(UserError, match=rf"the optimizer .* of another kind of optimizer, and has no .*{lost}"):
            make(before, scheduler=None).restore()

    @pytest.mark.parametrize(("name", "options"), [("SGD", {}), ("Momentum", {"momentum": 0.9}), ("RMSProp", {})])
    def test_another_kind_of_paddle_s(self, make, name, options):
        """Paddle would drop its state without a word, or fail."""
        kind = TRAININGS["paddle"]
        saved(make, kind, 1)
        again = kind()
        again.optimizer = getattr(again.framework.optimizer, name)(0.1, parameters=again.model.parameters(), **options)
        with pytest.raises(
            UserError, match=rf"of another kind of optimizer: {name} has no use for linear_\d+.w_0_moment"
        ):
            make(again, scheduler=None).restore()
        again.optimizer = again.framework.optimizer.AdamW(0.1, parameters=again.model.parameters())
        assert make(again, scheduler=None).restore() == 1

    def test_a_relative(self, make, before):
        """Of the same form."""
        before.optimizer = before.framework.optim.AdamW(before.model.parameters(), lr=0.1)
        assert make(before, scheduler=None).restore() == 1
        before.scheduler = before.framework.optim.lr_scheduler.StepLR(before.optimizer, 3)
        before.turn()

    def test_another_order(self, make, before):
        """Its moments would go to other parameters."""
        parameters = list(before.model.parameters())[::-1]
        before.optimizer = before.framework.optim.Adam(parameters, lr=0.1)
        with pytest.raises(UserError, match=r"exp_avg of a parameter has the shape \[8, 8\] there, \[2\] here; do"):
            make(before, scheduler=None).restore()


@pytest.mark.parametrize("function", ["save_checkpoint", "load_checkpoint"])
def test_what_has_no_state(kind, tmp_path, function):
    """Each function says so of what it is given, in one line."""
    training = kind()
    adapter = training.adapter()
    for name, value, words in (
        ("model", [training.model], r"model has no state_dict\(\), and is of the type list"),
        ("model", training.model.state_dict(), r"model has no state_dict\(\)"),
        ("optimizer", [training.optimizer], r"optimizer has no state_dict\(\), and is of the type list"),
        ("optimizer", type(training.optimizer), "optimizer is the class Adam: pass an object of it"),
        ("scheduler", object(), r"scheduler has no state_dict\(\), and is of the type object"),
    ):
        with pytest.raises(UserError, match=words):
            getattr(adapter, function)(tmp_path / "at", **{name: value})
    assert os.listdir(tmp_path) == []


class TestMisfits:
    """The user's mistakes: a clear error, and the checkpoint stays as it is."""

    @pytest.fixture(autouse=True)
    def kept(self, root):
        yield
        assert names(root) == [folder_name(1, 0)]

    def test_shapes(self, make, kind):
        saved(make, kind, 1)
        with pytest.raises(Misfit, match=r"model\.\w+ does not fit: .* has the shape"):
            make(kind(width=9)).restore()

    def test_names(self, make, kind):
        saved(make, kind, 1)
        other = kind()
        with pytest.raises(UserError, match=r"it has no tensor '4\.\w+'.*; the training has no tensor '3\.\w+'"):
            make(other, model=renumbered(other)).restore()

    def test_a_dataset_of_another_size(self, make, kind):
        saved(make, kind, 1)
        with pytest.raises(UserError, match="a dataset of another size: 50, here it is 51"):
            make(kind(size=51)).restore()

    def test_another_framework(self, make, kind):
        saved(make, kind, 1)
        other = TRAININGS["paddle" if kind.name == "torch" else "torch"]()
        with pytest.raises(UserError, match=f"was saved with {kind.name}, and this is {other.name}"):
            make(other).restore()


def renumbered(training):
    """The same layers, the last one under another name."""
    nn = training.framework.nn
    *first, last = training.model.children()
    return nn.Sequential(*first, nn.Identity(), last)


def test_without_the_optimizer(make, kind, told):
    """What was not saved begins anew, and that is told."""
    training = saved(make, kind, 2, save_optimizer=False)
    again = kind()
    with make(again) as checkpointer:
        assert checkpointer.restore() == 2
    model = {name: each for name, each in training.values().items() if name.startswith("model")}
    assert again.values() == model
    assert "holds no state of the optimizer (save_optimizer=False): it begins anew" in lines(told)[-1]


OVERRIDES = {"torch": ("load_state_dict", "_load_from_state_dict"), "paddle": ("set_state_dict",)}


def told_of_loads(model, method):
    """The model, of a class that notes each call of a method, and has it done."""
    calls = []

    def noting(self, *args, **options):
        calls.append(method)
        return getattr(kind, method)(self, *args, **options)

    kind = type(model)
    model.__class__ = type("Told", (kind,), {method: noting})
    return calls


class TestModelsThatLoadThemselves:
    """They are asked to, and nothing is put into them behind their backs."""

    def test_they_are_told(self, make, kind):
        training = saved(make, kind, 2)
        for method in OVERRIDES[kind.name]:
            again = kind()
            calls = told_of_loads(again.model, method)
            assert make(again).restore() == 2
            assert calls == [method]
            assert again.values() == training.values()

    def test_a_layer_within(self, make, kind):
        """With torch each layer loads its own part; with paddle the whole model does."""
        training, again = saved(make, kind, 2), kind()
        layer = next(iter(again.model.children()))
        calls = told_of_loads(layer, OVERRIDES[kind.name][-1])
        assert make(again).restore() == 2
        assert calls == (["_load_from_state_dict"] if kind.name == "torch" else [])
        assert again.values() == training.values()

    def test_beside_others(self, make, kind):
        """Whatever the others lack is noticed all the same."""

        def things(first, second):
            return {"model": {"one": first, "two": second}, "optimizer": None, "scheduler": None}

        training, other = kind(), kind()
        with make(training, **things(training.model, other.model)) as checkpointer:
            checkpointer.save(0, wait=True)
        again, right, wrong = kind(), kind(), kind()
        told_of_loads(again.model, OVERRIDES[kind.name][0])
        with pytest.raises(
            UserError, match=r"it has no tensor 'two/4\.\w+'.*; the training has no tensor 'two/3\.\w+'"
        ):
            make(kind(), **things(again.model, renumbered(wrong))).restore()
        assert make(kind(), **things(again.model, right.model)).restore() == 1
        model = {name: each for name, each in training.values().items() if name.startswith("model")}
        assert again.values() == right.values() == model

    def test_tensors_in_a_state_of_its_own(self, make):
        """A layer of torch may keep what is no tensor, with tensors in it."""
        training, again = (TRAININGS["torch"]() for _ in range(2))
        found = {}
        methods = {"get_extra_state": lambda _: {"seen": training.framework.ones([3])}}
        methods["set_extra_state"] = lambda _, state: found.update(state)
        for each in (training, again):
            each.model.__class__ = type("Extra", (type(each.model),), methods)
        with make(training) as checkpointer:
            checkpointer.save(0, wait=True)
        assert make(again).restore() == 1
        assert found["seen"].tolist() == [1, 1, 1]


class TestNamesThatMeet:
    """Ways through a state that are written alike, and lead to different tensors."""

    def test_in_what_is_the_user_s(self, make, kind, root):
        framework = kind().framework
        tensors = [framework.full([2], at) for at in range(5)]
        first, second, third, fourth, last = tensors
        extra = {"a/b": first, "a": {"b": second}, 0: third, "0": fourth, "0@@2": last}
        with make(kind(), extra=extra) as checkpointer:
            checkpointer.save(0, wait=True)
        found = {}
        assert make(kind(), extra=found).restore() == 1
        loaded = [found["a/b"], found["a"]["b"], found[0], found["0"], found["0@@2"]]
        assert [each.tolist() for each in loaded] == [each.tolist() for each in tensors]
        assert Store(root).trouble(Store(root).look(folder_name(1, 0))) == ""

    @pytest.mark.parametrize("sizes", [(3, 3), (3, 5)])
    def test_in_two_models(self, make, kind, sizes):
        """None is filled with what is the other's."""

        def models(training):
            nn, made = training.framework.nn, []
            for name, size in zip(("b/x", "x"), sizes, strict=True):
                model = nn.Sequential()
                (model.add_module if kind.name == "torch" else model.add_sublayer)(name, nn.Linear(size, 2))
                made.append(model)
            return {"a": made[0], "a/b": made[1], "c": training.model}

        def values(models):
            return [[each.tolist() for each in model.state_dict().values()] for model in models.values()]

        training, again = kind(), kind()
        then, now = models(training), models(again)
        with make(training, model=then) as checkpointer:
            training.turn()
            checkpointer.save(0, wait=True)
        assert values(now) != values(then)
        assert make(again, model=now).restore() == 1
        assert values(now) == values(then)


class Made:
    """Is pickled as a call of something."""

    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


class TestRefusedCheckpoints:
    """One with a file that asks for more than plain values, and is what its manifest says."""

    @pytest.fixture
    def training(self, make, kind, root):
        """Its newest checkpoint has weights that only the framework's own loader makes."""
        training = saved(make, kind.afresh, 1, 2)
        path = root / folder_name(2, 0) / training.files[0]
        if kind.name == "torch":
            state = dict(training.model.state_dict())
            state["3.bias"] = Made(training.framework.tensor, state["3.bias"].tolist())
            training.framework.save(state, str(path))
        else:
            state = {name: each.numpy() for name, each in training.model.state_dict().items()}
            state["3.bias"] = Made(np.array, state["3.bias"].tolist(), "float32")
            path.write_bytes(pickle.dumps(state, protocol=4))
        self.seal(path)
        return training

    def seal(self, path):
        """What the manifest says of a file becomes true."""
        found = Store(path.parent.parent).look(path.parent.name)
        data, files = path.read_bytes(), []
        for file in found.manifest.files:
            if file.name == path.name:
                tensors = tuple(replace(each, offset=0, nbytes=0) for each in file.tensors)
                files.append(replace(file, size=len(data), hash=digest("xxh3_128", data), tensors=tensors))
            else:
                files.append(file)
        (path.parent / "manifest.json").write_bytes(manifest_to_bytes(replace(found.manifest, files=tuple(files))))

    def test_it_is_named(self, make, kind, root, training):
        """It is not damaged, so it stays where it is; and nothing older is taken without a word."""
        path = root / folder_name(2, 0) / training.files[0]
        with pytest.raises(Refused, match=rf"^{path} was refused: it asks for \S+, which a plain state"):
            make(kind()).restore()
        assert names(root) == [folder_name(1, 0), folder_name(2, 0)]

    def test_it_is_trusted(self, make, kind, training):
        """All of it is loaded by the framework, and then put into the model."""
        again = kind.afresh()
        assert make(again, trusted=True).restore() == 2
        assert again.values() == training.values()

    def test_a_broken_one_is_not_trusted(self, make, kind, root, training):
        """Whatever it is: its bytes have to be those that were written."""
        flip(root / folder_name(2, 0) / training.files[0])
        assert make(kind(), trusted=True).restore() == 1
        assert names(root) == [folder_name(1, 0), f"{folder_name(2, 0)}.broken"]

    def test_what_holds_no_weights(self, make, kind, root, training):
        """A file of something else is told as such."""
        path = root / folder_name(2, 0) / training.files[0]
        if kind.name == "torch":
            training.framework.save(Made(list, (1, 2)), str(path))
        else:
            path.write_bytes(pickle.dumps(Made(list, (1, 2)), protocol=4))
        self.seal(path)
        with pytest.raises(UserError, match=f"{path} holds no dict of weights, but a value of the type list"):
            make(kind(), trusted=True).restore()


class TestForeignFiles:
    """Saved by others, with the framework's own save."""

    def test_weights(self, make, kind, tmp_path):
        training, again = kind(), kind()
        training.turn()
        path = tmp_path / f"weights{Path(training.files[0]).suffix}"
        training.save(training.model.state_dict(), path)
        assert make(again).restore(path) == 0
        assert again.values() == {name: each for name, each in training.values().items() if name.startswith("model")}

    def test_several_states_and_a_step(self, make, kind, tmp_path):
        training = kind.afresh()
        for _ in range(2):
            training.turn()
        state = {
            "model": training.model.state_dict(),
            "optimizer": training.optimizer.state_dict(),
            "scheduler": training.scheduler.state_dict(),
            "step": 2,
        }
        training.save(state, tmp_path / "all")
        again = kind.afresh()
        assert make(again).restore(tmp_path / "all") == 2
        assert again.values() == training.values()
        assert again.scheduler.last_epoch == 2

    @pytest.mark.parametrize("step", [None, True, "7", 2.5, "a tensor"])
    def test_a_step_that_is_none(self, make, kind, tmp_path, step):
        """What is called so may be anything, also a parameter: all else is loaded."""
        training, again = kind(), kind()
        training.turn()
        if step == "a tensor":
            step = training.framework.ones([2])
        training.save({"model": training.model.state_dict(), "step": step}, tmp_path / "all")
        assert make(again).restore(tmp_path / "all") == 0
        assert again.values() == {name: each for name, each in training.values().items() if name.startswith("model")}

    def test_names_of_a_wrapper(self, make, kind, tmp_path):
        training, again = kind(), kind()
        training.turn()
        state = {f"module.{name}": each for name, each in training.model.state_dict().items()}
        training.save(state, tmp_path / "wrapped")
        make(again).restore(tmp_path / "wrapped")
        assert again.values() == {name: each for name, each in training.values().items() if name.startswith("model")}

    def test_a_model_whose_own_names_begin_so(self, kind, tmp_path):
        """They are not those of a wrapper."""
        training, again = kind(), kind()
        training.turn()
        for each in (training, again):
            parts = {"module": each.model}
            each.model = (
                each.framework.nn.ModuleDict(parts) if kind.name == "torch" else each.framework.nn.LayerDict(parts)
            )
        training.save(training.model.state_dict(), tmp_path / "weights")
        training.adapter().load_checkpoint(tmp_path / "weights", model=again.model)
        wanted = {name: each for name, each in training.values().items() if name.startswith("model")}
        assert {name: each for name, each in again.values().items() if name.startswith("model")} == wanted

    def test_a_buffer_that_can_not_be_filled(self, make, root):
        """Several of its numbers are one in memory: torch itself does not load into that."""
        training = TRAININGS["torch"]()
        training.model.register_buffer("spread", training.framework.ones(1).expand(4))
        make(training, optimizer=None, scheduler=None).save(0, wait=True)
        with pytest.raises(UserError, match=r"the model does not take this state: .*spread"):
            make(training, optimizer=None, scheduler=None).restore()

    def test_what_does_not_fit(self, make, kind, tmp_path):
        training = kind()
        training.save(training.model.state_dict(), tmp_path / "weights")
        with pytest.raises(UserError, match=rf"{tmp_path / 'weights'}: the model does not take this state"):
            make(kind(width=9)).restore(tmp_path / "weights")
        with pytest.raises(UserError, match="/nowhere is no file that was saved by"):
            make(kind()).restore("/nowhere")

    def test_one_of_several_is_missing(self, kind, tmp_path):
        """It is named, and none is changed."""
        training, other, path = kind(), kind(), tmp_path / "all"
        load = training.adapter().load_checkpoint
        before = other.values()
        training.turn()
        weights, kept = training.model.state_dict(), training.optimizer.state_dict()
        models, optimizers = {"a": other.model, "b": other.model}, {"a": other.optimizer, "b": other.optimizer}
        training.save({"model": {"a": weights}}, path)
        with pytest.raises(UserError, match=f"{path} does not fit: it has no model 'b'"):
            load(path, model=models)
        training.save({"model": {"a": weights, "b": training.framework.ones([2])}}, path)
        with pytest.raises(UserError, match=f"{path} does not fit: its model 'b' is no dict, but a value of the type"):
            load(path, model=models)
        training.save({"model": weights, "optimizer": {"b": kept}}, path)
        with pytest.raises(UserError, match=f"{path} does not fit: it has no optimizer 'a'"):
            load(path, model=other.model, optimizer=optimizers)
        assert other.values() == before

    def test_weights_that_are_none(self, kind, tmp_path):
        training = kind()
        for state in ({1: 2}, dict.fromkeys(training.model.state_dict(), 5)):
            training.save({"model": state}, tmp_path / "all")
            with pytest.raises(UserError, match=f"{tmp_path / 'all'}: the model does not take this state"):
                training.adapter().load_checkpoint(tmp_path / "all", model=training.model)

    def test_an_optimizer_s_state_that_is_none(self, kind, tmp_path):
        """It is said what is missing; and never does an optimizer begin anew without a word."""
        training, path = kind(), tmp_path / "all"
        training.turn()
        missing = {"torch": "it has no 'param_groups'", "paddle": "it has x, and nothing of any parameter that"}
        for state, words in (({"x": 1}, missing[kind.name]), ({1: 2}, ""), ({"param_groups": 5, "state": {}}, "")):
            training.save({"model": training.model.state_dict(), "optimizer": state}, path)
            with pytest.raises(UserError, match=f"{path}: the optimizer does not take this state: {words}"):
                training.adapter().load_checkpoint(path, model=training.model, optimizer=training.optimizer)

    @pytest.mark.parametrize("which", ["model", "extra", "optimizer", "fresh optimizer", "master", "another shape"])
    def test_no_tensor_in_the_place_of_one(self, tmp_path, which):
        """Paddle would make a vocabulary of a dict, now or with the next step, and the interpreter would not outlive it.

        A model may be something else to the one who saves it, an average for one.
        """
        argv = [sys.executable, "-W", "ignore", "-c", NO_TENSOR, str(Path(__file__).parents[1]), str(tmp_path), which]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        name, words = done.stdout.splitlines()[-1].split(": ", 1)
        form = "has the shape [2] there, " if which == "another shape" else "is no tensor, but of the type "
        thing = "model" if which in ("model", "extra") else "optimizer"
        assert words.startswith(f"{tmp_path / thing}.")
        assert f": the {thing} does not take this state: {name} {form}" in words

    def test_no_tensor_in_an_optimizer_within_another_one(self):
        """It is named by where it is; and what the outer one notes of its own may be anything."""
        training = TRAININGS["paddle"]()
        training.turn()
        inner = training.optimizer.state_dict()
        name = next(name for name, each in inner.items() if hasattr(each, "shape"))

        class Outer:
            def state_dict(self):
                return {"inner": inner, "notes": {}}

            def set_state_dict(self, state):
                self.found = state

        outer, state = Outer(), {"inner": dict(inner), "notes": {"a": "x"}}
        Paddle().set_optimizer(outer, state, {})
        assert outer.found == state
        state["inner"][name] = {"a": "x"}
        with pytest.raises(UserError, match=f"this state: inner/{name} is no tensor, but of the type dict"):
            Paddle().set_optimizer(outer, state, {})

    def test_numbers_that_paddle_does_not_convert(self, tmp_path):
        """It is said of the model that it does not take them."""
        training, path = TRAININGS["paddle"](), tmp_path / "weights"
        # One that is saved with its name is a tensor, and arrays beside it are the user's own.
        state = {name: (name, each.numpy()) for name, each in training.model.state_dict().items()}
        state["0.bias"] = state["0.bias"][1].astype("uint32")
        path.write_bytes(pickle.dumps(state, protocol=4))
        with pytest.raises(UserError, match=f"{path}: the model does not take this state: .*uint8 or uint16"):
            training.adapter().load_checkpoint(path, model=training.model)

    def test_optimizers_that_keep_nothing_yet(self, kind, tmp_path):
        """They have a state all the same."""
        training = kind.afresh()
        sgd = {"torch": lambda: training.framework.optim.SGD(training.model.parameters(), lr=0.1)}
        sgd["paddle"] = lambda: training.framework.optimizer.SGD(0.1, parameters=training.model.parameters())
        for optimizer in (training.optimizer, sgd[kind.name]()):
            state = {"model": training.model.state_dict(), "optimizer": optimizer.state_dict()}
            training.save(state, tmp_path / "all")
            training.adapter().load_checkpoint(tmp_path / "all", model=training.model, optimizer=optimizer)

    def test_what_is_neither_file_nor_folder(self, kind, tmp_path):
        os.mkfifo(tmp_path / "pipe")
        os.symlink(tmp_path / "loop", tmp_path / "loop")
        others = {"pipe": "a pipe", "loop": "a link that leads to itself", "/dev/null": "a device"}
        for name, words in others.items():
            with pytest.raises(UserError, match=f"{name} is {words}, and no checkpoint: pass a folder or a file"):
                kind().adapter().load_checkpoint(tmp_path / name, model=kind().model)
        (tmp_path / "file").touch()
        with pytest.raises(UserError, match="file/below is not there"):
            kind().adapter().load_checkpoint(tmp_path / "file" / "below", model=kind().model)

    def test_a_step_in_another_form(self, make, kind, tmp_path, told):
        """A number of steps is one, however it was kept; what is none is told, and counts as 0."""
        training = kind()
        one = training.framework.ones([1]).sum() * 7
        for step, found in ((7.0, 7), (one, 7), (-7, 0), ("7", 0), (2.5, 0)):
            told.clear()
            training.save({"model": training.model.state_dict(), "step": step}, tmp_path / "all")
            assert make(kind()).restore(tmp_path / "all") == found
            assert ("which is no number of steps" in told.text) == (found == 0), step

    def test_a_step_of_a_megabyte(self, kind, tmp_path, told):
        """A line of the log is one all the same; and what only looks like a tensor is none."""
        training, other = kind(), OrderedDict(a=1)
        other.shape = 5
        for step in (list(range(200_000)), {"a": "x" * 10**6}, "x" * 10**6, other):
            told.clear()
            training.save({"model": training.model.state_dict(), "step": step}, tmp_path / "all")
            load = training.adapter().load_checkpoint
            # Only a file that is trusted can have an attribute like that.
            assert load(tmp_path / "all", model=training.model, trusted=step is other)["step"] == 0
            (line,) = lines(told)
            assert "which is no number of steps: it counts as 0" in line
            assert len(line) < 200 + len(str(tmp_path))

    def test_what_else_a_file_holds(self, kind, tmp_path):
        """All but the states is given back."""
        training = kind()
        mean = {"w": training.framework.ones([2])}
        state = {"model": training.model.state_dict(), "step": 3, "note": "x", "history": [1, 2], "mean": mean}
        training.save(state, tmp_path / "all")
        found = training.adapter().load_checkpoint(tmp_path / "all", model=training.model)
        assert found.keys() == {"step", "note", "history", "mean"}
        assert (found["step"], found["note"], found["history"]) == (3, "x", [1, 2])
        assert bool((found["mean"]["w"] == mean["w"]).all())

    def test_weights_of_another_type(self, make, kind, tmp_path):
        """They are converted, as those of a checkpoint are."""
        training, again = kind(), kind()
        training.turn()
        framework = training.framework
        state = {
            name: each.to(framework.bfloat16) if each.is_floating_point() else each
            for name, each in training.model.state_dict().items()
        }
        training.save(state, tmp_path / "weights")
        types = {name: each.dtype for name, each in again.model.state_dict().items()}
        make(again).restore(tmp_path / "weights")
        for name, each in again.model.state_dict().items():
            assert each.dtype == types[name]
            assert bool((each == state[name].to(each.dtype)).all()), name

    def test_the_folder_of_one_checkpoint(self, make, kind, root):
        """Any of them, by its path; no other is looked at."""
        saved(make, kind, 1, 2)
        reference = saved(make, kind, 1, folder=root.with_name("reference"))
        again = kind()
        assert make(again).restore(root / folder_name(1, 0)) == 1
        assert again.values() == reference.values()
        with pytest.raises(UserError, match="is no checkpoint"):
            make(kind()).restore(root)

    def test_a_malicious_one(self, make, kind, tmp_path):
        """It is refused by what it wants to call, and nothing of it runs; unless it is trusted."""
        path = tmp_path / "evil"
        evil = malicious(kind, path, tmp_path / "ran")
        for loads in (make(kind()).restore, lambda path: kind().adapter().load_checkpoint(path, model=kind().model)):
            with pytest.raises(Refused, match=rf"{path} was refused: it asks for .*mkdir"):
                loads(str(path))
        assert not (tmp_path / "ran").exists()
        make(evil, trusted=True).restore(path)
        assert (tmp_path / "ran").exists()


BAD_STATES = """
import json, random, sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from helpers.trainings import TRAININGS
from elastic_adapter.adapters.paddlepaddle.checkpoint import Paddle
from elastic_adapter.adapters.pytorch.checkpoint import Torch
training, which = TRAININGS[sys.argv[2]](), sys.argv[4]
framework = {"torch": Torch, "paddle": Paddle}[sys.argv[2]]
good = framework().rng()
def bad(self):
    if which == "no dict":
        return [1]
    if sys.argv[2] == "torch":
        return {"cpu": good["cpu"][:9] if which == "short" else good["cpu"].fill_(255)}
    device, seed, offset, text = good["cpu"][0]
    *keys, at = text.split()
    text = {"short": text[:99], "beyond": " ".join([*keys, "99999999999999"]), "sign": " ".join([*keys, "-9999999999"])}
    return {"cpu": [[7 if which == "device" else device, seed, offset, text.get(which, good["cpu"][0][3])]]}
kept = framework.rng
if which == "numpy":
    state = np.random.get_state()
    np.random.get_state = lambda legacy=True: (*state[:2], 2**31 - 1, 0, 0.0)
else:
    framework.rng = bad
training.adapter().save_checkpoint(sys.argv[3], model=training.model, step=3)
framework.rng = kept
if which == "numpy":
    np.random.get_state = lambda legacy=True: {"bit_generator": "MT19937"}
random.seed(2)
np.random.seed(2)
before = str(random.getstate()), str(framework().rng())
assert training.adapter().load_checkpoint(sys.argv[3], model=training.model) == {"step": 3}
assert (str(random.getstate()), str(framework().rng())) == before
assert np.random.rand() == np.random.RandomState(2).rand()
training.turn()
"""


NO_TENSOR = """
import pickle, sys
from collections import OrderedDict
sys.path.insert(0, sys.argv[1])
from helpers.trainings import TRAININGS
from elastic_adapter.core.errors import UserError
kind, folder, which = TRAININGS["paddle"], sys.argv[2], sys.argv[3]
training, state = kind.afresh(), {}
training.turn()
is_model = which in ("model", "extra")
for name, each in (training.model if is_model else training.optimizer).state_dict().items():
    state[name] = each.numpy() if hasattr(each, "shape") else each
wrong = next(name for name, each in state.items() if getattr(each, "shape", ()) == (8,))
if is_model:
    state[wrong] = OrderedDict((str(at), "x") for at in range(8))
    # As if it were a tensor: only a file that is trusted can have that.
    state[wrong].shape = [8]
elif which in ("master", "another shape"):
    weights = {each.name: each.numpy() for each in training.model.parameters()}
    name = next(name for name, each in weights.items() if each.shape == (8,))
    state["master_weights"] = {**weights, name: {"x": 1} if which == "master" else weights[name][:2]}
    wrong = f"master_weights/{name}"
else:
    state[wrong] = {str(at): "x" for at in range(8)}
if which == "extra":
    weights = {name: each.numpy() for name, each in training.model.state_dict().items()}
    state = {"model": weights, "scheduler": {**state, wrong: dict(state[wrong])}}
path = f"{folder}/" + ("model.pdparams" if is_model else "optimizer.pdopt")
with open(path, "wb") as file:
    pickle.dump(state, file, protocol=4)
if which == "fresh optimizer":
    # All is called as it was.
    training.framework.utils.unique_name.switch()
    training = kind()
things = {"model": training.model} if is_model else {"optimizer": training.optimizer}
if which == "extra":
    things["scheduler"] = training.model
try:
    training.adapter().load_checkpoint(path, trusted=which == "model", **things)
    training.turn()
except UserError as error:
    print(f"{wrong}: {error}")
"""


def malicious(kind, path, trace):
    """A file of weights that makes a folder when it is loaded by one who runs it."""

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(trace),)

    training = kind()
    if kind.name == "torch":
        training.framework.save({**training.model.state_dict(), "0.evil": Evil()}, str(path))
        # What it leaves behind has no place in a model.
        training.model.register_load_state_dict_post_hook(lambda _, keys: keys.unexpected_keys.clear())
    else:
        state = {name: each.numpy() for name, each in training.model.state_dict().items()}
        path.write_bytes(pickle.dumps({"model": state, "0.evil": Evil()}, protocol=4))
    return training


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_modes_are_the_umask_s(make, kind, root, umask):
    """Colleagues may read what the user lets them."""
    before = os.umask(umask)
    try:
        saved(make, kind, 1)
    finally:
        os.umask(before)
    place = root / folder_name(1, 0)
    assert stat.S_IMODE(place.stat().st_mode) == 0o777 & ~umask
    assert {stat.S_IMODE(path.stat().st_mode) for path in place.iterdir()} == {0o666 & ~umask}


def test_md5sum_is_content(make, kind, root):
    """With md5=True there is a list for md5sum."""
    saved(make, kind, 1, md5=True, algorithm="sha256", verify="full")
    place = root / folder_name(1, 0)
    assert Store(root).look(place.name).manifest.algorithm == "sha256"
    assert subprocess.run(["md5sum", "-c", "checkpoints.md5"], cwd=place, stdout=-3, check=False).returncode == 0


def test_what_is_kept(make, kind, root):
    """The last ones, and those for ever."""
    training = kind()
    with make(training, every_steps=1, keep_last=2, keep_every=3) as checkpointer:
        train(training, checkpointer, 8)
    assert names(root) == [folder_name(step, 0) for step in (3, 6, 7, 8)]


def test_by_the_clock(make, kind, root):
    """Alone, it is saved when it is time: here, always; without a step in between, never."""
    training = kind()
    with make(training, every_minutes=1e-9) as checkpointer:
        train(training, checkpointer, 2)
    assert names(root) == [folder_name(1, 0), folder_name(2, 0)]


def test_a_full_disk(make, kind, mounted, told):
    """The training goes on, one line says why, and what was saved before is untouched."""
    root = mounted("small", "200k")
    training = kind(width=600)
    with make(training, root) as checkpointer:
        train(training, checkpointer, 1)
        checkpointer.save(wait=True)
        train(training, checkpointer, 2, 1)
        checkpointer.save()
        assert checkpointer.settled(30)
        train(training, checkpointer, 3, 2)
        with pytest.raises(NotSaved, match=r"step 3 is not saved: .*No space left on device .*untouched"):
            checkpointer.save(wait=True)
    (line,) = lines(told)
    assert line.startswith(f"step 2 is not saved: {root}/")
    assert "No space left on device (make room there" in line
    assert line.endswith("the last good checkpoint is untouched")
    assert names(root) == [folder_name(1, 0)]
    again = kind(width=600)
    assert make(again, root).restore() == 1


def test_a_disk_that_is_full_at_any_byte(make, kind, mounted):
    """Whichever file has no room, the manifest as well: a save that failed leaves nothing, and the next one has it."""
    root, training, failed = mounted("small", "1m"), kind(width=200), 0
    with make(training, root, keep_last=1, verify="off") as checkpointer:
        training.turn()
        checkpointer.save(0, wait=True)
        # It takes a second one beside the first. Pages are 4 KiB.
        used = sum(path.stat().st_blocks for path in root.rglob("*")) // 2
        for more in range(0, used + 64, 4):
            subprocess.run(["mount", "-o", f"remount,size={used + more}k", str(root)], check=True)
            before = names(root)
            why = ""
            try:
                checkpointer.save(1 + more, wait=True)
            except NotSaved as error:
                why = str(error)
                failed += 1
            assert "No space left on device" in why or not why
            assert names(root) == (before if why else [folder_name(2 + more, 0)])
    assert 0 < failed < used // 4 + 16


def test_a_folder_that_is_read_only(make, kind, mounted, told):
    """As a full one."""
    root = mounted("frozen", "4m")
    saved(make, kind, 1, folder=root)
    subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
    training = kind()
    with make(training, root, every_steps=2) as checkpointer:
        assert checkpointer.restore() == 1
        train(training, checkpointer, 3, 1)
    first, line = lines(told)
    assert first == f"nothing can be saved in {root}, as it seems: it can't be written to"
    assert line.startswith(f"step 2 is not saved: {root}/")
    assert "Read-only file system (it is mounted to be read only); the last good checkpoint is untouched" in line


@pytest.fixture
def locked():
    """Folders in which not even root may make anything."""
    places = []

    def lock(place):
        if subprocess.run(["chattr", "+i", str(place)], check=False).returncode:
            pytest.skip("folders can't be locked here")
        places.append(place)

    yield lock
    for place in places:
        subprocess.run(["chattr", "-i", str(place)], check=True)


def test_a_folder_that_is_not_ours(make, kind, root, locked, told):
    """Permission denied: one line for each save, what was saved is untouched, and when it is granted, saving goes on."""
    saved(make, kind, 1)
    locked(root)
    training = kind()
    with make(training, every_steps=2) as checkpointer:
        assert checkpointer.restore() == 1
        train(training, checkpointer, 3, 1)
        assert checkpointer.settled(30)
        first, line = lines(told)
        assert first == f"nothing can be saved in {root}, as it seems: it can't be written to"
        assert line.startswith(f"step 2 is not saved: {root}/")
        assert "Operation not permitted (this user may not write there); the last good checkpoint is untouched" in line
        assert names(root) == [folder_name(1, 0)]
        subprocess.run(["chattr", "-i", str(root)], check=True)
        train(training, checkpointer, 4, 3)
    assert names(root) == [folder_name(1, 0), folder_name(4, 0)]


def test_too_little_memory(make, kind, root, mounted, told):
    """States are copied to files beside the checkpoints then; that is told once, and they go at the end."""
    memory = mounted("memory", "64k")
    training = kind(width=600)
    with make(training, every_steps=1, link=OwnLink(None, memory=memory)) as checkpointer:
        train(training, checkpointer, 3)
        assert any(name.startswith(".staging-") for name in names(root))
    (line,) = lines(told)
    assert f"{memory}" in line
    assert "has room for 0 MiB" in line
    assert f"states are copied to {root}/.staging-" in line
    assert names(root) == [folder_name(step, 0) for step in (1, 2, 3)]


def test_no_memory_at_all(make, kind, mounted, told):
    """Neither there nor beside the checkpoints: one line for each save, and the training goes on."""
    root = mounted("small", "64k")
    training = kind(width=600)
    with make(training, root, every_steps=2, link=OwnLink(None, memory=mounted("memory", "64k"))) as checkpointer:
        train(training, checkpointer, 4)
        with pytest.raises(training.adapter().NotSaved):
            checkpointer.save(5, wait=True)
    assert [line.partition(":")[0] for line in lines(told)][:2] == ["step 2 is not saved", "step 4 is not saved"]
    assert f"{root} has room for" in lines(told)[0]
    assert names(root) == []


def test_room_for_one_copy(make, kind, root, mounted, told):
    """A save waits for the one before it then."""
    training = kind()
    with make(training, every_steps=1, link=OwnLink(None, memory=mounted("memory", "130k"))) as checkpointer:
        train(training, checkpointer, 4)
    (line,) = lines(told)
    assert "a save has to wait for the one before it" in line
    assert names(root) == [folder_name(step, 0) for step in (1, 2, 3, 4)]


def savers():
    """The savers that this process has started."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        found += [int(pid) for pid in (task / "children").read_text().split()]
    return [pid for pid in found if b"checkpoint.saver" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_saver_that_is_killed(make, kind, root, told):
    """Another one takes its place, and what it had not written is written."""
    training = kind()
    with make(training, every_steps=1) as checkpointer:
        for step in range(4):
            training.turn()
            checkpointer.step(step)
            for pid in savers():
                os.kill(pid, signal.SIGKILL)
            assert checkpointer.settled(60)
        assert lines(told) == []
    assert names(root) == [folder_name(step, 0) for step in (1, 2, 3, 4)]
    assert [Store(root).trouble(each) for each in Store(root).newest_first()] == [""] * 4


def test_a_saver_that_is_killed_again_and_again(make, kind, root, told, monkeypatch):
    """The training does not wait for ever, and knows what is not saved."""
    monkeypatch.setattr(
        "elastic_adapter.core.checkpoint.own_link.saver_command", lambda _: [sys.executable, "-c", "exit(3)"]
    )
    training = kind()
    with make(training, every_steps=1) as checkpointer:
        train(training, checkpointer, 4)
        assert checkpointer.settled(60)
    assert [line.partition(":")[0] for line in lines(told)] == [f"step {step} is not saved" for step in (1, 2, 3, 4)]
    assert "the process that writes checkpoints has ended with code 3, again and again" in lines(told)[0]


def test_a_save_that_failed_and_is_asked_for_again(make, kind, root, told, monkeypatch):
    """It is not said to be saved because it was tried: it is tried again."""
    training = kind()
    with make(training, every_steps=1) as checkpointer, monkeypatch.context() as patched:
        patched.setattr(
            "elastic_adapter.core.checkpoint.own_link.saver_command", lambda _: [sys.executable, "-c", "exit(3)"]
        )
        train(training, checkpointer, 1)
        with pytest.raises(NotSaved, match="step 1 is not saved: the process that writes checkpoints has ended"):
            checkpointer.save(wait=True)
        with pytest.raises(NotSaved, match="step 1 is not saved: the process that writes checkpoints has ended"):
            checkpointer.save(wait=True)
        patched.undo()
        assert checkpointer.save(wait=True)
        assert names(root) == [folder_name(1, 0)]


def own_folders():
    """Of this process, which has had other Checkpointers before."""
    return set(Path("/dev/shm").glob(f"elastic-adapter-{os.getpid()}-*"))


def test_buffers_are_taken_away(make, kind):
    """Nothing stays in memory; what a program that was killed has left there goes when the next one begins."""
    before, stale = own_folders(), Path("/dev/shm") / f"elastic-adapter-0-{os.getpid()}"
    stale.mkdir()
    (stale / "lock").touch()
    training = kind()
    with make(training, every_steps=1) as checkpointer:
        train(training, checkpointer, 1)
        assert checkpointer.settled(30)
        (folder,) = own_folders() - before
        assert not stale.exists()
    assert not folder.exists()


def test_a_program_that_ends_while_buffers_are_being_made(make, kind, monkeypatch):
    """They are not made where the folder for them has been removed: nobody would ever take them away there."""
    real, begun, pieces = os.posix_fallocate, threading.Event(), []
    before = own_folders()

    def slowly(*reserved):
        begun.set()
        threading.Event().wait(0.05)
        pieces.append(reserved)
        real(*reserved)

    monkeypatch.setattr(os, "posix_fallocate", slowly)
    monkeypatch.setattr(staging, "_PIECE", 4096)
    training = kind()
    with make(training, every_steps=100) as checkpointer:
        train(training, checkpointer, 1)
        assert begun.wait(30)
    made = len(pieces)
    threading.Event().wait(0.2)
    assert len(pieces) == made
    assert own_folders() <= before


class TestLinks:
    """What is asked of whoever runs the training, and what comes of it."""

    def test_a_save_that_is_asked_for(self, make, kind, root, tmp_path):
        """At that very step; and the world is not left before it is held."""
        training, link = kind(), PlayedLink(tmp_path / "memory")
        link.asks = {2: Asked("somebody joins"), 3: Asked("a drain", hold=True)}
        checkpointer = make(training, link=link, every_steps=3)
        train(training, checkpointer, 4)
        assert link.calls == ["open", ("staged", 2), ("staged", 3), "hold"]
        assert names(root) == [folder_name(2, 3), folder_name(3, 3)]
        manifest = Store(root).look(folder_name(3, 3)).manifest
        assert (manifest.job, manifest.run, manifest.generation) == ("job", "7", 3)

    @pytest.mark.parametrize("by", ["step", "save"])
    def test_who_can_be_asked_from_its_first_step_on(self, make, kind, tmp_path, by):
        """A program that called step when it saved what it goes on from: not one that may never call it."""
        training = kind()
        checkpointer = make(training, link=PlayedLink(tmp_path / "memory"), every_steps=2)
        if by == "step":
            train(training, checkpointer, 2)
        else:
            checkpointer.save(0)
        link = PlayedLink(tmp_path / "memory", generation=4)
        make(kind(), link=link).restore()
        assert link.calls.count("attend") == (1 if by == "step" else 0)

    def test_who_calls_step_no_more_is_asked_in_vain_once(self, make, kind, tmp_path):
        """What it saves does not say that it calls step, and the next one like it is not waited for."""
        train(training := kind(), make(training, link=PlayedLink(tmp_path / "memory"), every_steps=2), 2)
        attended = []
        for generation in (4, 5):
            link = PlayedLink(tmp_path / "memory", generation=generation)
            checkpointer = make(kind(), link=link)
            step = checkpointer.restore()
            checkpointer.save(step)
            attended.append(link.calls.count("attend"))
        assert attended == [1, 0]

    def test_nobody_is_asked_before_the_first_step_of_all(self, make, kind, tmp_path):
        """Nobody knows whether this program calls it."""
        link = PlayedLink(tmp_path / "memory")
        make(kind(), link=link).restore()
        assert "attend" not in link.calls

    def test_time_is_told_once(self, make, kind, tmp_path):
        """By rank 0, until something is saved."""
        for rank in (0, 1):
            training, link = kind(), PlayedLink(tmp_path / f"memory{rank}", rank=rank, world_size=2, writes=False)
            checkpointer = make(training, link=link, every_minutes=1e-9)
            train(training, checkpointer, 2)
            checkpointer.save()
            train(training, checkpointer, 4, 2)
            wants = [call[0] for call in link.calls if call[0] == "want"]
            assert len(wants) == (0 if rank else 2)

    def test_each_rank_writes_its_part(self, make, kind, tmp_path):
        """Rank 0 what all have in common, the others their random states; each as small as that."""
        for rank in (0, 1):
            training = kind()
            link = PlayedLink(tmp_path / f"memory{rank}", rank=rank, world_size=2, writes=False)
            make(training, link=link).save(0)
            answer = save(link.buffers[0])
        files = names(tmp_path / "checkpoints" / answer["draft"])
        expected = [*training.files[:4], training.files[3].replace("0.", "1.")]
        assert files == sorted([*expected, "part.0.json", "part.1.json"])

    @pytest.mark.parametrize("how", BREAKS)
    def test_a_named_one_that_is_not_whole(self, make, kind, tmp_path, told, how):
        """All begin anew with another one, that is not ours to decide; but this one is put aside, where it is stored."""
        training, root, name = saved(make, kind, 1), tmp_path / "checkpoints", folder_name(1, 0)
        BREAKS[how](root / name, training.files)
        told.clear()
        link = PlayedLink(tmp_path / "memory", resume=name)
        with pytest.raises(NotRestored, match=f"{name}: "):
            make(kind(), link=link).restore()
        assert link.calls[-1][:2] == ("not_restored", name)
        assert names(root) == [f"{name}.broken"]
        (line,) = lines(told)
        assert line.startswith(f"{root / name} is broken: ")
        assert line.endswith(f"it is kept as {name}.broken")

    @pytest.mark.parametrize("how", ["flipped here only", "device", "elsewhere"])
    def test_a_named_one_that_is_whole_in_its_storage(self, make, kind, tmp_path, monkeypatch, how):
        """Others can load it, or have put it aside already: it is told, and nothing is renamed."""
        training, root, name = saved(make, kind, 1), tmp_path / "checkpoints", folder_name(1, 0)
        path = str(root / name / training.files[1])

        def reading(*_):
            if how == "elsewhere":
                os.rename(root / name, root / f"{name}.broken")
            raise OSError(5, "Input/output error", path) if how == "device" else Damaged(path, "a bit is wrong")

        monkeypatch.setattr("elastic_adapter.core.checkpoint.restoring.Restoring.read", reading)
        link = PlayedLink(tmp_path / "memory", resume=name)
        with pytest.raises(NotRestored, match=f"{name}: .*(Input/output error|a bit is wrong)"):
            make(kind(), link=link).restore()
        assert link.calls[-1][0] == "not_restored"
        assert names(root) == [f"{name}.broken" if how == "elsewhere" else name]

    def test_what_is_kept_in_the_job_s_history(self, make, kind, root, tmp_path, mounted):
        """What was put aside, and where buffers are for want of memory: beside this program's own log."""
        saved(make, kind, 2, every_steps=1)
        flip(root / folder_name(2, 0) / kind.files[0])
        link = PlayedLink(mounted("memory", "64k"))
        training = kind()
        checkpointer = make(training, link=link)
        assert checkpointer.restore() == 1
        train(training, checkpointer, 2, 1)
        assert checkpointer.save()
        first, second = [call[1] for call in link.calls if call[0] == "note"]
        assert f"{folder_name(2, 0)} is broken" in first
        assert "states are copied to" in second

    def test_a_named_one_that_is_not_there(self, make, kind, tmp_path, monkeypatch):
        """The same."""
        monkeypatch.setattr("elastic_adapter.core.checkpoint.checkpointer._SEEN_WITHIN_S", 0.0)
        link = PlayedLink(tmp_path / "memory", resume=folder_name(9, 1))
        with pytest.raises(NotRestored, match="No such file"):
            make(kind(), link=link).restore()

    @pytest.mark.parametrize("published", [False, True])
    def test_one_that_was_agreed_upon_and_not_renamed(self, make, kind, root, tmp_path, published):
        """It is a checkpoint, because all have agreed that it is: whoever restores it first renames it."""
        training, link = kind(), PlayedLink(tmp_path / "memory", generation=1, writes=False)
        training.turn()
        make(training, link=link).save(0)
        save(link.buffers[0])
        which = {"root": str(root), "step": 1, "generation": 1, "token": "run1"}
        put_together(**which, world_size=1)
        if published:
            Store(root).begun(1, 1, "run1").publish()
        again = kind()
        link = PlayedLink(tmp_path / "memory", generation=2, resume=folder_name(1, 1))
        assert make(again, link=link).restore() == 1
        assert again.values() == training.values()
        assert names(root) == [folder_name(1, 1)]

    def test_what_was_found(self, make, kind, tmp_path):
        """The newest that is whole, and those before it."""
        saved(make, kind, 1, 2, 3)
        link = PlayedLink(tmp_path / "memory")
        assert make(kind(), link=link).restore() == 3
        assert link.found.names == tuple(folder_name(step, 0) for step in (3, 2, 1))

    def test_drafts_are_swept(self, make, kind, root, tmp_path):
        """Those of nobody; not those that this generation writes, nor those of a program that may still run."""
        saved(make, kind, 1)
        store, other = Store(root), OwnLink(None)
        alive = other.open(str(root)).token
        dead = alive.rpartition("-")[0] + "-1"
        stay = [store.draft(9, 3, "run1"), store.draft(9, 0, alive), store.draft(9, 4, "run0")]
        for each in ((9, 2, "run1"), (9, 0, dead), (9, 3, "run0")):
            gone = store.draft(*each)
        os.utime(gone.path, (1, 1))
        make(kind(), link=PlayedLink(tmp_path / "memory")).restore()
        other.close()
        assert names(root) == sorted([folder_name(1, 0), *(draft.path.name for draft in stay)])

    @pytest.mark.parametrize(
        "trouble", ["step 2 is not saved: no space", "no checkpoint of step 2", "the storage is gone"]
    )
    def test_what_was_taken_for_saved_and_is_not(self, make, kind, tmp_path, told, trouble):
        """The next one who wants it saved has it saved again; and hears of it, if that fails as well."""
        training, link, root = kind(), PlayedLink(tmp_path / "memory"), tmp_path / "checkpoints"
        link.fails = {2: trouble}
        checkpointer = make(training, link=link, every_steps=1)
        train(training, checkpointer, 2)
        assert checkpointer.save(wait=True)
        assert link.calls[1:] == [("staged", 1), ("staged", 2), ("staged", 2)]
        assert names(root) == [folder_name(1, 3), folder_name(2, 3)]
        assert lines(told) == [trouble]
        link.fails = {3: trouble.replace("2", "3")}
        training.turn()
        for _ in range(2):
            with pytest.raises(NotSaved, match=link.fails[3]):
                checkpointer.save(2, wait=True)
            link.fails = {3: trouble.replace("2", "3")}
        assert folder_name(3, 3) not in names(root)

    def test_a_trouble_of_another_step(self, make, kind, root, tmp_path, told):
        """It is told, and what was saved since is saved: not again, and without an error."""
        training, link = kind(), PlayedLink(tmp_path / "memory")
        link.fails = {1: "step 1 is not saved: no space"}
        checkpointer = make(training, link=link, every_steps=1)
        train(training, checkpointer, 1)
        waiting, link.told = link.told, []
        train(training, checkpointer, 2, 1)
        link.told = waiting
        assert checkpointer.save(wait=True)
        link.fails = {3: "step 2 is not saved: no space"}
        training.turn()
        assert checkpointer.save(2, wait=True)
        assert link.calls[1:] == [("staged", 1), ("staged", 2), ("staged", 3)]
        assert lines(told) == [f"step {step} is not saved: no space" for step in (1, 2)]

    def test_both_are_being_written(self, make, kind, tmp_path, told):
        """A save that does not wait is left out, and that is told to all."""
        training, link = kind(), PlayedLink(tmp_path / "memory", writes=False)
        checkpointer = make(training, link=link, every_steps=1, when_busy="skip")
        train(training, checkpointer, 3)
        assert link.calls[1:] == [
            ("staged", 1),
            ("staged", 2),
            ("missed", 3, "the last two saves are still being written"),
        ]
        assert lines(told) == ["step 3 is not saved: the last two saves are still being written"]
        assert len(set(link.buffers)) == 2

    def test_buffers_of_a_former_generation(self, make, kind, tmp_path):
        """They are used again; one that is still to be written is not touched, another one is."""
        training, link = kind(), PlayedLink(tmp_path / "memory", writes=False)
        train(training, make(training, link=link, every_steps=1), 2)
        first, second = link.buffers
        places = [path.stat().st_ino for path in link.buffers]
        link = PlayedLink(tmp_path / "memory", generation=4, busy=[first.name], writes=False)
        train(training, make(training, link=link, every_steps=1), 1)
        assert link.buffers == [second]
        assert [path.stat().st_ino for path in (first, second)] == places
        assert StagingBuffer.open(first).mark == FULL
        assert StagingBuffer.open(first).take().generation == 3
        assert StagingBuffer.open(second).take().generation == 4

    def test_a_state_that_has_grown(self, make, kind, tmp_path):
        """A buffer that is too small is replaced."""
        for width in (8, 900):
            training, link = kind(width=width), PlayedLink(tmp_path / "memory")
            store = Store(tmp_path / f"of-{width}")
            train(training, make(training, store.root, link=link, every_steps=1), 3)
            assert [call for call in link.calls if call[0] == "missed"] == []
            assert store.trouble(store.look(folder_name(3, 3))) == ""


class TestArguments:
    """Mistakes that are found at once, in one line."""

    @pytest.mark.parametrize("sampler", [5, range(3)])
    def test_a_sampler_that_can_not_be_kept(self, make, kind, sampler):
        """Nobody is to believe that its position is saved."""
        with pytest.raises(UserError, match=r"sampler has no state_dict\(\), .*pass an ElasticSampler"):
            make(kind(), sampler=sampler)

    def test_a_folder_that_is_a_file(self, make, kind, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(UserError, match=r"kept in a folder, and .*file is a file"):
            make(kind(), tmp_path / "file")
        os.mkfifo(tmp_path / "pipe")
        os.symlink(tmp_path / "loop", tmp_path / "loop")
        for name, words in {"pipe": "a pipe", "loop": "a link that leads to itself", "/dev/null": "a device"}.items():
            with pytest.raises(UserError, match=f"kept in a folder, and .*{name} is {words}"):
                make(kind(), tmp_path / name)

    def test_the_folder(self, make, kind, root, monkeypatch):
        monkeypatch.delenv("CHECKPOINT_PATH", raising=False)
        with pytest.raises(UserError, match="pass a folder to Checkpointer, or set CHECKPOINT_PATH"):
            make(kind(), None)
        monkeypatch.setenv("CHECKPOINT_PATH", str(root))
        assert make(kind(), None).folder == str(root)
        monkeypatch.setenv("HOME", str(root))
        assert make(kind(), "~/job1").folder == str(root / "job1")

    @pytest.mark.parametrize(
        ("folder", "words"),
        [
            (5, "the folder of checkpoints has to be text or a Path, got 5"),
            (b"x", "the folder of checkpoints has to be text or a Path, got b'x'"),
            ("s3://bucket/job1", "s3://bucket/job1 is a URL: mount it, and name that"),
        ],
    )
    def test_what_is_no_folder(self, make, kind, folder, words):
        with pytest.raises(UserError, match=words):
            make(kind(), folder)
        if not isinstance(folder, str):
            with pytest.raises(UserError, match="a checkpoint's path has to be text or a Path"):
                make(kind()).restore(folder)

    def test_a_class_in_the_place_of_an_object(self, make, kind):
        training = kind()
        with pytest.raises(UserError, match="model is the class Sequential: pass an object of it"):
            make(training, model=type(training.model))

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"verify": "maybe"}, "verify must be one of 'off', 'sample', 'full', got 'maybe'"),
            ({"algorithm": "crc"}, "algorithm must be one of 'xxh3_128', 'sha256'"),
            ({"when_busy": "panic"}, "when_busy must be one of"),
            ({"every_steps": 0}, "every_steps must be a whole number of at least 1"),
            ({"model": 5}, r"model has no state_dict\(\), and is of the type int"),
            ({"extra": 5}, "extra must be a dict"),
        ],
    )
    def test_values(self, make, kind, options, words):
        with pytest.raises(UserError, match=words):
            make(kind(), **options)

    def test_a_state_that_could_not_be_loaded(self, make, kind):
        """It is refused after the first step, and not when the first save is due."""
        training = kind()
        checkpointer = make(training, extra={"odd": Path("x")}, every_steps=1000)
        with pytest.raises(Refused, match=r"the state at extra/odd was refused: it asks for pathlib"):
            train(training, checkpointer, 1)

    @pytest.mark.parametrize("value", [threading.Lock(), [[[]] * 3, Path("x")], {"a": threading.Lock()}])
    def test_one_that_could_not_be_loaded_any_more(self, make, kind, root, told, value):
        """Once the training is under way, that is a line for each save, and no reason to end it."""
        training, extra = kind(), {}
        with make(training, extra=extra, every_steps=1) as checkpointer:
            train(training, checkpointer, 1)
            extra["odd"] = value
            train(training, checkpointer, 2, 1)
            with pytest.raises(NotSaved):
                checkpointer.save(wait=True)
            extra.clear()
            train(training, checkpointer, 3, 2)
        assert [line.partition("/")[0] for line in lines(told)] == ["step 2 is not saved: the state at extra"] * 2
        assert names(root) == [folder_name(1, 0), folder_name(3, 0)]

    def test_a_sampler_of_another_kind(self, make, kind, root, told):
        """What its state would come back as is known at the first step; later it is a line."""

        class Other:
            def __init__(self, seen):
                self.seen = seen

            def advance(self):
                self.seen += (len(self.seen),)

            def state_dict(self):
                return {"seen": self.seen}

            def load_state_dict(self, state):
                self.seen = tuple(state["seen"])

        with pytest.raises(UserError, match=r"state of the sampler has to be plain JSON: .* at 'seen'"):
            make(kind(), sampler=Other(({0: 1},))).step(0)
        sampler = Other((5,))
        with make(kind(), sampler=sampler, every_steps=1) as checkpointer:
            checkpointer.step(0)
            sampler.seen = ({0: 1},)
            checkpointer.step(1)
        assert "step 2 is not saved: the state of the sampler has to be plain JSON" in lines(told)[-1]
        again = Other(())
        assert make(kind(), sampler=again).restore() == 1
        assert again.seen == (5, 1)

    def test_one_that_is_closed(self, make, kind, root):
        """It saves no more, and says so; to close it again is no mistake."""
        training = kind()
        checkpointer = make(training)
        train(training, checkpointer, 1)
        checkpointer.close()
        checkpointer.close()
        assert checkpointer.settled()
        for call in (lambda: checkpointer.step(1), checkpointer.save, checkpointer.restore):
            with pytest.raises(UserError, match="this Checkpointer was closed"):
                call()

    @pytest.mark.parametrize(
        ("call", "step"),
        [*((call, step) for call in ("step", "save") for step in (-1, 2.5, "x", float("nan"))), ("step", None)],
    )
    def test_a_step_that_is_no_number_of_steps(self, make, kind, call, step):
        with pytest.raises(UserError, match=re.escape(f"step must be a whole number of at least 0, got {step!r}")):
            getattr(make(kind()), call)(step)

    @pytest.mark.parametrize("call", ["step", "save"])
    def test_a_step_that_no_folder_can_be_named_by(self, make, kind, root, call):
        with pytest.raises(UserError, match=f"step must be a number of at most 17 digits, got {10**17}"):
            getattr(make(kind()), call)(10**17)
        with make(kind()) as checkpointer:
            checkpointer.save(10**17 - 1, wait=True)
        assert names(root) == [folder_name(10**17, 0)]

    def test_before_the_first_step(self, make, kind, root):
        """The state that a training begins with can be saved as well; what was restored need not be saved again."""
        with make(kind()) as checkpointer:
            checkpointer.save(wait=True)
        assert names(root) == [folder_name(0, 0)]
        with make(kind()) as checkpointer:
            assert checkpointer.restore() == 0
            assert checkpointer.save(wait=True)

    def test_one_that_is_there_already(self, make, kind, root, told):
        """A training that begins anew in a folder of another one does not take its place without a word."""
        saved(make, kind, 1)
        training = kind()
        with make(training, every_steps=1) as checkpointer:
            train(training, checkpointer, 1)
        assert "was there before, and stays as it is: restore() it, or name another folder" in lines(told)[-1]


class OtherRank:
    """A group in which this is rank 1 of 2."""

    def __init__(self, framework):
        pass

    def place(self):
        return 1, 2


class TestOneFolder:
    """save_checkpoint and load_checkpoint, for loops that keep their own books."""

    def test_what_is_no_checkpoint(self, kind, tmp_path):
        """It is said whether there is anything."""
        (tmp_path / "empty").mkdir()
        for name, words in {"nothing": "is not there", "empty": "is no checkpoint: it has no manifest.json"}.items():
            with pytest.raises(UserError, match=f"{tmp_path / name} {words}; pass a folder or a file that was saved"):
                kind().adapter().load_checkpoint(tmp_path / name, model=kind().model)

    def test_what_was_saved_is_loaded(self, kind, tmp_path):
        training = kind()
        training.turn()
        adapter = training.adapter()
        place = tmp_path / "deep" / "best"
        for step in (5, 6):
            path = adapter.save_checkpoint(
                place, model=training.model, optimizer=training.optimizer, step=step, epoch=2, note="x"
            )
            assert path == str(place)
        assert names(place.parent) == ["best"]
        assert list(training.load(place / training.files[0])) == list(training.model.state_dict())
        again = kind()
        found = adapter.load_checkpoint(place, model=again.model, optimizer=again.optimizer)
        assert found == {"step": 6, "epoch": 2, "note": "x"}
        assert again.values() == training.values()

    def test_what_else_is_there_is_not_replaced(self, kind, tmp_path):
        """A folder with other things in it stays; an empty one, and a file that was saved before, do not."""
        training = kind()
        adapter = training.adapter()
        (tmp_path / "outputs").mkdir()
        (tmp_path / "outputs" / "notes.txt").write_text("mine")
        (tmp_path / "empty").mkdir()
        training.save(training.model.state_dict(), tmp_path / "file")
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(UserError, match=r"notes\.txt is a file that no framework saved"):
            adapter.save_checkpoint(tmp_path / "notes.txt", model=training.model)
        for name, content in (("PLAN.txt", b"Plan"), ("image", b"\x80PNG"), ("short.zip", b"PK\x03\x04"), ("P", b"P")):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(UserError, match=f"{name} is a file that no framework saved"):
                adapter.save_checkpoint(tmp_path / name, model=training.model)
            (tmp_path / name).unlink()
        np.savez(tmp_path / "data.npz", x=np.arange(5))
        with pytest.raises(UserError, match=r"data\.npz is a file that no framework saved"):
            adapter.save_checkpoint(tmp_path / "data.npz", model=training.model)
        (tmp_path / "data.npz").unlink()
        with pytest.raises(UserError, match=r"optimzer has a state of its own, .* misspelt"):
            adapter.save_checkpoint(tmp_path / "empty", model=training.model, optimzer=training.optimizer)
        with pytest.raises(UserError, match="outputs is a folder with other things in it"):
            adapter.save_checkpoint(tmp_path / "outputs", model=training.model)
        assert (tmp_path / "outputs" / "notes.txt").read_text() == "mine"
        for name in ("empty", "file"):
            adapter.save_checkpoint(tmp_path / name, model=training.model, step=4)
            assert adapter.load_checkpoint(tmp_path / name, model=training.model)["step"] == 4
        assert names(tmp_path) == ["empty", "file", "notes.txt", "outputs"]

    def test_a_manifest_of_something_else(self, kind, tmp_path):
        """Other people have files of that name, and a link may be called so."""
        training = kind()
        app = tmp_path / "app"
        (app / "src").mkdir(parents=True)
        (app / "src" / "precious.py").write_text("mine")
        for content in ('{"name": "x"}', '{"format": 1, "name": "x"}', '{"format":2,"job":null}', "", "[]", "\0"):
            (app / "manifest.json").write_text(content)
            with pytest.raises(UserError, match=r"app has a manifest\.json that is no checkpoint's \(.*name another"):
                training.adapter().save_checkpoint(app, model=training.model)
        for other in (
            os.mkfifo,
            os.mkdir,
            lambda path: os.symlink("nowhere", path),
            lambda path: os.symlink(path, path),
        ):
            (app / "manifest.json").rmdir() if (app / "manifest.json").is_dir() else (app / "manifest.json").unlink()
            other(app / "manifest.json")
            with pytest.raises(UserError, match=r"app has a manifest\.json that is no checkpoint's"):
                training.adapter().save_checkpoint(app, model=training.model)
        assert (app / "src" / "precious.py").read_text() == "mine"
        assert names(tmp_path) == ["app"]

    def test_a_checkpoint_with_other_things_in_it(self, kind, tmp_path):
        """They would be gone with it. Once they are moved away, it is replaced."""
        training, place = kind(), tmp_path / "best"
        adapter = training.adapter()
        adapter.save_checkpoint(place, model=training.model, step=1)
        (place / "notes.txt").write_text("mine")
        with pytest.raises(
            UserError, match=r"best/notes\.txt is no part of the checkpoint in that folder.* move it away"
        ):
            adapter.save_checkpoint(place, model=training.model, step=2)
        (place / "notes.txt").unlink()
        # What the manifest names is a file.
        (place / training.files[0]).unlink()
        (place / training.files[0]).mkdir()
        with pytest.raises(UserError, match=rf"{training.files[0]} is no part of the checkpoint"):
            adapter.save_checkpoint(place, model=training.model, step=2)
        (place / training.files[0]).rmdir()
        (place / "checkpoints.md5").write_text("")
        adapter.save_checkpoint(place, model=training.model, step=2)
        assert adapter.load_checkpoint(place, model=training.model)["step"] == 2
        assert "checkpoints.md5" not in names(place)

    @pytest.mark.parametrize("how", ["cut off", "edited"])
    def test_a_damaged_manifest(self, kind, tmp_path, how):
        """It is one of ours, so it is replaced; but not what no checkpoint has."""
        training, place = kind(), tmp_path / "best"
        adapter = training.adapter()
        adapter.save_checkpoint(place, model=training.model, optimizer=training.optimizer, step=1, epoch=2)
        manifest = (place / "manifest.json").read_bytes()
        damaged = manifest[: len(manifest) // 2] if how == "cut off" else manifest.replace(b'"step":1,', b'"step":7,')
        (place / "manifest.json").write_bytes(damaged)
        (place / "other.pt").write_text("mine")
        with pytest.raises(UserError, match=r"best/other\.pt is no part of the checkpoint"):
            adapter.save_checkpoint(place, model=training.model, step=2)
        (place / "other.pt").unlink()
        adapter.save_checkpoint(place, model=training.model, step=2)
        assert adapter.load_checkpoint(place, model=training.model)["step"] == 2
        assert names(tmp_path) == ["best"]

    def test_what_is_neither_file_nor_folder(self, kind, tmp_path):
        """It stays what it is."""
        training = kind()
        adapter = training.adapter()
        os.mkfifo(tmp_path / "pipe")
        os.symlink(tmp_path / "loop", tmp_path / "loop")
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(tmp_path / "socket"))
        others = {"pipe": "a pipe", "loop": "a link that leads to itself", "socket": "a socket"}
        others |= {"loop/below": "a link that leads to itself", "/dev/null": "a device"}
        for name, kind_of_it in others.items():
            with pytest.raises(UserError, match=f"{name} is {kind_of_it}, which no checkpoint can replace"):
                adapter.save_checkpoint(tmp_path / name, model=training.model)
        listening.close()
        assert names(tmp_path) == ["loop", "pipe", "socket"]
        assert stat.S_ISCHR(os.stat("/dev/null").st_mode)

    @pytest.mark.parametrize(
        ("name", "which"),
        [
            *((name, which) for name in ("torch", "paddle") for which in ("numpy", "no dict", "short", "beyond")),
            ("paddle", "sign"),
            ("paddle", "device"),
        ],
    )
    def test_random_states_that_are_none(self, tmp_path, name, which):
        """They are left out, with a word; the generators go on as they are, and read no memory that is not theirs."""
        argv = [sys.executable, "-W", "ignore", "-c", BAD_STATES, str(Path(__file__).parents[1]), name]
        done = subprocess.run([*argv, str(tmp_path / "best"), which], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        words = r"best: the random generators are not restored: what was saved for \w+ is no state of its generator"
        assert re.search(words, done.stderr), done.stderr

    def test_links(self, kind, tmp_path):
        """They stay: what they lead to is replaced, or made."""
        training = kind()
        adapter = training.adapter()
        for name in ("there", "nowhere"):
            os.symlink(tmp_path / name, tmp_path / f"to-{name}")
        adapter.save_checkpoint(tmp_path / "there", model=training.model, step=1)
        for name in ("there", "nowhere"):
            path = adapter.save_checkpoint(tmp_path / f"to-{name}", model=training.model, step=2)
            assert path == str(tmp_path / name)
            assert (tmp_path / f"to-{name}").is_symlink()
            assert adapter.load_checkpoint(tmp_path / f"to-{name}", model=training.model)["step"] == 2

    def test_pickles_that_are_no_weights(self, kind, tmp_path):
        """Somebody's data; it is not run to see that."""
        training = kind()

        class Evil:
            def __reduce__(self):
                return os.mkdir, (str(tmp_path / "ran"),)

        path = tmp_path / "data.pkl"
        for value in ({"dataset": [1, 2, 3]}, {"images": np.ones([3, 4])}, Evil()):
            for protocol in (2, 4):
                content = pickle.dumps(value, protocol=protocol)
                path.write_bytes(content)
                with pytest.raises(UserError, match=r"data\.pkl is a file that no framework saved"):
                    training.adapter().save_checkpoint(path, model=training.model)
                assert path.read_bytes() == content
        assert names(tmp_path) == ["data.pkl"]

    def test_files_of_weights(self, kind, tmp_path):
        """In all forms that people save; and what is empty."""
        training = kind()
        training.turn()
        adapter = training.adapter()
        model, optimizer = training.model.state_dict(), training.optimizer.state_dict()
        for name, state in {"model": model, "optimizer": optimizer, "all": {"model": model, "step": 3}}.items():
            training.save(state, tmp_path / name)
        (tmp_path / "empty").touch()
        for name in ("model", "optimizer", "all", "empty"):
            adapter.save_checkpoint(tmp_path / name, model=training.model, step=4)
            assert adapter.load_checkpoint(tmp_path / name, model=training.model)["step"] == 4

    def test_the_only_copy(self, make, kind, tmp_path):
        """Where folders can't be exchanged, one who is killed leaves the older one aside: nobody's sweep takes it."""
        training = kind()
        adapter = training.adapter()
        (tmp_path / "run").mkdir()
        places = [tmp_path / "run" / name for name in ("model.best", "model.0123abcd", "model")]
        for place in places:
            adapter.save_checkpoint(place, model=training.model, step=1)
            os.rename(place, single._old(place))
            for path in (*single._old(place).iterdir(), single._old(place)):
                os.utime(path, (1, 1))
        make(kind(), tmp_path / "run").restore()
        adapter.save_checkpoint(tmp_path / "run" / "model", model=training.model, step=2)
        found = [adapter.load_checkpoint(place, model=training.model)["step"] for place in places]
        assert found == [1, 1, 2]
        assert not single._old(places[-1]).exists()

    def test_the_only_copy_of_a_file(self, make, kind, tmp_path):
        """A file that is put aside is one still: what it is called says what it is. So is what a link leads to."""
        training = kind()
        training.turn()
        adapter, weights = training.adapter(), tmp_path / "weights"
        training.save({"model": training.model.state_dict(), "step": 3}, weights)
        optimizer = tmp_path / f"optimizer{Path(training.files[1]).suffix}"
        training.save(training.optimizer.state_dict(), optimizer)
        os.symlink(weights, tmp_path / "link")
        for path in (weights, optimizer):
            os.rename(path, single._old(path))
        for path in (weights, tmp_path / "link"):
            assert adapter.load_checkpoint(path, model=kind().model)["step"] == 3
            assert make(kind()).restore(path) == 3
        if kind.name == "paddle":
            adapter.load_checkpoint(optimizer, optimizer=training.optimizer)
        adapter.save_checkpoint(weights, model=training.model, step=4)
        assert adapter.load_checkpoint(weights, model=training.model)["step"] == 4
        assert not single._old(weights).exists()
        assert single._old(optimizer).exists()

    def test_a_checkpointer_restores_the_only_copy(self, make, kind, tmp_path):
        """By the path that it had, as load_checkpoint does."""
        training = kind()
        training.adapter().save_checkpoint(tmp_path / "best", model=training.model, step=5)
        os.rename(tmp_path / "best", single._old(tmp_path / "best"))
        assert make(kind(), optimizer=None, scheduler=None, sampler=None).restore(tmp_path / "best") == 5

    def test_drafts_of_others(self, kind, tmp_path):
        """Only those of the very same folder are swept, and only when they are old."""
        training = kind()
        stay = [".best.2.0123abcd.run1.elastic-tmp", ".best.run1.elastic-tmp", ".best.mine.run1.elastic-tmp"]
        stay += [".other.0123abcd.run1.elastic-tmp", ".best.2.0123abcd.run1.elastic-tmp.swept.elastic-tmp"]
        gone = [".best.0123abcd.run1.elastic-tmp", ".best.89abcdef.run1.elastic-tmp.swept.elastic-tmp"]
        gone += [f".best.{name}.elastic-tmp.swept.elastic-tmp.swept.elastic-tmp" for name in ("45670123.run1", "old")]
        for name in (*stay, *gone):
            (tmp_path / name).mkdir()
            os.utime(tmp_path / name, (1, 1))
        young = ".best.4567abcd.run1.elastic-tmp"
        (tmp_path / young).mkdir()
        training.adapter().save_checkpoint(tmp_path / "best", model=training.model)
        assert names(tmp_path) == sorted([*stay, young, "best"])

    def test_it_is_read_back(self, kind, tmp_path, monkeypatch):
        """What does not come back as it was written does not take the older one's place."""
        training = kind()
        adapter = training.adapter()
        adapter.save_checkpoint(tmp_path / "one", model=training.model, step=1)
        written = single._write

        def badly(framework, draft, name, state):
            entry = written(framework, draft, name, state)
            flip(draft.path / name)
            return entry

        monkeypatch.setattr(single, "_write", badly)
        with pytest.raises(Damaged):
            adapter.save_checkpoint(tmp_path / "one", model=training.model, step=2, verify="full")
        assert names(tmp_path) == ["one"]
        assert adapter.load_checkpoint(tmp_path / "one", model=training.model)["step"] == 1
        with pytest.raises(UserError, match="verify must be one of"):
            adapter.save_checkpoint(tmp_path / "one", model=training.model, verify="all")

    def test_steps(self, kind, tmp_path):
        """What is no number of steps is refused before anything is written."""
        training = kind()
        adapter = training.adapter()
        adapter.save_checkpoint(tmp_path / "one", model=training.model, step=1)
        with pytest.raises(UserError, match="step must be a number of at most 17 digits, got 1"):
            adapter.save_checkpoint(tmp_path / "one", model=training.model, step=10**30)
        for step in (-1, 1.5, "x", None, True, float("inf")):
            with pytest.raises(UserError, match="step must be a whole number of at least 0, got"):
                adapter.save_checkpoint(tmp_path / "one", model=training.model, step=step)
        assert adapter.load_checkpoint(tmp_path / "one", model=training.model)["step"] == 1
        for step in (np.int64(3), 3.0, training.framework.ones([1]).sum() * 3):
            adapter.save_checkpoint(tmp_path / "one", model=training.model, step=step)
            assert adapter.load_checkpoint(tmp_path / "one", model=training.model)["step"] == 3

    def test_other_ranks_write_nothing(self, kind, tmp_path, monkeypatch):
        """All ranks may call it."""
        training = kind()
        adapter = training.adapter()
        group = {"torch": "TorchGroup", "paddle": "PaddleGroup"}[kind.name]
        monkeypatch.setattr(sys.modules[adapter.Checkpointer.__module__], group, OtherRank)
        assert adapter.save_checkpoint(tmp_path / "one", model=training.model, step=1) is None
        assert names(tmp_path) == []

    def test_a_checkpointer_s(self, make, kind, root, told):
        training, again = saved(make, kind, 2), kind()
        adapter = training.adapter()
        found = adapter.load_checkpoint(root / folder_name(2, 0), model=again.model, optimizer=again.optimizer)
        assert found == {"step": 2, "epoch": 0}
        assert again.values() == training.values()
        adapter.load_checkpoint(root / folder_name(2, 0), model=again.model, scheduler=again.scheduler)
        assert lines(told) == []

    def test_a_damaged_one(self, kind, tmp_path):
        training = kind()
        adapter = training.adapter()
        adapter.save_checkpoint(tmp_path / "one", model=training.model, step=1)
        flip(tmp_path / "one" / training.files[0])
        with pytest.raises(Damaged, match=r"model\.\w+ is damaged"):
            adapter.load_checkpoint(tmp_path / "one", model=training.model)
        with pytest.raises(UserError, match="none is not there"):
            adapter.load_checkpoint(tmp_path / "none", model=training.model)

    def test_a_file_of_the_framework(self, kind, tmp_path):
        training, again = kind(), kind()
        training.turn()
        training.save({"model": training.model.state_dict(), "step": 3, "note": "x"}, tmp_path / "file")
        assert training.adapter().load_checkpoint(tmp_path / "file", model=again.model) == {"step": 3, "note": "x"}
        assert again.values() == {name: each for name, each in training.values().items() if name.startswith("model")}

    def test_a_disk_that_is_full(self, kind, mounted):
        """What was there before is there still, and nothing else is."""
        training = kind(width=600)
        small = mounted("small", "150k")
        adapter = training.adapter()
        adapter.save_checkpoint(small / "best", model=training.model, step=1)
        with pytest.raises(OSError, match="No space left"):
            adapter.save_checkpoint(small / "best", model=training.model, optimizer=training.model, step=2)
        assert names(small) == ["best"]
        assert adapter.load_checkpoint(small / "best", model=training.model)["step"] == 1


KILLED = """
import json, os, random, signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from elastic_adapter.core.checkpoint import single, staging
from helpers.trainings import TRAININGS
kind, place, trials = TRAININGS[sys.argv[2]], Path(sys.argv[3]), int(sys.argv[4])
if sys.argv[5] == "renames":
    single._exchanged = lambda *_: False
rng, training, last, killed, halves = random.Random(20261117), kind(width=600), 0, 0, 0
adapter = training.adapter()
save = lambda step: adapter.save_checkpoint(place, model=training.model, step=step, verify="off")
save(0)
# Kills come while three are saved, however busy the machine is, now and later.
begin = time.monotonic()
save(0)
span = 3 * (time.monotonic() - begin)
for _ in range(trials):
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        for step in range(last + 1, last + 4):
            save(step)
            os.write(writing, bytes([step - last]))
        os._exit(0)
    os.close(writing)
    time.sleep(rng.uniform(0.0, span))
    os.kill(child, signal.SIGKILL)
    was_killed = os.waitpid(child, 0)[1] != 0
    killed += was_killed
    span *= 1.05 if was_killed else 0.8
    halves += len(os.listdir(place.parent)) > 1
    said = os.read(reading, 10)
    os.close(reading)
    found = adapter.load_checkpoint(place, model=training.model)["step"]
    assert last + (said[-1] if said else 0) <= found <= last + 3, (last, said, found)
    last = found
save(last + 1)
print(json.dumps([killed, halves, last, os.listdir(place.parent)]))
"""


@pytest.mark.timeout(60 + 2 * FAULTS)
@pytest.mark.parametrize("how", ["exchanges", "renames"])
def test_kill_9_while_one_folder_is_saved(kind, tmp_path, how):
    """What returned is there, or a later one, and whole; also where two folders can't be exchanged in one step."""
    argv = [sys.executable, "-W", "ignore", "-c", KILLED, str(Path(__file__).parents[1]), kind.name]
    argv += [str(tmp_path / "best"), str(FAULTS), how]
    # Only a process of one thread can be forked.
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    killed, halves, last, left = json.loads(done.stdout.splitlines()[-1])
    assert killed > FAULTS // 2
    assert halves > 0
    assert last > 0
    assert left == ["best"]


ALONE = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from helpers.trainings import TRAININGS
training = TRAININGS[sys.argv[2]]()
checkpointer = training.adapter().Checkpointer(sys.argv[3], every_steps=3, **training.things())
for step in range(checkpointer.restore(), 3):
    training.turn()
    checkpointer.step(step)
if sys.argv[4] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["ends", "killed"])
def test_what_was_saved_last(kind, root, how):
    """A program that ends right after its save has saved; also one that is killed, once its saver has begun."""
    argv = [sys.executable, "-c", ALONE, str(Path(__file__).parents[1]), kind.name, str(root), how]
    with subprocess.Popen(argv) as program:
        assert program.wait(50) == (-signal.SIGKILL if how == "killed" else 0)
    if how == "ends":
        assert names(root) == [folder_name(3, 0)]
    assert not [each for each in Store(root).newest_first() if not isinstance(each, Checkpoint)]


RANKS = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from helpers.trainings import TRAININGS
from helpers.frameworks import SCRIPTS
name, root = sys.argv[2], sys.argv[3]
exec(SCRIPTS[name])
rank, size = join()
training = TRAININGS[name](size=64)
training.parallel = training.wrapped()
for _ in range(rank):
    training.framework.rand([1])
with training.adapter().Checkpointer(root, every_steps=4, every_minutes=1e-9, **training.things()) as checkpointer:
    start = checkpointer.restore()
    for step in range(start, start + 4):
        training.turn()
        checkpointer.step(step)
    # Rank 0 waits for the parts of all.
    checkpointer.settled()
    numbers = training.framework.rand([2]).tolist()
    print(json.dumps([rank, start, training.sampler.state_dict()["position"], numbers]), flush=True)
"""


@pytest.mark.timeout(240)
def test_ranks_of_another_launcher(kind, root):
    """All write into one checkpoint, agree on when, and go on from it, each with its own random numbers."""
    told = []
    for _ in range(2):
        port, other = free_ports(2)
        programs = []
        for rank in range(2):
            env = {name: value for name, value in os.environ.items() if not name.startswith(("ELASTIC", "PADDLE"))}
            env |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            env |= {"PADDLE_TRAINER_ID": str(rank), "PADDLE_TRAINERS_NUM": "2", "PADDLE_DISTRI_BACKEND": "gloo"}
            env |= {"PADDLE_MASTER": f"127.0.0.1:{port}", "PADDLE_CURRENT_ENDPOINT": f"127.0.0.1:{[port, other][rank]}"}
            env |= {
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "PADDLE_TRAINER_ENDPOINTS": f"127.0.0.1:{port},127.0.0.1:{other}",
            }
            argv = [sys.executable, "-W", "ignore", "-c", RANKS, str(Path(__file__).parents[1]), kind.name, str(root)]
            programs.append(subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True))
        outputs = [program.communicate(timeout=110)[0] for program in programs]
        assert [program.returncode for program in programs] == [0, 0]
        told.append([json.loads(output.splitlines()[-1]) for output in outputs])
    assert [each[:3] for each in told[0]] == [[0, 0, 32], [1, 0, 32]]
    assert [each[:2] for each in told[1]] == [[0, 4], [1, 4]]
    assert told[1][0][3] != told[1][1][3]
    found = [each.manifest for each in Store(root).newest_first()]
    assert {manifest.step for manifest in found} >= {4, 8}
    assert {manifest.world_size for manifest in found} == {2}
    assert [Store(root).trouble(each) for each in Store(root).newest_first()] == [""] * len(found)
    assert not [name for name in names(root) if name.startswith(".")]
    alone = kind()
    model = alone.load(root / folder_name(8, 0) / alone.files[0])
    assert list(model) == list(alone.model.state_dict())


IN_A_CHILD = """
import gc, multiprocessing, os, sys

def work(how):
    sys.path.insert(0, sys.argv[1])
    from helpers.links import PlayedLink
    from helpers.trainings import TRAININGS
    training = TRAININGS[sys.argv[2]]()
    link = PlayedLink(sys.argv[3] + "/memory")
    link.close = lambda: print("closed by", os.getpid(), flush=True)
    checkpointer = training.adapter().Checkpointer(sys.argv[3] + "/checkpoints", link=link, **training.things())
    checkpointer.save(0)
    print("opened by", os.getpid(), flush=True)
    if how == "dropped":
        del checkpointer
        gc.collect()
    elif how == "fails":
        raise SystemExit(3)

if __name__ == "__main__":
    method, how = sys.argv[4:]
    if method == "none":
        work(how)
    else:
        child = multiprocessing.get_context(method).Process(target=work, args=(how,))
        child.start()
        child.join()
"""


class TestTheEnd:
    """Of a Checkpointer that nobody closes, and of one while another one begins."""

    @pytest.mark.parametrize(
        ("method", "how"),
        [("fork", "ends"), ("fork", "fails"), ("spawn", "ends"), ("none", "ends"), ("none", "dropped")],
    )
    def test_it_is_closed(self, tmp_path, kind, method, how):
        """Once, by the process that has opened it: also by a child of multiprocessing, which knows no atexit."""
        script = tmp_path / "train.py"
        script.write_text(IN_A_CHILD)
        argv = [sys.executable, script, Path(__file__).parents[1], kind.name, tmp_path, method, how]
        done = subprocess.run(map(str, argv), stdout=subprocess.PIPE, text=True, check=True, timeout=55)
        opened, closed = done.stdout.splitlines()[-2:]
        assert opened.startswith("opened by ")
        assert closed == opened.replace("opened", "closed")
        assert done.stdout.count("closed by") == 1

    def test_two_at_a_time(self, make, kind, root):
        """The second is refused, whatever its folder is, until the first one is closed."""
        first, second = make(kind()), make(kind(), root.with_name("other"))
        first.restore()
        for call in (second.restore, lambda: second.step(0), lambda: second.save(0)):
            with pytest.raises(
                UserError, match=rf"a Checkpointer of {root} is open .* close\(\) it, or have one save all"
            ):
                call()
        first.close()
        third = make(kind())
        assert second.restore() == 0
        with pytest.raises(UserError, match=rf"a Checkpointer of {second.folder} is open"):
            third.restore()

    def test_one_that_nobody_has_any_more(self, make, kind, root, told):
        """Does not keep another one from being opened; and what it was to save is saved."""
        training = kind()
        first = training.adapter().Checkpointer(root, **training.things())
        first.save(0)
        ending = first._ending
        gone = weakref.ref(first)
        del first
        gc.collect()
        assert gone() is None
        with make(kind(), root.with_name("other")) as second:
            second.restore()
            assert names(root) == [folder_name(1, 0)]
        # As at the end of the process.
        ending()
        assert lines(told) == []

    def test_a_loop_that_tries_again(self, make, kind, root, told):
        """Each makes its own, and closes none: the next one goes on from what the last one has saved."""

        def attempt():
            training = kind(width=300)
            checkpointer = training.adapter().Checkpointer(root, **training.things(), every_steps=1)
            start = checkpointer.restore()
            train(training, checkpointer, start + 2, start)
            return start

        assert [attempt() for _ in range(3)] == [0, 2, 4]
        make(kind(width=300)).restore()
        assert lines(told) == []
        assert names(root) == [folder_name(step, 0) for step in range(1, 7)]

    def test_a_child_with_its_parent_s(self, make, kind, root):
        """It has neither the saver nor the buffers: it is told so, and the parent goes on."""
        checkpointer = make(kind(), every_steps=1)
        checkpointer.restore()
        checkpointer.step(0)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for call in (lambda: checkpointer.step(50), checkpointer.save, checkpointer.settled):
                    with pytest.raises(UserError, match=r"is process \d+'s, which forked this one"):
                        call()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert checkpointer.step(1)
        checkpointer.close()
        assert names(root) == [folder_name(1, 0), folder_name(2, 0)]

    def test_a_child(self, make, kind, root):
        """What its parent has open is not its own."""
        first, second = make(kind()), make(kind(), root.with_name("other"))
        first.restore()
        child = os.fork()
        if child == 0:
            try:
                second._connect_alone()
            finally:
                os._exit(0 if sys.exc_info()[0] is None else 1)
        assert os.waitpid(child, 0)[1] == 0
