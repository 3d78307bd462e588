"""A fuzzer of public functions: ``python -m tests.fuzz.functions [--calls N] [--seed S]``.

Each call takes a function with arguments that are right, and puts something else in the place of one of them, now and
then of none: a wrong type, shape or dtype, NaN, a masked array, an array that cannot be written to, a number out of all
range. What comes of it is counted:

- fine: it returns
- refused: an error whose message names the argument, or another one that it does not fit to
- obscure: an error of refattn that does not name it
- foreign: an error from inside another library that does not name it
- wrong: what no reader of that argument could mean (a masked array, objects or a text for an array, a set for a number)
  is taken and gives a result
- hang: it has not ended after 10 seconds
- mutated: an array that was given is another afterwards
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import signal
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import refattn as ra
from refattn import backends, counter, equations, model, tree
from refattn.analysis import equilibria, graph_flow, graphs, moments, particles, prediction, spectrum
from refattn.golden import vectors
from refattn.mechanisms import entry, growing, registry
from refattn.model import decode
from refattn.ops import activations, embedding, heads, layer_norm, linear, losses, mlp
from refattn.train import checkpoint, data, metrics, optimiser, sample, schedule, settings, step
from refattn.verify import large, run, traced
from refattn.verify.foreign import adapter
from refattn.verify.foreign.program import Program
from tests.fuzz.command import command

ROOT = Path(ra.__file__).parent


class TooLong(BaseException):
    """A call does not end."""


def _too_long(*_: Any) -> None:
    raise TooLong


# Words that messages have for arguments which are called otherwise here: those of the command line, or what they name.
KNOWN_AS = {
    ("case", "name"): ("case",),
    ("mechanism", "name"): ("mechanism",),
    ("backends.get", "name"): ("backend",),
    ("backends.use_workers", "n"): ("workers",),
    ("trace_core", "case_name"): ("case",),
    ("tree.unflatten", "template"): ("tree",),
    ("tree.unflatten", "leaves"): ("tree",),
    ("model.backward", "d_logits"): ("d_x",),
    ("step.score", "part"): ("tokens",),
    ("sample.generate", "length"): ("shape",),
    ("metrics.read", "path"): ("No such file or directory",),
    ("step.loss_and_gradients", "inputs"): ("tokens",),
    ("substitute", "values"): ("equation",),
    ("rounding", "points"): ("equation",),
    ("predict", "name"): ("system",),
    ("graph_of", "name"): ("graph",),
    ("data.load", "source"): ("data",),
    ("load", "spec"): ("--impl",),
    ("Program", "command"): ("--exec",),
    ("settings.parse", "assignments"): ("--set",),
    ("mutate", "id"): ("equation",),
    ("vectors.read", "folder"): (vectors.MANIFEST,),
    ("settings.build", "given"): ("setting",),
}


@dataclass(frozen=True)
class Target:
    """A public function and arguments that it takes, by name; those of `optional` may be None."""

    name: str
    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    positional: tuple[str, ...] = ()

    def named(self, message: str) -> bool:
        """Tell whether a message names one of the arguments, or what it is called where it comes from."""
        words = [word for name in self.arguments for word in (name, *KNOWN_AS.get((self.name, name), ()))]
        return any(re.search(rf"(?<![a-zA-Z_]){re.escape(word)}(?![a-zA-Z_])", message) for word in words)

    def call(self, arguments: Mapping[str, Any]) -> Any:
        """Call it; a generator is run, and a context entered and left."""
        found = self.function(
            *(arguments[name] for name in self.positional),
            **{name: x for name, x in arguments.items() if name not in self.positional},
        )
        if isinstance(found, contextlib.AbstractContextManager):
            with found:
                pass
        elif hasattr(found, "__next__"):
            next(found, None)
        return found


def targets(folder: Path) -> list[Target]:
    """Return the public functions with arguments that they take; files are made in the folder."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return rng.normal(size=shape)

    q, k, v, mask = normal(1, 2, 3, 4), normal(1, 2, 3, 4), normal(1, 2, 3, 4), np.tri(3, dtype=bool)[None, None]
    qkv = {"q": q, "k": k, "v": v}
    found: list[Target] = []

    def add(title: str, call: Callable[..., Any], first: str = "", /, **arguments: Any) -> None:
        found.append(Target(title, call, arguments, tuple(first.split())))

    extra: dict[str, dict[str, Any]] = {
        "softmax": {"scale": 0.5, "softcap": 2.0, "mask": mask},
        "higher_order": {},
        "sympformer": {},
        "koopman": {},
    }
    for name, options in extra.items():
        room: Any = getattr(ra, name)
        given = {**qkv, **options, "causal": False, "form": "auto"}
        add(f"{name}.forward", room.forward, **given)
        saved = room.forward(**given)[1]
        add(f"{name}.backward", room.backward, saved=saved, d_out=normal(1, 2, 3, 4))
    graph = np.ones((3, 3)) - np.eye(3)
    ge: Any = ra.graph_energy
    add("graph_energy.forward", ge.forward, **qkv, mask=mask, causal=False, form="auto")
    add("graph_energy.backward", ge.backward, saved=ge.forward(**qkv)[1], d_out=normal(1, 2, 3, 4))
    add("growing.backward", growing.backward, saved=growing.forward(**qkv)[1], d_out=normal(1, 2, 3, 4))
    add("growing.forward", growing.forward, **qkv, mask=mask)

    config = model.Config("softmax", vocabulary=16, context=8, width=8, heads=2, layers=1)
    like = np.zeros((), np.float32)
    params = model.init(config, seed=1, like=like)
    tokens, targets_ = rng.integers(0, 16, (2, 4)), rng.integers(0, 16, (2, 4))
    add("model.Config", model.Config, mechanism="softmax", vocabulary=16, context=8, width=8, heads=2, layers=1)
    add("model.init", model.init, config=config, seed=1, like=like)
    add("model.forward", model.forward, params=params, tokens=tokens)
    logits, held = model.forward(params, tokens)
    add("model.backward", model.backward, params=params, saved=held, d_logits=np.ones_like(logits))
    add("decode.start", decode.start, params=params, batch=2)
    add("decode.extend", decode.extend, params=params, cache=decode.start(params, 2), tokens=tokens)
    add("step.loss_and_gradients", step.loss_and_gradients, params=params, inputs=tokens, targets=targets_)
    bytes_ = rng.integers(0, 256, 200).astype(np.uint8)
    wide = model.init(model.Config("softmax", context=8, width=8, heads=2, layers=1), seed=1, like=like)
    add("step.score", step.score, params=wide, part=bytes_, every=8)
    add("sample.generate", sample.generate, params=wide, prompt=b"ab", length=3, seed=1, temperature=0.5)
    gradients = tree.map_leaves(np.ones_like, params)
    adam = optimiser.AdamW(0.01)
    state = adam.start(params)
    add("AdamW", optimiser.AdamW, learning_rate=0.01, beta1=0.9, beta2=0.95, epsilon=1e-8)
    add("AdamW.start", adam.start, params=params)
    add("AdamW.update", adam.update, state=state, params=params, gradients=gradients)
    add("optimiser.Group", optimiser.Group, pattern=".*", weight_decay=0.1, rate=1.0, axes=0)
    add("optimiser.default_groups", optimiser.default_groups, weight_decay=0.1)
    add("optimiser.adaptive_rate", optimiser.adaptive_rate, force=1.0, gamma=0.5, largest=0.1)
    add("optimiser.clip", optimiser.clip, gradients=gradients, limit=1.0)
    add("WarmupCosine", schedule.WarmupCosine, peak=0.1, warmup=2, steps=10, floor=0.1)
    add("WarmupCosine()", schedule.WarmupCosine(0.1, 2, 10), "step", step=3)
    (folder / "text").mkdir()
    (folder / "text" / "a.py").write_text("x = 1\n" * 500)
    add("data.load", data.load, source=str(folder / "text"))
    add("data.batch", data.batch, part=bytes_, size=2, context=8, seed=0, step=1)
    add("data.windows", data.windows, part=bytes_, context=8, size=2, every=1)
    (folder / "checkpoints").mkdir()
    arrays = {"a": normal(3)}
    save = {"folder": str(folder / "checkpoints"), "step": 3, "arrays": arrays, "facts": {"a": 1}, "keep": 2}
    add("checkpoint.save", checkpoint.save, **save)
    add("checkpoint.newest", checkpoint.newest, folder=str(folder / "checkpoints"), warn=lambda line: None)
    add("metrics.read", metrics.read, path=str(folder / "metrics.jsonl"))
    add("Settings", settings.Settings, mechanism="softmax", steps=3, learning_rate=0.1, batch=4, clip=1.0, width=8)
    add("settings.parse", settings.parse, assignments=["steps=3"])
    add("settings.build", settings.build, mechanism="softmax", given={"steps": 3})
    (folder / "metrics.jsonl").write_text("")

    add("mechanism", registry.mechanism, name="softmax")
    add("reading", entry.reading)
    add("trace", equations.trace)
    add("substitute", equations.substitute, values={"SM.1": normal(1, 2, 3, 3)})
    add("mutate", equations.mutate, id="SM.1", change=lambda x: x)
    add("rounding", equations.rounding, points={"SM.1": "float16"}, round_to=lambda x, dtype: x)
    core = __import__("refattn.mechanisms.softmax.dense", fromlist=["dense"])
    add("equations.declared", equations.declared, module=core)
    add("equations.tags", equations.tags, module=core)
    add("tree.flatten", tree.flatten, tree={"a": q})
    add("tree.unflatten", tree.unflatten, template={"a": q}, leaves={"a": k})
    add("tree.map_leaves", tree.map_leaves, "function tree", function=lambda x: x, tree={"a": q})
    add("tree.zeros_like", tree.zeros_like, tree={"a": q})
    stream = {"seed": 1, "purpose": "x", "step": 0, "layer": 0}
    add("counter.words", counter.words, count=4, **stream)
    add("counter.uniform", counter.uniform, shape=(2, 3), **stream)
    add("counter.normal", counter.normal, shape=(2, 3), **stream)
    add("counter.integers", counter.integers, shape=(2, 3), low=0, high=5, **stream)
    add("counter.permutation", counter.permutation, n=5, **stream)
    philox = {"counter": np.zeros((2, 4), np.uint32), "key": np.zeros(2, np.uint32)}
    add("counter.philox4x32", counter.philox4x32, **philox)

    x = normal(2, 3, 4)
    add("layer_norm_forward", layer_norm.layer_norm_forward, x=x, gain=normal(4), bias=normal(4), eps=1e-5)
    normed = layer_norm.layer_norm_forward(x)[1]
    add("layer_norm_backward", layer_norm.layer_norm_backward, saved=normed, d_y=x)
    add("linear_forward", linear.linear_forward, x=x, w=normal(4, 5), bias=normal(5))
    add("linear_backward", linear.linear_backward, x=x, w=normal(4, 5), d_y=normal(2, 3, 5))
    add("cross_entropy_forward", losses.cross_entropy_forward, logits=normal(2, 4, 16), targets=targets_)
    add("mse_forward", losses.mse_forward, x=x, target=normal(2, 3, 4))
    add("gelu_exact_forward", activations.gelu_exact_forward, x=x)
    add("gelu_tanh_forward", activations.gelu_tanh_forward, x=x)
    gate = activations.gelu_tanh_forward(x)[1]
    add("gelu_tanh_backward", activations.gelu_tanh_backward, x=x, gate=gate, d_y=x)
    both = mlp.Params(normal(4, 8), normal(8), normal(8, 4), normal(4))
    add("mlp_forward", mlp.mlp_forward, params=both, x=x, gelu="tanh")
    add("one_hot", embedding.one_hot, tokens=tokens, size=16, like=x)
    add("embedding_forward", embedding.embedding_forward, table=normal(16, 4), tokens=tokens)
    add("split_heads", heads.split_heads, x=x, heads=2)
    add("merge_heads", heads.merge_heads, x=q)

    add("spectrum", spectrum.spectrum, **qkv)
    add("predict", prediction.predict, name="linear", steps=3, states=20, seed=3)
    flow = graph_flow.GraphFlow(graph)
    add("GraphFlow", graph_flow.GraphFlow, graph=graph, coupling="sin", intrinsic="none", b=0.0, mu=1.0, kappa=1.0)
    add("find_equilibrium", equilibria.find_equilibrium, flow=flow, start=normal(3), steps=20)
    add("find_equilibria", equilibria.find_equilibria, flow=flow, starts=5, seed=0, reach=1.0)
    for function in (graphs.path_graph, graphs.cycle_graph, graphs.star_graph, graphs.complete_graph):
        add(function.__name__, function, n=4)
    add("from_links", graphs.from_links, n=3, links=[(0, 1), (1, 2)])
    add("graph_of", graphs.graph_of, name="path:3")
    add("component_of", graphs.component_of, graph=graph)
    add("balance_of", graphs.balance_of, graph=graph)
    add("Linear", particles.Linear, a=np.eye(2), v=np.eye(2))
    add("Damping", particles.Damping, c_log=3.0, c_lin=0.0)
    system, points, times = particles.Linear(np.eye(2), np.eye(2)), normal(4, 2), np.linspace(0.0, 0.1, 3)
    add("attention", particles.attention, system=system, x=points)
    add("hamiltonian", particles.hamiltonian, system=system, x=points, y=points)
    add("descend", particles.descend, system=system, x=points, times=times)
    add("moments", moments.moments, x=points, y=points)

    record = registry.mechanism("softmax")
    case = record.case("tiny")

    def honest(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return ra.softmax.forward(q, k, v, **options)[0]

    add("verify_case", run.verify_case, "mechanism implementation case dtype", mechanism=record, implementation=honest,
        case=case, dtype="float32", grad=False, seed=0)  # fmt: skip
    add("load", adapter.load, spec="math:sqrt")
    add("Program", Program, command="true", outputs=("out",), seconds=1.0)
    asked = {"mechanism": record, "implementation": honest, "tokens": 8, "dtype": "float32", "grad": False}
    add("verify_large", large.verify_large, "mechanism implementation tokens", **asked)
    on = {"mechanism": record, "dtype": "float32", "backend": backends.get("numpy")}
    add("trace_core", traced.trace_core, case_name="tiny", **on)
    add("trace_block", traced.trace_block, **on)
    add("vectors.read", vectors.read, folder=vectors.SHIPPED)
    add("backends.get", backends.get, name="numpy")
    add("backends.use_workers", backends.use_workers, n=1)
    add("case", record.case, name="tiny")
    add("Context", ra.Context, mask=mask, causal=True, layer=0, training=False)
    add("Decline", ra.Decline, reason="why")
    block: Any = record.block
    own = block.init(block.Config(width=8, heads=2), seed=0, layer=0, like=like)
    tokens_ = normal(1, 3, 8).astype(np.float32)
    causal = ra.Context(causal=True)
    add("Block.start", block.start, params=own, x=tokens_, context=causal)
    add("Block.forward", block.forward, params=own, state=block.start(own, tokens_, causal), context=causal)
    return found


# fmt: off
PLAIN: list[Any] = [
    None, True, -1, 0, 1, 2, 7, 1.5, float("nan"), float("inf"), -1e300, 1e300, 2**70, -(2**70), "", "x", b"x", "\0",
    [], [1, 2], (), (1,), {}, {"x": 1}, {1: 2}, {1, 2}, 1j, len, int, ..., object(), np.float32(2.0), np.int8(3),
    np.zeros(3), np.zeros((2, 2)), np.asarray(2), np.asarray("x"),
]
# fmt: on


def strange(draw: random.Random, right: Any) -> tuple[Any, bool]:
    """Return something in the place of an argument, and whether nobody could mean it."""
    array = isinstance(right, np.ndarray)
    number = isinstance(right, int | float) and not isinstance(right, bool)
    if array and draw.random() < 0.75:
        x = right.copy()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            options: list[tuple[Any, bool]] = [
                (np.ma.masked_array(x, mask=np.ones(x.shape, bool)), True),
                (x.astype(object), True),
                (x.astype(str), True),
                (x.astype(complex), x.dtype.kind != "c"),
                (np.asarray([[["x"]]]), True),
                (x[None], False),
                (x[..., :0] if x.ndim else x, False),
                (x[..., :-1] if x.ndim else x, False),
                (np.concatenate([x, x], -1) if x.ndim else x, False),
                (np.float64(1.0), False),
                (x.astype(np.float32), False),
                (x.astype(np.float16), False),
                (x.astype(np.int64), False),
                (x.astype(bool), False),
                (np.full_like(x, np.nan) if x.dtype.kind == "f" else x.astype(np.int64) - 100, False),
                (np.full_like(x, np.inf) if x.dtype.kind == "f" else x.astype(np.int64) + 300, False),
                (x.T, False),
                (np.lib.stride_tricks.as_strided(x, writeable=False), False),
                (np.asfortranarray(x), False),
            ]
            if x.ndim == 2:
                options.append((np.matrix(x), True))
        return draw.choice(options)
    value = draw.choice(PLAIN)
    absurd = str | bytes | set | dict if array else set | dict | list
    return value, (array or number) and isinstance(value, absurd)


def outcome(target: Target, arguments: Mapping[str, Any], changed: str | None, absurd: bool) -> tuple[str, str]:
    """Call a function; return the kind of what came, and words about it."""
    before = {name: x.tobytes() for name, x in arguments.items() if isinstance(x, np.ndarray) and x.dtype.kind != "O"}
    signal.setitimer(signal.ITIMER_REAL, 10.0)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            target.call(arguments)
    except TooLong:
        return "hang", "did not end"
    except Exception as error:
        found = "refused" if changed is not None and target.named(str(error)) else _by(error)
        words = f"{type(error).__name__}: {error}"
    else:
        found, words = ("wrong" if absurd else "fine"), "taken"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    if any(arguments[name].tobytes() != data for name, data in before.items()):
        found = "mutated"
    return found, words


def _by(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [n for n, frame in enumerate(frames) if Path(frame.filename).is_relative_to(ROOT)]
    return "foreign" if own and own[-1] < len(frames) - 1 else "obscure"


def run_all(calls: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Return how often what came, and a line for each call that did not end as it should."""
    draw = random.Random(seed)
    counts: Counter[str] = Counter()
    bad: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        here, before = os.getcwd(), signal.signal(signal.SIGALRM, _too_long)
        os.chdir(name)
        try:
            known = targets(Path(name))
            for target in known:  # all are right before anything is changed
                target.call(target.arguments)
            for n in range(calls):
                target = draw.choice(known)
                arguments, changed, absurd = dict(target.arguments), None, False
                if arguments and draw.random() < 0.95:
                    changed = draw.choice(list(arguments))
                    arguments[changed], absurd = strange(draw, arguments[changed])
                got, words = outcome(target, arguments, changed, absurd)
                counts[got] += 1
                if got not in ("fine", "refused"):
                    value = None if changed is None else arguments[changed]
                    given = " ".join(repr(value).split())[:60]
                    bad.append(f"call {n}, {got}: {target.name}({changed}={given}): {words[:160]}")
        finally:
            os.chdir(here)
            signal.signal(signal.SIGALRM, before)
    return counts, bad


if __name__ == "__main__":
    command("functions", "calls", 1000, run_all)
