# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from expecttest import assert_expected_inline
from strategies import folded, refusal
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fmuon import FMuonError, LeafError, Matrix, explain, label, muon


class Conv1D(nn.Module):
    """Stores its kernel (in, out), as the layer of this name in GPT-2 does."""

    def __init__(self, fan_in, fan_out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(fan_in, fan_out))

    def forward(self, x):
        return x @ self.weight


# ---- modules, by the type of the layer -----------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (nn.Linear(5, 6), Matrix()),
        (nn.Embedding(7, 5), "auxiliary"),
        (nn.EmbeddingBag(7, 5), "auxiliary"),
        (nn.LayerNorm((4, 5)), "auxiliary"),
        (nn.RMSNorm((4, 5)), "auxiliary"),
        (nn.GroupNorm(2, 4), "auxiliary"),
        (nn.BatchNorm2d(4), "auxiliary"),
        (nn.InstanceNorm1d(4, affine=True), "auxiliary"),
        (nn.Conv1d(4, 6, 3), Matrix(0, (1, 2))),
        (nn.Conv2d(4, 6, 3), Matrix(0, (1, 2, 3))),
        (nn.Conv3d(4, 6, 3), Matrix(0, (1, 2, 3, 4))),
        (nn.Conv2d(4, 6, 3, groups=2), Matrix(0, (1, 2, 3), blocks=(3, 3))),
        (nn.Conv1d(4, 4, 3, groups=4), "auxiliary"),
        (nn.Conv1d(4, 8, 3, groups=4), "auxiliary"),
        (nn.Conv2d(8, 4, 3, groups=4), "auxiliary"),
        (nn.ConvTranspose1d(4, 6, 3), Matrix(1, (0, 2))),
        (nn.ConvTranspose2d(4, 6, 3), Matrix(1, (0, 2, 3))),
        (nn.ConvTranspose2d(4, 6, 3, groups=2), Matrix(1, (0, 2, 3), blocks_in=(18, 18))),
        (nn.ConvTranspose1d(4, 4, 3, groups=4), "auxiliary"),
        (Conv1D(5, 6), Matrix(1, 0)),
        (nn.Linear(5, 1), "auxiliary"),
        (nn.Linear(1, 5), "auxiliary"),
        (nn.Conv1d(1, 6, 1), "auxiliary"),
        (nn.Conv2d(4, 1, 3), "auxiliary"),
        (nn.ConvTranspose2d(4, 1, 3), "auxiliary"),
        (nn.PReLU(4), "auxiliary"),
    ],
    ids=lambda case: "matrix" if isinstance(case, Matrix) else str(case),
)
def test_the_weight_of_a_layer(layer, expected):
    assert label(nn.ModuleDict({"layer": layer}))["layer.weight"] == expected


def blocks_of(view, weight):
    """The matrices of a view of a leaf that is no stack."""
    assert view.count == 1
    whole = weight.permute(view.order).reshape(view.fan_out, view.fan_in)
    return [
        block
        for rows in whole.split(list(view.row_blocks), 0)
        for block in rows.split(list(view.column_blocks), 1)
    ]


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(3, 4, bias=False),
        Conv1D(3, 4),
        nn.Conv1d(3, 4, 1, bias=False),
        nn.Conv1d(4, 6, 1, groups=2, bias=False),
        nn.ConvTranspose1d(3, 4, 1, bias=False),
        nn.ConvTranspose1d(4, 6, 1, groups=2, bias=False),
    ],
    ids=str,
)
def test_the_matrices_of_a_layer_are_those_it_multiplies_its_input_by(layer):
    fan_in = getattr(layer, "in_channels", 3)
    # At a single position a convolution with a kernel of 1 is a linear map.
    shape = (1, fan_in, 1) if hasattr(layer, "in_channels") else (1, fan_in)
    applied = torch.autograd.functional.jacobian(lambda x: layer(x).flatten(), torch.randn(shape))
    view = label(layer)["weight"].view("weight", tuple(layer.weight.shape))
    expected = torch.block_diag(*blocks_of(view, layer.weight.detach()))
    torch.testing.assert_close(applied.reshape(-1, fan_in), expected)


def test_attention_gives_a_block_each_to_query_key_and_value():
    attention = nn.MultiheadAttention(8, 2, add_bias_kv=True)
    assert label(attention) == {
        "in_proj_weight": Matrix(blocks=(8, 8, 8)),
        "in_proj_bias": "auxiliary",
        "bias_k": "auxiliary",
        "bias_v": "auxiliary",
        "out_proj.weight": Matrix(),
        "out_proj.bias": "auxiliary",
    }


