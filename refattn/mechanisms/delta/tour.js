// The gated delta rule: a memory that is asked, errs, and is corrected, token by token.

const { q, k, v, target, faded, answer, miss, correction, state, o, dread, dS, du, dm, dD } = F;
const beta = knob("beta"), keep = exp(knob("log_decay")), root = sqrt(D.length);
const now = () => Math.min(S.t, J.length - 1); // the token that comes at the step that is shown
const main = (list) => list.map(Math.abs).indexOf(Math.max(...list.map(Math.abs)));
const notes = DATA.tokens[0] === "Ann tea"; // the example's own notes, not those of a reader

// ---- pictures: the tokens with a bar each, the memory as a matrix, and the plane of the values ---------------------------

const mix = (a, b, part) => a.map((row, d) => row.map((x, e) => x + part * (b[d][e] - x)));
const states = (t) => D.map((d) => E.map((e) => V.state(t, d, e)));
const weak = (n) => D.map((d) => E.map((e) => V.faded(n, d, e)));
const asked = (memory, key) => E.map((e) => D.reduce((total, d) => total + key[d] * memory[d][e], 0));
const inner = (a, b) => a.reduce((total, x, n) => total + x * b[n], 0);
const keyOf = (j) => D.map((d) => V.k(j, d));
const question = (j = S.i) => D.map((d) => DATA.q[j][d] / Math.sqrt(D.length));
const vectorOf = (name, n) => E.map((e) => V[name](n, e));
const rowsOf = (name, n) => D.map((d) => E.map((e) => V[name](n, d, e)));
const size = (list) => Math.hypot(...list.flat());
const moment = () => S.at ?? S.t;
const progress = () => (moment() >= J.length ? 1 : moment() - Math.floor(moment())); // how far the writing of the token now is done

// The memory between two steps: at first it fades, then it is written to.
function memoryAt(at) {
  const n = Math.min(Math.floor(at), J.length), part = at - n;
  if (part < 1e-9) return states(n);
  return part < 0.35 ? mix(states(n), weak(n), part / 0.35) : mix(weak(n), states(n + 1), (part - 0.35) / 0.65);
}

// What linear attention, which adds every value, answers to a question after t tokens.
function added(t, key = question()) {
  const fade = Math.exp(K.log_decay);
  return E.map((e) => J.slice(0, t).reduce((total, j) => total + fade ** (t - 1 - j) * K.beta * DATA.v[j][e] * inner(key, keyOf(j)), 0));
}

// The points that the plane has to show; at the same knobs it stays, also while points are dragged.
const extents = {};
const extent = () => (extents[JSON.stringify(K)] ??= [DATA.target, [0, 0], ...DATA.v, ...J.flatMap((t) => [added(t + 1, question(t)), ...[question(t), ...J.slice(0, t + 1).map(keyOf)].flatMap((key) => [asked(states(t), key), asked(states(t + 1), key)])])].map(flat));

// Where things are; the tokens, the one that comes framed, and where there is room a bar for each.
function board(W, H, small, { bars: [what, told], heading: [middle, right] }) {
  const narrow = W < 420, quiet = small || narrow, top = quiet ? 2 : 26, legend = narrow && !small && H > 160 ? 20 : 0, names = small ? 0 : 22 + Math.max(...DATA.tokens.map((token) => token.length)) * (narrow ? 6.9 : 8);
  const y = scale(0, Math.max(1, J.length - 1), top + 13, H - 16), from = small ? 2 : narrow ? names + 4 : 0.34 * W, left = W * (small ? 0.5 : narrow ? 0.66 : 0.61), wide = W - left;
  const head = quiet ? [] : [[0, told], [from, middle], [left, right]].map(([x, inside]) => text(x, 12, inside, { class: "title" }));
  const list = small ? [] : [
    rows(DATA.tokens, S.i, y, names, small),
    mark("now", "rect", { x: -3, y: y(now()) - rowHigh(y) / 2, width: names + 2, height: rowHigh(y), rx: 6, class: "frame" }),
    quiet ? [] : bars(typeof what === "string" ? J.map((j) => V[what](j)) : what, names + 6, from - 22, y, Math.min(20, (0.4 * H) / J.length), typeof what === "string" ? (j) => `${what}.${j}` : undefined),
    legend ? text(W, H - 4, "○ said, ● remembered", { class: "title", "text-anchor": "end" }) : "",
  ];
  return { drawn: [head, list], narrow, small, quiet, top, H, from, space: left - from - (quiet ? 8 : 22), left, wide, size: Math.min(wide, H - top - 4 - legend) };
}

// Matrices and rows to be stacked; each number with its reference, if it is one of the page's.
const matrix = (key, head, name, n, column = undefined, numbers = undefined) => ({ table: true, key, head, column, rows: D.map((d) => E.map((e) => (numbers ? [numbers[d][e]] : [V[name](n, d, e), `${name}.${n}.${d}.${e}`]))) });
const row = (head, name, n) => ({ key: name, head, rows: [E.map((e) => [V[name](n, e), `${name}.${n}.${e}`])] });
const column = (head, name, n) => ({ head, cells: D.map((d) => [V[name](n, d), `${name}.${n}.${d}`]) });

