"""Tiny random models of the supported families, and the comparisons that the tests share.

The weights are drawn anew (not transformers' initialisation), because with the usual one a test passes that should
not: convolution weights are small and the skip `D x` drowns the state, so that a cache which never rolls back looks
right. Here the convolution is scaled up, D down, and the memory is long (`A dt` from 1e-3 to 0.2 per token).
`test_tiny_models.py` asserts that zeroing the state moves the logits by about their own size.
"""

from __future__ import annotations

import copy
import itertools
import math

import torch
from transformers import (
    BailingHybridConfig,
    BailingHybridForCausalLM,
    BambaConfig,
    BambaForCausalLM,
    DynamicCache,
    FalconH1Config,
    FalconH1ForCausalLM,
    FalconMambaConfig,
    FalconMambaForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    LaraMiniConfig,
    LaraMiniForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    Zamba2Config,
    Zamba2ForCausalLM,
    ZambaConfig,
    ZambaForCausalLM,
)


VOCAB = 89
FIRST_TOKEN = 3  # ids below are pad, bos and eos: never drawn, so that no prompt contains padding by accident
BUFFER_LENS = (1, 4, 16)

_COMMON = {"vocab_size": VOCAB, "hidden_size": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 56}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}, "max_position_embeddings": 4096}

# Of the delta rule six value heads, three to a key head; of KDA, which has no others, three.
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 10,
}
_ROPE_IN_PART = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    "max_position_embeddings": 4096,
}
_ROPE_3D = {**_ROPE_IN_PART, "rope_parameters": _ROPE_IN_PART["rope_parameters"] | {"mrope_section": [1, 1, 1]}}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_MIXED = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SHARED_EXPERT = {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 24}
_LATENT = {"kv_lora_rank": 10, "qk_rope_head_dim": 6, "qk_nope_head_dim": 8, "v_head_dim": 12, "num_local_experts": 4}
_LATENT |= {**_MIXED, **_EXPERTS, "mlp_layer_types": ["dense", "sparse", "dense"], "intermediate_size": 56}

