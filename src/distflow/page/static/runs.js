"use strict";
// Runs: a list of all that the page was given, which of them are compared, and how these differ.

DF.views.runs = {
  title: "Runs",
  async render(root) {
    const chosen = compared();
    const [{ runs }, configs, all] = await Promise.all([get("list"),
      Promise.all(chosen.map((i) => get("config", { run: i }).catch(() => ({})))), Promise.all(chosen.map((i) => get("metrics", { run: i }).catch(() => null)))]);
    replace(root,
      el("section", { class: "card scroll" }, runsTable(runs, chosen)),
      chosen.length > 1 && el("section", { class: "card scroll" }, el("h2", {}, "What differs"), difference(chosen, configs)),
      chosen.length > 1 && el("section", { class: "card scroll" }, el("h2", {}, "Last values"), lastValues(chosen, all)));
  },
};

function runsTable(runs, chosen) {
  const toggle = (i, on) => chooseCompared(on ? [...chosen, i] : chosen.filter((k) => k !== i));
  const head = ["compare", "run", "state", "step", "score", "workers", "started", "last heard of", "continue with"];
  return el("table", { class: "grid runs" }, el("thead", {}, el("tr", {}, head.map((h) => el("th", {}, h)))),
    el("tbody", {}, runs.map((r, i) => el("tr", { "data-run": i },
      el("td", {}, el("input", { type: "checkbox", "aria-label": `compare ${r.path}`, checked: chosen.includes(i), onchange: (e) => toggle(i, e.target.checked) }), chosen.includes(i) && el("span", { class: "swatch", style: { background: runColor(i) } })),
      el("td", {}, el("button", { type: "button", class: "link row-link", title: r.path, onclick: () => go("overview", { ...kept(), run: i }) }, DF.runs[i].label), r.flow && el("span", { class: "muted" }, ` ${r.flow}`)),
      el("td", {}, el("span", { class: `pill ${r.state}` }, r.state)),
      el("td", {}, r.step === null ? "–" : r.steps ? `${r.step} of ${r.steps}` : String(r.step)),
      el("td", {}, r.score), el("td", {}, number(r.workers)), el("td", {}, r.started ? when(Date.parse(r.started) / 1000) : "–"), el("td", {}, r.last ? when(r.last) : "–"),
      el("td", { class: "wraps" }, el("code", {}, r.continue))))));
}

/** The keys of the configs that are not the same in all of these runs. */
function difference(chosen, configs) {
  const known = configs.filter((c) => Object.keys(c).length);  // a simulated step has none
  const value = (config, key) => (config[key] === "null" ? undefined : config[key]);
  const keys = [...new Set(known.flatMap(Object.keys))].filter((key) => key !== "run_dir" && new Set(known.map((c) => value(c, key))).size > 1);
  if (!keys.length) return note("Their configs are the same.");
  return el("table", { class: "grid" }, el("thead", {}, el("tr", {}, el("th", {}, "key"), chosen.map(runHead))),
    el("tbody", {}, keys.sort().map((key) => el("tr", {}, el("td", {}, key), configs.map((c) => el("td", { class: "wraps" }, value(c, key) === undefined ? el("span", { class: "muted" }, "not set") : c[key]))))));
}

function lastValues(chosen, all) {
  const names = [...new Set(all.flatMap((m) => (m ? Object.keys(m.series) : [])))].filter((n) => /^(val\/|reward\/mean|actor\/(kl|entropy)|response_length\/mean|perf\/tokens_per_s|timing_max_s\/step)/.test(n)).sort(byImportance);
  const last = (m, name) => (m && m.series[name] ? m.series[name].filter((v) => v !== null && v !== undefined).at(-1) : null);
  return el("table", { class: "grid" }, el("thead", {}, el("tr", {}, el("th", {}, "metric"), chosen.map(runHead))),
    el("tbody", {}, names.map((name) => el("tr", {}, el("td", {}, el("button", { type: "button", class: "link row-link", onclick: () => go("curves", { ...kept(), search: name }) }, name)), all.map((m) => el("td", {}, number(last(m, name))))))));
}

function runHead(i) {
  return el("th", {}, el("span", { class: "dot", style: { background: runColor(i) } }), DF.runs[i].label);
}
