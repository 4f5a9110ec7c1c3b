"""What is said to flags of other engines: ours for the same thing, or why none is needed, or that there is none.

Only consulted for flags that we do not have. Knows nothing else.
"""
from __future__ import annotations

# The spelling of another program -> (whose, what to write here).
FOREIGN: dict[str, tuple[str, str]] = {
    **{flag: ("SGLang", here) for flag, here in {
        "--model-path": "--model", "--context-length": "--max-model-len",
        "--mem-fraction-static": "--gpu-memory-utilization", "--chunked-prefill-size": "--max-num-batched-tokens",
        "--max-prefill-tokens": "--max-num-batched-tokens", "--max-running-requests": "--max-num-seqs",
        "--max-queued-requests": "--max-num-queued-reqs", "--max-total-tokens": "--kv-cache-memory",
        "--schedule-policy": "--scheduling-policy", "--page-size": "--block-size", "--random-seed": "--seed",
        "--disable-radix-cache": "--no-enable-prefix-caching", "--disable-overlap-schedule": "--no-async-scheduling",
        "--disable-cuda-graph": "--cuda-graphs off", "--tp": "--tensor-parallel-size",
        "--tp-size": "--tensor-parallel-size", "--dp-size": "--data-parallel-size",
        "--speculative-num-draft-tokens": "--num-speculative-tokens",
        "--grammar-backend": "--structured-outputs-config"}.items()},
    **{flag: ("vLLM", here) for flag, here in {
        "--speculative-config": "--num-speculative-tokens", "--enforce-eager": "--cuda-graphs off",
        "--cudagraph-capture-sizes": "--cuda-graphs", "--profiler-config": "--admin-api-key"}.items()},
    **{flag: ("llama.cpp", here) for flag, here in {
        "-m": "--model", "-hf": "--model", "--hf-repo": "--model", "-c": "--max-model-len",
        "--ctx-size": "--max-model-len", "-np": "--max-num-seqs", "--parallel": "--max-num-seqs", "-t": "--num-threads",
        "--threads": "--num-threads", "-tb": "--num-threads", "-b": "--max-num-batched-tokens",
        "--batch-size": "--max-num-batched-tokens", "-ub": "--max-num-batched-tokens",
        "--ubatch-size": "--max-num-batched-tokens", "-ngl": "--device cuda", "--gpu-layers": "--device cuda",
        "--n-gpu-layers": "--device cuda", "-a": "--served-model-name", "--alias": "--served-model-name",
        "--draft-max": "--num-speculative-tokens",
        "-ctk": "--kv-cache-dtype", "--cache-type-k": "--kv-cache-dtype", "-s": "--seed"}.items()},
}

_ONE_DEVICE = "a server has one device; leave it out, or start one server per device"
_NO_LORA = "LoRA adapters are not served; merge them into the weights"
_FROM_TEMPLATE = "picked from the chat template; leave it out"
_NO_ACCESS_LOG = "there is no access log to turn off; leave it out"

# The spelling of another program -> how it is here.
ANSWERS: dict[str, str] = {
    **dict.fromkeys(("--tensor-parallel-size", "-tp", "--tp", "--tp-size", "--pipeline-parallel-size", "-pp",
                     "--data-parallel-size", "-dp", "--dp-size", "--enable-expert-parallel", "--nnodes", "--node-rank",
                     "--master-addr", "--master-port"), _ONE_DEVICE),
    **dict.fromkeys(("--enable-lora", "--max-loras", "--max-lora-rank", "--lora-modules"), _NO_LORA),
    **dict.fromkeys(("--reasoning-parser", "--tool-call-parser", "--enable-auto-tool-choice"), _FROM_TEMPLATE),
    **dict.fromkeys(("--disable-uvicorn-access-log", "--disable-access-log-for-endpoints"), _NO_ACCESS_LOG),
    **dict.fromkeys(("--structured-outputs-config", "--grammar-backend"),
                    "there is one grammar engine, llguidance; leave it out"),
    **dict.fromkeys(("--disable-log-requests", "--enable-log-requests"),
                    "prompts are never logged; launch.py top shows the requests that run; leave it out"),
    "--skip-tokenizer-init": "text needs one, and requests of token ids do not use it; leave it out",
    "--trust-remote-code": "no code that comes with a model is run; leave it out",
    "--tokenizer": "the tokenizer is the one in the model's folder or file; leave it out",
    "--revision": "download that revision and name its folder with --model",
    "--chat-template": "the model's own is used; change it in the model's folder, in tokenizer_config.json",
    "--chat-template-content-format": "text parts are joined for every template; leave it out",
    "--default-chat-template-kwargs": "send chat_template_kwargs with a request",
    "--generation-config": "sampling defaults are OpenAI's, end tokens the model's; send others with a request",
    "--override-generation-config": "send sampling parameters with a request",
    "--max-logprobs": "a request may ask for 20; leave it out",
    "--stream-interval": "each token is sent at once, and joined for clients that read slowly; leave it out",
    "--uds": "it listens on TCP; give --host and --port",
    "--root-path": "let the proxy strip the prefix",
    "--ssl-ca-certs": "certificates of clients are not checked; give --api-key",
    "--enable-request-id-headers": "x-request-id is always sent back; leave it out",
    "--enable-force-include-usage": "a request asks for it: stream_options.include_usage",
    "--enable-prompt-tokens-details": "usage always tells cached tokens; leave it out",
    "--enable-log-requests": "requests and their times are at /debug/live and /debug/timeline; leave it out",
    "--disable-log-stats": "there are no lines of statistics to turn off; figures are at /metrics; leave it out",
}
