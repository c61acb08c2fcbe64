"""The invariants of the replay cache (DESIGN.md, section 4), for each family and buffers of 1, 4 and 16 tokens.

What a cache must answer is always taken from the untouched model's forward over the whole sequence, without a cache and
without padding. `Session` (tiny_models.py) keeps the tokens that each row has seen beside the cache, compares logits,
lengths and states with that forward, and fills unused buffer slots with NaN before each step.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tiny_models import (
    BUFFER_LENS,
    MAMBA2_NAMES,
    PURE_NAMES,
    RTOL,
    VARIANT_NAMES,
    Session,
    assert_same_logits,
    assert_unchanged,
    copy_of,
    dt_bias_of,
    enabled_model,
    fingerprint,
    has_attention,
    mamba_layer_indices,
    mixers,
    poison,
    random_ids,
    relative_error,
    replay_layers,
    shared_model,
    used_slots,
    whole_forward,
)

import hf_replayssm


lengths = pytest.mark.parametrize("buffer_len", BUFFER_LENS)
both = pytest.mark.parametrize("recording", [False, True], ids=["plain", "recording"])
variants = pytest.mark.parametrize("name", VARIANT_NAMES)


def session(name: str, batch: int = 1, recording: bool = False, **config) -> Session:
    made = Session(name, batch, **config)
    if recording:
        made.cache.activate_past_recording()
    return made


def run_program(made: Session, steps: list[int]) -> None:
    for tokens in steps:
        made.append(tokens)
    made.verify()


# ----------------------------------------------------------------------------------------------------- 1. same answers
@lengths
@both
def test_01_same_answers_for_any_prefill(family: str, buffer_len: int, recording: bool):
    """Prefill of any length, those under the convolution's kernel included, then steps and windows."""
    for prefill in (1, 2, 3, 4, 5, 8, 15, 17, 33):
        made = session(family, 2, recording, buffer_len=buffer_len)
        run_program(made, [prefill, 1, 1, 3, 1, 2, 1, 1, 1])


@lengths
@both
def test_01_same_answers_at_every_phase(family: str, buffer_len: int, recording: bool):
    """A step, a window shorter than the kernel and one longer than it, begun at every phase of the buffer."""
    made = session(family, 1, recording, buffer_len=buffer_len)
    made.append(5)
    for _ in range(buffer_len + 2):
        for window in (1, 2, 6):
            other = made.copy()
            run_program(other, [window, 1])
        made.append(1)
    made.verify()


@lengths
@both
def test_01_same_answers_over_many_flushes(family: str, buffer_len: int, recording: bool):
    made = session(family, 2, recording, buffer_len=buffer_len)
    run_program(made, [7] + [1] * (2 * buffer_len + 3) + [buffer_len, 1, buffer_len + 1, 1, 1])
    made.check_states()


@variants
@pytest.mark.parametrize("buffer_len", [1, 4])
def test_01_same_answers_of_the_variants(name: str, buffer_len: int):
    """Other kernels, groups, norms, biases and limits."""
    for recording in (False, True):
        for prefill in (1, 2, 9):
            made = session(name, 2, recording, buffer_len=buffer_len)
            run_program(made, [prefill, 1, 1, 3, 1, 1, 5, 1])
    made.crop(7)
    made.verify()


@pytest.mark.parametrize("seed", [1, 2])
def test_01_same_answers_of_other_weights(family: str, seed: int):
    from tiny_models import tiny_model

    model = tiny_model(family, seed=seed)
    ids = random_ids(2, 30, seed=seed)
    expected = whole_forward(model, ids)
    hf_replayssm.enable(model)
    cache = hf_replayssm.ReplayCache(config=model.config, buffer_len=4)
    cuts = [0, 9, 10, 11, 15, 16, 17, 18, 19, 30]
    with torch.no_grad():
        parts = [model(input_ids=ids[:, a:b], cache=cache, use_cache=True).logits for a, b in zip(cuts, cuts[1:])]
    assert_same_logits(torch.cat(parts, 1), expected)


def test_01_positions_may_be_given(family: str):
    """Explicit position_ids and an all-ones mask over everything seen, as generate() hands them in."""
    model = enabled_model(family)
    ids = random_ids(2, 14, seed=5)
    expected = whole_forward(shared_model(family), ids)
    cache = hf_replayssm.ReplayCache(config=model.config, buffer_len=4)
    parts = []
    for start, stop in ((0, 6), (6, 7), (7, 10), (10, 11), (11, 14)):
        kwargs = {"attention_mask": torch.ones(2, stop, dtype=torch.long)}
        if family not in PURE_NAMES:
            kwargs["position_ids"] = torch.arange(start, stop)[None].expand(2, -1)
        with torch.no_grad():
            out = model(input_ids=ids[:, start:stop], cache=cache, use_cache=True, **kwargs)
        assert out.cache is cache
        parts.append(out.logits)
    assert_same_logits(torch.cat(parts, 1), expected)


def test_01_inputs_embeds(family: str):
    made = session(family, 2, buffer_len=4)
    made.append(6)
    ids = made.fresh_ids(3)
    embeds = made.model.get_input_embeddings()(ids) * getattr(made.model.config, "embedding_multiplier", 1.0)
    if family == "granitemoehybrid":  # multiplies embeddings that it is given too
        embeds = embeds / made.model.config.embedding_multiplier
    with torch.no_grad():
        out = made.model(inputs_embeds=embeds, cache=made.cache, use_cache=True)
    expected = whole_forward(made.reference, torch.cat([torch.tensor(made.history), ids], 1))[:, -3:]
    assert_same_logits(out.logits, expected)


