"""The page: every number is the library's, it is small and alone, and a reader gets everywhere by keyboard."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import refattn as ra
from refattn import backends
from refattn.cli import cli
from refattn.explorer import page as pages
from refattn.explorer.page import page
from refattn.verify.traced import Run, Traced, block_run, core_run, record

NUMPY = backends.get("numpy")


def run_of(name: str, part: str) -> tuple[Run, Traced]:
    mechanism = ra.mechanism(name)
    run = core_run(mechanism, "tiny", "float64", NUMPY) if part == "core" else block_run(mechanism, "float64", NUMPY)
    return run, record(mechanism, run, NUMPY)


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def unpacked(data: dict[str, Any], packed: str, dtype: str) -> dict[str, np.ndarray]:
    flat, found, at = np.frombuffer(base64.b64decode(packed), dtype), {}, 0
    for node in data["nodes"]:
        size = int(np.prod(node["shape"]))
        found[node["name"]] = flat[at : at + size].reshape(node["shape"])
        at += size
    assert at == flat.size
    return found


@pytest.fixture(scope="module")
def softmax() -> str:
    run, found = run_of("softmax", "core")
    return page(ra.mechanism("softmax"), run, found)


def check(name: str, part: str, text: str) -> None:
    _, found = run_of(name, part)
    assert len(text.encode()) < 500_000
    # The one address is the name of a namespace, which nobody fetches.
    assert set(re.findall(r"https?://[^\s\"'<)]+", text)) <= {"http://www.w3.org/2000/svg"}
    data = data_of(text)
    values = unpacked(data, data["values"], "<f8")
    given = {**found.arguments, **{step.id: step.value for step in found.steps}}
    assert list(values) == list(given)
    assert all(np.array_equal(values[name], given[name], equal_nan=True) for name in given)
    assert sorted(data["order"]) == sorted(values) == sorted(re.findall(r'data-node="([^"]*)"', text))
    assert len(data["feeds"]) == len(data["nodes"]) and data["knobs"]
    assert data["pictures"] or part == "block"


def test_softmax(softmax: str) -> None:
    check("softmax", "core", softmax)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["core", "block"])
@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_every_mechanism(name: str, part: str) -> None:
    if part == "core" and ra.mechanism(name).core is None:
        pytest.skip("no core")
    if "REFATTN_SLOW_SAMPLE" in os.environ and (part == "core") != ra.list_mechanisms().index(name) % 2:
        pytest.skip("not of the sample")
    run, found = run_of(name, part)
    check(name, part, page(ra.mechanism(name), run, found))


def test_knobs_show_what_the_library_computes(softmax: str) -> None:
    data, mechanism = data_of(softmax), ra.mechanism("softmax")
    run, _ = run_of("softmax", "core")
    q = next(knob for knob in data["knobs"] if knob["label"].startswith("q of token 3"))
    at = q["settings"].index(2.0)
    arguments = {**run.arguments, "q": run.arguments["q"] * np.array([1.0, 1.0, 1.0, 2.0])[:, None]}
    other = record(mechanism, run, NUMPY, arguments)
    shown = unpacked(data, q["values"][at], "<f4")
    for step in other.steps:
        np.testing.assert_allclose(shown[step.id], step.value, rtol=1e-6, atol=1e-9)
    scale = next(knob for knob in data["knobs"] if knob["label"] == "scale")
    at = scale["settings"].index(0.0)
    assert not np.any(unpacked(data, scale["values"][at], "<f4")["SM.1"])
    weights = np.array(scale["pictures"][at][0]["data"])
    np.testing.assert_array_equal(weights, 0.25)


def test_an_equation_stands_beside_its_adjoint(softmax: str) -> None:
    rows = softmax.split('<div class="row">')[1:]
    ids = [re.findall(r'<article id="([^"]*)"', row) for row in rows]
    assert ["q", "dSM.q"] in ids and ["SM.3", "dSM.3"] in ids and ["SM.5", "d_out"] in ids
    assert ids.index(["dSM.2"]) == ids.index(["SM.1"]) + 1  # SM.2 does not run without a mask


def test_repeated_equations_meet_their_own_pass() -> None:
    _, found = run_of("graph_energy", "core")
    rows = "".join(pages._rows(ra.mechanism("graph_energy"), found)).split('<div class="row">')[1:]
    ids = [re.findall(r'<article id="([^"]*)"', row) for row in rows]
    assert ["GE.6", "dGE.6[1]"] in ids and ["GE.6[1]", "dGE.6"] in ids


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "knobs", lambda *run: ())  # which take most of the time
    file = tmp_path / "page.html"
    for more, title, why in (
        (["growing"], "Growing attention, step by step", ""),
        (["graph_energy", "--set", "threshold=hard(tau=0.3)"], "Graph energy attention, step by step", ""),
        (["softmax", "--case", "tiny"], "Softmax attention, step by step", ""),
        (["softmax", "--set", "softcap=2.0"], "Softmax attention: the core, case tiny", "the paper has no softcap=2.0"),
        (["softmax", "--block"], "Softmax attention: the block, one step", "a step of the block runs"),
        (["growing", "--set", "causal=true"], "Growing attention: the definition, case tiny", "the definition makes"),
    ):
        told = CliRunner().invoke(cli, ["trace", *more, "--html", str(file)])
        text = file.read_text(encoding="utf-8")
        assert told.exit_code == 0 and f"<title>{title}</title>" in text, (more, told.output, told.exception)
        assert told.stdout == f"wrote {file}\n"
        assert (f"no tour: {why}" if why else "class Page") in text
    told = CliRunner().invoke(cli, ["trace", "softmax", "--html", str(file), "--json", "-"])
    assert json.loads(told.stdout)["mechanism"] == "softmax" and told.stderr == f"wrote {file}\n"
    for more, problem in (
        (["--html", "-"], "--html: got '-', needs a file"),
        (["--html", str(tmp_path / "no" / "x.html")], "--html"),
        (["--html", str(file), "--dtype", "float32"], "--html: got --dtype float32"),
    ):
        refused = CliRunner().invoke(cli, ["trace", "softmax", *more])
        assert refused.exit_code == 2 and problem in refused.stderr, more
    large = max(ra.mechanism("softmax").cases, key=lambda case: np.prod(case.inputs["q"].shape))
    refused = CliRunner().invoke(cli, ["trace", "softmax", "--case", large.name, "--html", str(file)])
    assert refused.exit_code == 2 and f"--html: case: got '{large.name}'" in refused.stderr


DRIVE = """
<script>
const log = [];
const key = (name) => document.dispatchEvent(new KeyboardEvent("keydown", { key: name }));
const shown = () => document.querySelector("article.current").id;
key("Home"); log.push(shown());
for (let n = 1; n < data.order.length; n++) { key("ArrowRight"); log.push(shown()); }
const inOrder = JSON.stringify(log) === JSON.stringify(data.order);
key("Home");
for (let n = 0; data.order[n] !== "SM.3"; n++) key("ArrowRight");
key("ArrowDown");
const told = document.getElementById("told").textContent;
const from = document.querySelectorAll("td.from").length, to = document.querySelectorAll("td.to").length;
const before = document.querySelector("#SM\\\\.1 td").textContent;
turn(3, 0);
const after = document.querySelector("#SM\\\\.1 td").textContent;
turn(3, data.knobs[3].here);
const back = document.querySelector("#SM\\\\.1 td").textContent === before;
setToken(1);
const bold = document.querySelectorAll("#SM\\\\.4 td.token").length;
document.body.dataset.seen = JSON.stringify({ inOrder, told, from, to, before, after, back, bold,
  hash: location.hash, math: document.querySelectorAll("main math").length,
  wide: document.documentElement.scrollWidth <= window.innerWidth });
</script></body>
"""


@pytest.mark.slow
def test_a_browser_steps_through_it(softmax: str, tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("there is no browser: apt-get install chromium")
    file = tmp_path / "page.html"
    file.write_text(softmax.replace("</body>", DRIVE))
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    options += ["--enable-logging=stderr", "--window-size=520,900"]
    command = [browser, *options, "--dump-dom", f"{file.as_uri()}#SM.4"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in shown.stderr
    found = re.search(r'data-seen="([^"]*)"', shown.stdout)
    assert found is not None
    seen = json.loads(found[1].replace("&quot;", '"').replace("&amp;", "&"))
    assert seen["inOrder"] and seen["back"] and seen["wide"]
    assert seen["told"].startswith("SM.3 (b, h, i, j = 0, 0, 0, 0) = ")
    assert "made of: SM.1, SM.top" in seen["told"] and "feeds: SM.total, SM.4, dSM.2" in seen["told"]
    assert (seen["from"], seen["to"]) == (2, 3)
    assert seen["before"] != "0" and seen["after"] == "0"
    assert seen["bold"] == 2 * 4 and seen["hash"] == "#SM.3" and seen["math"] == 16
