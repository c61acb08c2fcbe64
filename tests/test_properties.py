"""Random sequences of everything that can be done to a replay cache, against a plain list of tokens per row.

Hypothesis draws programs of appends (one token, windows, masked chunks), crops (by count and by row), row operations,
copies, snapshots, resets and switches of recording. What the cache must have seen is kept in plain Python; logits,
states and lengths are compared with the untouched model's forward over exactly those tokens, without a cache. The
unused buffer slots are full of NaN before every forward.
"""

from __future__ import annotations

import copy
import os
import pickle

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from tiny_models import Session, assert_unchanged, fingerprint, shared_model


MAX_BATCH = 4
MAX_LENGTH = 120
EXAMPLES = int(os.environ.get("REPLAY_EXAMPLES", "25"))

common = settings(
    deadline=None,
    derandomize="REPLAY_EXAMPLES" not in os.environ,  # the suite tests the cache, not one's luck
    max_examples=EXAMPLES,
    database=None,
    suppress_health_check=list(HealthCheck),
)

sizes = st.integers(1, 7)
row_numbers = st.integers(0, 10**6)  # reduced modulo what is possible when they are used
operations = st.one_of(
    st.tuples(st.just("step"), st.integers(1, 9)),
    st.tuples(st.just("window"), sizes),
    st.tuples(st.just("overflow"), st.integers(0, 12)),
    st.tuples(st.just("masked"), sizes, st.integers(0, 2**28 - 1)),
    st.tuples(st.just("crop"), row_numbers),
    st.tuples(st.just("crop"), row_numbers),
    st.tuples(st.just("crop_rows"), st.lists(row_numbers, min_size=MAX_BATCH, max_size=MAX_BATCH)),
    st.tuples(st.just("crop_rows"), st.lists(row_numbers, min_size=MAX_BATCH, max_size=MAX_BATCH)),
    st.tuples(st.just("crop_too_deep"), st.integers(1, 5)),
    st.tuples(st.just("reorder"), st.lists(row_numbers, min_size=MAX_BATCH, max_size=MAX_BATCH)),
    st.tuples(st.just("repeat"), st.integers(1, 2)),
    st.tuples(st.just("select"), st.lists(row_numbers, min_size=1, max_size=MAX_BATCH)),
    st.tuples(st.just("copy"), st.sampled_from(["deepcopy", "pickle", "snapshot"])),
    st.tuples(st.just("detour"), sizes),
    st.tuples(st.just("record"), st.booleans()),
    st.tuples(st.just("record"), st.just(True)),
    st.tuples(st.just("reset")),
    st.tuples(st.just("check")),
)
programs = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 3),
        "buffer_len": st.sampled_from([1, 2, 4, 5, 16]),
        "max_window": st.sampled_from([1, 3, 6, 24]),
        "recording": st.booleans(),
        "prefill": st.integers(1, 30),
        "padding": st.lists(row_numbers, min_size=3, max_size=3),
        "operations": st.lists(operations, min_size=4, max_size=14),
    }
)


def prefill_mask(made: Session, length: int, padding: list[int]) -> torch.Tensor | None:
    pads = [number % (2 * length) for number in padding[: made.batch]]
    pads = [count if count < length else 0 for count in pads]  # half of the rows are not padded
    if not any(pads):
        return None
    return (torch.arange(length) >= torch.tensor(pads)[:, None]).long()


