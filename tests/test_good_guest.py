"""An enabled model stays a good guest (invariant 17), and wrappers stay transparent (15, as far as a CPU shows).

Saving, training and evaluation are upstream's own; copies, accelerate's hooks, PEFT, autocast and torch.compile go with
replay; enable and disable can be repeated and leave nothing behind.
"""

from __future__ import annotations

import copy
import functools
import io
import json
import pickle
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from tiny_models import (
    FAMILY_NAMES,
    assert_same_logits,
    copy_of,
    enabled_model,
    mixers,
    random_ids,
    relative_error,
    replay_layers,
    shared_model,
    tiny_model,
    whole_forward,
)
from transformers import AutoModelForCausalLM, DynamicCache

import hf_replayssm
from hf_replayssm import ReplayCache, StaticReplayCache


NEW = 20
# One pure and one hybrid family, one with combined layers: for what does not depend on the family's arithmetic.
SOME = ("mamba2", "bamba", "zamba2")


def generate(model, ids: torch.Tensor, **options):
    options = {"max_new_tokens": NEW, "do_sample": False, "attention_mask": torch.ones_like(ids), **options}
    return model.generate(ids, **options)


def assert_replays(model, reference, ids: torch.Tensor | None = None, calls: object = None) -> None:
    """`model` generates with a replay cache what `reference` does without one, and each of its mixers took part."""
    ids = random_ids(2, 7, seed=1) if ids is None else ids
    out = generate(model, ids, return_dict_in_generate=True, cache_config={"buffer_len": 4})
    assert isinstance(out.cache, hf_replayssm.ReplayCache)
    layers = replay_layers(out.cache)
    assert len(layers) == len(mixers(reference))
    assert all(layer.checkpoint is not None and layer.checkpoint.abs().sum() > 0 for layer in layers)
    assert out.cache.stats.forwards == NEW
    assert torch.equal(out.sequences, generate(reference, ids, use_cache=False))


def assert_is_upstreams(model, family: str) -> None:
    """`model` is an untouched model again: classes, attributes, results and caches."""
    original = shared_model(family)
    assert not hf_replayssm.is_enabled(model)
    assert type(model) is type(original)
    assert [type(module) for module in model.modules()] == [type(module) for module in original.modules()]
    for left, right in zip(model.modules(), original.modules()):
        assert set(vars(left)) == set(vars(right)), set(vars(left)) ^ set(vars(right))
    ids = random_ids(2, 7, seed=2)
    assert torch.equal(whole_forward(model, ids), whole_forward(original, ids))
    outs = [generate(each, ids, return_dict_in_generate=True) for each in (model, original)]
    assert torch.equal(outs[0].sequences, outs[1].sequences)
    assert type(outs[0].cache) is DynamicCache


# ------------------------------------------------------------------------------------------------ enable and disable
def test_enable_works_in_place(family: str):
    model = copy_of(family)
    parameters = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    assert hf_replayssm.enable(model) is model
    assert hf_replayssm.is_enabled(model) and not hf_replayssm.is_enabled(shared_model(family))
    assert isinstance(model, type(shared_model(family)))
    assert type(model).__name__ == type(shared_model(family)).__name__
    for mixer, original in zip(mixers(model), mixers(shared_model(family))):
        assert isinstance(mixer, type(original))
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    assert all(buffers[name] is buffer for name, buffer in model.named_buffers())
    assert model.config.to_dict() == shared_model(family).config.to_dict()
    assert_replays(model, shared_model(family))


def test_disable_gives_upstreams_model_back(family: str):
    model = hf_replayssm.enable(copy_of(family))
    assert_replays(model, shared_model(family))
    hf_replayssm.disable(model)
    assert_is_upstreams(model, family)


