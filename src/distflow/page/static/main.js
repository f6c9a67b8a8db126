"use strict";
// Starts the page: runs, tabs, keys, and following a run that goes on.

const VIEWS = ["overview", "plan", "timeline", "traffic", "curves", "samples", "runs"];
const POLL_MS = 2000;
const KEYS = [["1 – 7", "views"], ["← →", "previous and next step"], ["j k", "next and previous sample"], ["t", "conversation or tokens"], ["/", "search"], ["f", "follow the run"], ["+ − 0", "zoom the timeline (also with ← → and shift)"], ["?", "these keys"]];

async function show(again = false) {
  const here = place();
  const root = document.getElementById("view");
  for (const tab of document.querySelectorAll("#tabs [role=tab]")) tab.setAttribute("aria-selected", String(tab.dataset.view === here.view));
  replace(document.getElementById("runs"), chips());
  DF.stepBy = null;
  const ticket = (DF.ticket = {});
  const staging = el("div", {});
  try {
    if (!again) root.classList.add("loading");
    await DF.views[here.view].render(staging, again);
  } catch (e) {
    replace(staging, note(`This could not be shown: ${e.message}`));
  }
  if (DF.ticket !== ticket) return;  // something else was asked for meanwhile
  replace(root, staging);
  root.classList.remove("loading");
  root.dataset.view = here.view;
  document.querySelector(`#tabs [data-view=${here.view}]`).scrollIntoView({ block: "nearest", inline: "nearest" });
  document.title = `${DF.views[here.view].title} · ${DF.runs[currentRun()].label} · DistFlow`;
}

/** Buttons of the runs to choose from: those that are compared, and the one that is shown. */
function chips() {
  if (DF.runs.length === 1) return el("span", { class: "muted", title: DF.runs[0].path }, DF.runs[0].label);
  const shown = [...new Set([...compared(), currentRun()])].sort((a, b) => a - b);
  return [shown.map((i) => el("button", { type: "button", title: DF.runs[i].path, "data-run": i, "aria-pressed": String(i === currentRun()), onclick: () => change({ run: i, step: null, sample: null }) },
    el("span", { class: "dot", style: { background: runColor(i) } }), DF.runs[i].label)),
  shown.length < DF.runs.length && el("button", { type: "button", class: "link row-link", onclick: () => go("runs", kept()) }, `${DF.runs.length} runs`)];
}

async function poll() {
  try {
    const changed = await get("changed", { run: currentRun() });
    const busy = document.activeElement && ["INPUT", "SELECT"].includes(document.activeElement.tagName) && document.activeElement.type === "number";
    if (DF.follow && changed !== DF.signature && !busy) {
      DF.signature = changed;
      if (DF.follow) change({ step: null }, true);
      await show(true);
      document.getElementById("status").textContent = `updated ${new Date().toLocaleTimeString()}`;
    }
  } catch (e) {
    document.getElementById("status").textContent = "the server has stopped";
  }
  setTimeout(poll, POLL_MS);
}

function follow(on) {
  DF.follow = on && !DF.embedded;
  const button = document.getElementById("follow");
  button.setAttribute("aria-pressed", String(DF.follow));
  button.textContent = DF.follow ? "Following" : "Follow";
  document.getElementById("status").textContent = "";
  DF.signature = null;
}

function keys(e) {
  if (e.ctrlKey || e.metaKey || e.altKey) return;
  const typing = e.target.matches("input:not([type=checkbox]):not([type=range]), select, textarea");
  if (e.key === "Escape") { document.getElementById("keys").close(); e.target.blur(); return; }
  if (typing) return;
  const acts = {
    j: () => DF.table && DF.table.move(1), k: () => DF.table && DF.table.move(-1),
    ArrowDown: () => place().view === "samples" && (DF.table.move(1), true), ArrowUp: () => place().view === "samples" && (DF.table.move(-1), true),
    ArrowLeft: () => !e.shiftKey && e.target.type !== "range" && DF.stepBy && (DF.stepBy(-1), true), ArrowRight: () => !e.shiftKey && e.target.type !== "range" && DF.stepBy && (DF.stepBy(1), true),
    f: () => follow(!DF.follow), "?": () => document.getElementById("keys").showModal(),
    t: () => { if (place().view !== "samples") return; change({ show: place().params.show === "tokens" ? "conversation" : "tokens" }, true); DF.table.open(DF.table.chosen); },
    "/": () => { const search = document.getElementById("search"); if (search) { search.focus(); search.select(); e.preventDefault(); } },
  };
  VIEWS.forEach((view, i) => { acts[String(i + 1)] = () => go(view, kept()); });
  if (e.key in acts && acts[e.key]() === true) e.preventDefault();
}

async function start() {
  const embedded = document.getElementById("embedded");
  if (embedded) {
    const packed = Uint8Array.from(atob(embedded.textContent.trim()), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    DF.embedded = await new Response(stream).json();
    document.getElementById("follow").hidden = true;
  }
  const { runs, follow: wanted } = await get("runs");
  const twice = new Set(runs.map((r) => r.name).filter((n, i, all) => all.indexOf(n) !== i));
  DF.runs = runs.map((r) => ({ ...r, label: twice.has(r.name) ? r.path.split("/").slice(-2).join("/") : r.name }));
  replace(document.getElementById("tabs"), VIEWS.map((view, i) => el("button", { type: "button", role: "tab", "data-view": view, title: `${i + 1}`, onclick: () => go(view, kept()) }, DF.views[view].title)));
  const dialog = document.getElementById("keys");
  replace(dialog, el("h2", {}, "Keys"), el("table", { class: "plain" }, KEYS.map(([key, text]) => el("tr", {}, el("th", {}, key), el("td", {}, text)))), el("button", { type: "button", onclick: () => dialog.close() }, "Close"));
  document.getElementById("help").addEventListener("click", () => dialog.showModal());
  document.getElementById("follow").addEventListener("click", () => follow(!DF.follow));
  document.addEventListener("keydown", keys);
  addEventListener("hashchange", () => show());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show());
  follow(wanted);
  if (DF.runs.length > MOST_COMPARED && !location.hash) go("runs", {}, true);
  await show();
  document.body.dataset.ready = "1";
  if (!DF.embedded) poll();
}

start();
