// The tour of growing attention: formulas, cards, picture.
//
// One head reads one sentence. i, j and l count tokens, a and b features of a token, c old columns, u columns after
// growing, r, s and z directions of W. Signs of singular vectors are free, and so is how new columns are mixed: what
// depends on that (G, H, Z_F, Z_F', the new weights) has no id here, for it is no fault if another library has it otherwise.

const { y, wq, wk, M, Mk, s, w, g, gy, N, C, lambda, rho, back, white, NV, G, Pq, Pk, E: out, sigma, VG, D: way, nu, Fm, WF, cut, VK, Mn } = F;
const { L, R, O, sn, wn, scale: scaled } = F;
const MOST = 4, WIDE = DATA.y[0].length, features = () => range(WIDE), olds = () => range(K.width), news = () => range(K.width + V.c());
const matrix = (quantity) => features().map((a) => features().map((b) => quantity(a, b)));

// Of singular values those that are rounding alone are 0.
const rid = (values) => values.map((x) => (x < 1e-14 * values[0] ? 0 : x));

// The matrix that projects on the columns of W times weights.
function projector(weights) {
  const rows = basis(transposed(product(matrix(V.white), weights)));
  return features().map((r) => features().map((z) => total(rows.map((row) => row[r] * row[z]))));
}

// The kernel after a step: M moves against D, and in units of cost it is cut to a rank.
function kernelAt(amplitude, width) {
  const moved = features().map((a) => features().map((b) => V.M(a, b) - (amplitude * V.D(a, b)) / V.nu())), W = matrix(V.white), back = matrix(V.back);
  return product(product(back, nearest(product(product(W, moved), transposed(W)), width)), transposed(back));
}

// The weights of a kernel, each token's row, and how far they are from what is wanted.
function weightsOf(kernel) {
  return product(product(DATA.y, kernel), transposed(DATA.y)).map((row) => {
    const powers = row.map((x) => Math.exp(x - Math.max(...row)));
    return powers.map((x) => x / total(powers));
  });
}
const lossOf = (weights) => total(weights.flatMap((row, i) => row.map((x, j) => DATA.wanted[i][j] * Math.log(DATA.wanted[i][j] / x))));
const lossAt = (amplitude, columns = V.c()) => lossOf(weightsOf(kernelAt(amplitude, K.width + columns)));

// What the search of the definition tries, as [amplitude, loss], starting from 0.5, and whether it is the best so far.
function tried() {
  const before = lossAt(0), promised = V.slope(), all = [];
  let [lowest, factor, amplitude, found] = [before, 0.5, 0.5, false];
  for (let times = 0; times < 30; times += 1, amplitude *= factor) {
    const loss = lossAt(amplitude), better = loss < lowest && loss <= before + 1e-4 * amplitude * promised;
    all.push([amplitude, loss, better]);
    if (better) {
      [lowest, found] = [loss, true];
      if (times === 0) factor = 2;
    } else if (found) break;
  }
  return all;
}

// L and R with L R^T = M', equally large; the O that brings both as near to the old weights as a rotation can.
function factors() {
  const { left, values, right } = svd(matrix(V.Mn)), sizes = rid(values).map(Math.sqrt), of = (a) => a.map((row) => news().map((u) => row[u] * sizes[u]));
  const l = of(left), r = of(right), old = (name) => features().map((a) => olds().map((n) => V[name](a, n)));
  const [q, k] = [product(transposed(l), old("wq")), product(transposed(r), old("wk"))], sum = q.map((row, u) => row.map((x, n) => x + k[u][n]));
  const { left: from, right: to } = svd(sum.map((row) => [...row])), near = product(from, transposed(to));
  const columns = basis(news().map((u) => news().map((n) => (u === n ? 1 : 0))), transposed(near));
  return { l, r, o: transposed(columns.slice(0, news().length)) };
}

