import dataclasses
import itertools
import json
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_unitscale.memory.min_cut import find_blocks
from lightning_unitscale.memory.planner import Planner
from lightning_unitscale.memory.problem import NodeRegion
from lightning_unitscale.memory.real_memory import PeakMeter
from lightning_unitscale.memory.remat_module import _planner
from lightning_unitscale.memory.schedule import forward_nodes
from lightning_unitscale.profiler import CostModel
from lightning_unitscale.remat import (
    RematPartitioner,
    RematPlan,
    RematReport,
    aot_backend,
    draw_graph,
    draw_joint_graph,
    pareto_front,
    plan_remat,
    plot_timeline,
)
from tests.memory.programs import all_plans, random_problem


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, depth: int = 6, width: int = 64) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x)).log_softmax(-1).square().mean()


@pytest.fixture(scope="module")
def planner() -> Planner:
    torch.manual_seed(0)
    return _planner(Net(), (torch.randn(4, 64, 64),), {}, None, 0)


@pytest.mark.slow
def test_repeated_blocks_are_detected(planner: Planner) -> None:
    blocks = find_blocks(planner.problem)
    assert len(blocks) >= 12
    assert blocks.classes[4:8] == blocks.classes[6:10]
    assert sum(map(len, blocks.members)) == sum(planner.blocks.block >= 0)


def test_saved_view_counts_whole_storage(planner: Planner) -> None:
    # Without random operations any values may be given.
    nodes = tuple(dataclasses.replace(node, replay_bytes=0) for node in planner.problem.nodes)
    problem = dataclasses.replace(planner.problem, nodes=nodes)
    outputs = problem.base[list(problem.forward_outputs)]
    views = [
        node
        for node, base in enumerate(problem.base)
        if base != node and problem.region[base] == NodeRegion.FORWARD and base not in outputs
    ]
    assert views
    for view in views:
        saved = np.zeros(len(problem), dtype=np.bool_)
        saved[view] = True
        with_base = saved.copy()
        with_base[problem.base[view]] = True
        of_view = problem.saved_bytes(saved)
        assert of_view == problem.num_bytes[problem.base[view]] > 0
        assert of_view == problem.saved_bytes(with_base)


@pytest.mark.slow
def test_plans_are_monotone_and_within_budget(planner: Planner) -> None:
    top, floor = planner.default.peak_bytes, planner.floor.peak_bytes
    assert floor < 0.6 * top
    before = None
    for budget in np.linspace(floor, top, 9).astype(int).tolist():
        plan = planner.plan(budget)
        assert plan.peak_bytes <= budget
        if before is not None:
            assert plan.seconds <= before.seconds * 1.02
        before = plan
    assert before is not None and before.seconds == 0


def test_plans_are_at_least_as_good_as_candidates(planner: Planner) -> None:
    for candidate in planner.candidates:
        plan = planner.plan(candidate.peak_bytes)
        assert plan.seconds <= candidate.seconds
        assert plan.peak_bytes <= candidate.peak_bytes
    assert planner.floor.peak_bytes <= min(plan.peak_bytes for plan in planner.candidates)


def test_pareto_front_is_monotone(planner: Planner) -> None:
    front = planner.front(8)
    assert len(front) > 5
    for faster, smaller in itertools.pairwise(front):
        assert faster.seconds <= smaller.seconds
        assert faster.peak_bytes > smaller.peak_bytes


def test_min_cut_recomputes_no_matmul(planner: Planner) -> None:
    plan = planner.plan("min_cut")
    kinds = set(RematReport.of(plan).recomputed)
    assert not kinds & {"aten.addmm", "aten.mm", "aten._scaled_dot_product_flash_attention_for_cpu"}
    assert plan.saved_bytes < planner.default.saved_bytes


@pytest.mark.slow
def test_plans_are_deterministic(planner: Planner) -> None:
    torch.manual_seed(0)
    other = _planner(Net(), (torch.randn(4, 64, 64),), {}, None, 0)
    assert other.plan(0.6).hash == planner.plan(0.6).hash
    assert other.plan(0.7).hash != planner.plan(0.5).hash


