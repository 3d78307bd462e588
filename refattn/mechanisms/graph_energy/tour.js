// The tour of graph energy attention: formulas, cards, picture.

const { q, k, v, s, a, r, n, b, x, c, rate, y, w, u, z, p, o, do: dout, dv, dp, dz, du, dy, dx, drate, dc, db, own, dn, dr, da_s, ds, all, pi, e: each } = F;
const MU = knob("mu");
const steps = () => K.steps, times = () => Array.from({ length: K.steps }, (_, t) => t);
const others = (i) => J.filter((j) => j !== i);
const softmax = (of, i, j) => div(exp(of(i, j)), sum(J.map((l) => exp(of(i, l)))));
const kept = (j) => V.x(K.steps, j) >= K.tau;
const filled = () => isTrue(J.some(kept), J.some(kept) ? "a word is kept" : "no word is kept");
const strongest = (i) => largest(J.map((j) => V.a(i, j) * V.x(K.steps, j)));
const read = () => (J.some(kept) ? undefined : strongest(S.i)); // the only word that is read if all are dropped
const rises = (t) => V.E(t) > V.E(t - 1) + 1e-12;

const draw = attention({ weights: () => J.map((j) => V.p(S.i, j)), seen: (j) => V.p(S.i, j) > 0 }), { word } = draw;

const quantities = {
  ...GIVEN, do: draw.gradient,
  s: { id: "GE.1", axes: "ij", what: "match of a query and a key", of: (i, j) => div(dot(D.map((e) => q(i, e)), D.map((e) => k(j, e))), sqrt(D.length)) },
  a: { id: "GE.2", axes: "ij", what: "softmax weight", of: (i, j) => softmax(s, i, j) },
  r: { id: "GE.3", axes: "ij", what: "likeness", of: (i, j) => div(add(s(i, j), s(j, i)), 2) },
  n: { id: "GE.4", axes: "ij", what: "link", of: (i, j) => softmax(r, i, j) },
  b: { id: "GE.5", axes: "i", what: "start of a score", of: (i) => div(1, add(1, exp(neg(s(i, i))))) },
  x: { id: "GE.8", axes: "Ti", passes: 1, what: "score", of: (t, i) => (t ? add(x(t - 1, i), mul(knob("step"), rate(t - 1, i))) : b(i)) },
  c: { id: "GE.6", axes: "ti", what: "pull of the neighbours", of: (t, i) => sum(others(i).map((j) => mul(n(i, j), sin(sub(x(t, j), x(t, i)))))) },
  rate: { id: "GE.7", axes: "ti", what: "rate of a score", of: (t, i) => add(mul(MU, sub(b(i), x(t, i))), mul(knob("kappa"), c(t, i))) },
  y: { id: "GE.9", axes: "j", what: "score after the cut", of: (j) => choose(lt(x(steps(), j), knob("tau")), 0, x(steps(), j)) },
  w: { axes: "ij", what: "softmax weight among the words that are kept", of: (i, j) => (kept(j) ? div(exp(s(i, j)), sum(J.filter(kept).map((l) => exp(s(i, l))))) : words("(the word is dropped)", 0)) },
  u: { id: "GE.10", axes: "ij", what: "part", of: (i, j) => mul(w(i, j), y(j)) },
  z: { id: "GE.11", axes: "i", what: "sum of the parts", of: (i) => choose(filled(), sum(J.map((j) => u(i, j))), 1) },
  p: {
    id: "GE.12", axes: "ij", what: "share",
    of: (i, j) => choose(filled(), div(u(i, j), z(i)), words(j === strongest(i) ? "(the largest a x takes all)" : "(another a x is larger)", j === strongest(i) ? 1 : 0)),
  },
  o: { id: "GE.13", axes: "ie", what: "output", of: (i, e) => sum(J.map((j) => mul(p(i, j), v(j, e)))) },
  dv: { id: "dGE.v", axes: "je", what: "gradient of a value", of: (j, e) => mul(p(S.i, j), dout(S.i, e)) },
  dp: { id: "dGE.12", axes: "ij", what: "gradient of a share", of: (i, j) => dot(E.map((e) => dout(i, e)), E.map((e) => v(j, e))) },
  dz: { id: "dGE.11", axes: "i", what: "gradient of the sum", of: (i) => choose(filled(), neg(div(sum(J.map((j) => mul(dp(i, j), p(i, j)))), z(i))), 0) },
  du: { id: "dGE.10", axes: "ij", what: "gradient of a part", of: (i, j) => choose(filled(), add(div(dp(i, j), z(i)), dz(i)), 0) },
  dy: { id: "dGE.9", axes: "j", what: "gradient of a score after the cut", of: (j) => mul(du(S.i, j), w(S.i, j)) },
  dx: {
    id: "dGE.before", axes: "Ti", passes: 1, back: true, what: "gradient of a score",
    of: (t, i) =>
      t === steps() ? dy(i)
        : add(sub(dx(t + 1, i), mul(MU, drate(t, i))), ...others(i).map((j) => mul(sub(mul(dc(t, j), n(j, i)), mul(dc(t, i), n(i, j))), cos(sub(x(t, j), x(t, i)))))),
  },
  drate: { id: "dGE.7", axes: "ti", back: true, what: "gradient of a rate", of: (t, i) => mul(knob("step"), dx(t + 1, i)) },
  dc: { id: "dGE.6", axes: "ti", back: true, what: "gradient of a pull", of: (t, i) => mul(knob("kappa"), drate(t, i)) },
  db: { id: "dGE.5", axes: "i", what: "gradient of a start", of: (i) => add(dx(0, i), mul(MU, sum(times().map((t) => drate(t, i))))) },
  dkappa: { id: "dGE.kappa", axes: "", what: "gradient of kappa", of: () => sum(times().flatMap((t) => J.map((i) => mul(drate(t, i), c(t, i))))) },
  dmu: { id: "dGE.mu", axes: "", what: "gradient of mu", of: () => sum(times().flatMap((t) => J.map((i) => mul(drate(t, i), sub(b(i), x(t, i)))))) },
  dstep: { id: "dGE.step", axes: "", what: "gradient of the length of a step", of: () => sum(times().flatMap((t) => J.map((i) => mul(dx(t + 1, i), rate(t, i))))) },
  dn: { id: "dGE.4", axes: "ij", what: "gradient of a link", of: (i, j) => (i === j ? words("(a link to itself pulls nothing)", 0) : sum(times().map((t) => mul(dc(t, i), sin(sub(x(t, j), x(t, i))))))) },
  dr: { id: "dGE.3", axes: "ij", what: "gradient of a likeness", of: (i, j) => mul(n(i, j), sub(dn(i, j), sum(J.map((l) => mul(n(i, l), dn(i, l)))))) },
  da_s: { axes: "ij", symbol: "g", what: "gradient of a match, through w", of: (i, j) => mul(w(i, j), sub(mul(du(i, j), y(j)), sum(J.map((l) => mul(w(i, l), du(i, l), y(l)))))) },
  own: { axes: "i", symbol: "m", what: "gradient of a token's own match, through its start", of: (i) => mul(db(i), b(i), sub(1, b(i))) },
  ds: { id: "dGE.1", axes: "ij", what: "gradient of a match", of: (i, j) => add(da_s(i, j), div(add(dr(i, j), dr(j, i)), 2), ...(i === j ? [own(i)] : [])) },
  dq: { id: "dGE.q", axes: "id", what: "gradient of a query", of: (i, e) => div(sum(J.map((j) => mul(ds(i, j), k(j, e)))), sqrt(D.length)) },
  dk: { id: "dGE.k", axes: "jd", what: "gradient of a key", of: (j, e) => div(sum(J.map((i) => mul(ds(i, j), q(i, e)))), sqrt(D.length)) },
  all: { axes: "", symbol: "w", what: "sum over all pairs", of: () => sum(J.flatMap((i) => J.map((l) => exp(r(i, l))))) },
  pi: { axes: "i", what: "how strongly a word is linked", of: (i) => div(sum(J.map((l) => exp(r(i, l)))), all()) },
  e: {
    axes: "Ti", symbol: "E", what: "energy of a word",
    of: (t, i) => mul(pi(i), add(mul(div(MU, 2), pow(sub(x(t, i), b(i)), 2)), mul(div(knob("kappa"), 2), sum(others(i).map((j) => mul(n(i, j), sub(1, cos(sub(x(t, j), x(t, i)))))))))),
  },
  E: { id: "energy", axes: "T", what: "energy", of: (t) => sum(J.map((i) => each(t, i))) },
};

