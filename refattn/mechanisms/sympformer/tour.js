// The tour of SympFormer: formulas, cards, picture.

const { start, target, x, p, time, mean_x, rate_x, y, q, k, v, s, w, z, logz, b, e, u, a, o, force, kicked, damping, damped, velocity, rate_p } = F;
const { dx, dp, dvelocity, ddamped, dkicked, ddamping, dforce, dout, dv, da, dw, du, dlogz, ds, dq, dk, dy, along_p, along_y } = F;
const C = DATA.start[0].map((_, c) => c), EPS = 1e-5, MATCH = DATA.match, LIN = DATA.c_lin;
const h_x = knob("h_x"), h_y = knob("h_y"), c_log = knob("c_log");
const mean = (list) => div(sum(list), C.length);
const rate = (vector) => div(1, sqrt(add(mean(C.map((c) => pow(sub(vector(c), mean(C.map(vector))), 2))), EPS)));
const before = (i) => J.filter((j) => j <= i); // the tokens that token i sees
const now = () => Math.min(S.t, K.layers - 1);
const { word } = attention();
const still = words("at rest before the first layer", 0);
const nothing = words("as no layer follows", 0);
// The gradient through the norm: neither a shift nor a length changes it.
const through = (r, n, dn, along, c) => mul(r, sub(sub(dn(c), mean(C.map(dn))), mul(n(c), along)));
const every = (make) => sum(J.flatMap((i) => C.map((c) => make(i, c))));

