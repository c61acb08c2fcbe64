"""Bad input gets a clear error that names the remedy, and changes nothing (issue 2; invariant 14).

Each test states which words of the remedy the message must have, and compares everything that the cache holds before
and after. (A data set without text and an empty document are the evaluation's: tests/evaluation.)
"""

from __future__ import annotations

import pytest
import torch
from tiny_models import (
    PURE_NAMES,
    Session,
    assert_same_logits,
    assert_unchanged,
    copy_of,
    enabled_model,
    family_of,
    fingerprint,
    mixers,
    random_ids,
    replay_layers,
    shared_model,
    tiny_config,
    whole_forward,
)
from transformers import (
    DynamicCache,
    GenerationConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxConfig,
    MiniMaxForCausalLM,
    StaticCache,
)

import hf_replayssm


ERRORS = (ValueError, RuntimeError, TypeError, NotImplementedError)
# Cache and integration are the same for all families; what runs through a mixer is tested for each.
SOME = ("mamba2", "bamba", "falcon_h1")


def warm(name: str, batch: int = 2, recording: bool = True) -> Session:
    made = Session(name, batch, buffer_len=4, max_window=6)
    if recording:
        made.cache.activate_past_recording()
    for tokens in (5, 1, 3):
        made.append(tokens)
    return made


def refused(made: Session, match: str, **inputs) -> None:
    """A forward with these inputs raises, names `match`, and the cache goes on as if nothing had been."""
    before = fingerprint(made.cache)
    with pytest.raises(ERRORS, match=match), torch.no_grad():
        made.model(cache=made.cache, use_cache=True, **inputs)
    assert_unchanged(before, made.cache)


# ------------------------------------------------------------------------------------------------ models
def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=2)
    )


def lfm2() -> Lfm2ForCausalLM:
    """Convolutions with a history, and no recurrent state."""
    return Lfm2ForCausalLM(
        Lfm2Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            layer_types=["conv", "full_attention"],
        )
    )


def minimax() -> MiniMaxForCausalLM:
    """A recurrent state of another kind."""
    return MiniMaxForCausalLM(
        MiniMaxConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_local_experts=2,
            layer_types=["linear_attention", "full_attention"],
        )
    )


@pytest.mark.parametrize("make", [llama, lfm2, minimax])
def test_an_unsupported_model(make):
    """The message names the model and the families that are supported, and the model stays as it was."""
    model = make()
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ERRORS, match="(?i)bamba") as caught:
        hf_replayssm.enable(model)
    assert model.config.model_type in str(caught.value) or type(model).__name__ in str(caught.value)
    assert [type(module) for module in model.modules()] == kinds
    assert not hf_replayssm.is_enabled(model)
    with pytest.raises(ERRORS, match="(?i)bamba"):
        hf_replayssm.ReplayCache(config=model.config)


def test_what_is_no_model():
    for wrong in ("bamba", 3, torch.nn.Linear(2, 2)):
        with pytest.raises(ERRORS):
            hf_replayssm.enable(wrong)
    assert not hf_replayssm.is_enabled(torch.nn.Linear(2, 2))


def test_enabling_globally_leaves_unsupported_models_alone(tmp_path):
    from transformers import AutoModelForCausalLM

    model = llama()
    model.save_pretrained(tmp_path)
    hf_replayssm.enable()
    try:
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    finally:
        hf_replayssm.disable()
    assert type(loaded) is LlamaForCausalLM and not hf_replayssm.is_enabled(loaded)


def test_a_remote_code_model(family: str):
    """A class that came with a checkpoint may do anything: refused, even under a supported model_type."""
    model = copy_of(family)
    original = type(model)
    model.__class__ = type(original.__name__, (original,), {"__module__": "transformers_modules.someone.modeling"})
    with pytest.raises(ERRORS, match="trust_remote_code|remote"):
        hf_replayssm.enable(model)
    model.__class__ = original
    assert not hf_replayssm.is_enabled(model)
    mixer = mixers(model)[0]
    remote = type(type(mixer).__name__, (type(mixer),), {"__module__": "transformers_modules.someone.modeling"})
    mixer.__class__ = remote
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ERRORS):
        hf_replayssm.enable(model)
    assert [type(module) for module in model.modules()] == kinds, "half of the model was enabled"


