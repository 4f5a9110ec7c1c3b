"""AsyncLLM on real processes: every way in, and every way out of a request. How engines end: test_lifetimes.py."""
from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest

from frontend import AsyncLLM, SamplingParams
from frontend.outputs import OutputKind, RequestOutput
from ipc.errors import ConfigError, EngineDeadError, RequestError
from tests.conftest import RunningEngine
from tests.processes.tools import (ENDLESS_TOKENS, OPTIONS, LoopThread, assert_nothing_left, run_dirs, run_script,
                                   survivors, wait_idle)
from bench.tiny_model import MAX_MODEL_LEN, VOCAB

pytestmark = pytest.mark.timeout(60)

ENDLESS = SamplingParams(temperature=0, max_tokens=ENDLESS_TOKENS, ignore_eos=True)


def greedy(max_tokens: int = 12, **changes: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **changes)


async def collect(llm: AsyncLLM, prompt: Any, params: SamplingParams, kind: OutputKind = "cumulative",
                  **options: Any) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, params, output_kind=kind, **options)]


async def finish(llm: AsyncLLM, prompt: Any, params: SamplingParams) -> RequestOutput:
    [output] = await collect(llm, prompt, params, "final")
    return output


# ---------------------------------------------------------------- one request

def test_text_ids_and_packed_ids_are_the_same_prompt(engine: RunningEngine) -> None:
    async def run() -> None:
        text = "The tokens of the day"
        packed = engine.llm.tokenizer.encode(text, True)
        ids = memoryview(packed).cast("i").tolist()
        assert len(ids) < len(text)                     # merges were applied
        first, *others = [await finish(engine.llm, prompt, greedy()) for prompt in (text, ids, packed)]
        assert first.prompt_token_ids == ids and first.prompt == text and len(first.outputs[0].token_ids) == 12
        assert [other.outputs[0] for other in others] == [first.outputs[0]] * 2
    engine.loop.run(run())


def test_a_prompt_may_be_a_dict_of_text_or_ids(engine: RunningEngine) -> None:
    async def run() -> None:
        plain = await finish(engine.llm, "The tokens of the day", greedy())
        ids = plain.prompt_token_ids
        asked: list[Any] = [{"prompt": "The tokens of the day"}, {"prompt_token_ids": ids},
                            {"prompt_token_ids": ids, "prompt": "t"}]
        found = [await finish(engine.llm, prompt, greedy()) for prompt in asked]
        assert [output.prompt for output in found] == [plain.prompt, None, "t"]
        assert all(output.outputs == plain.outputs and output.prompt_token_ids == ids for output in found)
        assert found[-1].num_cached_tokens > 0
        salted = await finish(engine.llm, {"prompt_token_ids": ids, "cache_salt": "mine"}, greedy())
        assert salted.num_cached_tokens == 0 and salted.outputs == plain.outputs
        vector = await engine.llm.embed({"prompt_token_ids": ids})
        assert vector == await engine.llm.embed(ids)
    engine.loop.run(run())


def test_the_salt_of_a_dict_keeps_vectors_apart_too(engine: RunningEngine) -> None:
    async def run() -> None:
        ids = [7, 9, 11] * 20

        async def num_cached(prompt: Any) -> int:
            return (await engine.llm.encode(prompt)).num_cached_tokens
        salted = {"prompt_token_ids": ids, "cache_salt": "theirs"}
        await num_cached(ids)
        assert await num_cached(ids) > 0 and await num_cached(salted) == 0 and await num_cached(salted) > 0
    engine.loop.run(run())


def test_abort_ends_a_request_that_is_not_with_the_engine_yet(engine: RunningEngine) -> None:
    async def run() -> None:
        engine.llm.pause()
        try:
            asked = [asyncio.create_task(collect(engine.llm, "Go on", greedy(n=2), request_id=name))
                     for name in ("mine", "other")]
            await asyncio.sleep(0.01)
            await engine.llm.abort("mine")
            [last] = await asyncio.wait_for(asked[0], 10)
            assert [(choice.text, choice.finish_reason) for choice in last.outputs] == [("", "abort")] * 2
        finally:
            engine.llm.resume()
        assert (await asked[1])[-1].outputs[0].finish_reason == "length"
        await wait_idle(engine.llm)
    engine.loop.run(run())


