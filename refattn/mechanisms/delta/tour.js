// The gated delta rule: a memory that is asked, errs, and is corrected, token by token.

const { q, k, v, target, faded, answer, miss, correction, state, o, dread, dS, du, dm, dD } = F;
const beta = knob("beta"), keep = exp(knob("log_decay")), root = sqrt(D.length);
const now = () => Math.min(S.t, J.length - 1); // the token that comes at the step that is shown
const main = (list) => list.map(Math.abs).indexOf(Math.max(...list.map(Math.abs)));
const notes = DATA.tokens[0] === "Ann tea"; // the example's own notes, not those of a reader

// ---- the picture -----------------------------------------------------------------------------------------------------

const mix = (a, b, part) => a.map((row, d) => row.map((x, e) => x + part * (b[d][e] - x)));
const states = (t) => D.map((d) => E.map((e) => V.state(t, d, e)));
const asked = (memory, key) => E.map((e) => D.reduce((total, d) => total + key[d] * memory[d][e], 0));
const keyOf = (j) => D.map((d) => V.k(j, d));
const question = () => D.map((d) => DATA.q[S.i][d] / Math.sqrt(D.length));

// The memory between two steps: at first it fades, then it is written to.
function memoryAt(at) {
  const n = Math.min(Math.floor(at), J.length), part = at - n;
  if (part < 1e-9) return states(n);
  const weak = D.map((d) => E.map((e) => V.faded(n, d, e)));
  return part < 0.35 ? mix(states(n), weak, part / 0.35) : mix(weak, states(n + 1), (part - 0.35) / 0.65);
}

// What linear attention, which adds every value, answers to the question after t tokens.
function added(t) {
  const key = question(), fade = Math.exp(K.log_decay);
  return E.map((e) => J.slice(0, t).reduce((total, j) =>
    total + fade ** (t - 1 - j) * K.beta * DATA.v[j][e] * D.reduce((sum, d) => sum + key[d] * V.k(j, d), 0), 0));
}

function tile(x, y, wide, high, number, most, ref) {
  const set = { x, y, width: wide - 2, height: high - 2, rx: 3 }, ground = svg("rect", { ...set, class: "plane" }) + svg("rect", { ...set, style: `fill:${heat(number, most)}` });
  if (wide < 34 || ref === undefined) return ground;
  return ground + text(x + wide / 2 - 1, y + high / 2 + 3, show(Math.abs(number) < 1e-12 ? 0 : number), { "text-anchor": "middle", ...(ref ? { "data-ref": ref } : {}) });
}

