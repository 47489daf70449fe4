"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const { axis, rows, stages } = data;
const numColumns = axis.first.length, numRows = rows.first.length, numStages = stages.length;
const heat = { total: floats(data.heat.total), byStage: floats(data.heat.by_stage), rank: floats(data.heat.rank), step: floats(data.heat.step) };
const moments = Object.fromEntries(Object.entries(data.moments).map(([name, packed]) => [name, floats(packed)]));
const state = { column: 0, stage: -1, sorted: false, row: -1 };
const cursors = [];
const follows = new Set(data.follows);

// -- numbers -------------------------------------------------------------------------------------------

function floats(packed) {
  return new Float32Array(Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0)).buffer);
}
const whole = (value) => Math.round(value).toLocaleString("en-US");
const digits = (value) => Number(value.toPrecision(3)).toLocaleString("en-US", { maximumFractionDigits: 6 });
function duration(value) {
  if (!Number.isFinite(value)) return "–";
  if (value < 5e-7) return "0";
  if (value >= 600) return `${whole(value / 60)} min`;
  const [unit, size] = [["s", 1], ["ms", 1e-3], ["µs", 1e-6]].find(([, size]) => value >= size * 0.9995) || ["µs", 1e-6];
  return `${digits(value / size)} ${unit}`;
}
function size(value) {
  if (value == null) return "–";
  const units = ["B", "KB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${digits(value)} ${units[unit]}`;
}
const rate = (value) => value == null ? "–" : `${size(value)}/s`;
const percent = (value) => value == null ? "–" : `${digits(value * 100)} %`;
const plain = (value) => value == null ? "–" : digits(value);
const clock = (time) => time == null ? "" : new Date(time * 1000).toLocaleString(undefined, { dateStyle: "short", timeStyle: "medium" });
const stepsOf = (column) => axis.stop[column] - axis.first[column] === 1 ? `step ${whole(axis.first[column])}`
  : `steps ${whole(axis.first[column])}–${whole(axis.stop[column] - 1)}`;
const rowName = (row) => rows.stop[row] - rows.first[row] === 1 ? `rank ${whole(rows.first[row])}`
  : `ranks ${whole(rows.first[row])}–${whole(rows.stop[row] - 1)}`;
const colourOf = (stage) => css(`--${stage}`) || css("--other");
const sum = (values, from, count) => { let total = 0; for (let i = from; i < from + count; i++) total += values[i] || 0; return total; };

// -- drawing -------------------------------------------------------------------------------------------

function node(parent, name, attributes = {}, text = null) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  parent.append(made);
  return made;
}
function html(parent, name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  parent.append(made);
  return made;
}
function frame(holder) {
  const width = Math.max(holder.clientWidth, 240);
  return { width, left: width < 520 ? 54 : 84, right: 8 };
}
const xOf = (box, column) => box.left + (box.width - box.left - box.right) * column / Math.max(numColumns, 1);
function columnAt(box, x) {
  const column = Math.floor((x - box.left) / (box.width - box.left - box.right) * numColumns);
  return column < 0 || column >= numColumns ? -1 : column;
}
function ticks(low, high, about = 4) {
  const rough = (high - low || 1) / about, power = 10 ** Math.floor(Math.log10(rough));
  const by = [1, 2, 5, 10].find((each) => each * power >= rough * 0.999) * power, found = [];
  for (let at = Math.ceil(low / by - 1e-9); at * by <= high + by * 1e-6; at++) found.push(at * by);
  return found;
}
function base(holder, height, high, low, format, label) {
  const box = { ...frame(holder), height, top: 14, bottom: 22 };
  holder.replaceChildren();
  const svg = node(holder, "svg", { viewBox: `0 0 ${box.width} ${height}`, height, role: "img", "aria-label": label });
  box.y = (value) => box.top + (height - box.top - box.bottom) * (high - value) / (high - low || 1);
  for (const value of ticks(low, high, 3)) {
    node(svg, "line", { class: "grid", x1: box.left, x2: box.width - box.right, y1: box.y(value), y2: box.y(value) });
    node(svg, "text", { x: box.left - 8, y: box.y(value) + 4, "text-anchor": "end" }, format(value));
  }
  stepLabels(svg, box, height - 6);
  return [svg, box];
}
function stepLabels(svg, box, y) {
  let free = -Infinity;
  const every = Math.max(1, Math.ceil(numColumns / Math.max(2, Math.floor((box.width - box.left) / 90))));
  for (let column = 0; column < numColumns; column++) {
    const begins = column === 0 || axis.start[column] !== axis.start[column - 1];
    const x = xOf(box, column);
    if ((begins || column % every === 0) && x > free && x < box.width - 24) {
      node(svg, "text", { x: x + 2, y }, whole(axis.first[column]));
      free = x + 52;
    }
  }
}
function resumes(svg, box, named = false) {
  let free = -Infinity;
  for (let column = 1; column < numColumns; column++) {
    if (axis.start[column] === axis.start[column - 1]) continue;
    const x = xOf(box, column);
    node(svg, "path", { class: "resume", d: `M${x} ${box.top - 4}V${box.height - box.bottom}` });
    if (!named || x < free) continue;
    const late = x > box.width * 0.7;
    node(svg, "text", { class: "strong", x: x + (late ? -5 : 5), y: 9, "text-anchor": late ? "end" : "start" },
      `resumed: ${data.starts[axis.start[column]].layout}`);
    free = x + 150;
  }
}
function withCursor(holder, svg, box, tell) {
  const band = node(svg, "rect", { class: "cursor-band", y: box.top, height: box.height - box.top - box.bottom, width: 2 });
  cursors.push((column) => {
    const x = xOf(box, column);
    band.setAttribute("x", x - 0.5);
    band.setAttribute("width", Math.max(xOf(box, column + 1) - x, 2) + 1);
  });
  const columnOf = (event) => columnAt(box, event.clientX - svg.getBoundingClientRect().left);
  svg.addEventListener("pointermove", (event) => {
    const column = columnOf(event);
    showTip(column < 0 ? "" : `${stepsOf(column)}\n${tell(column)}`, event);
  });
  svg.addEventListener("pointerleave", () => showTip(""));
  svg.addEventListener("click", (event) => { const column = columnOf(event); if (column >= 0) choose(column); });
}
function showTip(text, at) {
  const tip = byId("tip");
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const wide = tip.offsetWidth, high = tip.offsetHeight;
  tip.style.left = `${Math.max(6, Math.min(at.clientX + 14, innerWidth - wide - 6))}px`;
  tip.style.top = `${at.clientY + 18 + high > innerHeight ? at.clientY - high - 12 : at.clientY + 18}px`;
}
