"""What paddle calls the tensors of an optimizer's state: after parameters, whose names depend on what was made before.

linear_0.w_0_moment1_0 is kept for the parameter linear_0.w_0. A parameter of few bits has a master weight, and what is
kept for it is called after that: linear_0.w_0_fp32_master_0_moment1_0. An optimizer may have a name of its own, which
comes in between: linear_0.w_0_opt_moment1_0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from elastic_adapter.core.errors import UserError

# Of an optimizer's state: what is kept for no parameter.
SCHEDULE = "LR_Scheduler"
MASTERS = "master_weights"
# How names of numbers end that belong to a tensor, where that is kept in few bits.
SCALE = ".SCALE_VALUE"
_MOST_NAMED = 3

# What is kept, and for which parameter or master weight.
Place = tuple[str, str]


def parameters_of(optimizer: Any) -> dict[str, Any]:
    """The optimizer's parameters, by what they are called; none where it does not tell."""
    groups = getattr(optimizer, "_parameter_list", None) or ()
    lists = (group["params"] if isinstance(group, dict) else (group,) for group in groups)
    return {each.name: each for parameters in lists for each in parameters}


def owners(key: str, names: Collection[str]) -> Iterator[str]:
    """For what this may be kept, the longest name first: linear_0.w_0 for linear_0.w_0_moment1_0."""
    end = key.rfind("_")
    while end > 0:
        if key[:end] in names:
            yield key[:end]
        end = key.rfind("_", 0, end)


def called_anew(
    optimizer: Any, state: Mapping[str, Any], renamed: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """A state in terms of what parameters are called now; and what each of its master weights is to be called.

    Parameters outside of the model keep their names. Raises UserError where two have the same name now.
    """
    masters = {name: name_of(each) for name, each in state.get(MASTERS, {}).items()}
    anew = _masters_anew(optimizer, masters, renamed)
    names, kept = {**renamed, **anew}, _kept(optimizer) or frozenset()
    if all(then == now for then, now in names.items()):
        return dict(state), anew
    found: dict[str, Any] = {}
    for key, value in state.items():
        if key == SCHEDULE:
            found[key] = value
        elif key == MASTERS:
            found[key] = _once((renamed.get(name, name), each) for name, each in value.items())
        else:
            found |= _once([(_anew(key, names, kept), value)], found)
    return found, anew


def _masters_anew(optimizer: Any, masters: Mapping[str, str], renamed: Mapping[str, str]) -> dict[str, str]:
    """What master weights are to be called: as those that the optimizer has, or else after their parameters."""
    here = getattr(optimizer, "_master_weights", None) or {}
    found: dict[str, str] = {}
    for parameter, name in masters.items():
        now = renamed.get(parameter, parameter)
        if now in here:
            found[name] = here[now].name
        else:
            found[name] = now + name[len(parameter) :] if name.startswith(parameter) else name
    return {then: now for then, now in found.items() if then}


def _anew(key: str, names: Mapping[str, str], kept: Collection[str]) -> str:
    """linear_7.w_0_moment1_0 for linear_0.w_0_moment1_0. The longest name counts after which comes what is kept."""
    place = _place(key, names, kept)
    owner = place[1] if place is not None else next(owners(key, names), None)
    return key if owner is None else names[owner] + key[len(owner) :]


def _once(pairs: Iterable[tuple[str, Any]], before: Collection[str] = ()) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found or name in before:
            raise UserError(
                "the optimizer does not take this state: "
                f"two parameters are called {name} now: one of them is no parameter of the model"
            )
        found[name] = value
    return found


def strangers(optimizer: Any, state: Mapping[str, Any]) -> list[str]:
    """Some keys of a state that belong to no parameter of the optimizer, which would not say so."""
    if not (parameters := parameters_of(optimizer)):
        return []
    tensors = (key for key, value in state.items() if hasattr(value, "shape"))
    return [key for key in tensors if not any(owners(key, parameters))][:_MOST_NAMED]


def of_others(optimizer: Any, state: Mapping[str, Any], masters: Iterable[str]) -> list[str]:
    """Some keys that no optimizer of this kind has: paddle drops them, or fails in the next step."""
    if (kept := _kept(optimizer)) is None:
        return []
    names = {*parameters_of(optimizer), *masters}
    known = (key for key in state if any(owners(key, names)) and not key.endswith(SCALE))
    return [key for key in known if _place(key, names, kept) is None][:_MOST_NAMED]


def places(optimizer: Any, state: Mapping[str, Any], masters: Iterable[str]) -> dict[str, Place] | None:
    """What each tensor of a state is, by its key; None: not all of it can be told."""
    if not (kept := _kept(optimizer)):
        return None
    names = {*parameters_of(optimizer), *masters}
    found = {key: _place(key, names, kept) for key in state if key not in (SCHEDULE, MASTERS)}
    known = {key: place for key, place in found.items() if place is not None}
    return known if len(known) == len(found) else None


def check_some_known(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Where only names tell what a state belongs to, some have to be known here: else nothing of it is restored."""
    parameters = parameters_of(optimizer)
    keys = [key for key in state if key not in (SCHEDULE, MASTERS)]
    if not parameters or not keys:
        return
    own = optimizer.state_dict()
    if not any(any(owners(key, parameters)) or key in own for key in keys):
        raise UserError(
            f"the optimizer does not take this state: it has {', '.join(keys[:_MOST_NAMED])}, and nothing of any "
            f"parameter that the optimizer has, such as {next(iter(parameters))}"
        )


def _place(key: str, names: Collection[str], kept: Collection[str]) -> Place | None:
    """moment1 and linear_0.w_0 for linear_0.w_0_moment1_0. The number says how often that name was given before."""
    body, _, number = key.rpartition("_")
    if number.isdecimal():
        for owner in owners(key, names):
            if (what := body[len(owner) + 1 :]) in kept:
                return what, owner
    return None


def _kept(optimizer: Any) -> frozenset[str] | None:
    """What an optimizer of this kind may keep for a parameter; None: paddle does not tell."""
    kind = type(optimizer)
    if not kind.__module__.startswith("paddle.optimizer."):
        return None
    own = getattr(optimizer, "_name", None)
    begin = "" if own is None else f"{own}_"
    # _moment1_acc_str, _moment2_acc_max_str
    told = (name for name in dir(kind) if "_acc_" in name and name.endswith("_str"))
    return frozenset(f"{begin}{getattr(kind, name)}" for name in told)


def name_of(value: Any) -> str:
    """What a tensor is called; nothing else has a name."""
    name = getattr(value, "name", "")
    return name if isinstance(name, str) else ""
