"""LLM: offline batches. Its engine's loop runs in a thread of its own, so it works inside a notebook's loop too."""
from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, cast

from tqdm import tqdm

from frontend.async_llm import AsyncLLM
from frontend.outputs import PoolingRequestOutput, RequestOutput
from frontend.prompts import Prompt
from frontend.tokenizer import Tokenizer
from ipc.errors import RequestError, shown
from ipc.sampling_params import SamplingParams

Conversations = list[dict[str, Any]] | list[list[dict[str, Any]]]


class LLM:
    """An engine for lists of prompts. Options as AsyncLLM. Close it, or use it as a context manager."""

    def __init__(self, model: str, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="LLM", daemon=True)
        self._thread.start()
        self._llm = AsyncLLM(model, **options)
        self._finalizer = weakref.finalize(self, _close, self._llm, self._loop, self._thread)
        try:
            self._run(self._llm.start())
        except BaseException:
            self._finalizer()
            raise

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return run_on(self._loop, coroutine)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._llm.tokenizer

    def generate(self, prompts: Prompt | Sequence[Prompt],
                 sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *,
                 use_tqdm: bool = True, priority: Sequence[int] | None = None) -> list[RequestOutput]:
        """Run all prompts, batched by the engine; results in the order of the prompts.

        prompts: texts, lists of token ids, or dicts (prompts.py); sampling_params: one for all, or one each; priority:
        one each, lower runs first; use_tqdm: show progress on stderr. Raises RequestError naming the prompt's place
        when one is refused; the others are aborted then.
        """
        many = prompt_list(prompts)
        params = sampling_params
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(many)
        for name, one_each in (("sampling_params", params), ("priority", priority)):
            if one_each is not None and not isinstance(one_each, Sequence):
                raise RequestError(f"{name} is a {type(one_each).__name__}; give a list with one each", name)
        if len(params) != len(many):
            raise RequestError(f"{len(many)} prompts but {len(params)} sampling_params; give one for all or one "
                               "each")
        if priority is not None and len(priority) != len(many):
            raise RequestError(f"{len(many)} prompts but {len(priority)} priorities; give one each", "priority")
        levels = list(priority or [0] * len(many))
        result: list[RequestOutput] = self._run(self._generate_all(many, list(params), levels, use_tqdm))
        return result

    def chat(self, conversations: Conversations,
             sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *, use_tqdm: bool = True,
             **render: Any) -> list[RequestOutput]:
        """`generate` for one conversation or a list of them; `render`: options of AsyncLLM.render_chat, as tools."""
        many = conversations if conversations and isinstance(conversations[0], list) else [conversations]
        prompts: list[Prompt] = [
            memoryview(self._llm.render_chat(messages, **render)).cast("i").tolist()        # type: ignore[arg-type]
            for messages in many]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def encode(self, prompts: Prompt | Sequence[Prompt], *, pooling: str = "last",
               normalize: bool = True) -> list[PoolingRequestOutput]:
        """A vector for each prompt, in their order. See AsyncLLM.encode."""
        async def run() -> list[PoolingRequestOutput]:
            return await asyncio.gather(*[self._llm.encode(prompt, pooling=pooling, normalize=normalize)
                                          for prompt in prompt_list(prompts)])
        result: list[PoolingRequestOutput] = self._run(run())
        return result

    def embed(self, prompts: Prompt | Sequence[Prompt], **options: Any) -> list[list[float]]:
        """`encode`, as lists of numbers."""
        return [output.outputs.embedding for output in self.encode(prompts, **options)]

    async def _generate_all(self, prompts: list[Prompt], params: list[SamplingParams], priority: list[int],
                            use_tqdm: bool) -> list[RequestOutput]:
        bar = tqdm(total=len(prompts), desc="requests", disable=not use_tqdm)
        tasks = [asyncio.create_task(self._generate_one(index, *one, bar))
                 for index, one in enumerate(zip(prompts, params, priority))]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            bar.close()

    async def _generate_one(self, index: int, prompt: Prompt, params: SamplingParams, priority: int,
                            bar: Any) -> RequestOutput:
        last: RequestOutput | None = None
        try:
            async for output in self._llm.generate(prompt, params, output_kind="final", priority=priority):
                last = output
        except RequestError as error:
            raise RequestError(f"prompt {index}: {error}", error.param) from None
        if last is None:
            raise RuntimeError(f"prompt {index} ended without an output")
        bar.update()
        return last

    def stats(self) -> dict[str, Any]:
        """Totals of the engine core since its start."""
        result: dict[str, Any] = self._run(self._llm.stats())
        return result

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes that no request holds."""
        self._run(self._llm.reset_prefix_cache())

    def sleep(self, level: int = 1) -> None:
        """See AsyncLLM.sleep: 1 gives back the pool's memory, 2 the weights' too."""
        self._run(self._llm.sleep(level))

    def wake_up(self) -> None:
        """After sleep."""
        self._run(self._llm.wake_up())

    def start_profile(self) -> None:
        """See AsyncLLM.start_profile."""
        self._run(self._llm.start_profile())

    def stop_profile(self) -> dict[str, Any]:
        """See AsyncLLM.stop_profile."""
        result: dict[str, Any] = self._run(self._llm.stop_profile())
        return result

    def close(self) -> None:
        """End the engine. Idempotent."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, or several, as a list. Raises RequestError for what is neither."""
    is_one = isinstance(prompts, (str, dict, bytes)) or (
        isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], int))
    if is_one:
        return [cast(Prompt, prompts)]
    if not isinstance(prompts, Iterable):
        raise RequestError(f"prompts is {shown(prompts)}; give a text, token ids, or a list of such prompts", "prompts")
    return list(cast(Iterable[Prompt], prompts))


def run_on(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Wait for a coroutine on a loop that runs in another thread. An interrupted wait cancels it."""
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def _close(llm: AsyncLLM, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Must not refer to the LLM, or it would never be collected."""
    if loop.is_closed():
        return
    if threading.current_thread() is thread:    # a garbage collection in the loop itself, which cannot wait
        threading.Thread(target=_close, args=(llm, loop, thread), name="LLM close").start()
        return
    if thread.is_alive():
        asyncio.run_coroutine_threadsafe(llm.close(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
    loop.close()
