"""Is replay right with this installation? A family's self-check, on a tiny random model of the same class.

Run by `hf-replayssm doctor --check`, above all with a transformers release outside the tested range. Each check holds
logits through the replay cache against one whole forward of the *untouched* model, so it finds what changed upstream:
in a mixer, in the cache, or in how the one is called by the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch


if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


TOLERANCE = 1e-4  # of the largest logit of a position, in fp32
BUFFER_LEN = 4
LENGTH = 23  # tokens of the whole sequence: neither a multiple of the buffer nor of the scan's chunk
VOCAB = 61

_ATTENTION = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
_MAMBA = {"mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 10, "mamba_chunk_size": 8}

# Sizes of the tiny model of each family: both kinds of layers where the family has both, two groups of two heads.
_SIZES: dict[str, dict[str, Any]] = {
    "mamba2": {
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 10,
        "n_groups": 2,
        "num_hidden_layers": 2,
        "chunk_size": 8,
    },
    "bamba": {**_ATTENTION, **_MAMBA, "num_hidden_layers": 3, "mamba_d_head": 16, "attn_layer_indices": [1]},
    "zamba2": {
        **_ATTENTION,
        "num_key_value_heads": 2,  # its adapters need as many as there are heads
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
        "mamba_d_state": 10,
        "mamba_ngroups": 2,
        "n_mamba_heads": 4,
        "chunk_size": 8,
        "adapter_rank": 4,
        "num_mem_blocks": 1,
    },
    "nemotron_h": {
        **_ATTENTION,
        "head_dim": 16,
        "layers_block_type": ["linear_attention", "full_attention", "linear_attention", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 10,
        "n_groups": 2,
        "chunk_size": 8,
    },
    "falcon_h1": {**_ATTENTION, **_MAMBA, "num_hidden_layers": 2, "mamba_d_ssm": 64, "mamba_d_head": 16},
    "granitemoehybrid": {
        **_ATTENTION,
        **_MAMBA,
        "num_hidden_layers": 3,
        "mamba_d_head": 16,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "shared_intermediate_size": 32,
    },
    "mamba": {"state_size": 10, "num_hidden_layers": 2, "time_step_rank": 4},
    "falcon_mamba": {"state_size": 10, "num_hidden_layers": 2, "time_step_rank": 4},
    "jamba": {
        **_ATTENTION,
        "num_hidden_layers": 3,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "mamba_d_state": 10,
        "mamba_dt_rank": 4,
    },
    "zamba": {
        **_ATTENTION,
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "mamba_d_state": 10,
        "mamba_dt_rank": 4,
    },
}
# What a tiny model takes over from the given one: everything that chooses a path through the mixer, and no size.
_KEPT = (
    "use_bias",
    "use_conv_bias",
    "add_bias_linear",
    "mamba_conv_bias",
    "mamba_proj_bias",
    "projectors_bias",
    "conv_kernel",
    "mamba_d_conv",
    "hidden_act",
    "hidden_mamba_act",
    "mamba_hidden_act",
    "mlp_hidden_act",
    "time_step_limit",
    "time_step_min",
    "time_step_max",
    "time_step_floor",
    "mamba_rms_norm",
    "mamba_norm_before_gate",
    "ssm_multipliers",
    "ssm_in_multiplier",
    "ssm_out_multiplier",
    "mlp_multipliers",
    "key_multiplier",
    "attention_in_multiplier",
    "attention_out_multiplier",
    "position_embedding_type",
    "use_mem_rope",
    "use_shared_attention_adapter",
    "n_mamba_heads",
    "mixer_rms_eps",
)


@dataclass(frozen=True)
class CheckResult:
    """One check of one family. `error` is the largest deviation, relative to the largest logit of its position."""

    family: str
    check: str
    ok: bool
    error: float | None  # None where the check raised
    detail: str

    def to_dict(self) -> dict[str, Any]:
        """As plain types."""
        return asdict(self)


def self_check(
    model_type: str, *, config: PreTrainedConfig | None = None, device: str | torch.device = "cpu", seed: int = 0
) -> list[CheckResult]:
    """Run the checks of one family, on a tiny random model in fp32.

    - two chunks against one forward: prefill, then the rest as one long chunk;
    - steps over a flush: prefill, then single tokens over more than two buffers;
    - rejected window: a wrong window is verified and cropped, once in part and once as a whole, then the right tokens
      go on;
    - left padding: a padded row of a batch against the same row alone, its single steps included.

    Args:
        model_type: the family, a key of `hf_replayssm.families.FAMILIES`.
        config: the config of a real model, whose biases, limits, norms and multipliers the tiny one takes over.
        device: where to run; the ops' backend is chosen by it as always.
        seed: of the random weights and tokens.

    Returns:
        One result per check. A check that raises is not ok, and its detail is the exception.

    Raises:
        ValueError: an unknown family.
    """
    model = tiny_model(model_type, config=config, seed=seed).to(device)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (2, LENGTH), generator=generator, device="cpu").to(device)
    wrong = torch.randint(3, VOCAB, (2, LENGTH), generator=generator, device="cpu").to(device)
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        results = [_state_matters(model_type, model, ids, expected)]
        try:
            import hf_replayssm

            hf_replayssm.enable(model, buffer_len=BUFFER_LEN)
        except Exception as error:  # whatever it is, it is what the user wants to read
            return results + [CheckResult(model_type, "enable", False, None, _describe(error))]
        for name, check in _CHECKS.items():
            results.append(_run(model_type, name, check, model, ids, wrong, expected))
    return results


def run_self_checks(
    model_types: Iterable[str] | None = None, *, device: str | torch.device = "cpu", seed: int = 0
) -> list[CheckResult]:
    """`self_check` of several families, by default of all."""
    if model_types is None:
        from hf_replayssm.families import FAMILIES

        model_types = list(FAMILIES)
    return [result for name in model_types for result in self_check(name, device=device, seed=seed)]


# ------------------------------------------------------------------------------------------------------- checks
def _two_chunks(model, ids, wrong, expected):
    split = 9
    cache = _cache(model)
    logits = [_feed(model, cache, ids[:, :split]), _feed(model, cache, ids[:, split:])]
    return torch.cat(logits, dim=1), expected, f"{split} tokens, then {LENGTH - split}"


def _steps_over_a_flush(model, ids, wrong, expected):
    prefill = 5
    cache = _cache(model)
    logits = [_feed(model, cache, ids[:, :prefill])]
    before, steps = cache.stats.checkpoint_writes, LENGTH - prefill
    logits += [_feed(model, cache, ids[:, t : t + 1]) for t in range(prefill, LENGTH)]
    writes, expected_writes = (cache.stats.checkpoint_writes - before) // len(ids), math.ceil(steps / BUFFER_LEN)
    if writes > expected_writes:
        raise RuntimeError(f"the state was written {writes} times in {steps} steps, not {expected_writes}: no replay")
    return torch.cat(logits, dim=1), expected, f"{steps} steps, the state written {writes} times"


def _rejected_window(model, ids, wrong, expected):
    prefill, window, kept = 6, 5, 2
    # A small max_window, so that the buffer fills: older tokens are folded, newer ones still cropped.
    cache = _cache(model, max_window=window + 2)
    cache.activate_past_recording()
    logits = [_feed(model, cache, ids[:, :prefill])]
    seen = prefill
    # In part: `kept` right tokens and then wrong ones, of which only the wrong ones go.
    draft = torch.cat([ids[:, seen : seen + kept], wrong[:, : window - kept]], dim=1)
    logits.append(_feed(model, cache, draft)[:, :kept])
    cache.crop(-(window - kept))
    seen += kept
    # As a whole, at another phase of the buffer.
    logits.append(_feed(model, cache, ids[:, seen : seen + 1]))
    seen += 1
    _feed(model, cache, wrong[:, :window])
    cache.crop(-window)
    logits.append(_feed(model, cache, ids[:, seen : seen + window]))
    cache.crop(0)
    seen += window
    logits += [_feed(model, cache, ids[:, t : t + 1]) for t in range(seen, LENGTH)]
    return torch.cat(logits, dim=1), expected, f"windows of {window}, {window - kept} and {window} tokens rejected"


def _left_padding(model, ids, wrong, expected):
    pads, prefill = 3, 9
    batch = torch.cat([torch.zeros_like(ids[:1, :pads]), ids[:1, : LENGTH - pads]], dim=1)
    batch = torch.cat([batch, ids[1:]], dim=0)  # row 0 has `pads` pads in front, row 1 none
    mask = torch.ones_like(batch)
    mask[0, :pads] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = _cache(model)
    logits, bounds = [], [0, prefill, *range(prefill + 1, LENGTH + 1)]
    for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
        piece = _feed(model, cache, batch[:, start:stop], mask[:, :stop], positions[:, start:stop])
        logits.append(piece)
    actual = torch.cat(logits, dim=1)
    # The padded row, moved to where it would be without its pads.
    actual = torch.cat([actual[0, pads:], actual[1]])
    return actual, torch.cat([expected[0, : LENGTH - pads], expected[1]]), f"{pads} pads before one of two rows"


_CHECKS: dict[str, Callable] = {
    "two chunks against one forward": _two_chunks,
    "steps over a flush": _steps_over_a_flush,
    "rejected window": _rejected_window,
    "left padding": _left_padding,
}


def _cache(model, **fields):
    from hf_replayssm import ReplayCache

    return ReplayCache(config=model.config, buffer_len=BUFFER_LEN, **fields)


def _feed(model, cache, ids, attention_mask=None, position_ids=None):
    """Logits (batch, T, vocab) of T more tokens."""
    inputs = {"input_ids": ids, "attention_mask": attention_mask, "position_ids": position_ids}
    output = model(**{k: v for k, v in inputs.items() if v is not None}, cache=cache, use_cache=True)
    if output.cache is not cache:
        raise RuntimeError("the model did not use the cache that was passed to it")
    return output.logits


def _run(family, name, check, model, ids, wrong, expected) -> CheckResult:
    try:
        actual, expected, detail = check(model, ids, wrong, expected)
    except Exception as error:  # a check that raises has failed, and the others still say something
        return CheckResult(family, name, False, None, _describe(error))
    error = relative_error(actual, expected)
    return CheckResult(family, name, error <= TOLERANCE, error, detail)


def _state_matters(family, model, ids, expected) -> CheckResult:
    """The checks mean something only if a wrong state shows: without its recurrent state, the model says other things.

    Through transformers' own cache, whose convolution and attention stay as they are.
    """
    from transformers import DynamicCache

    name, half = "the state matters", LENGTH // 2
    positions = torch.arange(LENGTH, device=ids.device).expand(len(ids), -1)
    try:
        cache = DynamicCache(config=model.config)
        _feed(model, cache, ids[:, :half], position_ids=positions[:, :half])
        for layer in cache.layers:
            for state in getattr(layer, "recurrent_states", {}).values():
                if state is not None:
                    state.zero_()
        # One token: of several, transformers' own cached forward drops the state of some families.
        logits = _feed(model, cache, ids[:, half : half + 1], position_ids=positions[:, half : half + 1])
    except Exception as error:  # as in _run
        return CheckResult(family, name, False, None, _describe(error))
    error = relative_error(logits, expected[:, half : half + 1])
    return CheckResult(family, name, error > 0.05, error, "a zeroed state moves the logits, so the checks would see it")


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest deviation of (..., vocab) logits, relative to the largest logit of a position; inf where not finite."""
    if not torch.isfinite(actual).all():
        return math.inf
    actual, expected = actual.cpu().double(), expected.cpu().double()
    scale = expected.abs().amax(dim=-1, keepdim=True).clamp(min=1e-6)
    return ((actual - expected).abs() / scale).max().item()


