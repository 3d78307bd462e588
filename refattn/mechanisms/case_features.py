"""What a case asks of a kernel, as a set of names: its options and arrays, and the classes of sizes it falls in.

Kernels fail where two features meet: `tests/mechanisms/test_case_features.py` holds that every pair is in a case.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from refattn.mechanisms.record import Case

MANY = (64, 128, 512)
"""Numbers of keys beyond which a kernel has one more tile or chunk, or one more part of the keys."""


def features(case: Case) -> frozenset[str]:
    """Return the features of a case of any mechanism, derived from its inputs and options alone.

    >>> import refattn as ra
    >>> from refattn.mechanisms.case_features import features
    >>> sorted(features(ra.mechanism("softmax").case("one-query")))
    ['causal', 'more than one batch', 'one query', 'other lengths of queries and keys']
    """
    q, k, v = (case.inputs[name].shape for name in "qkv")
    arrays = {name: x for name, x in case.inputs.items() if name not in "qkv"}
    # Arrays with numbers for each token and head are one choice together: the rule of a recurrence.
    gates = {name: x.axes for name, x in arrays.items() if x.axes.startswith("bgn")}
    rule = " and ".join(f"{name} by channel" if len(axes) > 3 else name for name, axes in gates.items())
    found = {
        f"gates {rule or 'absent'}": bool(case.inputs["q"].axes),
        "one query": q[2] == 1,
        "2 to 8 queries": 2 <= q[2] <= 8,
        "more than 64 queries": q[2] > 64,
        **{f"more than {size} keys": k[2] > size for size in MANY},
        "a head wider than 64": q[3] > 64,
        "values wider than keys": v[3] > q[3],
        "values narrower than keys": v[3] < q[3],
        **(
            {
                "queries share a state": q[1] > v[1],
                "states share a query": q[1] < v[1],
                "states share a key": k[1] < v[1],
            }
            if case.inputs["q"].axes
            else {"grouped heads": q[1] > k[1]}
        ),
        "more than one batch": q[0] > 1,
        "other lengths of queries and keys": q[2] != k[2],
    }
    options = {name for name, value in case.options.items() if (name, value) != ("causal", False)}
    return frozenset(options | ({*arrays} - {*gates}) | {name for name, has in found.items() if has})


def fewest(cases: Sequence[Case]) -> tuple[Case, ...]:
    """Return cases that have every feature of all once: as few as a greedy choice needs, each with few options.

    A kernel declines a case of which it lacks an option, and does the others: sizes are in cases without options.

    >>> import refattn as ra
    >>> from refattn.mechanisms.case_features import features, fewest
    >>> record = ra.mechanism("softmax")
    >>> few = fewest(record.cases)
    >>> frozenset.union(*map(features, few)) == frozenset.union(*map(features, record.cases)), len(few) < 25
    (True, True)
    """
    size = {case.name: sum(math.prod(x.shape) for x in case.inputs.values()) for case in cases}
    odd = {case.name for case in cases if case.exact or case.slack or 0 in (size[case.name], *case.inputs["k"].shape)}
    given = {case.name: len({*case.options, *case.inputs} - {*"qkv"}) for case in cases}
    of = {case.name: features(case) for case in cases}
    left = frozenset().union(*of.values())
    found: set[str] = set()
    for most in sorted({*given.values()}):
        pool = [case.name for case in cases if given[case.name] <= most]
        while left & frozenset().union(*(of[name] for name in pool)):
            best = max(pool, key=lambda name: (len(left & of[name]), name not in odd, -size[name]))
            left -= of[best]
            found.add(best)
    return tuple(case for case in cases if case.name in found)
