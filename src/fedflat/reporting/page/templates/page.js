"use strict";
// Interactive parts of the page: theme, sorting, metric, axis and visible rows. Everything else is static HTML.

const root = document.documentElement;
const data = JSON.parse(document.getElementById("data").textContent);
const INITIALLY_VISIBLE = 10; // rows whose curves are shown at first

let chosen = (() => { try { return localStorage.getItem("fedflat-theme"); } catch { return null; } })();
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const setTheme = (name) => { root.dataset.theme = name; paintLandscapes(name); };
setTheme(chosen || (dark.matches ? "dark" : "light"));
dark.addEventListener("change", () => { if (!chosen) setTheme(dark.matches ? "dark" : "light"); });
document.getElementById("theme").addEventListener("click", () => {
  chosen = root.dataset.theme === "dark" ? "light" : "dark";
  setTheme(chosen);
  try { localStorage.setItem("fedflat-theme", chosen); } catch { /* a page opened from a file may have no storage */ }
});

// --- sorting --------------------------------------------------------------------------------------------------------------------

function key(row, column) {
  const cell = row.cells[column], value = cell.dataset.v;
  if (value === undefined) return cell.textContent.trim().toLowerCase();
  return value === "" ? null : Number(value);
}

function sort(table, column) {
  const head = table.tHead.rows[0].cells[column];
  const numbers = table.tBodies[0].rows[0]?.cells[column].dataset.v !== undefined;
  const before = head.getAttribute("aria-sort");
  const down = before ? before === "ascending" : numbers;
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const rows = [...table.tBodies[0].rows].map((row, at) => ({ row, at, key: key(row, column) }));
  rows.sort((a, b) => {
    if (a.key === null || b.key === null) return (a.key === null) - (b.key === null) || a.at - b.at; // missing values come last
    return (a.key < b.key ? -1 : a.key > b.key ? 1 : 0) * (down ? -1 : 1) || a.at - b.at;
  });
  table.tBodies[0].append(...rows.map((r) => r.row));
}

for (const table of document.querySelectorAll("table.sortable"))
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    head.tabIndex = 0;
    head.addEventListener("click", () => sort(table, column));
    head.addEventListener("keydown", (e) => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); sort(table, column); } });
  });

// --- charts ---------------------------------------------------------------------------------------------------------------------

const waiting = new Map();
const seen = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) {
    const job = waiting.get(target);
    if (job && contentRect.width > 0 && Math.abs(contentRect.width - job.width) > 1) { job.width = contentRect.width; job.draw(); }
  }
});
function onShow(figure, draw) { if (figure) { waiting.set(figure, { draw, width: -1 }); seen.observe(figure); } }

const scaled = (section, metric) => (section.shares.includes(metric) ? 100 : 1);
const find = (number, name) => document.querySelector(`#s${number} [data-part="${name}"]`);

// Shows in a legend which rows are visible; two charts of a section share their rows.
function press(box, visible) {
  for (const button of box?.children || []) button.setAttribute("aria-pressed", visible.has(Number(button.dataset.number)));
}

function legend(box, rows, visible, redraw) {
  if (!box) return;
  for (const row of rows) {
    const button = document.createElement("button");
    const sample = node("svg", { viewBox: "0 0 26 12", "aria-hidden": "true" });
    node("line", { x1: 0, x2: 26, y1: 6, y2: 6, stroke: colour(row.style), "stroke-width": 2, "stroke-dasharray": dash(row.style) }, sample);
    mark(row.style, 13, 6, 4, sample);
    button.append(sample, row.label);
    button.type = "button";
    button.dataset.number = row.number;
    button.setAttribute("aria-pressed", visible.has(row.number));
    button.addEventListener("click", () => {
      visible.has(row.number) ? visible.delete(row.number) : visible.add(row.number);
      redraw();
    });
    box.append(button);
  }
}

// Draws one line per measured model, with a legend. Models are known by their labels; lines() are those to draw. Returns the drawing function.
function modelChart(n, part, models, lines, about) {
  const labels = [...new Set(models.map((m) => m.label))], visible = new Set(labels.keys());
  const draw = () => {
    const shown = lines().filter((l) => visible.has(labels.indexOf(l.label)));
    const values = shown.flatMap((l) => l.y), lost = values.filter((v) => !(v > 0)).length;
    const log = about.logX ? lost < values.length : !lost; // log-log charts omit values that are not positive
    const ylabel = about.ylabel + (log && lost ? ` (${lost} of ${values.length} values ≤ 0 omitted)` : "");
    lineChart(find(n, part), shown, { ...about, ylabel, log, dots: true, height: 320 });
    press(find(n, `${part}-legend`), visible);
  };
  onShow(find(n, part), draw);
  legend(find(n, `${part}-legend`), labels.map((label, number) => ({ ...models.find((m) => m.label === label), number })), visible, draw);
  return draw;
}

