"""Steps, windows and flushes of the delta rules against the recurrence in float64; see `test_mamba2.py` for how."""

import itertools

import pytest
import torch


pytest.importorskip("triton")
from cases import BF16, F16, F32, FP8, INT8, INTERPRETED, error, needs, on_gpu, play, run_in_interpreter, same_bits
from delta_cases import DeltaLayer

import replayssm_kernels as kernels
from replayssm_kernels import gated_delta
from replayssm_kernels._configs import Config, Tile


DTYPES = [F32, BF16, F16]
RULES = pytest.mark.parametrize("kda", [False, True], ids=["gated delta", "kda"])

# (batch, value heads, key heads, K, V, slots), what else differs, and the lengths of the calls.
SMALL = {
    "one slot": ((2, 1, 1, 16, 16, 1), {}, (1, 1, 1, 2)),
    "odd, five slots": ((2, 3, 1, 24, 24, 5), {"first": 2}, (1, 1, 5)),
    "two value heads a key head": ((2, 4, 2, 16, 32, 16), {"first": 14, "dtype": BF16}, (2, 1, 1)),
    "four value heads a key head": ((1, 4, 1, 16, 16, 4), {"most": 2.0}, (1, 2, 1)),
    "three pieces of slots": ((2, 1, 1, 16, 16, 40), {"first": 39, "dtype": BF16}, (16, 20, 1)),
    "128 x 128": ((1, 2, 1, 128, 128, 16), {"dtype": BF16}, (2, 1)),
    "64 x 64, float16": ((1, 1, 1, 64, 64, 16), {"first": 9, "dtype": F16}, (5, 1)),
    "256 x 16": ((1, 1, 1, 256, 16, 8), {"first": 7}, (3, 1, 1)),
    "a window of two pieces": ((1, 1, 1, 16, 16, 40), {"first": 30}, (3, 34, 1)),
    "four taps": ((2, 2, 1, 16, 16, 8), {"conv": 4, "conv_bias": True}, (1, 1, 1, 5)),
    "three taps, from the start": ((2, 4, 2, 16, 16, 8), {"conv": 3, "ring": 11}, (1, 2, 1)),
    "no activation": (
        (2, 2, 2, 24, 16, 8),
        {"conv": 4, "ring": 4, "activation": None, "seen": 7, "first": 5},
        (1, 5, 1),
    ),
    "window over the ring": ((1, 1, 1, 16, 16, 40), {"conv": 4, "ring": 5, "seen": 2, "dtype": F16}, (9, 1, 33)),
}  # fmt: skip

# On a GPU: every K, V, number of value heads of a key head and number of slots with several of the others.
LARGE = {
    f"{h} of {m}, {k}x{v}, {s} slots": ((5, h, m, k, v, s), more, (1, 2, min(s, t), 1, 1, min(s, 8), 1))
    for h, m, k, v, s, t, more in [
        (32, 16, 128, 128, 16, 5, {"dtype": BF16, "conv": 4, "seen": 9}),
        (32, 32, 128, 128, 16, 16, {"dtype": BF16, "conv": 4, "seen": 1, "first": 11}),
        (16, 4, 64, 64, 40, 40, {"dtype": F16, "conv": 3, "ring": 45, "first": 33}),
        (3, 3, 96, 192, 80, 17, {"conv": 4, "ring": 20, "seen": 2}),
        (8, 2, 256, 128, 32, 32, {"dtype": BF16, "checkpoint_dtype": BF16, "first": 1}),
        (2, 2, 128, 256, 80, 40, {"dtype": F16, "first": 60}),
        (8, 4, 256, 256, 16, 16, {"dtype": BF16, "first": 7}),
        (4, 1, 16, 128, 5, 5, {"conv": 4, "activation": None, "dtype": BF16}),
        (8, 8, 16, 64, 1, 1, {"checkpoint_dtype": F16, "conv": 3, "seen": 5}),
        (4, 2, 64, 16, 64, 33, {"first": 50}),
    ]
}


@needs
@RULES
@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL.keys())
def test_equals_the_recurrence(case, kda, device):
    shape, options, lengths = case
    play(DeltaLayer(shape, device, kda=kda, **options), lengths)


@on_gpu
@RULES
@pytest.mark.parametrize("case", LARGE.values(), ids=LARGE.keys())
def test_equals_the_recurrence_on_models_shapes(case, kda, device):
    shape, options, lengths = case
    play(DeltaLayer(shape, device, kda=kda, **options), lengths)


