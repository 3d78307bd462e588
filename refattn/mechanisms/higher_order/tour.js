// The tour of higher-order attention: formulas, cards, picture.

const { q, k, v, target, mean_q, var_q, mean_k, var_k, q1, k1, s, w, z, o, phi, psi, M, N, top, under, held, counted, along_q, along_k } = F;
const { dout, dz, dw, slope, ds, dq1, dk1 } = F;
const EPS = 1e-5, P = () => Array.from({ length: K.order + 1 }, (_, r) => r); // the powers
const factorial = (r) => (r < 2 ? 1 : r * factorial(r - 1));
const divisor = () => mul(knob("alpha"), sqrt(D.length));
const hidden = (i, j) => K.causal && j > i;
const mean = (x) => div(sum(x), D.length);
const spread2 = (x, middle) => div(sum(x.map((y) => pow(sub(y, middle), 2))), D.length);
const term = (x, r) => (r === 0 ? 1 : r === 1 ? x : div(pow(x, r), factorial(r)));
const taylor = (x, p) => Array.from({ length: p + 1 }, (_, r) => x ** r / factorial(r)).reduce((a, b) => a + b, 0);
const largest = (list) => list.indexOf(Math.max(...list));
const best = () => largest(J.map((j) => V.w(S.i, j)));
const most = () => largest(J.map((j) => Math.abs(V.ds(S.i, j))));
const word = () => `<b>${DATA.tokens[S.i]}</b>`;
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
  q: { axes: "id", what: "query" },
  k: { axes: "jd", what: "key" },
  v: { axes: "je", what: "value" },
  target: { axes: "e", symbol: "t", what: "wanted output" },
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
  top: { axes: "ie", symbol: "top", what: "weighed values, from the state", of: (i, c) => sum(R().map((r) => mul(psi(r, i), i === S.i ? held(r, c) : M(read(i), r, c)))) },
  under: { id: "HOL.5", axes: "i", symbol: "z", what: "sum of the weights, from the state", of: (i) => sum(R().map((r) => mul(psi(r, i), i === S.i ? counted(r) : N(read(i), r)))) },
  held: { axes: "re", symbol: "M", what: "state that the query reads: products times values, added up", of: (r, c) => sum(seen().map((j) => mul(phi(r, j), v(j, c)))) },
  counted: { axes: "r", symbol: "N", what: "state that the query reads: products, added up", of: (r) => sum(seen().map((j) => phi(r, j))) },
  apart: {
    axes: "j", symbol: "w", what: "weight, as a sum of products", values: () => J.map((j) => V.w(S.i, j)),
    of: (j) => (hidden(S.i, j) ? words("as the key is hidden", 0) : dot(R().map((r) => psi(r, S.i)), R().map((r) => phi(r, j)))),
  },
  same: { id: "HOL.6", axes: "ie", symbol: "o", what: "output, from the state", of: (i, c) => div(top(i, c), under(i)) },
  dout: { axes: "ie", symbol: "do", what: "gradient of the output", of: (i, c) => (i === S.i ? sub(o(i, c), target(c)) : words("for the loss looks at another output", 0)) },
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