// One below the other: a matrix has its name above it and a column beside it, a row its name beside it and, if there is room, its `above` above it.
function stack(b, blocks, scaled = false) {
  const headed = (one) => one.table || (one.above && !b.quiet), tables = blocks.filter(headed).length, head = b.small ? 4 : b.narrow ? 13 : 20, count = blocks.reduce((n, one) => n + one.rows.length, 0);
  const key = b.small ? 0.2 * b.space : b.narrow ? 40 : 58, wide = Math.min(b.small ? 64 : 76, (b.space - key - 6) / E.length), gap = b.narrow ? 3 : 10, high = Math.min(b.small ? 40 : 56, (b.H - b.top - tables * head - (blocks.length - 1) * gap - 6) / count);
  const usual = Math.max(1, ...DATA.v.flat().map(Math.abs)), x0 = b.from + key + 6, tick = { class: "tick", "text-anchor": "middle" };
  const one = (name, x, y, width, [number, ref], most) => [
    cell(name, x + 1, y + 1, width - 2, high - 2, number, most, ref ? { "data-ref": ref } : {}),
    b.small || width < 36 || high < 12 ? [] : label(`${name} told`, x + width / 2, y + high / 2 + 4, show(Math.abs(number) < 1e-12 ? 0 : number), { "text-anchor": "middle", ...(ref ? { "data-ref": ref } : {}) }),
  ];
  let y = b.top;
  return blocks.map((block) => {
    const { table } = block, most = scaled ? Math.max(1e-9, ...block.rows.flat().map(([x]) => Math.abs(x))) : usual, drawn = [];
    if (headed(block)) y += head;
    if (block.above && !b.quiet) drawn.push(text(x0 + (wide * E.length) / 2, y - 5, block.above, tick));
    if (table && !b.small) drawn.push(text(x0 + (wide * E.length) / 2, y - (b.narrow ? 3 : 5), block.head, tick), block.column ? text(b.from + key / 2, y - (b.narrow ? 3 : 5), b.narrow ? block.column.head.split(" ").at(-1) : block.column.head, tick) : "");
    if (!table && !b.small) drawn.push(text(x0 - 8, y + high / 2 + 4, b.narrow ? block.head.split(" ").at(-1) : block.head, { class: "tick", "text-anchor": "end" }));
    block.rows.forEach((numbers, d) => {
      if (block.column) drawn.push(one(`${block.column.head.split(" ").at(-1)}.${d}`, b.from, y, key, block.column.cells[d], scaled || block.column.head.includes("d") ? Math.max(1e-9, ...block.column.cells.map(([x]) => Math.abs(x))) : 1));
      numbers.forEach((number, e) => drawn.push(one(`${block.key}.${d}.${e}`, x0 + e * wide, y, wide, number, most)));
      y += high;
    });
    if (table) drawn.push(mark(`frame ${block.key}`, "rect", { x: x0 - 2, y: y - block.rows.length * high - 2, width: wide * E.length + 4, height: block.rows.length * high + 4, rx: 5, class: "hair" }));
    y += gap;
    return drawn;
  });
}

// The plane of the values: rings are what tokens said, dots what a memory answers to their keys. `until`: tokens that it knows.
function field(b, memory, until = now() + (progress() > 0.5), back = false) {
  const at = plane(b.left, b.top, b.size, extent(), b.wide), place = (p) => [at.X(flat(p)), at.Y(flat(p))], r = b.small ? 5 : b.narrow ? 5 : 8, heard = J.map((j) => asked(memory, keyOf(j)));
  const round = (p, half) => [-half, -half, half, half].map((x, n) => place(p)[n % 2] + x), [x0, y0] = place([0, 0]), right = b.left + b.wide - 6;
  const named = labels(b.left + b.wide, b.top + b.size, 13, [...J.map((j) => round(DATA.v[j], r)), ...(notes ? [[right - 44, y0 - 14, right, y0 - 3], [x0 + 5, b.top, x0 + 52, b.top + 17]] : [])], b.left, b.top, [...(back ? [] : heard.slice(0, until)), vectorOf("o", S.i), ...(back ? [DATA.target, ...memory] : [])].map((p) => round(p, 7)));
  const drawn = [
    at.ground,
    !b.quiet && notes ? [text(right, y0 - 4, "warm →", { class: "tick", "text-anchor": "end" }), text(x0 + 5, b.top + 13, "sweet ↑", { class: "tick" })] : [],
    J.map((j) => [
      j < until && !back ? line(`tie.${j}`, [place(heard[j]), place(DATA.v[j])], { class: "hair dashed", style: `stroke:${color(j)}` }) : [],
      mark(`ring.${j}`, "circle", { cx: place(DATA.v[j])[0], cy: place(DATA.v[j])[1], r, style: `stroke:${color(j)};fill:var(--paper)`, "stroke-width": j < until || back ? 2.6 : 1.2, opacity: j < until || back || j === now() ? 1 : 0.5, "aria-label": `drag the value of ${DATA.tokens[j]}` }, "", (x, y) => put(DATA.v[j], at.back(x, y))),
      b.quiet ? [] : named(DATA.tokens[j], ...place(DATA.v[j]), r, j === now() ? "name strong" : "name"),
      j < until && !back ? point(`dot.${j}`, ...place(heard[j]), b.quiet ? 3 : 4.5, j) : [],
    ]),
  ];
  return { at, place, heard, named, drawn };
}

