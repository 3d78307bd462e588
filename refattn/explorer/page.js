"use strict";
// What stands in the page's data: nodes (arguments and equations), their values, what each number feeds, knobs.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const nodes = data.nodes, index = new Map(nodes.map((node, n) => [node.name, n]));

function numbers(text, Type) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  return new Type(bytes.buffer);
}

let total = 0;
for (const node of nodes) {
  node.offset = total;
  node.size = node.shape.reduce((a, b) => a * b, 1);
  total += node.size;
}
const own = numbers(data.values, Float64Array);
let values = own, pictures = data.pictures;

// feeds[place] and madeOf[place]: places in the one long array of all values.
const feeds = Array.from({ length: total }, () => []), madeOf = Array.from({ length: total }, () => []);
data.feeds.forEach((elements, n) => elements.forEach((text, e) => {
  for (const part of text ? text.split(";") : []) {
    const [to, ranges] = part.split(":");
    for (const range of ranges.split(",")) {
      const [first, last] = range.split("-").map(Number);
      for (let i = first; i <= (last ?? first); i++) {
        const place = nodes[to].offset + i;
        feeds[nodes[n].offset + e].push(place);
        madeOf[place].push(nodes[n].offset + e);
      }
    }
  }
}));

const cells = new Array(total);

function short(x, truth) {
  if (truth) return x ? "yes" : "no";
  if (Number.isNaN(x)) return "NaN";
  if (!Number.isFinite(x)) return x > 0 ? "∞" : "−∞";
  if (x === 0) return "0";
  const size = Math.abs(x);
  return (size >= 1e4 || size < 1e-3 ? x.toExponential(1) : x.toPrecision(3)).replace("-", "−");
}

function exact(x, truth) {
  return truth ? (x ? "true" : "false") : Number.isFinite(x) ? (values === own ? String(x) : x.toPrecision(7)) : String(x);
}

// A value as tables: the last two axes are rows and columns, what stands before them counts the tables.
function build(node) {
  const article = byId(node.name), box = article.querySelector(".value");
  const shape = node.shape.length >= 2 ? node.shape : [...Array(2 - node.shape.length).fill(1), ...node.shape];
  const [rows, columns] = shape.slice(-2), blocks = rows * columns ? node.size / (rows * columns) : 0;
  for (let block = 0; block < blocks; block++) {
    const table = document.createElement("table");
    if (blocks > 1) {
      const leading = shape.slice(0, -2), told = [];
      let rest = block;
      for (let axis = leading.length - 1; axis >= 0; axis--) {
        if (leading[axis] > 1) told.unshift(`${node.axes[axis] ?? `axis ${axis}`} = ${rest % leading[axis]}`);
        rest = Math.floor(rest / leading[axis]);
      }
      table.createCaption().textContent = told.join(", ");
    }
    for (let r = 0; r < rows; r++) {
      const line = table.insertRow();
      for (let c = 0; c < columns; c++) {
        const cell = line.insertCell(), place = node.offset + (block * rows + r) * columns + c;
        cell.dataset.place = place;
        cells[place] = cell;
      }
    }
    box.append(table);
  }
}

function fill() {
  for (const node of nodes) {
    let most = 0;
    for (let p = node.offset; p < node.offset + node.size; p++) {
      if (Number.isFinite(values[p])) most = Math.max(most, Math.abs(values[p]));
    }
    for (let p = node.offset; p < node.offset + node.size; p++) {
      const x = values[p], share = Number.isFinite(x) && most > 0 ? Math.abs(x) / most : 0;
      cells[p].textContent = short(x, node.truth);
      cells[p].style.background = `rgba(var(--${x < 0 ? "minus" : "plus"}), ${(0.55 * share).toFixed(3)})`;
    }
  }
}

function nodeOf(place) {
  let low = 0, high = nodes.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (nodes[middle].offset <= place) low = middle; else high = middle - 1;
  }
  return nodes[low];
}

function position(node, place) {
  const found = [];
  let rest = place - node.offset;
  for (let axis = node.shape.length - 1; axis >= 0; axis--) {
    found.unshift(rest % node.shape[axis]);
    rest = Math.floor(rest / node.shape[axis]);
  }
  return found;
}

