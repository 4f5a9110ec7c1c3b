"""The pages in the browser: nothing from elsewhere, nothing of a model's text run, and a conversation that works."""
from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from frontend.openai.app import build_app
from frontend.openai.pages import FOLDER, policy
from ipc.config import FrontendSection
from tests.frontend.chromium import BINARY, Chromium
from tests.frontend.fake_llm import FakeLLM, answer_text, get
from tests.frontend.live_server import LiveServer

PAGES = ("index.html", "timeline.html", "docs.html")


@pytest.mark.parametrize("name", PAGES)
def test_a_page_takes_nothing_from_elsewhere_and_writes_no_html(name: str) -> None:
    html = (FOLDER / name).read_text()
    assert not re.search(r"https?://|//cdn|@import|<script [^>]*src|<link [^>]*href=\"(?!data:,)", html)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", html)
    assert not re.search(r"\son\w+=\"|style=\"", html)       # the policy would refuse them
    assert html.count("<script>") == html.count("<style>") == 1


def test_the_policy_allows_only_the_pages_own_script() -> None:
    app = build_app(FakeLLM(), section=FrontendSection(api_keys=("alice-key-1",)))
    for path, name in (("/", "index.html"), ("/timeline", "timeline.html"), ("/docs", "docs.html")):
        response = asyncio.run(get(app, path))
        assert response.status_code == 200 and response.headers["content-type"] == "text/html; charset=utf-8"
        assert response.headers["content-security-policy"] == policy((FOLDER / name).read_text())
        assert "unsafe" not in response.headers["content-security-policy"]


browser = pytest.mark.skipif(BINARY is None, reason="chromium is not installed")


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Chromium]:
    with Chromium(tmp_path) as page:
        yield page
        assert page.console == []


@browser
def test_a_conversation_in_the_browser(page: Chromium) -> None:
    llm = FakeLLM()
    llm.token_s = 0.02
    with LiveServer(llm) as server:
        page.open(server.url)
        page.wait("document.getElementById('model').textContent.includes('64 tokens')")
        for name, value in (("max_tokens", "6"), ("seed", "1"), ("temperature", "0.5"), ("system", "S")):
            page.run(f"(e => {{ e.value = '{value}'; e.dispatchEvent(new Event('input')) }})"
                     f"(document.getElementById('{name}'))")
        page.type("hi")
        page.wait("document.querySelector('.assistant .again')")
        assert page.run("document.querySelector('.assistant .body').textContent") == answer_text(1, 0, 6)
        foot = page.run("document.querySelector('.assistant .foot').textContent")
        assert "tok/s" in foot and "to first token" in foot and "6 tokens" in foot
        assert "2 of 9 prompt tokens cached" in foot and "stopped at the limit" in foot
        params = llm.calls[-1]["params"]
        assert (params.max_tokens, params.seed, params.temperature) == (6, 1, 0.5)
        page.type("more")
        page.wait("document.querySelectorAll('.assistant').length == 2 && document.querySelector('.again')")
        assert [message["content"] for message in llm.chats[-1][0]] == ["S", "hi", answer_text(1, 0, 6), "more"]
        page.run("document.querySelector('.again').click()")
        page.wait("document.querySelectorAll('.assistant').length == 2 && document.querySelector('.again')")
        assert llm.chats[-1][0] == llm.chats[-2][0]


@browser
def test_escape_stops_an_answer_and_keeps_its_text(page: Chromium) -> None:
    llm = FakeLLM()
    llm.max_model_len, llm.token_s = 100_000, 0.005
    with LiveServer(llm) as server:
        page.open(server.url)
        page.type("hi")
        page.wait("document.querySelector('.assistant .body').textContent.length > 5")
        page.key("Escape", 27)
        page.wait("document.querySelector('.assistant .foot').textContent.includes('stopped by you')")
        assert len(page.run("document.querySelector('.assistant .body').textContent")) > 5
        page.wait("!document.getElementById('send').hidden")
        for _ in range(100):
            if llm.num_aborted:
                break
            page.run("new Promise(done => setTimeout(done, 20))")
        assert llm.num_aborted == 1


@browser
def test_text_of_a_model_is_text(page: Chromium) -> None:
    llm = FakeLLM()
    llm.script = ["<img src=x onerror=\"document.title='run'\">", "\n```html\n<b>x</b>\n``", "`\nuse `a` <i>b</i>"]
    with LiveServer(llm) as server:
        page.open(server.url)
        page.run("document.getElementById('max_tokens').value = 3")
        page.type("hi")
        page.wait("document.querySelector('.again')")
        assert page.run("document.querySelector('.assistant pre').textContent") == "<b>x</b>"
        assert page.run("document.querySelector('.assistant p code').textContent") == "a"
        assert page.run("document.querySelectorAll('.assistant .body img, .assistant .body i').length") == 0
        assert page.run("document.title") == "Threefold chat"


@browser
def test_the_page_asks_for_a_key_when_the_server_does(tmp_path: Path) -> None:
    section = FrontendSection(api_keys=("alice-key-1",))
    with Chromium(tmp_path) as page, LiveServer(FakeLLM(), section) as server:
        page.open(server.url)
        page.wait("!document.getElementById('keyfield').hidden")
        page.wait("document.activeElement.id == 'key'")
        page.type("alice-key-1")
        page.wait("document.getElementById('model').textContent.includes('64 tokens')")
        page.run("document.getElementById('max_tokens').value = 3; document.getElementById('prompt').focus()")
        page.type("hi")
        page.wait("document.querySelector('.again')")
        assert len(page.run("document.querySelector('.assistant .body').textContent")) == 3
        page.open(server.url + "/docs")
        page.wait("document.querySelector('details')")      # with the key of the tab
