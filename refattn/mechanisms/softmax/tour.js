// The tour of softmax attention: formulas, cards, picture.

const { q, k, v, s, m, u, w, o, target, do: dout, dw, mean, dm } = F;
const hidden = (i, j) => K.causal && j > i;

const quantities = {
  q: { axes: "id", what: "query", of: (i, c) => mul(knob("sharpness"), DATA.q[i][c]) },
  k: { axes: "jd", what: "key" },
  v: { axes: "je", what: "value" },
  target: { axes: "e", symbol: "t", what: "wanted output" },
  s: { id: "SM.1", axes: "ij", what: "score", of: (i, j) => div(dot(D.map((c) => q(i, c)), D.map((c) => k(j, c))), sqrt(D.length)) },
  m: {
    id: "SM.2", axes: "ij", what: "score after the mask",
    of: (i, j) => choose(isTrue(!hidden(i, j), hidden(i, j) ? "it comes later and is hidden" : K.causal ? "it does not come later" : "nothing is hidden"), s(i, j), -Infinity),
  },
  u: { id: "SM.3", axes: "ij", what: "unnormalised weight", of: (i, j) => exp(sub(m(i, j), max(J.map((l) => m(i, l))))) },
  w: { id: "SM.4", axes: "ij", what: "weight", of: (i, j) => div(u(i, j), sum(J.map((l) => u(i, l)))) },
  o: { id: "SM.5", axes: "ie", what: "output", of: (i, c) => sum(J.map((j) => mul(w(i, j), v(j, c)))) },
  do: { axes: "ie", what: "gradient of the output", of: (i, c) => (i === S.i ? sub(o(i, c), target(c)) : 0) },
  dv: { id: "dSM.v", axes: "je", what: "gradient of a value", of: (j, c) => mul(w(S.i, j), dout(S.i, c)) },
  dw: { id: "dSM.4", axes: "ij", what: "gradient of a weight", of: (i, j) => dot(E.map((c) => dout(i, c)), E.map((c) => v(j, c))) },
  mean: { axes: "i", symbol: "r", what: "mean of the gradients of the weights", of: (i) => sum(J.map((j) => mul(w(i, j), dw(i, j)))) },
  dm: { id: "dSM.2", axes: "ij", what: "gradient of a score", of: (i, j) => mul(w(i, j), sub(dw(i, j), mean(i))) },
  dq: { id: "dSM.q", axes: "id", what: "gradient of a query", of: (i, c) => mul(div(1, sqrt(D.length)), sum(J.map((j) => mul(dm(i, j), k(j, c))))) },
  dk: { id: "dSM.k", axes: "jd", what: "gradient of a key", of: (j, c) => div(mul(dm(S.i, j), q(S.i, c)), sqrt(D.length)) },
};

const largest = (list) => list.indexOf(Math.max(...list));
const best = () => largest(J.map((j) => V.w(S.i, j)));
const most = () => largest(J.map((j) => Math.abs(V.dm(S.i, j))));
const word = () => `<b>${DATA.tokens[S.i]}</b>`;

// ---- pictures: the words with a bar each, and beside them what the card is about ---------------------------------------

const first = { q: DATA.q.map(flat), k: DATA.k.map(flat), v: DATA.v.map(flat), target: flat(DATA.target) }; // a plane stays while points are dragged
const vectorOf = (name, wide, ...at) => flat(wide.map((c) => V[name](...at, c)));
const weights = () => J.map((j) => V.w(S.i, j));
const board = (W, H, small, numbers, told, heading, name) => beside(DATA.tokens, S.i, W, H, small, numbers, told, heading, name && ((j) => `${name}.${S.i}.${j}`));

