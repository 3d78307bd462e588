"""A mechanism as one step of a dynamical system, and as one that is given its tokens one after the other."""

from __future__ import annotations

import weakref
from functools import partial
from types import ModuleType
from typing import Any

from refattn import backends, equations, tree
from refattn.args import Whole, check, check_arrays, check_floating, naming
from refattn.mechanisms import projections
from refattn.mechanisms.context import Context
from refattn.xp import FLOATING, Array, all_finite, dtype_name, is_bool


class Block:
    """A mechanism as one step of a dynamical system, made from the module that computes it.

    The module has `Config`, `Params`, `State`, `Saved` and the functions ``init``, ``forward`` and ``backward``. It may
    have ``start``, ``start_backward``, ``read`` and ``read_backward``; otherwise the state is the tokens alone. In
    place of ``forward`` it may have ``keys_and_values`` and ``attend``: see `refattn.mechanisms.projections.forward`.

    What holds for every block is checked here, once: the context's fields are ones that the mechanism reads, and all
    arrays that come in are finite and of one library, device and dtype. Shapes are for the module to check. `config` is
    the class of configurations, if it is not that of the module.

    >>> import numpy as np, refattn as ra
    >>> block, x, context = ra.mechanism("softmax").block, np.ones((1, 3, 4)), ra.Context(causal=True)
    >>> params = block.init(block.Config(width=4, heads=2), seed=0, like=x)
    >>> state = block.start(params, x, context)
    >>> block.check_step(context, params, state)
    >>> state, saved = block.forward(params, state, context)
    >>> block.read(params, state).shape
    (1, 3, 4)
    >>> d_state, _ = block.read_backward(params, state, np.ones_like(x))
    >>> d_state, d_params, _ = block.backward(params, saved, d_state)
    >>> d_x, _ = block.start_backward(params, d_state)
    >>> d_x.shape, d_params.w_q.shape
    ((1, 3, 4), (4, 4))
    """

    def __init__(
        self, module: ModuleType, title: str, context_fields: tuple[str, ...], config: type | None = None
    ) -> None:
        self.module = module
        self.title = title
        self.context_fields = context_fields
        self.Config = config or module.Config

    def _own(self, name: str) -> Any:
        """Return a function of the module, or what stands for it where the module has none."""
        own = equations.active(self.module)
        if hasattr(own, name):
            return getattr(own, name)
        usual = getattr(projections, name)
        return partial(usual, own) if name == "forward" else usual

    def init(self, config: Any, *, seed: int = 0, like: Array, layer: int = 0) -> Any:
        """Return fresh parameters: a pure function of the configuration, the seed and the layer.

        `like` gives the array library, the dtype and the device.
        """
        check("config", config, self.Config)
        check_arrays(like=like)
        check_floating(like=like)
        return self.module.init(config, seed=seed, like=like, layer=layer)

    @naming("params", "context")
    def start(self, params: Any, x: Array, context: Context) -> Any:
        """Return the state that the first block of a stack receives for tokens x (b, n, width)."""
        self._check_context(context, params, x=x)
        return self._own("start")(params, x, context)

    @naming("params", "d_state")
    def start_backward(self, params: Any, d_state: Any) -> tuple[Array, Any]:
        """Return (d_x, d_params) of `start`."""
        self._check(params, d_state=d_state)
        return self._own("start_backward")(params, d_state)

    @naming("params", "state")
    def read(self, params: Any, state: Any) -> Array:
        """Return the tokens (b, n, width) that a state stands for."""
        self._check(params, state=state)
        return self._own("read")(params, state)

    @naming("params", "state")
    def read_backward(self, params: Any, state: Any, d_x: Array) -> tuple[Any, Any]:
        """Return (d_state, d_params) of `read`."""
        self._check(params, state=state, d_x=d_x)
        if tuple(d_x.shape) != tuple(state.x.shape):
            raise ValueError(f"d_x: got shape {tuple(d_x.shape)}, needs {tuple(state.x.shape)}, that of the tokens")
        return self._own("read_backward")(params, state, d_x)

    @naming("params", "state", "context")
    def forward(self, params: Any, state: Any, context: Context) -> tuple[Any, Any]:
        """Advance the state by one step.

        Returns
        -------
        state
            The next state.
        saved
            What `backward` reads.

        Raises
        ------
        TypeError
            Where an argument is of another class, or arrays are of several libraries or dtypes.
        ValueError
            Where the context has a field that the mechanism does not read, a shape or a device does not fit, or an
            array that comes in has an element that is not finite.
        """
        self.check_step(context, params, state)
        with backends.of(state.x).products():
            return self._own("forward")(params, state, context)

    @naming("params", "saved", "d_state")
    def backward(self, params: Any, saved: Any, d_state: Any) -> tuple[Any, Any, dict[str, Array]]:
        """Return the gradients (d_state, d_params, d_context); the last by field name of the context."""
        check("saved", saved, self.module.Saved)
        self._check(params, d_state=d_state)
        with backends.of(d_state.x).products():
            return equations.active(self.module).backward(params, saved, d_state)

    def check_step(self, context: Context, params: Any, state: Any) -> None:
        """Raise where the context, the parameters or the state are none that `forward` takes."""
        self._check_context(context, params, state=state)

    def _check_context(self, context: Context, params: Any, **given: Any) -> None:
        check("context", context, Context)
        context.check_reads(self.title, self.context_fields)
        memory = {} if context.memory is None else {"context.memory": context.memory}
        leaf = next(iter(self._check(params, **given, **memory).values()))
        for name in ("mask", "key_mask", "memory_mask"):
            if (mask := getattr(context, name)) is not None:
                check_arrays(params=leaf, **{f"context.{name}": mask})
                if not is_bool(mask):
                    raise TypeError(f"context.{name}: got dtype {dtype_name(mask)}, needs bool")
        if context.tokens is not None:
            check_arrays(params=leaf, **{"context.tokens": context.tokens})
            if not dtype_name(context.tokens).startswith(("int", "uint")):
                raise TypeError(f"context.tokens: got dtype {dtype_name(context.tokens)}, needs an integer type")

    def _check(self, params: Any, **given: Any) -> dict[str, Array]:
        """Return all arrays, those of `params` first; raise where one is not finite or of another kind than the rest,
        or `params` or a state of another class."""
        check("params", params, self.module.Params)
        check("params.config", params.config, self.Config)
        leaves = tree.flatten({"params": params})
        for name, value in given.items():
            if name.endswith("state"):
                check(name, value, self.module.State)
            leaves |= tree.flatten({name: value}) if name.endswith("state") else {name: value}
        check_arrays(**leaves)
        check_floating(**leaves)
        if all_finite(*leaves.values()) is False:
            name = next(name for name, leaf in leaves.items() if not all_finite(leaf))
            raise ValueError(f"{name}: got an element that is not finite, needs finite numbers")
        return leaves


