// Figure 2: the width of every layer, built up phase by phase.

function shade(phase, phases) {
  const part = phases > 2 ? Math.round((100 * (phase - 1)) / (phases - 2)) : 40;
  return `color-mix(in oklab, var(--late) ${part}%, var(--early))`;
}

// The parts of a layer's bar: [index of the phase, width before, width after].
function growthOf(layer) {
  const parts = [];
  let before = 0;
  layer.widths.forEach((width, index) => {
    if (!known(width)) return;
    if (width > before || !parts.length) parts.push([index, before, width]);
    before = Math.max(before, width);
  });
  return parts;
}

function widthBar(root, layer, figure, y, x, marks) {
  for (const [index, before, after] of growthOf(layer)) {
    const x0 = x.at(before), x1 = x.at(after), first = before === 0;
    const bar = svg("rect", { class: first ? "bar seed" : "bar", x: x0, y, width: Math.max(1.5, x1 - x0), height: 16 });
    if (!first) bar.style.fill = shade(index, figure.phases.length);
    root.append(bar);
    const rows = first ? [["width", whole(after)]] : [["neurons added", whole(after - before)], ["width", `${whole(before)} → ${whole(after)}`]];
    const title = first ? `${layer.name}, phase ${figure.phases[index]}` : `${layer.name}, split after phase ${figure.phases[index - 1]}`;
    marks.push({ x0, x1, y0: y, y1: y + 16, title, rows, parts: [bar] });
  }
}

// How many parts all the lists begin with, leaving each at least one.
function shared(lists) {
  const most = Math.min(...lists.map((parts) => parts.length)) - 1;
  let same = 0;
  while (same < most && lists.every((parts) => parts[same] === lists[0][same])) same += 1;
  return same;
}

// Names that do not fit lose what they all begin and end with: it does not tell them apart.
function layerNames(layers, width) {
  const names = layers.map((layer) => layer.name);
  if (names.length < 2 || names.every((name) => textWidth(name) <= width)) return names;
  const head = shared(names.map((name) => name.split(".")));
  const rests = names.map((name) => name.split(".").slice(head));
  const tail = shared(rests.map((parts) => [...parts].reverse()));
  const inner = (parts) => parts.slice(0, parts.length - tail).join(".");
  return rests.map((parts) => (head ? "…" : "") + inner(parts) + (tail ? "…" : ""));
}

function widthPlot(box, figure) {
  const width = box.clientWidth, row = 24;
  const names = layerNames(figure.layers, width * 0.36 - 10);
  const left = Math.min(width * 0.36, Math.max(60, ...names.map(textWidth)) + 10);
  const most = Math.max(1, ...figure.layers.flatMap((layer) => layer.widths.filter(known)));
  const right = width - textWidth(whole(most)) - 14, bottom = 8 + row * figure.layers.length;
  const x = scaleOf([0, most], left, right, { wide: Infinity, pad: 0, about: width / 90, whole: true });
  const root = canvas(box, width, bottom + 46, figure.finding), marks = [];
  for (const tick of x.ticks) {
    root.append(svg("line", { class: "gridline", x1: x.at(tick), x2: x.at(tick), y1: 0, y2: bottom }));
    root.append(svg("text", { x: x.at(tick), y: bottom + 16, "text-anchor": "middle" }, tickText(tick)));
  }
  figure.layers.forEach((layer, index) => {
    const y = 6 + row * index, last = Math.max(0, ...layer.widths.filter(known));
    root.append(svg("text", { class: "name", x: left - 8, y: y + 12, "text-anchor": "end" }, fitted(names[index], left - 10)));
    widthBar(root, layer, figure, y, x, marks);
    root.append(svg("text", { class: "name", x: x.at(last) + 6, y: y + 12 }, whole(last)));
  });
  root.append(svg("text", { class: "x-name", x: (left + right) / 2, y: bottom + 38, "text-anchor": "middle" }, "width of the layer (neurons)"));
  pointable(root, marks);
}

function widthKey(figure) {
  const box = html("div", { class: "steps" }, html("span", {}, html("i", { class: "seed" }), "at the start"));
  if (figure.phases.length < 2) return box;
  const text = figure.phases.length === 2 ? "added by the split" : "added, early to late";
  const ramp = html("i", { class: figure.phases.length === 2 ? "" : "ramp" });
  if (figure.phases.length === 2) ramp.style.background = shade(1, 2);
  box.append(html("span", {}, ramp, text));
  return box;
}

function widthFigure(section, state) {
  const figure = data.widths[state.run || 0];
  heading(section, figure.finding);
  controls(section, runChoice(section, state), figure.layers.length ? widthKey(figure) : null);
  const box = plot(section);
  if (!figure.layers.length) return box.append(html("p", { class: "empty" }, "The history names no layer that can be split."));
  widthPlot(box, figure);
  const rows = figure.layers.map((layer) => [layer.name, ...layer.widths.map(whole)]);
  section.append(numbers(["layer", ...figure.phases.map((p) => `phase ${p}`)], rows));
}
