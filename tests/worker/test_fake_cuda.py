"""The CUDA paths without a device: torch's fake tensors say where each tensor would be, and refuse operations between
devices; reading a value on the host, which would wait for the device, is counted."""
from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction  # noqa: E402

from bench import gpu_in_process  # noqa: E402
from bench.gpu_in_process import InProcessEngine, Setup  # noqa: E402
from ipc.config import CacheConfig, ModelSection, WorkerProcess  # noqa: E402
from ipc.model_config import from_hf_config  # noqa: E402
from ipc.model_source import ModelFiles  # noqa: E402
from worker import compile_ahead, decode_graphs, startup  # noqa: E402
from worker.attention.reference import ReferenceBackend  # noqa: E402
from worker.attention.triton_paged import TritonBackend  # noqa: E402
from worker.kernels import chip as chip_module  # noqa: E402
from worker.models import parallel_read  # noqa: E402
from worker.models.parallel_read import ParallelReader, Piece, Scales  # noqa: E402
from worker.models.quant_linear import quantize_linears  # noqa: E402
from worker.models.registry import get_model_class  # noqa: E402
from worker.quant.weights import KINDS  # noqa: E402
from worker.spec_decode.ngram import NgramDrafter  # noqa: E402
from worker.startup import largest_step  # noqa: E402
from worker.warm_up import warm_up  # noqa: E402

RAW: dict[str, Any] = dict(architectures=["Qwen3ForCausalLM"], vocab_size=320, hidden_size=64, intermediate_size=96,
                           num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                           max_position_embeddings=4096, eos_token_id=1, bos_token_id=1)
MOE = {**RAW, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2,
       "moe_intermediate_size": 32}