// The scores in words, for those who do not see the picture.
const whole = () => `Scores from the first step to the last: ${J.map((j) => `${DATA.tokens[j]} ${show(V.x(0, j))} to ${show(V.x(K.steps, j))}`).join(", ")}.`;
const saved = () => J.filter((j) => V.b(j) < K.tau && kept(j)), lost = () => J.filter((j) => V.b(j) >= K.tau && !kept(j)), dropped = () => J.filter((j) => !kept(j));
const mover = () => saved()[0] ?? lost()[0] ?? largest(J.map((j) => Math.abs(V.x(K.steps, j) - V.b(j))));
const nearest = (i) => others(i).reduce((best, j) => (V.n(i, j) > V.n(i, best) ? j : best), others(i)[0] ?? i);
const now = () => Math.min(S.t, K.steps - 1);
// A link times pi, which is the same both ways.
const both = (i, j) => (i === j ? "" : `: ${show(V.pi(i))} · ${show(V.n(i, j))} = ${show(V.pi(j))} · ${show(V.n(j, i))}`);
// What a step does to the energy, in numbers.
function lowers(t) {
  const way = `from ${show(V.E(t))} to ${show(V.E(t + 1))}`;
  if (rises(t + 1)) return `This step is too long: it goes beyond the valley, and E rises ${way}.`;
  return V.E(t) - V.E(t + 1) > 1e-12 ? `Here E falls ${way}.` : `Here nothing moves, and E stays ${show(V.E(t))}.`;
}
// Where the threshold would drop one word more, or keep one more.
function turns() {
  const score = (j) => V.x(K.steps, j), lowest = J.filter(kept).sort((a, b) => score(a) - score(b))[0], highest = dropped().sort((a, b) => score(b) - score(a))[0];
  const more = lowest === undefined ? "" : ` Above ${show(score(lowest))} it would drop ${names([lowest])}, too.`;
  return more + (highest === undefined || score(highest) <= 0 ? "" : ` At ${show(score(highest))} or below it would keep ${names([highest])}.`);
}
const are = (list) => (list.length > 1 ? "are" : "is");

// ---- pictures: the words with a bar each, and beside them what the card is about ---------------------------------------

const shares = draw.weights, against = (list) => list.map((x) => -x);
const moment = () => S.at ?? S.t;
// A number of a word between two steps.
const along = (of, at, j, last) => {
  const low = Math.min(Math.floor(at), last), high = Math.min(low + 1, last);
  return of(low, j) + (at - low) * (of(high, j) - of(low, j));
};
const score = (j) => along(V.x, moment(), j, K.steps), during = (of) => J.map((j) => along(of, moment(), j, K.steps - 1));

// The graph within a box: lines as thick as `wide(i, j)` says, circles as large as scores, dashed below the threshold.
function graph({ cx, cy, across, R }, narrow, wide, of = score, look = () => ({}), ringed = S.i) {
  const size = R / 82, spot = J.map((j) => { const angle = -Math.PI / 2 + (2 * Math.PI * (j - Math.floor(J.length / 2))) / J.length; return [cx + across * Math.cos(angle), cy + R * Math.sin(angle)]; });
  const radius = J.map((j) => size * (6 + 18 * Math.max(0, Math.min(1.3, of(j)))));
  return {
    spot, radius,
    drawn: [
      J.map((i) => others(i).filter((j) => j > i).map((j) => line(`link.${i}.${j}`, [spot[i], spot[j]], { class: "bond", "stroke-width": Math.max(0.8, 18 * size * wide(i, j)), ...look(i, j) }))),
      J.map((j) => [
        j === ringed ? mark("ring", "circle", { cx: spot[j][0], cy: spot[j][1], r: radius[j] + 3.5, class: "ring" }) : [],
        point(`dot.${j}`, ...spot[j], radius[j], j, { "data-word": j, ...(of(j) < K.tau ? { style: `stroke:${color(j)};stroke-width:2`, class: "dropped" } : {}) }),
        narrow ? [] : label(`name.${j}`, spot[j][0], spot[j][1] + (spot[j][1] < cy - 2 ? -radius[j] - (j === ringed ? 8 : 5) : radius[j] + (j === ringed ? 17 : 14)), DATA.tokens[j], { "text-anchor": "middle", class: j === ringed ? "name strong" : "name" }),
      ]),
    ],
  };
}
const mean = (i, j) => 0.5 * (V.n(i, j) + V.n(j, i));
const within = (b) => ({ cx: b.left + b.wide / 2, cy: b.top + b.size / 2, across: Math.min(0.42 * b.wide, 0.8 * b.size), R: 0.5 * b.size - (b.quiet ? 16 : 46) });

