"""Plays the exchanges between the cells of a stage that are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mainstay_core.rank.connections import GroupEnded
from mainstay_train.comm.operations import Exchange


class PlayedExchanges:
    """The exchanges of one reduction among the cells of a stage.

    Args:
        num_cells: that take part in each exchange.
    """

    def __init__(self, num_cells: int) -> None:
        self._num_cells = num_cells
        self._sent: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}
        """By number of the exchange and sender, cut by receiver."""
        self._changed = threading.Condition()
        self.ended: str | None = None
        """Why nobody exchanges anything any more; None: they go on."""

    def send(self, number: int, sender: int, pieces: tuple[torch.Tensor, ...]) -> None:
        """Let the others have what a cell sends in an exchange.

        Raises:
            GroupEnded: a cell has given up.
        """
        with self._changed:
            if self.ended is not None:
                raise GroupEnded(self.ended)
            self._sent[number, sender] = pieces
            self._changed.notify_all()

    def is_over(self, number: int) -> bool:
        """Return whether all cells have sent, or will send nothing any more."""
        with self._changed:
            return self.ended is not None or self._is_complete(number)

    def received(self, number: int, receiver: int) -> list[torch.Tensor]:
        """Wait for what a cell gets in an exchange; return it by sender.

        Raises:
            GroupEnded: a cell has given up.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.ended is not None or self._is_complete(number))
            if not self._is_complete(number):
                raise GroupEnded(str(self.ended))
            return [self._sent[number, sender][receiver] for sender in range(self._num_cells)]

    def end(self, why: str) -> None:
        """Have all waits end."""
        with self._changed:
            self.ended = self.ended or why
            self._changed.notify_all()

    def _is_complete(self, number: int) -> bool:
        return all((number, sender) in self._sent for sender in range(self._num_cells))


@dataclass(frozen=True, slots=True)
class _Arrival:
    """The work of one exchange, as the product's groups have it."""

    exchanges: PlayedExchanges
    number: int

    def is_completed(self) -> bool:
        """Return whether nobody has to wait for it."""
        return self.exchanges.is_over(self.number)


class PlayedGroup:
    """The group of a stage's cells as a reduction uses it, in one of these cells.

    Args:
        exchanges: of all cells.
        rank: of this cell.
    """

    def __init__(self, exchanges: PlayedExchanges, rank: int) -> None:
        self._exchanges, self._rank, self._number = exchanges, rank, 0

    @property
    def ended(self) -> str | None:
        """Why it has ended; None: it has not."""
        return self._exchanges.ended

    def start_exchange(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
    ) -> Exchange:
        """Send to each cell its piece; arguments as of :meth:`Group.start_exchange`.

        Raises:
            GroupEnded: a cell has given up.
        """
        del received_sizes
        number, self._number = self._number, self._number + 1
        pieces = torch.split(sent.clone(), [*sent_sizes])
        self._exchanges.send(number, self._rank, pieces)
        return Exchange(_Arrival(self._exchanges, number), received, received, sent)

    def finish_exchange(self, exchange: Exchange) -> None:
        """Wait for what the other cells send.

        Raises:
            GroupEnded: a cell has given up.
        """
        pieces = self._exchanges.received(exchange.work.number, self._rank)
        exchange.received.copy_(torch.cat(pieces))

    def abandon(self, exchanges: Sequence[Exchange]) -> None:
        """Give up: exchanges that were started are not finished."""
        del exchanges
        self._exchanges.end("a cell has given its exchanges up")