@pytest.mark.parametrize("family", SOME)
def test_enable_and_disable_twice(family: str):
    model = copy_of(family)
    hf_replayssm.disable(model)  # was not enabled: nothing to do
    assert_is_upstreams(model, family)
    for _ in range(2):
        hf_replayssm.enable(model, buffer_len=3)
        classes = [type(module) for module in model.modules()]
        hf_replayssm.enable(model, buffer_len=5)
        assert [type(module) for module in model.modules()] == classes
        assert_replays(model, shared_model(family))
        out = generate(model, random_ids(1, 20, seed=3), return_dict_in_generate=True)
        assert out.cache.stats.checkpoint_writes == -(-NEW // 5)
        hf_replayssm.disable(model)
        hf_replayssm.disable(model)
        assert_is_upstreams(model, family)


def test_enabling_one_model_touches_no_other():
    first, second = copy_of("bamba"), copy_of("bamba")
    hf_replayssm.enable(first)
    assert_is_upstreams(second, "bamba")
    hf_replayssm.enable(second)
    hf_replayssm.disable(first)
    assert_is_upstreams(first, "bamba")
    assert_replays(second, shared_model("bamba"))


def test_the_global_switch_twice(tmp_path):
    shared_model("mamba2").save_pretrained(tmp_path)
    for _ in range(2):
        hf_replayssm.enable()
    hf_replayssm.disable()
    assert not hf_replayssm.is_enabled(AutoModelForCausalLM.from_pretrained(tmp_path))
    hf_replayssm.disable()
    hf_replayssm.enable(buffer_len=7)
    try:
        model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    finally:
        hf_replayssm.disable()
    model.generation_config.eos_token_id = None
    assert hf_replayssm.is_enabled(model)
    out = generate(model, random_ids(1, 20, seed=3), return_dict_in_generate=True)
    assert out.cache.stats.checkpoint_writes == -(-NEW // 7)
    hf_replayssm.disable(model)
    assert not hf_replayssm.is_enabled(model)
    assert type(model) is type(shared_model("mamba2"))


def test_a_model_without_a_head(family: str):
    """The backbone alone (AutoModel) replays too."""
    model = copy_of(family)
    base, original = model.base_model, shared_model(family).base_model
    hf_replayssm.enable(base)
    ids = random_ids(2, 12, seed=4)
    with torch.no_grad():
        whole = original(input_ids=ids, use_cache=False).last_hidden_state
        cache = hf_replayssm.ReplayCache(config=base.config, buffer_len=4)
        parts = []
        for start, stop in ((0, 5), (5, 6), (6, 7), (7, 10), (10, 12)):
            out = base(input_ids=ids[:, start:stop], cache=cache, use_cache=True)
            assert out.cache is cache
            parts.append(out.last_hidden_state)
    assert_same_logits(torch.cat(parts, 1), whole)


# ------------------------------------------------------------------------------------------------ saving and copies
def test_saving_an_enabled_model(family: str, tmp_path):
    """Architectures, keys and tensors are upstream's, and no file names this package or its cache."""
    hf_replayssm.enable(model := copy_of(family))
    generate(model, random_ids(1, 5))
    model.generation_config.cache_implementation = "replayssm"
    model.generation_config.cache_config = {"buffer_len": 8}
    (ours, theirs) = (tmp_path / "ours", tmp_path / "theirs")
    model.save_pretrained(ours)
    shared_model(family).save_pretrained(theirs)
    assert model.generation_config.cache_implementation == "replayssm"
    config = json.loads((ours / "config.json").read_text())
    assert config == json.loads((theirs / "config.json").read_text())
    assert config["architectures"] == [type(shared_model(family)).__name__]
    for file in ours.glob("*.json"):
        assert "replay" not in file.read_text().lower(), file.name
    with safe_open(ours / "model.safetensors", "pt") as left, safe_open(theirs / "model.safetensors", "pt") as right:
        assert list(left.keys()) == list(right.keys())
        assert all(torch.equal(left.get_tensor(key), right.get_tensor(key)) for key in left.keys())
    # (How tensors lie in memory may show in the last bit of a product; those of two files lie alike.)
    loaded, plain = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (ours, theirs))
    assert type(loaded) is type(shared_model(family))
    ids = random_ids(1, 9, seed=5)
    assert torch.equal(whole_forward(loaded, ids), whole_forward(plain, ids))


def test_a_saved_model_loads_where_this_package_is_not(tmp_path):
    hf_replayssm.enable(model := copy_of("bamba"))
    model.generation_config.cache_implementation = "replayssm"
    model.save_pretrained(tmp_path)
    code = (
        "import sys, torch; from transformers import AutoModelForCausalLM as A; "
        f"m = A.from_pretrained({str(tmp_path)!r}); m.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4); "
        "assert not any('replayssm' in name for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120)


def test_state_dicts_are_upstreams(family: str):
    model, original = enabled_model(family), shared_model(family)
    assert list(model.state_dict()) == list(original.state_dict())
    model = hf_replayssm.enable(tiny_model(family, seed=5))
    model.load_state_dict(original.state_dict())
    assert_replays(model, original)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": lambda model: _through_torch_save(model),
}


def _through_torch_save(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("way", sorted(COPIES))
def test_copies_of_an_enabled_model(family: str, way: str):
    model = hf_replayssm.enable(copy_of(family), buffer_len=5)
    other = COPIES[way](model)
    assert hf_replayssm.is_enabled(other) and type(other) is type(model)
    assert_replays(other, shared_model(family))
    out = generate(other, random_ids(1, 20, seed=3), return_dict_in_generate=True)
    assert out.cache.stats.checkpoint_writes == -(-NEW // 5)
    hf_replayssm.disable(model)
    assert_replays(other, shared_model(family))
    hf_replayssm.disable(other)
    assert_is_upstreams(other, family)


def test_moving_and_casting_an_enabled_model(family: str):
    model = hf_replayssm.enable(copy_of(family))
    assert_replays(model.double().float(), shared_model(family))
    half = model.to(torch.bfloat16)
    out = generate(half, random_ids(1, 6), return_dict_in_generate=True)
    assert isinstance(out.cache, hf_replayssm.ReplayCache)
    assert replay_layers(out.cache)[0].inputs.tensors()[0].dtype == torch.bfloat16


# ------------------------------------------------------------------------------------------------ training, evaluation
def loss_and_gradients(model, ids: torch.Tensor, **options):
    model.train().requires_grad_(True)
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, **options).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "gradient_checkpointing"])
def test_training_is_upstreams(family: str, checkpointing: bool):
    """Loss and every gradient, bit by bit."""
    ids = random_ids(2, 12, seed=6)
    results = []
    for model in (copy_of(family), hf_replayssm.enable(copy_of(family))):
        if checkpointing:
            model.gradient_checkpointing_enable()
        results.append(loss_and_gradients(model, ids))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1].keys() == results[1][1].keys()
    for name, gradient in results[0][1].items():
        other = results[1][1][name]
        assert (gradient is None and other is None) or torch.equal(gradient, other), name
    assert any(gradient is not None and gradient.abs().sum() > 0 for gradient in results[1][1].values())


