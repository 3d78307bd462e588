// What the pictures of all tours are made of: elements of SVG as text, scales, and labels that do not overlap.

const svg = (tag, set = {}, inner = "") =>
  `<${tag} ${Object.entries(set).map(([key, x]) => `${key}="${typeof x === "number" ? +x.toFixed(2) : x}"`).join(" ")}>${inner}</${tag}>`;
const text = (x, y, inner, set = {}) => svg("text", { x, y, ...set }, inner);
const color = (j) => `var(--c${j % 8})`;
const scale = (low, high, from, to) => (x) => from + ((x - low) / (high - low || 1)) * (to - from);

// Positions as near as may be to what they are, in their order, none nearer to the next than `gap`.
function spread(positions, gap, low, high) {
  const order = positions.map((_, n) => n).sort((a, b) => positions[a] - positions[b]), made = [];
  order.forEach((n, rank) => { made[n] = Math.max(positions[n], rank ? made[order[rank - 1]] + gap : low); });
  for (let rank = order.length - 1, most = high; rank >= 0; rank -= 1) {
    made[order[rank]] = Math.min(made[order[rank]], most);
    most = made[order[rank]] - gap;
  }
  return made;
}

// Low and high of both coordinates of points, as a square with some room around it.
function bounds(points, room = 0.15) {
  const of = (c) => [Math.min(...points.map((p) => p[c])), Math.max(...points.map((p) => p[c]))];
  const [[l, r], [b, t]] = [of(0), of(1)], half = (0.5 + room) * Math.max(r - l, t - b, 1e-6);
  return [(l + r) / 2 - half, (l + r) / 2 + half, (b + t) / 2 - half, (b + t) / 2 + half];
}

// A plane in a square, or wider than high: its ground, its axes, and the functions that place a point.
function plane(x, y, size, points, wide = size) {
  const [l, r, b, t] = bounds(points), X = scale(l, r, x + (wide - size) / 2, x + (wide + size) / 2), Y = scale(b, t, y + size, y);
  const inside = (at, low, high) => at > low && at < high;
  const ground =
    svg("rect", { x, y, width: wide, height: size, rx: 6, class: "plane" }) +
    (inside(X(0), x, x + wide) ? svg("path", { d: `M${X(0)} ${y}V${y + size}`, class: "axis" }) : "") +
    (inside(Y(0), y, y + size) ? svg("path", { d: `M${x} ${Y(0)}H${x + wide}`, class: "axis" }) : "");
  return { X: (p) => X(p[0]), Y: (p) => Y(p[1]), unit: size / (r - l), ground };
}

// Writes names beside marks, where no other name stands: above, below, to the right or the left, or not at all. `taken`:
// boxes [left, top, right, bottom] where none may stand; `avoided`: where one may if there is no other place.
function labels(W, H, high, taken = [], left = 0, top = 0, avoided = []) {
  return (name, x, y, half, look, order = [0, 1, 2, 3]) => {
    const wide = name.length * high * (look.includes("strong") ? 0.66 : 0.56), sides = [[x, y - half - 4, "middle"], [x, y + half + high - 1, "middle"], [x + half + 3, y + high / 3, "start"], [x - half - 3, y + high / 3, "end"]];
    for (const there of avoided.length ? [[...taken, ...avoided], taken] : [taken]) for (const [at, base, anchor] of order.map((n) => sides[n])) {
      const from = at - { start: 0, middle: wide / 2, end: wide }[anchor], box = [from, base - high * 0.8, from + wide, base + 2];
      if (box[0] < left || box[2] > W || box[1] < top || box[3] > H || there.some((other) => box[0] < other[2] && other[0] < box[2] && box[1] < other[3] && other[1] < box[3])) continue;
      taken.push(box);
      return text(at, base, name, { "text-anchor": anchor, class: look });
    }
    return "";
  };
}

const TIP = '<defs><marker id="tip" orient="auto" markerWidth="5" markerHeight="6" refX="4" refY="3"><path d="M0 0L5 3L0 6z"/></marker></defs>';
const arrow = (x, y, to, at, set = {}) => svg("path", { d: `M${x} ${y}L${to} ${at}`, class: "push", "marker-end": "url(#tip)", ...set });

// What can be clicked to follow a token.
const follows = (j, label, inner, set = {}) =>
  svg("g", { "data-word": j, tabindex: 0, role: "button", "aria-label": `follow ${label}`, ...set }, inner);

// The ground behind a number: its sign as a colour, its size beside the largest one as the strength of it.
const heat = (x, most) => `rgba(var(--${x < 0 ? "minus" : "plus"}), ${(0.55 * Math.min(1, Math.abs(x) / most)).toFixed(3)})`;
