"""Profiles of small stages: the paper's figures, and random ones."""

from __future__ import annotations

import random
from collections.abc import Sequence

from mainstay_core.dmr.operators import Operator, Origin, Pass, Tensor
from mainstay_core.dmr.profiles import AcSegment, Profile, Window, WindowKind


def window_of(
    name: str,
    after: int,
    seconds: float,
    headroom: int = 1 << 40,
    *,
    kind: WindowKind = WindowKind.INTER,
    static: bool = True,
) -> Window:
    return Window(
        name=name,
        after=after,
        kind=kind,
        median_s=seconds,
        least_s=seconds / 2,
        static=static,
        headroom_bytes=headroom,
    )


def linear_operators(block: int, layers: int, boundary: int = 0) -> list[Operator]:
    """Figure 8's block: F, then B and W of each layer from the last on, a second each.

    Tensors count on over blocks: ``boundary`` is the number of the block's first activation.
    """

    def operator(in_pass: Pass, ordinal: int, inputs: Sequence[str], output: str) -> Operator:
        return Operator(
            block=block,
            in_pass=in_pass,
            ordinal=ordinal,
            name=f"{in_pass.value[0].upper()}{ordinal + 1}",
            inputs=tuple(inputs),
            outputs=(output,),
            median_s=1.0,
        )

    found = [
        operator(Pass.FORWARD, layer, [f"A{boundary + layer}"], f"A{boundary + layer + 1}")
        for layer in range(layers)
    ]
    for layer in reversed(range(layers)):
        gradient = f"dA{boundary + layer + 1}"
        found.append(operator(Pass.BACKWARD, layer, [gradient], f"dA{boundary + layer}"))
        inputs = [f"A{boundary + layer}", gradient]
        found.append(operator(Pass.WEIGHT, layer, inputs, f"dW{boundary + layer + 1}"))
    return found


def linear_stage(
    blocks: int,
    layers: int,
    recomputed: int,
    window_s: float,
    headroom: int,
    budget: int = 1 << 40,
) -> Profile:
    """A stage of such blocks, each tensor one byte, one window behind all.

    The first ``recomputed`` forward operators of each block are its AC segment.
    """
    made = [linear_operators(block, layers, block * layers) for block in range(blocks)]
    forward = [op for ops in made for op in ops if op.in_pass is Pass.FORWARD]
    backward = [op for ops in reversed(made) for op in ops if op.in_pass is not Pass.FORWARD]
    operators = (*forward, *backward)
    last = blocks * layers
    tensors = [
        Tensor(name="A0", size_bytes=1, origin=Origin.RECEIVED),
        Tensor(name=f"dA{last}", size_bytes=1, origin=Origin.RECEIVED),
    ]
    tensors += [Tensor(name=name, size_bytes=1) for op in operators for name in op.outputs]
    segments = [
        AcSegment(
            name=f"ac-{block}",
            operators=tuple(f"{block}/forward/{n}" for n in range(recomputed)),
            kept=(),
        )
        for block in range(blocks)
        if recomputed
    ]
    return Profile(
        fingerprint="job",
        stage=0,
        budget_bytes=budget,
        tensors=tuple(tensors),
        operators=operators,
        results=(f"A{last}", "dA0", *(f"dW{n + 1}" for n in range(last))),
        ac_segments=tuple(segments),
        windows=(window_of("wait", len(operators), window_s, headroom),),
    )


