"use strict";
// Small charts in SVG. Colours are CSS variables, so that they follow the theme; text is measured in the page's font.

const SPACE = "http://www.w3.org/2000/svg";
const COLOURS = 8;
const DASHES = ["", "7 4", "2 3", "9 3 2 3"];
const colour = (n) => `var(--c${n % COLOURS})`;
const dash = (n) => DASHES[Math.floor(n / COLOURS) % DASHES.length];
const MARKS = 8; // markers along a curve
const EARLY = 1 / 3; // part of a curve that does not determine the range of the axis,
const MIN_LATE_SHARE = 0.6; // unless the rest fills at least this share of the axis anyway
const SHAPES = [
  "M-1 0A1 1 0 1 0 1 0A1 1 0 1 0 -1 0Z", "M-.9 -.9H.9V.9H-.9Z", "M0 -1.2L1.2 0L0 1.2L-1.2 0Z", "M0 -1.15L1.1 .85H-1.1Z", "M0 1.15L1.1 -.85H-1.1Z",
  "M-.4 -1.1H.4V-.4H1.1V.4H.4V1.1H-.4V.4H-1.1V-.4H-.4Z", "M-1.1 -.6L-.6 -1.1L0 -.5L.6 -1.1L1.1 -.6L.5 0L1.1 .6L.6 1.1L0 .5L-.6 1.1L-1.1 .6L-.5 0Z",
  "M0 -1.3L.35 -.4L1.25 -.4L.5 .15L.8 1.1L0 .5L-.8 1.1L-.5 .15L-1.25 -.4L-.35 -.4Z",
]; // circle, square, diamond, triangles, plus, cross and star of radius 1
const shape = (n) => SHAPES[(n + Math.floor(n / COLOURS)) % SHAPES.length];
function mark(n, x, y, radius, parent) {
  return node("path", { d: shape(n), transform: `translate(${x.toFixed(1)} ${y.toFixed(1)}) scale(${radius})`, fill: colour(n) }, parent);
}
const NARROW = 560;

function node(name, attributes, parent, text) {
  const made = document.createElementNS(SPACE, name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.appendChild(made);
  return made;
}

function canvas(figure, height, words) {
  const width = Math.max(240, figure.clientWidth);
  figure.querySelectorAll(":scope > svg").forEach((old) => old.remove());
  const svg = node("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": words });
  figure.prepend(svg);
  return [svg, width];
}

function ticks(low, high, about) {
  const rough = (high - low) / Math.max(1, about);
  if (!(rough > 0)) return [low];
  const size = Math.pow(10, Math.floor(Math.log10(rough)));
  const step = [1, 2, 2.5, 5, 10].map((f) => f * size).find((s) => s >= rough * 0.999);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(k * step);
  return found;
}

function decades(low, high) {
  const found = [];
  for (let k = Math.floor(low); k <= Math.ceil(high); k++) for (const f of [1, 2, 5]) found.push(k + Math.log10(f));
  const inside = found.filter((v) => v >= low - 1e-9 && v <= high + 1e-9);
  if (inside.length < 2) return ticks(Math.pow(10, low), Math.pow(10, high), 4).map(Math.log10);
  return inside.length > 8 ? inside.filter((v) => Math.abs(v - Math.round(v)) < 1e-9) : inside;
}

function short(value) {
  if (value === null || value === undefined || !isFinite(value)) return "–";
  const size = Math.abs(value);
  for (const [unit, word] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]])
    if (size >= unit * 0.9999) return trim(value / (word === "k" ? 1e3 : unit)) + " " + word;
  return size && size < 1e-3 ? value.toExponential(1) : trim(value);
}
const trim = (value) => String(Number(value.toPrecision(4)));

function cut(text, element, width) {
  // Labels that do not fit lose their middle, because names often differ at the end; the tooltip shows the full text.
  node("title", {}, element, text);
  const words = document.createTextNode(text);
  element.appendChild(words);
  for (let n = text.length - 1; n > 1 && element.getComputedTextLength() > width; n--)
    words.data = text.slice(0, Math.ceil(n / 2)) + "…" + text.slice(-Math.floor(n / 2));
}

// --- lines over an axis ---------------------------------------------------------------------------------------------------------