def test_01_other_outputs(family: str):
    """Tuples, the newest logits alone, hidden states; and masks of any dtype."""
    model, ids = enabled_model(family), random_ids(2, 9, seed=5)
    expected = whole_forward(shared_model(family), ids)

    def second_forward(**options):
        cache = hf_replayssm.ReplayCache(config=model.config, buffer_len=4)
        with torch.no_grad():
            model(input_ids=ids[:, :6], cache=cache, use_cache=True)
            return model(input_ids=ids[:, 6:], cache=cache, use_cache=True, **options)

    assert_same_logits(second_forward(return_dict=False)[0], expected[:, 6:])
    assert_same_logits(second_forward(logits_to_keep=1).logits, expected[:, 8:])
    hidden = second_forward(output_hidden_states=True).hidden_states
    with torch.no_grad():
        whole = shared_model(family)(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    assert len(hidden) == len(whole)
    for ours, theirs in zip(hidden, whole):
        assert_same_logits(ours, theirs[:, 6:])
    for dtype in (torch.bool, torch.float32, torch.int32):
        made = session(family, 2, buffer_len=4)
        made.append(6, mask=torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6]).to(dtype))
        made.append(2, mask=torch.tensor([[1, 0], [1, 1]]).to(dtype))
        made.verify()


def test_01_inference_mode(family: str):
    """Tensors made under inference_mode go through everything, and on into a forward outside of it."""
    with torch.inference_mode():
        made = session(family, 2, True, buffer_len=4, max_window=6)
        for tokens in (5, 1, 4):
            made.append(tokens)
        made.crop(3)
        made.append(7)
        made.cache = copy.deepcopy(made.cache)
        made.cache.reorder_cache(torch.tensor([1, 0]))
        made.select([1, 0])
        made.append(1)
        made.crop([2, 0])
        made.append(2)
    made.verify()
    made.append(1)
    made.crop(2)
    made.verify()


def test_01_the_other_cache_is_upstreams_own(family: str):
    """With upstream's cache, or none, an enabled model computes bit by bit what the untouched one does."""
    from transformers import DynamicCache

    ids = random_ids(2, 12, seed=6)
    results = []
    for model in (shared_model(family), enabled_model(family)):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            whole = model(input_ids=ids).logits
            first = model(input_ids=ids[:, :9], cache=cache, use_cache=True)
            positions = {} if family in PURE_NAMES else {"position_ids": torch.arange(9, 12)[None]}
            then = model(input_ids=ids[:, 9:], cache=cache, use_cache=True, **positions)
            assert type(then.cache) is DynamicCache
        results.append(torch.cat([whole, first.logits, then.logits], 1))
    assert torch.equal(*results)


# -------------------------------------------------------------------------- 2. what may be folded, what may be cropped
@lengths
def test_02_a_cycle_is_exactly_buffer_len_steps(family: str, buffer_len: int):
    made = session(family, 2, buffer_len=buffer_len)
    made.append(6)
    held = int(made.cache.held[0])
    for _ in range(3 * buffer_len + 1):
        held = 0 if held + 1 >= buffer_len else held + 1
        made.append(1)
        assert made.cache.held.tolist() == [held, held]
    made.verify()


@lengths
def test_02_recording_off_folds_a_window_whole(family: str, buffer_len: int):
    for window in (2, 3, 5, buffer_len, buffer_len + 3):
        made = session(family, 1, buffer_len=buffer_len)
        made.append(6)
        made.append(1)
        held = int(made.cache.held[0])
        made.append(window)
        assert int(made.cache.held[0]) == (0 if held + window >= buffer_len else held + window)
        made.verify()


@lengths
def test_02_recording_off_cannot_crop(family: str, buffer_len: int):
    made = session(family, 2, buffer_len=buffer_len)
    made.append(6)
    made.append(2)
    before = fingerprint(made.cache)
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        made.cache.crop(-1)
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        made.cache.crop(torch.tensor([-1, 0]))
    assert_unchanged(before, made.cache)
    made.verify()


@lengths
def test_02_every_token_since_the_last_crop_can_go(family: str, buffer_len: int):
    """A draft model runs 2, 1, 1, 1 tokens and then crops once: over any number of forwards, and beyond max_window."""
    for max_window in (3, 24):
        made = session(family, 1, True, buffer_len=buffer_len, max_window=max_window)
        made.append(9)
        assert made.cache.max_croppable == min(9, max_window)
        made.crop(0)
        since = 0
        for tokens in (2, 1, 1, 1, 4, 1, 7, 3, 1, 1, 20, 1):
            made.append(tokens)
            since += tokens
            assert made.cache.max_croppable >= max(since, min(max_window, 9 + since))
        made.verify()
        for depth in range(0, since + 1, 6):
            other = made.copy()
            other.crop(depth)
            other.verify()
        made.crop(since)
        made.verify()


@lengths
def test_02_the_newest_window_can_go_whatever_was_cropped(family: str, buffer_len: int):
    """A second crop reaches behind the first: a forward leaves max_window tokens, unless there were not as many."""
    made = session(family, 1, True, buffer_len=buffer_len, max_window=10)
    made.append(30)
    for tokens, count in ((5, 2), (1, 0), (6, 6), (1, 1), (8, 3), (1, 0)):
        made.append(tokens)
        made.crop(count)
        other = made.copy()
        before = other.cache.max_croppable
        other.append(4)
        assert other.cache.max_croppable >= min(10, before + 4)
        other.crop(other.cache.max_croppable)
        other.verify()
    made.verify()


@lengths
def test_02_the_buffer_stays_bounded(family: str, buffer_len: int):
    """Rounds of draft and crop do not make the buffer grow: what is older than the newest max_window gets folded."""
    made = session(family, 1, True, buffer_len=buffer_len, max_window=6)
    made.append(20)
    for round_ in range(12):
        made.append(5)
        made.crop((round_ * 2) % 5)
        assert int(made.cache.held[0]) <= buffer_len + 6 + (5 if round_ == 0 else 0)  # no crop since the prefill yet
    for layer in replay_layers(made.cache):
        # A window of 5 is appended before old tokens are folded, to the most that was held: that of the first round.
        assert layer.inputs.capacity <= max(buffer_len + 2 * 6 + 1, (buffer_len + 6 + 5) + 5 + buffer_len)
    made.verify()


