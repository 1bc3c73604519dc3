"""The scales in TensorBoard's own dashboards, in a real browser."""

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from torch.utils.tensorboard import SummaryWriter

from lightning_unitscale.tensorboard.writer import ScaleWriter
from tests.tensorboard.runs import NAMES, snapshot, unit_scaled

pytestmark = pytest.mark.browser

INPUTS = ((), (NAMES[0],), (NAMES[1],), (NAMES[2],), (NAMES[3],), (NAMES[4],))
# TensorBoard's page lies in shadow roots, which no selector enters.
DEEP = """window.deep = (selector) => {
  const found = [];
  const visit = (root) => {
    for (const one of root.querySelectorAll('*')) {
      if (one.matches(selector)) found.push(one);
      if (one.shadowRoot) visit(one.shadowRoot);
    }
  };
  visit(document);
  return found;
}"""


@pytest.fixture(scope="module")
def tensorboard(tmp_path_factory) -> Iterator[str]:
    """TensorBoard as a user starts it, on a run that has ended."""
    folder = tmp_path_factory.mktemp("logs")
    with SummaryWriter(str(folder / "run")) as experiment:
        writer = ScaleWriter(experiment)
        for step in (0, 10):
            last = replace(unit_scaled(snapshot(step)), inputs=INPUTS)
            writer.write(last)
        writer.finish(last)
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--port", "0"]
    # In one process, which can be ended.
    command += ["--load_fast", "false", "--host", "127.0.0.1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            lines = iter(server.stderr.readline, "")
            yield next(found[0] for one in lines if (found := re.search(r"http://\S+\d", one)))
        finally:
            server.terminate()
            # A pipe that is full would keep it alive.
            threading.Thread(target=server.stderr.read, daemon=True).start()
            server.wait(timeout=20)


@pytest.fixture
def graphs(page, tensorboard):
    browser = page.browser
    browser("open", url=f"{tensorboard}/#graphs")
    browser.evaluate(DEEP)
    browser.wait("deep('g.node').length > 0")
    yield browser
    browser("leave")


def shape(name):
    node = f"deep('g.node').find((one) => one.getAttribute('data-name') === {name!r})"
    return f"{node}?.querySelector('.nodeshape > *')"


def do(browser, kind, script):
    browser.evaluate(
        f"{script}.dispatchEvent(new MouseEvent({kind!r}, {{ bubbles: true, composed: true }}))"
    )


def texts(browser, selector):
    return browser.evaluate(f"deep({selector!r}).map((one) => one.textContent)")


@pytest.mark.slow
def test_graph_node_shows_its_scales(graphs):
    do(graphs, "dblclick", shape("head"))
    graphs.wait(f"{shape('head/linear')} !== undefined")
    # A click is lost while the graph still moves.
    click = "new MouseEvent('click', { bubbles: true, composed: true })"
    graphs.wait(f"{shape('head/linear')}.dispatchEvent({click}), deep('.attr-right').length > 0")
    keys = dict(zip(texts(graphs, ".attr-left"), texts(graphs, ".attr-right"), strict=True))
    last = unit_scaled(snapshot(10))
    meant, stored = (last.log2_rms(stored=one)[5] for one in (False, True))
    assert keys["forward"] == f'{{"s":"RMS 2^{meant:.2f}, stored 2^{stored:.2f}"}}'
    assert keys["backward"] == '{"s":"all zero"}'
    assert keys["Device"] == "RMS near 2^0"


def test_color_by_device_colors_by_scale(graphs):
    do(graphs, "dblclick", shape("head"))
    graphs.wait(f"{shape('head/linear')} !== undefined")
    fill = f"getComputedStyle({shape('head/linear')}).fill"
    before = graphs.evaluate(fill)
    do(graphs, "click", "deep('[role=radio]').find((one) => /Device/.test(one.textContent))")
    graphs.wait(f"{fill} !== {before!r}")


def test_dashboard_url_inside_tensorboard(page, tensorboard):
    browser = page.browser
    browser("open", url=f"{tensorboard}/#scales")
    browser.evaluate(DEEP)
    frame = "deep('iframe').find((one) => one.contentWindow?.scalesDashboard)?.contentWindow"
    browser.wait(f"{frame}?.scalesDashboard.shown > 0")
    browser.evaluate(f"{frame}.scalesDashboard.change({{ direction: 'backward', limit: 12 }})")
    browser.wait("location.hash === '#scales&scales.direction=backward&scales.limit=12'")
    address = browser.evaluate("location.href")
    browser("open", url="about:blank")
    browser("open", url=address)
    browser.evaluate(DEEP)
    browser.wait(f"{frame}?.scalesDashboard.shown > 0")
    state = f"(({{ direction, limit }}) => [direction, limit])({frame}.scalesDashboard.state)"
    assert browser.evaluate(state) == ["backward", 12]
    # The address of another dashboard stays as it is.
    browser.evaluate("history.replaceState(null, '', '#scalars')")
    browser.evaluate(f"{frame}.scalesDashboard.change({{ limit: 4 }})")
    assert browser.evaluate("location.hash") == "#scalars"
    browser("leave")