const forward = [
  {
    id: "HOL.1", title: "Tame the query", show: [["q[i]"], ["mean_q[i]", "var_q[i]"], ["q1[i]"]], pick: () => ["q1", S.i, 0],
    say: () => `Each word has a query (what it looks for), a key (what it offers) and a value (what it hands over). The query of ${word()} is shifted and scaled, so that its elements have mean 0 and variance 1. Now it is at most √d long. The reason: scores have to be small, as a polynomial is like the exponential only there.`,
  },
  {
    id: "HOL.2", title: "Tame the keys", show: [["k", "k1"], ["mean_k", "var_k"]], pick: () => ["k1", best(), 0],
    say: "The same is done to every key, so that scores stay small: two such vectors never have a product larger than d.",
  },
  {
    id: "HOL.3", title: "Compare, in small numbers", show: [["k1", "s[i]"], ["q1[i]"]], pick: () => ["s", S.i, best()],
    say: () => `The query of ${word()} is compared with every key. Because of the division, no score is further from 0 than ${show(Math.sqrt(D.length) / K.alpha)}.`,
  },
  {
    id: "HOL.4", title: "Weigh by a polynomial", show: [["s[i]", "w[i]"]], pick: () => ["w", S.i, best()],
    say: () => `A polynomial of the score takes the place of the exponential. It has ${K.order + 1} terms, so it is a good likeness near 0 and a poor one far away. Steps 4 to 6 define the result, pair by pair; 7 to 9 get the same without pairs, which is what one would run for many keys.`,
  },
  {
    id: "HOL.5", title: "Add up the weights", show: [["w[i]"], ["z[i]"]], pick: () => ["z", S.i],
    say: "The weights of a query are added up, for the output shall be a mean.",
  },
  {
    id: "HOL.6", title: "Mix", show: [["w[i]", "v"], ["z[i]", "o[i]"]], pick: () => ["o", S.i, 0],
    say: () => (J.some((j) => V.w(S.i, j) < 0) ? "The output is the sum of the values times their weights, divided by the sum of the weights. As some weights are below 0, it is no longer an average." : "The output is the average of the values, and each value counts as much as its weight."),
  },
  {
    title: "Take the weight apart", label: "the same weight, as a sum of products", formula: "w_ij = sum_r psi_ri phi_rj", when: "last", show: [["psi[,i]", "phi"], ["apart"]], pick: () => ["apart", best()],
    say: () => `A power of a sum is a sum of products. So the weight is a sum of ${R().length} terms. In each, φ is a product of elements of the key alone, and ψ the same product for the query, with the factor that the polynomial gives it. The rows are ${products().slice(0, 10).map(named).join(", ")}${R().length > 10 ? ", and so on" : ""}.`,
  },
  {
    title: "Fill the state", label: "what is kept of the keys and values", formula: "M_r = sum_j phi_rj v_j, N_r = sum_j phi_rj", when: "last", show: [["held", "counted"], ["v"]], pick: () => ["held", Math.min(1, R().length - 1), 0],
    say: () => `φ has no query in it, so keys can be added up once. M adds up φ times the value, N adds up φ alone. That is the state: ${R().length} rows, however many keys there are. With order p that is (d + p choose p), the number of products of at most p of d elements; for d = 64 it would be ${show(P().slice(1).reduce((rows, n) => (rows * (64 + n)) / n, 1))}. It pays once there are more keys than about that${K.causal ? `; a query reads it as it is after its own key` : ""}.`,
  },
  {
    title: "Read the state", label: "HOL.6, from the state", formula: "o_i = (sum_r psi_ri M_r) / (sum_r psi_ri N_r)", when: "last", show: [["psi[,i]", "held", "counted"], ["top[i]", "under[i]", "same[i]"]], pick: () => ["top", S.i, 0],
    say: "The query brings its ψ for each row. The products with M add up to the values times their weights, those with N to the sum z of the weights. The output is the same as in step 6, and no key was looked at again.",
  },
];

