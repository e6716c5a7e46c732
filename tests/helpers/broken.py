"""The launcher with one of its safety rules switched off: broken.py RULE ARGUMENTS...

A test of a rule must fail with that rule off; else it proves nothing.
"""

import sys

from elastic_adapter.core import cluster, job, state
from elastic_adapter.core.agent import Agent
from elastic_adapter.core.coordinator import Coordinator
from elastic_adapter.core.errors import RunOver
from elastic_adapter.core.registry import EtcdRegistry
from elastic_adapter.launchers.cli import main


async def ignores(*_):
    return None


def no_isolation():
    """An agent that has lost everybody lets its workers be."""
    cluster.stop = lambda *_: None


def no_doubt():
    """A new leader takes it for granted that a world that it can't see has stopped."""
    job.doubt_until = state.doubt_until = lambda _: None


def no_severing():
    """A coordinator that has lost etcd and a member lets its own side's workers hang, and is not told otherwise."""
    Coordinator.registry_is_silent = lambda _: None
    job.Severed = type("Never", (), {})
    no_isolation()


def no_generation_watch():
    """An agent believes its stream alone, and its stream does not tell."""
    Agent._superseded = ignores
    job._is_told = lambda *_: True


def silence_is_loss():
    """A node whose lease ended is lost, although it answers."""
    give_up = Coordinator._give_up

    async def at_once(self, node):
        self._outboxes.pop(node, None)
        await give_up(self, node)

    Coordinator._give_up = at_once


def empty_is_new():
    """An etcd that lost its data is taken for one where this job never ran."""
    register = EtcdRegistry.register

    async def again(self, lease):
        try:
            return await register(self, lease)
        except RunOver:
            await self.enter({}, "token")
            return await register(self, lease)

    EtcdRegistry.register = again


RULES = {
    "empty": empty_is_new,
    "isolation": no_isolation,
    "doubt": no_doubt,
    "severing": no_severing,
    "generation-watch": no_generation_watch,
    "silence": silence_is_loss,
}

if __name__ == "__main__":
    RULES[sys.argv[1]]()
    sys.exit(main(sys.argv[2:]))
