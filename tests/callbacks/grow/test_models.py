"""Networks of torchvision, grown in a module of a few lines."""

from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import VisionTransformer, resnet18

from esper_lightning.callbacks import Grow
from esper_lightning.growth.gates import LifecycleConfig
from tests.callbacks.grow.modules import digits
from tests.callbacks.grow.trainings import trainer


class Lit(L.LightningModule):
    """The usual module around a network."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_acc", (self.model(batch[0]).argmax(1) == batch[1]).float().mean())

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def vit() -> nn.Module:
    return VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=10
    )


MODELS = {
    "resnet18": (lambda: resnet18(num_classes=10), ["layer1", "layer2"], ["conv_small", "norm"]),
    "vit": (vit, ["encoder.layers.encoder_layer_0", "encoder.layers.encoder_layer_1"], ["lora", "norm"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_network_of_torchvision_grows_and_its_best_checkpoint_is_what_it_says(name: str, tmp_path: Path) -> None:
    make, slots, blueprints = MODELS[name]
    images, labels = digits()
    images = F.interpolate(images, size=32).expand(-1, 3, -1, -1)
    train, held_out = TensorDataset(images[:96], labels[:96]), TensorDataset(images[-64:], labels[-64:])
    best = ModelCheckpoint(tmp_path, monitor="val_acc", mode="max")
    lifecycle = LifecycleConfig(training_ticks=1, min_contribution=None, auto_cull=False)
    callback = Grow(slots, decider="periodic", blueprints=blueprints, lifecycle=lifecycle, batches=2)
    module, made = Lit(make()), trainer(callback, best, epochs=8, enable_checkpointing=True)
    L.seed_everything(0, verbose=False)

    made.fit(module, DataLoader(train, 32), DataLoader(held_out, 32))

    assert [slot.blueprint for slot in callback.growing.slots.values()] == blueprints
    (scores,) = made.test(module, DataLoader(held_out, 32), ckpt_path="best", verbose=False)
    assert scores["val_acc"] == pytest.approx(float(best.best_model_score), abs=1e-6)