// A column for each word, as high as `of` it, above the threshold or below it; `arrows`: which way numbers push, to scale.
function ladder(b, of, arrows = [], from = undefined) {
  const all = [0, 1, ...[...times(), K.steps].flatMap((t) => J.map((j) => V.x(t, j)))], low = Math.min(...all), high = Math.max(...all), room = b.quiet ? 14 : 34;
  const Y = scale(low, high, b.top + b.size - room, b.top + room), X = (j) => b.left + (b.wide * (j + 0.5)) / J.length, cut = Math.max(b.top, Math.min(b.top + b.size, Y(K.tau))), gap = Math.min(13, b.wide / J.length / (2 * arrows.length + 1));
  const unit = Math.min((0.3 * b.size) / Math.max(1e-9, ...arrows.flatMap(({ list }) => list.map(Math.abs))), ...arrows.flatMap(({ list }) => list.map((z, j) => Math.max(8, z > 0 ? Y(of(j)) - b.top : b.top + b.size - Y(of(j))) / Math.max(1e-9, Math.abs(z)))));
  return {
    X, Y,
    drawn: [
      svg("rect", { x: b.left, y: b.top, width: b.wide, height: b.size, rx: 6, class: "plane" }),
      mark("below", "rect", { x: b.left, y: cut, width: b.wide, height: b.top + b.size - cut, class: "below" }),
      line("cut", [[b.left, cut], [b.left + b.wide, cut]], { class: "cut" }),
      b.quiet ? "" : text(b.left + 4, cut - 4, "τ", { class: "strong" }),
      J.map((j) => [
        from ? [line(`way.${j}`, [[X(j), Y(from(j))], [X(j), Y(of(j))]], { class: "flow", style: `stroke:${color(j)}`, "stroke-width": 3 }), mark(`ring.${j}`, "circle", { cx: X(j), cy: Y(from(j)), r: b.quiet ? 3 : 6, class: "ring", style: `stroke:${color(j)}` })] : [],
        arrows.map(({ key, list, thick }, m) => vector(`${key}.${j}`, X(j) + gap * (m + 1), Y(of(j)), X(j) + gap * (m + 1), Y(of(j)) - unit * list[j], thick ? { class: "vector thick" } : { style: `stroke:${color(j)}` })),
        point(`dot.${j}`, X(j), Y(of(j)), b.quiet ? 3.5 : 6, j),
        b.quiet ? [] : label(`name.${j}`, X(j), b.top + b.size - 6, DATA.tokens[j], { "text-anchor": "middle", class: "title" }),
      ]),
    ],
  };
}

function start(b) {
  const matches = J.map((j) => V.s(j, j)), far = Math.max(3, ...matches.map(Math.abs)) * 1.1, { X, Y, drawn } = draw.curve(b, (x) => 1 / (1 + Math.exp(-x)), -far, far, [0, 1], matches.map((x, j) => [x, V.b(j)]), { room: [22, 16] });
  return [
    line("cut", [[X(-far), Y(K.tau)], [X(far), Y(K.tau)]], { class: "cut" }), drawn,
    b.quiet ? "" : text(X(-far) + 2, Y(K.tau) - 5, `threshold τ = ${show(K.tau)}`, { class: "title" }) + text(X(far), b.top + b.size - 4, "match with itself", { class: "tick", "text-anchor": "end" }),
  ];
}

function pull(b) {
  const m = mover(), { X, Y, drawn } = ladder(b, score, [{ key: "push", list: during(V.c) }]);
  return [drawn.slice(0, 1), others(m).map((j) => line(`tie.${j}`, [[X(m), Y(score(m))], [X(j), Y(score(j))]], { class: "flow", style: `stroke:${color(j)}`, "stroke-width": Math.max(0.5, 14 * V.n(m, j)) })), drawn.slice(1)];
}

function forces(b) {
  const spring = J.map((j) => K.mu * (V.b(j) - score(j)));
  return ladder(b, score, [{ key: "spring", list: spring }, { key: "push", list: during(V.c).map((z) => K.kappa * z) }, { key: "sum", list: during(V.rate), thick: true }], V.b).drawn;
}

function energies(b) {
  const moments = [...times(), K.steps], X = scale(0, K.steps + 1, b.left, b.left + b.wide), Y = scale(0, Math.max(1e-12, ...moments.map((t) => V.E(t))), b.top + b.size, b.top + 8);
  return [
    moments.map((t) => {
      let under = 0;
      return J.map((j) => { const from = under; under += V.e(t, j); return mark(`e.${t}.${j}`, "rect", { x: X(t) + 0.5, y: Y(under), width: Math.max(1, X(1) - X(0) - 1), height: Y(from) - Y(under), style: `fill:${color(j)}` }); });
    }),
    moments.slice(1).filter(rises).map((t) => line(`rise.${t}`, [[X(t - 0.5), Y(V.E(t - 1))], [X(t + 0.5), Y(V.E(t))]], { class: "rising" })),
    mark("now", "rect", { x: X(moment()), y: b.top, width: X(1) - X(0), height: b.size, rx: 2, class: "frame" }),
  ];
}

function cutOff(b) {
  const { X, Y, drawn } = ladder(b, (j) => V.x(K.steps, j), [], V.b);
  return [drawn, dropped().map((j) => cross(`gone.${j}`, X(j), Y(V.x(K.steps, j)), b.quiet ? 4 : 8))];
}

