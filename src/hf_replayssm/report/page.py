"""The page: sections as HTML with a style sheet of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

from hf_replayssm.versions import __version__

from .results import Section, Table, load, sections


STYLE = """
:root { color-scheme: light dark; --ink: #1d2328; --soft: #5b6670; --line: #d9dee3; --page: #ffffff; --box: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ec; --soft: #9aa5ae; --line: #39424a; --page: #14181b; --box: #1c2226; }
}
body { margin: 2rem auto; max-width: 1100px; padding: 0 1rem; color: var(--ink); background: var(--page);
       font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .2rem; } h2 { font-size: 1.25rem; margin: 2.2rem 0 .4rem; overflow-wrap: anywhere; }
h3 { font-size: 1rem; margin: 0 0 .4rem; } p { margin: .3rem 0; } .soft { color: var(--soft); }
.scroll { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem .25rem 0; text-align: left; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(480px, 100%), 1fr)); gap: 1rem; }
figure { margin: 0; padding: .8rem; background: var(--box); border: 1px solid var(--line); border-radius: 8px; }
figure > svg { width: 100%; height: auto; display: block; }
text { fill: var(--soft); font-size: 12px; } .tick, .label { text-anchor: middle; } .tick.left { text-anchor: end; }
.grid { stroke: var(--line); stroke-width: 1; } .mark { stroke: var(--soft); stroke-dasharray: 2 3; }
polyline { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; } circle { fill: var(--c); }
.dashed polyline { stroke-dasharray: 6 4; }
.legend { list-style: none; margin: .4rem 0 0; padding: 0; display: flex; flex-wrap: wrap; gap: .2rem 1rem;
          font-size: 13px; }
.key { width: 28px; height: 10px; margin-right: .4rem; vertical-align: middle; }
.s0 { --c: #0072b2; } .s1 { --c: #d55e00; } .s2 { --c: #009e73; } .s3 { --c: #cc79a7; } .s4 { --c: #8a7a00; }
.s5 { --c: #56b4e9; } .s6 { --c: #7f7f7f; }
details { margin: .8rem 0; } summary { cursor: pointer; color: var(--soft); }
"""


def report(
    results: Sequence[str | os.PathLike], path: str | os.PathLike | None = None, title: str = "hf_replayssm"
) -> str:
    """An HTML page of results: one file with its plots inside, which loads nothing.

    Args:
        results: JSON files that an evaluation or a benchmark of this project has written. Evaluations come side by
            side, under the names of their files.
        path: where the page is written as well.
        title: its heading.

    Returns:
        str: the page.

    Raises:
        FileNotFoundError: a result that is not there.
        ValueError: no result, or a file that is none of the kinds that are known (they are listed).
    """
    if not results:
        raise ValueError("There is no result to report: name at least one JSON file.")
    files = [Path(one) for one in results]
    loaded = {}
    for file in files:
        twice = sum(other.stem == file.stem for other in files) > 1
        loaded[str(file) if twice else file.stem] = load(file)
    body = "".join(section_html(section) for section in sections(loaded))
    page = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n"
        f'<p class="soft">Of {escape(", ".join(file.name for file in files))}; hf_replayssm {escape(__version__)}</p>\n'
        f"{body}</body>\n</html>\n"
    )
    if path is not None:
        Path(path).write_text(page, encoding="utf-8")
    return page


def section_html(section: Section) -> str:
    parts = [f"<section>\n<h2>{escape(section.title)}</h2>\n"]
    parts += [f'<p class="soft">{escape(note)}</p>\n' for note in section.notes]
    parts += [table_html(table) for table in section.tables]
    figures = []
    for plot in section.plots:
        drawn = plot.svg()
        if drawn:
            figures.append(f"<figure><h3>{escape(plot.title)}</h3>{drawn}{plot.legend()}</figure>\n")
        elif any(plot.series.values()):
            parts.append(f"<p>{escape(plot.title)}: zero everywhere.</p>\n")
    parts.append(f'<div class="plots">\n{"".join(figures)}</div>\n')
    for table in section.details:
        if table.rows:
            parts.append(
                f"<details><summary>{escape(table.title)}: the figures</summary>{table_html(table)}</details>\n"
            )
    return "".join(parts) + "</section>\n"


def table_html(table: Table) -> str:
    if not table.rows:
        return ""
    title = f"<h3>{escape(table.title)}</h3>" if table.title else ""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.head)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    head = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f'<div class="scroll">{title}<table>{head}<tbody>{rows}</tbody></table></div>\n'
