"""Sums of the chunk grid on a CPU, and blends, in one pass each: code of LLVM's, with llvmlite.

Without a compiler's code a digest writes each word three times, as int64, and a norm twice. This is
optional, as Triton is on a GPU: the bits are the same, but for those of a norm that is not a
number. So it is compiled and compared with the definition before it is used, once in a process and
those that are forked from it, in a tenth of a second. Nothing is kept on a disk. Both sums are
operators of torch's, so that checks by re-execution see them. Blends are made between steps, where
nothing is checked so.

A row that does not lie in its memory is refused, as torch refuses a wrong index: where a row begins
may be what a kernel has made, and a wrong bit of it would have others' memory read, or end the
process.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from mainstay_core.base.digest import CHUNK, MIXER_SEEDS
from mainstay_core.base.errors import MainstayError, brief
from mainstay_train.sums import assembly
from mainstay_train.sums.rows import scratch
from mainstay_train.sums.run_assembly import RUN

SWITCH = "MAINSTAY_COMPILED"
"""A variable of the environment: with ``Off`` nothing is compiled."""

logger = logging.getLogger(__name__)

_NUM_MIXERS = len(MIXER_SEEDS)


class UnfitError(MainstayError):
    """Compiled code cannot be used here."""


class WrongError(MainstayError):
    """Compiled code comes to other sums than it should."""


class Loops(NamedTuple):
    """The compiled functions. All arguments are addresses, and numbers of rows."""

    row_sums: Mapping[int, Callable[..., None]]
    """By the bytes of a word."""
    within: Callable[..., int]
    """Returns how many rows come before the first one that leaves its memory."""
    run_sums: Callable[..., None]
    """Writes both sums of each run of some words: see :mod:`mainstay_train.sums.runs`."""
    squares: Callable[..., None]
    blend: Callable[..., None]
    engine: Any
    """Owns the code."""


@lru_cache(maxsize=1)
def load() -> Loops | None:
    """Return the compiled functions; None where the sums go by batches of torch's operations."""
    began_s = time.monotonic()
    try:
        loops, what = _compiled()
        _try(loops)
    except UnfitError as error:
        logger.info("digests and norms on a CPU go by batches of torch: %s", error)
        return None
    except Exception as error:  # of a library that none of ours needs, by kinds of its own
        logger.warning("digests and norms on a CPU go by batches of torch: %s", brief(error))
        return None
    took_s = time.monotonic() - began_s
    logger.info("digests and norms on a CPU go in one pass: %s, in %.2f s", what, took_s)
    return loops


def _compiled() -> tuple[Loops, str]:
    """Return the functions, and what compiled them.

    Raises:
        UnfitError: nothing is compiled here.
    """
    if os.environ.get(SWITCH) == "Off":
        raise UnfitError(f"{SWITCH} is Off")
    try:
        import llvmlite  # type: ignore[import-untyped, unused-ignore]
        from llvmlite import binding
    except ModuleNotFoundError as error:
        raise UnfitError("llvmlite is not installed (pip install llvmlite)") from error
    try:  # LLVM ends the process where this is forbidden
        mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC).close()
    except OSError as error:
        raise UnfitError("this system lets no process execute what it has written") from error
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    processor = binding.get_host_cpu_name()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=processor, features=binding.get_host_cpu_features().flatten(), opt=3
    )
    module = binding.parse_assembly(assembly.text())
    module.verify()
    engine = binding.create_mcjit_compiler(module, machine)
    engine.finalize_object()

    def function(name: str, *arguments: Any, returns: Any = None) -> Callable[..., Any]:
        return ctypes.CFUNCTYPE(returns, *arguments)(engine.get_function_address(name))

    place, weight = ctypes.c_void_p, ctypes.c_double
    row_sums = {size: function(f"row_sums_{size}", *[place] * 7) for size in assembly.WORD_BYTES}
    within = function("within", *[place] * 4, returns=ctypes.c_int64)
    run_sums = function("run_sums", *[place] * 4)
    squares = function("squares", *[place] * 7)
    blend = function("blend", place, weight, place, weight, place, place)
    what = f"llvmlite {llvmlite.__version__}, {processor}"
    return Loops(row_sums, within, run_sums, squares, blend, engine), what


def row_sums(
    words: torch.Tensor,
    starts: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    keys: torch.Tensor,
) -> torch.Tensor:
    """Return the sum of key times word, by mixer and row, int64 [mixers, rows].

    Args:
        words: flat, of 1, 2 or 4 bytes, which count as unsigned.
        starts: int64 [rows], where in the words a row begins.
        positions: int64 [rows], of its first word in its chunk.
        lengths: int64 [rows], its words.
        keys: int64 [mixers, chunk].

    Raises:
        IndexError: a row leaves the words, or the chunk.
    """
    return torch.ops.mainstay.row_sums(words, starts, positions, lengths, keys)  # type: ignore[no-any-return]