function weigh(b) {
  const parts = draw.divided(b, "part", J.map((j) => V.w(S.i, j)), b.top + 10, b.size - 30, (j) => V.y(j));
  return [
    line("one", [[b.left + 4, b.top + 10], [b.left + b.wide - 4, b.top + 10]], { class: "hair dashed" }), b.quiet ? "" : text(b.left + b.wide - 4, b.top + 6, "score 1", { class: "tick", "text-anchor": "end" }),
    parts.map((part, j) => [
      part.drawn, point(`dot.${j}`, part.middle, part.top + 6, b.quiet ? 2 : 4, j, { opacity: kept(j) ? 1 : 0, style: `fill:${color(j)};stroke:none` }),
      b.quiet || part.wide < 8 * DATA.tokens[j].length ? [] : label(`name.${j}`, part.middle, b.top + b.size - 5, DATA.tokens[j], { "text-anchor": "middle", class: "title" }),
    ]),
  ];
}

function toLinks(b) {
  const wanted = (i, j) => -V.dn(i, j) - V.dn(j, i), most = Math.max(1e-12, ...J.flatMap((i) => others(i).map((j) => Math.abs(wanted(i, j)))));
  return graph(within(b), b.quiet, (i, j) => (0.4 * Math.abs(wanted(i, j))) / most, () => 0.45, (i, j) => ({ style: `stroke:rgb(var(--${wanted(i, j) < 0 ? "minus" : "plus"}))` }), mover()).drawn;
}

// Queries and keys as points, each with an arrow against its gradient.
function toVectors(b) {
  const { q, k } = draw.first, at = plane(b.left, b.top, b.size, [...q, ...k], b.wide), place = (to) => [at.X(to), at.Y(to)];
  const moves = [["query", "q", "dq"], ["key", "k", "dk"]].flatMap(([key, name, slope]) => J.map((j) => [key, j, draw.vectorOf(name, D, j), draw.vectorOf(slope, D, j)])), unit = (0.25 * b.size) / at.unit / Math.max(1e-12, ...moves.map(([, , , way]) => Math.hypot(...way)));
  return [at.ground, moves.map(([key, j, from, way]) => [
    key === "key" ? point(`dot.${j}`, ...place(from), b.quiet ? 3 : 5, j) : mark(`query.${j}`, "circle", { cx: at.X(from), cy: at.Y(from), r: b.quiet ? 3 : 5, class: "sink", style: `stroke:${color(j)}` }),
    vector(`${key === "key" ? "push" : "pull"}.${j}`, ...place(from), ...place(minus(from, way, unit)), { style: `stroke:${color(j)}` }),
    b.quiet || key === "query" ? [] : label(`name.${j}`, at.X(from) + 8, at.Y(from) - 7, DATA.tokens[j], { class: "name" }),
  ])];
}

// Left: the scores over the steps with the threshold, and the energy below. Right: the graph at the chosen step.
const box = {};
function overview(W, H, small) {
  const back = S.side === "backward", last = K.steps, narrow = W < 420, of = back ? (t, j) => -V.dx(t, j) : V.x, at = moment(), moments = [...times(), last];
  const numbers = moments.flatMap((t) => J.map((j) => of(t, j))), most = Math.max(1e-9, ...numbers.map(Math.abs));
  const top = small ? 6 : narrow ? 16 : 24, bottom = H - (narrow ? 26 : 64), left = small ? 2 : narrow ? 18 : 24, right = W * 0.42;
  const X = scale(0, last, left, right), Y = back ? scale(-1.08 * most, 1.08 * most, bottom, top) : scale(Math.min(0, ...numbers), Math.max(1, ...numbers), bottom, top);
  Object.assign(box, { left, right, top, bottom, last });
  const told = percents(shares()), title = (x, y, words, anchor = "start") => (small ? "" : text(x, y, words, { class: "title", "text-anchor": anchor }));
  const R = Math.min((bottom - top) / 2 - (narrow ? 4 : 26), W * 0.17), across = narrow ? Math.min(1.25 * R, 0.115 * W) : R, g = { cx: W - across - (narrow ? 18 : 56), cy: (top + (narrow ? H : bottom)) / 2 + (small ? 0 : 2), across, R };
  const { spot, radius, drawn } = graph(g, small, mean), cut = Math.max(top, Math.min(bottom, Y(K.tau)));
  const ends = spread(J.map((j) => Y(of(last, j))), narrow ? 14 : 17, top + 4, bottom), energies = moments.map((t) => V.E(t));
  const EY = scale(Math.min(...energies), Math.max(...energies, Math.min(...energies) + 1e-9), H - (small ? 5 : narrow ? 3 : 18), bottom + (narrow ? 7 : 12));
  return [
    title(narrow ? left : 0, 12, back ? (narrow ? "minus the gradient; up: should be higher" : "minus the gradient of each score; up: it should be higher") : "score x of each word"),
    back ? "" : title(right + 14, 12, narrow ? "final share" : `final attention${W < 540 ? "" : ` (step ${last})`}`),
    narrow && back ? "" : title(W, 12, narrow ? "now" : `the graph at step ${S.t}`, "end"),
    svg("rect", { x: left, y: top, width: right - left, height: bottom - top, rx: 3, class: "plane" }),
    back
      ? [line("cut", [[left, Y(0)], [right, Y(0)]], { class: "cut" }), text(left - 5, Y(0) + 4, "0", { class: "tick", "text-anchor": "end" })]
      : [
          mark("below", "rect", { x: left, y: cut, width: right - left, height: bottom - cut, class: "below" }), line("cut", [[left - 4, cut], [right + 4, cut]], { class: "cut" }),
          small ? "" : text(left - 6, cut + 4, "τ", { class: "strong", "text-anchor": "end" }) + [0, 1].filter((x) => Math.abs(cut - Y(x)) > 14).map((x) => text(left - 6, Y(x) + 4, x, { class: "tick", "text-anchor": "end" })).join(""),
          moments.slice(1).map((t) => line(`energy.${t}`, [[X(t - 1), EY(energies[t - 1])], [X(t), EY(energies[t])]], { class: rises(t) ? "rising" : "falling" })),
          mark("energy", "circle", { cx: X(at), cy: EY(along((t) => V.E(t), at, 0, last)), r: 3.5, class: "sink" }),
          title(right + 14, (bottom + H) / 2 + (narrow ? 5 : 0), "energy"),
        ],
    J.map((j) => line(`flow.${j}`, moments.map((t) => [X(t), Y(of(t, j))]), { class: "line", style: `stroke:${color(j)}` })),
    line("now", [[X(at), top], [X(at), H - (narrow ? 2 : 16)]]),
    J.map((j) => point(`here.${j}`, X(at), Y(along(of, at, j, last)), narrow ? 3.5 : 4.5, j)),
    small ? [] : J.map((j) => [
      line(`tie.${j}`, [[right + 2, Y(of(last, j))], [right + 11, ends[j]]], { class: "tie", style: `stroke:${color(j)}` }),
      label(`end.${j}`, right + 14, ends[j] + 4, DATA.tokens[j] + (back ? "" : `<tspan class="share" data-ref="p.${S.i}.${j}"> ${told[j]}</tspan>`), kept(j) || back || j === read() ? {} : { class: "title" }),
    ]),
    narrow || small ? "" : text(left, H - 3, "step 0", { class: "tick" }) + text(right, H - 3, `${last}`, { class: "tick", "text-anchor": "end" }),
    narrow ? "" : (back ? ["▲ should be higher, ▼ lower"] : ["size: score; thick line: strong link;", "dashed: below τ now"]).map((words, m) => title(W, (bottom + H) / 2 + 16 * m, words, "end")),
    J.map((j) => follows(j, DATA.tokens[j], svg("circle", { cx: spot[j][0], cy: spot[j][1], r: Math.max(14, radius[j] + 4), class: "ground" }))),
    drawn,
    !back && read() !== undefined && read() !== S.i && !small ? line("read", [spot[read()], spot[S.i]], { class: "cut" }) : [],
    back ? J.map((j) => { const slope = along(V.dx, at, j, last); return Math.abs(slope) > 1e-4 ? label(`sign.${j}`, spot[j][0], spot[j][1] + 4.5, slope > 0 ? "▼" : "▲", { "text-anchor": "middle", class: "name" }) : []; }) : [],
  ];
}

