"""NetworkPolicies as a plugin that enforces them reads them: who may open a connection to whom."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

NAME = "kubernetes.io/metadata.name"


@dataclass(frozen=True)
class Place:
    """An end of a connection: a pod, or an address outside of the cluster."""

    namespace: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    address: str = ""


def may_connect(
    policies: Sequence[Mapping[str, Any]], source: Place, target: Place, port: int, protocol: str
) -> bool:
    """Both ends have to allow it; a pod that no policy of a direction selects allows all of it."""
    return _allows(policies, "Egress", source, target, port, protocol) and _allows(
        policies, "Ingress", target, source, port, protocol
    )


def _allows(
    policies: Sequence[Mapping[str, Any]],
    direction: str,
    own: Place,
    other: Place,
    port: int,
    protocol: str,
) -> bool:
    if own.address:
        return True
    selecting = [
        policy["spec"]
        for policy in policies
        if policy["metadata"]["namespace"] == own.namespace
        and direction in policy["spec"]["policyTypes"]
        and _selects(policy["spec"]["podSelector"], own.labels)
    ]
    ways = {"Ingress": ("ingress", "from"), "Egress": ("egress", "to")}
    rules, peers = ways[direction]
    return not selecting or any(
        _has_port(rule, port, protocol)
        and (not rule.get(peers) or any(_is_peer(peer, own, other) for peer in rule[peers]))
        for spec in selecting
        for rule in spec.get(rules, ())
    )


def _has_port(rule: Mapping[str, Any], port: int, protocol: str) -> bool:
    return not rule.get("ports") or any(
        each["port"] == port and each.get("protocol", "TCP") == protocol for each in rule["ports"]
    )


def _is_peer(peer: Mapping[str, Any], own: Place, other: Place) -> bool:
    if "ipBlock" in peer:
        inside = ipaddress.ip_network(peer["ipBlock"]["cidr"])
        return bool(other.address) and ipaddress.ip_address(other.address) in inside
    if other.address:
        return False
    if "namespaceSelector" in peer:
        if not _selects(peer["namespaceSelector"], {NAME: other.namespace}):
            return False
    elif other.namespace != own.namespace:
        return False
    return "podSelector" not in peer or _selects(peer["podSelector"], other.labels)


def _selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    assert set(selector) <= {"matchLabels"}, "this reader knows no other selectors"
    wanted: Mapping[str, str] = selector.get("matchLabels", {})
    return wanted.items() <= dict(labels).items()
