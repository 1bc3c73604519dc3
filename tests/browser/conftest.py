"""The browser, a TensorBoard server, and the check that no page reported an error."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from werkzeug.serving import make_server

from tests.browser.browser import Browser, Missing
from tests.tensorboard.runs import NAMES, snapshot, unit_scaled, write
from tests.tensorboard.test_plugin import wsgi_app

STEPS = (0, 10, 20, 30)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    try:
        browser = Browser(tmp_path_factory.mktemp("profile"))
    except Missing as missing:
        pytest.skip(str(missing))
    yield browser
    browser.close()


@pytest.fixture(scope="session")
def logdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs: plain, the same unit-scaled, and one that lacks a tensor."""
    folder = tmp_path_factory.mktemp("logs")
    meant = [snapshot(step) for step in STEPS]
    write(folder / "baseline", meant)
    write(folder / "scaled", [unit_scaled(one) for one in meant])
    names = (*NAMES[:2], *NAMES[3:])
    write(folder / "smaller", [snapshot(step, names=names, backward=False) for step in (0, 10)])
    return folder


@pytest.fixture(scope="session")
def server(logdir: Path) -> Iterator[str]:
    with serving(logdir) as url:
        yield url


@contextmanager
def serving(logdir: Path) -> Iterator[str]:
    """TensorBoard's own application on a log folder, with the plugin."""
    server = make_server("127.0.0.1", 0, wsgi_app(logdir), threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Page:
    """The dashboard as its reader uses it."""

    def __init__(self, browser: Browser) -> None:
        self.browser = browser

    @contextmanager
    def served(self, logdir: Path) -> Iterator[str]:
        """A server for this page alone.

        The page is closed before its server: one that still asks for data would see the
        connection reset, and rightly complain.
        """
        with serving(logdir) as url:
            try:
                yield url
            finally:
                self.browser("leave")

    def open(self, url: str, **options: object) -> None:
        self.browser("open", url=url, **options)
        self.browser.wait("window.scalesDashboard?.shown > 0")

    def app(self, script: str) -> object:
        return self.browser.evaluate(
            f"(() => {{ const app = scalesDashboard; return {script}; }})()"
        )

    def settle(self, script: str) -> None:
        self.browser.wait(f"(() => {{ const app = scalesDashboard; return {script}; }})()")

    def texts(self, selector: str) -> list[str]:
        found = f"[...document.querySelectorAll({selector!r})].map((one) => one.textContent)"
        return self.browser.evaluate(found)

    def center(self, panel: int, row: int, column: int) -> tuple[float, float]:
        """The middle of a cell on the page."""
        rect = self.app(f"app.heatMap.cellRect({panel}, {row}, {column})")
        box = self.browser.evaluate(
            "(() => { const { left, top } = document.querySelector('.heat-cells')"
            ".getBoundingClientRect(); return { left, top }; })()"
        )
        x = box["left"] + rect["left"] + rect["width"] / 2
        return x, box["top"] + rect["top"] + rect["height"] / 2

    def pixel(self, panel: int, row: int, column: int) -> list[int]:
        """Red, green, blue and opacity in the middle of a cell."""
        rect = self.app(f"app.heatMap.cellRect({panel}, {row}, {column})")
        x = int(rect["left"] + rect["width"] / 2)
        y = int(rect["top"] + rect["height"] / 2)
        context = "document.querySelector('.heat-cells').getContext('2d')"
        return self.browser.evaluate(f"[...{context}.getImageData({x}, {y}, 1, 1).data]")

    def click_cell(self, panel: int, row: int, column: int) -> None:
        x, y = self.center(panel, row, column)
        self.browser("click", x=x, y=y)


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    yield Page(browser)
    report = browser("report")
    assert report["troubles"] == []
    allowed = ("http://127.0.0.1:", "file:///", "blob:", "data:")
    assert [one for one in report["requests"] if not one.startswith(allowed)] == []
