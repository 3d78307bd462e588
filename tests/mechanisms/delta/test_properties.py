"""What holds of the recurrences whatever the numbers are, to the bit where it does; both implementations."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import refattn as ra
from refattn import backends, philox
from refattn.mechanisms.delta import options
from refattn.mechanisms.delta.layer.block import gates_of
from refattn.mechanisms.delta.testing.cases import RULES
from refattn.verify.selfcheck.probe import Core
from refattn.verify.selfcheck.properties import PROPERTIES
from refattn.verify.selfcheck.samples import property_samples
from tests.rows import holds

IMPLEMENTATIONS = ("recurrent", "chunked")
Arrays = dict[str, Any]


def draw(name: str, *shape: int) -> Any:
    return philox.normal(shape, seed=29, purpose=f"delta.{name}")


def uniform(name: str, low: float, high: float, *shape: int) -> Any:
    return low + (high - low) * philox.uniform(shape, seed=29, purpose=f"delta.{name}")


def call(rule: str, n: int = 13, *, b: int = 2, h: int = 2, f: int = 2, g: int = 2, d: int = 4, e: int = 3) -> Arrays:
    """Arguments of a rule, keys of length 1 and a first state."""
    k = draw("k", b, f, n, d)
    x: Arrays = {"q": draw("q", b, h, n, d), "k": k / np.linalg.norm(k, axis=-1, keepdims=True)}
    x["v"] = draw("v", b, g, n, e)
    low_high = {"beta": (0.05, 0.95), "log_decay": (-0.5, 0.0), "log_momentum": (-1.5, 0.0), "step": (0.3, 1.5)}
    for gate, axes in RULES[rule].items():
        x[gate] = uniform(gate, *low_high[gate], *((b, g, n, d) if axes == "bgnd" else (b, g, n)))
    x["state"] = draw("state", b, g, 2, d, e) if rule == "momentum" else draw("state", b, g, d, e)
    return x


def run(x: Arrays, implementation: str = "recurrent", **more: Any) -> tuple[Any, Any]:
    return ra.delta.forward(**x, implementation=implementation, **more)


def tokens(x: Arrays, at: slice) -> Arrays:
    return {n: a if n == "state" else a[:, :, at] for n, a in x.items()}


def close(a: Any, b: Any, error: float = 1e-12) -> None:
    np.testing.assert_allclose(a, b, rtol=error, atol=error)


@settings(max_examples=15)
@given(st.sampled_from(list(RULES)), st.sampled_from(IMPLEMENTATIONS), st.integers(0, 13), st.integers(1, 6))
def test_a_sequence_in_two_parts_is_the_whole(rule: str, implementation: str, cut: int, chunk: int) -> None:
    x, d_out = call(rule), draw("d_out", 2, 2, 13, 3)
    whole, saved = run(x, implementation, chunk=chunk)
    left, right = tokens(x, slice(cut)), tokens(x, slice(cut, None))
    first, saved_left = run(left, implementation, chunk=chunk)
    second, saved_right = run({**right, "state": saved_left.state}, implementation, chunk=chunk)
    close(np.concatenate([first, second], axis=2), whole)
    close(saved_right.state, saved.state)
    d_last = draw("d_state", *saved.state.shape)
    wanted = ra.delta.backward(saved, d_out, d_last)
    later = ra.delta.backward(saved_right, d_out[:, :, cut:], d_last)
    earlier = ra.delta.backward(saved_left, d_out[:, :, :cut], later["state"])
    close(earlier["state"], wanted["state"])
    close(earlier["scale"] + later["scale"], wanted["scale"])
    for name in set(x) - {"state"}:
        close(np.concatenate([earlier[name], later[name]], axis=2), wanted[name], 1e-11)


@pytest.mark.parametrize(
    ("channels", "width", "n", "implementation"),
    [
        (False, 4, 16, "recurrent"),
        (False, 4, 17, "chunked"),
        (True, 4, 64, "recurrent"),
        (True, 4, 65, "chunked"),
        (True, 128, 16, "recurrent"),
        (True, 128, 17, "chunked"),
    ],
)
def test_the_form_that_is_taken(channels: bool, width: int, n: int, implementation: str) -> None:
    x = call("kda" if channels else "gated-delta", n, b=1, d=width, e=width)
    assert run(x, "auto")[1].implementation == implementation


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("rule", RULES)
def test_packed_sequences_are_separate_ones_to_the_bit(rule: str, implementation: str) -> None:
    x, lengths = call(rule, 14, b=1), (5, 0, 9)
    x["state"] = draw("states", 3, *x["state"].shape[1:])
    out, saved = run(x, implementation, lengths=lengths, chunk=4)
    d_out, d_state = draw("d_out", *out.shape), draw("d_state", *saved.state.shape)
    gradients = ra.delta.backward(saved, d_out, d_state)
    for m, (first, stop) in enumerate([(0, 5), (5, 5), (5, 14)]):
        part = tokens(x, slice(first, stop)) | {"state": x["state"][m : m + 1]}
        alone, kept = run(part, implementation, chunk=4)
        assert np.array_equal(alone, out[:, :, first:stop])
        assert np.array_equal(kept.state, saved.state[m : m + 1])
        wanted = ra.delta.backward(kept, d_out[:, :, first:stop], d_state[m : m + 1])
        assert np.array_equal(wanted["state"], gradients["state"][m : m + 1])
        if implementation == "recurrent":
            assert all(np.array_equal(wanted[name], gradients[name][:, :, first:stop]) for name in set(x) - {"state"})
    assert np.array_equal(saved.state[1], x["state"][1]) and np.array_equal(gradients["state"][1], d_state[1])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_neutral_gates_are_absent_ones(implementation: str) -> None:
    x = call("delta")
    out, saved = run(x, implementation)
    same, also = run({**x, "log_decay": np.zeros((2, 2, 13))}, implementation)
    assert np.array_equal(out, same) and np.array_equal(saved.state, also.state)
    kept = run({**x, "beta": 0.0 * x["beta"], "log_decay": np.zeros((2, 2, 13))}, implementation)[1]
    assert np.array_equal(kept.state, x["state"])
    y = call("gated-delta")
    channels = np.repeat(y["log_decay"][..., None], 4, axis=-1)
    close(run({**y, "log_decay": channels}, implementation)[0], run(y, implementation)[0])
    both = np.stack([y["state"], draw("M", *y["state"].shape)], axis=2)
    forgotten = {**y, "state": both, "log_momentum": np.full((2, 2, 13), -np.inf)}
    close(run(forgotten, implementation)[0], run(y, implementation)[0])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_decay_to_0_begins_a_sequence(implementation: str) -> None:
    x = call("kda", 12)
    x["log_decay"][:, :, 5] = -np.inf
    out, saved = run(x, implementation, chunk=8)
    fresh = tokens(x, slice(5, None))
    fresh["state"] = 0.0 * x["state"]
    fresh["log_decay"] = np.where(np.isinf(fresh["log_decay"]), 0.0, fresh["log_decay"])
    close(run(fresh, implementation)[0], out[:, :, 5:])
    gradients = ra.delta.backward(saved, draw("d_out", *out.shape))
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients.values())
    assert not np.any(gradients["log_decay"][:, :, 5])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_it_is_an_associative_memory(implementation: str) -> None:
    k, v = np.eye(6)[None, None], draw("v", 1, 1, 6, 3)
    ones = np.ones((1, 1, 6))
    assert np.array_equal(run({"q": k, "k": k, "v": v, "beta": ones}, implementation)[1].state[0, 0], v[0, 0])
    one = np.broadcast_to(k[:, :, :1], (1, 1, 6, 6))
    for beta, last in ((1.0, v[0, 0, -1]), (0.0, 0.0 * v[0, 0, 0])):
        assert np.array_equal(
            run({"q": k, "k": one, "v": v, "beta": beta * ones}, implementation)[1].state[0, 0, 0], last
        )
    signs = (-1.0) ** np.arange(5, -1, -1)
    close(run({"q": k, "k": one, "v": v, "beta": 2.0 * ones}, implementation)[1].state[0, 0, 0], 2.0 * signs @ v[0, 0])
    same = np.broadcast_to(v[:, :, :1], v.shape)
    missing = same[0, 0, 0] - run({"q": k, "k": one, "v": same, "beta": 0.25 * ones}, implementation)[1].state[0, 0, 0]
    close(missing, 0.75**6 * same[0, 0, 0])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_signs_and_sizes_of_keys_and_values(implementation: str) -> None:
    x = call("kda")
    out, _ = run(x, implementation)
    signs = np.where(philox.uniform((13,), seed=1, purpose="signs") < 0.5, -1.0, 1.0)[:, None]
    assert np.array_equal(run({**x, "k": signs * x["k"], "v": signs * x["v"]}, implementation)[0], out)
    scaled = {**x, "k": 4.0 * x["k"], "v": 4.0 * x["v"], "beta": x["beta"] / 16.0}
    assert np.array_equal(run(scaled, implementation)[0], out)


def test_a_rotation_of_keys_and_queries() -> None:
    x, turn = call("gated-delta"), np.linalg.qr(draw("turn", 4, 4))[0]
    out, saved = run(x)
    turned = {**x, "q": x["q"] @ turn, "k": x["k"] @ turn, "state": turn.T @ x["state"]}
    again, also = run(turned)
    close(again, out)
    close(also.state, turn.T @ saved.state)


def test_reflections_keep_the_size_of_the_state() -> None:
    x = call("delta", 64, b=1)
    x |= {"beta": np.full((1, 2, 64), 2.0), "v": 0.0 * x["v"]}
    close(np.linalg.norm(run(x)[1].state), np.linalg.norm(x["state"]))


def test_a_block_reaches_its_largest_beta() -> None:
    """A layer with beta up to 2 can reflect, one with beta up to 1 cannot."""
    block, x = ra.mechanism("delta").block, np.ones((1, 3, 4))
    for changes, most in (({"beta_max": 2.0}, 2.0), ({}, 1.0)):
        params = block.init(block.Config(width=4, heads=2, rule="delta", **changes), seed=1, like=x)
        params = replace(params, w_beta=np.full_like(params.w_beta, 9.0))
        close(gates_of(params, x)[0]["beta"], np.full((1, 2, 3), most), 1e-12)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_gradient_of_the_decay_from_those_of_queries_and_keys(implementation: str) -> None:
    """Sums from the end on of q dq - k dk, and the last state with its gradient."""
    x = call("gated-channel")
    out, saved = run(x, implementation)
    d_out, d_last = draw("d_out", *out.shape), draw("d_last", *saved.state.shape)
    d = ra.delta.backward(saved, d_out, d_last)
    terms = x["q"] * d["q"] - x["k"] * d["k"]  # without beta nothing is predicted
    sums = np.cumsum(terms[:, :, ::-1], axis=2)[:, :, ::-1]
    close(d["log_decay"], sums + np.sum(d_last * saved.state, axis=-1)[:, :, None], 1e-11)


def test_linear_is_higher_order_attention_of_order_1_without_its_normaliser() -> None:
    x = call("linear")
    del x["state"]
    out, _ = run(x, scale=1.0)
    other, saved = ra.higher_order.forward(
        **x, order=1, alpha=1.0 / math.sqrt(4), layer_norm=False, normaliser="add(eps=1e-300)", causal=True
    )
    close(other * saved.normaliser[..., None] - np.cumsum(x["v"], axis=2), out, 1e-11)


def test_steps_and_beta_of_a_momentum() -> None:
    x = call("momentum")
    out, saved = run(x)
    state = np.stack([x["state"][:, :, 0], 8.0 * x["state"][:, :, 1]], axis=2)
    same, also = run({**x, "step": 8.0 * x["step"], "beta": x["beta"] / 8.0, "state": state})
    close(same, out)
    close(also.state[:, :, 0], saved.state[:, :, 0])


def test_strong_decays_lose_no_digits_in_float32() -> None:
    x = {n: a.astype(np.float32) for n, a in call("kda", 64, b=1, d=8).items()}
    x["log_decay"] = (-0.05 * np.ones_like(x["log_decay"])).astype(np.float32)
    x["log_decay"][:, :, 20] = -3000.0
    wide = {n: a.astype(np.float64) for n, a in x.items()}
    d_out = draw("d_out", 1, 2, 64, 3)
    exact, kept = run(wide)
    wanted = ra.delta.backward(kept, d_out)
    for implementation in IMPLEMENTATIONS:
        out, saved = run(x, implementation)
        found = ra.delta.backward(saved, d_out.astype(np.float32)) | {"out": out}
        for name, truth in {**wanted, "out": exact}.items():
            assert np.max(np.abs(found[name] - truth)) <= 2e-6 * np.max(np.abs(truth)), (implementation, name)


def test_equal_keys_and_momenta_lose_no_digits_in_float32() -> None:
    ones = np.ones((1, 1, 64))
    k, v = np.broadcast_to(np.eye(8)[0], (1, 1, 64, 8)), np.rint(4.0 * draw("v", 1, 1, 64, 3))
    x = {n: a.astype(np.float32) for n, a in {"q": k, "k": k, "v": v, "beta": ones}.items()}
    assert np.array_equal(run(x, "chunked", chunk=64)[0], run(x)[0])
    y = call("momentum", 64, b=1, d=8)
    y["log_momentum"] = -np.ones((1, 2, 64))
    exact = run(y)[0]
    found = run({n: a.astype(np.float32) for n, a in y.items()}, "chunked", chunk=64)[0]
    assert np.max(np.abs(found - exact)) <= 1e-5 * np.max(np.abs(exact))


def test_a_state_in_bfloat16_does_not_converge() -> None:
    """What a kernel loses that stores its state so; one that keeps it wide is as near as it should be."""
    from refattn.golden.storage_types import round_to

    v = draw("v", 8, 1)
    narrow = wide = np.zeros((8, 1))
    for _ in range(256):
        wide = wide + (v - wide) / 16.0
        narrow = round_to(narrow + (v - narrow) / 16.0, "bfloat16")
    assert np.max(np.abs(v - wide)) < 1e-6 and np.max(np.abs(v - narrow)) > 5e-3
    # Here: of tokens in a short type the state is float32, and comes as near.
    ones, short = np.ones((1, 1, 256, 1), np.float16), v[:, 0].astype(np.float16)
    x = {"q": ones, "k": ones, "v": short * ones, "beta": ones[..., 0] / np.float16(16.0)}
    for implementation in IMPLEMENTATIONS:
        state = run(x, implementation)[1].state
        assert state.dtype == np.float32 and np.max(np.abs(state[0, 0, 0] - short)) < 1e-5
    assert holds("delta", "the state may be stored in a short type").startswith("at least float32: in bfloat16 what is")


def test_padding_that_decays_breaks_its_law(monkeypatch: pytest.MonkeyPatch) -> None:
    record, samples = ra.mechanism("delta"), property_samples(ra.mechanism("delta"), None)
    core = Core(record, "recurrent", backends.get("numpy"), "float64")
    assert max(PROPERTIES["sequence_padding"](core, s) for s in samples) <= 1.0
    right = options.hidden
    monkeypatch.setattr(options, "hidden", lambda x, mask: right(x, mask) if len(x.shape) == 4 else x)  # gates stay
    assert PROPERTIES["sequence_padding"](core, samples[0]) > 1.0