def test_a_mixer_that_somebody_changed(family: str):
    """A subclass of a mixer with a forward of its own would lose it: refused, and nothing was changed."""
    model = copy_of(family)
    mixer = mixers(model)[-1]
    base = type(mixer)
    mixer.__class__ = type(
        "Mine", (base,), {"forward": lambda self, *args, **kwargs: base.forward(self, *args, **kwargs)}
    )
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ERRORS):
        hf_replayssm.enable(model)
    assert [type(module) for module in model.modules()] == kinds


# ------------------------------------------------------------------------------------------------ settings
BAD_FIELDS = [
    ({"buffer_length": 4}, "buffer_len"),
    ({"bufferlen": 4, "window": 3}, "max_window"),
    ({"buffer_len": 0}, "buffer_len"),
    ({"buffer_len": -3}, "buffer_len"),
    ({"buffer_len": 2.5}, "buffer_len"),
    ({"buffer_len": "4"}, "buffer_len"),
    ({"buffer_len": True}, "buffer_len"),
    ({"max_window": 0}, "max_window"),
    ({"max_window": -1}, "max_window"),
    ({"checkpoint_dtype": torch.uint8}, "checkpoint_dtype"),
    ({"checkpoint_dtype": torch.float8_e5m2}, "float8_e4m3fn"),
    ({"rounding": "up", "checkpoint_dtype": "int8"}, "rounding"),
    ({"rounding": "stochastic"}, "nothing to round"),
    ({"seed": -1}, "seed"),
    ({"seed": True}, "seed"),
    ({"checkpoint_dtype": "float33"}, "checkpoint_dtype"),
    ({"checkpoint_dtype": torch.complex64}, "checkpoint_dtype"),
    ({"backend": "cuda"}, "backend"),
    ({"backend": None}, "backend"),
]


@pytest.mark.parametrize(
    "fields, match", BAD_FIELDS, ids=[",".join(f"{k}={v}" for k, v in f.items()) for f, _ in BAD_FIELDS]
)
def test_settings(fields: dict, match: str):
    """The same error everywhere: in the config, the cache, enable, generate's cache_config and enable for all."""
    model = copy_of("bamba")
    if not set(fields) - {"buffer_len", "max_window", "checkpoint_dtype", "backend", "rounding", "seed"}:
        with pytest.raises(ValueError, match=match):
            hf_replayssm.ReplayConfig(**fields)
    else:
        with pytest.raises(TypeError):
            hf_replayssm.ReplayConfig(**fields)
    with pytest.raises(ValueError, match=match):
        hf_replayssm.ReplayCache(config=model.config, **fields)
    with pytest.raises(ValueError, match=match):
        hf_replayssm.enable(model, **fields)
    assert not hf_replayssm.is_enabled(model)
    assert type(model) is type(shared_model("bamba"))
    with pytest.raises(ValueError, match=match):
        hf_replayssm.enable(**fields)
    with pytest.raises(ValueError, match=match):
        enabled_model("bamba").generate(random_ids(1, 4), max_new_tokens=2, cache_config=fields)


