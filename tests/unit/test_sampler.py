"""What a sampler gives to a rank, table by table; ``test_sampler_stories.py`` has the whole."""

from __future__ import annotations

import hashlib
import re
import time
from collections import Counter
from itertools import islice

import pytest

from elastic_adapter.core.checkpoint.sampler import ElasticSampler, shuffled


def sampler(size=10, batch_size=2, **options):
    return ElasticSampler(size, batch_size, **{"rank": 0, "world_size": 1, "shuffle": False, **options})


class TestOrder:
    """The order of an epoch."""

    def test_it_is_the_same_everywhere(self):
        """In every process and every version of Python; a change of it would need another name in the state."""
        assert list(shuffled(10, 0, 0)) == [7, 0, 1, 5, 4, 9, 2, 8, 6, 3]
        assert list(shuffled(10, 0, 1)) == [1, 8, 6, 0, 9, 5, 2, 4, 3, 7]
        assert list(shuffled(10, 1, 0)) == [2, 4, 5, 1, 0, 6, 7, 8, 3, 9]
        text = ",".join(map(str, shuffled(10_000, 7, 3)))
        digest = "1589f53840bd81b00b01b33827accb008820b632a1fa049853db0554e1b2f0ce"
        assert hashlib.sha256(text.encode()).hexdigest() == digest

    @pytest.mark.parametrize("size", [1, 2, 3, 1000])
    def test_it_is_a_permutation(self, size):
        """Each once."""
        assert sorted(shuffled(size, 5, 0)) == list(range(size))

    def test_all_orders_are_as_likely(self):
        """Each of the 24 orders of four comes up about as often as any other."""
        counts = Counter(tuple(shuffled(4, seed, 0)) for seed in range(24_000))
        assert len(counts) == 24
        assert 850 < min(counts.values()) <= max(counts.values()) < 1150

    def test_it_is_quick_and_small(self):
        """Ten million take seconds, and four bytes each; without shuffling they take nothing."""
        begun = time.process_time()
        order = shuffled(1_000_000, 0, 0)
        assert time.process_time() - begun < 3.0
        assert order.itemsize == 4
        assert sampler(10**15).order() == range(10**15)
        assert list(islice(sampler(10**15, world_size=10**6, rank=10**6 - 1), 3)) == [1999998, 1999999, 3999998]

    def test_an_epoch_is_shuffled_once(self):
        """However often it is iterated."""
        shuffling = sampler(shuffle=True)
        first = shuffling.order()
        assert shuffling.order() is first
        shuffling.set_epoch(1)
        assert list(shuffling.order()) == list(shuffled(10, 0, 1))


