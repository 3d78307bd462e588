"""What is installed is the tree: by wheel, sdist, editable install or checkout, also from a clone without symlinks.

`backends/` stands beside `refattn/` and is imported as `refattn.backends`: in the tree through the symlink
`refattn/backends`, in a wheel because setup.py maps it. Every build here is made from a copy, without a network.
"""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from email import message_from_string
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = [".ci", ".github", "asv_benchmarks", "backends", "docs", "examples", "refattn", "tests", "tools"]
FILES = [
    *(".gitignore", ".pre-commit-config.yaml", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE"),
    *("MANIFEST.in", "Makefile", "README.md", "pyproject.toml", "setup.py"),
]
BACKENDS = ["cupy", "jax", "numpy", "strict", "torch"]
WAYS = ["symlink", "no symlink"]

KINDS = {"wheel": ["--wheel"], "wheel of sdist": []}
"""Options of `build`: without one it makes the sdist, and from it the wheel."""

BUILT = [("symlink", "wheel of sdist"), ("symlink", "wheel"), ("no symlink", "wheel"), ("no symlink", "wheel of sdist")]

Clones = dict[str, Path]
Built = dict[str, Path]


def run(*command: str | Path, cwd: Path) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert "Package would be ignored" not in done.stdout + done.stderr, "setuptools warns of a folder"
    return done.stdout


def files_under(folder: Path) -> set[str]:
    names = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file() and not p.is_symlink()}
    return {name for name in names if not name.startswith("refattn.egg-info/")}


def sources(clone: Path) -> set[str]:
    """The names that a wheel has to hold."""
    homes = {"refattn": clone / "refattn", "refattn/backends": clone / "backends"}
    return {f"{package}/{name}" for package, folder in homes.items() for name in files_under(folder)}


def wheel_names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert len(names) == len(set(names)), "a name stands twice in the wheel"
    return {name for name in names if ".dist-info/" not in name}


def sdist_names(sdist: Path) -> set[str]:
    with tarfile.open(sdist) as archive:
        return {member.name.partition("/")[2] for member in archive.getmembers() if not member.isdir()}


@pytest.fixture(scope="module")
def clones(tmp_path_factory: pytest.TempPathFactory) -> Clones:
    """The tree as git checks it out with `core.symlinks`, and without: the link is a file that holds its target."""
    ignore = shutil.ignore_patterns(
        "__pycache__", "*.py[cod]", "*.egg-info", ".*_cache", "_build", "learn", "env", "results"
    )
    made = {}
    for way in WAYS:
        clone = made[way] = tmp_path_factory.mktemp("clone")
        for name in FOLDERS:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, clone / name, symlinks=True, ignore=ignore)
        for page in ("calls", "judged", "code"):  # written by `make docs`
            for path in (clone / "docs" / "mechanisms").glob(f"*/{page}.md"):
                path.unlink()
        for name in FILES:
            shutil.copy(ROOT / name, clone / name)
        link = clone / "refattn" / "backends"
        link.unlink(missing_ok=True)  # an unpacked sdist has none
        if way == "symlink":
            link.symlink_to("../backends")
        else:
            link.write_text("../backends")
    return made


@pytest.fixture(scope="module")
def build(clones: Clones, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Built]:
    """Build from a clone, each once: the wheel and, where it is made from that, the sdist."""

    @functools.cache
    def build(way: str, kind: str) -> Built:
        out, clone = tmp_path_factory.mktemp("dist"), clones[way]
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, *KINDS[kind], clone, cwd=out)
        shutil.rmtree(clone / "build", ignore_errors=True)  # leftovers of one build must not help the next
        shutil.rmtree(clone / "refattn.egg-info")
        return {path.suffix: path for path in out.iterdir()}

    return build


@pytest.fixture(scope="module")
def dependencies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages installed here without refattn itself, so that only the copy under test can be imported."""
    folder = tmp_path_factory.mktemp("dependencies")
    for scheme in ("purelib", "platlib"):
        for path in Path(sysconfig.get_path(scheme)).iterdir():
            if "refattn" not in path.name and not (folder / path.name).exists():
                (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture
def look(dependencies: Path, tmp_path: Path) -> Callable[[Path], dict[str, Any]]:
    """Import refattn from a folder, in an interpreter that sees that folder, its .pth files and the dependencies."""
    code = """
