"use strict";
// Plan: the graph in lanes of ranks; over it the time of nodes, the bytes of moves and the critical path of a step.

DF.views.plan = {
  title: "Plan",
  async render(root) {
    const run = currentRun();
    const [info, plan] = await Promise.all([get("overview", { run }), get("plan", { run })]);
    if (!plan.nodes) return replace(root, note("This run has no plan in its folder: it was started by an older version."));
    const number = chosenStep(info.steps_recorded);
    const step = number === null ? null : await get("step", { run, step: number }).catch(() => null);
    replace(root,
      stepBar(info.steps_recorded, number, (s) => change({ step: s })),
      el("section", { class: "card scroll" }, drawPlan(plan, step), planLegend()),
      step && el("section", { class: "card scroll" }, el("h2", {}, `Tasks of step ${number}`), taskTable(step)));
  },
};

const BOX = { width: 188, height: 62, gapX: 74, gapY: 22, pad: 20, label: 104 };
const ON_PATH = 0.05;  // of the critical path; less is not worth a colour

function drawPlan(plan, step) {
  const rows = new Map();  // lane → column → nodes
  for (const node of plan.nodes) {
    const lane = rows.get(node.lane) || rows.set(node.lane, new Map()).get(node.lane);
    (lane.get(node.column) || lane.set(node.column, []).get(node.column)).push(node);
  }
  const columns = Math.max(...plan.nodes.map((n) => n.column)) + 1;
  const width = BOX.label + 2 * BOX.pad + columns * BOX.width + (columns - 1) * BOX.gapX;
  const at = new Map();
  const laneOf = new Map(plan.nodes.map((n) => [n.id, n]));
  // Lines that pass other boxes of their lane go below them, each a little lower; weights go back above.
  const below = plan.arcs.filter((a) => a.kind !== "weights" && laneOf.get(a.from) && laneOf.get(a.to) && laneOf.get(a.from).lane === laneOf.get(a.to).lane && laneOf.get(a.to).column - laneOf.get(a.from).column > 1);
  const above = plan.arcs.some((a) => a.kind === "weights");
  let y = above ? 30 : 8;
  const gaps = [];  // lane → the height between it and the next
  const lanes = plan.lanes.map((lane, i) => {
    const stacked = Math.max(...[...rows.get(i).values()].map((n) => n.length));
    const passing = below.filter((a) => laneOf.get(a.from).lane === i).length;
    const height = 2 * BOX.pad + stacked * BOX.height + (stacked - 1) * BOX.gapY + (passing ? 22 + 18 * passing : 0);
    for (const [column, nodes] of rows.get(i)) {
      nodes.forEach((node, k) => at.set(node.id, { node, x: BOX.label + BOX.pad + column * (BOX.width + BOX.gapX), y: y + BOX.pad + k * (BOX.height + BOX.gapY) }));
    }
    const group = el("g", {}, el("rect", { x: 0, y, width, height, rx: 12, class: `lane lane-${i % 4}` }),
      el("text", { x: 16, y: y + 28, class: "lane-name" }, lane.name || "ranks"), el("text", { x: 16, y: y + 46, class: "lane-ranks" }, `ranks ${lane.ranks}`));
    gaps[i] = y + height + 18;
    y += height + 36;
    return group;
  });
  const times = new Map((step ? step.nodes : []).filter((n) => !n.held_out).map((n) => [n.name, n]));
  const critical = new Set((step ? step.nodes : []).filter((n) => !n.held_out && n.critical_us > ON_PATH * step.length).map((n) => n.name));
  const slowest = Math.max(1, ...plan.nodes.map((n) => (times.get(taskName(n)) || { work_us: 0 }).work_us));
  const moved = Math.max(1, ...[...times.values()].map((n) => n.sent));  // 1: no bytes are recorded, as of a simulated step
  const labels = { said: new Set(), boxes: [...at.values()].map(({ x, y: top }) => ({ x, y: top, width: BOX.width, height: BOX.height })) };
  const arcs = [...plan.arcs].sort((a, b) => (a.kind === "local" ? 0 : 1) - (b.kind === "local" ? 0 : 1)).map((arc) => drawArc(arc, at, times, critical, moved, below.indexOf(arc), gaps, labels));
  const boxes = [...at.values()].map(({ node, x, y: top }) => drawNode(node, x, top, times.get(taskName(node)), critical.has(taskName(node)), slowest));
  return el("svg", { class: "plan", style: { width: "100%", maxWidth: `${Math.round(1.15 * width)}px`, minWidth: `${Math.round(0.72 * width)}px` }, viewBox: `0 0 ${width} ${y}`, role: "img", "aria-label": "the plan" }, lanes, arcs, boxes);
}

