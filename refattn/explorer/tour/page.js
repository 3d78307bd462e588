// The page of a tour: one card at a time beside a picture, knobs, and numbers that show where they come from.

const byId = (id) => document.getElementById(id);
const said = (x) => (typeof x === "function" ? x() : x);
const escaped = (x) => x.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
const still = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
const wide = () => matchMedia("(min-width: 960px)").matches;
const roomy = () => matchMedia("(min-width: 1180px)").matches && !document.body.classList.contains("all");

const MOVED = ["q", "k", "v", "target"]; // what a reader may drag

class Page {
  constructor(numbers) {
    this.own = numbers;
    this.active = 0;
    this.playing = 0;
    this.stage = new Stage(byId("picture"));
    this.arrived = -1e9; // when the page last moved by itself
    this.take(numbers);
    this.knobs();
    if (numbers.data.typed) this.words();
    this.listen();
    this.update({}, undefined, false);
    const from = this.fromAddress();
    this.activate(Math.max(0, from), from > 0);
    this.test();
    if (numbers.steps && from <= 0 && !still()) this.play();
    window.page = this;
  }

  // Show these numbers, of the tour's own words or of a reader's.
  take(numbers) {
    const { mechanism, state } = numbers;
    Object.assign(this, { numbers, mechanism, state, cards: this.listed(mechanism), done: new Set() });
    state.at = state.t = numbers.steps;
    this.given = numbers.given ??= structuredClone(Object.fromEntries(MOVED.map((name) => [name, numbers.data[name]])));
    this.tried = (mechanism.tasks ?? []).filter((task) => !numbers.data.words || !(task.own || task.done()));
    byId("cards").innerHTML = this.cards.map((card) => `<section id="card-${card.anchor}" class="card ${card.kind}" aria-label="${card.title}"></section>`).join("") + "<footer></footer>";
    byId("dots").innerHTML = this.cards.map((card) => `<button type="button" class="${card.kind}" tabindex="-1" aria-label="${card.where}" title="${card.where}"></button>`).join("");
    for (const card of this.cards) card.section = byId(`card-${card.anchor}`);
  }

  // The cards in order: what it is, the steps forward, the turn, and the steps backward.
  listed(mechanism) {
    const cards = [{ kind: "intro", title: mechanism.title, anchor: "start", where: "What it is" }];
    const steps = (list, kind, name) =>
      list.map((card, n) => ({ ...card, kind, n, ids: [card.id ?? []].flat(), anchor: [card.id ?? []].flat()[0] ?? `${kind}-${n + 1}`, where: `${name} ${n + 1} of ${list.length}: ${card.title}` }));
    cards.push(...steps(mechanism.forward, "forward", "Forward"));
    cards.push({ kind: "turn", title: "And now backwards", anchor: "backwards", where: "And now backwards" });
    return [...cards, ...steps(mechanism.backward, "backward", "Backward")];
  }

  // ---- a card --------------------------------------------------------------------------------------------------------

  fill(card) {
    const { section } = card, { data } = this.numbers;
    if (card.kind === "intro") {
      section.innerHTML =
        `<p class="eyebrow">Attention, step by step</p><p class="headline">${card.title}</p>${said(this.mechanism.intro).map((p) => `<p>${p}</p>`).join("")}` +
        `<p class="hint"><span class="keys"><kbd>←</kbd> <kbd>→</kbd> step through the tour. Point at a number to see what it is made of. </span><span class="touch">Tap a number to see what it is made of. </span>` +
        `Pick a word in the picture to follow it${data.typed ? ", or type words of your own below the knobs" : ""}. <span class="keys">The space key plays and pauses.</span></p>`;
      if (this.asked) section.innerHTML += `<p>The tour has no card of this equation, which the address asks for:</p>${this.equation(this.asked)}`;
      this.edges(section);
      return;
    }
    if (card.kind === "turn") {
      section.innerHTML = `<h2>${card.title}</h2><p>${said(this.mechanism.turn ?? LEARN)}</p>`;
      return;
    }
    const { formulaLine } = this, own = card.ids.map((id, n) => this.equation(id, "", n ? "" : card.formula)).join("") || `<div class="line"><p class="label">${card.label ?? "the loss"}</p>${formulaLine(data.formulas[card.formula])}</div>`;
    const also = card.also ? `<div class="line">${card.also.label ? `<p class="label">${card.also.label}</p>` : ""}${formulaLine(data.formulas[card.also.formula])}</div>` : "";
    const forward = card.of ? [card.of].flat().map((id) => this.equation(id, "differentiates ")).join("") : "";
    const step = this.steppedBy(card) ? `<p class="label moment">${this.moment(card)}; move along with the slider of the picture</p>` : "";
    section.innerHTML =
      `<div class="words"><h2><span>${card.n + 1}</span>${card.title}</h2><p class="say">${said(card.say)}</p>` +
      `<div class="lines${forward ? " paired" : ""}">${forward ? `<div class="forwards">${forward}</div>` : ""}<div class="owns">${own}${also}</div></div></div><div class="evidence">` +
      (this.state.t < (card.since ?? 0) ? `${step}<p class="label">None yet.</p>` : `<div class="numbers" aria-live="off"></div>${step}<div class="ledgers">${card.show.map((entries) => this.ledger(entries, card)).join("")}</div>`) + "</div>";
    for (const table of section.querySelectorAll("table")) table.querySelector("td[data-ref]")?.setAttribute("tabindex", "0");
    this.tell(card, this.picked(card));
    this.edges(section);
  }

