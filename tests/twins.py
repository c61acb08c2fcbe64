"""Several caches that live through the same session: one per backend, for the tests that compare backends."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tiny_models import poison, random_ids, replay_layers


class Twins:
    """
    (model, cache) pairs that get the same tokens, crops and row operations. `logits` collects for each pair what its
    forwards gave at real tokens, float32 on the CPU. Unused buffer slots are NaN before each forward.
    """

    def __init__(self, *pairs, batch: int):
        self.pairs, self.batch = pairs, batch
        self.logits: list[list[torch.Tensor]] = [[] for _ in pairs]
        self._forwards = 0

    @property
    def caches(self) -> list:
        return [cache for _, cache in self.pairs]

    @torch.no_grad()
    def append(self, tokens: int, mask: list[list[int]] | None = None) -> None:
        self._forwards += 1
        ids = random_ids(self.batch, tokens, seed=self._forwards)
        mask = torch.ones_like(ids) if mask is None else torch.tensor(mask)
        for (model, cache), logits in zip(self.pairs, self.logits):
            poison(cache)
            out = model(input_ids=ids.to(model.device), attention_mask=mask.to(model.device), cache=cache).logits
            assert torch.isfinite(out).all()
            logits.append(out.float().cpu()[mask.bool()])

    def each(self, operation: Callable) -> None:
        """Does something to each cache."""
        for cache in self.caches:
            operation(cache)
        self.batch = self.caches[0].batch_size

    def crop(self, *counts: int) -> None:
        """Removes a count of columns, or a count for each row."""
        self.each(lambda cache: cache.crop(-counts[0] if len(counts) == 1 else -torch.tensor(counts)))

    def all_logits(self) -> list[torch.Tensor]:
        """Of each pair, (real tokens of all forwards, vocab)."""
        return [torch.cat(logits) for logits in self.logits]

    def states(self, index: int) -> list[torch.Tensor]:
        """All recurrent states of one pair, pending inputs included, float32 on the CPU."""
        return [layer.recurrent_states[0].float().cpu() for layer in replay_layers(self.caches[index])]


def eventful_session(twins: Twins) -> None:
    """
    What can happen to a cache of two rows (`buffer_len=3, max_window=2`): padding, flushes, windows, crops, rows that
    stand apart, a buffer that grows and is gone around, and recording switched on and off.
    """
    twins.append(5, mask=[[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])  # a scan
    for _ in range(4):
        twins.append(1)  # a flush at the third
    twins.append(2)
    twins.append(1, mask=[[0], [1]])
    twins.append(2, mask=[[1, 0], [0, 1]])

    twins.each(lambda cache: cache.activate_past_recording())
    wrapped = apart = 0
    for tokens, counts in ((3, (2,)), (1, (0,)), (3, (0, 2)), (3, (3, 1)), (2, (1, 0)), (3, (1,)), (3, (0,))):
        twins.append(tokens)
        twins.crop(*counts)
        positions, slots = twins.caches[0].positions, replay_layers(twins.caches[0])[0].inputs.capacity
        wrapped += bool((positions.first + positions.held > slots).any())
        apart += len(set(positions.first.tolist())) > 1
    assert wrapped and apart
    twins.append(2, mask=[[0, 0], [1, 1]])  # a row without a real token
    twins.append(7)  # more than the buffer has room for
    assert twins.caches[0].stats.buffer_growths == 1
    twins.crop(6)
    twins.each(lambda cache: cache.reorder_cache(torch.tensor([1, 0])))
    twins.append(2)

    twins.each(lambda cache: setattr(cache, "record_past", False))
    twins.append(1)
    twins.append(1)
    twins.append(16)  # a scan from a state with inputs pending
    twins.append(1)
    for cache in twins.caches:
        for layer in replay_layers(cache):
            held = (layer.checkpoint, layer.conv_inputs, *layer.inputs.tensors())
            assert all(tensor.is_contiguous() for tensor in held)