@pytest.mark.parametrize(("options", "text"), [
    ({"priority": "high"}, "priority must be an integer"), ({"priority": 10 ** 5000}, "priority is an integer of"),
    ({"cache_salt": "\ud800"}, "cache_salt has an unpaired surrogate"), ({"cache_salt": 5}, "cache_salt must be text"),
    ({"sampling_params": {"max_tokens": 1}}, "sampling_params must be SamplingParams, not dict"),
    ({"prompt": [10 ** 5000]}, "contains an integer of"), ({"prompt": {"prompt": "a", "cache_salt": 3}}, "salt")])
def test_an_argument_of_the_wrong_kind_is_refused_by_name(engine: RunningEngine, options: Any, text: str) -> None:
    async def run() -> None:
        async for _ in engine.llm.generate(**{"prompt": "Go on"} | options):
            pass
    with pytest.raises(RequestError, match=text):
        engine.loop.run(run())


@pytest.mark.parametrize(("prompt", "text"), [
    ({}, "needs prompt or prompt_token_ids"), ({"prompt": None}, "needs prompt"), ({"text": "a"}, "text is not"),
    ({"prompt": 3}, "prompt must be text, not int"), ({"prompt": "a", "cache_salt": 1}, "cache_salt must be text"),
    ({"prompt_token_ids": "a b"}, "must be a list of token ids, not str"), ({"prompt_token_ids": [-1]}, "contains -1"),
    ({"prompt": "a", "multi_modal_data": {"image": 1}}, "multi_modal_data is not")])
def test_a_dict_that_is_no_prompt_is_refused_by_name(engine: RunningEngine, prompt: Any, text: str) -> None:
    with pytest.raises(RequestError, match=text):
        engine.loop.run(finish(engine.llm, prompt, greedy()))


@pytest.mark.parametrize("kind", ["delta", "final"])
def test_abort_ends_a_request_by_name_with_what_came_so_far(engine: RunningEngine, kind: Any) -> None:
    async def run() -> None:
        ended: list[RequestOutput] = []
        begun = asyncio.Event()

        async def read(name: str, length: int) -> None:
            params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, n=2 if name == "mine" else 1)
            async for output in engine.llm.generate("Go on", params, request_id=name, output_kind=kind):
                begun.set()
                if output.finished:
                    ended.append(output)

        mine = asyncio.create_task(read("mine", ENDLESS_TOKENS))
        if kind == "final":
            while not engine.llm._engine().streams:
                await asyncio.sleep(0.01)
        else:
            await begun.wait()
        await engine.llm.abort("nobody")
        other = asyncio.create_task(read("other", 30))
        await engine.llm.abort(["mine", "unknown"])
        await asyncio.gather(mine, other)
        by_name = {output.request_id: output for output in ended}
        assert {choice.finish_reason for choice in by_name["mine"].outputs} == {"abort"}
        assert by_name["other"].outputs[0].finish_reason == "length"
        await engine.llm.abort("mine")                      # once more: nothing
        await wait_idle(engine.llm)
    engine.loop.run(run())


def test_deltas_joined_equal_the_cumulative_and_the_final_text(engine: RunningEngine) -> None:
    async def run() -> None:
        params = SamplingParams(temperature=3.0, seed=5, max_tokens=40, ignore_eos=True)       # any bytes at all
        deltas, cumulative, final = [await collect(engine.llm, "Tell", params, kind)
                                     for kind in ("delta", "cumulative", "final")]
        whole = final[0].outputs[0]
        assert whole.text == engine.llm.tokenizer.decode(whole.token_ids) and len(whole.token_ids) == 40
        assert "".join(output.outputs[0].text for output in deltas) == whole.text
        assert sum((output.outputs[0].token_ids for output in deltas), []) == whole.token_ids
        for output in cumulative:
            assert whole.text.startswith(output.outputs[0].text)
        assert cumulative[-1].outputs == final[0].outputs
        assert [output.finished for output in deltas] == [False] * (len(deltas) - 1) + [True]
    engine.loop.run(run())


def test_a_stop_string_ends_the_text_before_it_and_the_engine_forgets_the_rest(engine: RunningEngine) -> None:
    async def run() -> None:
        text = (await finish(engine.llm, "Stop", greedy(40))).outputs[0].text
        stop = text[9:13]
        outputs = await collect(engine.llm, "Stop", greedy(40, stop=[stop, "never"]), "delta")
        streamed = "".join(output.outputs[0].text for output in outputs)
        assert streamed == text[:text.index(stop)]
        assert (outputs[-1].outputs[0].finish_reason, outputs[-1].outputs[0].stop_reason) == ("stop", stop)
        assert outputs[-1].usage_completion_tokens < 40
        await wait_idle(engine.llm)
    engine.loop.run(run())


