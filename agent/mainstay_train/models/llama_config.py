"""Sizes of the built-in Llama and of its training, from ``workload.config``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

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
            self.require(getattr(self, name) > 0, name, "must be above 0")
        for name in ("warmup_steps", "weight_decay", "clip_norm"):
            self.require(getattr(self, name) >= 0, name, "must not be negative")
        self.require(self.dim % self.heads == 0, "heads", f"must divide dim {self.dim}")
        self.require(self.heads % self.kv_heads == 0, "kv_heads", f"must divide heads {self.heads}")
        self.require(self.head_dim % 2 == 0, "heads", "must leave an even dim / heads (rotary)")
        self.require(0 <= self.dropout < 1, "dropout", "must be within 0 and below 1")
        self.require(
            self.vocab >= data.VOCAB_SIZE, "vocab", f"must hold {data.VOCAB_SIZE} byte values"
        )
        self.require_one_of("attention", attention.FORMS)
        self.require_one_of("dtype", workloads.DTYPES)

    def require(self, holds: bool, name: str, message: str) -> None:
        """Refuse a field's value unless something holds.

        Args:
            holds: what must hold.
            name: of the field.
            message: what would be right.

        Raises:
            InvalidSpecError: it does not hold.
        """
        if not holds:
            raise InvalidSpecError(
                f"{_PATH}.{key_of(name)}", f"{message}, got {getattr(self, name)!r}"
            )

    def require_one_of(self, name: str, allowed: Iterable[str]) -> None:
        """Refuse a field's value unless it is one of those allowed.

        Raises:
            InvalidSpecError: it is another one.
        """
        allowed = tuple(allowed)
        self.require(getattr(self, name) in allowed, name, f"must be one of {', '.join(allowed)}")


_KINDS: dict[str, type | tuple[type, ...]] = {"int": int, "float": (int, float), "str": str}

ConfigT = TypeVar("ConfigT", bound=LlamaConfig)


def key_of(name: str) -> str:
    """Return the key of ``workload.config`` that sets a field: in camel case."""
    first, *others = name.split("_")
    return first + "".join(map(str.capitalize, others))


def keys_of(kind: type[LlamaConfig]) -> dict[str, str]:
    """Return the keys of ``workload.config``, besides ``data``, and the fields that they set."""
    return {key_of(field.name): field.name for field in fields(kind) if field.name != "data_path"}


def parse_config(config: Mapping[str, Any], kind: type[ConfigT]) -> ConfigT:
    """Read ``workload.config``.

    Args:
        config: as the job has it.
        kind: of the model: :class:`LlamaConfig`, or one that adds fields to it.

    Raises:
        InvalidSpecError: An unknown key (the valid ones are named), a wrong kind of
            value, or a value out of bounds.
    """
    keys = keys_of(kind)
    workloads.refuse_unknown(config, [*keys, "data"], _PATH)
    types = {field.name: str(field.type) for field in fields(kind)}
    values: dict[str, Any] = {}
    for key, name in keys.items():
        if config.get(key) is None:
            continue
        value: Any = config[key]
        wanted = types[name]
        if isinstance(value, bool) or not isinstance(value, _KINDS[wanted]):
            raise InvalidSpecError(f"{_PATH}.{key}", f"must be of type {wanted}, got {value!r}")
        values[name] = float(config[key]) if wanted == "float" else value
    source = config.get("data") or {}
    if not isinstance(source, Mapping):
        raise InvalidSpecError(f"{_PATH}.data", f"must be a mapping with `path`, got {source!r}")
    workloads.refuse_unknown(source, ["path"], f"{_PATH}.data")
    path = source.get("path", data.STDLIB)
    if not isinstance(path, str):
        raise InvalidSpecError(f"{_PATH}.data.path", f"must be of type str, got {path!r}")
    return kind(**values, data_path=path)