def test_a_wrong_setting_keeps_the_right_ones():
    """An enabled model that is enabled again with nonsense keeps working as before."""
    model = hf_replayssm.enable(copy_of("bamba"), buffer_len=3)
    with pytest.raises(ValueError):
        hf_replayssm.enable(model, buffer_len=0)
    out = model.generate(random_ids(1, 20), max_new_tokens=7, do_sample=False, return_dict_in_generate=True)
    assert out.cache.stats.checkpoint_writes == -(-7 // 3)


def test_triton_without_an_accelerator():
    """Asked for by name, a backend that this device does not have is an error, not a silent fallback."""
    if torch.cuda.is_available():
        pytest.skip("this machine may have it")
    made = Session("bamba", 1)
    with pytest.raises(ERRORS, match="backend|triton"), torch.no_grad():
        cache = hf_replayssm.ReplayCache(config=made.model.config, backend="triton")
        made.model(input_ids=random_ids(1, 4), cache=cache, use_cache=True)


# ------------------------------------------------------------------------------------------------ caches
@pytest.mark.parametrize(
    "family, overrides",
    [
        ("mamba2", {"num_hidden_layers": 2}),
        ("mamba2", {"state_size": 8}),
        ("bamba", {"attn_layer_indices": [2]}),
        ("bamba", {"mamba_d_conv": 3}),
        ("falcon_h1", {"mamba_n_groups": 1}),
    ],
)
def test_a_cache_of_another_config(family: str, overrides: dict):
    other = tiny_config(family, **overrides)
    cache = hf_replayssm.ReplayCache(config=other)
    before = fingerprint(cache)
    with pytest.raises(ERRORS, match="config"), torch.no_grad():
        enabled_model(family)(input_ids=random_ids(1, 4), cache=cache, use_cache=True)
    assert_unchanged(before, cache)
    with pytest.raises(ERRORS, match="config"):
        enabled_model(family).generate(random_ids(1, 4), max_new_tokens=2, cache=cache)
    assert_unchanged(before, cache)


def test_a_cache_of_another_family(family: str):
    other = "mamba2" if family != "mamba2" else "bamba"
    cache = hf_replayssm.ReplayCache(config=shared_model(other).config)
    before = fingerprint(cache)
    with pytest.raises(ERRORS, match="config|model"), torch.no_grad():
        enabled_model(family)(input_ids=random_ids(1, 4), cache=cache, use_cache=True)
    assert_unchanged(before, cache)


def test_a_cache_without_a_config():
    with pytest.raises(ERRORS, match="config"):
        hf_replayssm.ReplayCache()


def test_a_batch_of_another_size(family: str):
    made = warm(family)
    for batch in (1, 3, 4):
        refused(made, "batch", input_ids=random_ids(batch, 1))
        refused(made, "batch", input_ids=random_ids(batch, 6))
    with pytest.raises(ERRORS, match="batch"):
        made.model.generate(random_ids(3, 20), max_new_tokens=2, cache=made.cache)
    made.verify()


@pytest.mark.parametrize("name", ["offloaded", "quantized", "offloaded_static"])
def test_offloaded_and_quantized_caches(family: str, name: str):
    model = enabled_model(family)
    options = {"cache_config": {"backend": "quanto", "nbits": 4}} if name == "quantized" else {}
    with pytest.raises(ERRORS, match="dynamic|replayssm"):
        model.generate(random_ids(1, 4), max_new_tokens=2, cache_implementation=name, **options)


@pytest.mark.parametrize("family", SOME)
def test_continuous_batching(family: str):
    model = enabled_model(family)
    with pytest.raises(ERRORS, match="(?i)continuous|paged"):
        model.generate(random_ids(1, 4), max_new_tokens=2, cache_implementation="paged")
    with pytest.raises(ERRORS, match="(?i)continuous|paged"):
        model.generate_batch(inputs=[[5, 6, 7]], generation_config=GenerationConfig(max_new_tokens=2))
    with pytest.raises(ERRORS, match="(?i)continuous|paged"):
        model.init_continuous_batching(generation_config=GenerationConfig(max_new_tokens=2))
    # An untouched model, and a disabled one, are upstream's affair.
    assert "init_continuous_batching" not in vars(type(shared_model(family)))


def test_static_caches_are_upstreams(family: str):
    """A cache of another class goes to upstream's forward, which may take it or not: never to replay."""
    for cache in (
        DynamicCache(config=shared_model(family).config),
        StaticCache(shared_model(family).config, max_cache_len=9),
    ):
        results = []
        for model in (shared_model(family), enabled_model(family)):
            try:
                with torch.no_grad():
                    import copy

                    results.append(model(input_ids=random_ids(1, 4), cache=copy.deepcopy(cache), use_cache=True).logits)
            except Exception as error:
                results.append(type(error))
        if isinstance(results[0], torch.Tensor):
            assert torch.equal(*results)
        else:
            assert results[0] is results[1]


@pytest.mark.parametrize("keyword", ["past_key_values", "cache_params"])
def test_the_cache_under_an_old_name(family: str, keyword: str):
    """A keyword that the model does not know must not be swallowed while a fresh cache is used."""
    made = Session(family, 1, buffer_len=4)
    before = fingerprint(made.cache)
    try:
        with torch.no_grad():
            out = made.model(input_ids=random_ids(1, 4), use_cache=True, **{keyword: made.cache})
    except ERRORS as error:
        assert "cache" in str(error)
        assert_unchanged(before, made.cache)
    else:
        assert out.cache is made.cache, "the cache was swallowed"


# ------------------------------------------------------------------------------------------------ crops
def test_crops(family: str):
    made = warm(family)
    possible = made.cache.max_croppable
    before = fingerprint(made.cache)
    wrong = [
        (1, "negative|<= 0"),
        (torch.tensor([1, -1]), "negative|<= 0"),
        (-(possible + 1), str(possible)),
        (torch.tensor([0, -(possible + 1)]), str(possible)),
        (torch.tensor([-1]), "rows|batch|shape"),
        (torch.tensor([-1, -1, -1]), "rows|batch|shape"),
        (torch.tensor([[-1, -1]]), "rows|batch|shape"),
        (torch.tensor([-1.0, 0.0]), "integer|dtype"),
        (torch.tensor([True, False]), "integer|dtype"),
    ]
    for tokens, match in wrong:
        with pytest.raises(ERRORS, match=match):
            made.cache.crop(tokens)
        assert_unchanged(before, made.cache)
    made.verify()
    made.crop(possible)
    made.verify()


def test_crops_without_recording(family: str):
    made = warm(family, recording=False)
    before = fingerprint(made.cache)
    for tokens in (-1, torch.tensor([-1, 0])):
        with pytest.raises(ERRORS, match="activate_past_recording"):
            made.cache.crop(tokens)
        assert_unchanged(before, made.cache)
    made.verify()


def test_crops_of_an_empty_cache(family: str):
    cache = hf_replayssm.ReplayCache(config=shared_model(family).config)
    cache.activate_past_recording()
    with pytest.raises(ERRORS):
        cache.crop(-1)
    cache.crop(0)
    assert cache.get_seq_length() == 0


# ------------------------------------------------------------------------------------------------ masks, packing
def test_right_padding_in_a_cached_prefill(family: str):
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    for wrong in (mask, torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 0]])):
        made = Session(family, 2, buffer_len=4)
        refused(made, "left", input_ids=random_ids(2, 5), attention_mask=wrong)
        made.append(5)
        made.verify()
    with pytest.raises(ERRORS, match="left"):
        enabled_model(family).generate(random_ids(2, 5), attention_mask=mask, max_new_tokens=3)
    # Without a cache it is upstream's own, and right.
    with torch.no_grad():
        logits = enabled_model(family)(input_ids=random_ids(2, 5), attention_mask=mask, use_cache=False).logits
        alone = shared_model(family)(input_ids=random_ids(2, 5)[1:, :3], use_cache=False).logits
    assert torch.allclose(logits[1, :3], alone[0], atol=1e-4, rtol=1e-4)


