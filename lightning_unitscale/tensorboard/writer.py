"""Write scale snapshots, and the graph of a step, into a TensorBoard event file.

TensorBoard's own dashboards get a log2 RMS scalar and an exponent histogram of each matmul operand
and output gradient. They also get a custom-scalars layout by block, a text table, and the graph of
the step with scales. Their tags begin with a tilde, so that they come after the user's own.
The Scales dashboard gets the tensors that ``schema.py`` describes.

Charts show stored tensors. Without unit scaling those are the true values, so a comparison of two
runs, with and without, shows the effect of unit scaling.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary

from lightning_unitscale.scales.alerts import ScaleAlert, alerts_text, alerts_to_json
from lightning_unitscale.scales.layout import DIRECTIONS, Direction
from lightning_unitscale.scales.snapshot import ScaleSnapshot
from lightning_unitscale.scales.snapshot_rows import ScaleSummary
from lightning_unitscale.tensorboard import protobuf, schema
from lightning_unitscale.tensorboard.history import block_of
from lightning_unitscale.tensorboard.table import scale_table

# The prefix of tags in TensorBoard's own dashboards. A tilde sorts after all letters.
NAMESPACE: Final = "~scales"

# TensorBoard's own port, unless it is taken.
SCALES_URL: Final = f"http://localhost:6006/#{schema.PLUGIN_NAME}"
# The tensors with scalars and histograms in TensorBoard's own dashboards: none, matmul operands,
# or all.
TensorBoardTabs: TypeAlias = Literal["scales", "operands", "all"]
TABS: Final[tuple[TensorBoardTabs, ...]] = get_args(TensorBoardTabs)

# After this many samples the writer keeps every second one, after twice as many every fourth, and
# so on. TensorBoard itself keeps 2,000 points of the Scales dashboard, 1,000 scalars and 50
# histograms. Larger data is thinned earlier to limit the file's size.
_BEFORE_THINNING: Final = {
    "vectors": 2000,
    "fractions": 500,
    "scalars": 250,
    "exponents": 64,
    "histograms": 16,
}
_OF_EXPONENTS: Final = ("exponents", "histograms")
# These rarely change, so they are written only when they do.
_WRITTEN_ONCE: Final = ("numel", "spacing")


class Thinning:
    """The choice of the parts to write of each sample, fewer and fewer in a long run."""

    def __init__(self, before: Mapping[str, int]) -> None:
        self.last_step: int | None = None
        self._before = before
        self._number = 0
        self._left_out: set[str] = set()

    def due(self, step: int, *, complete: bool) -> set[str]:
        """Return the parts to write of the next sample, at this step."""
        parts = {
            part
            for part, most in self._before.items()
            if complete or self._number % (1 << (self._number // most).bit_length()) == 0
        }
        self._number += 1
        self.last_step, self._left_out = step, self._before.keys() - parts
        return parts

    def left_out(self, step: int) -> set[str]:
        """Return the parts that were left out of a step, if it is the last one written."""
        if step != self.last_step:
            return set()
        left_out, self._left_out = self._left_out, set()
        return left_out


class ScaleWriter:
    """A writer for the snapshots of one run.

    Each snapshot is one event. Long runs leave out steps: histograms first, and the vectors of the
    Scales dashboard after 2,000 samples. Steps with alerts and the end of the run are written in
    full.

    Examples:
        >>> writer = ScaleWriter(trainer.logger.experiment)  # doctest: +SKIP
        >>> writer.write(snapshot)  # doctest: +SKIP
    """

    def __init__(self, experiment: Any, *, tabs: TensorBoardTabs = "operands") -> None:
        self._experiment = experiment
        self._tabs = tabs
        self._sets: dict[schema.TensorSet, schema.TensorSet] = {}
        self._described: set[str] = set()
        # The last vector of each tag that is written only on changes.
        self._written: dict[str, npt.NDArray[Any]] = {}
        self._file_writer: Any = None
        self._thinning = Thinning(_BEFORE_THINNING)

    def write(
        self,
        snapshot: ScaleSnapshot,
        summary: ScaleSummary | None = None,
        *,
        complete: bool = False,
    ) -> None:
        """Write one snapshot at its step."""
        # The step just written is skipped, since TensorBoard requires increasing steps. A smaller
        # step (a second fit, a resumed run) starts again, as in every other chart.
        file_writer = self._experiment._get_file_writer()
        if file_writer is None or not len(snapshot) or snapshot.step == self._thinning.last_step:
            return
        parts = self._thinning.due(snapshot.step, complete=complete)
        self._write(file_writer, snapshot, parts)
        if summary is not None and self._tabs != "scales" and "vectors" in parts:
            event = Event()
            for name, value in summary.numbers.items():
                event.summary.value.add(
                    tag=name.replace("scales", NAMESPACE, 1), simple_value=value
                )
            file_writer.add_event(event, step=snapshot.step)

    def finish(self, snapshot: ScaleSnapshot) -> None:
        """Write the omitted parts of the last snapshot, and its scales as a table and a graph."""
        file_writer = self._experiment._get_file_writer()
        if file_writer is None:
            return
        self._write(file_writer, snapshot, self._thinning.left_out(snapshot.step))
        table = scale_table(snapshot, tablefmt="github")
        self._experiment.add_text(f"{NAMESPACE}/table", table, snapshot.step)
        if len(snapshot):
            graph = protobuf.annotated_graph(snapshot).SerializeToString()
            file_writer.add_event(Event(graph_def=graph), step=snapshot.step)

    def write_alerts(self, alerts: Sequence[ScaleAlert], step: int) -> None:
        """Write the alerts of a step, for the Text dashboard and the Scales dashboard."""
        file_writer = self._experiment._get_file_writer()
        if file_writer is None:
            return
        lines = alerts_text(alerts).splitlines()
        self._experiment.add_text(
            f"{NAMESPACE}/alerts", "\n".join(f"- {line}" for line in lines), step
        )
        _add_text(file_writer, schema.ALERTS_TAG, alerts_to_json(alerts), step)

    def write_event(self, text: str, step: int) -> None:
        """Write that matmuls have changed their format, for the Text dashboard."""
        self._experiment.add_text(f"{NAMESPACE}/formats", f"- {text}", step)

    def written_folder(self) -> str:
        """Return the folder of the event file, after flushing it."""
        self._experiment.flush()
        return str(self._experiment.log_dir)

    def write_summary(self, text: str, coverage: Mapping[str, Any] | None, step: int) -> None:
        """Write the coverage of the run's matmuls. The rest of a summary is in the file already."""
        file_writer = self._experiment._get_file_writer()
        if file_writer is not None and coverage:
            _add_text(file_writer, schema.COVERAGE_TAG, json.dumps(coverage), step)

    def _write(self, file_writer: Any, snapshot: ScaleSnapshot, parts: set[str]) -> None:
        if not parts:
            return
        if file_writer is not self._file_writer:
            # Each file needs the metadata of its tags, and the values that are written once.
            self._file_writer = file_writer
            self._described.clear()
            self._written.clear()
            protobuf.use_fast_checksums(file_writer)
        observed = schema.TensorSet(
            snapshot.names,
            snapshot.modules,
            snapshot.layout.formats,
            snapshot.inputs,
            snapshot.operands,
            snapshot.matmuls,
            snapshot.layout.block_formats,
        )
        if observed not in self._sets:
            self._sets[observed] = observed
            if layout := custom_scalars_layout(snapshot, self._tabs):
                self._experiment.add_custom_scalars(layout)
        observed = self._sets[observed]  # the first equal one, which has cached its key
        event = Event()
        for direction in DIRECTIONS:
            # Validation has no backward pass.
            if not np.isnan(snapshot.column("numel", direction)).all():
                self._add_direction(event.summary, snapshot, direction, observed, parts)
        file_writer.add_event(event, step=snapshot.step)

    def _add_direction(
        self,
        summary: Summary,
        snapshot: ScaleSnapshot,
        direction: Direction,
        observed: schema.TensorSet,
        parts: set[str],
    ) -> None:
        log2_rms = snapshot.log2_rms(direction, stored=True)
        vectors: dict[schema.Quantity, npt.NDArray[Any]] = {}
        if "vectors" in parts:
            vectors |= {"log2_rms": log2_rms, "log2_unit": snapshot.log2_divisors(direction)}
            vectors["log2_amax"] = snapshot.log2_amax(direction)
            vectors["numel"] = snapshot.column("numel", direction)
            if np.any((nonfinite := snapshot.nonfinite(direction)) > 0):
                vectors["nonfinite"] = nonfinite
            if not np.isnan(spacing := snapshot.spacing[DIRECTIONS.index(direction)]):
                vectors["spacing"] = np.array([spacing])
        if "fractions" in parts:
            vectors["fractions"] = snapshot.fractions(direction).astype(np.float16)
            if snapshot.layout.block_formats:
                vectors["blocks"] = snapshot.block_shares(direction).astype(np.float32)
            if np.any((share := snapshot.share_read(direction)) < 1):
                vectors["share_read"] = share
        for quantity, vector in vectors.items():
            tag = schema.Series(direction, quantity, observed.key).tag
            if quantity in _WRITTEN_ONCE:
                before = self._written.get(tag)
                if before is not None and np.array_equal(before, vector, equal_nan=True):
                    continue
                self._written[tag] = vector
            describe = observed.to_content if quantity == "log2_rms" else schema.content
            self._add_tensor(summary, tag, vector, describe)
        shown = _shown(snapshot, direction, self._tabs)
        tags = stock_tags(snapshot.names, snapshot.modules, direction)
        if "scalars" in parts:
            for row in np.flatnonzero(shown & np.isfinite(log2_rms)).tolist():
                summary.value.add(tag=f"{tags[row]}/log2_rms", simple_value=log2_rms[row])
        counts = snapshot.exponent_counts(direction)
        if counts is None or parts.isdisjoint(_OF_EXPONENTS):
            return
        sampled = np.nan_to_num(snapshot.column("sampled", direction)).astype(int)
        counts, units = np.nan_to_num(counts), snapshot.log2_divisors(direction)
        if "exponents" in parts:
            prefix = schema.Series(direction, "exponents", "").tag
            vectors_of = schema.exponent_vectors(counts, sampled, units)
            for row in np.flatnonzero(sampled).tolist():
                self._add_tensor(summary, prefix + snapshot.names[row], vectors_of[row])
        if "histograms" in parts:
            for row in np.flatnonzero(shown).tolist():
                exponents = schema.ExponentCounts(counts[row], int(sampled[row]), int(units[row]))
                if (histogram := protobuf.histogram_proto(exponents)) is not None:
                    summary.value.add(tag=f"{tags[row]}/exponents", histo=histogram)

    def _add_tensor(
        self,
        summary: Summary,
        tag: str,
        array: npt.NDArray[Any],
        description: Callable[[], bytes] = schema.content,
    ) -> None:
        """Add a tensor under a tag, with the plugin's metadata in its first value."""
        value = summary.value.add()
        value.tag = tag
        protobuf.fill_tensor(value.tensor, array)
        if tag not in self._described:
            self._described.add(tag)
            value.metadata.CopyFrom(protobuf.plugin_metadata(description()))