function lineChart(figure, lines, about) {
  const [svg, width] = canvas(figure, about.height || 360, about.words);
  const height = about.height || 360, left = 52, right = 14, top = 26, bottom = 42;
  const put = about.log ? (v) => (v > 0 ? Math.log10(v) : null) : (v) => v;
  const along = about.logX ? Math.log10 : (v) => v;
  const xs = lines.flatMap((l) => l.x.map(along)), ys = [], early = [];
  for (const l of lines) {
    const from = about.skipRise ? Math.floor(EARLY * l.y.length) : 0;
    l.y.forEach((v, i) => {
      if (v === null || put(v) === null) return;
      if (i < from) { early.push(put(v)); return; }
      ys.push(put(v));
      if (l.std && l.std[i]) ys.push(put(about.log ? Math.max(v - l.std[i], v / 10) : v - l.std[i]), put(v + l.std[i]));
    });
    const known = l.y.filter((v) => v !== null && put(v) !== null); // the best value stays visible, however early
    if (from && known.length) ys.push(put((about.falls ? Math.min : Math.max)(...known)));
  }
  if (!xs.length || !ys.length) { node("text", { x: 8, y: 24 }, svg, "No row is selected; choose one below."); return; }
  const reduce = (list, f) => list.reduce((a, b) => f(a, b));
  let [x0, x1, y0, y1] = [reduce(xs, Math.min), reduce(xs, Math.max), reduce(ys, Math.min), reduce(ys, Math.max)];
  const [all0, all1] = [[y0, ...early].reduce((a, b) => Math.min(a, b)), [y1, ...early].reduce((a, b) => Math.max(a, b))];
  if (y1 - y0 >= MIN_LATE_SHARE * (all1 - all0)) [y0, y1] = [all0, all1];
  const room = (y1 - y0) * 0.05 || Math.abs(y1) * 0.1 || 1;
  y0 -= room; y1 += room;
  if (x1 === x0) x1 = x0 + 1;
  const X = (v) => left + ((along(v) - x0) / (x1 - x0)) * (width - left - right);
  const Y = (v) => top + ((y1 - v) / (y1 - y0)) * (height - top - bottom);
  for (const v of about.log ? decades(y0, y1) : ticks(y0, y1, 6)) {
    node("line", { x1: left, x2: width - right, y1: Y(v), y2: Y(v), stroke: "var(--line)", "stroke-width": 1 }, svg);
    node("text", { x: left - 6, y: Y(v) + 4, "text-anchor": "end" }, svg, short(about.log ? Math.pow(10, v) : v));
  }
  const marks = about.logX ? decades(x0, x1).map((v) => Math.pow(10, v)) : ticks(x0, x1, width < NARROW ? 4 : 8);
  for (const v of marks.filter((v) => !about.whole || Number.isInteger(v))) {
    const anchor = X(v) > width - 30 ? "end" : "middle";
    node("text", { x: Math.min(X(v), width - 2), y: height - bottom + 18, "text-anchor": anchor }, svg, short(v));
  }
  node("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, svg, about.xlabel);
  node("text", { x: 4, y: 13 }, svg, about.ylabel || "");
  const name = `clip-${Math.random().toString(36).slice(2)}`;
  node("rect", { x: left, y: top, width: width - left - right, height: height - top - bottom }, node("clipPath", { id: name }, node("defs", {}, svg)));
  const inside = node("g", { "clip-path": `url(#${name})` }, svg);
  const path = (points) => points.map((p, i) => `${i ? "L" : "M"}${p[0].toFixed(1)} ${p[1].toFixed(1)}`).join("");
  for (const v of (about.targets || []).filter((v) => v > y0 && v < y1)) {
    node("line", { x1: left, x2: width - right, y1: Y(v), y2: Y(v), stroke: "var(--quiet)", "stroke-dasharray": "2 3", class: "target" }, svg);
    node("text", { x: left + 4, y: Y(v) - 4 }, svg, `target ${trim(v)}`);
  }
  for (const l of lines) {
    const known = l.x.map((x, i) => i).filter((i) => l.y[i] !== null && put(l.y[i]) !== null);
    if (l.std) {
      const at = (i, v) => [X(l.x[i]), Y(put(v) ?? y0)]; // on a logarithmic axis, a band may reach below its end
      const above = known.map((i) => at(i, l.y[i] + (l.std[i] || 0)));
      const below = known.map((i) => at(i, l.y[i] - (l.std[i] || 0))).reverse();
      if (known.length > 1) node("path", { d: path(above.concat(below)) + "Z", fill: colour(l.style), "fill-opacity": 0.13 }, inside);
    }
    const points = known.map((i) => [X(l.x[i]), Y(put(l.y[i]))]);
    const style = { d: path(points), fill: "none", stroke: colour(l.style), "stroke-width": 1.8, "stroke-dasharray": dash(l.style) };
    node("path", { ...style, "stroke-linejoin": "round", class: "curve" }, inside);
    const every = about.dots ? 1 : Math.max(1, Math.ceil(points.length / MARKS));
    points.forEach((p, i) => { if (i % every === 0) mark(l.style, p[0], p[1], 3.2, inside); });
  }
  pointer(svg, figure, lines, about, { X, along, x0, x1, left, right, width, height, top, bottom });
}

function pointer(svg, figure, lines, about, at) {
  let tip = figure.querySelector(".tip");
  if (!tip) { tip = document.createElement("div"); tip.className = "tip"; tip.hidden = true; figure.appendChild(tip); }
  const rule = node("line", { y1: at.top, y2: at.height - at.bottom, stroke: "var(--quiet)", "stroke-width": 1, visibility: "hidden" }, svg);
  svg.addEventListener("pointerleave", () => { tip.hidden = true; rule.setAttribute("visibility", "hidden"); });
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), scale = at.width / box.width;
    const x = at.x0 + (((event.clientX - box.left) * scale - at.left) / (at.width - at.left - at.right)) * (at.x1 - at.x0);
    if (x < at.x0 || x > at.x1) { tip.hidden = true; return; }
    const away = (v) => Math.abs(at.along(v) - x);
    const near = lines.map((l) => {
      let best = 0;
      l.x.forEach((v, i) => { if (away(v) < away(l.x[best])) best = i; });
      return { l, x: l.x[best], y: l.y[best] };
    }).filter((n) => n.y !== null).sort((a, b) => b.y - a.y);
    if (!near.length) return;
    const nearest = near.map((n) => n.x).reduce((a, b) => (away(b) < away(a) ? b : a));
    rule.setAttribute("visibility", "visible");
    for (const side of ["x1", "x2"]) rule.setAttribute(side, at.X(nearest));
    const where = about.whole ? String(Math.round(nearest)) : short(nearest);
    tip.replaceChildren(...[`${about.xlabel} ${where}`, ...near.slice(0, 8)].map((n) => {
      const line = document.createElement("div");
      if (typeof n === "string") { line.textContent = n; line.className = "quiet"; return line; }
      const swatch = document.createElement("span");
      swatch.className = "swatch"; swatch.append(node("svg", { viewBox: "-2 -2 4 4", width: 12, height: 12 }));
      mark(n.l.style, 0, 0, 1.4, swatch.firstChild);
      line.append(swatch, `${n.l.label}  ${trim(n.y)}`);
      return line;
    }));
    tip.hidden = false;
    const place = (event.clientX - box.left), right = place > box.width / 2;
    tip.style.left = right ? "auto" : `${place + 14}px`;
    tip.style.right = right ? `${box.width - place + 14}px` : "auto";
    tip.style.top = "16px";
  });
}