def test_masks_of_a_wrong_shape(family: str):
    made = warm(family)
    # A pure state-space model looks at the newest columns only, so any longer mask will do.
    lengths = [] if family in PURE_NAMES else [(2, 3), (2, 5), (2, 100)]
    for shape in (*lengths, (3, 1), (1, 10), (2, 0), (2,)):
        refused(made, "mask|batch", input_ids=random_ids(2, 1), attention_mask=torch.ones(shape, dtype=torch.long))
    made.verify()


def test_a_mask_that_contradicts_what_was_seen(family: str):
    """Masking tokens afterwards cannot take them out of the state: attention must not leave them out by itself."""
    made = warm(family)
    mask = torch.ones(2, made.cache.get_seq_length() + 1, dtype=torch.long)
    mask[1, 2] = 0
    before = fingerprint(made.cache)
    try:
        made.append(1, attention_mask=mask)
    except ERRORS as error:
        assert "mask" in str(error)
        assert_unchanged(before, made.cache)
    made.verify()


def test_masks_of_attention_alone(family: str):
    """A 4D mask says nothing about padding that a recurrent state understands: refused, or the rows come out right."""
    ids = random_ids(2, 6)
    allowed = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    allowed[0, :, :, :2] = False
    made = Session(family, 2, buffer_len=4)
    before = fingerprint(made.cache)
    try:
        with torch.no_grad():
            logits = made.model(input_ids=ids, attention_mask=allowed, cache=made.cache, use_cache=True).logits
    except ERRORS as error:
        assert "mask" in str(error)
        assert_unchanged(before, made.cache)
    else:
        assert_same_logits(logits[:1, 2:], whole_forward(made.reference, ids[:1, 2:]))


