"""Words of sentences for people."""

from __future__ import annotations

MAX_QUOTED = 100
"""Characters of a value that an error quotes."""


def first_line(text: str) -> str:
    """Return the first line of a text that may have several, for a sentence."""
    return text.strip().partition("\n")[0]


def printable(text: str) -> str:
    """Return text of a peer as a terminal may show it, in one line and whole.

    What is no printable character is written as in a Python string: it moves no cursor.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def printable_lines(text: str) -> str:
    """Return text of peers in several lines as a terminal may show it; tabs become spaces."""
    return "\n".join(map(printable, text.expandtabs().split("\n")))


def count(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: ``1 replica``, ``2 replicas``.

    Args:
        number: how many.
        noun: what is counted, in the singular.
        plural: what it is called when there are none or several; the noun with an s if left out.
    """
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def quote(value: object) -> str:
    """Return a value of a peer or a user as it stands in an error: short, whatever it is."""
    if isinstance(value, int) and value.bit_length() > 128:
        # Python writes no number of more than 4300 digits.
        return f"an integer of {value.bit_length()} bits"
    if value is None or isinstance(value, str | int | float):
        return repr(value)[:MAX_QUOTED]
    return f"a value of type {type(value).__name__}"


def show_bytes(size: int) -> str:
    """Return a number of bytes for people, e.g. 1.5 MiB."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"
