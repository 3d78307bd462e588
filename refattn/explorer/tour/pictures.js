// Pictures of tours: keyed marks, which move from one card to the next; scales, and labels that do not overlap.
//
// A card states its picture in three fields: `bars: ["s", "score s"]`, a bar beside each word for a quantity of the followed
// one, and what it is; `heading`, what stands above the place to their right; and `draw: (b) => [marks]`, which draws there,
// from b.left and b.top on, b.wide by b.size pixels; b.quiet: without words, as it is small. Bars may also be `["n", "links",
// [2]]`, at these indices, or `[numbers, "told", (j) => reference]`; any of the three may be a function. A quantity of vectors
// has bars as long as these. Or `picture: (W, H, small) => [marks]` draws all of W by H pixels; `small`: in the gallery,
// without words. The tour's own picture may return such a card, and its `board`, if it has one, takes (W, H, small, card) and
// returns b with `drawn` in place of bars. What several tours draw is in `attention.js`.
//
// A mark is an element of SVG with a key. If the next card has a mark of the same key and tag, the page moves the one to
// the other in 300 ms: numbers (x, r, opacity, ...) and the numbers within `d`, `points` and `transform` if the text
// around them is the same. A mark that is new fades in, one without a successor fades out. With reduced motion all is
// still. So let a key name the thing, not its place: "key.2" is the third key on every card, as arrow, bar or point.
//
//   mark("dot.2", "circle", { cx, cy, r, style: `fill:${color(2)}` })     any element; lists of marks may be nested
//   vector("pull.2", x, y, to, at, { style })    an arrow                 bar("bar.2", x, y, width, height, j)
//   point("dot.2", x, y, r, j)    a filled circle                           line("line.2", [[x, y], ...], { class: "hair" })
//   cell("m.0.2", x, y, width, height, number, most)    of a heat map     label("name.2", x, y, "bank", { class: "name" })
//   rows(names, S.i, y, width)    the words, one below the other, y(j) high: who clicks one follows it
//   bars(numbers, left, right, y, high, ref)    a bar for each word, to the left and the right of a zero line
//   beside(names, S.i, W, H, small, numbers, told, heading, ref)    the words with bars, and where there is room to their right
//   feet(at, points, along)    of points on a line        meeting(...), aimed(...)    values about their mean, what is wished for
//   grid("cell", x, y, width, height, rows)    a matrix as a heat map
//   plane(x, y, size, points, wide)    a square for points: `ground`, `X(p)`, `Y(p)`; `back(x, y)` is the point at a place
//
// The last argument of mark and point, `drag: (x, y) => { DATA.k[2] = at.back(x, y); }`, lets a reader drag it, by mouse,
// finger and arrow keys; give it an "aria-label". The page computes all anew. Let the plane be made of the points as they
// were at first, so that it stays. Text of SVG in the list (a ground, words) has no key and changes at once. `data-ref:
// "w.1.2"` shows the formula of a number, `data-word: j` follows a word. Between two steps of time a picture reads S.at.
// Tests compare the marks of the cards of a side without text: no two may be the same; every key is there once; names of
// all words are drawn at 362 x 112, too; nothing reads NaN at any setting. `../../mechanisms/softmax/tour.js` is the example.

const svg = (tag, set = {}, inner = "") =>
  `<${tag} ${Object.entries(set).map(([key, x]) => `${key}="${typeof x === "number" ? +x.toFixed(2) : x}"`).join(" ")}>${inner}</${tag}>`;
const text = (x, y, inner, set = {}) => svg("text", { x, y, ...set }, inner);
const color = (j) => `var(--c${j % 8})`;
const scale = (low, high, from, to) => (x) => from + ((x - low) / (high - low || 1)) * (to - from);

// Positions as near as may be to what they are, in their order, none nearer to the next than `gap`.
function spread(positions, gap, low, high) {
  const order = positions.map((_, n) => n).sort((a, b) => positions[a] - positions[b]), made = [];
  order.forEach((n, rank) => { made[n] = Math.max(positions[n], rank ? made[order[rank - 1]] + gap : low); });
  for (let rank = order.length - 1, most = high; rank >= 0; rank -= 1) {
    made[order[rank]] = Math.min(made[order[rank]], most);
    most = made[order[rank]] - gap;
  }
  return made;
}

