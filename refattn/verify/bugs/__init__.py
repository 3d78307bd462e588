"""Known bugs: wrong kernels, a few lines long, most of them modelled on a report.

- `emulator.py`: a flash kernel in plain NumPy, tile by tile; each of its steps is a method.
- `fault.py`: a fault is such a kernel with one step that is `wrong`, a function, or with several, a class. It has
  words, the link of its report, and what it is an error of. And how a fault is run on a case.
- `readings.py`: the faults of which all is that a kernel follows a convention that the record has.
- `online.py` (the running maximum, sum and accumulator), `scores.py` (scale, soft-cap, width), `masks.py` (masks and
  causality), `memory.py` (layouts, strides, tiles that are stale), `splits.py` (parts that are merged, lse) and
  `gradients.py` (the backward): the faults.
- `recurrence.py`, a kernel of the linear recurrences in chunks, and its faults in `states.py`; `features.py`, one of
  higher-order attention by sums of features, and its faults in `sums.py`.

A fault without a link is plausible, and no report of it is known. The reports are of other people's kernels; words and
code are our own, and a report may be of a neighbour of the fault.
"""
