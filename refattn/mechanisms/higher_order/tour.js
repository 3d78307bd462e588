// The tour of higher-order attention: formulas, cards, picture.

const { q, k, v, mean_q, var_q, mean_k, var_k, q1, k1, s, w, z, o, phi, psi, M, N, top, under, held, counted, along_q, along_k } = F;
const { do: dout, dz, dw, slope, ds, dq1, dk1 } = F;
const EPS = 1e-5, P = () => Array.from({ length: K.order + 1 }, (_, r) => r); // the powers
const factorial = (r) => (r < 2 ? 1 : r * factorial(r - 1));
const divisor = () => mul(knob("alpha"), sqrt(D.length));
const hidden = (i, j) => K.causal && j > i;
const mean = (x) => div(sum(x), D.length);
const spread2 = (x, middle) => div(sum(x.map((y) => pow(sub(y, middle), 2))), D.length);
const term = (x, r) => (r === 0 ? 1 : r === 1 ? x : div(pow(x, r), factorial(r)));
const taylor = (x, p) => Array.from({ length: p + 1 }, (_, r) => x ** r / factorial(r)).reduce((a, b) => a + b, 0);
const best = () => largest(J.map((j) => V.w(S.i, j)));
const most = () => largest(J.map((j) => Math.abs(V.ds(S.i, j))));
const main = () => largest(J.map((j) => Math.abs(V.mean_k(j)))); // the key with most to be taken off
const draw = attention({ hidden, weights: () => J.map((j) => V.w(S.i, j) / V.z(S.i)) }), { word } = draw;
const normal = (x, middle, variance) => div(sub(x, middle), sqrt(add(variance, EPS)));
const back = (x, n, variance, grad, along) => div(sub(sub(grad(x), mean(D.map(grad))), mul(n(x), along)), sqrt(add(variance, EPS)));

// The products of the state: how often each element is a factor, up to the order. For three elements and order 2 there
// are ten: none, three elements, and six products of two.
const kept = {};
function products() {
  const from = (c, left) => (c === D.length ? [[]] : Array.from({ length: left + 1 }, (_, n) => n).flatMap((n) => from(c + 1, left - n).map((rest) => [n, ...rest])));
  const degree = (powers) => powers.reduce((a, b) => a + b, 0);
  return (kept[K.order] ??= from(0, K.order).sort((a, b) => degree(a) - degree(b) || b.join().localeCompare(a.join())));
}
const read = (i) => (K.causal ? i + 1 : J.length); // how many keys are in the state that a query reads
const named = (powers) => powers.map((n, c) => (n ? `k${"′"}${"₁₂₃₄₅₆₇₈₉"[c] ?? c + 1}${["", "", "²", "³", "⁴", "⁵"][n]}` : "")).join("") || "1";

