"""Checkpoints in the job's machine, told as stories: when there is one, what a world goes on from, who waits for it.

``Story.play`` explains the scripts. The referee of ``elastic_adapter.core.testing`` checks every step of them.
"""

from __future__ import annotations

import signal

import pytest

from elastic_adapter.core.events import (
    CheckpointEntered,
    CheckpointNoted,
    CheckpointPublished,
    CheckpointsFound,
    Commit,
    Enter,
    Keep,
    ShardReported,
    StopRequested,
    Tell,
)
from elastic_adapter.core.model import (
    Drain,
    Drop,
    Halt,
    Hold,
    Level,
    Part,
    Pause,
    Prepare,
    Publish,
    Resume,
    Run,
    SaveAt,
    Settle,
    Shard,
    Wait,
)
from elastic_adapter.core.state import Closing, Draining, Running, deadline
from elastic_adapter.core.testing import Story, checkpoint, committed, job_config, outline, sent

OFF, TOLERANT, ELASTIC = Level.OFF, Level.FAULT_TOLERANT, Level.ELASTIC
# Two nodes, one rank on each, both of which save checkpoints.
SAVERS = "join a b; saver 0 1"
# The same, where there could be more nodes.
PAIR = "join a b; wait 3; saver 0 1"


def story(script, level=TOLERANT, nodes=(2, 2), **settings):
    told = Story(job_config(level, nodes, **settings))
    told.play(script)
    return told


def orders(told, *kinds):
    """The directives of these kinds in the last step, with whom each went to."""
    return [(node, directive) for node, directive in sent(told.commands) if isinstance(directive, kinds)]


def ledger(told):
    return [each.name for each in told.job.checkpoints]


def words(told):
    return [each.reason for each in told.commands if isinstance(each, Tell)]


class TestACheckpoint:
    """It exists when all ranks have written, rank 0's node has put it together, and the ledger has taken it."""

    @pytest.mark.parametrize(
        ("script", "kind"),
        [
            pytest.param("written 0:40", None, id="one rank has written"),
            pytest.param("written 0:40; staged 1:40", None, id="another has only staged"),
            pytest.param("written 0:40 1:41", None, id="another step is another checkpoint"),
            pytest.param("written 0:40 1:40@0", None, id="an earlier generation wrote"),
            pytest.param("written 0:40 1:40", Prepare, id="all have written"),
            pytest.param("write 40; prepared 40", Enter, id="it is put together"),
            pytest.param("write 40; prepared 40:b", None, id="another node than rank 0's says so"),
            pytest.param("write 40; prepared 41", None, id="another one is put together"),
            pytest.param("write 40; prepared 40; not-entered 40", None, id="the ledger is out of reach"),
            pytest.param("write 40; prepared 40; not-entered 40; due on", Enter, id="the ledger is asked again"),
            pytest.param("write 40; prepared 40; entered 40", Publish, id="the ledger has it"),
            pytest.param("write 40; prepared 40; published 40", None, id="it has its name before it is in the ledger"),
        ],
    )
    def test_one_thing_after_the_other(self, script, kind):
        """Nothing is done before its time."""
        told = story(f"{SAVERS}; {script}")
        done = [each for each in told.commands if isinstance(each, Enter)]
        done += [directive for _, directive in orders(told, Prepare, Publish)]
        assert [type(each) for each in done] == ([] if kind is None else [kind])

    def test_rank_0s_node_is_the_one_that_is_told(self):
        """The others have written their parts; that is all."""
        told = story(f"{SAVERS}; write 40")
        assert sent(told.commands) == (("a", Prepare(1, 40)),)
        assert sent(story(f"{SAVERS}; write 40; prepared 40; entered 40").commands) == (("a", Publish(1, 40)),)

    @pytest.mark.parametrize(
        ("script", "names"),
        [
            pytest.param("write 40; prepared 40", [], id="the ledger is asked"),
            pytest.param("write 40; prepared 40; entered 40", ["step-40-1"], id="the ledger has it"),
            pytest.param("checkpoint 40", ["step-40-1"], id="it has its name"),
            pytest.param("checkpoint 40; write 40; prepared 40; entered 40", ["step-40-1"], id="all is told twice"),
            pytest.param("checkpoint 40; checkpoint 50", ["step-50-1", "step-40-1"], id="the newest is the first"),
            pytest.param("checkpoint 50; checkpoint 40", ["step-50-1"], id="an earlier one that comes later"),
            pytest.param(
                "write 40 50; prepared 50; entered 50; prepared 40", ["step-50-1"], id="an earlier one is too late"
            ),
            pytest.param("missed 1:40; write 40; prepared 40", [], id="a rank has missed it"),
            pytest.param("write 40; missed 1:40; prepared 40; entered 40", ["step-40-1"], id="it has not, after all"),
            pytest.param("write 40; spoilt 40; prepared 40; entered 40", [], id="it could not be put together"),
            pytest.param("write 40; prepared 40; crash 0; entered 40", [], id="its world is over"),
        ],
    )
    def test_the_ledger(self, script, names):
        """A checkpoint is in it once, and the newest is the first."""
        assert ledger(story(f"{SAVERS}; {script}", max_restarts=9, save_wait_s=0)) == names

    def test_after_an_outage_the_newest_is_the_first(self):
        """The ledger takes it at once; those before it are past then, and are not asked for one by one."""
        script = "write 40; prepared 40; not-entered 40; write 50; prepared 50; not-entered 50; write 60; prepared 60"
        told = story(f"{SAVERS}; {script}; not-entered 60; due on")
        assert [each.step for each in told.commands if isinstance(each, Enter)] == [60]
        told.play("entered 60")
        assert ledger(told) == ["step-60-1"]
        assert [each.step for node, each in orders(told, Drop) if node == "a"] == [40, 50]
        assert deadline(told.job) is None

    def test_the_ledger_is_asked_to_take_it_before_the_others(self):
        """What it holds already stays."""
        told = story(f"{SAVERS}; checkpoint 40; write 50; prepared 50")
        (enter,) = told.commands
        assert enter == Enter(1, 50, (checkpoint(50), checkpoint(40)))

    def test_one_after_the_other(self):
        """Two at a time would not know of each other."""
        told = story(f"{SAVERS}; write 40 50; prepared 40; prepared 50")
        assert told.commands == ()
        told.play("entered 40")
        assert told.commands[-1] == Enter(1, 50, (checkpoint(50), checkpoint(40)))
        assert ledger(told) == ["step-40-1"]
        told.play("published 40; entered 50")
        assert ledger(told) == ["step-50-1", "step-40-1"]

    def test_none_is_overtaken(self):
        """One that is ready while the ledger takes another is next, whatever is ready by then."""
        told = story(f"{SAVERS}; write 40 50 60; prepared 40; prepared 50; entered 40; prepared 60; entered 50")
        told.play("entered 60; published 40; published 50; published 60")
        assert ledger(told) == ["step-60-1", "step-50-1", "step-40-1"]
        assert orders(told, Drop) == []

    @pytest.mark.parametrize(
        "shard",
        [
            pytest.param(ShardReported("b", 1, Shard(0, 40, Part.WRITTEN)), id="of a rank that is not there"),
            pytest.param(ShardReported("c", 1, Shard(0, 40, Part.WRITTEN)), id="of a stranger"),
            pytest.param(ShardReported("a", 2, Shard(0, 40, Part.WRITTEN)), id="of a world that is to come"),
        ],
    )
    def test_a_part_that_nobody_can_have_written(self, shard):
        """It changes nothing."""
        told = story(f"{SAVERS}; written 1:40")
        before = told.job
        told.tell(shard)
        assert (told.job, told.commands) == (before, ())

    def test_what_was_pruned_is_not_gone_on_from(self):
        """It leaves the ledger with the news of the one that took its place."""
        told = story(f"{SAVERS}; checkpoint 40; write 50; prepared 50; entered 50")
        told.tell(CheckpointPublished("a", 1, 50, pruned=("step-40-1",)))
        assert ledger(told) == ["step-50-1"]

    @pytest.mark.parametrize(
        ("script", "said"),
        [
            pytest.param("staged 0:40; missed 1:40", "rank 1 on b: the disk is full", id="a rank has missed it"),
            pytest.param("write 40; spoilt 40", "no checkpoint of step 40: the disk is full", id="not put together"),
            pytest.param("checkpoint 40", "is committed: /checkpoints/step-40-1", id="committed"),
        ],
    )
    def test_the_log_says_what_became_of_it(self, script, said):
        """Once."""
        told = story(f"{SAVERS}; {script}")
        assert [each for each in words(told) if said in each]
        told.play("repeat")
        assert words(told) == []

    def test_rank_0s_node_may_have_missed_what_it_was_told(self):
        """On a new stream it is told again what it has not said that it has done."""
        told = story(f"{SAVERS}; write 40; hush a; back a")
        assert orders(told, Prepare, Publish) == [("a", Prepare(1, 40))]
        told.play("prepared 40; entered 40; back a")
        assert orders(told, Prepare, Publish) == [("a", Publish(1, 40))]
        told.play("published 40; back a")
        assert orders(told, Prepare, Publish) == []

    def test_rank_0s_node_is_away_when_the_last_part_is_written(self):
        """It is told when it comes back."""
        told = story(f"{SAVERS}; written 0:40; hush a; written 1:40")
        assert told.commands == ()
        told.play("back a")
        assert orders(told, Prepare) == [("a", Prepare(1, 40))]


