"""Perplexity, teacher-forced *through the cache*, and the comparison of two caches over the same tokens.

A perplexity taken with one full forward never touches the decode path. Here every scored token but a context's first
goes through the cache, one token at a time (``mode="step"``) or in windows (``mode="window"``); ``mode="full"`` is the
one forward without a cache, over the same tokens, to hold the others against.

    from hf_replayssm.evaluation import compare_caches, evaluate_perplexity, load_documents

    documents = load_documents("Salesforce/wikitext", config="wikitext-2-raw-v1", split="test")
    result = evaluate_perplexity(model, tokenizer, documents, mode="step", cache="replayssm", max_tokens=10_000)
    print(result.perplexity, result.word_perplexity, result.bits_per_byte)

Several processes share the work with `processes=Processes.from_environment()`, and with `resume=FOLDER` a run that was
killed goes on where it was.
"""

from __future__ import annotations

from .comparison import ComparisonResult, compare_caches
from .data import join_documents, load_documents
from .perplexity import BatchesFailed, DocumentScore, PerplexityResult, evaluate_perplexity
from .processes import Processes


__all__ = [
    "BatchesFailed",
    "ComparisonResult",
    "DocumentScore",
    "PerplexityResult",
    "Processes",
    "compare_caches",
    "evaluate_perplexity",
    "join_documents",
    "load_documents",
]
