"use strict";
// Samples: a table with filters, and one sample as a conversation, as tokens, and against other steps.

const ROW = 30;
const COLUMNS = [["step", "step"], ["split", "split"], ["source", "source"], ["score", "reward"], ["advantage", "advantage"], ["length", "tokens"], ["prompt", "prompt"], ["response", "response"]];
const NUMERIC = ["step", "score", "advantage", "length"];

DF.views.samples = {
  title: "Samples",
  async render(root, again) {
    const run = currentRun();
    const data = await get("samples", { run });
    const table = new SampleTable(data, run);
    if (!data.step.length) return replace(root, note("No samples were recorded: by an older version, with `record.samples: 0`, or by a flow without any."));
    if (again && DF.table) { table.top = DF.table.body.scrollTop; }
    DF.table = table;
    replace(root, table.filters(), el("div", { class: "samples" }, table.element(), table.pane));
    table.apply();
  },
};

class SampleTable {
  constructor(data, run) {
    this.data = data;
    this.run = run;
    this.rows = data.step.map((_, i) => i);
    this.columns = COLUMNS.filter(([key]) => key !== "source" || data.source.some((s) => s !== null));
    this.pane = el("section", { class: "card pane", "aria-label": "sample" }, note("Choose a sample: click, or j and k."));
    this.top = 0;
  }

  filters() {
    const p = place().params;
    const set = debounce(() => this.apply(), 120);
    const field = (name, attributes) => {
      const input = el("input", { "data-filter": name, value: p[name] || "", ...attributes });
      input.addEventListener("input", () => { change({ [name]: input.value, sample: null }, true); set(); });
      return input;
    };
    const choice = (name, values, all) => {
      const select = el("select", { "data-filter": name, "aria-label": name, onchange: (e) => { change({ [name]: e.target.value, sample: null }, true); this.apply(); } }, el("option", { value: "" }, all), values.map((v) => el("option", { value: v }, v)));
      select.value = p[name] || "";
      return select;
    };
    const sources = [...new Set(this.data.source.filter((s) => s !== null))].map(String);
    const zero = el("input", { type: "checkbox", "data-filter": "zero", checked: p.zero === "1", onchange: (e) => { change({ zero: e.target.checked ? "1" : null, sample: null }, true); this.apply(); } });
    this.count = el("span", { class: "muted" });
    return el("div", { class: "toolbar" },
      field("search", { type: "search", id: "search", placeholder: "search text (/)", "aria-label": "search text" }),
      choice("split", [...new Set(this.data.split)], "train and held-out"),
      sources.length > 0 && choice("source", sources, "all sources"),
      el("label", {}, "step ", field("from", { type: "number", class: "short", "aria-label": "from step" }), "–", field("to", { type: "number", class: "short", "aria-label": "to step" })),
      el("label", {}, "reward ", field("least", { type: "number", step: "any", class: "short", "aria-label": "least reward" }), "–", field("most", { type: "number", step: "any", class: "short", "aria-label": "most reward" })),
      el("label", {}, zero, " groups that taught nothing ", el("span", { class: "nothing" }, "∅"), el("span", { class: "muted" }, " all responses have the same reward")), this.count);
  }

  element() {
    this.head = el("div", { class: "row head", role: "row" }, this.columns.map(([key, text]) => el("button", { type: "button", class: `cell ${key}`, role: "columnheader", "data-column": key, onclick: () => this.sortBy(key) }, text)));
    this.space = el("div", { class: "space" });
    this.body = el("div", { class: "body", tabindex: "0", role: "table", "aria-label": "samples; j and k move" }, this.space);
    this.body.addEventListener("scroll", () => this.paint(), { passive: true });
    new ResizeObserver(() => this.paint()).observe(this.body);
    return el("section", { class: `card table${this.columns.length === COLUMNS.length ? " sourced" : ""}` }, this.head, this.body);
  }

