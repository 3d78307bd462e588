// The tour of Koopman attention: formulas, cards, picture.
//
// t counts updates, l and r the moves that are known then (as many as t), j keys, o the function that each of them has.
// x(t) is where the query stands before update t, x'(t) = x(t + 1) where it goes. Queries do not meet, so there is one.

const { q, k, v, target, G, Ginv, x, s, w, a, g, ga, B, Y, N, Z, AG, A, T, op, one, two, both, t, next } = F;
const { dnext, dt, dboth, done, dop, dT, dA, dY, dYG, dZ, dN, sol, dB, dgx, dga, dgn, da, dw, mean, ds, dx, dG, ZdY } = F;
const { sx, sa, kf, ka, ks, kg } = F;
const updates = () => range(K.updates), fits = () => range(K.updates).slice(1), d = D.length, epsilon = knob("epsilon"), ridge = knob("ridge");

// How like points x and y are; how that changes with coordinate e of x.
const near = (x, y) => exp(div(neg(sum(D.map((e) => pow(sub(x(e), y(e)), 2)))), 2 * d));
const kernel = (x, y) => add(...D.map((e) => mul(x(e), y(e))), near(x, y));
const slope = (x, y, e) => sub(y(e), mul(div(sub(x(e), y(e)), d), near(x, y)));
const at = (quantity, ...index) => (e) => quantity(...index, e);

// The A with Z A G + ridge A = right(m, j), as one linear system of all its entries.
function sylvester(u, right) {
  const all = range(u).flatMap((m) => J.map((j) => [m, j]));
  const rows = all.map(([m, j]) => all.map(([r, n]) => V.Z(u, m, r) * V.G(n, j) + (m === r && j === n ? K.ridge : 0)));
  const found = solve(rows, all.map(([m, j]) => right(m, j)));
  return range(u).map((m) => J.map((j) => found[m * J.length + j]));
}

// exp(-|p - k_j|^2 / (2 d)) as a number.
const nearness = (p, j) => Math.exp(-D.reduce((past, e) => past + (p[e] - V.k(j, e)) ** 2, 0) / (2 * d));

// (K id)(p), where the map that is fitted in update u takes a point p.
function mapped(u, p) {
  const like = J.map((j) => D.reduce((past, e) => past + p[e] * V.k(j, e), 0) + nearness(p, j));
  return D.map((e) => J.reduce((past, j) => past + like[j] * V.one(u, j, e), 0));
}

// J_ef, how coordinate e of psi changes with coordinate f, at the point p.
function jacobian(u, p) {
  const slopes = J.map((j) => D.map((f) => V.k(j, f) - ((p[f] - V.k(j, f)) * nearness(p, j)) / d));
  return D.map((e) => D.map((f) => (e === f ? 1 : 0) + K.epsilon * J.reduce((past, j) => past + V.one(u, j, e) * slopes[j][f], 0)));
}

// The x with psi(x) = t, by Newton's method.
function follow(u) {
  if (u === 0) return D.map((e) => V.a(0, e));
  const start = D.map((e) => V.a(u, e));
  let p = mapped(u, start);
  for (let tried = 0; tried < 20; tried += 1) {
    const there = mapped(u, p), step = solve(jacobian(u, p), D.map((e) => V.t(u, e) - p[e] - K.epsilon * there[e]));
    p = p.map((y, e) => y + step[e]);
  }
  return p;
}

// What scores and likenesses ask of a point of the path.
const moved = (u, e) => add(div(sum(J.map((j) => mul(ds(u, j), k(j, e)))), sqrt(d)), ...J.map((j) => mul(dgx(u, j), sx(u, j, e))));

