"""The HTML report: every figure that was given is in it, it loads nothing, and what it cannot read it names."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import tiny_models
from typer.testing import CliRunner

from hf_replayssm.cli import app
from hf_replayssm.evaluation import compare_caches, evaluate_perplexity
from hf_replayssm.report import report
from hf_replayssm.report.plot import Axis, Plot, Point, number


RESULTS = Path(__file__).parents[1] / "scripts" / "results"
DOCUMENTS = [tiny_models.random_ids(1, length, seed=length)[0].tolist() for length in (40, 17, 30)]


class Page(HTMLParser):
    """Text of the cells, headings, and whether every tag is closed."""

    VOID = {"meta", "br"}

    def __init__(self, page: str):
        super().__init__()
        self.open, self.cells, self.headings, self.tags = [], [], [], []
        self.feed(page)
        assert not self.open, self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.cells.append(data)
        elif self.open and self.open[-1] in ("h1", "h2", "h3"):
            self.headings.append(data)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """An evaluation, a comparison, and one against the same reference with another checkpoint."""
    folder, model = tmp_path_factory.mktemp("results"), tiny_models.tiny_model("bamba")
    settings = dict(mode="window", window=4)
    evaluate_perplexity(model, None, DOCUMENTS, **settings).to_json(folder / "plain.json")
    for name, dtype in (("float32", "float32"), ("bfloat16", "bfloat16")):
        replay = {"checkpoint_dtype": dtype, "buffer_len": 4}
        compare_caches(model, None, DOCUMENTS, replay=replay, **settings).to_json(folder / f"{name}.json")
    return folder


def test_evaluations_side_by_side(files):
    page = Page(report([files / "plain.json", files / "float32.json", files / "bfloat16.json"]))
    assert page.headings[:2] == ["hf_replayssm", "Perplexity"] and "Drift" in page.headings
    assert {"Perplexity against position", "KL(reference || cache) against position"} <= set(page.headings)
    plain, low = (json.loads((files / f"{name}.json").read_text()) for name in ("plain", "bfloat16"))
    assert number(plain["perplexity"]) in page.cells and number(low["kl"]) in page.cells
    for row in plain["by_position"]:
        assert number(math.exp(row["nll"] / row["tokens"])) in page.cells
    for row in low["by_position"]:
        assert number(row["kl"] / row["tokens"]) in page.cells
    # The reference of both comparisons is the same one.
    assert page.cells.count("float32: dynamic") == 1 + len(low["by_position"])
    assert "bfloat16: dynamic" not in page.cells


def test_nothing_is_loaded(files):
    text = report([files / "bfloat16.json", *sorted(RESULTS.glob("*.json"))])
    assert not re.search(r"(https?:)?//|url\(|@import|<script|<link|<img|src=", text)
    assert Page(text).tags


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_every_result_in_the_repository_can_be_read(file):
    page = Page(report([file]))
    assert file.stem in page.headings and len(page.cells) > 4
    plots = {"Speed against batch", "Time of a step against batch", "How many times as fast as the classic step"}
    drifts = [heading for heading in page.headings if heading.startswith("Error of the states against tokens")]
    assert plots & set(page.headings) or drifts or "forwards" in file.stem


def test_the_figures_of_a_benchmark_are_those_of_its_file():
    file = RESULTS / "generate-h200-2026-11-30.json"
    page = Page(report([file]))
    for row in json.loads(file.read_text())["rows"]:
        assert number(row["cycle_mean_ms"]) in page.cells
    assert "How many times as fast as upstream-captured" in page.headings


def test_kernels_of_every_recurrence(tmp_path):
    """One buffer length or several, and a baseline that copies."""
    head = {"geometry": "G", "checkpoint": "fp32", "batch": 8, "wrong": []}
    steps = [
        {**head, "replay": {"4": {"cycle": {"us": 5.0}}, "8": {"cycle": {"us": 4.0}}}, "classic": {"us": 6.0}},
        {**head, "batch": 16, "replay": {"cycle": {"us": 5.0}}, "fla": {"us": 9.0}, "fla_copied": {"us": 10.0}},
        {**head, "batch": 32, "replay": {}, "wrong": ["replay 4"]},
    ]
    (tmp_path / "run.json").write_text(json.dumps({"about": {"device": "D"}, "steps": steps}))
    text = report([tmp_path / "run.json"])
    assert {"replay L=4, G, fp32", "replay L=8, G, fp32", "fla and copy, G, fp32"} <= set(Page(text).cells)
    assert "batch 8: 1.50" in text and "batch 16: 2.00" in text
    assert "G, fp32, batch 32: no speed of what is wrong: replay 4." in text


def test_what_has_no_speed_says_why(tmp_path):
    rows = [
        {"variant": "upstream-captured", "batch": 1, "cycle_mean_ms": 3.0},
        {"variant": "replay-captured", "batch": 1, "cycle_mean_ms": 2.0},
        {"variant": "replay-captured", "batch": 8, "error": "RuntimeError: out of memory"},
        {"variant": "replay-static", "batch": 8, "skipped": "the time limit was reached"},
    ]
    (tmp_path / "run.json").write_text(json.dumps({"about": {}, "rows": rows}))
    text = report([tmp_path / "run.json"])
    assert "replay-captured, batch 8: no speed (RuntimeError: out of memory)." in text
    assert "replay-static, batch 8: no speed (the time limit was reached)." in text
    assert "batch 1: 1.50" in text


def test_names_are_text_and_not_markup(files, tmp_path):
    values = json.loads((files / "plain.json").read_text())
    values["model"] = '<script>alert("1")</script>&'
    file = tmp_path / "a<b>&c.json"
    file.write_text(json.dumps(values))
    text = report([file], title="<i>x</i>")
    assert "<script" not in text and "<b>" not in text and "<i>" not in text
    assert values["model"] in Page(text).cells


def test_files_of_one_name_are_told_apart(files, tmp_path):
    shutil.copy(files / "plain.json", tmp_path / "plain.json")
    page = Page(report([files / "plain.json", tmp_path / "plain.json"]))
    assert str(files / "plain.json") in page.cells and str(tmp_path / "plain.json") in page.cells


def test_the_command(files, tmp_path):
    result = CliRunner().invoke(app, ["report", str(files / "plain.json"), "--html", str(tmp_path / "x.html")])
    assert result.exit_code == 0 and "x.html" in result.stdout
    assert (tmp_path / "x.html").read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "There is no file"),
        ("not json", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        ("[1, 2]", "none of the results"),
        ('{"answer": 42}', "none of the results"),
        ('{"rows": []}', "none of the results"),
    ],
)
def test_other_files_are_refused(tmp_path, content, message):
    file = tmp_path / "result.json"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    result = CliRunner().invoke(app, ["report", str(file), "--html", str(tmp_path / "x.html")])
    assert result.exit_code == 1 and message in result.stderr and result.stderr.count("\n") == 1
    assert not (tmp_path / "x.html").exists()


def test_a_folder_that_is_not_there_is_said_first(files, tmp_path):
    result = CliRunner().invoke(app, ["report", str(files / "plain.json"), "--html", str(tmp_path / "no" / "x.html")])
    assert result.exit_code == 2 and "no folder" in " ".join(result.stderr.split())


# ----------------------------------------------------------------------------------------------- plots
def test_points_lie_where_their_values_are():
    plot = Plot("t", "x", "y", {"a": [Point(1, 10), Point(4, 1000), Point(2, 100)], "b": [Point(1, 0)]}, y_log=True)
    root = ElementTree.fromstring(plot.svg())
    circles = [(float(c.get("cx")), float(c.get("cy"))) for c in root.iter("circle")]
    assert len(circles) == 3, "zero has no place on a logarithmic axis"
    (x0, y0), (x1, y1), (x2, y2) = circles
    assert x0 < x1 < x2 and y0 > y1 > y2
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.11) and y0 - y1 == pytest.approx(y1 - y2, abs=0.11)
    assert ">a<" not in plot.svg() and "a</li>" in plot.legend() and "b</li>" not in plot.legend()


POSITIVE = [[1, 2], [3, 3], [0.001, 5000], [1.01, 1.02], [7], [1e-12, 1e-6]]  # a logarithmic axis gets no others


@pytest.mark.parametrize(
    ("values", "log"), [*itertools.product(POSITIVE, (False, True)), ([-2, 5], False), ([0, 0], False)], ids=str
)
def test_axes_have_ticks_inside_of_them(values, log):
    axis = Axis(values, 0, 100, log, base=10)
    ticks = axis.ticks()
    assert 1 <= len(ticks) <= 40 and ticks == sorted(ticks)
    assert all(-1e-6 <= axis.place(value) <= 100 + 1e-6 for value in ticks + values)


def test_a_plot_of_nothing_is_no_plot():
    assert Plot("t", "x", "y", {"a": [Point(1, math.nan)], "b": []}).svg() == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (None, "–"), (math.inf, "–"), (12345.6, "12,346"), (1.5, "1.5"), (3.4e-7, "3.4e-7"), (2e6, "2e6")],
)
def test_numbers(value, text):
    assert number(value) == text


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs a browser")
def test_a_browser_draws_it(files, tmp_path):
    report([files / "bfloat16.json"], tmp_path / "page.html")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", f"file://{tmp_path}/page.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.count("<figure>") == 3 and done.stdout.count("<circle") > 20
