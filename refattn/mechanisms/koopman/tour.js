// The tour of Koopman attention: formulas, cards, picture.
//
// t counts updates, l and r the moves that are known then (as many as t), j keys, o the function that each of them has.
// x(t) is where the query stands before update t, x'(t) = x(t + 1) where it goes. Queries do not meet, so there is one.

const { q, k, v, target, G, Ginv, x, s, w, a, g, ga, B, Y, N, Z, AG, A, T, op, one, two, both, t, next } = F;
const { dnext, dt, dboth, done, dop, dT, dA, dY, dYG, dZ, dN, sol, dB, dgx, dga, dgn, da, dw, mean, ds, dx, dG, ZdY } = F;
const { sx, sa, kf, ka, ks, kg } = F;
const range = (count) => Array.from({ length: count }, (_, l) => l);
const updates = () => range(K.updates), fits = () => range(K.updates).slice(1), d = D.length, epsilon = knob("epsilon"), ridge = knob("ridge");

// How like points x and y are; how that changes with coordinate e of x.
const near = (x, y) => exp(div(neg(sum(D.map((e) => pow(sub(x(e), y(e)), 2)))), 2 * d));
const kernel = (x, y) => add(...D.map((e) => mul(x(e), y(e))), near(x, y));
const slope = (x, y, e) => sub(y(e), mul(div(sub(x(e), y(e)), d), near(x, y)));
const at = (quantity, ...index) => (e) => quantity(...index, e);

// A list whose entries are made when they are asked for, once.
const lazily = (make) => new Proxy({}, { get: (kept, n) => (kept[n] ??= make(Number(n))) });

