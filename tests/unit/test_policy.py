"""The settings of restarts."""

from __future__ import annotations

import signal

import pytest

from elastic_adapter.adapters.registry import find
from elastic_adapter.core.errors import UserError
from elastic_adapter.core.model import Level
from elastic_adapter.core.restart import Action, Backoff, ExitRule, RestartPolicy
from elastic_adapter.launchers.policy import restart_policy
from elastic_adapter.launchers.settings import read


def made(framework: str = "torch", **options: str) -> RestartPolicy:
    values = read({name.replace("_", "-"): text for name, text in options.items()}, {})
    return restart_policy(values, find(framework), Level.FAULT_TOLERANT)


def test_defaults() -> None:
    """Those of the core, but for what the framework's users expect."""
    assert made() == RestartPolicy()
    assert made("paddle") == RestartPolicy(3, free_codes=(101, 102))


def test_values() -> None:
    """Each reaches the policy, times in seconds."""
    policy = made(
        max_restarts="5",
        restart_window="1h",
        restart_backoff="1s:2m",
        startup_failures="0",
        startup_window="1m",
        crash_loop="3",
    )
    assert policy == RestartPolicy(5, 3600.0, Backoff(1.0, 120.0), startup_failures=0, startup_s=60.0, crash_loop=3)


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        ({"crash_loop": "2=fail"}, RestartPolicy(crash_loop=2)),
        ({"crash_loop": "3=exclude-node"}, RestartPolicy(crash_loop=3, crash_loop_excludes=True)),
        ({"exclude_node_after": "3"}, RestartPolicy(exclude_after=3)),
        ({"health_check": "nvidia-smi"}, RestartPolicy(check_after=2)),
    ],
)
def test_whom_to_blame(options: dict[str, str], policy: RestartPolicy) -> None:
    """What becomes of a node on which workers fail."""
    assert made(**options) == policy


@pytest.mark.parametrize(
    ("text", "backoff"), [("1:60", Backoff(1, 60)), ("500ms:1m", Backoff(0.5, 60)), ("5", Backoff(5, 5)), ("0", None)]
)
def test_backoff(text: str, backoff: Backoff | None) -> None:
    """Two times, or one that does not grow; none is none."""
    assert made(restart_backoff=text).backoff == backoff


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("3=fail", [ExitRule(range(3, 4), (), Action.FAIL, "3=fail")]),
        ("10-20=restart", [ExitRule(range(10, 21), (), Action.RESTART, "10-20=restart")]),
        ("SIGSEGV=ignore", [ExitRule(range(0), (signal.SIGSEGV,), Action.IGNORE, "SIGSEGV=ignore")]),
        ("segv=fail", [ExitRule(range(0), (signal.SIGSEGV,), Action.FAIL, "segv=fail")]),
        (
            "1=fail, 2=ignore",
            [ExitRule(range(1, 2), (), Action.FAIL, "1=fail"), ExitRule(range(2, 3), (), Action.IGNORE, "2=ignore")],
        ),
    ],
)
def test_rules(text: str, rules: list[ExitRule]) -> None:
    """Codes, ranges and signals, in the order given."""
    assert made(on_exit=text).rules == tuple(rules)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"restart_window": "0"}, ["--restart-window", "above 0", "'0'"]),
        ({"restart_window": "soon"}, ["--restart-window", "1h", "'soon'"]),
        ({"restart_backoff": "60:1"}, ["--restart-backoff", "FIRST:LONGEST", "'60:1'"]),
        ({"restart_backoff": "1:2:3"}, ["--restart-backoff", "'1:2:3'"]),
        ({"restart_backoff": ":"}, ["--restart-backoff", "':'"]),
        ({"on_exit": "3"}, ["--on-exit", "3=fail", "'3'"]),
        ({"on_exit": "3=explode"}, ["--on-exit", "'explode'", "restart, fail, ignore, exclude-node"]),
        ({"on_exit": "0=fail"}, ["--on-exit", "'0'", "1 to 255"]),
        ({"on_exit": "300=fail"}, ["--on-exit", "'300'"]),
        ({"on_exit": "9-3=fail"}, ["--on-exit", "'9-3'"]),
        ({"on_exit": "SIGFOO=fail"}, ["--on-exit", "'SIGFOO'"]),
        ({"startup_failures": "-1"}, ["--startup-failures", "'-1'"]),
        ({"crash_loop": "1"}, ["--crash-loop", "'1'", "2 and more"]),
        ({"crash_loop": "3=ignore"}, ["--crash-loop", "'3=ignore'", "3=exclude-node"]),
        ({"exclude_node_after": "x"}, ["--exclude-node-after", "'x'"]),
    ],
)
def test_mistakes(options: dict[str, str], parts: list[str]) -> None:
    """One line that names what, expected and got."""
    with pytest.raises(UserError) as caught:
        made(**options)
    assert "\n" not in str(caught.value)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