// Low and high of both coordinates of points, as a square with some room around it.
function bounds(points, room = 0.15) {
  const of = (c) => [Math.min(...points.map((p) => p[c])), Math.max(...points.map((p) => p[c]))];
  const [[l, r], [b, t]] = [of(0), of(1)], half = (0.5 + room) * Math.max(r - l, t - b, 1e-6);
  return [(l + r) / 2 - half, (l + r) / 2 + half, (b + t) / 2 - half, (b + t) / 2 + half];
}

// The corners of the convex hull of points, in order.
function hull(points) {
  const sorted = [...points].sort((a, b) => a[0] - b[0] || a[1] - b[1]), turn = (o, a, b) => (a[0] - o[0]) * (b[1] - o[1]) - (a[1] - o[1]) * (b[0] - o[0]);
  const half = (list) => list.reduce((made, p) => {
    while (made.length > 1 && turn(made.at(-2), made.at(-1), p) <= 0) made.pop();
    return [...made, p];
  }, []);
  const [low, high] = [half(sorted), half(sorted.toReversed())];
  return points.length < 2 ? points : [...low.slice(0, -1), ...high.slice(0, -1)];
}

// A plane in a square, or wider than high: its ground, its axes, and the functions that place a point.
function plane(x, y, size, points, wide = size) {
  const [l, r, b, t] = bounds(points), X = scale(l, r, x + (wide - size) / 2, x + (wide + size) / 2), Y = scale(b, t, y + size, y);
  const inside = (at, low, high) => at > low && at < high;
  const ground =
    svg("rect", { x, y, width: wide, height: size, rx: 6, class: "plane" }) +
    (inside(X(0), x, x + wide) ? svg("path", { d: `M${X(0)} ${y}V${y + size}`, class: "axis" }) : "") +
    (inside(Y(0), y, y + size) ? svg("path", { d: `M${x} ${Y(0)}H${x + wide}`, class: "axis" }) : "");
  const back = (px, py) => [scale(X(0), X(1), 0, 1)(Math.max(x, Math.min(x + wide, px))), scale(Y(0), Y(1), 0, 1)(Math.max(y, Math.min(y + size, py)))].map((at) => Math.round(10 * at) / 10);
  return { X: (p) => X(p[0]), Y: (p) => Y(p[1]), unit: size / (r - l), back, ground, box: [x, y, x + wide, y + size] };
}

// Writes names beside marks, where no other name stands: above, below, to the right or the left, or not at all. `taken`:
// boxes [left, top, right, bottom] where none may stand; `avoided`: where one may if there is no other place.
function labels(W, H, high, taken = [], left = 0, top = 0, avoided = []) {
  return (name, x, y, half, look, order = [0, 1, 2, 3]) => {
    const wide = name.length * high * (look.includes("strong") ? 0.66 : 0.56), sides = [[x, y - half - 4, "middle"], [x, y + half + high - 1, "middle"], [x + half + 3, y + high / 3, "start"], [x - half - 3, y + high / 3, "end"]];
    for (const there of avoided.length ? [[...taken, ...avoided], taken] : [taken]) for (const [at, base, anchor] of order.map((n) => sides[n])) {
      const from = at - { start: 0, middle: wide / 2, end: wide }[anchor], box = [from, base - high * 0.8, from + wide, base + 2];
      if (box[0] < left || box[2] > W || box[1] < top || box[3] > H || there.some((other) => box[0] < other[2] && other[0] < box[2] && box[1] < other[3] && other[1] < box[3])) continue;
      taken.push(box);
      return text(at, base, name, { "text-anchor": anchor, class: look });
    }
    return "";
  };
}

const TIP = '<defs><marker id="tip" orient="auto" markerWidth="5" markerHeight="6" refX="4" refY="3"><path d="M0 0L5 3L0 6z"/></marker></defs>';
const arrow = (x, y, to, at, set = {}) => svg("path", { d: `M${x} ${y}L${to} ${at}`, class: "push", "marker-end": "url(#tip)", ...set });