const backward = [
  {
    title: "What is wished for", of: "HOL.6", formula: "do = o - t", show: [["o[i]", "dout[i]"], ["target"]], pick: () => ["dout", S.i, 0],
    say: () => `Suppose that the output of ${word()} should have been t. The loss is half the squared distance, so its gradient is the difference.`,
  },
  {
    id: "dHOL.v", of: "HOL.6", title: "To the values", show: [["w[i]", "dv"], ["z[i]", "dout[i]"]], pick: () => ["dv", best(), 0],
    say: "A value moved the output by its share of the weights, so it gets that share of the gradient.",
  },
  {
    id: "dHOL.5", of: "HOL.6", title: "To the sum of the weights", show: [["dout[i]", "o[i]"], ["z[i]", "dz[i]"]], pick: () => ["dz", S.i],
    say: "The sum divides the output. A larger sum makes the output shorter, which is good if the gradient points along the output.",
  },
  {
    id: "dHOL.4", of: "HOL.5", title: "To the weights", show: [["v", "dw[i]"], ["dout[i]"], ["dz[i]"]], pick: () => ["dw", S.i, best()],
    say: "A weight was used twice: it moved the output along its value, and it is part of the sum.",
  },
  {
    id: "dHOL.3", of: "HOL.4", title: "To the scores", show: [["s[i]", "slope[i]", "dw[i]", "ds[i]"]], pick: () => ["ds", S.i, most()],
    say: () => `The slope of the polynomial is the polynomial of one order less. ${K.order === 1 ? "Here it is 1 everywhere." : K.order % 2 ? "For an odd order it is positive everywhere." : "For an even order it is negative far below 0, where a worse match weighs more."}`,
  },
  {
    id: "dHOL.1", of: "HOL.3", title: "To the tamed query", show: [["ds[i]", "k1"], ["dq1[i]"]], pick: () => ["dq1", S.i, 0],
    say: "The tamed query is pushed along each tamed key, by the gradient of that key’s score.",
  },
  {
    id: "dHOL.2", of: "HOL.3", title: "To the tamed keys", show: [["ds[i]", "dk1"], ["q1[i]"]], pick: () => ["dk1", most(), 0],
    say: "Each tamed key is pushed along the tamed query, by the gradient of its own score.",
  },
  {
    id: "dHOL.q", of: "HOL.1", title: "To the query", show: [["q1[i]"], ["dq1[i]", "along_q[i]"], ["dq[i]"]], pick: () => ["dq", S.i, 0],
    say: "Neither a shift of the query nor its length changed anything, so both directions are taken out of the gradient.",
  },
  {
    id: "dHOL.k", of: "HOL.2", title: "To the keys", show: [["k1", "dk1"], ["along_k", "dk"]], pick: () => ["dk", most(), 0],
    say: "The same holds for every key: what would only shift it or stretch it is taken out.",
  },
];

