"use strict";
// Overview: state, progress, warnings in words, the few numbers that matter, config and environment.

DF.views.overview = {
  title: "Overview",
  async render(root) {
    const run = currentRun();
    const [info, metrics] = await Promise.all([get("overview", { run }), get("metrics", { run })]);
    const step = info.steps_recorded.length ? await get("step", { run, step: info.steps_recorded.at(-1) }).catch(() => null) : null;
    replace(root,
      hero(info, metrics),
      info.error && el("section", { class: "card failed" }, el("h2", {}, "Why it ended"), el("pre", {}, info.error)),
      info.warnings.length > 0 && el("section", { class: "warnings" }, info.warnings.map((w) =>
        el("button", { type: "button", class: "warning", title: "see the curve", onclick: () => go("curves", { ...kept(), search: w.metric }) }, "⚠ ", w.text))),
      el("section", { class: "cards" }, info.headline.map((name) => headlineCard(name, metrics))),
      info.warned.length > 0 && warnedCard(info, metrics),
      step && step.nodes.length > 0 && glance(step, metrics),
      info.checkpoints.length > 0 && checkpointsCard(info),
      info.missing.map(note),
      el("section", { class: "columns" }, configCard(info), environmentCard(info)));
  },
};

function hero(info, metrics) {
  const total = info.steps;
  const share = total ? Math.min(1, (info.step ?? 0) / total) : null;
  const times = (metrics.series["timing_max_s/step"] || []).filter((v) => v);
  const recent = times.slice(-20);
  const each = recent.length ? recent.reduce((a, b) => a + b, 0) / recent.length : null;
  const clock = metrics.time.filter((t) => t);
  const started = Math.min(Date.parse((info.run || {}).started) / 1000 || Infinity, clock[0]);
  const elapsed = clock.length ? (clock.at(-1) - started) * 1e6 : null;
  const left = info.state === "running" && total && each ? (total - info.step) * each * 1e6 : null;
  return el("section", { class: "hero card" },
    el("div", {}, el("h1", {}, info.name), el("div", { class: "muted path" }, info.path)),
    el("div", { class: "facts" },
      fact("state", el("span", { class: `pill ${info.state}` }, info.state)),
      fact("step", info.step === null ? (info.state === "simulated" ? String(total) : "–") : total ? `${Math.max(0, info.step)} of ${total}` : String(info.step)),
      each && fact("per step", duration(each * 1e6)),
      elapsed !== null && fact("elapsed", duration(elapsed)),
      left !== null && fact("left", duration(left)),
      fact("workers", info.run.workers || info.workers || "–")),
    share !== null && info.state !== "simulated" && el("progress", { max: 1, value: share, "aria-label": "progress" }));
}

function fact(name, value) {
  return el("div", { class: "fact" }, el("div", { class: "name" }, name), el("div", { class: "value" }, value));
}

function headlineCard(name, metrics) {
  const values = metrics.series[name] || [];
  const known = values.filter((v) => v !== null && v !== undefined);
  const before = known.length > 1 ? known[0] : null;
  return el("button", { type: "button", class: "card metric", title: metrics.explain[name] || name, onclick: () => go("curves", { ...kept(), search: name }) },
    el("div", { class: "name" }, name),
    el("div", { class: "big" }, number(known.at(-1)), before !== null && el("span", { class: "from" }, `from ${number(before)}`)),
    sparkline(metrics.step, values));
}

