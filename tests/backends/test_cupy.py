"""What runs on CuPy, on a machine without a GPU: on the test double beside this file, unless CuPy is installed.

The tests over libraries run on it, too; here are checks, blocks, trainings and verifications, what a call asks a device
for, and that the double refuses what CuPy refuses.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import backends
from refattn.mechanisms.record import Unsupported
from refattn.train import loop, settings
from refattn.verify import check, load, verify
from refattn.verify.selfcheck.gradients import block_subjects, by_autograd, by_hand, largest_error
from tests.conftest import DOUBLE
from tests.processes import ROOT, python
from tests.train.runs import SMALL, Listener, train, write_text

CUPY = backends.get("cupy")
if (why := CUPY.why_unavailable()) is not None:
    pytest.skip(why, allow_module_level=True)
cupy: Any = importlib.import_module("cupy")
on_the_double = pytest.mark.skipif(not DOUBLE, reason="it is about the double")
FOLDER = Path(__file__).parent / "double"


def array(*shape: int, dtype: str = "float64") -> Any:
    return CUPY.from_numpy(np.random.default_rng(0).standard_normal(shape).astype(dtype))


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    if DOUBLE:
        monkeypatch.setattr(importlib.import_module("cupy._double"), "devices", 2)
    elif len(CUPY.devices()) < 2:
        pytest.skip("there is one device")


# --- what the library does there


SECTIONS = ("implementations", "definition", "loops")


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_checks(name: str) -> None:
    record = ra.mechanism(name)
    few = record.changed(cases=(record.case("tiny"),))
    wanted = ("float64", "every equation")
    report = check(
        few, "cupy", progress=lambda tasks: [t for t in tasks if t.section in SECTIONS and t.name.endswith(wanted)]
    )
    said = [(row.section, row.name, row.detail) for row in report.rows if row.status == "disagrees"]
    assert not said and report.counts()["agrees"] >= 3, report.rows


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_blocks(name: str) -> None:
    subjects, compared = list(block_subjects(ra.mechanism(name))), 0
    for subject in subjects[:: 1 + len(subjects) // 8]:
        with contextlib.suppress(Unsupported):
            here, there = (by_hand(subject, backends.get(library), "auto") for library in ("numpy", "cupy"))
            error, leaf = largest_error(there, here)
            assert error < 1e-11, (subject.name, leaf)
            compared += 1
    assert compared


def test_a_model_is_trained(tmp_path: Path) -> None:
    data, losses = write_text(tmp_path), {}
    for library in ("numpy", "cupy"):
        asked = SMALL | {"data": data, "backend": library, "dtype": "float64", "steps": 4}
        listener, folder = Listener(), tmp_path / library
        result = train(settings.build("softmax", asked), folder, listener)
        assert result.finished
        losses[library] = [row["loss"] for row in listener.rows]
        continuation = loop.continued(folder, b"the cat", 8, print)
        assert len(continuation) == 8
    assert len(losses["cupy"]) == 4 and losses["cupy"] == pytest.approx(losses["numpy"], rel=1e-9)


ADAPTER = """
import cupy, refattn as ra

def attend(q, k, v, *, dtype=None, **options):
    if options.pop("mask", None) is not None or options:
        return ra.Decline("no options")
    assert type(q) is cupy.ndarray and q.device.id == cupy.cuda.runtime.getDevice()
    scores = q @ cupy.swapaxes(k, -1, -2) * q.shape[-1] ** -0.5
    weights = cupy.exp(scores - scores.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True)) @ v

attend.framework = "cupy"

class There:
    framework, device = "cupy", "cuda:1"

    def forward(self, q, k, v, *, dtype=None):
        assert q.device.id == 1
        out, self.saved = ra.softmax.forward(q, k, v)
        return out

    def backward(self, d_out):
        return ra.softmax.backward(self.saved, d_out)
