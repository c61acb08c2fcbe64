"""The tiny models can tell a right cache from a wrong one (upstream only: this package is not imported here).

With transformers' own initialisation a cache that never rolls its state back passes most tests. Each part that a cache
carries must therefore move the logits by far more than the tolerance of the tests: the recurrent state by about their
own size, and the convolution's history, the attention's keys, the first token and the newest one visibly.
"""

from __future__ import annotations

import pytest
import torch
from tiny_models import (
    ALL_NAMES,
    FAMILIES,
    FAMILY_NAMES,
    FIRST_TOKEN,
    MAMBA1_NAMES,
    PURE_NAMES,
    RTOL,
    UPSTREAM_STEP_DIFFERS,
    VOCAB,
    family_of,
    greedy_without_cache,
    has_attention,
    mamba_layer_indices,
    mixers,
    random_ids,
    relative_error,
    shared_model,
    tiny_config,
    tiny_model,
    whole_forward,
)
from transformers import DynamicCache


PROMPT = 24


@torch.no_grad()
def decode_step(name: str, change=None) -> torch.Tensor:
    """Logits of one step after a prefill through upstream's cache, which `change` may alter between the two."""
    model = shared_model(name)
    ids = random_ids(2, PROMPT + 1, seed=1)
    cache = DynamicCache(config=model.config)
    model(input_ids=ids[:, :PROMPT], cache=cache, use_cache=True)
    if change is not None:
        change(cache)
    # Bamba counts positions from zero unless it is told.
    positions = {} if family_of(name) in PURE_NAMES else {"position_ids": torch.tensor([[PROMPT]])}
    return model(input_ids=ids[:, PROMPT:], cache=cache, use_cache=True, **positions).logits[:, -1]


def zero_states(cache: DynamicCache) -> None:
    for layer in cache.layers:
        if hasattr(layer, "recurrent_states"):
            layer.recurrent_states[0].zero_()


def zero_convolution(cache: DynamicCache) -> None:
    for layer in cache.layers:
        if hasattr(layer, "conv_states"):
            layer.conv_states[0].zero_()


def zero_keys(cache: DynamicCache) -> None:
    for layer in cache.layers:
        if getattr(layer, "keys", None) is not None:
            layer.keys.zero_()
            layer.values.zero_()


@pytest.mark.parametrize("name", ALL_NAMES)
def test_the_state_matters(name: str):
    """Without the recurrent state a step's logits move by about their own size, in every row."""
    right, wrong = decode_step(name), decode_step(name, zero_states)
    moved = (wrong - right).norm(dim=-1) / right.norm(dim=-1)
    assert moved.min() > 0.6, moved
    assert (wrong.argmax(-1) != right.argmax(-1)).any()


@pytest.mark.parametrize("name", ALL_NAMES)
def test_each_layers_state_matters(name: str):
    """One layer's state alone is noticed as well: a fault in a single layer is no smaller than the tolerance."""
    right = decode_step(name)
    for layer_idx in mamba_layer_indices(shared_model(name).config):
        wrong = decode_step(name, lambda cache, idx=layer_idx: cache.layers[idx].recurrent_states[0].zero_())
        assert relative_error(wrong, right) > 500 * RTOL, layer_idx


@pytest.mark.parametrize("name", ALL_NAMES)
def test_convolution_history_and_keys_matter(name: str):
    right = decode_step(name)
    assert relative_error(decode_step(name, zero_convolution), right) > 500 * RTOL
    if has_attention(shared_model(name).config):
        assert relative_error(decode_step(name, zero_keys), right) > 100 * RTOL


@pytest.mark.parametrize("name", ALL_NAMES)
def test_every_token_is_remembered(name: str):
    """The memory is long: another token at any place of the past changes the last logits far beyond the tolerance."""
    model = shared_model(name)
    ids = random_ids(1, 48, seed=2)
    right = whole_forward(model, ids)[:, -1]
    for place in (0, 1, 20, 40, 46):
        other = ids.clone()
        other[0, place] = FIRST_TOKEN + (ids[0, place] - FIRST_TOKEN + 7) % (VOCAB - FIRST_TOKEN)
        assert relative_error(whole_forward(model, other)[:, -1], right) > 20 * RTOL, place
    shifted = whole_forward(model, ids[:, 1:])[:, -1]
    assert relative_error(shifted, right) > 20 * RTOL


