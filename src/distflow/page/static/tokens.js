"use strict";
// The tokens of a sample, coloured by one of the numbers that were recorded for each.

const MEASURES = ["rollout_logprobs", "entropy", "advantage", "trainer_logprobs", "old_logprobs", "ref_logprobs", "old_values", "returns"];

/** Numbers per response token: all fields that are as long as the response. An advantage of the sample is each token's. */
function perToken(f) {
  const n = (f.response_tokens || []).length;
  const found = {};
  for (const [name, value] of Object.entries(f)) {
    if (Array.isArray(value) && value.length === n && n > 0 && name !== "response_tokens" && value.every((v) => v === null || typeof v === "number" || typeof v === "boolean")) found[name] = value.map((v) => (v === null ? null : Number(v)));
  }
  if (typeof f.advantage === "number" && n) found.advantage = new Array(n).fill(f.advantage);
  if (found.rollout_logprobs && found.trainer_logprobs) found["engine − trainer"] = found.rollout_logprobs.map((v, i) => (v === null || found.trainer_logprobs[i] === null ? null : v - found.trainer_logprobs[i]));
  return found;
}

function maskOf(f) {
  const mask = f.response_mask || f.mask || f.loss_mask;
  return Array.isArray(mask) ? mask.map(Boolean) : null;  // false: not sampled by the model, and not trained on
}

function tokenView(f) {
  if (!Array.isArray(f.response_tokens)) return note("The tokens of this sample were not recorded.");
  const measures = perToken(f);
  const names = Object.keys(measures).sort((a, b) => (MEASURES.indexOf(a) + 99) % 99 - (MEASURES.indexOf(b) + 99) % 99);
  const mask = maskOf(f);
  const box = el("div", { class: "tokens" });
  const strip = el("div", { class: "chart strip" });
  const select = el("select", { "aria-label": "colour tokens by" }, names.map((n) => el("option", { value: n }, n)));
  select.value = names.includes(place().params.measure) ? place().params.measure : names[0] || "";
  const draw = () => {
    const name = select.value;
    const values = measures[name] || [];
    const scale = tokenScale(name, values.filter((v, i) => v !== null && !(mask && !mask[i])));
    const token = (text, i) => {
      const masked = mask && mask[i] === false;
      const node = el("span", { class: `token${masked ? " masked" : ""}`, style: masked || values[i] === null || values[i] === undefined ? {} : { background: scale(values[i]) } }, shownToken(text));
      node.addEventListener("mousemove", (e) => tip(e, el("b", {}, JSON.stringify(text)), el("div", {}, `token ${i}${masked ? ", masked: not sampled, not trained on" : ""}`), names.map((n) => el("div", {}, `${n} ${number(measures[n][i])}`))));
      node.addEventListener("mouseleave", (e) => tip(e));
      return node;
    };
    replace(box, (f.prompt_tokens || []).map((t) => el("span", { class: "token masked", title: "prompt" }, shownToken(t))), f.response_tokens.map(token));
    replace(strip);
    const points = values.map((v, i) => [i, mask && !mask[i] ? null : v]);
    if (points.length > 1) requestAnimationFrame(() => strip.isConnected && lineChart(strip, [{ label: name, x: points.map((p) => p[0]), y: points.map((p) => p[1]), color: color("accent") }], { xLabel: "token", height: 110, xText: (v) => (Number.isInteger(v) ? String(v) : "") }));
  };
  select.addEventListener("change", () => { change({ measure: select.value }, true); draw(); });
  draw();
  return [names.length ? el("div", { class: "toolbar" }, el("label", {}, "colour by ", select), el("span", { class: "muted" }, mask ? "dimmed: prompt, and what the environment said" : "dimmed: the prompt")) : note("No numbers per token were recorded."), box, strip];
}

/** Low log-probs and high entropies are hot; advantages are green above zero and amber below. */
function tokenScale(name, values) {
  const most = Math.max(1e-9, ...values.map(Math.abs));
  const mix = (paint, share) => `color-mix(in oklab, ${color(paint)} ${Math.round(85 * Math.min(1, share))}%, transparent)`;
  if (/logprobs$/.test(name)) return (v) => mix("hot", Math.min(1, -v / Math.min(8, Math.max(2, most))));
  if (name === "entropy") return (v) => mix("hot", v / Math.max(0.5, most));
  return (v) => mix(v >= 0 ? "good" : "warn", Math.abs(v) / most);
}

function shownToken(text) {
  return String(text).replaceAll("\n", "⏎\n").replaceAll("\t", "⇥");
}