const over = (list, of) => sum(list.map(of));
const quantities = {
  y: { axes: "ia", what: "features of a token" },
  scale: { what: "scale" },
  wanted: { axes: "ij", symbol: "p", what: "wanted weight" },
  wq: { axes: "ac", symbol: "w_q", what: "column of queries", values: () => features().map((a) => olds().map((n) => DATA.w_q[K.width - 1][a][n])) },
  wk: { axes: "ac", symbol: "w_k", what: "column of keys", values: () => features().map((a) => olds().map((n) => DATA.w_k[K.width - 1][a][n])) },
  M: { id: "GROW.1", axes: "ab", what: "kernel, which makes scores", of: (a, b) => mul(scaled(), over(olds(), (n) => mul(wq(a, n), wk(b, n)))) },
  Mk: { axes: "ia", symbol: "yM", what: "token times kernel", of: (i, b) => over(features(), (a) => mul(y(i, a), M(a, b))) },
  s: { axes: "ij", what: "score", of: (i, j) => over(features(), (b) => mul(Mk(i, b), y(j, b))) },
  w: { axes: "ij", what: "weight", of: (i, j) => div(exp(s(i, j)), over(J, (l) => exp(s(i, l)))) },
  row: { axes: "i", symbol: "loss", what: "how far the weights of a token are from the wanted ones", of: (i) => over(J, (j) => mul(F.wanted(i, j), log(div(F.wanted(i, j), w(i, j))))) },
  loss: { what: "loss before", of: () => over(J, (i) => F.row(i)) },

  g: { axes: "ij", symbol: "ds", what: "how much too much weight a token gets, the gradient of a score", of: (i, j) => sub(w(i, j), F.wanted(i, j)) },
  gy: { axes: "ia", symbol: "ds y", what: "tokens by the gradients of a token's scores", of: (i, b) => over(J, (j) => mul(g(i, j), y(j, b))) },
  N: { id: "dGROW.1", axes: "ab", what: "gradient of the kernel", of: (a, b) => over(J, (i) => mul(y(i, a), gy(i, b))) },
  C: { id: "GROW.2", axes: "ab", what: "how tokens spread", of: (a, b) => over(J, (i) => mul(y(i, a), y(i, b))) },
  A: { id: "GROW.3", axes: "ab", what: "what a change costs", of: (a, b) => div(C(a, b), sqrt(1)) },
  lambda: { axes: "r", what: "eigenvalue of A", values: () => eigen(matrix(V.A)).values },
  U: { axes: "ar", what: "eigenvector of A", values: () => eigen(matrix(V.A)).vectors },
  rho: { id: "GROW.4", axes: "r", symbol: "ρ", what: "price of a direction", of: (r) => sqrt(add(lambda(r), mul(knob("damping"), div(over(features(), (n) => lambda(n)), WIDE)))) },
  white: { axes: "ra", symbol: "W", what: "into units of cost", of: (r, a) => mul(rho(r), F.U(a, r)) },
  back: { axes: "ar", symbol: "W⁻¹", what: "back from units of cost", of: (a, r) => div(F.U(a, r), rho(r)) },
  NV: { axes: "ar", symbol: "N W⁻¹", what: "N times the inverse of W", of: (a, r) => over(features(), (b) => mul(N(a, b), back(b, r))) },
  G: { axes: "rz", what: "gradient in units of cost", of: (r, z) => over(features(), (a) => mul(back(a, r), NV(a, z))) },
  Pq: { axes: "rz", symbol: "P_q", what: "projection on the columns of W w_q", values: () => projector(features().map((a) => olds().map((n) => V.wq(a, n)))) },
  Pk: { axes: "rz", symbol: "P_k", what: "projection on the columns of W w_k", values: () => projector(features().map((a) => olds().map((n) => V.wk(a, n)))) },
  E: { axes: "rz", symbol: "G'", what: "G without what old columns of w_q reach", of: (r, z) => sub(G(r, z), over(features(), (n) => mul(Pq(r, n), G(n, z)))) },
  H: { axes: "rz", what: "what old columns cannot reach", of: (r, z) => sub(out(r, z), over(features(), (n) => mul(out(r, n), Pk(n, z)))) },
  sigma: { id: "GROW.7", axes: "r", what: "singular value of H", values: () => rid(svd(matrix(V.H)).values) },
  part: { axes: "r", symbol: "part", what: "part of a new column in all that is out of reach", of: (r) => div(pow(sigma(r), 2), over(features(), (n) => pow(sigma(n), 2))) },
  c: { what: "new columns", values: () => Math.min(MOST, WIDE - K.width, features().filter((r) => V.part(r) > K.share && V.sigma(r) ** 2 > Number.EPSILON * V.all()).length) },
  VG: { axes: "ar", symbol: "W⁻¹ G", what: "the inverse of W times G", of: (a, z) => over(features(), (r) => mul(back(a, r), G(r, z))) },
  D: { id: "GROW.8", axes: "ab", what: "the gradient, as a change of M", of: (a, b) => over(features(), (z) => mul(VG(a, z), back(b, z))) },
  rows: { axes: "r", symbol: "G²", what: "a row of G, squared and added up", of: (r) => over(features(), (z) => pow(G(r, z), 2)) },
  all: { symbol: "|G|²", what: "all of G, squared and added up", of: () => over(features(), (r) => F.rows(r)) },
  nu: { id: "GROW.9", symbol: "ν", what: "unit of a step", of: () => sqrt(div(F.all(), J.length ** 2)) },
  Fm: { id: "GROW.10", axes: "ab", symbol: "F", what: "kernel after the step", of: (a, b) => sub(M(a, b), div(mul(knob("amplitude"), way(a, b)), nu())) },
  WF: { axes: "ra", what: "W times F", of: (r, b) => over(features(), (a) => mul(white(r, a), Fm(a, b))) },
  Kw: { axes: "rz", symbol: "Z_F", what: "kernel after the step in units of cost", of: (r, z) => over(features(), (b) => mul(WF(r, b), white(z, b))) },
  size: { axes: "r", symbol: "value", what: "singular value of F in units of cost", values: () => rid(svd(matrix(V.Kw)).values) },
  kept: { axes: "r", symbol: "kept", what: "singular value that is kept", of: (r) => choose(isTrue(r < K.width + V.c(), r < K.width + V.c() ? "it is among the largest" : "there is no column for it"), F.size(r), 0) },
  cut: { axes: "rz", symbol: "Z_F'", what: "that kernel, cut to its rank", values: () => nearest(matrix(V.Kw), K.width + V.c()) },
  VK: { axes: "ar", symbol: "W⁻¹ Z_F'", what: "the inverse of W times the cut kernel", of: (a, z) => over(features(), (r) => mul(back(a, r), cut(r, z))) },
  Mn: { id: "GROW.13", axes: "ab", symbol: "M'", what: "new kernel", of: (a, b) => over(features(), (z) => mul(VK(a, z), back(b, z))) },
  L: { axes: "au", what: "left factor", values: () => factors().l },
  R: { axes: "au", what: "right factor", values: () => factors().r },
  O: { axes: "uv", what: "rotation to the old columns", values: () => factors().o },
  wqn: { axes: "au", symbol: "w_q'", what: "column of queries after growing", of: (a, n) => div(over(news(), (u) => mul(L(a, u), O(u, n))), sqrt(scaled())) },
  wkn: { axes: "au", symbol: "w_k'", what: "column of keys after growing", of: (a, n) => div(over(news(), (u) => mul(R(a, u), O(u, n))), sqrt(scaled())) },
  Mkn: { axes: "ia", symbol: "yM'", what: "token times new kernel", of: (i, b) => over(features(), (a) => mul(y(i, a), Mn(a, b))) },
  sn: { axes: "ij", symbol: "s'", what: "score after", of: (i, j) => over(features(), (b) => mul(F.Mkn(i, b), y(j, b))) },
  wn: { axes: "ij", symbol: "w'", what: "weight after", of: (i, j) => div(exp(sn(i, j)), over(J, (l) => exp(sn(i, l)))) },
  rown: { axes: "i", symbol: "loss'", what: "how far the weights of a token are from the wanted ones, after", of: (i) => over(J, (j) => mul(F.wanted(i, j), log(div(F.wanted(i, j), wn(i, j))))) },
  lossn: { symbol: "loss'", what: "loss after", of: () => over(J, (i) => F.rown(i)) },
  dwq: { axes: "ac", symbol: "dw_q", what: "gradient of an old column of queries", of: (a, n) => mul(scaled(), over(features(), (b) => mul(N(a, b), wk(b, n)))) },
  dwk: { axes: "ac", symbol: "dw_k", what: "gradient of an old column of keys", of: (b, n) => mul(scaled(), over(features(), (a) => mul(N(a, b), wq(a, n)))) },
  gn: { axes: "ij", symbol: "ds'", what: "gradient of a score, after", of: (i, j) => sub(wn(i, j), F.wanted(i, j)) },
  gyn: { axes: "ia", symbol: "ds' y", what: "tokens by the gradients of a token's scores, after", of: (i, b) => over(J, (j) => mul(F.gn(i, j), y(j, b))) },
  Nn: { axes: "ab", symbol: "N'", what: "gradient of the new kernel", of: (a, b) => over(J, (i) => mul(y(i, a), F.gyn(i, b))) },
  dwqn: { axes: "au", symbol: "dw_q'", what: "gradient of a column of queries, after", of: (a, n) => mul(scaled(), over(features(), (b) => mul(F.Nn(a, b), F.wkn(b, n)))) },
  best: { what: "amplitude that the search takes", values: () => tried().findLast(([, , better]) => better)?.[0] ?? 0 },
  slope: {
    id: "GROW.19", symbol: "slope", what: "change of the loss with the amplitude, at 0",
    of: () => neg(div(sub(F.all(), over(features().slice(V.c()), (r) => pow(sigma(r), 2))), nu())),
  },
};