def test_attention_with_separate_projections_has_three_matrices():
    labels = label(nn.MultiheadAttention(8, 2, kdim=6, vdim=4, bias=False))
    assert set(labels.values()) == {Matrix()} and len(labels) == 4


def test_a_module_named_multihead_attn_is_no_head():
    decoder = nn.TransformerDecoderLayer(8, 2, 16)
    labels = label(decoder)
    assert labels["multihead_attn.in_proj_weight"] == Matrix(blocks=(8, 8, 8))
    assert labels["multihead_attn.out_proj.weight"] == Matrix()


@pytest.mark.parametrize("name", ["head", "lm_head", "classifier", "mlm_head", "HEAD"])
def test_a_linear_layer_named_as_a_head_is_one_at_any_depth(name):
    model = nn.ModuleDict({name: nn.Linear(4, 5), "deep": nn.ModuleDict({name: nn.Linear(4, 5)})})
    assert set(label(model).values()) == {"auxiliary"}


@pytest.mark.parametrize("name", ["headroom", "overhead", "heads_mix", "classifiers"])
def test_a_linear_layer_whose_name_merely_contains_head_is_a_matrix(name):
    assert label(nn.ModuleDict({name: nn.Linear(4, 5)}))[f"{name}.weight"] == Matrix()


def test_output_is_a_head_at_the_top_level_only():
    inner = nn.ModuleDict({"output": nn.Linear(4, 5, bias=False)})
    model = nn.ModuleDict({"attention": inner, "output": nn.Linear(5, 6, bias=False)})
    assert label(model) == {"attention.output.weight": Matrix(), "output.weight": "auxiliary"}


def tied(first, second):
    modules = {"embed": nn.Embedding(7, 4), "project": nn.Linear(4, 7, bias=False)}
    modules["project"].weight = modules["embed"].weight
    return nn.ModuleDict({name: modules[name] for name in (first, second)})


@pytest.mark.parametrize("names", [("embed", "project"), ("project", "embed")])
def test_a_layer_tied_to_an_embedding_is_no_matrix_whichever_comes_first(names):
    assert label(tied(*names)) == {f"{names[0]}.weight": "auxiliary"}


def test_the_reason_names_the_layer_it_is_tied_to():
    (row,) = explain(tied("project", "embed")).rows
    assert (row.path, row.why) == ("project.weight", "tied to 'embed.weight': an embedding")


def test_two_linear_layers_that_share_a_weight_are_one_matrix():
    layer = nn.Linear(4, 4, bias=False)
    assert label(nn.ModuleList([layer, layer])) == {"0.weight": Matrix()}


def test_what_needs_no_gradient_is_frozen():
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 6))
    model[0].requires_grad_(False)
    assert label(model) == {
        "0.weight": "frozen",
        "0.bias": "frozen",
        "1.weight": Matrix(),
        "1.bias": "auxiliary",
    }


class Bare(nn.Module):
    """Parameters that no layer of torch holds."""

    def __init__(self):
        super().__init__()
        self.mixing = nn.Parameter(torch.randn(4, 5))
        self.pos_embed = nn.Parameter(torch.randn(4, 5))
        self.layer_scale = nn.Parameter(torch.ones(4, 1, 1))
        self.gain = nn.Parameter(torch.ones(4))
        self.temperature = nn.Parameter(torch.ones(()))


def test_bare_parameters_go_by_name_and_shape():
    assert label(Bare()) == {
        "mixing": Matrix(),
        "pos_embed": "auxiliary",
        "layer_scale": "auxiliary",
        "gain": "auxiliary",
        "temperature": "auxiliary",
    }


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 5)
        self.experts = nn.Parameter(torch.randn(3, 4, 5))


UNDECLARED = """\
'experts' (3, 4, 5): trained by the auxiliary rule, since 3 and more axes can
mean a stack, a convolution or neither; declare a view in labels=, such as
fmuon.Matrix(1, 2) for a stack or fmuon.Matrix(0, (1, 2, 3)) for a convolution,
or label them 'auxiliary'"""


def test_a_bare_parameter_with_three_axes_is_auxiliary_with_a_warning():
    with pytest.warns(UserWarning) as caught:
        labels = label(Experts())
    assert labels["experts"] == "auxiliary"
    assert [folded(str(warning.message)) for warning in caught] == [UNDECLARED]


# ---- wrappers of modules -------------------------------------------------------------------------


