"""Tool calls out of text: for every format the whole text, and the same text cut anywhere, give the same."""
from __future__ import annotations

import json
import random
from typing import Any

import pytest

from frontend.reasoning import ReasoningSplitter, detect_reasoning
from frontend.tools.formats import ToolFormat, detect_format, get_format, register
from frontend.tools.request import tool_use
from frontend.tools.scanner import CallDelta, ListScanner, NamedScanner, Scanner, ToolScanner
from ipc.errors import RequestError

Result = tuple[str, list[tuple[str | None, str]]]
A = '{"name": "get", "arguments": {"city": "Köln, \\"}{\\" x", "n": [1, {"a": null}]}}'
B = '{"parameters": {"q": "</tool_call>"}, "name": "find"}'
CITY = '{"city": "Köln, \\"}{\\" x", "n": [1, {"a": null}]}'

# format, text, content, calls
CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", "Hello <b> there < tool", "Hello <b> there < tool", []),
    ("hermes", f"Let me see.\n<tool_call>\n{A}\n</tool_call>", "Let me see.", [("get", CITY)]),
    ("hermes", f"<tool_call>{A}</tool_call>\n<tool_call>\n{B}\n</tool_call>\n", "",
     [("get", CITY), ("find", '{"q": "</tool_call>"}')]),
    ("qwen", f"<tool_call>{A}<tool_call>{B}", "", [("get", CITY), ("find", '{"q": "</tool_call>"}')]),
    ("hermes", f"a <tool_call>{A}</tool_call> b <tool_call>{B}</tool_call> c", "a b c",
     [("get", CITY), ("find", '{"q": "</tool_call>"}')]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"id": 7, "x": {"name": "no"}, "name": "f", "arguments": {}}</tool_call>', "",
     [("f", "{}")]),
    ("hermes", '<tool_call>{"answer": 1}</tool_call>', '<tool_call>{"answer": 1}</tool_call>', []),
    ("hermes", "<tool_call>never mind", "<tool_call>never mind", []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "cut', "", [("f", '{"a": "cut')]),
    ("hermes", '<tool_call>{"name": "f', '<tool_call>{"name": "f', []),
    ("hermes", '<tool_call>{"name" 1}</tool_call>!', '<tool_call>{"name" 1}</tool_call>!', []),
    ("hermes", '<tool_call>get(__import__("os").getcwd())</tool_call>',
     '<tool_call>get(__import__("os").getcwd())</tool_call>', []),
    ("hermes", "blanks stay  \n", "blanks stay  \n", []),
    ("hermes", "", "", []),
    ("hermes", " \n ", " \n ", []),
    ("llama3_json", A, "", [("get", CITY)]),
    ("llama3_json", f"<|python_tag|>{A}; {B}", "", [("get", CITY), ("find", '{"q": "</tool_call>"}')]),
    ("llama3_json", f"\n{A}\n{B}", "", [("get", CITY), ("find", '{"q": "</tool_call>"}')]),
    ("llama3_json", '{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
    ("llama3_json", ' {"age": 3} and more', ' {"age": 3} and more', []),
    ("llama3_json", "no call {} here", "no call {} here", []),
    ("mistral", f"[TOOL_CALLS][{A}, {B}]", "", [("get", CITY), ("find", '{"q": "</tool_call>"}')]),
    ("mistral", f"Well[TOOL_CALLS] [{A}]", "Well", [("get", CITY)]),
    ("mistral", f"[TOOL_CALLS]get{CITY}", "", [("get", CITY)]),
    ("mistral", f"[TOOL_CALLS]get[ARGS]{CITY}[TOOL_CALLS]find[CALL_ID]abc[ARGS]{{}}", "",
     [("get", CITY), ("find", "{}")]),
    ("mistral", "[TOOL_CALL] is no marker", "[TOOL_CALL] is no marker", []),
    ("list", f"[{A}, {B}]", "", [("get", CITY), ("find", '{"q": "</tool_call>"}')]),
]


def scanner_of(name: str) -> Scanner:
    return ListScanner() if name == "list" else ToolScanner(get_format(name), frozenset({"get", "find"}))


def scan(scanner: Scanner, pieces: list[str]) -> Result:
    content, names, arguments = "", {}, {}
    for piece in [item for text in pieces for item in scanner.feed(text)] + scanner.finish():
        if isinstance(piece, CallDelta):
            if piece.id is not None:
                assert piece.index == len(names) and piece.name
                names[piece.index] = piece.name
            arguments[piece.index] = arguments.get(piece.index, "") + piece.arguments
        else:
            content += piece
    assert scanner.num_calls == len(names)
    return content, [(names[index], arguments[index]) for index in names]


def cut(text: str, draw: random.Random) -> list[str]:
    pieces, at = [], 0
    while at < len(text):
        size = draw.choice([1, 1, 2, 3, 7, 20])
        pieces.append(text[at:at + size])
        at += size
    return pieces


@pytest.mark.parametrize("name, text, content, calls", CASES)
def test_a_whole_text_gives_content_and_calls(name, text, content, calls):
    assert scan(scanner_of(name), [text]) == (content, calls)


@pytest.mark.parametrize("name, text, content, calls", CASES)
def test_a_text_cut_anywhere_gives_the_same(name, text, content, calls):
    draw = random.Random(text)
    assert scan(scanner_of(name), list(text)) == (content, calls)
    for _ in range(60):
        assert scan(scanner_of(name), cut(text, draw)) == (content, calls)


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "list"])
def test_random_texts_cut_anywhere_give_the_same(name):
    draw = random.Random(name)
    parts = [A, B, "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[", "]", "{", "}", '"', "\\", " ",
             "\n", ";", ",", ":", "name", '{"name"', '"f"', "x", "get", "<", "[TOOL", "[ARGS]", "null", '"arguments": ']
    for _ in range(400):
        text = "".join(draw.choice(parts) for _ in range(draw.randrange(1, 14)))
        expected = scan(scanner_of(name), [text])
        for _ in range(6):
            assert scan(scanner_of(name), cut(text, draw)) == expected, text