def test_a_forward_without_a_cache_is_upstreams(family: str):
    """Defaults included: which cache a bare forward makes is upstream's choice too."""
    ids = random_ids(2, 12, seed=7)
    with torch.no_grad():
        outs = [model(input_ids=ids, labels=ids) for model in (shared_model(family), enabled_model(family))]
    assert torch.equal(outs[0].loss, outs[1].loss) and torch.equal(outs[0].logits, outs[1].logits)
    assert type(outs[0].cache) is type(outs[1].cache)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    with torch.no_grad():
        outs = [
            m(input_ids=ids, attention_mask=mask, use_cache=False)
            for m in (shared_model(family), enabled_model(family))
        ]
    assert torch.equal(outs[0].logits, outs[1].logits)


@pytest.mark.parametrize("family", SOME)
def test_the_trainer(family: str, tmp_path):
    """A short training and an evaluation give the numbers that the untouched model gives."""
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": row, "labels": row} for row in random_ids(6, 10, seed=8)]
    results = []
    for number, model in enumerate((copy_of(family), hf_replayssm.enable(copy_of(family)))):
        model.requires_grad_(True)
        arguments = TrainingArguments(
            output_dir=str(tmp_path / str(number)),
            per_device_train_batch_size=2,
            per_device_eval_batch_size=3,
            max_steps=2,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            seed=1,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows)
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        after = trainer.evaluate()["eval_loss"]
        predictions = trainer.predict(rows).predictions
        predictions = predictions[0] if isinstance(predictions, tuple) else predictions
        results.append((before, after, torch.as_tensor(predictions)))
    assert results[0][:2] == results[1][:2]
    assert torch.equal(results[0][2], results[1][2])
    assert results[0][0] != results[0][1]


def test_training_then_generating(family: str):
    """The weights that a training step changed are the ones that replay uses: nothing was cached at enable."""
    model = hf_replayssm.enable(copy_of(family))
    loss_and_gradients(model, random_ids(2, 12, seed=9))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.05 * parameter.grad.sign() * parameter.abs().mean()
    model.zero_grad()
    model.eval().requires_grad_(False)
    plain = copy.deepcopy(model)
    hf_replayssm.disable(plain)
    assert (
        relative_error(whole_forward(plain, random_ids(1, 9)), whole_forward(shared_model(family), random_ids(1, 9)))
        > 1e-3
    )
    assert_replays(model, plain)


