"""The Scales dashboard in a real browser, against the numbers in the event files."""

import re

import numpy as np
import pytest

from lightning_unitscale.formats import get_format
from lightning_unitscale.scales.layout import kind_weights
from lightning_unitscale.tensorboard.responses import SHOWN_FORMATS
from lightning_unitscale.tensorboard.run_report import BAD, STOPS, ZERO, write_report
from tests.browser.conftest import STEPS
from tests.tensorboard.runs import NAMES, snapshot, unit_scaled, with_nan, write
from tests.tensorboard.test_plugin import STATIC

pytestmark = pytest.mark.browser

FRAME = "/data/plugin_entry.html?name=scales"
FORMATS = tuple(item.name for item in SHOWN_FORMATS)


@pytest.fixture
def dashboard(page, server):
    page.open(server + FRAME)
    show(page, run="baseline")
    return page


def show(page, **state):
    words = {True: "true", False: "false", None: "null"}
    fields = ", ".join(
        f"{key}: {words[value] if value in words else repr(value)}" for key, value in state.items()
    )
    page.browser.evaluate(f"scalesDashboard.change({{{fields}}})")


def rgb(color):
    return [int(color[start : start + 2], 16) for start in (1, 3, 5)]


def expected_color(value, limit):
    """The color of log2 RMS in the light theme."""
    if np.isnan(value):
        return None
    if np.isinf(value):
        return rgb(ZERO)
    position = (np.clip(value / limit, -1, 1) + 1) / 2 * (len(STOPS) - 1)
    channels = np.array([rgb(one) for one in STOPS])
    return [np.interp(position, range(len(STOPS)), channels[:, k]) for k in range(3)]


def assert_cells(page, panel, snapshots, direction, stored, limit=8, names=NAMES):
    for column, one in enumerate(snapshots):
        values = one.log2_rms(direction, stored=stored)
        for row, name in enumerate(names):
            *color, opacity = page.pixel(panel, row, column)
            expected = expected_color(values[one.names.index(name)], limit)
            assert opacity == 255
            # 512 colors between two ends that are at most 255 apart.
            np.testing.assert_allclose(color, expected, atol=2.5, err_msg=f"{name} at {column}")


def test_palettes_match_in_python_and_javascript():
    source = (STATIC / "palette.js").read_text()
    light = re.search(r"light: \[(.*?)\]", source)
    assert tuple(re.findall(r"#\w+", light[1])) == STOPS
    assert f"ZERO = {{ light: '{ZERO}'" in source and f"BAD = {{ light: '{BAD}'" in source


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("stored", [False, True], ids=["meant", "stored"])
def test_cell_colors_match_data(dashboard, direction, stored):
    show(dashboard, run="scaled", direction=direction, stored=stored, limit=8)
    snapshots = [unit_scaled(snapshot(step)) for step in STEPS]
    assert_cells(dashboard, 0, snapshots, direction, stored)


def test_filter_shows_matching_rows(dashboard):
    dashboard.browser("press", key="/")
    dashboard.browser("type", text="linear")
    dashboard.settle("app.rows.length === 3")
    assert dashboard.app("app.rows.map(({ name }) => name)") == [
        "blocks.0.attn.linear",
        "blocks.1.attn.linear",
        "head.linear",
    ]
    assert dashboard.texts(".count") == ["3 of 6 tensors"]
    show(dashboard, limit=8)
    rows = [name for name in NAMES if name.endswith("linear")]
    assert_cells(dashboard, 0, [snapshot(s) for s in STEPS], "forward", True, names=rows)
    for pattern, number in (
        ("blocks.?.attn.*", 3),
        ("attn, linear", 2),
        ("!attn", 3),
        ("BLOCKS.1 gelu", 1),
        ("x*", 0),
    ):
        dashboard.browser("fill", selector=".filter input", value=pattern)
        dashboard.settle(f"app.rows.length === {number}")
    assert dashboard.texts(".message h2") == ["No tensor matches “x*”."]
    dashboard.browser("press", key="Escape")
    dashboard.settle("app.rows.length === 6")
    assert dashboard.browser.evaluate("document.querySelector('.message').hidden")