class TestWhatBecameOfIt:
    """All nodes are told: ranks wait for it, and what is written of one that will not come is in the way."""

    @pytest.mark.parametrize(
        ("script", "step", "why"),
        [
            pytest.param("staged 0:40; missed 1:40", 40, "rank 1 on b: the disk is full", id="a rank has missed it"),
            pytest.param("missed 0:40", 40, "rank 0 on a: the disk is full", id="the first one has missed it"),
            pytest.param("write 40; spoilt 40", 40, "the disk is full", id="it is not put together"),
            pytest.param(
                "write 40 50; prepared 50; entered 50", 40, "there is a later one, of step 50", id="a later one is in"
            ),
            pytest.param(
                "staged 0:40; staged 1:41",
                40,
                "rank 1 of 2 saved step 41 instead; do all ranks save at the same steps?",
                id="a rank saves elsewhere",
            ),
            pytest.param(
                "staged 0:10 0:20 0:30 0:40 0:50",
                10,
                "rank 1 of 2 did not save there; do all ranks make a Checkpointer and call step?",
                id="too many lack parts",
            ),
            pytest.param(
                "stage 10 20 30 40; written 0:10; staged 0:50",
                10,
                "rank 1 of 2 had not written it when 4 later ones came",
                id="one is not written",
            ),
            pytest.param(
                "staged 0:40; due on",
                40,
                "rank 1 of 2 did not save there; do all ranks make a Checkpointer and call step?",
                id="a part does not come",
            ),
        ],
    )
    def test_given_up(self, script, step, why):
        """It is said why, and nobody goes on waiting."""
        told = story(f"{SAVERS}; {script}")
        assert orders(told, Drop) == [(node, Drop(1, step, why)) for node in "ab"]
        assert told.job.saves.find(step) is None
        assert [each for each in words(told) if why in each] or "later" in why

    def test_committed(self):
        """Nodes without rank 0 learn of it by that."""
        told = story(f"{SAVERS}; checkpoint 40")
        assert orders(told, Settle, Drop) == [("a", Settle(1, 40)), ("b", Settle(1, 40))]
        told.play("write 50; prepared 50; entered 50")
        told.tell(CheckpointPublished("a", 1, 50, "its device is gone"))
        (trouble,) = {each.trouble for _, each in orders(told, Settle)}
        assert trouble == "it could not be given its name: its device is gone"

    def test_only_one_rank_saves(self):
        """However long that goes on: few drafts at a time, and each is spoken of."""
        told, said = story(SAVERS), []
        for step in range(10, 1000, 10):
            told.play(f"staged 0:{step}")
            said += words(told)
            told.play(f"written 0:{step}")
            assert len(told.job.saves.under_way) == len(told.desk("a").shards) <= 4
        assert [each.partition(":")[0] for each in said] == [f"no checkpoint of step {n}" for n in range(10, 960, 10)]
        told.play("staged 0:1000; wait 1000")
        assert told.job.saves.under_way == ()
        assert told.desk("a").shards == {}

    def test_many_ranks_are_not_all_named(self):
        """A line is a line."""
        told = Story(job_config(TOLERANT, (1, 1)))
        told.join("a", slots=100)
        told.play("staged 0:50; due on")
        (word,) = words(told)
        assert "ranks 1, 2, 3, 4, 5, 6, 7, 8 ... of 100 did not save there" in word

    @pytest.mark.parametrize(
        ("script", "word"),
        [
            pytest.param("missed 1:40; staged 0:40", Drop(1, 40, "rank 1 on b: the disk is full"), id="late"),
            pytest.param("missed 1:40; missed 0:40", Drop(1, 40, "rank 1 on b: the disk is full"), id="missed, too"),
            pytest.param("checkpoint 50; written 0:40", Drop(1, 40, "there is a later one"), id="a later one is in"),
            pytest.param("checkpoint 40; written 0:40", Settle(1, 40), id="it is in"),
        ],
    )
    def test_who_tells_of_it_afterwards(self, script, word):
        """It is told once more, alone: it has not heard, or has only now begun."""
        assert sent(story(f"{SAVERS}; {script}").commands) == (("a", word),)

    @pytest.mark.parametrize(
        ("script", "word"),
        [
            pytest.param("stage 40; hush b; missed 0:40", Drop(1, 40, "rank 0 on a: the disk is full"), id="given up"),
            pytest.param("write 40; prepared 40; entered 40; hush b; published 40", Settle(1, 40), id="committed"),
        ],
    )
    def test_who_was_away(self, script, word):
        """It is told when it is back, because it says that it has a part of it."""
        told = story(f"{SAVERS}; {script}")
        assert [node for node, _ in orders(told, Settle, Drop)] == ["a"]
        told.play("back b")
        assert orders(told, Settle, Drop) == [("b", word)]
        told.play("back b")
        assert orders(told, Settle, Drop) == []

    def test_a_rank_missed_it_when_its_node_had_no_stream(self):
        """It says so when it is back, so that nobody waits for that part."""
        told = story(f"{SAVERS}; stage 40; hush b", max_restarts=1)
        told.desk("b").shards[1, 40] = Shard(1, 40, Part.MISSED, "the disk is full")
        told.play("back b")
        assert [node for node, _ in orders(told, Drop)] == ["a", "b"]
        assert told.play("crash 0") == "running 2: a b, 1 charged"