const quantities = {
  start: { axes: "im", what: "place at the start" },
  target: { axes: "m", symbol: "goal", what: "wanted place" },
  x: { id: "SYMP.18", passes: 1, axes: "Tim", what: "place of a token", of: (t, i, c) => (t === 0 ? start(i, c) : add(x(t - 1, i, c), mul(h_x, velocity(t - 1, i, c)))) },
  p: { id: "SYMP.19", passes: 1, axes: "Tim", what: "momentum", of: (t, i, c) => (t === 0 ? still : mul(sub(damped(t - 1, i, c), mean(C.map((l) => damped(t - 1, i, l)))), rate_p(t - 1, i))) },
  time: { axes: "T", symbol: "t", what: "time", of: (t) => (t === 0 ? 1 : add(time(t - 1), h_x)) },
  mean_x: { axes: "ti", symbol: "mean_x", what: "mean of a token", of: (t, i) => mean(C.map((c) => x(t, i, c))) },
  rate_x: { axes: "ti", symbol: "r_x", what: "one over the standard deviation", of: (t, i) => rate((c) => x(t, i, c)) },
  y: { id: "SYMP.1", axes: "tim", what: "token of mean 0 and variance 1", of: (t, i, c) => mul(sub(x(t, i, c), mean_x(t, i)), rate_x(t, i)) },
  q: { id: "SYMP.2", axes: "tim", what: "query", of: (t, i, c) => mul(MATCH, y(t, i, c)) },
  k: { id: "SYMP.3", axes: "tim", what: "key", of: (t, j, c) => y(t, j, c) },
  v: { id: "SYMP.4", axes: "tim", what: "where a token pushes", of: (t, j, c) => y(t, j, c) },
  s: { id: "SYMP.5", axes: "tij", what: "score", of: (t, i, j) => (j > i ? words("as it comes later", -Infinity) : sum(C.map((c) => div(mul(q(t, i, c), k(t, j, c)), sqrt(C.length))))) },
  w: { id: "SYMP.6", axes: "tij", what: "weight", of: (t, i, j) => (j > i ? words("as it comes later", 0) : div(exp(s(t, i, j)), sum(before(i).map((l) => exp(s(t, i, l)))))) },
  logz: { id: "SYMP.7", axes: "ti", symbol: "log z", what: "logarithm of the mass", of: (t, i) => log(div(sum(before(i).map((j) => exp(s(t, i, j)))), i + 1)) },
  z: { axes: "ti", what: "mass", of: (t, i) => exp(logz(t, i)) },
  b: { id: "SYMP.8", axes: "tim", what: "where the momentum heads", of: (t, i, c) => p(t, i, c) },
  e: { id: "SYMP.9", axes: "ti", what: "momentum, squared", of: (t, i) => dot(C.map((c) => b(t, i, c)), C.map((c) => p(t, i, c))) },
  u: { id: "SYMP.10", axes: "ti", what: "speed, squared", of: (t, i) => div(e(t, i), pow(z(t, i), 2)) },
  a: { id: "SYMP.11", axes: "tij", what: "how strongly j pushes i", of: (t, i, j) => mul(w(t, i, j), add(1, div(add(u(t, i), u(t, j)), 2))) },
  o: { id: "SYMP.12", axes: "tim", what: "push", of: (t, i, c) => mul(z(t, i), sum(before(i).map((j) => mul(a(t, i, j), v(t, j, c))))) },
  force: { id: "SYMP.13", axes: "tim", what: "force", of: (t, i, c) => o(t, i, c) },
  kicked: { id: "SYMP.14", axes: "tim", what: "momentum after the kick", of: (t, i, c) => add(p(t, i, c), mul(h_y, force(t, i, c))) },
  damping: { id: "SYMP.15", axes: "t", what: "damping", of: (t) => add(mul(c_log, log1p(div(h_y, time(t)))), mul(LIN, h_y)) },
  damped: { id: "SYMP.16", axes: "tim", symbol: "p'", what: "momentum after friction", of: (t, i, c) => mul(exp(neg(damping(t))), kicked(t, i, c)) },
  velocity: { id: "SYMP.17", axes: "tim", what: "velocity", of: (t, i, c) => div(damped(t, i, c), z(t, i)) },
  rate_p: { axes: "ti", symbol: "r_p", what: "one over the standard deviation of a momentum", of: (t, i) => rate((c) => damped(t, i, c)) },
  plain: { axes: "Tim", what: "place under plain attention", values: plain },
  dx: { id: "dSYMP.x", back: true, passes: 1, axes: "Tim", what: "gradient of a place", of: (t, i, c) =>
    t < K.layers ? add(dx(t + 1, i, c), through(rate_x(t, i), (l) => y(t, i, l), (l) => dy(t, i, l), along_y(t, i), c)) : i === S.i ? sub(x(t, i, c), target(c)) : words("for the loss looks at another token", 0) },
  dp: { id: "dSYMP.p", back: true, passes: 1, axes: "Tim", what: "gradient of a momentum", of: (t, i, c) => (t < K.layers ? add(dkicked(t, i, c), mul(2, div(du(t, i), pow(z(t, i), 2)), p(t, i, c))) : nothing) },
  dvelocity: { id: "dSYMP.17", back: true, axes: "tim", what: "gradient of a velocity", of: (t, i, c) => mul(h_x, dx(t + 1, i, c)) },
  dh_x: { id: "dSYMP.h_x", back: true, axes: "t", symbol: "dh_x", what: "gradient of the drift, in this layer", of: (t) => every((i, c) => mul(dx(t + 1, i, c), velocity(t, i, c))) },
  along_p: { axes: "ti", symbol: "mean dP P", what: "how far the gradient of P points along P", of: (t, i) => mean(C.map((c) => mul(dp(t + 1, i, c), p(t + 1, i, c)))) },
  ddamped: { id: "dSYMP.16", back: true, axes: "tim", symbol: "dp'", what: "gradient of p′", of: (t, i, c) => add(through(rate_p(t, i), (l) => p(t + 1, i, l), (l) => dp(t + 1, i, l), along_p(t, i), c), div(dvelocity(t, i, c), z(t, i))) },
  dkicked: { id: "dSYMP.14", back: true, axes: "tim", what: "gradient of the kicked momentum", of: (t, i, c) => mul(exp(neg(damping(t))), ddamped(t, i, c)) },
  ddamping: { id: "dSYMP.15", back: true, axes: "t", what: "gradient of the damping", of: (t) => neg(every((i, c) => mul(ddamped(t, i, c), damped(t, i, c)))) },
  dc_log: { id: "dSYMP.c_log", back: true, axes: "t", symbol: "dc_log", what: "gradient of the friction, in this layer", of: (t) => mul(ddamping(t), log1p(div(h_y, time(t)))) },
  dforce: { id: "dSYMP.13", back: true, axes: "tim", what: "gradient of a force", of: (t, i, c) => mul(h_y, dkicked(t, i, c)) },
  dh_y: { id: "dSYMP.h_y", back: true, axes: "t", symbol: "dh_y", what: "gradient of the kick, in this layer", of: (t) => add(every((i, c) => mul(dkicked(t, i, c), force(t, i, c))), mul(ddamping(t), add(div(c_log, add(time(t), h_y)), LIN))) },
  dout: { id: "dSYMP.12", back: true, axes: "tim", symbol: "do", what: "gradient of a push", of: (t, i, c) => dforce(t, i, c) },
  dv: { id: "dSYMP.4", back: true, axes: "tim", what: "gradient of v", of: (t, j, c) => sum(J.filter((i) => i >= j).map((i) => mul(a(t, i, j), z(t, i), dout(t, i, c)))) },
  da: { id: "dSYMP.11", back: true, axes: "tij", what: "gradient of a push’s strength", of: (t, i, j) => mul(z(t, i), dot(C.map((c) => dout(t, i, c)), C.map((c) => v(t, j, c)))) },
  dw: { id: "dSYMP.6", back: true, axes: "tij", what: "gradient of a weight", of: (t, i, j) => mul(da(t, i, j), add(1, div(add(u(t, i), u(t, j)), 2))) },
  du: { id: "dSYMP.10", back: true, axes: "ti", what: "gradient of u", of: (t, i) => div(sum([...before(i).map((j) => mul(da(t, i, j), w(t, i, j))), ...J.filter((l) => l >= i).map((l) => mul(da(t, l, i), w(t, l, i)))]), 2) },
  dlogz: { id: "dSYMP.7", back: true, axes: "ti", symbol: "dlog z", what: "gradient of the mass’s logarithm", of: (t, i) =>
    sub(sub(dot(C.map((c) => dout(t, i, c)), C.map((c) => o(t, i, c))), dot(C.map((c) => dvelocity(t, i, c)), C.map((c) => velocity(t, i, c)))), mul(2, du(t, i), u(t, i))) },
  ds: { id: "dSYMP.5", back: true, axes: "tij", what: "gradient of a score", of: (t, i, j) =>
    j > i ? words("as it comes later", 0) : mul(w(t, i, j), add(sub(dw(t, i, j), sum(before(i).map((l) => mul(w(t, i, l), dw(t, i, l))))), dlogz(t, i))) },
  dq: { id: "dSYMP.2", back: true, axes: "tim", what: "gradient of a query", of: (t, i, c) => sum(before(i).map((j) => div(mul(ds(t, i, j), k(t, j, c)), sqrt(C.length)))) },
  dk: { id: "dSYMP.3", back: true, axes: "tim", what: "gradient of a key", of: (t, j, c) => sum(J.filter((i) => i >= j).map((i) => div(mul(ds(t, i, j), q(t, i, c)), sqrt(C.length)))) },
  along_y: { axes: "ti", symbol: "mean dy y", what: "how far the gradient of y points along y", of: (t, i) => mean(C.map((c) => mul(dy(t, i, c), y(t, i, c)))) },
  dy: { id: "dSYMP.1", back: true, axes: "tim", what: "gradient of y", of: (t, i, c) => add(mul(MATCH, dq(t, i, c)), dk(t, i, c), dv(t, i, c)) },
};

// What a usual residual block does with the same weights: each token moves along the mean of what it attends to.
function plain() {
  const places = [DATA.start];
  for (let t = 0; t < K.layers; t += 1) {
    const rows = places[t].map((row) => {
      const middle = row.reduce((n, m) => n + m, 0) / row.length, size = Math.sqrt(row.reduce((n, m) => n + (m - middle) ** 2, 0) / row.length + EPS);
      return row.map((n) => (n - middle) / size);
    });
    places.push(places[t].map((row, i) => {
      const powers = before(i).map((j) => Math.exp((MATCH * row.reduce((n, _, c) => n + rows[i][c] * rows[j][c], 0)) / Math.sqrt(row.length)));
      const total = powers.reduce((n, m) => n + m, 0);
      return row.map((n, c) => n + K.h_x * powers.reduce((m, power, j) => m + (power / total) * rows[j][c], 0));
    }));
  }
  return places;
}

const main = (list) => list.map(Math.abs).indexOf(Math.max(...list.map(Math.abs)));
const steepest = () => main(C.map((c) => V.dx(K.layers, S.i, c)));
const pusher = () => main(before(S.i).map((j) => V.a(now(), S.i, j)));

// ---- pictures: the words with a bar each, and beside them the particles --------------------------------------------------