def bars(page, run=0):
    section = f"document.querySelectorAll('.chart')[{run}]"
    script = f"[...{section}.querySelectorAll('.bar')].map(({{ dataset }}) => ({{ ...dataset }}))"
    return {int(one["exponent"]): float(one["count"]) for one in page.browser.evaluate(script)}


def test_click_opens_histogram_of_counts(dashboard):
    show(dashboard, run="scaled", stored=False)
    dashboard.click_cell(0, row=2, column=1)
    dashboard.settle("document.querySelector('.chart .bar') !== null")
    assert dashboard.texts(".detail h2") == [NAMES[2]]
    for stored in (False, True):
        show(dashboard, stored=stored)
        one = unit_scaled(snapshot(STEPS[1]))
        counts = one.exponent_counts()[2]
        shift = one.log2_sigma[2] if stored else 0
        expected = {int(k) - 150 - shift: counts[k] for k in np.flatnonzero(counts)}
        assert bars(dashboard) == expected
        heights = dashboard.browser.evaluate(
            "[...document.querySelectorAll('.bar')].map((one) => one.height.baseVal.value)"
        )
        ratios = np.array(heights) / np.array(list(expected.values()))
        tall = np.array(heights) > 1
        np.testing.assert_allclose(ratios[tall], ratios[tall].max(), rtol=1e-5)


def table(page):
    """Format -> kind -> share, as the cells hold it, of the first run."""
    script = """[...document.querySelectorAll('.fractions tbody tr')].map((row) => [
        row.dataset.format,
        Object.fromEntries([...row.querySelectorAll('td[data-run="0"]')].map(
          (cell) => [cell.dataset.kind, Number(cell.dataset.value)])),
    ])"""
    return dict(page.browser.evaluate(script))


def test_shift_slider_moves_fractions_and_bands(dashboard):
    dashboard.click_cell(0, row=3, column=3)
    rows = "document.querySelectorAll('.fractions tbody tr').length"
    dashboard.settle(f"{rows} === {len(FORMATS)}")
    counts = snapshot(STEPS[3]).exponent_counts()[3]
    band = "Number(document.querySelector('.band.normal').getAttribute('x'))"
    places = []
    for shift in (-6, 0, 14):
        dashboard.browser("fill", selector="[aria-label^='Power of two']", value=str(shift))
        if shift:  # unshifted, the monitored formats' shares are those counted on the device
            for name in FORMATS:
                for kind, value in table(dashboard)[name].items():
                    expected = counts @ kind_weights(get_format(name), kind, shift) / 400
                    assert value == pytest.approx(expected, abs=1e-6), (name, kind, shift)
        places.append(dashboard.browser.evaluate(band))
        assert bars(dashboard)  # the tensor stays where it is
    assert places[0] > places[1] > places[2]
    dashboard.browser("press", key="[")
    assert dashboard.texts(".slider output")[1] == "\N{MULTIPLICATION SIGN} 2¹³"


def test_monitored_formats_have_exact_fractions(dashboard):
    show(dashboard, direction="backward")
    dashboard.click_cell(0, row=4, column=2)
    dashboard.settle(
        "document.querySelector('.detail').textContent.includes('all elements counted')"
    )
    found = table(dashboard)
    exact = snapshot(STEPS[2]).fractions("backward")[4].astype(np.float16)
    for name, row in zip(("FP16", "E4M3FN", "E5M2"), exact, strict=True):
        shares = [found[name][kind] for kind in ("overflow", "subnormal", "flushed")]
        np.testing.assert_array_equal(np.float16(shares), row)


def test_step_slider_changes_step(dashboard):
    dashboard.click_cell(0, row=0, column=0)
    dashboard.settle("document.querySelector('.bar') !== null")
    dashboard.browser("fill", selector="[aria-label='Step']", value="2")
    counts = snapshot(STEPS[2]).exponent_counts()[0]
    assert bars(dashboard) == {int(k) - 150: counts[k] for k in np.flatnonzero(counts)}
    assert dashboard.app("app.state.selected.step") == STEPS[2]


