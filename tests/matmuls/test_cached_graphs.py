"""Graphs from Inductor's and AOTAutograd's caches have the right units and names."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

from lightning_unitscale import UnitScaleCallback, attach
from lightning_unitscale.matmuls import joint_graphs
from lightning_unitscale.matmuls.compiled_graphs import GRAPHS
from lightning_unitscale.matmuls.gauge import Gauge

pytestmark = pytest.mark.slow  # Inductor compiles C++


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    with warnings.catch_warnings():
        # Of torch's own, while it compiles.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield
    torch._dynamo.reset()


class Scores(nn.Module):
    """Two matmuls and no parameter."""

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.mT).tanh() @ x


class Net(nn.Module):
    """Modules without parameters, whose names are nowhere in the code of a graph."""

    def __init__(self, first: str = "first", second: str = "second", *, breaks: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(8, 8)
        self.add_module(first, Scores())
        self.add_module(second, Scores())
        self.names = first, second
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        x = self.get_submodule(self.names[0])(5 * x)
        if self.breaks:
            torch._dynamo.graph_break()
        x = self.get_submodule(self.names[1])(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.head(x).square().mean()


class Small(nn.Module):
    """Next to nothing to compile."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(5 * x).square().mean()


class Trained:
    """Some steps of a compiled module in a fresh state of the compiler."""

    def __init__(
        self,
        make: Callable[[], nn.Module],
        callback: UnitScaleCallback | None,
        steps: int = 3,
        compiles: bool = True,
    ) -> None:
        torch._dynamo.reset()
        counters.clear()
        module = make()
        if compiles:
            module.compile()
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(1)
        self.losses = []
        self.gauge: Gauge | None = None
        callbacks = [] if callback is None else [callback]
        with attach(module, optimizer, callbacks) if callbacks else contextlib.nullcontext():
            for _ in range(steps):
                loss = module(torch.randn(4, 8, 8, generator=generator))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                self.losses.append(loss.item())
            if callback is not None:
                self.explanation = callback.explain()
                self.gauge = callback.gauge
                self.coverage = callback.coverage
        self.parameters = [parameter.detach().clone() for parameter in module.parameters()]
        # Graphs that both caches had.
        self.hits = counters["aot_autograd"]["autograd_cache_hit"]
        self.all_hits = self.hits + counters["inductor"]["fxgraph_cache_hit"]

    @property
    def named(self) -> set[str]:
        """The names of the matmuls with units."""
        assert self.gauge is not None
        return {name for name in self.gauge.pairs if ":" not in name}


def same_bits(one: Trained, other: Trained) -> bool:
    """Check for the same losses and parameters."""
    pairs = zip(one.parameters, other.parameters, strict=True)
    return one.losses == other.losses and all(torch.equal(a, b) for a, b in pairs)


def forget() -> None:
    """Forget the compiled graphs of this process, but not the caches on disk."""
    GRAPHS.clear()


@pytest.mark.parametrize("breaks", [False, True])
def test_cached_graph_keeps_units_and_names(breaks: bool) -> None:
    def make() -> Net:
        return Net(breaks=breaks)

    plain = Trained(make, None)
    eager = Trained(make, UnitScaleCallback(), compiles=False)
    first = Trained(make, UnitScaleCallback())
    forget()
    again = Trained(make, UnitScaleCallback())
    # Graphs with the same code, one for each part, have names of their own.
    assert first.hits == 0
    assert again.hits == (3 if breaks else 1)
    for run in (first, again):
        assert same_bits(run, plain)
        assert run.named == eager.named
        assert run.coverage.num_in_units == run.coverage.num_matmuls == eager.coverage.num_matmuls
    assert again.gauge == first.gauge
    assert again.explanation == first.explanation