// ---- cards -------------------------------------------------------------------------------------------------------------

const forward = [
  { id: "GE.1", title: "Compare", show: [["q", "k"], ["s"]], pick: () => ["s", S.i, nearest(S.i)],
    bars: ["s", "match s"], heading: "who looks (rows) at whom (columns)", draw: (b) => draw.pairs(b, "s"),
    caption: () => `Blue: two match; orange: they point apart. The frame is the row of ${word()}, which matches ${names([largest(J.map((j) => V.s(S.i, j)))])} best.`,
    alt: "The matches of all queries and keys as a table",
    say: "Each word has a query (what it looks for), a key (what it offers) and a value (what it hands over). Every query is compared with every key, as in softmax attention." },
  { id: "GE.2", title: "Attend", show: [["s[i]", "a[i]"]], pick: () => ["a", S.i, largest(J.map((j) => V.a(S.i, j)))],
    bars: ["a", "weight a"], heading: "each row of matches as shares of one", draw: (b) => draw.pairs(b, "a"),
    caption: () => `Every row now adds up to one. ${word()} alone would give ${names([largest(J.map((j) => V.a(S.i, j)))])} the largest share, ${percent(Math.max(...J.map((j) => V.a(S.i, j))))}.`,
    alt: "The softmax weights of all words as a table",
    say: () => `The softmax gives the weights that ${word()} would use alone. They are used only if all words are dropped (step 12); else a softmax over those that are kept is (step 11).` },
  { id: "GE.3", title: "Likeness", show: [["s"], ["r"]], pick: () => ["r", mover(), nearest(mover())],
    bars: () => ["r", `likeness of ${DATA.tokens[mover()]}`, [mover()]], heading: "the mean of both ways: its own mirror image", draw: (b) => draw.pairs(b, "r", [[mover(), nearest(mover()), 1], [nearest(mover()), mover(), 1]]),
    caption: () => `The table is its own mirror image: the two cells in frames, ${names([mover()])} and ${names([nearest(mover())])}, are the same number.`,
    alt: "The likenesses of all words as a table",
    say: () => `Two words match one way and the other. We average both ways, so that alike means the same for both. Up to step 10 numbers are those of ${names([mover()])}, the word to watch in the flow.` },
  { id: "GE.4", title: "Link", show: [["r"], ["n"]], pick: () => ["n", mover(), nearest(mover())],
    bars: () => ["n", `links of ${DATA.tokens[mover()]}`, [mover()]], heading: "the graph: the thicker, the more alike", draw: (b) => graph(within(b), b.quiet, mean, () => 0.45, undefined, mover()).drawn,
    caption: () => `A line is as thick as the mean of both ways. ${names([mover()])} leans on ${names([nearest(mover())])} the most, and its link to itself pulls nothing.`,
    alt: "The graph of the words",
    say: () => `A softmax makes links of likeness: the links of a word add up to one. Likeness is the same both ways, its share is not; step 9 comes back to this. The link of ${names([mover()])} to itself, ${show(V.n(mover(), mover()))}, pulls at nothing: it only makes the other pulls weaker.` },
  { id: "GE.5", title: "Start", when: "first", show: [["s[ii]", "b"]], pick: () => ["b", mover()],
    bars: ["b", "start b"], heading: "a word’s match with itself, squeezed between 0 and 1", draw: start,
    caption: () => `Each word on the curve that squeezes its match with itself. ${J.some((j) => V.b(j) < K.tau) ? `Below the threshold τ: ${names(J.filter((j) => V.b(j) < K.tau))}.` : "All are above the threshold τ."}`,
    alt: "A curve from 0 to 1 with a point for each word",
    say: "Each word has a score x: how much it counts for all others. It starts from how well its query matches its own key, squeezed between 0 and 1. That is computed already, and queries and keys can be learned that make it large for words that matter." },
  { id: "GE.6", title: "Feel the neighbours", when: "step", show: [["x", "c"], ["n"]], pick: () => ["c", now(), mover()],
    bars: () => [during(V.c), "pull c"], heading: () => `scores at step ${S.t}: what pulls at ${DATA.tokens[mover()]}`, draw: pull,
    caption: () => `Height: the score. Lines from ${names([mover()])} are as thick as its links; an arrow shows which way the neighbours pull each score.`,
    alt: "The scores of the words as points, and an arrow at each",
    say: "Each neighbour pulls a score x towards its own: by the link, times the sine of the difference. While scores are less than 1 apart the sine is about the difference; it keeps the pull bounded if they are further apart." },
  { id: "GE.7", title: "Add both forces", when: "step", show: [["b", "x", "c", "rate"]], pick: () => ["rate", now(), mover()],
    bars: () => [during(V.rate), "rate"], heading: () => `at step ${S.t}: spring and pull (coloured), and their sum`, draw: forces,
    caption: "Ring: where a word began. The first arrow is the spring back to it, the second the pull times κ, the thick one their sum: the rate.",
    alt: "Three arrows at each score: spring, pull and their sum",
    say: "A spring of strength μ pulls the score back to its start, and the neighbours pull it to theirs. The sum is how fast it moves." },
  { id: "GE.8", title: "Move", picture: overview, when: "step", show: [["x", "rate", "x+1"]], pick: () => ["x", now() + 1, mover()],
    caption: () => `In this step the score of ${names([mover()])} goes from ${show(V.x(now(), mover()))} to ${show(V.x(now() + 1, mover()))}: by ${show(K.step)} times its rate, ${show(V.rate(now(), mover()))}.`,
    alt: whole,
    say: "The score takes a short step along its rate. Then all begins again from where the scores are." },
  { title: "Lower the energy", show: [["pi", "e", "e+1"], ["E", "E+1"]], pick: () => ["E", S.t],
    bars: () => [J.map((j) => along(V.e, moment(), j, K.steps)), "energy of each word"], heading: () => `energy E over the steps, now ${S.t}: the sum of all words`, draw: energies,
    caption: () => `A column for each step: the energy, in parts of the words; the frame is now. ${times().some((t) => rises(t + 1)) ? "Red lines: where it rises." : "It never rises."}`,
    alt: "A column for each step, divided among the words",
    when: "step", label: "what the flow goes down", formula: "E = sum_i E_i, E_i = pi_i mu/2 (x_i - b_i)^2 + pi_i kappa/2 sum_j n_ij (1 - cos(x_j - x_i))", also: { formula: "pi_i = sum_l exp(r_il) / sum_jl exp(r_jl)" },
    say: () => `Times π (how strongly a word is linked in all) a link is the same both ways${both(mover(), nearest(mover()))}. E is low if linked scores are alike, and near their starts: seldom both, so it is seldom 0. Rates are its slopes, over −π. ${lowers(now())}` },
  { id: "GE.9", title: "Cut", when: "last", show: [["b", "x.last", "y"]], pick: () => ["y", mover()],
    bars: ["y", "after the cut: y"], heading: "from start (ring) to the last score; below τ: dropped", draw: cutOff,
    caption: () => `From the start, a ring, to the last score. ${dropped().length ? `Below τ and dropped: ${names(dropped())}.` : "No word is below τ."}${saved().length ? ` Its neighbours lifted ${names(saved())} above it.` : ""}`,
    alt: "The way of each score from its start to its end, and the threshold",
    say: () => `After the last step a word with a score below the threshold τ is dropped: nobody reads it. The scores do not know of τ: its knob only says where to cut.${turns()}` },
  { id: "GE.10", title: "Weigh", when: "last", show: [["s[i]", "w[i]", "y", "u[i]"]], pick: () => ["u", S.i, mover()],
    bars: ["u", "part u = w y"], heading: "as wide as the weight w, as high as the score: the part", draw: weigh,
    caption: () => (read() === undefined ? "Width: the softmax among the words that are kept. Height: the score. A part is the area." : "All words are dropped, so there is no part."),
    alt: "A bar for each word, as wide as its weight and as high as its score",
    say: () => `The softmax once more, over the kept words alone: w is how ${word()} would weigh these. Each w is multiplied by that word's score. The part of a dropped word is 0; it still reads others.` },
  { id: ["GE.12", "GE.11"], title: "Share", when: "last", show: [["u[i]", "p[i]"], ["z[i]"]], pick: () => ["p", S.i, read() ?? mover()],
    bars: ["p", "share p"], heading: "the parts u, and each divided by their sum z", draw: (b) => draw.shared(b, "u", "p"),
    caption: () => (read() === undefined ? `The bar of all parts is stretched to length 1: ${names([largest(shares())])} has ${percent(Math.max(...shares()))} of it.${saved().length && J.some((j) => V.b(j) >= K.tau) ? ` Without the flow ${names(saved())} would have 0 %.` : ""}` : `No part is left, so ${names([read()])} gets all.`),
    alt: "A bar divided among the words",
    say: () => `Divided by their sum, the parts are shares, which add up to one. If all words are dropped, ${word()} reads only the word whose weight a times score x, before the cut, is largest${read() === undefined ? "" : `: here ${names([read()])}`}.` },
  { id: "GE.13", title: "Mix", when: "last", show: [["p[i]", "v"], ["o[i]"]], pick: () => ["o", S.i, 0],
    bars: () => ["p", `what ${DATA.tokens[S.i]} takes in: p`], heading: "the values, and their mean o", draw: (b) => draw.values(b, true).drawn,
    caption: () => `The larger the share, the larger the point. ${dropped().length && read() === undefined ? `${names(dropped())} ${are(dropped())} pale: nobody reads ${dropped().length > 1 ? "them" : "it"}.` : "The output lies among the values."}`,
    alt: "The values as points, and their mean",
    say: "The output is the mean of the values, and each counts by its share." },
];
const backward = [
  { ...draw.wished("GE.13", "p", "share p"), when: "last" },
  { id: "dGE.v", of: "GE.13", title: "To the values", when: "last", show: [["p[i]", "dv"], ["do[i]"]], pick: () => ["dv", largest(J.map((j) => V.p(S.i, j))), 0],
    bars: ["p", "share p"], heading: "where each value should go: −dv", draw: draw.toValues,
    caption: () => `All arrows are parallel; that of ${names([largest(shares())])} is the longest, for its share is the largest.`,
    alt: "An arrow at each value, as long as its share is large",
    say: "A value moved the output by its share, so it gets that share of the gradient." },
  { id: "dGE.12", of: "GE.13", title: "To the shares", when: "last", show: [["v", "dp[i]"], ["do[i]"]], pick: () => ["dp", S.i, mover()],
    bars: ["dp", "gradient dp"], heading: "how far each value points along do", draw: draw.toWeights,
    caption: () => `A value whose foot lies along do raises the loss if its share grows, most of all that of ${names([largest(J.map((j) => V.dp(S.i, j)))])}.`,
    alt: "The values, each with its foot on the line of the gradient",
    say: "A share moved the output along its value. So its gradient is how far that value points along the gradient of the output." },
  { id: ["dGE.11", "dGE.10"], of: "GE.12", title: "To the parts", when: "last", show: [["p[i]", "dp[i]", "du[i]"], ["z[i]", "dz[i]"]], pick: () => ["du", S.i, mover()],
    bars: ["du", "gradient du"], heading: "dp, and how far it is from the mean", draw: (b) => { const slopes = J.map((j) => V.dp(S.i, j)), mean = J.reduce((past, j) => past + V.p(S.i, j) * slopes[j], 0); return draw.about(b, slopes, mean, `mean ${show(mean)}`); },
    caption: () => (read() === undefined ? "Height: dp. The dashed line is the mean by shares: above it a part should shrink, below it grow." : "All words are dropped: the word that is read has all, and no part gets a gradient."),
    alt: "The gradients of the shares above and below their mean",
    say: "Shares add up to one, so only what a word does beyond the mean counts." },
  { id: "dGE.9", of: "GE.10", title: "To scores", when: "last", show: [["w[i]", "du[i]", "dy"]], pick: () => ["dy", mover()],
    bars: ["dy", "gradient dy"], heading: "last scores, and which way each should go: −dy", draw: (b) => ladder(b, (j) => V.x(K.steps, j), [{ key: "push", list: J.map((j) => -V.dy(j)), thick: true }]).drawn,
    caption: () => (dropped().length ? `The arrows are −dy, each to scale. ${names(dropped())}, below τ, ${are(dropped())} dropped, so no arrow is there.` : "The arrows are −dy, each to scale. No word is dropped."),
    alt: "The last scores with an arrow at each",
    say: "A part is a weight w times a score, so the score gets the gradient times w, and w the gradient times the score. A dropped word was set to 0 whatever its exact score: a tiny change of that changes nothing, so its gradient is 0." },
  { id: "dGE.7", of: "GE.8", title: "A step back, to the rates", when: "step", show: [["dx+1", "drate"]], pick: () => ["drate", now(), mover()],
    bars: () => [during(V.drate), "gradient of the rate"], heading: () => `step ${S.t}: wanted change of scores, and of rates (thick)`, draw: (b) => ladder(b, score, [{ key: "push", list: against(during((t, j) => V.dx(t + 1, j))) }, { key: "sum", list: against(during(V.drate)), thick: true }]).drawn,
    caption: () => `Each pair of arrows is to scale: the thick one is ${show(K.step)} of the coloured one, the size of a step.`,
    alt: "Two arrows at each score: of the score and of its rate",
    say: "The step moved a score by the step's length times its rate, so the rate gets that length times the gradient of the score after the step." },
  { id: "dGE.6", of: "GE.7", title: "A step back, to the pulls", when: "step", show: [["drate", "dc"]], pick: () => ["dc", now(), mover()],
    bars: () => [during(V.dc), "gradient of the pull"], heading: () => `step ${S.t}: wanted change of rates, and of pulls (thick)`, draw: (b) => ladder(b, score, [{ key: "sum", list: against(during(V.drate)) }, { key: "pull", list: against(during(V.dc)), thick: true }]).drawn,
    caption: () => `Each pair of arrows is to scale: the thick one is κ = ${show(K.kappa)} times the coloured one.`,
    alt: "Two arrows at each score: of its rate and of its pull",
    say: "The pull was multiplied by kappa, so its gradient is, too." },
  { id: "dGE.before", of: "GE.6", title: "A step back, to the scores", picture: overview, when: "step", show: [["dx+1", "drate", "dc", "x", "dx"], ["n"]], pick: () => ["dx", now(), mover()],
    caption: caption,
    alt: whole,
    say: "x<sub>i</sub> was used in four places: it was carried on to the next step, in its own spring, in the pull at i, and in the pulls of i at its neighbours. Each adds a gradient; dx' is that after the step, f<sub>ij</sub> = dc<sub>i</sub> n<sub>ij</sub> cos(x<sub>j</sub> − x<sub>i</sub>) that through i's pull from j." },
  { id: "dGE.4", of: "GE.6", title: "To the links", when: "first", show: [["dn"]], pick: () => ["dn", mover(), nearest(mover())],
    bars: () => ["dn", `links of ${DATA.tokens[mover()]}: dn`, [mover()]], heading: "blue: links that should be stronger; orange: weaker", draw: toLinks,
    caption: () => (K.kappa === 0 ? "κ is 0, so no link pulls, and none gets a gradient." : "A line is as thick as the gradient of both links together. A link between words of like scores hardly matters."),
    alt: "The graph, each line as thick as the gradient of its links",
    say: "A link pulled at every step, so its gradient is a sum over all steps." },
  { id: "dGE.5", of: "GE.5", title: "To the starts", when: "first", show: [["dx.first", "db"]], pick: () => ["db", mover()],
    bars: ["db", "gradient db"], heading: "starts, and which way each should go: −db", draw: (b) => ladder(b, V.b, [{ key: "push", list: J.map((j) => -V.db(j)) }]).drawn,
    caption: () => (J.every((j) => !V.db(j)) ? "No start gets a gradient." : `To come nearer to t, the start of ${names([largest(J.map((j) => Math.abs(V.db(j))))])} has most to change: its arrow is the longest.`),
    alt: "The starts with an arrow at each",
    say: "A start was the first score, and it pulled at every step: it gathers the gradients of all." },
  { id: ["dGE.kappa", "dGE.mu", "dGE.step"], of: ["GE.7", "GE.8"], title: "To the knobs", when: "first", show: [["dkappa", "dstep", "dmu"]], pick: () => ["dkappa"],
    bars: ["db", "gradient db"], heading: "gradients of the numbers that all words share", draw: (b) => slopes(b, [["coupling κ", "dkappa"], ["step size", "dstep"], ["spring μ", "dmu"]], V),
    caption: "A bar to the right: the loss would fall if that number were smaller. To the left: if it were larger.",
    alt: "A bar each for the coupling, the step size and the spring",
    say: () => `The pull κ, the spring μ and the length of a step are numbers that can be learned. ${Math.abs(V.dkappa()) < 5e-5 ? "For this wish the pull is right as it is." : `For this wish the pull should be ${V.dkappa() > 0 ? "weaker" : "stronger"}.`}` },
  { id: "dGE.3", of: "GE.4", title: "To likeness", when: "first", show: [["n"], ["dn"], ["dr"]], pick: () => ["dr", mover(), nearest(mover())],
    bars: () => ["dr", `likeness of ${DATA.tokens[mover()]}: dr`, [mover()]], heading: "gradients of all likenesses", draw: (b) => draw.pairs(b, "dr", [[mover(), 0, J.length]]),
    caption: () => `The gradients of a row add up to 0: a link of ${names([mover()])} grows only at the cost of its others.`,
    alt: "The gradients of all likenesses as a table",
    say: "Links come from a softmax, so again only what goes beyond the mean counts." },
  { id: "dGE.1", of: "GE.1", title: "To the matches",
    bars: ["ds", "gradient ds"], heading: "gradients of all matches", draw: (b) => draw.pairs(b, "ds"),
    caption: () => `The frame is the row of ${word()}, which the loss is about. Other rows have gradients, too: by their links and starts.`,
    alt: "The gradients of all matches as a table",
    when: "first", also: { formula: "m_i = db_i b_i (1 - b_i)" }, show: [["da_s[i]", "own"], ["dr"], ["ds"]], pick: () => ["ds", S.i, S.i], say: "A match was used for parts, for links and for a start: its gradient is the sum of three. g goes through the softmax w, whose gradient is dw = du y; then comes the mean of dr both ways; a word's match with itself (I is 1 there, else 0) gets m<sub>i</sub>, too." },
  { id: ["dGE.q", "dGE.k"], of: "GE.1", title: "To queries and keys", when: "first", show: [["dq", "k", "dk"], ["ds"]], pick: () => ["dq", S.i, 0],
    bars: ["ds", "gradient ds"], heading: "where queries (rings) and keys should go", draw: toVectors,
    caption: "Rings are queries, points are keys. Arrows, to scale with each other, show where each should go.",
    alt: "Queries and keys as points with an arrow at each",
    say: "All queries and keys get a gradient, those of dropped words too: through their links they pulled at the words that were kept." },
];