const still = words("as there is no move yet", 0);
const quantities = {
  q: { axes: "jd", what: "query" },
  k: { axes: "jd", what: "key" },
  v: { axes: "jd", what: "value" },
  target: { axes: "d", symbol: "goal", what: "wanted end of the path" },
  x: { axes: "td", what: "point of the path", of: (u, e) => (u === 0 ? q(S.i, e) : next(u - 1, e)) },
  s: { id: "KOOP.2", axes: "tj", symbol: "score", what: "how well a key matches the point", of: (u, j) => div(dot(D.map((e) => x(u, e)), D.map((e) => k(j, e))), sqrt(d)) },
  w: { id: "KOOP.3", axes: "tj", symbol: "weight", what: "share of a value", of: (u, j) => div(exp(s(u, j)), sum(J.map((n) => exp(s(u, n))))) },
  a: { id: "KOOP.4", axes: "td", symbol: "attended", what: "where attention leads", of: (u, e) => sum(J.map((j) => mul(w(u, j), v(j, e)))) },

  G: { id: "KOOP.1", axes: "jo", symbol: "gram", what: "how like two keys are to each other", of: (j, n) => (j === n ? add(kernel(at(k, j), at(k, n)), 2e-8) : kernel(at(k, j), at(k, n))) },
  Ginv: { axes: "jo", symbol: "gram⁻¹", what: "inverse of gram", values: () => J.map((j) => solve(J.map((n) => J.map((l) => V.G(n, l))), J.map((n) => (n === j ? 1 : 0)))) },
  g: { axes: "to", symbol: (u) => `g(${nth(u)})`, what: "how like a point of the path is to a key", of: (u, j) => kernel(at(x, u), at(k, j)) },
  ga: { axes: "to", symbol: "g(attended)", what: "how like the attended point is to a key", of: (u, j) => kernel(at(a, u), at(k, j)) },
  B: { id: "KOOP.5", passes: 1, axes: "tlo", symbol: "start", what: "how like the start of a move is to a key", of: (u, m, j) => kernel(at(x, m), at(k, j)) },
  Y: { id: "KOOP.6", passes: 1, axes: "tlo", symbol: "end", what: "how like the end of a move is to a key", of: (u, m, j) => kernel(at(x, m + 1), at(k, j)) },
  N: { id: "KOOP.7", passes: 1, axes: "tlo", symbol: "mixtures", what: "share of a key in the mixture that the start of a move is read as", of: (u, m, j) => sum(J.map((n) => mul(B(u, m, n), Ginv(n, j)))) },
  Z: { id: "KOOP.8", passes: 1, axes: "tlr", symbol: "overlap", what: "how like the starts of two moves are to each other", of: (u, m, r) => sum(J.map((j) => mul(N(u, m, j), B(u, r, j)))) },
  AG: { axes: "tlo", symbol: "fit gram", what: "list that a move leads to", of: (u, m, j) => sum(J.map((n) => mul(A(u, m, n), G(n, j)))) },
  P: { axes: "tlo", symbol: "overlap fit gram", what: "list that the fit makes of the start of a move", of: (u, m, j) => sum(range(u).map((r) => mul(Z(u, m, r), AG(u, r, j)))) },
  A: {
    id: "KOOP.9", passes: 1, axes: "tlj", symbol: "fit", what: "share of a key in what a move contributes, for each of overlap",
    values: () => lazily((u) => sylvester(u, (m, j) => V.Y(u, m, j))),
  },
  rest: {
    axes: "tlo", symbol: "rest", what: "by how much the matrix misses the end of a move: the ridge times fit",
    values: () => updates().map((u) => range(u).map((m) => J.map((o) => V.Y(u, m, o) - V.P(u, m, o)))),
    of: (u, m, o) => mul(ridge, A(u, m, o)),
  },
  T: { id: "KOOP.10", passes: 1, axes: "tjo", symbol: "transfer", what: "share of the key of the column in the mixture, for each of the likeness to the key of the row", of: (u, j, n) => sum(range(u).map((m) => mul(N(u, m, j), A(u, m, n)))) },
  op: { id: "KOOP.11", passes: 1, axes: "tjo", symbol: "koopman", what: "how much the list after a move has at the column, for each of the list before it at the row", of: (u, j, n) => sum(J.map((o) => mul(T(u, j, o), G(o, n)))) },
  began: { axes: "to", symbol: (u) => `g(${before(u)})`, what: "how like the start of the last move is to a key", of: (u, o) => (u === 0 ? still : g(u - 1, o)) },
  answer: {
    axes: "to", symbol: (u) => `g(${before(u)}) koopman`, what: "list that the matrix makes of it",
    values: () => updates().map((u) => J.map((o) => (u === 0 ? 0 : V.P(u, u - 1, o)))),
    of: (u, n) => (u === 0 ? still : sum(J.map((o) => mul(F.began(u, o), op(u, o, n))))),
  },
  ended: { axes: "to", symbol: (u) => `g(${u ? nth(u) : "x"})`, what: "how like the end of the last move is to a key", of: (u, o) => (u === 0 ? still : g(u, o)) },
  one: { id: "KOOP.12", passes: 1, axes: "tjd", symbol: "one_move", what: "what likeness to a key adds to the point after a move", of: (u, j, e) => sum(J.map((n) => mul(T(u, j, n), k(n, e)))) },
  two: { axes: "tjd", symbol: "two_moves", what: "what likeness to a key adds to the point after two moves", of: (u, j, e) => sum(J.map((n) => mul(op(u, j, n), one(u, n, e)))) },
  both: { id: "KOOP.13", passes: 1, axes: "tjd", symbol: "both_moves", what: "one move, and epsilon times two", of: (u, j, e) => add(one(u, j, e), mul(epsilon, two(u, j, e))) },
  t: { id: "KOOP.14", passes: 1, axes: "td", symbol: "target", what: "one move from the attended point, and epsilon times two", of: (u, e) => sum(J.map((j) => mul(ga(u, j), both(u, j, e)))) },
  map: { axes: "td", symbol: "moved", what: "the point one move from the attended one", of: (u, e) => sum(J.map((j) => mul(ga(u, j), one(u, j, e)))) },
  next: {
    id: "KOOP.15", passes: 1, axes: "td", symbol: "following", what: "next point of the path",
    values: () => lazily((u) => follow(u)),
    of: (u, e) => (u === 0 ? a(0, e) : sub(t(u, e), mul(epsilon, sum(J.map((j) => mul(g(u + 1, j), one(u, j, e))))))),
  },

  sx: { axes: "tod", symbol: "g'", what: "how g changes with a point of the path", of: (u, j, e) => slope(at(x, u), at(k, j), e) },
  sa: { axes: "tod", symbol: "g'", what: "how g changes with the attended point", of: (u, j, e) => slope(at(a, u), at(k, j), e) },
  dnext: {
    id: "dKOOP.15", back: true, axes: "td", symbol: "d_following", what: "gradient of the next point",
    of: (u, e) => (u === K.updates - 1 ? sub(next(u, e), target(e)) : dx(u + 1, e)),
  },
  dx: {
    axes: "td", what: "gradient of a point of the path",
    of: (u, e) => moved(u, e),
  },
  Jac: { axes: "tde", symbol: "J", what: "slope of psi", values: () => lazily((u) => jacobian(u, D.map((e) => V.next(u, e)))) },
  dt: {
    id: "dKOOP.14", since: 1, back: true, axes: "td", symbol: "d_target", what: "gradient of target",
    values: () => lazily((u) => solve(D.map((e) => D.map((f) => V.Jac(u, f, e))), D.map((e) => V.dnext(u, e)))),
    of: d === 2 ? (u, e) => div(
      sub(mul(F.Jac(u, 1 - e, 1 - e), dnext(u, e)), mul(F.Jac(u, 1 - e, e), dnext(u, 1 - e))),
      sub(mul(F.Jac(u, 0, 0), F.Jac(u, 1, 1)), mul(F.Jac(u, 0, 1), F.Jac(u, 1, 0)))) : undefined,
  },
  dboth: { id: "dKOOP.13", since: 1, back: true, axes: "tjd", symbol: "d_both_moves", what: "gradient of both_moves", of: (u, j, e) => mul(ga(u, j), dt(u, e)) },
  done: {
    id: "dKOOP.12", since: 1, back: true, axes: "tjd", symbol: "d_one_move", what: "gradient of one_move",
    of: (u, j, e) => add(dboth(u, j, e), mul(epsilon, sub(sum(J.map((n) => mul(op(u, n, j), dboth(u, n, e)))), mul(g(u + 1, j), dt(u, e))))),
  },
  dop: { id: "dKOOP.11", since: 1, back: true, axes: "tjo", symbol: "d_koopman", what: "gradient of koopman", of: (u, j, n) => mul(epsilon, sum(D.map((e) => mul(dboth(u, j, e), one(u, n, e))))) },
  dT: {
    id: "dKOOP.10", since: 1, back: true, axes: "tjo", symbol: "d_transfer", what: "gradient of transfer",
    of: (u, j, n) => add(sum(D.map((e) => mul(done(u, j, e), k(n, e)))), sum(J.map((o) => mul(dop(u, j, o), G(o, n))))),
  },
  dA: {
    id: "dKOOP.9", since: 1, back: true, axes: "tlj", symbol: "d_fit", what: "gradient of fit",
    of: (u, m, j) => sum(J.map((n) => mul(N(u, m, n), dT(u, n, j)))),
  },
  dYG: { axes: "tlj", symbol: "d_end gram", what: "a product", of: (u, m, j) => sum(J.map((n) => mul(dY(u, m, n), G(n, j)))) },
  drest: {
    axes: "tlo", symbol: "rest", what: "what d_fit has beyond overlap d_end gram: the ridge times d_end",
    values: () => updates().map((u) => range(u).map((m) => J.map((o) => V.dA(u, m, o) - range(u).reduce((past, r) => past + V.Z(u, m, r) * V.dYG(u, r, o), 0)))),
    of: (u, m, o) => mul(ridge, dY(u, m, o)),
  },
  dY: {
    id: "dKOOP.6", since: 1, back: true, axes: "tlo", symbol: "d_end", what: "gradient of end",
    values: () => lazily((u) => sylvester(u, (m, j) => V.dA(u, m, j))),
  },
  dZ: { id: "dKOOP.8", since: 1, back: true, axes: "tlr", symbol: "d_overlap", what: "gradient of overlap", of: (u, m, r) => neg(sum(J.map((j) => mul(dYG(u, m, j), A(u, r, j))))) },
  dgn: { axes: "to", symbol: "dg", what: "gradient of g at the next point", of: (u, j) => neg(mul(epsilon, sum(D.map((e) => mul(dt(u, e), one(u, j, e)))))) },
  dN: {
    id: "dKOOP.7", since: 1, back: true, axes: "tlo", symbol: "d_mixtures", what: "gradient of mixtures",
    of: (u, m, j) => add(sum(J.map((n) => mul(A(u, m, n), dT(u, j, n)))), sum(range(u).map((r) => mul(dZ(u, m, r), B(u, r, j))))),
  },
  sol: { axes: "tlo", symbol: "d_mixtures gram⁻¹", what: "gradient of start through mixtures", of: (u, m, j) => sum(J.map((n) => mul(dN(u, m, n), Ginv(n, j)))) },
  dB: {
    id: "dKOOP.5", since: 1, back: true, axes: "tlo", symbol: "d_start", what: "gradient of start",
    of: (u, m, j) => add(sol(u, m, j), sum(range(u).map((r) => mul(dZ(u, r, m), N(u, r, j))))),
  },
  dgx: {
    axes: "to", symbol: "dg", what: "gradient of g at a point of the path, as start and as end of moves",
    of: (u, j) => sum(fits().flatMap((f) => [...(u < f ? [dB(f, u, j)] : []), ...(u > 0 && u <= f ? [dY(f, u - 1, j)] : [])])),
  },
  dga: { axes: "to", symbol: "dg", what: "gradient of g at the attended point", of: (u, j) => sum(D.map((e) => mul(dt(u, e), both(u, j, e)))) },
  da: {
    id: "dKOOP.4", back: true, axes: "td", symbol: "d_attended", what: "gradient of where attention leads",
    of: (u, e) => (u === 0 ? dnext(0, e) : sum(J.map((j) => mul(dga(u, j), sa(u, j, e))))),
  },
  dw: { id: "dKOOP.3", back: true, axes: "tj", symbol: "d_weight", what: "gradient of a weight", of: (u, j) => sum(D.map((e) => mul(da(u, e), v(j, e)))) },
  mean: { axes: "t", symbol: "p", what: "mean of the gradients of the weights", of: (u) => sum(J.map((j) => mul(w(u, j), dw(u, j)))) },
  ds: { id: "dKOOP.2", back: true, axes: "tj", symbol: "d_score", what: "gradient of a score", of: (u, j) => mul(w(u, j), sub(dw(u, j), mean(u))) },
  dq: { id: "dKOOP.q", axes: "d", symbol: "d_q", what: "gradient of the query", of: (e) => moved(0, e) },
  dv: { id: "dKOOP.v", axes: "jd", symbol: "d_v", what: "gradient of a value", of: (j, e) => sum(updates().map((u) => mul(w(u, j), da(u, e)))) },
  ZdY: { axes: "tlo", symbol: "overlap d_end", what: "a product", of: (u, m, j) => sum(range(u).map((r) => mul(Z(u, m, r), dY(u, r, j)))) },
  parts: {
    axes: "jo", symbol: "parts", what: "gradient of gram as if it were not symmetric",
    of: (j, n) => sum(fits().flatMap((u) => [...J.map((o) => mul(T(u, o, j), dop(u, o, n))), ...range(u).map((m) => neg(add(mul(A(u, m, j), ZdY(u, m, n)), mul(N(u, m, j), sol(u, m, n)))))])),
  },
  dG: { id: "dKOOP.1", axes: "jo", symbol: "d_gram", what: "gradient of gram", of: (j, n) => div(add(F.parts(j, n), F.parts(n, j)), 2) },
  ks: { axes: "jd", what: "gradient of a key by scores", of: (j, e) => div(sum(updates().map((u) => mul(ds(u, j), x(u, e)))), sqrt(d)) },
  ka: { axes: "jd", what: "gradient of a key by one_move", of: (j, e) => sum(fits().flatMap((u) => J.map((n) => mul(T(u, n, j), done(u, n, e))))) },
  kf: {
    axes: "jd", what: "gradient of a key by its function at points",
    of: (j, e) => sum([
      ...updates().map((u) => mul(dgx(u, j), slope(at(k, j), at(x, u), e))),
      ...fits().map((u) => mul(dga(u, j), slope(at(k, j), at(a, u), e))),
      ...fits().map((u) => mul(dgn(u, j), slope(at(k, j), at(x, u + 1), e))),
    ]),
  },
  kg: { axes: "jd", what: "gradient of a key by gram", of: (j, e) => sum(J.map((n) => mul(2, dG(j, n), slope(at(k, j), at(k, n), e)))) },
  dk: { id: "dKOOP.k", axes: "jd", symbol: "d_k", what: "gradient of a key", of: (j, e) => add(ks(j, e), ka(j, e), kf(j, e), kg(j, e)) },
  dridge: { id: "dKOOP.ridge", symbol: "d_ridge", what: "gradient of the ridge", of: () => neg(sum(fits().flatMap((u) => range(u).flatMap((m) => J.map((j) => mul(dY(u, m, j), A(u, m, j))))))) },
  depsilon: {
    id: "dKOOP.epsilon", symbol: "d_epsilon", what: "gradient of epsilon",
    of: () => sum(fits().flatMap((u) => D.map((e) => mul(dt(u, e), sub(sum(J.map((j) => mul(ga(u, j), two(u, j, e)))), sum(J.map((j) => mul(g(u + 1, j), one(u, j, e))))))))),
  },
};


