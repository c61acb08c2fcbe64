"""
The kernels of the delta rules as torch operators: what torch requires of one, `torch.compile`, CUDA graphs, arguments
that do not fit, and compilation for GPUs that are not here. See `test_mamba2.py` for how it is run.
"""

import math

import pytest
import torch


pytest.importorskip("triton")
from cases import BF16, F16, F32, FP8, INT8, INTERPRETED, needs, on_gpu, run_in_interpreter, same_bits
from delta_cases import DeltaLayer
from misfits import assert_same, cast, copy, elsewhere, few_slots, flat, gaps, named, refuses, shorter, three_heads
from test_compile import LEAST_SHARED_MEMORY, Compiles, on_targets, sm_90

import replayssm_kernels as kernels
from replayssm_kernels import _launch, gated_delta
from replayssm_kernels._configs import Config, Tile


RULES = pytest.mark.parametrize("kda", [False, True], ids=["gated delta", "kda"])
BUFFERS = ("k_buffer", "u_buffer", "g_buffer")


def arguments(device="cpu", shape=(2, 4, 2, 16, 32, 4), tokens=1, dtype=F32, kda=False, seed=0):
    """Everything that any of the functions takes, by its name; the buffers hold two tokens."""
    layer = DeltaLayer(shape, device, dtype, kda=kda, conv=4, ring=6, conv_bias=True, seen=5, first=1, seed=seed)
    batch, heads, key_heads, key_dim, value_dim, _ = shape
    for buffer in layer.buffers():
        buffer.copy_(layer.rand(*buffer.shape))
    layer.g_buffer.neg_()
    layer.conv_inputs.nan_to_num_(nan=1e4)  # opcheck compares with ==
    layer.held += 2
    return {
        "positions": layer.positions(tokens, 1),
        "q": layer.randn(batch, tokens, key_heads, key_dim).to(dtype),
        "k": layer.randn(batch, tokens, key_heads, key_dim).to(dtype),
        "v": layer.randn(batch, tokens, heads, value_dim).to(dtype),
        "qkv": layer.randn(batch, tokens, layer.channels).to(dtype),
        "g": -layer.rand(batch, tokens, heads, *layer.channels_of_g),
        "beta": layer.rand(batch, tokens, heads).to(dtype),
        "conv_inputs": layer.conv_inputs,
        "conv_weight": layer.weight,
        "conv_bias": layer.bias,
        **layer.owned(),
    }


STEP = ("positions", "q", "k", "v", "g", "beta", *BUFFERS, "checkpoint")
DECODE = ("positions", "qkv", "g", "beta", "conv_inputs", "conv_weight", "conv_bias", *BUFFERS, "checkpoint")
FOLD = ("positions", *BUFFERS, "checkpoint")


def step(all_, **options):
    return kernels.gated_delta_step(**{name: all_[name] for name in STEP}, **options)


def decode(all_, **options):
    return kernels.gated_delta_decode(**{name: all_[name] for name in DECODE}, **options)


def fold(all_, **options):
    return kernels.gated_delta_fold(**{name: all_[name] for name in FOLD}, **options)


def everything(all_):
    """All functions one after the other; each sees what those before it have written. (See `test_operators.py`.)"""
    return step(all_), fold(all_), fold(all_, inplace=True).sum(-1), decode(all_)


@needs
@pytest.mark.parametrize(("tokens", "kda"), [(1, False), (3, True)])
def test_torch_accepts_the_operators(tokens, kda, device):
    a = arguments(device, tokens=tokens, shape=(1, 2, 1, 16, 16, 5), kda=kda)
    operators = getattr(torch.ops, kernels.gated_delta_step.__module__.partition(".")[0])
    calls = {
        "gated_delta_step": (*(a[name] for name in STEP), None, None, None),
        "gated_delta_decode": (*(a[name] for name in DECODE), True, None, None, BF16),
        "gated_delta_fold": (*(a[name] for name in FOLD[:-1]), None, a["checkpoint"]),
        "gated_delta_flush": (*(a[name] for name in FOLD), None, 3),
    }
    for name, inputs in calls.items():
        torch.library.opcheck(getattr(operators, name).default, inputs)


