"""The view of the dashboard: matmul operands, aligned steps, and the URL that restores it."""

from dataclasses import replace

import numpy as np
import pytest

from lightning_unitscale.scales.layout import RowLayout
from lightning_unitscale.tensorboard.run_report import write_report
from tests.browser.conftest import STEPS
from tests.browser.test_dashboard import FRAME, expected_color, rgb, show
from tests.tensorboard.runs import NAMES, snapshot, unit_scaled, write

pytestmark = pytest.mark.browser

OPERANDS = (True, True, False, True, True, False)
MATMULS = (False, True, False, True, False, True)
TIMES = "\N{MULTIPLICATION SIGN}"
ROWS = "app.rows.map(({ name }) => name)"


def read_by_matmuls(snapshot):
    return replace(snapshot, operands=OPERANDS, matmuls=MATMULS)


@pytest.fixture
def dashboard(page, tmp_path):
    """Two runs whose operands are known: plain, and the same unit-scaled."""
    meant = [snapshot(step) for step in STEPS]
    write(tmp_path / "plain", [read_by_matmuls(one) for one in meant])
    write(tmp_path / "scaled", [read_by_matmuls(unit_scaled(one)) for one in meant])
    with page.served(tmp_path) as url:
        page.open(url + FRAME)
        show(page, run="scaled")
        yield page


def names_of(flags):
    return [name for name, flag in zip(NAMES, flags, strict=True) if flag]


def test_backward_view_starts_with_operands_only(dashboard):
    assert dashboard.app(ROWS) == list(NAMES)
    dashboard.browser("press", key="o")
    dashboard.settle("app.rows.length === 4")
    assert dashboard.app(ROWS) == names_of(OPERANDS)
    assert dashboard.texts(".count") == ["4 of 6 tensors"]
    show(dashboard, operandsOnly=None, direction="backward")
    dashboard.settle("app.panels[0].data.direction === 'backward'")
    assert dashboard.app(ROWS) == names_of(MATMULS)
    dashboard.browser("tap", selector="[name=operands]")
    dashboard.settle("app.rows.length === 6")
    # The user's choice stays.
    dashboard.browser("press", key="f")
    dashboard.settle("app.panels[0].data.direction === 'forward'")
    assert dashboard.app(ROWS) == list(NAMES)


def test_headline_counts_tensors_near_rms_1(dashboard):
    line = f"4 of 4 operands within 2{TIMES} of RMS 1 at step 30"
    assert dashboard.texts(".headline") == [line]
    show(dashboard, compared="plain", stored=False)
    dashboard.settle("app.panels.length === 2")
    # Tensor k is about 2**-2k. How it is stored is what counts, whatever is shown.
    assert dashboard.texts(".headline") == [
        f"scaled: {line} \N{MIDDLE DOT} plain: "
        + line.replace("4 of", "1 of").replace(" at", f", 2 within 4{TIMES} at")
    ]
    show(dashboard, compared=None, direction="backward")
    # The last gradient is zero and has no scale.
    line = line.replace("4 of 4 operands", "2 of 2 gradients")
    dashboard.settle(f"document.querySelector('.headline').textContent === {line!r}")


def test_matmul_operands_are_marked(dashboard):
    accent = rgb("#0b57d0")
    for row, flag in enumerate(OPERANDS):
        rect = dashboard.app(f"app.heatMap.cellRect(0, {row}, 0)")
        x, y = int(rect["left"]) - 2, int(rect["top"] + rect["height"] / 2)
        context = "document.querySelector('.heat-cells').getContext('2d')"
        color = dashboard.browser.evaluate(f"[...{context}.getImageData({x}, {y}, 1, 1).data]")
        assert (color[:3] == accent) == flag
    assert dashboard.texts(".legend-item:has(.operand):not([hidden])") == ["read by matmuls"]
    x, y = dashboard.center(0, row=1, column=2)
    dashboard.browser("move", x=x, y=y)
    assert dashboard.texts(".tip span")[-1] == "read by a matmul"


def test_run_without_operand_marks_shows_all_tensors(page, server):
    page.open(server + FRAME)
    show(page, run="baseline", direction="backward")
    page.settle("app.panels[0].data.direction === 'backward'")
    assert page.app(ROWS) == list(NAMES)
    assert page.browser.evaluate("document.querySelector('[name=operands]').disabled")
    assert page.texts(".headline") == [""]