function caption() {
  const last = K.steps, rising = times().map((t) => t + 1).filter(rises), from = V.E(0), to = V.E(last);
  if (S.side === "backward") {
    const slope = J.map((j) => V.dx(S.t, j)), most = 0.05 * Math.max(...slope.map(Math.abs)), up = J.filter((j) => slope[j] < -most), down = J.filter((j) => slope[j] > most);
    if (!up.length && !down.length) return `No gradient reaches the scores of step ${S.t} at these settings.`;
    return `To come nearer to t, at step ${S.t} ${up.length ? `the score of ${names(up)} should be higher` : ""}${up.length && down.length ? ", and " : ""}${down.length ? `that of ${names(down)} lower` : ""}.`;
  }
  const energy = !rising.length
    ? from - to < 1e-12 ? "Nothing moves, so the energy stays." : `The energy falls${last > 1 ? " at every step" : ""}.`
    : `<span class="warn">The energy rises at ${rising.length > 2 ? `${rising.length} of ${last} steps` : `step ${rising.join(" and ")}`}</span>: steps are too long for this pull; who is dropped may be chance.`;
  const cut = dropped(), lifted = saved(), sunk = lost();
  if (read() !== undefined) return `${energy} All words are dropped, so ${word()} reads only its best match, ${names([read()])}.`;
  const moved = rising.length ? "" : lifted.length ? `${names(lifted)} started below τ and ${are(lifted)} lifted above it. ` : sunk.length ? `${names(sunk)} started above τ and ${are(sunk)} pulled below it. ` : "";
  return `${energy} ${moved}${cut.length ? `${names(cut)} ${are(cut)} dropped.` : "No word is dropped."}`;
}