@on_gpu
@RULES
@pytest.mark.parametrize("tokens", range(1, 17))
def test_windows_of_every_length(tokens, kda, device):
    layer = DeltaLayer((4, 4, 2, 128, 128, 32), device, BF16, kda=kda, first=20)
    play(layer, (tokens, 1, tokens, tokens, 1))


@on_gpu
@RULES
@pytest.mark.parametrize("batch", [64, 512])
def test_large_batches(batch, kda, device):
    layer = DeltaLayer((batch, 32, 32 if kda else 16, 128, 128, 16), device, BF16, kda=kda, conv=4, seen=3, first=5)
    play(layer, (1, 1, 5, 1))


@needs
@RULES
@pytest.mark.parametrize(
    ("conv", "dtype", "checkpoint_dtype"),
    [(0, *pair) for pair in itertools.product(DTYPES, DTYPES)] + [(4, BF16, F32)],
    ids=str,
)
def test_dtypes(conv, dtype, checkpoint_dtype, kda, device):
    """A 16-bit checkpoint is the exact state, rounded, after every flush (`Layer.folded`)."""
    layer = DeltaLayer((1, 1, 1, 16, 16, 8), device, dtype, checkpoint_dtype, kda=kda, conv=conv, first=6, seed=conv)
    play(layer, (1, 4, 1), seed=1, flushes=0.8)
    layer.flush(layer.held.clamp(max=1))
    y, expected = layer.advance(1, fold=0, out_dtype=None)  # rounded to the dtype of the activations
    limit = {F32: 1e-6, BF16: 8e-3 if device == "cpu" else 4e-3, F16: 1e-3}[dtype]
    assert error(y, expected) <= limit


@needs
@RULES
@pytest.mark.parametrize(
    ("checkpoint_dtype", "seed"),
    [(INT8, 11), *(pytest.param(dtype, seed, marks=pytest.mark.slow) for dtype, seed in ((INT8, None), (FP8, 11)))],
    ids=str,
)
def test_8_bits(checkpoint_dtype, seed, kda, device):
    """Steps, windows and flushes from columns with a scale, which is new after every flush."""
    layer = DeltaLayer((2, 2, 1, 40, 24, 5), device, BF16, checkpoint_dtype, kda=kda, first=3, seen=4)
    layer.rounding_seed = seed
    play(layer, (1, 3, 1), seed=1)
    layer.flush(layer.held.clamp(max=1))


@needs
@RULES
def test_8_bits_through_shared_memory_and_of_several_pieces(kda, device, monkeypatch):
    tile = Tile(16, 1, 16, state="stream")
    monkeypatch.setattr(gated_delta, "OVERRIDE", Config(tile, append_warps=2))
    layer = DeltaLayer((1, 1, 1, 40, 24, 20), device, BF16, INT8, kda=kda, first=15)
    play(layer, (17, 1), seed=2, flushes=1.0)


@needs
@RULES
@pytest.mark.parametrize("state", ["again", "keep"])
def test_a_step_flushes_8_bits(state, kda, device, monkeypatch):
    """One row takes in all its tokens, the other some of them; the state is read again or kept in registers."""
    monkeypatch.setattr(gated_delta, "OVERRIDE", Config(Tile(16, 1, 32, state=state)))
    layer = DeltaLayer((2, 2, 1, 40, 24, 5), device, BF16, INT8, kda=kda, first=3)
    layer.rounding_seed = 5
    for tokens, fold in ((3, 0), (1, torch.tensor([4, 2], device=device)), (1, torch.tensor([1, 3], device=device))):
        y, expected = layer.advance(tokens, fold=fold)
        assert error(y, expected) <= layer.bar(tokens)
    assert error(*layer.whole_state()) <= layer.state_bar


@on_gpu
@RULES
@pytest.mark.parametrize("checkpoint_dtype", [INT8, FP8], ids=str)
@pytest.mark.parametrize("name", [*LARGE])
def test_8_bits_on_models_shapes(name, checkpoint_dtype, kda, device):
    shape, options, lengths = LARGE[name]
    play(DeltaLayer(shape, device, kda=kda, **options | {"checkpoint_dtype": checkpoint_dtype}), lengths)


