"""Each sample of an epoch is used exactly once as of the restored checkpoint, whatever crashes and whoever comes or goes.

The same stories are told of samplers that are broken on purpose, to show that it would be noticed.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from itertools import islice

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from elastic_adapter.core.checkpoint.sampler import ElasticSampler, shuffled

LIMITS = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": list(HealthCheck)}


class BrokenPromise(AssertionError):
    """What a sampler does not keep."""


def promise(kept, words):
    if not kept:
        raise BrokenPromise(words)


@dataclass(frozen=True)
class Life:
    """One generation: it restores, trains for some steps, saves after some of them, and crashes."""

    world_size: int
    batch_size: int
    steps: int
    # After which of its steps it saves.
    saves: frozenset[int]
    # How many batches its loaders read ahead.
    ahead: int
    # Whether its loaders take lists, or single indices and make the lists themselves.
    lists: bool


@dataclass(frozen=True)
class Plan:
    size: int
    last: str
    shuffle: bool
    seed: int
    lives: tuple[Life, ...]
    # The last life goes on until these are over.
    epochs: int


@st.composite
def plans(draw):
    lives = draw(
        st.lists(
            st.builds(
                Life,
                world_size=st.integers(1, 6),
                batch_size=st.integers(1, 4),
                steps=st.integers(0, 12),
                saves=st.frozensets(st.integers(1, 12), max_size=4),
                ahead=st.integers(0, 5),
                lists=st.booleans(),
            ),
            min_size=1,
            max_size=6,
        )
    )
    if draw(st.booleans()):
        lives = [replace(life, batch_size=lives[0].batch_size) for life in lives]
    last = draw(st.sampled_from(("pad", "drop")))
    # A world that could use no sample at all is refused.
    fewest = max(life.world_size * life.batch_size for life in lives) if last == "drop" else 1
    return Plan(
        size=draw(st.integers(fewest, fewest + 40)),
        last=last,
        shuffle=draw(st.booleans()),
        seed=draw(st.integers(0, 3)),
        lives=tuple(lives),
        epochs=draw(st.integers(1, 3)),
    )


class Loader:
    """What a framework's loader does with a sampler: it reads ahead."""

    def __init__(self, sampler, life):
        self._source = iter(sampler.batches()) if life.lists else self._lists(iter(sampler), life.batch_size)
        self._ahead = life.ahead
        self._read = deque()

    @staticmethod
    def _lists(indices, batch_size):
        while batch := list(islice(indices, batch_size)):
            yield batch

    def take(self):
        """The next batch; None: there is none."""
        self._read.extend(islice(self._source, self._ahead + 1 - len(self._read)))
        return self._read.popleft() if self._read else None


@dataclass
class Account:
    """What was trained on, as of a checkpoint, kept apart from what the samplers say."""

    # For each epoch its global batches: a tuple of the ranks' batches.
    used: dict[int, list[tuple[list[int], ...]]] = field(default_factory=dict)
    # How large the global batch was in the world in which an epoch ended.
    ended: dict[int, int] = field(default_factory=dict)

    def copy(self):
        return Account({epoch: list(batches) for epoch, batches in self.used.items()}, dict(self.ended))


def run(plan, make=ElasticSampler):
    """Tell the whole story; raises ``BrokenPromise``."""
    account, saved = Account(), (None, Account())
    for number, life in enumerate(plan.lives):
        state, account = saved[0], saved[1].copy()
        samplers = born(plan, life, make, state, account)
        loaders = None
        last = number == len(plan.lives) - 1
        done = 0
        while samplers[0].epoch < plan.epochs if last else done < life.steps:
            loaders = loaders or [Loader(sampler, life) for sampler in samplers]
            if train(samplers, loaders, life, account):
                loaders = None
            done += 1
            promise(done < 1000, "an epoch ends")
            if done in life.saves:
                saved = samplers[0].state_dict(), account.copy()
    judge(plan, account, samplers[0])


def born(plan, life, make, state, account):
    """The samplers of all ranks, restored."""
    settings = {"world_size": life.world_size, "shuffle": plan.shuffle, "seed": plan.seed, "last": plan.last}
    samplers = [make(plan.size, life.batch_size, rank=rank, **settings) for rank in range(life.world_size)]
    before = 0
    if state is not None:
        before = state["epoch"]
        for sampler in samplers:
            sampler.load_state_dict(json.loads(json.dumps(state)))
    close(account, before, samplers[0].epoch, life)
    agree(samplers)
    return samplers