@lengths
def test_02_a_larger_window_grows_the_buffer(family: str, buffer_len: int):
    made = session(family, 1, True, buffer_len=buffer_len, max_window=4)
    made.append(11)
    made.append(3)
    made.crop(2)
    made.append(40)
    assert made.cache.max_croppable >= 40
    made.crop(39)
    made.verify()


@lengths
def test_02_recording_begins_in_mid_stream(family: str, buffer_len: int):
    for steps in range(buffer_len + 1):
        made = session(family, 1, buffer_len=buffer_len)
        made.append(5)
        for _ in range(steps):
            made.append(1)
        made.cache.activate_past_recording()
        made.append(3)
        assert made.cache.max_croppable >= 3
        made.append(2)
        made.crop(5)
        made.verify()


@lengths
def test_02_the_attribute_switches_recording(family: str, buffer_len: int):
    """`record_past` of the cache, and of each layer, as upstream's generate sets it."""
    made = session(family, 1, buffer_len=buffer_len)
    made.cache.record_past = True
    assert made.cache.record_past is True
    made.append(5)
    made.crop(4)
    made.append(8)
    made.crop(3)
    made.verify()
    made.cache.record_past = False
    assert made.cache.record_past is False
    for _ in range(buffer_len + 1):
        made.append(1)
        assert int(made.cache.held[0]) < max(buffer_len, 1)
    with pytest.raises(RuntimeError):
        made.cache.crop(-1)
    made.verify()
    made.cache.activate_past_recording()
    made.append(4)
    for layer in made.cache.layers:  # DeferredStopCheck.finish does this
        if hasattr(layer, "record_past"):
            layer.record_past = False
    assert made.cache.record_past is False
    made.append(buffer_len + 1)
    assert int(made.cache.held[0]) == 0
    made.verify()


@lengths
def test_02_a_very_long_forward_is_a_prefill_again(family: str, buffer_len: int):
    made = session(family, 1, True, buffer_len=buffer_len, max_window=5)
    made.append(4)
    made.crop(1)
    made.append(257 + buffer_len + 5)
    for layer in replay_layers(made.cache):
        assert layer.inputs.capacity < 200
    assert made.cache.max_croppable >= 5
    made.crop(5)
    made.verify()


def test_02_a_very_long_masked_forward_is_a_prefill_again(family: str):
    """Padding on both sides of the place where such a forward is cut, and a row that takes no part in it."""
    made = session(family, 3, True, buffer_len=4, max_window=5)
    made.append(6, mask=left_padding(3, 6, [0, 4, 2]))
    made.append(1)
    mask = torch.ones(3, 280, dtype=torch.long)
    mask[0, 3:9] = 0
    mask[1, 274:278] = 0
    mask[2] = 0
    made.append(280, mask=mask)
    assert made.cache.max_croppable >= 5
    made.check_states()
    made.crop([5, 2, 0])
    made.verify()


# ------------------------------------------------------------------------------------------------ 3. rollback is exact
@lengths
def test_03_rollback_of_every_depth(family: str, buffer_len: int):
    """Of a window after steps: keep all, keep some, reject all; the states are as if the tokens had never been seen."""
    made = session(family, 2, True, buffer_len=buffer_len)
    for tokens in (9, 1, 1, 6):
        made.append(tokens)
    for depth in range(9):
        other = made.copy()
        other.crop(depth)
        assert other.cache.get_seq_length() == len(other.history[0])
        other.verify()
        other.append(6)
        other.crop(5)
        other.verify()


@lengths
def test_03_rollback_to_nothing(family: str, buffer_len: int):
    for program in ([1], [3], [7], [2, 1, 1], [1, 5, 2]):
        made = session(family, 2, True, buffer_len=buffer_len)
        for tokens in program:
            made.append(tokens)
        made.crop(sum(program))
        assert made.cache.get_seq_length() == 0
        assert made.history == [[], []]
        made.verify()
        run_program(made, [4, 1, 2])


@lengths
def test_03_many_rounds(family: str, buffer_len: int):
    """Forty rounds of a draft and a crop, accepted counts all over the place: nothing drifts or goes stale."""
    made = session(family, 1, True, buffer_len=buffer_len, max_window=8)
    made.append(10)
    for round_ in range(40):
        window = 1 + (round_ * 5) % 7
        made.append(window)
        made.crop((round_ * 3) % (window + 1))
        if round_ % 10 == 9:
            made.verify()
    made.verify()


@lengths
def test_03_single_steps_between_crops(family: str, buffer_len: int):
    """Steps with recording on, many of them before each crop: the draft model's rounds."""
    made = session(family, 1, True, buffer_len=buffer_len, max_window=6)
    made.append(6)
    for round_ in range(8):
        for tokens in (2, 1, 1, 1):
            made.append(tokens)
        made.crop(4 - round_ % 5)
    made.verify()


@lengths
def test_03_too_deep_a_crop_changes_nothing(family: str, buffer_len: int):
    made = session(family, 2, True, buffer_len=buffer_len, max_window=3)
    for tokens in (30, 2, 2, 1):
        made.append(tokens)
    made.crop(1)
    for _ in range(4 * (buffer_len + 3)):
        made.append(1)
        made.crop(0)
    possible = made.cache.max_croppable
    assert 3 <= possible <= buffer_len + 3
    before = fingerprint(made.cache)
    for wrong in (-(possible + 1), -1000, torch.tensor([0, -(possible + 1)]), torch.tensor([-(possible + 1), -1])):
        with pytest.raises((ValueError, RuntimeError), match=str(possible)):
            made.cache.crop(wrong)
        assert_unchanged(before, made.cache)
    made.verify()
    made.crop(possible)
    made.verify()


