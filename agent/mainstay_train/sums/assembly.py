"""Writes the loops of the chunk grid in LLVM's own language: :mod:`compiled` has them compiled.

Nothing is left to an optimizer. What goes side by side in a vector is written so, and floats are
added in the order that ``norms`` describes: no instruction has a flag that lets LLVM change it.
"""

from __future__ import annotations

from itertools import product

from mainstay_core.base.digest import CHUNK, MIXER_SEEDS
from mainstay_train.sums.run_assembly import RUN_SUMS

LANES = 8
"""Words that are multiplied side by side. A machine with shorter vectors takes several for them."""
ROWS = 4
"""Rows that are read side by side: a key is loaded once for all of them."""
COLUMNS = CHUNK // 4
"""Elements of a row of the norms, to which the rows behind it are added."""
WORD_BYTES = (1, 2, 4)
"""Sizes of a digest's words."""

_MIXERS = range(len(MIXER_SEEDS))


def text() -> str:
    """Return the module.

    It has ``row_sums_1``, ``_2`` and ``_4``, ``within``, ``run_sums``, ``squares`` and ``blend``.
    """
    return "\n".join([*map(_row_sums, WORD_BYTES), _WITHIN, RUN_SUMS, _SQUARES, _BLEND])


def _row_sums(size: int) -> str:
    """Return a function for words of some bytes: see ``compiled.row_sums``.

    Rows go by four where four have the same first position, up to the shortest one's end side by
    side and then each to its own.
    """
    return f"""
{_adder(f"add_{ROWS}_{size}", size, ROWS, LANES)}
{_adder(f"add_1_{size}", size, 1, LANES)}
{_adder(f"add_last_{size}", size, 1, 1)}
define void @row_sums_{size}(
    ptr %words, ptr %starts, ptr %positions, ptr %lengths, i64 %rows, ptr %keys, ptr %sums
) {{
entry:
  br label %next
next:
  %r = phi i64 [ 0, %entry ], [ %following, %each ]
  %before = phi i64 [ 0, %entry ], [ %from, %each ]
  %is.there = icmp slt i64 %r, %rows
  br i1 %is.there, label %row, label %end
row:
  %starts.r = getelementptr i64, ptr %starts, i64 %r
  %positions.r = getelementptr i64, ptr %positions, i64 %r
  %lengths.r = getelementptr i64, ptr %lengths, i64 %r
  %sums.r = getelementptr i64, ptr %sums, i64 %r
  %position = load i64, ptr %positions.r, align 8
  %keys.r = getelementptr i64, ptr %keys, i64 %position
  %place = and i64 %r, {ROWS - 1}
  %begins = icmp eq i64 %place, 0
  br i1 %begins, label %group, label %each
group:
  %left = sub i64 %rows, %r
  %is.whole = icmp sge i64 %left, {ROWS}
  br i1 %is.whole, label %compare, label %each
compare:
  %all = load <{ROWS} x i64>, ptr %positions.r, align 8
  %one = insertelement <{ROWS} x i64> poison, i64 %position, i64 0
  %same = shufflevector <{ROWS} x i64> %one, <{ROWS} x i64> poison, <{ROWS} x i32> zeroinitializer
  %equal = icmp eq <{ROWS} x i64> %all, %same
  %are.equal = call i1 @llvm.vector.reduce.and.v{ROWS}i1(<{ROWS} x i1> %equal)
  br i1 %are.equal, label %together, label %each
together:
  %ends = load <{ROWS} x i64>, ptr %lengths.r, align 8
  %least = call i64 @llvm.vector.reduce.smin.v{ROWS}i64(<{ROWS} x i64> %ends)
  %common = and i64 %least, {-LANES}
  call void @add_{ROWS}_{size}(
      ptr %words, ptr %starts.r, i64 0, i64 %common, ptr %keys.r, ptr %sums.r, i64 %rows)
  br label %each
each:
  %from = phi i64 [ %before, %row ], [ 0, %group ], [ 0, %compare ], [ %common, %together ]
  %length = load i64, ptr %lengths.r, align 8
  %rest = sub i64 %length, %from
  %in.vectors = and i64 %rest, {-LANES}
  %whole = add i64 %from, %in.vectors
  call void @add_1_{size}(
      ptr %words, ptr %starts.r, i64 %from, i64 %whole, ptr %keys.r, ptr %sums.r, i64 %rows)
  call void @add_last_{size}(
      ptr %words, ptr %starts.r, i64 %whole, i64 %length, ptr %keys.r, ptr %sums.r, i64 %rows)
  %following = add i64 %r, 1
  br label %next
end:
  ret void
}}
"""