// What can be clicked to follow a token.
const follows = (j, label, inner, set = {}) =>
  svg("g", { "data-word": j, tabindex: 0, role: "button", "aria-label": `follow ${label}`, ...set }, inner);

// The ground behind a number: its sign as a colour, its size beside the largest one as the strength of it.
const heat = (x, most) => `rgba(var(--${x < 0 ? "minus" : "plus"}), ${(0.55 * Math.min(1, Math.abs(x) / most)).toFixed(3)})`;

// ---- marks, which a page moves from card to card -----------------------------------------------------------------------

const mark = (key, tag, set, inner = "", drag = undefined) => ({ key, tag, set, inner, drag });
const inSvg = ({ key, tag, set, inner, drag }) => svg(tag, drag ? { ...set, "data-drag": key, tabindex: 0, role: "button" } : set, inner);
const written = (marks) => [marks].flat(Infinity).map((one) => (typeof one === "string" ? one : one ? inSvg(one) : "")).join("");
const at_ = (x) => +x.toFixed(2) || 0;

const label = (key, x, y, inner, set = {}) => mark(key, "text", { x, y, ...set }, inner);
const point = (key, x, y, r, j, set = {}, drag = undefined) => mark(key, "circle", { cx: x, cy: y, r, style: `fill:${color(j)}`, class: "dot", ...set }, "", drag);
const line = (key, points, set = {}) => mark(key, "path", { d: `M${points.map(([x, y]) => `${at_(x)} ${at_(y)}`).join("L")}`, class: "hair", ...set });
const cross = (key, x, y, half = 4) => mark(key, "path", { d: `M${at_(x - half)} ${at_(y - half)}L${at_(x + half)} ${at_(y + half)}M${at_(x + half)} ${at_(y - half)}L${at_(x - half)} ${at_(y + half)}`, class: "cross" });
const cell = (key, x, y, width, height, number, most, set = {}) =>
  mark(key, "rect", { x, y, width, height, rx: Math.min(3, width / 6), "fill-opacity": Number.isFinite(number) ? 0.05 + 0.5 * Math.min(1, Math.abs(number) / (most || 1)) : 0, style: `fill:rgb(var(--${number < 0 ? "minus" : "plus"}))`, ...set });

// An arrow, whose head is a part of its line, so that it moves with it and has its colour.
function vector(key, x, y, to, at, set = {}) {
  const long = Math.hypot(to - x, at - y), head = Math.min(8, 0.6 * long), [c, s] = long > 1e-9 ? [(to - x) / long, (at - y) / long] : [1, 0];
  const side = (turn) => `${at_(to - head * (c - turn * 0.5 * s))} ${at_(at - head * (s + turn * 0.5 * c))}`;
  return mark(key, "path", { d: `M${at_(x)} ${at_(y)}L${at_(to)} ${at_(at)}M${side(1)}L${at_(to)} ${at_(at)}L${side(-1)}`, class: "vector", ...set });
}

// A bar from a zero line to where its number is, on either side.
const bar = (key, zero, y, to, high, j, set = {}) =>
  mark(key, "rect", { x: Math.min(zero, to), y: y - high / 2, width: Math.max(0.8, Math.abs(to - zero)), height: high, rx: 2, style: `fill:${color(j)}`, ...set });

// Bars of numbers between two places, around a zero line where it has to be, each with its number if there is room; null: none.
function bars(numbers, left, right, y, high, ref = undefined) {
  const finite = numbers.filter(Number.isFinite), low = Math.min(0, ...finite), most = Math.max(0, ...finite), room = high >= 12 ? 46 : 0;
  const X = scale(low, most || (low ? 0 : 1), left + (low ? room : 0), right - (most ? room : 0)), zero = X(0);
  return [
    line("zero", [[zero, y(0) - high], [zero, y(numbers.length - 1) + high]], { class: "axis" }),
    numbers.map((x, j) => {
      const to = Number.isFinite(x) ? X(x) : zero, before = x < 0 && Number.isFinite(x);
      return [
        bar(`bar.${j}`, zero, y(j), to, high, j),
        room && x !== null ? label(`told.${j}`, to + (before ? -5 : 5), y(j) + 4, show(x), { "text-anchor": before ? "end" : "start", class: "share", ...(ref ? { "data-ref": ref(j) } : {}) }) : [],
      ];
    }),
  ];
}