function summary(places) {
  const counts = new Map();
  for (const place of places) {
    const name = nodeOf(place).name;
    counts.set(name, (counts.get(name) ?? 0) + 1);
  }
  return [...counts].map(([name, n]) => (n > 1 ? `${name} (${n})` : name)).join(", ") || "nothing";
}

let marked = [];
function point(place) {
  for (const cell of marked) cell.classList.remove("from", "to", "at");
  marked = [];
  const mark = (p, name) => { cells[p].classList.add(name); marked.push(cells[p]); };
  const told = byId("told");
  if (place === null) { told.textContent = ""; return; }
  mark(place, "at");
  for (const p of madeOf[place]) mark(p, "from");
  for (const p of feeds[place]) mark(p, "to");
  const node = nodeOf(place), axes = node.axes.length ? `${node.axes.join(", ")} = ` : "";
  told.replaceChildren();
  const add = (tag, text, name) => {
    const made = document.createElement(tag);
    made.textContent = text;
    if (name) made.className = name;
    told.append(made);
  };
  add("strong", `${node.name} (${axes}${position(node, place).join(", ")}) = `);
  add("code", exact(values[place], node.truth));
  add("span", "  made of: ");
  add("span", summary(madeOf[place]), "from");
  add("span", "  feeds: ");
  add("span", summary(feeds[place]), "to");
}

let current = 0, focused = null;
function go(step, scroll = true) {
  current = Math.max(0, Math.min(data.order.length - 1, step));
  const name = data.order[current];
  const pass = Number((name.match(/\[(\d+)\]$/) ?? [0, 0])[1]);
  if (Number(byId("pass").value) >= 0 && pass !== Number(byId("pass").value)) setPass(-1);
  data.order.forEach((other, n) => {
    const article = byId(other);
    article.classList.toggle("current", n === current);
  });
  byId("step").value = current;
  byId("step-told").textContent = `${current + 1}/${data.order.length} ${name}`;
  focused = null;
  point(null);
  const article = byId(name);
  article.focus({ preventScroll: true });
  if (!scroll) return;
  article.scrollIntoView({ block: "nearest" });
  history.replaceState(null, "", `#${name}`);
}

function move(by) {
  const node = nodes[index.get(data.order[current])];
  if (!node.size) return;
  focused = focused === null ? (by > 0 ? 0 : node.size - 1) : (focused + by + node.size) % node.size;
  point(node.offset + focused);
  cells[node.offset + focused].scrollIntoView({ block: "nearest", inline: "nearest" });
}

function setToken(token) {
  byId("token").value = token;
  byId("token-told").textContent = token < 0 ? "all" : String(token);
  for (const node of nodes) {
    // Of a query or token where there is one, otherwise of a key.
    const axis = ["i", "n", "j"].map((a) => node.axes.indexOf(a)).find((a) => a >= 0);
    for (let p = node.offset; p < node.offset + node.size; p++) {
      cells[p].classList.toggle("token", token >= 0 && axis !== undefined && position(node, p)[axis] === token);
    }
  }
}

const passes = Math.max(0, ...data.order.map((name) => Number((name.match(/\[(\d+)\]$/) ?? [0, 0])[1])));
function setPass(pass) {
  byId("pass").value = pass;
  byId("pass-told").textContent = pass < 0 ? "all" : String(pass);
  const repeated = new Set(data.order.filter((name) => name.endsWith("]")).map((name) => name.replace(/\[\d+\]$/, "")));
  for (const name of data.order) {
    const [plain, own] = [name.replace(/\[\d+\]$/, ""), Number((name.match(/\[(\d+)\]$/) ?? [0, 0])[1])];
    byId(name).hidden = pass >= 0 && repeated.has(plain) && own !== pass;
  }
}

