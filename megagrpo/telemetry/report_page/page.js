"use strict";
// Draws the report from the data that stands in the page. Nothing is fetched.
const COLOURS = ["#3b7ddd", "#e07b39", "#2f9e6e", "#b0539e", "#b58900", "#c0453e", "#5b6fd6", "#6b7a8f", "#0d9aa8", "#8a6d3b"];
const GROUPS_AT_ONCE = 10;
const byId = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
let report, shown = GROUPS_AT_ONCE;
const drawn = new Map(); // element -> what draws it again

async function unpack(id) {
  const letters = atob(byId(id).textContent), bytes = new Uint8Array(letters.length);
  for (let place = 0; place < letters.length; place++) bytes[place] = letters.charCodeAt(place);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

// A script of its own is compiled beside the page, which is there meanwhile.
function run(code) {
  return new Promise((done, failed) => {
    const script = element("script", { src: URL.createObjectURL(new Blob([code], { type: "text/javascript" })) });
    script.addEventListener("load", done);
    script.addEventListener("error", failed);
    document.head.append(script);
  });
}

function element(tag, properties = {}, children = []) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

const number = (value) => value === null || value === undefined ? "–"
  : Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-3) ? value.toExponential(2)
  : String(+value.toPrecision(4));

// ---- curves

function layout(panel) {
  const axis = { gridcolor: css("--line"), zerolinecolor: css("--line"), linecolor: css("--line"), automargin: true };
  const many = report.runs.length > 1;
  return {
    margin: { l: 8, r: 8, t: 8, b: 8 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: css("--ink"), size: 12 }, hovermode: "x unified",
    hoverlabel: { bgcolor: css("--paper"), bordercolor: css("--line"), font: { color: css("--ink") } },
    xaxis: { ...axis, title: { text: "step", standoff: 4 } },
    yaxis: { ...axis, type: panel.log ? "log" : "linear", exponentformat: panel.log ? "power" : "SI", rangemode: panel.kind === "lines" ? "normal" : "tozero" },
    yaxis2: { ...axis, overlaying: "y", side: "right", showgrid: false, rangemode: "tozero" },
    barmode: "stack", bargap: 0, legend: { orientation: "h", y: -0.28, font: { size: 11 } },
    showlegend: !many || panel.curves.length > 1,
  };
}

function values(run, curve) {
  const found = run.metrics[curve.metric];
  if (!found) return null;
  const less = (curve.less || []).map((name) => run.metrics[name] || []);
  const over = curve.over && run.metrics[curve.over];
  return found.map((value, place) => {
    if (value === null) return null;
    for (const other of less) value -= other[place] ?? 0;
    return over ? value / over[place] : value;
  });
}

function trace(run, runIndex, curve, curveIndex, panel) {
  const y = values(run, curve);
  if (!y) return [];
  const many = report.runs.length > 1, steps = [], kept = [];
  y.forEach((value, place) => { if (value !== null && (!panel.log || value > 0)) { steps.push(run.steps[place]); kept.push(value); } });
  if (!kept.length) return [];
  const colour = COLOURS[(many ? runIndex : curveIndex) % COLOURS.length];
  const name = many ? (panel.curves.length > 1 ? `${run.name}: ${curve.label}` : run.name) : curve.label;
  const made = {
    x: steps, y: kept, name, type: panel.kind === "bars" && !many ? "bar" : "scatter",
    mode: kept.length < 60 ? "lines+markers" : "lines", marker: { color: colour, size: 4 },
    line: { color: colour, width: 1.8, dash: many ? ["solid", "dash", "dot", "dashdot"][curveIndex % 4] : "solid" },
    yaxis: curve.right ? "y2" : "y", hovertemplate: "%{y:.4g}",
  };
  if (panel.kind === "stack" && !many) Object.assign(made, { stackgroup: "one", mode: "lines" });
  const band = curve.band && run.metrics[curve.band];
  if (!band || many) return [made];
  const wide = steps.map((step) => (curve.times || 1) * (band[run.steps.indexOf(step)] || 0));
  const edge = (sign, fill) => ({
    x: steps, y: kept.map((value, place) => value + sign * wide[place]), mode: "lines", line: { width: 0 }, fill,
    fillcolor: colour + "2e", hoverinfo: "skip", showlegend: false,
  });
  return [edge(-1), edge(1, "tonexty"), made];
}