const FLAT = [[1, -1, 0].map((n) => n / Math.sqrt(2)), [1, 1, -2].map((n) => n / Math.sqrt(6))]; // across (1, 1, 1): the plane of what has mean 0
const across = (p) => FLAT.map((row) => row.reduce((n, m, c) => n + m * p[c], 0));
const moved = (list, [x, y]) => [x, y].map((z, n) => z - across(list)[n]).forEach((z, n) => FLAT[n].forEach((a, c) => { list[c] += z * a; }));
const far = Math.sqrt(C.length);
const placed = (name, t, i) => across(C.map((c) => V[name](t, i, c)));
function between(name, at, i) {
  const n = Math.min(Math.floor(at), K.layers), part = at - n, here = placed(name, n, i);
  return part < 1e-9 ? here : here.map((m, c) => m + part * (placed(name, n + 1, i)[c] - m));
}
const moment = () => S.at ?? S.t;
const within = () => Math.min(moment(), K.layers - 1); // where the layer begins that a card is about
const size = (p) => Math.hypot(...p);
const sized = (name, t = now()) => J.map((j) => size(C.map((c) => V[name](t, j, c))));
const each = (name) => J.map((j) => V[name](now(), j));
const sums = (p, q, by = 1) => p.map((x, c) => x + by * q[c]);
const of = (name) => (j) => `${name}.${now()}.${S.i}.${j}`;
const seen = (numbers) => J.map((j) => (j > S.i ? 0 : numbers(j)));

// The plane that all places need; at the same knobs it stays, also while the goal is dragged.
const extents = {};
const extent = () => (extents[JSON.stringify(K)] ??= [[far, far], [-far, -far], across(DATA.target), ...["x", "plain"].flatMap((name) => Array.from({ length: K.layers + 1 }, (_, t) => J.map((j) => placed(name, t, j))).flat())]);

// The particles with their names, where they are at a time, after their ways.
function particles(b, at, { name = "x", radius = () => 1, faded = () => false, where = (j) => between(name, at, j), ways = true, tag = "", points = extent(), taken = [] } = {}) {
  const area = plane(b.left, b.top, Math.min(b.size, b.wide), points, b.wide), place = (p) => [area.X(p), area.Y(p)], here = J.map(where), r = (j) => (b.quiet ? 3.5 : j === S.i ? 7 : 5.5) * radius(j);
  const called = labels(b.left + b.wide, b.top + b.size, 13, [...here.map((p, j) => [p, r(j)]), ...taken.map((p) => [p, 4])].map(([p, half]) => [area.X(p) - half, area.Y(p) - half, area.X(p) + half, area.Y(p) + half]), b.left, b.top);
  const path = (j) => [...Array.from({ length: Math.floor(at + 1e-9) + 1 }, (_, t) => placed(name, t, j)), here[j]].map(place);
  const ground = [area.ground, ways ? J.map((j) => line(`${tag}path.${j}`, path(j), { style: `stroke:${color(j)}`, "stroke-width": j === S.i ? 2.2 : 1.3, opacity: 0.6 })) : []];
  const dots = J.map((j) => [
    point(`${tag}dot.${j}`, ...place(here[j]), r(j), j, { opacity: faded(j) ? 0.35 : 1, ...(j === S.i ? { "stroke-width": 2, style: `fill:${color(j)};stroke:var(--ink)` } : {}) }),
    b.quiet ? [] : called(DATA.tokens[j], ...place(here[j]), r(j) + 1, j === S.i ? "name strong" : "name", placed("kicked", now(), j)[1] > 0 ? [1, 2, 3, 0] : [0, 3, 2, 1]),
  ]);
  // Momenta have a scale of their own: that of the token that is followed is long, and stays within the plane.
  const [left, top, right, bottom] = area.box, kicked = placed("kicked", now(), S.i), [x, y] = place(here[S.i]), rest = [[kicked[0], x - left, right - x], [-kicked[1], y - top, bottom - y]].map(([step, low, high]) => Math.max(8, step < 0 ? low : high) / Math.max(1e-9, Math.abs(step)));
  const long = Math.min((0.4 * (bottom - top)) / Math.max(far, size(kicked)), ...rest);
  const push = (key, j, p, set, from = [0, 0]) => { const start = place(here[j]), to = ([x, y]) => [start[0] + long * x, start[1] - long * y]; return vector(key, ...to(from), ...to(sums(from, p)), set); };
  return { area, place, here, ground, dots, long, push };
}

const later = { faded: (j) => j > S.i };
const momentum = (f, name, j = S.i, t = now()) => f.push(`momentum.${j}`, j, placed(name, t, j), { style: `stroke:${j === S.i ? "var(--ink)" : color(j)}`, ...(j === S.i ? { class: "vector thick" } : {}) });
const thin = { class: "vector dashed", opacity: 0.6 };

// Directions: tokens on a circle around the centre.
function directions(b, more = {}) {
  const f = particles(b, within(), { where: (j) => placed("y", now(), j), ways: false, ...more }), zero = f.place([0, 0]);
  const circle = mark("circle", "circle", { cx: zero[0], cy: zero[1], r: far * f.area.unit, class: "ghost" });
  return { ...f, zero, ground: [f.ground, circle] };
}

const alone = { points: [[far, far], [-far, -far]] }; // where the circle is all that is drawn

function look(b) {
  const f = particles(b, within(), { ways: false, taken: flatly("y") }), d = directions(b);
  return [d.ground, J.map((j) => [line(`ray.${j}`, [d.zero, f.place(f.here[j]), f.place(d.here[j])], { class: "hair dashed", style: `stroke:${color(j)}` }), mark(`foot.${j}`, "circle", { cx: f.place(d.here[j])[0], cy: f.place(d.here[j])[1], r: b.quiet ? 2.5 : 4, class: "foot", style: `fill:var(--paper);stroke:${color(j)}`, "stroke-width": 2 })]), f.dots];
}

function attend(b) {
  const d = directions(b, { ...later, ...alone });
  return [d.ground, J.map((j) => vector(`key.${j}`, ...d.zero, ...d.place(d.here[j]), { style: `stroke:${color(j)}`, opacity: j > S.i ? 0.3 : 1 })), feet(d.area, d.here, d.here[S.i], b.quiet), vector("query", ...d.zero, ...d.place(placed("q", now(), S.i)), { class: "vector thick" }), d.dots];
}

