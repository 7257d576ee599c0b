// The front end of kdlab.viz.KernelExplorer: draws the trait `view` as SVG, moves `op`, `x`, `case`, `point`, `arms`.
// Names reach the page through textContent alone, so none of them can become markup.

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 360;
const MARGIN = { left: 62, right: 16, top: 12, bottom: 44 };
const LEAST_WIDTH = 320;
// Drawn around (0, 0); a mark of the same area whatever its shape.
const MARKS = {
  o: "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0Z", s: "M-4 -4H4V4H-4Z", D: "M0 -5.6L5.6 0L0 5.6L-5.6 0Z",
  "^": "M0 -5.4L5.2 4.2H-5.2Z", v: "M0 5.4L5.2 -4.2H-5.2Z",
  "<": "M-5.4 0L4.2 5.2V-5.2Z", ">": "M5.4 0L-4.2 5.2V-5.2Z", d: "M0 -5.6L3.4 0L0 5.6L-3.4 0Z",
  p: "M0 -5.2L4.9 -1.6L3.1 4.2L-3.1 4.2L-4.9 -1.6Z",
  h: "M0 -5L4.3 -2.5L4.3 2.5L0 5L-4.3 2.5L-4.3 -2.5Z", H: "M2.5 -4.3L5 0L2.5 4.3L-2.5 4.3L-5 0L-2.5 -4.3Z",
  8: "M1.8 -4.4L4.4 -1.8L4.4 1.8L1.8 4.4L-1.8 4.4L-4.4 1.8L-4.4 -1.8L-1.8 -4.4Z",
  P: "M-1.8 -5H1.8V-1.8H5V1.8H1.8V5H-1.8V1.8H-5V-1.8H-1.8Z",
  X: "M-5 -2.8L-2.8 -5L0 -2.2L2.8 -5L5 -2.8L2.2 0L5 2.8L2.8 5L0 2.2L-2.8 5L-5 2.8L-2.2 0Z",
  "*": "M0 -6.4L1.9 -2.2L6.4 -1.9L3 1.2L4 5.6L0 3.2L-4 5.6L-3 1.2L-6.4 -1.9L-1.9 -2.2Z",
};

/** What the arms took at one point, the quickest first: times against bound, goal and the best peer. */
export function pointTable(view, point, shown) {
  const floor = view.floors[point];
  const timed = view.arms.filter((arm) => shown.includes(arm.name) && arm.points[point]);
  const peers = timed.filter((arm) => !arm.own).map((arm) => arm.points[point].us);
  const best = peers.length ? Math.min(...peers) : null;
  const rows = timed.map((arm) => {
    const { us, p10, p90, warm_us: warm, eager_us: eager, goal_us: goal, verdict, counted } = arm.points[point];
    return {
      name: arm.name, own: arm.own, us,
      time: `${time(us)} µs`,
      spread: p10 === null ? "" : `${time(p10)} to ${time(p90)}`,
      floor: floor === null ? "" : `${(us / floor).toPrecision(3)} ×`,
      goal: goal === null ? "" : `${time(goal)} µs, ${verdict}`,
      peer: best === null || !arm.own ? "" : `${(us / best).toPrecision(3)} ×`,
      warm: warm === null ? "" : `${time(warm)} µs`,
      eager: arm.eager ? "is eager" : eager === null ? "" : `${time(eager)} µs`,
      memory: counted && counted.dram_bytes !== null ? bytes(counted.dram_bytes) : "",
      l2: counted && counted.l2_bytes !== null ? bytes(counted.l2_bytes) : "",
      tensor: counted && counted.tensor_pct !== null ? `${counted.tensor_pct.toFixed(0)} %` : "",
      kernels: counted ? counted.kernels.join(", ") : "",
    };
  });
  return rows.sort((one, other) => one.us - other.us);
}

/** The chosen point in one sentence, for the picture's label and for those who hear the page. */
export function pointWords(view, point, shown) {
  const [first] = pointTable(view, point, shown);
  const place = `${view.op}, ${view.case}, ${view.x} ${number(view.values[point])}`;
  if (!first) return `${place}: no arm on show was timed`;
  const bound = view.floors[point] === null ? "" : `, bound ${time(view.floors[point])} µs`;
  return `${place}: ${first.name} is the quickest with ${first.time}${bound}`;
}

