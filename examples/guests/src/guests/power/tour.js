// The tour of power attention: formulas, cards, picture.

const { q, k, v, s, w, z, o, do: dout, dz, dw, ds } = F;

const draw = attention({ weights: () => J.map((j) => V.w(S.i, j) / V.z(S.i)) }), { word } = draw;

const quantities = {
  ...GIVEN, do: draw.gradient,
  s: { id: "POW.1", axes: "ij", what: "score", of: (i, j) => div(dot(D.map((c) => q(i, c)), D.map((c) => k(j, c))), sqrt(D.length)) },
  w: { id: "POW.2", axes: "ij", what: "weight", of: (i, j) => pow(s(i, j), knob("p")) },
  z: { id: "POW.3", axes: "i", what: "sum of the weights", of: (i) => sum(J.map((j) => w(i, j))) },
  o: { id: "POW.4", axes: "ie", what: "output", of: (i, c) => div(sum(J.map((j) => mul(w(i, j), v(j, c)))), z(i)) },
  dv: { id: "dPOW.v", axes: "je", what: "gradient of a value", of: (j, c) => div(mul(w(S.i, j), dout(S.i, c)), z(S.i)) },
  dz: { id: "dPOW.3", axes: "i", what: "gradient of the sum", of: (i) => neg(div(dot(E.map((c) => dout(i, c)), E.map((c) => o(i, c))), z(i))) },
  dw: { id: "dPOW.2", axes: "ij", what: "gradient of a weight", of: (i, j) => add(div(dot(E.map((c) => dout(i, c)), E.map((c) => v(j, c))), z(i)), dz(i)) },
  ds: { id: "dPOW.1", axes: "ij", what: "gradient of a score", of: (i, j) => mul(knob("p"), pow(s(i, j), sub(knob("p"), 1)), dw(i, j)) },
  dq: { id: "dPOW.q", axes: "id", what: "gradient of a query", of: (i, c) => div(sum(J.map((j) => mul(ds(i, j), k(j, c)))), sqrt(D.length)) },
  dk: { id: "dPOW.k", axes: "jd", what: "gradient of a key", of: (j, c) => div(mul(ds(S.i, j), q(S.i, c)), sqrt(D.length)) },
};

const best = () => largest(J.map((j) => V.w(S.i, j)));
const most = () => largest(J.map((j) => Math.abs(V.ds(S.i, j))));
const share = (j) => V.w(S.i, j) / V.z(S.i);

const forward = [
  { id: "POW.1", title: "Compare", bars: ["s", "score s"], heading: () => `the query of ${DATA.tokens[S.i]} and all keys`, draw: (b) => { const a = draw.arrows(b); return [a.drawn, a.feet()]; }, show: [["k", "s[i]"], ["q[i]"]], pick: () => ["s", S.i, best()], say: () => `The query of ${word()} is compared with the key of every word, as in softmax attention.` },
  {
    id: "POW.2", title: "Raise to a power", show: [["s[i]", "w[i]"]], pick: () => ["w", S.i, best()],
    say: "Softmax attention makes weights by exp, power attention by an even power. A score and its negative get the same weight: a word counts if its key points along the query or against it, and one at a right angle counts nothing. The larger p is, the more the largest scores stand out.",
  },
  { id: "POW.3", title: "Add up", show: [["w[i]"], ["z[i]"]], pick: () => ["z", S.i], say: "The weights of a query are added up." },
  {
    id: "POW.4", title: "Mix", bars: ["w", "weight w"], heading: "values, and their mean o", draw: (b) => draw.values(b, true).drawn, show: [["w[i]", "v"], ["o[i]", "z[i]"]], pick: () => ["o", S.i, 0],
    say: "The output is the mean of the values by these weights. Each weight is a sum of products of coordinates, so the sum over words may be taken first: a state, which does not grow with the words, can be read by any query.",
  },
];
const backward = [
  draw.wished("POW.4"),
  { id: "dPOW.v", of: "POW.4", title: "To the values", bars: ["w", "weight w"], heading: "where each value should go: −dv", draw: draw.toValues, show: [["w[i]", "dv"], ["do[i]", "z[i]"]], pick: () => ["dv", best(), 0], say: "A value moved the output by its share of the weights, so it gets that share of the gradient." },
  { id: ["dPOW.3", "dPOW.2"], of: "POW.3", title: "To the weights", bars: ["dw", "gradient dw"], heading: "how far each value points along do", draw: draw.toWeights, show: [["v", "dw[i]"], ["do[i]"], ["dz[i]"]], pick: () => ["dw", S.i, best()], say: "A weight moved the output along its value; it also made the sum larger, and so all other shares smaller." },
  { id: "dPOW.1", of: "POW.2", title: "To the scores", show: [["s[i]", "dw[i]", "ds[i]"]], pick: () => ["ds", S.i, most()], say: "The power rule: p times the score to the power p - 1. It has the sign of the score. A score near 0 can hardly learn." },
  { id: "dPOW.q", of: "POW.1", title: "To the query", show: [["ds[i]", "k"], ["dq[i]"]], pick: () => ["dq", S.i, 0], say: "The gradient of the query is the sum of the keys, each times the gradient of its score, divided by √d as the scores were." },
  { id: "dPOW.k", of: "POW.1", title: "To the keys", show: [["ds[i]", "dk"], ["q[i]"]], pick: () => ["dk", most(), 0], say: () => `The gradient of a key is the query times the gradient of its score, divided by √d. The sum over i has one term, that of ${word()}.` },
];

