"""A played stage: computes small integers, flips one, and carries out a plan's checks.

It knows nothing of the rule of coverage. Operators are random functions onto few values, so that
they often hide a wrong input, as rounding does.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mainstay_core.dmr.operators import Operator, Pass
from mainstay_core.dmr.plan import Comparison, Method, Piece
from mainstay_core.dmr.profiles import Profile

NUM_VALUES = 3
Values = dict[str, int]


@dataclass(frozen=True)
class Flip:
    """One wrong output of one execution."""

    operator: str
    tensor: str
    recompute: bool


def compute(operator: Operator, read: Callable[[str], int]) -> Values:
    """What an operator makes of what it reads."""
    inputs = [read(name) for name in operator.inputs]
    return {
        name: zlib.crc32(repr((operator.id, name, inputs)).encode()) % NUM_VALUES
        for name in operator.outputs
    }


class PlayedStage:
    """One passage of a micro-batch, with a flip or without."""

    def __init__(self, profile: Profile, flip: Flip | None = None) -> None:
        self._profile = profile
        self._flip = flip
        self._again = profile.recomputed_at
        self.first: Values = {
            tensor.name: zlib.crc32(tensor.name.encode()) % NUM_VALUES
            for tensor in profile.tensors
            if tensor.name not in profile.graph.makers
        }
        self.recomputed: Values = {}
        for place, operator in enumerate(profile.operators):
            for other, at in self._again.items():
                if at == place:
                    recomputed = profile.operators[other]
                    self.recomputed |= self._execute(recomputed, recompute=True)
            self.first |= self._execute(operator, recompute=False)

    @property
    def results(self) -> list[int]:
        return [self.first[name] for name in self._profile.results]

    def _execute(self, operator: Operator, *, recompute: bool) -> Values:
        made = compute(operator, lambda name: self._read(operator, name, recompute=recompute))
        flip = self._flip
        if flip is not None and (flip.operator, flip.recompute) == (operator.id, recompute):
            made[flip.tensor] = (made[flip.tensor] + 1) % NUM_VALUES
        return made

    def _read(self, operator: Operator, name: str, *, recompute: bool) -> int:
        """A backward reads what its own block's recompute made, and so does a recompute."""
        maker = self._profile.graph.makers.get(name)
        late = recompute or operator.in_pass is not Pass.FORWARD
        if late and maker is not None and maker in self._again:
            made_by = self._profile.operators[maker]
            if made_by.block == operator.block and operator.in_pass is not Pass.STEP:
                return self.recomputed.get(name, self.first[name])
        return self.first[name]

    def is_seen(self, pieces: Iterable[Piece]) -> bool:
        """Whether some check finds executions that differ."""
        for operator in self._profile.operators:
            if operator.compared and any(
                self.first[name] != value
                for name, value in compute(
                    operator, lambda name, op=operator: self._read(op, name, recompute=False)
                ).items()
            ):
                return True
        return any(self._differs(piece) for piece in pieces)

    def _differs(self, piece: Piece) -> bool:
        names = [comparison.tensor for comparison in piece.comparisons]
        if piece.method is Method.PIGGYBACK:
            return self._differs_from(names, self._second(piece), self.first)
        if (
            self._profile.graph.places[piece.operators[0]] in self._again
            and len(piece.operators) == 1
        ):  # naive, and recomputed: checked both times
            return self._differs_from(
                names, self._replay(piece, late=True), self.recomputed
            ) or self._differs_from(names, self._replay(piece, late=False), self.first)
        return self._differs_from(names, self._replay(piece, late=None), self.first)

    @staticmethod
    def _differs_from(names: list[str], one: Values, other: Values) -> bool:
        return any(one[name] != other[name] for name in names)

    def _second(self, piece: Piece) -> Values:
        """The recompute, and the operators that it leaves out, executed behind it."""
        made = dict(self.recomputed)
        own: set[str] = set()
        for name in piece.operators:
            place = self._profile.graph.places[name]
            operator = self._profile.operators[place]
            own.update(operator.outputs)
            if place not in self._again:
                made |= compute(
                    operator, (self.first | {t: made[t] for t in own & made.keys()}).__getitem__
                )
        return made

    def _replay(self, piece: Piece, *, late: bool | None) -> Values:
        """A piece executed again from what lies outside of it.

        Args:
            piece: what to execute.
            late: whether it reads as a recompute does; None for as each operator did, helpers
                as in the recompute.
        """
        made: Values = {}
        for name in piece.operators:
            operator = self._profile.operators[self._profile.graph.places[name]]
            recompute = name in piece.helpers if late is None else late
            outside = {
                tensor: self._read(operator, tensor, recompute=recompute)
                for tensor in operator.inputs
                if tensor not in made
            }
            made |= compute(operator, (made | outside).__getitem__)
        return made


def list_flips(profile: Profile) -> list[Flip]:
    """Every flip of one output, in both executions where there are two."""
    found = [
        Flip(operator.id, name, recompute=False)
        for operator in profile.operators
        for name in operator.outputs
    ]
    found += [
        Flip(profile.operators[place].id, name, recompute=True)
        for place in profile.recomputed_at
        for name in profile.operators[place].outputs
    ]
    return found


def without(piece: Piece, comparison: Comparison) -> tuple[Comparison, ...]:
    """A piece's comparisons without one."""
    return tuple(other for other in piece.comparisons if other != comparison)
