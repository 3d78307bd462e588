"""Tours: a page computes what the definition does, at all settings of its knobs, and says only what is so."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import backends, equations
from refattn.explorer import page as pages
from refattn.explorer.measured import links, nodes
from refattn.explorer.tour import build
from refattn.mechanisms.record import Knob, Mechanism
from refattn.verify.traced import Run, record

MiniRacer: Any = pytest.importorskip("py_mini_racer", reason="mini-racer is not installed").MiniRacer
TOURS = [name for name in ra.list_mechanisms() if build.has_tour(ra.mechanism(name))]
SIDES = ("forward", "backward")

Ask = Callable[[str], Any]


@contextmanager
def engine(mechanism: Mechanism, data: str) -> Iterator[Ask]:
    """Run the formulas of a page in an engine without a browser; `of` is what they are asked."""
    javascript = MiniRacer()
    try:
        javascript.eval(build.script(mechanism) + f"let of = new Numbers({data}, write);")
        yield lambda question: json.loads(str(javascript.eval(f"JSON.stringify({question} ?? null)")))
    finally:
        javascript.close()


@pytest.fixture(params=TOURS)
def tour(request: pytest.FixtureRequest) -> Iterator[tuple[Mechanism, Ask]]:
    mechanism = ra.mechanism(request.param)
    with engine(mechanism, build.data(mechanism)) as ask:
        yield mechanism, ask


def settings(mechanism: Mechanism, count: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield where the knobs may stand, and which token is followed: the defaults, then at random."""
    assert mechanism.tour is not None
    knobs, random, n = mechanism.tour.knobs, np.random.default_rng(7), len(sentence(mechanism).tokens)
    yield {knob.name: knob.value for knob in knobs}, sentence(mechanism).follow
    for _ in range(count):
        yield {knob.name: anywhere(knob, random) for knob in knobs}, int(random.integers(n))


def sentence(mechanism: Mechanism) -> build.Words:
    assert mechanism.tour is not None
    return build.sentence(mechanism.tour)


def anywhere(knob: Knob, random: np.random.Generator) -> float | bool:
    if isinstance(knob.value, bool):
        return bool(random.integers(2))
    if isinstance(knob.value, int):
        return int(random.integers(int(knob.low), int(knob.high) + 1))
    return float(random.uniform(knob.low, knob.high))


def compare(mechanism: Mechanism, ask: Ask, count: int) -> None:
    for knobs, follow in settings(mechanism, count):
        values = build.values(mechanism, sentence(mechanism), knobs, follow)
        python = json.dumps({id: build._plain(x) for id, x in values.items()})
        found = ask(f"(of.set({json.dumps(knobs)}, {follow}), of.compare({python}))")
        assert found["worst"] is not None and found["worst"] < 1e-9, (knobs, follow, found["where"], found["worst"])
        shown = {id.partition("[")[0] for id in found["ids"]}
        assert found["numbers"] > 100 and any(id.startswith("d") for id in shown)


def test_a_page_computes_what_the_definition_does(tour: tuple[Mechanism, Ask]) -> None:
    compare(*tour, 3)


@pytest.mark.slow
def test_at_all_settings_of_the_knobs_a_page_computes_what_the_definition_does(tour: tuple[Mechanism, Ask]) -> None:
    compare(*tour, 20)


def test_an_equation_that_errs_is_noticed() -> None:
    mechanism = ra.mechanism("softmax")
    text = build.script(mechanism)
    assert "div(u(i, j)" in text
    data = json.loads(build.data(mechanism))
    data["python"]["SM.4"][7] += 1e-6
    with engine(mechanism, json.dumps(data)) as ask:
        assert ask("of.compare(of.data.python)")["where"] == "w (SM.4)"


def test_the_energy_is_compared_with_that_of_the_general_code() -> None:
    mechanism = ra.mechanism("graph_energy")
    data = json.loads(build.data(mechanism))
    data["python"]["energy[3]"][0] += 1e-6
    with engine(mechanism, json.dumps(data)) as ask:
        found = ask("of.compare(of.data.python)")
        assert found["where"] == "E (energy[3])" and {"energy", "energy[20]"} <= set(found["ids"])


