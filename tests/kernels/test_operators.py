"""
The kernels as torch operators: what torch requires of one, `torch.compile`, CUDA graphs, devices, arguments that do not
fit, and copies from the Kernel Hub. See `test_mamba2.py` for how it is run.
"""

import contextlib
import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch


pytest.importorskip("triton")
from cases import BF16, F16, F32, INTERPRETED, Layer, error, needs, on_gpu, run_in_interpreter, same_bits
from misfits import assert_same, cast, copy, elsewhere, few_slots, flat, gaps, named, refuses, shorter, three_heads
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import replayssm_kernels as kernels


ROOT = Path(__file__).parents[2]
BUFFERS = ("x_buffer", "B_buffer", "dt_buffer")


def arguments(device="cpu", shape=(2, 4, 2, 16, 32, 4), tokens=1, dtype=F32, seed=0):
    """Everything that any of the functions takes, by its name; the buffers hold two tokens."""
    layer = Layer(shape, device, dtype, conv=4, ring=6, seen=5, first=1, seed=seed)
    batch, heads, groups, head_dim, state, _ = shape
    for buffer in layer.buffers():
        buffer.copy_(layer.rand(*buffer.shape))
    layer.conv_inputs.nan_to_num_(nan=1e4)  # opcheck compares with ==
    layer.held += 2
    return {
        "positions": layer.positions(tokens, 1),
        "x": layer.randn(batch, tokens, heads, head_dim).to(dtype),
        "B": layer.randn(batch, tokens, groups, state).to(dtype),
        "C": layer.randn(batch, tokens, groups, state).to(dtype),
        "xBC": layer.randn(batch, tokens, layer.channels).to(dtype),
        "dt": layer.randn(batch, tokens, heads).to(dtype),
        "conv_inputs": layer.conv_inputs,
        "conv_weight": layer.weight,
        "conv_bias": layer.bias,
        "x_buffer": layer.x_buffer,
        "B_buffer": layer.B_buffer,
        "dt_buffer": layer.dt_buffer,
        "A": layer.A,
        "D": layer.D,
        "checkpoint": layer.checkpoint,
        "dt_bias": layer.dt_bias,
    }


STEP = ("positions", "x", "B", "C", "dt", *BUFFERS, "A", "D", "checkpoint", "dt_bias")
CONV = ("positions", "xBC", "conv_inputs", "conv_weight", "conv_bias")
DECODE = (*CONV, "dt", *BUFFERS, "A", "D", "checkpoint", "dt_bias")
FOLD = ("positions", *BUFFERS, "A", "checkpoint")


def step(all_, **options):
    return kernels.mamba2_step(**{name: all_[name] for name in STEP}, **options)


def decode(all_, **options):
    return kernels.mamba2_decode(**{name: all_[name] for name in DECODE}, **options)


def fold(all_, **options):
    return kernels.mamba2_fold(**{name: all_[name] for name in FOLD}, **options)


def conv(all_):
    return kernels.causal_conv(*(all_[name] for name in CONV))


def everything(all_):
    """
    All functions one after the other; each sees what those before it have written. (The folded checkpoint is read by a
    sum: inductor drops a `clone` between two operators that write to the same tensor, torch 2.11 and 2.13.)
    """
    return step(all_), fold(all_), fold(all_, inplace=True).sum(-1), decode(all_), conv(all_)


@needs
@pytest.mark.parametrize("tokens", [1, 3])
def test_torch_accepts_the_operators(tokens, device):
    a = arguments(device, tokens=tokens, shape=(1, 2, 1, 16, 16, 5))
    operators = getattr(torch.ops, kernels.mamba2_step.__module__.partition(".")[0])
    limits = (0.0, math.inf)
    step_inputs = [a[name] for name in STEP]
    decode_inputs = [a[name] for name in ("positions", "xBC", "dt", *CONV[2:], *DECODE[6:])]
    calls = {
        "mamba2_step": (*step_inputs, *limits, None, None, None, None),
        "mamba2_decode": (*decode_inputs[:-1], True, decode_inputs[-1], *limits, None, None, BF16, tokens == 1),
        "mamba2_fold": (*(a[name] for name in FOLD[:-1]), None, a["checkpoint"]),
        "mamba2_flush": (*(a[name] for name in FOLD), None, 7),
        "causal_conv": (*(a[name] for name in CONV), True),
    }
    for name, inputs in calls.items():
        torch.library.opcheck(getattr(operators, name).default, inputs)


