# SPDX-License-Identifier: Apache-2.0
"""Every comparison of a preset with its peer: what is run, and how far apart the two may end.

The figures of `Case.run` are |ours - theirs| / |theirs - start| of every leaf after 20 steps
(Frobenius norms).

- In "float64" everything is: weights, gradients, states and products, of both. Two orders of the
  same operations end 3e-14 apart at most, so that `FLOAT64` leaves no room for another formula.
- In "float32" ours is compared with theirs in float64, as is their own float32 form
  (`Difference.own`). `FLOAT32` is allowed, and for Polar Express what their own comes to at most
  over a hundred problems of a leaf's shape (`own` in the record): it amplifies a relative error of
  a singular value s by s f'(s) / f(s), 158 times at s = 1, the only one of a single row.

What is compared with their form of the same precision:

- FLOAT32 again where they differ by what their float32 form is.
- BFLOAT16: the products round every entry to 8 bits, 2^-9 relative. Our polynomial is rounded once
  where most peers round it three times, so that entries of the factor differ by a few 2^-8.
- Both round the weights at every step; where these are large and what is added is small, that is
  most of the difference, and `Difference.rounding` is allowed on top.
- For Polar Express one unit of rounding times its amplification (`CONDITION`): 32 times, root mean
  square over s, and 158 times for a single row.
"""

import base64
import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import math
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import problems
import torch
from agreement import Difference, differences, distance, from_exact, run, run_torch, tensors

import fmuon
from fmuon.coefficients import COEFFICIENTS
from fmuon.presets import PRESETS

FLOAT64 = 1e-12
FLOAT32 = 2e-6
BFLOAT16 = 8 * 2**-8
HERE = Path(__file__).parent
SHAPES = problems.MATRICES | problems.OTHERS
ALL = problems.MATRICES | problems.CONVOLUTION | problems.EXPERTS | problems.OTHERS
LR = 1e-2
BOUNDS = {"float64": FLOAT64, "float32": FLOAT32, "bfloat16": BFLOAT16}
# Of weights and gradients, by the dtype of the products.
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.float32}


def condition(name, s):
    """The largest factor by which a relative error of any step's argument reaches the result."""
    family = COEFFICIENTS[name]
    x, arguments, slopes = s / family.norm_safety, [], []
    for a, b, c in family.polynomials():
        arguments.append(x)
        slopes.append(a + 3 * b * x**2 + 5 * c * x**4)
        x = x * (a + b * x**2 + c * x**4)
    return max(abs(x * math.prod(slopes[i:])) for i, x in enumerate(arguments))


