# SPDX-License-Identifier: Apache-2.0
"""Tables of what the package has: a table of the code -> a table of a page."""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fmuon
from fmuon import (
    auxiliary,
    balance,
    coefficients,
    decay,
    methods,
    metrics,
    orthogonalize,
    planning,
    presets,
    scaling,
    second_moment,
)

PACKAGE = Path(fmuon.__file__).parent


def table(header: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    """Markdown; cells may hold what Markdown would read as the end of a cell."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(map(_cell, row)) + " |" for row in rows)


def _cell(content: Any) -> str:
    """Outside of code "<" would start a tag, and "*" and "_" might be read as emphasis."""
    parts = str(content).replace("|", "\\|").split("`")
    for i in range(0, len(parts), 2):
        parts[i] = parts[i].replace("<", "&lt;").replace("*", "\\*")
    return "`".join(parts)


def code(text: Any) -> str:
    """As code; nothing where there is nothing."""
    return f"`{text}`" if str(text) else ""


def summary(thing: Any) -> str:
    """The first sentence of a docstring, without the paper it cites."""
    first = _joined((inspect.getdoc(thing) or "").split("\n\n")[0])
    return re.sub(r"\s*\[[^\]]*\]", "", first)


def _joined(text: str) -> str:
    return " ".join(text.split())


# ---- options of muon -----------------------------------------------------------------------------


def options() -> str:
    """Every option of `muon` with its default and what its docstring says."""
    defaults = _defaults(fmuon.muon)
    said = arguments(fmuon.muon)
    assert said.keys() == defaults.keys(), said.keys() ^ defaults.keys()
    lines = [(code(name), code(default), said[name]) for name, default in defaults.items()]
    return table(("option", "default", "what it does"), lines)


def _defaults(function: Callable[..., Any]) -> dict[str, str]:
    """Argument -> its default as it is written."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    positional = tree.args.args
    padded = [None] * (len(positional) - len(tree.args.defaults)) + tree.args.defaults
    pairs = [*zip(positional, padded, strict=True)]
    pairs += [*zip(tree.args.kwonlyargs, tree.args.kw_defaults, strict=True)]
    return {a.arg: "" if d is None else ast.unparse(d).replace("'", '"') for a, d in pairs}


def arguments(thing: Any) -> dict[str, str]:
    """Argument -> what the section Args of a docstring says of it."""
    section = re.search(r"^Args:\n((?:    .*\n|\n)+)", f"{inspect.getdoc(thing)}\n", re.MULTILINE)
    assert section is not None
    found = re.findall(
        r"^    (\w+(?:, \w+)*): (.*\n(?:     .*\n|\n)*)", section.group(1), re.MULTILINE
    )
    return {name: _joined(text) for names, text in found for name in names.split(", ")}


def values() -> str:
    """The names that options of `muon` take, by the table that holds them."""
    tables = {
        "orthogonalize": methods.METHODS,
        "equilibrate": balance.EQUILIBRATIONS,
        "renormalize": balance.RENORMALIZATIONS,
        "second_moment": second_moment.SECOND_MOMENTS,
        "scale": scaling.SCALES,
        "decay": decay.DECAYS,
        "metrics": metrics.METRICS,
        "missing": planning.MISSING,
        "nonfinite": planning.NONFINITE,
    }
    lines = [(code(option), ", ".join(code(f'"{n}"') for n in t)) for option, t in tables.items()]
    return table(("option", "names"), lines)


# ---- rows of the tables of the package -----------------------------------------------------------


def coefficient_sets() -> str:
    """Every coefficient set, and what it makes of singular values."""
    lines: list[Sequence[Any]] = []
    for name, family in coefficients.COEFFICIENTS.items():
        values = [family.response(10 ** (-2 * i / 400)) for i in range(401)]
        more = "yes" if family.tail == "repeat" else "no"
        band = f"{min(values):.3f} to {max(values):.3f}"
        slope = f"{family.response(1e-9) / 1e-9:.0f}"
        lines.append((code(name), family.default_steps, more, band, slope, family.source))
    header = ("name", "steps", "more steps", "[0.01, 1] ends in", "slope at 0", "source")
    return table(header, lines)


SIDES = ((768, 768), (3072, 768), (768, 3072), (64, 288))


def scales() -> str:
    """Every scale rule, with its values for some (fan_out, fan_in)."""
    lines = [
        (code(name), summary(rule).rstrip("."), *(f"{rule(*sides):.4g}" for sides in SIDES))
        for name, rule in scaling.SCALES.items()
    ]
    return table(("name", "multiplier", *(f"{m} x {n}" for m, n in SIDES)), lines)


def orthogonalisers() -> str:
    """Every method, and its flops for a matrix of 1024 x 1024 and of 1024 x 4096."""
    lines: list[Sequence[Any]] = []
    for name, make in methods.METHODS.items():
        method = make()
        flops = [f"{method.work(1024, n).flops / 1e9:.1f}" for n in (1024, 4096)]
        lines.append((code(name), code(type(method).__name__), summary(type(method)), *flops))
    header = ("name", "class", "what it is", "Gflop, 1024 x 1024", "Gflop, 1024 x 4096")
    return table(header, lines)


def normalizations() -> str:
    """Every divisor that bounds the singular values before the iteration."""
    lines = [
        (code(name), summary(row.measure).rstrip("."))
        for name, row in orthogonalize.NORMALIZATIONS.items()
    ]
    return table(("name", "divisor"), lines)


def _rule_makers() -> Iterator[tuple[str, Callable[..., auxiliary.Rule]]]:
    for name, function in vars(auxiliary).items():
        own = inspect.isfunction(function) and function.__module__ == auxiliary.__name__
        if own and not name.startswith("_") and name in fmuon.__all__:
            yield name, function


def rules() -> str:
    """Every auxiliary rule, with what it keeps per leaf and its own defaults."""
    lines: list[Sequence[Any]] = []
    for name, make in _rule_makers():
        own = ", ".join(f"{key}={value}" for key, value in _defaults(make).items())
        kept = ", ".join(map(code, make().slots)) or "nothing"
        lines.append((code(name), summary(make).rstrip("."), kept, code(own)))
    return table(("name", "direction D", "keeps", "arguments"), lines)


def metric_rows() -> str:
    """Every metric and what it is taken from."""
    said = _row_comments(metrics, "METRICS")
    lines = [
        (code(name), said[name], row.source, "yes" if row.needs_params else "no")
        for name, row in metrics.METRICS.items()
    ]
    return table(("name", "what it is", "taken from the", "needs `params`"), lines)


def _row_comments(module: Any, name: str) -> dict[str, str]:
    """The comment above each row of a dict, by the position of the row."""
    source = inspect.getsource(module)
    body = source[source.index(f"\n{name}:") :]
    body = body[: body.index("\n}")]
    comments = [_joined(text.replace("#", " ")) for text in re.findall(r"(?:\n    #.*)+", body)]
    return dict(zip(getattr(module, name), (c.rstrip(".") for c in comments), strict=True))


def preset_rows() -> str:
    """Every preset: what it stands for, and the arguments of its own."""
    lines: list[Sequence[Any]] = []
    for name, preset in presets.PRESETS.items():
        own = [key for key in inspect.signature(preset.row).parameters if key != "params"]
        lines.append((code(name), preset.source, ", ".join(map(code, own))))
    return table(("preset", "stands for", "its arguments"), lines)


def preset_values() -> str:
    """What every preset with its defaults says of the options of `muon`."""
    shown = ("lr", "momentum", "nesterov", "bias_correction", "weight_decay", "scale", "missing")
    defaults = {name: p.default for name, p in inspect.signature(fmuon.muon).parameters.items()}
    lines: list[Sequence[Any]] = []
    for name, preset in presets.PRESETS.items():
        if "params" in inspect.signature(preset.row).parameters:
            continue
        values = defaults | preset.values()
        method, rule = values["orthogonalize"], values["auxiliary"]
        guard = f"{method}, norm {method.norm}, eps {method.eps:.1g}"
        others = [
            code(f"{key}={values[key]!r}".replace("'", '"'))
            for key in ("decay", "equilibrate", "renormalize", "second_moment")
            if values[key] != defaults[key]
        ]
        own = (guard, str(rule), ", ".join(others))
        lines.append((code(name), *(code(values[key]) for key in shown), *own))
    return table(("preset", *shown, "orthogonalize", "auxiliary", "variants"), lines)


def modules() -> str:
    """The floor plan, the top floor first."""
    rows = re.findall(r"^(\d+) \| (\w+) \| (.+)$", fmuon.__doc__ or "", re.MULTILINE)
    lines = [(floor, code(name), job) for floor, name, job in reversed(rows)]
    return table(("floor", "module", "job"), lines)


def reference() -> str:
    """What mkdocstrings makes a page of: every public name under the module that defines it."""
    parts: list[str] = []
    rows = re.findall(r"^\d+ \| (\w+) \| (.+)$", fmuon.__doc__ or "", re.MULTILINE)
    public = {name: getattr(fmuon, name) for name in fmuon.__all__}
    for module, job in reversed(rows):
        names = [n for n, thing in public.items() if _home(thing) == f"fmuon.{module}"]
        if names:
            parts.append(f"## {module}\n\n{job[0].upper()}{job[1:]}.")
            parts += [f"::: fmuon.{name}" for name in names]
    return "\n\n".join(parts)


def _home(thing: Any) -> str:
    return thing.__name__ if inspect.ismodule(thing) else thing.__module__


# ---- citations -----------------------------------------------------------------------------------

_CITATION = re.compile(r"\[([A-Z][^\[\]]*(?:\b(?:1[89]|20)\d\d\b|lgorithm)[^\[\]]*)\]")
_LINKS = (
    (re.compile(r"arXiv (\d{4}\.\d{4,5})"), r"https://arxiv.org/abs/\1"),
    (re.compile(r"((?:kellerjordan|leloykun|jeremybernste)\.\S+?)(?=,|$| )"), r"https://\1"),
    (re.compile(r"(Dao-AILab/[\w-]+)"), r"https://github.com/\1"),
)


def citations() -> list[tuple[str, str, str]]:
    """(name of module, class or function, what it says, source), in the order of the floors."""
    found: list[tuple[str, str, str]] = []
    for name in re.findall(r"^\d+ \| (\w+) \|", fmuon.__doc__ or "", re.MULTILINE):
        tree = ast.parse((PACKAGE / f"{name}.py").read_text())
        for where, doc in _docstrings(tree, f"fmuon.{name}"):
            found += [(where, said, source) for said, source in _cited(doc)]
    return found


def _docstrings(node: ast.AST, where: str) -> Iterator[tuple[str, str]]:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    if isinstance(node, kinds) and (doc := ast.get_docstring(node)):
        yield where, doc
    for child in ast.iter_child_nodes(node):
        own = isinstance(child, ast.ClassDef | ast.FunctionDef)
        yield from _docstrings(child, f"{where}.{child.name}" if own else where)


def _cited(doc: str) -> Iterator[tuple[str, str]]:
    """(what is said, source) of every citation in a docstring."""
    paragraphs = [
        _joined(part) for part in re.split(r"\n\s*\n|\n(?=    \w+: )", doc) if part.strip()
    ]
    for i, paragraph in enumerate(paragraphs):
        for match in _CITATION.finditer(paragraph):
            said = _sentence(paragraph, match.start(), match.end())
            # A citation that stands alone belongs to what was said before it.
            said = said or _CITATION.sub("", paragraphs[i - 1]).strip()
            for source in match.group(1).split("; "):
                yield said, source


def _sentence(paragraph: str, start: int, end: int) -> str:
    before = _CITATION.sub("", paragraph[:start])
    if before.rstrip().endswith(".") and not before.rstrip().endswith("eq."):
        # Behind its sentence.
        before = before.rstrip()[:-1]
        sentence = before[before.rfind(". ") + 1 :]
        return f"{sentence.strip()}."
    after = _CITATION.sub("", paragraph[end:])
    stop = re.search(r"\.(?: |$)", after)
    after = after[: stop.end()] if stop else after
    sentence = before[before.rfind(". ") + 1 :].strip() + after.rstrip()
    return sentence.strip() if re.search(r"\w", sentence) else ""


def equations() -> str:
    """Every formula that cites where it is from."""
    lines = [(code(where), said, _linked(source)) for where, said, source in citations()]
    return table(("where", "what is said there", "source"), lines)


def _linked(source: str) -> str:
    for pattern, target in _LINKS:
        if match := pattern.search(source):
            return f"[{source}]({match.expand(target)})"
    return source


TABLES: dict[str, Callable[[], str]] = {
    "options": options,
    "values": values,
    "coefficients": coefficient_sets,
    "scale rules": scales,
    "orthogonalisers": orthogonalisers,
    "normalizations": normalizations,
    "rules": rules,
    "metrics": metric_rows,
    "presets": preset_rows,
    "preset values": preset_values,
    "modules": modules,
    "equations": equations,
    "reference": reference,
}
