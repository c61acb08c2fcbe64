"""The input buffer is a ring: long sessions that go around it many times, with everything that can happen meanwhile.

Recording is on, the buffer is short, and unused slots are full of NaN before every forward (`Session`).
"""

from __future__ import annotations

import copy
import pickle
import random

import pytest
import torch
from tiny_models import Session, assert_unchanged, enabled_model, fingerprint, random_ids, replay_layers, used_slots

from hf_replayssm.cache import ReplayCache
from hf_replayssm.layers import InputBuffer
from hf_replayssm.positions import Positions, Rows, Segment


def ring(name: str, batch: int = 1, buffer_len: int = 4, max_window: int = 3, prefill: int = 5) -> Session:
    made = Session(name, batch, buffer_len=buffer_len, max_window=max_window)
    made.cache.activate_past_recording()
    made.append(prefill)
    made.crop(0)
    return made


def capacity(made: Session) -> int:
    (slots,) = {layer.inputs.capacity for layer in replay_layers(made.cache)}
    return slots


def wrapped(made: Session) -> list[bool]:
    """Of each row, whether what it holds runs over the end of the ring."""
    positions = made.cache.positions
    return (positions.first + positions.held > capacity(made)).tolist()


def turn_until_wrapped(made: Session, apart: bool = False) -> None:
    """Windows and crops until every row's tokens run over the end of the ring, `apart` at slots of their own."""
    for round_ in range(60):
        made.append(3)
        made.crop([(round_ + row) % 3 for row in range(made.batch)] if apart else round_ % 2)
        if all(wrapped(made)) and (not apart or len(set(made.cache.positions.first.tolist())) > 1):
            return
    raise AssertionError("the rows never wrapped")


def test_hundreds_of_tokens(family: str):
    """Windows of every size up to max_window + 1, random crops of all rows: no slot is copied, nothing grows."""
    draw = random.Random(5)
    made = ring(family, 2)
    addresses = [[buffer.data_ptr() for buffer in layer.inputs.tensors()] for layer in replay_layers(made.cache)]
    turns, first = 0, 0
    for round_ in range(150):
        made.append(draw.randint(1, 4))
        made.crop(draw.randint(0, min(2, made.cache.max_croppable)))
        now = int(made.cache.positions.first[0])
        turns, first = turns + (now < first), now
        if round_ % 50 == 49:
            made.verify()
    assert turns >= 10, "the ring was hardly gone around"
    assert made.cache.stats.buffer_growths == 0 and capacity(made) == 4 + 3 + (3 + 1)
    assert addresses == [[b.data_ptr() for b in layer.inputs.tensors()] for layer in replay_layers(made.cache)]
    made.verify()


def test_hundreds_of_tokens_in_rows_of_their_own(family: str):
    """Random crops by row, masked tokens in between: the rows begin at different slots, and wrap at different times."""
    draw = random.Random(6)
    made = ring(family, 3)
    apart, some_wrap = 0, 0
    for round_ in range(100):
        tokens = draw.randint(1, 4)
        mask = (
            torch.tensor([[draw.random() < 0.8 for _ in range(tokens)] for _ in range(3)]) if round_ % 4 == 3 else None
        )
        made.append(tokens, mask=mask)
        deepest = min(2, made.cache.max_croppable)
        made.crop([draw.randint(0, deepest) for _ in range(3)])
        apart += len(set(made.cache.positions.first.tolist())) > 1
        some_wrap += 0 < sum(wrapped(made)) < 3
        if round_ % 25 == 24:
            made.verify()
    assert apart > 20 and some_wrap > 10
    assert made.cache.stats.buffer_growths == 0
    made.verify()


@pytest.mark.parametrize("buffer_len, max_window", [(1, 1), (1, 4), (2, 1), (5, 2), (16, 3)])
def test_other_sizes(buffer_len: int, max_window: int):
    draw = random.Random(7)
    made = ring("mamba2", 2, buffer_len, max_window)
    for round_ in range(120):
        made.append(draw.randint(1, max_window + 1))
        deepest = min(max_window, made.cache.max_croppable)
        made.crop([draw.randint(0, deepest), draw.randint(0, deepest)] if round_ > 60 else draw.randint(0, deepest))
    assert made.cache.stats.buffer_growths == 0
    assert capacity(made) == buffer_len + 2 * max_window + 1
    made.verify()


@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
def test_growth_while_wrapped(family: str, apart: bool):
    """A grown buffer is laid out afresh: what the rows hold begins at slot 0, at the same forward in all layers."""
    for tokens in (5, 30):
        made = ring(family, 2)
        turn_until_wrapped(made, apart)
        before, held = capacity(made), made.cache.held
        made.append(tokens + before - int(held.max()))  # more than there is room for
        assert made.cache.stats.buffer_growths == 1 and capacity(made) > before
        made.verify()
        made.crop([tokens - 1, tokens - 3])
        made.verify()
        turn_until_wrapped(made, apart)
        assert made.cache.stats.buffer_growths == 1
        made.verify()