data.sections.forEach((section, n) => {
  const order = section.ranks ? section.ranks.lines.map((l) => l.row) : section.rows.map((r) => r.number);
  const visible = new Set(order.slice(0, INITIALLY_VISIBLE));
  const redraw = () => {
    if (curves) drawCurves();
    if (log) drawLog();
    for (const box of ["legend", "log-legend"]) press(find(n, box), visible);
  };

  const curves = find(n, "curves"), metric = find(n, "metric"), over = find(n, "over"), whole = find(n, "whole");
  const drawCurves = () => {
    const factor = scaled(section, metric.value);
    const lines = section.rows.filter((r) => visible.has(r.number) && section.curves[r.number].metrics[metric.value]).map((r) => {
      const curve = section.curves[r.number], values = curve.metrics[metric.value];
      const times = (list) => list.map((v) => (v === null ? null : v * factor));
      return { style: r.style, label: r.label, x: curve.over[over.value], y: times(values.mean), std: times(values.std) };
    });
    const words = `test ${metric.value}${factor === 100 ? " in per cent" : ""} over ${over.selectedOptions[0].textContent}`;
    const rise = !whole.checked && lines.some((l) => l.y.length > 5);
    const ylabel = `test ${metric.value}${factor === 100 ? " (%)" : ""}`;
    lineChart(curves, lines, { words, xlabel: over.selectedOptions[0].textContent, ylabel, skipRise: rise, falls: section.falling.includes(metric.value), whole: over.value === "round", targets: metric.value === section.metric ? data.targets.map((v) => v * factor) : [] });
  };
  if (curves) {
    onShow(curves, drawCurves);
    for (const control of [metric, over, whole]) control.addEventListener("change", drawCurves);
    legend(find(n, "legend"), section.rows, visible, redraw);
  }

  const factor = scaled(section, section.metric), unit = factor === 100 ? "percentage points" : section.metric;
  const pairs = section.differences.filter((d) => d.pair);
  onShow(find(n, "differences"), () => rowChart(find(n, "differences"), pairs.map((d) => ({
    style: section.rows[d.row].style, label: d.label, mean: d.pair.mean * factor, points: d.pair.differences.map((v) => v * factor),
    bars: [d.pair.interval, d.pair.t_interval].filter(Boolean).map((b) => b.map((v) => v * factor)),
  })), { zero: true, include: [0], xlabel: `difference in ${unit}`, words: "paired differences with their intervals" }));

  onShow(find(n, "ranks"), () => rowChart(find(n, "ranks"), section.ranks.lines.map((l) => ({
    style: section.rows[l.row].style, label: l.label, mean: l.mean, points: l.each, bars: [],
  })), {
    include: [1, Math.max(2, section.ranks.lines.length)], xlabel: "mean rank over seeds, 1 is best", words: "mean ranks", whole: true,
    bar: section.ranks.critical && section.ranks.critical < section.ranks.lines.length - 1 ? section.ranks.critical : 0,
    barWords: section.ranks.critical ? `critical difference ${trim(section.ranks.critical)}` : "",
  }));

  onShow(find(n, "partition"), () => columnChart(find(n, "partition"), section.partition.class_counts, "the classes of every client"));

  const log = find(n, "log"), quantity = find(n, "quantity");
  const drawLog = () => {
    const logged = section.views.log[quantity.value];
    const lines = logged.lines.map((l) => ({ ...l, ...section.rows[l.row] }));
    const threshold = quantity.value === "lambda_max" ? section.views.log["stability threshold"] : null;
    if (threshold) lines.push(...threshold.lines.map((l) => (
      { ...l, ...section.rows[l.row], label: `${section.rows[l.row].label}, stability threshold` }
    )));
    lineChart(log, lines.filter((l) => visible.has(l.row)), {
      words: logged.words, xlabel: "communication round", ylabel: quantity.value, dots: true, height: 300, whole: true,
      log: Boolean(threshold) && lines.every((l) => l.y.every((v) => v > 0)),
    });
  };
  if (log) {
    onShow(log, drawLog);
    quantity.addEventListener("change", drawLog);
    const measured = new Set(Object.values(section.views.log).flatMap((q) => q.lines.map((l) => l.row)));
    legend(find(n, "log-legend"), section.rows.filter((r) => measured.has(r.number)), visible, redraw);
  }

  const spectra = section.views.spectra.map((s) => ({ ...s, x: s.eigenvalues.map((_, i) => i + 1), y: s.eigenvalues }));
  const eigenvalues = { words: "eigenvalues of a curvature matrix", xlabel: "eigenvalues, largest first", ylabel: "eigenvalue", whole: true };
  modelChart(n, "spectra", spectra, () => spectra, eigenvalues);

  const kind = find(n, "kind"), rises = { words: "sharpness over the radius", xlabel: "radius rho", ylabel: "rise of the loss", logX: true };
  const drawRises = modelChart(n, "rises", Object.values(section.views.rises).flat(), () => section.views.rises[kind.value], rises);
  kind?.addEventListener("change", drawRises);

  const which = find(n, "run-of-clients");
  for (const part of ["classes", "clients"]) {
    const figure = find(n, part);
    const draw = () => {
      const run = section.views.clients[Number(which.value)];
      cellChart(figure, run[part], run.rounds, { xlabel: "communication round", words: `accuracy on ${part} over rounds` });
    };
    if (figure) { onShow(figure, draw); which.addEventListener("change", draw); }
  }
  which?.addEventListener("change", () => {
    for (const table of document.querySelectorAll(`#s${n} [data-forgetting]`)) table.hidden = table.dataset.forgetting !== which.value;
  });
});

