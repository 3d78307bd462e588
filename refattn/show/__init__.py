"""``refattn show``: the definition of a mechanism as one file that runs on NumPy alone.

The file is made from the library's own source. `link` follows the names that the definition uses, `plain` stands in
for `refattn.xp`, `calls` finds the defaults by looking at what the core hands on, `prune` leaves out what only other
choices than these need, and `page` puts it together.
"""

from refattn.show.page import page

__all__ = ["page"]
