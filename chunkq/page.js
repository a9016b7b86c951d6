"use strict";
// The table of all channels. Only one page of rows is in the document at a time, so that thousands stay quick.
(() => {
  const PAGE = 100;
  const SPECIAL = { inf: Infinity, "-inf": -Infinity, nan: NaN };
  const COMPARE = {
    "<": (a, b) => a < b,
    "<=": (a, b) => a <= b,
    ">": (a, b) => a > b,
    ">=": (a, b) => a >= b,
    "=": (a, b) => a === b,
    "!=": (a, b) => a !== b,
  };

  const { columns, rows } = JSON.parse(document.getElementById("data").textContent);
  const head = document.querySelector("#table thead tr");
  const body = document.querySelector("#table tbody");
  const query = document.getElementById("query");
  const found = document.getElementById("found");
  const pages = document.getElementById("pages");
  const texts = new Array(rows);
  const every = Array.from({ length: rows }, (_, row) => row);

  let sorted = { column: 0, descending: false };
  let order = every; // all rows as they are sorted
  let shown = every; // those of them that the search finds
  let start = 0;

  // Five digits, with an exponent where JavaScript would still write zeros.
  function digits(value) {
    if (Number.isInteger(value)) return String(value);
    const small = Math.abs(value) < 1e-4;
    return String(small ? value.toExponential(4).replace(/\.?0+e/, "e") : Number(value.toPrecision(5)));
  }

  const special = (text) => (Object.hasOwn(SPECIAL, text) ? SPECIAL[text] : undefined);
  // JSON has no inf and nan: they come as text
  const number = (value) => (typeof value === "string" ? special(value) : value);
  const text = (value) => (value === null ? "–" : typeof value === "number" ? digits(value) : value);
  const rowText = (row) => (texts[row] ??= columns.map((column) => text(column.values[row])).join(" ").toLowerCase());

  // A word of the search as a test of a row; throws what to tell the user.
  function matcher(word) {
    const comparison = /^([a-z_]+)(<=|>=|!=|=|<|>)(.*)$/.exec(word);
    if (comparison) {
      const [, name, sign, given] = comparison;
      const column = columns.find((one) => one.words.includes(name));
      if (!column) throw new Error(`There is no column “${name}”.`);
      const limit = special(given) ?? (given === "" ? NaN : Number(given));
      if (Number.isNaN(limit)) throw new Error(`“${word}” needs a number behind ${sign}`);
      return (row) => {
        const value = number(column.values[row]);
        return typeof value === "number" && !Number.isNaN(value) && COMPARE[sign](value, limit);
      };
    }
    if (/^\d+$/.test(word)) return (row) => row === Number(word);
    return (row) => rowText(row).includes(word);
  }

  function search() {
    const words = query.value.toLowerCase().replace(/\s*(<=|>=|!=|=|<|>)\s*/g, "$1").trim().split(/\s+/).filter(Boolean);
    start = 0;
    try {
      const tests = words.map(matcher);
      shown = tests.length ? order.filter((row) => tests.every((test) => test(row))) : order;
      render("");
    } catch (problem) {
      shown = [];
      render(problem.message);
    }
  }

  // What has no number comes last, whichever way it is sorted.
  function sort() {
    const values = columns[sorted.column].values.map((value) => number(value) ?? NaN);
    const sign = sorted.descending ? -1 : 1;
    const missing = (row) => Number.isNaN(values[row]);
    order = every.slice().sort((a, b) => {
      if (missing(a) || missing(b)) return missing(a) - missing(b);
      return values[a] === values[b] ? 0 : values[a] < values[b] ? -sign : sign;
    });
    for (const [index, cell] of [...head.cells].entries()) {
      if (index === sorted.column) cell.setAttribute("aria-sort", sorted.descending ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    }
    search();
  }

  function addHead(column, index) {
    const cell = document.createElement("th");
    cell.scope = "col";
    cell.className = "number";
    if (column.sortable) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = column.title;
      button.addEventListener("click", () => {
        sorted = { column: index, descending: sorted.column === index && !sorted.descending };
        sort();
      });
      cell.append(button);
    } else {
      cell.textContent = column.title;
    }
    head.append(cell);
  }

  function tableRow(row) {
    const line = document.createElement("tr");
    columns.forEach((column, index) => {
      const cell = document.createElement(index ? "td" : "th");
      if (!index) cell.scope = "row";
      cell.className = "number";
      cell.textContent = text(column.values[row]);
      line.append(cell);
    });
    return line;
  }

  function render(problem) {
    const end = Math.min(start + PAGE, shown.length);
    body.replaceChildren(...shown.slice(start, end).map(tableRow));
    const count = (value) => value.toLocaleString("en");
    const part = shown.length > PAGE ? `, rows ${count(start + 1)} to ${count(end)}` : "";
    found.textContent = problem || `${count(shown.length)} of ${count(rows)} channels${part}`;
    found.className = problem ? "problem" : "";
    pages.hidden = shown.length <= PAGE;
    const last = Math.max(0, Math.ceil(shown.length / PAGE) - 1) * PAGE;
    const places = { first: 0, previous: start - PAGE, next: start + PAGE, last };
    for (const button of pages.children) {
      button.value = places[button.dataset.to];
      button.disabled = button.dataset.to === "first" || button.dataset.to === "previous" ? start === 0 : start === last;
    }
  }

  pages.addEventListener("click", (event) => {
    if (!event.target.dataset.to) return;
    start = Number(event.target.value);
    render("");
  });
  query.addEventListener("input", search);
  document.getElementById("search").addEventListener("submit", (event) => event.preventDefault());
  columns.forEach(addHead);
  sort();
})();
