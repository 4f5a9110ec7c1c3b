"""Chat templates: rendered as the model's authors did, refused as the caller's mistake, never a way out or a hang."""

from __future__ import annotations

import datetime
import json
from typing import Any

import pytest

from frontend.chat_template import MAX_EXTRA_CHARS, ChatTemplate
from frontend.tokenizer import CHATML
from ipc.errors import ConfigError, RequestError

USER = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "get", "description": "a <b> & 'c' é"}}]


def render(source: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    return ChatTemplate({"default": source}, {"bos_token": "<s>"}).render(messages or USER, **options)


def test_a_chat_becomes_one_prompt_with_the_assistants_turn_open() -> None:
    messages = [{"role": "system", "content": "be brief"}, *USER]
    assert render(CHATML, messages) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert render(CHATML, USER, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_templates_see_special_tokens_tools_and_block_whitespace_rules() -> None:
    source = "{{ bos_token }}\n  {% for tool in tools %}\n{{ tool | tojson }}\n  {% endfor %}\n"
    assert render(source, tools=TOOLS) == f"<s>\n{json.dumps(TOOLS[0], ensure_ascii=False)}\n"


def test_json_is_written_without_html_escapes_and_can_be_indented() -> None:
    assert render("{{ tools[0].function | tojson(indent=2) }}", tools=TOOLS) == (
        json.dumps(TOOLS[0]["function"], ensure_ascii=False, indent=2))


def test_loop_controls_macros_generation_blocks_and_dates_work() -> None:
    source = ("{% macro twice(n) %}{% for i in range(n) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
              "{% endmacro %}{{ twice(9) }}{% generation %}x{% endgeneration %}{{ strftime_now('%Y') }}")
    assert render(source) == f"01x{datetime.datetime.now().year}"


def test_loop_variables_are_as_in_plain_jinja() -> None:
    source = "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{% endfor %}"
    assert render(source, USER * 3) == "1/3,2/3,3/3"


def test_text_parts_are_joined_and_null_content_is_empty() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a\nb"
    assert render("{{ '[' + messages[0].content + ']' }}", [{"role": "assistant", "content": None}]) == "[]"


def test_null_content_stays_null_beside_tool_calls_for_a_template_that_asks() -> None:
    call = {"type": "function", "function": {"name": "get", "arguments": "{\"x\": 1}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    source = "{{ messages[0].content is none }} {{ messages[0].tool_calls[0].function.arguments | tojson }}"
    assert render(source, [message]) == 'True {"x": 1}'
    assert message["tool_calls"] == [call]


@pytest.mark.parametrize(("message", "expected"), [
    ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, r"content\[0\].*'image_url'"),
    ({"role": "user", "content": 5}, "content must be a string"),
    ({"content": "hi"}, "role"),
    ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "arguments is no JSON"),
])
def test_a_message_that_cannot_be_shown_is_refused_by_name(message: dict[str, Any], expected: str) -> None:
    with pytest.raises(RequestError, match=expected):
        render(CHATML, [message])


def test_an_empty_chat_and_a_model_without_a_template_are_refused() -> None:
    template = ChatTemplate({"default": CHATML})
    with pytest.raises(RequestError, match="messages is empty"):
        template.render([])
    with pytest.raises(RequestError, match="no chat template.*completions works"):
        ChatTemplate({}).render(USER)


def test_tools_use_their_own_template_if_there_is_one() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "tools"})
    assert (template.render(USER), template.render(USER, tools=TOOLS)) == ("plain", "tools")


def test_the_last_message_can_be_left_open() -> None:
    messages = [*USER, {"role": "assistant", "content": "The answer "}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    assert render(CHATML, messages, **options) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nThe answer "
    trimming = "{% for m in messages %}{{ m.content | trim }}|{% endfor %}"
    assert render(trimming, messages, **options) == "hi|The answer"
    assert messages[-1]["content"] == "The answer "
    with pytest.raises(RequestError, match="exclude each other"):
        render(CHATML, messages, continue_final_message=True)
    with pytest.raises(RequestError, match="does not show"):
        render("nothing", messages, **options)


def test_extra_variables_reach_the_template() -> None:
    source = "{{ enable_thinking is defined and enable_thinking is false }} {{ more.a[0] }}"
    assert render(source, chat_template_kwargs={"enable_thinking": False, "more": {"a": [1]}}) == "True 1"


@pytest.mark.parametrize(("name", "value"), [
    ("messages", []), ("tools", []), ("add_generation_prompt", True), ("bos_token", "x"), ("raise_exception", 1),
    ("range", 1), ("_x", 1), ("a b", 1), ("x", object()), ("x", {1: 2}), ("x", [[[[[1]]]]]),
    ("threefold_counted_", 1),
])
def test_extra_variables_cannot_replace_others_or_be_anything_but_data(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match="chat_template_kwargs"):
        render(CHATML, chat_template_kwargs={name: value})


def test_a_templates_own_refusal_and_its_faults_are_the_callers() -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="chat template"):
        render("{{ messages[0].content + 1 }}")


def test_a_template_that_is_no_jinja_is_refused_at_start_with_its_line() -> None:
    with pytest.raises(ConfigError, match="line 2"):
        ChatTemplate({"default": "ok\n{% for %}"})


@pytest.mark.parametrize("source", [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ messages.append(1) }}",
    "{{ raise_exception.__globals__ }}{{ raise_exception.__globals__.json }}",
])
def test_templates_cannot_leave_the_sandbox_or_change_the_messages(source: str) -> None:
    with pytest.raises(RequestError, match="chat template"):
        render(source)


@pytest.mark.parametrize("source", [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f() %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endmacro %}"
    "{{ f() }}",
    "{% for i in range(9999999999) %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{{ 'x' * 999999999999 }}",
    "{{ 9 ** 99999999999 }}",
    "{% for i in range(2000) %}{{ 'x' * 1000 }}{% endfor %}",
])
def test_templates_that_would_not_end_or_fill_the_memory_are_stopped(source: str) -> None:
    with pytest.raises(RequestError, match="chat template"):
        render(source)


def test_the_output_may_be_as_long_as_the_input_and_a_megabyte_more() -> None:
    long = "x" * (3 * MAX_EXTRA_CHARS)
    assert render("{{ messages[0].content + '!' }}", [{"role": "user", "content": long}]) == long + "!"


def test_compiling_the_same_template_again_costs_nothing() -> None:
    first, second = ChatTemplate({"default": CHATML}), ChatTemplate({"default": CHATML})
    assert first._templates["default"] is second._templates["default"]


def test_reasoning_effort_is_the_templates_variable_or_turns_thoughts_off_or_is_refused():
    levels = "effort {{ reasoning_effort }}"
    assert render(levels, reasoning_effort="low") == "effort low"
    assert render(levels, reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"}) == "effort high"
    switch = "{% if enable_thinking is defined and enable_thinking is false %}quick{% else %}slow{% endif %}"
    assert (render(switch, reasoning_effort="none"), render(switch)) == ("quick", "slow")
    for source, effort, fix in ((switch, "low", 'send "none"'), ("x", "none", "leave it out")):
        with pytest.raises(RequestError, match=fix) as caught:
            render(source, reasoning_effort=effort)
        assert caught.value.param == "reasoning_effort"


def test_documents_need_a_template_that_shows_them():
    shown = render("{% for d in documents %}{{ d.text }};{% endfor %}", documents=[{"text": "a"}, {"text": "b"}])
    assert shown == "a;b;"
    with pytest.raises(RequestError, match="documents") as caught:
        render("x", documents=[{"text": "a"}])
    assert caught.value.param == "documents"