const less = (p, x, by = 1) => p.map((y, e) => y - by * x[e]);
// How much of a step from each point stays within the plane: all of them are made shorter by that.
const room = (f, points, steps) => Math.max(0, Math.min(1, ...points.flatMap((p, n) => {
  const [left, top, right, bottom] = f.at.box, [x, y] = f.place(p), [to, at] = f.place(less(p, steps[n]));
  return [[x, to - x, left, right], [y, at - y, top, bottom]].map(([from, step, low, high]) => (step ? ((step > 0 ? high : low) - from) / step : 1));
})));

// Vectors end to end from 0: each row of a matrix times an element of a column; the thick one is their sum.
function chain(f, matrix, factors) {
  const zero = E.map(() => 0), by = room(f, [zero], [asked(matrix, factors.map((x) => -x))]);
  let here = zero;
  const steps = matrix.map((one, d) => { const from = here; here = here.map((x, e) => x + by * factors[d] * one[e]); return vector(`row.${d}`, ...f.place(from), ...f.place(here), { opacity: 0.55 }); });
  return [steps, vector("sum", ...f.place(zero), ...f.place(here), { class: "vector thick" })];
}

// A name beside a point, if there is room for words.
const called = (b, f, name, p, left = false) => (b.quiet ? [] : f.named(name, ...f.place(p), 7, "name strong", left ? [3, 0, 1, 2] : [2, 0, 1, 3]));
const black = (b, f, p) => mark("out", "circle", { cx: f.place(p)[0], cy: f.place(p)[1], r: b.quiet ? 4.5 : 6.5, style: "fill:var(--ink);stroke:var(--paper)", "stroke-width": 1.5 });
const overlaps = () => J.map((j) => along(j, now()));
const errors = (memory, until) => J.map((j) => (j < until ? Math.hypot(...E.map((e) => DATA.v[j][e] - asked(memory, keyOf(j))[e])) : null)); // none before it is written
const RINGS = "values: ○ said, ● remembered";
const during = () => mix(weak(now()), states(now() + 1), progress()); // the faded memory, and what the token makes of it
const keyColumn = () => column("key k", "k", now());

const missed = () => [errors(during(), now() + 1), "miss of each token"];

function fade(b) {
  const n = now(), before = states(n), until = n, f = field(b, weak(n), until);
  return [stack(b, [matrix("before", "memory S", "state", n), matrix("S", "faded D", "faded", n)]), f.drawn, J.slice(0, until).map((j) => [vector(`push.${j}`, ...f.place(asked(before, keyOf(j))), ...f.place(f.heard[j]), { style: `stroke:${color(j)}` }), mark(`was.${j}`, "circle", { cx: f.place(asked(before, keyOf(j)))[0], cy: f.place(asked(before, keyOf(j)))[1], r: b.quiet ? 3 : 4.5, class: "hair", style: `stroke:${color(j)}` })])];
}

function ask(b) {
  const n = now(), f = field(b, weak(n), n);
  return [stack(b, [matrix("S", "memory D", "faded", n, keyColumn()), row("answer a", "answer", n)]), f.drawn, chain(f, weak(n), keyOf(n)), called(b, f, "a", vectorOf("answer", n))];
}

// From the answer to the value: the miss, of which u is the part that is written.
function lack(b, below, thick) {
  const n = now(), f = field(b, during()), a = vectorOf("answer", n), u = vectorOf("correction", n);
  return [
    stack(b, [matrix("S", "memory D", "faded", n, keyColumn()), ...below]), f.drawn,
    thick ? [line("miss", [f.place(a), f.place(DATA.v[n])], { class: "hair dashed" }), vector("change", ...f.place(a), ...f.place(a.map((x, e) => x + u[e])), { class: "vector thick" }), called(b, f, "u", a.map((x, e) => x + u[e] / 2))] : [vector("change", ...f.place(a), ...f.place(DATA.v[n]), { class: "vector thick" }), called(b, f, "m", a.map((x, e) => (x + DATA.v[n][e]) / 2))],
    mark("from", "circle", { cx: f.place(a)[0], cy: f.place(a)[1], r: b.quiet ? 3 : 4.5, class: "sink" }), called(b, f, "a", a, true),
  ];
}
const see = (b) => lack(b, [row("answer a", "answer", now()), row("value v", "v", now()), row("miss m", "miss", now())], false);
const decide = (b) => lack(b, [row("miss m", "miss", now()), row("change u", "correction", now())], true);

function writing(b) {
  const n = now(), f = field(b, states(n + 1), n + 1), old = weak(n);
  return [
    stack(b, [matrix("S", `S after token ${n + 1}`, "state", n + 1, keyColumn(), moment() === S.t && S.t < J.length ? undefined : during()), row("change u", "correction", n)]), f.drawn,
    J.slice(0, n + 1).map((j) => vector(`push.${j}`, ...f.place(asked(old, keyOf(j))), ...f.place(f.heard[j]), { style: `stroke:${color(j)}`, ...(j === n ? { class: "vector thick" } : {}) })),
  ];
}

