"""What a framework gives, so that checkpoints can be made of its tensors. The core has no framework of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from elastic_adapter.core.checkpoint.files import Expected, Skeleton


class Group(Protocol):
    """The processes that train together, as the framework knows them. Used where another launcher started them."""

    def place(self) -> tuple[int, int] | None:
        """Rank and size; None: no group has been made."""
        ...

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on all ranks. Waits for all of them."""
        ...


class Framework(Protocol):
    """One framework. Models and optimizers are passed one at a time, wrapped or not."""

    # As manifests and orders call it.
    name: str
    model_file: str
    optimizer_file: str
    extra_file: str
    group: Group

    def rank_file(self, rank: int) -> str: ...

    def versions(self) -> dict[str, str]:
        """Of the framework and of what else may matter to whoever loads the files."""
        ...

    def skeleton(self, state: Any) -> tuple[Skeleton, list[Any]]:
        """A file without its bytes, and what belongs into its holes. Raises Refused for what could not be loaded."""
        ...

    def copy(self, pieces: Sequence[Any], into: Sequence[memoryview]) -> None:
        """Copy what belongs into the holes, from whatever device it is on, each to its place."""
        ...

    def views(self, pieces: Sequence[Any]) -> tuple[list[memoryview], object]:
        """The same as memory of this process, copied only where it is elsewhere; and what keeps it alive."""
        ...

    def model_state(self, model: Any) -> Any:
        """The state of the model itself, without wrappers of data parallelism."""
        ...

    def targets(self, model: Any) -> dict[str, Any] | None:
        """The tensors that a state can be read into directly, by name; None: this model has to be asked to load one."""
        ...

    def set_model(self, model: Any, state: Mapping[str, Any]) -> None:
        """Have the model load a state: all of it. Raises UserError where they do not fit."""
        ...

    def set_rest(self, model: Any, state: Mapping[str, Any]) -> None:
        """Have the model load what is no tensor, after the tensors were read into it."""
        ...

    def set_optimizer(self, optimizer: Any, state: Any, renamed: Mapping[str, str]) -> None:
        """Have the optimizer load a state. Raises UserError where they do not fit."""
        ...

    def check(self, thing: Any, state: Any) -> None:
        """Raises UserError where something else that is of the framework's own making would not outlive this state."""
        ...

    def renamed(self, path: str, models: Mapping[str, Any]) -> dict[str, str]:
        """What parameters are called here, by what they were called when this file was saved, where the state of an
        optimizer depends on that. The key of a model is what its tensors' names begin with in the file.
        """
        ...

    def read(self, path: str, into: Mapping[str, Any] | None = None, expected: Expected | None = None) -> Any:
        """The state of a file; tensors that are named by ``into`` are filled. Raises Damaged, Refused or Misfit."""
        ...

    def read_trusting(self, path: str) -> Any:
        """By the framework's own loader, which runs whatever the file asks for."""
        ...

    def rng(self) -> Any:
        """The states of the framework's random generators, as plain values and tensors."""
        ...

    def set_rng(self, state: Any) -> None:
        """Raises ValueError where they are none, or there are other devices now: then nothing is changed."""
        ...
