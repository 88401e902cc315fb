# SPDX-License-Identifier: Apache-2.0
"""The records of compare.py and scales.py -> the tables of docs/evidence.md, and the pictures.

    python examples/evidence/page.py

A table stands between two markers in the page.
"""

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeAlias

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

sys.path.append(str(Path(__file__).parents[1]))

import report

ROOT = Path(__file__).parents[2]
Record: TypeAlias = Mapping[str, Any]

PAGE = ROOT / "docs" / "evidence.md"
RESULTS = ROOT / "examples" / "results" / "evidence"
TICKS = (0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 2.5, 3, 4, 5, 7, 10)
NAMES = ("gpt-64", "gpt-128", "digits", "fine-tune")


def main() -> None:
    """Write the page anew, and draw."""
    tasks = read_tasks()
    PAGE.write_text(rendered(PAGE.read_text()))
    for name, record in tasks.items():
        report.draw(RESULTS / f"{name}.png", record)
    draw_grids(RESULTS / "grids.png", tasks)


def read_tasks() -> dict[str, Record]:
    """The records of compare.py."""
    return {name: read(name) for name in NAMES if (RESULTS / f"{name}.json").exists()}


def read(name: str) -> Record:
    """A record."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def rendered(text: str) -> str:
    """The page with what the records say between its markers."""
    for name, render in BLOCKS.items():
        block = f"<!-- {name} -->\n{render()}\n<!-- end -->"
        pattern = re.compile(f"<!-- {name} -->.*?<!-- end -->", re.DOTALL)
        text = pattern.sub(lambda _, block=block: block, text)
    return text


def results() -> str:
    """Task x optimizer."""
    rows = [
        "| task | optimizer | learning rate | weight decay | validation loss: mean (range) "
        "| accuracy | seeds against AdamW's | steps to AdamW's loss "
        "| ms per step: median (least) | seconds to AdamW's loss: by the median (by the least) |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for record in read_tasks().values():
        adamw = record["curves"]["AdamW"]
        for kind, runs in record["curves"].items():
            best = record["best"][kind]
            losses = [final(run["validation_loss"]) for run in runs]
            seconds = [second for run in runs for second in run["seconds"]]
            steps = steps_to(runs, fmean(final(run["validation_loss"]) for run in adamw))
            cells = (
                record["title"],
                kind,
                f"{best['lr']:g}",
                f"{best['weight_decay']:g}",
                f"{fmean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})",
                f"{fmean(final(run['accuracy']) for run in runs):.3f}",
                "" if kind == "AdamW" else against(runs, adamw),
                "not reached" if steps is None else str(steps),
                f"{median(seconds) * 1e3:.1f} ({min(seconds) * 1e3:.1f})",
                ""
                if steps is None
                else f"{steps * median(seconds):.1f} ({steps * min(seconds):.1f})",
            )
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def final(curve: Mapping[str, float]) -> float:
    """The last value."""
    return list(curve.values())[-1]


def against(runs: list[Record], adamw: list[Record]) -> str:
    """Where the final losses of the seeds lie."""
    own, other = ([final(run["validation_loss"]) for run in group] for group in (runs, adamw))
    if max(own) < min(other):
        return "all lower"
    return "all higher" if min(own) > max(other) else "overlap"


def steps_to(runs: list[Record], loss: float) -> int | None:
    """The first validation at which the mean over the seeds is as low."""
    for step in runs[0]["validation_loss"]:
        if fmean(run["validation_loss"][step] for run in runs) <= loss:
            return int(step)
    return None


def tasks() -> str:
    """What was run, a point for each task."""
    points = []
    for name, record in read_tasks().items():
        task, stamp = record["task"], record["environment"]
        rates = sorted({row["lr"] for row in record["grid"]})
        sizes = {key: task[key] for key in ("size", "batch", "frozen") if key in task}
        sizes |= sizes.pop("size", {})
        said = {"width", "layers", "heads", "context", "batch", "frozen"} & sizes.keys()
        size = ", ".join(f"{key} {sizes[key]}" for key in sizes if key in said)
        points.append(
            f"- **{record['title']}** (`{name}`): {size}; {task['steps']} steps. Tuned over "
            f"{len(rates)} learning rates from {rates[0]:g} to {rates[-1]:g}, a factor of "
            f"{task['ratio']:.3g} apart, with weight decay "
            f"{' and '.join(f'{decay:g}' for decay in task['weight_decays'])}, "
            f"{len(record['grid'])} runs in all, with seed {record['tuning_seed']}; reported with "
            f"seeds {', '.join(map(str, record['seeds']))}. {machine(stamp)}"
        )
    return "\n".join(points)


def machine(stamp: Record) -> str:
    """One sentence about where numbers were taken."""
    native = "multiplies" if stamp["native_bfloat16"] else "does not multiply"
    return (
        f"`{stamp['command']}`, torch {stamp['torch']}, Python {stamp['python']}, {stamp['cpu']} "
        f"({native} bfloat16 natively), {stamp['threads']} thread, load {stamp['load']:g} at the "
        f"start."
    )


def scales() -> str:
    """The best learning rate of every scale rule at every width, and what another costs."""
    record = read("scales")
    widths = list(next(iter(record["loss"].values())))
    rows = [
        f"| scale | {' | '.join(f'width {width}' for width in widths)} "
        f"| largest / smallest best rate "
        f"| width {widths[-1]} at the best rate of width {widths[0]} |",
        "|---" * (len(widths) + 3) + "|",
    ]
    for rule, losses in record["loss"].items():
        best = [min(known(line), key=known(line).__getitem__) for line in losses.values()]
        cells = [
            f"{lr:g} ({known(line)[lr]:.3f})"
            for lr, line in zip(best, losses.values(), strict=True)
        ]
        carried = known(losses[widths[-1]]).get(best[0])
        cells += [
            f"{max(best) / min(best):g}",
            "diverged" if carried is None else f"{carried:.3f}",
        ]
        rows.append(f"| `{rule}` | {' | '.join(cells)} |")
    seeds = len(record["seeds"])
    rows += [
        "",
        f"Best rate, and the validation loss there, mean of {seeds} seeds; {record['steps']} steps "
        f"of {record['batch']} images. {machine(record['environment'])}",
    ]
    return "\n".join(rows)


def known(line: Mapping[str, float | None]) -> dict[float, float]:
    """Learning rate -> loss, where there is one."""
    return {float(lr): loss for lr, loss in line.items() if loss is not None}


def draw_grids(path: Path, records: Mapping[str, Record]) -> None:
    """The loss of every setting that was tried, a panel for each task."""
    figure = Figure(figsize=(3.4 * len(records), 3.8), layout="constrained")
    panels = figure.subplots(1, len(records), squeeze=False)[0]
    for axes, record in zip(panels, records.values(), strict=True):
        decays = record["task"]["weight_decays"]
        for i, kind in enumerate(record["curves"]):
            for decay, style in zip(decays, ("-", "--"), strict=False):
                line = {
                    row["lr"]: row["loss"]
                    for row in record["grid"]
                    if (row["optimizer"], row["weight_decay"]) == (kind, decay)
                    and row["loss"] is not None
                }
                label = kind if style == "-" else None
                rates = sorted(line)
                axes.plot(
                    rates, [line[lr] for lr in rates], style, color=f"C{i}", marker=".", label=label
                )
        losses = [row["loss"] for row in record["grid"] if row["loss"] is not None]
        axes.set(xscale="log", yscale="log", xlabel="peak learning rate", title=record["title"])
        # The losses of runs that went astray would hide the rest.
        axes.set_ylim(min(losses) * 0.93, min(max(losses) * 1.05, min(losses) * 4))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_formatter(NullFormatter())
        ticks = [tick for tick in TICKS if axes.get_ylim()[0] < tick < axes.get_ylim()[1]]
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("loss after tuning runs; dashed: with decay")
    panels[0].legend(fontsize="small")
    figure.savefig(path, dpi=100)


BLOCKS: dict[str, Callable[[], str]] = {"results": results, "tasks": tasks, "scales": scales}


if __name__ == "__main__":
    main()
