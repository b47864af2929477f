// Scales, axes, markers, and what happens when a mark is pointed at.

function linearTicks(low, high, about) {
  const rough = (high - low) / Math.max(1, about);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((f) => f * power).find((s) => s >= rough * 0.999);
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k += 1) {
    ticks.push(Number((k * step).toPrecision(12)));
  }
  return ticks;
}

function logTicks(low, high, about) {
  const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high));
  const within = (v) => v >= low * 0.9999 && v <= high * 1.0001;
  for (const factors of [[1, 2, 3, 5, 7], [1, 2, 5], [1, 3], [1]]) {
    const ticks = [];
    for (let e = from; e <= to; e += 1) {
      ticks.push(...factors.map((f) => Number(`${f}e${e}`)).filter(within));
    }
    if (ticks.length <= about + 1 && ticks.length >= 2) return ticks;
    if (factors.length === 1 && ticks.length > about) {
      const every = Math.ceil(ticks.length / about);
      return ticks.filter((_, index) => index % every === 0);
    }
  }
  return linearTicks(low, high, about).filter((v) => v > 0);
}

// A scale over all values; logarithmic where they span more than `wide` times.
function scaleOf(values, from, to, { wide = 20, pad = 0.05, about = 6, whole = false } = {}) {
  let low = Math.min(...values), high = Math.max(...values);
  const log = low > 0 && high / low > wide;
  if (low === high) {
    const room = low === 0 ? 1 : Math.abs(low) * 0.1;
    low -= room; high += room;
  }
  const into = log ? Math.log10 : (v) => v, back = log ? (v) => 10 ** v : (v) => v;
  const room = (into(high) - into(low)) * pad;
  const start = into(low) - room, end = into(high) + room;
  const at = (v) => from + ((into(v) - start) / (end - start)) * (to - from);
  let ticks = (log ? logTicks : linearTicks)(back(start), back(end), about);
  if (whole) ticks = ticks.filter(Number.isInteger);
  return { at, ticks, log, low: back(start), high: back(end) };
}

