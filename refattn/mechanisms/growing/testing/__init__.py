"""How an implementation of the core is judged: designed calls and wrong readings."""
