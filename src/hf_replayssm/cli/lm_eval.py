"""`hf-replayssm lm-eval`: lm-evaluation-harness's own command, with the model type `hf-replayssm`."""

from __future__ import annotations

import importlib
import sys

import typer

from . import common


@common.one_line_errors
def lm_eval(context: typer.Context) -> None:
    """lm-evaluation-harness with the model type hf-replayssm. All arguments are those of its own command.

    For example: hf-replayssm lm-eval run --model hf-replayssm --model_args pretrained=ID,window=8 --tasks arc_easy
    """
    importlib.import_module("hf_replayssm.evaluation.harness")  # registers the type, or says that there is no harness
    from lm_eval.__main__ import cli_evaluate

    before = sys.argv
    sys.argv = ["hf-replayssm lm-eval", *context.args]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