# Of Mamba-2 six heads in two groups everywhere, so three heads share one B and C; the dimensions differ from one
# another, so that no two axes can be taken for each other.
FAMILIES: dict[str, tuple[type, type, dict]] = {
    "mamba2": (
        Mamba2Config,
        Mamba2ForCausalLM,
        dict(num_heads=6, head_dim=16, state_size=10, n_groups=2, num_hidden_layers=3, chunk_size=8, use_bias=True),
    ),
    "bamba": (
        BambaConfig,
        BambaForCausalLM,
        dict(
            **_ATTENTION,
            **_ROPE,
            num_hidden_layers=3,
            attn_layer_indices=[1],
            mamba_n_heads=6,
            mamba_d_head=16,
            mamba_n_groups=2,
            mamba_d_state=11,
            mamba_chunk_size=8,
        ),
    ),
    "zamba2": (
        Zamba2Config,
        Zamba2ForCausalLM,
        dict(
            **{**_ATTENTION, "num_key_value_heads": 4},  # its adapters need as many as heads
            **_ROPE,
            num_hidden_layers=4,
            layers_block_type=["linear_attention", "hybrid", "linear_attention", "hybrid"],
            mamba_d_state=9,
            mamba_ngroups=2,
            n_mamba_heads=6,
            chunk_size=8,
            use_mem_rope=True,
            use_shared_attention_adapter=True,
            adapter_rank=3,
            add_bias_linear=True,
            time_step_min=0.08,
            time_step_max=0.4,
        ),
    ),
    "nemotron_h": (
        NemotronHConfig,
        NemotronHForCausalLM,
        dict(
            **_ATTENTION,
            head_dim=12,
            layers_block_type=["linear_attention", "moe", "full_attention", "linear_attention", "mlp"],
            mamba_num_heads=6,
            mamba_head_dim=14,
            ssm_state_size=10,
            n_groups=2,
            chunk_size=8,
            n_routed_experts=4,
            moe_intermediate_size=24,
            moe_shared_expert_intermediate_size=24,
            time_step_min=0.08,
            time_step_max=0.4,
        ),
    ),
    "falcon_h1": (
        FalconH1Config,
        FalconH1ForCausalLM,
        dict(
            **_ATTENTION,
            **_ROPE,
            num_hidden_layers=2,
            mamba_d_ssm=84,
            mamba_n_heads=6,
            mamba_d_head=14,
            mamba_n_groups=2,
            mamba_d_state=10,
            mamba_chunk_size=8,
            mamba_rms_norm=False,
            ssm_multipliers=[0.8, 1.3, 0.7, 1.2, 0.6],
            ssm_in_multiplier=1.4,
            ssm_out_multiplier=0.3,
            attention_in_multiplier=0.9,
            attention_out_multiplier=1.6,
            key_multiplier=0.8,
            mlp_multipliers=[0.9, 0.7],
            lm_head_multiplier=1.2,
            embedding_multiplier=0.5,
        ),
    ),
    "granitemoehybrid": (
        GraniteMoeHybridConfig,
        GraniteMoeHybridForCausalLM,
        dict(
            **_ATTENTION,
            **_ROPE,
            num_hidden_layers=3,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            position_embedding_type="rope",
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=40,
            mamba_n_heads=6,
            mamba_d_head=16,
            mamba_n_groups=2,
            mamba_d_state=13,
            mamba_chunk_size=8,
            mamba_proj_bias=True,
            embedding_multiplier=1.5,
            residual_multiplier=0.9,
            attention_multiplier=0.3,
            logits_scaling=1.1,
        ),
    ),
    "mamba": (
        MambaConfig,
        MambaForCausalLM,
        dict(state_size=10, num_hidden_layers=3, time_step_rank=5, use_bias=True, tie_word_embeddings=False),
    ),
    "falcon_mamba": (
        FalconMambaConfig,
        FalconMambaForCausalLM,
        dict(state_size=9, num_hidden_layers=2, time_step_rank=5, tie_word_embeddings=False),
    ),
    "jamba": (
        JambaConfig,
        JambaForCausalLM,
        dict(
            **_ATTENTION,
            num_hidden_layers=4,
            attn_layer_period=4,
            attn_layer_offset=2,
            expert_layer_period=2,
            expert_layer_offset=1,
            num_experts=4,
            num_experts_per_tok=2,
            mamba_d_state=10,
            mamba_dt_rank=5,
            mamba_proj_bias=True,
        ),
    ),
    "zamba": (
        ZambaConfig,
        ZambaForCausalLM,
        dict(
            **{**_ATTENTION, "num_key_value_heads": 4},
            num_hidden_layers=4,
            layers_block_type=["linear_attention", "hybrid", "linear_attention", "hybrid"],
            n_mamba_heads=2,
            mamba_d_state=10,
            mamba_dt_rank=5,
            tie_word_embeddings=False,
        ),
    ),
    "qwen3_next": (
        Qwen3NextConfig,
        Qwen3NextForCausalLM,
        dict(**_ATTENTION, **_ROPE_IN_PART, **_DELTA, **_MIXED, **_SHARED_EXPERT, head_dim=12, mlp_only_layers=[0]),
    ),
    "olmo_hybrid": (OlmoHybridConfig, OlmoHybridForCausalLM, dict(**_ATTENTION, **_ROPE, **_DELTA, **_MIXED)),
    "kimi_linear": (
        KimiLinearConfig,
        KimiLinearForCausalLM,
        dict(**_LATENT, num_attention_heads=4, num_key_value_heads=4, linear_num_heads=3, linear_head_dim=9),
    ),
    "qwen3_5_text": (
        Qwen3_5TextConfig,
        Qwen3_5ForCausalLM,
        dict(
            **_ATTENTION,
            **_ROPE_3D,
            **_DELTA,
            head_dim=12,
            num_hidden_layers=3,
            # As published ones end. (Upstream's MTP layers take their norm from the last.)
            layer_types=["linear_attention", "linear_attention", "full_attention"],
        ),
    ),
    "qwen3_5_moe_text": (
        Qwen3_5MoeTextConfig,
        Qwen3_5MoeForCausalLM,
        dict(**_HEADS, **_ROPE_3D, **_DELTA, **_MIXED, **_SHARED_EXPERT, head_dim=12),
    ),
    "lara_mini": (
        LaraMiniConfig,
        LaraMiniForCausalLM,
        dict(
            **_HEADS,
            **_ROPE,
            **_DELTA,
            **_SHARED_EXPERT,
            head_dim=12,
            num_hidden_layers=4,
            layer_types=["linear_attention", "sliding_attention", "linear_attention", "full_attention"],
            sliding_window=5,
        ),
    ),
    "bailing_hybrid": (
        BailingHybridConfig,
        BailingHybridForCausalLM,
        dict(**_ROPE, **_LATENT, num_attention_heads=3, num_key_value_heads=3, n_group=2, topk_group=1, head_dim=10),
    ),
}
# These differ from others in a projection or in what is around their mixers: tests that run over all families
# leave them out, those of all shapes do not.
CLOSE_RELATIVES = ("olmo_hybrid", "qwen3_5_text", "qwen3_5_moe_text", "lara_mini", "bailing_hybrid")
FAMILY_NAMES = tuple(name for name in FAMILIES if name not in CLOSE_RELATIVES)
MAMBA1_NAMES = ("mamba", "falcon_mamba", "jamba", "zamba")
KDA_NAMES = ("kimi_linear", "bailing_hybrid")
DELTA_NAMES = ("qwen3_next", "kimi_linear", *CLOSE_RELATIVES)
MAMBA2_NAMES = tuple(name for name in FAMILY_NAMES if name not in MAMBA1_NAMES + DELTA_NAMES)
PURE_NAMES = ("mamba2", "mamba", "falcon_mamba")  # without attention, and without position ids