// The x with `rows` x = right, by elimination.
function solve(rows, right) {
  const all = rows.map((row, n) => [...row, right[n]]), size = all.length;
  for (let n = 0; n < size; n += 1) {
    const best = range(size).slice(n).reduce((p, r) => (Math.abs(all[r][n]) > Math.abs(all[p][n]) ? r : p), n);
    [all[n], all[best]] = [all[best], all[n]];
    for (let r = n + 1; r < size; r += 1) {
      const times = all[r][n] / all[n][n];
      for (let p = n; p <= size; p += 1) all[r][p] -= times * all[n][p];
    }
  }
  const found = [];
  for (let n = size - 1; n >= 0; n -= 1) found[n] = (all[n][size] - range(size).slice(n + 1).reduce((past, p) => past + all[n][p] * found[p], 0)) / all[n][n];
  return found;
}

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
  g: { axes: "to", symbol: (u) => `g(${point(u)})`, what: "how like a point of the path is to a key", of: (u, j) => kernel(at(x, u), at(k, j)) },
  ga: { axes: "to", symbol: "g(attended)", what: "how like the attended point is to a key", of: (u, j) => kernel(at(a, u), at(k, j)) },
  B: { id: "KOOP.5", passes: 1, axes: "tlo", symbol: "start", what: "how like the start of a move is to a key", of: (u, m, j) => kernel(at(x, m), at(k, j)) },
  Y: { id: "KOOP.6", passes: 1, axes: "tlo", symbol: "end", what: "how like the end of a move is to a key", of: (u, m, j) => kernel(at(x, m + 1), at(k, j)) },
  N: { id: "KOOP.7", passes: 1, axes: "tlo", symbol: "mixtures", what: "share of a key in the mixture that the start of a move is read as", of: (u, m, j) => sum(J.map((n) => mul(B(u, m, n), Ginv(n, j)))) },
  Z: { id: "KOOP.8", passes: 1, axes: "tlr", symbol: "overlap", what: "how like the starts of two moves are to each other", of: (u, m, r) => sum(J.map((j) => mul(N(u, m, j), B(u, r, j)))) },
  AG: { axes: "tlo", symbol: "fit gram", what: "list that a move leads to", of: (u, m, j) => sum(J.map((n) => mul(A(u, m, n), G(n, j)))) },
  P: { axes: "tlo", symbol: "start koopman", what: "list that the matrix makes of the start of a move", of: (u, m, j) => sum(range(u).map((r) => mul(Z(u, m, r), AG(u, r, j)))) },
  A: {
    id: "KOOP.9", passes: 1, axes: "tlj", symbol: "fit", what: "share of a key in the mixture that a move leads to",
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
  ended: { axes: "to", symbol: (u) => `g(${u ? point(u) : "x"})`, what: "how like the end of the last move is to a key", of: (u, o) => (u === 0 ? still : g(u, o)) },
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
const word = () => `<b>${DATA.tokens[S.i]}</b>`;
const most = (list) => list.reduce((best, y, n) => (y > list[best] ? n : best), 0);
const looked = () => (S.view === "query" ? 0 : shown() + 1); // the point whose gradient a card is about
const best = (u) => most(J.map((j) => V.w(u, j)));
const place = (quantity, u) => D.map((e) => quantity(u, e));
const apart = (one, other) => Math.hypot(...one.map((y, e) => y - other[e]));
const count = (n, thing) => `${n} ${thing}${n === 1 ? "" : "s"}`;
const gradient = (n) => D.map((e) => (n < K.updates ? V.dx(n, e) : V.dnext(n - 1, e)));
// How far the map that update u fits misses the end of a move that it is fitted to, at most.
const misses = (u) => Math.max(...range(u).map((m) => apart(mapped(u, place(V.x, m)), place(V.x, m + 1))));

// How far the operator's list for the end of the last move is from what it was, at most.
const gap = () => Math.max(...J.map((o) => Math.abs(V.answer(fitted(), o) - V.ended(fitted(), o))));

// How far two moves from the attended point by the matrix alone end from one move, back to a point, and one more.
const split = (u) => apart(D.map((e) => J.reduce((past, j) => past + V.ga(u, j) * V.two(u, j, e), 0)), mapped(u, place(V.map, u)));

const last = { when: "last", timed: true }, fit = { ...last, since: 1 };
const forward = [
  {
    id: ["KOOP.2", "KOOP.3", "KOOP.4"], title: "Attend", when: "first", timed: true, show: [["k", "s", "w", "v"], ["x", "a"]], pick: () => ["w", shown(), best(shown())],
    say: "Each word has a query (what it looks for), a key (what it offers) and a value (what it hands over). The query stands at x and is compared with every key. Attention leads to the attended point, the mean of the values by these weights. In the first update the query goes there: its first move.",
  },
  {
    title: "Describe a point by a list", label: "how alike the point and the key of word j are", formula: "g_j(x) = kernel(x, k_j) = x . k_j + exp(-r^2 / (2 d))", ...last, show: [["k", "g"], ["x"]], pick: () => ["g", shown(), best(shown())],
    say: () => `From here on a point is described by how alike it is to each key: a list of ${J.length} numbers, g(x). Two things make one of them: how far point and key point the same way, x · k, and how near they are, by their distance r. The second is 1 if they are the same, and nearly 0 far off; d = ${d} is the number of coordinates. Why not describe points by coordinates? A matrix can only turn and stretch them. A list already bends with the point, so a matrix that acts on lists can make moves that bend.`,
  },
  {
    id: ["KOOP.5", "KOOP.6"], title: "Write the moves down", ...fit, show: [["B"], ["Y"]], pick: () => ["B", fitted(), 0, best(fitted())],
    say: () => `Every later update looks back at the moves so far${shown() ? `, here ${count(shown(), "move")}` : ""}. There is a row for each move: in start the list of where it began, in end that of where it ended.`,
  },
  {
    id: ["KOOP.1", "KOOP.7"], title: "Read a list as a mixture of keys", ...fit, show: [["G"], ["Ginv"], ["N"]], pick: () => ["N", fitted(), 0, best(fitted())],
    say: () => `The keys have lists, too: they are the rows of gram. Any list is a mixture of these rows, and gram⁻¹ says how much of each: multiply the list by it. A point is then read as the same mixture of the keys themselves. A tiny number on the diagonal of gram, 2 jitter, sees to it that there is an inverse even if keys repeat. Row l of mixtures is the mixture that the start of move l is read as.${
      shown() ? ` Check: ${J.map((j) => `${show(V.N(fitted(), 0, j))} of the row of <i>${DATA.tokens[j]}</i>`).slice(0, 2).join(", ")} and so on make the first row of start.` : ""}`,
  },
  {
    id: "KOOP.8", title: "Compare the moves", ...fit, show: [["N"], ["B"], ["Z"]], pick: () => ["Z", fitted(), 0, fitted() - 1],
    say: "How alike are the starts of two moves? Their lists tell: mix the second list as the first start mixes the keys. A plain product of the two lists would count two keys that are nearly the same twice; here they share.",
  },
  {
    id: "KOOP.9", title: "Fit the matrix", ...fit, show: [["A"], ["rest"]], pick: () => ["rest", fitted(), 0, most(J.map((j) => Math.abs(V.A(fitted(), 0, j))))],
    say: "The matrix should turn each start into its end. The best one needs no more than a row for each move: the mixture of keys that the move leads to. The rows of fit solve this equation. Check: the matrix makes overlap fit gram of the starts, and what the ends have beyond it is ridge times fit. On the same path, a larger ridge would leave more; but it changes the path, too.",
  },
  {
    id: ["KOOP.10", "KOOP.11"], title: "The Koopman operator", ...fit, view: "map", show: [["T"], ["op"], ["began", "answer", "ended"]], pick: () => ["answer", fitted(), best(fitted())],
    say: () => `transfer turns the list of a point into the mixture of keys that it moves to. Multiplied by gram, a mixture becomes a list again: so koopman, ${J.length} by ${J.length}, turns a list into the list after one move. ${shown() ? `Try it where the last move began, at ${point(shown() - 1)}: koopman turns the list of that point into another. In that list, no number is off from the list of the end, ${point(shown())}, by more than ${show(gap())}. In the picture crosses show where the starts of all moves are taken, and grey arrows a quarter of the way from other points.` : "In the first update there is no move yet."}`,
  },
  {
    id: "KOOP.12", title: "Back to a point", also: { label: "the point one move from x", formula: "g(x) transfer k = g(x) one_move" }, ...fit, view: "map", show: [["T"], ["k"], ["one"]], pick: () => ["one", fitted(), 0, 0],
    say: () => `g(x) transfer is a mixture of keys. Mix the keys themselves by it: that is the point one move from x. So one_move has a row for each key, and the list of x says how much of each row to take. ${
      shown() === 0 ? "In the first update there is no move yet." : shown() === 1 ? "Grey arrows show a quarter of the way there. There is one move, so all of them point to one line through 0." : "Grey arrows show a quarter of the way there, for many points."}`,
  },
  {
    title: "Go one move on from where attention led", label: "one move from the attended point", formula: "moved = g(attended) one_move", ...fit, view: "map", show: [["ga", "one"], ["a"], ["map"]], pick: () => ["map", fitted(), 0],
    say: () => `Attention alone would stop at the attended point. We ask instead: had the path been there, where would its next move have taken it? The list of the attended point, times one_move, is that point. ${
      shown() === 0 ? "" : `Here it is ${show(apart(place(V.map, shown()), place(V.a, shown())))} from the attended one. In the picture the black arrow leads from there to ${point(shown() + 1)}, which is ${K.epsilon === 0 ? "the point one move on, as epsilon is 0" : `${show(apart(place(V.map, shown()), place(V.next, shown())))} from the point one move on; steps 10 and 11 say why`}.`}`,
  },
  {
    id: "KOOP.13", title: "Epsilon: two moves at once", ...fit, view: "map", show: [["one", "two", "both"]], pick: () => ["both", fitted(), 0, 0],
    say: () => `The matrix can act twice: koopman one_move takes a list to the point two moves on. both_moves is one_move plus epsilon times that${K.epsilon === 0 ? "; here epsilon is 0, so it is one_move" : ""}.`,
  },
  {
    id: ["KOOP.14", "KOOP.15"], title: "Ask for both", ...fit, view: "map", show: [["map", "t", "next"], ["ga", "both"], ["one"]], pick: () => ["next", fitted(), 0],
    say: () => `There are two ways to go two moves: apply koopman twice, or apply it once, turn the list into a point, and move once more. They should end at one point, but the matrix is only fitted, so they end ${shown() ? `${show(split(shown()))} apart` : "apart"}. So we ask two things of the following point: to be one move from the attended one, and that one move from it ends where two moves from the attended one do. We add the two requests, the second times epsilon: following + epsilon (one move from following) = target. As following is in it twice, it is found by Newton's method.`,
  },
];
const backward = [
  {
    id: "dKOOP.15", of: "KOOP.15", title: "What is wished for", formula: "d_following = d_x_(m+1) = x_(m+1) - goal if it is the last", ...last, show: [["next", "dnext"], ["target"]], pick: () => ["dnext", shown(), 0],
    say: "Suppose that the path should have ended at the goal. The loss is half the squared distance, so the gradient of the last point is the difference. An earlier point gets what all later updates ask of it.",
  },
  {
    id: "dKOOP.14", of: "KOOP.15", title: "To the target", ...fit, show: [["dnext", "dt"], ["Jac"]], pick: () => ["dt", fitted(), 0],
    say: "Forward step 11 solved following + epsilon (one move from following) = target. Call the left side psi(following), and J its matrix of slopes. If the target moves a little, following moves by J⁻¹ times that; so the gradient goes back by the transpose of J⁻¹.",
  },
  {
    id: "dKOOP.13", of: "KOOP.14", title: "To both moves", ...fit, show: [["ga", "dboth"], ["dt"]], pick: () => ["dboth", fitted(), best(fitted()), 0],
    say: "The target is the list of the attended point times both_moves. So each factor gets the gradient of the target times the other factor.",
  },
  {
    id: "dKOOP.12", of: "KOOP.13", title: "To one move", ...fit, show: [["dboth", "done"], ["op"], ["dt"]], pick: () => ["done", fitted(), 0, 0],
    say: "one_move is in both_moves, twice, and in the equation of the following point. So its gradient has three parts, and two of them are small if epsilon is.",
  },
  {
    id: ["dKOOP.11", "dKOOP.10"], of: ["KOOP.13", "KOOP.11"], title: "To the matrix", ...fit, show: [["dop"], ["dT"]], pick: () => ["dT", fitted(), 0, best(fitted())],
    say: "koopman made the second of the two moves. transfer made koopman and one_move, so it gets the gradient of both.",
  },
  {
    id: "dKOOP.9", of: "KOOP.10", title: "To the fit", ...fit, show: [["dT"], ["N"], ["dA"]], pick: () => ["dA", fitted(), 0, best(fitted())],
    say: "A row of fit is in transfer as often as the start of its move mixes the keys.",
  },
  {
    id: "dKOOP.6", of: "KOOP.9", title: "To the ends of moves", ...fit, show: [["dA"], ["dY"], ["drest"]], pick: () => ["drest", fitted(), fitted() - 1, best(fitted())],
    say: "fit solves an equation with end on its right side. d_end solves the same equation, with d_fit on the right side. Check: what d_fit has beyond overlap d_end gram is ridge times d_end.",
  },
  {
    id: ["dKOOP.8", "dKOOP.7"], of: ["KOOP.9", "KOOP.7"], title: "To overlap and mixtures", ...fit, show: [["dZ"], ["dN"]], pick: () => ["dZ", fitted(), 0, 0],
    say: "overlap fit gram + ridge fit = end must stay true. If overlap grows by a little t, the left side grows by t fit gram, so fit must change as if end had shrunk by that. Hence the minus of d_overlap. mixtures is in transfer and in overlap, and its gradient is the sum of both.",
  },
  {
    id: "dKOOP.5", of: "KOOP.7", title: "To the starts of moves", ...fit, show: [["dN"], ["dB"]], pick: () => ["dB", fitted(), 0, best(fitted())],
    say: "The starts are in mixtures and in overlap. With the gradients of the ends this reaches every earlier point of the path.",
  },
  {
    id: "dKOOP.4", of: "KOOP.14", title: "To where attention led", ...last, show: [["dga", "sa"], ["a", "da"]], pick: () => ["da", shown(), 0],
    say: "The list of the attended point is in the target, so this point gets a gradient by the slope of each likeness there. In the first update there is no list, and the attended point gets all of it.",
  },
  {
    id: ["dKOOP.3", "dKOOP.2"], of: ["KOOP.4", "KOOP.3"], title: "To the scores", ...last, show: [["v", "dw", "w", "ds"], ["da"]], pick: () => ["ds", shown(), most(J.map((j) => Math.abs(V.ds(shown(), j))))],
    say: "From here on it is softmax attention. A weight gets the gradient of the attended point along its value, and a score what its weight has beyond the mean.",
  },
  {
    id: "dKOOP.q", of: "KOOP.2", title: "To the query", when: "first", view: "query", show: [["ds", "k", "dgx", "sx"], ["dq"]], pick: () => ["dq", 0],
    say: "The query is the first point of the path. It made the first scores, and it is the start of the first move in every fit.",
  },
  {
    id: ["dKOOP.v", "dKOOP.k"], of: ["KOOP.4", "KOOP.2"], title: "To values and keys", when: "last", show: [["v", "dv"], ["k", "dk"]], pick: () => ["dv", best(0), 0],
    say: "Values serve in every update, so they get the sum over all of them. Keys get more, since they also describe the points.",
  },
  {
    id: ["dKOOP.ridge", "dKOOP.epsilon"], of: "KOOP.9", title: "To the knobs", when: "last", show: [["dridge", "depsilon"]], pick: () => ["dridge"],
    say: () => `Even the two knobs have gradients, so they could be learned. A ${V.dridge() < 0 ? "larger" : "smaller"} ridge would lower the loss here, and so would a ${V.depsilon() < 0 ? "larger" : "smaller"} epsilon.`,
  },
];

// The plane: keys, values, the path, where attention and the map lead, and the map as arrows.
function picture(W, H, small) {
  const back = S.side === "backward", narrow = W < 420, u = shown(), all = S.at === undefined ? S.t : S.at, path = range(K.updates + 1).map((p) => place(V.x, p));
  const keys = J.map((j) => D.map((e) => V.k(j, e))), values = J.map((j) => D.map((e) => V.v(j, e))), goal = D.map((e) => DATA.target[e]), flat = (p) => [p[0], p[1] ?? 0];
  const mapping = !back && u > 0 && (small || S.view === "map"), below = small || (narrow && H < 140) ? 0 : narrow ? 18 : mapping ? 40 : 24, room = small ? 10 : narrow ? 12 : 26, points = [...keys, ...values, ...path, ...(back ? [goal] : [])].map(flat);
  const ends = [0, 1].map((c) => [Math.min(...points.map((p) => p[c])), Math.max(...points.map((p) => p[c]))]), bottom = H - below;
  const unit = Math.min((W - 2 * room) / (ends[0][1] - ends[0][0] || 1), (bottom - 2 * room) / (ends[1][1] - ends[1][0] || 1)), units = [unit, unit];
  const X = (p) => W / 2 + units[0] * (p[0] - (ends[0][0] + ends[0][1]) / 2), Y = (p) => bottom / 2 - units[1] * (flat(p)[1] - (ends[1][0] + ends[1][1]) / 2);
  const mine = color(S.i), attended = place(V.a, u), next = place(V.x, u + 1), around = ([px, py], half) => [px - half, py - half, px + half, py + half];
  const between = path.slice(1).flatMap((to, n) => range(9).map((m) => [D.map((e) => path[n][e] + ((m + 1) / 10) * (to[e] - path[n][e])), 2]));
  const marks = [...between, ...[...keys, ...values].map((p) => [p, narrow ? 4 : 6]), ...path.map((p) => [p, 4]), ...(back ? [] : [[attended, 5]])].map(([p, half]) => around([X(p), Y(p)], half));
  const named = labels(W, bottom, narrow ? 11.5 : 13, [], 0, 0, marks);
  let drawn = TIP + svg("rect", { x: 0, y: 0, width: W, height: bottom, rx: 6, class: "plane" }) + svg("path", { d: `M${X([0, 0])} 0V${bottom}M0 ${Y([0, 0])}H${W}`, class: "axis" });
  if (!small) drawn += svg("path", { d: `M8 ${bottom - 11}v6h${unit}v-6`, class: "hair", "stroke-width": 1.2 }) + text(8 + unit / 2, bottom - 9, "1", { class: "tick", "text-anchor": "middle" });
  if (mapping) drawn += svg("path", { d: field(u, W, bottom, X, Y, units, attended, small || narrow ? 26 : 36), class: "hair", "stroke-width": 1.1, opacity: 0.62 });
  J.forEach((j) => {
    const weight = Math.sqrt(V.w(u, j)), scale = small || narrow ? 0.65 : 1, half = scale * (3.5 + 5 * weight);
    drawn += svg("path", { d: `M${X(keys[j])} ${Y(keys[j])}L${X(values[j])} ${Y(values[j])}`, class: "flow", style: `stroke:${color(j)}`, "stroke-width": scale * (1 + 3 * weight) });
    drawn += svg("circle", { cx: X(values[j]), cy: Y(values[j]), r: scale * (3 + 6 * weight), style: `fill:${color(j)}`, class: "dot" });
    const name = small ? "" : named(DATA.tokens[j], X(keys[j]), Y(keys[j]), half, j === S.i ? "name strong" : "name");
    drawn += follows(j, DATA.tokens[j], svg("rect", { x: X(keys[j]) - half, y: Y(keys[j]) - half, width: 2 * half, height: 2 * half, style: `fill:${color(j)}`, class: "dot" }) + name);
  });
  const walked = back ? path.length - 1 : Math.min(Math.floor(all), K.updates);
  drawn += svg("path", { d: `M${path.slice(0, walked + 1).map((p) => `${X(p)} ${Y(p)}`).join("L")}`, class: "line", style: `stroke:${mine}` });
  range(walked + 1).forEach((p) => {
    if (back && p === looked() && !small) drawn += svg("circle", { cx: X(path[p]), cy: Y(path[p]), r: 9, class: "hair", style: "fill:none;stroke:var(--ink)", "stroke-width": 1.8 });
    drawn += svg("circle", { cx: X(path[p]), cy: Y(path[p]), r: small ? 2.6 : 4, style: `fill:${mine}`, class: "dot" });
    if (!small) drawn += named(point(p), X(path[p]), Y(path[p]), p === walked ? 7 : 4, "name", [1, 3, 2, 0]);
  });
  if (back) return drawn + pushes(path, keys, values, goal, X, Y, units, narrow, named) + legend(W, H, below, back, mapping);
  if (mapping && !small) for (const m of range(u)) {
    const to = mapped(u, path[m]), arm = narrow ? 4 : 6;
    drawn += svg("path", { d: `M${X(to) - arm} ${Y(to)}h${2 * arm}m${-arm} ${-arm}v${2 * arm}`, style: "stroke:var(--ink);fill:none", "stroke-width": 1.8 });
  }
  // The way of this update: by attention, and on by the map.
  const done = all >= K.updates ? 1 : all - Math.floor(all), legs = u > 0 ? [path[u], attended, next] : [path[u], attended];
  drawn += svg("path", { d: `M${X(path[u])} ${Y(path[u])}L${X(attended)} ${Y(attended)}`, class: "cut" });
  if (u > 0) {
    const far = Math.hypot(X(attended) - X(next), Y(attended) - Y(next)), stop = Math.max(0, 1 - (small ? 5 : 8) / (far || 1)), tip = D.map((e) => attended[e] + stop * (next[e] - attended[e]));
    drawn += svg("path", { d: `M${X(attended)} ${Y(attended)}L${X(tip)} ${Y(tip)}`, class: "push", style: "stroke-width:2.2", "marker-end": "url(#tip)" });
  }
  drawn += svg("circle", { cx: X(attended), cy: Y(attended), r: small ? 3 : 5, class: "sink" });
  if (!small) drawn += named("attended", X(attended), Y(attended), 6, "name strong", [2, 0, 3, 1]);
  const along = done * (legs.length - 1), leg = Math.min(legs.length - 2, Math.floor(along)), now = D.map((e) => legs[leg][e] + (along - leg) * (legs[leg + 1][e] - legs[leg][e]));
  return drawn + svg("circle", { cx: X(now), cy: Y(now), r: small ? 4 : 6.5, style: `fill:${mine}`, class: "sink" }) + legend(W, H, below, back, mapping);
}

const before = (u) => (u ? point(u - 1) : "x"); // where the last move began
const point = (n) => `x${"₀₁₂₃₄₅₆"[n]}`;

// The map as arrows on a grid, as one path: a quarter of the way, at most as long as places are apart.
function field(u, W, H, X, Y, units, like, gap) {
  let d = "";
  const within = (size) => range(Math.floor(size / gap)).map((n) => (size % gap) / 2 + (n + 0.5) * gap);
  for (const y of within(H)) for (const x of within(W)) {
    const from = like.map((one, e) => (e === 0 ? (x - X([0, 0])) / units[0] : e === 1 ? (Y([0, 0]) - y) / units[1] : one)), to = mapped(u, from);
    const way = [0.25 * units[0] * (to[0] - from[0]), -0.25 * units[1] * ((to[1] ?? 0) - (from[1] ?? 0))], long = Math.hypot(...way), kept = Math.min(1, (0.8 * gap) / (long || 1));
    if (long < 1) continue;
    const [a, b] = way.map((z) => z * kept), [f, g] = [a, b].map((z) => (z / Math.hypot(a, b)) * Math.min(4.5, 0.5 * Math.hypot(a, b)));
    d += `M${(x - a / 2).toFixed(1)} ${(y - b / 2).toFixed(1)}l${a.toFixed(1)} ${b.toFixed(1)}m${(-f - 0.6 * g).toFixed(1)} ${(-g + 0.6 * f).toFixed(1)}l${(f + 0.6 * g).toFixed(1)} ${(g - 0.6 * f).toFixed(1)}l${(-f + 0.6 * g).toFixed(1)} ${(-g - 0.6 * f).toFixed(1)}`;
  }
  return d;
}

// Backwards: which way each point, value and key would have to move for the loss to fall, as long as its gradient.
function pushes(path, keys, values, goal, X, Y, units, narrow, named) {
  const moves = [
    ...path.map((p, n) => [p, gradient(n)]),
    ...values.map((p, j) => [p, D.map((e) => V.dv(j, e))]),
    ...keys.map((p, j) => [p, D.map((e) => V.dk(j, e))]),
  ];
  const way = ([, g]) => [-units[0] * g[0], units[1] * (g[1] ?? 0)], longest = Math.max(1e-9, ...moves.map((move) => Math.hypot(...way(move)))), long = (narrow ? 28 : 54) / longest;
  const end = path.at(-1);
  return (
    svg("path", { d: `M${X(end)} ${Y(end)}L${X(goal)} ${Y(goal)}`, class: "cut" }) + svg("path", { d: `M${X(goal) - 5} ${Y(goal) - 5}l10 10m0 -10l-10 10`, class: "cross" }) +
    named("goal", X(goal), Y(goal), 6, "name strong", [2, 3, 1, 0]) +
    moves.map((move) => {
      const [a, b] = way(move).map((z) => long * z), [p] = move;
      return Math.hypot(a, b) < 3 ? "" : arrow(X(p), Y(p), X(p) + a, Y(p) + b);
    }).join("")
  );
}

function legend(W, H, below, back, mapping) {
  if (!below) return "";
  const soft = "var(--soft)";
  let x = 12, y = H - (below > 30 ? 21 : 5), out = "";
  const marks = back
    ? [["key", (x, y) => svg("rect", { x, y: y - 9, width: 8, height: 8, fill: soft })], ["value", (x, y) => svg("circle", { cx: x + 4, cy: y - 5, r: 4, fill: soft })], ["which way the loss falls", (x, y) => arrow(x - 8, y - 4, x + 9, y - 4)]]
    : [
        ["key", (x, y) => svg("rect", { x, y: y - 9, width: 8, height: 8, fill: soft })], ["value", (x, y) => svg("circle", { cx: x + 4, cy: y - 5, r: 4, fill: soft })],
        [W < 420 ? "attend" : "attention", (x, y) => svg("path", { d: `M${x - 6} ${y - 4}h16`, class: "cut" })], [W < 420 ? "next move" : `the next move, from attended${K.epsilon > 0 ? ", with ε" : ""}`, (x, y) => arrow(x - 6, y - 4, x + 9, y - 4)],
        ...(mapping ? [[W < 420 ? "¼ move" : "a quarter of a move, from anywhere", (x, y) => svg("path", { d: `M${x - 5} ${y - 4}h14m-4 -3l4 3l-4 3`, class: "hair", "stroke-width": 1.1 })]] : []),
        ...(W < 420 || !mapping ? [] : [["where K takes x₀, … (should hit x₁, …)", (x, y) => svg("path", { d: `M${x - 1} ${y - 5}h10m-5 -5v10`, style: "stroke:var(--ink);fill:none", "stroke-width": 1.8 })]]),
      ];
  for (const [name, mark] of marks) {
    const wide = (back ? 40 : 33) + 5.85 * name.length;
    if (x + wide > W + 20) [x, y] = [12, y + 16];
    out += mark(x, y) + text(x + 14, y, name, { class: "tick" });
    x += wide;
  }
  return out;
}

function caption() {
  const u = shown();
  if (S.side === "backward") {
    const sizes = range(K.updates + 1).map((p) => Math.hypot(...gradient(p)));
    const n = looked();
    return `The path ends ${show(apart(place(V.x, K.updates), DATA.target))} from the goal. The gradient of ${point(n)}, ${n ? `where update ${n} led` : "the query"}, is ${show(sizes[n])} long${most(sizes) === n ? ", the longest of all points" : `; that of ${point(most(sizes))} is the longest`}.`;
  }
  if (u === 0) return `${word()} begins at x₀, its query. Attention leads it to the attended point. There is no move yet that an operator could be fitted to.`;
  const further = apart(place(V.x, u + 1), place(V.a, u));
  const crosses = S.view === "map" ? ` In the picture, ${u === 1 ? "the cross misses the end" : "the crosses miss the ends"} by ${u === 1 ? "" : "at most "}${show(misses(u))}.` : "";
  return `${S.t < K.updates ? "Next, update" : "Update"} ${u + 1}: from the attended point the operator, fitted to ${count(u, "move")}, takes ${word()} ${show(further)} further.${crosses}`;
}

tour({
  title: "Koopman attention",
  short: "A query walks, learns from its own path how it moves, and goes one move further than attention.",
  intro: () => [
    "Attention moves a query once, to the mean of the values that it attends to. It sees only where the query is. Here the query moves several times, and its <b>path</b> also shows where it is heading.",
    `We don't describe a point by coordinates but by a list of how alike it is to each key: ${J.length} numbers. The <b>Koopman operator</b> is a matrix that turns a list into the list after one move. It is learned from the moves so far. From the second update on, attention leads to the attended point, and the operator one move further: there the query goes.`,
  ],
  turn: "What would have to change for the path to end at a goal? The gradient goes back through the last update, and from there to all earlier points, for every fit has read them. A d in front of a letter means the gradient of the loss with respect to it.",
  tokens: "ijo",
  sizes: { t: () => K.updates, l: (u) => u, r: (u) => u },
  time: { steps: () => K.updates, name: "update" },
  quantities, forward, backward, picture, caption,
  phone: 150,
  height: (W) => (W < 420 ? 150 : Math.min(400, Math.round(W * 0.7))),
  label: () => `The plane with keys, values and the path of ${DATA.tokens[S.i]}: ${range(S.t + 1).map((p) => `x${p} at ${place(V.x, p).map(show).join(", ")}`).join("; ")}.`,
});
