"""The request bodies of chat and completion calls: structs, the table of fields not supported yet, and their decoding.

A struct field here is supported. Moving a name from refused to supported means adding that field (named as in
SamplingParams, if it belongs there); the table then no longer applies to it. Knows no engine.
"""
from __future__ import annotations

import difflib
import functools
import logging
import re
from typing import Any, TypeVar

import msgspec

from frontend.openai.structured import structured_outputs_of
from ipc.errors import RequestError
from ipc.sampling_params import SamplingParams, check_priority

logger = logging.getLogger(__name__)


class StreamOptions(msgspec.Struct, kw_only=True):
    """`continuous_usage_stats` asks for usage in every chunk and needs include_usage, as in vLLM."""
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """What chat and completions share. None means the default everywhere; names are OpenAI's, then vLLM's."""
    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None    # wins over max_tokens
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None  # by token id
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    logits_processors: list[str] | None = None  # names that the server knows
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | bool | str | None = None  # vLLM's older names of the same
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = None          # of each prompt token and this many likeliest; not with stream
    return_token_ids: bool | None = None        # those of the prompt and of the output
    return_tokens_as_token_ids: bool | None = None      # log-probabilities name tokens token_id:17
    truncate_prompt_tokens: int | None = None   # only so many last tokens of a prompt are used; -1: as many as fit
    truncation_side: str | None = None          # "right": the first ones are used instead
    priority: int | None = None                 # lower runs first
    cache_salt: str | None = None               # requests with different ones share no cached blocks
    request_id: str | None = None               # as the header x-request-id, which wins
    return_timings: bool | None = None          # where the time went, in usage and the header Server-Timing
    # Accepted without effect: labels and hints for whoever runs or bills a service.
    user: Any = None
    session_id: Any = None
    store: Any = None
    metadata: Any = None
    parallel_tool_calls: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None


class ChatRequest(GenerationRequest, kw_only=True):
    """POST /v1/chat/completions. Messages stay as sent: what is inside them is the chat template's to judge."""
    messages: list[dict[str, Any]]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None             # needs logprobs
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None     # false: at most one call, where a grammar enforces calls
    documents: list[dict[str, Any]] | None = None   # where the model's template shows some
    reasoning_effort: str | None = None         # where the model's template has levels, or can turn thoughts off
    include_reasoning: bool | None = None       # false: what the model thinks is left out


class CompletionRequest(GenerationRequest, kw_only=True):
    """POST /v1/completions. `prompt`: a string, strings, token ids, or lists of token ids."""
    prompt: msgspec.Raw
    add_special_tokens: bool | None = None
    logprobs: int | None = None
    echo: bool | None = None                    # the prompt, and its log-probabilities, come first


# Documented by OpenAI or vLLM, not supported yet: the values besides null that ask for nothing. Anything else is a 400
# that names the field. A name that has a struct field is supported there, whatever this table says.
NeutralValues = dict[str, tuple[Any, ...]]
NEUTRAL_VALUES: NeutralValues = {
    # OpenAI
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM
    "add_generation_prompt": (),
    "add_special_tokens": (False,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "ec_transfer_params": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_reasoning": (True,),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "media_io_kwargs": ({},),
    "min_new_tokens": (0,),
    "mm_payload": ("tensors",),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": (),
    "repetition_detection": (),
    "repetition_penalty": (1,),
    "return_mm_kwargs": (False,),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "structured_outputs": (),
    "thinking_token_budget": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
}

MAX_NAMED_FIELDS = 20                           # in the header x-ignored-fields
MAX_FIELD_CHARS = 64

R = TypeVar("R", bound=GenerationRequest)
S = TypeVar("S", bound=msgspec.Struct)

_read_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_read_any = msgspec.json.Decoder().decode
_sampling_names = [name for name in SamplingParams.__struct_fields__
                   if name in GenerationRequest.__struct_fields__ and name not in ("max_tokens", "structured_outputs")]
_logged_names: set[str] = set()


def decode(cls: type[R], body: bytes) -> tuple[R, list[str]]:
    """The request and the names of fields that nobody documents.

    Raises RequestError for JSON that is broken, a field of the wrong type, and a field that cannot be honoured.
    """
    request, ignored = decode_fields(cls, body, NEUTRAL_VALUES)
    _check_stream_options(request)
    if request.stream and request.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs is given and stream is true; they do not go together: leave one out",
                           "prompt_logprobs")
    check_priority(request.priority)
    return request, ignored


@functools.cache
def _decoder(cls: type[S]) -> msgspec.json.Decoder[S]:
    return msgspec.json.Decoder(cls)


