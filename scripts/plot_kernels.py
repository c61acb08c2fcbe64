"""
Draws the results of benchmark_kernels.py: ratio to the classic step, and fraction of the byte bound, against batch.

    python scripts/plot_kernels.py results.json out.svg

One line per geometry (colour) and checkpoint dtype (solid fp32, dashed bf16, dotted fp16). The format follows the
output's suffix. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


LINE_STYLES = {"fp32": "-", "bf16": "--", "fp16": ":", "int8": "-.", "fp8": (0, (1, 3))}
PANELS = (
    ("ratio", "classic step / replay, cycle average", 1.0),
    ("fraction", "byte bound / replay, cycle average", 1.0),
)


def series(result: dict[str, Any], name: str) -> dict[tuple[str, str], tuple[list[int], list[float]]]:
    """(geometry, checkpoint) -> batches and values of one of the derived figures; rows without it are left out."""
    lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in result["steps"]:
        value = (row.get("ratios") or {}).get(name)
        if value is not None:
            lines.setdefault((row["geometry"], row["checkpoint"]), []).append((row["batch"], value))
    return {key: tuple(map(list, zip(*sorted(points)))) for key, points in lines.items()}


def plot(result: dict[str, Any], path: str | Path) -> None:
    """Writes the figure to `path`."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "replayssm"  # the same file from the same results
    from matplotlib import pyplot

    about = result["about"]
    geometries = list(dict.fromkeys(row["geometry"] for row in result["steps"]))
    batches = sorted({row["batch"] for row in result["steps"]})
    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(12, 4.8), layout="constrained")
    for axis, (name, title, line) in zip(axes, PANELS):
        axis.axhline(line, color="0.6", linewidth=0.8)
        for (geometry, checkpoint), (xs, ys) in series(result, name).items():
            color = f"C{geometries.index(geometry)}"
            style = LINE_STYLES.get(checkpoint, "-.")
            axis.plot(xs, ys, style, color=color, marker="o", markersize=3, label=f"{geometry}, {checkpoint}")
        axis.set_xscale("log", base=2)
        axis.set_xticks(batches, [str(batch) for batch in batches])
        axis.minorticks_off()
        axis.set_ylim(bottom=0, top=max(1.05, axis.get_ylim()[1]))
        axis.set_xlabel("batch")
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.3)
    handles, labels = axes[1].get_legend_handles_labels()
    if not handles:
        handles, labels = axes[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside right center", fontsize=8, frameon=False)
    figure.suptitle(
        f"Mamba-2 decode step, {about['device']}, {about['date']}, torch {about['torch']}, triton {about['triton']}, "
        f"mamba_ssm {about.get('mamba_ssm') or 'absent'}",
        fontsize=9,
    )
    metadata = {"Date": None} if str(path).endswith(".svg") else None
    figure.savefig(path, metadata=metadata)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", help="the JSON that benchmark_kernels.py wrote")
    parser.add_argument("output", help="the picture, .svg or .png")
    args = parser.parse_args()
    plot(json.loads(Path(args.results).read_text()), args.output)


if __name__ == "__main__":
    main()