def test_a_larger_window_while_wrapped(family: str):
    """As generate() announces it: room for it is made at the next forward, and that is no growth."""
    made = ring(family, 2)
    turn_until_wrapped(made, apart=True)
    made.cache.max_window = 9
    made.append(2)
    assert capacity(made) == 4 + 9 + 10 and made.cache.stats.buffer_growths == 0
    made.verify()


@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
def test_row_operations_while_wrapped(family: str, apart: bool):
    made = ring(family, 3)
    turn_until_wrapped(made, apart)
    first = made.cache.positions.first
    made.cache.reorder_cache(torch.tensor([2, 0, 0]))
    made.select([2, 0, 0])
    assert torch.equal(made.cache.positions.first, first[[2, 0, 0]])
    made.verify()
    made.append(2)
    made.cache.batch_repeat_interleave(2)
    made.select([0, 0, 1, 1, 2, 2])
    made.append(1)
    made.verify()
    made.crop([1, 0, 2, 1, 0, 1])
    made.cache.batch_select_indices(torch.tensor([5, 0, 3]))
    made.select([5, 0, 3])
    turn_until_wrapped(made)
    made.verify()


@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
def test_copies_while_wrapped(family: str, apart: bool):
    made = ring(family, 2)
    turn_until_wrapped(made, apart)
    made.compare()
    before = fingerprint(made.cache)
    for clone in (copy.deepcopy, copy.copy, lambda cache: pickle.loads(pickle.dumps(cache))):
        other = made.copy()
        other.cache = clone(made.cache)
        for tokens in (2, 4, 1):
            other.append(tokens)
        other.verify()
    assert_unchanged(before, made.cache)
    snapshot, columns = made.cache.snapshot(), [list(row) for row in made.columns]
    for _ in range(2):
        for tokens in (3, 20, 1):  # and a growth
            made.append(tokens)
        made.crop([4, 2])
        made.compare()
        made.cache.restore(snapshot)
        made.columns = [list(row) for row in columns]
        made.verify()
    turn_until_wrapped(made, apart)
    made.verify()


@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
def test_recording_ends_while_wrapped(family: str, apart: bool):
    """Without recording, rows begin at slot 0 as soon as everything has been folded, and stay there."""
    for tokens in (1, 3, 40):
        made = ring(family, 2)
        turn_until_wrapped(made, apart)
        made.cache.record_past = False
        for _ in range(6):
            made.append(tokens)
        made.verify()
        assert made.cache.positions.first.tolist() == [0, 0]
        made.append(1)
        made.cache.activate_past_recording()
        turn_until_wrapped(made, apart)
        made.verify()


def test_a_row_that_holds_nothing_begins_at_slot_0(family: str):
    made = ring(family, 2)
    turn_until_wrapped(made)
    deepest = made.cache.max_croppable
    made.append(2)
    made.crop([deepest + 2, 0])
    made.verify()
    first, held = made.cache.positions.first, made.cache.held
    assert bool(((held > 0) | (first == 0)).all())
    made.append(400)  # a prefill folds everything but the window behind it
    assert made.cache.positions.first.tolist() == [0, 0] and made.cache.held.tolist() == [3, 3]
    made.verify()


def test_without_recording_the_buffer_has_buffer_len_slots(family: str):
    """And every row begins at slot 0, so that the ops take slices of it."""
    made = Session(family, 2, buffer_len=4)
    for tokens in (9, *[1] * 9, 2, 3, 1, 1):
        made.append(tokens)
        assert capacity(made) == 4 and made.cache.positions.first.tolist() == [0, 0]
    made.verify()


# ------------------------------------------------------------------------------------------------ the pieces themselves
def segment(first: list[int], start: list[int], counts: list[int], tokens: int, **fields) -> Segment:
    rows = [Rows(torch.tensor(values)) for values in (counts, first, start, [7] * len(first))]
    order = None if all(count == tokens for count in counts) else torch.arange(tokens).expand(len(first), -1)
    return Segment(slice(0, tokens), False, *rows, order=order, **fields)


@pytest.mark.parametrize(
    "first, start, counts",
    [
        ([0, 0], [0, 0], [3, 3]),
        ([2, 2], [1, 1], [3, 3]),
        ([5, 5], [1, 1], [3, 3]),  # wraps in the new tokens
        ([6, 6], [3, 3], [3, 3]),  # the new tokens lie behind the end
        ([5, 1], [2, 2], [3, 3]),
        ([5, 5], [4, 1], [3, 3]),
        ([6, 3], [0, 5], [3, 2]),
        ([6, 3], [4, 0], [0, 1]),
    ],
)
def test_write_and_in_order(first: list[int], start: list[int], counts: list[int]):
    """Against a loop over slots; no slot of another token is touched."""
    slots, tokens = 7, 3
    made = segment(first, start, counts, tokens)
    draw = torch.Generator().manual_seed(1)
    shapes = ((2, 4, slots, 5), (2, 2, slots, 3), (2, 4, slots))
    buffer = InputBuffer({name: torch.randn(shape, generator=draw) for name, shape in zip("abc", shapes)})
    expected = [tensor.clone() for tensor in buffer.tensors()]
    new = tuple(torch.randn(2, tokens, *shape[1:2], *shape[3:], generator=draw) for shape in shapes)
    for tensor, values in zip(expected, new):
        for row in range(2):
            for token in range(counts[row]):
                tensor[row, :, (first[row] + start[row] + token) % slots] = values[row, token]
    buffer.write(dict(zip("abc", new)), made)
    for tensor, wanted in zip(buffer.tensors(), expected):
        assert torch.equal(tensor, wanted)

    for read, wanted in zip(buffer.in_order(made.first, made.end.max), expected):
        for row in range(2):
            for place in range(start[row] + counts[row]):
                assert torch.equal(read[row, :, place], wanted[row, :, (first[row] + place) % slots])
    larger = buffer.grown(11, made.first)
    for tensor, wanted in zip(larger.tensors(), expected):
        assert tensor.shape[2] == 11 and tensor.is_contiguous()
        for row in range(2):
            for place in range(slots):
                assert torch.equal(tensor[row, :, place], wanted[row, :, (first[row] + place) % slots])