# With the gated norm the mixer's output is about 1, without it several times that.
_NORMED = {"mamba_rms_norm": True, "ssm_out_multiplier": 1.3, "attention_out_multiplier": 0.8}

# Further shapes: name -> (family, config overrides).
VARIANTS: dict[str, tuple[str, dict]] = {
    "mamba2_kernel3": ("mamba2", {"conv_kernel": 3, "use_bias": False}),
    "mamba2_one_group_no_conv_bias": ("mamba2", {"n_groups": 1, "use_conv_bias": False, "chunk_size": 256}),
    "mamba2_head_per_group": ("mamba2", {"n_groups": 6, "state_size": 7}),
    "mamba2_dt_limit": ("mamba2", {"time_step_limit": (0.08, 0.3)}),
    "bamba_dt_limit": ("bamba", {"time_step_limit": (0.05, 0.25), "attn_layer_indices": [0]}),
    "zamba2_plain": (
        "zamba2",
        {
            "use_mem_rope": False,
            "use_shared_attention_adapter": False,
            "num_key_value_heads": 2,
            "num_mem_blocks": 2,
            "tie_word_embeddings": False,
        },
    ),
    "zamba2_no_bias_kernel3": ("zamba2", {"add_bias_linear": False, "mamba_d_conv": 3, "time_step_min": 0.001}),
    "nemotron_h_bias": ("nemotron_h", {"use_bias": True, "conv_kernel": 3}),
    "falcon_h1_norm": ("falcon_h1", {"mamba_norm_before_gate": True, **_NORMED}),
    "falcon_h1_norm_after_gate": ("falcon_h1", {"mamba_norm_before_gate": False, **_NORMED}),
    "falcon_h1_bias_kernel3": ("falcon_h1", {"mamba_proj_bias": True, "projectors_bias": True, "mamba_d_conv": 3}),
    "granitemoehybrid_dense": ("granitemoehybrid", {"num_local_experts": 0, "position_embedding_type": None}),
    "mamba_kernel3": ("mamba", {"conv_kernel": 3, "use_bias": False, "use_conv_bias": False}),
    "jamba_dense": ("jamba", {"num_experts": 1, "num_experts_per_tok": 1, "mamba_proj_bias": False}),
    "zamba_one_head": ("zamba", {"n_mamba_heads": 1, "mamba_proj_bias": True}),
    **{name: (name, {}) for name in CLOSE_RELATIVES},
    "qwen3_next_kernel3": (
        "qwen3_next",
        {"linear_conv_kernel_dim": 3, "linear_num_key_heads": 3, "linear_num_value_heads": 3},
    ),
    "olmo_hybrid_plain": ("olmo_hybrid", {"linear_allow_neg_eigval": False, "rope_parameters": None}),
    "bailing_hybrid_softplus": ("bailing_hybrid", {"kda_safe_gate": False}),
}
VARIANT_NAMES = tuple(VARIANTS)
# The variants cheap and different enough to take part in the default run of the invariants.
ALL_NAMES = FAMILY_NAMES + VARIANT_NAMES

# Families whose cached single step upstream skips the dt limit, so that upstream's own cached tokens may differ from
# its whole-sequence forward wherever the limit bites.
UPSTREAM_STEP_DIFFERS = {"zamba2", "nemotron_h", "mamba2_dt_limit", "bamba_dt_limit", "nemotron_h_bias"}
UPSTREAM_STEP_DIFFERS |= {name for name, (family, _) in VARIANTS.items() if family in ("zamba2", "nemotron_h")}


