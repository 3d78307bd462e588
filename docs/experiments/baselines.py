"""What experiments compare with beside the mechanisms of the library: records, and what results call them."""

from __future__ import annotations

from docs.experiments import linear_attention, linear_attention_block, repeated_attention
from refattn.mechanisms.block import Block
from refattn.mechanisms.record import Mechanism

# A model reads the name, the block and what it reads; what other tools would ask for is left empty.
LINEAR_ATTENTION = Mechanism(
    name="linear_attention",
    title="Linear attention",
    source="Katharopoulos et al. 2020 (arXiv:2006.16236); Shen et al. 2018 (arXiv:1812.01243)",
    equation_modules=(),
    loops=linear_attention,
    implementations=(),
    defaults={},
    context_fields=("causal",),
    core=None,
    block=Block(linear_attention_block, "Linear attention", ("causal",)),
    cases=(),
    properties=(),
)

REPEATED_ATTENTION = Mechanism(
    name="repeated_attention",
    title="Repeated attention",
    source="the update of Koopman attention with the identity in place of its operator",
    equation_modules=(),
    loops=repeated_attention,
    implementations=(),
    defaults={},
    context_fields=("causal", "draws"),
    core=None,
    block=Block(repeated_attention, "Repeated attention", ("causal", "draws")),
    cases=(),
    properties=(),
)

RECORDS: dict[str, Mechanism] = {
    f"{__name__}:{name}": record
    for name, record in (("LINEAR_ATTENTION", LINEAR_ATTENTION), ("REPEATED_ATTENTION", REPEATED_ATTENTION))
}
"""By what runs and their results call them."""
