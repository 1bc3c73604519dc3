import warnings

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings

from lightning_unitscale.memory.partitioner import (
    RematPartitioner,
    aot_backend,
)
from lightning_unitscale.memory.planner import Planner
from lightning_unitscale.memory.remat_plan import RematPlan
from tests.memory.programs import PROGRAMS, Checkpointed, compiled, run


def assert_same(step, other) -> None:
    assert len(step[0]) == len(other[0])
    for a, b in zip(step[0], other[0], strict=True):
        assert torch.equal(a, b)
    assert torch.equal(step[1], other[1])  # the generator has drawn as much


class EveryPlan(RematPartitioner):
    """Partitions by one plan of the front after the other."""

    index = 0
    count = 1

    def choose(self, planner: Planner) -> RematPlan:
        plans = [*planner.candidates, *planner.front(8)]
        unique = list({plan.hash: plan for plan in plans}.values())
        unique = unique[:: max(1, len(unique) // 4)]
        type(self).count = len(unique)
        return unique[self.index]


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_plan_is_bit_identical(name: str) -> None:
    make, inputs = PROGRAMS[name]
    torch.manual_seed(0)
    module, x = make(), inputs()
    start = {key: value.clone() for key, value in module.state_dict().items()}
    parameters = list(module.parameters())
    reference = run(compiled(module.forward, RematPartitioner("default")), parameters, x)
    ends = {key: value.clone() for key, value in module.state_dict().items()}
    partitioner = EveryPlan(0.5)
    index = 0
    while index < EveryPlan.count if index else True:
        partitioner.index = index
        module.load_state_dict(start)
        assert_same(run(compiled(module.forward, partitioner), parameters, x), reference)
        for key, value in module.state_dict().items():
            assert torch.equal(value, ends[key])
        index += 1
    assert index > 1


@pytest.mark.slow_cases(3)
@pytest.mark.parametrize("name", sorted(set(PROGRAMS) - {"in place"}))
def test_default_partition_matches_eager(name: str) -> None:
    make, inputs = PROGRAMS[name]
    torch.manual_seed(0)
    module, x = make(), inputs()
    start = {key: value.clone() for key, value in module.state_dict().items()}
    eager = run(module.forward, list(module.parameters()), x)
    module.load_state_dict(start)
    ours = run(compiled(module.forward, RematPartitioner("default")), list(module.parameters()), x)
    for a, b in zip(ours[0], eager[0], strict=True):
        torch.testing.assert_close(a, b)


def _planned(function, *inputs, budget="min_cut") -> RematPlan:
    plans: list[RematPlan] = []
    torch._dynamo.reset()
    partitioner = RematPartitioner(budget, on_plan=plans.append)
    compiled(function, partitioner)(*inputs)
    return plans[0]


@pytest.mark.slow
def test_checkpointed_nodes_are_recomputed_not_saved() -> None:
    module = Checkpointed()
    for budget in ("default", "min_cut", 1.0):
        plan = _planned(module.forward, torch.randn(32, 64), budget=budget)
        kinds = [plan.problem.nodes[i].kind for i in plan.again]
        assert kinds.count("aten.gelu") == 3
        assert plan.problem.tagged.any()
        assert not (plan.saved & plan.problem.tagged).any()


@pytest.mark.slow
def test_only_large_random_values_are_redrawn() -> None:
    module = PROGRAMS["dropout"][0]()
    plan = _planned(module.forward, PROGRAMS["dropout"][1](), budget=0.8)
    random = [i for i, node in enumerate(plan.problem.nodes) if node.replay_bytes]
    assert random
    for i in random:
        node = plan.problem.nodes[i]
        assert list(plan.again).count(i) <= 1
        made = plan.problem.num_bytes[plan.problem.owner == i].sum()
        assert node.can_recompute == (made > 80_000)


def test_readers_of_mutated_buffer_are_not_recomputed() -> None:
    module = PROGRAMS["in place"][0]()
    plan = _planned(module.forward, torch.randn(4, 6, 16))
    adds = [n for n in plan.problem.nodes if n.kind == "aten.add" and n.in_forward]
    assert adds and not any(node.can_recompute for node in adds)


def test_symbolic_sizes_are_partitioned() -> None:
    layer = torch.nn.Linear(8, 8)

    def function(x):
        y = F.gelu(layer(x))
        return (y.view(y.shape[0] * 2, 4) * x.shape[0]).sin()

    dynamic = torch.compile(
        function,
        backend=aot_backend(RematPartitioner()),
        dynamic=True,
    )
    for rows in (4, 6, 10):
        x = torch.randn(rows, 8)
        assert_same(
            run(dynamic, list(layer.parameters()), x), run(function, list(layer.parameters()), x)
        )


@pytest.mark.slow
def test_inductor_runs_planned_partition() -> None:
    from torch._inductor import config

    layers = torch.nn.Sequential(*[torch.nn.Linear(32, 32), torch.nn.GELU()] * 3)
    x = torch.randn(16, 32)
    results = []
    for partitioner in (RematPartitioner("default"), RematPartitioner("min_cut")):
        torch._dynamo.reset()
        with config.patch(custom_partitioner_fn=partitioner), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step = torch.compile(lambda x: layers(x), backend="inductor")
            results.append(run(step, list(layers.parameters()), x))
    for a, b in zip(results[0][0], results[1][0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


_STEPS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 30), st.integers(0, 30)), min_size=3, max_size=14
)


def _program(steps):
    def function(x, w):
        values = [x, w]
        for kind, i, j in steps:
            a, b = values[i % len(values)], values[j % len(values)]
            made = (
                lambda a, b: (a @ b) / 4,
                lambda a, b: a + b,
                lambda a, b: a * b.tanh(),
                lambda a, b: a.t(),
                lambda a, b: torch.cat(torch.split(a, 2)[::-1]),
                lambda a, b: F.dropout(a, 0.25) + b,
                lambda a, b: F.layer_norm(a, (4,)),
                lambda a, b: (a.clone().mul_(0.5)).add_(b),
                lambda a, b: torch.var_mean(a, 0, keepdim=True)[0] + b,
                lambda a, b: a.view(2, 8).sin().view(4, 4),
            )[kind](a.contiguous(), b)
            values.append(made)
        return values[-1] + values[2]

    return function


@pytest.mark.slow
@settings(max_examples=15)
@given(steps=_STEPS, budget=st.sampled_from(["min_cut", "floor", "front"]))
def test_random_programs_are_bit_identical(steps, budget) -> None:
    torch.manual_seed(1)
    x = torch.randn(4, 4, requires_grad=True)
    w = torch.randn(4, 4, requires_grad=True)
    function = _program(steps)

    class Chosen(RematPartitioner):
        def choose(self, planner: Planner) -> RematPlan:
            if budget == "min_cut":
                return planner.min_cut
            return planner.floor if budget == "floor" else planner.front(4)[-1]

    reference = run(compiled(function, RematPartitioner("default")), [x, w], x, w)
    assert_same(run(compiled(function, Chosen(0.5)), [x, w], x, w), reference)
