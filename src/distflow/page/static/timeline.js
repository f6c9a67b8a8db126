"use strict";
// Timeline: a lane per worker, steps as bands, tasks and waits by colour; above 64 workers a heat map to drill into.

let LANE = 30;  // set for the number of workers
const AXIS = 26, LABEL = 86, IDLE = 64, BLOCK = 32;

DF.views.timeline = {
  title: "Timeline",
  async render(root) {
    const run = currentRun();
    const info = await get("overview", { run });
    const steps = info.steps_recorded;
    const step = chosenStep(steps);
    if (step === null) return replace(root, note("No spans were recorded: by an older version, or with `record.spans: false`."));
    const { ranks, span = 3 } = place().params;
    const asked = { run, step, ...(ranks ? { ranks } : {}) };
    const first = await get("lanes", asked);
    const bar = stepBar(steps, step, (s) => change({ step: s }));
    if (first.fleet) return drawFleet(root, bar, first.fleet);
    const window = steps.slice(Math.max(0, steps.indexOf(step) - Number(span) + 1), steps.indexOf(step) + 1);
    const parts = (await Promise.all(window.map((s) => (s === step ? first : get("lanes", { ...asked, step: s }).catch(() => null))))).filter(Boolean).map((p) => p.lanes);
    const path = await get("step", { run, step }).catch(() => null);
    drawLanes(root, bar, parts, path, ranks, await stepTimes(run, steps, step));
  },
};

/** All spans of the window in one list, with times from the start of its first step. */
function together(parts) {
  const start = Math.min(...parts.map((p) => p.base));
  const spans = parts.flatMap((p) => p.spans.map(([rank, at, length, name, kind, wait, details]) => (
    { rank, start: p.base - start + at, length, name: p.names[name], kind: p.kinds[kind], wait, details: details || {}, step: p.step })));
  return { spans, bands: parts.map((p) => ({ step: p.step, start: p.base - start, end: p.base - start + p.length })), end: Math.max(...parts.map((p) => p.base - start + p.length)), ranks: [...new Set(parts.flatMap((p) => p.ranks))].sort((a, b) => a - b) };
}