function glance(step, metrics) {
  const logged = (metrics.series["timing_max_s/step"] || [])[metrics.step.indexOf(step.step)];  // of the same step, without what was held out
  const nodes = step.nodes.filter((n) => !n.held_out && n.kind !== "call").sort((a, b) => b.mean_us - a.mean_us);
  const total = nodes.reduce((sum, n) => sum + n.work_us + n.wait_us, 0) || 1;
  const parts = nodes.flatMap((n) => [[n.name, n.work_us, kindColor(n.kind), n], ["waiting", n.wait_us, kindColor("wait"), n]]).filter(([, us]) => us / total > 0.004);
  return el("section", { class: "card" },
    el("h2", {}, `Where a worker's time went in step ${step.step}`, el("span", { class: "muted" }, ` ${duration(logged ? logged * 1e6 : step.length)}`)),
    el("div", { class: "stack" }, parts.map(([name, us, fill, n]) => el("div", {
      class: name === "waiting" ? "part waits" : "part", style: { flexGrow: us / total, background: fill },
      onmousemove: (e) => tip(e, el("b", {}, name === "waiting" ? `waiting in ${n.name}` : name), ` ${duration(us)}, ${percent(us / total)}`), onmouseleave: (e) => tip(e),
    }, us / total > 0.09 ? `${name} ${percent(us / total)}` : ""))),
    el("button", { type: "button", class: "link", onclick: () => go("timeline", { ...kept(), step: step.step }) }, "see it on the timeline →"));
}

/** Which problems there were when: a row for each, over the steps of the run. */
function warnedCard(info, metrics) {
  const first = metrics.step[0], last = Math.max(first + 1, metrics.step.at(-1));
  const share = (step) => (100 * (step - first)) / (last - first);
  return el("section", { class: "card" }, el("h2", {}, "Warnings over the run", el("span", { class: "muted" }, ` steps ${first} to ${metrics.step.at(-1)}`)),
    info.warned.map((w) => el("button", { type: "button", class: "warned", title: w.text, onclick: () => go("curves", { ...kept(), search: w.metric }) },
      el("span", { class: "name" }, w.metric), el("span", { class: "track" }, w.ranges.map(([from, to]) => el("span", { class: "range", style: { left: `${share(from)}%`, width: `max(3px, ${share(to) - share(from)}%)` } }))), el("span", { class: "muted said" }, w.text))));
}

function checkpointsCard(info) {
  return el("section", { class: "card" }, el("h2", {}, "Checkpoints"), el("div", { class: "chips" },
    info.checkpoints.map((c) => el("span", { class: "chip", title: new Date(c.time * 1000).toLocaleString() }, `step ${c.step}, ${when(c.time)}`, c.best && el("b", {}, " best")))));
}

/** The config, with what is not a default; lines of the file that set such a key, or are in one, stand out. */
function configCard(info) {
  const lines = info.config.split("\n");
  const changed = info.changed && new Set(info.changed);
  const path = [];  // [indent, key] of the sections around a line
  const marked = lines.map((line) => {
    const key = /^( *)(?:- )?([\w.-]+):/.exec(line);
    const indent = /^ */.exec(line)[0].length;
    while (path.length && path.at(-1)[0] >= indent && (key || !/^ *- /.test(line) || path.at(-1)[0] > indent)) path.pop();
    if (key && !/^ *- /.test(line)) path.push([indent, key[2]]);
    const names = path.map((_, i) => path.slice(0, i + 1).map(([, k]) => k).join("."));
    return el("span", { class: changed && names.some((n) => changed.has(n)) ? "line set" : "line" }, `${line}\n`);
  });
  return el("div", { class: "card" }, el("h2", {}, "Config", changed && el("span", { class: "muted" }, " what is not a default stands out")),
    info.config ? el("pre", { class: changed ? "code differs" : "code" }, marked) : note("config.yaml is missing."));
}

function environmentCard(info) {
  const rows = Object.entries(info.versions).map(([name, version]) => [name, version]);
  const run = info.run;
  if (run.command) rows.push(["command", run.command.join(" ")]);
  if (run.started) rows.push(["started", run.started]);
  for (const [name, seed] of Object.entries(run.seeds || {})) rows.push([`seed of ${name}`, seed]);
  for (const host of run.hosts || []) rows.push([`host ${host.host}`, `ranks ${host.ranks}, ${host.device}`]);
  return el("div", { class: "card" }, el("h2", {}, "Environment"),
    rows.length ? el("table", { class: "plain" }, rows.map(([name, value]) => el("tr", {}, el("th", {}, name), el("td", {}, String(value))))) : info.state === "simulated" ? note("It ran nowhere: it was simulated.") : note("versions.json is missing."));
}
