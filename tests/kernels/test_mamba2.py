"""Mamba-2 steps, windows and flushes against the recurrence in float64, token by token.

Without an accelerator the kernels run in triton's interpreter, which must be chosen before triton is imported: a plain
run starts this file once more in a process of its own, with TRITON_INTERPRET=1. On a GPU: `pytest -m gpu`.
"""

import itertools
import math

import pytest
import torch


pytest.importorskip("triton")
from cases import (
    BF16,
    F16,
    F32,
    FP8,
    INT8,
    INTERPRETED,
    NAN,
    Layer,
    error,
    needs,
    on_gpu,
    play,
    poisoned_memory,
    run_in_interpreter,
    same_bits,
)

import replayssm_kernels as kernels
from replayssm_kernels import _configs
from replayssm_kernels._configs import Config, Tile


FUSED = (True, False, None)
DTYPES = [F32, BF16, F16]

# (batch, heads, groups, head_dim, state, slots), what else differs, and the lengths of the calls.
SMALL = {
    "one slot": ((2, 1, 1, 16, 16, 1), {}, (1, 1, 1, 2)),
    "odd, five slots": ((2, 3, 1, 24, 48, 5), {"first": 2}, (1, 1, 5, 2)),
    "eight groups": ((1, 8, 8, 16, 16, 16), {"raw_dt": False, "first": 14}, (2, 1)),
    "sixteen heads in a group": ((1, 16, 1, 16, 16, 4), {"D": False}, (1, 2, 1)),
    "three heads in a group": ((2, 6, 2, 16, 64, 40), {"first": 39, "dtype": BF16}, (8, 1)),
    "head_dim 64, state 128": ((1, 2, 1, 64, 128, 16), {"dtype": BF16}, (2, 1)),
    "head_dim 80, three groups": ((1, 3, 3, 80, 16, 16), {"first": 9, "dtype": F16}, (5, 1)),
    "state 256, two pieces of slots": ((1, 1, 1, 16, 256, 80), {"first": 70}, (40, 40, 1, 1)),
    "both limits, four taps": ((2, 2, 1, 16, 16, 8), {"conv": 4, "limits": (0.2, 0.5)}, (1, 1, 1, 5)),
    "three taps, from the start": ((2, 4, 2, 16, 16, 8), {"conv": 3, "ring": 11, "conv_bias": False}, (1, 2, 1)),
    "no activation, no D, no dt_bias": (
        (2, 2, 2, 24, 48, 8),
        {"conv": 4, "ring": 4, "activation": None, "D": False, "raw_dt": False, "seen": 7, "first": 5},
        (1, 5, 1),
    ),
    "window over the ring": ((1, 2, 1, 16, 16, 40), {"conv": 4, "ring": 5, "seen": 2, "dtype": F16}, (17, 16, 40)),
}  # fmt: skip

# On a GPU: every head_dim, state, number of groups, heads in a group and number of slots with several of the others.
LARGE = {
    f"{h // g} of {g} groups, {p}x{n}, {s} slots": ((5, h, g, p, n, s), more, (1, 2, min(s, t), 1, 1, min(s, 8), 1))
    for h, g, p, n, s, t, more in [
        (24, 8, 64, 128, 16, 5, {"dtype": BF16, "conv": 4, "seen": 9}),
        (128, 8, 64, 128, 16, 16, {"dtype": BF16, "conv": 4, "seen": 1, "first": 11}),
        (16, 1, 64, 64, 40, 40, {"dtype": F16, "conv": 3, "ring": 19, "first": 33}),
        (3, 3, 80, 64, 80, 17, {"conv": 4, "ring": 4, "seen": 2, "conv_bias": False}),
        (9, 3, 80, 128, 40, 40, {"dtype": BF16, "checkpoint_dtype": BF16, "first": 1}),
        (2, 2, 24, 256, 80, 40, {"dtype": F16, "first": 60, "D": False}),
        (32, 2, 64, 256, 16, 16, {"dtype": BF16, "raw_dt": False, "first": 7}),
        (48, 1, 24, 48, 5, 5, {"conv": 4, "activation": None, "limits": (0.1, 0.4), "dtype": BF16}),
        (8, 8, 16, 64, 1, 1, {"checkpoint_dtype": F16, "conv": 3, "seen": 5}),
        (3, 1, 128, 256, 64, 33, {"first": 50}),
        (6, 2, 80, 48, 80, 64, {"first": 79, "conv": 4, "ring": 9, "dtype": F16}),
    ]
}


