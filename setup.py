from setuptools import find_namespace_packages, setup

# backends/ is imported as refattn.backends, also where the symlink refattn/backends is absent or a plain text file.
# Namespace packages, too: the folders of the golden vectors hold data alone.
packages = find_namespace_packages(
    include=["refattn", "refattn.*"], exclude=["refattn.backends", "refattn.backends.*", "*.__pycache__"]
)
setup(packages=[*packages, "refattn.backends"], package_dir={"refattn.backends": "backends"})