class RandomStage:
    """Draws a profile: blocks with AC segments, weights, operators in place, and windows."""

    def __init__(
        self, seed: int, blocks: int = 2, most_operators: int = 5, *, visits: int = 1
    ) -> None:
        self._visits = visits
        """With 2, a micro-batch goes to another stage and back between the first two blocks."""
        self._rng = random.Random(seed)
        self._tensors: list[Tensor] = [
            Tensor(name="in", size_bytes=2, origin=Origin.RECEIVED),
            Tensor(name="d-out", size_bytes=2, origin=Origin.RECEIVED),
        ]
        self._operators: list[Operator] = []
        self._segments: list[AcSegment] = []
        self._results: list[str] = []
        self._gone: set[str] = set()
        self._blocks = blocks
        self._most = most_operators

    def draw(self) -> Profile:
        """Return the profile. Equal seeds give equal ones."""
        inputs, outputs, inside = ["in"], [], []
        for block in range(self._blocks):
            inside.append(self._forward(block, inputs[-1]))
            outputs.append(inside[-1][-1])
            crosses = self._visits > 1 and block == 0
            inputs.append(self._cross(outputs[-1], "d-in") if crosses else outputs[-1])
        self._results.append(outputs[-1])
        gradient = "d-out"
        for block in reversed(range(self._blocks)):
            gradient = self._backward(block, [inputs[block], *inside[block]], gradient)
            if self._visits > 1 and block == 1:
                gradient = self._cross(gradient, "d-back")
        self._results.append(gradient)
        self._step()
        return Profile(
            fingerprint="job",
            stage=0,
            budget_bytes=self._rng.choice([0, 20, 60, 1000]),
            tensors=tuple(self._tensors),
            operators=tuple(self._operators),
            results=tuple(self._results),
            ac_segments=tuple(self._segments),
            windows=self._windows(),
        )

    def _cross(self, sent: str, received: str) -> str:
        """Send a tensor to another stage; return what comes back of it."""
        self._results.append(sent)
        self._tensors.append(Tensor(name=received, size_bytes=2, origin=Origin.RECEIVED))
        return received

    def _make(
        self,
        block: int,
        in_pass: Pass,
        ordinal: int,
        inputs: Sequence[str],
        outputs: int = 1,
        overwrites: Sequence[str] = (),
        compared: bool = False,
    ) -> list[str]:
        rng = self._rng
        made = [f"{block}-{in_pass.value}-{ordinal}-{n}" for n in range(outputs)]
        self._tensors += [Tensor(name=name, size_bytes=rng.randint(1, 4)) for name in made]
        self._gone |= set(overwrites)
        self._operators.append(
            Operator(
                block=block,
                in_pass=in_pass,
                ordinal=ordinal,
                name="op",
                inputs=tuple(dict.fromkeys(inputs)),
                outputs=tuple(made),
                median_s=float(rng.randint(1, 8)),
                static=rng.random() < 0.9,
                communication_s=float(rng.randint(1, 20)) if rng.random() < 0.15 else 0.0,
                overwrites=tuple(overwrites),
                compared=compared,
            )
        )
        return made

    def _forward(self, block: int, given: str) -> list[str]:
        rng, made, have = self._rng, [], [given]
        count = rng.randint(2, self._most)
        for ordinal in range(count):
            inputs = [have[-1], *(rng.sample(have, 1) if rng.random() < 0.5 else [])]
            if rng.random() < 0.5:
                weight = f"w-{block}-{ordinal}"
                self._tensors.append(Tensor(name=weight, size_bytes=9, origin=Origin.ADDRESSED))
                inputs.append(weight)
            have += self._make(block, Pass.FORWARD, ordinal, inputs, rng.choice([1, 1, 2]))
            made = have[1:]
        self._add_segments(block, count)
        return made

    def _add_segments(self, block: int, count: int) -> None:
        rng = self._rng
        start = 0
        while start < count and rng.random() < 0.8:
            stop = rng.randint(start + 1, count)
            names = tuple(f"{block}/forward/{n}" for n in range(start, stop))
            kept = names[-1:] if len(names) > 1 and rng.random() < 0.5 else ()
            self._segments.append(AcSegment(name=f"ac-{block}-{start}", operators=names, kept=kept))
            start = stop

    def _backward(self, block: int, forward: list[str], gradient: str) -> str:
        rng = self._rng
        for ordinal in range(rng.randint(1, self._most)):
            inputs = [gradient, rng.choice(forward)]
            weight = self._make(block, Pass.WEIGHT, ordinal, inputs)
            # Some are read by nobody: an operator whose result does not count.
            if rng.random() < 0.85:
                self._results += weight
            inputs = [gradient, *rng.sample(forward, rng.randint(0, 1))]
            overwrites = [gradient] if rng.random() < 0.3 and not gradient.startswith("d-") else []
            (gradient,) = self._make(
                block, Pass.BACKWARD, ordinal, inputs, 1, overwrites=overwrites
            )
        return gradient

    def _step(self) -> None:
        alive = [name for name in self._results if name not in self._gone]
        for ordinal in range(self._rng.randint(0, 3)):
            name = self._rng.choice(alive)
            alive.remove(name)
            self._results.remove(name)
            compared = self._rng.random() < 0.3
            self._results += self._make(
                0, Pass.STEP, ordinal, [name], 1, overwrites=[name], compared=compared
            )
            if not alive:
                break

    def _windows(self) -> tuple[Window, ...]:
        rng, count = self._rng, len(self._operators)
        places = sorted(
            count if rng.random() < 0.4 else rng.randint(1, count) for _ in range(rng.randint(0, 5))
        )
        return tuple(
            window_of(
                f"window-{number}",
                after,
                float(rng.randint(1, 30)),
                rng.randint(0, 80),
                kind=rng.choice(list(WindowKind)),
                static=rng.random() < 0.8,
            )
            for number, after in enumerate(places)
        )


