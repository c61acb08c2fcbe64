"""Enabled models in the tools that people use: pipelines, servers, quantised weights. (PEFT: test_good_guest.py.)

What needs a package that the suite does not install is passed over where it is missing.
"""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request

import pytest
import torch
from tiny_models import FAMILY_NAMES, mixers, random_ids, relative_error, replay_layers, tiny_model
from tiny_text import save_tiny, tiny_text_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, pipeline

import hf_replayssm
from hf_replayssm import ReplayCache
from hf_replayssm.evaluation.finished import weights_digest


@pytest.fixture
def caches(monkeypatch):
    """The replay caches that are made from here on."""
    made, init = [], ReplayCache.__init__

    def record(self, *args, **kwargs):
        made.append(self)
        init(self, *args, **kwargs)

    monkeypatch.setattr(ReplayCache, "__init__", record)
    return made


# ----------------------------------------------------------------------------------------------- pipelines
PROMPTS = ["The state is", "A window of drafts", "Naïve"]


def greedy(generator, prompts=PROMPTS, **options) -> list[str]:
    options = {"max_new_tokens": 12, "do_sample": False, "return_full_text": False, **options}
    return [
        one["generated_text"]
        for one in sum((row if isinstance(row, list) else [row] for row in generator(prompts, **options)), [])
    ]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_text_generation_pipeline(batch_size, caches):
    """A batch is padded on the left by the pipeline."""
    plain = pipeline("text-generation", model=tiny_text_model(), tokenizer=tiny_tokenizer())
    expected = greedy(plain, cache_implementation="dynamic")
    model = hf_replayssm.enable(tiny_text_model())
    generator = pipeline("text-generation", model=model, tokenizer=tiny_tokenizer())
    assert greedy(generator, batch_size=batch_size) == expected
    assert caches and all(cache.stats.tokens > 0 for cache in caches)
    assert greedy(generator, cache_implementation="replayssm_static") == expected
    assert greedy(generator, prompt_lookup_num_tokens=3) == expected


def test_a_pipeline_that_loads_the_model(tmp_path, caches):
    hf_replayssm.enable()
    generator = pipeline("text-generation", model=str(save_tiny(tmp_path)))
    assert hf_replayssm.is_enabled(generator.model)
    plain = pipeline("text-generation", model=tiny_text_model(), tokenizer=tiny_tokenizer())
    assert greedy(generator) == greedy(plain)
    assert caches


def test_a_pipeline_with_a_draft(caches):
    draft = tiny_text_model(seed=1)
    model = hf_replayssm.enable(tiny_text_model())
    generator = pipeline("text-generation", model=model, tokenizer=tiny_tokenizer(), assistant_model=draft)
    assert greedy(generator) == greedy(pipeline("text-generation", model=tiny_text_model(), tokenizer=tiny_tokenizer()))
    assert hf_replayssm.is_enabled(draft) and any(cache.stats.crops for cache in caches)


# ----------------------------------------------------------------------------------------------- transformers serve
TEMPLATE = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}assistant:"


