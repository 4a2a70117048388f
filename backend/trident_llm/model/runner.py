"""Executes scheduler outputs on one device.

The runner owns rows and never sees a request: what it knows of a sequence arrived in a NewRow or by a
fork. Token ids and block tables live on the device, counts on the host; sampled tokens are written
into the token table on the device, from where the next step's inputs are gathered, so a step can be
launched before the tokens of the one before it have reached the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from trident_llm.core.messages import (
    Candidate,
    Continuation,
    SampledRow,
    SchedulerOutput,
    StepResult,
)
from trident_llm.model.batch import Batch
from trident_llm.model.decode_graphs import DecodeGraphs, Recorder
from trident_llm.model.decoder import Decoder
from trident_llm.model.kv_cache import KVCache
from trident_llm.model.prompt_scorer import PromptScores, PromptSpan, score_prompts
from trident_llm.model.sampler import SampleOutput, Sampler
from trident_llm.model.sampling.logprobs import to_host
from trident_llm.model.sampling.mask import TokenMask
from trident_llm.model.sampling.rows import RowSampling


@dataclass(frozen=True)
class RunnerConfig:
    """Sizes of the runner's tables."""

    max_num_seqs: int
    max_model_len: int
    block_size: int
    vocab_size: int  # the tokenizer's; the head may be wider, what lies beyond is never sampled
    eos_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class LaunchedStep:
    """A step whose results may still be on their way."""

    step: int
    sampled: SampleOutput | None
    num_logprobs: list[int]  # per sampled row, -1 for none
    num_candidates: list[int]  # per sampled row, 0 for none: not a beam's
    prompt_scores: PromptScores | None