function drawLanes(root, bar, parts, path, ranks, times) {
  const all = together(parts);
  const last = parts.at(-1);
  const rows = new Map(all.ranks.map((r, i) => [r, i]));
  const shown = { from: 0, to: all.end * 1.005 };
  let critical = true;
  const x = (t, width) => LABEL + (t - shown.from) / (shown.to - shown.from) * (width - LABEL - IDLE);
  const time = (px, width) => shown.from + (px - LABEL) / (width - LABEL - IDLE) * (shown.to - shown.from);
  LANE = Math.max(30, Math.min(72, Math.floor(520 / all.ranks.length)));
  const height = AXIS + LANE * all.ranks.length + 8;

  const chart = canvas(height, (c, width) => {
    c.clearRect(0, 0, width, height);
    const right = width - IDLE;
    for (const [i, band] of all.bands.entries()) {
      const [a, b] = [Math.max(LABEL, x(band.start, width)), Math.min(right, x(band.end, width))];
      if (b <= a) continue;
      c.fillStyle = color(i % 2 ? "band-1" : "band-0");
      c.fillRect(a, 0, b - a, height);
      c.fillStyle = color("soft");
      if (b - a > 46) c.fillText(`step ${band.step}`, a + 5, 11);
    }
    drawAxis(c, shown, width, height, x);
    c.save();
    c.beginPath();
    c.rect(LABEL, AXIS - 2, right - LABEL, height);
    c.clip();
    for (const s of all.spans) if (s.kind !== "step") drawSpan(c, s, rows.get(s.rank), x, width);
    if (critical && path) drawPath(c, path, all.bands.at(-1), rows, x, width);
    c.restore();
    for (const [rank, row] of rows) {
      const y = AXIS + row * LANE;
      c.fillStyle = color("ink");
      c.fillText(`rank ${rank}`, 8, y + LANE / 2 + 3);
      const idle = last.idle[rank];
      if (idle === undefined) continue;
      c.fillStyle = color("track");
      c.fillRect(right + 10, y + LANE / 2 + 2, 44, 7);
      c.fillStyle = heat(idle);
      c.fillRect(right + 10, y + LANE / 2 + 2, Math.max(1, 44 * idle), 7);
      c.fillStyle = color("ink");
      c.fillText(percent(idle), right + 10, y + LANE / 2 - 2);
    }
  }, `timeline of ${all.ranks.length} workers; + and − zoom, shift with ← → pans, 0 shows all`);

  const view = (from, to) => {
    const least = Math.max(20, all.end / 1e5);
    const length = Math.min(Math.max(to - from, least), all.end * 1.01);
    shown.from = Math.max(-0.005 * all.end, Math.min(from, all.end * 1.005 - length));
    shown.to = shown.from + length;
    chart.redraw();
  };
  const zoom = (factor, at) => {
    const middle = at === undefined ? (shown.from + shown.to) / 2 : at;
    view(middle - (middle - shown.from) * factor, middle + (shown.to - middle) * factor);
  };
  const pan = (share) => view(shown.from + share * (shown.to - shown.from), shown.to + share * (shown.to - shown.from));
  chart.addEventListener("wheel", (e) => {
    if (!e.ctrlKey && !e.shiftKey && Math.abs(e.deltaY) > Math.abs(e.deltaX) && all.ranks.length > 24) return;  // scrolls the page
    e.preventDefault();
    if (e.shiftKey || Math.abs(e.deltaX) > Math.abs(e.deltaY)) pan((e.deltaX || e.deltaY) / 800);
    else zoom(Math.exp(e.deltaY / 400), time(e.offsetX, chart.clientWidth));
  }, { passive: false });
  chart.addEventListener("keydown", (e) => {
    const act = { "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1.6), 0: () => view(0, all.end * 1.005) }[e.key] || (e.shiftKey && { ArrowLeft: () => pan(-0.25), ArrowRight: () => pan(0.25) }[e.key]);
    if (act) { act(); e.preventDefault(); e.stopPropagation(); }
  });
  let drag = null;
  chart.addEventListener("pointerdown", (e) => { drag = [e.clientX, shown.from, shown.to]; chart.setPointerCapture(e.pointerId); });
  chart.addEventListener("pointerup", () => { drag = null; });
  chart.addEventListener("dblclick", () => view(0, all.end * 1.005));
  chart.addEventListener("pointermove", (e) => {
    if (drag) {
      const by = (drag[0] - e.clientX) / (chart.clientWidth - LABEL - IDLE) * (drag[2] - drag[1]);
      view(drag[1] + by, drag[2] + by);
      return tip(e);
    }
    const rank = all.ranks[Math.floor((e.offsetY - AXIS) / LANE)];
    const t = time(e.offsetX, chart.clientWidth);
    const inCall = (e.offsetY - AXIS) % LANE > LANE - 9;
    const hits = all.spans.filter((s) => s.rank === rank && s.start <= t && t <= s.start + s.length && s.kind !== "step");
    const hit = hits.find((s) => (s.kind === "call") === inCall) || hits[0];
    if (hit) tip(e, spanTip(hit)); else tip(e);
  });
  chart.addEventListener("pointerleave", (e) => tip(e));
  DF.zoomTimeline = zoom;

  const spanChoice = el("select", { "aria-label": "how many steps", onchange: (e) => change({ span: e.target.value }) }, [1, 3, 10].map((n) => el("option", { value: n }, n === 1 ? "1 step" : `${n} steps`)));
  spanChoice.value = place().params.span || 3;
  const kinds = [...new Set(all.spans.map((s) => s.kind))].filter((k) => k !== "step" && k !== "call");
  replace(root,
    el("div", { class: "toolbar" }, bar, spanChoice,
      ranks && el("button", { type: "button", onclick: () => change({ ranks: null }) }, "← all workers"),
      el("label", {}, el("input", { type: "checkbox", checked: true, onchange: (e) => { critical = e.target.checked; chart.redraw(); } }), " critical path"),
      el("div", { class: "legend" }, kinds.map((k) => el("span", { class: "key" }, el("span", { class: "swatch", style: { background: kindColor(k) } }), KIND_NAMES[k] || k)), el("span", { class: "key" }, el("span", { class: "swatch waits" }), "waiting"))),
    el("section", { class: "card" }, el("div", { class: "lanes" }, chart), el("div", { class: "muted hint" }, "Drag to pan, wheel or + − to zoom, double-click for all. Right: share of the step that a worker was idle. Times of all workers are by one clock, agreed on when the run started.")), times);
}

/** How long every step took, to find the odd one and go there. */
async function stepTimes(run, steps, step) {
  const metrics = await get("metrics", { run });
  const values = metrics.series["timing_max_s/step"];
  if (!values || !values.some((v) => v)) return null;
  const points = metrics.step.map((s, i) => [s, values[i]]).filter(([, v]) => v);
  const top = robustTop(points.map((p) => p[1]));
  const chart = canvas(96, (c, width) => {
    c.clearRect(0, 0, width, 96);
    const w = (width - LABEL - IDLE) / points.length;
    c.fillStyle = color("soft");
    c.fillText(duration(top * 1e6), 8, 14);
    points.forEach(([s, v], i) => {
      c.fillStyle = s === step ? color("critical") : steps.includes(s) ? color("accent") : color("kind-wait");
      const wide = Math.max(0.7, w - (w > 4 ? 1.5 : 0)), high = 86 * Math.min(1, v / top);
      c.fillRect(LABEL + i * w, 92 - high, wide, high);
      if (v > top) c.clearRect(LABEL + i * w, 12, wide, 3);  // longer than the scale
    });
  }, "time of every step; click one to see it");
  const at = (e) => points[Math.floor((e.offsetX - LABEL) / (chart.clientWidth - LABEL - IDLE) * points.length)];
  chart.addEventListener("mousemove", (e) => { const p = at(e); if (p) tip(e, el("b", {}, `step ${p[0]}`), ` ${duration(p[1] * 1e6)}`); else tip(e); });
  chart.addEventListener("mouseleave", (e) => tip(e));
  chart.addEventListener("click", (e) => { const p = at(e); if (p && steps.includes(p[0])) change({ step: p[0] }); });
  return el("section", { class: "card" }, el("h2", {}, "Time of every step", el("span", { class: "muted" }, " click to see one")), el("div", {}, chart));
}

function drawAxis(c, shown, width, height, x) {
  const span = shown.to - shown.from;
  const rough = span / Math.max(3, Math.floor(width / 130));
  const unit = 10 ** Math.floor(Math.log10(rough));
  const tick = [1, 2, 5, 10].map((m) => m * unit).find((v) => v >= rough);
  c.strokeStyle = color("grid");
  c.fillStyle = color("soft");
  for (let t = Math.ceil(shown.from / tick) * tick; t <= shown.to; t += tick) {
    const at = x(t, width);
    if (at < LABEL) continue;
    c.beginPath();
    c.moveTo(at, 14);
    c.lineTo(at, height);
    c.stroke();
    if (at < width - IDLE - 30) c.fillText(duration(Math.max(0, t), Math.max(0, shown.to)), at + 3, 22);
  }
}

function drawSpan(c, s, row, x, width) {
  const [a, b] = [x(s.start, width), x(s.start + s.length, width)];
  if (row === undefined || b < LABEL || a > width - IDLE) return;
  const y = AXIS + row * LANE + 2;
  if (s.kind === "call") {
    if (s.details.left && s.details.left.length > 1) return drawLoad(c, s, a, b, y);
    c.fillStyle = kindColor("call");
    c.fillRect(a, y + LANE - 8, Math.max(0.7, b - a), 3);
    return;
  }
  const wide = Math.max(0.8, b - a - 0.6);
  c.globalAlpha = s.details.split ? 0.55 : 1;
  c.fillStyle = kindColor(s.kind);
  c.fillRect(a, y, wide, LANE - 6);
  if (s.wait) {
    c.globalAlpha = 1;
    c.fillStyle = color("kind-wait");
    c.fillRect(a, y, Math.max(0.8, wide * s.wait / s.length), LANE - 6);
  }
  c.globalAlpha = 1;
  const text = s.name;
  if (wide > 34) {
    c.save();
    c.beginPath();
    c.rect(a, y, wide - 3, LANE - 6);
    c.clip();
    c.fillStyle = s.wait / s.length > 0.5 ? color("ink") : "#fff";
    c.fillText(text, Math.max(a, LABEL) + 5, y + Math.min(24, LANE / 2 + 1));
    c.restore();
  }
}

/** How many responses the engine still had to finish, as an area in the bar of its node. */
function drawLoad(c, s, a, b, y) {
  const top = Math.max(...s.details.left.map(([, n]) => n), 1);
  const at = (us) => a + (b - a) * Math.min(1, us / s.length);
  c.beginPath();
  c.moveTo(a, y);
  c.lineTo(a, y);
  let level = y;
  for (const [us, left] of s.details.left) {
    c.lineTo(at(us), level);
    level = y + (LANE - 6) * (1 - left / top);
    c.lineTo(at(us), level);
  }
  c.lineTo(b, level);
  c.lineTo(b, y);
  c.closePath();
  c.fillStyle = "rgba(255,255,255,0.28)";
  c.fill();
}

function drawPath(c, path, band, rows, x, width) {
  c.strokeStyle = color("critical");
  c.lineWidth = 2;
  c.beginPath();
  let first = true;
  for (const [rank, , , start, end] of path.path) {
    const row = rows.get(rank);
    if (row === undefined) { first = true; continue; }
    const y = AXIS + row * LANE + LANE - 3;
    const [a, b] = [x(band.start + start, width), x(band.start + end, width)];
    if (first) c.moveTo(a, y); else c.lineTo(a, y);
    c.lineTo(b, y);
    first = false;
  }
  c.stroke();
  c.lineWidth = 1;
}

function spanTip(s) {
  const rows = [`rank ${s.rank}, step ${s.step}${s.details.split ? ", held-out" : ""}`, `${duration(s.length)}${s.wait ? `, of which ${duration(s.wait)} waiting for rank ${s.details.waits_for}` : ""}`];
  if (s.details.samples !== undefined) rows.push(`${number(s.details.samples)} samples${s.details.tokens !== undefined ? `, ${number(s.details.tokens)} tokens` : ""}`);
  if (s.details.sent) rows.push(`${bytes(s.details.sent)} sent`);
  if (s.details.left) rows.push("light area: responses that are finished");
  for (const [key, value] of Object.entries(s.details)) {
    if (!["split", "waits_for", "samples", "tokens", "sent", "left", "local"].includes(key)) rows.push(`${key}: ${String(value).slice(0, 120)}`);
  }
  return [el("b", {}, s.kind === "call" ? `${s.name} (part of a node)` : s.name), rows.map((r) => el("div", {}, r))];
}

/** From busy (cool) to idle (warm); red is for errors. */
function heat(share) {
  const stops = [[34, 139, 120], [120, 180, 110], [236, 200, 90], [236, 174, 78], [222, 132, 46]];
  const at = Math.min(0.9999, Math.max(0, share)) * (stops.length - 1);
  const [a, b, t] = [stops[Math.floor(at)], stops[Math.floor(at) + 1], at % 1];
  return `rgb(${a.map((v, i) => Math.round(v + (b[i] - v) * t)).join(",")})`;
}

function drawFleet(root, bar, fleet) {
  let order = fleet.ranks.map((_, i) => i);
  const row = Math.max(1, Math.min(10, Math.floor(900 / fleet.ranks.length)));
  const height = AXIS + row * fleet.ranks.length + 6;
  const chart = canvas(height, (c, width) => {
    c.clearRect(0, 0, width, height);
    const bins = fleet.cells[0].length;
    const right = width - IDLE;
    const w = (right - LABEL) / bins;
    drawAxis(c, { from: 0, to: fleet.length }, width, height, (t, wide) => LABEL + t / fleet.length * (wide - LABEL - IDLE));
    order.forEach((i, at) => {
      const y = AXIS + at * row;
      for (let k = 0; k < bins; k++) {
        c.fillStyle = heat(fleet.cells[i][k] / 100);
        c.fillRect(LABEL + k * w, y, w + 0.5, row);
      }
      c.fillStyle = heat(fleet.idle[i]);
      c.fillRect(right + 8, y, 44 * fleet.idle[i], Math.max(1, row - (row > 3 ? 1 : 0)));
      if (at % Math.ceil(16 / row) === 0) {
        c.fillStyle = color("soft");
        c.fillText(`rank ${fleet.ranks[i]}`, 8, y + Math.max(9, row));
      }
    });
  }, `idle share of ${fleet.ranks.length} workers; click, or Enter, to see some one by one`);
  const at = (e) => order[Math.floor((e.offsetY - AXIS) / row)];
  const drill = (rank) => { const from = Math.floor(rank / BLOCK) * BLOCK; change({ ranks: `${from}-${Math.min(from + BLOCK, fleet.ranks.at(-1) + 1) - 1}` }); };
  chart.addEventListener("mousemove", (e) => {
    const i = at(e);
    if (i === undefined) return tip(e);
    tip(e, el("b", {}, `rank ${fleet.ranks[i]}`), el("div", {}, `idle ${percent(fleet.idle[i])} of the step`), el("div", { class: "muted" }, `click for ranks ${Math.floor(fleet.ranks[i] / BLOCK) * BLOCK} and following`));
  });
  chart.addEventListener("mouseleave", (e) => tip(e));
  chart.addEventListener("click", (e) => { const i = at(e); if (i !== undefined) drill(fleet.ranks[i]); });
  chart.addEventListener("keydown", (e) => { if (e.key === "Enter") drill(fleet.ranks[order[0]]); });
  const mean = fleet.idle.reduce((a, b) => a + b, 0) / fleet.idle.length;
  const scale = el("span", { class: "key" }, "busy ", [0, 0.25, 0.5, 0.75, 1].map((v) => el("span", { class: "swatch", style: { background: heat(v) } })), " idle");
  const sort = el("select", { "aria-label": "order of workers", onchange: (e) => {
    order = fleet.ranks.map((_, i) => i);
    if (e.target.value === "idle") order.sort((a, b) => fleet.idle[b] - fleet.idle[a]);
    chart.redraw();
  } }, el("option", { value: "rank" }, "by rank"), el("option", { value: "idle" }, "most idle first"));
  replace(root,
    el("div", { class: "toolbar" }, bar, sort, el("div", { class: "legend" }, scale), el("span", { class: "muted" }, `${fleet.ranks.length} workers, ${duration(fleet.length)}, idle ${percent(mean)} on average`)),
    el("section", { class: "card" }, el("div", { class: "lanes fleet" }, chart), el("div", { class: "muted hint" }, "A row per worker over the time of the step; click a row to see its tasks and those of its neighbours.")));
}
