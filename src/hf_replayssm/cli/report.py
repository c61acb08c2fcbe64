"""`hf-replayssm report`: results of evaluations and benchmarks as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import common


@common.one_line_errors
def report(
    results: Annotated[
        list[Path], typer.Argument(help="JSON files that perplexity --json or a benchmark has written.")
    ],
    html: Annotated[Path, typer.Option("--html", help="The page that is written.", metavar="FILE")] = Path(
        "report.html"
    ),
    title: Annotated[str, typer.Option("--title", help="Its heading.")] = "hf_replayssm",
    debug: common.DebugOption = False,
) -> None:
    """Plots of perplexity and drift against position, and of speed against batch: one file, which opens offline."""
    if not html.absolute().parent.is_dir():
        raise typer.BadParameter(f"--html {html}: there is no folder {html.absolute().parent}.")
    from hf_replayssm.report import report as write

    write(results, html, title)
    typer.echo(f"{html} ({common.size(html.stat().st_size)})")
