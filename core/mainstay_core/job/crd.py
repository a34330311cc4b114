"""Builds the CustomResourceDefinition of a TrainingJob from the model, and from nothing else.

``scripts/crd.py`` writes it to files. Descriptions are the docstrings under the model's fields;
bounds and defaults are the model's. Rules over several fields and over changes come from
:mod:`mainstay_core.job.crd_rules`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mainstay_core.job.crd_rules import RULES
from mainstay_core.job.spec import GROUP, KIND, PLURAL, VERSION, TrainingJobSpec
from mainstay_core.job.status import TrainingJobStatus

VALIDATIONS = "x-kubernetes-validations"
MAX_EXACT = 2**53

COLUMNS: tuple[tuple[str, str, str, int], ...] = (
    ("State", "string", ".status.state", 0),
    ("Ready", "string", ".status.ready", 0),
    ("Spares", "string", ".status.spares", 0),
    ("Step", "integer", ".status.training.step", 0),
    ("Recoveries", "integer", ".status.recovery.total", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
    ("Replicas", "integer", ".status.quorum.replicas", 1),
    ("Loss", "string", ".status.training.loss", 1),
    ("ETTR", "string", ".status.training.ettr", 1),
    ("Approximate", "integer", ".status.training.approximateSince", 1),
    ("Last", "string", ".status.recovery.last.method", 1),
    ("Reason", "string", ".status.reason", 1),
)
"""(name, type, JSONPath, priority); those of priority 1 are for ``-o wide``."""

_KEPT = (
    "type",
    "format",
    "enum",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "anyOf",
    "additionalProperties",
    "x-kubernetes-int-or-string",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
    VALIDATIONS,
)
"""Keys that a structural schema shares with the model's."""


def build_crd() -> dict[str, Any]:
    """Return the CustomResourceDefinition as plain data, in a stable order."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{PLURAL}.{GROUP}",
            # Helm keeps the CRD when the chart goes: every job would go with it.
            "annotations": {"helm.sh/resource-policy": "keep"},
            "labels": {
                "app.kubernetes.io/name": "mainstay",
                "app.kubernetes.io/part-of": "mainstay",
            },
        },
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["mtj"],
                "categories": ["all", "mainstay"],
            },
            "versions": [_version()],
        },
    }


def _version() -> dict[str, Any]:
    return {
        "name": VERSION,
        "served": True,
        "storage": True,
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path}
            | ({"priority": priority} if priority else {})
            for name, kind, path, priority in COLUMNS
        ],
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.parallelism.replicas",
                "statusReplicasPath": ".status.quorum.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        "schema": {"openAPIV3Schema": _telling_defaults(build_schema())},
    }


def _telling_defaults(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose descriptions end in the default: kubectl explain shows no defaults."""
    told = dict(schema)
    if "properties" in schema:
        told["properties"] = {
            name: _telling_defaults(child) for name, child in schema["properties"].items()
        }
    default = schema.get("default")
    if isinstance(default, str | int) and "description" in schema:
        shown = str(default).lower() if isinstance(default, bool) else default
        told["description"] = f"{schema['description']} Default: {shown}."
    return told


def build_schema() -> dict[str, Any]:
    """Return the structural schema of a whole TrainingJob, with its rules in CEL."""
    schema: dict[str, Any] = {
        "description": "A pretraining job that a failure costs no step and no bit.",
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            # A rule refers to the name, and the server requires a declared path.
            "metadata": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 253}},
            },
            "spec": _model_schema(TrainingJobSpec),
            "status": _without_defaults(_model_schema(TrainingJobStatus)),
        },
    }
    for rule in RULES:
        _at(schema, rule.section).setdefault(VALIDATIONS, []).append(rule.to_schema())
    return schema


def _at(schema: dict[str, Any], path: str) -> dict[str, Any]:
    for name in filter(None, path.split(".")):
        schema = schema["properties"][name]
    return schema


def _model_schema(model: type[TrainingJobSpec] | type[TrainingJobStatus]) -> dict[str, Any]:
    schema = model.model_json_schema(by_alias=True, mode="validation")
    return _structural(schema, schema.get("$defs", {}))


def _without_defaults(schema: Any) -> Any:
    """Return a schema without defaults: a status says only what was observed."""
    if isinstance(schema, dict):
        return {
            key: {name: _without_defaults(child) for name, child in value.items()}
            if key == "properties"
            else _without_defaults(value)
            for key, value in schema.items()
            if key != "default"
        }
    return schema


def _structural(node: Mapping[str, Any], defs: Mapping[str, Any]) -> dict[str, Any]:
    """Return one node as a structural schema, with references put in and nothing nullable."""
    own_words = _prose(node.get("description", ""))
    if "$ref" in node:
        schema = _structural(defs[node["$ref"].rpartition("/")[2]], defs)
        own_words = own_words or schema.get("description", "")
        schema.pop("description", None)
    elif _is_optional(node):
        present = next(item for item in node["anyOf"] if item.get("type") != "null")
        schema = _structural(present, defs)
        own_words = own_words or schema.get("description", "")
        schema.pop("description", None)
    else:
        schema = _plain(node, defs)
    default = _present(node.get("default"))
    if default is not None and default != []:
        schema["default"] = default
    return {"description": own_words, **schema} if own_words else schema


def _present(default: Any) -> Any:
    """Return a default without the fields that are left out.

    It is whole, as rules are checked on it.
    """
    if not isinstance(default, Mapping):
        return default
    return {key: _present(value) for key, value in default.items() if value is not None}


def _is_optional(node: Mapping[str, Any]) -> bool:
    return any(item.get("type") == "null" for item in node.get("anyOf", ()))


def _plain(node: Mapping[str, Any], defs: Mapping[str, Any]) -> dict[str, Any]:
    schema = {key: node[key] for key in _KEPT if key in node}
    if "const" in node:
        schema["enum"] = [node["const"]]
    if node.get("type") == "integer":
        schema["format"] = "int64"
        if schema.get("maximum", 0) > MAX_EXACT:
            # The API server keeps bounds as floating-point numbers; the format bounds it as well.
            del schema["maximum"]
    if node.get("type") == "array":
        schema.setdefault("x-kubernetes-list-type", "atomic")
        schema["items"] = _structural(node["items"], defs)
    if node.get("type") == "object":
        if node.get("additionalProperties") is False:
            del schema["additionalProperties"]
        if "properties" in node:
            schema["properties"] = {
                name: _structural(child, defs) for name, child in node["properties"].items()
            }
        if node.get("required"):
            schema["required"] = list(node["required"])
    return schema


def _prose(text: str) -> str:
    """Return a docstring as one paragraph without markup."""
    return " ".join(text.replace("``", "'").split())
