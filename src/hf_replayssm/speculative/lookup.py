"""Drafts without a draft model."""

from __future__ import annotations


class PromptLookup:
    """
    Prompt lookup in one row: what followed in its own tokens where they were as its newest ones are. It remembers where
    every run of up to `ngram` tokens ended first, so that a round costs as much as its new tokens, however long the
    text is.

    Args:
        ngram: the longest match that is looked for.
    """

    def __init__(self, ngram: int):
        self.ngram = ngram
        self.tokens: list[int] = []
        self.behind: dict[tuple[int, ...], int] = {}  # where the tokens behind the earliest such run begin

    def extend(self, tokens: list[int]) -> None:
        """Takes in the row's next tokens."""
        for token in tokens:
            # Runs that end in the newest token are not in yet: it must not be found as its own match.
            end = len(self.tokens)
            for size in range(1, min(self.ngram, end) + 1):
                self.behind.setdefault(tuple(self.tokens[end - size :]), end)
            self.tokens.append(token)

    def drafts(self, count: int) -> list[int]:
        """
        Up to `count` tokens, as many as there are. The longest match counts; of several the earliest, of which most
        tokens follow.
        """
        for size in range(min(self.ngram, len(self.tokens)), 0, -1):
            begin = self.behind.get(tuple(self.tokens[-size:]))
            if begin is not None:
                return self.tokens[begin : begin + count]
        return []
