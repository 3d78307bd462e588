"""Over devices: a mesh and its text, a ring of keys, a scan of states, and what a device holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import backends, philox, shards, tree
from refattn.mechanisms.record import Unsupported
from refattn.shards import measure, mesh

jax = pytest.importorskip("jax")


def normal(*shape: int, purpose: str = "x") -> Any:
    return philox.normal(shape, seed=0, purpose=f"shards.{purpose}")


@pytest.mark.parametrize("text", ["", "tokens", "tokens=0", "tokens=2,tokens=2", "rows=2", "tokens=2;heads=2"])
def test_what_is_no_mesh(text: str) -> None:
    with pytest.raises(ValueError, match="mesh: got .*, needs sizes such as heads=2,tokens=4"):
        mesh.sizes_of(text)


def test_how_arrays_lie_on_a_mesh() -> None:
    shapes = {"q": (2, 4, 8, 3), "beta": (2, 4, 8), "key_mask": (2, 8), "scale": (), "mask": (1, 1, 8, 8)}
    found = {name: mesh.axes_of(name, np.empty(shape)) for name, shape in shapes.items()}
    rows = ("batch", "heads", "tokens")
    assert found == {"q": (*rows, None), "beta": rows, "key_mask": ("batch", "tokens"), "scale": ()} | {
        "mask": (None, None, "tokens", None)
    }
    assert mesh.axes_of("state", np.empty((2, 4, 8, 3)), ("state",)) == ("batch", "heads", None, None)


def test_devices_that_are_not_there() -> None:
    with pytest.raises(ValueError, match="devices: got .* of JAX, needs 99; on a CPU: XLA_FLAGS=--xla_force"):
        mesh.use_devices(99)
    on = mesh.make({"tokens": 4})
    assert mesh.place(on, "q", np.zeros((1, 2, 8, 3))).addressable_shards[1].data.shape == (1, 2, 2, 3)
    with pytest.raises(ValueError, match="q: got 6 tokens, needs a multiple of the 4 devices of the mesh"):
        mesh.place(on, "q", np.zeros((1, 2, 6, 3)))


def test_what_has_no_form_for_devices() -> None:
    with pytest.raises(Unsupported, match="mechanism: got koopman, needs one with an lse or a state"):
        shards.parallel("koopman", mesh.make({"tokens": 2}))


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    """What is compared is in float64, whatever another test of this process has left of JAX's setting."""
    with backends.get("jax").with_float64():
        yield


def over_devices(name: str, on: Any, arguments: Mapping[str, Any], options: Mapping[str, Any], **how: Any) -> None:
    """Compare out, a further output and all gradients with those of the definition."""
    core, further = ra.mechanism(name).core, "lse" if "lse" in ra.mechanism(name).outputs else "state"
    assert core is not None
    out, saved = core.forward(**arguments, **options)
    second = getattr(saved, further)
    upstream = {"d_out": normal(*out.shape, purpose="d_out")}
    if second is not None:
        upstream[f"d_{further}"] = tree.map_leaves(
            lambda x: np.where(np.isfinite(x), normal(*x.shape, purpose="d"), 0.0), second
        )
    expected = {"out": out, further: second, **core.backward(saved, **upstream)}
    written: Any = shards.parallel(name, on, **how)

    @jax.jit
    def both(arguments: Any, upstream: Any) -> Any:
        out, saved = written.forward(**arguments, **options)
        return {"out": out, further: getattr(saved, further), **written.backward(saved, **upstream)}

    found = both(*(tree.map_leaves(jax.numpy.asarray, x) for x in (dict(arguments), upstream)))
    wanted, got = (tree.flatten({n: x for n, x in y.items() if expected[n] is not None}) for y in (expected, found))
    assert set(got) == set(wanted)
    for each, x in wanted.items():
        size = float(np.max(np.abs(np.where(np.isfinite(x), x, 0.0)), initial=1e-3))
        np.testing.assert_allclose(np.asarray(got[each]), x, rtol=0.0, atol=2e-13 * size, err_msg=each)


def qkv(b: int, h: int, g: int, n: int, m: int, d: int, e: int) -> dict[str, Any]:
    shapes = {"q": (b, h, n, d), "k": (b, g, m, d), "v": (b, g, m, e)}
    return {name: normal(*shape, purpose=name) for name, shape in shapes.items()}


PLANES: dict[str, Any] = {"mask": normal(2, 1, 5, 7) < 0.5, "bias": normal(4, 1, 7), "keep": 1.0 + (normal(5, 7) < 0.0)}
RINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "everything": (
        {**PLANES, "sink": normal(4, 2), "k_lengths": np.array([3, 7]), "q_lengths": np.array([5, 2])},
        {"causal": True, "window": (4, None), "softcap": 2.0, "scale": 0.4},
    ),
    "plain": ({}, {}),
    "causal": ({}, {"causal": True}),
    "top left": ({}, {"causal": "top_left"}),
    "window": ({"offset": np.array([3, -2])}, {"window": (2, 1)}),
}


@pytest.mark.parametrize("name", ["everything", *(pytest.param(n, marks=pytest.mark.slow) for n in list(RINGS)[1:])])
def test_a_ring_of_keys(name: str) -> None:
    """Also of lengths that no device divides, and with more heads than key heads."""
    arrays, options = RINGS[name]
    on = mesh.make({"heads": 2, "tokens": 2})
    over_devices("softmax", on, qkv(2, 4, 2, 5, 7, 3, 2) | arrays, options, implementation="dense")