def _describe(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


# ------------------------------------------------------------------------------------------------------- models
def tiny_config(model_type: str, like: PreTrainedConfig | None = None) -> PreTrainedConfig:
    """Config of the family's tiny model, with the features (not the sizes) of the config `like`.

    Raises ValueError for a family that has no self-check.
    """
    from transformers import AutoConfig

    if model_type not in _SIZES:
        raise ValueError(f"No self-check for model type {model_type!r}. There is one for {', '.join(_SIZES)}.")
    kept = {name: getattr(like, name) for name in _KEPT if getattr(like, name, None) is not None}
    fields = {"vocab_size": VOCAB, "hidden_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return AutoConfig.for_model(model_type, **{**kept, **fields, **_SIZES[model_type]})


def tiny_model(model_type: str, config: PreTrainedConfig | None = None, seed: int = 0) -> PreTrainedModel:
    """A tiny model of the family with random weights, in fp32 and eval mode."""
    from transformers import AutoModelForCausalLM

    config = tiny_config(model_type, config)
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they were
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        _let_the_state_matter(model)
    return model


@torch.no_grad()
def _let_the_state_matter(model: PreTrainedModel) -> None:
    """Redraw the mixers' weights. As initialised, the skip `D x` drowns the state, and a lost state goes unseen."""
    for mixer in model.modules():
        if not (hasattr(mixer, "A_log") and hasattr(mixer, "conv1d")):
            continue
        mixer.in_proj.weight.normal_(std=1.0 / math.sqrt(mixer.in_proj.weight.shape[1]))
        mixer.out_proj.weight.normal_(std=1.0 / math.sqrt(mixer.out_proj.weight.shape[1]))
        mixer.conv1d.weight.normal_(mean=0.4, std=0.6)
        if mixer.conv1d.bias is not None:
            mixer.conv1d.bias.normal_(std=0.2)
        mixer.D.normal_(std=0.1)
        if hasattr(mixer, "dt_bias"):  # Mamba-2
            dt_bias = mixer.dt_bias
        elif hasattr(mixer, "x_proj_weight"):  # Zamba
            select, dt_bias = mixer.x_proj_weight, mixer.dt_proj_bias
            select.normal_(std=1.0 / math.sqrt(select.shape[-1]))
            mixer.dt_proj_weight.normal_(std=0.1)
        else:
            select, dt_bias = mixer.x_proj.weight, mixer.dt_proj.bias
            select.normal_(std=1.0 / math.sqrt(select.shape[-1]))
            mixer.dt_proj.weight.normal_(std=0.1)
        # dt from 0.05 to 0.5 and A from -0.4 to -0.03: a memory of some ten to a thousand tokens.
        dt = torch.exp(torch.empty_like(dt_bias).uniform_(math.log(0.05), math.log(0.5)))
        dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus
        mixer.A_log.uniform_(math.log(0.03), math.log(0.4))
