"""States of paddle's optimizers: each comes back to the parameter it was kept for, whatever things are called then."""

from __future__ import annotations

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
