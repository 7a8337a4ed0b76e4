"""Sources, docs and help use plain technical English: no private words, and no sentence too long to read."""

import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
ENGLISH_PAGES = [page for page in PAGES if page.name != "README.zh-CN.md"]
MAX_WORDS = 40

PRIVATE_WORDS = {
    r"mend(s|ed|ing)?": "fix",
    r"who(ever|mever)": "the process, caller or user",
    r"nobody|somebody|everybody": "the process, caller or user",
    r"strangers?": "another user, an unknown process",
    r"anew": "again",
    r"dealt": "partitioned",
    r"parted": "split",
    r"film(s|ed|ing)?": "video, record",
    r"pictures?": "plot, image",
    r"left out": "skipped",
    r"beside": "next to",
    r"so many": "N",
    r"bad numbers": "non-finite values",
    r"brought in|bring(s|ing)? in": "imported",
    r"taken away|take(s|n)? away": "exported, removed",
    r"made[- ]up": "synthetic",
    r"computed market": "simulated market",
    r"past selves": "opponent pool",
    r"in words": "as a message",
    r"go(es)? on|went on|going on|gone on": "continue, resume",
    r"hears?|heard": "receive",
    r"speaks?|spoke|spoken": "report",
    r"waking|wakes?|woke": "start",
    r"(leave|left|send|sent) word": "report",
    r"strikes?|struck": "inject a fault",
    r"vitals": "resource usage",
    r"the house|house rules": "architecture rules",
    r"of late": "recently",
    r"lest": "so that ... does not",
    r"thereby|whereupon|henceforth|hitherto|thereof|therein": "a shorter sentence",
}
PATTERN = re.compile("|".join(rf"\b(?:{word})\b" for word in PRIVATE_WORDS), re.IGNORECASE)


def prose(source: str) -> str:
    """Return the comments and strings of a source file."""
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)}
    return "\n".join(
        token.string for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type in kinds
    )


def page_text(page: str) -> str:
    """Return a page without code blocks, inline code, link targets and HTML."""
    page = re.sub(r"^(```|~~~).*?^\1", "", page, flags=re.DOTALL | re.MULTILINE)
    page = re.sub(r"\]\([^)]*\)", "]", page)
    return re.sub(r"<[^>]+>", "", re.sub(r"`[^`\n]*`", "x", page))


def long_sentences(page: str) -> list[str]:
    """Return sentences with more words than a reader follows. Table rows, list items and headings end a sentence."""
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*|#>]|\d+\.)\s*)", page_text(page))
    sentences = (s for block in blocks if not block.lstrip().startswith("|") for s in re.split(r"(?<=[.!?])\s+", block))
    return [" ".join(s.split()) for s in sentences if len(s.split()) > MAX_WORDS]


def private_words(text: str) -> list[str]:
    return [match.group() for match in PATTERN.finditer(text)]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_source_has_no_private_words(path):
    assert private_words(prose(path.read_text())) == []


@pytest.mark.parametrize("page", ENGLISH_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_has_no_private_words_or_long_sentences(page):
    text = page.read_text()
    assert private_words(page_text(text)) == []
    assert long_sentences(text) == []


def test_scanner_finds_private_words_and_long_sentences():
    assert private_words(prose('x = f"nobody {y} goes on"  # mended')) == ["nobody", "goes on", "mended"]
    assert private_words("amend the recommended stranger") == ["stranger"]
    assert long_sentences("word " * 41 + ".")
    assert not long_sentences("word " * 20 + ". " + "word " * 20 + ".")