const quantities = {
  ...GIVEN, do: draw.gradient,
  mean_q: { axes: "i", symbol: "mean_q", what: "mean of a query", of: (i) => mean(D.map((c) => q(i, c))) },
  var_q: { axes: "i", symbol: "var_q", what: "variance of a query", of: (i) => spread2(D.map((c) => q(i, c)), mean_q(i)) },
  mean_k: { axes: "j", symbol: "mean_k", what: "mean of a key", of: (j) => mean(D.map((c) => k(j, c))) },
  var_k: { axes: "j", symbol: "var_k", what: "variance of a key", of: (j) => spread2(D.map((c) => k(j, c)), mean_k(j)) },
  q1: { id: "HOL.1", axes: "id", symbol: "q'", what: "query of mean 0 and variance 1", of: (i, c) => normal(q(i, c), mean_q(i), var_q(i)) },
  k1: { id: "HOL.2", axes: "jd", symbol: "k'", what: "key of mean 0 and variance 1", of: (j, c) => normal(k(j, c), mean_k(j), var_k(j)) },
  s: { id: "HOL.3", axes: "ij", what: "score", of: (i, j) => mul(div(1, divisor()), dot(D.map((c) => q1(i, c)), D.map((c) => k1(j, c)))) },
  w: {
    id: "HOL.4", axes: "ij", what: "weight",
    of: (i, j) => (K.causal ? choose(isTrue(j <= i, j <= i ? "it does not come later" : "it comes later and is hidden"), sum(P().map((r) => term(s(i, j), r))), 0) : sum(P().map((r) => term(s(i, j), r)))),
  },
  z: { id: "HOL.5", axes: "i", what: "sum of the weights", of: (i) => sum(J.map((j) => w(i, j))) },
  o: { id: "HOL.6", axes: "ie", what: "output", of: (i, c) => mul(div(1, z(i)), dot(J.map((j) => w(i, j)), J.map((j) => v(j, c)))) },
  phi: { axes: "rj", symbol: "φ", what: "product of elements of a key", of: (r, j) => product(products()[r], (c) => k1(j, c)) },
  M: { axes: "Tre", what: "state: products times values, added up", of: (t, r, c) => (t === 0 ? words("before the first key", 0) : add(M(t - 1, r, c), mul(phi(r, t - 1), v(t - 1, c)))) },
  N: { axes: "Tr", what: "state: products alone, added up", of: (t, r) => (t === 0 ? words("before the first key", 0) : add(N(t - 1, r), phi(r, t - 1))) },
  psi: { axes: "ri", symbol: "ψ", what: "product of elements of a query, with its factor", of: (r, i) => div(product(products()[r], (c) => q1(i, c)), mul(...products()[r].map(factorial).filter((n) => n > 1), pow(divisor(), products()[r].reduce((a, b) => a + b, 0)))) },
  top: { axes: "ie", symbol: "z o", what: "weighed values, from the state", of: (i, c) => sum(R().map((r) => mul(psi(r, i), i === S.i ? held(r, c) : M(read(i), r, c)))) },
  under: { id: "HOL.5", axes: "i", symbol: "z", what: "sum of the weights, from the state", of: (i) => sum(R().map((r) => mul(psi(r, i), i === S.i ? counted(r) : N(read(i), r)))) },
  held: { axes: "re", symbol: "M", what: "state that the query reads: products times values, added up", of: (r, c) => sum(seen().map((j) => mul(phi(r, j), v(j, c)))) },
  counted: { axes: "r", symbol: "N", what: "state that the query reads: products, added up", of: (r) => sum(seen().map((j) => phi(r, j))) },
  apart: {
    axes: "j", symbol: "w", what: "weight, as a sum of products", values: () => J.map((j) => V.w(S.i, j)),
    of: (j) => (hidden(S.i, j) ? words("as the key is hidden", 0) : dot(R().map((r) => psi(r, S.i)), R().map((r) => phi(r, j)))),
  },
  same: { id: "HOL.6", axes: "ie", symbol: "o", what: "output, from the state", of: (i, c) => div(top(i, c), under(i)) },
  dv: { id: "dHOL.v", axes: "je", what: "gradient of a value", of: (j, c) => div(mul(w(S.i, j), dout(S.i, c)), z(S.i)) },
  dz: { id: "dHOL.5", axes: "i", what: "gradient of the sum", of: (i) => neg(div(dot(E.map((c) => dout(i, c)), E.map((c) => o(i, c))), z(i))) },
  dw: { id: "dHOL.4", axes: "ij", what: "gradient of a weight", of: (i, j) => add(div(dot(E.map((c) => dout(i, c)), E.map((c) => v(j, c))), z(i)), dz(i)) },
  slope: { axes: "ij", symbol: "T'", what: "slope of the polynomial", of: (i, j) => sum(P().slice(0, -1).map((r) => term(s(i, j), r))) },
  ds: { id: "dHOL.3", axes: "ij", what: "gradient of a score", of: (i, j) => (hidden(i, j) ? words("as the key is hidden", 0) : mul(dw(i, j), slope(i, j))) },
  dq1: { id: "dHOL.1", axes: "id", symbol: "dq'", what: "gradient of q′", of: (i, c) => mul(div(1, divisor()), dot(J.map((j) => ds(i, j)), J.map((j) => k1(j, c)))) },
  dk1: { id: "dHOL.2", axes: "jd", symbol: "dk'", what: "gradient of k′", of: (j, c) => div(mul(ds(S.i, j), q1(S.i, c)), divisor()) },
  along_q: { axes: "i", symbol: "mean dq'q'", what: "how far dq′ points along q′", of: (i) => mean(D.map((c) => mul(dq1(i, c), q1(i, c)))) },
  along_k: { axes: "j", symbol: "mean dk'k'", what: "how far dk′ points along k′", of: (j) => mean(D.map((c) => mul(dk1(j, c), k1(j, c)))) },
  dq: { id: "dHOL.q", axes: "id", what: "gradient of a query", of: (i, c) => back(c, (n) => q1(i, n), var_q(i), (n) => dq1(i, n), along_q(i)) },
  dk: { id: "dHOL.k", axes: "jd", what: "gradient of a key", of: (j, c) => back(c, (n) => k1(j, n), var_k(j), (n) => dk1(j, n), along_k(j)) },
};
const seen = () => J.slice(0, read(S.i));
const R = () => products().map((_, r) => r);
const product = (powers, of) => {
  const factors = powers.flatMap((n, c) => (n ? [n === 1 ? of(c) : pow(of(c), n)] : []));
  return factors.length > 1 ? mul(...factors) : (factors[0] ?? 1);
};

// ---- pictures: the words with a bar each, and beside them what the card is about ---------------------------------------

const weights = () => J.map((j) => V.w(S.i, j));
const vectorOf = (name, wide, ...at) => wide.map((c) => V[name](...at, c)); // as it is, of any width
const wider = D.length > 3 ? ", two of their dimensions" : "";

// What has mean 0 lies across (1, 1, ...): two directions there, in which points are drawn. Of three elements these are all.
const AXES = [D.map((c) => [1, -1][c] ?? 0), D.map((c) => (D.length > 2 ? [1, 1, -2][c] ?? 0 : 0))].map((row) => row.map((x) => x / (Math.hypot(...row) || 1)));
const across = (p) => AXES.map((row) => row.reduce((total, x, c) => total + x * p[c], 0));
const moved = (list, [x, y]) => [x, y].map((z, n) => z - across(list)[n]).forEach((z, n) => AXES[n].forEach((a, c) => { list[c] += z * a; }));
const far = Math.sqrt(D.length);
const first = [[far, far], [-far, -far], ...DATA.k.map(across), ...DATA.q.map(across)]; // a plane stays while points are dragged

// The plane of the tamed vectors, which end on a circle, and arrows in it from the middle.
function round(b) {
  const at = plane(b.left, b.top, b.size, first, b.wide), place = (p) => [at.X(p), at.Y(p)], zero = place([0, 0]), reach = far * at.unit;
  const one = (key, p, set) => vector(key, ...zero, ...place(p), set);
  const circle = mark("circle", "circle", { cx: zero[0], cy: zero[1], r: reach, class: "ghost" });
  const name = labels(b.left + b.wide, b.top + b.size, 13, [], b.left, b.top);
  const keys = J.map((j) => across(vectorOf("k1", D, j))), q = across(vectorOf("q1", D, S.i));
  const ends = J.map((j) => [
    one(`key.${j}`, keys[j], { style: `stroke:${color(j)}`, opacity: hidden(S.i, j) ? 0.3 : 1 }),
    point(`dot.${j}`, ...place(keys[j]), b.quiet ? 3 : 5, j, { "aria-label": `drag the key of ${DATA.tokens[j]}` }, (x, y) => moved(DATA.k[j], at.back(x, y))),
    b.quiet ? [] : name(DATA.tokens[j], ...place(keys[j]), 6, j === S.i ? "name strong" : "name"),
  ]);
  const asking = [
    one("query", q, { class: "vector thick" }),
    mark("q", "circle", { cx: at.X(q), cy: at.Y(q), r: b.quiet ? 4 : 6, class: "sink", "aria-label": "drag the query" }, "", (x, y) => moved(DATA.q[S.i], at.back(x, y))),
    b.quiet ? [] : label("query name", at.X(q) + 10, at.Y(q) + 4, "q′", { class: "name strong" }),
  ];
  return { at, place, one, q, keys, ends, asking, ground: [at.ground, circle] };
}

