// The demonstration: search titles or take a user, build a history, see what one or two models recommend, and why.
// The address holds all that is chosen, so that a link shows the same again.
"use strict";

const SHOWN = 10;
const element = (id) => document.getElementById(id);
let key = "";
let titles = new Map(); // of the items that the page has seen
let history_ = []; // item ids, oldest first
let user = "";
let alike = ""; // the item whose similar ones are shown
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
  line.append(make("bdi", named(item), { title: item }), ...more);
  return line;
}

function button(text, onclick, more = {}) {
  return make("button", text, { type: "button", onclick, ...more });
}

const add = (item) => button("+", () => change([...history_, item]), { title: `add ${named(item)} to the history` });
const likewise = (item) => button("similar", () => attempt(() => similar(item)), { title: `items like ${named(item)}` });

async function listed(path) {
  const { items, titles: own } = await call(path);
  items.forEach((item, position) => titles.set(item, own[position]));
  return items.map((item) => row(item, add(item)));
}

async function similar(item) {
  alike = item;
  const part = element("similar");
  part.querySelector("ol").replaceChildren(...(await listed(`/similar/${encodeURIComponent(item)}?k=${SHOWN}`)));
  part.querySelector("h2").textContent = `Similar to ${named(item)}`;
  part.hidden = false;
  keep();
}

async function take() {
  user = element("user").value.trim();
  element("unknown").textContent = "";
  if (!user) return change([]);
  const path = `/users/${encodeURIComponent(user)}`;
  const found = await call(path).catch((error) => (element("unknown").textContent = error.message) && null);
  if (!found) return change(history_);
  found.items.forEach((item, position) => titles.set(item, found.titles[position]));
  if (!found.items.length) element("unknown").textContent = `The service has no events of ${user}.`;
  change(found.items);
}

async function search() {
  const text = element("search").value.trim();
  const found = text ? (await call(`/items?search=${encodeURIComponent(text)}&k=${SHOWN}`)).items : [];
  if (text !== element("search").value.trim()) return; // typed on meanwhile
  for (const item of found) titles.set(item.item, item.title);
  element("nothing").textContent = text && !found.length ? `No item fits “${text}”.` : "";
  element("found").replaceChildren(
    ...found.map((item) => {
      const line = make("li", "");
      line.append(button(named(item.item), () => change([...history_, item.item])));
      return line;
    })
  );
  keep();
}

function change(items) {
  history_ = items;
  show();
}

function rules() {
  return [...element("rules").querySelectorAll("select")].filter((one) => one.value);
}

function diversity() {
  return Number(element("diversity").value);
}

function keep() {
  const place = new URL(location.pathname, location.href);
  for (const item of history_) place.searchParams.append("history", item);
  const rest = { user, similar: alike, search: element("search").value.trim(), diversity: diversity() };
  for (const [name, value] of Object.entries(rest)) if (value) place.searchParams.set(name, value);
  for (const one of rules()) place.searchParams.set(`filter.${one.name}`, one.value);
  window.history.replaceState(null, "", place);
  element("link").href = place;
}

function show() {
  const lines = history_.map((item, position) => {
    const drop = () => change(history_.filter((_, other) => other !== position));
    return row(item, button("×", drop, { title: `remove ${named(item)}` }), likewise(item));
  });
  element("history").replaceChildren(...lines);
  element("empty").hidden = lines.length > 0;
  element("clear").hidden = lines.length === 0;
  attempt(recommend);
}

async function recommend() {
  const question = ++asked;
  keep();
  const filter = Object.fromEntries(rules().map((one) => [one.name, [one.value]]));
  const body = { history: history_, k: SHOWN, titles: true, diversity: diversity(), filter, user: user || null };
  const answers = await Promise.all(sides.map((by) => call("/recommend", { ...body, by })));
  if (question !== asked) return;
  const other = (side) => answers.length > 1 && answers[1 - side].items;
  element("sides").replaceChildren(...answers.map((one, side) => list(sides[side], one, body.history, other(side))));
  if (answers.length > 1) await compare(...answers.map((answer) => answer.items));
}

