"""Alerts on the dashboard in a real browser, of real trainings with an injected fault."""

import json

import pytest
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_unitscale import ScaleMonitor
from lightning_unitscale.tensorboard.run_report import write_report
from tests.browser.test_dashboard import FRAME, rgb, show
from tests.callbacks.injected import FAULT_STEP, nan_bias, overflow, train

pytestmark = pytest.mark.browser

SELECTED = "[app.state.selected.name, app.state.selected.step]"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run with an overflow, one with a NaN in a bias, one with gradients that are flushed."""
    folder = tmp_path_factory.mktemp("faults")

    def fit(name, inject, **options):
        logger = TensorBoardLogger(folder, name, version="")
        monitor = ScaleMonitor(every_n_steps=5, on_violation="warn", **options)
        train(monitor, inject, logger=logger, default_root_dir=folder)
        return monitor

    monitors = {
        "overflow": fit("overflow", overflow),
        "nan": fit("nan", nan_bias),
        "flushed": fit("flushed", None, thresholds={"E4M3FN": {"flushed": 0.02}}),
    }
    return folder, monitors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "tensor", "kind", "text"),
    [
        ("overflow", "blocks.1.up.weight", "overflow", "of the elements overflow E4M3FN"),
        ("nan", "blocks.1.down.bias", "NaN or inf", "1 NaN among 16 elements"),
    ],
)
def test_click_on_alert_selects_tensor_and_step(page, runs, run, tensor, kind, text):
    folder, monitors = runs
    with page.served(folder) as url:
        page.open(url + FRAME)
        show(page, run=run, filter="")
        (title,) = page.texts(".alerts summary")
        number = len(monitors[run].alerts)
        counted = "1 alert" if number == 1 else f"{number} alerts"
        assert title == f"{counted} in {run}, first at step {FAULT_STEP}: {kind}, {tensor}"
        # Nothing is said twice.
        assert page.browser.evaluate("document.querySelector('.notice').hidden")
        page.browser("tap", selector=".alerts summary")
        kinds, texts = page.texts(".alerts .alert-kind"), page.texts(".alerts li")
        assert len(texts) == number
        assert kinds[0] == kind
        assert f"step {FAULT_STEP}: {tensor}" in texts[0] and text in texts[0]
        page.browser("tap", selector=".alerts li button")
        assert page.app(SELECTED) == [tensor, FAULT_STEP]
        assert page.texts(".detail h2") == [tensor]
        assert page.texts(".detail .alert") == [str(monitors[run].alerts[0])]
        page.browser("press", key="ArrowLeft")
        assert page.texts(".detail .alert") == []


def flag_color(page, row, column, below=2):
    """The color at the upper left of a cell, on the canvas of the marks."""
    rect = page.app(f"app.heatMap.cellRect(0, {row}, {column})")
    x, y = round(rect["left"]) + 2, round(rect["top"]) + below
    context = "document.querySelector('.heat-marks').getContext('2d')"
    return page.browser.evaluate(f"[...{context}.getImageData({x}, {y}, 1, 1).data]")


def test_cells_with_alerts_have_a_flag(page, runs):
    folder, monitors = runs
    with page.served(folder) as url:
        page.open(url + FRAME)
        show(page, run="overflow")
        page.settle("app.panels[0].data.alerts.length > 0")
        names = page.app("app.rows.map(({ name }) => name)")
        steps = page.app("app.panels[0].data.steps")
        column = steps.index(FAULT_STEP)
        flagged = {one.tensor for one in monitors["overflow"].alerts}
        for row, name in enumerate(names):
            *color, opacity = flag_color(page, row, column)
            if name in flagged:
                assert color == rgb("#b3261e") and opacity == 255
            else:
                assert opacity == 0
            assert flag_color(page, row, column - 1)[3] == 0


@pytest.mark.parametrize(("scheme", "color"), [("light", "#b3261e"), ("dark", "#ff3b30")])
def test_alert_flag_stays_in_its_row(page, runs, scheme, color):
    folder, monitors = runs
    tensor = monitors["overflow"].alerts[0].tensor
    with page.served(folder) as url:
        page.open(url + FRAME, scheme=scheme)
        page.browser("resize", width=1280, height=420)
        try:
            show(page, run="overflow", rowMode="fit")
            page.settle("app.panels[0].data.alerts.length > 0 && app.heatMap.rowHeight < 8")
            row = page.app(f"app.rows.findIndex(({{ name }}) => name === {tensor!r})")
            column = page.app("app.panels[0].data.steps").index(FAULT_STEP)
            assert flag_color(page, row, column)[:3] == rgb(color)
            assert flag_color(page, row + 1, column, below=1)[:3] != rgb(color)
            # The legend explains it.
            assert page.texts(".legend-item:has(.flag)") == ["alert"]
        finally:
            page.browser("resize", width=1280, height=800)


def test_alerts_of_both_compared_runs(page, runs):
    folder, monitors = runs
    with page.served(folder) as url:
        page.open(url + FRAME)
        show(page, run="flushed", compared="nan", direction="forward")
        page.settle("document.querySelectorAll('.alerts summary > span').length === 2")
        titles = page.texts(".alerts summary > span")
        assert titles[0].endswith(": flushed, " + first_of(monitors["flushed"]))
        assert titles[1] == "1 alert in nan, first at step 10: NaN or inf, blocks.1.down.bias"
        both = [*monitors["flushed"].alerts, *monitors["nan"].alerts]
        assert page.texts(".alerts li span:last-child") == [str(one) for one in both]
        assert page.texts(".alerts li .alert-run")[-1] == "nan"
        page.browser.evaluate("[...document.querySelectorAll('.alerts li button')].at(-1).click()")
        page.settle("app.state.selected !== null")
        assert page.app(SELECTED) == ["blocks.1.down.bias", FAULT_STEP]
        assert page.texts(".detail .alert") == [f"nan, {monitors['nan'].alerts[0]}"]


def first_of(monitor):
    first = monitor.alerts[0]
    return f"gradient of {first.tensor}" if first.direction == "backward" else first.tensor


def test_alert_shows_filtered_out_tensor(page, runs):
    folder, _ = runs
    with page.served(folder) as url:
        page.open(url + FRAME)
        show(page, run="nan")
        page.browser("fill", selector=".filter input", value="first")
        page.settle("app.rows.every(({ name }) => name.startsWith('first'))")
        page.browser("tap", selector=".alerts summary")
        page.browser("tap", selector=".alerts li button")
        page.settle("app.state.selected !== null")
        assert page.app(SELECTED) == ["blocks.1.down.bias", FAULT_STEP]
        assert page.app("app.rows.length") > 30
        column = page.app("app.panels[0].data.steps").index(FAULT_STEP)
        x, y = page.center(0, row=page.app("app.heatMap.model.selected.row"), column=column)
        page.browser("move", x=x, y=y)
        assert page.texts(".tip span")[-1] == "alert: NaN or inf"


# As if the server had more data on the last step.
LATE_ALERTS = """(() => {
  const { source } = scalesDashboard;
  const [runs, json] = [source.runs.bind(source), source.json.bind(source)];
  source.runs = async () => {
    const listing = await runs();
    const later = (one) => ({ ...one, version: one.version + 1 });
    return { ...listing, runs: listing.runs.map(later) };
  };
  source.json = async (route, query) => (route === 'alerts' ? late : json(route, query));
  return scalesDashboard.refresh();
})()"""


def test_alerts_that_arrive_after_last_step(page, runs):
    folder, _ = runs
    late = {"kind": "overflow", "step": 15, "tensor": "first.bias", "direction": "forward"}
    late["text"] = "late"
    with page.served(folder) as url:
        page.open(url + FRAME)
        show(page, run="overflow")
        page.browser.evaluate(f"window.late = [{json.dumps(late)}]")
        page.browser.evaluate(LATE_ALERTS)
        page.settle("app.panels[0].data.alerts.length === 1")
        assert page.texts(".alerts li span:last-child") == ["late"]


def test_gradient_alert_switches_to_backward_view(page, runs):
    folder, monitors = runs
    wanted = next(one for one in monitors["flushed"].alerts if one.direction == "backward")
    place = monitors["flushed"].alerts.index(wanted)
    with page.served(folder) as url:
        page.open(url + FRAME)
        show(page, run="flushed", direction="forward")
        page.browser("tap", selector=".alerts summary")
        page.browser.evaluate(f"document.querySelectorAll('.alerts li button')[{place}].click()")
        page.settle("app.state.direction === 'backward' && app.state.selected !== null")
        assert page.app(SELECTED) == [wanted.tensor, wanted.step]


def test_html_report_has_same_alerts(page, runs, tmp_path):
    folder, monitors = runs
    report = write_report([folder / "nan", folder / "overflow"], tmp_path / "report")
    page.open(report.page.as_uri())
    page.browser("tap", selector=".alerts summary")
    assert page.texts(".alerts li span:last-child") == [str(one) for one in monitors["nan"].alerts]
    page.browser("tap", selector=".alerts li button")
    assert page.app(SELECTED) == ["blocks.1.down.bias", FAULT_STEP]
    page.browser("choose", selector="label:has-text('Run') select", value="overflow")
    page.settle("document.querySelector('.alerts summary').textContent.includes('overflow')")


def test_run_without_alerts_has_no_list(page, server):
    page.open(server + FRAME)
    assert page.browser.evaluate("document.querySelector('.alerts').hidden")
