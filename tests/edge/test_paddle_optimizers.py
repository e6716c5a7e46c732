"""States of paddle's optimizers: each comes back to the parameter it was kept for, whatever things are called then."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from elastic_adapter.adapters import paddlepaddle as adapter
from elastic_adapter.core.errors import UserError

paddle = pytest.importorskip("paddle")

KINDS = "Adam AdamW Momentum Lamb Adagrad RMSProp NAdam RAdam Rprop SGD Adamax Adadelta ASGD".split()


class Trained:
    """A model and its optimizer, after so many other layers, with or without what its first step makes."""

    def __init__(self, kind, dtype="float32", name=None, *, after=0, begun=False):
        others = {"batch_num": 1} if kind == "ASGD" else {}
        with paddle.utils.unique_name.guard():
            for _ in range(after):
                paddle.nn.Linear(2, 2)
            self.model = paddle.nn.Sequential(paddle.nn.Linear(4, 3), paddle.nn.Linear(3, 2)).to(dtype=dtype)
            made = getattr(paddle.optimizer, kind)
            parameters = self.model.parameters()
            self.optimizer = made(0.01, parameters=parameters, name=name, **others)
            # As amp.decorate does for O2: each parameter has a master weight of more bits.
            self.optimizer._multi_precision = dtype != "float32"
            if begun:
                self.begin()

    def begin(self):
        """What the first step does before it computes. There is no CPU's kernel for steps in few bits."""
        with paddle.utils.unique_name.guard():
            block = paddle.base.framework.default_main_program().global_block()
            self.optimizer._create_accumulators(block, self.model.parameters())

    def fill(self):
        for name, value in self.optimizer.state_dict().items():
            for tensor in value.values() if name == "master_weights" else [value]:
                tensor.set_value(paddle.rand(tensor.shape).astype(tensor.dtype))

    def kept(self):
        """What is kept, by what it is and by the place of its parameter."""
        masters = self.optimizer._master_weights
        found = {}
        for at, each in enumerate(self.model.parameters()):
            owner = masters[each.name].name if each.name in masters else each.name
            found |= {(what, at): of[owner] for what, of in self.optimizer._accumulators.items() if owner in of}
            found |= {("master", at): masters[each.name]} if each.name in masters else {}
        return {place: tensor.astype("float32").numpy() for place, tensor in found.items()}


def assert_same(left, right):
    assert left.keys() == right.keys()
    for place, array in left.items():
        np.testing.assert_array_equal(array, right[place], err_msg=str(place))


