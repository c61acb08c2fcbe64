"""The tests notice a cache that is broken (trap 20: with models in which the state hardly matters they would not).

One program goes through what a cache does; it passes as the package is, and must fail for each family with each of the
faults below, which are the ones that real implementations had. A fault that nothing notices fails here.
"""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch
from tiny_models import (
    Session,
    assert_same_logits,
    copy_of,
    enabled_model,
    has_attention,
    mixers,
    random_ids,
    relative_error,
    replay_layers,
    shared_model,
    whole_forward,
)

import hf_replayssm
from hf_replayssm.cache import ReplayCache
from hf_replayssm.layers import InputBuffer, ReplayLayer
from hf_replayssm.positions import Positions, Rows, Segment
from hf_replayssm.recurrences import RECURRENCES


def rollbacks(name: str, model=None) -> None:
    """A window, a rollback, and more: by count and by row."""
    made = Session(name, 2, model=model, buffer_len=4, max_window=6)
    made.cache.activate_past_recording()
    for tokens in (9, 1, 4):
        made.append(tokens)
    made.crop(3)
    made.append(1)
    made.append(6)
    made.crop([2, 5])
    made.append(3)
    made.compare()
    made.check_states()


def flushes(name: str, model=None) -> None:
    made = Session(name, 2, model=model, buffer_len=4)
    for tokens in (6, 1, 1, 1, 1, 1, 1, 3, 2):
        made.append(tokens)
    made.compare()
    made.check_states()


def flushes_while_recording(name: str, model=None) -> None:
    made = Session(name, 2, model=model, buffer_len=2, max_window=3)
    made.cache.activate_past_recording()
    made.append(8)
    for _ in range(8):
        made.append(1)
        made.cache.crop(0)
    made.compare()


