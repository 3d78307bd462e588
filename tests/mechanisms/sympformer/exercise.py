"""Runs of SympFormer that together reach every line with a tag, for tests/test_equation_ids.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from unittest import mock

from refattn import Context, equations, mechanism, philox
from refattn.mechanisms.sympformer.forces import reduced
from refattn.mechanisms.sympformer.integrators import classical
from refattn.mechanisms.sympformer.params import Layer
from tests.mechanisms.exercises import Make, Run, draw

CONFIGS = [
    {name: x for name, x in config.items() if name not in ("width", "heads", "layer", "vocabulary", "context")}
    for config in mechanism("sympformer").configs
    if config.get("oracle") != "reduced"
]
"""Those of the record, but for momenta that are matrices, which have an axis more."""

STACKS: list[dict[str, Any]] = [
    *({**config, "layers": 2} for config in CONFIGS),
    {"integrator": "etd_ab2", "layers": 3},
    {"integrator": "presymplectic", "normalise": "each_substep", "detach": True},
    {"oracle": "hamiltonian"},
    {"oracle": "softmax(normaliser='length')"},
    {"oracle": "linear(normaliser='length')", "look_ahead": True},
    {"oracle": "linear(implementation='state')", "integrator": "etd_ab2", "start": "linear"},
]


def runs(sizes: Mapping[str, int], make: Make, implementation: str) -> list[Run]:
    """Return (size by axis letter, call) for calls of the core in `implementation` and of blocks, forward and backward.

    `sizes` are all different; `make` turns a NumPy array into one of the library that the calls shall use.
    """
    tokens = {**sizes, "j": sizes["i"]}
    stacks = (run for options in STACKS for run in _stack(tokens, make, **options))
    cores = (
        (tokens, partial(_core, tokens, make=make, implementation=implementation, full=full)) for full in (True, False)
    )
    connected = [
        (sizes, partial(_with_one_width, run))
        for name in ("h1", "r2")
        for sizes, run in _stack(
            tokens, make, integrator=f"lie_trotter(connection={name!r}, strength=1)", mlp="momentum"
        )
    ]
    return [
        *cores,
        *stacks,
        *connected,
        (sizes, partial(_reduced, sizes, make)),
        _decoding(sizes, make),
        _decoding(sizes, make, integrator="lie_trotter", mlp="none"),
    ]


def _with_one_width(run: Callable[[], None]) -> None:
    """Run without a hook on the second call of the core, whose values are three times as wide as those of the first."""

    def hidden(call: Callable[..., Any], width: Callable[..., bool]) -> Callable[..., Any]:
        def one(*given: Any) -> Any:
            if not width(*given):
                return call(*given)
            with mock.patch.object(equations, "active", lambda module: module):
                return call(*given)

        return one

    forward = hidden(classical.attention, lambda q, k, v, *rest: v.shape[-1] != q.shape[-1])
    backward = hidden(classical.attention_backward, lambda saved, d_result: d_result.shape[-1] != saved.like.shape[-1])
    with mock.patch.multiple(classical, attention=forward, attention_backward=backward):
        run()


def _core(sizes: Mapping[str, int], *, make: Make, implementation: str, full: bool) -> None:
    b, h, g, i, d, e = (sizes[letter] for letter in "bhgide")
    record = mechanism("sympformer")
    assert record.core is not None
    options: dict[str, Any] = (
        {"causal": True, "scale": 0.7, "kinetic": make(draw("kinetic", b, h, i, 1))} if full else {}
    )
    assert not full or set(record.defaults) == {*options, "implementation"}
    q, k, v = make(draw("q", b, h, i, d)), make(draw("k", b, g, i, d)), make(draw("v", b, g, i, e))
    _, saved = record.core.forward(q, k, v, implementation=implementation, **options)
    d_log_z = make(draw("d_log_z", b, h, i)) if full else None
    record.core.backward(saved, make(draw("d_out", b, h, i, e)), d_log_z)


def _reduced(sizes: Mapping[str, int], make: Make) -> None:
    """The oracle whose momenta are matrices, alone: those of the steps have one axis less."""
    b, i, m = (sizes[letter] for letter in "bim")
    block, own = mechanism("sympformer").block, equations.active(reduced)
    options = {"integrator": "exponential_midpoint", "oracle": "reduced", "normalise": "none", "mlp": "none"}
    params = block.init(block.Config(width=m, heads=3, **options), seed=7, like=make(draw("x", b, i, m)))
    layer, p = Layer(own, params, {}, True), make(draw("p", b, i, m, m))
    answer, saved = own.forward(layer, make(draw("x", b, i, m)), p)
    d_speed = own.velocity(p, answer.context)
    d_p, d_moments = own.velocity_backward(p, d_speed, answer.context, d_speed)
    own.backward(layer, saved, answer.g, d_p, d_moments, lambda name, value: None)


def _decoding(sizes: Mapping[str, int], make: Make, **options: Any) -> Run:
    """The last i of j tokens, after the others."""
    b, i, j, m = (sizes[letter] for letter in "bijm")
    record, context = mechanism("sympformer"), Context(causal=True)
    x = make(draw("x", b, j, m))
    assert record.stream is not None
    params = record.block.init(record.block.Config(width=m, heads=3, start="linear", **options), seed=7, like=x)
    state = record.block.start(params, x[:, : j - i, :], context)
    _, cache = record.stream.prefill(params, record.stream.start(params, b), state, context)
    new = record.block.start(params, x[:, j - i :, :], context)

    def run() -> None:
        assert record.stream is not None
        record.stream.prefill(params, cache, new, context)

    h = 3 if params.config.integrator.baseline else 1
    return {**sizes, "h": h, "g": h, "r": 1, "d": m // h, "e": m // h}, run


def _stack(sizes: Mapping[str, int], make: Make, layers: int = 2, **options: Any) -> list[Run]:
    """Every layer of a stack, with the state that the one before it gives and the gradients of the one after it."""
    b, i, m, t = (sizes[letter] for letter in "bimt")
    tokens = make(philox.integers((b, i), 0, t, seed=7, purpose="tokens"))
    block, x = mechanism("sympformer").block, make(draw("x", b, i, m))
    configs = [block.Config(width=m, heads=3, layer=n, layers=layers, vocabulary=t, **options) for n in range(layers)]
    known = tokens if "tokens" in configs[0].context_fields else None
    context = Context(causal=configs[0].oracle.may_be_causal, tokens=known)
    params = [block.init(config, seed=7, like=x, layer=n) for n, config in enumerate(configs)]
    states = [block.start(params[0], x, context)]
    for each in params:
        states.append(block.forward(each, states[-1], context)[0])

    def run(n: int) -> None:
        if n == 0:
            block.start(params[0], x, context)
        if n and str(options.get("mlp")).startswith("velocity"):
            block.start(params[n], x, context)
        state, saved = block.forward(params[n], states[n], context)
        d_state, _ = block.read_backward(params[n], state, make(draw("d_x", b, i, m)))
        d_state, _, _ = block.backward(params[n], saved, d_state)
        block.start_backward(params[n], d_state)

    # The core of a block has one head as wide as the tokens, and no value where nobody asks for the force; that of the
    # blocks it is compared with has their heads.
    one = {**sizes, "h": 1, "g": 1, "r": 1, "d": m}
    if configs[0].integrator.baseline:
        return [({**one, "h": 3, "g": 3, "d": m // 3, "e": m // 3}, partial(run, n)) for n in range(layers)]
    return [({**one, "e": m if config.kicks else 0}, partial(run, n)) for n, config in enumerate(configs)]