function taskName(node) {
  return node.type === "load" ? "load" : node.id;
}

function drawNode(node, x, y, time, critical, slowest) {
  const share = time ? time.work_us / slowest : 0;
  const took = time ? duration(time.work_us) : "";
  const layout = ['dp', 'sp', 'tp'].filter(dim => dim === 'dp' || node[dim] > 1).map(dim => `${dim} ${node[dim]}`).join(' × ');
  const fits = 6 * (node.type.length + 3 + layout.length) + 7 * took.length < BOX.width - 26;  // pixels a character
  const group = el("g", { class: `node${critical ? " critical" : ""}`, tabindex: "0" },
    el("rect", { x, y, width: BOX.width, height: BOX.height, rx: 9, class: "box" }),
    el("rect", { x: x + 1, y: y + BOX.height - 7, width: Math.max(0, (BOX.width - 2) * share), height: 6, rx: 3, fill: kindColor(node.type) }),
    el("circle", { cx: x + 14, cy: y + 18, r: 4.5, fill: kindColor(node.type) }),
    el("text", { x: x + 25, y: y + 22, class: "name" }, cut(node.id, 21)),
    el("text", { x: x + 12, y: y + 40, class: "sub" }, fits ? `${node.type} · ${layout}` : layout),
    time && el("text", { x: x + BOX.width - 10, y: y + 40, class: "time" }, took));
  group.addEventListener("mousemove", (e) => tip(e, el("b", {}, node.id),
    el("div", {}, `reads ${node.reads.join(", ") || "nothing"}`), el("div", {}, `writes ${node.writes.join(", ") || "nothing"}`),
    time && el("div", {}, `works ${duration(time.work_us)} on average, ${duration(time.max_us)} on rank ${time.slowest}; on the critical path ${duration(time.critical_us)}`)));
  group.addEventListener("mouseleave", (e) => tip(e));
  return group;
}