# ------------------------------------------------------------------------------------------------ accelerate
def hooked(model, way: str, directory):
    from accelerate import cpu_offload, disk_offload, dispatch_model

    device = torch.device("cpu")
    if way == "cpu_offload":
        return cpu_offload(model, execution_device=device)
    if way == "disk_offload":
        return disk_offload(model, str(directory), execution_device=device)
    names = [name for name, _ in model.named_children()]
    # Hooks that keep a bound `_old_forward` on every module; one part offloaded to the disk or held on the "cpu".
    return dispatch_model(
        model, device_map=dict.fromkeys(names, "cpu"), main_device="cpu", force_hooks=True, offload_dir=str(directory)
    )


@pytest.mark.parametrize("order", ["enable_first", "hooks_first"])
@pytest.mark.parametrize("way", ["cpu_offload", "disk_offload", "dispatch"])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_accelerates_hooks(family: str, way: str, order: str, tmp_path):
    """Hooks keep the forward they found: enable must reach it, whichever came first, and the weights are on `meta`."""
    if way == "disk_offload" and family not in SOME:
        pytest.skip("one way of offloading is enough for the other families")
    model = copy_of(family)
    if order == "enable_first":
        model = hooked(hf_replayssm.enable(model), way, tmp_path)
    else:
        model = hf_replayssm.enable(hooked(model, way, tmp_path))
    assert any(hasattr(module, "_hf_hook") for module in model.modules())
    assert_replays(model, shared_model(family))
    hf_replayssm.disable(model)
    ids = random_ids(1, 7, seed=10)
    assert torch.equal(whole_forward(model, ids), whole_forward(shared_model(family), ids))
    out = generate(model, ids, return_dict_in_generate=True)
    assert type(out.cache) is DynamicCache
    hf_replayssm.enable(model)
    assert_replays(model, shared_model(family))


@pytest.mark.parametrize("family", SOME)
def test_removing_the_hooks_of_an_enabled_model(family: str):
    from accelerate.hooks import remove_hook_from_module

    model = hf_replayssm.enable(hooked(copy_of(family), "dispatch", "."))
    remove_hook_from_module(model, recurse=True)
    assert_replays(model, shared_model(family))
    hf_replayssm.disable(model)
    assert_is_upstreams_classes(model, family)


def assert_is_upstreams_classes(model, family: str) -> None:
    original = shared_model(family)
    assert [type(module) for module in model.modules()] == [type(module) for module in original.modules()]


def test_a_device_map(family: str, tmp_path):
    shared_model(family).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, device_map={"": "cpu"}).eval()
    model.generation_config.eos_token_id = None
    assert_replays(hf_replayssm.enable(model), shared_model(family))


def test_a_device_map_with_one_layer_on_the_disk(family: str, tmp_path):
    """Its weights come when its modules run, and its checkpoint and buffer stay where the activations are."""
    shared_model(family).save_pretrained(tmp_path)
    prefix = shared_model(family).base_model_prefix
    layers = next(module for name, module in shared_model(family).named_modules() if name == f"{prefix}.layers")
    offloaded = next(
        number
        for number, layer in enumerate(layers)
        if any(part in mixers(shared_model(family)) for part in layer.modules())
    )
    device_map = {name: "cpu" for name, module in shared_model(family).named_children() if name != prefix}
    device_map |= {
        f"{prefix}.{name}": "cpu"
        for name, _ in getattr(shared_model(family), prefix).named_children()
        if name != "layers"
    }
    device_map |= {
        f"{prefix}.layers.{number}": "disk" if number == offloaded else "cpu" for number in range(len(layers))
    }
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, device_map=device_map, offload_folder=tmp_path / "offloaded"
    ).eval()
    model.generation_config.eos_token_id = None
    assert any(parameter.is_meta for parameter in model.parameters())
    assert_replays(hf_replayssm.enable(model), shared_model(family))


# ------------------------------------------------------------------------------------------------ PEFT
def with_lora(model):
    from peft import LoraConfig, get_peft_model

    projections = "in_proj", "in_proj_qkvz", "in_proj_ba", "q_proj", "v_proj", "b_proj", "f_a_proj"
    targets = [name for name, _ in model.named_modules() if name.endswith(projections)]
    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False)).eval()