// Left: exponential and polynomial, with the keys at their scores.
function curves(W, H, small) {
  const narrow = W < 420, side = S.side === "backward", p = K.order, far = Math.sqrt(D.length) / K.alpha, reach = 1.08 * far;
  const left = small ? 2 : narrow ? 20 : 30, right = W * (small ? 0.56 : narrow ? 0.54 : 0.53), top = small ? 4 : narrow ? 16 : 26, bottom = H - (small ? 4 : narrow ? 15 : 34), low = narrow ? 4 : 18;
  const grid = Array.from({ length: 61 }, (_, n) => -reach + (n * reach) / 30), both = grid.flatMap((x) => [Math.exp(x), taylor(x, p)]);
  const X = scale(-reach, reach, left, right), Y = scale(Math.min(0, ...both), Math.max(...both) * 1.04, bottom, top);
  const path = (of, set) => svg("path", { d: `M${grid.map((x) => `${X(x).toFixed(1)} ${Y(of(x)).toFixed(1)}`).join("L")}`, fill: "none", ...set });
  let drawn = svg("rect", { x: left, y: top, width: right - left, height: bottom - top, rx: 4, class: "plane" });
  drawn += svg("path", { d: `M${X(0)} ${top}V${bottom}M${left} ${Y(0)}H${right}`, class: "axis" });
  if (!small) {
    drawn += text(0, 12, side ? "which scores should change" : `weights, at the scores of ${DATA.tokens[S.i]}`, { class: "title" });
    for (const y of [0, 1]) drawn += text(left - 5, Y(y) + 4, `${y}`, { class: "tick", "text-anchor": "end" });
    drawn += text(left, H - low, show(-far), { class: "tick" }) + text(right, H - low, show(far), { class: "tick", "text-anchor": "end" }) + text(X(0), H - low, "score 0", { class: "tick", "text-anchor": "middle" });
  }
  drawn += path(Math.exp, { style: "stroke:var(--soft)", "stroke-width": 1.8, "stroke-dasharray": "5 4" });
  drawn += path((x) => taylor(x, p), { style: "stroke:var(--ink)", "stroke-width": 2.2 });
  if (!small) {
    const from = left + (narrow ? 4 : 10), long = narrow ? 14 : 22;
    [["polynomial", { style: "stroke:var(--ink)", "stroke-width": 2.2 }], ["exponential", { style: "stroke:var(--soft)", "stroke-width": 1.8, "stroke-dasharray": narrow ? "4 3" : "5 4" }]].forEach(([name, look], n) => {
      drawn += svg("path", { d: `M${from} ${top + 14 + 17 * n}h${long}`, ...look }) + text(from + long + 6, top + 18 + 17 * n, name);
    });
  }
  const order = [...J].sort((a, b) => V.s(S.i, a) - V.s(S.i, b)), at = order.map((j) => X(V.s(S.i, j)));
  const named = narrow && !small && labels(right, bottom, 11.5, [[left, top, left + 92, top + 36], ...order.map((j, n) => [at[n] - 5, Y(taylor(V.s(S.i, j), p)) - 5, at[n] + 5, Y(taylor(V.s(S.i, j), p)) + 5])], left, top);
  const steep = order.filter((j) => V.s(S.i, j) > 0.15 * far); // there the curve's left side is free for names
  const heights = spread(steep.map((j) => Y(taylor(V.s(S.i, j), p)) - (narrow ? 4 : 10)), narrow ? 11.5 : 15, top + (narrow ? 10 : 52), bottom - 2);
  order.forEach((j, n) => {
    const x = at[n], score = V.s(S.i, j), y = Y(taylor(score, p)), gap = Y(Math.exp(score));
    const push = -V.ds(S.i, j), size = Math.max(...J.map((l) => Math.abs(V.ds(S.i, l))), 1e-12), long = 26 * (push / size);
    let inner = svg("path", { d: `M${x} ${y}V${gap}`, style: `stroke:${color(j)}`, "stroke-width": 1.6, "stroke-dasharray": "2 2" });
    inner += svg("circle", { cx: x, cy: y, r: small ? 4 : j === S.i ? 7 : 5.5, style: `fill:${hidden(S.i, j) ? "var(--paper)" : color(j)};stroke:${color(j)}`, "stroke-width": 2 });
    if (side && Math.abs(long) > 5) inner += arrow(x, y, x + long, y);
    if (!small && !narrow) {
      const beside = steep.indexOf(j);
      inner += text(beside < 0 ? Math.max(left + 22, x) : x - 11, beside < 0 ? Math.min(y, gap) - (n % 2 ? 26 : 12) : heights[beside], DATA.tokens[j], { class: j === S.i ? "name strong" : "name", "text-anchor": beside < 0 ? "middle" : "end" });
    }
    const steepest = steep.indexOf(j);
    if (named) inner += steepest < 0 ? named(DATA.tokens[j], x, y, 6, j === S.i ? "name strong" : "name") : text(x - 8, heights[steepest], DATA.tokens[j], { class: j === S.i ? "name strong" : "name", "text-anchor": "end" });
    drawn += follows(j, DATA.tokens[j], inner, { class: "node" });
  });
  return drawn;
}

// Right: the state, a row for each product, filled by one key after the other.
function stateAt(at) {
  const n = Math.min(Math.floor(at), J.length), part = at - n, row = (t, r) => [...E.map((c) => V.M(t, r, c)), V.N(t, r)];
  return R().map((r) => row(n, r).map((x, c) => (part < 1e-9 ? x : x + part * (row(n + 1, r)[c] - x))));
}

