// Pictures of attention, which several tours draw: a query among keys, shares of one, values about their mean, gradients.
//
// A tour has them from `attention({ hidden, seen, weights, by })`. `hidden(i, j)`: query i does not see key j; `seen(j)`: the
// followed one sees it; `weights()`: how much of each value is in the output, by default V.w; `by()`: what queries are
// multiplied by. They take b, where a card draws, and read the quantities that tours share: q, k, v, o, target, do, dv. A
// plane is made of the points as they were at first, so that it stays while they are dragged.
//
//   word(), vectorOf("k", D, j)          the followed word; the first two numbers of a vector
//   arrows(b), values(b, tied)           the query and the keys as arrows; the values, and their mean by the weights
//   pairs(b, "m", frames, most)          numbers of pairs: a row for each word that looks
//   curve(b, f, low, high, [0, 1], points)    a function, with a point for each word
//   divided(b, key, numbers, y, high), shared(b, "u", "w", whole)    a bar in parts; parts, and each divided by their sum
//   wished("SM.5", "w", "weight w"), toValues, toWeights    the first card of the way back; what the next ones draw
//   about(b, numbers, mean, told)        numbers above and below their mean
//   pulled(b, told, vectors, chained)    arrows at keys, enlarged; or from the query on, one after the other
//   GIVEN, gradient                      the quantities that a tour is given, and the gradient of the output, `do`
// Without a tour's numbers: largest(list), minus(p, q, by), rings(place, far), slopes(b, [["told", "dkappa"], ...], V).

const largest = (list) => list.indexOf(Math.max(...list));
const minus = (p, q, by = 1) => p.map((x, c) => x - by * (q[c] ?? 0));

// What a tour is given, and what its first gradient is.
const GIVEN = {
  q: { axes: "id", what: "query" },
  k: { axes: "jd", what: "key" },
  v: { axes: "je", what: "value" },
  target: { axes: "e", symbol: "t", what: "wanted output" },
};
const LEARN = "To learn is to change numbers so that a loss falls. So we ask of every number how the loss changes with it. That is its gradient, written with a d in front. The steps come in reverse.";

