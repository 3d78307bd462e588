"""Whether a graph that is given fits, and whether steps may be chosen as they are asked to be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from refattn.mechanisms.arguments import check_arrays, check_floating, check_is, check_number
from refattn.mechanisms.graph_energy.sparse import CSR, ends_of
from refattn.xp import Array, concrete, dtype_name, is_array, is_bool, is_floating, namespace, raised

SOLVED = ("implicit_midpoint", "discrete_gradient")


def check_graph(graph: Any, q: Array, nodes: int, given: Mapping[str, Any], causal: bool) -> None:
    """Raise where a graph is neither an array of links nor a sparse one, or does not fit the other options."""
    if given["symmetrise"] is not None:
        raise ValueError(f'symmetrise: got "{given["symmetrise"]}" with a graph, which has its links; needs None')
    if causal and given["step"] is None:
        raise ValueError("step: got None with causal scores and a graph, whose degrees it would follow; needs a number")
    if isinstance(graph, CSR):
        _check_sparse(graph, q, nodes, causal)
        by_energy = [name for name in ("stop_plateau", "stop_level") if given[name] is not None]
        if given["integrator"] in SOLVED or given["adjoint"] == "implicit" or by_energy:
            raise ValueError(
                "graph: got a sparse one with an integrator or a gradient that solves systems of equations, or a stop "
                "by energy; needs a dense one"
            )
        return
    if not is_array(graph):
        raise TypeError(f"graph: got {type(graph).__name__}, needs an array (n, n), or (b, h, n, n), or a CSR")
    check_arrays(q=q, graph=graph)
    if not is_bool(graph) and not is_floating(graph):
        raise TypeError(f"graph: got dtype {dtype_name(graph)}, needs bool or a floating one")
    shape, full = tuple(graph.shape), (*q.shape[:2], nodes, nodes)
    fits = 2 <= len(shape) <= 4 and all(n in (1, m) for n, m in zip(reversed(shape), reversed(full), strict=False))
    if not fits or shape[-2:] != full[-2:]:
        raise ValueError(f"graph: got shape {shape}, needs {full}, or (n, n)")
    needs_energy = given["integrator"] == "discrete_gradient" or given["stop_plateau"] is not None
    if needs_energy or given["stop_level"] is not None:
        xp = namespace(graph)
        if concrete(xp.all(graph == xp.matrix_transpose(graph))) is False:
            raise ValueError("graph: got one that is not symmetric with what needs an energy; needs a symmetric one")


def check_over_keys(given: Mapping[str, Any], state: str, symmetrise: str, causal: bool) -> None:
    """Raise where the links of keys with keys do not fit the other options."""
    if causal:
        raise ValueError('graph_scores: got "kk" with causal scores, whose past depends on later keys; needs "qk"')
    if state == "feature":
        raise ValueError('graph_scores: got "kk" with state="feature", whose output are its nodes; needs "qk"')
    if symmetrise == "causal_mirror":
        raise ValueError('symmetrise: got "causal_mirror" with graph_scores="kk", whose keys have no order')
    if state == "token" and given["start"] is None:
        raise ValueError(
            'start: got None with graph_scores="kk" and state="token", needs an array: no q meets its own k'
        )


def check_proximal(given: Mapping[str, Any], integrator: str, stop: Mapping[str, float]) -> None:
    """Raise where a threshold after every step does not fit the other options."""
    if integrator != "euler":
        raise ValueError(f'integrator: got "{integrator}" with kind="proximal", needs "euler"')
    if given["adjoint"] == "implicit":
        raise ValueError(
            'adjoint: got "implicit" with kind="proximal", whose rest is not that of the flow; needs "unroll"'
        )
    if stop:
        raise ValueError(f'stop_{next(iter(stop))}: got a number with kind="proximal", needs None')


def check_start(start: Any, q: Array, nodes: int, state: str) -> Array | None:
    """Return where scores start, in the dtype that is computed in."""
    if start is None:
        return None
    if state != "token":
        raise ValueError(f'start: got an array with state="{state}", which has its own; needs None')
    if not is_array(start):
        raise TypeError(f"start: got {type(start).__name__}, needs an array")
    xp = check_arrays(q=q, start=start)
    check_floating(start=start)
    shape, full = tuple(start.shape), (*q.shape[:2], nodes)
    if len(shape) > 3 or any(n not in (1, m) for n, m in zip(reversed(shape), reversed(full), strict=False)):
        raise ValueError(f"start: got shape {shape}, needs one that broadcasts to {full}")
    return xp.astype(start, raised(q).dtype)


def check_jitter(jitter: Any, q: Array, full: tuple[int, ...]) -> Array | None:
    """Return how far from their start scores begin, as (b, h, j, c), in the dtype that is computed in."""
    if jitter is None:
        return None
    if not is_array(jitter):
        raise TypeError(f"jitter: got {type(jitter).__name__}, needs an array")
    xp = check_arrays(q=q, jitter=jitter)
    check_floating(jitter=jitter)
    shape = tuple(jitter.shape)
    if len(shape) > 4 or any(n not in (1, m) for n, m in zip(reversed(shape), reversed(full), strict=False)):
        raise ValueError(f"jitter: got shape {shape}, needs one that broadcasts to {full}")
    return xp.broadcast_to(xp.astype(jitter, raised(q).dtype), full)


def check_bias(bias: Any, q: Array, nodes: int) -> Array | None:
    """Return a bias of the scores in the dtype that is computed in."""
    if bias is None:
        return None
    if not is_array(bias):
        raise TypeError(f"bias: got {type(bias).__name__}, needs an array")
    check_arrays(q=q, bias=bias)
    check_floating(bias=bias)
    shape, full = tuple(bias.shape), (*q.shape[:3], nodes)
    if len(shape) > 4 or any(n not in (1, m) for n, m in zip(reversed(shape), reversed(full), strict=False)):
        raise ValueError(f"bias: got shape {shape}, needs one that broadcasts to {full}")
    return namespace(bias).astype(bias, raised(q).dtype)


def check_stop(given: Mapping[str, Any]) -> dict[str, float]:
    """Return when channels stop, without what is None."""
    stop = {}
    for name in ("force", "plateau", "level"):
        value = given[f"stop_{name}"]
        if value is not None:
            check_number(f"stop_{name}", value)
            if name != "level" and value < 0.0:
                raise ValueError(f"stop_{name}: got {value}, needs a number at least 0")
            stop[name] = float(value)
    return stop


def check_checkpoint(checkpoint: Any) -> int | None:
    """Return every how many steps a state is kept."""
    if checkpoint is not None and (isinstance(checkpoint, bool) or not isinstance(checkpoint, int) or checkpoint < 1):
        raise ValueError(f"checkpoint: got {checkpoint!r}, needs a whole number of at least 1, or None")
    return checkpoint


def check_max_nfe(most: Any) -> int:
    """Return how many rates "rk45" evaluates at most."""
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise ValueError(f"max_nfe: got {most!r}, needs a whole number of at least 1")
    return most


def check_choices_of_steps(
    integrator: str, stop: Mapping[str, float], state: str, symmetrise: str, causal: bool
) -> None:
    """Raise where steps would be chosen by what they must not depend on, or need an energy that does not exist."""
    if causal and state != "query" and (stop or integrator in ("rk45", *SOLVED)):
        name, got = (f"stop_{next(iter(stop))}", "a number") if stop else ("integrator", f'"{integrator}"')
        raise ValueError(
            f'{name}: got {got} with causal scores and state="{state}", where all tokens are one system and later '
            'tokens would decide on steps of earlier ones; needs fixed explicit steps, or state="query"'
        )
    if symmetrise == "none" and (integrator == "discrete_gradient" or {"plateau", "level"} & set(stop)):
        name = 'integrator: got "discrete_gradient"' if integrator == "discrete_gradient" else "stop: got an energy"
        raise ValueError(f'{name} with symmetrise="none", whose graph has no energy; needs another graph')


def _check_sparse(graph: CSR, q: Array, n: int, causal: bool) -> None:
    arrays = {f"graph.{name}": getattr(graph, name) for name in ("indptr", "indices", "data")}
    for name, x in arrays.items():
        if not is_array(x):
            raise TypeError(f"{name}: got {type(x).__name__}, needs an array")
    check_arrays(q=q, **arrays)
    check_is("graph.shape", graph.shape, tuple)
    edges = graph.data.shape[0]
    xp = namespace(graph.data)
    for name, size in (("indptr", n + 1), ("indices", edges), ("data", edges)):
        x = arrays[f"graph.{name}"]
        if name != "data" and not xp.isdtype(x.dtype, "integral"):
            raise TypeError(f"graph.{name}: got dtype {dtype_name(x)}, needs an integer one")
        if tuple(x.shape) != (size,):
            raise ValueError(f"graph.{name}: got shape {tuple(x.shape)}, needs {(size,)}")
    if graph.data.dtype != q.dtype:
        raise TypeError(f"graph.data: got dtype {dtype_name(graph.data)}, needs that of q, {dtype_name(q)}")
    if tuple(graph.shape) != (n, n):
        raise ValueError(f"graph.shape: got {tuple(graph.shape)}, needs {(n, n)}")
    indptr, indices = graph.indptr, graph.indices
    rises = xp.all(indptr[1:] >= indptr[:-1]) & (indptr[0] == 0) & (indptr[-1] == edges)
    if concrete(rises) is False:
        raise ValueError(f"graph.indptr: needs numbers that rise from 0 to the number of edges, {edges}")
    if edges and concrete(xp.all((indices >= 0) & (indices < n))) is False:
        raise ValueError(f"graph.indices: got one that is no token, needs numbers from 0 to {n - 1}")
    if causal and edges and concrete(xp.all(indices <= ends_of(graph)[0])) is False:
        raise ValueError("graph.indices: got a later token than that of its row, with causal scores")