class Program:
    """Runs one drawn program."""

    def __init__(self, name: str, drawn: dict):
        self.made = Session(name, drawn["batch"], buffer_len=drawn["buffer_len"], max_window=drawn["max_window"])
        self.drawn = drawn
        self.buffer_len = drawn["buffer_len"]
        if drawn["recording"]:
            self.made.cache.activate_past_recording()

    def run(self) -> None:
        mask = prefill_mask(self.made, self.drawn["prefill"], self.drawn["padding"])
        self.append(self.drawn["prefill"], mask)
        for operation, *arguments in self.drawn["operations"]:
            if max(len(row) for row in self.made.columns) > MAX_LENGTH:
                self.made.verify()
                self.reset()
            getattr(self, operation)(*arguments)
            self.check_bounds()
        self.made.verify()

    def check_bounds(self) -> None:
        cache, made = self.made.cache, self.made
        if not any(made.columns):
            assert cache.get_seq_length() == 0
        if not any(made.history):
            return
        longest = max(len(row) for row in made.columns)
        assert max(len(tokens) for tokens in made.history) <= cache.get_seq_length() <= longest
        held = cache.held.tolist()
        assert len(held) == made.batch
        assert all(0 <= slots <= len(tokens) for slots, tokens in zip(held, made.history))
        if not cache.record_past:
            assert cache.max_croppable == 0

    # Operations.

    def append(self, size: int, mask: torch.Tensor | None = None) -> None:
        cache = self.made.cache
        before, first = cache.max_croppable, not cache.get_seq_length()
        self.made.append(size, mask=mask)
        if cache.record_past:
            wanted = size if first else before + size
            assert cache.max_croppable >= min(self.drawn["max_window"], wanted)

    def step(self, count: int) -> None:
        for _ in range(count):
            self.append(1)

    def window(self, size: int) -> None:
        self.append(size)

    def overflow(self, more: int) -> None:
        """As many tokens as a flush needs, and some more."""
        self.append(self.buffer_len + self.drawn["max_window"] + more)

    def masked(self, size: int, bits: int) -> None:
        pattern = [[bits >> (row * 7 + column) & 1 for column in range(size)] for row in range(self.made.batch)]
        mask = torch.tensor(pattern)
        if not self.made.cache.get_seq_length():  # a first forward may be padded on the left only
            mask = mask.sort(dim=1).values
        self.append(size, mask)

    def limit(self) -> int:
        return self.made.cache.max_croppable

    def crop(self, number: int) -> None:
        if self.made.cache.record_past:
            self.made.crop(number % (self.limit() + 1))

    def crop_rows(self, numbers: list[int]) -> None:
        if self.made.cache.record_past and self.made.cache.get_seq_length():  # an empty cache has no rows
            limit = self.limit()
            self.made.crop([number % (limit + 1) for number in numbers[: self.made.batch]])

    def crop_too_deep(self, more: int) -> None:
        before = fingerprint(self.made.cache)
        depth = max(len(row) for row in self.made.columns) + more
        for wrong in (-depth, -torch.full((self.made.batch,), depth)):
            with pytest.raises((RuntimeError, ValueError)):
                self.made.cache.crop(wrong)
        assert_unchanged(before, self.made.cache)

    def reorder(self, numbers: list[int]) -> None:
        indices = [number % self.made.batch for number in numbers[: self.made.batch]]
        self.made.cache.reorder_cache(torch.tensor(indices))
        self.made.select(indices)

    def repeat(self, times: int) -> None:
        if self.made.batch * times > MAX_BATCH:
            return
        self.made.cache.batch_repeat_interleave(times)
        self.made.select([row for row in range(self.made.batch) for _ in range(times)])

    def select(self, numbers: list[int]) -> None:
        indices = [number % self.made.batch for number in numbers]
        self.made.cache.batch_select_indices(torch.tensor(indices))
        self.made.select(indices)

    def copy(self, way: str) -> None:
        """Goes on with a copy, and spoils the original."""
        original = self.made.cache
        if way == "deepcopy":
            self.made.cache = copy.deepcopy(original)
        elif way == "pickle":
            self.made.cache = pickle.loads(pickle.dumps(original))
        else:
            snapshot = original.snapshot()
            self.made.copy().append(3)
            original.reset()
            original.restore(snapshot)
            snapshot.reset()
            return
        original.reset()

    def detour(self, size: int) -> None:
        """A snapshot, some tokens, and back: twice."""
        snapshot, columns = self.made.cache.snapshot(), [list(row) for row in self.made.columns]
        self.made.compare()
        for _ in range(2):
            self.made.append(size)
            self.made.append(1)
            self.made.compare()
            self.made.cache.restore(snapshot)
            self.made.columns = [list(row) for row in columns]

    def record(self, value: bool) -> None:
        self.made.cache.record_past = value
        assert self.made.cache.record_past is value

    def reset(self) -> None:
        self.made.compare()
        recording = self.made.cache.record_past
        self.made.cache.reset()
        self.made.cache.record_past = recording
        self.made.forget(self.made.batch)

    def check(self) -> None:
        self.made.verify()


@common
@given(drawn=programs)
def test_any_sequence_of_operations(family: str, drawn: dict):
    note(f"family: {family}")
    Program(family, drawn).run()


@pytest.mark.slow
@settings(common, max_examples=20 * EXAMPLES)
@given(drawn=programs)
def test_any_sequence_of_operations_at_length(family: str, drawn: dict):
    Program(family, drawn).run()


@pytest.mark.parametrize("name", ["mamba2_kernel3", "falcon_h1_norm", "bamba_dt_limit", "granitemoehybrid_dense"])
@settings(common, max_examples=max(EXAMPLES // 2, 1))
@given(drawn=programs)
def test_any_sequence_of_operations_of_the_variants(name: str, drawn: dict):
    Program(name, drawn).run()


rounds = st.lists(st.tuples(st.lists(st.integers(1, 3), min_size=1, max_size=4), row_numbers), min_size=3, max_size=10)


@settings(common, max_examples=EXAMPLES)
@given(
    drawn=rounds,
    buffer_len=st.sampled_from([1, 2, 4, 16]),
    max_window=st.sampled_from([1, 4, 24]),
    prefill=st.integers(1, 40),
)
def test_any_sequence_of_draft_rounds(family: str, drawn: list, buffer_len: int, max_window: int, prefill: int):
    """Rounds of several forwards and one crop, as a draft model runs them: every token of a round can always go."""
    made = Session(family, 1, buffer_len=buffer_len, max_window=max_window)
    made.cache.activate_past_recording()
    made.append(prefill)
    assert made.cache.max_croppable == min(prefill, max_window)
    made.crop(0)
    for forwards, number in drawn:
        for tokens in forwards:
            made.append(tokens)
        assert made.cache.max_croppable >= sum(forwards)
        made.crop(number % (sum(forwards) + 1))
        # Beside the buffer: the window behind the last crop, and the tokens of one round, which are 12 at most.
        assert int(made.cache.held[0]) <= buffer_len + max_window + 12
    made.verify()


@settings(common, max_examples=EXAMPLES)
@given(
    cuts=st.lists(st.integers(1, 59), min_size=0, max_size=12, unique=True),
    buffer_len=st.integers(1, 20),
    pads=st.lists(st.integers(0, 20), min_size=3, max_size=3),
)
def test_any_way_to_cut_a_sequence(family: str, cuts: list[int], buffer_len: int, pads: list[int]):
    """Left-padded rows through any chunks: the logits of the real tokens do not depend on where the cuts are."""
    made = Session(family, 3, buffer_len=buffer_len)
    mask = (torch.arange(60) >= torch.tensor(pads)[:, None]).long()
    edges = [0, *sorted(cut for cut in cuts if cut > max(pads)), 60]
    for start, stop in zip(edges, edges[1:]):
        made.append(stop - start, mask=mask[:, start:stop], attention_mask=mask[:, :stop])
    made.compare()
    assert shared_model(family) is made.reference
