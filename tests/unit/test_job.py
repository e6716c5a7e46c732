"""The job's machine, told as stories: what happens to a job, and where it is then.

``Story.play`` explains the scripts. The referee of ``elastic_adapter.core.testing`` checks every step of them.
"""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from elastic_adapter.core.events import (
    Commit,
    Conclude,
    Keep,
    MemberJoined,
    MemberLeaving,
    MemberLost,
    PortsOffered,
    Send,
    StopRequested,
    Tell,
    TimePassed,
    WorkerErred,
    WorkerExited,
)
from elastic_adapter.core.job import step
from elastic_adapter.core.model import (
    Check,
    Drain,
    Dump,
    Explain,
    Failed,
    Halt,
    Hold,
    Level,
    Run,
    Stopped,
    Succeeded,
    Wait,
)
from elastic_adapter.core.ports import Record
from elastic_adapter.core.restart import Backoff, History
from elastic_adapter.core.state import Draining, Finished, Gathering, Holding, Running, deadline, resume
from elastic_adapter.core.testing import Story, committed, exit_of, job_config, member, outline, sent, world_of

OFF, TOLERANT, ELASTIC = Level.OFF, Level.FAULT_TOLERANT, Level.ELASTIC


def story(level, nodes, script, **settings):
    told = Story(job_config(level, nodes, **settings))
    told.play(script)
    return told


def reason_of(told):
    return told.job.phase.outcome.reason


@pytest.mark.parametrize("level", Level)
@pytest.mark.parametrize(
    ("nodes", "script", "end"),
    [
        pytest.param((1, 1), "join a", "running 1: a", id="one node starts at once"),
        pytest.param((2, 2), "join a", "gathering: a", id="below the minimum it waits"),
        pytest.param((2, 2), "join a; wait 1000", "gathering: a", id="below the minimum it waits without limit"),
        pytest.param((1, 2), "join b a", "running 1: b a", id="the maximum starts at once, in the order of joining"),
        pytest.param((1, 2), "join a", "gathering: a", id="between minimum and maximum it waits for more"),
        pytest.param((1, 2), "join a; wait 2.9", "gathering: a", id="the quiet time is not over"),
        pytest.param((1, 2), "join a; wait 3", "running 1: a", id="the quiet time is over"),
        pytest.param(
            (1, 3), "join a; wait 2; join b; wait 2", "gathering: a b", id="a join begins the quiet time anew"
        ),
        pytest.param((1, 3), "join a; wait 2; join b; wait 3", "running 1: a b", id="two nodes make one world"),
        pytest.param((2, 3), "join a b; lose b; wait 9", "gathering: a", id="a node that is lost again does not count"),
        pytest.param((2, 2), "join a; leave a", "stopped 143", id="the only node leaves before the start"),
        pytest.param(
            (2, 3), "join a b; leave a; join c; wait 3", "running 1: b c", id="a node leaves before the start"
        ),
        pytest.param((1, 1), "join a; ok 0", "succeeded 0", id="all workers end well"),
        pytest.param((2, 2), "join a b; ok 0", "running 1: a b", id="some workers end well"),
        pytest.param((2, 2), "join a b; ok 0; repeat", "running 1: a b", id="an end heard twice counts once"),
        pytest.param((2, 2), "join a b; ok 1 0", "succeeded 0", id="workers end well in any order"),
        pytest.param((2, 2), "join a b; ok 0; lose a", "running 1: a b", id="a node that has finished may go"),
        pytest.param((2, 2), "join a b; ok 0; lose a; ok 1", "succeeded 0", id="success without a node that finished"),
        pytest.param((2, 2), "join a b; ok 0; lose a; join a@1", "running 1: a b", id="a finished node may come back"),
        pytest.param((1, 1), "join a; ok 0@7", "running 1: a", id="an exit of a generation to come is dropped"),
        pytest.param((1, 1), "join a; fail 5", "running 1: a", id="an exit of a rank that does not exist is dropped"),
        pytest.param((1, 1), "join a; lose x; leave x; offer x", "running 1: a", id="strangers change nothing"),
        pytest.param((1, 1), "fail 0", "gathering:", id="an exit before the start is dropped"),
        pytest.param((1, 1), "join a; drained a", "running 1: a", id="drained without a drain is dropped"),
        pytest.param((1, 1), "join a; join a@1", "running 1: a", id="an agent that comes again changes nothing"),
        pytest.param((1, 1), "join a; stop a", "stopped 130", id="the user interrupts"),
        pytest.param((1, 1), "stop a", "stopped 130", id="the user interrupts before the start"),
        pytest.param((1, 1), "join a; leave a", "stopped 143", id="the last member leaves"),
    ],
)
def test_every_level(level, nodes, script, end):
    """Until something is lost, the levels do not differ."""
    assert outline(story(level, nodes, script).job) == end


@pytest.mark.parametrize(
    ("nodes", "script", "end"),
    [
        pytest.param((1, 1), "join a; fail 0:7", "failed 7", id="a worker fails"),
        pytest.param((1, 1), "join a; kill 0", "failed 137", id="a worker is killed"),
        pytest.param((2, 2), "join a b; lose b", "failed 1", id="a node is lost"),
        pytest.param((2, 2), "join a b; leave b", "failed 1", id="a node leaves"),
        pytest.param((2, 2), "join a b; join b", "failed 1", id="an agent comes back without its workers"),
        pytest.param((1, 2), "join a; wait 3; join b; wait 99", "running 1: a", id="nobody joins after the start"),
    ],
)
def test_level_0(nodes, script, end):
    """At level 0 the first loss ends the job, and nobody joins after the start."""
    assert outline(story(OFF, nodes, script).job) == end


def test_refusal_says_why():
    """At level 0 a node that comes too late is halted with a reason, and is no member."""
    told = story(OFF, (1, 1), "join a; join b")
    ((node, directive),) = sent(told.commands)
    assert (node, directive.outcome.exit_code) == ("b", 1)
    assert "nobody joins after the start" in directive.outcome.reason
    assert told.job.member("b") is None