@needs
@pytest.mark.parametrize("checkpoint_dtype", [BF16, INT8], ids=str)
def test_rounding_is_the_reference_s(checkpoint_dtype, device):
    """The kernels' random bits, scales and roundings are those of `hf_replayssm.ops.quantize`, from the same sums."""
    from hf_replayssm.ops import quantize

    layer = DeltaLayer((2, 2, 1, 24, 40, 5), device, checkpoint_dtype=checkpoint_dtype, first=3, seen=8)
    layer.advance(4, count=torch.tensor([4, 2], device=device))
    layer.rounding_seed = 2**31 + 7
    fold = torch.tensor([3, 2], device=device)
    storage = {} if layer.scale is None else {"scale": layer.scale}
    arguments = layer.positions(0, fold), *layer.buffers(), layer.checkpoint
    state = kernels.gated_delta_fold(*arguments, **storage)
    kernels.gated_delta_fold(*arguments, **layer.storage(), inplace=True)
    bits = quantize.random_bits(layer.rounding_seed, layer.seen - layer.held + fold, state.shape[1:], state.device)
    values, _ = quantize.store(state, checkpoint_dtype, -2, bits)
    assert (layer.checkpoint.float() != values.float()).float().mean() <= (0.0 if device == "cpu" else 1e-3)


CONFIGS = {
    "into registers": Config(Tile(16, 1, 32, registers=128), append_block=32),
    "kept for a flush": Config(Tile(32, 2, 32, state="keep", registers=128), append_warps=2),
    "through shared memory": Config(Tile(32, 2, 16, "evict_first", state="stream"), overlap=False),
    "rows of more than a buffer": Config(Tile(16, 2, 32, slots=32, state="stream")),
}


@needs
@RULES
@pytest.mark.parametrize(("config", "dtype"), [*zip(CONFIGS.values(), (*DTYPES, F32))], ids=CONFIGS.keys())
def test_every_kind_of_configuration(config, dtype, kda, device, monkeypatch):
    """All ways to go over a state, with a buffer of one block of slots and of several."""
    monkeypatch.setattr(gated_delta, "OVERRIDE", config)
    for slots, lengths in ((5, (1, 3)), (18, (9, 8, 1))):
        layer = DeltaLayer((1, 1, 1, 40, 24, slots), device, dtype, dtype, kda=kda, conv=4, ring=20, first=slots - 2)
        play(layer, lengths, flushes=0.7)


