"""What the command line answers: to --help, to a group, to a flag that does not exist."""
from __future__ import annotations

import pytest

from ipc.cli import GROUPS, OPTIONS, make_parser
from ipc.option_answers import ANSWERS, FOREIGN
from ipc.option_help import MAIN, nearest, unknown_flag
from ipc.sampling_params import MAX_LOGPROBS


def error_of(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as error:
        make_parser().parse_args(argv)
    assert error.value.code == 2
    return capsys.readouterr().err


def help_of(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as error:
        make_parser().parse_args(argv)
    assert error.value.code == 0
    return capsys.readouterr().out


def test_plain_help_shows_the_main_options_and_says_where_the_others_are(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(["--help"], capsys)
    assert "--max-model-len" in text and "--host" in text and "--lpm-max-overtakes" not in text
    shown = sum(option.name in MAIN for option in OPTIONS.values())
    assert shown <= 26 and "--help=all" in text and "cache" in text.splitlines()[-1] + text.splitlines()[-2]


def test_help_all_shows_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(["--help=all"], capsys)
    assert all(option.flag in text for option in OPTIONS.values())


def test_help_of_a_group_shows_that_group_whole_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(["--help=Scheduler"], capsys)
    assert all(option.flag in text for option in GROUPS["scheduler"])
    assert "--block-size" not in text
    assert "no group 'sched'; groups are model, cache, scheduler" in error_of(["--help=sched"], capsys)


@pytest.mark.parametrize(("flag", "meant"), [
    ("--max-seqs", "--max-num-seqs"), ("--kvcache-memory", "--kv-cache-memory"), ("--modle", "--model"),
    ("--no-prefix-caching", "--no-enable-prefix-caching"), ("--prefix-caching", "--enable-prefix-caching")])
def test_a_typing_error_is_answered_with_the_nearest_flag(flag: str, meant: str,
                                                          capsys: pytest.CaptureFixture[str]) -> None:
    found = error_of([flag, "4", "--model", "m"], capsys)
    assert f"unknown option {flag}; did you mean " in found and meant.removeprefix("--no-").removeprefix("--") in found


@pytest.mark.parametrize(("argv", "text"), [
    (["--model-path", "x"], "--model-path (that is SGLang's name); did you mean --model?"),
    (["--mem-fraction-static=0.8"], "did you mean --gpu-memory-utilization?"),
    (["-m", "x"], "-m (that is llama.cpp's name); did you mean --model?"),
    (["-ngl", "99", "--model", "x"], "did you mean --device cuda?"),
    (["--model", "x", "-c", "4096"], "did you mean --max-model-len?")])
def test_spellings_of_other_engines_are_answered_with_ours(argv: list[str], text: str,
                                                           capsys: pytest.CaptureFixture[str]) -> None:
    """Before argparse sees them: it would take the value of an unknown flag for the model."""
    assert text in error_of(argv, capsys)


def test_no_foreign_spelling_hides_one_of_ours() -> None:
    ours = {flag for option in OPTIONS.values() for flag in (option.flag, *option.aliases)}
    assert not (FOREIGN.keys() | ANSWERS) & ours


def test_underscores_in_flags_are_dashes_and_values_are_left_alone() -> None:
    args = make_parser().parse_args(["--max_num_seqs", "7", "--served_model_name=a_b", "my_model", "--seed", "-5"])
    assert (args.max_num_seqs, args.served_model_name, args.model_name, args.seed) == (7, "a_b", "my_model", -5)


def test_what_is_far_from_everything_gets_no_guess() -> None:
    assert nearest("--xyzzy", ["--model", "--port"]) == ""
    assert nearest("--port", ["--model", "--port"]) == "--port"


# As vLLM's documents and start scripts spell them.
VLLM = """--model --served-model-name --tokenizer --revision --dtype --quantization --load-format --max-model-len
--gpu-memory-utilization --kv-cache-memory-bytes --num-gpu-blocks-override --block-size --kv-cache-dtype --max-num-seqs
--max-num-batched-tokens --enable-prefix-caching --no-enable-prefix-caching --enable-chunked-prefill --scheduling-policy
--async-scheduling --enforce-eager --cudagraph-capture-sizes --attention-backend --tensor-parallel-size -tp
--pipeline-parallel-size -pp --data-parallel-size -dp --enable-expert-parallel --nnodes --node-rank --master-addr
--master-port --speculative-config --enable-lora --max-loras --max-lora-rank --lora-modules --structured-outputs-config
--reasoning-parser --tool-call-parser --enable-auto-tool-choice --chat-template --chat-template-content-format
--default-chat-template-kwargs --generation-config --override-generation-config --seed --max-logprobs --stream-interval
--host --port --uds --root-path --api-key --ssl-keyfile --ssl-certfile --ssl-ca-certs --allowed-origins
--allowed-methods --allowed-headers --allow-credentials --enable-request-id-headers --enable-force-include-usage
--enable-prompt-tokens-details --disable-uvicorn-access-log --disable-access-log-for-endpoints --max-num-queued-reqs
--shutdown-timeout --otlp-traces-endpoint --profiler-config --log-level --enable-log-requests --disable-log-stats
--config --distributed-executor-backend --data-parallel-size-local --disable-custom-all-reduce --max-cpu-loras
--limit-mm-per-prompt --mm-processor-kwargs --allowed-local-media-path --runner --convert --task --pooler-config
--compilation-config --optimization-level -O --kv-transfer-config --kv-events-config --kv-offloading-size
--cpu-offload-gb --worker-cls --scheduler-cls --spec-method --spec-tokens --enable-log-outputs --disable-log-requests
--max-log-len --log-config-file --enable-sleep-mode --enable-server-load-tracking --show-hidden-metrics-for-version
--return-tokens-as-token-ids --response-role --trust-request-chat-template --tool-server --tool-parser-plugin
--enable-prompt-embeds --hf-overrides --hf-token --tokenizer-mode --skip-tokenizer-init --logprobs-mode
--disable-sliding-window --disable-cascade-attn --use-tqdm-on-load --model-impl --config-format --additional-config
--attention-config --prefix-caching-hash-algo""".split()
SGLANG = """--model-path --tp --mem-fraction-static --context-length --chunked-prefill-size --max-running-requests
--schedule-policy --grammar-backend""".split()


@pytest.mark.parametrize("flag", [*VLLM, *SGLANG])
def test_every_flag_of_theirs_is_ours_or_answered_with_what_to_do(flag: str) -> None:
    known = make_parser()._option_string_actions
    if flag in known:
        return
    said = unknown_flag(flag, known)
    named = said.partition("did you mean ")[2].split(" ")[0].rstrip("?")
    assert named in known or flag in ANSWERS, said
    advised = [word.strip(",;:") for word in said.removeprefix(f"unknown option {flag}").split() if word[:2] == "--"]
    assert all(word.rstrip("?") in known for word in advised), said


def test_a_limit_that_an_answer_tells_is_the_limit() -> None:
    assert f" {MAX_LOGPROBS};" in ANSWERS["--max-logprobs"]


def test_shutdown_timeout_is_the_drain_timeout() -> None:
    assert make_parser().parse_args(["m", "--shutdown-timeout", "5"]).drain_timeout == 5.0
