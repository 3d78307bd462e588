"""How long the steps of "rk45" are: chosen so that an embedded method of lower order agrees, kept for the backward.

The pair is that of Dormand and Prince, of orders 5 and 4. The time of the flow, steps times step, is the same as with
every other integrator, and the first attempt is one step. Every channel has steps of its own; a step of 0 is one
that was refused, or a channel that has arrived. A channel whose rate is NaN takes one step more, and is NaN.

Source: Dormand and Prince 1980 (A family of embedded Runge-Kutta formulae), table 2; Hairer, Norsett and Wanner,
Solving Ordinary Differential Equations I, section II.4, for the control of the step.
"""

from __future__ import annotations

from refattn.mechanisms.graph_energy.forces import Number
from refattn.mechanisms.graph_energy.options.integrator import RK45
from refattn.mechanisms.graph_energy.system import System
from refattn.ops.sums import moved_by, sum_of
from refattn.xp import Array, concrete, namespace

ERRORS = (
    71.0 / 57600.0,
    0.0,
    -71.0 / 16695.0,
    71.0 / 1920.0,
    -17253.0 / 339200.0,
    22.0 / 525.0,
    -1.0 / 40.0,
)
"""Weights of the difference of the two methods, the rate at the new point last."""


def plan(method: RK45, system: System, x: Array, step: Number, steps: int) -> list[Array]:
    """Return by step the factors of `step`, (b, h, 1, c), from scores x on.

    Raises
    ------
    ArithmeticError
        Where the flow would take more than `method.max_nfe` evaluations of its rate.
    ValueError
        Where the values cannot be looked at, as under `jax.jit`.
    """
    xp = namespace(x)
    done = xp.zeros_like(x[:, :, :1, :])
    factor = xp.ones_like(done)
    factors: list[Array] = []
    if 0 in x.shape or not steps:
        return factors
    evaluations = 0
    while True:
        rest = steps - done
        if (arrived := concrete(xp.all(rest <= 0.0))) is None:
            raise ValueError('integrator: got "rk45" where values cannot be looked at; needs one with fixed steps')
        if arrived:
            return factors
        evaluations += len(ERRORS)
        if evaluations > method.max_nfe:
            raise ArithmeticError(
                f"integrator: rk45 took more than {method.max_nfe} evaluations of the rate (max_nfe): the flow is "
                "stiff, take another one"
            )
        factor = xp.where(factor < rest, factor, rest)
        rates: list[Array] = []
        for alpha in method.alphas:
            rates.append(system.rate(moved_by(x, step * factor, alpha, rates)))
        after = moved_by(x, step * factor, method.beta, rates)
        rates.append(system.rate(after))
        error = step * factor * sum_of(*(e * rate for e, rate in zip(ERRORS, rates, strict=True) if e != 0.0))
        larger = xp.where(xp.abs(x) > xp.abs(after), xp.abs(x), xp.abs(after))
        share = error / (method.accuracy * (1.0 + larger))
        size = xp.sqrt(xp.mean(share * share, axis=2, keepdims=True))
        size = xp.where(xp.isnan(size), float("inf"), size)  # an attempt that overflows is too long
        lost = xp.any(xp.isnan(rates[0]), axis=2, keepdims=True)
        taken = (size <= 1.0) | lost
        factors.append(xp.where(taken, factor, 0.0))
        x = xp.where(taken, after, x)
        # The last step ends where the flow does, whatever is lost to rounding.
        done = xp.where((taken & (factor >= rest)) | lost, float(steps), done + factors[-1])
        growth = 0.9 * xp.where(size > 1e-10, size, 1e-10) ** -0.2
        factor = factor * xp.where(growth < 0.2, 0.2, xp.where(growth > 5.0, 5.0, growth))
