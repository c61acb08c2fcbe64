"""
The RMS norms against the modules of transformers that it stands for, and against float64. See `test_mamba2.py` for
how it is run.

How close: a float32 result differs from upstream's by a few of its last bits (`CLOSE`). A 16-bit result is the same
number, or, where the number before a rounding lies between two 16-bit ones, the other neighbour: that happens to less
than one in a hundred, and the bar is one unit in the last place for each rounding on the way (two, where upstream
rounds both the normalised number and its product with the weight).
"""

import math

import pytest
import torch
from torch.nn import functional as F


pytest.importorskip("triton")
from cases import BF16, F16, F32, INTERPRETED, NAN, needs, on_gpu, poisoned_memory, run_in_interpreter, same_bits
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.bamba.modeling_bamba import BambaRMSNorm, BambaRMSNormGated
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridRMSNormGated
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHRMSNorm, NemotronHRMSNormGated
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

import replayssm_kernels as kernels
from replayssm_kernels import _norm


CLOSE = 3e-6  # relative, of float32 numbers
GROUPED = [
    MambaRMSNormGated,
    BambaRMSNormGated,
    Zamba2RMSNormGated,
    NemotronHRMSNormGated,
    GraniteMoeHybridRMSNormGated,
]
VARIANTS = {cls.__name__: (cls, {}) for cls in GROUPED} | {
    "FalconH1, gate before": (FalconH1RMSNormGated, {"weight_in_float32": True}),
    "FalconH1, norm before": (FalconH1RMSNormGated, {"weight_in_float32": True, "norm_before_gate": True}),
}
# Of one class with a forward like all others, and both of Falcon-H1.
THREE = list(VARIANTS)[4:]
PLAIN = {
    "between layers": (BambaRMSNorm, {}),
    "between layers, NemotronH": (NemotronHRMSNorm, {"weight_in_float32": True}),
}
VARIANTS |= PLAIN
FIVE = [*THREE, *PLAIN]


class Case:
    """A module of upstream's on the device, and the kernel with its numbers."""

    def __init__(self, variant, device="cpu", columns=48, group=24, weight_dtype=F32, eps=1e-5, seed=0):
        cls, self.options = VARIANTS[variant]
        self.gated = variant not in PLAIN
        group = group if self.gated else columns
        self.device, self.columns, self.group, self.eps = device, columns, group, eps
        self.generator = torch.Generator().manual_seed(seed)
        if not self.gated:
            self.module = cls(columns, eps)
        elif cls is FalconH1RMSNormGated:
            self.module = cls(columns, eps, columns // group, self.options.get("norm_before_gate", False))
        else:
            self.module = cls(columns, group, eps)
        self.module.weight.requires_grad_(False).copy_(self.randn(columns) + 0.5)
        self.module.to(device, weight_dtype)

    def randn(self, *size):
        return torch.randn(*size, generator=self.generator)

    def inputs(self, *rows, dtype=F32, gate_dtype=F32):
        """y, and a gate that is a part of something wider, NaN around it."""
        y = (self.randn(*rows, self.columns) * 3).to(dtype)
        wide = torch.full((*rows, self.columns + 13), NAN, dtype=gate_dtype)
        wide[..., 5:-8] = (self.randn(*rows, self.columns) * 3).to(gate_dtype)
        return y.to(self.device), wide.to(self.device)[..., 5:-8]

    def kernel(self, y, gate, **options):
        before = y.clone(), gate.clone()
        with poisoned_memory():
            arguments = gate if self.gated else None, self.module.weight, self.eps, self.group
            out = kernels.rms_norm(y, *arguments, **self.options, **options)
        assert same_bits(before[0], y) and same_bits(before[1], gate) and out.is_contiguous()
        return out

    def upstream(self, y, gate):
        return self.module(y, gate) if self.gated else self.module(y)

    def exact(self, y, gate):
        """Without a rounding, in float64."""
        y, gate = y.double(), F.silu(gate.double()) if self.gated else torch.ones_like(gate, dtype=torch.float64)
        first = self.options.get("norm_before_gate", False)
        x = (y if first else y * gate).unflatten(-1, (-1, self.group))
        x = (x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()).flatten(-2)
        return self.module.weight.double() * x * (gate if first else 1.0)

    def check(self, y, gate):
        got, upstream, exact = self.kernel(y, gate), self.upstream(y, gate), self.exact(y, gate)
        assert got.dtype == upstream.dtype and got.shape == upstream.shape
        weight_dtype, own = self.module.weight.dtype, "weight_in_float32" not in self.options
        roundings = (y.dtype != F32) + (own and y.dtype == weight_dtype != F32)
        interpreted = y.dtype == BF16 and self.device == "cpu"  # bfloat16 is cut off there, not rounded: twice as far
        unit = torch.finfo(y.dtype).eps if roundings else 0.0
        bar = exact.abs() * (CLOSE + unit * roundings * (2 if interpreted else 1))
        assert bool(((got.double() - upstream.double()).abs() <= bar).all()), "against upstream"
        bar = exact.abs() * (CLOSE + unit * roundings * (1 if interpreted else 0.5)) + 1e-7
        assert bool(((got.double() - exact).abs() <= 1.01 * bar).all()), "against float64"
        if roundings and not interpreted:
            other = (got.double() - upstream.double()).abs() > CLOSE * exact.abs()
            assert float(other.double().mean()) < 0.01, "another neighbour"


def assert_same(got, expected):
    """Bit for bit; on a GPU triton compiles for the alignment of what it gets, which may change the order of a sum."""
    if got.device.type == "cpu":
        assert same_bits(got, expected)
    else:
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=0.0)