def test_other_names_and_plain_runs_have_separate_graphs() -> None:
    plain = Trained(Net, None)
    scaled = Trained(Net, UnitScaleCallback())
    assert scaled.all_hits == 0
    forget()
    renamed = Trained(lambda: Net("one", "two"), UnitScaleCallback())
    assert renamed.hits == 0
    names = {name.replace("first", "one").replace("second", "two") for name in scaled.named}
    assert renamed.named == names
    again = Trained(Net, None)
    assert again.hits == 1
    assert same_bits(again, plain)
    # A plain graph that is compiled while another module has a session.
    beside = attach(nn.Linear(2, 2), callbacks=UnitScaleCallback())
    num_graphs = len(GRAPHS)
    assert same_bits(Trained(Net, None), plain)
    assert len(GRAPHS) == num_graphs
    beside.detach()


def test_rounded_graphs_are_not_cached() -> None:
    first = Trained(Small, UnitScaleCallback(simulate="fp8"))
    forget()
    again = Trained(Small, UnitScaleCallback(simulate="fp8"))
    assert again.all_hits == 0
    assert same_bits(again, first)
    scaled = Trained(Small, UnitScaleCallback())
    assert scaled.hits == 0
    assert same_bits(scaled, Trained(Small, None))
    # Inductor decomposes fewer matmuls while a session rounds.
    other, x = nn.Sequential(Small()), torch.randn(4, 8, 8)
    other[0].compile()
    with attach(other, callbacks=UnitScaleCallback(simulate="fp8")), torch.no_grad():
        other(x)
        hits = []
        with torch.enable_grad():
            hits += [Trained(Small, None).hits, Trained(Small, None).hits]
    with attach(other, callbacks=UnitScaleCallback()):
        hits.append(Trained(Small, None).hits)
    assert hits == [0, 1, 0]


class Pass(CustomGraphPass):
    """A pass of the user, that changes nothing."""

    def __init__(self, identity: str | None) -> None:
        self._identity = identity
        self.count = 0

    def __call__(self, graph: fx.Graph) -> None:
        self.count += 1

    def uuid(self) -> Any:
        return self._identity


def test_cache_key_includes_user_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def hits(identity: str | None) -> int:
        forget()
        with config.patch(joint_custom_post_pass=Pass(identity)):
            return Trained(Small, UnitScaleCallback()).hits

    assert [hits("one"), hits("one"), hits("two"), hits(None), hits(None)] == [0, 1, 0, 0, 0]
    # And so does the version of this package.
    monkeypatch.setattr(joint_graphs, "_sources", lambda: "another")
    assert hits("one") == 0


def test_cached_graph_is_reused_by_next_session() -> None:
    net, x = Small(), torch.randn(4, 8, 8)
    net.compile()
    losses = []
    for _ in range(3):
        if len(losses) == 1:
            forget()
            torch._dynamo.reset()
            counters.clear()
        attached = attach(net, callbacks=UnitScaleCallback())
        with torch.no_grad():
            losses.append(net(x).item())
        attached.detach()
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1
    assert counters["stats"]["unique_graphs"] == 1
    # A graph that no session has compiled is compiled again.
    torch.compile(torch.relu)(x)
    attached = attach(net, callbacks=UnitScaleCallback())
    with torch.no_grad():
        losses.append(net(x).item())
    attached.detach()
    assert counters["stats"]["unique_graphs"] == 3
    assert len(set(losses)) == 1


_PROGRAM = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch
from tests.matmuls.test_cached_graphs import Small, Trained
from lightning_unitscale import UnitScaleCallback
run = Trained(Small, UnitScaleCallback())
print(json.dumps([run.hits, run.losses, sorted(run.named), run.explanation]))
"""


@pytest.mark.distributed
def test_cached_graphs_are_found_by_other_process() -> None:
    results = []
    for _ in range(2):
        output = subprocess.run(
            [sys.executable, "-c", _PROGRAM], check=True, stdout=subprocess.PIPE, text=True
        ).stdout
        results.append(json.loads(output.splitlines()[-1]))
    (no_hits, *first), (hits, *second) = results
    assert (no_hits, hits) == (0, 1)
    assert first == second
    assert first[0] == Trained(Small, None).losses
