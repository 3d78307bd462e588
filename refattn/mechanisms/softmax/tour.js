// The tour of softmax attention: formulas, cards, picture.

const { q, k, v, s, m, u, w, do: dout, dw, mean, dm } = F;
const hidden = (i, j) => K.causal && j > i;
const draw = attention({ hidden, by: () => K.sharpness }), { word, vectorOf, weights } = draw;

const quantities = {
  ...GIVEN, do: draw.gradient,
  q: { axes: "id", what: "query", of: (i, c) => mul(knob("sharpness"), DATA.q[i][c]) },
  s: { id: "SM.1", axes: "ij", what: "score", of: (i, j) => div(dot(D.map((c) => q(i, c)), D.map((c) => k(j, c))), sqrt(D.length)) },
  m: {
    id: "SM.2", axes: "ij", what: "score after the mask",
    of: (i, j) => choose(isTrue(!hidden(i, j), hidden(i, j) ? "it comes later and is hidden" : K.causal ? "it does not come later" : "nothing is hidden"), s(i, j), -Infinity),
  },
  u: { id: "SM.3", axes: "ij", what: "unnormalised weight", of: (i, j) => exp(sub(m(i, j), max(J.map((l) => m(i, l))))) },
  w: { id: "SM.4", axes: "ij", what: "weight", of: (i, j) => div(u(i, j), sum(J.map((l) => u(i, l)))) },
  o: { id: "SM.5", axes: "ie", what: "output", of: (i, c) => sum(J.map((j) => mul(w(i, j), v(j, c)))) },
  dv: { id: "dSM.v", axes: "je", what: "gradient of a value", of: (j, c) => mul(w(S.i, j), dout(S.i, c)) },
  dw: { id: "dSM.4", axes: "ij", what: "gradient of a weight", of: (i, j) => dot(E.map((c) => dout(i, c)), E.map((c) => v(j, c))) },
  mean: { axes: "i", symbol: "r", what: "mean of the gradients of the weights", of: (i) => sum(J.map((j) => mul(w(i, j), dw(i, j)))) },
  dm: { id: "dSM.2", axes: "ij", what: "gradient of a score", of: (i, j) => mul(w(i, j), sub(dw(i, j), mean(i))) },
  dq: { id: "dSM.q", axes: "id", what: "gradient of a query", of: (i, c) => mul(div(1, sqrt(D.length)), sum(J.map((j) => mul(dm(i, j), k(j, c))))) },
  dk: { id: "dSM.k", axes: "jd", what: "gradient of a key", of: (j, c) => div(mul(dm(S.i, j), q(S.i, c)), sqrt(D.length)) },
};

// ---- what cards say and draw -------------------------------------------------------------------------------------------

const row = (name) => J.map((j) => V[name](S.i, j)), best = () => largest(weights()), most = () => largest(row("dm").map(Math.abs));
const below = () => row("m").map((x) => x - Math.max(...row("m"))), shown = (j) => percents(weights())[j], idle = () => Math.abs(V.dm(S.i, most())) < 5e-4;
const wanted = () => {
  const more = J.filter((j) => V.dm(S.i, j) < -5e-4), less = J.filter((j) => V.dm(S.i, j) > 5e-4);
  if (!more.length) return `No weight of ${word()} needs to change for this target.`;
  return `To come nearer to t, ${word()} should attend more to ${names(more)}${less.length ? ` and less to ${names(less)}` : ""}.`;
};
function exponential(b) {
  const told = (j, x, y) => (hidden(S.i, j) ? [] : label(`u.${j}`, x - 8, y - 7, show(V.u(S.i, j)), { class: "name share", "text-anchor": "end", "data-ref": `u.${S.i}.${j}` }));
  return draw.curve(b, Math.exp, Math.min(-1, ...below().filter(Number.isFinite)) * 1.08, 0, [0, 1], J.map((j) => [below()[j], V.u(S.i, j)]), { bars: true, told }).drawn;
}

