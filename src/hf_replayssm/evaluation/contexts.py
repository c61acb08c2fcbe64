"""From documents to what is fed and what is scored.

The rule, the same for every mode, cache and batch size: of a document's tokens, **each but the first is scored exactly
once**. A *context* is a run of input tokens that starts on a fresh cache; input i is scored on token i + 1. Contexts of
one document follow each other `stride` inputs apart, and where they overlap the later one only reads the tokens that
the earlier one scored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Counts:
    """The numbers of one document: all of it that is kept once it has been cut."""

    index: int
    tokens: int
    words: int | None
    bytes: int | None


@dataclass(frozen=True)
class Document:
    """One tokenised document. `tokens` are scored; `words` and `bytes` are those of the text that they stand for."""

    index: int  # in the order given, empty documents counted
    ids: torch.Tensor  # (length,) int64
    words: int | None  # None where only token ids were given
    bytes: int | None

    @property
    def tokens(self) -> int:
        return len(self.ids) - 1

    @property
    def counts(self) -> Counts:
        return Counts(self.index, self.tokens, self.words, self.bytes)


@dataclass(frozen=True)
class Context:
    """`inputs[i]` is fed, and its logits are scored on `targets[i]`, from `first_scored` on."""

    document: int
    start: int  # position of inputs[0] in the document
    inputs: torch.Tensor  # (length,) int64
    targets: torch.Tensor  # (length,) int64
    first_scored: int

    @property
    def scored(self) -> int:
        return len(self.inputs) - self.first_scored

    @property
    def positions(self) -> torch.Tensor:
        """Of each scored token, how many tokens the cache has seen before it: (scored,) int64, from 1."""
        return torch.arange(self.first_scored, len(self.inputs)) + 1


@dataclass
class Skipped:
    """Documents without a token to score: empty ones, and those of one single token."""

    count: int = field(default=0)


def tokenize_documents(
    documents: Iterable[str | Sequence[int] | torch.Tensor],
    tokenizer,
    *,
    vocab_size: int | None,
    max_tokens: int | None,
    skipped: Skipped,
) -> Iterator[Document]:
    """Tokenise documents, with the tokenizer's own special tokens, until `max_tokens` scored tokens are reached.

    A document may also be token ids (a list or a 1-D tensor); it then has no words and no bytes.
    """
    left = math.inf if max_tokens is None else max_tokens
    for index, document in enumerate(documents):
        if left <= 0:
            return
        limit = None if left == math.inf else int(left) + 1
        if isinstance(document, str):
            ids, words, size = _tokenize(document, tokenizer, limit)
        elif document is None:
            ids, words, size = [], 0, 0
        else:
            ids, words, size = document if limit is None else document[:limit], None, None
        ids = torch.as_tensor(ids, dtype=torch.long).cpu()
        if ids.dim() != 1:
            raise ValueError(f"Document {index} must be text or 1-D token ids, not of shape {tuple(ids.shape)}.")
        if len(ids) < 2:
            skipped.count += 1
            continue
        if vocab_size is not None and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            raise ValueError(
                f"Document {index} has token id {int(ids.max())}, but the model's vocabulary has {vocab_size}: the "
                "tokenizer is not this model's. Load both from the same place."
            )
        left -= len(ids) - 1
        yield Document(index=index, ids=ids, words=words, bytes=size)


def _tokenize(text: str, tokenizer, limit: int | None) -> tuple[list[int], int, int]:
    """Token ids, and the words (separated by white space) and UTF-8 bytes of the text that is scored.

    Not scored is what the first token stands for (nothing, if it is a beginning-of-sequence token), and what lies
    behind `limit` tokens.
    """
    if not text.strip():
        return [], 0, 0
    if tokenizer is None:
        raise ValueError("A tokenizer is needed for documents that are text. Pass one, or pass token ids.")
    fast = bool(getattr(tokenizer, "is_fast", False))
    # verbose=False: "longer than the model's maximum" is no concern here, contexts are cut later.
    encoded = tokenizer(text, return_offsets_mapping=fast, return_attention_mask=False, verbose=False)
    ids = list(encoded["input_ids"])
    if len(ids) < 2:
        return ids, 0, 0
    cut = limit is not None and len(ids) > limit
    if fast:
        offsets = encoded["offset_mapping"]
        # From the *end* of the unscored token: offsets may leave out the space before a word.
        start = offsets[0][1]
        end = max(stop for _, stop in offsets[:limit]) if cut else len(text)
        scored = text[start:end]
    else:
        first = tokenizer.decode(ids[:1], skip_special_tokens=True)
        whole = tokenizer.decode(ids[:limit], skip_special_tokens=True) if cut else text
        scored = whole[len(first) :]
    return ids[:limit], len(scored.split()), len(scored.encode("utf-8"))


def cut_contexts(document: Document, *, carry_state: bool, max_length: int, stride: int) -> Iterator[Context]:
    """The contexts of a document: one of any length with carried state, else of at most `max_length` inputs."""
    ids, total = document.ids, document.tokens
    if carry_state:
        yield Context(document.index, 0, ids[:-1], ids[1:], first_scored=0)
        return
    start = scored_until = 0
    while scored_until < total:
        end = min(start + max_length, total)
        first_scored = scored_until - start
        yield Context(document.index, start, ids[start:end], ids[start + 1 : end + 1], first_scored)
        scored_until = end
        start += stride


def batches(contexts: Iterable[Context], batch_size: int, look_ahead: int | None) -> Iterator[list[Context]]:
    """Batches of contexts of similar length, the longest first (memory runs out at once or not at all).

    `look_ahead` contexts are sorted at a time; None sorts all of them.
    """
    pending: list[Context] = []

    def drain() -> Iterator[list[Context]]:
        pending.sort(key=lambda context: -len(context.inputs))  # stable: ties stay in the order of the documents
        for start in range(0, len(pending), batch_size):
            yield pending[start : start + batch_size]
        pending.clear()

    for context in contexts:
        pending.append(context)
        if look_ahead is not None and len(pending) >= look_ahead:
            yield from drain()
    yield from drain()
