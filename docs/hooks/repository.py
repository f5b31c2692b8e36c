"""Pages of the site that lie outside docs/, and links to other files of the repository.

The documents are read in the repository as well as on the site, so a link is written as the repository has it
(`../examples/own_model.py`, `docs/training.md`). Here README.md becomes the home page, the other files of `PAGES`
become pages, and every other file that a page links to is copied into the site under `repository/`: no link leads
away from the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "CODE_OF_CONDUCT.md": "code_of_conduct.md",
}
"""Files outside docs/ that are pages, and what they are called there."""
LINK = re.compile(r"(?<=\]\()(?P<target>[^)#:\s]+)(?P<anchor>#[^)\s]*)?(?=\))")


def source_of(uri: str) -> str:
    """Where the page `uri` of the site lies in the repository."""
    outside = {page: name for name, page in PAGES.items()}
    return outside.get(uri, f"docs/{uri}")


def uri_of(source: str) -> str:
    """What the file `source` of the repository is called on the site."""
    if source.startswith("docs/"):
        return source.removeprefix("docs/")
    return PAGES.get(source, f"repository/{source}")


def linked(markdown: str, uri: str) -> list[str]:
    """Files of the repository that the page links to."""
    folder = posixpath.dirname(source_of(uri))
    return [posixpath.normpath(posixpath.join(folder, match["target"])) for match in LINK.finditer(markdown)]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside docs/ and the files that pages link to."""
    for name, uri in PAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / name)))
    for page in files.documentation_pages():
        for source in linked(page.content_string, page.src_uri):
            uri = uri_of(source)
            if uri.startswith("repository/") and files.get_file_from_path(uri) is None and (ROOT / source).is_file():
                files.append(File.generated(config, uri, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages and files of the site."""
    uri = page.file.src_uri
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]  # it would be a column with one entry
    elif 'class="side-by-side"' in markdown:
        page.meta["hide"] = ["toc"]  # two programs need its room
    sources = iter(linked(markdown, uri))
    folder = posixpath.dirname(uri) or "."
    return LINK.sub(
        lambda match: posixpath.relpath(uri_of(next(sources)), folder) + (match["anchor"] or ""),
        markdown,
    )
