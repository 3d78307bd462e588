"""What a reader of the tour of growing attention may set, and a head that has learned all that its columns allow."""

from collections.abc import Mapping
from typing import Any

from refattn.mechanisms.record import Knob, Tour
from refattn.ops.plain import softmax


def run(definition: Any, inputs: Mapping[str, Any], knobs: Mapping[str, Any], _: int) -> None:
    """Take one step of growth; the loss is how far the weights of each token are from the wanted ones."""
    width, y = knobs["width"], inputs["y"]
    w_q, w_k = (inputs[name][None, width - 1, :, :width] for name in ("w_q", "w_k"))
    heads = definition.heads_of(w_q, w_k, scale=float(inputs["scale"]))
    d_scores = softmax(y @ heads.kernel[0] @ y.T) - inputs["wanted"]
    planned = definition.plan(heads, definition.observe(y[None], d_scores[None, None]), damping=knobs["damping"])
    columns = definition.columns_of(planned, share=knobs["share"])
    definition.grow(heads, planned, columns=columns, amplitude=knobs["amplitude"])
    definition.slope_of(planned, columns)


TOUR = Tour(
    knobs=(
        Knob("width", "columns at first", 1, 1, 3, 1),
        Knob("share", "least part of a new column", 0.02, 0.0, 0.5),
        Knob("amplitude", "amplitude (step size)", 1.0, 0.0, 3.0),
        Knob("damping", "damping", 0.01, 0.0, 1.0),
    ),
    given={
        "scale": 0.5,
        "y": [
            [1.4, 0.1, 0.3, 1.1], [0.8, 0.6, -0.4, -1.0], [0.4, -0.5, 0.8, 0.2],
            [-0.7, 0.3, 0.7, 0.2], [-0.8, 0.3, 0.4, 0.8],
        ],
        # Each token should attend to the next, the last one to the first.
        "wanted": [[0.8 if j == (i + 1) % 5 else 0.05 for j in range(5)] for i in range(5)],
        # Trained with one, two and three columns until the loss no longer fell; the rest is zeros.
        "w_q": [
            [[-0.14, 0.0, 0.0], [-1.41, 0.0, 0.0], [2.26, 0.0, 0.0], [-2.02, 0.0, 0.0]],
            [[1.02, 1.39, 0.0], [0.87, -1.4, 0.0], [-2.25, 1.25, 0.0], [1.14, -2.39, 0.0]],
            [[-2.15, -0.47, 0.91], [2.61, 1.87, 2.19], [0.27, -1.36, 0.54], [-0.32, 0.81, -2.17]],
        ],
        "w_k": [
            [[-0.88, 0.0, 0.0], [1.36, 0.0, 0.0], [2.93, 0.0, 0.0], [-0.1, 0.0, 0.0]],
            [[0.78, -0.25, 0.0], [-2.03, -0.18, 0.0], [-1.49, 3.0, 0.0], [-1.09, -1.44, 0.0]],
            [[-1.17, 1.92, -0.88], [-1.64, -0.86, -2.82], [-2.31, -1.33, -1.35], [1.49, -0.14, -0.23]],
        ],
    },
    table={"y": 14},
    counts=(5, 5),  # as many as have wanted weights
    instead="the definition makes new weights from tokens and the gradient of a loss, and a call of the core is "
    'softmax attention, of which ra.explore("softmax", ...) is a tour',
    run=run,
)  # fmt: skip