POLAR_EXPRESS = "polar_express_nanogpt"
CONDITION = {
    False: math.sqrt(
        np.mean([condition(POLAR_EXPRESS, s) ** 2 for s in np.linspace(0.02, 1, 500)])
    ),
    True: condition(POLAR_EXPRESS, 1.0),
}


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        bound: for all leaves but those that `others` is for.
        others: for leaves that are no matrices.
        by_leaf: name -> bound, where that is larger.
        amplifies: whether rounding in bfloat16 is amplified by Polar Express.
    """

    preset: str
    peer: str
    products: str
    title: str
    bound: float
    run: Callable[[], dict[str, Difference]]
    others: float | None = None
    by_leaf: dict[str, float] = field(default_factory=dict)
    amplifies: bool = False

    @property
    def name(self):
        return f"{self.preset}-{self.title}-{self.products}".replace(" ", "_")

    def allowed(self, leaf, difference):
        bound = self.others if self.others and leaf in problems.OTHERS else self.bound
        bound = max(bound, self.by_leaf.get(leaf, 0))
        if self.amplifies and leaf not in problems.OTHERS:
            single = 1 in problems.MATRICES.get(leaf, ())
            bound += CONDITION[single] * torch.finfo(torch.bfloat16).eps / 2
        return bound + difference.rounding

    def worst(self):
        """(difference, allowed, their own) of the leaf that is nearest to what is allowed."""
        return max(
            ((f.value, self.allowed(leaf, f), f.own) for leaf, f in self.run().items()),
            key=lambda row: row[0] / row[1],
        )


def in_dtype(preset, dtype, **options):
    """The preset with its matrix products in another dtype."""
    method = PRESETS[preset].values(**options)["orthogonalize"]
    return options | {"orthogonalize": dataclasses.replace(method, dtype=dtype)}


def is_matrix(path, leaf):
    """Every leaf of two axes, one of length 1 too."""
    return fmuon.Matrix() if leaf.ndim == 2 else None


# ---- optax ---------------------------------------------------------------------------------------


def dimension_numbers():
    from optax.contrib import MuonDimensionNumbers as Numbers

    conv, experts = Numbers((1, 2, 3), (0,)), Numbers(1, 2)
    others = dict.fromkeys(problems.OTHERS)
    return dict.fromkeys(problems.MATRICES, Numbers()) | others | {"conv": conv, "experts": experts}


OPTAX = {
    "defaults": {},
    "without nesterov": {"nesterov": False},
    "three steps": {"ns_steps": 3, "ns_coeffs": (2.0, -1.5, 0.5)},
    "named coefficients": {"ns_coeffs": "dion"},
    "a table": {"ns_coeffs": ((3.0, -3.2, 1.2),) * 2 + ((1.875, -1.25, 0.375),), "ns_steps": 3},
    "other beta and eps": {"beta": 0.8, "eps": 1e-3},
    "masked decay": {"weight_decay": 0.1, "weight_decay_mask": {k: k != "tall" for k in SHAPES}},
    "adaptive": {"adaptive": True},
    "aol": {"preconditioning": "aol"},
    "schatten": {"preconditioning": "schatten"},
    "spectral": {"preconditioning": "spectral"},
    "consistent rms": {"consistent_rms": 0.2, "weight_decay": 0.1},
    "all of adam": {
        "adam_b1": 0.8, "adam_b2": 0.9, "adam_eps_root": 1e-6, "adam_weight_decay": 0.1,
        "adam_learning_rate": 3e-3,
    },
    "dimension numbers": {"muon_weight_dimension_numbers": dimension_numbers},
    "dimension numbers, adaptive": {
        "muon_weight_dimension_numbers": dimension_numbers, "adaptive": True,
    },
    "dimension numbers, aol": {
        "muon_weight_dimension_numbers": dimension_numbers, "preconditioning": "aol",
    },
}  # fmt: skip


SCHEDULED = {
    "weight_decay": 0.1,
    "lr": lambda count: LR * (count + 1) / 20,
    "adam_learning_rate": lambda count: 1e-3 * count,
}


def optax_options(title):
    options = dict(SCHEDULED if title == "scheduled" else OPTAX[title])
    if numbers := options.get("muon_weight_dimension_numbers"):
        options["muon_weight_dimension_numbers"] = numbers()
    return options.pop("lr", LR), options, ALL if numbers else SHAPES


@functools.cache
def optax_peer(title):
    """Of which jax compiles one update for all spectra."""
    lr, options, shapes = optax_options(title)
    return optax_muon(lr, **options), shapes


@functools.cache
def optax_ends(title, spectrum, dtype):
    import jax

    with jax.enable_x64(True):
        return run_optax(*optax_peer(title), spectrum, dtype=dtype)[0]


def optax_case(title, products, *, spectrum="gaussian"):
    lr, options, shapes = optax_options(title)
    values = in_dtype("optax", products, **options) | {"lr": lr}
    # Torch's integers times a float are float32, those of jax with 64 bits float64.
    values |= {
        k: partial(_of_double, values[k])
        for k in ("lr", "adam_learning_rate")
        if callable(values.get(k))
    }
    ours, _ = run(fmuon.presets.optax(**values), shapes, spectrum=spectrum, dtype=DTYPES[products])
    exact = optax_ends(title, spectrum, "float64")
    theirs = None if products == "float64" else optax_ends(title, spectrum, "float32")
    return from_exact(ours, theirs, exact, tensors(problems.weights(shapes)))


def _of_double(schedule, step):
    return schedule(step.double())


def optax_alone(*, mu_dtype=None, x64=True):
    import jax
    import jax.numpy as jnp

    theirs, ours = {}, {}
    if mu_dtype is not None:
        theirs["mu_dtype"], ours["mu_dtype"] = jnp.bfloat16, torch.bfloat16
    with jax.enable_x64(x64):
        final, _ = run_optax(optax_muon(LR, **theirs), SHAPES)
    params, _ = run(fmuon.presets.optax(LR, **ours), SHAPES)
    return differences(params, final, tensors(problems.weights(SHAPES)))


def optax_muon(lr, **options):
    from optax.contrib import muon

    return muon(lr, **options)


def run_optax(tx, shapes, spectrum="gaussian", steps=range(20), start=None, state=None,
              dtype="float32"):  # fmt: skip
    """(params as torch tensors, state) after the steps of a transformation of optax."""
    import jax
    import jax.numpy as jnp
    import optax

    start = problems.weights(shapes) if start is None else start
    params = {name: jnp.asarray(np.asarray(value, dtype)) for name, value in start.items()}
    state = tx.init(params) if state is None else state
    update = jax.jit(tx.update)
    for step in steps:
        grads = problems.gradients(shapes, step, spectrum).items()
        grads = {name: jnp.asarray(grad, dtype) for name, grad in grads}
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return {name: torch.from_numpy(np.array(value)) for name, value in params.items()}, state


def optax_cases():
    peer = f"optax {importlib.metadata.version('optax')}"
    for products in ("float64", "float32"):
        case, bound = partial(Case, "optax", peer, products), BOUNDS[products]
        for title in OPTAX:
            yield case(title, bound, partial(optax_case, title, products))
            decaying = partial(optax_case, title, products, spectrum="decaying")
            yield case(f"{title}, decaying", bound, decaying)
        yield case("scheduled", bound, partial(optax_case, "scheduled", products))
    case = partial(Case, "optax", peer, "float32")
    # Without 64-bit numbers jax rounds 1 - 0.999^t to 6e-8, a relative error of 6e-5 / t that
    # Adam's root halves: 3e-5 (1 + 1/2 + ... + 1/20) / 20 = 5e-6 over 20 equal steps.
    alone = partial(optax_alone, x64=False)
    yield case("defaults, jax without 64 bits", FLOAT32, alone, others=1e-5)
    # It rounds the decayed momentum and its sum; we round the sum.
    yield case("momentum in bfloat16", BFLOAT16, partial(optax_alone, mu_dtype="bfloat16"))


# ---- muon-optimizer and torch.optim.Muon ---------------------------------------------------------


def patched(module, old, new):
    """A private copy of an installed module with one piece of its source replaced."""
    spec = importlib.util.find_spec(module)
    source = Path(spec.origin).read_text()
    assert old in source, f"{module} has changed: {old!r} is gone"
    copy = types.ModuleType(f"{module}_patched")
    copy.__dict__["__package__"] = spec.parent
    exec(compile(source.replace(old, new), f"<{module}, patched>", "exec"), copy.__dict__)
    return copy


def with_products(products, module, argument):
    """The module with its only cast, of the argument of its iteration, to another dtype."""
    if products == "bfloat16":
        return importlib.import_module(module)
    new = f"{argument}.to(torch.{products}, copy=True)"
    return patched(module, f"{argument}.bfloat16()", new)


def muon_optimizer(products):
    return with_products(products, "muon", "G")


# Its step can't add the update of a convolution to it.
JORDAN_SHAPES = {k: shape for k, shape in ALL.items() if k not in problems.CONVOLUTION}


def jordan_case(products, *, spectrum="gaussian", schedule=None, decay=0.1):
    shapes, dtype = JORDAN_SHAPES, DTYPES[products]

    def theirs(products):
        make = partial(jordan_optimizer, muon_optimizer(products), decay)
        problem = {"spectrum": spectrum, "schedule": schedule, "dtype": DTYPES[products]}
        return run_torch(make, shapes, **problem)[0]

    options = in_dtype("jordan", products, weight_decay=decay, adam_weight_decay=decay)
    params = tensors(problems.weights(shapes), dtype)
    params = {name: torch.nn.Parameter(value) for name, value in params.items()}
    # By its flags, as that optimizer is told.
    groups = [
        {"params": [(n, p) for n, p in params.items() if (n in problems.OTHERS) != use_muon],
         "use_muon": use_muon}
        for use_muon in (True, False)
    ]  # fmt: skip
    ours = fmuon.FMuon(groups, preset="jordan", **options)
    ends = steps_of(ours, params, shapes, spectrum, schedule, dtype)
    return compared(ends, theirs, products, shapes)


def jordan_optimizer(module, decay, params):
    hidden = [p for name, p in params.items() if name not in problems.OTHERS]
    others = [p for name, p in params.items() if name in problems.OTHERS]
    return module.SingleDeviceMuonWithAuxAdam(
        [
            {"params": hidden, "use_muon": True, "lr": 0.02, "weight_decay": decay},
            {"params": others, "use_muon": False, "weight_decay": decay},
        ]
    )


def compared(ours, theirs, products, shapes):
    """Differences of ends; `theirs` runs the other with products in a dtype."""
    start = tensors(problems.weights(shapes))
    if products == "bfloat16":
        return differences(ours, theirs("bfloat16"), start)
    own = None if products == "float64" else theirs(products)
    return from_exact(ours, own, theirs("float64"), start)


def steps_of(optimizer, params, shapes, spectrum, schedule, dtype):
    rates = [group["lr"] for group in optimizer.param_groups]
    for step in range(20):
        for name, grad in tensors(problems.gradients(shapes, step, spectrum), dtype).items():
            params[name].grad = grad
        if schedule is not None:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * schedule(step)
        optimizer.step()
    return {name: p.detach() for name, p in params.items()}


def jordan_cases():
    peer = f"muon-optimizer {importlib.metadata.version('muon-optimizer')}"
    for products, bound in BOUNDS.items():
        case = partial(Case, "jordan", peer, products)
        yield case("decay 0.1", bound, partial(jordan_case, products))
        yield case("scheduled", bound, partial(jordan_case, products, schedule=rising))
        yield case("decaying", bound, partial(jordan_case, products, spectrum="decaying"))


def rising(step):
    return (step + 1) / 20


TORCH = {
    "defaults": {},
    "match_rms_adamw": {"adjust_lr_fn": "match_rms_adamw"},
    "without nesterov": {"nesterov": False, "momentum": 0.9, "weight_decay": 0.0},
    "other coefficients": {"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 7, "eps": 1e-3},
}


def torch_case(options, products, *, spectrum="gaussian", schedule=None):
    shapes = problems.MATRICES

    def theirs(products):
        problem = {"spectrum": spectrum, "schedule": schedule, "dtype": DTYPES[products]}
        return run_torch(partial(torch_muon, products, options), shapes, **problem)[0]

    opt = fmuon.presets.torch(LR, labels=is_matrix, **in_dtype("torch", products, **options))
    rate = None if schedule is None else lambda step: LR * schedule(step)
    ours, _ = run(opt, shapes, spectrum=spectrum, schedule=rate, dtype=DTYPES[products])
    return compared(ours, theirs, products, shapes)


def torch_muon(products, options, params):
    module = with_products(products, "torch.optim._muon", "grad")
    return module.Muon(params.values(), lr=LR, **options)


def torch_in_16_bits():
    """Parameters and momentum too."""
    shapes, dtype = problems.MATRICES, torch.bfloat16
    theirs, _ = run_torch(partial(torch_muon, "bfloat16", {}), shapes, dtype=dtype)
    options = in_dtype("torch", "bfloat16", momentum_dtype=dtype)
    ours, _ = run(fmuon.presets.torch(LR, labels=is_matrix, **options), shapes, dtype=dtype)
    return differences(ours, theirs, tensors(problems.weights(shapes), dtype))


def torch_cases():
    peer = f"torch.optim.Muon {torch.__version__.split('+')[0]}"
    for products, bound in BOUNDS.items():
        case = partial(Case, "torch", peer, products)
        for title, options in TORCH.items():
            yield case(title, bound, partial(torch_case, options, products))
        yield case("scheduled", bound, partial(torch_case, {}, products, schedule=rising))
        yield case("decaying", bound, partial(torch_case, {}, products, spectrum="decaying"))
    yield case("parameters and momentum in bfloat16", BFLOAT16, torch_in_16_bits)


# ---- golden numbers ------------------------------------------------------------------------------


def golden(name):
    return json.loads((HERE / "golden" / f"{name}.json").read_text())


def dion_options(record):
    taken = ("mu", "betas", "weight_decay", "cautious_wd", "epsilon", "nesterov", "adjust_lr")
    options = {name: record["options"][name] for name in taken}
    options |= {k: record["options"][k] for k in ("flatten", "use_polar_express")}
    if record["optimizer"] == "NorMuon":
        options["muon_beta2"] = record["options"]["muon_beta2"]
    return options


def moonlight_options(record):
    return {k: v for k, v in record["options"].items() if k != "lr"}


def normuon_options(record):
    options = record["options"]
    if options.get("use_muon", True):
        return {k: options[k] for k in ("weight_decay", "momentum", "beta2")}
    return {f"adam_{k}": options[k] for k in ("lr", "betas", "eps", "weight_decay")}


# Its second moment is that of the last two axes of a leaf that was orthogonalised as one matrix.
UNLIKE = {("SingleDeviceNorMuon", "conv")}


def golden_ends(preset, record, options, products, shapes):
    """Ours after the steps of a record; `shapes` may be others than the record's."""
    lr = record["options"]["lr"]
    linear = record["schedule"] == "linear"
    values = in_dtype(preset, products, **options)
    views = PRESETS[preset].values(**options).get("labels")

    def labels(path, leaf):
        if (record["optimizer"], path) in UNLIKE:
            return "frozen"
        view = is_matrix(path, leaf) or (views and views(path, leaf))
        return view or "auxiliary"

    ours, _ = run(
        PRESETS[preset](lr, labels=labels, **values), shapes, spectrum=record["spectrum"],
        schedule=(lambda step: lr * rising(step)) if linear else None,
        dtype=DTYPES[products],
    )  # fmt: skip
    return ours