@needs
@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL.keys())
def test_equals_the_recurrence(case, device):
    shape, options, lengths = case
    play(Layer(shape, device, **options), lengths, fused=FUSED)


@on_gpu
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("case", LARGE.values(), ids=LARGE.keys())
def test_equals_the_recurrence_on_models_shapes(case, fused, device):
    shape, options, lengths = case
    play(Layer(shape, device, **options), lengths, fused=(fused,))


@on_gpu
@pytest.mark.parametrize("batch", [64, 1024])
def test_large_batches(batch, device):
    layer = Layer((batch, 128 if batch == 64 else 32, 8, 64, 128, 16), device, BF16, conv=4, seen=3, first=5)
    play(layer, (1, 1, 5, 1), fused=(None,))


@needs
@pytest.mark.parametrize(
    ("conv", "dtype", "checkpoint_dtype"),
    [(0, *pair) for pair in itertools.product(DTYPES, DTYPES)] + [(4, BF16, F32), (4, F16, BF16), (4, F32, F16)],
    ids=str,
)
def test_dtypes(conv, dtype, checkpoint_dtype, device):
    """A 16-bit checkpoint is the exact state, rounded, after every flush (`Layer.folded`)."""
    layer = Layer((2, 2, 1, 16, 32, 8), device, dtype, checkpoint_dtype, conv=conv, first=6, seed=conv)
    play(layer, (1, 1, 4), fused=FUSED, seed=1)
    layer.flush(layer.held.clamp(max=1))
    y, expected = layer.advance(1, fold=0, out_dtype=None)  # rounded to the dtype of the activations
    limit = {F32: 1e-6, BF16: 8e-3 if device == "cpu" else 4e-3, F16: 5e-4}[dtype]
    assert error(y, expected) <= limit


@needs
@pytest.mark.parametrize("seed", [None, 2**32 - 5], ids=["nearest", "stochastic"])
@pytest.mark.parametrize(
    ("dtype", "checkpoint_dtype"), [(BF16, INT8), (F16, FP8), (F32, FP8), (BF16, FP8), (F16, INT8)], ids=str
)
def test_8_bits(dtype, checkpoint_dtype, seed, device):
    """Steps, windows and flushes from rows with a scale, which is new after every flush."""
    layer = Layer((2, 2, 1, 24, 48, 8), device, dtype, checkpoint_dtype, conv=4 if seed else 0, seen=6, first=6)
    layer.rounding_seed = seed
    play(layer, (1, 1, 4), fused=FUSED, seed=1)
    layer.flush(layer.held.clamp(max=1))


@needs
@pytest.mark.parametrize(
    ("checkpoint_dtype", "state", "columns"),
    [(INT8, "keep", 16), (INT8, "again", 64), (FP8, "stream", 16), (INT8, "stream", 64)],
    ids=str,
)
def test_8_bits_in_every_kind_of_configuration(state, columns, checkpoint_dtype, device, monkeypatch):
    monkeypatch.setattr(_configs, "OVERRIDE", Config(Tile(16, 1, columns, state=state), append_block=32))
    for slots, lengths in ((5, (1, 1)), (20, (17, 1))):
        layer = Layer((2, 1, 1, 24, 40, slots), device, BF16, checkpoint_dtype, first=slots - 2)
        play(layer, lengths, seed=slots, fused=(False,), flushes=1.0)