@pytest.mark.parametrize("later", [{"after": after, "begun": begun} for after in (0, 1, 9) for begun in (False, True)])
@pytest.mark.parametrize("name", [None, "opt"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_of_it_comes_back(tmp_path, kind, dtype, name, later):
    """By whatever name: of the layers, of the optimizer, of master weights; before its first step, or later."""
    trained = Trained(kind, dtype, name, begun=True)
    trained.fill()
    adapter.save_checkpoint(tmp_path / "at", model=trained.model, optimizer=trained.optimizer, verify="off")
    again = Trained(kind, dtype, name, **later)
    adapter.load_checkpoint(tmp_path / "at", model=again.model, optimizer=again.optimizer)
    again.begin()
    assert_same(again.kept(), trained.kept())
    assert len(trained.kept()) >= 4 or (kind, dtype) == ("SGD", "float32")


@pytest.mark.parametrize("begun", [False, True])
def test_a_file_of_paddle_s(tmp_path, begun):
    """A state with master weights that paddle.save wrote."""
    trained = Trained("AdamW", "float16", begun=True)
    trained.fill()
    paddle.save(trained.optimizer.state_dict(), str(tmp_path / "at.pdopt"))
    again = Trained("AdamW", "float16", begun=begun)
    adapter.load_checkpoint(tmp_path / "at.pdopt", optimizer=again.optimizer)
    again.begin()
    assert_same(again.kept(), trained.kept())


def test_saved_once_more(tmp_path):
    """What was restored is what is saved next, and restored by others."""
    trained = Trained("Adam", "float16", begun=True)
    trained.fill()
    adapter.save_checkpoint(tmp_path / "one", model=trained.model, optimizer=trained.optimizer)
    between = Trained("Adam", "float16", after=1)
    adapter.load_checkpoint(tmp_path / "one", model=between.model, optimizer=between.optimizer)
    adapter.save_checkpoint(tmp_path / "two", model=between.model, optimizer=between.optimizer)
    again = Trained("Adam", "float16", after=10)
    adapter.load_checkpoint(tmp_path / "two", model=again.model, optimizer=again.optimizer)
    again.begin()
    assert_same(again.kept(), trained.kept())


@pytest.mark.parametrize(("dtype", "name"), [("float16", None), ("float32", "opt"), ("float16", "opt")])
@pytest.mark.parametrize("kind", ["SGD", "Momentum", "RMSProp"])
def test_another_kind(tmp_path, kind, dtype, name):
    """Of which paddle would drop the state without a word, or fail."""
    trained = Trained("Adam", dtype, name, begun=True)
    adapter.save_checkpoint(tmp_path / "at", model=trained.model, optimizer=trained.optimizer, verify="off")
    again = Trained(kind, dtype, name)
    with pytest.raises(UserError, match=rf"of another kind of optimizer: {kind} has no use for linear_0.w_0_.*moment1"):
        adapter.load_checkpoint(tmp_path / "at", model=again.model, optimizer=again.optimizer)


def test_another_name(tmp_path):
    """An optimizer looks for its own name only."""
    trained = Trained("Adam", name="one", begun=True)
    adapter.save_checkpoint(tmp_path / "at", model=trained.model, optimizer=trained.optimizer, verify="off")
    again = Trained("Adam", name="two")
    with pytest.raises(UserError, match=r"Adam has no use for linear_0.w_0_one_moment1_0"):
        adapter.load_checkpoint(tmp_path / "at", model=again.model, optimizer=again.optimizer)


@pytest.mark.parametrize("value", [3, np.ones(2, "float32")])
def test_a_model_whose_state_holds_more_than_tensors(tmp_path, value):
    """What is no tensor has no name, and nothing is kept for it."""

    class Model(paddle.nn.Linear):
        def __init__(self, more):
            super().__init__(4, 3)
            self.more = more

        def state_dict(self, *args, **options):
            return {**super().state_dict(*args, **options), "more": self.more}

        def set_state_dict(self, state, *args, **options):
            self.more = state["more"]
            return super().set_state_dict({name: each for name, each in state.items() if name != "more"})

    def made(more):
        model = Model(more)
        optimizer = paddle.optimizer.Adam(0.1, parameters=model.parameters())
        model(paddle.rand([2, 4])).sum().backward()
        optimizer.step()
        return model, optimizer

    (model, optimizer), (again, other) = made(value), made(value * 0)
    adapter.save_checkpoint(tmp_path / "at", model=model, optimizer=optimizer)
    adapter.load_checkpoint(tmp_path / "at", model=again, optimizer=other)
    np.testing.assert_array_equal(again.more, value)
    np.testing.assert_array_equal(again.weight.numpy(), model.weight.numpy())
    kept = [each.state_dict().values() for each in (optimizer, other)]
    for left, right in zip(*kept, strict=True):
        np.testing.assert_array_equal(left.numpy(), right.numpy())


@pytest.mark.parametrize(
    "names", [("w", "w_moment1"), ("w", "w_beta1"), ("w", "w_beta1_pow_acc"), ("w_1", "w_10", "w_1_0")]
)
def test_names_that_begin_alike(tmp_path, names):
    """A parameter called like what is kept for another one takes nothing from it."""

    class Model(paddle.nn.Layer):
        def __init__(self, names):
            super().__init__()
            for at, name in enumerate(names):
                self.add_parameter(str(at), paddle.create_parameter([2], "float32", name=name))

    def made(names):
        with paddle.utils.unique_name.guard():
            model = Model(names)
        return model, paddle.optimizer.Adam(0.1, parameters=model.parameters())

    def turn(model, optimizer):
        with paddle.utils.unique_name.guard():
            sum((each * (at + 1.5)).sum() for at, each in enumerate(model.parameters())).backward()
            optimizer.step()
            optimizer.clear_grad()

    model, optimizer = made(names)
    for _ in range(3):
        turn(model, optimizer)
    adapter.save_checkpoint(tmp_path / "at", model=model, optimizer=optimizer, verify="off")
    for later in (names, tuple(f"x{each}" for each in names)):
        again, other = made(later)
        adapter.load_checkpoint(tmp_path / "at", model=again, optimizer=other)
        turn(again, other)
        expected = dict(zip(later, names, strict=True))
        kept = {
            (what, expected[owner]): tensor.numpy()
            for what, of in other._accumulators.items()
            for owner, tensor in of.items()
        }
        adapter.load_checkpoint(tmp_path / "at", model=model, optimizer=optimizer)
        turn(model, optimizer)
        here = {(what, owner): t.numpy() for what, of in optimizer._accumulators.items() for owner, t in of.items()}
        assert_same(kept, here)


class Turned:
    """A training of two layers, of which some may be frozen."""

    def __init__(self, seed, kind=None, **options):
        paddle.seed(seed)
        self.model = paddle.nn.Sequential(paddle.nn.Linear(4, 3), paddle.nn.Linear(3, 2))
        self.optimizer = (kind or paddle.optimizer.Adam)(0.1, parameters=self.model.parameters(), **options)

    def things(self):
        return {"model": self.model, "optimizer": self.optimizer}

    def turn(self, *, frozen=(), optimizer=None):
        optimizer = optimizer or self.optimizer
        for number, layer in enumerate(self.model):
            for each in layer.parameters():
                each.stop_gradient = number in frozen
        self.model(paddle.arange(8, dtype="float32").reshape([2, 4])).square().sum().backward()
        optimizer.step()
        optimizer.clear_grad()

    def values(self):
        return [each.numpy() for each in self.model.parameters()]

    def back(self, other, path):
        """What the other one has goes into this one."""
        adapter.save_checkpoint(path, **other.things(), verify="off")
        adapter.load_checkpoint(path, **self.things())
        return self


def assert_alike(left, right):
    """They go on alike."""
    for each in (left, right):
        each.turn()
        each.turn()
    for mine, other in zip(left.values(), right.values(), strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Adam", {"amsgrad": True}),
        ("AdamW", {"amsgrad": True}),
        ("Adam", {"lazy_mode": True}),
        ("Adam", {"use_multi_tensor": True}),
        ("Momentum", {"use_multi_tensor": True}),
        ("Momentum", {"use_nesterov": True}),
        ("RMSProp", {"centered": True, "momentum": 0.9}),
        ("AdamW", {"apply_decay_param_fun": lambda name: name.endswith("w_0")}),
        ("Lamb", {"exclude_from_weight_decay_fn": lambda parameter: parameter.name.endswith("b_0")}),
    ],
)
@pytest.mark.parametrize("begun", [False, True])
def test_ways_to_set_one_up(tmp_path, kind, options, begun):
    """The training goes on as if it had not stopped."""
    left, restarted = (Turned(seed, getattr(paddle.optimizer, kind), **options) for seed in (1, 2))
    left.turn()
    left.turn()
    if begun:
        restarted.turn()
    restarted.back(left, tmp_path / "at")
    assert_alike(left, restarted)


def test_groups(tmp_path):
    """Each with a rate and a decay of its own."""

    def made(seed):
        training = Turned(seed)
        groups = [
            {"params": training.model[0].parameters(), "learning_rate": 0.5, "beta1": 0.7},
            {"params": training.model[1].parameters(), "weight_decay": 0.1},
        ]
        training.optimizer = paddle.optimizer.AdamW(0.1, parameters=groups)
        return training

    left, restarted = made(1), made(2)
    left.turn()
    left.turn()
    restarted.back(left, tmp_path / "at")
    assert_alike(left, restarted)


@pytest.mark.parametrize("frozen", [0, 1])
@pytest.mark.parametrize("begun", [False, True])
def test_a_layer_that_is_trained_later(tmp_path, frozen, begun):
    """Its first gradient comes after the restart, as when it is unfrozen at an epoch's start."""
    left, restarted = Turned(1), Turned(2)
    for _ in range(2):
        left.turn(frozen=[frozen])
    if begun:
        restarted.turn()
    restarted.back(left, tmp_path / "at")
    assert_alike(left, restarted)


def test_a_layer_that_is_frozen_meanwhile(tmp_path):
    """What was kept for it is not lost between two restarts."""
    left = Turned(1)
    left.turn()
    once = Turned(2).back(left, tmp_path / "one")
    for training in (left, once):
        training.turn(frozen=[0])
    twice = Turned(3).back(once, tmp_path / "two")
    assert_alike(left, twice)


@pytest.mark.parametrize("turns", [0, 1])
def test_back_to_before_it_was_trained(tmp_path, turns):
    """In the midst of a training: what was kept since then is forgotten."""
    left = Turned(1)
    for _ in range(turns):
        left.turn(frozen=[0])
    other = Turned(2)
    for _ in range(3):
        other.turn()
    other.back(left, tmp_path / "at")
    assert_alike(left, other)


@pytest.mark.parametrize("which", ["before", "after"])
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("options", [{}, {"use_multi_tensor": True}])
def test_another_optimizer_of_the_same_parameters(tmp_path, which, begun, options):
    """Paddle numbers the names of what is kept: one more optimizer, here or there, and they are other ones."""
    left, restarted = Turned(1, **options), Turned(2, **options)
    for training in [left] if which == "before" else [restarted]:
        training.turn(optimizer=paddle.optimizer.Adam(0.1, parameters=training.model.parameters()))
    left.turn()
    if begun:
        restarted.turn()
    restarted.back(left, tmp_path / "at")
    assert_alike(left, restarted)


@pytest.mark.parametrize(
    ("then", "now", "words"),
    [
        (("Adam", {}), ("Adam", {"amsgrad": True}), r"set up in another way: it has no linear_\d+.w_0_moment2_max"),
        (("Adam", {"amsgrad": True}), ("Adam", {}), r"way: Adam has no use for linear_\d+.w_0_moment2_max"),
        (
            ("Adam", {}),
            ("RAdam", {}),
            r"another kind of optimizer: RAdam has no use for linear_\d+.w_0_beta1_pow_acc_",
        ),
        (("Adagrad", {}), ("Adamax", {}), r"set up in another way: it has no linear_\d+.w_0_"),
    ],
)
def test_one_that_keeps_other_things(tmp_path, then, now, words):
    """It would fail in its next step."""
    left, other = (Turned(1, getattr(paddle.optimizer, kind), **options) for kind, options in (then, now))
    left.turn()
    with pytest.raises(UserError, match=words):
        other.back(left, tmp_path / "at")


@pytest.mark.parametrize(("then", "now"), [("float16", False), ("float16", True)])
def test_master_weights_that_only_one_has(tmp_path, then, now):
    """A state with them is not one without."""
    trained, again = Trained("Adam", then, begun=True), Trained("Adam", then)
    if now:
        trained, again = again, trained
        trained.optimizer._multi_precision = False
    else:
        again.optimizer._multi_precision = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained.begin()
        adapter.save_checkpoint(tmp_path / "at", model=trained.model, optimizer=trained.optimizer, verify="off")
        with pytest.raises(UserError, match="set up in another way"):
            adapter.load_checkpoint(tmp_path / "at", model=again.model, optimizer=again.optimizer)
