"""One optimizer that runs Muon on the hidden matrices and AdamW on the other parameters."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_unitscale.arguments import shown
from lightning_unitscale.rules.learning_rates import ParameterInfo, takes_muon


def give_roles(optimizer: Optimizer, infos: Mapping[Tensor, ParameterInfo]) -> None:
    """Pass an optimizer the roles of its parameters, if it needs them."""
    if isinstance(optimizer, MuonAdamW):
        optimizer.follow_roles(infos)


class MuonAdamW(Optimizer):
    """Muon for hidden matrices, AdamW for embeddings, the readout, vectors and all others.

    Lightning's automatic optimization allows one optimizer, and ``torch.optim.Muon`` takes matrices
    only. This is one optimizer for all parameters. Which of them are hidden matrices is read from
    the graph of the step, not from names: ``UnitScaleCallback("u-mup")`` or
    ``"unit-scaling"`` finds it before the first step. Without rules, pass the groups of
    :func:`muon_param_groups`, or groups of your own with ``use_muon``.

    A group has one ``lr``, AdamW's, which schedulers change. Muon's rate is ``lr * muon_ratio``.
    Decay is decoupled, ``lr * weight_decay`` for all parameters.

    Args:
        params: Parameters or groups of them, such as ``module.parameters()``. The key
            ``use_muon`` of a group decides for all its parameters, unless rules have found their
            roles.
        lr: Learning rate of AdamW, positive. Near 1 under ``"u-mup"``.
        muon_lr: Learning rate of Muon, positive: under ``"u-mup"`` a step has the spectral
            norm ``muon_lr * sqrt(fan_out)``. Search for it near 0.125.
        weight_decay: Under ``"u-mup"`` a share of the weight per step.
        momentum: Muon's, with Nesterov's rule.
        betas: AdamW's two averaging factors.
        eps: AdamW's.

    Raises:
        ValueError: If a rate is not positive.
        RuntimeError: In a step, if the roles of the parameters are not known.

    References:
        Jordan et al., "Muon" (2024). For the rates see
        :func:`lightning_unitscale.rules.learning_rates.muon_rate`.
    """

    # A copy has the class's, since an optimizer's state is its groups and tensors only.
    _muon: set[Tensor] | None = None

    def __init__(
        self,
        params: Any,
        lr: float = 1.0,
        muon_lr: float = 0.02,
        *,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        for name, rate in (("lr", lr), ("muon_lr", muon_lr)):
            if not (isinstance(rate, (int, float)) and 0 < rate < math.inf):
                raise ValueError(
                    f"{name}={shown(rate)}: not a learning rate. Expected a positive number, "
                    "since Muon's rate is kept as a multiple of AdamW's. Pass lr=1.0, "
                    "muon_lr=0.02."
                )
        defaults = {
            "lr": lr,
            "muon_ratio": muon_lr / lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "betas": tuple(betas),
            "eps": eps,
        }
        super().__init__(params, defaults)

    def follow_roles(self, infos: Mapping[Tensor, ParameterInfo]) -> None:
        """Set the roles of the parameters. AdamW updates those that are not in ``infos``."""
        self._muon = {
            parameter for parameter, info in infos.items() if takes_muon(info, parameter.shape)
        }

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            muon = self._muon_of(group)
            hidden = [parameter for parameter in group["params"] if parameter in muon]
            others = [parameter for parameter in group["params"] if parameter not in muon]
            ratio = group["muon_ratio"]
            rates = {"lr": group["lr"] * ratio, "weight_decay": group["weight_decay"] / ratio}
            self._run(torch.optim.Muon, hidden, {"momentum": group["momentum"], **rates})
            names = ("lr", "weight_decay", "betas", "eps")
            self._run(torch.optim.AdamW, others, {name: group[name] for name in names})
        return loss

    def _muon_of(self, group: Mapping[str, Any]) -> Collection[Tensor]:
        """Return the parameters of a group that Muon steps."""
        if self._muon is not None:
            return self._muon
        if "use_muon" not in group:
            raise RuntimeError(
                "MuonAdamW: it cannot choose the parameters for Muon without the graph of the "
                "step. Expected rules, or groups with use_muon. Use UnitScaleCallback('u-mup'), "
                "or MuonAdamW(muon_param_groups(module, *batch))."
            )
        return set(group["params"]) if group["use_muon"] else ()

    def _run(
        self, kind: type[Optimizer], parameters: list[Tensor], settings: Mapping[str, Any]
    ) -> None:
        """Step parameters by an optimizer of torch, on this one's state, without its hooks."""
        if not parameters:
            return
        inner: dict[type, Optimizer] = vars(self).setdefault("_inner", {})
        if kind not in inner:
            inner[kind] = kind([torch.zeros(1, 1)])  # type: ignore[call-arg]
        optimizer = inner[kind]
        optimizer.state = self.state
        optimizer.param_groups = [{**optimizer.defaults, **settings, "params": parameters}]
        inspect.unwrap(kind.step)(optimizer)