// The memory as a table, the key beside its rows, and below its columns what it answers to that key, and how it errs.
function table(W, H, small) {
  const at = S.at ?? S.t, back = S.side === "backward", n = now(), narrow = W < 420, space = W * (small ? 0.5 : 0.49);
  const below = small ? [] : back ? [["du", "du"], ["dm", "dm"]] : narrow ? [["answer", "answer"], ["value", "v"], ["miss", "miss"]] : [["answer a", "answer"], ["value v", "v"], ["m = v − a", "miss"], ["change u", "correction"]];
  const head = small ? 4 : narrow ? 14 : 44, gap = small ? 0 : narrow ? 5 : 12, high = Math.min(small ? 64 : narrow && H < 160 ? 24 : 34, (H - head - gap - (narrow ? 4 : 24)) / (D.length + below.length));
  const left = small ? 0 : narrow ? 8 : 16, key = small ? 0 : narrow ? 40 : 60, x0 = left + key + (small ? 4 : 10), wide = Math.min(small ? 64 : narrow ? 48 : 76, (space - x0 - 8) / E.length);
  const cells = back ? D.map((d) => E.map((e) => V.dS(n, d, e))) : memoryAt(at), usual = Math.max(1, ...DATA.v.flat().map(Math.abs)), most = back ? Math.max(1e-9, ...cells.flat().map(Math.abs)) : usual;
  const middle = { "text-anchor": "middle", class: "tick" };
  let drawn = "";
  if (!small) drawn += text(left + key / 2 - 1, head - 6, narrow ? "k" : "key k", middle) + text(x0 + (wide * E.length) / 2, head - 6, back ? "dS" : narrow ? "S" : "memory S", middle);
  if (!small && !narrow) drawn += text(0, 12, back ? `gradients, after ${DATA.tokens[n]}` : S.t < J.length ? `next: ${DATA.tokens[n]}` : `after ${DATA.tokens[n]}`, { class: "title" }) + text(0, H - 6, back ? "arrows: where values should move" : "○ said, ● remembered, black: o and its way", { class: "title" });
  D.forEach((d) => {
    const y = head + d * high;
    if (!small) drawn += tile(left, y, key, high, V.k(n, d), 1, `k.${n}.${d}`);
    E.forEach((e) => { drawn += tile(x0 + e * wide, y, wide, high, cells[d][e], most, small ? undefined : back ? `dS.${n}.${d}.${e}` : at === S.t ? `state.${S.t}.${d}.${e}` : ""); });
  });
  drawn += svg("rect", { x: x0 - 3, y: head - 3, width: wide * E.length + 4, height: high * D.length + 4, rx: 5, style: "fill:none;stroke:var(--ink)", "stroke-width": 1.4 });
  below.forEach(([label, name], row) => {
    const y = head + gap + high * (D.length + row), size = back ? Math.max(1e-9, ...E.map((e) => Math.abs(V[name](n, e)))) : usual;
    drawn += text(x0 - 10, y + high / 2 + 3, label, { class: "tick", "text-anchor": "end" });
    E.forEach((e) => { drawn += tile(x0 + e * wide, y, wide, high, V[name](n, e), size, `${name}.${n}.${e}`); });
  });
  return drawn;
}

