"""Sizes of the built-in Llama and of its training, from ``workload.config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mainstay_core.base.errors import InvalidSpecError
from mainstay_train.model import data
from mainstay_train.model import workload as workloads
from mainstay_train.models import attention

_PATH = "workload.config"


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Sizes of the model and of its training.

    Raises:
        InvalidSpecError: A size is out of bounds or two contradict.
    """

    dim: int = 192
    layers: int = 8
    heads: int = 6
    kv_heads: int = 2
    hidden: int = 512
    """Inner width of SwiGLU."""
    vocab: int = data.VOCAB_SIZE
    sequence: int = 128
    """Tokens per sample."""
    micro_batch_size: int = 1
    """Samples per micro-batch."""
    rope_base: float = 10_000.0
    dropout: float = 0.0
    """Of the two residual branches of a layer."""
    attention: str = attention.AUTO
    """Form of attention; ``auto`` is flash where there is a kernel of the type."""
    dtype: str = "float32"
    lr: float = 1e-3
    """Peak of the learning rate."""
    warmup_steps: int = 10
    decay_steps: int = 1000
    """Step at which the learning rate has fallen to a tenth of its peak."""
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    """0 does not clip."""
    data_path: str = data.STDLIB

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads

    def __post_init__(self) -> None:
        positive = (
            "dim", "layers", "heads", "kv_heads", "hidden", "sequence", "micro_batch_size", "lr",
            "rope_base", "decay_steps",
        )  # fmt: skip
        for name in positive:
            _require(getattr(self, name) > 0, name, "must be above 0", self)
        for name in ("warmup_steps", "weight_decay", "clip_norm"):
            _require(getattr(self, name) >= 0, name, "must not be negative", self)
        _require(self.dim % self.heads == 0, "heads", f"must divide dim {self.dim}", self)
        _require(
            self.heads % self.kv_heads == 0, "kv_heads", f"must divide heads {self.heads}", self
        )
        _require(self.head_dim % 2 == 0, "heads", "must leave an even dim / heads (rotary)", self)
        _require(0 <= self.dropout < 1, "dropout", "must be within 0 and below 1", self)
        _require(
            self.vocab >= data.VOCAB_SIZE, "vocab", f"must hold {data.VOCAB_SIZE} byte values", self
        )
        _require(
            self.attention in attention.FORMS,
            "attention",
            f"must be one of {', '.join(attention.FORMS)}",
            self,
        )
        _require(
            self.dtype in workloads.DTYPES,
            "dtype",
            f"must be one of {', '.join(workloads.DTYPES)}",
            self,
        )


_KEYS = {
    "dim": "dim",
    "layers": "layers",
    "heads": "heads",
    "kvHeads": "kv_heads",
    "hidden": "hidden",
    "vocab": "vocab",
    "sequence": "sequence",
    "microBatchSize": "micro_batch_size",
    "ropeBase": "rope_base",
    "dropout": "dropout",
    "attention": "attention",
    "dtype": "dtype",
    "lr": "lr",
    "warmupSteps": "warmup_steps",
    "decaySteps": "decay_steps",
    "weightDecay": "weight_decay",
    "clipNorm": "clip_norm",
}
"""Keys of ``workload.config``, besides ``data``, and the fields that they set."""

_KINDS: dict[str, type | tuple[type, ...]] = {"int": int, "float": (int, float), "str": str}


def parse_config(config: Mapping[str, Any]) -> LlamaConfig:
    """Read ``workload.config``.

    Raises:
        InvalidSpecError: An unknown key (the valid ones are named), a wrong kind of
            value, or a value out of bounds.
    """
    workloads.refuse_unknown(config, [*_KEYS, "data"], _PATH)
    values: dict[str, Any] = {}
    for key, name in _KEYS.items():
        if config.get(key) is None:
            continue
        value: Any = config[key]
        kind = str(LlamaConfig.__annotations__[name])
        if isinstance(value, bool) or not isinstance(value, _KINDS[kind]):
            raise InvalidSpecError(f"{_PATH}.{key}", f"must be of type {kind}, got {value!r}")
        values[name] = float(config[key]) if kind == "float" else value
    source = config.get("data") or {}
    if not isinstance(source, Mapping):
        raise InvalidSpecError(f"{_PATH}.data", f"must be a mapping with `path`, got {source!r}")
    workloads.refuse_unknown(source, ["path"], f"{_PATH}.data")
    path = source.get("path", data.STDLIB)
    if not isinstance(path, str):
        raise InvalidSpecError(f"{_PATH}.data.path", f"must be of type str, got {path!r}")
    return LlamaConfig(**values, data_path=path)


def _require(holds: bool, name: str, message: str, config: LlamaConfig) -> None:
    if not holds:
        key = next(key for key, value in _KEYS.items() if value == name)
        raise InvalidSpecError(f"{_PATH}.{key}", f"{message}, got {getattr(config, name)!r}")
