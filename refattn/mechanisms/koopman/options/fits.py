"""How the operator is fitted: what is least, with B, Y and Z of the transitions, and G of the observables.

    stein       |Z A G - Y|^2 + ridge tr(A^T Z A G)                    Z A G + ridge A = Y
    separable   the same error in the norm of the kernel's space       (Z + ridge) A G = Y

Both equations are linear in Y and, as Z and G are symmetric, their own adjoints::

    stein       dZ = -dY G A^T,  dG = -(Z A)^T dY,  dridge = -<dY, A>
    separable   dZ = -dY G A^T,  dG = -(Z A + ridge A)^T dY,  dridge = -<dY, A G>

A fit that is "separable" may limit its operator, see `limited`.

Letters: l transition, o observable; axes in front broadcast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from refattn.args import check_choice, check_number, check_whole
from refattn.mechanisms.koopman.options.limited import Limited, gain_of_two
from refattn.ops.solve import identity, solve
from refattn.xp import Array, namespace, transpose

Rest = Callable[[Array], tuple[Array, Array, Array]]
"""From the gradient of Y those of Z, G, and of the ridge before its sum."""


LIMITS = ("norm", "rank", "nuclear")


@dataclass(frozen=True)
class Fit:
    """How the operator is fitted to the transitions of a trajectory.

    Attributes
    ----------
    ridge
        Above 0, the weight of the operator's norm; an array () for all, (updates - 1,) for each update after the first,
        or (candidates, updates - 1), of which at most 64 are tried in order; with a third axis of size d a ridge for
        each coordinate, and an operator for each. None means 0.1.
    scale
        "sum": the ridge is as given; "mean": it is multiplied by the number of transitions times that of seen keys.
    tau
        0: the ridge draws the operator to 0; 1: to the identity.
    window
        The operator is fitted to so many of the last transitions; None: to all.
    """

    ridge: float | Array | None = None
    scale: str = "sum"
    tau: float = 0.0
    window: int | None = None

    def __post_init__(self) -> None:
        check_choice("scale", self.scale, ("sum", "mean"))
        if isinstance(self.tau, bool) or not isinstance(self.tau, int | float) or self.tau not in (0, 1):
            needs = "needs 0 (the ridge draws the operator to 0) or 1 (to the identity)"
            raise ValueError(f"tau: got {self.tau!r}, {needs}")
        if self.window is not None:
            check_whole("window", self.window, 1)

    def solver(self) -> Any:
        """Return what solves it, a `Solver`: itself, unless the operator is limited."""
        return self


@dataclass(frozen=True)
class Stein(Fit):
    """Least squares over all observables."""

    def gain(self, inner: Array, gram: Array, ridge: Array, delta: Any) -> Array:
        """Return by how much an error in Y grows, for |Z|, |G|, the ridge and the jitter; see `precision`."""
        return namespace(inner).sqrt(1.0 + inner * gram / ridge)

    def forward(self, inner: Array, gram: Array, ridge: Any, targets: Array) -> Array:
        """Return A with Z A G + ridge A = Y, a system of l o unknowns."""
        xp, (rows, columns) = namespace(inner), targets.shape[-2:]
        # Row by row the elements of A are one vector: element (l, o) of Z A G takes Z_ll' G_o'o of element (l', o').
        product = inner[..., :, None, :, None] * transpose(gram)[..., None, :, None, :]  # (..., l, o, l', o')
        system = xp.reshape(product, (*product.shape[:-4], rows * columns, rows * columns))  # (..., l o, l' o')
        system = system + ridge * identity(rows * columns, inner)  # (..., l o, l' o')
        found = solve(system, xp.reshape(targets, (*targets.shape[:-2], rows * columns, 1)))  # (..., l o, 1)
        return xp.reshape(found, (*found.shape[:-2], rows, columns))

    def backward(
        self, inner: Array, gram: Array, ridge: Any, targets: Array, found: Array, d_found: Array
    ) -> tuple[Array, Rest]:
        """Return dY with Z^T dY G^T + ridge dY = dA, and what tells the others."""

        def rest(d_targets: Array) -> tuple[Array, Array, Array]:
            d_inner = -(d_targets @ transpose(gram) @ transpose(found))
            return d_inner, -(transpose(inner @ found) @ d_targets), -d_targets * found

        return self.forward(transpose(inner), transpose(gram), ridge, d_found), rest


@dataclass(frozen=True)
class Separable(Fit):
    """Least squares in the norm of the kernel's space; cheaper where causal. At most one of these may be given.

    Attributes
    ----------
    norm
        Above 0: the operator is no longer, so that its eigenvalues lie in a circle of this radius; with tau = 0.
    rank
        At least 1: the operator, less tau, has no higher rank.
    nuclear
        Above 0: the weight of the sum of the singular values of the operator, less tau.
    """

    norm: float | None = None
    rank: int | None = None
    nuclear: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [name for name in LIMITS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{given[1]}: got a value beside {given[0]}, needs one of norm, rank and nuclear")
        for name in {"norm", "nuclear"} & set(given):
            number = getattr(self, name)
            if not isinstance(check_number(name, number, positive=True), float):
                raise TypeError(f"{name}: got an array, needs a number: it has no gradient")
        if self.rank is not None:
            check_whole("rank", self.rank, 1)
        if self.norm is not None and self.tau:
            raise ValueError(
                f"norm: got {self.norm} with tau=1, needs tau=0: beyond the data the operator is the identity"
            )

    def solver(self) -> Solver:
        """Return what solves it: itself, or what finds a limited operator."""
        return self if self.limits() is None else Limited(self.norm, self.rank, self.nuclear)

    gain = staticmethod(gain_of_two)

    def limits(self) -> str | None:
        """Return which limit is given."""
        return next((name for name in LIMITS if getattr(self, name) is not None), None)

    def forward(self, inner: Array, gram: Array, ridge: Any, targets: Array) -> Array:
        """Return A with (Z + ridge) A G = Y, a system of l unknowns and one of o."""
        within = solve(inner + ridge * identity(inner.shape[-1], inner), targets)
        return transpose(solve(transpose(gram), transpose(within)))

    def backward(
        self, inner: Array, gram: Array, ridge: Any, targets: Array, found: Array, d_found: Array
    ) -> tuple[Array, Rest]:
        """Return dY with (Z^T + ridge) dY G^T = dA, and what tells the others."""

        def rest(d_targets: Array) -> tuple[Array, Array, Array]:
            d_inner = -(d_targets @ transpose(gram) @ transpose(found))
            return d_inner, -(transpose(inner @ found + ridge * found) @ d_targets), -d_targets * (found @ gram)

        return self.forward(transpose(inner), transpose(gram), ridge, d_found), rest


Solver = Stein | Separable | Limited
"""What makes A (..., l, o) of Z, G, a ridge and Y; its backward gives the gradient of Y, and what tells the others."""

FITS: dict[str, type[Fit]] = {"stein": Stein, "separable": Separable}