@needs
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_upstream(variant, dtype, device):
    """Every dtype of y with every one of the weight, and, where classes differ, with every one of the gate."""
    for i, weight_dtype in enumerate((F32, BF16, F16)):
        case = Case(variant, device, weight_dtype=weight_dtype, seed=i)
        for gate_dtype in (F32, BF16, F16) if variant in THREE else (weight_dtype,):
            case.check(*case.inputs(2, 3, dtype=dtype, gate_dtype=gate_dtype))


@needs
@pytest.mark.parametrize(("columns", "group"), [(1, 1), (60, 20), (17, 17), (128, 16), (4097, 4097), (8192, 1024)])
@pytest.mark.parametrize("variant", FIVE)
def test_sizes(variant, columns, group, device):
    case = Case(variant, device, columns, group, BF16)
    case.check(*case.inputs(3, 1, gate_dtype=BF16))
    case.check(*case.inputs(1, 1, dtype=F16, gate_dtype=BF16))


@needs
@pytest.mark.parametrize(("columns", "group"), [(4097, 4097), (200, 100), (64, 64)])
@pytest.mark.parametrize("variant", FIVE)
def test_a_group_that_does_not_fit(variant, columns, group, device, monkeypatch):
    monkeypatch.setattr(_norm, "WIDEST", 1024 if columns > 1024 else 32)
    case = Case(variant, device, columns, group, BF16)
    case.check(*case.inputs(2, 1, gate_dtype=BF16))
    case.check(*case.inputs(1, 2, dtype=F16, gate_dtype=F32))


@on_gpu
@pytest.mark.parametrize(
    ("columns", "group"), [(3584, 1792), (7168, 3584), (8192, 8192), (16384, 16384), (20000, 20000)]
)
@pytest.mark.parametrize("variant", FIVE)
def test_models_sizes(variant, columns, group, device):
    case = Case(variant, device, columns, group, BF16)
    for dtype in (F32, BF16):
        case.check(*case.inputs(64, 1, dtype=dtype, gate_dtype=BF16))


