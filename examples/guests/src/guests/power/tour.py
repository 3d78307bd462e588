"""What a reader of the tour of power attention may set."""

from refattn.mechanisms.record import Knob, Tour

TOUR = Tour(knobs=(Knob("p", "power p", 2, 2, 8, 2),))
