"""A generated task whose answer takes layers one after the other: walks on a ring.

A row is a walk. A move leads some places on, a turn changes the direction of all later moves, a
reset begins again at place 0. The target at each position is where the walk stands and which way it
goes. What a move does depends on how many turns came before it, so a model has to count turns
before it can add moves. Walks between resets have all lengths: short ones are learnt first, and
longer ones on top of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mainstay_train.exact.draws import Address
from mainstay_train.model.data import Batch, Dataset

FIRST_TOKEN = 128
"""Tokens of moves and targets begin here, beyond those of ASCII text."""
RESET, TURN = 0, 1


@dataclass(frozen=True, slots=True)
class Walks:
    """Samples of walks, by address.

    Args:
        sequence: moves per sample.
        micro_batch_size: samples per micro-batch.
        places: of the ring.
        reset_share: of the moves that are resets.
        turn_share: of the moves that are turns.
    """

    sequence: int
    micro_batch_size: int
    places: int = 4
    reset_share: float = 0.1
    turn_share: float = 0.3

    in_memory = True

    def batch(self, address: Address) -> Batch:
        """Moves and where each has led, int64 [micro_batch_size, sequence]."""
        generator, shape = address.generator("walks"), (self.micro_batch_size, self.sequence)
        kinds = torch.rand(shape, generator=generator)
        steps = torch.randint(1, self.places, shape, generator=generator)
        is_reset = kinds < self.reset_share
        is_reset[:, 0] = True
        is_turn = ~is_reset & (kinds < self.reset_share + self.turn_share)
        moves = torch.where(is_reset, RESET, torch.where(is_turn, TURN, TURN + steps))
        return Batch(FIRST_TOKEN + moves, FIRST_TOKEN + self._led_to(moves))

    def _led_to(self, moves: torch.Tensor) -> torch.Tensor:
        """Return place and direction after each move, as one number."""
        order = torch.arange(self.sequence).expand_as(moves)
        last_reset = torch.where(moves == RESET, order, 0).cummax(1).values
        turns = (moves == TURN).cumsum(1)
        is_back = (turns - turns.gather(1, last_reset)) % 2
        along = torch.where(moves > TURN, moves - TURN, 0) * (1 - 2 * is_back)
        total = along.cumsum(1)
        place = (total - total.gather(1, last_reset)) % self.places
        return 2 * place + is_back

    def fingerprint(self) -> str:
        """Everything that a batch depends on but its address."""
        shares = f"{self.reset_share}/{self.turn_share}"
        return f"walks {self.places} {shares} {self.micro_batch_size}x{self.sequence}, version 1"


@dataclass(frozen=True, slots=True)
class Beside:
    """Micro-batches whose first rows come from one data set and the others from another one."""

    first: Dataset
    second: Dataset

    in_memory = True

    def batch(self, address: Address) -> Batch:
        """The rows of both."""
        one, other = self.first.batch(address), self.second.batch(address)
        return Batch(torch.cat([one.tokens, other.tokens]), torch.cat([one.targets, other.targets]))

    def fingerprint(self) -> str:
        """Those of both."""
        return f"{self.first.fingerprint()} beside {self.second.fingerprint()}"