"""


def verified(tmp_path: Path, name: str, **asked: Any) -> Any:
    file = tmp_path / "adapter.py"
    file.write_text(ADAPTER)
    record = ra.mechanism("softmax")
    return verify(record.changed(cases=(record.case("tiny"), record.case("plain"))), load(f"{file}:{name}"), **asked)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_a_kernel_is_verified_in_every_type(dtype: str, tmp_path: Path) -> None:
    report = verified(tmp_path, "attend", dtypes=[dtype])
    assert report.counts()["all"] == {"run": 2, "agreed": 2, "failed": 0, "declined": 0}, report.outcomes


def test_a_kernel_is_called_on_its_device(tmp_path: Path, two_devices: None) -> None:
    report = verified(tmp_path, "There", dtypes=["float32"], grad=True)
    assert report.counts()["all"]["agreed"] == 2, report.outcomes


def test_an_array_that_is_not_on_the_current_device_is_named(two_devices: None) -> None:
    there = CUPY.from_numpy(np.ones((1, 1, 2, 3)), "cuda:1")
    text = r"q: got an array on cuda:1, needs one on cuda:0, .* or a call in `with cupy.cuda.Device\(1\):`"
    with pytest.raises(ValueError, match=text):
        ra.softmax.forward(there, there, there)
    with cupy.cuda.Device(1):
        out, _ = ra.softmax.forward(there, there, there)
    assert out.device.id == 1 and CUPY.to_numpy(out).tolist() == [[[[1.0] * 3] * 2]]


def test_products_in_tf32_are_refused() -> None:
    kinds = CUPY._products()  # type: ignore[attr-defined]
    before, q = kinds.get_compute_type("float32"), array(1, 1, 2, 3, dtype="float32")
    kinds.set_compute_type("float32", kinds.COMPUTE_TYPE_TF32)
    try:
        with pytest.raises(RuntimeError, match=r"CuPy's products of float32 are set to TF32 \(CUPY_TF32\), needs all"):
            ra.softmax.forward(q, q, q)
        ra.softmax.forward(*(x.astype("float64") for x in (q, q, q)))
        with CUPY.full_precision():
            ra.softmax.forward(q, q, q)
            a, b = array(64, 64, dtype="float32"), array(64, 64)
            assert float(abs(a @ a - b @ b).max()) < 1e-4
        assert kinds.get_compute_type("float32") == kinds.COMPUTE_TYPE_TF32
    finally:
        kinds.set_compute_type("float32", before)


@on_the_double
def test_the_variable_that_asks_for_tf32_is_seen() -> None:
    code = "from refattn import backends as b; o = b.get('cupy'); import numpy as np\n"
    code += "x = o.from_numpy(np.ones(2, 'float32')); print(o.precision_lost(x), o.precision_lost(x.astype('float64')))"
    told = python("-c", code, path=FOLDER, CUPY_TF32="1")
    assert told == "CuPy's products of float32 are set to TF32 (CUPY_TF32) None"


# --- older versions of PyTorch, whose asarray takes the gradient away


def test_gradients_by_a_torch_whose_asarray_asks_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch, "asarray", functools.partial(torch.asarray, requires_grad=False))
    *_, last = block_subjects(ra.mechanism("higher_order"))  # its block has numbers that are parameters
    assert largest_error(by_autograd(last), by_hand(last, backends.get("numpy"), "auto"))[0] < 1e-10
    x = torch.linspace(-1.0, 1.0, 24, dtype=torch.float64).reshape(1, 2, 3, 4).requires_grad_()
    with ra.reading():
        out, _ = ra.softmax.forward(x, x, x)
    assert out.requires_grad and x.requires_grad


# --- the double


REFUSED: dict[str, tuple[type[Exception], Callable[[Any], Any]]] = {
    "np.asarray": (TypeError, lambda x: np.asarray(x)),
    "an array of NumPy in a sum": (TypeError, lambda x: x + np.ones(3)),
    "an array of NumPy on the left": (TypeError, lambda x: np.ones(3) + x),
    "an array of NumPy in a product": (TypeError, lambda x: x @ np.ones((3, 3))),
    "an array of NumPy in a function": (TypeError, lambda x: cupy.exp(np.ones(3))),
    "an array of NumPy in a selection": (TypeError, lambda x: cupy.where(x > 0.0, x, np.ones(3))),
    "an array of NumPy in a row": (TypeError, lambda x: cupy.concatenate([x, np.ones((1, 3))])),
    "an array of NumPy written": (ValueError, lambda x: x.__setitem__(0, np.ones(3))),
    "a list in a sum": (TypeError, lambda x: cupy.add(x, [1.0, 2.0, 3.0])),
    "a number alone": (TypeError, lambda x: cupy.sum(1.0)),
    "a list as an index": (IndexError, lambda x: x[[0, 1]]),
    "an array as a whole number": (TypeError, lambda x: range(cupy.sum(x))),
    "a keyword that CuPy has not": (TypeError, lambda x: cupy.sum(x, where=x > 0.0)),
    "an axis that eye has not": (TypeError, lambda x: cupy.eye(2, device="cpu")),
    "a broadcast in solve": (ValueError, lambda x: cupy.linalg.solve(x[None], cupy.ones((2, 3, 1)))),
    "half precision in solve": (TypeError, lambda x: cupy.linalg.solve(x.astype("float16"), x.astype("float16"))),
    "logaddexp of complex numbers": (TypeError, lambda x: cupy.logaddexp(x * 1j, x * 1j)),
    "text": (ValueError, lambda x: cupy.asarray("a")),
}  # fmt: skip


@on_the_double
@pytest.mark.parametrize("what", REFUSED)
def test_the_double_refuses(what: str) -> None:
    kind, use = REFUSED[what]
    with pytest.raises(kind):
        use(array(3, 3))


def test_answers_where_cupy_differs_from_numpy() -> None:
    xp, zero = CUPY.namespace(), cupy.zeros((3, 3))
    for b in (cupy.ones((3, 1)), cupy.ones((3, 2))):
        assert not np.any(np.isfinite(CUPY.to_numpy(xp.linalg.solve(zero, b))))
    regular = CUPY.to_numpy(xp.linalg.solve(cupy.stack([zero, cupy.eye(3)]), cupy.ones((2, 3, 1))))
    assert not np.any(np.isfinite(regular[0])) and regular[1].tolist() == [[1.0]] * 3
    sign, size = xp.linalg.slogdet(zero)
    assert (float(sign), float(size)) == (0.0, -np.inf)
    assert np.isnan(CUPY.to_numpy(xp.linalg.cholesky(-cupy.eye(3))).diagonal()).all()
    assert np.isnan(CUPY.to_numpy(xp.linalg.eigh(zero * np.nan)[0])).all()
    assert np.isnan(CUPY.to_numpy(xp.linalg.svdvals(zero * np.nan))).all()
    assert CUPY.to_numpy(xp.take(cupy.arange(3), cupy.asarray([5]))).tolist() == [2]
    assert type(np.float64(2.0) * zero) is type(zero * np.float64(2.0)) is cupy.ndarray
    assert type(cupy.arange(3)[0]) is cupy.ndarray and cupy.arange(3)[0].shape == ()


@on_the_double
def test_the_double_counts() -> None:
    double, x = importlib.import_module("cupy._double"), array(2, 3, 4)
    double.reset()
    view = cupy.swapaxes(x, 1, 2)[:, 1:, :]
    assert not double.tally  # a view costs nothing
    product = x @ cupy.swapaxes(x, 1, 2)
    assert double.tally == {"launches": 2, "copies": x.nbytes, "bytes": x.nbytes + product.nbytes}
    double.reset()
    assert bool(cupy.all(view == view)) and double.tally["waits"] == 1
    (((kind, where), _),) = double.places.items()
    assert kind == "waits" and where.startswith(f"bool at {__file__}")
    double.reset()
    cupy.asarray([1, 2]), view[view > 0.0].get()
    assert {key: double.tally[key] for key in ("uploads", "waits", "downloads")} == {
        "uploads": 1,
        "waits": 2,
        "downloads": 1,
    }


# --- what a call asks of a device


LOOKS = {
    "koopman": "koopman/options/perturbation.py koopman/implementations/shared.py koopman/rounding_error.py "
    "ops/solve.py",
    "graph_energy": "graph_energy/core.py",
}
"""Files in which a core looks at values to say that there is no result: a matrix that is singular, a solver that ended
without a solution, digits that rounding took, scores that diverged."""


@on_the_double
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_a_warm_call_neither_waits_nor_uploads(name: str, dtype: str) -> None:
    double, module = importlib.import_module("cupy._double"), getattr(ra, name)
    q, k, v, d_out = (0.25 * array(1, 2, 24, 8, dtype=dtype) for _ in range(4))
    calls: list[dict[str, Any]] = [{}]
    calls += [{"causal": True}] if name in ("softmax", "growing", "higher_order", "sympformer") else []
    calls += [{"implementation": x} for x in ra.mechanism(name).implementations if x not in ("chunked", "recurrent")]
    for options in calls:
        for _ in range(2):
            double.reset()
            _, saved = module.forward(q, k, v, **options)
            module.backward(saved, d_out)
        looks = [place for kind, place in double.places if kind == "waits"]
        allowed = LOOKS.get(name, "").split()
        assert not [place for place in looks if not any(file in place for file in allowed)], options
        assert double.tally["uploads"] == double.tally["downloads"] == 0, double.places


@on_the_double
def test_softmax_attention_takes_few_launches() -> None:
    """One tile holds all scores where they are a small share of the device's memory."""
    double = importlib.import_module("cupy._double")
    q, k, v, d_out = (array(1, 2, 600, 16, dtype="float32") for _ in range(4))
    double.reset()
    _, saved = ra.softmax.forward(q, k, v)
    assert saved.implementation == "tiled" and double.tally["launches"] <= 40
    double.reset()
    ra.softmax.backward(saved, d_out)
    assert double.tally["launches"] <= 50
    assert double.tally["copies"] < 600 * 600 * 4  # of what is as large as q and k alone, no scores