def test_alert_shows_tensor_hidden_by_operand_filter(dashboard):
    show(dashboard, operandsOnly=True)
    dashboard.settle("app.rows.length === 4")
    alert = f"{{ tensor: {NAMES[2]!r}, step: 10, direction: 'forward' }}"
    dashboard.app(f"app.alerts.onSelect({alert})")
    dashboard.settle("app.state.selected !== null")
    assert dashboard.app(ROWS) == list(NAMES)


def test_tooltip_closes_on_key_press(dashboard):
    hidden = "document.querySelector('.tip').hidden"
    for key in ("ArrowDown", "s", "o"):
        x, y = dashboard.center(0, row=1, column=2)
        dashboard.browser("move", x=x, y=y)
        dashboard.browser("move", x=x + 1, y=y)
        assert not dashboard.browser.evaluate(hidden)
        dashboard.browser("press", key=key)
        assert dashboard.browser.evaluate(hidden), key


def test_escape_clears_filter(dashboard):
    dashboard.browser("press", key="/")
    dashboard.browser("type", text="gelu")
    dashboard.settle("app.rows.length === 2")
    dashboard.browser("press", key="Escape")
    dashboard.settle("app.rows.length === 6")
    dashboard.browser("press", key="b")
    dashboard.settle("app.state.direction === 'backward'")
    assert dashboard.browser.evaluate("document.querySelector('.filter input').value") == ""


def test_equal_steps_of_two_runs_are_aligned(page, tmp_path):
    long, short = range(0, 80, 10), (20, 40)
    write(tmp_path / "long", [snapshot(step) for step in long])
    write(tmp_path / "short", [snapshot(step) for step in short])
    with page.served(tmp_path) as url:
        page.open(url + FRAME)
        show(page, run="long", compared="short", limit=8)
        page.settle("app.panels.length === 2")
        rects = [
            [page.app(f"app.heatMap.cellRect({panel}, 0, {column})") for column in columns]
            for panel, columns in ((0, (2, 3, 4)), (1, (0, 1)))
        ]
        shift = rects[1][0]["left"] - rects[0][0]["left"]
        assert rects[1][1]["left"] - rects[0][2]["left"] == pytest.approx(shift)
        # A sample stands until the next one; before the first and after the last there is nothing.
        assert rects[1][0]["width"] == pytest.approx(2 * rects[0][0]["width"])
        first = snapshot(20).log2_rms("forward")[1]
        np.testing.assert_allclose(page.pixel(1, 1, 0)[:3], expected_color(first, 8), atol=2.5)
        left = rects[1][0]["left"] - rects[0][0]["width"] / 2
        y = rects[1][0]["top"] + 5
        assert page.app(f"app.heatMap.cellAt({left}, {y})") is None
        assert page.app(f"app.heatMap.cellAt({left + rects[0][0]['width']}, {y}).column") == 0
        page.click_cell(1, row=0, column=1)
        assert page.app("app.state.selected.step") == 40


STATE = {
    "run": "plain",
    "compared": "scaled",
    "direction": "backward",
    "stored": False,
    "operandsOnly": False,
    "filter": "blocks & mlp, !x",
    "limit": 12,
    "rowMode": "named",
}
SHOWN = (
    "Object.fromEntries(Object.entries(app.state).filter(([key]) => key !== 'selected'))",
    "[app.state.selected?.name, app.state.selected?.step]",
)