MIB = 1 << 20
LLAMA_OPERATORS = (
    # name, milliseconds, of its communication, MiB of its weight's gradient
    ("norm", 0.1, 0.0, 0),
    ("qkv", 0.6, 0.5, 80),
    ("attention", 0.7, 0.0, 0),
    ("out", 0.45, 0.5, 64),
    ("norm", 0.1, 0.0, 0),
    ("up", 1.2, 0.5, 176),
    ("activation", 0.2, 0.0, 0),
    ("down", 0.6, 0.5, 88),
)
"""A layer of Llama-3-70B over eight devices: times that its operations suggest."""


def llama_stage(blocks: int, headroom_mib: int, slack_ms: float) -> Profile:
    """A stage shaped like those of table 1: each block is one AC segment, one window behind all."""
    operators: list[Operator] = []
    sizes: dict[str, int] = {}

    def add(
        block: int, in_pass: Pass, number: int, inputs: Sequence[str], output: str, mib: int
    ) -> None:
        name, milliseconds, communication, _ = LLAMA_OPERATORS[number]
        factor = 2 if name == "attention" and in_pass is Pass.BACKWARD else 1
        gathers = in_pass is not Pass.WEIGHT
        sizes[output] = mib * MIB
        operators.append(
            Operator(
                block=block,
                in_pass=in_pass,
                ordinal=number,
                name=name,
                inputs=tuple(inputs),
                outputs=(output,),
                median_s=factor * milliseconds / 1000,
                communication_s=communication / 1000 if gathers else 0.0,
            )
        )

    last = len(LLAMA_OPERATORS)
    gradients = []
    for block in range(blocks):
        for number in range(last):
            at = block * last + number
            add(block, Pass.FORWARD, number, [f"A{at}"], f"A{at + 1}", 16)
    for block in reversed(range(blocks)):
        for number in reversed(range(last)):
            at = block * last + number
            inputs = [f"dA{at + 1}", f"A{at}"]
            add(block, Pass.BACKWARD, number, inputs, f"dA{at}", 16)
            weight_mib = LLAMA_OPERATORS[number][3]
            if weight_mib:
                add(block, Pass.WEIGHT, number, inputs, f"dW{at}", weight_mib)
                gradients.append(f"dW{at}")
    given = [
        Tensor(name=name, size_bytes=16 * MIB, origin=Origin.RECEIVED)
        for name in ("A0", f"dA{blocks * last}")
    ]
    made = [Tensor(name=name, size_bytes=size) for name, size in sizes.items()]
    headroom = blocks * headroom_mib * MIB
    return Profile(
        fingerprint="job",
        stage=0,
        budget_bytes=headroom,
        tensors=(*given, *made),
        operators=tuple(operators),
        results=(f"A{blocks * last}", "dA0", *gradients),
        ac_segments=tuple(
            AcSegment(
                name=f"ac-{block}",
                operators=tuple(f"{block}/forward/{number}" for number in range(last)),
                kept=(),
            )
            for block in range(blocks)
        ),
        windows=(window_of("wait", len(operators), blocks * slack_ms / 1000, headroom),),
    )
