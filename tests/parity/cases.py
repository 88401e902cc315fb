# SPDX-License-Identifier: Apache-2.0
"""Every comparison of a preset with its peer: what is run, and how far apart the two may end.

The figures of `Case.run` are |ours - theirs| / |theirs - start| of every leaf after 20 steps
(Frobenius norms). Where they may come from:

- FLOAT32: two orders of the same float32 operations end about 4e-7 apart.
- DECAYING: as above for gradients of condition 1000, whose small singular values the steep first
  polynomials amplify, with their rounding errors, up to a thousand times.
- BFLOAT16: the products round every entry to 8 bits, 2^-9 relative. Our polynomial is rounded once
  where most peers round it three times, so that entries of the factor differ by a few 2^-8.
- Both round the weights at every step; where these are large and what is added is small, that is
  most of the difference, and `Difference.rounding` is allowed on top.
- Polar Express amplifies a relative error of a singular value s by s f'(s) / f(s): 32 times (root
  mean square over s), 158 times at s = 1, the only one of a single row (`CONDITION`). One unit of
  rounding times that is allowed on top.
"""

import dataclasses
import importlib.metadata
import importlib.util
import json
import math
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import problems
import torch
from agreement import Difference, differences, run, run_torch, tensors

import fmuon
from fmuon.coefficients import COEFFICIENTS
from fmuon.presets import PRESETS

