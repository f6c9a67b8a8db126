"use strict";
// Curves: every metric of one run or of several over each other, by step or by time, searched and smoothed.

const HIDDEN_AT_FIRST = ["timing_max_s/"];

DF.views.curves = {
  title: "Curves",
  async render(root) {
    const runs = compared();
    const all = await Promise.all(runs.map((i) => get("metrics", { run: i }).catch(() => null)));
    const { search = "", by = "step", smoothing = "0", log } = place().params;
    const grid = el("div", {});
    const count = el("span", { class: "muted" });
    const draw = () => drawCurves(grid, count, runs, all);
    const input = el("input", { type: "search", id: "search", placeholder: "search metrics (/)", value: search, "aria-label": "search metrics" });
    const later = debounce(() => { change({ search: input.value }, true); draw(); }, 150);
    input.addEventListener("input", later);
    const slider = el("input", { type: "range", min: 0, max: 0.98, step: 0.01, value: smoothing, "aria-label": "smoothing", onchange: (e) => { change({ smoothing: e.target.value }, true); draw(); } });
    const axis = el("select", { "aria-label": "x axis", onchange: (e) => { change({ by: e.target.value }, true); draw(); } }, Object.entries(AXES).map(([value, a]) => el("option", { value }, a.title)));
    axis.value = by;
    const scale = el("input", { type: "checkbox", "aria-label": "log scale", checked: log === "1", onchange: (e) => { change({ log: e.target.checked ? "1" : null }, true); draw(); } });
    replace(root, el("div", { class: "toolbar" }, input, axis, el("label", {}, "smoothing ", slider), el("label", {}, scale, " log"), count,
      runs.length > 1 && el("div", { class: "legend" }, runs.map((i) => el("span", { class: "key" }, el("span", { class: "swatch", style: { background: runColor(i) } }), DF.runs[i].label)))), grid);
    draw();
  },
};

/** The horizontal axes: the position of each row of a run's metrics, and how a position is said. */
const AXES = {
  step: { title: "by step", x: (m) => m.step, text: null },
  time: { title: "by time", x: (m) => m.time.map((t) => (t - m.time[0]) / 60), text: (v) => `${number(v)} min` },
  clock: { title: "by time of day", x: (m) => m.time, text: when },
};

/** The metrics that come first, as they were pinned, by the address of the page. */
function pinned() {
  return (place().params.pins || "").split(",").filter(Boolean);
}

function pin(name) {
  const pins = pinned();
  change({ pins: (pins.includes(name) ? pins.filter((n) => n !== name) : [...pins, name]).join(",") }, true);
}

function debounce(act, ms) {
  let timer = 0;
  return () => { clearTimeout(timer); timer = setTimeout(act, ms); };
}

function drawCurves(root, count, runs, all) {
  const { search = "", by = "step", smoothing = "0", log } = place().params;
  const names = [...new Set(all.flatMap((m) => (m ? Object.keys(m.series) : [])))].sort(byImportance);
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  const shown = names.filter((n) => (words.length ? words.every((w) => n.toLowerCase().includes(w)) : !HIDDEN_AT_FIRST.some((h) => n.startsWith(h))));
  count.textContent = `${shown.length} of ${names.length} metrics`;
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      seen.unobserve(entry.target);
      entry.target.draw();
    }
  }, { rootMargin: "300px" });
  const axis = AXES[by] || AXES.step;
  const card = (name) => {
    const box = el("div", { class: "chart" });
    const explained = all.map((m) => m && m.explain[name]).find(Boolean);
    const readout = el("div", { class: "readout" });
    const isPinned = pinned().includes(name);
    const button = el("button", { type: "button", class: "pin", title: isPinned ? "unpin" : "pin to the top", "aria-label": `pin ${name}`, "aria-pressed": String(isPinned), onclick: () => { pin(name); drawCurves(root, count, runs, all); } }, "★");
    const element = el("div", { class: "card curve", "data-metric": name }, el("h3", {}, button, name), readout, box, explained && el("p", { class: "muted" }, explained));
    element.draw = () => {
      const lines = all.map((m, i) => (m && m.series[name] ? { label: DF.runs[runs[i]].label, color: all.length > 1 ? runColor(runs[i]) : color("accent"), y: m.series[name], x: axis.x(m) } : null)).filter(Boolean);
      const last = lines.map((l) => [l, l.y.filter((v) => v !== null && v !== undefined).at(-1)]);
      const idle = last.map(([l, v]) => el("b", { style: { color: l.color } }, ` ${number(v)}`));
      replace(readout, idle);
      lineChart(box, lines, { xLabel: by, readout, idle, smoothing: Number(smoothing), xText: axis.text, log: log === "1" });
    };
    seen.observe(element);
    return element;
  };
  const pins = pinned().filter((n) => shown.includes(n));
  const groups = new Map(pins.length ? [["pinned", pins]] : []);
  for (const name of shown.filter((n) => !pins.includes(n))) {
    const group = GROUPS.find(([, prefixes]) => prefixes.some((p) => name.startsWith(p)));
    const title = group ? group[0] : "other";
    (groups.get(title) || groups.set(title, []).get(title)).push(name);
  }
  replace(root, [...groups].map(([title, members]) => el("details", { class: "group", open: true }, el("summary", {}, title, el("span", { class: "muted" }, ` ${members.length}`)), el("div", { class: "curves" }, members.map(card)))));
  if (!shown.length) replace(root, note(names.length ? `No metric matches “${search}”.` : "No metrics yet: the first step has not ended."));
}

const GROUPS = [["held-out", ["val/"]], ["reward", ["reward/", "advantage/", "sampling/"]], ["actor", ["actor/"]], ["critic", ["critic/"]], ["rollout", ["rollout/", "response_length/"]],
  ["environments", ["env/", "agent/"]], ["machine and data plane", ["perf/", "data/", "record/"]], ["time", ["timing_s/", "timing_max_s/"]]];

function byImportance(a, b) {
  const order = GROUPS.flatMap(([, prefixes]) => prefixes);
  const rank = (n) => { const i = order.findIndex((p) => n.startsWith(p)); return i < 0 ? order.length : i; };
  return rank(a) - rank(b) || a.localeCompare(b);
}