// A vector before and after: dashed as it was, with a line to where it goes on the circle.
const was = (f, key, raw, tamed, set) => [f.one(`was.${key}`, raw, { class: "vector dashed", opacity: 0.6, ...set }), line(`tie.${key}`, [f.place(raw), f.place(tamed)], { class: "hair dashed", ...set })];
function tame(b) {
  const f = round(b);
  return [f.ground, f.asking[0], was(f, "q", across(vectorOf("q", D, S.i)), f.q, { style: `stroke:${color(S.i)}`, opacity: 1 }), f.asking.slice(1)];
}
function tameKeys(b) {
  const f = round(b);
  return [f.ground, J.map((j) => was(f, j, across(vectorOf("k", D, j)), f.keys[j], { style: `stroke:${color(j)}` })), f.ends];
}
function compare(b) {
  const f = round(b);
  return [f.ground, f.ends, f.asking, feet(f.at, f.keys, f.q, b.quiet)];
}

// The exponential and the polynomial, with the keys at their scores.
function curves(b) {
  const reach = (1.08 * far) / K.alpha, grid = Array.from({ length: 61 }, (_, n) => -reach + (n * reach) / 30), poly = (x) => taylor(x, K.order), both = grid.flatMap((x) => [Math.exp(x), poly(x)]);
  const X = scale(-reach, reach, b.left, b.left + b.wide), Y = scale(Math.min(0, ...both), Math.max(...both) * 1.04, b.top + b.size - (b.quiet ? 2 : 20), b.top), curve = (key, of, set) => line(key, grid.map((x) => [X(x), Y(of(x))]), set);
  const scores = J.map((j) => V.s(S.i, j)), name = labels(b.left + b.wide, b.top + b.size, 13, scores.map((x) => [X(x) - 6, Y(poly(x)) - 6, X(x) + 6, Y(poly(x)) + 6]), b.left, b.top + 44), low = b.top + b.size - 4;
  const drawn = [
    svg("rect", { x: b.left, y: b.top, width: b.wide, height: b.size, rx: 6, class: "plane" }),
    line("score 0", [[X(0), b.top], [X(0), b.top + b.size]], { class: "axis" }), line("weight 0", [[b.left, Y(0)], [b.left + b.wide, Y(0)]], { class: "axis" }),
    curve("exp", Math.exp, { class: "curve dashed" }), curve("curve", poly, { class: "curve", style: "stroke:var(--ink)", "stroke-width": 2.2 }),
    b.quiet ? [] : [
      [["polynomial", { class: "curve", style: "stroke:var(--ink)", "stroke-width": 2.2 }], ["exponential", { class: "curve dashed" }]].map(([told, look], n) => [line(`legend ${n}`, [[b.left + 10, b.top + 16 + 17 * n], [b.left + 36, b.top + 16 + 17 * n]], look), text(b.left + 42, b.top + 20 + 17 * n, told)]),
      [[show(-far / K.alpha), b.left + 4, "start"], ["score 0", X(0), "middle"], [show(far / K.alpha), b.left + b.wide - 4, "end"]].map(([told, x, anchor]) => text(x, low, told, { class: "tick", "text-anchor": anchor })),
    ],
  ];
  const points = J.map((j) => [
    line(`drop.${j}`, [[X(scores[j]), Y(poly(scores[j]))], [X(scores[j]), Y(Math.exp(scores[j]))]], { class: "hair dashed", style: `stroke:${color(j)}` }),
    point(`dot.${j}`, X(scores[j]), Y(poly(scores[j])), b.quiet ? 3.5 : j === S.i ? 7 : 5.5, j, { opacity: hidden(S.i, j) ? 0.35 : 1 }),
    b.quiet ? [] : name(DATA.tokens[j], X(scores[j]), Y(poly(scores[j])), 7, j === S.i ? "name strong" : "name", [3, 0, 1, 2]),
  ]);
  return { X, Y, poly, scores, reach, drawn, points };
}
function weigh(b) {
  const c = curves(b);
  return [c.drawn, c.points];
}

// Weights end to end, one in each row: where they end is their sum.
function addUp(b) {
  const w = weights(), ends = w.reduce((made, x) => [...made, made.at(-1) + x], [0]);
  const X = scale(Math.min(0, ...ends), Math.max(1e-9, ...ends), b.left + 6, b.left + b.wide - (b.quiet ? 8 : 70)), high = b.quiet ? 8 : Math.min(22, (0.4 * b.size) / J.length);
  return [
    line("weight 0", [[X(0), b.top], [X(0), b.top + b.size]], { class: "axis" }),
    J.map((j) => [
      mark(`part.${j}`, "rect", { x: X(Math.min(ends[j], ends[j + 1])), y: b.y(j) - high / 2, width: Math.abs(X(ends[j + 1]) - X(ends[j])), height: high, rx: 2, style: `fill:${color(j)}` }),
      line(`drop.${j}`, [[X(ends[j + 1]), b.y(j) - high / 2], [X(ends[j + 1]), b.y(Math.min(j + 1, J.length - 1)) + high / 2]], { class: "hair dashed" }),
      point(`dot.${j}`, X(ends[j + 1]), b.y(j), b.quiet ? 2 : 3.5, j),
    ]),
    b.quiet ? [] : label("z", X(V.z(S.i)) + 8, b.y(J.length - 1) + 4, `z = ${show(V.z(S.i))}`, { class: "name strong", "data-ref": `z.${S.i}` }),
  ];
}

