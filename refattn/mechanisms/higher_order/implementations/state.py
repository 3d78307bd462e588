"""What queries need to know of any number of keys: sums of a constant size.

    u = sum_j [v_j, 1],    m = [the mean of all v_j, 0]
    S = sum_j psi(k+_j) ([v_j, 1] - m)
    [a_i, z_i] = b_i + m b_iz + constant u,    b_i = phi(q+_i)^T S, and b_iz its last element

`fold` adds keys, `read` answers queries, and each has its adjoint beside it. A state knows the options that it was made
with, and the width: kernels that differ would give sums that mean something else.

The mean is subtracted for the sake of gradients. That of a weight is da_i . v_j + dz_i = da_i . (v_j - o_i), in which
whatever all values have in common cancels. Pair by pair little is lost; but S da_i would be a sum over all keys before
anything cancels. What is subtracted may be any `centre` near the mean: the last column S_z of S has none in it, and
S - S_z (m' - m) is S about m'. (So is a variance updated: Chan, Golub, LeVeque 1983.) A state that comes in or goes out
is about its mean; on the way `Running` moves it there now and then. Centres are means of earlier keys, so that what
comes later changes nothing, not in the last bit.

The gradients of sums about a centre that is held fast are [da_i, dz_i + da_i . m]. Back in time the gradient with
respect to the state is kept in this way, too, about the centre of the state that was read.

Axes: b batch, g key/value head, d width of queries and keys, e width of values. Keys stand as rows (b, g, n, d) and
(b, g, n, e + 1), the last column 1, or 0 for padding; queries as (b, g, n, d), those of a group one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from refattn.args import check, check_arrays
from refattn.mechanisms.higher_order.implementations.kernel import Kernel
from refattn.ops.tiles import Tile
from refattn.xp import Array, concrete, constants, is_array, namespace, zeros


@dataclass(frozen=True)
class State:
    """The sums over all keys so far: a tree of arrays, also the gradient with respect to one.

    Attributes
    ----------
    products
        (b, g, features, e + 1): S, about the mean of the values.
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
    numbers = (options.order, options.alpha, options.normaliser.delta, options.layer_norm, eps, kernel.width)
    xp = namespace(like)
    if not options.learned:
        return constants([float(x) for x in numbers], like.dtype, like)
    return xp.stack([x if is_array(x) else zeros((), like) + float(x) for x in numbers])


def of_heads(state: State, tile: Tile) -> State:
    """Return the state of the heads of a tile."""
    return State(tile.of(state.products), tile.of(state.values), state.settings)


def mean(values: Array) -> Array:
    """Return m = [mean, 0] (b, g, 1, e + 1) for the sums of values u; 0 where there is no key."""
    xp = namespace(values)
    number = values[..., -1:]
    means = values[..., :-1] / xp.where(number == 0.0, 1.0, number)
    return xp.concat([means, xp.zeros_like(number)], axis=-1)


def about(x: Array, m: Array) -> Array:
    """Return [v - m, 1] for rows [v, 1], and so for sums of such rows, S or u; padding [0, 0] stays."""
    return x - x[..., -1:] * m


def about_adjoint(d_x: Array, m: Array) -> Array:
    """Return the gradient of x for that of `about`: dv, and in the last column d1 - dv . m."""
    xp = namespace(d_x)
    return xp.concat([d_x[..., :-1], d_x[..., -1:] - xp.vecdot(d_x, m)[..., None]], axis=-1)


def fold(kernel: Kernel, state: State | None, keys: Array, values: Array, centre: Array) -> State:
    """Return the state about `centre` with more keys; None is one without any."""
    xp = namespace(keys)
    centred = about(values, centre)
    products = xp.concat([piece @ centred for piece in kernel.psi(keys)], axis=-2)
    total = xp.sum(values, axis=-2, keepdims=True)
    if state is None:
        return State(products, total, settings(kernel, keys))
    return State(state.products + products, state.values + total, state.settings)


