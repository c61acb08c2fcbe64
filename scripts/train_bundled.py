#!/usr/bin/env python3
"""Train the two tiny hybrid models that are bundled with hf_replayssm.

The package carries two small models in its ``assets`` folder: a *target* and a
*draft*.  Both are upstream ``BambaForCausalLM`` models (Mamba-2 layers and
attention layers), share one byte-level BPE tokenizer, and are trained by this
script on the six novels of Jane Austen.  The script does everything from the raw
text to the finished folders:

1. read and clean the text, and put the last chapters of every novel aside;
2. train the tokenizer;
3. train the target on the text (next-token loss, dropout, early stopping on a
   validation slice);
4. distil the draft from the target, half on the training text and half on text
   that the target itself writes;
5. evaluate both on the held-out chapters, and a smoothed bigram model beside them;
6. write ``target/``, ``draft/``, ``heldout.txt``, ``heldout.jsonl`` and
   ``metrics.json``.

How to run it
-------------
Needed: ``torch``, ``transformers`` (5.24), ``tokenizers``.  Get the text as the Debian
package ``r-cran-janeaustenr`` and pass the file; nothing is installed by it::

    apt-get download r-cran-janeaustenr
    python scripts/train_bundled.py --text-package r-cran-janeaustenr_*_all.deb

or pass plain-text books, one file each, chapters headed "Chapter ..."::

    python scripts/train_bundled.py --text emma.txt persuasion.txt

On one NVIDIA H200 the whole run takes about four and a half minutes.  The defaults are the
settings of the bundled models, but for the draft's last steps: in that run the draft had a
time limit, which ended its training, fully annealed, after 1595 steps; the default is 1600
steps and no limit.  The seeds are fixed; the arithmetic of a GPU still differs a little from
one run to the next, so expect the figures, not the very weights.  A quick check that all the
steps work, in seconds on a CPU, writing somewhere harmless::

    python scripts/train_bundled.py --smoke --text-package FILE.deb --output /tmp/smoke

``--max-target-seconds`` and ``--max-draft-seconds`` end a training phase early whatever
the number of steps says; the learning rate then follows the clock, so that it still
reaches its end value.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import io
import json
import math
import platform
import re
import struct
import tarfile
import time
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BambaConfig,
    BambaForCausalLM,
    GenerationConfig,
    PreTrainedTokenizerFast,
)


PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
ASSETS = Path(__file__).resolve().parent.parent / "src" / "hf_replayssm" / "assets"


# --------------------------------------------------------------------------------------
# 1. Text
# --------------------------------------------------------------------------------------
def ar_members(blob: bytes):
    """The members (name, content) of an ar archive, the outer format of a Debian package."""
    if blob[:8] != b"!<arch>\n":
        raise ValueError("not a Debian package (no ar archive)")
    at = 8
    while at + 60 <= len(blob):
        name = blob[at : at + 16].decode().strip().rstrip("/")
        size = int(blob[at + 48 : at + 58])
        yield name, blob[at + 60 : at + 60 + size]
        at += 60 + size + size % 2


def r_strings(blob: bytes) -> list[str]:
    """A character vector in R's binary serialisation (version 3, big-endian)."""
    if blob[:2] != b"X\n" or struct.unpack(">i", blob[2:6])[0] != 3:
        raise ValueError("not an R object in XDR serialisation, version 3")
    at = 14  # the mark, and three integers: format version, writer, oldest reader
    at += 4 + struct.unpack(">i", blob[at : at + 4])[0]  # the name of the encoding
    flags, count = struct.unpack(">Ii", blob[at : at + 8])
    if flags & 0xFF != 16:
        raise ValueError("not a character vector")
    at += 8
    strings = []
    for _ in range(count):
        _, length = struct.unpack(">Ii", blob[at : at + 8])  # length -1 is R's NA
        at += 8
        strings.append(blob[at : at + max(length, 0)].decode("utf-8"))
        at += max(length, 0)
    return strings