tour({
  title: "Graph energy attention",
  short: "Words pull at each other's scores until they rest; low scores are cut.",
  sizes: { t: () => K.steps, T: () => K.steps + 1 },
  time: { steps: () => K.steps, name: "step" },
  intro: () => [
    "In softmax attention each word decides alone whom it looks at. Here the words first agree among themselves how much each of them counts.",
    `Each word has a score. Alike words are linked, and a link pulls their scores together, while a spring pulls each back to its start. The tension of links and springs is an energy, and the scores flow down it${times().some((t) => rises(t + 1)) ? " if steps are short: here they are too long, and the scores swing. " : ", towards rest. "}A threshold then drops what is low. ${
      times().some((t) => rises(t + 1)) ? "" : saved().length ? `So ${names(saved())}, too low alone, ${are(saved())} kept because of ${saved().length > 1 ? "their" : "its"} neighbours.` : lost().length ? `So ${names(lost())}, high enough alone, ${are(lost())} dropped because of ${lost().length > 1 ? "their" : "its"} neighbours.` : ""}`,
  ],
  turn: () => `We wish that the output of ${word()} had been t, here (${DATA.target.map(show).join(", ")}). The loss is half the squared distance of the two. The gradient of a number, written with a d in front, says how the loss changes with it. Gradients take the same way in reverse, through every step of the flow. The picture now shows minus the gradient of each score, from the last step to the first: up means that, to come nearer to t, this score should have been higher, as ▲ does; ▼: lower.`,
  quantities, forward, backward, picture: overview, caption, label: whole,
  tasks: [
    { say: `raise the coupling strength or lower the threshold until no word is dropped`, done: () => !dropped().length },
    { say: "make steps so long that the energy rises", done: () => times().some((t) => rises(t + 1)) },
    { say: "let the threshold drop all words: whom does the followed one read then?", done: () => read() !== undefined },
  ],
  height: (W) => (W < 420 ? 118 : Math.min(520, Math.round(W * 0.56))),
  timeAt: (px, py) => px > box.left - 10 && px < box.right + 10 && py > box.top && py < box.bottom && Math.round(Math.max(0, Math.min(1, (px - box.left) / (box.right - box.left))) * box.last),
});
