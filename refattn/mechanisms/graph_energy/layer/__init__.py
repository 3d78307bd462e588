"""The mechanism as a layer: the block and its numbers, decoding, levels of tokens, shared parameters, regularisers."""