class Model(nn.Module):
    """Needs its unwrapped names: `output` is a head at the top level only."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 5)
        self.output = nn.Linear(5, 6)

    def forward(self, x):
        return self.output(self.body(x))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: torch.compile(model, backend="eager"),
        checkpoint_wrapper,
        nn.DataParallel,
        lambda model: nn.DataParallel(torch.compile(model, backend="eager")),
    ],
    ids=["compile", "checkpoint", "data parallel", "data parallel of compile"],
)
def test_a_wrapped_module_is_routed_as_the_module(wrap):
    assert list(label(wrap(Model())).values()) == list(label(Model()).values())


def test_a_wrapper_inside_the_module_changes_nothing():
    model = Model()
    model.output = checkpoint_wrapper(model.output)
    assert list(label(model).values()) == list(label(Model()).values())


def test_a_submodule_that_happens_to_be_called_module_is_no_wrapper():
    model = nn.ModuleDict({"module": Model()})
    assert label(model)["module.output.weight"] == Matrix()


@pytest.mark.parametrize("key", ["output.weight", "_orig_mod.output.weight", "re:output\\.weight"])
def test_labels_may_name_leaves_of_a_wrapped_module_with_or_without_the_wrapper(key):
    compiled = torch.compile(Model(), backend="eager")
    opt = muon(labels={key: "frozen"})
    state = opt.init(dict(compiled.named_parameters()))
    assert list(state["momentum"]) == ["_orig_mod.body.weight"]


# ---- bare pytrees, by name and shape -------------------------------------------------------------


def gets(params, labels=None):
    """Path -> what the leaf gets."""
    return {row.path: row.gets for row in explain(params, muon(labels=labels)).rows}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("blocks.0.mlp.weight", "muon"),
        ("multihead_attn.weight", "muon"),
        ("headroom.weight", "muon"),
        ("embedded_systems.weight", "muon"),
        ("lm_head.weight", "adamw"),
        ("head", "adamw"),
        ("classifier.weight", "adamw"),
        ("embed.weight", "adamw"),
        ("embed_tokens.weight", "adamw"),
        ("tok_embeddings.weight", "adamw"),
        ("word_embedding", "adamw"),
        ("unembed.W", "adamw"),
        ("transformer.wte.weight", "adamw"),
        ("transformer.wpe.weight", "adamw"),
        ("Embedding.kernel", "adamw"),
    ],
)
def test_a_matrix_without_a_module_is_judged_by_whole_components_of_its_path(path, expected):
    assert gets({path: torch.zeros(4, 5), "other": torch.zeros(4, 5)})[path] == expected


def test_a_nested_tree_is_judged_by_the_same_paths():
    tree = {"embed": [torch.zeros(4, 5)], "layers": [{"w": torch.zeros(4, 5)}]}
    assert gets(tree) == {"embed.0": "adamw", "layers.0.w": "muon"}


@pytest.mark.parametrize("shape", [(), (4,), (1, 4), (4, 1), (4, 1, 1), (1, 1)])
def test_vectors_in_any_disguise_are_auxiliary(shape):
    assert gets({"v": torch.zeros(shape), "w": torch.zeros(4, 5)})["v"] == "adamw"


def test_three_axes_without_a_declared_view_are_auxiliary_with_one_warning():
    params = {"experts": torch.zeros(3, 4, 5), "w": torch.zeros(4, 5)}
    with pytest.warns(UserWarning) as caught:
        state = muon().init(params)
    assert list(state["momentum"]) == ["w"]
    assert [folded(str(warning.message)) for warning in caught] == [UNDECLARED]


@pytest.mark.parametrize("declared", [Matrix(1, 2), "auxiliary", "frozen"])
def test_a_declared_leaf_with_three_axes_gives_no_warning(declared):
    params = {"experts": torch.zeros(3, 4, 5), "w": torch.zeros(4, 5)}
    muon(labels={"experts": declared}).init(params)


# ---- labels --------------------------------------------------------------------------------------

LEAVES = {"a.w": torch.zeros(4, 5), "b.w": torch.zeros(4, 5), "b.bias": torch.zeros(4)}


def test_the_first_label_that_matches_wins():
    labels = {"a.w": "muon", "re:.*w": "auxiliary", "re:b.*": "frozen"}
    assert gets(LEAVES, labels) == {"a.w": "muon", "b.w": "adamw", "b.bias": "frozen"}


def test_a_pattern_has_to_match_the_whole_path():
    labels = {"re:b": "frozen", "re:b.w": "frozen"}
    assert gets(LEAVES, labels) == {"a.w": "muon", "b.w": "frozen", "b.bias": "adamw"}


def test_a_leaf_that_no_label_matches_gets_the_default():
    assert gets(LEAVES, {"a.w": "auxiliary"})["b.w"] == "muon"


def test_a_key_that_matches_no_leaf_is_refused():
    assert_expected_inline(
        refusal(LeafError, muon(labels={"b.bais": "auxiliary"}).init, LEAVES),
        """labels key 'b.bais' matches no leaf; did you mean 'b.bias'?""",
    )


def test_a_pattern_that_matches_no_leaf_is_refused():
    assert_expected_inline(
        refusal(LeafError, muon(labels={"re:c\\..*": "muon"}).init, LEAVES),
        """labels key 're:c\\\\..*' matches no leaf""",
    )


def test_the_key_of_a_frozen_leaf_may_match_nothing():
    assert gets(LEAVES, {"re:teacher.*": "frozen"}) == gets(LEAVES)


def test_a_final_error_makes_the_labels_strict():
    labels = {"re:.*w": "muon", "re:.*": "error"}
    assert_expected_inline(
        refusal(LeafError, muon(labels=labels).init, LEAVES),
        """\