// Lines from the token that is followed to those that it sees, and a loop to itself, on the side where no other token is, as
// wide as a number is large; dashed where it is below 0. Those of later tokens are pale, if they are drawn.
function bonds(f, number, later = false) {
  const numbers = J.map((j) => (j > S.i && !later ? 0 : number(j))), largest = Math.max(1e-12, ...numbers.map(Math.abs)), [x, y] = f.place(f.here[S.i]);
  const [left, top, right, bottom] = f.area.box, r = 0.024 * (bottom - top), others = J.reduce((all, j) => all + f.place(f.here[j])[0], 0) / J.length, loop = (x > others && x < right - 4 * r) || x < left + 4 * r ? 1 : -1;
  return J.map((j) => line(`bond.${j}`, j === S.i ? Array.from({ length: 25 }, (_, n) => [x + loop * 1.8 * r * (1 - Math.cos((n * Math.PI) / 12)), y + r * Math.sin((n * Math.PI) / 12)]) : [[x, y], f.place(f.here[j])], { class: numbers[j] < 0 ? "flow dashed" : "flow", style: `stroke:${color(j)}${j > S.i ? ";opacity:0.2" : ""}`, "stroke-width": Math.min(9, 0.03 * (bottom - top)) * Math.abs(numbers[j] / largest) }));
}
const heavy = (j) => Math.sqrt(V.z(now(), j)) * 1.3;
function weigh(b) {
  const f = particles(b, within(), { radius: heavy });
  return [f.ground, bonds(f, (j) => Math.exp(V.s(now(), S.i, j))), f.dots];
}

function speed(b) {
  const lightest = Math.min(...each("z")), f = particles(b, within(), { radius: heavy });
  return [f.ground, J.map((j) => f.push(`momentum.${j}`, j, placed("p", now(), j).map((x) => (x * lightest) / V.z(now(), j)), { style: `stroke:${j === S.i ? "var(--ink)" : color(j)}`, ...(j === S.i ? { class: "vector thick" } : {}) })), f.dots];
}

function push(b) {
  const n = now(), f = particles(b, within(), later);
  let here = [0, 0];
  const chain = before(S.i).map((j) => { const from = here, p = placed("v", n, j).map((x) => V.z(n, S.i) * V.a(n, S.i, j) * x); here = sums(here, p); return f.push(`push.${j}`, S.i, p, { style: `stroke:${color(j)}` }, from); });
  return [f.ground, f.dots, chain, f.push("force", S.i, here, { class: "vector thick" })];
}

function kick(b) {
  const n = now(), f = particles(b, within());
  return [f.ground, f.dots, f.push("was", S.i, placed("kicked", n, S.i), thin), momentum(f, "p"), f.push("force", S.i, placed("force", n, S.i).map((x) => K.h_y * x), { style: `stroke:${color(S.i)}`, "stroke-width": 2.6 }, placed("p", n, S.i))];
}

function damp(b) {
  const f = particles(b, within());
  return [f.ground, f.dots, f.push("was", S.i, placed("kicked", now(), S.i), thin), momentum(f, "damped")];
}

// The particles after the drift, with rings where they were.
const after = (b, set) => particles(b, within() + 1, set);
const places = (b, f) => J.map((j) => mark(`ring.${j}`, "circle", { cx: f.place(between("x", within(), j))[0], cy: f.place(between("x", within(), j))[1], r: b.quiet ? 3.5 : 6, class: "ghost", style: `stroke:${color(j)}` }));
function drift(b) {
  const f = after(b, { faded: () => true, radius: () => 0.7, taken: flatly("x") });
  return [f.ground, places(b, f), f.dots, J.map((j) => vector(`way.${j}`, ...f.place(between("x", within(), j)), ...f.place(f.here[j]), { style: `stroke:${j === S.i ? "var(--ink)" : color(j)}`, ...(j === S.i ? { class: "vector thick" } : {}) }))];
}

function pass(b) {
  const n = now(), f = after(b), [x, y] = f.place(f.here[S.i]);
  return [f.ground, f.dots, mark("circle", "circle", { cx: x, cy: y, r: far * f.long, class: "ghost" }), momentum(f, "p", S.i, n + 1), f.push("was", S.i, placed("damped", n, S.i), thin)];
}

// The first picture: with momentum, and by plain attention.
function overview(W, H, small) {
  const back = S.side === "backward", quiet = small || W < 420, top = quiet ? 4 : 26, left = small ? 0 : quiet ? 76 : 112, half = (W - left - 10) / 2, b = { left, top, size: H - top - 4, wide: half, quiet };
  const listed = small ? [] : rows(DATA.tokens, S.i, scale(0, Math.max(1, J.length - 1), top + 14, H - 16), left - 6);
  const rolling = particles(b, moment()), plainly = particles({ ...b, left: left + half + 10 }, moment(), { name: "plain", tag: "plain " });
  const head = quiet ? [] : [[left, back ? "where places should move" : `momenta (arrows); lines, loop: pushes on ${DATA.tokens[S.i]}`], [left + half + 10, "plain attention (its step is h_x, too)"]].map(([x, told]) => text(x, 12, told, { class: "title" }));
  const arrows = back ? downhill(rolling, "dx", moment()) : J.map((j) => rolling.push(`momentum.${j}`, j, between("p", moment(), j).map((x) => 0.6 * x), { style: "stroke:var(--ink)" }));
  return [listed, head, rolling.ground, plainly.ground, back ? [] : bonds(rolling, (j) => V.a(now(), S.i, j)), rolling.dots, arrows, plainly.dots, back ? goal(b, rolling) : []];
}

// Backwards: arrows against gradients, all as many times as long as there is room for.
const goal = (b, f) => aimed(b, f.area, across(DATA.target), (p) => moved(DATA.target, p), "goal");
const longest = (lists) => Math.max(1e-12, ...lists.flat().map(size));
function against(f, key, gradients, set = () => ({}), unit = longest([gradients])) {
  const long = (0.22 * (f.area.box[3] - f.area.box[1])) / unit;
  return gradients.map((p, j) => { const [x, y] = f.place(f.here[j]); return size(p) * long < 2 ? [] : vector(`${key}.${j}`, x, y, x - long * p[0], y + long * p[1], { style: `stroke:${j === S.i ? "var(--ink)" : color(j)}`, ...(j === S.i ? { class: "vector thick" } : {}), ...set(j) }); });
}
const flatly = (name, t = now()) => J.map((j) => placed(name, t, j));
const downhill = (f, name, at) => against(f, "down", J.map((j) => between(name, at, j)));
const dashed = () => thin;