  sortBy(key) {
    const p = place().params;
    change({ sort: key, down: p.sort === key ? (p.down === "1" ? "0" : "1") : NUMERIC.includes(key) ? "1" : "0" }, true);
    this.apply();
  }

  apply() {
    const d = this.data;
    const p = place().params;
    const text = (p.search || "").toLowerCase();
    const limit = (name, fallback) => (p[name] === undefined || p[name] === "" ? fallback : Number(p[name]));
    const [from, to, least, most] = [limit("from", -Infinity), limit("to", Infinity), limit("least", -Infinity), limit("most", Infinity)];
    const scored = least !== -Infinity || most !== Infinity;
    this.rows = d.step.map((_, i) => i).filter((i) => d.step[i] >= from && d.step[i] <= to && (!p.split || d.split[i] === p.split) && (!p.source || String(d.source[i]) === p.source)
      && (!scored || (d.score[i] !== null && d.score[i] >= least && d.score[i] <= most)) && (p.zero !== "1" || d.zero[i])
      && (!text || `${d.prompt[i]} ${d.response[i]}`.toLowerCase().includes(text)));
    const key = p.sort || "step";
    const down = (p.sort ? p.down : "1") === "1" ? -1 : 1;
    const values = d[key] || d.step;
    this.rows.sort((a, b) => {
      const [x, y] = [values[a], values[b]];
      if (x === y) return d.step[b] - d.step[a] || d.id[a] - d.id[b];
      if (x === null) return 1;
      if (y === null) return -1;
      return (x < y ? -1 : 1) * down;
    });
    for (const cell of this.head.children) cell.setAttribute("aria-sort", cell.dataset.column === key ? (down < 0 ? "descending" : "ascending") : "none");
    this.count.textContent = `${number(this.rows.length)} of ${number(d.count)} samples`;
    const top = this.top;
    this.top = 0;
    requestAnimationFrame(() => { this.body.scrollTop = top; });
    this.paint();
    const chosen = p.sample ? this.rows.findIndex((i) => this.key(i) === p.sample) : -1;
    if (chosen >= 0) this.open(this.rows[chosen]);
    else if (this.rows.length) this.open(this.rows[0], true);
    else replace(this.pane, note("No sample matches the filter."));
  }

  key(i) {
    return `${this.data.step[i]}.${this.data.split[i]}.${this.data.id[i]}`;
  }

  paint() {
    const d = this.data;
    this.space.style.height = `${this.rows.length * ROW}px`;
    const first = Math.max(0, Math.floor(this.body.scrollTop / ROW) - 5);
    const last = Math.min(this.rows.length, first + Math.ceil(this.body.clientHeight / ROW) + 10);
    replace(this.space, this.rows.slice(first, last).map((i, k) => el("div", {
      class: `row${i === this.chosen ? " chosen" : ""}${d.zero[i] ? " zero" : ""}`, role: "row", style: { top: `${(first + k) * ROW}px` }, "data-sample": this.key(i),
      title: d.zero[i] ? "all responses of this group have the same reward: it taught nothing" : null, onclick: () => this.open(i),
    }, this.columns.map(([key]) => el("span", { class: `cell ${key}`, role: "cell" }, key === "score" ? score(d.score[i]) : NUMERIC.includes(key) ? number(d[key][i]) : String(d[key][i] ?? ""))))));
  }

  move(by) {
    const at = this.rows.indexOf(this.chosen);
    const next = this.rows[Math.max(0, Math.min(this.rows.length - 1, at + by))];
    if (next === undefined) return;
    const y = this.rows.indexOf(next) * ROW;
    if (y < this.body.scrollTop) this.body.scrollTop = y;
    if (y + ROW > this.body.scrollTop + this.body.clientHeight) this.body.scrollTop = y + ROW - this.body.clientHeight;
    this.open(next);
  }

