// The front end of kdlab.viz.TreeExplorer: draws the trait `view` as SVG, moves `prompt`, `round` and `budget`.
// Text of tokens and prompts reaches the page through textContent alone, so none of it can become markup.

const SVG = "http://www.w3.org/2000/svg";
const LABEL_CHARS = 12;
const CHAR_PX = 7.3;
const PACKED_FROM = 22;
const PACKED_PX = 800;

/** The accepted rows that a budget holds: the first rows of a tree are the tree of a smaller budget. */
export function keptPath(view, budget) {
  return view.path.filter((row) => row <= budget);
}

/** The node that the target wanted where the walk left: the bonus, or the first accepted row beyond the budget. */
export function wantedRow(view, budget) {
  const kept = keptPath(view, budget).length;
  return kept < view.path.length ? view.path[kept] : view.nodes.length - 1;
}

/** Whether the tree of a budget lacks a node; the bonus is there only where the whole path is. */
export function isDropped(view, budget, row) {
  const bonus = view.nodes.length - 1;
  return row === bonus ? wantedRow(view, budget) !== bonus : row > budget;
}

/** The numbers beside the tree, as [name, text] pairs. */
export function roundNumbers(view, budget) {
  const drafted = view.nodes.length - 2;
  const kept = Math.min(budget, drafted);
  const path = keptPath(view, budget);
  const expected = view.nodes.slice(1, kept + 1).reduce((sum, node) => sum + node.path, 0);
  const last = view.nodes[path[path.length - 1]];
  const verified = kept < drafted ? ` (${view.path.length - 1} of ${drafted} verified)` : "";
  return [
    ["accepted", `${path.length - 1} of ${kept}${verified}`],
    ["tokens of the round", `${path.length}, the bonus counted`],
    ["expected by the draft", `${expected.toFixed(2)} accepted`],
    ["ranks on the path", path.slice(1).map((row) => view.nodes[row].rank).join(", ") || "none"],
    ["path's probability", percent(last.path)],
    ["budget that held it all", `${Math.max(...view.path)}`],
    ["left the tree at", `depth ${path.length - 1}; the target wanted ${view.nodes[wantedRow(view, budget)].text}`],
    ["position of the root", `${view.position}`],
  ];
}

/** What hovering a node says, as [name, text] pairs. */
export function nodeFacts(view, row) {
  const node = view.nodes[row];
  const wants = ["target wanted after it", node.wants];
  if (row === 0) return [["token", node.text], ["root", "the last committed token"], wants];
  if (row === view.nodes.length - 1) {
    return [["token", node.text], ["bonus", `depth ${node.x}: the target's own token`]];
  }
  return [
    ["token", node.text],
    ["depth, rank", `${node.x}, ${node.rank} (0 = the draft's best)`],
    ["probability", `${percent(node.own)} at its depth`],
    ["of the whole path", `${percent(node.path)}, log ${node.logp.toFixed(2)} nats`],
    ["in trees from", `budget ${row}`],
    wants,
  ];
}

/** Where a key leads, as the traits to set; null for keys that mean nothing here. */
export function keyMove(key, shift, state) {
  const clamp = (value, least, most) => Math.min(Math.max(value, least), most);
  const round = (step) => ({ round: clamp(state.round + step, 0, state.rounds - 1) });
  const prompt = (step) => ({ prompt: clamp(state.prompt + step, 0, state.prompts - 1), round: 0 });
  const budget = (value) => ({ budget: clamp(value, 0, state.largest) });
  switch (key) {
    case "ArrowLeft": return round(-1);
    case "ArrowRight": return round(1);
    case "ArrowUp": return budget(shift ? Math.max(2 * state.budget, 1) : state.budget + 1);
    case "ArrowDown": return budget(shift ? Math.floor(state.budget / 2) : state.budget - 1);
    case "PageUp": return prompt(-1);
    case "PageDown": return prompt(1);
    default: return null;
  }
}

/**
 * Where each node stands, in pixels: one column a depth as wide as its tokens need, one line a branch.
 *
 * In a tree of many lines, childless siblings that follow each other share a line, box beside box: nothing else stands
 * to the right of a childless node.
 */
export function layout(view, room = PACKED_PX) {
  const { nodes } = view;
  const many = Math.max(...nodes.map((node) => node.y)) + 1 > PACKED_FROM;
  const widths = nodes.map((node) => CHAR_PX * shortLabel(node.text).length + 14);
  const starts = columnStarts(nodes, widths);
  const parents = new Set(nodes.map((node) => node.parent));
  const onPath = new Set([...view.path, nodes.length - 1]);
  const place = (row) => nodes[row].y * nodes.length + nodes[row].x;
  const byLine = nodes.map((_, row) => row).sort((one, other) => place(one) - place(other));
  const spots = [];
  let line = -1, before = null, lineHead = -1;
  for (const row of byLine) {
    const node = nodes[row];
    const alone = many && !parents.has(row) && !onPath.has(row) && (node.parent < 0 || nodes[node.parent].y !== node.y);
    const right = before === null ? 0 : spots[before].x + spots[before].width + 3;
    if (alone && before !== null && nodes[before].parent === node.parent && right + widths[row] < room) {
      spots[row] = { x: right, line, width: widths[row], joined: false };
    } else {
      if (node.y !== lineHead) line += 1;
      spots[row] = { x: starts[node.x], line, width: widths[row], joined: row > 0 };
    }
    lineHead = node.y;
    before = alone ? row : null;
  }
  const step = many ? 20 : 24;
  spots.forEach((spot) => { spot.middle = step * spot.line + step / 2 + 4; });
  const width = Math.max(...spots.map((spot) => spot.x + spot.width)) + 12;
  return { step, spots, width, height: step * (line + 1) + 8 };
}

