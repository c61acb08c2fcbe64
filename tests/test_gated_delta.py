"""What is the delta rule families' own: upstream's scan, what an image does to positions, a sliding window."""

from __future__ import annotations

import copy
import functools
import sys

import pytest
import torch
from tiny_models import (
    DELTA_NAMES,
    KDA_NAMES,
    RTOL,
    VOCAB,
    Session,
    copy_of,
    enabled_model,
    greedy_without_cache,
    initialise,
    mixers,
    random_ids,
    relative_error,
    replay_layers,
    shared_model,
    tiny_config,
    whole_forward,
)
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

import hf_replayssm
from hf_replayssm.models.mixer import is_reference


PADDING = torch.tensor([[1] * 6, [0, 0, 0, 1, 1, 1]])


@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear"])
def test_a_package_with_a_faster_scan_is_used(name: str, monkeypatch):
    """For a prompt and for a long continuation, from the state before it; padding has g = 0 and beta = 0."""
    model = hf_replayssm.enable(copy_of(name))
    upstream, function = sys.modules[mixers(model)[0]._replaced_class.__module__], mixers(model)[0].chunk_function
    scan, calls = getattr(upstream, function), []
    assert is_reference(scan)

    def faster(q, k, v, *, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel):
        calls.append((q.shape[1], initial_state is not None, int((beta == 0).all(-1).sum())))
        assert torch.equal((beta == 0).all(-1), (g == 0).flatten(2).all(-1))
        return scan(
            q, k, v, g, beta, initial_state=initial_state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )

    monkeypatch.setattr(upstream, function, faster)
    made = Session(name, 2, model=model, buffer_len=2)
    made.append(6, mask=PADDING)
    made.append(1)
    made.append(9)
    layers = len(mixers(model))
    assert calls == [(6, False, 3)] * layers + [(9, True, 0)] * layers
    monkeypatch.undo()
    made.verify()


@pytest.mark.parametrize("name", DELTA_NAMES)
def test_there_is_no_limit_of_dt_to_override(name: str):
    with pytest.raises(ValueError, match=f"`time_step_limit`.*'{name}'"):
        hf_replayssm.ReplayCache(config=shared_model(name).config, time_step_limit=(0.1, 0.2))


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text", "olmo_hybrid", "kimi_linear"])
def test_a_gradient_for_a_parameter_in_front_of_the_last_projection_is_refused(name: str):
    model = hf_replayssm.enable(copy_of(name))
    outside = "out_proj", "o_proj", "norm", "o_norm", "g_", "in_proj_z"
    inside = [p for key, p in mixers(model)[-1].named_parameters() if not key.startswith(outside)]
    assert len(inside) >= 5
    for parameter in inside:
        parameter.requires_grad_(True)
        cache = hf_replayssm.ReplayCache(config=model.config)
        logits = model(input_ids=random_ids(1, 3), cache=cache).logits
        with pytest.raises(RuntimeError, match="ReplayCache"):
            logits.sum().backward()
        parameter.requires_grad_(False)


