"""The benchmark of the scan on the CPU: both sides run, and a wrong one gets no speed."""

from __future__ import annotations

import benchmark_scan

from hf_replayssm.ops import mamba2


SMALL = ["--tokens", "70", "--heads", "4", "--head-dim", "8", "--state", "16", "--groups", "2", "--repeats", "1"]


def test_both_sides_have_a_time(capsys):
    benchmark_scan.main(SMALL)
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(("ours", "transformers"))]
    assert len(rows) == 2 and all(float(row[1]) > 0 and float(row[2]) < 1e-5 for row in rows)


def test_a_wrong_side_has_none(monkeypatch):
    scan = mamba2.scan

    def broken(x, *others):
        y, state = scan(x, *others)
        return (y, state) if str(x.dtype) == "torch.float64" else (y + 1, state)

    monkeypatch.setattr(mamba2, "scan", broken)
    lines = benchmark_scan.run(benchmark_scan.parse(SMALL)).splitlines()
    assert [line.split()[1] for line in lines if line.startswith("ours")] == ["-"]
