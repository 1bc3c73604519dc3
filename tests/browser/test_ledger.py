"""The precision report of a real training, on the dashboard and in the HTML file, in a browser."""

import pytest

from lightning_unitscale import FP8, ScaleMonitor, UnitScaleCallback
from lightning_unitscale.tensorboard.run_report import write_report
from tests.browser.test_dashboard import FRAME
from tests.callbacks.test_precision_reports import Ask, fit

pytestmark = pytest.mark.browser

ROWS = "[...document.querySelectorAll('.ledger table')].map((table) => [...table.rows].map("
ROWS += "({ cells }) => [...cells].map((cell) => cell.textContent)))"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("precision")
    callback = UnitScaleCallback(precision=FP8())
    ask = Ask(callback)
    trainer, _ = fit(callback, folder, ask, ScaleMonitor(every_n_steps=1), steps=3)
    return trainer.logger.log_dir, ask.reports[-1]


def check_tables(page, report):
    page.settle("!document.querySelector('.ledger').hidden")
    for table, is_forward in zip(page.browser.evaluate(ROWS), (True, False), strict=True):
        head, *rows = table
        assert head[3:5] == ["damage", "FLOPs"] and head[-1] == "why outside"
        expected = [row for row in report.rows if row.is_forward == is_forward]
        assert {(row[0], row[1]) for row in rows} == {(r.name, r.computation) for r in expected}
        damages = [abs(float(row[3])) for row in rows]
        assert damages == sorted(damages, reverse=True) and damages[0] > 0
        reasons = {row[0]: row[-1] for row in rows}
        assert reasons["lm_head.linear"] == "name excluded by default"
        assert reasons["layers.0.linear"] == ""
    shares = [row[4] for table in page.browser.evaluate(ROWS) for row in table[1:]]
    # Shares have two digits each.
    assert sum(float(share.removesuffix(" %")) for share in shares) == pytest.approx(100, abs=4)


def test_dashboard_has_precision_tables(page, run):
    folder, report = run
    with page.served(folder) as url:
        page.open(url + FRAME)
        check_tables(page, report)
        (title,) = page.texts(".ledger summary")
        assert (
            title.startswith("Precision of . at step ")
            and "E4M3FN, 5 of 8 computations rounded" in title
        )
        page.browser("tap", selector=".ledger summary")
        page.browser("tap", selector=".ledger tbody button")
        page.settle("app.state.selected !== null")
        (first, *_) = page.texts(".ledger tbody button")
        assert page.app("app.state.selected.name") == first
        assert page.app("app.state.direction") == "forward"


def test_run_without_precision_report_has_no_tables(page, server):
    page.open(server + FRAME)
    assert page.browser.evaluate("document.querySelector('.ledger').hidden")
    assert page.texts(".ledger table") == []


def test_html_report_has_same_precision_tables(page, run, tmp_path):
    folder, report = run
    written = write_report([folder], tmp_path / "report")
    page.open(written.page.as_uri())
    check_tables(page, report)
    dashboard = page.browser.evaluate(ROWS)
    below = page.browser.evaluate(ROWS.replace(".ledger table", ".report-table table"))
    assert below == dashboard