// The query and the keys as arrows.
function arrows(b) {
  const scaled = flat(J.length ? first.q[S.i].map((x) => K.sharpness * x) : [0, 0]), at = plane(b.left, b.top, b.size, [...first.k, scaled, [0, 0]], b.wide);
  const q = vectorOf("q", D, S.i), zero = [at.X([0, 0]), at.Y([0, 0])], keys = J.map((j) => vectorOf("k", D, j));
  const one = (key, p, set) => vector(key, ...zero, at.X(p), at.Y(p), set);
  const drawn = [
    at.ground,
    J.map((j) => [
      one(`key.${j}`, keys[j], { style: `stroke:${color(j)}`, opacity: hidden(S.i, j) ? 0.3 : 1 }),
      b.quiet ? [] : label(`name.${j}`, at.X(keys[j]) + (keys[j][0] < 0 ? -8 : 8), at.Y(keys[j]) + (keys[j][1] < 0 ? 14 : -6), DATA.tokens[j], { class: "name", "text-anchor": keys[j][0] < 0 ? "end" : "start" }),
      point(`dot.${j}`, at.X(keys[j]), at.Y(keys[j]), b.quiet ? 3 : 5, j, { "aria-label": `drag the key of ${DATA.tokens[j]}` }, (x, y) => put(DATA.k[j], at.back(x, y))),
    ]),
    one("query", q, { class: "vector thick" }),
    mark("q", "circle", { cx: at.X(q), cy: at.Y(q), r: b.quiet ? 4 : 6, class: "sink", "aria-label": "drag the query" }, "", (x, y) => put(DATA.q[S.i], at.back(x, y), K.sharpness)),
    b.quiet ? [] : label("query name", at.X(q) + (q[0] < 0 ? -10 : 10), at.Y(q) + (q[1] < 0 ? 16 : -8), "q", { class: "name strong", "text-anchor": q[0] < 0 ? "end" : "start" }),
  ];
  return { at, q, keys, zero, drawn };
}

function compare(W, H, small) {
  const b = board(W, H, small, J.map((j) => V.s(S.i, j)), "score s", `the query of ${DATA.tokens[S.i]} and all keys${D.length > 2 ? ", two of their numbers" : ""}`, "s"), { drawn, at, q, keys } = arrows(b);
  return [b.drawn, drawn, feet(at, keys, q, b.quiet)];
}

function mask(W, H, small) {
  const b = board(W, H, small, J.map((j) => V.m(S.i, j)), "score after the mask m", "who sees whom: a row for each query", "m"), n = J.length;
  const names = b.quiet ? 4 : 74, head = b.quiet ? 10 : 26, wide = (b.wide - names) / n, high = (b.size - head) / n, X = (j) => b.left + names + j * wide, Y = (i) => b.top + head + i * high;
  const size = Math.max(...J.flatMap((i) => J.map((j) => Math.abs(V.s(i, j)))));
  return [
    b.drawn,
    J.map((i) => [
      b.quiet ? [] : text(X(0) - 8, Y(i) + high / 2 + 4, DATA.tokens[i], { "text-anchor": "end", class: i === S.i ? "strong" : "title" }),
      J.map((j) => [
        cell(`m.${i}.${j}`, X(j) + 1, Y(i) + 1, wide - 2, high - 2, V.m(i, j), size),
        hidden(i, j) ? [line(`shut.${i}.${j}`, [[X(j) + 4, Y(i) + high - 4], [X(j) + wide - 4, Y(i) + 4]])] : [],
        b.quiet ? [] : text(X(j) + wide / 2, Y(i) + high / 2 + 4, show(V.m(i, j)), { "text-anchor": "middle", "data-ref": `m.${i}.${j}` }),
      ]),
    ]),
    J.map((j) => point(`dot.${j}`, X(j) + wide / 2, b.top + head / 2 - 2, b.quiet ? 3 : 5, j)),
    mark("row", "rect", { x: X(0), y: Y(S.i), width: n * wide, height: high, rx: 4, class: "frame" }),
  ];
}

function exponentiate(W, H, small) {
  const scores = J.map((j) => V.m(S.i, j)), top = Math.max(...scores), below = scores.map((x) => x - top), b = board(W, H, small, below, "before: m − max", "after: u = exp(m − max)");
  const low = Math.min(-1, ...below.filter(Number.isFinite)) * 1.08, X = scale(low, 0, b.left + 14, b.left + b.wide - 14), Y = scale(0, 1, b.top + b.size - 18, b.top + 16), place = (x) => Math.max(X(low), X(x));
  const curve = Array.from({ length: 41 }, (_, n) => low * (1 - n / 40));
  return [
    b.drawn,
    line("floor", [[X(low), Y(0)], [X(0), Y(0)]], { class: "axis" }),
    line("curve", curve.map((x) => [X(x), Y(Math.exp(x))]), { class: "curve" }),
    J.map((j) => [
      mark(`part.${j}`, "rect", { x: place(below[j]) - 4, y: Y(V.u(S.i, j)), width: 8, height: Y(0) - Y(V.u(S.i, j)), style: `fill:${color(j)}`, "fill-opacity": 0.5 }),
      point(`dot.${j}`, place(below[j]), Y(V.u(S.i, j)), b.quiet ? 3 : 5, j),
      b.quiet || hidden(S.i, j) ? [] : label(`u.${j}`, place(below[j]) - 8, Y(V.u(S.i, j)) - 7, show(V.u(S.i, j)), { class: "name share", "text-anchor": "end", "data-ref": `u.${S.i}.${j}` }),
    ]),
  ];
}

