"""The loop of `speculative_generate`: draft, verify, accept, roll back."""

from __future__ import annotations

import contextlib
import copy
import time

import torch
from torch.nn import functional as F
from transformers.generation import logits_process
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from ..positions import upload
from .acceptance import accept_greedy, accept_sampled, draw
from .decoders import ReplayDecoder
from .lookup import PromptLookup
from .statistics import SpeculationStatistics


MAX_MATCHING_NGRAM_SIZE = 2

# Finished rows leave the caches when they are this share of the rows in them. Leaving copies the rows that stay, so
# with rows that finish one by one all copies together are at most 8 times the first batch; a carried row costs no more
# than an eighth of a round.
LEAVING_SHARE = 1 / 8

# Processors that look at the scores of a token alone, not at the tokens before it: one call serves a whole window.
MEMORYLESS = {
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.TypicalLogitsWarper,
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    logits_process.SuppressTokensLogitsProcessor,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.LogitNormalization,
}


class Speculation:
    """
    The state of one call. Tokens and counts are on the CPU: `sequences` (B, max_length + 1) holds all rows of the
    output, `rows` says which of them the caches hold; by these the tensors of a round, (b, ...), are ordered.
    """

    def __init__(
        self,
        target: ReplayDecoder,
        draft: ReplayDecoder | None,
        ids: torch.Tensor,
        mask: torch.Tensor | None,
        config: GenerationConfig,
        drafts: int,
        processors: LogitsProcessorList,
        criteria: list[StoppingCriteria],
        streamer: BaseStreamer | None,
        rows_may_leave: bool,
    ):
        self.target, self.draft, self.config = target, draft, config
        self.drafts, self.processors, self.criteria, self.streamer = drafts, processors, criteria, streamer
        self.memoryless = all(type(processor) in MEMORYLESS for processor in processors)
        # A static cache keeps its rows and its windows as they are, for which its forwards are compiled.
        self.fixed = target.is_static
        self.rows_may_leave = rows_may_leave and not self.fixed
        self.device, self.mask = ids.device, mask
        batch, self.prompt = ids.shape
        # The last column takes drafts that have no room, so that a window has the same width for every row.
        self.sequences = F.pad(ids.cpu(), (0, config.max_length + 1 - self.prompt))
        # Processors and criteria of the caller's choice look at tokens on the device. The loop itself does not.
        self.mirror = None if self.memoryless and not criteria else upload(self.sequences, self.device)
        self.end_tokens = None if config._eos_token_tensor is None else config._eos_token_tensor.cpu()
        first = torch.zeros(batch, dtype=torch.long, device="cpu") if mask is None else mask.long().argmax(1)
        self.lookups = [PromptLookup(config.max_matching_ngram_size or MAX_MATCHING_NGRAM_SIZE) for _ in range(batch)]
        if draft is None:
            for lookup, tokens, begin in zip(self.lookups, self.sequences[:, : self.prompt].tolist(), first.tolist()):
                lookup.extend(tokens[begin:])
        self.lengths = torch.full((batch,), self.prompt, device="cpu")  # tokens of each row, left padding included
        self.finished = torch.zeros(batch, dtype=torch.bool, device="cpu")
        self._set_rows(torch.arange(batch, device="cpu"))
        self.drafted_per_row, self.accepted_per_row = (torch.zeros_like(self.lengths) for _ in range(2))
        self.drafted_per_round: list[int] = []
        self.accepted_per_round: list[int] = []

    def run(self) -> tuple[torch.Tensor, SpeculationStatistics]:
        begin = time.perf_counter()
        if self.streamer is not None:
            self.streamer.put(self.sequences[:, : self.prompt])
        self._prefill(self.target, self.prompt - 1)
        if self.draft is not None:
            self._prefill(self.draft, self.prompt - 2)
        with contextlib.ExitStack() as stack:
            for decoder in (self.target, self.draft):
                if decoder is not None:  # as `generate` does it: mixtures of experts
                    stack.enter_context(decoder.model._optimize_model_for_decode())
            while not bool(self.finished.all()):
                self._round()
                self._let_rows_leave()
        if self.streamer is not None:
            self.streamer.end()
        return self._padded(), self._statistics(time.perf_counter() - begin)

    def _prefill(self, decoder: ReplayDecoder, columns: int) -> None:
        """The prompt's first `columns`, of which the cache may have seen some."""
        seen = int(decoder.cache.get_seq_length())
        if columns > seen:
            mask = None if self.mask is None else self.mask[:, seen:columns]
            ids = upload(self.sequences[:, seen:columns], self.device)
            decoder.prefill(ids, mask, self.config.prefill_chunk_size)
        decoder.start_recording()

    def _round(self) -> None:
        begin = self.lengths[self.rows]  # (b,) where each row's next token goes
        room = self.config.max_length - begin
        unfinished = ~self.finished[self.rows]
        k = self.drafts if self.fixed else min(self.drafts, int(room[unfinished].max()) - 1)

        # Draft. Verify: the newest token and the drafts.
        window, available, proposal = self._draft(k, begin, room, unfinished)
        drafts, k = window[:, 1:], window.shape[1] - 1
        self._show(drafts, begin)
        scores = self._scores(self.target.forward(window))

        # Accept.
        if self.config.do_sample:
            accepted, token = accept_sampled(scores.softmax(-1), proposal, drafts, available)
        else:
            accepted, token = accept_greedy(scores, drafts, available)
        # The one transfer to the host.
        found = torch.cat([available[:, None], accepted[:, None], token[:, None], drafts], dim=1).cpu()
        available, accepted, drafts = found[:, 0], found[:, 1], found[:, 3:]
        tokens = F.pad(drafts, (0, 1)).scatter(1, accepted[:, None], found[:, 2:3])  # (b, k + 1)
        self.sequences[self.rows[:, None], self._columns(begin, k + 1)] = tokens
        self._show(tokens, begin)
        kept, ended = self._until_end_token(tokens, accepted)
        kept, accepted, available = (x.where(unfinished, 0) for x in (kept, accepted, available))
        if self.criteria:
            kept, stopped = self._until_criterion(kept)
            ended = ended | stopped

        # Roll back. (A finished row that is still in the caches stays where it is.)
        rejected = kept - (k + 1)
        self.target.crop(rejected)
        if self.draft is not None and k > 0:
            self.draft.crop(rejected)

        if self.streamer is not None:
            self.streamer.put(tokens[0, : int(kept)])
        if self.draft is None:
            for row, new, count in zip(self.rows.tolist(), tokens.tolist(), kept.tolist()):
                self.lookups[row].extend(new[:count])
        self._advance(kept, ended, accepted.minimum(kept), available)

    def _draft(
        self, k: int, begin: torch.Tensor, room: torch.Tensor, unfinished: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """
        The window: each row's newest token and its drafts, (b, k + 1) or fewer columns; how many (b,) of the drafts
        there are; and the probabilities (b, drafts, vocab) that they were drawn from (None when greedy). All on the
        device.
        """
        rows, room = self.rows[:, None], (room - 1)[:, None]
        if self.draft is not None and k > 0:
            # The newest two tokens are new to the draft model. Of the first round's, one may be padding, or not there.
            new = min(2, int(self.lengths.min()))
            ids = self.sequences[rows, begin[:, None] + torch.arange(-new, 0, device="cpu")]
            given = upload(torch.cat([room.clamp(max=k), ids], dim=1), self.device)
            drafts, proposal = self._draft_by_model(k, given[:, 1:], begin)
            return torch.cat([given[:, -1:], drafts], dim=1), given[:, 0], proposal
        found = [[] for _ in self.rows]
        if self.draft is None:
            found = [
                self.lookups[row].drafts(k) if wanted else []
                for row, wanted in zip(self.rows.tolist(), unfinished.tolist())
            ]
        if not self.fixed:
            k = max(len(tokens) for tokens in found)  # no columns for drafts that no row has
        drafts = torch.tensor([tokens + [0] * (k - len(tokens)) for tokens in found], device="cpu").view(len(found), k)
        available = torch.tensor([[len(tokens)] for tokens in found], device="cpu").minimum(room)
        newest = self.sequences[rows, begin[:, None] - 1]
        given = upload(torch.cat([available, newest, drafts.long()], dim=1), self.device)
        proposal = None
        if self.config.do_sample:  # a lookup proposes its token for certain
            vocab = self.target.model.config.get_text_config(decoder=True).vocab_size
            proposal = F.one_hot(given[:, 2:], vocab).float()
        return given[:, 1:], given[:, 0], proposal

    def _draft_by_model(
        self, k: int, ids: torch.Tensor, begin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Drafts (b, k) behind the tokens `ids` (b, 1 or 2), and the probabilities (b, k, vocab) or None."""
        first_round = not self.drafted_per_round
        mask = self.mask[:, -ids.shape[1] :] if first_round and self.mask is not None else None
        drafts, proposals = [], []
        for number in range(k):
            scores = self._scores(self.draft.forward(ids, mask, last_only=True), number)[:, 0]
            if self.config.do_sample:
                proposals.append(scores.softmax(-1))
                drafts.append(draw(proposals[-1]))
            else:
                drafts.append(scores.argmax(-1))
            ids, mask = drafts[-1][:, None], None
            self._show(ids, begin + number)
        proposal = torch.stack(proposals, 1) if self.config.do_sample else None
        return torch.stack(drafts, 1), proposal

    def _scores(self, logits: torch.Tensor, drafted: int = 0) -> torch.Tensor:
        """
        What `generate` takes the best of, or samples from: logits (b, t, vocab) after its processors. Position i of a
        row comes after its tokens and its first `drafted + i` drafts.
        """
        if not self.processors:
            return logits
        if self.memoryless:
            flat = logits.flatten(0, 1)
            no_tokens = torch.empty((len(flat), 0), dtype=torch.long, device=self.device)
            return self.processors(no_tokens, flat).view_as(logits)
        # Processors take rows of one length, as they are in `generate`.
        scores = logits.clone()
        before = self.lengths[self.rows, None] + drafted + torch.arange(logits.shape[1], device="cpu")
        before = before.where(~self.finished[self.rows, None], self.config.max_length)
        for length in before[before < self.config.max_length].unique().tolist():
            row, position = upload((before == length).nonzero(), self.device).unbind(1)
            ids, processors = self.mirror[self.rows_on_device[row], :length], self._processors_of(row)
            scores[row, position] = processors(ids, logits[row, position])
        return scores

    def _processors_of(self, row: torch.Tensor) -> LogitsProcessorList:
        """The processors for some rows: the repetition penalty knows of each row how long its padding is."""
        processors = LogitsProcessorList()
        for processor in self.processors:
            padding = getattr(processor, "prompt_ignore_length", None)
            if isinstance(padding, torch.Tensor):
                processor = copy.copy(processor)
                processor.prompt_ignore_length = padding.to(self.device)[self.rows_on_device[row]]
            processors.append(processor)
        return processors

    # Ends.

    def _until_end_token(self, tokens: torch.Tensor, accepted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """How many (b,) of the accepted tokens and the one after them go into the output, and which rows end there."""
        if self.end_tokens is None:
            return accepted + 1, torch.zeros_like(accepted, dtype=torch.bool)
        ends = torch.isin(tokens, self.end_tokens) & (torch.arange(tokens.shape[1], device="cpu") <= accepted[:, None])
        ended = ends.any(1)
        return (ends.long().argmax(1) + 1).where(ended, accepted + 1), ended

    def _until_criterion(self, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for the caller's criteria, which are asked as in `generate`: token after token."""
        begin, kept = self.lengths[self.rows], kept.clone()
        stopped = torch.zeros_like(kept, dtype=torch.bool)
        for length in range(int(begin.min()) + 1, int((begin + kept).max()) + 1):
            asked = ((begin < length) & (length <= begin + kept)).nonzero().squeeze(1)
            if len(asked) > 0:
                ids = self.mirror[upload(self.rows[asked], self.device), :length]
                ending = asked[StoppingCriteriaList(self.criteria)(ids, None).cpu()]
                kept[ending], stopped[ending] = length - begin[ending], True
        return kept, stopped

    def _advance(self, kept: torch.Tensor, ended: torch.Tensor, accepted: torch.Tensor, drafted: torch.Tensor) -> None:
        """Counts the round, and sets the length of the next drafts."""
        unfinished = ~self.finished[self.rows]
        self.lengths[self.rows] += kept
        self.finished[self.rows] |= ended | (self.lengths[self.rows] >= self.config.max_length)
        self.drafted_per_row[self.rows] += drafted
        self.accepted_per_row[self.rows] += accepted
        self.drafted_per_round.append(int(drafted.sum()))
        self.accepted_per_round.append(int(accepted.sum()))
        if self.draft is not None and not self.fixed and self.config.num_assistant_tokens_schedule != "constant":
            full = (accepted == drafted)[unfinished].float().mean() >= 0.5
            self.drafts = self.drafts + 2 if full else max(1, self.drafts - 1)

    def _let_rows_leave(self) -> None:
        """Finished rows leave the caches, once there are enough of them."""
        finished = self.finished[self.rows]
        leaving = int(finished.sum())
        if self.rows_may_leave and len(self.rows) * LEAVING_SHARE <= leaving < len(self.rows) and leaving > 0:
            index = (~finished).nonzero().squeeze(1)
            for decoder in (self.target, self.draft):
                if decoder is not None:
                    decoder.keep_rows(index)
            self._set_rows(self.rows[index])

    # Rows and columns.

    def _set_rows(self, rows: torch.Tensor) -> None:
        self.rows = rows
        self.rows_on_device = None if self.mirror is None else upload(rows, self.device)

    def _columns(self, begin: torch.Tensor, count: int) -> torch.Tensor:
        """(b, count) of `sequences`, from each row's `begin` (b,) on."""
        return (begin[:, None] + torch.arange(count, device="cpu")).clamp(max=self.sequences.shape[1] - 1)

    def _show(self, tokens: torch.Tensor, begin: torch.Tensor) -> None:
        """Puts tokens (b, t) from each row's `begin` on where processors and criteria see them, if there are any."""
        if self.mirror is not None:
            columns = upload(self._columns(begin, tokens.shape[1]), self.device)
            self.mirror[self.rows_on_device[:, None], columns] = tokens.to(self.device)

    def _padded(self) -> torch.Tensor:
        """The output: what drafts have left behind a row's end becomes padding."""
        columns = int(self.lengths.max())
        padding = torch.arange(columns, device="cpu") >= self.lengths[:, None]
        pad = self.config._pad_token_tensor
        return self.sequences[:, :columns].masked_fill(padding, 0 if pad is None else int(pad))

    def _statistics(self, seconds: float) -> SpeculationStatistics:
        return SpeculationStatistics(
            rounds=len(self.drafted_per_round),
            new_tokens_per_row=tuple((self.lengths - self.prompt).tolist()),
            drafted_per_row=tuple(self.drafted_per_row.tolist()),
            accepted_per_row=tuple(self.accepted_per_row.tolist()),
            drafted_per_round=tuple(self.drafted_per_round),
            accepted_per_round=tuple(self.accepted_per_round),
            target_forwards=self.target.forwards,
            draft_forwards=0 if self.draft is None else self.draft.forwards,
            seconds=seconds,
        )
