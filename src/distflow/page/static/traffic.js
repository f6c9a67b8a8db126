"use strict";
// Traffic: who sent how much to whom, what stayed local, and how evenly tokens are dealt.

DF.views.traffic = {
  title: "Traffic",
  async render(root) {
    const run = currentRun();
    const [info, metrics] = await Promise.all([get("overview", { run }), get("metrics", { run })]);
    const number = chosenStep(info.steps_recorded);
    if (number === null) return replace(root, note("No spans were recorded: by an older version, or with `record.spans: false`."));
    const { traffic } = await get("step", { run, step: number });
    replace(root,
      stepBar(info.steps_recorded, number, (s) => change({ step: s })),
      el("section", { class: "columns" },
        el("div", { class: "card" }, el("h2", {}, "Who sent how much to whom"), matrix(traffic)),
        el("div", { class: "card" }, el("h2", {}, "Moved and local"), totals(traffic), el("h2", {}, "Over the steps"), overSteps(metrics))),
      el("section", { class: "card" }, el("h2", {}, "Tokens by worker"), tokensByWorker(traffic)));
  },
};

function matrix(traffic) {
  if (!traffic.matrix.flat().some((v) => v)) return note("No bytes between workers are recorded for this step.");
  const n = traffic.matrix.length;
  const most = Math.max(1, ...traffic.matrix.flat());
  const size = Math.max(6, Math.min(92, Math.floor(460 / n)));
  const name = (i) => (traffic.ranks_per_replica === 1 ? `rank ${i}` : `ranks ${i * traffic.ranks_per_replica}–${Math.min((i + 1) * traffic.ranks_per_replica, traffic.workers) - 1}`);
  const left = 66, top = 30;
  const height = top + n * size + 8;
  const every = Math.ceil(14 / size);
  const chart = canvas(height, (c, width) => {
    c.clearRect(0, 0, width, height);
    c.fillStyle = color("soft");
    c.fillText("to →", left, 11);
    c.fillText("from ↓", 8, top - 6);
    for (let i = 0; i < n; i++) {
      c.fillStyle = color("soft");
      if (i % every === 0) c.fillText(traffic.ranks_per_replica === 1 ? `rank ${i}` : String(i * traffic.ranks_per_replica), 8, top + i * size + size / 2 + 4);
      if (i % Math.ceil(26 / size) === 0) c.fillText(String(i * traffic.ranks_per_replica), left + i * size + 2, top - 6);
      for (let k = 0; k < n; k++) {
        const value = traffic.matrix[i][k];
        c.fillStyle = value ? tint(Math.sqrt(value / most)) : color("track");
        c.fillRect(left + k * size, top + i * size, size - 1, size - 1);
        if (value && size >= 54) {
          c.fillStyle = value > most / 4 ? "#fff" : color("ink");
          c.fillText(bytes(value), left + k * size + 7, top + i * size + size / 2 + 4);
        }
      }
    }
  }, "matrix of bytes from each worker to each other one");
  chart.addEventListener("mousemove", (e) => {
    const [i, k] = [Math.floor((e.offsetY - top) / size), Math.floor((e.offsetX - left) / size)];
    if (!(traffic.matrix[i] && traffic.matrix[i][k] !== undefined)) return tip(e);
    tip(e, el("b", {}, `${name(i)} → ${name(k)}`), ` ${bytes(traffic.matrix[i][k])}`);
  });
  chart.addEventListener("mouseleave", (e) => tip(e));
  return [el("div", {}, chart), !traffic.peers_known && note("To whom workers with many peers send is recorded in every 16th step only: choose such a step for the whole matrix."),
    el("div", { class: "muted hint" }, "What models exchange inside a node (gradients, tensor parallelism) is not in it.")];
}

function tint(share) {
  return `color-mix(in oklab, ${color("accent")} ${Math.round(12 + 88 * share)}%, ${color("card")})`;
}

function totals(traffic) {
  if (!traffic.local && !Object.values(traffic.sent_by_kind).some((v) => v)) return null;
  const rows = Object.entries(traffic.sent_by_kind).filter(([, v]) => v).map(([kind, v]) => [KIND_NAMES[kind] || kind, v, kindColor(kind)]);
  rows.push(["stayed local", traffic.local, color("good")]);
  const most = Math.max(1, ...rows.map((r) => r[1]));
  return el("div", { class: "bars" }, rows.map(([name, value, fill]) => el("div", { class: "bar" }, el("span", { class: "name" }, name),
    el("span", { class: "track" }, el("span", { class: "fill", style: { width: `${Math.max(0.6, 100 * value / most)}%`, background: fill } })), el("span", { class: "num" }, bytes(value)))));
}

function overSteps(metrics) {
  const names = [["data/bytes_sent", "sent, per worker"], ["data/bytes_local", "local, per worker"]].filter(([n]) => metrics.series[n]);
  if (!names.length) return note("No metrics of the data plane.");
  const box = el("div", { class: "chart" });
  const readout = el("div", { class: "muted hint" }, names.map(([, text], i) => el("span", { class: "key" }, el("span", { class: "swatch", style: { background: runColor(i) } }), text)));
  requestAnimationFrame(() => lineChart(box, names.map(([n, text], i) => ({ label: text, x: metrics.step, y: metrics.series[n], color: runColor(i) })), { xLabel: "step", height: 150, yText: bytes }));
  return [box, readout];
}

function tokensByWorker(traffic) {
  const nodes = Object.entries(traffic.tokens);
  if (!nodes.length) return note("No node of this step has counted tokens.");
  return nodes.map(([name, values]) => {
    const used = values.filter((v) => v > 0);
    const mean = used.reduce((a, b) => a + b, 0) / (used.length || 1);
    const most = Math.max(1, ...values);
    const spread = used.length ? (Math.max(...used) - Math.min(...used)) / mean : 0;
    const chart = canvas(58, (c, width) => {
      c.clearRect(0, 0, width, 58);
      const w = Math.min(90, (width - 8) / values.length);
      values.forEach((v, i) => {
        c.fillStyle = v > 1.15 * mean ? color("warn") : color("accent");
        c.fillRect(4 + i * w, 54 - 48 * v / most, Math.max(0.6, w - (w > 4 ? 2 : 0)), 48 * v / most);
      });
      c.strokeStyle = color("ink");
      c.setLineDash([4, 3]);
      c.beginPath();
      c.moveTo(4, 54 - 48 * mean / most);
      c.lineTo(4 + w * values.length, 54 - 48 * mean / most);
      c.stroke();
      c.setLineDash([]);
    }, `tokens of each worker in ${name}`);
    chart.addEventListener("mousemove", (e) => {
      const i = Math.floor((e.offsetX - 4) / Math.min(90, (chart.clientWidth - 8) / values.length));
      if (values[i] === undefined) return tip(e);
      tip(e, el("b", {}, `rank ${i}`), ` ${number(values[i])} tokens, ${percent(values[i] / (mean || 1))} of the mean`);
    });
    chart.addEventListener("mouseleave", (e) => tip(e));
    return el("div", { class: "tokens-by-worker" }, el("h3", {}, name, el("span", { class: "muted" }, ` ${number(Math.round(mean))} tokens on average, from least to most ${percent(spread)} apart`)), el("div", {}, chart));
  });
}
