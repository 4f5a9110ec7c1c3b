"""Capacity in words, and the nearest setting that fits."""
from __future__ import annotations

import pytest

from ipc.aliases import ALIASES
from ipc.capacity import capacity_text, count_text, flag_size, nearest_fit, size_text, weight_count, weights_warning
from ipc.model_config import from_hf_config

GIB = 1 << 30


@pytest.mark.parametrize(("size", "text"), [
    (0, "0 bytes"), (2048, "2 KiB"), (180 << 20, "180 MiB"), (int(15.26 * GIB), "15.3 GiB"), (200 * GIB, "200 GiB")])
def test_sizes_in_words(size: int, text: str) -> None:
    assert size_text(size) == text


@pytest.mark.parametrize(("count", "text"), [
    (512, "512"), (8192, "8k"), (4000, "4k"), (1296, "1.3k"), (129_600, "130k"), (131_072, "128k"),
    (1_310_000, "1.3M")])
def test_counts_in_words(count: int, text: str) -> None:
    assert count_text(count) == text


def test_a_pool_is_told_in_tokens_and_requests() -> None:
    block_bytes = 16 * 30 * 3 * 64 * 2 * 4
    assert capacity_text(GIB // 2, block_bytes, 8192, 16, 8192) == (
        "weights 512 MiB + cache 5.6 GiB = 128k tokens = 16 requests of 8k")
    assert capacity_text(GIB, block_bytes, 768, 16, 8192).endswith("= 12k tokens = 1.5 requests of 8k")
    assert capacity_text(GIB, block_bytes, 512, 16, 8192).endswith("= 8k tokens = 1 request of 8k")


def test_a_pool_too_small_for_one_request_names_the_settings_that_fit() -> None:
    text = capacity_text(GIB, 1 << 20, 8, 16, 512)
    assert "= 128 tokens: less than one request of 512" in text
    assert "--max-model-len 128" in text and "--kv-cache-memory 34MiB holds one" in text  # 32 blocks, null, scratch


def test_sizes_for_options_are_rounded_up() -> None:
    assert (flag_size(1), flag_size(1 << 20), flag_size((1 << 20) + 1)) == ("1MiB", "1MiB", "2MiB")


@pytest.mark.parametrize(("name", "billions"), [
    ("smollm2-135m", 0.1345), ("qwen3-0.6b", 0.596), ("qwen3-8b", 8.19), ("llama-3.1-8b", 8.03), ("qwen2.5-7b", 7.61),
    ("qwen3-30b-a3b", 30.5)])
def test_parameters_are_those_the_authors_state(name: str, billions: float) -> None:
    assert weight_count(from_hf_config(ALIASES[name].hf_config, name)) / 1e9 == pytest.approx(billions, rel=0.01)


def test_weights_that_do_not_fit_are_answered_with_what_does() -> None:
    config = from_hf_config(ALIASES["qwen3-8b"].hf_config, "qwen3-8b")
    assert weights_warning(config, "float32", 64 * GIB) == ""
    text = weights_warning(config, "float32", 20 * GIB)
    assert text == ("weights need about 30.5 GiB as float32, 20.0 GiB are free; the nearest that fits: "
                    "--dtype bfloat16 (15.3 GiB)")
    assert nearest_fit(config, 4, 9 * GIB) == "--model qwen3-4b --dtype bfloat16 (7.5 GiB)"
    assert nearest_fit(config, 2, 1 << 20) == "a machine with more memory"
