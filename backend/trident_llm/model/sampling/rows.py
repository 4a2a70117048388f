"""What each row asks of sampling, kept on the host so that a step gathers it by index.

Tokens are not kept here: what depends on a row's tokens (penalties, bad words) is derived on the
device, from the runner's token table, since the host does not know the newest tokens yet.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trident_llm.core.sampling_params import SamplingParams

IntArray = npt.NDArray[np.int64]
_NO_IDS: IntArray = np.zeros(0, np.int64)
_FLOAT32 = np.finfo(np.float32)


class RowSampling:
    """Sampling parameters of all rows. ``version`` changes whenever a row does."""

    def __init__(self, num_rows: int) -> None:
        self.version = 0
        self.temperature = np.ones(num_rows, np.float32)
        self.top_k = np.zeros(num_rows, np.int64)
        self.top_p = np.ones(num_rows, np.float64)
        self.min_p = np.zeros(num_rows, np.float32)
        self.greedy = np.zeros(num_rows, np.bool_)
        self.seed = np.zeros(num_rows, np.uint64)
        self.sequence_index = np.zeros(num_rows, np.int64)
        self.num_logprobs = np.full(num_rows, -1, np.int64)  # -1: none asked
        self.num_candidates = np.zeros(num_rows, np.int64)  # of a beam's row; 0: it samples
        self.num_prompt = np.zeros(num_rows, np.int64)
        self.min_length = np.zeros(num_rows, np.int64)  # tokens before which no end is sampled
        self.presence = np.zeros(num_rows, np.float32)
        self.frequency = np.zeros(num_rows, np.float32)
        self.repetition = np.ones(num_rows, np.float32)
        self.edits = np.zeros(num_rows, np.bool_)  # whether its logits are changed before sampling
        self.end_ids: list[IntArray] = [_NO_IDS] * num_rows
        self.bias_ids: list[IntArray] = [_NO_IDS] * num_rows
        self.biases: list[npt.NDArray[np.float32]] = [np.zeros(0, np.float32)] * num_rows
        self.allowed_ids: list[IntArray | None] = [None] * num_rows
        self.forbidden_ids: list[IntArray] = [_NO_IDS] * num_rows
        self.bad_words: list[tuple[tuple[int, ...], ...]] = [()] * num_rows  # two tokens at least

    def set(
        self,
        row: int,
        params: SamplingParams,
        *,
        seed: int,
        sequence_index: int,
        num_prompt_tokens: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        """Fills a row for a sequence that enters it."""
        self.version += 1
        self.greedy[row] = params.greedy or params.use_beam_search
        self.temperature[row] = 1.0 if params.greedy else params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = np.uint64(seed % 2**64)
        self.sequence_index[row] = sequence_index
        wanted = params.sampled_logprobs
        self.num_logprobs[row] = -1 if wanted is None else wanted
        self.num_prompt[row] = num_prompt_tokens
        self.min_length[row] = num_prompt_tokens + params.min_tokens
        self.presence[row] = params.presence_penalty
        self.frequency[row] = params.frequency_penalty
        self.repetition[row] = np.clip(params.repetition_penalty, _FLOAT32.tiny, _FLOAT32.max)
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else eos_token_ids)
        self.end_ids[row] = np.asarray(sorted(ends), np.int64)
        self.num_candidates[row] = _num_candidates(params, len(ends))
        self.bias_ids[row] = np.asarray([token_id for token_id, _ in params.logit_bias], np.int64)
        self.biases[row] = np.asarray([bias for _, bias in params.logit_bias], np.float32)
        allowed = params.allowed_token_ids
        self.allowed_ids[row] = None if allowed is None else np.asarray(allowed, np.int64)
        words = params.bad_words_token_ids
        self.forbidden_ids[row] = np.asarray([w[0] for w in words if len(w) == 1], np.int64)
        self.bad_words[row] = tuple(word for word in words if len(word) > 1)
        self.edits[row] = bool(
            params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
            or params.logit_bias or words or allowed is not None
        )  # fmt: skip

    def fork(self, parent: int, child: int, sequence_index: int) -> None:
        """Makes ``child`` a copy of ``parent`` that draws for its own sequence index."""
        self.version += 1
        for values in vars(self).values():
            if not isinstance(values, int):
                values[child] = values[parent]
        self.sequence_index[child] = sequence_index


def _num_candidates(params: SamplingParams, num_ends: int) -> int:
    """Most likely tokens among which are the best ``width``, and the best ``width`` that do not end.

    A stop string can end any of them; so there are as many again, and if all of those end too the
    search goes on with fewer beams.
    """
    if not params.use_beam_search:
        return 0
    return params.num_sequences * (2 if params.stop else 1) + num_ends
