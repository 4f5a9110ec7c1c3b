"""Starts that cannot be: exit status 1, one line that says the cause, no traceback, and nothing is left."""
from __future__ import annotations

import json
import shutil
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes.tools import FLAGS, ServerProcess, assert_nothing_left

pytestmark = pytest.mark.timeout(60)

Change = Callable[[Path], Any]


def edit_config(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return change


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def cut_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:40])


def lie_in_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 62) + path.read_bytes()[8:])


def lose_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(
        {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}))


def pickle_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def break_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")


def break_template(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{% for x in %}"}))


def nothing(folder: Path) -> None:
    pass


CASES: dict[str, tuple[Change, tuple[str, ...], str]] = {
    "a cut weight file": (cut_weights, (), "model.safetensors"),
    "a cut header": (cut_header, (), "model.safetensors"),
    "a lying header": (lie_in_header, (), "model.safetensors"),
    "a missing shard": (lose_shard, (), "model-00002-of-00002.safetensors"),
    "pickled weights": (pickle_weights, (), "pytorch_model.bin"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), (), "no "),
    "no config": (lambda folder: (folder / "config.json").unlink(), (), "config.json"),
    "broken config": (lambda folder: (folder / "config.json").write_text("{"), (), "config.json"),
    "another architecture": (edit_config(architectures=["MambaForCausalLM"]), (), "MambaForCausalLM"),
    "code of the model's own": (edit_config(architectures=["Mine"], auto_map={"AutoModel": "m.M"}), (), "Mine"),
    "a width that does not fit": (edit_config(hidden_size=96), (), "expected shape"),
    "a broken tokenizer": (break_tokenizer, (), "tokenizer"),
    "a broken template": (break_template, (), "template"),
    "too little memory": (nothing, ("--kv-cache-memory", "64KiB", "--block-size", "1024"), "--kv-cache-memory"),
    "more memory than there is": (nothing, ("--kv-cache-memory", "900TiB"), "memory"),
    "a bad option value": (nothing, ("--block-size", "0"), "--block-size is 0"),
    "an option that is none": (nothing, ("--blok-size", "4"), "--block-size"),
    "a folder that is not there": (nothing, ("--model", "./nowhere"), "nowhere"),
    "a taken port": (nothing, ("--port", "{taken}"), "is taken"),
    "an address of another machine": (nothing, ("--host", "192.0.2.1"), "cannot listen on"),
    "a certificate that is none": (nothing, ("--ssl-certfile", "{folder}/config.json"), "--ssl-certfile"),
    "a device that is not there": (nothing, ("--device", "cuda"), "--device cuda"),
    "a processor that is not there": (nothing, ("--logits-processor", "x=no_such_module:f"), "no_such_module"),
}


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield int(sock.getsockname()[1])


@pytest.mark.parametrize("name", CASES)
def test_a_start_that_cannot_be_ends_with_its_cause_in_one_line(name: str, tiny_model: str, temp: str, tmp_path: Path,
                                                                taken_port: int) -> None:
    change, options, cause = CASES[name]
    if name == "a device that is not there":
        torch = pytest.importorskip("torch")
        if torch.cuda.is_available():
            pytest.skip("there is a CUDA device")
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    change(folder)
    flags = FLAGS[2:] if "memory" in name else FLAGS    # without a number of blocks
    server = ServerProcess(str(folder), temp, *flags, *(o.format(taken=taken_port, folder=folder) for o in options))
    status = server.wait()
    lines = [line for line in server.screen.splitlines()
             if line.startswith("launch.py:") and line != "launch.py: see launch.py --help"]
    assert status in (1, 2) and len(lines) == 1 and cause in lines[0], server.screen
    assert "Traceback" not in server.screen
    assert_nothing_left(temp)