def write_precision(experiment: Any, text: str, page: Mapping[str, Any], step: int) -> None:
    """Write a precision report: as text for the Text dashboard, and its tables for our pages."""
    file_writer = experiment._get_file_writer()
    if file_writer is not None:
        # Markdown shows an indented text verbatim.
        indented = "\n".join(f"    {line}" for line in text.splitlines())
        experiment.add_text(f"{NAMESPACE}/precision", indented, step)
        _add_text(file_writer, schema.PRECISION_TAG, json.dumps({**page, "text": text}), step)


def _add_text(file_writer: Any, tag: str, text: str, step: int) -> None:
    event = Event()
    event.summary.value.add(
        tag=tag,
        tensor=protobuf.text_proto(text),
        metadata=protobuf.plugin_metadata(schema.content()),
    )
    file_writer.add_event(event, step=step)


@functools.lru_cache(maxsize=16)
def stock_tags(
    names: tuple[str, ...], modules: tuple[str, ...], direction: Direction
) -> tuple[str, ...]:
    """Return the prefix of each tensor's tags in TensorBoard's own dashboards."""
    # `~scales/blocks.0/mlp.up.linear`, and of its gradient `~scales/blocks.0/mlp.up.linear.grad`.
    tags = []
    for name, module in zip(names, modules, strict=True):
        block = block_of(module)
        own = name.removeprefix(f"{block}.")
        gradient = ".grad" if direction == "backward" else ""
        tags.append("/".join(filter(None, (NAMESPACE, block, own))) + gradient)
    return tuple(tags)


