"""Which samples each rank trains on, so that a training can stop anywhere and go on with another number of ranks.

The position is kept in samples of the epoch that the whole world has used. It moves by ``advance()``, one global batch
at a time, and not by iterating: what a data loader has read ahead, and nobody has trained on, does not count. As of any
restored checkpoint each sample of an epoch was used exactly once, whatever crashed and whoever joined or left before;
but for the last global batch of the epoch, which is padded or dropped, and counted.

    sampler = ElasticSampler(dataset, batch_size=32)
    loader = DataLoader(dataset, batch_sampler=sampler.batches())   # torch.utils.data and paddle.io alike
    ckpt = Checkpointer(folder, model=model, optimizer=optimizer, sampler=sampler, every_steps=1000)
    step = ckpt.restore()
    for epoch in range(sampler.epoch, epochs):                      # after restore(): not always from 0
        for batch in loader:                                        # what is left of the epoch
            ...
            ckpt.step(step)                                         # calls sampler.advance(), then saves if it is time
            step += 1

With torch, ``DataLoader(dataset, batch_size=32, sampler=sampler)`` does the same, if the two batch sizes are equal and
``drop_last`` is left to the sampler. Standard library only; the same order on every machine and in every Python.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from random import Random
from typing import Literal, TypeAlias

Last: TypeAlias = Literal["pad", "drop"]
# Part of the state: a position means something in the order that it was counted in only.
_SHUFFLED = "shuffled-1"
_SEQUENTIAL = "sequential"
_FITS_FOUR_BYTES = 2**32
# Our launcher's, torchrun's and paddle's.
_RANKS = ("ELASTIC_RANK", "RANK", "PADDLE_TRAINER_ID")
_SIZES = ("ELASTIC_WORLD_SIZE", "WORLD_SIZE", "PADDLE_TRAINERS_NUM")


@dataclass(frozen=True, slots=True)
class Deal:
    """How the samples of an epoch are dealt: batch after batch, to each rank its part of a global batch."""

    size: int
    # Of one rank.
    batch_size: int
    world_size: int
    last: Last

    def __post_init__(self) -> None:
        for name in ("size", "batch_size", "world_size"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {getattr(self, name)!r}")
        if self.last not in ("pad", "drop"):
            raise ValueError(f"last must be 'pad' or 'drop', got {self.last!r}")
        if not self.batches(0):
            whole = f"{self.world_size} ranks with a batch of {self.batch_size} each"
            raise ValueError(f"{self.size} samples are not enough for {whole}: all would be dropped (last='drop')")

    @property
    def global_batch(self) -> int:
        return self.batch_size * self.world_size

    def batches(self, used: int) -> int:
        """How many are left for each rank of an epoch of which so many samples are used."""
        rest = self.size - used
        return rest // self.global_batch if self.last == "drop" else -(-rest // self.global_batch)

    def share(self, used: int, rank: int) -> range:
        """A rank's places in the next global batch, as many as any other's. Those beyond the size are padding."""
        each = -(-min(self.global_batch, self.size - used) // self.world_size)
        return range(used + rank * each, used + (rank + 1) * each)

    def padding(self, used: int) -> int:
        """How many places of the next global batch are padding."""
        return max(0, self.share(used, self.world_size - 1).stop - self.size)


@dataclass(frozen=True, slots=True)
class Position:
    """How far the whole world is. There is always a batch left in the epoch, for the world that it was settled for."""

    epoch: int = 0
    # Samples of this epoch that are used: fewer than there are.
    used: int = 0
    # Since the start of the training.
    padded: int = 0
    dropped: int = 0


def advanced(position: Position, deal: Deal) -> Position:
    """One global batch later."""
    used = min(position.used + deal.global_batch, deal.size)
    return settled(replace(position, used=used, padded=position.padded + deal.padding(position.used)), deal)


def settled(position: Position, deal: Deal) -> Position:
    """In the next epoch, if there is no batch left in this one; what is left over is dropped."""
    if deal.batches(position.used):
        return position
    return Position(position.epoch + 1, 0, position.padded, position.dropped + deal.size - position.used)


def shuffled(size: int, seed: int, epoch: int) -> array[int]:
    """All numbers below the size in an order of the seed and the epoch: the same one everywhere."""
    # Python promises that random() stays as it is, and promises nothing for shuffle().
    draw = Random(f"{seed}/{epoch}").random  # noqa: S311
    order = array("I" if size <= _FITS_FOUR_BYTES else "Q", range(size))
    for place in range(size - 1, 0, -1):
        other = int(draw() * (place + 1))
        order[place], order[other] = order[other], order[place]
    return order


class ElasticSampler:
    """The indices of one rank, for a data loader. See the module's text for how it is used.

    ``last`` says what becomes of the samples that do not fill a global batch at the end of an epoch. "pad": they make a
    smaller one, with samples from the epoch's beginning repeated until all ranks have the same number of them. "drop":
    they are not used.
    """

    def __init__(
        self,
        dataset: int | Sized,
        batch_size: int,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        last: Last = "pad",
    ) -> None:
        """Takes a dataset, or its size. Rank and world size are those of any launcher, unless they are given."""
        size = dataset if isinstance(dataset, int) else len(dataset)
        self.rank = _told(rank, _RANKS, 0)
        self.deal = Deal(size, batch_size, _told(world_size, _SIZES, 1), last)
        if not 0 <= self.rank < self.deal.world_size:
            raise ValueError(f"rank must be from 0 to {self.deal.world_size - 1}, got {self.rank}")
        self.shuffle = shuffle
        self.seed = seed
        self._position = Position()
        # The epoch that was shuffled last, with its order.
        self._shuffled: tuple[int, array[int]] | None = None

    @property
    def epoch(self) -> int:
        """The epoch that the next step belongs to."""
        return self._position.epoch

    @property
    def position(self) -> int:
        """How many samples of the epoch the whole world has used."""
        return self._position.used

    @property
    def padded(self) -> int:
        """How many samples were used a second time, to fill up last global batches, since the start of the training."""
        return self._position.padded

    @property
    def dropped(self) -> int:
        """How many samples were left out at the ends of epochs, since the start of the training."""
        return self._position.dropped

    @property
    def batches_per_epoch(self) -> int:
        """Of a whole epoch in this world; ``len`` says what is left of this one."""
        return self.deal.batches(0)

    def __iter__(self) -> Iterator[int]:
        """The indices of this rank, for the rest of the epoch."""
        return (index for batch in self.batches() for index in batch)

    def __len__(self) -> int:
        """How many indices an iteration that begins now has."""
        ahead = (len(self.batches()) - 1) * self.deal.batch_size
        return ahead + len(self.deal.share(self.position + ahead * self.deal.world_size, self.rank))

    def batches(self) -> ElasticBatchSampler:
        """The same in lists, one for each step, as a loader's ``batch_sampler``."""
        return ElasticBatchSampler(self)

    def order(self) -> Sequence[int]:
        """The whole epoch, in the order in which the world uses it."""
        if not self.shuffle:
            return range(self.deal.size)
        if self._shuffled is None or self._shuffled[0] != self.epoch:
            # The old one goes first: they may be large.
            self._shuffled = None
            self._shuffled = self.epoch, shuffled(self.deal.size, self.seed, self.epoch)
        return self._shuffled[1]

    def advance(self, batches: int = 1) -> None:
        """The whole world has trained on its next batch (or on several, where a step takes several).

        At the end of an epoch the next one begins. Call it on every rank, before ``state_dict``.
        """
        for _ in range(batches):
            self._position = advanced(self._position, self.deal)

    def set_epoch(self, epoch: int) -> None:
        """Go on with the beginning of a later epoch; in this one nothing changes, wherever the position is.

        For loops that do so with the samplers of their framework. Where ``advance`` is called it is not needed.
        """
        if epoch < self.epoch:
            raise ValueError(f"epoch {epoch} is over, this is {self.epoch}: begin the loop at sampler.epoch")
        if epoch > self.epoch:
            self._position = replace(self._position, epoch=epoch, used=0)

    def state_dict(self) -> dict[str, int | str]:
        """Where the training is, the same on all ranks."""
        return {
            "size": self.deal.size,
            "seed": self.seed,
            "order": self._order_name,
            "epoch": self.epoch,
            "position": self.position,
            "padded": self.padded,
            "dropped": self.dropped,
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from there, with any world size and batch size. Iterators that exist already do not follow."""
        self._refuse_other_data(state)
        counts = [_count(state, name) for name in ("epoch", "position", "padded", "dropped")]
        position = Position(*counts)
        if position.used >= self.deal.size:
            raise ValueError(f"the sampler's state is at sample {position.used} of {self.deal.size}")
        self._position = settled(position, self.deal)

    @property
    def _order_name(self) -> str:
        return _SHUFFLED if self.shuffle else _SEQUENTIAL

    def _refuse_other_data(self, state: Mapping[str, object]) -> None:
        """A position in another order would use samples twice, and others never."""
        mine = {"size": self.deal.size, "seed": self.seed, "order": self._order_name}
        for name, value in mine.items():
            if name not in state:
                raise ValueError(f"the sampler's state has no {name}")
            if state[name] != value and (name != "seed" or self.shuffle):
                words = {"size": "a dataset of another size", "seed": "another seed", "order": "another order"}
                raise ValueError(f"the sampler's state is of {words[name]}: {state[name]!r}, here it is {value!r}")


class ElasticBatchSampler:
    """A sampler's indices in lists; the position is the sampler's."""

    def __init__(self, sampler: ElasticSampler) -> None:
        self.sampler = sampler
        self.batch_size = sampler.deal.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        """What is left of the epoch now; nothing that happens to the sampler later changes that."""
        return _dealt(self.sampler.order(), self.sampler.deal, self.sampler.rank, self.sampler.position)

    def __len__(self) -> int:
        """How many batches an iteration that begins now has: the same on all ranks."""
        return self.sampler.deal.batches(self.sampler.position)


def _dealt(order: Sequence[int], deal: Deal, rank: int, used: int) -> Iterator[list[int]]:
    for _ in range(deal.batches(used)):
        yield [order[place % deal.size] for place in deal.share(used, rank)]
        used += deal.global_batch


def _told(value: int | None, variables: tuple[str, ...], default: int) -> int:
    """A value that was given, or else the launcher's, or else the one of a program that runs alone."""
    variable = next((each for each in variables if os.environ.get(each)), variables[0])
    text = os.environ.get(variable, "")
    if value is not None or not text:
        return default if value is None else value
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{variable} must be a whole number, got {text!r}") from None


def _count(state: Mapping[str, object], name: str) -> int:
    value = state.get(name)
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} of the sampler's state must be 0 or more, got {value!r}")
    return value
