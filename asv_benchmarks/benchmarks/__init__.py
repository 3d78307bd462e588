"""What asv runs: benchmarks over all records, so that a mechanism that joins the registry is measured by itself."""

from __future__ import annotations

import ctypes
import os
import sys

import threadpoolctl

BY_ASV = __name__ == "benchmarks"
"""Whether asv itself imports this; `asv_benchmarks` imports it under another name, in processes that it set up."""

MALLOC = {-3: 32 << 20, -1: 1 << 30, -2: 64 << 20}
"""Numbers of mallopt that make glibc keep what is freed; see `STEADY` in `asv_benchmarks/sides.py`."""

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "REFATTN_WORKERS")
"""What holds a library that is loaded later to a number of threads. NumPy is there already: asv loads it."""

if BY_ASV:  # in asv's settings they would stand in the name of every environment, and `--python=same` ignores them
    os.environ.update(dict.fromkeys(THREADS, "1") | os.environ)
    threadpoolctl.threadpool_limits(1)
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        for parameter, size in MALLOC.items():
            libc.mallopt(parameter, size)
