"""Which links w the graph has (GE.links), and what its nodes are.

A link is made of the weights n_ij (GE.4) or, for other graphs over tokens, of attention a_ij (GE.2); the diagonal of
what comes out does not matter::

    [GE.kernel]  w_ij = n_ij                            the row sums of exp(r) give it an energy
    [GE.mean]  w_ij = (a_ij + a_ji) / 2                 symmetric; the links of a token may sum to more than 1
    [GE.min]  w_ij = min(a_ij, a_ji)                    symmetric; they sum to at most 1
    [GE.directed]  w_ij = a_ij                          causal if attention is; has no energy
    [GE.mirror]  w_ij = a_ij if j < i, else a_ji        symmetric, and w_ij depends on nothing after i and j
    [GE.given]  w_ij = what the caller gives            0 if i may not attend j

Backwards, Q is the gradient of what the links are made of, and P_ij = dw_ij for i != j, else 0::

    [dGE.mean]  Q_ij = (P_ij + P_ji) / 2
    [dGE.min]  Q_ij = P_ij + P_ji if a_ij < a_ji, half of it if they are equal, else 0
    [dGE.mirror]  Q_ij = P_ij + P_ji if j < i, else 0

"kernel" and "none" have Q = P. Links that are given are constants.

Nodes are the tokens, or over "keys" the keys alone, so that there may be any number of queries::

    [GE.over_keys]  r_jl = scale k_j . k_l              -inf unless some query may attend j, and some query l
    [dGE.over_keys]  dk_j += scale sum_l (dr_jl + dr_lj) k_l,  dscale += sum_jl dr_jl k_j . k_l
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from refattn.args import check_choice
from refattn.mechanisms.graph_energy.forces import Number
from refattn.ops.masks import earlier_pairs, where_allowed
from refattn.ops.sums import with_transposed
from refattn.xp import Array, is_array, namespace, sum_wide, zeros

# --- nodes


class OverTokens:
    """Nodes are the tokens. Two are as alike as the mean of the two matches between them."""

    def pairs(self, matches: Array, k: Array, scale: Number, allowed: Array | None) -> tuple[Array, Array | None]:
        """Return matches of pairs of nodes, and which pairs may be linked, for keys (b, h, j, d)."""
        return matches, allowed

    def alike(self, pairs: Array) -> Array:
        """Return r (b, h, j, j)."""
        return 0.5 * with_transposed(pairs)

    def backward(self, d_both: Array, k: Array) -> tuple[Array | None, Array | None, Array | None]:
        """Return parts of the gradients of matches, of keys without scale, and of scale, for dr + dr^T."""
        return 0.5 * d_both, None, None


class OverKeys:
    """Nodes are the keys. The matches of keys with keys are symmetric by themselves."""

    def pairs(self, matches: Array, k: Array, scale: Number, allowed: Array | None) -> tuple[Array, Array | None]:
        """Return matches of pairs of nodes, and which pairs may be linked, for keys (b, h, j, d)."""
        xp = namespace(k)
        pairs = k @ xp.matrix_transpose(k) * scale  # (b, h, j, j)
        if allowed is None:
            return pairs, None
        seen = xp.any(allowed, axis=-2, keepdims=True)  # (..., 1, j): whether some query may attend j
        return pairs, seen & xp.matrix_transpose(seen)

    def alike(self, pairs: Array) -> Array:
        """Return r (b, h, j, j)."""
        return pairs

    def backward(self, d_both: Array, k: Array) -> tuple[Array | None, Array | None, Array | None]:
        """Return parts of the gradients of matches, of keys without scale, and of scale, for dr + dr^T."""
        d_keys = d_both @ k  # (b, h, j, d)
        return None, d_keys, 0.5 * sum_wide(d_keys * k)


NODES: dict[str, OverTokens | OverKeys] = {"tokens": OverTokens(), "keys": OverKeys()}


# --- links


@dataclass(frozen=True)
class Links:
    """How attention becomes the links w of a graph.

    Attributes
    ----------
    over
        "tokens": links come from the matches of queries with keys, as many; "keys": from those of keys with keys, and
        the queries, any number of them, are no nodes. Keys that no query may attend are none either.
    """

    over: str = "tokens"

    balanced: ClassVar[bool] = False
    """Whether it has detailed balance though it is not symmetric."""
    bounded: ClassVar[bool] = True
    """Whether the links of a node sum to at most 1."""

    def __post_init__(self) -> None:
        check_choice("over", self.over, tuple(NODES))

    @property
    def name(self) -> str:
        """What the option `graph` calls it."""
        return next((name for name, kind in LINKS.items() if type(self) is kind), "given")

    @property
    def nodes(self) -> OverTokens | OverKeys:
        """What its nodes are."""
        return NODES[self.over]

    @property
    def of_alike(self) -> bool:
        """Whether the links are made of n: over keys all are, since attention links queries with keys."""
        return self.over == "keys"

    def forward(self, weights: Any, both: Array | None, pairs: Array) -> Any:
        """Return w for n or a, `both` that tells which pairs may be linked, and matches of pairs: what they are."""
        return weights

    def backward(self, weights: Any, d_linked: Array) -> Array | None:
        """Return Q for P, here P itself; None if it is a constant."""
        return d_linked


class Kernel(Links):
    """The softmax of the mean of s_ij and s_ji; has detailed balance, and with it an energy."""

    balanced = True

    @property
    def of_alike(self) -> bool:
        """Whether the links are made of n."""
        return True


class Directed(Links):
    """a_ij as it is: no symmetry, and no energy."""


class Mean(Links):
    """The mean of a_ij and a_ji: symmetric, with degrees of any size."""

    bounded = False

    def forward(self, weights: Any, both: Array | None, pairs: Array) -> Any:
        """Return (a + a^T) / 2."""
        return 0.5 * (weights + namespace(weights).matrix_transpose(weights))

    def backward(self, weights: Any, d_linked: Array) -> Array | None:
        """Return (P + P^T) / 2."""
        return 0.5 * (d_linked + namespace(weights).matrix_transpose(d_linked))


class Min(Links):
    """The smaller of a_ij and a_ji: symmetric, with degrees of at most 1."""

    def forward(self, weights: Any, both: Array | None, pairs: Array) -> Any:
        """Return min(a, a^T)."""
        xp = namespace(weights)
        return xp.minimum(weights, xp.matrix_transpose(weights))

    def backward(self, weights: Any, d_linked: Array) -> Array | None:
        """Return P + P^T for the smaller one."""
        xp = namespace(weights)
        other, twice = xp.matrix_transpose(weights), d_linked + xp.matrix_transpose(d_linked)
        return xp.where(weights < other, twice, xp.where(weights == other, 0.5 * twice, 0.0))


class CausalMirror(Links):
    """a_ij for j < i, and a_ji for j > i: a symmetric link depends on nothing later than its later token."""

    bounded = False

    def forward(self, weights: Any, both: Array | None, pairs: Array) -> Any:
        """Return a below the diagonal, and its mirror image above."""
        xp = namespace(weights)
        return xp.where(earlier_pairs(weights.shape[-1], weights), weights, xp.matrix_transpose(weights))

    def backward(self, weights: Any, d_linked: Array) -> Array | None:
        """Return P + P^T below the diagonal."""
        xp = namespace(weights)
        twice = d_linked + xp.matrix_transpose(d_linked)
        return xp.where(earlier_pairs(weights.shape[-1], weights), twice, 0.0)


@dataclass(frozen=True)
class Given(Links):
    """Links of your own: a constant of the backward.

    Attributes
    ----------
    links
        An array (n, n), or one for each head, of weights or booleans, which hold where i may attend j; or a `CSR`,
        which `window_graph`, `nearest_graph` and `sparse_graph` make. Given as they are they are links over tokens.
    """

    links: Any = None

    bounded = False

    @property
    def of_alike(self) -> bool:
        """Whether the links are made of n."""
        return False

    def forward(self, weights: Any, both: Array | None, pairs: Array) -> Any:
        """Return what was given, 0 for pairs that may not be linked; a sparse graph as it is."""
        if not is_array(self.links):
            return self.links
        given = namespace(pairs).astype(self.links, pairs.dtype) + zeros(pairs.shape, pairs)  # (b, h, j, j)
        return where_allowed(both, given, 0.0)

    def backward(self, weights: Any, d_linked: Array) -> Array | None:
        """Return None."""
        return None


LINKS = {"kernel": Kernel, "mean": Mean, "min": Min, "none": Directed, "causal_mirror": CausalMirror}
"""What `graph` may be beside an array and None."""