/** Where a key leads, as the traits to set; null for keys that mean nothing here, or not before the view is there. */
export function keyMove(key, view, state) {
  const step = (list, value, by) => list[Math.min(Math.max(list.indexOf(value) + by, 0), list.length - 1)];
  if (key === "PageUp") return { op: step(view.ops, state.op, -1) };
  if (key === "PageDown") return { op: step(view.ops, state.op, 1) };
  if (["op", "x", "case"].some((name) => state[name] !== view[name])) return null;
  const point = (by) => ({ point: Math.min(Math.max(state.point + by, 0), view.values.length - 1) });
  switch (key) {
    case "ArrowLeft": return point(-1);
    case "ArrowRight": return point(1);
    case "ArrowUp": return { case: step(view.cases, view.case, -1) };
    case "ArrowDown": return { case: step(view.cases, view.case, 1) };
    case "x": return { x: view.sizes[(view.sizes.indexOf(view.x) + 1) % view.sizes.length] };
  }
  const arm = /^[1-9]$/.test(key) ? view.arms[key - 1] : undefined;
  return arm ? toggled(view, arm.name, state.arms) : null;
}

/** The arms on show with one of them shown or hidden, in the order of the view. */
export function toggled(view, name, shown) {
  const wanted = new Set(shown);
  if (!wanted.delete(name)) wanted.add(name);
  return { arms: view.arms.map((arm) => arm.name).filter((other) => wanted.has(other)) };
}

/** Logarithmic scale from the data to pixels, with its ticks: 1, 2 and 5 of a decade, 1 alone over many decades. */
export function logScale(values, from, to) {
  const low = Math.log10(Math.min(...values)), high = Math.log10(Math.max(...values));
  const pad = 0.06 * Math.max(high - low, 0.3);
  const place = (value) => from + (to - from) * (Math.log10(value) - low + pad) / (high - low + 2 * pad);
  const inside = (value) => Math.log10(value) >= low - pad && Math.log10(value) <= high + pad;
  const steps = high - low > 3 ? [1] : [1, 2, 5];
  const ticks = [];
  for (let decade = Math.floor(low - pad); decade <= high + pad; decade += 1) {
    ticks.push(...steps.map((step) => Number(`${step}e${decade}`)).filter(inside));
  }
  return { place, ticks };
}

/** A time with three digits, and no exponent. */
export function time(us) {
  return us >= 100 ? Math.round(us).toLocaleString("en-US") : String(Number(us.toPrecision(3)));
}

function number(value) {
  return value.toLocaleString("en-US");
}

function bytes(count) {
  const unit = Math.min(Math.floor(Math.log10(Math.max(count, 1)) / 3), 3);
  return `${Number((count / 1000 ** unit).toPrecision(3))} ${["B", "kB", "MB", "GB"][unit]}`;
}

function html(tag, className, text, attributes = {}) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