  async open(i, quietly) {
    this.chosen = i;
    this.paint();
    const d = this.data;
    if (!quietly) change({ sample: this.key(i) }, true);
    const asked = this.key(i);
    try {
      const sample = await get("sample", { run: this.run, step: d.step[i], split: d.split[i], id: d.id[i] });
      if (asked === this.key(this.chosen)) showSample(this.pane, sample, this);
    } catch (e) {
      replace(this.pane, el("h2", {}, `step ${d.step[i]}, sample ${d.id[i]}`), el("div", { class: "message assistant" }, String(d.response[i] ?? "")), note(e.message));
    }
  }

  /** Samples of the same prompt in other steps, and the others of its group. */
  related(sample) {
    const d = this.data;
    const at = d.step.findIndex((s, i) => s === sample.step && d.id[i] === sample.id && d.split[i] === sample.split);
    const same = d.step.map((_, i) => i).filter((i) => d.prompt[i] !== null && d.prompt[i] === d.prompt[at] && d.split[i] === sample.split);
    return { group: same.filter((i) => d.step[i] === sample.step), across: same.sort((a, b) => d.step[a] - d.step[b] || d.id[a] - d.id[b]) };
  }
}

function score(value) {
  if (value === null || value === undefined) return "–";
  return el("span", { class: `badge ${value > 0 ? "up" : value < 0 ? "down" : "none"}` }, number(value));
}

function showSample(pane, sample, table) {
  const f = sample.fields;
  const views = { conversation: () => conversation(f), tokens: () => tokenView(f), "this prompt": () => compare(sample, table), fields: () => fieldTable(f) };
  const wanted = place().params.show;
  const shown = views[wanted] ? wanted : "conversation";
  const body = el("div", { class: "pane-body" }, views[shown]());
  const tabs = el("div", { class: "subtabs", role: "tablist" }, Object.keys(views).map((name) => el("button", { type: "button", role: "tab", "aria-selected": String(name === shown), "data-show": name, onclick: () => { change({ show: name }, true); showSample(pane, sample, table); } }, name)));
  const facts = [["reward", f.score ?? f.env_reward], ["advantage", Array.isArray(f.advantage) ? null : f.advantage], ["tokens", (f.response_tokens || []).length || null], ["turns", Array.isArray(f.conversation) ? f.conversation.filter((m) => m?.role === "assistant").length : null], ["sampled", Array.isArray(f.response_mask) ? f.response_mask.filter(Boolean).length : null], ["finished", f.finished], ["kept", f.keep]].filter(([, v]) => v !== undefined && v !== null);
  replace(pane, el("h2", {}, `step ${sample.step} · sample ${sample.id}`, el("span", { class: "muted" }, ` ${[sample.split, `prompt ${sample.group}`, f.environment_name].filter(Boolean).join(", ")}`)),
    el("div", { class: "chips" }, facts.map(([name, v]) => el("span", { class: "chip" }, `${name} `, el("b", {}, typeof v === "boolean" ? (v ? "yes" : "no") : number(v)))),
      f.finished === false && el("span", { class: "chip warn" }, "cut off")),
    tabs, body);
}

function conversation(f) {
  if (Array.isArray(f.histories) && f.histories.length) return histories(f);
  const given = [f.conversation, f.messages].find(Array.isArray);
  const messages = given || [...(Array.isArray(f.prompt) ? f.prompt : f.prompt === undefined ? [] : [{ role: "prompt", content: f.prompt }]), ...(f.response === undefined ? [] : [{ role: "assistant", content: f.response }])];
  const answer = f.answer ?? f.ground_truth ?? f.solution ?? f.label ?? (f.reward_model && f.reward_model.ground_truth);
  const pictures = picturesOf(f);
  return [messages.map((m) => message(m, pictures)), answer !== undefined && answer !== null && el("div", { class: "message answer" }, el("div", { class: "role" }, "right answer"), el("div", { class: "text" }, asText(answer)))];
}

