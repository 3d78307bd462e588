"""One room a mechanism; `registry` is the only page that lists them."""
