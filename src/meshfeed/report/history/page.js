// -- the pictures --------------------------------------------------------------------------------------

const momentAt = (row, column) => (row * numColumns + column) * numStages;
function worstRow(column) {
  // who waited for another rank is named only where nobody was half as slow by itself
  const there = Array.from({ length: numRows }, (_, row) => row).filter((row) => heat.total[row * numColumns + column] >= 0);
  const all = (row) => heat.total[row * numColumns + column];
  const own = (row) => stages.reduce((total, stage, k) => total + (follows.has(stage) ? 0 : heat.byStage[momentAt(row, column) + k]), 0);
  const most = (of) => there.reduce((best, row) => best < 0 || of(row) > of(best) ? row : best, -1);
  const cause = most(own), longest = most(all);
  return cause >= 0 && own(cause) >= all(longest) / 2 ? cause : longest;
}
const worst = Array.from({ length: numColumns }, (_, column) => worstRow(column));

function drawWaits() {
  const holder = byId("chart-waits"), shown = state.stage < 0 ? stages.map((_, k) => k) : [state.stage];
  const value = (column, k) => {
    if (state.stage < 0) return worst[column] < 0 ? 0 : moments.wait[momentAt(worst[column], column) + k] || 0;
    let most = 0;
    for (let row = 0; row < numRows; row++) most = Math.max(most, heat.byStage[momentAt(row, column) + k] || 0);
    return most;
  };
  const totals = axis.first.map((_, column) => shown.reduce((total, k) => total + value(column, k), 0));
  const high = Math.max(...totals, ...data.series.wait.mean.map((each) => each || 0), 1e-6) * 1.05;
  const [svg, box] = base(holder, 190, high, 0, (v) => v ? duration(v) : "0", "longest exposed wait by step and stage");
  const floor = new Float64Array(numColumns);
  for (const k of shown) {
    let path = "";
    for (let column = 0; column < numColumns; column++) {
      const tall = value(column, k);
      if (tall <= 0) continue;
      const x = xOf(box, column), wide = xOf(box, column + 1) - x, gap = wide > 5 ? 1 : 0;
      path += `M${(x + gap / 2).toFixed(2)} ${box.y(floor[column]).toFixed(2)}h${(wide - gap).toFixed(2)}V${box.y(floor[column] + tall).toFixed(2)}h${(gap - wide).toFixed(2)}z`;
      floor[column] += tall;
    }
    node(svg, "path", { d: path, fill: colourOf(stages[k]) });
  }
  if (state.stage < 0) lines(svg, box, data.series.wait.mean, "mean");
  resumes(svg, box, true);
  withCursor(holder, svg, box, (column) => {
    const told = shown.map((k) => [value(column, k), stages[k]]).filter(([each]) => each > 5e-7).sort((a, b) => b[0] - a[0]);
    const whose = state.stage < 0 && worst[column] >= 0
      ? `rank ${whole(heat.rank[worst[column] * numColumns + column])} in step ${whole(heat.step[worst[column] * numColumns + column])}:` : "longest:";
    return [whose, ...told.map(([each, stage]) => `${stage} ${duration(each)}`), `mean of all ranks ${duration(data.series.wait.mean[column])}`].join("\n");
  });
}
function lines(svg, box, values, kind, colour = null) {
  let path = "", pen = false;
  values.forEach((value, column) => {
    if (value == null) { pen = false; return; }
    const begins = column && axis.start[column] !== axis.start[column - 1];
    const x = (xOf(box, column) + xOf(box, column + 1)) / 2;
    path += `${pen && !begins ? "L" : "M"}${x.toFixed(2)} ${box.y(value).toFixed(2)}`;
    if (!pen || begins) path += "h.01";
    pen = true;
  });
  const drawn = node(svg, "path", { class: "mean", d: path, "stroke-linecap": "round" });
  if (colour) drawn.style.stroke = colour;
  if (kind === "extreme") { drawn.style.opacity = 0.55; drawn.style.strokeWidth = 1; drawn.style.strokeDasharray = "2 2"; }
}
function drawSeries(id, entries, format, label, floor = 0) {
  const holder = byId(id), every = entries.flatMap(({ series }) => [...series.mean, ...series.extreme]).filter((each) => each != null);
  if (!every.length) { holder.replaceChildren(); html(holder, "p", "Nothing of this was measured.", { class: "note" }); return; }
  const high = Math.max(...every);
  const [svg, box] = base(holder, 170, high > floor ? high * 1.05 : floor + 1, floor, format, label);
  for (const { series, colour } of entries) {
    if (series.extreme.some((each, i) => each !== series.mean[i])) lines(svg, box, series.extreme, "extreme", css(colour));
    lines(svg, box, series.mean, "mean", css(colour));
  }
  resumes(svg, box);
  withCursor(holder, svg, box, (column) => entries.map(({ name, series, extreme }) =>
    `${name} ${format(series.mean[column])}` + (series.extreme[column] !== series.mean[column] ? `, ${extreme} ${format(series.extreme[column])}` : "")).join("\n"));
  const legend = html(holder, "div", "", { class: "legend" });
  for (const { name, series, colour, extreme } of entries) {
    const item = html(legend, "span", "");
    html(item, "i", "", { class: "chip" }).style.background = css(colour);
    item.append(series.extreme.some((each, i) => each !== series.mean[i]) ? `${name} (dashed: ${extreme})` : name);
  }
}