@pytest.mark.parametrize("level", [TOLERANT, ELASTIC])
@pytest.mark.parametrize(
    ("nodes", "script", "end"),
    [
        pytest.param((1, 1), "join a; fail 0", "running 2: a, 1 charged", id="a worker fails"),
        pytest.param((2, 2), "join a b; kill 1", "running 2: a b, 1 charged", id="a worker is killed"),
        pytest.param((1, 1), "join a; fail 0; repeat", "running 2: a, 1 charged", id="a failure heard twice"),
        pytest.param((2, 2), "join a b; fail 0; fail 1@1", "running 2: a b, 1 charged", id="a late exit is dropped"),
        pytest.param((2, 2), "join a b; ok 0; fail 1", "running 2: a b, 1 charged", id="all run again after a failure"),
        pytest.param(
            (2, 2), "join a b; ok 0; fail 1; ok 1", "running 2: a b, 1 charged", id="ends are of one generation"
        ),
        pytest.param((1, 1), "join a; fail 0 0", "running 3: a, 2 charged", id="the last restart that is allowed"),
        pytest.param((1, 1), "join a; fail 0 0 0:9", "failed 9", id="the budget is used up"),
        pytest.param((1, 1), "join a; fail 0; ok 0", "succeeded 0", id="success after a restart"),
        pytest.param((2, 2), "join a b; join b@1", "running 1: a b", id="the same agent comes with its workers"),
        pytest.param((2, 2), "join a b; join b", "running 2: a b", id="an agent comes back without its workers"),
        pytest.param(
            (2, 2), "join a b; fail 0; join b@1", "running 3: a b, 1 charged", id="it comes with older workers"
        ),
        pytest.param(
            (2, 2), "join a b; ok 1; join b", "running 1: a b", id="an agent comes back, its workers had finished"
        ),
        pytest.param((2, 2), "join a b; lose b", "holding 1: a b", id="a node is lost, too few are left"),
        pytest.param((2, 2), "join a b; lose b; repeat", "holding 1: a b", id="a loss heard twice"),
        pytest.param((2, 2), "join a b; leave b", "holding 1: a b", id="a node leaves, too few are left"),
        pytest.param((2, 2), "join a b; lose b; wait 9999", "holding 1: a b", id="it holds without limit"),
        pytest.param((2, 2), "join a b; lose b; fail 0", "holding 1: a b", id="collateral of a loss is not charged"),
        pytest.param((2, 2), "join a b; lose b; ok 0", "holding 1: a b", id="an exit while holding is dropped"),
        pytest.param(
            (2, 2), "join a b; lose a; join c", "running 2: c b", id="a replacement takes the lost one's rank"
        ),
        pytest.param((2, 2), "join a b; lose b; join b", "running 2: a b", id="the lost one comes back to its place"),
        pytest.param((2, 2), "join a b; lose a b; join b c", "running 2: c b", id="all are lost, others come"),
        pytest.param((2, 2), "join a b c; wait 99", "running 1: a b", id="beyond the maximum a node is spare"),
        pytest.param((2, 2), "join a b c; lose a", "running 2: c b", id="a spare takes over at once"),
        pytest.param((2, 2), "join a b c d; lose a", "running 2: c b", id="spares take over in the order of joining"),
        pytest.param((2, 2), "join a b c; lose c a", "holding 1: a b", id="a spare that is lost can't take over"),
        pytest.param((2, 2), "join a b c; leave a", "running 2: c b", id="a spare takes over for one that leaves"),
        pytest.param((2, 2), "join a b; lose b; leave a", "stopped 143", id="the last one left leaves"),
        pytest.param(
            (2, 2), "join a b; ok 0; lose a; fail 1", "holding 1: a b, 1 charged", id="one that finished is missed"
        ),
        pytest.param(
            (2, 2), "join a b; ok 0; lose a; fail 1; join c", "running 2: c b, 1 charged", id="the charge comes with it"
        ),
    ],
)
def test_levels_1_and_2(level, nodes, script, end):
    """From level 1 on, failures are charged to the budget, and losses of nodes are made up for without charge."""
    assert outline(story(level, nodes, script, max_restarts=2).job) == end


@pytest.mark.parametrize(
    ("nodes", "script", "end"),
    [
        pytest.param((1, 2), "join a b; lose b", "holding 1: a b", id="the minimum is not enough: the size stays"),
        pytest.param((1, 2), "join a; wait 3; join b; wait 99", "running 1: a", id="a newcomer is spare"),
        pytest.param((1, 2), "join a; wait 3; join b; lose a", "running 2: b", id="a newcomer takes over"),
        pytest.param((1, 2), "join a; wait 3; join b; fail 0", "running 2: a, 1 charged", id="no growth at a restart"),
    ],
)
def test_level_1(nodes, script, end):
    """At level 1 all worlds have the size of the first."""
    assert outline(story(TOLERANT, nodes, script, max_restarts=2).job) == end


GROWTH = "join a; wait 3; join b; wait 3"


@pytest.mark.parametrize(
    ("nodes", "script", "end"),
    [
        pytest.param((1, 2), "join a b; lose b", "running 2: a", id="survivors go on at once"),
        pytest.param((1, 2), "join a b; lose a", "running 2: b", id="another node becomes the first"),
        pytest.param((1, 3), "join a b c; lose b", "running 2: a c", id="survivors keep their order"),
        pytest.param((1, 2), "join a b; leave b", "running 2: a", id="survivors of a departure go on at once"),
        pytest.param((2, 3), "join a b c; lose c b", "holding 2: a b", id="below the minimum they hold"),
        pytest.param((2, 3), "join a b c; lose c b; join d", "running 3: a d", id="they hold until they are enough"),
        pytest.param((1, 2), "join a; wait 3; join b", "running 1: a", id="a newcomer waits for the quiet time"),
        pytest.param((1, 2), GROWTH, "draining 1: a", id="then the world drains"),
        pytest.param((1, 2), f"{GROWTH}; drained a", "running 2: a b", id="drained: the newcomer is in"),
        pytest.param((1, 2), f"{GROWTH}; drained a@0", "draining 1: a", id="drained: but of another generation"),
        pytest.param((1, 2), f"{GROWTH}; drained b", "draining 1: a", id="drained: but not one of the world"),
        pytest.param((1, 2), f"{GROWTH}; wait 29", "draining 1: a", id="the time to drain is not over"),
        pytest.param((1, 2), f"{GROWTH}; wait 30", "running 2: a b", id="the time to drain is over"),
        pytest.param((1, 2), f"{GROWTH}; fail 0", "draining 1: a", id="a failure while draining is collateral"),
        pytest.param((1, 2), f"{GROWTH}; ok 0", "succeeded 0", id="the work ends while draining"),
        pytest.param((1, 2), f"{GROWTH}; lose a", "running 2: b", id="a node is lost while draining"),
        pytest.param((1, 2), f"{GROWTH}; lose b; drained a", "running 2: a", id="the newcomer is lost while draining"),
        pytest.param((1, 3), f"{GROWTH}; join c; drained a", "running 2: a b c", id="one more comes while draining"),
        pytest.param((1, 2), f"{GROWTH}; join a", "running 2: a b", id="an agent loses its workers while draining"),
        pytest.param(
            (1, 3), "join a; wait 3; join b; wait 2; join c; wait 2", "running 1: a", id="newcomers wait for each other"
        ),
        pytest.param(
            (1, 3),
            "join a; wait 3; join b; wait 2; join c; wait 3; drained a",
            "running 2: a b c",
            id="ten joins, one world",
        ),
        pytest.param((1, 2), "join a; wait 3; join b; lose b; wait 99", "running 1: a", id="a newcomer goes again"),
        pytest.param((1, 2), "join a; wait 3; join b; leave b; wait 99", "running 1: a", id="a newcomer leaves again"),
        pytest.param(
            (1, 3), "join a; wait 3; join b c; lose b; wait 3; drained a", "running 2: a c", id="one of two goes again"
        ),
        pytest.param((1, 2), "join a; wait 3; join b; fail 0", "running 2: a b, 1 charged", id="a restart lets it in"),
        pytest.param((2, 3), "join a b; wait 3; join c; lose a", "running 2: c b", id="a loss lets it in"),
        pytest.param(
            (2, 3), "join a b; wait 3; ok 0; join c; wait 99", "running 1: a b", id="too late: a rank has finished"
        ),
        pytest.param(
            (2, 3), "join a b; wait 3; join c; ok 0; wait 99", "running 1: a b", id="too late: one finishes meanwhile"
        ),
    ],
)
def test_level_2(nodes, script, end):
    """At level 2 the world follows the nodes between minimum and maximum."""
    assert outline(story(ELASTIC, nodes, script, max_restarts=2).job) == end


