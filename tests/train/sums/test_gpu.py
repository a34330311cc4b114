"""The GPU's form of a digest's sums, run by Triton's interpreter on the CPU."""

import importlib
import sys

import pytest
import torch

from mainstay_core.base.digest import CHUNK
from mainstay_train.exact import numerics
from mainstay_train.sums import digests
from mainstay_train.sums.rows import Piece

pytest.importorskip("triton")

MODULE = "mainstay_train.sums.gpu"


def python_modules():
    """Triton's that can be imported a second time, and the kernel's."""
    return [
        name
        for name in sys.modules
        if name == MODULE or ((name + ".").startswith("triton.") and "._C" not in name)
    ]


@pytest.fixture
def row_sums(monkeypatch):
    """The kernel, interpreted: Triton chooses at its import, which torch may have done before."""
    numerics.setup("cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for name in python_modules():
        monkeypatch.delitem(sys.modules, name)
    yield importlib.import_module(MODULE).row_sums
    for name in python_modules():
        del sys.modules[name]


def test_one_pass_has_the_sums_of_many(row_sums, monkeypatch):
    pieces = [
        Piece("a", 32, 2 * CHUNK + 77),
        Piece("b", 2 * CHUNK + 128, 1),
        Piece("c", 140_000, 4000, 2, CHUNK - 1000),
    ]
    flat = torch.randint(-(2**31), 2**31 - 1, (144_000,), dtype=torch.int32).view(torch.float32)
    expected = digests.FlatDigest(pieces).digest(flat)

    monkeypatch.setattr(digests, "_fused", lambda *_: row_sums)
    known = digests.FlatDigest(pieces)

    assert known.digest(flat) == expected
    flat.view(torch.int32)[140_000 + 3999] ^= 1
    assert known.digest(flat) != expected


def test_a_device_without_it_goes_by_batches():
    assert digests._fused(torch.device("meta")) is None


@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernel_compiles_for_a_gpu(monkeypatch, tmp_path, capability):
    """Triton's interpreter takes more than its compiler does."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton import compiler
    from triton.backends.compiler import GPUTarget

    kernels = importlib.import_module(MODULE)
    names = ("words", "starts", "positions", "lengths", "keys", "sums", "num_rows")
    types = dict.fromkeys(names, "*i64") | {"words": "*i32", "num_rows": "i32"}
    constants = {"chunk": CHUNK, "block": kernels.BLOCK, "num_mixers": 2}
    signature = types | dict.fromkeys(constants, "constexpr")
    source = compiler.ASTSource(fn=kernels._add, signature=signature, constexprs=constants)
    compiled = compiler.compile(source, target=GPUTarget("cuda", capability, 32))
    assert "ld.global" in compiled.asm["ptx"]
