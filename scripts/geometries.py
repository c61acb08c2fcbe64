"""
Models to time: the geometries of public checkpoints with random weights, built on the device itself.

    model = build(named("Nemotron-H-8B"), device="cuda", dtype=torch.bfloat16)

Any other model goes by its id on the Hub or a folder; only its config is read, the weights are random then too.

Random weights make poor tokens: of 100,000 logits the best two lie close together, so rounding decides, and two right
implementations part after a few tokens. Here the head is the embedding moved by one row, and the embedding is as large
as it must be: the best token after v is v + 1, by a margin that rounding does not reach, while the other logits still
depend on every layer. So tokens can be compared exactly and the layers by their logits. The recurrence gets A in
[1, 16] and dt around [0.01, 0.1], as Mamba-2 is initialised, projections and convolutions that keep the size of their
input, and a small D: then the state has a part in the logits whose loss shows (`state_share`).
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BambaConfig,
    DynamicCache,
    FalconH1Config,
    Mamba2Config,
    NemotronHConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Zamba2Config,
)

from hf_replayssm.families import family_of_config


_KINDS = {"M": "linear_attention", "-": "mlp", "*": "full_attention"}
_NEMOTRON = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"  # 24 Mamba-2, 24 MLP, 4 attention layers
_ZAMBA_SHARED = (6, 11, 17, 23, 29, 35, 41, 47, 53, 59, 65, 71, 77)

# name: the config's class, its fields, and which fields a draft of the same family changes.
GEOMETRIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any], dict[str, Any]]] = {
    "Nemotron-H-8B": (
        NemotronHConfig,
        dict(
            layers_block_type=[_KINDS[kind] for kind in _NEMOTRON],
            hidden_size=4096,
            intermediate_size=21504,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            mamba_num_heads=128,
            mamba_head_dim=64,
            ssm_state_size=128,
            n_groups=8,
            chunk_size=128,
            vocab_size=131072,
            max_position_embeddings=8192,
        ),
        dict(
            layers_block_type=["linear_attention", "mlp", "full_attention", "mlp"],
            hidden_size=512,
            intermediate_size=1024,
            num_attention_heads=4,
            num_key_value_heads=2,
            mamba_num_heads=16,
        ),
    ),
    "Bamba-9B": (
        BambaConfig,
        dict(
            num_hidden_layers=32,
            attn_layer_indices=[9, 18, 27],
            hidden_size=4096,
            intermediate_size=14336,
            num_attention_heads=32,
            num_key_value_heads=8,
            mamba_n_heads=128,
            mamba_d_head=64,
            mamba_d_state=128,
            mamba_n_groups=1,
            vocab_size=128256,
        ),
        dict(
            num_hidden_layers=2,
            attn_layer_indices=[1],
            hidden_size=512,
            intermediate_size=1024,
            num_attention_heads=4,
            num_key_value_heads=2,
            mamba_n_heads=16,
        ),
    ),
    "Zamba2-7B": (
        Zamba2Config,
        dict(
            num_hidden_layers=81,
            layers_block_type=["hybrid" if i in _ZAMBA_SHARED else "linear_attention" for i in range(81)],
            hidden_size=3584,
            intermediate_size=14336,
            num_attention_heads=32,
            num_key_value_heads=32,
            n_mamba_heads=112,
            mamba_d_state=64,
            mamba_ngroups=2,
            num_mem_blocks=2,
            use_mem_rope=True,
            vocab_size=32000,
        ),
        dict(
            num_hidden_layers=2,
            layers_block_type=["linear_attention", "hybrid"],
            hidden_size=512,
            intermediate_size=1024,
            num_attention_heads=8,
            num_key_value_heads=8,
            n_mamba_heads=16,
            num_mem_blocks=1,
        ),
    ),
    "Falcon-H1-7B": (
        FalconH1Config,
        dict(
            num_hidden_layers=44,
            hidden_size=3072,
            intermediate_size=12288,
            num_attention_heads=12,
            num_key_value_heads=2,
            head_dim=128,
            mamba_d_ssm=3072,
            mamba_n_heads=24,
            mamba_d_head=128,
            mamba_d_state=256,
            mamba_n_groups=1,
            vocab_size=130048,
        ),
        dict(num_hidden_layers=2, hidden_size=512, intermediate_size=1024, mamba_d_ssm=1024, mamba_n_heads=8),
    ),
    "mamba2-2.7b": (
        Mamba2Config,
        dict(
            num_hidden_layers=64,
            hidden_size=2560,
            num_heads=80,
            head_dim=64,
            state_size=128,
            n_groups=1,
            vocab_size=50288,
            initializer_range=0.02,
        ),
        dict(num_hidden_layers=2, hidden_size=512, num_heads=16),
    ),
    # For tests on the CPU: Nemotron-H's kinds of layers.
    "tiny": (
        NemotronHConfig,
        dict(
            layers_block_type=[_KINDS[kind] for kind in "M-*M"],
            hidden_size=96,
            intermediate_size=96,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            mamba_num_heads=8,
            mamba_head_dim=16,
            ssm_state_size=16,
            n_groups=2,
            chunk_size=16,
            vocab_size=256,
            max_position_embeddings=2048,
        ),
        dict(layers_block_type=["linear_attention", "full_attention"], intermediate_size=48, mamba_num_heads=4),
    ),
}


def named(name: str) -> PreTrainedConfig:
    """The config of a named geometry, of a folder, or of an id on the Hub. `ValueError` names the geometries."""
    if name in GEOMETRIES:
        cls, fields, _ = GEOMETRIES[name]
        return cls(**copy.deepcopy(fields))
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"{name!r} is neither a geometry ({', '.join(GEOMETRIES)}) nor a config that can be loaded: {first}"
        ) from None
    family_of_config(config.get_text_config(decoder=True))
    return config


def draft_of(name: str) -> PreTrainedConfig | None:
    """The config of a small draft with the vocabulary of a named geometry; None for others."""
    if name not in GEOMETRIES:
        return None
    cls, fields, changes = GEOMETRIES[name]
    return cls(**copy.deepcopy({**fields, **changes}))


def short_name(name: str) -> str:
    return name if name in GEOMETRIES else Path(name).name


@torch.no_grad()
def build(config: PreTrainedConfig, device: str | torch.device, dtype: torch.dtype, seed: int = 0) -> PreTrainedModel:
    """
    A model with random weights as the module's description says, in eval mode, whose parameters were never anywhere
    but on `device`. Its generation config has no end token, so that it generates as many tokens as it is asked for.
    """
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype).eval()
    model.requires_grad_(False)
    _give_memory(model)
    _give_margin(model)
    model.generation_config.eos_token_id = model.generation_config.bos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def _give_memory(model: PreTrainedModel) -> None:
    """A state that matters: see the module's description. (A and dt: Dao and Gu 2024, section 9.)"""
    for module in model.modules():
        if not hasattr(module, "A_log") or not hasattr(module, "dt_bias"):
            continue
        uniform = torch.rand(module.dt_bias.shape, device=module.dt_bias.device)
        dt = torch.exp(math.log(0.01) + uniform * math.log(10.0))
        module.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus
        module.A_log.copy_((1 + 15 * torch.rand_like(uniform)).log())
        module.D.fill_(0.1)
        module.conv1d.weight.normal_(std=module.conv1d.kernel_size[0] ** -0.5)
        module.in_proj.weight.normal_(std=module.in_proj.in_features**-0.5)
        # dt is near its bias. It multiplies what rounding does to the inputs, and a limit on it, which upstream applies
        # to prompts and not to steps, is out of its reach.
        module.in_proj.weight[-module.dt_bias.shape[0] :].mul_(0.25)
        module.out_proj.weight.normal_(std=module.out_proj.in_features**-0.5)