// Updates count from 1, as the caption does; points of the path from 0.
for (const [name, quantity] of Object.entries(quantities)) if (quantity.axes?.startsWith("t") && !["x", "dx", "g", "dgx", "sx"].includes(name)) quantity.from = 1;

// The update that is shown: of the step that is chosen, the last one at the end.
const shown = () => Math.min(S.t, K.updates - 1);
const fitted = () => Math.max(1, shown());
const { word } = attention();
const most = (list) => list.reduce((best, y, n) => (y > list[best] ? n : best), 0);
const best = (u) => most(J.map((j) => V.w(u, j)));
const place = (quantity, u) => D.map((e) => quantity(u, e));
const apart = (one, other) => Math.hypot(...one.map((y, e) => y - other[e]));
const count = (n, thing) => `${n} ${thing}${n === 1 ? "" : "s"}`;
const gradient = (n) => D.map((e) => (n < K.updates ? V.dx(n, e) : V.dnext(n - 1, e)));
// How far the map that update u fits misses the end of a move that it is fitted to, at most.
const misses = (u) => Math.max(...range(u).map((m) => apart(mapped(u, place(V.x, m)), place(V.x, m + 1))));

// Whether the rows of one_move, and the ends of the moves that they are made of, lie nearly on one line with 0.
const lined = (u) => [J.map((j) => place((l, e) => V.one(u, l, e), j)), range(u).map((m) => place(V.x, m + 1))].every((points) => { const { values } = svd(points); return (values[1] ?? 0) < 0.1 * values[0]; });

// How far the operator's list for the end of the last move is from what it was, at most.
const gap = () => Math.max(...J.map((o) => Math.abs(V.answer(fitted(), o) - V.ended(fitted(), o))));

// How far two moves from the attended point by the matrix alone end from one move, back to a point, and one more.
const split = (u) => apart(D.map((e) => J.reduce((past, j) => past + V.ga(u, j) * V.two(u, j, e), 0)), mapped(u, place(V.map, u)));

// ---- pictures: the words with a bar each, and beside them a plane, or matrices -----------------------------------------

const before = (u) => (u ? nth(u - 1) : "x"); // where the last move began
const nth = (n) => `x${"₀₁₂₃₄₅₆"[n]}`;

// The map as arrows on a grid, as one path: a quarter of the way, at most as long as places are apart.
function field(u, b, on, like, gap) {
  let drawn = "";
  const within = (from, size) => range(Math.floor(size / gap)).map((n) => from + (size % gap) / 2 + (n + 0.5) * gap), zero = [on.X([0, 0]), on.Y([0, 0])];
  for (const y of within(b.top, b.size)) for (const x of within(b.left, b.wide)) {
    const from = like.map((one, e) => (e === 0 ? (x - zero[0]) / on.unit : e === 1 ? (zero[1] - y) / on.unit : one)), to = mapped(u, from);
    const way = [0.25 * on.unit * (to[0] - from[0]), -0.25 * on.unit * ((to[1] ?? 0) - (from[1] ?? 0))], long = Math.hypot(...way), kept = Math.min(1, (0.8 * gap) / (long || 1));
    if (long < 1) continue;
    const [a, c] = way.map((z) => z * kept), [f, g] = [a, c].map((z) => (z / Math.hypot(a, c)) * Math.min(4.5, 0.5 * Math.hypot(a, c)));
    drawn += `M${(x - a / 2).toFixed(1)} ${(y - c / 2).toFixed(1)}l${a.toFixed(1)} ${c.toFixed(1)}m${(-f - 0.6 * g).toFixed(1)} ${(-g + 0.6 * f).toFixed(1)}l${(f + 0.6 * g).toFixed(1)} ${(g - 0.6 * f).toFixed(1)}l${(-f + 0.6 * g).toFixed(1)} ${(-g - 0.6 * f).toFixed(1)}`;
  }
  return drawn;
}
const given = { k: DATA.k.map(flat), v: DATA.v.map(flat), q: DATA.q.map(flat), target: flat(DATA.target) }; // a plane stays while points are dragged
const moment = () => S.at ?? S.t;
// The plane: keys as squares, values as points, each as large as its weight in update u, and the path up to x_until; or
// what of them is `near` these points, where nothing is dragged.
function scene(b, u, until, { ties = true, names = !b.narrow, goal = false, near } = {}) {
  const path = range(K.updates + 1).map((p) => flat(place(V.x, p))), on = plane(b.left, b.top, b.size, near ?? [...given.k, ...given.v, given.q[S.i], ...path, ...(goal ? [given.target] : [])], b.wide);
  const keys = J.map((j) => flat(place((l, e) => V.k(l, e), j))), values = J.map((j) => flat(place((l, e) => V.v(l, e), j))), big = b.narrow ? 0.6 : 1, spot = (p) => [on.X(p), on.Y(p)], inside = (p) => !near || spot(p).every((z, e) => z > on.box[e] && z < on.box[e + 2]), held = (told) => (near ? {} : { "aria-label": told });
  const half = J.map((j) => big * (4 + 5 * Math.sqrt(V.w(u, j)))), seen = path.slice(0, until + 1);
  const boxes = [...keys, ...values, ...path].map((p) => [on.X(p) - 4, on.Y(p) - 4, on.X(p) + 4, on.Y(p) + 4]), named = names ? labels(b.left + b.wide, b.top + b.size, 13, [], b.left, b.top, boxes) : () => "";
  const drawn = [
    on.ground,
    J.map((j) => (ties ? line(`tie.${j}`, [spot(keys[j]), spot(values[j])], { class: "flow", style: `stroke:${color(j)}`, "stroke-width": big * (1 + 4 * Math.sqrt(V.w(u, j))) }) : [])),
    J.filter((j) => inside(keys[j])).map((j) => [
      ties ? point(`value.${j}`, ...spot(values[j]), half[j], j, { "aria-label": `drag the value of ${DATA.tokens[j]}` }, (px, py) => put(DATA.v[j], on.back(px, py))) : [],
      mark(`dot.${j}`, "rect", { x: on.X(keys[j]) - half[j], y: on.Y(keys[j]) - half[j], width: 2 * half[j], height: 2 * half[j], style: `fill:${color(j)}`, class: "dot", ...held(`drag the key of ${DATA.tokens[j]}`) }, "", near ? undefined : (px, py) => put(DATA.k[j], on.back(px, py))),
      named(DATA.tokens[j], ...spot(keys[j]), half[j], j === S.i ? "name strong" : "name"),
    ]),
    line("path", seen.length > 1 ? seen.map(spot) : [spot(path[0]), spot(path[0])], { class: "line", style: `stroke:${color(S.i)}` }),
    seen.map((p, n) => (inside(p) ? [
      n === 0 ? mark("x.0", "circle", { cx: on.X(p), cy: on.Y(p), r: 6 * big, class: "sink", style: `stroke:${color(S.i)}`, ...held("drag the query") }, "", near ? undefined : (px, py) => put(DATA.q[S.i], on.back(px, py))) : point(`x.${n}`, ...spot(p), 5 * big, S.i),
      named(nth(n), ...spot(p), 6, "name", [1, 3, 2, 0]),
    ] : [])),
    goal ? [cross("goal", ...spot(flat(DATA.target)), 5 * big), mark("goal hold", "circle", { cx: on.X(DATA.target), cy: on.Y(flat(DATA.target)), r: 12, class: "ground", "aria-label": "drag the goal" }, "", (px, py) => put(DATA.target, on.back(px, py))), named("goal", ...spot(flat(DATA.target)), 7, "name strong", [2, 3, 1, 0])] : [],
  ];
  return { on, keys, values, path, spot, big, named, drawn };
}