function share(W, H, small) {
  const w = weights(), shares = percents(w), b = board(W, H, small, w, "weight w", "the parts u, and each divided by their sum", "w"), u = J.map((j) => V.u(S.i, j));
  const X = scale(0, 1, b.left + 4, b.left + b.wide - 4), unit = Math.min(1, 1 / Math.max(2, J.length * 0.6)), whole = u.reduce((x, y) => x + y, 0), high = b.size * 0.24, up = b.top + b.size * 0.12, down = b.top + b.size * 0.6;
  const told = spread(J.map((j) => X(w.slice(0, j).reduce((x, y) => x + y, 0) + w[j] / 2)), 40, X(0) + 14, X(1) - 14);
  let before = 0, after = 0;
  return [
    b.drawn,
    J.map((j) => {
      const [x, y] = [before, after], wide = X(w[j]) - X(0);
      before += u[j] * Math.min(unit, 1 / whole);
      after += w[j];
      const from = X(x), to = X(before);
      return [
        mark(`u.${j}`, "rect", { x: from, y: up, width: to - from, height: high, style: `fill:${color(j)}`, "fill-opacity": 0.45 }),
        line(`drop.${j}`, [[to, up + high], [X(after), down]], { class: "hair dashed", style: `stroke:${color(j)}` }),
        mark(`part.${j}`, "rect", { x: X(y), y: down, width: Math.max(0, wide - 1), height: high, style: `fill:${color(j)}` }),
        point(`dot.${j}`, X(y) + wide / 2, down + high / 2, Math.min(b.quiet ? 2 : 4, wide / 2), j, { style: `fill:${color(j)};stroke:none` }),
        b.quiet || hidden(S.i, j) ? [] : label(`share.${j}`, told[j], down + high + 16, shares[j], { "text-anchor": "middle", class: "share" }),
      ];
    }),
    b.quiet ? "" : text(X(0), up - 6, `sum of u = ${show(whole)}`, { class: "title" }) + text(X(1), down + high + 36, "sum of w = 1", { class: "title", "text-anchor": "end" }),
  ];
}

// The values as points within their hull, and the output.
function values(b, tied = true) {
  const points = J.map((j) => vectorOf("v", E, j)), at = plane(b.left, b.top, b.size, [...first.v, [0, 0], first.target], b.wide), out = vectorOf("o", E, S.i), goal = flat(E.map((c) => V.target(c)));
  const drawn = meeting(b, at, DATA.tokens, points, weights(), (j) => !hidden(S.i, j), out, tied, (j, p) => put(DATA.v[j], p));
  return { at, points, out, goal, place: (p) => [at.X(p), at.Y(p)], drawn, aim: aimed(b, at, goal, (p) => put(DATA.target, p)) };
}

function mix(W, H, small) {
  const b = board(W, H, small, weights(), `what ${DATA.tokens[S.i]} takes in: w`, "values, and their mean o within their hull", "w");
  return [b.drawn, values(b).drawn];
}

function wish(W, H, small) {
  const b = board(W, H, small, weights(), "weight w", "from the output o to what is wished for, t", "w"), { at, out, goal, place, drawn, aim } = values(b, false), far = at.unit * Math.hypot(goal[0] - out[0], goal[1] - out[1]);
  return [b.drawn, drawn, [1, 0.66, 0.33].map((part, n) => mark(`ring.${n}`, "circle", { cx: at.X(goal), cy: at.Y(goal), r: part * far, class: "ghost" })), vector("down", ...place(out), ...place(goal), { class: "vector thick" }), aim];
}

function toValues(W, H, small) {
  const b = board(W, H, small, weights(), "weight w", "where each value should go: −dv", "w"), { points, place, drawn, aim } = values(b, false);
  return [b.drawn, drawn, aim, points.map((p, j) => vector(`push.${j}`, ...place(p), ...place(p.map((x, c) => x - (c < E.length ? V.dv(j, c) : 0)))))];
}