@needs
@pytest.mark.parametrize(("conv", "kda"), [(4, False), (0, False), (0, True)])
def test_all_phases_in_one_call(conv, kda, device):
    """Rows with every number of held tokens, with and without a new one, that fold none, some or all."""
    slots = 3
    layer = DeltaLayer((12, 1, 1, 16, 16, slots), device, kda=kda, conv=conv, first=1, seed=5)
    rows = torch.arange(12, device=device)
    held = rows % slots
    y, expected = layer.advance(slots, count=held)
    assert error(y, expected) <= layer.state_bar
    count = (rows // slots) % 2  # with COUNT = 0: nothing is written but a checkpoint that folds
    fold = torch.where(rows < 6, (held + count) * (rows % 2), ((held + count) / 2).ceil().long())
    assert {0, 1, 2} <= set(fold.tolist()) and bool((fold < held + count).any())
    y, expected = layer.advance(1, count=count, fold=fold)
    assert error(y, expected) <= layer.state_bar
    assert error(*layer.whole_state()) <= layer.state_bar
    y, expected = layer.advance(1)
    assert error(y, expected) <= layer.state_bar


@needs
@RULES
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_call_without_real_tokens_changes_nothing(tokens, kda, device):
    layer = DeltaLayer((2, 2, 1, 16, 16, 4), device, BF16, kda=kda, conv=4, seen=1, first=3)
    layer.advance(2)
    owned = [*layer.buffers(), layer.checkpoint, layer.conv_inputs]
    before = [tensor.clone() for tensor in owned]
    layer.advance(tokens, count=0)
    assert all(same_bits(old, new) for old, new in zip(before, owned))


@needs
@RULES
def test_a_padded_token_is_inert(kda, device):
    """With g = 0 and beta = 0 the state is bit for bit what it was."""
    layer = DeltaLayer((2, 2, 1, 16, 16, 8), device, kda=kda, first=5)
    layer.advance(3)
    before, _ = layer.whole_state()
    layer.most = layer.memory = 0.0
    layer.rand = lambda *size: torch.zeros(size, device=device)
    layer.memory = 1.0
    for tokens in (1, 3):
        y, expected = layer.advance(tokens)
        assert error(y, expected) <= layer.state_bar
    assert same_bits(before, layer.whole_state()[0])


@needs
@RULES
def test_rows_do_not_depend_on_each_other(kda, device):
    """A row's output is bit for bit that of the row alone, whatever its neighbours hold (NaN, or another phase)."""
    generator = torch.Generator()
    randn = lambda *size: torch.randn(*size, generator=generator).to(device)  # noqa: E731
    batch, heads, slots = 3, 2, 4
    positions = torch.tensor([[9, 5, 7], [1, 0, 3], [3, 2, 0], [1, 0, 1], [4, 0, 0]], dtype=torch.int32, device=device)
    gates = (16,) if kda else ()

    def run(rows):
        generator.manual_seed(0)
        tensors = [randn(batch, 1, 1, 16), randn(batch, 1, 1, 16), randn(batch, 1, heads, 16),
                   -randn(batch, 1, heads, *gates).abs(), randn(batch, 1, heads).sigmoid(), randn(batch, 1, slots, 16),
                   randn(batch, heads, slots, 16), -randn(batch, heads, slots, *gates).abs(),
                   randn(batch, heads, 16, 16)]  # fmt: skip
        for tensor in tensors:
            tensor[[row for row in range(batch) if row not in rows]] = float("nan")
        return [kernels.gated_delta_step(positions, *tensors)[rows], tensors[-1][rows]]

    together = run([0, 1, 2])
    for row in (0, 2):  # row 1 has no new token
        assert all(same_bits(alone[0], all_[row]) for alone, all_ in zip(run([row]), together))


@needs
@RULES
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_flush_alone(dtype, kda, device):
    layer = DeltaLayer((3, 2, 1, 24, 16, 5), device, dtype, kda=kda, first=4)
    layer.advance(4, count=torch.tensor([4, 0, 3], device=device))
    layer.flush(torch.tensor([2, 0, 3], device=device))
    assert error(*layer.whole_state()) <= layer.state_bar
    y, expected = layer.advance(1)
    assert error(y, expected) <= layer.state_bar


@needs
@RULES
@pytest.mark.parametrize("checkpoint_dtype", DTYPES, ids=str)
def test_a_state_returned_is_a_state_in_place(checkpoint_dtype, kda, device):
    layer = DeltaLayer((2, 2, 1, 16, 16, 5), device, checkpoint_dtype=checkpoint_dtype, kda=kda, first=3)
    layer.advance(4)
    positions = layer.positions(0, torch.tensor([3, 0], device=device))
    before = layer.checkpoint.clone()
    returned = kernels.gated_delta_fold(positions, **layer.owned())
    assert same_bits(before, layer.checkpoint)
    assert same_bits(returned[1], before[1].float())  # nothing to fold: the checkpoint itself
    layer.flush(torch.tensor([3, 0], device=device))
    if checkpoint_dtype == BF16 and device == "cpu":  # the interpreter cuts off
        assert bool(((layer.checkpoint - returned).abs() <= returned.abs() * 2**-7).all())
    else:
        assert same_bits(returned.to(checkpoint_dtype), layer.checkpoint)


@needs
@RULES
@pytest.mark.parametrize("memory", [1e9, 1e-3], ids=["no decay", "total decay"])
def test_extreme_decays(memory, kda, device):
    layer = DeltaLayer((1, 2, 1, 16, 16, 8), device, kda=kda, memory=memory, first=6)
    for tokens, fold in [(1, 0), (5, 2), (1, 5)]:
        y, expected = layer.advance(tokens, fold=fold)
        assert error(y, expected) <= layer.state_bar
    assert error(*layer.whole_state()) <= layer.state_bar


@needs
@RULES
def test_large_and_tiny_decays_beside_each_other(kda, device):
    """Sums of g in which a small one would vanish: they are counted from the newest token backwards."""
    layer = DeltaLayer((1, 1, 1, 16, 16, 8), device, kda=kda, memory=1.0)
    scale = iter([3e4, 1.0, 1e-4, 1e-4])
    plain = layer.rand
    layer.rand = lambda *size: plain(*size) * next(scale)
    for tokens in (2, 1, 2, 1):
        y, expected = layer.advance(tokens)
        assert error(y, expected) <= layer.state_bar
    assert error(*layer.whole_state()) <= layer.state_bar


@needs
@RULES
@pytest.mark.parametrize("forget", [1e4, 1e30])
@pytest.mark.parametrize("tokens", [7, 12])
def test_a_token_that_forgets_everything_blurs_no_other(tokens, forget, kda, device):
    """Neither in its window nor in later ones: no sum of g that it is in is taken from another."""
    layer = DeltaLayer((1, 2, 1, 16, 16, 24), device, kda=kda, memory=20.0, forget=forget)
    for length, fold in ((tokens, 0), (1, 0), (tokens - 3, 9), (2, 5)):
        y, expected = layer.advance(length, fold=fold)
        assert error(y, expected) <= layer.bar(length)
    assert error(*layer.whole_state()) <= layer.state_bar


class Float32Loop:
    """The recurrence in float32 with torch, on the tokens of a layer: the error that the classic step makes."""

    def __init__(self, layer):
        self.layer, self.state = layer, layer.checkpoint.clone()
        self.new_tokens = layer.new_tokens
        layer.new_tokens = self.watch

    def watch(self, state, q, k, v, beta, g, count):
        for t in range(k.shape[1]):
            k_t = k[:, t].float()
            k_t = k_t * (k_t.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
            k_t = k_t.repeat_interleave(self.layer.shape[1] // self.layer.shape[2], 1)
            decay = g[:, t, :, :, None] if self.layer.kda else g[:, t, :, None, None]
            new = self.state * decay.float().exp()
            u = beta[:, t, :, None].float() * (v[:, t].float() - (new * k_t[..., None]).sum(2))
            new = new + k_t[..., None] * u[:, :, None]
            self.state = torch.where((t < count)[:, None, None, None], new, self.state)
        return self.new_tokens(state, q, k, v, beta, g, count)


@needs
@pytest.mark.parametrize(("dtype", "kda"), [(F32, False), (BF16, False), (F32, True)], ids=str)
def test_errors_do_not_grow(dtype, kda, device):
    """Thousands of tokens in steps and windows, with slow decay; flushes at random or when a buffer is full."""
    shape = (1, 1, 1, 16, 16, 4) if device == "cpu" else (2, 4, 2, 128, 128, 16)
    layer = DeltaLayer(shape, device, dtype, kda=kda, memory=500.0, most=0.3, seed=3)
    loop = Float32Loop(layer)
    calls = 5000 if device != "cpu" else 25
    random = torch.Generator().manual_seed(1)
    lengths = [1 if i % 3 else 1 + int(torch.randint(4, (), generator=random)) for i in range(calls)]
    play(layer, lengths, seed=2, flushes=0.1, slack=1 if device == "cpu" else 3)
    ours = error(layer.whole_state()[0], layer.state)
    assert ours <= 2 * error(loop.state.double(), layer.state), ours


@needs
@pytest.mark.parametrize(("seed", "kda"), [(0, False), (1, True)])
def test_random_sequences_with_crops(seed, kda, device):
    """Windows of which any number is taken back, steps, and flushes alone."""
    many = device != "cpu"
    shape = (4, 4, 2, 128, 128, 16) if many else (2, 2, 1, 16, 16, 6)
    layer = DeltaLayer(shape, device, [F32, BF16][seed], kda=kda, conv=4, ring=9 if seed else 12, reach=5, seen=2,
                       first=4, seed=seed)  # fmt: skip
    random = torch.Generator().manual_seed(seed)
    slots = shape[-1]
    for _ in range(1000 if many else 4):
        draw = lambda highest: (torch.rand(shape[0], generator=random).to(device) * (highest + 1)).long()  # noqa: E731
        tokens = int(torch.randint(1, 6, (), generator=random))
        if bool((layer.held + tokens > slots).any()):
            layer.flush(torch.maximum(layer.held + tokens - slots, draw(layer.held)))
        y, expected = layer.advance(tokens, count=draw(torch.full_like(layer.held, tokens)), fold=0)
        assert error(y, expected) <= 3 * layer.bar(tokens)
        layer.crop(draw(torch.minimum(layer.held, layer.croppable())))
        fold = torch.where(draw(torch.ones_like(layer.held)) > 0, draw(layer.held), 0)
        y, expected = layer.advance(1, count=(layer.held < slots).long(), fold=fold)
        assert error(y, expected) <= 3 * layer.bar(1)
    assert error(*layer.whole_state()) <= 3e-6


@on_gpu
@pytest.mark.parametrize("tokens", [1, 5])
def test_offsets_beyond_32_bits(tokens, device):
    """The checkpoint and the buffer of u have more than 2^31 elements each."""
    batch, heads, key_heads, dim, slots = 4200, 32, 16, 128, 136
    if torch.cuda.get_device_properties(device).total_memory < 60 * 2**30:
        pytest.skip("needs 60 GiB")
    torch.manual_seed(0)
    randn = lambda *size, dtype=BF16: torch.empty(size, dtype=dtype, device=device).normal_()  # noqa: E731
    few_rows = 3
    rows = [0, 2048, batch - 1]
    small = [randn(few_rows, key_heads, slots, dim), randn(few_rows, heads, slots, dim, dtype=F32),
             -torch.rand(few_rows, heads, slots, device=device), randn(few_rows, heads, dim, dim)]  # fmt: skip
    owned = [torch.zeros((batch, *tensor.shape[1:]), dtype=tensor.dtype, device=device) for tensor in small]
    for large, few in zip(owned, small):
        large[rows] = few
    assert owned[1].numel() > 2**31 and owned[3].numel() > 2**31
    qkv = randn(batch, tokens, (2 * key_heads + heads) * dim)
    g, beta = -torch.rand(batch, tokens, heads, device=device), torch.rand(batch, tokens, heads, device=device)
    ring, weight = randn(batch, 4, qkv.shape[-1]), randn(qkv.shape[-1], 4)
    positions = torch.tensor([9, 130, 120, tokens, 100], dtype=torch.int32, device=device)[:, None].repeat(1, batch)
    few_ring = ring[rows].clone()
    y = kernels.gated_delta_decode(positions, qkv, g, beta, ring, weight, None, *owned)[rows]
    expected = kernels.gated_delta_decode(
        positions[:, rows].contiguous(), qkv[rows], g[rows], beta[rows], few_ring, weight, None, *small
    )
    assert error(y.double(), expected.double()) < 2e-3
    assert all(error(a[rows].double(), b.double()) < 2e-3 for a, b in zip(owned, small))
    assert same_bits(ring[rows], few_ring)


@needs
def test_a_permuted_input_is_taken(device):
    layer = DeltaLayer((2, 2, 1, 16, 16, 4), device)
    sizes = [(2, 1, 1, 16), (2, 1, 1, 16), (2, 1, 2, 16), (2, 1, 2), (2, 1, 2)]
    values = [layer.randn(*size) for size in sizes]
    values[3] = -values[3].abs()
    y = []
    for odd in (False, True):
        new = [v.movedim(-1, 0).contiguous().movedim(0, -1) if odd else v for v in values]
        assert not odd or not new[0].is_contiguous()
        y.append(kernels.gated_delta_step(layer.positions(1, 0), *new, *layer.buffers(), layer.checkpoint))
    assert same_bits(*y)


# These tests can fail.


@needs
@RULES
@pytest.mark.parametrize("what", ["g", "k", "u", "checkpoint", "first", "fold"])
def test_a_fault_is_found(what, kda, device):
    layer = DeltaLayer((1, 1, 1, 16, 16, 4), device, kda=kda, first=2)
    layer.advance(3)
    if what == "g":
        layer.g_buffer[:, :, 3] *= 1.001
    elif what == "k":
        layer.k_buffer[:, :, 2, :8] *= 1.001  # (a whole vector is normalised)
    elif what == "u":
        layer.u_buffer[:, :, 2] *= 1.001
    elif what == "checkpoint":
        layer.checkpoint *= 1.001
    elif what == "first":
        right = layer.positions
        one = torch.tensor([[0], [1], [0], [0], [0]], dtype=torch.int32, device=device)
        layer.positions = lambda *args: right(*args) - one
        with pytest.raises(AssertionError, match="k_buffer was written"):
            layer.advance(1)
        return
    else:  # a flush that is forgotten
        before = layer.checkpoint.clone()
        layer.flush(3)
        layer.checkpoint.copy_(before)
    assert error(*layer.whole_state()) > 1e-5
    with pytest.raises(AssertionError, match="appended inputs"):  # u is another one
        layer.advance(1)


@needs
def test_a_stray_write_is_found(device, monkeypatch):
    layer = DeltaLayer((1, 1, 1, 16, 16, 4), device)
    step = kernels.gated_delta_step

    def stray(**arguments):
        arguments["u_buffer"][0, 0, 3, 15] = 0.0
        return step(**arguments)

    monkeypatch.setattr(kernels, "gated_delta_step", stray)
    with pytest.raises(AssertionError, match="u_buffer was written"):
        layer.advance(1)


if not INTERPRETED:

    @pytest.mark.timeout(600)
    @pytest.mark.parametrize("marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
    def test_in_the_interpreter(marked):
        run_in_interpreter(__file__, marked)
