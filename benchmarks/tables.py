# SPDX-License-Identifier: Apache-2.0
"""Records -> Markdown tables.

    python benchmarks/tables.py     writes the tables of the latest records into the pages

A table holds the latest record of every inventory (or case) of its question, and stands between two
markers in benchmarks/README.md; the headline stands in the README of the project too.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import harness
from harness import Row
from inventories import INVENTORIES

PAGES = (harness.HERE / "README.md", harness.HERE.parent / "README.md")
FLOORS = ("newton_schulz", "two_products")


def main() -> None:
    """Write the pages anew."""
    for page in PAGES:
        page.write_text(rendered(page.read_text()))


def rendered(text: str) -> str:
    """The page with the tables of today between its markers."""
    for name, (question, key, render) in TABLES.items():
        if f"<!-- {name} -->" not in text:
            continue
        if rows := latest(harness.read(question), key):
            stamps = dict.fromkeys(environment(row["environment"]) for row in rows)
            text = between(text, name, "\n\n".join([*stamps, render(rows)]))
    return text


def latest(rows: Sequence[Row], key: str) -> list[Row]:
    """The rows of the last run of every value of the key."""
    runs = {row[key]: row["environment"] for row in rows}
    return [row for row in rows if row["environment"] == runs[row[key]]]


def environment(stamp: Row) -> str:
    """One sentence about where and when numbers were taken."""
    native = "multiplies" if stamp["native_bfloat16"] else "does not multiply"
    return (
        f"Commit {stamp['commit'][:12]}, {stamp['time'][:10]}: torch {stamp['torch']}, "
        f"{stamp['cpu']} ({stamp['capability']}, {native} bfloat16 natively), "
        f"{stamp['threads']} threads, load {stamp['load']:.1f} at the start."
    )


# ---- step ----------------------------------------------------------------------------------------


def all_steps(rows: Sequence[Row]) -> str:
    """The headline, then one table per inventory."""
    names = dict.fromkeys(row["inventory"] for row in rows)
    return "\n\n".join([step_headline(rows), *(steps(rows, name) for name in names)])


def headline(rows: Sequence[Row]) -> str:
    """Products in float32: fmuon and the fastest peer of its form, then the choice and any peer."""
    lines: list[Sequence[Any]] = []
    for name in dict.fromkeys(row["inventory"] for row in rows):
        run = [row for row in _timed(rows, name) if row["products"] == "float32" and row["same"]]
        for method, form in (("newton_schulz", "standard"), ("gram", "Gram")):
            alike = [row for row in run if row["method"] == method]
            lines.append(_compared(INVENTORIES[name].title, form, alike, alike))
        run = [row for row in _timed(rows, name) if row["products"] == "float32"]
        chosen = [row for row in run if row["method"] == "auto"]
        lines += [_compared(INVENTORIES[name].title, "auto", chosen, run)] if chosen else []
    header = (
        "milliseconds per step", "form", "fastest peer", "FMuon", "FMuon compiled",
        "update compiled", "peer / best of fmuon", "best of fmuon / floor",
    )  # fmt: skip
    return f"{table(header, lines)}\n\n{_footnote(rows)}"


def _compared(title: str, form: str, own: Sequence[Row], run: Sequence[Row]) -> Sequence[Any]:
    """fmuon in one form beside the fastest peer of a run; ratios are of minima."""
    by_form = {_form(row): row for row in own if row["package"] == "fmuon"}
    peer = min((row for row in run if row["package"] != "fmuon"), key=_fastest)
    best = min(by_form.values(), key=_fastest)
    return (
        title,
        form,
        f"{_ms(peer)} ({_form(peer)})",
        *(_ms(by_form[of]) for of in ("FMuon", "FMuon compiled", "update compiled")),
        _ratio(peer["seconds_min"], best["seconds_min"]),
        _multiples(best)[0],
    )


def step_headline(rows: Sequence[Row]) -> str:
    """Per inventory and dtype of the products: fmuon, its fastest peer, and the floors."""
    names = dict.fromkeys(row["inventory"] for row in rows)
    lines = [
        line
        for dtype in ("float32", "bfloat16")
        for name in names
        if (line := _headline([row for row in _timed(rows, name) if row["products"] == dtype]))
    ]
    header = (
        "inventory", "products", "fastest peer", "ms", "FMuon, ms", "FMuon compiled, ms",
        "best of fmuon, ms", "peer / fmuon", "fmuon / NS floor", "fmuon / two-product floor",
    )  # fmt: skip
    return f"{table(header, lines)}\n\n{_footnote(rows)}"


def _headline(run: Sequence[Row]) -> Sequence[Any] | None:
    """Of the optimizers with one dtype of products on one inventory; ratios are of minima."""
    own = [row for row in run if row["package"] == "fmuon"]
    peers = [row for row in run if row["package"] != "fmuon"]
    if not own or not peers:
        return None
    best, peer = min(own, key=_fastest), min(peers, key=_fastest)
    forms = [[row for row in own if _form(row) == form] for form in ("FMuon", "FMuon compiled")]
    return (
        best["inventory"],
        best["products"],
        peer["subject"],
        _ms(peer),
        *(_ms(min(rows, key=_fastest)) if rows else "" for rows in forms),
        f"{_ms(best)} ({_form(best)}, {best['method']})",
        _ratio(peer["seconds_min"], best["seconds_min"]),
        *_multiples(best),
    )


def _footnote(rows: Sequence[Row]) -> str:
    """The ratio to torch.optim.Muon, with its reason."""
    ratios: list[str] = []
    for name in dict.fromkeys(row["inventory"] for row in rows):
        run = _timed(rows, name)
        native = {"bfloat16"} if rows[0]["native_bfloat16"] else {"float32"}
        own = [row for row in run if row["package"] == "fmuon" and row["products"] in native]
        for row in run:
            if row["subject"] == "torch.optim.Muon" and own:
                fastest = min(map(_fastest, own))
                ratios.append(f"{_ratio(row['seconds_min'], fastest)} ({name})")
    if not ratios:
        return ""
    reason = (
        "which this CPU multiplies natively; one that doesn't emulates it, many times slower"
        if rows[0]["native_bfloat16"]
        else "which this CPU doesn't multiply natively and emulates"
    )
    return (
        f"torch.optim.Muon takes {', '.join(ratios)} times as long as the best of fmuon in "
        f"{'bfloat16' if rows[0]['native_bfloat16'] else 'float32'}. It "
        f"multiplies one matrix after the other and always in bfloat16, {reason}."
    )


def steps(rows: Sequence[Row], name: str) -> str:
    """All optimizers on one inventory, fastest first, below the floors of the run."""
    run = [row for row in rows if row["inventory"] == name]
    timed = sorted((row for row in run if "seconds_min" in row), key=_fastest)
    lines = [_step_line(row) for row in timed]
    failed = [f"Not timed: {row['subject']}: {row['failed']}." for row in run if "failed" in row]
    header = (
        "optimizer", "version", "products", "min, ms", "median, ms", "/ NS floor",
        "/ two-product floor", "cosine, mean (worst)", "error",
    )  # fmt: skip
    return "\n\n".join([f"**{name}**. {_floors(run[0])}", table(header, lines), *failed])


def _step_line(row: Row) -> Sequence[Any]:
    return (
        row["subject"],
        row["version"],
        row["products"],
        _ms(row),
        f"{row['seconds_median'] * 1e3:.1f}",
        *_multiples(row),
        f"{row['cosine_mean']:.4f} ({row['cosine_worst']:.3f})",
        f"{row['error']:.0e}" if row["same"] else row["method"],
    )


def _floors(row: Row) -> str:
    parts = [
        f"{dtype}: {row[f'flops_per_second_{dtype}'] / 1e9:.0f} GFLOP/s, Newton-Schulz floor "
        f"{row[f'newton_schulz_floor_{dtype}'] * 1e3:.1f} ms (its products alone, batched: "
        f"{row[f'products_alone_{dtype}'] * 1e3:.1f} ms), two-product floor "
        f"{row[f'two_products_floor_{dtype}'] * 1e3:.1f} ms"
        for dtype in ("float32", "bfloat16")
        if f"flops_per_second_{dtype}" in row
    ]
    return "; ".join(parts) + "."


def _timed(rows: Iterable[Row], name: str) -> list[Row]:
    return [row for row in rows if row["inventory"] == name and "seconds_min" in row]


def _form(row: Row) -> str:
    return row["subject"].split(",")[0]


def _fastest(row: Row) -> float:
    return row["seconds_min"]


def _ms(row: Row) -> str:
    return f"{row['seconds_min'] * 1e3:.1f}"


def _ratio(numerator: float, denominator: float) -> str:
    return f"{numerator / denominator:.2f}"


def _multiples(row: Row) -> list[str]:
    """The time as a multiple of the two floors; nothing where they weren't measured."""
    floors = (row.get(f"{floor}_floor_{row['products']}") for floor in FLOORS)
    return ["" if floor is None else _ratio(row["seconds_min"], floor) for floor in floors]


