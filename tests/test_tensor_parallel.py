"""transformers' tensor parallelism (`tp_plan="auto"`) under replay: processes with a share of the weights each.

What upstream's plan shards is called as a module, so replay sees whole activations; where the plan leaves mixers whole,
every process has their state.
"""

from __future__ import annotations

import json

import pytest
import several
import torch
from tiny_models import FAMILIES, tiny_model


# Families for which upstream has a plan, with a part of what it shards. "in_proj" of a mixer is gathered behind it.
PLANS = {
    "bamba": "lm_head",
    "nemotron_h": "mixer.experts.up_proj",
    "falcon_h1": "lm_head",
    "granitemoehybrid": "experts.down_proj",
    "jamba": "feed_forward.experts.down_proj",
    "qwen3_next": "linear_attn.in_proj_qkvz",
    "olmo_hybrid": "self_attn.q_proj",
    "kimi_linear": "mlp.experts.down_proj",
    "qwen3_5_text": "linear_attn.in_proj_qkv",
    "qwen3_5_moe_text": "linear_attn.in_proj_qkv",
    "lara_mini": "linear_attn.out_proj",
    "bailing_hybrid": "mlp.experts.down_proj",
}

SOURCE = """
    import faulthandler, json, os, sys
    import torch
    import torch.distributed as dist
    import transformers
    from tiny_models import random_ids, relative_error
    from transformers import AutoModelForCausalLM

    import hf_replayssm

    faulthandler.dump_traceback_later(200, exit=True)  # processes that wait for each other say where
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    transformers.logging.set_verbosity_error()
    folder, kind, names, rank = sys.argv[1], sys.argv[2], sys.argv[3:], int(os.environ["RANK"])
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    ids = random_ids(2, 20, seed=1).to(device)
    mask = torch.ones_like(ids[:, :9])
    mask[0, :4] = 0
    options = dict(max_new_tokens=12, do_sample=False)

    @torch.no_grad()
    def compare(name):
        plain = AutoModelForCausalLM.from_pretrained(folder + "/" + name).eval().to(device)
        model = AutoModelForCausalLM.from_pretrained(folder + "/" + name, tp_plan="auto").eval()
        shapes = {key: parameter.shape for key, parameter in plain.named_parameters()}
        sharded = []
        for key, parameter in model.named_parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            if local.shape != shapes[key]:
                sharded.append(key)
        hf_replayssm.enable(model)
        expected = plain(input_ids=ids, use_cache=False).logits
        cache = hf_replayssm.ReplayCache(config=model.config, buffer_len=4)
        logits, at = [], 0
        for stop in (6, 7, 8, 12):
            logits.append(model(input_ids=ids[:, at:stop], cache=cache).logits)
            at = stop
        cache.activate_past_recording()
        model(input_ids=ids[:, [0, 3, 1, 2]], cache=cache)
        cache.crop(-4)
        logits += [model(input_ids=ids[:, t : t + 1], cache=cache).logits for t in range(12, 20)]
        given = dict(input_ids=ids[:, :9], attention_mask=mask, **options)
        tokens = model.generate(**given)
        found = {
            "name": name,
            "error": relative_error(torch.cat(logits, 1), expected),
            "whole": relative_error(model(input_ids=ids, use_cache=False).logits, expected),
            "sharded": sharded,
            # Each row alone: a padding mask leaks into some of upstream's forwards without a cache.
            "tokens": all(
                torch.equal(row[start:], plain.generate(row[None, start:9], use_cache=False, **options)[0])
                for row, start in zip(tokens, (4, 0))
            ),
        }
        one = dict(input_ids=ids[1:, :9], attention_mask=mask[1:], **options)
        drafted = model.generate(prompt_lookup_num_tokens=3, **one)
        found["drafts"] = torch.equal(drafted, tokens[1:])
        found["speculation"] = torch.equal(
            hf_replayssm.speculative_generate(model, **given, prompt_lookup_num_tokens=3), tokens
        )
        return found

    for name in names:
        found = compare(name)
        if rank == 0:
            print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()
"""


def check(names, folder, kind: str) -> None:
    for name in names:
        tiny_model(name).save_pretrained(folder / name)
    out = several.succeed(several.launch(SOURCE, folder, kind, *names))[0]
    found = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert [one["name"] for one in found] == list(names)
    for one in found:
        assert any(PLANS[one["name"]] in key for key in one["sharded"]), one
        assert one["error"] < 2e-5 and one["whole"] < 2e-5, one
        assert one["tokens"] and one["drafts"] and one["speculation"], one


def test_two_processes_are_as_good_as_one(tmp_path):
    check(["qwen3_next", "bamba"], tmp_path, "cpu")


@pytest.mark.slow
def test_every_family_with_a_plan(tmp_path):
    check(list(PLANS), tmp_path, "cpu")


def test_families_without_a_plan_are_the_others():
    """What the README says of them; a release that brings a plan for one is noticed here."""
    from tiny_models import tiny_config

    without = {name for name in FAMILIES if not getattr(tiny_config(name), "base_model_tp_plan", None)}
    assert without == {"mamba2", "mamba", "falcon_mamba", "zamba", "zamba2"} == set(FAMILIES) - set(PLANS)


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("family", PLANS)
def test_two_gpus_are_as_good_as_one(family, tmp_path):
    check([family], tmp_path, "cuda")
