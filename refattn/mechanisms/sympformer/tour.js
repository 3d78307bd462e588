// The tour of SympFormer: formulas, cards, picture.

const { start, target, x, p, time, mean_x, rate_x, y, q, k, v, s, w, z, logz, b, e, u, a, o, force, kicked, damping, damped, velocity, rate_p } = F;
const { dx, dp, dvelocity, ddamped, dkicked, ddamping, dforce, dout, dv, da, dw, du, dlogz, ds, dq, dk, dy, along_p, along_y } = F;
const C = DATA.start[0].map((_, c) => c), EPS = 1e-5, MATCH = DATA.match, LIN = DATA.c_lin;
const h_x = knob("h_x"), h_y = knob("h_y"), c_log = knob("c_log");
const mean = (list) => div(sum(list), C.length);
const rate = (vector) => div(1, sqrt(add(mean(C.map((c) => pow(sub(vector(c), mean(C.map(vector))), 2))), EPS)));
const before = (i) => J.filter((j) => j <= i); // the tokens that token i sees
const now = () => Math.min(S.t, K.layers - 1);
const word = () => `<b>${DATA.tokens[S.i]}</b>`;
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
  e: { id: "SYMP.9", axes: "ti", what: "length of the momentum, squared", of: (t, i) => dot(C.map((c) => b(t, i, c)), C.map((c) => p(t, i, c))) },
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

const forward = [
  {
    id: "SYMP.1", title: "Look at the direction alone", when: "step", show: [["x", "y"], ["mean_x[i]", "rate_x[i]"]], pick: () => ["y", now(), S.i, 0],
    say: "A token is a place x in space, with three elements. For the comparison it is shifted and scaled, so that their mean is 0 and their variance 1 (norm). A model learns gains; here they are 1. The picture has two dimensions: it leaves out the mean of the three, as the comparison does.",
  },
  {
    id: ["SYMP.5", "SYMP.6"], title: "Compare and attend", when: "step", show: [["k", "s[i]", "w[i]"], ["q[i]"]], pick: () => ["w", now(), S.i, pusher()],
    say: `Each token has a query (what it looks for), a key (what it offers) and a value v (where it pushes). A model learns matrices that make them; to keep it simple, here key and value are y itself, and the query is ${show(MATCH)} y. A token sees itself and those before it, as in a model that writes word by word.`,
  },
  {
    id: "SYMP.7", title: "Weigh", when: "step", show: [["s[i]"], ["logz[i]", "z[i]"]], pick: () => ["logz", now(), S.i],
    say: "The mean of the exponentials is the mass z. A token that matches others well is heavy, since its push is z times as strong (step 5). Its velocity is divided by z again (step 8): so in the first layer all move as by plain attention, times one factor for all.",
  },
  {
    id: ["SYMP.9", "SYMP.10"], title: "Measure the speed", when: "step", show: [["p", "e", "z", "u"]], pick: () => ["u", now(), S.i],
    say: () => `Momentum over mass is speed, and u is its square. A model learns a matrix w<sub>b</sub> for b; here it changes nothing, so b is p. ${S.t === 0 ? "Before the first layer all tokens rest." : "From the second layer on each momentum has the same length, so light tokens are fast."}`,
  },
  {
    id: ["SYMP.11", "SYMP.12"], title: "Push", when: "step", show: [["w[i]", "u", "a[i]", "v"], ["z[i]", "o[i]"]], pick: () => ["o", now(), S.i, 0],
    say: "Attention becomes a push: each token is pushed in the directions, from the centre, of those that it attends to. It attends to itself, too: that part of the push points outwards. The match of two tokens is in the masses of both, so the speeds of both make the factor of a weight: fast tokens push more, and are pushed more.",
  },
  {
    id: ["SYMP.13", "SYMP.14"], title: "Kick", when: "step", show: [["p[i]"], ["force[i]"], ["kicked[i]"]], pick: () => ["kicked", now(), S.i, 0],
    say: "The force does not move the token. It changes its momentum, for a time h<sub>y</sub>, the knob “kick”. What was there before remains. Here w<sub>o</sub> changes nothing, so the force is the push o.",
  },
  {
    id: ["SYMP.15", "SYMP.16"], title: "Damp", when: "step", show: [["kicked[i]"], ["damping"], ["damped[i]"]], pick: () => ["damped", now(), S.i, 0],
    say: () => `Friction takes a part of all momenta: ${percent(Math.exp(-V.damping(now())))} remain in this layer. c<sub>log</sub> is the knob “friction”, c<sub>lin</sub> a constant, ${LIN}, and t the time: 1 at first, and h<sub>x</sub> more after each layer. ${K.c_log > 0 ? "Friction is strongest at first and gets weaker with t." : "There is almost none of it here."}`,
  },
  {
    id: ["SYMP.17", "SYMP.18"], title: "Drift", when: "step", show: [["damped[i]", "z[i]"], ["velocity[i]"], ["x[i]", "x[i]+1"]], pick: () => ["x", now() + 1, S.i, 0],
    say: "Momentum over mass is the velocity, and the token moves with it for a time h<sub>x</sub>, the knob “drift”. Kick first, then drift with the new momentum: steps of this kind are called symplectic, hence the name. With constant masses and no friction they nearly keep the energy.",
  },
  {
    id: "SYMP.19", title: "Pass the momentum on", when: "step", show: [["damped[i]"], ["rate_p[i]"], ["p[i]+1"]], pick: () => ["p", now() + 1, S.i, 0],
    say: "The next layer gets the momentum, brought to a fixed length: only its direction goes on. So paths bend slowly; friction slows the drift of its own layer alone.",
  },
];

