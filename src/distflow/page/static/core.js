"use strict";
// What all views share: elements, numbers, colours, requests, and the place in the page (the part of the address after #).

const DF = { views: {}, runs: [], embedded: null, follow: false };

/** Makes an element. Text is always text: nothing that a run has recorded is ever read as HTML. */
function el(tag, attributes, ...children) {
  const svg = ["svg", "g", "path", "rect", "text", "line", "title", "circle"].includes(tag) && !(attributes || {}).html;
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false || name === "html") continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else if (name === "value") node.value = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(3).filter((c) => c !== null && c !== undefined && c !== false));
  return node;
}

function replace(node, ...children) {
  node.replaceChildren(...children.flat(3).filter((c) => c !== null && c !== undefined && c !== false));
  return node;
}

/** Asks the server, or the data in this file if it was exported. */
async function get(word, params = {}) {
  const query = new URLSearchParams(params).toString();
  const key = query ? `${word}?${query}` : word;
  if (DF.embedded) {
    if (key in DF.embedded) return DF.embedded[key];
    throw new Error("not in this file: open the run with `distflow show` to see it");
  }
  const response = await fetch(`api/${key}`);
  const value = await response.json();
  if (!response.ok) throw new Error(value.error || `HTTP ${response.status}`);
  return value;
}

// The place: view and parameters.

function place() {
  const [view, query] = location.hash.slice(1).split("?");
  return { view: DF.views[view] ? view : "overview", params: Object.fromEntries(new URLSearchParams(query || "")) };
}

function go(view, params = {}, quietly = false) {
  const query = new URLSearchParams(Object.entries(params).filter(([, v]) => v !== null && v !== undefined && v !== ""));
  const hash = `#${view}${[...query].length ? `?${query}` : ""}`;
  if (hash === location.hash) return;
  tip(null);  // of what is no longer there
  if (quietly) history.replaceState(null, "", hash);
  else location.hash = hash;
}

function change(params, quietly = false) {
  const here = place();
  go(here.view, { ...here.params, ...params }, quietly);
}

function currentRun() {
  return Math.min(Number(place().params.run || 0) || 0, DF.runs.length - 1);
}

const MOST_COMPARED = 6;  // without a choice

/** The runs whose curves lie over each other: those that were chosen, else all if they are few. */
function compared() {
  const wanted = place().params.compare;
  if (wanted !== undefined) return wanted.split(".").map(Number).filter((i) => DF.runs[i]);
  return DF.runs.length > MOST_COMPARED ? [currentRun()] : DF.runs.map((_, i) => i);
}

function chooseCompared(runs) {
  change({ compare: runs.length ? [...new Set(runs)].sort((a, b) => a - b).join(".") : String(currentRun()) });
}

/** The parameters that all views share. */
function kept() {
  const { run, compare: runs } = place().params;
  return { run, compare: runs };
}

// Numbers in words.

function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (value !== 0 && size < 0.001) return value.toExponential(1);
  if (Number.isInteger(value) && size < 1e6) return value.toLocaleString("en");
  if (size >= 1e6) return `${(value / 1e6).toPrecision(3)} M`;
  return size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
}

function bytes(value) {
  for (const unit of ["B", "KiB", "MiB", "GiB", "TiB"]) {
    if (value < 1024 || unit === "TiB") return `${value < 10 && unit !== "B" ? value.toFixed(1) : Math.round(value)} ${unit}`;
    value /= 1024;
  }
  return "";
}

const UNITS = [["µs", 1], ["ms", 1e3], ["s", 1e6], ["min", 60e6], ["h", 3600e6], ["days", 86400e6]];

/** A duration in the unit in which it, or the `scale` that it is on, is a number of two or three digits. */
function duration(us, scale = us) {
  const limits = [1000, 1e6, 120e6, 7200e6, 172800e6, Infinity];
  const [unit, size] = UNITS[limits.findIndex((limit) => scale < limit)];
  return `${Number((us / size).toPrecision(us < 120e6 && scale === us ? 3 : 4)).toLocaleString("en", { maximumFractionDigits: us === scale && us >= 120e6 ? 1 : 3 })} ${unit}`;
}