// The plane of the values: rings are what tokens said, dots what the memory now answers to their keys.
function answers(W, H, small) {
  const at = S.at ?? S.t, back = S.side === "backward", n = now(), memory = memoryAt(at), narrow = W < 420, end = Math.min(at, S.i + 1);
  const top = small || narrow ? 2 : 24, told_ = narrow && !small && H > 160 ? 34 : 0; // a legend below, where there is room
  const wide = narrow && !small ? W - 168 : Math.min(H - top - 2, W * 0.46), size = Math.min(wide, H - top - 2 - told_), left = W - wide;
  const flat = (point) => [point[0], point[1] ?? 0], said = J.map((j) => flat(DATA.v[j])), goal = flat(DATA.target), lazy = flat(added(Math.floor(end + 1e-9)));
  const told = Array.from({ length: J.length + 1 }, (_, t) => [question(), ...J.slice(0, t).map(keyOf)].map((key) => flat(asked(states(t), key)))).flat();
  const { X, Y, ground } = plane(left, top, size, [...said, ...told, goal, [0, 0], flat(added(S.i + 1))], wide);
  const inside = (x) => Math.max(left + 36, Math.min(left + wide - 36, x)), boxes = (marks, r) => marks.map((p) => [X(p) - r, Y(p) - r, X(p) + r, Y(p) + r]);
  const place = (all, name) => all.sort((a, b) => a[0] - b[0]).map(([, word, at, half, look]) => name(word, X(at), Y(at), half, look)).join("");
  const from = (a, b, set) => (Math.hypot(X(a) - X(b), Y(a) - Y(b)) < 11 ? "" : arrow(X(a), Y(a), X(b), Y(b), set));
  let drawn = TIP + ground;
  // On a phone a name stands where there is room.
  const named = narrow && !small && labels(W, top + size, 11, [...boxes(said, 6), ...(notes ? [[W - 44, Y([0, 0]) - 14, W, Y([0, 0])], [X([0, 0]), top, X([0, 0]) + 48, top + 14]] : [])], left, top), names_ = [];
  if (named && notes) {
    drawn += text(W - 4, Y([0, 0]) - 3, "warm →", { class: "tick", "text-anchor": "end" }) + text(X([0, 0]) + 4, top + 11, "sweet ↑", { class: "tick" });
  }
  if (told_) ["○ said, ● remembered", back ? "arrows: where values should move" : "black: output o and its way"].forEach((line, n) => { drawn += text(left, top + size + 15 + 15 * n, line, { class: "title" }); });
  if (!small && !narrow) drawn += text(left, 12, notes ? "values: warm →, sweet ↑" : "values", { class: "title" });
  J.forEach((j) => {
    const seen = j < at - 1e-9 || back, heard = flat(asked(memory, keyOf(j))), r = small ? 5 : narrow ? 6 : 8, style = `stroke:${color(j)}`;
    if (seen && !back) drawn += svg("path", { d: `M${X(heard)} ${Y(heard)}L${X(said[j])} ${Y(said[j])}`, style, "stroke-width": 1.4, "stroke-dasharray": "2 3" });
    const ring = svg("circle", { cx: X(said[j]), cy: Y(said[j]), r, style: `${style};fill:var(--paper)`, "stroke-width": seen ? 2.6 : 1.2, opacity: seen || j === n ? 1 : 0.5 });
    if (named) names_.push([j === n || j === S.i ? 0 : 1, DATA.tokens[j], said[j], r, j === n ? "name strong" : "name"]);
    const label = small || narrow ? "" : text(inside(X(said[j])), Y(said[j]) + (said[j][1] < 0 ? r + 13 : -r - 4), DATA.tokens[j], { "text-anchor": "middle", class: j === n ? "name strong" : "name" });
    drawn += follows(j, DATA.tokens[j], ring + label);
    if (seen && !back) drawn += svg("circle", { cx: X(heard), cy: Y(heard), r: small ? 3 : 4, style: `fill:${color(j)}` });
    if (back) drawn += from(said[j], said[j].map((x, e) => x - (e < E.length ? V.dv(j, e) : 0)));
  });
  if (back) {
    const result = flat(E.map((e) => V.o(S.i, e)));
    drawn += from(result, goal) + svg("circle", { cx: X(result), cy: Y(result), r: 6, style: "fill:var(--ink);stroke:var(--paper)", "stroke-width": 1.5 }) + svg("path", { d: `M${X(goal) - 5} ${Y(goal) - 5}l10 10m0 -10l-10 10`, class: "cross" });
    if (named) return drawn + place([[0, "t", goal, 6, "name strong"], [0, "o", result, 6, "name strong"], ...names_], named);
    return drawn + (small ? "" : text(X(goal) + 9, Y(goal) + 4, "t", { class: "name strong" }) + text(X(result) + 10, Y(result) + 4, "o", { class: "name strong" }));
  }
  if (S.t < J.length) drawn += from(flat(asked(memory, keyOf(n))), said[n]);
  const here = flat(asked(memoryAt(end), question())), path = Array.from({ length: Math.floor(end + 1e-9) + 1 }, (_, t) => flat(asked(states(t), question())));
  drawn += svg("path", { d: `M${[...path, here].map((p) => `${X(p).toFixed(1)} ${Y(p).toFixed(1)}`).join("L")}`, fill: "none", style: "stroke:var(--ink)", "stroke-width": 1, opacity: 0.6 });
  if (end >= 1) {
    drawn += svg("path", { d: `M${X(lazy)} ${Y(lazy) - 6}l6 6l-6 6l-6 -6z`, style: "fill:none;stroke:var(--soft)", "stroke-width": 1.8 });
    if (named) names_.push([0, "only adding", lazy, 6, "name title"]);
    else if (!small) drawn += text(inside(X(lazy)), Y(lazy) + (Y(here) > Y(lazy) ? -11 : 20), "only adding", { class: "name title", "text-anchor": "middle" });
  }
  drawn += svg("circle", { cx: X(here), cy: Y(here), r: small ? 5 : narrow ? 5.5 : 6.5, style: "fill:var(--ink);stroke:var(--paper)", "stroke-width": 1.5 });
  return drawn + (named ? place([[-1, "o", here, 6, "name strong"], ...names_], named) : small ? "" : text(X(here) + 10, Y(here) - 7, "o", { class: "name strong" }));
}