def test_percents_add_up() -> None:
    with engine(ra.mechanism("softmax"), build.data(ra.mechanism("softmax"))) as ask:
        for shares in ([1 / 3] * 3, [0.005, 0.995], [0.604, 0.217, 0.179, 0, 0], [1], [0.485, 0.105, 0.215, 0.195]):
            percents = [int(x.removesuffix(" %")) for x in ask(f"percents({shares})")]
            assert sum(percents) == 100 and all(abs(x - 100 * y) < 1 for x, y in zip(percents, shares, strict=True))


def test_cards_show_what_the_definition_has(tour: tuple[Mechanism, Ask]) -> None:
    mechanism, ask = tour
    equations, quantities = ask("Object.keys(of.data.equations)"), ask("Object.keys(of.mechanism.quantities)")
    for side in SIDES:
        cards = ask(f"of.mechanism.{side}.map(({{ id, of: from, title, show }}) => ({{ id, from, title, show }}))")
        formulas = f"of.mechanism.{side}.flatMap((card) => [card.formula, card.also?.formula]).filter(Boolean)"
        assert {*ask(formulas)} <= {*ask("Object.keys(of.data.formulas)")}
        assert len(cards) >= 2 and len({card["title"] for card in cards}) == len(cards)
        for card in cards:
            ids = [card["id"]] if isinstance(card.get("id"), str) else card.get("id") or []
            from_ = card.get("from") or []
            for id in [*ids, *([from_] if isinstance(from_, str) else from_)]:
                assert id in equations, (card["title"], id)
            assert side == "forward" or card.get("from"), card["title"]
            for entry in [entry for entries in card["show"] for entry in entries]:
                name = re.fullmatch(r"(\w+'?)(\[i\]|\[,i\]|\[ii\])?(\+1|\.first|\.last)?", entry)
                assert name and name[1] in quantities, (card["title"], entry)
    words = " ".join(ask("[of.mechanism.intro].flat().map((x) => (typeof x === 'function' ? x() : x)).flat()"))
    assert len(words.split()) <= 110


SAID = """(() => {
  const { mechanism, state } = of, said = (x) => (typeof x === "function" ? x() : x), all = [];
  for (const side of ["forward", "backward"]) {
    state.side = side;
    for (const t of [0, Math.floor(of.steps / 2), of.steps]) {
      Object.assign(state, { t, at: t, view: "" });
      all.push(["caption", mechanism.caption()], ["label", said(mechanism.label)]);
      all.push(["intro", said(mechanism.intro).join(" ")]);
      for (const W of [300, 362, 568]) all.push(["picture", of.drawing(undefined, W, mechanism.height(W), W === 300)]);
      for (const card of mechanism[side]) {
        state.view = card.view ?? "";
        for (const W of card.view || card.picture || card.draw ? [362, 568] : [])
          all.push([card.title, of.drawing(card, W, mechanism.height(W))]);
        if (card.caption) all.push(["caption", said(card.caption)]);
        if (card.alt) all.push(["label", said(card.alt)]);
        all.push([card.title, said(card.say)]);
        const ref = card.pick && card.pick();
        if (ref) all.push([card.title, spelled(of, ref[0], ref.slice(1))]);
      }
    }
  }
  return all;
})()"""