// A table with a row for each product: columns of [heads, numbers, references, strongest], each as wide as `wide` says.
function table(b, columns, below = []) {
  const count = R().length, names = b.quiet ? 0 : 58, head = b.quiet ? 6 : 18, width = (b.wide - names) / columns.reduce((n, one) => n + (one.wide ?? 1), 0), high = (b.size - head) / (count + (below.length ? 1.4 : 0));
  if (count > 170) return [mark("table", "rect", { x: b.left, y: b.top, width: b.wide, height: b.size, rx: 6, class: "plane" }), label("too long", b.left + b.wide / 2, b.top + b.size / 2, `${count} rows`, { class: "title", "text-anchor": "middle" })];
  const one = (key, x, y, wide, number, ref, strongest) => [
    cell(key, x + 1, y + 0.5, Math.max(1, wide - 2), Math.max(0.8, high - 1.2), number, strongest, ref ? { "data-ref": ref } : {}),
    b.quiet || wide < 40 || high < 13 ? [] : label(`${key} told`, x + wide / 2, y + high / 2 + 4, show(number), { "text-anchor": "middle", ...(ref ? { "data-ref": ref } : {}) }),
  ];
  let x = b.left + names;
  const drawn = columns.map((own) => {
    const wide = width * (own.wide ?? 1), left = x, strongest = Math.max(1e-9, ...own.numbers.map(Math.abs));
    x += wide;
    return [
      own.dot !== undefined ? point(`dot.${own.dot}`, left + wide / 2, b.top + head / 2 - 3, b.quiet ? 2.5 : 5, own.dot) : b.quiet ? [] : label(`${own.key} head`, left + wide / 2, b.top + head - 6, own.head, { class: "tick", "text-anchor": "middle" }),
      own.numbers.map((number, r) => one(`${own.key}.${r}`, left, b.top + head + r * high, wide - (own.key === "psi" || own.key === "phi" ? 8 : 0), number, own.ref?.(r), strongest)),
      own.below ? one(`${own.key} below`, left, b.top + head + (count + 0.4) * high, wide, ...own.below) : [],
    ];
  });
  const told = b.quiet ? [] : [high >= 11 ? R().map((r) => text(b.left + names - 8, b.top + head + (r + 0.5) * high + 4, named(products()[r]), { class: "tick", "text-anchor": "end" })) : [text(b.left + names - 8, b.top + head + 8, `${count} rows`, { class: "tick", "text-anchor": "end" })], below.length ? text(b.left + names - 8, b.top + head + (count + 0.9) * high + 4, below[0], { class: "tick", "text-anchor": "end" }) : ""];
  return [drawn, told];
}
const psis = () => ({ key: "psi", head: "ψ", numbers: R().map((r) => V.psi(r, S.i)), ref: (r) => `psi.${r}.${S.i}` });
const long = () => R().length > 170; // a table that is not drawn is not computed

function apart(b) {
  return [table(b, long() ? [] : [psis(), ...J.map((j) => ({ key: `product.${j}`, dot: j, numbers: R().map((r) => (hidden(S.i, j) ? 0 : V.psi(r, S.i) * V.phi(r, j))), below: [V.w(S.i, j), `w.${S.i}.${j}`, Math.max(...weights().map(Math.abs))] }))], ["w"])];
}

// The state after some keys; between two of them the next one is added.
function stateAt(at) {
  const n = Math.min(Math.floor(at), J.length), part = at - n, row = (t, r) => [...E.map((c) => V.M(t, r, c)), V.N(t, r)];
  return R().map((r) => row(n, r).map((x, c) => (part < 1e-9 ? x : x + part * (row(n + 1, r)[c] - x))));
}
const moment = () => S.at ?? S.t;
const inside = (numbers, ref) => [...E, E.length].map((c) => ({ key: `state.${c}`, wide: 1, head: c < E.length ? `M${"₁₂₃₄₅₆₇₈₉"[c] ?? c + 1}` : "N", numbers: numbers.map((row) => row[c]), ref: ref && ((r) => ref(r, c)) }));

function fill(b) {
  const n = Math.min(S.t, J.length - 1), exact = moment() === S.t;
  return [
    table(b, long() ? [] : [{ key: "phi", head: "φ", numbers: R().map((r) => V.phi(r, n)), ref: (r) => `phi.${r}.${n}` }, ...inside(stateAt(moment()), exact ? (r, c) => (c < E.length ? `M.${S.t}.${r}.${c}` : `N.${S.t}.${r}`) : undefined)]),
    b.small ? [] : mark("now", "rect", { x: -1, y: b.y(n) - rowHigh(b.y) / 2, width: b.names + 2, height: rowHigh(b.y), rx: 6, class: "frame" }),
  ];
}

function readState(b) {
  const below = long() ? [] : [...E.map((c) => V.top(S.i, c)), V.under(S.i)], strongest = Math.max(...below.map(Math.abs));
  const columns = long() ? [] : inside(R().map((r) => [...E.map((c) => V.held(r, c)), V.counted(r)]), (r, c) => (c < E.length ? `held.${r}.${c}` : `counted.${r}`));
  return [table(b, [...(long() ? [] : [psis()]), ...columns.map((one, c) => ({ ...one, below: [below[c], c < E.length ? `top.${S.i}.${c}` : `under.${S.i}`, strongest] }))], ["z o, z"])];
}

