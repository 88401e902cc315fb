# SPDX-License-Identifier: Apache-2.0
"""torchtitan: a container builds optimizers of named groups and saves them by parameter."""

import copy
import functools
import re
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

import fmuon

needed = functools.partial(
    pytest.importorskip, reason="torchtitan is large: `make test-torchtitan` installs and runs it"
)
components = needed("torchtitan.components.optimizer")
checkpointer = needed("torchtitan.components.checkpointer.dcp")

# Its schedulers warn when they are loaded.
pytestmark = pytest.mark.filterwarnings("ignore:To get the last learning rate:UserWarning")

VOCABULARY = 13


class Container(components.OptimizersContainer):
    """What a user of torchtitan writes: the names of its own optimizers are a fixed list."""

    @dataclass(kw_only=True, slots=True)
    class Config(components.OptimizersContainer.Config):
        pass

    @staticmethod
    def _resolve_optimizer_factory(name):
        own = {"FMuon": fmuon.FMuon, "Muon": torch.optim.Muon}
        if name in own:
            return own[name]
        return components.OptimizersContainer._resolve_optimizer_factory(name)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.w1 = nn.Linear(8, 12)
        self.w2 = nn.Linear(12, 8, bias=False)

    def forward(self, x):
        return x + self.w2(self.w1(self.norm(x)).relu())


class Part(nn.Module):
    """A stage of a pipeline: the layers of those indices, with the ends that belong to it."""

    def __init__(self, *layers, last=1):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, 8) if 0 in layers else None
        self.layers = nn.ModuleDict({str(i): Block() for i in layers})
        self.output = nn.Linear(8, VOCABULARY, bias=False) if last in layers else None

    def forward(self, x):
        x = x if self.tok_embeddings is None else self.tok_embeddings(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.output is None else self.output(x)


MATRICES = r"layers\..*\.w[12]\.weight$"


def group(pattern, name="FMuon", **options):
    return components.ParamGroupConfig(
        pattern=pattern, optimizer_name=name, optimizer_kwargs=options
    )


# One optimizer for both groups, each with a rate of its own.
TWO_GROUPS = [
    group(MATRICES, lr=0.02, weight_decay=0.1, use_muon=True),
    group(r".*", lr=0.005, weight_decay=0.01, use_muon=False),
]
BY_NAME = [group(r".*", lr=0.02, weight_decay=0.1)]
BESIDE_ADAMW = [
    group(MATRICES, lr=0.02, weight_decay=0.1, use_muon=True),
    group(r".*", "AdamW", lr=0.005, weight_decay=0.01),
]
TENSOR_LR = [group(r".*", lr=torch.tensor(0.02), weight_decay=0.1)]
LAYOUTS = {
    "two_groups": TWO_GROUPS,
    "by_name": BY_NAME,
    "beside_adamw": BESIDE_ADAMW,
    "tensor_lr": TENSOR_LR,
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)


class Run:
    """The parts of a model with what the trainer of torchtitan builds around them."""

    def __init__(self, groups=TWO_GROUPS, parts=((0, 1),), implementation="for-loop", **factory):
        torch.manual_seed(0)
        self.parts = [Part(*layers) for layers in parts]
        self.optimizers = Container.Config(
            param_groups=groups,
            implementation=implementation,
            optimizer_factory_kwargs_by_name={"FMuon": factory},
        ).build(model_parts=self.parts)
        self.schedulers = components.LRSchedulersContainer.Config(warmup_steps=2).build(
            optimizers=self.optimizers, training_steps=8
        )

    def backward(self, step):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCABULARY, (2, 7), generator=generator)
        x = tokens[:, :-1]
        for part in self.parts:
            x = part(x)
        cross_entropy(x.flatten(0, 1), tokens[:, 1:].flatten()).backward()

    def train(self, steps, set_to_none=True):
        for step in steps:
            self.optimizers.zero_grad(set_to_none=set_to_none)
            self.backward(step)
            self.optimizers.step()
            self.schedulers.step()
        return self.weights()

    def named(self):
        return {name: p for part in self.parts for name, p in part.named_parameters()}

    def weights(self):
        return {name: p.detach().clone() for name, p in self.named().items()}

    def states(self):
        """Of the parameters that have one."""
        return {
            name: optimizer.state[p]
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for name, p in zip(group["param_names"], group["params"], strict=True)
            if p in optimizer.state
        }

    def counts(self):
        return {name: float(state["step"]) for name, state in self.states().items()}

    def checkpoints(self, folder, async_mode="disabled"):
        config = checkpointer.CheckpointManager.Config(
            enable=True, interval=1, keep_latest_k=0, async_mode=async_mode
        )
        return config.build(
            dataloader=None,
            model_parts=self.parts,
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={},
            sd_adapter=None,
            base_folder=str(folder),
        )