def books_of_package(path: Path) -> list[list[str]]:
    """The books (each a list of lines) in the Debian package r-cran-janeaustenr.

    The package keeps them in R's lazy-load database: one zlib stream per object, each
    after four bytes that give its unpacked size.
    """
    for name, content in ar_members(path.read_bytes()):
        if name.startswith("data.tar"):
            with tarfile.open(fileobj=io.BytesIO(content)) as tar:
                inner = next(m for m in tar.getmembers() if m.name.endswith("/data/Rdata.rdb"))
                database = tar.extractfile(inner).read()
            break
    else:
        raise ValueError(f"{path} holds no data archive")
    books, at = [], 0
    while at < len(database):
        stream = zlib.decompressobj()
        books.append(r_strings(stream.decompress(database[at + 4 :])))
        at = len(database) - len(stream.unused_data)
    return books


def books_of_files(paths: list[Path]) -> list[list[str]]:
    """Plain-text books; what stands around the text in Project Gutenberg's files goes."""
    books = []
    for path in paths:
        text = path.read_text(encoding="utf-8-sig")
        begin = re.search(r"^\*\*\* ?START OF .*$", text, re.M)
        end = re.search(r"^\*\*\* ?END OF .*$", text, re.M)
        text = text[begin.end() if begin else 0 : end.start() if end else len(text)]
        books.append(text.splitlines())
    return books


HEADING = re.compile(r"\s*chapter\s+([ivxlc]+|\d+)\.?\s*", re.I)
FINISH = re.compile(r"\s*(finis|the end|a note on the text)\.?\s*", re.I)
DIVISION = re.compile(r"\s*(volume|book|part)\s+([ivxlc]+|\d+)\.?\s*", re.I)


def chapters_of(lines: list[str]) -> list[str]:
    """The chapters of one book: paragraphs on one line each, a blank line between them.

    Headings, divisions, footnotes and all that stands before the first chapter are left out.
    """
    starts = [i for i, line in enumerate(lines) if HEADING.fullmatch(line)]
    if not starts:
        raise ValueError("no line reads 'Chapter ...'")
    finish = next((i for i, x in enumerate(lines) if i > starts[-1] and FINISH.fullmatch(x)), len(lines))
    chapters = []
    for start, stop in zip(starts, [*starts[1:], finish], strict=True):
        body = [line for line in lines[start + 1 : stop] if not DIVISION.fullmatch(line)]
        text = "\n".join(body).translate(str.maketrans("\u2018\u2019\u201c\u201d", "''\"\""))
        text = text.replace("_", "").replace("\u2014", "--")
        paragraphs = [re.sub(r"\s+", " ", p).strip() for p in re.split(r"\n\s*\n", text)]
        chapters.append("\n\n".join(p for p in paragraphs if re.match(r"[^*]*\w", p)))
    return chapters


def split_books(books: list[list[str]], heldout_chapters: int):
    """(training, validation, held-out) chapters: of each book the last are held out, the
    one before them is for validation, and the rest is for training."""
    train, valid, heldout = [], [], []
    for lines in books:
        chapters = chapters_of(lines)
        if len(chapters) < heldout_chapters + 2:
            raise ValueError("a book has too few chapters to hold some out")
        cut = len(chapters) - heldout_chapters
        train += chapters[: cut - 1]
        valid.append(chapters[cut - 1])
        heldout += chapters[cut:]
    return train, valid, heldout


def documents_of(chapters: list[str], size: int = 3000) -> list[str]:
    """Cut chapters into documents of about ``size`` characters, between paragraphs."""
    documents = []
    for chapter in chapters:
        piece = []
        for paragraph in chapter.split("\n\n"):
            piece.append(paragraph)
            if sum(map(len, piece)) >= size:
                documents.append("\n\n".join(piece))
                piece = []
        if piece:
            documents.append("\n\n".join(piece))
    return documents


# --------------------------------------------------------------------------------------
# 2. Tokenizer
# --------------------------------------------------------------------------------------
def train_tokenizer(texts: list[str], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE; ids 0, 1, 2 are padding, begin and end; the begin token is put first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
    )


def stream_of(tokenizer, chapters: list[str]) -> np.ndarray:
    """All chapters as one row of ids, an end token after each."""
    rows = tokenizer(chapters, add_special_tokens=False, verbose=False)["input_ids"]
    return np.array([i for row in rows for i in [*row, tokenizer.eos_token_id]], dtype=np.int64)


