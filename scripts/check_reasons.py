"""Checks that no code looks into a sentence that is for people: decisions are values.

A reason, a message or the text of an error may be shown, shortened, put into another sentence,
stored, and asked whether it is there. It is never compared, searched, split or used as a key: what
is decided has a type of its own (an enum, a status code, an error's class).

What counts as a sentence: names, attributes and keys that say so (``WORDS``, ``NAMES``), the text
of an exception, whatever is made from one of these, and a literal of several words.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("agent", "api", "cli", "core", "operator", "scripts")

WORDS = frozenset(
    {"complaint", "detail", "evidence", "explanation", "message", "problem", "reason", "sentence"}
    | {"why"}
)
"""A name that ends with one of these, as a word of its own, holds a sentence."""
NAMES = frozenset({"ended_for", "killed_for", "leave_waits"})
"""Sentences whose names do not say so."""
SEVERAL_WORDS = re.compile(r"\w,? \w")
LOOKS = frozenset(
    {"count", "endswith", "find", "index", "isdigit", "partition", "rfind", "rindex", "rpartition"}
    | {"removeprefix", "removesuffix", "rsplit", "split", "splitlines", "startswith"}
)
"""Methods that look into a text."""
KEEPS = frozenset({"capitalize", "casefold", "encode", "format", "join", "lower", "replace"}) | {
    "lstrip",
    "rstrip",
    "strip",
    "title",
    "upper",
}
"""Methods whose result is still that text."""
SEARCHES = frozenset({"findall", "finditer", "fullmatch", "match", "search", "split"})
"""Functions of ``re``, methods of a compiled pattern."""

EXCEPTIONS: Mapping[str, str] = {
    "agent/mainstay_train/session/loop.py:run": (
        "torch says by its message alone which of a user's mistakes are the same on any hardware"
    ),
    "core/mainstay_core/wire/formats.py:_differing_slots": (
        "format 1 of facts and recoveries has the slots in a sentence; this is its only reader"
    ),
    "operator/mainstay_operator/observed.py:_ended_as": (
        "the operator of the version before says in a sentence alone why it ended a pod"
    ),
    "core/mainstay_core/base/errors.py:brief": "shortens what people are shown",
    "agent/mainstay_train/comm/group.py:backend_problem": "takes a backend's advice from what is "
    "shown",
}
"""Function (module:name) to why it may."""


@dataclass(frozen=True, slots=True, order=True)
class Reading:
    """One place where code looks into a sentence."""

    function: str
    line: int
    code: str


def is_sentence_name(name: str) -> bool:
    """Return whether a name says that it holds a sentence for people."""
    return name in NAMES or name.rpartition("_")[2].lower() in WORDS


class _Function:
    """Finds what is a sentence within one function."""

    def __init__(self, names: frozenset[str]) -> None:
        self._made = set(names)
        """Local names that hold one, though they do not say so."""
        self._errors: set[str] = set()

    def learn(self, nodes: list[ast.AST]) -> None:
        """Find errors at hand, then names that are given a sentence: until nothing is new."""
        self._errors |= {n.name for n in nodes if isinstance(n, ast.ExceptHandler) and n.name}
        self._errors |= {n.arg for n in nodes if isinstance(n, ast.arg) and _is_error(n)}
        before = -1
        while before != len(self._made):
            before = len(self._made)
            for node in nodes:
                self._learn_name(node)

    def _learn_name(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            targets, value = [node.target], node.value
        else:
            return
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        if names and self.is_sentence(value):
            self._made.update(names)

    def is_sentence(self, node: ast.expr) -> bool:
        """Return whether an expression is a sentence for people, or made from one."""
        match node:
            case ast.Name(id=name):
                return is_sentence_name(name) or name in self._made
            case ast.Attribute(attr=name):
                return is_sentence_name(name)
            case ast.Subscript(slice=ast.Constant(value=str(key))):
                return is_sentence_name(key)
            case ast.Subscript(value=value):
                return self.is_sentence(value)
            case ast.Call():
                return self._is_sentence_made(node)
            case ast.BoolOp(values=values):
                return any(self.is_sentence(value) for value in values)
            case ast.IfExp(body=body, orelse=other):
                return self.is_sentence(body) or self.is_sentence(other)
            case ast.BinOp(left=left, right=right):
                return self.is_sentence(left) or self.is_sentence(right)
            case ast.JoinedStr(values=values):
                parts = [v.value for v in values if isinstance(v, ast.FormattedValue)]
                return any(self.is_sentence(part) for part in parts)
            case ast.NamedExpr(value=value) | ast.Await(value=value):
                return self.is_sentence(value)
        return False

    def _is_sentence_made(self, call: ast.Call) -> bool:
        match call:
            case ast.Call(func=ast.Name(id="str" | "repr"), args=[argument]):
                return self.is_sentence(argument) or self._is_error(argument)
            case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value=str(key)), *_]):
                return is_sentence_name(key)
            case ast.Call(func=ast.Attribute(value=text, attr=method)) if method in KEEPS:
                return self.is_sentence(text)
        return False

    def _is_error(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id in self._errors

    def looks(self, node: ast.AST) -> bool:
        """Return whether a node looks into a sentence."""
        match node:
            case ast.Compare(left=left, ops=ops, comparators=right):
                asked = [op for op in ops if not isinstance(op, ast.Is | ast.IsNot)]
                sides = (left, *right)
                return bool(asked) and any(self.is_sentence(s) or _has_words(s) for s in sides)
            case ast.Call(func=ast.Attribute(value=text, attr=method), args=args) if (
                method in LOOKS
            ):
                worded = any(_has_words(argument) for argument in args)
                return self.is_sentence(text) or worded or self._searches(node)
            case ast.Call():
                return self._searches(node)
            case ast.Subscript(slice=ast.Slice()):
                return False
            case ast.Subscript(value=value, slice=key):
                return self.is_sentence(key) or (
                    isinstance(key, ast.Constant | ast.UnaryOp)
                    and not isinstance(getattr(key, "value", None), str)
                    and self.is_sentence(value)
                )
            case ast.Match(subject=subject, cases=cases):
                values = [n for case in cases for n in ast.walk(case.pattern)]
                return self.is_sentence(subject) and any(
                    isinstance(value, ast.MatchValue) for value in values
                )
        return False

    def _searches(self, call: ast.Call) -> bool:
        match call:
            case ast.Call(func=ast.Attribute(attr=name), args=arguments) if name in SEARCHES:
                return any(self.is_sentence(argument) for argument in arguments)
            case ast.Call(func=ast.Attribute(attr="get" | "pop" | "setdefault"), args=[key, *_]):
                return self.is_sentence(key)
        return False


def _has_words(node: ast.expr) -> bool:
    """Return whether a literal has several words, or one of the literals listed in it has."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(_has_words(element) for element in node.elts)
    text = node.value if isinstance(node, ast.Constant) else None
    return isinstance(text, str) and SEVERAL_WORDS.search(text) is not None