@pytest.mark.parametrize("order", ["enable_first", "peft_first", "enable_the_wrapper"])
def test_lora_on_the_projections(family: str, order: str):
    """Projections are called as modules, so that adapters take part; merged and unmerged."""
    reference = with_lora(copy_of(family))
    if order == "enable_first":
        model = with_lora(hf_replayssm.enable(copy_of(family)))
    elif order == "peft_first":
        model = with_lora(copy_of(family))
        hf_replayssm.enable(model.get_base_model())
    else:
        model = hf_replayssm.enable(with_lora(copy_of(family)))
    ids = random_ids(2, 7, seed=11)
    assert relative_error(whole_forward(reference, ids), whole_forward(shared_model(family), ids)) > 1e-2
    assert_replays(model, reference, ids)
    merged = model.merge_and_unload()
    assert_replays(merged, reference.merge_and_unload(), ids)


def test_training_an_adapter_is_upstreams():
    ids = random_ids(2, 10, seed=12)
    results = []
    for enabled in (False, True):
        model = with_lora(hf_replayssm.enable(copy_of("bamba")) if enabled else copy_of("bamba")).train()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        results.append([parameter.grad for parameter in model.parameters() if parameter.requires_grad])
    assert len(results[0]) == len(results[1]) > 0
    assert all(torch.equal(left, right) for left, right in zip(*results))


# ------------------------------------------------------------------------------------------------ autocast, compile
def test_autocast(family: str):
    """Under bf16 autocast the cached logits stay as near to the truth as the whole forward's, at every phase."""
    ids = random_ids(1, 30, seed=13)
    truth = whole_forward(shared_model(family), ids).double()
    model = enabled_model(family)
    cache = hf_replayssm.ReplayCache(config=model.config, buffer_len=4)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        whole = shared_model(family)(input_ids=ids, use_cache=False).logits.double()
        parts = []
        for start, stop in [(0, 8)] + [(at, at + 1) for at in range(8, 22)] + [(22, 27), (27, 30)]:
            parts.append(model(input_ids=ids[:, start:stop], cache=cache, use_cache=True).logits)
    ours = torch.cat(parts, 1).double()
    assert (ours - truth).norm() < 3 * (whole - truth).norm()
    for layer in replay_layers(cache):
        assert layer.checkpoint.dtype == torch.float32


@pytest.mark.parametrize("first_under_autocast", [False, True])
def test_entering_and_leaving_autocast(family: str, first_under_autocast: bool):
    """Buffers that took the dtype of the first forward meet another one: it works, or it is a clear error."""
    ids = random_ids(1, 20, seed=14)
    truth = whole_forward(shared_model(family), ids)
    model = enabled_model(family)
    cache = hf_replayssm.ReplayCache(config=model.config, buffer_len=4)
    parts = []
    with torch.no_grad():
        for number, (start, stop) in enumerate([(0, 6), (6, 7), (7, 8), (8, 12), (12, 13), (13, 20)]):
            with torch.autocast("cpu", torch.bfloat16, enabled=(number >= 2) != first_under_autocast):
                parts.append(model(input_ids=ids[:, start:stop], cache=cache, use_cache=True).logits.float())
    error = (torch.cat(parts, 1) - truth).norm() / truth.norm()
    assert error < 0.15, error


@pytest.mark.parametrize("family", SOME)
def test_a_compiled_model(family: str):
    """`enable` takes what torch.compile returned; here with a backend that compiles nothing."""
    compiled = torch.compile(copy_of(family), backend="eager")
    model = hf_replayssm.enable(compiled)
    assert model is compiled
    assert hf_replayssm.is_enabled(compiled)
    assert_replays(compiled, shared_model(family))
    ids = random_ids(2, 9, seed=15)
    cache = hf_replayssm.ReplayCache(config=compiled.config, buffer_len=4)
    parts = []
    with torch.no_grad():
        for start, stop in ((0, 5), (5, 6), (6, 9)):
            out = compiled(input_ids=ids[:, start:stop], cache=cache, use_cache=True)
            assert out.cache is cache
            parts.append(out.logits)
    assert_same_logits(torch.cat(parts, 1), whole_forward(shared_model(family), ids))
    hf_replayssm.disable(compiled)
    assert not hf_replayssm.is_enabled(compiled)


