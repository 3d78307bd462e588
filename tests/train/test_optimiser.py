"""AdamW and clipping: against torch, on all libraries, for any number of workers, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import refattn as ra
from refattn import philox, tree
from refattn.backends import use_workers
from refattn.train import leaves as pieces
from refattn.train.optimiser import AdamW, AdamWState, Group, clip, default_groups
from refattn.train.schedule import WarmupCosine
from tests.rows import claimed

SHAPES = {
    "token_embedding": (7, 4),
    "layers.0.block.w_q": (4, 6),
    "layers.0.block.b_q": (6,),
    "layers.0.norm_1.gain": (4,),
    "layers.0.scale": (),
    "final_norm.gain": (4,),
}
GROUPS = (Group("*embedding", rate=0.5), Group("*.w_*", weight_decay=0.3), Group("layers.*", 0.05, 2.0), Group("*"))


def nested(leaves: dict[str, Any]) -> dict[str, Any]:
    """A tree whose arrays have these names."""
    made: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *path, last = name.split(".")
        here = made
        for part in path:
            here = here.setdefault(part, {})
        here[last] = leaf
    return made


def numbers(seed: int, step: int = 0, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, Any]:
    return {name: philox.normal(shape, seed=seed, purpose=name, step=step) for name, shape in shapes.items()}


def frozen(leaves: dict[str, Any]) -> dict[str, Any]:
    """The same, and writing to them raises."""
    for leaf in leaves.values():
        leaf.flags.writeable = False
    return nested(leaves)


# --- torch


def test_fifty_steps_are_those_of_torch() -> None:
    """AdamW in groups, the norm, the clipping and the schedule together, in float64."""
    torch = pytest.importorskip("torch")
    schedule = WarmupCosine(peak=2e-2, warmup=10, steps=50)
    adam = AdamW(1.0, beta1=0.8, beta2=0.97, epsilon=1e-7, groups=GROUPS)
    params: Any = frozen(numbers(0))
    state = adam.start(params)

    theirs = {name: torch.tensor(x, requires_grad=True) for name, x in tree.flatten(params).items()}
    settings = [
        {
            "params": [leaf],
            "lr": (group := adam.group_of(name, leaf)).rate,
            "weight_decay": group.weight_decay,
        }
        for name, leaf in theirs.items()
    ]
    torch_adam = torch.optim.AdamW(settings, betas=(0.8, 0.97), eps=1e-7)
    torch_rate = torch.optim.lr_scheduler.LambdaLR(torch_adam, lambda n: schedule(n + 1))
    clipped = 0
    for step in range(1, 51):
        gradients = numbers(1, step)
        for name, leaf in theirs.items():
            leaf.grad = torch.tensor(gradients[name])
        limit = 7.0 if step % 2 else 100.0
        torch_norm = torch.nn.utils.clip_grad_norm_(list(theirs.values()), limit)
        torch_adam.step()
        torch_rate.step()

        scaled, norm = clip(frozen(gradients), limit)
        clipped += float(norm) > limit
        params, state = adam.update(state, params, scaled, schedule(step))
        assert float(norm) == pytest.approx(float(torch_norm), rel=1e-12)
        for name, leaf in tree.flatten(params).items():
            np.testing.assert_allclose(leaf, theirs[name].detach().numpy(), rtol=1e-12, atol=1e-13, err_msg=name)
    assert 10 < clipped < 40
    for name, leaf in theirs.items():
        kept = torch_adam.state[leaf]
        np.testing.assert_allclose(tree.flatten(state.first)[name], kept["exp_avg"].numpy(), rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(tree.flatten(state.second)[name], kept["exp_avg_sq"].numpy(), rtol=1e-12, atol=1e-14)
        assert float(tree.flatten(state.count)[name]) == 50.0


# --- by hand


def test_one_step_by_hand() -> None:
    """The first step moves each element by the rate against the sign of its gradient; the decay comes on top."""
    adam = AdamW(0.01, epsilon=1e-12, groups=(Group("w", 0.1), Group("b")))
    params = {"w": np.asarray([[2.0, -4.0]]), "b": np.asarray([3.0])}
    state = adam.start(params)
    moved, state = adam.update(state, params, {"w": np.asarray([[5.0, -1e-3]]), "b": np.asarray([-7.0])})
    np.testing.assert_allclose(moved["w"], [[2.0 * 0.999 - 0.01, -4.0 * 0.999 + 0.01]], rtol=1e-9)
    np.testing.assert_allclose(moved["b"], [3.01], rtol=1e-9)
    np.testing.assert_allclose(state.first["w"], [[0.5, -1e-4]], rtol=1e-12)
    np.testing.assert_allclose(state.second["b"], [0.05 * 49.0], rtol=1e-12)
    assert state.count["w"] == state.count["b"] == 1.0


def _leaves(params: Any) -> list[Any]:
    return list(tree.flatten(params).values())


def test_columns_may_have_counts_of_their_own() -> None:
    """Columns that are new to the optimiser move like those of a leaf that is new as a whole."""
    adam = AdamW(0.01, groups=(Group("*", 0.1),))
    old, new = {"w": np.ones((3, 2))}, {"w": np.full((3, 4), 2.0)}
    old_state = adam.start(old)
    for step in range(5):
        old, old_state = adam.update(old_state, old, {"w": philox.normal((3, 2), seed=1, purpose="old", step=step)})
    new_state = adam.start(new)

    def beside(a: Any, b: Any) -> dict[str, Any]:
        return {"w": np.concat([np.broadcast_to(x["w"], (x["w"].shape[0], n)) for x, n in ((a, 2), (b, 4))], axis=1)}

    counts = [{"w": np.reshape(s.count["w"], (1, 1))} for s in (old_state, new_state)]
    state = AdamWState(
        beside(old_state.first, new_state.first), beside(old_state.second, new_state.second), beside(*counts)
    )
    assert state.count["w"].tolist() == [[5.0, 5.0, 0.0, 0.0, 0.0, 0.0]]
    params = beside(old, new)
    for step in range(4):
        gradients = {"w": philox.normal((3, 6), seed=2, purpose="both", step=step)}
        params, state = adam.update(state, params, gradients)
        old, old_state = adam.update(old_state, old, {"w": gradients["w"][:, :2]})
        new, new_state = adam.update(new_state, new, {"w": gradients["w"][:, 2:]})
    assert np.array_equal(params["w"], beside(old, new)["w"])
    assert state.count["w"].tolist() == [[9.0, 9.0, 4.0, 4.0, 4.0, 4.0]]


# --- libraries, dtypes, workers


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_every_library_takes_the_same_steps(backend: Any, dtype: str) -> None:
    if str(backend) == "jax" and dtype == "float32":
        pytest.skip("JAX compiles every operation for every shape")
    adam = AdamW(0.02, groups=GROUPS)
    runs = []
    for array in (lambda x: backend.array(x, dtype), lambda x: np.asarray(x, dtype=dtype)):
        params: Any = nested({name: array(x) for name, x in numbers(0).items()})
        state = adam.start(params)
        for step in range(5):
            gradients = nested({name: array(x) for name, x in numbers(1, step).items()})
            gradients, norm = clip(gradients, 6.0)
            params, state = adam.update(state, params, gradients)
        runs.append(tree.flatten({"params": params, "state": state, "norm": norm}))
    assert list(runs[0]) == list(runs[1]) and len(runs[0]) == 4 * len(SHAPES) + 1
    for name, leaf in runs[0].items():
        if name != "norm":
            assert type(backend.owner.to_numpy(leaf)) is np.ndarray or leaf.shape == ()
            assert str(leaf.dtype).rpartition(".")[2] == dtype, name
        limit = 1e-13 if dtype == "float64" else 1e-5
        np.testing.assert_allclose(backend.host(leaf), runs[1][name], rtol=limit, atol=limit, err_msg=name)


def large() -> tuple[Any, Any]:
    """A leaf of several pieces whose last one is smaller, one of a single row, and small ones."""
    shapes = {"w": (1100, 1024), "wide": (1, 2**20 + 1), "long": (2**20 + 3,), "b_q": (5,), "scale": ()}
    made = []
    for seed in (0, 1):
        draws = numbers(seed, shapes=dict.fromkeys(shapes, (1000,)))
        leaves = {name: np.resize(draws[name], shape).astype(np.float32) for name, shape in shapes.items()}
        made.append(frozen(leaves))
    return made[0], made[1]


def test_any_number_of_workers_gives_the_same_bits() -> None:
    params, gradients = large()
    adam = AdamW(0.01, groups=(Group("w", 0.1), Group("*")))
    results = []
    for count in (1, 2, 3, 8):
        with use_workers(count):
            clipped, norm = clip(gradients, 1.0)
            moved, state = adam.update(adam.start(params), params, clipped)
            moved, state = adam.update(state, moved, gradients)
            results.append([*_leaves(moved), *_leaves(state), norm])
    for other in results[1:]:
        for x, y in zip(results[0], other, strict=True):
            assert x.dtype == y.dtype and x.shape == y.shape and np.array_equal(x, y)


def test_pieces_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves that are cut move exactly as those that are not; columns' and rows' own counts too."""
    params, gradients = large()
    adam = AdamW(0.01, groups=(Group("w", 0.1), Group("*")))
    start = adam.start(params)
    columns = np.arange(1024, dtype=np.float32).reshape(1, -1)
    rows = np.arange(2**20 + 3, dtype=np.float32)
    start = replace(start, count=start.count | {"w": columns, "long": rows})
    results = []
    for size in (pieces.PIECE, 2**40):
        monkeypatch.setattr(pieces, "PIECE", size)
        results.append(adam.update(start, params, gradients))
    for x, y in zip(*map(_leaves, results), strict=True):
        assert np.array_equal(x, y)
    norms = []
    for size in (1000, 2**40):
        monkeypatch.setattr(pieces, "PIECE", size)
        norms.append(float(clip(gradients, None)[1]))
    assert norms[0] == pytest.approx(norms[1], rel=1e-14)