@pytest.mark.parametrize(
    ("script", "end"),
    [
        pytest.param("join a b; lose b; wait 59", "holding 1: a b", id="not over"),
        pytest.param("join a b; lose b; wait 60", "failed 1", id="over"),
        pytest.param("join a b; lose b; wait 59; join c; wait 60", "running 2: a c", id="a replacement came in time"),
        pytest.param("join a b; lose b; wait 30; lose a; wait 30", "failed 1", id="counted from the first loss"),
        pytest.param("join a; wait 9999", "gathering: a", id="the first world is waited for without limit"),
    ],
)
def test_hold_timeout(script, end):
    """A hold timeout limits how long survivors wait for a replacement."""
    assert outline(story(TOLERANT, (2, 2), script, hold_timeout_s=60.0).job) == end


@pytest.mark.parametrize(
    ("nodes", "script", "end"),
    [
        pytest.param((1, 1), "join-without-ports a", "gathering: a", id="no port, no first world"),
        pytest.param((1, 1), "join-without-ports a; offer a", "running 1: a", id="the offer starts it"),
        pytest.param(
            (1, 2), "join-without-ports a; wait 9; offer a", "running 1: a", id="an offer after the quiet time"
        ),
        pytest.param((2, 2), "join a; join-without-ports b", "running 1: a b", id="only the first needs a port"),
        pytest.param(
            (2, 2), "join-without-ports a; join b; offer b", "gathering: a b", id="another's offer does not help"
        ),
        pytest.param(
            (1, 1), "join-without-ports a; offer a; fail 0", "holding 1: a, 1 charged", id="no port, no next world"
        ),
        pytest.param(
            (1, 1),
            "join-without-ports a; offer a; fail 0; offer a",
            "running 2: a, 1 charged",
            id="the offer goes on with it",
        ),
        pytest.param(
            (1, 1), "join-without-ports a; join b; lose a", "running 1: b", id="the one without a port is lost"
        ),
        pytest.param(
            (1, 1), "join-without-ports a; join b; leave a", "running 1: b", id="the one without a port leaves"
        ),
        pytest.param(
            (1, 2),
            "join-without-ports a; join b; offer a; join c; lose b a",
            "running 2: c",
            id="the one without a port is lost while holding",
        ),
    ],
)
def test_ports(nodes, script, end):
    """A world is formed only with a port that its first node offered."""
    assert outline(story(ELASTIC, nodes, script, max_restarts=2).job) == end


def test_each_generation_takes_a_fresh_port():
    """The master's ports of consecutive generations differ, in the order in which they were offered."""
    told = Story(job_config(max_restarts=2))
    told.tell(MemberJoined(member("a", ports=(1, 2, 3))))
    ports = [told.job.world.master.port]
    for _ in range(2):
        told.exit(0, 1)
        ports.append(told.job.world.master.port)
    assert ports == [1, 2, 3]


def test_an_offer_that_crossed_the_world_does_not_bring_its_port_back():
    """The port of the world that runs is no offer of its own node; on another node the number is another port."""
    told = Story(job_config(ELASTIC, (2, 2)))
    told.tell(MemberJoined(member("a", order=1, ports=(1, 2))))
    told.tell(MemberJoined(member("b", order=2)))
    told.tell(PortsOffered("a", (1, 2)))
    told.tell(PortsOffered("b", (1, 3)))
    assert [each.ports for each in told.job.members] == [(2,), (1, 3)]


def test_a_chosen_port_is_taken_again():
    """An agent with one port that the user chose offers it again once its workers are stopped."""
    told = Story(job_config(max_restarts=1))
    told.job, _ = step(told.job, MemberJoined(member("a", ports=(7,))), 0.0)
    told.job, _ = step(told.job, WorkerExited(exit_of(0)), 0.0)
    assert isinstance(told.job.phase, Holding)
    told.job, _ = step(told.job, PortsOffered("a", (7,), seen=1), 0.0)
    assert (outline(told.job), told.job.world.master.port) == ("running 2: a, 1 charged", 7)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("join a b", "generation 1: 2 workers on 2 node(s): 2 of 2 nodes are here"),
        ("join a b c; lose c", "node c is lost: its stream broke"),
        ("join a; lose a", "node a is lost: its stream broke"),
        ("join a b; ok 1; lose b", "node b is lost: its stream broke; its workers had finished"),
        ("join a b; lose a b", "holding: node b is lost: its stream broke; 0 of at least 1 nodes are here"),
        ("join a b; lose a b; join-without-ports c; lose c", "node c is lost: its stream broke"),
    ],
)
def test_the_log_says_what_changed(script, words):
    """A person who reads the log learns of every change, once."""
    told = story(ELASTIC, (1, 2), script)
    assert [command.reason for command in told.commands if isinstance(command, Tell)] == [words]


@pytest.mark.parametrize(
    ("script", "told"),
    [
        pytest.param(
            "join a b c; join d", {"d": "generation 1 runs on 3 nodes; this one waits as a spare"}, id="spare"
        ),
        pytest.param(
            "join a b; wait 3; join-cold c",
            {"c": "generation 1 runs on 2 nodes, and takes this one in when it is ready"},
            id="newcomer",
        ),
        pytest.param(
            "join a b; wait 3; ok 0; join c",
            {"c": "generation 1 runs on 2 nodes; this one waits as a spare"},
            id="newcomer at the end of the work",
        ),
    ],
)
def test_who_waits_is_told_what_for(script, told):
    """Nobody sits before a silent terminal."""
    waiting = story(ELASTIC, (2, 3), script)
    assert {node: each.reason for node, each in sent(waiting.commands) if isinstance(each, Wait)} == told


def test_those_who_gather_are_told_what_for_now_and_then():
    """Not at once, since most jobs are complete within seconds; then every minute."""
    told = story(ELASTIC, (2, 3), "join a")
    for due in (5.0, 65.0, 125.0):
        told.pass_deadline()
        assert told.now == due
        assert told.commands == (Send("a", Wait("1 of at least 2 nodes are here")),)


def test_the_log_says_that_a_world_drains():
    """A person who reads the log learns for whom a world drains."""
    told = story(ELASTIC, (1, 2), "join a; wait 3; join b", quiet_s=0.0)
    assert told.commands[0] == Tell("generation 1 drains: b joined", "drain")


def test_the_log_says_who_was_refused():
    """A person who reads the log learns who was refused."""
    told = story(OFF, (1, 1), "join a; join b")
    assert told.commands[-1] == Tell("node b is refused: at fault-tolerance level 0 nobody joins after the start")


def test_a_world_is_committed_told_and_sent_in_this_order():
    """A world is the truth before anybody hears of it, and every node hears of its own part."""
    told = story(TOLERANT, (2, 2), "join a b")
    world = told.job.world
    assert [type(command) for command in told.commands] == [Commit, Tell, Send, Send]
    assert sent(told.commands) == (("a", Run(world.assignment("a"))), ("b", Run(world.assignment("b"))))