def new_tokens(context: Context, x: Array) -> Array | None:
    """Return the key mask (b, n) of new tokens x (b, n, m), if there is one: it covers them, or the past and them."""
    mask, (batch, tokens, _) = context.key_mask, x.shape
    if mask is None:
        return None
    if len(mask.shape) != 2 or mask.shape[0] != batch or mask.shape[1] < tokens:
        needs = f"({batch}, past and new tokens), at least {tokens} of them"
        raise ValueError(f"context.key_mask: got shape {tuple(mask.shape)}, needs {needs}")
    return mask[:, mask.shape[1] - tokens :]


class Stream:
    """A block that is given a few tokens at a time.

    Given all tokens in turn it returns what the block with ``causal=True`` returns for all of them at once. A subclass
    has ``Cache``, a tree of arrays, ``start_cache`` and ``advance``; `ModuleStream` takes them from a module, and
    `refattn.mechanisms.cache.KeyValueStream` keeps keys and values.

    >>> import numpy as np, refattn as ra
    >>> record, x = ra.mechanism("softmax"), np.random.default_rng(0).normal(size=(1, 3, 4))
    >>> block, stream, causal = record.block, record.stream, ra.Context(causal=True)
    >>> params = block.init(block.Config(width=4, heads=2), like=x)
    >>> cache = stream.start(params, batch=1)
    >>> state, cache = stream.prefill(params, cache, block.start(params, x[:, :2], causal), causal)
    >>> state, cache = stream.step(params, cache, block.start(params, x[:, 2:], causal), causal)
    >>> whole, _ = block.forward(params, block.start(params, x, causal), causal)
    >>> np.allclose(block.read(params, state), block.read(params, whole)[:, 2:])
    True
    """

    Cache: type

    def __init__(self, block: Block) -> None:
        self.block = block
        self._made: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def start_cache(self, params: Any, batch: int) -> Any:
        """Return the cache before the first token."""
        raise NotImplementedError

    def advance(self, params: Any, cache: Any, state: Any, context: Context) -> tuple[Any, Any]:
        """Return the next state of new tokens (b, n, width), and the cache with them."""
        raise NotImplementedError

    @naming("params")
    def start(self, params: Any, batch: int) -> Any:
        """Return the cache before the first token, for `batch` sequences."""
        check("params", params, self.block.module.Params)
        check("params.config", params.config, self.block.Config)
        check("batch", batch, Whole(1, 2**31))
        return self._remembered(self.start_cache(params, batch))

    @naming("params", "cache", "state", "context")
    def prefill(self, params: Any, cache: Any, state: Any, context: Context) -> tuple[Any, Any]:
        """Return the next state of some new tokens (b, n, width), and the cache with them.

        A cache of another library, dtype or shape than `start` returns is refused, and one that is not finite.
        """
        self._check(params, cache, state, context)
        state, cache = self.advance(params, cache, state, context)
        return state, self._remembered(cache)

    @naming("params", "cache", "state", "context")
    def step(self, params: Any, cache: Any, state: Any, context: Context) -> tuple[Any, Any]:
        """Return the next state of one new token (b, 1, width), and the cache with it."""
        self._check(params, cache, state, context)
        if state.x.shape[1] != 1:
            raise ValueError(f"state.x: got {state.x.shape[1]} tokens, needs 1")
        state, cache = self.advance(params, cache, state, context)
        return state, self._remembered(cache)

    def _check(self, params: Any, cache: Any, state: Any, context: Context) -> None:
        check("cache", cache, self.Cache)
        check("context", context, Context)
        if context.causal is not True:
            raise ValueError(f"context.causal: got {context.causal!r}, needs True: a stream cannot see the future")
        self.block.check_step(context, params, state)
        for name in ("memory", "memory_mask"):
            if getattr(context, name) is not None:
                raise ValueError(f"context.{name} was given to a stream, whose tokens attend themselves")
        if self._made.get(id(cache)) is not cache:  # one that came from elsewhere, and is looked at once
            self._check_cache(params, cache)
        batch = next(iter(tree.flatten(cache).values())).shape[0]
        if state.x.shape[0] != batch:
            raise ValueError(f"state.x: got a batch of {state.x.shape[0]}, the cache is of {batch}")

    def _remembered(self, cache: Any) -> Any:
        """Return a cache that was made here, and so need not be looked at when it comes back."""
        self._made[id(cache)] = cache
        return cache

    def _check_cache(self, params: Any, cache: Any) -> None:
        """Raise where an array of a cache is none that could have come from `start`, or is not finite."""
        fresh, given = tree.flatten({"cache": self.start_cache(params, 1)}), tree.flatten({"cache": cache})
        if missing := [name for name in fresh if name not in given]:
            raise TypeError(f"{missing[0]}: got None, needs an array")
        for name, x in given.items():
            like = fresh.get(name)
            if like is None:
                continue
            check_arrays(params=like, **{name: x})
            if dtype_name(x) != dtype_name(like):
                raise TypeError(f"{name}: got dtype {dtype_name(x)}, needs {dtype_name(like)}")
            # The first axis is the batch; one that begins with no element grows with the tokens.
            fits = len(x.shape) == len(like.shape)
            if not fits or any(size not in (0, x.shape[n]) for n, size in enumerate(like.shape) if n):
                needs = ", ".join("batch" if not n else str(size or "tokens") for n, size in enumerate(like.shape))
                raise ValueError(f"{name}: got shape {tuple(x.shape)}, needs ({needs})")
            if dtype_name(x) in FLOATING and all_finite(x) is False:
                raise ValueError(f"{name}: got an element that is not finite, needs finite numbers")


class ModuleStream(Stream):
    """A stream made from the module that computes it.

    The module has `Cache` and the functions ``start``, ``prefill`` and ``step``; without a ``step`` one token goes
    through ``prefill``.
    """

    def __init__(self, module: ModuleType, block: Block) -> None:
        super().__init__(block)
        self.module = module
        self.Cache = module.Cache

    def start_cache(self, params: Any, batch: int) -> Any:
        """Return the cache before the first token."""
        return self.module.start(params, batch)

    def advance(self, params: Any, cache: Any, state: Any, context: Context) -> tuple[Any, Any]:
        """Return the next state of new tokens (b, n, width), and the cache with them."""
        module = equations.active(self.module)
        one = state.x.shape[1] == 1 and hasattr(module, "step")
        return (module.step if one else module.prefill)(params, cache, state, context)