function draw(holder, panel) {
  const traces = report.runs.flatMap((run, place) => panel.curves.flatMap((curve, index) => trace(run, place, curve, index, panel)));
  const paint = () => Plotly.react(holder, traces, layout(panel), { responsive: true, displaylogo: false, displayModeBar: false });
  drawn.set(holder, paint);
  paint();
}

function panels() {
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      watcher.unobserve(entry.target);
      draw(entry.target, entry.target.panel);
    }
  }, { rootMargin: "200px" });
  for (const panel of report.panels) {
    const plot = element("div", { className: "plot", panel });
    byId("panels").append(element("div", { className: "panel" }, [
      element("h3", { textContent: panel.title }), element("p", { className: "note", textContent: panel.note }), plot,
    ]));
    watcher.observe(plot);
  }
}

function anyMetric() {
  const names = [...new Set(report.runs.flatMap((run) => Object.keys(run.metrics)))].sort();
  byId("metric").append(...names.map((name) => new Option(name, name)));
  const show = () => draw(byId("any"), { kind: "lines", curves: [{ label: byId("metric").value, metric: byId("metric").value }] });
  byId("metric").value = names.includes("reward/mean") ? "reward/mean" : names[0];
  byId("metric").addEventListener("change", show);
  show();
}

// ---- summary, warnings, configuration

function head() {
  byId("title").textContent = document.title = report.title;
  const many = report.runs.length > 1;
  for (const run of report.runs) {
    for (const card of run.cards) {
      byId("cards").append(element("div", { className: "card" }, [
        element("div", { className: "name", textContent: many ? `${run.name}: ${card.name}` : card.name }),
        element("div", { className: "value", textContent: card.value }),
        element("div", { className: "more", textContent: card.more }),
      ]));
    }
    for (const warning of run.warnings) {
      byId("warnings").append(element("div", { className: "warning", textContent: `${many ? run.name + ", " : ""}step ${warning.step}: ${warning.text}` }));
    }
  }
  if (many) report.runs.forEach((run, place) => byId("legend").append(element("span", {}, [
    Object.assign(element("span", { className: "swatch" }), { style: `background:${COLOURS[place % COLOURS.length]}` }), run.name,
  ])));
  const rows = [["field", ...report.runs.map((run) => run.name)], ...report.config];
  rows.forEach((row, place) => byId("config").append(element("tr", {}, row.map((cell) => element(place ? "td" : "th", { textContent: cell })))));
}

// ---- completions

const chosen = (id) => byId(id).value;
const completions = () => report.runs[+chosen("run")].completions.filter((row) => row.set === chosen("set"));

function fill(id, entries, keep) {
  const select = byId(id), before = select.value;
  select.replaceChildren(...entries.map(([value, label]) => new Option(label, value)));
  if (keep && entries.some(([value]) => String(value) === before)) select.value = before;
}

function fillSets() {
  const sets = [...new Set(report.runs[+chosen("run")].completions.map((row) => row.set))];
  fill("set", sets.map((name) => [name, name || "training"]), true);
  fillSteps();
}

function fillSteps() {
  const steps = [...new Set(completions().map((row) => row.step))].sort((a, b) => b - a);
  fill("step", steps.map((step) => [step, step]), true);
  shown = GROUPS_AT_ONCE;
  browse();
}

function groupsOf(rows) {
  const groups = [];
  for (const row of rows) {
    const last = groups[groups.length - 1];
    if (last && last[0].prompt_id === row.prompt_id && last[0].index !== row.index) last.push(row);
    else groups.push([row]);
  }
  return groups;
}

