"""Instructions of a call, counted by valgrind: no clock, no other process, hardly any noise."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import refattn

from .common import MECHANISMS

HOMES = [str(Path(str(refattn.__file__)).parents[1]), str(Path(__file__).resolve().parents[__package__.count(".") + 1])]

CODE = f"""
import ctypes, gc, sys
sys.path[:0] = {HOMES!r}
from {__package__}.common import block_call
call = block_call(sys.argv[1], 64, 64, "float32", "numpy").both
call()
gc.disable()
compare = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(lambda a, b: call() and 0)
ctypes.CDLL(None).qsort(ctypes.create_string_buffer(16), 2, 8, compare)
"""
"""A C function that Python does not use otherwise calls what is counted, for valgrind counts inside of a C function."""

ALONE = {"REFATTN_WORKERS": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
"""Which of several threads takes a task is a matter of time, and only the first one's instructions are counted."""

COUNT = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", "--collect-atstart=no"]


class Instructions:
    """Forward and backward of a block. valgrind knows no AVX-512, so libraries take their kernels for AVX2."""

    version = "1"
    timeout = 300.0
    unit = "instructions"
    kind = "instructions"
    param_names = ["mechanism"]
    params = [MECHANISMS]

    def setup(self, mechanism: str) -> None:
        if shutil.which("valgrind") is None:
            raise NotImplementedError("valgrind is not installed")

    def track_both(self, mechanism: str) -> int:
        command = [*COUNT, "--toggle-collect=qsort_r", sys.executable, "-c", CODE, mechanism]
        env = {**os.environ, **ALONE}
        done = subprocess.run(command, env=env, capture_output=True, text=True, encoding="utf-8", check=False)
        found = re.search(r"Collected : (\d+)", done.stderr)
        if done.returncode or not found or int(found[1]) == 0:
            raise RuntimeError(f"valgrind counted nothing: {done.stderr.strip().splitlines()[-1]}")
        return int(found[1])