@needs
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("checkpoint_dtype", [INT8, FP8], ids=str)
def test_8_bits_by_C_of_any_size(checkpoint_dtype, tokens, device):
    """C goes into float16 beside a checkpoint of 8 bits, whatever its range."""
    shape = (8, 2, 1, 16, 128)
    batch, heads, groups, head_dim, state = shape
    generator = torch.Generator(device).manual_seed(0)
    sizes = torch.tensor([0.0, 1e-24, 1e-10, 1e-5, 1.0, 1e5, 1e30, 1e34], device=device)
    C = torch.randn(batch, tokens, groups, state, generator=generator, device=device)
    C[..., ::7] *= 1e-6  # not all of one size
    C = (C * sizes[:, None, None, None]).to(BF16)
    x = torch.zeros(batch, tokens, heads, head_dim, device=device, dtype=BF16)
    dt = torch.full((batch, tokens, heads), 0.5, device=device)
    buffers = [torch.full((batch, n, 4, size), NAN, device=device, dtype=BF16)
               for n, size in ((heads, head_dim), (groups, state))]  # fmt: skip
    buffers.append(torch.full((batch, heads, 4), NAN, device=device))
    A = torch.tensor([-1.0, -0.25], device=device)
    checkpoint = torch.randn(batch, heads, head_dim, state, generator=generator, device=device)
    checkpoint = checkpoint.mul(40 if checkpoint_dtype == INT8 else 100).to(checkpoint_dtype)
    scale = torch.rand(batch, heads, head_dim, 1, generator=generator, device=device)
    positions = torch.tensor([9, 0, 0, tokens, 0], dtype=torch.int32, device=device)[:, None].repeat(1, batch)
    y = kernels.mamba2_step(positions, x, torch.zeros_like(C), C, dt, *buffers, A, None, checkpoint, scale=scale,
                            fused=False, out_dtype=F32)  # fmt: skip
    passed = 0.5 * torch.arange(1, tokens + 1, device=device, dtype=torch.float64)
    decay = torch.exp(A.double() * passed[:, None])[:, :, None]
    products = (checkpoint.double() * scale.double())[:, None] * C.double()[:, :, :, None]
    allowed = 1e-6 * products.abs().sum(-1) * decay
    assert ((y.double() - products.sum(-1) * decay).abs() <= allowed).all()


@on_gpu
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("checkpoint_dtype", [INT8, FP8], ids=str)
@pytest.mark.parametrize("name", [*LARGE])
def test_8_bits_on_models_shapes(name, checkpoint_dtype, fused, device):
    shape, options, lengths = LARGE[name]
    play(Layer(shape, device, **options | {"checkpoint_dtype": checkpoint_dtype}), lengths, fused=(fused,))


@needs
@pytest.mark.parametrize("checkpoint_dtype", [BF16, F16, FP8, INT8], ids=str)
def test_rounding_is_the_reference_s(checkpoint_dtype, device):
    """The kernels' random bits, scales and roundings are those of `hf_replayssm.ops.quantize`, from the same sums."""
    from hf_replayssm.ops import quantize

    layer = Layer((2, 3, 1, 24, 40, 5), device, checkpoint_dtype=checkpoint_dtype, first=3, seen=11)
    layer.advance(4, count=torch.tensor([4, 2], device=device))
    fold = torch.tensor([3, 2], device=device)
    storage = {} if layer.scale is None else {"scale": layer.scale}
    cut_off = checkpoint_dtype == BF16 and device == "cpu"  # by the interpreter, what should go to the nearest
    for seed in [4_000_000_000] if cut_off else [None, 4_000_000_000]:
        owned = [layer.checkpoint.clone(), *(tensor.clone() for tensor in storage.values())]
        copies = dict(zip(storage, owned[1:]))
        arguments = layer.positions(0, fold), *layer.buffers(), layer.A, owned[0]
        state = kernels.mamba2_fold(*arguments, **copies)
        kernels.mamba2_fold(*arguments, **copies, seed=seed, inplace=True)
        tokens = layer.seen - layer.held + fold
        bits = None if seed is None else quantize.random_bits(seed, tokens, state.shape[1:], state.device)
        values, scale = quantize.store(state, checkpoint_dtype, -1, bits)
        if scale is not None:
            assert error(copies["scale"].double(), scale.double()) <= 1e-6
        different = owned[0].float() != values.float()
        # (A GPU divides, and adds a product, in its own way: a number between two others may go to the other one.)
        assert different.float().mean() <= (0.0 if device == "cpu" else 1e-3)


