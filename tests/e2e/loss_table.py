"""Losses of stages with every pair of two values that can meet, and the pairs that none has.

``python -m tests.e2e.loss_search 2`` prints both anew, as they are needed after a change of
:data:`~tests.e2e.loss_factors.VALUES` or :data:`~tests.e2e.loss_factors.RULES`.
"""

from __future__ import annotations

from tests.e2e.loss_factors import Pair, parse

TABLE = """
adjacent apply first 1 llama bfloat16 4 2 2 1 Boundary last api replay-read fixed
adjacent forward last 2 moe float32 4 1 2 1 Boundary last inside replay-read fixed
adjacent log middle 3 moe float32 4 1 2 1 Gradients last pod replay changing
adjacent logged first Auto moe bfloat16 4 1 1 1 Boundary last beside replayed changing
adjacent snapshot early 3 moe float32 4 2 2 1 Gradients last nothing nothing fixed
adjacent snapshot-copied first Auto moe float32 4 1 2 1 Boundary last pod replay-write changing
adjacent snapshot-held first 2 moe float32 4 1 1 1 Gradients last inside replay changing
adjacent vote first 1 llama bfloat16 4 1 2 2 Boundary last beside replay-write fixed
adjacent vote first 1 llama float32 4 1 1 1 Gradients last holder replay fixed
all apply middle 3 moe float32 2 1 1 1 Boundary last api replay-read changing
all forward last 2 moe bfloat16 2 2 1 1 Boundary last nothing nothing changing
all log first Auto llama bfloat16 1 1 2 2 Gradients last api replayed fixed
all logged first 2 moe float32 4 1 1 1 Boundary last api replay-write changing
all snapshot early 2 moe float32 2 1 2 1 Gradients last nothing nothing fixed
all snapshot first 1 llama bfloat16 4 2 2 1 Gradients last api replay fixed
all snapshot-copied middle 3 moe float32 1 2 2 1 Boundary last inside replay changing
all snapshot-held first 1 llama float32 1 2 1 1 Boundary last pod replayed fixed
all vote first 1 llama float32 4 1 1 1 Gradients last holder replay fixed
all vote first 1 moe float32 4 1 1 1 Boundary last inside replay-read fixed
apart apply first 1 moe bfloat16 4 1 1 1 Boundary last api replay-write fixed
apart forward first 1 llama bfloat16 4 1 2 2 Boundary last beside replay fixed
apart log last 2 moe bfloat16 4 2 2 1 Boundary last inside replay-write changing
apart logged middle 3 moe bfloat16 4 1 1 1 Boundary last pod replayed changing
apart snapshot early 3 moe float32 4 2 2 1 Gradients last nothing nothing fixed
apart snapshot first Auto moe bfloat16 4 1 2 1 Boundary last pod replay-read changing
apart snapshot-copied first Auto llama float32 4 2 1 2 Gradients last nothing nothing fixed
apart snapshot-held first 2 moe float32 4 1 1 1 Gradients last nothing nothing fixed
apart vote first 1 moe bfloat16 4 1 1 1 Boundary last holder replay-read fixed
apart vote first Auto llama float32 4 2 1 1 Boundary last pod replay-read fixed
pod apply first 1 llama bfloat16 4 1 1 2 Gradients middle inside replayed fixed
pod apply first Auto moe bfloat16 4 1 1 1 Boundary first apart replay fixed
pod forward first 1 llama bfloat16 4 1 2 2 Boundary middle pod replay-write fixed
pod log first Auto llama float32 4 2 1 2 Gradients first nothing nothing fixed
pod logged middle 3 moe float32 4 2 2 1 Gradients middle nothing nothing fixed
pod snapshot early 2 llama bfloat16 1 1 1 2 Boundary last nothing nothing fixed
pod snapshot-copied first Auto llama bfloat16 4 1 1 1 Boundary middle apart replay-read fixed
pod snapshot-held middle 3 moe bfloat16 4 1 1 1 Boundary middle beside replay-read fixed
pod vote first 1 llama float32 4 1 1 1 Gradients last holder replay fixed
pod vote first Auto llama bfloat16 2 1 1 2 Boundary first inside replay-read fixed
pod vote last 2 moe bfloat16 4 1 2 1 Gradients middle api replay changing
stage apply first 2 moe float32 2 2 1 1 Gradients last holder replayed changing
stage apply first Auto llama float32 1 2 1 2 Boundary last nothing nothing fixed
stage apply first Auto moe float32 4 2 2 1 Gradients last beside replay fixed
stage forward first Auto moe float32 4 2 1 1 Gradients first apart replayed fixed
stage forward first Auto moe float32 4 2 2 1 Gradients first holder replay fixed
stage log first 1 llama float32 2 2 1 2 Boundary first nothing nothing fixed
stage log first 2 moe bfloat16 2 2 1 1 Gradients last holder replay fixed
stage log middle 3 moe float32 4 2 2 1 Boundary middle apart replay-read changing
stage logged first Auto llama float32 4 2 2 1 Boundary first apart replay-write fixed
stage logged last 2 moe bfloat16 4 2 2 1 Boundary first inside replay-read fixed
stage snapshot early 3 moe bfloat16 4 2 1 1 Gradients middle nothing nothing fixed
stage snapshot last 2 moe bfloat16 4 2 2 1 Gradients first apart replayed fixed
stage snapshot middle 3 moe float32 2 2 1 1 Boundary first beside replay-write fixed
stage snapshot-copied first Auto moe bfloat16 2 2 1 1 Gradients last holder replay changing
stage snapshot-copied middle 3 llama bfloat16 1 2 2 1 Boundary last api replay fixed
stage snapshot-held first 3 moe bfloat16 2 2 2 1 Boundary first api replay-read fixed
stage vote first 1 moe float32 1 2 1 1 Gradients last pod replayed changing
stage vote first Auto moe float32 4 2 2 1 Boundary last apart replay-read fixed
trainer apply last 2 llama float32 2 1 1 2 Boundary first pod replay fixed
trainer forward first 3 llama bfloat16 1 1 1 2 Gradients last api replay fixed
trainer forward middle 3 moe bfloat16 4 1 1 1 Boundary middle holder replayed changing
trainer log first Auto llama bfloat16 4 1 1 2 Gradients last beside replay fixed
trainer logged first 1 llama bfloat16 2 1 1 2 Boundary last holder replay-write fixed
trainer logged last 3 llama bfloat16 1 1 1 2 Boundary last pod replay fixed
trainer snapshot early 3 moe bfloat16 2 1 2 1 Boundary first nothing nothing fixed
trainer snapshot first 1 llama float32 4 1 1 2 Gradients last apart replay fixed
trainer snapshot first Auto llama float32 2 1 1 2 Gradients last inside replay fixed
trainer snapshot last 2 moe bfloat16 4 1 1 1 Boundary middle holder replay-read fixed
trainer snapshot-copied first 1 llama bfloat16 2 1 2 2 Gradients first beside replayed fixed
trainer snapshot-copied last 2 moe float32 4 1 1 1 Boundary middle beside replay-read changing
trainer snapshot-held first Auto llama float32 4 1 1 2 Boundary middle apart replay-write fixed
trainer snapshot-held last 2 llama float32 2 1 1 2 Boundary last holder replay fixed
trainer vote first Auto llama float32 4 1 1 1 Gradients middle holder replay fixed
trainer vote middle 3 llama bfloat16 1 2 1 2 Boundary last nothing nothing fixed
"""
"""Losses with every pair of two values that is possible, found by a greedy search; in the order of
:data:`VALUES`."""

