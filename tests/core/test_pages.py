"""Pages and code refer to each other: every link and every cited section leads somewhere."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "tests").rglob("*/README.md")]
)
SOURCES = [
    path
    for folder in ("agent", "api", "benchmarks", "cli", "core", "operator", "tests")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path != Path(__file__).resolve()
]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([\w-]*))?\)")
CITATION = re.compile(
    r"\b(design|protocol)(?:\.md)?\)? (?:(rule|sections?) )?(\d+)(?:\.(\d+))?", re.IGNORECASE
)


def anchors_of(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {word.replace(" ", "-") for word in words}


def sections_of(name: str) -> set[str]:
    """Numbers that a text may cite of a page: sections, and items of numbered lists as 1.2."""
    found: set[str] = set()
    section = ""
    for line in (ROOT / "docs" / f"{name}.md").read_text().splitlines():
        if heading := re.match(r"## (\d+)\. ", line):
            section = heading[1]
            found.add(section)
        elif item := re.match(r"(\d+)\. ", line):
            found.add(f"{section}.{item[1]}")
    return found


def find_dead_citations(text: str) -> list[str]:
    dead = []
    for cited in CITATION.finditer(text):
        name, kind, number, item = cited[1].lower(), cited[2], cited[3], cited[4]
        wanted = f"1.{number}" if kind and kind.lower() == "rule" else number
        if item:
            wanted = f"{number}.{item}"
        if wanted not in sections_of(name):
            dead.append(cited[0])
    return dead


def test_every_link_of_a_page_leads_somewhere() -> None:
    dead = []
    for page in PAGES:
        for target, anchor in LINK.findall(page.read_text()):
            path = (page.parent / target) if target else page
            if not path.exists() or (anchor and anchor not in anchors_of(path)):
                dead.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")

    assert dead == []


def test_every_section_that_code_or_a_page_cites_exists() -> None:
    dead = {
        str(path.relative_to(ROOT)): found
        for path in [*SOURCES, *PAGES]
        if (found := find_dead_citations(path.read_text()))
    }

    assert dead == {}


def test_a_citation_of_a_section_that_is_no_more_is_found() -> None:
    assert find_dead_citations("(design 13.2), design rule 6, protocol section 13") == []
    assert find_dead_citations("design 13.99; design rule 7; protocol.md section 14") == [
        "design 13.99",
        "design rule 7",
        "protocol.md section 14",
    ]