def test_keys_move_the_selection_and_switch_views(dashboard):
    press = lambda *keys: [dashboard.browser("press", key=key) for key in keys]  # noqa: E731
    selected = lambda: dashboard.app("[app.state.selected.name, app.state.selected.step]")  # noqa: E731
    press("Enter")
    assert selected() == [NAMES[0], STEPS[-1]]
    press("ArrowDown", "ArrowDown", "ArrowLeft")
    assert selected() == [NAMES[2], STEPS[-2]]
    press("Home", "ArrowLeft", "PageDown")
    assert selected() == [NAMES[-1], STEPS[0]]
    press("ArrowUp", "ArrowRight")
    assert selected() == [NAMES[-2], STEPS[1]]
    spoken = dashboard.texts("[role=status]")[0]
    assert spoken.startswith(f"{NAMES[-2]}, step 10, log₂ RMS ")
    press("b")
    dashboard.settle("app.panels[0].data.direction === 'backward'")
    before = dashboard.app("app.state.stored")
    press("s")
    assert dashboard.app("app.state.stored") is not before
    press("f")
    dashboard.settle("app.panels[0].data.direction === 'forward'")
    press("?")
    assert dashboard.browser.evaluate("document.querySelector('dialog').open")
    press("Escape", "Escape")
    assert dashboard.app("app.state.selected") is None
    assert dashboard.browser.evaluate("document.querySelector('.detail').hidden")
    press("/", "s", "f")
    assert dashboard.browser.evaluate("document.querySelector('.filter input').value") == "sf"


def test_two_runs_side_by_side(dashboard):
    dashboard.browser("choose", selector="label:has-text('Compare with') select", value="scaled")
    dashboard.settle("app.panels.length === 2")
    show(dashboard, stored=True, limit=8)
    assert_cells(dashboard, 0, [snapshot(s) for s in STEPS], "forward", True)
    assert_cells(dashboard, 1, [unit_scaled(snapshot(s)) for s in STEPS], "forward", True)
    dashboard.click_cell(1, row=3, column=2)
    dashboard.settle("document.querySelectorAll('.chart .bars').length === 2")
    plain, scaled = bars(dashboard, 0), bars(dashboard, 1)
    shift = unit_scaled(snapshot(STEPS[2])).log2_sigma[3]
    assert scaled == {exponent - shift: count for exponent, count in plain.items()}
    assert dashboard.texts(".chart h4") == ["baseline", "scaled"]


def test_tensors_are_aligned_by_name(dashboard):
    show(dashboard, compared="smaller", limit=8)
    dashboard.settle("app.panels.length === 2")
    # The smaller run has no gelu in block 0: a hole in its place, and all others in their rows.
    assert dashboard.app("app.panels[1].places") == [0, 1, -1, 2, 3, 4]
    names = (*NAMES[:2], *NAMES[3:])
    smaller = [snapshot(step, names=names, backward=False) for step in (0, 10)]
    for column, one in enumerate(smaller):
        for row, name in enumerate(NAMES):
            if name in names:
                value = one.log2_rms("forward")[names.index(name)]
                color = dashboard.pixel(1, row, column)[:3]
                np.testing.assert_allclose(color, expected_color(value, 8), atol=2.5)
    show(dashboard, run="smaller", compared=None, direction="backward")
    dashboard.settle("!document.querySelector('.message').hidden")
    assert dashboard.texts(".message h2") == ["Nothing was measured backward."]


def test_tooltip_shows_cell_values(dashboard):
    x, y = dashboard.center(0, row=1, column=2)
    dashboard.browser("move", x=x, y=y)
    value = snapshot(STEPS[2]).log2_rms("forward")[1]
    (text,) = dashboard.texts(".tip")
    assert text == f"{NAMES[1]}step 20log₂ RMS {value:.1f}".replace("-", "\N{MINUS SIGN}")