// What the followed token's question has been answered, token by token, up to its own.
function path(b, f) {
  const end = Math.min(moment(), S.i + 1), whole = Math.floor(end + 1e-9), here = asked(memoryAt(end), question()), lazy = added(whole);
  return [
    line("path", [...Array.from({ length: whole + 1 }, (_, t) => asked(states(t), question())), here].map(f.place), { class: "hair", style: "stroke:var(--ink)" }),
    whole ? [mark("lazy", "path", { d: `M${at_(f.place(lazy)[0])} ${at_(f.place(lazy)[1] - 6)}l6 6l-6 6l-6 -6z`, class: "hair", "stroke-width": 1.8 }), b.quiet ? [] : f.named("only adding", ...f.place(lazy), 7, "name title", f.place(here)[1] > f.place(lazy)[1] ? [0, 1, 3, 2] : [1, 0, 3, 2])] : [],
    black(b, f, here), called(b, f, "o", here),
  ];
}

function read(b) {
  const n = now(), f = field(b, states(n + 1), n + 1);
  return [stack(b, [matrix("S", "memory S", "state", n + 1, column("question q", "q", n)), row("output o", "o", n)]), f.drawn, chain(f, states(n + 1), question(n)), black(b, f, vectorOf("o", n)), called(b, f, "o", vectorOf("o", n))];
}

const remembered = () => { const at = moment(); return Math.floor(at + 1e-9) + (at - Math.floor(at) > 0.5); };
const opening = {
  bars: () => [errors(memoryAt(moment()), remembered()), "miss of each token"], heading: () => [S.t < J.length ? `next: ${DATA.tokens[now()]}` : `after ${DATA.tokens[now()]}`, "○ said, ● remembered; line: o so far"],
  draw: (b) => {
    const n = now(), memory = memoryAt(moment()), f = field(b, memory, remembered()), below = b.small ? [] : [{ ...row("answer a", "answer", n), above: S.t < J.length ? "asked for its key" : "before this writing" }, row("value v", "v", n), row("miss m", "miss", n)];
    return [stack(b, [matrix("S", "memory S", "state", S.t, keyColumn(), moment() === S.t ? undefined : memory), ...below]), f.drawn, path(b, f)];
  },
};

// Backwards: the output, what is wished for, and the plane without what is remembered.
function goal(b, f) {
  const { target } = DATA, [x, y] = f.place(target);
  return [cross("goal", x, y, b.quiet ? 3 : 5), mark("goal hold", "circle", { cx: x, cy: y, r: 12, class: "ground", "aria-label": "drag the wanted output" }, "", (px, py) => put(target, f.at.back(px, py))), called(b, f, "t", target), black(b, f, vectorOf("o", S.i)), called(b, f, "o", vectorOf("o", S.i), true)];
}
// The rows of a memory as points, each with an arrow against its gradient.
function tugged(b, f, points, gradients, name = "push", set = {}) {
  const by = room(f, points, gradients);
  return points.map((p, d) => [
    vector(`${name}.${d}`, ...f.place(p), ...f.place(less(p, gradients[d], by)), set),
    name === "push" ? [mark(`row.${d}`, "rect", { x: f.place(p)[0] - 4, y: f.place(p)[1] - 4, width: 8, height: 8, style: "fill:var(--paper);stroke:var(--ink)", "stroke-width": 1.6 }), called(b, f, `row ${d + 1}`, p)] : [],
  ]);
}
const after = () => `gradients, ${DATA.tokens[now()]}`;

function toQuestion(b) {
  const n = now(), f = field(b, states(n + 1), 0, true), grad = vectorOf("dread", n);
  return [stack(b, [matrix("S", "memory S", "state", n + 1, column("gradient dq", "dq", n)), row("gradient do", "dread", n)]), f.drawn, tugged(b, f, states(n + 1), D.map(() => E.map(() => 0))), states(n + 1).map((p, d) => line(`tie.${d}`, [f.place(E.map(() => 0)), f.place(p)])), vector("sum", ...f.place(less(vectorOf("o", n), grad)), ...f.place(vectorOf("o", n)), { class: "vector thick" }), goal(b, f)];
}

function toMemory(b) {
  const n = now(), f = field(b, states(n + 1), 0, true);
  return [stack(b, [matrix("dS", "gradient dS", "dS", n, column("question q", "q", n)), row("gradient do", "dread", n)], true), f.drawn, tugged(b, f, states(n + 1), rowsOf("dS", n)), goal(b, f)];
}

function toChange(b) {
  const n = now(), f = field(b, states(n + 1), 0, true);
  return [stack(b, [matrix("dS", "gradient dS", "dS", n, keyColumn()), row("gradient du", "du", n)], true), f.drawn, chain(f, rowsOf("dS", n), keyOf(n)), called(b, f, "du", vectorOf("du", n)), goal(b, f)];
}

