"""The command line: `hf-replayssm perplexity | generate | ...`, the same as `python -m hf_replayssm`."""

from __future__ import annotations

import typer

from .doctor import doctor
from .generate import generate
from .lm_eval import lm_eval
from .perplexity import perplexity
from .report import report


app = typer.Typer(
    name="hf-replayssm",
    help="ReplaySSM caching of state-space hybrids in Hugging Face transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # errors are one line; see common.one_line_errors
)
app.command()(perplexity)
app.command()(generate)
app.command()(report)
app.command()(doctor)
app.command(
    "lm-eval",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)(lm_eval)


@app.callback(invoke_without_command=True)
def _top(version: bool = typer.Option(False, "--version", help="Print the version and exit.", is_eager=True)) -> None:
    if version:
        from hf_replayssm.versions import __version__

        typer.echo(__version__)
        raise typer.Exit()


def main() -> None:
    """Entry point of the `hf-replayssm` command."""
    app()


__all__ = ["app", "main"]