def around_the_ring(name: str, model=None) -> None:
    """More tokens than the buffer has slots, rows apart, windows that run over its end; then a larger buffer."""
    made = Session(name, 2, model=model, buffer_len=4, max_window=3)
    made.cache.activate_past_recording()
    made.append(3)
    for round_ in range(9):
        made.append(3)
        made.crop([round_ % 2, (round_ // 2) % 3] if round_ > 4 else round_ % 2)
    made.append(20)
    made.compare()


def rows(name: str, model=None) -> None:
    made = Session(name, 2, model=model, buffer_len=8)
    made.append(9)
    mask = torch.tensor([[1, 1], [0, 1]])
    made.append(2, mask=mask)
    made.cache.reorder_cache(torch.tensor([1, 0]))
    made.select([1, 0])
    made.append(1)
    made.compare()


def equal_rows(name: str, model=None) -> None:
    """Rows of one length: what a row operation forgets is another row's, not an unused slot."""
    made = Session(name, 2, model=model, buffer_len=8)
    for tokens in (9, 1, 2):
        made.append(tokens)
    made.cache.reorder_cache(torch.tensor([1, 0]))
    made.select([1, 0])
    made.append(1)
    made.compare()


def copies(name: str, model=None) -> None:
    made = Session(name, 2, model=model, buffer_len=8)
    for tokens in (9, 1, 1):
        made.append(tokens)
    made.cache = copy.deepcopy(made.cache)
    made.append(1)
    made.compare()


def padding(name: str, model=None) -> None:
    made = Session(name, 2, model=model, buffer_len=4)
    made.append(6, mask=torch.tensor([[1] * 6, [0, 0, 0, 1, 1, 1]]))
    made.append(3, mask=torch.tensor([[1, 0, 1], [1, 1, 1]]))
    made.append(1, mask=torch.tensor([[0], [1]]))
    made.append(1)
    made.compare()


PROGRAMS = (rollbacks, flushes, flushes_while_recording, around_the_ring, rows, equal_rows, copies, padding)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_the_programs_pass(family: str, program):
    program(family)


# ------------------------------------------------------------------------------------------------ faults
def crop_keeps_the_recurrent_position(patch) -> None:
    crop = ReplayCache.crop

    def broken(self, tokens_to_remove):
        held = self.positions.held
        crop(self, tokens_to_remove)
        self.positions = dataclasses.replace(self.positions, held=held)

    patch.setattr(ReplayCache, "crop", broken)


def crop_keeps_the_convolutions_history(patch) -> None:
    crop = ReplayCache.crop

    def broken(self, tokens_to_remove):
        crop(self, tokens_to_remove)
        count = int(-torch.as_tensor(tokens_to_remove).min())
        for layer in replay_layers(self):  # the newest inputs lie where those before the removed ones did
            layer.conv_inputs = layer.conv_inputs.roll(-count, 1)

    patch.setattr(ReplayCache, "crop", broken)


def crop_keeps_the_keys(patch) -> None:
    crop = ReplayCache.crop

    def broken(self, tokens_to_remove):
        before = [getattr(layer, "keys", None) for layer in self.layers]
        crop(self, tokens_to_remove)
        for layer, keys in zip(self.layers, before):
            if keys is not None:
                layer.keys = keys[..., keys.shape[-2] - layer.keys.shape[-2] :, :].clone()

    patch.setattr(ReplayCache, "crop", broken)


def crop_by_rows_takes_the_deepest(patch) -> None:
    remove = ReplayCache._remove
    patch.setattr(ReplayCache, "_remove", lambda self, counts: remove(self, torch.full_like(counts, int(counts.max()))))


def the_fold_never_happens(patch) -> None:
    patch.setattr(ReplayLayer, "_write_checkpoint", lambda self, state, segment, count: None)


def broken_folds(patch, broken) -> None:
    """`broken(fold, inputs, checkpoint, count)` in place of every recurrence's `fold(inputs, checkpoint, count)`."""
    for recurrence in RECURRENCES.values():
        original = recurrence.fold

        def fold(self, inputs, constants, checkpoint, count, original=original):
            right = lambda inputs, checkpoint, count: original(self, inputs, constants, checkpoint, count)  # noqa: E731
            return broken(right, inputs, checkpoint, count)

        patch.setattr(recurrence, "fold", fold)


def the_fold_happens_twice(patch) -> None:
    def broken(fold, inputs, checkpoint, count):
        return fold(inputs, fold(inputs, checkpoint, count), count)

    broken_folds(patch, broken)


def the_fold_misses_the_newest_token(patch) -> None:
    def broken(fold, inputs, checkpoint, count):
        fewer = (count - 1).clamp(min=0) if isinstance(count, torch.Tensor) else max(count - 1, 0)
        return fold(inputs, checkpoint, fewer)

    broken_folds(patch, broken)


def the_fold_forgets_the_decay(patch) -> None:
    def broken(fold, inputs, checkpoint, count):
        return fold(inputs, torch.zeros_like(checkpoint), count) + checkpoint.float()

    broken_folds(patch, broken)


def folded_inputs_stay_in_the_buffer(patch) -> None:
    patch.setattr(Segment, "behind_fold", property(lambda self: (self.first, self.start, self.end)))


def a_fold_does_not_move_the_first_slot(patch) -> None:
    end = ReplayCache.end_forward

    def broken(self):
        end(self)
        self.positions = dataclasses.replace(self.positions, first=torch.zeros_like(self.positions.first))

    patch.setattr(ReplayCache, "end_forward", broken)


def a_read_does_not_wrap(patch) -> None:
    """It takes the last slot again and again instead of going on from slot 0."""

    def broken(self, count, capacity, device):
        begin = self.values[:, None] if self.same is None else self.same % capacity
        return (begin + torch.arange(count)).clamp(max=capacity - 1).to(device)

    patch.setattr(Rows, "slots_from", broken)


def a_write_does_not_wrap(patch) -> None:
    index = Segment.write_index

    def broken(self, capacity, device):
        row, token, slot = index(self, 10 * capacity, device)
        return row, token, slot.clamp(max=capacity - 1)

    patch.setattr(Segment, "write_index", broken)


def growth_keeps_the_old_slots(patch) -> None:
    grown = InputBuffer.grown

    def broken(self, capacity, first):
        return grown(self, capacity, Rows(torch.zeros_like(first.values)))

    patch.setattr(InputBuffer, "grown", broken)


def rows_begin_where_the_first_row_does(patch) -> None:
    in_order = InputBuffer.in_order

    def broken(self, first, count):
        return in_order(self, Rows(first.values[:1].expand_as(first.values)), count)

    patch.setattr(InputBuffer, "in_order", broken)


def a_step_ignores_the_buffer(patch) -> None:
    write = InputBuffer.write

    def broken(self, new, segment):
        for tensor in self.tensors():
            tensor[:, :, : int(segment.start.values.max())] = 0.0
        write(self, new, segment)

    patch.setattr(InputBuffer, "write", broken)


def a_token_is_written_to_another_slot(patch) -> None:
    write = InputBuffer.write

    def broken(self, new, segment):
        roll = lambda part: part.roll(1, 1) if part.shape[1] > 1 else torch.zeros_like(part)  # noqa: E731
        write(self, {name: roll(part) for name, part in new.items()}, segment)

    patch.setattr(InputBuffer, "write", broken)


def a_read_goes_one_slot_too_far(patch) -> None:
    """The slot is full of NaN, and is weighted with zero instead of being masked by `where`."""

    def broken(fold, inputs, checkpoint, count):
        slot, first = int(count.max()) if isinstance(count, torch.Tensor) else count, inputs[0]
        stray = 0.0 * first[:, :, slot].sum() if slot < first.shape[2] else 0.0
        return fold(inputs, checkpoint, count) + stray

    broken_folds(patch, broken)


def reorder_forgets_the_buffer(patch) -> None:
    select = ReplayLayer.select_rows

    def broken(self, index):
        inputs = self.inputs
        select(self, index)
        self.inputs = inputs

    patch.setattr(ReplayLayer, "select_rows", broken)


def reorder_forgets_the_checkpoint(patch) -> None:
    select = ReplayLayer.select_rows

    def broken(self, index):
        checkpoint = self.checkpoint
        select(self, index)
        self.checkpoint = checkpoint

    patch.setattr(ReplayLayer, "select_rows", broken)


def reorder_forgets_the_convolution(patch) -> None:
    select = ReplayLayer.select_rows

    def broken(self, index):
        conv_inputs = self.conv_inputs
        select(self, index)
        self.conv_inputs = conv_inputs

    patch.setattr(ReplayLayer, "select_rows", broken)


def reorder_forgets_the_positions(patch) -> None:
    patch.setattr(Positions, "select", lambda self, index: self)


def copies_forget_the_buffer(patch) -> None:
    def broken(self, memo):
        return self.map(torch.zeros_like)

    patch.setattr(InputBuffer, "__deepcopy__", broken, raising=False)


def padding_is_a_token(patch) -> None:
    begin = ReplayCache.begin_forward
    patch.setattr(
        ReplayCache,
        "begin_forward",
        lambda self, num_tokens, batch_size, mask=None: begin(self, num_tokens, batch_size),
    )


FAULTS = {
    crop_keeps_the_recurrent_position: rollbacks,
    crop_keeps_the_convolutions_history: rollbacks,
    crop_keeps_the_keys: rollbacks,
    crop_by_rows_takes_the_deepest: rollbacks,
    the_fold_never_happens: flushes,
    the_fold_happens_twice: flushes,
    the_fold_misses_the_newest_token: flushes,
    the_fold_forgets_the_decay: flushes,
    folded_inputs_stay_in_the_buffer: flushes_while_recording,
    a_fold_does_not_move_the_first_slot: around_the_ring,
    a_read_does_not_wrap: around_the_ring,
    a_write_does_not_wrap: around_the_ring,
    growth_keeps_the_old_slots: around_the_ring,
    rows_begin_where_the_first_row_does: around_the_ring,
    a_step_ignores_the_buffer: flushes,
    a_token_is_written_to_another_slot: flushes,
    a_read_goes_one_slot_too_far: flushes,
    reorder_forgets_the_buffer: equal_rows,
    reorder_forgets_the_checkpoint: equal_rows,
    reorder_forgets_the_convolution: equal_rows,
    reorder_forgets_the_positions: rows,
    copies_forget_the_buffer: copies,
    padding_is_a_token: padding,
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_noticed(family: str, fault, monkeypatch):
    if fault is crop_keeps_the_keys and not has_attention(shared_model(family).config):
        pytest.skip("this family has no attention")
    enabled_model(family)
    with monkeypatch.context() as patch:
        fault(patch)
        with pytest.raises(AssertionError):
            FAULTS[fault](family)
    FAULTS[fault](family)  # and the fault is gone


@pytest.mark.parametrize("name", ["zamba2", "nemotron_h", "mamba2_dt_limit", "bamba_dt_limit"])
def test_a_missing_limit_of_dt_is_noticed(name: str):
    made = Session(name, 1, buffer_len=4, time_step_limit=(0.0, math.inf))
    for tokens in (6, 1, 1):
        made.append(tokens)
    with pytest.raises(AssertionError, match="relative error"):
        made.compare()


def test_missing_scales_are_noticed():
    """Falcon-H1's muP factors, left out of the patched path only."""
    for attribute, neutral in (
        ("mup_vector", lambda value: torch.ones_like(value)),
        ("ssm_in_multiplier", lambda _: 1.0),
    ):
        model = hf_replayssm.enable(copy_of("falcon_h1"))
        for mixer in mixers(model):
            setattr(mixer, attribute, neutral(getattr(mixer, attribute)))
        with pytest.raises(AssertionError, match="relative error"):
            flushes("falcon_h1", model)


@pytest.mark.parametrize("name", ["mamba2", "falcon_h1"])
def test_interleaved_groups_are_noticed(name: str):
    """Heads dealt to the groups in turn instead of in blocks: only seen with several heads per group."""
    model = hf_replayssm.enable(copy_of(name))
    for mixer in mixers(model):
        inner = mixer.D.shape[0] * mixer.head_dim
        size = mixer.ssm_state_size
        conv_dim = mixer.conv1d.weight.shape[0]
        order = torch.arange(conv_dim)
        order[inner : inner + 2 * size] = torch.cat([torch.arange(size) + inner + size, torch.arange(size) + inner])
        mixer.conv1d.weight.data = mixer.conv1d.weight.data[order]  # the two groups' B change places
        mixer.conv1d.bias.data = mixer.conv1d.bias.data[order]
    with pytest.raises(AssertionError, match="relative error"):
        flushes(name, model)


def test_the_comparison_itself():
    """It measures each position by its own largest logit, and finite is a condition."""
    expected = torch.tensor([[1.0, -2.0], [100.0, 50.0]])
    assert relative_error(expected, expected) == 0.0
    wrong = expected.clone()
    wrong[0, 0] += 1e-3
    assert 4e-4 < relative_error(wrong, expected) < 6e-4
    for value in (math.nan, math.inf):
        wrong[1, 1] = value
        assert relative_error(wrong, expected) == math.inf
    with pytest.raises(AssertionError):
        assert_same_logits(wrong, expected)
    with pytest.raises(AssertionError):
        assert_same_logits(expected[:1], expected)
    ids = random_ids(1, 8)
    shifted = whole_forward(shared_model("mamba2"), ids.roll(1, 1))
    assert relative_error(shifted, whole_forward(shared_model("mamba2"), ids)) > 0.1
