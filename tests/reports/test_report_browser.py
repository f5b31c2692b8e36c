"""The pages in a real browser: no error, no request, charts drawn, headline and banner readable."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bqsgd._src.reports.page import write_comparison, write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on this machine: install Debian's `chromium` to test the pages in a browser"
)
SHOTS = os.environ.get("BQSGD_SCREENSHOTS")
"""A folder to keep screenshots of the live page in."""
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        instance = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=QUIET)
        yield instance
        instance.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open a file; at the end assert that the page logged nothing and asked for nothing but itself."""
    troubles: list[str] = []
    contexts = []

    def go(path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: troubles.append(f"console {message.type}: {message.text}"))
        page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
        page.on(
            "request",
            lambda request: (
                None if request.url in (path.as_uri(), "data:,") else troubles.append(f"request: {request.url}")
            ),
        )
        page.goto(path.as_uri())
        return page

    yield go
    for context in contexts:
        context.close()
    assert troubles == []


def drawn(page: Any) -> dict[str, dict[str, float]]:
    """Box of every chart, and the extent of what is drawn in it."""
    boxes: dict[str, dict[str, float]] = page.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll("figure.chart")].map(figure => {
            const box = figure.querySelector(".plot").getBoundingClientRect();
            const lines = [...figure.querySelectorAll("path.line")].map(path => path.getBoundingClientRect());
            return [figure.id, {width: box.width, height: box.height, lines: lines.length,
                least: Math.min(...lines.map(line => line.width)) / box.width}];
        }))"""
    )
    return boxes


@pytest.mark.parametrize("seeded", [False, True])
def test_the_report_loads_cleanly_and_shows_its_charts(synthetic_run, visit, seeded):
    page = visit(write_report(synthetic_run(seeded=seeded)))
    charts = drawn(page)
    assert list(charts) == ["accuracy", "loss", "epsilon", "bytes", "stages", "noise"]
    for key, box in charts.items():
        assert box["width"] > 300, key
        assert box["height"] > 150, key
        assert box["least"] > 0.9, key  # every curve spans its plot
    assert [charts[key]["lines"] for key in charts] == [1, 1, 1, 2, 7, 3]
    words = page.inner_text("body")
    assert "96.82 %" in page.inner_text(".tile .figure")
    assert "ε = 2.913" in words
    assert "at δ = 1e-5" in words
    for term in ("add/remove one", "sample", "server sees each client's messages", "poisson", "proven upper bound"):
        assert term in page.inner_text("#guarantee")
    assert "nominal" not in words.lower()  # the paper's figures have no place beside a proven epsilon
    assert "3.99× fewer" in page.inner_text("#traffic")
    assert "budget spent" in page.inner_text("#clients")
    assert page.locator("#seeded").count() == seeded
    if seeded:
        assert page.locator("#seeded").is_visible()
        assert "seeded noise: no privacy claim" in page.inner_text("#seeded")
        assert "Privacy guarantee" not in words


def test_a_chart_can_be_read_off_by_pointer_and_by_keyboard(synthetic_run, visit):
    page = visit(write_report(synthetic_run()))
    plot = page.locator("#epsilon .plot")
    plot.hover()
    tip = page.inner_text("#epsilon .tip")
    assert "proven epsilon" in tip
    assert "nominal" not in tip
    assert "round 2" in tip  # the middle of 400 rounds
    page.mouse.move(0, 0)
    assert page.locator("#epsilon .tip").count() == 0
    page.locator("#accuracy .plot").focus()
    page.keyboard.press("ArrowLeft")
    assert "round 390" in page.inner_text("#accuracy .tip")


@pytest.mark.parametrize("dark", [False, True])
def test_the_report_fits_a_phone(synthetic_run, visit, dark):
    page = visit(write_report(synthetic_run(seeded=True)), width=375, height=800, dark=dark)
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
    assert all(box["width"] > 220 for box in drawn(page).values())
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(16, 18, 22)") == dark


def test_the_comparison_loads_cleanly_and_overlays_the_runs(synthetic_run, visit, tmp_path):
    folders = [
        synthetic_run("eight-bits"),
        synthetic_run("ten-bits", levels=13, trials=997, shape=3),
        synthetic_run("seeded", shape=5, seeded=True),
    ]
    page = visit(write_comparison(folders, tmp_path / "comparison.html"))
    charts = drawn(page)
    assert {key: box["lines"] for key, box in charts.items()} == dict.fromkeys(charts, 3)
    assert len(charts) == 6
    assert page.locator("#runs tbody tr").count() == 3
    assert "Of seeded." in page.inner_text("#seeded")


def test_a_hostile_folder_runs_nothing_in_the_browser(synthetic_run, visit):
    attack = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    folder = synthetic_run("<b>run")
    (folder / "config.toml").write_text(f"model = '''{attack}'''\n")
    page = visit(write_report(folder))
    assert "owned" not in page.title()
    assert attack in page.inner_text("body")
    assert page.locator("img").count() == 0


@pytest.mark.parametrize("width", [1280, pytest.param(375, marks=pytest.mark.slow)])
def test_the_live_page_follows_a_run_to_its_end(synthetic_run, browser, width):
    from bqsgd._src.reports.live import watching

    folder, ended = synthetic_run(rounds=120, finished=False), synthetic_run("ended", rounds=120)
    lines = (folder / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "rounds.jsonl").unlink()
    context = browser.new_context(viewport={"width": width, "height": 900})
    troubles: list[str] = []
    with watching(folder, port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            page = context.new_page()
            page.on("console", lambda message: troubles.append(f"console {message.type}: {message.text}"))
            page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
            page.goto(f"http://127.0.0.1:{server.server_port}/")
            assert "has not written a round yet" in page.inner_text("body")
            (folder / "rounds.jsonl").write_bytes(b"".join(lines[:50]) + lines[50][:40])
            page.get_by_text("50 of 120 rounds").wait_for(timeout=60_000)
            assert "5 of 5 clients answered" in page.inner_text(".banner >> nth=0")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert drawn(page)["accuracy"]["lines"] == 1
            if SHOTS:
                page.screenshot(path=f"{SHOTS}/live-{width}.png", full_page=True)
            (folder / "rounds.jsonl").write_bytes(b"".join(lines))
            shutil.copy(ended / "summary.json", folder)
            page.locator("#guarantee", has_text="ε = 2.913").wait_for(timeout=60_000)
            assert "Running" not in page.inner_text("body")
        finally:
            context.close()
            server.shutdown()
            thread.join()
    assert troubles == []