def test_a_slot_s_bytes_are_those_of_one_row_even_where_there_is_none():
    buffer = InputBuffer({"a": torch.zeros(3, 4, 7, 5), "b": torch.zeros(3, 2, 7, dtype=torch.bfloat16)})
    assert buffer.slot_bytes == 4 * 5 * 4 + 2 * 2
    assert buffer.map(lambda tensor: tensor[:0]).slot_bytes == buffer.slot_bytes


def test_in_order_copies_nothing_where_it_need_not():
    shapes = ((2, 4, 7, 5), (2, 2, 7, 3), (2, 4, 7))
    buffer = InputBuffer({name: torch.zeros(shape) for name, shape in zip("abc", shapes)})
    same = lambda slot: Rows(torch.tensor([slot, slot]))  # noqa: E731
    shares = lambda read: read[0].untyped_storage().data_ptr() == buffer["a"].untyped_storage().data_ptr()  # noqa: E731
    assert buffer.in_order(same(0), 7) == buffer.tensors()
    assert shares(buffer.in_order(same(3), 4)) and shares(buffer.in_order(same(7 + 3), 4))
    assert not shares(buffer.in_order(same(3), 5))
    assert all(read.shape[2] == 1 for read in buffer.in_order(Rows(torch.tensor([3, 6])), 0))


def test_the_positions_that_kernels_take():
    """SEEN, FIRST, HELD, COUNT, FOLD as before the segment, built once."""
    for fields, fold in (
        ({}, [0, 0]),
        ({"fold_first": Rows(torch.tensor([2, 0]))}, [2, 0]),
        ({"fold_last": Rows(torch.tensor([6, 4]))}, [6, 4]),
    ):
        made = segment([5, 1], [4, 2], [2, 2], 2, **fields)
        positions = made.kernel_positions(torch.device("cpu"))
        assert positions.dtype == torch.int32 and positions.is_contiguous()
        assert positions.tolist() == [[7, 7], [5, 1], [4, 2], [2, 2], fold]
        assert made.kernel_positions(torch.device("cpu")) is positions
    made = segment([5, 1], [4, 2], [2, 2], 2, fold_first=Rows(torch.tensor([3, 1])))
    assert [rows.values.tolist() for rows in made.behind_fold] == [[8, 2], [1, 1], [3, 3]]


@torch.no_grad()
def test_every_new_token_has_a_slot_before_anything_is_folded(monkeypatch):
    """held + count <= slots at every forward, and the positions that follow are what the kernels' caller expects."""
    model, draw = enabled_model("mamba2"), random.Random(8)
    cache = ReplayCache(config=model.config, buffer_len=4, max_window=3)
    cache.activate_past_recording()
    closed: list[tuple[Positions, list[Segment]]] = []
    end = ReplayCache.end_forward

    def watched(self):
        closed.append((self.positions, self.forward_in_progress.segments))
        end(self)

    monkeypatch.setattr(ReplayCache, "end_forward", watched)
    folds = 0
    for _ in range(120):
        tokens = draw.choice([1, 1, 2, 3, 4, 4, 9])
        model(input_ids=random_ids(2, tokens, seed=tokens), cache=cache)
        before, segments = closed.pop()
        slots = replay_layers(cache)[0].inputs.capacity
        seen, first, held, count, fold = segments[-1].kernel_positions(torch.device("cpu")).long()
        assert bool((held + count <= slots).all()) and bool((fold <= held + count).all())
        assert bool(((0 <= first) & (first < slots)).all())
        if len(segments) == 1 and before.held is not None:
            assert torch.equal(held, before.held)
        assert torch.equal(cache.held, held + count - fold)
        assert torch.equal(cache.positions.first, torch.where(cache.held > 0, (first + fold) % slots, 0))
        assert torch.equal(cache.lengths, seen + count)
        assert torch.equal(used_slots(cache, replay_layers(cache)[0]).sum(1), cache.held)
        folds += int(fold.max() > 0)
        deepest = min(3, cache.max_croppable)
        cache.crop(-torch.tensor([draw.randint(0, deepest), draw.randint(0, deepest)]))
    assert folds > 20