function wish(b) {
  const f = particles(b, K.layers), target = f.place(across(DATA.target)), here = f.place(f.here[S.i]), [l, t, e, u] = f.area.box;
  const most = Math.max(0, Math.min(Math.hypot(target[0] - here[0], target[1] - here[1]), target[0] - l, e - target[0], target[1] - t, u - target[1]));
  return [f.ground, rings(target, most), f.dots, vector(`down.${S.i}`, ...here, ...target, { class: "vector thick" }), goal(b, f)];
}
// Arrows against the gradients of something that each token has, at the places, and before them what it is now.
const pull = (name) => (b) => {
  const f = particles(b, within());
  return [f.ground, f.push("was", S.i, placed(name, now(), S.i), thin), f.dots, against(f, "down", flatly(`d${name}`)), goal(b, f)];
};
function toMomentum(b) {
  const n = now(), moves = J.map((j) => placed("dvelocity", n, j).map((x) => x / V.z(n, j))), all = flatly("ddamped"), f = particles(b, within());
  return [f.ground, f.dots, against(f, "was", moves, dashed, longest([moves, all])), against(f, "down", all, undefined, longest([moves, all])), goal(b, f)];
}
function throughFriction(b) {
  const f = particles(b, within()), unit = longest([flatly("ddamped")]);
  return [f.ground, f.dots, against(f, "was", flatly("ddamped"), dashed, unit), against(f, "down", flatly("dkicked"), undefined, unit), goal(b, f)];
}
function toPushers(b) {
  const n = now(), grad = placed("dout", n, S.i), d = directions(b, { ...later, ...alone }), by = (0.8 * far) / (size(grad) || 1);
  return [d.ground, J.map((j) => vector(`key.${j}`, ...d.zero, ...d.place(d.here[j]), { style: `stroke:${color(j)}`, opacity: j > S.i ? 0.3 : 1 })), feet(d.area, d.here, grad, b.quiet), vector(`down.${S.i}`, ...d.zero, ...d.place(grad.map((x) => by * x)), { class: "vector thick" }), b.quiet ? [] : label("do name", d.area.X(grad.map((x) => by * x)) + 8, d.area.Y(grad.map((x) => by * x)), "do", { class: "name strong" }), d.dots];
}
function toWeights(b) {
  const n = now(), strongest = Math.max(1e-12, ...each("du").map(Math.abs)), f = particles(b, within(), { ...later, radius: (j) => 0.6 + 1.2 * Math.sqrt(Math.abs(V.du(n, j)) / strongest) });
  return [f.ground, bonds(f, (j) => V.dw(n, S.i, j), true), f.dots, goal(b, f)];
}
function toIncoming(b) {
  const n = now(), f = particles(b, within());
  return [f.ground, J.map((j) => f.push(`momentum.${j}`, j, placed("p", n, j), thin)), f.dots, against(f, "down", flatly("dp", n)), goal(b, f)];
}
function toMass(b) {
  const n = now(), strongest = Math.max(1e-12, ...each("dlogz").map(Math.abs)), f = particles(b, within(), { radius: heavy });
  return [f.ground, f.dots, J.map((j) => mark(`ring.${j}`, "circle", { cx: f.place(f.here[j])[0], cy: f.place(f.here[j])[1], r: (b.quiet ? 3.5 : 6) * heavy(j) * Math.exp((-0.8 * V.dlogz(n, j)) / strongest), class: "ghost", style: "stroke:var(--ink)" })), goal(b, f)];
}
function toScores(b) {
  const n = now(), f = particles(b, within(), { ...later, radius: (j) => (j > S.i ? 1 : 0.7 + V.w(n, S.i, j)) });
  return [f.ground, bonds(f, (j) => -V.ds(n, S.i, j)), f.dots, goal(b, f)];
}
function toDirections(b) {
  const d = directions(b, alone);
  return [d.ground, d.dots, against(d, "down", flatly("dy"))];
}
function toPlaces(b) {
  const f = particles(b, moment());
  return [f.ground, f.dots, downhill(f, "dx", moment()), goal(b, f)];
}

// ---- cards -------------------------------------------------------------------------------------------------------------