def _is_error(argument: ast.arg) -> bool:
    """Return whether an argument is annotated as an exception."""
    kind = argument.annotation
    name = kind.attr if isinstance(kind, ast.Attribute) else getattr(kind, "id", "")
    return str(name).endswith(("Error", "Exception"))


def find_readings(module: str, code: str) -> list[Reading]:
    """Return where the code of a module looks into a sentence, in order.

    Args:
        module: name that the functions are called by.
        code: source text.
    """
    found: list[Reading] = []

    def visit(scope: ast.AST, name: str, made: frozenset[str]) -> None:
        inner: list[tuple[ast.AST, str]] = []
        nodes = list(_own_nodes(scope, inner))
        function = _Function(made)
        function.learn(nodes)
        for node in nodes:
            if function.looks(node):
                where = name.removesuffix(".") or "<module>"
                found.append(
                    Reading(f"{module}:{where}", getattr(node, "lineno", 0), ast.unparse(node))
                )
        for child, label in inner:
            visit(child, f"{name}{label}.", frozenset(function._made))

    visit(ast.parse(code), "", frozenset())
    return sorted(found)


def _own_nodes(scope: ast.AST, inner: list[tuple[ast.AST, str]]) -> Iterator[ast.AST]:
    """Yield the nodes of a scope; functions and classes within go to ``inner`` instead."""
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner.append((child, child.name))
        else:
            yield child
            yield from _own_nodes(child, inner)


def main(root: Path = ROOT) -> int:
    """Print what breaks the rule, and exceptions that nobody needs; return the exit code."""
    paths = [path for folder in PRODUCT for path in sorted((root / folder).rglob("*.py"))]
    readings = [
        reading
        for path in paths
        for reading in find_readings(str(path.relative_to(root)), path.read_text())
    ]
    faults = [
        f"{reading.function}, line {reading.line}: looks into a sentence: {reading.code}"
        for reading in readings
        if reading.function not in EXCEPTIONS
    ]
    needed = {reading.function for reading in readings}
    faults += [f"{name}: an exception that nothing needs" for name in EXCEPTIONS.keys() - needed]
    print("\n".join(faults) or f"{len(paths)} modules look into no sentence")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT))
