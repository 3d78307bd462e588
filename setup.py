from setuptools import find_packages, setup

# backends/ is imported as refattn.backends, also where the symlink refattn/backends is absent or a plain text file.
packages = find_packages(include=["refattn", "refattn.*"], exclude=["refattn.backends", "refattn.backends.*"])
setup(packages=[*packages, "refattn.backends"], package_dir={"refattn.backends": "backends"})
