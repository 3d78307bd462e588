"""One run of a mechanism as a page that a reader steps through: `refattn trace MECHANISM --html FILE`.

- `measured`: the values of a run, and of each number what it is made of and what it feeds: measured, not declared.
- `varied`: the same run with other inputs, for the page to show where the reader turns a knob.
- `mathml`: formulas of docstrings, typeset.
- `pictures`: what is drawn on top, by what the record of the mechanism says.
- `page`: all of it as one file, with `page.html`, `page.css` and `page.js`.
"""
