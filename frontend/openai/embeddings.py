"""POST /v1/embeddings: a text, texts, token ids or lists of them; for each a vector of length 1.

The vector is the hidden state of the last token (or the mean of all, `pooling`: "mean"), computed in the same batches
as everything else. Knows no models: whether its hidden states are any use as embeddings is the caller's choice.
"""
from __future__ import annotations

import asyncio
import base64
import secrets
from typing import Any

import msgspec

from frontend.openai.completions import checked_prompt, parse_prompt
from frontend.openai.engine import EngineLike
from frontend.openai.exchange import Exchange
from frontend.openai.generation import check_engine, check_model, truncated
from frontend.openai.limits import check_choices
from frontend.openai.protocol import NeutralValues
from ipc.errors import RequestError
from ipc.sampling_params import check_priority

NEUTRAL_VALUES: NeutralValues = {
    "dimensions": (), "embed_dtype": ("float32",), "endianness": ("native", "little"), "padding": ("do_not_pad",),
    "mm_processor_kwargs": ({},),
    "messages": (), "add_generation_prompt": (False,), "chat_template": (), "chat_template_kwargs": ({},),  # chats
    "continue_final_message": (False,), "media_io_kwargs": ({},)}


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """The body. Names are OpenAI's, then vLLM's."""
    input: msgspec.Raw
    model: str | None = None
    encoding_format: str | None = None          # "float" or "base64" (little-endian float32)
    pooling: str | None = None                  # "last" or "mean"
    normalize: bool | None = None
    use_activation: bool | None = None          # vLLM's name of it
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None   # only so many last tokens are used; -1: as many as fit
    truncation_side: str | None = None          # "right": the first ones
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    user: Any = None


class Embedding(msgspec.Struct):
    """One vector."""
    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingUsage(msgspec.Struct):
    """Tokens of one call."""
    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(msgspec.Struct):
    """The answer of POST /v1/embeddings."""
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: str = "list"


async def create_embeddings(exchange: Exchange, engine: EngineLike) -> None:
    """Answer one call. If one input is refused, the others are aborted."""
    check_engine(engine)
    request, _ = await exchange.read_fields(EmbeddingRequest, NEUTRAL_VALUES)
    check_model(engine, request.model)
    if request.encoding_format not in (None, "float", "base64"):
        raise RequestError(f"encoding_format is {request.encoding_format!r}; allowed are float and base64",
                           "encoding_format")
    try:
        raw = parse_prompt(request.input)
    except RequestError as exc:
        raise RequestError(str(exc).replace("prompt", "input", 1), "input") from None
    priority = check_priority(request.priority)
    check_choices(1, len(raw), exchange.limits.max_choices)
    add_special_tokens = request.add_special_tokens is not False
    prompts = [checked_prompt(engine, prompt, index, add_special_tokens) for index, prompt in enumerate(raw)]
    if request.truncate_prompt_tokens is not None or request.truncation_side is not None:
        prompts = [truncated(engine.tokenizer.encode(prompt, add_special_tokens) if isinstance(prompt, str) else prompt,
                             request.truncate_prompt_tokens, engine, 1, request.truncation_side) for prompt in prompts]
    normalize = request.use_activation if request.normalize is None else request.normalize
    name = f"embd-{secrets.token_hex(16)}"
    tasks = [asyncio.create_task(engine.encode(
        prompt, pooling=request.pooling or "last", normalize=normalize is not False,
        request_id=f"{name}-{index}", priority=priority, add_special_tokens=add_special_tokens,
        cache_salt=exchange.cache_salt(request.cache_salt))) for index, prompt in enumerate(prompts)]
    try:
        async with exchange.watch():
            results = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    num_tokens = sum(len(result.prompt_token_ids) for result in results)
    is_base64 = request.encoding_format == "base64"
    answer = EmbeddingResponse(
        [Embedding(index, base64.b64encode(result.outputs.data.astype("<f4").tobytes()).decode() if is_base64
                   else result.outputs.data.tolist()) for index, result in enumerate(results)],
        engine.served_model_name, EmbeddingUsage(num_tokens, num_tokens))
    await exchange.reply(200, msgspec.json.encode(answer))