def test_03_a_rejected_window_is_gone_from_every_state(family: str):
    """The cache after reject-all equals, buffer by buffer, the answers of one that never saw the window."""
    seen, never = session(family, 2, True, buffer_len=4), session(family, 2, True, buffer_len=4)
    for made in (seen, never):
        for tokens in (7, 1, 2):
            made.append(tokens)
        made.crop(0)
    seen.append(seen.fresh_ids(5))
    seen.crop(5)
    for layer_idx in mamba_layer_indices(seen.model.config):
        for read in ("get_recurrent_state", "get_conv_state"):
            assert_same_logits(getattr(seen.cache, read)(layer_idx), getattr(never.cache, read)(layer_idx), 1e-5, read)
    for left, right in zip(seen.cache.layers, never.cache.layers):
        if getattr(left, "keys", None) is not None:
            assert torch.equal(left.keys, right.keys) and torch.equal(left.values, right.values)
    ids = random_ids(2, 3, seed=77)
    assert_same_logits(seen.append(ids), never.append(ids), 1e-5)


# -------------------------------------------------------------------------------------------------- 4. the first round
@lengths
def test_04_prompt_and_drafts_in_one_forward(family: str, buffer_len: int):
    for prompt, drafts, rejected in ((9, 5, 5), (9, 5, 2), (30, 5, 4), (2, 3, 1), (1, 1, 1), (40, 24, 24), (3, 20, 23)):
        made = session(family, 1, True, buffer_len=buffer_len, max_window=24)
        made.append(prompt + drafts)
        assert made.cache.max_croppable == min(prompt + drafts, 24)
        made.crop(rejected)
        made.verify()
        made.append(6)
        made.crop(3)
        made.verify()


@lengths
def test_04_prefill_keeps_no_more_than_its_tail(family: str, buffer_len: int):
    made = session(family, 1, True, buffer_len=buffer_len, max_window=5)
    made.append(100)
    for layer in replay_layers(made.cache):
        assert layer.inputs.capacity <= 2 * (buffer_len + 5)
    made.crop(5)
    made.verify()


# ------------------------------------------------------------------------------------------------------------- 5. rows
@lengths
@both
def test_05_row_operations_move_everything(family: str, buffer_len: int, recording: bool):
    made = session(family, 3, recording, buffer_len=buffer_len)
    for tokens in (6, 1, 1, 2):
        made.append(tokens)
    made.cache.reorder_cache(torch.tensor([2, 0, 0]))
    made.select([2, 0, 0])
    made.verify()
    made.append(1)
    made.cache.batch_repeat_interleave(2)
    made.select([0, 0, 1, 1, 2, 2])
    made.verify()
    made.append(2)
    made.cache.batch_select_indices(torch.tensor([5, 0, 3]))
    made.select([5, 0, 3])
    made.verify()
    made.append(1)
    made.cache.batch_select_indices(torch.tensor([1]))
    made.select([1])
    run_program(made, [1, 3])
    if recording:
        made.crop(4)
        made.verify()


def test_05_a_mask_selects_rows(family: str):
    made = session(family, 3, buffer_len=4)
    run_program(made, [5, 1, 1])
    made.cache.batch_select_indices(torch.tensor([True, False, True]))
    made.select([0, 2])
    run_program(made, [1, 2])


@lengths
def test_05_row_operations_at_every_phase(family: str, buffer_len: int):
    made = session(family, 2, buffer_len=buffer_len)
    made.append(5)
    for _ in range(buffer_len + 1):
        other = made.copy()
        other.cache.reorder_cache(torch.tensor([1, 0]))
        other.select([1, 0])
        other.verify()
        made.append(1)


@lengths
def test_05_crop_by_rows(family: str, buffer_len: int):
    made = session(family, 3, True, buffer_len=buffer_len)
    made.append(8)
    made.append(4)
    made.crop([0, 3, 1])
    assert made.cache.get_seq_length() == 12
    made.verify()
    made.append(1)
    made.verify()
    made.append(4)
    made.crop([4, 0, 2])
    assert made.cache.get_seq_length() == max(len(tokens) for tokens in made.history)
    made.verify()
    run_program(made, [1, 1, 5])
    made.crop([1, 1, 1])
    made.verify()


@lengths
def test_05_crop_by_rows_down_to_nothing(family: str, buffer_len: int):
    made = session(family, 3, True, buffer_len=buffer_len)
    made.append(5)
    made.crop([5, 0, 3])
    made.verify()
    run_program(made, [2, 1, 3])
    made.crop([5, 5, 1])
    made.verify()
    run_program(made, [1, 4])


@lengths
def test_05_rows_stay_apart_over_many_rounds(family: str, buffer_len: int):
    made = session(family, 3, True, buffer_len=buffer_len, max_window=6)
    made.append(7)
    for round_ in range(15):
        made.append(4)
        made.crop([(round_ + 2 * row) % 5 for row in range(3)])
        assert made.cache.get_seq_length() == max(len(tokens) for tokens in made.history)
        if round_ % 5 == 4:
            made.verify()
    made.cache.record_past = False
    run_program(made, [1] * (buffer_len + 1))
    made.cache.reorder_cache(torch.tensor([1, 2, 0]))
    made.select([1, 2, 0])
    made.verify()
    made.cache.batch_select_indices(torch.tensor([2, 0]))
    made.select([2, 0])
    run_program(made, [1, 2])


def test_05_a_mask_of_the_new_tokens_after_a_crop_by_rows(family: str):
    made = session(family, 2, True, buffer_len=4)
    made.append(8)
    made.append(3)
    made.crop([3, 1])
    made.append(2, mask=torch.ones(2, 2, dtype=torch.long))
    made.verify()


@lengths
@both
def test_05_a_finished_row_appends_nothing(family: str, buffer_len: int, recording: bool):
    """A row whose mask is zero for all new tokens keeps its state and its place, for steps and windows."""
    made = session(family, 3, recording, buffer_len=buffer_len)
    made.append(6)
    made.append(1)
    frozen = [made.cache.get_recurrent_state(i)[1].clone() for i in mamba_layer_indices(made.model.config)]
    for tokens in (1, 1, 3, 1, 2, 1):
        mask = torch.ones(3, tokens, dtype=torch.long)
        mask[1] = 0
        made.append(tokens, mask=mask)
    for layer_idx, expected in zip(mamba_layer_indices(made.model.config), frozen):
        assert_same_logits(made.cache.get_recurrent_state(layer_idx)[1], expected, 1e-5)
    made.compare()
    made.check_states()
    run_program(made, [1, 2])  # and it may go on