@needs
@RULES
@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.slow), "aot_eager", "inductor"])
def test_compiles_in_one_graph(backend, kda, device):
    """Results and everything written are those of the plain call, twice in a row. (Up to rounding with inductor.)"""
    if backend == "inductor" and device == "cpu":
        pytest.skip("on a GPU only")
    a = arguments(device, (1, 2, 1, 16, 16, 4), kda=kda)
    b = copy(a)
    torch._dynamo.reset()
    compiled = torch.compile(everything, fullgraph=True, backend=backend)
    for _ in range(2):
        expected, got = everything(a), compiled(b)
        pairs = [*zip(expected, got, strict=True), *((a[name], b[name]) for name in a)]
        differ = [float((x - y).abs().max() / y.abs().max()) for x, y in pairs if not same_bits(x, y)]
        assert all(difference < (1e-6 if backend == "inductor" else 0.0) for difference in differ), differ
        for c in (a, b):
            c["positions"][kernels.SEEN] += 1
            c["positions"][kernels.FIRST] = (c["positions"][kernels.FIRST] + 1) % 4
    torch._dynamo.reset()


@needs
def test_compiles_for_any_number_of_rows_and_tokens(device):
    torch._dynamo.reset()
    compiled = torch.compile(lambda all_: (decode(all_), fold(all_)), fullgraph=True, backend="aot_eager", dynamic=True)
    for batch, tokens in [(2, 2), (3, 3)]:
        a = arguments(device, (batch, 1, 1, 16, 16, 5), tokens)
        b = copy(a)
        expected = decode(a), fold(a)
        assert all(same_bits(x, y) for x, y in zip(expected, compiled(b)))
        assert_same(a, b)
    torch._dynamo.reset()


@needs
@RULES
@pytest.mark.parametrize(("name", "value"), [*((name, float("nan")) for name in "qkvg"), ("g", float("-inf"))])
def test_a_draft_that_is_not_finite_leaves_those_before_it(name, value, kda, device):
    """So that it can be taken back: the u of the others stay in the buffer."""
    a = arguments(device, (1, 2, 1, 16, 16, 8), 4, kda=kda)
    b = copy(a)
    b[name][:, -1] = value
    expected, got = step(a), step(b)
    assert same_bits(expected[:, :-1], got[:, :-1])
    assert got[:, -1].isnan().any() == math.isnan(value)
    first, held = (int(a["positions"][i, 0]) for i in (kernels.FIRST, kernels.HELD))
    before = [(first + held + t) % 8 for t in range(3)]
    assert same_bits(a["u_buffer"][:1, :, before], b["u_buffer"][:1, :, before])


@needs
@RULES
@pytest.mark.parametrize("tokens", [1, 2, 11])
def test_a_count_that_is_too_large_is_the_number_of_tokens(tokens, kda, device):
    """Nothing is read or written behind the new tokens, though the buffer has room for more."""
    a = arguments(device, (2, 4, 2, 16, 32, 40), tokens, kda=kda)
    b = copy(a)
    b["positions"][3] += 9
    assert same_bits(step(a), step(b))
    a.pop("positions"), b.pop("positions")
    assert_same(a, b)


@needs
@RULES
@pytest.mark.parametrize("tokens", [1, 3, 11])
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
def test_a_key_whose_squares_overflow_is_no_key(tokens, kda, device):
    """Its length is infinite, so nothing of it is left, in the output and in the state; upstream's modules agree."""
    a = arguments(device, (2, 4, 2, 16, 32, 40), tokens, kda=kda)
    a["positions"][4] = 2 + tokens  # all are folded
    b = copy(a)
    a["k"][:, -1], b["k"][:, -1] = 1e20, 0.0
    assert same_bits(step(a), step(b)) and torch.isfinite(a["checkpoint"]).all()
    assert same_bits(a["checkpoint"], b["checkpoint"]) and same_bits(a["u_buffer"], b["u_buffer"])


@on_gpu
@RULES
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_cuda_graph(tokens, kda, device):
    """A captured call replays with positions that change in place: plain steps, a flush, then steps behind it."""
    slots = 3 * tokens + 2
    a = arguments(device, (3, 8, 2, 64, 128, slots), tokens, BF16, kda)
    a["positions"][:] = torch.tensor([5, 3, 0, tokens, 0], dtype=torch.int32, device=device)[:, None]
    b = copy(a)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        decode(copy(a))  # compiles
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = decode(b)
    held = first = 0
    for turn in range(7):
        flush = held + tokens if turn % 3 == 2 else turn % 2
        inputs = {"qkv": torch.randn_like(a["qkv"]), "g": -torch.rand_like(a["g"]), "beta": torch.rand_like(a["beta"])}
        for c in (a, b):
            c["positions"][1:] = torch.tensor([first, held, tokens, flush], dtype=torch.int32, device=device)[:, None]
            c["positions"][0] += tokens if turn else 0
            for name, value in inputs.items():
                c[name].copy_(value)
        graph.replay()
        assert same_bits(decode(a), y)
        assert_same(a, b)
        held, first = held + tokens - flush, (first + flush) % slots