class TestTheNextWorld:
    """A world names the newest checkpoint of the ledger, and the ledger is committed with it."""

    def test_it_goes_on_from_the_newest(self):
        """Everybody is told."""
        told = story(f"{SAVERS}; checkpoint 40; checkpoint 50; crash 0", max_restarts=1)
        (commit,) = [each for each in told.commands if isinstance(each, Commit)]
        assert commit.checkpoints == (checkpoint(50), checkpoint(40))
        assert commit.world.resume_from == checkpoint(50)
        runs = orders(told, Run)
        assert [run.assignment.resume_from for _, run in runs] == [checkpoint(50)] * 2

    def test_without_one_it_names_none(self):
        """Where to begin is for rank 0 to find out."""
        told = story(f"{SAVERS}; write 40; prepared 40; crash 0", max_restarts=1, save_wait_s=0)
        (world,) = committed(told.commands)
        assert world.resume_from is None

    def test_whoever_leads_next_knows_them(self):
        """They are kept with what else is kept."""
        told = story(f"{SAVERS}; checkpoint 40; ok 0")
        (keep,) = [each for each in told.commands if isinstance(each, Keep)]
        assert keep.checkpoints == (checkpoint(40),)

    def test_what_the_ledger_was_asked_to_take_is_kept_as_well(self):
        """Else what is kept a moment later would take it out again."""
        told = story(f"{SAVERS}; checkpoint 40; write 50; prepared 50; ok 0")
        (keep,) = [each for each in told.commands if isinstance(each, Keep)]
        assert keep.checkpoints == (checkpoint(50), checkpoint(40))


def test_what_people_should_know():
    """Is told, and changes nothing."""
    told = story(SAVERS)
    before = told.job
    told.tell(CheckpointNoted("b", 1, 1, "there is too little memory"))
    assert told.commands == (Tell("rank 1 on b: there is too little memory", "checkpoint", bad=True),)
    assert told.job == before


class TestFound:
    """Where a world names no checkpoint, what rank 0 finds decides for all."""

    def test_everybody_is_told(self):
        """The same."""
        told = story(f"{SAVERS}; found a:30:20")
        resume = Resume(1, checkpoint(30, 0))
        assert orders(told, Resume) == [("a", resume), ("b", resume)]
        assert ledger(told) == ["step-30-0", "step-20-0"]
        (keep,) = [each for each in told.commands if isinstance(each, Keep)]
        assert keep.checkpoints == told.job.checkpoints

    def test_nothing(self):
        """All begin without one."""
        told = story(f"{SAVERS}; found a")
        assert orders(told, Resume) == [("a", Resume(1, None)), ("b", Resume(1, None))]

    @pytest.mark.parametrize(
        "script",
        [
            pytest.param("found b:30", id="another rank has looked"),
            pytest.param("found a:20; found a:30", id="it is told twice"),
            pytest.param("checkpoint 40; crash 0; found a:30", id="the world named one"),
            pytest.param("lose b; found a:30", id="the world is over"),
        ],
    )
    def test_nobody_asked(self, script):
        """It changes nothing."""
        told = story(f"{SAVERS}; {script}", max_restarts=1)
        assert told.commands == ()

    def test_there_are_very_many(self):
        """As many are kept as the ledger keeps."""
        told = story(SAVERS)
        told.tell(CheckpointsFound("a", 1, tuple(checkpoint(step, 0) for step in range(1000, 0, -1))))
        assert [each.step for each in told.job.checkpoints] == list(range(1000, 936, -1))

    def test_a_newer_entry_stays(self):
        """What this world has saved is newer than what it went on from."""
        told = story(f"{SAVERS}; checkpoint 40; found a:30")
        assert ledger(told) == ["step-40-1"]
        assert told.job.saves.resume_from == checkpoint(30, 0)

    @pytest.mark.parametrize("word", ["back b", "behind b"])
    def test_who_was_away_is_told_when_it_is_back(self, word):
        """Whether or not it had its part of the world."""
        told = story(f"{SAVERS}; hush b; found a:30; {word}")
        assert orders(told, Resume) == [("b", Resume(1, checkpoint(30, 0)))]

    def test_the_next_world_names_it(self):
        """Nobody looks again."""
        told = story(f"{SAVERS}; found a:30; crash 0", max_restarts=1)
        assert told.job.world.resume_from == checkpoint(30, 0)


class TestRestoreFailed:
    """A checkpoint that can't be loaded leaves the ledger, and all begin anew with the one before."""

    def test_the_one_before(self):
        """Not charged."""
        told = story(f"{SAVERS}; checkpoint 40; checkpoint 50; crash 0; unrestored 1:step-50-1", max_restarts=1)
        assert outline(told.job) == "running 3: a b, 1 charged"
        assert told.job.world.resume_from == checkpoint(40)
        assert "rank 1 on b can't restore step-50-1: a checksum is wrong" in told.job.world.reason
        assert ledger(told) == ["step-40-1"]

    def test_what_was_found(self):
        """The world that follows names the one before."""
        told = story(f"{SAVERS}; found a:30:20; unrestored 0:step-30-0")
        assert told.job.world.resume_from == checkpoint(20, 0)

    @pytest.mark.parametrize(
        ("level", "script", "reason"),
        [
            pytest.param(
                TOLERANT,
                "found a:30; unrestored 0:step-30-0",
                "rank 0 on a can't restore step-30-0: a checksum is wrong; there is no other checkpoint to go on from",
                id="there is no other",
            ),
            pytest.param(
                OFF,
                "found a:30:20; unrestored 0:step-30-0",
                "rank 0 on a can't restore step-30-0: a checksum is wrong; fault tolerance is off (level 0)",
                id="level 0",
            ),
        ],
    )
    def test_the_end(self, level, script, reason):
        """Nothing is begun from zero."""
        told = story(f"{SAVERS}; {script}", level)
        assert outline(told.job) == "failed 1"
        assert told.job.phase.outcome.reason == reason

    @pytest.mark.parametrize("name", ["step-30-0", "step-9-9"])
    def test_what_nobody_goes_on_from(self, name):
        """Late news, and news of a stranger, change nothing."""
        told = story(f"{SAVERS}; found a:30:20; unrestored 0:step-30-0; unrestored 1:{name}")
        assert outline(told.job) == "running 2: a b"
        assert told.commands == ()