def test_the_charge_is_committed_with_the_world():
    """The restart that a failure costs and the world that it leads to are one commit."""
    told = story(TOLERANT, (1, 1), "join a; wait 5; fail 0", max_restarts=2)
    (commit,) = (command for command in told.commands if isinstance(command, Commit))
    assert (commit.history.charged, commit.world.restart_count) == ((5.0,), 1)


def test_a_reconnect_is_answered_with_nothing():
    """An agent that comes again with the workers of the world is not disturbed."""
    assert story(TOLERANT, (2, 2), "join a b; join a@1").commands == ()


def test_a_reconnect_keeps_the_place_in_the_queue():
    """An agent that comes again is not behind those who came meanwhile."""
    told = story(TOLERANT, (2, 2), "join a b c d; join c; lose a")
    assert told.job.world.nodes == ("c", "b")


def test_survivors_are_told_to_hold():
    """Those who are left stop their workers, and hear why."""
    told = story(TOLERANT, (3, 3), "join a b c; lose b")
    reason = "node b is lost: its stream broke; 2 of at least 3 nodes are here"
    assert sent(told.commands) == (("a", Hold(reason)), ("c", Hold(reason)))


def test_the_world_is_told_to_drain():
    """Only those who run workers drain, and they hear how long they have."""
    told = story(ELASTIC, (2, 3), "join a b; wait 3; join c", drain_s=12.0)
    told.now += 3
    told.tell(TimePassed())
    drain = Drain(generation=1, grace_s=12.0, reason="c joined")
    assert sent(told.commands) == (("a", drain), ("b", drain))


def test_everybody_is_told_the_end():
    """Spares hear of the end too, after it is concluded."""
    told = story(TOLERANT, (1, 1), "join a b; ok 0")
    halt = Halt(Succeeded())
    assert told.commands == (Conclude(Succeeded()), Send("a", halt), Send("b", halt))


def test_one_that_leaves_is_let_go_and_not_charged():
    """One that leaves is halted as stopped, after the others have their next world."""
    told = story(ELASTIC, (1, 2), "join a b; leave b", max_restarts=1)
    stopped = Stopped("node b leaves (SIGTERM)", signal.SIGTERM, alone=True)
    assert [node for node, _ in sent(told.commands)] == ["a", "b"]
    assert sent(told.commands)[-1] == ("b", Halt(stopped))
    assert told.job.history.count == 0


def test_the_failure_that_ends_the_job_is_kept():
    """The outcome names the worker, its code and the budget, and carries the exit itself."""
    told = story(TOLERANT, (2, 2), "join a b; fail 1; fail 1:7", max_restarts=1)
    outcome = told.job.phase.outcome
    assert outcome.reason == "rank 1 on b exited with code 7; all 1 restarts are used up"
    assert (outcome.first.rank, outcome.first.generation, outcome.exit_code) == (1, 2, 7)


@pytest.mark.parametrize(
    ("level", "nodes", "script", "words"),
    [
        (OFF, (1, 1), "join a; fail 0:3", "rank 0 on a exited with code 3; fault tolerance is off (level 0)"),
        (OFF, (2, 2), "join a b; lose b", "node b is lost: its stream broke; fault tolerance is off (level 0)"),
        (TOLERANT, (1, 1), "join a; kill 0", "rank 0 on a was killed by SIGKILL; no restarts are allowed"),
        (TOLERANT, (2, 2), "join a b; lose b; wait 60", "no replacement came in 60 s: node b is lost"),
        (TOLERANT, (1, 1), "join a; stop a", "SIGINT on a"),
        (TOLERANT, (1, 1), "join a; leave a", "node a leaves (SIGTERM)"),
        (TOLERANT, (1, 1), "join a; ok 0", "all workers ended with code 0"),
    ],
)
def test_the_end_has_a_reason(level, nodes, script, words):
    """Whoever reads the outcome at three in the morning reads a sentence."""
    assert reason_of(story(level, nodes, script, hold_timeout_s=60.0)).startswith(words)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("join a b", "2 of 2 nodes are here"),
        ("join a; wait 3", "1 nodes are here and none joined for 3 s"),
        ("join a b; fail 0", "rank 0 on a exited with code 1; restart 1 of 2"),
        ("join a b; lose b", "node b is lost: its stream broke"),
        ("join a b; leave b", "node b leaves (SIGTERM)"),
        ("join a b; join b", "node b came back without its workers"),
        ("join a; wait 3; join b; wait 33", "b joined"),
    ],
)
def test_a_world_has_a_reason(script, words):
    """A world says what led to it."""
    assert story(ELASTIC, (1, 2), script, max_restarts=2).job.world.reason == words


def test_a_reason_does_not_grow():
    """However often the machine looks again while it holds, the reason is one cause and one state."""
    told = story(TOLERANT, (3, 3), "join a b c; lose a b; offer c; offer c; join d")
    assert told.job.phase.reason == "node a is lost: its stream broke; 2 of at least 3 nodes are here"


@pytest.mark.parametrize(
    ("outcome", "script"),
    [
        (Succeeded, "join a; ok 0"),
        (Failed, "join a; fail 0"),
        (Stopped, "join a; stop a"),
    ],
)
def test_the_end_is_final(outcome, script):
    """Nothing that is heard after the end changes it; whoever joins is told."""
    told = story(TOLERANT, (1, 1), script)
    before = told.job
    told.play("join b c; lose a; leave b; offer a; fail 0; ok 0; drained a; stop a; wait 999; lose b")
    assert told.job == before
    assert isinstance(told.job.phase.outcome, outcome)
    told.join("z")
    assert told.commands == (Send("z", Halt(before.phase.outcome)),)


@pytest.mark.parametrize(
    ("script", "phase", "due"),
    [
        pytest.param("wait 1", Gathering, None, id="nobody is here"),
        pytest.param("wait 1; join a", Gathering, 4.0, id="the quiet time"),
        pytest.param("wait 4; join a", Gathering, 5.0, id="what is waited for is said within the quiet time"),
        pytest.param(
            "wait 1; join-without-ports a", Gathering, 5.0, id="a port is missing: what is waited for is said"
        ),
        pytest.param("join a b", Running, None, id="all is well"),
        pytest.param("join a; wait 5; join b", Running, 8.0, id="the quiet time of a newcomer"),
        pytest.param("join a; wait 5; join b; wait 5", Draining, 38.0, id="the time to drain"),
        pytest.param("join a b; wait 5; lose a b", Holding, 65.0, id="the hold timeout"),
        pytest.param("join a; stop a", Finished, None, id="the end"),
    ],
)
def test_deadline(script, phase, due):
    """The machine says when it wants to be asked again, and only where time alone changes something."""
    told = story(ELASTIC, (1, 2), script, hold_timeout_s=60.0)
    assert isinstance(told.job.phase, phase)
    assert deadline(told.job) == due


def test_ranks_follow_the_slots():
    """A node has as many ranks as it has slots, one after the other."""
    told = Story(job_config(TOLERANT, (2, 2)))
    told.join("a", slots=2)
    told.join("b", slots=3)
    (world,) = committed(told.commands)
    assert (world.world_size, world.ranks("a"), world.ranks("b")) == (5, {0, 1}, {2, 3, 4})


def test_a_stop_names_its_signal():
    """The code of a job that was stopped is 128 + the signal's number."""
    told = story(TOLERANT, (1, 1), "join a")
    told.tell(StopRequested("a", signal.SIGQUIT))
    assert outline(told.job) == "stopped 131"