function toWeights(W, H, small) {
  const b = board(W, H, small, J.map((j) => V.dw(S.i, j)), "gradient dw", "how far each value points along do", "dw"), { at, points, place, drawn, aim } = values(b, false), along = flat(E.map((c) => V.do(S.i, c)));
  return [b.drawn, drawn, feet(at, points, along, b.quiet), vector("down", ...place([0, 0]), ...place(along), { class: "vector thick" }), b.quiet ? [] : label("do name", at.X(along) + 8, at.Y(along) - 8, "do", { class: "name strong" }), aim];
}

function toScores(W, H, small) {
  const b = board(W, H, small, J.map((j) => V.dm(S.i, j)), "gradient dm = w (dw − r)", "dw. Height: dw − r, width: w, area: dm", "dm"), dw = J.map((j) => V.dw(S.i, j)), w = weights(), mean = V.mean(S.i);
  const Y = scale(Math.min(...dw, mean - 1e-6), Math.max(...dw, mean + 1e-6), b.top + b.size - 24, b.top + 24), X = (j) => b.left + (b.wide * (j + 0.5)) / J.length;
  return [
    b.drawn,
    svg("rect", { x: b.left, y: b.top, width: b.wide, height: b.size, rx: 6, class: "plane" }),
    line("along", [[b.left, Y(mean)], [b.left + b.wide, Y(mean)]], { class: "hair dashed" }),
    b.quiet ? [] : label("mean", b.left + 6, Y(mean) - 6, `r = ${show(mean)}`, { class: "name strong", "data-ref": `mean.${S.i}` }),
    J.map((j) => [
      line(`drop.${j}`, [[X(j), Y(dw[j])], [X(j), Y(mean)]], { class: "flow", style: `stroke:${color(j)}`, "stroke-width": Math.max(1, 26 * w[j]) }),
      point(`dot.${j}`, X(j), Y(dw[j]), (b.narrow ? 2.5 : 4) + (b.narrow ? 5 : 13) * Math.sqrt(w[j]), j, { opacity: hidden(S.i, j) ? 0.35 : 1 }),
      b.quiet ? [] : label(`name.${j}`, X(j), b.top + b.size - 6, DATA.tokens[j], { "text-anchor": "middle", class: "title" }),
    ]),
  ];
}

function toQuery(W, H, small) {
  const root_ = Math.sqrt(D.length), steps = J.map((j) => flat(D.map((d) => (-V.dm(S.i, j) * V.k(j, d)) / root_))), length = Math.max(1e-9, Math.hypot(...flat(D.map((d) => V.dq(S.i, d)))), ...steps.map((p) => Math.hypot(...p)));
  const b = board(W, H, small, J.map((j) => V.dm(S.i, j)), "gradient dm", "", "dm"), { at, q, drawn } = arrows(b), times = enlarged(at.unit * length, 0.3 * b.size);
  let here = q;
  const chain = steps.map((p, j) => { const from = here; here = here.map((x, c) => x + times * p[c]); return vector(`push.${j}`, at.X(from), at.Y(from), at.X(here), at.Y(here), { style: `stroke:${color(j)}` }); });
  return [b.drawn, b.quiet ? "" : text(b.left, 12, `each key pulls or pushes the query: −dq${times > 1 ? `, ${times} times as long` : ""}`, { class: "title" }), drawn, chain, vector("down", at.X(q), at.Y(q), at.X(here), at.Y(here), { class: "vector thick" })];
}

function toKeys(W, H, small) {
  const steps = J.map((j) => flat(D.map((d) => -V.dk(j, d)))), b = board(W, H, small, J.map((j) => V.dm(S.i, j)), "gradient dm", "", "dm"), { at, keys, drawn } = arrows(b), times = enlarged(at.unit * Math.max(1e-9, ...steps.map((p) => Math.hypot(...p))), 0.3 * b.size);
  return [b.drawn, b.quiet ? "" : text(b.left, 12, `where each key should go, along the query: −dk${times > 1 ? `, ${times} times as long` : ""}`, { class: "title" }), drawn, keys.map((p, j) => { const to = p.map((x, c) => x + times * steps[j][c]); return vector(`push.${j}`, at.X(p), at.Y(p), at.X(to), at.Y(to)); })];
}

// ---- cards -------------------------------------------------------------------------------------------------------------

const shown = (j) => percents(weights())[j];
const wanted = () => {
  const more = J.filter((j) => V.dm(S.i, j) < -5e-4), less = J.filter((j) => V.dm(S.i, j) > 5e-4);
  if (!more.length) return `No weight of ${word()} needs to change for this target.`;
  return `To come nearer to t, ${word()} should attend more to ${names(more)}${less.length ? ` and less to ${names(less)}` : ""}.`;
};