def settled(state: State, centre: Array) -> tuple[State, Array]:
    """Return a state about `centre` as one about its mean, and the mean."""
    own = mean(state.values)
    return State(about(state.products, own - centre), state.values, state.settings), own


def merge(states: Sequence[State]) -> State:
    """Return the state of all keys of some states, about the mean of all their values.

    Sums are added in pairs, and pairs of these: the state of a million keys from those of chunks errs as the depth of
    the tree does. Merging is associative up to rounding, and so chunks may be summarised anywhere, in any order, and
    merged as they come in.

    Parameters
    ----------
    states
        One or more, of the same options and sizes: ``saved.state`` of calls that began with `empty_state`.

    Raises
    ------
    TypeError, ValueError
        Where there is none, one is no state, or they are of different options, sizes or dtypes.

    Examples
    --------
    Four chunks, each by itself, and all of them at once:

    >>> import numpy as np, refattn as ra
    >>> k, v = np.cos(np.arange(96.0)).reshape(1, 1, 24, 4), np.sin(np.arange(72.0)).reshape(1, 1, 24, 3)
    >>> def of(k, v):
    ...     return ra.higher_order.forward(k, k, v, causal=True, state=ra.higher_order.empty_state(k, v))[1].state
    >>> chunks = [of(k[:, :, n : n + 6], v[:, :, n : n + 6]) for n in range(0, 24, 6)]
    >>> whole, merged = of(k, v), ra.higher_order.merge_states(chunks)
    >>> float(merged.values[0, 0, 0, -1]), bool(np.allclose(merged.products, whole.products))
    (24.0, True)
    """
    _check_same(states)
    values = _in_pairs([state.values for state in states])
    centre = mean(values)
    products = _in_pairs([about(state.products, centre - mean(state.values)) for state in states])
    return State(products, values, states[0].settings)


def _in_pairs(parts: list[Array]) -> Array:
    """Return the sum of arrays, as a tree."""
    while len(parts) > 1:
        parts = [sum(parts[n + 1 : n + 2], parts[n]) for n in range(0, len(parts), 2)]
    return parts[0]


def _check_same(states: Sequence[State]) -> None:
    if not states:
        raise ValueError("states: got none, needs one at least")
    for n, state in enumerate(states):
        check(f"states[{n}]", state, State)
        for name in ("settings", "products", "values"):
            got, needed = getattr(state, name), getattr(states[0], name)
            check_arrays(**{f"states[{n}].{name}": got, f"states[0].{name}": needed})
            if tuple(got.shape) != tuple(needed.shape):
                raise ValueError(f"states[{n}].{name}: got shape {tuple(got.shape)}, needs {tuple(needed.shape)}")
        _check_settings(state.settings, states[0].settings)


def merge_backward(states: Sequence[State], d_state: State) -> list[State]:
    """Return the gradients of states for that of the state that they merge to, one for each.

    About a centre that is held fast sums add up, and so all parts have the gradient of the whole.

    Parameters
    ----------
    states
        What was merged.
    d_state
        Gradient with respect to the result.
    """
    whole = merge(states)
    centre = mean(whole.values)
    held = centred_gradient(whole, State(d_state.products, d_state.values, 0.0 * d_state.settings), centre)
    return [whole_gradient(state, _at(held, centre, mean(state.values))) for state in states]


class Running:
    """A state that goes along with the tokens, None before the first, and the centre that it is about.

    It is settled after 1, 2, 4, 8, ... times that keys were folded in: often enough for the mean, and no work.
    """

    def __init__(self, kernel: Kernel, start: State | None, values: Array) -> None:
        self.kernel, self.state, self.times = kernel, start, 0
        b, g, _, width = values.shape
        self.centre = zeros((b, g, 1, width), values) if start is None else mean(start.values)

    def fold(self, keys: Array, values: Array) -> None:
        """Add keys."""
        self.state, self.times = fold(self.kernel, self.state, keys, values, self.centre), self.times + 1
        if self.times & (self.times - 1) == 0:
            self.state, self.centre = settled(self.state, self.centre)

    def begun(self) -> State:
        """Return the state, which is no longer None."""
        assert self.state is not None
        return self.state