// What a writing does to the last token before it whose key is neither its own nor at right angles.
const along = (j, n) => D.reduce((total, d) => total + V.k(j, d) * V.k(n, d), 0);
function disturbed() {
  const n = now(), other = J.slice(0, n).findLast((j) => Math.abs(along(j, n)) > 1e-9 && along(j, n) ** 2 < (1 - 1e-9) * along(j, j) * along(n, n));
  return other === undefined ? "" : ` The key of ${names([other])}, (${keyOf(other).map(show).join(", ")}), is not at right angles: its answer moves, too, by ${show(along(other, n))} u, and what is remembered of it is disturbed.`;
}

const nearest = (point, among) => among.slice().sort((a, b) => Math.hypot(...E.map((e) => DATA.v[a][e] - point[e])) - Math.hypot(...E.map((e) => DATA.v[b][e] - point[e])))[0];

function caption() {
  const n = now(), size = Math.hypot(...E.map((e) => V.miss(n, e)));
  if (S.side === "backward") {
    const push = J.map((j) => Math.hypot(...E.map((e) => V.dv(j, e)))), most = main(push), idle = J.filter((j) => push[j] < 5e-5);
    return push[most] < 5e-5 ? "No value matters for this loss." : `The loss of ${names([S.i])} changes most with the value of ${names([most])}${idle.length ? `; ${idle.length === 1 ? `that of ${names(idle)} hardly matters` : `those of ${names(idle)} hardly matter`}` : ""}.`;
  }
  if (S.t < J.length) return `Next comes token ${n + 1}, ${names([n])}. The memory’s answer to its key misses the value by ${show(size)}; the writing leaves ${show(Math.hypot(...E.map((e) => DATA.v[n][e] - asked(states(n + 1), keyOf(n))[e])))}.`;
  if (K.beta === 0) return "Nothing is written, so the memory stays empty and every answer is 0.";
  const seen = J.slice(0, S.i + 1), own = nearest(E.map((e) => V.o(S.i, e)), seen), lazy = nearest(added(S.i + 1), seen);
  return `After ${names([S.i])} the output o is nearest to ${names([own])}; ${own === lazy ? "it would be by only adding, too" : `by only adding it would be nearest to ${names([lazy])}`}.`;
}

// ---- the tour --------------------------------------------------------------------------------------------------------