class TestAsk:
    """All ranks save at one step, which is found out by asking each node how far its workers can have got."""

    def test_the_largest_step_is_the_one(self):
        """Everybody is told to wait, and then where to save."""
        told = story(f"{SAVERS}; want b")
        assert orders(told, Pause) == [(node, Pause(1, 1, "every 10 minutes")) for node in "ab"]
        told.play("reached a:12")
        assert told.commands == ()
        told.play("reached b:14")
        save = SaveAt(1, 1, 14, hold=False, reason="every 10 minutes")
        assert sent(told.commands) == (("a", save), ("b", save))

    @pytest.mark.parametrize(
        "script",
        [
            pytest.param("join a b; want a", id="nobody saves"),
            pytest.param("join a b; saver 0; want a", id="not all ranks save"),
            pytest.param("join a b; write 40; want a", id="all save, but nobody looks whether it is asked to"),
            pytest.param(f"{SAVERS}; closed 1; want a", id="one saves no more"),
            pytest.param(f"{SAVERS}; hush b; closed 1; back b; want a", id="one saves no more, as it turns out"),
            pytest.param(f"{SAVERS}; ok 0; want a", id="one has finished"),
            pytest.param(f"{SAVERS}; fail 0; want a", id="one has failed"),
            pytest.param(f"{SAVERS}; hush b; want a", id="a node is silent"),
            pytest.param(f"{SAVERS}; want a; want b", id="they are asked already"),
            pytest.param(f"{SAVERS}; want a; reached a:5 b:5; want a", id="they are about to save"),
            pytest.param(f"{SAVERS}; leave b; want a", id="they are asked for another reason"),
            pytest.param(f"{SAVERS}; want c", id="a stranger wants it"),
        ],
    )
    def test_nobody_is_asked(self, script):
        """Where it can't be had, or is not needed."""
        assert orders(story(script, blame_s=1.0, nodes=(2, 3)), Pause) == []

    def test_who_does_not_answer(self):
        """All go on, and it is said who it was."""
        told = story(f"{SAVERS}; want b; reached a:12; wait 4.9")
        assert told.commands == ()
        told.play("due on")
        assert told.now == 5
        assert [(node, each.step) for node, each in orders(told, SaveAt)] == [("a", None), ("b", None)]
        assert words(told) == ["no checkpoint: b did not say in time where its workers are"]
        told.play("reached b:12:1")
        assert told.commands == ()

    def test_it_can_be_asked_again_when_there_is_one(self):
        """And when it did not come."""
        told = story(f"{SAVERS}; want a; reached a:40 b:40; checkpoint 40; want a")
        assert [each.number for _, each in orders(told, Pause)] == [2, 2]
        told.play("reached a:50 b:50; missed 0:50; want a")
        assert [each.number for _, each in orders(told, Pause)] == [3, 3]

    def test_a_later_one_is_an_answer(self):
        """Ranks that have saved a later step need not save the earlier one."""
        told = story(f"{SAVERS}; want a; reached a:40 b:40; checkpoint 50")
        assert told.job.saves.ask is None

    @pytest.mark.parametrize(
        ("script", "open_"),
        [
            pytest.param("stage 43", True, id="all have staged"),
            pytest.param("missed 0:43", False, id="a rank has missed it"),
            pytest.param("staged 0:43; missed 1:43", False, id="another rank has missed it"),
            pytest.param("write 43; spoilt 43", False, id="not put together"),
            pytest.param("checkpoint 43", False, id="it is there"),
            pytest.param("missed 0:39", True, id="an earlier one is missed"),
            pytest.param("stage 43; missed 0:47", True, id="a later one is missed"),
            pytest.param("staged 0:43; staged 1:47", False, id="they do not agree"),
        ],
    )
    def test_ranks_that_count_in_larger_steps(self, script, open_):
        """The first checkpoint from that step on is the one that was asked for."""
        told = story(f"{SAVERS}; want a; reached a:40 b:41; {script}")
        assert (told.job.saves.ask is not None) == open_

    def test_a_node_that_saved_later_than_it_was_asked_to(self):
        """It has saved: nobody is asked again when it comes on a new stream."""
        told = story(f"{SAVERS}; want a; reached a:40 b:41; stage 43; hush b; back b")
        assert orders(told, Pause, SaveAt) == []

    @pytest.mark.parametrize(
        "script",
        [
            pytest.param("want a; closed 1", id="before it was asked where it is"),
            pytest.param("want a; reached a:40 b:40; closed 1", id="before it has saved"),
            pytest.param("want a; reached a:40 b:40; staged 0:40; closed 1", id="another one has saved"),
        ],
    )
    def test_one_that_saves_no_more(self, script):
        """Nobody waits for it."""
        told = story(f"{SAVERS}; {script}")
        assert words(told) == ["no checkpoint: rank 1 on b saves no more"]
        assert [(node, each.step) for node, each in orders(told, SaveAt)] == [("a", None), ("b", None)]

    def test_one_that_saves_no_more_after_this(self):
        """It has done what it was asked to."""
        told = story(f"{SAVERS}; want a; reached a:40 b:40; stage 40; closed 1")
        assert told.commands == ()

    def test_ranks_that_never_save(self):
        """Are asked again some time."""
        told = story(f"{SAVERS}; want a; reached a:40 b:40; wait 1000; want a")
        assert [each.number for _, each in orders(told, Pause)] == [2, 2]

    def test_a_node_that_lost_its_stream(self):
        """It has let its workers go, so that all are asked anew."""
        told = story(f"{SAVERS}; want a; reached a:12 b:12; hush b; back b")
        assert [(node, each.number) for node, each in orders(told, Pause)] == [("a", 2), ("b", 2)]
        told.play("reached a:13 b:13; stage 13; back b")
        assert orders(told, Pause, SaveAt) == []