'b.bias' (shape (4,)): labels['re:.*'] says 'error'; add a label for it before
that""",
    )


def test_a_strict_dict_that_covers_everything_is_no_error():
    labels = {"re:.*w": "muon", "re:.*bias": "auxiliary", "re:.*": "error"}
    assert gets(LEAVES, labels) == {"a.w": "muon", "b.w": "muon", "b.bias": "adamw"}


def test_a_callable_sees_paths_and_meta_tensors():
    seen = {}

    def by_shape(path, tensor):
        seen[path] = tensor
        return "muon" if tensor.ndim == 2 else "auxiliary"

    half = {"w": torch.zeros(4, 5, dtype=torch.bfloat16), "b": torch.zeros(4)}
    assert gets(half, by_shape) == {"w": "muon", "b": "adamw"}
    assert {path: (t.device.type, t.shape, t.dtype) for path, t in seen.items()} == {
        "w": ("meta", (4, 5), torch.bfloat16),
        "b": ("meta", (4,), torch.float32),
    }


def test_a_callable_that_returns_none_leaves_it_to_the_default():
    assert gets(LEAVES, lambda path, tensor: None) == gets(LEAVES)


@pytest.mark.parametrize("shape", [(3, 4, 5), (4,)])
def test_muon_for_a_leaf_that_is_no_matrix_is_refused(shape):
    with pytest.raises(LeafError, match="is labelled 'muon' but is not a matrix"):
        muon(labels={"w": "muon"}).init({"w": torch.zeros(shape)})


def test_the_refusal_of_muon_for_a_stack_says_how_to_declare_a_view():
    assert_expected_inline(
        refusal(LeafError, muon(labels={"w": "muon"}).init, {"w": torch.zeros(3, 4, 5)}),
        """\
'w' (shape (3, 4, 5)) is labelled 'muon' but is not a matrix; label it with a
view such as fmuon.Matrix(0, (1, 2, 3)), or 'auxiliary'""",
    )


def test_a_view_that_does_not_fit_its_leaf_is_refused_at_init():
    with pytest.raises(LeafError, match=r"'w': fan_in=2 doesn't fit a leaf of shape \(4, 5\)"):
        muon(labels={"w": Matrix(1, 2)}).init({"w": torch.zeros(4, 5)})


def test_a_pattern_that_is_no_regular_expression_is_refused_when_the_optimizer_is_made():
    with pytest.raises(FMuonError, match=r"re:\("):
        muon(labels={"re:(": "muon"})


def test_an_unknown_label_is_refused_when_the_optimizer_is_made():
    assert_expected_inline(
        refusal(LeafError, muon, labels={"w": "forzen"}),
        """\
labels['w']: unknown label 'forzen'; known: a fmuon.Matrix, 'muon', 'auxiliary',
'frozen', 'error', 'adamw'; did you mean 'frozen'?""",
    )


# ---- no matrices at all --------------------------------------------------------------------------


def test_leaves_without_any_matrix_are_refused():
    params = {"bias": torch.zeros(4)}
    assert_expected_inline(
        refusal(LeafError, muon().init, params),
        """\
no leaf was assigned to Muon (1 auxiliary, 0 frozen); pass the matrices of the
model, or label every leaf if this is meant; print(fmuon.explain(model)) shows
why each leaf got what it has""",
    )


def test_leaves_without_any_matrix_can_still_be_explained():
    assert [row.gets for row in explain({"bias": torch.zeros(4)}).rows] == ["adamw"]


@pytest.mark.parametrize(
    "labels",
    [{"re:.*": "auxiliary"}, {"w": "frozen", "b": "auxiliary"}, lambda path, tensor: "auxiliary"],
    ids=["pattern", "one by one", "callable"],
)
def test_no_matrix_is_fine_where_every_leaf_is_labelled(labels):
    state = muon(labels=labels).init({"w": torch.zeros(4, 5), "b": torch.zeros(4)})
    assert state["momentum"] == {}


def test_no_matrix_is_fine_in_a_bare_list():
    assert muon().init([torch.zeros(4), torch.zeros(5)])["momentum"] == {}
