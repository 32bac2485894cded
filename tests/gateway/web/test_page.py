"""The page in a real browser: signed in by key, live, legible, usable without a mouse, and without complaints."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.resources import files
from typing import Any

import msgspec
import pytest

from gateway.keys import Role as KeyRole
from kvcache.wire import Role
from scheduler.controller.proposals import Proposal, Verdict
from tests.browser import Page, browser_page
from tests.gateway.conftest import Open, Stage
from tests.gateway.web.test_overview import peopled

axe = pytest.importorskip("axe_core_python", reason="axe-core-python brings axe-core; the test extra installs it")

SIGN_IN = """
document.getElementById('key').value = %s;
document.querySelector('#sign-in button').click();
"""
SMALLEST = """
Math.min(...[...document.querySelectorAll('#map svg text, #lengths svg text')].map(t => {
  const svg = t.closest('svg');
  return parseFloat(t.getAttribute('font-size')) * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
}))
"""
OVERLAPS = """
(() => {
  const boxes = [...document.querySelectorAll('#map svg text')].filter(t => t.textContent.trim())
    .map(t => [t.textContent, t.getBoundingClientRect()]);
  const found = [];
  boxes.forEach(([a, x], i) => boxes.slice(i + 1).forEach(([b, y]) => {
    const across = x.left < y.right - 1 && y.left < x.right - 1;
    if (across && x.top < y.bottom - 1 && y.top < x.bottom - 1) found.push([a, b]);
  }));
  return found;
})()
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with browser_page() as tab:
        yield tab


