"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const state = { budget: String(data.budgets[1]), method: "diffprune" };

function make(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

// One rectangle for each run of dropped tokens in a row, in units of the token grid.
function veil([rows, columns], kept) {
  if (kept === null) return "";
  const lit = new Set(kept);
  let path = "";
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) {
      const start = column;
      while (column < columns && !lit.has(row * columns + column)) column++;
      if (column > start) path += `M${start} ${row}h${column - start}v1h${start - column}z`;
    }
  }
  return path;
}

function picture(source, grid, kept, words) {
  const box = make("div", { class: "picture" }, make("img", { src: source, alt: words }));
  box.insertAdjacentHTML("beforeend", `<svg viewBox="0 0 ${grid[1]} ${grid[0]}" preserveAspectRatio="none" aria-hidden="true"><path d="${veil(grid, kept)}"/></svg>`);
  return box;
}

function question(example) {
  const block = make("div", {}, make("div", { class: "task" }, `like ${example.task}${example.differs ? ", methods differ" : ""}`), make("p", { class: "question" }, example.question));
  if (example.options.length) {
    block.append(make("ul", { class: "options" }, ...example.options.map((text) => make("li", {}, text))));
  }
  return block;
}

function answer({ text, right }) {
  return make("span", { class: right ? "right" : "wrong" }, text || "(nothing)");
}

function answers(example) {
  const rows = data.methods.map(({ name, label }) => {
    const said = name === "full" ? example.full : example.said[name][state.budget];
    const row = make("tr", { "data-method": name, class: name === state.method ? "chosen" : "" }, make("td", {}, label), make("td", {}, answer(said)));
    row.addEventListener("click", () => choose("method", name));
    return row;
  });
  return make("table", { class: "answers" }, make("tbody", {}, ...rows));
}

function card(example) {
  const kept = state.method === "full" ? null : example.kept[state.method][state.budget];
  const text = make("div", { class: "text" }, question(example), answers(example));
  return make("article", { class: "card" }, picture(example.png, example.grid, kept, `Scene: ${example.question}`), text);
}

// The larger model beside the one that was just trained, each with its own pruner and the same share of its tokens.
function pairCard(large, index) {
  const small = data.examples[index];
  const budget = String(large.budgets[data.budgets.map(String).indexOf(state.budget)]);
  const both = make("div", { class: "pair" },
    picture(small.png, small.grid, small.kept.diffprune[state.budget], "Tokens kept by the scorer trained just now"),
    picture(small.png, large.grid, large.kept[budget], "Tokens kept by the larger model's scorer"));
  const lines = [
    [`trained just now, ${state.budget} of ${small.grid[0] * small.grid[1]}`, small.said.diffprune[state.budget]],
    [`larger model, all ${large.grid[0] * large.grid[1]}`, large.full],
    [`larger model, ${budget}`, large.said[budget]],
  ].map(([label, said]) => make("tr", {}, make("td", {}, label), make("td", {}, answer(said))));
  const text = make("div", { class: "text" }, question(small), make("table", { class: "answers" }, make("tbody", {}, ...lines)));
  return make("article", { class: "card" }, both, text);
}

function show() {
  for (const group of document.querySelectorAll("[data-switch]")) {
    for (const button of group.children) button.setAttribute("aria-pressed", String(button.dataset.value === state[group.dataset.switch]));
  }
  const label = data.methods.find(({ name }) => name === state.method).label;
  const share = (100 * Number(state.budget) / data.num_visual).toFixed(1);
  document.getElementById("readout").textContent =
    state.method === "full" ? `The full model: all ${data.num_visual} tokens.` : `${label}: ${state.budget} of ${data.num_visual} tokens (${share} %).`;
  document.getElementById("cards").replaceChildren(...data.examples.map(card));
  const larger = document.getElementById("larger-cards");
  if (larger) larger.replaceChildren(...data.larger.map(pairCard));
  for (const table of document.querySelectorAll("[data-budget]")) table.hidden = table.dataset.budget !== state.budget;
}

function choose(key, value) {
  state[key] = value;
  history.replaceState(null, "", `#budget=${state.budget}&method=${state.method}`);
  show();
}

function readAddress() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  if (data.budgets.map(String).includes(wanted.get("budget"))) state.budget = wanted.get("budget");
  if (data.methods.some(({ name }) => name === wanted.get("method"))) state.method = wanted.get("method");
  show();
}

for (const group of document.querySelectorAll("[data-switch]")) {
  group.addEventListener("click", (event) => {
    if (event.target.dataset.value) choose(group.dataset.switch, event.target.dataset.value);
  });
}
addEventListener("hashchange", readAddress);
readAddress();