@needs
@pytest.mark.parametrize("variant", THREE)
def test_layouts(variant, device):
    """Columns apart, axes exchanged, one row for all, no axis but the columns: the numbers are what counts."""
    case = Case(variant, device)
    y, gate = case.inputs(2, 3)
    expected = case.kernel(y, gate)
    apart = torch.stack([gate, torch.full_like(gate, NAN)], -1)[..., 0]
    assert apart.stride(-1) == 2
    exchanged = y.transpose(0, 1).contiguous().transpose(0, 1)
    assert not exchanged.is_contiguous()
    assert_same(case.kernel(exchanged, apart), expected)
    assert_same(case.kernel(y, gate[:1, :1].expand(2, 3, -1)), case.kernel(y, gate[:1, :1].repeat(2, 3, 1)))
    assert_same(case.kernel(y[1, 2], gate[1, 2]), expected[1, 2])
    assert_same(case.kernel(y[1], gate[1]), expected[1])


@needs
@pytest.mark.parametrize("out_dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("variant", FIVE)
def test_rounds_the_result_once_more(variant, out_dtype, device):
    for dtype in (F32, F16):
        case = Case(variant, device, weight_dtype=F16)
        y, gate = case.inputs(2, 3, dtype=dtype, gate_dtype=F16)
        got, whole = case.kernel(y, gate, out_dtype=out_dtype), case.kernel(y, gate)
        assert got.dtype == out_dtype
        if device == "cpu" and out_dtype != BF16:
            assert same_bits(got, whole.to(out_dtype))
        else:  # the interpreter cuts bfloat16 off; a GPU may round to the other neighbour
            slack = max(torch.finfo(out_dtype).eps, CLOSE) * whole.double().abs()
            assert bool(((got.double() - whole.double()).abs() <= slack).all())


@needs
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("variant", THREE)
def test_what_is_not_finite(variant, device):
    """NaN and infinities go where they go upstream: through their own group, and no further."""
    for dtype in (F32, F16):
        case = Case(variant, device, columns=48, group=16, weight_dtype=dtype)
        y, gate = case.inputs(12, dtype=dtype)
        gate = gate.clone()
        for row, value in enumerate((NAN, math.inf, -math.inf, 6e4)):
            y[row, 3] = gate[4 + row, 3] = value
        gate[8, 17] = -6e4  # silu is zero
        y[9, 5] = 1e30 if dtype == F32 else math.inf  # the square of 1e30 is infinite
        y[10, 16:32] = 0.0
        case.module.weight[40] = math.inf
        case.module.weight[41] = NAN
        got, upstream = case.kernel(y, gate), case.module(y, gate)
        assert bool((got.isnan() == upstream.isnan()).all()) and bool((got.isinf() == upstream.isinf()).all())
        assert bool(got.isnan()[:10].any()) and not bool(got[11, :40].isnan().any())
        for row in (0, 1, 2, 4, 5):  # the groups beside the spoilt one
            assert bool(got[row, 16:40].isfinite().all()) and not bool(got[row, :16].isfinite().all())
        finite = upstream.isfinite()
        torch.testing.assert_close(got[finite], upstream[finite], rtol=CLOSE if dtype == F32 else 2e-3, atol=1e-30)
        assert bool((got[upstream.isinf()] == upstream[upstream.isinf()]).all())
    case = Case(variant, device, eps=0.0)
    y, gate = case.inputs(2)
    y[0] = 0.0
    got, upstream = case.kernel(y, gate), case.module(y[None], gate[None])[0]
    assert bool(got[0].isnan().all()) and bool(upstream[0].isnan().all()) and bool(got[1].isfinite().all())


@needs
def test_rows_do_not_know_of_each_other(device):
    case = Case(THREE[0], device)
    y, gate = case.inputs(7)
    together = case.kernel(y, gate)
    for row in range(7):
        assert_same(case.kernel(y[row : row + 1], gate[row : row + 1]), together[row : row + 1])


@needs
@pytest.mark.parametrize("rows", [(0,), (2, 0), (0, 3)], ids=str)
@pytest.mark.parametrize("variant", FIVE)
def test_nothing_to_do(variant, rows, device):
    case = Case(variant, device, weight_dtype=BF16)
    got = case.kernel(*case.inputs(*rows, dtype=F16))
    assert got.shape == (*rows, 48) and got.dtype == (F16 if case.options else F32)


@needs
@pytest.mark.parametrize("variant", THREE)
def test_torch_accepts_the_operator(variant, device):
    """The fake among it: shape and dtype of a tensor that is not there."""
    case = Case(variant, device, columns=32, group=16, weight_dtype=BF16)
    options = case.options.get("weight_in_float32", False), case.options.get("norm_before_gate", False)
    y, gate = case.inputs(2, 1, gate_dtype=BF16)
    gate = F.pad(gate, (0, 4))[..., :-4]  # (opcheck compares with ==: no NaN)
    operator = getattr(torch.ops, kernels.mamba2_step.__module__.partition(".")[0]).rms_norm.default
    torch.library.opcheck(operator, (y, gate, case.module.weight, 1e-5, 16, *options, BF16))
    if not options[1]:
        torch.library.opcheck(operator, (y, None, case.module.weight, 1e-5, 32, *options, F32))
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(tensor) for tensor in (y.to(F16), gate, case.module.weight)]
    with mode:
        out = kernels.rms_norm(*fakes, 1e-5, 16, **case.options)
    assert out.shape == y.shape and out.dtype == (F16 if case.options else F32)


