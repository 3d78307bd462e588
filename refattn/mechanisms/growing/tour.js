// The tour of growing attention: formulas, cards, picture.
//
// One head reads one sentence. i, j and l count tokens, a and b features of a token, c old columns, u columns after
// growing, r, s and z directions of W. Signs of singular vectors are free, and so is how new columns are mixed: what
// depends on that (G, H, Z_F, Z_F', the new weights) has no id here, for it is no fault if another library has it otherwise.

const { y, wq, wk, M, Mk, s, w, g, gy, N, C, lambda, rho, back, white, NV, G, Pq, Pk, E: out, sigma, VG, D: way, nu, Fm, WF, cut, VK, Mn } = F;
const { L, R, O, sn, wn, scale: scaled } = F;
const range = (count) => Array.from({ length: count }, (_, n) => n);
const MOST = 4, WIDE = DATA.y[0].length, features = () => range(WIDE), olds = () => range(K.width), news = () => range(K.width + V.c());
const total = (list) => list.reduce((past, x) => past + x, 0);
const product = (a, b) => a.map((row) => b[0].map((_, n) => total(row.map((x, l) => x * b[l][n]))));
const transposed = (a) => a[0].map((_, n) => a.map((row) => row[n]));
const matrix = (quantity) => features().map((a) => features().map((b) => quantity(a, b)));
const squares = (a) => total(a.flat().map((x) => x * x));

// Singular values, largest first, and vectors as columns: turn pairs of columns until all are at right angles.
function svd(a) {
  const left = transposed(a), right = range(left.length).map((n) => range(left.length).map((l) => (n === l ? 1 : 0)));
  for (let sweep = 0; sweep < 60; sweep += 1) {
    let turned = 0;
    for (let m = 0; m < left.length; m += 1) for (let n = m + 1; n < left.length; n += 1) {
      const [mm, nn, mn] = [[m, m], [n, n], [m, n]].map(([e, f]) => total(left[e].map((x, l) => x * left[f][l])));
      if (Math.abs(mn) <= 1e-15 * Math.sqrt(mm * nn) || mn === 0) continue;
      turned += 1;
      const z = (nn - mm) / (2 * mn), t = Math.sign(z || 1) / (Math.abs(z) + Math.hypot(1, z)), cos = 1 / Math.hypot(1, t), sin = t * cos;
      for (const of of [left, right]) [of[m], of[n]] = [of[m].map((x, l) => cos * x - sin * of[n][l]), of[m].map((x, l) => sin * x + cos * of[n][l])];
    }
    if (!turned) break;
  }
  const sizes = left.map((column) => Math.hypot(...column)), order = range(sizes.length).sort((m, n) => sizes[n] - sizes[m]);
  const unit = order.map((n) => left[n].map((x) => (sizes[n] > 0 ? x / sizes[n] : 0)));
  return { left: transposed(unit), values: order.map((n) => sizes[n]), right: transposed(order.map((n) => right[n])) };
}

// Of singular values those that are rounding alone are 0.
const rid = (values) => values.map((x) => (x < 1e-14 * values[0] ? 0 : x));

// Eigenvalues of a symmetric positive matrix, the smallest first, and eigenvectors as columns with a largest part that is positive.
function eigen(a) {
  const { values, right } = svd(a), columns = transposed(right).reverse().map((column) => {
    const most = column.reduce((best, x) => (Math.abs(x) > Math.abs(best) ? x : best), 0);
    return column.map((x) => x * Math.sign(most));
  });
  return { values: values.reverse(), vectors: transposed(columns) };
}

// An orthonormal basis of the columns, as rows: Gram and Schmidt, twice against rounding.
function basis(columns, first = []) {
  const made = [...first];
  for (const column of columns) {
    let rest = column;
    for (let again = 0; again < 2; again += 1) for (const one of made) {
      const along = total(one.map((x, n) => x * rest[n]));
      rest = rest.map((x, n) => x - along * one[n]);
    }
    const size = Math.hypot(...rest);
    if (size > 1e-9 * Math.hypot(...column)) made.push(rest.map((x) => x / size));
  }
  return made;
}