class Windows:
    """Random training windows: the begin token, then ``length`` tokens of the stream.

    Half of them start anywhere; the other half start at a paragraph, so that the begin
    token comes to mean the start of one.
    """

    def __init__(self, stream: np.ndarray, tokenizer, length: int, device, seed: int):
        self.stream = torch.from_numpy(stream).to(device)
        self.length, self.bos = length, tokenizer.bos_token_id
        self.generator = torch.Generator().manual_seed(seed)
        breaks = {i for i in range(len(tokenizer)) if tokenizer.decode([i]).endswith("\n\n")}
        newline = tokenizer("\n", add_special_tokens=False)["input_ids"][0]
        after = [0]
        for i in range(1, len(stream)):
            two = stream[i - 1] == newline and i > 1 and stream[i - 2] == newline
            if stream[i - 1] in breaks or two or stream[i - 1] == tokenizer.eos_token_id:
                after.append(i)
        self.last = len(stream) - length
        self.paragraphs = torch.tensor([i for i in after if i <= self.last])
        self.device = device

    def sample(self, count: int) -> torch.Tensor:
        half = count // 2
        anywhere = torch.randint(0, self.last + 1, (count - half,), generator=self.generator)
        picks = torch.randint(0, len(self.paragraphs), (half,), generator=self.generator)
        starts = torch.cat([anywhere, self.paragraphs[picks]]).to(self.device)
        rows = self.stream[starts[:, None] + torch.arange(self.length, device=self.device)]
        return torch.cat([torch.full_like(rows[:, :1], self.bos), rows], dim=1)


# --------------------------------------------------------------------------------------
# 3. Models and training
# --------------------------------------------------------------------------------------
def config_of(kind: str, tokenizer, smoke: bool) -> BambaConfig:
    shared = dict(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
        initializer_range=0.04,
        max_position_embeddings=4096,
        mamba_d_conv=4,
        mamba_d_head=32,
        mamba_expand=2,
        mamba_chunk_size=64,
    )
    if smoke:
        small = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=3, attn_layer_indices=[1])
        small |= dict(num_attention_heads=2, num_key_value_heads=1, mamba_n_heads=4, mamba_d_state=32)
        return BambaConfig(**shared | small, mamba_n_groups=2 if kind == "target" else 1)
    if kind == "target":
        return BambaConfig(
            **shared,
            hidden_size=192,
            intermediate_size=208,
            num_hidden_layers=8,
            attn_layer_indices=[3, 6],
            num_attention_heads=6,
            num_key_value_heads=2,
            mamba_n_heads=12,
            mamba_n_groups=2,
            mamba_d_state=64,
        )
    return BambaConfig(
        **shared,
        hidden_size=96,
        intermediate_size=208,
        num_hidden_layers=4,
        attn_layer_indices=[2],
        num_attention_heads=3,
        num_key_value_heads=1,
        mamba_n_heads=6,
        mamba_n_groups=1,
        mamba_d_state=64,
    )


def new_model(config: BambaConfig, device, dropout: float):
    """A fresh model, with dropout on what each block adds to the residual stream.

    The time steps are drawn log-uniformly from [0.001, 0.1] and the decay rates uniformly
    from [1, 16], so that some heads remember for long from the start; the projections that
    write to the residual stream are scaled down with depth.
    """
    model = BambaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in model.model.layers:
            writers = [layer.feed_forward.down_proj]
            if hasattr(layer, "mamba"):
                heads = layer.mamba.num_heads
                step = torch.exp(
                    torch.rand(heads, generator=generator) * (math.log(0.1) - math.log(0.001)) + math.log(0.001)
                )
                layer.mamba.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))
                layer.mamba.A_log.copy_(torch.log(torch.rand(heads, generator=generator) * 15 + 1))
                writers.append(layer.mamba.out_proj)
            else:
                writers.append(layer.self_attn.o_proj)
            for writer in writers:
                writer.weight.mul_(1 / math.sqrt(2 * config.num_hidden_layers))

    def drop(module, _args, output):
        if isinstance(output, tuple):
            return (F.dropout(output[0], dropout, module.training), *output[1:])
        return F.dropout(output, dropout, module.training)

    if dropout:
        model.model.embed_tokens.register_forward_hook(drop)
        for layer in model.model.layers:
            (layer.mamba if hasattr(layer, "mamba") else layer.self_attn).register_forward_hook(drop)
            layer.feed_forward.register_forward_hook(drop)
    return model.to(device)


