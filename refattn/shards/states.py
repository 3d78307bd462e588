"""States over devices: what a shard's tokens do to the state, known to all shards, gives each the state it starts from.

A recurrence that reads and writes a state token by token is a chain. Its shards break the chain as an associative scan
does, in three steps:

1. every device runs its tokens on their own, from an empty state, and keeps their *effect* on any state;
2. the effects, whose size does not depend on the number of tokens, are gathered, and each device lets those of the
   shards before its own act on the first state, one after the other;
3. every device runs its tokens from the state that it has then.

What an effect is depends on the state. `Sums` are of a mechanism whose folder has ``merge_states``: the effect is the
state of the shard's own keys, and states merge. `Maps` are of a state X (d, e) that each token maps linearly, the same
for each of its columns: the effect is X -> A X + B. A is found by the core itself, which runs with the columns of the
unit matrix beside an empty state, and values of 0 there.

Backward the same steps are taken in reverse order. Within a shard tokens may run in pieces, one after the other, of
which all but the state is forgotten; backward they are run again.

Letters: b batch, g state head, n token, d and e width of keys and of values; of one device.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from refattn.mechanisms.record import Mechanism, Unsupported
from refattn.shards.mesh import axes_of, over, spec
from refattn.xp import Array, is_array

Tree = Any
"""A state: an array, or a dataclass of arrays."""


@dataclass(frozen=True)
class Saved:
    """What `States.backward` reads."""

    state: Tree  # after the last token
    given: Mapping[str, Any]
    static: Mapping[str, Any]
    like: Mapping[str, Any]


class States:
    """The core of a mechanism that has a state, with tokens over the devices of an axis `tokens`.

    Parameters
    ----------
    record
        The mechanism.
    mesh
        Of axes among `refattn.shards.mesh.AXES`. All heads have to be multiples of its `heads`; tokens that are no
        multiple of what it cuts them into are padded.
    implementation
        The implementation that runs a piece of tokens.
    piece
        How many tokens of a shard run at once; all if None. It has to divide them.
    """

    def __init__(self, record: Mechanism, mesh: Any, implementation: str = "auto", piece: int | None = None) -> None:
        assert record.core is not None
        self.record, self.core, self.mesh, self.implementation, self.piece = (
            record,
            record.core,
            mesh,
            implementation,
            piece,
        )
        self.size = mesh.shape.get("tokens", 1)
        self.effects: Sums | Maps = Sums(record) if hasattr(_room(record), "merge_states") else Maps()

    def forward(self, q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Saved]:
        """Return what the core's forward returns, out and a `Saved` with state, same options but `implementation`."""
        given, static = self._enter(q, k, v, options)

        def local(given: dict[str, Any]) -> tuple[Array, Tree]:
            return self._forward(given, static)

        out_specs = spec(self.mesh, "batch", "heads", "tokens"), self._of_state(self._first(given, static))
        out, state = over(self.mesh, local, (self._specs(given),), out_specs)(given)
        like = {"q": q, "k": k, "v": v, **{name: x for name, x in options.items() if x is not None}}
        return out[:, :, : q.shape[2], :], Saved(state, given, static, like)

    def backward(self, saved: Saved, d_out: Array, d_state: Tree = None) -> dict[str, Any]:
        """Return the gradients that the core's backward returns."""
        import jax
        import jax.numpy as jnp

        tokens = saved.given["q"].shape[2]
        d_out = jnp.pad(d_out, ((0, 0), (0, 0), (0, tokens - d_out.shape[2]), (0, 0)))
        d_state = jax.tree.map(jnp.zeros_like, saved.state) if d_state is None else d_state
        of_state, rows = self._of_state(saved.state), spec(self.mesh, "batch", "heads", "tokens")

        def local(given: dict[str, Any], *rest: Any) -> Any:
            return self._backward(given, saved.static, *rest)

        function = over(self.mesh, local, (self._specs(saved.given), rows, of_state), (rows, spec(self.mesh), of_state))
        by_token, numbers, state = function(saved.given, d_out, d_state)
        found = {name: x[:, :, : saved.like["q"].shape[2], ...] for name, x in by_token.items()} | numbers
        return found | ({"state": state} if "state" in saved.like or "state" in self.record.outputs else {})

    def _enter(self, q: Array, k: Array, v: Array, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the arrays of a call, padded, and its other options."""
        import jax.numpy as jnp

        given = {name: x for name, x in options.items() if is_array(x) or name == "state" and x is not None}
        static = {name: x for name, x in options.items() if name not in given and x is not None}
        if (
            static.get("causal", True) is False
            or "lengths" in static
            or "causal" in self.record.defaults
            and "causal" not in static
        ):
            raise Unsupported("a state over devices: needs a causal call of sequences that are not packed")
        if q.shape[2] != k.shape[2]:
            raise ValueError(f"q: got {q.shape[2]} tokens, needs those of k: {k.shape[2]}")
        tokens, cut = q.shape[2], self.size * (self.piece or 1)
        missing = -tokens % cut
        given |= {"q": q, "k": k, "v": v}
        if missing:
            given.setdefault("key_mask", jnp.ones((q.shape[0], tokens), bool))
            for name in self._by_token(given):
                axis = 1 if name == "key_mask" else 2
                given[name] = jnp.pad(given[name], [(0, missing if n == axis else 0) for n in range(given[name].ndim)])
        return given, static

    def _first(self, given: Mapping[str, Any], static: Mapping[str, Any]) -> Tree:
        """Return the shapes of the first state: that which is given, or an empty one."""
        import jax

        if "state" in given:
            return given["state"]
        return jax.eval_shape(lambda given: self.effects.empty(self._run, given, static), given)

    def _by_token(self, given: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(name for name, x in given.items() if name != "state" and x.ndim > 1)

    def _specs(self, given: Mapping[str, Any]) -> dict[str, Any]:
        found = {name: spec(self.mesh, *axes_of(name, given[name])) for name in self._by_token(given)}
        found |= {name: spec(self.mesh) for name in given if name not in found}
        return found | ({"state": self._of_state(given["state"])} if "state" in given else {})

    def _of_state(self, state: Tree) -> Tree:
        import jax

        return jax.tree.map(lambda x: spec(self.mesh, *(("batch", "heads") if len(x.shape) > 1 else ())), state)

    # --- on one device

    def _forward(self, given: dict[str, Any], static: Mapping[str, Any]) -> tuple[Array, Tree]:
        """Return the output of this device's tokens, and the state after those of all devices."""
        _, states = self._chain(given, static)
        out, _, _ = self._pieces(given, static, self._own(states[:-1]))
        return out, states[-1]

    def _backward(
        self, given: dict[str, Any], static: Mapping[str, Any], d_out: Array, d_state: Tree
    ) -> tuple[dict[str, Array], dict[str, Array], Tree]:
        """Return the gradients of arrays of tokens, of numbers, and of the first state."""
        import jax
        import jax.numpy as jnp

        effects, states = self._chain(given, static)
        nothing = jax.tree.map(jnp.zeros_like, d_state)
        # forward: out = pieces(given, state)
        found = self._pieces_backward(given, static, self._own(states[:-1]), d_out, nothing)
        # forward: states = chain(first, effects)
        d_states = [*self._gathered(found.pop("state")), d_state]
        d_first, d_effects = self.effects.chain_backward(states[0], effects, d_states)
        # forward: effect = pieces(given, empty)
        alone, start = self.effects.alone(self._run, given, static)
        d_none = jnp.zeros((*d_out.shape[:3], alone["v"].shape[3]), d_out.dtype)
        further = self._pieces_backward(alone, static, start, d_none, self._own(d_effects))
        by_token = {name: found[name] + further[name][..., : given[name].shape[-1]] for name in self._by_token(found)}
        numbers = {name: self._sum(x + further[name]) for name, x in found.items() if name not in by_token}
        return by_token, numbers, d_first

    def _chain(self, given: Mapping[str, Any], static: Mapping[str, Any]) -> tuple[list[Tree], list[Tree]]:
        """Return the effects of all shards, and the states before each of them and after the last."""
        alone, start = self.effects.alone(self._run, given, static)
        _, effect, _ = self._pieces(alone, static, start)
        first = given["state"] if "state" in given else self.effects.empty(self._run, given, static)
        effects = self._gathered(effect)
        return effects, self.effects.chain(first, effects)

    def _run(self, given: Mapping[str, Any], static: Mapping[str, Any]) -> tuple[Array, Any]:
        return self.core.forward(**given, **static, implementation=self.implementation)

    def _pieces(self, given: Mapping[str, Any], static: Mapping[str, Any], state: Tree) -> tuple[Array, Tree, Tree]:
        """Run this device's tokens from a state, in pieces; return out, the last state, and all before pieces."""
        import jax

        cut, whole = self._cut(given)

        def step(state: Tree, part: dict[str, Array]) -> tuple[Tree, Any]:
            out, saved = self._run({**whole, **part, "state": state}, static)
            return saved.state, (out, state)

        last, (out, before) = jax.lax.scan(step, state, cut)
        return _joined(out, 2), last, before

    def _pieces_backward(
        self, given: Mapping[str, Any], static: Mapping[str, Any], state: Tree, d_out: Array, d_state: Tree
    ) -> dict[str, Any]:
        """Return the gradients of what `_pieces` is given, that of the state among them."""
        import jax

        cut, whole = self._cut(given)
        _, _, before = self._pieces(given, static, state)

        def step(d_state: Tree, part: Any) -> tuple[Tree, dict[str, Array]]:
            arrays, state, d_out = part
            _, saved = self._run({**whole, **arrays, "state": state}, static)
            found = self.core.backward(saved, d_out, d_state)
            return found.pop("state"), found

        parts = cut, before, self._split(d_out, 2)
        d_state, found = jax.lax.scan(step, d_state, parts, reverse=True)
        return {name: _joined(x, 2) if x.ndim > 1 else x.sum() for name, x in found.items()} | {"state": d_state}

    def _cut(self, given: Mapping[str, Any]) -> tuple[dict[str, Array], dict[str, Any]]:
        """Return the arrays of tokens in pieces, and the others but the state."""
        cut = {name: self._split(given[name], 1 if name == "key_mask" else 2) for name in self._by_token(given)}
        return cut, {name: x for name, x in given.items() if name not in cut and name != "state"}

    def _split(self, x: Array, axis: int) -> Array:
        """Return x in pieces along an axis of tokens, which stand on a new first axis."""
        import jax.numpy as jnp

        size = self.piece or x.shape[axis]
        shape = (*x.shape[:axis], x.shape[axis] // size, size, *x.shape[axis + 1 :])
        return jnp.moveaxis(x.reshape(shape), axis, 0)

    def _gathered(self, x: Tree) -> list[Tree]:
        """Return what all shards have, in their order."""
        import jax

        whole = jax.lax.all_gather(x, "tokens") if self.size > 1 else jax.tree.map(lambda leaf: leaf[None], x)
        return [jax.tree.map(lambda leaf, n=n: leaf[n], whole) for n in range(self.size)]

    def _own(self, of_shards: Sequence[Tree]) -> Tree:
        """Return what belongs to this shard."""
        import jax
        import jax.numpy as jnp

        index = jax.lax.axis_index("tokens") if self.size > 1 else 0
        return jax.tree.map(lambda *leaves: jnp.stack(leaves)[index], *of_shards)

    def _sum(self, x: Array) -> Array:
        import jax

        names = tuple(self.mesh.shape)
        return jax.lax.psum(x, names) if names else x


class Sums:
    """Effects that are states themselves, and merge."""

    def __init__(self, record: Mechanism) -> None:
        import jax

        self.room: Any = _room(record)
        with suppress(ValueError):  # it is known already
            fields = [field.name for field in dataclasses.fields(self.room.State)]
            jax.tree_util.register_dataclass(self.room.State, fields, [])

    def empty(self, run: Any, given: Mapping[str, Any], static: Mapping[str, Any]) -> Tree:
        """Return the state before any token."""
        options = {name: x for name, x in static.items() if name != "causal"}
        return self.room.empty_state(given["k"], given["v"], **options)

    def alone(self, run: Any, given: Mapping[str, Any], static: Mapping[str, Any]) -> tuple[dict[str, Any], Tree]:
        """Return the arguments and the state with which a run of the shard ends in its effect."""
        return dict(given), self.empty(run, given, static)

    def chain(self, first: Tree, effects: Sequence[Tree]) -> list[Tree]:
        """Return the states before the first shard, and after each of them."""
        states = [first]
        for effect in effects:
            states.append(self.room.merge_states([states[-1], effect]))
        return states

    def chain_backward(self, first: Tree, effects: Sequence[Tree], d_states: Sequence[Tree]) -> tuple[Tree, list[Tree]]:
        """Return the gradients of the first state and of the effects."""
        import jax

        states, found = self.chain(first, effects), []
        d_after = d_states[-1]
        for before, effect, d_before in zip(states[-2::-1], effects[::-1], d_states[-2::-1], strict=True):
            # forward: after = merge([before, effect])
            d_through, d_effect = self.room.merge_states_backward([before, effect], d_after)
            found.append(d_effect)
            d_after = jax.tree.map(lambda a, b: a + b, d_before, d_through)
        return d_after, found[::-1]


class Maps:
    """Effects X -> A X + B on a state X, an array (b, g, ..., e), as one array [B, A]."""

    def empty(self, run: Any, given: Mapping[str, Any], static: Mapping[str, Any]) -> Tree:
        """Return the state before any token."""
        import jax
        import jax.numpy as jnp

        # Its shape is the mechanism's business; that of the state after one token is the same.
        shape = jax.eval_shape(
            lambda given: run(given, static)[1].state, {n: x for n, x in given.items() if n != "state"}
        )
        return jnp.zeros(shape.shape, shape.dtype)

    def alone(self, run: Any, given: Mapping[str, Any], static: Mapping[str, Any]) -> tuple[dict[str, Any], Tree]:
        """Return the arguments and the state with which a run of the shard ends in its effect."""
        import jax.numpy as jnp

        start = self.empty(run, given, static)
        rows = _rows(start).shape[2]
        unit = jnp.broadcast_to(jnp.eye(rows, dtype=start.dtype), (*start.shape[:2], rows, rows))
        v = jnp.concatenate([given["v"], jnp.zeros((*given["v"].shape[:3], rows), given["v"].dtype)], axis=3)
        beside = jnp.concatenate([start, unit.reshape(*start.shape[:-1], rows)], axis=-1)
        return {**given, "v": v}, beside

    def chain(self, first: Tree, effects: Sequence[Tree]) -> list[Tree]:
        """Return the states before the first shard, and after each of them."""
        states, width = [first], first.shape[-1]
        for effect in effects:
            b, a = effect[..., :width], _rows(effect[..., width:])
            states.append(b + (a @ _rows(states[-1])).reshape(first.shape))
        return states

    def chain_backward(self, first: Tree, effects: Sequence[Tree], d_states: Sequence[Tree]) -> tuple[Tree, list[Tree]]:
        """Return the gradients of the first state and of the effects."""
        import jax.numpy as jnp

        states, width, found = self.chain(first, effects), first.shape[-1], []
        d_after = d_states[-1]
        for before, effect, d_before in zip(states[-2::-1], effects[::-1], d_states[-2::-1], strict=True):
            # forward: after = b + a @ before
            a = _rows(effect[..., width:])
            d_a = (_rows(d_after) @ jnp.matrix_transpose(_rows(before))).reshape(*first.shape[:-1], a.shape[-1])
            found.append(jnp.concatenate([d_after, d_a], axis=-1))
            d_after = d_before + (jnp.matrix_transpose(a) @ _rows(d_after)).reshape(first.shape)
        return d_after, found[::-1]


def _room(record: Mechanism) -> Any:
    """Return the package of a mechanism: its public functions."""
    return importlib.import_module(record.home)


def _rows(state: Array) -> Array:
    """Return a state (b, g, ..., e) as a matrix (b, g, d, e)."""
    return state.reshape(*state.shape[:2], -1, state.shape[-1])


def _joined(x: Array, axis: int) -> Array:
    """Return pieces, which stand on the first axis, one after the other along an axis of tokens."""
    import jax.numpy as jnp

    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