def train(samplers, loaders, life, account):
    """One step of all ranks; whether it ended the epoch."""
    agree(samplers)
    expected = len(samplers[0].batches()), len(samplers[0])
    batches = tuple(loader.take() for loader in loaders)
    promise(all(batch is not None for batch in batches), "all ranks have a batch for every step of an epoch")
    promise(len({len(batch) for batch in batches}) == 1, "the ranks' batches are of one size")
    promise(0 < len(batches[0]) <= life.batch_size, "a batch is no larger than asked for")
    epoch = samplers[0].epoch
    account.used.setdefault(epoch, []).append(batches)
    for sampler in samplers:
        sampler.advance()
    agree(samplers)
    ended = samplers[0].epoch != epoch
    close(account, epoch, samplers[0].epoch, life)
    if ended:
        promise(expected == (1, len(batches[0])), "len says what is left")
        promise(all(loader.take() is None for loader in loaders), "all ranks have the same number of batches")
    else:
        left = len(samplers[0].batches()), len(samplers[0])
        promise(left == (expected[0] - 1, expected[1] - life.batch_size), "len says what is left")
        promise(len(batches[0]) == life.batch_size, "only the last batch of an epoch is smaller")
    return ended


def close(account, before, after, life):
    promise(before <= after <= before + 1, "epochs follow each other")
    if after > before:
        account.ended[before] = life.batch_size * life.world_size


def agree(samplers):
    promise(all(each.state_dict() == samplers[0].state_dict() for each in samplers), "all ranks are at one place")
    promise(len({(len(each), len(each.batches())) for each in samplers}) == 1, "all ranks have the same left")


def flat(batches):
    return [index for ranks in batches for batch in ranks for index in batch]


def judge(plan, account, sampler):
    """Whether everything was used once, as of the last checkpoint and what came after it."""
    padded = dropped = 0
    for epoch in range(sampler.epoch):
        batches = account.used.get(epoch, [])
        indices = Counter(flat(batches))
        promise(set(indices) <= set(range(plan.size)), "only samples of the dataset are used")
        if plan.last == "drop":
            promise(all(count == 1 for count in indices.values()), "no sample is used twice")
            missing = plan.size - len(indices)
            promise(missing < account.ended[epoch], "less than a global batch is dropped")
            dropped += missing
        else:
            promise(len(indices) == plan.size, "every sample is used")
            before = Counter(flat(batches[:-1]))
            promise(all(count == 1 for count in before.values()), "only the last global batch repeats samples")
            repeated = indices.total() - plan.size
            promise(repeated < len(batches[-1]), "no more is repeated than makes the ranks equal")
            padded += repeated
    rest = flat(account.used.get(sampler.epoch, []))
    promise(len(set(rest)) == len(rest) == sampler.position, "the position is the number of samples used")
    promise(sampler.padded == padded, "padding is counted")
    promise(sampler.dropped == dropped, "what is dropped is counted")


@settings(max_examples=500, **LIMITS)
@given(plans())
def test_every_sample_once(plan):
    """As of the restored checkpoint, for any crashes, saves, world sizes, batch sizes and epochs."""
    run(plan)


class Behind:
    """A batch sampler that does something else."""

    def __init__(self, sampler, batches):
        self.sampler = sampler
        self._batches = batches

    def __iter__(self):
        return self._batches()

    def __len__(self):
        return self.sampler.deal.batches(self.sampler.position)


class CountsWhatWasRead(ElasticSampler):
    """It was trained on, it thinks, because a loader has read it."""

    def batches(self):
        def read():
            for batch in ElasticSampler.batches(self):
                ElasticSampler.advance(self)
                yield batch

        return Behind(self, read)

    def advance(self, batches=1):
        pass


