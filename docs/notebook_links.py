"""A hook of mkdocs: links from a notebook to a page lead to that page of the site.

mkdocs turns the links of Markdown files into links of the site. mkdocs-jupyter leaves those of
notebooks as they are.
"""

from __future__ import annotations

import logging
import posixpath
import re
from typing import Any

log = logging.getLogger("mkdocs.hooks")


def on_page_content(html: str, page: Any, files: Any, **_: Any) -> str:
    """The page's HTML with its links. A link to a page that does not exist is a warning."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html

    def link(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), found[1]))
        file = files.get_file_from_path(path)
        if file is None:
            log.warning("%s links to %s, which does not exist", page.file.src_uri, found[1])
            return found[0]
        return f'href="{file.url_relative_to(page.file)}"'

    return re.sub(r'href="([\w./-]+\.(?:md|ipynb))"', link, html)
