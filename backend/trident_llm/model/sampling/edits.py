"""Changes to logits before a token is chosen, for the rows that ask for them.

In vLLM's order: logit bias, penalties, then what is forbidden. Lists of token ids come from the
request and are flattened once for a set of rows; what depends on generated tokens is read from the
token table on the device at every step, with work in proportion to the row's own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

import trident_kernels as ops
from trident_llm.model.sampling.mask import TokenMask
from trident_llm.model.sampling.rows import RowSampling

IntArray = npt.NDArray[np.int64]
_LARGEST = torch.finfo(torch.float32).max


def on_device(array: npt.NDArray[np.generic], like: torch.Tensor) -> torch.Tensor:
    """``array`` where ``like`` is, without waiting."""
    return torch.from_numpy(array).to(like.device, non_blocking=True)


@dataclass(frozen=True)
class _Penalized:
    """Lines with penalties; P of them."""

    lines: IntArray  # [P] on the host
    on_device: torch.Tensor  # [P, 1] lines
    rows: torch.Tensor  # [P] int64
    num_prompt: torch.Tensor  # [P, 1] int64
    repetition: torch.Tensor | None  # [P, 1] float32
    frequency: torch.Tensor | None  # [P, 1]
    presence: torch.Tensor | None  # [P, 1]


@dataclass(frozen=True)
class _BadWords:
    """Words of several tokens; W of them, the longest of K + 1 tokens."""

    lines: torch.Tensor  # [W] int64
    rows: torch.Tensor  # [W] int64
    num_prompt: torch.Tensor  # [W, 1] int64
    prefix: torch.Tensor  # [W, K] int64, all but the last token, at the right end
    filled: torch.Tensor  # [W, K] bool
    last: torch.Tensor  # [W] int64


@dataclass(frozen=True)
class Edits:
    """What to change in a step's L lines of logits. Flat pairs of (line, token id) are ``[2, N]``."""

    bias: tuple[torch.Tensor, torch.Tensor] | None  # pairs, [N] float32
    penalized: _Penalized | None
    allowed: tuple[torch.Tensor, torch.Tensor] | None  # lines [A], pairs
    forbidden: torch.Tensor | None  # pairs
    bad_words: _BadWords | None


class EditPlanner:
    """Flattens what rows ask; the last plan is kept, since most steps have the rows of the one before."""

    def __init__(self) -> None:
        self._key: tuple[int, bytes, bytes] | None = None
        self._plan: Edits | None = None

    def plan(
        self,
        state: RowSampling,
        rows: IntArray,
        lengths: IntArray,
        like: torch.Tensor,
        mask: TokenMask | None = None,
    ) -> Edits | None:
        """The edits of these rows at these lengths (``[L]`` each), or None if there are none."""
        early = (lengths < state.min_length[rows]) & (state.min_length[rows] > 0)
        if mask is not None:
            early[mask.lines] = False  # a complete output may have to end: the mask says
        if not (early.any() or state.edits[rows].any()):
            return None
        key = (state.version, rows.tobytes(), early.tobytes())
        if key != self._key:
            self._plan = _flatten(state, rows, early, like)
            self._key = key
        return self._plan


def _flatten(
    state: RowSampling, rows: IntArray, early: npt.NDArray[np.bool_], like: torch.Tensor
) -> Edits:
    bias = _pairs([state.bias_ids[row] for row in rows], like)
    forbidden = _pairs(
        [
            np.concatenate((state.forbidden_ids[row], state.end_ids[row]))
            if ends
            else state.forbidden_ids[row]
            for row, ends in zip(rows, early)
        ],
        like,
    )
    allowed_of = [state.allowed_ids[row] for row in rows]
    lines = np.flatnonzero([ids is not None for ids in allowed_of])
    allowed = _pairs([np.zeros(0, np.int64) if ids is None else ids for ids in allowed_of], like)
    return Edits(
        bias=None
        if bias is None
        else (bias, on_device(np.concatenate([state.biases[row] for row in rows]), like)),
        penalized=_penalized(state, rows, like),
        allowed=None if allowed is None else (on_device(lines, like), allowed),
        forbidden=forbidden,
        bad_words=_bad_words(state, rows, like),
    )


def _pairs(ids_of_lines: Sequence[IntArray], like: torch.Tensor) -> torch.Tensor | None:
    """``[2, N]`` pairs of (line, token id), or None if there are none."""
    counts = [len(ids) for ids in ids_of_lines]
    if not any(counts):
        return None
    lines = np.repeat(np.arange(len(counts)), counts)
    return on_device(np.stack((lines, np.concatenate(ids_of_lines))), like)


def _penalized(state: RowSampling, rows: IntArray, like: torch.Tensor) -> _Penalized | None:
    columns = {
        "repetition": (state.repetition[rows], 1.0),
        "frequency": (state.frequency[rows], 0.0),
        "presence": (state.presence[rows], 0.0),
    }
    lines = np.flatnonzero(np.any([values != off for values, off in columns.values()], axis=0))
    if not lines.size:
        return None
    asked = {
        name: on_device(values[lines], like).unsqueeze(1) if (values != off).any() else None
        for name, (values, off) in columns.items()
    }
    return _Penalized(
        lines=lines,
        on_device=on_device(lines, like).unsqueeze(1),
        rows=on_device(rows[lines], like),
        num_prompt=on_device(state.num_prompt[rows[lines]], like).unsqueeze(1),
        **asked,
    )


