// The demonstration: search titles, build a history, see what one or two models recommend, and which past event drove it.
"use strict";

const SHOWN = 10;
const element = (id) => document.getElementById(id);
let key = "";
let titles = new Map(); // of the items that the page has seen
let history_ = []; // item ids, oldest first
let sides = ["champion"]; // the models that answer
let asked = 0; // answers to older questions are dropped

async function call(path, body) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const options = { headers };
  if (body !== undefined) {
    Object.assign(options, { method: "POST", body: JSON.stringify(body) });
    headers["Content-Type"] = "application/json";
  }
  const response = await fetch(path, options);
  element("key-form").hidden = response.status !== 401;
  if (!response.ok) {
    const { detail } = await response.json().catch(() => ({ detail: response.statusText }));
    throw new Error(Array.isArray(detail) ? detail.map((one) => one.msg).join("; ") : detail);
  }
  return response.json();
}

async function attempt(work) {
  try {
    await work();
    element("problem").hidden = true;
  } catch (error) {
    element("problem").textContent = error.message;
    element("problem").hidden = false;
  }
}

function named(item) {
  return titles.get(item) || item;
}

function make(tag, text, more = {}) {
  return Object.assign(document.createElement(tag), { textContent: text, ...more });
}

function row(item, ...more) {
  const line = make("li", "");
  line.append(make("span", named(item), { title: item }), ...more);
  return line;
}

async function search() {
  const text = element("search").value.trim();
  const found = text ? (await call(`/items?search=${encodeURIComponent(text)}&k=${SHOWN}`)).items : [];
  if (text !== element("search").value.trim()) return; // typed on meanwhile
  for (const item of found) titles.set(item.item, item.title);
  element("found").replaceChildren(
    ...found.map((item) => {
      const line = make("li", "");
      line.append(make("button", named(item.item), { type: "button", onclick: () => change([...history_, item.item]) }));
      return line;
    })
  );
}

function change(items) {
  history_ = items;
  const place = new URL(location.href);
  place.searchParams.delete("history");
  for (const item of history_) place.searchParams.append("history", item);
  window.history.replaceState(null, "", place);
  show();
}

function show() {
  const lines = history_.map((item, position) => {
    const drop = () => change(history_.filter((_, other) => other !== position));
    return row(item, " ", make("button", "×", { type: "button", title: "remove", onclick: drop }));
  });
  element("history").replaceChildren(...lines);
  element("empty").hidden = lines.length > 0;
  element("clear").hidden = lines.length === 0;
  attempt(recommend);
}

async function recommend() {
  const question = ++asked;
  const filter = {};
  for (const one of element("rules").querySelectorAll("select")) if (one.value) filter[one.name] = [one.value];
  const diversity = Number(element("diversity").value);
  const body = { history: history_, k: SHOWN, titles: true, diversity, filter };
  const answers = await Promise.all(sides.map((by) => call("/recommend", { ...body, by })));
  if (question !== asked) return;
  element("sides").replaceChildren(...answers.map((answer, side) => list(sides[side], answer, body.history)));
}

function list(by, answer, items) {
  answer.items.forEach((item, position) => titles.set(item, answer.titles[position]));
  const lines = answer.items.map((item, position) => {
    const why = make("span", "", { className: "why" });
    const explain = () => attempt(async () => (why.textContent = await reason(by, items, item)));
    const score = make("span", answer.scores[position].toFixed(3), { className: "score" });
    const button = make("button", "why?", { type: "button", onclick: explain });
    return row(item, score, ...(answer.source === "popularity" ? [] : [button, why]));
  });
  const side = make("div", "", { className: by });
  const ordered = make("ol", "");
  ordered.append(...lines);
  const notes = [`by ${answer.source}, version ${answer.version}`, ...answer.notes].join(" · ");
  if (sides.length > 1) side.append(make("h3", by === "champion" ? "Champion" : "Candidate"));
  side.append(make("p", notes, { className: "notes" }), ordered);
  return side;
}

async function reason(by, items, item) {
  const { drops } = await call("/explain", { history: items, item, by });
  const best = drops.indexOf(Math.max(...drops));
  if (!(drops[best] > 0)) return "no single event raises its score";
  return `most of all because of ${named(items[best])}: without it the score is ${drops[best].toFixed(3)} lower`;
}

async function offer() {
  const fields = Object.entries(await call("/attributes")).map(([name, values]) => {
    const choice = make("select", "", { name, onchange: () => attempt(recommend) });
    choice.append(make("option", "any", { value: "" }), ...values.sort().map((value) => make("option", value, { value })));
    const label = make("label", name);
    label.append(choice);
    return label;
  });
  for (const old of element("rules").querySelectorAll("select")) old.parentElement.remove();
  element("rules").append(...fields);
}

async function start() {
  const state = await call("/health");
  sides = state.candidate ? ["champion", "candidate"] : ["champion"];
  await offer();
  element("model").textContent = `${state.model}, version ${state.version}, ${state.items.toLocaleString()} items`;
  const given = new URL(location.href).searchParams.getAll("history");
  const known = await Promise.all(given.map((item) => call(`/items?search=${encodeURIComponent(item)}&k=1`)));
  for (const item of known.flatMap((one) => one.items)) titles.set(item.item, item.title);
  change(given);
}

element("search").addEventListener("input", () => attempt(search));
element("diversity").addEventListener("input", () => attempt(recommend));
element("clear").addEventListener("click", () => change([]));
element("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = element("key").value.trim();
  attempt(start);
});
attempt(start);