@pytest.mark.multigpu
def test_launches_on_the_tensors_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    assert torch.cuda.current_device() == 0
    a = arguments("cuda:0", (2, 4, 2, 64, 128, 4))
    b = {name: tensor.to("cuda:1") for name, tensor in a.items()}
    expected, got = everything(a), everything(b)
    assert all(y.device == torch.device("cuda:1") for y in got)
    assert all(same_bits(x.cpu(), y.cpu()) for x, y in zip(expected, got))
    assert torch.cuda.current_device() == 0


# Arguments that do not fit.


# (function, argument, what is wrong with it, the error's message)
MISFITS = [
    *((step, name, shorter, f"{name} has") for name in ("q", "k", "v", "g", "beta", "u_buffer", "positions")),
    *((step, name, shorter, "must be") for name in ("k_buffer", "g_buffer", "checkpoint")),
    *((step, name, flat, rf"\b{name}\b") for name in ("q", "k", "v", "g", "beta", "k_buffer", "u_buffer")),
    *((step, name, flat, "checkpoint|g_buffer") for name in ("g_buffer", "checkpoint")),
    *((step, name, gaps, f"{name}.* contiguous") for name in (*BUFFERS, "checkpoint", "positions")),
    *((step, name, elsewhere, name) for name in ("q", "v", "g", "beta", *BUFFERS)),
    *((step, name, cast(F16), name) for name in ("q", "k", "v", "u_buffer", "g_buffer")),
    *((step, name, cast(torch.int32), name) for name in ("q", "beta", "checkpoint")),
    (step, "positions", cast(torch.int64), "positions.*int32"),
    (step, "k_buffer", three_heads, "4 value heads .* 3 heads"),
    *((decode, name, shorter, name.removeprefix("conv_")) for name in ("qkv", "conv_inputs", "conv_bias", "g")),
    *((decode, name, elsewhere, name.removeprefix("conv_")) for name in ("qkv", "conv_inputs", "conv_weight", "beta")),
    (decode, "conv_inputs", gaps, "conv_inputs.* contiguous"),
    (decode, "conv_inputs", few_slots, "conv_inputs has 3 slots"),
    (decode, "qkv", cast(F16), "qkv"),
    (fold, "checkpoint", gaps, "checkpoint.* contiguous"),
    (fold, "u_buffer", shorter, "u_buffer"),
]


@needs
@pytest.mark.parametrize(("function", "name", "change", "message"), named(MISFITS))
def test_misfits_raise_and_change_nothing(function, name, change, message, device):
    refuses(arguments(device), function, name, change, message)


@needs
def test_g_fits_its_buffer(device):
    """A gate for each channel with a buffer of one for each head, and the other way round."""
    one, many = arguments(device), arguments(device, kda=True)
    for a, g in ((one, many["g"]), (many, one["g"])):
        with pytest.raises(ValueError, match=r"\bg has shape"):
            step(a | {"g": g})


@needs
def test_options_that_do_not_fit(device):
    a = arguments(device, tokens=2)
    before = copy(a)
    for function in (step, decode):
        with pytest.raises(ValueError, match="out_dtype"):
            function(a, out_dtype=torch.float64)
    with pytest.raises(ValueError, match="activation"):
        decode(a, activation="relu")
    assert_same(before, a)


@needs
@RULES
@pytest.mark.parametrize("layout", ["gaps", "expanded"])
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "qkv", "conv_weight", "conv_bias"])
def test_other_layouts_are_taken(layout, name, kda, device):
    """Never read as if they were contiguous."""
    function = decode if "conv" in name or name == "qkv" else step
    a = arguments(device, (1, 2, 1, 16, 16, 3), kda=kda)
    a[name] = gaps(a[name]) if layout == "gaps" else a[name][..., :1].expand_as(a[name])
    expected = function(copy(a) | {name: a[name].contiguous()})
    assert same_bits(expected, function(a))