class TestAPlannedChange:
    """A join, a leave and a stop wait for a checkpoint that all ranks are asked for, but not for ever."""

    GROWS = "join a; wait 3; saver 0; join b; due on"
    CHANGES = pytest.mark.parametrize(
        ("script", "reason"),
        [
            pytest.param(GROWS, "nodes join", id="a join, after the quiet time"),
            pytest.param("join a b c; saver 0 1 2; leave b", "b leaves", id="a leave"),
            pytest.param("join a b c; saver 0 1 2; term a", "SIGTERM on a", id="a stop"),
        ],
    )

    def told(self, script, **settings):
        return story(script, ELASTIC, (1, 3), **settings)

    @CHANGES
    def test_ranks_that_do_not_save_in_time(self, script, reason):
        """Then the change goes ahead without, and that is said."""
        told = self.told(script, drain_s=20.0)
        told.play(" ".join(("reached", *(f"{node}:40" for node in told.job.world.nodes))))
        told.play("due on")
        assert not isinstance(told.job.phase, Running) or told.job.phase.parting is None
        assert "no checkpoint: not all ranks have saved within the 20 s of --drain-timeout" in words(told)

    @CHANGES
    def test_ranks_are_asked_first(self, script, reason):
        """And do no further step once they have saved."""
        told = self.told(script)
        (number,) = {each.number for _, each in orders(told, Pause)}
        assert {each.reason for _, each in orders(told, Pause)} == {reason}
        told.play(" ".join(("reached", *(f"{node}:40" for node in told.job.world.nodes))))
        assert {(each.number, each.step, each.hold) for _, each in orders(told, SaveAt)} == {(number, 40, True)}
        assert isinstance(told.job.phase, Running)

    @pytest.mark.parametrize(
        ("script", "end"),
        [
            pytest.param(f"{GROWS}; reached a:40; checkpoint 40", "draining 1: a", id="a join"),
            pytest.param(f"{GROWS}; reached a:40; write 40; prepared 40; entered 40", "running 1: a", id="not yet"),
            pytest.param(f"{GROWS}; reached a:40; missed 0:40", "draining 1: a", id="a rank has missed it"),
            pytest.param(f"{GROWS}; reached a:40; write 40; spoilt 40", "draining 1: a", id="it is not put together"),
            pytest.param(f"{GROWS}; wait 5", "draining 1: a", id="nobody answered"),
            pytest.param(f"{GROWS}; reached a:40; wait 29", "running 1: a", id="there is time"),
            pytest.param(f"{GROWS}; reached a:40; wait 30", "draining 1: a", id="the time is over"),
            pytest.param(f"{GROWS}; reached a:40; checkpoint 30", "running 1: a", id="an earlier one will not do"),
            pytest.param("join a; wait 3; join b; wait 3", "draining 1: a", id="nobody saves checkpoints"),
            pytest.param("join a; wait 3; checkpoint 40; join b; wait 3", "draining 1: a", id="nobody can be asked"),
            pytest.param(f"{GROWS}; closed 0", "draining 1: a", id="nobody can be asked any more"),
            pytest.param(f"{GROWS}; reached a:40; checkpoint 43", "draining 1: a", id="a join, in larger steps"),
            pytest.param(f"{GROWS}; reached a:40; missed 0:43", "draining 1: a", id="missed, in larger steps"),
            pytest.param(
                "join a b c; saver 0 1 2; leave b; reached a:9 b:9 c:9; checkpoint 9", "running 2: a c", id="a leave"
            ),
            pytest.param(
                "join a b c; saver 0 1 2; leave b; reached a:9 b:9 c:9", "running 1: a b c", id="who leaves waits"
            ),
            pytest.param(
                "join a b c; saver 0 1 2; leave b; reached a:9 b:9 c:9; wait 30", "running 2: a c", id="not for ever"
            ),
            pytest.param("join a b c; saver 0 1; leave b", "running 2: a c", id="a leave where not all save"),
            pytest.param(
                "join a b c; saver 0 1 2; leave b c; reached a:9 b:9 c:9; checkpoint 9", "running 2: a", id="two leave"
            ),
            pytest.param(
                f"{GROWS}; reached a:40; write 40 50; prepared 50; entered 50",
                "running 1: a",
                id="a later one, not yet",
            ),
            pytest.param(f"{GROWS}; reached a:40; write 40; checkpoint 50", "draining 1: a", id="a later one"),
            pytest.param(f"{GROWS}; leave b; wait 100", "running 1: a", id="the joiner leaves again"),
            pytest.param(f"{GROWS}; reached a:40; join c; checkpoint 40", "draining 1: a", id="one more comes along"),
            pytest.param(f"{GROWS}; reached a:40; wait 29; join c; due on", "draining 1: a", id="one more comes late"),
            pytest.param(f"{PAIR}; term a; reached a:9 b:9; checkpoint 9", "stopped 143", id="a stop"),
            pytest.param(f"{PAIR}; term a; wait 4", "running 1: a b", id="a stop waits"),
            pytest.param(f"{PAIR}; term a; reached a:9 b:9; wait 30", "stopped 143", id="a stop, not for ever"),
            pytest.param(f"{PAIR}; term a; term a", "running 1: a b", id="a stop that is repeated"),
            pytest.param(f"{PAIR}; term a; stop b", "stopped 130", id="a stop, and then a hurry"),
            pytest.param(f"{PAIR}; stop a", "stopped 130", id="a stop in a hurry"),
            pytest.param(f"{PAIR}; term a; crash 0", "stopped 143", id="a failure before a stop"),
            pytest.param("join a b; wait 3; term a", "stopped 143", id="a stop where nobody saves"),
        ],
    )
    def test_it_goes_ahead(self, script, end):
        """When the checkpoint has its name, or can't come any more, or its time is over."""
        assert outline(self.told(script, max_restarts=1).job) == end

    def test_quit_is_a_hurry_too(self):
        """Who wants a dump does not want to wait."""
        told = self.told(PAIR)
        told.tell(StopRequested("a", signal.SIGQUIT))
        assert outline(told.job) == "stopped 131"

    def test_the_world_that_follows_goes_on_from_it(self):
        """No step is lost."""
        told = self.told(f"{self.GROWS}; reached a:40; checkpoint 40; drained a")
        assert outline(told.job) == "running 2: a b"
        assert told.job.world.resume_from == checkpoint(40)

    @pytest.mark.parametrize("script", ["lose b", "leave b", "hush b"])
    def test_nobody_wants_it_any_more(self, script):
        """Workers that hold are let go."""
        told = self.told(f"{self.GROWS}; reached a:40; staged 0:40; {script}")
        assert [(node, each.step, each.hold) for node, each in orders(told, SaveAt)] == [("a", None, False)]
        assert outline(told.job) == "running 1: a"

    def test_a_rank_that_ends_meanwhile(self):
        """Nothing grows then: the others go on."""
        told = self.told("join a b; wait 3; saver 0 1; join c; wait 3; reached a:40 b:40; ok 0")
        assert [(node, each.step) for node, each in orders(told, SaveAt)] == [("a", None), ("b", None)]

    def test_workers_that_were_held_do_not_hang(self):
        """The clock begins anew when they are let go."""
        told = self.told("join a; wait 3; saver 0; progress a:1; join b; wait 3", hang_timeout_s=10.0, drain_s=60.0)
        told.play("reached a:40; wait 50; lose b")
        assert deadline(told.job) == told.now + 10.5

    def test_a_failure_meanwhile(self):
        """The world is over: the next one has the newcomer."""
        told = self.told(f"{self.GROWS}; reached a:40; crash 0", max_restarts=1)
        assert outline(told.job) == "running 2: a b, 1 charged"


class TestJoinAtCheckpoint:
    """A newcomer is taken in only when a checkpoint was committed, however long that takes."""

    GROWS = "join a; wait 3; saver 0; join b; due on"

    def told(self, script, **settings):
        return story(script, ELASTIC, (1, 3), join_at_checkpoint=True, **settings)

    @pytest.mark.parametrize(
        ("script", "end"),
        [
            pytest.param(f"{GROWS}; reached a:40; checkpoint 40", "draining 1: a", id="it is there"),
            pytest.param(f"{GROWS}; reached a:40; wait 100", "running 1: a", id="it is not"),
            pytest.param(f"{GROWS}; reached a:40; missed 0:40; wait 10", "running 1: a", id="it will not come"),
            pytest.param(
                f"checkpoint 10; {GROWS}; reached a:40; missed 0:40; wait 10",
                "running 1: a",
                id="an old one will not do",
            ),
            pytest.param("join a; wait 3; join b; wait 1000", "running 1: a", id="nobody saves"),
            pytest.param(
                "join a; wait 3; join b; wait 9; saver 0; wait 3; reached a:40; checkpoint 40",
                "draining 1: a",
                id="later",
            ),
            pytest.param(f"{GROWS}; reached a:40; term a; wait 30", "stopped 143", id="a stop has its limit"),
        ],
    )
    def test_it_waits(self, script, end):
        """Without limit; whoever ends the job does not."""
        script = script.replace("checkpoint 10; join a; wait 3; saver 0", "join a; wait 3; saver 0; checkpoint 10")
        assert outline(self.told(script).job) == end

    def test_it_is_asked_for_again(self):
        """After a minute, in which workers get on."""
        told = self.told(f"{self.GROWS}; reached a:40; missed 0:40")
        assert [each.step for _, each in orders(told, SaveAt)] == [None]
        missed_at = told.now
        told.play("due on")
        assert told.now == missed_at + 60
        assert len(orders(told, Pause)) == 1

    def test_nobody_is_held_for_ever(self):
        """Where nothing is heard of the checkpoint, workers get on after ten minutes."""
        told = self.told(f"{self.GROWS}; reached a:40")
        held_at = told.now
        told.play("due on")
        assert told.now == held_at + 600
        assert [each.step for _, each in orders(told, SaveAt)] == [None]

    def test_a_leave_has_its_limit(self):
        """It does not wait as long as a join."""
        script = "join a b; wait 3; saver 0 1; join c; wait 3; reached a:40 b:40; leave b"
        assert outline(self.told(f"{script}; wait 29").job) == "running 1: a b"
        assert outline(self.told(f"{script}; wait 30").job) == "running 2: a c"

    def test_a_node_that_was_silent_when_it_was_time(self):
        """The newcomer is not forgotten."""
        told = self.told("join a b; wait 3; saver 0 1; join c; hush b; wait 3")
        assert orders(told, Pause) == []
        told.play("back b; due on")
        assert len(orders(told, Pause)) == 2


