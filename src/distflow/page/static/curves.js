"use strict";
// Curves: every metric of one run or of several over each other, by step or by time, searched and smoothed.

const HIDDEN_AT_FIRST = ["timing_max_s/"];

DF.views.curves = {
  title: "Curves",
  async render(root) {
    const all = await Promise.all(DF.runs.map((_, i) => get("metrics", { run: i }).catch(() => null)));
    const { search = "", by = "step", smoothing = "0" } = place().params;
    const grid = el("div", { class: "curves" });
    const count = el("span", { class: "muted" });
    const draw = () => drawCurves(grid, count, all);
    const input = el("input", { type: "search", id: "search", placeholder: "search metrics (/)", value: search, "aria-label": "search metrics" });
    const later = debounce(() => { change({ search: input.value }, true); draw(); }, 150);
    input.addEventListener("input", later);
    const slider = el("input", { type: "range", min: 0, max: 0.98, step: 0.01, value: smoothing, "aria-label": "smoothing", onchange: (e) => { change({ smoothing: e.target.value }, true); draw(); } });
    const axis = el("select", { "aria-label": "x axis", onchange: (e) => { change({ by: e.target.value }, true); draw(); } }, el("option", { value: "step" }, "by step"), el("option", { value: "time" }, "by time"));
    axis.value = by;
    replace(root, el("div", { class: "toolbar" }, input, axis, el("label", {}, "smoothing ", slider), count,
      DF.runs.length > 1 && el("div", { class: "legend" }, DF.runs.map((r, i) => el("span", { class: "key" }, el("span", { class: "swatch", style: { background: runColor(i) } }), r.label)))), grid);
    draw();
  },
};

function debounce(act, ms) {
  let timer = 0;
  return () => { clearTimeout(timer); timer = setTimeout(act, ms); };
}

function drawCurves(grid, count, all) {
  const { search = "", by = "step", smoothing = "0" } = place().params;
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
  replace(grid, shown.map((name) => {
    const box = el("div", { class: "chart" });
    const explained = all.map((m) => m && m.explain[name]).find(Boolean);
    const readout = el("div", { class: "readout" });
    const card = el("div", { class: "card curve", "data-metric": name }, el("h3", {}, name), readout, box, explained && el("p", { class: "muted" }, explained));
    card.draw = () => {
      const lines = all.map((m, i) => (m && m.series[name] ? { label: DF.runs[i].label, color: all.length > 1 ? runColor(i) : color("accent"), y: m.series[name],
        x: by === "time" ? m.time.map((t) => (t - m.time[0]) / 60) : m.step } : null)).filter(Boolean);
      const last = lines.map((l) => [l, l.y.filter((v) => v !== null && v !== undefined).at(-1)]);
      const idle = last.map(([l, v]) => el("b", { style: { color: l.color } }, ` ${number(v)}`));
      replace(readout, idle);
      lineChart(box, lines, { xLabel: by, readout, idle, smoothing: Number(smoothing), xText: by === "time" ? (v) => `${number(v)} min` : null });
    };
    seen.observe(card);
    return card;
  }));
  if (!shown.length) replace(grid, note(names.length ? `No metric matches “${search}”.` : "No metrics yet: the first step has not ended."));
}

function byImportance(a, b) {
  const order = ["val/", "reward/", "actor/", "critic/", "rollout/", "response_length/", "advantage/", "sampling/", "perf/", "data/", "timing_s/", "timing_max_s/"];
  const rank = (n) => { const i = order.findIndex((p) => n.startsWith(p)); return i < 0 ? 2.5 : i; };
  return rank(a) - rank(b) || a.localeCompare(b);
}
