"""What can be seen of an engine from outside: counts, and on demand its blocks, requests and steps.

Read on the engine's thread, between two steps, so that all numbers are of one moment. Bounded in size
whatever the pool and the queue hold, and without anything of what requests say.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import islice
from typing import Any

from trident_llm.core.pool_map import pool_map
from trident_llm.core.request import RequestStatus, Sequence
from trident_llm.engine.engine import Engine
from trident_llm.engine.output import ActiveRequest

MAX_REQUESTS = 256
"""Requests that a snapshot tells of, running ones first."""


def counts(engine: Engine) -> dict[str, Any]:
    """Totals and sizes; as good as free."""
    scheduler, pool = engine.scheduler, engine.scheduler.pool
    return {
        "num_requests": engine.num_requests,
        "num_running_seqs": len(scheduler.running),
        "num_waiting_seqs": len(scheduler.waiting),
        "num_blocks": len(pool.blocks) - 1,
        "num_held_blocks": pool.num_held,
        "num_free_blocks": pool.num_free,
        "num_cached_blocks": pool.num_cached,
        "block_size": pool.block_size,
        "max_model_len": scheduler.config.max_model_len,
        "max_num_seqs": scheduler.config.max_num_seqs,
        **vars(scheduler.stats),
    }


def detail(engine: Engine) -> dict[str, Any]:
    """The map of the blocks, the progress of requests, and the newest steps.

    ``blocks``: see :class:`trident_llm.core.pool_map.PoolMap`. ``requests``: see :func:`_progress`.
    ``steps``: [number, sequences that computed one token, sequences that computed several, tokens].
    """
    blocks = pool_map(engine.scheduler.pool)
    now = time.monotonic()
    shown = islice(_in_order(engine), MAX_REQUESTS)
    return {
        "blocks": {"stride": blocks.stride, "runs": blocks.runs},
        "requests": [_progress(active, now) for active in shown],
        "steps": list(engine.recent_steps),
    }


def _in_order(engine: Engine) -> Iterable[ActiveRequest]:
    """Requests with a running sequence, then the waiting ones as they will be served."""
    scheduler = engine.scheduler
    seen = dict.fromkeys(
        seq.request.request_id for group in (scheduler.running, scheduler.waiting) for seq in group
    )
    return (engine.active[request_id] for request_id in seen if request_id in engine.active)


def _progress(active: ActiveRequest, now: float) -> dict[str, Any]:
    """One request: ``id`` is this server's own number for it, ``seconds`` its age.

    Computed tokens are those of the sequence that is furthest; output tokens, preemptions and blocks
    (a shared one once) are of all its sequences.
    """
    request = active.request
    seqs: list[Sequence] = request.sequences
    running = any(seq.status is RequestStatus.RUNNING for seq in seqs)
    return {
        "id": request.request_id,
        "state": "running" if running else "waiting",
        "num_seqs": len(seqs),
        "num_prompt_tokens": len(request.prompt_token_ids),
        "num_cached_tokens": seqs[0].num_cached_tokens,
        "num_computed_tokens": max(seq.num_computed_tokens for seq in seqs),
        "num_output_tokens": sum(seq.num_output_tokens for seq in seqs),
        "max_tokens": request.max_tokens * len(seqs),
        "num_blocks": len({block.block_id for seq in seqs for block in seq.blocks}),
        "num_preemptions": sum(seq.num_preemptions for seq in seqs),
        "seconds": round(now - active.times.arrival, 3),
    }