function toMiss(b) {
  const n = now(), f = field(b, states(n + 1), 0, true), a = vectorOf("answer", n), du = vectorOf("du", n), m = vectorOf("miss", n), by = room(f, [a], [du.map((x) => -x)]);
  const share = inner(m, du) / (inner(du, du) || 1), foot = a.map((x, e) => x + share * du[e]), tip = a.map((x, e) => x + by * du[e]);
  return [
    stack(b, [row("gradient du", "du", n), row("gradient dm", "dm", n), row("miss m", "miss", n)], true), f.drawn,
    vector("change", ...f.place(a), ...f.place(DATA.v[n]), { style: `stroke:${color(n)}`, class: "vector thick" }), vector("sum", ...f.place(a), ...f.place(tip), { class: "vector thick" }), line("along", [f.place(a), f.place(foot)], { class: "hair dashed" }), line("drop", [f.place(DATA.v[n]), f.place(foot)], { class: "hair dashed", style: `stroke:${color(n)}` }),
    called(b, f, "du", a.map((x, e) => x + (by * du[e]) / 2), true), called(b, f, "m", a.map((x, e) => x + m[e] / 2)), goal(b, f),
  ];
}

function toValue(b) {
  const n = now(), f = field(b, states(n + 1), 0, true), o = vectorOf("o", S.i);
  return [stack(b, [matrix("dS", "gradient dS", "dS", n, keyColumn()), ...(b.small ? [] : [row("gradient du", "du", n), row("gradient dv", "dv", n)])], true), f.drawn, J.map((j) => vector(`push.${j}`, ...f.place(DATA.v[j]), ...f.place(less(DATA.v[j], vectorOf("dv", j))), { style: `stroke:${color(j)}` })), vector("sum", ...f.place(o), ...f.place(DATA.target), { class: "vector thick" }), goal(b, f)];
}

function toFaded(b) {
  const n = now(), f = field(b, weak(n), 0, true);
  return [stack(b, [matrix("before", "gradient dS", "dS", n, keyColumn()), row("gradient dm", "dm", n), matrix("dS", "gradient dD", "dD", n)], true), f.drawn, tugged(b, f, weak(n), rowsOf("dS", n), "was", { class: "ghost" }), tugged(b, f, weak(n), rowsOf("dD", n)), goal(b, f)];
}

const toTheValue = { bars: () => [J.map((j) => size(vectorOf("dv", j))), "|dv| of each"], heading: () => [after(), "where values should move: −dv"], draw: toValue };

// The keys have a plane of their own.
function toKey(b) {
  const n = now(), at = plane(b.left, b.top, b.size, [[0, 0], [1.3, 1.3], ...first.map((k) => flat(k.map((x) => K.length * x)))], b.wide);
  const f = { at, place: (p) => [at.X(flat(p)), at.Y(flat(p))] }, grad = D.map((d) => V.dk(n, d)), named = labels(b.left + b.wide, b.top + b.size, 13, [], b.left, b.top);
  return [
    stack(b, [matrix("dS", "gradient dS", "dS", n, column("gradient dk", "dk", n)), row("change u", "correction", n), row("gradient dm", "dm", n)], true), at.ground,
    J.map((j) => [
      vector(`key.${j}`, ...f.place(D.map(() => 0)), ...f.place(keyOf(j)), { style: `stroke:${color(j)}` }),
      point(`ring.${j}`, ...f.place(keyOf(j)), b.quiet ? 4 : j === n ? 8 : 6, j, { "aria-label": `drag the key of ${DATA.tokens[j]}` }, (x, y) => put(DATA.k[j], at.back(x, y), K.length)),
      b.quiet ? [] : named(DATA.tokens[j], ...f.place(keyOf(j)), 8, j === n ? "name strong" : "name"),
    ]),
    vector("push", ...f.place(keyOf(n)), ...f.place(less(keyOf(n), grad, room(f, [keyOf(n)], [grad]))), { class: "vector thick" }),
  ];
}

function toFading(b) {
  const n = now(), memory = weak(n), f = field(b, weak(n), 0, true);
  return [stack(b, [matrix("S", "faded D", "faded", n), matrix("dS", "gradient dD", "dD", n)], true), f.drawn, memory.map((p, d) => vector(`tie.${d}`, ...f.place(p), ...f.place(p.map(() => 0)), { class: "vector dashed", opacity: 0.6 })), tugged(b, f, memory, rowsOf("dD", n)), goal(b, f)];
}

const first = DATA.k.map((row) => [...row]);
const several = (j) => keyOf(j).filter((x) => Math.abs(x) > 1e-9).length > 1;
const along = (j, n) => inner(keyOf(j), keyOf(n));
// Which earlier tokens a writing disturbs: their keys are neither this one nor at right angles to it.
const disturbed = () => J.slice(0, now()).filter((j) => Math.abs(along(j, now())) > 1e-9 && along(j, now()) ** 2 < (1 - 1e-9) * along(j, j) * along(now(), now()));

const nearest = (point, among) => among.slice().sort((a, b) => Math.hypot(...E.map((e) => DATA.v[a][e] - point[e])) - Math.hypot(...E.map((e) => DATA.v[b][e] - point[e])))[0];

const matters = (x, many = false) => (Math.abs(x) < 1e-12 ? `do${many ? "" : "es"} not matter` : `hardly matter${many ? "" : "s"}`);

