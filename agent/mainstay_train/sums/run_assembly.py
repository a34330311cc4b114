"""Writes the loops over runs of memory in LLVM's own language: imprints are made of their sums.

They are compiled with those of :mod:`assembly`; :mod:`runs` says what the sums are.
"""

from __future__ import annotations

from itertools import product

from mainstay_core.base.digest import MIXER_SEEDS

PAIRS = 8
"""Pairs of words that are multiplied side by side."""
RUNS = 4
"""Runs that are read side by side: a key is loaded once for all of them."""
RUN = 2048
"""Words of a run: keys of both its sums stay in a processor's nearest cache."""

_MIXERS = range(len(MIXER_SEEDS))


def _run_adder(name: str, runs: int) -> str:
    """Return a function that writes the sums of some runs, one behind the other, of like lengths.

    Two words of 32 bits are one of 64, and so are their keys. A product of two halves is exact:
    processors multiply such in one instruction, and whole words of 64 bits in several.

    Args:
        name: of the function.
        runs: how many are read side by side.
    """
    wide, both = f"<{PAIRS} x i64>", [*product(range(runs), _MIXERS)]
    low, high = (", ".join([f"i64 {value}"] * PAIRS) for value in (0xFFFFFFFF, 32))
    lines = [
        f"define internal void @{name}(ptr %words, i64 %to, ptr %keys, ptr %sums) {{",
        "entry:",
        *(f"  %run.{r} = getelementptr i32, ptr %words, i64 {r * RUN}" for r in range(runs)),
        *(f"  %keys.{m} = getelementptr i32, ptr %keys, i64 {m * RUN}" for m in _MIXERS),
        "  br label %next",
        "next:",
        "  %p = phi i64 [ 0, %entry ], [ %following, %add ]",
        *(
            f"  %sum.{r}.{m} = phi {wide} [ zeroinitializer, %entry ], [ %more.{r}.{m}, %add ]"
            for r, m in both
        ),
        "  %is.there = icmp slt i64 %p, %to",
        "  br i1 %is.there, label %add, label %end",
        "add:",
    ]

    def halves(what: str, at: str) -> list[str]:
        return [
            f"  %{what}.at = getelementptr i32, ptr %{at}, i64 %p",
            f"  %{what} = load {wide}, ptr %{what}.at, align 1",
            f"  %{what}.low = and {wide} %{what}, <{low}>",
            f"  %{what}.high = lshr {wide} %{what}, <{high}>",
        ]

    for m in _MIXERS:
        lines += halves(f"key.{m}", f"keys.{m}")
    for r in range(runs):
        lines += halves(f"word.{r}", f"run.{r}")
    for r, m in both:
        lines += [
            f"  %first.{r}.{m} = mul {wide} %word.{r}.low, %key.{m}.low",
            f"  %second.{r}.{m} = mul {wide} %word.{r}.high, %key.{m}.high",
            f"  %half.{r}.{m} = add {wide} %sum.{r}.{m}, %first.{r}.{m}",
            f"  %more.{r}.{m} = add {wide} %half.{r}.{m}, %second.{r}.{m}",
        ]
    lines += [f"  %following = add i64 %p, {2 * PAIRS}", "  br label %next", "end:"]
    for number, (r, m) in enumerate(both):
        reduced = f"call i64 @llvm.vector.reduce.add.v{PAIRS}i64({wide} %sum.{r}.{m})"
        lines += [
            f"  %found.{r}.{m} = {reduced}",
            f"  %into.{r}.{m} = getelementptr i64, ptr %sums, i64 {number}",
            f"  store i64 %found.{r}.{m}, ptr %into.{r}.{m}, align 8",
        ]
    return "\n".join([*lines, "  ret void", "}"])


def _last_adder() -> str:
    """Return a function that adds to the sums of a run what lies at some positions, one by one."""
    lines = ["define internal void @add_last_words("]
    lines += ["    ptr %words, i64 %from, i64 %to, ptr %keys, ptr %sums", ") {", "entry:"]
    for m in _MIXERS:
        lines += [
            f"  %keys.{m} = getelementptr i32, ptr %keys, i64 {m * RUN}",
            f"  %into.{m} = getelementptr i64, ptr %sums, i64 {m}",
            f"  %old.{m} = load i64, ptr %into.{m}, align 8",
        ]
    lines += ["  br label %next", "next:", "  %p = phi i64 [ %from, %entry ], [ %following, %add ]"]
    for m in _MIXERS:
        lines.append(f"  %sum.{m} = phi i64 [ %old.{m}, %entry ], [ %more.{m}, %add ]")
    lines += ["  %is.there = icmp slt i64 %p, %to", "  br i1 %is.there, label %add, label %end"]
    lines += ["add:", "  %word.at = getelementptr i32, ptr %words, i64 %p"]
    lines += ["  %word = load i32, ptr %word.at, align 1", "  %wide = zext i32 %word to i64"]
    for m in _MIXERS:
        lines += [
            f"  %key.at.{m} = getelementptr i32, ptr %keys.{m}, i64 %p",
            f"  %key.{m} = load i32, ptr %key.at.{m}, align 4",
            f"  %wide.key.{m} = zext i32 %key.{m} to i64",
            f"  %product.{m} = mul i64 %wide, %wide.key.{m}",
            f"  %more.{m} = add i64 %sum.{m}, %product.{m}",
        ]
    lines += ["  %following = add i64 %p, 1", "  br label %next", "end:"]
    lines += [f"  store i64 %sum.{m}, ptr %into.{m}, align 8" for m in _MIXERS]
    return "\n".join([*lines, "  ret void", "}"])


RUN_SUMS = f"""
{_run_adder(f"add_runs_{RUNS}", RUNS)}
{_run_adder("add_runs_1", 1)}
{_last_adder()}
define void @run_sums(ptr %words, i64 %count, ptr %keys, ptr %sums) {{
entry:
  br label %next
next:
  %at = phi i64 [ 0, %entry ], [ %behind.all, %several ], [ %behind.one, %one ]
  %place = udiv i64 %at, {RUN // len(MIXER_SEEDS)}
  %sums.at = getelementptr i64, ptr %sums, i64 %place
  %words.at = getelementptr i32, ptr %words, i64 %at
  %left = sub i64 %count, %at
  %are.several = icmp sge i64 %left, {RUNS * RUN}
  br i1 %are.several, label %several, label %few
several:
  call void @add_runs_{RUNS}(ptr %words.at, i64 {RUN}, ptr %keys, ptr %sums.at)
  %behind.all = add i64 %at, {RUNS * RUN}
  br label %next
few:
  %is.there = icmp sgt i64 %left, 0
  br i1 %is.there, label %one, label %end
one:
  %length = call i64 @llvm.smin.i64(i64 %left, i64 {RUN})
  %in.vectors = and i64 %length, {-2 * PAIRS}
  call void @add_runs_1(ptr %words.at, i64 %in.vectors, ptr %keys, ptr %sums.at)
  call void @add_last_words(
      ptr %words.at, i64 %in.vectors, i64 %length, ptr %keys, ptr %sums.at)
  %behind.one = add i64 %at, {RUN}
  br label %next
end:
  ret void
}}
"""
"""Writes both sums of each run of words of 32 bits; keys are of 32 bits, those of the second sum
behind those of the first."""