class TestAWorldThatIsOver:
    """A save that all ranks have staged, and that can still be finished, is waited for."""

    @pytest.mark.parametrize(
        ("script", "end"),
        [
            pytest.param("staged 0:40; crash 0", "running 2: a b, 1 charged", id="not all have staged it"),
            pytest.param("stage 40; crash 0", "holding 1: a b, 1 charged", id="a failure"),
            pytest.param("write 40; crash 0", "holding 1: a b, 1 charged", id="it is being put together"),
            pytest.param("stage 40; crash 0; checkpoint 40", "running 2: a b, 1 charged", id="it is there"),
            pytest.param("stage 40; crash 0; missed 0:40", "running 2: a b, 1 charged", id="a rank has missed it"),
            pytest.param("write 40; crash 0; spoilt 40", "running 2: a b, 1 charged", id="it is not put together"),
            pytest.param("stage 40; crash 0; wait 29", "holding 1: a b, 1 charged", id="there is time"),
            pytest.param("stage 40; crash 0; wait 30", "running 2: a b, 1 charged", id="the time is over"),
            pytest.param("join c; stage 40; lose b", "running 2: a c", id="who was to write it is gone"),
            pytest.param("join c; stage 40; written 1:40; lose b", "holding 1: a b", id="who is gone has written it"),
            pytest.param("join c; write 40; lose a", "running 2: c b", id="who was to put it together is gone"),
            pytest.param(
                "stage 40; crash 0; hush b; back b", "holding 1: a b, 1 charged", id="who was to write is back"
            ),
        ],
    )
    def test_the_next_one_waits(self, script, end):
        """For as long as it may take, at most."""
        assert outline(story(f"{SAVERS}; {script}", max_restarts=9).job) == end

    def test_the_next_one_goes_on_from_it(self):
        """That is what the wait is for; and it is said."""
        told = story(f"{SAVERS}; stage 40; crash 0", max_restarts=1)
        (held, _) = orders(told, Hold)
        assert "waiting for the checkpoint of step 40, which is being written" in held[1].reason
        told.play("checkpoint 40")
        assert told.job.world.resume_from == checkpoint(40)

    def test_without_a_wait(self):
        """Nobody waits for it where nobody wants to."""
        assert (
            outline(story(f"{SAVERS}; stage 40; crash 0", max_restarts=1, save_wait_s=0).job)
            == "running 2: a b, 1 charged"
        )

    def test_what_comes_too_late_counts_as_long_as_nothing_else_can_be_done(self):
        """A job that holds for want of a node is in no hurry."""
        told = story(f"{SAVERS}; stage 40; written 1:40; lose b; wait 100")
        assert outline(told.job) == "holding 1: a b"
        told.play("checkpoint 40; join c")
        assert told.job.world.resume_from == checkpoint(40)

    def test_a_drain(self):
        """The next world waits for what is staged while its workers stop."""
        told = story("join a; wait 3; join b; wait 3; stage 40; drained a", ELASTIC, (1, 2))
        assert outline(told.job) == "holding 1: a"
        assert told.play("checkpoint 40") == "running 2: a b"

    def test_what_a_node_tells_when_it_comes_back_comes_first(self):
        """Even if it tells of a failure as well: the wait begins with that."""
        told = story(f"{SAVERS}; stage 40; hush b", max_restarts=1)
        told.desk("b").shards[1, 40] = Shard(1, 40, Part.WRITTEN)
        told.play("written 0:40; crash 0; back b")
        assert outline(told.job) == "holding 1: a b, 1 charged"
        assert orders(told, Prepare) == [("a", Prepare(1, 40))]


class TestTheEnd:
    """A job that succeeds or fails waits in the same way; who stops it does not."""

    @pytest.mark.parametrize(
        ("script", "end"),
        [
            pytest.param("stage 40; ok 0 1", "closing: succeeded 0", id="success"),
            pytest.param("stage 40; crash 0", "closing: failed 139", id="failure"),
            pytest.param("stage 40; stop a", "stopped 130", id="stop"),
            pytest.param("checkpoint 40; ok 0 1", "succeeded 0", id="nothing to wait for"),
            pytest.param("stage 40; ok 0 1; write 40; prepared 40; entered 40", "closing: succeeded 0", id="almost"),
            pytest.param("stage 40; ok 0 1; checkpoint 40", "succeeded 0", id="it is there"),
            pytest.param("stage 40; ok 0 1; missed 0:40", "succeeded 0", id="it will not come"),
            pytest.param("stage 40; ok 0 1; wait 30", "succeeded 0", id="the time is over"),
            pytest.param("stage 40; ok 0 1; lose a", "succeeded 0", id="who was to put it together is gone"),
            pytest.param("stage 40; ok 0 1; leave b", "closing: succeeded 0", id="somebody has to go"),
            pytest.param("stage 40; ok 0 1; leave b; wait 30", "succeeded 0", id="somebody has to go by now"),
            pytest.param("stage 40; ok 0 1; leave c", "closing: succeeded 0", id="a stranger has to go"),
            pytest.param("stage 40; ok 0 1; stop a", "succeeded 0", id="somebody is in a hurry"),
            pytest.param("stage 40; ok 0 1; back b", "closing: succeeded 0", id="a new stream"),
            pytest.param(
                "write 40; prepared 40; ok 0 1; not-entered 40; wait 1; entered 40; published 40",
                "succeeded 0",
                id="the ledger is asked again",
            ),
        ],
    )
    def test_it_waits(self, script, end):
        """For a save that can still be finished."""
        assert outline(story(f"{SAVERS}; {script}").job) == end

    def test_an_end_that_does_not_wait_any_longer(self):
        """It is said."""
        told = story(f"{SAVERS}; stage 40; ok 0 1; due on")
        assert words(told) == ["the checkpoint of step 40, which is being written, is not waited for any longer"]

    @pytest.mark.parametrize("end", ["ok 0 1; stop a", "stop a"])
    def test_an_end_in_a_hurry(self, end):
        """It says what it leaves behind."""
        told = story(f"{SAVERS}; stage 40; {end}")
        assert outline(told.job) in ("succeeded 0", "stopped 130")
        assert words(told) == ["the checkpoint of step 40, which is being written, is not waited for any longer"]

    def test_a_stop_whose_time_is_over(self):
        """All were asked to save once more, and that did not come: what came before is not forgotten."""
        told = story(f"{SAVERS}; stage 40; leave a b; reached a:50 b:50; due on")
        assert outline(told.job) == "stopped 143"
        assert words(told) == ["the checkpoint of step 40, which is being written, is not waited for any longer"]

    def test_what_only_some_have_saved(self):
        """Will never be a checkpoint, and that is said at the end, too."""
        told = story(SAVERS)
        told.tell(ShardReported("a", 1, Shard(0, 40, Part.WRITTEN)))
        told.play("ok 0 1")
        assert "no checkpoint of step 40: the job ended before all ranks had saved there" in words(told)

    def test_those_who_train_on_are_stopped(self):
        """Those who have finished are told what they wait for."""
        told = story(f"{SAVERS}; stage 40; crash 0")
        reason = "the job is over; the checkpoint of step 40 is still being written"
        assert sent(told.commands) == tuple((node, Drain(1, 30.0, reason)) for node in "ab")
        told = story(f"{SAVERS}; stage 40; ok 0 1")
        assert sent(told.commands) == tuple((node, Wait(reason)) for node in "ab")

    def test_without_a_wait(self):
        """It is over at once."""
        assert outline(story(f"{SAVERS}; stage 40; ok 0 1", save_wait_s=0).job) == "succeeded 0"

    def test_whoever_asks_meanwhile_waits(self):
        """And is told the end with all others."""
        told = story(f"{SAVERS}; stage 40; ok 0 1; join c")
        assert [(node, type(each)) for node, each in sent(told.commands)] == [("c", Wait)]
        told.play("checkpoint 40")
        assert [node for node, each in orders(told, Halt)] == ["a", "b", "c"]

    def test_whoever_has_to_go_meanwhile_is_kept_as_long_as_it_would_be_otherwise(self):
        """And is told so: it does not end alone."""
        told = story(f"{SAVERS}; stage 40; ok 0 1; leave b", save_wait_s=1000.0, drain_s=20.0)
        assert sent(told.commands) == (
            ("b", Wait("the job is over; the checkpoint of step 40 is still being written")),
        )
        assert deadline(told.job) == told.now + 20
        told.play("leave a")
        assert deadline(told.job) == told.now + 20

    def test_a_story_that_is_still_to_be_told_is_told_first(self):
        """An end that waits has nothing else to do."""
        told = story(f"{SAVERS}; crash 0; stage 40; crash 0; ok 0", max_restarts=1, save_wait_s=30.0)
        assert isinstance(told.job.phase, Closing)
        assert told.job.inquest is None
        assert deadline(told.job) == told.now + 30


