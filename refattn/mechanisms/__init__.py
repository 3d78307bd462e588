"""One folder for each mechanism; `registry` is the only page that lists them."""
