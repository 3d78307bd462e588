"""The language model: its equations, its laws for every mechanism, and all gradients in three ways."""

from __future__ import annotations

import dataclasses
import inspect
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import refattn as ra
from refattn import backends, model, philox, tree
from refattn.model import decode, network, pointer
from refattn.ops.losses import cross_entropy_backward, cross_entropy_forward
from refattn.verify.selfcheck import gradients
from tests.test_equation_ids import id_problems, line_problems, trace_of

CAUSAL = [name for name in ra.list_mechanisms() if "causal" in ra.mechanism(name).context_fields]
SIZES = {"b": 5, "n": 13, "m": 8, "t": 11}


def config(name: str, **changes: Any) -> model.Config:
    sizes: dict[str, Any] = {"vocabulary": 11, "context": 13, "width": 8, "heads": 2, "layers": 2}
    return model.Config(**{"mechanism": name, **sizes, **changes})


def params_of(name: str, **changes: Any) -> model.Params:
    """Parameters none of which is 0 or 1: there an error could hide."""
    fresh = tree.flatten(model.init(config(name, **changes), seed=5, like=np.zeros(1)))
    # Embeddings of size 1, because small ones make the first norm so crooked that differences do not follow it.
    moved = {n: w + (1.0 if "embedding" in n else 0.1) * draw("moved", *w.shape) for n, w in fresh.items()}
    return tree.unflatten(model.init(config(name, **changes), like=np.zeros(1)), moved)


def draw(purpose: str, *shape: int) -> Any:
    return philox.normal(shape, seed=5, purpose=purpose)


def tokens(b: int, n: int, purpose: str = "tokens") -> Any:
    return philox.integers((b, n), 0, 11, seed=5, purpose=purpose)


def loss_and_gradients(params: Any, given: Any, targets: Any) -> tuple[Any, Any]:
    logits, saved = model.forward(params, given)
    losses, loss_saved = cross_entropy_forward(logits, targets)
    return losses, model.backward(params, saved, cross_entropy_backward(loss_saved, losses * 0.0 + 1.0))


# --- equations


def runs(name: str) -> list[tuple[Mapping[str, int], Callable[[], None]]]:
    def run() -> None:
        params = params_of(name)
        loss_and_gradients(params, tokens(5, 13), tokens(5, 13, "targets"))

    return [(SIZES, run)]


def pointing() -> tuple[Mapping[str, int], Callable[[], None]]:
    params = params_of("koopman", decode="pointer", layers=1)
    sizes = SIZES | {"h": 2, "i": 13, "j": 14}
    return sizes, lambda: loss_and_gradients(params, tokens(5, 13), tokens(5, 13, "targets")) and None


def test_ids_are_the_same_everywhere() -> None:
    traced = {id for id in trace_of([*runs("softmax"), pointing()]).variables if "LM." in id}
    assert id_problems([network, pointer], traced) == []


def test_every_array_has_its_axes_and_they_hold() -> None:
    found = line_problems([network, pointer], [pointing(), *(run for name in CAUSAL for run in runs(name))])
    # Only blocks with a norm of their own reach this line.
    text = inspect.getsource(network).splitlines()
    bare = 1 + next(n for n, line in enumerate(text) if "LM.3 of a block with a norm of its own" in line)
    own_norm = any("norm" in ra.mechanism(name).provides for name in CAUSAL)
    assert found == ([] if own_norm else [f"refattn.model.network:{bare}: the tag was not reached"])


# --- laws


@pytest.mark.parametrize("name", CAUSAL)
@settings(max_examples=15)
@given(st.integers(1, 12), st.integers(0, 10))
def test_the_future_changes_no_bit_of_the_past(name: str, place: int, token: int) -> None:
    params, given = params_of(name), tokens(2, 13)
    other = given.copy()
    other[:, place:] = token
    before, after = model.forward(params, given)[0], model.forward(params, other)[0]
    assert np.array_equal(before[:, :place], after[:, :place])


@pytest.mark.parametrize("name", CAUSAL)
def test_gradients_add_up_over_sequences_and_repeat_to_the_bit(name: str) -> None:
    params, given, targets = params_of(name), tokens(3, 7), tokens(3, 7, "targets")
    whole = tree.flatten(loss_and_gradients(params, given, targets)[1])
    again = tree.flatten(loss_and_gradients(params, given, targets)[1])
    parts = [tree.flatten(loss_and_gradients(params, given[n : n + 1], targets[n : n + 1])[1]) for n in range(3)]
    assert list(whole) == list(tree.flatten(params))
    for leaf, gradient in whole.items():
        assert np.array_equal(gradient, again[leaf])
        np.testing.assert_allclose(sum(part[leaf] for part in parts), gradient, rtol=1e-9, atol=1e-11, err_msg=leaf)