def family_of(name: str) -> str:
    return VARIANTS[name][0] if name in VARIANTS else name


def tiny_config(name: str, **overrides):
    """Config of the family or variant `name`; `overrides` are config fields."""
    family, extra = VARIANTS[name] if name in VARIANTS else (name, {})
    config_class, _, fields = FAMILIES[family]
    return config_class(**{**_COMMON, **fields, **extra, **overrides})


def mixers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The recurrent mixers of a model, in layer order."""
    return [
        module
        for module in model.modules()
        if hasattr(module, "conv1d") and (hasattr(module, "A_log") or hasattr(module, "forget_gate"))
    ]


def replay_layers(cache) -> list:
    """The recurrent layers of a replay cache, in layer order."""
    return [layer for layer in cache.layers if hasattr(layer, "checkpoint")]


def mamba_layer_indices(config) -> list[int]:
    return [index for index, kind in enumerate(config.layer_types) if kind in ("linear_attention", "hybrid")]


def has_attention(config) -> bool:
    return any(kind in ("full_attention", "hybrid") for kind in config.layer_types)


def _selection_of(mixer: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of a Mamba-1 mixer what makes dt, B and C of x, the weight of dt behind that, and the bias of dt."""
    if hasattr(mixer, "x_proj_weight"):  # Zamba
        return mixer.x_proj_weight, mixer.dt_proj_weight, mixer.dt_proj_bias
    return mixer.x_proj.weight, mixer.dt_proj.weight, mixer.dt_proj.bias


def is_delta(mixer: torch.nn.Module) -> bool:
    return "Delta" in type(mixer).__name__


def first_projection(mixer: torch.nn.Module) -> torch.nn.Module:
    """A projection of the hidden states to what goes through the convolution."""
    names = "in_proj", "in_proj_qkvz", "in_proj_qkv", "q_proj"
    return next(getattr(mixer, name) for name in names if hasattr(mixer, name))


def _draw_selection(mixer: torch.nn.Module, normal) -> None:
    select, spread, _ = _selection_of(mixer)
    weight = normal(select, 1.5 / math.sqrt(select.shape[-1]))
    weight[..., : mixer.time_step_rank, :] *= 0.3
    select.copy_(weight)
    spread.copy_(normal(spread, 1 / math.sqrt(mixer.time_step_rank)))
    for norm in (getattr(mixer, f"{name}_layernorm", None) for name in ("dt", "b", "c")):
        if norm is not None:  # (Falcon-Mamba's have weights that nothing reads.)
            norm.weight.copy_(0.5 + normal(norm.weight, 0.1))


def dt_bias_of(mixer: torch.nn.Module) -> torch.Tensor:
    mixer = getattr(mixer, "forget_gate", mixer)
    return mixer.dt_bias if hasattr(mixer, "dt_bias") else _selection_of(mixer)[2]