function heatColour(share, stops) {
  const at = Math.sqrt(Math.min(Math.max(share, 0), 1)) * (stops.length - 1), low = Math.min(Math.floor(at), stops.length - 2);
  return `rgb(${stops[low].map((each, i) => Math.round(each + (stops[low + 1][i] - each) * (at - low))).join(" ")})`;
}
const heatStops = () => [0, 1, 2, 3, 4].map((i) => css(`--heat${i}`).match(/[0-9a-f]{2}/gi).map((each) => parseInt(each, 16)));
const heatValue = (row, column) => state.stage < 0 ? heat.total[row * numColumns + column] : heat.byStage[momentAt(row, column) + state.stage];
function rowOrder() {
  const order = Array.from({ length: numRows }, (_, row) => row);
  if (!state.sorted) return order;
  const load = order.map((row) => axis.first.reduce((total, _, column) => total + (heatValue(row, column) || 0), 0));
  return order.sort((a, b) => load[b] - load[a]);
}
let heatBox = null;
function drawHeat() {
  const holder = byId("heat"), box = frame(holder), tall = numRows <= 12 ? 24 : numRows <= 32 ? 15 : 11;
  const order = rowOrder(), height = numRows * tall + 4, dots = devicePixelRatio || 1;
  heatBox = { ...box, tall, order };
  holder.replaceChildren();
  const canvas = html(holder, "canvas", "");
  canvas.width = box.width * dots; canvas.height = height * dots; canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(dots, dots);
  let high = 0;
  for (let row = 0; row < numRows; row++) for (let column = 0; column < numColumns; column++) high = Math.max(high, heatValue(row, column) || 0);
  const stops = heatStops(), idle = css("--idle");
  order.forEach((row, place) => {
    const y = topOf(place);
    for (let column = 0; column < numColumns; column++) {
      const value = heatValue(row, column), x = Math.round(xOf(box, column));
      if (Number.isNaN(value)) continue; // this rank was not there
      pen.fillStyle = value > 0 ? heatColour(value / (high || 1), stops) : idle;
      pen.fillRect(x, y, Math.max(Math.round(xOf(box, column + 1)) - x - (xOf(box, 1) - xOf(box, 0) > 6 ? 1 : 0), 1), tall - 1);
    }
    pen.fillStyle = rows.marked[row] ? css("--bad") : css("--soft");
    pen.font = `${rows.marked[row] ? "700 " : ""}${Math.min(tall - 1, 12)}px system-ui, sans-serif`;
    pen.textAlign = "right"; pen.textBaseline = "middle";
    const name = rows.stop[row] - rows.first[row] === 1 ? `${rows.first[row]}` : `${rows.first[row]}–${rows.stop[row] - 1}`;
    pen.fillText((rows.marked[row] ? "▸ " : "") + name, box.left - 8, y + tall / 2);
  });
  pen.strokeStyle = css("--mark"); pen.setLineDash([3, 3]);
  for (let column = 1; column < numColumns; column++) if (axis.start[column] !== axis.start[column - 1]) {
    const x = Math.round(xOf(box, column)) - 0.5;
    pen.beginPath(); pen.moveTo(x, 0); pen.lineTo(x, height); pen.stroke();
  }
  const mark = html(holder, "div", ""), outline = html(holder, "div", "");
  mark.style.cssText = `position:absolute;top:0;height:${height}px;pointer-events:none;outline:2px solid ${css("--accent")};border-radius:2px`;
  outline.style.cssText = `position:absolute;pointer-events:none;border:1.5px solid ${css("--accent")};left:${box.left}px;right:${box.right}px;height:${tall}px;display:none`;
  cursors.push((column) => { mark.style.left = `${xOf(box, column)}px`; mark.style.width = `${Math.max(xOf(box, column + 1) - xOf(box, column), 2)}px`; });
  heatBox.outline = outline;
  const stage = state.stage < 0 ? "all stages together" : stages[state.stage];
  byId("heat-title").textContent = `Longest wait of a step by rank, ${stage}`;
  drawScale(high, stops);
}
const topOf = (place) => place * heatBox.tall + 2;
function drawScale(high, stops) {
  const scale = byId("scale");
  scale.replaceChildren();
  html(scale, "span", "0");
  const colours = Array.from({ length: 11 }, (_, i) => heatColour((i / 10) ** 2, stops));
  html(scale, "span", "", { class: "bar" }).style.background = `linear-gradient(90deg, ${colours.join(", ")})`;
  html(scale, "span", `${duration(high)}; half way: ${duration(high / 4)}`);
}
function heatAt(event) {
  const place = event.target.getBoundingClientRect();
  const column = columnAt(heatBox, event.clientX - place.left), y = event.clientY - place.top;
  const at = heatBox.order.findIndex((_, i) => y >= topOf(i) && y < topOf(i) + heatBox.tall);
  return [at < 0 ? -1 : heatBox.order[at], column];
}
function heatText(row, column) {
  const cell = row * numColumns + column;
  if (Number.isNaN(heat.total[cell])) return `${rowName(row)}, ${stepsOf(column)}\nnot there`;
  const told = stages.map((stage, k) => [heat.byStage[momentAt(row, column) + k], stage]).filter(([each]) => each > 5e-7).sort((a, b) => b[0] - a[0]);
  const one = rows.stop[row] - rows.first[row] === 1 && axis.stop[column] - axis.first[column] === 1;
  const head = one ? `${rowName(row)}, ${stepsOf(column)}: ${duration(heat.total[cell])}`
    : `${rowName(row)}, ${stepsOf(column)}\nlongest: rank ${whole(heat.rank[cell])}, step ${whole(heat.step[cell])}: ${duration(heat.total[cell])}`;
  return [head, ...told.slice(0, 5).map(([each, stage]) => `${one ? "" : "longest "}${stage} ${duration(each)}`)].join("\n");
}

