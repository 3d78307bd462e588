"""What a reader of the tour of Hopfield attention may set."""

from refattn.mechanisms.record import Knob, Tour

TOUR = Tour(
    knobs=(
        Knob("beta", "inverse temperature β", 0.7, 0.05, 3.0, 0.05),
        Knob("updates", "number of updates", 4, 1, 8, 1),
    ),
)
