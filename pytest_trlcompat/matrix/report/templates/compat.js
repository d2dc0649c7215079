
"use strict";
// The table of the page is made elsewhere; this changes what it shows. Texts come from libraries: they are only ever
// set as text, never as markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const at = id => document.getElementById(id);
  const grid = at("grid"), panel = at("panel"), controls = at("controls");
  const fields = {};
  for (const name of ["trainer", "strategy", "package", "version", "verdict", "search"]) fields[name] = at(name);
  const rank = new Map(data.verdicts.map((verdict, number) => [verdict.letter, number]));
  const named = name => data.verdicts.find(verdict => verdict.name === name);
  const subjects = ["upstream", "corrected"];
  const kind = strategy => strategy.split("-")[0];
  const rows = [...grid.tBodies[0].rows];
  const heads = [...at("issues").cells].slice(1), groups = [...at("groups").cells].slice(1);
  const columnsOf = data.issues.map(() => []);
  data.columns.forEach(([issue], number) => columnsOf[issue].push(number));
  const issueTexts = data.issues.map(i => [i.id, i.title, i.wrong, ...i.upstream].join(" ").toLowerCase());
  const cellTexts = data.cells.map(cell =>
    [cell.id, cell.name, ...Object.entries(cell.versions).map(pair => pair.join(" "))].join(" ").toLowerCase());
  let subject = 0, shown = null, focused = null, opener = null;

  // ---- what the table shows

  const wrongIn = (cell, number) => cell.wrong !== undefined && number in cell.wrong;

  function numbers(cell, issue, whose, strategy) {
    return columnsOf[issue].filter(number => data.columns[number][1] === whose && cell.verdicts[number] !== "." &&
      (!strategy || kind(data.columns[number][2]) === strategy));
  }

  function fits(cell, found, verdict) {
    if (!verdict) return found.length > 0;
    return found.some(number => verdict === "wrong" ? wrongIn(cell, number)
      : verdict === "changed" ? (cell.changed || []).includes(number)
      : verdict === "problem" ? data.verdicts[rank.get(cell.verdicts[number])].problem
      : named(verdict).letter === cell.verdicts[number]);
  }

  function update() {
    const { trainer, strategy, verdict } = values(), words = values().search.toLowerCase().split(/\s+/).filter(Boolean);
    const filtered = Boolean(verdict || words.length || strategy);
    const matched = data.cells.map(() => new Array(data.issues.length).fill(false));
    const rowShown = data.cells.map(() => false), columnShown = data.issues.map(() => false);
    data.cells.forEach((cell, row) => {
      if (!ofVersion(cell)) return;
      data.issues.forEach((issue, column) => {
        if (trainer === "any" ? issue.trainer : trainer && issue.trainer && issue.trainer !== trainer) return;
        const found = numbers(cell, column, subject, strategy);
        if (!words.every(word => issueTexts[column].includes(word) || cellTexts[row].includes(word))) return;
        // Without a filter also what has no verdict is shown: a cell that was not finished.
        if (filtered ? !fits(cell, found, verdict) : false) return;
        matched[row][column] = rowShown[row] = columnShown[column] = true;
      });
    });
    let problems = 0;
    data.cells.forEach((cell, row) => {
      rows[row].hidden = !rowShown[row];
      data.issues.forEach((issue, column) => {
        const square = rows[row].cells[column + 1];
        square.hidden = !columnShown[column];
        if (square.hidden || !rowShown[row]) return;
        const found = numbers(cell, column, subject, strategy);
        const worst = found.length ? data.verdicts[Math.min(...found.map(n => rank.get(cell.verdicts[n])))] : null;
        const wrong = found.some(number => wrongIn(cell, number));
        const classes = [worst ? worst.name : "", wrong ? "wrong" : "", matched[row][column] ? "" : "other"];
        square.className = classes.filter(Boolean).join(" ");
        square.textContent = worst ? worst.letter : "";
        const verdictText = worst ? worst.name + (wrong ? ", not as predicted" : "") : "no verdict";
        square.setAttribute("aria-label", `${issue.id}, ${cell.name}: ${verdictText}`);
        if (matched[row][column] && worst && worst.problem) problems += 1;
      });
    });
    heads.forEach((head, column) => { head.hidden = !columnShown[column]; });
    for (const group of groups) {
      const size = data.issues.filter((i, n) => i.trainer === group.dataset.trainer && columnShown[n]).length;
      group.hidden = !size;
      if (size) group.colSpan = size;
    }
    const count = shownOnes => shownOnes.filter(Boolean).length;
    at("count").textContent = `${count(rowShown)} of ${data.cells.length} cells, ${count(columnShown)} of ` +
      `${data.issues.length} issues, ${problems} problems`;
    at("nothing").hidden = rowShown.some(Boolean);
    grid.hidden = !rowShown.some(Boolean);
    at("subject").setAttribute("aria-checked", String(subject === 1));
    grid.setAttribute("aria-label",
      `Known issues by cells, for ${subject ? "the corrected trainers" : "TRL's own trainers"}`);
    keepOneTabStop();
  }

  function ofVersion(cell) {
    const { package: name, version } = values();
    return !name || (version ? cell.versions[name] === version : name in cell.versions);
  }

  function values() {
    return Object.fromEntries(Object.entries(fields).map(([name, field]) => [name, field.value.trim()]));
  }

  // ---- what stands behind a square, a row or a column

  function element(tag, content = [], properties = {}) {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...[content].flat().filter(part => part !== null));
    return made;
  }

  function tag(letter) {
    const verdict = data.verdicts[rank.get(letter)];
    return element("span", [element("b", verdict.letter), ` ${verdict.name}`], { className: `tag ${verdict.name}` });
  }

  function pairs(entries) {
    return element("dl", entries.filter(([, value]) => value && value.length !== 0)
      .flatMap(([name, value]) => [element("dt", name), element("dd", value)]));
  }

  function link(url, text) {
    return /^https?:\/\//.test(url) ? element("a", text, { href: url, rel: "noreferrer" }) : text;
  }

  function about(issue) {
    const upstream = issue.upstream.flatMap((url, number) =>
      [number ? ", " : "", link(url, url.replace("https://github.com/", ""))]);
    // The pages of a checkout are Markdown, those of the site that is built from it are HTML.
    const checkout = location.protocol === "file:" && !location.pathname.includes("/build/");
    const page = data.published && issue.title
      ? element("a", "numbers, boundaries and cure", { href: `../issues/${issue.id}.${checkout ? "md" : "html"}` }) : null;
    return [element("p", issue.title), pairs([["What is wrong", issue.wrong], ["What to do", issue.remedy],
      ["Needs no cure from", issue.cured_in || (issue.title ? "no release yet" : "")], ["Upstream", upstream],
      ["With another torch", issue.torch.map(text => element("p", text))], ["More", page]])];
  }

  function versions(cell) {
    const text = Object.entries(cell.versions).map(([name, version]) => `${name} ${version}`).join(", ");
    return [["Cell", cell.id], ["Stack", text], ["As of", cell.date],
      ["State", cell.state === "tested" ? "" : `${cell.state}: ${cell.reason}`]];
  }

  const unpacked = new Map();

  async function unpack(row) {
    if (!unpacked.has(row)) {
      const bytes = Uint8Array.from(atob(at(`evidence-${row}`).textContent), letter => letter.charCodeAt(0));
      const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
      unpacked.set(row, JSON.parse(await new Response(stream).text()));
    }
    return unpacked.get(row);
  }

  async function evidence(row, use) {
    if (data.published) return;
    const wanted = shown;
    try {
      const found = await unpack(row);
      if (shown === wanted) use(found);
    } catch (error) {
      at("panel-body").append(element("p", `The evidence cannot be unpacked (${error}); compat.json has it too.`));
    }
  }

  function standsSince(cell, number) {
    for (const [text, length] of cell.since || []) {
      if (number < length) return data.since[text];
      number -= length;
    }
    return "";
  }

  function verdictsOf(row, column, body) {
    const cell = data.cells[row], articles = new Map();
    [subject, 1 - subject].forEach(whose => {
      const found = numbers(cell, column, whose, "");
      if (!found.length) return;
      found.sort((one, other) => rank.get(cell.verdicts[one]) - rank.get(cell.verdicts[other]));
      body.append(element("h3", whose ? "The corrected trainers" : "TRL's own trainers"));
      for (const number of found) {
        const wrong = wrongIn(cell, number)
          ? ` not as predicted: ${cell.wrong[number] ? `predicted ${cell.wrong[number]}` : "nothing was predicted"}` : "";
        const since = standsSince(cell, number);
        const article = element("article", [tag(cell.verdicts[number]), ` ${data.columns[number][2]}`,
          element("b", wrong), since ? element("small", ` ${since} `) : null, " "]);
        articles.set(String(number), article);
        body.append(article);
      }
    });
    evidence(row, found => {
      for (const [number, article] of articles) {
        const facts = found.evidence[number];
        const predicted = facts.expected ? `predicted ${facts.expected}, ` : "";
        article.append(element("small", `${predicted}${facts.seconds} s`));
        if (facts.text) article.append(element("pre", facts.text));
      }
    });
  }

  function listOf(entries) {
    return element("div", entries.map(([text, target]) =>
      element("button", text, { type: "button", onclick: () => open(target) })), { className: "items" });
  }

  function worstOnes(body, squares) {
    for (const verdict of data.verdicts.filter(each => each.problem)) {
      const found = squares.filter(([row, column]) => {
        const ranks = numbers(data.cells[row], column, subject, "").map(n => rank.get(data.cells[row].verdicts[n]));
        return ranks.length && data.verdicts[Math.min(...ranks)] === verdict;
      });
      if (!found.length) continue;
      body.append(element("h3", [tag(verdict.letter), ` ${found.length}`]),
        listOf(found.map(([row, column, text]) => [text, `${data.cells[row].id}~${data.issues[column].id}`])));
    }
  }

  // A target is CELL~ISSUE, with one of them empty for all of a row or a column.
  function open(target, focus = true) {
    const [cellId, issueId] = target.split("~");
    const row = data.cells.findIndex(cell => cell.id === cellId);
    const column = data.issues.findIndex(issue => issue.id === issueId);
    if (row < 0 && column < 0) return close();
    shown = target;
    const body = at("panel-body");
    body.replaceChildren();
    at("panel-title").textContent = issueId || data.cells[row].name;
    const cell = row >= 0 ? pairs(versions(data.cells[row])) : null;
    const [title, facts] = column >= 0 ? about(data.issues[column]) : [null, null];
    if (cell && facts) {
      body.append(title);
      verdictsOf(row, column, body);
      body.append(element("h3", "The issue"), facts, element("h3", "The cell"), cell);
    } else if (cell) {
      body.append(cell);
      worstOnes(body, data.issues.map((issue, number) => [row, number, issue.id]));
      evidence(row, found => body.append(element("details", [element("summary", "All packages"),
        element("pre", Object.entries(found.packages).map(pair => pair.join("==")).join("\n"))])));
    } else {
      body.append(title, facts);
      worstOnes(body, data.cells.map((cell, number) => [number, column, cell.name]));
    }
    panel.hidden = false;
    panel.scrollTop = 0;
    document.body.classList.add("open");
    for (const old of grid.querySelectorAll(".selected")) old.classList.remove("selected");
    const square = squareOf(row, column);
    if (square && !square.hidden) {
      square.classList.add("selected");
      reveal(square);
    }
    if (focus) at("panel-title").focus({ preventScroll: true });
    write();
    return undefined;
  }

  function close() {
    if (panel.hidden) return;
    panel.hidden = true;
    document.body.classList.remove("open");
    shown = null;
    for (const old of grid.querySelectorAll(".selected")) old.classList.remove("selected");
    if (opener && !opener.hidden) opener.focus();
    write();
  }

  // ---- the keyboard: one stop of the Tab key, arrows within the grid

  function squareOf(row, column) {
    return row < 0 ? heads[column] : rows[row].cells[column + 1];
  }

  function placeOf(square) {
    const row = rows.indexOf(square.parentElement);
    return { row, column: square.cellIndex - 1 };
  }

  function keepOneTabStop() {
    if (!focused || focused.hidden || focused.parentElement.hidden) {
      const row = rows.find(each => !each.hidden);
      focusable(row ? [...row.cells].slice(1).find(each => !each.hidden) : null);
    }
  }

  function focusable(square) {
    if (focused) focused.tabIndex = -1;
    focused = square;
    if (square) square.tabIndex = 0;
  }

  function move(square, key, whole) {
    const visibleRows = [at("issues"), ...rows.filter(row => !row.hidden)];
    const cells = row => [...row.cells].filter(cell => !cell.hidden);
    let row = visibleRows.indexOf(square.parentElement), column = cells(square.parentElement).indexOf(square);
    const last = { row: visibleRows.length - 1, column: cells(square.parentElement).length - 1 };
    if (key === "ArrowUp") row -= 1;
    else if (key === "ArrowDown") row += 1;
    else if (key === "ArrowLeft") column -= 1;
    else if (key === "ArrowRight") column += 1;
    else if (key === "PageUp") row = Math.max(row - 10, 1);
    else if (key === "PageDown") row += 10;
    else if (key === "Home") [row, column] = [whole ? 1 : row, 0];
    else if (key === "End") [row, column] = [whole ? last.row : row, last.column];
    else return false;
    row = Math.max(0, Math.min(row, last.row));
    column = Math.max(0, Math.min(column, last.column));
    const target = cells(visibleRows[row])[column];
    if (target.classList.contains("corner")) return true;
    focusable(target);
    target.focus({ preventScroll: true });
    reveal(target);
    return true;
  }

  // Sticky heads hide what the browser takes for visible.
  function reveal(square) {
    const box = at("scroll"), head = at("issues").getBoundingClientRect(), view = box.getBoundingClientRect();
    const side = rows[0].cells[0].getBoundingClientRect(), place = square.getBoundingClientRect();
    if (!square.closest("thead")) {
      if (place.top < head.bottom) box.scrollTop -= head.bottom - place.top;
      else if (place.bottom > view.bottom - 16) box.scrollTop += place.bottom - view.bottom + 16;
    }
    if (square.cellIndex > 0) {
      if (place.left < side.right) box.scrollLeft -= side.right - place.left;
      else if (place.right > view.right - 16) box.scrollLeft += place.right - view.right + 16;
    }
  }

  function activate(square) {
    const { row, column } = placeOf(square);
    if (row < 0 && column < 0) return;
    opener = square;
    focusable(square);
    open(`${row < 0 ? "" : data.cells[row].id}~${column < 0 ? "" : data.issues[column].id}`);
  }

  grid.addEventListener("click", event => {
    const square = event.target.closest("tbody th, tbody td, th.issue");
    if (square) activate(square);
  });
  grid.addEventListener("keydown", event => {
    const square = event.target.closest("th, td");
    if (!square || event.altKey || event.metaKey) return;
    const done = event.key === "Enter" || event.key === " " ? (activate(square), true)
      : move(square, event.key, event.ctrlKey);
    if (done) event.preventDefault();
  });
  document.addEventListener("keydown", event => { if (event.key === "Escape") close(); });
  at("close").addEventListener("click", close);

  // ---- the state, in the address

  function write() {
    const state = new URLSearchParams(Object.entries(values()).filter(([, value]) => value));
    if (subject) state.set("subject", subjects[1]);
    if (shown) state.set("at", shown);
    history.replaceState(null, "", `#${state}`);
  }

  function read() {
    const state = new URLSearchParams(location.hash.slice(1));
    subject = state.get("subject") === subjects[1] ? 1 : 0;
    for (const [name, field] of Object.entries(fields)) {
      if (name === "version") offerVersions();
      field.value = state.get(name) || "";
      if (field.selectedIndex === -1) field.value = "";  // an address of another report
    }
    update();
    if (state.get("at")) open(state.get("at"), false);
    else if (!panel.hidden) close();
  }

  function options(field, names) {
    field.append(...names.map(name => element("option", name, { value: name })));
  }

  function offerVersions() {
    const name = fields.package.value;
    const found = new Set(data.cells.map(cell => cell.versions[name]).filter(Boolean));
    const order = new Intl.Collator("en", { numeric: true }).compare;
    fields.version.replaceChildren(element("option", "all", { value: "" }));
    options(fields.version, [...found].sort(order));
    fields.version.disabled = !name;
  }

  options(fields.strategy, [...new Set(data.columns.map(column => kind(column[2])))].sort());
  options(fields.package, [...new Set(data.cells.flatMap(cell => Object.keys(cell.versions)))].sort());
  options(fields.verdict, data.verdicts.map(verdict => verdict.name));
  fields.package.addEventListener("change", offerVersions);
  for (const field of Object.values(fields)) field.addEventListener("input", () => { update(); write(); });
  at("subject").addEventListener("click", () => {
    subject = 1 - subject;
    update();
    if (shown) open(shown, false);
    write();
  });
  function everything() {
    controls.reset();
    offerVersions();
    subject = 0;
    update();
    write();
  }
  controls.addEventListener("submit", event => event.preventDefault());
  at("reset-all").addEventListener("click", everything);
  at("clear").addEventListener("click", everything);
  addEventListener("hashchange", read);
  at("filters").addEventListener("click", event => {
    const button = event.currentTarget;
    button.setAttribute("aria-expanded", String(button.getAttribute("aria-expanded") !== "true"));
  });
  for (const scripted of document.querySelectorAll(".scripted")) scripted.hidden = false;
  read();
})();
