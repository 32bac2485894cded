"""The report in a real browser: its plots are there and legible, it asks for nothing, and nothing goes wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.report.page import page
from scheduler.report.report import make_report
from tests.browser import Page, browser_page
from tests.scheduler.report.windows import SINCE, fleet, inputs, served

PLOTS = {
    "Prompt lengths and the threshold",
    "Stage capacity against load",
    "Time to first token over time",
    "Egress of east",
    "Capacity over threshold and split",
}

SHOWN = """
(() => [...document.querySelectorAll('svg.plot')].filter(svg => svg.getBoundingClientRect().width > 0).map(svg => {
  const box = r => [r.left, r.top, r.right, r.bottom];
  return {
    title: svg.querySelector('title').textContent,
    described: svg.querySelector('desc').textContent.length,
    role: svg.getAttribute('role'),
    box: box(svg.getBoundingClientRect()),
    marks: [...svg.querySelectorAll('rect,path,circle')].filter(m => m.getBoundingClientRect().width > 1).length,
    texts: [...svg.querySelectorAll('text')].map(t => {
      const style = getComputedStyle(t);
      return {words: t.textContent, box: box(t.getBoundingClientRect()), size: parseFloat(style.fontSize),
              scale: svg.getBoundingClientRect().width / svg.viewBox.baseVal.width, fill: style.fill};
    }),
  };
}))()
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with browser_page() as tab:
        yield tab


def reports() -> dict[str, str]:
    """Traffic that asks for another split with answers missing, and traffic that is well served."""
    requests = [
        msgspec.structs.replace(one, ttft_s=None, finished=False) if 900 < one.at - SINCE < 940 else one
        for one in served(threshold=9000.0)
    ]
    return {
        "change": page(make_report(inputs(requests, fleet(5, threshold=9000.0))), "a model with a rather long name"),
        "keep": page(make_report(inputs(served(rate=40.0))), "m"),
    }


@pytest.mark.parametrize("width", [1280, 768, 360])
@pytest.mark.parametrize("name", ["change", "keep"])
def test_every_plot_is_seen_and_legible(browser: Page, tmp_path: Path, name: str, width: int) -> None:
    file = tmp_path / f"{name}.html"
    file.write_text(reports()[name])
    browser.errors.clear()
    browser.requested.clear()
    for dark in (False, True):
        browser.resize(width, 900, dark)
        browser.open(file.as_uri())
        shown: list[dict[str, Any]] = browser.ask(SHOWN)
        assert {one["title"] for one in shown} == PLOTS
        room = browser.ask("document.documentElement.clientWidth")
        assert browser.ask("document.documentElement.scrollWidth") <= room, "the page is wider than its window"
        paper = browser.ask("getComputedStyle(document.body).backgroundColor")
        for one in shown:
            assert (one["role"], one["described"] > 10) == ("img", True)
            assert one["marks"] >= 2, f"{one['title']} shows nothing"
            assert one["box"][0] >= 0
            assert one["box"][2] <= room
            for label in one["texts"]:
                assert label["size"] * label["scale"] >= 11, label
                assert label["box"][0] >= 0, label
                assert label["box"][2] <= room, label
                assert contrast(label["fill"], paper) >= 4.5, (label, paper)
            assert overlapping(one["texts"]) == [], one["title"]
    assert browser.errors == []
    assert browser.requested == [file.as_uri()] * 2, "the page asked for something"


def test_the_tables_hold_what_the_plots_show(browser: Page, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(reports()["change"])
    browser.resize(360, 900)
    browser.open(file.as_uri())
    opened = browser.ask("document.querySelectorAll('details').forEach(d => d.open = true) || document.links.length")
    assert opened == 0
    assert browser.ask("document.querySelectorAll('details').length") == len(PLOTS)
    assert browser.ask("[...document.querySelectorAll('details')].every(d => d.querySelector('table tbody tr'))")
    width = browser.ask("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert width == 0, "an opened table widens the page instead of scrolling"
    scrolls = browser.ask("[...document.querySelectorAll('.scroll')].every(d => d.tabIndex === 0 && d.ariaLabel)")
    assert scrolls, "what scrolls cannot be reached by keyboard"


def test_the_measure_of_overlap_sees_one(browser: Page, tmp_path: Path) -> None:
    report = make_report(replace(inputs(), proposals=()))
    labels = '<text x="100" y="100">one label</text><text x="110" y="102">on another</text>'
    text = page(report, "m").replace("</desc>", f"</desc>{labels}")
    file = tmp_path / "broken.html"
    file.write_text(text)
    browser.resize(1280, 900)
    browser.open(file.as_uri())
    assert all(overlapping(one["texts"]) for one in browser.ask(SHOWN))


def overlapping(texts: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Pairs of labels whose boxes share more than a hair; line boxes are taller than what is written in them."""
    found = []
    for i, one in enumerate(texts):
        for other in texts[i + 1 :]:
            a, b = one["box"], other["box"]
            across = min(a[2], b[2]) - max(a[0], b[0])
            down = min(a[3], b[3]) - max(a[1], b[1])
            if across > 1 and down > 4:
                found.append((one["words"], other["words"]))
    return found


def contrast(first: str, second: str) -> float:
    """WCAG's ratio of two ``rgb(...)`` colours."""

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in colour[colour.index("(") + 1 : colour.index(")")].split(",")[:3]]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)