# -------------------------------------------------------------------------------------------------- 6. one rule for dt
@lengths
@pytest.mark.parametrize("name", ["zamba2", "nemotron_h", "mamba2_dt_limit", "bamba_dt_limit"])
def test_06_the_limit_of_dt_holds_in_every_path(name: str, buffer_len: int):
    """Step, window, flush and long continuation use the whole-sequence forward's dt; upstream's step does not."""
    low, high = mixers(shared_model(name))[0].time_step_limit
    for recording in (False, True):
        made = session(name, 2, recording, buffer_len=buffer_len)
        run_program(made, [10] + [1] * (buffer_len + 2) + [3, 40, 1])
        for row in range(2):
            for layer in replay_layers(made.cache):
                dt = layer.inputs["dt"][row][:, used_slots(made.cache, layer)[row]]
                assert dt.dtype == torch.float32
                assert (dt >= low - 1e-6).all() and (dt <= high + 1e-6).all(), "the buffer holds the final dt"


# ------------------------------------------------------------------------------------------------- 7. padding is inert
def left_padding(batch: int, length: int, pads: list[int]) -> torch.Tensor:
    mask = torch.ones(batch, length, dtype=torch.long)
    for row, count in enumerate(pads):
        mask[row, :count] = 0
    return mask


@lengths
@both
def test_07_left_padding(family: str, buffer_len: int, recording: bool):
    """Rows of several lengths, one shorter than the kernel; masks over everything seen, as generate() gives them."""
    made = session(family, 4, recording, buffer_len=buffer_len)
    mask = left_padding(4, 9, [0, 3, 7, 8])
    made.append(9, mask=mask)
    made.compare()
    made.check_states()
    for tokens in (1, 1, 1, 3, 1, 2, 1):
        mask = torch.cat([mask, torch.ones(4, tokens, dtype=torch.long)], 1)
        made.append(tokens, attention_mask=mask)
    made.verify()
    if recording:
        made.crop(5)
        made.verify()
        made.append(2)
        made.crop([0, 1, 2, 2])
        made.verify()


@lengths
def test_07_left_padding_without_further_masks(family: str, buffer_len: int):
    """The cache remembers which columns were padding: a later forward may leave the mask out, or give the new part."""
    for with_mask in (False, True):
        made = session(family, 3, buffer_len=buffer_len)
        made.append(7, mask=left_padding(3, 7, [0, 2, 6]))
        for tokens in (1, 2, 1, 4):
            made.append(tokens, mask=torch.ones(3, tokens, dtype=torch.long) if with_mask else None)
        made.verify()


@lengths
@both
def test_07_masked_tokens_inside_a_later_chunk(family: str, buffer_len: int, recording: bool):
    """On the left, in the middle and on the right of a continued chunk, a whole row, and a single masked token."""
    made = session(family, 4, recording, buffer_len=buffer_len)
    made.append(6)
    patterns = [
        [[0, 0, 1, 1], [1, 0, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]],
        [[1], [0], [1], [0]],
        [[0, 1, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]],
        [[0], [0], [0], [0]],
        [[1, 1], [1, 0], [0, 1], [1, 1]],
    ]
    for pattern in patterns:
        mask = torch.tensor(pattern)
        made.append(mask.shape[1], mask=mask)
        made.compare()
        made.check_states()
        if recording and mask.shape[1] > 2:  # a crop counts columns, masked ones included
            other = made.copy()
            other.crop(2)
            other.verify()
            made.crop([1, 0, 2, 1])
            made.check_states()
    run_program(made, [1, 3])


def test_07_masked_tokens_with_the_mask_of_everything(family: str):
    made = session(family, 3, buffer_len=4)
    seen = left_padding(3, 6, [2, 0, 5])
    made.append(6, mask=seen)
    for pattern in ([[1, 1], [0, 1], [1, 1]], [[1], [0], [1]], [[0, 1, 1], [1, 1, 0], [1, 0, 1]]):
        new = torch.tensor(pattern)
        seen = torch.cat([seen, new], 1)
        made.append(new.shape[1], mask=new, attention_mask=seen)
    made.verify()


@lengths
def test_07_the_content_of_masked_tokens_is_irrelevant(family: str, buffer_len: int):
    """Other tokens under the mask, the same logits of the real ones and the same states: bit by bit without experts."""
    results = []
    for filler in (0, 50):
        cache = hf_replayssm.ReplayCache(config=shared_model(family).config, buffer_len=buffer_len)
        kept = []
        for step, (tokens, pattern) in enumerate(
            ((5, [0, 0, 1, 1, 1]), (3, [1, 0, 1]), (1, [0]), (1, [1]), (4, [0, 1, 1, 0]))
        ):
            mask = torch.tensor([pattern, [1] * tokens])
            ids = random_ids(2, tokens, seed=step).masked_fill(mask == 0, filler)
            with torch.no_grad():
                out = enabled_model(family)(input_ids=ids, cache=cache, use_cache=True, attention_mask=mask)
            kept.append(out.logits[mask.bool()])
        states = [
            cache.get_recurrent_state(index).flatten() for index in mamba_layer_indices(shared_model(family).config)
        ]
        results.append((torch.cat(kept), torch.cat(states)))
    experts = "nemotron_h", "granitemoehybrid", "jamba"
    if family in experts:  # they multiply the tokens that chose them in one product
        assert_same_logits(results[0][0], results[1][0], 1e-5)
        assert_same_logits(results[0][1], results[1][1], 1e-5)
    else:
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize(
    "name", ["falcon_h1_bias_kernel3", "nemotron_h_bias", "zamba2_no_bias_kernel3", "mamba2_kernel3"]
)
def test_07_padding_of_the_variants(name: str):
    made = session(name, 3, True, buffer_len=4)
    made.append(7, mask=left_padding(3, 7, [0, 5, 6]))
    made.append(3, mask=torch.tensor([[1, 0, 1], [1, 1, 1], [0, 0, 1]]))
    made.append(1)
    made.verify()


