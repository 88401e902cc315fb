# SPDX-License-Identifier: Apache-2.0
"""What README.md and docs/ say is run, and what they take from code and records is taken anew."""

import importlib
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import fmuon
from fmuon.auxiliary import Rule
from fmuon.coefficients import COEFFICIENTS
from fmuon.scaling import SCALES

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs"))

import generate  # noqa: E402

del sys.path[0]  # modules of other tests are called like some of the benchmarks

README = (ROOT / "README.md").read_text()
PAGES = {name: path.read_text() for name, path in generate.pages().items()}
BESIDES = ["CHANGELOG.md", "CONTRIBUTING.md", "examples/README.md"]


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


# ---- pages: `make pages` writes them anew --------------------------------------------------------


@pytest.mark.parametrize("page", [page for page in PAGES if "```python" in PAGES[page]])
def test_the_python_blocks_run_and_print_what_is_shown(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert generate.executed(PAGES[page], page) == PAGES[page]


@pytest.mark.parametrize("page", [page for page in PAGES if "<!-- /" in PAGES[page]])
def test_the_tables_are_those_of_code_and_records(page):
    assert generate.tabulated(PAGES[page]) == PAGES[page]
    assert "Not recorded" not in PAGES[page]


def test_the_drawing_of_the_house_is_that_of_the_floor_plan():
    assert (ROOT / "docs" / "house.svg").read_text() == generate.house.drawn()


@pytest.mark.parametrize(
    ("page", "number"),
    [
        ("docs/walk.md", r"\[\d\.\d{3}(\d), "),
        ("docs/options.md", r"`0\.9(5)`"),
        ("docs/options.md", r"0\.\d\d(\d) to "),
        ("README.md", r"\| \d+\.(\d) \("),
    ],
)
def test_another_number_is_noticed(page, number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = PAGES[page]
    found = re.search(number, text)
    digit = str((int(found.group(1)) + 1) % 10)
    text = text[: found.start(1)] + digit + text[found.end(1) :]
    assert generate.tabulated(text) != text or generate.executed(text, page) != text


def test_blocks_without_a_place_for_what_they_print_are_refused():
    with pytest.raises(SystemExit, match=r"a page: no ```text block for what is printed: 1"):
        generate.executed("```python\nprint(1)\n```\n", "a page")


# ---- equations -----------------------------------------------------------------------------------

CITATION = re.compile(r"\[([A-Z][^\[\]]*?(?:\b(?:1[89]|20)\d\d\b|lgorithm)[^\[\]]*)\]")


def joined(text):
    return " ".join(text.split())


def cited(text):
    return [source for found in CITATION.findall(joined(text)) for source in found.split("; ")]


def equations():
    """(where, source) of every row of the page."""
    rows = re.findall(r"^\| `(fmuon\.[\w.]+)` \| .* \| (.*) \|$", PAGES["docs/equations.md"], re.M)
    return [(where, re.sub(r"^\[(.*)\]\(.*\)$", r"\1", source)) for where, source in rows]


def thing(where):
    """The module, class or function of that name."""
    module, _, rest = where.removeprefix("fmuon.").partition(".")
    found = importlib.import_module(f"fmuon.{module}")
    for name in filter(None, rest.split(".")):
        found = getattr(found, name)
    return found


def test_every_citation_in_the_code_is_on_the_page():
    sources = (path.read_text() for path in Path(fmuon.__file__).parent.glob("*.py"))
    in_code = Counter(citation for source in sources for citation in cited(source))
    assert Counter(source for _, source in equations()) == in_code


def test_every_entry_of_the_page_is_found_in_the_docstring_that_it_names():
    assert len(equations()) > 25
    assert [e for e in equations() if e[1] not in cited(thing(e[0]).__doc__)] == []


def test_every_formula_of_a_table_says_where_it_is_from():
    rules = [name for name, f in vars(fmuon).items() if name in fmuon.__all__ and makes_rule(f)]
    assert len(rules) >= 4
    functions = {f"SCALES[{name!r}]": f for name, f in SCALES.items() if name != "none"}
    functions |= {name: getattr(fmuon, name) for name in rules}
    assert [name for name, f in functions.items() if not cited(f.__doc__)] == []
    assert [name for name, family in COEFFICIENTS.items() if "20" not in family.source] == []


def makes_rule(function):
    return getattr(function, "__annotations__", {}).get("return") is Rule


# ---- the site and the links ----------------------------------------------------------------------


def test_every_page_is_in_the_navigation_of_the_site():
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    named = re.findall(r"^ *- [^:#]+: ([\w/.-]+\.md)$", navigation, re.MULTILINE)
    assert len(named) == len(set(named))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= set(named)
    assert [n for n in named if not (ROOT / "docs" / n).exists() and not (ROOT / n).exists()] == []


def test_the_reference_has_every_public_name():
    shown = re.findall(r"^::: fmuon\.(\w+)$", PAGES["docs/reference.md"], re.MULTILINE)
    assert sorted(shown) == fmuon.__all__


def headings(text):
    """The anchors that GitHub and the site give to headings, code blocks left out."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, *BESIDES])
def test_links_and_pictures_exist(page):
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    dead = []
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        if not target.exists() or (anchor and anchor not in headings(target.read_text())):
            dead.append(link)
    assert dead == []


# ---- figures and commands ------------------------------------------------------------------------


def test_the_figures_are_those_of_the_committed_run():
    results = json.loads((ROOT / "examples" / "results" / "curves.json").read_text())["results"]
    final, steps = "final validation loss (nats per byte)", "steps to the final loss of AdamW"
    text = " ".join(README.split())
    muon, adamw = results["muon"], results["adamw"]
    assert f"a validation loss of {muon[final]:.3f} nats per byte with Muon" in text
    assert f"and {adamw[final]:.3f} with AdamW" in text
    assert f"Muon reaches after {muon[steps]} steps" in text


def test_the_losses_by_storage_are_those_of_the_committed_run():
    record = json.loads((ROOT / "examples" / "results" / "storage.json").read_text())
    finals = [
        sum(list(losses.values())[-1] for losses in seeds) / len(seeds)
        for seeds in record["validation_loss"].values()
    ]
    page = PAGES["docs/low-bit.md"]
    rows = re.findall(r"\| (\d\.\d{4}) \| ([+-]\d\.\d{4}) \|", page)
    assert rows == [(f"{final:.4f}", f"{final - finals[0]:+.4f}") for final in finals]
    # int8 beside float32, pairs of one seed.
    assert abs(finals[1] - finals[0]) <= 0.01
    methods = json.loads((ROOT / "examples" / "results" / "methods.json").read_text())
    one, other = (
        sum(list(losses.values())[-1] for losses in methods["validation_loss"][name]) / 3
        for name in ("quintic", "quintic, Gram")
    )
    assert f"differs by {other - one:.3f}:" in joined(page)


def test_the_tables_of_the_evidence_are_those_of_the_committed_records(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "evidence"))
    import page

    text = page.PAGE.read_text()
    assert page.rendered(text) == text
    for name, block in page.BLOCKS.items():
        assert f"<!-- {name} -->\n{block()}\n<!-- end -->" in text
    titles = {record["title"] for record in page.read_tasks().values()}
    assert len(titles) == len(page.NAMES) and all(f"| {title} |" in text for title in titles)
    # What stands outside of the tables names no numbers of its own.
    prose = re.sub(
        r"<!-- \w+ -->.*?<!-- end -->|^```.*?^```|\([^)]*\)", "", text, flags=re.S | re.M
    )
    assert re.findall(r"\d\.\d|\d%", prose) == []


def test_the_pictures_of_the_evidence_are_small():
    for picture in (ROOT / "examples" / "results" / "evidence").glob("*.png"):
        assert picture.stat().st_size < 300_000


def test_the_commands_are_targets_that_set_themselves_up():
    makefile = (ROOT / "Makefile").read_text()
    commands = [block.strip() for block in blocks("sh")]
    assert commands == ["make demo", "make test"]
    for command in commands:
        target = command.split()[1]
        assert re.search(rf"^{target}: \.venv/\w+ ", makefile, re.MULTILINE)
    assert "make test" in (ROOT / ".ci" / "run").read_text().splitlines()


def test_the_table_of_ranks_is_what_its_benchmark_prints():
    command = [sys.executable, ROOT / "benchmarks" / "ranks.py"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert printed.strip() in (ROOT / "benchmarks" / "README.md").read_text()


def test_every_public_name_has_a_docstring():
    assert [name for name in fmuon.__all__ if not getattr(fmuon, name).__doc__] == []


def test_the_changelog_has_the_current_version_or_unreleased_changes():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert "## [Unreleased]" in changelog or f"## [{fmuon.__version__}]" in changelog


def test_the_citation_file_has_the_current_version():
    assert f"\nversion: {fmuon.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_public_workflow_runs_what_a_change_must_pass_with_pinned_versions():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert "- run: .ci/run\n" in workflow
    uses = re.findall(r"uses: (\S+)", workflow)
    assert uses
    assert [action for action in uses if not re.search(r"@v\d+\.\d+\.\d+$", action)] == []
    assert "-latest" not in workflow
    assert {"make check", "make docs", "make test"} <= set(
        (ROOT / ".ci/run").read_text().splitlines()
    )