# --- groups


def test_the_default_groups() -> None:
    adam = AdamW(0.1, groups=default_groups(0.3))
    decay = {
        **{"token_embedding": 0.0, "position_embedding": 0.0, "layers.0.block.w_q": 0.3, "layers.0.block.b_q": 0.0},
        **{"layers.11.mlp.w_in": 0.3, "layers.11.mlp.b_in": 0.0, "layers.0.norm_1.gain": 0.0, "final_norm.gain": 0.0},
        **{"layers.0.block.norm.gain": 0.0, "layers.0.block.scale": 0.0, "layers.0.block.damping": 0.0, "head": 0.3},
    }
    shapes = {name: (4, 4) for name in decay} | {"layers.0.block.scale": (), "layers.0.block.damping": (4,)}
    found = {name: adam.group_of(name, np.ones(shape)).weight_decay for name, shape in shapes.items()}
    assert found == decay


def test_decay_of_embeddings_and_the_rate_of_numbers() -> None:
    adam = AdamW(0.1, groups=default_groups(0.3, decayed="embeddings", scalar_rate=5.0))
    shapes = {"token_embedding": (4, 4), "layers.0.block.w_q": (4, 4), "gain": (4,), "step": (1,), "scale": ()}
    found = {name: adam.group_of(name, np.ones(shape)) for name, shape in shapes.items()}
    assert {name: group.weight_decay for name, group in found.items() if group.weight_decay} == {"token_embedding": 0.3}
    assert {name for name, group in found.items() if group.rate == 5.0} == {"step", "scale"}
    with pytest.raises(ValueError, match="decayed: got 'all', needs"):
        default_groups(0.3, decayed="all")
    assert AdamW(0.1).group_of("w", np.ones((2, 2))).weight_decay == 0.1
    rate = ra.mechanism("sympformer").presets["presymp"]["scalar_rate"]
    assert claimed("sympformer", f"single numbers have a rate {rate:g} times as large").holds == "as said"