@pytest.mark.parametrize(
    ("nodes", "script", "end"),
    [
        pytest.param((2, 3), "join a b c; hush c", "running 1: a b c", id="a silent node is waited for"),
        pytest.param((2, 3), "join a b c; hush c; join c@1", "running 1: a b c", id="it comes back with its workers"),
        pytest.param((2, 3), "join a b c; hush c; join c", "running 2: a b c", id="it comes back without its workers"),
        pytest.param((2, 3), "join a b c; hush c; lose c", "running 2: a b", id="it is found dead"),
        pytest.param((2, 3), "join a b c; hush c; give-up c", "running 2: a b", id="its lease ends, others are here"),
        pytest.param(
            (2, 3), "join a b c; hush c; fail 0", "holding 1: a b c, 1 charged", id="a failure waits for the silent one"
        ),
        pytest.param(
            (2, 3), "join a b c; hush c; fail 0; join c@1", "running 2: a b c, 1 charged", id="and goes on with it"
        ),
        pytest.param((2, 3), "join a b c; hush c; fail 0; give-up c", "running 2: a b, 1 charged", id="or without it"),
        pytest.param((1, 2), "join a b; hush a b; give-up a b", "holding 1: a b", id="nobody is left to ask"),
        pytest.param(
            (1, 2), "join a b; hush a b; give-up a b; join c", "holding 1: a b", id="a stranger waits for the cut-off"
        ),
        pytest.param(
            (1, 2), "join a b; hush a b; give-up a b; join c; wait 604", "holding 1: a b", id="for the whole time"
        ),
        pytest.param(
            (1, 2), "join a b; hush a b; give-up a b; join c; wait 605", "running 2: c", id="and goes on after it"
        ),
        pytest.param(
            (1, 2),
            "join a b; hush a b; give-up a; wait 605; give-up b; join c",
            "running 2: c",
            id="one whose time is over has stopped, whoever else is cut off",
        ),
        pytest.param(
            (1, 2), "join a b; hush a b; give-up a; lose b; join c", "running 2: c", id="a dead member ends the doubt"
        ),
        pytest.param(
            (1, 2), "join a b; hush a b; give-up a b; join b", "running 2: b", id="a member that stopped ends the doubt"
        ),
        pytest.param(
            (1, 2), "join a b; hush a b; give-up a b; join c; lose b", "running 2: c", id="a late proof ends the doubt"
        ),
        pytest.param((2, 3), "join a b c; hush c; sever x", "holding 1: a b c", id="cut off from etcd and from a node"),
        pytest.param((2, 3), "join a b c; sever x", "running 1: a b c", id="cut off from etcd, but whole"),
        pytest.param((2, 3), "join a b c; stopped b", "running 2: a b c", id="a node had to stop its workers"),
        pytest.param((2, 3), "join a b c; stopped b@9", "running 1: a b c", id="of another generation"),
        pytest.param((2, 2), "join a b; join-behind b", "running 1: a b", id="the world was lost on the way to a node"),
        pytest.param((1, 2), "join a; wait 3; join-cold b; wait 99", "running 1: a", id="a cold newcomer is no reason"),
        pytest.param(
            (1, 2), "join a; wait 3; join-cold b; ready b; wait 3; drained a", "running 2: a b", id="a warm one is"
        ),
        pytest.param((1, 1), "join a; join-cold b; lose a", "running 2: b", id="a cold spare is better than none"),
    ],
)
def test_silence(nodes, script, end):
    """A node that is silent may be alive: nothing else begins while its world may be getting on somewhere."""
    assert outline(story(ELASTIC, nodes, script, max_restarts=2).job) == end


def test_a_world_that_was_lost_on_the_way_is_sent_again():
    """An agent that has not seen the world that runs is sent its part of it, as it was committed."""
    told = story(ELASTIC, (2, 2), "join a b; join-behind b")
    assert sent(told.commands) == (("b", Run(told.job.world.assignment("b"))),)


def test_leaves_within_a_short_time_make_one_change():
    """Those who are asked to go together go together; each is told to halt."""
    told = story(ELASTIC, (1, 4), "join a b c d; leave b; leave c", leave_gather_s=0.2)
    assert outline(told.job) == "running 1: a b c d"
    told.wait(0.2)
    assert outline(told.job) == "running 2: a d"
    assert told.job.world.reason == "nodes b, c leave (SIGTERM)"


def test_a_failure_does_not_keep_those_who_leave():
    """A world that ends while a node waits to leave is followed by one without that node."""
    told = story(ELASTIC, (1, 3), "join a b c; leave b; fail 0", leave_gather_s=0.2, max_restarts=1)
    assert outline(told.job) == "running 2: a c, 1 charged"


def test_holding_is_said_every_minute():
    """Who waits for a replacement is reminded of what is missing."""
    told = story(TOLERANT, (2, 2), "join a b; lose b; wait 59.9")
    assert told.commands == ()
    told.pass_deadline()
    reminder = "still holding after 60 s: node b is lost: its stream broke; 1 of at least 2 nodes are here"
    assert told.commands == (Tell(reminder, "hold"),)


class TestResume:
    """A new leader goes on with what was committed."""

    def told(self, record, **settings):
        config = job_config(ELASTIC, (1, 3), max_restarts=3, **settings)
        told = Story(config)
        told.job = resume(config, record, now=0.0)
        return told

    def test_before_the_first_world(self):
        """Nothing was committed: it gathers."""
        job = self.told(Record()).job
        assert isinstance(job.phase, Gathering)
        assert job.world is None

    def test_after_the_end(self):
        """What is over stays over, and whoever comes is told."""
        told = self.told(Record(world_of("a"), History(), Succeeded()))
        job, commands = step(told.job, MemberJoined(member("b")), 1.0)
        assert job.phase == Finished(Succeeded())
        assert sent(commands) == (("b", Halt(Succeeded())),)

    def test_nobody_is_disturbed_when_all_come_back(self):
        """The same generation, the same budget; nobody is told anything."""
        job = self.told(Record(world_of("a", "b"), History((1.0,)))).job
        for node in ("a", "b"):
            job, commands = step(job, MemberJoined(member(node), running=1, seen=1), 1.0)
            assert commands == ()
        assert outline(job) == "running 1: a b, 1 charged"
        assert job.absent == frozenset()

    def test_a_failure_that_nobody_heard_of_is_charged_once(self):
        """The first message of an agent tells of a worker that failed while nobody led."""
        job = self.told(Record(world_of("a", "b"))).job
        job, _ = step(job, MemberJoined(member("a", order=1, ports=(1,)), running=1, seen=1), 1.0)
        failed = exit_of(1, node="b")
        job, _ = step(job, MemberJoined(member("b", order=2), running=1, seen=1, exits=(failed,)), 1.0)
        assert outline(job) == "running 2: a b, 1 charged"
        job, commands = step(job, MemberJoined(member("b", order=2), running=2, seen=2, exits=(failed,)), 2.0)
        assert (outline(job), commands) == ("running 2: a b, 1 charged", ())

    def test_the_dead_leader_is_lost_and_the_rest_goes_on(self):
        """The node of the leader that died is lost; those who came back form the next world."""
        job = self.told(Record(world_of("a", "b", "c"))).job
        job, _ = step(job, MemberJoined(member("b", order=2, ports=(1,)), running=1, seen=1), 1.0)
        job, _ = step(job, MemberLost("a", "its port refuses"), 1.0)
        assert isinstance(job.phase, Holding)
        job, _ = step(job, MemberJoined(member("c", order=3), running=1, seen=1), 1.0)
        assert outline(job) == "running 2: b c"

    def test_ends_of_workers_are_learnt_again(self):
        """Ranks that had ended with code 0 are known from the first message, and the job can end."""
        job = self.told(Record(world_of("a", "b"))).job
        for rank, node in enumerate(("a", "b")):
            done = exit_of(rank, 0, node=node)
            job, _ = step(job, MemberJoined(member(node), running=1, seen=1, exits=(done,)), 1.0)
        assert job.phase == Finished(Succeeded())