def test_budget_below_minimum_error_has_minimum(planner: Planner) -> None:
    with pytest.raises(ValueError, match=rf"{planner.floor.peak_bytes} bytes\), in the"):
        planner.plan(planner.floor.peak_bytes // 2)


@pytest.mark.slow
def test_function_can_be_planned_repeatedly() -> None:
    """Dynamo gives up on code that it has captured eight times."""
    net, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.randn(64, 4)
    peaks = [plan_remat(net, x, budget=1.0).peak_bytes for _ in range(10)]
    assert len(set(peaks)) == 1


@pytest.mark.slow
def test_resident_bytes_add_to_peak() -> None:
    x = torch.randn(4, 64, 64)
    bare = plan_remat(Net(1), x, budget=1.0)
    beside = plan_remat(Net(1), x, budget=1.0, resident_bytes=1000)
    assert beside.peak_bytes == bare.peak_bytes + 1000


@pytest.mark.slow
def test_measured_times_override_cost_model() -> None:
    x = torch.randn(4, 64, 64)
    fast = CostModel(flops_per_second=1e30, bytes_per_second=1e30, overhead_seconds=1e-9)
    assert plan_remat(Net(2), x, budget=0.7, cost_model=fast).seconds < 1e-6
    named = CostModel(measured={"gelu": 0.5})
    assert named.seconds("gelu", 0, 0, fusible=False) == 0.5


@pytest.mark.parametrize("seed", range(8))
def test_timeline_matches_reference_counting(seed: int) -> None:
    """Step through both passes with explicit reference counting."""
    problem = random_problem(np.random.default_rng(seed), 10)
    planner = Planner(problem)
    for saved in list(all_plans(problem))[::7]:
        plan = planner.plan_of("any", saved | (problem.region == NodeRegion.INPUT))
        assert plan.timeline.live_bytes.tolist() == _counted(plan)


def _counted(plan: RematPlan) -> list[int]:
    """Bytes alive at each operation, by variables that are deleted after their last reader."""
    problem = plan.problem
    nodes = problem.nodes
    saved = {
        i for i in range(len(nodes)) if plan.saved[i] and nodes[i].region == NodeRegion.FORWARD
    }
    fixed = sum(node.num_bytes for node in nodes if node.region == NodeRegion.INPUT)
    found: list[int] = []

    def run(order: list[int], variables: dict[object, object], keep: set[object]) -> None:
        for now, n in enumerate(order):
            node, later = nodes[n], order[now + 1 :]
            untaken = 0
            for u in problem.users[n]:
                if nodes[u].owner == n and u != n and nodes[u].base == u:
                    if u in later:
                        variables["in the tuple", u] = (len(found), u)
                    else:
                        untaken += nodes[u].num_bytes  # made, and dropped with the tuple
            if node.base != n:
                # A view, whose storage is an input's or that of another variable.
                read = [i for i in node.inputs if nodes[i].base == node.base]
                variables[n] = variables.get(read[0]) if read else None
            elif node.owner != n:
                variables[n] = variables.pop(("in the tuple", n))
            else:
                variables[n] = (len(found), n)
            alive = {storage for storage in variables.values() if storage is not None}
            found.append(fixed + untaken + sum(nodes[base].num_bytes for _, base in alive))
            for variable in list(variables):
                is_read = any(variable in nodes[u].inputs for u in later)
                if not is_read and variable not in keep and not isinstance(variable, tuple):
                    del variables[variable]

    variables: dict[object, object] = {}
    outputs = set(problem.forward_outputs)
    run(forward_nodes(problem, plan.saved).tolist(), variables, saved | outputs)
    held: dict[object, object] = {("output", i): variables[i] for i in outputs}
    held |= {i: variables[i] for i in saved}
    run(list(plan.order.nodes), held, set(problem.backward_outputs))
    return found


@pytest.mark.slow
def test_predicted_peak_matches_measured_peak(planner: Planner) -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(4, 64, 64)
    for budget in (1.0, 0.7, 0.55):
        plan = planner.plan(budget)
        torch._dynamo.reset()
        step = torch.compile(net.forward, backend=aot_backend(RematPartitioner(budget)))
        step(x).backward()
        net.zero_grad()
        meter = PeakMeter(torch.device("cpu"))
        meter.start()
        meter.mark([list(net.parameters()), x])
        step(x).backward()
        assert meter.stop() == pytest.approx(plan.peak_bytes, rel=0.01)


class _Masks(nn.Module):
    """Dropouts whose masks are drawn again from the generator's state."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.dropout(layer(x).tanh(), 0.2)
        return x.square().mean()


@pytest.mark.slow
def test_peak_includes_random_replays() -> None:
    torch.manual_seed(0)
    net, x = _Masks(), torch.randn(512, 64)

    class Floor(RematPartitioner):
        def choose(self, planner: Planner) -> RematPlan:
            return planner.floor

    plans: list[RematPlan] = []
    torch._dynamo.reset()
    step = torch.compile(net.forward, backend=aot_backend(Floor(0.5, on_plan=plans.append)))
    step(x).backward()
    net.zero_grad()
    (plan,) = plans
    assert any(plan.problem.nodes[i].replay_bytes for i in plan.again)
    meter = PeakMeter(torch.device("cpu"))
    meter.start()
    meter.mark([list(net.parameters()), x])
    step(x).backward()
    assert meter.stop() == pytest.approx(plan.peak_bytes, rel=0.001)


def test_function_without_gradient_or_with_breaks_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="requires a gradient"):
        plan_remat(lambda x: x.sin(), torch.randn(3), budget=1.0)

    def breaks(x: Tensor) -> Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    with pytest.raises(RuntimeError, match="several graphs"):
        plan_remat(breaks, torch.randn(3, requires_grad=True), budget=1.0)


@pytest.mark.slow
def test_figures_and_dot_files_are_written(planner: Planner, tmp_path: Path) -> None:
    x = torch.randn(4, 64, 64)
    plans = pareto_front(Net(1), x, num_plans=4, path=tmp_path / "front.svg")
    plan = plans[-1]
    draw_joint_graph(plan, tmp_path / "joint.dot")
    draw_joint_graph(plan, tmp_path / "joint.svg")
    plot_timeline(plan, tmp_path / "live.png")
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    draw_graph(traced, tmp_path / "graph.dot")
    assert len(list(tmp_path.iterdir())) == 5
    text = (tmp_path / "joint.dot").read_text()
    assert "fillcolor=gold" in text and "fillcolor=salmon" in text and "penwidth=3" in text


@pytest.mark.parametrize("budget", [1.0, 0.5, "min_cut"])
def test_networkx_graph_has_every_node_and_edge(planner: Planner, budget, tmp_path: Path) -> None:
    plan = planner.plan(budget)
    problem, graph = plan.problem, plan.to_networkx()
    names = [node.name for node in problem.nodes]
    assert list(graph) == names and nx.is_directed_acyclic_graph(graph)
    edges = [(names[read], node.name) for node in problem.nodes for read in node.inputs]
    assert sorted(graph.edges) == sorted(edges)
    by_role: dict[str, set[int]] = {}
    for index, role in enumerate(dict(graph.nodes(data="role")).values()):
        by_role.setdefault(role, set()).add(index)
    assert by_role["input"] == set(np.flatnonzero(problem.region == NodeRegion.INPUT))
    assert by_role["backward"] >= set(np.flatnonzero(problem.region == NodeRegion.BACKWARD))
    assert by_role["recomputed"] == set(plan.again.tolist())
    assert by_role["saved"] <= set(np.flatnonzero(plan.saved))
    order = plan.timeline.nodes.tolist()
    for index, node in enumerate(graph.nodes.values()):
        assert node["op"] == problem.nodes[index].kind
        assert node["num_runs"] == order.count(index)
        if node["num_runs"]:
            assert order[node["first_run"]] == order[node["last_run"]] == index
    # The saved tensors are those that cross into the backward pass.
    crossing = {read for read, _, is_saved in graph.edges(data="saved") if is_saved}
    assert (
        {names[i] for i in by_role["saved"]}
        <= crossing
        <= {names[i] for i in plan.saved.nonzero()[0]}
    )
    bases = {names[i]: int(problem.num_bytes[problem.base[i]]) for i in range(len(problem))}
    assert all(size == bases[read] for read, _, size in graph.edges(data="num_bytes"))
    assert graph.graph["peak_bytes"] == plan.peak_bytes
    assert graph.graph["seconds"] == plan.seconds
    json.dumps(nx.node_link_data(graph), allow_nan=False)
    nx.write_graphml(graph, tmp_path / "plan.graphml")
    assert nx.read_graphml(tmp_path / "plan.graphml").edges == graph.edges


def test_missing_matplotlib_error_has_extra(planner: Planner, monkeypatch, tmp_path: Path) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"lightning-unitscale\[report\]"):
        plot_timeline(planner.default, tmp_path / "live.png")


def test_report_lists_saved_and_recomputed(planner: Planner) -> None:
    report = RematReport.of(planner.plan(0.3))
    assert report.saved_bytes < RematReport.of(planner.default).saved_bytes
    assert report.recomputed_flops > 0
    assert "saved for backward" in report.table()
