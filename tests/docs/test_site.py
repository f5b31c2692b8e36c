"""The site: built with warnings as errors, complete, and nothing in it is fetched from elsewhere when it is read."""

from __future__ import annotations

import functools
import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from filelock import FileLock

pytest.importorskip("mkdocs", reason="needs the extra `docs`")

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src"}
"""Elements whose address a browser fetches by itself; of `link` it depends on the relation."""
LINKS_NOT_FETCHED = {"prev", "next", "canonical"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; one build for all workers of a test run."""
    shared = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        shared = shared.parent
    folder = shared / "site"
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            done = subprocess.run(
                [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
                cwd=ROOT,
                env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Addresses(HTMLParser):
    """The addresses of a page: those that a browser fetches, those that a reader may follow, and its anchors."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.followed: list[str] = []
        self.anchors: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value is not None}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag in FETCHED and FETCHED[tag] in values:
            self.fetched.append(values[FETCHED[tag]])
        if tag == "link" and values.get("rel") not in LINKS_NOT_FETCHED:
            self.fetched.append(values["href"])
        if tag == "a" and "href" in values:
            self.followed.append(values["href"])


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Addresses]:
    return {
        path: Addresses(path.read_text(encoding="utf-8")) for path in site.rglob("*.html") if path.name != "404.html"
    }


def test_nothing_is_fetched_from_elsewhere(site: Path, pages: dict[Path, Addresses]) -> None:
    fetched = {address for page in pages.values() for address in page.fetched}
    assert any(address.endswith(".js") for address in fetched)
    assert any(address.endswith(".css") for address in fetched)
    assert {address for address in fetched if urlsplit(address).scheme or address.startswith("//")} == set()
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        assert re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", text) == [], sheet.name


def test_every_link_leads_somewhere(site: Path, pages: dict[Path, Addresses]) -> None:
    broken = []
    for path, page in pages.items():
        for address in (*page.fetched, *page.followed):
            parts = urlsplit(address)
            if parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            missing_anchor = parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors
            if not target.is_file() or missing_anchor:
                broken.append(f"{path.relative_to(site)}: {address}")
    assert broken == []


def test_every_document_is_a_page(site: Path) -> None:
    documents = [path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")]
    expected = [*documents, Path("index.html"), Path("contributing.html"), Path("changelog.html")]
    assert [path for path in expected if not (site / path).is_file()] == []


def test_examples_of_docstrings_are_shown_as_code(site: Path) -> None:
    """A `>>>` outside a fence would be a quotation in a quotation in a quotation."""
    quoted = [path for path in (site / "reference").glob("*.html") if "<blockquote>" in path.read_text("utf-8")]
    assert quoted == []
    assert 'class="gp">&gt;&gt;&gt;' in (site / "reference" / "codec.html").read_text(encoding="utf-8")


def test_every_public_name_is_in_the_reference(site: Path, pages: dict[Path, Addresses]) -> None:
    import bqsgd

    anchors = {anchor for path, page in pages.items() if path.parent == site / "reference" for anchor in page.anchors}
    assert {f"bqsgd.{name}" for name in bqsgd.__all__} - anchors == set()


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    """The site on a port of this machine, as a reader's server has it."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: install Debian's `chromium`")
def test_a_browser_asks_for_nothing_else_and_finds_what_is_searched(address: str) -> None:
    from playwright.sync_api import sync_playwright

    troubles: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        context = browser.new_context(viewport={"width": 400, "height": 900})
        context.on(
            "request", lambda sent: None if sent.url.startswith((address, "data:")) else troubles.append(sent.url)
        )
        page = context.new_page()
        page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
        for name in ("index.html", "frontier.html", "reference/index.html"):
            page.goto(address + name)
            assert page.evaluate("document.documentElement.scrollWidth") <= 400, f"{name} is wider than the screen"
        page.goto(address + "index.html?q=coarsening")
        page.wait_for_selector(".md-search-result__item", state="attached")
        browser.close()
    assert troubles == []