# The best logit stands out by this share of its size; rounding in bfloat16 moves logits by a few percent.
MARGIN = 0.3


def _give_margin(model: PreTrainedModel) -> None:
    """Makes v + 1 the best token after v, with embeddings that are no larger than that takes."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    if head.weight.data_ptr() == embedding.data_ptr():  # tied: a head of its own, of which a step reads no more
        head.weight = torch.nn.Parameter(torch.empty_like(embedding), requires_grad=False)
    embedding.normal_()
    embedding.mul_(embedding.shape[1] ** 0.5 / embedding.norm(dim=1, keepdim=True))  # rows of one length
    head.weight.copy_(embedding.roll(1, 0)).mul_(embedding.shape[1] ** -0.5)
    ids = torch.randint(0, embedding.shape[0], (1, 16), device=embedding.device)
    scale = 2**-6 / model_scale(model)
    embedding.mul_(scale)
    for _ in range(24):
        logits = model(input_ids=ids, use_cache=False).logits[0].float()
        (best, second), tokens = logits.topk(2).values.unbind(-1), logits.argmax(-1)
        expected = (ids[0] + 1) % embedding.shape[0]
        if torch.equal(tokens, expected) and bool(((best - second) > MARGIN * best.abs()).all()):
            embedding.mul_(2.0)  # or rounding would grow from layer to layer to the size of the logits
            return
        embedding.mul_(2**0.5)
    raise RuntimeError("The embedding does not come through to the logits: these weights give no margin.")


def model_scale(model: PreTrainedModel) -> float:
    """What the model itself multiplies embeddings by (Falcon-H1, Granite)."""
    return float(getattr(model.config, "embedding_multiplier", 1.0) or 1.0)


@torch.no_grad()
def state_share(model: PreTrainedModel) -> float:
    """By how much of their size (root mean square) the logits of a step change where all recurrent states are lost."""
    ids = random_prompt(model, 1, 33)
    logits = []
    for lost in (False, True):
        cache = DynamicCache(config=model.config)
        model(input_ids=ids[:, :-1], cache=cache)
        for layer in cache.layers if lost else ():
            for state in getattr(layer, "recurrent_states", {}).values():
                state.zero_()
        position_ids = torch.tensor([[32]], device=ids.device)
        logits.append(model(input_ids=ids[:, -1:], cache=cache, position_ids=position_ids).logits.float())
    return float((logits[1] - logits[0]).square().mean().sqrt() / logits[0].square().mean().sqrt())


# Sizes, for bounds.


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights that a step reads: all but the embedding, of which it reads a row for each token."""
    embedding = model.get_input_embeddings().weight
    return sum(p.nbytes for p in model.parameters() if p.data_ptr() != embedding.data_ptr())


def state_bytes(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> int:
    """Bytes of the recurrent state of one sequence, all layers together."""
    config = config.get_text_config(decoder=True)
    layers = sum(kind in ("linear_attention", "hybrid", "hybrid_sliding") for kind in config.layer_types)
    return layers * math.prod(family_of_config(config).recurrence_of(config).state_shape) * dtype.itemsize


def random_prompt(model: PreTrainedModel, batch: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Random tokens (batch, columns) int64 on the model's device."""
    generator = torch.Generator().manual_seed(seed)
    vocab = model.config.get_text_config(decoder=True).vocab_size
    return torch.randint(1, vocab, (batch, columns), generator=generator).to(model.device)