// --- one line per row: intervals and ranks --------------------------------------------------------------------------------------

function rowChart(figure, rows, about) {
  const narrow = figure.clientWidth < NARROW, step = narrow ? 44 : 28, top = about.bar ? 44 : 12, bottom = 42;
  const height = top + rows.length * step + bottom;
  const [svg, width] = canvas(figure, height, about.words);
  const left = narrow ? 12 : Math.min(300, width * 0.34), right = narrow ? 12 : 20;
  const all = rows.flatMap((r) => [...r.points, ...r.bars.flat(), r.mean]).concat(about.include || []).filter((v) => v !== null && isFinite(v));
  let [x0, x1] = [Math.min(...all), Math.max(...all)];
  const room = (x1 - x0) * 0.06 || 0.5;
  x0 -= room; x1 += room;
  const X = (v) => left + ((v - x0) / (x1 - x0)) * (width - left - right);
  for (const v of ticks(x0, x1, narrow ? 4 : 7).filter((v) => !about.whole || Number.isInteger(v))) {
    node("line", { x1: X(v), x2: X(v), y1: top, y2: height - bottom, stroke: "var(--line)" }, svg);
    node("text", { x: X(v), y: height - bottom + 18, "text-anchor": "middle" }, svg, trim(Math.abs(v) < 1e-12 ? 0 : v));
  }
  if (about.zero) node("line", { x1: X(0), x2: X(0), y1: top, y2: height - bottom, stroke: "var(--ink)", "stroke-width": 1 }, svg);
  if (about.bar) {
    node("path", { d: `M${X(about.include[0])} 28H${X(about.include[0] + about.bar)}m0 -4v8M${X(about.include[0])} 24v8`, stroke: "var(--ink)", fill: "none" }, svg);
    node("text", { x: X(about.include[0]), y: 16 }, svg, about.barWords);
  }
  rows.forEach((r, i) => {
    const y = top + i * step + (narrow ? 30 : step / 2);
    const label = node("text", narrow ? { x: left, y: y - 13, class: "ink" } : { x: left - 14, y: y + 4, "text-anchor": "end", class: "ink" }, svg);
    cut(r.label, label, narrow ? width - left - right : left - 18);
    r.bars.forEach((b, n) => {
      const style = { stroke: colour(r.style), "stroke-width": n ? 1.2 : 5, "stroke-opacity": n ? 1 : 0.35, "stroke-linecap": n ? "butt" : "round" };
      node("line", { x1: X(b[0]), x2: X(b[1]), y1: y, y2: y, ...style }, svg);
    });
    r.points.forEach((p) => node("circle", { cx: X(p), cy: y, r: 2.6, fill: "none", stroke: colour(r.style) }, svg));
    mark(r.style, X(r.mean), y, 4.5, svg);
  });
  node("text", { x: narrow ? width / 2 : (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, svg, about.xlabel);
}

// --- matrices -------------------------------------------------------------------------------------------------------------------

function columnChart(figure, counts, words) {
  // One column per client with stacked classes, or a heat map if there are more classes than colours.
  const classes = counts[0].length, height = 232, left = 44, bottom = 30, top = 22;
  const [svg, width] = canvas(figure, height, words);
  const step = (width - left - 4) / counts.length;
  const draw = (x, y, h, fill, opacity) =>
    node("rect", { x: x.toFixed(2), y: y.toFixed(2), width: Math.max(0.5, step * 0.88).toFixed(2), height: h.toFixed(2), fill, "fill-opacity": opacity }, svg);
  if (classes <= 20) {
    const most = Math.max(...counts.map((c) => c.reduce((a, b) => a + b, 0)));
    const H = (v) => (v / most) * (height - top - bottom);
    for (const v of ticks(0, most, 4)) {
      node("line", { x1: left, x2: width, y1: height - bottom - H(v), y2: height - bottom - H(v), stroke: "var(--line)" }, svg);
      node("text", { x: left - 6, y: height - bottom - H(v) + 4, "text-anchor": "end" }, svg, short(v));
    }
    counts.forEach((c, i) => {
      let y = height - bottom;
      const first = c.indexOf(Math.max(...c));
      for (const k of [first, ...c.keys()].filter((k, at) => at === 0 || k !== first)) {
        if (!c[k]) continue;
        y -= H(c[k]);
        draw(left + i * step, y, H(c[k]), colour(k), k < COLOURS ? 0.9 : 0.45);
      }
    });
  } else {
    const most = Math.max(...counts.flat()), cell = (height - top - bottom) / classes;
    counts.forEach((c, i) => c.forEach((v, k) => v && draw(left + i * step, top + k * cell, cell, "var(--accent)", 0.15 + 0.85 * Math.sqrt(v / most))));
    [0, classes - 1].forEach((k) => node("text", { x: left - 6, y: top + k * cell + 8, "text-anchor": "end" }, svg, k));
  }
  node("text", { x: (left + width) / 2, y: height - 8, "text-anchor": "middle" }, svg, classes > 1 ? "clients, sorted by most frequent class" : "clients");
  node("text", { x: 4, y: 13 }, svg, classes > 20 ? "class" : "examples");
}

function cellChart(figure, rows, columns, about) {
  const names = Object.keys(rows), cell = Math.max(11, Math.min(20, 320 / names.length)), left = 64, bottom = 38, top = 6;
  const height = top + names.length * cell + bottom;
  const [svg, width] = canvas(figure, height, about.words);
  const step = (width - left - 4) / columns.length;
  names.forEach((name, i) => {
    const y = top + i * cell;
    cut(name, node("text", { x: left - 6, y: y + cell / 2 + 4, "text-anchor": "end" }, svg), left - 8);
    rows[name].forEach((v, j) => {
      const box = { x: left + j * step, y, width: Math.max(0.5, step - 1), height: cell - 1 };
      const style = v === null ? { fill: "none", stroke: "var(--line)" } : { fill: "var(--accent)", "fill-opacity": Math.max(0.03, Math.min(1, v)) };
      node("title", {}, node("rect", { ...box, ...style }, svg), `${name}, round ${columns[j]}: ${v === null ? "–" : trim(100 * v) + " %"}`);
    });
  });
  const every = Math.ceil(columns.length / (width < NARROW ? 5 : 12));
  columns.forEach((c, j) => {
    if (j % every === 0) node("text", { x: left + (j + 0.5) * step, y: height - bottom + 16, "text-anchor": "middle" }, svg, c);
  });
  node("text", { x: (left + width) / 2, y: height - 4, "text-anchor": "middle" }, svg, about.xlabel);
}