// Where attention leads in update u, and where the operator does from there.
function legs(on, u, named) {
  const from = on.spot(flat(place(V.x, u))), attended = on.spot(flat(place(V.a, u))), to = on.spot(flat(place(V.x, u + 1)));
  return [
    line("attend", [from, attended], { class: "cut" }), u > 0 ? vector("move", ...attended, ...to, { class: "vector thick" }) : [],
    mark("attended", "circle", { cx: attended[0], cy: attended[1], r: 6 * on.big, class: "sink" }), named("attended", ...attended, 6, "name strong", [2, 0, 3, 1]),
  ];
}

// The fitted map from everywhere, as arrows, and with crosses where it takes the starts of all moves.
function mapping(b, u, { on, path, big, spot }, hits = true) {
  return [
    mark("field", "path", { d: field(u, b, on, place(V.a, u), b.narrow ? 22 : 34), class: "hair", "stroke-width": 1.1, opacity: 0.62 }),
    hits ? range(u).map((n) => cross(`hit.${n}`, ...spot(flat(mapped(u, place(V.x, n)))), 6 * big)) : [],
  ];
}

// An arrow at each place, which way and how far the loss falls, to scale with each other.
function falls(key, b, { spot }, moves) {
  const unit = (b.narrow ? 26 : 70) / Math.max(1e-12, ...moves.map(([, slope]) => Math.hypot(...flat(slope))));
  return moves.map(([p, slope, tint], n) => { const [px, py] = spot(flat(p)), [right, up] = flat(slope); return vector(`${key}.${n}`, px, py, px - unit * right, py + unit * up, tint === undefined ? {} : { style: `stroke:${color(tint)}` }); });
}

// Matrices below each other: [title, key, rows, names of the rows, reference, whether a column is a word].
function stack(b, all) {
  const names = b.narrow ? 4 : 74, head = b.narrow ? 9 : 40, many = all.reduce((past, [, , matrix]) => past + matrix.length, 0), row = Math.min(64, (b.size - head * all.length) / many);
  let y = b.top;
  return all.map(([title, key, matrix, called, ref, heads], n) => {
    const x = b.left + names, wide = Math.min((b.wide - names) / matrix[0].length, b.narrow ? 1e3 : 110), high = row * matrix.length, top = y + head;
    y = top + high;
    return [
      b.narrow ? "" : text(b.left, top - (heads ? 22 : 9), title, { class: "title" }) + matrix.map((_, m) => text(x - 8, top + (m + 0.5) * row + 4, called(m), { "text-anchor": "end" })).join(""),
      heads ? J.map((j) => point(`${["dot", "head", "heads"][n]}.${j}`, x + (j + 0.5) * wide, top - (b.narrow ? 5 : 8), b.narrow ? 2.5 : 4.5, j)) : [],
      grid(key, x, top, wide * matrix[0].length, high, matrix, ref),
    ];
  });
}

// A list, written as a column, times a matrix is the lists below it.
function product(b, input, ref, matrix, own, outputs) {
  const n = J.length, names = b.narrow ? 2 : 60, head = b.narrow ? 9 : 24, high = (b.size - head) / (n + 0.4 + outputs.length), wide = (b.wide - names) / (n + 1.5), x = b.left + names, from = x + 1.5 * wide, top = b.top + head, size = Math.max(1e-12, ...[input, ...outputs.map(([, list]) => list)].flat().map(Math.abs));
  return [
    b.narrow ? "" : J.map((j) => text(x - 6, top + (j + 0.5) * high + 4, DATA.tokens[j], { "text-anchor": "end" })).join("") + text(x + wide * 1.25, top + (n / 2) * high + 5, "×", { "text-anchor": "middle" }),
    J.map((j) => point(`dot.${j}`, from + (j + 0.5) * wide, top - (b.narrow ? 5 : 8), b.narrow ? 2.5 : 4.5, j)),
    grid("in", x, top, wide, n * high, input.map((z) => [z]), (j) => `${ref}.${j}`, size), grid("cell", from, top, n * wide, n * high, matrix, own),
    outputs.map(([told, list, to], m) => [
      b.narrow ? "" : text(from - 8, top + (n + 0.4 + m + 0.5) * high + 4, told, { "text-anchor": "end" }),
      grid(`out${m}`, from, top + (n + 0.4 + m) * high, n * wide, high, [list], (_, j) => `${to}.${j}`, size),
    ]),
  ];
}
const list = (quantity, ...index) => J.map((j) => quantity(...index, j)), rowsOf = (quantity, u, axis = J) => range(u).map((m) => axis.map((j) => quantity(u, m, j))), square = (quantity, u, axis = J) => J.map((j) => axis.map((n) => quantity(u, j, n)));
// A matrix with a row for each move and a column for each key, for `stack`.
const moves = (u, title, name, key) => [title, key, rowsOf(V[name], u), move, (m, j) => `${name}.${u}.${m}.${j}`, true];
const move = (m) => `move ${m + 1}`, called = (j) => DATA.tokens[j];

// Quantities with a row for each word, side by side, to one scale.
function tables(b, u, all) {
  const left = b.left + (b.narrow ? 4 : 74), width = (b.wide + b.left - left) / all.length, head = b.narrow ? 2 : 26, high = b.size - head, matrices = all.map((name) => square(V[name], u, D)), size = Math.max(1e-12, ...matrices.flat(2).map(Math.abs));
  return [
    b.narrow ? "" : J.map((j) => text(left - 8, b.top + head + ((j + 0.5) * high) / J.length + 4, DATA.tokens[j], { "text-anchor": "end" })).join(""),
    all.map((name, n) => [b.narrow ? "" : text(left + n * width + 4, b.top + 16, quantities[name].symbol, { class: "title" }), grid(n ? name : "cell", left + n * width, b.top + head, width - 12, high, matrices[n], (j, e) => `${name}.${u}.${j}.${e}`, size)]),
  ];
}