// The words, one below the other: who clicks one follows it.
const rowHigh = (y) => Math.max(12, Math.min(26, y(1) - y(0)));
const rows = (names, followed, y, width, small = false) =>
  names.map((name, j) =>
    follows(j, name,
      svg("rect", { x: 0, y: y(j) - rowHigh(y) / 2, width, height: rowHigh(y), rx: 6, class: "ground" }) + svg("circle", { cx: 8, cy: y(j), r: 4, style: `fill:${color(j)}` }) + text(17, y(j) + 4, name),
      { class: j === followed ? "word followed" : "word" }));

// A matrix, a list of rows, as a heat map in a box: its cells, and its numbers where they fit.
function grid(key, x, y, width, height, all, ref = undefined, most = undefined) {
  const size = most ?? Math.max(1e-12, ...all.flat().map(Math.abs)), wide = width / all[0].length, high = height / all.length;
  return all.map((row, i) => row.map((z, j) => [
    cell(`${key}.${i}.${j}`, x + j * wide + 1, y + i * high + 1, Math.max(0.5, wide - 2), Math.max(0.5, high - 2), z, size),
    wide < 46 || high < 15 ? "" : text(x + (j + 0.5) * wide, y + (i + 0.5) * high + 4, show(z), { "text-anchor": "middle", ...(ref ? { "data-ref": ref(i, j) } : {}) }),
  ]));
}

// ---- the words with a bar each, and to their right what a card is about ------------------------------------------------

const flat = (p) => [p[0], p[1] ?? 0]; // of wider vectors the first two numbers are drawn
const put = (list, [x, y], by = 1) => { if (by) [x, y].slice(0, list.length).forEach((z, c) => { list[c] = z / by; }); };
const enlarged = (length, room) => [1, 2, 5, 10, 20, 50, 100].findLast((times) => times * length <= room) ?? 1;

// Where things are; the words, and a bar for each, which is told, too, by its reference.
function beside(names, followed, W, H, small, numbers, told, heading, ref = undefined) {
  const narrow = W < 420, top = small || narrow ? 6 : 26, n = names.length, y = scale(0, Math.max(1, n - 1), top + 14, H - 16), thick = (H - top) / n;
  const wide = Math.max(narrow ? 70 : 92, 20 + Math.max(...names.map((name) => name.length)) * (narrow ? 6.2 : 7.4)), left = Math.round(narrow ? W * 0.48 : W * 0.42), high = narrow ? 7 : Math.min(22, 0.4 * thick);
  const head = small || narrow ? "" : text(0, 12, told, { class: "title" }) + text(left + 10, 12, heading, { class: "title" });
  const drawn = [head, rows(names, followed, y, wide, small), bars(numbers, wide + 4, left - 14, y, small ? 7 : high, ref)];
  return { drawn, narrow, small, top, left: left + (narrow ? 0 : 10), y, names: wide, size: H - top - 4, wide: W - left - (narrow ? 0 : 10), quiet: small || narrow };
}

