"""Serve the **Scales** dashboard. TensorBoard finds this plugin through an entry point.

Routes below ``/data/plugin/scales/``, with arguments in the query:

====================================  =========================================================
``runs``                              JSON: runs, last steps, number formats
``scales?run&direction``              frame: tensors, steps, log2 RMS of all of them
``exponents?run&direction&tensor``    frame: exponent counts of one tensor over the steps
``fractions?run&direction&tensor``    frame: its out-of-range fractions over the steps
``alerts?run``                        JSON: the alerts, each with its step and tensor
``precision?run``                     JSON: the last precision report, or null
``divergence?run&compared``           JSON: where two runs diverge
``static/...``                        the page
====================================  =========================================================

``responses.py`` describes frames. This module imports neither torch nor Lightning, because
TensorBoard imports it at its start.
"""

from __future__ import annotations

import argparse
import functools
import threading
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, Final

from tensorboard import errors, plugin_util
from tensorboard.backend import http_util
from tensorboard.data import provider
from tensorboard.plugins import base_plugin
from werkzeug import Request, Response

from lightning_unitscale.scales.layout import DIRECTIONS, Direction
from lightning_unitscale.tensorboard import responses
from lightning_unitscale.tensorboard.history import FractionHistory, Points, RunScales
from lightning_unitscale.tensorboard.schema import PLUGIN_NAME, Series

# TensorBoard keeps 100 points of an unknown series by default, too few for a heat map.
SAMPLES: Final = 2000
_NO_DOWNSAMPLING: Final = 1 << 30  # the reader has already thinned the series
# Number of fraction histories in memory: two runs, forward and backward.
_RECENT: Final = 4
_STATIC: Final = Path(__file__).parent / "static"
_MIME_TYPES: Final = {".js": "application/javascript", ".css": "text/css"}
ENTRY: Final = "index.js"
# Only these files are served.
STATIC_FILES: Final = tuple(
    sorted(path.name for path in _STATIC.iterdir() if path.suffix in _MIME_TYPES)
)


