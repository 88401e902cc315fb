# SPDX-License-Identifier: Apache-2.0
"""A LightningModule trained by FMuon: a scheduler, clipping, logged rates, checkpoints.

python examples/05_lightning.py
python examples/05_lightning.py --smoke    fewer steps
"""

import argparse
import csv
import logging
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fmuon


class Classifier(lightning.LightningModule):
    """A small network that learns which of four sums is the largest."""

    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__()
        self.lr = lr
        self.body = nn.Sequential(
            nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()
        )
        self.head = nn.Linear(64, 4)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        """The loss, logged."""
        x, y = batch
        loss = F.cross_entropy(self.head(self.body(x)), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        """One optimizer for the matrices and the rest, so one scheduler too."""
        # The module itself: by its name the head is trained by AdamW.
        optimizer = fmuon.FMuon(self, lr=self.lr, weight_decay=0.01)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            self.lr,
            total_steps=int(self.trainer.estimated_stepping_batches),
            # It would move the betas of AdamW and leave Muon's momentum as it is.
            cycle_momentum=False,
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def configure_gradient_clipping(
        self, optimizer: fmuon.FMuon, gradient_clip_val: float, **_: Any
    ) -> None:
        """Clip what AdamW trains; the step of a matrix doesn't depend on its gradient's size."""
        clipped = fmuon.parameter_lists(optimizer)["auxiliary"]
        nn.utils.clip_grad_norm_(clipped, gradient_clip_val)


def fit(out: Path, epochs: int, resume: Path | None = None) -> tuple[Classifier, lightning.Trainer]:
    """Train, or go on from a checkpoint."""
    lightning.seed_everything(0, verbose=False)
    x = torch.randn(1024, 16)
    y = (x[:, :4] + x[:, 4:8].abs()).argmax(1)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        gradient_clip_val=1.0,
        default_root_dir=out,
        logger=CSVLogger(out, name="05_lightning"),
        callbacks=[
            LearningRateMonitor(logging_interval="step"),
            ModelCheckpoint(filename="{epoch}", save_top_k=-1),
        ],
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Classifier()
    # In a fixed order: Lightning restores no random numbers when it resumes.
    trainer.fit(model, DataLoader(TensorDataset(x, y), batch_size=64), ckpt_path=resume)
    return model, trainer


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="fewer steps")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of what is written")
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    epochs = 4 if arguments.smoke else 20
    straight, trainer = fit(arguments.out, epochs)
    folder = Path(trainer.logger.log_dir)
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    for column in ("loss", "lr-FMuon/muon", "lr-FMuon/auxiliary"):
        values = [row[column] for row in rows if row[column]]
        shown = [*values[:: len(values) // 8], values[-1]]
        print(f"{column}: " + ", ".join(f"{float(value):.3g}" for value in shown))

    checkpoint = folder / "checkpoints" / f"epoch={epochs // 2 - 1}.ckpt"
    resumed, _ = fit(arguments.out, epochs, resume=checkpoint)
    pairs = zip(straight.parameters(), resumed.parameters(), strict=True)
    difference = max((a - b).abs().max().item() for a, b in pairs)
    print(f"resumed after {epochs // 2} of {epochs} epochs: largest difference {difference}")


if __name__ == "__main__":
    main()
