"""The report: one valid, self-contained page with the figures of the run's files."""

from __future__ import annotations

import html.parser
import json
import math
import re
from xml.etree import ElementTree

import pytest

from meshwright.errors import UserError
from meshwright.monitoring.report import write_report
from meshwright.monitoring.run_comparison import write_run_comparison

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Strict(html.parser.HTMLParser):
    """Parser that checks that every element is closed in order, and collects text by element and all attributes."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.text: dict[str, str] = {}
        self.attributes: list[tuple[str, str, str | None]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        names = [name for name, _ in attributes]
        assert len(names) == len(set(names)), (tag, names)
        self.attributes += [(tag, name, value) for name, value in attributes]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.attributes += [(tag, name, value) for name, value in attributes]

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data):
        if self.open:
            self.text[self.open[-1]] = self.text.get(self.open[-1], "") + data


def step(number: int, loss: float | None, **more) -> dict:
    rate = 1000.0 + number
    parts = {"forward": 0.25, "backward": 0.5, "data": 0.25}
    line = {"step": number, "loss": loss, "tokens_per_second": rate, "memory_gib": 0.5, "seconds_by_part": parts}
    return line | more


def run_directory(path, lines, recipe='layout = "dp1"\n', result=None):
    path.mkdir(parents=True, exist_ok=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "recipe.resolved.toml").write_text(recipe)
    if result is not None:
        (path / "result.json").write_text(json.dumps(result))
    return path


def page(directory, **parts) -> str:
    path = write_report(directory, **parts)
    assert path == directory / "report.html"
    return path.read_text(encoding="utf-8")


EVALUATION = {"loss": 1.25, "perplexity": 3.49, "bits_per_byte": 1.803, "tokens": 12345, "xz_bits_per_byte": 2.5}
RESULT = {
    "layout": "dp2 zero1 bf16",
    "parameters": 1234567,
    "mfu": 0.41,
    "peak_flops_per_device": 5e10,
    "flops_convention": "2 per multiply-add",
    "skipped_steps": 3,
}


def test_report_is_one_valid_document_without_external_resources(tmp_path):
    lines = [step(n, 3.0 / n, **({"validation_loss": 3.1 / n} if n % 5 == 0 else {})) for n in range(1, 21)]
    lines.insert(7, {"event": "save", "step": 7, "stall_seconds": 0.1})
    directory = run_directory(tmp_path / "run", lines, result=RESULT)
    text = page(directory, evaluation=EVALUATION, samples=[{"prompt": "def ", "text": "f(): pass"}])
    assert text.startswith("<!doctype html><html lang=")
    parsed = Strict(text.removeprefix("<!doctype html>"))
    assert "script" not in parsed.text and "http" not in text and "url(" not in text
    assert not [one for one in parsed.attributes if one[1] in ("src", "href", "xlink:href", "srcset", "onload")]
    for part in re.findall(r"<svg.*?</svg>", text, re.S):
        ElementTree.fromstring(part)
    assert re.findall("<h2>(.*?)</h2>", text) == [
        *("Samples", "Loss", "Throughput", "Peak memory of rank 0", "Time by part, smoothed", "Held-out files"),
        "Recipe",
    ]
    assert len(re.findall("<svg", text)) == 2 * 4  # for broad screens and for phones


def test_report_contains_figures_of_run_files(tmp_path):
    directory = run_directory(tmp_path / "run", [step(1, 3.0), step(2, 2.5)], 'name = "shown"\n', RESULT)
    text = page(directory, evaluation=EVALUATION, samples=[{"prompt": "def ", "text": "f(): pass"}])
    for said in (
        *("1,234,567", "dp2 zero1 bf16", "41.0% of 50 GFLOP/s per process", "2 per multiply-add", "2.5000", "1,002"),
        *("forward 25%, backward 50%, data 25%", "1.803", "2.500 bits per byte", "3.49", "12,345", "skipped steps"),
        *("name = &quot;shown&quot;", "<b>def </b>f(): pass", "512 MiB"),
    ):
        assert said in text, said


def test_report_compares_predicted_and_measured(tmp_path):
    predicted = {
        "step_seconds": 0.5, "step_seconds_low": 0.4, "step_seconds_high": 0.7, "seconds_by_part": {"compute": 0.5},
        "seconds_by_kind": {"working": 0.375, "waiting": 0.125},
        "memory_bytes": {"parameters": 4096, "activations": 100, "framework": 0, "peak": 4196},
        "sent_bytes_by_axis": {"data": 1234567},
    }  # fmt: skip
    measured = {
        "step_seconds": 0.6, "seconds_by_part": {"forward": 0.2}, "sent_bytes_by_axis": {"data": 1234568},
        "memory_bytes": {"parameters": 4096, "peak": 4200, "unexplained": 4, "allocator_peak": None},
        "fullest_rank": {"rank": 1, "memory_bytes": {"process_peak": 8192, "allocator_peak": None}},
    }  # fmt: skip
    result = RESULT | {"predicted": predicted, "measured": measured}
    text = page(run_directory(tmp_path / "run", [step(1, 3.0)], result=result))
    Strict(text.removeprefix("<!doctype html>"))
    for row in (
        "<th>seconds of a step</th><td>0.5 (0.4 to 0.7)</td><td>0.6</td>",
        "<th>tensors of rank 0: parameters</th><td>4 KiB</td><td>4 KiB</td>",
        "<th>process memory of rank 0: unexplained</th><td>–</td><td>4 bytes</td>",
        "<th>sent a step by rank 0: data</th><td>1.18 MiB</td><td>1.18 MiB</td>",
        "<td>compute 0.5</td><td>forward 0.2</td>",
        "<th>seconds of a step: waiting</th><td>0.125</td><td>–</td>",
        "<th>process peak of the fullest rank (1)</th><td>–</td><td>8 KiB</td>",
        "<th>process peak of rank 0</th><td>512 MiB</td>",
    ):
        assert row in text, row
    assert "framework" not in text and "tensors of rank 0: peak" not in text
    nothing = {"predicted": {"step_seconds": None, "memory_bytes": None}, "measured": {"sent_bytes_by_axis": None}}
    text = page(run_directory(tmp_path / "other", [step(1, 3.0)], result=RESULT | nothing))
    assert "Predicted and measured" not in text


def test_user_text_is_escaped(tmp_path):
    bad = '</pre><script>alert("x")</script>&amp;'
    directory = run_directory(tmp_path / "a<b>&c", [step(1, 3.0)], bad, {"layout": bad})
    text = page(directory, samples=[{"prompt": bad, "text": bad}])
    parsed = Strict(text.removeprefix("<!doctype html>"))
    assert "<script" not in text
    assert parsed.text["pre"].count(bad) == 2 and parsed.text["b"] == bad and parsed.text["td"].count(bad) == 1
    assert parsed.text["title"].startswith("a<b>&c") and parsed.text["h1"] == "Run a<b>&c"


def test_charts_show_norm_rate_and_values_on_hover(tmp_path):
    lines = [step(n, 3.0 / n, gradient_norm=n / 2, learning_rate=1e-3 * n) for n in range(1, 6)]
    text = page(run_directory(tmp_path / "run", lines))
    assert "<h2>Learning rate</h2>" in text and "<h2>Gradient norm</h2>" in text
    shown = [re.findall("<tspan.*?>(.*?)</tspan>", tip) for tip in re.findall('<g class="hit">.*?</g></g>', text)]
    assert ["step 4", "gradient norm: 2"] in shown and ["step 4", "learning rate: 0.004"] in shown
    assert ["step 4", "forward: 250", "backward: 500", "data: 250"] in shown
    assert ["step 2", "training: 1.5"] in [tip[:2] for tip in shown]
    assert len(shown) == 2 * 6 * 5


def test_only_differing_recipe_keys_are_shown_unfolded(tmp_path):
    recipe = 'layout = "dp1"\n[train]\nsteps = 9\noptimizer = "adamw"\n[data]\nsource = "stdlib"\n'
    shown, _, folded = page(run_directory(tmp_path / "run", [step(1, 3.0)], recipe)).partition("<details>")
    assert "<th>train.steps</th>" in shown and "<th>data.source</th>" in shown and "train.optimizer" not in shown
    assert "optimizer = &quot;adamw&quot;" in folded


def test_comparison_overlays_runs_and_lists_differing_keys(tmp_path):
    recipes = (
        "[run]\nname = 'a'\n[train]\nsteps = 9\nbatch = 2\n",
        "[run]\nname = 'b'\n[train]\nsteps = 9\nbatch = 4\n",
    )
    runs = [
        run_directory(
            tmp_path / name, [step(n, factor / n, gradient_norm=1.0) for n in range(1, 9)], recipe,
            RESULT | {"parameters": 99},
        )
        for name, factor, recipe in zip(("first", "second"), (3.0, 4.0), recipes, strict=True)
    ]  # fmt: skip
    text = write_run_comparison(runs).read_text()
    Strict(text.removeprefix("<!doctype html>"))
    assert (runs[0] / "comparison.html").read_text() == text
    assert "<th>last training loss</th><td>0.3750</td><td>0.5000</td>" in text
    assert re.findall("<th>([a-z]+\\.[a-z]+)</th>", text) == ["train.batch"]
    svg = re.findall(r"<svg.*?</svg>", text, re.S)
    assert [len(polylines(one)) for one in svg] == [2] * len(svg) and len(svg) == 2 * 4
    assert "first: 0.375" not in svg[0] and re.search("step 8</tspan><tspan[^>]*>first: .*>second: ", svg[0])


def test_comparison_of_one_run_or_unlike_units_is_refused(tmp_path):
    first = run_directory(tmp_path / "first", [step(1, 3.0)])
    other = run_directory(tmp_path / "other", [step(1, 3.0) | {"tokens_per_second": None, "samples_per_second": 2.0}])
    (other / "metrics.jsonl").write_text(
        (other / "metrics.jsonl").read_text().replace('"tokens_per_second": null, ', "")
    )
    with pytest.raises(UserError, match="takes 2 to 8 different runs, not 1"):
        write_run_comparison([first, first])
    with pytest.raises(UserError, match="some runs count throughput in tokens and others in samples"):
        write_run_comparison([first, other])


@pytest.mark.parametrize(
    "lines",
    [
        [step(1, 2.0)],
        [step(n, 2.0) for n in range(1, 4)],
        [step(1, None, skipped=True), step(2, None, skipped=True)],
        [step(n, 2.0 if n % 2 else None) for n in range(1, 9)],
        [step(n, 1e30 * n) for n in range(1, 4)],
    ],
    ids=["one step", "a flat loss", "never finite", "skipped in between", "huge"],
)
def test_runs_of_every_kind_have_a_page(tmp_path, lines):
    text = page(run_directory(tmp_path / "run", lines))
    Strict(text.removeprefix("<!doctype html>"))
    assert "nan" not in text.lower() and "inf" not in text.lower().replace("information", "")
    assert "validation" not in text  # a run without validation has no such curve


def test_run_without_result_or_recipe_still_has_page(tmp_path):
    directory = run_directory(tmp_path / "run", [step(1, 3.0)])
    (directory / "recipe.resolved.toml").unlink()
    text = page(directory)
    assert "Recipe" not in text and "Sample" not in text and "Held-out" not in text and "3.0000" in text


def polylines(svg: str) -> list[list[tuple[float, float]]]:
    return [
        [tuple(map(float, point.split(","))) for point in line.get("points").split()]
        for line in ElementTree.fromstring(svg).iter("polyline")
    ]


def test_long_runs_are_downsampled_in_page_of_bounded_size(tmp_path):
    lines = [step(n, 2.0 + math.sin(n / 5000) + (8.0 if n == 6_234 else 0.0)) for n in range(1, 12_001)]
    directory = run_directory(tmp_path / "run", lines)
    text = page(directory)
    assert len(text) < 400_000
    training = polylines(re.findall(r"<svg.*?</svg>", text, re.S)[0])[0]
    left, right = training[0][0], training[-1][0]
    spike = min(training, key=lambda point: point[1])
    assert spike[0] == pytest.approx(left + 6_234 / 12_000 * (right - left), abs=1.0)  # the spike is kept


def test_directory_without_run_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no metrics.jsonl in .*: give the directory of a training run"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"event": "save", "step": 0}\n')
    with pytest.raises(UserError, match="has no step yet"):
        write_report(tmp_path)


def test_page_is_replaced_as_a_whole(tmp_path):
    directory = run_directory(tmp_path / "run", [step(1, 3.0)])
    before = page(directory)
    with (directory / "report.html").open() as reader:
        run_directory(directory, [step(1, 3.0), step(2, 2.0)])
        assert page(directory) != before == reader.read()


def test_page_is_written_to_the_file_that_a_link_names(tmp_path):
    directory = run_directory(tmp_path / "run", [step(1, 3.0)])
    (directory / "report.html").symlink_to(tmp_path / "published.html")
    assert page(directory) == (tmp_path / "published.html").read_text()
    assert (directory / "report.html").is_symlink()


def test_unwritable_page_is_one_error_line(tmp_path):
    directory = run_directory(tmp_path / "run", [step(1, 3.0)])
    (directory / "report.html").mkdir()
    with pytest.raises(UserError, match=r"report.html cannot be written: is a directory"):
        write_report(directory)