def test_values_in_the_buffer():
    """Of the state's own making: beta (v - S^T k) in float32, and k as it leaves the convolution."""
    made = Session("olmo_hybrid", 1, buffer_len=16)
    made.append(20)
    before = [layer.whole_state() for layer in replay_layers(made.cache)]
    made.append(1)
    for layer, old in zip(replay_layers(made.cache), before):
        k, u, g = (tensor[:, :, 0] for tensor in layer.inputs.tensors())
        k = (k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(3, 1)
        new = old * g.exp()[..., None, None] + k[..., None] * u[..., None, :]
        torch.testing.assert_close(layer.whole_state(), new, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------ a sliding window
def test_rows_of_their_own_in_a_sliding_window():
    """Windows over the end of the sliding window, crops of each row's own, and long continuations."""
    for buffer_len in (1, 4, 16):
        made = Session("lara_mini", 2, buffer_len=buffer_len, max_window=6)
        made.cache.activate_past_recording()
        made.append(9, mask=torch.tensor([[1] * 9, [0, 0] + [1] * 7]))
        for tokens, counts in ((1, [0, 0]), (4, [3, 0]), (3, [0, 2]), (6, [6, 1]), (1, [0, 1]), (12, [4, 6])):
            made.append(tokens)
            made.crop(counts)
        made.verify()


def test_a_sliding_window_has_no_static_variant():
    with pytest.raises(ValueError, match="'sliding_attention'.*cache_implementation='replayssm'"):
        enabled_model("lara_mini").generate(random_ids(1, 4), cache_implementation="replayssm_static")


# ------------------------------------------------------------------------------------------------ images
IMAGE, VIDEO = 80, 81
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 48,
    "num_position_embeddings": 16,
}
MULTIMODAL = {
    "qwen3_5_text": (Qwen3_5Config, Qwen3_5ForConditionalGeneration),
    "qwen3_5_moe_text": (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration),
}
multimodal = pytest.mark.parametrize("name", MULTIMODAL)
OPTIONS = {"max_new_tokens": 12, "do_sample": False, "suppress_tokens": list(range(IMAGE, VOCAB))}


@functools.cache
def multimodal_model(name: str):
    """Never enabled."""
    config_class, model_class = MULTIMODAL[name]
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": 82, "vision_end_token_id": 83}
    config = config_class(text_config=tiny_config(name).to_dict(), vision_config=VISION, **tokens)
    return initialise(model_class(config))


def text_ids(batch: int, length: int, seed: int) -> torch.Tensor:
    return random_ids(batch, length, seed) % (IMAGE - 3) + 3


def prompt_with_images(rows: int = 2) -> dict[str, torch.Tensor]:
    """Rows of 20 columns with an image of 4 x 4 patches, 4 tokens and 2 positions, in each; the second is padded."""
    ids = text_ids(2, 20, seed=3)
    ids[0, 4:8] = ids[1, 6:10] = IMAGE
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    pixels = torch.randn(32, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(0))
    return {
        "input_ids": ids[:rows],
        "attention_mask": mask[:rows],
        "pixel_values": pixels[: 16 * rows],
        "image_grid_thw": torch.tensor([[1, 4, 4]] * rows),
        "mm_token_type_ids": (ids == IMAGE).int()[:rows],
    }


@multimodal
def test_generate_with_an_image(name: str):
    plain = copy.deepcopy(multimodal_model(name))
    model = hf_replayssm.enable(copy.deepcopy(plain))
    prompt, one = prompt_with_images(), prompt_with_images(rows=1)
    expected = plain.generate(**prompt, **OPTIONS, use_cache=False)
    for options in (
        {"cache_config": {"buffer_len": 1}},
        {"cache_config": {"buffer_len": 4}},
        {"cache_implementation": "replayssm_static"},
        {"prefill_chunk_size": 6},
    ):
        assert torch.equal(model.generate(**prompt, **OPTIONS, **options), expected), options
    beams = {**OPTIONS, "num_beams": 2}
    assert torch.equal(model.generate(**prompt, **beams), plain.generate(**prompt, **beams, use_cache=False))
    assert torch.equal(model.generate(**one, **OPTIONS, prompt_lookup_num_tokens=3), expected[:1])
    assert torch.equal(model.generate(**prompt, **OPTIONS, cache_implementation="dynamic"), expected)


@pytest.mark.parametrize("static", [False, True])
@torch.no_grad()
def test_positions_behind_an_image(static: bool):
    """In forwards of one's own, which give no positions; rows that stand apart among them."""
    plain = copy.deepcopy(multimodal_model("qwen3_5_text"))
    model, prompt = hf_replayssm.enable(copy.deepcopy(plain)), prompt_with_images()
    made = hf_replayssm.StaticReplayCache if static else hf_replayssm.ReplayCache
    cache = made(config=model.config, buffer_len=4, max_window=3, **({"max_cache_len": 48} if static else {}))
    cache.activate_past_recording()
    text = text_ids(2, 12, seed=9)
    whole = {
        "input_ids": torch.cat([prompt["input_ids"], text], 1),
        "attention_mask": torch.cat([prompt["attention_mask"], torch.ones_like(text)], 1),
        "mm_token_type_ids": torch.cat([prompt["mm_token_type_ids"], torch.zeros_like(text).int()], 1),
    }
    expected = plain(**prompt | whole, use_cache=False).logits[:, 20:]
    assert bool((plain.model.rope_deltas == -2).all())
    model(**prompt, cache=cache)
    logits = [model(input_ids=text[:, :4], cache=cache).logits]
    cache.crop(torch.tensor([0, -3]))
    apart = torch.stack([text[0, 4:7], text[1, 1:4]])
    third = model(input_ids=apart, cache=cache).logits
    assert relative_error(torch.stack([third[0], third[1]]), torch.stack([expected[0, 4:7], expected[1, 1:4]])) < RTOL
    cache.crop(torch.tensor([-3, 0]))
    for first, last in ((4, 5), (5, 9), (9, 12)):
        # The mask is of the new tokens, which upstream takes for one of the whole sequence.
        mask = torch.ones(2, last - first, dtype=torch.long)
        logits.append(model(input_ids=text[:, first:last], cache=cache, attention_mask=mask).logits)
    assert relative_error(torch.cat(logits, 1), expected) < RTOL


def test_an_image_leaves_nothing_behind():
    """A text that begins on a new cache has the positions of a text, whatever the model has seen before."""
    plain = multimodal_model("qwen3_5_text")
    model = hf_replayssm.enable(copy.deepcopy(plain))
    model.generate(**prompt_with_images(), **OPTIONS)
    ids, mask = text_ids(3, 9, seed=5), torch.ones(3, 9, dtype=torch.long)
    mask[0, :3] = 0
    expected = plain.generate(ids, attention_mask=mask, **OPTIONS, use_cache=False)
    options = {key: value for key, value in OPTIONS.items() if key != "do_sample"}
    out = hf_replayssm.speculative_generate(model, ids, mask, prompt_lookup_num_tokens=3, **options)
    assert torch.equal(out, expected)


@multimodal
def test_a_multimodal_model_is_saved_as_it_was(name: str, tmp_path):
    plain = multimodal_model(name)
    model = hf_replayssm.enable(copy.deepcopy(plain))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert type(loaded) is type(plain) and not hf_replayssm.is_enabled(loaded)
    assert [type(module) for module in hf_replayssm.disable(model).modules()] == [type(m) for m in plain.modules()]
    # Its text model alone.
    text = hf_replayssm.enable(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval())
    assert type(text).__name__.endswith("ForCausalLM")
    text.generation_config.eos_token_id = None
    ids = text_ids(1, 7, seed=2)
    assert torch.equal(text.generate(ids, max_new_tokens=8), greedy_without_cache(text, ids, 8))


# ------------------------------------------------------------------------------------------------ the models themselves
@pytest.mark.parametrize("name", DELTA_NAMES)
def test_what_a_mixer_does_matters(name: str):
    """The tests would notice heads of keys or of values that change places, and a decay or a beta that does."""
    ids = random_ids(1, 12)
    expected = whole_forward(shared_model(name), ids)
    for what in ("k", "v", "decay"):
        model = copy_of(name)
        for mixer in mixers(model):
            weight = mixer.conv1d.weight.data
            keys = mixer.qkv_dim if name in KDA_NAMES else mixer.key_dim
            if what == "k":
                weight[keys : 2 * keys] = weight[keys : 2 * keys].roll(weight.shape[0] // 8, 0)
            elif what == "v":
                weight[2 * keys :] = weight[2 * keys :].roll(10, 0)
            else:
                memory = getattr(mixer, "forget_gate", mixer)
                memory.dt_bias.data = memory.dt_bias.data.flip(0)
        assert relative_error(whole_forward(model, ids), expected) > 100 * RTOL, what