def test_a_stop_token_ends_the_request(engine: RunningEngine) -> None:
    async def run() -> None:
        ids = (await finish(engine.llm, "Halt", greedy())).outputs[0].token_ids
        index = ids.index(ids[5])
        output = (await finish(engine.llm, "Halt", greedy(stop_token_ids=[ids[5]]))).outputs[0]
        assert output.token_ids == ids[:index + 1]
        assert (output.finish_reason, output.stop_reason) == ("stop", ids[5])
        assert output.text == engine.llm.tokenizer.decode(ids[:index])
    engine.loop.run(run())


def test_choices_of_a_request_differ_and_a_seed_repeats_them(engine: RunningEngine) -> None:
    async def run() -> None:
        params = SamplingParams(n=3, seed=11, max_tokens=10, ignore_eos=True)
        first, second = [await finish(engine.llm, "Choose", params) for _ in range(2)]
        texts = [choice.text for choice in first.outputs]
        assert [choice.index for choice in first.outputs] == [0, 1, 2] and len(set(texts)) == 3
        assert [choice.text for choice in second.outputs] == texts
        assert first.usage_completion_tokens == 30
        alone = await finish(engine.llm, "Choose", params.replace(n=1))
        assert alone.outputs[0].text == texts[0]
        other = await finish(engine.llm, "Choose", params.replace(seed=12, n=1))
        assert other.outputs[0].text not in texts
    engine.loop.run(run())


def test_a_repeated_prompt_is_served_from_the_cache_with_the_same_answer(engine: RunningEngine) -> None:
    async def run() -> None:
        prompt = "The same prompt, long enough for some blocks of sixteen tokens each."
        await engine.llm.reset_prefix_cache()
        first, second = [await finish(engine.llm, prompt, greedy()) for _ in range(2)]
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, (len(first.prompt_token_ids) - 1) // 16 * 16)
        assert second.num_cached_tokens >= 16 and second.outputs == first.outputs
        await engine.llm.reset_prefix_cache()
        assert (await finish(engine.llm, prompt, greedy())).num_cached_tokens == 0
    engine.loop.run(run())


def test_a_conversation_goes_through_the_models_template(engine: RunningEngine) -> None:
    async def run() -> None:
        messages = [{"role": "user", "content": "Hello"}]
        rendered = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
        outputs = [output async for output in engine.llm.chat(messages, greedy(), output_kind="final")]
        assert outputs[0].prompt_token_ids == engine.llm.tokenizer.encode_ids(rendered, False)
        assert outputs[0].prompt_token_ids[0] == 298
        begun = [*messages, {"role": "assistant", "content": "Wel"}]
        outputs = [output async for output in engine.llm.chat(
            begun, greedy(), output_kind="final", add_generation_prompt=False, continue_final_message=True)]
        assert outputs[0].prompt_token_ids == engine.llm.tokenizer.encode_ids(rendered + "Wel", False)
    engine.loop.run(run())


def test_seeded_sampling_gives_the_same_tokens_alone_and_in_a_batch(engine: RunningEngine) -> None:
    """On the reference backend, on which the session's engine runs."""
    async def run() -> None:
        requests = [(f"Request {index} " + "and more " * index, SamplingParams(
            temperature=1.0, top_p=0.95, top_k=50 * (index % 2), min_p=0.01, seed=index, max_tokens=16,
            ignore_eos=True)) for index in range(6)]
        alone = []
        for prompt, params in requests:
            await engine.llm.reset_prefix_cache()
            alone.append((await finish(engine.llm, prompt, params)).outputs[0].token_ids)
        await engine.llm.reset_prefix_cache()
        together = await asyncio.gather(*(finish(engine.llm, prompt, params) for prompt, params in requests))
        assert [output.outputs[0].token_ids for output in together] == alone
        assert len({tuple(tokens) for tokens in alone}) == 6
    engine.loop.run(run())


# ---------------------------------------------------------------- what cannot be