FLOAT32 = 2e-6
DECAYING = 2e-5
BFLOAT16 = 8 * 2**-8
HERE = Path(__file__).parent
SHAPES = problems.MATRICES | problems.OTHERS
ALL = problems.MATRICES | problems.CONVOLUTION | problems.EXPERTS | problems.OTHERS
LR = 1e-2
PRODUCTS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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
    """One comparison; `bound` is for all leaves but those that `others` is for."""

    preset: str
    peer: str
    products: str
    title: str
    bound: float
    run: Callable[[], dict[str, Difference]]
    others: float | None = None
    amplifies: bool = False

    @property
    def name(self):
        return f"{self.preset}-{self.title}-{self.products}".replace(" ", "_")

    def allowed(self, leaf, difference):
        bound = self.others if self.others and leaf in problems.OTHERS else self.bound
        if self.amplifies and leaf not in problems.OTHERS:
            single = 1 in problems.MATRICES.get(leaf, ())
            bound += CONDITION[single] * torch.finfo(PRODUCTS[self.products]).eps / 2
        return bound + difference.rounding

    def worst(self):
        """(difference, allowed) of the leaf that is nearest to what is allowed."""
        return max(
            ((found.value, self.allowed(leaf, found)) for leaf, found in self.run().items()),
            key=lambda pair: pair[0] / pair[1],
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


def optax_case(options, *, spectrum="gaussian", x64=True, scheduled=False, mu_dtype=None):
    import jax
    import jax.numpy as jnp

    options = dict(options)
    if numbers := options.get("muon_weight_dimension_numbers"):
        options["muon_weight_dimension_numbers"] = numbers()
    shapes = ALL if numbers else SHAPES
    theirs, ours = dict(options), dict(options)
    lr, own_lr = LR, LR
    if scheduled:
        lr, own_lr = (lambda count: LR * (count + 1) / 20), (lambda step: LR * (step + 1) / 20)
        theirs["adam_learning_rate"] = lambda count: 1e-3 * count
        ours["adam_learning_rate"] = lambda step: 1e-3 * step
    if mu_dtype is not None:
        theirs["mu_dtype"], ours["mu_dtype"] = jnp.bfloat16, torch.bfloat16
    with jax.enable_x64(x64):
        final, _ = run_optax(optax_muon(lr, **theirs), shapes, spectrum)
    params, _ = run(fmuon.presets.optax(own_lr, **ours), shapes, spectrum=spectrum)
    return differences(params, final, tensors(problems.weights(shapes)))


def optax_muon(lr, **options):
    from optax.contrib import muon

    return muon(lr, **options)


def run_optax(tx, shapes, spectrum="gaussian", steps=range(20), start=None, state=None):
    """(params as torch tensors, state) after the steps of a transformation of optax."""
    import jax
    import jax.numpy as jnp
    import optax

    start = problems.weights(shapes) if start is None else start
    params = {name: jnp.asarray(np.asarray(value)) for name, value in start.items()}
    state = tx.init(params) if state is None else state
    update = jax.jit(tx.update)
    for step in steps:
        grads = {k: jnp.asarray(g) for k, g in problems.gradients(shapes, step, spectrum).items()}
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return {name: torch.from_numpy(np.array(value)) for name, value in params.items()}, state


def optax_cases():
    peer = f"optax {importlib.metadata.version('optax')}"
    case = partial(Case, "optax", peer, "float32")
    for title, options in OPTAX.items():
        yield case(title, FLOAT32, partial(optax_case, options))
        yield case(
            f"{title}, decaying", DECAYING, partial(optax_case, options, spectrum="decaying")
        )
    # Without 64-bit numbers jax rounds 1 - 0.999^t to 6e-8, a relative error of 6e-5 / t that
    # Adam's root halves: 3e-5 (1 + 1/2 + ... + 1/20) / 20 = 5e-6 over 20 equal steps.
    alone = partial(optax_case, {}, x64=False)
    yield case("defaults, jax without 64 bits", FLOAT32, alone, others=1e-5)
    yield case("scheduled", FLOAT32, partial(optax_case, {"weight_decay": 0.1}, scheduled=True))
    # It rounds the decayed momentum and its sum; we round the sum.
    yield case("momentum in bfloat16", BFLOAT16, partial(optax_case, {}, mu_dtype="bfloat16"))


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


def in_float32(products, module, old, new):
    return importlib.import_module(module) if products == "bfloat16" else patched(module, old, new)


def muon_optimizer(products):
    return in_float32(products, "muon", "G.bfloat16()", "G.float()")


# Its step can't add the update of a convolution to it.
JORDAN_SHAPES = {k: shape for k, shape in ALL.items() if k not in problems.CONVOLUTION}


def jordan_case(products, *, shapes=JORDAN_SHAPES, spectrum="gaussian", schedule=None, decay=0.1):
    module = muon_optimizer(products)

    def make(params):
        hidden = [p for name, p in params.items() if name not in problems.OTHERS]
        others = [p for name, p in params.items() if name in problems.OTHERS]
        return module.SingleDeviceMuonWithAuxAdam(
            [
                {"params": hidden, "use_muon": True, "lr": 0.02, "weight_decay": decay},
                {"params": others, "use_muon": False, "weight_decay": decay},
            ]
        )

    theirs, _ = run_torch(make, shapes, spectrum=spectrum, schedule=schedule)
    options = in_dtype("jordan", products, weight_decay=decay, adam_weight_decay=decay)
    params = {n: torch.nn.Parameter(w) for n, w in tensors(problems.weights(shapes)).items()}
    # By its flags, as that optimizer is told.
    groups = [
        {"params": [(n, p) for n, p in params.items() if (n in problems.OTHERS) != use_muon],
         "use_muon": use_muon}
        for use_muon in (True, False)
    ]  # fmt: skip
    ours = fmuon.FMuon(groups, preset="jordan", **options)
    final = steps_of(ours, params, shapes, spectrum, schedule)
    return differences(final, theirs, tensors(problems.weights(shapes)))


def steps_of(optimizer, params, shapes, spectrum, schedule):
    rates = [group["lr"] for group in optimizer.param_groups]
    for step in range(20):
        for name, grad in tensors(problems.gradients(shapes, step, spectrum)).items():
            params[name].grad = grad
        if schedule is not None:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * schedule(step)
        optimizer.step()
    return {name: p.detach() for name, p in params.items()}


def jordan_cases():
    peer = f"muon-optimizer {importlib.metadata.version('muon-optimizer')}"
    for products, bound in (("float32", FLOAT32), ("bfloat16", BFLOAT16)):
        case = partial(Case, "jordan", peer, products)
        yield case("decay 0.1", bound, partial(jordan_case, products))
        yield case("scheduled", bound, partial(jordan_case, products, schedule=rising))
        yield case(
            "decaying", max(bound, DECAYING), partial(jordan_case, products, spectrum="decaying")
        )


def rising(step):
    return (step + 1) / 20


TORCH = {
    "defaults": {},
    "match_rms_adamw": {"adjust_lr_fn": "match_rms_adamw"},
    "without nesterov": {"nesterov": False, "momentum": 0.9, "weight_decay": 0.0},
    "other coefficients": {"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 7, "eps": 1e-3},
}


def torch_case(options, products, *, spectrum="gaussian", schedule=None, dtype=torch.float32):
    shapes = problems.MATRICES
    module = in_float32(products, "torch.optim._muon", "grad.bfloat16()", "grad.float().clone()")
    theirs, _ = run_torch(
        lambda params: module.Muon(params.values(), lr=LR, **options),
        shapes, spectrum=spectrum, schedule=schedule, dtype=dtype,
    )  # fmt: skip
    own = in_dtype("torch", products, **options)
    if dtype == torch.bfloat16:
        own["momentum_dtype"] = dtype
    opt = fmuon.presets.torch(LR, labels=is_matrix, **own)
    rate = None if schedule is None else lambda step: LR * schedule(step)
    ours, _ = run(opt, shapes, spectrum=spectrum, schedule=rate, dtype=dtype)
    return differences(ours, theirs, tensors(problems.weights(shapes), dtype))


def torch_cases():
    peer = f"torch.optim.Muon {torch.__version__.split('+')[0]}"
    for products, bound in (("float32", FLOAT32), ("bfloat16", BFLOAT16)):
        case = partial(Case, "torch", peer, products)
        for title, options in TORCH.items():
            yield case(title, bound, partial(torch_case, options, products))
        yield case("scheduled", bound, partial(torch_case, {}, products, schedule=rising))
        decaying = partial(torch_case, {}, products, spectrum="decaying")
        yield case("decaying", max(bound, DECAYING), decaying)
    in_16_bits = partial(torch_case, {}, "bfloat16", dtype=torch.bfloat16)
    yield case("parameters and momentum in bfloat16", BFLOAT16, in_16_bits)


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


def golden_case(preset, record, options):
    shapes = {name: tuple(shape) for name, shape in record["shapes"].items()}
    unlike = {name for name in shapes if (record["optimizer"], name) in UNLIKE}
    lr = record["options"]["lr"]
    linear = record["schedule"] == "linear"
    values = in_dtype(preset, record["products"], **options)
    views = PRESETS[preset].values(**options).get("labels")

    def labels(path, leaf):
        if path in unlike:
            return "frozen"
        view = is_matrix(path, leaf) or (views and views(path, leaf))
        return view or "auxiliary"

    opt = PRESETS[preset](lr, labels=labels, **values)
    ours, _ = run(
        opt, shapes, spectrum=record["spectrum"],
        schedule=(lambda step: lr * rising(step)) if linear else None,
    )  # fmt: skip
    start = tensors(problems.weights(shapes))
    theirs = {
        name: start[name].double() + torch.tensor(change, dtype=torch.float64).reshape(shapes[name])
        for name, change in record["change"].items()
    }
    return differences(ours, theirs, {k: w for k, w in start.items() if k not in unlike})


def golden_cases():
    rows = {"dion": dion_options, "normuon": normuon_options, "moonlight": moonlight_options}
    for preset, options in rows.items():
        data = golden(preset)
        repository = data["repository"].removeprefix("https://github.com/")
        for record in data["cases"]:
            if (record["optimizer"], record["case"]) == ("NorMuon", "flatten"):
                continue  # As for UNLIKE.
            commit = record.get("commit", data["commit"])[:7]
            title = f"{record['optimizer']}, {record['case']}, {record['schedule']}"
            bound = FLOAT32
            if record["spectrum"] == "decaying":
                title, bound = f"{title}, decaying", DECAYING
            if record["products"] == "bfloat16":
                bound = BFLOAT16
            yield Case(
                preset, f"{repository} {commit}", record["products"], title, bound,
                partial(golden_case, preset, record, options(record)),
                # Moonlight's AdamW adds its eps of 1e-8 before the bias correction, as if it were
                # eps / sqrt(1 - 0.95^t); some "decaying" gradients are as small as 1e-4.
                others=1e-3 if preset == "moonlight" and "decaying" in title else None,
                amplifies=record["options"].get("use_polar_express", False),
            )  # fmt: skip


def cases():
    return [*optax_cases(), *jordan_cases(), *torch_cases(), *golden_cases()]