def _shown(
    snapshot: ScaleSnapshot, direction: Direction, tabs: TensorBoardTabs
) -> npt.NDArray[np.bool_]:
    """Return a mask of the tensors that TensorBoard's own dashboards show."""
    if tabs == "operands":
        return snapshot.read_by_matmuls(direction)
    return np.full(len(snapshot), tabs == "all")


def custom_scalars_layout(
    snapshot: ScaleSnapshot, tabs: TensorBoardTabs
) -> dict[str, dict[str, list[Any]]]:
    """Return a layout for ``add_custom_scalars`` with one chart per block and direction."""
    # A chart selects its tensors by a pattern, so that TensorBoard shows equal charts of two runs
    # once.
    layout: dict[str, dict[str, list[Any]]] = {}
    for direction in DIRECTIONS:
        ending = r"\.grad" if direction == "backward" else r"(?<!\.grad)"
        for module in itertools.compress(snapshot.modules, _shown(snapshot, direction, tabs)):
            block = block_of(module)
            start = re.escape(f"{NAMESPACE}/{block}/" if block else f"{NAMESPACE}/")
            chart = ["Multiline", [rf"^{start}[^/]+{ending}/log2_rms$"]]
            layout.setdefault(block or "(top level)", {})[f"{direction}: log2 RMS"] = chart
    return layout


