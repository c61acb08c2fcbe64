"""
Every kernel is compiled for GPUs that are not here: NVIDIA from compute capability 8.0 and 9.0 (with the overlap of
launches) and AMD's CDNA 3. What the compiler refuses, and more shared memory than such a GPU has, shows without one.
"""

import pytest
import torch


triton = pytest.importorskip("triton")
from cases import BF16, F16, F32, FP8, INT8, INTERPRETED
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language import target_info

import replayssm_kernels as kernels
from replayssm_kernels import _configs, _conv, _launch, _norm, mamba2
from replayssm_kernels._configs import Config, Tile


pytestmark = pytest.mark.skipif(INTERPRETED, reason="compiles, and does not interpret")

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# (A plain run compiles for one of them: it takes minutes for all.)
on_targets = pytest.fixture(
    params=[
        pytest.param(target, id=name, marks=() if name == "sm_90" else pytest.mark.slow)
        for name, target in TARGETS.items()
    ]
)
LEAST_SHARED_MEMORY = 64 * 1024  # of a block, on any of them
KERNELS = {
    mamba2: ("_append_kernel", "_step_kernel", "_fused_kernel", "_window_kernel", "_fold_kernel"),
    _conv: ("_causal_conv_kernel",),
    _norm: ("_rms_norm_kernel",),
}
POINTERS = {F32: "*fp32", BF16: "*bf16", F16: "*fp16", torch.int32: "*i32", INT8: "*i8", FP8: "*fp8e4nv"}


class Compiles:
    """Stands for a kernel: a launch compiles it for the target and does nothing else."""

    def __init__(self, kernel, target, compiled):
        self.kernel, self.target, self.compiled = kernel, target, compiled

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, num_warps=4, num_stages=3, launch_pdl=None, maxnreg=None, **named):
        values = dict(zip(self.kernel.arg_names, args)) | named
        signature, constants, attributes = {}, {}, {}
        for i, parameter in enumerate(self.kernel.params):
            value = values[parameter.name]
            if (
                value is None
                or parameter.is_constexpr
                or (isinstance(value, int) and value == 1 and not parameter.do_not_specialize)
            ):
                signature[parameter.name], constants[(i,)] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = POINTERS[value.dtype]
                attributes[(i,)] = [["tt.divisibility", 16]]
            else:
                signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        options = {"num_warps": num_warps, "num_stages": num_stages, "launch_pdl": launch_pdl, "maxnreg": maxnreg}
        options = {name: value for name, value in options.items() if value is not None}
        source = ASTSource(self.kernel, signature, constants, attributes)

        def current_target():  # what kernels that differ between devices ask for
            return self.target

        current_target.__triton_builtin__ = True
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(target_info, "current_target", current_target)
            result = triton.compile(source, target=self.target, options=options)
        self.compiled.append((self.kernel.__name__, result))


@on_targets
def compiled(request, monkeypatch):
    """(name, result) of every kernel that a call launches."""
    found = []
    for module, names in KERNELS.items():
        for name in names:
            monkeypatch.setattr(module, name, Compiles(getattr(module, name), request.param, found))
    monkeypatch.setattr(mamba2, "can_overlap", lambda device: request.param.arch == 90)
    monkeypatch.setattr(_launch, "can_limit_registers", lambda device: request.param.backend == "cuda")
    return found


def decode(tokens=1, dtype=BF16, checkpoint_dtype=F32, shape=(2, 4, 2, 64, 128, 16), taps=4, seed=None,
           **options):  # fmt: skip
    batch, heads, groups, head_dim, state, slots = shape
    channels = heads * head_dim + 2 * groups * state
    zeros = lambda *size, dtype=dtype: torch.zeros(*size, dtype=dtype)  # noqa: E731
    x_buffer, B_buffer = zeros(batch, heads, slots, head_dim), zeros(batch, groups, slots, state)
    positions, A = zeros(5, batch, dtype=torch.int32), zeros(heads, dtype=F32)
    dt_buffer = zeros(batch, heads, slots, dtype=F32)
    checkpoint = zeros(batch, heads, head_dim, state, dtype=checkpoint_dtype)
    storage = {"scale": zeros(batch, heads, head_dim, 1, dtype=F32)} if checkpoint_dtype.itemsize == 1 else {}
    storage |= {} if seed is None else {"seed": seed}
    kernels.mamba2_decode(
        positions, zeros(batch, tokens, channels), zeros(batch, tokens, heads), zeros(batch, 40, channels),
        zeros(channels, taps), zeros(channels), x_buffer, B_buffer, dt_buffer, A, A, checkpoint, dt_bias=A, **storage,
        **options,
    )  # fmt: skip
    kernels.mamba2_fold(positions, x_buffer, B_buffer, dt_buffer, A, checkpoint, inplace=bool(storage), **storage)