class Event:
    """Done at once."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.is_recorded, self.has_time = False, enable_timing

    def record(self, stream: object = None) -> None:
        self.is_recorded = True

    def query(self) -> bool:
        return self.is_recorded

    def synchronize(self) -> None:
        assert self.is_recorded

    def elapsed_time(self, other: Event) -> float:
        assert self.is_recorded and other.is_recorded and self.has_time and other.has_time
        return 1.0


class Stream:
    """Notes what it is told to wait for."""

    def __init__(self, device: object = None) -> None:
        self.waited: list[object] = []

    def wait_stream(self, other: object) -> None:
        self.waited.append(other)

    def wait_event(self, event: Event) -> None:
        assert event.is_recorded
        self.waited.append(event)

    def record_event(self) -> Event:
        event = Event()
        event.record()
        return event


class FakeDevice:
    """What a test may ask about the run."""

    def __init__(self) -> None:
        self.reads = 0                              # of values by the host
        self.launches: list[str] = []
        self.stream = Stream()                      # of the steps


def pick(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """tensor[index] by the operators behind it: a build without CUDA refuses the brackets of a tensor that would be
    there."""
    parts, dim, by_tensor = index if isinstance(index, tuple) else (index,), 0, []
    for at, part in enumerate(parts):
        if part is None:
            tensor, dim = tensor.unsqueeze(dim), dim + 1
        elif part is Ellipsis:
            dim = tensor.dim() - sum(other is not None for other in parts[at + 1:])
        elif isinstance(part, slice):
            tensor, dim = torch.ops.aten.slice.Tensor(tensor, dim, part.start, part.stop, part.step or 1), dim + 1
        elif isinstance(part, torch.Tensor):
            by_tensor += [None] * (dim - len(by_tensor)) + [part]
            dim += 1
        else:
            tensor = tensor.select(dim, int(part))
    return torch.ops.aten.index.Tensor(tensor, by_tensor) if by_tensor else tensor


def put(tensor: torch.Tensor, index: Any, value: Any) -> None:
    """tensor[index] = value."""
    if not isinstance(value, torch.Tensor):
        value = torch.full((), value, dtype=tensor.dtype, device=tensor.device)
    parts = index if isinstance(index, tuple) else (index,)
    if any(isinstance(part, torch.Tensor) for part in parts):
        tensor.index_put_(tuple(parts), value)
    else:
        pick(tensor, index).copy_(value)


@contextlib.contextmanager
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    found = FakeDevice()

    def numpy(tensor: torch.Tensor) -> np.ndarray:
        if not isinstance(tensor, FakeTensor):
            return original_numpy(tensor)
        assert tensor.device.type == "cpu", "numpy() of a tensor on the device"
        return np.zeros(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        found.reads += tensor.device.type == "cuda"
        return original_cpu(tensor)

    def copy(tensor: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if source.device != tensor.device:
            assert source.dtype == tensor.dtype, "torch converts on the host, into memory that is not pinned"
            found.reads += not non_blocking
        return torch.ops.aten.copy_.default(tensor, source, non_blocking)

    def launch(self: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> None:
        """Every pointer is on the device."""
        found.launches.append(self.__name__)
        assert all(arg.device.type == "cuda" for arg in args if isinstance(arg, torch.Tensor)), self.__name__

    def without_pin(make: Any) -> Any:
        return lambda *args, pin_memory=False, **options: make(*args, **options)

    original_numpy, original_cpu = torch.Tensor.numpy, torch.Tensor.cpu
    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", launch)
        patch.setattr(torch.Tensor, "numpy", numpy)
        patch.setattr(torch.Tensor, "cpu", copied)
        patch.setattr(torch.Tensor, "copy_", copy)
        patch.setattr(torch.Tensor, "__invert__", lambda tensor: torch.bitwise_not(tensor))
        patch.setattr(torch.Tensor, "__getitem__", pick)
        patch.setattr(torch.Tensor, "__setitem__", put)
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        for name in ("empty", "zeros"):
            patch.setattr(torch, name, without_pin(getattr(torch, name)))
        patch.setattr(chip_module, "_known", {})    # nobody else's device
        chip = types.SimpleNamespace(major=9, minor=0, multi_processor_count=132)
        stand_ins = dict(Event=Event, Stream=Stream, current_stream=lambda device=None: found.stream,
                         stream=lambda stream: contextlib.nullcontext(), synchronize=lambda device=None: None,
                         graph_pool_handle=lambda: None, get_device_properties=lambda device: chip)
        for name, value in stand_ins.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(gpu_in_process, "get_backend", lambda name, device: {"triton": TritonBackend,
                                                                           "reference": ReferenceBackend}[name]())
        patch.setattr(decode_graphs.DecodeGraphs.__init__, "__defaults__",
                      (lambda run, pool: (run(), types.SimpleNamespace(replay=run))[1],))
        mode = FakeTensorMode()
        original_from_numpy = torch.from_numpy
        patch.setattr(torch, "from_numpy", lambda array: mode.from_tensor(original_from_numpy(array)))
        with mode:
            yield found


def make_engine(raw: dict[str, Any], **options: Any) -> InProcessEngine:
    config = from_hf_config(dict(raw), "tiny")
    model = get_model_class(config.architecture)(config, dtype=torch.bfloat16, device="cuda:0")
    setup = Setup(**{"num_blocks": 200, "seats": 20, "budget": 64, "max_model_len": 512, **options})
    return InProcessEngine(model, setup, "cuda:0")


@pytest.mark.parametrize("raw", [RAW, MOE], ids=["dense", "experts"])
@pytest.mark.parametrize("graphs", ["off", "on"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_steps_without_options_are_never_waited_for(raw, graphs, temperature, monkeypatch):
    """Prefill chunks beside decodes, rows that come and go; graphs captured by a call in place of a capture."""
    with fake_cuda(monkeypatch) as device:
        engine = make_engine(raw, graphs=graphs)
        warm_up(engine.runner, 64)
        device.reads = 0
        engine.run([[5] * n for n in (1, 30, 90, 17)], 9, temperature=temperature)
        assert device.reads == 0 and len(engine.plans) > 9
        assert ("sample_rows_kernel" in device.launches[-60:]) == (temperature > 0)


OPTIONS: dict[str, dict[str, Any]] = {
    "bias": dict(logit_bias={3: 2.0, 9: -1.0}), "penalties": dict(repetition_penalty=1.2, presence_penalty=0.5),
    "allowed": dict(allowed_token_ids=[0, 3, 4]), "bad words": dict(bad_words_token_ids=[[7], [0, 8]]),
    "least": dict(min_tokens=4, stop_token_ids=[9], ignore_eos=False), "prompt": dict(prompt_logprobs=2),
    "logprobs": dict(logprobs=3, logit_bias={3: 2.0}), "vector": dict(pooling="mean"), "last": dict(pooling="last"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_requests_are_read_once_and_work_where_the_logits_are(name, monkeypatch):
    with fake_cuda(monkeypatch) as device:
        engine = make_engine(RAW)
        engine.run([[5] * n for n in (3, 30, 90)], 1 if name in ("vector", "last") else 6, temperature=0.7,
                   **OPTIONS[name])
        assert 0 < device.reads <= 4 * len(engine.plans)


@pytest.mark.parametrize("pool", [None, torch.int8, torch.float8_e4m3fn])
def test_blocks_are_swapped_and_copied(pool, monkeypatch):
    """A pool that holds a part of the requests; a shared prefix that ends within a block."""
    with fake_cuda(monkeypatch) as device:
        engine = make_engine(RAW, num_blocks=9, num_host_blocks=40, kv_dtype=pool,
                             scheduler=dict(preemption_mode="swap"))
        shared = list(range(2, 25))
        engine.run([shared + [30 + i] * 20 for i in range(6)], 30)
        stats = engine.core.scheduler.stats
        assert stats.num_swapped_out_blocks > 0 and stats.num_swapped_in_blocks > 0
        assert device.reads == 0 and any(isinstance(waited, Event) for waited in device.stream.waited)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("raw", [RAW, MOE], ids=["dense", "experts"])
def test_narrow_weights(raw, kind, monkeypatch):
    with fake_cuda(monkeypatch) as device:
        engine = make_engine(raw)
        quantize_linears(engine.runner.model, kind, engine.runner.backend.ops)
        engine.run([[5] * n for n in (3, 30)], 4)
        assert ("narrow_grouped_matmul_kernel" if raw is MOE else "quant_linear_kernel") in device.launches
        assert device.reads == 0


def test_drafts_are_verified_and_blocks_of_wrong_ones_given_back(monkeypatch):
    with fake_cuda(monkeypatch):
        engine = make_engine(RAW, scheduler=dict(num_speculative_tokens=4))
        engine.runner.drafter = NgramDrafter(4, 4, 2)
        engine.run([[5, 6] * 10, [0, 0, 7] * 9], 40)
        assert engine.core.scheduler.stats.num_draft_tokens > 0


def test_the_reference_backend_computes_where_its_pool_is(monkeypatch):
    """With batches made on the host."""
    with fake_cuda(monkeypatch):
        engine = make_engine(RAW, backend="reference")
        engine.run([[5] * n for n in (1, 30, 90)], 5, temperature=0.5, logprobs=1)
        assert len(engine.plans) > 4


def test_the_largest_step_and_its_pool(monkeypatch):
    with fake_cuda(monkeypatch):
        engine = make_engine(RAW)
        runner = engine.runner
        step, dummy_bytes = largest_step(runner.model, runner.backend, 16, torch.bfloat16, 64, 300, "cuda:0")
        with torch.inference_mode():
            assert step().shape == (64, 320)
        assert dummy_bytes == 2 * 2 * (4 + 2) * 16 * 2 * 16 * 2


class Inline:
    """Runs what it is given at once: a thread would leave the fake mode."""

    def __init__(self, *args: object) -> None: ...

    def __enter__(self) -> Inline:
        return self

    def __exit__(self, *error: object) -> None: ...

    def submit(self, call: Any, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(call(*args))
        return future


def test_weights_are_copied_as_they_are_and_converted_on_the_device(tmp_path, monkeypatch):
    """A float32 tensor for a bfloat16 place, codes with scales, one row for every head, and one that stays as it is."""
    path = tmp_path / "weights"
    path.write_bytes(bytes(1 << 16))
    monkeypatch.setattr(parallel_read, "ThreadPoolExecutor", Inline)
    monkeypatch.setattr(parallel_read, "CHUNK_BYTES", 1000)
    with fake_cuda(monkeypatch) as device:
        def place(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="cuda:0")

        scales = Scales(torch.ones((2, 1), device="cuda:0"), 20, 64)
        ParallelReader(torch.device("cuda:0")).read([
            Piece(str(path), 0, 4 * 40 * 64, torch.float32, (40, 64), place(40, 64)),
            Piece(str(path), 64, 40 * 64, torch.float8_e4m3fn, (40, 64), place(40, 64), scales),
            Piece(str(path), 8, 2 * 16, torch.bfloat16, (16,), place(6, 16)),
            Piece(str(path), 8, 40 * 64, torch.float8_e4m3fn, (40, 64), place(40, 64, dtype=torch.float8_e4m3fn)),
        ], lambda fraction: None)
        assert device.reads == 0


def test_a_start_compiles_while_it_loads_weights_and_waits_before_its_first_launch(monkeypatch):
    """The stamp is left when everything was launched."""
    config = from_hf_config(dict(RAW), "tiny")
    section = ModelSection(files=ModelFiles("dummy", "", config, "tiny"), max_model_len=512, dtype="bfloat16")
    worker = WorkerProcess(
        rank=0, listen="", epoch=1, model=section, cache=CacheConfig(num_gpu_blocks_override=50), max_num_seqs=8,
        max_num_batched_tokens=64, num_speculative_tokens=0, device="cuda", attention_backend="triton",
        cuda_graphs="off", num_threads=1, run_dir="", log_level="warning")
    told: list[Any] = []

    class Ahead:
        phase = "compile kernels"

        def wait(self, progress: Any) -> str:
            assert not device.launches
            progress(0.5)
            return "all"

        def mark(self) -> None:
            told.append(("mark", len(device.launches)))

    def begin_sampler(width: int, scope: str) -> None:
        assert scope == "counts"

    def begin(*resolved: Any) -> Ahead:
        told.append(resolved[1:])
        return Ahead()
    starting = types.SimpleNamespace(begin=lambda name: told.append(name), advance=lambda fraction, detail="": None,
                                     end=lambda detail="": told.append(detail))
    with fake_cuda(monkeypatch) as device:
        monkeypatch.setattr(compile_ahead, "compile_ahead", begin)
        monkeypatch.setattr(startup.compiler, "begin", begin_sampler)
        monkeypatch.setattr(startup, "get_backend", lambda name, device: TritonBackend())
        monkeypatch.setattr(startup, "load_model", lambda files, **options: get_model_class(config.architecture)(
            config, dtype=torch.bfloat16, device="cuda:0"))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(startup, "measure_block_swap_ns", lambda *arguments: 0)
        startup.build_runner(worker, starting, lambda: None)
        assert told[:2] == [("bfloat16", 512, False, None), "load weights"]
        assert told[3:6] == ["compile kernels", "all", "size the KV pool"]
        assert told[-1] == ("mark", len(device.launches)) and len(device.launches) > 50