def test_arguments_come_while_they_are_written():
    scanner = scanner_of("hermes")
    scanner.feed('<tool_call>{"name": "get", "arguments": {"city": "K')
    news = scanner.feed("öl")
    assert [piece.arguments for piece in news if isinstance(piece, CallDelta)] == ["öl"]


def test_long_texts_take_time_in_proportion():
    """A million characters in pieces of four: a scanner that looks back would not end."""
    text = "<tool" * 50_000 + "<tool_call>" + json.dumps({"name": "f", "arguments": {"a": "[{<" * 200_000}})
    scanner = ToolScanner(get_format("hermes"))
    content, calls = scan(scanner, [text[i:i + 4] for i in range(0, len(text), 4)])
    assert len(content) == 250_000 and len(json.loads(calls[0][1])["a"]) == 600_000


def test_ids_are_as_the_models_templates_want_them():
    def id_of(name: str) -> str:
        call = ToolScanner(get_format(name)).feed(get_format(name).begin + A)[0]
        assert isinstance(call, CallDelta) and call.id is not None
        return call.id
    assert len(id_of("mistral")) == 9 and id_of("mistral").isalnum()
    assert id_of("hermes").startswith("call_") and id_of("hermes") != id_of("hermes")


def test_formats_are_found_by_name_and_by_template():
    assert detect_format(["... <tool_call> ..."]).name == "hermes"
    assert detect_format(["[TOOL_CALLS]"]).name == "mistral"
    assert detect_format(["Environment: ipython"]).name == "llama3_json"
    assert detect_format(["plain"]).name == "hermes"
    with pytest.raises(ValueError, match="hermes"):
        get_format("nobody's")
    register(ToolFormat("mine", "<call>", "</call>"))
    assert scan(ToolScanner(get_format("mine")), [f"x<call>{B}</call>"])[1][0][0] == "find"


def test_a_named_choice_takes_the_whole_text_as_arguments():
    assert scan(NamedScanner("get"), ["", '{"a"', ": 1}"]) == ("", [("get", '{"a": 1}')])


# ---------------------------------------------------------------- requests

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "get", "parameters": {
    "type": "object", "properties": {"p": {"$ref": "#/$defs/t"}}, "$defs": {"t": {"type": "integer"}}}}}
HERMES = get_format("hermes")


def test_choices_become_grammars_and_scanners():
    assert tool_use(None, None, True, HERMES) is None and tool_use([TOOL], "none", True, HERMES) is None
    auto = tool_use([TOOL], None, True, HERMES)
    assert auto is not None and auto.structured is None and isinstance(auto.scanner(), ToolScanner)
    required = tool_use([TOOL], "required", False, HERMES)
    assert required is not None and required.structured is not None
    schema = json.loads(required.structured.json or "")
    assert schema["maxItems"] == 1 and schema["$defs"] == {"t": {"type": "integer"}}
    named = tool_use([TOOL], {"type": "function", "function": {"name": "get"}}, True, HERMES)
    assert named is not None and named.structured is not None
    assert json.loads(named.structured.json or "") == TOOL["function"]["parameters"]


@pytest.mark.parametrize("tools, choice, param", [
    ([{"type": "function"}], None, "tools[0].function.name"), ([{"type": "web"}], None, "tools[0].type"),
    ([TOOL, TOOL], None, "tools[1].function.name"), ([TOOL], "sometimes", "tool_choice"),
    ([], "required", "tool_choice"),
    ([TOOL], {"type": "function", "function": {"name": "other"}}, "tool_choice"), ([TOOL], {"name": 1}, "tool_choice"),
    ([{"type": "function", "function": {"name": "a b"}}], None, "tools[0].function.name"),
    ([{"type": "function", "function": {"name": "a", "parameters": []}}], None, "tools[0].function.parameters")])
def test_bad_tools_are_refused_with_their_field(tools, choice, param):
    with pytest.raises(RequestError) as found:
        tool_use(tools, choice, True, HERMES)
    assert found.value.param == param


# ---------------------------------------------------------------- reasoning

@pytest.mark.parametrize("text, is_open, thoughts, answer", [
    ("<think>\nhm </b> so\n</think>\n\nYes.\n", False, "hm </b> so", "Yes.\n"),
    ("Yes <think>", False, "", "Yes <think>"),
    ("hm\n</think> Yes", True, "hm", "Yes"), ("<think>hm </thi", False, "hm </thi", ""), ("<thin", False, "", "<thin"),
    ("\n<think></think>a", False, "", "a"), ("", False, "", ""), ("  plain", False, "", "  plain"),
    ("cut off", True, "cut off", "")])
def test_thoughts_and_answer_are_split_however_the_text_is_cut(text, is_open, thoughts, answer):
    draw = random.Random(text)
    for pieces in ([text], list(text), *(cut(text, draw) for _ in range(30))):
        splitter = ReasoningSplitter(is_open)
        parts = [splitter.feed(piece) for piece in pieces] + [splitter.feed("", True)]
        assert ("".join(p[0] for p in parts), "".join(p[1] for p in parts)) == (thoughts, answer), pieces


def test_a_template_tells_whether_the_model_thinks():
    assert detect_reasoning(["{{ '<think>' }}"]) and not detect_reasoning(["plain"])
