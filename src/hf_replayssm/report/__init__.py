"""One HTML file of evaluations and benchmarks: plots and tables, nothing to load, so it opens anywhere and offline.

from hf_replayssm.report import report

report(["result.json", "scripts/results/generate-h200-2026-11-30.json"], "report.html")
"""

from __future__ import annotations

from .page import report


__all__ = ["report"]
