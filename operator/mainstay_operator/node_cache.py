"""A cache of the cluster's nodes: the watch fills it, and a list corrects it now and then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mainstay_core.pool.observed import ObservedNode


class NodeCache:
    """The nodes by name. Deleted ones are kept: that they are gone is news for their pods."""

    def __init__(self) -> None:
        self._nodes: dict[str, ObservedNode] = {}
        self._asked_for: frozenset[str] = frozenset()
        self._shown_since: set[str] = set()

    def show(self) -> Mapping[str, ObservedNode]:
        """Return the nodes as far as is known."""
        return self._nodes

    def note_first(self, node: ObservedNode) -> None:
        """Learn of a node, if nothing is known of it yet."""
        self._nodes.setdefault(node.name, node)

    def note_node(self, node: ObservedNode) -> bool:
        """Learn from the watch how a node is; return whether that is news."""
        self._shown_since.add(node.name)
        changed = self._nodes.get(node.name) != node
        self._nodes[node.name] = node
        return changed

    def begin_list(self) -> None:
        """Remember that a list is asked for now: what the watch tells from now on is newer."""
        self._asked_for = frozenset(name for name, node in self._nodes.items() if not node.gone)
        self._shown_since.clear()

    def apply_list(self, listed: Iterable[ObservedNode]) -> bool:
        """Learn from the list; return whether the watch has missed something."""
        there = {node.name: node for node in listed}
        there |= {
            name: ObservedNode(name=name, gone=True) for name in self._asked_for - there.keys()
        }
        missed = {
            name: node
            for name, node in there.items()
            if name not in self._shown_since and self._nodes.get(name) != node
        }
        self._nodes |= missed
        return bool(missed)