# ---- overhead ------------------------------------------------------------------------------------


def overhead(rows: Sequence[Row]) -> str:
    """What a step of FMuon takes besides orthogonalising, over a step of AdamW; in milliseconds."""
    lines: list[Sequence[Any]] = []
    for row in rows:
        adamw = row["seconds_adamw"]
        for form in ("FMuon", "FMuon compiled"):
            bare = row[f"seconds_{form}, bare"]
            for method in ("quintic", "auto"):
                step = row[f"seconds_{form}, {method} step"]
                alone = row[f"seconds_{form}, {method} alone"]
                times = (f"{seconds * 1e3:.1f}" for seconds in (step, alone, bare, adamw))
                ratios = _ratio(step - alone, adamw), _ratio(bare, adamw)
                lines.append((row["inventory"], form, method, *times, *ratios))
    header = (
        "inventory", "form", "method", "step, ms", "orthogonalising, ms", "bare step, ms",
        "AdamW, ms", "rest / AdamW", "bare / AdamW",
    )  # fmt: skip
    return table(header, lines)


# ---- compile time --------------------------------------------------------------------------------


def compile_time(rows: Sequence[Row]) -> str:
    """First calls, what compiling takes of them, and the size of the graph, case by case."""
    lines = [
        (
            row["case"],
            row.get("leaves", row["matrices"]),
            row["matrices"],
            row["shapes"],
            f"{row['seconds_cold']:.1f}",
            f"{row['seconds_warm']:.1f}",
            *_compiling(row),
            *(row[count] for count in ("graphs", "nodes", "products", "kernels")),
        )
        for row in rows
    ]
    header = (
        "case", "leaves", "matrices", "shapes", "first call cold, s", "warm, s", "later call, s",
        "compiling cold, s", "warm, s", "graphs", "nodes", "products", "kernels",
    )  # fmt: skip
    return table(header, lines)


