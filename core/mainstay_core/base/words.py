"""Words of sentences for people."""

from __future__ import annotations


def first_line(text: str) -> str:
    """Return the first line of a text that may have several, for a sentence."""
    return text.strip().partition("\n")[0]


def count(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: ``1 replica``, ``2 replicas``.

    Args:
        number: how many.
        noun: what is counted, in the singular.
        plural: what it is called when there are none or several; the noun with an s if left out.
    """
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