@needs
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiles_in_one_graph(backend, device):
    """
    Results and everything written are those of the plain call, twice in a row. (Up to rounding with inductor: it places
    tensors otherwise, and triton compiles for their alignment.)
    """
    if backend == "inductor" and device == "cpu":
        pytest.skip("on a GPU only")
    a = arguments(device, (1, 2, 1, 16, 16, 4))
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


class Twice(torch.Tensor):
    """A subclass without a storage of its own, as a DTensor is: what is done to it is done to a tensor inside."""

    @staticmethod
    def __new__(cls, inside):
        return torch.Tensor._make_wrapper_subclass(cls, inside.shape, dtype=inside.dtype, device=inside.device)

    def __init__(self, inside):
        self.inside = inside

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args = [arg.inside if isinstance(arg, cls) else arg for arg in args]
        return cls(function(*args, **(kwargs or {})))


@needs
@pytest.mark.parametrize("onlooker", ["nobody", "autograd", "a mode", "a subclass"])
def test_torch_is_passed_by_where_nothing_looks_on(onlooker, device):
    """In eager mode a function calls its kernels itself; else torch has an operator to see. Results are the same."""

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function.name())
            return function(*args, **(kwargs or {}))

    seen, a = [], arguments(device)
    expected = decode(copy(a))
    b = copy(a)
    if onlooker == "a subclass":
        b["xBC"] = Twice(b["xBC"])
    with torch.set_grad_enabled(onlooker == "autograd"), Mode() if onlooker == "a mode" else contextlib.nullcontext():
        with torch.autograd.profiler.profile() as profile:
            y = decode(b)
    if onlooker == "a subclass":
        assert type(y) is Twice
        y, b["xBC"] = y.inside, b["xBC"].inside
    name = f"{kernels.mamba2_step.__module__.partition('.')[0]}::mamba2_decode"
    assert (name in {event.name for event in profile.function_events}) == (onlooker != "nobody")
    assert (name in seen) == (onlooker == "a mode")
    decode(a)
    assert same_bits(expected, y)
    assert_same(a, b)


def traced(function, y):
    """A trace of other numbers of the same shape: what it recorded has to be computed."""
    return torch.jit.trace(function, torch.ones_like(y), check_trace=False)(y)