class CountsBatches(ElasticSampler):
    """It goes on after as many batches as before, however large they are."""

    def state_dict(self):
        state = super().state_dict()
        return {**state, "position": state["position"] // self.deal.global_batch}

    def load_state_dict(self, state):
        position = min(state["position"] * self.deal.global_batch, self.deal.size - 1)
        super().load_state_dict({**state, "position": position})


class CountsItsOwnBatchOnly(ElasticSampler):
    def advance(self, batches=1):
        state = self.state_dict()
        super().advance()
        if self.epoch == state["epoch"]:
            self.load_state_dict({**state, "position": state["position"] + self.deal.batch_size})


class CountsTooLate(ElasticSampler):
    """The state is that of a step ago: saved before it is advanced."""

    late = None

    def advance(self, batches=1):
        self.late = super().state_dict()
        super().advance()

    def state_dict(self):
        return self.late or super().state_dict()


class BeginsTheEpochAgain(ElasticSampler):
    def load_state_dict(self, state):
        super().load_state_dict({**state, "position": 0})


class ForgetsTheEpoch(ElasticSampler):
    def load_state_dict(self, state):
        super().load_state_dict({**state, "epoch": 0})


class ShufflesByWorld(ElasticSampler):
    """Another order in another world."""

    def order(self):
        return shuffled(self.deal.size, self.seed + self.deal.world_size, self.epoch)


class ShufflesByRank(ElasticSampler):
    def order(self):
        return shuffled(self.deal.size, self.seed + self.rank, self.epoch)


class ShufflesAnew(ElasticSampler):
    """By chance, as it were: another order in each process."""

    born = 0

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        ShufflesAnew.born += self.rank == 0
        self.life = ShufflesAnew.born

    def order(self):
        return shuffled(self.deal.size, self.seed, self.life)


class IgnoresThePosition(ElasticSampler):
    """Each iteration begins at the epoch's beginning."""

    def batches(self):
        fresh = ElasticSampler(self.deal.size, self.deal.batch_size, rank=self.rank, world_size=self.deal.world_size)
        fresh.deal = self.deal
        fresh.order = self.order
        return Behind(self, lambda: iter(ElasticSampler.batches(fresh)))


class GivesAllRanksTheSame(ElasticSampler):
    def __init__(self, *args, **options):
        super().__init__(*args, **{**options, "rank": 0})


class LeavesTheLastBatchUneven(ElasticSampler):
    """Each takes what is there, the first ones more."""

    def batches(self):
        def read():
            for used in range(self.position, self.deal.size, self.deal.global_batch):
                whole = self.order()[used : min(used + self.deal.global_batch, self.deal.size)]
                if batch := list(whole[self.rank :: self.deal.world_size]):
                    yield batch

        return Behind(self, read)


class DoesNotCountPadding(ElasticSampler):
    padded = 0


class ForgetsThePadding(ElasticSampler):
    def load_state_dict(self, state):
        super().load_state_dict({**state, "padded": 0})


class DoesNotCountWhatIsDropped(ElasticSampler):
    """Not where a larger world has no use for what is left."""

    def load_state_dict(self, state):
        super().load_state_dict(state)
        if self.dropped != state["dropped"]:
            super().load_state_dict({**self.state_dict(), "dropped": state["dropped"]})


class PadsWithTheLastSample(ElasticSampler):
    """As many times as it takes for a whole batch."""

    def batches(self):
        def read():
            for batch in ElasticSampler.batches(self):
                yield batch + batch[-1:] * (self.deal.batch_size - len(batch))

        return Behind(self, read)


class DropsInsteadOfPadding(ElasticSampler):
    def __init__(self, size, batch_size, **options):
        enough = size >= batch_size * options["world_size"]
        super().__init__(size, batch_size, **{**options, "last": "drop" if enough else options["last"]})


class PadsInsteadOfDropping(ElasticSampler):
    def __init__(self, *args, **options):
        super().__init__(*args, **{**options, "last": "pad"})


BROKEN = [
    CountsWhatWasRead,
    CountsBatches,
    CountsItsOwnBatchOnly,
    CountsTooLate,
    BeginsTheEpochAgain,
    ForgetsTheEpoch,
    ShufflesByWorld,
    ShufflesByRank,
    ShufflesAnew,
    IgnoresThePosition,
    GivesAllRanksTheSame,
    LeavesTheLastBatchUneven,
    DoesNotCountPadding,
    ForgetsThePadding,
    DoesNotCountWhatIsDropped,
    PadsWithTheLastSample,
    DropsInsteadOfPadding,
    PadsInsteadOfDropping,
]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_it_is_noticed_when_a_sampler(broken):
    """A sampler that is broken in this way breaks a promise within few random stories."""

    @settings(max_examples=500, phases=[Phase.generate], report_multiple_bugs=False, **LIMITS)
    @given(plans())
    def every_sample_once(plan):
        run(plan, broken)

    with pytest.raises(BrokenPromise):
        every_sample_once()