def squares(
    values: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, columns: torch.Tensor
) -> torch.Tensor:
    """Return the squared norm of each row, fp64 [rows], in the order of ``norms``.

    Args:
        values: fp32, flat.
        starts: int64 [rows], where in the values a row begins.
        lengths: int64 [rows], its elements. Invariant: they lie within the values, at most a chunk.
        columns: int64 [rows], what is left of it before halves are added: see :func:`columns_of`.
    """
    return torch.ops.mainstay.squares(values, starts, lengths, columns)  # type: ignore[no-any-return]


def blend(into: torch.Tensor, sources: Sequence[torch.Tensor], weights: Sequence[float]) -> None:
    """Write the weighted sum of two tensors, each product and the sum rounded in fp64.

    Args:
        into: fp32, contiguous, of the sources' size; may be one of them.
        sources: two; likewise.
        weights: of each.
    """
    torch.ops.mainstay.blend(into, *sources, *weights)


def columns_of(length: int) -> int:
    """Return what is left of a row of so many elements before halves are added.

    Columns behind its end hold zeros, which change no sum of squares: they are left out.
    """
    return min(assembly.COLUMNS, max(assembly.LANES, 1 << max(0, length - 1).bit_length()))


def _row_sums(
    words: torch.Tensor,
    starts: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    keys: torch.Tensor,
) -> torch.Tensor:
    return run_row_sums(_loaded(), words, starts, positions, lengths, keys)


def _squares(
    values: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, columns: torch.Tensor
) -> torch.Tensor:
    return _run_squares(_loaded(), values, starts, lengths, columns)


def _loaded() -> Loops:
    loops = load()
    assert loops is not None, "who asks for them has looked"
    return loops


def run_row_sums(
    loops: Loops,
    words: torch.Tensor,
    starts: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    keys: torch.Tensor,
) -> torch.Tensor:
    assert words.is_contiguous(), "rows lie one behind the other"
    _refuse_outside(loops, starts, lengths, words.numel(), "words")
    _refuse_outside(loops, positions, lengths, CHUNK, "positions of a chunk")
    sums = torch.zeros(_NUM_MIXERS, starts.numel(), dtype=torch.int64, device="cpu")
    loops.row_sums[words.element_size()](
        words.data_ptr(),
        starts.data_ptr(),
        positions.data_ptr(),
        lengths.data_ptr(),
        starts.numel(),
        keys.data_ptr(),
        sums.data_ptr(),
    )
    return sums


def _refuse_outside(
    loops: Loops, starts: torch.Tensor, lengths: torch.Tensor, size: int, of: str
) -> None:
    """Refuse rows that leave memory of some size.

    Raises:
        IndexError: one does.
    """
    rows = starts.numel()
    first = loops.within(starts.data_ptr(), lengths.data_ptr(), rows, size)
    if first < rows:
        at = f"begins at {int(starts[first])} and has {int(lengths[first])}"
        raise IndexError(f"row {first} {at}, of {size} {of}")


def _run_squares(
    loops: Loops,
    values: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    columns: torch.Tensor,
) -> torch.Tensor:
    assert values.is_contiguous(), "rows lie one behind the other"
    assert values.dtype is torch.float32, "squares of others are not exact"
    found = torch.empty(starts.numel(), dtype=torch.float64, device="cpu")
    left = scratch("left", found.device, torch.float64, assembly.COLUMNS)
    loops.squares(
        values.data_ptr(),
        starts.data_ptr(),
        lengths.data_ptr(),
        columns.data_ptr(),
        starts.numel(),
        left.data_ptr(),
        found.data_ptr(),
    )
    return found


def _blend(
    into: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    of_first: float,
    of_second: float,
) -> None:
    _run_blend(_loaded(), into, (first, second), (of_first, of_second))


def _run_blend(
    loops: Loops, into: torch.Tensor, sources: Sequence[torch.Tensor], weights: Sequence[float]
) -> None:
    first, second = sources
    for tensor in (into, first, second):
        assert tensor.is_contiguous(), "elements lie one behind the other"
        assert tensor.dtype is torch.float32, "words of others have other sizes"
        assert tensor.numel() == into.numel(), "compiled code looks at no size"
    at = [tensor.data_ptr() for tensor in (first, second, into)]
    loops.blend(at[0], weights[0], at[1], weights[1], at[2], into.numel())


_library = torch.library.Library("mainstay", "DEF")  # type: ignore[no-untyped-call]
for _function, _schema in (
    (
        _row_sums,
        "row_sums(Tensor words, Tensor starts, Tensor at, Tensor lengths, Tensor keys) -> Tensor",
    ),
    (_squares, "squares(Tensor values, Tensor starts, Tensor lengths, Tensor columns) -> Tensor"),
    (_blend, "blend(Tensor(a!) into, Tensor x, Tensor y, float of_x, float of_y) -> ()"),
):
    _name = _library.define(_schema)  # type: ignore[no-untyped-call]
    _library.impl(_name, _function, "CPU")  # type: ignore[no-untyped-call]