# Compiled for GPUs that are not here, as in `test_compile.py`.

KERNELS = ("_append_kernel", "_step_kernel", "_window_kernel", "_fold_kernel")


@on_targets
def compiled(request, monkeypatch):
    """(name, result) of every kernel that a call launches."""
    if INTERPRETED:
        pytest.skip("compiles, and does not interpret")
    found = []
    for name in KERNELS:
        monkeypatch.setattr(gated_delta, name, Compiles(getattr(gated_delta, name), request.param, found))
    monkeypatch.setattr(gated_delta, "can_overlap", lambda device: request.param.arch == 90)
    monkeypatch.setattr(_launch, "can_limit_registers", lambda device: request.param.backend == "cuda")
    return found


def compile_decode(tokens=1, dtype=BF16, checkpoint_dtype=F32, shape=(2, 4, 2, 128, 128, 16), kda=False, **options):
    batch, heads, key_heads, key_dim, value_dim, slots = shape
    channels = 2 * key_heads * key_dim + heads * value_dim
    zeros = lambda *size, dtype=dtype: torch.zeros(*size, dtype=dtype)  # noqa: E731
    gates = (key_dim,) if kda else ()
    positions = zeros(5, batch, dtype=torch.int32)
    owned = [zeros(batch, key_heads, slots, key_dim), zeros(batch, heads, slots, value_dim, dtype=F32),
             zeros(batch, heads, slots, *gates, dtype=F32),
             zeros(batch, heads, key_dim, value_dim, dtype=checkpoint_dtype)]  # fmt: skip
    storage = (
        {"scale": zeros(batch, heads, 1, value_dim, dtype=F32), "seed": 3} if checkpoint_dtype.itemsize == 1 else {}
    )
    kernels.gated_delta_decode(
        positions, zeros(batch, tokens, channels), zeros(batch, tokens, heads, *gates, dtype=F32),
        zeros(batch, tokens, heads), zeros(batch, 40, channels), zeros(channels, 4), None, *owned, **options, **storage,
    )  # fmt: skip
    kernels.gated_delta_fold(positions, *owned, inplace=bool(storage), **storage)


@RULES
@pytest.mark.parametrize(
    "call",
    [
        {},
        {"tokens": 5},
        pytest.param({"tokens": 8, "shape": (2, 2, 1, 256, 64, 40), "checkpoint_dtype": BF16}, marks=pytest.mark.slow),
        pytest.param({"tokens": 12}, marks=pytest.mark.slow),
        pytest.param({"tokens": 20, "shape": (2, 2, 1, 96, 192, 51), "checkpoint_dtype": BF16}, marks=pytest.mark.slow),
        {"dtype": F16, "shape": (2, 2, 2, 256, 64, 20), "checkpoint_dtype": F16},
        {"dtype": F32, "shape": (2, 3, 1, 64, 128, 40)},
    ],
    ids=[
        "step",
        "short window",
        "short window, blocks of slots",
        "window",
        "window of pieces, blocks of slots",
        "float16",
        "float32",
    ],
)
def test_compiles_elsewhere(call, kda, compiled):
    """With the configuration that a device gets which was not tuned for."""
    compile_decode(kda=kda, **call)
    assert len(compiled) >= 2
    assert max(result.metadata.shared for _, result in compiled) <= LEAST_SHARED_MEMORY


@sm_90
@RULES
@pytest.mark.slow
@pytest.mark.parametrize("checkpoint_dtype", [INT8, FP8], ids=str)
@pytest.mark.parametrize("tokens", [1, 5])
def test_8_bits_compile(tokens, checkpoint_dtype, kda, compiled):
    compile_decode(tokens, checkpoint_dtype=checkpoint_dtype, kda=kda)


@RULES
def test_other_configurations_compile(kda, compiled, monkeypatch):
    monkeypatch.setattr(gated_delta, "OVERRIDE", Config(Tile(32, 2, 32, registers=128)))
    compile_decode(checkpoint_dtype=BF16, kda=kda)
    assert {name for name, _ in compiled} == {"_append_kernel", "_step_kernel", "_fold_kernel"}


if not INTERPRETED:

    @pytest.mark.timeout(600)
    def test_in_the_interpreter():
        run_in_interpreter(__file__)
