// A click on a heading sorts the first table of the page: numbers by their size, everything else as text.
const heads = [...document.querySelector("table").querySelectorAll("th")], body = document.querySelector("tbody");

function sort(column) {
  const descending = heads[column].ariaSort !== "descending";
  heads.forEach(head => head.removeAttribute("aria-sort"));
  heads[column].ariaSort = descending ? "descending" : "ascending";
  const text = row => row.cells[column].textContent.trim();
  const number = row => { const found = parseFloat(text(row).replaceAll(",", "")); return isNaN(found) ? -1 : found; };
  const order = (a, b) => number(a) - number(b) || (text(a) < text(b) ? -1 : text(a) > text(b) ? 1 : 0);
  [...body.rows].sort((a, b) => descending ? order(b, a) : order(a, b)).forEach(row => body.append(row));
}

heads.forEach((head, column) => {
  head.tabIndex = 0;
  head.style.cursor = "pointer";
  head.onclick = () => sort(column);
  head.onkeydown = event => event.key === "Enter" && sort(column);
});