const pictures = {
  attend: (b, u = shown()) => { const on = scene(b, u, u); return [on.drawn, legs(on, u, on.named).filter((one) => one?.key !== "move")]; },
  list: (b) => {
    const u = shown(), on = scene(b, u, u, { ties: false }), here = on.spot(on.path[u]), unit = on.on.unit;
    return [on.drawn, [1, 2].filter((n) => n * Math.sqrt(d) * unit < 0.5 * b.size).map((n) => [mark(`near.${n}`, "circle", { cx: here[0], cy: here[1], r: n * Math.sqrt(d) * unit, class: "ghost" }), on.named(`exp = ${Math.exp(-n * n / 2).toFixed(2)}`, ...here, n * Math.sqrt(d) * unit, "name", [1, 0, 2, 3])]), J.map((j) => line(`like.${j}`, [here, on.spot(on.keys[j])], { class: "flow", style: `stroke:${color(j)}`, "stroke-width": Math.max(0.5, 9 * nearness(place(V.x, u), j)) }))];
  },
  mixture: (b, u = fitted()) => product(b, list(V.N, u, 0), `N.${u}.0`, J.map((j) => J.map((n) => V.G(j, n))), (j, n) => `G.${j}.${n}`, [["start", list(V.B, u, 0), `B.${u}.0`]]),
  operator: (b, u = fitted()) => product(b, list(V.began, u), `began.${u}`, square(V.op, u), (j, n) => `op.${u}.${j}.${n}`, [["list out", list(V.answer, u), `answer.${u}`], [nth(u), list(V.ended, u), `ended.${u}`]]),
  back: (b, u = fitted()) => { const on = scene(b, u, u, { ties: false }); return [on.drawn[0], mapping(b, u, on), on.drawn.slice(1)]; },
  onward: (b) => {
    const u = fitted(), sums = J.reduce((past, j) => [...past, past.at(-1).map((z, e) => z + V.ga(u, j) * V.one(u, j, e))], [D.map(() => 0)]).map(flat);
    const on = scene(b, u, u, { ties: false, near: [...sums, ...[V.x, V.a].map((quantity) => flat(place(quantity, u)))] });
    const spots = sums.map(on.spot), way = spots[0].map((z, e) => spots.at(-1)[e] - z), aside = lined(u) ? (b.narrow ? 2.5 : 9) / (Math.hypot(...way) || 1) : 0;
    const chain = J.map((j) => {
      const by = aside * (j - (J.length - 1) / 2), [from, to] = [spots[j], spots[j + 1]].map(([px, py]) => [px - by * way[1], py + by * way[0]]);
      return vector(`chain.${j}`, ...from, ...to, { style: `stroke:${color(j)}` });
    });
    return [on.drawn.filter((one) => one.key !== "path"), legs(on, u, on.named).filter((one) => one?.key !== "move"), chain, vector("moved", ...on.spot(flat(place(V.a, u))), ...on.spot(flat(place(V.map, u))), { class: "vector thick" })];
  },
  ask: (b) => {
    const u = fitted(), [then, twice, ...way] = [mapped(u, place(V.next, u)), D.map((e) => J.reduce((past, j) => past + V.ga(u, j) * V.two(u, j, e), 0)), ...[V.x, V.a].map((quantity) => place(quantity, u)), place(V.x, u + 1)].map(flat), on = scene(b, u, u + 1, { ties: false, near: [then, twice, ...way] });
    return [on.drawn.filter((one) => one.key !== "path"), legs(on, u, on.named), vector("then", ...on.spot(flat(place(V.next, u))), ...on.spot(then)), cross("twice", ...on.spot(twice), 6 * on.big), on.named("by the matrix", ...on.spot(twice), 6, "name strong", [3, 1, 0, 2])];
  },
  wish: (b) => {
    const on = scene(b, K.updates - 1, K.updates, { ties: false, goal: true }), end = on.spot(on.path.at(-1)), goal = on.spot(flat(DATA.target)), far = Math.hypot(end[0] - goal[0], end[1] - goal[1]);
    return [on.drawn, rings(goal, far), vector("down.0", ...end, ...goal, { class: "vector thick" })];
  },
  toTarget: (b, u = fitted()) => { const on = scene(b, u, u + 1, { ties: false }); return [on.drawn, falls("down", b, on, [[place(V.next, u), place(V.dnext, u)], [place(V.t, u), place(V.dt, u), S.i]])]; },
  toStarts: (b, u = fitted()) => { const on = scene(b, u, K.updates, { ties: false, goal: true }); return [on.drawn, falls("push", b, on, range(K.updates + 1).map((p) => [place(V.x, p), gradient(p)]))]; },
  toAttended: (b, u = shown()) => { const on = scene(b, u, u); return [on.drawn, legs(on, u, on.named), falls("down", b, on, [[place(V.a, u), place(V.da, u)]])]; },
  toScores: (b) => {
    const u = shown(), on = scene(b, u, u), way = flat(place(V.da, u)), size = way[0] ** 2 + way[1] ** 2, unit = 1.2 / Math.sqrt(size || 1);
    return [on.drawn, on.values.map((p, j) => { const part = size ? (p[0] * way[0] + p[1] * way[1]) / size : 0; return line(`drop.${j}`, [on.spot(p), on.spot(way.map((z) => part * z))], { class: "hair dashed", style: `stroke:${color(j)}` }); }), vector("down.0", ...on.spot([0, 0]), ...on.spot(way.map((z) => unit * z)), { class: "vector thick" })];
  },
  toQuery: (b) => { const on = scene(b, 0, K.updates, { goal: true }); return [on.drawn, falls("down", b, on, [[place(V.x, 0), D.map((e) => V.dq(e))]])]; },
  toValues: (b) => { const on = scene(b, 0, K.updates, { goal: true }); return [on.drawn, falls("push", b, on, J.flatMap((j) => [[place((l, e) => V.v(l, e), j), place((l, e) => V.dv(l, e), j)], [place((l, e) => V.k(l, e), j), place((l, e) => V.dk(l, e), j)]]))]; },
};

// Of the first card, the turn and the gallery: the path, the way of this update, and from everywhere a quarter of a move.
function picture(W, H, small) {
  const back = S.side === "backward", heading = back ? "minus the gradients: which way the loss falls" : "the path; from anywhere ¼ of a move; crosses should hit ends";
  const bare = { narrow: true, quiet: true, small, left: 0, top: 0, wide: W, size: H }, draw = back ? falling : walking;
  return small ? draw(bare) : { bars: ["w", `weight in update ${shown() + 1}`, [shown()]], heading, draw };
}
function falling(b) {
  const on = scene(b, shown(), K.updates, { goal: !b.small });
  return [on.drawn, falls("push", b, on, range(K.updates + 1).map((p) => [place(V.x, p), gradient(p)]))];
}
function walking(b) {
  const u = shown(), all = moment(), on = scene(b, u, Math.min(Math.floor(all), K.updates), { goal: !b.small });
  const done = all >= K.updates ? 1 : all - Math.floor(all), way = [place(V.x, u), place(V.a, u), ...(u > 0 ? [place(V.x, u + 1)] : [])].map(flat), along = done * (way.length - 1), leg = Math.min(way.length - 2, Math.floor(along));
  const now = way[leg].map((z, e) => z + (along - leg) * (way[leg + 1][e] - z));
  return [on.drawn[0], u > 0 ? mapping(b, u, on, !b.small) : [], on.drawn.slice(1), legs(on, u, on.named), point("now", ...on.spot(now), b.small ? 4 : 7, S.i, { class: "sink", style: `fill:${color(S.i)}` })];
}

// ---- cards -------------------------------------------------------------------------------------------------------------

