"""Tours in Chromium: every card is reached by keys, numbers explain themselves, pictures stay, nothing is asked for."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import refattn as ra
from refattn.explorer.tour import build
from tools.chromium import Browser, Tab, browser, path

pytestmark = pytest.mark.slow(sampled=True)

TOURS = [name for name in ra.list_mechanisms() if build.has_tour(ra.mechanism(name))]
if "REFATTN_SLOW_SAMPLE" in os.environ:
    TOURS = ["graph_energy"]

DESK: dict[str, Any] = {"width": 1280, "height": 860}
PHONE: dict[str, Any] = {"width": 390, "height": 844, "touch": True}


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if path() is None:
        pytest.skip("there is no browser: apt-get install chromium")
    with browser(tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, found = tmp_path_factory.mktemp("pages"), {}
    for name in TOURS:
        found[name] = folder / f"{name}.html"
        found[name].write_text(build.page(ra.mechanism(name)), encoding="utf-8")
    return found


def steps(tab: Tab) -> Iterator[int]:
    """Go through all cards with the right arrow key."""
    for n in range(tab.evaluate("page.cards.length")):
        if n:
            tab.key("ArrowRight")
        assert tab.evaluate("page.active") == n
        yield n


@pytest.mark.parametrize("window", [DESK, PHONE], ids=["desk", "phone"])
@pytest.mark.parametrize("name", TOURS)
def test_every_card_is_reached_and_every_number_explains_itself(
    chromium: Browser, pages: dict[str, Path], name: str, window: dict[str, Any]
) -> None:
    assert pages[name].stat().st_size < 250_000
    tab = chromium.open(pages[name].as_uri(), **window, dark=name == "koopman")
    tested = tab.evaluate("page.tested")
    assert tested["worst"] < 1e-9 and tested["numbers"] > 100
    assert "none is more than" in tab.evaluate("document.querySelector('footer').textContent")
    for n in steps(tab):
        seen = tab.evaluate(
            """(() => {
              const { section } = page.cards[page.active], cells = [...section.querySelectorAll("td[data-ref]")];
              const bad = [], pop = document.getElementById("pop");
              for (const cell of cells) {
                page.point(cell);
                const { left, right, top, bottom } = pop.getBoundingClientRect(), told = pop.querySelector("math");
                const shown = page.spelledOut(page.cards[page.active], cell.dataset.ref); // not told twice
                if (pop.hidden !== shown || !told || /undefined|NaN/.test(pop.textContent)) bad.push(cell.dataset.ref);
                const inside = shown || left >= 0 && right <= innerWidth + 1 && top >= 0 && bottom <= innerHeight + 1;
                if (!inside) bad.push(`outside: ${cell.dataset.ref}`);
                page.unpoint(cell);
              }
              return {
                wide: document.documentElement.scrollWidth, inner: innerWidth, cells: cells.length, bad,
                visible: page.cards.filter((card) => !card.section.hidden).length, text: section.textContent,
                where: document.getElementById("where").textContent, hash: location.hash,
                high: document.querySelector("aside").getBoundingClientRect().height / innerHeight,
              };
            })()"""
        )
        assert seen["bad"] == [] and seen["visible"] == 1, seen
        assert seen["wide"] <= seen["inner"], (n, seen["wide"])
        assert "undefined" not in seen["text"] and "NaN" not in seen["text"]
        if window is PHONE:  # the first card has no numbers, and a larger picture
            most = 0.3 if name == "koopman" else 0.25  # a plane with two kinds of points and a path needs more
            assert seen["high"] < (most if n else 0.4), (n, seen["high"])
    assert tab.told == [] and [x for x in tab.requests if not x.startswith(("file:", "data:"))] == []


@pytest.mark.parametrize("name", TOURS)
def test_the_picture_stays_while_all_is_read(chromium: Browser, pages: dict[str, Path], name: str) -> None:
    for window in (DESK, PHONE):
        tab = chromium.open(pages[name].as_uri(), **window)
        tab.click("#all")
        cards = tab.evaluate("page.cards.length")
        assert tab.evaluate("page.cards.filter((card) => !card.section.hidden).length") == cards
        high = tab.evaluate("document.documentElement.scrollHeight")
        assert high > 3 * window["height"]
        for at in range(0, high, 900):
            tab.evaluate(f"scrollTo(0, {at})")
            tab.wait(0.02)
            assert abs(tab.evaluate("document.querySelector('aside').getBoundingClientRect().top")) < 1
        tab.wait(1.1)  # while a page moves by itself, it does not follow
        for place in ("0", "document.documentElement.scrollHeight"):
            tab.evaluate(f"scrollTo(0, {place})")
            tab.wait(0.1)
        assert tab.evaluate("page.active") >= cards - 3
        assert tab.evaluate("page.state.side") == "backward"
        tab.key("Home")
        assert tab.evaluate("page.active") == 0
        tab.click("#all")
        assert tab.evaluate("page.cards.filter((card) => !card.section.hidden).length") == 1
        assert tab.told == []


@pytest.mark.parametrize("name", TOURS)
def test_knobs_compute_and_go_back(chromium: Browser, pages: dict[str, Path], name: str) -> None:
    tab = chromium.open(pages[name].as_uri() + "#start", **DESK)
    picture = "document.getElementById('picture').innerHTML"
    before, changed = tab.evaluate(picture), 0
    for knob in tab.evaluate("page.numbers.data.knobs.map((knob) => knob.name)"):
        if tab.evaluate(f"typeof page.numbers.knobs['{knob}'] === 'boolean'"):
            tab.click(f"[data-knob={knob}]")
            tab.wait(0.05)
        else:
            tab.evaluate(f"document.querySelector('[data-knob={knob}]').focus()")
            for _ in range(4):
                tab.key("ArrowRight")
        assert tab.evaluate("page.active") == 0  # the keys are the knob's
        changed += tab.evaluate(picture) != before
        tab.click("#knobs button")
        tab.wait(0.05)  # a click gives the keys back to the tour
        assert tab.evaluate(picture) == before, knob
    assert changed == len(tab.evaluate("page.numbers.data.knobs"))
    assert tab.told == []


def test_hover_tap_pin_and_walk(chromium: Browser, pages: dict[str, Path]) -> None:
    address = pages["graph_energy"].as_uri()
    tab = chromium.open(f"{address}#GE.7", **DESK)
    assert tab.evaluate("page.cards[page.active].ids") == ["GE.7"]
    cell = "#cards .active td[data-ref^='c.1.']"
    tab.hover(cell)
    assert not tab.evaluate("document.getElementById('pop').hidden")
    assert "pull of the neighbours" in tab.evaluate("document.getElementById('pop').textContent")
    assert tab.evaluate("document.querySelectorAll('.active td.here').length") == 1
    assert tab.evaluate("document.querySelectorAll('.active td.part').length") == 5  # the scores of all words
    assert tab.evaluate("document.querySelectorAll('.active td.fed').length") == 1  # its rate
    tab.click(cell)
    tab.hover("h2")
    assert tab.evaluate("document.getElementById('pop').hidden")
    ref = tab.evaluate(f'document.querySelector("{cell}").dataset.ref')
    assert tab.evaluate(
        f"document.querySelector('.active .numbers [data-ref=\"{ref}\"]') !== null"
    )  # it stays spelled out
    tab.evaluate("document.querySelector('.active td[tabindex=\"0\"]').focus()")
    first = tab.evaluate("document.activeElement.dataset.ref")
    tab.key("ArrowDown")
    assert tab.evaluate("document.activeElement.dataset.ref") == first.replace(".0", ".1")
    assert tab.evaluate("document.activeElement.getAttribute('aria-description')").startswith("start of a score")
    tab.key("ArrowRight")
    assert tab.evaluate("document.activeElement.dataset.ref") == "x.1.1" and tab.evaluate("page.active") == 7
    tab.key("Escape")
    tab.click("#picture [data-word='4']")
    assert tab.evaluate("page.state.i") == 4
    assert tab.evaluate("document.activeElement === document.body")  # a ring of focus is for the keyboard
    tab.evaluate("document.querySelector('#picture [data-word=\"1\"]').focus()")
    tab.key("Enter")
    assert tab.evaluate("page.state.i") == 1 and tab.evaluate("document.activeElement.dataset.word") == "1"
    assert tab.told == []

    phone = chromium.open(f"{address}#GE.9", **PHONE)
    phone.evaluate("document.querySelector('.active td[data-ref=\"y.4\"]').scrollIntoView({ block: 'center' })")
    phone.wait(0.1)
    phone.tap("#cards .active td[data-ref='y.4']")
    phone.wait(0.1)
    assert "score after the cut" in phone.evaluate("document.getElementById('pop').textContent")
    phone.tap("h2")
    phone.wait(0.1)
    assert phone.evaluate("document.getElementById('pop').hidden")
    phone.tap("#turn-knobs")
    phone.wait(0.1)
    assert phone.evaluate("getComputedStyle(document.getElementById('knobs')).display") == "flex"
    assert phone.evaluate("document.getElementById('turn-knobs').getAttribute('aria-expanded')") == "true"
    assert phone.told == []


def drag(tab: Tab, selector: str, by: int = 40) -> None:
    """Drag the thumb of a slider with the mouse."""
    bounds = f"document.querySelector('{selector}')"
    place = "[box.left + 8 + (box.width - 16) * (value - min) / (max - min), box.top + box.height / 2]"
    x, y = tab.evaluate(f"((box, {{ min, max, value }}) => {place})({bounds}.getBoundingClientRect(), {bounds})")
    for kind, at in (("mousePressed", x), ("mouseMoved", x - by), ("mouseReleased", x - by)):
        where = {"x": at, "y": y, "button": "left", "buttons": int(kind != "mouseReleased")}
        tab.call("Input.dispatchMouseEvent", type=kind, clickCount=1, **where)
    tab.wait(0.05)


def test_arrow_keys_are_the_tours_after_a_slider_was_dragged(chromium: Browser, pages: dict[str, Path]) -> None:
    tab = chromium.open(pages["graph_energy"].as_uri(), **DESK)
    for n, selector in enumerate(("[data-knob=tau]", "#scrub")):
        value = f"document.querySelector('{selector}').value"
        before = tab.evaluate(value)
        drag(tab, selector)
        after = tab.evaluate(value)
        assert float(after) < float(before)
        tab.key("ArrowRight")
        assert (tab.evaluate("page.active"), tab.evaluate(value)) == (n + 1, after), selector
    if "softmax" in pages:
        boxed = chromium.open(pages["softmax"].as_uri(), **DESK)
        boxed.click("[data-knob=causal]")
        boxed.key("ArrowRight")
        assert boxed.evaluate("[page.active, page.numbers.knobs.causal]") == [1, True]
    tab.evaluate("document.querySelector('[data-knob=tau]').focus()")  # as with the tabulator: the keys are the knob's
    tab.key("ArrowRight")
    assert tab.evaluate("page.active") == 2
    assert tab.told == []


@pytest.mark.parametrize("name", TOURS)
def test_a_step_has_one_number_on_the_whole_page(chromium: Browser, pages: dict[str, Path], name: str) -> None:
    tab = chromium.open(pages[name].as_uri(), **DESK)
    if not (last := tab.evaluate("page.numbers.steps")):
        return
    counted = pictures = 0
    for _ in steps(tab):
        for at in (0.0, 1.7, last - 0.2, last):
            tab.evaluate(f"page.goTo({at})")
            now, text, picture = tab.evaluate(
                "[document.getElementById('now').textContent, document.querySelector('.active .moment')?.textContent,"
                " [...document.querySelectorAll('#picture text')].map((text) => text.textContent).join(' ')]"
            )
            word, number = now.split()[:2]
            if text:
                low, high = sorted(map(int, re.findall(rf"{word} (\d+)", text)))
                assert high == low + 1 and int(number) in (low, high), (now, text)
                counted += 1
            named = re.findall(r"(?:at|now|the) step,? (\d+)", picture) if name == "graph_energy" else []
            assert {*named} <= {number}, (now, picture)
            pictures += len(named)
    assert counted > 3 or not tab.evaluate("page.cards.some((card) => page.steppedBy(card))")
    assert name != "graph_energy" or pictures > 20


def test_before_there_is_a_fit_a_card_shows_no_numbers_of_it(chromium: Browser, pages: dict[str, Path]) -> None:
    if "koopman" not in pages:
        pytest.skip("the tour of Koopman attention is not in the sample")
    tab = chromium.open(pages["koopman"].as_uri() + "#KOOP.9", **DESK)
    text, cells = "document.querySelector('.active').textContent", "document.querySelectorAll('.active td').length"
    assert tab.evaluate(cells) > 10 and "None yet" not in tab.evaluate(text)
    tab.evaluate("page.goTo(0)")
    assert tab.evaluate(cells) == 0 and "None yet" in tab.evaluate(text)
    assert tab.told == []


SMALL: dict[str, Any] = {"width": 1280, "height": 800}


@pytest.mark.parametrize("window", [SMALL, PHONE], ids=["desk", "phone"])
@pytest.mark.parametrize("name", TOURS)
def test_nothing_is_cut_and_nothing_lies_under_the_bar(
    chromium: Browser, pages: dict[str, Path], name: str, window: dict[str, Any]
) -> None:
    """What is wider than its place can be scrolled and fades; all else is above the bar, which ends the page."""
    tab = chromium.open(pages[name].as_uri(), **window)
    for folded in (True, False):
        for n in steps(tab):
            if not folded and n == 1:
                tab.evaluate("document.querySelector('.active summary')?.click()")
                tab.wait(0.05)
            seen = tab.evaluate(
                """(() => {
                  const cut = [], under = [], open = document.querySelectorAll(".active details[open]").length;
                  for (const box of document.querySelectorAll("main *, nav *, aside *")) {
                    if (!(box instanceof HTMLElement) || !box.offsetParent || box.matches("caption, input")) continue;
                    const scrolls = getComputedStyle(box).overflowX === "auto" && box.classList.contains("more");
                    const wide = box.clientWidth && box.scrollWidth > box.clientWidth + 1;
                    if (wide && !scrolls && getComputedStyle(box).overflowX !== "visible") cut.push(box.outerHTML);
                    const { right } = box.getBoundingClientRect();
                    if (right > innerWidth + 1 && !box.closest(".more")) cut.push(box.outerHTML);
                  }
                  const bar = document.querySelector("nav").getBoundingClientRect();
                  const low = [...document.querySelectorAll("#knobs > *, #caption, #controls > *")];
                  scrollTo(0, 1e6);
                  low.push(...document.querySelectorAll(".active td, .active math, .active p, footer"));
                  for (const each of low) {
                    const { bottom, height } = each.getBoundingClientRect();
                    if (height && bottom > bar.top) under.push(each.outerHTML);
                  }
                  scrollTo(0, 0);
                  return { cut, under, open, bar: [bar.left, innerWidth - bar.right, innerHeight - bar.bottom] };
                })()"""
            )
            assert seen["cut"] == [] and seen["under"] == [] and seen["bar"] == [0, 0, 0], (n, seen)
            assert (
                folded
                or n == 0
                or seen["open"]
                or not tab.evaluate("document.querySelectorAll('.active details').length")
            )
        tab.key("Home")
    assert tab.told == []


def test_time_is_scrubbed_and_played(chromium: Browser, pages: dict[str, Path]) -> None:
    address = pages["graph_energy"].as_uri()
    tab = chromium.open(f"{address}#GE.8", **DESK)
    last = tab.evaluate("page.numbers.steps")
    assert tab.evaluate("page.state.t") == 1  # a step, since the card is of one
    tab.evaluate("document.getElementById('scrub').focus()")
    tab.key("ArrowRight")
    assert tab.evaluate("page.state.t") == 2 and "from step 2 to step 3" in tab.evaluate(
        "document.querySelector('.active').textContent"
    )
    tab.evaluate("document.activeElement.blur()")
    box = tab.evaluate(
        "(({ left, top }) => [left, top])(document.querySelector('#picture svg').getBoundingClientRect())"
    )
    for kind, x in (("mousePressed", 120), ("mouseMoved", 180), ("mouseReleased", 180)):
        where = {"x": box[0] + x, "y": box[1] + 120, "button": "left", "buttons": int(kind != "mouseReleased")}
        tab.call("Input.dispatchMouseEvent", type=kind, clickCount=1, **where)
    assert 8 < tab.evaluate("page.state.t") < last
    tab.click("#play")
    tab.wait(0.5)
    tab.click("#play")
    assert tab.evaluate("page.playing") == 0
    tab.key("End")  # backwards: the gradient plays from the last step to the first
    tab.click("#play")
    tab.wait(0.6)
    assert tab.evaluate("page.state.at") < last
    assert tab.told == []


def test_motion_is_only_for_those_who_want_it(chromium: Browser, pages: dict[str, Path]) -> None:
    address = pages["graph_energy"].as_uri()
    assert chromium.open(address, **DESK, still=True).evaluate("page.playing") == 0
    moving = chromium.open(address, **DESK, still=False)
    assert moving.evaluate("page.playing") != 0
    moving.key("ArrowRight")  # what a card shows does not depend on when one comes to it
    assert moving.evaluate("[page.playing, page.state.at, page.state.t]") == [0, 20, 20]


def test_pictures_move_from_card_to_card_for_those_who_want_it(chromium: Browser, pages: dict[str, Path]) -> None:
    if "softmax" not in pages:
        pytest.skip("the tour of softmax attention is not in the sample")
    drawn, address = "document.querySelector('#picture svg').innerHTML", pages["softmax"].as_uri() + "#SM.1"
    after = "(page.activate(2), [page.stage.moving !== 0, document.querySelector('#picture svg').innerHTML])"
    still, moving = (chromium.open(address, **DESK, still=still) for still in (True, False))
    assert still.evaluate(after) == [False, end := still.evaluate(drawn)]
    begun, picture = moving.evaluate(after)
    assert begun and picture != end
    moving.wait(0.6)
    assert moving.evaluate("page.stage.moving") == 0 and moving.evaluate(drawn) == end
    assert still.told == [] and moving.told == []


def test_points_are_dragged_and_tasks_noticed(chromium: Browser, pages: dict[str, Path]) -> None:
    if "softmax" not in pages:
        pytest.skip("the tour of softmax attention is not in the sample")
    tab = chromium.open(pages["softmax"].as_uri() + "#SM.1", **DESK)
    x, y = tab.centre("[data-drag='dot.1']")
    for kind, at in (("mousePressed", x), ("mouseMoved", x - 30), ("mouseReleased", x - 30)):
        buttons = int(kind != "mouseReleased")
        where = {"x": at, "y": y, "button": "left", "buttons": buttons}
        tab.call("Input.dispatchMouseEvent", type=kind, clickCount=1, **where)
    key = "page.numbers.data.k[1]"
    assert tab.centre("[data-drag='dot.1']") == pytest.approx((x - 30, y), abs=5)
    before = tab.evaluate(key)
    tab.evaluate("document.querySelector('[data-drag=\"dot.1\"]').focus()")
    tab.key("ArrowUp")
    assert tab.evaluate(key)[1] > before[1] and tab.evaluate("page.active") == 1
    tab.click("#knobs button")
    assert tab.evaluate(key) == [0.1, 2.0]
    assert tab.evaluate("document.querySelectorAll('#tasks .done').length") == 0
    tab.evaluate("page.update({ sharpness: 5 })")
    assert tab.evaluate("document.querySelectorAll('#tasks .done').length") == 1
    assert tab.told == []


def enter(tab: Tab, text: str) -> None:
    """Type a text into the field for words in place of what it has, and press the enter key."""
    tab.evaluate("document.querySelector('#own-words input').select()")
    tab.call("Input.insertText", text=text)
    tab.call("Input.dispatchKeyEvent", type="keyDown", key="Enter", text="\r", windowsVirtualKeyCode=13)
    tab.wait(0.05)


@pytest.mark.parametrize("window", [DESK, PHONE], ids=["desk", "phone"])
@pytest.mark.parametrize("name", [name for name in TOURS if name != "delta"])  # whose tokens are notes
def test_words_of_ones_own_are_typed_and_taken_back(
    chromium: Browser, pages: dict[str, Path], name: str, window: dict[str, Any]
) -> None:
    tab = chromium.open(pages[name].as_uri(), **window)
    if window is PHONE:
        tab.tap("#turn-knobs")
    own, words = "page.numbers.data.tokens", ["<i>one", "two", "three", "four", "five", "six", "seven"]
    before, told = tab.evaluate(own), "document.querySelector('#own-words output').textContent"
    picture = "document.getElementById('picture').innerHTML"
    first = tab.evaluate(picture)
    count = tab.evaluate("page.own.data.typed.counts[1]")
    tab.evaluate("document.querySelector('[data-knob]').focus()")
    while tab.evaluate("document.activeElement.type") != "text":  # the keyboard comes there
        tab.key("Tab")
    tab.call("Accessibility.enable")
    fields = [one for one in tab.call("Accessibility.getFullAXTree")["nodes"] if one["role"]["value"] == "textbox"]
    assert "words of your own" in fields[0]["name"]["value"]
    enter(tab, "too few words")
    assert "here are three" in tab.evaluate(told) and tab.evaluate(own) == before
    enter(tab, " ".join(words[:count]))
    assert tab.evaluate("page.numbers.data.words") == words[:count] and tab.evaluate(told) == ""
    tab.key("ArrowRight")  # moves within the text
    assert tab.evaluate("page.active") == 0 and tab.evaluate(picture) != first
    assert "from a table" in tab.evaluate("document.querySelector('footer').textContent")
    assert tab.evaluate("document.querySelectorAll('#picture i, #cards i > i').length") == 0
    enter(tab, "a " * 8)
    assert "here are 8" in tab.evaluate(told) and len(tab.evaluate(own)) == count  # the last good words stay
    tab.key("Escape")
    for _ in steps(tab):
        text = tab.evaluate("document.querySelector('.active').textContent + document.body.scrollWidth / innerWidth")
        assert "undefined" not in text and "NaN" not in text and text.endswith("1"), text
    tab.evaluate("document.querySelector('#own-words button').click()")
    tab.key("Home")
    tab.evaluate("page.goTo(page.numbers.steps)")
    assert tab.evaluate(own) == before and tab.evaluate(picture) == first and tab.told == []


@pytest.mark.parametrize("name", TOURS)
def test_every_equation_of_the_definition_opens_a_card(chromium: Browser, pages: dict[str, Path], name: str) -> None:
    tab = chromium.open(pages[name].as_uri(), **DESK)
    for id in tab.evaluate("Object.keys(page.numbers.data.equations)"):
        tab.evaluate(f"location.hash = {id!r}")
        tab.wait(0.03)
        shown = tab.evaluate("[page.active, page.idsOn(page.cards[page.active]), page.asked, page.passed()]")
        assert id in shown[1] or (shown[0] == 0 and shown[2] == id and id in shown[3]), (id, shown)
        section = tab.evaluate("document.querySelector('.active').textContent")
        assert shown[0] or id in section
    assert tab.told == []


def test_sliders_have_names_and_the_space_key_pauses(chromium: Browser, pages: dict[str, Path]) -> None:
    tab = chromium.open(pages["graph_energy"].as_uri(), **DESK, still=False)
    assert tab.evaluate("page.playing") != 0
    tab.key(" ")
    assert tab.evaluate("page.playing") == 0
    tab.call("Accessibility.enable")
    nodes = tab.call("Accessibility.getFullAXTree")["nodes"]
    sliders = [one["name"]["value"] for one in nodes if one.get("role", {}).get("value") == "slider"]
    assert len(sliders) > 3 and all(sliders)
    assert tab.told == []


@pytest.mark.parametrize("dark", [False, True])
def test_both_schemes_are_told_to_the_browser(chromium: Browser, pages: dict[str, Path], dark: bool) -> None:
    tab = chromium.open(next(iter(pages.values())).as_uri(), **DESK, dark=dark)
    paper = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(int(x) for x in paper[4:-1].split(",")) < 150) == dark


def test_small_pictures_live_and_stop(chromium: Browser, tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    from docs.extension.tours import gallery

    names = ra.list_mechanisms()
    (tmp_path / "gallery.html").write_text(gallery([*map(ra.mechanism, names)]), encoding="utf-8")
    tab = chromium.open((tmp_path / "gallery.html").as_uri(), **DESK, still=False)
    assert tab.evaluate("[...document.querySelectorAll('a')].map((a) => a.dataset.name)") == list(names)
    drawn = "[...document.querySelectorAll('svg')].map((svg) => svg.innerHTML)"
    before, moved = tab.evaluate(drawn), set()
    for _ in range(30):  # each rests for a while at its end
        tab.wait(0.4)
        after = tab.evaluate(drawn)
        assert all("undefined" not in one and "NaN" not in one for one in after)
        moved |= {name for name, x, y in zip(names, before, after, strict=True) if x != y}
        if len(moved) == len(names):
            break
    assert moved == {*names}
    tab.click("#still")
    tab.wait(0.2)
    stopped = tab.evaluate(drawn)
    tab.wait(0.5)
    assert tab.evaluate(drawn) == stopped
    assert all(tab.evaluate("[...document.querySelectorAll('a span')].map((span) => span.textContent.length > 20)"))
    assert tab.told == [] and tab.requests[1:] == []
    quiet = chromium.open((tmp_path / "gallery.html").as_uri(), **DESK, still=True)
    assert quiet.evaluate("stopped") and quiet.told == []
