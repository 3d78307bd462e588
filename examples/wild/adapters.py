"""Adapters of the packages that docs/wild.md names, those of docs/kernels.md excepted.

Where a package has two paths, a plain one and a fast one, the adapter gives options the meaning of the plain one.
"""

import runpy
from importlib.metadata import distribution

import torch

import refattn


def of_file(package, place, name):
    """Return a class of a file that is run alone: the package imports much that its attention does not need."""
    return runpy.run_path(str(distribution(package).locate_file(place)))[name]


def adapter(run, *options):
    """Return the adapter of a function of q, k, v, a mask and whether it is causal, bottom right."""

    def attend(q, k, v, *, mask=None, causal=False, scale=None):
        if causal == "top_left" and q.shape[2] != k.shape[2]:
            return refattn.Decline("causal masks are aligned bottom right")
        given = {"mask": mask, "causal": bool(causal), "scale": scale}
        if any(given[name] is not None and given[name] is not False for name in {*given} - {*options}):
            return refattn.Decline(f"it takes {', '.join(options)}")
        return run(q, k, v, **{name: given[name] for name in options})

    attend.framework = "torch"
    attend.supports = {"n": {"at_least": 1}, "where": ["h = g", "e = d"], "options": list(options)}
    return attend


def memory_efficient_flash(q, k, v, causal):
    from memory_efficient_attention_pytorch.flash_attention import FlashAttentionFunction

    return FlashAttentionFunction.apply(q, k, v, None, causal, 512, 512)


def megabyte_flash(q, k, v, causal):
    from MEGABYTE_pytorch.attend import Attend

    return Attend(causal=causal, flash=True)(q, k, v)


def megabyte_eager(q, k, v, mask):
    from MEGABYTE_pytorch.attend import Attend

    if mask is not None and (mask.ndim != 4 or mask.shape[1:3] != (1, 1)):
        return refattn.Decline("masks of keys alone")
    return Attend()(q, k, v, mask=None if mask is None else mask[:, 0, 0].expand(q.shape[0], -1))


def denoising_flash(q, k, v, scale):
    attend = of_file("denoising-diffusion-pytorch", "denoising_diffusion_pytorch/attend.py", "Attend")
    return attend(flash=True, scale=scale)(q, k, v)


def audiolm_flash(q, k, v, causal):
    attend = of_file("audiolm-pytorch", "audiolm_pytorch/attend.py", "Attend")
    if k.shape[1] != 1:
        return refattn.Decline("one key head")
    return attend(causal=causal, flash=True)(q, k[:, 0], v[:, 0])


def soundstorm_flash(q, k, v, causal):
    attend = of_file("soundstorm-pytorch", "soundstorm_pytorch/attend.py", "Attend")
    return attend(causal=causal, flash=True)(q, k, v)


def aule_cpu(q, k, v, causal, scale):
    import aule

    aule._forced_backend = "cpu"
    return aule.flash_attention(q, k, v, causal=causal, scale=scale)


def curated(q, k, v, causal):
    from curated_transformers.layers.attention import AttentionMask, ScaledDotProductAttention

    every = AttentionMask(torch.ones(q.shape[0], k.shape[2], dtype=torch.bool))
    attend = ScaledDotProductAttention(dropout_prob=0.0, linear_biases=None)
    return attend(query=q, key=k, value=v, attention_mask=every, use_causal_mask=causal)


memory_efficient_flash = adapter(memory_efficient_flash, "causal")
megabyte_flash = adapter(megabyte_flash, "causal")
megabyte_eager = adapter(megabyte_eager, "mask")
denoising_flash = adapter(denoising_flash, "scale")
audiolm_flash = adapter(audiolm_flash, "causal")
audiolm_flash.supports |= {"g": 1, "where": ["e = d"]}
soundstorm_flash = adapter(soundstorm_flash, "causal")
aule_cpu = adapter(aule_cpu, "causal", "scale")
curated = adapter(curated, "causal")
