"""The benchmark of several devices, on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmark_multigpu.py"


@pytest.mark.slow
def test_it_runs_and_compares_before_it_times(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    arguments = "--device cpu --geometry tiny --dtype float32 --documents 12 --length 40 --batch 2 --spread-batch 2"
    command = [sys.executable, SCRIPT, *arguments.split(), "--cycles", "1", "--json", tmp_path / "out.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["what"], row.get("processes")) for row in rows] == [
        ("perplexity", 1),
        ("perplexity", 2),
        ("spread", None),
    ]
    assert rows[0]["nll"] == rows[1]["nll"] and rows[0]["tokens"] == 12 * 39
    assert rows[2]["logits"] < 1e-5 and rows[2]["ratio"] > 0