@pytest.mark.parametrize("count", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_what_a_page_says_holds_at_all_settings(tour: tuple[Mechanism, Ask], count: int) -> None:
    mechanism, ask = tour
    for knobs, follow in settings(mechanism, count):
        for what, text in ask(f"(of.set({json.dumps(knobs)}, {follow}), {SAID})"):
            found = re.search("undefined|NaN|\\[object|null|Infinity", text)
            assert text and found is None, (
                knobs,
                follow,
                what,
                text[max(0, found.start() - 80) :][:120] if found else "",
            )
            if what == "caption":
                assert len(re.sub("<[^>]*>", "", text)) <= 175, text


def test_a_picture_has_the_names_of_all_tokens_on_a_phone_too(tour: tuple[Mechanism, Ask]) -> None:
    mechanism, ask = tour
    for wide, high in ((362, 112), (362, 225), (568, 360)):
        ask("(of.state.t = of.state.at = of.steps)")
        of_cards = (
            "[undefined, ...of.mechanism.forward, ...of.mechanism.backward]"
            ".filter((card) => card?.picture ?? card?.draw ?? !card)"
        )
        for picture in ask(f"{of_cards}.map((card) => of.drawing(card, {wide}, {high}))"):
            names = {name.partition("<")[0] for name in re.findall(r"<text[^>]*>([^<]*)", picture)}
            names = {name.partition(",")[0].strip() for name in names}
            assert {*sentence(mechanism).tokens} <= names, (wide, high, names)


@pytest.mark.parametrize("name", TOURS)
def test_no_two_cards_of_a_side_draw_the_same(name: str) -> None:
    """Nor do the marks of a card share a key; words and links in the picture do not count."""
    drawn = """(side, W) => of.mechanism[side].map((card) => {
      const { time } = of.mechanism, when = { first: 0, step: Math.min(time?.first?.() ?? 1, of.steps - 1) }[card.when];
      const t = when ?? of.steps;
      Object.assign(of.state, { side, view: card.view ?? "", t, at: t });
      const marks = of.marks(card, W, of.mechanism.height(W)), shapes = marks.filter(({ tag }) => tag !== "text");
      const keys = marks.filter(({ key }) => key).map(({ key, tag }) => `${tag} ${key}`);
      const picture = written(shapes).replace(/<text.*?<.text>/g, "").replace(/ (data|aria)-[a-z-]*="[^"]*"/g, "");
      return [card.title, picture, keys.length, keys.filter((key, n) => keys.indexOf(key) !== n)];
    })"""
    with engine(ra.mechanism(name), build.data(ra.mechanism(name))) as ask:
        same = []
        for side in SIDES:
            for wide in (362, 780):
                cards = ask(f"({drawn})({json.dumps(side)}, {wide})")
                assert all(not twice for *_, twice in cards), cards
                titles = {picture: title for title, picture, *_ in cards}
                same += [title for title, picture, *_ in cards if titles[picture] != title]
                same += [title for title, _, keyed, _ in cards if not keyed]
        assert not same


def test_a_picture_moves_to_that_of_the_next_card() -> None:
    with engine(ra.mechanism("softmax"), build.data(ra.mechanism("softmax"))) as ask:
        ask("(globalThis.at = (n) => of.marks(of.mechanism.forward[n], 780, 400), 0)")
        half = {one["key"]: one["set"] for one in ask("halfway(at(0), at(4), 0.5)") if not isinstance(one, str)}
        ends = [{one["key"]: one["set"] for one in ask(f"at({n})") if not isinstance(one, str)} for n in (0, 4)]
        for name in ("cx", "cy", "r"):
            assert half["dot.2"][name] == pytest.approx((ends[0]["dot.2"][name] + ends[1]["dot.2"][name]) / 2)
        assert half["key.2"]["opacity"] == 0.5 and half["tie.2"]["opacity"] == 0.25  # one goes, one comes
        assert ask("blend('M0 10L4 2', 'M2 0L4 -2', 0.5, 'd')") == "M1 5L4 0"
        assert ask("blend('M0 0L4 2', 'M2 2L4 -2L1 1', 0.5, 'd')") == "M2 2L4 -2L1 1"
        assert ask("blend('stroke:var(--c1)', 'stroke:var(--c3)', 0.5, 'style')") == "stroke:var(--c3)"


@pytest.mark.parametrize("name", TOURS)
def test_what_a_reader_may_try_is_not_done_yet_and_can_be(name: str) -> None:
    mechanism = ra.mechanism(name)
    with engine(mechanism, build.data(mechanism)) as ask:
        done = "(of.mechanism.tasks ?? []).map((task) => task.done())"
        assert not any(ask(done))
        ever = set()
        for knobs, follow in settings(mechanism, 60):
            ever |= {n for n, x in enumerate(ask(f"(of.set({json.dumps(knobs)}, {follow}), {done})")) if x}
        drags = ask("(of.mechanism.tasks ?? []).flatMap((task, n) => (task.say.includes('drag') ? [n] : []))")
        assert ever | {*drags} == {*range(len(ask(done)))}


def test_a_point_is_dragged_to_where_it_is_let_go() -> None:
    with engine(ra.mechanism("softmax"), build.data(ra.mechanism("softmax"))) as ask:
        ask("(globalThis.card = of.mechanism.forward[0], globalThis.dots = () => of.marks(card, 780, 400), 0)")
        place = "(({ set }) => [set.cx, set.cy])(dots().find(({ key }) => key === 'dot.2'))"
        x, y = ask(place)
        ask(f"(dots().find(({{ key, drag }}) => key === 'dot.2' && drag).drag({x + 60}, {y - 40}), of.set({{}}), 0)")
        assert ask(place) == pytest.approx([x + 60, y - 40], abs=5)  # to one decimal


def test_the_picture_of_growing_follows_the_card() -> None:
    with engine(ra.mechanism("growing"), build.data(ra.mechanism("growing"))) as ask:
        for wide in (362, 568):
            drawn: dict[str, list[str]] = {}
            for side in SIDES:
                draw = f"of.drawing(card, {wide}, of.mechanism.height({wide}))"
                cards = f"of.mechanism.{side}.map((card) => [card.title, {draw}])"
                drawn |= {title: re.findall(r'data-ref="(\w+)', picture) for title, picture in ask(cards)}
            for title, number in (("One kernel", "M"), ("What is out of reach", "H"), ("How many columns", "part")):
                assert [title for title, numbers in drawn.items() if number in numbers][0] == title
            assert "part" not in drawn["One kernel"] and {"wqn", "wkn"} <= {*drawn["Back to two matrices"]}


def test_the_picture_of_graph_energy_has_up_for_a_score_that_should_be_higher() -> None:
    with engine(ra.mechanism("graph_energy"), build.data(ra.mechanism("graph_energy"))) as ask:
        last = ask("of.steps")
        for t in (0, last // 2, last):
            ask(f"(Object.assign(of.state, {{ side: 'backward', t: {t}, at: {t} }}), 0)")
            slopes, names = ask(f"of.data.tokens.map((_, j) => of.values.dx({t}, j))"), ask("of.data.tokens")
            drawn = re.findall(r'cy="([^"]*)" r="4.5"', ask("of.drawing(undefined, 568, 352)"))
            heights = [-float(y) for y in drawn[: len(slopes)]]
            assert np.argmin(slopes) == np.argmax(heights) and np.argmax(slopes) == np.argmin(heights)
            caption = ask("of.mechanism.caption()")
            higher, lower = caption.split("should be higher")
            assert f"at step {t} " in caption
            assert names[np.argmin(slopes)] in higher and names[np.argmax(slopes)] in lower


def test_the_picture_of_koopman_has_a_cross_for_each_move_that_the_caption_tells_of() -> None:
    with engine(ra.mechanism("koopman"), build.data(ra.mechanism("koopman"))) as ask:
        ask("(globalThis.back = of.mechanism.forward.find((card) => card.id === 'KOOP.12'), 0)")
        drawn = "(CARD, 568, 398).flatMap(({ key }) => (/^(hit|field)/.test(key) ? [key] : []))"
        for t in (0, 1, 4):
            ask(f"(of.state.t = of.state.at = {t}, 0)")
            for card, caption, moves in (
                ("undefined", "of.mechanism.caption()", min(t, 3)),
                ("back", "back.caption()", 3 if t == 4 else 1),
            ):
                keys = ask(f"of.marks{drawn.replace('CARD', card)}")
                assert keys == (["field", *(f"hit.{n}" for n in range(moves))] if moves else [])
                assert ("ross" in ask(caption)) == (t > 0)
        ask("(Object.assign(of.state, { side: 'backward', t: 0, at: 0 }), 0)")
        query = ask("of.mechanism.backward.find((card) => card.id === 'dKOOP.q').caption()")
        assert "The gradient of x₀, the query" in query


def test_updates_of_koopman_are_counted_as_the_slider_counts_them() -> None:
    with engine(ra.mechanism("koopman"), build.data(ra.mechanism("koopman"))) as ask:
        ask("(of.state.t = of.state.at = of.steps)")
        assert "Update 4" in ask("of.mechanism.caption()")
        for name, at, number in (("w", [3, 0], 4), ("next", [3, 0], 4), ("x", [3, 0], 3), ("dnext", [0, 0], 1)):
            head = ask(f"spelled(of, {json.dumps(name)}, {at})").partition("=")[0]
            assert f"<mn>{number}</mn>" in ask(f"symbol(of, {json.dumps(name)}, {at})"), (name, head)


def test_a_long_fraction_and_a_wide_product_can_be_broken() -> None:
    with engine(ra.mechanism("koopman"), build.data(ra.mechanism("koopman"))) as ask:
        assert ask("spelled(of, 'dq', [0])").count("<math") > 10
    with engine(ra.mechanism("graph_energy"), build.data(ra.mechanism("graph_energy"))) as ask:
        terms = re.findall(r'<span class="term">(.*?)</span>', ask("spelled(of, 'dx', [3, 0])"))
        assert len(terms) == 4 and all(term.count("<math") == 3 for term in terms)


READS = """(() => {
  const { quantities } = of.mechanism;
  const flat = (name, at) => at.reduce((n, i, axis) => n * of.length(quantities[name].axes[axis]) + i, 0);
  const place = (name, at) => { // of a number: its equation with the pass, and which of its elements it is
    const { id, axes, back, passes } = quantities[name], nested = (n, i, axis) => n * of.length(axes[axis + 1]) + i;
    if (!id) return "qkv".includes(name) ? [name, flat(name, at)] : null;
    if (!/^[tT]/.test(axes)) return [id, flat(name, at)];
    const pass = (back ? of.length(axes[0]) - 1 - at[0] : at[0]) - (passes ?? 0);
    const rest = at.slice(1).reduce(nested, 0);
    return pass < 0 ? null : [pass ? `${id}[${pass}]` : id, rest];
  };
  const through = (ref) => {
    const [name, ...index] = ref.split("."), at = index.map(Number), own = place(name, at);
    const formula = of.formula(name, at);
    return own ? [own] : formula === undefined ? [] : of.reads(formula).flatMap(through);
  };
  const all = {};
  for (const [name, { axes, id }] of Object.entries(quantities)) if (id) {
    const longer = (at, letter) => Array.from({ length: of.length(letter) }, (_, n) => [...at, n]);
    const every = [...axes].reduce((list, letter) => list.flatMap((at) => longer(at, letter)), [[]]);
    for (const at of every) {
      const own = place(name, at);
      if (own) (all[own[0]] ??= {})[own[1]] = of.reads(of.formula(name, at)).flatMap(through).map((x) => x.join(" "));
    }
  }
  return all;
})()"""


@pytest.mark.parametrize("name", ["softmax", "graph_energy"])
def test_a_formula_reads_all_that_its_number_is_made_of(name: str) -> None:
    """What an equation is seen to read, while one element after another is disturbed, stands in its formula."""
    mechanism = ra.mechanism(name)
    words = sentence(mechanism)
    knobs = {"steps": 3} if name == "graph_energy" else {}
    options = {key: x for key, x in knobs.items()}
    d_out = np.zeros((1, 1, *words.v.shape))
    d_out[0, 0, words.follow] = (0.3, -0.7)

    def call(arguments: Any, between: Callable[[], None]) -> dict[str, Any]:
        definition = equations.active(mechanism.definition)  # type: ignore[arg-type]
        out, saved = definition.forward(*(arguments[key] for key in "qkv"), **options)
        between()
        return {"out": out, **definition.backward(saved, arguments["d_out"])}

    arguments = {**{key: getattr(words, key)[None, None] for key in "qkv"}, "d_out": d_out}
    run = Run((name, "definition", "", "float64", "numpy"), arguments, options, call)
    found = record(mechanism, run, backends.get("numpy"))
    measured = links(run, found)
    with engine(mechanism, build.data(mechanism, words, knobs)) as ask:
        reads, seen = ask(READS), 0
    values = {node.name: node.value for node in nodes(found)}
    n = len(words.tokens)
    for parent, elements in measured.items():
        for index, children in enumerate(elements):
            if parent.startswith("d") and not values[parent].flat[index]:
                continue  # of a query whose output is not in the loss: a page leaves out what is 0
            if parent == "GE.4" and index // n == index % n:
                continue  # a link to itself cancels, but for the last bits
            for child, places in children.items():
                for place in places:
                    if child in reads and (parent in reads or parent in "qkv"):
                        assert f"{parent} {index}" in reads[child][str(place)], (parent, index, child, place)
                        seen += 1
    assert seen > 300


def luminance(color: str) -> float:
    parts = [int(color[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("dark", [False, True])
def test_colours_have_contrast_and_differ_for_the_colour_blind(dark: bool) -> None:
    css = build.colours().split(":root")[2 if dark else 1]
    found = re.findall(r"--(\w+): (#\w+)", css)
    colors = {key: x if len(x) == 7 else "#" + "".join(2 * c for c in x[1:]) for key, x in found}

    def contrast(a: str, b: str) -> float:
        low, high = sorted((luminance(colors[a]), luminance(colors[b])))
        return (high + 0.05) / (low + 0.05)

    for ground in ("paper", "card", "faint"):
        assert contrast("ink", ground) >= 7.0
        for name in ("soft", "accent", "warn"):
            assert contrast(name, ground) >= 4.5, (name, ground)
        for n in range(5):
            assert contrast(f"c{n}", ground) >= 3.0, (n, ground)
    # Of those who see no red, and no green: G. Machado et al. 2009, table 1, severity 1.
    no_red = [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    no_green = [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    rgb = np.array([[int(colors[f"c{n}"][i : i + 2], 16) for i in (1, 3, 5)] for n in range(5)]) / 255
    for kind in map(np.array, (np.eye(3), no_red, no_green)):
        seen = rgb @ kind.T
        apart = [np.linalg.norm(seen[i] - seen[j]) for i in range(5) for j in range(i)]
        assert min(apart) > 0.12, np.round(apart, 2)


TYPED = {
    5: "Zwei \u00e9l\u00e9phants mangent \u4e2d\u6587 \U0001f600",
    6: "<b>a</b> b & 'c' \"d\" a",
    7: "a river runs past the old bank",
}


@pytest.mark.parametrize("name", TOURS)
def test_a_tour_runs_on_words_that_a_reader_types(name: str) -> None:
    """They have the vectors that Python has for them, and are computed with as the tour's own are."""
    mechanism = ra.mechanism(name)
    tour = mechanism.tour
    assert tour is not None
    if not tour.table:
        with pytest.raises(ValueError, match="words"):
            build.typed(tour, TYPED[5].split())
        return
    least, most = tour.counts
    knobs = {knob.name: knob.value for knob in tour.knobs}
    data = build.data(mechanism)
    for count, text in TYPED.items():
        with engine(mechanism, data) as ask:
            if not least <= count <= most:
                assert re.match(r"This tour takes \w+ words", ask(f"typed(of.data, {json.dumps(text)})"))
                continue
            words = build.typed(tour, text.split())
            assert [*words.tokens] == ask(f"(globalThis.mine = typed(of.data, {json.dumps(text)}), mine.words)")
            for array in tour.table:
                assert (
                    ask(f"mine.{array}")
                    == (words.given[array] if array in words.given else getattr(words, array)).tolist()
                )
            assert not re.search("<b>|\"d|'c", ask("mine.tokens.join(' ')"))
            values = {id: build._plain(x) for id, x in build.values(mechanism, words, knobs).items()}
            found = ask(f"(of = new Numbers(mine, write), of.compare({json.dumps(values)}))")
            assert found["worst"] is not None and found["worst"] < 1e-9, found
            for what, said in ask(SAID):
                assert said and not re.search("undefined|NaN|\\[object|null|Infinity|<b>a", said), (what, said)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("one", "takes five to seven words, with blanks between them: here is one"),
        (" one two  three\tfour ", "here are four"),
        ("a b c d e f g h", "here are 8"),
        ("a b c d antidisestablishmentarianism", "up to 14 letters: “antidis"),
    ],
)
def test_words_that_a_tour_cannot_take_are_refused_with_a_sentence(text: str, why: str) -> None:
    mechanism = ra.mechanism("softmax")
    with engine(mechanism, build.data(mechanism)) as ask:
        assert why in ask(f"typed(of.data, {json.dumps(text)})")


def test_a_word_has_one_vector() -> None:
    first, again, other = (build.word_vector(word, "q", 400, 25) for word in ("bank", "bank", "Bank"))
    assert first == again != other != build.word_vector("Bank", "k", 400, 25)
    assert (min(first), max(first)) == (-2.5, 2.5) and abs(np.mean(first)) < 0.25
    assert build.word_vector("bank", "q", 3, 25) == first[:3]


def test_a_tour_of_ones_own_call_computes_what_the_call_does() -> None:
    q, k, v = np.random.default_rng(5).standard_normal((3, 2, 2, 7, 4))
    tokens = ["to", "be", "<or>", "not", "to", "be", "a very long question"]
    for name, options, knobs in (
        ("softmax", {"causal": True}, {"sharpness": 1.0, "causal": True}),
        ("graph_energy", {"threshold": "hard(tau=0.3)", "mu": 0.5}, {"kappa": 1.0, "tau": 0.3, "mu": 0.5, "steps": 10}),
        ("higher_order", {"order": 3}, {"order": 3}),
        ("delta", {"beta": np.full((2, 2, 7), 0.5), "log_decay": np.zeros((2, 2, 7))}, {"beta": 0.5, "log_decay": 0.0}),
    ):
        mechanism = ra.mechanism(name)
        html = ra.explore(name, q, k, v, tokens=tokens, **options).html
        found = re.search('id="data">(.*?)</script>', html, re.DOTALL)
        assert found is not None and "<or>" not in html
        data = json.loads(found[1])
        assert data["tokens"][2:] == ["&lt;or&gt;", "not", "to", "be", "a very long…"]
        assert knobs.items() <= {knob["name"]: knob["value"] for knob in data["knobs"]}.items()
        out, _ = getattr(ra, name).forward(q, k, v, **options)
        last = list(data["python"])[: next(n for n, id in enumerate(data["python"]) if id.startswith("d"))]
        flat = np.array(data["python"][last[-1]])
        assert name == "delta" or np.allclose(flat, out[0, 0].reshape(-1), atol=1e-12)
        with engine(mechanism, found[1]) as ask:
            assert ask("of.compare(of.data.python)")["worst"] < 1e-9
            for what, text in ask(SAID):
                assert not re.search("undefined|NaN|null", text), (name, what)


def test_a_call_that_no_tour_covers_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "knobs", lambda *run: ())  # which take most of the time
    q, k, v = np.random.default_rng(5).standard_normal((3, 1, 1, 3, 2))
    gates = {"beta": np.linspace(0, 1, 3).reshape(1, 1, 3), "log_decay": np.zeros((1, 1, 3))}
    for name, options, why in (
        ("softmax", {"scale": 0.3}, "the paper has no scale=0.3"),
        ("graph_energy", {"mu": np.array([[1.0, 2.0, 1.0]])}, "the tour has no knob for mu"),
        ("delta", gates, "the tour has no knob for beta"),
        ("growing", {}, ra.mechanism("growing").tour.instead),  # type: ignore[union-attr]
        ("sympformer", {}, ra.mechanism("sympformer").tour.instead),  # type: ignore[union-attr]
    ):
        assert build.taken(ra.mechanism(name), options, (q, k, v)) == why
    assert "no tour: the definition moves tokens" in ra.explore("sympformer", q, k, v).html
    assert "no tour: the definition makes new weights" in ra.explore("growing", q, k, v).html
    for shape, why in (((13, 2), "at most 12"), ((4, 9), "vectors of 1 to 8 numbers")):
        x = np.ones((1, 1, *shape))
        assert why in build.taken(ra.mechanism("softmax"), {}, (x, x, x))
    assert "no tour: the paper has no scale=0.3" in ra.explore("softmax", q, k, v, scale=0.3).html
    with pytest.raises(ValueError, match="tokens: got 2 names, needs 3"):
        ra.explore("softmax", q, k, v, tokens=["a", "b"])
