"""The loop that both evaluations share: documents in, one measurement per scored token out."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils.memory import should_reduce_batch_size

from . import forward
from .contexts import Context, Counts, Skipped, batches, cut_contexts, tokenize_documents


# Called with the scored tokens done so far, and their number in all where it is known.
Progress = Callable[[int, "int | None"], None]
# One measurement: from the logits of each route (batch, T, vocab) and the targets (batch, T) to named (batch, T) fp64.
Measure = Callable[[list[torch.Tensor], torch.Tensor], dict[str, torch.Tensor]]

LOOK_AHEAD_BATCHES = 64  # batches of contexts that are sorted by length at a time, where the documents are a stream
BLOCK_ELEMENTS = 2**24  # logits that are measured at a time, which bounds the memory of their fp64 copies
# Bounds of the ranges of positions that results are summed over: 1, 2, 3, 4, 6, 8, 12, 16, 24, ..., two an octave.
POSITION_EDGES = torch.tensor([1, *sorted(2**n for n in range(1, 40)), *(3 * 2**n for n in range(40))]).unique()


@dataclass(frozen=True)
class Settings:
    """What an evaluation was asked for, checked. Lengths are in tokens."""

    mode: str
    window: int | None
    batch_size: int
    carry_state: bool
    max_length: int | None
    stride: int | None
    max_tokens: int | None
    device: torch.device

    @classmethod
    def checked(
        cls, model, *, mode, window, batch_size, carry_state, max_length, stride, max_tokens, device
    ) -> Settings:
        forward.check_model(model)
        if mode not in forward.MODES:
            raise ValueError(f"mode must be one of {', '.join(forward.MODES)}, not {mode!r}.")
        positive = {"window": window, "batch_size": batch_size, "max_length": max_length, "max_tokens": max_tokens}
        for name, value in positive.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}.")
        if carry_state and (max_length is not None or stride is not None):
            raise ValueError(
                "max_length and stride cut independent windows, but carry_state=True never resets the cache within a "
                "document. Leave one of the two out."
            )
        if not carry_state:
            max_length = forward.default_max_length(model) if max_length is None else max_length
            stride = max_length if stride is None else stride
            if not 1 <= stride <= max_length:
                raise ValueError(f"stride must lie between 1 and max_length ({max_length}), not {stride!r}.")
        return cls(
            mode=mode,
            window=window if mode == "window" else None,
            batch_size=batch_size,
            carry_state=carry_state,
            max_length=max_length,
            stride=stride,
            max_tokens=max_tokens,
            device=model.device if device is None else torch.device(device),
        )


class Run:
    """One pass over the documents, in batches; the attributes are complete when all of them have been taken."""

    def __init__(self, model, tokenizer, documents: Iterable[Any], settings: Settings, progress: Progress | None):
        if isinstance(documents, str):
            raise ValueError("documents must be a list of texts, not one text: pass [text].")
        if model.device != settings.device and getattr(model, "hf_device_map", None) is None:
            raise ValueError(
                f"The model is on {model.device}, not on {settings.device}. Move it first, with "
                f'model.to("{settings.device}").'
            )
        self.model = model
        self.settings = settings
        self.progress = progress
        self.skipped = Skipped()
        self.documents: dict[int, Counts] = {}
        self.contexts = 0
        self.done = 0  # scored tokens, of the batches that are finished
        self.batch_limit: int | None = None  # rows of a batch, from when the memory ran out
        tokenized = tokenize_documents(
            documents,
            tokenizer,
            vocab_size=forward.vocab_size(model),
            max_tokens=settings.max_tokens,
            skipped=self.skipped,
        )
        self.total = settings.max_tokens
        self.look_ahead: int | None = LOOK_AHEAD_BATCHES * settings.batch_size
        if isinstance(documents, Sized):
            # Everything is there: tokenise it all, so that the progress has an end and the batches sort best.
            tokenized = list(tokenized)
            self.total = sum(document.tokens for document in tokenized)
            self.look_ahead = None
        self._tokenized = tokenized

    def batches(self) -> Iterator[list[Context]]:
        """The batches, which are the same in every process and every time. ValueError if there is nothing to score."""
        yield from batches(self._cut(), self.settings.batch_size, self.look_ahead)
        if not self.documents:
            raise ValueError(
                f"There is nothing to score: {self.skipped.count} documents were given, and each is empty or a single "
                "token. Check that the right column or file was named."
            )

    def _cut(self) -> Iterator[Context]:
        settings = self.settings
        for document in self._tokenized:
            # Without the ids, which live on in the contexts only: a stream may be larger than the memory.
            self.documents[document.index] = document.counts
            yield from cut_contexts(
                document, carry_state=settings.carry_state, max_length=settings.max_length, stride=settings.stride
            )

    def measurements(
        self, batch: list[Context], routes: list[forward.Route], measure: Measure
    ) -> list[tuple[Context, dict[str, torch.Tensor]]]:
        """Per context of a batch, the measurements (scored,) in fp64 on the CPU, in the order of its tokens.

        Where an accelerator has not enough memory, the batch goes through in halves, and so do those after it.
        """
        measured, rest = [], batch
        while rest:
            part = rest[: self.batch_limit]
            try:
                measured += self._measure(part, routes, measure)
            except RuntimeError as error:
                if len(part) == 1 or not _lacks_memory(error):
                    raise
                message = str(error).split(". ")[0]
            else:
                self.done += sum(context.scored for context in part)
                rest = rest[len(part) :]
                continue
            # Outside of `except`, whose traceback holds on to the tensors of the forward.
            for route in routes:
                route.drop()
            self._empty_device_cache()
            self.batch_limit = len(part) // 2
            warnings.warn(
                f"{message}: a batch of {len(part)} contexts does not fit. It is halved, to {self.batch_limit}, from "
                "here on.",
                stacklevel=2,
            )
        self.contexts += len(batch)
        return measured

    def _measure(
        self, batch: list[Context], routes: list[forward.Route], measure: Measure
    ) -> list[tuple[Context, dict[str, torch.Tensor]]]:
        settings, done = self.settings, self.done
        length = max(len(context.inputs) for context in batch)
        inputs = torch.full((len(batch), length), forward.FILLER, device="cpu")
        targets = torch.full((len(batch), length), forward.FILLER, device="cpu")
        scored = torch.zeros(len(batch), length, dtype=torch.bool, device="cpu")
        for row, context in enumerate(batch):
            end = len(context.inputs)
            inputs[row, :end], targets[row, :end] = context.inputs, context.targets
            scored[row, context.first_scored : end] = True
        inputs, targets = inputs.to(settings.device), targets.to(settings.device)

        for route in routes:
            route.start(inputs)
        measured: dict[str, torch.Tensor] = {}
        for start, stop in forward.pieces(length, settings.mode, settings.window or 1):
            # Rows are sorted, the longest first: those that have ended leave the batch, and the cache.
            rows = sum(len(context.inputs) > start for context in batch)
            logits = [route.next(rows, start, stop) for route in routes]
            for low, high in _blocks(stop - start, rows * logits[0].shape[-1]):
                columns = slice(start + low, start + high)
                block_targets = targets[:rows, columns].to(logits[0].device)
                for name, values in measure([one[:, low:high] for one in logits], block_targets).items():
                    if name not in measured:
                        measured[name] = values.new_zeros(len(batch), length)
                    measured[name][:rows, columns] = values
            done += int(scored[:, start:stop].sum())
            if self.progress is not None:
                self.progress(done, self.total)
        for route in routes:
            route.finish()

        measured = {name: values.cpu().double() for name, values in measured.items()}
        return [
            (context, {name: values[row][scored[row]] for name, values in measured.items()})
            for row, context in enumerate(batch)
        ]

    def _empty_device_cache(self) -> None:
        module = getattr(torch, self.settings.device.type, None)
        if hasattr(module, "empty_cache"):
            module.empty_cache()


def by_position(positions: torch.Tensor, values: dict[str, torch.Tensor]) -> dict[int, dict[str, float]]:
    """Sums over ranges of positions: per range, by the index of its lower bound in POSITION_EDGES, its `tokens` and
    the exactly rounded sum of each of `values`. positions: (tokens,) int64, from 1; values: (tokens,) fp64."""
    ranges = torch.bucketize(positions, POSITION_EDGES, right=True) - 1
    sums = {}
    for index in ranges.unique().tolist():
        inside = ranges == index
        sums[index] = {"tokens": int(inside.sum())}
        sums[index] |= {name: math.fsum(value[inside].tolist()) for name, value in values.items()}
    return sums


def position_table(sums: dict[int, dict[str, float]]) -> list[dict[str, float]]:
    """What `by_position` gave, as rows in the order of positions: from `start` to before `stop`."""
    edges = POSITION_EDGES.tolist()
    return [{"start": edges[index], "stop": edges[index + 1], **sums[index]} for index in sorted(sums)]


def _lacks_memory(error: RuntimeError) -> bool:
    """Whether an accelerator had not enough memory; libraries say so in errors of no type of their own."""
    return (
        isinstance(error, torch.OutOfMemoryError)
        or should_reduce_batch_size(error)
        or "CUBLAS_STATUS_ALLOC_FAILED" in str(error)
    )


def _blocks(length: int, elements_per_position: int) -> Iterator[tuple[int, int]]:
    width = max(1, BLOCK_ELEMENTS // max(1, elements_per_position))
    for low in range(0, length, width):
        yield low, min(low + width, length)


def check_finite(context: Context, logprobs: torch.Tensor) -> None:
    """Raises ValueError where a scored token has no finite log probability."""
    finite = torch.isfinite(logprobs)
    if not finite.all():
        position = context.start + context.first_scored + int((~finite).nonzero()[0]) + 1
        raise ValueError(
            f"The model gives token {position} of document {context.document} no finite log probability. Weights that "
            "overflow in float16 do this: load the model in bfloat16 or float32."
        )


def word_and_byte_counts(documents: Iterable[Counts]) -> tuple[int | None, int | None]:
    """Words and bytes of all documents; None if any was given as token ids."""
    documents = list(documents)
    if any(document.words is None for document in documents):
        return None, None
    return sum(document.words for document in documents), sum(document.bytes for document in documents)
