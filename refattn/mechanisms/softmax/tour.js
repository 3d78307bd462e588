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

const forward = [
  {
    id: "SM.1", title: "Compare", show: [["k", "s[i]"], ["q[i]"]], pick: () => ["s", S.i, best()],
    say: () => `The query of ${word()} is compared with the key of every word. The more the two point the same way, the higher the score.`,
  },
  {
    id: ["SM.2", "SM.3"], title: "Exponentiate", show: [["s[i]", "m[i]", "u[i]"]], pick: () => ["u", S.i, J.find((j) => j !== best()) ?? 0],
    say: () => `A mask comes first: m is the score s, or −∞ where a word may not look. ${
      !K.causal ? "Here all are seen." : S.i < J.at(-1) ? `Here ${word()} does not see what comes later: ${names(J.filter((j) => j > S.i))}.` : `Here a word does not see what comes later; ${word()} comes last and sees all.`} A score higher by 1 always gives e times the unnormalised weight u. Subtracting the largest score changes no ratio, and keeps numbers from overflowing.`,
  },
  {
    id: "SM.4", title: "Share", show: [["u[i]", "w[i]"]], pick: () => ["w", S.i, best()],
    say: "Each u is divided by the sum of all of them. That is the weight w, and the weights add up to one.",
  },
  {
    id: "SM.5", title: "Mix", show: [["w[i]", "v"], ["o[i]"]], pick: () => ["o", S.i, 0],
    say: "The output is the mean of the values, and each value counts as much as its weight.",
  },
];
const backward = [
  {
    title: "What is wished for", of: "SM.5", formula: "do = o - t", show: [["o[i]", "do[i]"], ["target"]], pick: () => ["do", S.i, 0],
    say: () => `We wish that the output of ${word()} had been t. The loss is half the squared distance, so its gradient is the difference.`,
  },
  {
    id: "dSM.v", of: "SM.5", title: "To the values", show: [["w[i]", "dv"], ["do[i]"]], pick: () => ["dv", best(), 0],
    say: () => `A value moved the output by its weight, so it gets that share of the gradient. Only ${word()} has a loss here, so the sum over i has one term.`,
  },
  {
    id: "dSM.4", of: "SM.5", title: "To the weights", show: [["v", "dw[i]"], ["do[i]"]], pick: () => ["dw", S.i, best()],
    say: "A weight moved the output along its value. So its gradient is how far that value points along the gradient of the output.",
  },
  {
    id: "dSM.2", of: "SM.4", title: "To the scores", show: [["w[i]", "dw[i]", "dm[i]"], ["mean[i]"]], pick: () => ["dm", S.i, most()],
    say: "Weights add up to one, so one grows at the cost of the others. Only what a word does beyond r counts, the weighted mean: the sum of w dw. A negative gradient means that this score should grow (▲).",
  },
  {
    id: "dSM.q", of: "SM.1", title: "To the query", show: [["dm[i]", "k"], ["dq[i]"]], pick: () => ["dq", S.i, 0],
    say: "The gradient of the query is the sum of the keys, each times the gradient of its score, divided by √d as the scores were.",
  },
  {
    id: "dSM.k", of: "SM.1", title: "To the keys", show: [["dm[i]", "dk"], ["q[i]"]], pick: () => ["dk", most(), 0],
    say: () => `The gradient of a key is the query times the gradient of its score, divided by √d. Again the sum over i has one term, that of ${word()}.`,
  },
];