// --- landscapes -----------------------------------------------------------------------------------------------------------------

// Landscapes need a large library, which is loaded when the first of them becomes visible.
function unfold(box) {
  const library = document.getElementById("library");
  if (library) { document.body.append(library.content.cloneNode(true)); library.remove(); }
  const inside = box.querySelector("template");
  if (inside) { box.append(inside.content.cloneNode(true)); inside.remove(); paintLandscapes(root.dataset.theme, box); }
}
// Plotly draws text and grids itself, so it needs the colours of the theme.
function paintLandscapes(theme, parent = document) {
  const [ink, line] = theme === "dark" ? ["#e4e8ec", "#343d47"] : ["#22303c", "#e5e2dc"];
  for (const plot of parent.querySelectorAll(".js-plotly-plot")) {
    const box = plot.closest(".panel"), size = panelSize(box.parentElement);
    const changes = { "font.color": ink, width: size, height: size };
    if (plot.layout.scene) for (const axis of "xyz") changes[`scene.${axis}axis.gridcolor`] = line;
    for (const element of [box, plot, plot.parentElement]) element.style.width = `${size}px`;
    for (const element of [plot, plot.parentElement]) element.style.height = `${size}px`;
    window.Plotly.relayout(plot, changes);
  }
}
// One or two landscapes are enlarged to the width of the page; 340 pixels fit a phone, and two such panels a printed page.
function panelSize(row) {
  const count = row.children.length, gaps = 12 * (count - 1);
  return Math.max(340, Math.min(560, Math.floor((row.clientWidth - gaps) / count)));
}
window.addEventListener("resize", () => {
  const changed = [...document.querySelectorAll(".panels")].some((row) => row.firstElementChild.style.width && row.firstElementChild.style.width !== `${panelSize(row)}px`);
  if (changed) paintLandscapes(root.dataset.theme);
});
const near = new IntersectionObserver((entries) => entries.forEach((e) => { if (e.isIntersecting) { near.unobserve(e.target); unfold(e.target); } }));
document.querySelectorAll(".later").forEach((box) => near.observe(box));

// Before printing, charts are drawn for the width of the paper, which keeps their text legible, and folded parts are opened.
function drawAll(width) {
  document.body.style.width = width;
  for (const { draw } of waiting.values()) draw();
}
window.addEventListener("beforeprint", () => {
  drawAll("680px");
  document.querySelectorAll("details.print").forEach((d) => { d.open = true; });
  document.querySelectorAll(".later").forEach(unfold);
  paintLandscapes("light");
});
window.addEventListener("afterprint", () => { drawAll(""); paintLandscapes(root.dataset.theme); });