function histories(f) {
  const parents = [0, ...(f.response_branches || []).map((b) => b[1])];
  const depths = [], shown = picturesOf(f);
  return f.histories.map((messages, k) => {
    const parent = k ? f.histories[parents[k]] || [] : [];
    let shared = 0;
    while (shared < Math.min(messages.length, parent.length) && same(messages[shared], parent[shared])) shared++;
    depths.push(shared ? depths[parents[k]] + 1 : 0);
    const from = k === 0 ? "" : shared ? ` goes on from history ${parents[k] + 1} after ${shared} message${shared > 1 ? "s" : ""}` : " begins anew";
    return el("section", { class: `history depth${depths[k]}`, style: { marginLeft: `${18 * Math.min(depths[k], 4)}px` } }, el("h3", {}, `history ${k + 1}`, el("span", { class: "muted" }, from)), messages.slice(shared).map((m) => message(m, shown)));
  });
}

function same(one, other) {
  const said = (m) => JSON.stringify([m.role, m.content, m.tool_calls]);
  return said(one) === said(other);
}

/** The images of a sample, in the order in which its messages refer to them. */
function picturesOf(f) {
  return pictures([...(f.prompt_images || f.images || []), ...(f.response_images || [])]);
}

function pictures(urls) {
  return (Array.isArray(urls) ? urls : []).filter((url) => typeof url === "string" && url.startsWith("data:image/")).map((url) => el("img", { class: "picture", src: url, alt: "image of the sample" }));
}

function content(value, pictures) {
  const parts = Array.isArray(value) && value.every((part) => part && typeof part.type === "string") ? value : [{ type: "text", text: asText(value) }];
  return parts.map((part) => (part.type === "image" ? pictures.shift() || el("span", { class: "muted" }, "[image]") : part.text));
}

function message(m, pictures = []) {
  const calls = Array.isArray(m.tool_calls) ? m.tool_calls : [];
  const facts = [typeof m.tokens === "number" && `${number(m.tokens)} tokens`, m.cut && "cut off", typeof m.reward === "number" && `reward ${number(m.reward)}`].filter(Boolean);
  return el("div", { class: `message ${["system", "user", "assistant", "tool", "prompt"].includes(m.role) ? m.role : "user"}` },
    el("div", { class: "role" }, [m.role, m.name].filter(Boolean).join(" · "), el("span", { class: "muted facts" }, facts.join(", "))),
    m.content !== undefined && m.content !== null && m.content !== "" && el("div", { class: "text" }, content(m.content, pictures)),
    calls.map((call) => { const fn = call.function || call; return el("div", { class: "toolcall" }, el("b", {}, `${fn.name || "tool"}(`), el("code", {}, asText(fn.arguments ?? fn.parameters ?? "")), el("b", {}, ")")); }));
}

function asText(value) {
  return typeof value === "string" ? value : JSON.stringify(value, null, 1);
}

function compare(sample, table) {
  const { group, across } = table.related(sample);
  const d = table.data;
  const row = (i) => el("button", { type: "button", class: `answer-row${d.step[i] === sample.step && d.id[i] === sample.id ? " chosen" : ""}`, onclick: () => table.open(i) }, el("span", { class: "when" }, `step ${d.step[i]}`), score(d.score[i]), el("span", { class: "said" }, String(d.response[i] ?? "")));
  const others = across.filter((i) => d.step[i] !== sample.step);
  return [el("h3", {}, `All ${group.length} recorded responses of this group`), group.map(row), el("h3", {}, "The same prompt in other steps"), others.length ? others.slice(-200).map(row) : note("This prompt was recorded in this step only.")];
}

function fieldTable(f) {
  return el("table", { class: "plain" }, Object.entries(f).map(([name, value]) => el("tr", {}, el("th", {}, name), el("td", {}, name === "images" || name.endsWith("_images") ? pictures(value) : asText(value).slice(0, 4000)))));
}