@pytest.mark.parametrize(
    ("nodes", "script", "end"),
    [
        pytest.param((2, 3), "join a b c; fail 0", "running 1: a b c", id="a failure is looked into"),
        pytest.param((2, 3), "join a b c; fail 0; wait 0.25", "running 2: a b c, 1 charged", id="nothing explains it"),
        pytest.param((2, 3), "join a b c; fail 0 1; lose c", "running 2: a b", id="a lost node explains it"),
        pytest.param(
            (2, 3), "join a b c; fail 0; hush c; wait 9", "running 1: a b c", id="a silent node may explain it"
        ),
        pytest.param((2, 3), "join a b c; fail 0; hush c; give-up c", "running 2: a b", id="a node given up does"),
        pytest.param(
            (2, 3),
            "join a b c; fail 0; hush c; join c@1; wait 0.25",
            "running 2: a b c, 1 charged",
            id="one that is back",
        ),
        pytest.param(
            (2, 3), "join a b c; kill 0; lose a", "running 2: b c", id="a node's workers die before its agent"
        ),
        pytest.param((2, 3), "join a b c; kill 0; leave a", "running 2: b c", id="or before it leaves"),
        pytest.param((2, 3), "join a b c; kill 0; wait 0.25", "running 2: a b c, 1 charged", id="a worker was killed"),
        pytest.param((2, 3), "join a b c; crash 0", "running 2: a b c, 1 charged", id="a crash explains itself"),
        pytest.param((2, 3), "join a b c; fail 0; crash 1", "running 2: a b c, 1 charged", id="and others"),
        pytest.param((1, 1), "join a; fail 0", "running 2: a, 1 charged", id="one node has nobody to blame"),
        pytest.param((2, 3), "join a b c; fail 0; leave c", "running 2: a b", id="a node that leaves explains it"),
    ],
)
def test_a_failure_may_be_the_consequence_of_a_loss(nodes, script, end):
    """Workers whose peers are gone fail, too: that is not charged to the budget."""
    assert outline(story(ELASTIC, nodes, script, max_restarts=2, blame_s=0.25).job) == end


def test_a_failure_without_an_explanation_ends_a_job_without_budget():
    """The first of several failures is the one that is named."""
    told = story(ELASTIC, (2, 2), "join a b; fail 1:7 0:8; wait 0.25", blame_s=0.25)
    assert told.job.phase.outcome.first.rank == 1
    assert told.job.phase.outcome.exit_code == 7


def test_a_leave_that_comes_a_moment_after_its_workers_ends_is_not_charged():
    """A signal to a whole node reaches the workers first: they are judged only if their node stays."""
    told = story(ELASTIC, (1, 3), "join a b c; kill 1", blame_s=0.25, leave_gather_s=0.2)
    told.now += 0.1
    told.tell(MemberLeaving("b", signal.SIGTERM))
    told.wait(0.5)
    assert outline(told.job) == "running 2: a c"


def test_a_node_that_has_finished_is_known_to_the_next_leader():
    """Its ranks are kept when all of them have ended with code 0: a new leader does not take its end for a loss."""
    told = story(ELASTIC, (2, 2), "join a b; ok 0")
    assert told.commands == (Keep(frozenset({0}), told.job.history),)
    job = resume(told.job.config, Record(told.job.world, finished=frozenset({0})), now=9.0)
    job, _ = step(job, MemberJoined(member("b"), running=1, seen=1), 9.0)
    job, commands = step(job, MemberLost("a", "its port refuses"), 9.0)
    assert outline(job) == "running 1: a b"
    assert sent(commands) == ()


def test_what_failed_in_the_world_that_runs_is_judged_anew_by_the_next_leader():
    """A story that was kept while the job held is of the past for nobody: a worker's end counts."""
    told = story(TOLERANT, (2, 2), "join a b; crash 0", max_restarts=1, check_after=1)
    assert told.play("clear b") == "holding 1: a b, 1 charged"
    (keep,) = [command for command in told.commands if isinstance(command, Keep)]
    record = Record(told.job.world, keep.history, inquest=keep.inquest)
    job = resume(told.job.config, record, 10.0)
    job, _ = step(job, MemberJoined(member("a", ports=(1,)), running=1, seen=1), 10.0)
    job, _ = step(job, WorkerExited(exit_of(0, 0, node="a", generation=1)), 10.0)
    assert job.phase.finished == {0}


def test_the_earliest_failure_is_named_whichever_is_heard_first():
    """A worker that failed because of another may be heard of before it."""
    told = story(ELASTIC, (2, 2), "join a b", blame_s=0.25)
    told.tell(WorkerExited(replace(exit_of(0, 1, node="a"), at=20.5)))
    told.tell(WorkerExited(replace(exit_of(1, 7, node="b"), at=20.4)))
    told.wait(0.25)
    assert told.job.phase.outcome.exit_code == 7


