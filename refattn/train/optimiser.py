"""AdamW and the clipping of gradients, for any tree of arrays of any library.

For a parameter p with gradient g, at its step number t, with the rate a, the decay w and the moments m and v::

    m' = beta1 m + (1 - beta1) g
    v' = beta2 v + (1 - beta2) g^2
    p' = (1 - a w) p - a (m' / (1 - beta1^t)) / (sqrt(v' / (1 - beta2^t)) + epsilon)

Source: Loshchilov and Hutter 2019 (arXiv:1711.05101), algorithm 2. There the decay is multiplied by the factor of the
schedule alone; here by the whole rate a, as in ``torch.optim.AdamW``, with which the tests compare.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from refattn import tree
from refattn.args import Maybe, Real, Tree, Whole, check_all, check_choice, checked
from refattn.train.leaves import by_pieces, check_alike, joined, total
from refattn.xp import Array, backend, concrete, dtype_name, namespace, zeros

T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """Leaves that are treated alike.

    Attributes
    ----------
    pattern
        What the name of a leaf looks like: ``*`` stands for any text, dots included (see `fnmatch`).
    weight_decay
        The decay w of these leaves.
    rate
        A factor on the learning rate.
    axes
        Only leaves with at least so many axes.
    size
        Only leaves of so many elements; None: of any number.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn.train.optimiser import AdamW, Group
    >>> groups = (Group("*bias", rate=0.0), Group("*", weight_decay=0.1))
    >>> optimiser = AdamW(learning_rate=0.5, groups=groups)
    >>> params = {"w": np.ones(2), "bias": np.ones(2)}
    >>> params, _ = optimiser.update(optimiser.start(params), params, params)
    >>> params["w"].round(3).tolist(), params["bias"].tolist()
    ([0.45, 0.45], [1.0, 1.0])
    """

    pattern: str
    weight_decay: float = 0.0
    rate: float = 1.0
    axes: int = 0
    size: int | None = None

    def __post_init__(self) -> None:
        check_all(self, pattern=str, weight_decay=Real(0.0), rate=Real(0.0), axes=Whole(), size=Maybe(Whole(1)))

    def has(self, name: str, leaf: Array) -> bool:
        """Tell whether a leaf belongs here."""
        sized = self.size is None or math.prod(leaf.shape) == self.size
        return sized and len(leaf.shape) >= self.axes and fnmatchcase(name, self.pattern)


_BELOW_1 = Real(0.0, 1.0, below=True)

DECAYED = ("weights", "embeddings")
"""Which leaves may decay."""


def default_groups(
    weight_decay: float = 0.1, *, decayed: str = "weights", scalar_rate: float = 1.0
) -> tuple[Group, ...]:
    """Return the usual groups: decay on the weights of linear maps and on nothing else.

    A linear map can grow without bound to sharpen a prediction, and decay holds it. The gain of a norm and a bias do
    not multiply the features with each other; decay would only pull them from the value that fits. The row of an
    embedding gets a gradient when its token occurs, but decay at every step, which would wipe out rare tokens.
    `decayed` "embeddings" has it the other way round, as some papers do: decay on embeddings alone. `scalar_rate` is a
    factor on the rate of learned numbers, the leaves of one element, which may have further to go than weights.

    >>> from refattn.train.optimiser import default_groups
    >>> [(group.pattern, group.weight_decay) for group in default_groups(0.1)]
    [('*embedding', 0.0), ('*norm*', 0.0), ('*b_*', 0.0), ('*', 0.1), ('*', 0.0)]
    """
    check_choice("decayed", decayed, DECAYED)
    numbers = () if scalar_rate == 1.0 else (Group("*", rate=scalar_rate, size=1),)
    if decayed == "embeddings":
        return (*numbers, Group("*embedding", weight_decay), Group("*"))
    return (
        *numbers,
        Group("*embedding"),
        Group("*norm*"),
        Group("*b_*"),
        Group("*", weight_decay, axes=2),
        Group("*"),
    )


@dataclass(frozen=True)
class AdamWState:
    """What AdamW remembers: a tree, all of whose parts are arrays.

    Attributes
    ----------
    first, second
        Trees like the parameters: the moments m and v.
    count
        A tree like the parameters, each leaf an array that broadcasts against the parameter: the number t of steps
        that were made. `start` makes it one number for each leaf; where columns of a weight are newer than others, it
        may have one for each column.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn.train.optimiser import AdamW
    >>> state = AdamW(learning_rate=0.5).start({"w": np.ones((2, 2))})
    >>> state.first["w"].tolist(), float(state.count["w"])
    ([[0.0, 0.0], [0.0, 0.0]], 0.0)
    """

    first: Any
    second: Any
    count: Any


@dataclass(frozen=True)
class AdamW:
    """AdamW; its methods are pure functions of their arguments.

    Attributes
    ----------
    learning_rate
        The rate where `update` is given none.
    beta1, beta2, epsilon
        As above.
    groups
        For each leaf the first one that has it counts.

    Raises
    ------
    TypeError, ValueError
        Where a number is of another type or out of its range.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn.train.optimiser import AdamW
    >>> params, gradients = {"w": np.ones(3)}, {"w": np.asarray([4.0, -0.1, 0.0])}
    >>> optimiser = AdamW(learning_rate=0.5)
    >>> params, state = optimiser.update(optimiser.start(params), params, gradients)
    >>> params["w"].round(4).tolist()
    [0.5, 1.5, 1.0]
    """

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    groups: Sequence[Group] = field(default_factory=default_groups)

    def __post_init__(self) -> None:
        check_all(self, learning_rate=Real(0.0), epsilon=Real(0.0, above=True), beta1=_BELOW_1, beta2=_BELOW_1)

    def group_of(self, name: str, leaf: Array) -> Group:
        """Return the group of a leaf; ValueError where it has none."""
        for group in self.groups:
            if group.has(name, leaf):
                return group
        patterns = ", ".join(repr(group.pattern) for group in self.groups) or "none at all"
        raise ValueError(f"groups: none has the parameter {name!r} of shape {tuple(leaf.shape)}; got {patterns}")

    @checked(params=Tree)
    def start(self, params: Any) -> AdamWState:
        """Return the state before the first step.

        Raises
        ------
        TypeError
            Where a parameter is neither float32 nor float64.
        ValueError
            Where a parameter belongs to no group.
        """
        for name, leaf in tree.flatten(params).items():
            if dtype_name(leaf) not in ("float32", "float64"):
                raise TypeError(f"params: got {name!r} of dtype {dtype_name(leaf)}, needs float32 or float64")
            self.group_of(name, leaf)
        moments = tree.zeros_like(params)
        return AdamWState(moments, moments, tree.map_leaves(lambda p: zeros((), p), params))

    @checked(state=AdamWState, params=Tree, gradients=Tree, rate=Maybe(Real(0.0)))
    def update(self, state: AdamWState, params: T, gradients: Any, rate: float | None = None) -> tuple[T, AdamWState]:
        """Return the parameters and the state after one step.

        The leaves are the tasks of their backend, the large ones in pieces: the cut depends on their shapes alone, so
        any number of workers gives the same bits.

        Parameters
        ----------
        state
            From `start` or the step before.
        params, gradients
            Trees with leaves of the same names and shapes.
        rate
            The learning rate of this step, such as a schedule gives; None: `learning_rate`.

        Raises
        ------
        ValueError
            Where the names or shapes of the trees differ, or a parameter belongs to no group.
        """
        rate = self.learning_rate if rate is None else rate
        p, m, v, t = (tree.flatten(part) for part in (params, state.first, state.second, state.count))
        g = tree.flatten(gradients)
        check_alike(p, {"gradients": g, "state.first": m, "state.second": v, "state.count": t})
        groups = {name: self.group_of(name, leaf) for name, leaf in p.items()}
        t = {name: count + 1.0 for name, count in t.items()}
        logs = _log(self.beta1), _log(self.beta2)

        def step(task: tuple[str, Any]) -> tuple[Array, Array, Array]:
            name, part = task
            count = t[name]
            if count.shape and count.shape[0] != 1:
                count = count[part]
            p_part, g_part, m_part, v_part = (x[name][part] for x in (p, g, m, v))
            return self._equations(p_part, g_part, m_part, v_part, count, rate, groups[name], logs)

        stepped = by_pieces(p, step, lambda parts: tuple(map(joined, zip(*parts, strict=True))))
        new_p, new_m, new_v = ({name: parts[i] for name, parts in stepped.items()} for i in range(3))
        moments = tree.unflatten(state.first, new_m), tree.unflatten(state.second, new_v)
        return tree.unflatten(params, new_p), AdamWState(*moments, tree.unflatten(state.count, t))

    def _equations(
        self, p: Array, g: Array, m: Array, v: Array, t: Array, rate: float, group: Group, logs: tuple[float, float]
    ) -> tuple[Array, Array, Array]:
        xp = namespace(p, g)
        rate = rate * group.rate
        m = self.beta1 * m + (1.0 - self.beta1) * g
        v = self.beta2 * v + (1.0 - self.beta2) * (g * g)
        # 1 - beta^t, without the rounding error of a difference
        mean, square = m / -xp.expm1(t * logs[0]), v / -xp.expm1(t * logs[1])
        p = (1.0 - rate * group.weight_decay) * p - rate * (mean / (xp.sqrt(square) + self.epsilon))
        return p, m, v


@checked(force=Real(0.0, infinite=True), gamma=Real(0.0), largest=Real(0.0))
def adaptive_rate(force: float, gamma: float, largest: float) -> float:
    """Return gamma / force, at most `largest`: the rate of a step where the gradient of an energy has the norm `force`.

    Source: F. Preetham 2023 (Graph Dynamical Systems and Odd Analytic Coupling, Medium), where the rate has no bound:
    near a minimum its steps then have a constant length and never arrive.
    """
    return min(largest, gamma / (force + 1e-12))


@checked(gradients=Tree, limit=Maybe(Real(0.0, above=True)))
def clip(gradients: T, limit: float | None) -> tuple[T, Array]:
    """Return the gradients, scaled down where their norm is above `limit`, and the norm that they had.

    The norm is that of all elements of all leaves together. Above the limit they are multiplied by
    ``limit / (norm + 1e-6)``, as in ``torch.nn.utils.clip_grad_norm_``. A norm that is not finite scales nothing: what
    to do then is for the caller to decide.

    Parameters
    ----------
    gradients
        A tree with at least one array.
    limit
        The largest norm, above 0; None: no limit.

    Returns
    -------
    gradients
        A tree like the one given; the same arrays where nothing is scaled.
    norm
        A 0-d array, accumulated in float64 where the backend has it.

    Raises
    ------
    TypeError, ValueError
        Where the limit is no number above 0, or the tree has no array.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn.train.optimiser import clip
    >>> gradients, norm = clip({"w": np.asarray([3.0, 4.0])}, limit=1.0)
    >>> gradients["w"].round(4).tolist(), float(norm)
    ([0.6, 0.8], 5.0)
    """
    leaves = tree.flatten(gradients)
    if not leaves:
        raise ValueError("gradients: got a tree without arrays, needs at least one")
    xp = namespace(*leaves.values())
    squares = by_pieces(leaves, lambda task: _squares(leaves[task[0]][task[1]]), total)
    norm = xp.sqrt(total(list(squares.values())))
    if limit is None:
        return gradients, norm
    factor = limit / (norm + 1e-6)
    scales = xp.isfinite(norm) & (factor < 1.0)
    if concrete(scales) is False:
        return gradients, norm
    factor = xp.where(scales, factor, xp.ones_like(factor))

    def scale(task: tuple[str, Any]) -> Array:
        name, part = task
        return leaves[name][part] * xp.astype(factor, leaves[name].dtype)

    scaled = by_pieces(leaves, scale, joined)
    return tree.unflatten(gradients, scaled), norm


def _squares(x: Array) -> Array:
    """Return the sum of the squares of all elements, in float64 where there is one."""
    xp = namespace(x)
    wide = xp.astype(x, xp.float64) if backend(x).float64() else x
    return xp.sum(wide * wide)


def _log(beta: float) -> float:
    return math.log(beta) if beta else -math.inf