def assert_same_bits(a, b):
    assert_close(a, b, rtol=0, atol=0)


def is_matrix(name):
    return re.search(MATRICES, name) is not None


# ---- building ------------------------------------------------------------------------------------


def test_the_container_builds_it_once_a_subclass_knows_the_name():
    known = components.OptimizersContainer.Config(param_groups=TWO_GROUPS)
    with pytest.raises(NotImplementedError, match="FMuon"):
        known.build(model_parts=[Part(0, 1)])
    run = Run(TWO_GROUPS)
    (optimizer,) = run.optimizers
    assert type(optimizer) is fmuon.FMuon
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.01]
    # A warm-up of two steps begins with half of each group's own rate.
    assert run.schedulers.get_metrics() == {"lr/FMuon/0": 0.01, "lr/FMuon/1": 0.0025}


def test_names_alone_tell_embedding_and_head_from_the_matrices():
    run = Run(BY_NAME)
    run.train(range(1))
    muon = {name for name, state in run.states().items() if "momentum_buffer" in state}
    assert muon == {name for name in run.named() if is_matrix(name)}
    assert len(muon) == 4


# ---- training ------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [TWO_GROUPS, BESIDE_ADAMW])
def test_steps_are_those_of_muon_and_adamw_of_torch(groups):
    run = Run(groups, preset="torch")
    _, others = BESIDE_ADAMW
    pair = Run([group(MATRICES, "Muon", lr=0.02, weight_decay=0.1), others])
    assert [type(optimizer) for optimizer in pair.optimizers] == [
        torch.optim.Muon,
        torch.optim.AdamW,
    ]
    start = run.weights()
    for step in range(3):
        run.backward(step)
        for name, parameter in pair.named().items():
            parameter.grad = run.named()[name].grad.clone()
        for each in (run, pair):
            each.optimizers.step()
            each.schedulers.step()
            each.optimizers.zero_grad()
    theirs = pair.weights()
    for name, ours in run.weights().items():
        if is_matrix(name):
            # Products in bfloat16 on both sides.
            moved = (theirs[name] - start[name]).norm()
            assert (ours - theirs[name]).norm() <= 3e-2 * moved, name
        else:
            assert_close(ours, theirs[name], rtol=1e-6, atol=1e-7)
    for name, state in run.states().items():
        slots = {"momentum_buffer"} if is_matrix(name) else {"exp_avg", "exp_avg_sq"}
        assert {*state} == {*slots, "step"}


@layouts
def test_gradients_of_zeros_instead_of_none_change_nothing(layout):
    kept, freed = Run(LAYOUTS[layout]), Run(LAYOUTS[layout])
    assert_same_bits(kept.train(range(4), set_to_none=False), freed.train(range(4)))
    kept.optimizers.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in kept.named().values())
    assert all(count == 4 for count in kept.counts().values())


