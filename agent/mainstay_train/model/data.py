"""Byte-level data over any folder of text files, by address (design.md 1, rule 1).

Nothing is streamed and nothing has a position: sample = f(seed, step, shard type,
micro-batch, index), a hash to an offset of the concatenated corpus. Which samples a
step contains is a function of the step alone, whoever computes them. Two pods must
read the same bytes; the corpus's fingerprint tells.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from mainstay_core.base.digest import Digest
from mainstay_core.base.errors import InvalidSpecError
from mainstay_train.exact.draws import Address
from mainstay_train.model.losses import IGNORED_TARGET
from mainstay_train.sums import digests

STDLIB = "stdlib"
"""As a path: the sources of this Python's standard library, real text on every machine."""

VOCAB_SIZE = 256
"""Tokens are bytes."""

_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"}
)
_SNIFF_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens and targets of one micro-batch."""

    tokens: torch.Tensor
    """Input of the first block, int64 [micro_batch_size, ...]."""
    targets: torch.Tensor
    """Targets of the last block's loss, int64, -100 where none."""


class Dataset(Protocol):
    """A data set whose samples are found by address.

    In a workload of blocks one thread calls :meth:`batch`, the same for all of a trainer's life,
    one call at a time. It is not the main thread, where the entrypoint, :meth:`fingerprint` and the
    blocks run. What both change must be locked; ``Workload.load_ahead`` may be False. Calls come in
    the order in which micro-batches are computed, one ahead. A batch that was asked for may never
    be computed, and may be asked for again: a recovery and a newer plan change what comes next.

    In an own loop the main thread calls it, when a work begins. So does it in a workload of blocks
    whose device is the host, if the data set is there already (:class:`InMemory`): a thread beside
    the one that computes gains nothing then.
    """

    def batch(self, address: Address) -> Batch:
        """The micro-batch at ``address``, on CPU: a pure function of the address.

        Its memory may be written to with the next call: trainers copy each batch.
        """
        ...

    def fingerprint(self) -> str:
        """A text that is equal exactly where :meth:`batch` returns equal samples."""
        ...


@runtime_checkable
class InMemory(Protocol):
    """A data set whose :meth:`Dataset.batch` waits for nothing, and says so."""

    in_memory: bool


def waits(dataset: Dataset) -> bool:
    """Return whether a batch of the data set may have to be waited for: files, a network."""
    return not (isinstance(dataset, InMemory) and dataset.in_memory)


def num_tokens(batch: Batch) -> int:
    """The number of tokens that count in the loss of a micro-batch."""
    return int((batch.targets != IGNORED_TARGET).sum())


def consumed_digest(address: Address, batch: Batch) -> Digest:
    """The digest of what one micro-batch feeds into training.

    Sum it over the types and micro-batches of the committed steps: that is the
    digest of the consumed data, whoever consumed which part.
    """
    name = f"data:{address.step}/{address.type}/{address.micro_batch}"
    tokens, targets = batch.tokens, batch.targets
    if tokens.dtype == targets.dtype:  # targets count as what comes behind the tokens
        return digests.tensor_digest(name, torch.cat([tokens.reshape(-1), targets.reshape(-1)]))
    found = digests.tensor_digest(name, tokens)
    return found + digests.tensor_digest(name, targets, offset=tokens.numel())


@dataclass(frozen=True, slots=True)
class Corpus:
    """The files of a folder, one behind the other in order of their names."""

    data: torch.Tensor
    """uint8 [bytes]."""
    hash: str
    """BLAKE2b over names and contents."""


class ByteDataset:
    """Samples of ``sequence`` bytes and, as targets, the bytes that follow each.

    Args:
        path: A folder of text files, one file, or "stdlib".
        sequence: Tokens per sample.
        micro_batch_size: Samples per micro-batch.

    Raises:
        InvalidSpecError: Nothing readable lies there, or too little.
    """

    in_memory = True

    def __init__(self, path: str = STDLIB, *, sequence: int, micro_batch_size: int) -> None:
        self.sequence = sequence
        self.micro_batch_size = micro_batch_size
        self.corpus = load_corpus(path)
        if self.corpus.data.numel() <= sequence:
            raise InvalidSpecError(
                "workload.config.data.path",
                f"{path!r} holds {self.corpus.data.numel()} bytes of text, "
                f"one sample needs {sequence + 1}",
            )

    def batch(self, address: Address) -> Batch:
        """Tokens and targets, int64 [micro_batch_size, sequence]."""
        starts = self.corpus.data.numel() - self.sequence
        samples = []
        for index in range(self.micro_batch_size):
            offset = address.hash64(f"data/{index}") % starts
            samples.append(self.corpus.data[offset : offset + self.sequence + 1])
        window = torch.stack(samples).to(torch.int64)
        return Batch(window[:, :-1].contiguous(), window[:, 1:].contiguous())

    def fingerprint(self) -> str:
        """Content of the corpus and the shape of a micro-batch."""
        return f"bytes {self.corpus.hash} {self.micro_batch_size}x{self.sequence}"


@lru_cache(maxsize=4)
def load_corpus(path: str) -> Corpus:
    """Read every text file under ``path`` in the order of their relative names.

    Text is what has no NUL byte near its start. Hidden files and folders are left
    out. Cached, so that a warm parent reads it once for all its children.

    Raises:
        InvalidSpecError: ``path`` does not exist, or holds no text.
    """
    field = "workload.config.data.path"
    stdlib = path == STDLIB
    root = Path(sysconfig.get_paths()["stdlib"] if stdlib else path).expanduser()
    if not root.exists():
        raise InvalidSpecError(field, f"{str(root)!r} does not exist; give a folder of text files")
    files = [root] if root.is_file() else _text_files(root, stdlib=stdlib)
    digest = hashlib.blake2b(digest_size=16)
    content = bytearray()
    for file in files:
        try:
            data = file.read_bytes()
        except OSError as error:
            raise InvalidSpecError(field, f"cannot read {str(file)!r}: {error.strerror}") from error
        if b"\0" in data[:_SNIFF_BYTES] or not data:
            continue
        name = file.relative_to(root).as_posix().encode()
        digest.update(b"%d %s %d\n" % (len(name), name, len(data)))
        digest.update(data)
        content += data
    if not content:
        raise InvalidSpecError(field, f"no text file under {str(root)!r}")
    return Corpus(torch.frombuffer(content, dtype=torch.uint8), digest.hexdigest())


def _text_files(root: Path, *, stdlib: bool) -> list[Path]:
    """Return the files below ``root`` in order of their names; links to folders are left out."""
    suffix = ".py" if stdlib else ""
    found: list[tuple[bytes, Path]] = []
    for folder, folders, names in os.walk(root):
        # What is left out isn't walked through either: the library's packages are many files.
        skipped = _SKIPPED_FOLDERS if stdlib else frozenset[str]()
        folders[:] = [f for f in folders if not f.startswith(".") and f not in skipped]
        for name in names:
            file = Path(folder, name)
            if name.endswith(suffix) and not name.startswith(".") and file.is_file():
                found.append((file.relative_to(root).as_posix().encode(), file))
    return [file for _, file in sorted(found)]
