"""A tokenizer and texts for the tests of evaluation and the command line: tiny, and made here."""

from __future__ import annotations

from pathlib import Path

import tiny_models
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast


SPECIAL = ["<pad>", "<s>", "</s>"]
TEXTS = [
    "The state is written once in many steps, and the inputs since are kept beside it.",
    "A window of drafts is verified in one pass.",
    "",  # nothing to score
    "Rollback moves the write position; nothing is run again. Nothing is copied either, and that is the whole trick.",
    "Naïve readers café-hop.",
    "One",
    "Numbers: 1 2 3 5 8 13 21 34 55 89 144, and so on.",
]


def tiny_tokenizer(vocab_size: int = 300, bos: bool = False) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer; with `bos` it puts <s> before every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )


def tiny_text_model(name: str = "bamba", **overrides) -> PreTrainedModel:
    """A tiny model of that family with a vocabulary for `tiny_tokenizer`."""
    return tiny_models.tiny_model(name, vocab_size=300, **overrides)


def save_tiny(folder: Path, name: str = "bamba", **overrides) -> Path:
    """A folder that `from_pretrained` takes, model and tokenizer."""
    tiny_text_model(name, **overrides).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
