"""Field by field: what OpenAI documents and what vLLM adds is honoured, a label, or refused by name. Nothing else."""
from __future__ import annotations

import asyncio
import importlib
import re
from array import array
from typing import Any

import httpx
import pytest

from frontend.openai.app import build_app
from tests.frontend.fake_llm import events, post
from tests.frontend.test_openai_logprobs import ScriptedLLM, llm

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, EMBEDDINGS, MESSAGES = "/v1/responses", "/v1/embeddings", "/v1/messages"
BASE: dict[str, dict[str, Any]] = {CHAT: {"messages": [{"role": "user", "content": "hi"}]},
                                   COMPLETIONS: {"prompt": "ba"}, RESPONSES: {"input": "hi"},
                                   EMBEDDINGS: {"input": "hello"},
                                   MESSAGES: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
FLAT_TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
CLAUDE_TOOL = {"name": "f", "input_schema": {"type": "object", "properties": {}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
JSON_OBJECT = {"type": "json_object"}

# Field -> a value that asks for something. It must change what the engine or the caller gets.
SAMPLING = {
    "temperature": 0.5, "top_p": 0.5, "top_k": 7, "min_p": 0.25, "seed": 9, "min_tokens": 2, "stop": ["zz"],
    "stop_token_ids": [3], "ignore_eos": True, "include_stop_str_in_output": True, "skip_special_tokens": False,
    "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {"1": 2.0},
    "allowed_token_ids": [1, 2], "bad_words": ["x"]}
ENGINE = {"priority": 3, "cache_salt": "s", "request_id": "mine"}
GENERATION = {
    **SAMPLING, **ENGINE, "max_tokens": 5, "max_completion_tokens": 6, "spaces_between_special_tokens": False,
    "response_format": FORM, "structured_outputs": {"regex": "a+"}, "guided_json": SCHEMA, "guided_regex": "a+",
    "guided_choice": ["a", "b"], "guided_grammar": 'root ::= "a"', "stream": True, "truncate_prompt_tokens": 1,
    "logits_processors": ["mine"], "return_timings": True, "prompt_logprobs": 1, "return_token_ids": True}
HONOURED: dict[str, dict[str, Any]] = {
    CHAT: {**GENERATION, "add_generation_prompt": False, "continue_final_message": True,
           "chat_template_kwargs": {"a": 1}, "logprobs": True, "tools": [TOOL], "documents": [{"text": "x"}],
           "reasoning_effort": "low", "include_reasoning": False},
    COMPLETIONS: {**GENERATION, "add_special_tokens": False, "logprobs": 1, "echo": True},
    RESPONSES: {**SAMPLING, **ENGINE, "instructions": "Be brief.", "max_output_tokens": 5, "stream": True,
                "metadata": {"a": "b"}, "tools": [FLAT_TOOL], "text": {"format": JSON_OBJECT}, "background": True,
                "chat_template_kwargs": {"a": 1}, "store": False, "user": "u", "reasoning": {"effort": "low"},
                "structured_outputs": {"regex": "a+"}, "include_reasoning": False, "max_tool_calls": 2,
                "include": ["message.output_text.logprobs"], "top_logprobs": 2, "truncation": "auto"},
    EMBEDDINGS: {**ENGINE, "encoding_format": "base64", "pooling": "mean", "normalize": False,
                 "add_special_tokens": False, "truncate_prompt_tokens": 1, "use_activation": False},
    MESSAGES: {"system": "Be brief.", "stop_sequences": ["zz"], "stream": True, "temperature": 0.5, "top_p": 0.5,
               "top_k": 7, "tools": [CLAUDE_TOOL], "thinking": {"type": "disabled"}, "chat_template_kwargs": {"a": 1},
               **{name: SAMPLING[name] for name in ("seed", "min_p", "min_tokens", "ignore_eos")},
               "priority": 3, "cache_salt": "s", "output_config": {"effort": "low"},
               "output_format": {"type": "json_schema", "schema": {"type": "object"}}}}
CUT = ({"truncate_prompt_tokens": 1}, "right")
# Those that only mean something beside others: (others, value).
TOGETHER: dict[str, dict[str, tuple[dict[str, Any], Any]]] = {
    CHAT: {"top_logprobs": ({"logprobs": True}, 2), "stream_options": ({"stream": True}, {"include_usage": True}),
           "tool_choice": ({"tools": [TOOL]}, "required"),
           "parallel_tool_calls": ({"tools": [TOOL], "tool_choice": "required"}, False),
           "return_tokens_as_token_ids": ({"logprobs": True}, True), "truncation_side": CUT,
           "n": ({"temperature": 1}, 2)},
    COMPLETIONS: {"stream_options": ({"stream": True}, {"include_usage": True}), "n": ({"temperature": 1}, 2),
                  "return_tokens_as_token_ids": ({"logprobs": 1}, True), "truncation_side": CUT},
    RESPONSES: {"tool_choice": ({"tools": [FLAT_TOOL]}, "required"),
                "parallel_tool_calls": ({"tools": [FLAT_TOOL], "tool_choice": "required"}, False)},
    EMBEDDINGS: {"truncation_side": CUT},
    MESSAGES: {"tool_choice": ({"tools": [CLAUDE_TOOL]}, {"type": "any"})}}
LABELS = {"session_id": "s", "store": True, "metadata": {"a": "b"}, "user": "u", "service_tier": "auto",
          "safety_identifier": "s", "prompt_cache_key": "k", "prompt_cache_retention": "24h"}
ACCEPTED: dict[str, dict[str, Any]] = {
    CHAT: LABELS, COMPLETIONS: {**LABELS, "parallel_tool_calls": True},
    RESPONSES: {name: value for name, value in LABELS.items() if name not in HONOURED[RESPONSES]},
    EMBEDDINGS: {"user": "u"},
    MESSAGES: {"metadata": {"user_id": "u"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"}}}
REFUSED_VLLM = {"kv_transfer_params": {"a": 1}, "ec_transfer_params": {"a": 1}, "vllm_xargs": {"a": 1},
                "mm_payload": "none", "return_mm_kwargs": True, "watermarking": True}
REFUSED_MEDIA = {"mm_processor_kwargs": {"a": 1}, "media_io_kwargs": {"a": {}}}
REFUSED_TEXT = {**REFUSED_VLLM, **REFUSED_MEDIA, "use_beam_search": True, "length_penalty": 2.0, "prompt_embeds": "x",
                "thinking_token_budget": 5, "min_new_tokens": 3, "logprob_token_ids": [1], "stream_interval": 4,
                "repetition_detection": {"min_count": 3}, "return_token_offsets": True,
                "routed_experts_prompt_start": 2}
REFUSED: dict[str, dict[str, Any]] = {
    CHAT: {**REFUSED_TEXT, "audio": {"voice": "x"}, "function_call": {"name": "f"}, "functions": [{"name": "f"}],
           "modalities": ["audio"], "prediction": {"type": "content"}, "verbosity": "low", "web_search_options": {},
           "moderation": {"a": 1}, "best_of": 2, "echo": True, "suffix": "x", "chat_template": "x",
           "add_special_tokens": True, "return_prompt_text": True},
    COMPLETIONS: {**REFUSED_TEXT, "best_of": 2, "suffix": "x", "continue_final_message": True,
                  "chat_template_kwargs": {"a": 1}, "documents": [{"text": "x"}], "reasoning_effort": "low",
                  "include_reasoning": False, "add_generation_prompt": True, "tools": [TOOL]},
    RESPONSES: {**REFUSED_VLLM, **REFUSED_MEDIA, "enable_response_messages": True,
                "previous_input_messages": [{"role": "user"}], "truncation_side": "right", "conversation": "c",
                "prompt": {"id": "p"},
                "stream_options": {"include_obfuscation": True}, "context_management": [{"type": "compaction"}],
                "documents": [{"text": "x"}], "prompt_logprobs": 1, "return_token_ids": True, "echo": True,
                "thinking_token_budget": 5, "truncate_prompt_tokens": 1,
                "continue_final_message": True, "reasoning_effort": "low"},
    EMBEDDINGS: {**REFUSED_MEDIA, "dimensions": 2, "priority": 2**40, "embed_dtype": "float16", "endianness": "big",
                 "padding": "max_length", "messages": [{"role": "user", "content": "x"}], "chat_template": "x",
                 "chat_template_kwargs": {"a": 1}, "add_generation_prompt": True, "continue_final_message": True},
    MESSAGES: {**REFUSED_VLLM, "container": "c", "context_management": {"edits": [{"type": "x"}]},
               "mcp_servers": [{"name": "m"}],
               "speed": "fast",
               "inference_geo": "us", "diagnostics": {"a": 1}, "user_profile_id": "u", "workspace_id": "w",
               "billing_policy": "x", "compaction": {"a": 1}, "fallback_credit_token": "t", "fallbacks": ["m"],
               "thread": "t"}}


class Recording(ScriptedLLM):
    """Also notes what comes beside prompt and parameters."""

    def __init__(self) -> None:
        super().__init__(**{name: getattr(llm(), name) for name in ("pieces", "prompt", "prompt_entries")})
        self.has_levels = self.has_reasoning = True
        self.seen: list[Any] = []

    def render_chat(self, messages: list[dict[str, Any]], **options: Any) -> bytes:
        super().render_chat(messages, **options)
        return array("i", [5, 1]).tobytes()

    def generate(self, prompt: Any, sampling_params: Any, **options: Any) -> Any:
        self.seen.append([options.get(name) for name in ("priority", "cache_salt", "output_kind",
                                                         "add_special_tokens")])
        return self._scripted(prompt, sampling_params, **options)

    async def _scripted(self, prompt: Any, params: Any, **options: Any) -> Any:
        async for output in super().generate(prompt, params, **options):
            first = output.outputs[0]
            first.text = first.text.replace("a", "<think>b</think>a", 1)
            output.outputs = [type(first)(index, first.text, first.token_ids, first.finish_reason, None, first.logprobs)
                              for index in range(params.n)]
            yield output

    def encode(self, prompt: Any, **options: Any) -> Any:
        options.pop("request_id")
        self.seen.append(options)
        return super().encode(prompt, pooling=options["pooling"], normalize=options["normalize"])


def send(path: str, fields: dict[str, Any]) -> tuple[httpx.Response, str]:
    """(response, all that the engine was told and the caller got, without what is new in every call)."""
    engine = Recording()
    response = asyncio.run(post(build_app(engine), path, {**BASE[path], **fields}))
    got = re.sub(r'"(id|item_id|created|created_at|system_fingerprint)":("[^"]*"|\d+)', "", response.text)
    request_id = response.headers["x-request-id"] if "request_id" in fields else ""
    return response, repr((engine.calls, engine.chats, engine.seen, got, request_id,
                           sorted(set(response.headers) - {"content-length"})))


@pytest.mark.parametrize("path,name", [(path, name) for path in BASE for name in (*HONOURED[path], *TOGETHER[path])])
def test_a_field_that_is_honoured_changes_something(path: str, name: str) -> None:
    others, value = TOGETHER[path].get(name) or ({}, HONOURED[path][name])
    if name == "continue_final_message":
        others = {"add_generation_prompt": False}
    without, before = send(path, others)
    response, after = send(path, {**others, name: value})
    assert (without.status_code, response.status_code) == (200, 200), response.text
    assert "x-ignored-fields" not in response.headers
    assert before != after, f"{name} changes nothing"


@pytest.mark.parametrize("path,name", [(path, name) for path in BASE for name in ACCEPTED[path]])
def test_a_label_is_accepted(path: str, name: str) -> None:
    response, _ = send(path, {name: ACCEPTED[path][name]})
    assert response.status_code == 200 and "x-ignored-fields" not in response.headers


@pytest.mark.parametrize("path,name", [(path, name) for path in BASE for name in REFUSED[path]])
def test_a_field_that_cannot_be_honoured_is_refused_by_name(path: str, name: str) -> None:
    response, _ = send(path, {name: REFUSED[path][name]})
    error = response.json()["error"]
    assert response.status_code in (400, 404) and name in error["message"], response.text
    if path == MESSAGES:
        assert error["type"] == "invalid_request_error"     # this API's errors have no member for the field
    else:
        assert error["param"].split(".")[0].split("[")[0] == name


# All that vLLM 0.32's request classes have.
_BOTH = """
add_special_tokens allowed_token_ids bad_words cache_salt ec_transfer_params echo frequency_penalty ignore_eos
include_stop_str_in_output kv_transfer_params length_penalty logit_bias logprob_token_ids logprobs max_tokens min_p
min_tokens mm_payload model n presence_penalty priority prompt_logprobs repetition_detection repetition_penalty
request_id response_format return_mm_kwargs return_token_ids return_token_offsets return_tokens_as_token_ids
routed_experts_prompt_start seed session_id skip_special_tokens spaces_between_special_tokens stop stop_token_ids
stream stream_interval stream_options structured_outputs temperature thinking_token_budget top_k top_p
truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs watermarking
"""
VLLM: dict[str, str] = {
    CHAT: _BOTH + """
add_generation_prompt chat_template chat_template_kwargs continue_final_message documents include_reasoning
max_completion_tokens media_io_kwargs messages mm_processor_kwargs parallel_tool_calls reasoning_effort
return_prompt_text tool_choice tools top_logprobs""",
    COMPLETIONS: _BOTH + "prompt prompt_embeds suffix",
    RESPONSES: """
background cache_salt chat_template_kwargs ec_transfer_params enable_response_messages frequency_penalty ignore_eos
include include_reasoning include_stop_str_in_output input instructions kv_transfer_params logit_bias
max_output_tokens max_tool_calls media_io_kwargs metadata min_p mm_payload mm_processor_kwargs model
parallel_tool_calls presence_penalty previous_input_messages previous_response_id priority prompt prompt_cache_key
reasoning repetition_penalty request_id return_mm_kwargs seed service_tier session_id skip_special_tokens stop
stop_token_ids store stream structured_outputs temperature text tool_choice tools top_k top_logprobs top_p truncation
user vllm_xargs watermarking""",
    EMBEDDINGS: """
add_generation_prompt add_special_tokens cache_salt chat_template chat_template_kwargs continue_final_message
dimensions embed_dtype encoding_format endianness input media_io_kwargs messages mm_processor_kwargs model padding
priority request_id truncate_prompt_tokens truncation_side use_activation user""",
    MESSAGES: """
cache_salt chat_template_kwargs ec_transfer_params kv_transfer_params max_tokens messages metadata mm_payload model
output_config return_mm_kwargs stop_sequences stream system temperature thinking tool_choice tools top_k top_p
vllm_xargs watermarking"""}


def in_tables(path: str) -> set[str]:
    return {name for table in (BASE, HONOURED, TOGETHER, ACCEPTED, REFUSED) for name in table[path]} | ELSEWHERE


@pytest.mark.parametrize("path", VLLM)
def test_the_tables_have_every_field_of_vllm(path: str) -> None:
    assert set(VLLM[path].split()) - in_tables(path) - {"model"} == set()


@pytest.mark.parametrize("path,name", [(path, name) for path in VLLM for name in VLLM[path].split()])
def test_no_field_of_vllm_is_ignored(path: str, name: str) -> None:
    response, _ = send(path, {name: None} if name not in BASE[path] else {})
    assert "x-ignored-fields" not in response.headers


@pytest.mark.parametrize("path,module,name", [
    (CHAT, "chat.completion_create_params", "CompletionCreateParamsBase"),
    (COMPLETIONS, "completion_create_params", "CompletionCreateParamsBase"),
    (RESPONSES, "responses.response_create_params", "ResponseCreateParamsBase"),
    (EMBEDDINGS, "embedding_create_params", "EmbeddingCreateParams")])
def test_the_tables_have_every_field_of_openais_client(path: str, module: str, name: str) -> None:
    types = pytest.importorskip("openai.types")
    fields = set(getattr(importlib.import_module(f"{types.__name__}.{module}"), name).__annotations__)
    assert fields - in_tables(path) - {"model"} - NEWER == set()


@pytest.mark.parametrize("name", ["message_create_params.MessageCreateParamsBase",
                                  "beta.message_create_params.MessageCreateParamsBase"])
def test_the_tables_have_every_field_of_anthropics_client(name: str) -> None:
    types = pytest.importorskip("anthropic.types")
    module, _, cls = name.rpartition(".")
    fields = set(getattr(importlib.import_module(f"{types.__name__}.{module}"), cls).__annotations__)
    assert fields - in_tables(MESSAGES) - {"model", "betas", *NEWER} == set()       # betas travel in a header


# In some versions of the client only; the body's own table refuses them.
ELSEWHERE = {"previous_response_id"}            # is tested with stored responses
NEWER = {"prompt_cache_options", "background_options", "access_programs", "image", "moderation"}


# ---------------------------------------------------------------- the shapes that vLLM gives them

ENTRY = {token: {"logprob": value, "rank": rank, "decoded_token": ""}
         for token, value, rank in (("1", -3.0, 7), ("5", -0.25, 1), ("4", -0.5, 2))}


def answer(path: str, **fields: Any) -> dict[str, Any]:
    return asyncio.run(post(build_app(llm()), path, {**BASE[path], **fields})).json()


def test_prompt_logprobs_stand_beside_the_choices_of_a_chat_and_inside_those_of_a_completion() -> None:
    assert answer(CHAT, prompt_logprobs=2)["prompt_logprobs"] == [None, ENTRY]
    assert answer(COMPLETIONS, prompt_logprobs=2)["choices"][0]["prompt_logprobs"] == [None, ENTRY]
    plain = answer(CHAT)
    assert "prompt_logprobs" not in plain and "token_ids" not in plain["choices"][0]
    error = answer(CHAT, prompt_logprobs=0, stream=True)["error"]
    assert error["param"] == "prompt_logprobs" and "stream" in error["message"]


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_token_ids_are_those_of_the_output_whole_and_streamed(path: str, echo: bool) -> None:
    fields: dict[str, Any] = {"echo": True, "logprobs": 1} if echo and path == COMPLETIONS else {}
    whole = answer(path, return_token_ids=True, **fields)
    assert whole["choices"][0]["token_ids"] == [1, 2, 3, 4]
    where = whole if path == CHAT else whole["choices"][0]
    assert where["prompt_token_ids"] == [5, 1]
    chunks = events(asyncio.run(post(build_app(llm()), path, {**BASE[path], "stream": True, "return_token_ids": True,
                                                              **fields})))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert sum((choice.get("token_ids", []) for choice in choices), []) == [1, 2, 3, 4]
    places = chunks if path == CHAT else choices
    assert [place["prompt_token_ids"] for place in places if "prompt_token_ids" in place] == [[5, 1]]


def test_tokens_may_be_named_by_their_ids() -> None:
    content = answer(CHAT, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    assert [token["token"] for token in content["content"]] == ["token_id:1", "token_id:2", "token_id:3", "token_id:4"]
    assert content["content"][1]["top_logprobs"][0]["token"] == "token_id:1"
    columns = answer(COMPLETIONS, logprobs=1, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    assert columns["tokens"][0] == "token_id:1" and "token_id:5" in columns["top_logprobs"][0]