// The feet of points on the line along a direction.
function feet(at, points, along, quiet) {
  const size = along[0] ** 2 + along[1] ** 2, [l, t, r, b] = at.box, [mx, my] = [at.X([0, 0]), at.Y([0, 0])], far = size ? Math.min(...[[l, r, mx, along[0]], [t, b, my, -along[1]]].map(([low, high, m, d]) => (d ? Math.min(high - m, m - low) / Math.abs(d) : Infinity))) : 0;
  const reach = size ? far : 0, end = (s) => [mx + s * reach * along[0], my - s * reach * along[1]];
  return [
    line("along", [end(-1), end(1)], { class: "hair dashed" }),
    points.map((p, j) => {
      const share = size ? (p[0] * along[0] + p[1] * along[1]) / size : 0, foot = along.map((x) => share * x);
      return [
        line(`drop.${j}`, [[at.X(p), at.Y(p)], [at.X(foot), at.Y(foot)]], { class: "hair dashed", style: `stroke:${color(j)}` }),
        mark(`foot.${j}`, "circle", { cx: at.X(foot), cy: at.Y(foot), r: quiet ? 2 : 3.5, class: "foot", style: `fill:var(--paper);stroke:${color(j)}`, "stroke-width": 2 }),
      ];
    }),
  ];
}

// Values as points, each as large as its share, within the hull of those that are seen, and their mean; what is below 0 is hollow.
function meeting(b, at, names, points, shares, seen, out, tied, drag, side = 1) {
  const place = (p) => [at.X(p), at.Y(p)], radius = (j) => (b.narrow ? 2.5 : 4) + (b.narrow ? 5 : 13) * Math.sqrt(Math.min(1, Math.abs(shares[j])));
  return [
    at.ground,
    mark("hull", "path", { d: `M${hull(points.filter((_, j) => seen(j))).map((p) => place(p).map(at_).join(" ")).join("L")}Z`, class: "hull" }),
    tied ? points.map((p, j) => line(`tie.${j}`, [place(p), place(out)], { class: "flow", style: `stroke:${color(j)}`, "stroke-width": Math.max(0.3, 12 * Math.min(1, Math.abs(shares[j]))), opacity: seen(j) ? 0.5 : 0 })) : [],
    points.map((p, j) => [
      point(`dot.${j}`, ...place(p), radius(j), j, { ...(shares[j] < 0 ? { style: `fill:var(--paper);stroke:${color(j)}` } : {}), opacity: seen(j) ? 1 : 0.35, "aria-label": `drag the value of ${names[j]}` }, (x, y) => drag(j, at.back(x, y))),
      b.quiet ? [] : label(`name.${j}`, ...((x, y) => [x, y + (y > b.top + b.size / 2 ? radius(j) + 14 : -radius(j) - 5)])(...place(p)), names[j], { "text-anchor": "middle", class: "name" }),
    ]),
    mark("out", "circle", { cx: at.X(out), cy: at.Y(out), r: b.quiet ? 4 : 7, class: "sink" }),
    b.quiet ? [] : label("out name", at.X(out) + 11 * side, at.Y(out) - 8, "o", { class: "name strong", "text-anchor": side < 0 ? "end" : "start" }),
  ];
}

// What is wished for, which can be dragged.
const aimed = (b, at, goal, drag, name = "t", side = -1) => [
  cross("goal", at.X(goal), at.Y(goal), b.quiet ? 3 : 5),
  mark("goal hold", "circle", { cx: at.X(goal), cy: at.Y(goal), r: 12, class: "ground", "aria-label": "drag the wanted output" }, "", (x, y) => drag(at.back(x, y))),
  b.quiet ? [] : label("goal name", at.X(goal) + 9 * side, at.Y(goal) - 9, name, { class: "name strong", "text-anchor": side < 0 ? "end" : "start" }),
];

// ---- moving ------------------------------------------------------------------------------------------------------------

// Between two values of an attribute: numbers, and texts that differ in their numbers alone.
const NUMBER = /-?\d+(?:\.\d+)?/g, SHAPES = ["d", "points", "transform"];
function blend(a, b, part, name) {
  if (typeof a === "number" && typeof b === "number") return a + part * (b - a);
  if (!SHAPES.includes(name) || typeof a !== "string" || a.replace(NUMBER, "#") !== b.replace(NUMBER, "#")) return b;
  const from = a.match(NUMBER) ?? [];
  let n = 0;
  return b.replace(NUMBER, (x) => at_(blend(Number(from[n++]), Number(x), part)));
}

