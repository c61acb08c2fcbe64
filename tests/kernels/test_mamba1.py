"""
Mamba-1 steps, windows, flushes and scans against the recurrence in float64, token by token, and as torch operators. See
`test_mamba2.py` for how it is run.
"""

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
    error,
    needs,
    on_gpu,
    play,
    poisoned_memory,
    run_in_interpreter,
    same_bits,
)
from mamba1_cases import Mamba1Layer as Layer
from misfits import cast, copy, elsewhere, flat, gaps, named, refuses, shorter

import replayssm_kernels as kernels
from replayssm_kernels import mamba1
from replayssm_kernels.mamba1 import Tile


DTYPES = [F32, BF16, F16]
# The relative error of a state that remembers many decays. NVIDIA's `ex2.approx` is off by up to 2^-22, and decays of
# such an error, spread evenly, leave 1.0e-6 in the state behind 65 tokens (with exact powers of two it is 2.9e-7: the
# products A dt are rounded). The interpreter's are exact.
LONG = {"cpu": 1e-6, "cuda": 2e-6}
# Of the outputs of a thousand calls: now and then a row's y is a small difference of large terms. Of two thousand on an
# H200 the largest error was 3.2e-6 and 95 in a hundred were below 1e-6; that of the states was 7.4e-7, no larger in the
# end than after a hundred calls.
OUTPUTS = {"cpu": 1e-6, "cuda": 5e-6}

# (batch, groups, channels of a group, state, slots), what else differs, and the lengths of the calls.
SMALL = {
    "one slot": ((2, 1, 32, 16, 1), {}, (1, 1, 1, 2)),
    "odd, five slots": ((2, 1, 24, 16, 5), {"first": 2}, (1, 1, 5, 2)),
    "more channels than a tile": ((2, 1, 150, 16, 4), {"first": 3, "dtype": BF16}, (1, 1, 1, 1, 2)),
    "two groups, as Zamba": ((1, 2, 72, 16, 4), {"first": 1}, (1, 3, 1, 1)),
    "three groups, final dt": ((2, 3, 10, 16, 6), {"raw_dt": False, "first": 5}, (2, 1, 4)),
    "no gate, no D": ((2, 1, 40, 16, 4), {"gate": False, "D": False, "dtype": F16}, (1, 2, 1)),
    "state 7": ((2, 1, 20, 7, 8), {"first": 6}, (8, 1, 3)),
    "state 8": ((1, 2, 64, 8, 4), {"dtype": BF16}, (1, 2, 1)),
    "state 64": ((1, 1, 40, 64, 5), {"dtype": BF16, "first": 4}, (1, 4, 1)),
    "state 200": ((1, 1, 9, 200, 3), {}, (1, 2)),
    "windows of sixteen": ((2, 1, 24, 16, 40), {"first": 33, "dtype": BF16}, (16, 5, 16, 13, 1)),
}  # fmt: skip

LARGE = {
    f"{b} rows, {g} x {p} channels, state {n}, {s} slots": (
        (b, g, p, n, s), more, (1, 1, min(s, 5), 1, min(s, 16), 1, 2, 1)
    )
    for b, g, p, n, s, more in [
        (1, 1, 8192, 16, 4, {"dtype": BF16}),
        (5, 1, 8192, 16, 28, {"dtype": BF16, "first": 11}),
        (64, 1, 8192, 16, 4, {"dtype": BF16, "first": 1}),
        (33, 2, 3712, 16, 30, {"dtype": BF16, "first": 29}),
        (3, 1, 5120, 16, 4, {"dtype": F16, "checkpoint_dtype": F16}),
        (7, 1, 1000, 8, 5, {"checkpoint_dtype": BF16, "first": 4}),
        (3, 1, 1536, 64, 20, {"dtype": BF16, "raw_dt": False}),
        (2, 1, 260, 256, 8, {"gate": False, "D": False}),
        (300, 1, 1024, 16, 3, {"dtype": BF16, "checkpoint_dtype": BF16}),
    ]
}  # fmt: skip


@needs
@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL.keys())
def test_equals_the_recurrence(case, device):
    shape, options, lengths = case
    play(Layer(shape, device, **options), lengths)


@on_gpu
@pytest.mark.parametrize("case", LARGE.values(), ids=LARGE.keys())
def test_equals_the_recurrence_on_models_shapes(case, device):
    shape, options, lengths = case
    play(Layer(shape, device, **options), lengths)


