// Formulas that compute: what a tour shows of a number, what it is made of, and its value are one tree.
//
// A mechanism's `tour.js` calls tour({ ... }) with these fields. Its text is the body of a function of DATA (the sentence
// tokens, q, k, v, target, which token it follows, and given numbers), S (S.i: the token that is followed, S.t: the step,
// S.at: the same between two steps, S.side: "forward" or "backward", S.view: that of the card that is read), K (knobs),
// V (V.w(i, j) is a number), F (F.w(i, j) is a node of a formula), J, D, E (the indices of tokens, of q and k, of v),
// knob("kappa") (a node), names([j, ...]), TYPED (the words are a reader's own)
// and attention({ ... }), the parts of `attention.js`.
//
//   quantities  { w: { id: "SM.4", axes: "ij", what: "weight", of: (i, j) => div(p(i, j), ...) }, ... }
//       id       the equation whose value it is, whole: all its elements are compared with the definition's
//       axes     a letter for each index: i j l n tokens, d e coordinates, t moves, T what moves lead to (one more)
//       of       its formula; without it, it is given (DATA), or `values`, a function in plain JavaScript, has its numbers
//       symbol   its letter, if that is not its name, or a function of the indices, which names the step itself;  what: its name in words
//       from     what its first step is called, if not 0
//       passes, back, since    of a quantity in time: V.x(t, ...) is pass t - passes of the equation; if `back`, pass 0
//                              is the last t; before `since` it is not compared
//   tokens, sizes    the letters that are tokens, if others than ijln; { m: () => length } of further letters
//   forward, backward    cards: { id, title, say, show, pick, bars, heading, draw, caption, alt, of, when, timed, formula, also, label }
//       bars, heading, draw    its picture: how, is said on top of `pictures.js`
//       caption, alt    what the picture shows, as a sentence of at most 175 characters below it, and as words for those who do
//                not see it
//       id       its equation, or several; formula and line of code are the definition's
//       say      a sentence, or a function that computes it;  of: what a backward card differentiates
//       show     ledgers, each a list of columns: "w", "w[i]" (row of the token that is followed), "w[,i]", "w[ii]", "x+1",
//                "x.first", "x.last";  pick: () => [name, ...index], the number that is spelled out first
//       when     where the step goes: "first", "last" or "step";  timed: it changes with the step
//       formula  in the notation of docstrings, for a card without an equation, which `label` names;  also: { label, formula }, one more
//       since    before this step there is nothing to show;  view: what of the picture it is about, which is S.view then
//   time        { steps: () => count, name: "step", first: () => the step that cards of a step begin with }
//   picture, height, label, caption    those of the first card, of the turn, of the gallery, and of cards that have none:
//               (W, H, small) => [marks]; W => H; what it shows; a sentence that holds at all settings
//   tasks       what a reader may try: [{ say, done: () => truth, own }], noticed when it is done; none is done at first;
//               own: it needs the tour's own words, and is not there for a reader's
//   tallest     W => how tall the picture is on the first card of a phone, if it is not to be as tall as there is room
//   phone       how tall the picture may be on the other cards of a phone, if not as tall as most
//   timeAt      (x, y) => the step there, for a picture that can be dragged;  living: the knob that moves a small picture
//   board       (W, H, small, card) => b: what is beside all pictures, if it is not the words and their bars
//   title, intro, turn, short    words, or functions that compute them; turn: LEARN by default
//
// Values are computed when they are asked for, once. Nothing here needs a browser.
"use strict";

// ---- trees -----------------------------------------------------------------------------------------------------------

const tree = (op) => (...parts) => ({ op, parts });
const add = tree("add"), sub = tree("sub"), mul = tree("mul"), div = tree("div"), neg = tree("neg"), pow = tree("pow");
const exp = tree("exp"), log = tree("log"), log1p = tree("log1p"), sqrt = tree("sqrt"), sin = tree("sin"), cos = tree("cos");
const tanh = tree("tanh"), abs = tree("abs"), lt = tree("lt"), ge = tree("ge");
const max = (list) => ({ op: "max", parts: list });
const sum = (list) => (list.length === 1 ? list[0] : { op: "add", parts: list });
const dot = (a, b) => sum(a.map((x, n) => mul(x, b[n])));
const choose = (condition, a, b) => ({ op: "choose", parts: [condition, a, b] });
const words = (text, a) => ({ op: "words", text, parts: [a] });
const isTrue = (truth, text) => ({ op: "truth", truth, text, parts: [] });