const largest = (group, of) => Math.max(...group.map(of));
const reward = (row) => row.reward ?? 0;
const ORDERS = {
  prompt: (group) => group[0].prompt_id,
  worst: (group) => -largest(group, (row) => -reward(row)),
  best: (group) => -largest(group, reward),
  longest: (group) => -largest(group, (row) => row.tokens),
  mixed: (group) => -(largest(group, reward) + largest(group, (row) => -reward(row))),
  changed: (group) => group[0].prompt_id,
};

function before(row) {
  const earlier = completions().filter((other) => other.step < row.step && other.prompt_id === row.prompt_id && other.index === row.index);
  return earlier.sort((a, b) => b.step - a.step)[0];
}

function browse() {
  const words = chosen("text").toLowerCase(), order = chosen("order");
  let groups = groupsOf(completions().filter((row) => row.step === +chosen("step")));
  groups = groups.filter((group) => group.some((row) => `${row.prompt}\n${row.completion}`.toLowerCase().includes(words)));
  if (order === "changed") {
    groups = groups.map((group) => group.filter((row) => { const old = before(row); return old && old.reward !== row.reward; }));
    groups = groups.filter((group) => group.length);
  }
  groups.sort((a, b) => ORDERS[order](a) - ORDERS[order](b));
  byId("found").textContent = `${groups.length} groups`;
  byId("groups").replaceChildren(...groups.slice(0, shown).map((group) => card(group, order)));
  byId("more").hidden = groups.length <= shown;
}

function card(group, order) {
  const columns = Object.entries(group[0].columns || {}).map(([name, value]) => `${name}: ${value}`).join("\n");
  const high = largest(group, reward);
  const members = group.flatMap((row) => order === "changed" ? [before(row), row] : [row]);
  return element("div", { className: "group" }, [
    element("h3", { textContent: `prompt ${group[0].prompt_id}` }),
    element("pre", { textContent: group[0].prompt }),
    element("pre", { className: "facts", textContent: columns }),
    element("div", { className: "members" }, members.map((row) => member(row, high))),
  ]);
}

function member(row, high) {
  const parts = Object.entries(row.parts || {}).map(([name, value]) => `${name} ${number(value)}`).join(", ");
  const facts = [`step ${row.step}, completion ${row.index}`, `${row.tokens} tokens`, row.finish_reason, `weights ${row.weight_version}`];
  if (row.outcome !== "ok") facts.push(`${row.outcome}: ${row.detail}`);
  return element("div", { className: "member" }, [
    element("span", { className: `reward ${reward(row) === high && high > 0 ? "high" : "low"}`, textContent: number(row.reward) }),
    element("div", { className: "facts", textContent: `${parts} · ${facts.join(" · ")}` }),
    element("pre", { textContent: row.completion }),
  ]);
}

function browser() {
  const runs = report.runs.map((run, place) => [place, run.name]).filter(([place]) => report.runs[place].completions.length);
  if (!runs.length) { byId("browser").hidden = true; return; }
  fill("run", runs);
  byId("run").addEventListener("change", fillSets);
  byId("set").addEventListener("change", fillSteps);
  for (const id of ["step", "order"]) byId(id).addEventListener("change", () => { shown = GROUPS_AT_ONCE; browse(); });
  byId("text").addEventListener("input", () => { shown = GROUPS_AT_ONCE; browse(); });
  byId("more").addEventListener("click", () => { shown += GROUPS_AT_ONCE; browse(); });
  fillSets();
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  drawn.forEach((paint) => paint());
}

async function start() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  document.documentElement.dataset.theme = dark.matches ? "dark" : "light";
  report = JSON.parse(await unpack("data"));
  head();
  browser();
  await run(await unpack("plotly"));
  panels();
  anyMetric();
  byId("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
  document.documentElement.dataset.ready = "yes";
}

start();
