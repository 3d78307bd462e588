"""The public functions, each with arguments that are right: what `tests.fuzz.functions` calls wrongly."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import refattn as ra
from refattn import backends, equations, model, philox, tree
from refattn.analysis import (
    clusters,
    equilibria,
    graph_flow,
    graphs,
    lyapunov,
    moments,
    operators,
    particles,
    prediction,
    spectrum,
)
from refattn.golden import vectors
from refattn.mechanisms import growing, registry, use_definition
from refattn.mechanisms.koopman.options.kernel import Rbf
from refattn.model import decode
from refattn.ops import activations, embedding, heads, layer_norm, linear, losses, mlp
from refattn.train import checkpoint, data, metrics, optimiser, sample, schedule, settings, step
from refattn.verify import large, run, traced
from refattn.verify.adapters import adapter
from refattn.verify.adapters.program import Program

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
        given = {**qkv, **options, "causal": False, "implementation": "auto"}
        add(f"{name}.forward", room.forward, **given)
        saved = room.forward(**given)[1]
        add(f"{name}.backward", room.backward, saved=saved, d_out=normal(1, 2, 3, 4))
    graph = np.ones((3, 3)) - np.eye(3)
    ge: Any = ra.graph_energy
    add("graph_energy.forward", ge.forward, **qkv, mask=mask, causal=False, implementation="auto")
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
    add("settings.expanded", settings.expanded, mechanism="softmax", given={"steps": 3})
    (folder / "metrics.jsonl").write_text("")

    add("mechanism", registry.mechanism, name="softmax")
    add("reading", use_definition.reading)
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
    add("philox.words", philox.words, count=4, **stream)
    add("philox.uniform", philox.uniform, shape=(2, 3), **stream)
    add("philox.normal", philox.normal, shape=(2, 3), **stream)
    add("philox.integers", philox.integers, shape=(2, 3), low=0, high=5, **stream)
    add("philox.permutation", philox.permutation, n=5, **stream)
    block = {"counter": np.zeros((2, 4), np.uint32), "key": np.zeros(2, np.uint32)}
    add("philox.philox4x32", philox.philox4x32, **block)

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
    add("tree_equilibria", equilibria.tree_equilibria, flow=graph_flow.GraphFlow(graphs.path_graph(3)))
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
    return [
        *found,
        *of_pieces(rng),
        *of_delta(rng),
        *of_derived(rng),
        *(target for name in registry.list_mechanisms() for target in of_block(name, rng)),
    ]


def of_pieces(rng: np.random.Generator) -> list[Target]:
    """Return the backward of each piece of a network, heads, and what studies are made of."""
    found: list[Target] = []

    def add(title: str, call: Callable[..., Any], first: str = "", /, **arguments: Any) -> None:
        found.append(Target(title, call, arguments, tuple(first.split())))

    def normal(*shape: int) -> Any:
        return rng.normal(size=shape)

    x, tokens = normal(2, 3, 4), rng.integers(0, 16, (2, 3))
    both = mlp.Params(normal(4, 8), normal(8), normal(8, 4), normal(4))
    add("mlp_backward", mlp.mlp_backward, params=both, saved=mlp.mlp_forward(both, x)[1], d_y=x, gelu="tanh")
    gate = activations.gelu_exact_forward(x)[1]
    add("gelu_exact_backward", activations.gelu_exact_backward, x=x, gate=gate, d_y=x)
    add("soft_threshold", activations.soft_threshold, x=x, least=0.5, signed=True)
    add("normalise", layer_norm.normalise, x=x, eps=1e-5)
    add("embedding_backward", embedding.embedding_backward, table=normal(16, 4), tokens=tokens, d_x=x)
    kept = losses.cross_entropy_forward(normal(2, 3, 16), tokens)[1]
    add("cross_entropy_backward", losses.cross_entropy_backward, saved=kept, d_losses=normal(2, 3))
    add("mse_backward", losses.mse_backward, difference=x, d_loss=np.asarray(1.0))
    full, few, mask = normal(1, 4, 3, 2), normal(1, 2, 3, 2), np.ones((1, 4, 3, 3), bool)
    add("repeat_heads", heads.repeat_heads, x=few, heads=4)
    add("sum_heads", heads.sum_heads, x=full, heads=2)
    add("group_heads", heads.group_heads, x=full, groups=2)
    add("ungroup_heads", heads.ungroup_heads, x=heads.group_heads(full, 2))
    add("group_mask", heads.group_mask, mask=mask, groups=2)

    starts, ends, keys = normal(8, 2), normal(8, 2), normal(3, 2)
    kernel = Rbf(bandwidth=1.0, weight=1.0)
    add("Koopman", operators.Koopman, kernel=kernel, starts=starts, ends=ends, keys=keys, ridge=0.1, jitter=1e-6,
        fit="stein", space="keys", tau=0.0)  # fmt: skip
    add("EDMD", operators.EDMD, kernel=kernel, starts=starts, ends=ends, keys=keys)
    add("KernelEDMD", operators.KernelEDMD, kernel=kernel, starts=starts, ends=ends)
    for operator in (
        operators.Koopman(kernel, starts, ends, keys, ridge=0.1, jitter=1e-6),
        operators.EDMD(kernel, starts, ends, keys),
        operators.KernelEDMD(kernel, starts, ends),
    ):
        add(f"{type(operator).__name__}.predict", operator.predict, states=normal(2, 2), steps=3)
    with equations.trace() as traced_:
        ra.softmax.forward(normal(1, 1, 2, 2), normal(1, 1, 2, 2), normal(1, 1, 2, 2))
    add("Trace.passes", traced_.passes, id="SM.1")
    add("apply", equations.apply, hook=lambda id, name, value: value)
    return found


def of_rooms(q: Any) -> list[Target]:
    """Return what single mechanisms have beside their cores; q (1, 2, 3, 4)."""
    ge, order, growing_, upstream = ra.graph_energy, ra.higher_order, growing, {"d_out": np.ones_like(q)}
    calls: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (ge.window_graph, {"n": 4, "width": 1, "like": q}),
        (ge.nearest_graph, {"points": q[0, 0], "count": 1}),
        (ge.sparse_graph, {"weights": np.ones((3, 3))}),
        (order.empty_state, {"k": q, "v": q}),
        (growing_.functional_gradient, {"saved": growing_.forward(q, q, q)[1], **upstream}),
        (growing_.contract, {"saved": growing_.forward(q, q, q)[1], **upstream, "x": q[:, 0]}),
    ]
    return [Target(call.__name__, call, arguments) for call, arguments in calls]


def of_delta(rng: np.random.Generator) -> list[Target]:
    """Return the core of the delta rule with all that it takes, and softmax attention with the rest of its options."""
    q, gate = rng.normal(size=(1, 2, 3, 4)), rng.uniform(size=(1, 2, 3))
    qkv: dict[str, Any] = {"q": q, "k": q + 0.5, "v": q - 0.5}
    gates = {"beta": gate, "log_decay": -gate, "log_momentum": -gate, "step": gate}
    state = {"state": rng.normal(size=(1, 2, 2, 4, 4)), "scale": np.asarray(0.5), "norm_eps": 1e-6, "qk_norm": True}
    packed = {"key_mask": np.ones((1, 3), bool), "lengths": (1, 2), "chunk": 2}
    softmax = {"mask": np.ones((1, 2, 3, 3), bool), "bias": rng.normal(size=(1, 2, 3, 3)), "sink": rng.normal(size=2),
               "window": (1, 1), "offset": np.asarray([1]), "q_lengths": np.asarray([2]), "k_lengths": np.asarray([3]),
               "keep": rng.uniform(size=(1, 2, 3, 3)), "softcap": 2.0, "scale": np.asarray(0.5)}  # fmt: skip
    found = of_rooms(q)
    calls: list[tuple[str, dict[str, Any]]] = [
        ("delta", {**gates, **state}),
        ("delta", {"beta": gate, "log_decay": rng.normal(size=(1, 2, 3, 4)), **packed, "implementation": "chunked"}),
        ("softmax", {**softmax, "implementation": "dense"}),
        ("softmax", {**softmax, "implementation": "tiled"}),
    ]
    for name, options in calls:
        room: Any = getattr(ra, name)
        title = f"{name} with {len(options)} options"
        found.append(Target(f"{title}, forward", room.forward, {**qkv, **options}))
        out, saved = room.forward(**qkv, **options)
        found.append(Target(f"{title}, backward", room.backward, {"saved": saved, "d_out": np.ones_like(out)}))
    return found


def of_derived(rng: np.random.Generator) -> list[Target]:
    """Return what takes derivatives of others, follows tokens, and judges the derivatives of a kernel."""
    found: list[Target] = []

    def add(title: str, call: Callable[..., Any], first: str = "", /, **arguments: Any) -> None:
        found.append(Target(title, call, arguments, tuple(first.split())))

    q = rng.normal(size=(1, 1, 2, 2))
    core: Any = ra.softmax

    def half(x: Any) -> Any:
        return 0.5 * x

    add("tangent", ra.tangent, f=lambda q: core.forward(q, q, q)[0], x={"q": q}, t={"q": np.ones_like(q)})
    add("lyapunov.spectrum", lyapunov.spectrum, maps=[half, half], state=rng.normal(size=(2, 2)))
    sizes = {"particles": 3, "dimensions": 2, "end": 0.1, "step": 0.1, "seed": 0}
    add("clusters.study", clusters.study, core=core, options={"causal": False}, **sizes)
    add("clusters.course", clusters.course, unit="time", times=[0.0, 1.0], tokens=[q[0, 0], q[0, 0]])
    record = registry.mechanism("softmax")
    case = record.case("tiny")

    def kernel(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return ra.softmax.forward(q, k, v, **options)[0]

    add("verify_case with derivatives", run.verify_case, "mechanism implementation case dtype", mechanism=record,
        implementation=kernel, case=case, dtype="float64", grad=True, seed=0, rounding=("SM.1",),
        derivatives=("tangent", "hessian"))  # fmt: skip
    return found


def of_block(name: str, rng: np.random.Generator) -> list[Target]:
    """Return the methods of a mechanism's block and of its stream, and a model of it."""
    found: list[Target] = []

    def add(title: str, call: Callable[..., Any], **arguments: Any) -> None:
        found.append(Target(f"{name}: {title}", call, arguments))

    record = registry.mechanism(name)
    block: Any = record.block
    like, x = np.zeros((), np.float32), rng.normal(size=(1, 3, 8)).astype(np.float32)
    config = block.Config(width=8, heads=2)
    add("Block.Config", block.Config, width=8, heads=2)
    add("Block.init", block.init, config=config, seed=0, layer=0, like=like)
    params, context = block.init(config, seed=0, layer=0, like=like), ra.Context(causal=True)
    config_ = model.Config(name, vocabulary=16, context=8, width=8, heads=2, layers=1)
    whole, tokens = model.init(config_, seed=1, like=like), rng.integers(0, 16, (1, 3))
    state = block.start(params, x, context)
    end, saved = block.forward(params, state, context)
    add("Block.start", block.start, params=params, x=x, context=context)
    add("Block.start_backward", block.start_backward, params=params, d_state=state)
    add("Block.read", block.read, params=params, state=state)
    add("Block.read_backward", block.read_backward, params=params, state=state, d_x=x)
    add("Block.forward", block.forward, params=params, state=state, context=context)
    add("Block.backward", block.backward, params=params, saved=saved, d_state=end)
    add("model.forward", model.forward, params=whole, tokens=tokens)
    if record.stream is not None:
        stream: Any = record.stream
        cache = stream.start(params, 1)
        one = block.start(params, x[:, :1], context)
        add("Stream.start", stream.start, params=params, batch=1)
        add("Stream.prefill", stream.prefill, params=params, cache=cache, state=state, context=context)
        later = stream.prefill(params, cache, state, context)[1]
        add("Stream.step", stream.step, params=params, cache=later, state=one, context=context)
    return found
