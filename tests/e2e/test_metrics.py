"""What Triton's /metrics tells, held against requests whose counts are known."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.command import free_ports, wait_for
from tests.e2e.metrics import Scrape
from tests.e2e.models import without_end
from tests.e2e.server import RunningServer
from tests.e2e.stock_client import Stream, is_final, make_inputs, run
from trident_client import InvalidArgument
from trident_llm.cli.http_check import model_is_ready
from trident_llm.cli.repository import write_repository
from trident_llm.cli.server_process import ServerSettings, server_command
from trident_llm.cli.triton_server import find_tritonserver, prepare_server

pytestmark = pytest.mark.e2e

PROMPTS = ("Hello, my name is", "The most dangerous animal is", "The future of AI is")
GREEDY = {"temperature": "0", "ignore_eos": True}
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("metrics")
    with RunningServer(
        folder, f"--model={without_end(tiny_model, folder / 'endless')}", "--dtype=float32", "--no-self-check", "--max-num-seqs=4",
        "--num-blocks=40",
    ) as running:  # fmt: skip
        yield running


def test_counts_are_those_of_vllm_backends_test(server: RunningServer) -> None:
    """Three prompts of 16 tokens, twice; told in full as soon as the answers are there."""
    before = Scrape(server.metrics_port)
    num_prompt_tokens = 0
    for stream in (False, True):
        for prompt in PROMPTS:
            inputs = make_inputs(prompt, GREEDY, stream=stream, return_num_input_tokens=True)
            results = run(server.grpc_port, inputs)
            num_prompt_tokens += int(results[0].as_numpy("num_input_tokens")[0])
    after = Scrape(server.metrics_port)

    def gained(name: str, **labels: str) -> float:
        return after.total(f"vllm:{name}", **labels) - before.total(f"vllm:{name}", **labels)

    assert gained("prompt_tokens_total") == num_prompt_tokens > 6 * 3
    assert gained("generation_tokens_total") == 96
    assert gained("time_to_first_token_seconds_count") == 6
    assert gained("time_per_output_token_seconds_count") == 90
    assert gained("inter_token_latency_seconds_count") == 90
    assert gained("request_time_per_output_token_seconds_count") == 6
    assert gained("e2e_request_latency_seconds_count") == 6
    assert gained("request_queue_time_seconds_count") == 6
    assert gained("request_prompt_tokens_count") == 6
    assert gained("request_prompt_tokens_sum") == num_prompt_tokens
    assert gained("request_generation_tokens_count") == 6
    assert gained("request_generation_tokens_sum") == 96
    assert gained("request_params_n_count") == gained("request_params_n_sum") == 6
    assert gained("request_params_max_tokens_sum") == 96
    assert gained("request_success_total", finished_reason="length") == 6
    assert gained("request_success_total", finished_reason="stop") == 0
    for name in ("time_to_first_token", "time_per_output_token", "e2e_request_latency"):
        total = gained(f"{name}_seconds_sum")
        assert total > 0
        assert gained(f"{name}_seconds_bucket", le="+Inf") == gained(f"{name}_seconds_count")
    assert gained("prefix_cache_queries_total") == num_prompt_tokens
    assert after.total("vllm:num_requests_running") == 0


def test_labels_name_model_and_instance(server: RunningServer) -> None:
    scrape = Scrape(server.metrics_port)
    ours = [s for s in scrape.samples if s.name.startswith(("vllm:", "trident:", "nv_trt_llm"))]
    assert len(ours) > 50
    for sample in ours:
        assert sample.labels.items() >= {
            "model": "llm", "version": "1", "model_name": "llm", "engine": "llm_0_0",
        }.items()  # fmt: skip


def test_every_request_has_one_outcome(endless_server: RunningServer) -> None:
    server = endless_server

    def outcomes() -> dict[str, float]:
        return Scrape(server.metrics_port).outcomes()

    before = outcomes()
    with server.client(retries=0) as client:
        client.generate("hello", n=2, max_tokens=3)
        client.tokenize("hello")
        for _ in range(2):
            with pytest.raises(InvalidArgument):
                client.generate("hello", temperature=-1)
    with Stream(server.grpc_port) as stream:
        stream.send("llm", make_inputs("hello", {"max_tokens": 50_000, **GREEDY}, stream=True))
        wait_for(lambda: stream.results, "it streams")
        stream.cancel()
    with Stream(server.grpc_port) as stream:
        stream.send("llm", make_inputs("hello", {"max_tokens": 50_000, **GREEDY}), timeout=50_000)
        stream.wait_for(1)
    wait_for(lambda: outcomes()["CANCELLED"] > before["CANCELLED"], "the cancel is counted")
    gained = {name: value - before[name] for name, value in outcomes().items()}
    assert gained == {
        "result": 1, "control": 1, "INVALID_ARG": 2, "CANCELLED": 1, "UNAVAILABLE": 1, "INTERNAL": 0,
    }  # fmt: skip


def test_gauges_follow_the_engine(server: RunningServer) -> None:
    inputs = make_inputs("hello there " * 4, {"max_tokens": 550, **GREEDY}, stream=True)
    with Stream(server.grpc_port) as stream:
        num_sent = 0

        def busy() -> bool:
            nonlocal num_sent
            ended = sum(error is not None or is_final(result) for result, error in stream.results)
            while num_sent - ended < 8:  # a fast machine ends them before the gauges are pushed
                stream.send("llm", inputs)
                num_sent += 1
            scrape = Scrape(server.metrics_port)
            used = scrape.total("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="used")
            return (
                scrape.total("vllm:num_requests_running") > 0
                and scrape.total("vllm:num_requests_waiting") > 0
                and 0 < scrape.total("vllm:kv_cache_usage_perc") <= 1
                and 0 < used <= 39
            )

        wait_for(busy, "the gauges show it")
        results = stream.wait_for(num_sent)
    assert all(error is None for _, error in results)
    scrape = Scrape(server.metrics_port)
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert scrape.total(f"vllm:{name}") == 0
    blocks = {
        sample.labels["kv_cache_block_type"]: sample.value
        for sample in scrape.find("nv_trt_llm_kv_cache_block_metrics")
    }
    assert blocks == {"used": 0, "free": 39, "max": 39, "tokens_per": 16, "fraction": 0}
    # Sequences of 600 tokens do not fit 39 blocks together; and equal prompts share their prefix.
    stats = server.idle_stats()
    assert scrape.total("vllm:num_preemptions_total") == stats["num_preemptions"] > 0
    assert scrape.total("vllm:prefix_cache_hits_total") == stats["prefix_hits"] > 0
    assert scrape.total("trident:engine_healthy") == 1


def test_a_server_without_metrics_serves_all_the_same(tmp_path: Path, tiny_model: Path) -> None:
    write_repository(tmp_path / "models", "llm", {"model": str(tiny_model), "dtype": "float32"})
    triton = prepare_server(find_tritonserver(None), tmp_path)
    http_port, grpc_port, metrics_port = free_ports(3)
    settings = ServerSettings(
        http_port=http_port, grpc_port=grpc_port, metrics_port=metrics_port,
        model_control_mode="none", repository=tmp_path / "models", complete_config=True,
        run_directory=tmp_path, log_file=tmp_path / "log", drain_seconds=1.0,
        shm_prefix=f"trident_test_{os.getpid()}_",
    )  # fmt: skip
    command = [*server_command(triton, settings), "--allow-metrics=false"]
    with settings.log_file.open("wb") as log:
        process = subprocess.Popen(
            command, env=dict(triton.environment), stdout=log, stderr=subprocess.STDOUT
        )
    try:
        wait_for(lambda: model_is_ready(http_port, "llm"), "the model is ready")
        for _ in range(2):
            results = run(grpc_port, make_inputs("hello", GREEDY, stream=True))
            assert results
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", metrics_port)).close()
    finally:
        process.send_signal(signal.SIGTERM)
        status = process.wait(60)
    assert status == 0
    assert "metrics" not in "".join(
        line for line in settings.log_file.read_text().splitlines() if line.startswith("trident")
    )


def test_the_dashboard_asks_for_nothing_that_is_not_exported(server: RunningServer) -> None:
    run(server.grpc_port, make_inputs("hello", GREEDY))
    scrape = Scrape(server.metrics_port)
    board = json.loads((ROOT / "backend" / "deploy" / "grafana.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked += [item["query"] for item in board["templating"]["list"] if item["type"] == "query"]
    for expression in asked:
        selectors = re.findall(r"([\w:]+)\{([^}]*)\}", expression)
        # Whatever else is a word in it belongs to the language.
        rest = re.sub(r"[\w:]+\{[^}]*\}", "", expression)
        assert selectors and ":" not in rest, expression
        for name, conditions in selectors:
            found = scrape.find(name)
            assert found, f"no series {name}"
            labels = set(re.findall(r"(\w+)=", conditions.replace("=~", "=")))
            grouped = set(re.findall(r"by \((\w+)\)", expression))
            assert labels | grouped <= found[0].labels.keys(), expression
    positions = [tuple(panel["gridPos"][side] for side in "xy") for panel in board["panels"]]
    assert len(set(positions)) == len(positions) >= 10