EXCLUDED: dict[str, str] = {
    "only before it is copied a part of the first window is nowhere": """
at=apply place=early
at=forward place=early
at=log place=early
at=logged place=early
at=snapshot-copied place=early
at=snapshot-held place=early
at=vote place=early
""",
    "what is lost meanwhile is lost at an action, and at no action nothing is": """
further=apart during=nothing
further=api during=nothing
further=beside during=nothing
further=holder during=nothing
further=inside during=nothing
further=nothing during=replay
further=nothing during=replay-read
further=nothing during=replay-write
further=nothing during=replayed
further=pod during=nothing
place=early during=replay
place=early during=replay-read
place=early during=replay-write
place=early during=replayed
""",
    "the mixture has one rank to a stage": """
inner=2 order=changing
model=moe inner=2
""",
    "no other stage is left there": """
lost=adjacent further=apart
lost=all further=apart
lost=all further=beside
lost=apart further=apart
stages=1 further=apart
stages=1 further=beside
stages=2 further=apart
""",
    "two of four stages are lost, neighbours or not": """
lost=adjacent stages=1
lost=adjacent stages=2
lost=apart stages=1
lost=apart stages=2
""",
    "the other losses have their stages": """
lost=adjacent which=first
lost=adjacent which=middle
lost=all which=first
lost=all which=middle
lost=apart which=first
lost=apart which=middle
""",
    "with one replica each copy of a stage is one trainer": """
lost=stage replicas=1
""",
    "layers have one order": """
model=llama order=changing
""",
    "a stage without experts has one order": """
which=first order=changing
""",
    "before the first window is complete nothing is made anew from it": """
place=early further=apart
place=early further=api
place=early further=beside
place=early further=holder
place=early further=inside
place=early further=pod
""",
    "the first window has no order before it": """
place=early order=changing
""",
    "the window has no such instalment": """
place=early window=Auto
place=early window=1
place=last window=Auto
place=last window=1
place=middle window=Auto
place=middle window=1
place=middle window=2
""",
    "gradients have nothing that crossed a border": """
replay=Gradients during=replay-read
replay=Gradients during=replay-write
""",
    "a single stage has no border": """
stages=1 during=replay-read
stages=1 during=replay-write
""",
    "a rank of a cell that was broken has no name until it has a cell again": """
stages=1 further=holder
""",
    "there is no such stage": """
stages=1 which=first
stages=1 which=middle
stages=2 which=middle
""",
}
"""The pairs that no loss has, and why: each line has the rule, and then pairs of factor=value."""


def excluded_pairs() -> dict[Pair, str]:
    """Return the pairs of :data:`EXCLUDED`, and why each of them is there."""
    found: dict[Pair, str] = {}
    for why, lines in EXCLUDED.items():
        for line in lines.strip().splitlines():
            one, other = parse(line).items()
            found[one, other] = why
    return found