const forward = [
  { id: "SYMP.1", title: "Look at the direction alone", when: "step", show: [["x", "y"], ["mean_x[i]", "rate_x[i]"]], pick: () => ["y", now(), S.i, 0],
    bars: () => [J.map((j) => size(placed("x", now(), j))), "distance (does not count)"], heading: "places, and their directions on the circle", draw: look,
    say: () => `A token is a place x in space, with three elements. To be compared, it is shifted and scaled to mean 0 and variance 1 (LayerNorm, here with gains of 1). The squares of its elements then add up to 3: the circle has a radius of √3 = ${show(far)}. The picture leaves out the mean of the three elements, as the comparison does. The slider counts finished layers: this is layer ${now() + 1}.`,
    alt: "The tokens as points, and where the ray from the centre to each meets a circle",
    caption: "Where the ray through a token meets the circle is its direction y. How far out it is does not count." },
  { id: ["SYMP.5", "SYMP.6"], title: "Compare and attend", when: "step", show: [["k", "s[i]", "w[i]"], ["q[i]"]], pick: () => ["w", now(), S.i, pusher()],
    bars: () => [seen((j) => V.w(now(), S.i, j)), "weight w", of("w")], heading: "directions: the query’s, and the keys’ feet on its line", draw: attend,
    say: `A token has a query (what it looks for), a key (what it offers) and a value v (where it pushes). A model learns matrices for them; here key and value are y itself, and the query is ${show(MATCH)} y. A token sees itself and those before it (causal).`,
    alt: "Directions of the tokens as arrows, each with its foot on the line of the query",
    caption: () => (S.i === 0 ? "The first token sees only itself." : `A foot far along the query is a high score. ${word()} attends most to ${names([heaviest((j) => V.w(now(), S.i, j))])}; pale tokens come later and are not seen.`) },
  { id: "SYMP.7", title: "Weigh", when: "step", show: [["s[i]"], ["logz[i]", "z[i]"]], pick: () => ["logz", now(), S.i],
    bars: ["z", "mass z"], heading: "the larger, the heavier; lines, loop: e to the score", draw: weigh,
    say: "A token that matches well what it sees has a large mass z. The push is z times as strong (step 5), and the velocity is the momentum divided by z (step 8): for a new push this z cancels. So mass slows only the momentum that earlier layers left (the speeds of step 4).",
    alt: "The tokens as points, the larger, the greater their mass",
    caption: () => `The mass of ${word()} is ${show(V.z(now(), S.i))}: the mean, over the tokens that it sees, of e to the score.` },
  { id: ["SYMP.9", "SYMP.10"], title: "Measure the speed", when: "step", show: [["p", "e", "z", "u"]], pick: () => ["u", now(), S.i],
    bars: ["u", "speed u, squared"], heading: "p / z, arrows to scale", draw: speed,
    say: () => `Momentum over mass is speed, and u is its square. A model learns a matrix w<sub>b</sub> for b; here it changes nothing, so b is p. ${S.t === 0 ? "Before the first layer all tokens rest." : "From the second layer on each momentum has the same length, so light tokens come in fast. What the new push adds is another matter (step 8)."}`,
    alt: "The tokens with momentum over mass as arrows",
    caption: () => (now() === 0 ? "Before the first layer all tokens rest: there are no arrows." : `Arrows: p / z. All momenta are equally long, so the lightest token, ${names([[...J].sort((a, b) => V.u(now(), b) - V.u(now(), a))[0]])}, is the fastest.`) },
  { id: ["SYMP.11", "SYMP.12"], title: "Push", when: "step", show: [["w[i]", "u", "a[i]", "v"], ["z[i]", "o[i]"]], pick: () => ["o", now(), S.i, 0],
    bars: () => [seen((j) => V.a(now(), S.i, j)), "strength a", of("a")], heading: () => `pushes on ${DATA.tokens[S.i]}, one after the other`, draw: push,
    say: "A token is pushed in the directions of those that it attends to, also its own. Why do speeds count? Call p²/(2z) − z/2 a token’s energy: motion, minus a reward for matching. A force points where energy falls. Moving y<sub>i</sub> along key j raises s<sub>ij</sub> and the mass: so the push points along v<sub>j</sub> (here the key; a model learns both). As z grows, the energy falls at the rate (1 + u)/2. If i and j saw each other, both masses would grow, and both rates add up to the factor in brackets. Here only the later one sees the other, yet the factor stays.",
    alt: () => `The pushes on ${DATA.tokens[S.i]} as a chain of arrows, one for each token that it sees`,
    caption: () => `One arrow for each token that ${word()} sees; the strongest is that of ${names([heaviest((j) => V.a(now(), S.i, j))])}. Thick: all of them together.` },
  { id: ["SYMP.13", "SYMP.14"], title: "Kick", when: "step", show: [["p[i]"], ["force[i]"], ["kicked[i]"]], pick: () => ["kicked", now(), S.i, 0],
    bars: ["kicked", "length of kicked"], heading: "p, then the kick h_y · force: kicked", draw: kick,
    say: "The force does not move the token. It changes its momentum, for a time h<sub>y</sub>, the knob “kick”. What was there before remains. Here w<sub>o</sub> changes nothing, so the force is the push o.",
    alt: "The momentum before and after the force has acted on it",
    caption: () => (now() === 0 ? `${word()} rested, so its momentum is now the kick: the force times h<sub>y</sub>.` : `Thick: the old momentum of ${word()}, ${show(came(S.i))} long. In colour: the kick, ${show(kickOf(S.i))}. Dashed: their sum, kicked.`) },
  { id: ["SYMP.15", "SYMP.16"], title: "Damp", when: "step", show: [["kicked[i]"], ["damping"], ["damped[i]"]], pick: () => ["damped", now(), S.i, 0],
    bars: ["damped", "length of p′"], heading: "kicked (dashed), and p′ after friction", draw: damp,
    say: () => `${percent(Math.exp(-V.damping(now())))} of all momenta remain in this layer. Friction is c<sub>log</sub> / t + c<sub>lin</sub>, for as long as the kick, h<sub>y</sub>. c<sub>log</sub> is the knob “friction”; c<sub>lin</sub> is next to nothing here, ${LIN}. The time t is 1 at first. The authors let it grow by the time of the drift, h<sub>x</sub>, in each layer. ${K.c_log > 0 ? "So friction weakens. " : ""}Models start with c<sub>log</sub> = 3, here it is ${show(K.c_log)}. A friction of 3 / t is that of Nesterov’s accelerated descent, which soon reaches the lowest point of a convex energy; this energy is not convex.`,
    alt: "The momentum before and after friction",
    caption: () => `${percent(Math.exp(-V.damping(now())))} of the dashed arrow remain, as of those of all tokens. No token has moved yet.` },
  { id: ["SYMP.17", "SYMP.18"], title: "Drift", when: "step", show: [["damped[i]", "z[i]"], ["velocity[i]"], ["x[i]", "x[i]+1"]], pick: () => ["x", now() + 1, S.i, 0],
    bars: () => [sized("velocity").map((x) => K.h_x * x), "way h_x · velocity"], heading: "from the rings to the new places", draw: drift,
    say: "The velocity is momentum over mass, and moves the token for a time h<sub>x</sub>, the knob “drift”. First the kick, then the drift with the new momentum: such steps (symplectic) nearly keep the energy of a ball that rolls without friction. This layer does not promise it: a token does not see later ones, the kick takes the old speeds, and step 9 changes the length of the momentum.",
    alt: "Arrows from the old places to the new ones",
    caption: () => `Now the tokens move, along their momenta: ${word()} by ${show(K.h_x * size(C.map((c) => V.velocity(now(), S.i, c))))}, from the ring to the arrow’s tip.` },
  { id: "SYMP.19", title: "Pass the momentum on", when: "step", show: [["damped[i]"], ["rate_p[i]"], ["p[i]+1"]], pick: () => ["p", now() + 1, S.i, 0],
    bars: () => ["p", "length of P", [now() + 1]], heading: "p′ (dashed) gets the length of the circle: P", draw: pass,
    say: () => `The next layer gets the momentum, brought to a fixed length: only its direction goes on, and friction slows the drift of its own layer alone.${turned()}`,
    alt: "The momentum, brought to a fixed length",
    caption: () => `The thick arrow is √3 = ${show(far)} long, ${size(C.map((c) => V.damped(now(), S.i, c))) > far ? "shorter" : "longer"} than the dashed one: only the direction goes on.` },
];