@functools.cache
def _field_names(cls: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(cls.__struct_encode_fields__)


def decode_fields(cls: type[S], body: bytes, neutral_values: NeutralValues) -> tuple[S, list[str]]:
    """`decode` of any body, with its table of fields that are documented but not supported."""
    try:
        fields = _read_fields(body)
    except msgspec.ValidationError as exc:
        raise RequestError(f"the request body must be a JSON object: {exc}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise RequestError(f"the request body is not valid JSON: {exc}") from None
    ignored = []
    for name in fields:
        if name in _field_names(cls):
            continue
        neutral = neutral_values.get(name)
        if neutral is None:
            ignored.append(name)
        else:
            _refuse_unless_neutral(name, fields[name], neutral)
    try:
        return _decoder(cls).decode(body), ignored
    except msgspec.ValidationError as exc:
        raise field_error(exc) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise RequestError(f"the request body is not valid JSON: {exc}") from None


def field_error(exc: msgspec.ValidationError, prefix: str = "") -> RequestError:
    """A type error with the field as its `param`: `messages[0].content: expected str, got int`.

    `prefix` names the field when only its value was decoded.
    """
    text, _, path = str(exc).partition(" - at `")
    param = prefix + path.removesuffix("`").removeprefix("$")
    param = param.removeprefix(".")
    missing = re.fullmatch(r"Object missing required field `(\w+)`", text)
    if missing:
        param = f"{param}.{missing[1]}" if param else missing[1]
        return RequestError(f"{param} is missing", param)
    text = text.replace("`", "").replace("Expected", "expected").replace("Number", "number")
    return RequestError(f"{param}: {text}", param or None)


def _refuse_unless_neutral(name: str, raw: msgspec.Raw, neutral: tuple[Any, ...]) -> None:
    try:
        value = _read_any(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise RequestError(f"{name} is not valid JSON: {exc}", name) from None
    # True == 1 in Python, and `logprobs: 1` is not `logprobs: true`.
    if value is None or any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutral):
        return
    text = bytes(raw)
    shown = text[:60].decode("utf-8", "replace") + ("..." if len(text) > 60 else "")
    fix = "".join(f" or send {msgspec.json.encode(item).decode()}" for item in neutral[:1])
    raise RequestError(f"{name} is {shown}, which this server does not support yet; leave it out{fix}", name)


def _check_stream_options(request: GenerationRequest) -> None:
    options = request.stream_options
    if options is None:
        return
    if not request.stream:
        raise RequestError("stream_options is only allowed when stream is true", "stream_options")
    if options.include_obfuscation:
        raise RequestError("stream_options.include_obfuscation is true, which this server does not support; leave it "
                           "out or send false", "stream_options.include_obfuscation")


def note_ignored(request_id: str, cls: type[msgspec.Struct], names: list[str]) -> bytes:
    """Logs ignored names, each once per process, and returns the value of the header x-ignored-fields."""
    safe = [re.sub(r"[^\x21-\x2b\x2d-\x7e]", "?", name[:MAX_FIELD_CHARS]) for name in names[:MAX_NAMED_FIELDS]]
    for name in safe:
        if name in _logged_names or len(_logged_names) >= 1000:
            continue
        _logged_names.add(name)
        near = []
        if name not in NEUTRAL_VALUES:          # else it is well written, and for another endpoint
            near = difflib.get_close_matches(name, _field_names(cls) | NEUTRAL_VALUES.keys(), n=1)
        logger.info("%s: unknown field %s is ignored%s", request_id, name, f"; did you mean {near[0]}?" if near else "")
    if len(names) > len(safe):
        safe.append(f"and-{len(names) - len(safe)}-more")
    return ",".join(safe).encode("ascii")


def sampling_params(request: GenerationRequest, default_max_tokens: int | None) -> SamplingParams:
    """The checked parameters of one request. Raises RequestError that names the caller's field."""
    given: dict[str, Any] = {name: value for name in _sampling_names
                             if (value := getattr(request, name)) is not None}
    source = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = getattr(request, source)
    given["max_tokens"] = default_max_tokens if max_tokens is None else max_tokens
    renamed = {"max_tokens": source}
    if isinstance(request, ChatRequest):
        renamed["logprobs"] = "top_logprobs"
        if request.top_logprobs and not request.logprobs:
            raise RequestError(f"top_logprobs is {request.top_logprobs} but logprobs is not true; "
                               "add \"logprobs\": true",
                               "top_logprobs")
        given["logprobs"] = (request.top_logprobs or 0) if request.logprobs else None
    elif isinstance(request, CompletionRequest):
        given["logprobs"] = request.logprobs
        if request.echo:
            given.setdefault("prompt_logprobs", request.logprobs)
            if max_tokens == 0:                 # one is made, and dropped
                given["max_tokens"] = 1
    given["structured_outputs"] = structured_outputs_of(request)
    try:
        return SamplingParams(**given)
    except RequestError as exc:
        theirs = renamed.get(exc.param or "", exc.param)
        if theirs == exc.param or exc.param is None:
            raise
        raise RequestError(str(exc).replace(exc.param, theirs or "", 1), theirs) from None