// The power as a curve over the scores, with the words on it.
function picture(W, H, small) {
  const scores = J.map((j) => V.s(S.i, j)), reach = Math.max(0.5, ...scores.map(Math.abs)), tall = reach ** K.p, top = small ? 6 : 26;
  const X = scale(-reach, reach, small ? 10 : 40, W - (small ? 10 : 40)), Y = scale(0, tall, H - 18, top + 8);
  const curve = Array.from({ length: 61 }, (_, n) => -reach + (n * reach) / 30).map((x, n) => `${n ? "L" : "M"}${X(x)} ${Y(x ** K.p)}`).join("");
  let drawn = TIP + (small ? "" : text(0, 12, `weight = score to the power ${K.p}, for ${DATA.tokens[S.i]}`, { class: "title" }));
  drawn += svg("path", { d: curve, "stroke-width": 2, class: "flow", style: `stroke:${color(S.i)}` });
  J.forEach((j) => {
    drawn += follows(j, DATA.tokens[j], svg("circle", { cx: X(scores[j]), cy: Y(V.w(S.i, j)), r: small ? 4 : 6, style: `fill:${color(j)}`, class: "dot" }) +
      (small ? "" : text(X(scores[j]), Y(V.w(S.i, j)) - 10, DATA.tokens[j], { "text-anchor": "middle", class: "name" })), { class: j === S.i ? "word followed" : "word" });
  });
  return drawn;
}

function caption() {
  const order = [...J].sort((a, b) => share(b) - share(a)), shares = percents(J.map(share));
  return `${word()} takes ${shares[order[0]]} from ${names([order[0]])}${J.length > 1 ? ` and ${shares[order[1]]} from ${names([order[1]])}` : ""}.`;
}

tour({
  title: "Power attention",
  short: "Weights are an even power of the scores, which a state of fixed size can add up.",
  intro: () => [
    "Attention weighs the words that a word looks at. Softmax attention needs all keys for that, and their number grows with the text.",
    `Here a weight is an even power of the score, (q · k)<sup>p</sup>. That is a sum of products of coordinates of q and of k, so what words leave behind can be added up once, whatever a query asks. We follow ${word()}.`,
  ],
  quantities, forward, backward, picture, caption,
  height: (W) => (W < 420 ? 134 : Math.min(300, Math.round(W * 0.45))),
  label: () => `The weights of ${DATA.tokens[S.i]}: ${J.map((j) => `${DATA.tokens[j]} ${percents(J.map(share))[j]}`).join(", ")}.`,
});