// The first picture: the curves, and where there is room the state.
function overview(b) {
  const half = 0.6 * b.wide, c = curves({ ...b, wide: half - 16 });
  return [b.quiet ? "" : text(b.left + half, 12, "the state: M and N", { class: "title" }), c.drawn, c.points, table({ ...b, left: b.left + half, wide: b.wide - half, quiet: true }, long() ? [] : inside(stateAt(moment())))];
}
// What is already in the state.
const arrived = () => J.map((j) => (j < moment() && !hidden(S.i, j) ? V.w(S.i, j) : 0));
const opening = { bars: () => [arrived(), "weights of the keys that are in"], heading: "polynomial for exp", draw: overview };

// Backwards.
function toSum(b) {
  const f = draw.values(b), zero = f.place([0, 0]);
  return [f.drawn, line("along", [zero, f.place(f.out)], { class: "hair dashed" }), vector("sum", ...f.place(f.out), ...f.place(f.out.map((x) => 0.7 * x)), { class: "vector thick" }), vector("down", ...f.place(f.out), ...f.place(minus(f.out, f.grad)), {}), f.aim];
}
function toScores(b) {
  const c = curves(b), size = Math.max(1e-12, ...J.map((j) => Math.abs(V.ds(S.i, j))));
  const step = 0.16 * (far / K.alpha);
  return [
    c.drawn, c.points,
    J.map((j) => {
      const s = c.scores[j], y = c.poly(s), up = V.slope(S.i, j), within = (x) => Math.max(-c.reach, Math.min(c.reach, x)), at = (x) => [c.X(x), c.Y(y + (x - s) * up)];
      return [line(`slope.${j}`, [at(within(s - step)), at(within(s + step))], { style: `stroke:${color(j)}`, "stroke-width": 2 }), vector(`push.${j}`, c.X(s), c.Y(y), c.X(within(s - 2 * step * (V.ds(S.i, j) / size))), c.Y(y))];
    }),
  ];
}
// Arrows as many times as long as leaves them readable, which the heading tells.
const times = (f, b, list) => enlarged(f.at.unit * Math.max(1e-9, ...list.map((p) => Math.hypot(...p))), 0.12 * b.size);
const told = (b, heading, by) => (b.quiet ? "" : text(b.left, 12, `${heading}${by > 1 ? `, ${by} times as long` : ""}`, { class: "title" }));

function toTamed(b) {
  const f = round(b), grad = across(vectorOf("dq1", D, S.i)), steps = f.keys.map((p, j) => p.map((x) => (V.ds(S.i, j) * x) / (K.alpha * far))), by = times(f, b, [grad, ...steps.map((_, n) => steps.slice(0, n + 1).reduce((a, p) => minus(a, p, -1), [0, 0]))]);
  let here = f.q;
  const chain = steps.map((p, j) => { const from = here; here = minus(here, p, by); return vector(`push.${j}`, ...f.place(from), ...f.place(here), { style: `stroke:${color(j)}` }); });
  return [told(b, "each key pulls or pushes q′: −dq′", by), f.ground, f.ends, f.asking, chain, vector("down", ...f.place(f.q), ...f.place(here), { class: "vector thick" })];
}
function toTamedKeys(b) {
  const f = round(b), grads = J.map((j) => across(vectorOf("dk1", D, j))), by = times(f, b, grads);
  return [told(b, "along the query: −dk′", by), f.ground, f.ends, f.asking, J.map((j) => vector(`push.${j}`, ...f.place(f.keys[j]), ...f.place(minus(f.keys[j], grads[j], by))))];
}
// At the end of a raw vector: the gradient of the tamed one, dashed, and what is left of it, at right angles to the vector.
const left = (f, key, raw, tamed, own, by, set) => [vector(`was.${key}`, ...f.place(raw), ...f.place(minus(raw, tamed, by)), { class: "vector dashed", opacity: 0.6, ...set }), vector(`push.${key}`, ...f.place(raw), ...f.place(minus(raw, own, by)), { class: "vector thick", ...set })];
function toQuery(b) {
  const raw = across(vectorOf("q", D, S.i)), f = round(b), both = ["dq1", "dq"].map((name) => across(vectorOf(name, D, S.i))), by = times(f, b, both);
  return [told(b, "−dq′ (dashed), −dq", by), f.ground, f.one("query", raw, { class: "vector" }), left(f, "q", raw, ...both, by, {}), mark("q", "circle", { cx: f.at.X(raw), cy: f.at.Y(raw), r: b.quiet ? 4 : 6, class: "sink", "aria-label": "drag the query" }, "", (x, y) => moved(DATA.q[S.i], f.at.back(x, y)))];
}
function toKeys(b) {
  const raw = J.map((j) => across(vectorOf("k", D, j))), f = round(b), grads = J.map((j) => ["dk1", "dk"].map((name) => across(vectorOf(name, D, j)))), by = times(f, b, grads.flat());
  return [told(b, "−dk′ (dashed), −dk", by), f.ground, J.map((j) => [f.one(`key.${j}`, raw[j], { style: `stroke:${color(j)}`, opacity: 0.5 }), left(f, j, raw[j], ...grads[j], by, { style: `stroke:${color(j)}` }), point(`dot.${j}`, ...f.place(raw[j]), b.quiet ? 3 : 5, j, { "aria-label": `drag the key of ${DATA.tokens[j]}` }, (x, y) => moved(DATA.k[j], f.at.back(x, y)))])];
}