def test_a_step_on_zeros_alone_decays_the_momentum_and_the_weights():
    run = Run(BY_NAME)
    start = run.weights()
    for parameter in run.named().values():
        parameter.grad = torch.zeros_like(parameter)
    run.optimizers.step()
    # Half of the rate in the warm-up, times the weight decay.
    assert_close(run.weights(), {name: w * (1 - 0.01 * 0.1) for name, w in start.items()})
    run.train(range(2), set_to_none=False)
    name = "layers.0.w1.weight"
    before = run.states()[name]["momentum_buffer"].clone()
    run.optimizers.zero_grad(set_to_none=False)
    run.optimizers.step()
    assert before.any()
    assert_close(run.states()[name]["momentum_buffer"], 0.95 * before)
    assert run.counts()[name] == 4


# ---- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["for-loop", "fused"])
@pytest.mark.parametrize("layout", ["two_groups", "by_name", "tensor_lr"])
def test_a_run_loaded_from_the_flat_dict_equals_an_uninterrupted_one(layout, implementation):
    run = Run(LAYOUTS[layout], implementation=implementation)
    run.train(range(3))
    saved = copy.deepcopy([run.optimizers.state_dict(), run.schedulers.state_dict()])
    weights = run.weights()
    wanted = run.train(range(3, 6))
    resumed = Run(LAYOUTS[layout], implementation=implementation)
    with torch.no_grad():
        for name, parameter in resumed.named().items():
            parameter.copy_(weights[name])
    resumed.optimizers.load_state_dict(saved[0])
    resumed.schedulers.load_state_dict(saved[1])
    assert all(count == 3 for count in resumed.counts().values())
    assert_same_bits(resumed.train(range(3, 6)), wanted)
    assert resumed.schedulers.get_metrics() == run.schedulers.get_metrics()


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
@layouts
def test_a_run_loaded_by_the_checkpoint_manager_equals_an_uninterrupted_one(
    layout, async_mode, tmp_path, one_process
):
    run = Run(LAYOUTS[layout])
    run.train(range(3))
    manager = run.checkpoints(tmp_path, async_mode)
    assert manager.save(3)
    wanted = run.train(range(3, 6))
    manager.maybe_wait_for_saving()
    resumed = Run(LAYOUTS[layout])
    assert resumed.checkpoints(tmp_path).load(3)
    assert all(count == 3 for count in resumed.counts().values())
    assert_same_bits(resumed.train(range(3, 6)), wanted)


@pytest.mark.parametrize("layout", ["two_groups", "by_name"])
@pytest.mark.parametrize(
    ("before", "after"), [(((0,), (1,)), ((0, 1),)), (((0, 1),), ((0,), (1,)))]
)
def test_a_checkpoint_is_loaded_into_another_split_of_the_pipeline(
    before, after, layout, tmp_path, one_process
):
    run = Run(LAYOUTS[layout], parts=before)
    run.train(range(3))
    run.checkpoints(tmp_path).save(3)
    wanted = run.train(range(3, 6))
    resumed = Run(LAYOUTS[layout], parts=after)
    assert len(resumed.optimizers) != len(run.optimizers)
    assert resumed.checkpoints(tmp_path).load(3)
    assert_same_bits(resumed.train(range(3, 6)), wanted)


@layouts
def test_reading_the_state_before_the_first_step_moves_and_counts_nothing(layout):
    run, undisturbed = Run(LAYOUTS[layout]), Run(LAYOUTS[layout])
    saved = run.optimizers.state_dict()
    assert_same_bits(run.weights(), undisturbed.weights())
    assert all(p.grad is None for p in run.named().values())
    assert {*run.states()} == {*run.named()}
    for name, state in run.states().items():
        # torchtitan makes the state by a step at lr 0, which its own AdamW counts.
        counted = layout == "beside_adamw" and not is_matrix(name)
        assert state["step"] == saved[f"state.{name}.step"] == counted
        assert not any(state[slot].any() for slot in state if slot != "step")
    if layout != "beside_adamw":
        assert_same_bits(run.train(range(3)), undisturbed.train(range(3)))
