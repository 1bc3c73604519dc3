"""``compile``: the graphs of a module run by Inductor, after the passes of other transforms."""

from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._dynamo.backends.debugging import boxed_nop
from torch._inductor import compile_fx, config

from lightning_unitscale.capture import executors
from lightning_unitscale.capture.module_steps import captured_forward, matmuls_of
from lightning_unitscale.matmuls.gauge import Gauge, GaugePair
from lightning_unitscale.transforms import compile, lossless_unit_scale, track_scales
from tests.monitor.tracked import metrics


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.relu(self.one(x))).square().mean()


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Executors by which graphs were run; AOTAutograd stands in for Inductor, which is slow."""
    seen: list[str] = []
    real = executors.execute_with

    def execute(executor: Any, *args: Any, **options: Any) -> Any:
        seen.append(executor)
        return real("aot_eager" if executor == "inductor" else executor, *args, **options)

    monkeypatch.setattr(executors, "execute_with", execute)
    return seen


def gradients(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    module.zero_grad()
    loss = module(x)
    loss.backward()
    return [loss.detach(), *(one.grad.clone() for one in module.parameters())]


def test_compile_returns_compiled_copy(executed: list[str]) -> None:
    net, x = Net(), torch.randn(5, 6)
    compiled = compile(net)
    assert executed == []
    torch.testing.assert_close(gradients(compiled, x), gradients(net, x))
    assert executed == ["inductor"]
    assert not set(map(id, net.parameters())) & set(map(id, compiled.parameters()))
    assert "No graph breaks" in compiled.explain()


@pytest.mark.slow
def test_compile_composes_with_transforms_in_any_order(executed: list[str]) -> None:
    net, x = Net(), torch.randn(5, 6) * 30
    for module in (
        compile(track_scales(lossless_unit_scale(net, x))),
        track_scales(lossless_unit_scale(compile(net), x)),
        lossless_unit_scale(compile(track_scales(net)), x),
    ):
        executed.clear()
        torch.testing.assert_close(gradients(module, x), gradients(net, x))
        assert executed == ["inductor"]
        nodes = {node.meta["tensor_name"]: node for node in module.scales_graph().nodes}
        assert "one.linear" in nodes
        ungraded = {
            name
            for name, node in nodes.items()
            if node.op != "output" and not node.meta["metrics"].bwd
        }
        assert ungraded == {"input.x"}


def test_compiled_module_is_an_error() -> None:
    with pytest.raises(ValueError, match="compiled already"):
        compile(torch.compile(Net()))


@pytest.mark.slow
def test_real_inductor_matches_plain_module(torch_kernels: None) -> None:
    net, x = Net(), torch.randn(5, 6)
    compiled = compile(track_scales(net))
    torch.testing.assert_close(gradients(compiled, x), gradients(net, x))
    plain = track_scales(net)
    gradients(plain, x)
    found, expected = (metrics(one) for one in (compiled, plain))
    assert found.keys() == expected.keys()
    for name, one in found.items():
        other = expected[name]
        assert one is not None and other is not None
        assert one.fwd.mean_abs == pytest.approx(other.fwd.mean_abs, rel=1e-5)
        # Of an input that needs no gradient, graphs compute none.
        assert (one.bwd is None) == (name == "input.x")
        if one.bwd is not None and other.bwd is not None:
            assert one.bwd.mean_abs == pytest.approx(other.bwd.mean_abs, rel=1e-5)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        return nn.functional.scaled_dot_product_attention(q, k, v).square().sum()


@pytest.mark.slow
def test_attention_is_not_recomputed_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not again in the backward pass, for the random numbers that it might draw."""
    found: list[str] = []

    def run(graph_module: fx.GraphModule, inputs: Any, **_: Any) -> Any:
        names = (str(node.target) for node in graph_module.graph.nodes)
        found.extend(name for name in names if "attention" in name and "backward" not in name)
        return boxed_nop(graph_module, inputs)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", run)
    net, x = Attention(), torch.randn(3, 5, 8)
    compiled = compile(lossless_unit_scale(net, x))
    torch.testing.assert_close(gradients(compiled, x), gradients(net, x))
    assert len(found) == 1, found


MODES = [("default", False, False), ("reduce-overhead", True, False), ("max-autotune", True, True)]


@pytest.mark.slow_cases
@pytest.mark.parametrize(("mode", "has_cuda_graphs", "is_tuned"), MODES)
def test_compile_mode_reaches_inductor(
    mode: Any, has_cuda_graphs: bool, is_tuned: bool, torch_kernels: None
) -> None:
    """And new units compile nothing."""
    compiled: list[tuple[bool, bool]] = []

    def note(graph: fx.Graph) -> None:
        compiled.append((config.triton.cudagraphs, config.max_autotune))

    net, x = Net(), torch.randn(5, 6)
    module = compile(lossless_unit_scale(net, x), mode)
    with config.patch(post_grad_custom_pre_pass=note):
        for exponent in (1, 3, -5):
            pair = GaugePair(exponent, -exponent)
            gauge = Gauge({"one.linear:input": pair, "two.linear": pair})
            matmuls_of(module).session.units.set_gauge(gauge)
            torch.testing.assert_close(gradients(module, x), gradients(net, x))
    assert compiled == [(has_cuda_graphs, is_tuned)] * 2  # a forward and a backward graph


def test_unknown_compile_mode_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"mode='fast': unknown. Expected 'default', "):
        compile(Net(), "fast")


def test_default_mode_keeps_mode_set_before() -> None:
    _, step = captured_forward(Net(), "first")
    step.owner.use_executor("inductor", "max-autotune")
    step.owner.use_executor("inductor")
    assert step.owner.compile_mode == "max-autotune"
