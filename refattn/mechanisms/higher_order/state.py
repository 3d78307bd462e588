"""What queries need to know of any number of keys: sums of a constant size.

    S = sum_j psi(k+_j) [v_j, 1],    u = sum_j [v_j, 1]
    [a_i, z_i] = phi(q+_i)^T S + constant u

`fold` adds keys, `read` answers queries, and each has its adjoint beside it. A state knows the options that it was made
with, and the width: kernels that differ would give sums that mean something else.

Axes: b batch, g key/value head, d width of queries and keys, e width of values. Keys stand as rows (b, g, n, d) and
(b, g, n, e + 1), the last column 1, or 0 for padding; queries as (b, g, n, d), those of a group one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from refattn.mechanisms.higher_order.kernel import Kernel
from refattn.ops.tiles import Tile
from refattn.xp import Array, concrete, device, namespace, zeros


@dataclass(frozen=True)
class State:
    """The sums over all keys so far: a tree of arrays, also the gradient with respect to one.

    Attributes
    ----------
    products
        (b, g, features, e + 1): S.
    values
        (b, g, 1, e + 1): u; its last column is the number of keys.
    settings
        (6,): order, alpha, delta, whether there is a layer normalisation, its eps, and the width d.
    """

    products: Array
    values: Array
    settings: Array


def empty(kernel: Kernel, shape: tuple[int, int, int], like: Array) -> State:
    """Return the state before any key, for shape (b, g, e)."""
    products, values = _shapes(kernel, shape)
    return State(zeros(products, like), zeros(values, like), settings(kernel, like))


def check_state(state: State, kernel: Kernel, shape: tuple[int, int, int], like: Array) -> None:
    """Raise where a state is of other options, another width, other sizes or another dtype than a call needs."""
    needed = settings(kernel, like)
    shapes = (tuple(needed.shape), *_shapes(kernel, shape))
    for name, wanted in zip(("settings", "products", "values"), shapes, strict=True):
        got = getattr(state, name)
        if got.dtype != like.dtype:
            raise TypeError(f"state.{name}: got dtype {got.dtype}, needs {like.dtype}")
        if name == "settings" and tuple(got.shape) == wanted:
            _check_settings(got, needed)
        if tuple(got.shape) != wanted:
            raise ValueError(f"state.{name}: got shape {tuple(got.shape)}, needs {wanted}")


def _check_settings(got: Array, needed: Array) -> None:
    if concrete(namespace(got).all(got == needed)) is False:
        words = ("order", "alpha", "delta", "layer_norm", "norm_eps", "width")
        made, asked = (", ".join(f"{w} {float(x[n]):g}" for n, w in enumerate(words)) for x in (got, needed))
        raise ValueError(f"state: got one of {made}, needs one of {asked}")


def _shapes(kernel: Kernel, shape: tuple[int, int, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    b, g, e = shape
    return (b, g, kernel.features, e + 1), (b, g, 1, e + 1)


def settings(kernel: Kernel, like: Array) -> Array:
    """Return what a state remembers of the options that it depends on."""
    options = kernel.options
    eps = options.norm_eps if options.layer_norm else 0.0
    numbers = (options.order, options.alpha, options.delta, options.layer_norm, eps, kernel.width)
    return namespace(like).asarray([float(x) for x in numbers], dtype=like.dtype, device=device(like))


def fold(kernel: Kernel, state: State | None, keys: Array, values: Array) -> State:
    """Return the state with more keys; None is one without any."""
    xp = namespace(keys)
    products = xp.concat([piece @ values for piece in kernel.psi(keys)], axis=-2)
    total = xp.sum(values, axis=-2, keepdims=True)
    if state is None:
        return State(products, total, settings(kernel, keys))
    return State(state.products + products, state.values + total, state.settings)


def of_heads(state: State, tile: Tile) -> State:
    """Return the state of the heads of a tile."""
    return State(tile.of(state.products), tile.of(state.values), state.settings)


def fold_backward(kernel: Kernel, keys: Array, values: Array, d_state: State) -> tuple[Array, Array]:
    """Return the gradients of keys and values for that of the state after them; the state before them has the same."""
    xp = namespace(keys)
    # forward: products = products + psi @ values; values = values + sum(values)
    d_psi = d_state.products @ xp.matrix_transpose(values)
    d_values = kernel.sum(kernel.psi(keys), d_state.products) + d_state.values
    return kernel.psi_backward(keys, d_psi), d_values


def read(kernel: Kernel, state: State, queries: Array) -> Array:
    """Return the sums [a_i, z_i] (b, g, n, e + 1) of queries over the keys of a state."""
    sums = kernel.sum(kernel.phi(queries), state.products)
    return sums + kernel.constant * state.values if kernel.constant else sums


def read_backward(kernel: Kernel, state: State, queries: Array, d_sums: Array) -> Array:
    """Return the gradient of the queries for that of what they read."""
    # forward: sums = phi^T @ products + constant * values
    return kernel.phi_backward(queries, state.products @ namespace(queries).matrix_transpose(d_sums))


def read_adjoint(kernel: Kernel, d_state: State | None, queries: Array, d_sums: Array) -> State:
    """Return the gradient of a state, `d_state` or None for 0, with that of one more reading of it added."""
    xp = namespace(queries)
    d_products = xp.concat([piece @ d_sums for piece in kernel.phi(queries)], axis=-2)
    d_values = kernel.constant * xp.sum(d_sums, axis=-2, keepdims=True)
    if d_state is None:
        return State(d_products, d_values, settings(kernel, queries))
    return State(d_state.products + d_products, d_state.values + d_values, d_state.settings)