const { word } = attention();
const columns = (n) => `${n} column${n === 1 ? "" : "s"}`;
const most = (list) => list.reduce((best, x, n) => (x > list[best] ? n : best), 0);
const largest = (quantity) => {
  const all = features().flatMap((a) => features().map((b) => [quantity(a, b), a, b])), [, a, b] = all.reduce((best, one) => (Math.abs(one[0]) > Math.abs(best[0]) ? one : best));
  return [a, b];
};
const rank = () => svd(matrix(V.N)).values.filter((z) => z > 1e-9).length;
const reach = () => squares(matrix(V.H)) / squares(matrix(V.G));
const oldGradient = () => Math.max(...features().flatMap((a) => olds().flatMap((n) => [Math.abs(V.dwq(a, n)), Math.abs(V.dwk(a, n))])));
const largestNew = () => features().flatMap((a) => news().map((n) => [a, n])).reduce((best, at) => (Math.abs(V.dwqn(...at)) > Math.abs(V.dwqn(...best)) ? at : best));
const worst = () => most(J.map((j) => Math.abs(V.g(S.i, j))));
const change = () => Math.sqrt(squares(product(product(DATA.y, matrix((a, b) => V.Fm(a, b) - V.M(a, b))), transposed(DATA.y)))) / J.length;

// ---- pictures: the words with the weights of all of them, and beside them what the card is about -----------------------

// Where the rows of words are, and how high.
const lanes = (top, H) => ({ y: (j) => top + ((j + 0.5) * (H - top)) / J.length, high: (0.92 * (H - top)) / J.length });

// The words, and a map of numbers of pairs beside them: a row for each word that looks.
function board(W, H, small, { heading, bars: [name, told] = ["w", `weights, ${columns(K.width)}`] }) {
  const narrow = W < 420, top = narrow ? 10 : 32, n = J.length, { y, high } = lanes(top, H), side = narrow ? 8 : Math.min(26, 0.032 * W), from = narrow ? 72 : 94, left = from + n * side + (narrow ? 10 : 30);
  return {
    narrow, quiet: small || narrow, left, top: narrow ? 4 : 24, wide: W - left, size: H - (narrow ? 6 : 28),
    drawn: [narrow ? "" : text(0, 12, told, { class: "title" }) + text(left, 12, heading, { class: "title" }), rows(DATA.tokens, S.i, y, narrow ? 68 : 90), weightMap("map", name, from, side, y, high)],
  };
}

// Numbers of pairs as a map, whose rows stand beside the words.
const weightMap = (key, name, x, side, y, high) => [
  J.map((j) => point(`${key}.head.${j}`, x + (j + 0.5) * side, y(0) - high / 2 - 6, Math.min(4, side / 3), j)),
  J.map((i) => J.map((j) => cell(`${key}.${i}.${j}`, x + j * side, y(i) - high / 2, side - 1, high, V[name](i, j), 1, { "data-ref": `${name}.${i}.${j}` }))),
  mark(`${key}.row`, "rect", { x: x - 1.5, y: y(S.i) - high / 2 - 1.5, width: J.length * side + 2, height: high + 3, rx: 3, class: "hair" }),
];