class TestInquest:
    """What becomes known of a generation's end is told to all nodes, once, and nothing waits for that."""

    def explained(self, told):
        return [(node, directive.verdict) for node, directive in sent(told.commands) if isinstance(directive, Explain)]

    def test_after_a_moment(self):
        """The restart goes ahead at once; a second later everybody is told what failed, and what else did."""
        told = story(TOLERANT, (2, 2), "join a b; crash 0", max_restarts=3, blame_s=0.25)
        assert outline(told.job) == "running 2: a b, 1 charged"
        assert not self.explained(told)
        told.exit(1, 1, generation=1)
        told.tell(WorkerExited(exit_of(1, 1, node="b", generation=1)))
        told.pass_deadline()
        (one, verdict), (other, same) = self.explained(told)
        assert (one, other, verdict) == ("a", "b", same)
        assert (verdict.generation, verdict.first.rank, [each.rank for each in verdict.others]) == (1, 0, [1])
        assert verdict.decision == "rank 0 on a was killed by SIGSEGV; restart 1 of 3"
        assert verdict.restarts_left == 2
        assert outline(told.job) == "running 2: a b, 1 charged"

    def test_the_cause_may_come_last(self):
        """What was decided upon was a consequence: the story, and what is remembered, name the cause."""
        told = story(TOLERANT, (1, 1), "join a", max_restarts=3)
        reset = replace(exit_of(0, 1), error="RuntimeError: Connection reset by peer")
        told.tell(WorkerExited(reset))
        assert told.job.history.failures[-1].what == reset.error
        told.tell(WorkerExited(replace(exit_of(1, 1), error="ValueError: the data is bad", generation=1)))
        told.pass_deadline()
        assert self.explained(told)[0][1].first.error == "ValueError: the data is bad"
        assert [each.what for each in told.job.history.failures] == ["ValueError: the data is bad"]
        assert [each for each in told.commands if isinstance(each, Keep)] == [Keep(frozenset(), told.job.history)]

    def test_it_outlives_its_leader(self):
        """What was not told yet is told by the next one; what was, is not."""
        told = story(TOLERANT, (2, 2), "join a b; crash 0", max_restarts=3)
        (commit,) = [each for each in told.commands if isinstance(each, Commit)]
        job = resume(told.job.config, Record(commit.world, commit.history, inquest=commit.inquest), 5.0)
        for node in "ab":
            job, _ = step(job, MemberJoined(member(node, ports=(1,)), running=2, seen=2), 5.5)
        assert deadline(job) == 6.0
        job, commands = step(job, TimePassed(), 6.0)
        assert [directive.verdict.first.rank for _, directive in sent(commands)] == [0, 0]
        (keep,) = [each for each in commands if isinstance(each, Keep)]
        assert keep.inquest is None

    def test_the_next_failure_does_not_wait(self):
        """Each generation has a story of its own."""
        told = story(TOLERANT, (1, 1), "join a; crash 0; crash 0", max_restarts=3)
        assert [verdict.generation for _, verdict in self.explained(told)] == [1]
        told.pass_deadline()
        assert [verdict.generation for _, verdict in self.explained(told)] == [2]

    def test_the_end_does_not_wait_either(self):
        """What was to be told is told before everybody goes."""
        told = story(TOLERANT, (1, 1), "join a; crash 0; ok 0", max_restarts=3)
        assert [type(directive) for _, directive in sent(told.commands)] == [Explain, Halt]

    def test_many_consequences(self):
        """A thousand ranks that lost their peer are counted, not listed."""
        told = Story(job_config(TOLERANT, (1, 1), max_restarts=3))
        told.join("a", slots=100)
        told.exit(0, signal=signal.SIGSEGV)
        for rank in range(1, 100):
            told.tell(WorkerExited(exit_of(rank, 1, generation=1)))
        told.pass_deadline()
        verdict = self.explained(told)[0][1]
        assert (len(verdict.others), verdict.more) == (16, 83)


class TestCause:
    """Which of the failures on one node counts."""

    CAUSE = replace(exit_of(0, 1), error="ValueError: the data is bad", at=2.0)
    CONSEQUENCE = replace(exit_of(1, 1), error="RuntimeError: Connection closed by peer", at=1.0)

    def told(self, *exits, max_restarts=0, slots=3):
        told = Story(job_config(TOLERANT, (1, 1), max_restarts=max_restarts, blame_s=0.25))
        told.join("a", slots=slots)
        for exit in exits:
            told.tell(WorkerExited(exit))
        return told

    def test_a_cause_is_acted_upon_at_once(self):
        """Every millisecond before a restart is lost training."""
        assert outline(self.told(self.CAUSE, max_restarts=1).job) == "running 2: a, 1 charged"

    def test_a_consequence_waits_for_its_cause(self):
        """Until that comes, or for a moment."""
        told = self.told(self.CONSEQUENCE, max_restarts=1)
        assert outline(told.job) == "running 1: a"
        told.tell(WorkerExited(self.CAUSE))
        assert outline(told.job) == "running 2: a, 1 charged"
        assert "rank 0 on a exited with code 1" in told.job.world.reason
        told = self.told(self.CONSEQUENCE, max_restarts=1)
        told.pass_deadline()
        assert "rank 1 on a exited with code 1" in told.job.world.reason

    def test_a_cause_that_has_not_ended_yet(self):
        """It uploads its logs, say, while those who lost it have failed already."""
        told = self.told(max_restarts=1)
        told.tell(WorkerErred(self.CAUSE))
        assert outline(told.job) == "running 1: a"
        assert told.commands == ()
        told.tell(WorkerExited(self.CONSEQUENCE))
        assert outline(told.job) == "running 2: a, 1 charged"
        assert "rank 0 on a exited with code 1" in told.job.world.reason

    def test_an_end_waits_for_the_others(self):
        """Nothing is lost by that, and their words belong to the story."""
        told = self.told(self.CAUSE)
        assert outline(told.job) == "running 1: a"
        told.tell(WorkerExited(self.CONSEQUENCE))
        told.pass_deadline()
        outcome = told.job.phase.outcome
        assert (outcome.first, [each.rank for each in outcome.others]) == (self.CAUSE, [1])
        assert outcome.restarts_left == 0

    def test_an_end_does_not_wait_when_all_are_out(self):
        """Then there is nobody left to hear of."""
        told = self.told(self.CONSEQUENCE, self.CAUSE, slots=2)
        assert told.job.phase.outcome.first == self.CAUSE


class TestHang:
    """Workers that make no step are asked where they are, and then started again."""

    JOIN = "join a b; progress a:1 b:1"

    def told(self, script, **settings):
        return story(ELASTIC, (1, 2), script, **{"max_restarts": 2, "hang_timeout_s": 10.0, **settings})

    def test_stacks_come_first(self):
        """Nothing is stopped before everybody has told."""
        told = self.told(self.JOIN)
        told.pass_deadline()
        assert [(node, directive) for node, directive in sent(told.commands) if isinstance(directive, Dump)] == [
            ("a", Dump(1, "no rank made a step for 10 s (--hang-timeout)")),
            ("b", Dump(1, "no rank made a step for 10 s (--hang-timeout)")),
        ]
        assert told.play("dumped a:wait") == "running 1: a b"
        assert told.play("dumped b:work") == "running 2: a b, 1 charged"
        assert "rank 1 on b hangs" in told.job.world.reason
        assert told.job.history.failures[-1].node == "b"
        told.pass_deadline()
        verdict = next(directive.verdict for _, directive in sent(told.commands) if isinstance(directive, Explain))
        assert (verdict.first.rank, verdict.first.stack_file) == (1, "1.txt")
        assert [each.rank for each in verdict.others] == [0]

    def test_whoever_is_behind(self):
        """The rank with the fewest steps, whatever its stack says."""
        told = self.told("join a b; progress a:4 b:5; wait 10.5; dumped a:wait b:wait")
        assert "rank 0 on a hangs" in told.job.world.reason

    def test_who_does_not_answer_is_not_waited_for_long(self):
        """Ten seconds."""
        told = self.told(f"{self.JOIN}; wait 10.5; dumped a:wait; wait 9")
        assert outline(told.job) == "running 1: a b"
        assert told.play("wait 2") == "running 2: a b, 1 charged"

    def test_a_step_meanwhile_is_a_step(self):
        """Then they were only slow."""
        told = self.told(f"{self.JOIN}; wait 10.5; progress a:2")
        assert told.commands == (Tell("generation 1 gets on again"),)
        assert told.play("dumped a:wait b:wait; wait 9") == "running 1: a b"
        assert told.play("wait 2; dumped a:wait b:wait") == "running 2: a b, 1 charged"

    def test_every_step_counts(self):
        """Of any rank."""
        assert outline(self.told(f"{self.JOIN}; wait 8; progress b:2; wait 8; progress a:2; wait 8").job) == (
            "running 1: a b"
        )

    def test_without_any_word_nothing_is_claimed(self):
        """That is said, once."""
        told = self.told("join a b; wait 59")
        told.pass_deadline()
        assert "hangs are not detected" in told.commands[0].reason
        assert deadline(told.job) is None
        assert told.play("wait 1000; crash 0; wait 1000") == "running 2: a b, 1 charged"
        assert told.commands == ()

    def test_a_start_that_takes_too_long(self):
        """A world that told of no step at all is judged by its own limit."""
        settings = {"hang_timeout_s": None, "start_timeout_s": 5.0}
        told = self.told("join a b; wait 5.3; dumped a:wait b:work", **settings)
        assert outline(told.job) == "running 2: a b, 1 charged"
        assert "rank 1 on b hangs: no rank told of a first step within 5 s (--start-timeout)" in told.job.world.reason
        assert outline(self.told("join a b; wait 4; progress a:1; wait 99", **settings).job) == "running 1: a b"

    def test_a_pause_before_the_start_does_not_count(self):
        """The clock runs from when the workers may start."""
        config = job_config(TOLERANT, max_restarts=3, start_timeout_s=5.0)
        config = replace(config, policy=replace(config.policy, backoff=Backoff(60.0, 60.0)))
        told = Story(config)
        assert told.play("join a; crash 0; wait 30") == "running 2: a, 1 charged"

    def test_the_budget_ends_it(self):
        """With the suspect as the first failure."""
        told = self.told(f"{self.JOIN}; wait 10.5; dumped a:work b:wait", max_restarts=0)
        outcome = told.job.phase.outcome
        assert (outcome.first.rank, outcome.exit_code, [each.rank for each in outcome.others]) == (0, 124, [1])

    def test_a_failure_meanwhile_is_judged_instead(self):
        """A worker that ends by itself says more than one that hangs."""
        told = self.told(f"{self.JOIN}; wait 10.5; crash 1; dumped a:wait b:wait")
        assert outline(told.job) == "running 2: a b, 1 charged"
        assert "SIGSEGV" in told.job.world.reason

    def test_a_silent_node_may_get_on(self):
        """Nobody can tell; and when it is back, the clock begins anew."""
        told = self.told(f"{self.JOIN}; hush b; wait 60")
        assert outline(told.job) == "running 1: a b"
        told.join("b", running=1)
        assert told.play("wait 10") == "running 1: a b"
        assert told.play("wait 1; dumped a:wait b:work") == "running 2: a b, 1 charged"


