"""What a reader of the tour of softmax attention may set."""

from refattn.mechanisms.record import Knob, Tour

TOUR = Tour(knobs=(Knob("causal", "hide what comes later", False),))
