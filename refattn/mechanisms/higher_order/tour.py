"""What a reader of the tour of higher-order attention may set; with a small alpha the polynomial is seen to err."""

from refattn.mechanisms.record import Knob, Tour

TOUR = Tour(
    knobs=(
        Knob("order", "order of the polynomial", 2, 1, 5, 1),
        Knob("alpha", "divisor α (temperature)", 1.2, 0.7, 4.0, 0.05),
        Knob("causal", "hide later keys (causal)", False),
    ),
    words={  # three elements: of two, the normalisation would leave only signs
        "q": [[0.6, -0.2, 1.4], [1.3, -0.9, 0.2], [-0.4, 1.5, 0.1], [1.1, 0.3, -1.2], [0.2, 1.6, -0.6]],
        "k": [[-0.8, 0.4, 1.9], [0.1, -1.2, 0.8], [1.4, 0.9, -1.1], [0.7, 1.3, 0.3], [1.7, -0.2, -0.3]],
    },
)