def test_compiled_after_enable():
    model = hf_replayssm.enable(copy_of("bamba"))
    compiled = torch.compile(model, backend="eager")
    assert hf_replayssm.is_enabled(compiled)
    assert_replays(compiled, shared_model("bamba"))


# ------------------------------------------------------------------------------------------------ importing
@pytest.mark.parametrize("missing", ["triton", "peft,accelerate,datasets"])
def test_import_without_optional_packages(missing: str):
    """Neither triton nor anything that only some features need is imported with the package."""
    code = (
        "import sys\n"
        f"for name in {missing!r}.split(','): sys.modules[name] = None\n"
        "import torch, hf_replayssm\n"
        "from transformers import BambaConfig\n"
        "config = BambaConfig(hidden_size=32, num_hidden_layers=1, mamba_n_heads=4, mamba_d_head=16)\n"
        "print(hf_replayssm.ReplayCache(config=config))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=_environment())
    if missing != "triton" and done.returncode and "hf_replayssm" not in done.stderr:
        pytest.skip("transformers itself does not import without these")
    assert done.returncode == 0, done.stderr


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def test_importing_enables_nothing():
    code = (
        "import hf_replayssm, transformers\n"
        "from tiny_models import copy_of\n"
        "model = copy_of('bamba')\n"
        "assert not hf_replayssm.is_enabled(model)\n"
        "assert type(model).__module__.startswith('transformers.')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120, env=_environment())


@pytest.mark.parametrize("make", [ReplayCache, functools.partial(StaticReplayCache, max_cache_len=60)])
@torch.no_grad()
def test_a_default_device_that_is_not_where_the_positions_are(make):
    """After `torch.set_default_device("cuda")` a tensor that is made without a device is not on the CPU."""
    model, name = enabled_model("falcon_h1"), "falcon_h1"
    rows = [random_ids(1, length, seed=length)[0].tolist() for length in (20, 14)]
    ids, mask = torch.tensor([rows[0], [0] * 6 + rows[1]]), torch.ones(2, 20, dtype=torch.long)
    mask[1, :6] = 0
    counts, beams = torch.tensor([-2, 0]), torch.tensor([1, 0])
    cache = make(config=model.config, buffer_len=3, max_window=4)
    with torch.device("meta"):
        model(input_ids=ids[:, :9], attention_mask=mask[:, :9], cache=cache)
        model(input_ids=ids[:, 9:11], attention_mask=mask[:, 9:11] * 0, cache=cache)
        cache.activate_past_recording()
        model(input_ids=ids[:, 9:13], cache=cache)
        cache.crop(-1)
        cache.crop(counts)
        cache.crop([0, -2])
        model(input_ids=ids[:, 10:15], cache=cache)
        cache.reorder_cache(beams)
        cache.batch_repeat_interleave(2)
        cache.stats, cache.layers[0].recurrent_states, cache.layers[0].conv_states
        new = ids[:, 15:].flip(0).repeat_interleave(2, dim=0)
        logits = model(input_ids=new, cache=cache).logits
    expected = [
        whole_forward(shared_model(name), torch.tensor([row]))[0, -5:] for row in (rows[1], rows[1], rows[0], rows[0])
    ]
    assert_same_logits(logits, torch.stack(expected))


@pytest.mark.parametrize("implementation", ["replayssm", "replayssm_static"])
def test_generate_with_such_a_default_device(implementation):
    model, ids, mask = enabled_model("bamba"), random_ids(2, 7), torch.ones(2, 7, dtype=torch.long)
    mask[0, :3] = 0
    expected = generate(model, ids, attention_mask=mask)
    one, draft = generate(model, ids[1:]), hf_replayssm.enable(tiny_model("bamba", seed=1))
    chosen = {"cache_implementation": implementation, "max_new_tokens": NEW, "do_sample": False}
    with torch.device("meta"):
        assert torch.equal(generate(model, ids, attention_mask=mask, **chosen), expected)
        assert torch.equal(generate(model, ids[1:], prompt_lookup_num_tokens=3, **chosen), one)
        assert torch.equal(generate(model, ids[1:], assistant_model=draft, **chosen), one)
        for source in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": draft}):
            tokens = hf_replayssm.speculative_generate(model, ids, mask, **source, **chosen)
            assert torch.equal(tokens, expected)