// The frame of a plot: grid, ticks and the names of both axes.
function frame(root, area, x, y, xName, yName) {
  const { left, top, right, bottom } = area;
  const log = (scale) => (scale.log ? " (log scale)" : "");
  for (const tick of y.ticks) {
    const at = y.at(tick);
    root.append(svg("line", { class: "gridline", x1: left, x2: right, y1: at, y2: at }));
    root.append(svg("text", { x: left - 7, y: at + 4, "text-anchor": "end" }, tickText(tick)));
  }
  let taken = -Infinity;
  for (const tick of x.ticks) {
    const at = x.at(tick), text = tickText(tick), half = textWidth(text) / 2;
    root.append(svg("line", { class: "axis", x1: at, x2: at, y1: bottom, y2: bottom + 5 }));
    if (at - half < taken + 6) continue;
    taken = at + half;
    root.append(svg("text", { x: at, y: bottom + 19, "text-anchor": "middle" }, text));
  }
  root.append(svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
  const middle = (left + right) / 2;
  root.append(svg("text", { class: "x-name", x: middle, y: bottom + 38, "text-anchor": "middle" }, xName + log(x)));
  root.append(svg("text", { class: "y-name", x: 0, y: 12 }, fitted(yName + log(y), right)));
}

const gutter = (ticks) => Math.max(...ticks.map((tick) => textWidth(tickText(tick))), 10) + 12;

// Each run has a colour and a marker of its own; the ninth has the first colour, another marker.
const colour = (run) => `run-${run % 8}`;
const shift = (run) => (run + Math.floor(run / 8)) % 8;

function polygon(x, y, radius, corners, turn) {
  const points = [];
  for (let k = 0; k < corners; k += 1) {
    const angle = turn + (2 * Math.PI * k) / corners;
    points.push(`${(x + radius * Math.sin(angle)).toFixed(2)},${(y - radius * Math.cos(angle)).toFixed(2)}`);
  }
  return points.join(" ");
}

function marker(run, x, y, radius = 5.5) {
  const name = `marker ${colour(run)}`, kind = shift(run);
  if (kind === 0) return svg("circle", { class: name, cx: x, cy: y, r: radius });
  const [corners, turn] = [null, [4, Math.PI / 4], [3, 0], [4, 0], [3, Math.PI], [5, 0], [6, 0], [6, Math.PI / 6]][kind];
  return svg("polygon", { class: name, points: polygon(x, y, radius * 1.25, corners, turn) });
}

function key(run) {
  const line = svg("line", { class: `joint ${colour(run)}`, x1: 0, x2: 26, y1: 7, y2: 7 });
  return svg("svg", { width: 26, height: 14, "aria-hidden": "true" }, line, marker(run, 13, 7, 4.5));
}

// --- pointing ---------------------------------------------------------------------------------
// A mark is a box with words: {x0, y0, x1, y1, title, rows, parts, kin}. Mouse, tap and arrow keys
// all choose the nearest mark or the next one, so small marks are easy to hit.

const tip = document.getElementById("tip");
let lit = [];

function hideTip() {
  tip.hidden = true;
  for (const [element, name] of lit) element.classList.remove(name);
  lit = [];
}

function light(elements, name) {
  for (const element of elements || []) {
    element.classList.add(name);
    lit.push([element, name]);
  }
}

function showTip(mark, x, y) {
  hideTip();
  light(mark.kin && mark.kin(), "kin");
  light(mark.parts, "hot");
  const list = html("dl", {});
  for (const [name, value] of mark.rows) list.append(html("dt", {}, name), html("dd", {}, value));
  tip.replaceChildren(html("strong", {}, mark.title), list);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const page = document.documentElement.clientWidth;
  const within = (low, v, high) => Math.max(low, Math.min(v, high));
  const beside = page > 640; // where there is room, not above what is pointed at but next to it
  const right = x + 18 + width <= page - 8 ? x + 18 : x - 18 - width;
  const above = y - height - 16;
  const top = beside ? y - height / 2 : above >= 4 ? above : y + 20;
  tip.style.left = `${within(8, beside ? right : x - width / 2, page - width - 8)}px`;
  tip.style.top = `${within(4, top, innerHeight - height - 4)}px`;
}

const outside = (low, v, high) => Math.max(low - v, 0, v - high);

function nearest(marks, x, y, reach) {
  let best = null, least = reach;
  for (const mark of marks) {
    const far = Math.hypot(outside(mark.x0, x, mark.x1), outside(mark.y0, y, mark.y1));
    const distance = far + (mark.behind || 0);
    if (far < reach && distance < least) { best = mark; least = distance; }
  }
  return best;
}

function pointable(root, marks) {
  const place = (event) => {
    const box = root.getBoundingClientRect();
    const mark = nearest(marks, event.clientX - box.left, event.clientY - box.top, 22);
    if (mark) showTip(mark, event.clientX, event.clientY);
    else hideTip();
  };
  root.addEventListener("pointermove", (event) => { if (event.pointerType === "mouse") place(event); });
  root.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hideTip(); });
  root.addEventListener("click", (event) => { place(event); event.stopPropagation(); });
  withKeys(root, marks.filter((mark) => !mark.mute));
}

function withKeys(root, marks) {
  if (!marks.length) return;
  let at = -1;
  root.setAttribute("tabindex", 0);
  root.addEventListener("blur", hideTip);
  root.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") hideTip();
    if (!step) return;
    event.preventDefault();
    at = (at + step + marks.length + (at < 0 && step < 0 ? 1 : 0)) % marks.length;
    const mark = marks[at], scroller = root.closest(".tree");
    if (scroller) scroller.scrollTop = mark.y0 - scroller.clientHeight / 2;
    requestAnimationFrame(() => { // after the scrolling, which hides the words
      const box = root.getBoundingClientRect();
      showTip(mark, box.left + (mark.x0 + mark.x1) / 2, box.top + mark.y0);
    });
  });
}

function canvas(box, width, height, label) {
  const text = `${label}. The arrow keys step through the marks.`;
  const root = svg("svg", { width, height, role: "img", "aria-label": text });
  box.append(root);
  return root;
}
