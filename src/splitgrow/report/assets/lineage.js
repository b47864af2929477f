// Figure 3: the evolution tree of the neurons of one unit.

const ROWS = 36; // rows to begin with; the rest is behind a button

function neuronRows(node) {
  const alive = node.ended === null;
  const span = node.ended === node.born ? `phase ${node.born}` : `phase ${node.born} to ${node.ended}`;
  const rows = [["lives", alive ? `from phase ${node.born}` : span]];
  rows.push(["parent", known(node.parent) ? `#${node.parent}` : "none"]);
  if (!node.children.length) return rows;
  rows.push(["became", node.children.map((id) => `#${id}`).join(", ")]);
  rows.push(["λ (lambda)", short(node.lambda_)], ["step", short(node.step)]);
  rows.push(["gain predicted", known(node.predicted) ? short(-node.predicted) : MISSING]);
  return rows;
}

// The largest families that fit, and at least one.
function firstFamilies(tree, all) {
  if (all) return tree.families;
  let rows = 0;
  return tree.families.filter((family, index) => {
    if (index > 0 && rows + family.rows > ROWS) return false;
    rows += family.rows;
    return true;
  });
}

// The line of a neuron, from the fork of its parent to its own, and what pointing at it shows.
function drawNeuron(root, tree, node, at, drawn, marks) {
  const [x0, y] = [at.x(node.born), at.y(node.row)];
  const x1 = at.x(node.ended === null ? tree.phases : node.ended + 1);
  const from = at.rowOf.has(node.parent) ? at.y(at.rowOf.get(node.parent)) : y;
  const line = svg("path", { class: "life", d: `M${x0},${from}V${y}H${x1}` });
  const parts = [line];
  if (node.children.length) {
    const dot = svg("circle", { class: "fork", cx: x1, cy: y, r: at.radius(node) });
    parts.push(dot);
    drawn.forks.push(dot);
  } else if (at.labels) {
    root.append(svg("text", { x: x1 + 6, y: y + 4 }, `#${node.id}`));
  }
  root.append(line);
  drawn.lines.set(node.id, line);
  const kin = () => kinOf(node, at.nodes).map((id) => drawn.lines.get(id));
  marks.push({ x0, x1: node.children.length ? x1 : x1 + 30, y0: y, y1: y, title: `Neuron #${node.id} of ${tree.unit}`, rows: neuronRows(node), parts, kin });
}

function kinOf(node, nodes) {
  const kin = [];
  for (let up = node; up; up = nodes.get(up.parent)) kin.push(up.id);
  const below = [...node.children];
  while (below.length) {
    const id = below.pop();
    kin.push(id);
    below.push(...nodes.get(id).children);
  }
  return kin;
}

function drawFamily(root, tree, family, top, size, geometry, marks) {
  const nodes = new Map(family.nodes.map((node) => [node.id, node]));
  const rowOf = new Map(family.nodes.map((node) => [node.id, node.row]));
  const at = { ...geometry, nodes, rowOf, y: (row) => top + (row + 0.5) * size, labels: size >= 13 };
  const drawn = { lines: new Map(), forks: [] };
  for (const node of family.nodes) drawNeuron(root, tree, node, at, drawn, marks);
  root.append(...drawn.forks);
  const founder = nodes.get(family.founder);
  root.append(svg("text", { class: "name", x: geometry.x(founder.born) - 7, y: at.y(founder.row) + 4, "text-anchor": "end" }, `#${founder.id}`));
}

function drawQuiet(root, tree, group, y, geometry, marks) {
  const x0 = geometry.x(group.born), x1 = geometry.x(tree.phases);
  const line = svg("line", { class: "crowd", x1: x0, x2: x1, y1: y, y2: y });
  const text = `${plural(group.count, "neuron")} ${group.born ? `added in phase ${group.born}, ` : ""}never split`;
  root.append(line, svg("text", { class: "name", x: Math.min(x0, x1 - textWidth(text)), y: y - 7 }, text));
  const ids = group.ids.map((id) => `#${id}`).join(" ") + (group.count > group.ids.length ? " …" : "");
  marks.push({ x0, x1, y0: y - 14, y1: y, title: text, rows: [["ids", ids]], parts: [line] });
}