@pytest.mark.parametrize("name", CAUSAL)
def test_no_parameter_is_dead(name: str) -> None:
    params = params_of(name)
    found = tree.flatten(loss_and_gradients(params, tokens(3, 13), tokens(3, 13, "targets"))[1])
    assert [leaf for leaf, gradient in found.items() if not np.max(np.abs(gradient)) > 1e-9] == []


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {}) for name in CAUSAL),
        # What changes here is the model's, whatever its blocks are; some bring the MLP themselves.
        *((name, {"mlp": False, "layers": 1}) for name in ("softmax", "sympformer")),
        ("softmax", {"mlp": True, "gelu": "exact", "mlp_ratio": 2}),
        pytest.param("koopman", {"decode": "pointer", "layers": 1}, marks=pytest.mark.slow),
        ("graph_energy", {"options": {"classes": 3, "step": 0.1, "steps": 2, "jitter": 0.1, "coupling": "cubic"}}),
    ],
)
def test_gradients_in_three_ways(name: str, changes: dict[str, Any]) -> None:
    small = {"vocabulary": 5, "context": 4, "width": 4, "mlp_ratio": 2, "layers": 2}
    params = params_of(name, **small | changes)
    given, targets = tokens(2, 3) % 5, tokens(2, 3, "targets") % 5

    def loss(leaves: Any) -> dict[str, Any]:
        at = tree.unflatten(params, leaves)
        placed = [backends.of(at.token_embedding).from_numpy(x) for x in (given, targets)]
        logits, _ = model.forward(at, placed[0])
        return {"loss": cross_entropy_forward(logits, placed[1])[0]}

    def by_hand(leaves: Any, upstream: Any, implementation: str) -> dict[str, Any]:
        at = tree.unflatten(params, leaves)
        placed = [backends.of(at.token_embedding).from_numpy(x) for x in (given, targets)]
        logits, saved = model.forward(at, placed[0])
        _, loss_saved = cross_entropy_forward(logits, placed[1])
        return tree.flatten(model.backward(at, saved, cross_entropy_backward(loss_saved, upstream["loss"])))

    subject = gradients.Subject(name, tree.flatten(params), loss, by_hand, ("",))
    found = gradients.by_hand(subject, backends.get("numpy"), "")
    error, leaf = gradients.beside(subject, "differences", 1)(found)
    assert error < gradients.TOLERANCES["differences"], leaf
    pytest.importorskip("torch", reason='autograd needs torch: pip install "refattn[torch]"')
    error, leaf = gradients.beside(subject, "autograd")(found)
    assert error < gradients.TOLERANCES["autograd"], leaf


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.skip_xp_backend("jax", reason="JAX compiles every operation for every shape: see the slow test")
def test_on_every_library(name: str, backend: Any) -> None:
    on_library(name, backend)


def on_library(name: str, backend: Any) -> None:
    params, given, targets = params_of(name), tokens(2, 7), tokens(2, 7, "targets")
    losses, found = loss_and_gradients(params, given, targets)
    sent = tree.map_leaves(backend.array, params)
    other_losses, other = loss_and_gradients(sent, backend.array(given), backend.array(targets))
    np.testing.assert_allclose(backend.host(other_losses), losses, rtol=1e-11, atol=1e-12)
    for leaf, gradient in tree.flatten(other).items():
        np.testing.assert_allclose(
            backend.host(gradient), tree.flatten(found)[leaf], rtol=1e-9, atol=1e-11, err_msg=leaf
        )


# --- fresh parameters


def test_these_numbers_are_fixed_for_good() -> None:
    """Whoever trained from a seed gets the same start from every later version."""
    leaves = tree.flatten(model.init(config("softmax"), seed=7, like=np.zeros(1, "float32")))
    assert zlib.crc32(b"".join(leaves[name].tobytes() for name in sorted(leaves))) == 1379170874
    w = tree.flatten(model.init(config("softmax"), seed=7, like=np.zeros(1)))["layers.1.mlp.w_in"]
    draws = philox.uniform((8, 32), seed=7, purpose="model.w_in", layer=1)
    np.testing.assert_allclose(w, (2.0 * draws - 1.0) * (3.0 / 8.0) ** 0.5, rtol=1e-14)


def test_a_fresh_model_knows_nothing() -> None:
    params = model.init(config("softmax", width=64), seed=0, like=np.zeros(1))
    losses, _ = cross_entropy_forward(model.forward(params, tokens(4, 13))[0], tokens(4, 13, "targets"))
    assert abs(float(np.mean(losses)) - np.log(11.0)) < 0.1