function turn(knob, setting) {
  data.knobs.forEach((other, n) => {
    const at = n === knob ? setting : other.here;
    byId(`knob-${n}`).value = at;
    byId(`knob-${n}-told`).textContent = Number(other.settings[at].toPrecision(4)) + (at === other.here ? "" : " *");
  });
  const chosen = data.knobs[knob];
  const here = setting === chosen.here;
  values = here ? own : numbers(chosen.values[setting], Float32Array);
  pictures = here ? data.pictures : chosen.pictures[setting];
  fill();
  draw();
  if (marked.length) point(Number(document.querySelector("td.at")?.dataset.place ?? 0));
}

// --- pictures: matrices, lines, ways of points in a plane, bars

const SVG = "http://www.w3.org/2000/svg";
const colour = (n) => `var(--c${n % 8})`;
function element(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function extent(numbers) {
  const finite = numbers.filter(Number.isFinite);
  let [low, high] = [Math.min(...finite), Math.max(...finite)];
  if (!finite.length) [low, high] = [0, 1];
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  return [low, high];
}

const painters = {
  matrix(svg, rows) {
    const side = 150 / Math.max(rows.length, rows[0].length), most = Math.max(1e-300, ...rows.flat().map(Math.abs).filter(Number.isFinite));
    rows.forEach((row, r) => row.forEach((x, c) => {
      const cell = element("rect", { x: 5 + c * side, y: 5 + r * side, width: side - 1, height: side - 1, stroke: "var(--line)" });
      cell.style.fill = `rgba(var(--${x < 0 ? "minus" : "plus"}), ${(0.05 + 0.9 * Math.abs(x) / most).toFixed(3)})`;
      cell.append(element("title", {}, `${r}, ${c}: ${short(x)}`));
      svg.append(cell);
    }));
    return [160, 160];
  },
  lines(svg, lines) {
    const [low, high] = extent(lines.flat()), last = Math.max(1, lines[0].length - 1);
    const x = (n) => 45 + (n / last) * 195, y = (v) => 145 - ((v - low) / (high - low)) * 130;
    lines.forEach((line, n) => {
      const points = line.map((v, i) => `${x(i).toFixed(1)},${y(v).toFixed(1)}`).join(" ");
      svg.append(element("polyline", { points, fill: "none", stroke: colour(n), "stroke-width": 2 }));
      line.forEach((v, i) => svg.append(element("circle", { cx: x(i), cy: y(v), r: 2.5, fill: colour(n) })));
    });
    svg.append(element("text", { x: 2, y: y(high) + 8 }, short(high)), element("text", { x: 2, y: y(low) }, short(low)));
    svg.append(element("text", { x: 42, y: 162 }, "0"), element("text", { x: 232, y: 162 }, String(lines[0].length - 1)));
    return [255, 168];
  },
  bars(svg, groups) {
    const [, high] = extent([0, ...groups.flat()]), wide = 195 / groups.flat().length;
    let at = 45;
    groups.forEach((group, n) => {
      for (const v of group) {
        const tall = Math.max(0.5, (v / high) * 130);
        const bar = element("rect", { x: at, y: 145 - tall, width: wide * 0.8, height: tall, fill: colour(n) });
        bar.append(element("title", {}, short(v)));
        svg.append(bar);
        at += wide;
      }
    });
    svg.append(element("text", { x: 2, y: 20 }, short(high)), element("text", { x: 2, y: 148 }, "0"));
    return [255, 160];
  },
  // Ways in a plane, each a list of points; the last point is the larger one. A unit circle where it is asked for.
  plane(svg, ways, circle) {
    const xs = ways.flat().map((p) => p[0]), ys = ways.flat().map((p) => p[1]);
    if (circle) { xs.push(-1.1, 1.1); ys.push(-1.1, 1.1); }
    const [[l, r], [b, t]] = [extent(xs), extent(ys)], span = Math.max(r - l, t - b);
    const x = (v) => 100 + ((v - (l + r) / 2) / span) * 180, y = (v) => 100 - ((v - (b + t) / 2) / span) * 180;
    svg.append(element("line", { x1: x(0), x2: x(0), y1: 4, y2: 196, stroke: "var(--line)" }));
    svg.append(element("line", { y1: y(0), y2: y(0), x1: 4, x2: 196, stroke: "var(--line)" }));
    if (circle) svg.append(element("circle", { cx: x(0), cy: y(0), r: 180 / span, fill: "none", stroke: "var(--soft)", "stroke-dasharray": "3 3" }));
    ways.forEach((way, n) => {
      const own = colour(n), points = way.map((p) => `${x(p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`);
      svg.append(element("polyline", { points: points.join(" "), fill: "none", stroke: own, "stroke-width": 1.5 }));
      way.forEach((p, i) => {
        const dot = element("circle", { cx: x(p[0]), cy: y(p[1]), r: i === way.length - 1 ? 4 : 2, fill: own });
        dot.append(element("title", {}, `${n}: ${short(p[0])}, ${short(p[1])}`));
        svg.append(dot);
      });
    });
    return [200, 200];
  },
  circle(svg, ways) {
    return painters.plane(svg, ways, true);
  },
};

function draw() {
  const box = byId("pictures");
  box.replaceChildren();
  for (const picture of pictures) {
    const figure = document.createElement("figure"), caption = document.createElement("figcaption");
    const svg = element("svg", { role: "img", "aria-label": picture.title });
    const numbers = JSON.parse(JSON.stringify(picture.data), (_, x) => (x === null ? NaN : x));
    const [wide, high] = painters[picture.kind](svg, numbers);
    svg.setAttribute("viewBox", `0 0 ${wide} ${high}`);
    svg.setAttribute("width", wide * 1.15);
    caption.textContent = picture.title;
    figure.append(svg, caption);
    box.append(figure);
  }
}

// --- what the reader does

byId("turn-knobs").addEventListener("click", () => {
  byId("turn-knobs").setAttribute("aria-expanded", String(document.body.classList.toggle("turning")));
});
for (const node of nodes) build(node);
fill();
draw();

byId("step").max = data.order.length - 1;
byId("token").max = Math.max(0, ...nodes.filter((node) => node.shape.length >= 3).map((node) => node.shape.at(-2))) - 1;
byId("pass").max = passes;
byId("pass-label").hidden = passes === 0;
data.knobs.forEach((knob, n) => {
  const label = document.createElement("label"), input = document.createElement("input"), told = document.createElement("output");
  Object.assign(input, { type: "range", id: `knob-${n}`, min: 0, max: knob.settings.length - 1, value: knob.here });
  told.id = `knob-${n}-told`;
  told.textContent = Number(knob.settings[knob.here].toPrecision(4));
  label.append(`${knob.label} `, told, input);
  byId("knobs").append(label);
  input.addEventListener("input", () => turn(n, Number(input.value)));
});
byId("step").addEventListener("input", () => go(Number(byId("step").value)));
byId("token").addEventListener("input", () => setToken(Number(byId("token").value)));
byId("pass").addEventListener("input", () => setPass(Number(byId("pass").value)));
setToken(-1);
setPass(-1);

byId("cards").addEventListener("mouseover", (event) => {
  const cell = event.target.closest("td");
  if (cell) point(Number(cell.dataset.place));
});
byId("cards").addEventListener("click", (event) => {
  const article = event.target.closest("article"), cell = event.target.closest("td");
  if (!article) return;
  if (event.target.closest("a")) event.preventDefault();
  go(data.order.indexOf(article.id), false);
  if (cell) {
    focused = Number(cell.dataset.place) - nodes[index.get(article.id)].offset;
    point(Number(cell.dataset.place));
  }
});
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "INPUT") return;
  const actions = { ArrowRight: () => go(current + 1), ArrowLeft: () => go(current - 1), ArrowDown: () => move(1), ArrowUp: () => move(-1),
    Home: () => go(0), End: () => go(data.order.length - 1), Escape: () => point(null) };
  if (actions[event.key]) { event.preventDefault(); actions[event.key](); }
});
function fromAddress() {
  const name = decodeURIComponent(location.hash.slice(1));
  const step = data.order.indexOf(name);
  go(step >= 0 ? step : 0, step >= 0);
}
window.addEventListener("hashchange", fromAddress);
fromAddress();
