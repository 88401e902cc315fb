# SPDX-License-Identifier: Apache-2.0
"""FMuon in the Trainer of transformers, by each of the three ways in.

A callback keeps the gradients that the Trainer gave the optimizer; the functional core, with labels
written down here by hand, makes the same weights of them.
"""

import math
import os

import pytest
import torch
from torch.testing import assert_close

import fmuon

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_DATASETS_OFFLINE="1")
pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
transformers = pytest.importorskip("transformers", reason="needs transformers")

STEPS, WARMUP, RATE, DECAY, CLIP = 6, 2, 0.02, 0.1, 0.5
KERNELS = ("c_attn.weight", "c_fc.weight", "c_proj.weight")
EMBEDDINGS = ("transformer.wte.weight", "transformer.wpe.weight")


@pytest.fixture(autouse=True)
def one_thread():
    """Two threads of a busy machine wait longer for each other than a model this small takes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def gpt2(dtype=torch.float32, seed=0, tied=True):
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=64,
        n_positions=8,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=tied,
    )
    return transformers.GPT2LMHeadModel(config).to(dtype)


def samples():
    tokens = torch.randint(64, (64, 8), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]


class Recorder(transformers.TrainerCallback):
    """What the Trainer's optimizer saw and did at every step."""

    def __init__(self):
        self.grads, self.rates, self.weights = [], [], []
        self.substeps = 0

    def on_train_begin(self, args, state, control, model, **kwargs):
        self.weights.append(weights(model))

    def on_substep_end(self, args, state, control, **kwargs):
        self.substeps += 1

    def on_pre_optimizer_step(self, args, state, control, model, optimizer, **kwargs):
        self.grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
        self.rates.append([float(group["lr"]) for group in optimizer.param_groups])

    def on_optimizer_step(self, args, state, control, model, **kwargs):
        self.weights.append(weights(model))


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def pair(model, **options):
    """Route 1: a finished optimizer and its scheduler."""
    optimizer = fmuon.FMuon(model, weight_decay=DECAY, **options)
    scheduler = transformers.get_cosine_schedule_with_warmup(optimizer, WARMUP, STEPS)
    return {"optimizers": (optimizer, scheduler)}


def by_class(model, **options):
    """Route 2: the class, which the Trainer gives two groups without names."""
    return {"optimizer_cls_and_kwargs": (fmuon.FMuon, options)}


def factory(model, **options):
    """Route 3: a factory, which the Trainer gives the model."""
    options = {"weight_decay": DECAY, **options}
    return {"optimizer_cls_and_kwargs": (fmuon.interop.HFFactory, options)}


def make(folder, route, model, lr=RATE, save=False, **options):
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_grad_norm=CLIP,
        learning_rate=123.0,  # what counts is the optimizer's own
        weight_decay=DECAY,
        lr_scheduler_type="cosine",
        warmup_steps=WARMUP,
        logging_steps=1,
        save_strategy="steps" if save else "no",
        save_steps=3,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=samples(),
        callbacks=[Recorder()],
        **route(model, lr=lr, **options),
    )
    if route is by_class:
        with pytest.warns(UserWarning, match="pass the model"):
            trainer.create_optimizer()
    return trainer


def recorder(trainer):
    return next(c for c in trainer.callback_handler.callbacks if isinstance(c, Recorder))


def optimizer_of(trainer):
    """The FMuon inside accelerate's wrapper."""
    optimizer = trainer.optimizer.optimizer
    assert type(optimizer) is fmuon.FMuon
    return optimizer


def state_of(trainer):
    """Name -> what the optimizer keeps of that parameter."""
    optimizer = optimizer_of(trainer)
    return {name: optimizer.state[p] for name, p in trainer.model.named_parameters()}


def replayed(trainer, labels, weight_decay=DECAY, **options):
    """The weights that the functional core makes of the Trainer's gradients and rates."""
    record = recorder(trainer)
    opt = fmuon.muon(labels=labels, **options)
    params = record.weights[0]
    state = opt.init(params)
    for step, (grads, rates) in enumerate(zip(record.grads, record.rates, strict=True)):
        assert len(set(rates)) == 1
        updates, state = opt.update(
            grads, state, step, params, lr=rates[0], weight_decay=weight_decay
        )
        params = fmuon.apply_updates(params, updates)
    return params