const backward = [
  {
    title: "What is wished for", of: "SYMP.18", formula: "dx = x - goal", when: "step", show: [["x[i].last"], ["target"], ["dx[i].last"]], pick: () => ["dx", K.layers, S.i, steepest()],
    say: () => `Suppose that ${word()} should have come to a goal, the cross. The loss is half the squared distance after the last layer, and its gradient is the difference.`,
  },
  {
    id: ["dSYMP.17", "dSYMP.h_x"], of: "SYMP.18", title: "To the velocity", when: "step", show: [["dx[i]+1"], ["dvelocity[i]"], ["dh_x"]], pick: () => ["dvelocity", now(), S.i, steepest()],
    say: "A velocity acted for a time h<sub>x</sub>, so it gets h<sub>x</sub> times the gradient of the place. The gradient of h<sub>x</sub> is how far all velocities point along theirs.",
  },
  {
    id: "dSYMP.16", of: ["SYMP.17", "SYMP.19"], title: "To the momentum", when: "step", show: [["dvelocity[i]", "z[i]"], ["dp[i]+1", "along_p[i]"], ["ddamped[i]"]], pick: () => ["ddamped", now(), S.i, steepest()],
    say: "The momentum was used twice: it moved the token now, and it was passed on to the next layer. Both gradients add up.",
  },
  {
    id: ["dSYMP.14", "dSYMP.15"], of: "SYMP.16", title: "Through the friction", when: "step", show: [["ddamped[i]"], ["dkicked[i]"], ["ddamping", "dc_log"]], pick: () => ["dkicked", now(), S.i, steepest()],
    say: "Friction left a part of the momentum, and the same part of the gradient goes through.",
  },
  {
    id: ["dSYMP.13", "dSYMP.12"], of: ["SYMP.14", "SYMP.13"], title: "To the force", when: "step", show: [["dkicked[i]"], ["dforce[i]"], ["dh_y"]], pick: () => ["dforce", now(), S.i, steepest()],
    say: "The force acted for a time h<sub>y</sub>, so its gradient is h<sub>y</sub> times that of the kicked momentum.",
  },
  {
    id: ["dSYMP.11", "dSYMP.4"], of: "SYMP.12", title: "To who pushed", when: "step", show: [["v", "da[i]"], ["z[i]", "dout[i]"], ["dv"]], pick: () => ["da", now(), S.i, pusher()],
    say: "A push is good if it points where the loss falls. Its strength gets this gradient, and its direction v the rest.",
  },
  {
    id: ["dSYMP.6", "dSYMP.10"], of: "SYMP.11", title: "To weights and speeds", when: "step", show: [["u", "da[i]", "dw[i]", "du"]], pick: () => ["dw", now(), S.i, pusher()],
    say: "The strength was a weight times a factor of the speeds. The speed of a token is in all pushes on it, and in all pushes by it.",
  },
  {
    id: "dSYMP.p", of: ["SYMP.14", "SYMP.9"], title: "To the momentum that came in", when: "step", show: [["dkicked[i]"], ["du[i]", "z[i]", "p[i]"], ["dp[i]"]], pick: () => ["dp", now(), S.i, steepest()],
    say: "The incoming momentum remained after the kick, and it made the speed. This is what the layer before gets.",
  },
  {
    id: "dSYMP.7", of: "SYMP.7", title: "To the mass", when: "step", show: [["du[i]", "u[i]"], ["dlogz[i]"]], pick: () => ["dlogz", now(), S.i],
    say: "A heavier token is pushed more, moves more slowly, and has a smaller u. The three count against each other.",
  },
  {
    id: "dSYMP.5", of: ["SYMP.6", "SYMP.7"], title: "To the scores", when: "step", show: [["w[i]", "dw[i]", "ds[i]"], ["dlogz[i]"]], pick: () => ["ds", now(), S.i, pusher()],
    say: "Weights add up to one, so only what is beyond the mean counts. The gradient of the mass comes on top.",
  },
  {
    id: ["dSYMP.1", "dSYMP.2", "dSYMP.3"], of: "SYMP.5", title: "To the directions", when: "step", show: [["ds[i]", "k"], ["dq[i]"], ["dk[i]"], ["dv[i]"], ["dy[i]"]], pick: () => ["dy", now(), S.i, 0],
    say: "A direction was a query, a key and a push: its gradient is the sum of the three.",
  },
  {
    id: "dSYMP.x", of: ["SYMP.1", "SYMP.18"], title: "To the places", when: "step", show: [["dy[i]", "along_y[i]"], ["dx[i]+1"], ["dx[i]"]], pick: () => ["dx", now(), S.i, steepest()],
    say: "The place went on to the next layer, and its direction was compared. This is the gradient for the layer before.",
  },
];