def _adder(name: str, size: int, rows: int, lanes: int) -> str:
    """Return a function that adds to the sums of some rows what lies at some positions of them.

    Args:
        name: of the function.
        size: bytes of a word.
        rows: how many are read side by side.
        lanes: words of each that are multiplied side by side; divides the number of positions.
    """
    word, sums = f"i{8 * size}", f"<{lanes} x i64>"
    both = [*product(range(rows), _MIXERS)]
    lines = [
        f"define internal void @{name}(",
        "    ptr %words, ptr %starts, i64 %from, i64 %to, ptr %keys.0, ptr %sums, i64 %stride",
        ") {",
        "entry:",
        *(f"  %keys.{m} = getelementptr i64, ptr %keys.0, i64 {m * CHUNK}" for m in _MIXERS[1:]),
    ]
    for row in range(rows):
        lines += [
            f"  %start.at.{row} = getelementptr i64, ptr %starts, i64 {row}",
            f"  %start.{row} = load i64, ptr %start.at.{row}, align 8",
            f"  %row.{row} = getelementptr {word}, ptr %words, i64 %start.{row}",
        ]
    lines += [
        "  br label %next",
        "next:",
        "  %p = phi i64 [ %from, %entry ], [ %following, %add ]",
        *(
            f"  %sum.{r}.{m} = phi {sums} [ zeroinitializer, %entry ], [ %more.{r}.{m}, %add ]"
            for r, m in both
        ),
        "  %is.there = icmp slt i64 %p, %to",
        "  br i1 %is.there, label %add, label %end",
        "add:",
    ]
    for m in _MIXERS:
        lines += [
            f"  %key.at.{m} = getelementptr i64, ptr %keys.{m}, i64 %p",
            f"  %key.{m} = load {sums}, ptr %key.at.{m}, align 8",
        ]
    for r in range(rows):
        lines += [
            f"  %word.at.{r} = getelementptr {word}, ptr %row.{r}, i64 %p",
            f"  %word.{r} = load <{lanes} x {word}>, ptr %word.at.{r}, align 1",
            f"  %wide.{r} = zext <{lanes} x {word}> %word.{r} to {sums}",
        ]
    for r, m in both:
        lines += [
            f"  %product.{r}.{m} = mul {sums} %wide.{r}, %key.{m}",
            f"  %more.{r}.{m} = add {sums} %sum.{r}.{m}, %product.{r}.{m}",
        ]
    lines += [f"  %following = add i64 %p, {lanes}", "  br label %next", "end:"]
    for m in _MIXERS:
        lines.append(f"  %before.{m} = mul i64 %stride, {m}")
    for r, m in both:
        reduced = f"call i64 @llvm.vector.reduce.add.v{lanes}i64({sums} %sum.{r}.{m})"
        lines += [
            f"  %found.{r}.{m} = {reduced}",
            f"  %place.{r}.{m} = add i64 %before.{m}, {r}",
            f"  %into.{r}.{m} = getelementptr i64, ptr %sums, i64 %place.{r}.{m}",
            f"  %old.{r}.{m} = load i64, ptr %into.{r}.{m}, align 8",
            f"  %new.{r}.{m} = add i64 %old.{r}.{m}, %found.{r}.{m}",
            f"  store i64 %new.{r}.{m}, ptr %into.{r}.{m}, align 8",
        ]
    return "\n".join([*lines, "  ret void", "}"])


_WITHIN = """
define i64 @within(ptr %starts, ptr %lengths, i64 %rows, i64 %size) {
entry:
  br label %next
next:
  %r = phi i64 [ 0, %entry ], [ %following, %row ]
  %is.there = icmp slt i64 %r, %rows
  br i1 %is.there, label %row, label %end
row:
  %starts.r = getelementptr i64, ptr %starts, i64 %r
  %lengths.r = getelementptr i64, ptr %lengths, i64 %r
  %start = load i64, ptr %starts.r, align 8
  %length = load i64, ptr %lengths.r, align 8
  %room = sub i64 %size, %start
  %begins = icmp ule i64 %start, %size
  %ends = icmp ule i64 %length, %room
  %fits = and i1 %begins, %ends
  %following = add i64 %r, 1
  br i1 %fits, label %next, label %end
end:
  ret i64 %r
}
"""
"""Returns how many rows come before the first that leaves memory of some size: without a sign, what
is below zero is beyond any size."""


def _square(name: str, lanes: int, at: str) -> list[str]:
    """Return lines that square some values, which they read at an index: exact in double."""
    return [
        f"  %{name}.at = getelementptr float, ptr %row, i64 {at}",
        f"  %{name}.value = load <{lanes} x float>, ptr %{name}.at, align 1",
        f"  %{name}.wide = fpext <{lanes} x float> %{name}.value to <{lanes} x double>",
        f"  %{name} = fmul <{lanes} x double> %{name}.wide, %{name}.wide",
    ]