def _try(loops: Loops) -> None:
    """Compare all functions with their definitions.

    Raises:
        WrongError: they differ.
    """
    count = 2 * CHUNK
    drawn = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    keys = drawn.reshape(_NUM_MIXERS, CHUNK) | np.uint64(1)
    # Six rows: four that are read side by side, one that begins within its chunk, one of nothing.
    rows = np.array(
        [(7, 0, CHUNK), (CHUNK, 0, 20_000), (0, 0, 9_997), (5, 0, 3), (900, 1000, 1234), (1, 0, 0)]
    )
    starts, positions, lengths = (torch.from_numpy(column.copy()) for column in rows.T)
    for size in assembly.WORD_BYTES:
        words = (drawn >> np.uint64(64 - 8 * size)).astype(f"u{size}")
        wide = words.astype(np.uint64)
        expected = [
            [np.sum(wide[at : at + n] * keys[m, p : p + n]) for at, p, n in rows]
            for m in range(_NUM_MIXERS)
        ]
        given = (torch.from_numpy(words), starts, positions, lengths, torch.from_numpy(keys))
        if not np.array_equal(run_row_sums(loops, *given).numpy().view(np.uint64), expected):
            raise WrongError(f"its sums of words of {8 * size} bits are wrong")
    _try_within(loops)
    _try_run_sums(loops, words, keys.reshape(-1).view(np.uint32)[: _NUM_MIXERS * RUN])
    # What is added to the large square of a row is rounded each time: another order shows.
    values = (drawn >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-21)
    values[::30_011] = 2.0**27
    parts = [(30_011 - at, 26_013) for at in (0, 9, 8192, 9000, 16_384, 17_000, 25_000)]
    rows = np.array([*((at, CHUNK) for at in range(0, CHUNK, 7001)), *parts, (3, 0)])
    starts, lengths = (torch.from_numpy(column.copy()) for column in rows.T)
    widths = torch.tensor([columns_of(length) for length in lengths.tolist()], device="cpu")
    found = _run_squares(loops, torch.from_numpy(values), starts, lengths, widths).tolist()
    if found != [_squared(values[at : at + n]) for at, n in rows]:
        raise WrongError("its norms are wrong")
    _try_blend(loops, values[: CHUNK - 3], values[CHUNK : 2 * CHUNK - 3])


def _try_within(loops: Loops) -> None:
    """Have rows refused that do not lie in their memory.

    Raises:
        WrongError: another row is.
    """
    for start, length, fits in (
        *((0, CHUNK, True), (CHUNK, 0, True), (CHUNK - 3, 3, True)),
        *((0, CHUNK + 1, False), (CHUNK + 1, 0, False), (CHUNK - 3, 4, False)),
        *((-1, 1, False), (1, -1, False), (1 << 50, 1, False), (-(1 << 63), CHUNK, False)),
    ):
        starts, lengths = np.array([5, start, 7]), np.array([6, length, 8])
        if loops.within(starts.ctypes.data, lengths.ctypes.data, 3, CHUNK) != (3 if fits else 1):
            raise WrongError("it refuses wrong rows")


def _try_run_sums(loops: Loops, words: NDArray[Any], keys: NDArray[np.uint32]) -> None:
    """Compare the sums of runs with their definition.

    Raises:
        WrongError: they differ.
    """
    run = RUN
    for count in (1, 15, 16, 19, run - 1, run, 5 * run, 11 * run + 37):
        starts = range(0, count, run)
        wide = [words[at : min(at + run, count)].astype(np.uint64) for at in starts]
        of_mixers = keys.reshape(_NUM_MIXERS, run).astype(np.uint64)
        expected = [[np.sum(each * key[: len(each)]) for key in of_mixers] for each in wide]
        found = np.zeros((len(starts), _NUM_MIXERS), dtype=np.uint64)
        loops.run_sums(words.ctypes.data, count, keys.ctypes.data, found.ctypes.data)
        if not np.array_equal(found, expected):
            raise WrongError("its sums of runs are wrong")


def _try_blend(loops: Loops, first: NDArray[np.float32], second: NDArray[np.float32]) -> None:
    """Compare a blend with its definition.

    Raises:
        WrongError: they differ.
    """
    weights = 0.3, 0.3
    second = second.copy()
    second[::7] = -first[::7]  # zero only if the products are rounded before they are added
    found = np.zeros_like(first)
    sources = [torch.from_numpy(values) for values in (first, second)]
    _run_blend(loops, torch.from_numpy(found), sources, weights)
    wide = weights[0] * first.astype(np.float64) + weights[1] * second.astype(np.float64)
    if not np.array_equal(found, wide.astype(np.float32)):
        raise WrongError("its blends are wrong")


def _squared(values: NDArray[np.float32]) -> float:
    """The definition of a chunk's squared norm."""
    squares = np.zeros(CHUNK)
    squares[: len(values)] = values.astype(np.float64) ** 2
    left = squares[: assembly.COLUMNS].copy()
    for start in range(assembly.COLUMNS, CHUNK, assembly.COLUMNS):
        left += squares[start : start + assembly.COLUMNS]
    while len(left) > 1:
        left = left[: len(left) // 2] + left[len(left) // 2 :]
    return float(left[0])