class ScalesPlugin(base_plugin.TBPlugin):
    """The plugin that serves the scales of all runs and the page."""

    plugin_name = PLUGIN_NAME

    def __init__(self, context: base_plugin.TBContext) -> None:
        self._provider = context.data_provider
        self._recent: dict[Hashable, FractionHistory] = {}
        self._lock = threading.Lock()

    def get_plugin_apps(self) -> dict[str, Any]:
        """Return the routes and their handlers."""
        static = {f"/static/{name}": self._static(name) for name in STATIC_FILES}
        return {
            "/runs": Request.application(self._runs),
            "/scales": Request.application(self._scales),
            "/exponents": Request.application(self._exponents),
            "/fractions": Request.application(self._fractions),
            "/alerts": self._json(lambda run: responses.alerts_json(run.alerts())),
            "/precision": self._json(responses.precision_json),
            "/divergence": Request.application(self._divergence),
            **static,
        }

    def is_active(self) -> bool:
        """Return false, so that TensorBoard checks for tensors of this plugin itself."""
        return False

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        """Return the location of the page."""
        return base_plugin.FrontendMetadata(
            es_module_path=f"/static/{ENTRY}", tab_name="Scales", disable_reload=True
        )

    def _runs(self, request: Request) -> Response:
        listed = self._provider.list_runs(
            plugin_util.context(request.environ),
            experiment_id=plugin_util.experiment_id(request.environ),
        )
        started = {run.run_name: run.start_time or 0.0 for run in listed}
        runs = []
        for run, series in sorted(self._series(request).items()):
            steps: dict[Direction, int] = {}
            for tag, points in series.items():
                parsed = Series.parse(tag)
                if parsed is not None and parsed.quantity == "log2_rms":
                    last = steps.get(parsed.direction, points.max_step)
                    steps[parsed.direction] = max(last, points.max_step)
            if steps:
                # This number grows with each new tag and each new step.
                version = sum(1 + points.max_step for points in series.values())
                runs.append(responses.ListedRun(run, started.get(run, 0.0), steps, version))
        return http_util.Respond(request, responses.runs_json(runs), "application/json")

    def _scales(self, request: Request) -> Response:
        run, direction = self._run(request), _direction(request)
        return _frame(request, responses.scales_frame(run.history(direction)))

    def _exponents(self, request: Request) -> Response:
        run, direction = self._run(request), _direction(request)
        name = run.names[_tensor(request, run)]
        return _frame(request, responses.exponents_frame(run.exponents(direction, name)))

    def _fractions(self, request: Request) -> Response:
        run, direction = self._run(request), _direction(request)
        index = _tensor(request, run)
        history = self._fraction_history(request, run, direction)
        return _frame(request, responses.fractions_frame(history, index))

    def _json(self, answer: Callable[[RunScales], bytes]) -> Any:
        """Return the handler of a route that describes a run in JSON."""

        def serve(request: Request) -> Response:
            return http_util.Respond(request, answer(self._run(request)), "application/json")

        return Request.application(serve)

    def _divergence(self, request: Request) -> Response:
        answer = responses.divergence_json(self._run(request), self._run(request, "compared"))
        return http_util.Respond(request, answer, "application/json")

    def _fraction_history(
        self, request: Request, run: RunScales, direction: Direction
    ) -> FractionHistory:
        """Return the fractions of all tensors, cached because they take tens of megabytes."""
        experiment = plugin_util.experiment_id(request.environ)
        name = request.args["run"]
        steps = tuple(points.max_step for points in self._series(request)[name].values())
        key: Hashable = (experiment, name, direction, steps)
        with self._lock:
            if key not in self._recent:
                while len(self._recent) >= _RECENT:
                    self._recent.pop(next(iter(self._recent)))
                self._recent[key] = run.fractions(direction)
            return self._recent[key]

    def _series(self, request: Request) -> Any:
        return self._provider.list_tensors(
            plugin_util.context(request.environ),
            experiment_id=plugin_util.experiment_id(request.environ),
            plugin_name=PLUGIN_NAME,
        )

    def _run(self, request: Request, argument: str = "run") -> RunScales:
        name = request.args.get(argument, "")
        series = self._series(request).get(name)
        if series is None:
            raise errors.NotFoundError(
                f"{argument}={name!r}: no such run with scales. Expected one that /runs lists."
            )
        tags = {tag: points.plugin_content for tag, points in series.items()}
        return RunScales(tags, functools.partial(self._read, request, name))

    def _read(self, request: Request, run: str, tag: str) -> Points:
        read = self._provider.read_tensors(
            plugin_util.context(request.environ),
            experiment_id=plugin_util.experiment_id(request.environ),
            plugin_name=PLUGIN_NAME,
            downsample=_NO_DOWNSAMPLING,
            run_tag_filter=provider.RunTagFilter(runs=[run], tags=[tag]),
        )
        return [(point.step, point.numpy) for point in read.get(run, {}).get(tag, [])]

    def _static(self, name: str) -> Any:
        path = _STATIC / name

        def serve(request: Request) -> Response:
            return http_util.Respond(request, path.read_bytes(), _MIME_TYPES[path.suffix])

        return Request.application(serve)


class ScalesLoader(base_plugin.TBLoader):
    """The entry point, which makes TensorBoard keep more steps and loads the plugin."""

    def fix_flags(self, flags: argparse.Namespace) -> None:
        """Keep 2,000 steps, unless the user chose another number."""
        flags.samples_per_plugin.setdefault(PLUGIN_NAME, SAMPLES)

    def load(self, context: base_plugin.TBContext) -> ScalesPlugin:
        """Return the plugin."""
        return ScalesPlugin(context)


def _direction(request: Request) -> Direction:
    asked = request.args.get("direction")
    for direction in DIRECTIONS:
        if asked == direction:
            return direction
    raise errors.InvalidArgumentError(
        f"direction={asked!r}: unknown. Expected one of {', '.join(DIRECTIONS)}"
    )


def _tensor(request: Request, run: RunScales) -> int:
    """Return the position of the tensor in a request."""
    name = request.args.get("tensor", "")
    if name not in run.names:
        raise errors.NotFoundError(
            f"tensor={name!r}: not in the run. Expected one that /scales lists."
        )
    return run.names.index(name)


def _frame(request: Request, data: bytes) -> Response:
    return http_util.Respond(request, data, "application/octet-stream")