const VALUES = {
  add: (...x) => x.reduce((a, b) => a + b, 0),
  sub: (a, b) => a - b,
  mul: (...x) => x.reduce((a, b) => a * b, 1),
  div: (a, b) => a / b,
  neg: (a) => -a,
  pow: (a, b) => a ** b,
  lt: (a, b) => a < b,
  ge: (a, b) => a >= b,
  words: (a) => a,
};
for (const name of ["exp", "log", "log1p", "sqrt", "sin", "cos", "tanh", "abs", "max"]) VALUES[name] = Math[name];

// The parts that count: of a choice the condition and the branch that is taken.
const taken = (node, of) => (node.op === "choose" ? [node.parts[0], node.parts[of.evaluate(node.parts[0]) ? 1 : 2]] : node.parts);

// ---- a reader's own words ------------------------------------------------------------------------------------------------

// The vector of a word; `word_vector` of `build.py`, which is the same, states the rule.
function wordVector(word, name, width, most) {
  return Array.from({ length: width }, (_, c) => {
    let bits = 0x811c9dc5;
    for (const letter of `${name}.${c}.${word}`) bits = Math.imul(bits ^ letter.codePointAt(0), 0x01000193);
    for (const [shift, factor] of [[16, 0x85ebca6b], [13, 0xc2b2ae35], [16, 1]]) bits = Math.imul(bits ^ (bits >>> shift), factor);
    return (Math.floor(((bits >>> 0) * (2 * most + 1)) / 2 ** 32) - most) / 10;
  });
}