@needs
@pytest.mark.parametrize("checkpoint_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype, checkpoint_dtype, device):
    """A 16-bit checkpoint is the exact state, rounded, after every flush (`Layer.folded`)."""
    layer = Layer((2, 1, 24, 16, 5), device, dtype, checkpoint_dtype, first=3)
    play(layer, (1, 3), seed=1)
    layer.flush(layer.held.clamp(max=1))
    y, expected = layer.advance(1, fold=0, out_dtype=None)  # rounded to the dtype of the activations
    limit = {F32: 1e-6, BF16: 8e-3 if device == "cpu" else 4e-3, F16: 5e-4}[dtype]
    assert error(y, expected) <= limit


@needs
@pytest.mark.parametrize("seed", [None, 11], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("checkpoint_dtype", [INT8, FP8], ids=str)
def test_8_bits(checkpoint_dtype, seed, device):
    """Steps, windows and flushes from channels with a scale, which is new after every flush."""
    layer = Layer((3, 2, 24, 12, 5), device, BF16, checkpoint_dtype, first=3)
    layer.rounding_seed = seed
    play(layer, (1, 3, 1), seed=1)
    layer.flush(layer.held.clamp(max=1))


@on_gpu
@pytest.mark.parametrize("checkpoint_dtype", [INT8, FP8], ids=str)
@pytest.mark.parametrize("name", [*LARGE])
def test_8_bits_on_models_shapes(name, checkpoint_dtype, device):
    shape, options, lengths = LARGE[name]
    play(Layer(shape, device, **options | {"checkpoint_dtype": checkpoint_dtype}), lengths)


@needs
@pytest.mark.parametrize("checkpoint_dtype", [BF16, INT8], ids=str)
def test_rounding_is_the_reference_s(checkpoint_dtype, device):
    """The kernels' random bits, scales and roundings are those of `hf_replayssm.ops.quantize`, from the same sums."""
    from hf_replayssm.ops import quantize

    layer = Layer((2, 2, 24, 16, 5), device, checkpoint_dtype=checkpoint_dtype, first=3)
    layer.advance(4, count=torch.tensor([4, 2], device=device))
    layer.rounding_seed = 2**31 + 7
    fold = torch.tensor([3, 2], device=device)
    storage = {} if layer.scale is None else {"scale": layer.scale}
    arguments = layer.positions(0, fold), *layer.buffers(), layer.A, layer.checkpoint
    state = kernels.mamba1_fold(*arguments, dt_bias=layer.dt_bias, **storage)
    kernels.mamba1_fold(*arguments, dt_bias=layer.dt_bias, **layer.storage(), inplace=True)
    bits = quantize.random_bits(layer.rounding_seed, layer.seen - layer.held + fold, state.shape[1:], state.device)
    values, _ = quantize.store(state, checkpoint_dtype, -2, bits)
    assert (layer.checkpoint.float() != values.float()).float().mean() <= (0.0 if device == "cpu" else 1e-3)


TILES = {
    "rows of one program": Tile(64, 2, 1, rows=3),
    "columns of a channel in several threads": Tile(16, 4, 4),
    "two warps": Tile(128, 2, 2, warps=2, registers=96, evict="evict_first"),
    "one channel a thread": Tile(32, 1, 3, rows=5),
    "more stages": Tile(64, 2, 2, rows=4, stages=4, overlap=True),
}


@needs
@pytest.mark.parametrize("slots", [1, 3, 7])
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES.keys())
def test_every_kind_of_tile(tile, slots, device, monkeypatch):
    monkeypatch.setattr(mamba1, "OVERRIDE", tile)
    play(Layer((5, 1, 72, 16, slots), device, BF16, first=5), (1, min(4, slots), 1, 1, slots), flushes=0.7)


@needs
@pytest.mark.parametrize("slots", [3, pytest.param(7, marks=pytest.mark.slow)])
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES.keys())
def test_8_bits_in_every_kind_of_tile(tile, slots, device, monkeypatch):
    monkeypatch.setattr(mamba1, "OVERRIDE", tile)
    layer = Layer((5, 1, 72, 16, slots), device, BF16, INT8, first=2)
    layer.rounding_seed = 11
    play(layer, (1, 3, 1, 1), flushes=0.7)
    layer.flush(layer.held.clamp(max=1))


