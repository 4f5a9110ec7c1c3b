"""The comparison: a server's life and weight, the forms of a model, and what the report claims."""
from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import peer_models, peers
from bench.peer_process import Server, free_port, memory_mb, process_tree
from bench.peer_report import claims, markdown_tables, write_markdown, write_plot
from bench.peer_servers import Peer

# A server with a child of its own: it loads for a moment, then answers one token to everybody.
SERVER = textwrap.dedent("""
    import http.server, json, subprocess, sys, time
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    loaded = time.monotonic() + 0.3

    class Answer(http.server.BaseHTTPRequestHandler):
        def send(self, status, body):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def do_GET(self):
            self.send(200, {"data": [{"id": "m"}]})

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send(200 if time.monotonic() > loaded else 503, {"choices": [{"text": "x"}]})

        def log_message(self, *_):
            pass

    http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
""")


def is_running(pid: int) -> bool:
    """Neither gone nor a dead entry that its new parent has not collected yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def entry(engine: str, like: bool = True, first_token_s: float = 3.0, peak_mb: float = 700, **rows: float) -> dict:
    return {"engine": engine, "weights": "w", "like": like, "time": "10:00", "first_token_s": first_token_s,
            "peak_mb": peak_mb, "rows": {row: {"value": [rate, rate, 9 * rate], "decode": []}
                                         for row, rate in rows.items()}}


def result(**entries: dict) -> dict[str, Any]:
    return {"date": "2026-01-02", "machine": "some-2cores", "repeats": 3, "versions": {"vllm": "1"}, "peers": entries}


def test_a_server_is_waited_for_weighed_with_its_children_and_ended_with_them(tmp_path):
    port = free_port()
    with Server([sys.executable, "-c", SERVER, str(port)], {}, tmp_path / "log") as server:
        assert server.first_token_s(f"http://127.0.0.1:{port}", 60) >= 0.3     # 503 while it loads is not a token
        pids = process_tree(server.process.pid)
        assert len(pids) == 2
        peak, now = memory_mb(server.process.pid)
        assert peak >= now > 5
        alone = memory_mb(pids[1])[0]
        assert peak > 1.5 * alone                                              # the child counts
    assert not [pid for pid in pids if is_running(pid)]


def test_a_server_that_ends_early_is_reported_with_the_end_of_its_log(tmp_path):
    with Server([sys.executable, "-c", "print('no such model'); raise SystemExit(7)"], {}, tmp_path / "log") as server:
        with pytest.raises(RuntimeError, match="status 7.*no such model"):
            server.first_token_s("http://127.0.0.1:9", 60)


def test_a_peer_that_is_absent_is_skipped_with_the_way_to_get_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(peers, "find", lambda engine: None)
    absent = Peer("llama-f32", "llama.cpp", "float32", True, lambda port: ["false"])
    monkeypatch.setattr(peers, "all_peers", lambda: [absent])
    assert peers.main(["--rows", "c1", "--into", str(tmp_path / "r.json")]) == 1
    assert "llama-f32: skipped, llama.cpp is not here: bash bench/peers.sh install llama.cpp" in capsys.readouterr().out


def test_a_failing_peer_costs_the_others_nothing(tmp_path, monkeypatch, capsys):
    good = "import json; print(json.dumps({'first_token_s': 1.0, 'peak_mb': 5, 'rows': {'c1': {'value': [4.0, 8.0]," \
           " 'decode': []}}}))"
    both = [Peer("broken", "vllm", "w", True, lambda port: [sys.executable, "-c", "raise SystemExit(3)"]),
            Peer("sound", "transformers", "w", True, lambda port: [sys.executable, "-c", good], kind="library")]
    monkeypatch.setattr(peers, "all_peers", lambda: both)
    monkeypatch.setattr(peers, "find", lambda engine: Path(sys.executable))
    monkeypatch.setattr(peers, "version", lambda engine: "1.0")
    into = tmp_path / "r.json"
    assert peers.main(["--rows", "c1", "--into", str(into)]) == 0
    seen = capsys.readouterr()
    assert "broken: failed" in seen.err and "status 3" in seen.err
    kept = json.loads(into.read_text())
    assert list(kept["peers"]) == ["sound"] and kept["peers"]["sound"]["rows"]["c1"]["value"] == [4.0, 8.0]


def test_an_unknown_peer_is_refused(capsys):
    with pytest.raises(SystemExit):
        peers.main(["--only", "nobody"])
    assert "unknown: nobody" in capsys.readouterr().err


def test_a_claim_is_the_best_of_ours_over_the_best_that_the_row_allows():
    """c1 is compared with engines of like accuracy at 1.5, and with all of them at 1; the other rows with all."""
    made = {(claim.row, claim.must): claim for claim in claims(result(
        slow=entry("vllm", c1=10, c8=40), lossy=entry("llama.cpp", like=False, c1=30, c8=50),
        threefold=entry("threefold", c1=20, c8=150), extra=entry("threefold", c1=5, c8=170)))}
    like, any_peer, eight = made["c1", 1.5], made["c1", 1.0], made["c8", 2.0]
    assert (like.ours, like.peer, like.ratio, like.verdict) == ("threefold", "slow", 2.0, "must")
    assert (any_peer.peer, any_peer.verdict) == ("lossy", "below must")
    assert (eight.ours, eight.peer, eight.ratio, eight.verdict) == ("extra", "lossy", 3.4, "must")


def test_float32_is_compared_with_float32():
    made = {claim.row: claim for claim in claims(result(
        **{"vllm-f32": entry("vllm", prefill=100, c8=10), "llama-f32": entry("llama.cpp", prefill=90, c8=12),
           "llama-q4_0": entry("llama.cpp", c8=99), "threefold-f32": entry("threefold", prefill=97, c8=11)}))}
    assert made["prefill, float32"].verdict == "aim"            # 0.97 of a peer near the limit is enough
    assert (made["c8, float32"].peer, made["c8, float32"].verdict) == ("llama-f32", "below must")


def test_the_report_shows_medians_limits_and_gaps(tmp_path):
    found = result(threefold=entry("threefold", c1=20, first_token_s=5.0, peak_mb=2000), peer=entry("vllm", c8=4))
    lines = markdown_tables(found)
    assert "| c1: 256 in, 128 out, one at a time | 20 |  |" in lines          # the outlier is not the median
    assert "| start to first token, s | threefold |  | 5.0 | <= 8 | <= 4 | must |" in lines
    assert "| peak memory, MB | threefold |  | 2000.0 | <= 1500 | <= 800 | above must |" in lines
    assert any(line.startswith("| c1 | threefold |  |  |") and "no peer" in line for line in lines)
    write_markdown(found, tmp_path / "r.md")
    write_plot(found, tmp_path / "r.png")
    assert "some-2cores" in (tmp_path / "r.md").read_text() and (tmp_path / "r.png").stat().st_size > 1000


def write_gguf(path: Path) -> np.ndarray:
    """A file with one 4-bit matrix and one norm; returns what the matrix stands for."""
    import gguf
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 1)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    values = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    q4_1 = gguf.GGMLQuantizationType.Q4_1
    blocks = gguf.quants.quantize(values, q4_1)
    writer.add_tensor("w", blocks, raw_dtype=q4_1)
    writer.add_tensor("norm", np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    dequantized: np.ndarray = gguf.quants.dequantize(blocks, q4_1)
    return dequantized


@pytest.mark.parametrize(("ggml_type", "error"), [("F32", 0.0), ("Q8_0", 0.03), ("Q4_0", 0.5)])
def test_a_gguf_file_is_written_anew_with_its_values_and_metadata(tmp_path, ggml_type, error):
    import gguf
    source = tmp_path / "model.Q4_1.gguf"
    values = write_gguf(source)
    path = peer_models.gguf_file(str(source), ggml_type, tmp_path / "made")
    assert path.name == f"model.{ggml_type}.gguf"
    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert tensors["w"].tensor_type.name == ggml_type and tensors["norm"].tensor_type.name == "F32"
    found = gguf.quants.dequantize(tensors["w"].data, tensors["w"].tensor_type)
    assert np.abs(found - values).max() <= error and (error == 0 or np.abs(found - values).max() > 0)
    assert reader.fields["llama.block_count"].contents() == 1
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