def test_a_leaf_without_a_group_is_named() -> None:
    adam = AdamW(0.1, groups=(Group("w"), Group("*", axes=2)))
    params = {"w": np.ones(2), "layers": ({"b_q": np.ones(3)},)}
    text = r"^groups: none has the parameter 'layers.0.b_q' of shape \(3,\); got 'w', '\*'$"
    with pytest.raises(ValueError, match=text):
        adam.start(params)
    state = AdamW(0.1).start(params)
    with pytest.raises(ValueError, match=text):
        adam.update(state, params, params)
    with pytest.raises(ValueError, match="got none at all"):
        AdamW(0.1, groups=()).start(params)


# --- clipping


@given(seed=st.integers(0, 1000), limit=st.floats(1e-3, 1e3))
def test_clipping_bounds_the_norm_and_keeps_the_direction(seed: int, limit: float) -> None:
    leaves = numbers(seed)
    scaled, norm = clip(nested(leaves), limit)
    flat, scaled_flat = (np.concatenate([np.ravel(x) for x in parts]) for parts in (leaves.values(), _leaves(scaled)))
    assert float(norm) == pytest.approx(np.linalg.norm(flat), rel=1e-13)
    assert np.linalg.norm(scaled_flat) <= limit * (1.0 + 1e-13) or np.array_equal(flat, scaled_flat)
    assert np.linalg.norm(scaled_flat) == pytest.approx(min(limit, float(norm)), rel=2e-6 / min(limit, 1.0))
    np.testing.assert_allclose(scaled_flat * float(norm), flat * np.linalg.norm(scaled_flat), rtol=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_norm_that_is_not_finite_scales_nothing(backend: Any, bad: float) -> None:
    gradients = {"a": backend.array([1.0, 2.0], "float32"), "b": backend.array([[bad], [1.0]], "float32")}
    same, norm = clip(gradients, 0.5)
    assert not math.isfinite(float(norm))
    assert backend.host(same["a"]).tolist() == [1.0, 2.0]
    assert backend.host(same["b"])[1, 0] == 1.0


def test_the_norm_is_accumulated_in_float64(backend: Any) -> None:
    """In float32 the squares of these would be infinite, and 0."""
    for value in (1e25, 1e-30):
        _, norm = clip({"a": backend.array([3.0 * value, 4.0 * value], "float32")}, None)
        assert float(norm) == pytest.approx(5.0 * value, rel=1e-6)


# --- what is refused

PARAMS = {"a": np.ones((2, 3)), "b": np.ones(2)}


def updated(gradients: Any = PARAMS, rate: float = 1.0, **state: Any) -> Any:
    """Update these parameters, with a part of the state exchanged."""
    adam = AdamW(0.1)
    start = adam.start(PARAMS)
    return adam.update(replace(start, **{n: getattr(start, n) | x for n, x in state.items()}), PARAMS, gradients, rate)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: AdamW(-1.0), ValueError, "learning_rate: got -1.0, needs a finite number from 0"),
        (lambda: AdamW("fast"), TypeError, "learning_rate: got 'fast', needs a finite number"),  # type: ignore[arg-type]
        (lambda: AdamW(0.1, beta1=1.0), ValueError, "beta1: got 1.0, needs a finite number from 0 to below 1"),
        (lambda: AdamW(0.1, beta2=1.5), ValueError, "beta2: got 1.5, needs a finite number from 0 to below 1"),
        (lambda: AdamW(0.1, epsilon=0.0), ValueError, "epsilon: got 0.0, needs a finite number above 0"),
        (lambda: Group("*", -0.1), ValueError, "weight_decay: got -0.1, needs a finite number from 0"),
        (lambda: Group("*", rate=math.nan), ValueError, "rate: got nan, needs a finite number from 0"),
        (lambda: Group(3), TypeError, "pattern: got 3, needs a text"),  # type: ignore[arg-type]
        (lambda: Group("*", axes=-1), ValueError, "axes: got -1, needs a whole number"),
        (
            lambda: updated({"a": PARAMS["a"]}),
            ValueError,
            "gradients: lacks 'b'; needs exactly the 2 names of the tree",
        ),
        (lambda: updated(PARAMS | {"c": np.ones(2)}), ValueError, "gradients: has the unknown 'c'; needs exactly"),
        (lambda: updated(PARAMS | {"b": np.ones(1)}), ValueError, "gradients: got 'b' of shape (1,), needs (2,) as in"),
        (lambda: updated(PARAMS | {"b": np.ones(2, "f4")}), TypeError, "gradients: got 'b' of dtype float32, needs fl"),
        (lambda: updated(count={"a": np.ones(3)}), ValueError, "state.count: got 'a' of shape (3,), needs (2, 3) as"),
        (lambda: updated(first={"a": np.ones((2, 2))}), ValueError, "state.first: got 'a' of shape (2, 2), needs (2,"),
        (lambda: updated(rate=math.inf), ValueError, "rate: got inf, needs a finite number from 0"),
        (lambda: AdamW(0.1).start({"a": np.ones(2, "f2")}), TypeError, "params: got 'a' of dtype float16, needs floa"),
        (lambda: clip({"a": np.ones(2)}, 0.0), ValueError, "limit: got 0.0, needs a finite number above 0"),
        (lambda: clip({}, 1.0), ValueError, "gradients: got a tree without arrays"),
    ],
)
def test_what_is_refused(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value).startswith(text)