function drawMoment() {
  const holder = byId("picture"), column = state.column, box = { ...frame(holder), top: 34 };
  const there = Array.from({ length: numRows }, (_, row) => row).filter((row) => moments.rank[row * numColumns + column] >= 0);
  const tall = there.length <= 12 ? 26 : there.length <= 32 ? 16 : 12, height = box.top + there.length * tall + 8;
  const of = (values, row) => values[row * numColumns + column], span = (values, row) => sum(values, momentAt(row, column), numStages);
  const took = (row) => of(moments.seconds, row) || span(moments.wait, row); // how long a start's last step trained is not known
  const longest = Math.max(...there.map((row) => of(moments.begin, row) + took(row)), 1e-6);
  const work = Math.max(...there.map((row) => span(moments.work, row)), 1e-6);
  const room = box.width - box.left - box.right, loop = room * 0.64, aside = box.left + room * 0.7, wide = room * 0.3;
  holder.replaceChildren();
  const svg = node(holder, "svg", { viewBox: `0 0 ${box.width} ${height}`, height, role: "img", "aria-label": "ranks over the time of one step" });
  const scale = (left, width, most, name) => {
    node(svg, "text", { class: "strong", x: left, y: 9 }, name);
    for (const value of ticks(0, most, Math.max(2, width / 150)).slice(1)) {
      const x = left + width * value / most;
      node(svg, "line", { class: "grid", x1: x, x2: x, y1: box.top - 2, y2: height - 6 });
      if (x - left > 40) node(svg, "text", { x, y: 24, "text-anchor": "end" }, duration(value));
    }
  };
  scale(box.left, loop, longest, "training loop");
  scale(aside, wide, work, "made ahead");
  there.forEach((row, place) => {
    const y = box.top + place * tall, rank = of(moments.rank, row), at = momentAt(row, column);
    node(svg, "text", { x: box.left - 8, y: y + tall / 2 + 3, "text-anchor": "end", class: rows.marked[row] ? "strong" : "" }, (rows.marked[row] ? "▸ " : "") + rank);
    const group = node(svg, "g", {});
    const bars = (left, per, values, end) => {
      let x = left;
      for (let k = 0; k < numStages; k++) {
        const length = (values[at + k] || 0) * per;
        if (length > 0.05) node(group, "rect", { x, y: y + 1, width: length, height: tall - 3, fill: colourOf(stages[k]) });
        x += length;
      }
      if (end > x + 0.1) node(group, "rect", { x, y: y + 1, width: end - x, height: tall - 3, fill: css("--rest") });
    };
    const left = box.left + loop * of(moments.begin, row) / longest;
    bars(left, loop / longest, moments.wait, left + loop * took(row) / longest);
    bars(aside, wide / work, moments.work, 0);
    node(group, "rect", { x: box.left, y, width: room, height: tall, fill: "transparent" });
    group.addEventListener("pointermove", (event) => showTip(momentText(row, column), event));
    group.addEventListener("pointerleave", () => showTip(""));
  });
  momentTable(there, column);
}
function momentText(row, column) {
  const at = momentAt(row, column), cell = row * numColumns + column;
  const told = (values, word) => stages.map((stage, k) => [values[at + k], stage]).filter(([each]) => each > 5e-7).map(([each, stage]) => `${word} ${stage} ${duration(each)}`);
  const more = rows.stop[row] - rows.first[row] === 1 ? "" : ` (waited longest of ${rowName(row)})`;
  return [`rank ${whole(moments.rank[cell])}${more}: ${duration(moments.seconds[cell])}`, ...told(moments.wait, "waited:"), ...told(moments.work, "made ahead:")].join("\n");
}
function momentTable(there, column) {
  const holder = byId("moment-table"), table = document.createElement("table"), head = html(html(table, "thead"), "tr"), body = html(table, "tbody");
  const used = stages.map((_, k) => k).filter((k) => there.some((row) => moments.wait[momentAt(row, column) + k] > 0));
  for (const word of ["rank", "began after", "took", ...used.map((k) => `waited: ${stages[k]}`), "made ahead"]) html(head, "th", word, { scope: "col" });
  for (const row of there) {
    const cell = row * numColumns + column, at = momentAt(row, column), line = html(body, "tr", "", rows.marked[row] ? { class: "marked" } : {});
    const values = [moments.begin[cell], moments.seconds[cell], ...used.map((k) => moments.wait[at + k]), sum(moments.work, at, numStages)];
    html(line, "td", whole(moments.rank[cell]));
    for (const value of values) html(line, "td", duration(value));
  }
  holder.replaceChildren(table);
}

