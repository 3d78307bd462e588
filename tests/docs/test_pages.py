"""What the pages of mechanisms are made from: docstrings as Markdown, and files that follow the registry."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import refattn as ra
from refattn.backends import get
from refattn.verify import traced

pytest.importorskip("sphinx", reason='the pages are built with pip install -e ".[docs]"')

from docs.extension import claims, docstrings, equations, notebooks, pages  # noqa: E402

TEXT = """Small: |s_ij| is h*d.

    Equations::

A paragraph with `code_of_x` and ``h*d``::

    [T.1]  y = 2 x

    [T.2]  z = y + 1

- one [item]
"""


def test_parts_of_a_docstring() -> None:
    found = list(docstrings.parts(TEXT))
    assert [part.indented for part in found] == [False, True, False, True, False]
    assert found[2].text == "A paragraph with `code_of_x` and ``h*d``:"
    assert found[3].text == "[T.1]  y = 2 x\n\n[T.2]  z = y + 1"
    assert list(docstrings.parts(None)) == []


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("|s_ij| is h*d", r"\|s\_ij\| is h\*d"),
        ("`h*d` and ``s_ij``", "`h*d` and `s_ij`"),
        ("a <b> [SM.1] $x$", r"a \<b\> \[SM.1\] \$x\$"),
        ("Axes: b batch", "**Axes:** b batch"),
        ("How the paper and libraries differ: in", "**How the paper and libraries differ:** in"),
        ("Axes as before", "Axes as before"),
    ],
)
def test_prose_means_itself(text: str, made: str) -> None:
    assert docstrings.markdown(text) == made


def test_papers_are_links_but_for_code() -> None:
    link = "[arXiv:1706.03762](https://arxiv.org/abs/1706.03762)"
    assert docstrings.linked("of arXiv:1706.03762, `arXiv:1706.03762`") == f"of {link}, `arXiv:1706.03762`"
    assert docstrings.linked(link) == link == docstrings.markdown("arXiv:1706.03762")


def test_autodoc_reads_no_markup_into_prose() -> None:
    lines = ["|x| and x_ and h*d, `a*b`", "", "Example::", "", "    |x| * y", "", ">>> f(*x)", "|6|"]
    docstrings.escape(None, "function", "f", None, None, lines)
    assert lines == [r"\|x\| and x\_ and h\*d, `a*b`", "", "Example::", "", "    |x| * y", "", ">>> f(*x)", "|6|"]


def test_signatures_show_aliases_by_name() -> None:
    shown = docstrings.plain_aliases(None, "", "", None, None, "(x: TypeAliasForwardRef('Array') | None)", None)
    assert shown == ("(x: Array | None)", None)


def test_notebooks_show_formulas_and_pages_as_code() -> None:
    text = "Of :m:`w_j`, see :doc:`/trace`:\n\n    :m:`dw_j = w_j`\n"
    assert notebooks.readable(text) == "Of ``w_j``, see ``docs/trace.md``:\n\n    dw_j = w_j\n"


def test_pages_follow_the_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "mechanisms"
    names = ra.list_mechanisms()
    first, other = names[:2]
    (folder / first).mkdir(parents=True)
    (folder / f"{first}.md").write_text("by hand")
    pages.write(folder)

    def written(*parts: str) -> set[str]:
        return {path.relative_to(folder).as_posix() for part in parts for path in folder.glob(part)}

    assert written("*.md", "*/*.md") == {f"{name}{part}.md" for name in names for part in ("", "/reference")}
    assert (folder / f"{first}.md").read_text() == "by hand"
    begun = (folder / f"{other}.md").read_text()
    for what in (
        f"{{idea}} {other}",
        f"{{derived}} {other}",
        f"{{tour}} {other}",
        "| `causal` |",
        f"{{further}} {other}",
    ):
        assert what in begun
    assert f"{{general}} {other}" in (folder / other / "reference.md").read_text()


def test_a_page_shows_figures_and_deviations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = tmp_path / "docs" / "figures"
    figures.mkdir(parents=True)
    for name in ("softmax-speed.png", "softmax_flow.svg", "softmax.txt", "budget.png"):
        (figures / name).touch()
    (tmp_path / "docs" / "deviations.md").write_text(
        "# All\n\n## other\n\nnot-mine\n\n## softmax\n\nours\n\n## third\n"
    )
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    captions = figures / "captions.toml"
    captions.write_text('[softmax]\n"softmax_flow.svg" = "It flows."\n"softmax-speed.png" = "It is quick."\n')
    idea, further = ("\n".join(say(ra.mechanism("softmax"))) for say in (pages.idea, pages.further))
    assert "figures" not in idea
    assert (
        further.index("## More pictures")
        < further.index("../figures/softmax_flow.svg")
        < further.index("../figures/softmax-speed.png")
        < further.rindex("It is quick.")
    )
    assert "softmax.txt" not in idea + further and "budget.png" not in idea + further
    text = "\n".join(pages.lookup(ra.mechanism("softmax")))
    assert "\nours\n" in text and "not-mine" not in text
    captions.write_text('[softmax]\n"softmax_flow.svg" = "It flows."\n')
    with pytest.raises(ValueError, match="softmax-speed.png"):
        list(pages.further(ra.mechanism("softmax")))


def test_pieces_of_a_definition_leave_nothing_out() -> None:
    module = ra.mechanism("softmax").definition
    assert module is not None
    lines = inspect.getsource(module).splitlines()
    (first, scores), (second, rest) = (
        equations.pieces_of(module, ids)[0] for ids in (["SM.1", "SM.2"], ["SM.3", "SM.4", "SM.5"])
    )
    assert scores.startswith("def forward(q: Array") and scores.endswith("[SM.2]")
    assert rest.startswith("exponentials = ") and rest.splitlines()[-1].startswith("return out")
    assert second == first + len(scores.splitlines())
    assert [line.strip() for line in rest.splitlines()] == [line.strip() for line in lines[second - 1 :]][
        : rest.count("\n") + 1
    ]
    assert len(equations.pieces_of(module, ["SM.5", "dSM.v"])) == 2  # of two functions
    with pytest.raises(ValueError, match=r"SM\.2: stands between"):
        equations.pieces_of(module, ["SM.1", "SM.3"])
    with pytest.raises(ValueError, match=r"SM\.99: no equation"):
        equations.pieces_of(module, ["SM.99"])


def test_an_equation_is_shown_by_the_line_that_ran() -> None:
    for mechanism in map(ra.mechanism, ra.list_mechanisms()):
        assert mechanism.definition is not None
        if mechanism.example is not None:
            run = traced.example_run(mechanism, "float64", get("numpy"))
        else:
            run = traced.read_run(mechanism, traced.first_case(mechanism), "float64", get("numpy"))
        ran = traced.record(mechanism, run, get("numpy")).steps
        places = traced.places_in(mechanism.definition)
        for step in ran:
            if "[" not in step.id:
                place = places.pop(step.id)
                assert (step.place.file, step.place.line, step.place.code) == (place.file, place.line, place.code)
        assert not places, "each equation ran"


def test_claims_that_no_source_makes_have_a_table_of_their_own() -> None:
    sources, ours = "\n".join(claims.sections()).split("## Rows that are ours\n")
    for claim in (claim for name in ra.list_mechanisms() for claim in ra.mechanism(name).claims):
        (said, *_) = claims.lines(claim)
        assert (said in ours, said in sources) == (bool(claim.ours), not claim.ours)
    assert "##" not in ours and "; ours: " not in sources


def test_a_claim_says_where_it_stands_what_holds_and_what_shows_it() -> None:
    for claim in (claim for name in ra.list_mechanisms() for claim in ra.mechanism(name).claims):
        said, holds, shown, held = claims.lines(claim)
        whose = f"; ours: {docstrings.markdown(claim.ours)}" if claim.ours else ""
        assert said == f"**{docstrings.markdown(claim.claim)}** ({docstrings.markdown(claim.source)}{whose})"
        assert holds.endswith(f": {docstrings.markdown(claim.holds)}")
        assert holds.startswith("Holds: as said") or holds.startswith("**What holds**: ")
        assert shown == f"Shown by `{claim.shown}`" and all(f"`{test}`" in held for test in claim.tests)
