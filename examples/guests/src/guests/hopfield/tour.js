// The tour of Hopfield attention: formulas, cards, picture.

const { q, k, v, x, s, w, r, p, o, energy, do: dout, dp, dr, dx, dw, ds } = F;
const steps = () => K.updates, times = () => Array.from({ length: K.updates }, (_, t) => t);
const softmax = (of, j) => div(exp(of(j)), sum(J.map((l) => exp(of(l)))));
const centred = (weight, gradient, j) => mul(weight(j), sub(gradient(j), sum(J.map((l) => mul(weight(l), gradient(l))))));

const draw = attention({ weights: () => J.map((j) => V.p(S.i, j)) }), { word } = draw;

const quantities = {
  ...GIVEN, do: draw.gradient,
  k: { axes: "jd", what: "key, a stored pattern" },
  x: { id: "HOP.3", axes: "Tid", passes: 1, what: "state", of: (t, i, c) => (t ? sum(J.map((j) => mul(w(t - 1, i, j), k(j, c)))) : q(i, c)) },
  s: { id: "HOP.1", axes: "tij", what: "score", of: (t, i, j) => mul(knob("beta"), dot(D.map((c) => x(t, i, c)), D.map((c) => k(j, c)))) },
  w: { id: "HOP.2", axes: "tij", what: "weight of a pattern", of: (t, i, j) => softmax((l) => s(t, i, l), j) },
  energy: {
    axes: "Ti", symbol: "E", what: "energy",
    of: (t, i) => sub(div(sum(D.map((c) => pow(x(t, i, c), 2))), 2), div(log(sum(J.map((j) => exp(mul(knob("beta"), dot(D.map((c) => x(t, i, c)), D.map((c) => k(j, c)))))))), knob("beta"))),
  },
  r: { id: "HOP.4", axes: "ij", what: "score of the last state", of: (i, j) => mul(knob("beta"), dot(D.map((c) => x(steps(), i, c)), D.map((c) => k(j, c)))) },
  p: { id: "HOP.5", axes: "ij", what: "weight of a value", of: (i, j) => softmax((l) => r(i, l), j) },
  o: { id: "HOP.6", axes: "ie", what: "output", of: (i, c) => sum(J.map((j) => mul(p(i, j), v(j, c)))) },
  dv: { id: "dHOP.v", axes: "je", what: "gradient of a value", of: (j, c) => mul(p(S.i, j), dout(S.i, c)) },
  dp: { id: "dHOP.5", axes: "ij", what: "gradient of a weight of a value", of: (i, j) => dot(E.map((c) => dout(i, c)), E.map((c) => v(j, c))) },
  dr: { id: "dHOP.4", axes: "ij", what: "gradient of a score of the last state", of: (i, j) => centred((l) => p(i, l), (l) => dp(i, l), j) },
  dx: {
    id: "dHOP.3", axes: "Tid", back: true, since: 1, what: "gradient of a state",
    of: (t, i, c) => mul(knob("beta"), sum(J.map((j) => mul(t === steps() ? dr(i, j) : ds(t, i, j), k(j, c))))),
  },
  dw: { id: "dHOP.2", axes: "tij", back: true, what: "gradient of a weight", of: (t, i, j) => dot(D.map((c) => dx(t + 1, i, c)), D.map((c) => k(j, c))) },
  ds: { id: "dHOP.1", axes: "tij", back: true, what: "gradient of a score", of: (t, i, j) => centred((l) => w(t, i, l), (l) => dw(t, i, l), j) },
  dq: { id: "dHOP.q", axes: "id", what: "gradient of a query", of: (i, c) => dx(0, i, c) },
  dk: {
    id: "dHOP.k", axes: "jd", what: "gradient of a key",
    of: (j, c) => add(mul(knob("beta"), dr(S.i, j), x(steps(), S.i, c)), ...times().flatMap((t) => [mul(knob("beta"), ds(t, S.i, j), x(t, S.i, c)), mul(w(t, S.i, j), dx(t + 1, S.i, c))])),
  },
  dbeta: {
    id: "dHOP.beta", axes: "", what: "gradient of beta",
    of: () => div(sum(J.flatMap((j) => [mul(dr(S.i, j), r(S.i, j)), ...times().map((t) => mul(ds(t, S.i, j), s(t, S.i, j)))])), knob("beta")),
  },
};

