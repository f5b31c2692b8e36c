"""Every measured section of every page is what its JSON says, and every section stands on one page."""

import pytest

from experiments import pages

PAGES = [page for page in sorted(pages.DOCS.glob("*.md")) if pages.sections_on(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_page_holds_what_was_measured(page):
    text = page.read_text(encoding="utf-8")
    assert pages.with_sections(text) == text


def test_every_section_stands_on_one_page():
    assert sorted(name for page in PAGES for name in pages.sections_on(page)) == sorted(pages._SECTIONS)


def test_a_changed_figure_is_seen():
    page = next(page for page in PAGES if "table2" in pages.sections_on(page))
    text = page.read_text(encoding="utf-8")
    assert pages.with_sections(text.replace("MNIST", "mnist")) != text.replace("MNIST", "mnist")


def test_a_section_without_results_is_empty(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "results_of", lambda name: tmp_path / name)
    text = "before\n<!-- measured: table1 -->\nold\n<!-- end of measured -->\nafter\n"
    assert pages.with_sections(text) == text.replace("old\n", "")