class TestIteration:
    """What a rank is given."""

    def test_lists_and_indices(self):
        """The same samples either way."""
        ranks = [sampler(10, 2, rank=rank, world_size=2) for rank in range(2)]
        assert [list(each.batches()) for each in ranks] == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]]]
        assert [list(each) for each in ranks] == [[0, 1, 4, 5, 8], [2, 3, 6, 7, 9]]
        assert [(len(each), len(each.batches()), each.batches_per_epoch) for each in ranks] == [(5, 3, 3)] * 2

    def test_padding_repeats_the_epoch_s_first(self):
        """As few as make the ranks equal."""
        ranks = [sampler(5, 2, rank=rank, world_size=2) for rank in range(2)]
        assert [list(each.batches()) for each in ranks] == [[[0, 1], [4]], [[2, 3], [0]]]
        ranks[0].advance(2)
        assert (ranks[0].epoch, ranks[0].position, ranks[0].padded, ranks[0].dropped) == (1, 0, 1, 0)

    def test_padding_goes_round(self):
        """Where there are more ranks than samples."""
        assert [list(sampler(3, 9, rank=rank, world_size=8)) for rank in range(8)] == [
            [index] for index in (0, 1, 2, 0, 1, 2, 0, 1)
        ]

    def test_dropping(self):
        """What does not fill a global batch is not used, and counted."""
        dropping = sampler(11, 2, world_size=2, last="drop")
        assert list(dropping.batches()) == [[0, 1], [4, 5]]
        dropping.advance(2)
        assert (dropping.epoch, dropping.position, dropping.padded, dropping.dropped) == (1, 0, 0, 3)

    def test_reading_moves_nothing(self):
        """Look at a batch, read ahead, evaluate: the position is by advance() only."""
        reading = sampler()
        for _ in range(3):
            assert next(iter(reading)) == 0
            assert len(list(reading.batches())) == 5
        assert reading.state_dict() == sampler().state_dict()

    def test_the_rest_of_the_epoch_then_the_next(self):
        """An iteration begins at the position; one that has begun is not disturbed by what comes later."""
        going = sampler(6, 2)
        going.advance()
        rest = iter(going.batches())
        going.advance(2)
        assert list(rest) == [[2, 3], [4, 5]]
        assert (going.epoch, list(going.batches())) == (1, [[0, 1], [2, 3], [4, 5]])

    def test_a_larger_world_may_have_no_use_for_the_rest(self):
        """Then it is dropped, and the next epoch begins."""
        small = sampler(10, 2, last="drop")
        small.advance(4)
        large = sampler(10, 2, world_size=2, last="drop")
        large.load_state_dict(small.state_dict())
        assert (large.epoch, large.position, large.dropped) == (1, 0, 2)


def steps(state, most, *, says_the_epoch):
    """At most so many steps of the loop that everybody writes, to the end of epoch 2: what they used, and the state."""
    looping, used = sampler(shuffle=True), []
    if state is not None:
        looping.load_state_dict(state)
    for epoch in range(looping.epoch, 3):
        if says_the_epoch:
            looping.set_epoch(epoch)
        for batch in looping.batches():
            if len(used) == most:
                return used, looping.state_dict()
            used.append((epoch, batch))
            looping.advance()
    return used, looping.state_dict()


class TestEpochs:
    """The loop over epochs that everybody writes."""

    @pytest.mark.parametrize("says_the_epoch", [False, True])
    @pytest.mark.parametrize("crash", range(16))
    def test_the_loop(self, crash, says_the_epoch):
        """Interrupted after any step, it goes on there; set_epoch does no harm."""
        before, state = steps(None, crash, says_the_epoch=says_the_epoch)
        after, _ = steps(state, 99, says_the_epoch=says_the_epoch)
        expected = [(epoch, list(shuffled(10, 0, epoch)[at : at + 2])) for epoch in range(3) for at in range(0, 10, 2)]
        assert before + after == expected

    def test_a_loop_that_counts_nothing(self):
        """Who trains without checkpoints says the epoch, as with the samplers of the frameworks."""
        plain = sampler(shuffle=True)
        for epoch in range(3):
            plain.set_epoch(epoch)
            assert list(plain) == list(shuffled(10, 0, epoch))

    def test_set_epoch(self):
        """The epoch that it is in: nothing. A later one: its beginning. An earlier one is refused."""
        moving = sampler()
        moving.advance()
        moving.set_epoch(0)
        assert (moving.epoch, moving.position) == (0, 2)
        moving.set_epoch(2)
        assert (moving.epoch, moving.position) == (2, 0)
        with pytest.raises(ValueError, match=r"^epoch 1 is over, this is 2: begin the loop at sampler\.epoch$"):
            moving.set_epoch(1)