@pytest.mark.parametrize("prompt, params, text", [
    ([1] * MAX_MODEL_LEN, greedy(), rf"{MAX_MODEL_LEN}.*max_model_len is {MAX_MODEL_LEN}"),
    ([1] * (MAX_MODEL_LEN + 88), greedy(), rf"{MAX_MODEL_LEN + 88}.*{MAX_MODEL_LEN}"),
    ("", greedy(), "prompt"),
    ([], greedy(), "prompt"),
    ([VOCAB], greedy(), f"{VOCAB}; token ids are 0 to {VOCAB - 1}"),
    ([-1], greedy(), "-1"),
    ([True], greedy(), "True"),
    (7, greedy(), "int"),
    (b"123", greedy(), "int32"),
    (b"\xff\xff\xff\x7f", greedy(), str(VOCAB - 1)),
    ("x", greedy(stop_token_ids=[VOCAB]), f"stop_token_ids contains {VOCAB}"),
])
def test_a_request_that_cannot_be_served_is_refused_alone(engine: RunningEngine, prompt: Any, params: SamplingParams,
                                                          text: str) -> None:
    async def run() -> None:
        with pytest.raises(RequestError, match=text):
            await finish(engine.llm, prompt, params)
        await wait_idle(engine.llm)
    engine.loop.run(run())


def test_bad_options_are_refused_before_anything_starts(temp: str, tiny_model: str) -> None:
    async def start(**options: Any) -> None:
        async with AsyncLLM(tiny_model, **options):
            raise AssertionError("it started")

    for options, text in ((dict(max_num_seq=3), "unknown option max_num_seq; did you mean max_num_seqs"),
                          (dict(block_size=0), "block-size"),
                          (dict(max_num_seqs="many"), "max_num_seqs"), (dict(preemption_mode="swap"), "swap-space")):
        with pytest.raises(ConfigError, match=text):
            asyncio.run(start(**options))
    with pytest.raises(ConfigError, match="needs a model"):
        AsyncLLM()
    assert survivors(temp) == {}


def test_a_start_that_fails_says_why_and_leaves_nothing(temp: str, tiny_model: str) -> None:
    async def start() -> None:
        async with AsyncLLM(tiny_model, max_model_len=MAX_MODEL_LEN + 1, **OPTIONS):
            raise AssertionError("it started")

    with pytest.raises(EngineDeadError, match=f"max-model-len is {MAX_MODEL_LEN + 1}; the model's limit is"):
        asyncio.run(start())
    assert_nothing_left(temp)


def test_a_broken_tokenizer_is_an_error_that_names_its_file(temp: str, tiny_model: str, tmp_path: Path) -> None:
    for path in Path(tiny_model).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "tokenizer.json").write_text("{")

    async def start() -> None:
        async with AsyncLLM(str(tmp_path), **OPTIONS):
            raise AssertionError("it started")

    with pytest.raises((ConfigError, EngineDeadError), match="tokenizer.json"):       # host and worker both read it
        asyncio.run(start())
    assert_nothing_left(temp)


def test_an_engine_that_is_not_running_refuses_calls(tiny_model: str) -> None:
    llm = AsyncLLM(tiny_model)
    with pytest.raises(EngineDeadError, match="async with"):
        asyncio.run(finish(llm, "x", greedy()))
    asyncio.run(llm.close())


# ---------------------------------------------------------------- leaving early

def test_leaving_the_iterator_aborts_the_request_and_frees_its_blocks(engine: RunningEngine) -> None:
    async def run() -> None:
        stream = engine.llm.generate("Go on", ENDLESS)
        await anext(stream)
        assert (await engine.llm.stats())["num_running"] == 1
        await stream.aclose()
        stats = await engine.llm.stats()                # behind the abort on the same socket
        assert (stats["num_running"], stats["num_free_blocks"]) == (0, stats["num_blocks"])
        await wait_idle(engine.llm)
    engine.loop.run(run())


def test_cancelling_the_task_aborts_all_choices(engine: RunningEngine) -> None:
    async def run() -> None:
        task = asyncio.create_task(finish(engine.llm, "Go on", ENDLESS.replace(n=4, temperature=1.0)))
        while (await engine.llm.stats())["num_running"] < 4:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stats = await engine.llm.stats()
        assert (stats["num_running"], stats["num_waiting"], stats["num_free_blocks"]) == (0, 0, stats["num_blocks"])
        await wait_idle(engine.llm)
    engine.loop.run(run())


def test_a_dropped_iterator_is_aborted_too(engine: RunningEngine) -> None:
    async def leave() -> None:
        async for _ in engine.llm.generate("Go on", ENDLESS):
            break

    async def run() -> None:
        await leave()
        gc.collect()
        await wait_idle(engine.llm)
    engine.loop.run(run())