// -- choosing ------------------------------------------------------------------------------------------

function choose(column) {
  state.column = Math.min(Math.max(column, 0), numColumns - 1);
  const now = state.column, of = axis.stop[now] - axis.first[now] === 1 ? "" : `, the longest wait of ${stepsOf(now)}`;
  const start = data.starts[axis.start[now]], step = `Step ${whole(axis.moment[now])}${of}`;
  byId("column").value = now;
  byId("column").setAttribute("aria-valuetext", step);
  byId("chosen").textContent = [step, clock(data.series.time[now]), start && start.layout, `longest wait ${duration(heat.total[worst[now] * numColumns + now])}`].filter(Boolean).join(" · ");
  byId("moment-title").textContent = `${step}. Left, each rank's loop from the moment the first asked for the step: coloured where it waited, grey where it then trained. `
    + `Right, the seconds that its reading thread worked for this step, most of them earlier.`;
  for (const move of cursors) move(now);
  drawMoment();
}
function legendOf(holder) {
  holder.replaceChildren();
  for (const [name, colour] of [...stages.map((stage) => [stage, colourOf(stage)]), ["in the trainer", css("--rest")]]) {
    const item = html(holder, "span", "");
    html(item, "i", "", { class: "chip" }).style.background = colour;
    item.append(name);
  }
}
function drawStages() {
  const holder = byId("stages"), had = holder.contains(document.activeElement);
  holder.replaceChildren();
  ["all stages", ...stages].forEach((name, i) => {
    const on = state.stage === i - 1;
    const button = html(holder, "button", "", { type: "button", role: "radio", "aria-checked": on, tabindex: on ? 0 : -1 });
    if (i) html(button, "i", "", { class: "chip" }).style.background = colourOf(name);
    button.append(name);
    button.addEventListener("click", () => { state.stage = i - 1; drawAll(); });
    if (had && on) button.focus();
  });
}
function drawAll() {
  cursors.length = 0;
  drawStages(); drawWaits(); drawHeat(); legendOf(byId("moment-legend"));
  const { series } = data, entry = (name, key, colour, extreme = "largest") => ({ name, series: series[key], colour, extreme });
  drawSeries("chart-traffic", [entry("read", "read", "--read"), entry("fetched from remote storage", "fetched", "--exchange"), entry("between ranks", "delivered", "--deliver")]
    .filter(({ series }) => series.mean.some((each) => each)), rate, "bytes per second");
  if (series.decoded) drawSeries("chart-decoding", [entry("parts of all ranks", "decoded", "--decode")], (value) => value == null ? "–" : `${digits(value)}/s`, "parts decoded per second");
  if (byId("balance")) drawSeries("chart-padding", [entry("padding", "padding", "--build")], percent, "padding over steps");
  if (byId("balance")) drawSeries("chart-imbalance", [entry("imbalance", "imbalance", "--plan")], plain, "imbalance over steps", 1);
  drawSeries("chart-queue", [entry("ready ahead", "queue_depth", "--copy", "emptiest rank")], plain, "queue depth over steps");
  drawSeries("chart-step", [entry("a step", "step", "--mark")], (value) => value == null ? "–" : value ? duration(value) : "0", "time of a step");
  choose(state.column);
}
function begin() {
  byId("chooser").hidden = false;
  byId("column").max = numColumns - 1;
  byId("column").addEventListener("input", (event) => choose(Number(event.target.value)));
  byId("back").addEventListener("click", () => choose(state.column - 1));
  byId("on").addEventListener("click", () => choose(state.column + 1));
  const most = data.summary.longest ? data.summary.longest.step : -1; // of those that are not the first of a start
  const longest = () => choose(axis.first.findIndex((first, column) => first <= most && most < axis.stop[column]));
  byId("longest").addEventListener("click", longest);
  byId("sort").addEventListener("click", (event) => {
    state.sorted = !state.sorted;
    event.currentTarget.setAttribute("aria-pressed", state.sorted);
    drawAll();
  });
  const map = byId("heat");
  map.addEventListener("pointermove", (event) => { const [row, column] = heatAt(event); showTip(row < 0 || column < 0 ? "" : heatText(row, column), event); });
  map.addEventListener("pointerleave", () => showTip(""));
  map.addEventListener("click", (event) => { const [, column] = heatAt(event); if (column >= 0) choose(column); });
  map.addEventListener("blur", () => { heatBox.outline.style.display = "none"; showTip(""); });
  map.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!by) return;
    event.preventDefault();
    choose(state.column + by[0]);
    state.row = Math.min(Math.max(state.row + by[1], 0), numRows - 1);
    const place = map.getBoundingClientRect(), y = topOf(state.row);
    Object.assign(heatBox.outline.style, { display: "block", top: `${y}px` });
    showTip(heatText(heatBox.order[state.row], state.column), { clientX: place.left + xOf(heatBox, state.column), clientY: Math.min(place.top + y, innerHeight - 120) });
  });
  byId("stages").addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    state.stage = (state.stage + 1 + by + numStages + 1) % (numStages + 1) - 1;
    drawAll();
  });
  let width = 0;
  new ResizeObserver(() => { if (byId("heat").clientWidth !== width) { width = byId("heat").clientWidth; drawAll(); } }).observe(document.body);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  drawAll();
  longest();
}
if (numColumns && numRows) begin();