def command_for_logger(logger: Any) -> str:
    """Return the command that shows a run with the others of its logger."""
    # You can paste it into a shell in the current folder, even without activating the environment.
    save_dir = getattr(logger, "save_dir", None)
    logdir = Path(logger.log_dir if save_dir is None else save_dir)
    if logdir.resolve() == Path.cwd():  # TensorBoard would search the whole folder
        logdir = Path(getattr(logger, "root_dir", logger.log_dir))
    beside_python = Path(sys.executable).with_name("tensorboard")
    on_path = shutil.which("tensorboard")
    if on_path is not None and Path(on_path).resolve() == beside_python.resolve():
        program = "tensorboard"
    elif beside_python.exists():
        program = shlex.quote(_relative_to_cwd(beside_python))
    else:
        program = f"{shlex.quote(sys.executable)} -m tensorboard.main"
    return f"{program} --logdir {shlex.quote(_relative_to_cwd(logdir))}"


def _relative_to_cwd(path: Path) -> str:
    """Return a path relative to the current folder; absolute if it is elsewhere."""
    absolute = Path(os.path.abspath(path))  # this keeps symbolic links, which environments use
    cwd = Path.cwd()
    return str(absolute.relative_to(cwd) if absolute.is_relative_to(cwd) else absolute)
