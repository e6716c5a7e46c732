"""Puts back what an optimizer of paddle keeps for its parameters, at once and by what it is kept for.

Paddle itself leaves that to the first steps, and goes by names: the same tensor may have got another name in another
program, a parameter that has no gradient in those steps loses what was kept for it, and one that comes later fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic_adapter.adapters.paddlepaddle.names import MASTERS, SCHEDULE, Place, name_of, parameters_of, places
from elastic_adapter.core.errors import UserError


def restore(paddle: Any, optimizer: Any, state: Mapping[str, Any]) -> None:
    """A state in terms of what things are called here. Raises UserError, or what paddle raises."""
    masters = {name: name_of(each) for name, each in state.get(MASTERS, {}).items()}
    kept = places(optimizer, state, masters.values())
    if kept is None or paddle.is_compiled_with_xpu():
        optimizer.set_state_dict(state)
        return
    wanted = {place: state[key] for key, place in kept.items()}
    if getattr(optimizer, "_use_multi_tensor", False) and wanted.keys() != _here(optimizer).keys() != set():
        # It holds them in lists of its own, which nothing can be taken from or put into.
        optimizer.set_state_dict(state)
        return
    _let_go(optimizer, wanted)
    here = _here(optimizer)
    rest = {key: state[key] for key in (SCHEDULE, MASTERS) if key in state}
    optimizer.set_state_dict({**{name_of(each): wanted[place] for place, each in here.items()}, **rest})
    if MASTERS not in state and getattr(optimizer, "_master_weights", None):
        # They are made anew, of the parameters as they are now.
        optimizer._master_weights = {}  # noqa: SLF001
    optimizer._accumulators_holder = {}  # noqa: SLF001
    owners = {owner for _, owner in wanted.keys() - here.keys()}
    parameters = [each for name, each in parameters_of(optimizer).items() if masters.get(name, name) in owners]
    if parameters:
        optimizer._create_accumulators(paddle.static.default_main_program().global_block(), parameters)  # noqa: SLF001
    made = _here(optimizer)
    _check_alike(optimizer, wanted, made)
    for key, place in kept.items():
        if place not in here:
            made[place].set_value(state[key])
            # With the number that it was saved with, as when paddle restores it.
            made[place].name = key


def _here(optimizer: Any) -> dict[Place, Any]:
    found = optimizer._accumulators.items()  # noqa: SLF001
    return {(what, owner): tensor for what, of in found for owner, tensor in of.items()}


def _let_go(optimizer: Any, wanted: Mapping[Place, Any]) -> None:
    """Whatever a state has nothing for begins anew: it comes from before that was kept."""
    kept_for = {owner for _, owner in wanted}
    for of in optimizer._accumulators.values():  # noqa: SLF001
        for owner in [each for each in of if each not in kept_for]:
            del of[owner]
    masters = {name: name_of(each) for name, each in getattr(optimizer, "_master_weights", {}).items()}
    begun: set[str] = getattr(optimizer, "_already_create_accumulator", set())
    begun -= {name for name in begun if masters.get(name, name) not in kept_for}


def _check_alike(optimizer: Any, wanted: Mapping[Place, Any], made: Mapping[Place, Any]) -> None:
    """An optimizer set up in another way keeps other things, and would fail in its next step."""
    kept_for = {owner for _, owner in wanted}
    kind = type(optimizer).__name__
    if lost := [f"{owner}_{what}" for what, owner in wanted if (what, owner) not in made]:
        raise UserError(f"it is of one that was set up in another way: {kind} has no use for {', '.join(lost[:3])}")
    if lacking := [f"{owner}_{what}" for what, owner in made if owner in kept_for and (what, owner) not in wanted]:
        raise UserError(f"it is of one that was set up in another way: it has no {', '.join(lacking[:3])}")