function drawArc(arc, at, times, critical, moved, passing, gaps, labels) {
  const a = at.get(arc.from);
  const b = at.get(arc.to);
  if (!a || !b) return null;
  const back = arc.kind === "weights";
  const [x1, y1, x2, y2] = back ? [a.x + BOX.width / 2, a.y, b.x + BOX.width / 2, b.y] : [a.x + BOX.width, a.y + BOX.height / 2, b.x, b.y + BOX.height / 2];
  const bend = Math.max(36, Math.abs(x2 - x1) / 2.4);
  let line = back ? `M${x1},${y1} C${x1},${Math.min(y1, y2) - 30} ${x2},${Math.min(y1, y2) - 30} ${x2},${y2}` : `M${x1},${y1} C${x1 + bend},${y1} ${x2 - bend},${y2} ${x2 - 5},${y2}`;
  const time = arc.move ? times.get(arc.move) : null;
  const between = !back && a.node.lane !== b.node.lane && b.node.column - a.node.column > 1;
  const low = between ? gaps[Math.min(a.node.lane, b.node.lane)] : Math.max(y1, y2) + BOX.height / 2 + 18 + 18 * passing;
  if (passing >= 0 || between) line = `M${x1},${y1} C${x1 + 34},${y1} ${x1 + 6},${low} ${x1 + 46},${low} L${x2 - 46},${low} C${x2 - 6},${low} ${x2 - 34},${y2} ${x2 - 5},${y2}`;
  const width = arc.kind === "local" ? 1.4 : 2 + (time ? 3 * Math.sqrt(time.sent / moved) : 0);
  const text = arc.kind === "local" ? "" : time && moved > 1 ? bytes(time.sent) : arc.kind === "weights" ? "weights" : "";
  const label = labels.said.has(arc.move) ? "" : text;  // a move may carry several lines, and has one number
  if (text) labels.said.add(arc.move);
  const [mx, my] = back ? [(x1 + x2) / 2, Math.min(y1, y2) - 22] : passing >= 0 || between ? [(x1 + x2) / 2, low] : [(x1 + x2) / 2, (y1 + y2) / 2];
  const [lx, ly] = label ? freePlace(mx, my, 8 + 6.8 * label.length, labels.boxes) : [mx, my];
  const group = el("g", { class: `arc ${arc.kind}${arc.move && critical.has(arc.move) ? " critical" : ""}` },
    el("path", { d: line, "stroke-width": width }), back ? null : el("path", { d: `M${x2 - 7},${y2 - 4} L${x2},${y2} L${x2 - 7},${y2 + 4}`, class: "head" }),
    label && el("rect", { x: lx - 4 - 3.4 * label.length, y: ly - 10, width: 8 + 6.8 * label.length, height: 18, rx: 9, class: "pillbox" }),
    label && el("text", { x: lx, y: ly + 3.5, class: "label" }, label));
  group.addEventListener("mousemove", (e) => tip(e, el("b", {}, `${arc.from} → ${arc.to}`), el("div", {}, arc.kind === "local" ? "local: nothing moves" : arc.move),
    el("div", {}, arc.fields.join(", ")), time && el("div", {}, `${bytes(time.sent)} sent, ${duration(time.work_us)}, waiting ${duration(time.wait_us)}`)));
  group.addEventListener("mouseleave", (e) => tip(e));
  return group;
}

/** The nearest place above or below for the centre of a label, where it lies on no node and no other label. */
function freePlace(x, y, width, boxes) {
  const taken = (top) => boxes.some((b) => x - width / 2 < b.x + b.width && b.x < x + width / 2 && top < b.y + b.height && b.y < top + 18);
  const offset = [0, 20, -20, 40, -40, 60, -60, 80, -80].find((d) => !taken(y + d - 10)) || 0;
  boxes.push({ x: x - width / 2, y: y + offset - 10, width, height: 18 });
  return [x, y + offset];
}

function planLegend() {
  const line = (kind, text) => el("span", { class: "key" }, el("span", { class: `swatch arc-${kind}` }), text);
  return el("div", { class: "legend" }, line("local", "local: stays on its ranks"), line("move", "a move, and its bytes"), line("weights", "weights for the next step"), line("critical", "dark: on the critical path of the step"));
}

function taskTable(step) {
  const rows = [...step.nodes].sort((a, b) => b.critical_us - a.critical_us);
  const cells = (n) => [n.held_out ? `${n.name} (held out)` : n.name, KIND_NAMES[n.kind] || n.kind, n.ranks, duration(n.work_us), `${duration(n.max_us)} · rank ${n.slowest}`, duration(n.wait_us), n.sent ? bytes(n.sent) : "–", n.critical_us ? `${duration(n.critical_us)} · ${percent(n.critical_us / step.length)}` : "–"];
  const head = ["task", "kind", "ranks", "works, mean", "works, longest", "waits, mean", "sent", "on the critical path"];
  return el("table", { class: "grid" }, el("thead", {}, el("tr", {}, head.map((h) => el("th", {}, h)))),
    el("tbody", {}, rows.map((n) => el("tr", {}, cells(n).map((c, i) => el("td", { class: i > 1 ? "num" : "" }, i === 1 ? [el("span", { class: "dot", style: { background: kindColor(n.kind) } }), c] : String(c)))))));
}

function cut(text, length) {
  return text.length > length ? `${text.slice(0, length - 1)}…` : text;
}