def test_a_forward_of_no_tokens(family: str):
    made = warm(family)
    refused(made, "token", input_ids=random_ids(2, 0))
    made.verify()


def test_packed_sequences(family: str):
    """Several sequences in one row cannot be told apart by a recurrent state."""
    ids = random_ids(1, 8)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    lengths = torch.tensor([0, 4, 8], dtype=torch.int32)
    packed = [
        {"seq_idx": torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]], dtype=torch.int32)},
        {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths, "max_length_q": 4, "max_length_k": 4},
    ]
    if family not in PURE_NAMES:
        packed.append({"position_ids": positions})
    for inputs in packed:
        made = Session(family, 1, buffer_len=4)
        refused(made, "(?i)pack", input_ids=ids, **inputs)
        made.append(5)
        made.verify()


# ------------------------------------------------------------------------------------------------ training, failures
def test_training_through_the_cache(family: str):
    model = hf_replayssm.enable(copy_of(family)).requires_grad_(True).train()
    cache = hf_replayssm.ReplayCache(config=model.config)
    before = fingerprint(cache)
    with torch.enable_grad(), pytest.raises(ERRORS, match="use_cache=False|no_grad|inference_mode"):
        model(input_ids=random_ids(1, 5), labels=random_ids(1, 5), cache=cache, use_cache=True)
    assert_unchanged(before, cache)


def test_gradients_through_an_evaluation(family: str):
    """In eval mode a forward may forget no_grad, and is right; its gradients would not be: backward says so."""
    model = hf_replayssm.enable(copy_of(family)).requires_grad_(True)
    made = Session(family, 2, model=model, buffer_len=4)
    logits = []
    with torch.enable_grad():
        for tokens in (5, 1, 3):
            ids = made.fresh_ids(tokens)
            try:
                logits.append(model(input_ids=ids, cache=made.cache, use_cache=True).logits)
            except ERRORS as error:
                assert "no_grad" in str(error) or "inference_mode" in str(error)
                return
            for row in range(2):
                made.columns[row] += ids[row].tolist()
        for part in reversed(logits):
            if part.requires_grad:
                with pytest.raises(ERRORS, match="use_cache=False|cache"):
                    part.sum().backward()
    expected = whole_forward(made.reference, torch.tensor(made.history))
    assert_same_logits(torch.cat(logits, 1).detach(), expected)
    made.verify()


@pytest.mark.parametrize("place", ["first", "last"])
def test_a_forward_that_fails_half_way(family: str, place: str):
    """After an exception in mid-forward (a hook, out of memory) the cache is as before, or it refuses to go on."""
    model = hf_replayssm.enable(copy_of(family))
    made = Session(family, 2, model=model, buffer_len=4)
    made.append(5)
    made.append(1)
    made.compare()
    snapshot, before = made.cache.snapshot(), fingerprint(made.cache)

    def fail(*_):
        raise MemoryError("out of memory")

    mixer = mixers(model)[0 if place == "first" else -1]
    handle = mixer.register_forward_pre_hook(fail)
    with pytest.raises(MemoryError), torch.no_grad():
        model(input_ids=random_ids(2, 2), cache=made.cache, use_cache=True)
    handle.remove()
    try:
        assert_unchanged(before, made.cache)
    except AssertionError:
        for _ in range(2):
            with pytest.raises(ERRORS, match="reset|restore"), torch.no_grad():
                model(input_ids=random_ids(2, 1), cache=made.cache, use_cache=True)
        made.cache.restore(snapshot)
    made.verify()
    made.cache.reset()
    made.forget(2)
    made.append(3)
    made.verify()