// Matrices in a row with what is between them, as large as there is room, each with its name above it.
function matrices(b, parts) {
  const high = Math.max(...parts.map((part) => part.rows ?? 0)), room = (part) => part.wide ?? (part.length < 2 ? 0.85 : part.length > 6 ? 2 : b.narrow ? 1.8 : 1.2), units = parts.reduce((past, part) => past + room(part), 0), head = b.narrow ? 16 : 30;
  const side = Math.min((b.wide - 4) / units, (b.size - head) / high, 60), middle = b.top + head + (b.size - head) / 2;
  let x = b.left;
  return parts.map((part) => {
    const from = x, wide = room(part) * side;
    x += wide;
    if (typeof part === "string") return text(from + wide / 2, middle + 5, part, { "text-anchor": "middle" });
    const top = middle - (part.rows * side) / 2, size = part.size ?? (Math.max(...range(part.rows).flatMap((m) => range(part.wide).map((n) => Math.abs(part.value(m, n))))) || 1);
    return [
      text(from + wide / 2, top - (part.tokens ? 17 : part.from < part.wide ? 11 : 7), part.label, { "text-anchor": "middle", class: "name" }),
      part.tokens ? J.map((j) => point(`${part.key}.head.${j}`, from + (j + 0.5) * side, top - 7, Math.min(4, side / 4), j)) : [],
      range(part.rows).map((m) => range(part.wide).map((n) => [
        cell(`${part.key}.${m}.${n}`, from + n * side + 0.5, top + m * side + 0.5, side - 1, side - 1, part.value(m, n), size, part.ref ? { "data-ref": part.ref(m, n) } : {}),
        side < 41 ? "" : text(from + (n + 0.5) * side, top + (m + 0.5) * side + 4, show(part.value(m, n)), { "text-anchor": "middle", "font-size": Math.min(11.5, 0.225 * side) }),
      ])),
      part.from < part.wide ? mark(`${part.key}.new`, "rect", { x: from + part.from * side - 1, y: top - 2, width: (part.wide - part.from) * side + 2, height: part.rows * side + 4, rx: 3, class: "frame" }) : [],
      part.tokens ? mark(`${part.key}.row`, "rect", { x: from - 1, y: top + S.i * side - 1, width: wide + 2, height: side + 2, rx: 3, class: "hair" }) : [],
    ];
  });
}

// A bar for each number of a list, and below it the matrix that it belongs to; those that do not count are pale.
function upright(b, numbers, ref, pieces, { told = (z) => show(z), counts = () => true, least } = {}) {
  const high = Math.max(...numbers, least ?? 0, 1e-9) * 1.08, foot = b.top + 0.52 * b.size, up = scale(0, high, foot, b.top + 16), wide = Math.min(130, b.wide / numbers.length), side = Math.min((0.86 * wide) / pieces[0][0].length, (0.42 * b.size) / pieces[0].length), size = Math.max(1e-12, ...pieces.flat(2).map(Math.abs));
  return [
    line("foot", [[b.left, foot], [b.left + numbers.length * wide, foot]], { class: "axis" }),
    numbers.map((z, n) => {
      const x = b.left + (n + 0.5) * wide, across = pieces[n][0].length;
      return [
        mark(`bar.${n}`, "rect", { x: x - 0.34 * wide, y: Math.min(up(z), foot - 1.5), width: 0.68 * wide, height: Math.max(1.5, foot - up(z)), rx: 2, "data-ref": `${ref}.${n}`, style: `fill:${counts(n) ? "var(--accent)" : "var(--soft)"}`, opacity: counts(n) ? 1 : 0.5 }),
        label(`told.${n}`, x, Math.min(up(z), up(least ?? 0)) - 4, told(z, n), { "text-anchor": "middle", class: "tick" }),
        pieces[n].map((row, m) => row.map((one, l) => cell(`piece.${n}.${m}.${l}`, x + (l - across / 2) * side + 0.5, foot + 8 + m * side, side - 1, side - 1, one, size, counts(n) ? {} : { opacity: 0.5 }))),
      ];
    }),
    least === undefined ? [] : line("least", [[b.left - 4, up(least)], [b.left + numbers.length * wide + 4, up(least)]], { class: "cut" }),
  ];
}

// The matrices of rank 1 that a matrix is the sum of, the largest first.
function pieces(all) {
  const { left, values, right } = svd(all);
  return values.map((z, n) => left.map((row) => right.map((other) => row[n] * z * other[n])));
}

// The loss over the amplitude: with the new columns, without any; where the step is, and what a search tried.
function losses(b, extra = () => []) {
  const best = V.best(), far = Math.min(3, Math.max(K.amplitude, 3 * best)) || 3, high = Math.max(1.25 * V.loss(), Math.min(1.1 * V.lossn(), 2.5 * V.loss())) + 1e-9, foot = b.narrow ? 4 : 24, right = Math.min(b.wide, 560), X = scale(0, far, b.left, b.left + right), Y = scale(0, high, b.top + b.size - foot, b.top), inside = (z) => Math.max(b.top, Y(z));
  const curve = (key, at, set) => {
    const all = range(31).map((n) => (far * n) / 30).map((a) => [a, at(a)]), end = all.findIndex(([, z]) => z > high); // it leaves the picture there
    return line(key, (end < 0 ? all : all.slice(0, Math.max(2, end))).map(([a, z]) => [X(a), inside(z)]), { class: "line", ...set });
  };
  return [
    svg("rect", { x: b.left, y: b.top, width: right, height: b.size - foot, rx: 4, class: "plane" }),
    line("before", [[b.left, Y(V.loss())], [b.left + right, Y(V.loss())]], { class: "axis" }),
    curve("narrow loss", (a) => lossAt(a, 0), { style: "stroke:var(--soft)", "stroke-dasharray": "2 4" }), curve("loss", (a) => lossAt(a), { style: "stroke:var(--accent)" }), extra(X, Y, far, inside),
    mark("here", "circle", { cx: X(K.amplitude), cy: inside(V.lossn()), r: b.narrow ? 4 : 6, style: "fill:var(--accent)", class: "dot", "data-ref": "lossn" }),
    b.narrow ? "" : text(b.left + 4, Y(V.loss()) - 4, show(V.loss()), { class: "tick", "data-ref": "loss" }) + text(b.left, b.top + b.size - 8, "amplitude 0", { class: "tick" }) + text(b.left + right, b.top + b.size - 8, show(far), { class: "tick", "text-anchor": "end" }) + text(b.left + right - 6, b.top + b.size - foot - 6, "dotted: no new columns", { class: "tick", "text-anchor": "end" }),
  ];
}