def shapes_of(record):
    return {name: tuple(shape) for name, shape in record["shapes"].items()}


def recorded(record):
    """Where the other ended, as float64: start + change."""
    shapes = shapes_of(record)
    ends = tensors(problems.weights(shapes), torch.float64)
    for name, change in record["change"].items():
        if record["products"] == "float64":
            change = np.frombuffer(base64.b64decode(change), "<f8")
        ends[name] += torch.tensor(np.array(change, np.float64)).reshape(shapes[name])
    return ends


def golden_case(preset, record, exact, options):
    products, shapes = record["products"], shapes_of(record)
    ours = golden_ends(preset, record, options, products, shapes)
    start = tensors(problems.weights(shapes))
    start = {k: w for k, w in start.items() if (record["optimizer"], k) not in UNLIKE}
    if products == "bfloat16":
        return differences(ours, recorded(record), start)
    theirs = None if products == "float64" else recorded(record)
    return from_exact(ours, theirs, recorded(exact), start)


def golden_many(preset, record, options):
    """Leaf -> root mean square of how far ours in float32 is from float64, over as many matrices
    (or stacks) of its shape as `own` in the record is of, all in one leaf."""
    count = 100
    shapes = {
        name: (count, *shape) if len(shape) == 2 else (count * shape[0], *shape[1:])
        for name, shape in shapes_of(record).items()
    }
    near, exact = (golden_ends(preset, record, options, p, shapes) for p in ("float32", "float64"))
    found = {}
    for name, start in tensors(problems.weights(shapes), torch.float64).items():
        parts = (x[name].double().reshape(count, -1) for x in (near, exact))
        squares = [
            distance(ours, other, begin) ** 2
            for ours, other, begin in zip(*parts, start.reshape(count, -1), strict=True)
        ]
        found[name] = math.sqrt(sum(squares) / count)
    return found