function columnStarts(nodes, widths) {
  const widest = [];
  nodes.forEach((node, row) => { widest[node.x] = Math.max(widest[node.x] ?? 0, widths[row]); });
  const starts = [10];
  widest.forEach((width) => starts.push(starts[starts.length - 1] + width + 24));
  return starts;
}

/** A label that fits its column; the whole one is in the tooltip. */
export function shortLabel(text) {
  const chars = Array.from(text);
  return chars.length > LABEL_CHARS ? chars.slice(0, LABEL_CHARS - 1).join("") + "…" : text;
}

function percent(value) {
  const share = 100 * value;
  return `${share >= 9.95 ? share.toFixed(0) : share >= 0.095 ? share.toFixed(1) : share.toPrecision(1)} %`;
}

function html(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

function svg(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function fillList(list, pairs) {
  const entry = ([name, text]) => [html("span", "kdlab-name", name), html("span", "kdlab-fact", text)];
  list.replaceChildren(...pairs.flatMap(entry));
}

function slider(name, help, onInput) {
  const label = html("label", "kdlab-slider");
  const input = html("input");
  const value = html("output", "kdlab-value");
  Object.assign(input, { type: "range", min: 0, step: 1, title: help });
  input.setAttribute("aria-label", name);
  input.addEventListener("input", () => onInput(Number(input.value)));
  label.append(html("span", "", name), input, value);
  return { label, input, value };
}

/** Draw one round; returns what later changes of the budget need. */
function drawTree(view, canvas) {
  const room = canvas.clientWidth - 24;
  const { step, spots, width, height } = layout(view, room > 300 ? room : PACKED_PX);
  const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  picture.setAttribute("aria-label", `draft tree of round ${view.round}`);
  const edges = [], nodes = [];
  view.nodes.forEach((node, row) => {
    const { x, middle, joined } = spots[row];
    const from = spots[Math.max(node.parent, 0)];
    const line = `M${from.x + from.width} ${from.middle}H${x - 9}V${middle}H${x}`;
    edges.push(svg("path", { class: "kdlab-edge", d: joined ? line : "" }));
    const group = svg("g", { class: "kdlab-node", "data-row": row });
    const box = { x, y: middle - step / 2 + 2, width: spots[row].width, height: step - 4 };
    group.append(
      svg("title", {}, nodeFacts(view, row).map((fact) => fact.join(": ")).join("\n")),
      svg("rect", { class: "kdlab-paper", ...box }),
      svg("rect", { class: "kdlab-box", "fill-opacity": row ? 0.05 + 0.85 * Math.sqrt(node.path) : 1, ...box }),
      svg("text", { x: x + 7, y: middle }, shortLabel(node.text)),
    );
    nodes.push(group);
  });
  nodes[0].classList.add("kdlab-root");
  // The path's edges come last, so that no other line runs over them.
  const onPath = new Set([...view.path, view.nodes.length - 1]);
  const rows = edges.map((_, row) => row).slice(1);
  picture.append(...rows.filter((row) => !onPath.has(row)).map((row) => edges[row]));
  picture.append(...rows.filter((row) => onPath.has(row)).map((row) => edges[row]), ...nodes);
  canvas.replaceChildren(picture);
  return { view, edges, nodes, spots, room };
}

/** Mark what a budget drops, accepts and wants; only nodes that changed are touched. */
function markBudget(drawn, budget) {
  const { view, edges, nodes } = drawn;
  const path = new Set(keptPath(view, budget));
  const wanted = wantedRow(view, budget);
  view.nodes.forEach((_, row) => {
    const unmarked = isDropped(view, budget, row) ? "dropped" : "";
    const state = row === wanted ? "wanted" : path.has(row) ? "accepted" : unmarked;
    if (nodes[row].dataset.state === state) return;
    nodes[row].dataset.state = state;
    edges[row].dataset.state = state;
  });
  nodes[nodes.length - 1].style.display = wanted === nodes.length - 1 ? "" : "none";
  edges[nodes.length - 1].style.display = nodes[nodes.length - 1].style.display;
}

function fillText(box, view, budget) {
  const kept = keptPath(view, budget).length;
  const [root, ...rest] = view.spoken;
  box.replaceChildren(
    html("span", "", view.before), html("b", "", root),
    html("span", "kdlab-said", rest.slice(0, kept - 1).join("")), html("span", "kdlab-bonus", rest[kept - 1]),
  );
  box.scrollTop = box.scrollHeight;
}

function legend() {
  const box = html("div", "kdlab-legend");
  const marks = {
    root: "root: last committed token",
    likely: "drafted; fuller = likelier path",
    accepted: "accepted by the target",
    wanted: "bonus: what the target wanted next",
    dropped: "left out by the smaller budget",
  };
  for (const [name, words] of Object.entries(marks)) {
    const entry = html("span", "", words);
    entry.prepend(html("i", `kdlab-mark kdlab-mark-${name}`));
    box.append(entry);
  }
  box.append(html("span", "", "side by side: siblings without children"));
  return box;
}

function render({ model, el }) {
  const root = html("div", "kdlab-tree");
  root.tabIndex = 0;
  root.setAttribute("aria-label", "draft tree explorer: left and right arrows move the round, up and down the budget");
  // JupyterLab would take the arrow keys to move between cells.
  root.setAttribute("data-lm-suppress-shortcuts", "true");
  const send = (changes) => { model.set(changes); model.save_changes(); };
  const sliders = {
    prompt: slider("prompt", "PageUp, PageDown", (value) => send({ prompt: value, round: 0 })),
    round: slider("round", "left and right arrow", (value) => send({ round: value })),
    budget: slider("budget", "up and down arrow; with Shift double and half", (value) => send({ budget: value })),
  };
  const bar = html("div", "kdlab-bar");
  bar.append(...Object.values(sliders).map((part) => part.label));
  const whole = html("button", "kdlab-whole", "whole tree");
  whole.setAttribute("aria-pressed", "false");
  bar.append(whole);
  const canvas = html("div", "kdlab-canvas");
  // Plain boxes: JupyterLab gives lists and headings of an output its own look.
  const numbers = html("div", "kdlab-list kdlab-numbers"), facts = html("div", "kdlab-list kdlab-facts");
  const text = html("div", "kdlab-text");
  const side = html("div", "kdlab-side");
  const parts = { "This round": numbers, "Node under the pointer": facts, "Text so far": text };
  for (const [name, part] of Object.entries(parts)) side.append(html("div", "kdlab-heading", name), part);
  const body = html("div", "kdlab-body");
  body.append(canvas, side);
  const caption = html("div", "kdlab-caption");
  root.append(bar, body, legend(), caption);
  el.replaceChildren(root);
  let drawn = null;

  const showBudget = () => {
    const budget = model.get("budget"), view = drawn.view;
    sliders.budget.input.value = budget;
    sliders.budget.value.textContent = `${budget} of ${view.largest}`;
    markBudget(drawn, budget);
    fillList(numbers, roundNumbers(view, budget));
    fillText(text, view, budget);
  };
  const showPlace = () => {
    const view = drawn.view, prompt = model.get("prompt"), round = model.get("round");
    sliders.prompt.input.value = prompt;
    sliders.prompt.value.textContent = view.prompts[prompt];
    sliders.round.input.value = round;
    sliders.round.value.textContent = `${round} of ${view.rounds - 1}`;
  };
  const showView = () => {
    const view = model.get("view");
    drawn = drawTree(view, canvas);
    sliders.prompt.input.max = view.prompts.length - 1;
    sliders.round.input.max = view.rounds - 1;
    sliders.budget.input.max = view.largest;
    caption.textContent = view.caption;
    fillList(facts, nodeFacts(view, 0));
    showBudget();
    showPlace();
    // The root stays in sight where the walk's last node fits below it.
    const last = drawn.spots[view.path[view.path.length - 1]].middle;
    canvas.scrollTop = last > canvas.clientHeight - 40 ? last - canvas.clientHeight / 2 : 0;
  };

  root.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const view = drawn.view;
    const state = { prompt: model.get("prompt"), round: model.get("round"), budget: model.get("budget") };
    const sizes = { prompts: view.prompts.length, rounds: view.rounds, largest: view.largest };
    const changes = keyMove(event.key, event.shiftKey, { ...state, ...sizes });
    if (changes === null) return;
    event.preventDefault();
    event.stopPropagation();
    if (Object.entries(changes).some(([name, value]) => state[name] !== value)) send(changes);
  });
  canvas.addEventListener("pointerover", (event) => {
    const node = event.target.closest("[data-row]");
    if (node) fillList(facts, nodeFacts(drawn.view, Number(node.dataset.row)));
  });
  whole.addEventListener("click", () => {
    const fits = canvas.classList.toggle("kdlab-fits");
    whole.setAttribute("aria-pressed", String(fits));
  });
  const handlers = {
    "change:view": showView, "change:budget": showBudget, "change:prompt": showPlace, "change:round": showPlace,
  };
  for (const [name, handler] of Object.entries(handlers)) model.on(name, handler);
  showView();
  // The page may give the widget its width only after this, and change it later.
  const observer = new ResizeObserver(() => {
    if (Math.abs(canvas.clientWidth - 24 - drawn.room) > 60) showView();
  });
  observer.observe(canvas);
  return () => {
    observer.disconnect();
    for (const [name, handler] of Object.entries(handlers)) model.off(name, handler);
  };
}

export default { render };