async function compare(first, second) {
  const shared = first.filter((item) => second.includes(item)).length;
  const found = await call("/experiment").catch(() => null); // without a store there are no figures
  element("compared").textContent = `${shared} of ${first.length} items are in both lists. ${found ? figures(found) : ""}`;
}

function figures({ champion, candidate, difference, low, high, share }) {
  const percent = (number) => (number === null ? "none" : `${(100 * number).toFixed(1)} %`);
  const begin = `In the experiment, the candidate answers ${percent(share)} of the users`;
  if (!champion.answers && !candidate.answers) return `${begin}; no answer is recorded yet.`;
  const one = (name, { rate, answers, users }) => `${name} ${percent(rate)} of ${answers} answers to ${users} users`;
  const rates = `${one("champion", champion)}, ${one("candidate", candidate)}`;
  const gain = low === null ? "too few for an interval" : `difference ${percent(difference)} [${percent(low)}, ${percent(high)}]`;
  return `${begin}. Click-through: ${rates}; ${gain}.`;
}

function place(item, others) {
  const found = others ? others.indexOf(item) : -1;
  return make("span", !others ? "" : found < 0 ? "only here" : `no. ${found + 1} in the other list`, { className: "other" });
}

function list(by, answer, items, others) {
  answer.items.forEach((item, position) => titles.set(item, answer.titles[position]));
  const lines = answer.items.map((item, position) => {
    const why = make("span", "", { className: "why" });
    const explain = () => attempt(async () => (why.textContent = await reason(by, items, item)));
    const value = answer.scores[position].toFixed(3);
    const score = make("span", answer.source === "popularity" ? Number(value) : value, { className: "score" });
    const asking = answer.source === "popularity" ? [] : [button("why?", explain)];
    return row(item, score, ...asking, likewise(item), add(item), place(item, others), why);
  });
  const side = make("div", "", { className: by });
  const ordered = make("ol", "");
  ordered.append(...lines);
  const version = sides.length > 1 ? "" : `, version ${answer.version}`; // the heading says it
  const notes = [`by ${answer.source}${version}`, ...answer.notes].join(" · ");
  if (sides.length > 1) side.append(make("h3", `${by === "champion" ? "Champion" : "Candidate"}, version ${answer.version}`));
  side.append(make("p", notes, { className: "notes" }), ordered);
  return side;
}

async function reason(by, items, item) {
  const { drops } = await call("/explain", { history: items, item, by, user: user || null });
  const best = drops.indexOf(Math.max(...drops));
  if (!(drops[best] > 0)) return "no single event raises its score";
  return `mostly because of ${named(items[best])}: without it, the score is ${drops[best].toFixed(3)} lower`;
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
  const chosen = new URL(location.href).searchParams;
  const given = chosen.getAll("history");
  element("user").value = user = chosen.get("user") || "";
  element("search").value = chosen.get("search") || "";
  element("diversity").value = chosen.get("diversity") || "0";
  for (const one of element("rules").querySelectorAll("select")) one.value = chosen.get(`filter.${one.name}`) || "";
  alike = chosen.get("similar") || "";
  const known = await Promise.all([...given, ...(alike ? [alike] : [])].map((item) => call(`/items?search=${encodeURIComponent(item)}&k=1`).catch(() => ({ items: [] }))));
  for (const item of known.flatMap((one) => one.items)) titles.set(item.item, item.title);
  if (user && !given.length) await take();
  else change(given);
  if (alike) await similar(alike);
  for (const name of ["popular", "trending"]) await everybody(name);
  await search();
}

async function everybody(name) {
  const rows = await listed(`/${name}?k=${SHOWN}`).catch(() => null); // only a service with a store knows a trend
  element(name).hidden = !(rows && rows.length);
  if (rows) element(name).querySelector("ol").replaceChildren(...rows);
}

element("search").addEventListener("input", () => attempt(search));
element("diversity").addEventListener("input", () => attempt(recommend));
element("clear").addEventListener("click", () => change([]));
element("user-form").addEventListener("submit", (event) => {
  event.preventDefault();
  attempt(take);
});
element("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = element("key").value.trim();
  attempt(start);
});
attempt(start);