// ---- cards -------------------------------------------------------------------------------------------------------------

const forward = [
  { id: "HOL.1", title: "Tame the query", show: [["q[i]"], ["mean_q[i]", "var_q[i]"], ["q1[i]"]], pick: () => ["q1", S.i, 0],
    bars: ["q", "length of q before", []], heading: () => `the query of ${DATA.tokens[S.i]}, before (dashed) and after${wider}`, draw: tame,
    say: () => `Each word has a query (what it looks for), a key (what it offers) and a value (what it hands over). The query of ${word()} is shifted and scaled to mean 0 and variance 1 (normalised), so it is at most √d long. For scores have to be small.`,
    alt: "The query before and after, and the circle on which tamed vectors end",
    caption: () => `The arrow of ${word()} is now ${show(Math.hypot(...vectorOf("q1", D, S.i)))} long. ${D.length === 3 ? "The mean is left out of the picture, so it ends on the circle." : "No tamed vector goes beyond the circle."} Drag the query.` },
  { id: "HOL.2", title: "Tame the keys", show: [["k", "k1"], ["mean_k", "var_k"]], pick: () => ["k1", best(), 0],
    bars: ["k", "length of k before"], heading: `keys, before (dashed) and after${wider}`, draw: tameKeys,
    say: "The same is done to every key, so that scores stay small: two such vectors never have a product larger than d. The mean is taken off first: that is why an element can change its sign.",
    alt: "The keys before and after, with the circle on which tamed vectors end",
    caption: () => `Dashed: keys less their means, which the picture leaves out; the mean of ${names([main()])} is ${show(V.mean_k(main()))}. Then all are scaled: none is longer than √d.` },
  { id: "HOL.3", title: "Compare, in small numbers", show: [["k1", "s[i]"], ["q1[i]"]], pick: () => ["s", S.i, best()],
    bars: ["s", "score s"], heading: () => `the query of ${DATA.tokens[S.i]} and all keys${wider}`, draw: compare,
    say: () => `The query of ${word()} is compared with every key. Because of the division, no score is further from 0 than ${show(Math.sqrt(D.length) / K.alpha)}.`,
    alt: () => `The tamed query of ${DATA.tokens[S.i]} and the tamed keys as arrows, each key with its foot on the line of the query`,
    caption: () => `A key’s foot on the line of the query, times the query’s length, over α√d, is its score: the highest is that of ${names([largest(J.map((j) => V.s(S.i, j)))])}.` },
  { id: "HOL.4", title: "Weigh by a polynomial", show: [["s[i]", "w[i]"]], pick: () => ["w", S.i, best()],
    bars: ["w", "weight w"], heading: "what takes the place of exp", draw: weigh,
    say: () => `A polynomial of the score (the Taylor series of exp) takes the place of the exponential. Its ${K.order + 1} terms are like exp near 0, and unlike it far away. Steps 4 to 6 define the result, pair by pair; 7 to 9 get the same without pairs.`,
    alt: () => `The exponential and its polynomial of order ${K.order}, with a point for each key at its score`,
    caption: caption },
  { id: "HOL.5", title: "Add up the weights", show: [["w[i]"], ["z[i]"]], pick: () => ["z", S.i],
    bars: ["w", "weight w"], heading: "weights end to end: z", draw: addUp,
    say: "The weights of a query are added up, for the output shall be a mean.",
    alt: "The weights end to end, one row for each key, up to their sum",
    caption: () => `Each bar begins where the one before it ends${J.some((j) => V.w(S.i, j) < 0) ? "; negative weights go back" : ""}. The last ends at z = ${show(V.z(S.i))}.` },
  { id: "HOL.6", title: "Mix", show: [["w[i]", "v"], ["z[i]", "o[i]"]], pick: () => ["o", S.i, 0],
    bars: ["w", "weight w"], heading: "values, and their mean o", draw: (b) => draw.values(b, true).drawn,
    say: () => (J.some((j) => V.w(S.i, j) < 0) ? "The output is the sum of the values times their weights, divided by the sum of the weights. As some weights are below 0, it is no longer an average." : "The output is the average of the values, and each value counts as much as its weight."),
    alt: "The values as points, as large as their weights, within their hull, and the output",
    caption: () => `${J.some((j) => V.w(S.i, j) < 0) ? "Hollow: values with a negative weight. The output o may lie outside the hull of the values." : `The output lies within the hull of the values that are seen. ${names([best()])} has ${percent(V.w(S.i, best()) / V.z(S.i))} of the weight.`}` },
  { title: "Take the weight apart", label: "the same weight, as a sum of products", formula: "w_ij = sum_r psi_ri phi_rj", also: { label: "of two elements, as an example", formula: "(q_1 k_1 + q_2 k_2)^2 = q_1^2 k_1^2 + 2 q_1 q_2 k_1 k_2 + q_2^2 k_2^2" }, when: "last", show: [["psi[,i]", "phi"], ["apart"]], pick: () => ["apart", best()],
    bars: ["w", "weight w"], heading: "ψ times φ of each key; each column adds up to its weight", draw: apart,
    say: () => `A power of a sum is a sum of products, so the weight is a sum of ${R().length} terms. In each, φ (the feature map) is a product of elements of the key alone, and ψ is the same product for the query, with the factor that the polynomial gives it.`,
    alt: "A table of products: a row for each product of elements, a column for each key",
    caption: () => `Blue adds to a weight, orange takes from it. Each column adds up to the weight of its key: that of ${names([best()])} to ${show(V.w(S.i, best()))}. Row 2 of tables is ${named(products()[1])}.` },
  { title: "Fill the state", label: "what is kept of the keys and values", formula: "M_r = sum_j phi_rj v_j, N_r = sum_j phi_rj", when: "last", show: [["held", "counted"], ["v"]], pick: () => ["held", Math.min(1, R().length - 1), 0],
    bars: () => [J.map((j) => (j < moment() ? V.phi(1, j) : 0)), `φ of row ${named(products()[1])}, of keys that are in`, (j) => `phi.1.${j}`], heading: () => (S.t < J.length ? `the state after ${S.t} key${S.t === 1 ? "" : "s"}, and φ of the next` : `the state of all ${J.length} keys, and φ of the last`), draw: fill,
    say: () => `φ has no query in it, so keys are added up once: φ times the value in M, φ alone in N. This state has ${R().length} rows, (d + p choose p) for order p: ${show(P().slice(1).reduce((rows, n) => (rows * (64 + n)) / n, 1))} for d = 64. It pays once keys are more than rows. ${K.causal ? "A query reads it before later keys are added." : "If keys are hidden, a query reads it before they come."}`,
    alt: () => `The state of ${R().length} rows, filled by one key after the other`,
    caption: () => `Move the slider: each key adds φ times its value to M (φ times v₁ to M₁), φ alone to N. It stays at ${R().length * (E.length + 1)} numbers, however many keys come.` },
  { title: "Read the state", label: "HOL.6, from the state", formula: "o_i = (sum_r psi_ri M_r) / (sum_r psi_ri N_r)", when: "last", show: [["psi[,i]", "held", "counted"], ["top[i]", "under[i]", "same[i]"]], pick: () => ["top", S.i, 0],
    bars: ["w", "weight w"], heading: "ψ times each column adds up to z o, and to z", draw: readState,
    say: "The query brings its ψ for each row. The products with M add up to the values times their weights, those with N to the sum z of the weights. The output is the same as in step 6, and no key was looked at again.",
    alt: "The state with the numbers of the query beside it and the sums below",
    caption: () => `ψ times a column of M, added up, is z o; with N it is z = ${show(V.z(S.i))}. Their ratio is o = (${vectorOf("same", E, S.i).map(show).join(", ")}).` },
];

