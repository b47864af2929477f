// The page: every figure is drawn anew when its choices or its width change.

const data = JSON.parse(document.getElementById("data").textContent);
const hidden = new Set();
const visible = () => data.runs.map((_, run) => run).filter((run) => !hidden.has(run));

const FIGURES = {
  "fig-loss": lossFigure, "fig-widths": widthFigure, "fig-lineage": treeFigure,
  "fig-forecast": forecastFigure, "fig-tradeoff": tradeoffFigure,
};
const states = new Map();

// What a figure adds to its section comes after the caption, and goes when it is drawn anew.
function redraw(section) {
  hideTip();
  const caption = section.querySelector(".caption");
  const open = section.querySelector("details")?.open; // undefined the first time
  const focus = [...section.querySelectorAll("select, button")].indexOf(document.activeElement);
  while (caption.nextSibling) caption.nextSibling.remove();
  FIGURES[section.id](section, states.get(section.id));
  if (open !== undefined) section.querySelector("details")?.toggleAttribute("open", open);
  if (focus >= 0) section.querySelectorAll("select, button")[focus]?.focus({ preventScroll: true });
}

const heading = (section, text) => section.querySelector("h2").replaceChildren(text);

function controls(section, ...items) {
  if (items.some(known)) section.append(html("div", { class: "controls" }, ...items));
}

function plot(section, kind = "") {
  const box = html("div", { class: `plot ${kind}` });
  section.append(box);
  return box;
}

function note(section, text) {
  if (text.trim()) section.append(html("p", { class: "note" }, text.trim()));
}

// Which line is which run; pressing one hides or shows the run in every figure.
function legend(section) {
  if (data.runs.length < 2) return;
  const box = html("div", { class: "legend", role: "group", "aria-label": "Runs" });
  data.runs.forEach(({ label }, run) => {
    const button = html("button", { type: "button", "aria-pressed": String(!hidden.has(run)) }, html("span", { class: "key" }, key(run)), label);
    button.addEventListener("click", () => {
      if (!hidden.delete(run)) hidden.add(run);
      drawAll();
    });
    box.append(button);
  });
  section.append(box);
}

function runChoice(section, state) {
  if (data.runs.length < 2) return null;
  const names = data.runs.map((run) => run.label);
  return choice("Run", names, state.run || 0, (run) => {
    Object.assign(state, { run, unit: undefined, all: false });
    redraw(section);
  });
}

function drawAll() {
  for (const id of Object.keys(FIGURES)) redraw(document.getElementById(id));
}

for (const id of Object.keys(FIGURES)) states.set(id, {});
for (const place of document.querySelectorAll("#summary .key")) {
  if (data.runs.length > 1) place.append(key(Number(place.dataset.run)));
  else place.remove();
}
let wide = document.body.clientWidth;
drawAll();
new ResizeObserver(() => {
  if (document.body.clientWidth === wide) return;
  wide = document.body.clientWidth;
  drawAll();
}).observe(document.body);
document.addEventListener("click", hideTip);
document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });
window.addEventListener("scroll", hideTip, { passive: true });