const backward = [
  { title: "What is wished for", of: "SYMP.18", formula: "dx = x - goal", when: "last", show: [["x[i].last"], ["target"], ["dx[i].last"]], pick: () => ["dx", K.layers, S.i, steepest()],
    bars: () => [J.map((j) => (j === S.i ? size(C.map((c) => V.dx(K.layers, j, c))) : 0)), "|dx| after the last layer"], heading: "from the last place to what is wished for", draw: wish,
    say: () => `Suppose that ${word()} should have come to a goal, the cross. The loss is half the squared distance after the last layer, and its gradient is the difference.`,
    alt: "The last places of the tokens, and an arrow to the goal",
    caption: () => `The arrow from ${word()} to the cross is −dx, ${show(size(C.map((c) => V.dx(K.layers, S.i, c))))} long. Drag the goal.` },
  { id: ["dSYMP.17", "dSYMP.h_x"], of: "SYMP.18", title: "To the velocity", when: "step", show: [["dx[i]+1"], ["dvelocity[i]"], ["dh_x"]], pick: () => ["dvelocity", now(), S.i, steepest()],
    bars: ["dvelocity", "|d velocity|"], heading: "velocity (dashed), and where it should change", draw: pull("velocity"),
    say: "A velocity acted for a time h<sub>x</sub>, so it gets h<sub>x</sub> times the gradient of the place. The gradient of h<sub>x</sub> adds up, for all tokens, how far the velocity points where the loss grows.",
    alt: "Velocities, and arrows by which they should change",
    caption: () => `${negligible("dvelocity") || "Arrows (−d): how velocities should change."} In this layer a longer drift h<sub>x</sub> would ${V.dh_x(now()) > 0 ? "raise" : "lower"} the loss.` },
  { id: "dSYMP.16", of: ["SYMP.17", "SYMP.19"], title: "To the momentum", when: "step", show: [["dvelocity[i]", "z[i]"], ["dp[i]+1", "along_p[i]"], ["ddamped[i]"]], pick: () => ["ddamped", now(), S.i, steepest()],
    bars: ["ddamped", "|dp′|"], heading: "of the move now (dashed), and with the next layer", draw: toMomentum,
    say: "The momentum was used twice: it moved the token now, and it was passed on to the next layer. Both gradients add up.",
    alt: "Arrows against the gradients of the momenta, of this layer and with the next",
    caption: () => negligible("ddamped") || (now() === K.layers - 1 ? "No layer follows, so both arrows are the same: only the move in this layer counts." : "Dashed: because the momentum moves the token now. In full: with what it does in the next layers.") },
  { id: ["dSYMP.14", "dSYMP.15"], of: "SYMP.16", title: "Through the friction", when: "step", show: [["ddamped[i]"], ["dkicked[i]"], ["ddamping", "dc_log"]], pick: () => ["dkicked", now(), S.i, steepest()],
    bars: ["dkicked", "|d kicked|"], heading: "−d kicked (thick), −dp′ (dashed)", draw: throughFriction,
    say: "Friction left a part of the momentum, and the same part of the gradient goes through. The arrows point against the gradients, to where the loss falls.",
    alt: "The same arrows, shorter",
    caption: () => negligible("ddamped") || `The gradients shrink as the momenta did, to ${percent(Math.exp(-V.damping(now())))}. In this layer more friction would ${V.ddamping(now()) > 0 ? "raise" : "lower"} the loss.` },
  { id: ["dSYMP.13", "dSYMP.12"], of: ["SYMP.14", "SYMP.13"], title: "To the force", when: "step", show: [["dkicked[i]"], ["dforce[i]"], ["dh_y"]], pick: () => ["dforce", now(), S.i, steepest()],
    bars: ["dforce", "|d force|"], heading: "force (dashed), and where it should change", draw: pull("force"),
    say: "The force acted for a time h<sub>y</sub>, so its gradient is h<sub>y</sub> times that of the kicked momentum.",
    alt: "Forces, and arrows by which they should change",
    caption: () => negligible("dforce") || `Dashed: the force on ${word()}. In full: how it should change. Here a longer kick would ${V.dh_y(now()) > 0 ? "raise" : "lower"} the loss.` },
  { id: ["dSYMP.11", "dSYMP.4"], of: "SYMP.12", title: "To who pushed", when: "step", show: [["v", "da[i]"], ["z[i]", "dout[i]"], ["dv"]], pick: () => ["da", now(), S.i, pusher()],
    bars: ["da", "gradient da"], heading: "directions v, and their feet on the line of do", draw: toPushers,
    say: "A push is good if it points where the loss falls. Its strength gets this gradient, and its direction v the rest.",
    alt: "Directions of the tokens, each with its foot on the line of the gradient of the push",
    caption: () => negligible("dforce", now(), [S.i]) || `The further a foot lies along do, the more a stronger push from there raises the loss: most that of ${names([before(S.i).reduce((a, j) => (V.da(now(), S.i, j) > V.da(now(), S.i, a) ? j : a))])}.` },
  { id: ["dSYMP.6", "dSYMP.10"], of: "SYMP.11", title: "To weights and speeds", when: "step", show: [["u", "da[i]", "dw[i]", "du"]], pick: () => ["dw", now(), S.i, pusher()],
    bars: ["dw", "gradient dw"], heading: "lines, loop: |dw|, dashed below 0; size: |du|", draw: toWeights,
    say: "The strength was a weight times a factor of the speeds. The speed of a token is in all pushes on it, and in all pushes by it. A weight of a later token has a gradient, too (pale), but stays 0.",
    alt: "Lines from the token that is followed, as wide as the gradients of its weights",
    caption: () => negligible("dforce") || `Wide: weights that matter. Dashed: more of it lowers the loss. Large dots: speeds that matter.` },
  { id: "dSYMP.p", of: ["SYMP.14", "SYMP.9"], title: "To the momentum that came in", when: "step", show: [["dkicked[i]"], ["du[i]", "z[i]", "p[i]"], ["dp[i]"]], pick: () => ["dp", now(), S.i, steepest()],
    bars: ["dp", "|dp|"], heading: "momenta p (dashed), and where they should change", draw: toIncoming,
    say: "The incoming momentum remained after the kick, and it made the speed. This is what the layer before gets.",
    alt: "Momenta that came in, and arrows by which they should change",
    caption: () => negligible("dp") || (now() === 0 ? "All rested at the start; the arrows say in which direction a momentum would have helped." : "Dashed: the momenta that came in. In full: how each should change, for the layer before.") },
  { id: "dSYMP.7", of: "SYMP.7", title: "To the mass", when: "step", show: [["du[i]", "u[i]"], ["dlogz[i]"]], pick: () => ["dlogz", now(), S.i],
    bars: ["dlogz", "gradient dlog z"], heading: "dashed: what mass should become", draw: toMass,
    say: "A heavier token is pushed more, moves less by the same momentum, and has a smaller u. The three count against each other.",
    alt: "The tokens with rings, larger or smaller than they are",
    caption: () => (largestOf("dlogz") < 5e-5 ? "No mass matters to the loss here." : `A ring larger than its dot: more mass would lower the loss. Smaller: less mass would. It matters most for ${names([heaviest((j) => Math.abs(V.dlogz(now(), j)), J)])}.`) },
  { id: "dSYMP.5", of: ["SYMP.6", "SYMP.7"], title: "To the scores", when: "step", show: [["w[i]", "dw[i]", "ds[i]"], ["dlogz[i]"]], pick: () => ["ds", now(), S.i, pusher()],
    bars: () => [seen((j) => V.ds(now(), S.i, j)), "gradient ds", of("ds")], heading: "lines, loop: scores to be raised, dashed: lowered", draw: toScores,
    say: "Weights add up to one, so only what is beyond the mean counts. The gradient of the mass comes on top.",
    alt: "Lines from the token that is followed to those that it should attend to more, or less",
    caption: () => {
      const more = before(S.i).filter((j) => V.ds(now(), S.i, j) < -5e-4), less = before(S.i).filter((j) => V.ds(now(), S.i, j) > 5e-4);
      return !more.length && !less.length ? `No score of ${word()} in this layer needs to change.` : `${word()} should have a higher score with ${names(more) || "none"} (full lines), a lower one with ${names(less) || "none"} (dashed).`;
    } },
  { id: ["dSYMP.1", "dSYMP.2", "dSYMP.3"], of: "SYMP.5", title: "To the directions", when: "step", show: [["ds[i]", "k"], ["dq[i]"], ["dk[i]"], ["dv[i]"], ["dy[i]"]], pick: () => ["dy", now(), S.i, 0],
    bars: ["dy", "|dy|"], heading: "directions, and where they should go: −dy", draw: toDirections,
    say: "A direction was a query, a key and a push: its gradient is the sum of the three.",
    alt: "Directions of the tokens on a circle, and arrows by which they should change",
    caption: () => negligible("dy") || "Where the directions should go. Along the circle they turn; what would leave it, the norm takes out of the gradient of the place." },
  { id: "dSYMP.x", of: ["SYMP.1", "SYMP.18"], title: "To the places", when: "step", show: [["dy[i]", "along_y[i]"], ["dx[i]+1"], ["dx[i]"]], pick: () => ["dx", now(), S.i, steepest()],
    bars: () => ["dx", "|dx|", [S.t]], heading: "where places should move: −dx", draw: toPlaces,
    say: "The place went on to the next layer, and its direction was compared. This is the gradient for the layer before.",
    alt: "The tokens, and arrows by which their places should move",
    caption: caption },
];

