"""Heads: splitting a width into heads, and sharing one key/value head among several query heads.

Each function stands beside the function that is its adjoint, which is its backward; grouping changes the shape alone.

Letters: b batch, n tokens, h query heads, g key/value heads (h is a multiple of g), r query heads of a group, d width
of a head.
Source: grouped-query attention, Ainslie et al. 2023 (arXiv:2305.13245), figure 2: KV head g serves h/g consecutive
query heads, g = floor(head / (h/g)).
"""

from __future__ import annotations

from refattn.args import Axes, Divisor, Maybe, Multiple, Whole, checked
from refattn.xp import Array, namespace


@checked(x="b n m", heads=Divisor("m"))
def split_heads(x: Array, heads: int) -> Array:
    """(b, n, h*d) -> (b, h, n, d).

    >>> import numpy as np
    >>> from refattn.ops.heads import split_heads
    >>> split_heads(np.asarray([[[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]]), heads=2).tolist()
    [[[[1.0, 2.0], [5.0, 6.0]], [[3.0, 4.0], [7.0, 8.0]]]]
    """
    b, n, width = x.shape
    xp = namespace(x)
    return xp.permute_dims(xp.reshape(x, (b, n, heads, width // heads)), (0, 2, 1, 3))


@checked(x="b h n d")
def merge_heads(x: Array) -> Array:
    """(b, h, n, d) -> (b, n, h*d): the inverse and the adjoint of `split_heads`.

    >>> import numpy as np
    >>> from refattn.ops.heads import merge_heads
    >>> merge_heads(np.asarray([[[[1.0, 2.0], [5.0, 6.0]], [[3.0, 4.0], [7.0, 8.0]]]])).tolist()
    [[[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]]
    """
    b, h, n, d = x.shape
    xp = namespace(x)
    return xp.reshape(xp.permute_dims(x, (0, 2, 1, 3)), (b, n, h * d))


@checked(x=Axes("b g n d", "any"), heads=Multiple("g"))
def repeat_heads(x: Array, heads: int) -> Array:
    """(b, g, n, d) -> (b, heads, n, d): each head stands heads/g times in a row.

    >>> import numpy as np
    >>> from refattn.ops.heads import repeat_heads
    >>> repeat_heads(np.asarray([[[[1, 2]], [[3, 4]]]]), heads=4).tolist()
    [[[[1, 2]], [[1, 2]], [[3, 4]], [[3, 4]]]]
    """
    b, g, n, d = x.shape
    if g == heads:
        return x
    xp = namespace(x)
    return xp.reshape(xp.broadcast_to(x[:, :, None, ...], (b, g, heads // g, n, d)), (b, heads, n, d))


@checked(x=Axes("b h n d", "any"), heads=Divisor("h"))
def sum_heads(x: Array, heads: int) -> Array:
    """(b, h, n, d) -> (b, heads, n, d): adds up what `repeat_heads` had repeated, its adjoint.

    >>> import numpy as np
    >>> from refattn.ops.heads import sum_heads
    >>> sum_heads(np.asarray([[[[1, 2]], [[3, 4]], [[5, 6]], [[7, 8]]]]), heads=2).tolist()
    [[[[4, 6]], [[12, 14]]]]
    """
    b, h, n, d = x.shape
    xp = namespace(x)
    return x if h == heads else xp.sum(xp.reshape(x, (b, heads, h // heads, n, d)), axis=2)


@checked(x=Axes("b g r j d", "any"))
def sum_group(x: Array) -> Array:
    """(b, g, r, j, d) -> (b, g, j, d): adds up what the query heads of a group give; one alone is not copied.

    >>> import numpy as np
    >>> from refattn.ops.heads import sum_group
    >>> sum_group(np.asarray([[[[[1, 2]], [[3, 4]]]]])).tolist()
    [[[[4, 6]]]]
    """
    return x[:, :, 0, ...] if x.shape[2] == 1 else namespace(x).sum(x, axis=2)


@checked(x=Axes("b h i j", "any"), groups=Divisor("h"))
def group_heads(x: Array, groups: int) -> Array:
    """(b, h, i, j) -> (b, g, r, i, j): query heads beside the others of their key/value head.

    >>> import numpy as np
    >>> from refattn.ops.heads import group_heads
    >>> group_heads(np.ones((1, 6, 3, 5)), groups=2).shape
    (1, 2, 3, 3, 5)
    """
    b, h, *rest = x.shape
    return namespace(x).reshape(x, (b, groups, h // groups, *rest))


@checked(x=Axes("b g r i j", "any"))
def ungroup_heads(x: Array) -> Array:
    """(b, g, r, i, j) -> (b, h, i, j): the inverse and the adjoint of `group_heads`.

    >>> import numpy as np
    >>> from refattn.ops.heads import ungroup_heads
    >>> ungroup_heads(np.ones((1, 2, 3, 3, 5))).shape
    (1, 6, 3, 5)
    """
    b, g, r, *rest = x.shape
    return namespace(x).reshape(x, (b, g * r, *rest))


@checked(mask=Maybe(Axes("b h i j", "any")), groups=Whole(1))
def group_mask(mask: Array | None, groups: int) -> Array | None:
    """Group the heads of a mask (b, h, i, j); an axis of size 1 stays one.

    >>> import numpy as np
    >>> from refattn.ops.heads import group_mask
    >>> group_mask(np.ones((1, 6, 3, 5), dtype=bool), groups=2).shape
    (1, 2, 3, 3, 5)
    >>> group_mask(np.ones((1, 1, 3, 5), dtype=bool), groups=2).shape
    (1, 1, 1, 3, 5)
    """
    if mask is None:
        return None
    return mask[:, None, ...] if mask.shape[1] == 1 else group_heads(mask, groups)
