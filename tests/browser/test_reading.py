"""Labels, help and notes of the dashboard, at every width of the page."""

from dataclasses import replace

import pytest

from lightning_unitscale.tensorboard.run_report import write_report
from tests.browser.test_dashboard import FRAME, show
from tests.tensorboard.runs import NAMES, snapshot, write

pytestmark = pytest.mark.browser

# The first two are given to the step, all others are computed.
INPUTS = ((), (), (NAMES[1],), (NAMES[2],), (NAMES[3],), (NAMES[4],))


@pytest.fixture
def dashboard(page, server):
    page.open(server + FRAME)
    show(page, run="baseline")
    return page


@pytest.fixture
def narrow(browser):
    browser("resize", width=700, height=800)
    yield
    browser("resize", width=1280, height=800)


def test_parameters_and_results_have_separate_labels(page, tmp_path):
    write(tmp_path / "run", [replace(snapshot(0), inputs=INPUTS)])
    modules = tuple("" if k == 1 else name.rpartition(".")[0] for k, name in enumerate(NAMES))
    write(tmp_path / "z", [replace(snapshot(0), inputs=INPUTS, modules=modules)])
    parts = "app.heatMap.labels.parts.map(({ start, end, text }) => [start, end, text])"
    with page.served(tmp_path) as url:
        page.open(url + FRAME)
        show(page, run="run")
        assert page.app(parts) == [[0, 2, "parameters"], [2, 6, "results"]]
        show(page, filter="blocks.1")
        assert page.app(parts) == []
        show(page, run="z", filter="")
        page.settle("app.panels[0].data.run === 'z'")
        assert page.app(parts)[0] == [0, 2, "parameters, inputs"]


def test_run_without_sources_has_no_part_labels(dashboard):
    assert dashboard.app("app.heatMap.labels.parts") == []


def test_label_width_fits_font(dashboard):
    widths = [
        dashboard.app(
            "app.heatMap.labels.width(document.createElement('canvas').getContext('2d'), "
            f"{height}, 1000)"
        )
        for height in (10, 20)
    ]
    assert widths[0] < widths[1]
    assert dashboard.app("app.heatMap.gutter") == widths[1]


def test_help_dialog_explains_heat_map(dashboard):
    dashboard.browser("press", key="?")
    terms, texts = dashboard.texts("dialog dt"), dashboard.texts("dialog dd")
    assert len(terms) == len(texts)
    assert texts[terms.index("Backward")] == "gradients of the same tensors"
    assert texts[terms.index("?")] == "this help"
    assert "[object" not in dashboard.texts("dialog")[0]
    dashboard.browser("press", key="Escape")
    assert not dashboard.browser.evaluate("document.querySelector('dialog').open")


def test_histogram_bands_have_legend(dashboard):
    dashboard.click_cell(0, row=1, column=1)
    dashboard.settle("document.querySelector('.chart .bar') !== null")
    assert dashboard.texts(".band-key span") == [
        "normal in E4M3",
        "subnormal: fewer bits",
        "lost",
    ]
    box = "document.querySelector('.band-key').getBoundingClientRect()"
    assert dashboard.browser.evaluate(f"{box}.right <= innerWidth && {box}.height < 30")


def test_other_step_of_compared_run_is_shown(dashboard):
    show(dashboard, compared="smaller")
    dashboard.settle("app.panels.length === 2")
    # The smaller run ends at step 10.
    dashboard.click_cell(0, row=1, column=3)
    dashboard.settle("document.querySelectorAll('.chart .bars').length === 2")
    first, second = dashboard.texts(".summary")
    assert first.startswith("log₂ RMS") and second.startswith("step 10 · log₂ RMS")
    dashboard.browser("press", key="Home")
    assert all(text.startswith("log₂ RMS") for text in dashboard.texts(".summary"))


def test_run_with_one_step(page, tmp_path):
    write(tmp_path / "run", [snapshot(7)])
    with page.served(tmp_path) as url:
        page.open(url + FRAME)
        page.browser("press", key="Enter")
        page.settle("document.querySelector('.bar') !== null")
        assert page.texts(".trend .tick") == ["step 7"]
        # Lines say how large it is, however little there is between them.
        assert len(page.texts(".trend .caption")) >= 3
        place = "Number(document.querySelector('.trend .dot').getAttribute('cx'))"
        assert 200 < page.browser.evaluate(place) < 260
        assert page.browser.evaluate("document.querySelector('[aria-label=Step]').disabled")


def test_charts_fit_narrow_page(dashboard, narrow):
    dashboard.click_cell(0, row=1, column=1)
    dashboard.settle("document.querySelector('.chart .bar') !== null")
    width = "document.querySelector('.histogram').getBoundingClientRect().width"
    assert 250 < dashboard.browser.evaluate(width) < 461
    # The trend stands beside the histogram.
    side = "document.querySelector('.trend').getBoundingClientRect().right"
    assert dashboard.browser.evaluate(f"{side} < innerWidth / 2")
    assert dashboard.browser.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_refresh_keeps_open_run_list(dashboard):
    same = "(window.kept = app.controls.run.options[0]) && app.refresh().then(() => true)"
    assert dashboard.app(same)
    assert dashboard.app("window.kept === app.controls.run.options[0]")
    assert dashboard.app("app.controls.run.value") == "baseline"


def test_all_controls_are_reachable_by_keyboard(dashboard):
    dashboard.browser("press", key="Enter")
    dashboard.settle("document.querySelector('.fractions input') !== null")
    dashboard.browser.evaluate("document.activeElement.blur()")
    reached = []
    for _ in range(20):
        dashboard.browser("press", key="Tab")
        reached.append(
            dashboard.browser.evaluate(
                "(({ name, ariaLabel, textContent, tagName }) => "
                "ariaLabel || name || `${tagName} ${textContent}`)(document.activeElement)"
            )
        )
    for one in ("direction", "view", "rows", "Help", "Range of the colors", "Close", "Step"):
        assert one in reached
    assert {"format", "Power of two that multiplies the tensor before the cast"} <= set(reached)
    assert any(one.startswith("log2 RMS of 6 tensors by step") for one in reached)


def test_html_report_shows_start_of_next_section(page, logdir, tmp_path):
    report = write_report([logdir / "baseline"], tmp_path / "report")
    page.open(report.page.as_uri())
    top = "document.querySelector('.report-table h2').getBoundingClientRect().bottom"
    assert page.browser.evaluate(f"{top} < innerHeight")


def test_graph_numbers_have_text_color(page, logdir, tmp_path):
    report = write_report([logdir / "baseline"], tmp_path / "report")
    for scheme in ("light", "dark"):
        page.open(report.page.as_uri(), scheme=scheme)
        page.browser.evaluate("document.querySelector('.report-table details').open = true")
        fill = "getComputedStyle(document.querySelector('.step-graph rect + text')).fill"
        assert page.browser.evaluate(f"{fill} === getComputedStyle(document.body).color")
        # It is as wide as its names, and not as the page.
        width = "document.querySelector('.step-graph').getBoundingClientRect().width"
        assert page.browser.evaluate(width) < 700
