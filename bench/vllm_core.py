"""vLLM's scheduler, wire objects and host-side input preparation for decode steps, for `bench core --against vllm`.

Runs in an interpreter that has vllm (0.32) installed; imports nothing of this project. CPU time of one thread,
microseconds a step, medians; one JSON object as its last line. No model runs: the CPU runner only prepares.
"""
from __future__ import annotations

import argparse
import json
import os
import pickle
import statistics
import tempfile
import time
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

BLOCK = 16


def make_scheduler(rows: int) -> Any:
    import torch
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    folder = tempfile.mkdtemp()
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "head_dim": 16,
                   "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
                   "vocab_size": 151936, "torch_dtype": "bfloat16", "max_position_embeddings": 40960,
                   "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True}, file)
    model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="bfloat16", seed=0, max_model_len=40960)
    scheduler = SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=max(8192, rows * 530 + rows),
                                max_model_len=40960, is_encoder_decoder=False, enable_chunked_prefill=True)
    config = VllmConfig(scheduler_config=scheduler, model_config=model,
                        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True))
    blocks = 60_000 + rows * 60
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    kv = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    config.cache_config.num_gpu_blocks = blocks
    made = Scheduler(vllm_config=config, kv_cache_config=kv, log_stats=True, block_size=BLOCK, hash_block_size=BLOCK,
                     structured_output_manager=StructuredOutputManager(config))
    return made, config


def add_requests(scheduler: Any, rows: int) -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    for i in range(rows):
        tokens = [(i * 7919 + j * 31) % 150_000 for j in range(512 + i % 16)]
        scheduler.add_request(Request(
            request_id=f"cmpl-{i:08x}-0123456789abcdef", prompt_token_ids=tokens, pooling_params=None,
            block_hasher=hasher, sampling_params=SamplingParams(max_tokens=100_000, ignore_eos=True)))


def make_runner(config: Any, scheduler: Any) -> Any:
    import torch
    from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    torch.set_num_threads(1)
    init_distributed_environment(1, 0, "file://" + tempfile.mktemp(), 0, "gloo")
    initialize_model_parallel(1, 1)
    runner = CPUModelRunner(config, torch.device("cpu"))
    runner.kv_cache_config = scheduler.kv_cache_config
    runner.input_batch.block_table.compute_slot_mapping = lambda *a, **k: None     # a device kernel in this version
    return runner


def measure(rows: int, steps: int) -> dict[str, Any]:
    import numpy as np
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.v1.outputs import ModelRunnerOutput, SamplerOutput
    scheduler, config = make_scheduler(rows)
    parts: dict[str, list[float]] = {name: [] for name in ("schedule", "wire", "prepare", "update")}
    sizes: dict[str, int] = {}
    with set_current_vllm_config(config):
        runner = make_runner(config, scheduler)
        add_requests(scheduler, rows)
        sampled = SamplerOutput(sampled_token_ids=torch.full((rows, 1), 1234, dtype=torch.int32), logprobs_tensors=None)
        for step in range(steps + 5):
            t0 = time.thread_time_ns()
            plan = scheduler.schedule()
            t1 = time.thread_time_ns()
            data = pickle.dumps(plan, protocol=pickle.HIGHEST_PROTOCOL)
            pickle.loads(data)
            t2 = time.thread_time_ns()
            runner._update_states(plan)
            counts = np.array([plan.num_scheduled_tokens[i] for i in runner.input_batch.req_ids], dtype=np.int32)
            runner._prepare_inputs(plan, counts)
            runner._bookkeeping_sync(plan, sampled, None, torch.zeros(1, 1), plan.total_num_scheduled_tokens)
            t3 = time.thread_time_ns()
            ids = list(plan.num_scheduled_tokens)
            output = ModelRunnerOutput(req_ids=ids, req_id_to_index={r: i for i, r in enumerate(ids)},
                                       sampled_token_ids=[[1234] for _ in ids])
            t4 = time.thread_time_ns()
            result = pickle.dumps(output, protocol=pickle.HIGHEST_PROTOCOL)
            output = pickle.loads(result)
            t5 = time.thread_time_ns()
            scheduler.update_from_output(plan, output)
            t6 = time.thread_time_ns()
            if step >= 5:
                for name, took in (("schedule", t1 - t0), ("wire", t2 - t1 + t5 - t4), ("prepare", t3 - t2),
                                   ("update", t6 - t5)):
                    parts[name].append(took / 1000)
                sizes = {"plan_bytes": len(data), "result_bytes": len(result)}
    totals = [sum(values) for values in zip(*parts.values())]
    return {"rows": rows, "total_us": round(statistics.median(totals), 1), **sizes,
            **{name: round(statistics.median(values), 1) for name, values in parts.items()}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    print(json.dumps(measure(args.rows, args.steps)))


if __name__ == "__main__":
    main()