@pytest.mark.parametrize(("direction", "first"), [("forward", 1), ("backward", 3)])
def test_first_nan_is_shown_and_colored(page, tmp_path, direction, first):
    later = with_nan(snapshot(20), 0, 4)
    write(tmp_path / "run", [snapshot(0), with_nan(snapshot(10), 1, 3), later])
    with page.served(tmp_path) as url:
        page.open(url + FRAME)
        show(page, direction=direction)
        assert page.texts(".notice") == [f"NaN or inf since step 10: {NAMES[first]}"]
        for row in range(len(NAMES)):
            is_pink = page.pixel(0, row, 1)[:3] == rgb(BAD)
            assert is_pink == (row in (1, 3))
        page.browser("tap", selector=".notice")
        assert page.app("[app.state.selected.name, app.state.selected.step]") == [NAMES[first], 10]
        page.settle("document.querySelector('.summary').textContent.includes('3 NaN or infinite')")


BACKGROUND = "getComputedStyle(document.body).backgroundColor"


def test_dark_theme_follows_system(page, server):
    page.open(server + FRAME, scheme="dark")
    assert page.browser.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.browser.evaluate(BACKGROUND) == "rgb(27, 29, 33)"
    show(page, run="baseline", limit=8)
    # At unit scale the cells recede into the page, in the dark as well.
    assert max(page.pixel(0, 0, 0)[:3]) < 80


def test_dark_theme_follows_tensorboard(page, server, browser):
    host = {
        "url": f"{server}/host",
        "html": f"<body class='dark-mode'><iframe src='{FRAME}' width=900 height=600></iframe>",
    }
    browser("open", url=host["url"], host=host)
    inner = "document.querySelector('iframe').contentWindow"
    browser.wait(f"{inner}.scalesDashboard?.shown > 0")
    theme = f"{inner}.document.documentElement.dataset.theme"
    assert browser.evaluate(theme) == "dark"
    browser.evaluate("document.body.classList.remove('dark-mode')")
    browser.wait(f"{theme} === 'light'")


def test_empty_folder_shows_instructions(page, tmp_path):
    with page.served(tmp_path) as url:
        page.open(url + FRAME)
        assert page.texts(".message h2") == ["No scales yet."]
        assert "ScaleMonitor(" in page.texts(".message pre")[0]
        # Every line of it is seen, and nothing that there is nothing to choose with.
        box = "(({ scrollWidth, clientWidth }) => scrollWidth - clientWidth)"
        assert page.browser.evaluate(f"{box}(document.querySelector('.message pre'))") == 0
        for one in (".controls", ".legend"):
            shown = f"getComputedStyle(document.querySelector('{one}')).display"
            assert page.browser.evaluate(shown) == "none"


def test_names_are_shown_if_rows_are_high_enough(dashboard):
    assert dashboard.app("app.heatMap.isLabeled")
    assert dashboard.app("app.heatMap.cellRect(0, 1, 0).height") >= 16


def test_html_report_matches_dashboard_without_server(page, logdir, tmp_path):
    report = write_report([logdir / "baseline", logdir / "scaled"], tmp_path / "report")
    page.open(report.page.as_uri())
    show(page, run="scaled", compared="baseline", stored=True, limit=8)
    page.settle("app.panels.length === 2")
    assert_cells(page, 0, [unit_scaled(snapshot(s)) for s in STEPS], "forward", True)
    page.click_cell(0, row=1, column=3)
    page.settle("document.querySelectorAll('.chart .bars').length === 2")
    page.settle("document.querySelector('.detail').textContent.includes('all elements counted')")
    one = unit_scaled(snapshot(STEPS[3]))
    counts, shift = one.exponent_counts()[1], one.log2_sigma[1]
    assert bars(page) == {int(k) - 150 - shift: counts[k] for k in np.flatnonzero(counts)}
    requests = page.browser("report")["requests"]
    assert requests == [report.page.as_uri()]
