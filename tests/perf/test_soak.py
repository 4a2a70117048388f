"""The soak, for a few seconds, and that it would notice."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest

from perf import mix, soak
from tests.e2e.server import RunningServer
from trident_client import AsyncClient

pytestmark = pytest.mark.e2e


def test_a_few_seconds(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak, "GROWTH_LIMIT_MIB", 4096.0)  # at first memory grows
    with pytest.raises(SystemExit) as ended:
        soak.main(["--minutes=0.15", f"--model={tiny_model}", "--workers=8"])
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["problems"] == []
    assert ended.value.code == 0
    assert {name.partition(":")[0] for name in told["counts"]} <= mix.WEIGHTS.keys()
    assert told["requests"] > 0
    assert told["audits"] >= 2


def test_another_answer_is_noticed(tiny_server: RunningServer) -> None:
    async def main() -> None:
        url = f"localhost:{tiny_server.grpc_port}"
        async with AsyncClient(url, "llm") as client:
            requests = {request.name: request for request in mix.make_requests(400, 256)}
            short, left = requests["short 0"], requests["cancelled 0"]
            right = await short.alone(client)
            assert await short.send(client, right, random.Random(0)) == "answered"
            index, text, token_ids, reason = right[0]
            for wrong in ((index, text + "x", token_ids, reason), (index, text, (5,), reason)):
                with pytest.raises(mix.Mismatch):
                    await short.send(client, (wrong,), random.Random(0))
            with pytest.raises(mix.Mismatch):
                await left._leave(client, ((0, "never", (0,), None),), 10)

    asyncio.run(main())
