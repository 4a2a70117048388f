"""Our client and a real server: what only Trident's models have, and the client on its own."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.cli.command import wait_for
from tests.e2e.metrics import Scrape
from tests.e2e.server import RunningServer
from trident_client import InvalidArgument

pytestmark = pytest.mark.e2e

PROMPT = "The history of computing is longer than the history of electronic computers"


def test_logprobs_of_the_prompt_are_those_of_transformers(
    small_pool_server: RunningServer, default_model: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    with small_pool_server.client() as client:
        ids = client.tokenize(PROMPT)
        streamed = client.stream(ids, max_tokens=4, prompt_logprobs=2).result()
        whole = client.generate(PROMPT, max_tokens=4, prompt_logprobs=2)
        assert client.generate(PROMPT, max_tokens=1).prompt_logprobs is None
        pieces = [client.detokenize([token_id]) for token_id in ids]
    assert whole.prompt_logprobs == streamed.prompt_logprobs
    assert whole.prompt_logprobs is not None
    assert len(whole.prompt_logprobs) == len(ids)
    assert whole.prompt_logprobs[0] is None
    model = AutoModelForCausalLM.from_pretrained(default_model, dtype=torch.float32)
    with torch.inference_mode():
        rows = torch.log_softmax(model(torch.tensor([ids])).logits[0], dim=-1)
    for position, row in enumerate(rows[:-1], start=1):
        entries, token_id = whole.prompt_logprobs[position], ids[position]
        assert entries is not None
        assert entries[0].token_id == token_id
        assert entries[0].decoded_token == pieces[position]
        assert {each.token_id for each in entries} == {token_id, *row.topk(2).indices.tolist()}
        for each in entries:
            assert each.logprob == pytest.approx(float(row[each.token_id]), abs=1e-3)
            assert each.rank == int((row > row[each.token_id]).sum()) + 1


def test_too_long_a_prompt_for_its_logprobs_is_refused(small_pool_server: RunningServer) -> None:
    with small_pool_server.client() as client:
        with pytest.raises(InvalidArgument, match="prompts of at most 130 tokens") as caught:
            client.generate([5] * 131, max_tokens=1, prompt_logprobs=20)
        assert caught.value.field == "return_prompt_logprobs"
        result = client.generate([5] * 130, max_tokens=1, prompt_logprobs=20)
    assert result.prompt_logprobs is not None
    assert len(result.prompt_logprobs) == 130


def test_prefixes_are_shared_under_one_salt_only(small_pool_server: RunningServer) -> None:
    prompt = list(range(300, 364))  # four blocks, of which the last one is computed anew
    with small_pool_server.client() as client:
        cached = [
            client.generate(prompt, max_tokens=1, cache_salt=salt).usage.cached_tokens
            for salt in (None, None, "a", "a", "b")
        ]
    assert cached == [0, 48, 0, 48, 0]


def test_the_times_of_a_request(small_pool_server: RunningServer) -> None:
    before = time.time_ns()
    with small_pool_server.client() as client:
        times = client.generate(PROMPT, max_tokens=8, return_perf_metrics=True).times
        streamed = client.stream(PROMPT, max_tokens=8, return_perf_metrics=True).result().times
        assert client.generate(PROMPT, max_tokens=1).times is None
    for each in (times, streamed):
        assert each is not None
        moments = [
            each.arrival_ns, each.first_scheduled_ns, each.first_token_ns, each.last_token_ns,
        ]  # fmt: skip
        # The server's clock is read once: it may be a little off from ours.
        told = [before - 10**9, *(moment or 0 for moment in moments), time.time_ns() + 10**9]
        assert told == sorted(told)


# ---- the client, installed alone -------------------------------------------------------------------

SCRIPT = """
import json, sys
import numpy
import trident_client
from trident_client import Cancelled, Client, InvalidArgument

try:
    import torch
except ModuleNotFoundError:
    pass
else:
    sys.exit("torch is there")
assert not any(name.startswith("trident_llm") for name in sys.modules)
with Client(sys.argv[1], "llm") as client:
    deltas = [d.text for d in client.stream("Hello", max_tokens=6, temperature=0, ignore_eos=True)]
    whole = client.generate("Hello", max_tokens=6, temperature=0, ignore_eos=True)
    stream = client.stream("Hello", max_tokens=1000, ignore_eos=True)
    next(stream)
    stream.cancel()
    try:
        stream.result()
        cancelled = False
    except Cancelled:
        cancelled = True
    try:
        client.generate("Hello", temperature=-1)
        field = None
    except InvalidArgument as error:
        field = error.field
print(json.dumps({"deltas": deltas, "whole": whole.text, "cancelled": cancelled, "field": field}))
"""


def needed_by(name: str, extras: frozenset[str] = frozenset()) -> Iterator[Distribution]:
    """A package, and what its installation brings with it."""
    found = distribution(name)
    yield found
    for line in found.requires or []:
        wanted = Requirement(line)
        marker = wanted.marker
        if marker is None or any(marker.evaluate({"extra": each}) for each in ("", *extras)):
            yield from needed_by(wanted.name, frozenset(wanted.extras))


def test_installed_alone_it_streams_cancels_and_reports_errors(
    small_pool_server: RunningServer, tmp_path: Path
) -> None:
    site = Path(sysconfig.get_path("purelib"))
    packages = tmp_path / "packages"
    packages.mkdir()
    names = set()
    for each in needed_by("trident-client"):
        names.add(each.metadata["Name"])
        for top in {path.parts[0] for path in each.files or [] if path.parts[0] != ".."}:
            if not top.startswith("__") and not (packages / top).exists():
                (packages / top).symlink_to(site / top)
    assert {"tritonclient", "grpcio", "numpy", "protobuf"} <= names
    client = Path(__file__).parents[2] / "client"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (target,) = (tmp_path / "venv").glob("lib/python3*/site-packages")
    (target / "client.pth").write_text(f"{packages}\n{client}\n")

    def num_cancelled() -> float:
        scrape = Scrape(small_pool_server.metrics_port)
        return scrape.total("trident:request_errors_total", code="CANCELLED")

    before = num_cancelled()
    url = f"localhost:{small_pool_server.grpc_port}"
    done = subprocess.run(
        [tmp_path / "venv" / "bin" / "python3", "-I", "-c", SCRIPT, url],
        capture_output=True, text=True, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["whole"] == "".join(told["deltas"]) != ""
    assert len(told["deltas"]) > 1
    assert told["cancelled"] is True
    assert told["field"] == "sampling_parameters.temperature"
    wait_for(lambda: num_cancelled() == before + 1, "the cancel is counted")