@needs
def test_rows_of_zeros_and_rows_that_are_not_finite(device):
    """A row of zeros has no scale to divide by; a NaN is not rounded to a number, and stays in its row."""
    layer = Layer((1, 1, 1, 16, 16, 4), device, checkpoint_dtype=INT8)
    layer.advance(1)
    layer.checkpoint[:, :, 3] = 0
    layer.x_buffer[:, :, layer.first, 3] = 0.0
    layer.scale[:, :, 5] = NAN
    positions = layer.positions(0, 1)
    kernels.mamba2_fold(positions, *layer.buffers(), layer.A, layer.checkpoint, scale=layer.scale, inplace=True)
    assert layer.stored()[0, 0, 3].eq(0).all() and layer.scale[0, 0, 3] == 0
    assert layer.stored().isnan().any(-1).nonzero()[:, 2].tolist() == [5]


CONFIGS = {
    "from registers, kept": Config(Tile(16, 1, 32, state="keep", registers=128), append_block=32),
    "from registers, read again": Config(Tile(32, 1, 16, "evict_first"), overlap=False),
    "through shared memory": Config(Tile(16, 1, 32, state="stream")),
    "two warps": Config(Tile(16, 2, 16, state="stream", registers=64)),
}


@needs
@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        pytest.param(config, dtype, id=f"{name}, {dtype}", marks=[pytest.mark.slow] if (i + j) % 2 else [])
        for i, (name, config) in enumerate(CONFIGS.items())
        for j, dtype in enumerate((F32, BF16))
    ],
)
def test_every_kind_of_configuration(config, dtype, device, monkeypatch):
    """All ways to go over a state, with a buffer of one block of slots and of several."""
    monkeypatch.setattr(_configs, "OVERRIDE", config)
    for slots, lengths in ((5, (1, 1, 3, 1, 5)), (20, (17, 1, 3, 1))):
        layer = Layer((2, 4, 2, 24, 48, slots), device, dtype, dtype, conv=4, ring=20, first=slots - 2)
        play(layer, lengths, fused=(False,), flushes=0.7)