const forward = [
  {
    id: "SM.1", title: "Compare", show: [["k", "s[i]"], ["q[i]"]], pick: () => ["s", S.i, best()], picture: compare,
    alt: () => `The query of ${DATA.tokens[S.i]} and the keys as arrows, each key with its foot on the line of the query`,
    caption: () => `A key’s foot on the line of the query, times the query’s length, over √d, is its score: the highest is that of ${names([largest(J.map((j) => V.s(S.i, j)))])}.`,
    say: () => `The query of ${word()} is compared with the key of every word. The more the two point the same way, the higher the score. A sum of d products is typically √d times as large as one; the division takes that away.`,
  },
  {
    id: "SM.2", title: "Mask", show: [["s[i]", "m[i]"]], pick: () => ["m", S.i, J.at(-1)], picture: mask,
    alt: "The scores of all queries and keys as a table, the row of the followed word framed",
    caption: () => {
      const shut = J.filter((j) => hidden(S.i, j));
      return !K.causal ? `Nothing is hidden: every row has all its scores. Tick “causal” to hide what comes later${S.i < J.at(-1) ? `: ${word()} would not see ${names(J.filter((j) => j > S.i))}` : ", what is right of the diagonal"}.` : shut.length ? `${word()} does not see ${names(shut)}: those scores become −∞.` : `${word()} comes last and sees all; the rows above have lost what comes after them.`;
    },
    say: () => `A mask comes before the softmax: m is the score s, or −∞ where a word may not look. A model that predicts the next word must not see it (causal attention). ${!K.causal ? "Here all are seen." : S.i < J.at(-1) ? `Here ${word()} does not see what comes later: ${names(J.filter((j) => j > S.i))}.` : `Here a word does not see what comes later; ${word()} comes last and sees all.`}`,
  },
  {
    id: "SM.3", title: "Exponentiate", show: [["m[i]", "u[i]"]], pick: () => ["u", S.i, J.find((j) => j !== best()) ?? 0], picture: exponentiate,
    alt: "The curve of the exponential function with a point for each word",
    caption: () => `Left: how far each score is below the largest. Right: what exp makes of it. That of ${names([best()])} is the largest, so its u is 1.`,
    say: "A score higher by 1 always gives e times the unnormalised weight u. Subtracting the largest score changes no ratio, and keeps numbers from overflowing.",
  },
  {
    id: "SM.4", title: "Share", show: [["u[i]", "w[i]"]], pick: () => ["w", S.i, best()], picture: share,
    alt: () => `A bar divided: ${J.map((j) => `${DATA.tokens[j]} ${shown(j)}`).join(", ")}`,
    caption: () => `The bar of all u is stretched, or shrunk, to length 1. ${names([best()])} has ${shown(best())} of it.`,
    say: "Each u is divided by the sum of all of them. That is the weight w, and the weights add up to one.",
  },
  {
    id: "SM.5", title: "Mix", show: [["w[i]", "v"], ["o[i]"]], pick: () => ["o", S.i, 0], picture: mix,
    say: "The output is the mean of the values, and each value counts as much as its weight. So it lies within the hull of the values, whatever the weights are.",
  },
];
const backward = [
  {
    title: "What is wished for", of: "SM.5", formula: "do = o - t", show: [["o[i]", "do[i]"], ["target"]], pick: () => ["do", S.i, 0], picture: wish,
    alt: "An arrow from the output to the wanted output, and circles of equal loss",
    caption: () => `The arrow from o to t is −do: the way on which the loss falls fastest. It is ${show(Math.hypot(...E.map((c) => V.do(S.i, c))))} long. Drag t.`,
    say: () => `We wish that the output of ${word()} had been t. The loss is half the squared distance, so its gradient is the difference.`,
  },
  {
    id: "dSM.v", of: "SM.5", title: "To the values", show: [["w[i]", "dv"], ["do[i]"]], pick: () => ["dv", best(), 0], picture: toValues,
    alt: "An arrow at each value, as long as its weight is large",
    caption: () => `All arrows are parallel; that of ${names([best()])} is the longest, for its weight is the largest.`,
    say: () => `A value moved the output by its weight, so it gets that share of the gradient. Only ${word()} has a loss here, so the sum over i has one term.`,
  },
  {
    id: "dSM.4", of: "SM.5", title: "To the weights", show: [["v", "dw[i]"], ["do[i]"]], pick: () => ["dw", S.i, best()], picture: toWeights,
    alt: "The values, each with its foot on the line of the gradient of the output",
    caption: () => `A value whose foot lies along do raises the loss if its weight grows, most of all that of ${names([largest(J.map((j) => V.dw(S.i, j)))])}.`,
    say: "A weight moved the output along its value. So its gradient is how far that value points along the gradient of the output.",
  },
  {
    id: "dSM.2", of: "SM.4", title: "To the scores", show: [["w[i]", "dw[i]", "dm[i]"], ["mean[i]"]], pick: () => ["dm", S.i, most()], picture: toScores,
    alt: "The gradients of the weights above and below their weighted mean", caption: wanted,
    say: "Weights add up to one, so one grows at the cost of the others. Only what a word does beyond r counts, the weighted mean: the sum of w dw. A negative gradient means that this score should grow.",
  },
  {
    id: "dSM.q", of: "SM.1", title: "To the query", show: [["dm[i]", "k"], ["dq[i]"]], pick: () => ["dq", S.i, 0], picture: toQuery,
    alt: "The way of the query, as a chain of arrows, one along each key",
    caption: () => (Math.abs(V.dm(S.i, most())) < 5e-4 ? "No key moves the query: no score needs to change." : `From the query on, one arrow for each key: ${names([most()])} has the largest gradient of a score. The thick arrow is all of them together.`),
    say: "The gradient of the query is the sum of the keys, each times the gradient of its score, divided by √d as the scores were.",
  },
  {
    id: "dSM.k", of: "SM.1", title: "To the keys", show: [["dm[i]", "dk"], ["q[i]"]], pick: () => ["dk", most(), 0], picture: toKeys,
    alt: "An arrow at each key, along the query or against it",
    caption: () => (Math.abs(V.dm(S.i, most())) < 5e-4 ? "No key has to move: no score needs to change." : "Keys whose score should grow move along the query; the others move against it."),
    say: () => `The gradient of a key is the query times the gradient of its score, divided by √d. Again the sum over i has one term, that of ${word()}.`,
  },
];

