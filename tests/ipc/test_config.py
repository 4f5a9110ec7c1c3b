"""Options are checked where they are made, the same from the CLI, a test or the wire."""
from __future__ import annotations

import msgspec
import pytest

from ipc.config import (POLICIES, PREEMPTION_MODES, CacheConfig, EngineConfig, FrontendSection, ModelSection,
                        SchedulerConfig)
from ipc.errors import ConfigError
from tests.ipc.message_samples import MODEL, filled
from ipc.model_source import ModelFiles

FILES = ModelFiles(kind="dummy", path="", config=MODEL, served_name="tiny")
MODEL_SECTION = ModelSection(files=FILES)


@pytest.mark.parametrize("struct, values, text", [
    (CacheConfig, dict(block_size=0), "--block-size is 0; allowed is 1 to 1024"),
    (CacheConfig, dict(block_size=1025), "--block-size is 1025; allowed is 1 to 1024"),
    (CacheConfig, dict(num_gpu_blocks_override=0), "--num-gpu-blocks-override is 0; allowed is at least 1"),
    (CacheConfig, dict(kv_cache_memory=0), "--kv-cache-memory is 0; allowed is at least 1"),
    (CacheConfig, dict(gpu_memory_utilization=1.1), "--gpu-memory-utilization is 1.1; allowed is 0.05 to 1.0"),
    (CacheConfig, dict(cpu_memory_share=0.0), "--cpu-memory-share is 0.0; allowed is 0.01 to 0.95"),
    (CacheConfig, dict(swap_space=-1), "--swap-space is -1; allowed is at least 0"),
    (SchedulerConfig, dict(max_num_seqs=0), "--max-num-seqs is 0; allowed is 1 to 65536"),
    (SchedulerConfig, dict(max_num_batched_tokens=0), "--max-num-batched-tokens is 0"),
    (SchedulerConfig, dict(long_prefill_token_threshold=-1), "--long-prefill-token-threshold is -1"),
    (SchedulerConfig, dict(priority_aging_steps=0), "--priority-aging-steps is 0"),
    (SchedulerConfig, dict(priority_aging_steps=1 << 40), "--priority-aging-steps is 1099511627776"),
    (SchedulerConfig, dict(lpm_max_overtakes=0), "--lpm-max-overtakes is 0"),
    (SchedulerConfig, dict(max_num_queued_reqs=-1), "--max-num-queued-reqs is -1"),
    (SchedulerConfig, dict(max_num_queued_tokens=-1), "--max-num-queued-tokens is -1"),
    (SchedulerConfig, dict(policy="best"), f"--scheduling-policy is 'best'; known are {', '.join(POLICIES)}"),
    (SchedulerConfig, dict(preemption_mode="x"), f"--preemption-mode is 'x'; known are {', '.join(PREEMPTION_MODES)}"),
    (FrontendSection, dict(port=65536), "--port is 65536; allowed is 0 to 65535"),
    (FrontendSection, dict(port=-1), "--port is -1"),
    (ModelSection, dict(files=FILES, dtype="int3"), "--dtype is 'int3'; known are auto, float32"),
    (ModelSection, dict(files=FILES, max_model_len=0), "--max-model-len is 0; allowed is at least 1"),
    (EngineConfig, dict(model=MODEL_SECTION, device="tpu"), "--device is 'tpu'; known are auto, cpu, cuda"),
    (EngineConfig, dict(model=MODEL_SECTION, num_threads=-1), "--num-threads is -1"),
    (EngineConfig, dict(model=MODEL_SECTION, log_level="loud"), "--log-level is 'loud'"),
    (EngineConfig, dict(model=MODEL_SECTION, scheduler=SchedulerConfig(preemption_mode="swap")),
     "--preemption-mode swap needs host memory: add --swap-space"),
])
def test_a_bad_option_is_refused_with_its_flag_value_and_range(struct, values, text):
    with pytest.raises(ConfigError) as caught:
        struct(**values)
    assert text in str(caught.value)


def test_a_bad_option_from_the_wire_fails_the_same_way():
    with pytest.raises(msgspec.ValidationError, match="--block-size is 0"):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"block_size": 0}), type=CacheConfig)


def test_swapping_is_allowed_with_host_memory():
    config = EngineConfig(model=MODEL_SECTION, cache=CacheConfig(swap_space=1),
                          scheduler=SchedulerConfig(preemption_mode="swap"))
    assert config.cache.swap_space == 1


def test_options_are_frozen_and_unknown_ones_refused():
    config = CacheConfig()
    with pytest.raises(AttributeError):
        config.block_size = 3
    with pytest.raises(TypeError):
        CacheConfig(block_sise=3)


@pytest.mark.parametrize("struct", [CacheConfig, SchedulerConfig, FrontendSection, ModelSection, EngineConfig])
def test_a_section_returns_from_the_wire(struct):
    section = filled(struct)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(section), type=struct) == section