const worth = (b) => upright(b, features().map((n) => V.part(n)), "part", pieces(matrix(V.H)), { told: (_, n) => percents(features().map((l) => V.part(l)))[n], counts: (n) => n < V.c(), least: K.share });

const below = (letter, sign, raised = "") => `${letter}<tspan dy="3" font-size="10">${sign}</tspan>${raised && `<tspan dy="-3">${raised}</tspan>`}`;
const of = (name, label, count, wide, more) => ({ key: name, label, rows: count, wide, value: V[name], ref: (m, n) => `${name}.${m}.${n}`, ...more });
const square = (label, name, size) => of(name, label, WIDE, WIDE, { size });
const tall = (label, name, wide, more) => of(name, label, WIDE, wide, more);
const pairs = (label, name, size) => of(name, label, J.length, J.length, { size, tokens: true });
const turned = (part, label) => ({ ...part, key: `${part.key}T`, label, rows: part.wide, wide: part.rows, value: (m, n) => part.value(n, m), ref: (m, n) => part.ref(n, m) });
const tokens = () => of("y", "y", J.length, WIDE);
const grown = (letter, name) => tall(below("w", letter, "′"), name, K.width + V.c(), { from: K.width });
const after = () => ["wn", `weights, ${columns(K.width + V.c())}`];


// G as what old columns can follow, and H.
function reached(b) {
  const size = Math.max(...matrix(V.G).flat().map(Math.abs)), old = { key: "old", label: "old ones can", rows: WIDE, wide: WIDE, value: (m, n) => V.G(m, n) - V.H(m, n), size };
  return matrices(b, [square("G", "G", size), "=", old, "+", square("H", "H", size)]);
}

// Both matrices of the grown head, each from its factor and O; and the old columns.
function split(b) {
  if (b.narrow) return matrices(b, ["q", "k"].flatMap((letter, n) => [n ? "" : [], tall(below("w", letter), `w${letter}`, K.width), "→", grown(letter, `w${letter}n`)].flat()));
  const half = { ...b, size: 0.48 * b.size }, low = { ...half, top: b.top + 0.52 * b.size }, turn = (key) => of("O", "O", K.width + V.c(), K.width + V.c(), { key });
  const side = (at, factor, letter) => matrices(at, [tall(factor, factor, K.width + V.c()), "×", turn(`O ${letter}`), `/ √${show(V.scale())} =`, grown(letter, `w${letter}n`), "", tall(`${below("w", letter)}<tspan dy="-3">, old</tspan>`, `w${letter}`, K.width)]);
  return [side(half, "L", "q"), side(low, "R", "k")];
}

// Of the first card, the turn and the gallery: the weights of all words, as they are wanted, before and after; if there
// is room, what new columns are worth.
function picture(W, H, small) {
  const narrow = W < 420, top = narrow ? 10 : 32, left = small ? 4 : narrow ? 74 : 98, gap = small ? 30 : narrow ? 12 : 34, maps = [["wanted", "wanted"], [`with ${columns(K.width)}`, "w"], [`with ${columns(K.width + V.c())}`, "wn"]].slice(small ? 1 : 0);
  const { y, high } = lanes(top, H), room = small || narrow ? 0 : 0.28 * W, side = (W - left - room - gap * (maps.length - 1) - 4) / (maps.length * J.length), at = (n) => left + n * (J.length * side + gap);
  return [
    small ? "" : rows(DATA.tokens, S.i, y, left - 8),
    maps.map(([told, name], n) => [small || narrow ? "" : text(at(n), 12, told, { class: "title" }), weightMap(n === maps.length - 1 ? "map" : name, name, at(n), side, y, high)]),
    room ? [text(W - room + 30, 12, "worth of new columns", { class: "title" }), worth({ left: W - room + 30, top: 24, wide: room - 34, size: H - 28 })] : [],
    small ? vector("grow", at(1) - 23, H / 2, at(1) - 7, H / 2) : [],
  ];
}

// ---- cards -------------------------------------------------------------------------------------------------------------

