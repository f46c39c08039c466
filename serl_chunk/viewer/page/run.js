"use strict";
/* The page of a run. It requests the run's curves again and again, and the learner's figures once a second. */

const at = (id) => document.getElementById(id);
const [WIDTH, HEIGHT, LEFT, BOTTOM, TOP] = [420, 190, 46, 20, 6];
const CURVES = 2000; // ms between requests
const FIGURES = 1000;

function element(tag, attributes = {}, ...content) {
  return filled(document.createElement(tag), attributes, content);
}

function shape(tag, attributes = {}, ...content) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, content);
}

function filled(made, attributes, content) {
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...content);
  return made;
}

async function get(path) {
  const response = await fetch(path);
  const value = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(value.error || `the page's program answered ${response.status}`);
  return value;
}

const percent = (value) => (value === null ? "" : `${Math.round(100 * value)} %`);
const short = (value) => (value === null ? "" : String(Number(value.toPrecision(3))));

// ---- charts

function ticks(low, high) {
  const rough = (high - low) / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const found = [];
  for (let n = Math.ceil(low / step); n * step <= high + 1e-9 * step; n++) found.push(n * step);
  return found;
}

function chart({ title, percent: share, lines }) {
  const points = lines.flatMap(({ x, y }) => x.map((v, i) => [v, y[i]])).filter(([, v]) => v !== null);
  const right = Math.max(...points.map(([v]) => v)) || 1;
  let [low, high] = share ? [0, 1] : [Math.min(...points.map(([, v]) => v)), Math.max(...points.map(([, v]) => v))];
  if (!share && low > 0 && low < high / 2) low = 0;
  if (low === high) [low, high] = [low - 1, high + 1];
  const px = (x) => LEFT + (x / right) * (WIDTH - LEFT - 8);
  const py = (y) => HEIGHT - BOTTOM - ((y - low) / (high - low)) * (HEIGHT - BOTTOM - TOP);
  const drawn = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title });
  for (const y of ticks(low, high)) {
    drawn.append(shape("path", { class: "grid", d: `M${LEFT} ${py(y)}H${WIDTH - 8}` }));
    const text = share ? percent(y) : short(y);
    drawn.append(shape("text", { x: LEFT - 6, y: py(y) + 4, "text-anchor": "end" }, text));
  }
  for (const x of ticks(0, right))
    drawn.append(shape("text", { x: px(x), y: HEIGHT - 5, "text-anchor": "middle" }, x ? `${short(x)} min` : "0"));
  lines.forEach(({ x, y, dots }, n) => {
    let path = "";
    let before = null;
    y.forEach((v, i) => {
      if (v !== null && (dots || y.length === 1)) path += `M${px(x[i]) - 3} ${py(v)}h6m-3 -3v6`;
      else if (v !== null) path += `${before === null ? "M" : "L"}${px(x[i]).toFixed(1)} ${py(v).toFixed(1)}`;
      before = v;
    });
    drawn.append(shape("path", { class: `c${n % 4}`, d: path }));
  });
  const names = lines.length > 1 || lines[0].name !== title ? lines : [];
  const last = (y) => (share ? percent : short)(y.findLast((v) => v !== null));
  const legend = names.map(({ name, y }, n) => element("span", { class: `c${n % 4}` }, `${name} ${last(y)}`));
  return element("figure", {}, element("figcaption", {}, element("b", {}, title), ...legend), drawn);
}

// ---- what is shown

function row(episode) {
  const { number, key, outcome, human, length, actor, minutes } = episode;
  const link = element("a", { href: `../#key=${encodeURIComponent(key || "")}`, target: "_blank" }, String(number));
  const cells = [length, short(episode.return), percent(human), `${minutes} min`, actor];
  return element("tr", {}, element("td", {}, key ? link : String(number)),
    element("td", { class: outcome }, outcome), ...cells.map((text) => element("td", {}, String(text ?? ""))));
}

function show({ title, head, charts, episodes }) {
  document.title = at("title").textContent = title;
  at("head").replaceChildren(
    ...head.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))),
  );
  at("charts").replaceChildren(...charts.map(chart));
  const names = ["episode", "outcome", "steps", "return", "human", "after", "actor"];
  at("episodes").replaceChildren(
    element("tr", {}, ...names.map((name) => element("th", {}, name))), ...episodes.map(row),
  );
}

function showFigures(figures) {
  at("figures").replaceChildren(...figures.flatMap(([name, value]) => [`${name} `, element("b", {}, short(value))]));
}

async function repeat(path, period, use) {
  for (;;) {
    try {
      use(await get(path));
      at("fault").textContent = "";
    } catch (error) {
      at("fault").textContent = error instanceof TypeError ? "No connection: the learner has ended." : error.message;
    }
    await new Promise((done) => setTimeout(done, period));
  }
}

repeat("curves", CURVES, show);
repeat("figures", FIGURES, showFigures);
