"""The types of a TrainingJob's fields: what each accepts, for pydantic and the CRD alike.

A marker carries both readings of one rule: the check that local mode and the api
make, and the schema (with a rule in CEL) that the API server of a cluster enforces.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, Literal

import pydantic
import pydantic_core
from pydantic_core import core_schema

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.words import quote
from mainstay_core.job.shared_memory import SHM_DIR, is_at_shm

MAX_NAME_LENGTH = 40
"""Leaves room for the suffixes of pod names within the 63 characters of a label."""
MAX_SEED = 2**63 - 1
MAX_STEPS = 10**12
MAX_DEGREE = 65_536
"""Far beyond any job, and small enough that a product of three degrees fits in 64 bits."""
MAX_SECONDS = 10**8
"""Three years."""
VALIDATIONS = "x-kubernetes-validations"
"""Where a structural schema keeps its rules in CEL."""


@dataclass(frozen=True, slots=True)
class Text:
    """Marks a string that has to match a pattern as a whole.

    Args:
        pattern: in the syntax that Python's ``re`` and RE2 share.
        words: what is right, for people; an example helps.
        max_length: in characters.
    """

    pattern: str
    words: str
    max_length: int

    def __get_pydantic_core_schema__(
        self, source: Any, handler: pydantic.GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        """Check after pydantic has made sure that it is a string."""
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: pydantic.GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Return the same rule for the CRD."""
        rule = {"rule": f"self.matches(r'^({self.pattern})$')", "message": f"must be {self.words}"}
        return {**handler(schema), "maxLength": self.max_length, VALIDATIONS: [rule]}

    def _check(self, value: str) -> str:
        if len(value) > self.max_length or not re.fullmatch(self.pattern, value):
            longer = f", at most {self.max_length} characters" * (len(value) > self.max_length)
            raise ValueError(f"is {value!r}, must be {self.words}{longer}")
        return value


def _int_or_auto(value: object) -> object:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if value == "Auto" or (whole and 1 <= value <= MAX_DEGREE):  # type: ignore[operator]
        return value
    raise pydantic_core.PydanticCustomError(
        "int_or_auto",
        "is {value}, must be a whole number from 1 to {most}, or Auto",
        {"value": quote(value), "most": MAX_DEGREE},
    )


IntOrAuto = Annotated[
    int | Literal["Auto"],
    pydantic.BeforeValidator(_int_or_auto),
    pydantic.WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "maxLength": 16,
            VALIDATIONS: [
                {
                    "rule": f"type(self) == int ? self >= 1 && self <= {MAX_DEGREE} "
                    ": self == 'Auto'",
                    "message": f"must be a whole number from 1 to {MAX_DEGREE}, or Auto",
                }
            ],
        }
    ),
]
FREE_FIELDS: dict[str, Any] = {
    "type": "object",
    "additionalProperties": {"x-kubernetes-preserve-unknown-fields": True},
    "maxProperties": 256,
}
"""Schema of fields that are not ours to know. Not an object that preserves unknown fields: the API
server takes two of those for equal in CEL when they have as many fields of other names."""


def _pod_template(value: dict[str, Any]) -> dict[str, Any]:
    if not value:
        return value
    unknown = sorted(set(value) - {"metadata", "spec"})
    if unknown or not isinstance(value.get("spec"), dict):
        found = f"has {unknown[0]}" if unknown else "has no spec"
        raise ValueError(f"{found}, must be a pod template: metadata and spec as in a Deployment")
    if not isinstance(value.get("metadata", {}), dict):
        raise ValueError("has no fields in metadata, must be a pod template as in a Deployment")
    _check_shared_memory(value["spec"])
    return value


def _check_shared_memory(spec: dict[str, Any]) -> None:
    """Refuse a volume at /dev/shm that trainers could not use: the rest is the API server's."""
    # A list: the API server judges what a name is, and what is none need not be hashable.
    volumes = [v.get("name") for v in _dicts(spec.get("volumes"))]
    for c, container in enumerate(_dicts(spec.get("containers"))):
        for m, mount in enumerate(_dicts(container.get("volumeMounts"))):
            where = f"has spec.containers[{c}].volumeMounts[{m}]"
            if not is_at_shm(mount):
                continue
            if mount.get("readOnly"):
                raise ValueError(
                    f"{where} at {SHM_DIR} read-only, must be writable: trainers talk through it"
                )
            if mount.get("name") not in volumes:
                raise ValueError(
                    f"{where} at {SHM_DIR} of volume {mount.get('name')!r}, must name one of "
                    "spec.volumes; or leave it out, and a volume is made for it"
                )


def _dicts(value: object) -> list[dict[str, Any]]:
    """Return the items that can be looked into."""
    return [v for v in value if isinstance(v, dict)] if isinstance(value, list) else []


PodTemplate = Annotated[
    dict[str, Any],
    pydantic.AfterValidator(_pod_template),
    pydantic.WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "metadata": {"description": "Labels and annotations of the pods.", **FREE_FIELDS},
                "spec": {
                    "description": "The pods' own specification, containers at least.",
                    **FREE_FIELDS,
                    "required": ["containers"],
                },
            },
            "required": ["spec"],
        }
    ),
]
Config = Annotated[
    dict[str, Any], pydantic.Field(max_length=256), pydantic.WithJsonSchema(FREE_FIELDS)
]
Positive = Annotated[int, pydantic.Field(ge=1, le=MAX_STEPS)]
NotNegative = Annotated[int, pydantic.Field(ge=0, le=MAX_STEPS)]
Degree = Annotated[int, pydantic.Field(ge=1, le=MAX_DEGREE)]
SmallDegree = Annotated[int, pydantic.Field(ge=1, le=4096)]
Seconds = Annotated[int, pydantic.Field(ge=1, le=MAX_SECONDS)]
SecondsOrNone = Annotated[int, pydantic.Field(ge=0, le=MAX_SECONDS)]
Percent = Annotated[int, pydantic.Field(ge=0, le=100)]
Seed = Annotated[int, pydantic.Field(ge=0, le=MAX_SEED)]