function caption() {
  const n = now(), size = Math.hypot(...E.map((e) => V.miss(n, e)));
  if (S.side === "backward") {
    const push = J.map((j) => Math.hypot(...E.map((e) => V.dv(j, e)))), most = main(push), idle = J.filter((j) => push[j] < 5e-5);
    return push[most] < 5e-5 ? "No value matters for this loss." : `The loss of ${names([S.i])} changes most with the value of ${names([most])}${idle.length ? `; ${idle.length === 1 ? `that of ${names(idle)} ${matters(push[idle[0]])}` : `those of ${names(idle)} ${matters(Math.max(...idle.map((j) => push[j])), true)}`}` : ""}.`;
  }
  if (S.t < J.length) return `Next comes token ${n + 1}, ${names([n])}. The memory’s answer to its key misses the value by ${show(size)}; the writing leaves ${show(Math.hypot(...E.map((e) => DATA.v[n][e] - asked(states(n + 1), keyOf(n))[e])))}.`;
  if (K.beta === 0) return "Nothing is written, so the memory stays empty and every answer is 0.";
  const seen = J.slice(0, S.i + 1), own = nearest(E.map((e) => V.o(S.i, e)), seen), lazy = nearest(added(S.i + 1), seen);
  return `After ${names([S.i])} the output o is nearest to ${names([own])}; ${own === lazy ? "it would be by only adding, too" : `by only adding it would be nearest to ${names([lazy])}`}.${E.length < 3 ? ` Asked with key k again, the memory now answers (${asked(states(J.length), keyOf(n)).map(show).join(", ")}).` : ""}`;
}

// ---- the tour --------------------------------------------------------------------------------------------------------