@pytest.mark.parametrize("name", [name for name in ALL_NAMES if family_of(name) not in MAMBA1_NAMES])
def test_the_limit_of_dt_bites(name: str):
    """Where a family limits dt, some of the time steps are really limited, and the others are not."""
    model = shared_model(name)
    low, high = mixers(model)[0].time_step_limit
    below = above = total = 0

    def look(mixer, args, kwargs):
        nonlocal below, above, total
        hidden = args[0] if args else kwargs["hidden_states"]
        projected = mixer.in_proj(hidden * getattr(mixer, "ssm_in_multiplier", 1.0)) * getattr(mixer, "mup_vector", 1.0)
        dt = torch.nn.functional.softplus(projected[..., -mixer.D.shape[0] :] + mixer.dt_bias)
        below, above, total = below + (dt < low).sum(), above + (dt > high).sum(), total + dt.numel()

    handles = [mixer.register_forward_pre_hook(look, with_kwargs=True) for mixer in mixers(model)]
    try:
        whole_forward(model, random_ids(2, 40, seed=3))
    finally:
        for handle in handles:
            handle.remove()
    assert total > 0
    if low >= 0.01:
        assert 0.05 < below / total < 0.7, below / total
    if high < 1e3:
        assert 0.05 < above / total < 0.7, above / total
    # Upstream's cached step skips the limit, so only there do its cached logits leave its own whole-sequence forward.
    error = relative_error(decode_step(name), whole_forward(model, random_ids(2, PROMPT + 1, seed=1))[:, -1])
    assert (error > 10 * RTOL) == (low >= 0.01 or high < 1e3), error
    if name not in UPSTREAM_STEP_DIFFERS:
        assert error < RTOL / 10, error


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_the_shapes_are_hard(family: str):
    """Groups > 1 with several heads each, no two axes of one length, and attention and recurrence side by side."""
    model = shared_model(family)
    for mixer in mixers(model):
        assert mixer.conv_kernel_size == 4
        if family in MAMBA1_NAMES:
            heads, sizes = getattr(mixer, "n_mamba_heads", 1), (mixer.time_step_rank, mixer.ssm_state_size, 4)
            assert (heads == 2) == (family == "zamba")
            assert len({heads, mixer.intermediate_size // heads, *sizes}) == 5
            continue
        heads = mixer.D.shape[0]
        assert mixer.n_groups == 2 and heads // mixer.n_groups == 3
        assert len({heads, mixer.head_dim, mixer.ssm_state_size, mixer.n_groups, mixer.conv_kernel_size}) == 5
    assert len(mixers(model)) >= 2
    assert has_attention(model.config) == (family not in PURE_NAMES)
    assert sum(parameter.numel() for parameter in model.parameters()) < 200_000
    assert not model.training and all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_biases_of_the_input_projection():
    """Padding can only be told from zeroed inputs where in_proj has a bias."""
    with_bias = {family for family in FAMILY_NAMES if mixers(shared_model(family))[0].in_proj.bias is not None}
    assert with_bias == {"mamba2", "zamba2", "granitemoehybrid", "mamba", "jamba"}


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_greedy_text_is_varied(family: str):
    """Greedy continuations wander, so that equal tokens say something."""
    ids = greedy_without_cache(shared_model(family), random_ids(1, 6, seed=4), 40)
    assert len(set(ids[0, 6:].tolist())) >= 8


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_the_factory_repeats_itself(family: str):
    first, second, other = tiny_model(family), tiny_model(family), tiny_model(family, seed=1)
    for left, right in zip(first.state_dict().values(), second.state_dict().values()):
        assert torch.equal(left, right)
    ids = random_ids(1, 8)
    assert torch.equal(whole_forward(first, ids), whole_forward(shared_model(family), ids))
    assert relative_error(whole_forward(other, ids), whole_forward(first, ids)) > 0.1


def test_overrides_reach_the_config():
    assert tiny_config("bamba", mamba_d_conv=3).mamba_d_conv == 3
    assert set(FAMILIES) == set(FAMILY_NAMES)


@pytest.mark.parametrize("name", ALL_NAMES)
def test_the_references_agree(name: str):
    """Sequences that run together, filled up on the right, give what each gives alone; upstream's prefill too."""
    from tiny_models import reference_logits, reference_states

    model = shared_model(name)
    rows = [tuple(random_ids(1, length, seed=length)[0].tolist()) for length in (3, 20, 11, 1)]
    rows.append(rows[1][:9])
    together = reference_logits(name, rows)
    for row in rows:
        assert relative_error(together[row], whole_forward(model, torch.tensor([row]))[0]) < RTOL / 10
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        prefill = model(input_ids=torch.tensor([rows[1]]), cache=cache, use_cache=True).logits[0]
    assert relative_error(prefill, together[rows[1]]) < RTOL / 10
    recurrent, convolution = reference_states(name, [list(rows[1]), []])[0]
    assert [state.shape for state in recurrent] == [
        cache.layers[i].recurrent_states[0][0].shape for i in mamba_layer_indices(model.config)
    ]
    assert all(torch.isfinite(state).all() and state.abs().max() > 0.1 for state in recurrent + convolution)