// The marks of a picture on the way from another: `part` goes from 0 to 1.
function halfway(from, to, part) {
  const old = new Map(from.filter((one) => one.key).map((one) => [`${one.tag} ${one.key}`, one])), coming = new Set(to.map((one) => `${one.tag} ${one.key}`));
  const fade = (one, share) => ({ ...one, drag: undefined, set: { ...one.set, opacity: share * (one.set.opacity ?? 1) } });
  const gone = from.filter((one) => one.key && !coming.has(`${one.tag} ${one.key}`)).map((one) => fade(one, 1 - part));
  return [
    ...gone,
    ...to.map((one) => {
      const before = one.key && old.get(`${one.tag} ${one.key}`);
      if (!one.key) return one;
      if (!before) return fade(one, part);
      const set = Object.fromEntries(Object.entries({ opacity: 1, "fill-opacity": 1, ...one.set }).map(([name, x]) => [name, blend(before.set[name] ?? x, x, part, name)]));
      return { ...one, set };
    }),
  ];
}

// Bars as a card states them: [a quantity, what it is, indices] or [numbers, what they are, j => reference]; of a quantity those of the followed token,
// now, or at the indices; or, if it has coordinates, how long it is.
Numbers.prototype.bars = function bars([what, told, at = undefined]) {
  const { state, mechanism } = this, tokens = this.data.tokens.map((_, j) => j);
  if (typeof what !== "string") return [what, told, at];
  const axes = [...mechanism.quantities[what].axes], vectors = !this.isToken(axes.at(-1)) && axes.pop();
  const t = TIMES.includes(axes[0]) ? [Math.min(state.t, this.length(axes[0]) - (axes[0] === "T" ? 2 : 1))] : [], before = at ?? [...t, ...(axes.length - t.length > 1 ? [state.i] : [])];
  if (vectors) return [tokens.map((j) => Math.hypot(...Array.from({ length: this.length(vectors) }, (_, c) => this.number(what, [...before, j, c])))), told];
  return [tokens.map((j) => this.number(what, [...before, j])), told, (j) => [what, ...before, j].join(".")];
};

// The marks of a card, of the tour where it has none of its own.
Numbers.prototype.marks = function marks(card, W, H, small = false) {
  const value = (x) => (typeof x === "function" ? x() : x), drawn = card?.draw ? card : (card?.picture ?? this.mechanism.picture)(W, H, small);
  if (!drawn.draw) return [drawn].flat(Infinity).filter(Boolean);
  const stated = { ...drawn, bars: value(drawn.bars), heading: value(drawn.heading) ?? "" }, [numbers, told, ref] = this.mechanism.board ? [] : this.bars(stated.bars);
  const b = this.mechanism.board?.(W, H, small, stated) ?? beside(this.data.tokens, this.state.i, W, H, small, numbers, told, stated.heading, ref);
  return [b.drawn, drawn.draw(b)].flat(Infinity).filter(Boolean);
};
Numbers.prototype.drawing = function drawing(card, W, H, small = false) {
  return written(this.marks(card, W, H, small));
};

// What shows marks in an element of the page; where there is something to move and the reader wants it, in 300 ms.
class Stage {
  constructor(box) {
    Object.assign(this, { box, marks: [], moving: 0, size: "" });
  }

  show(marks, open, size, from = undefined) {
    cancelAnimationFrame(this.moving);
    this.moving = 0;
    const put = (all) => {
      const focus = ["data-word", "data-drag"].map((name) => [name, document.activeElement?.getAttribute(name)]).find(([, x]) => x);
      this.marks = all;
      this.box.innerHTML = `${open}${written(all)}</svg>`;
      if (focus) this.box.querySelector(`[${focus[0]}="${focus[1]}"]`)?.focus();
    };
    const same = this.size === size && from?.some((one) => one.key), began = performance.now();
    this.size = size;
    if (!same) return put(marks);
    const frame = () => {
      const gone = Math.min(1, (performance.now() - began) / 300), part = gone * gone * (3 - 2 * gone);
      this.moving = gone < 1 ? requestAnimationFrame(frame) : 0;
      put(gone < 1 ? halfway(from, marks, part) : marks);
    };
    frame();
  }
}