# --- token by token


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("cuts", [(13,), (5, 13), (5, 6, 7, 13), (1, 2, 3, 4)])
@pytest.mark.parametrize("streams", [True, False])
def test_decoding_gives_the_logits_of_the_whole(
    name: str, cuts: tuple[int, ...], streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, given = params_of(name), tokens(2, 13)
    whole = model.forward(params, given)[0]
    record = ra.mechanism(name) if streams else dataclasses.replace(ra.mechanism(name), stream=None)
    monkeypatch.setattr(model.Config, "record", property(lambda self: record))
    cache, first = decode.start(params, 2), 0
    for stop in cuts:
        logits, cache = decode.extend(params, cache, given[:, first:stop])
        np.testing.assert_allclose(logits, whole[:, stop - 1], rtol=1e-11, atol=1e-12)
        first = stop
    with pytest.raises(ValueError, match=rf"tokens: got {first + 13} in all, needs at most 13"):
        decode.extend(params, cache, tokens(2, 13))


@pytest.mark.parametrize("options", [{"classes": 3, "step": 0.2}, {"jitter": 0.2}, {"state": "query", "step": 0.1}])
def test_positions_and_draws_are_those_of_the_whole(options: dict[str, Any]) -> None:
    """Token by token, too; a block that draws has no stream. The same draws come again, and matter."""
    params, given = params_of("graph_energy", options=options), tokens(2, 13)
    whole = model.forward(params, given)[0]
    assert np.array_equal(model.forward(params, given)[0], whole)
    plain = tree.unflatten(params_of("graph_energy", options={**options, "jitter": 0.0}), tree.flatten(params))
    assert np.array_equal(model.forward(plain, given)[0], whole) is ("jitter" not in options)
    cache, first = decode.start(params, 2), 0
    for stop in (5, 6, 7, 13):
        logits, cache = decode.extend(params, cache, given[:, first:stop])
        np.testing.assert_allclose(logits, whole[:, stop - 1], rtol=1e-11, atol=1e-12)
        first = stop
    assert (cache.blocks is None) is ("jitter" in options)


def test_options_that_have_no_stream_are_computed_again() -> None:
    """Forces divided by the number of all tokens, which a stream does not know."""
    params, given = params_of("sympformer", options={"oracle": "softmax(normaliser='length')"}), tokens(2, 5)
    cache = decode.start(params, 2)
    for stop in (3, 5):
        logits, cache = decode.extend(params, cache, given[:, 0 if cache.tokens is None else 3 : stop])
        expected = model.forward(params, given[:, :stop])[0][:, -1]
        np.testing.assert_allclose(logits, expected, rtol=1e-11, atol=1e-12)
    assert cache.blocks is None


# --- bad input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mechanism": "hardmax"}, "mechanism: got 'hardmax', needs one of softmax"),
        ({"mechanism": "math:record"}, "mechanism: got 'math:record', needs one of softmax"),
        ({"mechanism": 3}, "mechanism: got 3, needs"),
        ({"layers": 0}, "layers: got 0, needs a whole number of at least 1"),
        ({"width": True}, "width: got True, needs a whole number of at least 1"),
        ({"context": 1.5}, "context: got 1.5, needs a whole number of at least 1"),
        ({"heads": 3}, "heads: got 3, needs a divisor of the width 8, or a head_width"),
        ({"gelu": "sharp"}, "gelu: got 'sharp', needs one of tanh, exact"),
        ({"options": {"width": 4}}, "options: got 'width', softmax has kv_heads"),
        ({"options": {"softcap": -1.0}}, "softcap: got -1.0, needs a finite number above 0"),
    ],
)
def test_a_wrong_configuration(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        config(**{"name": "softmax"} | changes) if "mechanism" not in changes else config(changes["mechanism"])


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (np.zeros((1, 3)), TypeError, "tokens: got dtype float64, needs an integer type"),
        (np.zeros(3, int), ValueError, r"tokens: got shape \(3,\), needs \(batch, 1 to 13\)"),
        (np.zeros((1, 14), int), ValueError, r"tokens: got shape \(1, 14\), needs \(batch, 1 to 13\)"),
        (np.zeros((1, 0), int), ValueError, r"tokens: got shape \(1, 0\), needs \(batch, 1 to 13\)"),
        (np.full((1, 3), 11), ValueError, "tokens: got one outside of 0 to 10"),
        (np.full((1, 3), -1), ValueError, "tokens: got one outside of 0 to 10"),
    ],
)
def test_wrong_tokens(given: Any, error: type[Exception], message: str) -> None:
    params = params_of("softmax")
    with pytest.raises(error, match=message):
        model.forward(params, given)
    with pytest.raises(error, match=message):
        decode.extend(params, decode.extend(params, decode.start(params, 1), tokens(1, 3))[1], given)
