"""The errors of this project, named by what the one who catches them can do."""

from __future__ import annotations

from typing import NoReturn


class ElasticError(Exception):
    """The root of all errors raised on purpose here."""


class UserError(ElasticError):
    """The user's input can't be followed. The message is one line that says what to do; exit code 2."""


class Fenced(ElasticError):
    """A commit came from a leader that is no longer the leader, or missed a generation. Step down; do not repeat it."""

    def __init__(self, epoch: int, current: int, why: str = "") -> None:
        super().__init__(why or f"leader epoch {epoch} is over: the current one is {current}")
        self.epoch = epoch
        self.current = current


class OutOfReach(ElasticError):
    """The registry does not answer. Nothing is known of it; asking again later is safe."""


class RunOver(ElasticError):
    """The run that this agent is part of is no longer the job's: its keys are gone or a newer run has begun."""

    def __init__(self, why: str, *, replaced: bool) -> None:
        super().__init__(why)
        # Whether another run was seen; else its keys are only missing, as in an etcd that lost its data.
        self.replaced = replaced


class GuardLost(ElasticError):
    """The guard process ended although the agent still needs it: the workers can't be trusted to be ours."""


class LinkBroken(ElasticError):
    """The stream to the coordinator is gone. What was sent last may or may not have arrived."""


class NotLeading(LinkBroken):
    """Somebody answers, but does not lead the job, or does so in an epoch that is over."""


class SpawnFailed(ElasticError):
    """A program could not be started at all: not found, not executable."""

    def __init__(self, program: str, errno: int, why: str) -> None:
        super().__init__(f"can't start {program}: {why}")
        self.program = program
        self.errno = errno


def assert_never(value: NoReturn) -> NoReturn:
    """The end of a ``match`` over a union: the type checker proves that it is never reached."""
    raise AssertionError(f"unhandled value: {value!r}")


def one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    """Raises UserError where a setting is none of the words that it can be."""
    if value not in known:
        raise UserError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")


def in_one_line(error: BaseException) -> str:
    """The words of somebody else's error, as part of a line of ours."""
    return " ".join(str(error).split())
