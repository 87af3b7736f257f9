"""The docs are a site: every page is in its navigation, no link or anchor is broken."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from readme_commands import ROOT

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("material") is None, reason="mkdocs-material is not installed"
)


def site(config: Path, out: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    return subprocess.run(
        [*words, "--config-file", str(config), "--site-dir", str(out)],
        capture_output=True, text=True, cwd=ROOT, check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip


def small_site(folder: Path, start: str) -> Path:
    """A site with the settings of the real one, and this start page. Returns its folder `guide`."""
    docs = folder / "docs"
    (docs / "guide").mkdir(parents=True)
    (docs / "index.md").write_text(start)
    shutil.copy(ROOT / "docs" / "notebook_links.py", docs)
    config = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[0]
    (folder / "mkdocs.yml").write_text(config)
    return docs / "guide"


def test_the_site_is_whole(tmp_path: Path) -> None:
    done = site(ROOT / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 0, done.stderr + done.stdout
    pages = [p for p in (ROOT / "docs").rglob("*") if p.suffix in (".md", ".ipynb")]
    assert len(list((tmp_path / "site").rglob("index.html"))) == len(pages)
    index = json.loads((tmp_path / "site" / "search" / "search_index.json").read_text())
    found = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert len(found) == len(pages)


def test_a_notebook_links_to_pages_of_the_site(tmp_path: Path) -> None:
    guide = small_site(tmp_path, "# Start")

    def built(link: str) -> subprocess.CompletedProcess[str]:
        cell = nbformat.v4.new_markdown_cell(f"[a page]({link})")
        nbformat.write(nbformat.v4.new_notebook(cells=[cell]), guide / "one.ipynb")
        return site(tmp_path / "mkdocs.yml", tmp_path / "site")

    good = built("../index.md")
    assert good.returncode == 0, good.stderr
    page = (tmp_path / "site" / "guide" / "one" / "index.html").read_text()
    assert 'href="../../"' in page and "index.md" not in page
    bad = built("../missing.md")
    assert bad.returncode != 0 and "missing.md" in bad.stdout + bad.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[a](missing.md)", "missing.md"),
        ("[a](guide/own-model.md#no-such-heading)", "no-such-heading"),
    ],
)
def test_a_broken_link_is_an_error(tmp_path: Path, text: str, said: str) -> None:
    (small_site(tmp_path, text) / "own-model.md").write_text("# A page")
    done = site(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode != 0 and said in done.stdout + done.stderr