import json, site, sys
from importlib import metadata
folder, dependencies = sys.argv[1:]
sys.path.insert(0, folder)
site.addsitedir(folder)
sys.path.append(dependencies)
import refattn, refattn.backends
print(json.dumps({
    "refattn": refattn.__file__,
    "backends": refattn.backends.__file__,
    "version": refattn.__version__,
    "points": {p.name: p.value for p in metadata.entry_points(group="refattn.backends")},
    "numpy": [p.load().name for p in metadata.entry_points(group="refattn.backends", name="numpy")],
    "command": [p.value for p in metadata.entry_points(group="console_scripts", name="refattn")],
}))
"""

    def look(folder: Path) -> dict[str, Any]:
        # -I: neither the environment nor the working directory adds a path; -S: nor does a .pth file of this install
        seen: dict[str, Any] = json.loads(
            run(sys.executable, "-B", "-I", "-S", "-c", code, folder, dependencies, cwd=tmp_path)
        )
        return seen

    return look


def assert_complete(seen: dict[str, Any]) -> None:
    assert seen["points"] == {name: f"refattn.backends.{name}:backend" for name in BACKENDS}
    assert seen["numpy"] == ["numpy"]
    assert seen["command"] == ["refattn.cli:main"]


def pip_install(target: Path, *what: str | Path) -> None:
    options: list[str | Path] = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", target]
    run(sys.executable, "-m", "pip", "install", *options, *what, cwd=target.parent)


def test_every_folder_with_python_files_is_a_package() -> None:
    folders = {p.parent for top in ("refattn", "backends") for p in (ROOT / top).rglob("*.py")}
    assert [str(f.relative_to(ROOT)) for f in sorted(folders) if not (f / "__init__.py").is_file()] == []


@pytest.mark.slow
@pytest.mark.parametrize(("way", "kind"), BUILT)
def test_what_is_built_holds_the_sources_and_nothing_else(
    clones: Clones, build: Callable[[str, str], Built], way: str, kind: str
) -> None:
    built = build(way, kind)
    names = wheel_names(built[".whl"])
    assert names == sources(clones["symlink"])
    assert {"refattn/__init__.py", "refattn/py.typed", "refattn/backends/__init__.py"} <= names
    assert {f"refattn/backends/{name}.py" for name in BACKENDS} <= names
    assert (".gz" in built) == (kind == "wheel of sdist")
    if ".gz" in built:
        names = {name for name in sdist_names(built[".gz"]) if not name.startswith("refattn.egg-info/")}
        assert names - {"PKG-INFO", "setup.cfg"} == files_under(clones["symlink"])


def test_the_oldest_dependencies_are_the_lower_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    chosen = [
        *project["dependencies"],
        *(x for name in ("plots", "torch", "jax", "onnx", "test") for x in extras[name]),
    ]
    wanted = {*chosen} - {"refattn[plots]"}
    lowest = dict(re.findall(r"^([a-z-]+)>=([\d.]+)", entry)[0] for entry in wanted)
    lines = (ROOT / ".ci" / "oldest.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.partition(" ")[0].split("==") for line in lines if line and not line.startswith("#"))
    assert {name: Version(pinned[name]) for name in lowest} == {name: Version(low) for name, low in lowest.items()}


@pytest.mark.slow
def test_an_installed_wheel_is_imported_from_where_it_was_installed(
    build: Callable[[str, str], Built], look: Callable[[Path], dict[str, Any]], tmp_path: Path
) -> None:
    target, wheel = tmp_path / "site", build("symlink", "wheel of sdist")[".whl"]
    pip_install(target, wheel)
    seen = look(target)
    assert seen["refattn"] == str(target / "refattn" / "__init__.py")
    assert seen["backends"] == str(target / "refattn" / "backends" / "__init__.py")
    assert wheel.name.startswith(f"refattn-{seen['version']}-")
    assert_complete(seen)


def test_links_and_pictures_work_where_the_package_is_published(
    clones: Clones, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_REPOSITORY", "someone/refattn")
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://example.org")
    made = "import sys\nfrom setuptools import build_meta\nbuild_meta.prepare_metadata_for_build_wheel(sys.argv[1])"
    run(sys.executable, "-c", made, tmp_path, cwd=clones["no symlink"])
    found = message_from_string(next(tmp_path.glob("*/METADATA")).read_text(encoding="utf-8"))
    urls = dict(line.split(", ") for line in found.get_all("Project-URL", []))
    assert urls["Repository"] == "https://example.org/someone/refattn" and len(urls) == 4
    text, tag = str(found.get_payload()), f"v{found['Version']}"
    links = re.findall(r"()\[[^]]*\]\(([^)]*)\)", text) + re.findall(r'\b(src|srcset)="([^"]*)"', text)
    assert len(links) > 6 and {picture for picture, _ in links} == {"", "src", "srcset"}
    for picture, link in (pair for pair in links if not pair[1].startswith("https://arxiv.org/")):
        place = f"https://example.org/someone/refattn/{'raw' if picture else 'blob'}/{tag}/"
        assert link.startswith(place) and (ROOT / link.removeprefix(place).partition("#")[0]).exists()
    assert "](docs" not in text and '="docs' not in text


@pytest.mark.parametrize("way", [pytest.param("symlink", marks=pytest.mark.slow), "no symlink"])
def test_an_editable_install_is_the_tree(
    clones: Clones, look: Callable[[Path], dict[str, Any]], tmp_path: Path, way: str
) -> None:
    target, clone = tmp_path / "site", clones[way]
    pip_install(target, "--editable", clone)
    seen = look(target)
    assert seen["refattn"] == str(clone / "refattn" / "__init__.py")
    assert Path(seen["backends"]).resolve() == clone / "backends" / "__init__.py"
    assert_complete(seen)


KERNELS = """
from guests import hopfield, power


