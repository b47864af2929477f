"use strict";
// Elements, numbers and words. Text of others only ever goes into text nodes.

const SVG = "http://www.w3.org/2000/svg";
const MISSING = "–";

function fill(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined) element.setAttribute(key, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const html = (tag, attributes, ...children) =>
  fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

const known = (value) => value !== null && value !== undefined;
const minus = (text) => text.replace(/^-/, "−").replace(/e-/, "e−").replace("e+", "e");
const plural = (n, noun) => `${whole(n)} ${noun}${n === 1 ? "" : "s"}`;
const whole = (n) => (known(n) ? n.toLocaleString("en-US") : MISSING);

// Four digits, in scientific notation where there would be many noughts.
function short(value) {
  if (!known(value)) return MISSING;
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return minus(value.toExponential(2));
  return minus(String(Number(value.toPrecision(4))));
}

const signed = (value) => (known(value) && value > 0 ? "+" : "") + short(value);

// A number beside a tick: 1.2M, 30k, 0.05, 1e−5.
function tickText(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  for (const [unit, sign] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= unit) return minus(String(Number((value / unit).toPrecision(4)))) + sign;
  }
  if (size < 1e-3) return minus(value.toExponential().replace(/(\.\d{2})\d+/, "$1"));
  return minus(String(Number(value.toPrecision(6))));
}

const pen = document.createElement("canvas").getContext("2d");

function textWidth(text) {
  pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  return pen.measureText(text).width;
}

// The end of a long name tells layers apart, so the middle is left out.
function fitted(text, width) {
  if (textWidth(text) <= width) return text;
  for (let kept = text.length - 1; kept > 2; kept -= 1) {
    const head = Math.floor(kept / 3);
    const cut = `${text.slice(0, head)}…${text.slice(text.length - (kept - head))}`;
    if (textWidth(cut) <= width) return cut;
  }
  return "…";
}

// A table of numbers, folded away below its figure.
function numbers(headings, rows) {
  const cells = (tag, values) => values.map((value) => html(tag, {}, value));
  const head = html("thead", {}, html("tr", {}, ...cells("th", headings)));
  const body = html("tbody", {}, ...rows.map((row) => html("tr", {}, ...cells("td", row))));
  const table = html("div", { class: "numbers", tabindex: 0 }, html("table", {}, head, body));
  return html("details", {}, html("summary", {}, "Show the numbers"), table);
}

function choice(label, options, chosen, onChange) {
  const select = html("select", {});
  options.forEach((text, index) => select.append(html("option", { value: index }, text)));
  select.value = String(chosen);
  select.addEventListener("change", () => onChange(Number(select.value)));
  return html("label", {}, label, select);
}
