# SPDX-License-Identifier: Apache-2.0
"""Stack of matrices -> the nearest stack of semi-orthogonal matrices, by iteration or exactly.

For X = U S V^T the target is the polar factor U V^T. The methods are frozen callables; each takes
any [..., m, n] tensor and treats the last two axes as matrices.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fmuon import symmetric
from fmuon.base import (
    ConfigurationError,
    Stack,
    check_floating,
    check_number,
    constant_in_graphs,
    is_number,
    lookup,
)
from fmuon.coefficients import CoefficientSet, Triple, coefficient_set

_DTYPES = {
    "auto": None,
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class Orthogonalizer(Protocol):
    """What `muon(orthogonalize=...)` accepts: a hashable callable with a one-line report."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """[..., m, n] -> [..., m, n] in the same dtype."""
        ...

    def __hash__(self) -> int: ...


class Work(NamedTuple):
    """What a method does for one matrix.

    Attributes:
        flops: of the products.
        operations: calls of any kind; a stack needs no more than one matrix.
        base_cases: small factorisations.
    """

    flops: int
    operations: int
    base_cases: int = 0


@dataclass(frozen=True)
class NewtonSchulz:
    """The quintic Newton-Schulz iteration: X <- a X + (b A + c A A) X in one step, A = X X^T.

    [Jordan 2024, kellerjordan.github.io/posts/muon; Bernstein and Newhouse 2024, arXiv 2409.20325,
    appendix A]

    It is run on the short side and costs 4 m^2 n + 2 m^3 flops for an m x n matrix, m <= n.

    Args:
        coefficients: a name in `fmuon.coefficients.COEFFICIENTS`, or a `CoefficientSet`.
        steps: None is the count the set was made for.
        dtype: of the products: "auto" is bfloat16 where the device multiplies it natively and
            float32 elsewhere; float64 input stays float64. A `torch.dtype` or its name fixes it.
        eps: guards the division by the Frobenius norm |X|.
        norm: "scale_free" divides by the largest entry and then by |X| (1 + eps), so that the
            result is the same for X and c X at any scale; "add" divides by |X| + eps and "clamp" by
            max(|X|, eps), in the dtype of the products, as other optimizers do.
        normalization: what |X| is, a name in `NORMALIZATIONS`: "frobenius"; "spectral", by a
            singular value decomposition; "schatten", the Schatten-4 norm; or "aol", one divisor for
            every row of the wide matrix.

    A zero matrix gives exactly zero; NaN or inf makes its own matrix NaN and no other.
    """

    coefficients: str | CoefficientSet = "jordan"
    steps: int | None = None
    dtype: str | torch.dtype = "auto"
    eps: float = 1e-7
    norm: str = "scale_free"
    normalization: str = "frobenius"

    def __post_init__(self) -> None:
        coefficient_set(self.coefficients).polynomials(self.steps)
        lookup(_GUARDS, self.norm, "norm")
        lookup(NORMALIZATIONS, self.normalization, "normalization")
        if isinstance(self.dtype, str):
            lookup(_DTYPES, self.dtype, "dtype")
        else:
            check_floating("dtype", self.dtype)
        check_number("eps", self.eps)

    def __call__(self, x: Tensor, /) -> Tensor:
        """Orthogonalise the trailing two axes of x, [..., m, n] -> [..., m, n], dtype kept."""
        return on_wide_stack(self._iterate, x)

    def work(self, short: int, long: int) -> Work:
        """For one matrix of that shape, short <= long."""
        count = self._count
        return Work(count * (4 * short**2 * long + 2 * short**3), operations=6 + 3 * count)

    @property
    def _count(self) -> int:
        return len(coefficient_set(self.coefficients).polynomials(self.steps))

    def _iterate(self, x: Stack) -> Stack:
        family, dtype = coefficient_set(self.coefficients), x.dtype
        # The dtype is this object's to choose, not an autocast region's around the step.
        with torch.autocast(x.device.type, enabled=False):
            return self._products(
                self._normalized(x, family.norm_safety), family.polynomials(self.steps)
            ).to(dtype)

    def _normalized(self, x: Stack, safety: float) -> Stack:
        """X / (safety |X|) in the dtype of the products."""
        dtype, row = self._compute_dtype(x), NORMALIZATIONS[self.normalization]
        x = with_unit_entries(x) if self.norm == "scale_free" else x.to(dtype)
        size = _GUARDS[self.norm](row.measure(x), safety**row.power, self.eps)
        return (x / (size.sqrt() if row.power == 2 else size)).to(dtype)

    def _products(self, x: Stack, polynomials: tuple[Triple, ...]) -> Stack:
        for a, b, c in polynomials:
            gram = symmetric.product(x, x.mT)
            # b A + c A A, then a X + (b A + c A A) X: one fused product each.
            polynomial = symmetric.baddbmm(gram, gram, gram, beta=b, alpha=c)
            x = torch.baddbmm(x, polynomial, x, beta=a)
        return x

    def _compute_dtype(self, x: Tensor) -> torch.dtype:
        dtype = _DTYPES[self.dtype] if isinstance(self.dtype, str) else self.dtype
        if dtype is not None:
            return dtype
        if x.dtype == torch.float64:
            return torch.float64
        return torch.bfloat16 if multiplies_bfloat16(x.device) else torch.float32

    def __str__(self) -> str:
        """`newton_schulz(jordan, 5 steps, auto)`."""
        family = self.coefficients if isinstance(self.coefficients, str) else "own coefficients"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"newton_schulz({family}, {self._count} steps, {dtype})"


@dataclass(frozen=True)
class GramNewtonSchulz(NewtonSchulz):
    """The same polynomials of the m x m Gram matrix, and one product with X at the end.

    [Dao-AILab/gram-newton-schulz, README, Algorithm 1]

    Every step is X <- Z' X with Z' = a I + Z, Z = b R + c R R and R = X X^T, so R <- Z' R Z' and
    Q <- Q Z' do without X: 4 m^2 n + 34 m^3 flops for five steps in place of 20 m^2 n + 10 m^3,
    fewer from n = 1.5 m on; matrices with n < 1.5 m take the standard form.

    Rounding leaves R with eigenvalues down to about -u, u being the unit roundoff of the products,
    and each later step multiplies them by a^2. Before they reach 0.1 the iteration is restarted
    from X <- Q X: never in five steps in float32, once in float16, twice in bfloat16.

    Args:
        restarts: steps before which to restart; "auto" is by the rule above. Without restarts, (),
            16-bit products diverge on decaying spectra.

    Other options as for `NewtonSchulz`.
    """

    restarts: tuple[int, ...] | str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        steps = self._count
        if isinstance(self.restarts, list):
            object.__setattr__(self, "restarts", tuple(self.restarts))
        if not (isinstance(self.restarts, str) and self.restarts == "auto") and (
            not isinstance(self.restarts, tuple)
            or not all(is_number(step, whole=True) and 0 < step < steps for step in self.restarts)
            or list(self.restarts) != sorted(set(self.restarts))
        ):
            raise ConfigurationError(
                f'restarts={self.restarts!r}: give "auto", or steps from 1 to {steps - 1} in order'
            )

    def work(self, short: int, long: int) -> Work:
        """For one matrix of that shape, short <= long, without restarts."""
        if 2 * long < 3 * short:
            return super().work(short, long)
        products = 4 * self._count - 3
        return Work(4 * short**2 * long + 2 * products * short**3, operations=9 + products)

    def _products(self, x: Stack, polynomials: tuple[Triple, ...]) -> Stack:
        short, long = x.shape[-2:]
        if 2 * long < 3 * short:
            return super()._products(x, polynomials)
        restarts = self.restarts
        if isinstance(restarts, str):
            restarts = _restarts(polynomials, torch.finfo(x.dtype).eps / 2)
        ends = (*restarts, len(polynomials))
        for start, end in zip((0, *restarts), ends, strict=True):
            x = self._segment(x, polynomials[start:end])
        return x

    def _segment(self, x: Stack, polynomials: tuple[Triple, ...]) -> Stack:
        """Some steps without a restart between them."""
        gram = symmetric.product(x, x.mT)
        # R, Q and Z are polynomials of one matrix: all their products are symmetric.
        factor: Tensor | None = None
        for step, (a, b, c) in enumerate(polynomials):
            z = symmetric.baddbmm(gram, gram, gram, beta=b, alpha=c)
            if step == len(polynomials) - 1 and factor is None:
                # Z' rounded to 16 bits would lose a I.
                return torch.baddbmm(x, z, x, beta=a)
            if factor is None:
                identity = torch.eye(x.shape[-2], dtype=x.dtype, device=x.device)
                factor = z + a * identity
            else:
                factor = symmetric.baddbmm(factor, factor, z, beta=a)
            if step < len(polynomials) - 1:
                half = symmetric.baddbmm(gram, gram, z, beta=a)
                gram = symmetric.baddbmm(half, z, half, beta=a)
        assert factor is not None
        return factor @ x

    def __str__(self) -> str:
        """`gram_newton_schulz(jordan, 5 steps, auto)`."""
        return f"gram_{super().__str__()}"


def _restarts(polynomials: Sequence[Triple], roundoff: float) -> tuple[int, ...]:
    """Steps before which an eigenvalue of -roundoff would have grown beyond 0.1."""
    restarts: list[int] = []
    grown = roundoff
    for step in range(1, len(polynomials)):
        grown *= polynomials[step - 1][0] ** 2
        if grown > 0.1:
            restarts.append(step)
            grown = roundoff
    return tuple(restarts)


@dataclass(frozen=True)
class PolarSVD:
    """The polar factor itself, U V^T of X = U S V^T, by a singular value decomposition.

    What all other methods approximate: a slow reference, in float64 for float64 input and in
    float32 for all other. Directions whose singular value is below max(m, n) eps of the largest are
    left out, so that a zero matrix gives zero; NaN or inf makes its own matrix NaN and no other.
    """

    def __call__(self, x: Tensor, /) -> Tensor:
        """Orthogonalise the trailing two axes of x, [..., m, n] -> [..., m, n], dtype kept."""
        return on_wide_stack(self._of_wide, x)

    def work(self, short: int, long: int) -> Work:
        """For one matrix of that shape [Golub and Van Loan 2013, figure 8.6.1]."""
        return Work(6 * short**2 * long + 20 * short**3, operations=10)

    def _of_wide(self, x: Stack) -> Stack:
        full = x.to(torch.promote_types(x.dtype, torch.float32))
        # The decomposition refuses a whole stack for one entry that isn't finite.
        finite = largest_entry(full).isfinite()
        u, s, vh = torch.linalg.svd(torch.where(finite, full, 0), full_matrices=False)
        floor = max(x.shape[-2:]) * torch.finfo(full.dtype).eps * s[..., :1]
        kept = u * (s > floor).unsqueeze(-2)
        return torch.where(finite, kept @ vh, torch.nan).to(x.dtype)

    def __str__(self) -> str:
        """`polar_svd`."""
        return "polar_svd"


def on_wide_stack(method: Callable[[Stack], Stack], x: Tensor) -> Tensor:
    """Apply a method for stacks of wide matrices to any [..., m, n] tensor."""
    if x.ndim < 2:
        raise ConfigurationError(
            f"can't orthogonalise a tensor of shape {tuple(x.shape)}; [..., rows, columns] needed"
        )
    if x.numel() == 0:
        return x.clone()
    tall = x.shape[-2] > x.shape[-1]
    wide = x.mT if tall else x
    result = method(wide.reshape(-1, *wide.shape[-2:])).reshape(wide.shape)
    return result.mT if tall else result


def largest_entry(x: Stack) -> Tensor:
    """max |x_ij| of every matrix, [k, 1, 1]; the largest norm of torch isn't vectorised."""
    low, high = x.amin((-2, -1), keepdim=True), x.amax((-2, -1), keepdim=True)
    return torch.maximum(high, low.neg())