const backward = [
  draw.wished("HOL.6"),
  { id: "dHOL.v", of: "HOL.6", title: "To the values", show: [["w[i]", "dv"], ["z[i]", "do[i]"]], pick: () => ["dv", best(), 0],
    bars: ["w", "weight w"], heading: "where each value should go: −dv", draw: draw.toValues,
    say: () => `Only the output of ${word()} has a loss here. A value moved it by its share of the weights, so it gets that share of the gradient.`,
    alt: "An arrow at each value, along the way from the output to the wanted one",
    caption: () => `All arrows are parallel. That of ${names([best()])} is the longest${J.some((j) => V.w(S.i, j) < 0) ? " of those with a positive weight; where the weight is negative, it points the other way" : ""}.` },
  { id: "dHOL.5", of: "HOL.6", title: "To the sum of the weights", show: [["do[i]", "o[i]"], ["z[i]", "dz[i]"]], pick: () => ["dz", S.i],
    bars: ["w", "weight w"], heading: "a larger sum z pulls o towards 0", draw: toSum,
    say: "The sum divides the output, so a larger sum makes it shorter. That is good if the gradient do, which points away from t, points along the output.",
    alt: "The output, which a larger sum pulls towards 0, and the way to the wanted output",
    caption: () => (Math.abs(V.dz(S.i)) < 5e-4 ? "A larger sum z would hardly change the loss." : `Thick: where a larger z would pull o. Thin: where o should go. A larger z would ${V.dz(S.i) < 0 ? "lower" : "raise"} the loss.`) },
  { id: "dHOL.4", of: "HOL.5", title: "To the weights", show: [["v", "dw[i]"], ["do[i]"], ["dz[i]"]], pick: () => ["dw", S.i, best()],
    bars: ["dw", "gradient dw"], heading: "how far each value points along do", draw: draw.toWeights,
    say: "A weight was used twice: it moved the output along its value, and it is part of the sum.",
    alt: "The values, each with its foot on the line of the gradient of the output",
    caption: () => `The further a value’s foot lies along do, the more a growth of its weight raises the loss: most of all that of ${names([largest(J.map((j) => V.dw(S.i, j)))])}.` },
  { id: "dHOL.3", of: "HOL.4", title: "To the scores", show: [["s[i]", "slope[i]", "dw[i]", "ds[i]"]], pick: () => ["ds", S.i, most()],
    bars: ["ds", "gradient ds"], heading: "slopes, and which scores should change: −ds", draw: toScores,
    say: () => `The slope of the polynomial is the polynomial of one order less. ${K.order === 1 ? "Here it is 1 everywhere." : K.order % 2 ? "For an odd order it is positive everywhere." : "For an even order it is negative far below 0, where a worse match weighs more."}${falls()}`,
    alt: "The polynomial with its slope at each key, and arrows to better scores",
    caption: caption },
  { id: "dHOL.1", of: "HOL.3", title: "To the tamed query", show: [["ds[i]", "k1"], ["dq1[i]"]], pick: () => ["dq1", S.i, 0],
    bars: ["ds", "gradient ds"], draw: toTamed,
    say: "The tamed query is pushed along each tamed key, by the gradient of that key’s score.",
    alt: "The way of the tamed query, as a chain of arrows, one along each key",
    caption: () => (Math.abs(V.ds(S.i, most())) < 5e-4 ? "No key moves the query: no score needs to change." : `From the query on, one arrow for each key: ${names([most()])} has the largest gradient of a score. The thick arrow is all of them together.`) },
  { id: "dHOL.2", of: "HOL.3", title: "To the tamed keys", show: [["ds[i]", "dk1"], ["q1[i]"]], pick: () => ["dk1", most(), 0],
    bars: ["ds", "gradient ds"], draw: toTamedKeys,
    say: "Each tamed key is pushed along the tamed query, by the gradient of its own score.",
    alt: "An arrow at each tamed key, along the query or against it",
    caption: () => (Math.abs(V.ds(S.i, most())) < 5e-4 ? "No key has to move: no score needs to change." : "Keys whose score should grow move along the query; the others move against it.") },
  { id: "dHOL.q", of: "HOL.1", title: "To the query", show: [["q1[i]"], ["dq1[i]", "along_q[i]"], ["dq[i]"]], pick: () => ["dq", S.i, 0],
    bars: ["ds", "gradient ds"], draw: toQuery,
    say: "Neither a shift of the query nor its length changed anything, so both directions are taken out of the gradient.",
    alt: "The query, with the gradient before and after two directions are taken out",
    caption: () => (Math.abs(V.ds(S.i, most())) < 5e-4 ? "The query has not to move: no score needs to change." : `The thick arrow ${D.length === 3 ? "is at right angles to the query: it" : ""} only turns it. What would stretch it is gone, and 1 over its standard deviation is a factor.`) },
  { id: "dHOL.k", of: "HOL.2", title: "To the keys", show: [["k1", "dk1"], ["along_k", "dk"]], pick: () => ["dk", most(), 0],
    bars: ["ds", "gradient ds"], draw: toKeys,
    say: "The same holds for every key: what would only shift it or stretch it is taken out.",
    alt: "Keys, each with the gradient before and after two directions are taken out",
    caption: () => (Math.abs(V.ds(S.i, most())) < 5e-4 ? "No key has to move: no score needs to change." : "What would only stretch a key is gone, and the rest is divided by the standard deviation of the key: a short key turns more easily.") },
];

