# SPDX-License-Identifier: Apache-2.0
"""What README.md says is run."""

import json
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import fmuon

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def test_the_python_blocks_run_and_print_what_is_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    printed = []
    for block in blocks("python"):
        # A module of its own: torch.compile looks a function's globals up in its module.
        module = types.ModuleType("readme")
        monkeypatch.setitem(sys.modules, "readme", module)
        exec(compile(block, "README.md", "exec"), module.__dict__)
        printed.append(capsys.readouterr().out.strip())
    assert [text for text in printed if text] == [text.strip() for text in blocks("text")]


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
    rows = re.findall(r"\| (\d\.\d{4}) \| ([+-]\d\.\d{4}) \|", README)
    assert rows == [(f"{final:.4f}", f"{final - finals[0]:+.4f}") for final in finals]
    # int8 beside float32, pairs of one seed.
    assert abs(finals[1] - finals[0]) <= 0.01
    methods = json.loads((ROOT / "examples" / "results" / "methods.json").read_text())
    one, other = (
        sum(list(losses.values())[-1] for losses in methods["validation_loss"][name]) / 3
        for name in ("quintic", "quintic, Gram")
    )
    assert f"differs by {other - one:.3f}:" in " ".join(README.split())


@pytest.mark.parametrize("page", ["README.md", "benchmarks/README.md"])
def test_the_tables_are_those_of_the_committed_records(page, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import tables

    text = (ROOT / page).read_text()
    assert tables.rendered(text) == text
    assert "Not recorded" not in text


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


def test_the_pictures_and_links_of_the_evidence_exist():
    page = ROOT / "docs" / "evidence.md"
    targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []
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


def test_links_and_pictures_exist():
    targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_every_public_name_has_a_docstring():
    assert [name for name in fmuon.__all__ if not getattr(fmuon, name).__doc__] == []


def test_the_changelog_has_the_current_version_or_unreleased_changes():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert "## [Unreleased]" in changelog or f"## [{fmuon.__version__}]" in changelog
