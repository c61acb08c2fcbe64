"""
Where every row of the batch stands: the (5, batch) int32 tensor that all kernels read, on the device only.

All five describe the row before the call. The buffer is a ring: its i-th held token lies in slot (FIRST + i) % slots,
and the i-th new one in slot (FIRST + HELD + i) % slots. The ring of raw convolution inputs is indexed by the token's
number in the sequence: token m lies in slot m % ring.
"""

from __future__ import annotations

import triton
import triton.language as tl


SEEN, FIRST, HELD, COUNT, FOLD = range(5)
ROWS = 5


@triton.jit
def row_positions(positions_ptr, b, batch, slots: tl.constexpr):
    """
    (first, held, count, fold) of row b, FIRST and HELD being within the buffer. Tokens that find no slot are dropped
    and no more is folded than there is: a wrong COUNT or FOLD gives wrong results, not writes to foreign memory.
    """
    row = positions_ptr + b
    held = tl.load(row + 2 * batch)
    count = tl.minimum(tl.load(row + 3 * batch), slots - held)
    return tl.load(row + batch), held, count, tl.minimum(tl.load(row + 4 * batch), held + count)


@triton.jit
def ring_slot(first, place, slots: tl.constexpr):
    """The slot of the token at `place` (0: the oldest), for first, place < slots."""
    slot = first + place
    return tl.where(slot >= slots, slot - slots, slot)