const last = { when: "last", timed: true }, fit = { ...last, since: 1 };
const forward = [
  { id: ["KOOP.2", "KOOP.3", "KOOP.4"], title: "Attend", when: "first", timed: true, show: [["k", "s", "w", "v"], ["x", "a"]], pick: () => ["w", shown(), best(shown())],
    bars: () => ["w", "weight", [shown()]], heading: "keys (squares), values (points), and where attention leads", draw: pictures.attend,
    caption: () => `${S.t < K.updates ? "Next, update" : "Update"} ${shown() + 1}: from ${nth(shown())} attention leads along the dashed line to the attended point; most of it comes from ${names([best(shown())])}.`,
    alt: "The plane with keys, values and the attended point",
    say: "Each word has a query (what it looks for), a key (what it offers) and a value (what it hands over). The query, at x<sub>m</sub> after m moves, is compared with all keys. Attention leads to the mean of the values by these weights, the attended point; in update 1 the query goes there." },
  { title: "Describe a point by a list", label: "how alike the point and the key of word j are", formula: "g_j(x) = kernel(x, k_j) = x . k_j + exp(-r^2 / (2 d))", ...last, show: [["k", "g"], ["x"]], pick: () => ["g", shown(), best(shown())],
    bars: () => ["g", `list g(${nth(shown())})`, [shown()]], heading: () => `how near ${nth(shown())} is to each key; on a dashed circle exp is the same`, draw: pictures.list,
    caption: () => `The line to a key is as thick as the key is near. Of the list of ${nth(shown())}, the largest number is that of ${names([most(list(V.g, shown()))])}.`,
    alt: "The plane with lines from the point to all keys",
    say: () => `A point is now described by how alike it is to each key: a list of ${J.length} numbers, g(x). Each adds how far both point the same way, x · k, and how near they are, by their distance r; d = ${d} is the number of coordinates. exp is curved, so a matrix of lists makes moves that are not linear in x.` },
  { id: ["KOOP.5", "KOOP.6"], title: "Write the moves down", ...fit, show: [["B"], ["Y"]], pick: () => ["B", fitted(), fitted() - 1, best(fitted())],
    bars: () => ["B", `start of ${move(fitted() - 1)}`, [fitted(), fitted() - 1]], draw: (b, u = fitted()) => stack(b, [moves(u, "start: where each move began", "B", "start"), moves(u, "end: where it ended", "Y", "end")]),
    caption: () => (shown() ? `Above, the lists where moves began; below, where they ended. The end of a move is the start of the next.` : "In the first update there is no fit yet; this picture is that of the second."),
    alt: "Two tables: the lists of starts, and those of ends",
    say: () => `Every later update looks back at the moves so far${shown() ? `, here ${count(shown(), "move")}` : ""}. There is a row for each move: in start the list of where it began, in end that of where it ended.` },
  { id: ["KOOP.1", "KOOP.7"], title: "Read a list as a mixture of keys", ...fit, show: [["G"], ["Ginv"], ["N"]], pick: () => ["N", fitted(), 0, best(fitted())],
    bars: () => ["N", "mixture of move 1", [fitted(), 0]], heading: "the mixture, times gram, is the list", draw: pictures.mixture,
    caption: () => (shown() ? `The column is the mixture that the start of move 1 is read as: so much of each row of gram. Below, the sum of these rows: its list.` : "In the first update there is no fit yet; this picture is that of the second."),
    alt: "A column times the matrix gram is the list below it",
    say: "The keys have lists, too: the rows of gram (twice a tiny jitter on its diagonal keeps an inverse). Any list is a mixture of these rows, and gram⁻¹ says of which. We read the point itself as the same mixture of the keys, which holds only about, as exp is curved. Row l of mixtures is that of the start of move l." },
  { id: "KOOP.8", title: "Compare the moves", ...fit, show: [["N"], ["B"], ["Z"]], pick: () => ["Z", fitted(), 0, fitted() - 1],
    bars: () => ["N", "mixture of move 1", [fitted(), 0]], draw: (b, u = fitted()) => stack(b, [moves(u, "mixtures", "N", "cell"), ["overlap: the starts of all moves with each other", "overlap", rowsOf(V.Z, u, range(u)), move, (m, r) => `Z.${u}.${m}.${r}`]]),
    caption: () => (shown() ? `Above the mixture of each start; below how alike the starts are, two by two. On the diagonal, each with itself.` : "In the first update there is no fit yet; this picture is that of the second."),
    alt: "The mixtures, and a square table of the moves",
    say: "How alike are the starts of two moves? Take the mixture of the first (how much of each key) and the list of the second (how like each key), multiply them key by key, and add up. A product of both lists would count two keys that are nearly the same twice; in a mixture they share." },
  { id: "KOOP.9", title: "Fit the matrix", ...fit, show: [["A"], ["P"], ["Y"], ["rest"]], pick: () => ["rest", fitted(), fitted() - 1, most(J.map((j) => Math.abs(V.A(fitted(), fitted() - 1, j))))],
    bars: () => ["A", `fit of ${move(fitted() - 1)}`, [fitted(), fitted() - 1]], draw: (b, u = fitted()) => stack(b, [moves(u, "fit: the mixture of keys that each move contributes, by overlap", "A", "cell"), moves(u, "overlap · fit · gram: the list that this makes of each start", "P", "made"), moves(u, "end: the list that it should be", "Y", "end")]),
    caption: () => (shown() ? `Above, the fit; then the list that it makes of each start; last, the list of its end. The last two differ by ridge times fit, so by more if the ridge is larger.` : "In the first update there is no fit yet; this picture is that of the second."),
    alt: "The fit, the lists that it makes of the starts, and those of the ends",
    say: "We look for a matrix (koopman, step 7) that turns the list of each start into the list of its end. fit has a row for each move. For a new point: overlap with each start, times that row of fit, summed, is its mixture of keys after the move. The equation is solved with a ridge, which keeps fit small. So overlap fit gram misses the ends a little, by ridge times fit, the rest." },
  { id: ["KOOP.10", "KOOP.11"], title: "The Koopman operator", ...fit, show: [["T"], ["op"], ["began", "answer", "ended"]], pick: () => ["answer", fitted(), best(fitted())],
    bars: () => ["began", `list in: g(${before(fitted())})`, [fitted()]], heading: () => `list in × koopman = list out; below, that of ${nth(fitted())}, which it should be`, draw: pictures.operator,
    caption: () => (shown() ? `In goes the list of ${nth(shown() - 1)} (column), out comes the list below. It should be that of ${nth(shown())}, the last row: no number is off by more than ${show(gap())}.` : "In the first update there is no fit yet; this picture is that of the second."),
    alt: "A column times the n by n matrix is the list below it",
    say: () => `A list times transfer is a mixture of keys: of the point after one move. A mixture times gram is a list again. So koopman, ${J.length} by ${J.length}, turns the list of any point into its list after one move. ${shown() ? `Try it where the last move began, at ${nth(shown() - 1)}.` : "In the first update there is no move yet."}` },
  { id: "KOOP.12", title: "Back to a point", also: { label: "the point one move from x", formula: "g(x) transfer k = g(x) one_move" }, ...fit, show: [["T"], ["k"], ["one"]], pick: () => ["one", fitted(), 0, 0],
    bars: () => ["began", `list g(${before(fitted())})`, [fitted()]], heading: "a quarter of a move, from anywhere; crosses should hit ends", draw: pictures.back,
    caption: () => (shown() ? `Arrows: a quarter of a move, from anywhere.${shown() === 1 ? " With one move all point to one line through 0." : ""} The crosses, where starts are taken, miss the ends by at most ${show(misses(shown()))}.` : "In the first update there is no fit yet; this picture is that of the second."),
    alt: "The plane with the map as arrows, and crosses where it takes the starts of moves",
    say: "From a list we have to come back to a point. The list of x times transfer is a mixture of keys, so we mix the keys themselves: that is the point one move from x. one_move does both at once. It has a row for each key, and the list of x says how much of each row to take." },
  { title: "Go one move on from where attention led", label: "one move from the attended point", formula: "moved = g(attended) one_move", ...fit, show: [["ga", "one"], ["a"], ["map"]], pick: () => ["map", fitted(), 0],
    bars: () => ["ga", "list g(attended)", [fitted()]], heading: "enlarged: likeness times one_move, key by key, end to end", draw: pictures.onward,
    caption: () => (shown() ? `From 0, an arrow for each key: its likeness times its row of one_move${lined(shown()) ? ", side by side, as they lie nearly on one line" : ""}. They end one move from attended (thick), ${show(apart(place(V.map, shown()), place(V.a, shown())))} away.` : "In the first update there is no fit yet; this picture is that of the second."),
    alt: "A chain of arrows, one for each key, to the point one move on",
    say: () => `Attention alone would stop at the attended point. Here the query goes on: if the path had come to the attended point, where would its next move have led? The list of the attended point, times one_move, is that point. ${shown() === 0 ? "" : K.epsilon === 0 ? `As epsilon is 0, it is ${nth(shown() + 1)}.` : `${nth(shown() + 1)} is ${show(apart(place(V.map, shown()), place(V.next, shown())))} from it; steps 10 and 11 say why.`}${shown() && lined(shown()) ? ` one_move is made of the ${shown() === 1 ? "end of the one move, x₁" : `ends of the moves, x₁ to ${nth(shown())}, which lie nearly on one line with 0`}: so the arrows lie on one line, too.` : ""}` },
  { id: "KOOP.13", title: "Epsilon: two moves at once", ...fit, show: [["one", "two", "both"]], pick: () => ["both", fitted(), 0, 0],
    bars: () => ["ga", "list g(attended)", [fitted()]], heading: "a row for each key, a column for each coordinate", draw: (b, u = fitted()) => tables(b, u, ["one", "two", "both"]),
    caption: () => (shown() ? `A row for each key. The last table is the first plus epsilon, ${show(K.epsilon)}, times the second.` : "In the first update there is no fit yet; this picture is that of the second."),
    alt: "Three tables: one move, two moves, and both",
    say: () => `The matrix can act twice: koopman one_move takes a list to the point two moves on. both_moves is one_move plus epsilon times that${K.epsilon === 0 ? "; here epsilon is 0, so it is one_move" : ""}.` },
  { id: ["KOOP.14", "KOOP.15"], title: "Ask for both", ...fit, show: [["map", "t", "next"], ["ga", "both"], ["one"]], pick: () => ["next", fitted(), 0],
    bars: () => ["g", `list g(${nth(fitted() + 1)})`, [fitted() + 1]], heading: "enlarged: from the attended point, and one move more", draw: pictures.ask,
    caption: () => (shown() ? `Thick: from attended to ${nth(shown() + 1)}. Thin: one move from there. From its tip to the cross, times epsilon, is ${show(apart(place(V.map, shown()), place(V.next, shown())))}: so far is ${nth(shown() + 1)} from moved of step 9.` : "In the first update there is no fit yet; this picture is that of the second."),
    alt: "The way from the attended point to the next one, and on",
    say: () => `Two moves from the attended point, both by the matrix, end at the cross. Two moves by way of a point end ${shown() ? `${show(split(shown()))} from it` : "elsewhere"}; if the matrix were exact, they would end there, too. So we choose ${nth(fitted() + 1)} such that ${nth(fitted() + 1)} + epsilon · (the end of its next move) is what the matrix predicts for both: target. Newton’s method finds this ${nth(fitted() + 1)}, called following.` },
];
const backward = [
  { id: "dKOOP.15", of: "KOOP.15", title: "What is wished for", formula: "d_following = d_x_(m+1) = left(m+1) - goal if it is the last", ...last, show: [["next", "dnext"], ["target"]], pick: () => ["dnext", shown(), 0],
    bars: () => ["w", "weight", [K.updates - 1]], heading: "from the end of the path to the goal", draw: pictures.wish,
    caption: () => `The path ends ${show(apart(place(V.x, K.updates), DATA.target))} from the goal. The arrow is the way on which the loss falls fastest. Drag the goal.`,
    alt: "The path, and an arrow from its end to the goal",
    say: "Suppose that the path should have ended at the goal. The loss is half the squared distance, so the gradient of the last point is the difference. An earlier point gets what all later updates ask of it." },
  { id: "dKOOP.14", of: "KOOP.15", title: "To the target", ...fit, show: [["dnext", "dt"], ["Jac"]], pick: () => ["dt", fitted(), 0],
    bars: () => ["ga", "list g(attended)", [fitted()]], heading: "which way following should go, and which way the target", draw: pictures.toTarget,
    caption: () => (shown() ? `The arrow at ${nth(shown() + 1)}: which way that should go. The coloured one: which way the target should, to get it there.` : "In the first update there is no fit yet; this picture is that of the second."),
    alt: "Two arrows, at the next point and at the target",
    say: "Step 11 of the way forward solved an equation: following + epsilon (one move from following) = target. Its left side is called psi, and J has the slopes of psi at the following point. If the target moves a little, that point moves by J⁻¹ times as much (implicit function theorem). So the gradient goes back by the transpose of J⁻¹." },
  { id: "dKOOP.13", of: "KOOP.14", title: "To both moves", ...fit, show: [["ga", "dboth"], ["dt"]], pick: () => ["dboth", fitted(), best(fitted()), 0],
    bars: () => ["ga", "list g(attended)", [fitted()]], draw: (b, u = fitted()) => stack(b, [["gradient of both_moves: a row for each key", "cell", square(V.dboth, u, D), called, (j, e) => `dboth.${u}.${j}.${e}`]]),
    caption: () => (shown() ? `All rows point the same way, along the gradient of the target; the row of ${names([most(list(V.ga, shown()).map(Math.abs))])} is the longest, as its likeness is the largest.` : "In the first update there is no fit yet; this picture is that of the second."),
    alt: "The gradient of both_moves as a table",
    say: "The target is the list of the attended point times both_moves. So each factor gets the gradient of the target times the other factor." },
  { id: "dKOOP.12", of: "KOOP.13", title: "To one move", ...fit, show: [["dboth", "done"], ["op"], ["dt"]], pick: () => ["done", fitted(), 0, 0],
    bars: () => ["ga", "list g(attended)", [fitted()]], heading: "a row for each key, a column for each coordinate", draw: (b, u = fitted()) => tables(b, u, ["dboth", "done"]),
    caption: () => (shown() ? K.epsilon === 0 ? "As epsilon is 0, both tables are the same." : "Left the gradient of both_moves, all rows on one line. Right that of one_move: epsilon adds two parts to it." : "In the first update there is no fit yet; this picture is that of the second."),
    alt: "The gradient of one_move as a table",
    say: "one_move is in both_moves, twice, and in the equation of the following point. So its gradient has three parts, and two of them are small if epsilon is." },
  { id: ["dKOOP.11", "dKOOP.10"], of: ["KOOP.13", "KOOP.11"], title: "To the matrix", ...fit, show: [["dop"], ["dT"]], pick: () => ["dT", fitted(), 0, best(fitted())],
    bars: () => ["ga", "list g(attended)", [fitted()]], draw: (b, u = fitted()) => stack(b, [["gradient of transfer", "cell", square(V.dT, u), called, (j, n) => `dT.${u}.${j}.${n}`, true]]),
    caption: () => (shown() ? "A cell says how the loss changes if likeness to the key of its row led to more of the key of its column." : "In the first update there is no fit yet; this picture is that of the second."),
    alt: "The gradient of transfer as a table",
    say: "koopman made the second of the two moves. transfer made koopman and one_move, so it gets the gradient of both." },
  { id: "dKOOP.9", of: "KOOP.10", title: "To the fit", ...fit, show: [["dT"], ["N"], ["dA"]], pick: () => ["dA", fitted(), 0, best(fitted())],
    bars: () => ["dA", `gradient of ${move(fitted() - 1)}`, [fitted(), fitted() - 1]], draw: (b, u = fitted()) => stack(b, [moves(u, "mixtures", "N", "mix"), moves(u, "gradient of fit", "dA", "cell")]),
    caption: () => (shown() ? "The mixtures above pick rows of the table before: a move gets the gradients of the keys that its start is a mixture of." : "In the first update there is no fit yet; this picture is that of the second."),
    alt: "The mixtures, and the gradient of fit",
    say: "A row of fit is in transfer as often as the start of its move mixes the keys." },
  { id: "dKOOP.6", of: "KOOP.9", title: "To the ends of moves", ...fit, show: [["dA"], ["dY"], ["drest"]], pick: () => ["drest", fitted(), fitted() - 1, best(fitted())],
    bars: () => ["dY", `gradient of ${move(fitted() - 1)}`, [fitted(), fitted() - 1]], draw: (b, u = fitted()) => stack(b, [moves(u, "gradient of the ends", "dY", "cell"), moves(u, "ridge times it", "drest", "rest")]),
    caption: () => (shown() ? `The lower table is the upper one times the ridge, ${show(K.ridge)}: what is left over if the equation is solved.` : "In the first update there is no fit yet; this picture is that of the second."),
    alt: "The gradient of the ends, and the ridge times it",
    say: "fit solves an equation with end on its right side. d_end solves the same equation, with d_fit on the right side. Check: what d_fit has beyond overlap d_end gram is ridge times d_end." },
  { id: ["dKOOP.8", "dKOOP.7"], of: ["KOOP.9", "KOOP.7"], title: "To overlap and mixtures", ...fit, show: [["dZ"], ["dN"]], pick: () => ["dZ", fitted(), 0, 0],
    bars: () => ["dN", "gradient of move 1", [fitted(), 0]], draw: (b, u = fitted()) => stack(b, [["gradient of overlap", "overlap", rowsOf(V.dZ, u, range(u)), move, (m, r) => `dZ.${u}.${m}.${r}`], moves(u, "gradient of mixtures", "dN", "cell")]),
    caption: () => (shown() ? "Above, the moves two by two; below, a row for each move: the share of each key in its start." : "In the first update there is no fit yet; this picture is that of the second."),
    alt: "The gradients of overlap and mixtures as tables",
    say: "The equation overlap fit gram + ridge fit = end stays true whatever changes. If overlap grows by a small matrix T, the left side grows by T fit gram. So fit changes as if end had shrunk by as much: hence the minus. mixtures is a part of transfer and of overlap, so it gets the gradients of both." },
  { id: "dKOOP.5", of: "KOOP.7", title: "To the starts of moves", ...fit, show: [["dN"], ["dB"]], pick: () => ["dB", fitted(), 0, best(fitted())],
    bars: () => ["dB", `gradient of ${move(fitted() - 1)}`, [fitted(), fitted() - 1]], heading: "where every point of the path should go", draw: pictures.toStarts,
    caption: () => `Arrows, to scale, at all points of the path. That of ${nth(most(range(K.updates + 1).map((p) => Math.hypot(...gradient(p)))))} is the longest: changing that point changes the loss most.`,
    alt: "An arrow at each point of the path",
    say: "The starts are in mixtures and in overlap. With the gradients of the ends this reaches every earlier point of the path." },
  { id: "dKOOP.4", of: "KOOP.14", title: "To where attention led", ...last, show: [["dga", "sa"], ["a", "da"]], pick: () => ["da", shown(), 0],
    bars: () => ["dga", "gradient of g(attended)", [shown()]], heading: "where the attended point should go: −d_attended", draw: pictures.toAttended,
    caption: () => `The arrow shows which way the attended point should go. Its gradient is ${show(Math.hypot(...place(V.da, shown())))} long, that of ${nth(shown() + 1)} ${show(Math.hypot(...place(V.dnext, shown())))}.`,
    alt: "An arrow at the attended point",
    say: "The list of the attended point is in the target, so this point gets a gradient by the slope of each likeness there. In the first update there is no list, and the attended point gets all of it." },
  { id: ["dKOOP.3", "dKOOP.2"], of: ["KOOP.4", "KOOP.3"], title: "To the scores", ...last, show: [["v", "dw", "w", "ds"], ["da"]], pick: () => ["ds", shown(), most(J.map((j) => Math.abs(V.ds(shown(), j))))],
    bars: () => ["ds", "gradient of a score", [shown()]], heading: "how far each value points along d_attended", draw: pictures.toScores,
    caption: () => `A value whose foot lies along the arrow raises the loss if its weight grows. Most has the score of ${names([most(list(V.ds, shown()).map(Math.abs))])} to change.`,
    alt: "The values, each with its foot on the line of the gradient",
    say: "From here on it is softmax attention. A weight gets the gradient of the attended point along its value, and a score what its weight has beyond the mean." },
  { id: "dKOOP.q", of: "KOOP.2", title: "To the query", when: "first", show: [["ds", "k", "dgx", "sx"], ["dq"]], pick: () => ["dq", 0],
    bars: () => ["dgx", "gradient of g(x₀)", [0]], heading: "where the query should go, by scores and by its list", draw: pictures.toQuery,
    caption: () => `The gradient of x₀, the query, is ${show(Math.hypot(...gradient(0)))} long. The arrow shows where it should go. Drag it there, and see where the path ends.`,
    alt: "An arrow at the query",
    say: "The query is the first point of the path. It made the first scores, and it is the start of the first move in every fit." },
  { id: ["dKOOP.v", "dKOOP.k"], of: ["KOOP.4", "KOOP.2"], title: "To values and keys", when: "last", show: [["v", "dv"], ["k", "dk"]], pick: () => ["dv", best(0), 0],
    bars: () => ["w", "weight in update 1", [0]], heading: "where values and keys should go, to scale", draw: pictures.toValues,
    caption: "Points are values, squares keys; an arrow is as long as the gradient, all to scale. A key counts twice: it draws attention, and describes points.",
    alt: "An arrow at each value and each key",
    say: "Values serve in every update, so they get the sum over all of them. Keys get more, since they also describe the points." },
  { id: ["dKOOP.ridge", "dKOOP.epsilon"], of: "KOOP.9", title: "To the knobs", when: "last", show: [["dridge", "depsilon"]], pick: () => ["dridge"],
    bars: () => ["ga", "list g(attended)", [fitted()]], heading: "gradients of the two knobs", draw: (b) => slopes(b, [["ridge", "dridge"], ["epsilon", "depsilon"]], V),
    caption: "A bar to the left: the loss would fall if that knob were larger. To the right: if it were smaller.",
    alt: "A bar for the ridge and one for epsilon",
    say: () => `Even the two knobs have gradients, so they could be learned. A ${V.dridge() < 0 ? "larger" : "smaller"} ridge would lower the loss here, and so would a ${V.depsilon() < 0 ? "larger" : "smaller"} epsilon.` },
];

