"""Compares tensors bit by bit, and changes single bits.

Elements count as integers: NaN equals itself where the bits do, and -0.0 differs from 0.0.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence

import torch

from mainstay_train.kernels.regions import Region

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer type of each width in bytes."""

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memcmp.restype = ctypes.c_int


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's own memory as integers; of complex numbers with one more dimension, [2]."""
    if tensor.is_complex():
        if tensor.is_conj():
            tensor = tensor.conj()  # the other way round: what lies in memory
        if tensor.is_neg():
            tensor = torch._neg_view(tensor)
        tensor = torch.view_as_real(tensor)
    elif tensor.is_neg():
        tensor = torch._neg_view(tensor)
    return tensor.view(_WORDS[tensor.element_size()])


def are_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape, type and bits; waits for the device."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    number = first.numel()
    if number == 0:
        return True
    if first.is_cpu and first.stride() == second.stride() and _is_dense(first):
        size = number * first.element_size()
        return bool(_memcmp(first.data_ptr(), second.data_ptr(), size) == 0)
    return torch.equal(words_of(first), words_of(second))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether its elements fill a run of memory, each of them once."""
    if tensor.is_contiguous():
        return True
    region = Region.of(tensor)
    size = tensor.numel() * tensor.element_size()
    return region is not None and region.count == 1 and region.run == size


def count_differing(first: torch.Tensor, second: torch.Tensor) -> int:
    """Return how many elements of two tensors differ; all, if their shapes do."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return max(first.numel(), second.numel())
    differ = words_of(first) != words_of(second)
    if first.is_complex():
        differ = differ.any(-1)
    return int(differ.sum())


def differ_into(into: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
    """Write whether some element of two tensors differs; the host does not wait for it.

    To count them takes a GPU three times as long.

    Args:
        into: gets the answer; a scalar of bool on the device of both.
        first: some tensor.
        second: another one of its shape and type.
    """
    torch.any(torch.ne(words_of(first), words_of(second)), out=into)


def digest_of(tensors: Sequence[torch.Tensor]) -> str:
    """Return a digest of shapes, types and bits."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(words_of(tensor).contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()


def overwrite(tensor: torch.Tensor, by: torch.Tensor) -> None:
    """Give a tensor the bits of another one of its shape and type."""
    words_of(tensor).copy_(words_of(by))


def flip_bit(tensor: torch.Tensor, element: int, bit: int) -> bool:
    """Change one bit of a tensor in place; return False if it has no elements.

    Args:
        tensor: is changed.
        element: which element, in the order of indices, modulo their number.
        bit: which bit of it, modulo their number; the lowest is 0. A bool has one.
    """
    if tensor.numel() == 0:
        return False
    index = _unravel(element % tensor.numel(), tensor.shape)
    words = words_of(tensor)
    width = 8 * words.element_size()
    bit %= 1 if tensor.dtype is torch.bool else 8 * tensor.element_size()
    if tensor.is_complex():
        index = (*index, bit // width)
    mask = 1 << (bit % width)
    if bit % width == width - 1 and width > 8:
        mask -= 1 << width  # words but bytes have a sign
    words[index].bitwise_xor_(mask)
    return True


def _unravel(element: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the indices of an element by its number."""
    index = []
    for size in reversed(shape):
        element, at = divmod(element, size)
        index.append(at)
    return tuple(reversed(index))
