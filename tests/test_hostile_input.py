"""The tests that hostile_input.md names exist; and those of its rows that belong to no other file."""
from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
from pathlib import Path

import pytest

from frontend.openai.app import build_app
from frontend.tokenizer import Tokenizer
from ipc import codec
from ipc.cli import build_config
from ipc.errors import WireError
from ipc.messages import KIND_OF, AddRequest, SchedulerOutput
from tests.frontend.fake_llm import FakeLLM, post

TESTS = Path(__file__).parent


def test_every_test_that_the_table_names_exists() -> None:
    rows = [line for line in (TESTS / "hostile_input.md").read_text().splitlines()
            if line.startswith("| ") and not line.startswith("| advisories")]
    for row in rows:
        names = re.findall(r"tests/([\w/]+\.py)::(\w+)", row)
        assert names or "not offered" in row, row
        for file, name in names:
            assert f"def {name}(" in (TESTS / file).read_text(), f"{file}::{name}"
    assert len(rows) > 35


@pytest.mark.parametrize("kind", [KIND_OF[AddRequest], KIND_OF[SchedulerOutput]])
def test_every_extension_type_on_the_wire_is_refused(kind: int) -> None:
    for code in range(256):
        for body in (b"\xd4" + bytes([code]) + b"x", b"\xc7\x03" + bytes([code]) + b"abc"):
            frame = codec.HEADER.pack(codec.MAGIC, codec.SCHEMA_HASH, kind, 0, 1, 1, len(body)) + body
            with pytest.raises(WireError):
                codec.decode([frame])


def test_code_beside_a_model_is_never_imported(tiny_model: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    code = f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
    for name in ("modeling_tiny.py", "tokenization_tiny.py", "configuration_tiny.py", "__init__.py"):
        (folder / name).write_text(code)
    auto_map = {"AutoConfig": "configuration_tiny.C", "AutoModelForCausalLM": "modeling_tiny.M",
                "AutoTokenizer": ["tokenization_tiny.T", None]}
    for name in ("config.json", "tokenizer_config.json"):
        fields = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**fields, "auto_map": auto_map, "tokenizer_class": "T"}))
    files = build_config(str(folder), {}, serve=False).model.files
    assert Tokenizer.from_files(files).encode_ids("abc", False)
    assert not (tmp_path / "ran").exists()


def test_a_clients_url_is_never_fetched() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(0.2)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/image.png"
        for content in ([{"type": "image_url", "image_url": {"url": url}}], f"![image]({url})"):
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
            response = asyncio.run(post(build_app(FakeLLM()), "/v1/chat/completions", body))
            assert response.status_code == (200 if isinstance(content, str) else 400)
        with pytest.raises(TimeoutError):
            listener.accept()