JOB_NAME = Text(
    r"[a-z]([-a-z0-9]*[a-z0-9])?",
    f"at most {MAX_NAME_LENGTH} lower-case letters, digits and '-', starting with a letter and "
    "ending with a letter or digit",
    MAX_NAME_LENGTH,
)
TrainingJobName = Annotated[str, JOB_NAME]
Entrypoint = Annotated[
    str,
    Text(
        r"([A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*|[^:]+\.py):[A-Za-z_][A-Za-z0-9_]*",
        "module:function or path/to/file.py:function, e.g. mainstay_train.models.llama:workload",
        512,
    ),
]
_QUANTITY = r"[0-9]{1,15}(\.[0-9]{1,9})?(m|[kMGTPE]i?|Ki|e[0-9]{1,2})?"
_QUANTITY_WORDS = "an amount as in a pod's resources, e.g. 500m, 2 or 1Gi"


def _quantity(value: object) -> object:
    return _amount(value, _QUANTITY_WORDS)


def _amount(value: object, words: str) -> object:
    whole = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**15
    if whole or (isinstance(value, str) and re.fullmatch(_QUANTITY, value)):
        return str(value)
    raise pydantic_core.PydanticCustomError(
        "quantity", "is {value}, must be {words}", {"value": quote(value), "words": words}
    )


Quantity = Annotated[
    str,
    pydantic.BeforeValidator(_quantity),
    pydantic.WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "maxLength": 32,
            VALIDATIONS: [
                {
                    "rule": f"type(self) == int ? self >= 0 : self.matches(r'^({_QUANTITY})$')",
                    "message": f"must be {_QUANTITY_WORDS}",
                }
            ],
        }
    ),
]
"""An amount of a resource of a container, always as a text."""


def _quantity_or_auto(value: object) -> object:
    return value if value == "Auto" else _amount(value, f"{_QUANTITY_WORDS}, or Auto")


AMOUNT_RULES = [
    {
        "rule": "type(self) == int ? self >= 0 : self == 'Auto' || "
        f"self.matches(r'^({_QUANTITY})$')",
        "message": f"must be {_QUANTITY_WORDS}, or Auto",
    }
]
"""What a field that is an amount or Auto must be."""
QuantityOrAuto = Annotated[
    str,
    pydantic.BeforeValidator(_quantity_or_auto),
    pydantic.WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "maxLength": 32,
            VALIDATIONS: AMOUNT_RULES,
        }
    ),
]
"""An amount of memory, or Auto."""
_SUFFIXES = {"": Fraction(1), "m": Fraction(1, 1000)}
_SUFFIXES |= {letter: Fraction(1000) ** (n + 1) for n, letter in enumerate("kMGTPE")}
_SUFFIXES |= {f"{letter}i": Fraction(1024) ** (n + 1) for n, letter in enumerate("KMGTPE")}


def whole_quantity(text: str) -> int:
    """Return the number that an amount of a resource means, rounded up: 1Ki is 1024.

    Args:
        text: a :data:`Quantity`.
    """
    found = re.fullmatch(r"([0-9.]+)(?:e([0-9]+)|([a-zA-Z]*))", text)
    assert found is not None, "its type has checked it"
    number, exponent, suffix = found.groups()
    factor = Fraction(10) ** int(exponent) if exponent else _SUFFIXES[suffix or ""]
    return math.ceil(Fraction(number) * factor)


def show_quantity(number: int) -> str:
    """Return a number as the shortest amount of a resource that means it: 8Gi, or 6G."""
    whole = {suffix: int(factor) for suffix, factor in _SUFFIXES.items() if factor >= 1}
    amounts = [
        f"{number // factor}{suffix}" for suffix, factor in whole.items() if number % factor == 0
    ]
    return min(amounts, key=len)


def read_quantity(field: str, text: str) -> int:
    """Return the number that an amount of a resource means, rounded up.

    Args:
        field: what the text is, for the error.
        text: of a user.

    Raises:
        InvalidSpecError: it is no amount; the field is named.
    """
    if re.fullmatch(_QUANTITY, text) is None:
        raise InvalidSpecError(field, f"is {quote(text)}, must be {_QUANTITY_WORDS}")
    return whole_quantity(text)


Amounts = Annotated[dict[str, Quantity], pydantic.Field(max_length=16)]
AbsolutePath = Annotated[str, Text(r"/[^\x00]*", "the absolute path of a directory", 1024)]
CheckPlan = Annotated[
    str,
    Text(
        r"Naive|Dynamic|Auto|/[^\x00]*",
        "Naive, Dynamic, Auto, or the absolute path of a plan",
        1024,
    ),
]
ObjectName = Annotated[
    str,
    Text(
        r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?",
        "the name of an object of the cluster: lower-case letters, digits, '-' and '.'",
        253,
    ),
]
LabelKey = Annotated[
    str,
    Text(
        r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?",
        "the key of a node's label, e.g. topology.kubernetes.io/zone",
        317,
    ),
]
ManagerName = Annotated[
    str,
    Text(
        r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?",
        "a domain and a path, e.g. mainstay.dev/operator",
        63,
    ),
]