def ask(port: int, path: str, body: dict | None = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.read()


@pytest.fixture
def serve():
    """Starts `transformers serve` in this process, which is how it comes to know of replay."""
    for package in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(package)
    from transformers.cli.serve import Serve

    started = []

    def start(folder) -> int:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        server = Serve(force_model=str(folder), device="cpu", host="127.0.0.1", port=port, non_blocking=True)
        started.append(server)
        for _ in range(100):
            try:
                ask(port, "/health")
                return port
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        raise TimeoutError("the server does not answer")

    yield start
    for server in started:
        server.kill_server()


def test_transformers_serve(serve, tmp_path, caches):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    save_tiny(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    hf_replayssm.enable(buffer_len=4)
    port = serve(tmp_path)
    messages = [{"role": "user", "content": "The state is"}]
    body = {"model": str(tmp_path), "messages": messages, "max_tokens": 12, "temperature": 0}
    answer = json.loads(ask(port, "/v1/chat/completions", body))["choices"][0]["message"]["content"]
    assert caches and caches[-1].stats.tokens > 12 and caches[-1].replay_config.buffer_len == 4

    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    hf_replayssm.disable(plain)
    ids = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True, add_generation_prompt=True)
    tokens = plain.generate(**ids, max_new_tokens=12, do_sample=False, use_cache=False)
    assert answer == tokenizer.decode(tokens[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)

    streamed = ask(port, "/v1/chat/completions", {**body, "stream": True}).decode().splitlines()
    pieces = [json.loads(line[6:]) for line in streamed if line.startswith("data: {")]
    text = "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces if piece["choices"])
    assert text.rstrip("\ufffd") == answer.rstrip("\ufffd")  # half a character at the end is not streamed


# ----------------------------------------------------------------------------------------------- quantised weights
def assert_quantised_replays(path, config, is_quantised, tolerance) -> None:
    """With replay the model gives what the same quantised weights give without a cache."""

    def load(**options):
        model = AutoModelForCausalLM.from_pretrained(path, device_map="cpu", **options).eval()
        model.generation_config.eos_token_id = None
        return model

    whole, plain, model = load(), load(quantization_config=config), load(quantization_config=config)
    projections = [part for mixer in mixers(model) for part in mixer.modules() if is_quantised(part)]
    assert len(projections) >= 2 * len(mixers(model)), "the projections are not quantised"
    ids = random_ids(2, 20, seed=3)
    hf_replayssm.enable(model, buffer_len=4)
    cache = ReplayCache(config=model.config, buffer_len=4)
    cache.activate_past_recording()
    with torch.no_grad():
        expected = plain(input_ids=ids, use_cache=False).logits.float()
        changed = relative_error(expected, whole(input_ids=ids, use_cache=False).logits.float())
        logits = [model(input_ids=ids[:, :7], cache=cache).logits]
        model(input_ids=ids[:, [3, 1, 4]], cache=cache)
        cache.crop(-3)
        logits += [model(input_ids=ids[:, t : t + 1], cache=cache).logits for t in range(7, 20)]
    error = relative_error(torch.cat(logits, 1).float(), expected)
    assert error < tolerance, error
    assert changed > 3 * error, "quantising must have changed something that shows"
    assert len(replay_layers(cache)) == len(mixers(plain))
    fresh = [weights_digest(load(quantization_config=config)) for _ in range(2)]
    assert fresh[0] == fresh[1] != weights_digest(whole)
    out = model.generate(
        ids[:, :7],
        max_new_tokens=8,
        do_sample=False,
        attention_mask=torch.ones_like(ids[:, :7]),
        return_dict_in_generate=True,
    )
    assert isinstance(out.cache, ReplayCache) and out.sequences.shape == (2, 15)


# One of each recurrence; the rest with -m slow. Not Mamba: upstream's own forward multiplies by the weight of a
# projection, which torchao's tensors do not take.
SOME = ("bamba", "jamba", "qwen3_next", "kimi_linear")
QUANTISED = [
    name if name in SOME else pytest.param(name, marks=pytest.mark.slow) for name in FAMILY_NAMES if name != "mamba"
]


@pytest.mark.parametrize("family", QUANTISED)
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_torchao_weights(family, kind, tmp_path):
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerAxis
    from transformers import TorchAoConfig

    def is_quantised(module) -> bool:
        return isinstance(module, torch.nn.Linear) and type(module.weight.data) is not torch.Tensor

    tiny_model(family).save_pretrained(tmp_path)
    how = Int8WeightOnlyConfig() if kind == "int8" else IntxWeightOnlyConfig(torch.int4, PerAxis(0))
    assert_quantised_replays(tmp_path, TorchAoConfig(how), is_quantised, tolerance=1e-4)


# On a CPU bitsandbytes' 4 bits takes widths that are multiples of 64.
WIDE = {
    "bamba": {"hidden_size": 64, "mamba_n_heads": 32, "mamba_d_head": 4, "mamba_d_state": 16, "intermediate_size": 64},
    "qwen3_next": {
        "hidden_size": 64,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 4,
        "head_dim": 16,
        "intermediate_size": 64,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
}


@pytest.mark.parametrize("family", sorted(WIDE))
@pytest.mark.parametrize("kind", ["8bit", "4bit"])
def test_bitsandbytes_weights(family, kind, tmp_path):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    tiny_model(family, **WIDE[family]).save_pretrained(tmp_path)
    # Without a threshold: outliers are columns of all tokens of a forward, and would depend on how many there are.
    kept = ["lm_head", "shared_expert_gate"]  # of one single column
    config = BitsAndBytesConfig(**{f"load_in_{kind}": True}, llm_int8_threshold=0.0, llm_int8_skip_modules=kept)
    wanted = bitsandbytes.nn.Linear8bitLt if kind == "8bit" else bitsandbytes.nn.Linear4bit
    # In 8 bits activations are rounded, too, and what lies between two values goes one way or the other.
    tolerance = 3e-2 if kind == "8bit" else 1e-4
    assert_quantised_replays(tmp_path, config, lambda module: isinstance(module, wanted), tolerance)