def test_a_block_of_keys_without_keys_changes_nothing() -> None:
    out, lse = jax.numpy.ones((1, 1, 2, 1)), jax.numpy.asarray([[[0.5, -math.inf]]])
    merged = shards.keys.merge(out, lse, 7.0 * out, jax.numpy.full_like(lse, -math.inf))
    np.testing.assert_array_equal(merged[0][0, 0, 0], [1.0])
    np.testing.assert_array_equal(merged[1], lse)


GATES = {"beta": 0.5 + 0.1 * normal(2, 2, 7), "log_decay": -np.abs(normal(2, 2, 7)), "key_mask": normal(2, 7) < 1.0}
MOMENTUM = {"log_momentum": -np.abs(normal(2, 2, 7)), "step": np.abs(normal(2, 2, 7)), "state": normal(2, 2, 2, 3, 2)}
SCANS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "sums": ("higher_order", {"key_mask": normal(2, 7) < 1.0}, {"causal": True}, {}),
    "sums in pieces": ("higher_order", {}, {"causal": True, "order": 1, "normaliser": "add"}, {"piece": 2}),
    "maps": ("delta", GATES, {"qk_norm": True}, {"implementation": "chunked"}),
    "maps in pieces": ("delta", {**GATES, **MOMENTUM}, {"qk_norm": True, "scale": 0.3}, {"piece": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCANS)
def test_a_scan_of_states(name: str) -> None:
    mechanism, arrays, options, how = SCANS[name]
    over_devices(mechanism, mesh.make({"tokens": 4}), qkv(2, 2, 2, 7, 7, 3, 2) | arrays, options, **how)


@pytest.mark.slow
def test_a_scan_that_begins_with_a_state() -> None:
    x = qkv(2, 2, 2, 9, 9, 3, 2)
    first, rest = ({n: y[:, :, at] for n, y in x.items()} for at in (slice(3), slice(3, None)))
    start = ra.higher_order.empty_state(x["k"], x["v"])
    state = ra.higher_order.forward(**first, causal=True, state=start)[1].state
    over_devices("higher_order", mesh.make({"tokens": 2}), {**rest, "state": state}, {"causal": True})


@pytest.mark.parametrize("kind", ["merge", "maps"])
def test_a_chain_of_effects(kind: str) -> None:
    """Two effects after a first state: backward it is what differences along a direction say."""
    if kind == "maps":
        effects: Any = shards.states.Maps()
        parts = [jax.numpy.asarray(normal(1, 1, 2, size, purpose=str(size))) for size in (3, 5, 5)]
        parts[2] = parts[2] + 1.0
    else:
        effects = shards.states.Sums(ra.mechanism("higher_order"))
        x = qkv(1, 1, 1, 6, 6, 2, 2)
        empty = ra.higher_order.empty_state(x["k"], x["v"])
        cuts = ({n: y[:, :, at : at + 2] for n, y in x.items()} for at in (0, 2, 4))
        parts = [ra.higher_order.forward(**cut, causal=True, state=empty)[1].state for cut in cuts]
    d_states = [tree.map_leaves(lambda x, n=n: normal(*x.shape, purpose=f"d{n}"), parts[0]) for n in range(3)]

    def loss(parts: Any) -> float:
        states = effects.chain(parts[0], parts[1:])
        pairs = ((tree.flatten(s), tree.flatten(d)) for s, d in zip(states, d_states, strict=True))
        return sum(float((x * d[n]).sum()) for s, d in pairs for n, x in s.items() if n != "settings")

    along = [tree.map_leaves(lambda x: 1e-6 * normal(*x.shape, purpose="along"), part) for part in parts]
    moved = [[_sum(part, step, sign) for part, step in zip(parts, along, strict=True)] for sign in (1.0, -1.0)]
    d_first, d_effects = effects.chain_backward(parts[0], parts[1:], d_states)
    pairs = ((tree.flatten(d), tree.flatten(a)) for d, a in zip([d_first, *d_effects], along, strict=True))
    slope = sum(float((x * a[n]).sum()) for d, a in pairs for n, x in d.items() if n != "settings")
    assert slope == pytest.approx((loss(moved[0]) - loss(moved[1])) / 2.0, rel=1e-8)


def _sum(a: Any, b: Any, factor: float) -> Any:
    steps = tree.flatten(b)
    moved = {n: x + (factor * steps[n] if n != "settings" else 0.0) for n, x in tree.flatten(a).items()}
    return tree.unflatten(a, moved)


def test_merged_states_are_that_of_all_keys() -> None:
    x = qkv(2, 2, 2, 7, 7, 3, 2)
    empty = ra.higher_order.empty_state(x["k"], x["v"])
    cuts = [{n: y[:, :, at] for n, y in x.items()} for at in (slice(3), slice(3, None), slice(None))]
    states: list[Any] = [ra.higher_order.forward(**cut, causal=True, state=empty)[1].state for cut in cuts]
    *parts, whole = states
    merged = tree.flatten(ra.higher_order.merge_states([empty, *parts]))
    for name, wanted in tree.flatten(whole).items():
        np.testing.assert_allclose(merged[name], wanted, rtol=0.0, atol=1e-13 * np.max(np.abs(wanted)), err_msg=name)


def test_axes_of_full_length_are_counted() -> None:
    counted = SimpleNamespace(argument_size_in_bytes=1, output_size_in_bytes=2, temp_size_in_bytes=4)
    text = "%a = f64[2,8,8]{2,1,0} add(f64[2,8,8] %x, f64[2,8,8] %y)\n%b = (s32[8,1], bf16[16,9]) f(pred[8,7] %m)"
    compiled = SimpleNamespace(memory_analysis=lambda: counted, as_text=lambda: text)
    assert measure.held(compiled, 8) == measure.Held(bytes=7, pairs=2)
