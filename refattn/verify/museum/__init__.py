"""A museum of real bugs: wrong flash kernels, each modelled on a report and a few lines long.

- `emulator.py`: a flash kernel in plain NumPy, tile by tile; each of its steps is a method.
- `fault.py`: a fault is such a kernel with some steps changed, its words, the link of its report, and what it is an
  error of; and how a fault is run on a case.
- `online.py` (the running maximum, sum and accumulator), `scores.py` (scale, soft-cap, width), `masks.py` (masks and
  causality), `memory.py` (layouts, strides, tiles that are stale), `splits.py` (parts that are merged, lse) and
  `gradients.py` (the backward): the faults.

The reports are of other people's kernels; words and code are our own, and a report may be of a neighbour of the fault.
"""
