"""
Positions, and what one forward does to them: decided once for all layers, on the host.

The tokens of a row are counted in two ways, which differ only where tokens were masked (padding): *columns* are what
attention layers count, padding included; *tokens* are the real ones, which the recurrence has seen.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the CPU on `device`. From pinned memory, so that the host need not wait for what the device does."""
    if device.type in ("cuda", "xpu"):
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class Rows:
    """
    One integer for each row of the batch. `same` is that integer when all rows agree (the usual case, in which ops
    take slices instead of gathers), else None.
    """

    def __init__(self, values: torch.Tensor):
        self.values = values  # (batch,) int64, on the CPU
        distinct = set(values.tolist())
        self.same = distinct.pop() if len(distinct) == 1 else None
        self._on: dict[Any, torch.Tensor] = {}

    @cached_property
    def max(self) -> int:
        return int(self.values.max()) if self.same is None else self.same

    def on(self, device: torch.device) -> int | torch.Tensor:
        """The shared integer, or the (batch,) tensor on `device`."""
        return self.tensor(device) if self.same is None else self.same

    def tensor(self, device: torch.device) -> torch.Tensor:
        """(batch,) on `device`."""
        if device not in self._on:
            self._on[device] = upload(self.values, device)
        return self._on[device]

    def slots_from(self, count: int, capacity: int, device: torch.device) -> torch.Tensor:
        """The `count` slots of a ring from each row's integer on: (count,) when the rows agree, else (b, count)."""
        key = (count, capacity, device)
        if key not in self._on:
            begin = self.values[:, None] if self.same is None else self.same
            self._on[key] = upload((begin + torch.arange(count, device="cpu")) % capacity, device)
        return self._on[key]

    def __bool__(self) -> bool:
        return self.same != 0