def right_hopfield(q, k, v, **options):
    return hopfield.forward(q, k, v, **options)[0]


def wrong_hopfield(q, k, v, *, updates=2, **options):
    return hopfield.forward(q, k, v, updates=updates + 1, **options)[0]


def right_power(q, k, v, **options):
    return power.forward(q, k, v, **options)[0]


def wrong_power(q, k, v, *, p=2, **options):
    return power.forward(q, k, v, p=p + 2, **options)[0]
"""
"""Kernels of the mechanisms of examples/guests: right ones, and one of the wrong kernels that each record names."""


@pytest.fixture(scope="module")
def beside(build: Callable[[str, str], Built], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and, installed from its own folder, the package of examples/guests."""
    target, guests = tmp_path_factory.mktemp("beside"), tmp_path_factory.mktemp("source") / "guests"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    shutil.copytree(ROOT / "examples" / "guests", guests, ignore=ignore)
    pip_install(target, build("symlink", "wheel")[".whl"])
    pip_install(target, guests)
    return target


@pytest.mark.slow
@pytest.mark.parametrize(("guest", "option", "wrong"), [
    ("hopfield", "updates=3", "one update more"),
    ("power", "p=4", "the next power"),
])  # fmt: skip
@pytest.mark.parametrize("by", ["name", "MODULE:NAME"])
def test_every_command_takes_a_mechanism_installed_beside_the_wheel(
    beside: Path, tmp_path: Path, guest: str, option: str, wrong: str, by: str
) -> None:
    env = {name: x for name, x in os.environ.items() if not name.startswith("PYTHON")} | {"PYTHONPATH": str(beside)}
    mechanism = guest if by == "name" else f"guests.{guest}:record"

    def python(*words: str, code: int = 0) -> str:
        command = [sys.executable, *words]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == code, f"{words}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    refattn = functools.partial(python, "-m", "refattn")
    (tmp_path / "kernels.py").write_text(KERNELS)
    homes = python("-c", "import guests, refattn; print(refattn.__file__, guests.__file__)").split()
    assert homes == [str(beside / name / "__init__.py") for name in ("refattn", "guests")]
    assert f"\n{guest} " in refattn("list") and guest in refattn("list", mechanism, "--claims")
    exec(compile(refattn("show", mechanism), "shown.py", "exec"), {})
    assert f"guests/{guest}/definition.py:" in refattn("trace", mechanism)
    refattn("trace", mechanism, "--block", "--set", option)
    refattn("trace", mechanism, "--html", "tour.html")
    assert "no tour" not in (tmp_path / "tour.html").read_text(encoding="utf-8")
    refattn("verify", mechanism, "--quick", "--impl", f"kernels.py:right_{guest}")
    assert wrong in refattn("verify", mechanism, "--quick", "--impl", f"kernels:wrong_{guest}", code=1)
    refattn("golden", "write", "golden", mechanism)
    assert "all agree" in refattn("golden", "check", "golden", mechanism)
    small = {"width": 8, "heads": 2, "layers": 1, "context": 8, "batch": 2, "sample_bytes": 4, "score_bytes": 64}
    settings = [
        word for name, x in {**small, f"block.{option[:-2]}": option[-1]}.items() for word in ("--set", f"{name}={x}")
    ]
    refattn("train", mechanism, "--steps", "3", "--data", "repeats", "--out", "run", *settings)
    assert refattn("sample", "run", "--prompt", "a", "--bytes", "3", "--mechanism", mechanism).startswith("a")
    refattn("plot", "run", "--out", "curves.svg")
    refattn("analyse", "clusters", mechanism, "--particles", "3", "--end", "0.5", "--out", "clusters")
    refattn("analyse", "lyapunov", mechanism, "--run", "run", "--tokens", "3", "--out", "lyapunov")
    rows = json.loads(refattn("check", mechanism, "--json", "-"))["checks"][0]["rows"]
    assert {row["status"] for row in rows if row["section"] == "vectors"} == {"agrees"}
