"""The settings of restarts: how many, within what time, after what pause, and what each exit means."""

from __future__ import annotations

import re
from collections.abc import Mapping

from elastic_adapter.adapters.registry import Entry
from elastic_adapter.core.errors import UserError
from elastic_adapter.core.model import Level, signal_number
from elastic_adapter.core.restart import Action, Backoff, ExitRule, RestartPolicy
from elastic_adapter.launchers.settings import Given, seconds_of

_LAST_CODE = 255
_EXPECTED = "rules such as 3=fail, 10-20=restart or SIGSEGV=ignore"
# A node is checked after so many failures on it.
_CHECK_AFTER = 2


def restart_policy(values: Mapping[str, Given], entry: Entry, level: Level) -> RestartPolicy:
    window = values["restart-window"]
    crash_loop, excludes = _crash_loop(values["crash-loop"])
    return RestartPolicy(
        max_restarts=_max_restarts(values, entry, level),
        window_s=None if window.text is None else window.seconds(positive=True),
        backoff=_backoff(values["restart-backoff"]),
        free_codes=entry.restart_codes,
        rules=_rules(values["on-exit"]),
        startup_failures=values["startup-failures"].whole(0),
        startup_s=values["startup-window"].seconds(),
        crash_loop=crash_loop,
        crash_loop_excludes=excludes,
        exclude_after=values["exclude-node-after"].whole(0),
        check_after=_CHECK_AFTER if values["health-check"].text else 0,
    )


def common(policy: RestartPolicy) -> tuple[tuple[str, str], ...]:
    """What all nodes must be told alike, in one spelling."""
    backoff = policy.backoff
    return (
        ("max-restarts", str(policy.max_restarts)),
        ("restart-window", "none" if policy.window_s is None else f"{policy.window_s:g}"),
        ("restart-backoff", "none" if backoff is None else f"{backoff.first_s:g}:{backoff.longest_s:g}"),
        ("on-exit", ",".join(rule.text for rule in policy.rules) or "none"),
        ("startup-failures", str(policy.startup_failures)),
        ("startup-window", f"{policy.startup_s:g}"),
        ("crash-loop", f"{policy.crash_loop}{'=exclude-node' if policy.crash_loop_excludes else ''}"),
        ("exclude-node-after", str(policy.exclude_after)),
    )


def _max_restarts(values: Mapping[str, Given], entry: Entry, level: Level) -> int:
    given = values["max-restarts"]
    if given.text is None:
        return 0 if level == Level.OFF else entry.max_restarts
    restarts = given.whole(0)
    if restarts and level == Level.OFF:
        raise UserError(
            f"{given.where} {restarts} contradicts {values['fault-tolerance-level'].where}, by which the level is 0 "
            "(off): leave out one of them"
        )
    return restarts


def _backoff(given: Given) -> Backoff | None:
    """FIRST:LONGEST, or one pause that does not grow."""
    if given.text is None:
        return None
    times = [seconds_of(part) for part in given.text.split(":")]
    first, longest = times[0], times[-1]
    if given.text.count(":") > 1 or first is None or longest is None or first > longest:
        raise given.wrong("FIRST:LONGEST such as 1s:60s, with FIRST not above LONGEST")
    return Backoff(first, longest) if longest else None


def _crash_loop(given: Given) -> tuple[int, bool]:
    """How many failures in a row, and whether the node is excluded instead of ending the job."""
    found = re.fullmatch(r"(\d+)(=exclude-node|=fail)?", given.text or "", re.ASCII)
    limit = int(found[1]) if found else 1
    if not found or limit == 1:
        raise given.wrong("0 (off), or 2 and more failures in a row, as in 3 or 3=exclude-node")
    return limit, found[2] == "=exclude-node"


def _rules(given: Given) -> tuple[ExitRule, ...]:
    return tuple(_rule(given, item) for item in given.items())


def _rule(given: Given, item: str) -> ExitRule:
    what, _, wanted = (part.strip() for part in item.partition("="))
    actions = {action.value: action for action in Action}
    if wanted not in actions:
        raise given.wrong(_EXPECTED, f"{wanted!r} in {item!r} is none of {', '.join(actions)}")
    if number := signal_number(what):
        return ExitRule(range(0), (number,), actions[wanted], item)
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", what, re.ASCII)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if not 1 <= first <= last <= _LAST_CODE:
        raise given.wrong(_EXPECTED, f"{what!r} in {item!r} is no exit code from 1 to 255, range of them or signal")
    return ExitRule(range(first, last + 1), (), actions[wanted], item)
