"""Variants and other engines that take turns."""

from __future__ import annotations

import argparse
import sys

import pytest

from perf import interleave
from perf.interleave import parse_peer, parse_variant

# An engine that makes a token of each request a step.
PEER = """
from perf import peers

class Each:
    def __init__(self, given):
        assert given.model == "some"
        self.left = {}
    def add(self, key, spec):
        self.left[key] = spec.output_len
    def step(self):
        self.left = {key: left - 1 for key, left in self.left.items() if left}
        return [(key, 1) for key in self.left]

print("what engines print")
peers.main("", Each, "model")
"""


def test_a_variant_is_an_environment_and_settings() -> None:
    variant = parse_variant("b:X_1=1,Y=2:3,block_size=4")
    assert variant.name == "b"
    assert variant.environment == {"X_1": "1", "Y": "2:3"}
    assert variant.settings == {"block_size": "4"}
    with pytest.raises(argparse.ArgumentTypeError):
        parse_variant("b:X")


def test_a_peer_is_a_command() -> None:
    peer = parse_peer("x:W1+W4=env A=1 python -m 'a b'")
    assert (peer.name, peer.workloads) == ("x", ("W1", "W4"))
    assert peer.command == ("env", "A=1", "python", "-m", "a b")
    for wrong in ("x", "=y", "x="):
        with pytest.raises(argparse.ArgumentTypeError):
            parse_peer(wrong)


def test_peers_take_turns_on_their_workloads() -> None:
    peers = [
        interleave.PeerCommand(
            name, (sys.executable, "-c", PEER, "--model", "some"), only
        )
        for name, only in (("all", ()), ("some", ("W1",)))
    ]  # fmt: skip
    results = interleave.run("engine", [], peers, ["W1", "W2"], 2, 60.0, [])
    assert {name: len(runs) for name, runs in results["all"].items()} == {"W1": 2, "W2": 2}
    assert list(results["some"]) == ["W1"]
    assert all(run["output_tokens_per_s"] > 0 for run in results["all"]["W2"])