function caption() {
  if (S.side === "backward") return wanted();
  const seen = J.filter((j) => !hidden(S.i, j)), order = [...seen].sort((a, b) => V.w(S.i, b) - V.w(S.i, a));
  if (seen.length === 1) return `${word()} sees only itself, so its output is its own value.`;
  if (V.w(S.i, order[0]) - V.w(S.i, order.at(-1)) < 5e-3) return `All ${seen.length} words that ${word()} sees count the same: the output is the plain mean of their values.`;
  const [one, other] = order.map((j) => `${shown(j)} from ${names([j])}`);
  return `${word()} takes ${one} and ${other}.${V.w(S.i, order[0]) > 0.95 ? " The mean has almost become a choice." : ""}`;
}

tour({
  title: "Softmax attention",
  short: "Each word takes in the others, weighed by how well they match.",
  intro: () => [
    "A word alone does not say what it means; its neighbours help. Attention lets a word look at the others, and take in part of what they carry.",
    `Each word has a <b>query</b> (what it looks for), a <b>key</b> (what it offers) and a <b>value</b> (what it hands over). A key that matches the query well gets a large weight, and the output is the mean of the values by these weights. The softmax makes the weights: positive, adding up to one, and smooth, so that they can be learned. We follow ${word()}.`,
  ],
  turn: "To learn is to change numbers so that a loss falls. So we ask of every number how the loss changes with it. That is its gradient, written with a d in front. The steps come in reverse.",
  quantities, forward, backward, caption,
  picture: (W, H, small) => (S.side === "backward" ? wish : mix)(W, H, small),
  tasks: [
    { say: "lower the temperature until one word gets more than 95 %", done: () => Math.max(...weights()) > 0.95 },
    { say: "follow a word that gets everything from itself, with the mask", done: () => K.causal && S.i === 0 },
    { say: "drag keys and values, or the target t (backwards), until o meets t", done: () => Math.hypot(...E.map((c) => V.o(S.i, c) - V.target(c))) < 0.1 },
  ],
  height: (W) => (W < 420 ? 134 : Math.min(520, Math.round(W * 0.56))),
  label: () => `What flows to ${DATA.tokens[S.i]}: ${J.map((j) => `${DATA.tokens[j]} ${percents(J.map((l) => V.w(S.i, l)))[j]}`).join(", ")}.`,
});