def test_url_restores_view(dashboard):
    browser = dashboard.browser
    show(dashboard, **STATE)
    dashboard.settle("app.panels.length === 2")
    show(dashboard, filter="mlp")
    dashboard.settle("app.rows.length === 2")
    dashboard.click_cell(0, row=1, column=2)
    shown = [dashboard.app(one) for one in SHOWN]
    assert shown == [STATE | {"filter": "mlp"}, [NAMES[4], 20]]
    number = browser.evaluate("history.length")
    address = browser.evaluate("location.href")
    browser("open", url="about:blank")
    dashboard.open(address)
    dashboard.settle("app.panels.length === 2 && !app.detail.node.hidden")
    assert [dashboard.app(one) for one in SHOWN] == shown
    assert browser.evaluate("document.querySelector('.filter input').value") == "mlp"
    assert browser.evaluate("history.length") <= number
    browser("press", key="Escape")
    assert "tensor" not in browser.evaluate("location.hash")


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    "fields",
    ["run=gone&scales.compared=gone", "direction=up&scales.limit=x&scales.stored=7", "step=1"],
)
def test_invalid_url_fields_are_ignored(dashboard, fields):
    address = dashboard.browser.evaluate("location.origin + location.pathname + location.search")
    dashboard.browser("open", url="about:blank")
    dashboard.open(f"{address}#scales.{fields}")
    assert dashboard.app("[app.state.direction, app.state.limit, app.state.stored]") == [
        "forward",
        "auto",
        True,
    ]
    assert dashboard.app("app.rows.length") == 6


def test_url_of_html_report(page, tmp_path):
    write(tmp_path / "run", [read_by_matmuls(snapshot(0))])
    report = write_report([tmp_path / "run"], tmp_path / "report")
    page.open(report.page.as_uri() + "#scales.direction=backward")
    assert page.app(ROWS) == names_of(MATMULS)
    page.browser("press", key="s")
    assert (
        page.browser.evaluate("location.hash") == "#scales.direction=backward&scales.stored=false"
    )


def test_fractions_are_shown_without_histograms(page, tmp_path):
    one = snapshot(0)
    layout = RowLayout(histogram=False)
    rows = {key: getattr(one, key)[:, : layout.num_columns] for key in ("forward", "backward")}
    write(tmp_path / "run", [replace(one, layout=layout, **rows)])
    with page.served(tmp_path) as url:
        page.open(url + FRAME)
        page.click_cell(0, row=5, column=0)
        page.settle("document.querySelector('.fractions td[data-value]') !== null")
        cell = "[data-format=E4M3FN] [data-kind=flushed]"
        value = f"Number(document.querySelector('{cell}').dataset.value)"
        (shares,) = one.fractions()[5][[item.name == "E4M3FN" for item in layout.formats]]
        assert page.browser.evaluate(value) == np.float16(shares[2]) > 0.5
        notes = page.texts(".detail .note")
        assert notes[-1] == "FP16, E4M3, E5M2: all elements counted."
        # Nothing to shift.
        assert page.browser.evaluate("document.querySelector('[aria-label^=Power]').disabled")


def test_shortened_names_keep_block_and_end(page, tmp_path):
    name = "blocks.1.attention.with_a_long_name.scaled_dot_product_attention_1"
    names = (*NAMES[:3], name, *NAMES[4:])
    write(tmp_path / "gpt_unit_scaled_with_a_long_name" / "version_12", [snapshot(0, names=names)])
    drawn = """(() => {
      const texts = [];
      const context = document.createElement('canvas').getContext('2d');
      const own = context.fillText.bind(context);
      context.fillText = (text) => texts.unshift(text);
      const rowTop = (row) => 20 * row;
      const place = { top: 0, bottom: 120, right: 200, rowHeight: 20, rowTop };
      app.heatMap.labels.draw(context, {}, place, 3, 4);
      return texts.join('');
    })()"""
    with page.served(tmp_path) as url:
        page.open(url + FRAME)
        text = page.app(drawn)
        assert text.startswith("blocks.1.…") and text.endswith("_attention_1")
        (chosen,) = page.texts("label:first-of-type option:checked")[:1]
        assert chosen.startswith("gpt_unit") and chosen.endswith("/version_12")
        assert len(chosen) <= 30


def test_long_run_names_keep_controls_in_one_line(page, tmp_path):
    for name in ("a_run_with_a_long_name", "another_run_with_a_long_name"):
        write(tmp_path / name / "version_0", [snapshot(step) for step in STEPS])
    with page.served(tmp_path) as url:
        page.open(url + FRAME)
        bottoms = page.browser.evaluate(
            "[...document.querySelectorAll('.controls > *')]"
            ".map((one) => one.getBoundingClientRect().bottom)"
        )
    assert len(bottoms) == 7 and max(bottoms) - min(bottoms) < 2, bottoms