@needs
def test_all_phases_in_one_call(device):
    """Rows with every number of held tokens, with and without a new one, that fold none, some or all."""
    slots = 4
    layer = Layer((16, 1, 16, 16, slots), device, first=1, seed=5)
    rows = torch.arange(16, device=device)
    held = rows % slots
    y, expected = layer.advance(slots, count=held)
    assert error(y, expected) <= layer.state_bar
    count = (rows // slots) % 2  # with COUNT = 0: nothing is written but a checkpoint that folds
    fold = torch.where(rows < 8, (held + count) * (rows % 2), ((held + count) / 2).ceil().long())
    assert {0, 1, 2} <= set(fold.tolist()) and bool((fold < held + count).any()) and bool((fold > held).any())
    y, expected = layer.advance(1, count=count, fold=fold)
    assert error(y, expected) <= layer.state_bar
    assert error(*layer.whole_state()) <= layer.state_bar
    y, expected = layer.advance(1)
    assert error(y, expected) <= layer.state_bar


@needs
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_call_without_real_tokens_changes_nothing(tokens, device):
    layer = Layer((2, 1, 24, 16, 4), device, BF16, first=3)
    layer.advance(2)
    owned = [*layer.buffers(), layer.checkpoint]
    before = [tensor.clone() for tensor in owned]
    layer.advance(tokens, count=0)
    assert all(same_bits(old, new) for old, new in zip(before, owned))


@needs
def test_counts_and_folds_that_are_too_large_stay_in_the_row(device):
    """A wrong COUNT or FOLD gives wrong results, not writes to foreign memory."""
    layer = Layer((2, 1, 24, 16, 4), device)
    layer.advance(3)
    new = layer.new_tokens(2)[:4]
    guarded = []
    for tensor in (*layer.buffers(), layer.checkpoint):
        wide = torch.full((3, *tensor.shape), 7.0, device=device, dtype=tensor.dtype)
        wide[1] = tensor
        guarded.append(wide)
    inside = [wide[1] for wide in guarded]
    kernels.mamba1_step(layer.positions(9, 99), *new, *inside[:3], layer.A, layer.D, inside[3], dt_bias=layer.dt_bias)
    kernels.mamba1_fold(layer.positions(9, 99), *inside[:3], layer.A, inside[3], dt_bias=layer.dt_bias, inplace=True)
    assert all(bool((wide[::2] == 7).all()) for wide in guarded)


@needs
def test_rows_do_not_depend_on_each_other(device, monkeypatch):
    """A row's output is bit for bit that of the row alone, whatever its neighbours hold (NaN, or another phase)."""
    monkeypatch.setattr(mamba1, "OVERRIDE", Tile(64, 2, 2, rows=3))
    positions = torch.tensor([[9, 5, 7], [1, 0, 3], [3, 2, 0], [1, 0, 1], [4, 0, 0]], dtype=torch.int32, device=device)
    batch, channels, state, slots = 3, 70, 16, 4

    def run(rows):
        generator = torch.Generator().manual_seed(0)
        randn = lambda *size: torch.randn(*size, generator=generator).to(device)  # noqa: E731
        arguments = [randn(batch, 1, 1, channels), randn(batch, 1, 1, state), randn(batch, 1, 1, state),
                     randn(batch, 1, 1, channels), randn(batch, 1, slots, channels), randn(batch, 1, slots, state),
                     randn(batch, 1, slots, channels)]  # fmt: skip
        checkpoint, A, D = randn(batch, 1, state, channels), -randn(1, state, channels).abs(), randn(1, channels)
        others = [row for row in range(batch) if row not in rows]
        for tensor in [*arguments, checkpoint]:
            tensor[others] = NAN
        y = kernels.mamba1_step(positions, *arguments, A, D, checkpoint, dt_bias=randn(1, channels))
        return y[rows], checkpoint[rows]

    together = run([0, 1, 2])
    for row in (0, 2):  # (row 1 has no new token)
        assert all(same_bits(alone[0], all_[row]) for alone, all_ in zip(run([row]), together))


@needs
def test_outputs_do_not_depend_on_the_length_of_the_buffer(device):
    """
    A token that is replayed goes through the arithmetic that its own output went through. So with a checkpoint in
    float32, steps, windows and flushes of any order give the same bits. (On a GPU up to the compiler's liberty.)
    """
    length, ways = 12, {1: (1,), 4: (1,), 5: (3, 1, 2), 12: (4,)}  # slots, and lengths of the calls in turn
    generator = torch.Generator().manual_seed(0)
    randn = lambda *size: torch.randn(*size, generator=generator).to(device)  # noqa: E731
    x, dt = randn(1, length, 1, 24).to(BF16), randn(1, length, 1, 24).to(BF16)
    B, C = randn(1, length, 1, 16).to(BF16), randn(1, length, 1, 16).to(BF16)
    A, D, dt_bias = -randn(1, 16, 24).abs(), randn(1, 24), randn(1, 24)
    results = []
    for slots, lengths in ways.items():
        buffers = [tensor.new_full((1, 1, slots, tensor.shape[-1]), NAN) for tensor in (x, B, dt)]
        checkpoint, outputs = torch.zeros(1, 1, 16, 24, device=device), []
        held = begin = call = 0
        while begin < length:
            count = min(lengths[call % len(lengths)], slots - held, length - begin)
            fold = held + count if held + count == slots else 0
            positions = torch.tensor([0, 0, held, count, fold], dtype=torch.int32, device=device)[:, None]
            new = [tensor[:, begin : begin + count] for tensor in (x, B, C, dt)]
            outputs.append(kernels.mamba1_step(positions, *new, *buffers, A, D, checkpoint, dt_bias=dt_bias,
                                               out_dtype=F32))  # fmt: skip
            held, begin, call = (held + count) % slots, begin + count, call + 1
        results.append(torch.cat(outputs, 1))
    y, state = kernels.mamba1_scan(x, B, C, dt, A, D, None, dt_bias=dt_bias, out_dtype=F32)
    assert error(state, checkpoint) <= 1e-6  # of the last way, which has just flushed
    for other in (y, *results[1:]):
        assert same_bits(results[0], other) if device == "cpu" else error(other, results[0]) <= 1e-6


@needs
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_flush_alone(dtype, device):
    layer = Layer((3, 2, 24, 16, 5), device, dtype, first=4)
    layer.advance(4, count=torch.tensor([4, 0, 3], device=device))
    layer.flush(torch.tensor([2, 0, 3], device=device))
    assert error(*layer.whole_state()) <= layer.state_bar
    y, expected = layer.advance(1)
    assert error(y, expected) <= layer.state_bar


@needs
@pytest.mark.parametrize("checkpoint_dtype", DTYPES, ids=str)
def test_a_state_returned_is_a_state_in_place(checkpoint_dtype, device):
    layer = Layer((2, 1, 24, 16, 5), device, checkpoint_dtype=checkpoint_dtype, first=3)
    layer.advance(4)
    positions = layer.positions(0, torch.tensor([3, 0], device=device))
    before = layer.checkpoint.clone()
    returned = kernels.mamba1_fold(positions, *layer.buffers(), layer.A, layer.checkpoint, dt_bias=layer.dt_bias)
    assert same_bits(before, layer.checkpoint)
    assert same_bits(returned[1], before[1].float())  # nothing to fold: the checkpoint itself
    layer.flush(torch.tensor([3, 0], device=device))
    if checkpoint_dtype == BF16 and device == "cpu":  # the interpreter cuts off
        assert bool(((layer.checkpoint - returned).abs() <= returned.abs() * 2**-7).all())
    else:
        assert same_bits(returned.to(checkpoint_dtype), layer.checkpoint)


@needs
@pytest.mark.parametrize("raw", [-math.inf, -200.0, 1e4], ids=["none", "next to none", "total decay"])
def test_extreme_time_steps(raw, device):
    layer = Layer((1, 1, 24, 16, 8), device, first=6)
    plain = layer.new_tokens
    layer.new_tokens = lambda tokens: (*(new := plain(tokens))[:3], torch.full_like(new[3], raw), new[4])
    before = layer.state
    for tokens, fold in [(1, 0), (5, 2), (1, 5)]:
        y, expected = layer.advance(tokens, fold=fold)
        assert error(y, expected) <= 1e-6
    state, expected = layer.whole_state()
    assert error(state, expected) <= 1e-6
    assert raw > 0 or error(state, before) <= 1e-12


# Scans.


def scan_case(device, batch, groups, channels, state, tokens, dtype=F32, *, raw=True, gate=True, D=True, initial=F32):
    """(arguments of `mamba1_scan`, y, state) in float64."""
    layer = Layer((batch, groups, channels, state, 1), device, dtype, initial or F32, raw_dt=raw, D=D, gate=gate)
    x, B, C, dt, z = layer.new_tokens(tokens)
    start = layer.checkpoint if initial else None
    new = x.double(), B.double(), layer.final_dt(dt)
    count = torch.full((batch,), tokens, device=device)
    y, last = layer.recurrence(layer.base * bool(initial), *new, count, C.double(), z)
    arguments = {"x": x, "B": B, "C": C, "dt": dt, "A": layer.A, "D": layer.D, "initial_state": start,
                 "dt_bias": layer.dt_bias, "z": z}  # fmt: skip
    return arguments, y, last


SCANS = {
    "one token": ((2, 1, 24, 16, 1), {}),
    "odd": ((2, 1, 70, 16, 7), {"dtype": BF16}),
    "two groups, no start": ((1, 2, 24, 16, 9), {"initial": None}),
    "final dt, no gate, no D": ((2, 1, 20, 7, 6), {"raw": False, "gate": False, "D": False}),
    "state 64": ((1, 1, 20, 64, 5), {"dtype": F16, "initial": BF16}),
}
LONG_SCANS = {
    "a prompt": ((1, 1, 8192, 16, 1003), {"dtype": BF16, "initial": None}),
    "a batch": ((20, 1, 4096, 16, 130), {"dtype": BF16}),
    "two groups": ((2, 2, 3712, 16, 200), {"dtype": BF16}),
    "state 256": ((2, 1, 260, 256, 65), {}),
}


def check_scan(shape, options, device):
    arguments, y, last = scan_case(device, *shape, **options)
    before = {name: tensor.clone() for name, tensor in arguments.items() if tensor is not None}
    with poisoned_memory():
        got, state = kernels.mamba1_scan(**arguments, out_dtype=F32)
    assert got.dtype == state.dtype == F32
    assert error(got.double(), y) <= LONG[device] and error(state.double(), last) <= LONG[device]
    assert all(same_bits(old, arguments[name]) for name, old in before.items())
    got, _ = kernels.mamba1_scan(**arguments)
    assert got.dtype == options.get("dtype", F32)


@needs
@pytest.mark.parametrize(("shape", "options"), SCANS.values(), ids=SCANS.keys())
def test_a_scan_is_the_recurrence(shape, options, device):
    check_scan(shape, options, device)


@on_gpu
@pytest.mark.parametrize(("shape", "options"), LONG_SCANS.values(), ids=LONG_SCANS.keys())
def test_a_long_scan_is_the_recurrence(shape, options, device):
    check_scan(shape, options, device)


@needs
@pytest.mark.parametrize("raw", [True, False])
def test_masked_tokens_of_a_scan_are_inert(raw, device):
    arguments, _, _ = scan_case(device, 2, 1, 24, 16, 7, raw=raw)
    names = ("x", "B", "C", "dt", "z")
    real = torch.tensor([False, True, True, False, False, True, True], device=device)
    few = arguments | {name: arguments[name][:, real] for name in names}
    arguments["dt"][:, ~real] = -math.inf if raw else 0.0
    y, state = kernels.mamba1_scan(**arguments)
    expected, last = kernels.mamba1_scan(**few)
    assert same_bits(y[:, real], expected) and same_bits(state, last)


@needs
def test_a_long_continuation_in_chunks_is_one_scan(device):
    tokens, chunk = (40, 16) if device == "cpu" else (4000, 1000)
    arguments, _, _ = scan_case(device, 2, 1, 24 if device == "cpu" else 2048, 16, tokens, BF16)
    whole, last = kernels.mamba1_scan(**arguments, out_dtype=F32)
    state, parts = arguments["initial_state"], []
    for begin in range(0, tokens, chunk):
        few = {name: arguments[name][:, begin : begin + chunk] for name in ("x", "B", "C", "dt", "z")}
        y, state = kernels.mamba1_scan(**arguments | few | {"initial_state": state}, out_dtype=F32)
        parts.append(y)
    assert same_bits(torch.cat(parts, 1), whole) and same_bits(state, last)


@needs
def test_the_ops_give_what_their_reference_gives(device):
    """`hf_replayssm.ops.mamba1`: kernels behind the signatures of the reference."""
    from hf_replayssm.ops import mamba1 as ops

    layer = Layer((2, 2, 24, 16, 6), device)
    options = {"dt_bias": layer.dt_bias}
    x, B, C, dt, z = layer.new_tokens(4)
    y, state = ops.scan_triton(C, x, B, dt, layer.A, layer.D, layer.checkpoint, z=z, **options)
    expected, last = ops.scan(C, x, B, dt, layer.A, layer.D, layer.checkpoint, z=z, **options)
    assert error(y, expected) <= 1e-6 and error(state, last) <= 1e-6

    positions, buffers = layer.positions(4, 0), layer.buffers()
    y = ops.step_triton(positions, x, B, C, dt, buffers, layer.A, layer.D, layer.checkpoint, z=z, **options)
    replayed = ops.replay(C, *buffers, layer.A, layer.D, layer.checkpoint, 0, 4, z=z, **options)
    assert error(y, expected) <= 1e-6 and error(replayed, expected) <= 1e-6
    positions = layer.positions(0, 3)
    state = ops.fold_triton(positions, buffers, layer.A, layer.checkpoint, **options)
    assert error(state, ops.fold(*buffers, layer.A, layer.checkpoint, 3, **options)) <= 1e-6


# Long sequences.


class Float32Loop:
    """The recurrence in float32 with torch, on the tokens of a layer: the error that any such loop makes."""

    def __init__(self, layer):
        self.layer, self.state = layer, layer.checkpoint.clone()
        self.recurrence = layer.recurrence
        layer.recurrence = self.watch

    def watch(self, state, x, B, dt, count, C=None, z=None):
        if C is not None:  # new tokens
            for t in range(x.shape[1]):
                B_t, x_t, dt_t = B[:, t].float(), x[:, t].float(), dt[:, t].float()
                new = self.state * (self.layer.A * dt_t[:, :, None]).exp()
                new = new + (dt_t * x_t)[:, :, None] * B_t[..., None]
                self.state = torch.where((t < count)[:, None, None, None], new, self.state)
        return self.recurrence(state, x, B, dt, count, C, z)


@needs
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_errors_do_not_grow(dtype, device):
    """Thousands of tokens in steps and windows, with slow decay; flushes at random or when a buffer is full."""
    many = device != "cpu"
    layer = Layer((2, 1, 256, 16, 8) if many else (1, 1, 16, 16, 4), device, dtype, seed=3)
    layer.A.fill_(-4e-3)
    loop = Float32Loop(layer)
    random = torch.Generator().manual_seed(1)
    lengths = [1 if i % 3 else 1 + int(torch.randint(4, (), generator=random)) for i in range(5000 if many else 60)]
    play(layer, lengths, seed=2, flushes=0.1, slack=10 if many else 1)
    ours = error(layer.whole_state()[0], layer.state)
    assert ours <= 2 * error(loop.state.double(), layer.state) + 1e-7, ours


@needs
@pytest.mark.parametrize("seed", range(2))
def test_random_sequences_with_crops(seed, device):
    """Windows of which any number is taken back, steps, and flushes alone."""
    many = device != "cpu"
    shape = (4, 2, 96, 16, 9) if many else (2, 1, 16, 16, 6)
    layer = Layer(shape, device, [F32, BF16][seed], first=4, seed=seed)
    random = torch.Generator().manual_seed(seed)
    slots, errors = shape[-1], []
    for _ in range(1000 if many else 10):
        draw = lambda highest: (torch.rand(shape[0], generator=random).to(device) * (highest + 1)).long()  # noqa: E731
        tokens = int(torch.randint(1, 6, (), generator=random))
        if bool((layer.held + tokens > slots).any()):
            layer.flush(torch.maximum(layer.held + tokens - slots, draw(layer.held)))
        y, expected = layer.advance(tokens, count=draw(torch.full_like(layer.held, tokens)), fold=0)
        errors.append(error(y, expected))
        layer.crop(draw(layer.held))
        fold = torch.where(draw(torch.ones_like(layer.held)) > 0, draw(layer.held), 0)
        y, expected = layer.advance(1, count=(layer.held < slots).long(), fold=fold)
        errors.append(error(y, expected))
    assert max(errors) <= OUTPUTS[device] and sorted(errors)[len(errors) * 9 // 10] <= 1e-6
    assert error(*layer.whole_state()) <= 1e-6


@on_gpu
@pytest.mark.parametrize("tokens", [1, 5])
def test_offsets_beyond_32_bits(tokens, device):
    """The checkpoint and the buffers of x and dt have more than 2^31 elements each."""
    batch, channels, state, slots = 16500, 8192, 16, 16
    if torch.cuda.get_device_properties(device).total_memory < 40 * 2**30:
        pytest.skip("needs 40 GiB")
    torch.manual_seed(0)
    randn = lambda *size: torch.empty(size, dtype=BF16, device=device).normal_()  # noqa: E731
    owned = [randn(batch, 1, slots, channels), randn(batch, 1, slots, state), randn(batch, 1, slots, channels)]
    checkpoint = randn(batch, 1, state, channels)
    assert checkpoint.numel() > 2**31 and owned[0].numel() > 2**31
    new = [randn(batch, tokens, 1, size) for size in (channels, state, state, channels)]
    A, D, bias = -torch.rand(1, state, channels, device=device), randn(1, channels), randn(1, channels)
    positions = torch.tensor([9, 13, 9, tokens, 8], dtype=torch.int32, device=device)[:, None].repeat(1, batch)
    rows = [0, 8200, batch - 1]
    few = [tensor[rows].contiguous() for tensor in (*new, *owned, checkpoint)]

    def call(positions, *args):
        return kernels.mamba1_step(positions, *args[:7], A, D, args[7], dt_bias=bias, out_dtype=F32)

    # (The few rows go in other tiles, which may sum in another order.)
    y = call(positions, *new, *owned, checkpoint)[rows]
    assert error(y, call(positions[:, rows].contiguous(), *few)) <= 1e-6
    assert all(same_bits(tensor[rows], part) for tensor, part in zip(owned, few[4:7], strict=True))
    assert error(checkpoint[rows].float(), few[7].float()) <= 1e-3
    positions[2:4] = 0
    newest = positions[:, -4:].contiguous(), *(tensor[-4:] for tensor in owned), A, checkpoint[-4:]
    state = kernels.mamba1_fold(*newest, dt_bias=bias)
    kernels.mamba1_fold(positions, *owned, A, checkpoint, dt_bias=bias, inplace=True)
    assert error(checkpoint[-4:].float(), state) <= 4e-3


# As torch operators.


def arguments(device="cpu", shape=(2, 2, 24, 16, 4), tokens=1, dtype=F32, seed=0):
    """Everything that any of the functions takes, by its name; the buffers hold two tokens."""
    layer = Layer(shape, device, dtype, first=1, seed=seed)
    for buffer in layer.buffers():
        buffer.copy_(layer.randn(*buffer.shape))
    layer.held += 2
    x, B, C, dt, z = layer.new_tokens(tokens)
    return {"positions": layer.positions(tokens, 1), "x": x, "B": B, "C": C, "dt": dt, "x_buffer": layer.x_buffer,
            "B_buffer": layer.B_buffer, "dt_buffer": layer.dt_buffer, "A": layer.A, "D": layer.D,
            "checkpoint": layer.checkpoint, "dt_bias": layer.dt_bias, "z": z,
            "initial_state": layer.checkpoint.clone()}  # fmt: skip


BUFFERS = ("x_buffer", "B_buffer", "dt_buffer")
STEP = ("positions", "x", "B", "C", "dt", *BUFFERS, "A", "D", "checkpoint", "dt_bias", "z")
FOLD = ("positions", *BUFFERS, "A", "checkpoint", "dt_bias")
SCAN = ("x", "B", "C", "dt", "A", "D", "initial_state", "dt_bias", "z")


def step(all_, **options):
    return kernels.mamba1_step(**{name: all_[name] for name in STEP}, **options)


def fold(all_, **options):
    return kernels.mamba1_fold(**{name: all_[name] for name in FOLD}, **options)


def scan(all_, **options):
    return kernels.mamba1_scan(**{name: all_[name] for name in SCAN}, **options)


@needs
@pytest.mark.parametrize("tokens", [1, 2])
def test_torch_accepts_the_operators(tokens, device):
    a = arguments(device, (1, 1, 16, 16, 5), tokens)
    operators = getattr(torch.ops, kernels.mamba1_step.__module__.partition(".")[0])
    calls = {
        "mamba1_step": (*(a[name] for name in STEP), None, None, BF16),
        "mamba1_fold": (*(a[name] for name in FOLD), None),
        "mamba1_flush": (*(a[name] for name in FOLD), None, 3),
        "mamba1_scan": (*(a[name] for name in SCAN), None),
    }
    for name, inputs in calls.items():
        torch.library.opcheck(getattr(operators, name).default, inputs)


@needs
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiles_in_one_graph(backend, device):
    """Results and everything written are those of the plain call, twice in a row (with inductor up to rounding)."""
    if backend == "inductor" and device == "cpu":
        pytest.skip("on a GPU only")

    def everything(all_):
        return step(all_), fold(all_), fold(all_, inplace=True).sum(-1), *scan(all_)

    a = arguments(device, (1, 1, 16, 16, 4))
    b = copy(a)
    torch._dynamo.reset()
    compiled = torch.compile(everything, fullgraph=True, backend=backend)
    for _ in range(2):
        expected, got = everything(a), compiled(b)
        pairs = [*zip(expected, got, strict=True), *((a[name], b[name]) for name in a)]
        differ = [float((x - y).abs().max() / y.abs().max()) for x, y in pairs if not same_bits(x, y)]
        assert all(difference < (1e-6 if backend == "inductor" else 0.0) for difference in differ), differ
        for c in (a, b):
            c["positions"][kernels.FIRST] = (c["positions"][kernels.FIRST] + 1) % 4
    torch._dynamo.reset()


@needs
def test_compiles_for_any_number_of_rows_and_tokens(device):
    torch._dynamo.reset()
    compiled = torch.compile(lambda all_: (step(all_), fold(all_), *scan(all_)), fullgraph=True, backend="aot_eager",
                             dynamic=True)  # fmt: skip
    for batch, tokens in [(2, 2), (3, 3)]:
        a = arguments(device, (batch, 1, 16, 16, 5), tokens)
        b = copy(a)
        expected = step(a), fold(a), *scan(a)
        assert all(same_bits(x, y) for x, y in zip(expected, compiled(b)))
        assert all(same_bits(a[name], b[name]) for name in a)
    torch._dynamo.reset()


@on_gpu
@pytest.mark.parametrize("tokens", [1, 3])
def test_cuda_graph(tokens, device):
    """A captured call replays with positions that change in place: plain steps, a flush, then steps behind it."""
    slots = 3 * tokens + 2
    a = arguments(device, (3, 1, 1024, 16, slots), tokens, BF16)
    a["positions"][1:] = torch.tensor([0, 0, tokens, 0], dtype=torch.int32, device=device)[:, None]
    b = copy(a)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step(copy(a))  # compiles
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step(b)
    held = first = 0
    for turn in range(7):
        flush = held + tokens if turn % 3 == 2 else turn % 2
        inputs = {name: torch.randn_like(a[name]) for name in ("x", "B", "C", "dt", "z")}
        for c in (a, b):
            c["positions"][1:] = torch.tensor([first, held, tokens, flush], dtype=torch.int32, device=device)[:, None]
            for name, value in inputs.items():
                c[name].copy_(value)
        graph.replay()
        assert same_bits(step(a), y)
        assert all(same_bits(a[name], b[name]) for name in a)
        held, first = held + tokens - flush, (first + flush) % slots


@pytest.mark.multigpu
def test_launches_on_the_tensors_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    assert torch.cuda.current_device() == 0
    a = arguments("cuda:0", (2, 1, 256, 16, 4))
    b = {name: tensor.to("cuda:1") for name, tensor in a.items()}
    for function in (step, fold, lambda all_: scan(all_)[0]):
        assert same_bits(function(a).cpu(), function(b).cpu())
    assert torch.cuda.current_device() == 0


def wide(tensor):
    return tensor.new_zeros(*tensor.shape[:-2], 300, tensor.shape[-1])


# (function, argument, what is wrong with it, the error's message)
MISFITS = [
    *((step, name, shorter, f"{name} has") for name in ("x", "B", "C", "dt", "A", "D", "dt_bias", "z", "positions")),
    *((step, name, shorter, "must be") for name in (*BUFFERS, "checkpoint")),
    *((step, name, flat, name) for name in ("C", "dt", "z", *BUFFERS, "checkpoint")),
    *((step, name, gaps, f"{name}.* contiguous") for name in (*BUFFERS, "checkpoint", "positions")),
    *((step, name, elsewhere, name) for name in ("x", "B", "C", "dt", "A", "D", "dt_bias", "z", *BUFFERS)),
    *((step, name, cast(BF16), name) for name in ("x", "B", "dt", *BUFFERS)),
    *((step, name, cast(torch.int64), name) for name in ("x", "C", "dt", "z", "checkpoint", "A")),
    (step, "positions", cast(torch.int64), "positions.*int32"),
    (step, "checkpoint", wide, "300 columns"),
    (fold, "checkpoint", gaps, "checkpoint.* contiguous"),
    (fold, "x_buffer", shorter, "x_buffer"),
    (fold, "dt_bias", shorter, "dt_bias"),
    *((scan, name, shorter, name) for name in SCAN[1:4]),
    *((scan, name, shorter, "must be") for name in (*SCAN[:1], *SCAN[4:])),
    *((scan, name, elsewhere, name) for name in SCAN[1:]),
]


@needs
@pytest.mark.parametrize(("function", "name", "change", "message"), named(MISFITS))
def test_misfits_raise_and_change_nothing(function, name, change, message, device):
    refuses(arguments(device), function, name, change, message)


@needs
def test_an_output_dtype_that_does_not_fit(device):
    with pytest.raises(ValueError, match="out_dtype"):
        step(arguments(device), out_dtype=torch.int8)


@needs
@pytest.mark.parametrize("layout", ["gaps", "expanded"])
@pytest.mark.parametrize("name", ["A", "D", "dt_bias", "x", "B", "C", "dt", "z"])
def test_other_layouts_are_taken(layout, name, device):
    """Never read as if they were contiguous."""
    a = arguments(device, (1, 1, 16, 16, 3))
    a[name] = gaps(a[name]) if layout == "gaps" else a[name][..., :1].expand_as(a[name])
    dense = copy(a) | {name: a[name].contiguous()}
    for function in (step, lambda all_: scan(all_)[0]):
        expected, got = function(dense), function(a)
        # (On a GPU another layout is another program.)
        assert same_bits(expected, got) if device == "cpu" else error(got, expected) <= 1e-6


@needs
def test_without_tokens_or_rows(device):
    empty = arguments(device, (2, 1, 16, 16, 4), tokens=0)
    assert step(empty).shape == (2, 0, 1, 16)
    y, state = scan(empty)
    assert y.shape == (2, 0, 1, 16) and same_bits(state, empty["initial_state"])
    nobody = arguments(device, (0, 1, 16, 16, 4))
    assert step(nobody).shape == (0, 1, 1, 16) and fold(nobody).shape == (0, 1, 16, 16)


# These tests can fail.


@needs
@pytest.mark.parametrize("what", ["dt", "x", "B", "checkpoint", "first", "fold"])
def test_a_fault_is_found(what, device):
    layer = Layer((1, 1, 16, 16, 4), device, first=2)
    layer.advance(3)
    if what == "first":
        right = layer.positions
        one = torch.tensor([[0], [1], [0], [0], [0]], dtype=torch.int32, device=device)
        layer.positions = lambda *args: right(*args) - one
        with pytest.raises(AssertionError, match="x_buffer was written"):
            layer.advance(1)
        return
    if what == "fold":  # a flush that is forgotten
        before = layer.checkpoint.clone()
        layer.flush(3)
        layer.checkpoint.copy_(before)
    elif what == "checkpoint":
        layer.checkpoint *= 1.001
    else:
        buffer = {"dt": layer.dt_buffer, "x": layer.x_buffer, "B": layer.B_buffer}[what]
        buffer[:, :, 2] *= 1.001
    y, expected = layer.advance(1)
    assert error(y, expected) > 1e-5
    assert error(*layer.whole_state()) > 1e-5


if not INTERPRETED:

    @pytest.mark.timeout(600)
    @pytest.mark.parametrize("marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
    def test_in_the_interpreter(marked):
        run_in_interpreter(__file__, marked)