def _compiling(row: Row) -> list[str]:
    """What a later call takes, and how much more the first; not in old records."""
    if "seconds_later" not in row:
        return [""] * 3
    later = row["seconds_later"]
    return [f"{t:.1f}" for t in (later, row["seconds_cold"] - later, row["seconds_warm"] - later)]


# ---- memory --------------------------------------------------------------------------------------


def memory(rows: Sequence[Row]) -> str:
    """Steady and peak bytes, and the peak against that of the hand-written loop of its kind."""
    by_hand = {
        (row["inventory"], row["kind"]): row["peak_bytes"]
        for row in rows
        if row["subject"] == "hand-written"
    }
    lines = [
        (
            row["inventory"],
            row["kind"],
            row["subject"],
            f"{row['steady_bytes'] / 2**20:.1f}",
            f"{row['peak_bytes'] / 2**20:.1f}",
            _ratio(row["peak_bytes"], row["steady_bytes"]),
            _ratio(row["peak_bytes"], by_hand[row["inventory"], row["kind"]]),
        )
        for row in rows
    ]
    header = (
        "inventory", "what", "by", "steady, MiB", "peak, MiB", "peak / steady",
        "peak / hand-written peak",
    )  # fmt: skip
    return table(header, lines)


# ---- orthogonalize -------------------------------------------------------------------------------


def orthogonalize(rows: Sequence[Row]) -> str:
    """Times over that of two products, errors by kind of matrix, and what the choice costs."""
    return "\n\n".join([_times(rows), _choices(rows), _qualities(rows)])


def _times(rows: Sequence[Row]) -> str:
    rows = [row for row in rows if row["case"] == "time"]
    names = list(dict.fromkeys(row["method"] for row in rows))
    lines: list[list[Any]] = []
    for shape, group in _grouped(rows, ("stack", "short", "long")).items():
        by_name = {row["method"]: row for row in group}
        ratios = [
            _ratio(by_name[name]["seconds_min"], by_name[name]["floor"]) if name in by_name else ""
            for name in names
        ]
        first = group[0]
        rate = 4 * first["stack"] * first["short"] ** 2 * first["long"] / first["floor"]
        held = "*" if first["split"] == "held out" else ""
        lines.append([" x ".join(map(str, shape)) + held, f"{rate / 1e9:.0f}", *ratios])
    return table(("stack x short x long", "two products, GFLOP/s", *names), lines)