@pytest.mark.parametrize(
    "call",
    [
        {"fused": False},
        {"tokens": 5},
        {"tokens": 20, "shape": (2, 2, 1, 80, 128, 51), "checkpoint_dtype": BF16, "taps": 3},
        {"fused": True, "dtype": F16, "shape": (2, 2, 2, 64, 256, 20), "taps": 2},
        {"fused": False, "dtype": F32, "shape": (2, 3, 1, 128, 256, 40)},
        pytest.param({"fused": False, "checkpoint_dtype": INT8}, marks=pytest.mark.slow),
        pytest.param({"tokens": 5, "checkpoint_dtype": INT8, "seed": 2**32 - 1}, marks=pytest.mark.slow),
        pytest.param({"fused": True, "checkpoint_dtype": BF16, "seed": 3}, marks=pytest.mark.slow),
    ],
    ids=[
        "step",
        "window",
        "window of pieces, blocks of slots",
        "fused",
        "float32, state 256",
        "int8",
        "int8, stochastic window",
        "bfloat16, stochastic",
    ],
)
def test_compiles_elsewhere(call, compiled):
    """With the configuration that a device gets which the table does not know."""
    decode(**call)
    assert len(compiled) >= 2
    assert max(result.metadata.shared for _, result in compiled) <= LEAST_SHARED_MEMORY


sm_90 = pytest.mark.parametrize("compiled", [TARGETS["sm_90"]], indirect=True, ids=["sm_90"])


@sm_90
@pytest.mark.parametrize(
    ("tokens", "checkpoint_dtype"),
    [(1, FP8), pytest.param(5, FP8, marks=pytest.mark.slow), pytest.param(1, INT8, marks=pytest.mark.slow)],
    ids=str,
)
def test_8_bits_compile(tokens, checkpoint_dtype, compiled):
    """float8 is there from compute capability 8.9 on."""
    decode(tokens=tokens, fused=False if tokens == 1 else None, checkpoint_dtype=checkpoint_dtype, seed=3)
    names = {"_append_kernel", "_step_kernel" if tokens == 1 else "_window_kernel", "_fold_kernel"}
    assert {name for name, _ in compiled} == names


@sm_90
@pytest.mark.parametrize("checkpoint_dtype", [INT8, pytest.param(FP8, marks=pytest.mark.slow)], ids=str)
def test_a_step_in_8_bits_is_a_matrix_product_of_what_is_copied_asynchronously(checkpoint_dtype, compiled, monkeypatch):
    """In one part, too; the state is asked for before the wait for the other launch."""
    monkeypatch.setattr(_configs, "OVERRIDE", Config(Tile(64, 1, 128, state="prefetch")))
    decode(fused=False, checkpoint_dtype=checkpoint_dtype)
    (step,) = (result.asm["ptx"] for name, result in compiled if name == "_step_kernel")
    assert "mma.sync" in step and ".f32.f16.f16.f32" in step
    assert step.index("prefetch.global.L2") < step.index("griddepcontrol.wait") < step.index("cp.async.cg")
    assert step.index("cp.async.cg") < step.index(".f32.f16.f16.f32")


CONFIGS = [
    Config(Tile(32, 2, 32, state="stream")),
    Config(Tile(32, 1, 64, state="keep", registers=128)),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.tile.state)
def test_other_configurations_compile(config, compiled, monkeypatch):
    monkeypatch.setattr(_configs, "OVERRIDE", config)
    decode(fused=False, checkpoint_dtype=BF16)
    names = {name for name, _ in compiled}
    assert names == {"_append_kernel", "_step_kernel", "_fold_kernel"}


def test_a_convolution_compiles(compiled):
    zeros = torch.zeros(2, 5, 64)
    kernels.causal_conv(torch.zeros(5, 2, dtype=torch.int32), zeros, zeros, torch.zeros(64, 3), None)
    assert [name for name, _ in compiled] == ["_causal_conv_kernel"]


def test_a_norm_compiles(compiled):
    """
    float32 from a recurrence or as wide as the gate, the result as the projection wants it; groups that are no power of
    2, and one that is read twice.
    """
    calls = [
        (8192, 1024, F32, BF16, {"out_dtype": BF16}),
        (8192, 1024, BF16, BF16, {}),
        (7168, 3584, F16, F32, {"weight_in_float32": True}),
        (48, 24, F32, BF16, {"weight_in_float32": True, "norm_before_gate": True, "out_dtype": BF16}),
        (16384, 16384, F32, BF16, {"out_dtype": BF16}),
        (20000, 20000, F16, F16, {"weight_in_float32": True, "norm_before_gate": True}),
    ]
    for columns, group, dtype, weight_dtype, options in calls:
        y, weight = torch.zeros(2, 1, columns, dtype=dtype), torch.zeros(columns, dtype=weight_dtype)
        gate = torch.zeros(2, 1, columns + 8, dtype=BF16)[..., :columns]
        kernels.rms_norm(y, gate, weight, 1e-5, group, **options)
    for weight_in_float32 in (False, True):
        hidden, weight = torch.zeros(2, 1, 4096, dtype=BF16), torch.zeros(4096, dtype=BF16)
        kernels.rms_norm(hidden, None, weight, 1e-5, weight_in_float32=weight_in_float32)
    assert [name for name, _ in compiled] == ["_rms_norm_kernel"] * (len(calls) + 2)
    assert max(result.metadata.shared for _, result in compiled) <= LEAST_SHARED_MEMORY
