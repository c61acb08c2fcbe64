"""
`speculative_generate`: speculative decoding of a whole batch, which `generate` has for one row only.

A *draft* proposes k tokens for each row, the *target* scores them in one forward, and each row keeps its accepted
drafts and one token of the target's own. One round, top to bottom, is `Speculation._round`, in `loop.py`:

    draft       the draft model runs k small forwards, or each row looks up its last tokens in its own text
    verify      one forward of the target over k + 1 columns: the newest token of each row and its drafts
    accept      for all rows at once: the drafts up to the first that the target refuses, and the token after them
    roll back   both caches drop each row's rejected columns; the one transfer to the host tells them how many

The tokens of all rows are kept on the host: one small transfer per round takes to the device what the models have not
seen, one brings back what was found, and between them the host waits for nothing.

Between rounds the target's cache has seen all tokens of a row but the newest, the draft's cache all but the newest two
(it never saw its own last proposal). So each round adds k + 1 columns to both, and both drop the same number of them.
"""

from .generate import speculative_generate
from .statistics import SpeculationStatistics, SpeculativeOutput


__all__ = ["SpeculationStatistics", "SpeculativeOutput", "speculative_generate"]