# ----------------------------------------------------------------------------------------------------------- 8. copies
COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
}


@lengths
@both
@pytest.mark.parametrize("way", sorted(COPIES))
def test_08_copies_carry_pending_inputs(family: str, buffer_len: int, recording: bool, way: str):
    made = session(family, 2, recording, buffer_len=buffer_len)
    made.append(5)
    for _ in range(min(buffer_len, 6) + 1):
        other = made.copy()
        other.cache = COPIES[way](made.cache)
        assert type(other.cache) is type(made.cache)
        before = fingerprint(made.cache)
        other.append(1)
        other.append(3)
        if recording:
            other.crop(2)
        other.verify()
        assert_unchanged(before, made.cache)  # the copy shares no tensor
        made.append(1)
    made.verify()


@lengths
@both
def test_08_snapshot_and_restore(family: str, buffer_len: int, recording: bool):
    for steps in range(min(buffer_len, 5) + 1):
        made = session(family, 2, recording, buffer_len=buffer_len)
        made.append(5)
        for _ in range(steps):
            made.append(1)
        made.compare()
        snapshot, columns = made.cache.snapshot(), [list(row) for row in made.columns]
        for _ in range(2):
            for tokens in (1, buffer_len + 2, 1):
                made.append(tokens)
            if recording:
                made.crop(3)
            made.compare()
            made.cache.restore(snapshot)
            made.columns = [list(row) for row in columns]
            made.verify()


@lengths
@both
def test_08_reset_equals_a_fresh_cache(family: str, buffer_len: int, recording: bool):
    made = session(family, 2, recording, buffer_len=buffer_len)
    for tokens in (6, 1, 3):
        made.append(tokens)
    made.compare()
    made.cache.reset()
    made.forget(2)
    assert made.cache.get_seq_length() == 0
    assert not made.cache.has_previous_state()
    made.check_states()
    fresh = session(family, 2, made.cache.record_past, buffer_len=buffer_len)
    fresh._next_seed = made._next_seed
    for tokens in (2, 1, 1, 4, 1):
        left, right = made.append(tokens), fresh.append(tokens)
        assert_same_logits(left, right, 1e-6)
    assert made.cache.held.tolist() == fresh.cache.held.tolist()
    made.verify()


def test_08_reset_allows_another_batch(family: str):
    made = session(family, 2, buffer_len=4)
    run_program(made, [6, 1, 1])
    made.cache.reset()
    made.forget(3)
    run_program(made, [3, 1, 1])


# ---------------------------------------------------------------------------------------------------------- 9. lengths
@lengths
@both
def test_09_lengths(family: str, buffer_len: int, recording: bool):
    made = session(family, 2, recording, buffer_len=buffer_len)
    assert made.cache.get_seq_length() == 0
    seen = 0
    for tokens in (5, 1, 1, 3, 20, 1):
        made.append(tokens)
        seen += tokens
        assert made.cache.get_seq_length() == seen
        assert isinstance(made.cache.get_seq_length(), int)
        assert made.cache.has_previous_state()
    if recording:
        made.crop(4)
        assert made.cache.get_seq_length() == seen - 4
    made.cache.reset()
    assert made.cache.get_seq_length() == 0