@dataclass
class Segment:
    """
    Some consecutive columns of a forward, and what a recurrent layer does with them.

    `scan=False`: the tokens are appended to the buffer and replayed. `scan=True`: a prefill; all that is held and the
    segment's own tokens are folded into the checkpoint, and the buffer is empty afterwards.

    `first`, `start` and `seen` describe the rows before the segment, and before anything is folded. The buffer is a
    ring: what a row holds lies in the places 0, 1, ... from slot `first` on, place i in slot (first + i) % capacity;
    new token i goes to place start + i.
    """

    columns: slice
    scan: bool
    counts: Rows  # real tokens
    first: Rows  # the slot of the oldest token held
    start: Rows  # tokens held: the write position
    seen: Rows  # tokens that the row had seen
    fold_first: Rows | None = None  # how many of the oldest to fold before the tokens are replayed
    fold_last: Rows | None = None  # how many to fold after that: all of the row's, or 0 (a scan: 1, for all)
    order: torch.Tensor | None = None  # (b, t): real tokens first; None when all are real
    _on: dict[Any, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return self.columns.stop - self.columns.start

    @cached_property
    def end(self) -> Rows:
        """Tokens held once the new ones are appended, and before anything is folded."""
        return Rows(self.start.values + self.counts.values)

    @cached_property
    def behind_fold(self) -> tuple[Rows, Rows, Rows]:
        """`first`, `start` and `end` once `fold_first` has been folded (`first` may be past the end of the ring)."""
        if self.fold_first is None:
            return self.first, self.start, self.end
        folded = self.fold_first.values
        return Rows(self.first.values + folded), Rows(self.start.values - folded), Rows(self.end.values - folded)

    def kernel_positions(self, device: torch.device) -> torch.Tensor:
        """
        (5, b) int32 on `device`, as the Triton kernels take positions: the rows SEEN, FIRST, HELD, COUNT, FOLD, all as
        before the segment. FOLD counts the oldest tokens, new ones included, that go into the checkpoint; of a scan it
        is all that is held, whose state the scan starts from.
        """
        key = ("kernel", device)
        if key not in self._on:
            fold = self.start if self.scan else self.fold_first or self.fold_last
            rows = [self.seen.values, self.first.values, self.start.values, self.counts.values]
            rows.append(torch.zeros_like(self.start.values) if fold is None else fold.values)
            self._on[key] = upload(torch.stack(rows).to(torch.int32), device)
        return self._on[key]

    def write_index(self, capacity: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Row, number in `real_first` order and buffer slot of each real token of the segment, on `device`."""
        key = ("write", capacity, device)
        if key not in self._on:
            real = torch.arange(self.num_tokens, device="cpu") < self.counts.values[:, None]
            row, token = real.nonzero(as_tuple=True)
            slot = (self.first.values[row] + self.start.values[row] + token) % capacity
            self._on[key] = tuple(upload(index, device) for index in (row, token, slot))
        return self._on[key]

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`order`, its inverse, and which tokens are real in that order, each (b, t), on `device`."""
        if device not in self._on:
            order = upload(self.order, device)
            real = torch.arange(self.num_tokens, device=device) < self.counts.tensor(device)[:, None]
            self._on[device] = (order, order.argsort(1), real)
        return self._on[device]

    def real_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gathers (b, t, c) into `order`; masked tokens become zero (a product would keep a NaN)."""
        if self.order is None:
            return tensor
        order, _, real = self.on(tensor.device)
        gathered = tensor.gather(1, order[..., None].expand(-1, -1, tensor.shape[-1]))
        return torch.where(real[..., None], gathered, gathered.new_zeros(()))

    def only_real(self, tensor: torch.Tensor, filler: float = 0.0) -> torch.Tensor:
        """`tensor` (b, t, ...), in the order of [`real_first`], with `filler` behind a row's real tokens."""
        if self.order is None:
            return tensor
        _, _, real = self.on(tensor.device)
        return torch.where(real.view(*real.shape, *[1] * (tensor.dim() - 2)), tensor, tensor.new_full((), filler))

    def original_order(self, tensor: torch.Tensor) -> torch.Tensor:
        """The inverse of [`real_first`] for outputs (b, t, ...): zeros at masked columns."""
        if self.order is None:
            return tensor
        _, inverse, _ = self.on(tensor.device)
        tensor = self.only_real(tensor)
        return tensor.gather(1, inverse.view(*inverse.shape, *[1] * (tensor.dim() - 2)).expand_as(tensor))

    def ring_slots(self, kernel: int, ring: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Where the `kernel - 1` inputs before this segment lie in a ring of `ring` slots, oldest first, and which of
        them exist (None: all). (K - 1,) when the rows agree, else (b, K - 1).
        """
        key = ("ring", kernel, ring, device)
        if key not in self._on:
            self._on[key] = ring_slots(self.seen, kernel - 1, ring, device)
        return self._on[key]


def ring_slots(seen: Rows, count: int, ring: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The ring slots of the newest `count` tokens of rows that have seen `seen`; see [`Segment.ring_slots`]."""
    newest = torch.tensor(seen.same, device="cpu") if seen.same is not None else seen.values[:, None]
    token = newest - count + torch.arange(count, device="cpu")
    exists = token >= 0
    return upload(token % ring, device), None if bool(exists.all()) else upload(exists, device)


def fold_positions(first: Rows, count: Rows, device: torch.device) -> torch.Tensor:
    """[`Segment.kernel_positions`] for a fold alone, of which only FIRST and FOLD are read."""
    zeros = torch.zeros_like(count.values)
    return upload(torch.stack([zeros, first.values, zeros, zeros, count.values]).to(torch.int32), device)


@dataclass
class ReplayForward:
    """One forward through the model: its segments, and the positions that hold once it has ended."""

    num_tokens: int
    segments: list[Segment]
    after: Positions
    capacity: int  # slots that the buffers must have
    ring: int  # tokens, beyond the convolution's own reach, whose raw inputs must be kept
    grows: bool = False  # the buffers are too small for it
    touched: bool = False  # a layer has begun to change


@dataclass
class Positions:
    """
    Where every row stands. All recurrent layers of a cache share one; it changes in `end_forward`, `crop`, row
    operations and `reset` only. Tensors are (batch,) int64 on the CPU and are replaced, never written to.
    """

    columns: int = 0  # of the longest row
    seen: torch.Tensor | None = None  # tokens
    held: torch.Tensor | None = None  # tokens in the buffer: the write position
    first: torch.Tensor | None = None  # the slot of the oldest of them (the buffer is a ring); 0 where there is none
    croppable: torch.Tensor | None = None  # newest columns that a crop may still remove
    mask: torch.Tensor | None = None  # (batch, columns) bool: which columns are tokens; None when all are
    holes: torch.Tensor | None = None  # columns on the left of each row that are there because another row is longer
    since_crop: int = 0  # columns since the last crop
    recording: bool = False

    @property
    def batch_size(self) -> int | None:
        return None if self.seen is None else self.seen.shape[0]

    def holding(self, held: torch.Tensor, first: torch.Tensor) -> Positions:
        """The same with `held` tokens from slot `first` on; a row that holds none starts again at slot 0."""
        return dataclasses.replace(self, held=held, first=torch.where(held > 0, first, 0))

    def real_among_newest(self, columns: torch.Tensor) -> torch.Tensor:
        """How many of the newest `columns` (batch,) columns of each row are tokens."""
        if self.mask is None:
            return columns
        newest_first = torch.nn.functional.pad(self.mask.flip(1).long().cumsum(1), (1, 0))
        return newest_first.gather(1, columns[:, None]).squeeze(1)

    def columns_holding(self, tokens: torch.Tensor) -> torch.Tensor:
        """The most newest columns of each row among which there are no more than `tokens` (batch,) tokens."""
        if self.mask is None:
            return tokens
        return (self.mask.flip(1).long().cumsum(1) <= tokens[:, None]).sum(1)

    def select(self, index: torch.Tensor) -> Positions:
        """The positions of the rows at `index`."""
        pick = lambda rows: None if rows is None else rows.index_select(0, index)  # noqa: E731
        return dataclasses.replace(
            self,
            seen=pick(self.seen),
            held=pick(self.held),
            first=pick(self.first),
            croppable=pick(self.croppable),
            mask=pick(self.mask),
            holes=pick(self.holes),
        )
