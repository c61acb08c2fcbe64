"""
One forward through a static cache: what `positions.py` decides on the host is arithmetic on the device here. The counts
are those of `static.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class StaticSegment:
    """
    [`Segment`] on the device: some consecutive columns of a forward, and what a recurrent layer does with them. All
    tensors are int64 and describe the rows before the segment.
    """

    columns: slice
    scan: bool
    num_tokens: int
    seen: torch.Tensor  # (b,)
    base: torch.Tensor  # (phases, b)
    counts: torch.Tensor  # (b,) real new tokens
    after: torch.Tensor  # (phases, b): `base` after the segment
    due: torch.Tensor | None  # (phases, b) bool: which rows write their checkpoint; None for a scan, all
    capacity: int
    real: torch.Tensor | None  # (b, t) bool: which columns are tokens; None when all are
    _on: dict[Any, Any] = field(default_factory=dict)

    def to(self, device: torch.device) -> StaticSegment:
        """The same with tensors on `device`: layers may be spread over several."""
        if device == self.seen.device:
            return self
        if device not in self._on:
            move = lambda tensor: None if tensor is None else tensor.to(device)  # noqa: E731
            self._on[device] = StaticSegment(
                self.columns,
                self.scan,
                self.num_tokens,
                move(self.seen),
                move(self.base),
                move(self.counts),
                move(self.after),
                None,
                self.capacity,
                move(self.real),
            )
        return self._on[device]

    def kernel_positions(self) -> torch.Tensor:
        """(phases, 5, b) int32: [`Segment.kernel_positions`] of each phase."""
        if "kernel" not in self._on:
            held = self.seen - self.base
            fold = held if self.scan else self.after - self.base
            seen, counts = self.seen.expand_as(held), self.counts.expand_as(held)
            positions = torch.stack([seen, self.base % self.capacity, held, counts, fold], dim=1)
            self._on["kernel"] = positions.to(torch.int32)
        return self._on["kernel"]

    def _order(self) -> torch.Tensor:
        if "order" not in self._on:
            self._on["order"] = (~self.real).long().argsort(dim=1, stable=True)
        return self._on["order"]

    def _in_front(self) -> torch.Tensor:
        """(b, t) bool: which tokens are real once they are in front."""
        return torch.arange(self.num_tokens, device=self.counts.device) < self.counts[:, None]

    def real_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gathers (b, t, c) so that real tokens come first; masked ones become zero (a product would keep a NaN)."""
        if self.real is None:
            return tensor
        here = self.to(tensor.device)
        gathered = tensor.gather(1, here._order()[..., None].expand(-1, -1, tensor.shape[-1]))
        return torch.where(here._in_front()[..., None], gathered, gathered.new_zeros(()))

    def only_real(self, tensor: torch.Tensor, filler: float = 0.0) -> torch.Tensor:
        """`tensor` (b, t, ...), in the order of [`real_first`], with `filler` behind a row's real tokens."""
        if self.real is None:
            return tensor
        real = self.to(tensor.device)._in_front()
        return torch.where(real.view(*real.shape, *[1] * (tensor.dim() - 2)), tensor, tensor.new_full((), filler))

    def original_order(self, tensor: torch.Tensor) -> torch.Tensor:
        """The inverse of [`real_first`] for outputs (b, t, ...): zeros at masked columns."""
        if self.real is None:
            return tensor
        inverse = self.to(tensor.device)._order().argsort(1)
        tensor = self.only_real(tensor)
        return tensor.gather(1, inverse.view(*inverse.shape, *[1] * (tensor.dim() - 2)).expand_as(tensor))

    def new_tokens(self, index: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        The numbers (b, t) in the sequence of the new tokens, real ones first, and which of them are real (None: all).
        `index` (b, i): of these new tokens instead; those at a negative index do not exist.
        """
        if index is None:
            index = torch.arange(self.num_tokens, device=self.seen.device)
            valid = None if self.real is None else self._in_front()
        else:
            valid = (index >= 0) & (index < self.counts[:, None])
        return self.seen[:, None] + index, valid


@dataclass
class StaticForward:
    """One forward through the model: its segments, and the tensors that hold once it has ended."""

    num_tokens: int
    segments: list[StaticSegment]
    fresh: bool  # no token has been seen before
    numbers: torch.Tensor  # (b, t): the number of each column's token; a masked column has that of the one before it
    real: torch.Tensor | None  # (b, t) bool
    aligned_right: bool = False  # see `StaticAttentionLayer.update`
    touched: bool = False  # a layer has begun to change
    _on: dict[Any, Any] = field(default_factory=dict)

    @property
    def numbers_from_0(self) -> torch.Tensor:
        """`numbers`, where columns before the first token have that of the first."""
        return self.numbers if self.real is None else self.numbers.clamp(min=0)

    def key_slots(self, front: int, device: torch.device) -> torch.Tensor:
        """(b, t): where keys and values of the new columns go, behind `front` slots of which masked ones take one."""
        if device not in self._on:
            slots = self.numbers + front
            slots = slots if self.real is None else torch.where(self.real, slots, 0)
            self._on[device] = slots.to(device)
        return self._on[device]