class Sees(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen = getattr(self, "seen", []) + [str(function)]
        return function(*args, **(kwargs or {}))


@needs
@pytest.mark.parametrize(
    "transform",
    [
        lambda function, y: torch.func.vmap(function)(y),
        lambda function, y: torch.func.functionalize(function)(y),
        lambda function, y: torch.func.jvp(function, (y,), (y,))[0],
        traced,
    ],
    ids=["vmap", "functionalize", "jvp", "jit.trace"],
)
@pytest.mark.filterwarnings("ignore:`torch.jit.trace", "ignore:There is a performance drop")
@torch.no_grad()
def test_transforms_of_torch_see_the_operators(transform, device):
    torch.manual_seed(0)
    y, weight = torch.randn(3, 4, 32, device=device), torch.randn(32, device=device)
    function = lambda y: kernels.rms_norm(y, None, weight, 1e-6)  # noqa: E731
    torch.testing.assert_close(transform(function, y), function(y), rtol=0, atol=0)


@needs
@torch.no_grad()
def test_a_function_mode_and_meta_tensors_see_the_operators(device):
    y, weight = torch.randn(3, 32, device=device), torch.randn(32, device=device)
    with Sees() as mode:
        kernels.rms_norm(y, None, weight, 1e-6)
    assert any("rms_norm" in name for name in mode.seen)
    out = kernels.rms_norm(y.to("meta"), None, weight.to("meta"), 1e-6, out_dtype=BF16)
    assert out.is_meta and out.shape == y.shape and out.dtype == BF16


@on_gpu
@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("fused", [True, False])
def test_cuda_graph(fused, tokens, device):
    """A captured call replays with positions that change in place: plain steps, a flush, then steps behind it."""
    if fused and tokens > 1:
        pytest.skip("one token only")
    a = arguments(device, (3, 8, 2, 64, 128, 3 * tokens + 2), tokens, BF16)
    for name in BUFFERS:
        a[name].zero_()
    a["positions"][:] = torch.tensor([5, 3, 0, tokens, 0], dtype=torch.int32, device=device)[:, None]
    b = copy(a)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        decode(copy(a), fused=fused)  # compiles
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = decode(b, fused=fused)
    slots = 3 * tokens + 2
    held = first = 0
    for turn in range(7):
        flush = held + tokens if turn % 3 == 2 else turn % 2
        inputs = {name: torch.randn_like(a[name]) for name in ("xBC", "dt")}
        for c in (a, b):
            c["positions"][1:] = torch.tensor([first, held, tokens, flush], dtype=torch.int32, device=device)[:, None]
            c["positions"][0] += tokens if turn else 0
            for name, value in inputs.items():
                c[name].copy_(value)
        graph.replay()
        assert same_bits(decode(a, fused=fused), y)
        assert_same(a, b)
        held, first = held + tokens - flush, (first + flush) % slots


@pytest.mark.multigpu
def test_launches_on_the_tensors_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    assert torch.cuda.current_device() == 0
    for shape in [(2, 4, 2, 16, 32, 4), (2, 4, 2, 64, 128, 4)]:
        a = arguments("cuda:0", shape)
        b = {name: tensor.to("cuda:1") for name, tensor in a.items()}
        expected, got = everything(a), everything(b)
        assert all(y.device == torch.device("cuda:1") for y in got)
        assert all(same_bits(x.cpu(), y.cpu()) for x, y in zip(expected, got))
        layer = Layer((2, 8, 2, 64, 128, 16), "cuda:1", BF16, conv=4)
        assert error(*layer.advance(1, fold=1)) <= 1e-3
        assert error(*layer.advance(5, fold=2)) <= 1e-3
    assert torch.cuda.current_device() == 0


# Arguments that do not fit.


WEIGHTS = ("C", "dt", "A", "D", "dt_bias")
# (function, argument, what is wrong with it, the error's message)
MISFITS = [
    *((step, name, shorter, f"{name} has") for name in (*WEIGHTS, "dt_buffer", "positions")),
    *((step, name, shorter, "must be") for name in ("x", "B", "x_buffer", "B_buffer", "checkpoint")),
    *((step, name, flat, name) for name in ("C", "dt", *BUFFERS, "checkpoint")),
    *((step, name, gaps, f"{name}.* contiguous") for name in (*BUFFERS, "checkpoint", "positions")),
    *((step, name, elsewhere, name) for name in ("x", "B", *WEIGHTS, *BUFFERS)),
    *((decode, name, elsewhere, name.removeprefix("conv_")) for name in (*CONV[1:], "dt")),
    (step, "positions", cast(torch.int64), "positions.*int32"),
    *((step, "dt_buffer", cast(dtype), "dt_buffer must be float32") for dtype in (torch.float64, F16)),
    *((decode, name, shorter, name.removeprefix("conv_")) for name in ("xBC", "conv_inputs", "conv_bias", "dt")),
    (decode, "conv_inputs", gaps, "conv_inputs.* contiguous"),
    (decode, "conv_inputs", few_slots, "conv_inputs has 3 slots"),
    (decode, "conv_weight", flat, "weight"),
    (conv, "xBC", shorter, "weight"),
    (conv, "conv_inputs", few_slots, "conv_inputs has 3 slots"),
    (fold, "checkpoint", gaps, "checkpoint.* contiguous"),
    (fold, "x_buffer", shorter, "x_buffer"),
    (step, "B_buffer", three_heads, "4 heads .* 3 groups"),
]
# Of the dtype of the buffer or not at all: a silent conversion loses digits.
DTYPE_MISFITS = [
    *((step, name, cast(BF16), name) for name in ("x", "B", "C", "x_buffer", "B_buffer")),
    *((decode, name, cast(BF16), name) for name in ("xBC", "conv_inputs", "x_buffer", "B_buffer")),
    *((step, name, cast(torch.int32), name) for name in ("x", "dt", "checkpoint")),
]
# The argument at fault is named.
UNNAMED = [
    *((step, name, flat, rf"\b{name}\b") for name in ("x", "B")),
    *((decode, name, flat, name) for name in ("xBC", "x_buffer", "B_buffer")),
]


@needs
@pytest.mark.parametrize(("function", "name", "change", "message"), named(MISFITS))
def test_misfits_raise_and_change_nothing(function, name, change, message, device):
    refuses(arguments(device), function, name, change, message)


@needs
@pytest.mark.parametrize(("function", "name", "change", "message"), named(DTYPE_MISFITS))
def test_dtypes_that_do_not_fit_raise(function, name, change, message, device):
    refuses(arguments(device), function, name, change, message)


@needs
@pytest.mark.parametrize(("function", "name", "change", "message"), named(UNNAMED))
def test_errors_name_the_argument(function, name, change, message, device):
    refuses(arguments(device), function, name, change, message)


@needs
def test_options_that_do_not_fit(device):
    a = arguments(device, tokens=2)
    before = copy(a)
    for function in (step, decode):
        with pytest.raises(ValueError, match="fused"):
            function(a, fused=True)
    with pytest.raises(ValueError, match="activation"):
        decode(a, activation="relu")
    assert_same(before, a)


@needs
@pytest.mark.parametrize("layout", ["gaps", "expanded"])
@pytest.mark.parametrize(
    "name",
    [
        *("A", "D", "dt_bias", "conv_bias", "conv_weight", "x", "xBC", "B", "C", "dt"),
    ],
)
def test_other_layouts_are_taken_or_refused(layout, name, device):
    """Never read as if they were contiguous."""
    function = decode if "conv" in name or name == "xBC" else step
    a = arguments(device, (1, 2, 1, 16, 16, 3))
    a[name] = gaps(a[name]) if layout == "gaps" else a[name][..., :1].expand_as(a[name])
    expected = function(copy(a) | {name: a[name].contiguous()})
    try:
        got = function(a)
    except ValueError as refusal:
        assert name.removeprefix("conv_") in str(refusal)
    else:
        assert same_bits(expected, got)


# Copies of the package in one process.


@pytest.mark.parametrize("content", [None, "no JSON", '[{"tokens": 1}]', '[{"config": {"tile": {"rows": 1}}}]'])
def test_a_table_that_cannot_be_read(content, tmp_path, monkeypatch):
    from replayssm_kernels import _configs

    path = tmp_path / "table.json"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv("REPLAYSSM_KERNEL_CONFIGS", str(path))
    with pytest.raises(ValueError, match="REPLAYSSM_KERNEL_CONFIGS.*tune_kernels"):
        _configs._table.__wrapped__()


def hub_layout(folder: Path) -> Path:
    """As scripts/build_kernel_hub.py makes it."""
    spec = importlib.util.spec_from_file_location("build_kernel_hub", ROOT / "scripts" / "build_kernel_hub.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script.build(folder, backend="cpu")


def assert_two_copies_agree(copy_of_package, device):
    assert copy_of_package is not kernels and copy_of_package.__all__ == kernels.__all__
    assert copy_of_package.mamba2_step is not kernels.mamba2_step
    a = arguments(device)
    b = copy(a)
    y = copy_of_package.mamba2_decode(**{name: b[name] for name in DECODE})
    assert same_bits(decode(a), y)
    assert_same(a, b)


@needs
def test_a_second_copy_of_the_package(device, tmp_path, monkeypatch):
    """As the Kernel Hub loads one: from a file, under a name of its own; operators do not collide."""
    name = "_replayssm_kernels_0123456789abcdef"
    spec = importlib.util.spec_from_file_location(name, hub_layout(tmp_path) / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    assert_two_copies_agree(module, device)
    assert hasattr(getattr(torch.ops, name), "mamba2_step")
    for loaded in [key for key in sys.modules if key.startswith(f"{name}.")]:
        monkeypatch.delitem(sys.modules, loaded)


@needs
def test_the_kernel_hub_loads_it(device, tmp_path):
    hub = pytest.importorskip("kernels")
    if not hasattr(hub, "get_local_kernel"):
        pytest.skip("not the Kernel Hub's package, or an old one")
    hub_layout(tmp_path)
    assert_two_copies_agree(hub.get_local_kernel(tmp_path, backend="cpu" if device == "cpu" else None), device)


if not INTERPRETED:

    @pytest.mark.timeout(600)
    def test_in_the_interpreter():
        run_in_interpreter(__file__)