def labelled(model, view, also=()):
    """Every parameter's label: `view` for the kernels of the layers and for those in `also`."""
    return {
        name: view if name.endswith(KERNELS) or name in also else "auxiliary"
        for name, _ in model.named_parameters()
    }


def assert_same_bits(a, b):
    assert_close(a, b, rtol=0, atol=0)


def cosine(step):
    if step < WARMUP:
        return RATE * step / WARMUP
    return RATE * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


def assert_trained(trainer, matrices):
    """Six steps of two micro-batches, clipped, at the rates of the schedule, by the right rules."""
    record = recorder(trainer)
    assert (len(record.grads), record.substeps) == (STEPS, STEPS)
    logs = [row for row in trainer.state.log_history if "grad_norm" in row]
    assert [row["learning_rate"] for row in logs] == pytest.approx(
        [cosine(step) for step in range(STEPS)], rel=1e-6
    )
    norms = [fmuon.global_norm(grads).item() for grads in record.grads]
    # The Trainer logs the norm before it clips.
    assert all(row["grad_norm"] > CLIP for row in logs) and max(norms) <= CLIP * 1.001
    state = state_of(trainer)
    found = {name for name, kept in state.items() if "momentum_buffer" in kept}
    assert found == matrices
    assert all("exp_avg" in state[name] for name in state.keys() - matrices)
    # The first step of a warm-up has the rate 0: it moves nothing and counts.
    assert all(kept["step"] == STEPS for kept in state.values())
    assert_same_bits(record.weights[1], record.weights[0])
    assert not any(
        torch.equal(record.weights[0][n], p) for n, p in trainer.model.named_parameters()
    )


def kernels_of(model):
    return {name for name, _ in model.named_parameters() if name.endswith(KERNELS)}


# ---- the ways in ---------------------------------------------------------------------------------


def test_an_optimizer_and_its_scheduler_train_as_the_core_does(tmp_path):
    trainer = make(tmp_path, pair, gpt2())
    trainer.train()
    assert_trained(trainer, kernels_of(trainer.model))
    expected = replayed(trainer, labelled(trainer.model, fmuon.Matrix(1, 0)))
    assert_same_bits(weights(trainer.model), expected)


def test_the_class_gets_no_names_and_trains_every_2d_parameter_by_muon(tmp_path):
    trainer = make(tmp_path, by_class, gpt2())
    trainer.train()
    groups = optimizer_of(trainer).param_groups
    assert all("param_names" not in group for group in groups)
    assert [set(group["rules"]) for group in groups] == [{"muon"}, {"auxiliary"}]
    assert [group["weight_decay"] for group in groups] == [DECAY, 0.0]
    assert_trained(trainer, kernels_of(trainer.model) | set(EMBEDDINGS))
    # Nothing tells a Conv1D from a Linear here: its (in, out) kernel is taken for (out, in).
    labels = labelled(trainer.model, fmuon.Matrix(0, 1), also=EMBEDDINGS)
    decay = {name: 0.0 if label == "auxiliary" else DECAY for name, label in labels.items()}
    assert_same_bits(weights(trainer.model), replayed(trainer, labels, weight_decay=decay))


@pytest.mark.parametrize(("route", "rule"), [(by_class, "muon"), (factory, "auxiliary")])
def test_only_the_factory_knows_an_output_head_that_is_not_tied(tmp_path, route, rule):
    model = gpt2(tied=False)
    trainer = make(tmp_path, route, model)
    groups = trainer.create_optimizer().param_groups
    rules = {
        id(p): rule
        for group in groups
        for p, rule in zip(group["params"], group["rules"], strict=True)
    }
    assert rules[id(model.lm_head.weight)] == rule


def test_a_callable_keeps_the_embeddings_of_the_class_route_out_of_muon(tmp_path):
    def labels(path, tensor):
        return "auxiliary" if tensor.shape in ((64, 32), (8, 32)) else None

    trainer = make(tmp_path, by_class, gpt2(), labels=labels)
    trainer.train()
    assert_trained(trainer, kernels_of(trainer.model))