def count(model) -> int:
    return sum(p.numel() for p in model.parameters())


def make_optimizer(model, lr: float, decay: float):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), fused=matrices[0].is_cuda)


@torch.no_grad()
def mean_loss(model, stream, bos, window: int, stride: int, batch: int, device, teacher=None):
    """Mean next-token loss over the whole stream, each token predicted exactly once, in
    windows that overlap by ``window - stride`` tokens.  With a teacher also: the share of
    positions whose most probable token is the teacher's, and the mean overlap of the two
    distributions (the chance that speculative sampling accepts the draft's token)."""
    was_training = model.training
    model.eval()
    rows, firsts = [], []
    for start in range(0, len(stream), stride):
        begin = max(0, start - (window - stride))
        row = [bos, *stream[begin : start + stride].tolist()]
        rows.append(row)
        firsts.append(start - begin)
    width = max(map(len, rows))
    loss = same = overlap = 0.0
    for at in range(0, len(rows), batch):
        part = rows[at : at + batch]
        ids = torch.tensor([r + [bos] * (width - len(r)) for r in part], device=device)
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
        other = teacher(input_ids=ids[:, :-1], use_cache=False).logits.float() if teacher else None
        for k, row in enumerate(part):
            keep = slice(firsts[at + k], len(row) - 1)
            loss += F.cross_entropy(logits[k, keep], ids[k, 1:][keep], reduction="sum").item()
            if teacher:
                same += (logits[k, keep].argmax(-1) == other[k, keep].argmax(-1)).sum().item()
                pair = torch.minimum(logits[k, keep].softmax(-1), other[k, keep].softmax(-1))
                overlap += pair.sum().item()
    model.train(was_training)
    n = len(stream)
    return (loss / n, same / n, overlap / n) if teacher else loss / n


def train(model, batches, loss_of, score, args, steps: int, seconds: float, lr: float, decay: float, name: str):
    """AdamW with warm-up and a cosine to 2 % of the rate; the state with the best ``score``
    (lower is better) is kept.  ``seconds`` bounds the time; the schedule follows whichever
    of the two, steps and clock, is ahead."""
    optimizer = make_optimizer(model, lr, decay)
    began, best, best_state, step, progress, log = time.time(), math.inf, None, 0, 0.0, []
    model.train()
    while progress < 1:
        step += 1
        progress = max(step / steps, (time.time() - began) / seconds if seconds else 0.0)
        rate = lr * min(1.0, step / args.warmup) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(progress, 1))))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = loss_of(model, batches())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % args.eval_every == 0 or progress >= 1:
            now, text = score(model)
            log.append({"step": step, "seconds": round(time.time() - began, 1), "loss": loss.item(), "score": now})
            print(f"{name} {step} {time.time() - began:.0f}s loss {loss.item():.4f} {text}", flush=True)
            if now < best:
                best, best_state = now, copy.deepcopy(model.state_dict())
    model.load_state_dict(best_state)
    model.eval()
    return {
        "steps": step,
        "seconds": round(time.time() - began, 1),
        "best_step": min(log, key=lambda x: x["score"])["step"],
    }


def next_token_loss(model, ids):
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def distillation_loss(teacher, hard: float):
    """Kullback-Leibler divergence from the teacher, plus ``hard`` times the cross-entropy
    with the teacher's most probable token (what greedy decoding asks of a draft)."""

    def loss(model, ids):
        with torch.no_grad():
            aim = teacher(input_ids=ids[:, :-1], use_cache=False).logits.float().flatten(0, 1)
        got = model(input_ids=ids[:, :-1], use_cache=False).logits.float().flatten(0, 1)
        got = got.log_softmax(-1)
        soft = F.kl_div(got, aim.log_softmax(-1), log_target=True, reduction="batchmean")
        return soft + hard * F.nll_loss(got, aim.argmax(-1))

    return loss