def _whole_chunk() -> str:
    """Return a function that squares a whole chunk, and adds its rows one by one."""
    vector = f"<{LANES} x double>"
    rows = range(CHUNK // COLUMNS)
    lines = ["define internal void @add_rows(ptr %row, ptr %left) {", "entry:", "  br label %next"]
    lines += ["next:", "  %at.0 = phi i64 [ 0, %entry ], [ %following, %next ]"]
    for r in rows:
        if r:
            lines.append(f"  %at.{r} = add i64 %at.0, {r * COLUMNS}")
        lines += _square(f"square.{r}", LANES, f"%at.{r}")
    lines.append(f"  %sum.1 = fadd {vector} %square.0, %square.1")
    for r in rows[2:]:
        lines.append(f"  %sum.{r} = fadd {vector} %sum.{r - 1}, %square.{r}")
    lines += [
        "  %into = getelementptr double, ptr %left, i64 %at.0",
        f"  store {vector} %sum.{rows[-1]}, ptr %into, align 8",
        f"  %following = add i64 %at.0, {LANES}",
        f"  %is.there = icmp slt i64 %following, {COLUMNS}",
        "  br i1 %is.there, label %next, label %end",
        "end:",
        "  ret void",
        "}",
    ]
    return "\n".join(lines)


def _part_of_chunk(name: str, lanes: int) -> str:
    """Return a function that adds squares to their columns, from the first to the last."""
    vector = f"<{lanes} x double>"
    lines = [
        f"define internal void @{name}(ptr %row, i64 %from, i64 %to, ptr %left) {{",
        "entry:",
        "  br label %next",
        "next:",
        "  %p = phi i64 [ %from, %entry ], [ %following, %add ]",
        "  %is.there = icmp slt i64 %p, %to",
        "  br i1 %is.there, label %add, label %end",
        "add:",
        *_square("square", lanes, "%p"),
        f"  %column = and i64 %p, {COLUMNS - 1}",
        "  %into = getelementptr double, ptr %left, i64 %column",
        f"  %old = load {vector}, ptr %into, align 8",
        f"  %new = fadd {vector} %old, %square",
        f"  store {vector} %new, ptr %into, align 8",
        f"  %following = add i64 %p, {lanes}",
        "  br label %next",
        "end:",
        "  ret void",
        "}",
    ]
    return "\n".join(lines)


def _halves() -> str:
    """Return lines that add the second half of a vector to its first until one is left."""
    lines, name, width = [], "%last", LANES
    while width > 1:
        width //= 2
        for half, first in (("low", 0), ("high", width)):
            picked = ", ".join(f"i32 {i}" for i in range(first, first + width))
            lines.append(
                f"  %{half}.{width} = shufflevector <{2 * width} x double> {name}, "
                f"<{2 * width} x double> poison, <{width} x i32> <{picked}>"
            )
        lines.append(f"  %half.{width} = fadd <{width} x double> %low.{width}, %high.{width}")
        name = f"%half.{width}"
    return "\n".join(lines)


_VECTOR = f"<{LANES} x double>"
_SQUARES = f"""
{_whole_chunk()}
{_part_of_chunk("add_squares", LANES)}
{_part_of_chunk("add_last_squares", 1)}
define internal void @clear(ptr %left, i64 %columns) {{
entry:
  br label %next
next:
  %c = phi i64 [ 0, %entry ], [ %following, %next ]
  %into = getelementptr double, ptr %left, i64 %c
  store {_VECTOR} zeroinitializer, ptr %into, align 8
  %following = add i64 %c, {LANES}
  %is.there = icmp slt i64 %following, %columns
  br i1 %is.there, label %next, label %end
end:
  ret void
}}
define internal double @halved(ptr %left, i64 %columns) {{
entry:
  br label %halve
halve:
  %width = phi i64 [ %columns, %entry ], [ %half, %added ]
  %is.wide = icmp sgt i64 %width, {LANES}
  br i1 %is.wide, label %split, label %end
split:
  %half = lshr i64 %width, 1
  br label %next
next:
  %c = phi i64 [ 0, %split ], [ %following, %next ]
  %other = add i64 %c, %half
  %first.at = getelementptr double, ptr %left, i64 %c
  %second.at = getelementptr double, ptr %left, i64 %other
  %first = load {_VECTOR}, ptr %first.at, align 8
  %second = load {_VECTOR}, ptr %second.at, align 8
  %sum = fadd {_VECTOR} %first, %second
  store {_VECTOR} %sum, ptr %first.at, align 8
  %following = add i64 %c, {LANES}
  %is.there = icmp slt i64 %following, %half
  br i1 %is.there, label %next, label %added
added:
  br label %halve
end:
  %last = load {_VECTOR}, ptr %left, align 8
{_halves()}
  %found = extractelement <1 x double> %half.1, i64 0
  ret double %found
}}
define void @squares(
    ptr %values, ptr %starts, ptr %lengths, ptr %columns, i64 %rows, ptr %left, ptr %found
) {{
entry:
  br label %next
next:
  %r = phi i64 [ 0, %entry ], [ %following, %halve ]
  %is.there = icmp slt i64 %r, %rows
  br i1 %is.there, label %row, label %end
row:
  %starts.r = getelementptr i64, ptr %starts, i64 %r
  %lengths.r = getelementptr i64, ptr %lengths, i64 %r
  %columns.r = getelementptr i64, ptr %columns, i64 %r
  %found.r = getelementptr double, ptr %found, i64 %r
  %start = load i64, ptr %starts.r, align 8
  %length = load i64, ptr %lengths.r, align 8
  %width = load i64, ptr %columns.r, align 8
  %first = getelementptr float, ptr %values, i64 %start
  %is.whole = icmp eq i64 %length, {CHUNK}
  br i1 %is.whole, label %whole, label %part
whole:
  call void @add_rows(ptr %first, ptr %left)
  br label %halve
part:
  call void @clear(ptr %left, i64 %width)
  %in.vectors = and i64 %length, {-LANES}
  call void @add_squares(ptr %first, i64 0, i64 %in.vectors, ptr %left)
  call void @add_last_squares(ptr %first, i64 %in.vectors, i64 %length, ptr %left)
  br label %halve
halve:
  %square = call double @halved(ptr %left, i64 %width)
  store double %square, ptr %found.r, align 8
  %following = add i64 %r, 1
  br label %next
end:
  ret void
}}
"""


def _part_of_blend(name: str, lanes: int) -> str:
    """Return a function that blends two vectors, from the first to the last: see ``blend``.

    Each product and the sum are rounded, as no instruction may be contracted with another.
    """
    wide = f"<{lanes} x double>"
    lines = [
        f"define internal void @{name}(",
        "    ptr %first, double %of.first, ptr %second, double %of.second, ptr %into, i64 %from,",
        "    i64 %to",
        ") {",
        "entry:",
    ]
    for source in ("first", "second"):
        one = f"insertelement {wide} poison, double %of.{source}, i64 0"
        spread = f"{wide} poison, <{lanes} x i32> zeroinitializer"
        lines += [
            f"  %one.{source} = {one}",
            f"  %weight.{source} = shufflevector {wide} %one.{source}, {spread}",
        ]
    lines += [
        "  br label %next",
        "next:",
        "  %p = phi i64 [ %from, %entry ], [ %following, %blend ]",
        "  %is.there = icmp slt i64 %p, %to",
        "  br i1 %is.there, label %blend, label %end",
        "blend:",
    ]
    for source in ("first", "second"):
        lines += [
            f"  %{source}.at = getelementptr float, ptr %{source}, i64 %p",
            f"  %{source}.value = load <{lanes} x float>, ptr %{source}.at, align 1",
            f"  %{source}.wide = fpext <{lanes} x float> %{source}.value to {wide}",
            f"  %{source}.part = fmul {wide} %{source}.wide, %weight.{source}",
        ]
    lines += [
        f"  %sum = fadd {wide} %first.part, %second.part",
        f"  %rounded = fptrunc {wide} %sum to <{lanes} x float>",
        "  %into.at = getelementptr float, ptr %into, i64 %p",
        f"  store <{lanes} x float> %rounded, ptr %into.at, align 1",
        f"  %following = add i64 %p, {lanes}",
        "  br label %next",
        "end:",
        "  ret void",
        "}",
    ]
    return "\n".join(lines)


_BLEND = f"""
{_part_of_blend("blend_vectors", LANES)}
{_part_of_blend("blend_last", 1)}
define void @blend(
    ptr %first, double %of.first, ptr %second, double %of.second, ptr %into, i64 %count
) {{
  %whole = and i64 %count, {-LANES}
  call void @blend_vectors(
      ptr %first, double %of.first, ptr %second, double %of.second, ptr %into, i64 0, i64 %whole)
  call void @blend_last(
      ptr %first, double %of.first, ptr %second, double %of.second, ptr %into, i64 %whole,
      i64 %count)
  ret void
}}
"""
