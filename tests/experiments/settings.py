"""What pages of experiments say of their settings, of times, and in words that weigh one model against another.

A function for each page yields sentences whose numbers are those of the script or of its stored results. `true` yields
a verdict where the stored results say the same, and fails where they do not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import refattn as ra
from docs.experiments import (
    delta,
    graph_energy,
    growing,
    higher_order,
    koopman,
    koopman_paths,
    normalisers,
    presets,
    teacher,
)
from docs.experiments import sympformer as sympformer_runs
from docs.experiments.growing_training import AUTO, Written
from docs.experiments.runs import found, read
from docs.experiments.tasks import Recall, Text
from docs.experiments.training import Plan
from refattn.mechanisms.growing.growth.options import Options
from tests.experiments import swept
from tests.experiments.stored import grouped, mean, ratios, scores

FOLDER = Path(sympformer_runs.__file__).parent
RATES = {3e-4: "3e-4", 6e-4: "6e-4", 1e-3: "1e-3", 3e-3: "3e-3", 1e-2: "1e-2", 2e-2: "2e-2"}
WORDS = "no one two three four five six seven eight nine ten".split()


def true(condition: Any, sentence: str) -> str:
    """Return a sentence that the results bear out; AssertionError where they do not."""
    assert condition, sentence
    return sentence


def of(name: str, *wanted: Any) -> list[dict[str, Any]]:
    """Return what came of some runs of an experiment."""
    return [line["result"] for line in found(wanted, FOLDER / f"{name}.jsonl")]


def of_any(tasks: Mapping[str, Any]) -> Any:
    """Return the tasks of an experiment, each with its plan: of which class they are the caller knows."""
    return tasks.values()


def kinds(results: Sequence[Mapping[str, Any]], kind: str) -> list[float]:
    return [x[kind] for x in results if x["diverged"] is None]


def steps(plan: Any) -> str:
    return f"{plan.steps} steps of {plan.batch} sequences"


def adam(plan: Plan) -> str:
    return f"rate {RATES[plan.learning_rate]} after {plan.warmup} steps, then half a cosine down"


def byte(task: Text) -> str:
    return f"the next byte of the source of Python's standard library, in sequences of {task.context}"


def held_out(task: Text) -> str:
    suffix = {2: "nd", 4: "th", 6: "th"}[task.every % 10]
    return f"bits per byte of every {task.every}{suffix} sequence of the first held-out {task.scored >> 20} MiB"


def recalled(task: Recall) -> str:
    pairs = f"{WORDS[task.pairs]} pairs of a key and a value, then the {WORDS[task.pairs]} keys in another order"
    return f"{pairs}, whose values are the answers; {task.keys} keys, {task.values} values |"


def cost(name: str) -> tuple[int, list[float]]:
    """Return how many trainings are stored, and the CPU time of each."""
    lines = read(FOLDER / f"{name}.jsonl")
    return len(lines), [line["result"]["seconds"] for line in lines if "seconds" in line["result"]]


def of_delta() -> Iterator[str]:
    (again, plain), (bits, parity), (text, longest) = of_any(delta.TASKS)
    assert (again.pairs, again.rounds, again.context) == (4, 3, 28) and parity.learning_rate == 2e-2
    told = f"the last value is the answer; {again.keys} keys, {again.values} values, {again.context} tokens"
    yield f"{told} | {bits.context} bits; after each the sum of the bits so far, modulo 2 | {byte(text)};"
    yield f"share of right values in {again.judged} held-out sequences"
    yield f"answers among the last {bits.context - bits.context // 2}, in {bits.judged} such sequences"
    yield held_out(text)
    plans = (plain, parity, longest)
    yield "| layers, width, heads | " + " | ".join(f"{p.layers}, {p.width}, {p.heads}" for p in plans) + " |"
    yield f"| training | {steps(plain)} | the same | {steps(longest)} |"
    last = (
        f"clipped at {plain.clip:g} | rate {RATES[parity.learning_rate]} | rate {RATES[longest.learning_rate]}, decay"
    )
    yield f"| AdamW | {adam(plain)}; {last}"
    yield f"convolution of {WORDS[delta.LAYER['conv']]} taps"
    yield "keys and queries of length 1, and normalised heads. *beta to 2* lets"
    count, seconds = cost("delta")
    yield f"The {count} trainings took {sum(seconds):.0f} s of CPU time on one core"
    yield f"Sequences are short, {bits.context} to {text.context} tokens"

    def values(task: str, name: str, long: bool = False) -> list[float]:
        seeds, times = (delta.LONGER_SEEDS, delta.LONGER) if long else (delta.SEEDS, 1)
        return kinds(
            of("delta", *delta.grid([name], [task], seeds, longer=times)), "bits" if task == "text" else "accuracy"
        )

    predicts = ("delta", "gated delta", "KDA", "momentum delta")
    early = {name: values("overwriting", name) for name in delta.MODELS}
    least = min(values("overwriting", name, True)[0] for name in (*predicts, "delta, beta to 2"))
    ahead = min(early["delta"] + early["gated delta"])
    assert ahead > max(early["linear"] + early["gated"] + early["gated by channel"])
    yield "In the short training delta and gated delta are ahead of linear and both gated rules with every seed"
    yield true(least >= 0.999, "every rule that predicts has at least 999 of 1,000 values right")
    right = [x > 0.99 for x in values("parity", "delta, beta to 2")]
    assert values("parity", "delta, beta to 2", True)[0] > 0.99
    told = f"With it {sum(right)} of {len(right)} seeds solve the task in the short training, and so does the long one"
    yield f"**Parity needs a beta up to 2.** {told}"
    text_bits = {name: values("text", name) for name in delta.MODELS}
    fading = ("gated", "gated by channel", "gated delta", "KDA")
    behind = [a < b for name in fading for a, b in zip(text_bits[name], text_bits["linear"], strict=True)]
    assert all(behind)
    yield "gated, gated by channel, gated delta, KDA, are ahead of linear attention with every seed"
    late = {name: values("text", name, True)[0] for name in delta.MODELS}
    assert late["gated by channel"] < late["gated"] and late["KDA"] < late["gated delta"]
    yield "**Gates by channel are ahead of gates by head only in the long training**"
    worse = late["momentum delta"] > late["gated delta"]
    yield true(
        worse, "**Momentum gained nothing.** It has all that gated delta has, and is 0.23 bits behind it on text"
    )
    overwrites = min(values("overwriting", name, True)[0] for name in predicts)
    only_add = [values("overwriting", name, True)[0] for name in ("linear", "gated", "gated by channel")]
    others = max(only_add)
    yield true(
        overwrites > others and late["gated"] < late["linear"] and worse,
        "only rules that predict overwrite fully, parity needs a beta up to 2, a gate helps on text, and momentum "
        "does not. Not confirmed: that delta is hardly better than linear attention on text",
    )
    yield true(late["gated"] < late["linear"], "**On text, fading helps.**")
    yield true(
        0.98 < min(only_add) and others < least,
        "In a task of this size the delta rule gains speed of learning and the last hundredth",
    )
    yield true(np.mean(early["KDA"]) < np.mean(early["gated delta"]), "KDA learns to overwrite later than gated delta")
    yield true(
        all(line["result"]["diverged"] is None for line in read(FOLDER / "delta.jsonl")),
        "All numbers stayed finite in all trainings.",
    )


def of_graph_energy() -> Iterator[str]:
    task, plan = graph_energy.TEXT, graph_energy.PLAN
    scored = f"every {task.every}th sequence of its first half MiB is scored"
    yield f"{byte(task)}. A tenth of the files is held out; {scored}"
    layers, heads = WORDS[plan.layers], WORDS[plan.heads]
    yield f"Models have {layers} layers of width {plan.width} with {heads} heads and an MLP. They are trained for"
    yield f"trained for {steps(plan)} with AdamW: {adam(plan)}; decay {plan.weight_decay:g}, clipped at {plan.clip:g}."
    yield f"with one step of length {graph_energy.STILL['step']:.0e}.".replace("e-0", "e-")
    yield f"{WORDS[graph_energy.VARIANTS['flow'][1]['steps']]} steps of the default flow"
    past = graph_energy.VARIANTS["symmetric past"][1]
    yield f"in {WORDS[past['steps']]} steps of {past['step']:g}."
    yield (
        "| bits | + with 5 % replaced | + with 15 % replaced | bits, 4 times as long | + with 5 % replaced | "
        "+ with 15 % replaced |"
    )
    assert (0.05, 0.15) == graph_energy.NOISE and graph_energy.TIMES == 4
    yield "that are exactly 0; the standard deviation"
    yield "with 60 steps of the flow instead of those of the training. | | weights that are 0 |"
    yield "| weights that are 0 | spread of scores, start | end | bits with 60 steps, more |"
    yield "2. How many weights are exactly 0?"
    early = {
        name: of("graph_energy", *graph_energy.grid(name, plan, graph_energy.SHORT)) for name in graph_energy.VARIANTS
    }
    short = {name: kinds(many, "bits") for name, many in early.items()}
    longer = {
        name: of("graph_energy", *graph_energy.grid(name, graph_energy.longer(), graph_energy.LONG))[0]
        for name in graph_energy.VARIANTS
    }
    ranges = {name: (min(x), max(x)) for name, x in short.items()}
    within = all(
        ranges[one][0] < ranges[other][1] for one, other in itertools.permutations(("softmax", "flow", "no flow"), 2)
    )
    tokens = [name for name in longer if name not in ("softmax", "symmetric past")]
    last = {name: x["bits"] for name, x in longer.items()}
    hard, soft = (
        [a - b for a, b in zip([*short[still], last[still]], [*short[flows], last[flows]], strict=True)]
        for still, flows in (("no flow", "flow"), ("no flow, soft", "flow, soft"))
    )
    yield true(
        min(hard) > 0.0 and last["softmax"] == min(last.values()),
        "**The flow helps a little with the hard threshold, and after the longer training no model is better than "
        "softmax attention.**",
    )
    ahead = [sum(x > 0.0 for x in gains) for gains in (hard, soft)]
    assert ahead[0] == len(hard)
    yield (
        f"it is ahead of no flow in all {WORDS[ahead[0]]} pairs of trainings, by {min(hard):.2f} to {max(hard):.2f} "
        f"bits, with the soft one in {WORDS[ahead[1]]}."
    )
    yield true(within, f"After {plan.steps} steps softmax, the flow and no flow lie within the seeds of each other.")
    other = presets.by_setting(presets.RESULTS)
    theirs, plain = (
        float(np.mean(kinds([x["result"] for x in other[name]["steps"]], "bits")))
        for name in ("graph energy", "softmax")
    )
    size, usual = presets.SIZE, ra.mechanism("graph_energy").defaults["steps"]
    assert theirs > plain
    yield (
        f"width {size['width']} with sequences of {size['context']} and {WORDS[usual]} steps of the flow, it is behind "
        f"softmax after {size['steps']} steps, {theirs:.3f} against {plain:.3f} bits"
    )
    zeros = [
        pair
        for still, flows in (("no flow", "flow"), ("no flow, soft", "flow, soft"))
        for one, two in zip([*early[still], longer[still]], [*early[flows], longer[flows]], strict=True)
        for pair in zip(one["zeros"], two["zeros"], strict=True)
    ]
    fewer = sum(b < a for a, b in zeros)
    yield true(fewer > 0.8 * len(zeros), "**Some weights are 0, and mostly fewer with the flow.**")
    yield f"the flow has fewer in {fewer} of {len(zeros)} layers."
    kept = [1.0 - x for name in ("no flow, soft", "flow, soft") for one in early[name] for x in one["zeros"]]
    yield f"{min(kept):.2f} to {max(kept):.2f} after {plan.steps} steps: training does not favour"
    falls = [end / start for one in early["flow"] for start, end in one["spreads"]]
    yield f"after {plan.steps} steps to {min(falls):.2f} to {max(falls):.2f}."
    flowing = [x for name in ("flow", "flow, soft") for x in (*early[name], longer[name])]
    yield true(
        max(abs(x["bits at rest"] - x["bits"]) for x in flowing) < 0.002,
        "In all trainings 60 steps in place of four change the bits by less than 0.002",
    )
    lost = {name: x["bits, 0.15 replaced"] - x["bits"] for name, x in longer.items()}
    for share in graph_energy.NOISE:
        each = {name: [x[f"bits, {share} replaced"] - x["bits"] for x in many] for name, many in early.items()}
        for own in (own for name, own in each.items() if name != "softmax"):
            assert len({a > b for a, b in zip(own, each["softmax"], strict=True)}) == 2
    yield f"After {plan.steps} steps no model loses more, or less, than softmax with all three seeds."
    least, *others, most = sorted(lost[name] for name in lost if name != "softmax")
    softs = ("no flow, soft", "flow, soft")
    yield true(
        most < lost["softmax"] and sorted(lost[name] for name in softs) == [least, others[0]],
        f"all lose less than softmax with 15 % replaced, {least:.2f} to {most:.2f} bits against {lost['softmax']:.2f}, "
        f"and least with a soft threshold: {lost[softs[0]]:.2f} and {lost[softs[1]]:.2f}.",
    )
    whole = {name: last[name] + lost[name] for name in last}
    three = (*softs, "symmetric past")
    yield true(
        max(whole[x] for x in three) < whole["softmax"] < min(whole[x] for x in ("flow", "no flow")),
        f"also better in total, {whole[three[0]]:.2f}, {whole[three[1]]:.2f} and {whole[three[2]]:.2f} against "
        f"{whole['softmax']:.2f} bits, although they are worse without replaced bytes.",
    )
    assert np.mean(short["symmetric past"]) == min(np.mean(x) for x in short.values())
    yield f"After {plan.steps} steps it is the best of all"
    yield true(last["symmetric past"] < min(last[name] for name in tokens), "and ahead of all models with a score of")
    most_links = 1 + 2 * (task.context - 1)  # mu and 2 kappa, both 1, and what the others attend the first token
    assert 2.0 / most_links < past["step"]
    yield f"has at most 2 / {most_links} = {2.0 / most_links:.3f}, and where {past['step']:g} is too long"
    yield f"in sequences of {task.context}, and its cost grows"
    yield f"With 60 steps, which leave up to {100.0 * (1.0 - past['step']) ** 60:.0f} % of the way"
    yield true(longer["symmetric past"]["bits at rest"] > last["symmetric past"], "it is worse by")
    clipped = {name: 100.0 * x["clipped"] for name, x in longer.items()}
    yield (
        f"in the longer training {clipped['softmax']:.0f} % with softmax, {clipped[softs[0]]:.0f} and "
        f"{clipped[softs[1]]:.0f} % with the soft threshold, {clipped['symmetric past']:.0f} % with the symmetric "
        f"past, and {clipped['no flow']:.0f} and {clipped['flow']:.0f} % with the hard threshold."
    )
    yield "measured here: the flow helps a little with the hard threshold;"
    yield "after the longer training no model is better than softmax; softmax attention has"
    yield from swept.of_graph_energy()


def of_growing() -> Iterator[str]:
    plan, written = growing.TEACHER, growing.WRITTEN
    model = Written()
    text = Text(model.context, model.scored, model.every)
    yield f"a block of one head of width {teacher.HEAD_WIDTH}, its queries and keys 2.5 times as large as fresh ones;"
    yield f"as fresh ones; {teacher.TOKENS} tokens of width {teacher.WIDTH} | {byte(text)} |"
    conditions = [task.condition for task, _, _ in of_any(growing.TASKS) if hasattr(task, "condition")]
    assert sorted(conditions) == [1, 10, 30]
    (given,) = {task.sequences for task, _, _ in of_any(growing.TASKS) if hasattr(task, "condition")}
    yield "with singular values from 1 to the condition: 1 (isotropic), 10 or 30;"
    yield f"10 or 30; {given} sequences to learn from, {given} held out |"
    yield f"held out; every {text.every}th sequence of its first {text.scored >> 20} MiB is scored"
    yield (
        f"| one block of one head, values of width {teacher.WIDTH} | {model.layers} layers of width {model.width}, "
        f"{model.heads} heads, values of width {model.width // model.heads}, MLPs |"
    )
    each = []
    for own in (plan, written):
        widths = ", ".join(str(own.first + n * own.columns) for n in range(len(own.grows) + 1))
        each.append(f"{widths}, after {own.grows[0]}, {own.grows[1]} and {own.grows[2]} steps")
    yield f"| width of a head | {each[0]} | {each[1]} |"
    yield f"on all {plan.sequences} sequences | on {written.sequences} sequences that no step trains on"
    yield f"| training | {steps(plan)}, float64 | {steps(written)}, float32 |"
    yield f"| AdamW | rate {RATES[plan.learning_rate]}, beta2 {plan.beta2:g}, no decay | rate "
    yield f"rate {RATES[written.learning_rate]} after {written.warmup} steps, beta2 {written.beta2:g}, decay"
    yield f"decay {written.weight_decay:g}, clipped at {written.clip:g} |"
    yield "with the sign of ascent and a step of 1 |"
    gain, options, half = f"{100 * AUTO.plateau:g} %", Options(), AUTO.window // 2
    every = f"Every {AUTO.every} steps the schedule checks whether the mean loss of the last {half} is less than"
    yield f"{every} {gain} below that of the {half} before."
    yield f"it grows by as many columns, at most {options.most}, as two halves"
    yield "## Teacher task, inputs of condition 10"
    yield "## Inputs of condition 30"
    yield f"The teacher has width {teacher.HEAD_WIDTH}."
    lines = found(growing.grid(tuple(growing.TASKS), growing.SEEDS), growing.RESULTS)
    known = {task: grouped(lines, task) for task in growing.TASKS}
    ten, one, thirty, texts = (known[name] for name in ("condition 10", "condition 1", "condition 30", "text"))

    def at(results: Any, way: str, reading: str = "steps") -> float:
        return mean(scores(results, way, reading))

    yield "on inputs of condition 10 and 30: the first"
    yield true(at(ten, "optimal") < at(ten, "scratch") / 10 > 0, "at condition 10 and of 22 at condition 30, after")
    yield "times above growing at condition 10. A good part"
    yield true(at(one, "optimal") > at(one, "scratch"), "**On isotropic inputs growing loses**")
    given_steps = [way for way in one if way not in ("scratch", "auto")]
    assert at(one, "optimal") == min(at(one, way) for way in given_steps)
    yield "All ways of growing lose there, and among those with given steps this one loses least."
    same = {way: float(np.mean(scores(texts, way, "operations"))) for way in texts}
    yield true(same["narrow"] == min(same.values()), "At equal operations the narrow model is the best")
    yield true(
        min(at(texts, way) for way in texts) > at(texts, "scratch") - 0.05, "**On text there is nothing to gain.**"
    )
    undamped = [at(texts, way) for way in ("optimal", "additive")]
    assert min(undamped) > 0.1 + max(at(texts, way) for way in texts if way not in ("optimal", "additive"))
    yield "**Without damping growth ruins the training on text**"
    firsts = [mean(ratios(texts, way, 0)) for way in ("optimal", "damped")]
    yield true(abs(firsts[0] - firsts[1]) < 1e-3, "The first growth gains as much with damping as without.")
    yield true(at(ten, "zero") < at(ten, "scratch"), "A good part of the gain comes with any growth that does no harm")
    close = [at(ten, way) for way in ("additive", "optimal", "damped")]
    ranges = [scores(ten, way, "steps") for way in ("additive", "optimal", "damped")]
    assert max(map(min, ranges)) < min(map(max, ranges)) and max(close) < 2 * min(close)
    yield "**Additive, optimal and damped** cannot be told apart at condition 10."
    ends = []
    for results in (ten, one, thirty):
        for result in results["auto"]:
            grown = [look for look in result["growths"] if look["after"] < look["before"]]
            assert len(grown) == 2
            ends.append(grown[-1]["widths"][-1] if isinstance(grown[-1]["widths"], list) else grown[-1]["widths"])
    eights, sevens = ends.count(teacher.HEAD_WIDTH), ends.count(7)
    assert eights + sevens == len(ends)
    yield f"it grows twice, and in {eights} of {len(ends)} it ends at {teacher.HEAD_WIDTH}, otherwise at 7."
    assert min(close) < at(ten, "auto") < max(close)
    yield "At condition 10 it ends where the given steps end, and at condition 1"
    seconds_last = [result["growths"][-1]["step"] for result in thirty["auto"]]
    assert sorted(seconds_last)[1:] == [plan.steps - 100] * 3
    yield "At condition 30 it waits for a plateau that comes late: most second growths are 100 steps before the end"
    yield f"the loss of {half} steps is always more than {gain} below that of the {half} before."
    assert not [look for result in texts["auto"] for look in result["growths"] if look["after"] < look["before"]]
    yield "**On text it never grows**"
    yield "So it ends as narrow does, the best way at equal operations."
    yield from swept.of_growing()
    yield f"A text model of {model.layers} layers after {written.steps} steps has learnt"
    count, seconds = cost("growing")
    yield f"{count} trainings took {sum(seconds):.0f} s of CPU time, {min(seconds):.0f} to {max(seconds):.0f} s each"
    yield true(
        mean(ratios(ten, "report", 0)) > 1.0, "**As the report prints it** the step raises the loss or leaves it"
    )
    yield true(at(ten, "report") < at(ten, "scratch"), "Its training still ends below scratch")
    better = all(at(results, "damped") < at(results, "scratch") for results in (ten, thirty))
    yield true(
        better and at(one, "damped") > at(one, "scratch"),
        "measured here: better on tokens of condition 10 and 30, worse on isotropic ones. On text nothing is gained:",
    )
    yield "and the automatic schedule never grows;"


def of_higher_order() -> Iterator[str]:
    (text, plan), (recall, recalls) = of_any(higher_order.TASKS)
    yield byte(text)
    yield recalled(recall)
    yield held_out(text)
    yield f"share of right values in {recall.judged} held-out sequences"
    width = plan.width // plan.heads
    assert width == recalls.width // recalls.heads
    yield (
        f"| model | {plan.layers} layers of width {plan.width}, {plan.heads} heads of width {width}, MLPs | "
        f"{recalls.layers} layers of width {recalls.width}, {recalls.heads} head of width {width}, no MLP |"
    )
    yield f"| training | {steps(plan)} | {steps(recalls)} |"
    yield f"| AdamW | {adam(plan)}; decay {plan.weight_decay:g}, clipped at {plan.clip:g} | the same without decay |"
    yield f"All heads have width {width}, because the scores of higher-order attention depend on it: they are at most"
    yield f"at most sqrt({width}) / alpha,"
    low, high = min(higher_order.ALPHAS), max(higher_order.ALPHAS)
    yield f"**order {min(higher_order.ORDERS)} to {max(higher_order.ORDERS)}** with alpha {low:g} to {high:g}:"
    yield "Order 0 is the mean of all values so far and has no alpha."
    worst = max(abs(taylor(s, higher_order.LIMIT) - np.exp(s)) for s in (-(width**0.5), width**0.5))
    assert worst < 2e-4
    yield f"**order {higher_order.LIMIT}** is practically the exponential: the two differ by less than 2e-4"
    assert [x[1]["normaliser"] for x in higher_order.MECHANISMS["floor"]] == ["signed(eps=1.0)", "clamp(eps=32.0)"]
    yield '**order 1, alpha = 1** with two other normalisers: "signed" with eps = 1, and "clamp" with eps = 32, which'
    yield "which replaces nearly all sums by 32."
    yield "the features elu(x) + 1 (Katharopoulos"
    yield "| | " + " | ".join(f"alpha = {alpha:g}" for alpha in higher_order.ALPHAS) + " |"
    yield "| softmax | elu | separate | order 0 | order 1, alpha = 1, signed(eps=1.0) |"
    yield "number of their keys (text, seed 0):"
    least = [taylor(-(width**0.5), order) for order in (1, 3)]
    yield "scores far enough below 0 have negative weights: at alpha = 1 the smallest possible weight is"
    yield f"is {least[0]:.1f} for order 1 and {least[1]:.0f} for order 3. So some sums are near 0, or below"
    long = [normalisers.LONGER * own.steps for own in (plan, recalls)]
    yield f"{WORDS[normalisers.LONGER]} times as long, {long[0]} steps on text and {long[1]} on recall, with"
    groups: dict[tuple[str, Any, Any], list[dict[str, Any]]] = {}
    runs = higher_order.grid(tuple(higher_order.MECHANISMS), tuple(higher_order.TASKS), higher_order.SEEDS)
    for run, result in zip(runs, of("higher_order", *runs), strict=True):
        known = run.options
        name = known.get("order", known.get("kind", run.mechanism))
        name = f"{name} {known['normaliser']}" if "eps" in known.get("normaliser", "") else name
        groups.setdefault((type(run.task).__name__.lower(), name, known.get("alpha")), []).append(result)
    bits = {key[1:]: kinds(x, "bits") for key, x in groups.items() if key[0] == "text"}
    right = {key[1:]: kinds(x, "accuracy") for key, x in groups.items() if key[0] == "recall"}
    middle = {key: float(np.mean(x)) for key, x in bits.items()}
    divided = higher_order.divided()
    longer: dict[tuple[str, int, float, str], list[float]] = {}
    for run, result in zip(divided, of("higher_order", *divided), strict=True):
        own, kind = run.options, "bits" if isinstance(run.task, Text) else "accuracy"
        key = (kind, own["order"], own["alpha"], own["normaliser"])
        longer.setdefault(key, []).append(result[kind])
        if kind == "accuracy" and (own["order"], own["normaliser"]) == (1, "clamp(eps=32.0)"):
            assert result["replaced"] == 1.0
    clamp, none = "clamp(eps=32.0)", "clamp(eps=2048.0)"
    plain = float(np.mean(longer["bits", 1, 1.0, "signed"]))
    works = np.mean(longer["bits", 1, 1.0, clamp]) < plain and min(longer["accuracy", 1, 1.0, clamp]) > 0.99
    yield true(works, "**Order 1 works without normalisation.** A constant is as good as")
    yield 'on recall "clamp 32" is a constant: it replaces all sums. Divided by its sums, order 1 at alpha = 1 stays'
    half = max(longer["accuracy", 1, 1.0, "signed"]) < 0.55 and max(longer["accuracy", 1, 5.0, "signed"]) < 0.5
    yield true(half, "or more behind, and recalls at most half. At alpha = 5 no sum of a fresh model is near 0, but")
    yield 'bits behind "clamp 32", and again recalls at most half.'
    better = max(longer["bits", 2, 1.0, "signed"]) < min(longer["bits", 2, 1.0, none])
    yield true(better, "**Order 2 is better with its normalisation than with the one constant that was tried**")
    yield true(
        np.mean(longer["bits", 2, 1.0, clamp]) < np.mean(longer["bits", 2, 1.0, "signed"]),
        '"Clamp 32" replaces a third of the sums, those of the first tokens, and loses nothing.',
    )
    yield true(max(longer["accuracy", 2, 1.0, none]) < 0.3, "Divided by 2048 order 2 does not recall.")
    yield 'bits ahead of order 1 with "clamp 32", seed by seed.'
    even = [middle[order, alpha] for order in (2, 4, higher_order.LIMIT) for alpha in higher_order.ALPHAS]
    rising = all(
        a < b for n in range(3) for a, b in zip(even[5 * n : 5 * n + 4], even[5 * n + 1 : 5 * n + 5], strict=True)
    )
    yield true(
        rising,
        "**On text a small alpha is better, if the order is even.** With every even order the bits per byte rise with "
        "alpha.",
    )
    lost = [middle[order, high] - middle[order, low] for order in (2, higher_order.LIMIT)]
    yield true(
        lost[1] > lost[0],
        f"The exponential itself, order {higher_order.LIMIT}, loses no less, so the polynomial is not the cause.",
    )
    ends = {alpha: groups["recall", 2, alpha] for alpha in (1.0, 3.0, 4.0)}
    recalls_at = [float(np.mean(kinds(x, "accuracy"))) for x in ends.values()]
    clips = [[100.0 * x["clipped"] for x in own] for own in ends.values()]
    one, three, four = (f"{min(x):.0f} to {max(x):.0f} %" for x in clips)
    unfinished = all(x["losses"][-1] < x["losses"][-2] for alpha in (3.0, 4.0) for x in ends[alpha])
    yield f"For order 2 it falls from {recalls_at[0]:.2f} at alpha = 1 over {recalls_at[1]:.2f} at 3 to"
    yield f"over {recalls_at[1]:.2f} at 3 to {recalls_at[2]:.2f} at 4."
    yield true(
        unfinished,
        f"But order 2 clips {one} of the steps at alpha = 1, {three} at 3 and {four} at 4, and at 3 and 4 the loss "
        "still falls in the last tenth of the training.",
    )
    yield f"At alpha = {high:g} scores of"
    yield true(np.exp(2 * width**0.5 / high) < 10.0, "weigh the best key at most 10 times as much as the worst")
    close = max(abs(middle[4, alpha] - middle[higher_order.LIMIT, alpha]) for alpha in higher_order.ALPHAS) < 0.02
    yield true(
        close, f"behind order {higher_order.LIMIT}, and order 4 cannot be told from it, except for the seed of the last"
    )
    yield true(middle["softmax", None] == min(middle.values()), "**Softmax is the best on text** in the mean:")
    nearest = min(bits[4, 1.0] + bits[higher_order.LIMIT, 1.0])
    yield true(nearest < max(bits["softmax", None]), "ahead of order 4 at alpha = 1, where the ranges overlap,")
    assert min(bits[4, 1.0]) < max(bits["softmax", None])
    yield "ahead of order 2 there, and"
    yield true(
        abs(middle["elu", None] - middle[2, 5.0]) < 0.05 and max(right["elu", None] + right["separate", None]) < 0.3,
        "elu is as good on text as any order at alpha = 5, and 0.13 bits behind order 2 at alpha = 1.",
    )
    level = (
        abs(middle["separate", None] - middle[2, 1.0]) < 0.03 and abs(middle["separate", None] - middle[4, 1.0]) < 0.03
    )
    yield true(level, "Separate is level with orders 2 and 4 at alpha = 1, and")
    overlap = min(bits[2, 3.0]) < max(bits["separate", None])
    yield true(overlap, "ahead of order 2 at the default, where the ranges overlap.")
    yield "Neither recalls after this training: both name the most frequent value, while orders 2 and 4 find the keys."
    yield (
        "**Order 1 fails because of its normalisation**, see above: without it, it learns both tasks, behind order 2. "
        "Order 3 was not trained without."
    )
    odd = [middle[1, alpha] > middle[2, alpha] + 0.1 for alpha in higher_order.ALPHAS]
    third = [middle[3, alpha] > middle[4, alpha] + 0.1 for alpha in higher_order.ALPHAS]
    assert odd[:4] == [True, True, True, True] and not odd[4] and third == [True, True, False, False, False]
    yield (
        "**Divided by their sums, odd orders need a large alpha.** On text order 1 fails up to alpha = 3 and is behind "
        "at 4, and order 3 fails up to 2: there"
    )
    small = [[normalisers.small_sums(text, plan, order, a) > 1e-3 for a in higher_order.ALPHAS] for order in (1, 3)]
    assert small == [[True, True, False, False, False], [True, False, False, False, False]]
    yield "Fresh models, of one seed, have small sums only up to alpha = 2 and 1, so the others develop them"
    assert max(right[3, 1.0]) < 0.5 < min(right[3, 2.0])
    assert [max(right[1, alpha]) > 0.8 for alpha in higher_order.ALPHAS] == [True, True, True, False, False]
    yield "On recall order 3 fails at alpha = 1, and order 1 finds the keys with some seeds up to alpha = 3"
    for alpha in (alpha for alpha in higher_order.ALPHAS if alpha >= 3.0):
        assert all(min(bits[3, alpha]) < max(bits[even, alpha]) for even in (2, 4))
    yield "If order 3 is steady it is as good as orders 2 and 4."
    stuck = sum(x < 0.3 for x in right[higher_order.LIMIT, 1.0])
    assert stuck == 1 and min(right[2, 1.0] + right[4, 1.0]) > 0.9
    yield (
        f"**Alpha = 1 is not safe with sharp weights.** One seed of order {higher_order.LIMIT} still names the most "
        "frequent value at the end of the training; no seed of orders 2 and 4 does."
    )
    for order in (2, 4, higher_order.LIMIT):
        mean_right = {alpha: np.mean(right[order, alpha]) for alpha in higher_order.ALPHAS}
        assert max(mean_right[1.0], mean_right[2.0]) >= max(mean_right.values())
    yield "So the best choice here is an even order with alpha = 1 or 2."
    chosen = presets.SETTINGS["Mercat: minus one"].settings()
    width_there = chosen.model.width // chosen.model.heads
    alpha_there = chosen.model.block(0).alpha
    told = f"have heads of width {width_there}, whose scores are at most {width_there**0.5 / alpha_there:.2f}"
    yield f"{told} at alpha = {alpha_there:g}."
    yield f"Sequences have {text.context} bytes or {recall.context} tokens."
    yield f"{WORDS[recall.pairs].title()} pairs are few for heads of width {width}."
    yield from swept.of_higher_order()
    yield f"Elu and separate fail to recall after {recalls.steps} steps. With 4800 steps and one seed,"
    yield "`--task recall --mechanism elu --mechanism separate --steps 4800 --seeds 1 --results longer.jsonl`"
    yield f"Its lead over order {higher_order.LIMIT} comes from there"
    times = [x["seconds"] for x in of("higher_order", *runs)]
    floor = 2 * len(higher_order.SEEDS) * len(higher_order.MECHANISMS["floor"])
    told = f"The {len(times) - floor} trainings of the grid and {floor} of the two normalisers took {sum(times):.0f} s"
    yield f"{told} of CPU time, {min(times):.0f} to {max(times):.0f} s each, on two cores"
    yield f"on two idle ones that is {sum(times) / 120:.0f} minutes."
    yield f"The {len(divided)} longer trainings took {sum(x['seconds'] for x in of('higher_order', *divided)):.0f} s."
    yield 'An eps of 1 does not help, because sums have the size of the number of keys; nor does the 1e-6 of "signed".'
    assert min(right[f"1 {clamp}", 1.0]) > 0.95
    yield 'With "clamp 32" order 1 has steady gradients and recalls.'


def taylor(s: float, order: int) -> float:
    """Return the Taylor polynomial of the exponential."""
    value = 1.0
    for r in range(order, 0, -1):
        value = 1.0 + value * s / r
    return value


def of_koopman() -> Iterator[str]:
    (text, plan, narrow), (recall, recalls, less), (_, single, least) = of_any(koopman.TASKS)
    yield byte(text)
    yield recalled(recall)
    yield held_out(text)
    yield f"share of right values in {recall.judged} held-out sequences"
    plans = (plan, recalls, single)
    yield "| layers | " + " | ".join(str(p.layers) for p in plans) + " |"
    pairs = zip(plans, (narrow, less, least), strict=True)
    yield "| width without, with MLP | " + " | ".join(f"{p.width}, {n}" for p, n in pairs) + " |"
    yield "| heads | " + " | ".join(str(p.heads) for p in plans) + " |"
    yield f"| training | {steps(plan)} | {steps(recalls)} | the same |"
    yield f"| AdamW | {adam(plan)}; decay {plan.weight_decay:g}, clipped at {plan.clip:g} |"
    yield "- **Koopman, ridge to 0**: `koopman`"
    yield "to the identity (tau = 1). - **Koopman, 3 updates**: the same"

    def values(name: str, task: str) -> list[float]:
        results = of("koopman", *koopman.grid([name], [task], koopman.SEEDS))
        return kinds(results, "bits" if task == "text" else "accuracy")

    def seconds(name: str, task: str) -> list[float]:
        return [x["seconds"] for x in of("koopman", *koopman.grid([name], [task], koopman.SEEDS))]

    bits = {name: float(np.mean(values(name, "text"))) for name in koopman.MODELS}
    found_ = {
        task: {name: sum(x > 0.9 for x in values(name, task)) for name in koopman.MODELS} for task in koopman.TASKS
    }
    seeds = len(koopman.SEEDS)
    two, one = found_["recall"], found_["one layer"]
    assert two["attention"] == seeds and one["attention"] == 0 < one["Koopman"] < one["attention twice"] == seeds
    yield true(
        bits["attention"] == min(bits.values()) and two["Koopman"] < two["attention"],
        "**The update does not help on the text or with two layers.** On text attention alone is the best",
    )
    ranges = {name: (min(own), max(own)) for name in koopman.MODELS for own in [values(name, "text")]}

    def overlap(a: str, b: str) -> bool:
        return ranges[a][0] <= ranges[b][1] and ranges[b][0] <= ranges[a][1]

    yield true(overlap("Koopman", "attention"), "with the update, though their ranges overlap.")
    yield "**With one layer it helps, and attending twice helps more.** Attention that attends once cannot recall"
    alone, between = (float(np.mean(values(name, "one layer"))) for name in ("attention", "Koopman"))
    yield f"cannot recall at all, {alone:.2f}."
    told = f"with the operator in between {one['Koopman']} do, {between:.2f} in the mean."
    yield f"finds the value with all {seeds} seeds; {told}"
    told = f"attention alone recalls with all {seeds} seeds, and the model with the update with {two['Koopman']}."
    yield f"With two layers {told}"
    better = bits["Koopman"] < bits["attention + MLP"] and two["Koopman"] > two["attention + MLP"] == 0
    yield true(better, "**It is better than an MLP at equal parameters** in the mean, on the text")
    yield true(overlap("Koopman", "attention + MLP"), "bits, where ranges overlap, and on recall,")
    yield true(two["attention + MLP"] == 0, "the model with MLPs recalls with no seed.")
    assert ranges["attention"][1] < ranges["attention + MLP"][0]
    yield true(bits["Koopman + MLP"] > bits["attention + MLP"], "Beside the MLP the update makes the text worse")
    yield true(overlap("Koopman + MLP", "attention + MLP"), "again with ranges that overlap.")
    twice, zero = "attention twice", "Koopman, ridge to 0"
    helps = bits["Koopman"] < bits[twice] and two["Koopman"] <= two[twice]
    yield true(helps, "**With a ridge to the identity the operator helps on the text, and not on recall.**")
    yield true(ranges["Koopman"][1] < ranges[twice][0], "the update wins 0.073 bits, with ranges apart.")
    assert ranges[zero][0] > ranges[twice][1]
    yield f"With the ridge to 0 of the sources it loses {bits[zero] - bits[twice]:.3f} bits to it, with ranges apart."
    worst = bits[zero] == max(bits.values()) and two[zero] == 0
    yield true(worst, "**With a ridge to 0 the model is the worst of these**")
    yield true(bits["Koopman"] < bits[zero], "the same update is 0.18 bits better.")
    beside = {name: own["steps"] for name, own in presets.by_setting(presets.RESULTS, ["softmax", "Koopman"]).items()}
    other = {name: [line["result"]["bits"] for line in own] for name, own in beside.items()}
    assert min(other["Koopman"]) < max(other["softmax"]) and min(other["softmax"]) < max(other["Koopman"])
    told = " bits against ".join(f"{np.mean(other[name]):.3f}" for name in ("Koopman", "softmax"))
    yield f"the ridge to 0 is within the seeds of attention: {told}."
    third = "Koopman, 3 updates"
    yield true(bits[third] > bits["Koopman"] and two[third] == one[third] == 0, "**A third update gives nothing**")
    yield "a mean between 0.5 and 0.8 is of seeds near 0.29 and near 1"
    partly = [x for task in ("recall", "one layer") for name in koopman.MODELS for x in values(name, task)]
    some = [x for task in ("recall", "one layer") for x in values("Koopman + MLP", task) if 0.32 < x < 0.95]
    assert [x for x in partly if 0.32 < x < 0.95] == some
    yield f"Koopman + MLP has seeds with {', '.join(f'{x:.2f}' for x in some[:2])} and {some[2]:.2f}."
    yield "and 2 or 3 updates."
    yield true(one["attention twice"] > one["Koopman"], "attention applied twice does it better.")
    slower = {
        name: [np.mean(seconds(name, task)) / np.mean(seconds("attention", task)) for task in koopman.TASKS]
        for name in ("Koopman, ridge to 0", "Koopman", "Koopman, 3 updates")
    }
    told = f"takes {slower['Koopman'][0]:.1f} times as long as attention in sequences of {text.context} bytes, and"
    took = [np.mean([line["result"]["seconds"] for line in own]) for own in beside.values()]
    told = f"{told} [about {took[1] / took[0]:.0f} times] in sequences of {presets.SIZE['context']},"
    yield f"{told} and is behind it in the mean."
    rest = [x for name in ("Koopman, ridge to 0", "Koopman") for x in slower[name]]
    third_ = slower["Koopman, 3 updates"]
    yield f"takes {min(rest):.1f} to {max(rest):.1f} times as long as attention, with three updates"
    yield f"with three updates {min(third_):.1f} to {max(third_):.1f} times."
    yield (
        "measured here, the article has no experiment: it does not help on the text or with two layers, with the "
        "settings of this library; with one layer it helps, and attending twice helps more;"
    )
    yield from swept.of_koopman()
    paths = koopman.PATHS[0]
    yield f"medians over {koopman_paths.HEADS * paths.keys} random queries among {paths.keys} random keys and values of"
    yield f"random keys and values of width {paths.width}:"
    yield "What it has not seen it maps to 0, or with"
    yield "**With one transition it is the rank, not the ridge.** The operator has rank 1, and has seen"
    yield "has moved the query almost to 0, and every"
    again = of("koopman", *koopman.trained_paths())
    first = of("koopman", *(path.run for path in koopman.trained_paths()))
    most = max(abs(a["bits"] - b["bits"]) for a, b in zip(again, first, strict=True))
    yield f"they end within {np.ceil(100.0 * most) / 100.0:.2f} bits of those in the table."
    (small, little), (asked, tiny) = of_any(koopman.SMALLER)
    yield "The law Beta(1, 9), the fit"
    yield f"{little.batch} sequences of {small.context} bytes of the text at width {little.width}, or {tiny.batch}"
    told = f"sequences of recall with {WORDS[asked.pairs]} pairs, {asked.keys} keys and {asked.values} values at width"
    yield f"or {tiny.batch} {told} {tiny.width}."
    times = koopman.TIMES[1]
    yield f'for {WORDS[times]} times as many. "Koopman" is the default here, with two updates and a ridge to 0.'
    heads = [f"text: bits, {n * little.steps} steps" for n in koopman.TIMES]
    heads += [f"recall: accuracy, {n * tiny.steps} steps" for n in koopman.TIMES]
    yield "| | " + " | ".join(heads) + " | drawn again for 100 draws |"
    yield "every seed of each is behind every seed of the next, after both."
    yield "the preset has 6.909 and 7.214 bits after 150 steps, behind every seed of two."
    for n in koopman.TIMES:
        few, many = (of("koopman", *smaller(name, n, "text")) for name in ("Koopman", "Koopman, 4 updates"))
        assert min(kinds(few, "bits")) < max(kinds(many, "bits")) and min(kinds(many, "bits")) < max(kinds(few, "bits"))
    yield "Two and four updates with a ridge to 0 are not yet separated"
    last = {
        name: kinds(of("koopman", *smaller(name)), "accuracy") for name in koopman.UPDATES if name not in koopman.ONCE
    }
    early = {name: kinds(of("koopman", *smaller(name, koopman.TIMES[0])), "accuracy") for name in koopman.UPDATES}
    rest_ = [x for name, own in early.items() if name != "attention" and "identity" not in name for x in own]
    apart = [
        min(x for name in many if "Tie" not in name for x in many[name])
        > max(x for name in many if "Tie" in name for x in many[name])
        for many in (early, last)
    ]
    yield true(all(apart), "On recall the preset is last after both, with ranges apart.")
    first_ = min(early["attention"]) > max(rest_) and min(last["attention"]) < max(last["Koopman, 4 updates"])
    told = f"After {tiny.steps} steps attention is ahead of every model with a ridge to 0, with ranges apart; after"
    yield true(first_, f"{told} {times * tiny.steps} it no longer is.")
    frequent = 0.42
    assert sum(x > frequent for x in last["attention"]) == 1
    assert max(x for name, own in last.items() if name != "attention" for x in own) < frequent
    yield f"attention is better than naming the most frequent value with 1 of {seeds} seeds, and no other model"
    yield "The kernel, the jitter of 1e-2 and the window"
    whole = [*koopman.grid(tuple(koopman.MODELS), tuple(koopman.TASKS), koopman.SEEDS)]
    yield f"The {len(whole)} trainings took {sum(x['seconds'] for x in of('koopman', *whole)):.0f} s of CPU time on two"


def smaller(name: str, times: int = koopman.TIMES[1], task: str = "recall") -> list[Any]:
    """Return the trainings of one of the smaller models on a task, the longer ones by default."""
    return [
        run
        for run in koopman.updates_grid()
        if isinstance(run.task, Recall) == (task == "recall")
        and run.plan.steps == times * koopman.SMALLER[task][1].steps
        and (run.mechanism, dict(run.options)) == koopman.UPDATES[name]
    ]


def of_sympformer() -> Iterator[str]:
    own, plan, text = sympformer_runs, sympformer_runs.PLAN, sympformer_runs.TEXT
    yield f"{byte(text)}. Each of three seeds"
    yield f"The models have width {plan.width} and {plan.heads} heads, and no MLP"
    yield f"They are trained for {plan.steps} or {own.LONG} steps of {plan.batch} sequences with AdamW:"
    yield f"with AdamW: {adam(plan)}; decay"
    others = sorted({rate for rates in own.LONGER.values() for rate in rates} - {plan.learning_rate})
    yield f"decay {plan.weight_decay:g}, clipped at {plan.clip:g}. With the first seed the long training is repeated at"
    yield f"at the rates {RATES[others[0]]} and {RATES[others[1]]}."
    yield "All have the same number of parameters, to 2 percent, and call attention four times"
    yield f"whose MLP is {own.WIDE} instead of 4 widths wide."
    yield "with a **damping of 0.3/t** instead of 3/t at the start"
    yield "two matrices instead of four, and an MLP of 5 widths."
    yield f"The first column is what {plan.steps} steps say"
    yield f"All variants after {plan.steps} steps."
    kept = {
        part: {name: kinds([line["result"] for line in lines], "bits") for name, lines in many.items()}
        for part, many in own.by_part(own.RESULTS).items()
    }
    short, slow, long, high = kept.values()
    middle = {name: float(np.mean(x)) for name, x in long.items()}
    plain = "classical"
    four = [name for name in middle if name != plain and "one layer" not in name]
    close = min(middle[name] for name in four) > middle[plain] - 0.01
    yield true(
        close, f"**In a long training no four layers learn more than the classical ones.** After {plan.steps} steps AB2"
    )
    apart = max(max(short[name]) for name in four if "first" in name) < min(short[plain])
    yield true(apart, "bits ahead of the classical block, with ranges apart. After 800 AB2 is level with it")
    yield "and forward Euler is 0.05 behind."
    yield "with which 800 steps lead less far"
    worse = min(high["AB2, first momentum"] + high["forward Euler, first momentum"]) > middle[plain]
    yield true(worse, "but neither is as good there as the classical block at 0.003")
    default = "presymplectic Euler"
    assert min(short[default]) > max(short[plain]) and min(long[default]) < middle[plain] < max(long[default])
    spreads = {name: max(x) - min(x) for name, x in long.items()}
    assert spreads[default] == max(spreads.values())
    yield (
        f"**The default is not worse either.** After {plan.steps} steps every seed of presymplectic Euler is behind "
        f"every seed of the classical block. After {own.LONG} its seeds lie on both sides of it, and farther apart than"
    )
    yield f"were trained only for {plan.steps} steps, so their worth is open."
    yurii = min(short["Yurii"]) < max(short[plain]) and min(short[plain]) < max(short["Yurii"])
    yield true(
        yurii,
        f"**Yurii's block cannot be told from the classical one**, after {plan.steps} steps or, with its one seed, "
        f"after {own.LONG}.",
    )
    strang, single = "Strang, one layer", "classical, one layer"
    every = all(np.mean(part[strang]) < np.mean(part[plain]) for part in kept.values())
    yield true(every, "**Four calls in one layer keep their lead.** Strang's splitting is 0.44 bits ahead of four")
    yield true(
        every, f"after {plan.steps} steps and 0.26 after {own.LONG}, and ahead at every rate; at 0.01 it is better"
    )
    yield true(
        middle[plain] - middle[single] < spreads[single],
        f"0.17 ahead of four layers after {plan.steps} steps, is 0.03 ahead after {own.LONG}, less than its seeds",
    )
    yield f"and {own.LONG} steps of {plan.batch * text.context} tokens are still a short training"
    paper = own.PAPER
    published = (
        f"The published setting, {paper.steps:,} steps of {paper.batch} sequences of 128 tokens from a vocabulary of"
    )
    yield f"{published} 50,304, is a preset"
    yield f"so {paper.steps:,} take {round(29 * paper.steps / 3600, -1):.0f} hours"
    yield f"Rates other than {RATES[plan.learning_rate]} have one seed."
    count, seconds = cost("sympformer")
    lengths = [line["run"]["plan"]["steps"] for line in read(own.RESULTS)]
    brief = [x for x, n in zip(seconds, lengths, strict=True) if n == plan.steps]
    lengthy = [x for x, n in zip(seconds, lengths, strict=True) if n == own.LONG]
    yield f"The {count} trainings took {sum(seconds):,.0f} s of CPU time,"
    yield f"s of CPU time, {min(brief):.0f} to {max(brief):.0f} s each short one"
    yield f"short one and {min(lengthy):.0f} to {max(lengthy):.0f} s each long one"
    yield true(every, "four calls in one layer in place of four layers of one, is ahead at every rate: after 800 steps")
    early = [name for name in four if "first" in name and "Euler, first" not in name or name.startswith("forward")]
    assert all(np.mean(short[name]) < np.mean(short[plain]) for name in early)
    yield "With one call AB2 and forward Euler are ahead after 200 steps and no longer then, and the default is not;"


def of_presets() -> Iterator[str]:
    lines = presets.by_setting(presets.RESULTS)
    steps_, same = (
        {name: kinds([x["result"] for x in own[kind]], "bits") for name, own in lines.items() if kind in own}
        for kind in ("steps", "operations")
    )
    plain = min(steps_["softmax"])
    ahead = max(x for name in ("Y", "H0", "H1", "R2") for x in steps_[name]) < plain
    yield true(
        ahead,
        "**Yurii's and the Hamiltonian blocks are ahead of softmax attention at equal steps**, every seed of each "
        "ahead of every seed of it",
    )
    sizes = {name: own["operations"][0]["result"]["parameters"] for name, own in lines.items()}
    yield f"They have {100 * (sizes['Y'] / sizes['softmax'] - 1):.0f} % more parameters, most of them"
    yield true(
        np.mean(same["R2"]) > np.mean(same["softmax"]), "whose steps take half as much again, are not, R2 is behind."
    )
    yield true(
        max(steps_["SympFormer"] + steps_["presymplectic Euler"]) < plain, "and both are ahead of softmax attention."
    )
    grown = min(steps_["Burgund"] + steps_["growing"]) > np.mean(steps_["softmax"])
    late = min(same["Burgund"] + same["growing"]) > max(same["softmax"])
    yield true(grown and late, "nothing is gained, and at equal operations both are behind it.")
    yield true(np.mean(steps_["graph energy"]) > np.mean(steps_["softmax"]), "bits, behind softmax attention.")
    preset, most = ra.mechanism("graph_energy").presets["preetham2023"], 1 + 2 * (presets.SIZE["context"] - 1)
    assert 2.0 / most < preset["block"]["step"]
    yield f"Its step of {preset['block']['step']:g} is not safe for any links,"
    yield f"which at {presets.SIZE['context']} tokens takes 2 / {most} = {2.0 / most:.3f}, so its energy"
    yield f"grad E is above {preset['gamma'] / presets.SIZE['learning_rate']:.1f}; whether it was, is not stored."
    yield f"With other sizes the default lies within the seeds of softmax after {graph_energy.PLAN.steps} steps"
    yield true(
        np.mean(steps_["Koopman"]) > np.mean(steps_["softmax"]), "**Koopman**: the default is not ahead at equal steps"
    )
    yield true(all(x < y for x, y in zip(steps_["Y"], steps_["B"], strict=True)), "Y is 0.238 bits ahead of B.")


AUTHORS = "the authors', held by tests/experiments/test_sympformer.py"
RATED = "the authors', held by tests/experiments/test_pages.py"
PAPER = "the authors', which no file of this project has"
README = "the author's, README.rst of jmercat/fast-transformers at 76cc12f"
ONCE = "measured once, and not stored"

ORDER, PLACE = "says which end of a scale is good", "no verdict"

BESIDE: dict[str, dict[str, str]] = {
    "delta": {"do not show the mechanism at its best.": "what was not tested"},
    "graph_energy": {
        "The article behind it announces": PLACE,
        "Bits per byte; less is better.": ORDER,
        "does the language model cost and gain?": "a question",
        "1 if they agree.": "a definition",
        "With normal frequencies of standard deviation 1,": "refattn.analysis.order",
        "the energy is convex for scores between 0 and 1,": "docs/mechanisms/graph_energy.md",
        "From 200 random starts, R at rest": "docs.experiments.sweeps.STARTS",
        "Each link has the weight 1,": "refattn.analysis.graphs",
    },
    "higher_order": {
        "Less is better.": ORDER,
        "More is better.": ORDER,
        "They help to find out why odd orders fail; see": PLACE,
        "## Why odd orders fail": "held by the sections below",
        "two layers with eight heads, whose queries have width 16, read 10,000 tokens on a Tesla V100 in 117 ms with "
        "softmax attention, 25 ms with linear attention and 60 ms with this one.": README,
        "by 0.06 to 0.08 bits on text with two seeds.": "docs.experiments.higher_order.FEW",
    },
    "koopman": {
        "# Does the Koopman update help": "a question",
        "For bits less is better, for accuracy more.": ORDER,
        "only that it is on (0, 1] and concentrated at 0.": PAPER,
    },
    "sympformer": {
        "the Lie-Trotter block, which looks ahead.": PLACE,
        "Bits per held-out byte; less is better.": ORDER,
        "behind the mechanism show when a momentum helps without": PLACE,
        "version 4 of their manuscript (October 2026)": PAPER,
        "after 100 million tokens, of five seeds": PAPER,
        "The other methods cost 44 to 66 % more than B.": AUTHORS,
        "At width 256, R2 loses all six comparisons.": AUTHORS,
        "reads bytes and not their 50,304 tokens": PAPER,
        "6,103 steps of 128 sequences of 128 tokens": AUTHORS,
        "At the 29 s that one CPU takes for 72 such sequences of a vocabulary of 50,304 tokens": ONCE,
        "the trainings of this page have `scalar_rate=1`": AUTHORS,
        "Y is ahead of B": "held by the page of presets",
        "are 3e-4 in their first program and 6e-4 in the later": RATED,
        "a rate 100 times as large in their first program and 10 times": AUTHORS,
        "took 40 and 29 s of one CPU": ONCE,
        "tokens of 16 bits, the lower byte first": "what TokenFiles reads",
    },
    "growing": {
        "if these gain enough.": PLACE,
        "it tries from step 1000 on. Up to step 1600 it grows once": ONCE,
    },
    "presets": {
        "less is better: mean of three seeds": ORDER,
        "| 10^6 operations a step |": "a unit",
        "with about 2 % fewer operations a step than the table has": "held by tests/experiments/test_presets.py",
    },
}
"""By page: what no setting and no result has, and why."""
