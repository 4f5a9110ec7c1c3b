"""LLM on real processes: offline batches from any thread, inside a running loop, and without a close."""
from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from frontend import LLM, SamplingParams
from ipc.errors import ConfigError, RequestError
from tests.processes.tools import ENDLESS_TOKENS, OPTIONS, assert_nothing_left, run_script, survivors, wait_until
from bench.tiny_model import MAX_MODEL_LEN

pytestmark = pytest.mark.timeout(60)

ENDLESS = SamplingParams(temperature=0, max_tokens=ENDLESS_TOKENS, ignore_eos=True)


def greedy(max_tokens: int = 12) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


@pytest.fixture(scope="module")
def offline(tiny_model: str) -> Iterator[LLM]:
    """An LLM whose thread of birth is gone: the kernel's death signal follows the thread that spawned a process."""
    born: list[LLM] = []
    thread = threading.Thread(target=lambda: born.append(LLM(tiny_model, **OPTIONS, max_num_seqs=4)))
    thread.start()
    thread.join(60)
    [llm] = born
    yield llm
    pids = llm._llm.pids
    llm.close()
    llm.close()
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), 4)


def test_a_list_of_prompts_is_answered_in_its_order(offline: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    prompts = [f"Prompt {index} " * (index + 1) for index in range(9)]
    params = [greedy(20 - 2 * index) for index in range(9)]            # the last ones finish first
    outputs = offline.generate(prompts, params)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [20 - 2 * index for index in range(9)]
    assert "9/9" in capfd.readouterr().err                             # the progress bar
    for prompt, one, output in zip(prompts, params, outputs):
        assert offline.generate(prompt, one, use_tqdm=False)[0].outputs == output.outputs
    assert capfd.readouterr().err == ""
    assert offline.stats()["num_running"] == 0


@pytest.mark.parametrize(("prompts", "options", "text"), [
    (None, {}, "prompts is None"), (5, {}, "prompts is 5"), (["a"], {"priority": 1}, "priority is a int"),
    (["a"], {"sampling_params": {"max_tokens": 1}}, "sampling_params is a dict")])
def test_what_is_no_list_is_refused_by_name(offline: LLM, prompts: Any, options: Any, text: str) -> None:
    with pytest.raises(RequestError, match=text):
        offline.generate(prompts, use_tqdm=False, **options)


def test_it_works_inside_a_running_loop(offline: LLM) -> None:
    async def cell() -> list[int]:
        return offline.generate([[5, 6, 7]], greedy(), use_tqdm=False)[0].outputs[0].token_ids
    assert asyncio.run(cell()) == offline.generate([5, 6, 7], greedy(), use_tqdm=False)[0].outputs[0].token_ids


def test_one_prompt_as_a_dict_is_one_prompt(offline: LLM) -> None:
    """Its keys were taken for prompts."""
    ids = offline.tokenizer.encode_ids("Hi there", True)
    plain = offline.generate(ids, greedy(), use_tqdm=False)
    for prompts in ({"prompt": "Hi there"}, [{"prompt_token_ids": ids}]):
        outputs = offline.generate(prompts, greedy(), use_tqdm=False)       # type: ignore[arg-type]
        assert [output.outputs for output in outputs] == [plain[0].outputs]
    assert offline.embed({"prompt": "Hi there"}) == offline.embed(ids)


def test_priorities_are_one_for_each_prompt(offline: LLM) -> None:
    assert len(offline.generate(["a", "b"], greedy(), priority=[2, 1], use_tqdm=False)) == 2
    with pytest.raises(RequestError, match="2 prompts but 1 priorities"):
        offline.generate(["a", "b"], greedy(), priority=[1], use_tqdm=False)
    with pytest.raises(RequestError, match="priority is 1099511627776"):
        offline.generate(["a"], greedy(), priority=[1 << 40], use_tqdm=False)


def test_the_cache_is_reset_and_the_engine_sleeps_and_wakes(offline: LLM) -> None:
    prompt = list(range(5, 69))
    offline.generate(prompt, greedy(2), use_tqdm=False)
    assert offline.generate(prompt, greedy(2), use_tqdm=False)[0].num_cached_tokens > 0
    offline.reset_prefix_cache()
    first = offline.generate(prompt, greedy(2), use_tqdm=False)[0]
    offline.sleep(1)
    with pytest.raises(ValueError, match="sleep"):
        offline.sleep(1)
    offline.wake_up()
    assert first.num_cached_tokens == 0
    assert offline.generate(prompt, greedy(2), use_tqdm=False)[0].outputs == first.outputs


def test_it_chats(offline: LLM) -> None:
    conversation = [{"role": "user", "content": "Hi"}]
    one, = offline.chat(conversation, greedy(), use_tqdm=False)
    two = offline.chat([conversation] * 2, greedy(), use_tqdm=False)
    assert [output.outputs for output in two] == [one.outputs] * 2


def test_a_refused_prompt_is_named_and_the_others_are_aborted(offline: LLM) -> None:
    with pytest.raises(RequestError, match=f"prompt 2: .*{MAX_MODEL_LEN + 88}"):
        offline.generate(["a", "b", [1] * (MAX_MODEL_LEN + 88), "d"], ENDLESS, use_tqdm=False)
    wait_until(lambda: offline.stats()["num_running"] == 0)
    stats = offline.stats()
    assert stats["num_free_blocks"] == stats["num_blocks"] == 512
    with pytest.raises(RequestError, match="2 prompts but 1 sampling_params"):
        offline.generate(["a", "b"], [greedy()])
    with pytest.raises(RequestError, match="n is 0"):
        SamplingParams(n=0)


def test_a_start_that_fails_leaves_no_thread(temp: str, tiny_model: str) -> None:
    before = threading.active_count()
    with pytest.raises(ConfigError, match="block-size"):
        LLM(tiny_model, block_size=0)
    wait_until(lambda: threading.active_count() <= before)


def test_a_collection_inside_its_own_loop_ends_an_llm_without_a_deadlock(tiny_model: str, temp: str) -> None:
    """The garbage collector runs in whichever thread it pleases, also in the one that must serve the close."""
    llm: Any = LLM(tiny_model, **OPTIONS)
    llm.itself = llm                                    # only a collection ends this one
    loop, thread = llm._loop, llm._thread
    assert len(survivors(temp)) == 3
    del llm
    loop.call_soon_threadsafe(gc.collect)
    thread.join(10)
    assert not thread.is_alive()
    assert_nothing_left(temp)


def test_a_script_that_forgets_to_close_ends_cleanly(tiny_model: str, temp: str, tmp_path: Path) -> None:
    script = tmp_path / "user.py"
    script.write_text("from frontend import LLM, SamplingParams\n"
                      f"llm = LLM({tiny_model!r}, num_gpu_blocks_override=512, attention_backend='cpu')\n"
                      "output, = llm.generate('Hi', SamplingParams(max_tokens=3, ignore_eos=True))\n"
                      "print(len(output.outputs[0].token_ids))\n")
    result = run_script(script, temp)
    assert (result.returncode, result.stdout) == (0, "3\n"), result.stderr
    assert "Traceback" not in result.stderr and "Exception" not in result.stderr
    assert_nothing_left(temp)