  formulaLine(formula) {
    return formula ? `<p class="formula">${formula}</p>` : "";
  }

  // An equation of the definition with its name and its line of code.
  equation(id, label = "", otherwise = "") {
    const { data } = this.numbers, { formula, code, line } = data.equations[id];
    return `<div class="line"><p class="label">${label}<a href="#${id}">${id}</a></p>${this.formulaLine(formula || data.formulas[otherwise])}${code ? `<details${this.unfolded ? " open" : ""}><summary>in code</summary><pre tabindex="-1" title="line ${line} of definition.py"><code>${escaped(code)}</code></pre></details>` : ""}</div>`;
  }

  // The ids on a card: its own, what it differentiates, those of its numbers.
  idsOn(card) {
    const named = (entry) => this.mechanism.quantities[/^\w+'?/.exec(entry)[0]].id;
    return [...(card.ids ?? []), ...[card.of ?? []].flat(), ...(card.show ?? []).flat().map(named)];
  }

  // What the ids are, and which of the definition's no card shows.
  passed() {
    const ids = this.cards.flatMap((card) => this.idsOn(card)), seen = new Set(ids);
    const rest = Object.keys(this.numbers.data.equations).filter((id) => !seen.has(id));
    return ` Names like ${ids[0]} are those of the definition${rest.length ? `, of whose equations ${rest.join(", ").replace(/, ([^,]*)$/, " and $1")} ${rest.length > 1 ? "have" : "has"} no card` : ""}.`;
  }

  // Between which two steps a card is: the picture stands at the first, or at the end.
  moment(card) {
    const { name } = this.mechanism.time, from = Math.min(this.state.t, this.numbers.steps - 1);
    return card.kind === "backward" ? `back from ${name} ${from + 1} to ${name} ${from}` : `from ${name} ${from} to ${name} ${from + 1}`;
  }

  // Break formulas that are too wide before a sign between their terms, as browsers don't.
  broken(within) {
    for (const math of within.querySelectorAll(".formula > math:only-child")) {
      const box = math.parentNode, pieces = [[]];
      if (box.scrollWidth <= box.clientWidth + 1) continue;
      for (const part of [...math.firstElementChild.children]) {
        const { textContent: sign, previousElementSibling: before } = part, between = part.tagName === "mo" && "+−=".includes(sign) && before && before.tagName !== "mo";
        if (between) part.setAttribute("form", "infix");
        if (between || (before?.tagName === "mo" && before.textContent === ",")) pieces.push([]);
        pieces.at(-1).push(part);
      }
      box.classList.add("broken");
      math.firstElementChild.replaceChildren(...pieces[0]);
      for (const piece of pieces.slice(1)) {
        const next = math.cloneNode();
        next.removeAttribute("alttext");
        next.append(document.createElementNS(math.namespaceURI, "mrow"));
        next.firstChild.append(...piece);
        box.append(" ", next);
      }
    }
  }

  // Tell what goes on behind an edge: it fades there.
  edges(within) {
    this.broken(within);
    for (const box of within.querySelectorAll(".scroll, .formula, .numbers, pre")) {
      box.classList.toggle("more", box.scrollLeft + box.clientWidth < box.scrollWidth - 1);
      box.classList.toggle("less", box.scrollLeft > 1);
      if (box.matches(".formula")) box.tabIndex = box.scrollWidth > box.clientWidth + 1 ? 0 : -1; // who has no mouse scrolls it by keys
    }
  }

  steppedBy(card) {
    return card.when === "step" || card.timed;
  }

  // The number that a card follows: the one that was picked, or its own.
  picked(card) {
    return card.pin && card.section.querySelector(`td[data-ref="${card.pin}"]`) ? card.pin : card.pick ? card.pick().join(".") : "";
  }

  made(card, ref) {
    const id = this.mechanism.quantities[ref.split(".")[0]].id;
    return card.ids.includes(id);
  }

  tell(card, ref) {
    const panel = card.section.querySelector(".numbers");
    if (!panel || !ref) return;
    panel.innerHTML = `${this.nameOf(ref)}${this.spelled(ref)}`;
    card.told = ref;
    this.edges(card.section);
    this.mark(card.section, ref);
  }

  // What a number is, in words, with the id of its equation.
  nameOf(ref, rest = "") {
    const { what, id } = this.mechanism.quantities[ref.split(".")[0]];
    return `<p class="label">${what}${rest}${this.numbers.data.equations[id] ? ` <a href="#${id}">${id}</a>` : ""}</p>`;
  }

  spelled(ref) {
    const [name, ...at] = ref.split(".");
    return spelled(this.numbers, name, at.map(Number));
  }

  formulaOf(ref) {
    const [name, ...at] = ref.split(".");
    return this.numbers.formula(name, at.map(Number));
  }

  // Mark a number, what it is made of, and what it feeds.
  mark(within, ref) {
    within.querySelectorAll(".here, .part, .fed").forEach((cell) => cell.classList.remove("here", "part", "fed"));
    if (!ref) return;
    const parts = new Set(this.numbers.reads(this.formulaOf(ref)));
    for (const cell of within.querySelectorAll("td[data-ref]")) {
      const own = cell.dataset.ref;
      if (own === ref) cell.classList.add("here");
      else if (parts.has(own)) cell.classList.add("part");
      else if (this.numbers.reads(this.formulaOf(own)).includes(ref)) cell.classList.add("fed");
    }
  }

  // ---- ledgers: quantities side by side, a row for each token or coordinate ------------------------------------------

  // "w", "w[i]", "w[,i]", "w[ii]", "x+1", "x.first", "x.last": the axis of the rows, and the columns as [head, row => reference].
  columns(entry) {
    const [, name, cut = "", when = ""] = /^(\w+'?)(\[i\]|\[,i\]|\[ii\])?(\+1|\.first|\.last)?$/.exec(entry), of = this.numbers;
    let axes = [...(this.mechanism.quantities[name].axes ?? "")], before = [];
    if (/[tT]/.test(axes[0])) {
      const last = of.length(axes[0]) - 1, at = when === ".first" ? 0 : when === ".last" ? last : this.state.t + (when === "+1" ? 1 : 0);
      const now = Math.min(at, this.steps_(when));
      before = [Math.min(now, last)];
      axes = axes.slice(1);
    }
    const ref = (...at) => [name, ...before, ...at].join("."), i = this.state.i;
    const head = (at) => symbol(of, name, [...before, ...at]);
    const heads = (letter) => Array.from({ length: of.length(letter, before) }, (_, n) => (of.isToken(letter) ? of.data.tokens[n] : n + 1));
    const whole = (letter, make) => heads(letter).map((label, n) => [label, (row) => make(row, n)]);
    if (!axes.length) return { name, before, rows: "", head: head([]), each: [["", () => ref()]] };
    if (axes.length === 1 && cut) return { name, before, rows: "", only: of.isToken(axes[0]) ? i : undefined, head: head([i]), each: [["", () => ref(i)]] };
    if (axes.length === 1) return { name, before, rows: axes[0], head: head([]), each: [["", (row) => ref(row)]] };
    if (cut === "[ii]") return { name, before, rows: axes[0], head: `<msub><mi>${name}</mi><mrow><mi>i</mi><mi>i</mi></mrow></msub>`, each: [["", (row) => ref(row, row)]] };
    if (cut === "[,i]") return { name, before, rows: axes[0], head: head([undefined, i]), each: [["", (row) => ref(row, i)]] };
    if (cut === "[i]" && of.isToken(axes[1])) return { name, before, rows: axes[1], head: head([i]), each: [["", (row) => ref(i, row)]] };
    if (cut === "[i]") return { name, before, rows: "", only: i, head: head([i]), each: whole(axes[1], (_, n) => ref(i, n)) };
    return { name, before, rows: axes[0], head: head([]), each: whole(axes[1], (row, n) => ref(row, n)) };
  }

  // The last step that a card may show: with "+1" beside it the last but one.
  steps_(when) {
    return when === ".last" || when === ".first" ? Infinity : this.numbers.steps - (when === "+1" ? 0 : 1);
  }

  ledger(entries, card) {
    const of = this.numbers, groups = entries.map((entry) => this.columns(entry)), { tokens } = of.data, kind = groups[0].rows;
    const byToken = kind && of.isToken(kind), count = kind ? of.length(kind, groups[0].before) : 1, rows = Array.from({ length: count }, (_, n) => n);
    const value = (ref) => of.number(ref.split(".")[0], ref.split(".").slice(1).map(Number));
    const cells = groups.map((group) => {
      const refs = rows.map((row) => group.each.map(([, ref]) => ref(row))), all = refs.flat().map((ref) => Math.abs(value(ref))).filter(Number.isFinite);
      return { refs, most: Math.max(1e-9, ...all) };
    });
    const heads = groups.some((group) => group.each.length > 1), gap = '<td class="gap"></td>';
    const title = (group) => `<th colspan="${group.each.length}" scope="colgroup"${this.made(card, group.name) ? ' class="made"' : ""}><span>${this.mechanism.quantities[group.name].what}</span> <math>${group.head}</math></th>`;
    let out = `<div class="scroll" tabindex="-1"><table><caption>${groups.map((group) => this.mechanism.quantities[group.name].what).join(", ")}</caption><thead><tr><td></td>${groups.map(title).join(gap)}</tr>`;
    if (heads) out += `<tr class="sub"><td></td>${groups.map((group) => group.each.map(([label]) => (label === "" ? "<td></td>" : `<th scope="col">${label}</th>`)).join("")).join(gap)}</tr>`;
    out += "</thead><tbody>";
    for (const row of rows) {
      const token = byToken ? row : groups[0].only, label = token !== undefined ? tokens[token] : kind ? row + 1 : "";
      const mark = token !== undefined ? ` style="--c:${color(token)}"` : "";
      out += label === "" ? "<tr><td></td>" : `<tr><th scope="row"${mark} class="${token !== undefined ? "token" : ""}${token === this.state.i ? " followed" : ""}">${label}</th>`;
      out += cells.map(({ refs, most }) => refs[row].map((ref) => {
        const x = value(ref), share = Number.isFinite(x) ? Math.round((x ? 5 : 0) + 35 * Math.min(1, Math.abs(x) / most)) : 0;
        return `<td data-ref="${ref}" tabindex="-1" class="${x < 0 ? "minus" : "plus"}" style="--p:${share}%">${show(x)}</td>`;
      }).join("")).join(gap) + "</tr>";
    }
    return `${out}</tbody></table></div>`;
  }

  // ---- where the reader is -------------------------------------------------------------------------------------------

  get all() {
    return byId("all").getAttribute("aria-pressed") === "true";
  }

  fromAddress() {
    const id = decodeURIComponent(location.hash.slice(1));
    this.asked = "";
    const own = this.cards.findIndex((card) => card.anchor === id || card.ids?.includes(id));
    if (own >= 0 || !this.numbers.data.equations[id]) return own;
    const shown = this.cards.findIndex((card) => this.idsOn(card).includes(id));
    this.asked = shown >= 0 ? "" : id; // the first card has what no other shows
    return Math.max(0, shown);
  }

  activate(n, move = true) {
    const from = this.stage.marks, last = this.cards[this.active], card = this.cards[(this.active = Math.max(0, Math.min(this.cards.length - 1, n)))];
    const { state } = this, side = card.kind === "backward" || card.kind === "turn" ? "backward" : "forward", turned = state.side !== side || state.view !== (card.view ?? "");
    Object.assign(state, { side, view: card.view ?? "" });
    const when = { first: 0, step: undefined, last: this.numbers.steps }[card.kind === "turn" ? "last" : card.when], playing = this.playing && last !== card;
    if (playing) this.halt(); // what a card shows must not depend on how fast one reads
    if (card.when === "step" && (playing || last?.when !== "step")) this.goTo(side === "backward" ? this.numbers.steps - 1 : Math.min(this.mechanism.time.first?.() ?? 1, this.numbers.steps - 1));
    else if (when !== undefined && last !== card) this.goTo(when);
    else if (playing) this.goTo(this.numbers.steps);
    this.cards.forEach((each, m) => {
      each.section.classList.toggle("active", m === this.active);
      each.section.hidden = !this.all && m !== this.active;
    });
    document.querySelector("footer").hidden = !this.all && this.active > 0;
    if (!this.all || turned) this.fill(card);
    if (turned || last === card || !last?.n || !card.n || [last, card].some((one) => one.picture || one.draw)) this.draw(still() || last === card ? undefined : from);
    [...byId("dots").children].forEach((dot, m) => (m === this.active ? dot.setAttribute("aria-current", "step") : dot.removeAttribute("aria-current")));
    byId("where").textContent = card.where;
    byId("previous").disabled = this.active === 0;
    byId("next").disabled = this.active === this.cards.length - 1;
    byId("pop").hidden = true;
    this.edges(card.section);
    if (!move) return;
    this.arrived = performance.now();
    history.replaceState(null, "", `#${card.anchor}`);
    if (this.all) card.section.scrollIntoView({ behavior: still() ? "auto" : "smooth", block: "start" });
    else scrollTo(0, 0);
  }

  readAll(all) {
    byId("all").setAttribute("aria-pressed", String(all));
    document.body.classList.toggle("all", all);
    if (all) this.cards.forEach((card) => this.fill(card));
    this.activate(this.active);
    this.edges(byId("cards"));
    this.draw();
  }

  // ---- picture, knobs, time ------------------------------------------------------------------------------------------

  // `from`: the marks from which it moves, if it is to move.
  draw(from = undefined) {
    if (!byId("picture").clientWidth) return; // in a frame that is not shown
    const box = byId("picture"), W = Math.round(box.clientWidth), card = this.cards[this.active], first = card.kind === "intro" && !this.all;
    const most = roomy() ? Math.max(340, Math.min(520, 0.5 * innerHeight)) : wide() ? 460 : W >= 480 ? 250 : (this.mechanism.phone ?? (this.numbers.steps ? 112 : 126)); // on a phone it is large at first, and leaves room for numbers later
    const H = first && !wide() ? Math.round(this.mechanism.tallest?.(W) ?? Math.min(0.45 * innerHeight, Math.max(this.mechanism.height(W), Math.min(0.62 * W, 0.3 * innerHeight)))) : Math.min(most, Math.round(this.mechanism.height(W)));
    const alt = said(card.alt ?? this.mechanism.label).replaceAll('"', "");
    const open = `<svg class="${W < 420 ? "narrow" : ""}" width="${W}" height="${H}" viewBox="0 0 ${W} ${H}" role="group" aria-label="${alt}">`;
    this.stage.show(this.numbers.marks(card, W, H), open, `${W} ${H}`, from);
    const caption = said(card.caption ?? this.mechanism.caption);
    if (byId("caption").innerHTML !== caption) byId("caption").innerHTML = caption;
    const steps = this.numbers.steps;
    for (const id of ["play", "scrub", "now"]) byId(id).hidden = !steps;
    document.querySelector("aside").classList.toggle("untimed", !steps);
    if (!steps) return;
    Object.assign(byId("scrub"), { max: steps, value: this.state.t });
    byId("scrub").setAttribute("aria-valuetext", `${this.mechanism.time.name} ${this.state.t} of ${steps}`);
    byId("now").textContent = `${this.mechanism.time.name} ${this.state.t} of ${steps}`;
  }

  // All anew, as knobs or the followed word have changed.
  update(knobs = {}, follow = undefined, byReader = true) {
    const end = this.state.t === this.numbers.steps;
    this.numbers.set(knobs, follow);
    this.state.at = this.state.t = end ? this.numbers.steps : Math.min(this.state.t, this.numbers.steps);
    this.draw(follow === undefined || still() ? undefined : this.stage.marks);
    for (const card of this.all ? this.cards : [this.cards[this.active]]) this.fill(card);
    if (byReader) this.tasks(true);
  }

  // What a reader may try, and what of it has been done.
  tasks(tried = false) {
    const { tried: tasks, done } = this, before = done.size, missing = (this.mechanism.tasks?.length ?? 0) - tasks.length;
    if (tried) tasks.forEach((task, n) => { if (task.done()) done.add(n); });
    if (this.mechanism.tasks && (!tried || done.size > before))
      byId("tasks").innerHTML = tasks.map((task, n) => `<li${done.has(n) ? ' class="done"' : ""}>${done.has(n) ? "Done" : "Try"}: ${said(task.say)}</li>`).join("") +
        (missing ? `<li>${missing > 1 ? `${missing} other things to try need` : "One other thing to try needs"} the tour’s own words.</li>` : "");
  }

  knobs() {
    const { knobs } = this.numbers.data;
    byId("turn-knobs").hidden = !knobs.length;
    const input = (knob) =>
      typeof knob.value === "boolean"
        ? `<label class="check"><input type="checkbox" data-knob="${knob.name}"><span>${knob.label}</span></label>`
        : `<label><span>${knob.label}</span><output></output><input type="range" aria-label="${knob.label}" data-knob="${knob.name}" min="${knob.low}" max="${knob.high}" step="${knob.step || "any"}"></label>`;
    byId("knobs").insertAdjacentHTML("afterbegin", knobs.map(input).join("") + '<button type="reset" aria-label="Put all knobs back">↺</button>');
    if (this.mechanism.tasks) byId("knobs").insertAdjacentHTML("beforeend", '<ul id="tasks" aria-live="polite"></ul>');
    this.tasks();
    const told = () => {
      for (const input of byId("knobs").querySelectorAll("[data-knob]")) {
        const x = this.numbers.knobs[input.dataset.knob];
        if (input.type === "checkbox") input.checked = x;
        else {
          input.value = x;
          input.parentNode.querySelector("output").textContent = show(x);
          input.setAttribute("aria-valuetext", show(x));
        }
      }
    };
    byId("knobs").addEventListener("input", ({ target }) => {
      if (!target.dataset.knob) return;
      this.halt();
      const x = target.type === "checkbox" ? target.checked : Number(target.value);
      this.update({ [target.dataset.knob]: x });
      told();
    });
    byId("knobs").addEventListener("reset", (event) => {
      event.preventDefault();
      Object.assign(this.numbers.data, structuredClone(this.given));
      this.update(Object.fromEntries(knobs.map((knob) => [knob.name, knob.value])), undefined, false);
      told();
    });
    byId("knobs").addEventListener("submit", (event) => event.preventDefault());
    byId("turn-knobs").addEventListener("click", () => {
      const open = document.body.classList.toggle("turning");
      byId("turn-knobs").setAttribute("aria-expanded", String(open));
    });
    told();
  }

  // A field for words of the reader's own, and a button that goes back to those of the tour.
  words() {
    byId("own-words").hidden = false;
    const [field, back] = [byId("own-words").querySelector("input"), byId("own-words").querySelector("button")], [least, most] = this.own.data.typed.counts;
    byId("own-words").querySelector("label span").textContent = `Type ${least === most ? COUNTED[least] : `${COUNTED[least]} to ${COUNTED[most]}`} words of your own`;
    field.placeholder = this.own.data.tokens.join(" ");
    for (const kind of ["change", "submit"]) byId("knobs").addEventListener(kind, ({ target }) => { if (kind === "submit" || target === field) this.say(field.value); });
    back.addEventListener("click", () => this.say((field.value = "")));
  }

  // Take the tour with other words: those of a text, or the tour's own if it is empty; one that cannot be taken is told why.
  say(text) {
    const data = text.trim() ? typed(this.own.data, text) : this.own.data, said = data.words?.join(" ") ?? "";
    byId("own-words").querySelector("output").textContent = typeof data === "string" ? data : "";
    if (typeof data === "string" || said === (this.numbers.data.words?.join(" ") ?? "")) return;
    this.halt();
    const numbers = data.words ? new Numbers(data, this.own.write) : this.own, end = this.state.t === this.numbers.steps, { t } = this.state;
    numbers.set({ ...this.numbers.knobs }, this.own.data.follow);
    this.take(numbers);
    if (!end) this.state.at = this.state.t = Math.min(t, numbers.steps);
    this.update({}, undefined, false);
    this.activate(this.active, false);
    this.tasks();
    this.test();
    byId("own-words").querySelector("button").disabled = !data.words;
  }

  goTo(at) {
    const { state } = this, whole = Math.floor(at + 1e-9);
    state.at = at;
    if (whole !== state.t) {
      state.t = whole;
      for (const card of this.cards) if (this.steppedBy(card) && !card.section.hidden) this.fill(card);
    }
    this.draw();
  }

  halt() {
    cancelAnimationFrame(this.playing);
    this.playing = 0;
    byId("play").textContent = "▶";
    byId("play").setAttribute("aria-label", "Play");
  }

  play() {
    if (this.playing) {
      this.halt();
      this.goTo(this.state.t);
      return;
    }
    const back = this.state.side === "backward", { steps } = this.numbers, end = back ? 0 : steps;
    const from = this.state.at === end ? steps - end : this.state.at, began = performance.now();
    byId("play").textContent = "❚❚";
    byId("play").setAttribute("aria-label", "Pause");
    const frame = (time) => {
      const gone = Math.max(0, time - began) / Math.max(140, 3600 / steps), at = back ? Math.max(0, from - gone) : Math.min(end, from + gone);
      if (at === end) this.halt();
      else this.playing = requestAnimationFrame(frame);
      this.goTo(at);
    };
    this.playing = requestAnimationFrame(frame);
  }

  // ---- pointing, tapping, keys -----------------------------------------------------------------------------------------

  point(node) {
    const ref = node.dataset.ref, card = this.cards.find((each) => each.section.contains(node)), [name] = ref.split(".");
    const { what } = this.mechanism.quantities[name], given = this.formulaOf(ref) === undefined, pop = byId("pop"), markup = this.spelled(ref);
    node.setAttribute("aria-description", `${what}${given ? ", given" : ""}: ${spoken(markup)}`);
    if (card) this.mark(card.section, ref);
    pop.innerHTML = `${this.nameOf(ref, given ? (this.mechanism.quantities[name].values ? ", computed" : ", given") : "")}<div class="numbers">${markup}</div>`;
    pop.hidden = this.spelledOut(card, ref);
    const box = node.getBoundingClientRect(), { offsetWidth: w, offsetHeight: h } = pop, beside = box.right + w + 20 < innerWidth;
    const place = (x, y) => Object.assign(pop.style, { left: `${x}px`, top: `${y}px` });
    if (!wide()) place(8, innerHeight - h - 74);
    else if (beside) place(box.right + 10, Math.max(8, Math.min(innerHeight - h - 8, box.top + box.height / 2 - h / 2)));
    else place(Math.max(8, Math.min(innerWidth - w - 8, box.left + box.width / 2 - w / 2)), box.top > h + 12 ? Math.min(box.top, innerHeight) - h - 8 : box.bottom + 8);
  }

  // Whether a number's formula is in view on its card, so that no other need show it.
  spelledOut(card, ref) {
    const panel = card?.told === ref && card.section.querySelector(".numbers");
    if (!panel) return false;
    const { top, bottom } = panel.getBoundingClientRect();
    return top >= (wide() ? 0 : document.querySelector("aside").getBoundingClientRect().bottom) - 1 && bottom <= document.querySelector("nav").getBoundingClientRect().top + 1;
  }

  unpoint(node) {
    byId("pop").hidden = true;
    const card = this.cards.find((each) => each.section.contains(node));
    if (card) this.mark(card.section, this.picked(card));
  }

  listen() {
    const numberAt = (event) => event.target.closest?.("[data-ref]"), on = (kind, run, options) => document.addEventListener(kind, run, options);
    for (const kind of ["pointerover", "focusin"])
      on(kind, (event) => {
        const node = numberAt(event);
        if (node && event.pointerType !== "touch") this.point(node);
      });
    on("pointerout", (event) => { if (event.pointerType === "mouse" && numberAt(event)) this.unpoint(numberAt(event)); });
    on("focusout", (event) => { if (numberAt(event)) this.unpoint(numberAt(event)); });
    on("pointerdown", (event) => { if (!numberAt(event)) byId("pop").hidden = true; });
    // After a slider was dragged, the arrow keys are the tour's again; who comes with the tabulator keeps them.
    const free = (slider) => { if (slider.type === "range") setTimeout(() => slider.blur()); };
    for (const kind of ["pointerup", "pointercancel"]) on(kind, () => free(document.activeElement));
    on("toggle", ({ target }) => {
      if (!target.matches("details")) return;
      this.unfolded = target.open;
      for (const other of document.querySelectorAll("#cards details")) other.open = target.open;
      this.edges(byId("cards"));
    }, true);
    on("click", (event) => {
      const node = numberAt(event), card = node && this.cards.find((each) => each.section.contains(node));
      if (card && node.tagName === "TD" && this.formulaOf(node.dataset.ref) !== undefined) this.tell(card, (card.pin = node.dataset.ref));
      if (node) this.point(node);
    });
    byId("picture").addEventListener("click", (event) => {
      const word = event.target.closest("[data-word]");
      if (!word || numberAt(event)) return;
      if (event.detail) document.activeElement.blur(); // a ring of focus is for the keyboard
      this.update({}, Number(word.dataset.word));
    });
    // A mark that can be dragged says itself what becomes of it at a place of the picture.
    const pull = (key, x, y) => {
      this.stage.marks.find((one) => one.key === key && one.drag)?.drag(x, y);
      this.update();
    };
    this.nudge = (node, x, y) => {
      const box = node.getBoundingClientRect(), own = byId("picture").firstElementChild.getBoundingClientRect();
      pull(node.dataset.drag, box.left + box.width / 2 - own.left + x, box.top + box.height / 2 - own.top + y);
    };
    const drag = (event) => {
      const box = byId("picture").firstElementChild.getBoundingClientRect(), t = this.cards[this.active].draw ? undefined : this.mechanism.timeAt?.(event.clientX - box.left, event.clientY - box.top);
      if (event.type === "pointerdown") this.pulled = event.target.closest("[data-drag]")?.dataset.drag;
      if (this.pulled) return pull(this.pulled, event.clientX - box.left, event.clientY - box.top);
      if (t === undefined || t === false) return;
      this.halt();
      this.goTo(t);
    };
    byId("picture").addEventListener("pointerdown", drag);
    byId("picture").addEventListener("pointermove", (event) => { if (event.buttons) drag(event); });
    byId("scrub").addEventListener("input", () => {
      this.halt();
      this.goTo(Number(byId("scrub").value));
    });
    byId("play").addEventListener("click", () => this.play());
    byId("previous").addEventListener("click", () => this.activate(this.active - 1));
    byId("next").addEventListener("click", () => this.activate(this.active + 1));
    byId("all").addEventListener("click", () => this.readAll(!this.all));
    byId("dots").addEventListener("click", (event) => {
      const n = [...byId("dots").children].indexOf(event.target);
      if (n >= 0) this.activate(n);
    });
    addEventListener("hashchange", () => { if (this.fromAddress() >= 0) this.activate(this.fromAddress()); });
    new ResizeObserver(() => document.documentElement.style.setProperty("--stage", `${wide() ? 0 : document.querySelector("aside").offsetHeight}px`)).observe(document.querySelector("aside"));
    let width = innerWidth; // a phone's bar that goes away changes the height alone
    addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; this.draw(); this.edges(byId("cards")); } });
    addEventListener("keydown", (event) => this.key(event));
    on("scroll", ({ target }) => (target === document ? this.seen() : target.parentNode && this.edges(target.parentNode)), { passive: true, capture: true });
    on("wheel", () => (this.arrived = -1e9), { passive: true });
    on("touchmove", () => (this.arrived = -1e9), { passive: true });
  }

  key(event) {
    const at = document.activeElement;
    if (event.key === " " && this.numbers.steps && !at.matches("button, input, summary, td, [data-word], [data-drag]")) {
      event.preventDefault();
      this.play();
    }
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (event.key === "Escape") {
      byId("pop").hidden = true;
      document.body.classList.remove("turning");
      at.blur();
    }
    if ((event.key === "Enter" || event.key === " ") && (at.tagName === "TD" || at.hasAttribute("data-word"))) {
      event.preventDefault();
      at.dispatchEvent(new MouseEvent("click", { bubbles: true }));
    }
    if (event.altKey || event.ctrlKey || event.metaKey || at.type === "range" || at.type === "text" || at.matches(".formula")) return; // a box that is ticked has no use for arrows
    if ((event.key === "Home" || event.key === "End") && at.tagName !== "TD") {
      event.preventDefault();
      this.activate(event.key === "Home" ? 0 : this.cards.length - 1);
    }
    if (!step) return;
    if (at.dataset.drag) {
      event.preventDefault();
      this.nudge(at, 8 * step[1], 8 * step[0]);
      return;
    }
    if (at.tagName === "TD" && at.dataset.ref) {
      const rows = [...at.closest("tbody").rows], line = rows[rows.indexOf(at.parentNode) + step[0]]?.cells ?? [];
      const cell = line[at.cellIndex + step[1]], next = cell?.className === "gap" ? line[at.cellIndex + 2 * step[1]] : cell;
      if (!next?.dataset.ref) return;
      event.preventDefault();
      at.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    } else if (step[1]) {
      event.preventDefault();
      this.activate(this.active + step[1]);
    }
  }

  // While all is read: the card whose head has passed a third of what is free is the one that is looked at.
  seen() {
    byId("pop").hidden = true;
    if (!this.all || performance.now() - this.arrived < 1000) return;
    const top = wide() ? 0 : document.querySelector("aside").offsetHeight, line = top + (innerHeight - top) * 0.35;
    const n = Math.max(0, this.cards.findLastIndex((card) => card.section.getBoundingClientRect().top < line));
    if (n !== this.active) this.activate(n, false);
  }

  // ---- the page's own test: its formulas against the definition's numbers ---------------------------------------------

  test() {
    const { data } = this.numbers, found = (this.tested ??= this.own.compare(data.python)), { origin } = data.words ? { origin: "The vectors of your words come from a table that gives the same word the same vector; a model learns them. With the tour’s own words the formulas were checked:" } : data;
    const told = found.worst < 1e-9 && found.numbers ? `Your browser computed ${found.numbers} numbers; none is more than ${found.worst.toExponential(0)} away from Python's.` : `The numbers of this page are wrong: one is ${found.worst} away from Python's, of ${found.where}.`;
    document.querySelector("footer").innerHTML = `<p>${origin} ${told} Shown numbers are rounded.${this.passed()} ${data.command ? `<code>${escaped(data.command)}</code> makes this page.` : ""}</p>`;
  }
}
