"""Kernels for a GPU on the CPU: the interpreters of Triton and of Pallas, and what these cannot run."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest
from click.testing import CliRunner

import refattn as ra
from refattn.cli import cli
from refattn.verify import Isolated, load, verify_case
from refattn.verify.adapters import interpreted, like_gpu
from refattn.verify.adapters.adapter import LoadError

# Nothing here imports Triton: it would be too late to interpret it.
NEEDED = ("torch", "triton", "ml_dtypes")
triton = pytest.mark.skipif(not all(map(importlib.util.find_spec, NEEDED)), reason="needs torch, triton, ml_dtypes")

KERNELS = """
import torch, triton, triton.language as tl

@triton.autotune([triton.Config({"N": 16}), triton.Config({"N": 32})], key=[])
@triton.jit
def doubled(x, o, n, N: tl.constexpr):
    for i in range(tl.program_id(0), tl.program_id(0) + 1):
        at = i.to(tl.int64) * N + tl.arange(0, N)
        tl.store(o + at, tl.load(x + at, at < n) * 2.0, at < n)

@triton.jit
def by_assembly(x, o, n, N: tl.constexpr):
    at = tl.arange(0, N)
    given = [tl.load(x + at, at < n)]
    tl.store(o + at, tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", given, tl.float32, True, 1), at < n)

@triton.jit
def by_atomics(x, o, n, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.atomic_add(o + at, tl.load(x + at, at < n), at < n)

@triton.jit
def beyond(x, o, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(o + at, tl.load(x + at))

def outside(q, k, v):
    beyond[(1,)](q, torch.zeros_like(q), 1 << 16)

def tuned(q, k, v):
    o = torch.zeros_like(q)
    doubled[lambda meta: (triton.cdiv(q.numel(), meta["N"]),)](q, o, q.numel())
    assert torch.equal(o, q * 2)
    return o

@triton.jit
def narrow(x, o, N: tl.constexpr):
    tl.static_assert(N <= 128)
    tl.store(o + tl.arange(0, N), 0.0)

def asserting(q, k, v):
    narrow[(1,)](q, torch.zeros_like(q), 1024)

def own(q, k, v):
    assert q is None

def assembly(q, k, v):
    by_assembly[(1,)](q, torch.zeros_like(q), q.numel(), 1024)

def atomics(q, k, v):
    by_atomics[(1,)](q, torch.zeros_like(q), q.numel(), 1024)

for kernel in (outside, tuned, assembly, atomics, asserting, own):
    kernel.framework = "torch"
"""


@triton
def test_the_self_test_tells_the_interpreter_from_the_mended_one() -> None:
    script = (
        "import json, os; os.environ['TRITON_INTERPRET'] = '1'; import triton\n"
        "from refattn.verify.adapters import interpreted, triton_cpu\n"
        "triton_cpu._set_driver(triton); stock = triton_cpu.self_test()\n"
        "interpreted.start('triton'); print(json.dumps([stock, triton_cpu.self_test()]))"
    )
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=True)
    stock, mended = json.loads(found.stdout)
    assert not mended
    assert {"add", "compare", "dot", "from float32"} <= {*stock["bfloat16"].split(", ")}
    assert stock["float8_e4m3fn"] == "from float32" and "dot" not in stock.get("float32", "")


@triton
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("faulty", [False, True])
def test_a_kernel_is_judged_without_a_gpu(faulty: bool, dtype: str, tmp_path: Path) -> None:
    text = resources.files("refattn.verify.adapters").joinpath("templates", "triton.txt").read_text("utf-8")
    path, report = tmp_path / "kernel.py", tmp_path / "report.json"
    path.write_text(text.replace("nq, nk, CAUSAL) - lse", "nq, nk, True) - lse") if faulty else text)
    shapes = ["--shape", "n=32,d=16", "--shape", "n=32,d=16,causal", "--shape", "h=4,g=2,nq=20,nk=40,d=16"]
    call = ["verify", "softmax", "--impl", f"{path}:attend", "--grad", "--dtype", dtype, *shapes]
    found = CliRunner().invoke(cli, [*call, "--json", str(report)])
    assert found.exit_code == faulty, found.output
    told = " ".join(found.output.split())
    assert "interpreted on the CPU" in told and "not seen: races" in told
    assert json.loads(report.read_text())["interpreted"].startswith("Triton")
    assert ("the kernel is causal whether it is asked for or not: explains everything" in told) == faulty


@triton
def test_what_ran_is_told_and_what_cannot_run_is_declined(tmp_path: Path) -> None:
    path = tmp_path / "kernels.py"
    path.write_text(KERNELS)
    record = ra.mechanism("softmax")
    case = record.case("tiny")
    with Isolated(f"{path}:tuned@triton=1") as kernel:
        assert verify_case(record, kernel, case, "bfloat16").status == "disagrees"  # it ran, and its own check held
        assert "doubled ran with configuration 1 of 2 (N: 32" in kernel.interpreted
    refused = (("assembly", "float32", "inline_asm"), ("atomics", "bfloat16", "atomic"))
    for name, dtype, reason in (*refused, ("asserting", "float32", "tl.static_assert(N <= 128)")):
        with Isolated(f"{path}:{name}@triton") as kernel:
            found = verify_case(record, kernel, case, dtype)
            assert found.status == "declined" and reason in found.detail and "Triton" in found.detail
            line = found.detail.rpartition(", kernels.py:")[2].rstrip(")")
            assert reason in KERNELS.splitlines()[int(line) - 1]
    with Isolated(f"{path}:own@triton") as kernel:
        assert verify_case(record, kernel, case, "float32").status == "raises"
    with Isolated(f"{path}:outside@triton") as kernel:
        found = verify_case(record, kernel, case, "bfloat16")
        assert found.status == "raises" and "beyond loads" in found.detail and "out of bounds" in found.detail


MEMORY = """
import json, threading
from refattn.verify.adapters import interpreted
interpreted.start("triton")
import torch, triton, triton.language as tl

def body(name, lines):
    text = "@triton.jit\\ndef " + name + "(x, o, far, N: tl.constexpr):\\n i = tl.arange(0, N)\\n"
    return text + "".join(f" {line}\\n" for line in lines.split("; "))

BODIES = {
    "load": "tl.store(o + i, tl.load(x + far + i))",
    "masked_load": "tl.store(o + i, tl.load(x + far + i, i < 3, 0.0))",
    "store": "tl.store(o + far + i, tl.load(x + i))",
    "atomic_add": "tl.atomic_add(o + far + i, tl.load(x + i))",
    "atomic_max": "tl.atomic_max(o + far + i, tl.load(x + i))",
    "atomic_and": "tl.atomic_and(o.to(tl.pointer_type(tl.int32)) + far + i, i)",
    "atomic_xchg": "tl.atomic_xchg(o.to(tl.pointer_type(tl.int32)) + far + i, i)",
    "atomic_cas": "tl.atomic_cas(o + far + i, tl.zeros((N,), tl.float32), tl.load(x + i))",
    "atomic_cas_of_one": "tl.atomic_cas(o + far, 0.0, 1.0)",
    "atomic_load": "tl.store(o + i, tl.atomic_load(x + far + i))",
    "atomic_store": "tl.atomic_store(o + far + i, tl.load(x + i))",
    "atomic_poll": "tl.atomic_poll(o.to(tl.pointer_type(tl.int32)) + far + i, i * 0, timeout_ns=1)",
    "block_load": "p = tl.make_block_ptr(x, (N,), (1,), (far,), (N,), (0,)); tl.store(o + i, tl.load(p))",
    "block_store": "p = tl.make_block_ptr(o, (N,), (1,), (far,), (N,), (0,)); tl.store(p, tl.load(x + i))",
    "descriptor_load": "d = tl.make_tensor_descriptor(x, [far + N], [1], [N]); tl.store(o + i, d.load([far]))",
    "descriptor_store": "d = tl.make_tensor_descriptor(o, [far + N], [1], [N]); d.store([far], tl.load(x + i))",
    "gather": "d = tl.make_tensor_descriptor(x, [far + 8, N], [N, 1], [1, N]); g = d.gather(far + tl.arange(0, 8), 0)",
    "scatter": "d = tl.make_tensor_descriptor(o, [far + 8, N], [N, 1], [1, N]); "
    "d.scatter(tl.load(x + tl.zeros((8, N), tl.int32)), far + tl.arange(0, 8), 0)",
}

def run(lines, far):
    from refattn.verify.adapters.triton_cpu import compiled
    x, o = torch.arange(256.0), torch.zeros(256)
    try:
        compiled(body("kernel", lines))[(1,)](x, o, far, 32)
    except Exception as error:
        while error.__cause__ is not None:
            error = error.__cause__
        return f"{type(error).__name__}: {error}"
    return "ran"

found = {name: [run(lines, far) for far in (0, 1 << 28)] for name, lines in BODIES.items()}
found["sizes"] = [run("tl.atomic_cas(o + i, 0.0, 1.0)", 0)]

from triton._C.libtriton import interpreter as plain
from triton.runtime.interpreter import _interpreter
assert _interpreter.fma_fp32 is plain.fma_fp32 and _interpreter.RMW_OP is plain.RMW_OP
plain.atomic_new = print  # of a later version
try:
    _interpreter.atomic_new
except NotImplementedError as error:
    found["unknown"] = [str(error)]

@triton.jit
def doubled(x, o, n, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(o + at, tl.load(x + at, at < n) * 2.0, at < n)

def launch(size, wrong):
    for _ in range(10):
        x = torch.arange(float(size))
        o = torch.zeros(size)
        try:
            doubled[(triton.cdiv(size, 16),)](x, o, size, 16)
        except Exception as error:
            wrong.append(repr(error))
            continue
        if not torch.equal(o, 2 * x):
            wrong.append("another result")

wrong = []
threads = [threading.Thread(target=launch, args=(size, wrong)) for size in (512, 640, 96)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
found["threads"] = wrong
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    path = tmp_path_factory.mktemp("memory") / "memory.py"
    path.write_text(MEMORY)
    ran = subprocess.run([sys.executable, "-W", "ignore", path], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"exit {ran.returncode}: {ran.stderr[-2000:]}"
    found: dict[str, list[str]] = json.loads(ran.stdout.splitlines()[-1])
    return found


@triton
def test_nothing_leaves_the_tensors_of_a_kernel(memory: dict[str, list[str]]) -> None:
    ways = {name: ends for name, ends in memory.items() if len(ends) == 2}
    # An older Triton has not all of them, a newer one no block pointers.
    lacking = {name for name, (inside, _) in ways.items() if inside.startswith(("AttributeError", "NotImplemented"))}
    assert lacking <= {"atomic_load", "atomic_store", "atomic_poll", "block_load", "block_store", "gather", "scatter"}
    assert len(ways) == 18
    for name in ways.keys() - lacking:
        inside, outside = ways[name]
        assert inside == "ran", (name, inside)
        assert outside.startswith("IndexError: kernel ") and outside.endswith(": out of bounds"), (name, outside)
    assert memory["sizes"][0].startswith("ValueError: atomic_cas: got float32 (1,), float32 (1,), needs")
    assert memory["unknown"] == ["no atomic_new, whose pointers are not checked here"]


@triton
def test_threads_launch_kernels_one_after_the_other(memory: dict[str, list[str]]) -> None:
    assert memory["threads"] == []


def test_a_type_that_fails_the_self_test_is_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = interpreted.Interpreter("Triton 0.0", "races", failing={"bfloat16": "dot"})
    monkeypatch.setitem(interpreted._active, "triton", wrong)
    record = ra.mechanism("softmax")

    def attend(q: object, k: object, v: object, dtype: str) -> object:
        return ra.softmax.forward(q, k, v)[0]

    found = verify_case(record, attend, record.case("tiny"), "bfloat16")
    assert (found.status, found.detail) == ("declined", "Triton 0.0 fails its self-test in bfloat16: dot")
    assert verify_case(record, attend, record.case("tiny"), "float32").status == "agrees"
    assert interpreted.declined(NotImplementedError("of the kernel itself")) is None


@pytest.mark.parametrize(
    ("said", "needs"),
    [
        ("0 active drivers ([]). There should only be one.", "--interpret, or"),
        ("Only interpret mode is supported on CPU backend.", "--interpret pallas, or"),
    ],
)
def test_a_kernel_without_a_gpu_is_told_of_interpreters(said: str, needs: str) -> None:
    def attend(q: object, k: object, v: object) -> None:
        raise RuntimeError(said)

    record = ra.mechanism("softmax")
    assert needs in verify_case(record, attend, record.case("tiny"), "float32").detail
    assert interpreted.hint("an error of the kernel") == ""


def test_an_interpreted_kernel_is_called_beneath_what_asks_for_more_than_is_imitated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, record = tmp_path / "wrapper.py", ra.mechanism("softmax")
    path.write_text("def attend(q, k, v):\n    assert hasattr(q, 'is_cuda')\n    return q\n")
    found = verify_case(record, load(f"{path}:attend"), record.case("tiny"), "float32")
    assert found.detail == "raised AssertionError: assert hasattr(q, 'is_cuda')"
    monkeypatch.setitem(interpreted._active, "triton", interpreted.Interpreter("Triton 0.0", "races"))
    found = verify_case(record, load(f"{path}:attend"), record.case("tiny"), "float32")
    assert "asks for a GPU in a way that is not imitated: call what is beneath" in found.detail


WRAPPER = """
import threading
import torch, triton, triton.language as tl

DEVICE = triton.runtime.driver.active.get_active_torch_device()
COUNTS = torch.zeros(4, dtype=torch.int32, device="cuda")
SPACE = torch.empty(8, device=DEVICE, pin_memory=False)
STREAM = torch.cuda.Stream()
assert torch.cuda.is_available() and torch.cuda.device_count() == 1
if torch.cuda.get_device_capability() < (8, 0):
    raise ImportError("needs an Ampere GPU")
UNITS = torch.cuda.get_device_properties(DEVICE).multi_processor_count
SHARED = triton.runtime.driver.active.utils.get_device_properties(0)["max_shared_mem"]
torch.set_default_device("cuda")

@triton.jit
def kernel(q, k, v, o, n, m, d, scale, N: tl.constexpr, D: tl.constexpr):
    row, i, j, c = tl.program_id(0), tl.arange(0, N), tl.arange(0, N), tl.arange(0, D)
    here = (i[:, None] < n) & (c < d)
    there = (j[:, None] < m) & (c < d)
    a = tl.load(q + row * n * d + i[:, None] * d + c, here, 0.0)
    b = tl.load(k + row * m * d + j[:, None] * d + c, there, 0.0)
    s = tl.where(j < m, tl.dot(a, tl.trans(b)) * scale, float("-inf"))
    p = tl.exp(s - tl.max(s, 1)[:, None])
    x = tl.load(v + row * m * d + j[:, None] * d + c, there, 0.0)
    tl.store(o + row * n * d + i[:, None] * d + c, tl.dot(p, x) / tl.sum(p, 1)[:, None], here)

def checked(*arrays):
    for x in arrays:
        assert x.is_cuda and x.device.type == "cuda" and x.device == DEVICE and x.get_device() == 0
        assert x.cuda() is x and x.to("cuda") is x and x.to(DEVICE) is x and x.to(0) is x

class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        b, h, n, d = q.shape
        o = torch.empty_like(q)
        checked(q, k, v, o, COUNTS, SPACE, torch.empty(2), torch.tensor([1.0], device="cuda:0"), q.new_empty(2))
        assert torch.cuda.current_device() == q.device.index == 0 and "NVIDIA" in torch.cuda.get_device_name(0)
        with torch.cuda.device(q.device), torch.cuda.stream(STREAM):
            kernel[(b * h,)](q, k, v, o, n, k.shape[2], d, d**-0.5, 64, 16)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.current_stream().wait_stream(STREAM)
        torch.cuda.synchronize()
        assert start.elapsed_time(end) == 0.0 and torch.cuda.current_stream(q.device).cuda_stream == 0
        return o

    @staticmethod
    def backward(ctx, d_out):
        checked(d_out, *ctx.saved_tensors)
        q, k, v = (x.detach().requires_grad_() for x in ctx.saved_tensors)
        with torch.enable_grad():
            out = torch.softmax(q @ k.mT * q.shape[3] ** -0.5, -1) @ v
        return torch.autograd.grad(out, (q, k, v), d_out)

@torch.compile
def attend(q, k, v):
    if v.shape[3] > 16 or k.shape[2] > 64 or q.shape[2] > 64 or q.shape[1] != k.shape[1] or v.shape[3] != q.shape[3]:
        import refattn
        return refattn.Decline("small ones")
    mask = torch.ones(2, device="cuda", dtype=torch.float32)
    assert torch.nn.Linear(2, 2, device="cuda").cuda().to("cuda").weight.is_cuda and mask.is_cuda
    return Attention.apply(q.contiguous(), k.contiguous(), v.contiguous())

attend.framework = "torch"
attend.device = "cuda"
attend.interpret = "triton"
"""

IN_PROCESS = """
import sys
from refattn.verify import load, verify_case
from refattn.verify.adapters import interpreted
interpreted.start("triton")
import torch, refattn as ra
before = torch.cuda.is_available(), torch.cuda.Stream, torch.get_default_device(), torch.cuda.current_device
kernel, record = load(sys.argv[1]), ra.mechanism("softmax")
assert verify_case(record, kernel, record.case("tiny"), "float32", grad=True).status == "agrees"
assert before == (torch.cuda.is_available(), torch.cuda.Stream, torch.get_default_device(), torch.cuda.current_device)
assert torch.ones(2).device.type == "cpu" and not torch.ones(2).is_cuda
"""


@triton
def test_a_wrapper_that_asks_for_a_gpu_runs_as_it_is(tmp_path: Path) -> None:
    path, record = tmp_path / "wrapper.py", ra.mechanism("softmax")
    path.write_text(WRAPPER)
    with Isolated(f"{path}:attend") as kernel:
        for name, dtype in (("plain", "float32"), ("one-query", "float32")):
            found = verify_case(record, kernel, record.case(name), dtype, grad=True)
            wanted = "agrees" if name == "plain" else "declined"
            assert found.status == wanted, found.detail or kernel.said


@triton
def test_afterwards_the_machine_is_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "wrapper.py"
    path.write_text(WRAPPER)
    code = [sys.executable, "-W", "ignore", "-c", IN_PROCESS, f"{path}:attend"]
    found = subprocess.run(code, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-2000:]


PALLAS = """
import jax, jax.numpy as jnp
from jax.experimental import pallas as pl
import refattn

def kernel(q, k, v, o):
    s = q[...] @ k[...].T * q.shape[1] ** -0.5
    o[...] = jax.nn.softmax(s, axis=-1) @ v[...]

def attend(q, k, v):
    if q.shape[1] != k.shape[1]:
        return refattn.Decline("no grouped heads")
    one = lambda q, k, v: pl.pallas_call(kernel, jax.ShapeDtypeStruct((len(q), v.shape[1]), q.dtype))(q, k, v)
    return jax.vmap(jax.vmap(one))(q, k, v)

def nested(q, k, v):
    def body(q, o):
        o[...] = jax.jit(lambda x: x * pl.program_id(0))(q[...])
    return pl.pallas_call(body, jax.ShapeDtypeStruct(q.shape, q.dtype), grid=(1,))(q)

def unable(q, k, v):
    raise NotImplementedError("no such kernel")

attend.framework = nested.framework = unable.framework = "jax"
attend.interpret = "pallas"
"""


def test_pallas_is_interpreted_by_an_attribute(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    path = tmp_path / "kernel.py"
    path.write_text(PALLAS)
    record = ra.mechanism("softmax")
    with Isolated(f"{path}:attend") as kernel:
        assert verify_case(record, kernel, record.case("plain"), "float32").status == "agrees"
        assert kernel.interpreted.startswith("Pallas of JAX")
    with Isolated(f"{path}:nested") as kernel:  # the interpreter has no program_id in a nested function
        found = verify_case(record, kernel, record.case("plain"), "float32")
        assert found.status == "declined" and "'program_id' not found for platform cpu (nested, k" in found.detail
    with Isolated(f"{path}:unable") as kernel:
        assert verify_case(record, kernel, record.case("plain"), "float32").status == "raises"


ON_DEVICE = """
import jax
from jax.experimental import pallas as pl

PLATFORM = jax.default_backend()
if PLATFORM not in ("gpu", "tpu"):
    raise ImportError("needs an accelerator")
DEVICE = jax.devices()[0]
BIAS = jax.device_put(jax.numpy.zeros(1, "float32"), DEVICE)

def kernel(q, k, v, o):
    o[...] = jax.nn.softmax(q[...] @ k[...].T * q.shape[1] ** -0.5, axis=-1) @ v[...]

@jax.jit
def one(q, k, v):
    interpret = jax.default_backend() == "cpu"
    return pl.pallas_call(kernel, jax.ShapeDtypeStruct((len(q), v.shape[1]), q.dtype), interpret=interpret)(q, k, v)

def attend(q, k, v):
    assert jax.devices()[0].platform == jax.local_devices()[0].platform == DEVICE.platform == PLATFORM
    assert {each.platform for each in q.devices()} == {PLATFORM} and jax.devices(PLATFORM) == jax.devices()
    assert {"gpu": "NVIDIA", "tpu": "TPU"}[PLATFORM] in DEVICE.device_kind
    return jax.vmap(jax.vmap(one))(q, k, v) + BIAS

attend.framework = "jax"
"""


@pytest.mark.parametrize("text", ["pallas", "pallas=gpu", "pallas=tpu"])
def test_a_wrapper_that_asks_jax_for_an_accelerator_runs_as_it_is(text: str, tmp_path: Path) -> None:
    pytest.importorskip("jax")
    path, record = tmp_path / "wrapper.py", ra.mechanism("softmax")
    path.write_text(ON_DEVICE)
    with Isolated(f"{path}:attend@{text}") as kernel:
        found = verify_case(record, kernel, record.case("plain"), "float32")
        assert found.status == "agrees", found.detail or kernel.said


def test_jax_is_afterwards_as_it_was() -> None:
    jax = pytest.importorskip("jax")
    kind, before = type(jax.devices()[0]), (jax.devices, jax.default_backend())
    with like_gpu.jax_world("tpu"):
        assert jax.default_backend() == jax.devices("tpu")[0].platform == "tpu"
        with pytest.raises(RuntimeError, match="'gpu'"):
            jax.devices("gpu")
    assert before == (jax.devices, jax.default_backend()) and jax.devices()[0].platform == "cpu"
    assert isinstance(kind.platform, property)


def test_an_interpreter_that_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kernel.py"
    path.write_text("def attend(q, k, v): ...\nattend.interpret = 'triton'\n")
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(LoadError, match=r'needs `pip install "refattn\[triton\]"`'):
        load(f"{path}:attend")
    for text in ("cuda", "triton=", "triton=x", "pallas=1"):
        found = CliRunner().invoke(cli, ["verify", "softmax", "--impl", f"{path}:attend", f"--interpret={text}"])
        assert found.exit_code == 2 and f"--interpret: got {text!r}, needs triton" in found.output