/** A moment: the time of day, with the date unless it is today. */
function when(seconds) {
  const date = new Date(seconds * 1000);
  const time = date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
  return date.toDateString() === new Date().toDateString() ? time : `${date.toLocaleDateString([], { month: "short", day: "numeric" })} ${time}`;
}

function percent(share) {
  return `${Math.round(100 * share)} %`;
}

// Colours, from the style sheet, so that canvas and page agree in the light and in the dark.

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

const KIND_NAMES = {
  inference: "inference", train: "training", compute: "compute", load: "load", move: "move", weights: "weights",
  resample: "resample", control: "metrics, stop vote", checkpoint: "checkpoint", call: "part of a node", wait: "waiting",
};

function kindColor(kind) {
  return color(`kind-${KIND_NAMES[kind] ? kind : "compute"}`);
}

// A tooltip, for canvas as for elements.

function tip(event, ...content) {
  const box = document.getElementById("tip");
  if (!content.length) {
    box.hidden = true;
    return;
  }
  replace(box, content);
  box.hidden = false;
  const { width, height } = box.getBoundingClientRect();
  box.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
  box.style.top = `${event.clientY + 18 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 18}px`;
}

/** A canvas that fills the width of its parent, sharp on any screen; `draw(context, width, height)` paints it. */
function canvas(height, draw, label) {
  const node = el("canvas", { role: "img", "aria-label": label, tabindex: "0" });
  let size = height;
  node.redraw = (newHeight) => {
    size = newHeight || size;
    const width = node.parentElement ? node.parentElement.clientWidth : 0;
    if (!width) return;
    const scale = devicePixelRatio || 1;
    node.width = Math.round(width * scale);
    node.height = Math.round(size * scale);
    node.style.width = `${width}px`;
    node.style.height = `${size}px`;
    const context = node.getContext("2d");
    context.scale(scale, scale);
    context.font = "11px system-ui, sans-serif";
    draw(context, width, size);
  };
  let seen = false;
  const watch = new ResizeObserver(() => {
    if (seen && !node.isConnected) watch.disconnect();
    seen = seen || node.isConnected;
    node.redraw();
  });
  watch.observe(document.getElementById("view"));
  requestAnimationFrame(() => node.redraw());
  return node;
}

/** The choice of a step that several views share: a slider over the recorded steps, and keys ← →. */
function stepBar(steps, step, onChange) {
  if (!steps.length) return el("div", { class: "stepbar muted" }, "No step has been recorded.");
  const at = Math.max(0, steps.indexOf(step));
  const slider = el("input", { type: "range", min: 0, max: steps.length - 1, value: at, "aria-label": "step" });
  const label = el("output", {}, `step ${steps[at]}`);
  const move = (to) => onChange(steps[Math.max(0, Math.min(steps.length - 1, to))]);
  slider.addEventListener("input", () => { label.textContent = `step ${steps[slider.value]}`; });
  slider.addEventListener("change", () => move(Number(slider.value)));
  DF.stepBy = (by) => move(at + by);
  return el("div", { class: "stepbar" },
    el("button", { type: "button", title: "previous step (←)", onclick: () => move(at - 1), disabled: at === 0 }, "‹"),
    slider,
    el("button", { type: "button", title: "next step (→)", onclick: () => move(at + 1), disabled: at === steps.length - 1 }, "›"),
    label, el("span", { class: "muted" }, `of ${steps[steps.length - 1]}`));
}

/** The step to show: the one in the address, or the last whole one. */
function chosenStep(steps) {
  const wanted = place().params.step;
  if (wanted !== undefined && steps.includes(Number(wanted))) return Number(wanted);
  return steps.length ? steps[steps.length - 1] : null;
}

function note(text) {
  return el("div", { class: "note" }, text);
}
