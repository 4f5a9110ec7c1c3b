"""The static pages: chat and API description. Each is one file without anything from elsewhere.

The content-security-policy allows a page its own inline script and style, by their hashes, and this server; so text
that a model wrote cannot run, even if the page had a mistake.
"""
from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from frontend.openai.engine import EngineLike
from frontend.openai.exchange import Exchange
from frontend.openai.routes import Handler

FOLDER = Path(__file__).resolve().parents[1] / "pages"


def policy(html: str) -> str:
    """The policy for one page."""
    sources = {}
    for tag in ("script", "style"):
        bodies = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        hashes = [base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() for body in bodies]
        sources[tag] = " ".join(f"'sha256-{digest}'" for digest in hashes) or "'none'"
    return (f"default-src 'none'; script-src {sources['script']}; style-src {sources['style']}; connect-src 'self'; "
            "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")


def page(name: str) -> Handler:
    """The handler of one page, which is read once."""
    html = (FOLDER / name).read_text(encoding="utf-8")
    body = html.encode()
    headers = [(b"content-security-policy", policy(html).encode()), (b"x-content-type-options", b"nosniff"),
               (b"referrer-policy", b"no-referrer"), (b"cache-control", b"no-cache")]

    async def get_page(exchange: Exchange, _: EngineLike) -> None:
        await exchange.reply(200, body, headers, content_type=b"text/html; charset=utf-8")
    return get_page