class TestExclusion:
    """A node on which workers fail is kept out while there are enough others."""

    def test_the_others_go_on_without_it(self):
        """It is told to stop, and why; it stays as a last resort."""
        told = story(ELASTIC, (1, 3), "join a b c; crash 1", max_restarts=9, exclude_after=1)
        assert outline(told.job) == "running 2: a c, 1 charged"
        (held,) = [directive for node, directive in sent(told.commands) if node == "b"]
        assert held == Hold(
            "node b is excluded while there are enough others: 1 failure on it (--exclude-node-after 1); "
            "until it is cleared, it is a last resort"
        )
        assert told.play("wait 100") == "running 2: a c, 1 charged"

    @pytest.mark.parametrize(
        ("nodes", "script", "end"),
        [
            pytest.param((2, 3), "join a b c; crash 1; lose c", "running 3: a b, 1 charged", id="a last resort"),
            pytest.param((2, 2), "join a b; crash 1", "running 2: a b, 1 charged", id="nobody else is there"),
            pytest.param((2, 2), "join a b c; crash 1", "running 2: a c, 1 charged", id="a spare takes its place"),
            pytest.param(
                (1, 2), "join a b; crash 1; clear b; wait 3; drained a", "running 3: a b, 1 charged", id="cleared"
            ),
            pytest.param((1, 2), "join a b; crash 1; join b; wait 9", "running 2: a, 1 charged", id="it comes again"),
            pytest.param(
                (1, 2),
                "join a b; crash 1; lose b; clear b; join b; wait 3; drained a",
                "running 3: a b, 1 charged",
                id="cleared while it is away",
            ),
        ],
    )
    def test_while_there_are_enough_others(self, nodes, script, end):
        """And no longer than until it is cleared."""
        told = story(ELASTIC, nodes, script, max_restarts=9, exclude_after=1)
        assert outline(told.job) == end

    def test_it_outlives_its_leader(self):
        """The next one knows who is excluded."""
        told = story(ELASTIC, (1, 2), "join a b; crash 1", max_restarts=9, exclude_after=1)
        (commit,) = [each for each in told.commands if isinstance(each, Commit)]
        job = resume(told.job.config, Record(commit.world, commit.history), 0.0)
        for node in "ab":
            running = 2 if node == "a" else None
            job, commands = step(job, MemberJoined(member(node, ports=(1,)), running=running, seen=2), 1.0)
        assert [type(directive) for _, directive in sent(commands)] == [Wait]
        assert outline(job) == "running 2: a, 1 charged"


class TestCheck:
    """A node that failed twice takes no part until it was checked."""

    def told(self, script, nodes=(1, 2), level=ELASTIC):
        return story(level, nodes, script, max_restarts=9, check_after=2)

    def test_the_others_go_on_without_it(self):
        """It is asked to find out."""
        told = self.told("join a b; crash 1; crash 1")
        assert outline(told.job) == "running 3: a, 2 charged"
        kinds = [type(directive) for node, directive in sent(told.commands) if node == "b"]
        assert kinds == [Explain, Hold, Check]

    @pytest.mark.parametrize(
        ("nodes", "script", "end"),
        [
            pytest.param((1, 2), "fit b; wait 3; drained a", "running 4: a b, 2 charged", id="it is fit"),
            pytest.param((1, 2), "unfit b; wait 100", "running 3: a, 2 charged", id="it is not"),
            pytest.param((2, 2), "wait 1", "holding 2: a b, 2 charged", id="the others need it"),
            pytest.param((2, 2), "fit b", "running 3: a b, 2 charged", id="the others needed it"),
            pytest.param((2, 2), "unfit b", "holding 2: a b, 2 charged", id="the others need another"),
            pytest.param((2, 2), "unfit b; join c", "running 3: a c, 2 charged", id="the others got another"),
            pytest.param((1, 2), "fit a", "running 3: a, 2 charged", id="nobody asked"),
            pytest.param(
                (1, 2), "join b; wait 3; drained a", "running 4: a b, 2 charged", id="it comes again, and is fit"
            ),
        ],
    )
    def test_its_answer(self, nodes, script, end):
        """Whoever is fit comes back, whoever is not has left the job."""
        assert outline(self.told(f"join a b; crash 1; crash 1; {script}", nodes).job) == end

    def test_unfit(self):
        """It is told to end, with the reason."""
        told = self.told("join a b; crash 1; crash 1; unfit b")
        (halt,) = [directive for node, directive in sent(told.commands) if node == "b"]
        assert halt == Halt(Failed("node b failed its health check: its disk is full", alone=True))

    def test_the_only_node(self):
        """Without it there is no job."""
        told = self.told("join a; wait 3; crash 0; crash 0", (1, 1))
        assert outline(told.job) == "holding 2: a, 2 charged"
        assert "the health of a is checked" in told.job.phase.reason
        assert told.play("unfit a") == "failed 1"
        assert reason_of(told) == "node a failed its health check: its disk is full"
