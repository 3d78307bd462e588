"""What a reader of the tour of graph energy attention may set.

The step is short, so that the flow is seen to move. With longer ones than these, and more of them, the flow is chaotic:
rounding would decide what is shown.
"""

from refattn.mechanisms.record import Knob, Tour

TOUR = Tour(
    knobs=(
        Knob("kappa", "pull κ", 1.0, 0.0, 2.0, 0.05),
        Knob("tau", "threshold τ", 0.4, 0.01, 1.0, 0.01),
        Knob("step", "length h of a step", 0.1, 0.05, 0.8),
        Knob("steps", "steps", 20, 1, 30, 1),
    )
)