// The data of a tour with a reader's own words in place of its sentence, or a sentence that says why not.
const LONGEST = 14, COUNTED = ["no", "one", "two", "three", "four", "five", "six", "seven"];
function typed(data, text) {
  const words = text.split(/\s+/).filter(Boolean), { table, counts: [least, most] } = data.typed, long = words.find((word) => [...word].length > LONGEST);
  const needed = least === most ? COUNTED[least] : `${COUNTED[least]} to ${COUNTED[most]}`;
  if (words.length < least || words.length > most) return `This tour takes ${needed} words, with blanks between them: here ${words.length === 1 ? "is one" : `are ${COUNTED[words.length] ?? words.length}`}.`;
  if (long) return `A word may have up to ${LONGEST} letters: “${long}” has more.`;
  const arrays = Object.entries(table).map(([name, size]) => [name, words.map((word) => wordVector(word, name, data[name][0].length, size))]);
  const shown = words.map((word) => word.replace(/[&<>"']/g, (sign) => `&#${sign.codePointAt(0)};`));
  return { ...data, ...Object.fromEntries(arrays), target: [...data.target], tokens: shown, words };
}

// ---- a tour's numbers ------------------------------------------------------------------------------------------------

const TOKENS = "ijln", TIMES = "tT"; // letters of axes: moves are t, and what they lead to, one more, is T

class Numbers {
  // `data`: the sentence, given numbers, knobs. `write`: the function whose text is a mechanism's tour.js.
  constructor(data, write) {
    Object.assign(this, { data, write });
    this.knobs = Object.fromEntries(data.knobs.map((knob) => [knob.name, knob.value]));
    this.state = { i: data.follow, t: 0, side: "forward", view: "" };
    this.kept = {};
    const proxy = (make) => new Proxy({}, { get: (_, name) => (...at) => make(name, at) });
    const range = (count) => Array.from({ length: count }, (_, n) => n);
    this.nodes = proxy((name, at) => ({ op: "ref", name, at, parts: [] }));
    this.values = proxy((name, at) => this.number(name, at));
    const context = {
      DATA: data, S: this.state, K: this.knobs, V: this.values, F: this.nodes,
      J: range(data.tokens.length), D: range(data.q[0].length), E: range(data.v[0].length),
      TYPED: Boolean(data.words), knob: (name) => ({ op: "knob", name, parts: [] }),
      names: (list) => list.map((j) => `<i>${data.tokens[j]}</i>`).join(", ").replace(/, ([^,]*)$/, " and $1"),
      attention: (more) => attention(context, more), tour: (mechanism) => { this.mechanism = mechanism; },
    };
    write(context);
  }

  // Set knobs or the followed token; all is computed anew when it is asked for.
  set(knobs, follow) {
    Object.assign(this.knobs, knobs);
    if (follow !== undefined) this.state.i = follow;
    this.kept = {};
    this.state.t = Math.min(this.state.t, this.steps);
  }

  get steps() {
    return this.mechanism.time ? this.mechanism.time.steps() : 0;
  }

  isToken(letter) {
    return (this.mechanism.tokens ?? TOKENS).includes(letter);
  }

  // How long an axis is; `before`: the indices along the axes before it, as at step t there may be t of something.
  length(letter, before = []) {
    const own = this.mechanism.sizes?.[letter];
    if (own) return own(...before);
    return this.isToken(letter) ? this.data.tokens.length : this.data[letter === "e" ? "v" : "q"][0].length;
  }

  // Return a number; what it is made of is computed first.
  number(name, at) {
    const quantity = this.mechanism.quantities[name];
    if (!quantity) throw new Error(`${name}: no such quantity`);
    if (quantity.values || !quantity.of) {
      const all = (this.kept[name] ??= quantity.values ? quantity.values() : this.data[name]);
      return at.reduce((x, n) => x[n], all);
    }
    const kept = (this.kept[name] ??= new Map()), key = at.join();
    if (!kept.has(key)) kept.set(key, this.evaluate(quantity.of(...at)));
    return kept.get(key);
  }

  // Return the value of a tree.
  evaluate(node) {
    if (typeof node === "number") return node;
    if (node.op === "ref") return this.number(node.name, node.at);
    if (node.op === "knob") return Number(this.knobs[node.name]);
    if (node.op === "truth") return node.truth;
    if (node.op === "choose") return this.evaluate(taken(node, this)[1]);
    return VALUES[node.op](...node.parts.map((part) => this.evaluate(part)));
  }

  // Return all numbers of a quantity, as nested lists.
  whole(name) {
    const axes = [...(this.mechanism.quantities[name].axes ?? "")];
    const along = (at) =>
      at.length === axes.length
        ? this.number(name, at)
        : Array.from({ length: this.length(axes[at.length], at) }, (_, n) => along([...at, n]));
    return along([]);
  }

  // Return the tree of a number, or undefined if it is given.
  formula(name, at) {
    return this.mechanism.quantities[name].of?.(...at);
  }

  // Return the numbers that a tree reads, as "name.index.index".
  reads(node) {
    if (node === undefined || typeof node === "number") return [];
    if (node.op === "ref") return [[node.name, ...node.at].join(".")];
    return taken(node, this).flatMap((part) => this.reads(part));
  }
}

// ---- as text and as MathML -------------------------------------------------------------------------------------------

const GREEK = { alpha: "α", beta: "β", gamma: "γ", epsilon: "ε", kappa: "κ", mu: "μ", tau: "τ", eta: "η", lambda: "λ", pi: "π", sigma: "σ", phi: "φ", psi: "ψ" };

const RAISED = Object.fromEntries([..."-0123456789"].map((digit, n) => [digit, "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"[n]]));

// A number in at most five characters and a sign; exact where it has one decimal.
function show(x) {
  if (typeof x === "boolean") return x ? "yes" : "no";
  if (!Number.isFinite(x)) return Number.isNaN(x) ? "?" : x > 0 ? "∞" : "−∞";
  const size = Math.abs(x), sign = x < 0 ? "−" : "";
  if (Number.isInteger(size) && size < 1e4) return sign + size;
  if (size > 0.05 && size < 1e4 && Math.abs(size * 10 - Math.round(size * 10)) < 1e-11) return sign + size.toFixed(1);
  if (size < 1e-13) return "≈ 0"; // what is left of a difference that is 0 but for rounding
  if (size >= 1e4 || size < 5e-5) return sign + size.toExponential(1).replace(/e\+?(.*)/, (_, power) => `·10${[...power].map((c) => RAISED[c]).join("")}`);
  return sign + (size >= 100 ? size.toFixed(1) : size >= 10 ? size.toFixed(2) : size >= 9.5e-3 ? size.toFixed(3) : size.toFixed(4));
}

const percent = (x) => `${Math.round(100 * x)} %`;

// Shares of one as percents that add up to 100: those cut most are rounded up.
function percents(shares) {
  const cut = shares.map((x) => Math.floor(100 * x + 1e-9)), order = shares.map((x, n) => [cut[n] - 100 * x, n]).sort((a, b) => a[0] - b[0]);
  const missing = Math.round(100 * shares.reduce((a, b) => a + b, 0)) - cut.reduce((a, b) => a + b, 0);
  order.slice(0, missing).forEach(([, n]) => { cut[n] += 1; });
  return cut.map((x) => `${x} %`);
}
const BINDS = { add: 1, sub: 1, neg: 1, mul: 2, div: 3, pow: 4, words: 0, choose: 0, lt: 0, ge: 0, truth: 0 };
const MOST = 8; // terms of a sum that are shown; of a longer one some are told together

// A long sum with its middle as one number: it still adds up.
function shortened(parts, of) {
  if (parts.length <= MOST) return parts;
  const middle = parts.slice(3, -1);
  return [...parts.slice(0, 3), { op: "rest", count: middle.length, parts: middle, value: of.evaluate({ op: "add", parts: middle }) }, parts.at(-1)];
}

// MathML of a number with the sign that it has; `first` if nothing stands before it.
function digits(x, first, mark = "") {
  const number = `<mn${mark}>${show(x)}</mn>`; // the sign is a part of what is marked
  return first || !(x < 0) ? number : `<mo stretchy="false">(</mo>${number}<mo stretchy="false">)</mo>`;
}

const BREAK = "\u0001", WITHIN = "\u0002"; // a line may be broken here; here only if the term is wider than a line
const longSum = ({ op, parts }) => op === "add" && parts.length > 3;
const breaks = ({ op, parts }) => op === "add" || op === "sub" || (op === "mul" && parts.some(longSum)) || (op === "div" && longSum(parts[0]) && parts[1].op !== "add");
const wideProduct = ({ op, parts }) => op === "mul" && parts.some((part) => part.op === "sub" && part.parts.some((x) => x.op === "mul"));

// MathML of a tree with its numbers, as text with breaks. `level`: how strongly what is around it binds; `whole`: the mark
// of a break, or nothing where there is no place for one.
function typeset(node, of, level = 0, first = true, whole = BREAK) {
  const inner = (part, strength = 0, begins = true) => typeset(part, of, strength, begins, "");
  const open = '<mo stretchy="false">(</mo>', close = '<mo stretchy="false">)</mo>';
  const call = (name, args) => `<mi>${name}</mi><mo>&#8289;</mo>${open}${args}${close}`;
  if (typeof node === "number") return digits(node, first);
  const { op, parts } = node, cut = whole;
  const part = (x, strength, begins) => typeset(x, of, strength, begins, whole);
  const term = (x, strength, begins) => typeset(x, of, strength, begins, breaks(x) ? whole : whole && wideProduct(x) ? WITHIN : ""); // a line breaks between terms
  if (op === "ref") return digits(of.evaluate(node), first, ` data-ref="${[node.name, ...node.at].join(".")}"`);
  if (op === "knob") return digits(of.evaluate(node), first, ` data-knob-value="${node.name}"`);
  if (op === "rest") return `<mrow><mo stretchy="false">[</mo><mtext>${node.count} more:&#160;</mtext>${digits(node.value, true)}<mo stretchy="false">]</mo></mrow>`;
  if (op === "truth") return `<mtext>${node.text}</mtext>`;
  if (op === "words") return `${part(parts[0], 0, first)}<mtext>&#160;${node.text}</mtext>`;
  if (op === "choose") {
    const [condition, branch] = taken(node, of);
    return `${part(branch, 0, first)}${cut}<mtext>,&#160;as&#160;</mtext>${told(condition, of)}`;
  }
  if (op === "exp") return `<msup><mi>e</mi><mrow>${inner(parts[0])}</mrow></msup>`;
  if (op === "sqrt") return `<msqrt>${inner(parts[0])}</msqrt>`;
  if (op === "div" && cut && breaks(node))
    return `<mo stretchy="false">(</mo>${typeset(parts[0], of, 0, true, cut)}<mo stretchy="false">)</mo><mo>/</mo>${inner(parts[1], 3, false)}`; // a long fraction has no place for a break
  if (op === "div") return `<mfrac><mrow>${inner(parts[0])}</mrow><mrow>${inner(parts[1])}</mrow></mfrac>`;
  if (op === "pow") return `<msup><mrow>${inner(parts[0], 4.5, false)}</mrow>${inner(parts[1])}</msup>`;
  if (op === "abs") return `<mo stretchy="false">|</mo>${inner(parts[0])}<mo stretchy="false">|</mo>`;
  if (op === "log1p") return call("log", `<mn>1</mn><mo>+</mo>${inner(parts[0], 1, false)}`);
  if (op === "max") return call("max", parts.map((x) => inner(x)).join("<mo>,</mo>"));
  if (VALUES[op] && !(op in BINDS)) return call(op, inner(parts[0]));
  const own = BINDS[op], wrap = level > own || (own === level && !first && own === 1);
  const begins = first || wrap;
  let text;
  if (op === "add") text = parts.length ? shortened(parts, of).map((x, n) => (n ? `${cut}<mo form="infix">+</mo>` : "") + term(x, n ? 1.5 : 1, begins && !n)).join("") : "<mn>0</mn>";
  else if (op === "sub") text = `${term(parts[0], 1, begins)}${cut}<mo form="infix">−</mo>${term(parts[1], 1.5, false)}`;
  else if (op === "neg") text = `<mo form="prefix">−</mo>${part(parts[0], 1.5, false)}`;
  else text = parts.map((x, n) => (n ? `${cut === WITHIN ? WITHIN : ""}<mo form="infix">·</mo>` : "") + part(x, n ? 2.5 : 2, begins && !n)).join("");
  return wrap ? open + text + close : text;
}

// MathML of a condition: what is compared, in numbers.
function told(condition, of) {
  const { op, parts } = condition;
  if (op === "truth") return `<mtext>${condition.text}</mtext>`;
  const holds = of.evaluate(condition), sign = { lt: ["&lt;", "≥"], ge: ["≥", "&lt;"] }[op][holds ? 0 : 1];
  return `${typeset(parts[0], of, 0, true, "")}<mo>${sign}</mo>${typeset(parts[1], of, 0, true, "")}`;
}

const lines = (text, mark, each) => text.split(mark).map(each).join(" ");
const piece = (text) => `<math displaystyle="true"><mrow>${text}</mrow></math>`;
const pieces = (text) => lines(text, BREAK, (term) => (term.includes(WITHIN) ? `<span class="term">${lines(term, WITHIN, piece)}</span>` : piece(term)));

// The letter of a quantity with its scripts: words for tokens, numbers from 1 for coordinates, and the step above.
function symbol(of, name, at) {
  const quantity = of.mechanism.quantities[name], axes = quantity.axes ?? "";
  const scripts = [...axes].map((letter, n) => {
    if (TIMES.includes(letter)) return null;
    if (at[n] === undefined) return `<mi>${letter}</mi>`;
    return of.isToken(letter) ? `<mtext class="word">${of.data.tokens[at[n]]}</mtext>` : `<mn>${at[n] + 1}</mn>`;
  }).filter(Boolean);
  const words = scripts.some((script) => script.includes("mtext"));
  const own = typeof quantity.symbol === "function" ? quantity.symbol(...at) : undefined; // it names the step itself
  const step = own === undefined && TIMES.includes(axes[0]) && at[0] !== undefined ? `<mrow><mo stretchy="false">(</mo><mn>${at[0] + (quantity.from ?? 0)}</mn><mo stretchy="false">)</mo></mrow>` : "";
  let letter = own ?? quantity.symbol ?? name, before = "";
  if (letter.startsWith("d_")) [before, letter] = ['<mi mathvariant="normal">d</mi>', letter.slice(2)];
  else if (/^d./.test(letter) && !GREEK[letter] && of.mechanism.quantities[letter.slice(1)]) [before, letter] = ['<mi mathvariant="normal">d</mi>', letter.slice(1)];
  else if (/^d./.test(letter) && quantity.id?.startsWith("d")) [before, letter] = ['<mi mathvariant="normal">d</mi>', letter.slice(1)];
  const [stem, under] = letter.replace(/'$/, "").split("_");
  const base = `<mi>${GREEK[stem] ?? stem}</mi>`, marked = letter.endsWith("'") ? `<mrow>${base}<mo lspace="0" rspace="0">′</mo></mrow>` : base;
  if (under) scripts.unshift(`<mi>${under}</mi>`);
  const below = scripts.length ? `<mrow>${scripts.join(words || under ? "<mo>,</mo>" : "")}</mrow>` : "";
  const scripted = below && step ? `<msubsup>${marked}${below}${step}</msubsup>` : below ? `<msub>${marked}${below}</msub>` : step ? `<msup>${marked}${step}</msup>` : marked;
  return before + scripted;
}

// A formula with its numbers as MathML: w_bank = 0.483 = 1 / (0.025 + ...).
function spelled(of, name, at) {
  const formula = of.formula(name, at), mark = ` data-ref="${[name, ...at].join(".")}"`;
  const head = `${symbol(of, name, at)}<mo>=</mo>${digits(of.number(name, at), true, mark)}`;
  return pieces(formula === undefined ? head : `${head}${BREAK}<mo>=</mo>${typeset(formula, of)}`);
}

// A formula as words of a screen reader.
const spoken = (markup) =>
  markup
    .replaceAll("</mrow><mrow>", " over ")
    .replace(/<msqrt>/g, " the root of ")
    .replace(/<msup>/g, " ")
    .replace(/<[^>]*>/g, " ")
    .replaceAll("&#160;", " ").replaceAll("&#8289;", "").replaceAll("&lt;", "<")
    .replaceAll("·", "times").replaceAll("−", "minus ").replace(/\s+/g, " ").trim();

// Compare all numbers with those of the definition, by the ids of equations; of a quantity in time by their passes.
Numbers.prototype.compare = function compare(python) {
  const found = { numbers: 0, worst: 0, where: "", ids: [] };
  const against = (name, mine, id) => {
    const flat = [mine].flat(Infinity), theirs = python[id];
    if (theirs === undefined || flat.length !== theirs.length) Object.assign(found, { worst: Infinity, where: `${name} (${id}: ${flat.length} numbers, ${theirs?.length} in Python)` });
    else {
      found.ids.push(id);
      flat.forEach((x, n) => {
        const y = Number(theirs[n]), off = x === y ? 0 : Math.abs(x - y) / Math.max(1, Math.abs(y));
        found.numbers += 1;
        if (!(off <= found.worst)) Object.assign(found, { worst: Number.isNaN(off) ? Infinity : off, where: `${name} (${id})` });
      });
    }
  };
  for (const [name, quantity] of Object.entries(this.mechanism.quantities)) {
    const whole = this.whole(name);
    // What has a formula and values: one has to be the other.
    if (quantity.of && quantity.values) {
      const along = (x, at) => Array.isArray(x) ? x.map((y, n) => along(y, [...at, n])) : this.evaluate(quantity.of(...at));
      const mine = [along(whole, [])].flat(Infinity), theirs = [whole].flat(Infinity);
      mine.forEach((x, n) => { found.numbers += 1; const off = Math.abs(x - theirs[n]); if (!(off <= found.worst)) Object.assign(found, { worst: off, where: name }); });
    }
    if (!quantity.id) continue;
    if (!TIMES.includes((quantity.axes || " ")[0])) against(name, whole, quantity.id);
    else whole.forEach((one, t) => {
      const pass = (quantity.back ? whole.length - 1 - t : t) - (quantity.passes ?? 0);
      if (pass >= 0 && t >= (quantity.since ?? 0)) against(name, one, pass ? `${quantity.id}[${pass}]` : quantity.id);
    });
  }
  return found;
};
