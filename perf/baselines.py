"""What paging and continuous batching gain, against the same engine under the policies they replace.

    python -m perf.baselines --workloads sharegpt,alpaca --pools 256,512,1024
    python -m perf.baselines --workloads W2 --pools 1024 --policies paged --block-sizes 4,16,64,256

Every policy runs on the same scheduler, runner and kernels; it only decides when a request may enter,
from a queue in order of arrival:

paged           at once: blocks are taken as sequences grow (ours; Kwon et al., arXiv 2309.06180)
reserved-max    once the longest length that a request may have fits beside those that run
reserved-exact  the same with each request's own final length, which nobody knows beforehand
static          in batches of ``max_num_seqs`` whose rows all compute until the longest has ended

A policy that reserves holds a request's slots from its entry to its end, as contiguous buffers would
(Orca's, in that paper). A row of a static batch that is past its own end computes on and counts as idle;
prompts are not padded, which is to its advantage.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from perf import options, report, workloads
from perf.engine import load
from perf.workloads import RequestSpec
from trident_llm.core.request import Request
from trident_llm.core.sampling_params import SamplingParams
from trident_llm.engine.engine import Engine
from trident_llm.engine.output import RequestOutput

POLICIES = ("paged", "reserved-max", "reserved-exact", "static")


@dataclass
class Entry:
    """A request under a policy."""

    spec: RequestSpec
    computes: int  # output tokens that are computed
    reserved: int  # slots of tokens that it holds from its entry on; 0 where blocks are paged
    done: int = 0  # output tokens so far

    @property
    def is_useful(self) -> bool:
        return self.done < self.spec.output_len


@dataclass
class Policy:
    """Decides who enters; ``slots`` are the tokens that the memory holds."""

    name: str
    slots: int
    max_num_seqs: int
    max_len: int
    waiting: deque[RequestSpec]
    running: dict[str, Entry] = field(default_factory=dict)

    def enter(self) -> list[Entry]:
        """Takes those who may enter now off the queue."""
        if self.name == "static":
            return self._next_batch() if not self.running else []
        entered: list[Entry] = []
        held = sum(entry.reserved for entry in self.running.values())
        while self.waiting:
            spec = self.waiting[0]
            reserved = self._reservation(spec)
            if reserved and held + reserved > self.slots:
                break
            held += reserved
            entered.append(Entry(self.waiting.popleft(), spec.output_len, reserved))
        return entered

    def _reservation(self, spec: RequestSpec) -> int:
        if self.name == "reserved-max":
            return self.max_len
        if self.name == "reserved-exact":
            return len(spec.prompt) + spec.output_len
        return 0

    def _next_batch(self) -> list[Entry]:
        batch: list[RequestSpec] = []
        # Rows end together, so each may become as long as its prompt and the longest output.
        while self.waiting and len(batch) < self.max_num_seqs:
            tried = [*batch, self.waiting[0]]
            longest = max(spec.output_len for spec in tried)
            if batch and sum(len(spec.prompt) + longest for spec in tried) > self.slots:
                break
            batch = tried
            self.waiting.popleft()
        longest = max((spec.output_len for spec in batch), default=0)
        return [Entry(spec, longest, len(spec.prompt) + longest) for spec in batch]


@dataclass
class Counts:
    """Sums over all steps that decode or fill."""

    steps: int = 0
    useful: int = 0  # sequences that run and are not past their end
    idle: int = 0  # rows that compute past their end
    stored: int = 0  # tokens whose KV is kept
    held: int = 0  # slots of tokens that are taken
    held_most: int = 0

    def add(self, policy: Policy, engine: Engine, outputs: Sequence[RequestOutput]) -> None:
        """Counts a step by what took part in it; its new tokens are not in ``Entry.done`` yet."""
        scheduler = engine.scheduler
        computed = {seq.request.request_id: seq.num_computed_tokens for seq in scheduler.running}
        ended = {output.request_id for output in outputs} - computed.keys()
        entries = [policy.running[request_id] for request_id in (*computed, *ended)]
        useful = sum(entry.is_useful for entry in entries)
        self.steps += 1
        self.useful += useful
        self.idle += len(entries) - useful
        # What has ended has left the memory by now, or will with the next entry.
        self.stored += sum(computed.values())
        if policy.name == "paged":
            held = scheduler.pool.num_held * engine.config.block_size
        else:
            held = sum(policy.running[request_id].reserved for request_id in computed)
        self.held += held
        self.held_most = max(self.held_most, held)


def run(engine: Engine, specs: Sequence[RequestSpec], name: str) -> dict[str, float]:
    """Runs all requests under a policy; the prefix cache must be off.

    Raises RuntimeError if a request fails, or can never enter.
    """
    config = engine.config
    slots = (config.num_blocks - 1) * config.block_size
    policy = Policy(name, slots, config.max_num_seqs, config.max_model_len, deque(specs))
    engine.scheduler.reset_stats()
    counts, number, began = Counts(), 0, time.perf_counter()
    while policy.waiting or engine.has_work:
        for entry in policy.enter():
            request_id = str(number)
            number += 1
            policy.running[request_id] = entry
            params = SamplingParams(
                temperature=0.0, max_tokens=entry.computes, seed=0, ignore_eos=True
            )
            engine.add(Request(request_id, list(entry.spec.prompt), params))
        if not engine.has_work:
            raise RuntimeError(f"{name}: a request is longer than the memory; take a larger pool")
        outputs = engine.step()
        counts.add(policy, engine, outputs)
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(f"a request failed: {output.error}")
            entry = policy.running[output.request_id]
            entry.done += sum(len(delta.token_ids) for delta in output.deltas.values())
            if entry.done >= entry.computes:
                del policy.running[output.request_id]
    wall = time.perf_counter() - began
    tokens = sum(spec.output_len for spec in specs)
    return {
        "output_tokens_per_s": round(tokens / wall, 1),
        "wall_s": round(wall, 2),
        "steps": counts.steps,
        "batch_mean": round(counts.useful / counts.steps, 2),
        "idle_slot_steps_percent": _percent(counts.idle, counts.idle + counts.useful),
        "kv_waste_percent": _percent(counts.held - counts.stored, counts.held),
        "kv_waste_of_memory_percent": _percent(
            counts.held - counts.stored, slots * counts.steps
        ),
        "memory_used_most_percent": _percent(counts.held_most, slots),
        "preemptions": engine.scheduler.stats.num_preemptions,
    }  # fmt: skip


def _percent(part: float, whole: float) -> float:
    return round(100 * part / whole, 2) if whole else 0.0


def _specs(name: str, vocab_size: int, max_len: int) -> list[RequestSpec]:
    """The workload's requests, cut to the longest length that any may have."""
    specs = []
    for spec in workloads.make(name, vocab_size=vocab_size):
        prompt = spec.prompt[: max_len // 2]
        specs.append(RequestSpec(prompt, min(spec.output_len, max_len - len(prompt))))
    return specs


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _policies(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= set(POLICIES):
        raise argparse.ArgumentTypeError(f"must be of {', '.join(POLICIES)}, not {text}")
    return names


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m perf.baselines", description=__doc__)
    options.add_workload_options(parser, default="sharegpt,alpaca")
    parser.add_argument(
        "--pools", type=_numbers, default=[256, 512, 1024], metavar="N,...",
        help="sizes of the memory, in units of 16 tokens (default: 256,512,1024)",
    )  # fmt: skip
    parser.add_argument(
        "--block-sizes", type=_numbers, default=[16], metavar="N,...",
        help="tokens of a block (default: 16)",
    )  # fmt: skip
    parser.add_argument(
        "--policies", type=_policies, default=list(POLICIES), metavar="NAME,...",
        help=f"the first is what others are held to (default: {','.join(POLICIES)})",
    )  # fmt: skip
    parser.add_argument(
        "--max-len", type=int, default=2048, metavar="N",
        help="what a request may have in all, and reserved-max reserves (default: 2048)",
    )  # fmt: skip
    options.add_model_options(parser)
    options.add_output_option(parser)
    given = parser.parse_args(arguments)
    base = options.model_settings(given) | {
        "enable_prefix_caching": False, "max_model_len": given.max_len,
    }  # fmt: skip
    figures: dict[str, Any] = {}
    for pool, block_size in product(given.pools, given.block_sizes):
        # One block more: block 0 takes padded writes.
        num_blocks = pool * 16 // block_size + 1
        loaded = load(base | {"num_blocks": num_blocks, "block_size": block_size})
        run(loaded.engine, workloads.warm_up(vocab_size=loaded.vocab_size), given.policies[0])
        for name in given.workloads:
            specs = _specs(name, loaded.vocab_size, loaded.engine.config.max_model_len)
            runs: dict[str, list[dict[str, float]]] = {policy: [] for policy in given.policies}
            for repetition in range(given.repetitions):
                for policy in given.policies:
                    found = run(loaded.engine, specs, policy)
                    runs[policy].append(found)
                    report.say(
                        f"[{repetition + 1}/{given.repetitions}] {name}, {pool * 16} tokens in blocks "
                        f"of {block_size}, {policy}: {found['output_tokens_per_s']:g} tokens/s, "
                        f"batch {found['batch_mean']:g}, waste {found['kv_waste_percent']:g} %"
                    )
            place = f"{pool * 16} tokens, blocks of {block_size}"
            figures.setdefault(name, {})[place] = _beside_first(runs)
    report.publish(report.result("baselines", base, {"figures": figures}), given.output)


def _beside_first(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Per policy its counts; and the first one's throughput and batch over its own."""
    first = next(iter(runs.values()))
    figures: dict[str, Any] = {}
    for policy, own in runs.items():
        speed = [
            ours["output_tokens_per_s"] / each["output_tokens_per_s"]
            for ours, each in zip(first, own)
        ]
        figures[policy] = {
            **own[0],
            **{name: report.spread_of([run[name] for run in own]) for name in ("output_tokens_per_s", "wall_s")},
            "first_over_this_throughput": report.spread_of(speed),
            "first_over_this_batch": round(first[0]["batch_mean"] / own[0]["batch_mean"], 2),
        }  # fmt: skip
    return figures


if __name__ == "__main__":
    main()
