"""The load generator against a small fake server that streams what each test tells it to."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.load_client import split_response
from bench.load_options import parse_args
from bench.load_prompts import random_prompts, repeated_prefix_prompts
from bench.serve import main
from bench.serving_report import flat_figures, num_good, peak_requests, peak_tokens, result_file
from bench.stats import RequestRecord, decode_rate, percentile, prefill_rate, serving_figures, summary

Answer = Callable[[dict[str, Any]], tuple[int, list[bytes]]]  # request body -> status, body pieces


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def usage(prompt: int, output: int, cached: int = 0) -> dict[str, Any]:
    details = {"cached_tokens": cached}
    return {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": details}


def completion(body: dict[str, Any], tokens_per_chunk: int = 1) -> tuple[int, list[bytes]]:
    """A well-behaved stream: one chunk per `tokens_per_chunk` tokens, a closing chunk, usage, [DONE]."""
    wanted = body["max_tokens"]
    pieces = [event(choices=[{"text": "x", "finish_reason": None}])] * (wanted // tokens_per_chunk)
    pieces.append(event(choices=[{"text": "", "finish_reason": "length"}], usage=None))
    pieces.append(event(choices=[], usage=usage(len(body["prompt"]), wanted, cached=3)))
    return 200, [*pieces, b": keep-alive\n\n", b"data: [DONE]\n\n"]


class FakeServer:
    """Answers POSTs with `answer`, on its own loop in a thread. `framing` is how the body's end is marked."""

    def __init__(self, answer: Answer, framing: str = "chunked") -> None:
        self.answer, self.framing = answer, framing
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.num_open = self.max_open = 0
        self.loop = asyncio.new_event_loop()
        self.server = self.loop.run_until_complete(asyncio.start_server(self.serve, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        if head.startswith("GET /v1/models"):
            body = b'{"data": [{"id": "fake-model"}]}'
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        else:
            self.num_open += 1
            self.max_open = max(self.max_open, self.num_open)
            length = int(head.lower().split("content-length:")[1].split("\r\n")[0])
            self.bodies.append(json.loads(await reader.readexactly(length)))
            status, pieces = self.answer(self.bodies[-1])
            chunked = self.framing == "chunked" and status == 200
            writer.write(b"HTTP/1.1 %d X\r\n" % status)
            writer.write(b"Transfer-Encoding: chunked\r\n\r\n" if chunked else b"Content-Type: text/plain\r\n\r\n")
            for piece in pieces:
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece)
                await writer.drain()
                await asyncio.sleep(0.001)
            if chunked:  # the end in two writes, and the connection left open: the client must notice by itself
                writer.write(b"0\r\n")
                await writer.drain()
                await asyncio.sleep(0.001)
                writer.write(b"\r\n")
                await writer.drain()
                await reader.read()
            self.num_open -= 1
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def shut(self) -> None:
        self.server.close()
        await self.server.wait_closed()
        handlers = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait_for(asyncio.gather(*handlers), 10)  # every client has left, so every handler ends

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.shut(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., FakeServer]]:
    servers: list[FakeServer] = []

    def start(answer: Answer, framing: str = "chunked") -> FakeServer:
        servers.append(FakeServer(answer, framing))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def run(server: FakeServer, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, the JSON of the last line, everything printed."""
    small = ["--prompt-tokens", "16", "--output-tokens", "6", "--concurrency", "3", "--num-requests", "5"]
    code = main(["--base-url", server.url, *small, *options])
    text = capsys.readouterr().out
    return code, json.loads(text.splitlines()[-1]), text


@pytest.mark.parametrize("framing", ["chunked", "close"])
def test_tokens_are_counted_from_usage_when_a_chunk_holds_several(
    serve: Callable[..., FakeServer], capsys: pytest.CaptureFixture[str], framing: str
) -> None:
    server = serve(lambda body: completion(body, tokens_per_chunk=3), framing)
    code, result, text = run(server, capsys, "--output-tokens", "6", "--shared-prefix", "4")
    assert code == 0
    assert (result["successful_requests"], result["failed_requests"], result["first_error"]) == (5, 0, None)
    assert (result["prompt_tokens"], result["output_tokens"], result["cached_tokens"]) == (5 * 20, 5 * 6, 5 * 3)
    assert (result["tokens_per_chunk"], result["token_counts_from"], result["short_outputs"]) == (3.0, "usage", 0)
    assert set(result["ttft_s"]) == {"mean", "p50", "p90", "p99"}
    assert result["model"] == "fake-model"
    for line in ("Successful requests:", "Output token throughput (tok/s):", "Median TTFT (ms):", "P99 ITL (ms):"):
        assert line in text


def test_request_body_asks_for_greedy_ids_usage_and_no_early_end(
    serve: Callable[..., FakeServer], capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(completion)
    run(server, capsys, "--model", "m", "--api-key", "secret", "--warmup", "0", "--shared-prefix", "8")
    measured = server.bodies[1:]  # the first one is the probe
    assert len(measured) == 5
    for body in measured:
        assert len(body.pop("prompt")) == 24
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        assert body == {"model": "m", "max_tokens": 6, "temperature": 0, "ignore_eos": True} | stream
    assert all("Authorization: Bearer secret\r\n" in head for head in server.heads)


def test_no_more_than_the_concurrency_is_in_flight(
    serve: Callable[..., FakeServer], capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(completion, "close")
    code, _, _ = run(server, capsys, "--concurrency", "2", "--num-requests", "7")
    assert (code, server.max_open) == (0, 2)


def test_refused_ids_fall_back_to_words(serve: Callable[..., FakeServer], capsys: pytest.CaptureFixture[str]) -> None:
    def answer(body: dict[str, Any]) -> tuple[int, list[bytes]]:
        if isinstance(body["prompt"], list):
            return 400, [b'{"error": {"message": "prompt must be a string"}}']
        return completion(body)

    server = serve(answer)
    code, result, text = run(server, capsys)
    assert (code, result["load"]["prompt_form"], result["load"]["ignore_eos"]) == (0, "text", True)
    assert "refuses token ids" in text
    assert len(server.bodies[-1]["prompt"].split()) == 16


def test_refused_ignore_eos_is_left_out_and_ids_are_kept(
    serve: Callable[..., FakeServer], capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(body: dict[str, Any]) -> tuple[int, list[bytes]]:
        return (422, [b"unknown field ignore_eos"]) if "ignore_eos" in body else completion(body)

    code, result, _ = run(serve(answer), capsys)
    assert (code, result["load"]["prompt_form"], result["load"]["ignore_eos"]) == (0, "ids", False)


def test_chat_sends_messages_and_skips_the_empty_role_chunk(
    serve: Callable[..., FakeServer], capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(body: dict[str, Any]) -> tuple[int, list[bytes]]:
        role = event(choices=[{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
        tokens = [event(choices=[{"delta": {"content": "a"}, "finish_reason": None}])] * body["max_tokens"]
        end = event(choices=[{"delta": {}, "finish_reason": "length"}])
        return 200, [role, *tokens, end, event(choices=[], usage=usage(30, body["max_tokens"])), b"data: [DONE]\n\n"]

    server = serve(answer)
    code, result, _ = run(server, capsys, "--endpoint", "chat")
    assert (code, result["tokens_per_chunk"], result["prompt_tokens"]) == (0, 1.0, 150)
    assert server.heads[-1].startswith("POST /v1/chat/completions ")
    assert server.bodies[-1]["messages"][0]["role"] == "user"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((500, [b"out of memory"]), "HTTP 500: out of memory"),
        ((200, [event(error={"message": "worker died"})]), "worker died"),
        ((200, [event(choices=[{"text": "x", "finish_reason": None}])]), "without a finish_reason"),
        ((200, [b"data: {not json}\n\n"]), "malformed"),
    ],
)
def test_a_failed_request_gives_exit_code_1_and_its_text(
    serve: Callable[..., FakeServer],
    capsys: pytest.CaptureFixture[str],
    answer: tuple[int, list[bytes]],
    expected: str,
) -> None:
    server = serve(lambda body: answer if len(body["prompt"]) == 16 else completion(body))  # the probe is shorter
    code, result, text = run(server, capsys, "--warmup", "0")
    assert (code, result["failed_requests"], result["successful_requests"]) == (1, 5, 0)
    assert expected in result["first_error"]
    assert "Failed requests:" in text


def test_absent_server_gives_exit_code_1_and_still_a_json_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code = main(["--base-url", "http://127.0.0.1:1", "--save-result", "--result-dir", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []                # nothing was measured
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (code, result["successful_requests"]) == (1, 0)
    assert "http://127.0.0.1:1" in result["first_error"]


def test_json_file_holds_the_last_line(
    serve: Callable[..., FakeServer], capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    _, result, _ = run(serve(completion), capsys, "--json", str(tmp_path / "out.json"), "--request-rate", "1000")
    assert json.loads((tmp_path / "out.json").read_text()) == result


def test_same_seed_gives_the_same_prompts_and_a_shared_prefix() -> None:
    options = ["--prompt-tokens", "8-48", "--output-tokens", "8-40", "--shared-prefix", "192", "--num-requests", "16"]
    prompts = random_prompts(parse_args(options))
    assert prompts == random_prompts(parse_args(options))
    assert prompts != random_prompts(parse_args([*options, "--seed", "1"]))
    assert len({tuple(ids[:192]) for ids, _ in prompts}) == 1
    assert all(200 <= len(ids) <= 240 and 8 <= max_tokens <= 40 for ids, max_tokens in prompts)


def test_chunked_body_split_anywhere_keeps_text_and_arrival_times() -> None:
    raw = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4;x=y\r\nabcd\r\n2\r\nef\r\n0\r\n\r\n"
    arrivals = [(float(i), raw[i : i + 1]) for i in range(len(raw))]
    status, body, ends, times = split_response(arrivals)
    assert (status, body, ends) == (200, b"abcdef", [4, 6])
    assert times == [float(raw.index(b"abcd") + 3), float(raw.index(b"ef") + 1)]


def test_figures_of_two_overlapping_requests_are_exact() -> None:
    first = RequestRecord(num_wanted_tokens=5, start=0.0, end=5.0, token_times=[1.0, 2.0, 3.0, 4.0, 5.0])
    second = RequestRecord(num_wanted_tokens=9, start=0.0, end=6.0, token_times=[2.0, 3.0, 4.0, 5.0, 6.0])
    for record, num_output_tokens in ((first, 5), (second, 9)):
        record.num_prompt_tokens, record.num_output_tokens = 10, num_output_tokens
    # Both decode from 2.0 to 5.0: three chunks of one token, three of two.
    assert decode_rate([first, second], concurrency=2) == (3.0, 3.0)
    assert prefill_rate([first, second], concurrency=2, has_arrival_rate=False) == 10.0
    assert prefill_rate([first, second], concurrency=1, has_arrival_rate=False) == 7.5
    figures = serving_figures([first, second], concurrency=2, has_arrival_rate=False)
    assert (figures["duration_s"], figures["output_tok_s"], figures["total_tok_s"]) == (6.0, 2.33, 5.67)
    assert (figures["tpot_s"]["mean"], figures["itl_s"]["mean"], figures["ttft_s"]["p50"]) == (0.75, 1.0, 1.5)
    assert figures["e2e_s"] == {"mean": 5.5, "p50": 5.5, "p90": 5.9, "p99": 5.99}


def test_percentiles_interpolate_and_refuse_nothing() -> None:
    assert percentile([4, 1, 3, 2], 50) == 2.5
    assert percentile([7], 99) == 7
    assert summary([]) == {"mean": None, "p50": None, "p90": None, "p99": None}
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_options_of_other_benchmarks_mean_the_same(tmp_path: Path) -> None:
    ours = parse_args(["--prompt-tokens", "64", "--output-tokens", "32", "--num-requests", "5", "--concurrency", "4"])
    theirs = parse_args("--backend vllm --dataset-name random --random-input-len 64 --random-output-len 32 "
                        "--num-prompts 5 --max-concurrency 4 --endpoint /v1/completions --host 127.0.0.1 --port 8000 "
                        "--request-rate inf --ignore-eos".split())
    theirs.backend, theirs.ignore_eos = ours.backend, ours.ignore_eos
    assert theirs == ours
    chat = parse_args("--backend openai-chat --random-input-len 100 --random-range-ratio 0.5 --save-result".split())
    assert (chat.endpoint, chat.prompt_tokens, chat.is_limited) == ("chat", (50, 150), True)
    assert str(result_file(chat, "org/name")).startswith("openai-chat-infqps-concurrency8-name-")
    named = parse_args(["--model", "org/name", "--served-model-name", "short", "--result-dir", str(tmp_path / "new"),
                        "--result-filename", "a.json"])
    assert (named.model, result_file(named, "short")) == ("short", tmp_path / "new/a.json")
    assert (tmp_path / "new").is_dir()
    both = parse_args(["--random-range-ratio", '{"input": 0.25, "output": 0.5}', "--output-len", "9"])
    assert (both.prompt_tokens, both.output_tokens) == ((192, 320), (4, 14))
    rated = parse_args("--request-rate 2.5 --num-prompts 9 --label new --save-result".split())
    assert (rated.concurrency, rated.is_limited) == ([9], False)        # a rate alone limits nothing
    assert str(result_file(rated, "m")).startswith("new-2.5qps-m-")
    assert parse_args(["--request-rate", "inf"]).concurrency == [32]


@pytest.mark.parametrize(("options", "text"), [
    (["--plot", "x.png"], "name several"), (["--endpoint", "/v1/embeddings"], "is not completions, chat"),
    (["--random-range-ratio", "1"], "allowed is 0 to below 1"), (["--concurrency", "1,0"], "0 is below 1"),
    (["--goodput", "itl:5"], "names no metric of requests"), (["--percentile-metrics", "ttft,x"], "'x' is not one of"),
    (["--metric-percentiles", "101"], "outside 0 to 100"), (["--burstiness", "0"], "must be above 0"),
    (["--dataset-name", "sharegpt"], "goes with --dataset-name"), (["--dataset-path", "x"], "goes with --dataset-name"),
    (["--dataset-name", "prefix_repetition", "--num-prompts", "9"], "each needs a request"),
    (["--header", "x"], "is not KEY=VALUE"),
    (["--header", "x=a\r\ny: b"], "is not KEY=VALUE"), (["--extra-body", "[]"], "is no JSON object"),
    (["--ramp-up-strategy", "linear"], "needs --ramp-up-start-rps"), (["--ramp-up-end-rps", "1"], "go with --ramp-up"),
    (["--ramp-up-strategy", "linear", "--request-rate", "1"], "exclude each other")])
def test_options_that_make_no_sense_exit_with_two(options: list[str], text: str,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        parse_args(options)
    assert error.value.code == 2 and text in capsys.readouterr().err


def test_several_concurrencies_are_several_runs_compared_and_drawn(
    serve: Callable[..., FakeServer], capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    pytest.importorskip("matplotlib")
    server = serve(completion)
    old, png = tmp_path / "old.json", tmp_path / "load.png"
    code, first, _ = run(server, capsys, "--concurrency", "1,3", "--json", str(old))
    assert code == 0 and [r["load"]["concurrency"] for r in first["runs"]] == [1, 3]
    assert (first["successful_requests"], first["failed_requests"]) == (10, 0)
    code, second, text = run(server, capsys, "--concurrency", "1,3", "--compare", str(old), "--plot", str(png))
    assert code == 0 and png.read_bytes().startswith(b"\x89PNG") and "Compared, concurrency 3" in text
    assert "loads differ" not in text
    assert {row["concurrency"] for row in second["compare"]["rows"]} == {1, 3}
    assert all(row["verdict"] in ("same", "better", "worse") for row in second["compare"]["rows"])
    prompts = [tuple(body["prompt"]) for body in server.bodies if len(body["prompt"]) == 16 and body["max_tokens"] == 6]
    assert len(set(prompts[:10])) >= 10 or len(set(prompts)) >= 10    # a second load repeats no prompt of the first


def test_an_old_result_that_cannot_be_read_stops_before_the_load(
    serve: Callable[..., FakeServer], capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(completion)
    assert main(["--base-url", server.url, "--compare", "/nowhere.json"]) == 2 and server.bodies == []


def test_options_of_the_request_reach_its_body_and_headers(
    serve: Callable[..., FakeServer], capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(completion)
    code, result, _ = run(server, capsys, "--temperature", "0.5", "--top-p", "0.9", "--top-k", "7", "--min-p", "0.1",
                          "--extra-body", '{"top_k": 8, "chat_template_kwargs": {"enable_thinking": false}}',
                          "--logprobs", "2", "--header", "x-a=1", "Authorization=Basic b", "--api-key", "k",
                          "--request-id-prefix", "run-", "--warmup", "0")
    body = server.bodies[-1]
    assert code == 0 and {name: body[name] for name in ("temperature", "top_p", "top_k", "min_p", "logprobs")} == {
        "temperature": 0.5, "top_p": 0.9, "top_k": 8, "min_p": 0.1, "logprobs": 2}
    assert body["chat_template_kwargs"] == {"enable_thinking": False} and result["load"]["fields"]["top_k"] == 8
    assert all("X-A: 1\r\n" in head and "Authorization: Basic b\r\n" in head for head in server.heads)
    ids = [head.split("X-Request-Id: ")[1].split("\r\n")[0] for head in server.heads if "X-Request-Id" in head]
    assert sorted(ids) == [f"run-{number}" for number in range(5)]


def test_a_chat_asks_for_logprobs_in_its_own_shape(
    serve: Callable[..., FakeServer], capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(lambda body: (400, [b"no"]))
    run(server, capsys, "--backend", "openai-chat", "--logprobs", "3", "--chat-template-kwargs", '{"a": 1}')
    assert (server.bodies[0]["logprobs"], server.bodies[0]["top_logprobs"]) == (True, 3)
    assert server.bodies[0]["chat_template_kwargs"] == {"a": 1}


def two_records() -> list[RequestRecord]:
    """100 ms to the first token and 50 ms per token; 900 ms and 20 ms. They overlap from 0.1 to 0.25 s."""
    quick = RequestRecord(4, start=0.0, end=0.25, token_times=[0.1, 0.15, 0.2, 0.25], num_output_tokens=4)
    late = RequestRecord(3, start=0.1, end=1.04, token_times=[1.0, 1.02, 1.04], num_output_tokens=3, queue_s=0.05)
    return [quick, late]


def test_goodput_counts_requests_that_meet_every_objective() -> None:
    assert num_good(two_records(), {"ttft": 500}) == 1
    assert num_good(two_records(), {"tpot": 50.001}) == 2
    assert num_good(two_records(), {"ttft": 500, "tpot": 30}) == 0
    assert num_good(two_records(), {"e2el": 1000}) == 2


def test_peaks_are_of_one_second_and_of_one_moment() -> None:
    assert (peak_tokens(two_records()), peak_requests(two_records())) == (4.0, 2)
    late = [RequestRecord(2, start=5.0, end=6.0, token_times=[5.5, 6.0], num_output_tokens=9)]
    assert (peak_tokens(late), peak_requests(late)) == (8.0, 1)      # a chunk of eight tokens in the second second


def test_a_result_has_the_keys_of_vllm_for_the_metrics_and_percentiles_that_were_named() -> None:
    args = parse_args("--percentile-metrics ttft,e2el_including_client_queue --metric-percentiles 25,99.9 --goodput "
                      "ttft:500 --request-rate 4 --max-concurrency 2 --metadata version=3 tp=1 --label x".split())
    flat = flat_figures(args, "m", two_records(), 2, 2.0)
    assert (flat["version"], flat["tp"], flat["label"], flat["backend"]) == ("3", "1", "x", "openai")
    assert (flat["completed"], flat["failed"], flat["duration"], flat["request_rate"]) == (2, 0, 2.0, 4.0)
    assert (flat["total_output_tokens"], flat["output_throughput"], flat["request_goodput"]) == (7, 3.5, 0.5)
    assert (flat["mean_ttft_ms"], flat["p25_ttft_ms"]) == (pytest.approx(500), pytest.approx(300))
    assert flat["std_ttft_ms"] == pytest.approx(400) and flat["p99.9_ttft_ms"] == pytest.approx(899.2)
    assert flat["median_e2el_including_client_queue_ms"] == pytest.approx(620)
    assert not any("tpot" in name or "itl_" in name for name in flat)
    assert (flat["ttfts"], flat["output_lens"], flat["errors"]) == ([0.1, 0.9], [4, 3], ["", ""])
    assert len(flat["latencies"]) == len(flat["queue_times"]) == 2 and min(flat["latencies"]) > 0


def test_a_saved_result_has_details_only_where_they_are_asked_for(
    serve: Callable[..., FakeServer], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    server, file = serve(completion), tmp_path / "r.json"
    options = ["--result-dir", str(tmp_path), "--result-filename", "r.json", "--goodput", "e2el:60000"]
    _, result, text = run(server, capsys, *options, "--save-result", "--metric-percentiles", "50,95")
    for line in ("Traffic request rate: inf", "Maximum request concurrency: 3", "Burstiness factor: 1.0 (Poisson"):
        assert line in text
    for line in ("Request goodput (req/s):", "Peak output token throughput (tok/s):", "P95 E2EL (ms):"):
        assert line in text
    assert "P99" not in text and json.loads(file.read_text()) == result and "ttfts" not in result
    run(server, capsys, *options, "--save-result", "--append-result", "--save-detailed")
    first, second = map(json.loads, file.read_text().splitlines())
    assert "ttfts" not in first and second["generated_texts"] == ["xxxxxx"] * 5 and len(second["itls"][0]) == 5


def test_a_rate_alone_lets_requests_pile_up_and_a_limit_makes_them_wait_in_the_client(
    serve: Callable[..., FakeServer], capsys: pytest.CaptureFixture[str]
) -> None:
    unlimited = serve(completion)
    small = ["--prompt-tokens", "16", "--output-tokens", "40", "--num-requests", "12", "--warmup", "0"]
    assert main(["--base-url", unlimited.url, *small, "--request-rate", "10000"]) == 0
    assert unlimited.max_open > 8 and "Maximum request concurrency: None" in capsys.readouterr().out
    limited = serve(completion)
    names = "client_queue_time,e2el_including_client_queue"
    main(["--base-url", limited.url, *small, "--request-rate", "10000", "--concurrency", "2",
          "--percentile-metrics", names])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert limited.max_open == 2 and result["p99_client_queue_time_ms"] > result["median_client_queue_time_ms"] > 10


def test_a_server_that_is_not_ready_yet_is_waited_for(
    serve: Callable[..., FakeServer], capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[int] = []

    def answer(body: dict[str, Any]) -> tuple[int, list[bytes]]:
        calls.append(1)
        return (503, [b"loading"]) if len(calls) == 1 else completion(body)

    assert run(serve(answer), capsys, "--ready-check-timeout-sec", "20")[0] == 0
    calls.clear()
    assert run(serve(answer), capsys)[1]["first_error"].endswith("HTTP 503: loading")


def words(body: dict[str, Any]) -> tuple[int, list[bytes]]:
    """A server whose tokens are words; its chat template puts one in front."""
    if "max_tokens" in body:
        return completion(body)
    if "messages" in body:
        return 200, [json.dumps({"tokens": [1] + [2] * len(body["messages"][0]["content"].split())}).encode()]
    return 200, [json.dumps({"tokens": [2] * len(body["prompt"].split())}).encode()]


def conversation(prompt: str, answer: str) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": prompt}, {"from": "gpt", "value": answer}]}


def test_conversations_of_a_sharegpt_file_are_prompts_and_lengths(
    serve: Callable[..., FakeServer], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "s.json"
    file.write_text(json.dumps([conversation("one two three four", "1 2 3 4 5"), conversation("too short", "1 2 3 4 5"),
                                conversation("five six seven eight", "no no"), {"conversations": []},
                                conversation("w " * 1025, "1 2 3 4"), conversation("a b c d e", "1 2 3 4 5 6 7")]))
    server = serve(words)
    options = ["--dataset-name", "sharegpt", "--dataset-path", str(file), "--base-url", server.url, "--warmup", "0"]
    assert main([*options, "--num-prompts", "6", "--disable-shuffle"]) == 0
    sent = [(body["prompt"], body["max_tokens"]) for body in server.bodies if body.get("max_tokens", 1) > 1]
    assert sent[:2] == [("one two three four", 5), ("a b c d e", 7)] and len(sent) == 6 and len(set(sent)) == 2
    assert "ignore_eos" not in server.bodies[-1]
    server.bodies.clear()
    assert main([*options, "--num-prompts", "6", "--output-len", "3", "--no-oversample", "--ignore-eos"]) == 0
    sent = [(body["prompt"], body["max_tokens"]) for body in server.bodies if body.get("max_tokens", 1) > 1]
    assert sorted(sent) == [("a b c d e", 3), ("five six seven eight", 3), ("one two three four", 3)]
    assert server.bodies[-1]["ignore_eos"] is True
    capsys.readouterr()


def test_lines_of_a_file_of_ones_own_go_through_the_chat_template_of_the_server(
    serve: Callable[..., FakeServer], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "c.jsonl"
    file.write_text('{"prompt": "a b", "output_tokens": 4}\n\n{"prompt": "c"}\n')
    server = serve(words)
    options = ["--dataset-name", "custom", "--dataset-path", str(file), "--base-url", server.url, "--warmup", "0",
               "--num-prompts", "2", "--disable-shuffle", "--concurrency", "1"]
    assert main([*options, "--custom-output-len", "6"]) == 0
    sent = [(body["prompt"], body["max_tokens"]) for body in server.bodies if body.get("max_tokens", 1) > 1]
    assert sent == [([1, 2, 2], 6), ([1, 2], 6)]
    server.bodies.clear()
    assert main([*options, "--skip-chat-template", "--output-len", "5"]) == 0
    assert [(body["prompt"], body["max_tokens"]) for body in server.bodies[-2:]] == [("a b", 5), ("c", 5)]
    capsys.readouterr()
    assert main([*options, "--custom-output-len", "-1"]) == 1           # the second line does not say how long
    assert "output_tokens (integer above 0)" in capsys.readouterr().err


def test_prefixes_repeat_in_front_of_different_suffixes() -> None:
    options = ("--dataset-name prefix_repetition --num-prompts 11 --prefix-repetition-num-prefixes 3 "
               "--prefix-repetition-prefix-len 8 --prefix-repetition-suffix-len 5 --output-len 4").split()
    found = repeated_prefix_prompts(parse_args(options), 1)
    assert found == repeated_prefix_prompts(parse_args(options), 1) != repeated_prefix_prompts(parse_args(options), 2)
    assert {(len(ids), length) for ids, length in found} == {(13, 4)} and len(found) == 9
    prefixes = [tuple(ids[:8]) for ids, _ in found]
    assert sorted(map(prefixes.count, set(prefixes))) == [3, 3, 3] and len({tuple(ids[8:]) for ids, _ in found}) == 9
    plain = [tuple(ids[:8]) for ids, _ in repeated_prefix_prompts(parse_args([*options, "--disable-shuffle"]), 1)]
    assert plain[:3] == [plain[0]] * 3 and plain[3] != plain[0] and prefixes != plain


@pytest.mark.parametrize("options", [
    "--result-filename missing/r.json", "--result-dir /dev/null/x --save-result", "--json missing/r.json", "--json .",
    "--plot missing/p.png --concurrency 1,2", "--temperature nan", "--top-p inf", "--warmup -1", "--shared-prefix -3",
    "--timeout nan", "--ready-check-timeout-sec -1", "--logprobs -1"])
def test_what_cannot_be_written_or_sent_is_refused_before_the_load(
    options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as error:
        main(["--base-url", "http://127.0.0.1:1", *options.split()])
    assert error.value.code == 2 and options.split()[0] in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_infinite_burstiness_is_a_metronome_and_its_result_is_json(
    serve: Callable[..., FakeServer], capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--num-requests", "3", "--output-tokens", "2", "--request-rate", "1000", "--burstiness", "inf"]
    assert main(["--base-url", serve(completion).url, *small]) == 0

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    result = json.loads(capsys.readouterr().out.splitlines()[-1], parse_constant=refuse)
    assert (result["burstiness"], result["load"]["burstiness"]) == ("inf", "inf")