def test_early_exit_drafts(family: str):
    """Upstream's early exit works on no Mamba-2 family and leaves the config changed: refused before that."""
    model = hf_replayssm.enable(copy_of(family))
    before = model.config.to_dict()
    with pytest.raises(ERRORS, match="assistant_early_exit|early exit|early_exit"):
        model.generate(random_ids(1, 5), max_new_tokens=4, assistant_early_exit=1)
    assert model.config.to_dict() == before
    assert len(mixers(model)) == len(mixers(shared_model(family)))


def test_a_batch_of_drafts(family: str):
    """Assisted generation is for one row, as upstream says; replay does not change that silently."""
    with pytest.raises(ERRORS, match="batch"):
        enabled_model(family).generate(random_ids(2, 5), max_new_tokens=4, prompt_lookup_num_tokens=3)


def test_a_replay_cache_on_a_disabled_model(family: str):
    model = hf_replayssm.enable(copy_of(family))
    cache = hf_replayssm.ReplayCache(config=model.config)
    with torch.no_grad():
        model(input_ids=random_ids(1, 5), cache=cache, use_cache=True)
    hf_replayssm.disable(model)
    before = fingerprint(cache)
    for tokens in (1, 3):
        with pytest.raises(ERRORS, match="enable"), torch.no_grad():
            model(input_ids=random_ids(1, tokens), cache=cache, use_cache=True)
        assert_unchanged(before, cache)


@pytest.mark.parametrize("family", SOME)
def test_upstreams_doors_into_a_layer_are_closed(family: str):
    """Code that writes states into a replay layer, as upstream mixers do, is told what to do instead."""
    made = warm(family)
    before = fingerprint(made.cache)
    index = made.cache.layers.index(replay_layers(made.cache)[0])
    state = made.cache.get_recurrent_state(index)
    conv = made.cache.get_conv_state(index)
    with pytest.raises(ERRORS, match="enable"):
        made.cache.update_conv_state(conv, index)
    with pytest.raises(ERRORS, match="enable"):
        made.cache.update_recurrent_state(state, index)
    with pytest.raises(ERRORS):
        made.cache.layers[index].crop(-1)
    assert_unchanged(before, made.cache)
    assert family_of(family) == family
    made.verify()


# ------------------------------------------------------------------------------------------------ generate
@pytest.mark.parametrize("implementation", ["replayssm", "replayssm_static"])
@pytest.mark.parametrize("given", ["int8", [("checkpoint_dtype", "int8")], {1: 2}], ids=repr)
def test_a_cache_config_is_a_dictionary(implementation, given):
    with pytest.raises(ValueError, match="`cache_config` is a dictionary"):
        enabled_model("bamba").generate(
            random_ids(1, 4), max_new_tokens=2, cache_implementation=implementation, cache_config=given
        )


@pytest.mark.parametrize("name", ["bamba", "mamba", "zamba2"])  # the cache is of a model with attention in all layers
def test_generate_refuses_a_static_cache_of_another_model(name):
    cache = hf_replayssm.StaticReplayCache(config=enabled_model("falcon_h1").config, max_cache_len=20)
    with pytest.raises(ValueError, match="another model"):
        enabled_model(name).generate(random_ids(1, 4), max_new_tokens=2, cache=cache)
    assert not cache.is_allocated
    enabled_model("falcon_h1").generate(random_ids(1, 4), max_new_tokens=2, cache=cache)


@pytest.mark.parametrize("implementation", ["replayssm", "replayssm_static"])
def test_embeddings_are_not_cut_into_chunks(implementation):
    """Upstream cuts the ids and feeds all embeddings with every chunk."""
    model, ids = enabled_model("mamba2"), random_ids(2, 7)
    options = {
        "inputs_embeds": model.get_input_embeddings()(ids),
        "max_new_tokens": 3,
        "cache_implementation": implementation,
    }
    with pytest.raises(ValueError, match="prefill_chunk_size"):
        model.generate(ids, prefill_chunk_size=5, **options)
    assert torch.equal(model.generate(ids, **options), model.generate(ids, max_new_tokens=3))