function caption() {
  const u = shown();
  if (S.side === "backward") {
    const n = shown() + 1, sizes = range(K.updates + 1).map((p) => Math.hypot(...gradient(p)));
    return `The path ends ${show(apart(place(V.x, K.updates), DATA.target))} from the goal. The gradient of ${nth(n)}, where update ${n} led, is ${show(sizes[n])} long${most(sizes) === n ? ", the longest of all points" : `; that of ${nth(most(sizes))} is the longest`}.`;
  }
  if (u === 0) return `${word()} begins at x₀, its query. Attention leads it to the attended point. There is no move yet that an operator could be fitted to.`;
  const further = apart(place(V.x, u + 1), place(V.a, u));
  const crosses = ` ${u === 1 ? "The cross, where it takes the start, misses the end" : "Crosses, where it takes starts, miss the ends"} by ${u === 1 ? "" : "at most "}${show(misses(u))}.`;
  return `${S.t < K.updates ? "Next, update" : "Update"} ${u + 1}: from the attended point the operator, fitted to ${count(u, "move")}, takes ${word()} ${show(further)} further.${crosses}`;
}

tour({
  title: "Koopman attention",
  short: "A query walks, learns from its own path how it moves, and goes one move further than attention.",
  intro: () => [
    "Attention moves a query once, to the mean of the values that it attends to. It sees only where the query is. Here the query moves several times, and its <b>path</b> also shows where it is heading.",
    `We don't describe a point by coordinates but by a list of how alike it is to each key: ${J.length} numbers. The <b>Koopman operator</b> is a matrix that turns a list into the list after one move. It is learned from the moves so far. From the second update on, attention leads to the attended point, and the operator one move further: there the query goes, but for a correction (epsilon).`,
  ],
  turn: "What would have to change for the path to end at a goal? The gradient goes back through the last update, and from there to all earlier points, for every fit has read them. A d in front of a letter means the gradient of the loss with respect to it.",
  tokens: "ijo",
  sizes: { t: () => K.updates, l: (u) => u, r: (u) => u },
  time: { steps: () => K.updates, name: "update" },
  quantities, forward, backward, picture, caption,
  tasks: [
    { say: "loosen the fit (ridge) until the path ends less than 0.9 from the goal", own: true, done: () => apart(place(V.x, K.updates), DATA.target) < 0.9 },
    { say: "turn epsilon or ridge until both ways of step 11 end within 0.15", own: true, done: () => split(K.updates - 1) < 0.15 },
    { say: "drag the query, keys or values until the path ends at the goal", done: () => apart(place(V.x, K.updates), DATA.target) < 0.15 },
  ],
  phone: 150,
  height: (W) => (W < 420 ? 150 : Math.min(520, Math.round(W * 0.56))),
  label: () => `The plane with keys, values and the path of ${DATA.tokens[S.i]}: ${range(S.t + 1).map((p) => `x${p} at ${place(V.x, p).map(show).join(", ")}`).join("; ")}.`,
});