const best = (t) => largest(J.map((j) => V.w(t, S.i, j)));
const read = () => largest(J.map((j) => V.p(S.i, j)));
const now = () => Math.min(S.t, K.updates - 1);

const forward = [
  { id: "HOP.1", title: "Compare", when: "step", show: [["k", "s[i]"], ["x[i]"]], pick: () => ["s", now(), S.i, best(now())], say: () => `The keys are stored patterns. The state x of ${word()}, at first its query, is compared with each of them. β says how much a difference counts.` },
  { id: "HOP.2", title: "Weigh", when: "step", show: [["s[i]", "w[i]"]], pick: () => ["w", now(), S.i, best(now())], say: "A softmax makes weights of scores: what the state resembles most counts most." },
  { id: "HOP.3", title: "Update", when: "step", show: [["w[i]", "k"], ["x[i]", "x[i]+1"]], pick: () => ["x", now() + 1, S.i, 0], say: "The next state is the mean of the patterns by these weights. Then all begins again from there." },
  {
    title: "Lower the energy", when: "step", label: "what each update lowers", formula: "E = |x|^2 / 2 - log(sum_j exp(beta x . k_j)) / beta",
    show: [["energy[i]", "energy[i]+1"]], pick: () => ["energy", now() + 1, S.i],
    say: () => `Every update lowers this energy, by at least half the squared length of the step: here from ${show(V.energy(now(), S.i))} to ${show(V.energy(now() + 1, S.i))}. So states come to rest.`,
  },
  { id: ["HOP.4", "HOP.5"], title: "Read", when: "last", show: [["r[i]", "p[i]"]], pick: () => ["p", S.i, read()], say: "The last state is compared with all keys once more." },
  { id: "HOP.6", title: "Mix", bars: ["p", "weight p"], heading: "values, and their mean o", draw: (b) => draw.values(b, true).drawn, when: "last", show: [["p[i]", "v"], ["o[i]"]], pick: () => ["o", S.i, 0], say: "The output is the mean of the values by these weights. Without updates this is softmax attention." },
];
const backward = [
  { ...draw.wished("HOP.6", "p", "weight p"), when: "last" },
  { id: "dHOP.v", of: "HOP.6", title: "To the values", bars: ["p", "weight p"], heading: "where each value should go: −dv", draw: draw.toValues, when: "last", show: [["p[i]", "dv"], ["do[i]"]], pick: () => ["dv", read(), 0], say: "A value moved the output by its weight, so it gets that share of the gradient." },
  { id: ["dHOP.5", "dHOP.4"], of: "HOP.5", title: "To the last scores", when: "last", show: [["p[i]", "dp[i]", "dr[i]"]], pick: () => ["dr", S.i, read()], say: "Weights add up to one, so only what a word does beyond the weighted mean counts." },
  { id: "dHOP.3", of: "HOP.4", title: "To a state", when: "step", show: [["dx[i]+1", "k"]], pick: () => ["dx", now() + 1, S.i, 0], say: "A state moved the scores that read it, those of the next update or the last ones." },
  { id: "dHOP.2", of: "HOP.3", title: "To the weights", when: "step", show: [["k", "dw[i]"], ["dx[i]+1"]], pick: () => ["dw", now(), S.i, best(now())], say: "A weight moved the state along its key." },
  { id: "dHOP.1", of: "HOP.2", title: "To the scores", when: "step", show: [["w[i]", "dw[i]", "ds[i]"]], pick: () => ["ds", now(), S.i, best(now())], say: "Again only what goes beyond the weighted mean counts. Where one weight is near 1 nothing is left: a state at rest hardly depends on where it came from." },
  { id: "dHOP.q", of: "HOP.1", title: "To the query", when: "first", show: [["dq[i]"]], pick: () => ["dq", S.i, 0], say: "The gradient of the first state is that of the query. The more updates, the less is left of it." },
  { id: "dHOP.k", of: "HOP.3", title: "To the keys", when: "first", show: [["dk"]], pick: () => ["dk", read(), 0], say: "A key was in the scores and in the mean of every update, and in the last scores: all these parts add up." },
  { id: "dHOP.beta", of: "HOP.1", title: "To beta", when: "first", show: [["dbeta"]], pick: () => ["dbeta"], say: "β was in every score, so its gradient is a sum over all of them." },
];

