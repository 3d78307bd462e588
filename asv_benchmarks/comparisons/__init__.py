"""One comparison a file: `COMPARISON`, and the factories of its sides."""