def adamuon_options(record):
    return {k: v for k, v in record["options"].items() if k != "lr"}


def nanochat_options(record):
    options = record["options"]
    if options["kind"] == "muon":
        taken = {k: options[k] for k in ("momentum", "ns_steps", "beta2")}
        return taken | {"weight_decay": partial(_scaled_decay, options["weight_decay"])}
    return {f"adam_{k}": options[k] for k in ("lr", "betas", "eps", "weight_decay")}


def _scaled_decay(decay, path, leaf):
    """Its decay is multiplied by the shape scale."""
    rows, columns = leaf.shape[-2:]
    return decay * math.sqrt(max(1, rows / columns))


GOLDEN = {
    "dion": dion_options,
    "normuon": normuon_options,
    "moonlight": moonlight_options,
    "adamuon": adamuon_options,
    "nanochat": nanochat_options,
}


def golden_records():
    """(preset, data, record, its form in float64, options of the preset)."""
    for preset, options in GOLDEN.items():
        data = golden(preset)
        exact = {
            _problem(record): record for record in data["cases"] if record["products"] == "float64"
        }
        for record in data["cases"]:
            if (record["optimizer"], record["case"]) != ("NorMuon", "flatten"):  # As for UNLIKE.
                yield preset, data, record, exact[_problem(record)], options(record)


def _problem(record):
    return tuple(record[key] for key in ("optimizer", "case", "spectrum", "schedule"))


def golden_cases():
    for preset, data, record, exact, options in golden_records():
        repository = data["repository"].removeprefix("https://github.com/")
        commit, products = record.get("commit", data["commit"])[:7], record["products"]
        title = f"{record['optimizer']}, {record['case']}, {record['schedule']}"
        decaying = record["spectrum"] == "decaying"
        if decaying:
            title = f"{title}, decaying"
        case = partial(Case, preset, f"{repository} {commit}", products)
        run_case = partial(golden_case, preset, record, exact, options)
        by_leaf = {}
        if products == "float32":
            by_leaf = {name: largest for name, (_, largest) in record.get("own", {}).items()}
        yield case(
            title, BOUNDS[products], run_case, by_leaf=by_leaf,
            amplifies=products == "bfloat16"
            and (preset == "nanochat" or record["options"].get("use_polar_express", False)),
        )  # fmt: skip


def cases():
    return [*optax_cases(), *jordan_cases(), *torch_cases(), *golden_cases()]