// The matrix that projects on the columns of W times weights.
function projector(weights) {
  const rows = basis(transposed(product(matrix(V.white), weights)));
  return features().map((r) => features().map((z) => total(rows.map((row) => row[r] * row[z]))));
}

// The matrix with its `width` largest singular values alone.
function nearest(a, width) {
  const { left, values, right } = svd(a);
  return a.map((_, m) => a.map((__, n) => total(range(width).map((r) => left[m][r] * values[r] * right[n][r]))));
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

// What the search of the definition finds, starting from 0.5.
function searched() {
  const before = lossAt(0), promised = V.slope();
  let [best, lowest, factor, amplitude] = [0, before, 0.5, 0.5];
  for (let tried = 0; tried < 30; tried += 1, amplitude *= factor) {
    const loss = lossAt(amplitude);
    if (loss < lowest && loss <= before + 1e-4 * amplitude * promised) {
      [best, lowest] = [amplitude, loss];
      if (tried === 0) factor = 2;
    } else if (best > 0) break;
  }
  return best;
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
  size: { axes: "r", symbol: "value", what: "singular value of Z_F", values: () => rid(svd(matrix(V.Kw)).values) },
  kept: { axes: "r", symbol: "kept", what: "singular value that is kept", of: (r) => choose(isTrue(r < K.width + V.c(), r < K.width + V.c() ? "it is among the largest" : "there is no column for it"), F.size(r), 0) },
  cut: { axes: "rz", symbol: "Z_F'", what: "Z_F cut to its rank", values: () => nearest(matrix(V.Kw), K.width + V.c()) },
  VK: { axes: "ar", symbol: "W⁻¹ Z_F'", what: "the inverse of W times the cut kernel", of: (a, z) => over(features(), (r) => mul(back(a, r), cut(r, z))) },
  Mn: { id: "GROW.13", axes: "ab", symbol: "M'", what: "new kernel", of: (a, b) => over(features(), (z) => mul(VK(a, z), back(b, z))) },
  L: { axes: "au", what: "left factor", values: () => factors().l },
  R: { axes: "au", what: "right factor", values: () => factors().r },
  O: { axes: "uv", what: "rotation to the old columns", values: () => factors().o },
  wqn: { axes: "au", symbol: "w_q'", what: "new column of queries", of: (a, n) => div(over(news(), (u) => mul(L(a, u), O(u, n))), sqrt(scaled())) },
  wkn: { axes: "au", symbol: "w_k'", what: "new column of keys", of: (a, n) => div(over(news(), (u) => mul(R(a, u), O(u, n))), sqrt(scaled())) },
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
  best: { what: "amplitude that the search takes", values: searched },
  slope: {
    id: "GROW.19", symbol: "slope", what: "change of the loss with the amplitude, at 0",
    of: () => neg(div(sub(F.all(), over(features().slice(V.c()), (r) => pow(sigma(r), 2))), nu())),
  },
};

const word = () => `<b>${DATA.tokens[S.i]}</b>`;
const columns = (n) => `${n} column${n === 1 ? "" : "s"}`;
const most = (list) => list.reduce((best, x, n) => (x > list[best] ? n : best), 0);
const largest = (quantity) => {
  const all = features().flatMap((a) => features().map((b) => [quantity(a, b), a, b])), [, a, b] = all.reduce((best, one) => (Math.abs(one[0]) > Math.abs(best[0]) ? one : best));
  return [a, b];
};
const reach = () => squares(matrix(V.H)) / squares(matrix(V.G));
const oldGradient = () => Math.max(...features().flatMap((a) => olds().flatMap((n) => [Math.abs(V.dwq(a, n)), Math.abs(V.dwk(a, n))])));
const largestNew = () => features().flatMap((a) => news().map((n) => [a, n])).reduce((best, at) => (Math.abs(V.dwqn(...at)) > Math.abs(V.dwqn(...best)) ? at : best));
const worst = () => most(J.map((j) => Math.abs(V.g(S.i, j))));
const change = () => Math.sqrt(squares(product(product(DATA.y, matrix((a, b) => V.Fm(a, b) - V.M(a, b))), transposed(DATA.y)))) / J.length;

const forward = [
  {
    id: "GROW.1", title: "One kernel", view: "kernel", show: [["wq", "wk"], ["M"]], pick: () => ["M", ...largest(V.M)],
    say: () => `Each token has a query (what it looks for), made by w<sub>q</sub>, and a key (what it offers), made by w<sub>k</sub>. For the scores only the product M of the two counts. ${
      K.width === 1 ? "With one column each, all rows of M are multiples of one row. That is called rank 1." : `A matrix whose rows are multiples of one row has rank 1. With ${columns(K.width)} each, M is a sum of ${K.width} of these, so its rank is ${K.width} at most.`}`,
  },
  {
    title: "Too much, too little", view: "error", formula: "ds = w - p", show: [["s[i]", "w[i]", "wanted[i]", "g[i]"]], pick: () => ["g", S.i, worst()],
    say: () => `Scores make weights w by a softmax, and the weights p are wanted. ds, the gradient of a score, says how much too much weight a token gets; below 0 it gets too little. Here ${word()} should attend ${
      V.g(S.i, worst()) < 0 ? "more" : "less"} to ${names([worst()])}.`,
  },
  {
    title: "What the loss asks of the kernel", view: "gradient", label: "the gradient of M", formula: "N = y^T ds y", show: [["N"], ["y"]], pick: () => ["N", ...largest(V.N)],
    say: "The rows of y are the tokens, each with its features. Scores are y M yᵀ, so N, the gradient of M, is put together of ds and features of both tokens. N may have any rank: the loss can ask for what so few columns cannot make.",
  },
  {
    id: ["GROW.2", "GROW.3"], title: "What a change costs", view: "cost", show: [["C"], ["y"]], pick: () => ["C", 0, 0],
    say: "A gradient can be trusted only for small changes of the scores. So we measure a change of M by how much it changes the scores (the root of the mean square): that is its cost. That depends on the tokens: where features are large, the same change does more. C adds up their products. There is one sequence, b = 1, so A is C.",
  },
  {
    id: "GROW.4", title: "A price for each direction", view: "price", show: [["lambda", "rho"]], pick: () => ["rho", WIDE - 1],
    say: () => `A has ${WIDE} directions at right angles, and λ says how far tokens reach along each. Its root ρ is the price of that direction. The damping makes sure that none is free.`,
  },
  {
    id: "GROW.5", title: "The gradient in units of cost", view: "units", show: [["G"], ["N"]], pick: () => ["G", ...largest(V.G)],
    say: "The inverse of W has the directions, the eigenvectors of A, as columns; column r is divided by its price ρ<sub>r</sub>. So G is the same gradient as N, but it is large where a change of M gains much at a low cost.",
  },
  {
    id: "GROW.6", title: "What is out of reach", view: "reach", show: [["H"], ["G"]], pick: () => ["H", ...largest(V.H)],
    say: () => `P<sub>q</sub> and P<sub>k</sub> are what the old columns can follow by themselves. Take that away from G, and what is left, H, only new columns can make. Its squares are ${percent(reach())} of those of G${
      reach() > 0.9 ? ": the head has learned what it could" : ""}.`,
  },
  {
    id: "GROW.7", title: "How many columns", view: "worth", show: [["sigma", "part"], ["c"]], pick: () => ["part", 0],
    say: () => `H is a sum of matrices of rank 1, and one new column on both sides can make one of them. How large each is, σ, is called a singular value; σ² is what the column is worth. Those with a part above ${percent(K.share)} are added: ${V.c() ? columns(V.c()) : "here none"}. H only tells how many. Which ones follows from steps 9 to 11, where old and new columns move together.`,
  },
  {
    id: ["GROW.8", "GROW.9", "GROW.10"], title: "Move the kernel", view: "step", show: [["Fm"], ["D"], ["nu"]], pick: () => ["Fm", ...largest(V.D)],
    say: () => `D is G, turned back into a change of M. M moves against it, by the amplitude: that is how far. ν is its unit. Here scores change by ${show(change())} (the root of the mean square). The result, F, may have any rank.`,
  },
  {
    id: ["GROW.12", "GROW.13"], title: "Cut to the columns there are", view: "cut", show: [["size", "kept"], ["Mn"]], pick: () => ["kept", Math.min(WIDE - 1, K.width + V.c() - 1)],
    say: () => `A head of ${columns(K.width + V.c())} has a kernel of that rank, at most. Z<sub>F</sub> is F in units of cost (GROW.11). Of its singular values the ${K.width + V.c() === 1 ? "largest is" : `${K.width + V.c()} largest are`} kept. Turned back, that is M', the nearest to F that the grown head can make.`,
  },
  {
    id: ["GROW.17", "GROW.18"], title: "Back to two matrices", view: "columns", show: [["wq", "wqn"], ["wk", "wkn"]], pick: () => ["wqn", 0, Math.min(K.width, K.width + V.c() - 1)],
    say: () => `M' is split into two matrices, L and R, equally large (GROW.14, GROW.15). A rotation O, the same for both, brings the old columns near to where they were (GROW.16)${V.c() ? "; the new ones stand behind them" : ""}.`,
  },
];
const backward = [
  {
    id: "GROW.19", of: "GROW.10", title: "How fast the loss falls", view: "step", show: [["slope"], ["all"], ["nu"], ["sigma"], ["G", "rows"]], pick: () => ["slope"],
    say: () => `This is the derivative with respect to the amplitude, at 0. The cut keeps all of G but those parts of H that get no column. ${
      K.amplitude > 0 ? `For an amplitude of ${show(K.amplitude)} it promises ${show(V.slope() * K.amplitude)}, and the loss changes by ${show(V.lossn() - V.loss())}, as weights do not change in proportion.` : "The amplitude is 0, so nothing has moved yet."}`,
  },
  {
    title: "And then training goes on", view: "further", of: "GROW.17", label: "the gradient", formula: "dw_q' = scale N' w_k'", show: [["wqn", "dwqn"], ["Nn"]], pick: () => ["dwqn", ...largestNew()],
    say: () => `With the new kernel there is a new gradient N', and through it each column has one. ${
      K.amplitude > 0 ? `The largest is now ${show(Math.abs(V.dwqn(...largestNew())))}, where before the step it was ${show(oldGradient())}.${Math.abs(V.dwqn(...largestNew())) > oldGradient() ? " So training goes on where it had come to a stop." : ""}` : "At amplitude 0 the new columns are 0 on both sides, and so are their gradients: they would never learn."}`,
  },
  {
    title: "What old columns can learn", view: "old", of: "GROW.1", label: "the gradient", formula: "dw_q = scale N w_k", show: [["wq", "dwq"], ["wk", "dwk"]], pick: () => ["dwq", 0, 0],
    say: () => `Training follows these gradients, and they see N only through the old columns. The largest is ${show(oldGradient())}, while N has entries up to ${show(Math.abs(V.N(...largest(V.N))))}: ${percent(reach())} of what the loss asks for, in units of cost, lies where the old columns do not reach.`,
  },
  {
    id: "dGROW.1", of: "GROW.1", title: "Where N comes from", view: "gradient", show: [["y"], ["gy"], ["g[i]"], ["N"]], pick: () => ["N", ...largest(V.N)],
    say: "Scores are y M yᵀ, so an entry of M reaches a score by a feature of one token and a feature of the other. Its gradient is the sum over all pairs of tokens. The backward of attention computes ds anyway.",
  },
];

// A matrix as coloured cells, blue above 0 and orange below; `ref`: what a cell shows when it is pointed at.
function cells(x, y, side, rows, wide, value, ref, size) {
  let drawn = "";
  range(rows).forEach((m) => range(wide).forEach((n) => {
    const z = value(m, n), part = Math.min(1, Math.abs(z) / size);
    drawn += svg("rect", { x: x + n * side, y: y + m * side, width: side - 1, height: side - 1, rx: 1.5, style: `fill:rgba(var(--${z < 0 ? "minus" : "plus"}),${(0.06 + 0.9 * part).toFixed(2)})`, ...(ref ? { "data-ref": ref(m, n) } : {}) });
  }));
  return drawn;
}

// Matrices in a row with what is between them, as large as there is room, each with its name above it.
function matrices(x, y, W, H, parts) {
  const named = parts.some((part) => part.tokens) ? 62 : 0, high = Math.max(...parts.map((part) => part.rows ?? 0));
  const units = parts.reduce((past, part) => past + (part.wide ?? 1.6), 0), side = Math.min((W - named) / units, (H - 18) / high, 26), middle = y + 18 + Math.max((H - 18) / 2, (high * side) / 2);
  let at = x + named, drawn = "";
  for (const part of parts) {
    if (typeof part === "string") {
      drawn += text(at + 0.8 * side - 0.5, middle + 5, part, { "text-anchor": "middle" });
      at += 1.6 * side;
      continue;
    }
    const { label, rows, wide, value, ref, tokens, from } = part, top = middle - (rows * side) / 2;
    const size = part.size ?? (Math.max(...range(rows).flatMap((m) => range(wide).map((n) => Math.abs(value(m, n))))) || 1);
    drawn += text(at + (wide * side) / 2, middle - (high * side) / 2 - 7, label, { "text-anchor": "middle", class: "name" }) + cells(at, top, side, rows, wide, value, ref, size);
    if (from < wide) drawn += svg("rect", { x: at + from * side - 2, y: top - 2, width: (wide - from) * side + 3, height: rows * side + 3, rx: 3, style: "fill:none;stroke:var(--accent);stroke-width:2" });
    if (tokens && at === x + named) J.forEach((j) => { drawn += rowName(x + named, top, side, j); });
    if (tokens) drawn += svg("rect", { x: at - 1.5, y: top + S.i * side - 1.5, width: wide * side + 2, height: side + 2, rx: 3, class: "hair" });
    at += wide * side;
  }
  return drawn;
}

// The name of a token left of its row; a click follows it.
const rowName = (x, y, side, j) => follows(j, DATA.tokens[j], svg("rect", { x: x - 66, y: y + j * side, width: 62, height: side, rx: 5, class: "ground" }) + svg("circle", { cx: x - 10, cy: y + (j + 0.5) * side, r: 3.5, style: `fill:${color(j)}` }) + text(x - 18, y + (j + 0.5) * side + 4, DATA.tokens[j], { "text-anchor": "end" }), { class: j === S.i ? "word followed" : "word" });

// A bar for each number of a list, with what is told of it; those that do not count are pale.
function bars(x, y, W, H, list, { told = show, counts = () => true, ref, line, under }) {
  const high = Math.max(...list, line ?? 0, 1e-9) * 1.08, foot = y + H - 16, up = scale(0, high, foot, y + 12), wide = W / list.length;
  let drawn = svg("path", { d: `M${x} ${foot}h${W}`, class: "axis" });
  list.forEach((z, r) => {
    drawn += svg("rect", { x: x + (r + 0.16) * wide, y: Math.min(up(z), foot - 1.5), width: 0.68 * wide, height: Math.max(1.5, foot - up(z)), rx: 2, "data-ref": `${ref}.${r}`, style: `fill:${counts(r) ? "var(--accent)" : "var(--soft)"};opacity:${counts(r) ? 1 : 0.5}` });
    drawn += text(x + (r + 0.5) * wide, Math.min(up(z), up(line ?? 0)) - 4, told(z), { "text-anchor": "middle", class: "tick" });
  });
  return drawn + (line === undefined ? "" : svg("path", { d: `M${x - 4} ${up(line)}h${W + 8}`, class: "cut" })) + text(x + W / 2, y + H - 2, under, { "text-anchor": "middle", class: "tick" });
}

// Weights of all tokens as a map: rows attend to columns.
function weightMap(x, y, side, value, ref, named, small) {
  let drawn = cells(x, y, side, J.length, J.length, value, ref && ((i, j) => `${ref}.${i}.${j}`), 1);
  J.forEach((j) => {
    drawn += svg("circle", { cx: x + (j + 0.5) * side, cy: y - 5, r: Math.min(3.5, side / 4), style: `fill:${color(j)}` });
    if (named) drawn += rowName(x, y, side, j);
  });
  return small ? drawn : drawn + svg("rect", { x: x - 1.5, y: y + S.i * side - 1.5, width: J.length * side + 2, height: side + 2, rx: 3, class: "hair" });
}

// The loss over the amplitude: with the new columns, without any, and where the step and the search are.
function losses(x, y, W, H, small) {
  const best = V.best(), far = Math.min(3, Math.max(K.amplitude, 3 * best)) || 3, most = Math.max(1.25 * V.loss(), Math.min(1.1 * V.lossn(), 2.5 * V.loss())) + 1e-9, X = scale(0, far, x, x + W), Y = scale(0, most, y + H, y), at = range(31).map((n) => (far * n) / 30);
  const line = (of, set) => {
    const points = at.map((a) => [a, of(a)]), end = points.findIndex(([, z]) => z > most), shown = end < 0 ? points : points.slice(0, end);
    return shown.length > 1 ? svg("path", { d: `M${shown.map(([a, z]) => `${X(a).toFixed(1)} ${Y(z).toFixed(1)}`).join("L")}`, ...set }) : "";
  };
  const back = S.side === "backward", until = Math.min(far, -V.loss() / V.slope());
  let drawn = svg("rect", { x, y, width: W, height: H, rx: 4, class: "plane" }) + svg("path", { d: `M${x} ${Y(V.loss())}h${W}`, class: "axis" });
  drawn += line((a) => lossAt(a, 0), { class: "line", style: "stroke:var(--soft)", "stroke-dasharray": "2 4" }) + line((a) => lossAt(a), { class: "line", style: "stroke:var(--accent)" });
  if (back) drawn += svg("path", { d: `M${X(0)} ${Y(V.loss())}L${X(until)} ${Y(V.loss() + until * V.slope())}`, class: "push" });
  if (best > 0 && best <= far) drawn += svg("path", { d: `M${X(best)} ${y + H - 1}l-5 9h10z`, style: "fill:var(--ink)" });
  const here = { style: "fill:var(--accent)", class: "dot", "data-ref": "lossn" }; // above the picture if the loss is
  drawn += V.lossn() > most ? svg("path", { d: `M${X(K.amplitude) - 6} ${y + 12}h12l-6 -11z`, ...here }) + text(X(K.amplitude) + (K.amplitude > 0.5 * far ? -9 : 9), y + 12, show(V.lossn()), { class: "tick", "text-anchor": K.amplitude > 0.5 * far ? "end" : "start" }) : svg("circle", { cx: X(K.amplitude), cy: Y(V.lossn()), r: small ? 4 : 5.5, ...here });
  if (small) return drawn;
  const left = best > 0.5 * far, named = best > 0 && best <= far ? text(X(best) + (left ? -8 : 8), y + H + 12, "best", { class: "tick", "text-anchor": left ? "end" : "start" }) : "";
  return (
    drawn + named + text(x + 4, Y(V.loss()) - 4, show(V.loss()), { class: "tick", "data-ref": "loss" }) + (best > 0 && best < 0.15 * far ? "" : text(x, y + H + 14, "0", { class: "tick" })) +
    text(x + W, y + H + 14, `amplitude ${show(far)}`, { class: "tick", "text-anchor": "end" }) +
    text(x + W - 4, y + H - 6, "dotted: no new columns", { class: "tick", "text-anchor": "end" })
  );
}

// What the card that is read is about, above the weights; on a phone it stands alone.
const below = (letter, sign, raised = "") => `${letter}<tspan dy="3" font-size="10">${sign}</tspan>${raised && `<tspan dy="-3">${raised}</tspan>`}`;
const square = (label, name, size) => ({ label, rows: WIDE, wide: WIDE, value: V[name], ref: (m, n) => `${name}.${m}.${n}`, size });
const tall = (label, name, wide, more) => ({ label, rows: WIDE, wide, value: V[name], ref: (m, n) => `${name}.${m}.${n}`, ...more });
const pairs = (label, name, size) => ({ label, rows: J.length, wide: J.length, value: V[name], ref: (m, n) => `${name}.${m}.${n}`, size, tokens: true });
const turned = (part, label) => ({ ...part, label, rows: part.wide, wide: part.rows, value: (m, n) => part.value(n, m), ref: (m, n) => part.ref(n, m) });
const tokens = () => ({ label: "y", rows: J.length, wide: WIDE, value: V.y, ref: (m, n) => `y.${m}.${n}` });
const worth = (x, y, W, H) => bars(x, y, W, H, features().map((r) => V.part(r)), { told: percent, counts: (r) => r < V.c(), ref: "part", line: K.share, under: "dashed: the least part" });
const views = {
  kernel: ["scale times the columns make the kernel", () => [tall(below("w", "q"), "wq", K.width), "×", turned(tall("", "wk", K.width), below("w", "k", "ᵀ")), "=", square("M", "M")]],
  error: ["where weights are too large and too small", () => [pairs("weights", "w", 1), "−", pairs("wanted", "wanted", 1), "=", pairs("ds", "g", 1)]],
  gradient: ["what the loss asks of the kernel", () => [turned(tokens(), "yᵀ"), "×", { ...pairs("ds", "g"), tokens: false }, "×", tokens(), "=", square("N", "N")]],
  cost: ["how tokens spread", () => [turned(tokens(), "yᵀ"), "×", tokens(), "=", square("C", "C")]],
  price: ["the price ρ of each direction", (x, y, W, H) => bars(x, y, Math.min(W, 260), H, features().map((r) => V.rho(r)), { ref: "rho", under: "direction" })],
  units: ["the gradient in units of cost", () => [turned(square("", "back"), "W⁻ᵀ"), "×", square("N", "N"), "×", square("W⁻¹", "back"), "=", square("G", "G")]],
  reach: ["what old columns can follow, and what is left", () => {
    const size = Math.max(...matrix(V.G).flat().map(Math.abs)), follow = (m, n) => V.G(m, n) - V.H(m, n);
    return [square("G", "G", size), "=", { label: "old ones can", rows: WIDE, wide: WIDE, value: follow, size }, "+", square("H", "H", size)];
  }],
  worth: ["what each new column is worth", (x, y, W, H) => worth(x, y, Math.min(W, 260), H)],
  step: ["the loss by how far the kernel moves", (x, y, W, H) => losses(x, y + 4, Math.min(W, 340), H - 20)],
  cut: ["singular values of Z_F, and those that are kept", (x, y, W, H) => bars(x, y, Math.min(W, 260), H, features().map((r) => V.size(r)), { counts: (r) => r < K.width + V.c(), ref: "size", under: `blue: kept, for ${columns(K.width + V.c())}` })],
  columns: ["columns, grown: new ones in a frame", () => [tall(below("w", "q"), "wq", K.width), "→", tall(below("w", "q", "′"), "wqn", K.width + V.c(), { from: K.width }), "", tall(below("w", "k"), "wk", K.width), "→", tall(below("w", "k", "′"), "wkn", K.width + V.c(), { from: K.width })]],
  further: ["the gradient of each column after the step", () => [square("scale N′", "Nn"), "×", tall(below("w", "k", "′"), "wkn", K.width + V.c(), { from: K.width }), "=", tall(`d${below("w", "q", "′")}`, "dwqn", K.width + V.c(), { from: K.width })]],
  old: ["the gradient of the old columns", () => [square("scale N", "N"), "×", tall(below("w", "k"), "wk", K.width), "=", tall(`d${below("w", "q")}`, "dwq", K.width, { size: Math.max(...matrix(V.N).flat().map(Math.abs)) })]],
};

function view(W, H) {
  const [title, draw] = views[S.view];
  return text(0, 12, title, { class: "title" }) + (draw.length ? draw(4, 18, W - 8, H - 18) : matrices(2, 18, W - 4, H - 24, draw()));
}

function weights(x, y, W, H) {
  const heads = [["wanted", "wanted"], [`with ${columns(K.width)}`, "w"], [`with ${columns(K.width + V.c())}`, "wn"]];
  const side = Math.min((W - 66 - 28) / (3 * J.length), (H - 26) / J.length), wide = J.length * side;
  return heads.map(([title, name], n) => {
    const left = x + 66 + n * (wide + (W - 66 - 3 * wide) / 2);
    return text(left, y + 11, title, { class: "title" }) + weightMap(left, y + 26, side, V[name], name, n === 0);
  }).join("");
}

// Below: the weights of all tokens. Above: what the card is about, or at first the growth in three pictures.
function picture(W, H, small) {
  if (small) {
    const side = Math.min((H - 24) / J.length, (W - 40) / (2 * J.length)), y = (H - J.length * side) / 2 + 4, x = (W - 2 * J.length * side - 30) / 2;
    return weightMap(x, y, side, V.w, "", false, true) + svg("path", { d: `M${x + J.length * side + 6} ${y + (J.length * side) / 2}h16m-5 -5l5 5l-5 5`, class: "hair", "stroke-width": 2 }) + weightMap(x + J.length * side + 30, y, side, V.wn, "", false, true);
  }
  if (W < 420) return S.view ? view(W, H) : weights(0, 0, W, H);
  const high = 0.42 * H, third = W / 3 - 16, title = (n, words) => text((n * W) / 3, 12, words, { class: "title" });
  const above = S.view ? view(W, high) : (
    title(0, "worth of new columns") + worth(4, 16, third - 8, high - 16) + title(1, "loss by amplitude") + losses(W / 3, 24, third, high - 40) + title(2, "columns, grown") +
    matrices((2 * W) / 3, 16, third, high - 24, views.columns[1]())
  );
  return above + weights(0, high + 14, W, H - high - 14);
}

function caption() {
  const best = V.best(), found = best > 0 ? `The amplitude is how far the step goes; of those that a search tried, ${show(best)} is best.` : "A search over the amplitude, how far the step goes, finds none that helps.";
  if (S.side === "backward") return `At amplitude 0 the loss changes by ${show(V.slope())} for each 1 of amplitude (the straight line). ${best > 0 ? `Of the amplitudes that a search tried, ${show(best)} is best.` : "A search finds no amplitude that helps."}`;
  if (K.amplitude === 0) return `With ${columns(K.width)} the loss is ${show(V.loss())}. At amplitude 0 nothing has moved. ${found}`;
  const rises = V.lossn() > V.loss();
  return `With ${columns(K.width)} the loss is ${show(V.loss())}. With ${columns(V.c())} more ${rises ? `it <span class="warn">rises</span> to` : "it falls to"} ${show(V.lossn())}. ${found}`;
}

tour({
  title: "Growing attention",
  living: "amplitude",
  short: "A head that is too narrow for what the loss asks gets new columns, where they help most.",
  intro: () => [
    `A <b>head</b> compares tokens by two narrow matrices. Each <b>column</b> is one way to compare, so few columns make few patterns of weights. Here each token should attend to the next, the last to the first. Training with ${columns(K.width)} has come no further than the picture shows.`,
    `This is no layer; it is done a few times during training. The gradient asks for a change of all scores. The part that old columns cannot follow is split into single columns, which tells how many are worth while; then old and new ones move together. Added here: ${V.c() || "none"}${
      V.lossn() > V.loss() ? `; but at amplitude ${show(K.amplitude)} the loss rises` : ""}. Then training goes on.`,
  ],
  turn: "Growth is no layer: nothing goes back through it. But gradients surround it (a d in front of a letter: how the loss changes with it): how fast the loss falls when the step begins, what training can do after it and could do before it, and N, with which all begins.",
  sizes: { a: () => WIDE, b: () => WIDE, c: () => K.width, u: () => K.width + V.c(), v: () => K.width + V.c(), r: () => WIDE, z: () => WIDE },
  quantities, forward, backward, picture, caption,
  height: (W) => (W < 420 ? 130 : Math.min(400, Math.round(W * 0.7))),
  tallest: () => 130,
  label: () => `What new columns are worth: ${features().map((r) => percent(V.part(r))).join(", ")}; ${V.c()} are added. The loss is ${show(V.loss())} before and ${show(V.lossn())} after.`,
});