const forward = [
  { id: "GROW.1", title: "One kernel", show: [["wq", "wk"], ["M"]], pick: () => ["M", ...largest(V.M)],
    heading: "scale times the columns make the kernel", draw: (b) => matrices(b, [`${show(V.scale())} ×`, tall(below("w", "q"), "wq", K.width), "×", turned(tall("", "wk", K.width), below("w", "k", "ᵀ")), "=", square("M", "M")]),
    caption: () => `A blue cell is above 0, an orange one below. Left, the weights that this kernel makes: row ${word()} is who it attends to.`,
    alt: "The columns of queries times those of keys are the kernel",
    say: () => `Each token has a query (what it looks for), made by w<sub>q</sub>, and a key (what it offers), made by w<sub>k</sub>. For scores only the product M counts. ${K.width === 1 ? "All its rows are multiples of one row. That is called rank 1." : `It is a sum of ${K.width} matrices whose rows are multiples of one row, so its rank is ${K.width} at most.`}` },
  { title: "Too much, too little", label: "the gradient of a score", formula: "ds = w - p", show: [["s[i]", "w[i]", "wanted[i]", "g[i]"]], pick: () => ["g", S.i, worst()],
    heading: "where weights are too large (blue) and too small (orange)", draw: (b) => matrices(b, [pairs("weights", "w", 1), "−", pairs("wanted", "wanted", 1), "=", pairs("ds", "g", 1)]),
    caption: () => `${word()} should attend ${V.g(S.i, worst()) < 0 ? "more" : "less"} to ${names([worst()])}, by ${show(Math.abs(V.g(S.i, worst())))}.`,
    alt: "The weights minus the wanted ones",
    say: () => `Scores make weights w by a softmax, and the weights p are wanted. The loss is how far w is from p: p log(p / w), added up over each row (the Kullback–Leibler divergence) and then over all rows. ds, the gradient of a score, says how much too much weight a token gets; below 0 it gets too little. Here ${word()} should attend ${
      V.g(S.i, worst()) < 0 ? "more" : "less"} to ${names([worst()])}.` },
  { title: "What the loss asks of the kernel", label: "the gradient of M", formula: "N = y^T ds y", show: [["N"], ["y"]], pick: () => ["N", ...largest(V.N)],
    bars: ["g", "ds"], heading: "what the loss asks of the kernel", draw: (b) => matrices(b, [turned(tokens(), "yᵀ"), "×", { ...pairs("ds", "g", 1), tokens: false }, "×", tokens(), "=", square("N", "N")]),
    caption: () => `N has rank ${rank()}, and a head of ${columns(K.width)} can only make kernels of rank ${K.width}.`,
    alt: "Tokens times the gradient times tokens is N",
    say: "The rows of y are the tokens, each with its features. Scores are y M yᵀ, so N, the gradient of M, is put together of ds and features of both tokens. N may have any rank: the loss can ask for what so few columns cannot make." },
  { id: ["GROW.2", "GROW.3"], title: "What a change costs", show: [["C"], ["y"]], pick: () => ["C", 0, 0],
    bars: ["g", "ds"], heading: "how tokens spread", draw: (b) => matrices(b, [turned(tokens(), "yᵀ"), "×", tokens(), "=", square("C", "C")]),
    caption: "A large number on the diagonal: tokens reach far along that feature, so changing the kernel there changes scores more.",
    alt: "Tokens times tokens is C",
    say: "A gradient can be trusted only for small changes of the scores. So a change of M costs what it changes in them (the root of the mean square): more where tokens have large features. C adds up their products. With one sequence, b = 1, A is C." },
  { id: "GROW.4", title: "A price for each direction", show: [["lambda", "rho"]], pick: () => ["rho", WIDE - 1],
    bars: ["g", "ds"], heading: "the price ρ of each direction, and the direction below it", draw: (b) => upright(b, features().map((n) => V.rho(n)), "rho", features().map((n) => features().map((a) => [V.U(a, n)]))),
    caption: () => `The dearest direction costs ${show(V.rho(WIDE - 1) / V.rho(0))} times as much as the cheapest. Tokens reach ${show(Math.sqrt(V.lambda(WIDE - 1) / V.lambda(0)))} times as far along it${K.damping ? "; the damping makes the difference" : ""}.`,
    alt: "A bar for the price of each direction",
    say: () => `A has ${WIDE} directions at right angles (its eigenvectors). For each, the eigenvalue λ says how far the tokens reach along it. Its root ρ is the price of a change in that direction. The damping adds a little to every λ, so that no direction is free.` },
  { id: "GROW.5", title: "The gradient in units of cost", show: [["G"], ["N"]], pick: () => ["G", ...largest(V.G)],
    bars: ["g", "ds"], heading: "the gradient in units of cost", draw: (b) => matrices(b, [turned(square("", "back"), "W⁻ᵀ"), "×", square("N", "N"), "×", square("W⁻¹", "back"), "=", square("G", "G")]),
    caption: "A cell of N is for a pair of features, one of G for a pair of directions, divided by both prices: cheap pairs gain against dear ones.",
    alt: "The gradient, from both sides times the inverse of W, is G",
    say: "W has a row for each direction, multiplied by its price. Write a change of M as E: W E Wᵀ has the size of the change of the scores, so we measure E by it. N · E, element by element and added up, is the change of the loss; G · (W E Wᵀ) has to be the same: hence the inverses. G is large where a change gains much and costs little." },
  { id: "GROW.6", title: "What is out of reach", show: [["H"], ["G"]], pick: () => ["H", ...largest(V.H)],
    bars: ["g", "ds"], heading: "what old columns can follow, and what is left", draw: reached,
    caption: () => `${percent(reach())} of the squares of G are in H, which only new columns can make.`,
    alt: "G is what old columns can follow, and H",
    say: () => `The old columns can follow the part of G that lies in their span. The projections P<sub>q</sub> and P<sub>k</sub> find that part: for queries and for keys, in units of cost. H is the rest of G, which only new columns can make. Its squares are ${percent(reach())} of those of G${
      reach() > 0.9 && !TYPED ? ": the head has learned what it could, so both look alike" : ""}.` },
  { id: "GROW.7", title: "How many columns", show: [["sigma", "part"], ["c"]], pick: () => ["part", 0],
    bars: ["g", "ds"], heading: "bars: the part of each matrix of rank 1 in H; dashed: the least part", draw: (b) => worth(b),
    caption: () => `Each bar is the part of one matrix in all of H. Above the dashed line, ${percent(K.share)}, it is worth a column: ${V.c() ? `${columns(V.c())} more` : "none"}.`,
    alt: "A bar for each singular value of H",
    say: () => `H is a sum of matrices of rank 1, and one new column on both sides can make one of them. Its size σ is called a singular value; σ² is what the column is worth. H only decides how many columns to add. The columns themselves come from the singular value decomposition (SVD) of step 10, as old and new ones move together.` },
  { id: ["GROW.8", "GROW.9", "GROW.10"], title: "Move the kernel", show: [["Fm"], ["D"], ["nu"]], pick: () => ["Fm", ...largest(V.D)],
    bars: ["wn", "weights after step 10"], heading: "the loss by how far the kernel moves, and what a search tries", draw: (b) => losses(b, (X, _, far, inside) => tried().filter(([a]) => a <= far).map(([a, z], n) => [mark(`tried.${n}`, "circle", { cx: X(a), cy: inside(z), r: b.narrow ? 3.5 : 6, class: "sink" }), b.narrow ? [] : label(`order.${n}`, X(a) + 9, inside(z) - 8, show(a), { class: "name" })])),
    caption: () => `The blue point is the step, rings are what a search tries: ${V.best() > 0 ? `it takes ${show(V.best())}` : "none of them helps"}. Dotted: no new columns${TYPED ? "" : `, so the cut keeps the old part${K.width > 1 ? "s" : ""} until an added one outgrows ${K.width > 1 ? "them" : "it"}`}.`,
    alt: "The loss by the amplitude, and what a search tries",
    say: () => `D is G, turned back into a change of M. It is all of G, not H alone, as old and new columns move together. M moves against D. The unit ν makes an amplitude of 1 change the scores by about 1 (root of the mean square); here they change by ${show(change())}. The result F may have any rank; weights and losses in the picture are those after its cut (step 10).` },
  { id: ["GROW.12", "GROW.13"], title: "Cut to the columns there are", show: [["size", "kept"], ["Mn"]], pick: () => ["Mn", ...largest(V.Mn)],
    bars: after, heading: () => `singular values of F in units of cost; blue: kept, for ${columns(K.width + V.c())}`, draw: (b) => upright(b, features().map((n) => V.size(n)), "size", pieces(matrix(V.Kw)), { counts: (n) => n < K.width + V.c() }),
    caption: () => `A bar for each matrix of rank 1 in F. ${K.width + V.c() < WIDE ? `Kept: ${K.width + V.c()} of ${WIDE}. The pale ones are cut off.` : "All are kept."}`,
    alt: "A bar for each singular value of the kernel after the step",
    say: () => `The kernel of a head with ${columns(K.width + V.c())} has at most that rank, but F may have more. So F is cut, in units of cost (Z<sub>F</sub>, GROW.11): only the d + c largest singular values are kept, for d old columns (${K.width}) and c new ones (${V.c()}). Turned back, this is M', the kernel nearest to F that the grown head can make.` },
  { id: ["GROW.17", "GROW.18"], title: "Back to two matrices", also: { label: "why O changes no score", formula: "M' = L R^T = (L O) (R O)^T" },
    bars: ["wn", "weights, grown"], heading: "L, R and O make the columns; framed: new ones; right: before", draw: split,
    caption: () => `${V.c() ? `In frames: the new columns, ${V.c()} on each side.` : "No column is new."} Old ones have moved, too. Left, the weights that the grown head has.`,
    alt: "The columns of queries and keys before and after",
    show: [["wq", "wqn"], ["wk", "wkn"], ["L", "R"], ["O"]], pick: () => ["wqn", 0, Math.min(K.width, K.width + V.c() - 1)],
    say: () => `M' is split into two matrices, L and R, equally large (GROW.14, GROW.15). A rotation O, the same for both, brings the old columns near to where they were (GROW.16)${V.c() ? "; the new ones stand behind them" : ""}.` },
];
const backward = [
  { id: "GROW.19", of: "GROW.10", title: "How fast the loss falls", show: [["slope"], ["all"], ["nu"], ["sigma"], ["G", "rows"]], pick: () => ["slope"],
    bars: after, heading: "the loss, and how fast it falls when the step begins", draw: (b) => losses(b, (X, Y, far) => { const until = Math.min(far, V.slope() < 0 ? -V.loss() / V.slope() : far); return vector("slope", X(0), Y(V.loss()), X(until), Y(V.loss() + until * V.slope()), { class: "vector thick" }); }),
    caption: () => `The arrow is what the slope, ${show(V.slope())}, promises. ${K.amplitude > 0 ? `At ${show(K.amplitude)} the loss is ${show(V.lossn())} instead of ${show(V.loss())}.` : "At amplitude 0 nothing has moved."}`,
    alt: "The loss by the amplitude, and its slope at 0",
    say: () => `This is the derivative with respect to the amplitude, at 0. The cut keeps all of G but those parts of H that get no column. ${
      K.amplitude > 0 ? `For an amplitude of ${show(K.amplitude)} it promises ${show(V.slope() * K.amplitude)}, and the loss changes by ${show(V.lossn() - V.loss())}, as weights do not change in proportion.` : "The amplitude is 0, so nothing has moved yet."}` },
  { title: "And then training goes on", of: "GROW.17", label: "the gradient", formula: "dw_q' = scale N' w_k'", show: [["wqn", "dwqn"], ["Nn"]], pick: () => ["dwqn", ...largestNew()],
    bars: ["gn", "ds, after"], heading: "the gradient of each column after the step", draw: (b) => matrices(b, [`${show(V.scale())} ×`, square("N′", "Nn"), "×", grown("k", "wkn"), "=", { ...grown("q", "dwqn"), label: `d${below("w", "q", "′")}` }]),
    caption: () => (K.amplitude === 0 ? "At amplitude 0 new columns are 0, and so is their gradient." : V.c() ? "Framed: the new columns. Now all have a gradient, and training can go on." : "No column is new; the old ones have moved."),
    alt: "The new gradient times the columns of keys",
    say: () => `With the new kernel there is a new gradient N', and through it each column has one. ${
      K.amplitude > 0 ? `The largest is now ${show(Math.abs(V.dwqn(...largestNew())))}, where before the step it was ${show(oldGradient())}.${Math.abs(V.dwqn(...largestNew())) > oldGradient() && !TYPED ? " So training goes on where it had come to a stop." : ""}` : "At amplitude 0 the new columns are 0 on both sides, and so are their gradients: they would never learn."}` },
  { title: "What old columns can learn", of: "GROW.1", label: "the gradient", formula: "dw_q = scale N w_k", show: [["wq", "dwq"], ["wk", "dwk"]], pick: () => ["dwq", 0, 0],
    bars: ["g", "ds"], heading: "the gradient of the old columns", draw: (b) => matrices(b, [`${show(V.scale())} ×`, square("N", "N"), "×", tall(below("w", "k"), "wk", K.width), "=", tall(`d${below("w", "q")}`, "dwq", K.width, { size: Math.max(...matrix(V.N).flat().map(Math.abs)) })]),
    caption: () => `N asks for up to ${show(Math.abs(V.N(...largest(V.N))))}, and no column gets more than ${show(oldGradient())} of it. Colours are to one scale.`,
    alt: "The gradient N times the old columns of keys",
    say: () => `Training follows these gradients, and they see N only through the old columns. The largest is ${show(oldGradient())}, while N has entries up to ${show(Math.abs(V.N(...largest(V.N))))}: ${percent(reach())} of what the loss asks for, in units of cost, lies where the old columns do not reach.` },
  { id: "dGROW.1", of: "GROW.1", title: "Where N comes from", show: [["y"], ["gy"], ["g[i]"], ["N"]], pick: () => ["N", ...largest(V.N)],
    bars: ["g", "ds"], heading: "where N comes from", draw: (b) => matrices(b, [turned(tokens(), "yᵀ"), "×", { ...tokens(), key: "gy", label: "ds y", value: V.gy, ref: (m, n) => `gy.${m}.${n}` }, "=", square("N", "N")]),
    caption: "Each row of ds y: the tokens, each as often as it got too much weight. Added up by the features of who looks, they are N.",
    alt: "Tokens times the weighted tokens is N",
    say: "Scores are y M yᵀ, so an entry of M reaches a score by a feature of one token and a feature of the other. Its gradient is the sum over all pairs of tokens. The backward of attention computes ds anyway." },
];

