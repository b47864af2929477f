// Figure 1: the training loss, with a mark at every split.

function splitRows(cliff) {
  const rows = [["neurons split or added", whole(cliff.neurons)]];
  rows.push(["loss before", short(cliff.before)], ["loss after", short(cliff.after)]);
  rows.push(["change measured", signed(cliff.measured)], ["change predicted", signed(cliff.predicted)]);
  if (known(cliff.step)) rows.push([cliff.relative ? "step, of a neuron's length" : "step", short(cliff.step)]);
  return rows;
}

const splitName = (run, cliff) =>
  (data.runs.length > 1 ? `${data.runs[run].label}: ` : "") + `split after phase ${cliff.phase}`;

// All cliffs that can be drawn, as [run, cliff].
const cliffsOf = (curves) =>
  curves.flatMap((curve, run) => curve.cliffs.filter((c) => known(c.x)).map((c) => [run, c]));

function lossView(curves, runs, zoom) {
  const shown = (x) => !zoom || (x >= zoom[0] && x <= zoom[1]);
  const xs = [], ys = [];
  for (const run of runs) {
    for (const s of curves[run].segments) {
      s.x.forEach((x, k) => { if (shown(x)) { xs.push(x); ys.push(s.low[k], s.high[k]); } });
    }
    for (const c of curves[run].cliffs) {
      if (known(c.x) && shown(c.x)) { xs.push(c.x); ys.push(...[c.before, c.after].filter(known)); }
    }
  }
  return { xs: zoom || xs, ys, shown };
}

function lossLine(root, segment, run, x, y, shown, marks) {
  const at = segment.x.map((v, k) => k).filter((k) => shown(segment.x[k]));
  if (!at.length) return;
  const point = (k, values) => `${x.at(segment.x[k]).toFixed(1)},${y.at(values[k]).toFixed(1)}`;
  const around = [...at.map((k) => point(k, segment.high)), ...at.map((k) => point(k, segment.low)).reverse()];
  root.append(svg("polygon", { class: `spread ${colour(run)}`, points: around.join(" ") }));
  const points = at.map((k) => point(k, segment.mean)).join(" ");
  if (at.length === 1) root.append(marker(run, x.at(segment.x[at[0]]), y.at(segment.mean[at[0]]), 3));
  root.append(svg("polyline", { class: `curve ${colour(run)}`, points }));
  for (const k of at) {
    const px = x.at(segment.x[k]), py = y.at(segment.mean[k]);
    const rows = [["training loss", short(segment.mean[k])]];
    if (segment.high[k] > segment.low[k]) rows.push(["from … to", `${short(segment.low[k])} … ${short(segment.high[k])}`]);
    const title = (data.runs.length > 1 ? `${data.runs[run].label}: ` : "") + `iteration ${whole(Math.round(segment.x[k]))}`;
    marks.push({ x0: px, x1: px, y0: py, y1: py, title, rows, behind: 8, mute: true });
  }
}

// The marker of the run where its curve ends, for those who do not see its colour.
function lossEnd(root, curve, run, x, y, shown) {
  const ends = curve.segments.flatMap((s) => s.x.map((v, k) => [v, s.mean[k]])).filter(([v]) => shown(v));
  const end = ends[ends.length - 1];
  if (end) root.append(marker(run, x.at(end[0]), y.at(end[1])));
}

function lossCliff(root, run, cliff, area, x, y, marks) {
  const px = x.at(cliff.x), name = data.runs.length > 1 ? colour(run) : "cliff";
  const parts = [svg("line", { class: `rule split ${name}`, x1: px, x2: px, y1: area.top, y2: area.bottom })];
  const ys = [cliff.before, cliff.after].filter(known).map(y.at);
  if (ys.length === 2) parts.push(svg("line", { class: `drop ${name}`, x1: px, x2: px, y1: ys[0], y2: ys[1] }));
  if (known(cliff.before)) parts.push(svg("circle", { class: `before ${name}`, cx: px, cy: y.at(cliff.before), r: 4 }));
  if (known(cliff.after)) parts.push(svg("polygon", { class: `after ${name}`, points: polygon(px, y.at(cliff.after), 6.5, 3, Math.PI) }));
  root.append(...parts);
  const alone = data.runs.length === 1 || !ys.length;
  const [y0, y1] = alone ? [area.top, area.bottom] : [Math.min(...ys), Math.max(...ys)];
  marks.push({ x0: px, x1: px, y0, y1, title: splitName(run, cliff), rows: splitRows(cliff), parts });
}