def test_the_factory_gets_the_model_and_sees_which_axis_is_the_output(tmp_path):
    trainer = make(tmp_path, factory, gpt2(), scale="original", weight_decay=0.0)
    trainer.train()
    assert_trained(trainer, kernels_of(trainer.model))
    muon, auxiliary = optimizer_of(trainer).param_groups
    assert (muon["name"], auxiliary["name"]) == ("muon", "auxiliary")
    assert all((rule["fan_out"], rule["fan_in"]) == (1, 0) for rule in muon["rules"])
    assert set(muon["param_names"]) == kernels_of(trainer.model)
    options = {"scale": "original", "weight_decay": 0.0}
    right = replayed(trainer, labelled(trainer.model, fmuon.Matrix(1, 0)), **options)
    assert_same_bits(weights(trainer.model), right)
    # sqrt(max(1, out / in)): 2 for 32 -> 128, and 1 for 128 -> 32.
    before, after = recorder(trainer).weights[2:4]
    for layer in ("transformer.h.0.mlp.", "transformer.h.1.mlp."):
        wide, narrow = (layer + kernel for kernel in KERNELS[1:])
        ratio = (after[wide] - before[wide]).norm() / (after[narrow] - before[narrow]).norm()
        assert 1.7 < ratio < 2.3


@pytest.mark.parametrize("route", [pair, factory])
def test_a_learning_rate_as_a_tensor_stays_one_and_trains_the_same(tmp_path, route):
    trainer = make(tmp_path, route, gpt2(), lr=torch.tensor(RATE))
    trainer.train()
    assert_trained(trainer, kernels_of(trainer.model))
    rates = [group["lr"] for group in optimizer_of(trainer).param_groups]
    assert all(isinstance(lr, torch.Tensor) and lr.ndim == 0 for lr in rates)
    assert rates[0] is not rates[1]
    assert all(type(row.get("learning_rate", 0.0)) is float for row in trainer.state.log_history)
    expected = replayed(trainer, labelled(trainer.model, fmuon.Matrix(1, 0)))
    assert_same_bits(weights(trainer.model), expected)


# ---- resuming ------------------------------------------------------------------------------------


def largest_difference(one, other):
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


@pytest.mark.parametrize("route", [pair, by_class, factory])
@pytest.mark.parametrize(
    ("dtype", "momentum_dtype", "lr"),
    [
        (torch.float32, torch.float32, RATE),
        (torch.bfloat16, torch.float32, torch.tensor(RATE)),
        (torch.float32, torch.bfloat16, RATE),
    ],
    ids=["float32", "bfloat16 parameters, tensor lr", "bfloat16 momentum"],
)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, route, dtype, momentum_dtype, lr):
    options = {"lr": lr, "save": True, "momentum_dtype": momentum_dtype}
    straight = make(tmp_path, route, gpt2(dtype), **options)
    straight.train()
    resumed = make(tmp_path, route, gpt2(dtype, seed=1), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert len(recorder(resumed).grads) == 3
    assert largest_difference(weights(resumed.model), weights(straight.model)) == 0.0
    assert_same_bits(state_of(resumed), state_of(straight))
    for name, kept in state_of(resumed).items():
        assert kept["step"] == STEPS and kept["step"].dtype == torch.float32
        if name.endswith(KERNELS):
            assert kept["momentum_buffer"].dtype == momentum_dtype
        elif name not in EMBEDDINGS:
            assert kept["exp_avg"].dtype == torch.float32
    logs = [
        [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row]
        for trainer in (straight, resumed)
    ]
    assert logs[0] == logs[1]


def test_resuming_without_the_optimizer_file_is_another_run(tmp_path):
    straight = make(tmp_path, pair, gpt2(), save=True)
    straight.train()
    (tmp_path / "checkpoint-3" / "optimizer.pt").unlink()
    resumed = make(tmp_path, pair, gpt2(seed=1), save=True)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert largest_difference(weights(resumed.model), weights(straight.model)) > 1e-4
