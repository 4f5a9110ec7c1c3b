"""POST /v1/completions: a string, strings, token ids or lists of them, each one prompt of the call."""
from __future__ import annotations

import re
import time
from array import array
from collections.abc import Sequence

import msgspec

from frontend.openai.answers import CompletionChoice, CompletionResponse
from frontend.openai.engine import EngineLike
from frontend.openai.exchange import Exchange
from frontend.openai.generation import (
    Pusher,
    check_engine,
    check_model,
    collect_answer,
    make_head,
    stream_answer,
    truncated,
)
from frontend.openai.limits import check_choices
from frontend.openai.logprobs import ChoiceLogprobs, Shape, encode_logprobs, shaped
from frontend.openai.protocol import CompletionRequest, field_error, sampling_params
from frontend.openai.token_details import ids_of, prompt_ids_of, prompt_logprobs_of
from ipc.errors import RequestError

DEFAULT_MAX_TOKENS = 16         # OpenAI's

_read_strings = msgspec.json.Decoder(list[str]).decode
_read_tokens = msgspec.json.Decoder(list[int]).decode
_read_token_lists = msgspec.json.Decoder(list[list[int]]).decode


async def create_completion(exchange: Exchange, engine: EngineLike) -> None:
    """Answer one call, streamed or not."""
    check_engine(engine)
    request, _ = await exchange.read_request(CompletionRequest)
    check_model(engine, request.model)
    raw_prompts = parse_prompt(request.prompt)
    n = 1 if request.n is None else request.n
    check_choices(n, len(raw_prompts), exchange.limits.max_choices)
    params = sampling_params(request, DEFAULT_MAX_TOKENS)
    add_special_tokens = request.add_special_tokens is not False
    prompts = [checked_prompt(engine, prompt, index, add_special_tokens) for index, prompt in enumerate(raw_prompts)]
    if request.truncate_prompt_tokens is not None or request.truncation_side is not None:
        prompts = [truncated(engine.tokenizer.encode(prompt, add_special_tokens) if isinstance(prompt, str) else prompt,
                             request.truncate_prompt_tokens, engine, params.max_tokens, request.truncation_side)
                   for prompt in prompts]
    head = make_head("cmpl", int(time.time()), engine)
    pusher = Pusher() if request.stream and len(prompts) == 1 and not request.echo else None
    streams = [shaped(engine.generate(prompt, params, request_id=f"{head.id}-{index}", priority=request.priority or 0,
                               cache_salt=exchange.cache_salt(request.cache_salt),
                               output_kind="delta" if request.stream else "final",
                               add_special_tokens=add_special_tokens, sink=pusher), _shape(engine, request, prompt))
               for index, prompt in enumerate(prompts)]
    writers = [ChoiceLogprobs(engine.tokenizer, request.logprobs, params.skip_special_tokens,
                              bool(request.return_tokens_as_token_ids))
               for _ in range(n * len(prompts))] if request.logprobs is not None else []
    if request.stream:
        await stream_answer(exchange, request, head, False, streams, n, (
            lambda index, choice: encode_logprobs(writers[index].completion(choice.token_ids, choice.logprobs or [])))
            if writers else None, None, pusher)
        return
    choices, counter, last = await collect_answer(exchange, streams, n)
    with_ids = bool(request.return_token_ids)
    answer = CompletionResponse(head.id, head.created, head.model, head.fingerprint, [
        CompletionChoice(index, choice.text, reason, choice.stop_reason,
                         writers[index].completion(choice.token_ids, choice.logprobs or []) if writers else None,
                         prompt_logprobs_of(last[index // n], request.prompt_logprobs is not None),
                         prompt_ids_of(last[index // n], with_ids), ids_of(choice, with_ids))
        for index, (choice, reason) in enumerate(choices)], counter.usage(exchange.returns_timings))
    await exchange.reply(200, msgspec.json.encode(answer))


def _shape(engine: EngineLike, request: CompletionRequest, prompt: str | bytes) -> Shape:
    max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    echo = bool(request.echo)
    text = ""
    if echo:
        skip = request.skip_special_tokens is not False
        text = prompt if isinstance(prompt, str) else engine.tokenizer.decode(prompt, skip)
    return Shape(echo, not (echo and max_tokens == 0), text)


def parse_prompt(raw: msgspec.Raw) -> Sequence[str | list[int]]:
    """The prompts of a call. The first element decides which kind of list it is.

    Raises RequestError that names the element.
    """
    text = bytes(raw).strip()
    found = re.match(rb"\[\s*(\S)", text)
    inner = found[1] if found else b""
    try:
        if text[:1] == b'"':
            return _read_strings(b"[" + text + b"]")
        if inner == b'"':
            return _read_strings(text)
        if inner == b"[":
            return _read_token_lists(text)
        if inner and inner in b"-0123456789":
            return [_read_tokens(text)]
    except msgspec.ValidationError as exc:
        raise field_error(exc, "prompt") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise RequestError(f"prompt is not valid JSON: {exc}", "prompt") from None
    if inner == b"]":
        raise RequestError("prompt is an empty list; send at least one prompt of at least one token", "prompt")
    raise RequestError("prompt must be a string, a list of strings, a list of token ids or a list of such lists",
                       "prompt")


def checked_prompt(engine: EngineLike, prompt: str | list[int], index: int, add_special_tokens: bool) -> str | bytes:
    """A prompt of at least one token; token ids become int32 bytes. Length is the engine's to check.

    Raises RequestError. Ids are compared with the width of the logits, not with the tokenizer.
    """
    if isinstance(prompt, str):
        if not prompt and not engine.tokenizer.encode("", add_special_tokens):
            raise RequestError(f"prompt {index} is empty, and this model's tokenizer adds no token of its own; send at "
                               "least one token", "prompt")
        return prompt
    if not prompt:
        raise RequestError(f"prompt {index} is an empty list of token ids; send at least one", "prompt")
    for token in (min(prompt), max(prompt)):
        if not 0 <= token < engine.vocab_size:
            raise RequestError(f"prompt {index} contains token id {token}; the model's ids are 0 to "
                               f"{engine.vocab_size - 1}", "prompt")
    return array("i", prompt).tobytes()