function caption() {
  const best = V.best(), found = best > 0 ? `The amplitude is how far the step goes; of those that a search tried, ${show(best)} is best.` : "A search over the amplitude, how far the step goes, finds none that helps.";
  if (S.side === "backward") return `At amplitude 0 the loss changes by ${show(V.slope())} for each 1 of amplitude. ${best > 0 ? `Of the amplitudes that a search tried, ${show(best)} is best.` : "A search finds no amplitude that helps."}`;
  if (K.amplitude === 0) return `With ${columns(K.width)} the loss is ${show(V.loss())}. At amplitude 0 nothing has moved. ${found}`;
  const rises = V.lossn() > V.loss();
  return `With ${columns(K.width)} the loss is ${show(V.loss())}. With ${columns(V.c())} more ${rises ? `it <span class="warn">rises</span> to` : "it falls to"} ${show(V.lossn())}. ${found}`;
}

tour({
  title: "Growing attention",
  living: "amplitude",
  short: "A head that is too narrow for what the loss asks gets new columns, where they help most.",
  intro: () => [
    `A <b>head</b> compares tokens by two narrow matrices. Each <b>column</b> is one way to compare, so few columns make few patterns of weights. Here each token should attend to the next, the last to the first. ${TYPED ? `The ${columns(K.width)} here learned this on the tour’s own words, and not yet on yours` : `Training with ${columns(K.width)} has come no further than the picture shows`}.`,
    `This is no layer; it is done a few times during training. The gradient asks for a change of all scores. The part that old columns cannot follow is split into single columns, which tells how many are worth while; then old and new ones move together. Added here: ${V.c() || "none"}${
      V.lossn() > V.loss() ? `; but at amplitude ${show(K.amplitude)} the loss rises` : ""}. Then training goes on.`,
  ],
  turn: "Growth is no layer: nothing goes back through it. But gradients surround it (a d in front of a letter: how the loss changes with it): how fast the loss falls when the step begins, what training can do after it and could do before it, and N, with which all begins.",
  sizes: { a: () => WIDE, b: () => WIDE, c: () => K.width, u: () => K.width + V.c(), v: () => K.width + V.c(), r: () => WIDE, z: () => WIDE },
  quantities, forward, backward, picture, board, caption,
  tasks: [
    { say: "raise the least part until only one column is added", done: () => V.c() === 1 },
    { say: "go so far that the loss rises", own: true, done: () => V.lossn() > V.loss() },
    { say: "begin with two columns, and find an amplitude with which the loss falls", done: () => K.width === 2 && V.lossn() < V.loss() },
  ],
  height: (W) => (W < 420 ? 130 : Math.min(520, Math.round(W * 0.5))),
  tallest: () => 130,
  label: () => `What new columns are worth: ${features().map((r) => percent(V.part(r))).join(", ")}; ${V.c()} are added. The loss is ${show(V.loss())} before and ${show(V.lossn())} after.`,
});