// The change of loss above each mark, as far as there is room.
function cliffLabels(root, cliffs, area, x) {
  let taken = -Infinity;
  for (const [, cliff] of cliffs) {
    const text = known(cliff.measured) ? signed(Number(cliff.measured.toPrecision(2))) : "split";
    const half = textWidth(text) / 2, at = Math.min(x.at(cliff.x), area.right - half);
    if (at - half < taken + 8) continue;
    taken = at + half;
    root.append(svg("text", { class: "name", x: at, y: area.top - 6, "text-anchor": "middle" }, text));
  }
}

function zoomOf(figure, state) {
  if (!state.zoom) return null;
  const [run, cliff] = cliffsOf(figure.curves)[state.zoom - 1];
  const ends = figure.curves[run].segments.map((s) => s.x[s.x.length - 1] - s.x[0]);
  const room = Math.max(3 * figure.curves[run].each, Math.max(...ends, 0) / 6);
  return [cliff.x - room, cliff.x + room];
}

function lossPlot(box, figure, state) {
  const zoomed = state.zoom ? [cliffsOf(figure.curves)[state.zoom - 1][0]] : null;
  const runs = zoomed || visible(), width = box.clientWidth, height = Math.min(420, Math.max(260, width * 0.42));
  const view = lossView(figure.curves, runs, zoomOf(figure, state));
  if (!view.ys.length) {
    const why = runs.length ? "No training loss was logged: call phase.log(loss) in train()." : "All runs are hidden.";
    return box.append(html("p", { class: "empty" }, why));
  }
  const area = { top: 42, right: width - 14, bottom: height - 46 };
  const y = scaleOf(view.ys, area.bottom, area.top, { wide: 30, pad: 0.06 });
  area.left = gutter(y.ticks);
  const x = scaleOf(view.xs, area.left, area.right, { wide: Infinity, pad: 0.015, about: width / 110, whole: true });
  const root = canvas(box, width, height, figure.finding), marks = [];
  frame(root, area, x, y, "iteration", "training loss");
  for (const run of runs) for (const s of figure.curves[run].segments) lossLine(root, s, run, x, y, view.shown, marks);
  const cliffs = cliffsOf(figure.curves).filter(([run, c]) => runs.includes(run) && view.shown(c.x));
  if (data.runs.length > 1 && !zoomed) for (const run of runs) lossEnd(root, figure.curves[run], run, x, y, view.shown);
  for (const [run, cliff] of cliffs) lossCliff(root, run, cliff, area, x, y, marks);
  if (runs.length === 1) cliffLabels(root, cliffs, area, x);
  pointable(root, marks);
}

function lossNote(figure) {
  const notes = [];
  const each = Math.max(...figure.curves.map((c) => c.each));
  if (each > 1) notes.push(`Up to ${each} iterations are put together in one point: the line is their mean, the band reaches from the smallest to the largest.`);
  const missing = figure.curves.reduce((sum, c) => sum + c.missing, 0);
  if (missing) notes.push(`Left out: ${plural(missing, "iteration")} whose loss was not a number.`);
  return notes.join(" ");
}

function lossFigure(section, state) {
  const figure = data.loss, cliffs = cliffsOf(figure.curves);
  heading(section, figure.finding);
  if (figure.curves.some((c) => c.segments.length)) legend(section);
  if (cliffs.length) {
    const options = ["the whole run", ...cliffs.map(([run, c]) => splitName(run, c))];
    controls(section, choice("Show", options, state.zoom || 0, (zoom) => { state.zoom = zoom; redraw(section); }));
  }
  lossPlot(plot(section), figure, state);
  note(section, lossNote(figure));
  const rows = figure.curves.flatMap((curve, run) => curve.cliffs.map((c) => [
    data.runs[run].label, whole(c.phase), whole(c.x), whole(c.neurons), short(c.before), short(c.after), signed(c.measured), signed(c.predicted)]));
  if (rows.length) section.append(numbers(["run", "after phase", "iteration", "neurons", "loss before", "loss after", "measured", "predicted"], rows));
}