def with_unit_entries(x: Stack) -> Stack:
    """X / max |x_ij| of every matrix; zero stays zero.

    Squares of entries beyond 1e19 or below 1e-23 leave the range of float32; those of the result
    don't. A reciprocal of the largest entry could overflow.
    """
    peak = largest_entry(x)
    return x / torch.where(peak > 0, peak, 1)


@dataclass(frozen=True)
class Normalization:
    """A divisor that bounds the singular values by 1.

    `measure` maps a stack to that divisor to the `power` 1 or 2: one number per matrix,
    [matrices, 1, 1], or per row, [matrices, short, 1].
    """

    measure: Callable[[Stack], Tensor]
    power: int = 1


def _frobenius(x: Stack) -> Tensor:
    """|X|_F, the root of the sum of squares [Jordan 2024, kellerjordan.github.io/posts/muon]."""
    return torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)


def _spectral(x: Stack) -> Tensor:
    """|X|_2, the largest singular value."""
    full = x.to(torch.promote_types(x.dtype, torch.float32))
    # The decomposition refuses a whole stack for one entry that isn't finite.
    full = torch.where(largest_entry(full).isfinite(), full, 0)
    return torch.linalg.matrix_norm(full, 2, keepdim=True).to(x.dtype)


def _schatten(x: Stack) -> Tensor:
    """|X X^T|_F^(1/2), the Schatten-4 norm.

    [Grishina, Smirnov and Rakhuba 2025, arXiv 2506.10935]
    """
    return _frobenius(x @ x.mT)


def _row_sums(x: Stack) -> Tensor:
    """(sum_j |X X^T|_ij)^(1/2) for row i.

    [Prach and Lampert 2022, arXiv 2208.03160, theorem 1; Boissin et al. 2025, arXiv 2512.04632]
    """
    return (x @ x.mT).abs().sum(-1, keepdim=True)


NORMALIZATIONS: dict[str, Normalization] = {
    "frobenius": Normalization(_frobenius),
    "spectral": Normalization(_spectral),
    "schatten": Normalization(_schatten, power=2),
    "aol": Normalization(_row_sums, power=2),
}

# (measure, safety, eps) -> a divisor that isn't zero.
_GUARDS: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "scale_free": lambda m, safety, eps: m * (safety + eps) + (m == 0),
    "add": lambda m, safety, eps: m * safety + eps,
    "clamp": lambda m, safety, eps: (m * safety).clamp(min=eps),
}


@constant_in_graphs
def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the device has bfloat16 multipliers: tensor cores, AMX or AVX512-BF16.

    Elsewhere bfloat16 products are emulated, more than 25 times slower than float32.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "cpu":
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return False