const forward = [
  { id: "SM.1", title: "Compare", show: [["k", "s[i]"], ["q[i]"]], pick: () => ["s", S.i, best()],
    bars: ["s", "score s"], heading: () => `the query of ${DATA.tokens[S.i]} and all keys${D.length > 2 ? ", two of their numbers" : ""}`, draw: (b) => { const a = draw.arrows(b); return [a.drawn, a.feet()]; },
    alt: () => `The query of ${DATA.tokens[S.i]} and the keys as arrows, each key with its foot on the line of the query`,
    caption: () => `A key’s foot on the line of the query, times the query’s length, over √d, is its score: the highest is that of ${names([largest(row("s"))])}.`,
    say: () => `The query of ${word()} is compared with the key of every word. The more the two point the same way, the higher the score. A sum of d products is typically √d times as large as one; the division takes that away.` },
  { id: "SM.2", title: "Mask", show: [["s[i]", "m[i]"]], pick: () => ["m", S.i, J.at(-1)],
    bars: ["m", "score after the mask m"], heading: "who sees whom: a row for each query", draw: (b) => draw.pairs(b, "m", undefined, Math.max(...J.flatMap((i) => J.map((j) => Math.abs(V.s(i, j)))))),
    alt: "The scores of all queries and keys as a table, the row of the followed word framed",
    caption: () => {
      const shut = J.filter((j) => hidden(S.i, j));
      if (!K.causal) return `Nothing is hidden: every row has all its scores. Tick “causal” to hide what comes later${S.i < J.at(-1) ? `: ${word()} would not see ${names(J.filter((j) => j > S.i))}` : ", what is right of the diagonal"}.`;
      return shut.length ? `${word()} does not see ${names(shut)}: those scores become −∞.` : `${word()} comes last and sees all; the rows above have lost what comes after them.`;
    },
    say: () => `A mask comes before the softmax: m is the score s, or −∞ where a word may not look. A model that predicts the next word must not see it (causal attention). ${!K.causal ? "Here all are seen." : S.i < J.at(-1) ? `Here ${word()} does not see what comes later: ${names(J.filter((j) => j > S.i))}.` : `Here a word does not see what comes later; ${word()} comes last and sees all.`}` },
  { id: "SM.3", title: "Exponentiate", show: [["m[i]", "u[i]"]], pick: () => ["u", S.i, J.find((j) => j !== best()) ?? 0],
    bars: () => [below(), "before: m − max"], heading: "after: u = exp(m − max)", draw: exponential,
    alt: "The curve of the exponential function with a point for each word",
    caption: () => `Left: how far each score is below the largest. Right: what exp makes of it. That of ${names([best()])} is the largest, so its u is 1.`,
    say: "A score higher by 1 always gives e times the unnormalised weight u. Subtracting the largest score changes no ratio, and keeps numbers from overflowing." },
  { id: "SM.4", title: "Share", show: [["u[i]", "w[i]"]], pick: () => ["w", S.i, best()],
    bars: ["w", "weight w"], heading: "the parts u, and each divided by their sum", draw: (b) => draw.shared(b, "u", "w", Math.max(2, 0.6 * J.length)),
    alt: () => `A bar divided: ${J.map((j) => `${DATA.tokens[j]} ${shown(j)}`).join(", ")}`,
    caption: () => `The bar of all u is stretched, or shrunk, to length 1. ${names([best()])} has ${shown(best())} of it.`,
    say: "Each u is divided by the sum of all of them. That is the weight w, and the weights add up to one." },
  { id: "SM.5", title: "Mix", show: [["w[i]", "v"], ["o[i]"]], pick: () => ["o", S.i, 0],
    bars: () => ["w", `what ${DATA.tokens[S.i]} takes in: w`], heading: "values, and their mean o within their hull", draw: (b) => draw.values(b, true).drawn,
    say: "The output is the mean of the values, and each value counts as much as its weight. So it lies within the hull of the values, whatever the weights are." },
];
const backward = [
  draw.wished("SM.5"),
  { id: "dSM.v", of: "SM.5", title: "To the values", show: [["w[i]", "dv"], ["do[i]"]], pick: () => ["dv", best(), 0],
    bars: ["w", "weight w"], heading: "where each value should go: −dv", draw: draw.toValues,
    alt: "An arrow at each value, as long as its weight is large",
    caption: () => `All arrows are parallel; that of ${names([best()])} is the longest, for its weight is the largest.`,
    say: () => `A value moved the output by its weight, so it gets that share of the gradient. Only ${word()} has a loss here, so the sum over i has one term.` },
  { id: "dSM.4", of: "SM.5", title: "To the weights", show: [["v", "dw[i]"], ["do[i]"]], pick: () => ["dw", S.i, best()],
    bars: ["dw", "gradient dw"], heading: "how far each value points along do", draw: draw.toWeights,
    alt: "The values, each with its foot on the line of the gradient of the output",
    caption: () => `A value whose foot lies along do raises the loss if its weight grows, most of all that of ${names([largest(row("dw"))])}.`,
    say: "A weight moved the output along its value. So its gradient is how far that value points along the gradient of the output." },
  { id: "dSM.2", of: "SM.4", title: "To the scores", show: [["w[i]", "dw[i]", "dm[i]"], ["mean[i]"]], pick: () => ["dm", S.i, most()],
    bars: ["dm", "gradient dm = w (dw − r)"], heading: "dw. Height: dw − r, width: w, area: dm", draw: (b) => draw.about(b, row("dw"), V.mean(S.i), `r = ${show(V.mean(S.i))}`, `mean.${S.i}`),
    alt: "The gradients of the weights above and below their weighted mean", caption: wanted,
    say: "Weights add up to one, so one grows at the cost of the others. Only what a word does beyond r counts, the weighted mean: the sum of w dw. A negative gradient means that this score should grow." },
  { id: "dSM.q", of: "SM.1", title: "To the query", show: [["dm[i]", "k"], ["dq[i]"]], pick: () => ["dq", S.i, 0],
    bars: ["dm", "gradient dm"], draw: (b) => draw.pulled(b, "each key pulls or pushes the query: −dq", J.map((j) => vectorOf("k", D, j).map((x) => (-V.dm(S.i, j) * x) / Math.sqrt(D.length))), true),
    alt: "The way of the query, as a chain of arrows, one along each key",
    caption: () => (idle() ? "No key moves the query: no score needs to change." : `From the query on, one arrow for each key: ${names([most()])} has the largest gradient of a score. The thick arrow is all of them together.`),
    say: "The gradient of the query is the sum of the keys, each times the gradient of its score, divided by √d as the scores were." },
  { id: "dSM.k", of: "SM.1", title: "To the keys", show: [["dm[i]", "dk"], ["q[i]"]], pick: () => ["dk", most(), 0],
    bars: ["dm", "gradient dm"], draw: (b) => draw.pulled(b, "where each key should go, along the query: −dk", J.map((j) => vectorOf("dk", D, j).map((x) => -x))),
    alt: "An arrow at each key, along the query or against it",
    caption: () => (idle() ? "No key has to move: no score needs to change." : "Keys whose score should grow move along the query; the others move against it."),
    say: () => `The gradient of a key is the query times the gradient of its score, divided by √d. Again the sum over i has one term, that of ${word()}.` },
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
  quantities, forward, backward, caption,
  picture: () => (S.side === "backward" ? backward[0] : forward.at(-1)),
  tasks: [
    { say: "lower the temperature until one word gets more than 95 %", done: () => Math.max(...weights()) > 0.95 },
    { say: "follow a word that gets everything from itself, with the mask", done: () => K.causal && S.i === 0 },
    { say: "drag keys and values, or the target t (backwards), until o meets t", done: () => Math.hypot(...E.map((c) => V.o(S.i, c) - V.target(c))) < 0.1 },
  ],
  height: (W) => (W < 420 ? 134 : Math.min(520, Math.round(W * 0.56))),
  label: () => `What flows to ${DATA.tokens[S.i]}: ${J.map((j) => `${DATA.tokens[j]} ${shown(j)}`).join(", ")}.`,
});
