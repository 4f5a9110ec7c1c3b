"""Text and clients: tokenizer, chat template, detokenizer, stop strings, the Python API and the HTTP server.

Knows no tensors and no blocks. `AsyncLLM`, `LLM` and `SamplingParams` are what a Python program imports from here.
"""
from ipc.shadow import check_not_shadowed

check_not_shadowed()

from frontend.async_llm import AsyncLLM  # noqa: E402
from frontend.llm import LLM  # noqa: E402
from frontend.outputs import CompletionOutput, RequestOutput  # noqa: E402
from ipc.sampling_params import SamplingParams  # noqa: E402

__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "RequestOutput", "SamplingParams"]