@torch.no_grad()
def sample(model, prompts: torch.Tensor, length: int, temperature, top_p: float = 1.0, seed: int = 0):
    """Continue every prompt by ``length`` tokens; a temperature of 0 is greedy decoding.
    ``temperature`` is a number or one number a row."""
    device = prompts.device
    generator = torch.Generator(device=device).manual_seed(seed)
    temperature = torch.as_tensor(temperature, device=device, dtype=torch.float32).reshape(-1, 1)
    temperature = temperature.expand(len(prompts), 1)
    greedy = temperature[:, 0] == 0
    output, cache, ids = [prompts], None, prompts
    for _ in range(length):
        out = model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1, position_ids=positions(output, ids))
        cache = out.cache
        logits = out.logits[:, -1].float()
        probabilities = (logits / temperature.clamp_min(1e-4)).softmax(-1)
        if top_p < 1:
            ordered, order = probabilities.sort(-1, descending=True)
            ordered[ordered.cumsum(-1) - ordered > top_p] = 0
            probabilities = torch.zeros_like(probabilities).scatter(-1, order, ordered)
        drawn = torch.multinomial(probabilities, 1, generator=generator)
        ids = torch.where(greedy[:, None], logits.argmax(-1, keepdim=True), drawn)
        output.append(ids)
    return torch.cat(output, dim=1)


def positions(output, ids):
    end = sum(part.shape[1] for part in output)
    return torch.arange(end - ids.shape[1], end, device=ids.device)[None]


# --------------------------------------------------------------------------------------
# 4. Evaluation
# --------------------------------------------------------------------------------------
def bigram_loss(train_stream, valid_stream, heldout, start: int, vocab: int):
    """Held-out loss of a bigram model on the same tokens.  Two smoothings are tuned on the
    validation slice, and the better one is used: interpolation with a unigram (weight and
    added count), and absolute discounting that backs off to continuation counts."""
    pairs = np.zeros((vocab, vocab))
    np.add.at(pairs, (train_stream[:-1], train_stream[1:]), 1)
    np.add.at(pairs, (np.full(1, start), train_stream[:1]), 1)
    left = pairs.sum(1, keepdims=True)
    kinds = (pairs > 0).sum(1, keepdims=True)
    unigram = (pairs.sum(0) + 0.5) / (pairs.sum() + 0.5 * vocab)
    spread = (pairs > 0).sum(0) + 0.5
    spread = spread / spread.sum()

    def interpolated(weight, add):
        table = (pairs + add * unigram) / (left + add)
        return weight * table + (1 - weight) * unigram

    def discounted(by):
        mass = np.where(left > 0, by * kinds / np.maximum(left, 1), 1.0)
        return np.maximum(pairs - by, 0) / np.maximum(left, 1) + mass * spread

    def loss(table, stream):
        before = np.concatenate([[start], stream[:-1]])
        return float(-np.log(table[before, stream]).mean())

    options = [("interpolated", (w, k), interpolated) for w in (0.9, 0.97, 0.99, 1.0) for k in (0.5, 2, 5, 10, 20, 50)]
    options += [("absolute discounting", (d,), discounted) for d in (0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9)]
    best = min(options, key=lambda option: loss(option[2](*option[1]), valid_stream))
    return loss(best[2](*best[1]), heldout), f"{best[0]} {best[1]}"


def repeated(rows: list[list], n: int = 4) -> float:
    """The share of n-grams that occurred earlier in the same row."""
    total = again = 0
    for row in rows:
        grams = Counter(tuple(row[i : i + n]) for i in range(len(row) - n + 1))
        total += sum(grams.values())
        again += sum(grams.values()) - len(grams)
    return again / max(total, 1)


def windows_accepted(agree: torch.Tensor, size: int = 4) -> tuple[int, int, int]:
    """Greedy speculative decoding, replayed from where draft and target agree.

    ``agree[r, i]`` says whether the draft's most probable token after the true prefix is
    the i-th token of row r's (greedy) target text.  A window of drafted tokens is accepted
    up to its first miss, so that is all that is needed: (accepted, drafted, windows)."""
    accepted = drafted = windows = 0
    for row in agree.tolist():
        at = 0
        while at + size <= len(row):
            run = next((k for k in range(size) if not row[at + k]), size)
            accepted, drafted, windows = accepted + run, drafted + size, windows + 1
            at += run + 1  # the target adds one token of its own
    return accepted, drafted, windows


