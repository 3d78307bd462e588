import os
import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

HERE = Path(__file__).parent


def published() -> str:
    """Return where the repository is published: the run that builds a release knows it; "" where nobody says."""
    name = os.environ.get("GITHUB_REPOSITORY")
    return f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{name}" if name else ""


def readme(address: str) -> str:
    """Return the README, with links and pictures that work away from the repository: those of this version's tag."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    if not address:
        return text
    version = re.findall(r'^__version__ = "(.*)"', (HERE / "refattn" / "__init__.py").read_text(encoding="utf-8"), re.M)

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[1] else "blob"
        return f"{link[1]}[{link[2]}]({address}/{kind}/v{version[0]}/{link[3]})"

    text = re.sub(r"(!?)\[([^]]*)\]\((?!https?:|#)([^)]*)\)", absolute, text)
    return re.sub(r'\b(src|srcset)="(?!https?:)', rf'\1="{address}/raw/v{version[0]}/', text)


def urls(address: str) -> dict[str, str]:
    """Return the links of the page on PyPI."""
    pages = {"Documentation": "docs/start.md", "Changelog": "CHANGELOG.md"}
    found = {"Repository": "", "Issues": "/issues", **{name: f"/blob/main/{page}" for name, page in pages.items()}}
    return {name: address + rest for name, rest in found.items()} if address else {}


# backends/ is imported as refattn.backends, also where the symlink refattn/backends is absent or a plain text file.
# Namespace packages, too: the folders of the golden vectors hold data alone.
packages = find_namespace_packages(
    include=["refattn", "refattn.*"], exclude=["refattn.backends", "refattn.backends.*", "*.__pycache__"]
)
setup(
    packages=[*packages, "refattn.backends"],
    package_dir={"refattn.backends": "backends"},
    long_description=readme(published()),
    long_description_content_type="text/markdown",
    project_urls=urls(published()),
)