class TestANewLeader:
    """What was on its way is lost with the leader; agents tell it again, and it comes to the same."""

    BACK = "lead on; back a b"

    def test_parts(self):
        """All that was written is put together."""
        told = story(f"{SAVERS}; write 40; {self.BACK}")
        assert orders(told, Prepare) == [("a", Prepare(1, 40))]
        told.play("prepared 40; entered 40; published 40; crash 0")
        assert ledger(told) == ["step-40-1"]

    def test_a_name_that_is_not_known_everywhere(self):
        """Rank 0's node has given it its name, and only another node has not heard so: it is told."""
        told = story(f"{SAVERS}; write 40; prepared 40; entered 40; hush b; published 40; lead on; back a")
        assert orders(told, Publish) == []
        told.play("back b")
        assert orders(told, Publish) == [("a", Publish(1, 40))]
        told.play("published 40")
        assert orders(told, Settle) == [("a", Settle(1, 40)), ("b", Settle(1, 40))]

    def test_savers(self):
        """Who can be asked is known."""
        assert len(orders(story(f"{SAVERS}; {self.BACK}; want a"), Pause)) == 2

    @pytest.mark.parametrize(
        "script",
        [
            pytest.param("write 40; prepared 40", id="the ledger has it, and nobody was told"),
            pytest.param("write 40; prepared 40; entered 40", id="it has no name yet"),
        ],
    )
    def test_what_the_ledger_has_taken_is_given_its_name(self, script):
        """It is in the ledger once."""
        told = story(f"{SAVERS}; {script}; lead on; back a")
        assert ledger(told) == ["step-40-1"]
        assert orders(told, Prepare, Publish) == [("a", Publish(1, 40))]
        told.play("back b")
        assert orders(told, Prepare, Publish) == []
        told.play("published 40; write 40; prepared 40; entered 40")
        assert ledger(told) == ["step-40-1"]

    def test_what_rank_0_found(self):
        """Who has been told is told the same, and the others as well."""
        told = story(f"{SAVERS}; found a:30; lead on; back b")
        assert orders(told, Resume) == []
        told.play("back a")
        resume = Resume(1, checkpoint(30, 0))
        assert orders(told, Resume) == [("a", resume), ("b", resume)]
        assert ledger(told) == ["step-30-0"]

    def test_an_answer_to_the_leader_before(self):
        """Is nobody's: what it asked for is asked again by whoever wants it."""
        told = story(f"{SAVERS}; want a; {self.BACK}; reached a:40:1 b:40:1")
        assert told.commands == ()
        told.tell(CheckpointEntered(1, 40, entered=True))
        assert ledger(told) == []

    def test_an_end_that_waits(self):
        """It waits for the same checkpoint again, as soon as it is told of the ends."""
        told = story(f"{SAVERS}; stage 40; ok 0; ok 1; lead on; back a")
        exits = (each.exit for each in told.told if type(each).__name__ == "WorkerExited" and each.exit.rank == 1)
        told.come_back("b", exits=tuple(exits))
        assert outline(told.job) == "closing: succeeded 0"
        assert told.play("checkpoint 40") == "succeeded 0"

    def test_the_next_world(self):
        """It names what the ledger names."""
        told = story(f"{SAVERS}; checkpoint 40; {self.BACK}; crash 0", max_restarts=1)
        assert told.job.world.resume_from == checkpoint(40)

    def test_newcomers(self):
        """They are asked for again."""
        told = story("join a; wait 3; saver 0; join b; wait 3; reached a:40", ELASTIC, (1, 2))
        told.play("lead on; back a; join b; due on")
        assert len(orders(told, Pause)) == 1
        assert isinstance(told.job.phase, Running)
        told.play("reached a:41; checkpoint 41")
        assert isinstance(told.job.phase, Draining)


