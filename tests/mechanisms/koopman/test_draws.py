"""Random ridges and epsilons, beyond T21 of test_acceptance.py: laws, and blocks and models that draw by them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import Context, model, philox, tree
from refattn.mechanisms.koopman.layer.draws import Beta, Law, draw
from refattn.model import decode
from refattn.train.sample import generate
from refattn.train.step import measured

BLOCK = ra.mechanism("koopman").block
KEY: dict[str, Any] = {"seed": 1, "step": 2, "layer": 3, "like": np.zeros(1)}

LAW = Law(lambda u: 0.01 + 0.0 * u, lambda u: 0.25 * (u > 0.5))
"""A ridge that is always 0.01, and an epsilon that is 0 or 1/4."""


def test_draws_of_seeds_steps_and_layers() -> None:
    one, same = (draw(5, **KEY) for _ in range(2))
    assert all(np.array_equal(one[name], same[name]) for name in one)
    for other in ({"seed": 2}, {"step": 3}, {"layer": 4}):
        assert not np.any(draw(5, **{**KEY, **other})["ridge"] == one["ridge"])
    many = draw(101, **KEY)
    assert not np.any(many["ridge"] == many["epsilon"])


def test_laws() -> None:
    wide = draw(20001, **KEY, law="beta(b=1.0, candidates=2)")["epsilon"]  # uniform
    assert wide.shape == (2, 20000)
    np.testing.assert_allclose(np.quantile(wide, [0.25, 0.5, 0.9]), [0.25, 0.5, 0.9], atol=0.01)
    own = draw(20001, **KEY, law=LAW)
    assert np.all(own["ridge"] == 0.01)
    assert set(np.unique(own["epsilon"])) == {0.0, 0.25}
    assert LAW.means == {"ridge": pytest.approx(0.01), "epsilon": 0.125}
    assert Beta(4.0).means == {"ridge": 0.2, "epsilon": 0.2}


def test_one_update_draws_nothing() -> None:
    """What is drawn for it is what the core takes, and has a gradient of its shape."""
    x, given = np.eye(3)[None, None], draw(1, **KEY)
    assert given["ridge"].shape == (1, 0)
    perturbation = ra.koopman.Identity(given["epsilon"])
    options: dict[str, Any] = {"fit": ra.koopman.Stein(given["ridge"]), "perturbation": perturbation}
    out, saved = ra.koopman.forward(x, x, x, updates=1, **options)
    np.testing.assert_array_equal(out, ra.koopman.forward(x, x, x, updates=1)[0])
    assert ra.koopman.backward(saved, out)["ridge"].shape == (1, 0)


def test_a_block_uses_its_draws_or_the_means_of_its_law() -> None:
    x = philox.normal((1, 5, 8), seed=5, purpose="x")
    params = BLOCK.init(BLOCK.Config(width=8, heads=2), seed=0, like=x)

    def out(params: Any, context: Context) -> Any:
        return BLOCK.read(params, BLOCK.forward(params, BLOCK.start(params, x, context), context)[0])

    contexts = [Context(), *(Context(draws=draw(2, seed=n, step=0, layer=0, like=x)) for n in (1, 2))]
    found = [out(params, context) for context in contexts]
    assert not any(np.array_equal(found[n], found[n - 1]) for n in range(3))
    for law, ridge, epsilon in (("beta(b=3)", 0.25, 0.25), (LAW, 0.01, 0.125)):
        config = BLOCK.Config(width=8, heads=2, draws=law)
        drawing = tree.unflatten(BLOCK.init(config, seed=0, like=x), tree.flatten(params))
        numbers = {"ridge": np.asarray(ridge), "epsilon": np.asarray(epsilon)}
        np.testing.assert_allclose(out(drawing, Context()), out(params, Context(draws=numbers)), rtol=1e-12)
        np.testing.assert_array_equal(out(drawing, contexts[1]), found[1])


AGAIN = Law(lambda u: 0.1 + 0.0 * u, lambda u: 4.0 * (u > 0.75), candidates=32)
"""An epsilon that is mostly 0, where "shift" has no inverse."""


def test_numbers_are_drawn_again_until_psi_is_inverted() -> None:
    """In training it is counted; with one candidate it is an error."""
    counts: list[int] = []
    params, given = small(perturbation="shift", draws=AGAIN)
    loss = measured(params, given, given, chance=(0, 1), redrawn=counts)[0]
    assert np.isfinite(loss) and len(counts) == 2 and sum(counts) > 0
    config = params.layers[0].block.config
    drawn = [config.chances(seed=0, step=1, layer=n, like=KEY["like"])["epsilon"][:, 0] for n in range(2)]
    assert sorted(counts) == sorted(int(np.argmax(each > 0.0)) for each in drawn)
    params, _ = small(perturbation="shift(epsilon=0.0)")
    with pytest.raises(ra.koopman.KoopmanInverseError):
        measured(params, given, given, chance=(0, 1), redrawn=counts)


def test_without_draws_the_means_come_first_and_then_candidates() -> None:
    """Where the means have no inverse, as in scoring a preset that draws."""
    x = 3.0 * philox.normal((1, 12, 8), seed=3, purpose="x")
    known: dict[str, Any] = {"width": 8, "heads": 2, "updates": 4, "perturbation": "shift"}

    def out(**given: Any) -> Any:
        params = BLOCK.init(BLOCK.Config(**known, **given), seed=0, like=x)
        return BLOCK.forward(params, BLOCK.start(params, x, Context()), Context())

    with pytest.raises(ra.koopman.KoopmanInverseError):
        out(draws="beta")
    state, saved = out(draws="beta(candidates=64)")
    redrawn = ra.mechanism("koopman").redrawn
    assert np.all(np.isfinite(state.x)) and redrawn is not None and redrawn(saved) > 0
    numbers, drawn = saved.core.tables["epsilon"], draw(4, seed=0, step=0, layer=0, like=x, law="beta(candidates=64)")
    np.testing.assert_allclose(numbers, np.concatenate([np.full((1, 3), 0.1), drawn["epsilon"][:-1]]))


def small(head: str = "vocabulary", **options: Any) -> tuple[model.Params, Any]:
    sizes: dict[str, Any] = {"vocabulary": 256, "context": 8, "width": 8, "heads": 2, "layers": 2}
    config = model.Config("koopman", **sizes, decode=head, options=options)
    return model.init(config, like=np.ones(1)), philox.integers((2, 8), 0, 256, seed=1, purpose="tokens")


def test_a_model_draws_by_the_seed_and_the_step() -> None:
    """Training has other numbers for each, other layers too; without them it has the means."""
    params, given = small(draws="beta")
    losses = [measured(params, given, given, chance=chance)[0] for chance in ((0, 1), (0, 1), (0, 2), (1, 1), None)]
    assert losses[0] == losses[1]
    assert len(set(losses)) == 4
    assert measured(small()[0], given, given, chance=(0, 1))[0] == losses[-1]  # without a law nothing is drawn
    first, second = (layer.block.config.chances(**{**KEY, "layer": n}) for n, layer in enumerate(params.layers))
    assert not np.any(first["ridge"] == second["ridge"])


@pytest.mark.parametrize("head", ["vocabulary", "pointer"])
def test_token_by_token_the_draws_are_those_of_the_whole(head: str) -> None:
    params, given = small(head, draws=LAW, updates=3)
    whole = model.forward(params, given, chance=(3, 0))[0]
    cache, first = decode.start(params, 2), 0
    for stop in (3, 4, 8):
        logits, cache = decode.extend(params, cache, given[:, first:stop], chance=(3, 0))
        np.testing.assert_allclose(logits, whole[:, stop - 1], rtol=1e-10, atol=1e-12)
        first = stop
    assert cache.blocks is not None
    assert not np.allclose(whole, model.forward(params, given)[0], rtol=1e-6)
    made = [generate(params, b"to be", 3, seed=seed, temperature=0.0) for seed in (1, 1)]
    assert made[0] == made[1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"updates": 0}, r"updates: got 0, needs a whole number of at least 1"),
        ({"updates": "3"}, r"updates: got '3', needs a whole number of at least 1"),
        ({"law": "beta(candidates=0)"}, r"draws: got .*; candidates: got 0, needs a whole number of at least 1"),
        ({"law": "beta(candidates=65)"}, r"draws: got .*; candidates: got 65, needs at most 64"),
        ({"law": "beta(b=0.0)"}, r"draws: got .*; b: got 0.0, needs"),
        ({"law": "gamma"}, r"draws: got 'gamma', needs one of beta"),
    ],
)
def test_draws_name_what_is_wrong(given: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        draw(**{"updates": 3, **KEY, **given})


def test_a_law_or_a_block_that_is_wrong() -> None:
    for name, functions in (("ridge", (lambda u: u - 0.5, LAW.epsilon)), ("epsilon", (LAW.ridge, lambda u: u[:3]))):
        with pytest.raises(ValueError, match=rf"{name}: got a law that does not return finite numbers"):
            Law(*functions)
    with pytest.raises(ValueError, match=r"draws: got 'beta' with a ridge that is given, needs one of them"):
        BLOCK.Config(width=4, heads=2, draws="beta", fit="separable(ridge=0.2)")
    assert BLOCK.Config(width=4, heads=2, draws=Beta(3.0)) == BLOCK.Config(width=4, heads=2, draws="beta(b=3.0)")
