"""What files and models call the arguments and results of attention: names of libraries, and what they are here."""

from __future__ import annotations

import re
from collections.abc import Iterable

ALIASES = {
    "q": ("query", "queries", "query_states", "query_layer", "xq"),
    "k": ("key", "keys", "key_states", "key_layer", "xk"),
    "v": ("value", "values", "value_states", "value_layer", "xv"),
    "out": ("o", "output", "attn_out", "attn_output", "attention_output", "result", "context_layer"),
    "lse": ("softmax_lse", "logsumexp", "log_sum_exp", "logits_lse"),
    "mask": ("attn_mask", "attention_mask"),
    "bias": ("attn_bias", "attention_bias"),
    "sink": ("sinks", "s_aux", "attn_sink", "attn_sinks"),
    "scale": ("sm_scale", "softmax_scale", "attn_scale", "scaling"),
    "causal": ("is_causal",),
    "softcap": ("soft_cap", "logit_softcap", "logits_soft_cap", "attn_logit_softcapping"),
    "window": ("window_size",),
    "state": ("initial_state",),
}
"""Names here -> those that libraries give to the same thing."""

_GRADIENTS = re.compile(r"d_?(?P<a>.+)|grad_(?P<b>.+)|(?P<c>.+)[._]grad")


def meaning(name: str, known: Iterable[str]) -> str:
    """Return the name here of what a file calls something else; "" where it is not known.

    >>> from refattn.verify.names import meaning
    >>> known = ("q", "k", "v", "out", "scale", "lse")
    >>> [meaning(name, known) for name in ("layers.0.query", "attn_output", "dq", "grad_output", "k.grad", "foo")]
    ['q', 'out', 'd_q', 'd_out', 'd_k', '']
    """
    known = {*known}
    if name in known or name.removeprefix("d_") in known:
        return name
    parts = name.lower().replace("-", "_").split(".")
    last = ".".join(parts[-2:]) if parts[-1] == "grad" else parts[-1]
    for one, others in ALIASES.items():
        if last == one or last in others:
            return one if one in known else ""
    if last in known:
        return last
    found = _GRADIENTS.fullmatch(last)
    stem = meaning(next(x for x in found.groups() if x), known) if found else ""
    return f"d_{stem}" if stem else ""


def renamed(text: str) -> dict[str, str]:
    """Return what `--rename` says: names of a file -> names here, "-" for what is left out."""
    found = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        theirs, equals, ours = (x.strip() for x in part.partition("="))
        if not (theirs and equals and ours):
            raise ValueError(f"got {part[:80]!r}, needs THEIRS=OURS such as query=q,attn_out=out; OURS - leaves it out")
        found[theirs] = ours
    return found