// Left: places with momentum. Right: plain attention, the same start, weights and scale.
const FLAT = [[1, -1, 0].map((n) => n / Math.sqrt(2)), [1, 1, -2].map((n) => n / Math.sqrt(6))]; // across (1, 1, 1): the plane of what has mean 0
const flat = (vector) => FLAT.map((row) => row.reduce((n, m, c) => n + m * vector[c], 0));
const placed = (name, t, i) => flat(C.map((c) => V[name](t, i, c)));
function between(name, at, i) {
  const n = Math.min(Math.floor(at), K.layers), part = at - n, here = placed(name, n, i);
  return part < 1e-9 ? here : here.map((m, c) => m + part * (placed(name, n + 1, i)[c] - m));
}

function panel(x0, W, H, name, title, small) {
  const narrow = H < 200, at = S.at ?? S.t, back = S.side === "backward", top = small ? 2 : narrow ? 15 : 24, size = Math.min(W, H - top - 2), phone = !small && W < 220, wide = phone ? W : size, left = x0 + (W - wide) / 2;
  const steps = Array.from({ length: K.layers + 1 }, (_, t) => t), ends = J.map((j) => placed("x", K.layers, j).map((n) => 1.2 * n));
  const all = [...["x", "plain"].flatMap((which) => steps.flatMap((t) => J.map((j) => placed(which, t, j)))), ...ends];
  const area = plane(left, top, size, [...all, [0, 0], flat(DATA.target)], wide), { X, Y } = area, momentum = name === "x", layer = now();
  let drawn = (small ? "" : text(left, 12, title, { class: "title" })) + area.ground;
  const goal = flat(DATA.target), i = S.i, here = J.map((j) => between(name, at, j)), marks = [...here, ...(back ? [goal] : [])];
  const named = phone && labels(left + wide, top + size, 11, marks.map((m) => [X(m) - 4, Y(m) - 4, X(m) + 4, Y(m) + 4]), left, top); // names where there is room
  if (named && back) drawn += named("goal", X(goal), Y(goal), 6, "name strong", [2, 3, 1, 0]);
  if (named) drawn += [i, ...J.filter((j) => j !== i)].map((j) => named(DATA.tokens[j], X(here[j]), Y(here[j]), 5, j === i ? "name strong" : "name", [1, 2, 3, 0])).join("");
  if (momentum && !back) before(i).forEach((j) => {
    const strong = V.a(layer, i, j) / Math.max(...before(i).map((l) => V.a(layer, i, l)));
    if (j !== i) drawn += svg("path", { d: `M${X(here[i])} ${Y(here[i])}L${X(here[j])} ${Y(here[j])}`, class: "flow", style: `stroke:${color(j)}`, "stroke-width": (narrow ? 3 : 5) * strong });
  });
  J.forEach((j) => {
    const trail = Array.from({ length: Math.floor(at + 1e-9) + 1 }, (_, t) => placed(name, t, j)), path = [...trail, here[j]];
    let inner = svg("path", { d: `M${path.map((m) => `${X(m).toFixed(1)} ${Y(m).toFixed(1)}`).join("L")}`, fill: "none", style: `stroke:${color(j)}`, "stroke-width": j === i ? 2.4 : 1.5 });
    if (!small) trail.forEach((m) => { inner += svg("circle", { cx: X(m), cy: Y(m), r: 1.8, style: `fill:${color(j)}` }); });
    const r = small ? 4 : narrow ? 4 : j === i ? 7 : 5.5, tip = momentum ? between(back ? "dx" : "p", at, j) : [0, 0], along = back ? -1 : 1;
    const largest = Math.max(1e-12, ...J.map((l) => Math.hypot(...between("dx", at, l)))), long = back ? (size * 0.25) / largest : size * 0.075, end = [X(here[j]) + along * long * tip[0], Y(here[j]) - along * long * tip[1]];
    if (momentum && (!back || Math.hypot(...tip) > 5e-4) && Math.hypot(end[0] - X(here[j]), end[1] - Y(here[j])) > r + 3) inner += arrow(X(here[j]), Y(here[j]), end[0], end[1]);
    inner += svg("circle", { cx: X(here[j]), cy: Y(here[j]), r, style: `fill:${color(j)};stroke:${j === i ? "var(--ink)" : "var(--paper)"}`, "stroke-width": 1.6 });
    if (!small && !phone) inner += text(Math.max(left + 22, Math.min(left + size - 22, X(here[j]))), Y(here[j]) + r + 13, DATA.tokens[j], { class: j === i ? "name strong" : "name", "text-anchor": "middle" });
    drawn += follows(j, DATA.tokens[j], inner, { class: "node" });
  });
  // The name of the goal stands where it is farthest from tokens and their names.
  const free = ([a, b]) => Math.min(...here.flatMap((m) => [[0, 0], [0, 18]].map(([e, g]) => Math.hypot((X(m) + e - X(goal) - a) / 2, Y(m) + g - Y(goal) - b))), X(goal) + a - left - 20, left + wide - X(goal) - a - 20);
  const side = [[-24, 4], [24, 4], [0, -10], [0, 20]].sort((a, b) => free(b) - free(a))[0];
  if (back) drawn += svg("path", { d: `M${X(goal) - 5} ${Y(goal) - 5}l10 10m0 -10l-10 10`, class: "cross" }) + (small || phone ? "" : text(X(goal) + side[0], Y(goal) + side[1], "goal", { class: "name strong", "text-anchor": "middle" }));
  return drawn;
}

