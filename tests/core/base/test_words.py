from mainstay_core.base.words import (
    MAX_QUOTED,
    count,
    printable,
    printable_lines,
    quote,
    show_bytes,
)


def test_one_of_a_thing_is_singular() -> None:
    assert [count(n, "replica") for n in (0, 1, 2)] == ["0 replicas", "1 replica", "2 replicas"]
    assert [count(n, "loss", "losses") for n in (1, 2)] == ["1 loss", "2 losses"]


def test_a_quoted_value_is_short_whatever_it_is() -> None:
    assert quote("two\n") == r"'two\n'"
    assert quote(3) == "3"
    assert quote(None) == "None"
    assert quote(-(10**5000)) == "an integer of 16610 bits"
    assert quote(["x"] * 1000) == "a value of type list"
    assert len(quote("x" * 1000)) == MAX_QUOTED


def test_bytes_are_shown_in_units_of_1024() -> None:
    assert [show_bytes(n) for n in (0, 1023, 1536, 3 << 30)] == [
        "0 B", "1023 B", "1.5 KiB", "3.0 GiB",
    ]  # fmt: skip


def test_printable_text_is_whole_and_moves_no_cursor() -> None:
    assert printable("stage 1 überall: 0.25") == "stage 1 überall: 0.25"
    assert printable("ü\x1b[2J\x1b]0;own\x07\r\n\u202e") == r"ü\x1b[2J\x1b]0;own\x07\r\n\u202e"
    assert len(printable("a" * 9000)) == 9000


def test_lines_of_printable_text_stay_lines() -> None:
    assert printable_lines("a\n\tb\r\n\x1bc") == "a\n        b\\r\n\\x1bc"
    assert printable_lines("a\u2028b\x0bc") == r"a\u2028b\x0bc"