const visible = () => J.filter((j) => !hidden(S.i, j)).sort((a, b) => V.s(S.i, b) - V.s(S.i, a));
function apartFromSoftmax() {
  const list = visible(), whole = list.reduce((a, j) => a + Math.exp(V.s(S.i, j)), 0);
  return Math.max(...list.map((j) => Math.abs(V.w(S.i, j) / V.z(S.i) - Math.exp(V.s(S.i, j)) / whole)));
}
// The first two keys, from the worst match on, of which the worse match weighs more.
function turned() {
  const order = visible(), n = order.findLastIndex((j, rank) => rank && V.w(S.i, j) > V.w(S.i, order[rank - 1]) + 1e-3);
  return n > 0 ? [order[n], order[n - 1]] : [];
}

// Where the polynomial falls, which is why a word may need a higher score to weigh less.
function falls() {
  const falling = visible().filter((j) => V.slope(S.i, j) < 0);
  return falling.length ? ` At ${names(falling)} the polynomial falls, so there a higher score is less weight.` : "";
}

function caption() {
  if (S.side === "backward") {
    const more = J.filter((j) => V.ds(S.i, j) < -5e-4), less = J.filter((j) => V.ds(S.i, j) > 5e-4);
    if (!more.length && !less.length) return `No score of ${word()} needs to change for this target.`;
    return `To come nearer to t, ${word()} should have a higher score with ${names(more) || "none"}${less.length ? `, a lower one with ${names(less)}` : ""}.`;
  }
  const negative = visible().filter((j) => V.w(S.i, j) < 0), off = apartFromSoftmax(), [worse, better] = turned();
  if (negative.length) return `${names(negative)} ${negative.length > 1 ? "have" : "has"} a negative weight: with this order and this α the output is no longer an average.`;
  const odd = worse === undefined ? "" : ` ${names([worse])} matches worse than ${names([better])} but weighs more: ${K.order === 2 ? "1 + s + s²/2 rises again below −1" : "the polynomial rises again far below 0"}.`;
  return `The weights over their sum differ from softmax’s by ${off < 0.001 ? "less than 0.1" : `up to ${(100 * off).toFixed(1)}`} percentage points.${odd}`;
}

tour({
  title: "Higher-order attention",
  short: "A polynomial for the exponential, so that all keys fit into a state of fixed size.",
  intro: () => [
    "Softmax attention weighs by exp(q · k), which ties every query to every key: twice the words, four times the work.",
    "A polynomial of q · k comes apart: it is a sum of products of elements of q with products of elements of k. So the keys can be added up once, in a <b>state</b> of fixed size, and every query reads that state. Twice the words, twice the work.",
    `The price: a polynomial resembles the exponential only near 0. So scores are kept small. We follow ${word()}.`,
  ],
  turn: () => `To learn is to change numbers so that a loss falls. So we ask of every number how the loss changes with it: its gradient, with a d in front. Steps come in reverse, from step 6, pair by pair.${falls()}`,
  sizes: { T: () => J.length + 1, r: () => products().length },
  quantities, forward, backward, caption,
  time: { steps: () => J.length, name: "key" },
  picture: () => (S.side === "backward" ? backward[0] : opening),
  tasks: [
    { say: "raise the order until no weight is a percentage point away from softmax’s", done: () => apartFromSoftmax() < 0.01 },
    { say: "find a negative weight: an odd order, a small divisor α", done: () => weights().some((x) => x < 0) },
    { say: "keep the order even, and raise the divisor α (temperature) until a better match always weighs more", done: () => K.order % 2 === 0 && !turned().length },
    { say: "drag keys and values, or the target t (backwards), until o meets t", done: () => Math.hypot(...E.map((c) => V.o(S.i, c) - DATA.target[c])) < 0.1 },
  ],
  height: (W) => (W < 420 ? 112 : Math.min(450, Math.round(W * 0.5))),
  label: () => `The exponential and its polynomial of order ${K.order}, and a state of ${R().length} rows`,
});
