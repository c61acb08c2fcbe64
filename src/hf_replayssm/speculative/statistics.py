"""What `speculative_generate` returns beside the tokens."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import ModelOutput

from ..cache import ReplayCache, ReplayStats


@dataclass(frozen=True)
class SpeculationStatistics:
    """
    What speculation did. Tuples `..._per_row` have an entry for each row of the output, `..._per_round` for each round.

    Attributes:
        rounds: draft, verify, accept, roll back.
        new_tokens_per_row: tokens in the output, without the prompt and the padding.
        drafted_per_row: drafts that the target verified. Not counted are those that a row had no room for, and the
            columns of a row for which prompt lookup found fewer drafts than for another.
        accepted_per_row: drafts that are in the output.
        drafted_per_round, accepted_per_round: the same, over all rows; empty in [`from_generate`].
        target_forwards: of the target, for the prompt too. The batch goes through each together.
        draft_forwards: of the draft model, for the prompt too; 0 with prompt lookup; None in [`from_generate`].
        seconds: from the first forward to the last token, prompt included.
    """

    rounds: int
    new_tokens_per_row: tuple[int, ...]
    drafted_per_row: tuple[int, ...]
    accepted_per_row: tuple[int, ...]
    drafted_per_round: tuple[int, ...]
    accepted_per_round: tuple[int, ...]
    target_forwards: int
    draft_forwards: int | None
    seconds: float

    @classmethod
    def from_generate(cls, stats: ReplayStats, new_tokens: int, seconds: float) -> SpeculationStatistics:
        """
        The same of one call of `generate` with drafts, from what its (fresh) cache has counted: each round is one
        forward, which yields a token of the target's own and the accepted drafts, and a crop of the others.

        Args:
            stats: `output.cache.stats`, with `return_dict_in_generate=True`.
            new_tokens: of the one row that `generate` takes with drafts.
            seconds: of the call.
        """
        rounds, accepted = stats.forwards, max(0, new_tokens - stats.forwards)
        return cls(
            rounds=rounds,
            new_tokens_per_row=(new_tokens,),
            drafted_per_row=(accepted + stats.tokens_cropped,),
            accepted_per_row=(accepted,),
            drafted_per_round=(),
            accepted_per_round=(),
            target_forwards=rounds,
            draft_forwards=None,
            seconds=seconds,
        )

    @property
    def new_tokens(self) -> int:
        """Tokens of all rows."""
        return sum(self.new_tokens_per_row)

    @property
    def drafted(self) -> int:
        """Verified drafts of all rows."""
        return sum(self.drafted_per_row)

    @property
    def accepted(self) -> int:
        """Accepted drafts of all rows."""
        return sum(self.accepted_per_row)

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts per verified one, 0 to 1; 0 if there were none."""
        return self.accepted / max(1, self.drafted)

    @property
    def mean_accepted(self) -> float:
        """Accepted drafts per round, of all rows together."""
        return self.accepted / max(1, self.rounds)

    @property
    def forwards_saved(self) -> int:
        """Fewer forwards of the target than `generate` without drafts takes: one for each token of the longest row."""
        return max(self.new_tokens_per_row) - self.target_forwards

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows per second."""
        return self.new_tokens / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """Fields and totals, as JSON can hold them."""
        totals = ("new_tokens", "drafted", "accepted", "acceptance_rate", "mean_accepted")
        totals += ("forwards_saved", "tokens_per_second")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in totals}


@dataclass
class SpeculativeOutput(ModelOutput):
    """
    Output of [`speculative_generate`] with `return_dict_in_generate=True`.

    Args:
        sequences (`torch.LongTensor` of shape `(batch, columns)`): prompts and new tokens, padded on the right.
        statistics ([`SpeculationStatistics`]): what speculation did.
        cache ([`ReplayCache`]): the target's. A `cache=` that was passed in has seen each row but its newest token; in
            one made here only the rows that ran longest may be left.
    """

    sequences: torch.LongTensor | None = None
    statistics: SpeculationStatistics | None = None
    cache: ReplayCache | None = None