function filled(W, H, small) {
  const narrow = W < 420, at = S.at ?? S.t, rows = R().length, columns = E.length + 1, n = S.t, keys = `${n} key${n === 1 ? "" : "s"}`;
  const x0 = W * (small ? 0.64 : narrow ? 0.6 : 0.6), top = small ? 4 : narrow ? 29 : 40, bottom = H - (small ? 4 : narrow ? 15 : 34);
  if (rows > 300) return text(x0, top + 12, `a state of ${rows} rows`, { class: "title" });
  const stacks = Math.ceil(rows / Math.max(10, Math.floor((bottom - top) / 6))), deep = Math.ceil(rows / stacks), high = (bottom - top) / deep;
  // A name for each row; where rows are low, one for those of as many factors.
  const names = !small && stacks === 1, each = names && high >= 13, room = !names ? 0 : each ? (narrow ? 48 : 62) : 30, space = W - x0 - room, wide = (space - 10 * (stacks - 1)) / (stacks * columns);
  const cells = stateAt(at), full = stateAt(J.length), scales = Array.from({ length: columns }, (_, c) => Math.max(1e-9, ...full.map((row) => Math.abs(row[c]))));
  let drawn = "";
  if (!small) drawn += text(x0, 12, narrow ? `state, ${keys} in` : n === 0 ? "the state, before any key" : `the state, with ${keys} in it`, { class: "title" });
  if (names) [...E.map((c) => `v${"₁₂₃₄₅₆₇₈₉"[c] ?? c + 1}`), "1"].forEach((head, c) => { drawn += text(x0 + room + wide * (c + 0.5), top - 5, head, { class: "tick", "text-anchor": "middle" }); });
  if (names && !each) P().forEach((degree) => {
    const own = R().filter((r) => products()[r].reduce((a, b) => a + b, 0) === degree), y = top + high * (own[0] + own.length / 2);
    if (own.length * high >= 6) drawn += text(x0 + room - 6, y + 3.5, degree ? Array(degree).fill("k′").join("") : "1", { class: "tick", "text-anchor": "end" });
  });
  cells.forEach((row, r) => {
    const stack = Math.floor(r / deep), y = top + (r % deep) * high, x = x0 + room + stack * (wide * columns + 10);
    if (each) drawn += text(x - 7, y + high / 2 + 4, `${narrow ? "" : `${r + 1}: `}${named(products()[r])}`, { class: "tick", "text-anchor": "end" });
    row.forEach((value, c) => {
      const set = { x: x + c * wide, y, width: Math.max(1, wide - 1.5), height: Math.max(1, high - 1.2), rx: 1.5 };
      drawn += svg("rect", { ...set, class: "plane" }) + svg("rect", { ...set, style: `fill:${heat(value, scales[c])}`, ...(at === S.t ? { "data-ref": c < E.length ? `M.${S.t}.${r}.${c}` : `N.${S.t}.${r}` } : {}) });
    });
  });
  if (!small) drawn += text(x0, H - (narrow ? 4 : 18), narrow ? `always ${rows * columns} numbers` : `${rows * columns} numbers, for any number of keys`, { class: "tick" });
  return drawn;
}

function caption() {
  const i = S.i, visible = J.filter((j) => !hidden(i, j)), order = [...visible].sort((a, b) => V.s(i, b) - V.s(i, a));
  if (S.side === "backward") {
    const more = J.filter((j) => V.ds(i, j) < -5e-4), less = J.filter((j) => V.ds(i, j) > 5e-4);
    if (!more.length && !less.length) return `No score of ${word()} needs to change for this target.`;
    return `To come nearer to t, ${word()} should have a higher score with ${names(more) || "none"}${less.length ? `, a lower one with ${names(less)}` : ""}.`;
  }
  const negative = visible.filter((j) => V.w(i, j) < 0), shares = visible.map((j) => V.w(i, j) / V.z(i)), whole = visible.reduce((a, j) => a + Math.exp(V.s(i, j)), 0);
  if (negative.length) return `${names(negative)} ${negative.length > 1 ? "have" : "has"} a negative weight: with this order and this α the output is no longer an average.`;
  const off = Math.max(...visible.map((j, n) => Math.abs(shares[n] - Math.exp(V.s(i, j)) / whole)));
  const turned = order.findLastIndex((j, n) => n && V.w(i, j) > V.w(i, order[n - 1]) + 1e-3);
  const odd = turned > 0 ? ` ${names([order[turned]])} matches worse than ${names([order[turned - 1]])} but weighs more: ${K.order === 2 ? "1 + s + s²/2 rises again below −1" : "the polynomial rises again far below 0"}.` : "";
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
  turn: "To learn is to change numbers so that a loss falls. So we ask of every number how the loss changes with it. That is its gradient, written with a d in front. The steps come in reverse, from step 6, pair by pair.",
  sizes: { T: () => J.length + 1, r: () => products().length },
  quantities, forward, backward, caption,
  time: { steps: () => J.length, name: "key" },
  picture: (W, H, small) => TIP + curves(W, H, small) + filled(W, H, small),
  height: (W) => (W < 420 ? 112 : 300),
  label: () => `The exponential and its polynomial of order ${K.order}, and a state of ${R().length} rows`,
});