def _bad_words(state: RowSampling, rows: IntArray, like: torch.Tensor) -> _BadWords | None:
    words = [(line, word) for line, row in enumerate(rows) for word in state.bad_words[row]]
    if not words:
        return None
    width = max(len(word) for _, word in words) - 1
    prefix = np.zeros((len(words), width), np.int64)
    filled = np.zeros((len(words), width), np.bool_)
    for i, (_, word) in enumerate(words):
        prefix[i, width - len(word) + 1 :] = word[:-1]
        filled[i, width - len(word) + 1 :] = True
    lines = np.asarray([line for line, _ in words], np.int64)
    return _BadWords(
        lines=on_device(lines, like),
        rows=on_device(rows[lines], like),
        num_prompt=on_device(state.num_prompt[rows[lines]], like).unsqueeze(1),
        prefix=on_device(prefix, like),
        filled=on_device(filled, like),
        last=on_device(np.asarray([word[-1] for _, word in words], np.int64), like),
    )


def apply_edits(
    logits: torch.Tensor,
    edits: Edits,
    token_ids: torch.Tensor,
    lengths: IntArray,
) -> None:
    """Changes ``logits`` in place.

    Args:
        logits: ``[L, V]`` float32.
        token_ids: ``[rows, columns]`` the token table.
        lengths: ``[L]`` tokens of each line's sequence, all of them in the table.
    """
    if edits.bias is not None:
        (lines, ids), biases = edits.bias
        logits[lines, ids] += biases
    known = on_device(lengths, logits)
    if edits.penalized is not None:
        _penalize(logits, edits.penalized, token_ids, lengths, known)
    if edits.allowed is not None:
        asked, (lines, ids) = edits.allowed
        kept = logits[lines, ids]
        logits.index_fill_(0, asked, -torch.inf)
        logits[lines, ids] = kept
    if edits.forbidden is not None:
        lines, ids = edits.forbidden
        logits[lines, ids] = -torch.inf
    if edits.bad_words is not None:
        _forbid_completions(logits, edits.bad_words, token_ids, known)


def apply_mask(logits: torch.Tensor, mask: TokenMask) -> None:
    """Forbids, in place, what the grammars of some lines do not allow; one pass for the batch.

    Args:
        logits: ``[L, V]`` float32.
    """
    ops.mask_logits(logits, on_device(mask.lines, logits), on_device(mask.bits, logits))


def _penalize(
    logits: torch.Tensor,
    plan: _Penalized,
    token_ids: torch.Tensor,
    lengths: IntArray,
    known: torch.Tensor,
) -> None:
    """Repetition penalty over prompt and output, then frequency and presence over output.

    Repetition is Keskar et al., "CTRL" (2019), with the sign rule of Hugging Face; the others are
    ``logit -= frequency * count + presence * (count > 0)``. Tokens that occur several times write
    the same value several times, or add up; so no table of counts is needed.
    """
    known = known[plan.on_device]
    table = token_ids[:, : int(lengths[plan.lines].max())].index_select(0, plan.rows)
    position = torch.arange(table.shape[1], device=table.device)
    is_word = (table >= 0) & (table < logits.shape[1]) & (position < known)
    if plan.repetition is not None:
        ids, some = _without_padding(table, is_word)
        values = logits[plan.on_device, ids]
        changed = torch.where(values > 0, values / plan.repetition, values * plan.repetition)
        changed = torch.where(some, changed.clamp_(-_LARGEST, _LARGEST), values)
        logits[plan.on_device, ids] = changed
    if plan.frequency is None and plan.presence is None:
        return
    is_output = is_word & (position >= plan.num_prompt)
    ids, some = _without_padding(table, is_output)
    lines = plan.on_device.expand_as(ids)
    if plan.frequency is not None:
        logits.index_put_((lines, ids), plan.frequency * -is_output.float(), accumulate=True)
    if plan.presence is not None:
        logits[lines, ids] = logits[lines, ids] - plan.presence * some


def _without_padding(table: torch.Tensor, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of ``table`` with the invalid ones replaced by a valid one of the same line.

    The second tensor, ``[P, 1]`` bool, says whether the line has a valid one; if not, its ids are 0
    and what is written there must be what is there.
    """
    smallest = torch.where(valid, table, torch.iinfo(torch.int64).max).amin(dim=1, keepdim=True)
    some = smallest < torch.iinfo(torch.int64).max
    return torch.where(valid, table, torch.where(some, smallest, 0)), some


def _forbid_completions(
    logits: torch.Tensor, words: _BadWords, token_ids: torch.Tensor, known: torch.Tensor
) -> None:
    """Forbids the last token of each bad word whose other tokens were just generated."""
    width = words.prefix.shape[1]
    offsets = torch.arange(-width, 0, device=logits.device)
    position = known[words.lines].unsqueeze(1) + offsets
    before = token_ids[words.rows.unsqueeze(1), position.clamp(min=0)]
    matches = (before == words.prefix) & (position >= words.num_prompt)
    complete = (matches | ~words.filled).all(dim=1)
    # Added, not written: another word may forbid the same token.
    forbidden = torch.where(complete, -torch.inf, 0.0)
    logits.index_put_((words.lines, words.last), forbidden, accumulate=True)