class TestState:
    """What is saved and what is taken back."""

    def test_plain(self):
        """Whole numbers and words; the same on all ranks."""
        saving = sampler(10, 2, rank=1, world_size=2, shuffle=True, seed=7)
        saving.advance(4)
        expected = {"size": 10, "seed": 7, "order": "shuffled-1", "epoch": 1, "position": 4, "padded": 0, "dropped": 0}
        assert saving.state_dict() == expected

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"size": 11}, "the sampler's state is of a dataset of another size: 11, here it is 10"),
            ({"seed": 1}, "the sampler's state is of another seed: 1, here it is 0"),
            ({"order": "sequential"}, "the sampler's state is of another order: 'sequential', here it is 'shuffled-1'"),
            ({"position": 10}, "the sampler's state is at sample 10 of 10"),
            ({"position": -2}, "position of the sampler's state must be 0 or more, got -2"),
            ({"epoch": None}, "epoch of the sampler's state must be 0 or more, got None"),
            ({"padded": "1"}, "padded of the sampler's state must be 0 or more, got '1'"),
        ],
    )
    def test_another_state_is_refused(self, change, words):
        """In words, and nothing has changed."""
        loading = sampler(shuffle=True)
        loading.advance()
        before = loading.state_dict()
        with pytest.raises(ValueError, match=f"^{words}$"):
            loading.load_state_dict({**before, **change})
        assert loading.state_dict() == before

    def test_half_a_state_is_refused(self):
        """Whatever is missing."""
        state = sampler().state_dict()
        for name in state:
            with pytest.raises(ValueError, match=name):
                sampler().load_state_dict({key: value for key, value in state.items() if key != name})

    def test_the_seed_of_no_shuffling(self):
        """It has no meaning, so it may differ."""
        sampler(seed=1).load_state_dict(sampler(seed=2).state_dict())


class TestMade:
    """How a sampler comes by its settings."""

    def test_by_the_launcher(self, monkeypatch):
        """Rank and world size, read when it is made; what is given counts more."""
        monkeypatch.setenv("ELASTIC_RANK", "2")
        monkeypatch.setenv("ELASTIC_WORLD_SIZE", "4")
        told = ElasticSampler(8, 1, shuffle=False)
        assert (told.rank, told.deal.world_size, list(told)) == (2, 4, [2, 6])
        assert list(ElasticSampler(8, 1, shuffle=False, rank=0)) == [0, 4]
        assert list(ElasticSampler(8, 1, shuffle=False, rank=1, world_size=2)) == [1, 3, 5, 7]
        monkeypatch.setenv("ELASTIC_WORLD_SIZE", "many")
        with pytest.raises(ValueError, match=r"^ELASTIC_WORLD_SIZE must be a whole number, got 'many'$"):
            ElasticSampler(8, 1)

    @pytest.mark.parametrize("names", [("RANK", "WORLD_SIZE"), ("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM")])
    def test_by_another_launcher(self, monkeypatch, names):
        """Whose ranks would otherwise all train on the same samples; our own counts more."""
        for name, value in zip(names, ("1", "2"), strict=True):
            monkeypatch.setenv(name, value)
        assert list(ElasticSampler(4, 1, shuffle=False)) == [1, 3]
        monkeypatch.setenv("ELASTIC_RANK", "0")
        monkeypatch.setenv("ELASTIC_WORLD_SIZE", "4")
        assert list(ElasticSampler(4, 1, shuffle=False)) == [0]

    def test_alone(self, monkeypatch):
        """Without a launcher it is the only rank."""
        for name in ("ELASTIC_RANK", "ELASTIC_WORLD_SIZE", "RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        assert list(ElasticSampler("abc", 2, shuffle=False).batches()) == [[0, 1], [2]]

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"size": 0}, "size must be a whole number of at least 1, got 0"),
            ({"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
            ({"batch_size": 2.5}, "batch_size must be a whole number of at least 1, got 2.5"),
            ({"world_size": 0}, "world_size must be a whole number of at least 1, got 0"),
            ({"rank": 3, "world_size": 3}, "rank must be from 0 to 2, got 3"),
            ({"rank": -1}, "rank must be from 0 to 0, got -1"),
            ({"last": "keep"}, "last must be 'pad' or 'drop', got 'keep'"),
            (
                {"world_size": 6, "last": "drop"},
                "10 samples are not enough for 6 ranks with a batch of 2 each: all would be dropped (last='drop')",
            ),
        ],
    )
    def test_nonsense_is_refused(self, options, words):
        """When it is made, in one line."""
        with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
            sampler(**options)