def _choices(rows: Sequence[Row]) -> str:
    """The worst times of the choice over that of the quintic, and over the best of its rivals."""
    lines: list[list[Any]] = []
    for split in ("calibration", "held out"):
        for choice, rivals in RIVALS.items():
            over_first, over_best = [], []
            mine = [row for row in rows if row["case"] == "time" and row["split"] == split]
            for group in _grouped(mine, ("stack", "short", "long")).values():
                seconds = {row["method"]: row["seconds_min"] for row in group}
                over_first.append(seconds[choice] / seconds[rivals[0]])
                over_best.append(seconds[choice] / min(seconds[name] for name in rivals))
            if over_first:
                worst = [f"{max(ratios):.2f}" for ratios in (over_first, over_best)]
                means = [f"{_mean(ratios):.2f}" for ratios in (over_first, over_best)]
                lines.append([choice, split, means[0], worst[0], means[1], worst[1]])
    header = (
        "choice", "shapes", "over its quintic", "at worst", "over the best method", "at worst",
    )  # fmt: skip
    return table(header, lines)


# A choice -> the methods that it is among, the iteration in its standard form first.
RIVALS = {
    "auto, ns5": ("quintic", "quintic, Gram", "Zolotarev, 2 poles"),
    "auto, high": ("Polar Express", "Polar Express, Gram", "Zolotarev, 3 poles"),
}


def _qualities(rows: Sequence[Row]) -> str:
    """Largest and rms error of singular values above 1e-3, and the cosine to the factor."""
    rows = [row for row in rows if row["case"] == "quality"]
    names = list(dict.fromkeys(row["method"] for row in rows))
    lines: list[list[Any]] = []
    for (spectrum,), group in _grouped(rows, ("spectrum",)).items():
        by_name = {row["method"]: row for row in group}
        cells = [
            f"{row['largest']:.2f} {row['rms']:.3f} {row['cosine']:.3f}"
            for row in map(by_name.__getitem__, names)
        ]
        lines.append([spectrum, *cells])
    return table(("largest, rms, cosine", *names), lines)


def _grouped(rows: Iterable[Row], keys: Sequence[str]) -> dict[tuple[Any, ...], list[Row]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


def _mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


# ---- gpu -----------------------------------------------------------------------------------------


def gpu(rows: Sequence[Row]) -> str:
    """What a run on a GPU checked and timed: checks, products, and steps by inventory."""
    checks = [(row["name"], row["result"]) for row in rows if row["case"] == "check"]
    parts = [table(("check", "result"), checks)]
    header = ("matrices", "dtype", "plain, ms", "lower tiles, ms", "plain / lower tiles")
    products = [_product_line(row) for row in rows if row["case"] == "product"]
    if products:
        parts.append(table(header, products))
    steps = [row for row in rows if row["case"] == "step"]
    header = (
        "optimizer", "version", "products", "min, ms", "median, ms", "first call, s", "remarks",
    )  # fmt: skip
    for title in dict.fromkeys(row["title"] for row in steps):
        run = [row for row in steps if row["title"] == title]
        run.sort(key=lambda row: row.get("seconds_min", float("inf")))
        parts.append(f"**{title}**\n\n{table(header, [_gpu_line(row) for row in run])}")
    return "\n\n".join(parts)


def _product_line(row: Row) -> Sequence[Any]:
    if "failed" in row:
        return "{} of {} x {}".format(*row["shape"]), row["dtype"], row["failed"], "", ""
    plain, lower = row["plain"]["seconds_min"], row["lower"]["seconds_min"]
    times = (f"{plain * 1e3:.3f}", f"{lower * 1e3:.3f}", _ratio(plain, lower))
    return "{} of {} x {}".format(*row["shape"]), row["dtype"], *times


def _gpu_line(row: Row) -> Sequence[Any]:
    named = (row["subject"], row["version"] or "", row["products"])
    if "failed" in row:
        return *named, "", "", "", row["failed"]
    times = (f"{row[f'seconds_{which}'] * 1e3:.2f}" for which in ("min", "median"))
    return *named, *times, f"{row['seconds_of_first_call']:.1f}", row["remarks"]


# ---- Markdown ------------------------------------------------------------------------------------


def table(header: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    """Markdown of a header and lines of cells."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


def between(text: str, name: str, content: str) -> str:
    """The page with that content between the markers of that name."""
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    pattern = re.compile(f"{re.escape(start)}.*{re.escape(end)}", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"a page has no {start} ... {end}")
    return pattern.sub(lambda _: f"{start}\n{content}\n{end}", text)


# Name of the markers -> question, what has a latest record of its own, and how it is shown.
TABLES: dict[str, tuple[str, str, Callable[[Sequence[Row]], str]]] = {
    "headline": ("step", "inventory", headline),
    "step": ("step", "inventory", all_steps),
    "overhead": ("overhead", "inventory", overhead),
    "compile_time": ("compile_time", "case", compile_time),
    "memory": ("memory", "inventory", memory),
    "orthogonalize": ("orthogonalize", "case", orthogonalize),
}


if __name__ == "__main__":
    main()