def test_many_requests_come_and_go_and_each_is_answered_or_freed(engine: RunningEngine) -> None:
    async def one(index: int) -> int:
        prompt, count, num_pieces = [index % VOCAB] * (1 + index % 40), 0, 0
        async for output in engine.llm.generate(prompt, greedy(1 + index % 9), output_kind="delta"):
            count, num_pieces = output.usage_completion_tokens, num_pieces + 1
            if index % 3 == 0 and num_pieces == 2:
                break
        return count

    async def run() -> None:
        counts = await asyncio.gather(*(one(index) for index in range(120)))
        assert [count for index, count in enumerate(counts) if index % 3] == [
            1 + index % 9 for index in range(120) if index % 3]
        gc.collect()
        await wait_idle(engine.llm)
        while engine.llm._client is not None and engine.llm._client.num_requests:      # nothing is kept of any
            await asyncio.sleep(0.01)
    engine.loop.run(run())


# ---------------------------------------------------------------- where it is called from

SCRIPT = '''
import asyncio
from frontend import AsyncLLM, SamplingParams

async def main():
    async with AsyncLLM(model={model!r}, num_gpu_blocks_override=512, attention_backend="cpu") as llm:
        async for output in llm.generate("The capital of France is", SamplingParams(max_tokens=8, temperature=0)):
            pass
        print(output.outputs[0].token_ids, output.finished)

asyncio.run(main())
'''


def test_a_script_without_a_main_guard_beside_folders_with_our_names(engine: RunningEngine, tiny_model: str, temp: str,
                                                                     tmp_path: Path) -> None:
    """The folders are in the working directory, not beside the script: children must not import from there."""
    for name in ("worker", "frontend", "ipc", "engine_core"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('imported from the working directory')")
        (tmp_path / name / "main.py").write_text("raise SystemExit('imported from the working directory')")
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "user.py").write_text(SCRIPT.format(model=tiny_model))
    result = run_script(scripts / "user.py", temp, cwd=tmp_path)
    alone = engine.loop.run(finish(engine.llm, "The capital of France is", SamplingParams(max_tokens=8, temperature=0)))
    assert (result.returncode, result.stdout) == (0, f"{alone.outputs[0].token_ids} True\n"), result.stderr
    assert_nothing_left(temp)


@pytest.mark.parametrize("name", ["ipc", "worker", "engine_core", "frontend"])
def test_a_folder_that_hides_one_of_ours_is_named(name: str, tmp_path: Path, temp: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    script = tmp_path / "user.py"
    script.write_text("import frontend.main" if name == "frontend" else "import frontend")
    result = run_script(script, temp)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    if name == "frontend":                              # it is theirs: nothing of ours runs
        assert "No module named 'frontend.main'" in last
    else:
        assert last.startswith(f"ImportError: package '{name}' is found at {tmp_path / name}")


def test_two_engines_at_once_one_in_a_notebooks_loop_one_in_a_coroutine(tiny_model: str, temp: str) -> None:
    """The second is closed while its requests run; the first does not notice."""
    loop = LoopThread()                                 # a notebook's: it runs before, during and after
    first = AsyncLLM(tiny_model, **OPTIONS)

    async def run() -> None:
        async with AsyncLLM(tiny_model, **OPTIONS) as second:
            assert set(first.pids).isdisjoint(second.pids) and len(run_dirs(temp)) == 2
            streams = [second.generate("Go on", ENDLESS) for _ in range(3)]
            for stream in streams:
                await anext(stream)
            await second.close()
            assert not set(second.pids) & set(survivors(temp)) and len(run_dirs(temp)) == 1
            for stream in streams:
                with pytest.raises(EngineDeadError, match="closed"):
                    while True:
                        await anext(stream)
            with pytest.raises(EngineDeadError, match="not running"):
                await finish(second, "x", greedy())
            assert second.status()["dead"] and second.status()["reason"] == "not running"

    try:
        loop.run(first.start())
        asyncio.run(run())
        assert len(loop.run(finish(first, "Still here", greedy())).outputs[0].token_ids) == 12
        loop.run(wait_idle(first))
    finally:
        loop.run(first.close())
        loop.close()
    assert_nothing_left(temp)


def test_cancelling_the_start_leaves_nothing(tiny_model: str, temp: str) -> None:
    async def run() -> None:
        starting = asyncio.create_task(AsyncLLM(tiny_model).start())
        while not survivors(temp):
            await asyncio.sleep(0.005)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert survivors(temp) == {}
    asyncio.run(run())
    assert_nothing_left(temp)
