// Figure 4: predicted against measured gain. Figure 5: a metric against the size.

function forecastPlot(box, figure, points) {
  const width = box.clientWidth, height = Math.min(width, 520);
  const values = points.flatMap((p) => [p.predicted, p.measured]);
  const low = Math.min(...values) / 1.6, high = Math.max(...values) * 1.6;
  const area = { top: 26, right: width - 16, bottom: height - 46, left: 64 };
  const about = Math.min(6, width / 80);
  const y = scaleOf([low, high], area.bottom, area.top, { wide: 1, pad: 0, about });
  const x = scaleOf([low, high], area.left, area.right, { wide: 1, pad: 0, about });
  const root = canvas(box, width, height, figure.finding), marks = [];
  const edge = [[low, low], [low, low * figure.close], [high / figure.close, high], [high, high], [high, high / figure.close], [low * figure.close, low]];
  root.append(svg("polygon", { class: "close", points: edge.map(([a, b]) => `${x.at(a)},${y.at(b)}`).join(" ") }));
  frame(root, area, x, y, "predicted gain", "measured gain");
  root.append(svg("line", { class: "ideal", x1: x.at(low), y1: y.at(low), x2: x.at(high), y2: y.at(high) }));
  for (const p of points) {
    const dot = marker(p.run, x.at(p.predicted), y.at(p.measured));
    root.append(dot);
    const rows = [["predicted gain", short(p.predicted)], ["measured gain", short(p.measured)], ["measured / predicted", short(p.measured / p.predicted)], ["neurons split or added", whole(p.neurons)]];
    marks.push({ x0: x.at(p.predicted), x1: x.at(p.predicted), y0: y.at(p.measured), y1: y.at(p.measured), title: splitName(p.run, p), rows, parts: [dot] });
  }
  pointable(root, marks);
}

function forecastFigure(section) {
  const figure = data.forecast, shown = visible();
  const points = figure.points.filter((p) => shown.includes(p.run));
  heading(section, figure.finding);
  if (figure.points.length) legend(section);
  const beside = html("div", { class: "beside" });
  section.append(beside);
  const box = plot(beside, points.length ? "square" : "");
  if (points.length) {
    forecastPlot(box, figure, points);
    note(box, `Line: measured = predicted. Shaded: within a factor of ${figure.close}. ${figure.left_out}`);
  } else {
    const why = figure.points.length ? "All runs with splits are hidden." : figure.left_out || "No split has been made yet, so there is nothing to compare.";
    box.append(html("p", { class: "empty" }, why));
  }
  const rows = figure.points.map((p) => [data.runs[p.run].label, whole(p.phase), short(p.predicted), short(p.measured), short(p.measured / p.predicted)]);
  if (!rows.length) return;
  const one = data.runs.length === 1 ? 1 : 0; // a column with one name says nothing
  const table = numbers(["run", "after phase", "predicted", "measured", "ratio"].slice(one), rows.map((row) => row.slice(one)));
  if (section.clientWidth > 900) table.open = true;
  beside.append(table);
}

const COSTS = [["params", "parameters"], ["macs", "MACs"]];

function tradeoffPlot(box, metric, cost, name) {
  const runs = visible().filter((run) => metric.runs[run].some((p) => known(p[cost])));
  const points = runs.flatMap((run) => metric.runs[run].filter((p) => known(p[cost])));
  if (!points.length) return box.append(html("p", { class: "empty" }, `No ${name} to show.`));
  const width = box.clientWidth, height = Math.min(400, Math.max(270, width * 0.72));
  const area = { top: 28, right: width - 16, bottom: height - 46 };
  const y = scaleOf(points.map((p) => p.value), area.bottom, area.top, { wide: 50, pad: 0.08 });
  area.left = gutter(y.ticks);
  const x = scaleOf(points.map((p) => p[cost]), area.left, area.right, { wide: 6, pad: 0.06, about: width / 75 });
  const root = canvas(box, width, height, `${metric.name} against ${name}`), marks = [];
  frame(root, area, x, y, name, metric.name);
  for (const run of runs) {
    const own = metric.runs[run].filter((p) => known(p[cost])).map((p) => [x.at(p[cost]), y.at(p.value), p]);
    root.append(svg("polyline", { class: `joint ${colour(run)}`, points: own.map(([a, b]) => `${a},${b}`).join(" ") }));
    for (const [px, py, p] of own) {
      const dot = marker(run, px, py);
      root.append(dot);
      const rows = [[metric.name, short(p.value)], ["parameters", whole(p.params)], ["MACs", whole(p.macs)]];
      marks.push({ x0: px, x1: px, y0: py, y1: py, title: `${data.runs[run].label}, phase ${p.phase}`, rows, parts: [dot] });
    }
  }
  pointable(root, marks);
}

function tradeoffFigure(section, state) {
  const metric = data.tradeoff[state.metric || 0];
  heading(section, metric ? metric.finding : "No metric was recorded");
  if (!metric) return plot(section).append(html("p", { class: "empty" }, "Neither a metric nor a loss was recorded: give grow() an evaluate function."));
  legend(section);
  const names = data.tradeoff.map((m) => m.name);
  if (names.length > 1) controls(section, choice("Metric", names, state.metric || 0, (k) => { state.metric = k; redraw(section); }));
  const grid = html("div", { class: "plots" }, ...COSTS.map(() => html("div", { class: "plot" })));
  section.append(grid);
  COSTS.forEach(([cost, name], index) => tradeoffPlot(grid.children[index], metric, cost, name));
  const rows = metric.runs.flatMap((points, run) => points.map((p) => [data.runs[run].label, whole(p.phase), whole(p.params), whole(p.macs), short(p.value)]));
  section.append(numbers(["run", "phase", "parameters", "MACs", metric.name], rows));
}