// Left: the energy, update by update. Right: the patterns, and the way of the state.
function picture(W, H, small) {
  const i = S.i, top = small ? 6 : 26, size = Math.min(H - top - 4, W * 0.56), left = W - size, all = Array.from({ length: K.updates + 1 }, (_, t) => t);
  const point = (of) => [of(0), D.length > 1 ? of(1) : 0], way = all.map((t) => point((c) => V.x(t, i, c))), keys = J.map((j) => point((c) => V.k(j, c)));
  const E = all.map((t) => V.energy(t, i)), X = scale(0, K.updates, 10, left - 24), Y = scale(Math.min(...E), Math.max(...E, Math.min(...E) + 1e-9), H - 16, top + 10);
  let drawn = TIP + (small ? "" : text(0, 12, "energy", { class: "title" }) + text(left, 12, "patterns and the way of the state", { class: "title" }));
  drawn += svg("path", { d: E.map((e, t) => `${t ? "L" : "M"}${X(t)} ${Y(e)}`).join(""), "stroke-width": 2, class: "flow", style: `stroke:${color(i)}` });
  E.forEach((e, t) => { drawn += svg("circle", { cx: X(t), cy: Y(e), r: t === S.t ? 6 : 3, style: `fill:${color(i)}`, class: "dot" }); });
  const at = plane(left, top, size, [...keys, ...way, [0, 0]]);
  drawn += at.ground;
  J.forEach((j) => {
    drawn += follows(j, DATA.tokens[j], svg("circle", { cx: at.X(keys[j]), cy: at.Y(keys[j]), r: 3 + 9 * Math.sqrt(V.p(i, j)), style: `fill:${color(j)}`, class: "dot" }) +
      (small ? "" : text(at.X(keys[j]), at.Y(keys[j]) - 14, DATA.tokens[j], { "text-anchor": "middle", class: "name" })), { class: j === i ? "word followed" : "word" });
  });
  way.slice(1).forEach((end, t) => { drawn += arrow(at.X(way[t]), at.Y(way[t]), at.X(end), at.Y(end)); });
  return drawn + svg("circle", { cx: at.X(way.at(-1)), cy: at.Y(way.at(-1)), r: 6, class: "sink" });
}

function caption() {
  const shares = percents(J.map((j) => V.p(S.i, j)));
  return `After ${K.updates} update${K.updates > 1 ? "s" : ""} ${word()} reads ${shares[read()]} from ${names([read()])}.`;
}

tour({
  title: "Modern Hopfield attention",
  short: "A query is completed from the keys that it resembles, several times, before it reads.",
  intro: () => [
    "An associative memory stores patterns. Given a part of one, or a noisy one, it finds the whole.",
    `Here the keys are the patterns, and the query is what is given. Each update replaces the state by the mean of the patterns that it resembles. In the end it reads the values, as attention does. We follow ${word()}.`,
  ],
  turn: "To learn is to change numbers so that a loss falls. So we ask of every number how the loss changes with it. That is its gradient, written with a d in front. The updates come in reverse.",
  quantities, forward, backward, picture, caption,
  height: (W) => (W < 420 ? 150 : Math.min(320, Math.round(W * 0.5))),
  sizes: { t: () => K.updates, T: () => K.updates + 1 },
  time: { steps: () => K.updates, name: "update" },
  label: () => `What ${DATA.tokens[S.i]} reads: ${J.map((j) => `${DATA.tokens[j]} ${percents(J.map((l) => V.p(S.i, l)))[j]}`).join(", ")}.`,
});
