"""Text and clients: tokenizer, chat template, detokenizer, stop strings, the Python API and the HTTP server.

Knows no tensors and no blocks. `AsyncLLM`, `LLM`, `SamplingParams` and `StructuredOutputs` are what a Python program
imports from here.
"""
try:
    from ipc.shadow import check_not_shadowed
except ModuleNotFoundError as error:            # an `ipc` that is not ours cannot check itself
    if error.name != "ipc.shadow":
        raise
    import ipc
    raise ImportError(f"package 'ipc' is found at {ipc.__file__}, which hides the one beside {__path__[0]}; rename it, "
                      "or put our folder first on PYTHONPATH") from None

check_not_shadowed()

from frontend.async_llm import AsyncLLM  # noqa: E402
from frontend.llm import LLM  # noqa: E402
from frontend.outputs import CompletionOutput, Logprob, PoolingRequestOutput, RequestOutput  # noqa: E402
from ipc.sampling_params import SamplingParams  # noqa: E402
from ipc.structured_outputs import StructuredOutputs  # noqa: E402

__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "Logprob", "PoolingRequestOutput", "RequestOutput", "SamplingParams",
           "StructuredOutputs"]
