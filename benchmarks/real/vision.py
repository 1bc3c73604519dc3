"""Images and volumes: segmentation, self-supervision, anomalies, metric learning."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .project import Loss, Made, Project, loader


def monai_unet() -> Made:
    from monai.data import MetaTensor
    from monai.losses import DiceCELoss
    from monai.networks.nets import UNet

    model = UNet(3, 1, 2, channels=(8, 16, 32), strides=(2, 2), num_res_units=1, dropout=0.1)
    criterion = DiceCELoss(to_onehot_y=True, softmax=True)

    def batch() -> tuple[Any, Any]:
        volume = torch.randn(2, 1, 16, 16, 16)
        return MetaTensor(volume), MetaTensor((volume > 0.5).float())

    return Loss(model, lambda model, b: criterion(model(b[0]), b[1])), loader(batch)


def smp_unet() -> Made:
    import segmentation_models_pytorch as smp

    model = smp.Unet(
        "resnet18", encoder_weights=None, classes=3, decoder_channels=(64, 32, 16, 8, 8)
    )
    dice = smp.losses.DiceLoss("multiclass")

    def batch() -> tuple[Tensor, Tensor]:
        return torch.randn(2, 3, 64, 64), torch.randint(3, (2, 64, 64))

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        found = model(batch[0])
        return dice(found, batch[1]) + F.cross_entropy(found, batch[1])

    return Loss(model, loss), loader(batch)


class _Dino(pl.LightningModule):
    """A student that follows the mean of its own past, from lightly's parts, as in its examples."""

    def __init__(self) -> None:
        super().__init__()
        from lightly.loss import DINOLoss

        self.student, self.teacher = self._network(), self._network().requires_grad_(False)
        self.teacher.load_state_dict(self.student.state_dict())
        self.criterion = DINOLoss(output_dim=256, warmup_teacher_temp_epochs=1)

    def _network(self) -> nn.Sequential:
        from lightly.models.modules import DINOProjectionHead
        from torchvision.models import resnet18

        backbone = resnet18()
        backbone.fc = nn.Identity()
        return nn.Sequential(backbone, DINOProjectionHead(512, 128, 64, 256, freeze_last_layer=1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        from lightly.models.utils import update_momentum

        update_momentum(self.student, self.teacher, m=0.99)
        seen = [self.student(view) for view in batch]
        told = [self.teacher(view) for view in batch[:2]]
        loss = self.criterion(told, seen, epoch=self.current_epoch)
        self.log("loss", loss)
        return loss

    def on_after_backward(self) -> None:
        self.student[1].cancel_last_layer_gradients(current_epoch=self.current_epoch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.student.parameters(), lr=0.05, momentum=0.9)


def lightly_dino() -> Made:
    return _Dino(), loader(lambda: [torch.randn(4, 3, size, size) for size in (48, 48, 32, 32)])


def timm_metric_learning() -> Made:
    import timm
    from pytorch_metric_learning import losses, miners

    model = timm.create_model("mobilenetv3_small_050", pretrained=False, num_classes=32)
    criterion, miner = losses.TripletMarginLoss(margin=0.2), miners.MultiSimilarityMiner()

    def batch() -> tuple[Tensor, Tensor]:
        return torch.randn(16, 3, 64, 64), torch.arange(16) // 4

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        embedding = model(batch[0])
        return criterion(embedding, batch[1], miner(embedding, batch[1]))

    return Loss(model, loss), loader(batch)


def timm_swin() -> Made:
    import timm

    model = timm.create_model(
        "swin_tiny_patch4_window7_224",
        pretrained=False,
        img_size=56,
        embed_dim=24,
        depths=(2, 2),
        num_heads=(2, 4),
        num_classes=5,
        drop_path_rate=0.1,
    )

    def batch() -> tuple[Tensor, Tensor]:
        return torch.randn(4, 3, 56, 56), torch.randint(5, (4,))

    return Loss(model, lambda model, b: F.cross_entropy(model(b[0]), b[1])), loader(batch)


def vit_pytorch() -> Made:
    from vit_pytorch import ViT

    model = ViT(
        image_size=32, patch_size=8, num_classes=5, dim=64, depth=2, heads=4, mlp_dim=96,
        dropout=0.1, emb_dropout=0.1,
    )  # fmt: skip

    def batch() -> tuple[Tensor, Tensor]:
        return torch.randn(8, 3, 32, 32), torch.randint(5, (8,))

    return Loss(model, lambda model, b: F.cross_entropy(model(b[0]), b[1])), loader(batch)


def torchgeo_moco() -> Made:
    from torchgeo.trainers import MoCoTask

    task = MoCoTask(model="resnet18", in_channels=4, version=2, layers=2, hidden_dim=64,
                    output_dim=32, lr=0.01, memory_bank_size=64, size=32)  # fmt: skip
    return task, loader(lambda: {"image": torch.rand(8, 4, 40, 40)})


def _anomalies(size: int) -> Any:
    from anomalib.data import ImageBatch

    return loader(lambda: ImageBatch(image=torch.rand(4, 3, size, size)))


def anomalib_ganomaly() -> Made:
    from anomalib.models import Ganomaly

    pre_processor = Ganomaly.configure_pre_processor(image_size=(32, 32))
    module = Ganomaly(
        batch_size=4, n_features=16, latent_vec_size=16, pre_processor=pre_processor,
        post_processor=False, evaluator=False, visualizer=False,
    )  # fmt: skip
    return module, _anomalies(32)


def anomalib_fastflow() -> Made:
    from anomalib.models import Fastflow

    pre_processor = Fastflow.configure_pre_processor(image_size=(64, 64))
    module = Fastflow(
        backbone="resnet18", pre_trained=False, flow_steps=2, pre_processor=pre_processor,
        post_processor=False, evaluator=False, visualizer=False,
    )  # fmt: skip
    return module, _anomalies(64)


PROJECTS = (
    Project("monai-unet", ("monai",), monai_unet),
    Project("smp-unet", ("segmentation-models-pytorch",), smp_unet),
    Project("lightly-dino", ("lightly",), lightly_dino),
    Project("timm-metric-learning", ("timm", "pytorch-metric-learning"), timm_metric_learning),
    Project("timm-swin", ("timm",), timm_swin),
    Project("vit-pytorch", ("vit-pytorch",), vit_pytorch),
    Project("torchgeo-moco", ("torchgeo",), torchgeo_moco),
    Project("anomalib-ganomaly", ("anomalib",), anomalib_ganomaly),
    Project("anomalib-fastflow", ("anomalib",), anomalib_fastflow),
)
