"""Restoring into what torch's users have: other devices by default, compiled models, states of older ones."""

from __future__ import annotations

import os

import pytest

from elastic_adapter.adapters import pytorch as adapter
from elastic_adapter.core.checkpoint.files import Damaged, Refused
from elastic_adapter.core.checkpoint.manifest import folder_name
from elastic_adapter.core.errors import UserError

torch = pytest.importorskip("torch")


class Trained:
    def __init__(self, seed=0, make=torch.optim.Adam, steps=2):
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        self.optimizer = make(self.model.parameters(), lr=0.1)
        for _ in range(steps):
            self.model(torch.randn(5, 4)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def things(self):
        return {"model": self.model, "optimizer": self.optimizer}

    def values(self):
        kept = self.optimizer.state_dict()["state"]
        moments = [value for each in kept.values() for value in each.values() if value is not None]
        return [value.tolist() for value in (*self.model.state_dict().values(), *moments)]


@pytest.fixture
def elsewhere():
    """Tensors are made on another device, where nobody says on which. This one is like a GPU in that."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize("form", ["checkpointer", "folder", "file"])
def test_tensors_are_made_elsewhere_by_default(tmp_path, form, request):
    """What is read is read on the CPU all the same."""
    trained, again = Trained(1), Trained(2)
    if form == "checkpointer":
        with adapter.Checkpointer(tmp_path, **trained.things(), rng=False) as ckpt:
            ckpt.save(0, wait=True)
        request.getfixturevalue("elsewhere")
        with adapter.Checkpointer(tmp_path, **again.things(), rng=False) as ckpt:
            assert ckpt.restore() == 1
        assert os.listdir(tmp_path) == [folder_name(1, 0)]
    else:
        if form == "folder":
            adapter.save_checkpoint(tmp_path / "at", **trained.things())
        else:
            torch.save({name: each.state_dict() for name, each in trained.things().items()}, tmp_path / "at")
        request.getfixturevalue("elsewhere")
        adapter.load_checkpoint(tmp_path / "at", **again.things())
    assert again.values() == trained.values()


def test_a_type_that_this_torch_does_not_have(tmp_path, monkeypatch):
    """Whole as it is, a checkpoint is refused and keeps its name. A file that nobody vouches for may be damaged."""
    extra = {"few": torch.ones(3).to(torch.float8_e5m2)}
    with adapter.Checkpointer(tmp_path / "c", extra=extra, rng=False) as ckpt:
        ckpt.save(0, wait=True)
    torch.save(extra, tmp_path / "file")
    monkeypatch.delattr(torch, "float8_e5m2")
    why = r"extra.pt was refused: .* what this torch does not make .*float8_e5m2"
    with adapter.Checkpointer(tmp_path / "c", extra={}, rng=False) as ckpt, pytest.raises(Refused, match=why):
        ckpt.restore()
    assert os.listdir(tmp_path / "c") == [folder_name(1, 0)]
    with pytest.raises(Damaged, match="float8_e5m2"):
        adapter.load_checkpoint(tmp_path / "file", model=torch.nn.Linear(1, 1))


# Of what torch.compile imports.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("begins", ["_orig_mod.", "module.", "_orig_mod.module.", "module._orig_mod."])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_names_of_wrapped_models(tmp_path, begins, compiled, nested):
    """However the model was wrapped when it was saved by torch, and is now."""
    trained, again = Trained(1), Trained(2)
    state = {f"{begins}{name}": each for name, each in trained.model.state_dict().items()}
    torch.save({"model": state} if nested else state, tmp_path / "at.pt")
    model = torch.compile(again.model) if compiled else again.model
    adapter.load_checkpoint(tmp_path / "at.pt", model=model)
    assert all(torch.equal(each, again.model.state_dict()[name]) for name, each in trained.model.state_dict().items())


def test_a_model_whose_own_names_begin_so(tmp_path):
    """Nothing is taken away from these."""

    class Wrapping(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.module = torch.nn.Linear(2, 2)

    model, again = Wrapping(), Wrapping()
    torch.save(model.state_dict(), tmp_path / "at.pt")
    adapter.load_checkpoint(tmp_path / "at.pt", model=again)
    assert torch.equal(again.module.weight, model.module.weight)


@pytest.mark.parametrize("form", ["folder", "file"])
def test_a_momentum_that_is_not_used(tmp_path, form):
    """Older ones of torch kept None for it."""
    trained, again = Trained(1, torch.optim.SGD), Trained(2, torch.optim.SGD)
    state = trained.optimizer.state_dict()
    state["state"] = {number: {"momentum_buffer": None} for number in range(4)}
    trained.optimizer.load_state_dict(state)
    if form == "folder":
        adapter.save_checkpoint(tmp_path / "at", **trained.things())
    else:
        torch.save({name: each.state_dict() for name, each in trained.things().items()}, tmp_path / "at")
    adapter.load_checkpoint(tmp_path / "at", **again.things())
    assert again.values() == trained.values()


def test_a_scheduler_of_another_form(tmp_path):
    """One line says what does not fit."""

    def made(count):
        trained = Trained()
        parts = [torch.optim.lr_scheduler.ConstantLR(trained.optimizer) for _ in range(count)]
        scheduler = torch.optim.lr_scheduler.SequentialLR(trained.optimizer, parts, milestones=[*range(1, count)])
        return {**trained.things(), "scheduler": scheduler}

    adapter.save_checkpoint(tmp_path / "at", **made(3))
    with pytest.raises(UserError, match="the state of the scheduler does not fit: "):
        adapter.load_checkpoint(tmp_path / "at", **made(2))
