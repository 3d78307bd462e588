"""A tour of a mechanism: one page that explains it, step by step, forward and backward, with knobs that compute.

- `build`: the page as one file, and the definition's own numbers, with which a page compares its own when it opens.
- `formulas.js`: formulas that compute. What a page shows of a number, what it is made of and its value are one tree.
- `pictures.js`: marks, scales, labels, bars, and the words; `attention.js`: pictures that several mechanisms have;
  `linear.js`: linear algebra of small matrices.
- `page.js`, `page.css`, `page.html`: the page around them.
- `words.json`: the sentence of all tours, so that two of them can be compared.

A mechanism brings two files of its folder. `tour.py` has ``TOUR``, which says what may be set and how the definition is
called. `tour.js` has the formulas by the ids of their equations, the cards, a picture and its caption; how it is
written stands on top of `formulas.js`. Formulas and lines of code on a card are the definition's own.
"""
