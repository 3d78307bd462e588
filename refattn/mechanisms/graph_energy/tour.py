"""What a reader of the tour of graph energy attention may set; a short step, so that the flow is seen to move."""

from refattn.mechanisms.record import Knob, Tour

TOUR = Tour(
    knobs=(
        Knob("kappa", "pull κ", 1.0, 0.0, 4.0, 0.05),
        Knob("tau", "threshold τ", 0.4, 0.01, 1.0, 0.01),
        Knob("step", "length h of a step", 0.1, 0.05, 1.6),
        Knob("steps", "steps", 20, 1, 40, 1),
    )
)
