"""The setting of an experiment about lost stages: a model, what it learns, and how."""

from __future__ import annotations

import dataclasses
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.approximate.staged_model import StagedModel
from support.approximate.walks import Beside, Walks

from mainstay_core.base.shape import Cut, JobShape, Order
from mainstay_train.exact import optimizer
from mainstay_train.model.data import ByteDataset, Dataset, load_corpus
from mainstay_train.model.workload import Workload
from mainstay_train.models import llama

HELD_OUT_SHARE = 0.05
"""Of the text, at its end: it is never trained on."""
TEXT, WALKS, BOTH = "text", "walks", "both"
TASKS = (TEXT, WALKS, BOTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A model and its training: everything on which a curve without losses depends."""

    data: str
    """A folder of text, a file, or "stdlib"."""
    task: str = TEXT
    """What is learnt: text, walks (`walks`), or in each micro-batch half of both."""
    stages: int = 6
    layers: int = 12
    dim: int = 64
    heads: int = 4
    sequence: int = 64
    micro_batch_size: int = 8
    micro_batches: int = 1
    types: int = 2
    steps: int = 1500
    lr: float = 1e-3
    seed: int = 0
    order: Order = Order.IN_ORDER
    validation_batches: int = 4
    places: int = 4
    """Of the ring on which walks go."""
    reset_share: float = 0.1
    """Of the moves of walks that begin again."""

    def shape(self) -> JobShape:
        """The job's."""
        return JobShape(
            lanes=1,
            shards_per_lane=self.types,
            replicas=1,
            min_replicas=1,
            stages=self.stages,
            steps=self.steps,
            seed=self.seed,
            micro_batches=self.micro_batches,
            order=self.order,
            # The paper's stages are alike.
            cut=Cut.EQUAL,
        )


def split_text(data: str, folder: Path) -> tuple[Path, Path]:
    """Write the text to train on and the text held out, once; return their paths."""
    trained, held_out = folder / "trained.txt", folder / "held-out.txt"
    if not held_out.exists():
        content = bytes(load_corpus(data).data.numpy())
        border = int(len(content) * (1 - HELD_OUT_SHARE))
        trained.write_bytes(content[:border])
        held_out.write_bytes(content[border:])
    return trained, held_out


def dataset_of(setting: Setting, text: Path) -> Dataset:
    """Return what is learnt, or measured with."""
    size, sequence = setting.micro_batch_size, setting.sequence
    if setting.task == TEXT:
        return ByteDataset(str(text), sequence=sequence, micro_batch_size=size)
    num_walks = size if setting.task == WALKS else size // 2
    walks = Walks(sequence, num_walks, setting.places, setting.reset_share)
    if setting.task == WALKS:
        return walks
    bytes_ = ByteDataset(str(text), sequence=sequence, micro_batch_size=size - num_walks)
    return Beside(bytes_, walks)


def held_out_texts(setting: Setting, held_out: Path) -> dict[str, Dataset]:
    """Return three texts that are not trained on: of the same kind, English of a manual, and C."""
    stdlib = sysconfig.get_paths()["stdlib"]
    folders = {
        "held out": held_out,
        "English": Path(stdlib) / "idlelib" / "help.html",
        "C": Path(sysconfig.get_paths()["include"]),
    }
    return {
        name: ByteDataset(
            str(path), sequence=setting.sequence, micro_batch_size=setting.micro_batch_size
        )
        for name, path in folders.items()
        if path.exists()
    }


def workload_of(setting: Setting, text: Path) -> Workload:
    """Return the built-in Llama, trained as the paper says: Adam without decay, constant rate."""
    config: dict[str, Any] = {
        "dim": setting.dim,
        "layers": setting.layers,
        "heads": setting.heads,
        "kvHeads": setting.heads,
        "hidden": 4 * setting.dim,
        "sequence": setting.sequence,
        "microBatchSize": setting.micro_batch_size,
        "data": {"path": str(text)},
    }
    return dataclasses.replace(
        llama.workload(config),
        dataset=dataset_of(setting, text),
        optimizer=optimizer.adamw(weight_decay=0.0, betas=(0.9, 0.999)),
        learning_rate=optimizer.constant(setting.lr),
    )


def model_of(setting: Setting, folder: Path, **options: bool) -> StagedModel:
    """Return the model of a setting, whose text lies split in a folder."""
    trained, _ = split_text(setting.data, folder)
    return StagedModel(workload_of(setting, trained), setting.shape(), **options)