async def until(browser: Page, expression: str, within_s: float = 15.0) -> Any:
    """The first truthy value of an expression."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        found = await asyncio.to_thread(browser.ask, expression)
        if found:
            return found
        await asyncio.sleep(0.05)
    raise AssertionError(f"{expression} stayed false; the page says {await asyncio.to_thread(browser.ask, TEXT)}")


TEXT = "document.body.innerText"


async def opened(browser: Page, one: Stage, secret: str | None, width: int = 1280) -> None:
    await asyncio.to_thread(browser.open, "about:blank")  # what was open before asks a gateway that is gone
    browser.errors.clear()
    browser.requested.clear()
    browser.resize(width, 900)
    await asyncio.to_thread(browser.open, one.url + "/")
    await asyncio.to_thread(browser.ask, "sessionStorage.clear()")
    await asyncio.to_thread(browser.open, one.url + "/")
    if secret is not None:
        await until(browser, "!document.getElementById('entry').hidden")
        await asyncio.to_thread(browser.ask, SIGN_IN % json.dumps(secret))
        await until(browser, "!document.getElementById('figures').hidden")


def with_keys(one: Stage, role: KeyRole = KeyRole.ADMIN, clusters: frozenset[str] | None = None) -> str:
    if not len(one.gateway.keys):
        _, root = one.gateway.keys.create("root", KeyRole.ADMIN)
        one.client.headers["authorization"] = f"Bearer {root}"
    return one.gateway.keys.create("visitor", role, False, clusters)[1]


def proposal(number: int = 1) -> Proposal:
    return Proposal(
        number, time.monotonic(), ("node",), (1,), (2,), (1,), 4096.0, 3.0, 4.2, 1.4, 1.2, 2.5, 300.0, 900,
        "decode", False, "decode nodes are idle while prompts wait", Verdict.OPEN,
    )  # fmt: skip


async def test_a_wrong_key_is_told_and_a_right_one_shows_the_figures(browser: Page, stage: Open) -> None:
    one = await peopled(stage)
    secret = with_keys(one)
    await opened(browser, one, None)
    await until(browser, "document.activeElement.id === 'key'")
    await asyncio.to_thread(browser.ask, SIGN_IN % json.dumps("prfaas-wrong"))
    await until(browser, "document.getElementById('entry-error').textContent.includes('key')")
    assert await asyncio.to_thread(browser.ask, "document.getElementById('figures').hidden")
    await asyncio.to_thread(browser.ask, SIGN_IN % json.dumps(secret))
    await until(browser, "!document.getElementById('figures').hidden")
    assert "visitor (admin)" in await asyncio.to_thread(browser.ask, TEXT)
    assert all(each.startswith((one.url, "data:")) for each in browser.requested)


async def test_figures_change_by_themselves(browser: Page, stage: Open) -> None:
    one = await peopled(stage)
    await opened(browser, one, with_keys(one))
    rows = "document.querySelectorAll('#requests tbody tr').length"
    await until(browser, f"{rows} === 3")
    await one.complete(words=120)
    await one.node("d2", Role.DECODE)
    await until(browser, f"{rows} === 4 && document.getElementById('nodes').textContent.includes('d2')")
    assert browser.errors == []


async def test_a_proposal_is_approved_by_who_may(browser: Page, stage: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    one = await peopled(stage)
    done: list[tuple[int, str]] = []
    loop = one.gateway.rebalancing
    loop.controller.proposals.put(proposal())
    monkeypatch.setattr(loop, "approve", lambda number, who: done.append((number, who)) or {"number": number})
    await opened(browser, one, with_keys(one, KeyRole.PLANNER))
    await until(browser, "document.getElementById('proposal').textContent.includes('Proposal 1: open')")
    assert not await asyncio.to_thread(browser.ask, "!!document.querySelector('#proposal button')")
    await opened(browser, one, with_keys(one, KeyRole.OPERATOR))
    await until(browser, "document.querySelector('#proposal button')?.textContent === 'Approve'")
    await asyncio.to_thread(browser.ask, "document.querySelector('#proposal button').click()")
    await until(browser, "document.getElementById('proposal-said').textContent === 'Proposal 1: approved.'")
    assert done == [(1, "visitor")]
    assert browser.errors == []


async def test_what_others_say_is_text_and_what_has_no_bound_or_end_is_shown(browser: Page, stage: Open) -> None:
    one = await peopled(stage)
    one.register("prefill-europe-west-4." * 2)
    said = partial(one.nodes[0].heartbeat, accepting=False, detail="<img src=x onerror=alert(1)>")
    one.nodes[0].heartbeat = said  # type: ignore[method-assign]
    strange = msgspec.structs.replace(proposal(), lambda_now=0.0, gain=math.inf, reason="<b>nothing is served</b>")
    one.gateway.rebalancing.controller.proposals.put(strange)
    await opened(browser, one, with_keys(one))
    await until(browser, "document.getElementById('proposal').textContent.includes('gain without bound')")
    await until(browser, "document.getElementById('nodes').textContent.includes('<img src=x onerror=alert(1)>')")
    assert "<b>nothing is served</b>" in await asyncio.to_thread(browser.ask, TEXT)
    assert not await asyncio.to_thread(browser.ask, "!!document.querySelector('main img, #proposal b')")
    assert await asyncio.to_thread(browser.ask, OVERLAPS) == []
    assert browser.errors == []


async def test_a_request_is_explained(browser: Page, stage: Open) -> None:
    one = await peopled(stage)
    await opened(browser, one, with_keys(one))
    await until(browser, "!!document.querySelector('#requests button')")
    await asyncio.to_thread(browser.ask, "document.querySelector('#requests button').click()")
    told = await until(browser, "document.getElementById('explained').innerText")
    assert "Route: remote:" in told
    assert "The ways that there were" in told
    await asyncio.to_thread(
        browser.ask,
        "document.getElementById('request-id').value = '<img src=x>';"
        "document.querySelector('#explain-form button').click()",
    )
    await until(browser, "document.getElementById('explained').innerText.includes('no decision is kept')")
    assert not await asyncio.to_thread(browser.ask, "!!document.querySelector('#explained img')")


async def test_an_operator_of_one_cluster_sees_that_one(browser: Page, stage: Open) -> None:
    one = await peopled(stage)
    await opened(browser, one, with_keys(one, KeyRole.OPERATOR, frozenset({"east"})))
    text = await asyncio.to_thread(browser.ask, TEXT)
    assert "p-east" in text
    assert "west" not in text
    assert "Rebalancing report" not in text
    assert browser.errors == []


async def test_a_report_is_made(browser: Page, stage: Open) -> None:
    one = await peopled(stage)
    await opened(browser, one, with_keys(one, KeyRole.PLANNER))
    await until(browser, "!document.querySelector('[data-needs=reports]').hidden")
    await asyncio.to_thread(browser.ask, "document.querySelector('#report-form button').click()")
    await until(browser, "!!document.querySelector('#report a[download]')")
    assert browser.errors == []


@pytest.mark.parametrize("width", [1280, 360])
async def test_it_is_legible_accessible_and_without_complaints(browser: Page, stage: Open, width: int) -> None:
    one = await peopled(stage)
    one.gateway.rebalancing.controller.proposals.put(proposal())
    await opened(browser, one, with_keys(one), width)
    await until(browser, "!!document.querySelector('#requests button') && !!document.querySelector('#lengths svg')")
    await asyncio.to_thread(browser.ask, "document.querySelector('#requests button').click()")
    await until(browser, "document.getElementById('explained').innerText")
    room, wide = await asyncio.to_thread(
        browser.ask, "[document.documentElement.clientWidth, document.documentElement.scrollWidth]"
    )
    assert wide <= room, "the page is wider than its window"
    assert await asyncio.to_thread(browser.ask, OVERLAPS) == []
    assert await asyncio.to_thread(browser.ask, SMALLEST) >= 10
    await asyncio.to_thread(browser.ask, (files("axe_core_python") / "axe.min.js").read_text())
    for dark in (False, True):
        browser.resize(width, 900, dark)
        found = await asyncio.to_thread(browser.ask, "axe.run().then(r => r.violations)")
        serious = [
            (each["id"], each["impact"], [node["html"][:120] for node in each["nodes"]])
            for each in found
            if each["impact"] in ("serious", "critical")
        ]
        assert serious == []
    assert browser.errors == []


async def test_it_is_used_by_keyboard_alone(browser: Page, stage: Open) -> None:
    one = await peopled(stage)
    await opened(browser, one, with_keys(one))
    await until(browser, "!!document.querySelector('#requests button')")
    order = await asyncio.to_thread(
        browser.ask,
        "[...document.querySelectorAll('a[href],button,input,select,[tabindex=\"0\"]')]"
        ".filter(e => e.offsetParent !== null && !e.disabled).map(e => e.id || e.textContent)",
    )
    assert order[0] == "Skip to the figures"
    assert {"leave", "since", "request-id"} <= set(order)
    focused: Callable[[str], str] = lambda id: f"(document.getElementById('{id}').focus(), document.activeElement.id)"  # noqa: E731
    for id in ("leave", "since", "request-id"):
        assert await asyncio.to_thread(browser.ask, focused(id)) == id
    await asyncio.to_thread(browser.ask, "document.getElementById('leave').click()")
    await until(browser, "!document.getElementById('entry').hidden")
    assert await asyncio.to_thread(browser.ask, "sessionStorage.length") == 0