@torch.no_grad()
def evaluate(folder: Path, parts: dict, args, device) -> dict:
    """Load what was written and measure it on the held-out chapters."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).to(device).eval()
    draft = AutoModelForCausalLM.from_pretrained(folder / "draft", dtype=torch.float32).to(device).eval()
    heldout, bos = parts["heldout"], tokenizer.bos_token_id
    text_bytes = parts["heldout_bytes"]
    tokens = len(heldout)

    def perplexities(loss):
        return {"per_token": math.exp(loss), "per_byte": math.exp(loss * tokens / text_bytes)}

    batch = args.eval_batch
    on = dict(window=args.window, stride=args.window // 2, batch=batch, device=device)
    target_loss = mean_loss(target, heldout, bos, **on)
    draft_loss, same, overlap = mean_loss(draft, heldout, bos, teacher=target, **on)
    long = on | dict(window=2 * args.window, stride=args.window)
    target_long = mean_loss(target, heldout, bos, **long)
    train_part = parts["train"][: len(heldout)]
    target_train = mean_loss(target, train_part, bos, **on)
    bigram, smoothing = bigram_loss(parts["train"], parts["valid"], heldout, bos, len(tokenizer))
    half = copy.deepcopy(target).to(torch.bfloat16)
    half_loss = mean_loss(half, heldout, bos, **on)

    # Sampled text: prompts are the first tokens of held-out documents.
    rows = [r for r in tokenizer(parts["documents"], verbose=False)["input_ids"] if len(r) > 65]
    picked = rows[:: max(1, len(rows) // args.prompts)][: args.prompts]
    prompts = torch.tensor([r[:33] for r in picked], device=device)
    sampled = {}
    texts = {}
    for name, model, top_p in (("target", target, 1.0), ("target_top_p_0.95", target, 0.95), ("draft", draft, 1.0)):
        made = sample(model, prompts, args.sample_tokens, 1.0, top_p, seed=args.seed + 1)[:, 33:].tolist()
        texts[name] = [tokenizer.decode(r) for r in made]
        sampled[name] = {
            "token_4grams": repeated(made),
            "word_4grams": repeated([re.findall(r"[\w']+", t.lower()) for t in texts[name]]),
        }
    n = args.sample_tokens
    real = [heldout[i : i + n].tolist() for i in range(0, tokens - n, n)]
    sampled["heldout_text_itself"] = {
        "token_4grams": repeated(real),
        "word_4grams": repeated([re.findall(r"[\w']+", tokenizer.decode(r).lower()) for r in real]),
    }

    # Speculation along the target's own greedy and sampled text.
    paths = {}
    for name, temperature in (("greedy_text", 0.0), ("sampled_text", 1.0)):
        path = sample(target, prompts, 256 if not args.smoke else 16, temperature, seed=args.seed + 2)
        guess = draft(input_ids=path[:, :-1], use_cache=False).logits.argmax(-1)[:, 32:]
        greedy = path[:, 1:] if temperature == 0 else target(input_ids=path[:, :-1], use_cache=False).logits.argmax(-1)
        paths[name] = (guess == greedy[:, -guess.shape[1] :], guess.shape[1])
    accepted, drafted, windows = windows_accepted(paths["greedy_text"][0])

    # Windows of 4 from contexts of the held-out text: both models continue each greedily.
    context = 128 if not args.smoke else 32
    starts = range(0, tokens - context, max(1, (tokens - context) // args.contexts))
    contexts = torch.tensor([[bos, *heldout[s : s + context].tolist()] for s in starts], device=device)
    both = [torch.cat([sample(m, part, 4, 0.0)[:, -4:] for part in contexts.split(256)]) for m in (draft, target)]
    hits = (both[0] == both[1]).long().cumprod(1)
    return {
        "heldout": {"tokens": tokens, "bytes": text_bytes, "documents": len(parts["documents"])},
        "evaluation_window": args.window,
        "perplexity": {
            "target": perplexities(target_loss),
            "draft": perplexities(draft_loss),
            "bigram": perplexities(bigram) | {"smoothing": smoothing},
            "target_in_bfloat16": perplexities(half_loss),
            f"target_window_{2 * args.window}": perplexities(target_long),
            "target_on_training_text_per_token": math.exp(target_train),
            "target_over_bigram": math.exp(target_loss - bigram),
        },
        "repeated_4grams": {"prompts": len(picked), "tokens_each": args.sample_tokens, "temperature": 1.0} | sampled,
        "acceptance": {
            "greedy_agreement_on_heldout_text": same,
            "expected_speculative_sampling_on_heldout_text": overlap,
            "greedy_agreement_on_target_greedy_text": paths["greedy_text"][0].float().mean().item(),
            "greedy_agreement_on_target_sampled_text": paths["sampled_text"][0].float().mean().item(),
            "windows_of_4_on_target_greedy_text": {
                "accepted_over_drafted": accepted / max(drafted, 1),
                "tokens_per_window": (accepted + windows) / max(windows, 1),
            },
            "windows_of_4_from_heldout_contexts": {
                "contexts": len(contexts),
                "accepted_over_drafted": hits.float().mean().item(),
                "tokens_per_window": hits.sum(1).float().mean().item() + 1,
            },
        },
        "samples": [
            {"prompt": tokenizer.decode(p, skip_special_tokens=True), "text": t}
            for p, t in list(zip(prompts.tolist(), texts["target_top_p_0.95"], strict=True))[:3]
        ],
    }


# --------------------------------------------------------------------------------------
# 5. Everything in order
# --------------------------------------------------------------------------------------
def save(model, tokenizer, folder: Path):
    folder.mkdir(parents=True, exist_ok=True)
    half = copy.deepcopy(model).to("cpu", torch.bfloat16)
    half.generation_config = GenerationConfig(
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    half.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)  # the weights are written for their owner alone


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text-package", type=Path, help="the Debian package r-cran-janeaustenr")
    source.add_argument("--text", type=Path, nargs="+", help="plain-text books, one file each")
    parser.add_argument("--output", type=Path, default=ASSETS, help="where the assets go")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--vocab-size", type=int, default=1024)
    parser.add_argument("--heldout-chapters", type=int, default=2, help="chapters held out of every book")
    parser.add_argument("--length", type=int, default=768, help="tokens in a training window")
    parser.add_argument("--batch", type=int, default=48, help="windows in a batch")
    parser.add_argument("--dropout", type=float, default=0.25, help="dropout in the target")
    parser.add_argument("--decay", type=float, default=0.1, help="weight decay")
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--eval-every", type=int, default=100)
    parser.add_argument("--target-steps", type=int, default=1600)
    parser.add_argument("--target-lr", type=float, default=3e-3)
    parser.add_argument("--draft-steps", type=int, default=1600)
    parser.add_argument("--draft-lr", type=float, default=4e-3)
    parser.add_argument("--hard", type=float, default=0.5, help="weight of the teacher's most probable token")
    parser.add_argument("--written", type=int, default=6144, help="texts that the target writes for the draft")
    parser.add_argument("--written-tokens", type=int, default=512)
    parser.add_argument("--written-batch", type=int, default=3072)
    parser.add_argument("--max-target-seconds", type=float, default=0.0, help="0: no limit")
    parser.add_argument("--max-draft-seconds", type=float, default=0.0, help="0: no limit")
    parser.add_argument("--window", type=int, default=512, help="context window of the evaluation")
    parser.add_argument("--eval-batch", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--sample-tokens", type=int, default=512)
    parser.add_argument("--contexts", type=int, default=2048, help="held-out contexts to speculate from")
    parser.add_argument("--smoke", action="store_true", help="seconds on a CPU: all steps, tiny settings")
    args = parser.parse_args()
    if args.smoke:
        tiny = dict(vocab_size=512, length=64, batch=8, warmup=5, eval_every=10, target_steps=20, draft_steps=20)
        tiny |= dict(written=8, written_tokens=32, written_batch=8, window=64, prompts=4, sample_tokens=32, contexts=16)
        vars(args).update(tiny)
    return args


def main():
    args = arguments()
    began = time.time()
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")

    books = books_of_package(args.text_package) if args.text_package else books_of_files(args.text)
    train_text, valid_text, heldout_text = split_books(books, args.heldout_chapters)
    if args.smoke:
        train_text, valid_text, heldout_text = train_text[:20], [valid_text[0][:4000]], [heldout_text[0][:6000]]
    documents = documents_of(heldout_text)
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "heldout.txt").write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    with open(args.output / "heldout.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": d}, ensure_ascii=False) + "\n" for d in documents)

    tokenizer = train_tokenizer(train_text, args.vocab_size, 4096)
    text = "\n\n".join(documents)
    parts = {
        "train": stream_of(tokenizer, train_text),
        "valid": stream_of(tokenizer, valid_text),
        "heldout": np.array(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int64),
        "heldout_bytes": len(text.encode()),
        "documents": documents,
    }
    print({k: len(v) if hasattr(v, "__len__") else v for k, v in parts.items()}, flush=True)
    bos = tokenizer.bos_token_id
    windows = Windows(parts["train"], tokenizer, args.length, device, args.seed)
    check = dict(window=args.window, stride=args.window // 2, batch=args.eval_batch, device=device)

    # The target.
    target = new_model(config_of("target", tokenizer, args.smoke), device, args.dropout)
    print("target parameters", count(target), flush=True)

    def target_score(model):
        loss = mean_loss(model, parts["valid"], bos, **check)
        return loss, f"validation perplexity {math.exp(loss):.3f}"

    target_log = train(
        target,
        lambda: windows.sample(args.batch),
        next_token_loss,
        target_score,
        args,
        args.target_steps,
        args.max_target_seconds,
        args.target_lr,
        args.decay,
        "target",
    )
    save(target, tokenizer, args.output / "target")

    # What the target writes, from the first tokens of training windows, some of it cooler.
    started = time.time()
    written = []
    for at in range(0, args.written, args.written_batch):
        prompts = windows.sample(min(args.written_batch, args.written - at))[:, :9]
        heat = torch.tensor([1.0, 1.0, 0.7, 0.3], device=device).repeat(len(prompts) // 4 + 1)[: len(prompts)]
        heat = heat[torch.randperm(len(heat), generator=windows.generator).to(device)]
        written.append(sample(target, prompts, args.written_tokens, heat, seed=args.seed + at))
    written = torch.cat(written)
    writing_seconds = round(time.time() - started, 1)
    print("written", tuple(written.shape), writing_seconds, "s", flush=True)

    # The draft: batches in turn of real text and of text that the target wrote.
    draft = new_model(config_of("draft", tokenizer, args.smoke), device, 0.0)
    print("draft parameters", count(draft), flush=True)
    turn = iter(range(1 << 60))

    def draft_batch():
        if next(turn) % 2 == 0:
            return windows.sample(args.batch)
        rows = torch.randint(
            0, len(written), (args.batch * args.length // args.written_tokens,), generator=windows.generator
        )
        return written[rows.to(device)]

    def draft_score(model):
        loss, same, overlap = mean_loss(model, parts["valid"], bos, teacher=target, **check)
        return -same, f"validation perplexity {math.exp(loss):.3f} agreement {same:.4f} overlap {overlap:.4f}"

    draft_log = train(
        draft,
        draft_batch,
        distillation_loss(target, args.hard),
        draft_score,
        args,
        args.draft_steps,
        args.max_draft_seconds,
        args.draft_lr,
        0.01,
        "draft",
    )
    save(draft, tokenizer, args.output / "draft")

    metrics = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine() + " CPU",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
        "parameters": {"target": count(target), "draft": count(draft)},
        "training_text": {"tokens": len(parts["train"]), "characters": sum(map(len, train_text))},
        "training": {
            "target": target_log,
            "texts_written_by_the_target": {
                "count": len(written),
                "tokens_each": args.written_tokens,
                "seconds": writing_seconds,
            },
            "draft": draft_log,
            "settings": {
                k: v for k, v in vars(args).items() if k not in ("text", "text_package", "output", "device", "smoke")
            },
        },
    }
    metrics |= evaluate(args.output, parts, args, device)
    metrics["seconds_in_all"] = round(time.time() - began, 1)
    text = json.dumps(metrics, indent=2, ensure_ascii=False)
    (args.output / "metrics.json").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
