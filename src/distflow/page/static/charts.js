"use strict";
// Curves by uPlot: small ones without axes, and large ones of several runs over each other.

const RUN_COLORS = ["run-0", "run-1", "run-2", "run-3", "run-4", "run-5"];

function runColor(i) {
  return color(RUN_COLORS[i % RUN_COLORS.length]);
}

/** An exponential moving average that steps over gaps. */
function smooth(values, strength) {
  if (!strength) return values;
  let mean = null;
  let weight = 0;
  return values.map((v) => {
    if (v === null || v === undefined) return null;
    mean = mean === null ? v * (1 - strength) : mean * strength + v * (1 - strength);
    weight = weight * strength + (1 - strength);
    return mean / weight;
  });
}

/** The top of a scale on which one slow step, mostly the first, does not flatten all others. */
function robustTop(values) {
  if (values.length < 20) return Math.max(...values);
  const sorted = [...values].sort((a, b) => a - b);
  const most = sorted.at(-1), usual = sorted[Math.floor(0.95 * (sorted.length - 1))];
  return usual > 0 && most > 3 * usual ? 1.5 * usual : most;
}

function sparkline(steps, values, height = 44) {
  const points = steps.map((s, i) => [s, values[i]]).filter(([, v]) => v !== null && v !== undefined);
  const box = el("div", { class: "spark" });
  requestAnimationFrame(() => {
    if (!box.clientWidth || points.length < 2) return;
    const data = [points.map((p) => p[0]), points.map((p) => p[1])];
    const top = robustTop(data[1]);
    new uPlot({
      width: box.clientWidth, height, legend: { show: false }, cursor: { show: false }, select: { show: false },
      padding: [4, 2, 4, 2], scales: { x: { time: false }, y: { range: (u, least, most) => (most > top ? [least, top] : uPlot.rangeNum(least, most, 0.1, true)) } }, axes: [{ show: false }, { show: false }],
      series: [{}, { stroke: color("accent"), width: 1.6, fill: color("accent-soft"), points: { show: false } }],
    }, data, box);
  });
  return box;
}

/** A flat line is in the middle, not at the edge of a scale that has nothing to do with it. */
function yRange(plot, least, most) {
  if (least === null || most === null) return [0, 1];
  if (least === most) return least === 0 ? [-1, 1] : [least - Math.abs(least) / 2, most + Math.abs(most) / 2];
  return uPlot.rangeNum(least, most, 0.08, true);
}

/** The labels of ticks: one that would say the same as the tick before it is left out. */
function labels(ticks, text) {
  let before = null;
  return ticks.map((tick) => {
    const own = tick === null ? "" : text(tick);
    if (own === before) return "";
    before = own;
    return own;
  });
}

/** One metric of several runs. `lines`: [{label, x, y, color}]. */
function lineChart(box, lines, options) {
  const height = options.height || 190;
  const xs = [...new Set(lines.flatMap((l) => l.x))].sort((a, b) => a - b);
  const at = new Map(xs.map((x, i) => [x, i]));
  const data = [xs];
  const series = [{ label: options.xLabel }];
  for (const line of lines) {
    const column = (values) => {
      const out = new Array(xs.length).fill(null);
      line.x.forEach((x, i) => { if (values[i] !== null && values[i] !== undefined && (!options.log || values[i] > 0)) out[at.get(x)] = values[i]; });
      return out;
    };
    const sparse = line.y.filter((v) => v !== null && v !== undefined).length < 40;
    if (options.smoothing) {
      data.push(column(line.y));
      series.push({ stroke: line.color + "44", width: 1, spanGaps: true, points: { show: false } });
    }
    data.push(column(smooth(line.y, options.smoothing)));
    series.push({ label: line.label, stroke: line.color, width: 1.8, spanGaps: true, points: { show: sparse, size: 4 } });
  }
  const axis = { stroke: color("soft"), grid: { stroke: color("grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  const plot = new uPlot({
    width: Math.max(120, box.clientWidth), height, legend: { show: false },
    padding: [8, 10, 0, 0],
    cursor: { sync: { key: "curves" }, points: { size: 5 }, drag: { x: true, y: false } },
    scales: { x: { time: false }, y: options.log ? { distr: 3 } : { range: yRange } },
    axes: [{ ...axis, size: 26, values: (u, ticks) => labels(ticks, options.xText || number) }, { ...axis, size: 52, values: (u, ticks) => labels(ticks, options.yText || number) }],
    series,
    hooks: {
      setCursor: [(u) => {
        const i = u.cursor.idx;
        const step = options.smoothing ? 2 : 1;
        const shown = i === null || i === undefined ? [] : lines.map((l, k) => [l, u.data[(k + 1) * step][i]]).filter(([, v]) => v !== null && v !== undefined);
        options.readout && replace(options.readout, shown.length ? [`${options.xText ? options.xText(xs[i]) : xs[i]}: `,
          shown.map(([l, v]) => el("b", { style: { color: l.color } }, ` ${number(v)}`))] : options.idle || "");
      }],
    },
  }, data, box);
  new ResizeObserver(() => box.clientWidth && plot.setSize({ width: box.clientWidth, height })).observe(box);
  return plot;
}