@torch.no_grad()
def _draw_weights(model: PreTrainedModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(1000 + seed)

    def normal(like: torch.Tensor, std: float) -> torch.Tensor:
        return torch.randn(like.shape, generator=generator) * std

    def uniform(like: torch.Tensor, low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(like.shape, generator=generator)

    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    done = set()

    def draw_convolution(mixer: torch.nn.Module) -> None:
        mixer.conv1d.weight.copy_(normal(mixer.conv1d.weight, 0.7) + 0.4)
        if mixer.conv1d.bias is not None:
            mixer.conv1d.bias.copy_(normal(mixer.conv1d.bias, 0.2))

    def draw_memory(A_log: torch.Tensor, dt_bias: torch.Tensor) -> None:
        dt = torch.exp(uniform(dt_bias, math.log(0.04), math.log(0.5)))
        dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus
        A_log.copy_(uniform(A_log, math.log(0.03), math.log(0.4)))

    for mixer in filter(is_delta, mixers(model)):
        for name, parameter in mixer.named_parameters():
            if parameter.dim() == 2:
                gain = 2.0 if name in ("out_proj.weight", "o_proj.weight") else 1.2
                parameter.copy_(normal(parameter, gain / math.sqrt(parameter.shape[1])))
            elif "norm" in name:
                parameter.copy_(1 + normal(parameter, 0.1))
        draw_convolution(mixer)
        memory = getattr(mixer, "forget_gate", mixer)
        draw_memory(memory.A_log, memory.dt_bias)
        if getattr(memory, "safe_gate", False):  # -5 sigmoid(exp(A_log) (a + dt_bias)): from 0.002 to 0.1 a token
            memory.A_log.copy_(uniform(memory.A_log, 0.5, 0.7))
            memory.dt_bias.copy_(uniform(memory.dt_bias, -4.5, -2.5))
            memory.f_proj.weight *= 0.3
        done.update(id(parameter) for parameter in mixer.parameters())
    for mixer in mixers(model):
        if is_delta(mixer):
            continue
        inner = mixer.intermediate_size
        conv_dim = mixer.conv1d.weight.shape[0]
        weight = normal(mixer.in_proj.weight, 1.2 / math.sqrt(mixer.in_proj.weight.shape[1]))
        if hasattr(mixer, "dt_bias"):
            # Rows of Mamba-2's in_proj are (gate, x, B, C, dt): dt varies from token to token, by less than its bias
            # does from head to head.
            weight[inner + conv_dim :] *= 0.5
        else:
            _draw_selection(mixer, normal)
        mixer.in_proj.weight.copy_(weight)
        draw_convolution(mixer)
        draw_memory(mixer.A_log, dt_bias_of(mixer))
        mixer.D.copy_(normal(mixer.D, 0.1))
        mixer.out_proj.weight.copy_(normal(mixer.out_proj.weight, 1.5 / math.sqrt(inner)))
        for linear in (mixer.in_proj, mixer.out_proj):
            if linear.bias is not None:
                linear.bias.copy_(normal(linear.bias, 0.3))
        norm = getattr(mixer, "norm", None)
        if isinstance(getattr(norm, "weight", None), torch.nn.Parameter):
            norm.weight.copy_(1 + normal(norm.weight, 0.1))
        done.update(id(parameter) for parameter in mixer.parameters())
    embedding.weight.copy_(normal(embedding.weight, 0.5))
    done.add(id(embedding.weight))
    if id(head.weight) not in done:
        head.weight.copy_(normal(head.weight, 1.5 / math.sqrt(head.weight.shape[1])))
        done.add(id(head.weight))
    for name, parameter in model.named_parameters():
        if id(parameter) in done:
            continue
        if parameter.dim() >= 2:
            gain = 1.3 if any(part in name for part in ("q_proj", "k_proj", "v_proj", "o_proj")) else 0.8
            parameter.copy_(normal(parameter, gain / math.sqrt(parameter.shape[-1])))
        elif parameter.mean() > 0.5:  # a norm's scale
            parameter.copy_(1 + normal(parameter, 0.1))
        else:
            parameter.copy_(normal(parameter, 0.1))


def tiny_model(name: str, seed: int = 0, **overrides) -> PreTrainedModel:
    """A fresh tiny model of the family (or variant) `name`, in eval mode and fp32; `overrides` are config fields."""
    _, model_class, _ = FAMILIES[family_of(name)]
    with torch.random.fork_rng(devices=[]):  # a model made in the middle of a test does not change what it draws
        torch.manual_seed(seed)
        model = model_class(tiny_config(name, **overrides))
    return initialise(model, seed)


def initialise(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """The model with weights drawn anew, in eval mode, and with a generation config without special tokens."""
    _draw_weights(model.eval(), seed)
    model.requires_grad_(False)
    # Tokens of a random model mean nothing: generation runs to its length, unless a test sets an end token. Without a
    # pad token generate() cannot take a generated token for padding either (it does where no mask is given).
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = None
    return model


SHARED_MODELS: dict[str, PreTrainedModel] = {}


def shared_model(name: str) -> PreTrainedModel:
    """The untouched model of `name`, shared by all tests: never enabled, never changed (conftest checks it)."""
    if name not in SHARED_MODELS:
        SHARED_MODELS[name] = tiny_model(name)
    return SHARED_MODELS[name]


def copy_of(name: str) -> PreTrainedModel:
    """A copy of the shared model that a test may do with as it likes."""
    return copy.deepcopy(shared_model(name))


def random_ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Token ids (batch, length), without pad, bos and eos."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_TOKEN, VOCAB, (batch, length), generator=generator)


# ------------------------------------------------------------------------------------------------ comparisons
RTOL = 1e-4


@torch.no_grad()
def whole_forward(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Logits (batch, length, vocab) of one forward over the whole sequence, without a cache."""
    return model(input_ids=ids, use_cache=False).logits


@torch.no_grad()
def greedy_without_cache(model: PreTrainedModel, ids: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """Greedy continuation (batch, length + new_tokens), one whole forward per token."""
    for _ in range(new_tokens):
        ids = torch.cat([ids, whole_forward(model, ids)[:, -1].argmax(-1, keepdim=True)], dim=1)
    return ids


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest deviation of any position, relative to the largest logit of that position; infinite where not finite."""
    assert actual.shape == expected.shape, (tuple(actual.shape), tuple(expected.shape))
    if actual.numel() == 0:
        return 0.0
    if not torch.isfinite(actual).all():
        return math.inf
    actual, expected = actual.double(), expected.double()
    scale = expected.abs().amax(dim=-1, keepdim=True).clamp(min=1e-6)
    return ((actual - expected).abs() / scale).max().item()


def assert_same_logits(actual: torch.Tensor, expected: torch.Tensor, rtol: float = RTOL, what: str = "") -> None:
    error = relative_error(actual, expected)
    assert error <= rtol, f"{what or 'logits'}: relative error {error:.2e}, allowed {rtol:.0e}"


# ------------------------------------------------------------------------------------------------ replay sessions
# From here on hf_replayssm is needed; it is imported where it is used, so that test_tiny_models.py runs without it.
ENABLED_MODELS: dict[str, PreTrainedModel] = {}


def enabled_model(name: str) -> PreTrainedModel:
    """The enabled twin of `shared_model(name)`, shared by the tests that only run it."""
    import hf_replayssm

    if name not in ENABLED_MODELS:
        ENABLED_MODELS[name] = hf_replayssm.enable(copy_of(name))
    return ENABLED_MODELS[name]


def used_slots(cache, layer) -> torch.Tensor:
    """(batch, slots) bool: which slots of the layer's buffer, a ring, hold a token."""
    slots = layer.inputs.capacity
    if hasattr(layer, "phase"):  # static: counts on the device, for each phase
        first, held = cache.base[layer.phase].cpu() % slots, cache.held[layer.phase].cpu()
    else:
        first, held = cache.positions.first, cache.held
    place = (torch.arange(slots) - first[:, None]) % slots  # counted from the oldest token
    return place < held[:, None]


def poison(cache, value: float = math.nan) -> None:
    """Fill every unused buffer slot with `value`: a read of one that is not masked by `where` cannot go unseen."""
    for layer in replay_layers(cache):
        if layer.inputs is None:
            continue
        row, slot = (index.to(layer.inputs.device) for index in (~used_slots(cache, layer)).nonzero(as_tuple=True))
        for buffer in layer.inputs.tensors():
            buffer[row, :, slot] = value


def fingerprint(thing, path: str = "cache", seen: set | None = None) -> dict[str, object]:
    """Everything a cache holds, flat: path -> copy of a tensor, or a plain value; without the cache's own copying."""
    seen = set() if seen is None else seen
    if isinstance(thing, torch.Tensor):
        return {path: thing.detach().clone()}
    if thing is None or isinstance(thing, (bool, int, float, str, torch.dtype, torch.device)):
        return {path: thing}
    if id(thing) in seen or callable(thing) or isinstance(thing, torch.nn.Module) or hasattr(thing, "model_type"):
        return {}
    seen.add(id(thing))
    if isinstance(thing, dict):
        items = list(thing.items())
    elif isinstance(thing, (list, tuple)):
        items = list(enumerate(thing))
    else:
        items = list(getattr(thing, "__dict__", {}).items())
        items += [
            (name, getattr(thing, name)) for name in getattr(type(thing), "__slots__", ()) if hasattr(thing, name)
        ]
    found: dict[str, object] = {}
    for key, value in items:
        if key == "_is_user_defined":  # upstream's generate() marks the cache that it was given
            continue
        found.update(fingerprint(value, f"{path}.{key}", seen))
    return found


def assert_unchanged(before: dict[str, object], cache) -> None:
    """The cache holds exactly what it held when `before = fingerprint(cache)` was taken (NaN equals NaN)."""
    after = fingerprint(cache)
    assert after.keys() == before.keys(), before.keys() ^ after.keys()
    for path, value in before.items():
        if isinstance(value, torch.Tensor):
            now = after[path]
            assert value.shape == now.shape and value.dtype == now.dtype, path
            assert torch.equal(torch.nan_to_num(value.float()), torch.nan_to_num(now.float())), path
        else:
            assert value == after[path], (path, value, after[path])


_reference_states: dict[tuple[str, tuple[int, ...]], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}


@torch.no_grad()
def reference_states(name: str, rows: list[list[int]]) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """For each row of tokens its states per recurrent layer, in upstream's shapes: recurrent, and of the convolution.

    From upstream's cache after one forward over the whole sequence, which applies the dt limit. Rows of one length
    share a forward, and the last few hundred results are kept."""
    model = shared_model(name)
    keys = [(name, tuple(row)) for row in rows]
    missing = sorted({key for key in keys if key not in _reference_states}, key=lambda key: len(key[1]))
    if len(_reference_states) > 400:
        _reference_states.clear()
        missing = sorted(set(keys), key=lambda key: len(key[1]))
    for length, group in itertools.groupby(missing, key=lambda key: len(key[1])):
        group = list(group)
        cache = DynamicCache(config=model.config)
        # (Of an empty row the states are those of any other, at zero.)
        rows = [tokens if length else (FIRST_TOKEN,) for _, tokens in group]
        model(input_ids=torch.tensor(rows), cache=cache, use_cache=True)
        layers = [cache.layers[index] for index in mamba_layer_indices(model.config)]
        scale = 1 if length else 0
        for row, key in enumerate(group):
            _reference_states[key] = (
                [layer.recurrent_states[0][row] * scale for layer in layers],
                [layer.conv_states[0][row] * scale for layer in layers],
            )
    return [_reference_states[key] for key in keys]


@torch.no_grad()
def reference_logits(name: str, sequences: list[tuple[int, ...]]) -> dict[tuple[int, ...], torch.Tensor]:
    """Logits (length, vocab) of whole-sequence forwards without a cache, for sequences of any lengths.

    They run together, filled up on the right: the model is causal, so what follows a sequence does not change it."""
    model = shared_model(name)
    longest = sorted(set(sequences), key=len, reverse=True)
    kept: list[tuple[int, ...]] = []
    inside: dict[tuple[int, ...], tuple[int, ...]] = {}
    for sequence in longest:
        inside[sequence] = next((other for other in kept if other[: len(sequence)] == sequence), sequence)
        if inside[sequence] is sequence:
            kept.append(sequence)
    logits: dict[tuple[int, ...], torch.Tensor] = {}
    for begin in range(0, len(kept), 32):
        batch = kept[begin : begin + 32]
        ids = torch.full((len(batch), len(batch[0])), FIRST_TOKEN)
        for row, sequence in enumerate(batch):
            ids[row, : len(sequence)] = torch.tensor(sequence)
        for sequence, row in zip(batch, whole_forward(model, ids)):
            logits[sequence] = row
    return {sequence: logits[inside[sequence]][: len(sequence)] for sequence in sequences}


class Session:
    """A replay cache beside what each of its rows must have seen.

    `columns` holds for each row the columns that the cache counts: a token, or None where it was masked. Each forward's
    logits are kept and, at the next crop or `verify`, compared with the untouched model's forward over exactly the
    row's tokens, without padding and without a cache. Unused slots are poisoned before each forward.
    """

    def __init__(self, name: str, batch: int = 1, cache=None, model=None, rtol: float = RTOL, **config):
        import hf_replayssm

        self.name = name
        self.reference = shared_model(name)
        self.model = enabled_model(name) if model is None else model
        self.cache = hf_replayssm.ReplayCache(config=self.model.config, **config) if cache is None else cache
        self.rtol = rtol
        self._next_seed = 0
        self.forget(batch)

    def forget(self, batch: int) -> None:
        """Expect an empty cache of `batch` rows."""
        self.columns: list[list[int | None]] = [[] for _ in range(batch)]
        self.pending: list[tuple[str, tuple[int, ...], torch.Tensor]] = []  # row, tokens so far, the newest's logits

    @property
    def batch(self) -> int:
        return len(self.columns)

    @property
    def history(self) -> list[list[int]]:
        """The tokens that each row has seen."""
        return [[token for token in row if token is not None] for row in self.columns]

    def fresh_ids(self, length: int) -> torch.Tensor:
        """New random tokens (batch, length); each call gives others."""
        self._next_seed += 1
        return random_ids(self.batch, length, seed=1000 * self._next_seed + length)

    @torch.no_grad()
    def append(
        self, tokens: int | torch.Tensor, mask: torch.Tensor | None = None, filler: float = math.nan, **kwargs
    ) -> torch.Tensor:
        """
        One forward over `tokens` new random tokens (or these ids); `mask` (batch, T) says which are real. Unused slots
        are full of `filler` before it.
        """
        ids = self.fresh_ids(tokens) if isinstance(tokens, int) else tokens
        if mask is not None:
            kwargs.setdefault("attention_mask", mask)
        poison(self.cache, filler)
        out = self.model(input_ids=ids, cache=self.cache, use_cache=True, **kwargs)
        assert out.cache is self.cache, "the forward used another cache than the one it was given"
        assert torch.isfinite(out.logits).all(), "logits are not finite"
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        for row, columns in enumerate(self.columns):
            columns += [token if keep else None for token, keep in zip(ids[row].tolist(), real[row].tolist())]
            if real[row].any():
                self.pending.append((f"row {row}", tuple(self.history[row]), out.logits[row, real[row]].float()))
        return out.logits

    def compare(self) -> None:
        """Compare the logits of all forwards since the last comparison."""
        expected = reference_logits(self.name, [tokens for _, tokens, _ in self.pending])
        for row, tokens, logits in self.pending:
            start = len(tokens) - len(logits)
            what = f"{self.name}, {row}, positions {start} to {len(tokens) - 1}"
            assert_same_logits(logits, expected[tokens][start:], self.rtol, what)
        self.pending.clear()

    def crop(self, counts: int | list[int]) -> None:
        """Remove `counts` (positive here) newest columns, of every row or per row."""
        per_row = [counts] * self.batch if isinstance(counts, int) else counts
        self.cache.crop(-counts if isinstance(counts, int) else -torch.tensor(counts))
        self.columns = [row[: len(row) - count] for row, count in zip(self.columns, per_row)]

    def select(self, indices: list[int]) -> None:
        """Expect the rows at `indices`: what the cache holds after an operation that took these rows of the old ones.

        A row shorter than the longest is padded on the left, and may stay so when the longest is gone."""
        longest = max(len(row) for row in self.columns)
        rows = [self.columns[index] for index in indices]
        if max(len(row) for row in rows) < longest:
            rows = [[None] * (longest - len(row)) + row for row in rows]
        self.columns = [list(row) for row in rows]

    def check_states(self) -> None:
        """Recurrent and convolution states, pending inputs included, equal the reference's of the same tokens."""
        history = self.history
        for row, (recurrent, convolution) in enumerate(reference_states(self.name, history)):
            for layer_idx, state, conv in zip(mamba_layer_indices(self.model.config), recurrent, convolution):
                for expected, got, what in (
                    (state, self.cache.get_recurrent_state(layer_idx), "recurrent state"),
                    (conv, self.cache.get_conv_state(layer_idx), "convolution history"),
                ):
                    if got is None:
                        assert not history[row], f"no {what} in layer {layer_idx}"
                        continue
                    assert got[row].shape == expected.shape, (what, tuple(got[row].shape), tuple(expected.shape))
                    error = (got[row].float() - expected).abs().max() / expected.abs().max().clamp(min=1e-2)
                    assert error <= self.rtol, f"{what} of row {row}, layer {layer_idx}: relative error {error:.2e}"

    def verify(self) -> None:
        """Logits so far, length, states and, on a copy, the logits of the next three tokens."""
        longest = max(len(row) for row in self.columns)
        if all(None not in row for row in self.columns):
            assert self.cache.get_seq_length() == longest
        self.check_states()
        other = self.copy()
        for tokens in (1, 2):
            other.append(tokens)
        other.compare()  # its own and this one's
        self.pending.clear()

    def copy(self) -> Session:
        other = copy.copy(self)
        other.cache = copy.deepcopy(self.cache)
        other.columns = [list(row) for row in self.columns]
        other.pending = list(self.pending)
        return other


class Forwards:
    """The number of tokens of each forward of a model with recurrent layers, while it is entered."""

    def __init__(self, model):
        self.tokens: list[int] = []
        self.handle = mixers(model)[0].register_forward_pre_hook(self._look, with_kwargs=True)

    def _look(self, _, args, kwargs):
        self.tokens.append((args[0] if args else kwargs["hidden_states"]).shape[1])

    def __enter__(self) -> Forwards:
        return self

    def __exit__(self, *_):
        self.handle.remove()


class Streamer:
    """Of `generate`: what it was given, and whether it was told the end."""

    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True