const came = (j, t = now()) => size(C.map((c) => V.p(t, j, c)));
const kickOf = (j, t = now()) => K.h_y * size(C.map((c) => V.force(t, j, c)));
const turned = () => (now() === 0 ? "" : ` The direction carries on what earlier layers began. How much does it count? In this layer the momentum that came in was ${show(came(S.i))} long, and the kick ${show(kickOf(S.i))}.`);
const heaviest = (number, list = before(S.i)) => list.reduce((a, j) => (number(j) > number(a) ? j : a));
const largestOf = (name, t = now(), list = J) => Math.max(...list.flatMap((j) => (quantities[name].axes.length > 2 ? C.map((c) => V[name](t, j, c)) : [V[name](t, j)])).map(Math.abs));
const negligible = (name, t = now(), list = J) => (largestOf(name, t, list) < 5e-5 ? "Here next to nothing matters to the loss." : "");
const ways = (name) => size(C.map((c) => V[name](K.layers, S.i, c) - DATA.start[S.i][c]));

function caption() {
  const t = S.t, i = S.i, far = (name) => Math.hypot(...C.map((c) => V[name](t, i, c) - DATA.start[i][c]));
  if (S.side === "backward") {
    const size = Math.hypot(...C.map((c) => V.dx(t, i, c))), others = J.filter((j) => j !== i && Math.hypot(...C.map((c) => V.dx(t, j, c))) > 5e-4);
    const part = Math.max(0, ...others.map((j) => Math.hypot(...C.map((c) => V.dx(t, j, c))))) / size;
    if (size < 5e-5) return `${word()} is at its goal: nothing has to change.`;
    return `A small move along its arrow${t ? `, after layer ${t},` : ""} would bring ${word()} nearer to the goal${others.length ? `; moves of ${others.length === J.length - 1 ? "all others" : names(others)} count, too, up to ${part < 0.01 ? "1 %" : percent(part)} as much` : ""}.`;
  }
  if (t === 0) return `All tokens rest: they have no momentum. ${word()} is pushed by ${names(before(i))}.`;
  const ahead = far("x") - far("plain");
  return `After ${t === 1 ? "one layer" : `${t} layers`} ${word()} is ${show(far("x"))} away from its start, ${Math.abs(ahead) < 5e-4 ? "as far as" : ahead > 0 ? "further than" : "not as far as"} by plain attention (${show(far("plain"))}).`;
}

tour({
  title: "SympFormer",
  short: "Attention is a force, and words have momentum.",
  intro: () => [
    "Let tokens be <b>particles</b>. Attention pushes each one in the directions (seen from the centre, not from itself) of those that it attends to, also in its own.",
    "A usual layer moves a token by the push itself, as if in honey: each layer begins anew. Here the push is a <b>force</b>. It changes a momentum, friction shortens that, and it moves the token. Its direction goes on to the next layer, and the next push is added to it: a token starts slowly. Further is not better in itself.",
    `We follow ${word()}. Each layer is one step of the motion.`,
  ],
  turn: "To learn is to change numbers so that a loss falls. So we ask of every number how the loss changes with it: its gradient, written with a d in front. It comes back through the layers, the last one first.",
  sizes: { t: () => K.layers, T: () => K.layers + 1, m: () => C.length },
  quantities, forward, backward, caption,
  picture: overview,
  tasks: [
    { say: "raise the friction (damping) until plain attention goes as far", done: () => ways("x") <= ways("plain") },
    { say: "let it go more than 5 away from its start: layers, kick, drift (step size)", done: () => ways("x") > 5 },
    { say: "follow a token that no other token pushes", done: () => S.i === 0 },
    { say: "drag the goal (backwards) to where the token arrives", done: () => size(C.map((c) => V.dx(K.layers, S.i, c))) < 0.3 },
  ],
  time: { steps: () => K.layers, name: "layer", first: () => 2 },
  height: (W) => (W < 420 ? 112 : Math.min(450, Math.round(W * 0.5))),
  label: () => `Paths of ${J.length} tokens in a plane, with momentum and by plain attention`,
});