tour({
  title: "The gated delta rule",
  short: "A memory is asked first, and only what it misses is written.",
  intro: () => [
    "A matrix S is a <b>memory</b>. Asked with a key k, it answers with the sum of its rows, each times one element of k.",
    "Linear attention adds each token’s value to what is there, so old values of a key pile up. The delta rule asks first, sees by how much the answer <b>misses</b> the value, and writes only what is missing. The memory keeps its size, however many tokens come.",
    notes ? "Here tokens are notes: the key says who, the value how warm and sweet the drink is. Every token asks about Ann, who changes her mind." : "Each token brings a key, a value and a question.",
  ],
  turn: "Learning asks how the loss changes with every number above. That is its gradient, written with a d in front. The way back goes from the last token to the first, for a correction changes all later answers.",
  sizes: { t: () => J.length, T: () => J.length + 1 },
  quantities: {
    q: { axes: "jd", what: "question (query)" },
    v: { axes: "je", what: "value" },
    target: { axes: "e", symbol: "t", what: "wanted output" },
    k: { axes: "jd", what: "key", of: (j, d) => mul(knob("length"), DATA.k[j][d]), values: () => DATA.k.map((row) => row.map((x) => K.length * x)) },
    faded: { id: "DELTA.1", from: 1, axes: "tde", symbol: "D", what: "memory that has faded", of: (t, d, e) => mul(keep, state(t, d, e)) },
    answer: { from: 1, axes: "te", symbol: "a", what: "memory’s answer to the key", of: (t, e) => dot(D.map((d) => k(t, d)), D.map((d) => faded(t, d, e))) },
    miss: { id: "DELTA.2", from: 1, axes: "te", symbol: "m", what: "miss", of: (t, e) => sub(v(t, e), answer(t, e)) },
    correction: { id: "DELTA.3", from: 1, axes: "te", symbol: "u", what: "change of the answer", of: (t, e) => mul(beta, miss(t, e)) },
    state: { id: "DELTA.4", passes: 1, axes: "Tde", symbol: "S", what: "memory", of: (t, d, e) => (t === 0 ? words("at the start", 0) : add(faded(t - 1, d, e), mul(k(t - 1, d), correction(t - 1, e)))) },
    o: { id: "DELTA.5", from: 1, axes: "te", what: "output, the answer to the question", of: (t, e) => mul(div(1, root), dot(D.map((d) => state(t + 1, d, e)), D.map((d) => q(t, d)))) },
    dread: { from: 1, axes: "te", symbol: "do", what: "gradient of the output", of: (t, e) => (t === S.i ? sub(o(t, e), target(e)) : words("for the loss looks at another output", 0)) },
    dS: { id: "dDELTA.4", back: true, from: 1, axes: "tde", what: "gradient of the memory after the token", of: (t, d, e) => add(div(mul(q(t, d), dread(t, e)), root), t + 1 < J.length ? mul(keep, dD(t + 1, d, e)) : words("as no token follows", 0)) },
    du: { id: "dDELTA.3", back: true, from: 1, axes: "te", what: "gradient of the change", of: (t, e) => dot(D.map((d) => k(t, d)), D.map((d) => dS(t, d, e))) },
    dm: { id: "dDELTA.2", back: true, from: 1, axes: "te", what: "gradient of the miss", of: (t, e) => mul(beta, du(t, e)) },
    dD: { id: "dDELTA.1", back: true, from: 1, axes: "tde", what: "gradient of the faded memory", of: (t, d, e) => sub(dS(t, d, e), mul(k(t, d), dm(t, e))) },
    dq: { id: "dDELTA.q", axes: "jd", what: "gradient of the question", of: (j, d) => sum(E.map((e) => div(mul(state(j + 1, d, e), dread(j, e)), root))) },
    dk: { id: "dDELTA.k", axes: "jd", what: "gradient of the key", of: (j, d) => sub(dot(E.map((e) => dS(j, d, e)), E.map((e) => correction(j, e))), dot(E.map((e) => faded(j, d, e)), E.map((e) => dm(j, e)))) },
    dv: { id: "dDELTA.v", axes: "je", what: "gradient of the value", of: (j, e) => dm(j, e) },
    dbeta: { id: "dDELTA.beta", axes: "j", what: "gradient of beta", of: (j) => dot(E.map((e) => du(j, e)), E.map((e) => miss(j, e))) },
    dlog: { id: "dDELTA.log_decay", axes: "j", symbol: "dlog_decay", what: "gradient of the logarithm of the decay", of: (j) => sum(D.flatMap((d) => E.map((e) => mul(dD(j, d, e), faded(j, d, e))))) },
  },
  forward: [
    { id: "DELTA.1", title: "Fade", say: () => `Token ${now() + 1}, ${names([now()])}, comes. First the memory fades: it keeps ${percent(Math.exp(K.log_decay))} of every number in it.`, when: "step", show: [["state"], ["faded"]], pick: () => ["faded", now(), 0, 0] },
    { title: "Ask", label: "a part of DELTA.2", formula: "a_n = D_n^T k_n", say: "The memory is asked for the token’s key before anything is written. Its answer is the sum of its rows, each times one element of the key.", when: "step", show: [["k"], ["faded"], ["answer"]], pick: () => ["answer", now(), 0] },
    { id: "DELTA.2", title: "See what is missing", say: "The miss is what the answer lacks to be the value: the value minus the answer.", when: "step", show: [["v"], ["answer"], ["miss"]], pick: () => ["miss", now(), 0] },
    { id: "DELTA.3", title: "Decide how much to change", say: "The number β says how firmly to write: 1 takes the whole miss, 0 ignores the token.", when: "step", show: [["miss"], ["correction"]], pick: () => ["correction", now(), 0] },
    { id: "DELTA.4", title: "Write", say: () => `Each row of the memory changes by u times one element of the key. So this key’s answer moves by u times k · k, here ${show(along(now(), now()))}. Answers to keys at right angles stay.${disturbed()}`, when: "step", show: [["k"], ["faded"], ["correction"], ["state+1"]], pick: () => ["state", now() + 1, main(keyOf(now())), 0] },
    { id: "DELTA.5", title: "Read", say: () => `The token’s question is put to the memory as it is after the writing. Nothing of later tokens is in it, so no mask is needed. The question is divided by √d, as in softmax attention${notes ? `; so these notes ask with ${show(Math.hypot(...D.map((d) => V.q(now(), d))) / Math.hypot(...keyOf(0)))} times Ann’s key` : ""}. Here tokens come one by one; in practice they are taken in chunks, with the same result.`, when: "last", show: [["q"], ["state+1"], ["o"]], pick: () => ["o", now(), 0] },
  ],
  backward: [
    { id: "dDELTA.q", of: "DELTA.5", title: "To the question", say: () => `Suppose that the output of ${names([S.i])} should have been the target t: its gradient is the difference. An element of the question is a factor of one row of the memory, so its gradient is how far that row points along that of the output.`, when: "step", show: [["dread"], ["state+1"], ["dq"]], pick: () => ["dq", S.i, 0] },
    { id: "dDELTA.4", of: "DELTA.4", title: "To the memory", say: "The memory after a token was read by that token, and passed on to the next: the gradients of both uses add up.", when: "step", show: [["q"], ["dread"], ["dS"]], pick: () => ["dS", now(), 0, 0] },
    { id: "dDELTA.3", of: "DELTA.4", title: "To the change", say: "The change was written along the key, so its gradient is what the memory’s gradient answers to that key.", when: "step", show: [["k"], ["dS"], ["du"]], pick: () => ["du", now(), 0] },
    { id: ["dDELTA.2", "dDELTA.beta"], of: "DELTA.3", title: "To the miss, and to β", say: "The miss was multiplied by β, so its gradient is, too. The gradient of β says how far the miss points where the loss grows.", when: "step", show: [["du"], ["dm"], ["miss"], ["dbeta"]], pick: () => ["dbeta", now()] },
    { id: "dDELTA.v", of: "DELTA.2", title: "To the value", say: "The miss is the value minus the answer, so the value gets the gradient as it is.", when: "step", show: [["dm"], ["dv"]], pick: () => ["dv", now(), 0] },
    { id: "dDELTA.1", of: "DELTA.2", title: "To the faded memory", say: "The answer was subtracted, so a part of the gradient is taken off along the key: what this token has overwritten hears less of the loss.", when: "step", show: [["k"], ["dS"], ["dm"], ["dD"]], pick: () => ["dD", now(), main(keyOf(now())), 0] },
    { id: "dDELTA.k", of: "DELTA.4", title: "To the key", say: "The key was used twice, to ask and to write: the two gradients are put together.", when: "step", show: [["dS"], ["correction"], ["faded"], ["dm"], ["dk"]], pick: () => ["dk", now(), 0] },
    { id: "dDELTA.log_decay", of: "DELTA.1", title: "To the fading", say: "The faded memory is its own derivative by the logarithm of the decay: products with its gradient add up.", when: "step", show: [["faded"], ["dD"], ["dlog"]], pick: () => ["dlog", now()] },
  ],
  time: { steps: () => J.length, name: "token", first: () => J.length - 1 },
  picture: (W, H, small) => table(W, H, small) + answers(W, H, small),
  height: (W) => (W < 420 ? 112 : 288),
  label: () => `The memory as a table of ${D.length} by ${E.length}, and its answers in the plane of the values`,
  caption,
});
