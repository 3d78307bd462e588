"""What there is to choose: the integrators, and the words for all else.

Integrators, with t the time of the layer, h_x and h_y its steps, eta' = alpha = c_log / t + c_lin the damping,
a = eta(t + h_y) - eta(t), phi(a) = (1 - e^-a) / a, r the ratio of a step to the one before it, g the force, f = B p / z
the velocity, and g_0, f_0 those of the layer before::

    name                        momentum p'                                         position x'
    presymplectic_euler         e^-a (p + h_y g)                                    x + h_x B p' / z
    forward_euler               the same                                            x + h_x f
    exponential_presymplectic   e^-a p + h_y phi(a) g                               x + h_x B p' / z
    exponential_euler           the same                                            x + h_x f
    half_damped                 e^-a/2 p*, p* = e^-a/2 p + h_y g(x, e^-a/2 p)       x + h_x B p* / z
    explicit_euler              p + h_y (g - alpha p)                               x + h_x f
    plain_euler                 retention p + h_y g                                 x + h_x f
    ab2                         p + h_y [(1 + r/2) R - r/2 R_0], R = g - alpha p    x + h_x [(1 + r/2) f - r/2 f_0]
    etd_ab2                     e^-a p + h_y [(1 + r/2) e^-a g - r/2 e^-b g_0]      x + h_x [(1 + r/2) f - r/2 f_0]
    presymplectic, strang       four calls of the oracle, see `doubled`

with b = eta(t + h_y) - eta(t_0). Then p' is normalised. `classical` and `lie_trotter` are what these are compared with:
blocks without a Hamiltonian, see `baseline`.
"""

from __future__ import annotations

from refattn.ops.mlp import GELU

MOVING = ("presymplectic_euler", "exponential_presymplectic", "half_damped", "presymplectic", "strang")
MULTISTEP = ("ab2", "etd_ab2")
DOUBLED = ("presymplectic", "strang")
BASELINES = ("classical", "lie_trotter")
INTEGRATORS = (*MOVING, "forward_euler", "exponential_euler", "explicit_euler", "plain_euler", *MULTISTEP, *BASELINES)

DAMPINGS = ("log", "linear", "loglin")
NORMALISATIONS = ("end", "each_substep", "none")
SUBSTEPS = ("attention_velocity", "momentum", "velocity", "plain", "none")

CHOICES = {
    "integrator": INTEGRATORS,
    "damping": DAMPINGS,
    "normalise": NORMALISATIONS,
    "mlp": SUBSTEPS,
    "attention": ("exponential", "linear"),
    "form": ("auto", "gram", "state"),
    "mobility": ("learned", "identity"),
    "rotation": ("fixed", "learned"),
    "start": ("rest", "linear", "table"),
    "normaliser": ("prefix", "length"),
    "force": ("prefix", "hamiltonian"),
    "connection": ("none", "h1", "r2"),
    "gelu": tuple(GELU),
}
