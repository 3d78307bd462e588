// The tour of graph energy attention: formulas, cards, picture.

const { q, k, v, target, s, a, r, n, b, x, c, rate, y, w, u, z, p, o, do: dout, dv, dp, dz, du, dy, dx, drate, dc, db, own, dn, dr, da_s, ds, all, pi, e: each } = F;
const MU = 1; // its own knob would only scale the step and kappa
const steps = () => K.steps, times = () => Array.from({ length: K.steps }, (_, t) => t);
const others = (i) => J.filter((j) => j !== i);
const softmax = (of, i, j) => div(exp(of(i, j)), sum(J.map((l) => exp(of(i, l)))));
const kept = (j) => V.x(K.steps, j) >= K.tau;
const filled = () => isTrue(J.some(kept), J.some(kept) ? "a word is kept" : "no word is kept");
const strongest = (i) => largest(J.map((j) => V.a(i, j) * V.x(K.steps, j)));
const read = () => (J.some(kept) ? undefined : strongest(S.i)); // the only word that is read if all are dropped
const rises = (t) => V.E(t) > V.E(t - 1) + 1e-12;
const largest = (list) => list.indexOf(Math.max(...list));

const quantities = {
  q: { axes: "id", what: "query" },
  k: { axes: "jd", what: "key" },
  v: { axes: "je", what: "value" },
  target: { axes: "e", symbol: "t", what: "wanted output" },
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
  do: { axes: "ie", what: "gradient of the output", of: (i, e) => (i === S.i ? sub(o(i, e), target(e)) : 0) },
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

const word = () => `<b>${DATA.tokens[S.i]}</b>`;
const saved = () => J.filter((j) => V.b(j) < K.tau && kept(j)), lost = () => J.filter((j) => V.b(j) >= K.tau && !kept(j)), dropped = () => J.filter((j) => !kept(j));
const mover = () => saved()[0] ?? lost()[0] ?? largest(J.map((j) => Math.abs(V.x(K.steps, j) - V.b(j))));
const nearest = (i) => others(i).reduce((best, j) => (V.n(i, j) > V.n(i, best) ? j : best), others(i)[0] ?? i);
const now = () => Math.min(S.t, K.steps - 1);
// That a link is not the same both ways, but times pi it is, in numbers.
const both = (i, j) =>
  i === j ? "" : `As shares, links are not symmetric: ${names([i])} leans on ${names([j])} by ${show(V.n(i, j))}, ${names([j])} on ${names([i])} by ${show(V.n(j, i))}. Multiply each word's links by its size π (not 3.14 here; ${show(V.pi(i))} and ${show(V.pi(j))}), and they are: both give ${show(V.pi(i) * V.n(i, j))}. `;
// What a step does to the energy, in numbers.
function lowers(t) {
  const way = `from ${show(V.E(t))} to ${show(V.E(t + 1))}`;
  if (rises(t + 1)) return `A short step lowers E; this one is too long: it goes beyond the valley, and E rises ${way}.`;
  return V.E(t) - V.E(t + 1) > 1e-12 ? `So a short step lowers E: here ${way}.` : `A short step lowers E; at this one nothing moves, and E stays ${show(V.E(t))}.`;
}
// Where the threshold would drop one word more, or keep one more.
function turns() {
  const score = (j) => V.x(K.steps, j), lowest = J.filter(kept).sort((a, b) => score(a) - score(b))[0], highest = dropped().sort((a, b) => score(b) - score(a))[0];
  const more = lowest === undefined ? "" : ` Above ${show(score(lowest))} it would drop ${names([lowest])}, too.`;
  return more + (highest === undefined || score(highest) <= 0 ? "" : ` At ${show(score(highest))} or below it would keep ${names([highest])}.`);
}
const are = (list) => (list.length > 1 ? "are" : "is");

const forward = [
  { id: "GE.1", title: "Compare", show: [["q", "k"], ["s"]], pick: () => ["s", S.i, nearest(S.i)], say: "Each word has a query (what it looks for), a key (what it offers) and a value (what it hands over). Every query is compared with every key, as in softmax attention." },
  { id: "GE.2", title: "Attend", show: [["s[i]", "a[i]"]], pick: () => ["a", S.i, largest(J.map((j) => V.a(S.i, j)))], say: () => `The softmax gives the weights that ${word()} would use alone. What follows corrects them.` },
  {
    id: "GE.3", title: "Likeness", show: [["s"], ["r"]], pick: () => ["r", mover(), nearest(mover())],
    say: "Two words match one way and the other. We average both ways, so that alike means the same for both.",
  },
  { id: "GE.4", title: "Link", show: [["r"], ["n"]], pick: () => ["n", mover(), nearest(mover())], say: () => `A softmax makes links of likeness: the links of a word add up to one. Likeness is the same both ways, its share is not; step 9 comes back to this. A line of the graph is as thick as the mean of both ways. The link of a word to itself (${show(V.n(mover(), mover()))} for ${names([mover()])}) pulls at nothing: it only makes the other pulls weaker.` },
  { id: "GE.5", title: "Start", when: "first", show: [["s[ii]", "b"]], pick: () => ["b", mover()], say: "Each word has a score x, which says how much it counts for all others. It starts from how well the word's query matches its own key, squeezed between 0 and 1. Any learned number per word would do. The method takes the word's match with itself, since it is already computed; a model can learn queries and keys that make it large for important words. In the graph a circle is as large as its score, and dashed while that is below τ." },
  { id: "GE.6", title: "Feel the neighbours", when: "step", show: [["x", "c"], ["n"]], pick: () => ["c", now(), mover()], say: "Each neighbour pulls a score x towards its own: by the link, times the sine of the difference. The sine is about the difference, as scores start less than 1 apart; it keeps the pull bounded if they ever come further apart. A word does not pull at itself." },
  { id: "GE.7", title: "Add both forces", when: "step", show: [["b", "x", "c", "rate"]], pick: () => ["rate", now(), mover()], say: "A spring of strength μ, here 1, pulls the score back to its start, and the neighbours pull it to theirs. The sum is how fast it moves." },
  { id: "GE.8", title: "Move", when: "step", show: [["x", "rate", "x+1"]], pick: () => ["x", now() + 1, mover()], say: "The score takes a short step along its rate. Then all begins again from where the scores are." },
  {
    title: "Lower the energy", when: "step", label: "what the flow goes down", formula: "E = sum_i E_i, E_i = pi_i mu/2 (x_i - b_i)^2 + pi_i kappa/2 sum_j n_ij (1 - cos(x_j - x_i))", also: { formula: "pi_i = sum_l exp(r_il) / sum_jl exp(r_jl)" },
    show: [["pi", "e", "e+1"], ["E", "E+1"]], pick: () => ["E", now() + 1],
    say: () => `${both(mover(), nearest(mover()))}Now each link is a spring that pulls its two words equally hard. Springs have a stored energy E, low if linked words have like scores and each score is near its start. Each rate is the downhill slope of E, divided by π. ${lowers(now())}`,
  },
  {
    id: "GE.9", title: "Cut", when: "last", show: [["b", "x.last", "y"]], pick: () => ["y", mover()],
    say: () => `After the last step a word whose score is below the threshold τ is dropped: nobody reads it. ${dropped().length ? `Here ${names(dropped())} ${are(dropped())}.` : "Here none is."} The scores do not know of τ, so its knob moves none of them; it only says where to cut.${turns()}`,
  },
  { id: "GE.10", title: "Weigh", when: "last", show: [["s[i]", "w[i]", "y", "u[i]"]], pick: () => ["u", S.i, mover()], say: () => `The softmax once more, over the kept words alone: w is how ${word()} would weigh these. Each w is multiplied by that word's score. The part of a dropped word is 0, for all who would read it; it still reads others.` },
  {
    id: ["GE.12", "GE.11"], title: "Share", when: "last", show: [["u[i]", "p[i]"], ["z[i]"]], pick: () => ["p", S.i, read() ?? mover()],
    say: () => `Divided by their sum, the parts are shares, which add up to one. If all words are dropped, ${word()} reads only the word whose weight a times score x, before the cut, is largest${read() === undefined ? "" : `: here ${names([read()])}`}.`,
  },
  { id: "GE.13", title: "Mix", when: "last", show: [["p[i]", "v"], ["o[i]"]], pick: () => ["o", S.i, 0], say: "The output is the mean of the values, and each counts by its share." },
];
const backward = [
  { title: "What is wished for", of: "GE.13", formula: "do = o - t", when: "last", show: [["o[i]", "do[i]"], ["target"]], pick: () => ["do", S.i, 0], say: () => `We wish that the output of ${word()} had been t. The loss is half the squared distance, so its gradient is the difference.` },
  { id: "dGE.v", of: "GE.13", title: "To the values", when: "last", show: [["p[i]", "dv"], ["do[i]"]], pick: () => ["dv", largest(J.map((j) => V.p(S.i, j))), 0], say: "A value moved the output by its share, so it gets that share of the gradient." },
  { id: "dGE.12", of: "GE.13", title: "To the shares", when: "last", show: [["v", "dp[i]"], ["do[i]"]], pick: () => ["dp", S.i, mover()], say: "A share moved the output along its value. So its gradient is how far that value points along the gradient of the output." },
  { id: ["dGE.11", "dGE.10"], of: "GE.12", title: "To the parts", when: "last", show: [["p[i]", "dp[i]", "du[i]"], ["z[i]", "dz[i]"]], pick: () => ["du", S.i, mover()], say: "Shares add up to one, so only what a word does beyond the mean counts." },
  { id: "dGE.9", of: "GE.10", title: "To scores", when: "last", show: [["w[i]", "du[i]", "dy"]], pick: () => ["dy", mover()], say: () => `A part is a weight w times a score, so the score gets the gradient times w, and w the gradient times the score. A dropped word${dropped().length ? ` (here ${names(dropped())})` : ""} was set to 0 whatever its exact score; a tiny change of that score changes nothing, so its gradient is 0.` },
  { id: "dGE.7", of: "GE.8", title: "A step back, to the rates", when: "step", show: [["dx+1", "drate"]], pick: () => ["drate", now(), mover()], say: "The step moved a score by the step's length times its rate, so the rate gets that length times the gradient of the score after the step." },
  { id: "dGE.6", of: "GE.7", title: "A step back, to the pulls", when: "step", show: [["drate", "dc"]], pick: () => ["dc", now(), mover()], say: "The pull was multiplied by kappa, so its gradient is, too." },
  { id: "dGE.before", of: "GE.6", title: "A step back, to the scores", when: "step", show: [["dx+1", "drate", "dc", "x", "dx"], ["n"]], pick: () => ["dx", now(), mover()], say: "x<sub>i</sub> was used in four places: it was carried on to the next step, in its own spring, in the pull at i, and in the pulls of i at its neighbours. Add the gradient from each: dx' is that after the step. f<sub>ij</sub> = dc<sub>i</sub> n<sub>ij</sub> cos(x<sub>j</sub> − x<sub>i</sub>) is the gradient through i's pull from j: x<sub>j</sub> gets it, and x<sub>i</sub> its opposite." },
  { id: "dGE.4", of: "GE.6", title: "To the links", when: "first", show: [["dn"]], pick: () => ["dn", mover(), nearest(mover())], say: "A link pulled at every step, so its gradient is a sum over all steps." },
  { id: "dGE.5", of: "GE.5", title: "To the starts", when: "first", show: [["dx.first", "db"]], pick: () => ["db", mover()], say: "A start was the first score, and it pulled at every step: it gathers the gradients of all." },
  { id: ["dGE.kappa", "dGE.step"], of: ["GE.7", "GE.8"], title: "To the knobs", when: "first", show: [["dkappa", "dstep", "dmu"]], pick: () => ["dkappa"], say: () => `The pull and the length of a step are numbers that can be learned. ${Math.abs(V.dkappa()) < 5e-5 ? "For this wish the pull is right as it is." : `For this wish the pull should be ${V.dkappa() > 0 ? "weaker" : "stronger"}.`}` },
  { id: "dGE.3", of: "GE.4", title: "To likeness", when: "first", show: [["n"], ["dn"], ["dr"]], pick: () => ["dr", mover(), nearest(mover())], say: "Links come from a softmax, so again only what goes beyond the mean counts." },
  { id: "dGE.1", of: "GE.1", title: "To the matches", when: "first", also: { formula: "m_i = db_i b_i (1 - b_i)" }, show: [["da_s[i]", "own"], ["dr"], ["ds"]], pick: () => ["ds", S.i, S.i], say: "A match was used for parts, for links and for a start: its gradient is the sum of three. g goes through the softmax w, whose gradient is dw = du y; then comes the mean of dr both ways; and the match of a word with itself, ds<sub>ii</sub>, gets m<sub>i</sub>, too." },
  { id: ["dGE.q", "dGE.k"], of: "GE.1", title: "To queries and keys", when: "first", show: [["dq", "k", "dk"], ["ds"]], pick: () => ["dq", S.i, 0], say: "All queries and keys get a gradient, those of dropped words too: through their links they pulled at the words that were kept." },
];

// Left: the scores over the steps with the threshold, and the energy below. Right: the graph at the chosen step.
const box = {};
const along = (of, at, j, last) => {
  const low = Math.min(Math.floor(at), last), high = Math.min(low + 1, last);
  return of(low, j) + (at - low) * (of(high, j) - of(low, j));
};
function picture(W, H, small) {
  const back = S.side === "backward", last = K.steps, narrow = W < 420, of = back ? (t, j) => -V.dx(t, j) : V.x, at = S.at ?? S.t, steps_ = [...times(), last];
  const flat = steps_.flatMap((t) => J.map((j) => of(t, j))), most = Math.max(1e-9, ...flat.map(Math.abs));
  const top = small ? 6 : narrow ? 16 : 24, bottom = H - (narrow ? 26 : 64), left = small ? 2 : narrow ? 18 : 24, right = W * 0.42;
  const X = scale(0, last, left, right), Y = back ? scale(-1.08 * most, 1.08 * most, bottom, top) : scale(Math.min(0, ...flat), Math.max(1, ...flat), bottom, top);
  Object.assign(box, { left, right, top, bottom, last });
  const shares = percents(J.map((j) => V.p(S.i, j)));
  let drawn = small ? "" : text(narrow ? left : 0, 12, back ? (narrow ? "minus the gradient; up: should be higher" : "minus the gradient of each score; up: it should be higher") : "score x of each word", { class: "title" });
  if (!small && !back) drawn += text(right + 14, 12, narrow ? "final share" : `final attention${W < 540 ? "" : ` (step ${last})`}`, { class: "title" });
  if (!small && !(narrow && back)) drawn += text(W, 12, narrow ? "now" : `the graph at step ${S.t}`, { class: "title", "text-anchor": "end" });
  drawn += svg("rect", { x: left, y: top, width: right - left, height: bottom - top, rx: 3, class: "plane" });
  if (back) drawn += svg("path", { d: `M${left} ${Y(0)}H${right}`, class: "cut" }) + text(left - 5, Y(0) + 4, "0", { class: "tick", "text-anchor": "end" });
  else {
    const cut = Math.max(top, Math.min(bottom, Y(K.tau)));
    drawn += svg("rect", { x: left, y: cut, width: right - left, height: bottom - cut, class: "below" }) + svg("path", { d: `M${left - 4} ${cut}H${right + 4}`, class: "cut" });
    if (!small) drawn += text(left - 6, cut + 4, "τ", { class: "strong", "text-anchor": "end" }) + [0, 1].filter((x) => Math.abs(cut - Y(x)) > 14).map((x) => text(left - 6, Y(x) + 4, x, { class: "tick", "text-anchor": "end" })).join("");
  }
  J.forEach((j) => { drawn += svg("path", { d: `M${steps_.map((t) => `${X(t).toFixed(1)} ${Y(of(t, j)).toFixed(1)}`).join("L")}`, class: "line", style: `stroke:${color(j)}` }); });
  drawn += svg("path", { d: `M${X(at)} ${top}V${H - (narrow ? 2 : 16)}`, class: "hair" });
  J.forEach((j) => { drawn += svg("circle", { cx: X(at), cy: Y(along(of, at, j, last)), r: narrow ? 3.5 : 4.5, class: "dot", style: `fill:${color(j)}` }); });
  const places = spread(J.map((j) => Y(of(last, j))), narrow ? 14 : 17, top + 4, bottom);
  if (!small) J.forEach((j) => {
    const note = back ? "" : `<tspan class="share" data-ref="p.${S.i}.${j}"> ${shares[j]}</tspan>`;
    drawn += svg("path", { d: `M${right + 2} ${Y(of(last, j))}L${right + 11} ${places[j]}`, class: "tie", style: `stroke:${color(j)}` }) + text(right + 14, places[j] + 4, DATA.tokens[j] + note, kept(j) || back || j === read() ? {} : { class: "title" });
  });
  if (!back) {
    const energies = steps_.map((t) => V.E(t));
    const EY = scale(Math.min(...energies), Math.max(...energies, Math.min(...energies) + 1e-9), H - (small ? 5 : narrow ? 3 : 18), bottom + (narrow ? 7 : 12));
    for (const t of times().map((m) => m + 1)) drawn += svg("path", { d: `M${X(t - 1)} ${EY(energies[t - 1])}L${X(t)} ${EY(energies[t])}`, class: rises(t) ? "rising" : "falling" });
    drawn += svg("circle", { cx: X(at), cy: EY(along((t) => V.E(t), at, 0, last)), r: 3.5, class: "sink" });
    if (!small) drawn += text(right + 14, (bottom + H) / 2 + (narrow ? 5 : 0), "energy", { class: "title" });
  }
  if (!narrow && !small) drawn += text(left, H - 3, "step 0", { class: "tick" }) + text(right, H - 3, `${last}`, { class: "tick", "text-anchor": "end" });
  const R = Math.min((bottom - top) / 2 - (narrow ? 4 : 26), W * 0.14), across = narrow ? Math.min(1.25 * R, 0.115 * W) : R, cx = W - across - (narrow ? 18 : 48), cy = (top + (narrow ? H : bottom)) / 2 + (small ? 0 : 2), size = R / 82;
  const spot = J.map((j) => { const angle = -Math.PI / 2 + (2 * Math.PI * (j - Math.floor(J.length / 2))) / J.length; return [cx + across * Math.cos(angle), cy + R * Math.sin(angle)]; });
  if (!small && !narrow) (back ? ["▲ should be higher, ▼ lower"] : ["size: score; thick line: strong link;", "dashed: below τ now"]).forEach((line, n) => {
    drawn += text(W, (bottom + H) / 2 + 16 * n, line, { class: "title", "text-anchor": "end" });
  });
  J.forEach((i) => others(i).filter((j) => j > i).forEach((j) => { drawn += svg("path", { d: `M${spot[i]}L${spot[j]}`, "stroke-width": Math.max(0.8, 18 * size * 0.5 * (V.n(i, j) + V.n(j, i))), class: "bond" }); }));
  if (!back && read() !== undefined && read() !== S.i && !small) drawn += svg("path", { d: `M${spot[read()]}L${spot[S.i]}`, class: "cut" });
  J.forEach((j) => {
    const score = along(V.x, at, j, last), radius = size * (6 + 18 * Math.max(0, Math.min(1.3, score))), [px, py] = spot[j], slope = along(V.dx, at, j, last), above = py < cy - 2;
    drawn += follows(j, DATA.tokens[j],
      svg("circle", { cx: px, cy: py, r: Math.max(14, radius + 4), class: "ground" }) + (j === S.i ? svg("circle", { cx: px, cy: py, r: radius + 3.5, class: "ring" }) : "") +
        svg("circle", { cx: px, cy: py, r: radius, style: score < K.tau ? `stroke:${color(j)};stroke-width:2` : `fill:${color(j)}`, class: score < K.tau ? "dropped" : "dot" }) +
        (back && Math.abs(slope) > 1e-4 ? text(px, py + 4.5, slope > 0 ? "▼" : "▲", { "text-anchor": "middle", class: "name" }) : "") +
        (small ? "" : text(px, py + (above ? -radius - (j === S.i ? 8 : 5) : radius + (j === S.i ? 17 : 14)), `${DATA.tokens[j]}${!back && j === read() && at === last ? ", read" : ""}`, { "text-anchor": "middle", class: j === S.i ? "name strong" : "name" })));
  });
  return drawn;
}

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
  quantities, forward, backward, picture, caption,
  height: (W) => (W < 420 ? 118 : Math.min(360, Math.round(W * 0.62))),
  label: () => `Scores from the first step to the last: ${J.map((j) => `${DATA.tokens[j]} ${show(V.x(0, j))} to ${show(V.x(K.steps, j))}`).join(", ")}.`,
  timeAt: (px, py) => px > box.left - 10 && px < box.right + 10 && py > box.top && py < box.bottom && Math.round(Math.max(0, Math.min(1, (px - box.left) / (box.right - box.left))) * box.last),
});