class TestWhoIsAskedToGo:
    """SIGTERM gives time for a checkpoint; what else happens meanwhile does not take that time away."""

    # All ranks were asked, and have staged what they were asked for.
    TERM = f"{PAIR}; term a; reached a:9 b:9; stage 9"
    LEAVE = f"{PAIR}; leave a b; reached a:9 b:9; stage 9"
    # A failure, and the next world waits for what all ranks have staged.
    HOLDS = f"{PAIR}; stage 9; crash 0"
    # One of three leaves.
    ONE = "join a b c; saver 0 1 2; leave b; reached a:9 b:9 c:9; stage 9"

    def told(self, script, **settings):
        return story(script, ELASTIC, (1, 3), max_restarts=9, **settings)

    @pytest.mark.parametrize(
        ("script", "end"),
        [
            pytest.param(f"{TERM}; crash 0", "closing: stopped 143", id="a stop, and a failure"),
            pytest.param(f"{TERM}; lose b", "stopped 143", id="a stop, and who was to write is gone"),
            pytest.param(
                f"{TERM}; written 1:9; lose b", "closing: stopped 143", id="a stop, and who has written is gone"
            ),
            pytest.param(f"{TERM}; crash 0; checkpoint 9", "stopped 143", id="it is there"),
            pytest.param(f"{TERM}; crash 0; missed 1:9", "stopped 143", id="it will not come"),
            pytest.param(f"{TERM}; wait 10; crash 0; wait 19", "closing: stopped 143", id="there is time"),
            pytest.param(f"{TERM}; wait 10; crash 0; wait 20", "stopped 143", id="not longer than without the failure"),
            pytest.param(f"{TERM}; crash 0; term a", "closing: stopped 143", id="it is asked for again"),
            pytest.param(f"{TERM}; crash 0; leave b", "closing: stopped 143", id="others are to go as well"),
            pytest.param(f"{TERM}; crash 0; stop b", "stopped 143", id="somebody is in a hurry"),
            pytest.param(f"{TERM}; stop b", "stopped 130", id="somebody was in a hurry before"),
            pytest.param(f"{LEAVE}; crash 0", "closing: stopped 143", id="all leave, and a failure"),
            pytest.param(f"{LEAVE}; crash 0; checkpoint 9", "stopped 143", id="all leave, and it is there"),
            pytest.param(f"{HOLDS}; term a", "closing: stopped 143", id="a stop while the next world waits"),
            pytest.param(f"{HOLDS}; term a; checkpoint 9", "stopped 143", id="and it is there"),
            pytest.param(f"{HOLDS}; term a; wait 30", "stopped 143", id="not for ever"),
            pytest.param(f"{HOLDS}; stop a", "stopped 130", id="a hurry while the next world waits"),
            pytest.param(f"{HOLDS}; leave a b", "closing: stopped 143", id="all leave while the next world waits"),
            pytest.param(f"{HOLDS}; leave a b; checkpoint 9", "stopped 143", id="all leave, and it is there then"),
            pytest.param(f"{PAIR}; stage 9; ok 0; term a", "closing: stopped 143", id="nobody can be asked any more"),
            pytest.param(f"{PAIR}; stage 9; term a; crash 0", "closing: stopped 143", id="another one was due"),
        ],
    )
    def test_an_end(self, script, end):
        """What all ranks have staged is waited for, for as long as the end would have waited anyway."""
        assert outline(self.told(script).job) == end

    def test_the_ledger_has_it_then(self):
        """Started again, the job goes on from there."""
        told = self.told(f"{self.TERM}; crash 0; checkpoint 9")
        assert told.record.checkpoints == (checkpoint(9),)
        assert [node for node, _ in orders(told, Halt)] == ["a", "b"]

    def test_workers_are_stopped_meanwhile(self):
        """Their parts outlive them."""
        told = self.told(f"{self.TERM}; crash 0")
        assert [node for node, _ in orders(told, Drain)] == ["a", "b"]
        assert orders(told, Halt) == []

    @pytest.mark.parametrize(
        ("script", "end"),
        [
            pytest.param("", "holding 1: a b c, 1 charged", id="it stays"),
            pytest.param("checkpoint 9", "running 2: a c, 1 charged", id="it is there"),
            pytest.param("missed 2:9", "running 2: a c, 1 charged", id="it will not come"),
            pytest.param("wait 19", "holding 1: a b c, 1 charged", id="there is time"),
            pytest.param("wait 20", "running 2: a c, 1 charged", id="not longer than without the failure"),
            pytest.param("lose b", "running 2: a c, 1 charged", id="it is gone"),
            pytest.param("hush b; checkpoint 9", "holding 1: a b c, 1 charged", id="it is silent"),
            pytest.param("hush b; back b; leave b; checkpoint 9", "running 2: a c, 1 charged", id="it asks again"),
            pytest.param("leave b; leave b", "holding 1: a b c, 1 charged", id="it asks several times"),
            pytest.param("leave a", "holding 1: a b c, 1 charged", id="one more"),
            pytest.param("leave a; checkpoint 9", "running 2: c, 1 charged", id="both go then"),
            pytest.param("leave a c", "closing: stopped 143", id="all are to go"),
            pytest.param("leave a c; checkpoint 9", "stopped 143", id="all go then"),
            pytest.param("term a", "closing: stopped 143", id="the job is to end"),
        ],
    )
    def test_one_of_several(self, script, end):
        """It goes when the checkpoint that it has a part in is there; the others go on from that."""
        told = self.told(f"{self.ONE}; wait 10; crash 0")
        told.play(script or "wait 0")
        assert outline(told.job) == end

    def test_who_has_done_its_part_goes_at_once(self):
        """The others get on meanwhile: nobody stops them for a checkpoint."""
        told = self.told("join a b c; saver 0 1 2; stage 9; ok 1; leave b")
        assert outline(told.job) == "running 1: a b c"
        assert [node for node, _ in orders(told, Halt)] == ["b"]

    def test_the_others_go_on_from_it(self):
        """Who left had a part in it."""
        told = self.told(f"{self.ONE}; crash 0")
        assert orders(told, Halt) == []
        told.play("checkpoint 9")
        assert told.job.world.resume_from == checkpoint(9)
        assert [node for node, _ in orders(told, Halt)] == ["b"]

    def test_a_leave_while_the_next_world_waits(self):
        """It has a part in what that waits for; a spare has not."""
        told = story(f"{SAVERS}; join c; stage 9; crash 0; leave b", max_restarts=9)
        assert outline(told.job) == "holding 1: a b, 1 charged"
        told.play("leave c")
        assert [node for node, _ in orders(told, Halt)] == ["c"]
        assert outline(told.job) == "holding 1: a b, 1 charged"

    @pytest.mark.parametrize(
        ("script", "nodes"),
        [
            pytest.param("leave b", ["b"], id="a leave"),
            pytest.param("leave b; leave b", [], id="a leave that is repeated"),
            pytest.param("leave b; wait 5; leave a", ["a"], id="another one, later"),
            pytest.param("term a", ["a"], id="a stop"),
            pytest.param("term a; term a", [], id="a stop that is repeated"),
        ],
    )
    def test_who_asks_to_go_while_workers_hold_is_answered(self, script, nodes):
        """Nobody is asked to save once more: without a word it would not know that its request was heard."""
        settings = {"join_at_checkpoint": True}
        told = self.told(f"{PAIR}; join c; wait 3; reached a:9 b:9; wait 60; {script}", **settings)
        assert [node for node, _ in orders(told, Wait)] == nodes
        assert orders(told, Pause) == []

    def test_who_stays_is_answered(self):
        """Its workers are stopped, but it is not told to go."""
        told = self.told(f"{self.ONE}; crash 0")
        assert [node for node, _ in orders(told, Hold)] == ["a", "b", "c"]
        assert [node for node, _ in orders(told, Wait)] == ["b"]
        told.play("leave c")
        assert [node for node, _ in orders(told, Wait)] == ["c"]


class TestWhoIsSilent:
    """A planned change for which nobody can be asked, because a node is silent, waits for it, but only for a moment."""

    def told(self, script, **settings):
        return story(script, ELASTIC, (1, 3), **settings)

    @pytest.mark.parametrize(
        ("script", "end"),
        [
            pytest.param("hush b; term a", "running 1: a b", id="a stop"),
            pytest.param("hush b; leave a", "running 1: a b", id="a leave"),
            pytest.param("hush b; join c; wait 3", "running 1: a b", id="a join"),
            pytest.param("hush b; term a; wait 4", "running 1: a b", id="it may come back"),
            pytest.param("hush b; term a; wait 5", "stopped 143", id="it does not"),
            pytest.param("hush b; term a; lose b", "stopped 143", id="it is lost"),
            pytest.param("hush b; term a; stop a", "stopped 130", id="somebody is in a hurry"),
            pytest.param("hush b; leave a; wait 5", "holding 1: a b", id="a leave does not wait for long"),
            pytest.param("hush b; fail 0; term a", "stopped 143", id="a worker has failed"),
            pytest.param("lead on; back a; term a", "running 1: a b", id="a new leader"),
            pytest.param("lead on; back a; term a; wait 5", "stopped 143", id="a new leader, and nobody comes"),
            pytest.param("hush b; join c; wait 3; lose c", "running 1: a b", id="who wanted to join is gone again"),
        ],
    )
    def test_it_is_waited_for(self, script, end):
        """For less long than for a checkpoint."""
        assert outline(self.told(f"{PAIR}; {script}", max_restarts=1, blame_s=0.25).job) == end

    @pytest.mark.parametrize(
        "script", ["join a b; wait 3; hush b; term a", "join a b; wait 3; saver 1; hush b; term a"]
    )
    def test_a_job_that_does_not_save(self, script):
        """Ends at once: the one who is here could not be asked, whoever comes back."""
        assert outline(self.told(script).job) == "stopped 143"

    @pytest.mark.parametrize(
        ("script", "reason"),
        [
            pytest.param("hush b; term a; wait 3; back b", "SIGTERM on a", id="a stop"),
            pytest.param("hush b; leave a; wait 3; back b", "a leaves", id="a leave"),
            pytest.param("hush b; join c; wait 4; back b", "nodes join", id="a join"),
            pytest.param("lead on; back a; term a; back b", "SIGTERM on a", id="a new leader"),
        ],
    )
    def test_all_are_asked_when_it_is_back(self, script, reason):
        """As they would have been."""
        told = self.told(f"{PAIR}; {script}")
        assert [(node, each.reason) for node, each in orders(told, Pause)] == [("a", reason), ("b", reason)]
        assert told.play("reached a:9 b:9; stage 9") == "running 1: a b"

    def test_that_is_part_of_the_time(self):
        """Whoever asked is not kept any longer because of it."""
        told = self.told(f"{PAIR}; hush b; term a; wait 4; back b; reached a:9 b:9; wait 25")
        assert outline(told.job) == "running 1: a b"
        assert told.play("wait 1") == "stopped 143"
