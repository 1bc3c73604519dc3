"""Molecules, materials and cells: message passing, and force fields with second derivatives."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from .project import Loss, Made, Project, loader


def chemprop_mpnn() -> Made:
    from chemprop import data, models, nn

    smiles = ("CCO", "c1ccccc1", "CC(=O)O", "CCN(CC)CC", "C1CCCCC1", "O=C(N)c1ccccc1", "CCCl", "CN")
    points = [data.MoleculeDatapoint.from_smi(text, [float(len(text)) / 8]) for text in smiles * 2]
    module = models.MPNN(
        nn.BondMessagePassing(d_h=64, dropout=0.1),
        nn.MeanAggregation(),
        nn.RegressionFFN(input_dim=64, hidden_dim=64),
        batch_norm=True,
    )
    dataset = data.MoleculeDataset(points)
    return module, data.build_dataloader(dataset, batch_size=8, shuffle=False, num_workers=0)


def pyg_gat() -> Made:
    from torch_geometric.nn.models import GAT

    def batch() -> tuple[Tensor, Tensor, Tensor]:
        return torch.randn(60, 16), torch.randint(60, (2, 240)), torch.randint(4, (60,))

    model = GAT(16, 32, num_layers=3, out_channels=4, heads=4, dropout=0.2, v2=True, norm="batch")
    return Loss(model, lambda model, b: F.cross_entropy(model(b[0], b[1]), b[2])), loader(batch)


def pyg_schnet() -> Made:
    from torch_geometric.nn.models import SchNet

    class Pairs(torch.nn.Module):
        """All pairs within the cutoff: the model's own search needs a compiled extension."""

        def forward(self, positions: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
            same = (batch[:, None] == batch[None]) & ~torch.eye(len(batch), dtype=torch.bool)
            edges = same.nonzero().T
            return edges, (positions[edges[0]] - positions[edges[1]]).norm(dim=-1)

    model = SchNet(32, 32, 3, 20, cutoff=5.0, interaction_graph=Pairs())

    def batch() -> tuple[Tensor, ...]:
        atoms = torch.randint(1, 9, (40,))
        return atoms, torch.randn(40, 3) * 2, torch.arange(40) // 10, torch.randn(4, 1)

    return Loss(model, lambda model, b: F.mse_loss(model(*b[:3]), b[3])), loader(batch)


def schnetpack_painn() -> Made:
    # SchNetPack 2.1 imports a type variable that torch 2.13 does not have any more.
    dataloader: Any = torch.utils.data.dataloader
    if not hasattr(dataloader, "T_co"):
        dataloader.T_co = TypeVar("T_co", covariant=True)
    import schnetpack as spk
    import torchmetrics

    cutoff = 5.0
    model = spk.model.NeuralNetworkPotential(
        representation=spk.representation.PaiNN(
            n_atom_basis=32,
            n_interactions=2,
            radial_basis=spk.nn.GaussianRBF(n_rbf=16, cutoff=cutoff),
            cutoff_fn=spk.nn.CosineCutoff(cutoff),
        ),
        input_modules=[spk.atomistic.PairwiseDistances()],
        output_modules=[
            spk.atomistic.Atomwise(n_in=32, output_key="energy"),
            spk.atomistic.Forces(energy_key="energy", force_key="forces"),
        ],
    )
    outputs = [
        spk.task.ModelOutput(
            name=name,
            loss_fn=torch.nn.MSELoss(),
            loss_weight=weight,
            metrics={"mae": torchmetrics.MeanAbsoluteError()},
        )
        for name, weight in (("energy", 0.01), ("forces", 0.99))
    ]
    task = spk.task.AtomisticTask(model=model, outputs=outputs, optimizer_args={"lr": 1e-3})

    def batch() -> dict[str, Tensor]:
        from schnetpack import properties as keys

        molecule = torch.arange(24) // 6
        first, second = _neighbors(molecule)
        return {
            keys.Z: torch.randint(1, 9, (24,)),
            keys.R: torch.randn(24, 3) * 1.5,
            keys.idx_i: first,
            keys.idx_j: second,
            keys.idx_m: molecule,
            keys.n_atoms: torch.full((4,), 6),
            keys.offsets: torch.zeros(len(first), 3),
            "energy": torch.randn(4),
            "forces": torch.randn(24, 3),
        }

    return task, loader(batch)


def mace() -> Made:
    import numpy as np
    from mace import modules  # first: it lets e3nn load its constants

    o3 = importlib.import_module("e3nn.o3")

    numbers = [1, 6, 8]
    model = modules.ScaleShiftMACE(
        atomic_inter_scale=1.0,
        atomic_inter_shift=0.0,
        r_max=5.0,
        num_bessel=8,
        num_polynomial_cutoff=6,
        max_ell=2,
        interaction_cls=modules.interaction_classes["RealAgnosticResidualInteractionBlock"],
        interaction_cls_first=modules.interaction_classes["RealAgnosticResidualInteractionBlock"],
        num_interactions=2,
        num_elements=len(numbers),
        hidden_irreps=o3.Irreps("16x0e + 16x1o"),
        MLP_irreps=o3.Irreps("16x0e"),
        gate=F.silu,
        atomic_energies=np.array([-1.0, -2.0, -3.0]),
        avg_num_neighbors=5.0,
        atomic_numbers=numbers,
        correlation=2,
    )

    def batch() -> dict[str, Tensor]:
        molecule = torch.arange(24) // 6
        edges = torch.stack(_neighbors(molecule))
        return {
            "positions": torch.randn(24, 3) * 1.5,
            "node_attrs": F.one_hot(torch.randint(3, (24,)), 3).float(),
            "edge_index": edges,
            "shifts": torch.zeros(edges.shape[1], 3),
            "unit_shifts": torch.zeros(edges.shape[1], 3),
            "cell": torch.zeros(12, 3),
            "batch": molecule,
            "ptr": torch.arange(0, 25, 6),
            "energy": torch.randn(4),
            "forces": torch.randn(24, 3),
            "head": torch.zeros(4, dtype=torch.long),
        }

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        # The package's own loop fills in these gradients' leaves, which a loader hands on.
        inputs = {**batch, "positions": batch["positions"].clone()}
        found = SimpleNamespace(**model(inputs, training=True))
        energy = F.mse_loss(found.energy, batch["energy"])
        return energy + 10 * F.mse_loss(found.forces, batch["forces"])

    return Loss(model.float(), loss), loader(batch)


def _neighbors(molecule: Tensor) -> tuple[Tensor, Tensor]:
    """Both ends of all pairs of atoms within a molecule."""
    is_pair = (molecule[:, None] == molecule[None]) & ~torch.eye(len(molecule), dtype=torch.bool)
    first, second = is_pair.nonzero().unbind(1)
    return first, second


def scvi_vae() -> Made:
    from scvi import REGISTRY_KEYS
    from scvi.module import VAE
    from scvi.train import TrainingPlan

    module = VAE(n_input=100, n_batch=2, n_hidden=64, n_latent=10)
    plan = TrainingPlan(module, n_epochs_kl_warmup=4)

    def batch() -> dict[str, Tensor]:
        return {
            REGISTRY_KEYS.X_KEY: torch.poisson(3 * torch.rand(32, 100)),
            REGISTRY_KEYS.BATCH_KEY: torch.randint(2, (32, 1)),
            REGISTRY_KEYS.LABELS_KEY: torch.zeros(32, 1, dtype=torch.long),
        }

    return plan, loader(batch)


PROJECTS = (
    Project("chemprop-mpnn", ("chemprop",), chemprop_mpnn),
    Project("pyg-gat", ("torch_geometric",), pyg_gat),
    Project("pyg-schnet", ("torch_geometric",), pyg_schnet),
    Project("schnetpack-painn", ("schnetpack",), schnetpack_painn),
    Project("mace", ("mace-torch",), mace, {"gradient_clip_val": 10.0}),
    Project("scvi-vae", ("scvi-tools",), scvi_vae),
)