function svg(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function menu(name, help, onChange) {
  const label = html("label", "kdlab-pick");
  const select = html("select", "kdlab-select", undefined, { "aria-label": name, title: help });
  select.addEventListener("change", () => onChange(select.value));
  label.append(html("span", "", name), select);
  const show = (options, value) => {
    select.replaceChildren(...options.map((option) => html("option", "", option, { value: option })));
    select.value = value;
  };
  return { label, show };
}

function mark(arm) {
  const look = arm.eager ? "kdlab-mark-hollow" : "kdlab-mark-full";
  return svg("path", { d: MARKS[arm.marker], class: `${look} kdlab-hue-${arm.hue}` });
}

/** Axes, bound, goals and a line an arm; returns what later changes of point and arms need. */
function drawLines(view, shown, canvas) {
  const width = Math.max(canvas.clientWidth - 2, LEAST_WIDTH);
  const arms = view.arms.filter((arm) => shown.includes(arm.name));
  const drawn = arms.flatMap((arm) => arm.points).filter((point) => point !== null);
  const floors = view.floors.filter((floor) => floor !== null);
  const heights = [...drawn.flatMap((point) => [point.us, point.goal_us ?? point.us]), ...floors];
  const x = logScale(view.values, MARGIN.left, width - MARGIN.right);
  const y = logScale(heights.length ? heights : [1], HEIGHT - MARGIN.bottom, MARGIN.top);
  const picture = svg("svg", { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: "img" });
  picture.append(...axes(view, x, y, width));
  const line = (places) => `M${places.map(([one, other]) => `${one.toFixed(1)} ${other.toFixed(1)}`).join("L")}`;
  const bound = view.values.map((value, i) => [x.place(value), view.floors[i]]).filter(([, floor]) => floor !== null);
  if (bound.length) {
    const places = bound.map(([at, floor]) => [at, y.place(floor)]);
    picture.append(svg("path", { class: "kdlab-bound", d: line(places.length > 1 ? places : bar(places[0])) }));
  }
  const cursor = svg("line", { class: "kdlab-cursor", y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom });
  picture.append(cursor);
  for (const arm of arms) picture.append(armLine(view, arm, x, y, line));
  canvas.replaceChildren(picture);
  return { picture, cursor, x, width };
}

function bar([at, height]) {
  return [[at - 24, height], [at + 24, height]];
}

function axes(view, x, y, width) {
  const bottom = HEIGHT - MARGIN.bottom;
  const found = [];
  for (const tick of y.ticks) {
    const at = y.place(tick);
    found.push(svg("line", { class: "kdlab-grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: at, y2: at }));
    found.push(svg("text", { class: "kdlab-tick kdlab-tick-y", x: MARGIN.left - 7, y: at }, number(tick)));
  }
  let free = -Infinity;
  for (const value of view.values) {
    const at = x.place(value), room = 4 * number(value).length + 4;
    found.push(svg("line", { class: "kdlab-grid", x1: at, x2: at, y1: bottom, y2: bottom + 4 }));
    if (at - room < free) continue;
    found.push(svg("text", { class: "kdlab-tick kdlab-tick-x", x: at, y: bottom + 16 }, number(value)));
    free = at + room;
  }
  const middle = (MARGIN.left + width - MARGIN.right) / 2;
  found.push(svg("text", { class: "kdlab-axis", x: middle, y: HEIGHT - 8 }, `${view.x}, log scale`));
  const turn = `rotate(-90 14 ${(MARGIN.top + bottom) / 2})`;
  const label = "µs a call (median), log scale";
  found.push(svg("text", { class: "kdlab-axis", x: 14, y: (MARGIN.top + bottom) / 2, transform: turn }, label));
  return found;
}

function armLine(view, arm, x, y, line) {
  const group = svg("g", { class: "kdlab-arm", "data-arm": arm.name });
  const points = view.values.map((value, i) => ({ i, at: x.place(value), point: arm.points[i] }));
  const timed = points.filter(({ point }) => point);
  const places = timed.map(({ at, point }) => [at, y.place(point.us)]);
  const style = `kdlab-line kdlab-hue-${arm.hue}${arm.own ? "" : " kdlab-peer"}`;
  if (timed.length > 1) group.append(svg("path", { class: style, d: line(places) }));
  for (const { i, at, point } of timed) {
    if (point.goal_us !== null) {
      const height = y.place(point.goal_us);
      group.append(svg("line", { class: "kdlab-goal", x1: at - 8, x2: at + 8, y1: height, y2: height }));
    }
    const transform = `translate(${at.toFixed(1)} ${y.place(point.us).toFixed(1)})`;
    const place = svg("g", { class: "kdlab-point", "data-point": i, transform });
    const words = `${arm.name}, ${view.x} ${number(view.values[i])}: ${time(point.us)} µs`;
    place.append(svg("title", {}, words), mark(arm));
    group.append(place);
  }
  return group;
}

const COLUMNS = {
  name: "arm", time: "time", spread: "p10 to p90, µs", floor: "over bound", goal: "goal", peer: "over best peer",
  warm: "warm cache", eager: "eager", memory: "memory", l2: "of L2", tensor: "matrix units",
};

function fillTable(box, rows) {
  const names = Object.keys(COLUMNS).filter((name) => name === "name" || rows.some((row) => row[name]));
  const line = (cells, role) => {
    const found = html("div", "kdlab-row", undefined, { role: "row" });
    found.append(...cells.map(([text, title]) => html("div", "kdlab-cell", text, { role, ...(title && { title }) })));
    return found;
  };
  const head = line(names.map((name) => [COLUMNS[name]]), "columnheader");
  box.replaceChildren(head, ...rows.map((row) => {
    const found = line(names.map((name) => [row[name], name === "name" ? row.kernels : ""]), "cell");
    found.dataset.arm = row.name;
    return found;
  }));
  box.style.gridTemplateColumns = `repeat(${names.length}, max-content)`;
}

function fillLegend(box, view, shown, onToggle) {
  const bound = html("span", "kdlab-key", "bound of this card");
  bound.prepend(html("i", "kdlab-key-bound"));
  const goal = html("span", "kdlab-key", "goal");
  goal.prepend(html("i", "kdlab-key-goal"));
  box.replaceChildren(...view.arms.map((arm, i) => {
    const absent = arm.points.every((point) => point === null) ? " kdlab-absent" : "";
    const pressed = { "aria-pressed": String(shown.includes(arm.name)) };
    const button = html("button", `kdlab-toggle${absent}`, undefined, pressed);
    const picture = svg("svg", { width: 14, height: 14, viewBox: "-7 -7 14 14", "aria-hidden": "true" });
    picture.append(mark(arm));
    button.append(picture, html("span", "", arm.eager ? `${arm.name} (eager)` : arm.name));
    button.title = absent ? "not timed in this case" : i < 9 ? `key ${i + 1}` : "";
    button.addEventListener("click", () => onToggle(arm.name));
    return button;
  }), bound, goal);
}

function render({ model, el }) {
  const root = html("div", "kdlab-kernels", undefined, {
    "aria-label": "kernel explorer: left and right arrows move the point, up and down the case, page keys the op",
    // JupyterLab would take the arrow keys to move between cells.
    "data-lm-suppress-shortcuts": "true", role: "group", tabindex: "0",
  });
  const send = (changes) => { model.set(changes); model.save_changes(); };
  const menus = {
    op: menu("op", "PageUp, PageDown", (op) => send({ op })),
    case: menu("case", "up and down arrow", (value) => send({ case: value })),
    x: menu("over", "the key x", (x) => send({ x })),
  };
  const bar = html("div", "kdlab-bar");
  bar.append(...Object.values(menus).map((part) => part.label));
  const legend = html("div", "kdlab-legend", undefined, { role: "group", "aria-label": "arms" });
  const canvas = html("div", "kdlab-lines");
  const heading = html("div", "kdlab-heading", undefined, { "aria-live": "polite" });
  const table = html("div", "kdlab-times", undefined, { role: "table", "aria-label": "times at the chosen point" });
  const caption = html("div", "kdlab-caption");
  root.append(bar, legend, canvas, heading, table, caption);
  el.replaceChildren(root);
  let drawn = null;

  const showPoint = () => {
    const view = model.get("view"), shown = model.get("arms");
    const point = Math.min(model.get("point"), view.values.length - 1);
    const at = drawn.x.place(view.values[point]);
    drawn.cursor.setAttribute("x1", at);
    drawn.cursor.setAttribute("x2", at);
    drawn.picture.setAttribute("aria-label", pointWords(view, point, shown));
    heading.textContent = pointWords(view, point, shown);
    fillTable(table, pointTable(view, point, shown));
    if (!view.counted) return;
    const counted = view.arms.some((arm) => arm.points[point]?.counted);
    caption.textContent = counted ? view.caption : `${view.caption} · no launches counted at this point`;
  };
  const show = () => {
    const view = model.get("view"), shown = model.get("arms");
    drawn = drawLines(view, shown, canvas);
    fillLegend(legend, view, shown, (name) => send(toggled(view, name, model.get("arms"))));
    menus.op.show(view.ops, view.op);
    menus.case.show(view.cases, view.case);
    menus.x.show(view.sizes, view.x);
    caption.textContent = view.caption;
    showPoint();
  };

  root.addEventListener("keydown", (event) => {
    // A menu with the focus has its own use for the same keys.
    if (event.ctrlKey || event.altKey || event.metaKey || event.target.tagName === "SELECT") return;
    const names = ["op", "x", "case", "point", "arms"];
    const state = Object.fromEntries(names.map((name) => [name, model.get(name)]));
    const changes = keyMove(event.key, model.get("view"), state);
    if (changes === null) return;
    event.preventDefault();
    event.stopPropagation();
    send(changes);
  });
  canvas.addEventListener("pointerover", (event) => {
    const place = event.target.closest("[data-point]");
    const arm = event.target.closest("[data-arm]")?.dataset.arm;
    if (place && Number(place.dataset.point) !== model.get("point")) send({ point: Number(place.dataset.point) });
    for (const row of table.children) row.classList.toggle("kdlab-here", arm !== undefined && row.dataset.arm === arm);
  });
  const handlers = { "change:view": show, "change:arms": show, "change:point": showPoint };
  for (const [name, handler] of Object.entries(handlers)) model.on(name, handler);
  show();
  const observer = new ResizeObserver(() => {
    if (Math.abs(Math.max(canvas.clientWidth - 2, LEAST_WIDTH) - drawn.width) > 20) show();
  });
  observer.observe(canvas);
  return () => {
    observer.disconnect();
    for (const [name, handler] of Object.entries(handlers)) model.off(name, handler);
  };
}

export default { render };