class ModelRunner:
    """Rows, batches and sampling around one :class:`Decoder`. Used from one thread."""

    def __init__(self, decoder: Decoder, kv_cache: KVCache, config: RunnerConfig) -> None:
        self.decoder = decoder
        self.kv_cache = kv_cache
        self.config = config
        self.device = kv_cache.data.device
        # One row more than there are sequences: padding. Its token and its block are always 0.
        self._padding_row = config.max_num_seqs
        rows = config.max_num_seqs + 1
        max_blocks = -(-config.max_model_len // config.block_size)
        self._token_ids = torch.zeros(
            (rows, config.max_model_len), dtype=torch.int64, device=self.device
        )
        self._block_tables = torch.zeros((rows, max_blocks), dtype=torch.int32, device=self.device)
        self._num_tokens = np.zeros(rows, np.int64)  # known or sampled
        self._num_computed = np.zeros(rows, np.int64)
        self._num_prompt = np.zeros(rows, np.int64)
        self._num_prompt_logprobs = np.full(rows, -1, np.int64)  # -1: none asked
        self._sampling = RowSampling(rows)
        self._sampler = Sampler(self._sampling, self._token_ids)
        self._graphs: DecodeGraphs | None = None

    @torch.inference_mode()
    def warm_up(self, max_num_tokens: int) -> None:
        """Runs steps of all kinds on padding rows, so that no request waits for a compiler."""
        longest = min(max_num_tokens, self.config.max_model_len)
        for counts in ([longest], [min(longest, 64), 1], [1] * self.config.max_num_seqs, [1]):
            for fixed in (False, True):
                rows = np.full(len(counts), self._padding_row, np.int64)
                samples = np.ones(len(counts), np.bool_)
                batch = self._flat_batch(rows, np.asarray(counts, np.int64), samples, [], fixed)
                self.decoder.forward(batch, self.kv_cache)

    @torch.inference_mode()
    def record_graphs(self, sizes: Sequence[int], record: Recorder) -> None:
        """Records decode steps of these sizes, largest first: their temporaries are shared."""
        if self.decoder.needs_rope_lens:
            return
        graphs = DecodeGraphs(lambda batch: self.decoder.hidden(batch, self.kv_cache), record)
        for size in sorted(sizes, reverse=True):
            graphs.add(self._decode_batch([], size))
        self._graphs = graphs

    @torch.inference_mode()
    def launch(self, output: SchedulerOutput, mask: TokenMask | None = None) -> LaunchedStep:
        """Runs a step; on an accelerator it may still be running when this returns.

        ``mask`` says which tokens the grammars of some sampled rows allow.
        """
        self._apply_delta(output)
        self.kv_cache.copy_blocks(output.block_copies)
        spans = self._prompt_spans(output)
        prompt_scores = None
        size = self._graph_size(output) if not spans else None
        if size is not None and self._graphs is not None:
            scheduled_rows = [scheduled.row for scheduled in output.scheduled_rows]
            hidden = self._graphs.run(self._decode_batch(scheduled_rows, size))
            logits = self._logits(hidden[: len(scheduled_rows)])
        elif spans:
            batch = self._make_batch(output, spans)
            hidden = self.decoder.hidden(batch, self.kv_cache)
            num_sampled = len(hidden) - sum(span.count for span in spans)
            prompt_scores = score_prompts(
                hidden[num_sampled:], spans, self._logits, self._token_ids
            )
            logits = self._logits(hidden[:num_sampled])
        else:
            batch = self._make_batch(output, spans)
            logits = self.decoder.forward(batch, self.kv_cache)[:, : self.config.vocab_size]
        for scheduled in output.scheduled_rows:
            self._num_computed[scheduled.row] += scheduled.num_tokens
        rows = output.sampled_rows
        if not rows:
            return LaunchedStep(output.step, None, [], [], prompt_scores)
        logits = self._fork(output, logits)
        row_index = np.asarray(rows, np.int64)
        lengths = self._num_tokens[row_index]
        sampled = self._sampler.sample(logits, row_index, lengths, mask)
        self._append(row_index, lengths, sampled.token_ids)
        num_logprobs: list[int] = self._sampling.num_logprobs[row_index].tolist()
        num_candidates: list[int] = self._sampling.num_candidates[row_index].tolist()
        return LaunchedStep(output.step, sampled, num_logprobs, num_candidates, prompt_scores)

    def collect(self, launched: LaunchedStep) -> StepResult:
        """Waits for a step and brings its tokens to the host."""
        scores = launched.prompt_scores
        prompt_logprobs = scores.to_host() if scores is not None else []
        if launched.sampled is None:
            return StepResult(launched.step, [], prompt_logprobs)
        rows = _host_rows(launched.sampled, launched.num_logprobs, launched.num_candidates)
        return StepResult(launched.step, rows, prompt_logprobs)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits over the tokenizer's vocabulary; the head may be wider."""
        return self.decoder.logits(hidden)[:, : self.config.vocab_size]

    def _prompt_spans(self, output: SchedulerOutput) -> list[PromptSpan]:
        """Tokens of this step whose logits score the prompt token after them."""
        spans = []
        for place, scheduled in enumerate(output.scheduled_rows):
            count = int(self._num_prompt_logprobs[scheduled.row])
            first = int(self._num_computed[scheduled.row])
            last = min(first + scheduled.num_tokens, int(self._num_prompt[scheduled.row]) - 1)
            if count >= 0 and first < last:
                spans.append(PromptSpan(place, scheduled.row, first, last - first, count))
        return spans

    def _tensor(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)

    def _apply_delta(self, output: SchedulerOutput) -> None:
        if output.continuations:
            self._continue(output.continuations)
        for new in output.new_rows:
            count = len(new.token_ids)
            self._token_ids[new.row, :count] = self._tensor(np.asarray(new.token_ids, np.int64))
            self._num_tokens[new.row] = count
            self._num_computed[new.row] = new.num_computed_tokens
            self._num_prompt[new.row] = new.num_prompt_tokens
            # Only the first sequence computes the prompt, and only once is it wanted.
            wanted = new.sampling_params.prompt_logprobs
            scored = (
                wanted is not None and new.sequence_index == 0 and count == new.num_prompt_tokens
            )
            self._num_prompt_logprobs[new.row] = wanted if scored else -1
            self._sampling.set(
                new.row,
                new.sampling_params,
                seed=new.seed,
                sequence_index=new.sequence_index,
                num_prompt_tokens=new.num_prompt_tokens,
                eos_token_ids=self.config.eos_token_ids,
            )
        rows: list[int] = []
        columns: list[int] = []
        block_ids: list[int] = []
        for scheduled in output.scheduled_rows:
            if scheduled.block_ids:
                count = len(scheduled.block_ids)
                rows += [scheduled.row] * count
                columns += range(scheduled.first_block, scheduled.first_block + count)
                block_ids += scheduled.block_ids
        if rows:
            index = self._tensor(np.asarray([rows, columns, block_ids], np.int64))
            self._block_tables[index[0], index[1]] = index[2].to(torch.int32)

    def _continue(self, continuations: list[Continuation]) -> None:
        """Beams take their parents' places, all at once, and their next tokens."""
        rows, parents, token_ids = np.asarray(continuations, np.int64).T
        lengths = self._num_tokens[parents]
        moved = np.flatnonzero(rows != parents)
        if moved.size:
            to, source = self._tensor(np.stack((rows[moved], parents[moved])))
            columns = int(lengths.max())
            self._token_ids[to, :columns] = self._token_ids[source, :columns]
            self._block_tables[to] = self._block_tables[source]
        index = self._tensor(np.stack((rows, lengths, token_ids)))
        self._token_ids[index[0], index[1]] = index[2]
        self._num_computed[rows] = self._num_computed[parents]
        self._num_tokens[rows] = lengths + 1

    def _graph_size(self, output: SchedulerOutput) -> int | None:
        """The recorded size of a step in which every row computes one token and samples."""
        scheduled = output.scheduled_rows
        if self._graphs is None or any(s.num_tokens != 1 or not s.samples for s in scheduled):
            return None
        return self._graphs.size_for(len(scheduled))

    def _decode_batch(self, scheduled_rows: list[int], size: int) -> Batch:
        """One token of each row, padded to ``size`` rows, with tensors and bounds of fixed sizes."""
        rows = np.full(size, self._padding_row, np.int64)
        rows[: len(scheduled_rows)] = scheduled_rows
        return self._flat_batch(rows, np.ones(size, np.int64), np.ones(size, np.bool_), [], True)

    def _make_batch(self, output: SchedulerOutput, spans: list[PromptSpan]) -> Batch:
        scheduled = output.scheduled_rows
        rows = np.asarray([s.row for s in scheduled], np.int64)
        counts = np.asarray([s.num_tokens for s in scheduled], np.int64)
        samples = np.asarray([s.samples for s in scheduled], np.bool_)
        return self._flat_batch(rows, counts, samples, spans, False)

    def _flat_batch(
        self,
        rows: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
        samples: npt.NDArray[np.bool_],
        spans: list[PromptSpan],
        fixed: bool,
    ) -> Batch:
        """The flat batch: ``counts`` tokens of each row, one sequence after another.

        Logits are wanted of the tokens that sample, then of those in ``spans``. ``fixed``: block
        tables and bounds are those of the longest sequence that there can be.
        """
        computed = self._num_computed[rows]
        ends = np.cumsum(counts)
        starts = ends - counts
        positions = np.arange(ends[-1]) + np.repeat(computed - starts, counts)
        row_of_token = np.repeat(rows, counts)
        seq_lens = computed + counts
        max_seq_len = self.config.max_model_len if fixed else int(seq_lens.max())
        wanted = [ends[samples] - 1]
        wanted += [starts[span.place] + np.arange(span.count) for span in spans]
        # One transfer for everything that is as long as the tokens.
        per_token = self._tensor(np.stack((positions, row_of_token)))
        position, row = per_token[0], per_token[1]
        size = self.config.block_size
        blocks = self._block_tables[row, position // size].to(torch.int64)
        columns = -(-max_seq_len // size)
        rope_lens = None
        if self.decoder.needs_rope_lens:
            prompt = np.repeat(self._num_prompt[rows], counts)
            rope_lens = self._tensor(np.maximum(prompt, positions + 1))
        return Batch(
            input_ids=self._token_ids[row, position],
            positions=position,
            slot_mapping=blocks * size + position % size,
            cu_seqlens_q=self._tensor(np.concatenate(([0], ends)).astype(np.int32)),
            seq_lens=self._tensor(seq_lens.astype(np.int32)),
            block_tables=self._block_tables[self._tensor(rows), :columns],
            max_seqlen_q=int(counts.max()),
            max_seq_len=max_seq_len,
            logits_indices=self._tensor(np.concatenate(wanted)),
            rope_lens=rope_lens,
        )

    def _fork(self, output: SchedulerOutput, logits: torch.Tensor) -> torch.Tensor:
        """Copies parents' rows to their children; logits ``[sampling rows + forks, V]``."""
        if not output.forks:
            return logits
        line_of = {s.row: i for i, s in enumerate(s for s in output.scheduled_rows if s.samples)}
        for parent, child, sequence_index in output.forks:
            self._token_ids[child] = self._token_ids[parent]
            self._block_tables[child] = self._block_tables[parent]
            for counts in (self._num_tokens, self._num_computed, self._num_prompt):
                counts[child] = counts[parent]
            self._num_prompt_logprobs[child] = -1
            self._sampling.fork(parent, child, sequence_index)
        lines = [*range(len(line_of)), *(line_of[fork.parent_row] for fork in output.forks)]
        return logits[self._tensor(np.asarray(lines, np.int64))]

    def _append(
        self,
        rows: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        token_ids: torch.Tensor,
    ) -> None:
        """Writes sampled tokens behind their rows' last ones, on the device."""
        samples = self._sampling.num_candidates[rows] == 0  # what follows a beam, the host decides
        # A sequence that reached max_model_len ends here: its last token is never an input.
        fits = np.flatnonzero(samples & (lengths < self.config.max_model_len))
        index = self._tensor(np.stack((rows[fits], lengths[fits], fits)))
        self._token_ids[index[0], index[1]] = token_ids[index[2]]
        self._num_tokens[rows[samples]] += 1


def _host_rows(
    sampled: SampleOutput, num_logprobs: list[int], num_candidates: list[int]
) -> list[SampledRow]:
    """What a step sampled, per row; waits for the device."""
    token_ids: list[int] = sampled.token_ids.tolist()
    finite = sampled.finite.tolist()
    allowed = [True] * len(token_ids) if sampled.allowed is None else sampled.allowed.tolist()
    rows = [
        SampledRow([token_id], failed=not ok, nothing_allowed=not some)
        for token_id, ok, some in zip(token_ids, finite, allowed)
    ]
    if sampled.logprobs is not None:
        lines = [line for line, count in enumerate(num_logprobs) if count >= 0]
        logprobs = to_host(
            sampled.logprobs,
            [token_ids[line] for line in lines],
            [num_logprobs[line] for line in lines],
        )
        for line, entries in zip(lines, logprobs):
            rows[line] = replace(rows[line], logprobs=[entries])
    if sampled.candidates is not None:
        top, top_ids = sampled.candidates[0].tolist(), sampled.candidates[1].tolist()
        lines = [line for line, count in enumerate(num_candidates) if count]
        for place, line in enumerate(lines):
            own = zip(top_ids[place], top[place][: num_candidates[line]])
            found = [Candidate(token_id, logprob) for token_id, logprob in own]
            rows[line] = replace(rows[line], token_ids=[], candidates=found)
    return rows
