// Builds elements. Text always becomes text nodes, so nothing that a policy wrote is read as markup.

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function empty(text) {
  return h("p", { class: "empty" }, text);
}

export function table(headings, rows) {
  const isNumber = (column) => rows.some((row) => typeof row[column] === "number");
  const kind = (column) => (isNumber(column) ? "number" : undefined);
  return h("div", { class: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, headings.map((text, column) => h("th", { scope: "col", class: kind(column) }, text)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, column) => h("td", { class: kind(column) }, cell ?? "")))))));
}

export function select(label, value, options, change) {
  const choice = h("select", { onchange: () => change(choice.value) },
    options.map(([key, text]) => h("option", { value: key, selected: key === value }, text)));
  return h("label", {}, `${label} `, choice);
}

// Pictures by their names; `place` says where each is, and the first one has the number `first`, counted from 0.
export function pictures(names, place, first = 0) {
  if (!names.length) return null;
  return h("div", { class: "pictures" }, names.map((name, order) => {
    const number = first + order;
    const url = place(name);
    if (!url) return h("span", { class: "faint", title: name }, `picture ${number + 1} was not kept${name ? `: sha256 ${name.slice(0, 12)}…` : ""}`);
    return h("button", { type: "button", "aria-label": `Enlarge picture ${number + 1}`, onclick: () => zoom(url) },
      h("img", { src: url, alt: `Picture ${number + 1}`, loading: "lazy" }));
  }));
}

// Shows a picture as large as the window; pressing it toggles its natural size, in which it scrolls.
function zoom(url) {
  const dialog = document.getElementById("zoom");
  const scale = document.getElementById("scale");
  const show = (isNatural) => scale.setAttribute("aria-pressed", isNatural);
  scale.querySelector("img").src = url;
  scale.onclick = () => show(scale.getAttribute("aria-pressed") === "false");
  dialog.onclick = (event) => { if (event.target === dialog) dialog.close(); }; // beside it
  show(false);
  dialog.showModal();
}