@needs
def test_compiles_in_one_graph(device):
    case = Case(THREE[0], device)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda y, gate: kernels.rms_norm(y, gate, case.module.weight, 1e-5, 24),
        fullgraph=True, backend="aot_eager", dynamic=True,
    )  # fmt: skip
    for rows in ((2, 3), (4, 5)):
        y, gate = case.inputs(*rows)
        assert_same(compiled(y, gate), case.kernel(y, gate))
    torch._dynamo.reset()


@on_gpu
def test_cuda_graph(device):
    case = Case(THREE[0], device, 8192, 1024, BF16)
    y, gate = case.inputs(4, 1, gate_dtype=BF16)
    case.kernel(y, gate)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels.rms_norm(y, gate, case.module.weight, case.eps, case.group)
    for _ in range(2):
        y.copy_(torch.randn_like(y))
        graph.replay()
        assert same_bits(out, case.kernel(y, gate))


@on_gpu
def test_offsets_beyond_32_bits(device):
    case = Case(THREE[0], device, 64, 64)
    y, gate = case.inputs(3)
    far = torch.empty(2**31 + 64, dtype=F16, device=device).as_strided((3, 64), (2**30, 1))
    far.copy_(gate)
    assert_same(case.kernel(y, far), case.kernel(y, gate.to(F16)))


@needs
def test_arguments_that_do_not_fit(device):
    case = Case(THREE[0], device)
    y, gate = case.inputs(2)
    weight, call = case.module.weight, kernels.rms_norm
    with pytest.raises(ValueError, match="gate has shape"):
        call(y, gate[:1], weight, 1e-5)
    with pytest.raises(ValueError, match="weight has shape"):
        call(y, gate, weight[:-1], 1e-5)
    with pytest.raises(ValueError, match="float64.*cast it"):
        call(y.double(), gate, weight, 1e-5)
    with pytest.raises(ValueError, match="must divide"):
        call(y, gate, weight, 1e-5, 20)
    with pytest.raises(ValueError, match="needs a gate"):
        call(y, None, weight, 1e-5, weight_in_float32=True, norm_before_gate=True)
    with pytest.raises(ValueError, match="pass `weight_in_float32=True`"):
        call(y, gate, weight, 1e-5, norm_before_gate=True)
    with pytest.raises(ValueError, match="`out_dtype` is"):
        call(y, gate, weight, 1e-5, out_dtype=torch.float64)
    with pytest.raises(ValueError, match="no dimension"):
        call(y[0, 0], gate[0, 0], weight, 1e-5)
    with pytest.raises(ValueError, match="move it there"):
        call(y, gate, weight.to("meta"), 1e-5)


if not INTERPRETED:

    @pytest.mark.timeout(600)
    def test_in_the_interpreter():
        run_in_interpreter(__file__)