function picture(W, H, small) {
  const gap = small ? 8 : W < 420 ? 10 : 18, half = (W - gap) / 2, back = S.side === "backward";
  const titles = back ? ["where places should move", "plain attention"] : [W < 420 ? "momentum (arrows)" : "momentum (arrows), pushes (lines)", "plain attention"];
  return TIP + panel(0, half, H, "x", titles[0], small) + panel(half + gap, half, H, "plain", titles[1], small);
}

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
    "Let tokens be <b>particles</b>. Attention pushes each one in the directions of those that it attends to.",
    "A usual layer moves a token by the push itself, as if in honey: each layer begins anew. Here the push is a <b>force</b>. It changes a momentum, the momentum moves the token, and friction takes speed off. So a token starts slowly and goes on in its direction from layer to layer, as a ball that rolls. Further is not better in itself; the momentum carries on what earlier layers began.",
    `We follow ${word()}. Each layer is one step of the motion.`,
  ],
  turn: "To learn is to change numbers so that a loss falls. So we ask of every number how the loss changes with it: its gradient, written with a d in front. It comes back through the layers, the last one first.",
  sizes: { t: () => K.layers, T: () => K.layers + 1, m: () => C.length },
  quantities, forward, backward, picture, caption,
  time: { steps: () => K.layers, name: "layer", first: () => 2 },
  height: (W) => (W < 420 ? 112 : Math.min(320, Math.round(W * 0.5) + 20)),
  label: () => `Paths of ${J.length} tokens in a plane, with momentum and by plain attention`,
});
