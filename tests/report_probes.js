// What tests/test_report_browser.py asks of the page it has opened.

const probes = (() => {
  const all = (selector) => [...document.querySelectorAll(selector)];

  // Contrast by the formula of the WCAG.
  const parse = (colour) => colour.match(/[\d.]+/g).map(Number);
  const channel = (v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);

  function ratio(one, other) {
    const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  }

  function ground(element) {
    for (let e = element; e; e = e.parentElement) {
      const colour = parse(getComputedStyle(e).backgroundColor);
      if (colour.length < 4 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  }

  const FILLED = ".marker, .fork, .bar, .after";
  const DRAWN = ".curve, .joint, .life, .split, .ideal, .crowd";

  // A mark's colour may be mixed in oklab; a canvas says what that is in red, green and blue.
  const pen = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  function rgb(colour) {
    pen.fillStyle = colour;
    pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
  }

  // ["text" or "mark", contrast, what it is] of all that can be seen.
  function contrast() {
    return all("body *:not(script, noscript)").filter((e) => e.checkVisibility()).flatMap((e) => {
      const style = getComputedStyle(e), svg = e instanceof SVGElement;
      const entry = (kind, colour, name) => [[kind, ratio(rgb(colour), ground(e)), name]];
      if ([...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())) {
        return entry("text", svg ? style.fill : style.color, e.textContent.slice(0, 40));
      }
      if (svg && e.matches(FILLED)) return entry("mark", style.fill, e.getAttribute("class"));
      if (svg && e.matches(DRAWN)) return entry("mark", style.stroke, e.getAttribute("class"));
      return [];
    });
  }

  // Letters that the edge of their drawing cuts off, or that are too small.
  function cut() {
    return all("svg text").filter((text) => {
      const box = text.getBoundingClientRect();
      const root = text.ownerSVGElement.getBoundingClientRect();
      const small = parseFloat(getComputedStyle(text).fontSize) < 11;
      return small || box.left < root.left - 1 || box.right > root.right + 1
        || box.top < root.top - 1 || box.bottom > root.bottom + 1;
    }).map((text) => text.textContent);
  }

  // Letters of a drawing that lie on other letters of it. The box of a text is higher than its ink.
  function clashes() {
    const apart = (a, b) => a.x + a.width <= b.x + 1 || a.y + a.height <= b.y + 5;
    const over = (a, b) => !apart(a, b) && !apart(b, a);
    return all(".plot svg").flatMap((root) => {
      const texts = [...root.querySelectorAll("text")].map((t) => [t.textContent, t.getBBox()]);
      return texts.flatMap(([name, box], index) => texts.slice(index + 1)
        .filter(([, other]) => over(box, other)).map(([other]) => `${name} on ${other}`));
    });
  }

  // What reaches beyond the right edge, other than in a frame that scrolls.
  function beyond() {
    return all("body *").filter((e) => e.checkVisibility() && !e.closest(".scroll, .numbers"))
      .filter((e) => e.getBoundingClientRect().right > innerWidth + 0.5)
      .map((e) => e.outerHTML.slice(0, 99));
  }

  const frames = () => new Promise((done) => {
    requestAnimationFrame(() => requestAnimationFrame(done));
  });

  // Scroll an element into the middle of the window, and say where it is.
  async function middle(selector) {
    const element = document.querySelector(selector);
    element.scrollIntoView({ block: "center" });
    await frames();
    const box = element.getBoundingClientRect();
    return [box.x + box.width / 2, box.y + box.height / 2];
  }

  async function tip() {
    await frames();
    const words = document.getElementById("tip");
    return words.hidden ? null : words.innerText;
  }

  function tipIsInside() {
    const box = document.getElementById("tip").getBoundingClientRect();
    return box.left >= 0 && box.top >= 0 && box.right <= innerWidth && box.bottom <= innerHeight;
  }

  // Choose an option by its words.
  function choose(figure, label, option) {
    const labels = all(`#${figure} label`);
    const select = labels.find((l) => l.firstChild.data === label).lastChild;
    select.value = [...select.options].find((o) => o.text === option).value;
    select.dispatchEvent(new Event("change"));
  }

  const number = (element, name) => Number(element.getAttribute(name));

  // How far the diagonal misses the points where a tick of one axis meets the same of the other.
  function diagonal() {
    const root = document.querySelector("#fig-forecast svg"), line = root.querySelector(".ideal");
    const [x1, y1, x2, y2] = ["x1", "y1", "x2", "y2"].map((name) => number(line, name));
    const ticks = (anchor) => new Map([...root.querySelectorAll("text:not([class])")]
      .filter((t) => t.getAttribute("text-anchor") === anchor).map((t) => [t.textContent, t]));
    const below = ticks("middle");
    return [...ticks("end")].filter(([name]) => below.has(name)).map(([name, left]) => {
      const x = number(below.get(name), "x"), y = number(left, "y") - 4;
      return Math.abs(y1 + ((x - x1) / (x2 - x1)) * (y2 - y1) - y);
    });
  }

  // The smallest distance between the lines of neurons that are alive.
  function rowGap() {
    const labels = all("#fig-lineage .tree text:not([class])").filter((t) => t.textContent[0] === "#");
    const rows = labels.map((t) => number(t, "y")).sort((a, b) => a - b);
    return Math.min(...rows.slice(1).map((y, index) => y - rows[index]));
  }

  const height = (selector) =>
    Math.max(...all(selector).map((e) => e.getBoundingClientRect().height));
  const texts = (selector) => all(selector).map((e) => e.textContent);
  const looks = (selector) => all(selector).map((e) => e.outerHTML.replace(/ run-/, " "))
    .map((look, index) => look + getComputedStyle(all(selector)[index]).fill);

  return {
    contrast, cut, clashes, beyond, frames, middle, tip, tipIsInside, choose, diagonal, rowGap,
    height, texts, looks,
  };
})();