@needs
@pytest.mark.parametrize(("conv", "fused"), [(4, True), (0, False)])
def test_all_phases_in_one_call(conv, fused, device):
    """Rows with every number of held tokens, with and without a new one, that fold none, some or all."""
    slots = 3
    layer = Layer((12, 1, 1, 16, 16, slots), device, conv=conv, first=1, seed=5)
    rows = torch.arange(12, device=device)
    held = rows % slots
    y, expected = layer.advance(slots, count=held)
    assert error(y, expected) <= 1e-6
    count = (rows // slots) % 2  # with COUNT = 0: nothing is written but a checkpoint that folds
    fold = torch.where(rows < 6, (held + count) * (rows % 2), ((held + count) / 2).ceil().long())
    assert {0, 1, 2} <= set(fold.tolist()) and bool((fold < held + count).any())
    y, expected = layer.advance(1, count=count, fold=fold, fused=fused)
    assert error(y, expected) <= 1e-6
    assert error(*layer.whole_state()) <= 1e-6
    y, expected = layer.advance(1, fused=fused)
    assert error(y, expected) <= 1e-6


@needs
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_call_without_real_tokens_changes_nothing(tokens, device):
    layer = Layer((2, 2, 1, 16, 16, 4), device, BF16, conv=4, seen=1, first=3)
    layer.advance(2)
    owned = [*layer.buffers(), layer.checkpoint, layer.conv_inputs]
    before = [tensor.clone() for tensor in owned]
    for fused in (True, False) if tokens == 1 else (None,):
        layer.advance(tokens, count=0, fused=fused)
        assert all(same_bits(old, new) for old, new in zip(before, owned))


@needs
def test_rows_do_not_depend_on_each_other(device):
    """A row's output is bit for bit that of the row alone, whatever its neighbours hold (NaN, or another phase)."""
    generator = torch.Generator().manual_seed(0)
    randn = lambda *size: torch.randn(*size, generator=generator).to(device)  # noqa: E731
    batch, heads, groups, head_dim, state, slots = 3, 2, 1, 16, 16, 4
    positions = torch.tensor([[9, 5, 7], [1, 0, 3], [3, 2, 0], [1, 0, 1], [4, 0, 0]], dtype=torch.int32, device=device)

    def run(rows):
        torch.manual_seed(0)
        generator.manual_seed(0)
        arguments = [randn(batch, 1, heads, head_dim), randn(batch, 1, groups, state), randn(batch, 1, groups, state),
                     randn(batch, 1, heads).abs(), randn(batch, heads, slots, head_dim),
                     randn(batch, groups, slots, state), randn(batch, heads, slots).abs()]  # fmt: skip
        checkpoint, A, D = randn(batch, heads, head_dim, state), -randn(heads).abs(), randn(heads)
        if rows != [0, 1, 2]:
            others = [row for row in range(batch) if row not in rows]
            for tensor in [*arguments, checkpoint]:
                tensor[others] = math.nan
        y = [kernels.mamba2_step(positions, *[a.clone() for a in arguments], A, D, c, fused=fused)
             for fused, c in [(True, checkpoint.clone()), (False, checkpoint)]]  # fmt: skip
        return [*(v[rows] for v in y), checkpoint[rows]]

    together = run([0, 1, 2])
    for row in range(batch):
        if row != 1:  # which has no new token
            assert all(same_bits(alone[0], all_[row]) for alone, all_ in zip(run([row]), together))


@needs
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_flush_alone(dtype, device):
    layer = Layer((3, 2, 1, 24, 16, 5), device, dtype, first=4)
    layer.advance(4, count=torch.tensor([4, 0, 3], device=device))
    layer.flush(torch.tensor([2, 0, 3], device=device))
    assert error(*layer.whole_state()) <= 1e-6
    y, expected = layer.advance(1)
    assert error(y, expected) <= 1e-6


@needs
@pytest.mark.parametrize("checkpoint_dtype", DTYPES, ids=str)
def test_a_state_returned_is_a_state_in_place(checkpoint_dtype, device):
    layer = Layer((2, 2, 1, 16, 16, 5), device, checkpoint_dtype=checkpoint_dtype, first=3)
    layer.advance(4)
    positions = layer.positions(0, torch.tensor([3, 0], device=device))
    before = layer.checkpoint.clone()
    returned = kernels.mamba2_fold(positions, *layer.buffers(), layer.A, layer.checkpoint)
    assert same_bits(before, layer.checkpoint)
    assert same_bits(returned[1], before[1].float())  # nothing to fold: the checkpoint itself
    layer.flush(torch.tensor([3, 0], device=device))
    if checkpoint_dtype == BF16 and device == "cpu":  # the interpreter cuts off
        assert bool(((layer.checkpoint - returned).abs() <= returned.abs() * 2**-7).all())
    else:
        assert same_bits(returned.to(checkpoint_dtype), layer.checkpoint)


@needs
@pytest.mark.parametrize("factor", [0.0, 40.0], ids=["no time", "total decay"])
def test_extreme_time_steps(factor, device):
    layer = Layer((1, 2, 1, 16, 16, 8), device, limits=(factor, factor), first=6)
    layer.A *= 16 if factor else 1
    for tokens, fold in [(1, 0), (5, 2), (1, 5)]:
        y, expected = layer.advance(tokens, fold=fold)
        assert error(y, expected) <= 1e-6
    assert error(*layer.whole_state()) <= 1e-6


@needs
def test_large_and_tiny_time_steps_beside_each_other(device):
    """Sums of dt in which a small one would vanish: time is counted from the newest token backwards."""
    layer = Layer((1, 1, 1, 16, 16, 8), device, raw_dt=False)
    layer.A.fill_(-1e-3)
    scale = iter([3e4, 1.0, 1e-4, 1e-4])
    plain = layer.rand
    layer.rand = lambda *size: plain(*size) * next(scale)
    for tokens in (2, 1, 2, 1):
        y, expected = layer.advance(tokens)
        assert error(y, expected) <= 1e-6
    assert error(*layer.whole_state()) <= 1e-6


class Float32Loop:
    """The recurrence in float32 with torch, on the tokens of a layer: the error that any such loop makes."""

    def __init__(self, layer):
        self.layer, self.state = layer, layer.checkpoint.clone()
        self.recurrence = layer.recurrence
        layer.recurrence = self.watch

    def watch(self, state, x, B, dt, count, C=None):
        if C is not None:  # new tokens
            per_group = self.layer.shape[1] // self.layer.shape[2]
            for t in range(x.shape[1]):
                B_t, x_t, dt_t = B[:, t].float().repeat_interleave(per_group, 1), x[:, t].float(), dt[:, t].float()
                new = self.state * (self.layer.A * dt_t).exp()[..., None, None]
                new = new + (dt_t[..., None] * x_t)[..., None] * B_t[:, :, None]
                self.state = torch.where((t < count)[:, None, None, None], new, self.state)
        return self.recurrence(state, x, B, dt, count, C)


@needs
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_errors_do_not_grow(dtype, device):
    """Thousands of tokens in steps and windows, with slow decay; flushes at random or when a buffer is full."""
    layer = Layer((1, 1, 1, 16, 16, 4), device, dtype, raw_dt=False, seed=3)
    if device != "cpu":
        layer = Layer((2, 4, 2, 64, 128, 16), device, dtype, raw_dt=False, seed=3)
    layer.A.fill_(-2e-3)
    loop = Float32Loop(layer)
    calls = 5000 if device != "cpu" else 60
    random = torch.Generator().manual_seed(1)
    lengths = [1 if i % 3 else 1 + int(torch.randint(4, (), generator=random)) for i in range(calls)]
    # (After thousands of tokens a float32 loop's outputs are off by 1e-6 on average, and the worst by more.)
    play(layer, lengths, seed=2, fused=(None, False, True), flushes=0.1, slack=1 if device == "cpu" else 10)
    ours = error(layer.whole_state()[0], layer.state)
    assert ours <= 2 * error(loop.state.double(), layer.state), ours


@needs
@pytest.mark.parametrize("seed", range(2))
def test_random_sequences_with_crops(seed, device):
    """Windows of which any number is taken back, steps, and flushes alone."""
    many = device != "cpu"
    shape = (4, 6, 2, 64, 128, 16) if many else (2, 2, 1, 16, 16, 6)
    layer = Layer(shape, device, [F32, BF16][seed], conv=4, ring=9 if seed else 12, reach=5, seen=2, first=4, seed=seed)
    random = torch.Generator().manual_seed(seed)
    slots = shape[-1]
    for i in range(1000 if many else 6):
        draw = lambda highest: (torch.rand(shape[0], generator=random).to(device) * (highest + 1)).long()  # noqa: E731
        tokens = int(torch.randint(1, 6, (), generator=random))
        if bool((layer.held + tokens > slots).any()):
            layer.flush(torch.maximum(layer.held + tokens - slots, draw(layer.held)))
        y, expected = layer.advance(tokens, count=draw(torch.full_like(layer.held, tokens)), fold=0)
        assert error(y, expected) <= layer.bar(tokens)
        layer.crop(draw(torch.minimum(layer.held, layer.croppable())))
        fold = torch.where(draw(torch.ones_like(layer.held)) > 0, draw(layer.held), 0)
        y, expected = layer.advance(1, count=(layer.held < slots).long(), fold=fold, fused=[None, True, False][i % 3])
        assert error(y, expected) <= 1e-6
    assert error(*layer.whole_state()) <= 1e-6


@on_gpu
@pytest.mark.parametrize("tokens", [1, 5])
def test_offsets_beyond_32_bits(tokens, device):
    """The checkpoint and the buffer of x have more than 2^31 elements each."""
    batch, heads, groups, head_dim, state, slots = 2050, 128, 8, 64, 128, 136
    if torch.cuda.get_device_properties(device).total_memory < 40 * 2**30:
        pytest.skip("needs 40 GiB")
    torch.manual_seed(0)
    randn = lambda *size: torch.empty(size, dtype=BF16, device=device).normal_()  # noqa: E731
    owned = [randn(batch, heads, slots, head_dim), randn(batch, groups, slots, state) / 10,
             torch.rand(batch, heads, slots, device=device)]  # fmt: skip
    checkpoint = randn(batch, heads, head_dim, state)
    assert checkpoint.numel() > 2**31 and owned[0].numel() > 2**31
    xBC = randn(batch, tokens, heads * head_dim + 2 * groups * state)
    dt = randn(batch, tokens, heads)
    conv_inputs, weight = randn(batch, 4, xBC.shape[-1]), randn(xBC.shape[-1], 4)
    A, D, bias = -torch.rand(heads, device=device), torch.rand(heads, device=device), torch.rand(heads, device=device)
    positions = torch.tensor([9, 130, 120, tokens, 100], dtype=torch.int32, device=device)[:, None].repeat(1, batch)
    rows = [0, 1024, batch - 1]
    few = [v[rows].contiguous() for v in (xBC, dt, conv_inputs, *owned, checkpoint)]
    call = lambda positions, xBC, dt, conv_inputs, x, B, times, state: kernels.mamba2_decode(  # noqa: E731
        positions, xBC, dt, conv_inputs, weight, None, x, B, times, A, D, state, dt_bias=bias, fused=False
    )
    close = lambda ours, expected: error(ours.double(), expected.double()) < 2e-3  # noqa: E731 (other tiles, other sums)
    y = call(positions, xBC, dt, conv_inputs, *owned, checkpoint)[rows]
    assert close(y, call(positions[:, rows].contiguous(), *few))
    assert all(same_bits(a[rows], b) for a, b in zip([conv_inputs, *owned], few[2:6], strict=True))
    assert close(checkpoint[rows], few[6])
    positions[2:4] = 0
    state = kernels.mamba2_fold(positions[:, -4:].contiguous(), *[v[-4:] for v in owned], A, checkpoint[-4:])
    kernels.mamba2_fold(positions, *owned, A, checkpoint, inplace=True)
    assert close(checkpoint[-4:], state)


@needs
def test_a_permuted_input_is_taken(device):
    layer = Layer((2, 2, 1, 16, 16, 4), device)
    values = [layer.randn(*size) for size in [(2, 1, 2, 16), (2, 1, 1, 16), (2, 1, 1, 16), (2, 1, 2)]]
    y = []
    for odd in (False, True):
        new = [v.movedim(-1, 0).contiguous().movedim(0, -1) if odd else v for v in values]
        assert not odd or not new[0].is_contiguous()
        y.append(kernels.mamba2_step(layer.positions(1, 0), *new, *layer.buffers(), layer.A, layer.D, layer.checkpoint))
    assert same_bits(*y)


# These tests can fail.


@needs
@pytest.mark.parametrize("what", ["dt", "x", "B", "checkpoint", "first", "fold"])
def test_a_fault_is_found(what, device):
    layer = Layer((1, 1, 1, 16, 16, 4), device, first=2)
    layer.advance(3)
    if what == "dt":
        layer.dt_buffer[:, :, 2] *= 1.001
    elif what == "x":
        layer.x_buffer[:, :, 2] *= 1.001
    elif what == "B":
        layer.B_buffer[:, :, 2] *= 1.001
    elif what == "checkpoint":
        layer.checkpoint *= 1.001
    elif what == "first":
        right = layer.positions
        one = torch.tensor([[0], [1], [0], [0], [0]], dtype=torch.int32, device=device)
        layer.positions = lambda *args: right(*args) - one
        with pytest.raises(AssertionError, match="x_buffer was written"):
            layer.advance(1)
        return
    else:  # a flush that is forgotten
        before = layer.checkpoint.clone()
        layer.flush(3)
        layer.checkpoint.copy_(before)
    y, expected = layer.advance(1)
    assert error(y, expected) > 1e-5
    assert error(*layer.whole_state()) > 1e-5


@needs
def test_a_stray_write_is_found(device, monkeypatch):
    layer = Layer((1, 1, 1, 16, 16, 4), device)
    step = kernels.mamba2_step

    def stray(**arguments):
        arguments["B_buffer"][0, 0, 3, 15] = 0.0
        return step(**arguments)

    monkeypatch.setattr(kernels, "mamba2_step", stray)
    with pytest.raises(AssertionError, match="B_buffer was written"):
        layer.advance(1)


@needs
def test_memory_is_poisoned(device):
    with poisoned_memory():
        assert bool(torch.zeros(8, device=device).new_empty(8).isnan().all())


if not INTERPRETED:

    @pytest.mark.timeout(600)
    @pytest.mark.parametrize("marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
    def test_in_the_interpreter(marked):
        run_in_interpreter(__file__, marked)