def test_a_product_with_a_transpose_is_the_same() -> None:
    a, b = array(2, 3, 50, 40), array(2, 3, 50, 4)
    for x, y in ((a.mT, b), (b.mT, a), (a, a.mT), (a.mT[0, 0], b[0, 0]), (b.mT, b)):
        found = CUPY.to_numpy(CUPY.matmul(x, y))
        np.testing.assert_allclose(found, CUPY.to_numpy(x) @ CUPY.to_numpy(y), rtol=1e-13, atol=1e-13)


# --- the script for a machine with a GPU


@pytest.mark.slow
@on_the_double
def test_the_script_for_a_gpu_runs_through(tmp_path: Path) -> None:
    path = os.pathsep.join((str(FOLDER), str(ROOT)))
    environment = os.environ | {"SHORT": "1", "PYTHONPATH": path, "SECONDS_IN_ALL": "280"}
    words = ["bash", "tools/gpu_check.sh", str(tmp_path), sys.executable]
    result = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr
    tables = (tmp_path / "tables.md").read_text()
    assert tables.startswith("a test double, 80 GiB") and "| cupy | float32 | 2 | 0 | 0 |" in tables
    assert {"first", "timings", "check-growing", "tests", "train-softmax", "verify-math-cupy"} == {
        line.split(" | ")[0].strip("| ") for line in (tmp_path / "rows").read_text().splitlines()
    }
