"""The live page, drawn by a browser from a real engine of three processes."""
from __future__ import annotations

import json
import struct
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.frontend.chromium import BINARY, Chromium

pytestmark = pytest.mark.skipif(BINARY is None, reason="chromium is not installed")

COLOURS = """(id => { const node = document.getElementById(id), c = node.getContext('2d');
  const data = new Uint32Array(c.getImageData(0, 0, node.width, node.height).data.buffer);
  return [...new Set(data)].map(v => '#' + [v & 255, v >> 8 & 255, v >> 16 & 255]
    .map(b => b.toString(16).padStart(2, '0')).join('')); })"""
CENTRE = """(() => { const step = steps.at(-3), left = edge() - width, box = document.getElementById('lanes')
  .getBoundingClientRect(); const t = (at(step, 'worker_prepared') + at(step, 'worker_done')) / 2;
  return [step.step, box.left + LEFT + (t - left) * (box.width - LEFT) / width, box.top + laneTop(2) + 10]; })()"""


@pytest.fixture
def load(engine: Any) -> Iterator[None]:
    """More sequences than there are seats (128), again and again until the test is done."""
    stopping = threading.Event()

    def ask(number: int) -> None:
        body = {"prompt": [1 + number] * 20, "n": 20, "max_tokens": 40, "ignore_eos": True, "temperature": 0}
        request = urllib.request.Request(f"{engine.server.url}/v1/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        while not stopping.is_set():
            with urllib.request.urlopen(request, timeout=60) as answer:
                answer.read()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    yield
    stopping.set()
    for thread in threads:
        thread.join(60)


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_the_page_draws_lanes_pool_queue_and_latency(engine: Any, load: None, tmp_path: Path, is_dark: bool) -> None:
    with Chromium(tmp_path / "profile", width=1400, height=1000, is_dark=is_dark) as page:
        page.open(f"{engine.server.url}/timeline")
        page.wait("steps.length > 20 && document.querySelectorAll('#queue tr').length > 1")
        page.wait("answer.processes.every(use => use.cpu !== undefined)")
        colours = {name: page.run(f"colors.{name}") for name in ("forward", "plan", "detokenize", "inuse", "lane")}
        for name, end in (("forward", "worker_done"), ("plan", "plan_end"), ("detokenize", "handled")):
            page.run(f"hold(true), setWidth(2e3), frozen = at(steps.at(-2), '{end}') + 100, drawLanes()")
            assert {colours[name], colours["lane"]} <= set(page.run(f"{COLOURS}('lanes')")), name
        assert colours["inuse"] in page.run(f"{COLOURS}('pool')")
        assert page.run("document.querySelectorAll('#tiles b').length") == 7
        page.wait("document.getElementById('queue').textContent.includes('seats are taken')")
        assert "waits for the scheduler" in page.run("document.getElementById('device').textContent")
        page.run("hold(true), setWidth(5e5), frozen = at(steps.at(-1), 'worker_done')")
        number, x, y = page.run(CENTRE)
        page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        page.wait("!document.getElementById('tip').hidden")
        tip = page.run("document.getElementById('tip').textContent")
        assert tip.startswith(f"Step {number:,}: ") and "decoded" in tip and "forward" in tip
        shot = tmp_path / "timeline.png"
        page.screenshot(shot)
        width, height = struct.unpack(">II", shot.read_bytes()[16:24])
        assert width == 1400 and height > 700
        background = page.run("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, background[4:-1].split(","))) < 200) == is_dark
        assert page.console == []


def test_the_chat_page_leads_to_the_timeline(engine: Any, tmp_path: Path) -> None:
    with Chromium(tmp_path) as page:
        page.open(engine.server.url)
        page.run("document.querySelector('a[href=timeline]').click()")
        page.wait("location.pathname === '/timeline' && document.getElementById('model')?.textContent === 'tiny'")