function attention({ DATA, S, V, F, J, D, E }, { hidden = () => false, seen = (j) => !hidden(S.i, j), weights = () => J.map((j) => V.w(S.i, j)), by = () => 1 } = {}) {
  const first = { q: DATA.q.map(flat), k: DATA.k.map(flat), v: DATA.v.map(flat), target: flat(DATA.target) };
  const word = () => `<b>${DATA.tokens[S.i]}</b>`, vectorOf = (name, wide, ...at) => flat(wide.map((c) => V[name](...at, c)));
  const thick = { class: "vector thick" }, hue = (j) => ({ style: `stroke:${color(j)}` });

  function arrows(b) {
    const scaled = first.q[S.i].map((x) => by() * x), at = plane(b.left, b.top, b.size, [...first.k, scaled, [0, 0]], b.wide), place = (p) => [at.X(p), at.Y(p)];
    const q = vectorOf("q", D, S.i), zero = place([0, 0]), keys = J.map((j) => vectorOf("k", D, j));
    const named = (key, p, name, [dx, above, below], look) => (b.quiet ? [] : label(key, at.X(p) + (p[0] < 0 ? -dx : dx), at.Y(p) + (p[1] < 0 ? below : above), name, { class: look, "text-anchor": p[0] < 0 ? "end" : "start" }));
    const drawn = [
      at.ground,
      J.map((j) => [
        vector(`key.${j}`, ...zero, ...place(keys[j]), { ...hue(j), opacity: seen(j) ? 1 : 0.3 }),
        named(`name.${j}`, keys[j], DATA.tokens[j], [8, -6, 14], "name"),
        point(`dot.${j}`, ...place(keys[j]), b.quiet ? 3 : 5, j, { "aria-label": `drag the key of ${DATA.tokens[j]}` }, (x, y) => put(DATA.k[j], at.back(x, y))),
      ]),
      vector("query", ...zero, ...place(q), thick),
      mark("q", "circle", { cx: at.X(q), cy: at.Y(q), r: b.quiet ? 4 : 6, class: "sink", "aria-label": "drag the query" }, "", (x, y) => put(DATA.q[S.i], at.back(x, y), by())),
      named("query name", q, "q", [10, -8, 16], "name strong"),
    ];
    return { at, place, q, keys, drawn, feet: () => feet(at, keys, q, b.quiet) };
  }

  // Numbers of pairs: a row for each word that looks; cells that are hidden are crossed out; `frames` are [row, column, how many].
  function pairs(b, name, frames = [[S.i, 0, J.length]], size = undefined) {
    const n = J.length, names = b.quiet ? 4 : 74, head = b.quiet ? 10 : 26, wide = (b.wide - names) / n, high = (b.size - head) / n, X = (j) => b.left + names + j * wide, Y = (i) => b.top + head + i * high;
    return [
      b.quiet ? [] : J.map((i) => text(X(0) - 8, Y(i) + high / 2 + 4, DATA.tokens[i], { "text-anchor": "end", class: i === S.i ? "strong" : "title" })),
      grid("cell", X(0), Y(0), n * wide, n * high, J.map((i) => J.map((j) => V[name](i, j))), (i, j) => `${name}.${i}.${j}`, size),
      J.map((i) => J.filter((j) => hidden(i, j)).map((j) => line(`shut.${i}.${j}`, [[X(j) + 4, Y(i) + high - 4], [X(j) + wide - 4, Y(i) + 4]]))),
      J.map((j) => point(`dot.${j}`, X(j) + wide / 2, b.top + head / 2 - 2, b.quiet ? 3 : 5, j)),
      frames.map(([i, j, count], m) => mark(`frame.${m}`, "rect", { x: X(j), y: Y(i), width: count * wide, height: high, rx: 4, class: "frame" })),
    ];
  }

  // A function from `low` to `high`, and a point for each word at [x, y]; a bar below it if `bars`, else a line.
  function curve(b, of, low, high, [bottom, top], points, { bars = false, told = () => [], room = [18, 16] } = {}) {
    const X = scale(low, high, b.left + 14, b.left + b.wide - 14), Y = scale(bottom, top, b.top + b.size - (b.quiet ? 6 : room[0]), b.top + (b.quiet ? 6 : room[1])), place = ([x, y]) => [Math.max(X(low), X(x)), Y(y)];
    return {
      X, Y,
      drawn: [
        line("floor", [[X(low), Y(0)], [X(high), Y(0)]], { class: "axis" }),
        line("curve", Array.from({ length: 41 }, (_, n) => low + ((high - low) * n) / 40).map((x) => [X(x), Y(of(x))]), { class: "curve" }),
        points.map((p, j) => {
          const [x, y] = place(p);
          return [
            bars ? mark(`part.${j}`, "rect", { x: x - 4, y, width: 8, height: Y(0) - y, style: `fill:${color(j)}`, "fill-opacity": 0.5 }) : line(`drop.${j}`, [[x, Y(0)], [x, y]], { class: "hair dashed", ...hue(j) }),
            point(`dot.${j}`, x, y, b.quiet ? 3 : bars ? 5 : 7, j), b.quiet ? [] : told(j, x, y),
          ];
        }),
      ],
    };
  }

  // A part of a bar for each word, as wide as its number, `high(j)` of the height; `whole` is as wide as there is room.
  function divided(b, key, list, y, height, high = () => 1, whole = 1) {
    const X = scale(0, Math.max(whole, list.reduce((past, number) => past + number, 0)), b.left + 4, b.left + b.wide - 4);
    let before = 0;
    return list.map((number, j) => {
      const x = X(before), wide = X(before += number) - x, tall = height * Math.max(0, Math.min(1, high(j)));
      return { x, wide, to: x + wide, middle: x + wide / 2, top: y + height - tall, drawn: mark(`${key}.${j}`, "rect", { x, y: y + height - tall, width: Math.max(0, wide - 1), height: tall, style: `fill:${color(j)}`, "fill-opacity": key === "part" ? 1 : 0.45 }) };
    });
  }

  // The parts of the followed word, and below each of them divided by their sum.
  function shared(b, part, share, whole = 1) {
    const of = (name) => J.map((j) => V[name](S.i, j)), shares = of(share), told = percents(shares), high = 0.24 * b.size, up = b.top + 0.14 * b.size, down = b.top + 0.6 * b.size;
    const parts = divided(b, part, of(part), up, high, undefined, whole), all = divided(b, "part", shares, down, high), places = spread(all.map(({ middle }) => middle), 40, b.left + 18, b.left + b.wide - 18);
    return [
      b.quiet ? "" : text(b.left + 4, up - 6, `sum of ${part} = ${show(of(part).reduce((past, x) => past + x, 0))}`, { class: "title" }) + text(b.left + b.wide - 4, down + high + 34, `sum of ${share} = 1`, { class: "title", "text-anchor": "end" }),
      J.map((j) => [
        parts[j].drawn, line(`drop.${j}`, [[parts[j].to, up + high], [all[j].to, down]], { class: "hair dashed", ...hue(j) }), all[j].drawn,
        point(`dot.${j}`, all[j].middle, down + high / 2, Math.min(b.quiet ? 2 : 4, all[j].wide / 2), j, { style: `fill:${color(j)};stroke:none` }),
        b.quiet || !shares[j] ? [] : label(`share.${j}`, places[j], down + high + 16, `${all[j].wide < 8 * DATA.tokens[j].length + 44 ? "" : `${DATA.tokens[j]} `}${told[j]}`, { "text-anchor": "middle", class: "share" }),
      ]),
    ];
  }

  // The values as points within their hull, as large as their weights, and their mean o; `aim` is the wanted one.
  function values(b, tied = false) {
    const points = J.map((j) => vectorOf("v", E, j)), at = plane(b.left, b.top, b.size, [...first.v, [0, 0], first.target], b.wide), goal = flat(DATA.target), place = (p) => [at.X(p), at.Y(p)], whole = vectorOf("o", E, S.i);
    const [l, t, r, e] = at.box, [x, y] = place(whole), out = x < l || x > r || y < t || y > e ? at.back(x, y) : whole; // of negative weights it may be far away
    const side = !tied && goal[0] > out[0] ? -1 : 1; // so that the arrow between them crosses neither name
    const drawn = meeting(b, at, DATA.tokens, points, weights(), seen, out, tied, (j, p) => put(DATA.v[j], p), side);
    return { at, points, out, goal, place, drawn, aim: aimed(b, at, goal, (p) => put(DATA.target, p), "t", -side), grad: vectorOf("do", E, S.i) };
  }

  // The card with which all tours turn back, and its picture: the way to what is wished for, and circles of equal loss.
  const wish = (b) => {
    const { at, out, goal, place, drawn, aim } = values(b), far = at.unit * Math.hypot(goal[0] - out[0], goal[1] - out[1]);
    return [drawn, rings(place(goal), far), vector("down", ...place(out), ...place(goal), thick), aim];
  };
  const wished = (id, name = "w", told = "weight w") => ({
    title: "What is wished for", of: id, formula: "do = o - t", show: [["o[i]", "do[i]"], ["target"]], pick: () => ["do", S.i, 0],
    bars: [name, told], heading: "from the output o to what is wished for, t", draw: wish,
    alt: "An arrow from the output to the wanted output, and circles of equal loss",
    caption: () => `The arrow from o to t is −do: the way on which the loss falls fastest. It is ${show(Math.hypot(...E.map((c) => V.do(S.i, c))))} long. Drag t.`,
    say: () => `We wish that the output of ${word()} had been t. The loss is half the squared distance, so its gradient is the difference.`,
  });
  const gradient = { axes: "ie", what: "gradient of the output", of: (i, c) => (i === S.i ? sub(F.o(i, c), F.target(c)) : words("for the loss looks at another output", 0)) };

  function toValues(b) {
    const { points, place, drawn, aim } = values(b);
    return [drawn, aim, points.map((p, j) => vector(`push.${j}`, ...place(p), ...place(minus(p, E.map((c) => V.dv(j, c))))))];
  }

  // How far each value points along do.
  function toWeights(b) {
    const { at, points, place, drawn, aim, grad } = values(b);
    return [drawn, feet(at, points, grad, b.quiet), vector("down", ...place([0, 0]), ...place(grad), thick), b.quiet ? [] : label("do name", at.X(grad) + 8, at.Y(grad) - 8, "do", { class: "name strong" }), aim];
  }

  // Numbers above and below a mean, each as wide as its share of it.
  function about(b, numbers, mean, told, ref, shares = weights()) {
    const Y = scale(Math.min(...numbers, mean - 1e-6), Math.max(...numbers, mean + 1e-6), b.top + b.size - 24, b.top + 24), X = (j) => b.left + (b.wide * (j + 0.5)) / J.length;
    return [
      svg("rect", { x: b.left, y: b.top, width: b.wide, height: b.size, rx: 6, class: "plane" }),
      line("along", [[b.left, Y(mean)], [b.left + b.wide, Y(mean)]], { class: "hair dashed" }),
      b.quiet ? [] : label("mean", b.left + 6, Y(mean) - 6, told, { class: "name strong", ...(ref ? { "data-ref": ref } : {}) }),
      J.map((j) => [
        line(`drop.${j}`, [[X(j), Y(numbers[j])], [X(j), Y(mean)]], { class: "flow", ...hue(j), "stroke-width": Math.max(1, 26 * shares[j]) }),
        point(`dot.${j}`, X(j), Y(numbers[j]), (b.narrow ? 2.5 : 4) + (b.narrow ? 5 : 13) * Math.sqrt(shares[j]), j, { opacity: seen(j) ? 1 : 0.35 }),
        b.quiet ? [] : label(`name.${j}`, X(j), b.top + b.size - 6, DATA.tokens[j], { "text-anchor": "middle", class: "title" }),
      ]),
    ];
  }

  // Arrows on a picture of `arrows`, as many times as long as leaves them readable, which the heading tells: the way of the
  // query, one arrow after the other and all of them together, or one at each key.
  function pulled(b, heading, vectors, chained = false) {
    const { at, place, q, keys, drawn } = arrows(b), all = chained ? [vectors.reduce((sum, p) => minus(sum, p, -1), [0, 0]), ...vectors] : vectors, times = enlarged(at.unit * Math.max(1e-9, ...all.map((p) => Math.hypot(...p))), 0.3 * b.size);
    let here = q;
    const pushes = vectors.map((p, j) => { const from = chained ? here : keys[j]; here = minus(from, p, -times); return vector(`push.${j}`, ...place(from), ...place(here), chained ? hue(j) : {}); });
    return [b.quiet ? "" : text(b.left, 12, `${heading}${times > 1 ? `, ${times} times as long` : ""}`, { class: "title" }), drawn, pushes, chained ? vector("down", ...place(q), ...place(here), thick) : []];
  }

  return { word, vectorOf, weights, first, arrows, pairs, curve, divided, shared, values, wish, wished, gradient, toValues, toWeights, about, pulled };
}

// Circles about what is wished for, on which the loss is the same.
const rings = ([x, y], far) => [1, 0.66, 0.33].map((part, n) => mark(`ring.${n}`, "circle", { cx: x, cy: y, r: part * far, class: "ghost" }));

// Gradients of single numbers as bars from a middle line, to one scale.
function slopes(b, all, V) {
  const high = b.size / all.length, zero = b.left + 0.5 * b.wide, most = Math.max(1e-12, ...all.map(([, name]) => Math.abs(V[name]())));
  return [
    line("along", [[zero, b.top], [zero, b.top + b.size]], { class: "axis" }),
    all.map(([told, name], n) => {
      const long = 0.45 * b.wide * (V[name]() / most);
      return [
        mark(`knob.${n}`, "rect", { x: Math.min(zero, zero + long), y: b.top + (n + 0.5) * high, width: Math.abs(long), height: 0.3 * high, rx: 2, style: "fill:var(--accent)" }),
        label(`knob name.${n}`, b.left + 4, b.top + (n + 0.36) * high, b.narrow ? told : `${told}: ${show(V[name]())}`, { class: "name", "data-ref": name }),
      ];
    }),
  ];
}
