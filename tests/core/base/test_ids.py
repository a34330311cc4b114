import pytest

from mainstay_core.base.ids import QuorumId


def test_a_quorum_is_read_as_it_is_written() -> None:
    for quorum in (QuorumId(id=7, nonce="3f9a"), QuorumId(id=0, nonce="a-b")):
        assert QuorumId.parse(str(quorum)) == quorum
    assert QuorumId.parse("7-3f9a") == QuorumId(id=7, nonce="3f9a")


@pytest.mark.parametrize(
    "text", ["", "q", "q7", "q7-", "q-a", "qa-1", "q\N{SUPERSCRIPT TWO}-a", "q-7-a"]
)
def test_a_text_that_names_no_quorum_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="names no quorum"):
        QuorumId.parse(text)