tour({
  title: "The gated delta rule",
  short: "A memory is asked first, and only what it misses is written.",
  intro: () => [
    "A matrix S is a <b>memory</b>. Asked with a key k, it answers with the sum of its rows, each times one element of k.",
    "Linear attention (◇) only adds each token’s value, times β and with the same fading, so old values of a key pile up. The delta rule asks first, sees by how much the answer <b>misses</b> the value, and writes only what is missing. The memory keeps its size, however many tokens come.",
    notes ? "Here tokens are notes: the key says who (both Bobs: one key, one dot), the value how warm and sweet the drink is. Every token asks about Ann, who changes her mind." : "Each token brings a key, a value and a question.",
  ],
  turn: "Learning asks how the loss changes with every number above. That is its gradient, written with a d in front. The way back goes from the last token to the first, for a correction changes all later answers. Here the loss is ½ |o − t|², for the output o of the token that is picked; t, the cross, is a target that we made up. So the gradient of the output is do = o − t.",
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
    dlog: { id: "dDELTA.log_decay", axes: "j", symbol: "d(log decay)", what: "gradient of the logarithm of the decay", of: (j) => sum(D.flatMap((d) => E.map((e) => mul(dD(j, d, e), faded(j, d, e))))) },
  },
  forward: [
    { id: "DELTA.1", title: "Fade", when: "step", show: [["state"], ["faded"]], pick: () => ["faded", now(), 0, 0],
      bars: () => [errors(weak(now()), now()), "miss of each token"], heading: ["before, and faded", RINGS], draw: fade,
      say: () => `The slider counts the tokens that are written: ${now()}. Now token ${now() + 1}, ${names([now()])}, comes. First the memory fades (the gate): it keeps exp(${show(K.log_decay)}) = ${percent(Math.exp(K.log_decay))} of every number in it.`,
      alt: "The memory before and after the fading, and what it answers to the keys that it has seen",
      caption: () => (now() === 0 ? "The memory is still empty: there is nothing to fade." : K.log_decay === 0 ? "Nothing fades here: the two tables are the same." : `All numbers get smaller, so what is remembered moves from the thin rings towards 0, where the axes cross, by ${percent(1 - Math.exp(K.log_decay))} of its way.${notes && now() > 3 && String(DATA.k[1]) === String(DATA.k[3]) ? " Both Bobs have one key, hence one dot." : ""}`) },
    { title: "Ask", label: "a part of DELTA.2", formula: "a_n = D_n^T k_n", when: "step", show: [["k"], ["faded"], ["answer"]], pick: () => ["answer", now(), 0],
      bars: () => [overlaps(), "k · key of each"], heading: ["each row times the key", "rows times k, end to end"], draw: ask,
      say: "The memory is asked for the token’s key before anything is written. Its answer is the sum of its rows, each times one element of the key.",
      alt: "Rows of the memory times elements of the key, end to end: they lead to the answer",
      caption: () => (now() === 0 ? "An empty memory answers 0 to every key." : `The thick arrow is the answer a to the key of ${names([now()])}. ${several(now()) || !J.some((j) => j && several(j)) ? "It comes from tokens whose keys are like this one." : `Only one row counts, as all else in this key is 0; with the slider at ${J.findIndex((j) => j && several(j))}, more do.`}`) },
    { id: "DELTA.2", title: "See what is missing", when: "step", show: [["v"], ["answer"], ["miss"]], pick: () => ["miss", now(), 0],
      bars: missed, heading: ["value less answer", "from the answer a to the value"], draw: see,
      say: "The miss is what the answer lacks to be the value: the value minus the answer.",
      alt: "An arrow from the answer to the value of the token: the miss",
      caption: () => `The answer to the key of ${names([now()])} misses its value by ${show(size(vectorOf("miss", now())))}, the length of the arrow.` },
    { id: "DELTA.3", title: "Decide how much to change", when: "step", show: [["miss"], ["correction"]], pick: () => ["correction", now(), 0],
      bars: missed, heading: ["u is β times m", "how far to go: u"], draw: decide,
      say: "The number β says how firmly to write. With 1 the change u is the whole miss, and the answer becomes the value if k · k is 1; with 0 the token is ignored. β is a learning rate: the writing is one step of gradient descent on half the squared miss.",
      alt: "The part of the miss that is written, as an arrow along it",
      caption: () => (K.beta === 0 ? "With β = 0 nothing is written." : `The thick arrow u is ${percent(K.beta)} of the way from the answer a to the value.`) },
    { id: "DELTA.4", title: "Write", when: "step", show: [["k"], ["faded"], ["correction"], ["state+1"]], pick: () => ["state", now() + 1, main(keyOf(now())), 0],
      bars: () => [overlaps(), "k · key of each"], heading: ["k times u is added", RINGS], draw: writing,
      say: () => `Each row of the memory changes by u times one element of the key. So this key’s answer moves by u times k · k, here ${show(along(now(), now()))}. Answers to keys at right angles stay.${S.t === now() ? ` The picture has the memory after it, S after token ${now() + 1}; the slider still stands before it, at ${now()}.` : ""}`,
      alt: "The memory after the writing, and arrows by which its answers move",
      caption: () => {
        const others = disturbed(), n = now();
        if (K.beta === 0) return "Nothing is written, so no answer moves.";
        return `Arrows: how answers move. ${others.length ? `What is remembered of ${names(others.slice(-1))} is disturbed: the key is not at right angles, so its answer moves by ${show(along(others.at(-1), n))} u.` : `Only the answer to the key of ${names([n])} moves.`}`;
      } },
    { id: "DELTA.5", title: "Read", when: "last", show: [["q"], ["state+1"], ["o"]], pick: () => ["o", now(), 0],
      bars: () => [J.map((j) => inner(question(now()), keyOf(j))), "q / √d · key of each"], heading: ["each row times q / √d", "rows times q / √d, end to end"], draw: read,
      say: () => `The token’s question is put to the memory as it is after the writing. No later token is in it, so no mask is needed. The question is divided by √d, as in softmax attention${notes ? ": what is left of it here is Ann’s key, for keys of length 1" : ""}.`,
      alt: "Rows of the memory times elements of the question, end to end: they lead to the output",
      caption: () => (K.beta === 0 ? "Nothing was written, so the output is 0." : `The output o of ${names([now()])} is nearest to the value of ${names([nearest(vectorOf("o", now()), J.slice(0, now() + 1))])}.`) },
  ],
  backward: [
    { id: "dDELTA.q", of: "DELTA.5", title: "To the question", when: "step", show: [["dread"], ["state+1"], ["dq"]], pick: () => ["dq", S.i, 0],
      bars: () => [J.map((j) => size(D.map((d) => V.dq(j, d)))), "|dq| of each"], heading: ["rows · do", "rows of S, and the gradient do"], draw: toQuestion,
      say: () => `Suppose that the output of ${names([S.i])} should have been the target t: its gradient is the difference. An element of the question is a factor of one row of the memory, so its gradient is how far that row points along that of the output.`,
      alt: "Rows of the memory as points, and the gradient of the output as an arrow",
      caption: () => (now() === S.i ? `The thick arrow is do, from t to o: the loss grows that way, so it points against the arrow of the page before. dq has a number for each row: row · do / √d. Drag t.` : `Only the output of ${names([S.i])} is in the loss: the question of ${names([now()])} does not matter to it.`) },
    { id: "dDELTA.4", of: "DELTA.4", title: "To the memory", when: "step", show: [["q"], ["dread"], ["dS"]], pick: () => ["dS", now(), 0, 0],
      bars: () => [J.map((j) => size(rowsOf("dS", j))), "|dS| after each"], heading: () => [after(), "where rows of S should move: −dS"], draw: toMemory,
      say: "The memory after a token was read by that token, and passed on to the next: the gradients of both uses add up.",
      alt: "Rows of the memory as points, each with an arrow against its gradient",
      caption: () => (size(rowsOf("dS", now())) < 5e-5 ? `After ${names([now()])} nothing is read from the memory that the loss looks at.` : `Where the rows of the memory after ${names([now()])} should move, so that the loss falls.`) },
    { id: "dDELTA.3", of: "DELTA.4", title: "To the change", when: "step", show: [["k"], ["dS"], ["du"]], pick: () => ["du", now(), 0],
      bars: () => [J.map((j) => size(vectorOf("du", j))), "|du| of each"], heading: () => [after(), "rows of dS times k, end to end"], draw: toChange,
      say: "The change was written along the key, so its gradient is what the memory’s gradient answers to that key.",
      alt: "Rows of the memory’s gradient times elements of the key, end to end",
      caption: () => (size(vectorOf("du", now())) < 5e-5 ? `What ${names([now()])} writes does not matter to the loss.` : `The same sum as in “Ask”, of rows of dS: the thick arrow du is ${show(size(vectorOf("du", now())))} long.`) },
    { id: ["dDELTA.2", "dDELTA.beta"], of: "DELTA.3", title: "To the miss, and to β", when: "step", show: [["du"], ["dm"], ["miss"], ["dbeta"]], pick: () => ["dbeta", now()],
      bars: ["dbeta", "gradient dβ of each"], heading: () => [after(), "the miss m, and the gradient du"], draw: toMiss,
      say: "The miss was multiplied by β, so its gradient is, too. The gradient of β says how far the miss points where the loss grows.",
      alt: "The miss and the gradient of the change as arrows from the answer",
      caption: () => (Math.abs(V.dbeta(now())) < 5e-5 ? `A larger β for ${names([now()])} would not change the loss.` : `The miss points ${V.dbeta(now()) > 0 ? "along" : "against"} du: a larger β for ${names([now()])} would ${V.dbeta(now()) > 0 ? "raise" : "lower"} the loss. Dashed: from the tip of m down to its part along du.`) },
    { id: "dDELTA.v", of: "DELTA.2", title: "To the value", when: "step", show: [["dm"], ["dv"]], pick: () => ["dv", now(), 0], ...toTheValue,
      say: "The miss is the value minus the answer, so the value gets the gradient as it is.",
      alt: "An arrow at each value: where it should move so that the loss falls" },
    { id: "dDELTA.1", of: "DELTA.2", title: "To the faded memory", when: "step", show: [["k"], ["dS"], ["dm"], ["dD"]], pick: () => ["dD", now(), main(keyOf(now())), 0],
      bars: () => [J.map((j) => size(rowsOf("dD", j))), "|dD| of each"], heading: () => [after(), "−dS (dashed), and −dD of the rows"], draw: toFaded,
      say: "The answer was subtracted, so a part of the gradient is taken off along the key: what this token has overwritten hears less of the loss.",
      alt: "Rows of the faded memory with two arrows each, before and after a part is taken off",
      caption: () => (size(rowsOf("dS", now())) < 5e-5 ? `After ${names([now()])} nothing is read that the loss looks at.` : `Of the gradient dS, ${show(size(rowsOf("dS", now())))} long, k times dm is taken off, so that dD is ${show(size(rowsOf("dD", now())))} long.`) },
    { id: "dDELTA.k", of: "DELTA.4", title: "To the key", when: "step", show: [["dS"], ["correction"], ["faded"], ["dm"], ["dk"]], pick: () => ["dk", now(), 0],
      bars: () => [J.map((j) => size(D.map((d) => V.dk(j, d)))), "|dk| of each"], heading: () => [after(), "keys, and where this one should move: −dk"], draw: toKey,
      say: "The key was used twice: writing gives dS u, asking gives −D dm. Both are added up.",
      alt: "The keys as arrows, and where the one of this token should move",
      caption: () => (size(D.map((d) => V.dk(now(), d))) < 5e-5 ? `The key of ${names([now()])} does not matter to the loss.` : `The keys in their own plane. The loss falls if that of ${names([now()])} moves along the thick arrow, −dk. Keys can be dragged.`) },
    { id: "dDELTA.log_decay", of: "DELTA.1", title: "To the fading", when: "step", show: [["faded"], ["dD"], ["dlog"]], pick: () => ["dlog", now()],
      bars: ["dlog", "d(log decay) of each"], heading: () => [after(), "fading moves rows to 0; −dD"], draw: toFading,
      say: "Call the logarithm of the decay x. The faded memory is D = eˣ S, so its derivative by x is D itself. Multiply D by the gradient dD, element by element, and add up.",
      alt: "Rows of the faded memory, dashed arrows by which they fade, and arrows against their gradients",
      caption: () => (Math.abs(V.dlog(now())) < 5e-5 ? `How much fades before ${names([now()])} ${matters(V.dlog(now()))} to the loss.` : `Dashed: how rows fade. In full: how they should move. To keep ${V.dlog(now()) > 0 ? "less" : "more"} before ${names([now()])} would lower the loss.`) },
  ],
  time: { steps: () => J.length, name: "token", first: () => J.length - 1 },
  board,
  picture: () => (S.side === "backward" ? toTheValue : opening),
  tasks: [
    { say: "write more firmly (β, or longer keys), until the newest token is remembered to within 0.1", done: () => size([states(J.length)].map((memory) => asked(memory, keyOf(J.length - 1)).map((x, e) => x - DATA.v[J.length - 1][e]))) < 0.1 },
    { say: "lengthen the keys until a writing overshoots: β k · k is more than 1", done: () => J.some((j) => K.beta * along(j, j) > 1 + 1e-9) },
    { say: "let the memory fade (decay) until fading leaves less than a tenth of what the first token wrote", done: () => K.log_decay * (J.length - 1) < Math.log(0.1) },
    { say: "drag values, or the target t (backwards), until o meets t", done: () => size(E.map((e) => V.o(S.i, e) - DATA.target[e])) < 0.1 },
  ],
  height: (W) => (W < 420 ? 112 : Math.min(450, Math.round(W * 0.46))),
  label: () => `The memory as a table of ${D.length} by ${E.length}, and its answers in the plane of the values`,
  caption,
});