def fold_backward(kernel: Kernel, keys: Array, values: Array, d_state: State, centre: Array) -> tuple[Array, Array]:
    """Return the gradients of keys and values for that of the state after them, about `centre`.

    The state before them has the same; of the gradient of values (b, g, n, e + 1) the last column means nothing.
    """
    xp = namespace(keys)
    # forward: products = products + psi @ values; values = values + sum(values)
    d_psi = d_state.products @ xp.matrix_transpose(about(values, centre))
    d_values = kernel.sum(kernel.psi(keys), d_state.products) + d_state.values
    return kernel.psi_backward(keys, d_psi), d_values


def read(kernel: Kernel, state: State, queries: Array, centre: Array) -> Array:
    """Return the sums [a_i, z_i] (b, g, n, e + 1) of queries over the keys of a state about `centre`."""
    sums = about(kernel.sum(kernel.phi(queries), state.products), -centre)
    return sums if kernel.homogeneous else sums + kernel.constant * state.values


def read_backward(kernel: Kernel, state: State, queries: Array, d_centred: Array) -> Array:
    """Return the gradient of the queries for that of what they read: `about_adjoint(d_sums, -centre)`."""
    # forward: sums = about(phi^T @ products, -centre) + constant * values
    return kernel.phi_backward(queries, state.products @ namespace(queries).matrix_transpose(d_centred))


def read_adjoint(kernel: Kernel, d_state: State | None, queries: Array, d_centred: Array) -> State:
    """Return the gradient of a state about a centre, `d_state` or None for 0, with that of one more reading added."""
    xp = namespace(queries)
    d_products = xp.concat([piece @ d_centred for piece in kernel.phi(queries)], axis=-2)
    d_values = kernel.constant * xp.sum(d_centred, axis=-2, keepdims=True)
    if d_state is None:
        return State(d_products, d_values, settings(kernel, queries))
    return State(d_state.products + d_products, d_state.values + d_values, d_state.settings)


def recentred(d_state: State | None, old: Array, new: Array) -> State | None:
    """Return the gradient of a state about another centre; None is 0."""
    return d_state if d_state is None or new is old else _at(d_state, old, new)


def _at(d_state: State, old: Array, new: Array) -> State:
    products, values = (about_adjoint(x, old - new) for x in (d_state.products, d_state.values))
    return State(products, values, d_state.settings)


def centred_gradient(state: State, d_state: State, centre: Array) -> State:
    """Return the gradient with respect to a state, through its mean too, as one about a centre that is held fast."""
    own = mean(state.values)
    d_values = about_adjoint(d_state.values + _through_mean(state, d_state.products), -centre)
    return State(about_adjoint(d_state.products, own - centre), d_values, d_state.settings)


def whole_gradient(state: State, d_state: State) -> State:
    """Return the gradient with respect to a state for one about its mean, held fast: the inverse."""
    d_values = about_adjoint(d_state.values, mean(state.values)) - _through_mean(state, d_state.products)
    return State(d_state.products, d_values, d_state.settings)


def _through_mean(state: State, d_products: Array) -> Array:
    """Return what the gradient of u, (b, g, 1, e + 1), lacks where the mean m = u / n in S = P - P_z m is held fast.

    It is -(S_z . dS) / n for the sums, and m . (S_z . dS) / n for n; returned with the other sign.
    """
    xp = namespace(d_products)
    number = state.values[..., -1:]
    pull = xp.matrix_transpose(state.products[..., -1:]) @ d_products / xp.where(number == 0.0, 1.0, number)
    pull = xp.concat([pull[..., :-1], xp.zeros_like(number)], axis=-1)
    return about_adjoint(-pull, mean(state.values))