@lengths
def test_09_chunked_prefill(family: str, buffer_len: int):
    for chunk in (1, 2, 3, 7):
        made = session(family, 2, buffer_len=buffer_len)
        run_program(made, [chunk] * (21 // chunk) + [1, 1])


# --------------------------------------------------------------------------------------------- 10. a long continuation
@lengths
@both
def test_10_a_long_continuation(family: str, buffer_len: int, recording: bool):
    """More tokens than the buffer holds on a warm cache, at several phases: equal to one forward."""
    for steps in (0, 1, buffer_len - 1, buffer_len):
        made = session(family, 2, recording, buffer_len=buffer_len, max_window=4)
        made.append(5)
        for _ in range(steps):
            made.append(1)
        run_program(made, [buffer_len + 30, 1, 1, 60, 1])


def test_10_a_very_long_continuation(family: str):
    for recording in (False, True):
        made = session(family, 1, recording, buffer_len=16)
        run_program(made, [3, 1, 1, 400, 1, 1])


# ----------------------------------------------------------------------------------- 11. any reader sees a whole state
@lengths
@both
def test_11_readers_see_the_whole_state(family: str, buffer_len: int, recording: bool):
    made = session(family, 2, recording, buffer_len=buffer_len)
    made.append(4)
    for _ in range(buffer_len + 2):
        made.append(1)
        made.check_states()
    made.append(3)
    made.verify()


@lengths
def test_11_reading_changes_nothing(family: str, buffer_len: int):
    read, unread = (session(family, 2, True, buffer_len=buffer_len) for _ in range(2))
    for tokens in (4, 1, 1, 3, 1, 1):
        left, right = read.append(tokens), unread.append(tokens)
        assert torch.equal(left, right)
        for layer_idx in mamba_layer_indices(read.model.config):
            state = read.cache.get_recurrent_state(layer_idx)
            read.cache.get_conv_state(layer_idx)
            assert torch.equal(state, read.cache.get_recurrent_state(layer_idx))
    assert read.cache.max_croppable == unread.cache.max_croppable
    read.crop(5)
    read.verify()


# --------------------------------------------------------------------------------------------- 12. it really is replay
def versions(cache) -> list[tuple[int, int]]:
    return [(layer.checkpoint.data_ptr(), layer.checkpoint._version) for layer in replay_layers(cache)]


@lengths
def test_12_the_checkpoint_is_not_written_between_flushes(family: str, buffer_len: int):
    """Version counter, address and content stay until the step that folds, and the counter counts just that."""
    made = session(family, 2, buffer_len=buffer_len)
    made.append(6)
    writes = 0
    start = made.cache.stats.checkpoint_writes
    content = [layer.checkpoint.clone() for layer in replay_layers(made.cache)]
    steps = 3 * buffer_len + 2
    for _ in range(steps):
        before = versions(made.cache)
        held = int(made.cache.held[0])
        made.append(1)
        if held + 1 >= buffer_len:
            writes += 1
            for (_, old), (_, new) in zip(before, versions(made.cache)):
                assert new != old, "a flush that writes nothing"
            for layer, old in zip(replay_layers(made.cache), content):
                assert not torch.equal(layer.checkpoint, old)
        else:
            assert versions(made.cache) == before
            for layer, old in zip(replay_layers(made.cache), content):
                assert torch.equal(layer.checkpoint, old)
        content = [layer.checkpoint.clone() for layer in replay_layers(made.cache)]
    assert made.cache.stats.checkpoint_writes - start == writes * made.batch
    assert writes == steps // buffer_len
    made.verify()


@lengths
def test_12_checkpoint_writes_of_a_decode(family: str, buffer_len: int):
    """Prefill and t - 1 steps write each checkpoint ceil(t / buffer_len) times."""
    tokens = 2 * buffer_len + 3
    made = session(family, 1, buffer_len=buffer_len)
    made.append(20)  # long enough to be folded at once
    for _ in range(tokens - 1):
        made.append(1)
    stats = made.cache.stats
    assert stats.checkpoint_writes == -(-tokens // buffer_len)
    assert stats.forwards == tokens
    assert stats.tokens == 20 + tokens - 1
    state_bytes = sum(layer.checkpoint.numel() * layer.checkpoint.element_size() for layer in replay_layers(made.cache))
    assert stats.checkpoint_bytes_written == state_bytes * (-(-tokens // buffer_len))


def test_12_a_window_costs_input_slots_and_no_states(family: str):
    """A window of T tokens: T slots more, the checkpoint untouched; its rollback: no write and no forward."""
    made = session(family, 2, True, buffer_len=16, max_window=24)
    made.append(8)
    made.crop(3)
    before, held = versions(made.cache), made.cache.held.tolist()
    calls = []
    handles = [mixer.register_forward_hook(lambda *_: calls.append(1)) for mixer in mixers(made.model)]
    try:
        made.append(7)
        assert made.cache.held.tolist() == [value + 7 for value in held]
        assert versions(made.cache) == before
        stored = sum(value.numel() for value in fingerprint(made.cache).values() if isinstance(value, torch.Tensor))
        ran, writes = len(calls), made.cache.stats.checkpoint_writes
        assert ran == len(mixers(made.model))
        buffers = [layer.inputs["x"].data_ptr() for layer in replay_layers(made.cache)]
        made.compare()
        made.crop(5)
        assert len(calls) == ran, "a crop ran the model again"
    finally:
        for handle in handles:
            handle.remove()
    assert versions(made.cache) == before, "a crop wrote a checkpoint"
    assert [layer.inputs["x"].data_ptr() for layer in replay_layers(made.cache)] == buffers, "a crop moved the buffers"
    assert made.cache.stats.checkpoint_writes == writes
    assert made.cache.held.tolist() == [value + 2 for value in held]
    assert (made.cache.stats.crops, made.cache.stats.tokens_cropped) == (2, 2 * (3 + 5))  # tokens count by rows
    # No state is kept beside the checkpoint: all tensors together hold less than two states and the buffers.
    states = sum(layer.checkpoint.numel() for layer in replay_layers(made.cache))
    slots = sum(buffer.numel() for layer in replay_layers(made.cache) for buffer in layer.inputs.tensors())
    others = sum(
        layer.keys.numel() + layer.values.numel()
        for layer in made.cache.layers
        if getattr(layer, "keys", None) is not None
    )
    assert stored < 2 * states + slots + others + 3 * slots, (stored, states, slots, others)
    made.verify()


def test_12_the_counters_start_anew(family: str):
    made = session(family, 1, True, buffer_len=4)
    for tokens in (5, 1, 4):
        made.append(tokens)
    made.crop(3)
    stats = made.cache.stats
    assert (stats.forwards, stats.tokens, stats.crops, stats.tokens_cropped) == (3, 10, 1, 3)
    assert stats.per_token_bytes > 0 and stats.input_bytes_written > 0
    fresh = hf_replayssm.ReplayCache(config=made.model.config).stats
    assert (fresh.forwards, fresh.tokens, fresh.checkpoint_writes, fresh.crops, fresh.tokens_cropped) == (0, 0, 0, 0, 0)


def test_12_what_a_per_token_cache_would_have_written(family: str):
    """`per_token_bytes` is what a cache that writes its state per token had written for the same tokens."""
    made = session(family, 2, buffer_len=16)
    made.append(5)
    before = made.cache.stats.per_token_bytes
    for _ in range(32):
        made.append(1)
    state_bytes = sum(layer.checkpoint.numel() * layer.checkpoint.element_size() for layer in replay_layers(made.cache))
    assert made.cache.stats.per_token_bytes - before == 32 * state_bytes


# ---------------------------------------------------------------------------------------------------- 14. never silent
def test_14_gradients_through_the_cache_are_refused(family: str):
    model = hf_replayssm.enable(copy_of(family)).requires_grad_(True)
    cache = hf_replayssm.ReplayCache(config=model.config)
    before = fingerprint(cache)
    with torch.enable_grad(), pytest.raises((ValueError, RuntimeError), match="no_grad|inference_mode|use_cache=False"):
        model.train()(input_ids=random_ids(1, 5), cache=cache, use_cache=True)
    assert_unchanged(before, cache)


@pytest.mark.parametrize("operation", ["larger", "smaller"])
def test_14_another_batch_size_is_refused(family: str, operation: str):
    made = session(family, 2, buffer_len=4)
    run_program(made, [5, 1])
    before = fingerprint(made.cache)
    ids = random_ids(3 if operation == "larger" else 1, 1)
    with pytest.raises(ValueError, match="batch"), torch.no_grad():
        made.model(input_ids=ids, cache=made.cache, use_cache=True)
    assert_unchanged(before, made.cache)
    made.verify()


def test_14_an_untouched_model_refuses_a_replay_cache(family: str):
    """An unpatched mixer that read a replay cache would corrupt it: it must raise, and name enable()."""
    made = session(family, 1, buffer_len=4)
    made.append(5)
    for cache in (made.cache, hf_replayssm.ReplayCache(config=made.model.config)):
        before = fingerprint(cache)
        with pytest.raises((ValueError, RuntimeError, TypeError), match="enable"), torch.no_grad():
            shared_model(family)(input_ids=random_ids(1, 1), cache=cache, use_cache=True)
        assert_unchanged(before, cache)
        with pytest.raises((ValueError, RuntimeError, TypeError), match="enable"), torch.no_grad():
            shared_model(family)(input_ids=random_ids(1, 4), cache=cache, use_cache=True)


# ------------------------------------------------------------------------------------------------------- 16. precision
def test_16_the_checkpoint_is_fp32_unless_asked(family: str):
    for model_dtype in (torch.float32, torch.bfloat16):
        model = hf_replayssm.enable(copy_of(family).to(model_dtype))
        cache = hf_replayssm.ReplayCache(config=model.config, buffer_len=4)
        with torch.no_grad():
            for tokens in (6, 1, 3, 1, 1, 1):
                model(input_ids=random_ids(1, tokens), cache=cache, use_cache=True)
        for layer in replay_layers(cache):
            assert layer.checkpoint.dtype == torch.float32
            assert layer.inputs["x"].dtype == layer.inputs["B"].dtype == model_dtype
            # Mamba-1 holds dt as it leaves its projection.
            assert layer.inputs["dt"].dtype == (torch.float32 if family in MAMBA2_NAMES else model_dtype)
        for layer_idx in mamba_layer_indices(model.config):
            assert cache.get_conv_state(layer_idx).dtype == model_dtype


@lengths
def test_16_a_bf16_model_stays_near_its_whole_forward(family: str, buffer_len: int):
    """The cached path of a bf16 model is about as near to the fp32 truth as its own whole-sequence forward."""
    model = copy_of(family).to(torch.bfloat16)
    ids = random_ids(1, 40, seed=8)
    truth = whole_forward(shared_model(family), ids).double()
    whole = whole_forward(model, ids).double()
    hf_replayssm.enable(model)
    cache = hf_replayssm.ReplayCache(config=model.config, buffer_len=buffer_len)
    parts = []
    with torch.no_grad():
        for start, stop in [(0, 10)] + [(at, at + 1) for at in range(10, 30)] + [(30, 35), (35, 40)]:
            parts.append(model(input_ids=ids[:, start:stop], cache=cache, use_cache=True).logits)
    ours = torch.cat(parts, 1).double()
    assert (ours - truth).norm() < 3 * (whole - truth).norm()


@pytest.mark.parametrize("buffer_len", [4, 16])
def test_16_a_bf16_checkpoint_is_rounded_once_per_flush(family: str, buffer_len: int):
    """A bf16 checkpoint costs a little accuracy, and less with a longer buffer than with one write per token."""
    errors = {}
    for length in (1, buffer_len):
        made = session(family, 1, buffer_len=length, checkpoint_dtype=torch.bfloat16)
        made.rtol = 1.0
        logits = [made.append(tokens) for tokens in [20] + [1] * 60]
        expected = whole_forward(made.reference, torch.tensor(made.history))
        for layer in replay_layers(made.cache):
            assert layer.checkpoint.dtype == torch.bfloat16
        errors[length] = (torch.cat(logits, 1) - expected).norm() / expected.norm()
    assert 1e-6 < errors[buffer_len] < 0.05
    assert errors[buffer_len] < errors[1]


def test_16_masked_slots_are_never_multiplied_in(family: str):
    """NaN and infinity in every unused slot, at every step, in all row patterns: nothing of it reaches a state."""
    made = session(family, 2, True, buffer_len=4, max_window=6)
    made.append(6)
    for filler in (float("nan"), float("inf"), -float("inf")):
        for tokens, counts in ((1, [0, 0]), (4, [3, 0]), (2, [0, 2]), (5, [5, 5]), (1, [1, 0])):
            made.append(tokens, filler=filler)
            made.crop(counts)
            poison(made.cache, filler)
            for layer_idx in mamba_layer_indices(made.model.config):
                assert torch.isfinite(made.cache.get_recurrent_state(layer_idx)).all()
    made.verify()


def test_16_extreme_time_steps(family: str):
    """dt so large that the state is forgotten in one token, and so small that nothing decays: no overflow, no NaN."""
    for shift in (60.0, -60.0):
        model = copy_of(family)
        for mixer in mixers(model):
            dt_bias_of(mixer).data += shift
        ids = random_ids(1, 24, seed=9)
        expected = whole_forward(model, ids)
        hf_replayssm.enable(model)
        cache = hf_replayssm.ReplayCache(config=model.config, buffer_len=16)
        with torch.no_grad():
            cuts = [0, 8, 9, 10, 11, 16, 24]
            parts = [model(input_ids=ids[:, a:b], cache=cache, use_cache=True).logits for a, b in zip(cuts, cuts[1:])]
        assert relative_error(torch.cat(parts, 1), expected) < 10 * RTOL


def test_16_the_state_starts_at_zero(family: str):
    """Memory that was used before must not shine through a fresh cache's first state."""
    for _ in range(3):
        garbage = [torch.full((2, 6, 16, 13), float("nan")) for _ in range(20)]
        del garbage
        made = session(family, 2, buffer_len=4)
        run_program(made, [1, 1])


def test_hybrids_have_both_parts(family: str):
    """Attention layers stay transformers' own and recurrent layers are replay's, in the right places."""
    from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

    cache = hf_replayssm.ReplayCache(config=shared_model(family).config)
    indices = mamba_layer_indices(shared_model(family).config)
    assert [index for index, layer in enumerate(cache.layers) if hasattr(layer, "checkpoint")] == indices
    assert all(isinstance(cache.layers[index], LinearAttentionCacheLayerMixin) for index in indices)
    assert any(isinstance(layer, CacheLayerMixin) for layer in cache.layers) == has_attention(
        shared_model(family).config
    )
    assert not cache.is_compileable