// Left: what flows from each word to the one that is followed. Right: the values, and their mean.
function picture(W, H, small) {
  const back = S.side === "backward", n = J.length, narrow = W < 420, i = S.i, weights = J.map((j) => V.w(i, j)), shares = percents(weights);
  const values = J.map((j) => [V.v(j, 0), E.length > 1 ? V.v(j, 1) : 0]), out = [V.o(i, 0), E.length > 1 ? V.o(i, 1) : 0];
  const goal = [DATA.target[0], E.length > 1 ? DATA.target[1] : 0], top = small ? 6 : narrow ? 16 : 26;
  const size = Math.min(H - top - 4, W * 0.46), left = W - size, y = scale(0, Math.max(1, n - 1), top + 14, H - 16), middle = (top + H) / 2;
  const end = small ? 80 : narrow ? 70 : 78, from = small ? end : end + (narrow ? 34 : 44), to = left - (narrow ? 26 : 44), thick = (H - top) / n;
  let drawn = TIP;
  if (!small) drawn += text(0, 12, back ? "what should count more or less" : `what ${DATA.tokens[i]} takes in`, { class: "title" }) + text(left, 12, narrow ? "values" : "values and their mean", { class: "title" });
  let taken = middle - 0.75 * thick; // the ribbons meet side by side: together they are one
  J.forEach((j) => {
    const width = 1.5 * thick * weights[j], end = taken + width / 2, half = (from + to) / 2;
    taken += width;
    if (width > 0.1) drawn += svg("path", { d: `M${from} ${y(j)}C${half} ${y(j)} ${half} ${end} ${to} ${end}`, "stroke-width": Math.max(0.8, width), class: "flow", style: `stroke:${color(j)}` });
  });
  J.forEach((j) => {
    const change = -V.dm(i, j), told = back ? (Math.abs(change) < 5e-4 ? "=" : change > 0 ? "▲" : "▼") : hidden(i, j) ? "hidden" : shares[j];
    drawn += follows(j, DATA.tokens[j],
      svg("rect", { x: 0, y: y(j) - 13, width: from - 2, height: 26, rx: 6, class: "ground" }) + svg("circle", { cx: 8, cy: y(j), r: 4, style: `fill:${color(j)}` }) +
        text(17, y(j) + 4, DATA.tokens[j]) + (small ? "" : text(from - 6, y(j) + 4, told, { "text-anchor": "end", class: "share", "data-ref": back ? `dm.${i}.${j}` : `w.${i}.${j}` })),
      { class: j === i ? "word followed" : "word" });
  });
  drawn += svg("circle", { cx: to + 9, cy: middle, r: 10, class: "sink", style: `stroke:${color(i)}` }) + (small ? "" : text(to + 9, middle + 4, "o", { "text-anchor": "middle" }));
  const at = plane(left, top, size, [...values, [0, 0], goal]);
  drawn += at.ground;
  J.forEach((j) => { drawn += svg("path", { d: `M${at.X(values[j])} ${at.Y(values[j])}L${at.X(out)} ${at.Y(out)}`, "stroke-width": Math.max(0.3, 10 * weights[j]), class: "flow", style: `stroke:${color(j)}` }); });
  J.forEach((j) => {
    const r = (narrow ? 2.5 : 3) + (narrow ? 6 : 10) * Math.sqrt(weights[j]), below = at.Y(values[j]) > top + size / 2, x = at.X(values[j]);
    drawn += svg("circle", { cx: x, cy: at.Y(values[j]), r, style: `fill:${color(j)}`, class: "dot" });
    if (!small) drawn += text(Math.min(x, W - 20), at.Y(values[j]) + (below ? r + 12 : -r - 4), DATA.tokens[j], { "text-anchor": "middle", class: "name" });
    const moved = values[j].map((x, c) => x - (c < E.length ? V.dv(j, c) : 0));
    if (back && at.unit * Math.hypot(moved[0] - values[j][0], moved[1] - values[j][1]) > 4) drawn += arrow(at.X(values[j]), at.Y(values[j]), at.X(moved), at.Y(moved));
  });
  drawn += svg("circle", { cx: at.X(out), cy: at.Y(out), r: 6, class: "sink" }) + (small ? "" : text(at.X(out) + 10, at.Y(out) - 7, "o", { class: "name strong" }));
  if (back) drawn += arrow(at.X(out), at.Y(out), at.X(goal), at.Y(goal)) + svg("path", { d: `M${at.X(goal) - 4} ${at.Y(goal) - 4}l8 8m0 -8l-8 8`, class: "cross" }) + text(at.X(goal) - 8, at.Y(goal) - 8, "t", { class: "name strong", "text-anchor": "end" });
  return drawn;
}

function caption() {
  const i = S.i, seen = J.filter((j) => !hidden(i, j)), order = [...seen].sort((a, b) => V.w(i, b) - V.w(i, a)), shares = percents(J.map((j) => V.w(i, j)));
  if (S.side === "backward") {
    const more = J.filter((j) => V.dm(i, j) < -5e-4), less = J.filter((j) => V.dm(i, j) > 5e-4);
    if (!more.length) return `No weight of ${word()} needs to change for this target.`;
    return `To come nearer to t, ${word()} should attend more to ${names(more)}${less.length ? ` and less to ${names(less)}` : ""}.`;
  }
  if (seen.length === 1) return `${word()} sees only itself, so its output is its own value.`;
  if (V.w(i, order[0]) - V.w(i, order.at(-1)) < 5e-3) return `All ${seen.length} words that ${word()} sees count the same: the output is the plain mean of their values.`;
  const [first, second] = order.map((j) => `${shares[j]} from ${names([j])}`);
  return `${word()} takes ${first} and ${second}.${V.w(i, order[0]) > 0.95 ? " The mean has almost become a choice." : ""}`;
}

tour({
  title: "Softmax attention",
  short: "Each word takes in the others, weighed by how well they match.",
  intro: () => [
    "A word alone does not say what it means; its neighbours help. Attention lets a word look at the others, and take in part of what they carry.",
    `Each word has a <b>query</b> (what it looks for), a <b>key</b> (what it offers) and a <b>value</b> (what it hands over). A key that matches the query well gets a large weight, and the output is the mean of the values by these weights. The softmax makes the weights: positive, adding up to one, and smooth, so that they can be learned. We follow ${word()}.`,
  ],
  turn: "To learn is to change numbers so that a loss falls. So we ask of every number how the loss changes with it. That is its gradient, written with a d in front. The steps come in reverse.",
  quantities, forward, backward, picture, caption,
  height: (W) => (W < 420 ? 134 : Math.min(340, Math.round(W * 0.56))),
  label: () => `What flows to ${DATA.tokens[S.i]}: ${J.map((j) => `${DATA.tokens[j]} ${percents(J.map((l) => V.w(S.i, l)))[j]}`).join(", ")}.`,
});
