"""Links, anchors and paths in README, CONTRIBUTING, CHANGELOG and docs are valid."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from readme_commands import ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
_LINK = re.compile(r"!?\[[^\]]*\]\(([^()\s]+)\)")


def without_code(text: str) -> str:
    """The text without its code blocks and inline code."""
    blocks = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "", blocks)


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings. The second of two equal headings ends in -1."""
    blocks = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    seen: Counter[str] = Counter()
    names = set()
    for heading in re.findall(r"^#+ +(.+?) *$", blocks, re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        names.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return names


def why_broken(page: Path, link: str) -> str:
    """The reason why a relative link is broken; otherwise empty."""
    if re.match(r"[a-z]+:", link):
        return ""
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists():
        return f"{link}: no such file"
    if anchor and anchor not in anchors(target):
        return f"{link}: no such heading"
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    links = _LINK.findall(without_code(page.read_text()))
    assert [why for link in links if (why := why_broken(page, link))] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_named_files_and_folders_are_there(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    first = "pipeline|passes|plugins|models|tests|benchmarks|docs"
    named = re.findall(rf"`((?:{first})/[\w./-]*)`", text)
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    page, other = tmp_path / "a.md", tmp_path / "b.md"
    page.write_text("# One `x`, two\n\n## Again\n\n## Again\n")
    other.write_text("# B\n")
    assert why_broken(other, "a.md#one-x-two") == why_broken(other, "a.md#again-1") == ""
    assert why_broken(page, "#again") == why_broken(page, "https://example.org/#x") == ""
    assert "no such heading" in why_broken(other, "a.md#two")
    assert "no such file" in why_broken(page, "c.md")