function treeHead(box, tree, width, x) {
  const root = svg("svg", { width, height: 40, class: "head", "aria-hidden": "true" });
  root.append(svg("text", { class: "x-name", x: x(0), y: 14 }, "phase"));
  const every = Math.ceil((textWidth(String(tree.phases)) + 8) / (x(1) - x(0)));
  for (let phase = 0; phase < tree.phases; phase += every) {
    root.append(svg("text", { x: (x(phase) + x(phase + 1)) / 2, y: 32, "text-anchor": "middle" }, String(phase)));
  }
  box.append(root);
}

function dotRadius(families) {
  const gains = families.flatMap((f) => f.nodes.map((n) => -n.predicted)).filter((gain) => gain > 0);
  const most = Math.max(...gains, 0);
  return (node) => (most && node.predicted < 0 ? 2.5 + 4 * Math.sqrt(-node.predicted / most) : 2.5);
}

function treePlot(box, tree, families) {
  const scroller = html("div", { class: "tree", tabindex: -1 });
  box.append(scroller);
  const rows = families.reduce((sum, family) => sum + family.rows, 0);
  const size = rows <= 150 ? 16 : rows <= 400 ? 13 : 8, gap = 8;
  const height = rows * size + families.length * gap + tree.quiet.length * 40 + 12;
  const width = box.clientWidth - 20;
  const x = (phase) => 46 + (phase / tree.phases) * (width - 46 - 48);
  treeHead(scroller, tree, width, x);
  const root = canvas(scroller, width, height, tree.finding), marks = [];
  for (let phase = 0; phase < tree.phases; phase += 2) {
    root.append(svg("rect", { class: "stripe", x: x(phase), y: 0, width: x(phase + 1) - x(phase), height }));
  }
  const geometry = { x, radius: dotRadius(families) };
  let top = 6;
  for (const family of families) {
    drawFamily(root, tree, family, top, size, geometry, marks);
    top += family.rows * size + gap;
  }
  for (const group of tree.quiet) drawQuiet(root, tree, group, (top += 40) - 14, geometry, marks);
  pointable(root, marks);
  scroller.addEventListener("scroll", hideTip, { passive: true });
}

function treeMore(section, tree, families, state) {
  const hidden = tree.families.length - families.length;
  const total = tree.families.length;
  if (!hidden && !(state.all && total > firstFamilies(tree, false).length)) return null;
  const text = hidden ? `Show all ${total} families` : "Show the largest families only";
  const button = html("button", { type: "button" }, text);
  button.addEventListener("click", () => { state.all = !state.all; redraw(section); });
  return button;
}

function treeFigure(section, state) {
  const trees = data.trees[state.run || 0];
  if (state.unit === undefined || state.unit >= trees.length) state.unit = largest(trees);
  const tree = trees[state.unit];
  heading(section, tree ? tree.finding : "The history names no neurons");
  if (!tree) {
    controls(section, runChoice(section, state));
    return plot(section).append(html("p", { class: "empty" }, "There is no tree to draw."));
  }
  const families = firstFamilies(tree, state.all);
  const units = choice("Layer", trees.map((t) => t.unit), state.unit, (unit) => { state.unit = unit; state.all = false; redraw(section); });
  controls(section, runChoice(section, state), units, treeMore(section, tree, families, state));
  treePlot(plot(section), tree, families);
  note(section, treeNote(tree, families));
}

function treeNote(tree, families) {
  const left = tree.families.filter((family) => !families.includes(family));
  if (!left.length) return "";
  const neurons = left.reduce((sum, family) => sum + family.nodes.length, 0);
  return `A family is a neuron without a parent and all that came from it. Drawn: the largest ${families.length} of ${tree.families.length}; the others have ${plural(neurons, "neuron")}.`;
}

// The unit with the most neurons that split is the one to look at first.
function largest(trees) {
  const sizes = trees.map((tree) => tree.families.reduce((sum, f) => sum + f.nodes.length, 0));
  return Math.max(0, sizes.indexOf(Math.max(...sizes)));
}
